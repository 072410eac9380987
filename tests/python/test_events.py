"""The events of a manager about its saves and restores."""

from __future__ import annotations

import json
import logging
import shutil
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw

STATE = {"params": {"w": np.arange(100_000, dtype=np.float32)}}


def wait_for(condition: Any, seconds: float = 30) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_each_save_and_restore_is_one_line_of_json(tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    root = tmp_path / "run"
    with sw.CheckpointManager(root, save_policy=sw.every_steps(2), on_event=sw.events.JsonLines(log)) as mgr:
        for step in range(4):
            mgr.save(step, STATE)
        mgr.wait_until_finished()
        mgr.restore(2)
        wait_for(lambda: len(log.read_text().splitlines()) == 3)
    events = [json.loads(line) for line in log.read_text().splitlines()]
    saves = [event for event in events if event["event"] == "save"]
    assert [event["step"] for event in saves] == [0, 2], "what the policy refuses is no save"
    for event in saves:
        assert event["root"] == str(root)
        assert event["outcome"] == "committed"
        assert event["error"] is event["error_kind"] is None
        assert event["written_bytes"] >= event["captured_bytes"] >= STATE["params"]["w"].nbytes
        assert event["blocked_seconds"] > 0
        assert 0 < event["commit_seconds"] <= event["total_seconds"]
    (restore,) = [event for event in events if event["event"] == "restore"]
    assert restore["step"] == 2
    assert (restore["outcome"], restore["error"], restore["error_kind"]) == ("restored", None, None)
    assert 0 < restore["open_seconds"] < restore["seconds"]


def test_a_removed_root_is_in_the_event_and_the_error(tmp_path: Path) -> None:
    events: list[Any] = []
    root = tmp_path / "run"
    mgr = sw.CheckpointManager(root, on_event=events.append)
    shutil.rmtree(root)
    save = mgr.save(0, STATE)
    wait_for(lambda: events)
    assert events[0].outcome == "failed"
    assert events[0].error
    with pytest.raises(sw.StepwellError) as caught:
        save.result()
    assert events[0].error_kind == caught.value.kind
    mgr.close()


def test_a_restore_that_fails_is_told_with_the_kind_of_its_error(tmp_path: Path) -> None:
    events: list[Any] = []
    with sw.CheckpointManager(tmp_path / "run", on_event=events.append) as mgr:
        with pytest.raises(sw.StepNotFound):
            mgr.restore()
        mgr.save(3, STATE).result()
        wait_for(lambda: len(events) == 2)
        with pytest.raises(sw.MismatchError) as caught:
            mgr.restore(like={"params": {"other": np.zeros(3)}})
        (tmp_path / "run" / "step_00000003" / "i0" / "00000.data").write_bytes(b"")
        with pytest.raises(sw.StepwellError):
            mgr.restore(3)
    nothing, mismatch, damaged = (event for event in events if isinstance(event, sw.events.RestoreEvent))
    assert (nothing.outcome, nothing.step, nothing.error_kind) == ("failed", None, "step_not_found")
    assert nothing.open_seconds is None
    assert (mismatch.outcome, mismatch.step, mismatch.error_kind) == ("failed", 3, "mismatch")
    assert mismatch.error == str(caught.value)
    assert 0 < mismatch.open_seconds < mismatch.seconds
    assert (damaged.outcome, damaged.step, damaged.error_kind) == ("failed", 3, "corrupt_checkpoint")


def test_a_function_that_raises_is_logged_and_ends_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def bad(event: Any) -> None:
        raise RuntimeError("no dashboard")

    with (
        caplog.at_level(logging.ERROR, "stepwell"),
        sw.CheckpointManager(tmp_path / "run", on_event=bad) as mgr,
    ):
        mgr.save(0, STATE).result()
        mgr.restore()
        wait_for(lambda: "no dashboard" in caplog.text)
    assert sw.open(tmp_path / "run").step == 0


def test_what_is_no_function_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sw.MisuseError, match="on_event"):
        sw.CheckpointManager(tmp_path / "run", on_event="print")  # type: ignore[arg-type]


def test_a_path_save_of_one_of_several_says_what_to_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(sw.MisuseError, match="coordinator=None"):
        sw.save(tmp_path / "one", STATE)
    sw.save(tmp_path / "one", STATE, coordinator=None)
    assert sw.verify(tmp_path / "one").ok


def test_progress_of_a_save_can_be_followed(tmp_path: Path) -> None:
    big = {"w": np.zeros(32 << 20, np.uint8)}
    with sw.CheckpointManager(tmp_path / "run", staging_bytes=16 << 20) as mgr:
        save = mgr.save(0, big)
        stats = save.stats
        assert stats is not None
        assert stats.nbytes >= stats.captured_bytes
        save.result()
        stats = save.stats
        assert stats is not None
        assert stats.written_bytes >= stats.nbytes == stats.captured_bytes


def test_a_step_every_so_many_seconds_stays(tmp_path: Path) -> None:
    rule = sw.keep_every(seconds=3600) | sw.keep_latest(2)
    with sw.CheckpointManager(tmp_path / "run", retention=rule) as mgr:
        for step in range(5):
            mgr.save(step, STATE)
        mgr.wait_until_finished()
        assert mgr.all_steps() == [0, 3, 4]
        assert any("seconds=3600" in reason for reason in mgr.plan_retention()[0].reasons)
    for wrong in ({}, {"steps": 1, "seconds": 1}, {"seconds": 0}, {"seconds": -1}):
        with pytest.raises(sw.MisuseError):
            sw.keep_every(**wrong)
