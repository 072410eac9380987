"""``CheckpointManager.adopt``: checkpoints of other libraries as steps of a root."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from command_line import run
from longer import LONG
from safetensors.numpy import save_file

KILLS = 100 if LONG else 10


def state(step: int) -> dict[str, Any]:
    return {"model": {"w": np.full(8, step, np.float32)}, "step": step}


@pytest.fixture
def outputs(tmp_path: Path) -> Path:
    """Steps 100, 200 and 300 as the Trainer writes them, and a save that was killed."""
    for step in (100, 200, 300):
        place = tmp_path / "outputs" / f"checkpoint-{step}"
        place.mkdir(parents=True)
        save_file({"w": np.full(8, step, np.float32)}, place / "model.safetensors")
        (place / "trainer_state.json").write_text(json.dumps({"global_step": step}))
        os.utime(place / "model.safetensors", (step, step))
        os.utime(place / "trainer_state.json", (step, step))
    (tmp_path / "outputs/checkpoint-400").mkdir()
    return tmp_path / "outputs"


@pytest.fixture
def root(tmp_path: Path, outputs: Path) -> Path:
    """A root at step 350 that has adopted the three steps."""
    with sw.CheckpointManager(tmp_path / "run") as mgr:
        mgr.save(350, state(350), metrics={"loss": 3.0})
        for step in (100, 200, 300):
            assert mgr.adopt(outputs, from_step=step, metrics={"loss": 400.0 - step}) == step
    return tmp_path / "run"


def everything(path: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of all files but the checksums."""
    files = [one for one in path.rglob("*") if one.is_file() and "stepwell" not in one.name]
    return {str(one.relative_to(path)): (one.read_bytes(), one.stat().st_mtime_ns) for one in files}


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def weights(restored: Any) -> float:
    values = restored["model"]["w"]
    assert (values == values[0]).all()
    return float(values[0])


def test_an_adopted_checkpoint_is_a_step(root: Path, outputs: Path) -> None:
    with sw.CheckpointManager(root, read_only=True) as mgr:
        assert mgr.all_steps() == [100, 200, 300, 350]
        assert mgr.latest_step() == 350
        assert mgr.best_step("loss", "min") == 350
        assert mgr.best_step("loss", "max") == 100
        for step in (100, 200, 300):
            restored = mgr.restore(step)
            assert weights(restored) == step
            assert restored["trainer_state"] == {"global_step": step}
            facts = mgr.metadata(step)
            assert (facts.step, facts.metrics) == (step, {"loss": 400.0 - step})
            assert facts.committed.timestamp() == step
            assert mgr.plan(step).step == step
        with mgr.checkpoint(200) as checkpoint:
            assert checkpoint.step == 200
            assert checkpoint.path == str(root / "step_00000200")
            assert checkpoint.adopted is not None
            assert checkpoint.adopted.path == str(outputs / "checkpoint-200")
            assert checkpoint.adopted.family == "Hugging Face Trainer"
            assert checkpoint["model/w"][2:4].tolist() == [200.0, 200.0]
        adopted = [row.adopted for row in mgr.inspect()]
        assert [None if one is None else Path(one.path).name for one in adopted] == [
            "checkpoint-100",
            "checkpoint-200",
            "checkpoint-300",
            None,
        ]


