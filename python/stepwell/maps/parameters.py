"""The numbers of a model that a map needs, such as its attention heads.

::

    [parameters]
    heads = { config = ["num_attention_heads"], stored = "args/num_attention_heads" }
    padded_vocab = { default = "vocab" }

A caller passes a number, or it comes from the ``config.json`` of a Hugging Face model, or from a
leaf of the checkpoint. These have to be equal. Without any of them, it is the default.
Expressions are names and integers with ``*`` and ``/``, which has to leave no rest.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from .._checks import meant, shown, whole
from .._paths import printable
from ..errors import MisuseError
from ..formats.description import MAX_SIZE
from ..formats.files import read_whole

#: The file of a Hugging Face model that has its numbers.
CONFIG = "config.json"
#: The longest one that is read.
_MAX_CONFIG_BYTES = 4 << 20
#: The longest expression.
_MAX_EXPRESSION = 256

#: Keywords of :func:`stepwell.maps.recipe`.
_TAKEN = ("name", "inverse", "config")

_NAME = re.compile(r"[A-Za-z_]\w*", re.ASCII)
_EXPRESSION = re.compile(r"\s*\w+(?:\s*[*/]\s*\w+)*\s*", re.ASCII)
_TERM = re.compile(r"([*/]?)\s*(\w+)", re.ASCII)


@dataclass(frozen=True, slots=True)
class Parameter:
    """A number of a model, as a map declares it."""

    #: Expressions over the keys of ``config.json``. The first one whose keys are there counts.
    config: tuple[str, ...] = ()
    #: The path of a leaf with the number.
    stored: str | None = None
    #: An expression over the parameters before it.
    default: str | None = None


@dataclass(frozen=True, slots=True)
class Config:
    """The ``config.json`` of a model."""

    path: str
    entries: Mapping[str, object]


def declared(table: object) -> dict[str, Parameter]:
    """The parameters that a map declares. Raises for an invalid declaration."""
    if not isinstance(table, Mapping):
        raise MisuseError(f"[parameters] is a table, not {shown(table)}")
    found: dict[str, Parameter] = {}
    for name, given in table.items():
        if not _NAME.fullmatch(name) or name in _TAKEN:
            raise MisuseError(
                f"the map's parameter {name!r} needs another name: of ASCII letters, digits and underscores, and none of "
                f"{', '.join(_TAKEN)}"
            )
        if not isinstance(given, Mapping) or set(given) - {"config", "stored", "default"}:
            raise MisuseError(
                f"the map's parameter {name} is a table of `config`, `stored` and `default`, not {shown(given)}"
            )
        keys, stored, default = given.get("config", []), given.get("stored"), given.get("default")
        if stored is not None and not isinstance(stored, str):
            raise MisuseError(f"`stored` of the map's parameter {name} is a leaf path, not {shown(stored)}")
        if not isinstance(keys, list) or not all(map(_is_expression, keys)):
            raise MisuseError(
                f"`config` of the map's parameter {name} is a list of expressions, not {shown(keys)}"
            )
        if isinstance(default, int) and not isinstance(default, bool):
            default = str(default)
        if default is not None:
            if not isinstance(default, str) or not _is_expression(default):
                raise MisuseError(f"`default` of the map's parameter {name} cannot be {shown(default)}")
            if unknown := [one for one in names(default) if one not in found]:
                raise MisuseError(
                    f"`default` of the map's parameter {name} uses {unknown[0]}, which is not declared before it"
                )
        found[name] = Parameter(tuple(keys), stored, default)
    return found


def checked(given: Mapping[str, object], known: Iterable[str], where: str) -> dict[str, int]:
    """The numbers that a caller passes.

    Raises:
        MisuseError: a map has no such parameter, or the value is no integer.
    """
    known = list(known)
    for name in given:
        if name not in known:
            listed = f"Its parameters are {', '.join(known)}" if known else "It has none"
            raise MisuseError(f"{where} has no parameter {name!r}{meant(name, known)}. {listed}")
    return {name: whole(value, f"the parameter {name}", 0, MAX_SIZE) for name, value in given.items()}


def resolved(
    parameters: Mapping[str, Parameter],
    given: Mapping[str, int],
    config: Config | None,
    stored: Callable[[str], int | None],
    where: str,
) -> dict[str, int]:
    """The value of each parameter. ``stored`` gives the number at a leaf path.

    Raises:
        MisuseError: one has no value, or two that differ.
    """
    values: dict[str, int] = {}
    missing: list[str] = []
    for name, one in parameters.items():
        found = list(_found(name, one, given, config, stored))
        if found:
            (value, place), *others = found
            for other, elsewhere in others:
                if other != value:
                    raise MisuseError(
                        f"{place} is {value}, and {elsewhere} is {other}. Pass the right number, or the "
                        "configuration of this model"
                    )
            values[name] = value
        elif one.default is None:
            missing.append(name)
        elif all(part in values for part in names(one.default)):
            values[name] = _value_of(f"the default of the parameter {name}", one.default, values)
    if missing:
        numbers = ", ".join(f"{name}=N" for name in missing)
        absent = "" if config is None else f" {printable(config.path)} does not have them."
        raise MisuseError(
            f"{where} needs {', '.join(missing)}.{absent} Pass config=, which is the path of the model's {CONFIG}, "
            f"or the numbers as parameters ({numbers})"
        )
    return values


def find_config(path: str) -> Config | None:
    """The configuration beside a checkpoint, if there is one."""
    folder = path if os.path.isdir(path) else os.path.dirname(path)
    file = os.path.join(folder, CONFIG)
    return read_config(file) if os.path.isfile(file) else None


def read_config(path: str) -> Config:
    """The configuration at a path, which is the file or the model's directory.

    Raises:
        MisuseError: the file is missing or invalid.
    """
    file = os.path.join(path, CONFIG) if os.path.isdir(path) else path
    if not os.path.isfile(file):
        raise MisuseError(f"{printable(file)} does not exist. Pass config=, the path of the model's {CONFIG}")
    text = read_whole(
        file,
        _MAX_CONFIG_BYTES,
        lambda length: MisuseError(
            f"{printable(file)} has {length} bytes; a configuration has at most {_MAX_CONFIG_BYTES}"
        ),
    )
    try:
        entries = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise MisuseError(
            f"{printable(file)} is not valid JSON: {error}. Pass the {CONFIG} of a model"
        ) from error
    if not isinstance(entries, dict):
        raise MisuseError(f"{printable(file)} is not a table. Pass the {CONFIG} of a model")
    return Config(file, entries)


def evaluated(expression: str, values: Mapping[str, int]) -> int:
    """The value of an expression over names with values. Raises ``ValueError`` if a division leaves
    a rest."""
    total = 1
    for operation, term in _TERM.findall(expression):
        number = int(term) if term.isdigit() else values[term]
        if operation == "/":
            if number < 1 or total % number:
                raise ValueError(f"{total} cannot be divided by {number}")
            total //= number
        else:
            total *= number
        if total >= MAX_SIZE:
            raise ValueError("it is an integer below 2^62")
    return total


def names(expression: str) -> list[str]:
    """The names in an expression. Raises ``ValueError`` if it is invalid."""
    if not _is_expression(expression):
        raise ValueError("an expression is names and integers with * and / between them")
    return [term for _, term in _TERM.findall(expression) if not term.isdigit()]


def _is_expression(value: object) -> bool:
    return (
        isinstance(value, str)
        and len(value) <= _MAX_EXPRESSION
        and _EXPRESSION.fullmatch(value) is not None
        and all(term.isdigit() or _NAME.fullmatch(term) for _, term in _TERM.findall(value))
    )


def _found(
    name: str,
    parameter: Parameter,
    given: Mapping[str, int],
    config: Config | None,
    stored: Callable[[str], int | None],
) -> Iterator[tuple[int, str]]:
    """The values of a parameter, and their places."""
    if name in given:
        yield given[name], f"the parameter {name}"
    if config is not None:
        for expression in parameter.config:
            if all(config.entries.get(key) is not None for key in names(expression)):
                path = printable(config.path)
                numbers = {key: _number(config.entries[key], f"{key} in {path}") for key in names(expression)}
                yield _value_of(f"{expression} in {path}", expression, numbers), f"{expression} in {path}"
                break
    if parameter.stored is not None and (value := stored(parameter.stored)) is not None:
        yield value, f"`{parameter.stored}` of the checkpoint"


def _number(value: object, name: str) -> int:
    """A number of a configuration. A flag is 0 or 1."""
    return int(value) if isinstance(value, bool) else whole(value, name, 0)


def _value_of(what: str, expression: str, values: Mapping[str, int]) -> int:
    try:
        return evaluated(expression, values)
    except ValueError as error:
        raise MisuseError(f"{what} has no value: {error}") from error
