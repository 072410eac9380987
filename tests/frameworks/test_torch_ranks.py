"""DTensors over several processes: every placement, saved on one mesh and restored on others, in
real processes over gloo."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
import torch
from stepwell._adapters import torch as adapter
from stepwell._state import layouts

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

from longer import some
from ranks import free_port, run_forked
from threads import together

#: Imported once for all ranks.
TORCH = "torch,torch.distributed.tensor.parallel,torch.distributed.fsdp,stepwell.torch"

PREAMBLE = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[5]}", rank=RANK, world_size=WORLD)

def whole(name, shape, dtype=torch.float32):
    seed = sum(map(ord, name))
    return (torch.arange(int(np.prod(shape)), dtype=torch.float64) * 3 + seed).to(dtype).reshape(shape)

#: Name, shape, placements for a mesh of two dimensions.
CASES = {
    "column parallel": ((16, 12), lambda: (Replicate(), Shard(0))),
    "row parallel": ((16, 12), lambda: (Replicate(), Shard(1))),
    "fully sharded": ((16, 12), lambda: (Shard(0), Replicate())),
    "uneven": ((7, 5), lambda: (Shard(0), Shard(1))),
    "empty on some": ((2, 3), lambda: (Shard(0), Shard(0))),
    "both on one": ((13, 3), lambda: (Shard(0), Shard(0))),
    "strided": ((16, 6), lambda: (_StridedShard(0, split_factor=MESH[1]), Shard(0))),
    "strided, uneven": ((10, 6), lambda: (_StridedShard(0, split_factor=MESH[1]), Shard(0))),
    "replicated": ((5, 5), lambda: (Replicate(), Replicate())),
    "scalar": ((), lambda: (Replicate(), Replicate())),
    "empty": ((0, 4), lambda: (Shard(0), Replicate())),
    "half": ((32, 8), lambda: (Shard(1), Shard(0))),
}

def tensors(mesh, make):
    found = {}
    for name, (shape, placements) in CASES.items():
        dtype = torch.bfloat16 if name == "half" else torch.float32
        found[name] = distribute_tensor(make(name, shape, dtype), mesh, placements(), src_data_rank=None)
    return found

def zeros(name, shape, dtype):
    return torch.zeros(shape, dtype=dtype)
"""

SAVE = (
    PREAMBLE
    + """
MESH = tuple(map(int, sys.argv[6].split("x")))
mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("dp", "tp"))
with sw.CheckpointManager(ROOT, options=sw.Options(stall_timeout=60.0)) as manager:
    manager.save(3, {"params": tensors(mesh, whole), "step": 3}).result()
dist.destroy_process_group()
"""
)

RESTORE = (
    PREAMBLE
    + """
MESH = tuple(map(int, sys.argv[6].split("x")))
mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("dp", "tp"))
with sw.CheckpointManager(ROOT, options=sw.Options(stall_timeout=60.0)) as manager:
    expected = tensors(mesh, whole)
    for how in ("into", "like"):
        target = {"params": tensors(mesh, zeros), "step": 0}
        locals_before = {name: one.to_local().data_ptr() for name, one in target["params"].items()}
        got = manager.restore(**{how: target})
        assert got["step"] == 3
        for name, one in got["params"].items():
            assert isinstance(one, DTensor) and one.placements == expected[name].placements, name
            assert torch.equal(one.to_local(), expected[name].to_local()), (name, RANK, one.to_local(), expected[name].to_local())
            if how == "into":
                assert one is target["params"][name] and one.to_local().data_ptr() == locals_before[name], name
dist.destroy_process_group()
"""
)


@pytest.mark.parametrize(("saved", "restored"), some([("2x2", ["1x3", "4x1", "2x2"]), ("1x3", ["2x2"])]))
def test_what_one_mesh_saves_any_other_restores(tmp_path: Path, saved: str, restored: list[str]) -> None:
    root = tmp_path / "run"

    def world(mesh: str) -> int:
        a, b = map(int, mesh.split("x"))
        return a * b

    run_forked(tmp_path, TORCH, SAVE, world(saved), root, free_port(), saved)
    found = sw.restore(root, to="torch")
    assert found["step"] == 3
    for name, tensor in found["params"].items():
        expected = (np.arange(tensor.numel(), dtype=np.float64) * 3 + sum(map(ord, name))).reshape(
            tensor.shape
        )
        np.testing.assert_array_equal(
            tensor.double().numpy(),
            expected.astype(np.float32) if tensor.element_size() == 4 else tensor.double().numpy(),
        )
    for mesh in restored:
        run_forked(tmp_path, TORCH, RESTORE, world(mesh), root, free_port(), mesh)


