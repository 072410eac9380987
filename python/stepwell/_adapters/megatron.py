"""The Megatron adapter: sharded state dicts (``megatron.core.dist_checkpointing.mapping``).
Imported only if that module is.

There, the place of a leaf in its dict is this rank's own (every stage counts its layers from zero),
and the *key* of a leaf names it for all ranks: the layers of a model may be one tensor, of which
each ``ShardedTensor`` is a piece. So a state is *arranged* before it is taken apart: each leaf goes
from where it stands to its key, below the entry of the state that it is in, and what a restore
brings goes back to where the leaves stand.

A replicated tensor knows its replica's number, but nobody knows the number of replicas. So the main
replica writes it, as in Megatron.
"""

from __future__ import annotations

import re
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np
import torch
from megatron.core.dist_checkpointing.mapping import (
    LocalNonpersistentObject,
    ShardedObject,
    ShardedTensor,
    ShardedTensorFactory,
    is_main_replica,
)

from .._paths import Component, named, render
from .._restore.template import Checked
from .._state import layouts
from .._state.shards import FlatShard, LocalShard
from .._state.specs import ArraySpec
from .._types import Array, Read
from ..errors import StepwellError, UnsupportedLeaf, at_leaf
from . import Arranged, Target
from .torch import from_numpy

if TYPE_CHECKING:
    from .._state.leaves import Description

_LEAVES = (ShardedTensor, ShardedObject, ShardedTensorFactory, LocalNonpersistentObject)

#: Frequent classes that are not leaves of Megatron's: skipped without further checks.
_OTHERS = frozenset({int, float, bool, str, bytes, type(None), np.ndarray, torch.Tensor, torch.nn.Parameter})

#: Megatron's names for the model chunks of one rank in an interleaved pipeline. They say nothing
#: about a tensor.
_PART_OF_MODEL = re.compile(r"model\d+")

#: Nothing is left there.
_GONE = object()

#: A leaf of Megatron's. Its package has no types.
_Leaf: TypeAlias = Any
#: A container of the caller's, of a class that its copy has too.
_Tree: TypeAlias = Any

_Path = tuple[Component, ...]
#: A part of a key: the name of an object's shard, or the number of a tensor's piece.
_Which: TypeAlias = Any


@dataclass(slots=True, eq=False)
class _Joined:
    """This rank's part of one tensor: all leaves with its key."""

    members: list[tuple[_Leaf, layouts.Parts]] = field(default_factory=list)


def arrange(state: object, saving: bool) -> Arranged | None:
    """A state with its leaves at their keys; ``None`` where it has none of Megatron's."""
    arranging = _Arranging(state, saving)
    return Arranged(arranging.at_keys(), arranging.put_back) if arranging.found else None


