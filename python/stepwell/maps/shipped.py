"""The recipes of this package: maps between two families of models, in ``recipes/*.toml``.

A recipe's name has both families. The same name with the families swapped is the way back.
"""

from __future__ import annotations

import os
from functools import cache

from .._checks import meant
from .._paths import printable
from ..errors import MisuseError
from .tables import Tables, part_path, parts, read_text

_FOLDER = os.path.join(os.path.dirname(__file__), "recipes")
_TO = "-to-"


@cache
def _names() -> tuple[str, ...]:
    return tuple(sorted(os.path.splitext(file)[0] for file in os.listdir(_FOLDER)))


def recipes() -> list[str]:
    """The names of the recipes. ``hf-llama-to-megatron`` is also ``megatron-to-hf-llama``, the way
    back, which is not listed."""
    return list(_names())


def recipe_toml(name: str) -> str:
    """The TOML of a recipe, or of a part that recipes include, to be copied and changed. That of a
    way back is the same.

    Raises:
        MisuseError: there is no such recipe.
    """
    if name in parts():
        return read_text(part_path(name), f"the part {name}")
    own = _own_name(name)
    if own is None:
        raise MisuseError(
            f"there is no recipe {printable(name)}{near(name)} `stepwell recipe list` lists them"
        )
    return read_text(_path(own), f"the recipe {own}")


def find(name: str) -> tuple[Tables, bool] | None:
    """A recipe by its name, and true for a way back. ``None`` without one of that name."""
    own = _own_name(name)
    return None if own is None else (_tables(own), own != name)


def swapped(name: str) -> str:
    """The name of the way back."""
    first, _, second = name.partition(_TO)
    return f"{second}{_TO}{first}"


def for_model(kind: object, *, is_inverse: bool) -> list[str]:
    """The names of the recipes for a ``model_type``, or of their ways back."""
    found = [name for name in _names() if kind in _tables(name).model_types]
    return [swapped(name) if is_inverse else name for name in found]


def near(name: str) -> str:
    """The end of a sentence about an unknown name: the names that may be meant."""
    found = [repr(one) for one in _names() if name and name in one]
    return f"; did you mean {' or '.join(found)}?" if found else meant(name, words()) or "."


def words() -> list[str]:
    """All names, those of the ways back too."""
    return [*_names(), *map(swapped, _names())]


def _own_name(name: str) -> str | None:
    return next((one for one in (name, swapped(name)) if one in _names()), None)


@cache
def _tables(name: str) -> Tables:
    return Tables.of_file(_path(name), f"the recipe {name}", f"the recipe {swapped(name)}")


def _path(name: str) -> str:
    return os.path.join(_FOLDER, f"{name}.toml")
