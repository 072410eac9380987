"""Arrays of JAX on a CUDA device, and donation."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw

jax = pytest.importorskip("jax")


@pytest.fixture(autouse=True)
def device() -> Any:
    try:
        return jax.devices("gpu")[0]
    except RuntimeError:
        pytest.skip("skipped: JAX has no CUDA device")


def test_a_donating_loop_reads_back_every_step(device: Any, root: Path) -> None:
    update = jax.jit(lambda state: jax.tree.map(lambda one: one + 1, state), donate_argnums=0)
    state = jax.device_put({f"w{n}": np.zeros(1 << 20, np.float32) for n in range(8)}, device)
    with sw.CheckpointManager(root, max_pending=2) as mgr:
        for step in range(10):
            mgr.save(step, state)
            with mgr.update_guard():
                state = update(state)
        mgr.wait_until_finished()
        for step in range(10):
            assert all((one == step).all() for one in mgr.restore(step).values()), step


def test_a_donating_loop_without_guards_reads_back_every_step(device: Any, root: Path) -> None:
    update = jax.jit(lambda state: jax.tree.map(lambda one: one + 1, state), donate_argnums=0)
    state = jax.device_put({f"w{n}": np.zeros(4 << 20, np.float32) for n in range(4)}, device)
    with sw.CheckpointManager(root, staging_bytes=16 << 20, max_pending=2) as mgr:
        for step in range(10):
            mgr.save(step, state)
            state = update(state)
        mgr.wait_until_finished()
        for step in range(10):
            assert all((one == step).all() for one in mgr.restore(step).values()), step


def test_a_state_comes_back_on_the_device(device: Any, root: Path) -> None:
    state = jax.device_put(
        {"w": np.arange(1000, dtype=np.float32), "b": np.ones((3, 4), jax.numpy.bfloat16)}, device
    )
    with sw.CheckpointManager(root) as mgr:
        mgr.save(0, state).result()
        found = mgr.restore(0, like=state)
        for name, one in state.items():
            assert found[name].devices() == {device}
            assert (np.asarray(found[name]) == np.asarray(one)).all()


def test_a_sharded_array_is_stored_once(root: Path) -> None:
    devices = jax.devices("gpu")
    if len(devices) < 2:
        pytest.skip("skipped: one CUDA device only")
    mesh = jax.sharding.Mesh(np.array(devices[:2]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    state = {"w": jax.device_put(np.arange(1 << 20, dtype=np.float32), sharding)}
    with sw.CheckpointManager(root) as mgr:
        mgr.save(0, state).result()
        assert (mgr.restore(0)["w"] == np.arange(1 << 20)).all()
