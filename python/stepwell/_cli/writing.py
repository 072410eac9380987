"""The writer of a root for the length of a command. It is refused while a training run holds the
root, and waits for deletions."""

from __future__ import annotations

import errno
import time
from collections.abc import Iterator
from contextlib import contextmanager

import stepwell as sw

from ..errors import LockedError, NoLocks, StalledError, StorageError
from .leftovers import scan
from .progress import progress
from .targets import manager_of

#: Seconds of one wait for deletions.
_WAIT = 0.2
#: Seconds without a deletion after which the wait is given up.
_STALL = 600.0


@contextmanager
def writer(
    root: str, retention: sw.Retention | None, what: str, *, grace: float | None = None
) -> Iterator[sw.CheckpointManager]:
    """Opens the root's writer. At the end of the block it waits until the deletions are done.
    ``grace``: seconds for which readers without locks are waited for."""
    try:
        manager = manager_of(root, retention, read_only=False, grace=grace)
    except NoLocks:
        raise
    except LockedError as error:
        # The advice of the message is for programs.
        held = str(error).split(". Close it", 1)[0]
        error.args = (
            f"{held}: {what} needs to be the only writer; wait for that run to end or stop it, and try again (--dry-run works meanwhile)",
        )
        raise
    except StorageError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            error.args = (
                f"{error}. {what} needs a few hundred bytes of its own. What may be deleted by hand is in the troubleshooting page of the "
                'documentation, under "When a manager or a checkpoint is opened"',
            )
        raise
    try:
        yield manager
    except BaseException:
        manager.close()
        raise
    _close(manager)


def _close(manager: sw.CheckpointManager) -> None:
    """Waits for deletions while they make progress."""

    def left() -> int:
        return sum(one.nbytes for one in scan(manager.root).dead)

    if not left():
        return manager.close()
    with progress("deleting") as tell:
        whole = least = left()
        since = time.monotonic()
        while True:
            try:
                return manager.close(_WAIT)
            except StalledError as error:
                now = left()
                tell(max(0, whole - now), whole)
                if now < least:
                    least, since = now, time.monotonic()
                elif time.monotonic() - since > _STALL:
                    raise StalledError(
                        f"no deletion below {manager.root} for {_STALL:g} s; the next writer or `stepwell gc` goes on"
                    ) from error
