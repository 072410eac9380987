"""Signals that announce a preemption: what listens to them for a manager, from its making to the
end of its closing.

Handlers that were there still run. A forked child has them back before anything of its own runs: a
worker that a loader terminates must end. It is not enough that ours does nothing there: a handler
of Python's runs only when the interpreter gets to it, and a worker that has just begun to wait for
a lock never does.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from types import FrameType
from typing import TypeAlias

from . import _lifecycle as lifecycle

#: A handler, as ``signal.signal`` takes and returns it.
_Handler: TypeAlias = Callable[[int, FrameType | None], object] | int | None
#: Notifies a manager. Returns false, or is gone, if the manager no longer exists.
Tell = Callable[[], Callable[[], bool] | None]

#: Signals that anybody here has listened to.
_signals: set[int] = set()
_forking = threading.local()


class Preemption:
    """Listens for one manager, and keeps it not alive: ``tell`` is a weak reference to what tells
    it."""

    def __init__(self, signals: tuple[int, ...], tell: Tell) -> None:
        self._tell = tell
        self._owner = lifecycle.Owner("preemption handler")
        self._before: dict[int, _Handler] = {}
        if not signals:
            return
        import signal

        _signals.update(signals)
        for number in signals:
            self._before[number] = signal.signal(number, self._announce)

    def _announce(self, number: int, frame: FrameType | None) -> None:
        tell = self._tell() if self._owner.is_here else None
        told = tell is not None and tell()
        before = self._before.get(number)
        if callable(before):
            before(number, frame)
        elif not told and before in (0, None):
            # Nobody is left to be told, and nobody else listens: what the signal does by itself.
            import signal

            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)

    def restore(self) -> None:
        """Puts the handlers back that were there, where ours still stand. Elsewhere ours goes on
        calling what was there before it."""
        if not self._before or threading.current_thread() is not threading.main_thread():
            return
        import signal

        for number, before in list(self._before.items()):
            if signal.getsignal(number) == self._announce:
                signal.signal(number, before if before is not None else signal.SIG_DFL)
                del self._before[number]


def _before_fork() -> None:
    """Holds the signals back: one that came between the fork and the change of handlers would be
    lost."""
    if _signals:
        import signal

        _forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, _signals)


def _after_fork() -> None:
    mask = _forking.__dict__.pop("mask", None)
    if mask is not None:
        import signal

        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _after_fork_in_child() -> None:
    """Gives the child the handlers that were there before ours."""
    if _signals:
        import signal

        for number in _signals:
            found: _Handler = signal.getsignal(number)
            ours = isinstance(getattr(found, "__self__", None), Preemption)
            while isinstance(preemption := getattr(found, "__self__", None), Preemption):
                found = preemption._before.get(number)
            if ours:
                signal.signal(number, found if found is not None else signal.SIG_DFL)
        _signals.clear()
    _after_fork()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork_in_child)
