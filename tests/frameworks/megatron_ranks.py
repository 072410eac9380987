"""Moves a model of Megatron-Core to several ranks.

    python tests/frameworks/megatron_ranks.py JOB RANK

One of the ranks of a job, which is a JSON file. Its ranks load a checkpoint that has the whole
model, each into its part of it. They save these parts with an optimizer whose moments are made of
the weights, so that the moments of the whole model are known.
"""

from __future__ import annotations

import json
import os
import sys
import warnings
from pathlib import Path
from typing import Any

import megatron_models as megatron
import torch
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.optimizer.optimizer import FP32Optimizer


def moments(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    """The slots of a weight."""
    return {"exp_avg": weight * 2, "exp_avg_sq": weight * weight}


def optimizer_of(model: Any) -> Any:
    """Megatron's optimizer with these slots. Its initialiser needs CUDA."""
    made = FP32Optimizer.__new__(FP32Optimizer)
    made.optimizer, made.is_stub_optimizer = torch.optim.AdamW(model.parameters(), lr=0.5), False
    for one in model.parameters():
        made.optimizer.state[one] = {"step": torch.tensor(3.0), **moments(one.detach())}
    return made


def main(job: Path, rank: int) -> None:
    """Loads and saves, as one of the ranks."""
    given = json.loads(job.read_text())
    sizes = given["sizes"]
    store = torch.distributed.FileStore(str(job.with_suffix(".store")), given["ranks"])
    with megatron.ranks(rank, given["ranks"], store, **sizes):
        model = megatron.gpt(
            given["vocab"],
            {
                "pre_process": parallel_state.is_pipeline_first_stage(),
                "post_process": parallel_state.is_pipeline_last_stage(),
            },
            given["layers"],
            pipeline_dtype=torch.float32,
            **given["config"],
            **sizes,
        )
        megatron.load(model, given["whole"])
        state = megatron.tensors(model)
        optimizer = optimizer_of(model).sharded_state_dict(state)
        if rank == 0:
            Path(given["parts"]).mkdir()
        torch.distributed.barrier()
        dist_checkpointing.save({**state, "optimizer": optimizer}, given["parts"])
        torch.distributed.barrier()
        os._exit(0)  # gloo may wait for other ranks without an end


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    main(Path(sys.argv[1]), int(sys.argv[2]))
