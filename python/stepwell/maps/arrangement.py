"""A tensor as parts of stored ones: which stored element each of its elements is."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple, TypeVar

from .. import _core

_T = TypeVar("_T")


class Piece(NamedTuple):
    """A box of a tensor, and the stored elements that it holds."""

    #: First element and number of elements along each dimension.
    start: tuple[int, ...]
    extent: tuple[int, ...]
    #: The stored leaf, or what is computed, and its element that is the box's first one.
    source: int | Computed
    first: tuple[int, ...]
    #: For each dimension: the stored axis that it follows (``None``: a new one), and the step.
    axes: tuple[tuple[int | None, int], ...]


class Arrangement(NamedTuple):
    """A tensor made of parts of stored ones."""

    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[Piece, ...]

    @classmethod
    def whole(cls, source: int | Computed, dtype: str, shape: tuple[int, ...]) -> Arrangement:
        """A stored or computed tensor as it is."""
        zeros, axes = _unmoved(len(shape))
        return cls(dtype, shape, (Piece(zeros, shape, source, zeros, axes),))

    def take(self, axis: int, start: int, count: int, step: int = 1) -> Arrangement:
        """``count`` elements along an axis: ``start``, ``start + step``, …, all of which exist."""
        if (start, count, step) == (0, self.shape[axis], 1):
            return self
        pieces = []
        for one in self.pieces:
            at, n = one.start[axis], one.extent[axis]
            begin = max(0, -(-(at - start) // step))
            end = min(count, -(-(at + n - start) // step))
            if begin >= end:
                continue
            stored, own = one.axes[axis]
            first = list(one.first)
            if stored is not None:
                first[stored] += (start + step * begin - at) * own
            pieces.append(
                Piece(
                    _with(one.start, axis, begin),
                    _with(one.extent, axis, end - begin),
                    one.source,
                    tuple(first),
                    _with(one.axes, axis, (stored, own * step)),
                )
            )
        return Arrangement(self.dtype, _with(self.shape, axis, count), tuple(pieces))

    def select(self, axis: int, at: int) -> Arrangement:
        """One element along an axis, without that axis."""
        taken = self.take(axis, at, 1)
        pieces = (
            Piece(
                _without(one.start, axis),
                _without(one.extent, axis),
                one.source,
                one.first,
                _without(one.axes, axis),
            )
            for one in taken.pieces
        )
        return Arrangement(self.dtype, _without(self.shape, axis), tuple(pieces))

    def insert(self, axis: int) -> Arrangement:
        """The same with a new axis of one element."""
        pieces = (
            Piece(
                (*one.start[:axis], 0, *one.start[axis:]),
                (*one.extent[:axis], 1, *one.extent[axis:]),
                one.source,
                one.first,
                (*one.axes[:axis], (None, 1), *one.axes[axis:]),
            )
            for one in self.pieces
        )
        return Arrangement(self.dtype, (*self.shape[:axis], 1, *self.shape[axis:]), tuple(pieces))

    def permute(self, axes: Sequence[int]) -> Arrangement:
        """The same with its axes in another order, as of :func:`numpy.transpose`."""
        pieces = (
            Piece(
                tuple(one.start[axis] for axis in axes),
                tuple(one.extent[axis] for axis in axes),
                one.source,
                one.first,
                tuple(one.axes[axis] for axis in axes),
            )
            for one in self.pieces
        )
        return Arrangement(self.dtype, tuple(self.shape[axis] for axis in axes), tuple(pieces))


@dataclass(frozen=True, slots=True, eq=False)
class Computed:
    """A tensor that the engine computes from others."""

    dtype: str
    shape: tuple[int, ...]
    #: ``fill``, ``cast``, ``scale``, ``divide``, ``add``, ``dequantise`` or ``merge``.
    operation: str
    operands: tuple[Arrangement, ...]
    constant: float = 0.0
    #: The blocks of a dequantisation.
    block: tuple[int, ...] = ()

    def whole(self) -> Arrangement:
        """It as it is."""
        return Arrangement.whole(self, self.dtype, self.shape)


class EngineRows:
    """Tensors in the engine's form. Computed ones are apart, and operands come first."""

    def __init__(self) -> None:
        self.computed: list[_core._ComputedTensor] = []
        self._numbers: dict[Computed, int] = {}

    def tensor(self, one: Arrangement) -> _core._MappedTensor:
        """The row of a tensor."""
        rows = [
            (piece.start, piece.extent, *self._source(piece.source), piece.first, piece.axes)
            for piece in one.pieces
        ]
        return one.shape, rows

    def _source(self, source: int | Computed) -> tuple[int, bool]:
        if isinstance(source, int):
            return source, False
        number = self._numbers.get(source)
        if number is None:
            operands = [self.tensor(operand) for operand in source.operands]
            number = self._numbers[source] = len(self.computed)
            self.computed.append(
                (source.dtype, source.shape, source.operation, source.constant, source.block, operands)
            )
        return number, True


def concat(parts: Sequence[Arrangement], axis: int) -> Arrangement:
    """Tensors one behind the other along an axis. Their other sizes are the same."""
    pieces = list(parts[0].pieces)
    length = parts[0].shape[axis]
    for part in parts[1:]:
        pieces += [
            Piece(
                _with(one.start, axis, one.start[axis] + length), one.extent, one.source, one.first, one.axes
            )
            for one in part.pieces
        ]
        length += part.shape[axis]
    return Arrangement(parts[0].dtype, _with(parts[0].shape, axis, length), tuple(pieces))


@cache
def _unmoved(ndim: int) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """The first element of a tensor, and its own axes."""
    return (0,) * ndim, tuple((axis, 1) for axis in range(ndim))


def _with(values: tuple[_T, ...], axis: int, value: _T) -> tuple[_T, ...]:
    return (*values[:axis], value, *values[axis + 1 :])


def _without(values: tuple[_T, ...], axis: int) -> tuple[_T, ...]:
    return (*values[:axis], *values[axis + 1 :])
