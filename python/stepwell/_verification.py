"""``sw.verify``: the checkpoint that is looked at is the newest one that is listed, whatever its
state, and damage is what the report is for.

Opening skips a damaged step, because a restore needs a complete one. A verification must report it.
So it chooses a step by name, and anything that prevents its opening (its manifest, an index) is
damage like any other.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from typing import TypeAlias

from ._checkpoint import Checkpoint, Damage, VerifyReport
from ._locations import MANIFEST, is_checkpoint, is_directory
from ._paths import printable
from ._steps import inspect
from .errors import CorruptCheckpoint, StepGone, StepNotFound, StepwellError, StorageError

Progress: TypeAlias = Callable[[int, int], object] | None

#: How often the newest step is looked up again. A writer would have to commit and retire a step
#: within each attempt.
_ATTEMPTS = 10


def verify(
    path: str, step: int | None, opened: Callable[..., Checkpoint], progress: Progress
) -> VerifyReport:
    """The report of one checkpoint, or of a step of a root. ``opened`` opens one by path and
    step."""
    if is_checkpoint(path) or not is_directory(path):
        return _one(path, step, path, opened, progress)
    for _ in range(_ATTEMPTS - 1):
        try:
            return _of_root(path, step, opened, progress)
        except (StepGone, StepNotFound):
            # The newest step, which its writer has retired meanwhile: there is a newer one.
            if step is not None:
                raise
    return _of_root(path, step, opened, progress)


def _of_root(
    path: str, step: int | None, opened: Callable[..., Checkpoint], progress: Progress
) -> VerifyReport:
    rows = inspect(path)
    # A step wins over an invalid directory with the same number.
    rows.sort(key=lambda row: row.step is not None)
    by_number = {row.number: row for row in rows if row.number >= 0}
    if step is None:
        step = max(by_number, default=None)
    row = None if step is None else by_number.get(step)
    if row is not None and row.step is None:
        where = os.path.join(path, row.name)
        damage = Damage(os.path.join(where, MANIFEST), None, (), row.damage or "")
        return VerifyReport(0, 0, (damage,), where, step)
    at = path if row is None else os.path.join(path, row.name)
    return _one(path, step, at, opened, progress)


def _is_in(path: str, file: str) -> bool:
    """True if a file is the checkpoint at a path or lies below it, or is the target of a link in
    it."""
    if file == path:
        return os.path.exists(path)
    if file.startswith(path + os.sep) or not os.path.isdir(path):
        return file.startswith(path + os.sep)
    return any(os.path.realpath(os.path.join(path, name)) == file for name in os.listdir(path))


def _one(
    path: str, step: int | None, at: str, opened: Callable[..., Checkpoint], progress: Progress
) -> VerifyReport:
    """The report of a checkpoint, which is at ``at``."""
    try:
        with opened(path, step) as checkpoint:
            return checkpoint.verify(progress)
    except (CorruptCheckpoint, StorageError) as error:
        # A missing file is damage. A disk error, or a newer format, is not.
        known = isinstance(error, CorruptCheckpoint) or error.errno == errno.ENOENT
        if not known or error.file is None:
            raise
        # Files of an adopted step are elsewhere, and its error names the step.
        if error.step is None and not _is_in(path, error.file):
            raise
        # The damage names the file and the block already.
        block = getattr(error, "block", None)
        where = " is corrupt: " if block is None else f" is corrupt, block {block}: "
        what = str(error).removeprefix(f"{error.file}{where}").removeprefix(printable(f"{error.file}: "))
        number = error.step if step is None else step
        first = Damage(error.file, block, (), what)
        return _with_checksums(path, step, VerifyReport(0, 0, (first,), at, number), progress)


def _with_checksums(path: str, step: int | None, report: VerifyReport, progress: Progress) -> VerifyReport:
    """The report of a checkpoint that cannot be opened, with all damage that checksums of
    ``sw.adopt`` show."""
    from . import formats  # imported late: most checkpoints are stepwell's own

    try:
        _, known = formats.find_adoption(path, step)
    except StepwellError:  # the checksums are damaged, or the step is incomplete
        return report
    if known is None:
        return report
    files, nbytes, rows = known.verify((), progress)
    found = tuple(Damage(file, block, tuple(leaves), what) for file, block, leaves, what in rows)
    shown = {one.file for one in found}
    rest = tuple(one for one in report.damages if os.path.realpath(one.file) not in shown)
    return VerifyReport(files, nbytes, rest + found, report.path, report.step)
