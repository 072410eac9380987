"""The walk over a ``like`` or ``into``: what is wanted at which leaf path, and how the answer is
put together again.

The structure is the caller's. Leaf paths are those of a save of the same structure (the engine's
walk over a state uses the same :func:`.leaves.describe`). A ``like`` is never changed: new
containers are made. An ``into`` keeps its identity where it can be changed in place: dicts, lists,
dataclasses, arrays, stateful objects.
"""

from __future__ import annotations

import copy
import dataclasses
import enum
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from .. import _adapters as adapters
from .._core import MAX_DEPTH, ArrayGroup, array_group, is_plain
from .._paths import Component, named, render
from .._state import layouts, providers, stateful
from .._state.leaves import describe
from .._state.registry import is_namedtuple_class, of_class, stored_name
from .._state.shards import FlatShard, LocalShard, Segments
from .._state.specs import AS_STORED, ArraySpec, ObjectSpec, PerRank, Replicated, current_rank
from ..errors import MismatchError, MisuseError, StepwellError, UnsupportedLeaf, at_leaf

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

#: The kind of a wanted leaf: an array; an object; anything, also a whole subtree; a group of
#: arrays; nothing.
What: TypeAlias = Literal["array", "object", "stored", "group", "skip"]
#: Children of a container by the caller's keys; of a wrapper with one child, its key is empty.
Pairs: TypeAlias = list[tuple[str | int, object]]
#: Puts a container together from its restored children, in place or as a new one.
Finish: TypeAlias = Callable[[Pairs, bool], object]
#: A description of an array: its shape and dtype.
Described: TypeAlias = "ArraySpec | np.ndarray"


class Leaf:
    """One place of the caller's structure where a value is wanted. There may be many thousand, so
    what most of them lack is a default of the class."""

    #: The stateful object that a stored subtree goes into.
    owner: tuple[object, stateful.Protocol] | None = None
    #: The framework's target, and how its value is made.
    target: adapters.Target | None = None
    #: True if it may be missing from the store: the result is then ``...``.
    optional: bool = False
    #: True if ``value`` is memory made for this restore. The result is ``...`` if nothing is read.
    is_new: bool = False
    #: Why what is stored does not fit, where it does not: asked before anything of the caller's is
    #: changed.
    check: Callable[[object], str | None] | None = None
    #: The stored kind, if a scalar is wanted where an array without dimensions is stored
    #: ("array"), or the other way round ("object"); see :mod:`stepwell._restore.scalars`.
    converts: Literal["array", "object"] | None = None
    #: The arrays of a plain subtree, where it stands for one: a "group" of the caller's, or
    #: ``AS_STORED``, once it is matched.
    group: ArrayGroup | None = None
    #: The number of its request in the match; ``None``: nothing is asked for.
    number: int | None = None
    #: Set when the value is known.
    result: object = None

    def __init__(
        self,
        components: tuple[Component, ...],
        what: What,
        value: object,
        spec: Described | None = None,
    ) -> None:
        self.components = components
        self.what = what
        #: The caller's own value: an array, a spec, a scalar, a type.
        self.value = value
        #: Shape and dtype of a wanted array.
        self.spec = spec

    @property
    def path(self) -> str:
        """Its rendered path."""
        return render(self.components)

    @property
    def array(self) -> np.ndarray | adapters.OnDevice | None:
        """The memory of the caller's own array, where there is one that can be filled."""
        if self.target is not None:
            return self.target.memory
        return self.value if isinstance(self.value, np.ndarray) else None

    @property
    def memory(self) -> Hashable:
        """Identifies the memory of that array. Tied leaves have the same."""
        array = self.array
        if array is None or 0 in array.shape:
            return None
        if isinstance(array, np.ndarray):
            return array.ctypes.data, array.shape, array.strides
        own = array.array
        address = getattr(own, "data_ptr", None)
        return address() if callable(address) else id(own), array.shape, array.strides

    @property
    def has_array(self) -> bool:
        """True if the caller has an array there, which can stay as it is."""
        if self.target is not None:
            return self.target.has_value
        return not isinstance(self.value, (ArraySpec, type))


@dataclass(slots=True)
class Maybe:
    """In what an adapter takes apart: wanted where it is stored, and ``...`` where nothing is."""

    value: object
    #: True if its tensors are memory made for this restore: ``...`` too where nothing is read.
    is_new: bool = False


