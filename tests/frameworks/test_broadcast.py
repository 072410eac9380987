"""Regions that several ranks want are read once and exchanged: ``restore(broadcast=…)``, in real
processes, over torch, JAX and MPI."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import stepwell as sw

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

from ranks import free_port, run, run_forked

TORCH = "torch,torch.distributed.tensor,stepwell.torch"

PREAMBLE = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from stepwell._distributed import exchange
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[5]}", rank=RANK, world_size=WORLD)
# Many rounds of several pieces, of a state of a few megabytes.
exchange.BATCH, exchange.PIECE, exchange.LEAST = 256 << 10, 64 << 10, 16 << 10
OPTIONS = sw.Options(stall_timeout=60.0, engine="buffered", block_bytes=4096)

def data_read():
    \"\"\"Bytes that this process has got by read calls.\"\"\"
    return int(next(line for line in open("/proc/self/io") if line.startswith("rchar")).split()[1])

def whole(name, shape, dtype=torch.float32):
    return (torch.arange(int(np.prod(shape)), dtype=torch.float64) * 3 + sum(map(ord, name))).to(dtype).reshape(shape)

SHAPES = {"large": (512, 1024), "row": (1, 300_001), "scalar": (), "half": (300, 300), "empty": (0, 5)}

def replicated(make):
    return {name: make(name, shape, torch.bfloat16 if name == "half" else torch.float32) for name, shape in SHAPES.items()}

def zeros(name, shape, dtype):
    return torch.zeros(shape, dtype=dtype)
"""


def test_what_all_ranks_want_is_read_once_in_all(tmp_path: Path) -> None:
    script = (
        PREAMBLE
        + """
size = sum(one.nbytes for one in replicated(whole).values())
with sw.CheckpointManager(ROOT, options=OPTIONS) as manager:
    manager.save(1, {"model": replicated(whole), "step": 1}).result()
    for how in (True, "gather"):
        for key in ("into", "like"):
            target = {"model": replicated(zeros), "step": 0}
            before = data_read()
            got, report = manager.restore(**{key: target}, broadcast=how, return_report=True)
            read = data_read() - before
            assert got["step"] == 1
            for name, one in replicated(whole).items():
                assert torch.equal(got["model"][name], one), (name, how)
                assert (got["model"][name] is target["model"][name]) == (key == "into")
            assert report.nbytes + report.received_nbytes == size
            if how is True:
                assert report.nbytes == (size if RANK == 0 else 0)
                assert read > size if RANK == 0 else read < size / 10, (RANK, read, size)
            else:
                assert report.nbytes < size / 2 and read < size / 2, (RANK, read, size)
            counts = [None] * WORLD
            dist.all_gather_object(counts, report.nbytes)
            assert sum(counts) == size, counts
# Without a target, as arrays of numpy, and where ranks agree over a directory.
with sw.CheckpointManager(ROOT, coordinator=sw.coordinators.SharedDirectory(RANK, WORLD, "again"), options=OPTIONS) as manager:
    found, report = manager.restore(broadcast=True, return_report=True)
    np.testing.assert_array_equal(found["model"]["large"], whole("large", SHAPES["large"]).numpy())
    assert report.received_nbytes == (size if RANK else 0)
dist.destroy_process_group()
"""
    )
    run_forked(tmp_path, TORCH, script, 4, tmp_path / "run", free_port())


MIXED = (
    PREAMBLE
    + """
mesh = init_device_mesh("cpu", (2, 3), mesh_dim_names=("dp", "tp"))

CASES = {
    "column parallel": ((90, 128), (Replicate(), Shard(0))),
    "row parallel": ((90, 129), (Replicate(), Shard(1))),
    "fully sharded": ((91, 40), (Shard(0), Shard(1))),
    "half sharded": ((64, 300), (Shard(0), Replicate())),
    "replicated": ((70, 70), (Replicate(), Replicate())),
}

def state(make):
    found = {name: distribute_tensor(make(name, shape, torch.float32), mesh, placements, src_data_rank=None) for name, (shape, placements) in CASES.items()}
    found["plain"] = make("plain", (1000, 100), torch.float32)
    found["numpy"] = make("numpy", (77,), torch.float32).numpy()
    # Transposed, so that its elements lie between no others' and not in a row.
    found["transposed"] = make("transposed", (60, 50), torch.float32).t().contiguous().t()
    if RANK == 1:
        found["only here"] = make("only here", (30,), torch.float32)
    if RANK in (2, 5):
        found["on two"] = make("on two", (500, 500), torch.float32)
    mine = np.full(4, RANK if make is whole else 0)
    return {"model": found, "own": sw.PerRank(mine), "text": "as it was" if make is whole else "", "step": 5 if make is whole else 0}
"""
)


