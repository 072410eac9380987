"""A tiny training with the parts of torchtitan, for the tests. torchtitan's own ``Trainer`` needs a
GPU. This loop makes its calls in the same order."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchtitan.components.checkpointer import BaseCheckpointManager, CheckpointManager
from torchtitan.components.dataloader import ParallelAwareDataloader
from torchtitan.components.optimizer import LRSchedulersContainer, OptimizersContainer, ParamGroupConfig
from torchtitan.config import Configurable
from torchtitan.config.override import OverrideConfig, apply_overrides, parse_cli_imports

OURS = "stepwell.integrations.torchtitan.use"


@dataclass(kw_only=True, slots=True)
class JobConfig(Configurable.Config):
    """The tree that ``--override.imports`` changes."""

    checkpoint: BaseCheckpointManager.Config
    override: OverrideConfig = field(default_factory=OverrideConfig)


class Numbers(torch.utils.data.IterableDataset[torch.Tensor]):
    """Rows of random numbers of one rank, without an end."""

    def __init__(self, rank: int) -> None:
        self.rank, self.at = rank, 0

    def __iter__(self) -> Iterator[torch.Tensor]:
        while True:
            seed = torch.Generator().manual_seed(1000 * self.rank + self.at)
            self.at += 1
            yield torch.randn(4, generator=seed, dtype=torch.float64)

    def state_dict(self) -> dict[str, Any]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.at = state["at"]


class Run:
    """A training of 12 steps that saves every third. ``override`` is what the command line gives to
    ``--override.imports``; without it, torchtitan's own manager saves."""

    def __init__(self, project: Path, override: str = OURS, steps: int = 12, **fields: Any) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        self.step, self.ntokens_seen, self.steps = 0, 0, steps
        rank, world = dist.get_rank(), dist.get_world_size()
        layers = [torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 2)]
        self.model = torch.nn.Sequential(*layers).double()
        if world > 1:
            fully_shard(self.model, mesh=init_device_mesh("cpu", (world,)))
        groups = [
            ParamGroupConfig(pattern="bias$", optimizer_name="Adam", optimizer_kwargs={"lr": 1e-2}),
            ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 1e-2}),
        ]
        self.optimizers = OptimizersContainer.Config(param_groups=groups, implementation="foreach").build(
            model_parts=[self.model]
        )
        self.lr_schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=12
        )
        self.loader = ParallelAwareDataloader(Numbers(rank), rank, world, batch_size=2)
        self.load_step = fields.pop("load_step", -1)
        adapter = fields.pop("sd_adapter", None)
        usual = {"enable": True, "interval": 3, "last_save_model_only": False, "async_mode": "async"}
        config = JobConfig(checkpoint=CheckpointManager.Config(**{**usual, **fields}))
        config.override.imports = parse_cli_imports([override] if override else [])
        apply_overrides(config.override, config)
        self.checkpointer = config.checkpoint.build(
            dataloader=self.loader,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.lr_schedulers,
            states={"train_state": self},
            sd_adapter=adapter,
            base_folder=str(project),
        )
        self.losses: dict[int, float] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "ntokens_seen": self.ntokens_seen}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.step, self.ntokens_seen = state["step"], state["ntokens_seen"]

    def train(self, killed_at: int = -1) -> dict[int, float]:
        """The losses by step. A kill comes right after a save has returned."""
        try:
            self.checkpointer.load(step=self.load_step)
            batches = iter(self.loader)
            while self.step < self.steps:
                self.step += 1
                self.optimizers.zero_grad()
                batch = next(batches)
                self.ntokens_seen += batch.numel() + dist.get_rank()
                loss = self.model(batch).square().mean()
                loss.backward()
                self.checkpointer.maybe_wait_for_staging()
                self.optimizers.step()
                self.lr_schedulers.step()
                self.losses[self.step] = loss.item()
                if self.step == killed_at:
                    self.checkpointer.maybe_wait_for_saving()  # step 6 is committed
                self.checkpointer.save(self.step, last_step=self.step == self.steps)
                if self.step == killed_at:
                    os.kill(os.getpid(), signal.SIGKILL)
        finally:
            self.checkpointer.close()
        return self.losses


def ranks(project: Path, rank: int, world: int, port: str, how: str) -> list[dict[int, float]]:
    """Trainings of one of several processes: one that is killed after step 9; or that goes on, and
    one with torchtitan's own manager."""
    store = dist.TCPStore("127.0.0.1", int(port), world, is_master=rank == 0)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    if how == "killed":
        Run(project).train(9)
    losses = [Run(project).train(), Run(project / "plain", override="").train()]
    dist.destroy_process_group()
    return losses
