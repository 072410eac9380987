"""Reads of one checkpoint at one path, or of a step of a root: ``sw.open``, ``sw.restore``,
``sw.metadata``, ``sw.verify``, ``sw.watch``."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

from . import _core, coordinators
from . import _lifecycle as lifecycle
from . import _verification as verifying
from . import _watcher as watching
from ._adopted_step import of_step
from ._checkpoint import Checkpoint, Metadata, VerifyReport
from ._checks import flag, given_step, one_of, step_number
from ._locations import (
    CONTROL,
    MANIFEST,
    Location,
    check_watched,
    explaining,
    is_checkpoint,
    is_directory,
    is_store,
    location,
    readable,
)
from ._options import ENGINES, reader_json
from ._public import public
from ._restore.fallback import newest_intact
from ._restore.options import (
    ChoiceKeywords,
    RestoreKeywords,
    RestoreOptions,
    ResumeKeywords,
    spelled_out,
)
from ._restore.report import PassedOver, RestoreReport
from ._restore.restore import Restored
from ._state.specs import as_rank
from ._steps import damaged
from ._timeouts import seconds
from .errors import MisuseError, StepNotFound, StepwellError

if TYPE_CHECKING:
    from ._background import Restore
    from .formats import Description
    from .maps import MapLike

_T = TypeVar("_T")
_WARNING = 30


@public
def open(
    path: Location, step: int | None = None, *, map: MapLike | None = None, engine: str = "auto"
) -> Checkpoint:
    """Opens a checkpoint for reading: a singular one, a step's directory, or the newest step (or
    ``step``) of a root, also of another library. Arrays are read on request. Retention does not
    remove its files before it is closed.

    Args:
        path: a checkpoint, a step's directory, or a root.
        step: the step of a root. ``None``: its newest one.
        map: a :class:`stepwell.maps.Map`, a TOML file, a recipe or rules. The checkpoint then has
            the names and shapes of another model.
        engine: the I/O engine, as in :class:`stepwell.Options`."""
    lifecycle.notifier.start()  # for log lines of the engine
    where, number = readable(path), None if step is None else step_number(step)
    return open_step(where, number, map, engine)


def open_step(where: str, step: int | str | None, map: MapLike | None, engine: str) -> Checkpoint:
    """Opens a checkpoint, or a step of a root. A step of another library may have a name instead of
    a number."""
    one_of(engine, "engine", ENGINES)
    if not is_own(where) and (found := foreign(where, step)) is not None:
        from .formats.copies import Copies

        path = found.path if found.step is not None else where
        core = RestoreOptions(map=map).mapped(found.open(engine, path))
        copies = Copies(found.copies, found.reading) if found.copies else None
        stamps = found.stamps if found.adoption is None else None
        if found.ours is not None:
            lifecycle.log(
                _WARNING,
                "stepwell.formats",
                f"{found.path}: the rest of this step is a checkpoint of stepwell. Open it by the path {found.ours}",
            )
        return Checkpoint(core, found.step, found.adoption, copies, stamps, ours=found.ours)
    assert not isinstance(step, str)
    with explaining(where):
        core = _core.open_path(where, step, engine)
    return of_step(core, map, engine)


@contextmanager
def opened(source: Location | Checkpoint, step: int | None, map: MapLike | None) -> Iterator[Checkpoint]:
    """Opens a checkpoint. One that the caller has opened stays open."""
    if isinstance(source, Checkpoint):
        if step is not None:
            raise MisuseError("step= is for a root, and this is an open checkpoint; leave it out")
        core = RestoreOptions(map=map).mapped(source._open())
        yield source if map is None else source._with(core)
        return
    with open(source, step, map=map) as checkpoint:
        yield checkpoint


def is_own(path: str) -> bool:
    """True for a checkpoint or a root of stepwell."""
    if is_store(path):
        return _core.path_kind(path) in ("checkpoint", "root")
    return is_directory(path) and any(
        os.path.lexists(os.path.join(path, name)) for name in (MANIFEST, CONTROL)
    )


def foreign(path: str, step: int | str | None = None, *, adopted: bool = True) -> Description | None:
    """Returns the description of another library's checkpoint, or of a step of its root; or
    ``None``. Reads are checked if it was adopted, unless ``adopted`` is false."""
    from . import formats  # imported late: most checkpoints are stepwell's own

    if step is None:
        return formats.find(path, adopted=adopted)
    found = formats.find_step(path, step, adopted=adopted)
    if found is None and (single := formats.find(path)) is not None:
        raise StepNotFound(
            f"{path} is a single checkpoint ({single.family}) without steps: leave the step out"
        )
    return found


def check_not_foreign(root: str) -> None:
    """Refuses to begin a run in a checkpoint of another library: it would look like an empty
    root."""
    try:
        found = foreign(root) if os.path.isdir(root) and not is_own(root) else None
    except StepwellError:  # a damaged one, or one that is not read: no steps are looked for there
        return
    if found is not None:
        raise MisuseError(
            f"{root} is a checkpoint of another library ({found.family}). Take its values with sw.restore({root!r}), and save to a directory of its own, such as {os.path.join(root, 'steps')}"
        )


@overload
def restore(
    path: Location,
    step: int | None = None,
    *,
    into: _T,
    fallback: bool = False,
    return_report: Literal[False] = False,
    **options: Unpack[ResumeKeywords],
) -> _T: ...
@overload
def restore(
    path: Location,
    step: int | None = None,
    *,
    into: _T,
    fallback: bool = False,
    return_report: Literal[True],
    **options: Unpack[ResumeKeywords],
) -> tuple[_T, RestoreReport]: ...
@overload
def restore(
    path: Location,
    step: int | None = None,
    *,
    fallback: bool = False,
    return_report: bool = False,
    **options: Unpack[ChoiceKeywords],
) -> Any: ...  # the stored structure, or that of like=
@public
@spelled_out
def restore(
    path: Location, step: int | None = None, *, fallback: bool = False, **options: Unpack[RestoreKeywords]
) -> object:
    """Restores the checkpoint at ``path``; see :meth:`CheckpointManager.restore`.

    Args:
        path: a checkpoint, a step's directory, or a root.
        step: the step of a root. ``None``: its newest one.
        fallback: restores the newest intact step of a root.
    """
    step = given_step(step)
    if not flag(fallback, "fallback"):
        return _restore(path, step, options)[0].answer(options)
    where = readable(path)
    if step is not None or is_checkpoint(where):
        raise MisuseError("fallback= looks for the newest intact step: pass a root, and no step")
    restored, passed = _restore_intact(where, lambda one: _restore(path, one, options))
    restored.report.passed_over = passed
    return restored.answer(options)


def _restore_intact(
    where: str, attempt: Callable[[int | None], tuple[Restored, int]]
) -> tuple[Restored, list[PassedOver]]:
    """Restores the newest intact step of a root, and returns the newer ones too."""
    if not is_own(where):
        from . import formats

        if (root := formats.list_steps(where)) is not None:
            latest = root.step(None).number
            numbers = [
                step.number for step in root.steps if step.number is not None and step.incomplete is None
            ]
            invalid = [(step.number, step.incomplete) for step in root.steps]
            return newest_intact(
                root.path,
                lambda one: attempt(latest if one is None else one),
                lambda: numbers,
                lambda: [(number, why) for number, why in invalid if number is not None and why is not None],
                lambda mine: mine,
                can_rewind=False,
            )
    manager = _core.Manager(where, reader_json())
    try:
        return newest_intact(
            where,
            lambda one: attempt(manager.latest_step() if one is None else one),
            manager.all_steps,
            lambda: damaged(manager.report(), where),
            lambda mine: mine,
        )
    finally:
        manager.close(None)


@overload
def restore_async(
    path: Location,
    step: int | None = None,
    *,
    into: _T,
    fallback: bool = False,
    return_report: Literal[False] = False,
    **options: Unpack[ResumeKeywords],
) -> Restore[_T]: ...
@overload
def restore_async(
    path: Location,
    step: int | None = None,
    *,
    into: _T,
    fallback: bool = False,
    return_report: Literal[True],
    **options: Unpack[ResumeKeywords],
) -> Restore[tuple[_T, RestoreReport]]: ...
@overload
def restore_async(
    path: Location,
    step: int | None = None,
    *,
    fallback: bool = False,
    return_report: bool = False,
    **options: Unpack[ChoiceKeywords],
) -> Restore[Any]: ...  # the stored structure, or that of like=
@public
@spelled_out
def restore_async(
    path: Location, step: int | None = None, *, fallback: bool = False, **options: Unpack[RestoreKeywords]
) -> Restore[Any]:  # as the overloads say
    """Starts :func:`restore` on another thread, and returns a future of its result
    (:class:`stepwell.results.Restore`): build or compile the model meanwhile. Nothing may use the
    arrays of ``into`` before ``result()`` has returned.

    Args:
        path: as of :func:`restore`.
        step: as of :func:`restore`.
        fallback: as of :func:`restore`.
    """
    from ._background import Restore  # costs the import of concurrent.futures

    RestoreOptions.of(options, "restore_async").reading_alone()
    number, flagged = given_step(step), flag(fallback, "fallback")
    where = readable(path)
    # The overloads separate into= from like=, so call it without their types.
    call: Callable[..., object] = restore
    return Restore(f"the restore of {where}", lambda: call(where, number, fallback=flagged, **options))


def _restore(path: Location, step: int | None, options: RestoreKeywords) -> tuple[Restored, int]:
    """Restores one checkpoint, and returns its step too."""
    checked = RestoreOptions.of(options).reading_alone()
    if checked.fill:
        lifecycle.wait_captured()
    try:
        with open(path, step) as checkpoint, as_rank(coordinators.initialised_rank()):
            return checkpoint._restored(checked), checkpoint.step
    except StepwellError as failure:
        if failure.step is None:
            failure.step = step
        raise


@public
def metadata(path: Location, step: int | None = None) -> Metadata:
    """Returns facts about the checkpoint at ``path``, as saved with it, without reading an array.
    Later metrics belong to a root: :meth:`CheckpointManager.metadata`."""
    with open(path, step) as checkpoint:
        return checkpoint.metadata()


@public
def verify(
    path: Location, step: int | None = None, *, progress: Callable[[int, int], object] | None = None
) -> VerifyReport:
    """Reads the whole checkpoint at ``path`` and compares every checksum.

    Args:
        path: a checkpoint, a step's directory, a root, or files of another library.
        step: the step of a root. ``None``: the newest, even if it is damaged. The report names it.
        progress: called now and then with the bytes done and in all.
    """
    return verifying.verify(readable(path), None if step is None else step_number(step), open, progress)


@public
def watch(
    root: Location,
    *,
    after: int | None = None,
    timeout: float | None = None,
    which: Literal["latest", "all"] = "latest",
    interval: float = 0.5,
) -> Iterator[Checkpoint]:
    """Yields new committed steps of a root, leased, for an evaluator. A step is closed when the
    next one is requested.

    It yields only complete steps. A step with missing files (for example in an unfinished copy) is
    skipped with a warning and tried again later, so ``"all"`` may yield it after a newer one.
    ``"latest"`` yields the newest complete step, and never an older one than before. It also yields
    a step that was saved again after a rewind, or that replaces the last one, but not the step that
    a rewind leaves as the newest.

    Args:
        root: the directory of the run.
        after: yield only steps above this one. ``None``: all.
        timeout: end after so many seconds without a new step. ``None``: never.
        which: ``"latest"`` skips to the newest step, ``"all"`` yields each that still exists.
        interval: seconds between two looks at the root.
    """
    one_of(which, "which", ("latest", "all"))
    limit, pause = seconds(timeout), seconds(interval, "interval")
    where = location(root, "the root")
    seen = None if after is None else step_number(after)
    check_watched(where)
    return watching.watch(where, open, seen, limit, pause, which)
