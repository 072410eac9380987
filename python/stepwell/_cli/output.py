"""Output of commands: lines for people, or one JSON document on standard output; notes on standard
error; exit codes.

Text from a file (a key, a metric's name, a reason) goes through :func:`safe` before it reaches a
terminal, because a key may hold escape sequences.
"""

from __future__ import annotations

import datetime
import json
import math
import os
import sys
import time
import unicodedata
from collections.abc import Iterable, Sequence
from typing import IO, Any, final

import click

from .._paths import printable

#: Nothing is wrong.
FINE = 0
#: Something was found: damage, a difference, nothing where something should be.
PROBLEMS = 1
#: The command cannot be meant like that.
MISUSE = 2
#: An interrupt, as shells count it.
INTERRUPTED = 130

#: Version of the JSON documents: it changes when a key goes or changes its meaning, not when one
#: comes.
DOCUMENT_VERSION = 1

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def is_terminal(stream: IO[Any]) -> bool:
    """True if a stream is one that colours and bars are for."""
    return stream.isatty() and os.environ.get("TERM") != "dumb"


@final
class Output:
    """The output of one command."""

    def __init__(self, command: str, as_json: bool) -> None:
        self.command = command
        self.as_json = as_json
        self._colours = is_terminal(sys.stdout) and not os.environ.get("NO_COLOR")
        self._said = False

    def line(self, text: str = "") -> None:
        """A line for people; nothing where JSON was asked for."""
        if not self.as_json:
            click.echo(text, color=self._colours)

    def lines(self, texts: Iterable[str]) -> None:
        """Lines for people, in one go."""
        if not self.as_json:
            click.echo("\n".join(texts), color=self._colours)

    def note(self, text: str) -> None:
        """A line beside the answer, on standard error."""
        click.echo(text, err=True)

    def document(self, content: dict[str, Any]) -> None:
        """The JSON document, once, where it was asked for."""
        if self.as_json and not self._said:
            self._said = True
            whole = {"stepwell": DOCUMENT_VERSION, "command": self.command, **content}
            click.echo(json.dumps(whole, allow_nan=False, indent=1 if is_terminal(sys.stdout) else None))

    def styled(self, text: str, **style: Any) -> str:
        """Text in a colour, where there are colours."""
        return click.style(text, **style) if self._colours else text

    def dim(self, text: str) -> str:
        """Styles less important text."""
        return self.styled(text, dim=True)

    def good(self, text: str) -> str:
        """Styles good news."""
        return self.styled(text, fg="green")

    def bad(self, text: str) -> str:
        """Styles bad news."""
        return self.styled(text, fg="red", bold=True)


def safe(text: object) -> str:
    """Text from a file, fit for a terminal."""
    return printable(str(text))


def size(nbytes: int) -> str:
    """Bytes, for people."""
    amount = float(nbytes)
    for unit in _UNITS:
        if amount < 1024 or unit == _UNITS[-1]:
            return f"{nbytes} B" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return ""


def count(number: int, one: str, several: str | None = None) -> str:
    """A number of things: ``1 file``, ``2 files``."""
    return f"{number} {one if number == 1 else several or one + 's'}"


def metric(value: float) -> str:
    """A metric, for people."""
    return f"{value:.6g}"


def number(value: float) -> float | str:
    """A float as JSON, which has no NaN and no infinities: those are strings, as in a manifest."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")


def moment(unix_ns: int) -> datetime.datetime:
    """A time of a manifest."""
    return datetime.datetime.fromtimestamp(unix_ns // 1_000_000_000, datetime.UTC).replace(
        microsecond=unix_ns // 1000 % 1_000_000
    )


def iso(unix_ns: int) -> str:
    """A time of a manifest, in JSON: UTC, to the microsecond."""
    return moment(unix_ns).isoformat(timespec="microseconds").replace("+00:00", "Z")


def local(unix_ns: int) -> str:
    """A time of a manifest, for people: theirs."""
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_ns // 1_000_000_000))


def width(text: str) -> int:
    """Cells that a text takes in a terminal; it has no escape sequences."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in text
    )


def columns(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Rows as aligned lines. ``align`` has ``l`` or ``r`` per column; the last column, to the left,
    is not padded."""
    aligned = []
    for i, side in enumerate(align):
        cells = [row[i] for row in rows]
        if side == "l" and i == len(align) - 1:
            aligned.append(cells)
            continue
        widths = [width(cell) for cell in cells]
        widest = max(widths, default=0)
        rooms = [" " * (widest - one) for one in widths]
        pairs = zip(rooms, cells, strict=True)
        aligned.append([room + cell if side == "r" else cell + room for room, cell in pairs])
    return ["  ".join(cells).rstrip() for cells in zip(*aligned, strict=True)]