def test_functions_on_a_path_follow_an_adopted_step(root: Path, tmp_path: Path) -> None:
    directory = root / "step_00000200"
    for place in ((root, 200), (directory,)):
        assert weights(sw.restore(*place)) == 200
        assert sw.metadata(*place).step == 200
        report = sw.verify(*place)
        assert (report.ok, report.step, report.path) == (True, 200, str(directory))
        assert (report.files, report.unguarded_nbytes) == (2, 0)
        with sw.open(*place) as checkpoint:
            assert checkpoint.manifest["adopted"]["path"] == "../outputs/checkpoint-200"
            assert checkpoint.plan().step == 200
    made = sw.export(root, tmp_path / "out.safetensors", step=200, subtree="model")
    assert made.verified
    assert (sw.restore(tmp_path / "out.safetensors")["w"] == 200).all()
    sw.convert(root, tmp_path / "own", step=200, to="stepwell")
    assert weights(sw.restore(tmp_path / "own")) == 200
    assert sw.metadata(tmp_path / "own").metrics == {"loss": 200.0}
    with sw.open(root, 200) as one:
        assert not one.diff(tmp_path / "own", include="model")
        assert one.diff(root / "step_00000300").changes
    renamed = sw.restore(root, 200, map=[{"rename": "model/{rest...}", "to": "params/{rest...}"}])
    assert (renamed["params"]["w"] == 200).all()
    seen = [one.step for one in sw.watch(root, after=100, timeout=0, which="all")]
    assert seen == [200, 300, 350]
    assert [step.number for step in sw.open_root(root).steps] == [100, 200, 300, 350]


def test_commands_follow_an_adopted_step(root: Path, tmp_path: Path) -> None:
    listed = run("ls", root)
    assert listed.exit_code == 0
    assert listed.stdout.count("adopted from ../outputs/checkpoint-") == 3
    for command in (["show"], ["cat"], ["verify"], ["plan"], ["ls"], ["repair", "-y"]):
        more = ["model/w[:2]"] if command == ["cat"] else []
        shown = run(command[0], f"{root}@200", *command[1:], *more)
        assert shown.exit_code == 0, shown.output
    assert "200., 200." in run("cat", f"{root}@200", "model/w[:2]").stdout
    assert "adopted from" in run("show", f"{root}@200").stdout
    assert run("diff", f"{root}@200", f"{root}@300").exit_code == 1
    assert run("export", f"{root}@200", tmp_path / "x.safetensors", "--subtree", "model").exit_code == 0
    assert run("verify", root, "--all").exit_code == 0
    assert run("report", root, "-o", tmp_path / "report.html").exit_code == 0
    assert run("cp", f"{root}@200", tmp_path / "copy").exit_code == 0
    assert run("rm", root, "200", "-y").exit_code == 0
    assert sw.open_root(tmp_path / "outputs").steps[1].incomplete is None
    assert run("prune", root, "--keep-latest", "1", "-y").exit_code == 0
    with sw.CheckpointManager(root, read_only=True) as mgr:
        assert mgr.all_steps() == [350]


def test_a_command_adopts_steps_of_another_root(tmp_path: Path, outputs: Path) -> None:
    root = tmp_path / "new"
    assert run("adopt", tmp_path / "nothing", "--root", root).exit_code == 1
    assert not root.exists()
    assert run("adopt", f"{outputs}@200", "--root", root, "--step", "7").exit_code == 0
    assert run("adopt", outputs, "--root", root).exit_code == 0
    made = json.loads(run("adopt", outputs, "--root", root, "--all", "--json").stdout)
    assert [step["step"] for step in made["steps"]] == [100, 200]
    assert run("adopt", outputs, "--root", root, "--all").exit_code == 0
    assert run("adopt", outputs, "--root", root).exit_code == 1  # it is there
    assert run("adopt", outputs, "--step", "1").exit_code == 2
    with sw.CheckpointManager(root, read_only=True) as mgr:
        assert mgr.all_steps() == [7, 100, 200, 300]
        assert weights(mgr.restore(7)) == 200


def test_a_run_goes_on_after_an_adopted_step(tmp_path: Path, outputs: Path) -> None:
    with sw.CheckpointManager(tmp_path / "run", retention=2) as mgr:
        mgr.adopt(outputs)
        into = {"model": {"w": np.zeros(8, np.float32)}, "trainer_state": None}
        restored, first = mgr.resume(into)
        assert (weights(restored), first) == (300, 301)
        for step in (400, 500):
            mgr.save(step, state(step)).result()
        assert mgr.all_steps() == [400, 500]
    assert weights(sw.restore(outputs, 300)) == 300


