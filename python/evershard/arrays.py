"""Ids and rows as the native module takes them: flat, C-contiguous ``uint64`` and ``float32``.

What has the right layout is passed on as it is, without a copy: numpy arrays of ``uint64`` or ``int64`` ids (a negative
id means its bits as u64) and of ``float32`` values, and CPU tensors of PyTorch, which share their memory with numpy.

Not here: range checks of ids; every 64-bit id is ordinary.
"""

from __future__ import annotations

from typing import Any, Tuple

import numpy as np

__all__ = ["as_ids", "as_rows"]

_MASK = (1 << 64) - 1


def _as_array(value: Any) -> np.ndarray:
    if isinstance(value, np.ndarray):
        return value
    if type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "detach"):
        return value.detach().cpu().numpy()
    return np.asarray(value)


def as_ids(ids: Any) -> Tuple[np.ndarray, Tuple[int, ...]]:
    """Ids of any shape as ``uint64[n]``, and that shape.

    Raises:
        TypeError: the ids are not integers.
    """
    array = _as_array(ids)
    shape = array.shape
    kind = array.dtype.kind
    if kind == "u":
        array = array.astype(np.uint64, order="C", copy=False)
    elif kind == "i":
        array = array.astype(np.int64, order="C", copy=False).view(np.uint64)
    elif array.size == 0:
        array = np.empty(shape, np.uint64)
    elif isinstance(ids, (list, tuple, int)):
        # Python integers that numpy would round to float64: exact, one by one.
        flat = np.asarray(ids, object)
        try:
            values = [_u64(i) for i in flat.reshape(-1)]
        except TypeError:
            raise TypeError("ids must be integers") from None
        array, shape = np.array(values, np.uint64), flat.shape
    else:
        raise TypeError(f"ids must be integers, not {array.dtype}")
    return np.ascontiguousarray(array).reshape(-1), shape


def _u64(value: Any) -> int:
    number = value.__index__() if hasattr(value, "__index__") else None
    if number is None:
        raise TypeError
    if not -(1 << 63) <= number <= _MASK:
        raise OverflowError(f"{number} does not fit 64 bits")
    return number & _MASK


def as_rows(values: Any) -> Tuple[np.ndarray, Tuple[int, ...]]:
    """Rows of any shape as flat ``float32``, and that shape. Other number types are cast.

    Raises:
        TypeError: the values are not numbers.
    """
    array = _as_array(values)
    if array.dtype.kind not in "fiub" and array.size:
        raise TypeError(f"rows must be numbers, not {array.dtype}")
    shape = array.shape
    return np.ascontiguousarray(array, np.float32).reshape(-1), shape
