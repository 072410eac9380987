"""The result of ``save``: a future of one save."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Generator
from dataclasses import dataclass
from typing import TYPE_CHECKING, final

from . import _core
from . import _lifecycle as lifecycle
from ._public import public
from ._timeouts import seconds
from .errors import MisuseError, StalledError, StepwellError

if TYPE_CHECKING:
    from ._tiers import Survives, Tiers


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


@dataclass(frozen=True, slots=True)
class TierWaits:
    """The tiers of the manager of a save."""

    tiers: Tiers
    core: _core.Manager

    def wait(self, step: int, name: str, limit: float | None) -> None:
        """See ``Tiers``."""
        self.tiers.wait(self.core, step, name, limit)

    def durability(self, step: int) -> Survives | None:
        """See ``Tiers``."""
        return self.tiers.durability(self.core, step)


@public
@final
class Save:
    """One save. Like a ``concurrent.futures.Future``, but that it cannot be cancelled; ``await``
    works too.

    A save that the policy refused is falsy and done, has the ``reason``, and its ``result()`` is
    ``None``.
    """

    __slots__ = ("__weakref__", "_handle", "_owner", "_tiers", "reason", "step")

    def __init__(
        self,
        step: int,
        handle: _core.SaveHandle | None = None,
        reason: str | None = None,
        tiers: TierWaits | None = None,
    ) -> None:
        #: The step that was asked for.
        self.step = step
        #: Why nothing was saved, where nothing was.
        self.reason = reason
        self._handle = handle
        self._tiers = tiers
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

    def result(self, timeout: float | None = None, *, tier: str | None = None) -> int | None:
        """The step, once it is committed; ``None`` if the policy refused it.

        Args:
            timeout: seconds to wait.
            tier: the name of a tier that must have the step too. Default: only the first one.

        Raises:
            SaveFailed: what made it fail.
            NotCarried: the tier will not get the step.
            TimeoutError: ``timeout`` seconds have passed before. The save goes on.
            StalledError: without a timeout: neither this save nor one before it has got on for
                ``Options.stall_timeout``. The save goes on.
        """
        self._owner.check()
        if self._handle is None:
            return None
        limit = seconds(timeout)
        if tier is not None and self._tiers is None:
            raise MisuseError(f"the manager of this save has no tiers, so none is called {tier!r}")
        begun = time.monotonic()
        self._handle.result(limit)
        if tier is not None and self._tiers is not None:
            left = None if limit is None else max(0.0, limit - (time.monotonic() - begun))
            self._tiers.wait(self.step, tier, left)
        return self.step

    @property
    def durability(self) -> Survives | None:
        """The loss that the copies of the step outlive so far. One of ``"process"``, ``"node"`` (of
        the machine) and ``"site"``. ``None`` before the commit, after the step was removed, and
        without ``tiers=``."""
        self._owner.check()
        if self._tiers is None or not self._is_committed():
            return None
        return self._tiers.durability(self.step)

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
