"""Descriptions of a process's arrays: :class:`LocalShard` (a box of a tensor), :class:`Segments`
(boxes of one or several tensors, anywhere in one array), :class:`FlatShard` (a part of a flattened
parameter)."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import product
from math import prod
from types import EllipsisType
from typing import SupportsIndex, TypeAlias, cast, final

from .. import _core
from .._checks import MAX_SIZE, listed, shape_of, shown, sizes, text, whole
from .._types import Array
from ..errors import MisuseError
from .layouts import Local, Parts, Piece, Strided, filled, is_in_one_piece
from .specs import ArraySpec

#: A basic index of numpy.
Index: TypeAlias = "SupportsIndex | slice | EllipsisType | tuple[SupportsIndex | slice | EllipsisType, ...]"


@final
class LocalShard:
    """A box of a tensor: what this process holds of it. In a state it is saved, in a ``like`` or
    ``into`` it is restored.

    Args:
        local: the array of this process (numpy, torch, JAX), or an :class:`~stepwell.ArraySpec` in
            a ``like``. Its shape is the extent of the box.
        global_shape: the shape of the whole tensor, on all processes together.
        offset: the place of the box's first element in it.
        replica: ``(index, count)``: ``count`` processes hold this same box, and this is number
            ``index``. They share the writing.
    """

    __slots__ = ("global_shape", "local", "offset", "replica")

    def __init__(
        self,
        local: Local,
        global_shape: Sequence[int],
        offset: Sequence[int],
        replica: tuple[int, int] = (0, 1),
    ) -> None:
        self.local = local
        self.global_shape = sizes(global_shape, "global_shape")
        self.offset = sizes(offset, "offset")
        extent = shape_of(local, "a LocalShard")
        if len(self.offset) != len(self.global_shape) or len(extent) != len(self.global_shape):
            raise MisuseError(
                f"a LocalShard has as many dimensions in all: its array has shape {extent}, global_shape is {self.global_shape}, offset is {self.offset}"
            )
        for first, n, size in zip(self.offset, extent, self.global_shape, strict=True):
            if first + n > size:
                raise MisuseError(
                    f"a LocalShard of shape {extent} at offset {self.offset} passes the end of the tensor's shape {self.global_shape}"
                )
        self.replica = _replica(replica)

    def parts(self) -> Parts:
        """See :class:`Parts`."""
        extent = _extent(self.local)
        place = tuple(slice(0, n) for n in extent)
        pieces = [] if 0 in extent else [Piece(self.offset, extent, place, self.replica)]
        return Parts(self.local, self.global_shape, pieces, self._with, self)

    def _with(self, local: Local) -> LocalShard:
        if local is self.local:
            return self
        return LocalShard(local, self.global_shape, self.offset, self.replica)

    def __repr__(self) -> str:
        extent = _extent(self.local)
        box = ", ".join(f"{first}:{first + n}" for first, n in zip(self.offset, extent, strict=True))
        return f"LocalShard([{box}] of {self.global_shape})"


def _replica(replica: tuple[int, int]) -> tuple[int, int]:
    try:
        index, count = replica
    except (TypeError, ValueError) as error:
        raise MisuseError(f"replica is (index, count), not {shown(replica)}") from error
    count = whole(count, "the count of a replica", 1, 2**31)
    return whole(index, "the index of a replica", 0, count - 1), count


def _extent(local: Local) -> tuple[int, ...]:
    """The shape of a checked array."""
    return tuple(local.shape or ())


#: A process's part of a parameter, without its data: a shape, or a part of a tensor.
Parameter: TypeAlias = "Iterable[SupportsIndex] | Array | ArraySpec | LocalShard | Segments"


@final
class Segment:
    """A box of a tensor, and where in an array it lies.

    Args:
        name: the tensor, if an array holds parts of several. The tensor is stored below the array's
            own path under that name. ``None``: the array's own path.
        offset: the place of the box's first element in the tensor (or in its ``view``).
        extent: its number of elements along each dimension; default: that of ``into``.
        into: the part of the array, as an index (``numpy.s_[2:4, ::2]``); default: all of it.
        shape: the shape of the whole tensor. Optional in a ``like``.
        view: another shape of the tensor, for ``offset`` and ``extent``: each dimension of the
            tensor split into factors, ``(groups, heads, width, columns)``.
        into_shape: the same for the array.
        permute: the order of the box's dimensions in ``into``.
        replica: as in :class:`LocalShard`.
    """

    __slots__ = (
        "extent",
        "flat",
        "into",
        "into_shape",
        "name",
        "offset",
        "permute",
        "replica",
        "shape",
        "view",
    )

    def __init__(
        self,
        name: str | None,
        offset: Sequence[int],
        extent: Sequence[int] | None = None,
        *,
        into: Index = ...,
        shape: Sequence[int] | None = None,
        view: Sequence[int] | None = None,
        into_shape: Sequence[int] | None = None,
        permute: Sequence[int] | None = None,
        replica: tuple[int, int] = (0, 1),
    ) -> None:
        self.name = None if name is None else text(name, "the name of a Segment")
        self.offset = sizes(offset, "offset")
        self.extent = None if extent is None else sizes(extent, "extent")
        self.into = into
        self.shape = None if shape is None else sizes(shape, "shape")
        self.view = None if view is None else sizes(view, "view")
        self.into_shape = None if into_shape is None else sizes(into_shape, "into_shape")
        self.permute = None if permute is None else sizes(permute, "permute")
        self.replica = _replica(replica)
        #: The part of a flattened parameter: what that is, its first element, how many, and where
        #: they begin in the array.
        self.flat: tuple[Parameter, int, int, int] | None = None

    @classmethod
    def of_flat(
        cls,
        name: str | None,
        of: Parameter,
        start: int,
        length: int,
        *,
        at: int = 0,
        replica: tuple[int, int] = (0, 1),
    ) -> Segment:
        """A run of a flattened parameter, as ZeRO and FSDP1 shard it.

        Args:
            name: as above.
            of: this process's part of the parameter, without its data: the shape of the tensor if
                it has all of it; else a :class:`LocalShard` or :class:`Segments` over an
                :class:`~stepwell.ArraySpec`, which describes the cuts of other kinds of
                parallelism.
            start: the first element of the flattened part.
            length: the number of elements.
            at: the place of the first element in the array.
            replica: as above.
        """
        made = cls(name, (), replica=replica)
        numbers = ((start, "start"), (length, "length"), (at, "at"))
        least = [whole(one, what, 0, MAX_SIZE) for one, what in numbers]
        made.flat = (of, least[0], least[1], least[2])
        return made

    def pieces(self, local_shape: tuple[int, ...]) -> tuple[tuple[int, ...] | None, list[Piece]]:
        """The shape of its tensor, and its boxes in a row-major array of that shape."""
        if self.flat is not None:
            return self._flat_pieces(local_shape)
        base = local_shape if self.into_shape is None else self.into_shape
        if prod(base) != prod(local_shape):
            raise MisuseError(
                f"into_shape={base} has not as many elements as the array of shape {local_shape}"
            )
        at, shape, steps = _indexed(base, self.into)
        if self.permute is not None:
            if sorted(self.permute) != list(range(len(shape))):
                raise MisuseError(f"permute={self.permute} is no order of {len(shape)} dimensions")
            shape, steps = [shape[d] for d in self.permute], [steps[d] for d in self.permute]
        extent, steps = _matched(self.extent, shape, steps)
        if len(self.offset) != len(extent):
            raise MisuseError(
                f"a Segment at offset {self.offset} with extent {extent}: both have one number for each dimension"
            )
        bounds = self.shape if self.view is None else self.view
        if bounds is not None:
            fits = len(bounds) == len(extent) and all(
                first + n <= size for first, n, size in zip(self.offset, extent, bounds, strict=False)
            )
            if not fits:
                raise MisuseError(
                    f"a Segment of extent {tuple(extent)} at {self.offset} does not lie in the shape {bounds}"
                )
        if 0 in extent:
            return self.shape, []
        if self.view is None:
            return self.shape, [Piece(self.offset, tuple(extent), Strided(at, tuple(steps)), self.replica)]
        if self.shape is None:
            raise MisuseError("a Segment with view= also needs shape=, the shape of the tensor itself")
        boxes = _boxes_of_view(self.shape, self.view, self.offset, extent, steps)
        return self.shape, [
            Piece(offset, size, Strided(at + first, steps), self.replica)
            for offset, size, first, steps in boxes
        ]

    def _flat_pieces(self, local_shape: tuple[int, ...]) -> tuple[tuple[int, ...] | None, list[Piece]]:
        assert self.flat is not None
        of, start, length, at = self.flat
        shape, own, pieces = _own_parameter(of)
        if at + length > prod(local_shape):
            raise MisuseError(f"{length} elements from {at} on do not lie in an array of shape {local_shape}")
        rows = [
            (one.offset, one.extent, one.place.offset, one.place.steps)
            for one in pieces
            if isinstance(one.place, Strided)
        ]
        found = _core.flat_pieces(own, rows, start, length)
        if found is None:
            raise MisuseError(
                f"elements {start} to {start + length} are no part of a parameter of shape {own} whose segments lie along its dimensions"
            )
        return shape, [
            Piece(tuple(offset), tuple(extent), Strided(at + first, tuple(steps)), self.replica)
            for offset, extent, first, steps in found
        ]


@final
class Segments:
    """An array that holds boxes of one tensor, or of several: fused weights, buckets of parameters,
    padded or transposed parts.

    A save stores each tensor as if it were in the state by itself: below the array's own path under
    the names of the segments, or at that path without names. A ``like`` or ``into`` assembles the
    array from them. Elements without a segment are padding: not stored, unchanged in an ``into``,
    and zero in a new array.

    Args:
        local: the array of this process, contiguous (numpy, torch, JAX), or an
            :class:`~stepwell.ArraySpec` that describes it.
        segments: its segments.
    """

    __slots__ = ("local", "segments")

    def __init__(self, local: Local, segments: Sequence[Segment]) -> None:
        self.local = local
        self.segments = tuple(listed(segments, "segments is a list of sw.sharding.Segment(…)"))
        wrong = [one for one in self.segments if type(one) is not Segment]
        if wrong:
            raise MisuseError(f"segments are made by sw.sharding.Segment(…), not {shown(wrong[0])}")
        shape_of(local, "an object of Segments")
        if not isinstance(local, ArraySpec) and not is_in_one_piece(local):
            raise MisuseError("the array of Segments lies in one piece, row-major; pass a contiguous one")
        names = {one.name for one in self.segments}
        if None in names and len(names) > 1:
            raise MisuseError("either all segments of an array have names, or none has")
        self.tensors()

    @property
    def is_named(self) -> bool:
        """True if it holds parts of tensors that have names of their own."""
        return any(one.name is not None for one in self.segments)

    def tensors(self) -> dict[str | None, Parts]:
        """Returns its parts of each tensor."""
        shape = _extent(self.local)
        found: dict[str | None, Parts] = {}
        for segment in self.segments:
            whole_shape, pieces = segment.pieces(shape)
            parts = found.get(segment.name)
            if parts is None:
                what = "an array of Segments" if segment.name is None else f"the segment {segment.name!r}"
                found[segment.name] = Parts(self.local, whole_shape, pieces, None, what)
                continue
            if (
                parts.global_shape is not None
                and whole_shape is not None
                and parts.global_shape != whole_shape
            ):
                raise MisuseError(
                    f"segments of {segment.name!r} say that its shape is {parts.global_shape} and {whole_shape}"
                )
            parts.global_shape = parts.global_shape or whole_shape
            parts.pieces.extend(pieces)
        return found

    def parts(self) -> Parts:
        """Of one without names: see :class:`Parts`."""
        [only] = (
            self.tensors().values()
            if self.segments
            else [Parts(self.local, None, [], None, "an array of no Segments")]
        )
        only.rebuild = lambda local: self if local is self.local else Segments(local, self.segments)
        return only

    def put_together(self, values: Mapping[str | None, object], fill: bool) -> Segments:
        """The same with these values of each tensor's pieces."""
        found: list[tuple[Piece, Array]] = []
        for name, parts in self.tensors().items():
            read = values.get(name)
            if isinstance(read, list):
                found += list(zip(parts.pieces, read, strict=True))
        local = filled(self.local, found, fill)
        return self if local is self.local else Segments(local, self.segments)

    def __repr__(self) -> str:
        return f"Segments({len(self.segments)} of {_extent(self.local)})"


