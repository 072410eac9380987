"""The stored leaves that a map begins with, and the mapped ones in the engine's form."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NoReturn, TypeGuard

import numpy as np

from .. import _core
from .._paths import Component, extend, split
from .._restore.structure import Structure, kind_of
from .._state.leaves import Reviver
from .arrangement import Arrangement, Computed, EngineRows
from .values import Stored, Tied, Value, Values, refuse, untied

_LISTS = ("list", "tuple", "deque")
_FIELDS = ("namedtuple", "dataclass")
#: Objects that are compared by value.
_COMPARED = (bool, int, float, str, bytes)


@dataclass(slots=True)
class _Container:
    """A container of the mapped state."""

    path: str
    #: The stored node whose kind it has.
    node: int | None
    children: dict[Component, _Container | str] = field(default_factory=dict)


class StoredLeaves:
    """The leaves of a checkpoint by path, and its containers."""

    def __init__(self, core: _core.Checkpoint) -> None:
        self._core = core
        self._structure = structure = Structure(core.nodes)
        rows, paths = core.leaves(), core.leaf_paths()
        #: The leaves, as a map takes them.
        self.values: Values = {}
        for leaf, (path, (_, dtype, shape, tied)) in enumerate(zip(paths, rows, strict=True)):
            if tied is not None:
                self.values[path] = Tied(paths[tied])
            elif dtype is None or shape is None:
                self.values[path] = Stored(leaf)
            else:
                self.values[path] = Arrangement.whole(leaf, dtype, tuple(shape))
        self._nodes = {path: node for node, path in enumerate(structure.paths)}

    def rows(
        self, values: Values
    ) -> tuple[list[_core._ForeignNode], list[_core._MappedLeaf], list[_core._ComputedTensor]]:
        """The nodes and leaves of the mapped state, parents first, and its computed tensors."""
        tensors = EngineRows()
        nodes: list[_core._ForeignNode] = []
        leaves: list[_core._MappedLeaf] = []
        numbers: dict[str, int] = {}
        pending: list[tuple[_Container | str, int, Component | None]] = [(self._tree(values), 0, None)]
        while pending:
            one, parent, component = pending.pop()
            if isinstance(one, str):
                nodes.append((parent, component, None))
                numbers[one] = len(leaves)
                leaves.append(_row(values, one, numbers, tensors))
                continue
            nodes.append((parent, component, "dict" if one.node is None else one.node))
            number = len(nodes) - 1
            pending.extend((child, number, key) for key, child in reversed(one.children.items()))
        return nodes, leaves, tensors.computed

    def number(self, path: str) -> int | None:
        """The whole number, at least 0, that is stored at a path, if there is one."""
        leaf = self.values.get(path)
        if not isinstance(leaf, Stored):
            return None
        (value,) = self._core.objects([leaf.leaf], Reviver())
        return value if type(value) is int and value >= 0 else None

    def check_alike(self, sets: Mapping[str, Sequence[str]], values: Values) -> None:
        """Reads and compares leaves of which a map keeps one, and raises for those that differ.
        ``sets`` has their paths, by the path of the one that is kept."""
        objects: dict[tuple[str, str, str], tuple[Stored, Stored]] = {}
        tensors: dict[tuple[str, str, str], tuple[Arrangement, Arrangement]] = {}
        for whole, (kept, *others) in sets.items():
            one = untied(values, kept)
            for path in others:
                other = untied(values, path)
                if one == other:
                    continue
                if isinstance(one, Stored) and isinstance(other, Stored):
                    objects[whole, kept, path] = one, other
                elif isinstance(one, Arrangement) and _is_alike(other, one):
                    tensors[whole, kept, path] = one, other
                else:
                    _refuse_loss(whole, kept, path)
        read = self._core.objects([one.leaf for pair in objects.values() for one in pair], Reviver())
        for at, names in enumerate(objects):
            if _comparable(read[2 * at]) != _comparable(read[2 * at + 1]):
                _refuse_loss(*names)
        for at in self._different(list(tensors.values())):
            _refuse_loss(*list(tensors)[at])

    def _different(self, pairs: Sequence[tuple[Arrangement, Arrangement]]) -> list[int]:
        """The numbers of the pairs of tensors that differ."""
        if not pairs:
            return []
        rows = EngineRows()
        tensors = [rows.tensor(one) for pair in pairs for one in pair]
        nodes: list[_core._ForeignNode] = [(0, None, "dict")]
        nodes += [(0, ("k", str(number)), None) for number in range(len(tensors))]
        core = self._core.mapped(nodes, [(None, None, tensor) for tensor in tensors], rows.computed)
        return _core.compare_tensors(
            core, core, [(2 * at, 2 * at + 1, one.dtype) for at, (one, _) in enumerate(pairs)]
        )

    def _tree(self, values: Values) -> _Container | str:
        if list(values) == [""]:
            return ""
        root = _Container("", self._container_at(""))
        # Empty containers have no leaf that would bring them along.
        structure = self._structure
        empty = [
            path
            for path, node in self._nodes.items()
            if path and structure.is_container(node) and not structure.children[node]
        ]
        for path in [*values, *empty]:
            at, prefix = root, ""
            parts = split(path)
            origin = self._origin(values.get(path), parts)
            for position, part in enumerate(parts):
                below = len(parts) - position - 1
                came_from = origin[len(origin) - below - 1] if below < len(origin) else None
                component = self._component(at, prefix, part, came_from)
                prefix = extend(prefix, component)
                is_leaf = below == 0 and path in values
                if is_leaf:
                    if component in at.children:
                        refuse(path, "the map makes it both a leaf and a container")
                    at.children[component] = path
                    break
                child = at.children.get(component)
                if child is None:
                    node = self._container_at(prefix)
                    if node is None:
                        node = came_from if came_from is not None else self._list_above(origin, below)
                    child = at.children[component] = _Container(prefix, node)
                if isinstance(child, str):
                    refuse(path, f"the map makes `{child}` both a leaf and a container")
                at = child
        self._check_lists(root)
        return root

    def _list_above(self, origin: list[int], below: int) -> int | None:
        """The stored list that a renamed one was, by the nodes of :meth:`_origin`."""
        if below != len(origin) or not origin:
            return None
        node = self._structure.nodes[origin[0]][0]
        return node if self._kind(node) in _LISTS else None

    def _origin(self, value: Value | None, parts: list[str | int]) -> list[int]:
        """The stored nodes that go by the last parts of a leaf's mapped path, as far as these are
        the same: a subtree that was moved keeps the kinds of its containers."""
        leaf = value.leaf if isinstance(value, Stored) else None
        while isinstance(value, Arrangement) and value.pieces:
            source = value.pieces[0].source
            leaf = None if isinstance(source, Computed) else source
            value = source.operands[0] if isinstance(source, Computed) and source.operands else None
        found: list[int] = []
        if leaf is None:
            return found
        node = self._structure.leaf_nodes[leaf]
        for part in reversed(parts):
            parent, component, _ = self._structure.nodes[node]
            if component is None or component[1] != part:
                break
            found.append(node)
            node = parent
        return found[::-1]

    def _container_at(self, path: str) -> int | None:
        node = self._nodes.get(path)
        return node if node is not None and self._structure.is_container(node) else None

    def _component(
        self, container: _Container, prefix: str, part: str | int, origin: int | None
    ) -> Component:
        """How a container of the mapped state reaches a child, which came from a stored node."""
        kind = None if container.node is None else self._kind(container.node)
        if kind in _LISTS and isinstance(part, int):
            return ("x", part)
        as_key: Component = ("k", part) if isinstance(part, str) else ("i", part)
        stored = self._nodes.get(extend(prefix, as_key), origin)
        found = None if stored is None else self._structure.nodes[stored][1]
        if found is not None:
            return found
        return ("f", part) if kind in _FIELDS else as_key

    def _kind(self, node: int) -> str:
        kind = self._structure.nodes[node][2]
        return "" if isinstance(kind, int) else kind_of(kind)

    def _check_lists(self, root: _Container) -> None:
        """Raises where a map takes entries out of a list, or adds one far behind its end. A list
        whose entries all have names now is a dict."""
        pending = [root]
        while pending:
            one = pending.pop()
            if one.node is not None and self._kind(one.node) in _LISTS:
                _check_list(one)
            pending.extend(child for child in one.children.values() if isinstance(child, _Container))


def _check_list(one: _Container) -> None:
    places = sorted(int(value) for tag, value in one.children if tag == "x")
    if one.children and not places:
        one.node = None
    elif len(places) < len(one.children):
        refuse(one.path, "the map gives names to a part of this list; map all of its entries")
    elif places != list(range(len(places))):
        refuse(one.path, "the map leaves holes in this list; map all of its entries")
    else:
        one.children = dict(sorted(one.children.items(), key=lambda child: int(child[0][1])))


def _row(values: Values, path: str, numbers: Mapping[str, int], tensors: EngineRows) -> _core._MappedLeaf:
    value = values[path]
    if isinstance(value, Arrangement):
        return None, None, tensors.tensor(value)
    if isinstance(value, Stored):
        return value.leaf, None, None
    seen = {path}
    while isinstance(value, Tied):
        target = value.to
        if target in seen or target not in values:
            refuse(path, f"it is tied to `{target}`, which the map does not have")
        seen.add(target)
        value = values[target]
    number = numbers.get(target)
    if number is not None:
        return None, number, None
    # The leaf that it is tied to comes later: both read the same bytes.
    return (None, None, tensors.tensor(value)) if isinstance(value, Arrangement) else (value.leaf, None, None)


def _comparable(value: object) -> object:
    """An object that equals those of the same type and value. A scalar of numpy equals those with
    the same bits. Other types equal nothing."""
    if isinstance(value, np.generic):
        return type(value), value.dtype, value.tobytes()
    return (type(value), value) if value is None or type(value) in _COMPARED else object()


def _is_alike(one: Value, other: Arrangement) -> TypeGuard[Arrangement]:
    """True for a tensor of the same dtype and shape."""
    return isinstance(one, Arrangement) and (one.dtype, one.shape) == (other.dtype, other.shape)


def _refuse_loss(whole: str, one: str, other: str) -> NoReturn:
    refuse(
        other,
        f"the map keeps only `{one}` of the two, as `{whole}`, and they differ. Rename or drop them by rules before "
        "this one",
    )
