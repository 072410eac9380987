"""State providers of the user's: leaves whose bytes lie wherever they are, in as many pieces as there are.

A leaf is usually an array. What is no array, and would first have to be copied into one (a table that lives in pages, a cache that is sharded by hand, a tensor of which a part is on a
device and a part on the host), can say where its bytes are instead: a class with ``dtype``, ``shape`` and :meth:`StateProvider.stepwell_chunks` is stored as one array, chunk by chunk, without a
copy on the way. (The idea of composable providers of chunks: DataStates-LLM, §4.2.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np

from .adapters import Target
from .errors import MisuseError
from .specs import ArraySpec, native_name, to_dtype


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a provider's array."""

    #: Its values: an array of numpy, torch or JAX, in host memory or on a device.
    array: Any
    #: Where its first element is in the whole; empty: at the begin.
    offset: tuple[int, ...] = ()
    #: ``"now"``: copied (on a device: fenced) when ``save`` returns. ``"lazy"``: it is changed in guarded updates only, or after ``save.wait_captured()``.
    capture: Literal["now", "lazy"] = "now"


class StateProvider(Protocol):
    """What an object has that gives its bytes in chunks."""

    #: The element type of the whole (a numpy dtype, or its name).
    dtype: Any
    #: The shape of the whole.
    shape: tuple[int, ...]

    def stepwell_chunks(self) -> Iterable[Chunk]:
        """Its chunks, which together are all of it, each element once. They are stored in this order. Called by ``save``, on its thread; what the chunks refer to is kept until it is
        captured. Called by ``restore(into=…)`` too: every chunk is filled."""
        ...


def is_provider(obj: Any) -> bool:
    """Whether an object is one."""
    return hasattr(type(obj), "stepwell_chunks")


def _chunks(provider: Any) -> list[tuple[tuple[int, ...], Any, bool]]:
    """Offset, array, and whether it is lazy."""
    shape = tuple(provider.shape)
    found = []
    for chunk in provider.stepwell_chunks():
        if not isinstance(chunk, Chunk):
            raise MisuseError(f"stepwell_chunks() gives sw.Chunk(…), not {type(chunk).__qualname__}")
        if chunk.capture not in ("now", "lazy"):
            raise MisuseError(f'capture={chunk.capture!r} of a Chunk is neither "now" nor "lazy"')
        found.append((chunk.offset or (0,) * len(shape), chunk.array, chunk.capture == "lazy"))
    return found


def describe(
    provider: Any,
) -> tuple[Literal["sharded"], str, list[int], list[Any], None] | tuple[Literal["refuse"], str]:
    """Its chunks, for the walk over a state."""
    dtype = to_dtype(provider.dtype)
    chunks = _chunks(provider)
    for _, array, _ in chunks:
        if isinstance(array, np.ndarray) and array.dtype != dtype:
            return ("refuse", f"a chunk of {array.dtype} in a provider of {dtype}; convert it with .astype()")
    return ("sharded", native_name(dtype), list(provider.shape), list(chunks), None)


def target(provider: Any) -> Target:
    """What is wanted where one is: every chunk filled; for ``like=`` one array."""
    return Target(ArraySpec(tuple(provider.shape), to_dtype(provider.dtype)), _finish, provider)


def _finish(found: list[tuple[Target, Any]], fill: bool) -> list[Any]:
    results = []
    for one, value in found:
        if not fill:
            results.append(value)
            continue
        for offset, array, _ in _chunks(one.value):
            box = tuple(slice(first, first + n) for first, n in zip(offset, array.shape, strict=True))
            _fill(array, value[box])
        results.append(one.value)
    return results


def _fill(array: Any, values: np.ndarray[Any, Any]) -> None:
    if isinstance(array, np.ndarray):
        np.copyto(array, values)
        return
    if not hasattr(array, "copy_"):
        raise MisuseError(
            f"a chunk in a {type(array).__qualname__}, which cannot be changed; pass like= and put together a new one"
        )
    from .adapters import arrays

    # A parameter is one that autograd watches.
    plain = array.detach() if hasattr(array, "detach") else array
    plain.copy_(arrays("torch", [np.ascontiguousarray(values)])[0])
