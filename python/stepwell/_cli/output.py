"""Output of commands: lines for people, or one JSON document on standard output; notes and
questions on standard error; exit codes.

Text from a file (a key, a metric's name, a reason) goes through :func:`safe` before it reaches a
terminal, because a key may hold escape sequences.
"""

from __future__ import annotations

import dataclasses
import datetime
import json
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, TYPE_CHECKING, TypeAlias, final

import click

from .locations import StoreUrl

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

#: Success.
FINE = 0
#: A finding: damage, a difference, a missing step.
PROBLEMS = 1
#: Wrong usage.
MISUSE = 2
#: An interrupt, as shells count it.
INTERRUPTED = 130

#: Version of the JSON documents. It changes when a key is removed or changes its meaning.
DOCUMENT_VERSION = 1

#: A value of JSON.
Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")


def is_terminal(stream: IO[str]) -> bool:
    """True if a stream supports colours and bars."""
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
        """Prints a line for people, unless JSON was asked for."""
        self.lines([text])

    def lines(self, texts: Iterable[str]) -> None:
        """Prints lines for people in one go, unless JSON was asked for."""
        if not self.as_json:
            click.echo("\n".join(texts), color=self._colours)

    def note(self, text: str) -> None:
        """Prints a line on standard error."""
        click.echo(text, err=True)

    def document(self, content: dict[str, object]) -> None:
        """Prints the JSON document, once, if it was asked for."""
        if self.as_json and not self._said:
            self._said = True
            whole = plain({"stepwell": DOCUMENT_VERSION, "command": self.command, **content})
            click.echo(json.dumps(whole, allow_nan=False, indent=1 if is_terminal(sys.stdout) else None))

    def dim(self, text: str) -> str:
        """Styles less important text."""
        return click.style(text, dim=True) if self._colours else text

    def good(self, text: str) -> str:
        """Styles good news."""
        return click.style(text, fg="green") if self._colours else text

    def bad(self, text: str) -> str:
        """Styles bad news."""
        return click.style(text, fg="red", bold=True) if self._colours else text


#: Attributes that have another name in a document.
_KEYS = {"nbytes": "bytes"}


def plain(value: object) -> Json:
    """Returns a value as JSON. NaN and infinities are strings, times are UTC, dataclasses become
    objects, and everything that JSON lacks is its ``repr``."""
    if value is None or isinstance(value, bool) or type(value) is int or type(value) is str:
        return value
    if isinstance(value, StoreUrl):
        return str(value)
    if type(value) is float:
        name = "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
        return value if math.isfinite(value) else name
    if isinstance(value, datetime.datetime) and value.tzinfo is datetime.UTC:
        return value.isoformat(timespec="microseconds").replace("+00:00", "Z")
    if isinstance(value, (datetime.datetime, datetime.date)):
        return value.isoformat()
    if isinstance(value, (list, tuple)):
        return [plain(one) for one in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return plain(fields_of(value))
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: plain(one) for key, one in value.items()}
    return repr(value)


def fields_of(value: DataclassInstance) -> dict[str, object]:
    """Returns the attributes of a dataclass by their names in a document."""
    names = [field.name for field in dataclasses.fields(value)]
    return {_KEYS.get(name, name): getattr(value, name) for name in names}


def safe(text: object) -> str:
    """Returns text from a file with control and formatting characters escaped."""
    shown = str(text)
    if shown.isprintable():
        return shown
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in shown
    )


def cut(text: object, most: int) -> str:
    """Returns text that is safe, cut to a number of characters."""
    shown = safe(text)
    return shown if len(shown) <= most else shown[: most - 1] + "…"


def size(nbytes: int) -> str:
    """Returns a number of bytes for people."""
    unit = min(max(nbytes.bit_length() - 1, 0) // 10, len(_UNITS) - 1)
    return f"{nbytes} B" if unit == 0 else f"{nbytes / 1024**unit:.1f} {_UNITS[unit]}"


def count(number: int, one: str, several: str | None = None) -> str:
    """Returns a number of things: ``1 file``, ``2 files``."""
    return f"{number} {one if number == 1 else several or one + 's'}"


def numbers(steps: Iterable[int]) -> str:
    """Returns step numbers for people."""
    return ", ".join(map(str, steps))


def local(time: datetime.datetime) -> str:
    """Returns a time for people, in their time zone."""
    return time.astimezone().strftime("%Y-%m-%d %H:%M:%S")


def _width(text: str) -> int:
    if text.isascii():
        return len(text)
    from rich.cells import cell_len

    return cell_len(text)


def columns(rows: Sequence[Sequence[str]], align: str) -> list[str]:
    """Returns rows as aligned lines. ``align`` has ``l`` or ``r`` for each column."""
    widths = [max((_width(row[i]) for row in rows), default=0) for i in range(len(align))]
    lines = []
    for row in rows:
        cells = []
        for cell, wide, side in zip(row, widths, align, strict=True):
            room = " " * (wide - _width(cell))
            cells.append(room + cell if side == "r" else cell + room)
        lines.append("  ".join(cells).rstrip())
    return lines