def test_shards_replicas_and_what_a_rank_has_alone_go_together(tmp_path: Path) -> None:
    script = (
        MIXED
        + """
with sw.CheckpointManager(ROOT, options=OPTIONS) as manager:
    manager.save(1, state(whole)).result()
    for how, key in ((True, "into"), ("gather", "like")):
        target = state(zeros)
        got, report = manager.restore(**{key: target}, broadcast=how, return_report=True)
        expected = state(whole)
        for name, one in expected["model"].items():
            mine = got["model"][name]
            if isinstance(one, DTensor):
                assert mine.placements == one.placements
                one, mine = one.to_local(), mine.to_local()
            assert (one == mine).all(), (name, how, key, RANK)
            assert key == "like" or isinstance(one, DTensor) or got["model"][name] is target["model"][name]
        assert (got["own"].value == RANK).all() and got["text"] == "as it was" and got["step"] == 5
        counts = [None] * WORLD
        dist.all_gather_object(counts, report.nbytes)
        assert sum(counts) == manager.metadata(1).nbytes, counts
    # A cast is made of each piece where it arrives: here on some of the ranks only.
    like = {"model": {"plain": sw.ArraySpec((1000, 100), np.float64 if RANK % 2 else np.float32)}}
    got, report = manager.restore(like=like, broadcast=True, unexpected="ignore", return_report=True)
    plain = got["model"]["plain"]
    assert plain.dtype == (np.float64 if RANK % 2 else np.float32)
    np.testing.assert_array_equal(plain, whole("plain", (1000, 100)).numpy())
    assert report.nbytes == (plain.size * 4 if RANK == 0 else 0)
    bigger = {"model": {"plain": torch.ones(1003, 90)}}
    manager.restore(into=bigger, broadcast=True, unexpected="ignore", resize="both")
    assert torch.equal(bigger["model"]["plain"][:1000], whole("plain", (1000, 100))[:, :90])
    assert not bigger["model"]["plain"][1000:].any()
dist.destroy_process_group()
"""
    )
    run_forked(tmp_path, TORCH, script, 6, tmp_path / "run", free_port())


def test_a_rank_that_fails_leaves_no_other_in_a_collective(tmp_path: Path) -> None:
    script = (
        PREAMBLE
        + """
import glob
with sw.CheckpointManager(ROOT, options=OPTIONS) as manager:
    manager.save(1, {"model": replicated(whole), "step": 1}).result()
    # The first rank reads a block that is not what was written; in one of the last rounds.
    if RANK == 0:
        file = max(glob.glob(ROOT + "/step_00000001/**/*.data", recursive=True), key=os.path.getsize)
        with open(file, "r+b") as data:
            data.seek(os.path.getsize(file) // 2)
            byte = data.read(1)
            data.seek(-1, 1)
            data.write(bytes([byte[0] ^ 1]))
    dist.barrier()
    for how in (True, "gather"):
        try:
            manager.restore(into={"model": replicated(zeros)}, broadcast=how)
            print("restored")
        except sw.CorruptCheckpoint:
            print("mine")
        except sw.RankFailed as error:
            assert "CorruptCheckpoint" in str(error) and error.rank is not None
            print("theirs")
        dist.barrier()
    # A rank that has not the memory for a collective: that by which the ranks know what each wants, and a later one.
    from stepwell._distributed import transports
    tensor = transports._Torch._tensor
    for number in (0, 2):
        calls = []
        def without(self, array):
            calls.append(1)
            if len(calls) > number:
                raise MemoryError
            return tensor(self, array)
        if RANK == 1:
            transports._Torch._tensor = without
        try:
            manager.restore(into={"model": replicated(zeros)}, broadcast=True)
            print("restored")
        except (MemoryError, sw.RankFailed) as error:
            print(type(error).__name__)
        transports._Torch._tensor = tensor
    # A rank that wants what is not there, and those that pass another word.
    for mine in ({"like": {"missing": 0}}, {"broadcast": "gather"}, {"broadcast": False}):
        try:
            manager.restore(**{"broadcast": True, "include": ["step"], **(mine if RANK == 2 else {})})
            print("restored")
        except (sw.MismatchError, sw.MisuseError, sw.RankFailed) as error:
            print(type(error).__name__)
    assert manager.restore(include=["step"], broadcast=True)["step"] == 1
dist.destroy_process_group()
"""
    )
    told = [out.split() for out in run_forked(tmp_path, TORCH, script, 3, tmp_path / "run", free_port())]
    # The reader of that block fails, and all others with it.
    assert [one[0] for one in told] == ["mine", "theirs", "theirs"]
    assert sorted(one[1] for one in told).count("restored") == 0
    assert "mine" in [one[1] for one in told]
    assert [one[2:4] for one in told] == [["RankFailed"] * 2, ["MemoryError"] * 2, ["RankFailed"] * 2]
    assert [one[4] for one in told] == ["RankFailed", "RankFailed", "MismatchError"]
    assert [one[5:] for one in told] == [["MisuseError", "MisuseError"]] * 3


