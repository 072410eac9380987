"""One checkpoint at one path: ``sw.save``, ``sw.restore``, ``sw.open`` and what looks into roots
from outside."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal, TypeVar, Unpack, overload

from . import _adapters as adapters
from . import _core, coordinators
from . import _lifecycle as lifecycle
from . import _verification as verifying
from . import _watcher as watching
from ._checkpoint import Checkpoint, Metadata, VerifyReport
from ._checks import (
    SAVE_WORDS,
    flag,
    given_step,
    instance,
    metadata_json,
    one_of,
    other_words,
    real_numbers,
    step_number,
)
from ._choice import choice_of
from ._locations import (
    CONTROL,
    MANIFEST,
    Path,
    absolute,
    check_destination,
    check_watched,
    explaining,
    is_directory,
    readable,
)
from ._options import ENGINES, Options, reader_json, to_json
from ._policies import every_steps
from ._public import public
from ._restore import restore as restoring
from ._restore.fallback import newest_intact
from ._restore.options import (
    ChoiceKeywords,
    Globs,
    RestoreKeywords,
    RestoreOptions,
    ResumeKeywords,
    spelled_out,
)
from ._restore.report import RestoreReport
from ._restore.restore import Restored
from ._retention import keep_all
from ._save_result import Save
from ._state.specs import as_rank
from ._state.stateful import is_callable_state
from ._steps import steps
from ._timeouts import seconds, stall_seconds
from ._types import Metrics
from .errors import CoordinationTimeout, MisuseError, StalledError, StepNotFound, StepwellError

if TYPE_CHECKING:
    from ._background import Restore
    from .formats import Description
    from .maps import MapLike

_T = TypeVar("_T")


class _Background:
    """A singular save in the background: committed at exit at the latest, and its failure told
    there if nowhere else."""

    def __init__(self, handle: _core.SaveHandle, path: str, stall: float) -> None:
        self.what = f"the save to {path}"
        self._handle = handle
        self._owner = lifecycle.Owner("save")
        self._stall = stall

    def wait_captured(self) -> None:
        """See ``lifecycle.Ending``."""
        if self._owner.is_here and not self._handle.done():
            self._handle.wait_captured(None)

    def at_exit(self) -> BaseException | None:
        """Waits with a bound; see ``lifecycle.Ending``."""
        if not self._owner.is_here:
            return None
        try:
            lifecycle.wait_patiently(
                self._over, self._handle.progress, self._stall, f"{self.what} to end at exit"
            )
        except StalledError as stalled:
            return stalled
        return self._handle.unseen_failure()

    def _over(self, seconds: float) -> bool:
        deadline = time.monotonic() + seconds
        while not self._handle.done():
            if time.monotonic() >= deadline:
                return False
            time.sleep(0.005)
        return True


def keep(
    handle: _core.SaveHandle,
    path: str,
    stall: float | None = None,
    service: coordinators.Service | None = None,
) -> Save:
    """The future of a save that was begun, which the exit hook knows of. The bindings call this
    too, for a save whose caller was interrupted. ``service`` carries the ranks' messages, and is
    closed at the end of the save."""
    background = _Background(handle, path, Options().stall_timeout if stall is None else stall)
    lifecycle.watch(background)
    save = Save(0, handle)

    def over(_: Save) -> None:
        if service is not None:
            service.close()
        if handle.unseen_failure() is None:
            lifecycle.forget(background)

    save.add_done_callback(over)
    return save


@public
@other_words("save_async", SAVE_WORDS)
def save_async(
    path: Path,
    state: object,
    *,
    metrics: Metrics | None = None,
    custom_metadata: object = None,
    include: Globs = None,
    exclude: Globs = None,
    cast: object = None,
    exists: Literal["error", "replace"] = "error",
    snapshot: Literal["auto", "lazy", "eager"] = "auto",
    coordinator: object = "auto",
    options: Options | None = None,
) -> Save:
    """Saves ``state`` as a checkpoint at ``path``, and returns when the state may be changed again;
    the future says when it is committed. Several ranks save one checkpoint together, as in
    :func:`save`.

    Args:
        snapshot: when arrays are copied, as of :meth:`CheckpointManager.save`. The other arguments
            are those of :func:`save`.
    """
    board = coordinators.find(coordinator, what="saves to this path")
    one_of(exists, "exists", ("error", "replace"))
    options = Options() if options is None else options
    instance(options, Options, "options", "sw.Options(…)")
    where = absolute(path)
    check_destination(where)
    text = to_json(options, every_steps(1), keep_all(), None, "auto", 1, False, "raise")
    ranks, service = coordinators.connected(board)
    try:
        turn = _turn(where, exists, text, ranks)
        try:
            one_of(snapshot, "snapshot", ("auto", "lazy", "eager"))
            numbers = real_numbers(metrics)
            metadata = metadata_json(custom_metadata)
            choice = choice_of(include, exclude, cast)
            with as_rank((0, 1) if board is None else (board.rank, board.world_size)):
                saved = adapters.as_saved(state() if is_callable_state(state) else state)
                flat = _core.flatten(saved, choice, board is None)
            streams = adapters.streams(flat.devices())
            events = lifecycle.notifier.events
            handle = turn.save(flat, numbers, metadata, snapshot, streams, events)
        except BaseException as error:
            # The other ranks have begun this save, and wait for this one.
            turn.fail(f"{type(error).__name__}: {error}")
            raise
    except BaseException:
        if service is not None:
            service.close()
        raise
    return keep(handle, where, stall_seconds(options.stall_timeout), service)


def _turn(path: str, exists: str, options: str, ranks: coordinators.Meeting | None) -> _core.PathTurn:
    """The right to save to a path, once all ranks have come."""
    if isinstance(ranks, tuple) and ranks[3] is None:
        raise MisuseError(
            "a single checkpoint has no root where ranks could meet: pass a directory that all of them see, SharedDirectory(rank, world_size, job_id, path=…)"
        )
    try:
        return _core.PathTurn(path, exists, options, ranks)
    except CoordinationTimeout as error:
        error.add_note("All ranks save to this path together. Pass coordinator=None if only this one does.")
        raise


@public
@other_words("save", SAVE_WORDS)
def save(
    path: Path,
    state: object,
    *,
    metrics: Metrics | None = None,
    custom_metadata: object = None,
    include: Globs = None,
    exclude: Globs = None,
    cast: object = None,
    exists: Literal["error", "replace"] = "error",
    coordinator: object = "auto",
    options: Options | None = None,
) -> None:
    """Saves ``state`` as a checkpoint at ``path``; it survives a power cut when this returns. A
    path where a run has its steps is refused.

    Several ranks make this call together, each with its part of the state. The checkpoint is there
    with the parts of all ranks, or not at all.

    Args:
        path: the directory of the checkpoint. It must not exist.
        state: the state, or a callable that returns it.
        metrics: real numbers by name.
        custom_metadata: JSON that belongs to the checkpoint.
        include: as of :meth:`CheckpointManager.save`.
        exclude: as of :meth:`CheckpointManager.save`.
        cast: as of :meth:`CheckpointManager.save`.
        exists: for an existing checkpoint: ``"error"``, or ``"replace"``, which writes the new one
            first and then swaps the two.
        coordinator: how the ranks agree, as of :class:`CheckpointManager`. ``None``: this process
            alone saves, although it is one of several. A ``SharedDirectory`` needs its ``path``.
        options: rarely needed options.
    """
    save_async(
        path,
        state,
        metrics=metrics,
        custom_metadata=custom_metadata,
        include=include,
        exclude=exclude,
        cast=cast,
        exists=exists,
        coordinator=coordinator,
        options=options,
    ).result()


@public
def open(
    path: Path, step: int | None = None, *, map: MapLike | None = None, engine: str = "auto"
) -> Checkpoint:
    """Opens a checkpoint for reading: a singular one, a step's directory, or the newest step (or
    ``step``) of a root. No array is read before it is asked for; until it is closed, no retention
    removes its files.

    Args:
        path: its place.
        step: a step of a root.
        map: a :class:`stepwell.maps.Map`, its TOML file or its rules: what is stored appears under
            the names and in the shapes of another model.
        engine: as in :class:`stepwell.Options`."""
    lifecycle.notifier.start()  # for what the engine has to say
    where, number = readable(path), None if step is None else step_number(step)
    one_of(engine, "engine", ENGINES)
    if (found := _foreign(where)) is not None:
        if number is not None:
            raise StepNotFound(
                f"{where} is a single checkpoint ({found.family}) without steps: leave step= out"
            )
        return Checkpoint(RestoreOptions(map=map).mapped(found.open(engine)))
    with explaining(where):
        core = _core.open_path(where, number, engine)
    return Checkpoint(RestoreOptions(map=map).mapped(core))


def _foreign(path: str) -> Description | None:
    """The description of a checkpoint that another library wrote, if there is one."""
    if is_directory(path) and any(os.path.lexists(os.path.join(path, name)) for name in (MANIFEST, CONTROL)):
        return None
    from . import formats  # most users have checkpoints of ours

    return formats.find(path)


@overload
def restore(
    path: Path,
    step: int | None = None,
    *,
    into: _T,
    fallback: bool = False,
    return_report: Literal[False] = False,
    **options: Unpack[ResumeKeywords],
) -> _T: ...
@overload
def restore(
    path: Path,
    step: int | None = None,
    *,
    into: _T,
    fallback: bool = False,
    return_report: Literal[True],
    **options: Unpack[ResumeKeywords],
) -> tuple[_T, RestoreReport]: ...
@overload
def restore(
    path: Path,
    step: int | None = None,
    *,
    fallback: bool = False,
    return_report: bool = False,
    **options: Unpack[ChoiceKeywords],
) -> Any: ...  # the stored structure, or that of like=
@public
@spelled_out
def restore(
    path: Path, step: int | None = None, *, fallback: bool = False, **options: Unpack[RestoreKeywords]
) -> object:
    """Restores the checkpoint at ``path``; see :meth:`CheckpointManager.restore`.

    Args:
        path: a checkpoint, a step's directory, or a root.
        step: the step of a root; ``None``: its newest.
        fallback: of a root, restore the newest step that is intact.
    """
    step = given_step(step)
    if not flag(fallback, "fallback"):
        return _restore(path, step, options)[0].answer(options)
    where = readable(path)
    if step is not None or os.path.isfile(os.path.join(where, MANIFEST)):
        raise MisuseError("fallback= looks for the newest intact step: pass a root, and no step")
    manager = _core.Manager(where, reader_json())
    try:
        restored, passed = newest_intact(
            where,
            lambda one: _restore(path, manager.latest_step() if one is None else one, options),
            manager.all_steps,
            lambda: steps(manager.report()),
            lambda mine: mine,
        )
    finally:
        manager.close(None)
    restored.report.passed_over = passed
    return restored.answer(options)


@overload
def restore_async(
    path: Path,
    step: int | None = None,
    *,
    into: _T,
    fallback: bool = False,
    return_report: Literal[False] = False,
    **options: Unpack[ResumeKeywords],
) -> Restore[_T]: ...
@overload
def restore_async(
    path: Path,
    step: int | None = None,
    *,
    into: _T,
    fallback: bool = False,
    return_report: Literal[True],
    **options: Unpack[ResumeKeywords],
) -> Restore[tuple[_T, RestoreReport]]: ...
@overload
def restore_async(
    path: Path,
    step: int | None = None,
    *,
    fallback: bool = False,
    return_report: bool = False,
    **options: Unpack[ChoiceKeywords],
) -> Restore[Any]: ...  # the stored structure, or that of like=
@public
@spelled_out
def restore_async(
    path: Path, step: int | None = None, *, fallback: bool = False, **options: Unpack[RestoreKeywords]
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
    # The types of the overloads keep into= apart from like=.
    call: Callable[..., object] = restore
    return Restore(f"the restore of {where}", lambda: call(where, number, fallback=flagged, **options))


def _restore(path: Path, step: int | None, options: RestoreKeywords) -> tuple[Restored, int]:
    """Restores one checkpoint, and returns its step too."""
    checked = RestoreOptions.of(options).reading_alone()
    if checked.fill:
        lifecycle.wait_captured()
    try:
        with open(path, step) as checkpoint, as_rank(coordinators.initialised_rank()):
            return restoring.run(checkpoint._open(), checked), checkpoint.step
    except StepwellError as failure:
        if failure.step is None:
            failure.step = step
        raise


@public
def metadata(path: Path, step: int | None = None) -> Metadata:
    """Returns facts about the checkpoint at ``path``, as saved with it, without reading an array.
    Later metrics belong to a root: :meth:`CheckpointManager.metadata`."""
    with open(path, step) as checkpoint:
        return checkpoint.metadata()


@public
def verify(
    path: Path, step: int | None = None, *, progress: Callable[[int, int], object] | None = None
) -> VerifyReport:
    """Reads the whole checkpoint at ``path`` and compares every checksum. In a root it takes the
    newest step (or ``step``), damaged or not, and the report names it."""
    return verifying.verify(readable(path), None if step is None else step_number(step), open, progress)


@public
def add_metrics(root: Path, step: int, metrics: Metrics) -> None:
    """Adds metrics to a committed step of a root: an evaluator's, from another process than the
    trainer's."""
    where = absolute(root, "the root")
    with explaining(where):
        _core.add_metrics(where, step_number(step), real_numbers(metrics))


