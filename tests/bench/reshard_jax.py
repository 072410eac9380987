"""The JAX process of the resharding bench: arrays over eight host devices, saved and restored by
Orbax."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import jax
import numpy as np
from crew import Done, Rank, twice
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jax_peers import Orbax, OrbaxPlain
from layout import Layout
from peer_process import first_round_trip
from reshard_numpy import STEP
from workloads import State, differences

Tree = dict[str, Any]
CHECKPOINTERS: dict[str, type[Orbax]] = {one.name: one for one in (Orbax, OrbaxPlain)}


def _specs(state: State, layout: Layout) -> Tree:
    """The whole state over the devices of a layout: a mesh of devices for each stage."""
    devices = jax.devices()
    stages = np.array(devices[: layout.world]).reshape(layout.pp, layout.ranks)
    meshes = [Mesh(stage, ("ranks",)) for stage in stages]

    def made(tree: Tree) -> Tree:
        found: Tree = {}
        for name, value in tree.items():
            if isinstance(value, dict):
                found[name] = made(value)
                continue
            axes: list[str | None] = [None] * value.ndim
            axis = layout.axis(name)
            if axis is not None:
                axes[axis] = "ranks"
            sharding = NamedSharding(meshes[layout.stage(name)], PartitionSpec(*axes))
            found[name] = jax.ShapeDtypeStruct(value.shape, value.dtype, sharding=sharding)
        return found

    return made(state)


def _checkpointer(name: str, base: Path, wanted: Tree) -> Orbax:
    class Resharding(CHECKPOINTERS[name]):
        def abstract(self, part: str | None = None) -> Tree:
            return wanted if part is None else {part: wanted[part]}

    return Resharding(base)


def orbax_save(rank: Rank, name: str, base: Path, layout: Layout) -> None:
    wanted = _specs(rank.state, layout)
    base.mkdir()
    orbax = _checkpointer(name, base, wanted)
    orbax.state = jax.block_until_ready(
        jax.tree.map(
            lambda array, spec: jax.device_put(array, spec.sharding, may_alias=False), rank.state, wanted
        )
    )
    orbax.prepare()
    orbax.save(STEP)
    orbax.close()


def orbax_restore(rank: Rank, name: str, base: Path, layout: Layout, verify: bool) -> list[Done]:
    """Into new arrays, since those of JAX cannot be filled; twice, as :func:`crew.twice` says."""
    with tempfile.TemporaryDirectory() as folder:
        first_round_trip(CHECKPOINTERS[name], Path(folder) / "first")
    orbax = _checkpointer(name, base, _specs(rank.state, layout))
    orbax.prepare()

    def check(found: Tree) -> None:
        wrong = differences(orbax.as_numpy(found), rank.state)
        if wrong:
            raise AssertionError(f"restored other bytes: {wrong[:5]}")

    result = sum(layout.needed(rank.state, number) for number in range(layout.world))
    done = twice(rank, lambda: orbax.fresh(STEP), check if verify else None, result)
    orbax.close()
    return done
