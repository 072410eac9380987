"""Keras 3 with checkpoints of stepwell.

    from stepwell.integrations.keras import StepwellCheckpoint

    model.fit(x, y, epochs=10, callbacks=[StepwellCheckpoint("runs/first", retention=3)])

The run has one root. Step N is the state after epoch N, as Keras counts them. Training goes on
while the step is written. The same call resumes after the newest committed step.
"""

from __future__ import annotations

import os
import random

import keras
import numpy as np

from .._manager import CheckpointManager
from .._options import Options
from .._policies import SavePolicy
from .._retention import Retention
from ..errors import MisuseError
from ..events import OnEvent
from ._terms import Terms, in_terms

_TESTED = "keras 3.15"
#: The caller passes ``options=``.
_TERMS = Terms(memory=None, lockless=None)


class StepwellCheckpoint(keras.callbacks.Callback):  # type: ignore[misc]  # keras declares no types
    """A callback that saves after epochs, and resumes when training begins. A step has the model,
    the optimizer and the states of random numbers. The logs of the epoch are its metrics.

    A damaged newest step is moved into a branch, with a warning, and the one before resumes. The
    next save, or the end of the training, raises the failure of a save.

    Args:
        root: the directory of the run.
        save_policy: which epochs are saved, as of :class:`stepwell.CheckpointManager`; default:
            all.
        retention: which steps stay, as of the manager; default: all.
        options: rarely needed options.
        prove_resume: how many epochs to trace after each save, as of the manager.
        on_event: gets the events of the manager.

    Raises:
        MisuseError: when training begins: the backend is neither JAX nor torch, or this version of
            Keras cannot begin at a later epoch.
    """

    def __init__(
        self,
        root: str | os.PathLike[str],
        *,
        save_policy: SavePolicy | int | None = None,
        retention: Retention | int | None = None,
        options: Options | None = None,
        prove_resume: int = 0,
        on_event: OnEvent | None = None,
    ) -> None:
        super().__init__()
        self._prove_resume, self._on_event = prove_resume, on_event
        self._root, self._save_policy, self._retention, self._options = root, save_policy, retention, options
        self._manager: CheckpointManager | None = None

    def on_train_begin(self, logs: object = None) -> None:
        """Resumes. Called by Keras."""
        model = self.model
        if keras.backend.backend() not in ("jax", "torch"):
            raise MisuseError(
                f"StepwellCheckpoint serves Keras on JAX and torch, not on {keras.backend.backend()}"
            )
        if not hasattr(model, "_initial_epoch"):
            raise MisuseError(
                f"keras {keras.__version__} cannot begin at a later epoch. Tested with {_TESTED}"
            )
        if self._manager is not None:
            self._manager.close()  # an exception ended the training before
        with in_terms(_TERMS):
            self._manager = CheckpointManager(
                self._root,
                save_policy=self._save_policy,
                retention=self._retention,
                options=self._options,
                prove_resume=self._prove_resume,
                on_event=self._on_event,
            )
            state = _state(model)
            self._manager.check(state)
            state, first = self._manager.resume(state, fallback=True)
        model.set_state_tree(state["model"])
        model._initial_epoch = first

    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        """Has the next ``fit`` begin by itself, also if this one is interrupted. Called by
        Keras."""
        self.model._initial_epoch = None

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        """Saves. Called by Keras."""
        assert self._manager is not None
        metrics = {name: float(value) for name, value in (logs or {}).items()}
        model = self.model
        with in_terms(_TERMS):
            self._manager.save(epoch, lambda: _state(model), metrics=metrics)

    def on_train_end(self, logs: object = None) -> None:
        """Waits for the saves, and raises a failure. Called by Keras."""
        assert self._manager is not None
        self.model._initial_epoch = None  # if no epoch has begun
        with in_terms(_TERMS):
            self._manager.close()


def _state(model: keras.Model) -> dict[str, object]:
    tree = model.get_state_tree()
    del tree["metrics_variables"]  # each epoch begins with new ones
    generators: dict[str, object] = {"python": random, "numpy": np.random}
    if keras.backend.backend() == "torch":
        import torch

        generators["torch"] = torch.default_generator
    return {"model": tree, "random": generators}
