"""One rank of a job of DeepSpeed on the CPU: trains a small model, and saves it, for each of the
given settings. Beside each save are the values of the live optimizer (``NAME.live``), and what
DeepSpeed's own script makes of the files (``NAME.fp32``).

    python deepspeed_job.py DIRECTORY SETTINGS   # with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import ds_to_universal
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed_model import Model, groups_of

# It is compiled when it is first used, which needs more than Python packages.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
# Few CPUs have fp16, and torch computes with it on all of them.
get_accelerator().is_fp16_supported = lambda: True

SLOTS = ("exp_avg", "exp_avg_sq")


def trained(setting: dict[str, Any]) -> Any:
    torch.manual_seed(7)
    model = Model()
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    config = {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 1000,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": setting["stage"], **setting.get("zero", {})},
        **setting.get("config", {}),
    }
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    for step in range(setting.get("steps", 3)):
        torch.manual_seed(100 * step + dist.get_rank())
        engine.backward(engine(torch.randint(0, 13, (2,))))
        engine.step()
    return engine


def live(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    """The values of the live optimizer, by parameter."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        return {
            name: {"fp32": safe_get_full_fp32_param(one)}
            | {slot: safe_get_full_optimizer_state(one, slot) for slot in SLOTS}
            for name, one in engine.module.named_parameters()
            if one.requires_grad
        }
    found: dict[str, dict[str, torch.Tensor]] = {}
    for number, parameters in enumerate(optimizer.round_robin_bit16_groups):
        own = optimizer.single_partition_of_fp32_groups[number]
        flat = {"fp32": own.detach()} | {slot: optimizer.optimizer.state[own][slot] for slot in SLOTS}
        for slot, partition in flat.items():
            parts = [torch.empty_like(partition) for _ in range(dist.get_world_size())]
            dist.all_gather(parts, partition.contiguous())
            whole = torch.cat(parts)
            for one, begin in zip(parameters, optimizer.round_robin_bit16_offsets[number], strict=True):
                value = whole[begin : begin + one.numel()].reshape(one.shape)
                found.setdefault(engine.param_names[one], {})[slot] = value.clone()
    return found


def main() -> None:
    directory, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for name, setting in settings.items():
        engine = trained(setting)
        engine.save_checkpoint(
            directory / name, client_state={"epoch": 3, "notes": {"a": [1, 2]}}, **setting.get("save", {})
        )
        dist.barrier()
        values = live(engine) if setting["stage"] and setting.get("steps", 3) else {}
        if dist.get_rank() == 0:
            torch.save(values, directory / f"{name}.live")
            if setting["stage"]:
                fp32 = get_fp32_state_dict_from_zero_checkpoint(directory / name)
                torch.save(fp32, directory / f"{name}.fp32")
            if setting.get("universal"):
                tag = (directory / name / "latest").read_text()
                (directory / f"{name}_universal").mkdir()
                ds_to_universal.main(
                    argparse.Namespace(
                        input_folder=str(directory / name / tag),
                        output_folder=str(directory / f"{name}_universal" / f"{tag}_universal"),
                        num_extract_workers=1,
                        num_merge_workers=1,
                        keep_temp_folder=False,
                        strict=True,
                        inject_missing_state=True,
                    )
                )
        dist.barrier()
    os._exit(0)  # some threads of gloo do not end by themselves


if __name__ == "__main__":
    main()