FSDP = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[5]}", rank=RANK, world_size=WORLD)
MESH = tuple(map(int, sys.argv[6].split("x")))
mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("dp", "tp"))

def build(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential()
    model.add_module("up", torch.nn.Linear(12, 20))
    model.add_module("act", torch.nn.GELU())
    model.add_module("down", torch.nn.Linear(20, 12))
    full = {name: one.detach().clone() for name, one in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model, full
"""


def test_a_module_under_fsdp2_and_tp_is_filled_in_place(tmp_path: Path) -> None:
    root = tmp_path / "run"
    save = (
        FSDP
        + """
model, full = build(1)
with sw.CheckpointManager(ROOT, options=sw.Options(stall_timeout=60.0)) as manager:
    manager.save(1, {"model": model}).result()
if RANK == 0:
    torch.save(full, ROOT + ".pt")
dist.destroy_process_group()
"""
    )
    run_forked(tmp_path, TORCH, save, 4, root, free_port(), "2x2")
    restore = (
        FSDP
        + """
model, _ = build(2)
full = torch.load(ROOT + ".pt")
with sw.CheckpointManager(ROOT, options=sw.Options(stall_timeout=60.0)) as manager:
    manager.restore(into={"model": model})
for name, one in model.state_dict().items():
    assert torch.equal(one.full_tensor(), full[name]), name
dist.destroy_process_group()
"""
    )
    for mesh, world in (("2x2", 4), ("1x2", 2), ("3x1", 3)):
        run_forked(tmp_path, TORCH, restore, world, root, free_port(), mesh)


@pytest.mark.parametrize("rows", [7, 8, 13])
def test_strided_shards_are_cut_in_the_order_in_which_fsdp2_cuts(rows: int) -> None:
    everything = torch.arange(rows)

    def chunk(of: Any, ways: int, at: int) -> Any:
        chunks = torch.chunk(of, ways)
        return chunks[at] if at < len(chunks) else of[:0]

    for dp, tp in itertools.product(range(1, 5), range(1, 5)):
        for d, t in itertools.product(range(dp), range(tp)):
            cuts = adapter._in_order([(dp, d, tp), (tp, t, 1)])
            found = [
                row for first, n in layouts.runs_of_chunks(rows, cuts) for row in range(first, first + n)
            ]
            assert found == chunk(chunk(everything, tp, t), dp, d).tolist(), (dp, tp, d, t)
    # Nothing to its right is cut before it.
    assert adapter._in_order([(2, 1, 3)]) == [(2, 1, 3)]


def test_uneven_and_gathered_modules_are_saved_under_fsdp2(
    tmp_path: Path,
) -> None:
    root = tmp_path / "run"
    work = (
        FSDP.replace("import torch\n", "import torch\nimport stepwell.torch as st\n", 1)
        + """
def uneven(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential()
    model.add_module("up", torch.nn.Linear(3, 7))
    full = {name: one.detach().clone() for name, one in model.state_dict().items()}
    parallelize_module(model, mesh["tp"], {"up": ColwiseParallel()})
    fully_shard(model, mesh=mesh["dp"])
    return model, full

(odd, full), (even, _) = uneven(1), build(1)
optimizer = torch.optim.AdamW(even.parameters())
with torch.no_grad():
    even(torch.ones(4, 12))  # no backward pass: FSDP2 leaves the root gathered
with sw.CheckpointManager(ROOT, options=sw.Options(stall_timeout=60.0)) as manager:
    manager.save(1, {"odd": odd, "even": st.TrainState(even, optimizer)}).result()
    other, _ = uneven(2)
    manager.restore(into={"odd": other, "even": st.TrainState(even, optimizer)})
for name, one in other.state_dict().items():
    assert torch.equal(one.to_local(), odd.state_dict()[name].to_local()), name
if RANK == 0:
    torch.save(full, ROOT + ".pt")
dist.destroy_process_group()
"""
    )
    run_forked(tmp_path, TORCH, work, 6, root, free_port(), "3x2")
    full = torch.load(f"{root}.pt")
    for name, array in sw.restore(root, to="torch")["odd"].items():
        assert torch.equal(array, full[name]), name


TRAINING = (
    FSDP.replace("import torch\n", "import torch\nimport stepwell.torch as st\n", 1)
    + """
def train(seed):
    model, _ = build(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 3)

def update(model, optimizer, scheduler, n):
    loss = (model(torch.arange(48.0).reshape(4, 12) / (n + 1)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    scheduler.step()
    return float(loss.detach())
"""
)


def test_training_goes_on_under_another_cut_with_the_same_losses(tmp_path: Path) -> None:
    root = tmp_path / "run"
    save = (
        TRAINING
        + """
parts = train(1)
for n in range(3):
    update(*parts, n)
with sw.CheckpointManager(ROOT, options=sw.Options(stall_timeout=60.0)) as manager:
    manager.save(1, {"train": st.TrainState(*parts)}).result()
print(*[update(*parts, n) for n in range(3, 6)])
dist.destroy_process_group()
"""
    )
    restore = (
        TRAINING
        + """
for steps in (0, 1):  # the optimizer has no state yet; it has some, which is filled
    parts = train(2)
    for n in range(steps):
        update(*parts, n)
    with sw.CheckpointManager(ROOT, options=sw.Options(stall_timeout=60.0)) as manager:
        manager.restore(into={"train": st.TrainState(*parts)})
    print(*[update(*parts, n) for n in range(3, 6)])
dist.destroy_process_group()
"""
    )
    out = run_forked(tmp_path, TORCH, save, 4, root, free_port(), "2x2")
    losses = [float(loss) for loss in out[0].split()]
    for mesh, world in (("2x2", 4), ("1x2", 2)):
        for told in run_forked(tmp_path, TORCH, restore, world, root, free_port(), mesh):
            for line in told.splitlines():
                found = [float(loss) for loss in line.split()]
                assert found == pytest.approx(losses, rel=1e-5)
                assert mesh != "2x2" or found == losses, "bit for bit where nothing was cut otherwise"


ONE_MESH = """
import torch
import stepwell.torch as st
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[5]}", rank=RANK, world_size=WORLD)
mesh = init_device_mesh("cpu", (WORLD,))
OPTIMIZERS = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "NAdam": lambda p: torch.optim.NAdam(p, lr=1e-2),
}

def build(seed, make):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 5))
    fully_shard(model, mesh=mesh)
    return model, make(model.parameters())

def update(model, optimizer, n):
    loss = (model(torch.arange(20.0).reshape(4, 5) / (n + 1)) ** 2).mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())
