"""Maps: declared operations between the names and shapes of two checkpoints.

::

    # fused.toml
    [[rule]]
    concat = ["model.{i}.q.weight", "model.{i}.k.weight", "model.{i}.v.weight"]
    to = "model.{i}.qkv.weight"
    sizes = [4, 1, 1]

    state = sw.restore("checkpoint", map="fused.toml")

Rules apply in their order, to all leaves that their patterns match. Most only say which stored
element is where, so a mapped checkpoint costs no more to read than the stored one. Others compute,
region by region, when a leaf is read.

Recipes are maps between two families of models that are part of this package::

    state = sw.restore("llama", map="hf-llama-to-megatron")
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, TypeAlias, final

from .. import _core
from .._caller import levels_to_caller
from .._locations import Path
from .._paths import named
from .._restore import collector as collecting
from ..errors import MisuseError
from . import numbered_slots, parameters, shipped
from .coverage import Coverage, Observer
from .layout import StoredLeaves
from .parameters import Config
from .patterns import Pattern
from .shipped import recipe_toml, recipes
from .tables import Tables, naming
from .values import Values

if TYPE_CHECKING:
    from .._checkpoint import Checkpoint

#: A map, the path of its TOML file, the name of a recipe, or a list of rules.
MapLike: TypeAlias = "Map | str | os.PathLike[str] | Iterable[Mapping[str, object]]"

#: Leaves that an error lists.
_LISTED = 3


@final
class MapWarning(UserWarning):
    """A map gives another model than the stored one, as its ``warning`` says, or leaves numbered
    slots of an optimizer behind. It is shown when a checkpoint is opened, restored or converted
    with the map."""


@final
class Map:
    """Declared operations between the names and shapes of two checkpoints.

    Args:
        rules: one table for each rule: ``[{"rename": "a.{i}", "to": "b.{i}"}]``.
    """

    __slots__ = ("_config", "_given", "_is_inverse", "_tables")

    def __init__(self, rules: Iterable[Mapping[str, object]]) -> None:
        self._tables = Tables.of_rules(rules)
        self._given: Mapping[str, int] = {}
        self._config: Config | None = None
        self._is_inverse = False

    @classmethod
    def of(cls, given: MapLike) -> Map:
        """A map from a TOML file, from the name of a recipe, or from rules."""
        if isinstance(given, Map):
            return given
        if not isinstance(given, (str, os.PathLike)):
            return cls(given)
        path = os.fspath(given)
        is_inverse = False
        if (recipe := shipped.find(path)) is not None:
            tables, is_inverse = recipe
        elif os.path.isfile(path):
            tables = Tables.of_file(path, f"the map {path}", f"the inverse of the map {path}")
        else:
            raise MisuseError(
                f"the map {path} is no file and no recipe{shipped.near(path)} Pass a TOML file, the name of a "
                "recipe (`stepwell recipe list`), rules or a sw.maps.Map"
            )
        return cls._made(tables, {}, None, is_inverse)

    @classmethod
    def _made(cls, tables: Tables, given: Mapping[str, int], config: Config | None, is_inverse: bool) -> Map:
        found = object.__new__(cls)
        found._tables, found._given = tables, given
        found._config, found._is_inverse = config, is_inverse
        return found

    @property
    def about(self) -> str:
        """The description in its TOML file."""
        return self._tables.about

    @property
    def warning(self) -> str:
        """The warning in its TOML file, for users of its result. It is empty without one."""
        return self._tables.warning

    @property
    def parameters(self) -> tuple[str, ...]:
        """The names of its parameters."""
        return tuple(self._tables.parameters)

    def with_parameters(self, config: Path | None = None, /, **numbers: int) -> Map:
        """Returns this map with numbers of a model.

        Args:
            config: the model's ``config.json``, or the directory of one. Default: the one beside
                the checkpoint, if there is one.
            numbers: parameters by name, such as ``heads=32``.

        Raises:
            MisuseError: the map has no such parameter, or the configuration is invalid.
        """
        given = parameters.checked(numbers, self.parameters, self._name)
        read = self._config if config is None else parameters.read_config(os.fspath(config))
        return Map._made(self._tables, {**self._given, **given}, read, self._is_inverse)

    def inverse(self) -> Map:
        """The map that takes this one back.

        Raises:
            MisuseError: a rule has no way back; the message names it.
        """
        self._tables.check(is_inverse=not self._is_inverse)
        return Map._made(self._tables, self._given, self._config, not self._is_inverse)

    def check(self, source: Path | Checkpoint, step: int | None = None) -> Coverage:
        """Applies this map to a checkpoint, and returns what does not fit. Reads no array.

        Args:
            source: a checkpoint, a step's directory, a root, or an open checkpoint.
            step: the step of a root. ``None``: its newest one.
        """
        from .._opening import opened

        with opened(source, step, None) as checkpoint:
            observer = Observer()
            with collecting.paused():
                self._applied(checkpoint._open(), observer)
            return observer.coverage()

    def __repr__(self) -> str:
        return f"<Map of {len(self._tables.entries)} rules>"

    def _recipes_for(self, kind: object) -> list[str]:
        return shipped.for_model(kind, is_inverse=self._is_inverse)

    def _check_direction(self, values: Values) -> None:
        """Raises for a checkpoint that has only the leaves of the other side."""
        taken, made = self._tables.source, self._tables.target
        other = self._tables.inverse_name
        if self._is_inverse:
            taken, made, other = made, taken, self._tables.name

        def has(patterns: Iterable[Pattern]) -> bool:
            return any(next(pattern.among(values), None) is not None for pattern in patterns)

        if taken and not has(taken) and has(made):
            raise MisuseError(
                f"{self._name} takes {taken[0].text}, and this checkpoint has only leaves that it makes, such as "
                f"{made[0].text}. Use its way back, {other}"
            )

    @property
    def _name(self) -> str:
        return self._tables.inverse_name if self._is_inverse else self._tables.name

    def _apply(self, core: _core.Checkpoint) -> _core.Checkpoint:
        """The same checkpoint with its leaves by this map."""
        with collecting.paused():
            stored, values = self._applied(core, None)
            mapped = core.mapped(*stored.rows(values))
            numbered = numbered_slots.warning(stored.values, values)
            # They go before the collector sees them.
            del stored, values
        for one in (self.warning, numbered):
            if one:
                warnings.warn(f"{self._name}: {one}", MapWarning, stacklevel=levels_to_caller())
        return mapped

    def _applied(self, core: _core.Checkpoint, observer: Observer | None) -> tuple[StoredLeaves, Values]:
        """The leaves of a checkpoint after the rules. An observer sees the errors, which are raised
        without one."""
        config = self._config
        if config is None and (self._tables.parameters or self._tables.model_types):
            with core.reading():
                config = parameters.find_config(core.path())
        if config is not None:
            self._tables.check_model(config, self._name, self._recipes_for)
        stored = StoredLeaves(core)
        self._check_direction(stored.values)
        numbers = self._tables.numbers(self._given, config, stored.number, self._name)
        told = "".join(f", {name} = {number}" for name, number in numbers.items())
        values = stored.values
        with naming(f"{self._name}{told}"):
            rules = self._tables.rules(numbers, is_inverse=self._is_inverse)
        for called, one in rules:
            with contextlib.ExitStack() as stack:
                if observer is not None:
                    stack.enter_context(observer.watching(one, values))
                stack.enter_context(naming(f"{called} of {self._name}{told}"))
                after, alike = one.joined(values)
                stored.check_alike(alike, values)
                values = after
        covered = self._tables.target if self._is_inverse else self._tables.source
        matched = {path for pattern in covered for path, _ in pattern.among(values)}
        left = [path for path in values if path in matched]
        if observer is not None:
            observer.end(stored.values, values, left if covered else None)
        elif left:
            more = f" and {len(left) - _LISTED} more" if len(left) > _LISTED else ""
            raise MisuseError(
                f"{self._name} has no rule for {', '.join(map(named, left[:_LISTED]))}{more}. Use the recipe of this "
                "model, or a copy of this one with rules for them. `stepwell recipe check` lists them"
            )
        model = values if self._is_inverse else stored.values
        uncovered = set(left)
        if uncovered and model is stored.values:
            model = {path: value for path, value in model.items() if path not in uncovered}
        for called, part in self._tables.completeness(numbers):
            with contextlib.ExitStack() as stack:
                if observer is not None:
                    stack.enter_context(observer.noting())
                stack.enter_context(naming(f"{called} of {self._name}{told}"))
                part.check(model)
        return stored, values


def recipe(
    name: str | os.PathLike[str], *, inverse: bool = False, config: Path | None = None, **numbers: int
) -> Map:
    """A recipe, or the map of a TOML file, with numbers of a model.

    Args:
        name: a name of :func:`recipes`, or a path.
        inverse: the way back.
        config: as of :meth:`Map.with_parameters`.
        numbers: as of :meth:`Map.with_parameters`.
    """
    found = Map.of(name)
    return (found.inverse() if inverse else found).with_parameters(config, **numbers)


for _public in (Map, MapWarning, Coverage, recipe, recipes, recipe_toml):
    _public.__module__ = __name__

__all__ = ["Coverage", "Map", "MapLike", "MapWarning", "recipe", "recipe_toml", "recipes"]
