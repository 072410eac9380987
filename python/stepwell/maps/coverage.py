"""The parts of a checkpoint and of a map that do not fit."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import final

from ..errors import MisuseError
from .rules import NoMatch, Rule
from .values import Values


@final
@dataclass(frozen=True, slots=True)
class Coverage:
    """The result of :meth:`Map.check`: leaves that a map does not cover, and leaves that it wants
    and that are not there. It is true if there are neither."""

    #: The number of stored leaves that the map takes.
    covered: int
    #: Stored leaves of the model that no rule takes.
    uncovered: tuple[str, ...]
    #: Other stored leaves, which keep their names.
    others: tuple[str, ...]
    #: Patterns that no leaf matches, of rules that are not optional.
    missing: tuple[str, ...]
    #: The messages of rules that cannot be applied to what they match.
    problems: tuple[str, ...]

    def __bool__(self) -> bool:
        return not (self.uncovered or self.missing or self.problems)


class Observer:
    """Collects what the rules of a map match, and their errors."""

    def __init__(self) -> None:
        self._taken: set[str] = set()
        self._missing: list[str] = []
        self._problems: list[str] = []
        self._covered = 0
        self._uncovered: Sequence[str] = ()
        self._others: Sequence[str] = ()

    @contextlib.contextmanager
    def watching(self, rule: Rule, values: Values) -> Iterator[None]:
        """Notes the leaves that a rule takes. An error leaves them as they are."""
        for pattern in rule.taken():
            self._taken.update(path for path, _ in pattern.among(values))
        with self.noting():
            yield

    @contextlib.contextmanager
    def noting(self) -> Iterator[None]:
        """Notes an error, and goes on."""
        try:
            yield
        except NoMatch as error:
            self._missing.append(error.pattern)
        except MisuseError as error:
            self._problems.append(str(error))

    def end(self, stored: Values, after: Values, left: Sequence[str] | None) -> None:
        """Notes the stored leaves that no rule took, and that all rules have left. ``left`` are
        those of them that the map says it takes; ``None``: it does not say."""
        alone = [path for path in stored if path not in self._taken]
        self._uncovered = alone if left is None else [path for path in left if path not in self._taken]
        uncovered = set(self._uncovered)
        self._others = [path for path in alone if path in after and path not in uncovered]
        self._covered = len(stored) - len(alone)

    def coverage(self) -> Coverage:
        """The result."""
        return Coverage(
            self._covered,
            tuple(self._uncovered),
            tuple(self._others),
            tuple(self._missing),
            tuple(self._problems),
        )
