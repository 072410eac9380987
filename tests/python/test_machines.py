"""A first tier on the local disks of several machines: real processes, real files, a directory for
each machine."""

from __future__ import annotations

import shutil
import signal
import time
from pathlib import Path

import numpy as np
import pytest
import stepwell as sw
from ranks import Ranks, start

#: Each rank has a machine: a directory, and a host name of its own.
_MACHINES = """
import pathlib, socket
MACHINES = sys.argv[5].split(",")
MACHINE = MACHINES[RANK * len(MACHINES) // WORLD]
socket.gethostname = lambda: MACHINE

class Folder:
    rank, world_size, name = RANK, WORLD, sys.argv[4]
    folder = pathlib.Path(ROOT, "board-" + sys.argv[4])

    def at(self, key):
        return self.folder / key.replace("/", "+")

    def put(self, key, message):
        self.folder.mkdir(exist_ok=True)
        new = self.folder / f".new-{RANK}-{time.monotonic_ns()}"
        new.write_bytes(message)
        new.rename(self.at(key))

    def get(self, key):
        try:
            return self.at(key).read_bytes()
        except FileNotFoundError:
            return None

    def remove(self, key):
        self.at(key).unlink(missing_ok=True)

def whole(step):
    return np.arange(600 * 1000, dtype=np.float32).reshape(600, 1000) + step

def state(step):
    first, end = 600 * RANK // WORLD, 600 * (RANK + 1) // WORLD
    rows = sw.sharding.LocalShard(whole(step)[first:end].copy(), (600, 1000), (first, 0))
    return {"rows": rows, "norm": np.full(300_000, step, np.float64), "step": step}

def open_spread(keep=2, timeout=60.0, copies=1):
    near = sw.Tier(os.path.join(ROOT, MACHINE, "run"), retention=keep, per_machine=True, copies=copies)
    home = sw.Tier(os.path.join(ROOT, "home"), all_due=True, survives="node")
    options = sw.Options(stall_timeout=timeout)
    tiers = [near, home] if copies == 1 else [near]
    return sw.CheckpointManager(tiers=tiers, coordinator=Folder(), options=options)

def check(manager, step):
    found = manager.restore(step, into=state(-1))
    np.testing.assert_array_equal(found["rows"].local, state(step)["rows"].local)
    np.testing.assert_array_equal(found["norm"], np.full(300_000, step, np.float64))
    assert found["step"] == step
"""


def begin(folder: Path, script: str, world: int, machines: str, job: str) -> Ranks:
    return start(folder, _MACHINES + script, world, folder, machines, job=job)


def names(folder: Path, machine: str) -> list[str]:
    found = (path.name for path in (folder / machine / "run").iterdir())
    return sorted(name.split("-")[0] for name in found if name != ".stepwell")