"""

AT_A_PATH = (
    ONE_MESH
    + """
model, optimizer = build(1, OPTIMIZERS["AdamW"])
update(model, optimizer, 0)
for exists in ("error", "replace"):
    sw.save(ROOT, {"train": st.TrainState(model, optimizer)}, exists=exists, options=sw.Options(stall_timeout=60.0))
other, fresh = build(2, OPTIMIZERS["AdamW"])
sw.restore(ROOT, into={"train": st.TrainState(other, fresh)})
assert update(other, fresh, 1) == update(model, optimizer, 1)
dist.destroy_process_group()
"""
)


STARTING = (
    ONE_MESH
    + """
def slots(optimizer):
    return [one for slots in optimizer.state.values() for name, one in slots.items() if name != "step"]

OPTIONS = sw.Options(stall_timeout=60.0)
model, optimizer = build(1, OPTIMIZERS[sys.argv[6]])
update(model, optimizer, 0)
train = {"train": st.TrainState(model, optimizer)}
sw.save(ROOT + "-half", train, cast={"train/optimizer": "bfloat16"}, options=OPTIONS)
other, fresh = build(2, OPTIMIZERS[sys.argv[6]])
sw.restore(ROOT + "-half", into={"train": st.TrainState(other, fresh)})
assert slots(fresh) and all(isinstance(one, DTensor) and one.dtype == torch.float32 for one in slots(fresh))
update(other, fresh, 1)
other, fresh = build(2, OPTIMIZERS[sys.argv[6]])
cast = {"train/optimizer/state/**": "float64"}
sw.restore(ROOT + "-half", into={"train": st.TrainState(other, fresh)}, cast=cast)
assert all(isinstance(one, DTensor) and one.dtype == torch.float64 for one in slots(fresh))

