"""A tiny training with Ray Train, as a program. If there are two workers, one of them is killed."""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from pathlib import Path
from typing import Any

import torch

STEPS, KILLED = 8, 5


def train(config: dict[str, Any]) -> dict[int, float]:
    """Without Ray if there is no folder. Each loss is that of all ranks. The disk may be full at a
    step."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(4, 32), torch.nn.GELU(), torch.nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    generator = torch.Generator().manual_seed(1)
    folder, full_at = config.get("folder"), config.get("full_at")
    large = torch.zeros(config.get("large", 0))
    losses: dict[int, float] = {}
    first = 0
    if folder is not None:
        import ray.train
        import stepwell as sw
        from stepwell.integrations.ray import report, resume

        saved = {"train": sw.torch.TrainState(model, optimizer), "rows": generator, "large": large}
        state, first = resume(saved)
        rank = ray.train.get_context().get_world_rank()
    for step in range(first, config.get("steps", STEPS)):
        if step == full_at:
            ray.train.get_all_reported_checkpoints()  # waits for those before
            resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, 1 << 20))
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


def run(folder: str, workers: int = 1, failures: int = 0, **config: Any) -> Any:
    """Trains with Ray, and returns its result."""
    from ray.train import CheckpointConfig, FailureConfig, RunConfig, ScalingConfig
    from ray.train.torch import TorchTrainer

    return TorchTrainer(
        train,
        train_loop_config={"folder": folder, **config},
        scaling_config=ScalingConfig(num_workers=workers),
        run_config=RunConfig(
            name="run",
            storage_path=folder,
            failure_config=FailureConfig(max_failures=failures),
            checkpoint_config=CheckpointConfig(num_to_keep=2),
        ),
    ).fit()


def accidents(folder: str) -> None:
    """Writes the errors of a run with a full disk, and of one whose newest checkpoint is torn.
    Between these the run goes on, and ends."""
    errors = []
    for config in {"steps": 4, "full_at": 3}, {"steps": 5}, {"steps": 6}:
        newest = Path(folder, "run", "checkpoint_00000004")
        for manifest in newest.glob("step_*/manifest.json"):
            manifest.unlink()
        try:
            run(folder, large=1 << 20, **config)
        except Exception as error:
            errors.append(str(error))
    Path(folder, "errors").write_text(json.dumps(errors))


def main() -> None:
    """``ray_job.py FOLDER WORKERS|accidents``."""
    import ray

    folder, how = sys.argv[1], sys.argv[2]
    ray.init(num_cpus=3, include_dashboard=False, log_to_driver=False)
    if how == "accidents":
        accidents(folder)
        return
    result = run(folder, int(how), failures=1)
    Path(folder, "result").write_text(json.dumps([result.metrics, result.checkpoint.path]))


if __name__ == "__main__":
    main()
