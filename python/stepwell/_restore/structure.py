"""The stored structure → Python containers, where no ``like`` says what is wanted: dicts, lists,
tuples, named fields and empty containers as they were saved. A class comes from
:func:`stepwell.register`, or is synthesised; a file never chooses what is imported."""

from __future__ import annotations

from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Literal, TypeAlias

from .. import _adapters as adapters
from .._paths import Component, extend
from .._state.registry import is_namedtuple_class, of_name, synthetic_dataclass, synthetic_namedtuple
from .._state.specs import AS_STORED
from .._state.stateful import rebuilt

#: The class of a stateful object, how its state was taken, and the container of the state.
StatefulKind: TypeAlias = tuple[Literal["stateful"], str, str, "ContainerKind"]
#: The kind of a container, and what belongs to it: most items of a deque, the name of a class.
ContainerKind: TypeAlias = (
    tuple[Literal["dict", "list", "tuple", "OrderedDict", "defaultdict"]]
    | tuple[Literal["deque"], int | None]
    | tuple[Literal["namedtuple"], str]
    | tuple[Literal["dataclass"], str]
    | tuple[Literal["custom"], str]
    | StatefulKind
)
#: Values of a container's children, by stored key.
Children: TypeAlias = list[tuple[str | int, object]]
#: Number of the parent, how it reaches the node, and the node's leaf number or container kind.
Node: TypeAlias = tuple[int, Component | None, int | ContainerKind]

#: The stored form of a state that is no container, inside a stateful object.
BARE_STATE = "stepwell.state"


class Structure:
    """A stored tree. Nodes, children and paths are made when somebody asks for them: of many
    leaves, that is a good part of what looking at a checkpoint costs."""

    def __init__(self, nodes: Callable[[], Sequence[Node]]) -> None:
        self._nodes = nodes
        #: For visited containers: key → child.
        self._child_at: dict[int, dict[tuple[bool, str | int], int]] = {}

    @cached_property
    def nodes(self) -> Sequence[Node]:
        """All nodes, parents first."""
        return self._nodes()

    @cached_property
    def children(self) -> list[list[int]]:
        """The numbers of each node's children."""
        found: list[list[int]] = [[] for _ in self.nodes]
        for number, (parent, component, _) in enumerate(self.nodes):
            if component is not None:
                found[parent].append(number)
        return found

    @cached_property
    def leaf_nodes(self) -> list[int]:
        """The node of each leaf."""
        leaves = [(kind, number) for number, (_, _, kind) in enumerate(self.nodes) if isinstance(kind, int)]
        return [number for _, number in sorted(leaves)]

    @cached_property
    def paths(self) -> list[str]:
        """The rendered path of each node."""
        paths = [""] * len(self.nodes)
        for number, (parent, component, _) in enumerate(self.nodes):
            if component is not None:
                paths[number] = extend(paths[parent], component)
        return paths

    def find(self, components: Sequence[Component]) -> int | None:
        """The node at a path; keys and fields of the same name are the same place."""
        if not self.nodes:
            return None
        at = 0
        for component in components:
            child = self._children_by_place(at).get(_place(component))
            if child is None:
                return None
            at = child
        return at

    def _children_by_place(self, node: int) -> dict[tuple[bool, str | int], int]:
        found = self._child_at.get(node)
        if found is None:
            found = self._child_at[node] = {}
            for child in self.children[node]:
                component = self.nodes[child][1]
                assert component is not None
                found.setdefault(_place(component), child)
        return found

    def leaves_below(self, node: int) -> list[int]:
        """Numbers of the leaves at or below a node."""
        found: list[int] = []
        pending = [node]
        while pending:
            at = pending.pop()
            kind = self.nodes[at][2]
            if isinstance(kind, int):
                found.append(kind)
            else:
                pending.extend(reversed(self.children[at]))
        return found

    def is_container(self, node: int) -> bool:
        """True if a node is a container."""
        return not isinstance(self.nodes[node][2], int)

    def leaf_at(self, components: Sequence[Component]) -> int | None:
        """The number of the leaf at a path, or ``None``."""
        node = self.find(components)
        found = None if node is None else self.nodes[node][2]
        return found if isinstance(found, int) else None

    def object_of(self, leaf: int) -> int | None:
        """The node of the innermost stateful object around a leaf."""
        node = self.leaf_nodes[leaf]
        while True:
            if self.stateful_kind(node) is not None:
                return node
            parent, component, _ = self.nodes[node]
            if component is None:
                return None
            node = parent

    def stateful_kind(self, node: int) -> StatefulKind | None:
        """The kind of a stateful object; ``None`` for any other node."""
        kind = self.nodes[node][2]
        return kind if not isinstance(kind, int) and kind[0] == "stateful" else None

    def components(self, node: int) -> tuple[Component, ...]:
        """The path of a node, as components."""
        found: list[Component] = []
        while True:
            parent, component, _ = self.nodes[node]
            if component is None:
                return tuple(reversed(found))
            found.append(component)
            node = parent

    def build(
        self,
        node: int,
        value: Callable[[int], object],
        wanted: set[int] | None = None,
        revive: Callable[[int, StatefulKind, object], object] | None = None,
    ) -> object:
        """The Python value of a node. ``value`` gives a leaf's; with ``wanted`` only those leaves
        are there: the other keys of a mapping are left out, the other places of a sequence hold
        ``...``. ``revive`` (node, kind, state) gives a stateful object for its state, those inside
        it first; without it the state stands for it."""
        below = [node]
        for at in below:
            below.extend(self.children[at])
        built: dict[int, object] = {}
        for at in reversed(below):
            kind = self.nodes[at][2]
            if isinstance(kind, int):
                if wanted is None or kind in wanted:
                    built[at] = value(kind)
                continue
            children = self.children[at]
            there = [child for child in children if child in built]
            if not there and (children or wanted is not None):
                continue
            container = kind[3] if kind[0] == "stateful" else kind
            if kind_of(kind) in ("dict", "OrderedDict", "defaultdict", "custom"):
                built[at] = make(container, [(self.key(child), built[child]) for child in there])
            else:
                built[at] = make(container, [(self.key(child), built.get(child, ...)) for child in children])
            if kind[0] == "stateful" and revive is not None:
                built[at] = revive(at, kind, built[at])
        return built.get(node, ...)

    def outline(self, node: int, value: Callable[[int], object]) -> object:
        """Plain dicts, lists and tuples as they are stored, with ``value`` of each leaf. Any other
        container is ``AS_STORED``; a stateful object is an ``OrderedDict`` of its state."""
        kind = self.nodes[node][2]
        if isinstance(kind, int):
            return value(kind)
        name = kind_of(kind)
        if name not in ("dict", "OrderedDict", "list", "tuple"):
            return AS_STORED
        found = [(self.key(child), self.outline(child, value)) for child in self.children[node]]
        if name == "list":
            return [value for _, value in found]
        if name == "tuple":
            return tuple(value for _, value in found)
        return dict(found) if kind[0] == "dict" else OrderedDict(found)

    def key(self, node: int) -> str | int:
        """How its parent reaches a node."""
        component = self.nodes[node][1]
        return "" if component is None else component[1]


