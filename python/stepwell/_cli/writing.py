"""Being the writer of a root for the length of a command: refused while a training run is, and
patient with deletions."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .._manager import CheckpointManager
from .._retention import Retention
from ..errors import LockedError, NoLocks, StalledError
from .leftovers import scan
from .progress import progress
from .retention_plan import manager_of

#: Seconds between two looks at what is left to delete.
_LOOK = 0.2
#: Seconds without anything being deleted after which the wait is given up.
_STALL = 600.0


@contextmanager
def writer(root: str, retention: Retention | None, what: str) -> Iterator[CheckpointManager]:
    """The root's writer, which at the end of the block waits until what is to be deleted is."""
    try:
        manager = manager_of(root, retention, read_only=False)
    except NoLocks:
        raise
    except LockedError as error:
        # The advice of the message is for programs.
        held = str(error).split(". Close it", 1)[0]
        error.args = (
            f"{held}: {what} needs to be the only one; wait for that run to end or stop it, and try again (--dry-run only looks, and works meanwhile)",
        )
        raise
    try:
        yield manager
    except BaseException:
        manager.close()
        raise
    _close(manager, root)


def _close(manager: CheckpointManager, root: str) -> None:
    """Waits for deletions as long as they get on."""

    def left() -> int:
        return sum(one.nbytes for one in scan(root).dead)

    with progress("deleting") as tell:
        whole = least = left()
        since = time.monotonic()
        while not _closed(manager.close):
            now = left()
            tell(max(0, whole - now), whole)
            if now < least:
                least, since = now, time.monotonic()
            elif time.monotonic() - since > _STALL:
                raise StalledError(
                    f"nothing of what is to be deleted below {root} has gone for {_STALL:g} s; it is left to the next writer, or to `stepwell gc`"
                )


def _closed(close: Callable[[float], None]) -> bool:
    try:
        close(_LOOK)
    except StalledError:
        return False
    return True
