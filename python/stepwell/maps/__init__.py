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
"""

from __future__ import annotations

import contextlib
import os
import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TypeAlias, final

from .. import _core
from .._checks import shown
from ..errors import MisuseError
from ..formats.files import read_whole
from . import layout, parsing
from .rules import Concat, Rule

#: A map, the path of its TOML file, or a list of its rules.
MapLike: TypeAlias = "Map | str | os.PathLike[str] | Iterable[Mapping[str, object]]"

#: The longest file of a map.
_MAX_FILE_BYTES = 16 << 20


@final
class Map:
    """Declared operations between the names and shapes of two checkpoints.

    Args:
        rules: one table for each rule: ``[{"rename": "a.{i}", "to": "b.{i}"}]``.
    """

    __slots__ = ("_name", "_rules")

    def __init__(self, rules: Iterable[Mapping[str, object]]) -> None:
        if isinstance(rules, (str, Mapping)) or not isinstance(rules, Iterable):
            raise MisuseError(f"a map is a list of rules, not {shown(rules)}")
        self._name = "the map"
        #: With their numbers, for messages.
        self._rules: Sequence[tuple[int, Rule]] = tuple(
            (number, parsing.rule(number, one)) for number, one in enumerate(rules, start=1)
        )

    @classmethod
    def of(cls, given: MapLike) -> Map:
        """A map from a TOML file, or from rules."""
        if isinstance(given, Map):
            return given
        if isinstance(given, (str, os.PathLike)):
            path = os.fspath(given)
            rules = _read(path)
            with _naming(path):
                found = cls(rules)
            found._name = f"the map {path}"
            return found
        return cls(given)

    def inverse(self) -> Map:
        """The map that takes this one back.

        Raises:
            MisuseError: a rule has no way back; the message names it.
        """
        back = object.__new__(Map)
        back._name = f"the inverse of {self._name}"
        back._rules = tuple((number, one.inverse()) for number, one in reversed(self._rules))
        return back

    def __repr__(self) -> str:
        return f"<Map of {len(self._rules)} rules>"

    def _apply(self, core: _core.Checkpoint) -> _core.Checkpoint:
        """The same checkpoint with its leaves by this map."""
        stored = layout.StoredLeaves(core)
        values = stored.values
        for number, one in self._rules:
            with _naming(f"rule {number} of {self._name}"):
                if isinstance(one, Concat):
                    after, alike = one.joined(values)
                    stored.check_alike(alike, values)
                    values = after
                else:
                    values = one.apply(values)
        return core.mapped(*stored.rows(values))


@contextlib.contextmanager
def _naming(where: str) -> Iterator[None]:
    """Adds to an error where it is."""
    try:
        yield
    except MisuseError as error:
        error.args = (f"{error} ({where})",)
        raise


def _read(path: str) -> Iterable[Mapping[str, object]]:
    if not os.path.isfile(path):
        raise MisuseError(f"the map {path} is no file; pass a TOML file, rules or a sw.maps.Map")
    text = read_whole(
        path,
        _MAX_FILE_BYTES,
        lambda length: MisuseError(f"the map {path} has {length} bytes; a map has at most {_MAX_FILE_BYTES}"),
    )
    try:
        content = tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise MisuseError(f"the map {path} is no valid TOML: {error}") from error
    rules = content.pop("rule", [])
    if content or not isinstance(rules, list):
        unknown = ", ".join(content) or "rule"
        raise MisuseError(f"the map {path}: [[rule]] tables were expected, not {unknown}")
    return rules


Map.__module__ = __name__

__all__ = ["Map", "MapLike"]
