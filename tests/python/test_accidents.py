"""Accidents that have happened to others, by the name under which they were reported, and what
becomes of them here.

Each is re-enacted with real processes and real files. The docstring retells the accident; the test
fails if it could happen to a user of this package.
"""

from __future__ import annotations

import logging
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from accidents import check, files_no_longer_than, half_written, names, state, training

SMALL = 1 << 16
ROUNDS = 6

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def data_files(step: Path) -> list[Path]:
    return [file for file in sorted(step.rglob("*.data")) if file.stat().st_size]


def several_steps(root: Path, count: int) -> None:
    with sw.CheckpointManager(root) as mgr:
        for step in range(count):
            mgr.save(step, state(step, SMALL))


def test_kempnerforge_102_latest_is_always_durable(root: Path) -> None:
    """An asynchronous save moved the ``latest`` link and deleted the older checkpoints as soon as
    it had been *started*. A process that died while it was being written left a ``latest`` without
    metadata, and nothing to go back to."""
    acknowledged = -1
    deleting = 0
    for number in range(ROUNDS):
        with training(root, keep=1) as process:

            def looked(process: Any = process) -> bool:
                committed = process.committed()
                if committed is None:
                    return False
                # At no moment is there no step, and the newest is whole, however little time it has
                # had.
                newest = sw.open(root)
                with newest:
                    assert newest.step >= committed
                    assert newest["updates"] == newest.step
                return half_written(root) and bool(names(root, ".trash-"))

            assert process.watch(looked), process.said
            deleting += bool(names(root, ".trash-")) and half_written(root)
            process.kill()
            acknowledged = max(acknowledged, process.committed() or 0)
        assert sw.verify(root).ok
        newest = sw.metadata(root).step
        assert newest >= acknowledged, f"round {number}: step {acknowledged} was said to be durable"
        check(sw.restore(root), newest)
    assert deleting, "no kill came while a save was half written and older steps were being deleted"


def test_nemo_3261_an_interrupted_save_blocks_nobody(root: Path) -> None:
    """A save that was cut off (wall clock, preemption, out of memory) left a half-written directory
    under the step's own name. The run resumed from the step before and came to that step again. One
    rank found its directory taken and failed, and the others waited permanently. So did every later
    resume."""
    large = 256 << 20
    several_steps(root, 3)
    interrupted = 0
    for _ in range(3):  # the same step, interrupted again and again
        with training(root, keep=2, last=3, nbytes=large) as process:
            if process.watch(lambda: half_written(root)):
                process.kill()
                interrupted += sw.metadata(root).step == 2
        shutil.rmtree(root / "step_00000003", ignore_errors=True)  # it was faster than the kill
    assert interrupted, "no save was interrupted"
    # And a directory under the step's name that holds half of it: a tool of somebody else's, an
    # older run, a copy that was cut off.
    (root / "step_00000003" / "model").mkdir(parents=True)
    (root / "step_00000003" / "model" / "shard-0").write_bytes(b"half of it")
    with training(root, keep=2, last=6) as process:
        said = process.end()
    assert said[0] == "resumed 2"
    assert said[-1] == "done"
    check(sw.restore(root, step=6), 6)
    assert not names(root, ".tmp-"), "what an interrupted save has left is the next writer's to remove"
    (aside,) = names(root, ".quarantine-step_00000003")
    assert (root / aside / "model" / "shard-0").read_bytes() == b"half of it", (
        "somebody else's are not deleted"
    )


