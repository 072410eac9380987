"""Reading arrays piece by piece, in bounded memory: what is larger than memory can be printed,
written to a file and compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import Any, TypeAlias

import numpy as np

from .._checkpoint import Checkpoint
from .._restore.allocate import Allocator

#: Bytes of one piece.
PIECE_BYTES = 32 << 20

#: Start and length along each dimension.
Box: TypeAlias = tuple[tuple[int, int], ...]
#: A leaf, which part of it, and its dtype.
Part: TypeAlias = tuple[int, Box, np.dtype[Any]]


def pieces(box: Sequence[tuple[int, int]], itemsize: int, limit: int = PIECE_BYTES) -> Iterator[Box]:
    """A box cut into boxes of at most ``limit`` bytes (or one element), in row-major order: each is
    a run of the flattened whole."""
    extents = [n for _, n in box]
    if not box or prod(extents) * itemsize <= limit:
        if prod(extents):
            yield tuple(box)
        return
    # The outermost dimension of which one place fits the limit. Dimensions before it are read place
    # by place.
    axis = next((i for i in range(len(box)) if prod(extents[i + 1 :]) * itemsize <= limit), len(box) - 1)
    step = max(1, limit // max(1, prod(extents[axis + 1 :]) * itemsize))
    for outer in np.ndindex(*extents[:axis]):
        head = tuple((box[i][0] + outer[i], 1) for i in range(axis))
        start, length = box[axis]
        for at in range(0, length, step):
            yield (*head, (start + at, min(step, length - at)), *box[axis + 1 :])


def read_parts(checkpoint: Checkpoint, parts: Sequence[Part]) -> list[np.ndarray[Any, Any]]:
    """Reads parts of leaves in one go; every block of them is verified."""
    allocator = Allocator()
    arrays = [allocator.empty(tuple(n for _, n in box), dtype) for _, box, dtype in parts]
    checkpoint._open().read(
        [
            (leaf, [start for start, _ in box], [n for _, n in box], array)
            for (leaf, box, _), array in zip(parts, arrays, strict=True)
            if array.size
        ]
    )
    return arrays
