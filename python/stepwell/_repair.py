"""``sw.repair``: a lost or damaged index is rebuilt from the footers of the data files.

The engine rebuilds and writes. Here a step of a root is found by its number, and the result is
verified before the damaged index is deleted.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import TypeAlias, final

from . import _core
from . import _lifecycle as lifecycle
from ._checkpoint import VerifyReport
from ._checks import flag, step_number
from ._locations import MANIFEST, Path, explaining, is_directory, is_store, readable
from ._opening import open as opened
from ._public import public
from ._steps import inspect
from ._verification import Progress
from ._verification import verify as verified
from .errors import MisuseError, StepNotFound


@final
@dataclass(frozen=True, slots=True)
class RepairedIndex:
    """The index of one item of a step."""

    #: The item.
    item: str
    #: The index file, relative to the step.
    path: str
    #: The damage. ``None`` if the index is intact; then it stays as it is.
    damage: str | None
    #: Its leaves.
    leaves: int
    #: True if the rebuilt index differs from the lost one in its order alone, and the manifest
    #: records it again.
    recorded: bool


@final
@dataclass(frozen=True, slots=True)
class RepairReport:
    """The result of a repair."""

    #: The step's directory.
    path: str
    #: The indexes of all items.
    indexes: tuple[RepairedIndex, ...]
    #: The verification of the whole step after the repair; ``None`` for a dry run.
    verification: VerifyReport | None
    #: Newer directories of the root that have a step's name and no valid manifest, each with the
    #: reason. Empty if the step was named.
    passed_over: tuple[tuple[str, str], ...] = ()

    @property
    def rebuilt(self) -> tuple[RepairedIndex, ...]:
        """The indexes that were rebuilt, or would be."""
        return tuple(index for index in self.indexes if index.damage is not None)

    @property
    def ok(self) -> bool:
        """True if every byte of the step is valid now; of a dry run, if every index can be
        rebuilt."""
        return self.verification is None or self.verification.ok


@public
def repair(
    path: Path, step: int | None = None, *, dry_run: bool = False, progress: Progress | None = None
) -> RepairReport:
    """Rebuilds lost or damaged indexes of the checkpoint at ``path`` from the footers of its data
    files, then verifies all of it.

    Nothing is written before every damaged index could be rebuilt. Otherwise
    :class:`CorruptCheckpoint` names the file, and the leaf if one is known. The damaged index stays
    beside the new one (``.index.damaged``) until the whole step has verified. Without its manifest
    a step cannot be repaired.

    Args:
        path: a checkpoint, a step's directory, or a root.
        step: the step of a root. ``None``: the newest step that has a manifest. A warning names
            newer steps without a valid one, and ``passed_over`` lists them.
        dry_run: rebuild in memory, and write nothing.
        progress: called with the bytes done and in all while the step is verified.
    """
    where, only_look = readable(path), flag(dry_run, "dry_run")
    if is_store(where):
        raise MisuseError(
            f"{where} is in an object store, and repair is for disks. "
            "Restore an older step, or this one from another tier; `stepwell verify` names the damage"
        )
    with explaining(where):
        directory, passed_over = _directory(where, None if step is None else step_number(step))
        for name, reason in passed_over:
            lifecycle.log(
                30, "stepwell", f"passing over {name}: {reason}. Without its manifest it cannot be repaired"
            )
        found = tuple(RepairedIndex(*row) for row in _core.repair(directory, only_look))
        if only_look:
            return RepairReport(directory, found, None, passed_over)
        report = verified(directory, None, opened, progress)
        if report.ok:
            _core.forget_damaged(directory)
        return RepairReport(directory, found, report, passed_over)


#: Directories with a step's name that are not steps, each with the reason.
_PassedOver: TypeAlias = tuple[tuple[str, str], ...]


def _directory(path: str, step: int | None) -> tuple[str, _PassedOver]:
    """The directory of a checkpoint, or of a step of a root, whatever the state of its indexes; and
    newer ones of the root that are no steps."""
    if os.path.isfile(os.path.join(path, MANIFEST)):
        if step is not None:
            raise MisuseError(f"{path} is one checkpoint, and step={step} is for a root; leave it out")
        return path, ()
    if not is_directory(path):
        raise StepNotFound(f"{path} is no checkpoint of stepwell")
    rows = inspect(path)
    steps = {row.step: row for row in rows if row.step is not None}
    wanted = max(steps, default=None) if step is None else step
    if wanted not in steps:
        which = "no step with a manifest" if step is None else f"no step {step} with a manifest"
        raise StepNotFound(
            f"{path} has {which}. Only a manifest says which files a save has committed, so nothing "
            "else can be repaired; `stepwell ls` lists what is there"
        )
    passed_over = tuple(
        (row.name, row.damage or "")
        for row in rows
        if step is None and row.step is None and row.number > steps[wanted].number
    )
    return os.path.join(path, steps[wanted].name), passed_over
