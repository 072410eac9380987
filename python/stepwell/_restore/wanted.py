"""The request to the store: the leaves of a template as rows for the engine's match, and their
final values."""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, NoReturn, TypeAlias, cast

import numpy as np

from .. import _adapters as adapters
from .. import _core
from .._paths import Component, named
from .._state.specs import AS_STORED, ObjectSpec, native_name
from .._state.stateful import give, name_of
from .._types import Array, Read
from ..errors import MismatchError, UnsupportedLeaf, at_leaf
from . import scalars
from .array_reads import Job
from .nested import Nested, try_on
from .report import CastLeaf, RestoreReport, WrongKind
from .structure import Structure, library, protocol_name
from .template import Branch, Leaf

if TYPE_CHECKING:
    from .._core import _Row

#: Of all arrays that are stored.
_DTYPES = frozenset(_core.dtype_names())


#: The stored leaf, the leaf that holds its bytes, and the reads of its array (``None``: it is an
#: object; several: one for each wanted box).
Match: TypeAlias = tuple[int, int, list[Job] | None]
#: The objects that were read, by the leaf that holds them.
Objects: TypeAlias = Mapping[int, object]


def _value(match: Match, objects: Objects) -> Any:  # as it is stored
    _, source, jobs = match
    if jobs is None:
        return objects[source]
    return jobs[0].result if len(jobs) == 1 else [job.result for job in jobs]


#: Wanted places whose entries move with others → where they are stored; ``None``: nowhere.
Moves: TypeAlias = dict[tuple[Component, ...], tuple[Component, ...] | None]


def source_of(moves: Moves, components: tuple[Component, ...]) -> tuple[Component, ...] | None:
    """Returns where a wanted leaf is stored; ``None`` if nothing is stored for it."""
    for n in range(len(components), 0, -1) if moves else ():
        if components[:n] in moves:
            source = moves[components[:n]]
            return None if source is None else (*source, *components[n:])
    return components


