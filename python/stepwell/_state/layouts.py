"""One process's parts of a distributed tensor.

Every description (:mod:`.shards`, a ``DTensor``, …) becomes *pieces*: boxes of the logical
tensor, each at a place in the array of this process. Elements without a piece are padding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import EllipsisType
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias, TypeGuard, cast

import numpy as np

from .. import _adapters as adapters
from .._adapters import OnDevice, Target
from .._checks import shown, sizes
from .._types import Array, Read
from ..errors import MisuseError, UnsupportedLeaf
from .specs import ArraySpec, native_name, to_dtype

if TYPE_CHECKING:
    import torch

#: The holders of a box: ``None`` (this process alone), ``(index, count)`` of unnamed replicas, a
#: list of ranks, or ``"everyone"`` who has that box of the leaf.
Holders: TypeAlias = "tuple[int, int] | list[int] | str | None"


#: The part of a tensor that a process has: an array, or the description of one.
Local: TypeAlias = Array | ArraySpec
#: See ``leaves.Description``.
Described: TypeAlias = (
    tuple[Literal["sharded"], str, list[int], list[object], str | None] | tuple[Literal["refuse"], str]
)


def _is_tensor(array: object) -> TypeGuard[torch.Tensor]:
    """True for torch's arrays, which can be changed where they are. Imports nothing."""
    return hasattr(array, "as_strided")


class _Indexed(Protocol):
    def __getitem__(self, index: tuple[slice | EllipsisType, ...]) -> Array: ...


@dataclass(frozen=True, slots=True)
class Strided:
    """Elements of a contiguous row-major array: the first one, and the step along each dimension of
    a box."""

    offset: int
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Piece:
    """A box of a tensor, and where this process has it."""

    #: In the logical tensor.
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    #: Its place in the local array: an index that gives a view of that extent, or a place in
    #: memory.
    place: tuple[slice, ...] | Strided
    holders: Holders = None


@dataclass(slots=True)
class Parts:
    """One process's parts of one tensor, and how to make the same of another array."""

    local: Local
    #: ``None``: as stored.
    global_shape: tuple[int, ...] | None
    pieces: list[Piece]
    #: New local array → the caller's value. ``None`` if several such parts share one array: then
    #: the caller takes the values of the pieces.
    rebuild: Callable[[Array], object] | None
    #: Its description for messages: text, or the object, which is formatted only when needed.
    what: object = "a part of a tensor"
    #: For an open ``global_shape``: true if a part may exceed the stored tensor and is filled with
    #: zeros there.
    pads: bool = False

    def __str__(self) -> str:
        return self.what if isinstance(self.what, str) else repr(self.what)


def runs_of_chunks(size: int, pieces: Sequence[tuple[int, int, int]]) -> list[tuple[int, int]]:
    """The runs ``(start, length)`` of a dimension that a process has, of so many elements, after
    one cut after the other: ``(parts, which of them, split factor)``. Each cut is that of
    ``torch.chunk``: parts of the same length, the last ones shorter or empty. With a split factor,
    what there is is cut into so many blocks first, and of each block that part is taken
    (``_StridedShard`` of torch)."""
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
    """The boxes that are the product of the runs along each dimension; they lie one after the other
    in the local array."""
    boxes: list[tuple[tuple[int, ...], tuple[int, ...], tuple[slice, ...]]] = [((), (), ())]
    for dimension in runs:
        grown, at = [], 0
        for start, length in dimension:
            place = slice(at, at + length)
            grown += [
                ((*offset, start), (*extent, length), (*places, place)) for offset, extent, places in boxes
            ]
            at += length
        boxes = grown
    return [Piece(offset, extent, places, holders) for offset, extent, places in boxes if 0 not in extent]


def extent_of(pieces: Sequence[Piece]) -> tuple[int, ...]:
    """The least shape of an array that holds pieces at such places."""
    ends = [
        tuple(one.stop for one in piece.place) for piece in pieces if not isinstance(piece.place, Strided)
    ]
    return tuple(max(stops) for stops in zip(*ends, strict=True))


def view(local: Array, piece: Piece) -> Array:
    """Returns the view of a piece in an array."""
    place = piece.place
    if not isinstance(place, Strided):
        # With the dots, one element is an array too.
        return cast(_Indexed, local)[(*place, ...)]
    if isinstance(local, np.ndarray):
        flat = local.reshape(-1)[place.offset :]
        strides = tuple(n * local.itemsize for n in place.steps)
        return np.lib.stride_tricks.as_strided(flat, piece.extent, strides)
    if _is_tensor(local):
        plain = local.detach()
        return plain.as_strided(piece.extent, place.steps, int(plain.storage_offset()) + place.offset)
    return view(np.asarray(local), piece)


def is_in_one_piece(local: Array) -> bool:
    """True if an array lies row-major, without gaps."""
    if isinstance(local, np.ndarray):
        return local.flags.c_contiguous
    return bool(local.is_contiguous()) if hasattr(local, "is_contiguous") else True


# ---- into states, and out of them
# ---------------------------------------------------------------------------------------


