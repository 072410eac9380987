"""``restore(fallback=True)``: restores the newest step that is intact."""

from __future__ import annotations

import errno
import re
from collections.abc import Callable, Iterable
from typing import Any

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

#: Errors of one step that another step may not have.
_DAMAGE = (CorruptCheckpoint, FormatError, NotAStep, RankFailed, StepGone)

_WARNING = 30


def _damaged_step(failure: Exception) -> int | None:
    """Returns the step that an error shows to be damaged. An I/O error shows it if the disk cannot
    read a file of the step. A lack of rights, memory or descriptors shows nothing."""
    if not isinstance(failure, StepwellError):
        return None
    unreadable = isinstance(failure, StorageError) and failure.errno == errno.EIO
    return failure.step if unreadable or isinstance(failure, _DAMAGE) else None


def newest_intact(
    root: str,
    attempt: Callable[[int | None], tuple[object, int]],
    steps: Callable[[], Iterable[int]],
    invalid: Callable[[], Iterable[dict[str, Any]]],
    agreed: Callable[[bool], bool],
    resuming: bool = False,
) -> tuple[Any, list[tuple[int, str]]]:
    """Returns the value of the newest step that can be restored, and the newer steps that were
    passed over, newest first, each with the reason.

    Args:
        root: for messages.
        attempt: restores a step (``None``: the newest) and returns its value and number. Its errors
            have the number as ``step``.
        steps: the committed steps.
        invalid: rows of everything in the root that has a step's name, see ``report``.
        agreed: takes whether this process wants to pass over a step, and returns whether all do.
        resuming: the caller sets the newer steps aside itself.
    """
    passed: list[tuple[int, str]] = []
    step: int | None = None
    while True:
        try:
            value, restored = attempt(step)
        except Exception as failure:
            damaged = _damaged_step(failure)
            if not agreed(damaged is not None) or damaged is None:
                raise
            passed.append((damaged, str(failure)))
            older = [one for one in steps() if one < damaged]
            if not older:
                _say_what_was_tried(failure, passed)
                raise
            step = max(older)
            continue
        known = {number for number, _ in passed}
        for row in invalid():
            number = _number(row)
            if row["damage"] is not None and number is not None and restored < number not in known:
                passed.append((number, row["damage"]))
        passed.sort(reverse=True)
        advice = "" if resuming else f". To save newer steps again, rewind to step {restored} first"
        for number, why in passed:
            lifecycle.log(
                _WARNING,
                "stepwell.restore",
                f"restored step {restored} of {root}, not step {number}: {why}{advice}",
            )
        return value, passed


def _number(row: dict[str, Any]) -> int | None:
    """Returns the step's number of a row: an invalid directory has it in its name."""
    found = re.search(r"[0-9]+$", row["name"])
    number: int | None = row["step"]
    return number if number is not None or found is None else int(found.group())


def _say_what_was_tried(failure: Exception, passed: list[tuple[int, str]]) -> None:
    """Adds to the error of the oldest step that all newer ones are damaged too."""
    newer = ", ".join(str(number) for number, _ in passed[:-1])
    if newer:
        failure.args = (f"{failure}. No step of this root can be restored; tried before: {newer}",)
