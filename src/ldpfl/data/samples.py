"""A model's inputs, samples with their targets, and which client holds which samples."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import overload

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.errors import ConfigError

TOKENS, MASK = "input_ids", "attention_mask"
"""Input names of the models of ``transformers``: tokens (N, T) int64, and a mask (N, T) that is 1 for a token and 0 for padding."""

Inputs = Tensor | Mapping[str, Tensor]
"""A model's inputs: one tensor, or several by the names of the arguments of its ``forward``."""


def map_tensors(transform: Callable[[Tensor], Tensor], inputs: Inputs) -> Inputs:
    """Apply ``transform`` to each tensor of ``inputs``."""
    return transform(inputs) if isinstance(inputs, Tensor) else {name: transform(part) for name, part in inputs.items()}


def tensors_by_name(inputs: Inputs) -> Mapping[str, Tensor]:
    """Return the tensors of ``inputs`` by name. A single tensor has the name ""."""
    return {"": inputs} if isinstance(inputs, Tensor) else inputs


def one_by_one(inputs: Inputs) -> Iterator[Inputs]:
    """Yield each sample of ``inputs`` as a batch of one."""
    for place in range(len(next(iter(tensors_by_name(inputs).values())))):
        yield map_tensors(lambda part: part[place : place + 1], inputs)  # noqa: B023  # called at once


def density_problem(part: Tensor) -> str:
    """Return why ``part`` is not a dense tensor, and how to make it dense. The text follows "inputs are" in a message. "" if dense."""
    if part.is_nested:
        return "a nested tensor, whose samples differ in shape: give them one shape, as torch.nested.to_padded_tensor does"
    if part.is_quantized:
        return f"quantised ({part.dtype}): give .dequantize()"
    if part.layout != torch.strided:
        return f"a tensor of the layout {str(part.layout).removeprefix('torch.')}, expected a dense one: give .to_dense()"
    return "a tensor without values (on the device meta): give one on the CPU" if part.is_meta else ""


@dataclass(frozen=True)
class Samples:
    """Samples with their targets.

    Attributes:
        inputs: one tensor (N, ...), or several by name. Images are (N, C, H, W) uint8, rows of a table (N, F) float32, and texts
            (N, T) int64.
        targets: (N, ...) target of each sample, in the form that the task takes. A class is int64.
    """

    inputs: Inputs
    targets: Tensor

    def __len__(self) -> int:
        return len(self.targets)

    @property
    def device(self) -> torch.device:
        """Device that the samples are on."""
        return self.targets.device

    def take(self, index: Tensor | slice) -> Samples:
        """Return the samples at ``index``."""
        return Samples(map_tensors(lambda part: part[index], self.inputs), self.targets[index])

    def at(self, index: Tensor) -> Samples:
        """Return the samples at ``index`` (...), by copying whole samples. For images this is ten times as fast as :meth:`take`."""
        flat_index = index.flatten()

        def selected(part: Tensor) -> Tensor:
            return part.index_select(0, flat_index).view(*index.shape, *part.shape[1:])

        return Samples(map_tensors(selected, self.inputs), selected(self.targets))

    def to(self, device: torch.device) -> Samples:
        """Return a copy on ``device``."""
        return Samples(map_tensors(lambda part: part.to(device), self.inputs), self.targets.to(device))

    def content(self) -> Iterator[bytes]:
        """Yield bytes that identify the content, for hashing: all values, and the name, type and shape of each tensor that has a name."""
        for name, part in tensors_by_name(self.inputs).items():
            yield f"{name} {part.dtype} {tuple(part.shape)} ".encode() if name else b""
            yield part.contiguous().numpy().tobytes()
        yield self.targets.contiguous().numpy().tobytes()

    @property
    def tensor(self) -> Tensor:
        """Input tensor of samples that have a single one.

        Raises:
            ConfigError: each sample is several tensors.
        """
        if isinstance(self.inputs, Tensor):
            return self.inputs
        raise ConfigError(
            f"each sample has {len(self.inputs)} tensors ({', '.join(self.inputs)}), but public features (data.features), Dataset.shape "
            "and Samples.tensor need samples of a single tensor: join the tensors of each sample into one, or leave data.features out"
        )


