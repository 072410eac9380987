"""The targets of commands: a checkpoint (``PATH`` or ``ROOT@STEP``), or a root."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, final

import click

from .. import _core
from .. import _locations as locations
from .._checks import step_number
from .._options import reader_json
from ..errors import MisuseError, StepNotFound

if TYPE_CHECKING:
    from .._checkpoint import Checkpoint


@final
@dataclass(frozen=True, slots=True)
class Target:
    """A checkpoint as it was named."""

    #: Absolute.
    path: str
    #: The step of a root; ``None``: the newest.
    step: int | None = None

    def __str__(self) -> str:
        return self.path if self.step is None else f"{self.path}@{self.step}"

    def open(self) -> Checkpoint:
        """Opens it for reading, under a lease."""
        # With it comes numpy, which commands that only look at a root do without.
        from .._singular import open as open_checkpoint

        return open_checkpoint(self.path, self.step)


def target(given: str) -> Target:
    """``PATH`` or ``ROOT@STEP``, as the type of an argument; a path that is there as it stands is
    meant as it stands."""
    root, at, step = given.rpartition("@")
    try:
        if not (at and root and step.isascii() and step.isdigit()) or os.path.lexists(given):
            return Target(locations.readable(given))
        return Target(locations.absolute(root), step_number(int(step)))
    except MisuseError as error:
        raise click.BadParameter(str(error)) from error


def is_root(path: str) -> bool:
    """True if a directory is a root: it says so, or holds a step (a copy may have lost what says
    so)."""
    if not locations.is_directory(path) or os.path.isfile(os.path.join(path, locations.MANIFEST)):
        return False
    return os.path.isdir(os.path.join(path, ".stepwell")) or bool(_core.list_steps(path))


def root_at(path: str) -> str:
    """The absolute path of a root that is there. Commands that write ask first: opening what is
    none would make it one."""
    root = locations.absolute(path, "the root")
    locations.check_root(root)
    if not is_root(root):
        why = locations.explain(root)
        raise StepNotFound(f"{root} is no root of a run{'; ' + why if why else ''}")
    return root


def metrics_of(checkpoint: Checkpoint) -> dict[str, float]:
    """Metrics of an open step, those that were added later included where its root is around it."""
    core = checkpoint._open()
    above = os.path.dirname(checkpoint.path)
    if not os.path.isdir(os.path.join(above, ".stepwell")):
        return dict(core.metrics())
    manager = _core.Manager(above, reader_json())
    try:
        return dict(manager.metrics_of(core))
    finally:
        manager.close(None)


def report_of(root: str) -> list[dict[str, Any]]:
    """Facts about everything in a root that has a step's name; see the engine's ``StepReport``."""
    manager = _core.Manager(root, reader_json())
    try:
        found: list[dict[str, Any]] = json.loads(manager.report())
        return found
    finally:
        manager.close(None)