def _place(component: Component) -> tuple[bool, str | int]:
    """Returns the common identity of components that render alike: the name of keys and fields, the
    number of indices and integer keys."""
    return component[0] in "kf", component[1]


def kind_of(kind: ContainerKind) -> str:
    """The container that a node's children form: of a stateful object, that of its state."""
    return kind_of(kind[3]) if kind[0] == "stateful" else kind[0]


def protocol_name(kind: StatefulKind) -> str:
    """How the state of a stateful object was taken."""
    return kind[2].partition("/")[0]


def library(kind: StatefulKind) -> str | None:
    """Returns the library of the arrays in a stateful object's state, unless it is numpy."""
    return kind[2].partition("/")[2] or None


_BUILT_IN: dict[str, Callable[[Children], object]] = {
    "dict": dict,
    "list": lambda children: [value for _, value in children],
    "tuple": lambda children: tuple(value for _, value in children),
    "OrderedDict": OrderedDict,
    "defaultdict": lambda children: defaultdict(None, children),
}


def make(kind: ContainerKind, children: Children) -> object:
    """A container of a stored kind."""
    if kind[0] == "deque":
        return deque((value for _, value in children), kind[1])
    if kind[0] == "namedtuple":
        return _namedtuple(kind[1], children)
    if kind[0] == "dataclass":
        return _dataclass(kind[1], children)
    if kind[0] == "stateful":
        return rebuilt(kind[1], protocol_name(kind), make(kind[3], children))
    if kind[0] == "custom":
        registered = of_name(kind[1])
        if registered is not None and registered.unflatten is not None:
            return registered.unflatten(dict(children))
        return adapters.remake(kind[1], dict(children))
    return _BUILT_IN[kind[0]](children)


def _namedtuple(name: str, children: Children) -> object:
    if name == BARE_STATE:
        return children[0][1] if children else None
    fields = tuple(str(key) for key, _ in children)
    registered = of_name(name)
    if registered is not None and is_namedtuple_class(registered.cls):
        value_of = {str(key): value for key, value in children}
        if set(registered.cls._fields) == set(fields):
            return registered.cls._make(value_of[field] for field in registered.cls._fields)
    return synthetic_namedtuple(name, fields)(*(value for _, value in children))


def _dataclass(name: str, children: Children) -> object:
    values = {str(key): value for key, value in children}
    registered = of_name(name)
    if registered is not None and registered.flatten is None:
        made = fill_dataclass(registered.cls, values)
        if made is not None:
            return made
    return synthetic_dataclass(name, tuple(values))(**values)


def fill_dataclass(cls: type, values: dict[str, object]) -> object:
    """An instance of a dataclass with these fields, made without running its ``__init__``; ``None``
    if the fields are not these."""
    import dataclasses

    fields = {field.name for field in dataclasses.fields(cls)}
    if fields != set(values):
        return None
    made: object = object.__new__(cls)
    for name, value in values.items():
        object.__setattr__(made, name, value)
    return made
