"""Memory for restored arrays: 64-byte aligned, few page faults.

All of it is private anonymous memory in huge pages (where the system has them), each mapping
starting on one. A large array gets a mapping of its own. Small ones share slabs of 2 MiB, each one
huge page: twenty thousand small arrays of their own would fault every 4 KiB page that they touch
one by one, and a fault costs more than the read that fills the page (about 2 GB/s against 15 or
more into warm memory). Larger slabs would save no fault, since a fault fills one huge page whatever
the mapping's size, and a slab lives as long as the last array in it: hence a single surviving small
leaf holds on to 2 MiB, one of 512 KiB or more to four times that, and no more.
"""

from __future__ import annotations

import contextlib
import mmap
from math import prod

import numpy as np

#: From here on an array has memory of its own.
LARGE = 4 << 20
#: One huge page.
SLAB = 2 << 20
#: Bytes that are taken beyond what a restore asked for, at most. Nearly all of the 64 MiB that it
#: may use besides its result are its read buffers'.
MOST_WASTE = 2 << 20
#: Alignment for vector units and for zero-copy imports by other frameworks.
ALIGNMENT = 64


class Allocator:
    """Hands out uninitialised arrays; one per restore."""

    __slots__ = ("_map", "_medium", "_small")

    def __init__(self) -> None:
        self._map = Mapper()
        self._small = _Slabs(SLAB, self._map)
        self._medium = _Slabs(4 * SLAB, self._map)

    def empty(self, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
        """A C-ordered, uninitialised array."""
        nbytes = prod(shape) * dtype.itemsize
        if nbytes == 0:
            return np.empty(shape, dtype)
        if nbytes >= LARGE:
            return np.ndarray(shape, dtype, self._map(nbytes))
        slabs = self._small if nbytes <= SLAB // 4 else self._medium
        slab, offset = slabs.take(nbytes)
        return np.ndarray(shape, dtype, slab, offset)


class _Slabs:
    """A bump allocator over slabs of one size."""

    __slots__ = ("_current", "_map", "_size", "_used")

    def __init__(self, size: int, mapper: Mapper) -> None:
        self._map = mapper
        self._size = size
        self._current: _Mapping | None = None
        self._used = 0

    def take(self, nbytes: int) -> tuple[np.ndarray, int]:
        """A slab and an aligned offset in it with room for ``nbytes``."""
        if self._current is None or self._used + nbytes > self._size:
            if self._current is not None:
                self._map.end(self._current, self._used)
            self._current = self._map.mapping(self._size)
            self._used = 0
        offset = self._used
        self._used += -(-nbytes // ALIGNMENT) * ALIGNMENT
        return self._current.memory, offset


class _Mapping:
    """Memory that begins on a huge page, which is ``skip`` bytes behind the beginning of what the
    system gave."""

    __slots__ = ("_mapped", "_skip", "memory")

    def __init__(self, mapped: mmap.mmap, size: int) -> None:
        raw = np.frombuffer(mapped, np.uint8)
        self._mapped = mapped
        self._skip = -raw.ctypes.data % SLAB
        self.memory: np.ndarray = raw[self._skip : self._skip + size]

    def advise(self, advice: str, start: int, length: int) -> None:
        option = getattr(mmap, advice, None)
        if option is not None and length:
            with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
                self._mapped.madvise(option, self._skip + start, length)


class Mapper:
    """Mappings of one restore, on huge pages; what they take beyond what is asked for adds up to
    :data:`MOST_WASTE` at most.

    A last huge page that is used by half at least is worth its waste: small pages would be 256
    faults. It is huge as long as there is waste left.
    """

    __slots__ = ("_left",)

    def __init__(self) -> None:
        self._left = MOST_WASTE

    def __call__(self, size: int) -> np.ndarray:
        """``size`` bytes of a mapping of their own."""
        return self.mapping(size).memory

    def mapping(self, size: int) -> _Mapping:
        """The same, of which not all may be used. It is longer by up to two huge pages, which are
        never touched."""
        length = -(-size // SLAB) * SLAB
        try:
            mapped = mmap.mmap(-1, length + SLAB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except (OSError, OverflowError, ValueError) as error:
            raise MemoryError(
                f"the system gives no {length} bytes of memory for restored arrays: {error}"
            ) from error
        mapping = _Mapping(mapped, size)
        mapping.advise("MADV_HUGEPAGE", 0, length if self._is_worth(length - size) else length - SLAB)
        return mapping

    def end(self, mapping: _Mapping, used: int) -> None:
        """Nothing comes behind the first ``used`` bytes, which nobody has touched yet."""
        waste = -used % SLAB
        if not self._is_worth(waste):
            mapping.advise("MADV_NOHUGEPAGE", used + waste - SLAB, SLAB)

    def _is_worth(self, waste: int) -> bool:
        """True if a huge page is taken of which so much is not used."""
        if waste > min(SLAB // 2, self._left):
            return False
        self._left -= waste
        return True