@final
class FlatShard:
    """A part of a flattened parameter, as ZeRO and FSDP1 shard it.

    Args:
        local: a 1-d array of this process; what it has beyond the parameter's end is padding.
        of: what the process has of the parameter, without its data: see :meth:`Segment.of_flat`.
        start: the first element, in what the process has, flattened.
        replica: as of :class:`LocalShard`.
    """

    __slots__ = ("local", "of", "replica", "start")

    def __init__(self, local: Local, of: Parameter, start: int, replica: tuple[int, int] = (0, 1)) -> None:
        if len(shape_of(local, "a FlatShard")) != 1:
            raise MisuseError(f"a FlatShard is a 1-d array, not {shown(local)}")
        self.local = local
        self.of = of
        self.start = whole(start, "start", 0, MAX_SIZE)
        self.replica = _replica(replica)
        self.parts()

    def parts(self) -> Parts:
        """See :class:`Parts`."""
        _, own, _ = _own_parameter(self.of)
        length = max(0, min(_extent(self.local)[0], prod(own) - self.start))
        start = min(self.start, prod(own))
        segment = Segment.of_flat(None, self.of, start, length, replica=self.replica)
        parts = Segments(self.local, [segment]).parts()
        parts.rebuild = lambda local: (
            self if local is self.local else FlatShard(local, self.of, self.start, self.replica)
        )
        return parts

    def __repr__(self) -> str:
        return f"FlatShard({_extent(self.local)[0]} from {self.start} of {self.of!r})"