def test_retention_never_changes_adopted_files(root: Path, outputs: Path) -> None:
    before = everything(outputs)
    rules = sw.keep_latest(1) | sw.keep_every(200, items=["model"])
    with sw.CheckpointManager(root, retention=rules) as mgr:
        assert mgr.apply_retention() == [100, 300]
        assert weights(mgr.restore(200)) == 200  # a rule for items keeps it whole
        mgr.delete(200)
        mgr.delete(350)
        assert mgr.all_steps() == []
    assert everything(outputs) == before
    assert sw.adopt(outputs, 100, check=True).ok


def test_the_lease_of_a_reader_keeps_an_adopted_step(root: Path) -> None:
    with sw.CheckpointManager(root, retention=1) as mgr:
        with mgr.checkpoint(100) as checkpoint, sw.open(root, 200) as other:
            assert mgr.apply_retention() == [300]
            with pytest.raises(sw.errors.LockedError):
                mgr.delete(100)
            assert checkpoint["model/w"][0] == 100
            assert other["model/w"][0] == 200
        with mgr.hold(100):
            assert mgr.apply_retention() == [200]
        assert mgr.apply_retention() == [100]


def test_an_adopted_step_takes_part_in_rewinds_and_metrics(root: Path, outputs: Path) -> None:
    sw.add_metrics(root, 200, {"accuracy": 0.5})
    with sw.CheckpointManager(root) as mgr:
        assert mgr.best_step("accuracy", "max") == 200
        assert mgr.metadata(200).metrics == {"loss": 200.0, "accuracy": 0.5}
        moved = mgr.rewind(200, "old")
        assert list(moved) == [350, 300]
        assert mgr.latest_step() == 200
        aside = next(root.glob(".branch-old.*300"))
        assert weights(sw.restore(aside)) == 300
        mgr.save(250, state(250)).result()
        mgr.delete_branch("old")
    assert weights(sw.restore(outputs, 300)) == 300


def test_newest_intact_passes_over_changed_files(root: Path, outputs: Path) -> None:
    with sw.CheckpointManager(root) as mgr:
        mgr.delete(350)
        flip(outputs / "checkpoint-300/model.safetensors", -4)
        with pytest.raises(sw.CorruptCheckpoint) as failure:
            mgr.restore(300)
        assert failure.value.file == str(outputs / "checkpoint-300/model.safetensors")
        assert failure.value.step == 300
        assert weights(mgr.restore(fallback=True)) == 200
        flip(outputs / "checkpoint-200/trainer_state.json", 3)  # which is read when it is opened
        with pytest.raises(sw.CorruptCheckpoint, match=r"step 200 was adopted from .*checkpoint-200"):
            mgr.restore(200)
        assert weights(mgr.restore(fallback=True)) == 100
        into = {"model": {"w": np.zeros(8, np.float32)}, "trainer_state": None}
        assert mgr.resume(into, fallback=True)[1] == 101
    assert weights(sw.restore(root, fallback=True)) == 100


def test_a_verification_reports_changed_files(root: Path, outputs: Path) -> None:
    flip(outputs / "checkpoint-300/model.safetensors", -4)
    flip(outputs / "checkpoint-200/trainer_state.json", 3)
    shutil.rmtree(outputs / "checkpoint-100")
    for step, file in ((300, "model.safetensors"), (200, "trainer_state.json"), (100, "checkpoint-100")):
        report = sw.verify(root, step)
        assert [Path(damage.file).name for damage in report.damages] == [file]
        assert (report.step, report.path) == (step, str(root / f"step_{step:08}"))
    assert run("verify", root, "--all").exit_code == 1


