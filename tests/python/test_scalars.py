"""Scalars of Python and numpy and arrays without dimensions convert into each other on restore."""

from __future__ import annotations

import datetime
import itertools
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
                    assert [one.path for one in report.cast] == ["x"], (stored, wanted)


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


def test_a_tensor_without_dimensions_takes_a_stored_number(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    sw.save(tmp_path / "c", {"n": 3, "x": 0.5, "b": True})
    target = {"n": torch.zeros((), dtype=torch.int64), "x": torch.zeros(()), "b": torch.tensor(False)}
    found = sw.restore(tmp_path / "c", into=target)
    assert all(found[name] is target[name] for name in target)
    assert [found[name].item() for name in target] == [3, 0.5, True]


def test_a_scalar_of_another_kind_is_shown_with_its_path(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"n": {"step": 3}, "w": np.zeros(2)})
    target = {"n": {"step": np.ones(())}, "w": np.ones(2)}
    with pytest.raises(
        sw.MismatchError, match="n/step: stored is the int 3, wanted is an array of float64\n"
    ) as caught:
        sw.restore(tmp_path / "c", into=target)
    assert caught.value.report.wrong_kind == [
        sw.results.WrongKind("n/step", "the int 3", "an array of float64")
    ]
    assert target["w"].all(), "nothing was written"


PLAIN: dict[str, Any] = {
    "text": "abc",
    "number": 3,
    "fraction": 2.5,
    "complex": 1 + 2j,
    "flag": True,
    "bytes": b"x",
    "list": [1, 2, 3],
    "set": {1},
    "date": datetime.date(2026, 1, 2),
}


@pytest.mark.parametrize("how", ["like", "into"])
def test_a_value_takes_the_place_of_one_of_its_kind(how: str, tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {**PLAIN, "nothing": None})
    for own, stored in itertools.product(PLAIN, PLAIN):
        wanted = {stored: PLAIN[own]}
        alike = own == stored or {own, stored} == {"number", "fraction"}
        if alike or (own == "complex" and stored in ("number", "fraction")):
            found = sw.restore(tmp_path / "c", **{how: wanted})[stored]
            assert found == PLAIN[stored]
            assert type(found) is type(PLAIN[stored])
            continue
        with pytest.raises(sw.MismatchError, match=f"leaf `{stored}`: stored is .*, wanted is") as caught:
            sw.restore(tmp_path / "c", **{how: wanted})
        assert [one.path for one in caught.value.report.wrong_kind] == [stored]
    for name, value in PLAIN.items():
        assert sw.restore(tmp_path / "c", **{how: {name: None}})[name] == value
        assert sw.restore(tmp_path / "c", **{how: {"nothing": value}})["nothing"] is None


def test_a_list_of_plain_values_is_replaced_as_a_whole(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"l": [1, 2, 3], "t": (1, "b")})
    found = sw.restore(tmp_path / "c", into={"l": [0], "t": (0, 0, 0)})
    assert found == {"l": [1, 2, 3], "t": (1, "b")}
    found = sw.restore(tmp_path / "c", into={"l": (0,), "t": [0]})
    assert found == {"l": (1, 2, 3), "t": [1, "b"]}


def test_a_type_takes_an_array_of_its_kind(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"x": np.array(7)})
    found = sw.restore(tmp_path / "c", like={"x": int})["x"]
    assert type(found) is int
    assert found == 7
