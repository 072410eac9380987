"""A small language model in PyTorch under FSDP2 and tensor parallelism, that saves as it trains and
resumes on any other number of processes.

    torchrun --nproc-per-node 4 docs/examples/torch_language_model.py --root runs/torch --tp 2

Kill it at any moment, and start it again with another ``--nproc-per-node`` or ``--tp``, or as one
process (``python docs/examples/torch_language_model.py --root runs/torch``). It resumes from the
newest committed step. The code does not describe the sharding to the checkpoint: ``DTensor`` does.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import stepwell as sw
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.nn import functional

VOCABULARY, CONTEXT, WIDTH, HEADS, LAYERS, BATCH = 256, 32, 128, 4, 4, 16


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        # Under tensor parallelism this rank has some of the heads.
        q, k, v = (
            part(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2) for part in (self.q, self.k, self.v)
        )
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(WIDTH), Attention()
        self.norm_2 = nn.LayerNorm(WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x))
        return x + self.mlp(self.norm_2(x))


class LanguageModel(nn.Module):
    """Predicts the next byte at each place of the context."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(CONTEXT, WIDTH)
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.norm = nn.LayerNorm(WIDTH)
        self.output = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        places = torch.arange(CONTEXT).expand_as(x)
        return self.output(self.norm(self.blocks(self.bytes(x) + self.places(places))))


def parallelize(model: LanguageModel, mesh: DeviceMesh) -> None:
    """Tensor parallelism over ``tp``, with the norms along the sequence, and FSDP2 over ``dp``."""
    gather = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    rows = RowwiseParallel(output_layouts=Shard(1))
    embedding = RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1))
    plan = {
        "bytes": embedding,
        "places": embedding,
        "blocks.*.norm_1": SequenceParallel(),
        "blocks.*.attention": gather,
        **{f"blocks.*.attention.{name}": ColwiseParallel() for name in "qkv"},
        "blocks.*.attention.out": rows,
        "blocks.*.norm_2": SequenceParallel(),
        "blocks.*.mlp": gather,
        "blocks.*.mlp.0": ColwiseParallel(),
        "blocks.*.mlp.2": rows,
        "norm": SequenceParallel(),
        "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate()),
    }
    parallelize_module(model, mesh["tp"], plan)
    for block in model.blocks:
        fully_shard(block, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])


def text() -> Tensor:
    """About half a megabyte of English, as bytes: the reference that comes with every Python."""
    from pydoc_data.topics import topics

    return torch.frombuffer(
        bytearray("\n\n".join(topics[name] for name in sorted(topics)).encode()), dtype=torch.uint8
    )


def train(
    root: Path,
    steps: int,
    tp: int = 1,
    every: int = 3,
    losses: Path | None = None,
    stall_timeout: float = 60.0,  # seconds without a heartbeat until a rank counts as dead
    restored: Callable[[int, Any], None] | None = None,
) -> None:
    """What each process runs. ``restored`` is called with the step and the state that were
    restored, if one was."""
    world = int(os.environ.get("WORLD_SIZE", 1))
    torch.manual_seed(0)
    model = LanguageModel()
    rank, dp, here = 0, 1, 0
    launched = "WORLD_SIZE" in os.environ
    if launched:
        dist.init_process_group("gloo")
        rank, dp = dist.get_rank(), world // tp
        mesh = init_device_mesh("cpu", (dp, tp), mesh_dim_names=("dp", "tp"))
        here = mesh["dp"].get_local_rank()
        parallelize(model, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 100)
    state = {
        "train": sw.torch.TrainState(model, optimizer, scheduler),
        "rng": torch.default_generator,  # draws the batches: the same on all ranks
    }
    data = text()

    with sw.CheckpointManager(
        root,
        save_policy=sw.every_steps(every),
        retention=sw.keep_latest(3),
        options=sw.Options(stall_timeout=stall_timeout),
    ) as mgr:
        newest = mgr.latest_step()
        state, first = mgr.resume(state)
        if newest is not None:
            if rank == 0:
                print(f"resumed from step {newest} with {world} processes, tp {tp}", flush=True)
            if restored:
                restored(newest, state)
        last = None  # save
        try:
            for step in range(first, steps):
                starts = torch.randint(len(data) - CONTEXT, (BATCH,))
                windows = data[starts[:, None] + torch.arange(CONTEXT + 1)].long()
                mine = windows.chunk(dp)[here]  # this rank's part of the batch
                loss = functional.cross_entropy(model(mine[:, :-1]).flatten(0, 1), mine[:, 1:].flatten())
                optimizer.zero_grad()
                loss.backward()  # FSDP takes the mean of the gradients over dp
                optimizer.step()
                scheduler.step()
                mean = loss.detach()
                if launched:
                    dist.all_reduce(mean, group=mesh["dp"].get_group())
                    mean /= dp
                last = mgr.save(step, state, metrics={"loss": mean}) or last
                if rank == 0 and losses:
                    with losses.open("a") as out:
                        out.write(json.dumps({"step": step, "loss": float(mean).hex()}) + "\n")
                if rank == 0 and step % 10 == 0:
                    print(f"step {step:4d}  loss {mean:.4f}", flush=True)
        except RuntimeError:  # of a collective that lacks a rank, mostly
            if last is not None:
                last.result(2 * stall_timeout)  # an error names the silent rank
            raise
    if launched:
        dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True, help="where the steps go")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument(
        "--tp", type=int, default=1, help="parts of each matrix; the rest of the processes share the batch"
    )
    given = parser.parse_args()
    train(given.root, given.steps, given.tp, given.save_every)
