"""The end of a manager: by ``close``, by the garbage collector, or at the end of the process."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from . import _core, coordinators
from . import _lifecycle as lifecycle
from ._preemption import Preemption

if TYPE_CHECKING:
    from ._exporter import Exporter
    from ._trace.tracer import Tracer


def end_earlier(root: str) -> None:
    """Closes the writer of a root that a cell of this session has made before, and not closed: the
    cell is run again. Does nothing in a program, where two writers of a root are a mistake."""
    if not lifecycle.is_session():
        return
    for ending in lifecycle.endings():
        if isinstance(ending, Ending) and ending.root == root and not ending.is_over():
            lifecycle.log(20, "stepwell", f"{ending.what} is closed, because this session opens it again")
            ending.close(None)


class Ending:
    """The end of a manager, which outlives it: by ``close``, by the garbage collector, or by the
    exit hook."""

    def __init__(
        self,
        core: _core.Manager,
        root: str,
        owner: lifecycle.Owner,
        stall: float,
        service: coordinators.Service | None,
    ) -> None:
        self._service = service
        self.root = root
        self.what = f"the manager of {root}"
        self.preemption: Preemption | None = None
        self.exporter: Exporter | None = None
        self.tracer: Tracer | None = None
        self._core = core
        self._owner = owner
        self._stall = stall

    def is_over(self) -> bool:
        """True if there is nothing left to wait for."""
        return bool(self._core.is_closed())

    def progress(self) -> object:
        """Changes with the progress of saves, exports and traces."""
        beside = [one.progress for one in (self.exporter, self.tracer) if one is not None]
        return self._core.progress(), *beside

    def wait_for_exports(self, wait: Callable[[float | None], bool], limit: float | None) -> None:
        """Waits for exports: ``limit`` seconds, or as long as they get on."""
        self._wait(wait, limit, f"the exports of {self.root}")

    def _wait(self, wait: Callable[[float | None], bool], limit: float | None, what: str) -> None:
        if limit is None:
            lifecycle.wait_patiently(wait, self.progress, self._stall, what)
        elif not wait(limit):
            raise TimeoutError(
                f"waited {limit:.1f} s for {what}. They go on; call this again to wait for them"
            )

    def close(self, limit: float | None) -> None:
        """Closes, and is watched until that is over. Signals are the program's again only then: one
        that comes twice, as those of schedulers do, must not take the last save with it."""
        begun = time.monotonic()
        for one, what in ((self.tracer, "traces"), (self.exporter, "exports")):
            if one is not None:
                left = None if limit is None else max(0.0, limit - (time.monotonic() - begun))
                self._wait(one.close, left, f"the {what} of {self.root}")
        limit = None if limit is None else max(0.0, limit - (time.monotonic() - begun))
        try:
            self._core.close(limit)
        finally:
            if self.is_over():
                if self.preemption is not None:
                    self.preemption.restore()
                if self._service is not None:
                    self._service.close()
                lifecycle.forget(self)

    def abandoned(self) -> None:
        """The manager was dropped, and maybe not closed. Runs in the garbage collector, where
        nothing that raises is heard."""
        if not self._owner.is_here or self.is_over():
            return
        try:
            self.close(None)
        except Exception as failure:
            lifecycle.unseen(failure, f"{self.what} was dropped without close()")
            lifecycle.log(
                40,
                "stepwell",
                f"{self.what} was dropped without close(): {type(failure).__name__}: {failure}",
            )

    def wait_captured(self) -> None:
        """See ``lifecycle.Ending``."""
        # The engine knows all saves: an interrupt can end a call of save() when the engine has
        # begun it and nothing here has heard of it yet.
        if self._owner.is_here:
            self._core.wait_captured()

    def at_exit(self) -> BaseException | None:
        """Closes with a bound; see ``lifecycle.Ending``."""
        if not self._owner.is_here:
            return None
        if hasattr(sys, "last_value"):  # the program ends by an exception
            self._core.leave_at_once()

        def wait(slice: float) -> bool:
            try:
                self.close(slice)
            except TimeoutError:
                if self.is_over():
                    raise
                return False
            return True

        try:
            lifecycle.wait_patiently(wait, self.progress, self._stall, f"{self.what} to close at exit")
        except Exception as failure:
            return failure
        return None
