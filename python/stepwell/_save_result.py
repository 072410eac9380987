"""The result of ``save``: a future of one save."""

from __future__ import annotations

import threading
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import final

from . import _core
from . import _lifecycle as lifecycle
from ._public import public
from ._timeouts import seconds
from .errors import StalledError, StepwellError


@final
@dataclass(frozen=True, slots=True)
class SaveStats:
    """Statistics of a save so far: bytes, and seconds per phase. Phases overlap; unfinished ones
    are 0."""

    #: Bytes that its data files will have, and how many of them are copied and written by now.
    nbytes: int
    captured_bytes: int
    written_bytes: int
    files: int
    #: Checking the state and giving every chunk its place.
    plan_seconds: float
    #: Copying the state; of all threads together, how long they waited for staging memory.
    capture_seconds: float
    staging_seconds: float
    #: Behind earlier saves.
    queued_seconds: float
    #: From the first write to the last; checksums are a part of it.
    write_seconds: float
    checksum_seconds: float
    #: fsync of the data files; then indexes, manifest, directories and the rename.
    sync_seconds: float
    commit_seconds: float
    #: From the call to the outcome; 0 before.
    total_seconds: float


@public
@final
class Save:
    """One save. Like a ``concurrent.futures.Future``, but that it cannot be cancelled; ``await``
    works too.

    A save that the policy refused is falsy and done, has the ``reason``, and its ``result()`` is
    ``None``.
    """

    __slots__ = ("__weakref__", "_handle", "_owner", "reason", "step")

    def __init__(self, step: int, handle: _core.SaveHandle | None = None, reason: str | None = None) -> None:
        #: The step that was asked for.
        self.step = step
        #: Why nothing was saved, where nothing was.
        self.reason = reason
        self._handle = handle
        self._owner = lifecycle.Owner("save")

    def __bool__(self) -> bool:
        return self._handle is not None

    def captured(self) -> bool:
        """True if the state has been copied, so that it may be changed. (Host memory always is when
        ``save`` returns.)"""
        self._owner.check()
        return self._handle is None or bool(self._handle.captured())

    def wait_captured(self, timeout: float | None = None) -> bool:
        """Waits until the state may be changed; ``False`` if ``timeout`` seconds have passed
        before. Without one as :meth:`result`."""
        self._owner.check()
        return self._handle is None or bool(self._handle.wait_captured(seconds(timeout)))

    def done(self) -> bool:
        """True if it is committed or has failed."""
        self._owner.check()
        return self._handle is None or bool(self._handle.done())

    def result(self, timeout: float | None = None) -> int | None:
        """The step, once it is committed; ``None`` if the policy refused it. Raises what made it
        fail; ``TimeoutError`` if ``timeout`` seconds have passed before, and without a timeout
        :class:`~stepwell.errors.StalledError` when neither this save nor one before it has got on
        for ``Options.stall_timeout`` (the save goes on in both cases)."""
        self._owner.check()
        if self._handle is None:
            return None
        self._handle.result(seconds(timeout))
        return self.step

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Returns its error, or ``None`` once it is committed."""
        self._owner.check()
        limit = seconds(timeout)  # a wrong one is no failure of the save
        try:
            self.result(limit)
        except StepwellError as error:
            if isinstance(error, StalledError) and not self.done():
                raise  # the wait has ended, and not the save
            return error
        return None

    def add_done_callback(self, callback: Callable[[Save], object]) -> None:
        """Calls ``callback(self)`` when it is done: at once if it is, else on the notifier's
        thread."""
        self._owner.check()
        if self._handle is None or self._handle.done():
            callback(self)
            return
        number = lifecycle.notifier.register(lambda: callback(self))
        self._handle.on_done(lifecycle.notifier.events, number)

    def _is_committed(self) -> bool:
        return self._handle is not None and self._handle.outcome()[0] == "committed"

    def _waited(self, stall: float) -> bool:
        """Waits for the end, as long as the save gets on within ``stall`` seconds. False if it has
        failed; the failure stays unseen."""
        handle, ended = self._handle, threading.Event()
        if handle is None:
            return True
        self.add_done_callback(lambda _: ended.set())
        try:
            lifecycle.wait_patiently(ended.wait, handle.progress, stall, "a save")
        except StalledError:
            return False
        return self._is_committed()

    @property
    def stats(self) -> SaveStats | None:
        """Bytes, files, seconds; ``None`` if nothing was saved."""
        self._owner.check()
        return None if self._handle is None else SaveStats(**self._handle.stats())

    def __await__(self) -> Generator[object, None, int | None]:
        yield from lifecycle.until_done(self.add_done_callback)
        return self.result(0)

    def __repr__(self) -> str:
        if self._handle is None:
            return f"<Save of step {self.step}: {self.reason}>"
        if not self._owner.is_here:
            return f"<Save of step {self.step}, of the parent process>"
        state = "done" if self._handle.done() else "captured" if self._handle.captured() else "capturing"
        return f"<Save of step {self.step}: {state}>"
