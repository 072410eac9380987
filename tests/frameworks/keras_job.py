"""A tiny training with Keras, as a program and for the tests."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import keras
import numpy as np


class Losses(keras.callbacks.Callback):
    """The loss of each batch by epoch, and a kill at the end of an epoch."""

    def __init__(self, killed: int = -1) -> None:
        super().__init__()
        self.found: dict[int, list[float]] = {}
        self.killed = killed

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.found.setdefault(self.epoch, []).append(float(logs["loss"]))

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        self.epoch = epoch

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        if epoch == self.killed:
            os.kill(os.getpid(), signal.SIGKILL)


def model(distribution: Any = None) -> keras.Model:
    """With the same weights and names each time. Its dropout has a state."""
    keras.utils.clear_session()
    if distribution is not None:
        keras.distribution.set_distribution(distribution)
    keras.utils.set_random_seed(0)
    one = keras.Sequential(
        [keras.Input((4,)), keras.layers.Dense(64), keras.layers.Dropout(0.2), keras.layers.Dense(1)]
    )
    one.compile(optimizer="adam", loss="mse")
    return one


def fit(one: keras.Model, *callbacks: keras.callbacks.Callback, epochs: int = 4) -> dict[int, list[float]]:
    """Trains on shuffled rows. Returns the losses."""
    rows = np.random.default_rng(0).standard_normal((32, 4)).astype(np.float32)
    losses = next((found for found in callbacks if isinstance(found, Losses)), Losses())
    others = [found for found in callbacks if found is not losses]
    one.fit(rows, rows[:, :1], batch_size=8, epochs=epochs, verbose=0, callbacks=[*others, losses])
    return losses.found


def on_devices(root: Path) -> list[dict[int, list[float]]]:
    """Trains on two devices; then two epochs on two, the next on one, and the last on two."""
    from stepwell.integrations.keras import StepwellCheckpoint

    devices = keras.distribution.list_devices()
    mesh = keras.distribution.DeviceMesh((1, 2), ("batch", "model"), devices)
    layout = keras.distribution.LayoutMap(mesh)
    layout["sequential/dense/kernel"] = (None, "model")
    two = keras.distribution.ModelParallel(layout_map=layout, batch_dim_name="batch")
    found = [fit(model(two))]
    for epochs, distribution in (2, two), (3, None), (4, two):
        one = model(distribution)
        found.append(fit(one, StepwellCheckpoint(root), epochs=epochs))
        assert len(one.weights[0].value.sharding.device_set) == (2 if distribution else 1)
        assert one.weights[0].value.sharding.is_fully_replicated == (distribution is None)
    return found


def main() -> None:
    """``keras_job.py OUTPUT KILLED_AFTER CALLBACK...``: a training with each of the callbacks."""
    from stepwell.integrations.keras import StepwellCheckpoint

    output, killed, found = Path(sys.argv[1]), int(sys.argv[2]), []
    for name in sys.argv[3:]:
        if name == "BackupAndRestore":
            saves: Any = keras.callbacks.BackupAndRestore(output / name, delete_checkpoint=False)
        else:
            saves = StepwellCheckpoint(output / name, retention=2)
        found.append(fit(model(), saves, Losses(killed)))
    print(json.dumps(found))


if __name__ == "__main__":
    main()
