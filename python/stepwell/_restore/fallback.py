"""``restore(fallback=True)``: restores the newest step that is intact."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable
from operator import attrgetter
from typing import TypeVar

from .. import _lifecycle as lifecycle
from ..errors import (
    CorruptCheckpoint,
    FormatError,
    NotAStep,
    RankFailed,
    StepGone,
    StepwellError,
    StorageError,
)
from .report import PassedOver

_T = TypeVar("_T")
#: Errors of one step that another step may not have.
_DAMAGE = (CorruptCheckpoint, FormatError, NotAStep, RankFailed, StepGone)
#: The codes of a file that the disk cannot read, and of one that is missing.
_UNREADABLE = (errno.EIO, errno.ENOENT)

_WARNING = 30


def _damaged_step(failure: Exception) -> int | None:
    """Returns the step that an error shows to be damaged. An I/O error shows it if the disk cannot
    read a file of the step, or if the file is missing. A lack of rights, memory or descriptors
    shows nothing."""
    if not isinstance(failure, StepwellError):
        return None
    unreadable = isinstance(failure, StorageError) and failure.errno in _UNREADABLE
    return failure.step if unreadable or isinstance(failure, _DAMAGE) else None


def newest_intact(
    root: str,
    attempt: Callable[[int | None], tuple[_T, int]],
    steps: Callable[[], Iterable[int]],
    invalid: Callable[[], Iterable[tuple[int, str]]],
    agreed: Callable[[bool], bool],
    *,
    can_rewind: bool = True,
) -> tuple[_T, list[PassedOver]]:
    """Returns the value of the newest step that can be restored, and the newer steps that were
    passed over, newest first.

    Args:
        root: for messages.
        attempt: restores a step (``None``: the newest) and returns its value and number. Its errors
            have the number as ``step``.
        steps: the committed steps.
        invalid: number and reason of everything else in the root that has a step's name.
        agreed: takes whether this process wants to pass over a step, and returns whether all do.
        can_rewind: the newer steps stay until a rewind. False if the caller sets them aside itself,
            or if another library wrote them.
    """
    passed: list[PassedOver] = []
    step: int | None = None
    while True:
        try:
            value, restored = attempt(step)
        except Exception as failure:
            damaged = _damaged_step(failure)
            if not agreed(damaged is not None) or damaged is None:
                raise
            passed.append(PassedOver(damaged, str(failure)))
            older = [one for one in steps() if one < damaged]
            if not older:
                _say_what_was_tried(failure, passed)
                raise
            step = max(older)
            continue
        known = {one.step for one in passed}
        passed += [PassedOver(number, why) for number, why in invalid() if restored < number not in known]
        passed.sort(key=attrgetter("step"), reverse=True)
        advice = f". To save newer steps again, rewind to step {restored} first" if can_rewind else ""
        for one in passed:
            lifecycle.log(
                _WARNING,
                "stepwell.restore",
                f"restored step {restored} of {root}, not step {one.step}: {one.why}{advice}",
            )
        return value, passed


def _say_what_was_tried(failure: Exception, passed: list[PassedOver]) -> None:
    """Adds to the error of the oldest step that all newer ones are damaged too."""
    newer = ", ".join(str(one.step) for one in passed[:-1])
    if newer:
        failure.args = (f"{failure}. No step of this root can be restored; tried before: {newer}",)