@dataclass(slots=True)
class Checked:
    """In what an adapter takes apart: whatever is stored there, of which ``check`` says why it does
    not fit (``None``: it does)."""

    check: Callable[[object], str | None]


@dataclass(slots=True)
class Branch:
    """A container of the caller's structure."""

    value: object
    components: tuple[Component, ...]
    children: list[tuple[str | int, Part]]
    finish: Finish
    #: Why it cannot be filled, where it cannot.
    unfillable: str | None = None
    #: The value of this rank, where it differs on all of them.
    per_rank: PerRank[object] | None = None
    #: The child that is looked at before the rest is matched, and why a stored value of it does not
    #: fit.
    first: tuple[Component, Callable[[object], str | None]] | None = None
    #: Returns the children for the outline of what is stored there; see ``adapters.Opened.settle``.
    settle: Callable[[object, dict[str, str], adapters.CastOf], list[tuple[str | int, Part]]] | None = None
    #: The entries that move with others; see ``adapters.Opened.follows``.
    follows: adapters.Follows | None = None
    #: A step of all ranks after a restore; see ``adapters.Opened.together``.
    together: Callable[[], None] | None = None

    @property
    def path(self) -> str:
        """Its rendered path."""
        return render(self.components)


Part: TypeAlias = Leaf | Branch


def parse(target: object, groups: Literal["fill", "make"] | None = None) -> Part:
    """Takes the caller's structure apart. With ``groups``, a plain subtree of arrays is one leaf:
    the restore is to fill them, or to make others."""
    arranged = adapters.arrange(target)
    if arranged is None:
        return _part(target, (), Above(groups))
    part = _part(arranged.state, (), Above())
    assert isinstance(part, Branch)
    part.finish = lambda pairs, fill: arranged.put_back(dict(pairs), fill)
    return part


def finish(part: Part, fill: bool) -> object:
    """Puts the caller's structure together from the leaves' results; ``fill``: in place where that
    is possible."""
    if isinstance(part, Leaf):
        return part.result
    pairs = [
        (key, child.result if isinstance(child, Leaf) else finish(child, fill))
        for key, child in part.children
    ]
    return part.finish(pairs, fill)


def as_state(like: object) -> object:
    """A state of the arrays that a ``like`` describes, in place of whose specs stand arrays that
    take no memory."""
    part = parse(like)
    for leaf in leaves(part):
        # A framework object that takes its state as stored has no size in advance.
        theirs = leaf.value is AS_STORED and (leaf.optional or leaf.check is not None)
        nothing = theirs or isinstance(leaf.value, (ObjectSpec, type))
        leaf.result = None if nothing else leaf.value
        if leaf.spec is not None and not leaf.has_array:
            shape, dtype = leaf.spec.shape, leaf.spec.dtype
            if leaf.target is not None and isinstance(leaf.target.value, layouts.Parts):
                shape = leaf.target.value.local.shape
            if shape is None or dtype is None:
                raise at_leaf(
                    MisuseError,
                    leaf.path,
                    f"{leaf.spec} does not say how large it is; give shape and dtype",
                )
            try:
                leaf.result = np.broadcast_to(np.zeros((), dtype), shape)
            except ValueError as error:
                raise at_leaf(MisuseError, leaf.path, f"{leaf.spec} is larger than any memory") from error
    return finish(part, False)


def walk(part: Part) -> tuple[list[Leaf], list[Branch]]:
    """Returns all leaves and all containers, in order."""
    found: tuple[list[Leaf], list[Branch]] = [], []
    pending = [part]
    while pending:
        one = pending.pop()
        if isinstance(one, Leaf):
            found[0].append(one)
        else:
            found[1].append(one)
            pending.extend([child for _, child in reversed(one.children)])
    return found


def leaves(part: Part) -> list[Leaf]:
    """All leaves, in order."""
    return walk(part)[0]


def check_fillable(leaves: list[Leaf], branches: list[Branch]) -> None:
    """Raises where something of the caller's cannot be filled, before anything is read."""
    for branch in branches:
        if branch.unfillable is not None:
            raise _refused(branch.components, f"cannot be restored into: {branch.unfillable}")
    for leaf in leaves:
        if leaf.target is not None and leaf.target.unfillable is not None:
            raise _refused(leaf.components, f"cannot be restored into: {leaf.target.unfillable}")
        if leaf.owner is not None and (why := adapters.why_not_loaded(leaf.owner[0])) is not None:
            raise _refused(leaf.components, f"cannot be restored into: {why}")


