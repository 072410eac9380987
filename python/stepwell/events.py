"""Events of a manager for dashboards and logs: one for each finished save, restore and export, and
for each step that is compared with an earlier trace.

Pass ``on_event=`` to the manager: a function of a :class:`SaveEvent`, :class:`RestoreEvent`,
:class:`ExportEvent` or :class:`TraceEvent`, or :class:`JsonLines`.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from . import _lifecycle as lifecycle
from ._save_costs import SaveCosts
from ._save_result import Save, SaveStats

__all__ = ["ExportEvent", "JsonLines", "RestoreEvent", "SaveEvent", "TraceEvent"]


@final
@dataclass(frozen=True, slots=True)
class SaveEvent:
    """A save that has ended."""

    #: The root of its manager, and its step.
    root: str
    step: int
    #: When it ended, in UTC.
    time: datetime.datetime
    outcome: Literal["committed", "failed", "uncertain"]
    #: The text of its error, and the error's ``kind``; or ``None``.
    error: str | None
    error_kind: str | None
    #: How long the call took.
    blocked_seconds: float
    #: Its bytes, and the seconds of each phase.
    stats: SaveStats
    #: Medians of the run when it began, or ``None`` before the first: the seconds of a step without
    #: a save beside it, and what a save costs training (its call, and slower steps beside it).
    step_seconds: float | None
    cost_seconds: float | None
    #: Paths of the leaves that could not be stored, and were left out (``unsupported="drop"``).
    unsupported: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class RestoreEvent:
    """A restore that has ended."""

    #: The root of its manager.
    root: str
    #: Its step. ``None`` if the newest one was wanted and none was found.
    step: int | None
    #: When it ended, in UTC.
    time: datetime.datetime
    outcome: Literal["restored", "failed"]
    #: The text of its error, and the error's ``kind`` (the class, for another library's); or
    #: ``None``.
    error: str | None
    error_kind: str | None
    #: How long it took, and how much of that passed before the match (``None``: it failed before).
    seconds: float
    open_seconds: float | None


@final
@dataclass(frozen=True, slots=True)
class ExportEvent:
    """An export of a step that has ended (:class:`stepwell.Export`)."""

    #: The root of its manager, and its step.
    root: str
    step: int
    #: When it ended, in UTC.
    time: datetime.datetime
    #: ``"skipped"``: a newer step was due before this one had begun.
    outcome: Literal["exported", "skipped", "failed"]
    #: The text of its error, and the error's ``kind``; or ``None``.
    error: str | None
    error_kind: str | None
    #: The path of the export.
    destination: str
    #: The bytes of its files.
    nbytes: int
    #: Duration.
    seconds: float


@final
@dataclass(frozen=True, slots=True)
class TraceEvent:
    """A step of a resumed run that was compared with the same step of the earlier run
    (``CheckpointManager(prove_resume=)``)."""

    #: The root of its manager, and the step.
    root: str
    step: int
    #: When it was compared, in UTC.
    time: datetime.datetime
    #: ``"unknown"``: this rank holds other regions of some leaves than any rank did before. The
    #: other leaves are the same.
    outcome: Literal["same", "differs", "unknown"]
    #: The text of the difference, or ``None``.
    error: str | None
    #: The step that was restored.
    base: int
    #: This process.
    rank: int
    #: The path of the first leaf that differs, or ``None``.
    leaf: str | None
    #: Likely causes, most likely first.
    causes: tuple[str, ...]


#: The argument of ``on_event=``.
Event: TypeAlias = SaveEvent | RestoreEvent | ExportEvent | TraceEvent
OnEvent: TypeAlias = Callable[[Event], object]

_ERROR = 40


@final
class JsonLines:
    """Appends each event to a file, one JSON object per line: ``event`` (``"save"``, ``"restore"``,
    ``"export"`` or ``"trace"``) and the event's attributes, with those of ``stats`` beside them.
    Several managers may share a file. It is opened for each line, so it may be moved away
    meanwhile."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        content = dataclasses.asdict(event)
        content |= content.pop("stats", {})
        content["time"] = event.time.isoformat(timespec="milliseconds")
        kind = type(event).__name__.removesuffix("Event").lower()
        line = json.dumps({"event": kind, **content}, ensure_ascii=False) + "\n"
        with self._lock, open(self._path, "a", encoding="utf-8") as file:
            file.write(line)

    def __repr__(self) -> str:
        return f"JsonLines({self._path!r})"


def now() -> datetime.datetime:
    """Returns the time, in UTC."""
    return datetime.datetime.now(datetime.UTC)


def tell(on_event: OnEvent, event: Event) -> None:
    """Calls the function, and logs its failure."""
    try:
        on_event(event)
    except Exception as failure:
        # A failing observer does not end the run.
        lifecycle.log(_ERROR, "stepwell", f"on_event raised {type(failure).__name__}: {failure}")


def tell_save(on_event: OnEvent, root: str, save: Save, blocked: float, costs: SaveCosts) -> None:
    """Tells of a save, once it is over."""
    step_seconds, cost = costs.step_seconds, costs.cost

    def over(save: Save) -> None:
        stats = save.stats
        if save._handle is None or stats is None:
            return
        dropped = tuple(path for path, _ in save._handle.unsupported)
        outcome, error, kind = save._handle.outcome()
        event = SaveEvent(
            root, save.step, now(), outcome, error, kind, blocked, stats, step_seconds, cost, dropped
        )
        tell(on_event, event)

    save.add_done_callback(over)


class Restoring:
    """A restore that is to be told of."""

    def __init__(self, step: int | None) -> None:
        self.step = step
        self._begun = time.perf_counter()
        self._opened: float | None = None

    def opened(self, step: int) -> None:
        """The checkpoint is open."""
        self.step = step
        self._opened = time.perf_counter()

    def event(self, root: str, failure: BaseException | None) -> RestoreEvent:
        """The event of its end."""
        return RestoreEvent(
            root,
            self.step,
            now(),
            outcome="restored" if failure is None else "failed",
            error=None if failure is None else str(failure),
            error_kind=None if failure is None else getattr(failure, "kind", type(failure).__name__),
            seconds=time.perf_counter() - self._begun,
            open_seconds=None if self._opened is None else self._opened - self._begun,
        )


@contextmanager
def telling_restore(on_event: OnEvent | None, root: str, step: int | None) -> Iterator[Restoring]:
    """Around a restore: tells of it when it is over, however it ended."""
    restoring = Restoring(step)
    try:
        yield restoring
    except BaseException as failure:
        if on_event is not None:
            tell(on_event, restoring.event(root, failure))
        raise
    if on_event is not None:
        tell(on_event, restoring.event(root, None))