def describe(parts: Parts) -> Described:
    """What a process holds of a tensor, for the walk over a state: see ``leaves.describe``."""
    if isinstance(parts.local, ArraySpec):
        return ("refuse", f"{parts} without data belongs into like=, not into a state")
    if parts.global_shape is None:
        return ("refuse", f"{parts} does not say the shape of the whole tensor; pass shape=")
    try:
        _check(parts)
        inner = _inner(parts.local)
    except UnsupportedLeaf as error:
        # That is how a target says it.
        return ("refuse", str(error).removeprefix("cannot be restored into: "))
    assert inner.spec.dtype is not None
    library = type(parts.local).__module__.partition(".")[0].replace("jaxlib", "jax")
    held: list[object] = [
        (one.offset, adapters.with_values(view(parts.local, one)), library == "jax", one.holders)
        for one in parts.pieces
    ]
    known = library if adapters.is_known(library) else None
    return ("sharded", native_name(inner.spec.dtype), list(parts.global_shape), held, known)


def _check(parts: Parts) -> None:
    """Raises where a class of another package says what no tensor has; ours have looked at it when
    they were made."""
    try:
        if parts.global_shape is not None:
            sizes(parts.global_shape, "the whole shape")
        for one in parts.pieces:
            sizes(one.offset, "the place")
    except MisuseError as error:
        raise UnsupportedLeaf(f"of {parts}, {error}") from error


def _inner(local: Local) -> Target:
    """Returns the target of the local array alone."""
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
    """Returns the target of a process's parts: its boxes, read into its own array (``into``) or
    into a new one like it."""
    _check(parts)
    inner = _inner(parts.local)
    memory = inner.memory
    memories: list[np.ndarray | OnDevice | None] = []
    for one in parts.pieces:
        if isinstance(memory, np.ndarray):
            memories.append(np.asarray(view(memory, one)))
        elif isinstance(memory, OnDevice):
            there = view(memory.array, one)
            assert _is_tensor(there)
            steps = tuple(n * memory.dtype.itemsize for n in there.stride())
            memories.append(OnDevice(there, memory.dtype, steps))
        else:
            memories.append(None)

    return Target(
        ArraySpec(parts.global_shape, inner.spec.dtype),
        _finish,
        parts,
        has_value=inner.has_value,
        boxes=[(one.offset, one.extent) for one in parts.pieces],
        memories=memories,
        pads=parts.pads,
        unfillable=inner.unfillable,
    )


def _finish(found: list[tuple[Target, Read]], fill: bool) -> list[object]:
    return [_finished(one, values, fill) for one, values in found]


def _finished(target: Target, values: Read, fill: bool) -> object:
    """Returns the caller's value with the values of the pieces."""
    values = values if isinstance(values, list) else [values]
    parts = target.value
    assert isinstance(parts, Parts)
    if parts.rebuild is None:
        return values
    memories = target.memories if fill and target.has_value else None
    if memories is not None and all(value is there for value, there in zip(values, memories, strict=True)):
        return parts.rebuild(cast(Array, parts.local))
    return parts.rebuild(filled(parts.local, list(zip(parts.pieces, values, strict=True)), fill))


def filled(local: Local, found: list[tuple[Piece, Array]], fill: bool) -> Array:
    """The array of a process with these values: the one that it has, or a new one like it, with
    zeros where no piece is."""
    if fill and isinstance(local, np.ndarray):
        return _put_all(local, found)
    inner = _inner(local)
    # A tensor can be changed, also where its memory does not hold its values.
    if fill and inner.has_value and (inner.memory is not None or hasattr(local, "copy_")):
        return _put_all(cast(Array, local), found)
    shape = tuple(local.shape or ())
    if len(found) == 1 and tuple(found[0][1].shape) == shape and not isinstance(found[0][0].place, Strided):
        made = found[0][1]
    else:
        made = np.zeros(shape, _made_of(inner.spec.dtype, found))
        for piece, value in found:
            np.asarray(view(made, piece))[...] = value
    return cast(Array, inner.finish([(inner, made)], False)[0])


def _made_of(dtype: np.dtype | None, found: list[tuple[Piece, Array]]) -> np.dtype:
    """Returns the dtype of a new array: the requested one, or that of its pieces."""
    if dtype is not None:
        return to_dtype(native_name(dtype))
    dtypes = {np.asarray(value).dtype for _, value in found}
    if len(dtypes) != 1:
        raise MisuseError(
            f"an ArraySpec without dtype takes that of what is stored, and that is {len(dtypes)} dtypes; give it one"
        )
    return dtypes.pop()


def _put_all(local: Array, found: list[tuple[Piece, Array]]) -> Array:
    for piece, value in found:
        _put(view(local, piece), value)
    return local


def _put(there: Array, value: Array) -> None:
    """Puts a value where it was not read straight to."""
    if isinstance(there, np.ndarray):
        if not isinstance(value, np.ndarray) or value.ctypes.data != there.ctypes.data:
            np.copyto(there, np.asarray(value))
        return
    if isinstance(value, OnDevice):
        return
    assert _is_tensor(there)
    plain = there.detach()
    if isinstance(value, np.ndarray):
        if plain.device.type == "cpu" and plain.data_ptr() == value.ctypes.data:
            return
        value = adapters.arrays("torch", [value])[0]
    assert _is_tensor(value)
    plain.copy_(value)