def test_files_that_are_gone_make_a_damaged_step(root: Path, outputs: Path) -> None:
    os.rename(outputs / "checkpoint-300", outputs / "gone")
    with sw.CheckpointManager(root, retention=2) as mgr:
        mgr.delete(350)
        assert mgr.latest_step() == 200
        assert weights(mgr.restore()) == 200
        with pytest.raises(
            sw.CorruptCheckpoint, match=r"step 300 was adopted from .*checkpoint-300.*Move it back"
        ):
            mgr.restore(300)
        row = next(row for row in mgr.inspect() if row.step == 300)
        assert row.damage is not None
        assert "are missing" in row.damage
        assert mgr.apply_retention() == []  # it does not count as one of the two
        os.rename(outputs / "gone", outputs / "checkpoint-300")
        assert mgr.apply_retention() == [100]
        assert weights(mgr.restore(300)) == 300
    assert run("ls", root).exit_code == 0


def test_checksums_that_were_replaced_are_an_error(root: Path, outputs: Path) -> None:
    save_file({"w": np.zeros(8, np.float32)}, outputs / "checkpoint-300/model.safetensors")
    sw.adopt(outputs, 300, replace=True)
    with pytest.raises(sw.CorruptCheckpoint, match="are missing or were replaced"):
        sw.restore(root, 300)
    with sw.CheckpointManager(root) as mgr:
        mgr.delete(300)
        mgr.adopt(outputs, from_step=300)
        assert weights(mgr.restore(300)) == 0
        os.unlink(outputs / "checkpoint-300/.stepwell-checksums")
        assert "are missing" in str(mgr.inspect()[2].damage)
        with pytest.raises(sw.CorruptCheckpoint, match="none were found"):
            mgr.restore(300)


def test_files_that_are_added_later_do_no_harm(root: Path, outputs: Path) -> None:
    (outputs / "checkpoint-300/README.md").write_text("added")
    assert weights(sw.restore(root, 300)) == 300
    assert sw.adopt(outputs, 300).files == 3
    assert weights(sw.restore(root, 300)) == 300
    assert sw.inspect(root)[2].damage is None
    report = sw.verify(root, 300)
    assert (report.ok, report.files) == (True, 3)


def test_a_root_and_its_files_move_together(root: Path, tmp_path: Path) -> None:
    os.mkdir(tmp_path / "elsewhere")
    for name in ("run", "outputs"):
        os.rename(tmp_path / name, tmp_path / "elsewhere" / name)
    assert weights(sw.restore(tmp_path / "elsewhere/run", 100)) == 100
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere/run")
    assert weights(sw.restore(tmp_path / "link", 100)) == 100
    assert run("verify", tmp_path / "link", "--all").exit_code == 0


