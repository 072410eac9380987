"""``unsupported=``: leaves that cannot be stored are refused, dropped, or converted."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections import namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from ranks import run_forked

Pair = namedtuple("Pair", ["weights", "hook"])


def act() -> None:
    """A function, which no step stores."""


def state() -> dict[str, Any]:
    w = np.arange(6, dtype=np.float32)
    return {
        "params": {"w": w, "hook": act, "tied": w},
        "hyper": {"lr": 0.1, "layers": [np.ones(3), {"width": 8, "act": act}], "acts": [np.ones(2), act]},
        "lock": threading.Lock(),
    }


def test_an_unsupported_leaf_is_refused_by_default(root: Path) -> None:
    with sw.CheckpointManager(root) as mgr:
        for keywords in ({}, {"unsupported": "refuse"}):
            with pytest.raises(sw.UnsupportedLeaf, match="params/hook") as caught:
                mgr.save(0, state(), **keywords)  # type: ignore[arg-type]
            assert caught.value.leaf == "params/hook"
        assert mgr.all_steps() == []


def test_dropped_leaves_are_named_by_log_event_and_step(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    events: list[Any] = []
    dropped = {"params/hook", "hyper/layers[1]/act", "hyper/acts", "lock"}
    with (
        caplog.at_level(logging.WARNING, "stepwell"),
        sw.CheckpointManager(root, on_event=events.append) as mgr,
    ):
        mgr.check(state(), unsupported="drop")
        for step in range(2):
            mgr.save(step, state(), unsupported="drop").result()
        found = mgr.metadata(1)
        restored = mgr.restore(1)
        end = time.monotonic() + 30
        while len(events) < 3:
            assert time.monotonic() < end
            time.sleep(0.01)
    assert set(found.unsupported) == dropped
    assert "function" in found.unsupported["params/hook"]
    assert set(events[0].unsupported) == dropped
    warnings = [one.getMessage() for one in caplog.records if "leave out" in one.getMessage()]
    assert len(warnings) == 1, "of the same leaves once, and not at each save"
    assert all(path in warnings[0] for path in dropped)
    # A list goes with its element. Everything else is there, and tied as before.
    assert list(restored) == ["params", "hyper"]
    assert list(restored["params"]) == ["w", "tied"]
    assert restored["params"]["w"] is restored["params"]["tied"]
    assert restored["hyper"]["layers"][1] == {"width": 8}
    assert list(restored["hyper"]) == ["lr", "layers"]
    assert sw.verify(root).ok
    manifest = json.loads((root / "step_00000001" / "manifest.json").read_text().rsplit("\n", 2)[0])
    assert {one["path"] for one in manifest["unsupported"]} == dropped


def test_a_dropped_leaf_of_a_template_follows_missing(root: Path) -> None:
    with sw.CheckpointManager(root) as mgr:
        mgr.save(0, {"a": np.ones(3), "b": act}, unsupported="drop").result()
        with pytest.raises(sw.MismatchError, match="b"):
            mgr.restore(like={"a": np.zeros(3), "b": np.zeros(2)})
        into = {"a": np.zeros(3), "b": np.full(2, 7.0)}
        mgr.restore(into=into, missing="keep")
    assert into["a"].tolist() == [1, 1, 1]
    assert into["b"].tolist() == [7, 7]


def test_a_function_converts_what_cannot_be_stored(root: Path) -> None:
    asked: list[str] = []

    def convert(path: str, value: object) -> object:
        asked.append(path)
        if path == "lock":
            return {"kind": type(value).__name__, "bits": np.arange(4)}
        return f"{act.__module__}.{act.__qualname__}"

    with sw.CheckpointManager(root) as mgr:
        mgr.save(0, state(), unsupported=convert).result()
        restored = mgr.restore()
        assert mgr.metadata(0).unsupported == {}
    assert asked == ["params/hook", "hyper/layers[1]/act", "hyper/acts[1]", "lock"]
    assert restored["params"]["hook"] == f"{__name__}.act"
    assert restored["hyper"]["acts"][1] == f"{__name__}.act"
    assert restored["lock"]["kind"] == "lock"
    assert restored["lock"]["bits"].tolist() == [0, 1, 2, 3]


def test_what_a_function_returns_must_be_storable(root: Path) -> None:
    asked: list[str] = []

    def convert(path: str, value: object) -> object:
        asked.append(path)
        return {"again": value}

    def fail(path: str, value: object) -> object:
        raise ValueError("no idea")

    with sw.CheckpointManager(root) as mgr:
        with pytest.raises(sw.UnsupportedLeaf, match="params/hook/again") as caught:
            mgr.save(0, state(), unsupported=convert)
        assert asked == ["params/hook"]
        assert any("params/hook" in note for note in caught.value.__notes__)
        with pytest.raises(ValueError, match="no idea") as failed:
            mgr.save(0, state(), unsupported=fail)
        assert any("params/hook" in note for note in failed.value.__notes__)
        assert mgr.all_steps() == []
        mgr.save(0, {"x": 1}).result()


def test_a_container_with_a_bad_key_is_dropped_whole(root: Path) -> None:
    inner = np.ones(4)
    # The dropped one would have held the array that the others are tied to.
    given = {"all": {"bad": {"w": inner, (1, 2): 3}, "good": {"w": inner}, "last": inner}}
    with sw.CheckpointManager(root) as mgr:
        mgr.save(0, given, unsupported="drop").result()
        restored = mgr.restore()["all"]
        assert set(mgr.metadata(0).unsupported) == {"all/bad"}
    assert list(restored) == ["good", "last"]
    assert restored["last"] is restored["good"]["w"]
    assert restored["last"].tolist() == inner.tolist()


def test_a_state_of_nothing_that_can_be_stored_is_refused(root: Path) -> None:
    with sw.CheckpointManager(root) as mgr:
        for nothing in (threading.Lock(), [act], {(1, 2): 3}):
            with pytest.raises(sw.UnsupportedLeaf):
                mgr.save(0, nothing, unsupported="drop")
        with pytest.raises(sw.MisuseError, match="unsupported"):
            mgr.save(0, {"x": 1}, unsupported="skip")  # type: ignore[arg-type]
        mgr.save(0, {"only": act}, unsupported="drop").result()
        assert mgr.restore() == {}


def test_fields_and_other_choices_compose_with_drops(root: Path) -> None:
    given = {"pair": Pair(np.ones(2), act), "out": act, "w": np.ones(2, np.float32)}
    with sw.CheckpointManager(root) as mgr:
        mgr.save(0, given, unsupported="drop", exclude="out", cast={"w": "bfloat16"}).result()
        assert set(mgr.metadata(0).unsupported) == {"pair/hook"}, "what is excluded is not dropped"
        restored = mgr.restore()
    assert str(restored["w"].dtype) == "bfloat16"
    assert restored["pair"].weights.tolist() == [1, 1]


def test_a_save_to_a_path_drops_and_converts(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "stepwell"):
        sw.save(tmp_path / "one", {"a": 1, "f": act}, unsupported="drop")
    assert "f: " in caplog.text
    assert sw.metadata(tmp_path / "one").unsupported.keys() == {"f"}
    sw.save_async(tmp_path / "two", {"f": act}, unsupported=lambda path, value: path).result()
    assert sw.restore(tmp_path / "two") == {"f": "f"}


DROPS = """
import numpy as np
state = {"w": np.ones(3), f"of_{RANK}": print, "hook": print}
with sw.CheckpointManager(ROOT, coordinator=sw.coordinators.SharedDirectory(RANK, WORLD, "job")) as mgr:
    mgr.save(0, state, unsupported="drop").result()
"""


def test_a_step_names_what_any_rank_left_out(tmp_path: Path, root: Path) -> None:
    run_forked(tmp_path, "numpy", DROPS, 2, root)
    assert sw.metadata(root).unsupported.keys() == {"of_0", "of_1", "hook"}
