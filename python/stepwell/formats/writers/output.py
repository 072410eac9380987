"""An output file, piece by piece, in the engine's form."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Protocol, TypeVar

from ... import _core
from ..._paths import listed
from ..._state.specs import to_dtype
from ...errors import MisuseError


@dataclass(frozen=True, slots=True)
class OutputTensor:
    """A tensor in an output file."""

    #: Its name in the output.
    name: str
    #: The leaf of the source.
    leaf: int
    #: The dtype in the output.
    dtype: str
    shape: tuple[int, ...]
    #: Its rendered path in the source, for messages.
    source: str = ""

    @property
    def itemsize(self) -> int:
        """Bytes of an element."""
        return to_dtype(self.dtype).itemsize

    @property
    def nbytes(self) -> int:
        """Bytes of all elements."""
        return prod(self.shape) * self.itemsize


def check_dtypes(
    tensors: Iterable[OutputTensor], holds: Callable[[str], bool], what: str, remedy: str
) -> None:
    """Refuses the tensors of dtypes that are not held. ``what``: what cannot hold them."""
    wrong = {tensor.source: tensor.dtype for tensor in tensors if not holds(tensor.dtype)}
    if wrong:
        raise MisuseError(f"{what} the dtypes of {listed(list(wrong), wrong)}. {remedy} with exclude=")


class Sized(Protocol):
    """A thing with a size."""

    @property
    def nbytes(self) -> int:
        """Its bytes."""


_Sized = TypeVar("_Sized", bound=Sized)


def shards(tensors: Sequence[_Sized], most: int) -> list[list[_Sized]]:
    """Tensors in order, in shards of at most so many bytes. A larger tensor has its own shard."""
    found: list[list[_Sized]] = [[]]
    nbytes = 0
    for tensor in tensors:
        if found[-1] and nbytes + tensor.nbytes > most:
            found.append([])
            nbytes = 0
        found[-1].append(tensor)
        nbytes += tensor.nbytes
    return found


class OutputFile:
    """A file that is planned from its beginning to its end."""

    def __init__(self, name: str) -> None:
        self.name = name
        #: Bytes so far.
        self.length = 0
        self.pieces: list[_core._PieceRow] = []

    def add_bytes(self, data: bytes) -> int:
        """Adds literal bytes. Returns the number of the piece."""
        return self._add((self.length, len(data), data, None, None))

    def add_tensor(self, tensor: OutputTensor) -> int:
        """Adds a whole tensor. Returns the number of the piece."""
        return self._add((self.length, tensor.nbytes, None, (tensor.leaf, tensor.dtype), None))

    def add_crc32(self, first: int, last: int) -> int:
        """Adds the CRC-32 of earlier pieces, in four bytes. Returns the number of the piece."""
        return self._add((self.length, 4, None, None, (first, last)))

    def _add(self, piece: _core._PieceRow) -> int:
        self.pieces.append(piece)
        self.length += piece[1]
        return len(self.pieces) - 1