def normalise(inputs: Tensor, mean: tuple[float, ...], std: tuple[float, ...]) -> Tensor:
    """Turn uint8 pixels (..., C, H, W) into float32 with the given channel ``mean`` and ``std``; other ``inputs`` stay as they are."""
    if inputs.dtype != torch.uint8:
        return inputs
    # (pixel / 255 - mean) / std as one product and one difference, which work in place
    scale = torch.tensor([1 / (255 * s) for s in std], device=inputs.device).view(-1, 1, 1)
    shift = torch.tensor([m / s for m, s in zip(mean, std, strict=True)], device=inputs.device).view(-1, 1, 1)
    return inputs.float().mul_(scale).sub_(shift)


Places = NDArray[np.int64]
"""Indices of samples."""


@dataclass(frozen=True, eq=False)
class Division(Sequence[Places]):
    """The sample indices of each client. It takes 8 bytes for each sample and 16 for each client.

    Attributes:
        places: (N,) sample indices of all clients.
        starts: (K,) position in ``places`` at which the indices of each of the K clients begin.
        sizes: (K,) number of indices of each client.
    """

    places: Places
    starts: Places
    sizes: Places

    @classmethod
    def of(cls, parts: Sequence[Places]) -> Division:
        """Return the division that gives client i the indices ``parts[i]``."""
        if isinstance(parts, Division):
            return parts
        sizes = np.array([part.size for part in parts], dtype=np.int64)
        places = np.concatenate([np.empty(0, dtype=np.int64), *parts])  # the empty array allows that there are no parts
        return cls(places, np.cumsum(sizes) - sizes, sizes)

    @classmethod
    def equal(cls, places: Places, clients: int) -> Division:
        """Return ``places`` cut into equal parts. The remainder of the division is left out."""
        size = len(places) // clients
        return cls(places[: size * clients], np.arange(clients) * size, np.full(clients, size))

    @classmethod
    def by_owner(cls, owners: Places, clients: int) -> Division:
        """Return the division in which sample i belongs to client ``owners[i]``, or to no client if that is -1."""
        sizes = np.bincount(owners[owners >= 0], minlength=clients)
        without_owner = len(owners) - int(sizes.sum())  # samples of owner -1, which come first in the order
        return cls(owners.argsort(kind="stable"), without_owner + np.cumsum(sizes) - sizes, sizes)

    @classmethod
    def shared(cls, places: Places, clients: int) -> Division:
        """Return the division that gives all ``places`` to every client."""
        return cls(places, np.zeros(clients, dtype=np.int64), np.full(clients, len(places)))

    def __len__(self) -> int:
        return len(self.sizes)

    @overload
    def __getitem__(self, client: int) -> Places: ...
    @overload
    def __getitem__(self, client: slice) -> Division: ...
    def __getitem__(self, client: int | slice) -> Places | Division:
        if isinstance(client, slice):
            return Division(self.places, self.starts[client], self.sizes[client])
        client = range(len(self))[client]  # counts a negative number from the end, and raises an IndexError beyond it
        return self.places[self.starts[client] : self.starts[client] + self.sizes[client]]

    def __iter__(self) -> Iterator[Places]:
        return (self[client] for client in range(len(self)))

    def take(self, clients: Places) -> Division:
        """Return the division that contains only ``clients`` (k,), in their order."""
        table, is_real = self._table(clients)
        sizes = self.sizes[clients]
        return Division(table[is_real], np.cumsum(sizes) - sizes, sizes)

    def table(self) -> tuple[Places, NDArray[np.bool_]]:
        """Return the indices as a table (K, largest size), padded with each client's first index, and a mask of the real entries."""
        return self._table(np.arange(len(self)))

    def _table(self, clients: Places) -> tuple[Places, NDArray[np.bool_]]:
        """Return the rows of :meth:`table` for ``clients`` (k,) alone, padded only to the largest size of these k clients."""
        sizes = self.sizes[clients, None]
        columns = np.arange(int(sizes.max(initial=0)))
        is_real = columns < sizes
        columns = np.where(is_real, columns, 0)  # 0 repeats the client's first index
        indices = np.minimum(self.starts[clients, None] + columns, len(self.places) - 1)  # a last client without samples starts behind them
        return self.places[indices], is_real