class Wanted:
    """The request to the store: the template's leaves, in the engine's form."""

    def __init__(
        self,
        structure: Structure,
        report: RestoreReport,
        leaves: list[Leaf],
        branches: list[Branch],
        to: str | None = None,
        place: Callable[[list[str], list[Array]], object] = lambda paths, arrays: None,
        moves: Moves | None = None,
        grouped: bool = False,
    ) -> None:
        self._structure = structure
        self._moves = moves or {}
        #: The framework whose arrays stored subtrees get, and where those are to be.
        self._to = to
        self._place = place
        self._report = report
        #: Components, what is wanted there (kind, dtype, shape), and whether the caller has a value
        #: there; or a group, which is a row for each of its leaves.
        self.rows: list[_Row] = []
        #: Of each row, the place that it is for.
        self.places: list[Leaf | Branch] = []
        #: By row, what it got.
        self.matches: defaultdict[int, list[Match]] = defaultdict(list)
        #: Rows whose stored arrays may come as a group. ``None``: no row's may.
        self.groupable: list[int] | None = [] if grouped else None
        #: Numbers of the rows whose leaves keep the caller's value.
        self.kept: list[int] = []
        #: Paths of the caller's objects that were given their states.
        self.given: list[str] = []
        #: The values of stored subtrees and of converted scalars, by the leaf that wants them.
        self._made: dict[Leaf, object] = {}
        #: Stateful objects inside the states of others.
        self._nested: list[Nested] = []
        #: The leaves and the containers of the template, in order.
        self.leaves, self.branches = leaves, branches
        self._settled: list[tuple[Leaf, int]] = []
        self._empty: list[tuple[Branch, int]] = []
        #: Top-level entries that are wanted, those without a leaf too.
        self.top_level: list[Component] = []
        #: True if all of the store is inside what is wanted: a sequence of another length is a
        #: mismatch at the top as anywhere, since its places have no names.
        self.whole = False
        for leaf in leaves:
            self._add_leaf(leaf)
        for branch in branches:
            if not branch.components and _is_sequence(branch.value):
                self.whole = True
            if len(branch.components) == 1:
                self.top_level.append(branch.components[0])
            if not branch.children and _is_sequence(branch.value):
                self._add_empty(branch)

    def _add(
        self,
        where: Leaf | Branch,
        kind: str,
        dtype: str | None = None,
        shape: tuple[int, ...] | None = None,
        value: bool = False,
    ) -> int:
        self.rows.append((where.components, kind, dtype, shape, value))
        self.places.append(where)
        return len(self.places) - 1

    def _add_leaf(self, leaf: Leaf) -> None:
        structure = self._structure
        if leaf.optional:
            source = source_of(self._moves, leaf.components)
            if source is None or structure.find(source) is None:
                leaf.result = ...
                return
        if leaf.group is not None:
            self.rows.append(leaf.group)
            self.places.extend([leaf] * len(leaf.group))
            self.whole |= not leaf.components and _is_sequence(leaf.value)
            return
        if leaf.what == "skip":
            leaf.result = ...
            self._add(leaf, "skip")
            return
        if leaf.converts is not None:
            leaf.number = self._add(leaf, "any", value=True)
            return
        if leaf.what == "array" and leaf.spec is not None:
            spec = leaf.spec
            dtype = None if spec.dtype is None else native_name(spec.dtype)
            if dtype is not None and dtype not in _DTYPES:
                raise at_leaf(
                    UnsupportedLeaf,
                    leaf.path,
                    f"arrays of dtype {spec.dtype} are never stored; ask for what the checkpoint holds",
                )
            leaf.number = self._add(leaf, "tensor", dtype, spec.shape, leaf.has_array)
            return
        if self.groupable is not None and leaf.what == "stored" and leaf.value is AS_STORED:
            # One without leaves, of which nothing is read, does not match here.
            leaf.number = self._add(leaf, "any", value=leaf.check is not None)
            if leaf.check is None and self._to is None:
                self.groupable.append(leaf.number)
            return
        if leaf.what == "stored" or _is_sequence(leaf.value):
            # A subtree without leaves, or an empty sequence where the caller has a plain one: there
            # is nothing to read.
            node = structure.find(leaf.components)
            if node is not None and structure.is_container(node) and not structure.leaves_below(node):
                self._settled.append((leaf, node))
                return
        kind = "any" if leaf.what == "stored" else "object"
        is_described = leaf.value is AS_STORED or isinstance(leaf.value, (ObjectSpec, type))
        # An adapter has a value of its own where it checks the stored one.
        has_value = leaf.owner is not None or leaf.check is not None or not is_described
        leaf.number = self._add(leaf, kind, value=has_value)

    def _add_empty(self, branch: Branch) -> None:
        """An empty sequence of the caller where a plain one is stored, which is one object: what is
        stored is wanted."""
        node = self._structure.find(branch.components)
        if node is not None and not self._structure.is_container(node):
            self._empty.append((branch, self._add(branch, "object", value=True)))

    def check_types(self, objects: Objects) -> None:
        """A type in ``like`` is a demand on the stored object. An instance asks for a value of its
        kind."""
        wrong: list[WrongKind] = []
        for leaf in self.leaves:
            if leaf.what != "object" or leaf.converts is not None or isinstance(leaf.value, ObjectSpec):
                continue
            asked: type = leaf.value if isinstance(leaf.value, type) else type(leaf.value)
            for match in self._matches(leaf):
                value = _value(match, objects)
                if asked is leaf.value:
                    fits = isinstance(value, asked) and (asked is bool or not isinstance(value, bool))
                    fits = fits or (asked is float and type(value) is int)
                else:
                    fits = scalars.are_alike(leaf.value, value)
                if not fits:
                    stored = f"{type(value).__qualname__} {value!r:.60}"
                    wrong.append(WrongKind(leaf.path, stored, asked.__qualname__))
        if wrong:
            self._report.wrong_kind = wrong
            self._report.text = "\n".join(
                f"{named(one.path)}: stored is {one.stored}, wanted is {one.wanted}" for one in wrong
            )
            raise self._report.mismatch()

    def _matches(self, leaf: Leaf) -> list[Match]:
        return [] if leaf.number is None else self.matches[leaf.number]

    def try_states(self, objects: Objects, fill: bool) -> None:
        """Puts stored subtrees together, and tries the states of generators on new ones: what does
        not fit raises before anything of the caller's is changed."""
        for leaf, node in self._settled:
            self._made[leaf] = self._build(leaf, node, _nothing, None, fill)
        for leaf in self.leaves:
            if leaf.what != "stored" or not (matches := self._matches(leaf)):
                continue
            values = {match[0]: _value(match, objects) for match in matches}
            self._convert(leaf, [stored for stored, _, jobs in matches if jobs is not None], values)
            self._made[leaf] = self._subtree(leaf, values, fill)
        for leaf in self.leaves:
            if leaf.converts is not None:
                self._convert_scalar(leaf, objects)
            elif leaf in self._made:
                self._try(leaf, self._made[leaf])

    def _convert_scalar(self, leaf: Leaf, objects: Objects) -> None:
        """Converts a stored scalar to a wanted array without dimensions, or the other way round."""
        for match in self._matches(leaf):
            value = _value(match, objects)
            if leaf.converts == "array":
                asked: type = leaf.value if isinstance(leaf.value, type) else type(leaf.value)
                self._made[leaf] = scalars.as_scalar(leaf.path, value, asked)
                self._report.cast.append(CastLeaf(leaf.path, value.dtype.name, asked.__name__))
            elif leaf.spec is not None and leaf.spec.dtype is not None:
                self._made[leaf] = scalars.as_array(leaf.path, value, leaf.spec.dtype)
                self._report.cast.append(CastLeaf(leaf.path, type(value).__name__, leaf.spec.dtype.name))

    def _convert(self, leaf: Leaf, stored: list[int], values: dict[int, Any]) -> None:  # as stored
        """Arrays of a stored subtree as those of the framework that they are to be of: for an
        object those that its state had when it was saved, else what the caller asked for."""
        structure = self._structure
        by_library: dict[str, list[int]] = {}
        for number in stored:
            name = self._library_of(leaf, number)
            if name is not None:
                by_library.setdefault(name, []).append(number)
        for name, numbers in by_library.items():
            # Leaves that share an array share it afterwards.
            unique = list({id(values[number]): values[number] for number in numbers}.values())
            paths = {
                id(values[number]): structure.paths[structure.leaf_nodes[number]]
                for number in reversed(numbers)
            }
            try:
                if leaf.owner is not None:
                    made = adapters.arrays_where_used(name, unique)
                else:
                    made = adapters.arrays(
                        name, unique, self._place([paths[id(one)] for one in unique], unique)
                    )
            except adapters.DoesNotFit as failure:
                raise at_leaf(MismatchError, paths[id(unique[failure.number])], str(failure)) from None
            array_of = {id(one): array for one, array in zip(unique, made, strict=True)}
            for number in numbers:
                values[number] = array_of[id(values[number])]

    def takes_over(self, leaf: Leaf, stored: int) -> bool:
        """True if the array that a stored one becomes there takes over the memory into which it is
        read, so that no other may have it."""
        if leaf.target is not None:
            return leaf.target.takes_over
        name = self._library_of(leaf, stored) if leaf.what == "stored" else None
        return name is not None and adapters.takes_over(name)

    def _library_of(self, leaf: Leaf, stored: int) -> str | None:
        """Returns the library of a restored array. Without a stored object, or with one of another
        class, an object of a framework gets arrays of its own framework."""
        if leaf.owner is None:
            return self._to
        structure, owner = self._structure, leaf.owner[0]
        node = structure.object_of(stored)
        kind = None if node is None else structure.stateful_kind(node)
        if kind is None:
            return adapters.library_of(owner)
        found = library(kind)
        is_own = node != structure.find(leaf.components) or kind[1] == name_of(owner)
        return found if found is not None or is_own else adapters.library_of(owner)

    def _try(self, leaf: Leaf, state: object) -> None:
        if leaf.owner is not None:
            owner, protocol = leaf.owner
            try_on(self._report, leaf.path, owner, protocol, state)
        why = None if leaf.check is None else leaf.check(state)
        if why is not None:
            raise self._report.mismatch(why, leaf.path)

    def fill_results(self, objects: Objects, fill: bool) -> None:
        """Gives every leaf of the template its value."""
        for branch, number in self._empty:
            for match in self.matches[number]:
                branch.finish = partial(_finish_replaced, branch.value, _value(match, objects))
        for nested in self._nested:
            nested.load(self.given)
        made: dict[adapters.Finish, list[tuple[Leaf, adapters.Target, Read]]] = {}
        for leaf in self.leaves:
            if leaf in self._made and leaf.converts is None:
                state = self._made[leaf]
                leaf.result = state if leaf.owner is None else self._give(leaf, state, fill)
                continue
            if leaf.number is None:
                continue  # left out, or nothing to read
            matches = self.matches[leaf.number]
            if not matches:
                leaf.result = ... if leaf.is_new else leaf.value  # kept
                continue
            value = _value(matches[0], objects) if leaf.converts is None else self._made[leaf]
            if leaf.target is not None and (matches[0][2] is not None or leaf.converts is not None):
                made.setdefault(leaf.target.finish, []).append((leaf, leaf.target, cast(Read, value)))
            elif leaf.converts == "object":
                leaf.result = _filled(leaf, value, fill)
            else:
                leaf.result = _as_asked(leaf.value, value)
        for finish, found in made.items():
            # A leaf with several places in the target is made once, if it is tied in the store too.
            once = {
                (id(leaf.value), id(target.placement), id(value)): (leaf, target, value)
                for leaf, target, value in found
            }
            unique = list(once.values())
            try:
                results = finish([(target, value) for _, target, value in unique], fill)
            except adapters.DoesNotFit as failure:
                raise at_leaf(MismatchError, unique[failure.number][0].path, str(failure)) from None
            result_of = dict(zip(once, results, strict=True))
            for leaf, target, value in found:
                leaf.result = result_of[id(leaf.value), id(target.placement), id(value)]

    def _give(self, leaf: Leaf, state: object, fill: bool) -> object:
        """A stored state → the stateful object that it belongs to."""
        assert leaf.owner is not None
        owner, protocol = leaf.owner
        if not fill:
            return state if protocol.make is None else protocol.make(owner, state)
        self.given.append(leaf.path)
        give(leaf.path, owner, protocol, state)
        return owner

    def _subtree(self, leaf: Leaf, values: Mapping[int, object], fill: bool) -> object:
        """The stored containers around the leaves of a subtree: those below its own path, or where
        a rename took it from."""
        structure = self._structure
        node = structure.find(leaf.components)
        below = [] if node is None else structure.leaves_below(node)
        if node is None or not values.keys() <= set(below):
            chains = [_ancestors(structure, structure.leaf_nodes[stored]) for stored in values]
            node = next(one for one in chains[0] if all(one in chain for chain in chains))
            node = _of_owner(structure, node, leaf)
            below = structure.leaves_below(node)
        wanted = None if len(below) == len(values) else set(values)
        return self._build(leaf, node, values.__getitem__, wanted, fill)

    def _build(
        self, leaf: Leaf, node: int, value: Callable[[int], object], wanted: set[int] | None, fill: bool
    ) -> object:
        """The value of a stored subtree, with the stateful objects in it."""
        nested = Nested(self._structure, self._report, leaf, node, fill)
        self._nested.append(nested)
        return self._structure.build(node, value, wanted, nested.revive)


