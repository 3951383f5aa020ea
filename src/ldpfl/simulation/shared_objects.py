"""Share objects with other processes by a file: a pickle, and beside it the bytes of the arrays, which readers map and do not copy."""

from __future__ import annotations

import io
import mmap
import pickle
import struct
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import cloudpickle
import torch
from torch import Tensor

from ldpfl.errors import LdpflError, error_without_data
from ldpfl.util.user_code import ModuleSource

_ALIGNMENT = 64
"""Each array starts at a multiple of this many bytes, as PyTorch's own memory does."""
_HEADER = struct.Struct("<QQ")
"""Start of a file: the number of arrays, and the number of bytes of the pickle. The size of each array follows, as 8 bytes."""


class CannotShareError(LdpflError):
    """An object that cannot be sent to another process, or that the other process cannot load."""

    @classmethod
    def because(cls, error: Exception) -> CannotShareError:
        """Return the error for the user. Its text names a missing module. That of ``error`` is not repeated: it may hold private values."""
        missing = error.name if isinstance(error, ImportError) else None
        reason = f"no module {missing}" if missing else error_without_data(error)
        return cls(f"worker processes cannot load the model or the task ({reason})")


class _Pickler(cloudpickle.Pickler):  # type: ignore[misc]  # has no types
    """A pickler for CPU tensors, whose bytes stay out of the pickle, and for classes that other processes do not find by name.

    Protocol 5 keeps the bytes of arrays out of the pickle, so tensors are pickled as arrays. Classes of a notebook are pickled with their
    code. Classes of a user's file are imported from that file.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._sources: dict[str, ModuleSource | None] = {}

    def reducer_override(self, value: Any) -> Any:
        """Return the function that rebuilds ``value``, and its arguments, for the cases that the class's docstring names."""
        if type(value) is Tensor and value.device.type == "cpu" and value.layout == torch.strided and not value.requires_grad:
            return torch.from_numpy, (value.numpy(),)
        if isinstance(value, ModuleType) and (source := self._source(value.__name__)):
            return source.module, ()
        if isinstance(value, type | FunctionType) and (source := self._source(value.__module__)) and _is_found(source, value):
            return source.attribute, (value.__qualname__,)
        return super().reducer_override(value)

    def _source(self, module: str | None) -> ModuleSource | None:
        """Return the file from which other processes load ``module``; None if they find it by its name."""
        if module is None:
            return None
        if module not in self._sources:
            self._sources[module] = ModuleSource.of(module)
        return self._sources[module]


def _is_found(source: ModuleSource, value: type | FunctionType) -> bool:
    """Whether ``value`` is found under its name in its module. A function that a decorator replaced, or a local class, is not."""
    try:
        return source.attribute(value.__qualname__) is value
    except AttributeError:
        return False


def pickle_and_arrays(value: object) -> tuple[memoryview, list[memoryview]]:
    """Return a pickle of ``value`` that lacks the bytes of its arrays, and the bytes of each array, which are not copied.

    Raises:
        CannotShareError: ``value`` cannot be pickled.
    """
    arrays: list[pickle.PickleBuffer] = []
    stream = io.BytesIO()
    try:
        _Pickler(stream, protocol=5, buffer_callback=arrays.append).dump(value)
    except Exception as error:  # users' classes may raise anything
        raise CannotShareError.because(error) from error
    return stream.getbuffer(), [array.raw() for array in arrays]


def write_shared(value: object, path: Path) -> None:
    """Write ``value`` to ``path``, for :func:`read_shared` to read.

    The file has a header, the size of each array, the pickle without the bytes of the arrays, and these arrays.

    Raises:
        CannotShareError: ``value`` cannot be pickled.
    """
    pickled, arrays = pickle_and_arrays(value)
    sizes = struct.pack(f"<{len(arrays)}Q", *(array.nbytes for array in arrays))
    with path.open("wb") as file:
        file.write(_HEADER.pack(len(arrays), pickled.nbytes) + sizes + pickled)
        for array in arrays:
            file.write(bytes(-file.tell() % _ALIGNMENT))  # zeros up to the next multiple, so that readers can map the array in place
            file.write(array)


def read_shared(path: Path) -> Any:
    """Return the object that :func:`write_shared`, which describes the file, wrote to ``path``.

    Its arrays are mapped from the file: a page of memory is copied only if this process writes to it.

    Raises:
        CannotShareError: this process cannot load the object, for example because a module is missing here.
    """
    with path.open("rb") as file:
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY))
    array_count, pickle_bytes = _HEADER.unpack_from(mapped)
    sizes = struct.unpack_from(f"<{array_count}Q", mapped, _HEADER.size)
    start = _HEADER.size + 8 * array_count
    end = start + pickle_bytes
    pickled = mapped[start:end]
    arrays = []
    for size in sizes:
        start = end + -end % _ALIGNMENT  # the next multiple
        end = start + size
        arrays.append(mapped[start:end])
    try:
        return pickle.loads(pickled, buffers=arrays)
    except Exception as error:  # users' modules may raise anything
        raise CannotShareError.because(error) from error