def test_files_elsewhere_have_an_absolute_path(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    save_file({"w": np.ones(3)}, tmp_path / "a/x.safetensors")
    with sw.CheckpointManager(tmp_path / "b/run") as mgr:
        assert mgr.adopt(tmp_path / "a/x.safetensors", 5) == 5
        with mgr.checkpoint(5) as checkpoint:
            assert checkpoint.manifest["adopted"]["path"] == str(tmp_path / "a/x.safetensors")
            assert checkpoint.manifest["adopted"]["bytes"] == os.path.getsize(tmp_path / "a/x.safetensors")
    os.rename(tmp_path / "b/run", tmp_path / "run")
    assert (sw.restore(tmp_path / "run")["w"] == 1).all()


def test_files_may_be_in_the_root(tmp_path: Path) -> None:
    with sw.CheckpointManager(tmp_path / "run") as mgr:
        save_file({"w": np.ones(3)}, tmp_path / "run/base.safetensors")
        mgr.adopt(tmp_path / "run/base.safetensors", 0, custom_metadata={"from": "base"})
        assert mgr.metadata().custom_metadata == {"from": "base"}
    os.rename(tmp_path / "run", tmp_path / "moved")
    with sw.CheckpointManager(tmp_path / "moved") as mgr:
        assert (mgr.restore()["w"] == 1).all()


def test_the_path_of_a_step_means_all_of_it(tmp_path: Path, outputs: Path) -> None:
    with sw.CheckpointManager(tmp_path / "run") as mgr:
        assert mgr.adopt(outputs / "checkpoint-200") == 200
        assert mgr.restore(200).keys() == {"model", "trainer_state"}
        assert mgr.adopt(outputs / "checkpoint-200/model.safetensors", 1) == 1
        assert mgr.restore(1).keys() == {"w"}


@pytest.mark.parametrize(
    ("adopt", "error", "text"),
    [
        (lambda mgr, at: mgr.adopt(at / "outputs", 350), sw.StepExists, "a step 350 already. Pass another"),
        (lambda mgr, at: mgr.adopt(at / "outputs", from_step=7), sw.StepNotFound, "has no step 7"),
        (lambda mgr, at: mgr.adopt(at / "outputs", from_step=400), sw.CorruptCheckpoint, "not finished"),
        (lambda mgr, at: mgr.adopt(at / "outputs/checkpoint-400"), sw.CorruptCheckpoint, "not finished"),
        (lambda mgr, at: mgr.adopt(at / "run"), sw.MisuseError, "is of stepwell"),
        (lambda mgr, at: mgr.adopt(at / "run/step_00000350"), sw.MisuseError, "is of stepwell"),
        (lambda mgr, at: mgr.adopt(at / "none"), sw.StepNotFound, "no checkpoint of another library"),
        (lambda mgr, at: mgr.adopt(at / "alone.safetensors"), sw.MisuseError, "no number of a step"),
        (lambda mgr, at: mgr.adopt(at / "outputs", -1), sw.MisuseError, "step"),
        (lambda mgr, at: mgr.adopt(at / "outputs", metrics={"x": "y"}), sw.MisuseError, "x"),
        (lambda mgr, at: mgr.adopt(at / "outputs", custom_metadata={1j}), sw.MisuseError, "JSON"),
    ],
)
def test_errors_come_before_anything_is_written(
    tmp_path: Path,
    outputs: Path,
    adopt: Callable[[sw.CheckpointManager, Path], object],
    error: type[Exception],
    text: str,
) -> None:
    save_file({"w": np.ones(3)}, tmp_path / "alone.safetensors")
    with sw.CheckpointManager(tmp_path / "run") as mgr:
        mgr.save(350, state(350)).result()
        with pytest.raises(error, match=text):
            adopt(mgr, tmp_path)
        assert mgr.all_steps() == [350]
    assert not list(tmp_path.rglob("*stepwell-checksums*"))


def test_readers_and_second_writers_do_not_adopt(root: Path, outputs: Path) -> None:
    with sw.CheckpointManager(root, read_only=True) as mgr, pytest.raises(sw.errors.ReadOnlyError):
        mgr.adopt(outputs, 7)
    with sw.CheckpointManager(root) as one:
        with pytest.raises(sw.errors.LockedError):
            sw.CheckpointManager(root)
        with sw.CheckpointManager(root, read_only=True) as reader:
            assert one.adopt(outputs, 7) == 7
            assert reader.all_steps() == [7, 100, 200, 300, 350]
            assert weights(reader.restore(7)) == 300


def test_a_copy_of_an_adopted_step_has_its_own_bytes(root: Path, outputs: Path, tmp_path: Path) -> None:
    sw.add_metrics(root, 100, {"accuracy": 0.5})
    with sw.open(root, 100) as checkpoint, sw.CheckpointManager(tmp_path / "other") as mgr:
        checkpoint.copy(tmp_path / "copy", exclude="trainer_state", metrics={"late": 1.0})
        mgr.save(350, state(350)).result()
        mgr.add(checkpoint)
        with pytest.raises(sw.StepExists):
            mgr.add(checkpoint)
        assert mgr.all_steps() == [100, 350]
        mgr.save(400, state(400)).result()
        assert mgr.all_steps() == [100, 350, 400]
    assert run("cp", f"{root}@200", tmp_path / "other").exit_code == 0
    shutil.rmtree(outputs)
    for step, place in ((100, ("other", 100)), (200, ("other", 200))):
        restored = sw.restore(tmp_path / place[0], place[1])
        assert (weights(restored), restored["trainer_state"]) == (step, {"global_step": step})
    facts = sw.metadata(tmp_path / "copy")
    assert (facts.step, facts.metrics) == (100, {"loss": 300.0, "late": 1.0})
    assert sw.restore(tmp_path / "copy").keys() == {"model"}
    assert run("verify", tmp_path / "other", "--all").exit_code == 0
    assert [row.adopted for row in sw.inspect(tmp_path / "other")] == [None] * 4


def test_an_adopted_step_is_exported(root: Path, tmp_path: Path) -> None:
    with sw.CheckpointManager(root) as mgr:
        mgr.delete(350)
    export = sw.Export(tmp_path / "hf" / "{step}", every=100, subtree="model")
    with sw.CheckpointManager(root, exports=[export]) as mgr:
        mgr.wait_for_exports(60)
    assert (sw.restore(tmp_path / "hf/300")["w"] == 300).all()


def test_unverified_files_retire_nothing(root: Path) -> None:
    options = sw.Options(verify_before_retiring=True)
    with sw.CheckpointManager(root, retention=1, options=options) as mgr:
        mgr.delete(350)
        assert mgr.apply_retention() == []
        assert mgr.all_steps() == [100, 200, 300]
        mgr.save(400, state(400)).result()
        mgr.wait_until_finished()
        assert mgr.all_steps() == [400]


def test_a_newer_reader_is_asked_for(root: Path) -> None:
    """A version that does not know adopted files refuses the step, and restores no empty state."""
    manifest = json.loads((root / "step_00000100/manifest.json").read_text().rsplit("\n", 2)[0])
    assert manifest["required_features"] == ["adopted_files"]
    assert not manifest["items"]


SCRIPT = """
import sys, stepwell as sw
mgr = sw.CheckpointManager(sys.argv[1])
sw.open(sys.argv[2]).close()  # which imports what it needs
print(flush=True)
for step in range(1000):
    mgr.adopt(sys.argv[2], step, from_step=100)
    mgr.delete(step)
"""


def test_a_kill_between_the_writes_leaves_checksums(tmp_path: Path, outputs: Path) -> None:
    script = """
import os, signal, sys
import stepwell as sw
from stepwell import _adopt
_adopt.reference = lambda *_: os.kill(os.getpid(), signal.SIGKILL)
sw.CheckpointManager(sys.argv[1]).adopt(sys.argv[2])
"""
    command = [sys.executable, "-c", script, str(tmp_path / "run"), str(outputs)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    assert sw.adopt(outputs, 300, check=True).ok
    with sw.CheckpointManager(tmp_path / "run") as mgr:
        assert mgr.all_steps() == []
        assert mgr.adopt(outputs) == 300
        assert weights(mgr.restore()) == 300


def test_a_killed_adoption_leaves_a_step_or_none(tmp_path: Path, outputs: Path) -> None:
    root, checksums = tmp_path / "run", outputs / "checkpoint-100/.stepwell-checksums"
    before, rng, seen, adopted = everything(outputs), random.Random(0), 0, 0
    for attempt in range(KILLS):
        script = SCRIPT if attempt % 2 else SCRIPT.replace("    mgr.delete(step)\n", "")
        command = [sys.executable, "-c", script, str(root), str(outputs)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL) as child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(rng.random() * 0.2)
            child.send_signal(signal.SIGKILL)
        assert everything(outputs) == before
        adopted += checksums.exists()
        with sw.CheckpointManager(root) as mgr:
            assert mgr.quarantined() == {}
            for step in mgr.all_steps():
                assert weights(mgr.restore(step)) == 100
                seen += 1
                mgr.delete(step)
            number = mgr.adopt(outputs, from_step=100)
            assert weights(mgr.restore(number)) == 100
            mgr.delete(number)
        assert run("gc", root).exit_code == 0
        assert {one.name for one in root.iterdir()} == {".stepwell"}
        checksums.unlink()
    assert seen > 0
    assert adopted > 0