def _nothing(_: int) -> NoReturn:
    raise AssertionError("a container without leaves has no leaf")


def _ancestors(structure: Structure, node: int) -> list[int]:
    chain = [node]
    while structure.nodes[node][1] is not None:
        node = structure.nodes[node][0]
        chain.append(node)
    return chain


def _of_owner(structure: Structure, node: int, leaf: Leaf) -> int:
    """Returns, among the nodes with the same leaves as ``node``, the state of an object like the
    leaf's. If that state has one entry only, all of its leaves have that entry above them."""
    if leaf.owner is None:
        return node
    owner, protocol = leaf.owner
    alone = [
        one
        for one in _ancestors(structure, node)
        if len(structure.leaves_below(one)) == len(structure.leaves_below(node))
    ]
    kinds = [(one, structure.stateful_kind(one)) for one in alone]
    like = [(one, kind) for one, kind in kinds if kind is not None and protocol_name(kind) == protocol.name]
    exactly = [one for one, kind in like if kind[1] == name_of(owner)]
    return next(iter([*exactly, *(one for one, _ in like), node]))


def _is_sequence(value: object) -> bool:
    """True if a container of the caller's has places, and no names."""
    return type(value) in (list, tuple, deque)


def _finish_replaced(own: object, value: object, _pairs: object, fill: bool) -> object:
    if fill and isinstance(own, list) and isinstance(value, list):
        own[:] = value
        return own
    return value


def _as_asked(asked: object, value: object) -> object:
    """A stored object as the caller asks for it: an integer as ``float``; a list as a tuple, or a
    tuple as a list."""
    if asked is float and type(value) is int:
        return float(value)
    if type(asked) is list and type(value) is tuple:
        return list(value)
    if type(asked) is tuple and type(value) is list:
        return tuple(value)
    return value


def _filled(leaf: Leaf, value: object, fill: bool) -> object:
    """The caller's own array with a converted scalar, or the new array."""
    if not fill or not isinstance(leaf.value, np.ndarray):
        return value
    leaf.value[...] = value
    return leaf.value
