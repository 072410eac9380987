"""What one process holds of a tensor of several processes.

Whatever says so (a :class:`LocalShard`, a ``DTensor``, a ``jax.Array`` over several processes, …) comes down to *pieces*: boxes of the logical tensor, each at a place
in the array of this process. What no piece covers is padding.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, final

import numpy as np

from . import adapters
from .adapters import OnDevice, Target
from .checks import shown, whole
from .errors import MisuseError, UnsupportedLeaf
from .specs import ArraySpec, native_name, to_dtype

#: Who holds the same box: ``None`` (this process alone), ``(index, count)`` of replicas that are not named, a list of ranks, ``"everyone"`` who has the leaf.
Holders: TypeAlias = "tuple[int, int] | list[int] | str | None"


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, and where this process has it."""

    #: In the logical tensor.
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    #: What of the local array it is: an index that gives a view of that extent.
    place: tuple[slice, ...]
    holders: Holders = None


@dataclass(slots=True)
class Parts:
    """What a process holds of one tensor, and how the same is made of another array."""

    local: Any
    global_shape: tuple[int, ...]
    pieces: list[Piece]
    #: New local array → what the caller has there.
    rebuild: Callable[[Any], Any]


def runs_of_chunks(size: int, pieces: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """The runs ``(start, length)`` of a dimension that a process has, of so many elements, after one cut after the other: ``(parts, which of them, split factor)``. Each cut is that of
    ``torch.chunk``: parts of the same length, the last ones shorter or empty. With a split factor, what there is is cut into so many blocks first, and of each
    block that part is taken (``_StridedShard`` of torch)."""
    runs = [(0, size)]
    for count, index, factor in pieces:
        total = sum(length for _, length in runs)
        taken: list[tuple[int, int]] = []
        for first, end in _chunks(total, factor):
            begin, stop = _chunk(end - first, count, index)
            taken += _within(runs, first + begin, first + stop)
        runs = _joined(taken)
    return runs


def _chunks(size: int, parts: int) -> list[tuple[int, int]]:
    return [_chunk(size, parts, index) for index in range(parts)]


def _chunk(size: int, parts: int, index: int) -> tuple[int, int]:
    """Which elements are in a part of ``torch.chunk``."""
    length = -(-size // parts)
    return min(size, index * length), min(size, (index + 1) * length)


def _within(runs: list[tuple[int, int]], begin: int, end: int) -> list[tuple[int, int]]:
    """Elements ``begin .. end`` of the runs, counted one after the other."""
    found, before = [], 0
    for start, length in runs:
        first, last = max(begin - before, 0), min(end - before, length)
        if first < last:
            found.append((start + first, last - first))
        before += length
    return found


def _joined(runs: list[tuple[int, int]]) -> list[tuple[int, int]]:
    joined: list[tuple[int, int]] = []
    for start, length in runs:
        if joined and joined[-1][0] + joined[-1][1] == start:
            joined[-1] = (joined[-1][0], joined[-1][1] + length)
        else:
            joined.append((start, length))
    return joined


def pieces_of_runs(runs: Sequence[Sequence[tuple[int, int]]], holders: Holders) -> list[Piece]:
    """The boxes that are the product of the runs along each dimension; they lie one after the other in the local array."""
    pieces: list[Piece] = [Piece((), (), (), holders)]
    for dimension in runs:
        grown, at = [], 0
        for start, length in dimension:
            grown += [
                Piece(
                    (*one.offset, start), (*one.extent, length), (*one.place, slice(at, at + length)), holders
                )
                for one in pieces
            ]
            at += length
        pieces = grown
    return [one for one in pieces if 0 not in one.extent]


# ---- leaves of the caller's ----------------------------------------------------------------------------------------------


@final
class LocalShard:
    """A box of a tensor: what this process holds of it. In a state it is saved, in a ``like`` or ``into`` it is restored.

    Args:
        local: the array of this process (numpy, torch, JAX, or an :class:`ArraySpec` where it only says what is wanted); its shape is the extent of the box.
        global_shape: the shape of the whole tensor, on all processes together.
        offset: the place of the box's first element in it.
        replica: ``(index, count)``, where ``count`` processes hold this same box and this is the one of that index: they share the writing.
    """

    __slots__ = ("global_shape", "local", "offset", "replica")

    def __init__(
        self,
        local: Any,
        global_shape: Sequence[int],
        offset: Sequence[int],
        replica: tuple[int, int] = (0, 1),
    ) -> None:
        self.local = local
        self.global_shape = _sizes(global_shape, "global_shape")
        self.offset = _sizes(offset, "offset")
        extent = tuple(getattr(local, "shape", None) or ())
        if len(self.offset) != len(self.global_shape) or len(extent) != len(self.global_shape):
            raise MisuseError(
                f"a LocalShard has as many dimensions in all: its array has shape {extent}, global_shape is {self.global_shape}, offset is {self.offset}"
            )
        for first, n, size in zip(self.offset, extent, self.global_shape, strict=True):
            if first + n > size:
                raise MisuseError(
                    f"a LocalShard of shape {extent} at offset {self.offset} passes the end of the tensor's shape {self.global_shape}"
                )
        try:
            index, count = replica
        except (TypeError, ValueError) as error:
            raise MisuseError(f"replica is (index, count), not {shown(replica)}") from error
        count = whole(count, "the count of a replica", 1, 2**31)
        self.replica = (whole(index, "the index of a replica", 0, count - 1), count)

    def parts(self) -> Parts:
        """See :class:`Parts`."""
        extent = tuple(self.local.shape)
        place = tuple(slice(0, n) for n in extent)
        pieces = [] if 0 in extent else [Piece(self.offset, extent, place, self.replica)]

        def rebuild(local: Any) -> LocalShard:
            return (
                self
                if local is self.local
                else LocalShard(local, self.global_shape, self.offset, self.replica)
            )

        return Parts(self.local, self.global_shape, pieces, rebuild)

    def __repr__(self) -> str:
        extent = tuple(self.local.shape)
        box = ", ".join(f"{first}:{first + n}" for first, n in zip(self.offset, extent, strict=True))
        return f"LocalShard([{box}] of {self.global_shape})"


def _sizes(values: Any, name: str) -> tuple[int, ...]:
    try:
        sizes = tuple(map(operator.index, values))
    except TypeError as error:
        raise MisuseError(f"{name} is a tuple of integers, not {shown(values)}") from error
    if any(n < 0 for n in sizes):
        raise MisuseError(f"{name} has no negative numbers: {sizes}")
    return sizes


# ---- into states, and out of them ------------------------------------------------------------------------------------------


def describe(parts: Parts) -> tuple[Any, ...]:
    """What a process holds of a tensor, for the walk over a state: see ``leaves.describe``."""
    if isinstance(parts.local, ArraySpec):
        return ("refuse", "a description without data; it belongs into like=, not into a state")
    try:
        inner = _inner(parts.local)
    except UnsupportedLeaf as error:
        return ("refuse", str(error))
    assert inner.spec.dtype is not None
    library = type(parts.local).__module__.partition(".")[0].replace("jaxlib", "jax")
    held = [(one.offset, parts.local[one.place], library == "jax", one.holders) for one in parts.pieces]
    known = library if adapters.is_known(library) else None
    return ("sharded", native_name(inner.spec.dtype), list(parts.global_shape), held, known)


def _inner(local: Any) -> Target:
    """What is wanted of the array of this process by itself."""
    if isinstance(local, np.ndarray):
        spec = ArraySpec(local.shape, local.dtype)
        return Target(spec, lambda found, _: [value for _, value in found], memory=local, has_value=True)
    if isinstance(local, ArraySpec):
        return Target(local, lambda found, _: [value for _, value in found])
    found = adapters.target(local)
    if found is None:
        raise UnsupportedLeaf(
            f"the part of a process is an array of numpy, torch or JAX, or an ArraySpec, not {shown(local)}"
        )
    return found


def target(parts: Parts) -> Target:
    """What is wanted where a process has parts of a tensor: its boxes, read into its own array (``into``), or into a new one like it."""
    inner = _inner(parts.local)
    memory = inner.memory
    memories: list[Any] = []
    for one in parts.pieces:
        if isinstance(memory, np.ndarray):
            memories.append(memory[one.place])
        elif isinstance(memory, OnDevice):
            view = memory.array[one.place]
            memories.append(
                OnDevice(view, memory.dtype, tuple(n * memory.dtype.itemsize for n in view.stride()))
            )
        else:
            memories.append(None)

    def finish(found: list[tuple[Target, Any]], fill: bool) -> list[Any]:
        return [_finished(one.value, values, fill) for one, values in found]

    return Target(
        ArraySpec(parts.global_shape, inner.spec.dtype),
        finish,
        parts,
        has_value=inner.has_value,
        boxes=[(one.offset, one.extent) for one in parts.pieces],
        memories=memories,
        unfillable=inner.unfillable,
    )


def _finished(parts: Parts, values: Any, fill: bool) -> Any:
    """What the caller has there, with the values of the pieces."""
    values = values if isinstance(values, list) else [values]
    inner = _inner(parts.local)
    if fill and inner.has_value and inner.memory is not None:
        for one, value in zip(parts.pieces, values, strict=True):
            _put(parts.local, one.place, value)
        return parts.rebuild(parts.local)
    assert inner.spec.dtype is not None
    if len(values) == 1 and tuple(values[0].shape) == tuple(parts.local.shape):
        made = values[0]
    else:
        made = np.zeros(tuple(parts.local.shape), to_dtype(native_name(inner.spec.dtype)))
        for one, value in zip(parts.pieces, values, strict=True):
            made[one.place] = value
    local = inner.finish([(inner, made)], fill)[0]
    return parts.rebuild(local)


def _put(local: Any, place: tuple[slice, ...], value: Any) -> None:
    """Puts a value where it was not read straight to."""
    view = local[place]
    if isinstance(view, np.ndarray):
        if not isinstance(value, np.ndarray) or value.ctypes.data != view.ctypes.data:
            np.copyto(view, value)
        return
    if isinstance(value, OnDevice):
        return
    plain = view.detach()
    if isinstance(value, np.ndarray):
        if plain.device.type == "cpu" and plain.data_ptr() == value.ctypes.data:
            return
        value = adapters.arrays("torch", [value])[0]
    plain.copy_(value)
