"""``include=``, ``exclude=`` and ``cast=`` of a save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import stepwell as sw

RNG = np.random.default_rng(3)


def state() -> dict[str, Any]:
    w = RNG.standard_normal((300, 77)).astype(np.float32)
    return {
        "params": {"w": w, "t": RNG.standard_normal((40, 50)).T, "ids": np.arange(3)},
        "optimizer": {
            "m": np.zeros(4, np.float32),
            "count": np.float32(257),
            "handle": object(),
        },
        "layers": [np.ones(2), np.ones(3)],
        "updates": 3,
    }


def test_an_excluded_leaf_may_be_of_any_type(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        with pytest.raises(sw.UnsupportedLeaf, match="optimizer/handle"):
            manager.check(state())
        manager.check(state(), exclude="optimizer/handle")
        manager.save(0, state(), exclude="optimizer/handle")
        manager.save(1, state(), include=["params", "updates"])
        manager.wait_until_finished()
        assert manager.restore(0)["optimizer"].keys() == {"m", "count"}
        assert manager.restore(1).keys() == {"params", "updates"}
        assert manager.metadata(1).items == ("params", ".")


def test_tied_leaves_are_saved_without_the_excluded_one(tmp_path: Path) -> None:
    w = np.arange(6.0)
    sw.save(tmp_path / "c", {"a": {"w": w}, "b": {"w": w}, "c": {"w": w}}, exclude="a")
    with sw.open(tmp_path / "c") as checkpoint:
        assert checkpoint.paths() == ["b/w", "c/w"]
        assert checkpoint.restore()["c"]["w"].tolist() == w.tolist()


def test_a_list_is_saved_whole_or_not_at_all(tmp_path: Path) -> None:
    with pytest.raises(sw.MisuseError, match="a gap in the list `layers`"):
        sw.save(tmp_path / "c", {"layers": state()["layers"]}, exclude=r"layers[0]")
    arrays = {"l": [np.ones(2), np.ones(3)], "t": (np.ones(2), {"w": np.ones(1)})}
    for choice in (
        {"include": "l[0]"},
        {"exclude": "l[1]"},
        {"exclude": "l[*]"},
        {"include": ["l", "t[0]"]},
        {"exclude": "t[1]/w", "include": ["t[0]", "t[1]/*"]},
    ):
        with pytest.raises(sw.MisuseError, match=r"of the 2 elements of the list `[lt]`.*whole list"):
            sw.save(tmp_path / "c", arrays, **choice)
    assert not (tmp_path / "c").exists()
    sw.save(tmp_path / "c", {"layers": state()["layers"], "x": 1}, exclude="layers")
    assert sw.restore(tmp_path / "c") == {"x": 1}
    sw.save(tmp_path / "d", arrays, include=["l[0]", "l[1]"])
    assert len(sw.restore(tmp_path / "d")["l"]) == 2


@pytest.mark.parametrize("choice", [{"include": "parms"}, {"exclude": ["x/**"]}, {"cast": {"w": "float16"}}])
def test_a_glob_that_matches_nothing_is_refused(tmp_path: Path, choice: dict[str, Any]) -> None:
    with pytest.raises(sw.MisuseError, match="matches nothing of this state"):
        sw.save(tmp_path / "c", {"params": {"w": np.ones(3)}}, **choice)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize(
    ("glob", "near"),
    [
        ("parms/**", "`params`"),
        ("params/l/0", "`params/l[0]`"),
        ("params/l/1/w", "`params/l[1]`"),
        ("x", None),
    ],
)
def test_a_glob_that_matches_nothing_gets_near_names(tmp_path: Path, glob: str, near: str | None) -> None:
    layers = {"params": {"l": [{"w": np.ones(3)}, {"w": np.ones(2)}]}, "n": 1}
    message = f"`{glob}` matches nothing of this state"
    with pytest.raises(sw.MisuseError) as refused:
        sw.save(tmp_path / "c", layers, include=["n", glob])
    assert message in str(refused.value)
    assert near is None or near in str(refused.value)
    sw.save(tmp_path / "c", layers)
    if near is not None:
        with pytest.raises(sw.MismatchError, match="near it is") as restored:
            sw.restore(tmp_path / "c", include=glob)
        assert near in str(restored.value)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "float64", "float32"])
def test_a_cast_gives_the_values_that_numpy_gives(tmp_path: Path, dtype: str) -> None:
    given = {"params": state()["params"], "optimizer": {"count": np.float32(257)}}
    given["params"]["special"] = np.array([np.inf, -np.inf, np.nan, -0.0, 1e-41, 65504.0], np.float32)
    sw.save(tmp_path / "c", given, cast=dtype)
    back = sw.restore(tmp_path / "c")
    wanted = np.dtype(getattr(ml_dtypes, dtype, dtype))
    for name in ("w", "t", "special"):
        found = back["params"][name]
        assert found.dtype == wanted
        # As double: one rounding of numpy, whichever way it takes.
        assert np.array_equal(
            found.astype(np.float64),
            given["params"][name].astype(wanted).astype(np.float64),
            equal_nan=True,
        )
    assert back["params"]["ids"].dtype == np.int64
    assert back["optimizer"]["count"] == 257, "what has no dimensions keeps its dtype"


def test_a_cast_by_glob_changes_only_these_leaves(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        save = manager.save(0, state(), include=["params", "optimizer/m"], cast={"params/w": "bfloat16"})
        save.result()
        tree = manager.metadata(0).tree
    assert tree["params"]["w"] == sw.ArraySpec((300, 77), "bfloat16")
    assert tree["params"]["t"] == sw.ArraySpec((50, 40), "float64")
    assert tree["optimizer"]["m"] == sw.ArraySpec((4,), "float32")


def test_a_value_beyond_the_stored_dtype_fails_by_leaf(tmp_path: Path) -> None:
    given = {"params": {"w": np.array([1.0, 70000.0], np.float32)}}
    with pytest.raises(sw.StepwellError, match="too large for float16") as caught:
        sw.save(tmp_path / "c", given, cast="float16")
    assert caught.value.leaf == "params/w"
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("wrong", ["int8", "lossy", 3, {"w": "int32"}, {3: "float16"}])
def test_a_save_casts_between_floats_only(tmp_path: Path, wrong: Any) -> None:
    with pytest.raises(sw.MisuseError, match="cast"):
        sw.save(tmp_path / "c", {"w": np.ones(3)}, cast=wrong)