def test_metaseq_53_a_checkpoint_of_empty_shards_is_not_last(
    root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A disk ran full while ``checkpoint_last`` was written over: its shards had no bytes, and the
    run could not be started again from it. It was found when somebody tried."""
    several_steps(root, 3)
    with sw.CheckpointManager(root) as mgr:
        with files_no_longer_than(1 << 20), pytest.raises(OSError, match="step 3") as caught:
            mgr.save(3, state(3, 8 << 20)).result()
        assert caught.value.errno
        assert mgr.latest_step() == 2
        assert names(root, ".tmp-") == []
    # The same directory after a copy to a full disk, or a file system that had the names and not
    # yet the bytes at a power cut.
    for file in data_files(root / "step_00000002"):
        file.chmod(0o644)
        file.write_bytes(b"")
    with caplog.at_level(logging.WARNING, "stepwell"), sw.CheckpointManager(root) as mgr:
        assert mgr.latest_step() == 1
        check(mgr.restore(), 1)
        with pytest.raises(sw.CorruptCheckpoint, match=r"00000\.data.*0 bytes"):
            mgr.restore(2)
        assert mgr.next_step() == 2
        mgr.save(2, state(2, SMALL)).result()  # the number is not lost with the step
        check(mgr.restore(), 2)
    assert any("damaged" in record.getMessage() for record in caplog.records), "and it is said"
    assert [checkpoint.step for checkpoint in sw.watch(root, timeout=0)] == [2]


@pytest.mark.parametrize("how", ["cp -r", "cp -a", "tar", "file by file"])
def test_orbax_394_a_copied_checkpoint_is_not_deleted(root: Path, tmp_path: Path, how: str) -> None:
    """What makes a checkpoint valid depended on where it had been written: a commit file on one
    kind of storage, an atomic rename on the other. Checkpoints that were copied from the one to the
    other lacked the file, and were deleted as leftovers of an interrupted save when the next job
    opened the directory."""
    several_steps(root, 3)
    there = tmp_path / "bucket"
    if how.startswith("cp"):
        subprocess.run([*how.split(), str(root), str(there)], check=True)
    elif how == "tar":
        there.mkdir()
        subprocess.run(
            f"tar -C {root} -c . | tar -C {there} -x --no-same-permissions", shell=True, check=True
        )
    else:  # as an uploader: files only, in any order, no times, no modes, no files of the root
        for file in sorted(root.rglob("step_*/**/*"), reverse=True):
            if file.is_file():
                target = there / file.relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(file.read_bytes())
    half = there / "step_00000009"  # one that is still being copied
    shutil.copytree(there / "step_00000001", half, ignore=shutil.ignore_patterns("manifest.json"))
    with sw.CheckpointManager(there, retention=sw.keep_latest(4)) as mgr:
        assert mgr.all_steps() == [0, 1, 2]
        for step in range(3):
            assert sw.verify(there, step=step).ok
            check(mgr.restore(step), step)
        mgr.save(3, state(3, SMALL)).result()
    assert half.is_dir(), "what is not a step is not ours to delete"
    shutil.copytree(root / "step_00000001", tmp_path / "alone")
    check(sw.restore(tmp_path / "alone"), 1)


def test_orbax_605_a_failed_background_save_stops_training(python: Run, root: Path) -> None:
    """An asynchronous save failed, and the main thread went on for days. When the next one was
    saved, removing the step before failed as well, since that had never come to be."""
    script = """
import resource
def limit(nbytes):
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))
mgr = sw.CheckpointManager(sys.argv[1], retention=sw.keep_latest(1))
w = np.zeros(4 << 20, np.uint8)
mgr.save(0, {"w": w}).result()
limit(1 << 20)
trained = []
try:
    for step in range(1, 100):
        save = mgr.save(step, {"w": w})
        trained.append(step)
        while not save.done():      # training takes longer than its saves; nobody asks for their results
            pass
except sw.SaveFailed as error:
    print("stopped after", trained, "by step", str(error).split("step ")[1].split()[0])
limit(resource.RLIM_INFINITY)
if sys.argv[2] == "go on":
    for step in range(2, 5):
        mgr.save(step, {"w": w + np.uint8(step)})
    mgr.close()
else:
    limit(1 << 20)
    mgr.save(5, {"w": w})
