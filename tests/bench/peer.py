"""The interface of a PyTorch or JAX contestant, which runs in a process of its own
(:mod:`peer_process`)."""

from __future__ import annotations

import shutil
import time
from pathlib import Path
from typing import Any

from measure import sync_file_system
from workloads import State

#: How many steps the roots with retention keep.
KEPT = 2


class Peer:
    """A state of one framework, saved below a directory as steps of two roots (``kept``: with
    retention at work) and restored from there."""

    name: str
    #: True if it deletes old steps itself; where not, :meth:`retire` does it by hand.
    has_retention = False
    #: True if it can fill arrays that are there.
    fills = True

    def __init__(self, base: Path) -> None:
        self.base = base
        self.state: Any = None

    def take(self, state: State) -> None:
        """Makes arrays of the framework, in memory of their own, and empties ``state``."""
        raise NotImplementedError

    def prepare(self) -> None:
        """Prepares for the first save, if the contestant offers that."""

    def step(self) -> None:
        """Changes the arrays as a training step does. Immutable arrays are replaced."""

    def save(self, step: int, kept: bool = False) -> tuple[float, float]:
        """Seconds until training may go on, and until the step would survive a power cut: the
        contestant's own end, and a sync of the file system."""
        begin = time.perf_counter()
        self.start(self.directory(step, kept), step, kept)
        blocked = time.perf_counter() - begin
        self.finish()
        sync_file_system(self.base)
        return blocked, time.perf_counter() - begin

    def start(self, directory: Path, step: int, kept: bool) -> None:
        """Returns when training may go on."""
        raise NotImplementedError

    def finish(self) -> None:
        """Returns when the contestant calls the step saved."""

    def retire(self, step: int) -> None:
        """Deletes a step of the root with retention, as a training script does where the contestant
        has none."""
        shutil.rmtree(self.directory(step, kept=True))

    def directory(self, step: int, kept: bool = False) -> Path:
        """Returns the directory of a step."""
        return self.base / f"{'kept' if kept else 'all'}-{step}"

    def empty(self, part: str | None = None) -> Any:
        """Arrays like those of the state, every page touched; ``part``: of one top-level entry."""
        raise NotImplementedError

    def into(self, step: int, target: Any) -> Any:
        """Fills arrays that are there."""
        raise NotImplementedError

    def fresh(self, step: int) -> Any:
        """New arrays; every byte has been read when it returns."""
        raise NotImplementedError

    def weights(self, step: int) -> Any:
        """``params`` alone, as new arrays."""
        raise NotImplementedError

    def as_numpy(self, tree: Any) -> State:
        """The same structure with arrays of numpy over the same bytes, for comparing."""
        raise NotImplementedError

    def close(self) -> None:
        """Before the process ends."""


def part_of(tree: dict[str, Any], part: str | None) -> dict[str, Any]:
    """All of a state, or one top-level entry."""
    return tree if part is None else {part: tree[part]}


def nested(leaves: dict[str, Any]) -> dict[str, Any]:
    """Leaves by slashed path as a tree."""
    result: dict[str, Any] = {}
    for path, leaf in leaves.items():
        *containers, name = path.split("/")
        at = result
        for container in containers:
            at = at.setdefault(container, {})
        at[name] = leaf
    return result
