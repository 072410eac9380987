"""Scalars of Python and numpy and arrays without dimensions convert into each other on restore."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import stepwell as sw

STORED: dict[str, list[Any]] = {
    "bool": [True, np.bool_(True), np.array(True)],
    "integer": [5, np.int16(5), np.array(5, np.int32), np.array(5, np.uint8)],
    "float": [0.5, np.float32(0.5), np.array(0.5, np.float16), np.array(0.5, ml_dtypes.bfloat16)],
    "complex": [1 + 2j, np.complex64(1 + 2j), np.array(1 + 2j, np.complex128)],
}


@pytest.mark.parametrize("kind", STORED)
def test_scalars_of_one_kind_convert_in_every_direction(kind: str, tmp_path: Path) -> None:
    for number, stored in enumerate(STORED[kind]):
        path = tmp_path / f"c{number}"
        sw.save(path, {"x": stored, "w": np.ones(3)})
        for wanted in STORED[kind]:
            if isinstance(wanted, np.ndarray) and isinstance(stored, np.ndarray):
                continue  # a cast of arrays
            for how in ("like", "into"):
                x = np.zeros_like(wanted) if isinstance(wanted, np.ndarray) else wanted
                target = {"x": x, "w": np.zeros(3)}
                found, report = sw.restore(path, **{how: target}, return_report=True)
                assert found["x"] == stored
                if isinstance(wanted, np.ndarray):
                    assert found["x"].dtype == wanted.dtype
                    assert found["x"].shape == ()
                    assert how == "like" or found["x"] is target["x"]
                if isinstance(wanted, np.ndarray) is not isinstance(stored, np.ndarray):
                    assert [path for path, *_ in report.cast] == ["x"], (stored, wanted)


@pytest.mark.parametrize(
    ("stored", "wanted"),
    [
        (300, np.array(0, np.uint8)),
        (0.1, np.array(0, np.float32)),
        (1, np.array(0.0)),
        (True, np.array(0)),
        (np.array(1.0), 0),
        (np.array([1]), 0),
        ("1", np.array(0)),
        (np.array(300), np.int8(0)),
    ],
)
def test_a_scalar_that_would_change_is_refused(stored: Any, wanted: Any, tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"x": stored, "w": np.ones(3)})
    target = {"x": wanted, "w": np.zeros(3)}
    with pytest.raises(sw.MismatchError, match="x"):
        sw.restore(tmp_path / "c", into=target)
    assert not target["w"].any(), "nothing was written"


def test_a_type_takes_an_array_of_its_kind(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"x": np.array(7)})
    found = sw.restore(tmp_path / "c", like={"x": int})["x"]
    assert type(found) is int
    assert found == 7
