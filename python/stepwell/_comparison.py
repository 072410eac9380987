"""The differences between two checkpoints of any format: structure, kinds, dtypes, shapes, values.

The engine compares the bytes of both sides and names the arrays that differ. Only these are read
again, piece by piece, to count the elements. So memory stays bounded.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, TypeAlias, final

import numpy as np

from . import _core
from ._contents import StoredNode
from ._state.specs import ArraySpec
from ._value_difference import alike, difference
from .errors import MismatchError

if TYPE_CHECKING:
    from ._checkpoint import Checkpoint

_Progress: TypeAlias = Callable[[int, int], object]
#: Bytes of each side that are read at a time.
_PIECE_BYTES = 16 << 20
#: A node of both sides.
_Pair: TypeAlias = tuple[StoredNode, StoredNode]


@final
@dataclass(slots=True)
class Change:
    """A leaf or container that both have, and that differs. ``None``: that is the same."""

    #: Its path in the first checkpoint.
    path: str
    #: Its path in the second, if that is another one.
    path_b: str | None = None
    #: The kinds of both sides, or the types of two objects.
    kind: tuple[str, str] | None = None
    #: The dtypes of both sides.
    dtype: tuple[str | None, str | None] | None = None
    #: The shapes of both sides.
    shape: tuple[tuple[int, ...] | None, tuple[int, ...] | None] | None = None
    #: Elements of an array whose values differ.
    elements: int | None = None
    #: How many elements are not the same bits; of two dtypes: not the same numbers.
    differing_elements: int | None = None
    #: The largest absolute difference; NaN if only one of the two is NaN.
    max_abs_difference: float | None = None
    #: Objects that differ.
    objects: tuple[object, object] | None = None


@final
@dataclass(frozen=True, slots=True)
class Difference:
    """The differences between two checkpoints. It is true if there is any."""

    #: Paths of leaves that only the first has, or only the second.
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    #: The topmost nodes that only one has. ``leaves`` counts the leaves that the other lacks.
    top_a: tuple[StoredNode, ...]
    top_b: tuple[StoredNode, ...]
    #: Leaves and containers that both have, and that differ.
    changes: tuple[Change, ...]
    #: Paths of leaves that were not compared, because their values are opaque.
    opaque: tuple[str, ...]
    #: Leaves that both have, and the bytes of each side that were compared.
    common: int
    compared_nbytes: int

    def __bool__(self) -> bool:
        return bool(self.top_a or self.top_b or self.changes)


def compare(
    one: Checkpoint,
    other: Checkpoint,
    choice: _core._Choice,
    *,
    with_containers: bool,
    values: bool,
    progress: _Progress | None,
) -> Difference:
    """Compares two open checkpoints; see :meth:`stepwell.Checkpoint.diff`."""
    return _Comparison(one, other, choice, with_containers).run(values, progress)


class _Side:
    """One of the two checkpoints."""

    def __init__(self, checkpoint: Checkpoint, choice: _core._Choice) -> None:
        self.checkpoint = checkpoint
        self.nodes = checkpoint.contents()
        self.numbers = {node.path: number for number, node in enumerate(self.nodes)}
        self.leaves = [number for number, node in enumerate(self.nodes) if node.leaf is not None]
        #: The nodes of leaves by the number of the leaf.
        self.leaf_nodes = {self.nodes[number].leaf: number for number in self.leaves}
        manifest = checkpoint.manifest
        self.format = "" if manifest["format_version"] else manifest["writer"]
        include, exclude, _ = choice
        paths = [self.nodes[number].path for number in self.leaves]
        dropped = _core.first_globs(exclude, paths)
        taken = [0] * len(paths) if include is None else _core.first_globs(include, paths)
        #: Leaves that the caller wants compared.
        self.chosen = {
            number
            for number, out, taking in zip(self.leaves, dropped, taken, strict=True)
            if out is None and taking is not None
        }

    def holder(self, node: StoredNode) -> StoredNode:
        """The leaf that has the bytes of a leaf."""
        return node if node.tied_to is None else self.nodes[self.numbers[node.tied_to]]

    def leaves_of(self, number: int) -> list[int]:
        """The leaves at or below a node."""
        return [self.leaf_nodes[leaf] for leaf in self.checkpoint._tree().leaves_below(number)]

    def values(self, wanted: Sequence[StoredNode]) -> list[object]:
        """The values of objects, and of containers of them."""
        objects = iter(self.checkpoint.read((node.path, ...) for node in wanted if node.leaf is not None))
        return [
            self.checkpoint._load(self.numbers[node.path]) if node.leaf is None else next(objects)
            for node in wanted
        ]

    def dotted_names(self, without: Collection[int]) -> dict[str, int]:
        """The other leaves by the names that flat formats give them. Names of several leaves are
        left out."""
        structure = self.checkpoint._tree()
        names = {
            number: ".".join(str(value) for _, value in structure.components(number))
            for number in self.leaves
            if number not in without
        }
        times = Counter(names.values())
        return {name: number for number, name in names.items() if times[name] == 1}

    def only(
        self, partners: Collection[int], other: _Side, with_empty: bool
    ) -> tuple[tuple[str, ...], tuple[StoredNode, ...]]:
        """The paths of leaves that the other side lacks, and the topmost nodes of nothing else."""
        alone, shared = [0] * len(self.nodes), [False] * len(self.nodes)
        for number in range(len(self.nodes) - 1, -1, -1):
            node = self.nodes[number]
            if node.leaf is not None:
                shared[number] = number in partners
                alone[number] = int(number in self.chosen and not shared[number])
            if number:
                alone[node.parent] += alone[number]
                shared[node.parent] |= shared[number]
        gone = [
            bool(alone[number])
            if node.leaf is not None
            else not shared[number] and node.path not in other.numbers and bool(alone[number] or with_empty)
            for number, node in enumerate(self.nodes)
        ]
        tops = [
            number
            for number, node in enumerate(self.nodes)
            if gone[number] and not (number and gone[node.parent])
        ]
        return (
            tuple(self.nodes[number].path for number in self.leaves if gone[number]),
            tuple(replace(self.nodes[number], leaves=alone[number]) for number in tops),
        )


class _Comparison:
    """A comparison of two open checkpoints."""

    def __init__(self, a: Checkpoint, b: Checkpoint, choice: _core._Choice, with_containers: bool) -> None:
        self._a, self._b = _Side(a, choice), _Side(b, choice)
        self._is_one_format = self._a.format == self._b.format
        self._with_containers = self._is_one_format and with_containers
        #: Empty containers have no leaf that could be chosen.
        self._with_empty = self._with_containers and len(self._a.chosen) == len(self._a.leaves)
        #: Nodes of the first, and those of the second that they are compared with.
        self._partners = {
            number: self._b.numbers[node.path]
            for number, node in enumerate(self._a.nodes)
            if node.path in self._b.numbers
        }
        if not self._is_one_format:
            # A state that is one leaf has the empty name in flat formats.
            if (self._a.nodes[0].leaf is None) != (self._b.nodes[0].leaf is None):
                self._partners.pop(0)
            names = self._b.dotted_names(set(self._partners.values()))
            for name, number in self._a.dotted_names(self._partners).items():
                if name in names:
                    self._partners[number] = names[name]
        self._check_choice(choice)
        self._changes: dict[int, Change] = {}
        #: Leaves of both sides that are compared as parts of a container.
        self._parts_a: set[int] = set()
        self._parts_b: set[int] = set()
        #: Nodes that are one value on one side, of which the caller wants a part compared.
        self._uncompared: set[int] = set()

    def _check_choice(self, choice: _core._Choice) -> None:
        """Refuses a pattern that matches no leaf, and a choice of no leaf."""
        include, exclude, _ = choice
        if include is None and not exclude:
            return
        partners = {other for one, other in self._partners.items() if self._a.nodes[one].leaf is not None}
        only_b = [number for number in self._b.leaves if number not in partners]
        paths = [self._a.nodes[number].path for number in self._a.leaves]
        paths += [self._b.nodes[number].path for number in only_b]
        sides = f"{self._a.checkpoint.path} or {self._b.checkpoint.path}"
        for globs, option in ((include or (), "include="), (exclude, "exclude=")):
            for glob in globs:
                if all(found is None for found in _core.first_globs([glob], paths)):
                    raise MismatchError(
                        f"{glob!r} of {option} matches no leaf of {sides}. Correct it, or leave it out. "
                        "Patterns are matched against paths of the first checkpoint, or of the second for "
                        "leaves that only it has; `stepwell show` lists them"
                    )
        if not (self._a.chosen or self._b.chosen.intersection(only_b)):
            raise MismatchError(f"no leaf of {sides} is selected. Change include= or exclude=")

    def run(self, values: bool, progress: _Progress | None) -> Difference:
        """Compares them."""
        leaves = self._compare_nodes()
        opaque, compared = self._compare_values(leaves, progress) if values else ([], 0)
        partners_a = self._parts_a.union(self._partners)
        partners_b = self._parts_b.union(self._partners.values())
        only_a, top_a = self._a.only(partners_a, self._b, self._with_empty)
        only_b, top_b = self._b.only(partners_b, self._a, self._with_empty)
        changes = tuple(self._changes[number] for number in sorted(self._changes))
        return Difference(only_a, only_b, top_a, top_b, changes, tuple(opaque), len(leaves), compared)

    def _change(self, number: int) -> Change:
        """The change of a node of the first checkpoint, to be filled in."""
        if number not in self._changes:
            path, other = self._a.nodes[number].path, self._b.nodes[self._partners[number]].path
            self._changes[number] = Change(path, None if path == other else other)
        return self._changes[number]

    def _compare_nodes(self) -> dict[int, _Pair]:
        """Compares nodes without their values. Returns the leaves that both sides have."""
        leaves: dict[int, _Pair] = {}
        for number, partner in self._partners.items():
            one, other = self._a.nodes[number], self._b.nodes[partner]
            if one.leaf is None and other.leaf is None:
                if self._with_containers and one.kind != other.kind:
                    self._change(number).kind = (one.kind, other.kind)
                continue
            if number not in self._a.chosen and (one.leaf is not None or partner not in self._b.chosen):
                continue
            if (one.leaf is None) != (other.leaf is None) and self._is_one_value(number, partner):
                leaves[number] = one, other
                continue
            if one.leaf is not None and other.leaf is not None:
                leaves[number] = one, other
            if one.kind != other.kind:
                self._change(number).kind = (one.kind, other.kind)
                continue
            if one.dtype != other.dtype:
                self._change(number).dtype = (one.dtype, other.dtype)
            if one.shape != other.shape:
                self._change(number).shape = (one.shape, other.shape)
        return leaves

    def _is_one_value(self, number: int, partner: int) -> bool:
        """True if one side has a container of plain values where the other one has an object."""
        if self._is_one_format:
            return False
        parts_a, parts_b = self._a.leaves_of(number), self._b.leaves_of(partner)
        parts = [self._a.nodes[one] for one in parts_a] + [self._b.nodes[one] for one in parts_b]
        if any(part.kind != "object" or part.opaque is not None for part in parts):
            return False
        self._parts_a.update(parts_a)
        self._parts_b.update(parts_b)
        if not (self._a.chosen.issuperset(parts_a) and self._b.chosen.issuperset(parts_b)):
            self._uncompared.add(number)
        return True

    def _compare_values(self, leaves: dict[int, _Pair], progress: _Progress | None) -> tuple[list[str], int]:
        """Compares values. Returns the paths of opaque leaves, and the bytes that were compared."""
        opaque: list[str] = []
        objects: dict[int, _Pair] = {}
        one_dtype: dict[int, _Pair] = {}
        two_dtypes: dict[int, _Pair] = {}
        seen: set[tuple[int | None, int | None]] = set()
        for number, (one, other) in leaves.items():
            if one.opaque is not None or other.opaque is not None or number in self._uncompared:
                opaque.append(one.path)
            elif one.leaf is None or other.leaf is None:
                objects[number] = one, other
            elif one.kind != other.kind or one.shape != other.shape:
                continue
            elif one.kind == "object":
                objects[number] = one, other
            else:
                # Tied leaves are compared once.
                holders = self._a.holder(one).leaf, self._b.holder(other).leaf
                if holders not in seen:
                    (one_dtype if one.dtype == other.dtype else two_dtypes)[number] = one, other
                seen.add(holders)
        self._compare_objects(objects)
        first = sum(one.nbytes for one, _ in one_dtype.values())
        nbytes = whole = first + sum(one.nbytes for one, _ in two_dtypes.values())

        def tell(done: int, _: int) -> object:
            return None if progress is None else progress(done, whole)

        unlike = {**self._unlike(one_dtype, tell), **two_dtypes}
        done, whole = first, first + sum(one.nbytes for one, _ in unlike.values())
        for read in self._count_elements(unlike):
            done += read
            tell(done, whole)
        tell(whole, whole)
        return opaque, nbytes

    def _compare_objects(self, pairs: dict[int, _Pair]) -> None:
        first = self._a.values([one for one, _ in pairs.values()])
        second = self._b.values([other for _, other in pairs.values()])
        for number, one, other in zip(pairs, first, second, strict=True):
            if not alike(one, other):
                change = self._change(number)
                change.objects = one, other
                if type(one) is not type(other):
                    change.kind = type(one).__name__, type(other).__name__

    def _unlike(self, pairs: dict[int, _Pair], progress: _Progress) -> dict[int, _Pair]:
        """The pairs of one dtype and shape whose bytes differ."""
        numbers = list(pairs)
        rows = [(one.leaf or 0, other.leaf or 0, one.dtype or "") for one, other in pairs.values()]
        sides = self._a.checkpoint._open(), self._b.checkpoint._open()
        return {numbers[at]: pairs[numbers[at]] for at in _core.compare_tensors(*sides, rows, progress)}

    def _count_elements(self, pairs: dict[int, _Pair]) -> Iterator[int]:
        """Counts the elements that differ. Yields the bytes of each batch."""
        for batch in _batches(pairs):
            first = self._a.checkpoint.read((pairs[number][0].path, box) for number, box in batch)
            second = self._b.checkpoint.read((pairs[number][1].path, box) for number, box in batch)
            for (number, _), x, y in zip(batch, first, second, strict=True):
                differing, most = difference(x, y)
                if differing:
                    change = self._change(number)
                    change.elements = pairs[number][0].nbytes // x.dtype.itemsize
                    change.differing_elements = (change.differing_elements or 0) + differing
                    # A NaN stays one.
                    change.max_abs_difference = float(np.maximum(change.max_abs_difference or 0.0, most))
            yield sum(x.nbytes for x in first)


def _batches(pairs: dict[int, _Pair]) -> Iterator[list[tuple[int, tuple[slice, ...]]]]:
    """Many small leaves at a time, or a piece of a large one."""
    batch: list[tuple[int, tuple[slice, ...]]] = []
    held = 0
    for number, (one, other) in pairs.items():
        wider = max(one, other, key=lambda node: node.nbytes)
        for box in ArraySpec(wider.shape, wider.dtype).pieces(_PIECE_BYTES):
            part = ArraySpec([side.stop - side.start for side in box], wider.dtype).nbytes or 0
            if batch and held + part > _PIECE_BYTES:
                yield batch
                batch, held = [], 0
            batch.append((number, box))
            held += part
    if batch:
        yield batch
