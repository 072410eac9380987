"""Parameters in flat partitions, as ZeRO stores them: the runs of elements that each rank has.

ZeRO-1 and ZeRO-2 put the parameters of a group one behind the other, and cut that into a
partition for each rank. ZeRO-3 cuts every parameter by itself: each rank has as many elements of it
as the others, one parameter behind the other in its partition, and the last rank's end is padded.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from .._state.specs import to_dtype
from .description import Chunk, Tensor, fits
from .pickle_values import Malformed


class Run(NamedTuple):
    """Elements of a parameter that one rank has side by side."""

    rank: int
    #: The first element in the partition.
    begin: int
    #: The first element in the parameter, and the number of elements.
    start: int
    size: int


class FlatParameter(NamedTuple):
    """A parameter, and where its elements are."""

    shape: tuple[int, ...]
    #: The number of its group, and so of the partition among those of each rank.
    group: int
    runs: tuple[Run, ...]


def of_group(
    group: int, lengths: Sequence[int], shapes: Mapping[str, tuple[int, ...]], paddings: Sequence[int]
) -> dict[str, FlatParameter]:
    """Returns the parameters of a group of ZeRO-1 or ZeRO-2. ``lengths`` are those of the ranks'
    partitions; ``paddings`` are elements behind each parameter, if there are any."""
    last = max((rank for rank, length in enumerate(lengths) if length), default=0)
    if any(length != lengths[0] for length in lengths[:last]) or lengths[last] > lengths[0]:
        raise Malformed(f"the partitions of group {group} have the lengths {_shown(lengths)}")
    counts = [_count(name, shape) for name, shape in shapes.items()]
    gaps = paddings or [0] * len(counts)
    needed, total, unit = sum(counts) + sum(gaps), sum(lengths), 2 * len(lengths)
    if needed > total or -(-needed // unit) != -(-total // unit):
        raise Malformed(f"the partitions of group {group} have {total} elements, its parameters {needed}")
    found: dict[str, FlatParameter] = {}
    at = 0
    for (name, shape), count, gap in zip(shapes.items(), counts, gaps, strict=True):
        found[name] = FlatParameter(shape, group, tuple(_spread(lengths[0], at, count)))
        at += count + gap
    return found


def _spread(length: int, at: int, count: int) -> Iterator[Run]:
    """A parameter in partitions of that length; the last one may be shorter."""
    start = 0
    while start < count:
        rank, begin = divmod(at + start, length)
        here = min(count - start, length - begin)
        yield Run(rank, begin, start, here)
        start += here


def of_shares(
    group: int, lengths: Sequence[int], shapes: Mapping[str, tuple[int, ...]]
) -> dict[str, FlatParameter]:
    """Returns the parameters of a sub-group of ZeRO-3. ``lengths`` are those of the ranks'
    partitions."""
    ranks = len(lengths)
    counts = [_count(name, shape) for name, shape in shapes.items()]
    shares = [-(-count // ranks) for count in counts]
    if any(length != sum(shares) for length in lengths):
        raise Malformed(
            f"the partitions of sub-group {group} have the lengths {_shown(lengths)}, the shares of its parameters {sum(shares)}"
        )
    found: dict[str, FlatParameter] = {}
    at = 0
    for (name, shape), count, share in zip(shapes.items(), counts, shares, strict=True):
        starts = [(rank, rank * share) for rank in range(ranks) if rank * share < count]
        runs = [Run(rank, at, start, min(share, count - start)) for rank, start in starts]
        found[name] = FlatParameter(shape, group, tuple(runs))
        at += share
    return found


def of_one_share(name: str, shape: tuple[int, ...], parts: Sequence[Tensor]) -> Tensor:
    """Returns a parameter of ZeRO-3 whose shares are tensors by themselves."""
    parameters = of_shares(0, [part.shape[0] for part in parts], {name: shape})
    return assembled(parameters[name], parts)


def assembled(parameter: FlatParameter, partitions: Sequence[Tensor]) -> Tensor:
    """Returns a parameter whose elements are in these partitions, one of each rank."""
    first = partitions[0]
    itemsize = to_dtype(first.dtype).itemsize
    chunks: list[Chunk] = []
    for run in parameter.runs:
        partition = partitions[run.rank]
        if partition.dtype != first.dtype:
            raise Malformed(f"its partitions have the dtypes {first.dtype} and {partition.dtype}")
        if run.begin + run.size > partition.shape[0]:
            raise Malformed(f"a partition of rank {run.rank} has {partition.shape[0]} elements only")
        (chunk,) = partition.chunks
        offset = chunk.offset + run.begin * itemsize
        chunks.append(Chunk(chunk.file, offset, run.size * itemsize, (run.start,), (run.size,)))
    return Tensor(first.dtype, parameter.shape, tuple(chunks))


def _count(name: str, shape: tuple[int, ...]) -> int:
    # Eight bytes are the longest element of a partition.
    if not fits(shape, 8):
        raise Malformed(f"the shape of `{name[:200]}` is too large: {list(shape)}")
    return math.prod(shape)


def _shown(lengths: Sequence[int]) -> str:
    return f"{list(lengths[:8])}" + (", …" if len(lengths) > 8 else "")
