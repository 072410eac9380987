"""Patterns over leaf paths that capture parts of them: ``layers.{i}.weight``. A bound makes a
capture take numbers only: ``{i<3}``, ``{i>=3}``. A shift stands for another number: ``{i+3}`` for
``i + 3``."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .._checks import shown
from ..errors import MisuseError

_CAPTURE = re.compile(r"\{([^\W\d]\w*)(\.\.\.|(<|>=|\+)([0-9]{1,18}))?\}")
#: The text of a capture: one name between dots, or any text.
_NAME, _REST = r"[^./\[\]]+", r".+"
#: The most digits of a number in a path.
_MAX_DIGITS = 18
#: The texts of a pattern that are looked for before it is compared.
_COMPARED = 3
#: More than any number of a path.
_NO_BOUND = 10**_MAX_DIGITS


class Match(NamedTuple):
    """A path that a pattern matches."""

    #: Text by capture.
    captures: Mapping[str, str]
    #: The parts of the path around the match: slots of an optimizer go by the name of their
    #: parameter, which is one part of their path.
    before: str
    after: str

    def around(self, text: str) -> str:
        """A path with the same surroundings."""
        return f"{self.before}{text}{self.after}"


@dataclass(frozen=True, slots=True)
class Pattern:
    """``layers.{i}.weight`` matches one name for ``{i}``; ``{rest...}`` matches any text. A pattern
    matches whole parts of a path: all of it, or what is between two slashes."""

    text: str
    captures: tuple[str, ...] = field(init=False)
    #: Captures that are numbers, with their operator and its number.
    _numbers: tuple[tuple[str, str, int], ...] = field(init=False, repr=False)
    _expression: re.Pattern[str] = field(init=False, repr=False)
    #: Texts that are in each path that it matches.
    _literals: tuple[str, ...] = field(init=False, repr=False)
    #: Its text with ``%s`` for each capture, and those with their shifts.
    _template: str = field(init=False, repr=False)
    _fields: tuple[tuple[str, int], ...] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.text, str) or not self.text:
            raise MisuseError(f"a pattern is a leaf path with captures such as {{i}}, not {shown(self.text)}")
        names: list[str] = []
        numbers: list[tuple[str, str, int]] = []
        literals: list[str] = []
        fields: list[tuple[str, int]] = []
        expression, at = "", 0
        for found in _CAPTURE.finditer(self.text):
            literals.append(self.text[at : found.start()])
            expression += re.escape(literals[-1])
            name, kind, operator, bound = found.groups()
            if not name.isascii():
                raise MisuseError(f"the name of the capture {found[0]} is not ASCII")
            expression += (
                f"(?P={name})" if name in names else f"(?P<{name}>{_REST if kind == '...' else _NAME})"
            )
            if operator:
                numbers.append((name, operator, int(bound)))
            if name in names and any(one == name and kind == "+" for one, kind, _ in numbers):
                raise MisuseError(f"{{{name}}} has a shift and is in `{self.text}` twice; use it once")
            if name not in names:
                names.append(name)
            fields.append((name, int(bound) if operator == "+" else 0))
            at = found.end()
        literals.append(self.text[at:])
        expression += re.escape(literals[-1])
        # Groups around the captures have no names: a capture may have any.
        whole = rf"((?:.*?/)??){expression}((?:[/\[].*)?)"
        object.__setattr__(self, "captures", tuple(names))
        object.__setattr__(self, "_numbers", tuple(numbers))
        object.__setattr__(self, "_expression", re.compile(whole, re.DOTALL))
        object.__setattr__(self, "_literals", tuple(sorted(set(literals), key=len, reverse=True)[:_COMPARED]))
        object.__setattr__(self, "_template", "%s".join(one.replace("%", "%%") for one in literals))
        object.__setattr__(self, "_fields", tuple(fields))

    def among(self, paths: Iterable[str]) -> Iterator[tuple[str, Match]]:
        """The paths that it matches, in their order."""
        for literal in self._literals:
            paths = [one for one in paths if literal in one]
        match = self.match
        for path in paths:
            if (found := match(path)) is not None:
                yield path, found

    def match(self, path: str) -> Match | None:
        """The captures of a path; ``None`` where it does not match."""
        found = self._expression.fullmatch(path)
        if found is None:
            return None
        captures = found.groupdict()
        for name, operator, bound in self._numbers:
            number = _number(found[name])
            if number is None or (number < bound) != (operator == "<"):
                return None
            if operator == "+":
                captures[name] = str(number - bound)
        return Match(captures, found[1], found[len(self.captures) + 2])

    def bounds(self, name: str) -> tuple[int, int]:
        """The first number that a capture takes, and the one behind its last."""
        for one, operator, bound in self._numbers:
            if one == name and operator != "+":
                return (0, bound) if operator == "<" else (bound, _NO_BOUND)
        return 0, _NO_BOUND

    def text_of(self, captures: Sequence[str]) -> str:
        """The path for these captures, in their order."""
        return self.fill(dict(zip(self.captures, captures, strict=True)))

    def fill(self, captures: Mapping[str, str]) -> str:
        """The path for these captures. Raises if one with a shift is no number."""
        return self._template % tuple([_shifted(captures[name], shift) for name, shift in self._fields])


def _shifted(text: str, shift: int) -> str:
    if not shift:
        return text
    number = _number(text)
    if number is None:
        raise MisuseError(
            f"a shift by {shift} takes numbers of at most {_MAX_DIGITS} digits, not {shown(text)}"
        )
    return str(number + shift)


def _number(text: str) -> int | None:
    return int(text) if text.isdecimal() and len(text) <= _MAX_DIGITS else None
