"""Writes checkpoints with an old version of DeepSpeed, and what is in them.

    python3.11 -m venv old
    old/bin/pip install torch==2.2.2 'numpy<2' pydantic hjson psutil py-cpuinfo tqdm einops
    DS_BUILD_OPS=0 old/bin/pip install --no-deps --no-build-isolation --target ds deepspeed==0.14.5
    PYTHONPATH=ds:tests/frameworks old/bin/python tests/foreign/make_deepspeed.py

Versions before 0.14 import packages of Intel for the CPU, also when they are installed. Empty
modules stand in for them. Versions before 0.12 need ``pydantic<2``.

``tests/python/test_deepspeed_files.py`` reads the files, in ``deepspeed_<version>/``. They were
made on a machine without a GPU, by two processes with gloo. The file ``NAME.json`` has the tensors
of a checkpoint by path: dtype, shape, and the digest of the bytes. The processes take them from the
live optimizer, after the save.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANKS = 2
SLOTS = ("exp_avg", "exp_avg_sq")
BF16 = {"bf16": {"enabled": True}}
#: The saves: the stage of ZeRO, and the configuration.
SAVES: dict[str, tuple[int, dict[str, Any]]] = {
    "zero_1": (1, {}),
    "zero_1_bf16": (1, {**BF16, "data_types": {"grad_accum_dtype": "fp32"}}),
    "zero_2_bf16": (2, BF16),
    "zero_3_bf16": (3, BF16),
}


def all_gather(
    output_tensor: torch.Tensor, input_tensor: torch.Tensor, *_: Any, async_op: bool = False, **__: Any
) -> Any:
    """Gathers into one tensor. Old versions of gloo gather into several ones only."""
    return dist.all_gather(
        list(output_tensor.detach().view(RANKS, -1)), input_tensor.detach().flatten(), async_op=async_op
    )


def reduce_scatter(output: torch.Tensor, input: torch.Tensor, *_: Any, **__: Any) -> None:
    """The sum over the ranks, of this rank's part. Old versions of gloo do not have it."""
    whole = input.detach().clone()
    dist.all_reduce(whole)
    output.detach().copy_(whole.view(RANKS, -1)[dist.get_rank()].view_as(output))


def prepare() -> Any:
    """Imports DeepSpeed, without what needs more than Python packages."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    for name in ("intel_extension_for_pytorch", "oneccl_bindings_for_pytorch"):
        sys.modules[name] = types.ModuleType(name)
    dist.all_gather_into_tensor, dist.reduce_scatter_tensor = all_gather, reduce_scatter
    import deepspeed
    from deepspeed.accelerator import get_accelerator

    get_accelerator()._communication_backend_name = "gloo"
    backend = sys.modules["deepspeed.comm.torch"]
    backend.build_shm_op = lambda: None  # type: ignore[attr-defined]
    if deepspeed.__version__ < "0.14":  # it knows the tensors of GPUs only
        engine = sys.modules["deepspeed.runtime.engine"]
        engine.split_half_float_double_sparse = lambda some: [("", some)]  # type: ignore[attr-defined]
    return deepspeed


def trained(deepspeed: Any, stage: int, config: dict[str, Any]) -> Any:
    from deepspeed_model import Model, groups_of

    torch.manual_seed(7)
    model = Model()
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    engine, *_ = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2),
        config={
            "train_micro_batch_size_per_gpu": 2,
            "steps_per_print": 1000,
            "zero_allow_untested_optimizer": True,
            "zero_optimization": {"stage": stage},
            **config,
        },
    )
    for step in range(3):
        torch.manual_seed(100 * step + dist.get_rank())
        engine.backward(engine(torch.randint(0, 13, (2,))))
        engine.step()
    return engine


def gathered(own: torch.Tensor) -> torch.Tensor:
    """The partitions of all ranks, one behind the other."""
    lengths: list[Any] = [None] * RANKS
    dist.all_gather_object(lengths, own.detach().contiguous())
    return torch.cat(lengths)


def live(engine: Any, stage: int) -> dict[str, torch.Tensor]:
    """The values of the live optimizer, by path."""
    optimizer, found = engine.optimizer, {}
    names = {id(one): name for name, one in engine.module.named_parameters()}
    if stage == 3:
        from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

        for name, one in engine.module.named_parameters():
            if one.requires_grad:
                found[f"model/{name}"] = safe_get_full_fp32_param(one)
                for slot in SLOTS:
                    value = safe_get_full_optimizer_state(one, slot)
                    found[f"optimizer/state/{name}/{slot}"] = value
        return found
    is_bf16 = not hasattr(optimizer, "round_robin_bit16_groups")
    groups = optimizer.bf16_groups if is_bf16 else optimizer.round_robin_bit16_groups
    partitions = (
        optimizer.fp32_groups_flat_partition if is_bf16 else optimizer.single_partition_of_fp32_groups
    )
    for parameters, own in zip(groups, partitions, strict=True):
        state = optimizer.optimizer.state[own]
        flat = {"model/{}": gathered(own)}
        flat |= {f"optimizer/state/{{}}/{slot}": gathered(state[slot]) for slot in SLOTS}
        begin = 0
        for one in parameters:
            for path, values in flat.items():
                value = values[begin : begin + one.numel()].reshape(one.shape)
                found[path.format(names[id(one)])] = value.clone()
            begin += one.numel()
    return found


def row(tensor: torch.Tensor) -> list[Any]:
    """The dtype, the shape and the digest of a tensor."""
    plain = tensor.detach().contiguous()
    digest = hashlib.sha256(plain.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
    return [str(plain.dtype).removeprefix("torch."), list(plain.shape), digest]


def of_rank(folder: Path, rank: int, names: list[str], store: str) -> None:
    """Trains and saves, as one of the ranks."""
    deepspeed = prepare()
    sizes = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": RANKS, "LOCAL_SIZE": RANKS}
    os.environ |= {name: str(value) for name, value in sizes.items()}
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False, auto_mpi_discovery=False)
    os.chdir(folder)  # some versions store the path as it is given
    for name in names:
        stage, config = SAVES[name]
        engine = trained(deepspeed, stage, config)
        engine.save_checkpoint(name, client_state={"epoch": 3})
        values = live(engine, stage)
        # Before 0.14, the first step is the second one of the optimizer.
        (step,) = {float(one["step"]) for one in engine.optimizer.optimizer.state.values()}
        for path in [path for path in values if path.endswith("/exp_avg")]:
            values[f"{path.removesuffix('exp_avg')}step"] = torch.tensor(step)
        if rank == 0:
            expected = {path: row(value) for path, value in values.items()}
            Path(f"{name}.json").write_text(json.dumps(expected, indent=0, sort_keys=True) + "\n")
            for script in Path(name).glob("zero_to_fp32.py"):
                script.unlink()  # the code of DeepSpeed
        dist.barrier()
    os._exit(0)  # some threads of gloo do not end by themselves


def main(names: list[str]) -> None:
    """Starts the ranks."""
    version = prepare().__version__.split("+")[0]
    folder = Path(__file__).resolve().parent / f"deepspeed_{version}"
    folder.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, __file__, "--rank", str(folder), f"{place}/store"]
        ranks = [subprocess.Popen([*command, str(rank), *names]) for rank in range(RANKS)]
        try:
            assert [rank.wait(180) for rank in ranks] == [0] * RANKS
        finally:
            for rank in ranks:
                rank.kill()


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rank"]:
        of_rank(Path(sys.argv[2]), int(sys.argv[4]), sys.argv[5:], sys.argv[3])
    else:
        main(sys.argv[1:] or list(SAVES))
