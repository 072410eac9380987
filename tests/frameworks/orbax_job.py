"""A tiny training with JAX and the manager of Orbax, or ours, as a program and for the tests."""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import optax

LIBRARIES = {"orbax": "orbax.checkpoint", "stepwell": "stepwell.integrations.orbax"}
STEPS = 10


def train(ocp: Any, directory: Path, killed: int = -1) -> dict[int, float]:
    """Resumes from the newest step, and saves every second one. Returns the losses."""
    optimizer = optax.adamw(1e-2)
    params = {"w": jax.random.normal(jax.random.key(0), (8, 4)), "b": jnp.zeros(4)}
    state = {"params": params, "opt": optimizer.init(params), "key": jax.random.key_data(jax.random.key(1))}

    def loss_of(params: Any, rows: Any) -> Any:
        return jnp.square(rows @ params["w"] + params["b"]).mean()

    @jax.jit
    def update(state: Any) -> Any:
        key, drawn = jax.random.split(jax.random.wrap_key_data(state["key"]))
        loss, gradient = jax.value_and_grad(loss_of)(state["params"], jax.random.normal(drawn, (16, 8)))
        updates, opt = optimizer.update(gradient, state["opt"], state["params"])
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "opt": opt, "key": jax.random.key_data(key)}, loss

    losses = {}
    options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=2)
    with ocp.CheckpointManager(directory, options=options) as manager:
        newest = manager.latest_step()
        if newest is not None:
            state = manager.restore(newest, args=ocp.args.StandardRestore(state))
        for step in range(0 if newest is None else newest + 1, STEPS):
            state, loss = update(state)
            losses[step] = float(loss)
            manager.save(step, args=ocp.args.StandardSave(state))
            if step == killed:
                os.kill(os.getpid(), signal.SIGKILL)
    return losses


def main() -> None:
    """``orbax_job.py orbax|stepwell DIRECTORY KILLED_AFTER``."""
    ocp = importlib.import_module(LIBRARIES[sys.argv[1]])
    print(json.dumps(train(ocp, Path(sys.argv[2]), int(sys.argv[3]))))


if __name__ == "__main__":
    main()
