"""Ranks of another grid read their slices of a checkpoint of DeepSpeed, and hardly more."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

from longer import some
from ranks import free_port, run_forked

pytest.importorskip("torch")
if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("deepspeed is not installed", allow_module_level=True)
from deepspeed_ranks import run_job

BF16 = {"bf16": {"enabled": True}}
SAVES = {f"zero_{stage}": {"kind": "large", "stage": stage, "config": BF16, "steps": 1} for stage in (2, 3)}
TORCH = "torch,torch.distributed.tensor.parallel,torch.distributed.fsdp,stepwell.torch"

RESTORE = """
from pathlib import Path
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
sys.path.append(sys.argv[7])
from deepspeed_model import Large
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[5]}", rank=RANK, world_size=WORLD)
dp, tp = map(int, sys.argv[6].split("x"))
mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
os.environ["STEPWELL_ENGINE"] = "threads"
os.environ["LOCAL_WORLD_SIZE"] = str(WORLD)  # as torchrun does

def data_read():
    # From the disk. What other ranks of this machine have read is in the page cache.
    return int(next(line for line in open("/proc/self/io") if line.startswith("read_bytes")).split()[1])

def forget(directory):
    # Takes its files out of the page cache.
    for file in directory.rglob("*"):
        if file.is_file():
            with file.open("rb+") as opened:
                os.fsync(opened.fileno())
                os.posix_fadvise(opened.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)

model = Large()
if tp > 1:
    parts = {"value": ColwiseParallel(), "out": RowwiseParallel(), "gate": ColwiseParallel(), "down": RowwiseParallel()}
    parallelize_module(model, mesh["tp"], {f"layers.0.{name}": part for name, part in parts.items()})
    parallelize_module(model, mesh["tp"], {"embed": RowwiseParallel()})
if dp > 1:
    fully_shard(model, mesh=mesh["dp"])
sw.restore(ROOT, include="epoch")  # imports what the next ones need
saved = sw.restore(ROOT) if RANK == 0 else None
told = []
for of_columns in (False, True):
    # Tensor parallelism cuts the columns of these.
    chosen = {name: one for name, one in model.named_parameters() if of_columns == name.endswith(("out.weight", "down.weight"))}
    slots = ("exp_avg", "exp_avg_sq")
    target = {
        "model": {name: torch.zeros_like(one) for name, one in chosen.items()},
        "optimizer": {"state": {name: {slot: torch.zeros_like(one) for slot in slots} for name, one in chosen.items()}},
    }
    if RANK == 0:
        forget(Path(ROOT))
    dist.barrier()
    before = data_read()
    sw.restore(ROOT, into=target, unexpected="ignore")
    read, needed = data_read() - before, 0
    for name in chosen:
        for slot, value in (("", target["model"][name]), *target["optimizer"]["state"][name].items()):
            needed += (value.to_local() if isinstance(value, DTensor) else value).nbytes
            whole = value.full_tensor() if isinstance(value, DTensor) else value
            if RANK == 0:
                found = saved["optimizer"]["state"][name][slot] if slot else saved["model"][name]
                assert whole.detach().numpy().tobytes() == found.tobytes(), (name, slot)
    told += [read, needed]
print(*told)
dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("large")
    run_job(directory, 4, SAVES)
    return directory


@pytest.mark.parametrize("grid", some(["2x2", "1x4", "8x1"]))
@pytest.mark.parametrize("name", SAVES)
def test_ranks_of_other_grids_read_their_slices(saves: Path, tmp_path: Path, name: str, grid: str) -> None:
    dp, tp = map(int, grid.split("x"))
    script = Path(__file__).parent
    told = run_forked(tmp_path, TORCH, RESTORE, dp * tp, saves / name, free_port(), grid, script)
    read, needed, read_columns, needed_columns = (
        sum(numbers) for numbers in zip(*(map(int, one.split()) for one in told), strict=True)
    )
    print(f"{name} onto {grid}: rows {read / needed:.2f}, columns {read_columns / needed_columns:.2f}")
    assert needed + needed_columns > 150e6
    for read_of_them, needed_of_them in ((read, needed), (read_columns, needed_columns)):
        assert 0.95 * needed_of_them <= read_of_them <= 1.1 * needed_of_them