def test_the_steps_of_several_machines_are_restored_on_others(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    script = """
with open_spread() as manager:
    assert manager.latest_step() is None
    for step in range(3):
        manager.save(step, state(step)).result()
        check(manager, step)
"""
    begin(tmp_path, script, 4, "a,b", "first").succeed()
    assert names(tmp_path, "a") == ["step_00000001", "step_00000002"]
    # A retired step may wait for the next job.
    assert names(tmp_path, "b") in ([".part"] * 2, [".part"] * 3)
    with pytest.raises(sw.errors.MisuseError, match="per_machine=True"):
        sw.CheckpointManager(tmp_path / "a" / "run")
    with caplog.at_level("WARNING"), pytest.raises(sw.errors.StepwellError):
        sw.restore(tmp_path / "a" / "run")
    assert "Read another tier of the run" in caplog.text
    # Each machine has half of the data.
    sizes = [sum(path.stat().st_size for path in (tmp_path / m / "run").rglob("*.data")) for m in ("a", "b")]
    assert 0.4 < sizes[0] / sizes[1] < 1.25
    script = """
with open_spread() as manager:
    manager.wait_until_carried() if RANK == 0 else None
    assert manager.all_steps() == [0, 1, 2]
    for step in (2, 1, 0):
        check(manager, step)
    manager.save(3, state(3)).result()
"""
    begin(tmp_path, script, 3, "c,b,a", "second").succeed()
    found = sw.restore(tmp_path / "home", 3)
    assert found["step"] == 3
    np.testing.assert_array_equal(found["rows"][:, 0], np.arange(600) * 1000 + 3)
    assert not sw.verify(tmp_path / "home").damages


def test_a_machine_is_lost_while_the_job_runs(tmp_path: Path) -> None:
    script = """
manager = open_spread(timeout=5.0)
for step in range(1000):
    save = manager.save(step, state(step))
    save.result()
    if RANK == 0:
        if step == 3:
            save.result(tier="home")
        print(step, flush=True)
"""
    ranks = begin(tmp_path, script, 3, "a,b,c", "first")
    process = ranks.processes[0]
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "5":
            break
    ranks.processes[2].send_signal(signal.SIGKILL)
    shutil.rmtree(tmp_path / "c")
    codes = [code for code, _, _ in ranks.finish(60)]
    assert codes[2] == -signal.SIGKILL
    assert codes[0] != 0
    assert codes[1] != 0
    script = """
with open_spread() as manager:
    latest = manager.latest_step()
    assert latest >= 3, latest
    check(manager, latest)
    manager.save(5000, state(5000)).result()
    print(latest)
"""
    begin(tmp_path, script, 3, "d,b,a", "second").succeed()
    assert sw.verify(tmp_path / "home").step == 5000
    script = """
with open_spread() as manager:
    check(manager, 5000)
"""
    begin(tmp_path, script, 2, "a,d", "third").succeed()


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_copies_make_up_for_a_lost_machine(tmp_path: Path, lost: int) -> None:
    script = """
manager = open_spread(timeout=5.0, copies=2)
for step in range(1000):
    save = manager.save(step, state(step))
    save.result()
    if RANK == 0:
        if step == 3:
            save.result(tier="near")
            assert save.durability == "node"
            assert not manager.tiers()[0].due
        print(step, flush=True)
"""
    ranks = begin(tmp_path, script, 3, "a,b,c", "first")
    process = ranks.processes[0]
    assert process.stdout is not None
    for line in process.stdout:
        if line.strip() == "5":
            break
    ranks.processes[lost].send_signal(signal.SIGKILL)
    shutil.rmtree(tmp_path / "abc"[lost])
    ranks.finish(60)
    left = [machine for machine in "abc" if machine != "abc"[lost]]
    script = """
with open_spread(copies=2) as manager:
    latest = manager.latest_step()
    assert latest >= 3, latest
    check(manager, latest)
    manager.save(5000, state(5000)).result()
    if RANK == 0:
        manager.wait_until_carried()
    manager.rewind(latest)
"""
    begin(tmp_path, script, 3, f"d,{','.join(left)}", "second").succeed()
    shutil.rmtree(tmp_path / "d")
    script = """
with open_spread(copies=2) as manager:
    latest = manager.latest_step()
    assert 3 <= latest < 5000, latest
    check(manager, latest)
"""
    begin(tmp_path, script, 2, ",".join(reversed(left)), "third").succeed()


def test_a_process_that_fails_ends_soon(tmp_path: Path) -> None:
    script = """
with open_spread() as manager:
    manager.save(0, state(0)).result()
    begun = time.monotonic()
    if RANK == 1:
        raise ValueError("mine")
    time.sleep(15)
"""
    ranks = begin(tmp_path, script, 2, "a,b", "first")
    begun = time.monotonic()
    ranks.processes[1].wait(30)
    assert ranks.processes[0].poll() is None, f"{time.monotonic() - begun:.0f} s"
    (first, second) = ranks.finish(60)
    assert second[0] == 1
    assert "ValueError: mine" in second[2]
    assert first[0] == 0, first[2]


def test_one_process_is_one_machine(tmp_path: Path) -> None:
    near = sw.Tier(tmp_path / "near", per_machine=True)
    with sw.CheckpointManager(tiers=[near, sw.Tier(tmp_path / "home")]) as manager:
        manager.save(1, {"w": np.arange(10)}).result(tier="home")
        np.testing.assert_array_equal(manager.restore(1)["w"], np.arange(10))
    np.testing.assert_array_equal(sw.restore(tmp_path / "near")["w"], np.arange(10))


def test_what_cannot_be_spread_is_refused(tmp_path: Path) -> None:
    near, home = sw.Tier(tmp_path / "near", per_machine=True), sw.Tier(tmp_path / "home")
    with pytest.raises(sw.errors.MisuseError, match="per_machine=True"):
        sw.Tier(tmp_path / "near", copies=2)
    with pytest.raises(sw.errors.MisuseError, match="first tier"):
        sw.CheckpointManager(tiers=[home, near])
    with pytest.raises(sw.errors.MisuseError, match="leave per_machine= out"):
        sw.CheckpointManager(tiers=[sw.Tier("s3://bucket/run", per_machine=True), home])
    with pytest.raises(sw.errors.MisuseError, match="exports="):
        sw.CheckpointManager(tiers=[near, home], exports=[sw.Export(str(tmp_path / "x-{step}"))])
    with pytest.raises(sw.errors.MisuseError, match="another tier"):
        sw.CheckpointManager(tiers=[near, home], read_only=True)
    meeting = sw.coordinators.SharedDirectory(0, 2, "job")
    with pytest.raises(sw.errors.MisuseError, match="path="):
        sw.CheckpointManager(tiers=[near, home], coordinator=meeting)
    assert not list(tmp_path.glob("*/step_*"))
