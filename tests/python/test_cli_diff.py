"""``stepwell diff``: every difference is found, nothing else is, and memory stays bounded."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import stepwell as sw
from command_line import document, flip_a_bit, make_root, run
from stepwell._cli import comparing
from stepwell._cli.comparing import difference
from stepwell._cli.reading import pieces


def both(tmp_path: Path, a: Any, b: Any) -> tuple[Path, Path]:
    """Two single checkpoints."""
    sw.save(tmp_path / "a", a)
    sw.save(tmp_path / "b", b)
    return tmp_path / "a", tmp_path / "b"


def changes(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the changes by path, without equal leaves."""
    return {
        one["path"]: {key: value for key, value in one.items() if key != "path" and value is not None}
        for one in found["changed"]
    }


def test_a_checkpoint_does_not_differ_from_its_copy(root: Path) -> None:
    make_root(root)
    found = document("diff", f"{root}@10", root / "step_00000010")
    assert found["same"]
    assert found["common_leaves"] == 6
    # Tied leaves are compared once.
    assert found["compared_bytes"] == 48 + 32 + 24
    assert "no difference" in run("diff", f"{root}@10", root / "step_00000010").stdout


def test_differing_values_are_counted(root: Path) -> None:
    make_root(root)
    found = document("diff", f"{root}@0", f"{root}@20", code=1)
    assert changes(found) == {
        "params/w": {"elements": 12, "differing_elements": 12, "max_abs_difference": 20.0},
        "optimizer/m": {"elements": 12, "differing_elements": 12, "max_abs_difference": 20.0},
        "optimizer/count": {"objects": [0, 20]},
    }
    assert not document("diff", f"{root}@0", f"{root}@20", "--no-values")["changed"]


def test_structure_kinds_dtypes_and_shapes_that_differ_are_told(tmp_path: Path) -> None:
    a = {
        "same": np.ones(3),
        "dtype": np.ones(3, np.float32),
        "shape": np.ones(3),
        "kind": [np.ones(1), 2],
        "types": [1, 2],
        "leaf": np.ones(2),
        "gone": {"x": np.ones(1), "y": {"z": 1}},
        "goner": np.ones(1),
    }
    b = {
        "same": np.ones(3),
        "dtype": np.array([1, 1, 1.5], np.float64),
        "shape": np.ones((3, 1)),
        "kind": (np.ones(1), 2),
        "types": (1, 2),
        "leaf": 5,
        "new": [np.ones(1)],
    }
    one, other = both(tmp_path, a, b)
    found = document("diff", one, other, code=1)
    assert changes(found) == {
        "dtype": {
            "dtype": ["float32", "float64"],
            "elements": 3,
            "differing_elements": 1,
            "max_abs_difference": 0.5,
        },
        "shape": {"shape": [[3], [3, 1]]},
        "kind": {"kind": ["list", "tuple"]},
        "types": {"kind": ["list", "tuple"], "objects": [[1, 2], [1, 2]]},
        "leaf": {"kind": ["array", "object"]},
    }
    assert found["only_in_a"] == ["gone/x", "gone/y/z", "goner"]
    assert found["only_in_b"] == ["new[0]"]
    text = run("diff", one, other).stdout
    assert "- gone: only in a, 2 leaves" in text
    assert "- goner: only in a, 1 leaf" in text
    assert "+ new: only in b, 1 leaf" in text
    assert "list → tuple" in text


def test_an_empty_container_that_only_one_has_is_a_difference(tmp_path: Path) -> None:
    one, other = both(tmp_path, {"a": 1, "b": {}}, {"a": 1})
    found = document("diff", one, other, code=1)
    assert not found["same"]
    assert found["only_in_a"] == []
    assert "- b: only in a, 0 leaves" in run("diff", one, other).stdout


@pytest.mark.parametrize(
    ("one", "other", "count", "most"),
    [
        ([0.0, 1.0], [-0.0, 1.0], 1, 0.0),
        ([np.nan, 1.0], [np.nan, 1.0], 0, 0.0),
        ([np.nan, 1.0], [0.0, 1.0], 1, math.nan),
        ([np.inf, 1.0], [-np.inf, 2.0], 2, math.inf),
        ([1.0, 5.0], [1.0, 2.5], 1, 2.5),
    ],
)
def test_floats_of_one_dtype_are_compared_bit_for_bit(
    one: list[float], other: list[float], count: int, most: float
) -> None:
    for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16):
        found = difference(np.array(one, dtype), np.array(other, dtype))
        assert found[0] == count
        assert found[1] == most or (math.isnan(found[1]) and math.isnan(most))


