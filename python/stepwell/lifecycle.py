"""What must happen around the life of a process: callbacks on one thread, pending saves flushed at exit, failures that nobody has seen turned
into an exit status, and handles that know when they are in a forked child.

* One daemon thread, started with the first manager, waits in the engine (without the GIL) and runs callbacks; engine threads never touch Python.
* The atexit hook is registered when this package is imported, hence runs after all hooks that were registered later. It closes the managers
  that this process made, prints failures that nobody has seen, and then leaves with ``os._exit(1)``: an exception there would exit 0.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import traceback
import weakref
from collections.abc import Callable
from itertools import count
from typing import Any, Protocol

from .errors import ForkedProcess

#: How long the flush at exit may take without any progress being asked for: the engine's own deadlines end it earlier.
EXIT_STATUS = 1


class Closable(Protocol):
    """What the exit hook does with a manager or a background save."""

    def _at_exit(self) -> list[BaseException]:
        """Ends everything; returns the failures that nobody has seen."""


class Owner:
    """Knows whether this process made a handle."""

    __slots__ = ("_pid", "_what")

    def __init__(self, what: str) -> None:
        self._pid = os.getpid()
        self._what = what

    @property
    def is_here(self) -> bool:
        """Whether this is the process that made the handle."""
        return os.getpid() == self._pid

    def check(self) -> None:
        """Raises ``ForkedProcess`` in a forked child."""
        if os.getpid() != self._pid:
            raise ForkedProcess(
                f"this {self._what} was made before a fork (in process {self._pid}) and belongs to the parent process; "
                f"make a new one in the child"
            )


class _Notifier:
    """The thread that runs callbacks."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._numbers = count(1)
        self._waiting: dict[int, Callable[[], Any]] = {}
        self._thread: threading.Thread | None = None
        self._owner = Owner("notifier")
        self._events: Any = None

    @property
    def events(self) -> Any:
        """The queue that engine threads post to."""
        self.start()
        return self._events

    def register(self, callback: Callable[[], Any]) -> int:
        """A number for the engine to post when ``callback`` is due."""
        self.start()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = callback
        return number

    def start(self) -> None:
        """Starts the thread, once."""
        with self._lock:
            if self._thread is None:
                from . import _core

                self._events = _core.Events()
                self._thread = threading.Thread(target=self._run, name="stepwell-notifier", daemon=True)
                self._thread.start()

    def _run(self) -> None:
        while True:
            for number in self._events.next():
                if number == 0:
                    return
                with self._lock:
                    callback = self._waiting.pop(number, None)
                if callback is None:
                    continue
                try:
                    callback()
                except BaseException:  # a callback's own failure is printed, as concurrent.futures does
                    print("stepwell: exception in a callback", file=sys.stderr)
                    traceback.print_exc()

    def stop(self, timeout: float = 5.0) -> None:
        """Ends the thread after what is due has run."""
        thread = self._thread
        if thread is None or not self._owner.is_here or thread is threading.current_thread():
            return
        self._events.post(0)
        thread.join(timeout)
        self._thread = None


notifier = _Notifier()
_open: weakref.WeakSet[Any] = weakref.WeakSet()
_failures: list[str] = []


def watch(handle: Closable) -> None:
    """Has the exit hook end a handle."""
    notifier.start()
    _open.add(handle)


def forget(handle: Closable) -> None:
    """The handle was ended by its user."""
    _open.discard(handle)


def unseen(failure: BaseException, where: str) -> None:
    """A failure that nobody can see any more: printed at exit."""
    _failures.append(f"stepwell: {where}: {type(failure).__name__}: {failure}")


def _reset_in_child() -> None:
    """In a forked child none of the parent's handles, failures and threads are this process's business."""
    global notifier, _open
    _failures.clear()
    _open = weakref.WeakSet()
    notifier = _Notifier()


def _at_exit() -> None:
    for handle in list(_open):
        try:
            for failure in handle._at_exit():
                unseen(failure, "a save in the background failed and nobody looked")
        except BaseException as failure:
            unseen(failure, "closing at exit failed")
    notifier.stop()
    if not _failures:
        return
    for text in _failures:
        print(text, file=sys.stderr)
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(EXIT_STATUS)


os.register_at_fork(after_in_child=_reset_in_child)
atexit.register(_at_exit)
