"""Measurements of a run's saves: from the steps of its root and the events of its manager."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import pairwise
from statistics import median
from typing import TYPE_CHECKING, TypeAlias, final

from ._checks import listed, shown
from ._steps import StepInfo
from .errors import MisuseError, from_system

if TYPE_CHECKING:
    from .events import Event

#: Events as an argument: the file of a :class:`~stepwell.events.JsonLines`, or a list.
Events: TypeAlias = "str | os.PathLike[str] | Iterable[Event]"
_Fields: TypeAlias = Mapping[str, object]


@final
@dataclass(frozen=True, slots=True)
class RunMeasurements:
    """Medians of a run. Times are seconds; ``None`` is unknown."""

    #: Bytes of the newest step, and the processes that wrote it.
    nbytes: int
    ranks: int
    #: From the start of one save to the start of the next, and in steps.
    interval_seconds: float | None
    interval_steps: int | None
    #: A step without a save beside it.
    step_seconds: float | None
    #: The call of ``save``; and the whole cost of a save, with slower steps beside it.
    blocked_seconds: float
    cost_seconds: float
    #: From the start of a save to its commit, without waits for earlier saves.
    save_seconds: float
    restore_seconds: float | None

    @property
    def bytes_per_second(self) -> float:
        """The bytes of a step divided by the seconds of a save."""
        return self.nbytes / self.save_seconds


@final
@dataclass(frozen=True, slots=True)
class EventMeasurements:
    """Medians of the events about a root; ``None`` where none says it."""

    blocked: float | None
    cost: float | None
    step: float | None
    save: float | None
    restore: float | None

    @classmethod
    def of(cls, events: Events | None, root: str) -> EventMeasurements:
        """Reads the events about a root."""
        found = [] if events is None else [one for one in _read(events) if one.get("root") == root]
        if events is not None and not found:
            raise MisuseError(f"events= has no event about {root}. Pass the events of that root's manager")
        saves: dict[object, list[_Fields]] = {}
        for one in found:
            if one.get("event") == "save" and one.get("outcome") == "committed":
                # The ranks of a job may write to one file. The slowest decides.
                saves.setdefault(one.get("step"), []).append(one)
        restores = [
            one for one in found if one.get("event") == "restore" and one.get("outcome") == "restored"
        ]

        def middle(*names: str) -> float | None:
            values = [
                max(_number(one, names[0]) - sum(_number(one, name) for name in names[1:]) for one in ranks)
                for same in saves.values()
                if (ranks := [one for one in same if all(one.get(name) is not None for name in names)])
            ]
            return median(values) if values else None

        return cls(
            middle("blocked_seconds"),
            middle("cost_seconds"),
            middle("step_seconds"),
            middle("total_seconds", "queued_seconds"),
            median(_number(one, "seconds") for one in restores) if restores else None,
        )


def _read(events: Events) -> list[_Fields]:
    if not isinstance(events, (str, os.PathLike)):
        return [
            _fields(event) for event in listed(events, "events is the path of a file, or a list of events")
        ]
    path = os.fspath(events)
    try:
        with open(path, encoding="utf-8") as file:
            lines = file.read().split("\n")
    except OSError as error:
        raise from_system(f"the events {path} cannot be read", error, path) from error
    except UnicodeDecodeError as error:
        raise MisuseError(
            f"{path} is no file of events: {error}. Pass what sw.events.JsonLines wrote"
        ) from error
    # A kill leaves a last line without its end.
    return [_parsed(path, number, line) for number, line in enumerate(lines[:-1], 1)]


def _parsed(path: str, number: int, line: str) -> _Fields:
    try:
        found = json.loads(line)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict):
        raise MisuseError(f"line {number} of {path} is no event. Pass what sw.events.JsonLines wrote")
    return found


def _fields(event: object) -> _Fields:
    from .events import ExportEvent, RestoreEvent, SaveEvent

    if isinstance(event, SaveEvent):
        return {**asdict(event), **asdict(event.stats), "event": "save"}
    if isinstance(event, (RestoreEvent, ExportEvent)):
        return {**asdict(event), "event": "restore" if isinstance(event, RestoreEvent) else "export"}
    raise MisuseError(f"events= has a {shown(event)}, which is no event of a manager")


def _number(event: _Fields, name: str) -> float:
    value = event.get(name)
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < float("inf"):
        raise MisuseError(f"an event of step {event.get('step')} has {name} {shown(value)}, which is no time")
    return float(value)


def typical_interval(steps: Sequence[StepInfo]) -> tuple[float | None, int | None]:
    """Returns the median time between the starts of two saves, and between their numbers."""
    pairs = [(later.started - step.started, later.number - step.number) for step, later in pairwise(steps)]
    seconds = [time.total_seconds() for time, _ in pairs if time.total_seconds() > 0]
    if not seconds:
        return None, None
    return median(seconds), round(median(number for _, number in pairs))
