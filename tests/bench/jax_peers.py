"""The contestants of JAX, each as its own documentation recommends it. Arrays are immutable: there
is no restore into given memory, and every save sees arrays that are new."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
import stepwell as sw
from peer import KEPT, Peer, part_of
from workloads import State, nbytes

Tree = dict[str, Any]


def owned(tree: Any) -> Any:
    """Arrays of JAX in memory of its own."""
    leaves, structure = jax.tree.flatten(tree)
    made = jax.device_put([np.asarray(leaf) for leaf in leaves], may_alias=False)
    return jax.block_until_ready(jax.tree.unflatten(structure, made))


class JaxPeer(Peer):
    """Arrays on the CPU."""

    fills = False

    def take(self, state: State) -> None:
        self.size = nbytes(state)
        self.state = owned(state)
        state.clear()

    def step(self) -> None:
        self.state = owned(self.state)

    def abstract(self, part: str | None = None) -> Tree:
        """Returns the abstract tree for a restore."""
        return jax.tree.map(
            lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), part_of(self.state, part)
        )

    def as_numpy(self, tree: Tree) -> State:
        return jax.tree.map(np.asarray, tree)


class StepwellJax(JaxPeer):
    """A committed step of arrays that are held, and captured after ``save`` has returned; verified
    when it is read."""

    name = "stepwell (JAX)"
    has_retention = True

    def prepare(self) -> None:
        staging = self.size + (64 << 20)
        self.managers = {
            False: sw.CheckpointManager(self.base / "all", staging_bytes=staging),
            True: sw.CheckpointManager(
                self.base / "kept", staging_bytes=staging, retention=sw.keep_latest(KEPT)
            ),
        }
        self.managers[False].prepare(self.state)

    def start(self, directory: Path, step: int, kept: bool) -> None:
        self.pending = self.managers[kept].save(step, self.state)

    def finish(self) -> None:
        self.pending.result(600)

    def directory(self, step: int, kept: bool = False) -> Path:
        return self.base / ("kept" if kept else "all") / f"step_{step:08d}"

    def fresh(self, step: int) -> Tree:
        return jax.block_until_ready(sw.restore(self.directory(step), like=self.abstract()))

    def weights(self, step: int) -> Tree:
        return jax.block_until_ready(sw.restore(self.directory(step), like=self.abstract("params")))

    def close(self) -> None:
        for manager in self.managers.values():
            manager.close()


class Orbax(JaxPeer):
    """``CheckpointManager`` with its defaults: asynchronous, ``StandardSave``, zarr2 in OCDBT,
    zstd."""

    name = "Orbax"
    has_retention = True
    standard = True
    handler: dict[str, Any] = {}  # noqa: RUF012

    def prepare(self) -> None:
        logging.getLogger("absl").setLevel(logging.ERROR)
        self.managers = {
            kept: ocp.CheckpointManager(
                self.base / ("kept" if kept else "all"),
                options=ocp.CheckpointManagerOptions(max_to_keep=KEPT if kept else None),
                item_handlers=None if self.standard else ocp.PyTreeCheckpointHandler(**self.handler),
            )
            for kept in (False, True)
        }
        # StandardRestore takes all or nothing; a part is asked for as a PyTree.
        self.partial = ocp.PyTreeCheckpointer()

    def start(self, directory: Path, step: int, kept: bool) -> None:
        self.manager = self.managers[kept]
        what = ocp.args.StandardSave(self.state) if self.standard else ocp.args.PyTreeSave(self.state)
        if not self.manager.save(step, args=what):
            raise RuntimeError(f"Orbax did not save step {step}")

    def finish(self) -> None:
        self.manager.wait_until_finished()

    def directory(self, step: int, kept: bool = False) -> Path:
        return self.base / ("kept" if kept else "all") / str(step)

    def fresh(self, step: int) -> Tree:
        wanted = self.abstract()
        if self.standard:
            what: Any = ocp.args.StandardRestore(wanted)
        else:
            what = ocp.args.PyTreeRestore(
                wanted, restore_args=ocp.checkpoint_utils.construct_restore_args(wanted)
            )
        return jax.block_until_ready(self.managers[False].restore(step, args=what))

    def weights(self, step: int) -> Tree:
        wanted = self.abstract("params")
        restore_args = ocp.checkpoint_utils.construct_restore_args(wanted)
        what = ocp.args.PyTreeRestore(wanted, restore_args=restore_args, partial_restore=True)
        return jax.block_until_ready(self.partial.restore(self.directory(step) / "default", args=what))

    def close(self) -> None:
        for manager in (*self.managers.values(), self.partial):
            manager.close()


class OrbaxZarr3(Orbax):
    """The same with ``use_zarr3``."""

    name = "Orbax, zarr3"
    standard = False
    handler = {"use_zarr3": True}  # noqa: RUF012


class OrbaxPlain(Orbax):
    """The same without compression."""

    name = "Orbax, no compression"
    standard = False
    handler = {"use_compression": False}  # noqa: RUF012


PEERS: tuple[type[JaxPeer], ...] = (StepwellJax, Orbax, OrbaxZarr3, OrbaxPlain)
