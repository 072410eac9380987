"""The differences between two checkpoints: structure, kinds, dtypes, shapes, values. Values of both
sides are read piece by piece, so memory stays bounded."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import numpy as np

from .._paths import starts_with
from .._state.leaves import Reviver
from .._state.specs import to_dtype
from .reading import PIECE_BYTES, Part, pieces, read_parts
from .tree import Tree

#: Told how many bytes of one side are compared, and how many there are.
Tell: TypeAlias = Callable[[int, int], None]


@final
@dataclass(slots=True)
class Values:
    """How the values of one leaf differ."""

    elements: int
    #: Elements that are not the same bits; where the dtypes differ, not the same numbers.
    differing: int = 0
    #: Largest absolute difference: NaN where one side is NaN and the other is not.
    max_abs: float = 0.0


@final
@dataclass(slots=True)
class Change:
    """A leaf or container that both have, and that is not the same."""

    path: str
    #: The kinds of both sides, if they differ: a container's kind, ``array`` or ``object``, or the
    #: types of two objects.
    kind: tuple[str, str] | None = None
    dtype: tuple[str, str] | None = None
    shape: tuple[tuple[int, ...], tuple[int, ...]] | None = None
    values: Values | None = None
    #: Objects that differ.
    objects: tuple[Any, Any] | None = None


@final
@dataclass(slots=True)
class Difference:
    """The differences between two checkpoints."""

    #: Leaves, and the topmost containers or leaves that hold all of them.
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    top_a: list[tuple[str, int]] = field(default_factory=list)
    top_b: list[tuple[str, int]] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    #: Leaves that both have.
    common: int = 0
    #: Bytes that were read of each side.
    compared_bytes: int = 0

    @property
    def found(self) -> bool:
        """True if there is any."""
        return bool(self.top_a or self.top_b or self.changes)


def compare(a: Tree, b: Tree, values: bool, tell: Tell) -> Difference:
    """Compares two checkpoints that are open; ``values``: also what their leaves hold."""
    found = Difference()
    nodes_a = {path: node for node, path in enumerate(a.structure.paths)}
    nodes_b = {path: node for node, path in enumerate(b.structure.paths)}
    found.only_a, found.top_a = _only(a, nodes_b)
    found.only_b, found.top_b = _only(b, nodes_a)
    changes: dict[str, Change] = {}
    arrays: list[tuple[int, int]] = []
    objects: list[tuple[int, int]] = []
    for path, node_a in nodes_a.items():
        node_b = nodes_b.get(path)
        if node_b is None:
            continue
        is_leaf = not a.structure.is_container(node_a) and not b.structure.is_container(node_b)
        found.common += is_leaf
        change = _unlike(a, node_a, b, node_b)
        if change is not None:
            changes[path] = change
        if is_leaf and values and (change is None or (change.kind is None and change.shape is None)):
            pair = (_leaf(a, node_a), _leaf(b, node_b))
            leaf_a, leaf_b = a.leaves[pair[0]], b.leaves[pair[1]]
            if leaf_a.kind == "object":
                objects.append(pair)
            elif leaf_a.tied_to is None or leaf_a.tied_to != leaf_b.tied_to:
                arrays.append(pair)
    for path, one in _objects(a, b, objects):
        kinds = (type(one[0]).__name__, type(one[1]).__name__)
        changes[path] = Change(path, kind=None if kinds[0] == kinds[1] else kinds, objects=one)
    for path, counted in _arrays(a, b, arrays, found, tell):
        changes.setdefault(path, Change(path)).values = counted
    order = {path: number for number, path in enumerate(nodes_a)}
    found.changes = sorted(changes.values(), key=lambda change: order[change.path])
    return found


def _leaf(tree: Tree, node: int) -> int:
    kind = tree.structure.nodes[node][2]
    return kind if isinstance(kind, int) else -1


def _only(tree: Tree, others: dict[str, int]) -> tuple[list[str], list[tuple[str, int]]]:
    """Leaves of a tree that the other has not, and the topmost places that hold them, with how many
    each."""
    leaves: list[str] = []
    tops: list[tuple[str, int]] = []
    for node, path in enumerate(tree.structure.paths):
        if path in others:
            continue
        if not tree.structure.is_container(node):
            leaves.append(path)
        if not tops or not starts_with(path, tops[-1][0]):
            tops.append((path, tree.leaves_below[node]))
    return leaves, tops


def _unlike(a: Tree, node_a: int, b: Tree, node_b: int) -> Change | None:
    """How two nodes differ without a look at their values."""
    path = a.structure.paths[node_a]
    kinds = [
        tree.container(node) if tree.structure.is_container(node) else tree.leaves[_leaf(tree, node)].kind
        for tree, node in ((a, node_a), (b, node_b))
    ]
    if kinds[0] != kinds[1]:
        return Change(path, kind=(kinds[0], kinds[1]))
    if kinds[0] != "array":
        return None
    one, other = a.leaves[_leaf(a, node_a)], b.leaves[_leaf(b, node_b)]
    change = Change(path)
    if one.dtype != other.dtype:
        change.dtype = (str(one.dtype), str(other.dtype))
    if one.shape != other.shape:
        change.shape = (one.shape or (), other.shape or ())
    return change if change.dtype or change.shape is not None else None


def _objects(a: Tree, b: Tree, pairs: list[tuple[int, int]]) -> Iterator[tuple[str, tuple[Any, Any]]]:
    values_a = a.checkpoint._open().objects([one for one, _ in pairs], Reviver())
    values_b = b.checkpoint._open().objects([other for _, other in pairs], Reviver())
    for (leaf, _), one, other in zip(pairs, values_a, values_b, strict=True):
        if not alike(one, other):
            yield a.leaves[leaf].path, (one, other)


def alike(one: Any, other: Any) -> bool:
    """True if two objects are the same: of one type, NaN like NaN, containers element by element in
    their order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.generic):
        return bool(one.dtype == other.dtype) and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(alike(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(alike, one, other))
    if isinstance(one, float):
        return struct.pack("d", one) == struct.pack("d", other)
    if isinstance(one, complex):
        return alike(one.real, other.real) and alike(one.imag, other.imag)
    return bool(one == other)


def _arrays(
    a: Tree, b: Tree, pairs: list[tuple[int, int]], found: Difference, tell: Tell
) -> Iterator[tuple[str, Values]]:
    """Reads both sides, many small leaves or a piece of a large one at a time, and gives those that
    differ."""
    whole = sum(a.leaves[leaf].nbytes for leaf, _ in pairs)
    counts: dict[int, Values] = {}
    for batch in _batches(a, b, pairs):
        ones = read_parts(a.checkpoint, [part for part, _ in batch])
        others = read_parts(b.checkpoint, [part for _, part in batch])
        for ((leaf, _, _), _), one, other in zip(batch, ones, others, strict=True):
            counted = counts.setdefault(leaf, Values(a.leaves[leaf].nbytes // one.dtype.itemsize))
            differing, most = difference(one, other)
            counted.differing += differing
            counted.max_abs = most if np.isnan(most) else max(counted.max_abs, most)
            found.compared_bytes += one.nbytes
        tell(found.compared_bytes, whole)
    for leaf, counted in counts.items():
        if counted.differing:
            yield a.leaves[leaf].path, counted


def _batches(a: Tree, b: Tree, pairs: list[tuple[int, int]]) -> Iterator[list[tuple[Part, Part]]]:
    batch: list[tuple[Part, Part]] = []
    held = 0
    for leaf_a, leaf_b in pairs:
        dtype_a = to_dtype(a.leaves[leaf_a].dtype)
        dtype_b = to_dtype(b.leaves[leaf_b].dtype)
        itemsize = max(dtype_a.itemsize, dtype_b.itemsize)
        for box in pieces([(0, n) for n in a.leaves[leaf_a].shape or ()], itemsize):
            nbytes = int(np.prod([n for _, n in box], dtype=np.int64)) * itemsize
            if batch and held + nbytes > PIECE_BYTES:
                yield batch
                batch, held = [], 0
            batch.append(((leaf_a, box, dtype_a), (leaf_b, box, dtype_b)))
            held += nbytes
    if batch:
        yield batch


def difference(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> tuple[int, float]:
    """How many elements differ, and by how much at most. Arrays of one dtype are compared bit for
    bit: ``-0.0`` is not ``0.0``, though they differ by 0."""
    a, b = one.reshape(-1), other.reshape(-1)
    if a.dtype == b.dtype:
        unlike = _bits(a) != _bits(b)
        unlike = unlike.any(axis=1) if unlike.ndim > 1 else unlike
        if not unlike.any():
            return 0, 0.0
        a, b = a[unlike], b[unlike]
        return len(a), _most(a, b)
    wide_a, wide_b = _wide(a), _wide(b)
    if wide_a.dtype != wide_b.dtype:
        common = np.result_type(wide_a, wide_b)
        wide_a, wide_b = wide_a.astype(common), wide_b.astype(common)
    unlike = (wide_a != wide_b) & ~((wide_a != wide_a) & (wide_b != wide_b))
    if not unlike.any():
        return 0, 0.0
    return int(np.count_nonzero(unlike)), _most(wide_a[unlike], wide_b[unlike])


def _bits(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    itemsize = array.dtype.itemsize
    if itemsize in (1, 2, 4, 8):
        return array.view(f"u{itemsize}")
    return array.view(np.uint64).reshape(len(array), -1)


def _wide(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The same numbers in a dtype that numpy computes in: integers stay integers."""
    kind = array.dtype.kind
    if kind in "mM":
        return array.view(np.int64)
    if kind == "c":
        return array.astype(np.complex128)
    if kind == "b":
        return array.astype(np.int64)
    if kind in "iu":
        return array if array.dtype == np.uint64 else array.astype(np.int64)
    # The integers of ml_dtypes are small enough to be exact too.
    return array.astype(np.float64)


def _most(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> float:
    """The largest absolute difference of elements; NaN where one of the two is NaN and the other is
    not."""
    a, b = _wide(one), _wide(other)
    if a.dtype.kind in "iu" and b.dtype == a.dtype:
        # Modulo 2^64 the difference of the larger and the smaller is exact.
        high, low = np.maximum(a, b).view(np.uint64), np.minimum(a, b).view(np.uint64)
        return float((high - low).max())
    with np.errstate(invalid="ignore", over="ignore"):
        apart = np.abs(a - b)
    apart[(a != a) & (b != b)] = 0
    apart[a == b] = 0
    return float("nan") if np.isnan(apart).any() else float(apart.max())