def enum_classes(leaves: list[Leaf]) -> dict[str, type]:
    """The enum classes that the caller's own values name, by stored name."""
    found: dict[str, type] = {}
    for leaf in leaves:
        if leaf.what == "object":
            _collect_enums(leaf.value, found, 0)
    return found


def _collect_enums(value: object, found: dict[str, type], depth: int) -> None:
    if isinstance(value, enum.Enum):
        found[stored_name(type(value))] = type(value)
    elif isinstance(value, type) and issubclass(value, enum.Enum):
        found[stored_name(value)] = value
    elif isinstance(value, (list, tuple, set, frozenset, deque)) and depth < MAX_DEPTH:
        for one in value:
            _collect_enums(one, found, depth + 1)


@dataclass(frozen=True, slots=True)
class Above:
    """The containers above a value, and whether it may be a group."""

    #: See :func:`parse`.
    groups: Literal["fill", "make"] | None = None
    #: The containers around it, outermost first, with their places.
    containers: tuple[tuple[object, tuple[Component, ...]], ...] = ()


def _part(value: object, at: tuple[Component, ...], above: Above) -> Part:
    cls = type(value)
    # The class decides; what follows it is for the type checker.
    if cls is np.ndarray and isinstance(value, np.ndarray):
        return Leaf(at, "array", value, value)
    if above.groups and (cls is dict or cls is list):
        group = array_group(value, at, len(above.containers), above.groups == "fill")
        if group is not None:
            leaf = Leaf(at, "group", value)
            leaf.group, leaf.result = group, value
            return leaf
    if cls is dict and isinstance(value, dict):
        return _branch(value, at, above, _keys(value.items(), at), partial(_finish_dict, value))
    if cls is ArraySpec and isinstance(value, ArraySpec):
        return Leaf(at, "array", value, value)
    if value is AS_STORED:
        return Leaf(at, "stored", value)
    if value is ...:
        return Leaf(at, "skip", value)
    if cls is ObjectSpec or value is None or cls in _SCALARS:
        return Leaf(at, "object", value)
    if isinstance(value, type):
        return _type_leaf(value, at)
    if cls is Maybe and isinstance(value, Maybe):
        part = _part(value.value, at, Above(None, above.containers))
        for leaf in leaves(part):
            leaf.optional = True
            leaf.is_new = value.is_new
        return part
    if cls is Checked and isinstance(value, Checked):
        checked = Leaf(at, "stored", AS_STORED)
        checked.check = value.check
        return checked
    if (cls is list or cls is tuple) and isinstance(value, (list, tuple)):
        if value and is_plain(value):
            return Leaf(at, "object", value)
        make = partial(_finish_list, value) if isinstance(value, list) else _finish_tuple
        return _branch(value, at, above, _places(value), make)
    return _other(value, at, above)


_SCALARS = frozenset({bool, int, float, complex, str, bytes, bytearray, set, frozenset})


def _other(value: object, at: tuple[Component, ...], above: Above) -> Part:
    if isinstance(value, Replicated):
        inner = _part(value.value, at, _inside(value, at, above))
        return Branch(value, at, [("", inner)], _finish_wrapper)
    if isinstance(value, PerRank):
        own: list[tuple[Component, object]] = [(("k", value.stored_key()), value.value)]
        branch = _branch(value, at, above, own, partial(_finish_per_rank, value))
        branch.per_rank = value
        return branch
    if type(value) is Segments and value.is_named:
        tensors: list[tuple[Component, object]] = [
            (("k", name), parts) for name, parts in value.tensors().items() if name is not None
        ]
        return _branch(value, at, above, tensors, partial(_finish_segments, value))
    array = _target(value, at)
    if array is not None:
        return _target_leaf(value, at, array)
    if isinstance(value, np.ndarray):
        value = np.asarray(value)
        return Leaf(at, "array", value, value)
    registered = of_class(type(value))
    is_custom = registered is not None and registered.flatten is not None
    opened = None if is_custom else adapters.branch(value)
    if opened is not None:
        close = opened.close
        branch = _branch(value, at, above, opened.children, close)
        branch.unfillable, branch.first = opened.unfillable, opened.first
        branch.follows, branch.together = opened.follows, opened.together
        if (settle := opened.settle) is not None:
            branch.settle = lambda stored, moved, cast_of: (
                _branch(value, at, above, settle(stored, moved, cast_of), close).children
            )
        return branch
    protocol = None if is_custom else stateful.protocol_of(value)
    if protocol is not None:
        leaf = Leaf(at, "stored", value)
        leaf.owner = (value, protocol)
        return leaf
    try:
        description = describe(value)
    except Exception as failure:
        failure.add_note(f"while the {type(value).__name__} at {named(render(at))} was taken apart")
        raise
    if description[0] == "mapping" and isinstance(value, (OrderedDict, defaultdict)):
        return _branch(value, at, above, _keys(description[2], at), partial(_finish_mapping, value))
    if description[0] == "deque" and isinstance(value, deque):
        if value and is_plain(description[2]):
            return Leaf(at, "object", value)
        return _branch(value, at, above, _places(value), partial(_finish_deque, value))
    if description[0] == "fields":
        fields: list[tuple[Component, object]] = [(("f", str(name)), one) for name, one in description[3]]
        if dataclasses.is_dataclass(value) and not isinstance(value, type):
            return _branch(value, at, above, fields, partial(_finish_dataclass, value))
        return _branch(value, at, above, fields, partial(_finish_namedtuple, type(value)))
    if description[0] == "custom" and registered is not None and registered.unflatten is not None:
        unflatten = registered.unflatten
        make_custom = lambda pairs, _fill: unflatten(dict(pairs))  # noqa: E731
        return _branch(value, at, above, _keys(description[2], at), make_custom)
    if description[0] == "refuse":
        raise _refused(at, description[1])
    return Leaf(at, "object", value)


