"""Ranks agree over what their framework has initialised: torch's store, JAX's coordination service.
Real processes, found by ``coordinator="auto"``."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import stepwell as sw

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

from ranks import free_port, run, start

TORCH = """
import torch.distributed as dist
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[5]}", rank=RANK, world_size=WORLD)
"""
JAX = """
import jax
jax.distributed.initialize(f"127.0.0.1:{sys.argv[5]}", num_processes=WORLD, process_id=RANK)
"""
SAVE = """
def state(step):
    rows = np.arange(4.0 * WORLD * 6).reshape(4 * WORLD, 6) + step
    big = np.arange(300_000, dtype=np.int32) + step
    return {
        "params": {"w": sw.sharding.LocalShard(rows[4 * RANK : 4 * RANK + 4].copy(), rows.shape, (4 * RANK, 0)), "big": big},
        "many": {f"leaf{i}": np.full(3, i) for i in range(3000)},
        "step": step,
    }

with sw.CheckpointManager(ROOT, options=sw.Options(stall_timeout=60.0)) as manager:
    assert manager.latest_step() is None
    for step in range(3):
        manager.save(step, state(step))
    with sw.CheckpointManager(ROOT + "-second", options=sw.Options(stall_timeout=60.0)) as other:
        other.save(7, state(7)).result()
    restored = manager.restore(into=state(0)) if manager.wait_until_finished() is None else None
    np.testing.assert_array_equal(restored["params"]["w"].local, state(2)["params"]["w"].local)
    print(manager.latest_step())
"""
END = {"torch": "\ndist.destroy_process_group()\n", "jax": "\njax.distributed.shutdown()\n"}


@pytest.mark.parametrize(("name", "begin"), [("torch", TORCH), ("jax", JAX)])
def test_ranks_find_what_is_initialised_and_save_over_it(tmp_path: Path, name: str, begin: str) -> None:
    root = tmp_path / "run"
    assert run(tmp_path, begin + SAVE + END[name], 3, root, free_port()) == ["2\n"] * 3
    found = sw.restore(root)
    np.testing.assert_array_equal(found["params"]["w"], np.arange(72.0).reshape(12, 6) + 2)
    np.testing.assert_array_equal(found["params"]["big"], np.arange(300_000, dtype=np.int32) + 2)
    assert len(found["many"]) == 3000
    assert sw.restore(f"{root}-second")["step"] == 7


@pytest.mark.parametrize(("name", "begin"), [("torch", TORCH), ("jax", JAX)])
def test_a_rank_that_raises_in_save_is_named_on_the_others(tmp_path: Path, name: str, begin: str) -> None:
    script = (
        begin
        + """
with sw.CheckpointManager(ROOT, options=sw.Options(stall_timeout=60.0)) as manager:
    try:
        manager.save(1, {"x": object() if RANK == 1 else 1}).result()
    except sw.UnsupportedLeaf:
        print("mine")
    except sw.RankFailed as error:
        print("theirs", error.rank)
    manager.save(2, {"x": 2}).result()
"""
    )
    assert run(tmp_path, script + END[name], 2, tmp_path / "run", free_port()) == ["theirs 1\n", "mine\n"]
    assert sw.restore(tmp_path / "run") == {"x": 2}


def test_a_leader_gone_with_its_store_is_an_error(tmp_path: Path) -> None:
    script = (
        TORCH
        + """
manager = sw.CheckpointManager(ROOT, options=sw.Options(stall_timeout=5.0))
manager.save(1, {"x": 1}).result()
if RANK == 0:
    time.sleep(1)
    os.kill(os.getpid(), signal.SIGKILL)
try:
    manager.save(2, {"x": 2}).result()
except sw.StepwellError as error:
    print(type(error).__name__)
os._exit(0)
"""
    )
    found = start(tmp_path, script, 2, tmp_path / "run", free_port()).finish()
    assert found[1][1] in ("CoordinatorError\n", "CoordinationTimeout\n"), found[1]
    assert sw.restore(tmp_path / "run") == {"x": 1}


@pytest.mark.parametrize(("name", "begin"), [("torch", TORCH), ("jax", JAX)])
def test_ranks_convert_over_what_is_initialised(tmp_path: Path, name: str, begin: str) -> None:
    state = {f"w{n}": np.arange(50_000.0) + n for n in range(5)}
    sw.save(tmp_path / "saved", state)
    script = (
        begin
        + """
for number, to in enumerate(("safetensors", "stepwell", "dcp", "stepwell")):
    made = sw.convert(ROOT + "/../saved", f"{ROOT}-{number}", to=to, coordinator="auto", verify=True)
    print(len(made.files))
"""
    )
    told = run(tmp_path, script + END[name], 2, tmp_path / "out", free_port())
    assert told == ["1\n2\n2\n2\n"] * 2
    for number in range(4):
        found = sw.restore(tmp_path / f"out-{number}")
        assert all((np.asarray(found[key]) == one).all() for key, one in state.items())


def test_a_source_on_one_rank_only_ends_all(tmp_path: Path) -> None:
    sw.save(tmp_path / "saved", {"w": np.zeros(9)})
    script = (
        TORCH
        + """
