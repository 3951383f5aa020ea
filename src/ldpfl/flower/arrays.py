"""Convert between Flower's named arrays and the flat vector that mechanisms randomise; strict in both directions."""

from __future__ import annotations

from collections.abc import Sequence
from io import BytesIO
from math import prod
from typing import Any

import numpy as np
import numpy.lib.format as npy
import torch
from flwr.app import Array, ArrayRecord, MetricRecord, RecordDict
from numpy.typing import NDArray
from torch import Tensor

from ldpfl.errors import PrivacyError
from ldpfl.models.layout import ParameterLayout
from ldpfl.util.number_format import counted

_MAX_SHOWN = 80
"""Maximum number of characters of an array's name in an error. A server may send names, types and shapes of any length."""

_STYPE = "numpy.ndarray"


class OtherArray(PrivacyError):
    """An array has another shape or dtype than expected.

    Attributes:
        got: the shape and dtype of the array. An app may have hidden private values in them, so they are not in the text, which is logged.
    """

    def __init__(self, message: str, got: str) -> None:
        super().__init__(message)
        self.got = got


def to_arrays(weights: Tensor, layout: ParameterLayout) -> ArrayRecord:
    """Return the flat ``weights`` (d,) as named arrays."""
    return ArrayRecord({name: Array(value.numpy()) for name, value in layout.unflatten(weights.cpu()).items()})


def layout_of(arrays: ArrayRecord, order: Sequence[str] | None = None) -> ParameterLayout:
    """Return names and shapes of ``arrays`` as layers, in the order of ``arrays`` or in the given ``order`` of names.

    Raises:
        PrivacyError: no mechanism could protect an array: it is not float32, has no dimension, is empty, or has fewer bytes than its shape
            needs. Or there is no array, or ``order`` names other arrays.
    """
    if not arrays:
        raise PrivacyError("the model has no arrays, expected at least one; nothing was sent")
    for name, array in arrays.items():
        if array.stype != _STYPE or array.dtype != "float32":
            remedy = "convert it to float32, as by model.float()" if "float" in array.dtype else "leave buffers and counters out"
            raise PrivacyError(f"array {name[:_MAX_SHOWN]} is {array.dtype[:16]}, expected float32 from NumPy or PyTorch: {remedy}")
        if not array.shape or min(array.shape) < 1:
            raise PrivacyError(
                f"array {name[:_MAX_SHOWN]} has shape {tuple(array.shape)[:8]}: give it at least one dimension and one value"
            )
        # Memory is allocated by this shape, and whoever sent it may have stated any shape.
        if prod(array.shape) * np.dtype(array.dtype).itemsize > len(array.data):
            raise PrivacyError(
                f"array {name[:_MAX_SHOWN]} has {counted(len(array.data), 'byte')}, fewer than its shape {tuple(array.shape)[:8]} needs: "
                "the code that made it must state the shape that its values have"
            )
    names = tuple(arrays) if order is None else tuple(order)
    if sorted(names) != sorted(arrays):
        raise PrivacyError("the server's arrays have other names than its announced layers: it must use LdpStrategy; nothing was sent")
    return ParameterLayout(names, tuple(tuple(arrays[name].shape) for name in names))


def to_vector(arrays: ArrayRecord, layout: ParameterLayout, dtype: torch.dtype = torch.float32) -> Tensor:
    """Return ``arrays`` as one vector (d,). The arrays must be exactly those of ``layout``, and all of ``dtype``.

    Raises:
        PrivacyError: an array is missing, unknown, or of another shape or dtype, or its bytes cannot be read.
    """
    if set(arrays) != set(layout.names):
        # Only the numbers are shown: names that an app chose may be private.
        missing, unknown = len(set(layout.names) - set(arrays)), len(set(arrays) - set(layout.names))
        raise PrivacyError(f"the app must return arrays with exactly the names that the server sent: {missing} missing, {unknown} unknown")
    numpy_dtype = torch.empty(0, dtype=dtype).numpy().dtype
    # All arrays are read as views before memory is allocated by their shapes.
    values = [_read_array(name, arrays[name], shape, numpy_dtype) for name, shape in zip(layout.names, layout.shapes, strict=True)]
    vector = torch.empty(layout.dimension, dtype=dtype)
    for place, layer in zip(layout.slices.values(), values, strict=True):
        vector.numpy()[place] = layer.reshape(-1)  # writes into `vector`, because its NumPy array shares the memory
    return vector


def _read_array(name: str, array: Array, shape: Sequence[int], dtype: Any) -> NDArray[Any]:
    """Return the values of ``array``, which must have this ``shape`` and ``dtype``."""
    try:
        values = _npy_view(array.data)
    except Exception:  # NumPy's error about unreadable bytes may repeat them
        raise PrivacyError(f"array {name[:_MAX_SHOWN]} cannot be read: make it from a NumPy array by flwr.app.Array") from None
    # The shape and dtype that the record states are not trusted: those of the values count.
    if values.dtype != dtype or values.shape != tuple(shape):
        got = f"{str(values.dtype)[:16]} of shape {values.shape[:8]}"
        raise OtherArray(f"array {name[:_MAX_SHOWN]} must be {dtype} of shape {tuple(shape)[:8]}", got)
    return values


def _npy_view(data: bytes) -> NDArray[Any]:
    """Return a view of the array in ``data``, the bytes of an ``.npy`` file. ``numpy.load`` would copy a model three times."""
    file = BytesIO(data)
    version = npy.read_magic(file)
    if version != (1, 0):
        raise ValueError(f"the .npy header has version {version}, expected (1, 0)")
    shape, fortran, dtype = npy.read_array_header_1_0(file)
    return np.frombuffer(data, dtype, prod(shape), offset=file.tell()).reshape(shape, order="F" if fortran else "C")


def only_arrays(content: RecordDict, allowed: Sequence[str] = ()) -> ArrayRecord:
    """Return the only ArrayRecord of ``content``, which may also hold metrics and the ConfigRecords named in ``allowed``.

    Raises:
        PrivacyError: ``content`` holds no ArrayRecord, several of them, or any other record.
    """
    arrays = list(content.array_records.values())
    if len(arrays) != 1:
        raise PrivacyError(f"the message holds {counted(len(arrays), 'ArrayRecord')}, expected one with all arrays of the model")
    extra = [name for name, record in content.items() if not isinstance(record, ArrayRecord | MetricRecord) and name not in allowed]
    if extra:
        raise PrivacyError(f"the message holds {counted(len(extra), 'other record')}, expected only arrays and metrics: leave them out")
    return arrays[0]
