"""The future of ``restore_async``: a restore on a thread of its own, which waits in the engine."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from concurrent import futures
from typing import TypeVar, final

from . import _lifecycle as lifecycle
from ._timeouts import seconds

_T = TypeVar("_T")
_ERROR = 40


@final
class Restore(futures.Future[_T]):
    """One restore in the background: a ``concurrent.futures.Future``. ``result(timeout)`` returns
    what ``restore`` would return, or raises its error, and so does ``await``. It cannot be
    cancelled: ``cancel()`` returns False. Callbacks run on the restore's thread.

    The thread is no daemon: a process that ends waits for the restore, because the engine fills the
    caller's memory until then.
    """

    def __init__(self, what: str, run: Callable[[], _T]) -> None:
        super().__init__()
        self._what = what
        self._owner = lifecycle.Owner("restore")
        self._is_seen = False
        self.set_running_or_notify_cancel()
        self._thread = threading.Thread(target=self._run, args=(run,), name="stepwell-restore")
        self._thread.start()

    def _run(self, run: Callable[[], _T]) -> None:
        try:
            value = run()
        except BaseException as failure:
            self.set_exception(failure)
        else:
            self.set_result(value)

    def result(self, timeout: float | None = None) -> _T:
        """Returns the restored state (with ``return_report=True``: and the report). Raises the
        error of the restore, or ``TimeoutError`` after ``timeout`` seconds (it goes on then)."""
        self._look(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Returns the error of the restore, or ``None`` if it succeeded."""
        self._look(timeout)
        return super().exception(0)

    def __await__(self) -> Generator[object, None, _T]:
        yield from lifecycle.until_done(self.add_done_callback)
        return self.result(0)

    def _look(self, timeout: float | None) -> None:
        self._owner.check()
        if not self.done():
            super().exception(seconds(timeout))
        self._is_seen = True

    def wait(self, limit: float | None = None) -> None:
        """Waits for the end, unless this is its own thread."""
        if threading.current_thread() is not self._thread:
            super().exception(limit)

    def settle(self) -> None:
        """Waits for the end, and raises a failure that nobody has seen."""
        self.wait()
        if not self._is_seen and self.done():
            self.result()

    def __del__(self) -> None:
        try:
            failure = super().exception(0) if self._owner.is_here and not self._is_seen else None
            if failure is not None:
                lifecycle.log(_ERROR, "stepwell", f"{self._what} failed: {type(failure).__name__}: {failure}")
        except Exception:  # modules may be gone at the end of the interpreter
            pass

    def __repr__(self) -> str:
        return f"<Restore: {self._what}: {'done' if self.done() else 'running'}>"
