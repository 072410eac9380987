"""A tiny training with Ray Train, as a program. If there are two workers, one of them is killed."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import torch

STEPS, KILLED = 8, 5


def train(config: dict[str, Any]) -> dict[int, float]:
    """Without Ray if there is no folder. Each loss is that of all ranks."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    folder = config.get("folder")
    losses: dict[int, float] = {}
    first = 0
    if folder is not None:
        import ray.train
        import stepwell as sw
        from stepwell.integrations.ray import report, resume

        state, first = resume({"train": sw.torch.TrainState(model, optimizer), "rows": generator})
        rank = ray.train.get_context().get_world_rank()
    for step in range(first, STEPS):
        loss = model(torch.randn(8, 4, generator=generator)).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses[step] = loss.item()
        if folder is not None:
            report(step, {"loss": loss.item()}, state)
            Path(folder, f"{first}-{rank}").write_text(json.dumps(losses))
            if step == KILLED - 2:
                ray.train.get_all_reported_checkpoints()  # waits until Ray knows of them
            if step == KILLED and first == 0 and rank == 1:
                os.kill(os.getpid(), signal.SIGKILL)
    return losses


def main() -> None:
    """``ray_job.py FOLDER WORKERS``."""
    import ray
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    folder, workers = sys.argv[1], int(sys.argv[2])
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    run = RunConfig(
        name="run",
        storage_path=folder,
        failure_config=FailureConfig(max_failures=1),
        checkpoint_config=CheckpointConfig(num_to_keep=2),
    )
    scaling = ScalingConfig(num_workers=workers)
    result = TorchTrainer(
        train, train_loop_config={"folder": folder}, scaling_config=scaling, run_config=run
    ).fit()
    Path(folder, "result").write_text(json.dumps([result.metrics, result.checkpoint.path]))


if __name__ == "__main__":
    main()
