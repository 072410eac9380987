"""Stateful objects inside the state of another: a loader whose ``state_dict()`` holds a generator,
a scheduler that holds a scheduler.

An object gets back what it gave when it was saved. So a stateful object in its state is rebuilt
first: with ``into``, the live one at that place of the target's own state is loaded; otherwise a
new generator of Python or numpy is made. Objects of other classes cannot be made here and must
exist. The caller's objects do not change before :meth:`Nested.load`.
"""

from __future__ import annotations

from .._paths import Component, extend
from .._state import stateful
from .._state.stateful import Protocol, name_of
from . import template
from .report import RestoreReport
from .structure import StatefulKind, Structure, protocol_name
from .template import Leaf

_BARE: Component = ("f", "state")


class Nested:
    """The stateful objects below a stored node that goes to one leaf of the caller's."""

    def __init__(
        self, structure: Structure, report: RestoreReport, leaf: Leaf, node: int, fill: bool
    ) -> None:
        self._structure = structure
        self._report = report
        self._leaf = leaf
        self._node = node
        self._fill = fill
        #: The final loads, inner objects first.
        self._loads: list[tuple[str, object, Protocol, object]] = []
        #: The caller's stateful objects, by node of the stored ones, as far as they were asked for.
        self._live: dict[int, tuple[object, Protocol] | None] = {node: leaf.owner}
        #: Those in the state of one, by place below it.
        self._inside: dict[int, dict[tuple[Component, ...], tuple[object, Protocol]]] = {}

    def revive(self, node: int, kind: StatefulKind, state: object) -> object:
        """The object for the state that is stored at a node; see :meth:`Structure.build`."""
        if node == self._node and self._leaf.owner is not None:
            return state  # that of the leaf itself
        if self._leaf.owner is None:
            return stateful.rebuilt(kind[1], protocol_name(kind), state)
        live, path = self._find(node), self._path(node)
        if live is None:
            made = stateful.rebuilt(kind[1], protocol_name(kind), state)
            if made is not state or not self._fill:
                return made
            raise self._report.mismatch(
                f"stored is the state of a {kind[1]}, and the state of this {type(self._leaf.owner[0]).__qualname__} has no object there "
                "that could take it; give it one before the restore, or leave it out",
                path,
            )
        owner, protocol = live
        try_on(self._report, path, owner, protocol, state)
        if self._fill:
            self._loads.append((path, owner, protocol, state))
            return owner
        return state if protocol.make is None else protocol.make(owner, state)

    def load(self, given: list[str]) -> None:
        """Gives the caller's objects their states; ``given`` gets their paths."""
        for path, owner, protocol, state in self._loads:
            given.append(path)
            stateful.give(path, owner, protocol, state)

    def _path(self, node: int) -> str:
        """Returns the caller's path of a stored node."""
        path = self._leaf.path
        for component in self._below(self._node, node):
            path = extend(path, component)
        return path

    def _below(self, outer: int, node: int) -> tuple[Component, ...]:
        return self._structure.components(node)[len(self._structure.components(outer)) :]

    def _find(self, node: int) -> tuple[object, Protocol] | None:
        """Returns the caller's object at the place of a stored stateful node."""
        if node in self._live:
            return self._live[node]
        outer = self._structure.nodes[node][0]
        while outer not in (self._node, 0) and self._structure.stateful_kind(outer) is None:
            outer = self._structure.nodes[outer][0]
        above = self._find(outer) if outer != node else None
        found = None
        if above is not None:
            if outer not in self._inside:
                self._inside[outer] = _objects_in(*above, self._path(outer))
            found = self._inside[outer].get(_places(self._below(outer, node)))
        self._live[node] = found
        return found


def try_on(report: RestoreReport, path: str, owner: object, protocol: Protocol, state: object) -> None:
    """Raises where a state does not fit an object, and changes nothing."""
    if protocol.trial is None:
        return
    try:
        protocol.trial(owner, state)
    except Exception as failure:
        raise report.mismatch(
            f"the stored state does not fit this {name_of(owner)} "
            f"({type(failure).__name__}: {failure}). Restore it into one like the one that was saved, or leave it out",
            path,
        ) from failure


def _objects_in(
    owner: object, protocol: Protocol, path: str
) -> dict[tuple[Component, ...], tuple[object, Protocol]]:
    """The stateful objects in the state that an object of the caller's gives, by place."""
    try:
        state = protocol.get(owner)
    except Exception as failure:
        failure.add_note(
            f"while the state of this {type(owner).__qualname__} at `{path}` was asked for the objects in it, which are to be loaded"
        )
        raise
    leaves = template.leaves(template.parse(state))
    above = () if isinstance(state, dict) else (_BARE,)
    return {_places((*above, *leaf.components)): leaf.owner for leaf in leaves if leaf.owner is not None}


def _places(components: tuple[Component, ...]) -> tuple[Component, ...]:
    """Components such that those of the same place are equal: keys and fields by name, indices and
    integer keys by number."""
    return tuple(("k" if kind in "kf" else "x", key) for kind, key in components)
