"""Abstract leaves: :class:`ArraySpec` and the markers in a ``like``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import Final, Generic, SupportsIndex, TypeAlias, TypeVar, cast, final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .._checks import shown, sizes
from .._public import public
from ..errors import MisuseError

T = TypeVar("T")
#: A shape as a caller gives it: numbers, or one of them.
Sizes: TypeAlias = SupportsIndex | Iterable[SupportsIndex]


@lru_cache(maxsize=256)
def _named_dtype(name: str) -> np.dtype:
    return np.dtype(getattr(ml_dtypes, name, name))


def to_dtype(name: object) -> np.dtype:
    """A numpy dtype from a name (``ml_dtypes`` names too), a type or a dtype."""
    return _named_dtype(name) if type(name) is str else np.dtype(cast(npt.DTypeLike, name))


@lru_cache(maxsize=256)
def native_name(dtype: np.dtype) -> str:
    """The name of a dtype's elements in the byte order of this machine."""
    return dtype.newbyteorder("=").name


def is_complex(dtype: np.dtype) -> bool:
    """True for complex numbers, also for those of ``ml_dtypes``."""
    return "complex" in dtype.name


def _shape(shape: Sizes) -> tuple[int, ...]:
    numbers = (shape,) if isinstance(shape, SupportsIndex) else shape
    return sizes(numbers, "the shape of an ArraySpec")


def _dtype(dtype: npt.DTypeLike) -> np.dtype:
    try:
        return to_dtype(dtype)
    except (TypeError, ValueError) as error:
        raise MisuseError(
            f"the dtype of an ArraySpec is one of numpy or ml_dtypes, not {shown(dtype)}"
        ) from error


@public
@final
@dataclass(frozen=True, slots=True, init=False)
class ArraySpec:
    """Shape and dtype of an array, without its data.

    ``shape`` (elements along each dimension) or ``dtype`` (of numpy, ``ml_dtypes``, or a name) may
    be ``None``: as stored. A :class:`~stepwell.sharding.LocalShard`,
    :class:`~stepwell.sharding.Segments` or :class:`~stepwell.sharding.FlatShard` over a spec
    describes a process's part of a tensor.
    """

    shape: tuple[int, ...] | None
    dtype: np.dtype | None

    def __init__(self, shape: Sizes | None = None, dtype: npt.DTypeLike | str | None = None) -> None:
        object.__setattr__(self, "shape", None if shape is None else _shape(shape))
        object.__setattr__(self, "dtype", None if dtype is None else _dtype(dtype))

    @property
    def nbytes(self) -> int | None:
        """Bytes of the whole array, where both shape and dtype are known."""
        if self.shape is None or self.dtype is None:
            return None
        count = 1
        for n in self.shape:
            count *= n
        return count * self.dtype.itemsize

    def pieces(self, limit: int = 32 << 20) -> Iterator[tuple[slice, ...]]:
        """Cuts the array into boxes of at most ``limit`` bytes (or one element), in row-major
        order: each is a run of the flattened array. For arrays that are larger than memory."""
        if self.shape is None or self.dtype is None:
            raise MisuseError(f"{self!r} cannot be cut into pieces: give it a shape and a dtype")
        shape, itemsize = self.shape, self.dtype.itemsize
        if not shape or prod(shape) * itemsize <= limit:
            if prod(shape):
                yield tuple(slice(0, n) for n in shape)
            return
        # The outermost dimension of which one place fits the limit. Dimensions before it are cut
        # place by place.
        axis = next(
            (i for i in range(len(shape)) if prod(shape[i + 1 :]) * itemsize <= limit), len(shape) - 1
        )
        step = max(1, limit // (prod(shape[axis + 1 :]) * itemsize))
        for outer in np.ndindex(*shape[:axis]):
            for at in range(0, shape[axis], step):
                inner = slice(at, min(at + step, shape[axis]))
                yield (*(slice(i, i + 1) for i in outer), inner, *(slice(0, n) for n in shape[axis + 1 :]))

    def __repr__(self) -> str:
        dtype = None if self.dtype is None else self.dtype.name
        return f"ArraySpec({self.shape}, {dtype!r})"


@final
class _AsStored:
    """In a ``like``: whatever is stored at this place (a leaf or a whole subtree), as it is
    stored."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "stepwell.AS_STORED"

    def __reduce__(self) -> str:
        return "AS_STORED"


#: In a ``like``: whatever is stored at this place (a leaf or a whole subtree), as it is stored.
AS_STORED: Final = _AsStored()


@public
@final
@dataclass(frozen=True, slots=True)
class ObjectSpec:
    """A leaf that is an object (a number, a string, a list of them, ...), not an array, in the tree
    of :class:`~stepwell.results.Metadata`."""


#: This process's rank and how many there are, while a manager of several takes a state apart or
#: puts one together.
current_rank: ContextVar[tuple[int, int]] = ContextVar("stepwell.rank", default=(0, 1))


@contextmanager
def as_rank(rank: tuple[int, int]) -> Iterator[None]:
    """Has states taken apart as those of this rank: its number, and how many there are."""
    token = current_rank.set(rank)
    try:
        yield
    finally:
        current_rank.reset(token)


@public
@final
@dataclass(frozen=True, slots=True)
class PerRank(Generic[T]):
    """A value that differs on every rank: the state of a random generator, of a data loader. It is
    stored once for each of them, and every rank gets its own back.

    If other ranks restore a step than saved it, ``resize`` must assign the values, because nobody
    else can.

    Args:
        value: the value; in a ``like`` or ``into``, the wanted one.
        key: distinguishes it from those of other ranks; default: the rank. Coordinates in a mesh
            (``"dp=1,tp=0"``) stay right if ranks are renumbered.
        resize: ``resize(values, rank, world_size)`` returns this rank's value, from those of all
            ranks that saved, in the order of their keys.
    """

    value: T
    key: str | None = None
    resize: Callable[[list[T], int, int], T] | None = None

    def stored_key(self) -> str:
        """The key under which this process's value is stored."""
        return str(current_rank.get()[0]) if self.key is None else self.key


#: How the values of all ranks are stored: a container of this type, with a child for each.
PER_RANK: Final = "stepwell.PerRank"


@public
@final
@dataclass(frozen=True, slots=True)
class Replicated(Generic[T]):
    """A value that should be the same on every rank and may drift (the statistics of BatchNorm
    under DDP). A checkpoint stores the value of the first rank that has it."""

    value: T
