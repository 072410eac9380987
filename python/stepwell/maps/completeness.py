"""The leaves that a complete model has: each layer and each expert has all of its leaves."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from math import prod
from typing import NoReturn, TypeAlias

from ..errors import MisuseError
from .patterns import Match, Pattern
from .slots import SLOTS, slot_name
from .values import Values

#: The captures of each leaf, in the order of the first pattern.
_Rows: TypeAlias = dict[tuple[str, ...], Pattern]


@dataclass(frozen=True, slots=True)
class Complete:
    """Patterns whose leaves form a grid: every value of a capture is there with every value of
    each other one."""

    #: They have the same captures.
    patterns: tuple[Pattern, ...]
    #: How many numbers a capture has; 0: any.
    counts: tuple[tuple[str, int], ...] = ()

    def check(self, values: Values) -> None:
        """Raises if one of the leaves is missing. Slots of an optimizer may be."""
        found: dict[str, _Rows] = {}
        states: set[str] = set()
        names = self.patterns[0].captures
        for pattern in self.patterns:
            for path, match in pattern.among(values):
                if "/" in path and _is_slot(path, match):
                    states.add(match.before)
                elif not match.after:
                    rows = found.setdefault(match.before, {})
                    rows[tuple(map(match.captures.__getitem__, names))] = pattern
        for before, rows in found.items() or [("", {})]:
            if before not in states:
                self._check(before, rows)

    def _check(self, before: str, rows: _Rows) -> None:
        """Raises for leaves with the same text before them that are no grid."""
        pattern = self.patterns[0]
        columns = [list(dict.fromkeys(column)) for column in zip(*rows, strict=True)]
        for name, count in self.counts:
            if not count:
                continue
            at = pattern.captures.index(name)
            numbers = set(columns[at]) if columns else set()
            low, high = pattern.bounds(name)
            missing = next((one for one in range(low, min(count, high)) if str(one) not in numbers), None)
            if missing is not None:
                like = next(iter(rows), tuple(f"{{{one}}}" for one in pattern.captures))
                lost = pattern.text_of([*like[:at], str(missing), *like[at + 1 :]])
                _refuse(f"{before}{lost}", f"{{{name}}} has the numbers below {count}")
            more = [one for one in numbers if not one.isdecimal() or int(one) >= count]
            if more and not low:
                row = next(row for row in rows if row[at] == more[0])
                raise MisuseError(
                    f"the leaf `{before}{rows[row].text_of(row)}` is one too many: {{{name}}} has the numbers below "
                    f"{count}. Pass the configuration of this model"
                )
        if rows and prod(map(len, columns)) != len(rows):
            row = next(row for row in itertools.product(*columns) if row not in rows)
            _refuse(f"{before}{pattern.text_of(row)}", f"others of `{pattern.text}` have one like it")


def _is_slot(path: str, match: Match) -> bool:
    """True for a slot of an optimizer. A capture of any text may hold its name."""
    last = path.rpartition("/")[2]
    return slot_name(match) is not None or (len(last) > 1 and last in SLOTS)


def _refuse(path: str, why: str) -> NoReturn:
    raise MisuseError(
        f"the leaf `{path}` is missing: {why}. Complete the checkpoint, or pass the configuration of this model"
    )
