"""The differences between two values: arrays by element, objects as a whole."""

from __future__ import annotations

import struct
from typing import Any, TypeAlias

import numpy as np

from ._state.specs import is_complex

#: Elements that are compared at a time: wider copies are made of them.
_BLOCK = 1 << 20

#: Values that were read, of any dtype.
Values: TypeAlias = np.ndarray


def alike(one: Any, other: Any) -> bool:  # both of one type, once that was compared
    """True if two objects are the same: of one type, NaN like NaN, containers element by element in
    their order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.generic):
        return bool(one.dtype == other.dtype) and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, complex):
        return alike(one.real, other.real) and alike(one.imag, other.imag)
    return bool(one == other)


def difference(one: Values, other: Values) -> tuple[int, float]:
    """Returns how many elements differ, and by how much at most. Arrays of one dtype are compared
    bit for bit: ``-0.0`` is not ``0.0``, though they differ by 0."""
    a, b = one.reshape(-1), other.reshape(-1)
    blocks = [_difference(a[at : at + _BLOCK], b[at : at + _BLOCK]) for at in range(0, len(a), _BLOCK)]
    # A NaN stays one.
    most = max((most for _, most in blocks), key=lambda one: (one != one, one), default=0.0)
    return sum(count for count, _ in blocks), most


def _difference(a: Values, b: Values) -> tuple[int, float]:
    if a.dtype == b.dtype:
        unlike = _bits(a) != _bits(b)
        if not unlike.any():
            return 0, 0.0
        a, b = a[unlike], b[unlike]
        return len(a), _most(a, b)
    wide_a, wide_b = _wide(a), _wide(b)
    if wide_a.dtype != wide_b.dtype:
        common = np.result_type(wide_a, wide_b)
        wide_a, wide_b = wide_a.astype(common), wide_b.astype(common)
    unlike = (wide_a != wide_b) & ~((wide_a != wide_a) & (wide_b != wide_b))
    if not unlike.any():
        return 0, 0.0
    return int(np.count_nonzero(unlike)), _most(wide_a[unlike], wide_b[unlike])


def _bits(array: Values) -> Values:
    """The bits of each element, as a number or as bytes."""
    size = array.dtype.itemsize
    return np.ascontiguousarray(array).view(f"u{size}" if size in (1, 2, 4, 8) else f"V{size}")


def _wide(array: Values) -> Values:
    """The same numbers in a dtype that numpy computes in: integers stay integers."""
    kind = array.dtype.kind
    if kind in "mM":
        return array.view(np.int64)
    if is_complex(array.dtype):
        return array.astype(np.complex128)
    if kind == "b":
        return array.astype(np.int64)
    if kind in "iu":
        return array if array.dtype == np.uint64 else array.astype(np.int64)
    # The integers of ml_dtypes are small enough to be exact too.
    return array.astype(np.float64)


def _most(one: Values, other: Values) -> float:
    """The largest absolute difference of elements; NaN where one of the two is NaN and the other is
    not."""
    a, b = _wide(one), _wide(other)
    if a.dtype.kind in "iu" and b.dtype == a.dtype:
        # Modulo 2^64 the difference of the larger and the smaller is exact.
        high, low = np.maximum(a, b).view(np.uint64), np.minimum(a, b).view(np.uint64)
        return float((high - low).max())
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(a - b)
    apart[(a != a) & (b != b)] = 0
    apart[a == b] = 0
    return float("nan") if np.isnan(apart).any() else float(apart.max())
