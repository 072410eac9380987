"""``sw.adopt``: computes checksums of another library's checkpoint, and keeps them beside it."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from ._adopted_step import reference
from ._checkpoint import Damage
from ._checks import flag, progress_callback
from ._locations import Path, explain, is_store, readable
from ._opening import foreign, is_own
from ._public import public
from .errors import MisuseError, StepExists, StepNotFound, StepwellError

if TYPE_CHECKING:
    from . import _core
    from .formats import Description
    from .formats.adoption import Adoption

_Progress = Callable[[int, int], object]


@final
@dataclass(frozen=True, slots=True)
class AdoptReport:
    """The files of an adopted checkpoint."""

    #: The checkpoint, and the file with its checksums.
    path: str
    checksums: str
    #: Files that have checksums, and their bytes.
    files: int
    nbytes: int
    #: Files that are gone or have changed since. Empty after adopting.
    damages: tuple[Damage, ...]
    #: Files that were added since, relative to the checkpoint.
    added: tuple[str, ...]
    #: Directories below it that are checkpoints of their own, which have no checksums here.
    left_out: tuple[str, ...] = ()

    @property
    def ok(self) -> bool:
        """True if every byte is what was adopted, and no file was added."""
        return not self.damages and not self.added

    def __bool__(self) -> bool:
        return self.ok


@public
def adopt(
    path: Path,
    step: int | str | None = None,
    *,
    check: bool = False,
    replace: bool = False,
    progress: _Progress | None = None,
) -> AdoptReport:
    """Reads a checkpoint of another library once, and keeps the checksums of its blocks in one
    small file beside it. From then on every read of stepwell is checked. Files of the checkpoint
    are not changed or copied. Returns a report (:class:`stepwell.results.AdoptReport`).

    If the files have checksums of their own, as archives of ``torch.save`` and DCP have, they are
    compared too. Adopting again adds files that are new.

    Args:
        path: a checkpoint of another library, or a root.
        step: the number or the name of a step of the root. ``None``: its newest complete one.
        check: compares the files with the checksums, and reports what has changed.
        replace: replaces the checksums of an adopted checkpoint that was changed on purpose.
        progress: as in :meth:`Checkpoint.verify`.

    Raises:
        CorruptCheckpoint: the checkpoint is damaged or incomplete, it changes meanwhile, or it has
            changed since it was adopted.
        MisuseError: it is a checkpoint of stepwell, which has checksums.
        StepNotFound: nothing to adopt, or with ``check`` no checksums.
    """
    progress_callback(progress)
    where = _on_disk(path)
    if is_own(where):
        raise MisuseError(f"{where} is of stepwell, and has checksums. Pass a checkpoint of another library")
    flag(check, "check")
    from . import formats

    if check:
        target, known = formats.find_adoption(where, step)
        if known is None:
            raise StepNotFound(f"{target} has no checksums: adopt it first")
        return _checked(target, known, progress)
    found = foreign(where, step, adopted=not flag(replace, "replace"))
    if found is None:
        raise StepNotFound(f"{where} is no checkpoint of another library: {explain(where)}")
    target = found.path if found.of_root else where
    found.open("auto").close()  # refuses what cannot be read
    known, others = _written(found, target, replace, progress)
    return _report(target, known, left_out=others)


def _on_disk(path: Path) -> str:
    """The path of a checkpoint to adopt: its checksums are written beside it."""
    where = readable(path)
    if is_store(where):
        raise MisuseError(
            f"{where} is in an object store, where nothing is adopted. Write it as a step with "
            'sw.convert(…, to="stepwell")'
        )
    return where


def _written(
    found: Description, path: str, replace: bool, progress: _Progress | None
) -> tuple[Adoption, list[str]]:
    """Computes and keeps the checksums of a checkpoint. Returns directories that are left out,
    too."""
    from .formats import adoption

    files, others = found.own_files(), list[str]()
    if os.path.isdir(path):
        files, others = _of_directory(path, files)
    before = None if replace else adoption.of(path)
    return adoption.write(path, files, found.guarded, before, progress), others


def adopt_step(
    core: _core.Manager,
    root: str,
    path: Path,
    step: int | None,
    from_step: int | str | None,
    metrics: dict[str, float],
    metadata: str,
    progress: _Progress | None,
) -> int:
    """Commits a step whose bytes are files of another library; see
    :meth:`stepwell.CheckpointManager.adopt`. The checksums are written before the step is."""
    progress_callback(progress)
    where = _on_disk(path)
    if is_own(where):
        raise MisuseError(
            f"{where} is of stepwell. Copy its step with add(), of the checkpoint that sw.open returns"
        )
    from . import formats

    # The path of a step is also that of a part, such as the model of the Trainer.
    whole = formats.find_at(where) if from_step is None else None
    found = whole or foreign(where, from_step)
    if found is None:
        raise StepNotFound(f"{where} is no checkpoint of another library: {explain(where)}")
    target = found.path if found.of_root else where
    number = found.step if step is None else step
    if number is None:
        raise MisuseError(f"{target} has no number of a step: pass step=")
    try:
        core.free_name(number)  # before anything is written
    except StepExists as error:
        error.args = (
            f"{root} has a step {number} already. Pass another number as step=, or delete that one",
        )
        raise
    opened = found.open("auto")  # refuses what cannot be read
    written: int = json.loads(opened.manifest())["committed_unix_ns"]
    opened.close()
    known = found.adoption or _written(found, target, False, progress)[0]
    core.adopt(number, reference(found, target, known, root), written, metrics, metadata)
    return number


def _is_checkpoint(path: str) -> bool:
    """True if a directory is a checkpoint of another library, also a damaged one."""
    try:
        return foreign(path, adopted=False) is not None
    except StepwellError:
        return True


def _of_directory(path: str, read: Sequence[str]) -> tuple[list[str], list[str]]:
    """The files of a directory, and directories that are left out. Files that are read must be
    among them."""
    from .formats import adoption

    files, others = adoption.files_below(path, read, _is_checkpoint)
    real = {os.path.realpath(file) for file in files}
    if outside := [file for file in read if os.path.realpath(file) not in real]:
        raise MisuseError(
            f"{outside[0]} is a part of this checkpoint, and is not below {path}. Copy it to a directory there"
        )
    return files, others


def _checked(path: str, known: Adoption, progress: _Progress | None) -> AdoptReport:
    from .formats import adoption

    rows = known.verify((), progress)[2]
    damages = tuple(Damage(file, block, tuple(leaves), what) for file, block, leaves, what in rows)
    listed = [os.path.join(known.directory, name) for name in known.rows]
    is_directory = os.path.isdir(path)
    present, others = adoption.files_below(path, listed, _is_checkpoint) if is_directory else ([], [])
    names = [os.path.relpath(file, known.directory) for file in present]
    added = tuple(name for name in names if name not in known.rows)
    return _report(path, known, damages, added, others)


def _report(
    path: str,
    known: Adoption,
    damages: tuple[Damage, ...] = (),
    added: tuple[str, ...] = (),
    left_out: Sequence[str] = (),
) -> AdoptReport:
    nbytes = sum(row.length for row in known.rows.values())
    return AdoptReport(path, known.file, len(known.rows), nbytes, damages, added, tuple(left_out))