def _own_parameter(of: Parameter) -> tuple[tuple[int, ...] | None, tuple[int, ...], list[Piece]]:
    """Returns a process's part of a parameter: the tensor's shape, that of its own array, and the
    pieces in it."""
    shape, own, pieces = _described(of)
    if prod(own) > MAX_SIZE:
        raise MisuseError(f"of= has more elements than 64 bits count: its shape is {own}")
    return shape, own, pieces


def _described(of: Parameter) -> tuple[tuple[int, ...] | None, tuple[int, ...], list[Piece]]:
    if isinstance(of, LocalShard):
        shape = _extent(of.local)
        piece = Piece(of.offset, shape, Strided(0, tuple(_steps(shape))))
        return of.global_shape, shape, [] if 0 in shape else [piece]
    if isinstance(of, Segments):
        if of.is_named:
            raise MisuseError("of= is what the process has of one tensor; segments with names are several")
        parts = of.parts()
        return parts.global_shape, _extent(of.local), parts.pieces
    shape = sizes(cast(Iterable[SupportsIndex], getattr(of, "shape", of)), "of")
    piece = Piece((0,) * len(shape), shape, Strided(0, tuple(_steps(shape))))
    return shape, shape, [] if 0 in shape else [piece]


def _steps(shape: Sequence[int]) -> list[int]:
    """Returns the strides of a row-major array, in elements."""
    steps = [1] * len(shape)
    for d in range(len(shape) - 1, 0, -1):
        steps[d - 1] = steps[d] * shape[d]
    return steps


