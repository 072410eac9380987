"""What a caller wants back, without data: :class:`ArraySpec` and the markers that stand in a ``like``."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, Generic, TypeVar, final

import ml_dtypes
import numpy as np
import numpy.typing as npt

from .checks import shown
from .errors import MisuseError

T = TypeVar("T")


@lru_cache(maxsize=256)
def _named_dtype(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


def to_dtype(name: Any) -> np.dtype[Any]:
    """A numpy dtype from a name (``ml_dtypes`` names too), a type or a dtype."""
    return _named_dtype(name) if type(name) is str else np.dtype(name)


@lru_cache(maxsize=256)
def native_name(dtype: np.dtype[Any]) -> str:
    """The name of a dtype's elements in the byte order of this machine."""
    return dtype.newbyteorder("=").name


def _shape(shape: Any) -> tuple[int, ...]:
    try:
        sizes = (operator.index(shape),) if hasattr(shape, "__index__") else tuple(map(operator.index, shape))
    except TypeError as error:
        raise MisuseError(f"the shape of an ArraySpec is a tuple of integers, not {shown(shape)}") from error
    if any(n < 0 for n in sizes):
        raise MisuseError(f"the shape of an ArraySpec has no negative sizes: {sizes}")
    return sizes


def _dtype(dtype: Any) -> np.dtype[Any]:
    try:
        return to_dtype(dtype)
    except (TypeError, ValueError) as error:
        raise MisuseError(
            f"the dtype of an ArraySpec is one of numpy or ml_dtypes, not {shown(dtype)}"
        ) from error


@final
@dataclass(frozen=True, slots=True, init=False)
class ArraySpec:
    """Shape and dtype of an array, without its data.

    ``shape`` (elements along each dimension) or ``dtype`` (of numpy, ``ml_dtypes``, or the name of one) may be ``None``: as stored. ``layout`` says which part of
    the logical tensor is wanted and how it lies in memory; ``None`` is all of it, in C order, and nothing else is supported yet.
    """

    shape: tuple[int, ...] | None
    dtype: np.dtype[Any] | None
    layout: Any

    def __init__(
        self, shape: Any = None, dtype: npt.DTypeLike | str | None = None, layout: Any = None
    ) -> None:
        object.__setattr__(self, "shape", None if shape is None else _shape(shape))
        object.__setattr__(self, "dtype", None if dtype is None else _dtype(dtype))
        object.__setattr__(self, "layout", layout)

    @property
    def nbytes(self) -> int | None:
        """Bytes of the whole array, where both shape and dtype are known."""
        if self.shape is None or self.dtype is None:
            return None
        count = 1
        for n in self.shape:
            count *= n
        return count * self.dtype.itemsize

    def __repr__(self) -> str:
        dtype = None if self.dtype is None else self.dtype.name
        return f"ArraySpec({self.shape}, {dtype!r})"


@final
class _AsStored:
    """In a ``like``: whatever is stored at this place (a leaf or a whole subtree), as it is stored."""

    __slots__ = ()

    def __repr__(self) -> str:
        return "stepwell.AS_STORED"

    def __reduce__(self) -> str:
        return "AS_STORED"


#: In a ``like``: whatever is stored at this place (a leaf or a whole subtree), as it is stored.
AS_STORED: Final = _AsStored()


@final
@dataclass(frozen=True, slots=True)
class ObjectSpec:
    """In the tree of :class:`Metadata`: a leaf that is an object (a number, a string, a list of them, ...), not an array."""


@final
@dataclass(frozen=True, slots=True)
class PerRank(Generic[T]):
    """A value that differs on every rank. **Not supported yet**: it is refused by path, in a save and in a ``like``. Stored as it is, a run of one process would
    leave a value that a run of many could only take for everybody's."""

    value: T


#: Why :class:`PerRank` is refused.
NO_PER_RANK: Final = (
    "values that differ on every rank (sw.PerRank) are not supported yet; "
    "pass the value itself where one process is all there is"
)


@final
@dataclass(frozen=True, slots=True)
class Replicated(Generic[T]):
    """A value that should be the same on every rank and may drift. It is stored as the value itself, that of the one process that there is; ``pick`` says whose it is to
    be where there are many."""

    value: T
    pick: str = "first"
