"""A model's inputs: one tensor, or several by name."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

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
