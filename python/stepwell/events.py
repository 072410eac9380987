"""What a manager did, for dashboards and logs: one plain dict for each save and restore that is over.

Pass ``on_event=`` to the manager: any function of one dict, or :class:`JsonLines`. Every event has ``event``, ``root``, ``step`` and ``time`` (UTC, ISO 8601);

* ``"save"``: ``outcome`` (``"committed"``, ``"failed"``, ``"uncertain"``) and ``error`` (its text, or ``None``), ``blocked_seconds`` (how long the call took), and all
  of :class:`~stepwell.SaveStats`;
* ``"restore"``: ``seconds``, of which ``open_seconds`` before anything was matched.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import os
import threading
from collections.abc import Callable
from typing import Any, TypeAlias, final

from . import lifecycle
from .pending import Save

Event: TypeAlias = dict[str, Any]
OnEvent: TypeAlias = Callable[[Event], Any]

_ERROR = 40


@final
class JsonLines:
    """Appends each event to a file, one JSON object per line. Any number of managers may share one; the file is opened for each line, so that it may be
    moved away meanwhile."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        line = json.dumps(event, ensure_ascii=False) + "\n"
        with self._lock, open(self._path, "a", encoding="utf-8") as file:
            file.write(line)

    def __repr__(self) -> str:
        return f"JsonLines({self._path!r})"


def _tell(on_event: OnEvent, event: str, root: str, step: int, more: Event) -> None:
    moment = datetime.datetime.now(datetime.UTC).isoformat(timespec="milliseconds")
    try:
        on_event({"event": event, "root": root, "step": step, "time": moment, **more})
    except Exception as failure:
        # What watches a run does not end it.
        lifecycle.log(_ERROR, "stepwell", f"on_event raised {type(failure).__name__}: {failure}")


def tell_save(on_event: OnEvent, root: str, save: Save, blocked: float) -> None:
    """Tells of a save, once it is over."""

    def over(save: Save) -> None:
        outcome, error = save._handle.outcome()
        stats = save.stats
        assert stats is not None
        found = {"outcome": outcome, "error": error, "blocked_seconds": blocked}
        _tell(on_event, "save", root, save.step, {**found, **dataclasses.asdict(stats)})

    save.add_done_callback(over)


def tell_restore(on_event: OnEvent, root: str, step: int, seconds: float, opening: float) -> None:
    """Tells of a restore."""
    _tell(on_event, "restore", root, step, {"seconds": seconds, "open_seconds": opening})
