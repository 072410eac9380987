"""Finds the line of the user that a warning points to."""

from __future__ import annotations

import sys
from types import FrameType

#: Packages between a user's call and a warning.
_PASSED_THROUGH = (__name__.partition(".")[0], "contextlib")


def levels_to_caller() -> int:
    """The ``stacklevel`` of a warning by the caller of this function."""
    frame, levels = sys._getframe(1), 1
    while frame.f_back is not None and _package(frame) in _PASSED_THROUGH:
        frame, levels = frame.f_back, levels + 1
    return levels


def _package(frame: FrameType) -> str:
    return str(frame.f_globals.get("__name__", "")).partition(".")[0]
