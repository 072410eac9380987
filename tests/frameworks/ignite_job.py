"""A tiny training with Ignite, as a program and for the tests."""

from __future__ import annotations

import json
import os
import signal
import sys
from typing import Any

import ignite.distributed as idist
import torch
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint


def train(handler: Any, killed: int = -1, epochs: int = 4, **options: Any) -> dict[int, float]:
    """Epochs of eight steps, with a save after each. Returns the losses. Each of several ranks has
    its rows."""
    torch.manual_seed(0)
    torch.set_num_threads(1)
    rank, world = idist.get_rank(), idist.get_world_size()
    model: Any = torch.nn.Sequential(torch.nn.Linear(4, 64), torch.nn.GELU(), torch.nn.Linear(64, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 8)
    if world > 1:
        model = torch.nn.parallel.DistributedDataParallel(model)
    rows = list(torch.randn(8, 4, 4, generator=torch.Generator().manual_seed(1)))
    losses: dict[int, float] = {}

    def step(engine: Engine, batch: torch.Tensor) -> float:
        optimizer.zero_grad()
        loss = model(batch[rank::world]).square().mean()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses[engine.state.iteration] = loss.item()
        return loss.item()

    trainer = Engine(step)
    state = {"model": model, "optimizer": optimizer, "scheduler": scheduler, "trainer": trainer}
    trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint(state, handler, **options))

    @trainer.on(Events.EPOCH_COMPLETED)
    def kill(engine: Engine) -> None:
        if engine.state.epoch == killed:
            os.kill(os.getpid(), signal.SIGKILL)

    if hasattr(handler, "newest"):
        trainer.add_event_handler(Events.COMPLETED, handler.wait_until_finished)
        newest = handler.newest()
        if newest is not None:
            Checkpoint.load_objects(state, handler.load(newest))
    trainer.run(rows, max_epochs=epochs)
    return losses


def main() -> None:
    """``ignite_job.py DIRECTORY KILLED_AFTER``."""
    from stepwell.integrations.ignite import StepwellSaver

    print(json.dumps(train(StepwellSaver(sys.argv[1]), int(sys.argv[2]))))


if __name__ == "__main__":
    main()
