"""What one process holds of a tensor of several processes, as leaves of a state."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from typing import Any, final

import numpy as np

from . import adapters
from .adapters import Target
from .checks import shown, whole
from .errors import MisuseError, UnsupportedLeaf
from .specs import ArraySpec, native_name


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


def describe(shard: LocalShard) -> tuple[Any, ...]:
    """A shard, for the walk over a state: see ``leaves.describe``."""
    if isinstance(shard.local, ArraySpec):
        return ("refuse", f"{shard!r} is a description without data; it belongs into like=, not into a state")
    try:
        inner = _inner(shard.local)
    except UnsupportedLeaf as error:
        return ("refuse", str(error))
    assert inner.spec.dtype is not None
    library = None if inner.value is None else type(inner.value).__module__.partition(".")[0]
    parts = [(shard.offset, shard.local, library in ("jax", "jaxlib"), shard.replica)]
    known = "jax" if library == "jaxlib" else library
    return ("sharded", native_name(inner.spec.dtype), list(shard.global_shape), parts, known)


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
            f"a LocalShard holds an array of numpy, torch or JAX, or an ArraySpec, not {shown(local)}"
        )
    return found


def target(shard: LocalShard) -> Target:
    """What is wanted where a shard is: its box, read into its own array (``into``), or into a new one like it."""
    inner = _inner(shard.local)

    def finish(found: list[tuple[Target, Any]], fill: bool) -> list[Any]:
        results = []
        for one, value in found:
            own: LocalShard = one.value
            if fill and isinstance(own.local, np.ndarray):
                if value is not own.local:
                    np.copyto(own.local, value)
                results.append(own)
                continue
            mine = _inner(own.local)
            local = mine.finish([(mine, value)], fill)[0]
            if fill and local is own.local:
                results.append(own)
            else:
                results.append(LocalShard(local, own.global_shape, own.offset, own.replica))
        return results

    return Target(
        ArraySpec(shard.global_shape, inner.spec.dtype),
        finish,
        shard,
        inner.memory,
        inner.empty,
        has_value=inner.has_value,
        takes_over=inner.takes_over,
        boxes=[(shard.offset, tuple(shard.local.shape))],
        unfillable=inner.unfillable,
    )
