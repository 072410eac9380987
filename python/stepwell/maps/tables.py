"""A map as it is written: its rules, its parameters, and the leaves that it covers.

::

    about = "Weights of mine, and of theirs."
    model_types = ["mine"]
    from = ["model.{rest...}"]
    to = ["decoder.{rest...}"]

    [parameters]
    heads = { config = ["num_attention_heads"] }

    [[rule]]
    rename = "model.layers.{i}.norm"
    to = "decoder.{i}.norm"

    [[rule]]
    include = "megatron"

An included *part* of ``parts/*.toml`` has rules, and the parameters that they need.
"""

from __future__ import annotations

import contextlib
import copy
import os
import tomllib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import TypeAlias

from .._checks import shown
from .._paths import printable
from ..errors import MisuseError
from ..formats.files import read_whole
from . import parameters, parsing
from .completeness import Complete
from .parameters import Config, Parameter
from .patterns import Pattern
from .rules import Rule

#: The longest file of a map.
_MAX_FILE_BYTES = 16 << 20
_DIRECTIONS = ("forward", "inverse")
_PARTS = os.path.join(os.path.dirname(__file__), "parts")

#: Rules with their names in messages.
Called: TypeAlias = Sequence[tuple[str, Rule]]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A rule as it is written."""

    number: str
    table: Mapping[str, object]
    #: An expression, perhaps after ``not``. The rule is left out if it is zero.
    when: str | None
    #: The only direction that it applies in. It is written as it applies there.
    direction: str | None

    def called(self, kind: str = "rule") -> str:
        """Its name in messages."""
        if self.when is None or not (plain := self.when.removeprefix(parsing.NOT)).isidentifier():
            return f"{kind} {self.number}"
        return f"{kind} {self.number}, which {plain}={0 if plain == self.when else 1} leaves out,"

    def holds(self, kind: str, numbers: parsing.Numbers) -> bool:
        """True if its condition holds, or there is none."""
        return self.when is None or parsing.condition(f"{kind} {self.number}", self.when, numbers)


@dataclass(frozen=True, slots=True)
class Tables:
    """A map as it is written."""

    #: The map, and its inverse, in messages.
    name: str
    inverse_name: str
    entries: tuple[_Entry, ...]
    parameters: Mapping[str, Parameter]
    #: The values of ``model_type`` in ``config.json`` that it is for; empty: any.
    model_types: tuple[str, ...]
    #: The leaves that it takes, and those that it makes. After it, none of the first are left.
    source: tuple[Pattern, ...]
    target: tuple[Pattern, ...]
    #: The leaves of a complete model, on the side of the first.
    complete: tuple[_Entry, ...]
    about: str
    #: For users of its result; empty: none.
    warning: str

    @classmethod
    def of_rules(cls, rules: object) -> Tables:
        """A map of rules without parameters."""
        if isinstance(rules, (str, Mapping)) or not isinstance(rules, Iterable):
            raise MisuseError(f"a map is a list of rules, not {shown(rules)}")
        return cls._of("the map", "the inverse of the map", list(rules), {})

    @classmethod
    def of_file(cls, path: str, name: str, inverse_name: str) -> Tables:
        """A map of a TOML file."""
        try:
            content = tomllib.loads(read_text(path, name))
        except (ValueError, RecursionError) as error:
            raise MisuseError(f"{name} is no valid TOML: {error}") from error
        rules = content.pop("rule", [])
        if not isinstance(rules, list) or set(content) - _HEAD:
            unknown = ", ".join(sorted(set(content) - _HEAD)) or "rule"
            raise MisuseError(f"{name}: [[rule]] tables were expected, not {unknown}")
        with naming(path):
            return cls._of(name, inverse_name, rules, content)

    @classmethod
    def _of(cls, name: str, inverse_name: str, rules: list[object], head: Mapping[str, object]) -> Tables:
        own = parameters.declared(head.get("parameters", {}))
        entries, others = _with_parts(rules)
        known = own | {name: one for name, one in others.items() if name not in own}
        model_types = _texts(head, "model_types")
        source, target = (_patterns(head, key) for key in ("from", "to"))
        about, warning = _text(head, "about"), _text(head, "warning")
        complete = head.get("complete", [])
        if not isinstance(complete, list):
            raise MisuseError(f"`complete` of the map is a list of tables, not {shown(complete)}")
        wholes = tuple(_entry("`complete`", str(number), one) for number, one in enumerate(complete, start=1))
        found = cls(name, inverse_name, entries, known, model_types, source, target, wholes, about, warning)
        found.check()
        # The caller may change its tables.
        return replace(found, entries=copy.deepcopy(entries))

    def check(self, *, is_inverse: bool = False) -> None:
        """Raises for rules that are invalid with any numbers, or have no way back."""
        unknown: parsing.Numbers = dict.fromkeys(self.parameters)
        self.rules(unknown, is_inverse=is_inverse)
        self.completeness(unknown)

    def numbers(
        self,
        given: Mapping[str, int],
        config: Config | None,
        stored: Callable[[str], int | None],
        name: str,
    ) -> dict[str, int]:
        """The values of its parameters; see :func:`parameters.resolved`."""
        return parameters.resolved(self.parameters, given, config, stored, name)

    def check_model(self, config: Config, name: str, others: Callable[[object], Sequence[str]]) -> None:
        """Raises for a configuration of another model. ``others`` gives the names of recipes for a
        type of model."""
        kind = config.entries.get("model_type")
        if not self.model_types or kind is None or kind in self.model_types:
            return
        recipes = " or ".join(others(kind)) or "the recipe of that type"
        raise MisuseError(
            f"{name} is for models of type {' or '.join(self.model_types)}, and {printable(config.path)} is of type "
            f"{printable(str(kind))[:60]}. Use {recipes}, or a copy of this one with it in `model_types`"
        )

    def rules(self, numbers: parsing.Numbers, *, is_inverse: bool) -> Called:
        """The rules of a direction, in the order in which they apply."""
        found: list[tuple[str, Rule]] = []
        for entry in reversed(self.entries) if is_inverse else self.entries:
            rule = parsing.rule(entry.number, entry.table, numbers)
            if not entry.holds("rule", numbers):
                continue
            if entry.direction is None:
                found.append((entry.called(), rule.inverse() if is_inverse else rule))
            elif entry.direction == _DIRECTIONS[is_inverse]:
                found.append((entry.called(), rule))
        return found

    def completeness(self, numbers: parsing.Numbers) -> Sequence[tuple[str, Complete]]:
        """The leaves of a complete model, with names in messages."""
        return [
            (entry.called("`complete`"), parsing.complete(entry.number, entry.table, numbers))
            for entry in self.complete
            if entry.holds("`complete`", numbers)
        ]


@contextlib.contextmanager
def naming(where: str) -> Iterator[None]:
    """Adds to an error where it is."""
    try:
        yield
    except MisuseError as error:
        error.args = (f"{error} ({where})",)
        raise


def read_text(path: str, name: str) -> str:
    """The text of a map's file."""
    text = read_whole(
        path,
        _MAX_FILE_BYTES,
        lambda length: MisuseError(f"{name} has {length} bytes; a map has at most {_MAX_FILE_BYTES}"),
    )
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise MisuseError(f"{name} is no valid TOML: {error}") from error