with sw.CheckpointManager(ROOT, options=OPTIONS) as manager:
    manager.save(4, train, include="train/model/**").result()
    other, fresh = build(2, OPTIMIZERS[sys.argv[6]])
    _, first = manager.resume({"train": st.TrainState(other, fresh)}, missing={"train/optimizer/**": "keep"})
assert first == 5 and not fresh.state
for one, own in zip(model.parameters(), other.parameters(), strict=True):
    assert torch.equal(one.to_local(), own.to_local())
update(other, fresh, 1)
dist.destroy_process_group()
"""
)


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_fsdp2_runs_start_from_weights_and_cast_slots(tmp_path: Path, name: str) -> None:
    run_forked(tmp_path, TORCH, STARTING, 2, tmp_path / "run", free_port(), name)


PER_RANK = (
    ONE_MESH
    + """
OPTIONS = sw.Options(stall_timeout=60.0)
sw.save(ROOT, {"a": sw.PerRank(RANK * 10), "b": sw.PerRank(RANK + 5, key=f"dp={RANK}")}, options=OPTIONS)
wanted = {"a": sw.PerRank(0), "b": sw.PerRank(0, key=f"dp={RANK}")}
with sw.open(ROOT) as checkpoint:
    found = [sw.restore(ROOT, into=wanted), sw.restore_async(ROOT, like=wanted).result(), checkpoint.restore(like=wanted)]
    assert checkpoint.plan(like=wanted).report.ok
for one in found:
    assert (one["a"].value, one["b"].value) == (RANK * 10, RANK + 5), one
def resize(values, rank, world):
    return (values, rank, world)
if WORLD == 2:
    sw.save(ROOT + "-3", {"a": {"0": 0, "1": 10, "2": 20}}, options=OPTIONS)
    found = sw.restore(ROOT + "-3", like={"a": sw.PerRank(0, resize=resize)})
    assert found["a"].value == ([0, 10, 20], RANK, WORLD), found
dist.destroy_process_group()
"""
)


def test_restores_without_a_manager_know_their_rank(tmp_path: Path) -> None:
    path = tmp_path / "values"
    run_forked(tmp_path, TORCH, PER_RANK, 2, path, free_port())
    with pytest.raises(sw.MismatchError, match="wanted by 1"):
        sw.restore(path, include="a", like={"a": sw.PerRank(0)})
    # A key names the wanted value in any process.
    found = sw.restore(path, like={"b": sw.PerRank(0, key="dp=1")})
    assert found["b"].value == 6


def test_sharded_ranks_save_to_a_path_over_the_store(tmp_path: Path) -> None:
    path = tmp_path / "weights"
    run_forked(tmp_path, TORCH, AT_A_PATH, 2, path, free_port())
    weight = sw.restore(path)["train"]["model"]["0.weight"]
    assert tuple(weight.shape) == (7, 5)
    assert not sw.verify(path).damages


SAVE_ONE_MESH = (
    ONE_MESH
    + """
runs = {name: build(1, make) for name, make in OPTIMIZERS.items()}
for run in runs.values():
    for n in range(3):
        update(*run, n)
with sw.CheckpointManager(ROOT, options=sw.Options(stall_timeout=60.0)) as manager:
    manager.save(0, {name: st.TrainState(*run) for name, run in runs.items()}).result()
for run in runs.values():
    print(*[update(*run, n) for n in range(3, 6)])
dist.destroy_process_group()
"""
)

RESTORE_ONE_MESH = (
    ONE_MESH
    + """
runs = {name: build(2, make) for name, make in OPTIMIZERS.items()}
with sw.CheckpointManager(ROOT, options=sw.Options(stall_timeout=60.0)) as manager:
    manager.restore(into={name: st.TrainState(*run) for name, run in runs.items()})
for model, optimizer in runs.values():
    for parameter, slots in optimizer.state.items():
        for slot in slots.values():
            if slot.shape == parameter.shape:
                assert isinstance(slot, DTensor) and slot.placements == parameter.placements
                assert slot.device_mesh == parameter.device_mesh
    print(*[update(model, optimizer, n) for n in range(3, 6)])
