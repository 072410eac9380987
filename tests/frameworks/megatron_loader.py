"""Loads checkpoints into a model of Megatron on other ranks than those that saved it.

    python tests/frameworks/megatron_loader.py ORIGINAL CONVERTED STORE RANK

One of two ranks. Megatron loads both checkpoints, and stepwell restores the first one. All results
must be equal.
"""

from __future__ import annotations

import os
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1] / "foreign"))

import make_megatron
import stepwell as sw
import torch
import torch.distributed as dist


def main(original: str, converted: str, store: str, rank: int) -> None:
    """Compares, as one of the ranks."""
    make_megatron.prepare()
    from megatron.core import dist_checkpointing, parallel_state

    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    layout = replace(make_megatron.LAYOUTS["dense"], tensor=2, pipeline=1)
    parallel_state.initialize_model_parallel(layout.tensor, layout.pipeline)

    def state() -> dict[str, Any]:
        found: dict[str, Any] = make_megatron.model(layout).sharded_state_dict()
        return found

    first = dist_checkpointing.load({"model": state()}, original)
    second = dist_checkpointing.load({"model": state()}, converted)
    ours = sw.restore(original, like=state(), unexpected="ignore")
    assert first["model"].keys() == second["model"].keys() == ours.keys()
    tensors = [key for key, value in ours.items() if isinstance(value, torch.Tensor)]
    assert len(tensors) > 30
    for key, value in ours.items():
        if key in tensors:
            assert torch.equal(value, first["model"][key]), key
            assert torch.equal(value, second["model"][key]), key
        else:
            assert value is first["model"][key] is second["model"][key] is None, key
    assert second["iteration"] == first["iteration"] == 100
    assert second["args"].num_layers == first["args"].num_layers == 4
    dist.barrier()
    os._exit(0)  # gloo may wait for the other rank without an end


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main(*sys.argv[1:4], int(sys.argv[4]))