#: The keys of a file beside its rules.
_HEAD = {"about", "warning", "model_types", "from", "to", "parameters", "complete"}


def _text(head: Mapping[str, object], key: str) -> str:
    found = head.get(key, "")
    if not isinstance(found, str):
        raise MisuseError(f"`{key}` of the map is text, not {shown(found)}")
    return found


def _texts(head: Mapping[str, object], key: str) -> tuple[str, ...]:
    found = head.get(key, [])
    if not isinstance(found, list) or not all(isinstance(one, str) for one in found):
        raise MisuseError(f"`{key}` of the map is a list of texts, not {shown(found)}")
    return tuple(found)


def _patterns(head: Mapping[str, object], key: str) -> tuple[Pattern, ...]:
    try:
        return tuple(map(parsing.pattern_of, _texts(head, key)))
    except ValueError as error:
        raise MisuseError(f"`{key}` of the map: {error}") from error


def _with_parts(rules: Iterable[object]) -> tuple[tuple[_Entry, ...], dict[str, Parameter]]:
    """Rules with those of the included parts, and the parameters of the parts."""
    entries: list[_Entry] = []
    known: dict[str, Parameter] = {}
    for number, given in enumerate(rules, start=1):
        if not isinstance(given, Mapping) or "include" not in given:
            entries.append(_entry("rule", str(number), given))
            continue
        name = given["include"]
        if len(given) > 1 or not isinstance(name, str) or name not in parts():
            raise MisuseError(
                f"rule {number} of the map: `include` is the name of a part, alone in its rule. The parts are {', '.join(parts())}"
            )
        part = tomllib.loads(read_text(part_path(name), f"the part {name}"))
        known |= parameters.declared(part["parameters"])
        entries += [
            _entry("rule", f"{at} of the part {name}", one) for at, one in enumerate(part["rule"], start=1)
        ]
    return tuple(entries), known


@cache
def parts() -> tuple[str, ...]:
    """The names of the parts that maps may include."""
    return tuple(sorted(os.path.splitext(file)[0] for file in os.listdir(_PARTS)))


def part_path(name: str) -> str:
    """The path of a part."""
    return os.path.join(_PARTS, f"{name}.toml")


def _entry(kind: str, number: str, given: object) -> _Entry:
    called = f"{kind} {number}"
    if not isinstance(given, Mapping):
        raise MisuseError(f"{called} of the map is a table, not {shown(given)}")
    table = dict(given)
    when, direction = table.pop("when", None), table.pop("direction", None)
    if when is not None and not isinstance(when, str):
        raise MisuseError(f"{called} of the map: `when` is an expression, not {shown(when)}")
    if direction not in (None, *_DIRECTIONS):
        raise MisuseError(
            f"{called} of the map: `direction` is {' or '.join(_DIRECTIONS)}, not {shown(direction)}"
        )
    return _Entry(number, table, when, direction)