def _target_leaf(value: object, at: tuple[Component, ...], array: adapters.Target) -> Leaf:
    leaf = Leaf(at, "array", value, array.spec)
    leaf.target = array
    return leaf


def _inside(value: object, at: tuple[Component, ...], above: Above) -> Above:
    """Returns the containers around a container's children. Raises for a cycle, and for endless
    nesting."""
    for one, place in above.containers:
        if one is value:
            kind = type(value).__qualname__
            where = f"the {kind} at `{render(place)}`" if place else f"the whole structure (a {kind})"
            raise _refused(at, f"a cycle: {where} is inside itself here; leave this reference out")
    if len(above.containers) >= MAX_DEPTH:
        raise _refused(at, f"nested more than {MAX_DEPTH} deep; flatten it")
    return Above(above.groups, (*above.containers, (value, at)))


def _refused(at: tuple[Component, ...], why: str) -> UnsupportedLeaf:
    return at_leaf(UnsupportedLeaf, render(at), why)


def _branch(
    value: object,
    at: tuple[Component, ...],
    above: Above,
    children: list[tuple[Component, object]],
    make: Finish,
) -> Branch:
    above = _inside(value, at, above)
    parts = [(component[1], _part(child, (*at, component), above)) for component, child in children]
    return Branch(value, at, parts, make)


def _keys(
    items: Iterable[tuple[object, object]], at: tuple[Component, ...]
) -> list[tuple[Component, object]]:
    found: list[tuple[Component, object]] = []
    for key, value in items:
        if type(key) is str:
            found.append((("k", key), value))
        elif type(key) is int:
            found.append((("i", key), value))
        else:
            raise _refused(at, f"keys are str or int; {key!r} is a {type(key).__name__}")
    return found


def _places(values: Iterable[object]) -> list[tuple[Component, object]]:
    return [(("x", number), value) for number, value in enumerate(values)]


def _target(value: object, at: tuple[Component, ...]) -> adapters.Target | None:
    """Returns the target of a framework's array. Refuses an unsuitable tensor by path."""
    try:
        with naming(at, "its sharding does not fit it"):
            if isinstance(value, layouts.Parts):
                return layouts.target(value)
            if isinstance(value, (LocalShard, FlatShard, Segments)):
                return layouts.target(value.parts())
            return providers.target(value) if providers.is_provider(value) else adapters.target(value)
    except UnsupportedLeaf as error:
        raise _refused(at, str(error)) from error


class naming:
    """Has what a framework says of a place name the leaf."""

    __slots__ = ("_at", "_what")

    def __init__(self, at: str | tuple[Component, ...], what: str) -> None:
        self._at = at
        self._what = what

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: object, failure: BaseException | None, __: object) -> None:
        if failure is None:
            return
        path = self._at if isinstance(self._at, str) else render(self._at)
        if isinstance(failure, StepwellError):
            failure.leaf = failure.leaf or path
        elif isinstance(failure, ValueError):
            raise at_leaf(MismatchError, path, f"{self._what}: {failure}") from failure


