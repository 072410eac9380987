"""A tiny training with Lightning, as a program and for the tests."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import lightning
import torch
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.fsdp import fully_shard

DEVICE = os.environ.get("STEPWELL_TRAIN_ON", "cpu")


class Model(lightning.LightningModule):
    """Records the loss of each step."""

    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layers = torch.nn.Sequential(
            torch.nn.Linear(4, width), torch.nn.GELU(), torch.nn.Linear(width, 1)
        )
        self.losses: dict[int, float] = {}

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        loss = self.layers(batch).square().mean()
        self.losses[self.global_step] = loss.item()
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1)}

    def train_dataloader(self) -> Any:
        data = torch.randn(32, 4, generator=torch.Generator().manual_seed(0))
        return torch.utils.data.DataLoader(data, batch_size=4)


class Sharded(Model):
    """The model in shards of FSDP2."""

    def configure_model(self) -> None:
        assert self.device_mesh is not None
        fully_shard(self.layers, mesh=self.device_mesh["data_parallel"])


class Killed(Callback):
    """Ends the process at the end of an epoch, right after its save has begun."""

    def __init__(self, epoch: int) -> None:
        self.epoch = epoch

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        if trainer.current_epoch == self.epoch + 1:
            os.kill(os.getpid(), signal.SIGKILL)


def trainer(output: Path, plugins: list[Any], *callbacks: Callback, **options: Any) -> lightning.Trainer:
    """Three epochs of eight steps; each epoch ends with a save."""
    checkpoints = ModelCheckpoint(
        output,
        monitor=options.pop("monitor", None),
        save_top_k=options.pop("save_top_k", 1),
        save_last=options.pop("save_last", True),
        every_n_epochs=1,
    )
    return lightning.Trainer(
        accelerator=DEVICE,
        max_epochs=options.pop("max_epochs", 3),
        default_root_dir=output,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpoints, *callbacks],
        plugins=plugins,
        **options,
    )


def model(kind: type[Model] = Model) -> Model:
    """With the same weights each time."""
    torch.manual_seed(0)
    return kind()


def sharded(devices: int, is_ours: bool = True) -> dict[str, Any]:
    """The options of a trainer of :class:`Sharded`."""
    from stepwell.integrations.lightning_parallel import StepwellModelParallelStrategy

    kind = StepwellModelParallelStrategy if is_ours else ModelParallelStrategy
    return {"devices": devices, "strategy": kind(data_parallel_size=devices, tensor_parallel_size=1)}


def ranks(output: Path, rank: int, port: str, how: str) -> list[dict[int, float]]:
    """Trainings with shards of one of two processes: one that is killed after the save of the
    second epoch; or that goes on, and one with Lightning's own strategy."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, NODE_RANK="0", LOCAL_RANK=str(rank))
    found = []
    for folder, is_ours in (output / "two", True), (output / "plain", False):
        one = model(Sharded)
        again = trainer(folder, [], *([Killed(1)] if how == "killed" else []), **sharded(2, is_ours))
        again.fit(one, ckpt_path="last")
        found.append(one.losses)
    return found


def main() -> None:
    """``lightning_job.py OUTPUT DEVICES KILLED_AFTER``."""
    from stepwell.integrations.lightning import StepwellIO

    output, devices, killed = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    torch.set_num_threads(1)
    options: dict[str, Any] = {"devices": devices, "strategy": "ddp"} if devices > 1 else {}
    one, callbacks = model(), [Killed(killed)] if killed >= 0 else []
    trainer(output, [StepwellIO()], *callbacks, **options).fit(one, ckpt_path="last")
    print(json.dumps(one.losses))


if __name__ == "__main__":
    main()
