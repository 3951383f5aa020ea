"""The file with the personal layers of all simulated clients. It holds private values without noise, and only --resume needs it."""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from ldpfl.errors import DataError
from ldpfl.util.files import check_regular, replace_atomically

_VALUES = "personal"


def save_personal(values: Tensor, path: Path) -> None:
    """Write the p personal weights of N clients, ``values`` (N, p), to a file that only its owner may read.

    Errors are as for :func:`ldpfl.util.files.replace_atomically`.
    """
    with replace_atomically(path, 0o600) as temporary:
        save_file({_VALUES: values.contiguous()}, temporary)


def load_personal(path: Path, like: Tensor) -> Tensor:
    """Return the personal layers in a file that :func:`save_personal` wrote. They must be float32, and have the shape of ``like``.

    Raises:
        DataError: the file is missing or damaged.
    """
    try:
        check_regular(path)
        with safe_open(path, framework="pt") as handle:
            header = handle.get_slice(_VALUES)
            if (header.get_dtype(), tuple(header.get_shape())) != ("F32", tuple(like.shape)):
                raise ValueError(f"expected F32 of shape {tuple(like.shape)}, found {header.get_dtype()} of {header.get_shape()}")
            values: Tensor = handle.get_tensor(_VALUES)
    except (SafetensorError, OSError, ValueError) as error:
        advice = "restore the file from a backup, because the run cannot go on without it"
        raise DataError(f"{path} is missing or damaged: {error}; {advice}") from error
    return values
