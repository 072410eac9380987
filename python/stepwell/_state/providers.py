"""State providers of the user's: leaves whose bytes lie wherever they are, in as many pieces as
there are.

A leaf is usually an array. Other values would first have to be copied into one: a table in pages, a
cache that is sharded by hand, a tensor partly on a device. A class can give the places of its bytes
instead: with ``dtype``, ``shape`` and :meth:`StateProvider.stepwell_chunks` it is stored as one
array, chunk by chunk, without a copy. (Composable providers of chunks are an idea of
DataStates-LLM, §4.2.)
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, Protocol, TypeAlias, TypeGuard

import numpy as np
import numpy.typing as npt

from .. import _adapters as adapters
from .. import _core
from .._adapters import Target
from .._checks import listed, sizes
from .._types import Array, Read
from ..errors import MisuseError, UnsupportedLeaf
from .specs import ArraySpec, native_name, to_dtype


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a provider's array."""

    #: Its values: an array of numpy, torch or JAX, in host memory or on a device.
    array: Array
    #: Offset of its first element in the whole; empty: the origin.
    offset: tuple[int, ...] = ()
    #: ``"now"``: copied (on a device: fenced) when ``save`` returns. ``"lazy"``: it is changed in
    #: guarded updates only, or after ``save.wait_captured()``.
    capture: Literal["now", "lazy"] = "now"


class StateProvider(Protocol):
    """The interface of an object that gives its bytes in chunks."""

    @property
    def dtype(self) -> npt.DTypeLike:
        """The element type of the whole (a numpy dtype, or its name)."""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the whole."""

    def stepwell_chunks(self) -> Iterable[Chunk]:
        """Its chunks, which together are all of it, each element once. They are stored in this
        order. Called by ``save``, on its thread; what the chunks refer to is kept until it is
        captured, and must stay what it is until then: no two chunks share memory. Called by
        ``restore`` too: with ``into=`` every chunk is filled."""
        ...


def is_provider(obj: object) -> TypeGuard[StateProvider]:
    """True if an object is one."""
    return hasattr(type(obj), "stepwell_chunks")


#: Offset, array, and whether it is lazy.
_Row: TypeAlias = tuple[tuple[int, ...], Array, bool]


def _chunks(provider: StateProvider) -> list[_Row]:
    """Returns the chunks. An invalid chunk is a :class:`MisuseError`."""
    shape = sizes(provider.shape, "the shape of a provider")
    found: list[_Row] = []
    for chunk in listed(provider.stepwell_chunks(), "stepwell_chunks() gives several sw.providers.Chunk(…)"):
        if not isinstance(chunk, Chunk):
            raise MisuseError(
                f"stepwell_chunks() gives sw.providers.Chunk(…), not {type(chunk).__qualname__}"
            )
        if chunk.capture not in ("now", "lazy"):
            raise MisuseError(f'capture={chunk.capture!r} of a Chunk is neither "now" nor "lazy"')
        if not hasattr(chunk.array, "shape") or isinstance(chunk.array, ArraySpec):
            raise MisuseError(f"a Chunk holds an array, not {type(chunk.array).__qualname__}")
        offset = sizes(chunk.offset, "the offset of a Chunk") or (0,) * len(shape)
        if not len(offset) == len(chunk.array.shape) == len(shape):
            raise MisuseError(
                f"a Chunk of shape {tuple(chunk.array.shape)} at {offset}, of an array of shape {shape}: all three have one number for each dimension"
            )
        found.append((offset, chunk.array, chunk.capture == "lazy"))
    return found


def _fault(provider: StateProvider, chunks: list[_Row]) -> str | None:
    """Why the chunks are not the whole array, each element once and in memory of its own; ``None``
    where they are."""
    shape = tuple(provider.shape)
    why = _core.covers(list(shape), [(list(offset), list(array.shape)) for offset, array, _ in chunks])
    if why is not None:
        return f"its chunks do not make up an array of shape {shape}: {why}"
    filled = [array for _, array, _ in chunks if 0 not in array.shape]
    try:
        _, close = _core.shared_memory(filled, len(filled))
    except (TypeError, BufferError) as error:
        return f"the memory of a chunk cannot be had: {error}"
    for one, other, first, second in close:
        if first == second:
            return (
                f"chunks {one} and {other} are the same memory; every chunk has to stay what it is until it is captured, "
                "so one buffer cannot be filled for one after the other"
            )
    return None


def _dtype(provider: StateProvider) -> np.dtype:
    try:
        return to_dtype(provider.dtype)
    except (TypeError, ValueError) as error:
        raise MisuseError(
            f"dtype of a provider: {error}; give numpy's dtype, or its name as a string"
        ) from error


def describe(
    provider: StateProvider,
) -> tuple[Literal["sharded"], str, list[int], list[object], None] | tuple[Literal["refuse"], str]:
    """Its chunks, for the walk over a state."""
    try:
        dtype, chunks = _dtype(provider), _chunks(provider)
    except MisuseError as error:
        return ("refuse", str(error))
    for _, array, _ in chunks:
        if isinstance(array, np.ndarray) and array.dtype != dtype:
            return ("refuse", f"a chunk of {array.dtype} in a provider of {dtype}; convert it with .astype()")
    fault = _fault(provider, chunks)
    if fault is not None:
        return ("refuse", fault)
    held: list[object] = [(offset, adapters.with_values(array), is_lazy) for offset, array, is_lazy in chunks]
    return ("sharded", native_name(dtype), list(provider.shape), held, None)


def target(provider: StateProvider) -> Target:
    """Returns the target of a provider: every chunk is filled; for ``like=``, one array."""
    chunks: list[_Row] = []
    unfillable = None
    try:
        spec = ArraySpec(sizes(provider.shape, "the shape of a provider"), _dtype(provider))
        chunks = _chunks(provider)
        unfillable = _fault(provider, chunks) or _unwritable(chunks)
    except MisuseError as error:
        raise UnsupportedLeaf(str(error)) from error

    def finish(found: list[tuple[Target, Read]], fill: bool) -> list[object]:
        if not fill:
            return [value for _, value in found]
        for _, value in found:
            values = np.asarray(value)
            for offset, array, _ in chunks:
                box = tuple(slice(first, first + n) for first, n in zip(offset, array.shape, strict=True))
                _fill(array, values[box])
        return [one.value for one, _ in found]

    return Target(spec, finish, provider, unfillable=unfillable)


def _unwritable(chunks: list[_Row]) -> str | None:
    for offset, array, _ in chunks:
        if isinstance(array, np.ndarray):
            if not array.flags.writeable:
                return f"the chunk at {offset} is read-only"
        elif not hasattr(array, "copy_"):
            return f"the chunk at {offset} is a {type(array).__qualname__}, which cannot be changed; pass like= and put together a new one"
    return None


def _fill(array: Array, values: np.ndarray) -> None:
    if isinstance(array, np.ndarray):
        np.copyto(array, values)
        return
    # A parameter is one that autograd watches.
    plain = array.detach() if hasattr(array, "detach") else array
    assert hasattr(plain, "copy_")
    plain.copy_(adapters.arrays("torch", [np.ascontiguousarray(values)])[0])