def test_a_rank_that_dies_in_an_exchange_is_an_error(tmp_path: Path) -> None:
    script = (
        PREAMBLE
        + """
from stepwell._distributed import transports
manager = sw.CheckpointManager(ROOT, options=sw.Options(stall_timeout=5.0))
manager.save(1, {"model": replicated(whole)}).result()
if RANK == 1:
    carried = transports._Torch.broadcast
    def broadcast(self, buffer, ranks, calls=[]):
        calls.append(1)
        return carried(self, buffer, ranks) if len(calls) < 4 else lambda: os._exit(0)
    transports._Torch.broadcast = broadcast
try:
    manager.restore(into={"model": replicated(zeros)}, broadcast=True)
except sw.StepwellError as error:
    print(type(error).__name__)
sys.stdout.flush()
os._exit(0)
"""
    )
    told = run_forked(tmp_path, TORCH, script, 3, tmp_path / "run", free_port())
    assert told[1] == ""
    for one in (told[0], told[2]):
        assert one in ("CoordinatorError\n", "CoordinationTimeout\n", "RankFailed\n"), told


JAX = """
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=2"
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from stepwell._distributed import exchange
jax.distributed.initialize(f"127.0.0.1:{sys.argv[5]}", num_processes=WORLD, process_id=RANK)
exchange.BATCH, exchange.PIECE, exchange.LEAST = 256 << 10, 64 << 10, 16 << 10
# Processes are pairs of devices along x: P("x") is sharded over all of them, P("y") is the same on all.
mesh = Mesh(np.array(jax.devices()).reshape(WORLD, 2), ("x", "y"))
pairs = Mesh(np.array(jax.devices()).reshape(2, -1), ("x", "y"))

SPECS = {
    "replicated": ((300, 301), NamedSharding(mesh, P())),
    "over the devices of each": ((300, 300), NamedSharding(mesh, P("y", None))),
    "sharded": ((16, 300), NamedSharding(mesh, P("x", "y"))),
    "partly": ((80, 64), NamedSharding(pairs, P("x", None))),
    "scalar": ((), NamedSharding(mesh, P())),
}

def whole(name):
    shape = SPECS[name][0]
    return (np.arange(int(np.prod(shape))) * 3 + sum(map(ord, name))).astype(np.float32).reshape(shape)

def arrays(value):
    return {name: jax.make_array_from_callback(shape, sharding, lambda index, name=name: value(name)[index]) for name, (shape, sharding) in SPECS.items()}

def check(got):
    for name, one in got.items():
        assert one.sharding == SPECS[name][1], name
        for shard in one.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), whole(name)[shard.index], err_msg=name)

zeros = lambda name: np.zeros(SPECS[name][0], np.float32)
with sw.CheckpointManager(ROOT, options=sw.Options(stall_timeout=60.0)) as manager:
    manager.save(1, {"params": arrays(whole), "rng": jax.random.key(7), "host": np.arange(50_000), "step": 1}).result()
    abstract = {name: jax.ShapeDtypeStruct(shape, np.float32, sharding=sharding) for name, (shape, sharding) in SPECS.items()}
    into = {"params": arrays(zeros), "host": np.zeros(50_000, int), "step": 0}
    for how, target in ((True, {"into": into}), ("gather", {"like": {"params": abstract, "host": sw.ArraySpec()}})):
        if how == "gather":
            jax.set_mesh(mesh)  # as a program may have done for its own computations
        got, report = manager.restore(**target, broadcast=how, return_report=True)
        check(got["params"])
        np.testing.assert_array_equal(got["host"], np.arange(50_000))
        print("told", report.nbytes)
    print("told", sum(whole(name).nbytes for name in SPECS) + 8 * 50_000)
jax.distributed.shutdown()
"""


