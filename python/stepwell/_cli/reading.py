"""Reading arrays piece by piece: arrays larger than memory can be printed, written to a file and
compared."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import prod
from typing import TypeAlias

import numpy as np

#: Values that were read, of any dtype.
Values: TypeAlias = np.ndarray

#: Bytes of one piece.
PIECE_BYTES = 32 << 20


def pieces(shape: Sequence[int], itemsize: int, limit: int = PIECE_BYTES) -> Iterator[tuple[slice, ...]]:
    """Cuts an array into boxes of at most ``limit`` bytes (or one element), in row-major order:
    each is a run of the flattened array."""
    if not shape or prod(shape) * itemsize <= limit:
        if prod(shape):
            yield tuple(slice(0, n) for n in shape)
        return
    # The outermost dimension of which one place fits the limit. Dimensions before it are read place
    # by place.
    axis = next((i for i in range(len(shape)) if prod(shape[i + 1 :]) * itemsize <= limit), len(shape) - 1)
    step = max(1, limit // (prod(shape[axis + 1 :]) * itemsize))
    for outer in np.ndindex(*shape[:axis]):
        for at in range(0, shape[axis], step):
            inner = slice(at, min(at + step, shape[axis]))
            yield (*(slice(i, i + 1) for i in outer), inner, *(slice(0, n) for n in shape[axis + 1 :]))
