"""Casts and resizes of restored arrays. The engine moves bytes; what changes values happens here, in numpy, before anything of the caller's
is touched."""

from __future__ import annotations

from typing import Any

import numpy as np

from .errors import MismatchError
from .specs import to_dtype


def cast_into(source: np.ndarray[Any, Any], target: np.ndarray[Any, Any], path: str) -> None:
    """Writes ``source`` in another dtype. A finite value that the other dtype has not raises: silently saturated or infinite weights are
    not what anybody asked for."""
    with np.errstate(over="ignore", invalid="ignore"):
        values = source.astype(target.dtype)
        if _lossy(source.dtype, target.dtype):
            _check_range(source, values, path)
    target[...] = values


def _lossy(source: np.dtype[Any], target: np.dtype[Any]) -> bool:
    return source != target


def _is_float(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "fcVW" and not _is_integer(dtype)


def _is_integer(dtype: np.dtype[Any]) -> bool:
    return dtype.kind in "iub" or dtype.name in ("int1", "int2", "int4", "uint1", "uint2", "uint4")


def _check_range(source: np.ndarray[Any, Any], values: np.ndarray[Any, Any], path: str) -> None:
    if source.dtype.kind in "mM" or values.dtype.kind in "mM" or source.size == 0:
        return
    if _is_integer(values.dtype):
        wide = values.astype(np.float64 if _is_float(source.dtype) else np.int64)
        if _is_float(source.dtype):
            original = np.trunc(source.astype(np.float64))
            bad = ~(np.abs(wide - original) < 1)
        elif source.dtype == np.uint64 or values.dtype == np.uint64:
            bad = (source > 2**63 - 1) if values.dtype != np.uint64 else (source < 0)
        else:
            bad = source.astype(np.int64) != wide
    else:
        wider = np.complex128 if source.dtype.kind in "cW" else np.float64
        bad = np.isfinite(source.astype(wider)) & ~np.isfinite(values.astype(wider))
    count = int(np.count_nonzero(bad))
    if count:
        first = tuple(int(i) for i in np.argwhere(np.atleast_1d(bad))[0])
        raise MismatchError(
            f"leaf `{path}`: {count} value(s) do not fit {values.dtype.name} (the first at {first}, "
            f"{np.atleast_1d(source)[first]!s}); keep {source.dtype.name}, or rescale before you save"
        )


def common_box(stored: tuple[int, ...], wanted: tuple[int, ...]) -> tuple[int, ...]:
    """Extent of the part, from the origin, that two shapes share."""
    return tuple(min(a, b) for a, b in zip(stored, wanted, strict=True))


__all__ = ["cast_into", "common_box", "to_dtype"]
