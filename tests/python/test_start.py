"""A run that goes on from a root or checkpoint of another run or library: ``resume(start=)``."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from ranks import run as run_ranks
from safetensors.numpy import save_file


@pytest.fixture
def old(tmp_path: Path) -> Path:
    """A root as of the Trainer of Hugging Face."""
    for step in (500, 1000):
        place = tmp_path / "old" / f"checkpoint-{step}"
        place.mkdir(parents=True)
        save_file({"w": np.full(4, step, np.float32), "head": np.ones(2)}, place / "model.safetensors")
        (place / "trainer_state.json").write_text("{}")
    return tmp_path / "old"


def state() -> dict[str, Any]:
    return {"model": {"w": np.zeros(4, np.float32), "head": np.zeros(2)}}


def test_a_run_without_steps_goes_on_after_its_start(old: Path, root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        found, first = manager.resume(state(), start=old)
        assert first == 1001
        assert (found["model"]["w"] == 1000).all()
        manager.save(first, {"model": {"w": np.full(4, 7, np.float32), "head": np.ones(2)}})
        manager.wait_until_finished()
    # The next process has steps of its own, and needs the old root no more.
    shutil.rmtree(old)
    with sw.CheckpointManager(root) as manager:
        found, first = manager.resume(state(), start=old)
        assert first == 1002
        assert (found["model"]["w"] == 7).all()


def test_the_keywords_of_a_start_are_for_that_restore_only(old: Path, root: Path) -> None:
    rules = [{"rename": "model/{rest...}", "to": "weights/{rest...}"}]
    for steps in (501, 502):
        with sw.CheckpointManager(root) as manager:
            target = {"weights": {"w": np.zeros(4, np.float32), "new": np.full(3, 5.0)}}
            start = sw.Start(old, 500, map=rules, missing={"weights/new": "keep"}, exclude="weights/head")
            found, first = manager.resume(target, start=start)
            assert first == steps
            assert (found["weights"]["w"] == 500).all()
            assert (found["weights"]["new"] == 5).all()
            manager.save(first, found)


def test_a_start_without_a_number_begins_with_step_0(old: Path, root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        target = {"w": np.zeros(4, np.float32), "head": np.zeros(2)}
        found, first = manager.resume(target, start=old / "checkpoint-500" / "model.safetensors")
        assert first == 0
        assert (found["w"] == 500).all()


def test_a_start_without_a_number_is_step_0_after_deletions(old: Path, root: Path) -> None:
    file = old / "checkpoint-500" / "model.safetensors"
    with sw.CheckpointManager(root) as manager:
        manager.save(4, {"w": np.ones(4)}).result()
        manager.delete(4)
        assert manager.resume({"w": np.zeros(4, np.float32), "head": np.zeros(2)}, start=file)[1] == 0


def test_a_start_may_be_a_root_of_stepwell(tmp_path: Path, root: Path) -> None:
    with sw.CheckpointManager(tmp_path / "first") as manager:
        manager.save(3, {"w": np.ones(4)})
    with sw.CheckpointManager(root) as manager:
        found, first = manager.resume({"w": np.zeros(4)}, start=tmp_path / "first")
        assert first == 4
        assert (found["w"] == 1).all()


def test_a_start_that_cannot_be_restored_is_an_error(old: Path, root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        with pytest.raises(sw.StepNotFound, match="has no elsewhere"):
            manager.resume(state(), start=root.parent / "elsewhere")
        with pytest.raises(sw.StepNotFound, match="has no step 7"):
            manager.resume(state(), start=sw.Start(old, 7))
        target = {"model": {"w": np.zeros(5, np.float32), "head": np.zeros(2)}}
        with pytest.raises(sw.MismatchError, match="model/w"):
            manager.resume(target, start=old)
        assert manager.next_step() == 0
        assert not target["model"]["head"].any()
    with pytest.raises(sw.MisuseError, match=r"like= is for restore\(\)"):
        sw.Start(old, like={})  # type: ignore[call-arg]


def test_ranks_start_together(tmp_path: Path, old: Path, root: Path) -> None:
    script = f"""
    with open_manager() as manager:
        part = np.zeros(2, np.float32)
        target = {{"model": {{"w": sw.sharding.LocalShard(part, (4,), (2 * RANK,))}}}}
        start = sw.Start({str(old)!r}, exclude="model/head")
        target, first = manager.resume(target, start=start)
        assert (part == 1000).all()
        manager.save(first, target).result()
        print(first, manager.all_steps())
    """
    for out in run_ranks(tmp_path, script, 2, root):
        assert out.strip() == "1001 [1001]"
    assert (sw.restore(root)["model"]["w"] == 1000).all()


def test_ranks_with_different_starts_are_refused(tmp_path: Path, old: Path, root: Path) -> None:
    script = f"""
    with open_manager() as manager:
        target = {{"model": {{"w": np.zeros(4, np.float32), "head": np.zeros(2)}}}}
        try:
            manager.resume(target, start=sw.Start({str(old)!r}, 1000 if RANK else 500))
        except sw.MisuseError as error:
            print(error)
        assert not target["model"]["w"].any()
    """
    for out in run_ranks(tmp_path, script, 2, root):
        assert "the ranks start from different checkpoints" in out


def test_a_rank_without_the_start_ends_all(tmp_path: Path, old: Path, root: Path) -> None:
    script = f"""
    with open_manager() as manager:
        target = {{"model": {{"w": np.zeros(4, np.float32), "head": np.zeros(2)}}}}
        try:
            manager.resume(target, start=sw.Start({str(old)!r}, 7 if RANK else None))
        except sw.StepwellError as error:
            print(type(error).__name__, error)
        assert not target["model"]["w"].any()
    """
    first, second = run_ranks(tmp_path, script, 2, root)
    assert "RankFailed" in first
    assert "has no step 7" in first
    assert "StepNotFound" in second
