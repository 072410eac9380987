"""Casts and resizes of restored arrays. The engine moves bytes; what changes values happens here,
in numpy, before anything of the caller's is touched."""

from __future__ import annotations

from functools import lru_cache

import ml_dtypes
import numpy as np

from .._state.specs import is_complex
from ..errors import MismatchError, at_leaf

_Array = np.ndarray


def cast_into(source: _Array, target: _Array, path: str) -> None:
    """Writes ``source`` in another dtype. A value that the other dtype has not raises: wrapped
    integers, saturated or infinite weights are not what anybody asked for. Fractions and digits may
    go."""
    target[...] = _cast(source, target.dtype, path)


@lru_cache(maxsize=256)
def bounds(dtype: np.dtype) -> tuple[int, int] | None:
    """The least and the greatest value of an integer dtype (truth values are 0 and 1); ``None`` if
    it is none."""
    if dtype.kind == "b":
        return 0, 1
    try:
        info = np.iinfo(dtype) if dtype.kind in "iu" else ml_dtypes.iinfo(dtype)  # type: ignore[no-untyped-call]
    except ValueError:
        return None
    return int(info.min), int(info.max)


def _cast(source: _Array, dtype: np.dtype, path: str) -> _Array:
    if source.dtype == dtype or source.size == 0 or source.dtype.kind in "mM" or dtype.kind in "mM":
        return source.astype(dtype)
    if is_complex(source.dtype) and source.dtype.kind != "c":
        source = source.astype(np.complex64)
    if source.dtype.kind == "c" and not is_complex(dtype):
        _refuse(source, dtype, source.imag != 0, path)
        source = source.real
    limits = bounds(dtype)
    if limits is None:
        with np.errstate(over="ignore", invalid="ignore"):
            values = source.astype(dtype)
            wide = np.complex128 if is_complex(dtype) else np.float64
            lost = np.isfinite(source.astype(wide)) & ~np.isfinite(values.astype(wide))
        _refuse(source, dtype, lost, path)
        return values
    whole = _whole(source, dtype, limits, path)
    return whole if whole.dtype == dtype else whole.astype(dtype)


def _whole(source: _Array, dtype: np.dtype, limits: tuple[int, int], path: str) -> _Array:
    """The values as integers of 64 bits, each of which ``dtype`` has."""
    least, greatest = limits
    own = bounds(source.dtype)
    if own is not None:
        wide = source.astype(np.uint64 if own[1] > np.iinfo(np.int64).max else np.int64)
        # Compared as Python's integers first: a bound that the wide dtype has not cannot be passed
        # either.
        if int(wide.max()) > greatest:
            _refuse(source, dtype, wide > greatest, path)
        if int(wide.min()) < least:
            _refuse(source, dtype, wide < least, path)
        return wide
    # Both bounds are powers of two, or one below: exact as floats, also where the greatest itself
    # is not.
    wide = np.trunc(
        source if source.dtype.kind == "f" and source.dtype.itemsize > 8 else source.astype(np.float64)
    )
    with np.errstate(invalid="ignore"):
        _refuse(source, dtype, ~((wide >= float(least)) & (wide < float(greatest + 1))), path)
    found: np.ndarray = wide.astype(np.uint64 if greatest > np.iinfo(np.int64).max else np.int64)
    return found


def _refuse(source: _Array, dtype: np.dtype, bad: _Array, path: str) -> None:
    count = int(np.count_nonzero(bad))
    if count:
        first = tuple(int(i) for i in np.argwhere(np.atleast_1d(bad))[0])
        raise at_leaf(
            MismatchError,
            path,
            f"{count} value(s) do not fit {dtype.name} (the first at {first}, "
            f"{np.atleast_1d(source)[first]!s}); keep {source.dtype.name}, or rescale before you save",
        )


def common_box(stored: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Extent of the part, from the origin, that two shapes share."""
    return tuple(min(a, b) for a, b in zip(stored, wanted, strict=True))
