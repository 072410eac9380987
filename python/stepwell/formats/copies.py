"""Copies of a tensor that several ranks have in their files. A restore reads one of them, so a
verification compares the others with it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from .. import _core
from .._paths import render
from .description import Copy, Description, Tensor, file_of

#: Copies that are compared together.
_TOGETHER = 4096


@dataclass(frozen=True, slots=True)
class Copies:
    """The copies of a checkpoint."""

    all: Sequence[Copy]
    #: The reading that their files belong to.
    reading: _core.Reading

    def differing(self) -> list[tuple[str, str, str]]:
        """Returns the file of each copy with other values, its leaf's path, and what is wrong."""
        found: list[tuple[str, str, str]] = []
        for begin in range(0, len(self.all), _TOGETHER):
            some = self.all[begin : begin + _TOGETHER]
            read, other = self._opened([one.read for one in some]), self._opened([one.other for one in some])
            try:
                rows = [(number, number, one.read.dtype) for number, one in enumerate(some)]
                for number in _core.compare_tensors(read, other, rows):
                    kept, file = file_of(some[number].read), file_of(some[number].other)
                    what = f"its values differ from those in {kept}, which a restore reads"
                    found.append((file, render(some[number].leaf), what))
            finally:
                read.close()
                other.close()
        return found

    def _opened(self, tensors: Sequence[Tensor]) -> _core.Checkpoint:
        # Each is a leaf of its own, also one that occurs twice.
        state = [replace(one) for one in tensors]
        return Description("copies", file_of(tensors[0]), state, reading=self.reading).open("auto")
