"""Seconds that a caller gives, in one form for all calls that wait."""

from __future__ import annotations

from ._checks import shown
from .errors import MisuseError

#: Thirty years: longer requests mean no deadline. The engine's clocks end not much later.
NO_DEADLINE = 1e9


def seconds(timeout: float | None, what: str = "a timeout") -> float | None:
    """A timeout as the engine takes it: ``None`` for none, and for one that never comes
    (``math.inf``, centuries). Raises for what is no length of time."""
    if timeout is None:
        return None
    if isinstance(timeout, (bool, str, bytes)):
        raise MisuseError(f"{what} is a number of seconds, not {shown(timeout)}")
    try:
        number = float(timeout)
    except OverflowError:  # an integer beyond all floats
        number = NO_DEADLINE if timeout > 0 else -1.0
    except (TypeError, ValueError) as error:
        raise MisuseError(f"{what} is a number of seconds or None, not {shown(timeout)}") from error
    if not number >= 0:  # a NaN too
        raise MisuseError(f"{what} is a number of seconds, at least 0, not {shown(timeout)}")
    return None if number >= NO_DEADLINE else number


def finite_seconds(length: float, what: str) -> float:
    """A length of time that must be given; one that never ends is long."""
    if length is None:
        raise MisuseError(f"{what} is a number of seconds, at least 0, not None")
    number = seconds(length, what)
    return NO_DEADLINE if number is None else number


def positive_seconds(length: float, what: str) -> float:
    """A length of time that is not zero."""
    number = finite_seconds(length, what)
    if number == 0:
        raise MisuseError(f"{what} is a number of seconds, more than 0, not {shown(length)}")
    return number


def stall_seconds(timeout: float) -> float:
    """A stall timeout: above zero, and finite for the engine."""
    number = seconds(timeout, "stall_timeout")
    if number == 0:
        raise MisuseError(
            "stall_timeout=0 would give up every wait; pass the seconds without any progress that are too many"
        )
    return NO_DEADLINE if number is None else number
