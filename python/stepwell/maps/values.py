"""The leaves of a map by path, before and after an operation."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Mapping, Set
from dataclasses import dataclass
from typing import NoReturn, TypeAlias

from .._paths import named
from ..errors import MisuseError
from .arrangement import Arrangement
from .patterns import Match


@dataclass(frozen=True, slots=True)
class Stored:
    """A stored object."""

    leaf: int


@dataclass(frozen=True, slots=True)
class Tied:
    """The value of another leaf, by its path."""

    to: str


Value: TypeAlias = Arrangement | Stored | Tied
Values: TypeAlias = dict[str, Value]
#: New leaves by path, each with the path of the leaf that it comes from.
Made: TypeAlias = dict[str, tuple[Value, str]]


def changed(
    values: Values, found: Iterable[tuple[str, Match]], change: Callable[[str, Arrangement], Arrangement]
) -> Values:
    """The leaves with changed values at the found paths."""
    paths = {path for path, _ in found}
    after: Values = {}
    for path, value in _without_ties_to(values, paths).items():
        own = untied(values, path) if path in paths else value
        after[path] = change(path, own) if path in paths and isinstance(own, Arrangement) else value
    return after


def untied(values: Values, path: str) -> Arrangement | Stored:
    """The value of a leaf, or of the one that it is tied to."""
    value = values[path]
    while isinstance(value, Tied):
        value = values[value.to]
    return value


def _without_ties_to(values: Values, paths: Container[str]) -> Values:
    """The leaves without ties to these paths. A leaf that was tied to one has its value."""
    return {
        path: untied(values, path) if isinstance(value, Tied) and value.to in paths else value
        for path, value in values.items()
    }


def consumed(values: Values, made: Made, gone: Set[str]) -> Values:
    """As :func:`_replaced`, for operations that make other values. Leaves that were tied to those
    that are gone keep the value."""
    if not made and not gone:
        return values
    return _replaced(_without_ties_to(values, gone), made, gone)


def _replaced(values: Values, made: Made, gone: Container[str]) -> Values:
    """The leaves without those that are gone, and with those that are made, each in the place of
    the leaf that it came from."""
    by_source: dict[str, list[str]] = {}
    for path, (_, source) in made.items():
        if path in values and path not in gone:
            refuse(path, f"the map gives this path to `{source}`, and another leaf has it")
        by_source.setdefault(source, []).append(path)
    after: Values = {}
    for path, value in values.items():
        for new in by_source.get(path, ()):
            after[new] = made[new][0]
        if path not in gone:
            after[path] = value
    return after


def renamed(values: Values, moved: Mapping[str, str]) -> Values:
    """The leaves under other paths. Ties follow them."""
    if not moved:
        return values
    made: Made = {}
    for path, new in moved.items():
        add(made, new, values[path], path)
    return {
        path: Tied(moved.get(value.to, value.to)) if isinstance(value, Tied) else value
        for path, value in _replaced(values, made, moved).items()
    }


def add(made: Made, path: str, value: Value, source: str) -> None:
    """Adds a new leaf. Raises if its path is taken."""
    if path in made:
        refuse(path, f"the map gives this path to `{made[path][1]}` and to `{source}`")
    made[path] = value, source


def refuse(path: str, what: str) -> NoReturn:
    """Raises for a leaf."""
    error = MisuseError(f"{named(path)}: {what}")
    error.leaf = path
    raise error
