"""Objects that many processes read: pickled once into a file, large arrays beside the rest, which are mapped and not copied."""

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

_ALIGNED = 64
"""Bytes after which an array may begin."""
_HEAD = struct.Struct("<QQ")


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # has no types
    """Takes classes of a notebook along, and tensors as arrays, whose bytes protocol 5 leaves outside."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) is Tensor and value.device.type == "cpu" and value.layout == torch.strided and not value.requires_grad:
            return torch.from_numpy, (value.numpy(),)
        return super().reducer_override(value)


def packed(value: object) -> tuple[memoryview, list[memoryview]]:
    """Return ``value`` as a pickle, and beside it the bytes of its arrays, which are not copied."""
    outside: list[pickle.PickleBuffer] = []
    inside = io.BytesIO()
    _Pickler(inside, protocol=5, buffer_callback=outside.append).dump(value)
    return inside.getbuffer(), [buffer.raw() for buffer in outside]


def place(value: object, path: Path) -> None:
    """Write ``value`` to ``path``, for :func:`placed` to read."""
    inside, arrays = packed(value)
    sizes = struct.pack(f"<{len(arrays)}Q", *(array.nbytes for array in arrays))
    with path.open("wb") as file:
        file.write(_HEAD.pack(len(arrays), inside.nbytes) + sizes + inside)
        for array in arrays:
            file.write(bytes(-file.tell() % _ALIGNED))
            file.write(array)


def placed(path: Path) -> Any:
    """Return what was written to ``path``. Its arrays are those of the file: a page that is written to is copied, for this process."""
    with path.open("rb") as file:
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    count, length = _HEAD.unpack_from(mapped)
    sizes = struct.unpack_from(f"<{count}Q", mapped, _HEAD.size)
    at = _HEAD.size + 8 * count
    inside, at = mapped[at : at + length], at + length
    arrays = []
    for size in sizes:
        at += -at % _ALIGNED
        arrays.append(mapped[at : at + size])
        at += size
    return pickle.loads(inside, buffers=arrays)