def _indexed(shape: Sequence[int], index: Index) -> tuple[int, list[int], list[int]]:
    """First element, shape and steps of what an index takes of a row-major array."""
    entries = list(index) if isinstance(index, tuple) else [index]
    # By identity: an array in its place is compared with each of its elements.
    dots = [at for at, one in enumerate(entries) if one is ...]
    if len(dots) > 1 or len(entries) - len(dots) > len(shape):
        raise MisuseError(f"into={index!r} has more dimensions than an array of shape {tuple(shape)}")
    if not dots:
        dots = [len(entries)]
        entries.append(...)
    [at] = dots
    entries[at : at + 1] = [slice(None)] * (len(shape) - len(entries) + 1)
    first, sizes, steps = 0, list[int](), list[int]()
    for entry, size, step in zip(entries, shape, _steps(shape), strict=True):
        if isinstance(entry, slice):
            try:
                start, stop, stride = entry.indices(size)
            except (TypeError, ValueError) as error:
                raise MisuseError(f"into={index!r} is no index: {error}") from error
            if stride <= 0:
                raise MisuseError(f"into={index!r} goes backwards; an array is filled forwards")
            first += start * step
            sizes.append(len(range(start, stop, stride)))
            steps.append(stride * step)
            continue
        try:
            number = operator.index(cast(SupportsIndex, entry))
        except TypeError as error:
            raise MisuseError(f"into={index!r} has integers, slices and `...`, not {shown(entry)}") from error
        if not -size <= number < size:
            raise MisuseError(f"into={index!r} passes the end of an array of shape {tuple(shape)}")
        first += (number % size) * step
    return first, sizes, steps


