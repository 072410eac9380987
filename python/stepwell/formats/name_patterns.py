"""Patterns of names in files of other libraries, in a small part of the syntax of ``re``.

A search by ``re`` may take days for a hostile pattern. These are matched in time that is linear in
the name.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence

#: An element of a pattern: what it matches, and how often (``""``: once).
_Element = tuple[Callable[[str], bool], str]
_ELEMENT = re.compile(r"(\\[^A-Za-z0-9]|\\d|\\w|[^\\^$()\[\]{}|?*+])([*+?]?)", re.DOTALL)
#: Elements of all patterns together that are no plain names.
_MAX_ELEMENTS = 1 << 14


class NamePatterns:
    """Patterns that match from the start of a name, as ``re.match`` does."""

    def __init__(self, patterns: Iterable[str]) -> None:
        """Raises ``ValueError`` for a pattern that is not understood."""
        self._names: set[str] = set()
        self._others: list[tuple[list[_Element], bool]] = []
        count = 0
        for pattern in patterns:
            body = pattern.removeprefix("^")
            is_whole = body.endswith("$") and not body.endswith(r"\$")
            elements = list(_ELEMENT.finditer(body.removesuffix("$") if is_whole else body))
            if sum(len(one[0]) for one in elements) != len(body) - is_whole:
                raise ValueError(f"the pattern {pattern[:200]!r} is not understood")
            if is_whole and all(_is_literal(one) for one in elements):
                self._names.add("".join(one[1][-1] for one in elements))
                continue
            count += len(elements)
            if count > _MAX_ELEMENTS:
                raise ValueError("the patterns are too long")
            self._others.append(([(_matcher(one[1]), one[2]) for one in elements], is_whole))

    def match(self, name: str) -> bool:
        """True if a pattern matches a name."""
        return name in self._names or any(
            _matches(elements, name, is_whole) for elements, is_whole in self._others
        )


def _is_literal(one: re.Match[str]) -> bool:
    return not one[2] and one[1] not in (".", r"\d", r"\w")


def _matcher(text: str) -> Callable[[str], bool]:
    if text == ".":
        return lambda character: character != "\n"
    if text == r"\d":
        return str.isdecimal
    if text == r"\w":
        return lambda character: character == "_" or character.isalnum()
    return text[-1].__eq__


def _matches(elements: Sequence[_Element], name: str, is_whole: bool) -> bool:
    """Follows all ways through the elements at a time."""
    places = _with_skipped(elements, {0})
    for character in name:
        if not is_whole and len(elements) in places:
            return True
        following: set[int] = set()
        for at in places:
            if at < len(elements) and elements[at][0](character):
                following.add(at + 1)
                if elements[at][1] in ("*", "+"):
                    following.add(at)
        places = _with_skipped(elements, following)
        if not places:
            return False
    return len(elements) in places


def _with_skipped(elements: Sequence[_Element], places: set[int]) -> set[int]:
    """The places, and those behind elements that may be absent. One that was repeated may end."""
    found = set(places)
    pending = list(places)
    while pending:
        at = pending.pop()
        if at < len(elements) and elements[at][1] in ("*", "?") and at + 1 not in found:
            found.add(at + 1)
            pending.append(at + 1)
    return found