def test_jax_arrays_that_processes_share_are_read_once(tmp_path: Path) -> None:
    outputs = run(tmp_path, JAX, 4, tmp_path / "run", free_port())
    told = [[int(line[5:]) for line in out.splitlines() if line.startswith("told ")] for out in outputs]
    size = told[0][-1]
    for column in (0, 1):
        assert sum(row[column] for row in told) == size, told
    # The shares of what is alike are about as large.
    assert max(row[1] for row in told) < size / 2


def test_a_transport_without_arrays_is_refused_unread(tmp_path: Path) -> None:
    script = """
with open_manager() as manager:
    manager.save(1, {"w": np.arange(10)}).result()
    target = {"w": np.zeros(10, int)}
    try:
        manager.restore(into=target, broadcast=True)
    except sw.MisuseError as error:
        assert "init_process_group" in str(error) and "SharedDirectory" in str(error), error
        print("refused", target["w"].sum())
    print(manager.restore(into=target)["w"].sum())
"""
    assert run(tmp_path, script, 2, tmp_path / "run") == ["refused 0\n45\n"] * 2
    for call in (sw.restore, sw.open(tmp_path / "run").restore):
        with pytest.raises(sw.MisuseError, match="CheckpointManager"):
            call(*([tmp_path / "run"] if call is sw.restore else []), broadcast=True)
    # One process has nobody to exchange with.
    with sw.CheckpointManager(tmp_path / "run", coordinator=None) as manager:
        np.testing.assert_array_equal(manager.restore(broadcast=True)["w"], np.arange(10))


def test_processes_of_mpi_exchange_what_one_has_read(tmp_path: Path) -> None:
    mpiexec = Path(sys.executable).with_name("mpiexec")
    if not mpiexec.exists():
        pytest.skip("no mpiexec beside this Python (pip install mpi4py mpich)")
    script = tmp_path / "mpi.py"
    script.write_text(
        """
import sys
import numpy as np
from mpi4py import MPI
import stepwell as sw
from stepwell._distributed import exchange

exchange.BATCH, exchange.PIECE, exchange.LEAST = 256 << 10, 64 << 10, 16 << 10
comm = MPI.COMM_WORLD
rank, world = comm.Get_rank(), comm.Get_size()

def state(fill):
    part = np.full((2, 3), rank if fill else 0, np.float32)
    same = np.arange(400_000) if fill else np.zeros(400_000, int)
    some = {"some": same[:1000].copy()} if rank else {}
    return {"w": sw.sharding.LocalShard(part, (2 * world, 3), (2 * rank, 0)), "same": same, **some}

with sw.CheckpointManager(sys.argv[1], coordinator=sw.coordinators.MPI(comm), options=sw.Options(stall_timeout=60.0)) as manager:
    manager.save(1, state(True)).result()
    for how in (True, "gather"):
        got, report = manager.restore(into=state(False), broadcast=how, return_report=True)
        expected = state(True)
        assert (got["w"].local == rank).all() and (got["same"] == expected["same"]).all()
        assert rank == 0 or (got["some"] == expected["some"]).all()
        assert sum(comm.allgather(report.nbytes)) == 8 * 401_000 + 24 * world
        assert how is True or report.nbytes < 8 * 200_000
comm.Barrier()
"""
    )
    told = subprocess.run(
        [str(mpiexec), "-n", "3", sys.executable, str(script), str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert told.returncode == 0, told.stdout + told.stderr
