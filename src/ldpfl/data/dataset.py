"""A data set: train and test samples, and what is public about them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.data.persons import Names
from ldpfl.data.samples import Samples
from ldpfl.data.unscaled import Unscaled
from ldpfl.errors import printable

if TYPE_CHECKING:
    from ldpfl.data.encoder import Encoder


class Owners(NamedTuple):
    """The client and the person of each train and test sample. :class:`Dataset` describes the fields."""

    clients: NDArray[np.int64] | None = None
    test_clients: NDArray[np.int64] | None = None
    client_names: tuple[str, ...] = ()
    persons: Names | None = None
    test_persons: Names | None = None

    def with_persons(self, names: Sequence[Names] | None, is_test: NDArray[np.bool_]) -> Owners:
        """Return the same clients with persons, by the ``names`` of the samples of each table; unchanged if ``names`` is None.

        ``is_test`` marks test samples of the first table, and none if a second one holds them.
        """
        if names is None:
            return self
        of_first_table, *of_second_table = names
        test = of_second_table[0] if of_second_table else of_first_table[is_test]
        return self._replace(persons=of_first_table[~is_test], test_persons=test if test.size else None)


def number_clients(train: Sequence[str], test: Sequence[str] | None) -> Owners:
    """Number the clients of train and test samples.

    Clients are numbered in the order of their names, those that have only test samples after all others.

    Args:
        train: name of each train sample's client.
        test: name of each test sample's client; None if the test samples have no clients.
    """
    clients = sorted(set(train))
    clients += sorted(set(test or ()).difference(clients))
    number_of = {name: number for number, name in enumerate(clients)}  # np.unique would take the longest name's memory for each sample
    train_numbers = np.array([number_of[name] for name in train], dtype=np.int64)
    test_numbers = None if test is None else np.array([number_of[name] for name in test], dtype=np.int64)
    return Owners(train_numbers, test_numbers, tuple(clients))


@dataclass(frozen=True)
class Dataset:
    """Train and test samples, and what is public about them.

    Attributes:
        outputs: number of outputs of a model for a sample: one for each class, or 1 to predict a number. 0 if only the model's loss knows.
        mean, std: per channel of images, on the scale where pixels lie in [0, 1]; fixed constants of the field, not computed
            from the clients' data at run time. Samples that are not pixels are not normalised.
        fingerprint: hash that identifies the content.
        clients: client of each train sample, from 0; None if the data name no clients, and a partition divides the samples.
        test_clients: client of each test sample, with the same numbers; None if the data do not say. Clients that have test samples
            alone come last.
        client_names: name of each of these clients.
        persons: name of each train sample's person; None if the data name no persons.
        test_persons: name of each test sample's person; None if the data do not say.
        identities: (N,) number of each train sample that depends only on its file's name. Samples that are files are divided by it,
            since a file's position depends on the other files.
        vocabulary: number of tokens if the samples are texts; by input name if they are several tensors. None for other samples.
        unscaled: columns to measure before training, see :mod:`ldpfl.data.scaling`.
        shares: measured share of each class, or of each label, among the train samples.
        classes: names of the classes, if they have names and the data set has no encoder, as with images, or with features of a table.
        unit: size of one unit of the scaled targets, in the targets' original unit.
        unclipped: scaled numeric targets of the train samples without clipping, to score rows that are held back; None for other targets.
        notes: assumptions about the data that the guarantee relies on.
        leaks: columns of a user's own table that give the target away, see :func:`ldpfl.data.leaks.find_leaks`.
        encoder: encodes new rows, if the samples are rows of a table.
    """

    name: str
    train: Samples
    test: Samples
    outputs: int
    mean: tuple[float, ...]
    std: tuple[float, ...]
    fingerprint: str
    clients: NDArray[np.int64] | None = None
    test_clients: NDArray[np.int64] | None = None
    client_names: tuple[str, ...] = ()
    persons: Names | None = None
    test_persons: Names | None = None
    identities: NDArray[np.uint64] | None = None
    vocabulary: int | Mapping[str, int] | None = None
    unscaled: tuple[Unscaled, ...] = ()
    shares: tuple[float, ...] = ()
    classes: tuple[str, ...] = ()
    unit: float = 1.0
    unclipped: Tensor | None = None
    notes: tuple[str, ...] = ()
    leaks: Mapping[str, bool] = field(default_factory=dict)
    encoder: Encoder | None = None

    def tokens(self, name: str = "") -> int | None:
        """Return the vocabulary size of the input tensor ``name``, or of a sample's only tensor; None if it does not hold tokens."""
        return self.vocabulary.get(name) if isinstance(self.vocabulary, Mapping) else self.vocabulary

    @property
    def is_scaled(self) -> bool:
        """Whether no column is left to be measured before training."""
        return not self.unscaled

    def with_notes(self, *notes: str) -> Dataset:
        """Return a copy with further ``notes``. Control characters are spelled out, since notes may quote names from the data."""
        return replace(self, notes=(*self.notes, *map(printable, notes)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of one sample that is a single tensor. For an image: channels, height, width."""
        return tuple(self.train.tensor.shape[1:])
