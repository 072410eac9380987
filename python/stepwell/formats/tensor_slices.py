"""Tensors whose slices tensor-parallel ranks have: whole tensors with the chunks of all slices.

A slice may itself be cut into flat runs, as ZeRO does. A run of a slice is several boxes of the
whole tensor.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from .._state.specs import to_dtype
from .description import Chunk, Tensor, fits, row_major
from .pickle_values import Malformed

Indices = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SliceRule:
    """How a tensor is cut."""

    #: The axis that is cut. ``None``: each rank has the whole tensor.
    axis: int | None
    #: Equal parts along the axis, each of which is cut by itself.
    parts: int = 1
    #: Rows that are no padding, if the last ones are.
    rows: int | None = None


def whole(slices: Sequence[Tensor], rule: SliceRule) -> Tensor:
    """Returns the whole tensor of these slices."""
    first, axis = slices[0], rule.axis
    if first.shape == () or axis is None:
        for one in slices:
            if (one.dtype, one.shape) != (first.dtype, first.shape):
                raise Malformed(
                    f"its copies are {first.dtype}{list(first.shape)} and {one.dtype}{list(one.shape)}"
                )
        if first.shape == () or rule.rows is None or rule.rows >= first.shape[0]:
            return first
        slices, axis = slices[:1], 0
    for one in slices:
        same = (one.dtype, len(one.shape), one.shape[:axis], one.shape[axis + 1 :])
        if same != (first.dtype, len(first.shape), first.shape[:axis], first.shape[axis + 1 :]):
            raise Malformed(f"its slices have the shapes {list(first.shape)} and {list(one.shape)}")
        if axis >= len(one.shape) or one.shape[axis] % rule.parts:
            raise Malformed(f"a slice of shape {list(one.shape)} is not cut along axis {axis}")
    sizes = [one.shape[axis] for one in slices]
    shape = (*first.shape[:axis], sum(sizes), *first.shape[axis + 1 :])
    if rule.rows is not None:
        shape = (min(rule.rows, shape[0]), *shape[1:])
    itemsize = to_dtype(first.dtype).itemsize
    if not fits(shape, itemsize):
        raise Malformed(f"a tensor of {itemsize} bytes times {list(shape)}")
    chunks: list[Chunk] = []
    begin = 0
    for part in range(rule.parts):
        for one in slices:
            size = one.shape[axis] // rule.parts
            shift = begin - part * size
            for chunk in one.chunks:
                if axis == 0 and rule.parts == 1 and len(chunk.start) != len(one.shape):
                    chunks.extend(_moved(chunk, shift * math.prod(shape[1:]), math.prod(shape), itemsize))
                    continue
                for box in _boxes(chunk, one.shape, itemsize):
                    chunks.extend(_placed(box, axis, (part * size, size), shift, shape, itemsize))
            begin += size
    return Tensor(first.dtype, shape, tuple(chunks))


def _moved(chunk: Chunk, by: int, elements: int, itemsize: int) -> Iterator[Chunk]:
    """A run, that many elements further, as far as there are so many elements."""
    start = chunk.start[0] + by
    size = min(chunk.extent[0], elements - start)
    if size > 0:
        yield replace(chunk, start=(start,), extent=(size,), nbytes=size * itemsize)


def _boxes(chunk: Chunk, shape: Indices, itemsize: int) -> Iterator[Chunk]:
    """A chunk as boxes of a tensor of that shape, with their strides."""
    if len(chunk.start) == len(shape) and (len(shape) != 1 or chunk.strides is not None):
        yield replace(chunk, strides=chunk.strides or row_major(chunk.extent, itemsize))
        return
    strides = row_major(shape, itemsize)
    first = chunk.start[0]
    for start, extent in run_boxes(shape, first, chunk.extent[0]):
        flat = sum(at * step for at, step in zip(start, strides, strict=True))
        offset = chunk.offset + flat - first * itemsize
        yield replace(chunk, offset=offset, start=start, extent=extent, strides=strides)


def run_boxes(shape: Indices, first: int, count: int) -> Iterator[tuple[Indices, Indices]]:
    """Returns the boxes that a run of elements of a row-major tensor is made of: start and extent
    of each. There are at most two for each axis."""
    if count <= 0:
        return
    if len(shape) == 1:
        yield (first,), (count,)
        return
    inner = math.prod(shape[1:])
    row, begin = divmod(first, inner)
    if begin or count < inner:
        here = min(count, inner - begin)
        for start, extent in run_boxes(shape[1:], begin, here):
            yield (row, *start), (1, *extent)
        yield from run_boxes(shape, first + here, count - here)
        return
    rows = count // inner
    yield (row, *(0 for _ in shape[1:])), (rows, *shape[1:])
    yield from run_boxes(shape, first + rows * inner, count - rows * inner)


def _placed(
    box: Chunk, axis: int, interval: tuple[int, int], shift: int, shape: Indices, itemsize: int
) -> Iterator[Chunk]:
    """Cuts a box to an interval of an axis, and moves it along the axis. Elements outside the shape
    are padding."""
    assert box.strides is not None
    begin = max(box.start[axis], interval[0])
    end = min(box.start[axis] + box.extent[axis], sum(interval))
    start, extent = list(box.start), list(box.extent)
    start[axis], extent[axis] = begin + shift, end - begin
    offset = box.offset + (begin - box.start[axis]) * box.strides[axis]
    extent[0] = min(extent[0], shape[0] - start[0])
    if min(extent) <= 0:
        return
    size = tuple(extent)
    span = sum((one - 1) * step for one, step in zip(size, box.strides, strict=True)) + itemsize
    packed = row_major(size, itemsize)
    strides = tuple(
        own if one == 1 else step for one, step, own in zip(size, box.strides, packed, strict=True)
    )
    yield replace(
        box,
        offset=offset,
        nbytes=span,
        start=tuple(start),
        extent=size,
        strides=None if strides == packed else strides,
    )
