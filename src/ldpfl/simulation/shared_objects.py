"""Share objects with other processes by a file: a pickle, and beside it the bytes of the arrays, which readers map and do not copy."""

from __future__ import annotations

import io
import mmap
import pickle
import struct
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from torch import Tensor

_ALIGNMENT = 64
"""Each array starts at a multiple of this many bytes, as PyTorch's own memory does."""
_HEADER = struct.Struct("<QQ")
"""Start of a file: the number of arrays, and the number of bytes of the pickle. The size of each array follows, as 8 bytes."""


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # has no types
    """A pickler that also takes classes of a notebook, and treats CPU tensors as arrays, whose bytes protocol 5 keeps out of the pickle."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and value.device.type == "cpu" and value.layout == torch.strided and not value.requires_grad:
            return torch.from_numpy, (value.numpy(),)
        return super().reducer_override(value)


def packed(value: object) -> tuple[memoryview, list[memoryview]]:
    """Return a pickle of ``value`` without the bytes of its arrays, and these bytes for each array. They are not copied."""
    arrays: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    _Pickler(stream, protocol=5, buffer_callback=arrays.append).dump(value)
    return stream.getbuffer(), [array.raw() for array in arrays]


def place(value: object, path: Path) -> None:
    """Write ``value`` to ``path``, for :func:`placed` to read."""
    pickled, arrays = packed(value)
    sizes = struct.pack(f"<{len(arrays)}Q", *(array.nbytes for array in arrays))
    with path.open("wb") as file:
        file.write(_HEADER.pack(len(arrays), pickled.nbytes) + sizes + pickled)
        for array in arrays:
            file.write(bytes(-file.tell() % _ALIGNMENT))
            file.write(array)


def placed(path: Path) -> Any:
    """Return the object that :func:`place` wrote to ``path``. Its arrays are mapped: a page is copied only if this process writes to it."""
    with path.open("rb") as file:
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    count, length = _HEADER.unpack_from(mapped)
    sizes = struct.unpack_from(f"<{count}Q", mapped, _HEADER.size)
    start = _HEADER.size + 8 * count
    pickled, end = mapped[start : start + length], start + length
    arrays = []
    for size in sizes:
        start = end + -end % _ALIGNMENT
        end = start + size
        arrays.append(mapped[start:end])
    return pickle.loads(pickled, buffers=arrays)