class _Arranging:
    """The way to the keys, and the way back."""

    def __init__(self, state: object, saving: bool) -> None:
        self._state = state
        self._saving = saving
        self.found = False
        #: The content of each key, by the entry of the state.
        self._homes: dict[_Path, dict[str, _Joined | dict[str, object]]] = {}
        #: The place of each leaf, by its identity: the entry, the key, and its part there.
        self._places: dict[int, tuple[_Path, str, _Which]] = {}
        #: The results of factories, by identity. Kept alive here.
        self._built: dict[int, object] = {}
        #: Containers that hold leaves, at any depth.
        self._around: set[int] = set()
        self._open: set[int] = set()
        self._rest = self._without_leaves(state, (), ())

    # ---- to the keys ----

    def _without_leaves(self, value: _Tree, path: _Path, home: _Path) -> object:
        """What remains of a container when its leaves have gone to their keys below ``home``:
        itself, where it holds none."""
        if type(value) in _OTHERS:
            return value
        if isinstance(value, _LEAVES):
            self.found = True
            self._take(value, path, home)
            return _GONE
        children = _children(value)
        # One that is inside itself is refused by the walk that comes after this.
        if children is None or id(value) in self._open:
            return value
        self._open.add(id(value))
        rest = []
        for component, child in children:
            inside = home if path or isinstance(child, _LEAVES) else (_entry(component),)
            rest.append((component[1], child, self._without_leaves(child, (*path, component), inside)))
        self._open.remove(id(value))
        if all(left is child for _, child, left in rest):
            return value
        self._around.add(id(value))
        pairs = [(key, left) for key, _, left in rest if left is not _GONE]
        if not pairs:
            return _GONE
        if isinstance(value, dict):
            return type(value)(pairs)
        # A sequence that has lost elements becomes a dict, so that the others keep their numbers.
        return type(value)(left for _, left in pairs) if len(pairs) == len(rest) else dict(pairs)

    def _take(self, leaf: _Leaf, path: _Path, home: _Path) -> None:
        if isinstance(leaf, LocalNonpersistentObject) or id(leaf) in self._places or id(leaf) in self._built:
            return
        if isinstance(leaf, ShardedTensorFactory):
            try:
                built = leaf.build()
            except Exception as failure:
                failure.add_note(f"while the ShardedTensorFactory at {named(render(path))} built its tensors")
                raise
            self._built[id(leaf)] = built
            self._without_leaves(built, (*path, ("k", leaf.key)), home)
            return
        there = self._homes.setdefault(home, {})
        where = render((*home, ("k", leaf.key)))
        made: _Joined | dict[str, object] = _Joined() if isinstance(leaf, ShardedTensor) else {}
        found = there.setdefault(leaf.key, made)
        if type(found) is not type(made):
            raise at_leaf(UnsupportedLeaf, where, "a ShardedTensor and a ShardedObject have this key")
        if isinstance(found, dict):
            shard = leaf.unique_key.removeprefix(f"{leaf.key}/")
            self._places[id(leaf)] = (home, leaf.key, shard)
            if not self._saving:
                found[shard] = Checked(_anything)
            elif is_main_replica(leaf.replica_id):
                found[shard] = leaf.data
            return
        with _at(where):
            parts = _parts(leaf, self._saving)
        if found.members:
            other = found.members[0][0]
            one, two = ((one.dtype, tuple(one.global_shape)) for one in (other, leaf))
            if one != two:
                raise at_leaf(
                    UnsupportedLeaf,
                    where,
                    f"ShardedTensors of this key say that it is {one[0]} of shape {one[1]}, and {two[0]} of shape {two[1]}",
                )
        self._places[id(leaf)] = (home, leaf.key, len(found.members))
        found.members.append((leaf, parts))

    def at_keys(self) -> dict[str | int, object]:
        """The state, each leaf at its key."""
        state: dict[str | int, object] = dict(self._rest) if isinstance(self._rest, dict) else {}
        for home, leaves in self._homes.items():
            # Of an object whose main replica others have there is nothing here.
            here = {key: leaf for key, leaf in leaves.items() if leaf != {}}
            there = state
            if home and here:
                name = home[0][1]
                beside = state.get(name, {})
                if not isinstance(beside, dict):
                    raise at_leaf(
                        UnsupportedLeaf,
                        render(home),
                        "keys of Megatron's go here, and something else stands here; rename that",
                    )
                there = state[name] = beside.copy()
            for key, leaf in here.items():
                if key in there:
                    raise at_leaf(
                        UnsupportedLeaf,
                        render((*home, ("k", key))),
                        "an entry of this name stands beside a ShardedTensor or ShardedObject of this key; rename the entry",
                    )
                there[key] = leaf
        return state

    # ---- and back ----

    def put_back(self, restored: dict[str | int, object], fill: bool) -> object:
        """The caller's structure with what was restored. Filled: its leaves, whose data is the new
        one; else what they stand for, as Megatron's ``load`` gives it."""
        return self._back(self._state, restored, restored, fill)

    def _back(self, value: _Tree, here: _Tree, restored: dict[str | int, object], fill: bool) -> object:
        """``here``: what was restored of it, without its leaves."""
        if isinstance(value, _LEAVES):
            return self._leaf(value, restored, fill)
        children = _children(value)
        if children is None or id(value) not in self._around:
            return here
        left = {} if here is _GONE else here if isinstance(here, dict) else dict(enumerate(here))
        pairs = [
            (component[1], self._back(child, left.get(component[1], _GONE), restored, fill))
            for component, child in children
        ]
        if isinstance(value, dict):
            if fill:
                value.update(pairs)
                return value
            return type(value)(pairs)
        values = [one for _, one in pairs]
        if fill and isinstance(value, list):
            value[:] = values
            return value
        return type(value)(values)

    def _leaf(self, leaf: _Leaf, restored: dict[str | int, object], fill: bool) -> object:
        if isinstance(leaf, LocalNonpersistentObject):
            return leaf if fill else leaf.unwrap()
        if isinstance(leaf, ShardedTensorFactory):
            new = leaf.merge_fn(self._back(self._built[id(leaf)], _GONE, restored, False))
            if fill and leaf.data is not None:
                # The parts may be the data's own memory, and need not.
                with torch.no_grad():
                    leaf.data.copy_(new)
                new = leaf.data
        else:
            home, key, which = self._places[id(leaf)]
            found: _Tree = restored[home[0][1]] if home else restored
            found = found[key]
            if isinstance(leaf, ShardedObject):
                new = _with_tensors(found[which], leaf.data)
            else:
                # An optional leaf that was not stored keeps its value.
                new = found[which] if type(found) is list else leaf.data
        if not fill:
            return new
        leaf.data = new
        return leaf


def _children(value: _Tree) -> list[tuple[Component, object]] | None:
    """Returns the children of the containers that Megatron walks: dicts, lists and tuples."""
    if type(value) in (dict, OrderedDict):
        return [(("i" if type(key) is int else "k", key), child) for key, child in value.items()]
    if type(value) in (list, tuple):
        return [(("x", number), child) for number, child in enumerate(value)]
    return None


