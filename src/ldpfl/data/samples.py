"""Samples with their targets, as tensors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.data.inputs import Inputs, by_name, each
from ldpfl.data.persons import Names
from ldpfl.data.unscaled import Unscaled
from ldpfl.errors import ConfigError, printable

if TYPE_CHECKING:
    from ldpfl.data.encoder import Encoder


@dataclass(frozen=True)
class Samples:
    """Samples with their targets.

    Attributes:
        inputs: (N, ...) in the type that they have; images are (N, C, H, W) uint8, rows of a table (N, F) float32, texts (N, T) int64.
            Or several such tensors, by name.
        targets: (N, ...) what a task wants to be told of each: a class is int64.
    """

    inputs: Inputs
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def device(self) -> torch.device:
        """Where they are."""
        return self.targets.device

    def take(self, index: Tensor | slice) -> Samples:
        """Return the samples at ``index``."""
        return Samples(each(lambda part: part[index], self.inputs), self.targets[index])

    def at(self, index: Tensor) -> Samples:
        """Return the samples at the places ``index`` (...), each copied as a whole: of images ten times as fast as :meth:`take`."""
        places = index.flatten()

        def rows(part: Tensor) -> Tensor:
            return part.index_select(0, places).view(*index.shape, *part.shape[1:])

        return Samples(each(rows, self.inputs), rows(self.targets))

    def to(self, device: torch.device) -> Samples:
        """Return a copy on ``device``."""
        return Samples(each(lambda part: part.to(device), self.inputs), self.targets.to(device))

    def content(self) -> Iterator[bytes]:
        """Yield the bytes of all values, and of several tensors the names, types and shapes: equal for equal samples alone."""
        for name, part in by_name(self.inputs).items():
            yield f"{name} {part.dtype} {tuple(part.shape)} ".encode() if name else b""
            yield part.contiguous().numpy().tobytes()
        yield self.targets.contiguous().numpy().tobytes()

    @property
    def tensor(self) -> Tensor:
        """The only tensor of inputs.

        Raises:
            ConfigError: there are several.
        """
        if isinstance(self.inputs, Tensor):
            return self.inputs
        raise ConfigError(f"these samples are several tensors ({', '.join(self.inputs)}), and this is for samples of one")


class Owners(NamedTuple):
    """The client and the person of each train sample and of each test sample, as :class:`Dataset` has them."""

    clients: NDArray[np.int64] | None = None
    test_clients: NDArray[np.int64] | None = None
    client_names: tuple[str, ...] = ()
    persons: Names | None = None
    test_persons: Names | None = None


def owners_of(train: Sequence[str], test: Sequence[str] | None) -> Owners:
    """Return the owners of samples by the names of their clients, in the order of these names; clients of ``test`` alone come last."""
    known = sorted(set(train))
    known += sorted(set(test or ()).difference(known))
    places = {name: place for place, name in enumerate(known)}  # not an array of texts, all of which are as wide as the longest
    numbers = [None if own is None else np.array([places[name] for name in own], dtype=np.int64) for own in (train, test)]
    return Owners(numbers[0], numbers[1], tuple(known))


@dataclass(frozen=True)
class Dataset:
    """Train and test samples, and what is public about them.

    Attributes:
        outputs: that a model has for a sample: classes, or 1 for a number; 0 where nobody but its loss knows.
        mean, std: per channel of images, on the scale where pixels lie in [0, 1]; fixed constants of the field, not computed
            from the clients' data at run time. Samples that are no pixels are taken as they are.
        fingerprint: identifies the content.
        clients: for each train sample the client that it belongs to, from 0, where the data say so; else a partition divides them.
        test_clients: for each test sample the client that it belongs to, numbered likewise; None where the data do not say. A client that
            has test samples alone comes after those that train.
        client_names: what each of these clients is called.
        persons: for each train sample the name of its person; None where no person is named.
        test_persons: for each test sample such a name; None where the data do not say.
        identities: (N,) of each train sample a number that nothing but the name of its own file decides, where its place would tell
            what is in others: samples are then divided by these.
        vocabulary: how many tokens there are, where samples are texts; where they are several tensors, of each that holds tokens.
        unscaled: columns that are to be measured before training, see :mod:`ldpfl.data.scaling`.
        shares: share of each class among the train samples, as it was measured; of each label, for several labels.
        classes: what each output stands for, where samples are images and their classes have names.
        unit: of the targets, in their own units.
        notes: what is assumed of the data, for the guarantee to hold.
        encoder: makes inputs of other rows, where samples are rows of a table.
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
    notes: tuple[str, ...] = ()
    encoder: Encoder | None = None

    def tokens(self, name: str = "") -> int | None:
        """Return how many tokens the inputs called ``name`` know, or the only ones; None where they hold none."""
        return self.vocabulary.get(name) if isinstance(self.vocabulary, Mapping) else self.vocabulary

    @property
    def is_scaled(self) -> bool:
        """Whether nothing is left to be measured before training."""
        return not self.unscaled

    def noted(self, *notes: str) -> Dataset:
        """Return the same with more to say about it."""
        return replace(self, notes=(*self.notes, *map(printable, notes)))

    @property
    def shape(self) -> tuple[int, ...]:
        """Of one sample, which is one tensor; of an image: channels, height, width."""
        return tuple(self.train.tensor.shape[1:])


def normalise(inputs: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Turn uint8 pixels (..., C, H, W) into float32 with the given channel ``mean`` and ``std``; other ``inputs`` stay as they are."""
    if inputs.dtype != torch.uint8:
        return inputs
    scale = torch.tensor([1 / (255 * s) for s in std], device=inputs.device).view(-1, 1, 1)
    shift = torch.tensor([m / s for m, s in zip(mean, std, strict=True)], device=inputs.device).view(-1, 1, 1)
    return inputs.float().mul_(scale).sub_(shift)
