"""The answers of ``hold`` and ``rewind``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import final

from . import _core
from .errors import ClosedError


@final
class Hold:
    """A step that nobody removes, replaces or rewinds: from the call of
    :meth:`stepwell.CheckpointManager.hold` on, until :meth:`close`, the end of the ``with`` block,
    or the end of the manager."""

    def __init__(self, step: int, held: _core.Held, all_held: set[_core.Held]) -> None:
        #: Which step.
        self.step = step
        self._held = held
        self._all_held = all_held
        all_held.add(held)

    def close(self) -> None:
        """Lets the step go. Closing twice is fine."""
        self._all_held.discard(self._held)
        self._held.close()

    def __enter__(self) -> Hold:
        if self._held not in self._all_held:
            raise ClosedError(f"step {self.step} is no longer held; call hold({self.step}) again")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<Hold of step {self.step}{'' if self._held in self._all_held else ', closed'}>"


@final
class Rewound(list[int]):
    """The steps that a rewind moved, newest first."""

    def __init__(self, moved: Iterable[int], branch: str | None) -> None:
        super().__init__(moved)
        #: The name of the branch that they are kept in, ``.branch-<name>.…``; ``None`` where
        #: nothing was moved.
        self.branch = branch
