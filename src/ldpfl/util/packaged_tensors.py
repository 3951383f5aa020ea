"""Tensors in files of this package."""

from __future__ import annotations

from importlib.resources import as_file, files
from typing import TYPE_CHECKING

from safetensors.torch import load_file

if TYPE_CHECKING:
    from torch import Tensor


def packaged_tensors(package: str, name: str) -> dict[str, Tensor]:
    """Return the tensors of the file ``name``.safetensors in ``package``, as float32."""
    with as_file(files(package).joinpath(f"{name}.safetensors")) as path:
        return {key: tensor.float() for key, tensor in load_file(path).items()}
