"""Traces of trainers that have a checkpoint in each directory: the steps after a save, and those of
a training that resumes."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypedDict
from weakref import WeakSet

from .._manager import CheckpointManager
from .._trace.tracer import OnDifference
from ..coordinators import Coordinator
from ..errors import LockedError, StorageError
from ..events import OnEvent
from ._log import WARNING, log

#: The longest wait for a manager to close.
_CLOSE_SECONDS = 600.0


class ProveKeywords(TypedDict, total=False):
    """Keywords of a manager that traces."""

    prove_resume: int
    on_resume_difference: OnDifference
    on_event: OnEvent | None


class Prover:
    """Traces the steps of a trainer after a checkpoint, and compares them after a resume. The
    manager of the checkpoint stays open until enough steps are traced, or until the next save.

    Args:
        steps: how many steps to trace.
        on_difference: ``"warn"`` or ``"raise"``.
        on_event: gets an event for each compared step.
    """

    def __init__(self, steps: int, on_difference: OnDifference, on_event: OnEvent | None) -> None:
        self.options: ProveKeywords = {
            "prove_resume": steps,
            "on_resume_difference": on_difference,
            "on_event": on_event,
        }
        self._steps, self._left = steps, 0
        self._root, self._offset = "", 0
        self._manager: CheckpointManager | None = None
        #: Closes the manager before this one.
        self._closing: threading.Thread | None = None
        _provers.add(self)

    def follow(self, root: str, manager: CheckpointManager, offset: int) -> None:
        """The next steps belong to the checkpoint of this manager. A checkpoint that was saved
        again has a later number than the step of the training: ``offset`` is the difference."""
        self.close()
        self._root, self._left, self._offset = root, self._steps, offset
        self._manager = manager

    def resumed(self, root: str, coordinator: Coordinator | None, number: int) -> None:
        """The training goes on from the newest step of a root, which is step ``number`` of the
        training."""
        end_provers(root)
        try:
            manager = CheckpointManager(root, retention=1, coordinator=coordinator, **self.options)
        except (LockedError, StorageError) as error:
            text = f"{root}: the resumed steps are compared, and not traced: {error}"
            log(WARNING, text)
            manager = CheckpointManager(root, read_only=True, coordinator=coordinator, **self.options)
        step = manager.latest_step()
        if step is not None:
            manager._was_restored(step)
        self.follow(root, manager, 0 if step is None else step - number)

    def step(self, number: int, state: Callable[[], object]) -> None:
        """Traces the state after a step of the training."""
        if self._manager is None:
            return
        self._left -= 1
        try:
            self._manager.trace(number + self._offset, state())
        finally:
            if not self._left:
                self.close()

    def close(self) -> threading.Thread | None:
        """Closes the manager in the background, once its save has ended and its traces are
        written."""
        manager, self._manager = self._manager, None
        if manager is not None:
            self._closing = threading.Thread(target=manager.close, name="stepwell-prover", daemon=True)
            self._closing.start()
        return self._closing


#: All of this process.
_provers: WeakSet[Prover] = WeakSet()


def end_provers(root: str) -> None:
    """Closes the managers of a root that trace, also of a training that failed in this process."""
    for prover in list(_provers):
        if prover._root == root and (closing := prover.close()) is not None:
            closing.join(_CLOSE_SECONDS)
