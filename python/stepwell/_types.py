"""Types that several modules share. A value that is only handed on is an ``object``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, SupportsFloat, SupportsIndex, TypeAlias

#: A value of JSON.
Json: TypeAlias = "bool | int | float | str | Sequence[Json] | Mapping[str, Json] | None"
#: Metrics by name: real numbers, and arrays without dimensions.
Metrics: TypeAlias = Mapping[str, SupportsFloat | SupportsIndex]


class Array(Protocol):
    """An array of numpy, torch or JAX."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Elements along each dimension."""

    @property
    def dtype(self) -> object:
        """The library's element type."""


#: The value of an array that was read: one array, or one for each box of it.
Read: TypeAlias = Array | list[Array]
