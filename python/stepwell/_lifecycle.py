"""The life of a process: one thread for callbacks and the engine's log, pending saves that are
flushed at exit, unseen failures that become an exit status, and handles that know when they are in
a forked child.

* One daemon thread, started with the first manager, waits in the engine (without the GIL), runs
  callbacks and passes the engine's log to ``logging.getLogger("stepwell")``. Engine threads never
  touch Python.
* Managers and background saves are held here strongly until they end, even if their user has
  dropped them.
* The atexit hook is registered when this package is imported, so it runs after all hooks that are
  registered later. It closes the managers that this process made, prints unseen failures, and then
  leaves with ``os._exit(1)``: an exception there would exit with 0.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Generator
from itertools import count
from typing import TYPE_CHECKING, Protocol

from .errors import ForkedProcess, StalledError

if TYPE_CHECKING:
    from . import _core

EXIT_STATUS = 1


class Ending(Protocol):
    """The exit hook's view of a manager or a background save."""

    #: Which one it is, for messages.
    what: str

    def at_exit(self) -> BaseException | None:
        """Ends it, in bounded time; the failure that nobody has seen."""

    def wait_captured(self) -> None:
        """Waits until nothing is read of the state any more."""


class Owner:
    """Knows whether this process made a handle."""

    __slots__ = ("_pid", "_what")

    def __init__(self, what: str) -> None:
        self._pid = os.getpid()
        self._what = what

    @property
    def is_here(self) -> bool:
        """True if this is the process that made the handle."""
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
        self._waiting: dict[int, Callable[[], object]] = {}
        self._thread: threading.Thread | None = None
        self._owner = Owner("notifier")
        self._events: _core.Events | None = None

    @property
    def events(self) -> _core.Events:
        """The queue that engine threads post to."""
        return self.start()

    def register(self, callback: Callable[[], object]) -> int:
        """A number for the engine to post when ``callback`` is due."""
        self.start()
        with self._lock:
            number = next(self._numbers)
            self._waiting[number] = callback
        return number

    def start(self) -> _core.Events:
        """Starts the thread, once, and returns its queue."""
        with self._lock:
            if self._thread is None or self._events is None:
                # Not first by the thread: a fork during that import prints an error.
                import logging  # noqa: F401

                from . import _core

                self._events = events = _core.Events()
                self._thread = threading.Thread(
                    target=self._run, args=(events,), name="stepwell-notifier", daemon=True
                )
                self._thread.start()
            return self._events

    def _run(self, events: _core.Events) -> None:
        while True:
            for told in events.next():
                if isinstance(told, tuple):
                    log(*told)
                    continue
                number = told
                if number == 0:
                    return
                with self._lock:
                    callback = self._waiting.pop(number, None)
                if callback is None:
                    continue
                try:
                    callback()
                except BaseException:  # printed, as concurrent.futures does
                    print("stepwell: exception in a callback", file=sys.stderr)
                    traceback.print_exc()

    def stop(self, timeout: float = 5.0) -> None:
        """Ends the thread after what is due has run."""
        thread, events = self._thread, self._events
        if (
            thread is None
            or events is None
            or not self._owner.is_here
            or thread is threading.current_thread()
        ):
            return
        events.post(0)
        thread.join(timeout)
        self._thread = None


notifier = _Notifier()
_endings: dict[int, Ending] = {}
_failures: list[str] = []


def log(level: int, target: str, text: str) -> None:
    """Something that the engine has to say. Without a handler of the user's, ``logging`` itself
    shows warnings on standard error."""
    import logging  # costs a tenth of the import of this package, and mostly has nothing to say

    try:
        logging.getLogger("stepwell").log(level, "%s", text, extra={"target": target})
    except Exception:  # a handler or filter that raises must not end the thread
        traceback.print_exc()


def is_session() -> bool:
    """True if this process runs cells or lines of a person: a notebook, or Python's own prompt."""
    return hasattr(sys, "ps1")


def endings() -> list[Ending]:
    """The managers and background saves of this process that have not ended."""
    return list(_endings.values())


def watch(ending: Ending) -> None:
    """Has the exit hook end something."""
    notifier.start()
    _endings[id(ending)] = ending


def forget(ending: Ending) -> None:
    """It has ended, and its user has heard how."""
    _endings.pop(id(ending), None)


def wait_captured() -> None:
    """Waits until no save of this process reads its state any more: before arrays are filled, which
    may be those."""
    for ending in endings():
        ending.wait_captured()


def unseen(failure: BaseException, where: str) -> None:
    """A failure that nobody can see any more: printed at exit, which then is one with an error."""
    _failures.append(f"stepwell: {where}: {type(failure).__name__}: {failure}")


def until_done(
    add_done_callback: Callable[[Callable[[object], object]], object],
) -> Generator[object, None, None]:
    """Waits in an event loop for a future of this package, for its ``__await__``."""
    import asyncio  # costs more than all of this package to import; who awaits has imported it

    loop = asyncio.get_running_loop()
    ready: asyncio.Future[None] = loop.create_future()

    def wake() -> None:
        if not ready.done():
            ready.set_result(None)

    def on_done(_: object) -> None:
        # A loop that was closed meanwhile has nobody who waits any more.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(wake)

    add_done_callback(on_done)
    yield from ready


def wait_patiently(
    wait: Callable[[float], bool], progress: Callable[[], object], stall: float, what: str
) -> None:
    """Calls ``wait(seconds)`` until it says yes. Raises ``StalledError`` when ``progress()`` has
    not changed for ``stall`` seconds."""
    begun = since = time.monotonic()
    seen = progress()
    while not wait(min(stall, 0.25)):
        now = progress()
        if now != seen:
            seen, since = now, time.monotonic()
        elif time.monotonic() - since >= stall:
            raise StalledError(
                f"waited {time.monotonic() - begun:.1f} s for {what}, and nothing has happened for {stall:g} s; it is given up"
            )


def _reset_in_child() -> None:
    """In a forked child none of the parent's handles, failures and threads are this process's
    business."""
    global notifier, _endings
    _failures.clear()
    _endings = {}
    notifier = _Notifier()


def _at_exit() -> None:
    for ending in endings():
        try:
            failure = ending.at_exit()
        except BaseException as raised:  # an interrupt too: the next one is to be ended as well
            failure = raised
        if failure is not None:
            unseen(failure, f"{ending.what} was not looked at before the process ended")
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