@pytest.mark.parametrize(
    ("one", "other", "count", "most"),
    [
        (np.array([-(2**63), 0]), np.array([2**63 - 1, 0]), 1, float(2**64 - 1)),
        (np.array([2**64 - 1], np.uint64), np.array([0], np.uint64), 1, float(2**64 - 1)),
        (np.array([-128], np.int8), np.array([127], np.int8), 1, 255.0),
        (np.array([True, False]), np.array([False, False]), 1, 1.0),
        (np.array([3 + 4j, 1]), np.array([0, 1], complex), 1, 5.0),
        (np.array([1, -3], ml_dtypes.int4), np.array([1, 4], ml_dtypes.int4), 1, 7.0),
        (np.array(["2024-01-02"], "M8[D]"), np.array(["2024-01-05"], "M8[D]"), 1, 3.0),
        (np.zeros(0), np.zeros(0), 0, 0.0),
        (np.array(1.0), np.array(3.0), 1, 2.0),
        (np.array([1, 2], np.int32), np.array([1.0, 2.5], np.float32), 1, 0.5),
        (np.array([2**53 + 1]), np.array([1], np.uint32), 1, float(2**53)),
        (np.array([1.5], ml_dtypes.bfloat16), np.array([1.5]), 0, 0.0),
    ],
)
def test_numbers_of_every_kind_are_told_apart(
    one: np.ndarray[Any, Any], other: np.ndarray[Any, Any], count: int, most: float
) -> None:
    assert difference(one, other) == (count, most)


def test_objects_differ_by_type_and_value(tmp_path: Path) -> None:
    a = {"nan": math.nan, "zero": 0.0, "one": 1, "list": [1, {"x": 2}], "np": np.float32(1), "set": {1, 2}}
    b = {
        "nan": math.nan,
        "zero": -0.0,
        "one": True,
        "list": [1, {"x": 3}],
        "np": np.float64(1),
        "set": {2, 1},
    }
    found = document("diff", *both(tmp_path, a, b), code=1)
    assert set(changes(found)) == {"zero", "one", "list[1]/x", "np"}


def test_pieces_tile_a_box_in_row_major_order() -> None:
    for shape in [(), (0, 3), (5,), (7, 3, 2), (1, 1000), (4, 1, 9)]:
        whole = np.arange(math.prod(shape)).reshape(shape)
        for limit in (1, 8, 24, 100, 10**6):
            found = []
            for box in pieces(shape, 8, limit):
                part = whole[box]
                assert part.nbytes <= max(limit, 8)
                found.append(part.reshape(-1))
            assert np.array_equal(np.concatenate([np.zeros(0, int), *found]), whole.reshape(-1))


def test_a_large_leaf_is_compared_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(comparing, "PIECE_BYTES", 10_000)
    monkeypatch.setattr(pieces, "__defaults__", (10_000,))
    held: list[int] = []
    read = sw.Checkpoint.read

    def counted(*arguments: Any) -> list[np.ndarray[Any, Any]]:
        arrays = read(*arguments)
        held.append(sum(array.nbytes for array in arrays))
        return arrays

    monkeypatch.setattr(sw.Checkpoint, "read", counted)
    w = np.arange(50_000, dtype=np.float32).reshape(50, 1000)
    v = w.copy()
    v[49, 999] += 8
    v[0, 0] = -1
    small = {f"s{i}": np.full(10, i) for i in range(30)}
    found = document("diff", *both(tmp_path, {"w": w, **small}, {"w": v, **small}), code=1)
    assert changes(found) == {"w": {"elements": 50_000, "differing_elements": 2, "max_abs_difference": 8.0}}
    assert max(held) <= 10_000
    # Small leaves are read many at a time.
    assert len(held) < 2 * (20 + 8)


def test_a_damaged_side_is_told_and_no_difference_is_made_up(root: Path) -> None:
    make_root(root)
    flip_a_bit(root / "step_00000010" / "i0" / "00000.data", 4100)
    found = document("diff", f"{root}@0", f"{root}@10", code=1)
    assert found["error"]["kind"] == "corrupt_checkpoint"
    assert "changed" not in found
