"""Memory for restored arrays: 64-byte aligned, few page faults.

A large array gets memory of its own: numpy asks for huge pages from 4 MiB on. Small ones share slabs of 2 MiB, each one huge page. Twenty
thousand small arrays of their own would fault every 4 KiB page that they touch one by one, and a fault costs more than the read that fills
the page (about 2 GB/s against 15 or more into warm memory). A slab lives as long as the last array in it, hence slabs are small: a single
surviving small leaf holds on to 2 MiB, one of 512 KiB or more to four times that.
"""

from __future__ import annotations

import mmap
from math import prod
from typing import Any

import numpy as np

#: From here on an array has memory of its own.
LARGE = 4 << 20
#: One huge page.
SLAB = 2 << 20
#: What vector units and zero-copy imports of other frameworks want.
ALIGNMENT = 64


class Allocator:
    """Hands out uninitialised arrays; one per restore."""

    __slots__ = ("_medium", "_small")

    def __init__(self) -> None:
        self._small = _Slabs(SLAB)
        self._medium = _Slabs(4 * SLAB)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
        """A C-ordered, uninitialised array."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes == 0:
            return np.empty(shape, dtype)
        if nbytes >= LARGE:
            raw = np.empty(nbytes + ALIGNMENT, np.uint8)
            return np.ndarray(shape, dtype, raw, -raw.ctypes.data % ALIGNMENT)
        slabs = self._small if nbytes <= SLAB // 4 else self._medium
        slab, offset = slabs.take(nbytes)
        return np.ndarray(shape, dtype, slab, offset)


class _Slabs:
    """A bump allocator over slabs of one size."""

    __slots__ = ("_current", "_size", "_used")

    def __init__(self, size: int) -> None:
        self._size = size
        self._current: np.ndarray[Any, np.dtype[np.uint8]] | None = None
        self._used = 0

    def take(self, nbytes: int) -> tuple[np.ndarray[Any, np.dtype[np.uint8]], int]:
        """A slab and an aligned offset in it with room for ``nbytes``."""
        if self._current is None or self._used + nbytes > self._size:
            self._current = _slab(self._size)
            self._used = 0
        offset = self._used
        self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return self._current, offset


def _slab(size: int) -> np.ndarray[Any, np.dtype[np.uint8]]:
    """``size`` bytes that start on a huge page. The mapping is longer by one huge page, which is never touched."""
    mapping = mmap.mmap(-1, size + SLAB)
    raw = np.frombuffer(mapping, np.uint8)
    skip = -raw.ctypes.data % SLAB
    advice = getattr(mmap, "MADV_HUGEPAGE", None)
    if advice is not None:
        try:
            mapping.madvise(advice, skip, size)
        except OSError:
            pass  # a kernel without huge pages: slower, not wrong
    return raw[skip : skip + size]
