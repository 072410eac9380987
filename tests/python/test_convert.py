"""Casts: a value arrives as it is, or the leaf is named; nothing wraps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import stepwell as sw
from stepwell._restore.casts import bounds, cast_into

INTEGERS = [
    np.dtype(one)
    for one in (
        bool,
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
        *(getattr(ml_dtypes, name) for name in ("int2", "int4", "uint2", "uint4")),
    )
]
FLOATS = [np.dtype(one) for one in (np.float16, np.float32, np.float64, np.longdouble, ml_dtypes.bfloat16)]


def limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    found = bounds(dtype)
    assert found is not None
    return found


def made(value: float, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """One value of a dtype. Via a wide one: not every dtype is made from a Python number."""
    wide = (
        np.uint64
        if isinstance(value, int) and value > 2**63 - 1
        else np.int64
        if isinstance(value, int)
        else np.float64
    )
    return np.array([0, value], wide).astype(dtype)


@pytest.mark.parametrize("target", INTEGERS, ids=str)
@pytest.mark.parametrize("source", INTEGERS, ids=str)
def test_an_integer_arrives_as_it_is_or_raises(source: np.dtype[Any], target: np.dtype[Any]) -> None:
    least, greatest = limits(target)
    interesting = {
        0,
        1,
        -1,
        least,
        greatest,
        least - 1,
        greatest + 1,
        300,
        70000,
        2**32,
        2**40 + 5,
        *limits(source),
    }
    for value in sorted(interesting):
        if not limits(source)[0] <= value <= limits(source)[1]:
            continue
        array, out = made(value, source), np.zeros(2, target)
        if least <= value <= greatest:
            cast_into(array, out, "w")
            assert int(out[1]) == value
        else:
            with pytest.raises(sw.MismatchError, match=r"leaf `w`: 1 value\(s\) do not fit .* at \(1,\)"):
                cast_into(array, out, "w")
            assert not out.any()


@pytest.mark.parametrize("target", INTEGERS, ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_a_float_becomes_the_integer_towards_zero_or_raises(
    source: np.dtype[Any], target: np.dtype[Any]
) -> None:
    least, greatest = limits(target)
    for value in (
        0.0,
        0.5,
        1.0,
        -1.0,
        1.5,
        100.0,
        60000.0,
        float("inf"),
        float("-inf"),
        float("nan"),
        float(greatest),
        float(greatest) + 1,
        float(least) - 1,
        2.0**63,
        2.0**64,
    ):
        with np.errstate(all="ignore"):
            array, out = made(value, source), np.zeros(2, target)
        stored = float(array[1])
        if stored == stored and abs(stored) != float("inf") and least <= int(stored) <= greatest:
            cast_into(array, out, "w")
            assert int(out[1]) == int(stored)
        else:
            with pytest.raises(sw.MismatchError, match="do not fit"):
                cast_into(array, out, "w")


def test_no_imaginary_part_is_dropped() -> None:
    out = np.zeros(2)
    cast_into(np.array([1 + 0j, 2 + 0j]), out, "w")
    assert out.tolist() == [1, 2]
    with pytest.raises(sw.MismatchError, match="do not fit float64"):
        cast_into(np.array([1 + 0j, 2 + 1j]), out, "w")


def test_a_restore_does_not_wrap_large_unsigned_integers(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"a": np.array([300, 70000, 5], np.uint64)})
    for dtype in ("int8", "uint8", "int16"):
        with pytest.raises(sw.MismatchError, match=f"do not fit {dtype}"):
            sw.restore(tmp_path / "c", like={"a": sw.ArraySpec(None, dtype)}, cast="lossy")
    back = sw.restore(tmp_path / "c", like={"a": sw.ArraySpec(None, "int32")}, cast="lossy")
    assert back["a"].tolist() == [300, 70000, 5]
