"""The cost of saves to a running training, measured between the calls of ``save``."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from statistics import median
from typing import final

from ._save_result import Save

#: The saves and steps that the medians are of. The first save makes the staging memory.
_RECENT_SAVES = 8
_RECENT_STEPS = 64


@final
class SaveCosts:
    """The costs of one manager's saves. The training thread calls it.

    A step's time is that from one call of ``save`` to the next, divided by the steps between them.
    A save costs its call, and for each step that began while it was written what the median of
    these exceeds the median of the other steps.
    """

    def __init__(self, saves: Sequence[Save], clock: Callable[[], float] = time.perf_counter) -> None:
        self._saves = saves
        self._clock = clock
        self._undisturbed: deque[float] = deque(maxlen=_RECENT_STEPS)
        self._costs: deque[float] = deque(maxlen=_RECENT_SAVES)
        #: When the last call returned, its step, and whether a save was written then.
        self._last: tuple[float, int, bool] | None = None
        #: When the last save began, how long its call took, and the steps beside it.
        self._begun: float | None = None
        self._blocked: float | None = None
        self._beside: list[tuple[float, int]] = []

    @contextmanager
    def call(self, step: int) -> Iterator[None]:
        """Around a call of ``save``."""
        if self._last is not None and step > self._last[1]:
            self._count(step - self._last[1], self._clock() - self._last[0], self._last[2])
        try:
            yield
        finally:
            self._last = (self._clock(), step, self.is_writing)

    def _count(self, steps: int, seconds: float, writing: bool) -> None:
        if writing:
            self._beside.append((seconds / steps, steps))
            return
        self._undisturbed.append(seconds / steps)
        self._close()

    def saved(self, begun: float) -> None:
        """Counts a save whose call began at that time and ends now."""
        self._close()
        self._begun, self._blocked = begun, self._clock() - begun
        self._beside.clear()

    def _close(self) -> None:
        if self._blocked is not None:
            self._costs.append(self._cost(self._blocked))
            self._blocked = None

    def _cost(self, blocked: float) -> float:
        if not self._undisturbed or not self._beside:
            return blocked
        slower = median(taken for taken, _ in self._beside) - median(self._undisturbed)
        return blocked + max(slower, 0.0) * sum(steps for _, steps in self._beside)

    @property
    def is_writing(self) -> bool:
        """True while a save is written."""
        return any(not save.done() for save in self._saves)

    @property
    def step_seconds(self) -> float | None:
        """The median time of a step without a save beside it. ``None`` before the first."""
        return median(self._undisturbed) if self._undisturbed else None

    @property
    def cost(self) -> float | None:
        """The median cost of recent saves; of a first save, what it has cost so far. ``None``
        before it."""
        if self._costs:
            return median(self._costs)
        return None if self._blocked is None else self._cost(self._blocked)

    @property
    def since_save(self) -> float | None:
        """The seconds since the last save began. ``None`` before the first."""
        return None if self._begun is None else self._clock() - self._begun
