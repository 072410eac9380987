"""Writes to a path without a manager: ``sw.save``, ``sw.save_async``, ``sw.add_metrics``."""

from __future__ import annotations

import time
from typing import Literal

from . import _adapters as adapters
from . import _core, coordinators
from . import _lifecycle as lifecycle
from ._checks import (
    SAVE_WORDS,
    instance,
    metadata_json,
    one_of,
    other_words,
    real_numbers,
    step_number,
)
from ._choice import Unsupported, log_dropped, saved_choice
from ._locations import Location, check_destination, explaining, location
from ._options import Options, to_json
from ._policies import every_steps
from ._public import public
from ._restore.options import Globs
from ._retention import keep_all
from ._save_result import Save
from ._state.specs import as_rank
from ._state.stateful import is_callable_state
from ._timeouts import stall_seconds
from ._types import Metrics
from .errors import CoordinationTimeout, StalledError


class _Background:
    """A singular save in the background. The exit hook waits for its commit, and reports a failure
    that nobody has seen."""

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
    """Returns the future of a save that has begun, and registers it with the exit hook. The
    bindings call this too, for a save whose caller was interrupted. ``service`` carries the ranks'
    messages, and is closed at the end of the save."""
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
    path: Location,
    state: object,
    *,
    metrics: Metrics | None = None,
    custom_metadata: object = None,
    include: Globs = None,
    exclude: Globs = None,
    cast: object = None,
    unsupported: Unsupported = "refuse",
    exists: Literal["error", "replace"] = "error",
    snapshot: Literal["auto", "lazy", "eager"] = "auto",
    coordinator: object = "auto",
    options: Options | None = None,
) -> Save:
    """Saves ``state`` as a checkpoint at ``path``. Returns a future of the commit as soon as the
    state may change. Several ranks save one checkpoint together, as in :func:`save`.

    Args:
        path: as of :func:`save`.
        state: as of :func:`save`.
        metrics: as of :func:`save`.
        custom_metadata: as of :func:`save`.
        include: as of :func:`save`.
        exclude: as of :func:`save`.
        cast: as of :func:`save`.
        unsupported: as of :func:`save`.
        exists: as of :func:`save`.
        snapshot: when arrays are copied, as in :meth:`CheckpointManager.save`.
        coordinator: as of :func:`save`.
        options: as of :func:`save`.
    """
    board = coordinators.find(coordinator, what="saves to this path")
    one_of(exists, "exists", ("error", "replace"))
    options = Options() if options is None else options
    instance(options, Options, "options", "sw.Options(…)")
    where = location(path)
    check_destination(where)
    text = to_json(options, every_steps(1), keep_all(), None, "auto", 1, False, "raise")
    coordinators.check_meets_at_a_path(board, "a single checkpoint")
    ranks, service = coordinators.connected(board)
    try:
        ticket = _ticket(where, exists, text, ranks)
        try:
            one_of(snapshot, "snapshot", ("auto", "lazy", "eager"))
            numbers = real_numbers(metrics)
            metadata = metadata_json(custom_metadata)
            choice = saved_choice(include, exclude, cast, unsupported)
            with as_rank((0, 1) if board is None else (board.rank, board.world_size)):
                saved = adapters.as_saved(state() if is_callable_state(state) else state)
                flat = _core.flatten(saved, choice, board is None)
            streams = adapters.streams(flat.devices())
            events = lifecycle.notifier.events
            handle = ticket.save(flat, numbers, metadata, snapshot, streams, events)
        except BaseException as error:
            # The other ranks have begun this save, and wait for this rank.
            ticket.fail(f"{type(error).__name__}: {error}")
            raise
    except BaseException:
        if service is not None:
            service.close()
        raise
    log_dropped(where, handle.unsupported)
    return keep(handle, where, stall_seconds(options.stall_timeout), service)


def _ticket(path: str, exists: str, options: str, ranks: coordinators.Meeting | None) -> _core.PathTicket:
    """Returns the right to save to a path. Waits for all ranks."""
    try:
        return _core.PathTicket(path, exists, options, ranks)
    except CoordinationTimeout as error:
        error.add_note("All ranks save to this path together. Pass coordinator=None if only this one does.")
        raise


@public
@other_words("save", SAVE_WORDS)
def save(
    path: Location,
    state: object,
    *,
    metrics: Metrics | None = None,
    custom_metadata: object = None,
    include: Globs = None,
    exclude: Globs = None,
    cast: object = None,
    unsupported: Unsupported = "refuse",
    exists: Literal["error", "replace"] = "error",
    coordinator: object = "auto",
    options: Options | None = None,
) -> None:
    """Saves ``state`` as a checkpoint at ``path``. It survives a power cut when this returns. Fails
    for the root of a run.

    Several ranks make this call together, each with its part of the state. The checkpoint has the
    parts of all ranks, or does not exist.

    Args:
        path: the directory of the checkpoint. It must not exist.
        state: the state, or a callable that returns it.
        metrics: real numbers by name.
        custom_metadata: JSON that belongs to the checkpoint.
        include: as in :meth:`CheckpointManager.save`.
        exclude: as in :meth:`CheckpointManager.save`.
        cast: as in :meth:`CheckpointManager.save`.
        unsupported: as in :meth:`CheckpointManager.save`.
        exists: for an existing checkpoint: ``"error"``, or ``"replace"``, which writes the new one
            first and then swaps the two.
        coordinator: how the ranks agree, as in :class:`CheckpointManager`. ``None``: only this
            process saves, although it is one of several. A ``SharedDirectory`` needs its ``path``.
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
        unsupported=unsupported,
        exists=exists,
        coordinator=coordinator,
        options=options,
    ).result()


@public
def add_metrics(root: Location, step: int, metrics: Metrics) -> None:
    """Adds metrics to a committed step of a root, for an evaluator in another process than the
    trainer."""
    where = location(root, "the root")
    with explaining(where):
        _core.add_metrics(where, step_number(step), real_numbers(metrics))
