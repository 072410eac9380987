"""Events of a manager for dashboards and logs: one plain dict for each finished save and restore.

Pass ``on_event=`` to the manager: any function of one dict, or :class:`JsonLines`. Every event has
``event``, ``root``, ``step`` and ``time`` (UTC, ISO 8601);

* ``"save"``: ``outcome`` (``"committed"``, ``"failed"``, ``"uncertain"``), ``error`` and
  ``error_kind`` (the text of its error, and the error's ``kind``; or ``None``), ``blocked_seconds``
  (how long the call took), and all of :class:`~stepwell.results.SaveStats`;
* ``"restore"``: ``outcome`` (``"restored"``, ``"failed"``), ``error`` and ``error_kind`` (of
  another library's exception: the name of its class), ``seconds``, of which ``open_seconds`` before
  anything was matched (``None`` where it failed before that). ``step`` is ``None`` where the newest
  one was asked for and none was found.
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
from typing import Any, TypeAlias, final

from . import _lifecycle as lifecycle
from ._save_result import Save

__all__ = ["JsonLines"]

Event: TypeAlias = dict[str, Any]
OnEvent: TypeAlias = Callable[[Event], Any]

_ERROR = 40


@final
class JsonLines:
    """Appends each event to a file, one JSON object per line. Any number of managers may share one;
    the file is opened for each line, so that it may be moved away meanwhile."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        line = json.dumps(event, ensure_ascii=False) + "\n"
        with self._lock, open(self._path, "a", encoding="utf-8") as file:
            file.write(line)

    def __repr__(self) -> str:
        return f"JsonLines({self._path!r})"


def _tell(on_event: OnEvent, event: str, root: str, step: int | None, more: Event) -> None:
    moment = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    try:
        on_event({"event": event, "root": root, "step": step, "time": moment, **more})
    except Exception as failure:
        # A failing observer does not end the run.
        lifecycle.log(_ERROR, "stepwell", f"on_event raised {type(failure).__name__}: {failure}")


def tell_save(on_event: OnEvent, root: str, save: Save, blocked: float) -> None:
    """Tells of a save, once it is over."""

    def over(save: Save) -> None:
        outcome, error, kind = save._handle.outcome()
        stats = save.stats
        assert stats is not None
        found = {"outcome": outcome, "error": error, "error_kind": kind, "blocked_seconds": blocked}
        _tell(on_event, "save", root, save.step, {**found, **dataclasses.asdict(stats)})

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

    def _told(self, failure: BaseException | None) -> Event:
        kind = None if failure is None else getattr(failure, "kind", type(failure).__name__)
        return {
            "outcome": "restored" if failure is None else "failed",
            "error": None if failure is None else str(failure),
            "error_kind": kind,
            "seconds": time.perf_counter() - self._begun,
            "open_seconds": None if self._opened is None else self._opened - self._begun,
        }


@contextmanager
def telling_restore(on_event: OnEvent | None, root: str, step: int | None) -> Iterator[Restoring]:
    """Around a restore: tells of it when it is over, however it ended."""
    restoring = Restoring(step)
    try:
        yield restoring
    except BaseException as failure:
        if on_event is not None:
            _tell(on_event, "restore", root, restoring.step, restoring._told(failure))
        raise
    if on_event is not None:
        _tell(on_event, "restore", root, restoring.step, restoring._told(None))
