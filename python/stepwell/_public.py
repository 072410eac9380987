"""The names under which users know our classes and functions."""

from __future__ import annotations

from typing import TypeVar

_T = TypeVar("_T")


def public(named: _T) -> _T:
    """Shows a class or function as a name of ``stepwell`` itself: in messages, help and pickles."""
    named.__module__ = "stepwell"
    return named
