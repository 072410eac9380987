"""The differences between two checkpoints: structure, kinds, dtypes, shapes, values. Values of both
sides are read piece by piece, so memory stays bounded."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import numpy as np

import stepwell as sw

from .progress import Tell
from .reading import PIECE_BYTES, Values, pieces

_Node: TypeAlias = sw.results.StoredNode
#: A leaf on both sides, and the part of it that is read.
_Part: TypeAlias = tuple[_Node, tuple[slice, ...]]


@final
@dataclass(slots=True)
class Change:
    """A leaf or container that both have, and that differs. ``None``: that is the same."""

    path: str
    #: The kinds of both sides, or the types of two objects.
    kind: tuple[str, str] | None = None
    dtype: tuple[str | None, str | None] | None = None
    shape: tuple[object, object] | None = None
    #: Elements of an array whose values differ; how many are not the same bits (where the dtypes
    #: differ: not the same numbers); the largest absolute difference.
    elements: int | None = None
    differing_elements: int | None = None
    max_abs_difference: float | None = None
    #: Objects that differ.
    objects: tuple[object, object] | None = None


@final
@dataclass(slots=True)
class Difference:
    """The differences between two checkpoints."""

    #: Leaves that one side lacks, and the topmost nodes above them.
    only_a: list[str] = field(default_factory=list)
    only_b: list[str] = field(default_factory=list)
    top_a: list[_Node] = field(default_factory=list)
    top_b: list[_Node] = field(default_factory=list)
    changes: list[Change] = field(default_factory=list)
    #: Leaves that both have, and the bytes that were read of each side.
    common: int = 0
    compared_bytes: int = 0

    @property
    def found(self) -> bool:
        """True if there is any."""
        return bool(self.top_a or self.top_b or self.changes)


def compare(a: sw.Checkpoint, b: sw.Checkpoint, values: bool, tell: Tell) -> Difference:
    """Compares two open checkpoints; with ``values`` also the values of their leaves."""
    found = Difference()
    nodes_a, nodes_b = a.contents(), b.contents()
    paths_a, paths_b = ({node.path: node for node in nodes} for nodes in (nodes_a, nodes_b))
    found.only_a, found.top_a = _only(nodes_a, paths_b)
    found.only_b, found.top_b = _only(nodes_b, paths_a)
    changes: dict[str, Change] = {}
    arrays: list[tuple[_Node, _Node]] = []
    objects: list[str] = []
    for path, one in paths_a.items():
        other = paths_b.get(path)
        if other is None:
            continue
        change = _unlike(one, other)
        if change is not None:
            changes[path] = change
        if one.leaf is None or other.leaf is None:
            continue
        found.common += 1
        if not values or one.kind != other.kind or one.shape != other.shape:
            continue
        if one.kind == "object":
            objects.append(path)
        elif one.tied_to is None or one.tied_to != other.tied_to:
            arrays.append((one, other))
    objects_a, objects_b = (side.read((path, ...) for path in objects) for side in (a, b))
    for path, value, other_value in zip(objects, objects_a, objects_b, strict=True):
        if not alike(value, other_value):
            kinds = (type(value).__name__, type(other_value).__name__)
            kind = None if kinds[0] == kinds[1] else kinds
            changes[path] = Change(path, kind=kind, objects=(value, other_value))
    whole = sum(one.nbytes for one, _ in arrays)
    for batch in _batches(arrays):
        wanted = [(node.path, box) for node, box in batch]
        for (node, _), x, y in zip(batch, a.read(wanted), b.read(wanted), strict=True):
            differing, most = difference(x, y)
            found.compared_bytes += x.nbytes
            if differing:
                change = changes.setdefault(node.path, Change(node.path))
                change.elements = node.nbytes // x.dtype.itemsize
                change.differing_elements = (change.differing_elements or 0) + differing
                change.max_abs_difference = float(np.maximum(change.max_abs_difference or 0.0, most))
        tell(found.compared_bytes, whole)
    found.changes = [changes[path] for path in paths_a if path in changes]
    return found


def _only(nodes: list[_Node], others: dict[str, _Node]) -> tuple[list[str], list[_Node]]:
    """Returns the leaves that the other side lacks, and the topmost nodes above them."""
    gone = [node for node in nodes if node.path not in others]
    tops = [node for node in gone if nodes[node.parent].path in others or node is nodes[0]]
    return [node.path for node in gone if node.leaf is not None], tops


def _unlike(one: _Node, other: _Node) -> Change | None:
    """How two nodes differ, apart from their values."""
    if one.kind != other.kind:
        return Change(one.path, kind=(one.kind, other.kind))
    change = Change(one.path)
    if one.dtype != other.dtype:
        change.dtype = (one.dtype, other.dtype)
    if one.shape != other.shape:
        change.shape = (one.shape, other.shape)
    return change if change.dtype or change.shape else None


def alike(one: Any, other: Any) -> bool:  # both of one type, once that was compared
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


def _batches(pairs: list[tuple[_Node, _Node]]) -> Iterator[list[_Part]]:
    """Many small leaves at a time, or a piece of a large one."""
    batch: list[_Part] = []
    held = 0
    for one, other in pairs:
        shape = one.shape or ()
        elements = max(int(np.prod(shape, dtype=np.int64)), 1)
        itemsize = max(one.nbytes, other.nbytes) // elements
        for box in pieces(shape, itemsize):
            nbytes = int(np.prod([part.stop - part.start for part in box], dtype=np.int64)) * itemsize
            if batch and held + nbytes > PIECE_BYTES:
                yield batch
                batch, held = [], 0
            batch.append((one, box))
            held += nbytes
    if batch:
        yield batch


def difference(one: Values, other: Values) -> tuple[int, float]:
    """Returns how many elements differ, and by how much at most. Arrays of one dtype are compared
    bit for bit: ``-0.0`` is not ``0.0``, though they differ by 0."""
    a, b = one.reshape(-1), other.reshape(-1)
    if a.dtype == b.dtype:
        unlike = (_bytes(a) != _bytes(b)).any(axis=1)
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


def _bytes(array: Values) -> Values:
    return np.ascontiguousarray(array).view(np.uint8).reshape(len(array), array.dtype.itemsize)


def _wide(array: Values) -> Values:
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


def _most(one: Values, other: Values) -> float:
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