source = ROOT + "/../saved" if RANK == 0 else ROOT + "/../missing"
for to in ("safetensors", "stepwell"):
    try:
        sw.convert(source, ROOT, to=to, coordinator="auto")
    except sw.StepwellError as error:
        print(type(error).__name__)
"""
    )
    told = run(tmp_path, script + END["torch"], 2, tmp_path / "out", free_port())
    assert told == ["SessionLost\n" * 2, "StepNotFound\n" * 2]


def run_mpi(folder: Path, script: str, world: int, root: Path) -> None:
    """Runs a script in processes of MPI; all must end well."""
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if not mpiexec.exists():
        pytest.skip("no mpiexec beside this Python (pip install mpi4py mpich)")
    file = folder / "mpi.py"
    file.write_text(MPI + script)
    told = subprocess.run(
        [str(mpiexec), "-n", str(world), sys.executable, str(file), str(root)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr


MPI = """
import sys
import threading
import numpy as np
from mpi4py import MPI
import stepwell as sw

comm = MPI.COMM_WORLD
rank, world = comm.Get_rank(), comm.Get_size()
"""


def test_processes_of_mpi_save_over_its_messages(tmp_path: Path) -> None:
    script = """
def state(step):
    part = np.full((2, 3), rank + step, np.float32)
    return {"w": sw.sharding.LocalShard(part, (2 * world, 3), (2 * rank, 0)), "n": step}

with sw.CheckpointManager(sys.argv[1], coordinator=sw.coordinators.MPI(comm), options=sw.Options(stall_timeout=60.0)) as manager:
    for step in range(3):
        manager.save(step, state(step))
    manager.wait_until_finished()
    assert manager.latest_step() == 2
    got = manager.restore(into=state(0))
    assert (got["w"].local == rank + 2).all() and got["n"] == 2
comm.Barrier()
"""
    run_mpi(tmp_path, script, 3, tmp_path / "run")
    np.testing.assert_array_equal(sw.restore(tmp_path / "run")["w"][:, 0], [2, 2, 3, 3, 4, 4])


def test_mpi_managers_continue_when_the_first_is_closed(tmp_path: Path) -> None:
    script = """
board = sw.coordinators.MPI(comm)

def opened(name):
    return sw.CheckpointManager(sys.argv[1] + name, coordinator=board, options=sw.Options(stall_timeout=60.0))

with opened("-second") as second:
    with opened("-first") as first:
        saves = [manager.save(1, {"rank": sw.PerRank(rank)}) for manager in (first, second)]
        for save in saves:
            save.result()
    second.save(2, {"rank": sw.PerRank(rank)}).result()
    assert second.latest_step() == 2
with opened("-first") as first:
    assert first.latest_step() == 1
comm.Barrier()
"""
    run_mpi(tmp_path, script, 3, tmp_path / "run")
    assert sw.open(f"{tmp_path}/run-second").step == 2


def test_mpi_threads_get_each_their_own_answer(tmp_path: Path) -> None:
    script = """
board = sw.coordinators.MPI(comm)
board.start()
done = []

def ask(name):
    for number in range(300):
        message = f"{name} {number}".encode()
        board.put(f"{rank}/{name}", message)
        assert board.get(f"{rank}/{name}") == message
    board.remove(f"{rank}/{name}")
    assert board.get(f"{rank}/{name}") is None
    done.append(name)

threads = [threading.Thread(target=ask, args=(name,)) for name in "ab"]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert sorted(done) == ["a", "b"], done
comm.Barrier()
board.stop()
"""
    run_mpi(tmp_path, script, 3, tmp_path / "run")


def test_an_unanswered_mpi_process_names_rank_0(
    tmp_path: Path,
) -> None:
    script = """
board = sw.coordinators.MPI(comm)
long = bytes(range(256)) * 20_000  # which waits for whoever takes it
board.start()
board.put(f"{rank}", b"mine")
comm.Barrier()
board.stop()  # as if the first process were gone: it answers no more
if rank:
    sw.coordinators.MPI._PATIENCE = 0.5
    for ask in (lambda: board.get(f"{rank}"), lambda: board.put(f"{rank}/long", long)):
        try:
            ask()
            raise AssertionError("answered")
        except sw.errors.CoordinationTimeout as error:
            assert error.missing == [0] and "rank 0" in str(error), error
    sw.coordinators.MPI._PATIENCE = 60.0
comm.Barrier()
board.start()
assert board.get("nothing") is None
assert board.get(f"{rank}") == b"mine"
assert board.get(f"{rank}/long") == (long if rank else None)
comm.Barrier()
board.stop()
"""
    run_mpi(tmp_path, script, 3, tmp_path / "run")
