"""Checkpoints in directories that another library names and deletes. Each directory is a root with
one step, and may have files of that library beside it. A second save to a directory writes the next
step, and deletes the one before once it is committed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import TypeVar, cast

from .. import _core
from .. import _lifecycle as lifecycle
from .._manager import CheckpointManager
from .._save_result import Save
from ..coordinators import Coordinator

_T = TypeVar("_T")
_U = TypeVar("_U")


class GuestSave(Future[_T]):
    """A save in the background, as a ``concurrent.futures.Future``. Its result is that of
    ``committed``, which runs on the thread of this save after the commit, on each rank."""

    def __init__(
        self, manager: CheckpointManager, save: Save, path: str, committed: Callable[[], _T]
    ) -> None:
        super().__init__()
        self.what = f"the save to {path}"
        self._manager, self._save, self._committed = manager, save, committed
        self._is_seen = False
        self.set_running_or_notify_cancel()
        lifecycle.watch(self)
        self._thread = threading.Thread(target=self._finish, name="stepwell-guest", daemon=True)
        self._thread.start()

    def result(self, timeout: float | None = None) -> _T:
        """See ``Future``."""
        return self._saw(super().result, timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See ``Future``."""
        return self._saw(super().exception, timeout)

    def raise_unseen(self) -> None:
        """Raises a failure that nobody has seen."""
        if self.done() and not self._is_seen:
            self.result()

    def wait_captured(self) -> None:
        """See ``lifecycle.Ending``."""
        self._save.wait_captured()

    def at_exit(self) -> BaseException | None:
        """Waits as long as the save gets on; see ``lifecycle.Ending``."""
        self._thread.join()  # the save and the end of the manager have a deadline of their own
        return None if self._is_seen else super().exception(0)

    def _saw(self, ask: Callable[[float | None], _U], timeout: float | None) -> _U:
        try:
            return ask(timeout)
        finally:
            if self.done():
                self._is_seen = True
                lifecycle.forget(self)

    def _finish(self) -> None:
        try:
            try:
                self._save.result()
            finally:
                self._manager.close()
            found = self._committed()
        except BaseException as failure:
            self.set_exception(failure)
        else:
            self.set_result(found)
            lifecycle.forget(self)


#: The saves that had not ended when somebody looked last.
_saves: list[GuestSave[object]] = []
#: The process whose staging memory is kept. Each checkpoint has a manager of its own, and memory
#: that was given back is slow to touch again.
_kept_in: int | None = None


def save(
    path: str, state: object, coordinator: Coordinator | None, metadata: object, committed: Callable[[], _T]
) -> GuestSave[_T]:
    """Begins a save. Returns when the state may change."""
    global _kept_in
    raise_unseen()
    if _kept_in != os.getpid():
        _core.keep_staging_memory()
        _kept_in = os.getpid()
    manager = CheckpointManager(path, retention=1, coordinator=coordinator)
    try:
        found = manager.save(manager.next_step(), state, custom_metadata=metadata)
    except BaseException:
        manager.close()
        raise
    guest = GuestSave(manager, found, path, committed)
    _saves.append(cast("GuestSave[object]", guest))
    return guest


def raise_unseen() -> None:
    """Raises the failure of an earlier save that nobody has seen."""
    ended = [one for one in _saves if one.done()]
    _saves[:] = [one for one in _saves if one not in ended]
    for one in ended:
        one.raise_unseen()
