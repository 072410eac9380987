"""A tiny training with ``accelerate``, for the tests."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import PartialState
from accelerate.utils import DistributedType, FullyShardedDataParallelPlugin, ProjectConfiguration

STEPS = 12
DEVICE = os.environ.get("STEPWELL_TRAIN_ON", "cpu")


class Average:
    """A registered object: the running mean of the loss."""

    def __init__(self) -> None:
        self.mean = torch.zeros(())

    def add(self, loss: torch.Tensor) -> None:
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()

    def state_dict(self) -> dict[str, Any]:
        return {"mean": self.mean}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.mean = state["mean"]


class Run:
    """A training of 12 steps that saves every third by an automatic name."""

    def __init__(
        self, project: Path, is_ours: bool = True, total_limit: int = 2, is_sharded: bool = False
    ) -> None:
        torch.manual_seed(0)
        torch.set_num_threads(1)
        configuration = ProjectConfiguration(
            str(project), automatic_checkpoint_naming=True, total_limit=total_limit
        )
        self.accelerator = Accelerator(cpu=DEVICE == "cpu", project_config=configuration)
        if is_sharded:
            # accelerate offers FSDP2 on accelerators only. Its code runs on CPUs too.
            PartialState._shared_state["distributed_type"] = DistributedType.FSDP
            self.accelerator.state.distributed_type = DistributedType.FSDP
            self.accelerator.state.fsdp_plugin = FullyShardedDataParallelPlugin(
                fsdp_version=2, state_dict_type="SHARDED_STATE_DICT", cpu_ram_efficient_loading=False
            )
        sizes = (torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 1))
        model = torch.nn.Sequential(*sizes)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 4)
        self.average = Average()
        if is_ours:
            import stepwell.integrations.accelerate as ours

            ours.use(self.accelerator)
        self.model, self.optimizer, self.scheduler = self.accelerator.prepare(model, optimizer, scheduler)
        self.accelerator.register_for_checkpointing(self.average)
        self.losses: dict[int, float] = {}
        self.step = 0

    def resume(self, directory: str | None = None) -> None:
        """Goes on after a save."""
        self.accelerator.load_state(directory)
        self.step = 3 * self.accelerator.save_iteration

    def train(self, killed_at: int = -1, steps: int = STEPS) -> dict[int, float]:
        """The losses by step. A kill comes right after a save has begun."""
        world, rank = self.accelerator.num_processes, self.accelerator.process_index
        while self.step < steps:
            batches = torch.randn(2, 4, 4, generator=torch.Generator().manual_seed(self.step)).to(DEVICE)
            loss = self.model(batches[rank] if world > 1 else batches.flatten(0, 1)).square().mean()
            self.accelerator.backward(loss)
            self.optimizer.step()
            self.scheduler.step()
            self.optimizer.zero_grad()
            self.average.add(self.accelerator.reduce(loss.detach(), "mean"))
            self.losses[self.step] = loss.item() + self.average.mean.item()
            self.step += 1
            if self.step % 3 == 0:
                self.accelerator.save_state()
                if self.step == killed_at:
                    os.kill(os.getpid(), signal.SIGKILL)
        self.accelerator.end_training()
        return self.losses


def ranks(project: Path, rank: int, world: int, port: str, how: str, kind: str) -> dict[int, float]:
    """A training of one of several processes: ``fresh`` is killed after step 9."""
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(world))
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    run = Run(project, is_ours=how != "plain", is_sharded=kind == "fsdp2")
    if how == "resume":
        run.resume()
    if how == "old":  # as accelerate has written it
        run.resume(str(project / "checkpoints" / "checkpoint_2"))
        run.step = 9
    return run.train(9 if how == "fresh" else -1)