def _entry(component: Component) -> Component:
    """Below which entry of the state the leaves of one have their keys."""
    tag, name = component
    return ("k", "model") if tag == "k" and _PART_OF_MODEL.fullmatch(str(name)) else component


def _run(leaf: _Leaf) -> slice | None:
    """Returns the leaf's run of the flattened part, unless it has all of it. Few versions still
    have this."""
    run: slice | None = getattr(leaf, "flattened_range", None)
    return run


def _anything(stored: object) -> str | None:
    """Accepts any stored object."""
    return None


def _parts(leaf: _Leaf, saving: bool) -> layouts.Parts:
    """Returns this rank's boxes of a tensor, with their places."""
    run = _run(leaf)
    extent = (1,) * leaf.prepend_axis_num + tuple(leaf.local_shape)
    if leaf.data is not None:
        data = leaf.data.detach()
    elif saving:
        raise UnsupportedLeaf("a ShardedTensor without data belongs into like=, not into a state")
    else:
        shape = leaf.local_shape if run is None else (run.stop - run.start,)
        data = torch.empty(shape, dtype=leaf.dtype, device="meta")
    if run is None:
        parts = LocalShard(
            data[(None,) * leaf.prepend_axis_num], leaf.global_shape, leaf.global_offset
        ).parts()
    else:
        own = LocalShard(ArraySpec(extent), leaf.global_shape, leaf.global_offset)
        if run.stop - run.start != data.numel():
            raise UnsupportedLeaf(
                f"its flattened_range {run} has not the {data.numel()} elements of its data"
            )
        parts = FlatShard(data, own, run.start).parts()
    parts.what = leaf
    if leaf.allow_shape_mismatch and not saving:
        parts.global_shape, parts.pads = None, True
    return parts


def _with_tensors(value: _Tree, own: _Tree) -> object:
    """A stored object, with tensors where the caller's own has tensors."""
    if isinstance(value, np.ndarray) and isinstance(own, torch.Tensor):
        made = from_numpy(value)
        return made.to(own.device) if isinstance(made, torch.Tensor) else made
    if isinstance(value, dict) and isinstance(own, dict):
        return type(value)((key, _with_tensors(one, own.get(key))) for key, one in value.items())
    if type(value) in (list, tuple) and type(own) is type(value):
        padded = [*own, *[None] * (len(value) - len(own))]
        return type(value)(_with_tensors(one, other) for one, other in zip(value, padded, strict=False))
    return value


@contextmanager
def _at(path: str) -> Iterator[None]:
    """Has what is wrong with a leaf name it."""
    try:
        yield
    except StepwellError as error:
        raise at_leaf(UnsupportedLeaf, path, str(error)) from error


# ---- the protocol of adapters
# ---------------------------------------------------------------------------------------


def describe(obj: object) -> Description | None:
    """All that this rank writes of one tensor: what it has the main replica of."""
    if type(obj) is _Joined:
        held: list[object] = []
        for leaf, parts in obj.members:
            one = layouts.describe(parts)
            if one[0] == "refuse":
                return one
            kind, dtype, shape, pieces, library = one
            if is_main_replica(leaf.replica_id):
                held += pieces
        return (kind, dtype, shape, held, library)
    if isinstance(obj, _LEAVES):
        return (
            "refuse",
            f"a {type(obj).__name__} of Megatron stands in a dict or a list, directly or below others, and not in any other object",
        )
    return None


def target(obj: object) -> Target | None:
    """All that this rank wants of one tensor."""
    if type(obj) is not _Joined:
        return None
    wanted = [layouts.target(parts) for _, parts in obj.members]
    return Target(
        wanted[0].spec,
        _finish,
        obj,
        has_value=all(one.has_value for one in wanted),
        boxes=[box for one in wanted for box in one.boxes or ()],
        memories=[memory for one in wanted for memory in one.memories or ()],
        pads=any(one.pads for one in wanted),
        unfillable=next((one.unfillable for one in wanted if one.unfillable is not None), None),
    )


def _finish(found: list[tuple[Target, Read]], fill: bool) -> list[object]:
    """For each tensor: the data of its leaves."""
    results: list[object] = []
    for one, values in found:
        assert isinstance(one.value, _Joined)
        results.append(_data(one.value, values if isinstance(values, list) else [values], fill))
    return results


def _data(joined: _Joined, values: list[Array], fill: bool) -> list[object]:
    left = iter(values)
    found: list[object] = []
    for leaf, parts in joined.members:
        local: _Leaf = layouts.filled(parts.local, [(piece, next(left)) for piece in parts.pieces], fill)
        if local is parts.local:
            found.append(leaf.data)
        else:
            found.append(local if _run(leaf) is not None else local.reshape(leaf.local_shape))
    return found
