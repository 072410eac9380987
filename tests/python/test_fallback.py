"""Damage at the newest step: ``restore(fallback=True)``, ``verify`` and ``show``."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from command_line import run
from ranks import run as run_ranks

STEPS = (1, 2, 3)


def flip(file: str) -> Callable[[Path], None]:
    def damage(step: Path) -> None:
        content = bytearray((step / file).read_bytes())
        content[len(content) // 3] ^= 1
        (step / file).write_bytes(content)

    return damage


def empty(step: Path) -> None:
    shutil.rmtree(step)
    step.mkdir()


#: Every kind of damage at the top, and whether a listing shows it.
DAMAGES = {
    "data": flip("i0/00000.data"),
    "index": flip("i0/index"),
    "manifest": flip("manifest.json"),
    "no manifest": lambda step: (step / "manifest.json").unlink(),
    "no data file": lambda step: (step / "i0" / "00000.data").unlink(),
    "short data file": lambda step: (step / "i0" / "00000.data").write_bytes(b"short"),
    "empty directory": empty,
    "a file of that name": lambda step: (shutil.rmtree(step), step.write_bytes(b"x"))[0],
}


def state(step: int) -> dict[str, Any]:
    return {"w": np.full(1000, step, np.float32), "name": f"step {step}"}


def filled(root: Path) -> Path:
    with sw.CheckpointManager(root) as manager:
        for step in STEPS:
            manager.save(step, state(step)).result()
    return root


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return filled(tmp_path / "run")


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("singular", [False, True])
def test_a_restore_falls_back_to_the_newest_intact_step(
    root: Path, damage: str, singular: bool, caplog: pytest.LogCaptureFixture
) -> None:
    DAMAGES[damage](root / "step_00000003")
    into = state(0)
    if singular:
        found, report = sw.restore(root, into=into, fallback=True, return_report=True)
    else:
        with sw.CheckpointManager(root, read_only=True) as manager:
            found, report = manager.restore(into=into, fallback=True, return_report=True)
    assert found["w"] is into["w"]
    assert (found["w"] == 2).all()
    assert found["name"] == "step 2"
    assert [one.step for one in report.passed_over] == [3]


def test_the_error_of_a_damaged_newest_step_names_fallback(root: Path) -> None:
    DAMAGES["data"](root / "step_00000003")
    with sw.CheckpointManager(root, read_only=True) as manager:
        with pytest.raises(sw.CorruptCheckpoint, match="fallback=True") as caught:
            manager.restore()
        assert caught.value.step == 3
        with pytest.raises(sw.CorruptCheckpoint) as asked_for:
            manager.restore(3)
        assert "fallback" not in str(asked_for.value)


def test_a_fallback_past_every_step_says_what_it_tried(root: Path) -> None:
    for step in STEPS:
        DAMAGES["data"](root / f"step_{step:08}")
    reader = sw.CheckpointManager(root, read_only=True)
    with reader, pytest.raises(sw.CorruptCheckpoint, match="tried before: 3, 2"):
        reader.restore(fallback=True)


def test_a_mismatch_is_not_passed_over(root: Path) -> None:
    with sw.CheckpointManager(root, read_only=True) as manager:
        with pytest.raises(sw.MismatchError):
            manager.restore(like={"other": np.zeros(3)}, fallback=True)
        with pytest.raises(sw.MisuseError, match="no step"):
            manager.restore(3, fallback=True)
        with pytest.raises(sw.MisuseError, match="True or False"):
            manager.restore(fallback="yes")
    with pytest.raises(sw.MisuseError, match="pass a root"):
        sw.restore(root / "step_00000003", fallback=True)


def test_training_goes_on_after_a_fallback_and_a_rewind(root: Path) -> None:
    DAMAGES["data"](root / "step_00000003")
    with sw.CheckpointManager(root) as manager:
        assert manager.restore(fallback=True)["name"] == "step 2"
        manager.rewind(2)
        manager.save(3, state(3)).result()
        assert manager.restore()["name"] == "step 3"


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_resumed_run_saves_the_damaged_step_again(
    root: Path, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    DAMAGES[damage](root / "step_00000003")
    with sw.CheckpointManager(root) as manager:
        target, first = manager.resume(state(0), fallback=True)
        assert (target["name"], first) == ("step 2", 3)
        for step in range(first, 6):
            manager.save(step, state(step))
        manager.wait_until_finished()
        assert manager.all_steps() == [1, 2, 3, 4, 5]
        assert manager.restore(3)["name"] == "step 3"
    if damage in ("data", "index"):
        assert [one.name for one in root.iterdir() if one.name.startswith(".branch-")]
        (line,) = [one.getMessage() for one in caplog.records if "into the branch" in one.getMessage()]
        assert "moved 3 of" in line
        assert "goes on from step 2" in line
    assert not [one for one in caplog.records if "rewind" in one.getMessage()]


def test_a_resumed_reader_leaves_damaged_steps_alone(root: Path) -> None:
    DAMAGES["data"](root / "step_00000003")
    with sw.CheckpointManager(root, read_only=True) as manager:
        target, _ = manager.resume(state(0), fallback=True)
        assert target["name"] == "step 2"
        assert manager.all_steps() == [1, 2, 3]


def test_a_resume_without_damage_sets_nothing_aside(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        target, first = manager.resume(state(0), fallback=True)
        assert (target["name"], first) == ("step 3", 4)
        assert manager.all_steps() == [1, 2, 3]
    assert not [one for one in root.iterdir() if one.name.startswith(".branch-")]


def test_resumed_ranks_save_the_damaged_step_again(tmp_path: Path, root: Path) -> None:
    # Rank 1 alone reads the damaged leaf.
    DAMAGES["data"](root / "step_00000003")
    script = """
    with open_manager() as manager:
        target = {"w": np.zeros(1000, np.float32)} if RANK else {"name": ""}
        target, first = manager.resume(target, fallback=True)
        for step in range(first, 6):
            manager.save(step, {"w": np.full(1000, step, np.float32), "name": f"step {step}"})
        manager.wait_until_finished()
        print(first, manager.all_steps())
    """
    for out in run_ranks(tmp_path, script, 2, root):
        assert out.split("\n")[0] == "3 [1, 2, 3, 4, 5]"
    assert len([one for one in root.iterdir() if one.name.startswith(".branch-")]) == 1
    assert sw.restore(root, 3)["name"] == "step 3"


@pytest.mark.parametrize("damage", DAMAGES)
def test_verify_fails_and_show_warns_of_a_broken_newest_step(root: Path, damage: str) -> None:
    assert run("verify", root).exit_code == 0
    DAMAGES[damage](root / "step_00000003")
    assert not sw.verify(root).ok
    verified = run("verify", root)
    assert verified.exit_code == 1
    assert "step_00000003" in verified.output
    shown = run("show", root)
    if damage in ("data", "index"):
        return  # only reading finds it
    assert shown.exit_code == 0
    assert "warning: step_00000003 is newer and cannot be restored" in shown.output
    document = json.loads(run("show", root, "--json").stdout)
    assert "step_00000003" in document["warnings"][0]


def test_retention_verifies_the_newest_step_before_it_deletes(root: Path) -> None:
    options = sw.Options(verify_before_retiring=True)
    with sw.CheckpointManager(root, retention=sw.keep_latest(1), options=options) as manager:
        DAMAGES["data"](root / "step_00000003")
        assert manager._open().apply_retention() == [1]
        assert manager.all_steps() == [2, 3]
        manager.save(4, state(4)).result()
        assert manager.all_steps() == [3, 4]  # a damaged step is never deleted


def test_ranks_fall_back_together(tmp_path: Path, root: Path) -> None:
    # Rank 1 alone reads the damaged leaf.
    DAMAGES["data"](root / "step_00000003")
    script = """
    with open_manager(read_only=True) as manager:
        wanted = ["w"] if RANK else ["name"]
        found, report = manager.restore(include=wanted, fallback=True, return_report=True)
        print(found, report.passed_over[0].step, report.passed_over[0].why[:20])
    """
    first, second = run_ranks(tmp_path, script, 2, root)
    assert "step 2" in first
    assert " 3 " in first
    assert "2." in second
    assert " 3 " in second