dist.destroy_process_group()
"""
)


@pytest.mark.parametrize(("saved", "restored"), some([(1, [1, 2]), (2, [1]), (4, [1])], 2))
def test_fresh_slots_are_sharded_as_their_parameter(tmp_path: Path, saved: int, restored: list[int]) -> None:
    for world in restored:
        folder = tmp_path / str(world)
        folder.mkdir()
        root = folder / "run"
        told = run_forked(folder, TORCH, SAVE_ONE_MESH, saved, root, free_port())[0]
        expected = [[float(loss) for loss in line.split()] for line in told.splitlines()]
        assert len(expected) == 4
        for told in run_forked(folder, TORCH, RESTORE_ONE_MESH, world, root, free_port()):
            found = [[float(loss) for loss in line.split()] for line in told.splitlines()]
            assert len(found) == len(expected)
            for mine, theirs in zip(found, expected, strict=True):
                assert mine == (theirs if world == saved else pytest.approx(theirs, rel=1e-5))


BARE_OPTIMIZER = (
    ONE_MESH
    + """
model, optimizer = build(1, OPTIMIZERS["AdamW"])
update(model, optimizer, 0)
with sw.CheckpointManager(ROOT, options=sw.Options(stall_timeout=60.0)) as manager:
    try:
        manager.save(0, {"model": model, "optimizer": optimizer})
        raise AssertionError("saved")
    except sw.MisuseError as error:
        assert error.leaf == "optimizer" and "TrainState" in str(error), error
    manager.save(0, {"model": model, "optimizer": optimizer.state_dict()}).result()
    for target in (build(2, OPTIMIZERS["AdamW"]), (model, optimizer)):
        before = [one.full_tensor() for one in target[0].parameters()]
        slots = [dict(one) for one in target[1].state.values()]
        try:
            manager.restore(into=dict(zip(("model", "optimizer"), target)))
            raise AssertionError("restored")
        except sw.UnsupportedLeaf as error:
            assert error.leaf == "optimizer" and "TrainState" in str(error), error
        assert all(torch.equal(one.full_tensor(), own) for one, own in zip(target[0].parameters(), before))
        assert all(
            mine[name] is slot
            for mine, own in zip(target[1].state.values(), slots, strict=True)
            for name, slot in own.items()
        )
dist.destroy_process_group()
"""
)


@pytest.mark.parametrize("world", [1, 2])
def test_a_bare_optimizer_of_dtensors_is_refused_unread(tmp_path: Path, world: int) -> None:
    run_forked(tmp_path, TORCH, BARE_OPTIMIZER, world, tmp_path / "run", free_port(), world)


def test_a_tensor_with_declared_boxes_is_saved_as_them(root: Path) -> None:
    torch = pytest.importorskip("torch")
    checkpoint = pytest.importorskip("torch.distributed.checkpoint")
    if not hasattr(checkpoint, "CheckpointableTensor"):
        pytest.skip("this torch has no CheckpointableTensor")
    full = torch.arange(48.0).reshape(12, 4)

    def part(rank: int, world: int, values: Any, parameter: bool) -> Any:
        """Some rows of each half, with a row of padding between: (-1 …)."""
        n = 6 // world
        tensor = torch.full((2 * n + 1, 4), -1.0)
        tensor[:n], tensor[n + 1 :] = values[rank * n :][:n], values[6 + rank * n :][:n]
        tensor = torch.nn.Parameter(tensor, requires_grad=False) if parameter else tensor
        tensor.global_shape = (12, 4)
        tensor.global_offsets = ((rank * n, 0), (6 + rank * n, 0))
        tensor.local_offsets = ((0, 0), (n + 1, 0))
        tensor.local_sizes = ((n, 4), (n, 4))
        assert isinstance(tensor, checkpoint.CheckpointableTensor)
        return tensor

    def whole_one(tensor: Any) -> Any:
        tensor.global_shape, tensor.global_offsets = (12, 4), ((0, 0),)
        tensor.local_offsets, tensor.local_sizes = ((),), ((12, 4),)
        return tensor

    def saves(rank: int, manager: sw.CheckpointManager) -> None:
        module = torch.nn.Module()
        module.w, module.n = part(rank, 2, full, True), torch.nn.Parameter(torch.ones(2))
        manager.save(0, {"m": sw.torch.TrainState(module)}).result()
        manager.save(1, {"m": module}).result()
        for step, parameter in ((2, False), (3, True)):
            manager.save(step, {"m": {"w": part(rank, 2, full, parameter), "n": 1}}).result()

    together(2, root, saves)
    np.testing.assert_array_equal(sw.restore(root, step=0)["m"]["model"]["w"], full)
    for step in (1, 2, 3):
        np.testing.assert_array_equal(sw.restore(root, step=step)["m"]["w"], full)

    for world in (1, 3):

        def restores(rank: int, manager: sw.CheckpointManager, world: int = world) -> None:
            for parameter in (False, True):
                expected = part(rank, world, full, parameter)
                target = part(rank, world, torch.zeros(12, 4), parameter)
                got = manager.restore(into={"m": {"w": target, "n": 0}})["m"]["w"]
                assert got is target
                assert torch.equal(got, expected), "the padding is what it was"
                new = manager.restore(like={"m": {"w": target, "n": 0}})["m"]["w"]
                assert type(new) is type(target)
                assert new is not target
                # New memory has zeros there.
                assert torch.equal(new, expected * (expected >= 0))
                assert isinstance(new, checkpoint.CheckpointableTensor)
                assert new.global_offsets == target.global_offsets
            one = manager.restore(into={"m": {"w": whole_one(torch.zeros(12, 4)), "n": 0}})
            assert torch.equal(one["m"]["w"], full)

        together(world, root, restores)

    wrong = part(0, 1, full, False)
    wrong.local_sizes = ((6, 4), (7, 4))
    with pytest.raises(
        sw.UnsupportedLeaf, match=r"`w`.*shape \(7, 4\) at \(6, 0\) does not lie in the shape \(12, 4\)"
    ):
        sw.save(root.parent / "other", {"w": wrong})
    wrong.local_sizes = ((6, 4),)
    with pytest.raises(sw.UnsupportedLeaf, match=r"`m/w`.*differ in length"):
        sw.restore(root, like={"m": {"w": wrong}})


SUBMESHES = """
import torch
import torch.distributed as dist
import stepwell.torch as st
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[5]}", rank=RANK, world_size=WORLD)
MESH = tuple(map(int, sys.argv[6].split("x")))
mesh = init_device_mesh("cpu", MESH, mesh_dim_names=("pp", "dp", "tp"))

