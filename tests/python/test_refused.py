"""Values that cannot be stored are refused by leaf path, before anything is written."""

from __future__ import annotations

import dataclasses
import enum
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from stepwell import _core


class Unknown:
    pass


class Words(dict[str, int]):
    pass


class Level(int):
    pass


@dataclasses.dataclass
class Holder:
    inner: Any


CASES: list[tuple[Any, str]] = [
    ({"a": {"b": object()}}, "a/b"),
    ({"a": [1, Unknown()]}, "a[1]"),
    ({"a/b": [np.zeros(1), lambda: None]}, "a\\/b[1]"),
    ({"h": Holder({1: int})}, "h/inner[1]"),
    ({"a": np.array([None])}, "a"),
    ({"a": np.array(["x"])}, "a"),
    ({"a": np.array([b"x"])}, "a"),
    ({"a": np.zeros(2, [("x", "f4")])}, "a"),
    ({"a": np.ma.masked_array([1, 2], [True, False])}, "a"),
    ({"a": np.matrix([[1]])}, "a"),
    ({"a": np.zeros(1, "M8")}, "a"),
    ({"a": np.zeros(1, np.longdouble)}, "a"),
    ({"a": {(1, 2): 3}}, "a"),
    ({"a": {True: 3}}, "a"),
    ({"a": {2**70: 3}}, "a"),
    ({"a": {"\udc80": 3}}, "a"),
    ({"a": {1.5: 3}}, "a"),
    ({"a": Words(x=1)}, "a"),
    ({"a": Level(3)}, "a"),
    ({"a": {frozenset([(1, object())])}}, "a"),
    ({"a": sw.ArraySpec((1,), "f4")}, "a"),
    ({"a": sw.AS_STORED}, "a"),
    ({"a": enum.Enum}, "a"),
]


@pytest.mark.parametrize(("state", "path"), CASES, ids=[str(i) for i in range(len(CASES))])
def test_a_leaf_that_cannot_be_stored_is_named(root: Path, state: Any, path: str) -> None:
    with sw.CheckpointManager(root) as manager:
        before = sorted(os.listdir(root))
        with pytest.raises(sw.UnsupportedLeaf) as caught:
            manager.save(0, {"fine": np.zeros(5), **state})
        assert caught.value.leaf == path
        assert caught.value.kind == "unsupported_leaf"
        assert isinstance(caught.value, TypeError)
        assert sorted(os.listdir(root)) == before
        assert manager.all_steps() == []
        manager.save(0, {"fine": np.zeros(5)}).result()


def test_a_container_that_holds_itself_is_refused(tmp_path: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(sw.UnsupportedLeaf, match="`a\\[0\\]`: a cycle: the list at `a` is inside itself"):
        sw.save(tmp_path / "c", {"a": loop})


def test_check_finds_it_at_start_up(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.check({"a": np.zeros(1)})
        with pytest.raises(sw.UnsupportedLeaf):
            manager.check({"a": Unknown()})


def test_check_finds_what_the_engine_would_refuse(root: Path) -> None:
    deep: Any = 1
    for _ in range(5):  # each key is short enough, and the path of all is not
        deep = {"k" * _core.MAX_NAME_BYTES: deep}
    # As many items as there may be, whose names together are more than a manifest holds.
    wide = {f"{number}" + "n" * (_core.MAX_NAME_BYTES - 8): [np.zeros(0)] for number in range(2000)}
    with sw.CheckpointManager(root) as manager:
        for state, what in ((deep, "leaf path"), (wide, "manifest")):
            with pytest.raises(sw.StepwellError, match=what) as saved:
                manager.save(0, state)
            with pytest.raises(type(saved.value), match=what):
                manager.check(state)
        state = {"a": np.zeros(3)}
        manager.check(state)
        assert os.listdir(root) == [".stepwell"]
        manager.save(0, state).result()  # what was checked may be saved
        assert manager.all_steps() == [0]


@pytest.mark.parametrize("step", [-1, 2**63, 1.0, True, "1", None])
def test_a_step_is_a_number_that_fits(root: Path, step: Any) -> None:
    with sw.CheckpointManager(root) as manager, pytest.raises(sw.MisuseError):
        manager.save(step, {})


@pytest.mark.parametrize(
    "metrics", [{"a": "x"}, {1: 2.0}, {"a": np.zeros(2)}, {"a": None}, {"a": 1j}, {"a": True}]
)
def test_metrics_are_real_numbers(root: Path, metrics: Any) -> None:
    with sw.CheckpointManager(root) as manager, pytest.raises(sw.MisuseError):
        manager.save(0, {}, metrics=metrics)


@pytest.mark.parametrize("metadata", [{"a": np.zeros(1)}, {1: 2}, {"a": float("nan")}, {"a": b"x"}])
def test_metadata_is_json(root: Path, metadata: Any) -> None:
    with sw.CheckpointManager(root) as manager, pytest.raises(sw.MisuseError):
        manager.save(0, {}, custom_metadata=metadata)