def _type_leaf(value: type, at: tuple[Component, ...]) -> Leaf:
    if value is np.ndarray:
        return Leaf(at, "array", value, ArraySpec())
    array = _target(value, at)
    if array is not None:
        return _target_leaf(value, at, array)
    if value in _SCALARS or issubclass(value, (np.generic, enum.Enum)) or value is type(None):
        return Leaf(at, "object", value)
    raise at_leaf(
        MisuseError,
        render(at),
        f"a like= takes the types numpy.ndarray, torch.Tensor, jax.Array, int, float, complex, bool, str, bytes and enums, "
        f"not {value.__qualname__}; pass an ArraySpec, an instance, or sw.AS_STORED",
    )


def _finish_dict(own: dict[str | int, object], pairs: Pairs, fill: bool) -> object:
    if fill:
        own.update(pairs)
        return own
    return dict(pairs)


def _finish_mapping(
    own: OrderedDict[str | int, object] | defaultdict[str | int, object], pairs: Pairs, fill: bool
) -> object:
    if fill:
        own.update(pairs)
        return own
    if isinstance(own, defaultdict):
        return defaultdict(own.default_factory, pairs)
    return OrderedDict(pairs)


def _finish_list(own: list[object], pairs: Pairs, fill: bool) -> object:
    values = [value for _, value in pairs]
    if fill:
        own[:] = values
        return own
    return values


def _finish_tuple(pairs: Pairs, _fill: bool) -> object:
    return tuple(value for _, value in pairs)


def _finish_deque(own: deque[object], pairs: Pairs, fill: bool) -> object:
    values = [value for _, value in pairs]
    if fill:
        own.clear()
        own.extend(values)
        return own
    return deque(values, own.maxlen)


def _finish_namedtuple(cls: type, pairs: Pairs, _fill: bool) -> object:
    assert is_namedtuple_class(cls)
    return cls._make(value for _, value in pairs)


def _finish_dataclass(own: DataclassInstance, pairs: Pairs, fill: bool) -> object:
    frozen = type(own).__dataclass_params__.frozen  # type: ignore[attr-defined]  # of typeshed
    target = own if fill and not frozen else copy.copy(own)
    known = {field.name for field in dataclasses.fields(target)}
    for name, value in pairs:
        if name in known:
            object.__setattr__(target, str(name), value)
    return target


def check_ranks(branch: Branch, stored: list[str]) -> None:
    """Settles which of the stored values a rank gets: that of its own key; that of its rank, where
    as many ranks saved; else what ``resize`` makes of all of them."""
    rank, world = current_rank.get()
    value = branch.per_rank
    if value is None or (value.stored_key() in stored and (value.key is not None or len(stored) == world)):
        return
    resize = value.resize
    if resize is None:
        count = len(stored)
        saved = f"saved by {count} ranks" if all(map(str.isdigit, stored)) else f"stored under {count} keys"
        raise at_leaf(
            MismatchError,
            branch.path,
            f"{saved} ({', '.join(stored[:8])}{', …' if len(stored) > 8 else ''}), and wanted by {world}, this one as "
            f"{value.stored_key()!r}: which value is whose? Pass PerRank(…, resize=fn), where fn(values, rank, world_size) gives this rank its own, or leave it out (...)",
        )
    branch.children = [("", Leaf(branch.components, "stored", AS_STORED))]

    def finish_resized(pairs: Pairs, fill: bool) -> object:
        there = pairs[0][1]
        assert isinstance(there, dict)
        found = resize([there[key] for key in sorted(there, key=_by_number)], rank, world)
        protocol = stateful.protocol_of(value.value)
        if fill and protocol is not None:
            # A stored generator comes as one.
            state = protocol.get(found) if type(found) is type(value.value) else found
            stateful.give(branch.path, value.value, protocol, state)
            return value
        return PerRank(found, value.key, resize)

    branch.finish = finish_resized


def _by_number(key: str | int) -> tuple[int, int, str]:
    """Ranks by their numbers, other keys as text."""
    return (0, int(key), "") if str(key).isdigit() else (1, 0, str(key))


def _finish_per_rank(own: PerRank[object], pairs: Pairs, _fill: bool) -> object:
    return PerRank(pairs[0][1], own.key, own.resize)


def _finish_segments(own: Segments, pairs: Pairs, fill: bool) -> object:
    return own.put_together({str(name): value for name, value in pairs}, fill)


def _finish_wrapper(pairs: Pairs, _fill: bool) -> object:
    return Replicated(pairs[0][1])