def layer(number, seed):
    torch.manual_seed(10 * number + seed)
    one = torch.nn.Sequential()
    one.add_module("norm", torch.nn.LayerNorm(7))  # in no plan: FSDP alone cuts it, unevenly
    one.add_module("up", torch.nn.Linear(7, 20))
    one.add_module("down", torch.nn.Linear(20, 7))
    torch.nn.init.normal_(one.norm.weight)
    parallelize_module(one, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    return one

def build(seed):
    \"\"\"The layers of this stage, each with its optimizer. Odd ones are under DDP: their parameters are on the `tp` mesh alone.\"\"\"
    found = {}
    for number in range(4):
        if number % MESH[0] == mesh.get_coordinate()[0]:
            one = layer(number, seed)
            if number < 2:
                fully_shard(one, mesh=mesh["dp"])
            found[f"layer{number}"] = one, torch.optim.AdamW(one.parameters(), lr=0.1)
    return found, {name: st.TrainState(*parts) for name, parts in found.items()}

def step(layers):
    for model, optimizer in layers.values():
        model(torch.ones(3, 7)).sum().backward()
        optimizer.step()

def values(layers):
    return {
        f"{name}/{key}": value.full_tensor() if isinstance(value, DTensor) else value
        for name, (model, _) in layers.items()
        for key, value in model.state_dict().items()
    }
"""


def test_shards_of_a_partial_mesh_are_saved_once(tmp_path: Path) -> None:
    root = tmp_path / "run"
    save = (
        SUBMESHES
        + """
layers, states = build(1)
alike = distribute_tensor(torch.arange(9.0), mesh["dp"], [Replicate()], src_data_rank=None)
with sw.CheckpointManager(ROOT, options=sw.Options(stall_timeout=60.0)) as manager:
    manager.save(1, {"alike": alike, **states}).result()
    step(layers)  # the optimizer has slots now, of which nobody has told the others
    for number in (2, 3, 4, 5):
        manager.save(number, {"alike": alike, **states}).result()
found = values(layers)
if tuple(mesh.get_coordinate())[1:] == (0, 0):
    torch.save(found, f"{ROOT}-{mesh.get_coordinate()[0]}.pt")
dist.destroy_process_group()
"""
    )
    run_forked(tmp_path, TORCH, save, 8, root, free_port(), "2x2x2")
    expected = {}
    for stage in (0, 1):
        expected.update(torch.load(f"{root}-{stage}.pt"))
    for number in (2, 5):
        stored = sw.restore(root, step=number, to="torch")
        assert torch.equal(stored["alike"], torch.arange(9.0))
        for name, tensor in expected.items():
            layer, _, key = name.partition("/")
            assert torch.equal(stored[layer]["model"][key], tensor), (number, name)
    restore = (
        SUBMESHES
        + """
layers, states = build(2)
step(layers)
with sw.CheckpointManager(ROOT, options=sw.Options(stall_timeout=60.0)) as manager:
    manager.restore(into=states, unexpected="ignore")
expected = {}
for stage in (0, 1):
    expected.update(torch.load(f"{ROOT}-{stage}.pt"))
for name, value in values(layers).items():
    assert torch.equal(value, expected[name]), name
dist.destroy_process_group()
"""
    )
    run_forked(tmp_path, TORCH, restore, 4, root, free_port(), "1x2x2")


FSDP1 = """
import torch
import stepwell.torch as st
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[5]}", rank=RANK, world_size=WORLD)
mesh = init_device_mesh("cpu", (WORLD,))