"""
    done = python(script, root, "go on")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "stopped after [1] by step 1\n"
    assert names(root, "step_") == ["step_00000004"]
    assert names(root, ".trash-") == names(root, ".tmp-") == []
    assert (sw.restore(root)["w"] == 4).all()
    ended = python(script, root.with_name("other"), "leave")
    assert ended.returncode == 1, "the last save failed, and nobody looked: the scheduler is to know"
    assert "step 5" in ended.stderr


def test_pytorch_144657_changed_cpu_tensors_are_saved_unchanged(root: Path, tmp_path: Path) -> None:
    """``async_save`` moved tensors to the CPU before it wrote them, which copies nothing where they
    are there already. An optimizer that stepped before the writing was over put its new values into
    the checkpoint of the step before."""
    torch = pytest.importorskip("torch", reason="it was torch's tensors that this happened to")
    model = torch.nn.Linear(512, 512)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    average = torch.ones(4 << 20)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(1.0)
    held = {"weight": model.weight.detach(), "bias": model.bias.detach(), "average": average}
    try:
        sw.save(tmp_path / "probe", held)
    except sw.UnsupportedLeaf:  # until the package takes tensors: arrays over the same memory
        held = {name: tensor.numpy() for name, tensor in held.items()}

    def update() -> None:
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        average.add_(1.0)

    with sw.CheckpointManager(root, max_pending=4) as mgr:
        running = 0
        for step in range(5):
            save = mgr.save(step, held)
            running += not save.done()
            update()  # in place, at once, while it is being written
        if not running:
            pytest.skip("every save was over before anything changed: this disk is too fast")
        mgr.wait_until_finished()
        for step in range(5):
            found = mgr.restore(step)
            assert (found["average"] == 1.0 + step).all()
            assert (found["weight"] == 1.0 - step).all()
            assert (found["bias"] == 1.0 - step).all()
    assert float(average[0]) == 6.0


def flip_a_bit(step: Path) -> None:
    file = data_files(step)[0]
    raw = bytearray(file.read_bytes())
    raw[5000] ^= 1  # behind the header: a byte of an array
    file.chmod(0o644)
    file.write_bytes(raw)


def test_marin_5386_damage_costs_only_the_damaged_steps(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Resuming damaged the newest checkpoints, and retention had kept one in ten thousand of those
    before: the next whole one was 8000 steps back. Tools that restarted the run went on writing
    among the damaged ones."""
    retention = sw.keep_latest(3) | sw.keep_every(steps=10)
    with sw.CheckpointManager(root, retention=retention) as mgr:
        for step in range(18):
            mgr.save(step, state(step, SMALL))
        mgr.wait_until_finished()
        assert mgr.all_steps() == [0, 10, 15, 16, 17]
    data_files(root / "step_00000017")[0].unlink()  # visible without reading: skipped
    flip_a_bit(root / "step_00000016")  # invisible: found before a value is returned
    with caplog.at_level(logging.WARNING, "stepwell"), sw.CheckpointManager(root, retention=retention) as mgr:
        assert mgr.latest_step() == 16
        target = {"params": {"w": np.zeros(SMALL // 2, np.uint8)}}
        with pytest.raises(sw.CorruptCheckpoint, match=r"params/w") as caught:
            mgr.restore(into=target)
        assert caught.value.leaf == "params/w"
        assert not target["params"]["w"].any(), "no byte of a damaged block is given out"
        assert not sw.verify(root, step=16).ok
        assert sw.verify(root, step=15).ok
        mgr.rewind(15)  # what the guide says to do; the damaged ones are set aside, and not deleted
        check(mgr.restore(), 15)
        assert mgr.next_step() == 16  # two steps were lost, and not eight thousand
        for step, kept in ((16, [15, 16]), (17, [15, 16, 17]), (18, [16, 17, 18])):
            mgr.save(step, state(step, SMALL)).result()
            mgr.wait_until_finished()
            assert mgr.all_steps() == [0, 10, *kept], "damaged steps are not among those that are counted"
            assert all(sw.verify(root, step=one).ok for one in kept)
    assert any("step=17" in record.getMessage() for record in caplog.records)
    assert names(root, ".branch-"), "what was damaged is still there, for whoever looks into it"


class Unreadable:
    """A part of the state that cannot be read when its turn comes: a device that has gone."""

    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("the device has gone")

    def load_state_dict(self, found: dict[str, Any]) -> None:
        raise AssertionError(found)


def test_burn_5479_a_failed_save_leaves_the_previous_one(python: Run, root: Path, tmp_path: Path) -> None:
    """Saving truncated the file at the path before the tensors had been read. One that could not be
    read failed the save, and what had been saved there before was gone."""
    only = tmp_path / "model"
    sw.save(only, state(1, SMALL))
    with pytest.raises(RuntimeError, match="the device has gone"):
        sw.save(only, {**state(2, SMALL), "late": Unreadable()}, exists="replace")
    with files_no_longer_than(1 << 20), pytest.raises(sw.SaveFailed):
        sw.save(only, state(2, 8 << 20), exists="replace")
    check(sw.restore(only), 1)
    with sw.CheckpointManager(root) as mgr:  # the same for a step of a run
        mgr.save(1, state(1, SMALL)).result()
        with pytest.raises(RuntimeError, match="the device has gone"):
            mgr.save(1, {"late": Unreadable()}, exists="replace")
        with files_no_longer_than(1 << 20), pytest.raises(sw.SaveFailed):
            mgr.save(1, state(2, 8 << 20), exists="replace").result()
        check(mgr.restore(1), 1)
    # Killed instead: the old one or the new one, whole, and never neither.
    script = """
import signal, threading, time
path, delay = sys.argv[1], float(sys.argv[2])
number = sw.restore(path)["updates"]
killer = threading.Thread(target=lambda: (time.sleep(delay), os.kill(os.getpid(), signal.SIGKILL)), daemon=True)
while True:
    number += 1
    half = np.full(8 << 20, number % 251, np.uint8)
    sw.save(path, {"params": {"w": half}, "optimizer": {"m": half.copy()}, "updates": number}, exists="replace")
    if not killer.is_alive():
        killer.start()  # from the first save on, so that a busy machine has one too
"""
    for number in range(5):
        before = sw.restore(only)["updates"]
        assert python(script, only, 0.02 + 0.07 * number).returncode == -9
        found = sw.restore(only)
        check(found, found["updates"])
        assert found["updates"] >= before
    assert sw.restore(only)["updates"] > 1, "no save was ever over before the kill"
    sw.save(only, state(200, SMALL), exists="replace")
    assert [entry.name for entry in tmp_path.iterdir() if entry.name.startswith(".")] == []
