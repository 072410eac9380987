"""Options of the form ``LEFT=RIGHT``."""

from __future__ import annotations

from collections.abc import Sequence

import click


def pair(text: str, wanted: str) -> tuple[str, str]:
    """The two sides of a text. ``wanted`` is the start of the message for another one."""
    left, equals, right = text.rpartition("=")
    if not (equals and left and right):
        raise click.UsageError(f"{wanted}, not {text!r}")
    return left, right


def casts(given: Sequence[str], value: str) -> str | dict[str, str] | None:
    """The argument ``cast=`` of these options ``--cast``. ``value`` is the name of a value."""
    whole = [one for one in given if "=" not in one]
    if whole and len(given) > 1:
        raise click.UsageError(
            f"pass --cast {value} once for all leaves, or --cast GLOB={value} for each glob"
        )
    if whole:
        return whole[0]
    return dict(pair(one, f"--cast takes GLOB={value}") for one in given) or None