def build(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.GELU(), torch.nn.Linear(7, 5))
    model = FullyShardedDataParallel(model, device_mesh=mesh, device_id=torch.device("cpu"), use_orig_params=True)
    try:
        st.TrainState(model)
        raise AssertionError("it does not know what its parameters are parts of")
    except sw.MisuseError as error:
        assert "FSDP1" in str(error), error
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)

def step(model, optimizer):
    loss = model(torch.arange(20.0).reshape(4, 5)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())

one, other = build(1), build(2)
step(*one)
with sw.CheckpointManager(ROOT, options=sw.Options(stall_timeout=60.0)) as manager:
    parameters, slots = get_state_dict(*one)
    manager.save(0, {"model": parameters, "optimizer": slots}).result()
    parameters, slots = get_state_dict(*other)
    found = manager.restore(into={"model": parameters, "optimizer": slots})
    set_state_dict(*other, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
assert [step(*one) for _ in range(3)] == [step(*other) for _ in range(3)]
dist.destroy_process_group()
"""


def test_fsdp1_dtensors_are_saved_whole(tmp_path: Path) -> None:
    root = tmp_path / "run"
    run_forked(tmp_path, TORCH, FSDP1, 2, root, free_port())
    found = sw.restore(root, to="torch")
    assert {name: tuple(one.shape) for name, one in found["model"].items()} == {
        "0.weight": (7, 5),
        "0.bias": (7,),
        "2.weight": (5, 7),
        "2.bias": (5,),
    }
    assert found["optimizer"]["state"]["2.weight"]["exp_avg"].shape == (5, 7)


BATCH_NORM = """
torch.manual_seed(0)
plain = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.BatchNorm1d(4))
wrapped = sys.argv[6] == "DDP"
model = torch.nn.parallel.DistributedDataParallel(plain) if wrapped else plain
optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
model(torch.randn(8, 4) + RANK)
statistics = plain[1].running_mean.clone()
with sw.CheckpointManager(ROOT, options=sw.Options(stall_timeout=60.0)) as manager:
    if not wrapped:
        try:
            manager.save(0, {"train": st.TrainState(model, optimizer)}).result()
            raise AssertionError("saved")
        except sw.StepwellError as error:
            assert "train/model/1.running_mean" in str(error), error
    state = st.TrainState(model, optimizer, replicated=() if wrapped else "*.running_*")
    manager.save(1, {"train": state}).result()
    manager.restore(1, into={"train": state})
first = [torch.zeros(4) for _ in range(WORLD)]
dist.all_gather(first, statistics)
assert torch.equal(plain[1].running_mean, first[0])
assert not torch.equal(first[0], first[1])
state.load_state_dict(state.state_dict())
dist.destroy_process_group()
"""


@pytest.mark.parametrize("wrapper", ["DDP", "none"])
def test_drifting_statistics_of_batch_norm_are_rank_0s(tmp_path: Path, wrapper: str) -> None:
    script = PREAMBLE + "import stepwell.torch as st\n" + BATCH_NORM
    run_forked(tmp_path, TORCH, script, 2, tmp_path / "run", free_port(), wrapper)


def test_a_replicated_pattern_that_matches_nothing_is_refused() -> None:
    with pytest.raises(sw.MisuseError, match=r"running.* matches no parameter"):
        sw.torch.TrainState(torch.nn.Linear(2, 2), replicated="*.running_*")