def _matched(
    extent: tuple[int, ...] | None, shape: list[int], steps: list[int]
) -> tuple[list[int], list[int]]:
    """The extent of a box and the steps along it, where an array has dimensions of one element more
    or fewer."""
    if extent is None or list(extent) == shape:
        return shape, steps
    left = [(n, step) for n, step in zip(shape, steps, strict=True) if n != 1]
    found = []
    for n in extent:
        if n == 1:
            found.append(1)
        elif left and left[0][0] == n:
            found.append(left.pop(0)[1])
        else:
            raise MisuseError(f"a Segment of extent {extent} does not lie in a part of shape {tuple(shape)}")
    if left:
        raise MisuseError(f"a Segment of extent {extent} does not fill a part of shape {tuple(shape)}")
    return list(extent), found


def _boxes_of_view(
    shape: tuple[int, ...],
    view: tuple[int, ...],
    offset: Sequence[int],
    extent: Sequence[int],
    steps: Sequence[int],
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...], int, tuple[int, ...]]]:
    """A box of a view, as boxes of the tensor: offset, extent, first element and steps in the
    array."""
    dimensions: list[list[tuple[int, int, int, int]]] = []
    factors = list(zip(view, offset, extent, steps, strict=True))
    for size in shape:
        mine: list[tuple[int, int, int, int]] = []
        while factors and prod(one[0] for one in mine) < size:
            mine.append(factors.pop(0))
        while factors and factors[0][0] == 1:
            mine.append(factors.pop(0))
        if prod(one[0] for one in mine) != size:
            raise MisuseError(f"view={view} does not cut each dimension of {shape} into factors")
        dimensions.append(mine)
    if factors:
        raise MisuseError(f"view={view} does not cut each dimension of {shape} into factors")
    runs = [_runs_of_factors(mine) for mine in dimensions]
    for combination in product(*runs):
        yield (
            tuple(start for start, _, _, _ in combination),
            tuple(length for _, length, _, _ in combination),
            sum(first for _, _, first, _ in combination),
            tuple(step for _, _, _, step in combination),
        )


def _runs_of_factors(factors: list[tuple[int, int, int, int]]) -> list[tuple[int, int, int, int]]:
    """A box of the factors of one dimension, as runs of that dimension: start, length, first
    element and step in the array."""
    runs = [(0, 1, 0, 1)]
    # From the innermost out: what is whole and goes on in the array without a gap becomes one
    # longer run.
    inner = 1
    is_whole, length, step = True, 1, 0
    outer: list[tuple[int, int, int, int]] = []
    for size, first, count, stride in reversed(factors):
        goes_on = is_whole and (length == 1 or stride == step * length)
        if goes_on and not outer:
            start, length, step = first * inner, count * length, stride if length == 1 else step
            is_whole = count == size
            runs = [(start, length, 0, step)]
        else:
            outer.append((inner, first, count, stride))
        inner *= size
    for unit, first, count, stride in outer:
        runs = [
            (start + (first + n) * unit, size, at + n * stride, step)
            for n in range(count)
            for start, size, at, step in runs
        ]
    return runs