@public
def engine_info(path: Path | None = None, *, cuda: bool = False) -> dict[str, Any]:  # of all types
    """Which engine serves ``path`` (default: the working directory), why, and versions. ``cuda``:
    which CUDA driver and devices it would copy from, too, or why none (``"cuda"``); asking that
    makes this process one that uses CUDA, which cannot be used any more in what it forks."""
    import platform

    import ml_dtypes
    import numpy as np

    engine, direct, alignment, registered, reasons = _core.engine_choice(
        absolute("." if path is None else path)
    )
    found = {
        "engine": engine,
        "direct": direct,
        "alignment": alignment,
        "registered": registered,
        "reasons": reasons,
        "stepwell": _core.VERSION,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "ml_dtypes": ml_dtypes.__version__,
        "kernel": platform.release(),
    }
    if cuda:
        there, why_not = _core.cuda()
        found["cuda"] = why_not if there is None else {"driver": there[0], "devices": there[1]}
    return found


@public
def watch(
    root: Path,
    *,
    after: int | None = None,
    timeout: float | None = None,
    which: Literal["latest", "all"] = "latest",
    interval: float = 0.5,
) -> Iterator[Checkpoint]:
    """Yields committed steps newer than ``after``, leased, as they come: for an evaluator.
    ``which="latest"`` skips to the newest; ``"all"`` gives every one that is still there. Ends when
    nothing new has come for ``timeout`` seconds. Each is closed when the next is asked for.

    It yields complete steps only. A step without all of its files (in a mirror that is still being
    copied, for example) is skipped with a warning and tried again later, so ``"all"`` may yield it
    after a newer one. ``"latest"`` yields the newest complete step, and never one older than
    before. It also yields a step that was saved again after a rewind, or that replaces the last
    one, but not the step that a rewind leaves as the newest."""
    one_of(which, "which", ("latest", "all"))
    limit, pause = seconds(timeout), seconds(interval, "interval")
    where = absolute(root, "the root")
    seen = None if after is None else step_number(after)
    check_watched(where)
    return watching.watch(where, open, seen, limit, pause, which)
