"""Every way in which a process may hold parts of tensors: saved by some number of ranks, restored
as a whole and by others. One row of the table for each."""

from __future__ import annotations

import gc
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import ml_dtypes
import numpy as np
import pytest
import stepwell as sw
from threads import together

Array = np.ndarray[Any, Any]
S = np.s_


def whole(name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> Array:
    """A tensor whose elements are told by name and place."""
    count = int(np.prod(shape))
    return (np.arange(count) * 3 + sum(map(ord, name))).astype(dtype).reshape(shape)


def cut(n: int, rank: int, world: int) -> tuple[int, int]:
    """Even as far as can be."""
    return n * rank // world, n * (rank + 1) // world


@dataclass(frozen=True)
class Grid:
    """Ranks of a grid, tensor parallelism innermost. ``virtual``: parts of the model that each
    stage of a pipeline has."""

    pp: int = 1
    dp: int = 1
    tp: int = 1
    virtual: int = 1

    def at(self, rank: int) -> tuple[int, int, int]:
        """Coordinates: pipeline, data, tensor."""
        return rank // (self.dp * self.tp), rank // self.tp % self.dp, rank % self.tp

    def layers(self, rank: int, count: int) -> list[int]:
        """The layers of a rank's stage, by their numbers in the model."""
        per = count // (self.pp * self.virtual)
        parts = [part * self.pp + self.at(rank)[0] for part in range(self.virtual)]
        return [first * per + i for first in parts for i in range(per)]


#: So many ranks, or a grid of them.
Ranks = int | Grid


def size(ranks: Ranks) -> int:
    """How many there are."""
    return ranks if isinstance(ranks, int) else ranks.pp * ranks.dp * ranks.tp


@dataclass
class Case:
    """A kind of layout."""

    #: Ranks → tensors as they are stored, by their paths: their shapes, or they themselves.
    tensors: Callable[[Any], dict[str, tuple[int, ...] | Array]]
    #: Rank, ranks → what the rank has: a leaf, or leaves by name, over arrays of the values that
    #: they are to have (padding is zero).
    leaf: Callable[[int, Any], Any]
    worlds: tuple[Any, ...] = (1, 2, 4)
    #: Rank, ranks, ranks that have saved → the ``leaf`` that it gets back, where that depends on
    #: who has saved.
    restored: Callable[[int, Any, Any], Any] | None = None


CASES: dict[str, Case] = {}


def case(
    name: str,
    tensors: dict[str, Any] | Callable[[Any], dict[str, Any]],
    worlds: tuple[Any, ...] = (1, 2, 4),
    restored: Callable[[int, Any, Any], Any] | None = None,
) -> Any:
    def add(leaf: Callable[[int, Any], Any]) -> Any:
        CASES[name] = Case(tensors if callable(tensors) else lambda _: tensors, leaf, worlds, restored)
        return leaf

    return add


@case("column parallel", {"w": (12, 5)})
def _column(rank: int, world: int) -> Any:
    a, b = cut(12, rank, world)
    return sw.sharding.LocalShard(whole("w", (12, 5))[a:b].copy(), (12, 5), (a, 0))


@case("row parallel, and its bias", {"w/weight": (5, 12), "w/bias": (5,)}, (1, 3, 4))
def _row(rank: int, world: int) -> Any:
    a, b = cut(12, rank, world)
    weight = whole("w/weight", (5, 12))[:, a:b].copy()
    return {
        "weight": sw.sharding.LocalShard(weight, (5, 12), (0, a)),
        "bias": sw.sharding.LocalShard(whole("w/bias", (5,)), (5,), (0,), replica=(rank, world)),
    }


HEADS, GROUPS, WIDTH, COLUMNS = 3, 4, 2, 5  # query heads in each group


@case(
    "fused QKV, interleaved by group, as one tensor with a view",
    {"w": (GROUPS * (HEADS + 2) * WIDTH, COLUMNS)},
)
def _qkv_fused(rank: int, world: int) -> Any:
    rows = GROUPS * (HEADS + 2) * WIDTH
    a, b = cut(GROUPS, rank, world)
    view = (GROUPS, HEADS + 2, WIDTH, COLUMNS)
    local = whole("w", (rows, COLUMNS)).reshape(view)[a:b].reshape(-1, COLUMNS).copy()
    return sw.sharding.Segments(
        local,
        [
            sw.sharding.Segment(
                None,
                (a, 0, 0, 0),
                (b - a, HEADS + 2, WIDTH, COLUMNS),
                shape=(rows, COLUMNS),
                view=view,
                into_shape=(b - a, *view[1:]),
            )
        ],
    )


@case(
    "fused QKV, interleaved by group, as three tensors",
    {
        "w/q": (GROUPS * HEADS * WIDTH, COLUMNS),
        "w/k": (GROUPS * WIDTH, COLUMNS),
        "w/v": (GROUPS * WIDTH, COLUMNS),
    },
)
def _qkv_split(rank: int, world: int) -> Any:
    a, b = cut(GROUPS, rank, world)
    n = b - a
    local = np.zeros((n, HEADS + 2, WIDTH, COLUMNS), np.float32)
    q, k, v = (
        whole(f"w/{name}", (GROUPS * heads * WIDTH, COLUMNS))
        for name, heads in (("q", HEADS), ("k", 1), ("v", 1))
    )
    local[:, :HEADS] = q.reshape(GROUPS, HEADS, WIDTH, COLUMNS)[a:b]
    local[:, HEADS] = k.reshape(GROUPS, WIDTH, COLUMNS)[a:b]
    local[:, HEADS + 1] = v.reshape(GROUPS, WIDTH, COLUMNS)[a:b]

    def part(name: str, heads: int, into: Any) -> sw.sharding.Segment:
        return sw.sharding.Segment(
            name,
            (a, 0, 0, 0),
            (n, heads, WIDTH, COLUMNS),
            shape=(GROUPS * heads * WIDTH, COLUMNS),
            view=(GROUPS, heads, WIDTH, COLUMNS),
            into=into,
            into_shape=local.shape,
        )

    return sw.sharding.Segments(
        local.reshape(-1, COLUMNS),
        [
            part("q", HEADS, S[:, :HEADS]),
            part("k", 1, S[:, HEADS : HEADS + 1]),
            part("v", 1, S[:, HEADS + 1 :]),
        ],
    )


@case("fused QKV with more ranks than groups", {"w": (2 * (HEADS + 2) * WIDTH, COLUMNS)}, (1, 2, 4, 5))
def _qkv_few_groups(rank: int, world: int) -> Any:
    # Then Megatron cuts the rows evenly, wherever a group ends.
    rows = 2 * (HEADS + 2) * WIDTH
    a, b = cut(rows, rank, world)
    return sw.sharding.LocalShard(whole("w", (rows, COLUMNS))[a:b].copy(), (rows, COLUMNS), (a, 0))


@case(
    "fused QKV, concatenated, with replicated K and V",
    {"w/q": (16, 3), "w/k": (4, 3), "w/v": (4, 3)},
    (1, 2, 4),
)
def _qkv_replicated(rank: int, world: int) -> Any:
    # Two heads of keys and values: with four ranks, two of them have the same one.
    kv = min(world, 2)
    sharing = world // kv
    a, b = cut(16, rank, world)
    c, d = cut(4, rank // sharing, kv)
    q, k, v = whole("w/q", (16, 3))[a:b], whole("w/k", (4, 3))[c:d], whole("w/v", (4, 3))[c:d]
    at = len(q)
    replica = (rank % sharing, sharing)
    return sw.sharding.Segments(
        np.concatenate([q, k, v]),
        [
            sw.sharding.Segment("q", (a, 0), into=S[:at], shape=(16, 3)),
            sw.sharding.Segment("k", (c, 0), into=S[at : at + d - c], shape=(4, 3), replica=replica),
            sw.sharding.Segment("v", (c, 0), into=S[at + d - c :], shape=(4, 3), replica=replica),
        ],
    )


UNEVEN = {1: [0, 7], 2: [0, 5, 7], 3: [0, 1, 1, 7]}


@case("uneven sections, one of them empty", {"w": (7, 2)}, (1, 2, 3))
def _uneven(rank: int, world: int) -> Any:
    a, b = UNEVEN[world][rank : rank + 2]
    return sw.sharding.LocalShard(whole("w", (7, 2))[a:b].copy(), (7, 2), (a, 0))


#: By number of ranks: where the rows of each end, of queries and of keys and values.
UNEVEN_HEADS = {1: ([0, 12], [0, 4]), 2: ([0, 8, 12], [0, 2, 4]), 3: ([0, 4, 8, 12], [0, 2, 2, 4])}


@case("uneven heads of grouped queries, by hand", {"w/q": (12, 3), "w/k": (4, 3), "w/v": (4, 3)}, (1, 2, 3))
def _uneven_heads(rank: int, world: int) -> Any:
    ends_q, ends_kv = UNEVEN_HEADS[world]
    (a, b), (c, d) = ends_q[rank : rank + 2], ends_kv[rank : rank + 2]
    q, k, v = whole("w/q", (12, 3))[a:b], whole("w/k", (4, 3))[c:d], whole("w/v", (4, 3))[c:d]
    at = len(q)
    return sw.sharding.Segments(
        np.concatenate([q, k, v]),
        [
            sw.sharding.Segment("q", (a, 0), into=S[:at], shape=(12, 3)),
            sw.sharding.Segment("k", (c, 0), into=S[at : at + d - c], shape=(4, 3)),
            sw.sharding.Segment("v", (c, 0), into=S[at + d - c :], shape=(4, 3)),
        ],
    )


@case("SwiGLU, gate and up concatenated, as one logical tensor", {"w": (24, 4)})
def _swiglu(rank: int, world: int) -> Any:
    a, b = cut(12, rank, world)
    full = whole("w", (24, 4))
    return sw.sharding.Segments(
        np.concatenate([full[a:b], full[12 + a : 12 + b]]),
        [
            sw.sharding.Segment(None, (a, 0), into=S[: b - a], shape=(24, 4)),
            sw.sharding.Segment(None, (12 + a, 0), into=S[b - a :], shape=(24, 4)),
        ],
    )


@case("SwiGLU, gate and up as two tensors", {"w/gate": (12, 4), "w/up": (12, 4)}, (1, 3, 4))
def _swiglu_two(rank: int, world: int) -> Any:
    a, b = cut(12, rank, world)
    gate, up = whole("w/gate", (12, 4)), whole("w/up", (12, 4))
    return sw.sharding.Segments(
        np.concatenate([gate[a:b], up[a:b]]),
        [
            sw.sharding.Segment("gate", (a, 0), into=S[: b - a], shape=(12, 4)),
            sw.sharding.Segment("up", (a, 0), into=S[b - a :], shape=(12, 4)),
        ],
    )


@case("SwiGLU, interleaved in blocks", {"w/gate": (12, 4), "w/up": (12, 4)})
def _swiglu_interleaved(rank: int, world: int) -> Any:
    block = 3
    n = 12 // block
    a, b = cut(n, rank, world)
    gate, up = (whole(f"w/{name}", (12, 4)).reshape(n, block, 4)[a:b] for name in ("gate", "up"))
    local = np.stack([gate, up], axis=1)

    def part(name: str, which: int) -> sw.sharding.Segment:
        return sw.sharding.Segment(
            name,
            (a, 0, 0),
            (b - a, block, 4),
            shape=(12, 4),
            view=(n, block, 4),
            into=S[:, which],
            into_shape=local.shape,
        )

    return sw.sharding.Segments(local.reshape(-1, 4).copy(), [part("gate", 0), part("up", 1)])


@case("vocabulary padded to a multiple of the ranks", {"w": (10, 3)}, (1, 3, 4))
def _vocabulary(rank: int, world: int) -> Any:
    rows = -(-10 // world)
    a, b = min(10, rank * rows), min(10, (rank + 1) * rows)
    local = np.zeros((rows, 3), np.float32)
    local[: b - a] = whole("w", (10, 3))[a:b]
    return sw.sharding.Segments(local, [sw.sharding.Segment(None, (a, 0), into=S[: b - a], shape=(10, 3))])


@case("transposed in memory", {"w": (6, 8)})
def _transposed(rank: int, world: int) -> Any:
    a, b = cut(8, rank, world)
    local = np.ascontiguousarray(whole("w", (6, 8))[:, a:b].T)
    return sw.sharding.Segments(local, [sw.sharding.Segment(None, (0, a), permute=(1, 0), shape=(6, 8))])


LAYERS = 6


@case("stacked layers, cut by layers", {"w": (LAYERS, 3, 4)}, (1, 2, 3))
def _stacked(rank: int, world: int) -> Any:
    a, b = cut(LAYERS, rank, world)
    return sw.sharding.LocalShard(whole("w", (LAYERS, 3, 4))[a:b].copy(), (LAYERS, 3, 4), (a, 0, 0))


@case(
    "layers by name, in one stacked array of a stage",
    {f"w/layer{i}": (3, 4) for i in range(LAYERS)},
    (1, 2, 3),
)
def _unstacked(rank: int, world: int) -> Any:
    a, b = cut(LAYERS, rank, world)
    local = np.stack([whole(f"w/layer{i}", (3, 4)) for i in range(a, b)])
    return sw.sharding.Segments(
        local, [sw.sharding.Segment(f"layer{i}", (0, 0), into=S[i - a], shape=(3, 4)) for i in range(a, b)]
    )


@case("one layer of a stacked tensor, without its axis", {"w": (LAYERS, 3, 4)}, (LAYERS, 2, 3))
def _one_layer(rank: int, world: int) -> Any:
    if world < LAYERS:
        return _stacked(rank, world)
    local = whole("w", (LAYERS, 3, 4))[rank].copy()
    return sw.sharding.Segments(
        local, [sw.sharding.Segment(None, (rank, 0, 0), (1, 3, 4), shape=(LAYERS, 3, 4))]
    )


def _stages(rank: int, grid: Grid) -> Any:
    return {
        f"layer{i}": sw.sharding.LocalShard(
            whole(f"w/layer{i}", (8, 3))[slice(*cut(8, grid.at(rank)[2], grid.tp))].copy(),
            (8, 3),
            (cut(8, grid.at(rank)[2], grid.tp)[0], 0),
            (grid.at(rank)[1], grid.dp),
        )
        for i in grid.layers(rank, 4)
    }


STAGED = {f"w/layer{i}": (8, 3) for i in range(4)}
case(
    "stages that count their layers from zero",
    STAGED,
    (Grid(pp=2, tp=2), Grid(pp=4), Grid(dp=2, tp=2), Grid()),
)(_stages)
case("virtual stages", STAGED, (Grid(pp=2, virtual=2), Grid(pp=2, dp=2), Grid(tp=4)))(_stages)


@case("ZeRO-3: a flat part of each parameter, with padding", {"w": (5, 7)}, (1, 2, 3, 4))
def _zero3(rank: int, world: int) -> Any:
    n = -(-35 // world)
    local = np.zeros(n, np.float32)
    mine = whole("w", (5, 7)).reshape(-1)[rank * n : (rank + 1) * n]
    local[: len(mine)] = mine
    return sw.sharding.FlatShard(local, (5, 7), rank * n)


@case(
    "ZeRO-3 over tensor parallelism: a flat part of a row-parallel parameter",
    {"w": (6, 8)},
    (Grid(tp=2), Grid(dp=2, tp=2), Grid(dp=3), Grid(tp=4)),
)
def _zero_over_tp(rank: int, grid: Grid) -> Any:
    _, dp, tp = grid.at(rank)
    a, b = cut(8, tp, grid.tp)
    own = np.ascontiguousarray(whole("w", (6, 8))[:, a:b])
    n = -(-own.size // grid.dp)
    local = np.zeros(n, np.float32)
    mine = own.reshape(-1)[dp * n : (dp + 1) * n]
    local[: len(mine)] = mine
    of = sw.sharding.LocalShard(sw.ArraySpec(own.shape, np.float32), (6, 8), (0, a))
    return sw.sharding.FlatShard(local, of, dp * n)


#: Parameters of a model: shape, the dimension that tensor parallelism cuts, and the layer that they
#: are in.
MODEL = {
    f"layer{i}.{name}": (shape, dimension, i)
    for i in range(4)
    for name, shape, dimension in (("up", (8, 3), 0), ("down", (3, 8), 1), ("norm", (5,), None))
}
GRIDS = (
    Grid(dp=2, tp=2),
    Grid(pp=2, dp=2),
    Grid(dp=3),
    Grid(pp=2, tp=2, virtual=2),
    Grid(dp=1, tp=4),
    Grid(),
)


def partition(rank: int, grid: Grid, names: list[str], unit: int, multiple: int) -> sw.sharding.Segments:
    """One flat array of all these parameters as tensor parallelism has cut them, each at a multiple
    of ``unit``; of it the part of a rank of the data parallel group, the whole a multiple of so
    many times their number."""
    _, dp, tp = grid.at(rank)
    runs, end = [], 0
    for name in names:
        shape, dimension, _ = MODEL[name]
        box, replica = [slice(0, n) for n in shape], (tp, grid.tp)
        if dimension is not None:
            box[dimension], replica = slice(*cut(shape[dimension], tp, grid.tp)), (0, 1)
        values = np.ascontiguousarray(whole(f"w/{name}", shape)[tuple(box)])
        of = sw.sharding.LocalShard(sw.ArraySpec(values.shape, np.float32), shape, [one.start for one in box])
        first = -(-end // unit) * unit
        runs.append((name, of, values.reshape(-1), first, replica))
        end = first + values.size
    length = -(-end // (grid.dp * multiple)) * multiple
    local, segments = np.zeros(length, np.float32), []
    for name, of, values, first, replica in runs:
        a, b = max(first, dp * length), min(first + values.size, (dp + 1) * length)
        if a < b:
            local[a - dp * length : b - dp * length] = values[a - first : b - first]
            segments.append(
                sw.sharding.Segment.of_flat(name, of, a - first, b - a, at=a - dp * length, replica=replica)
            )
    return sw.sharding.Segments(local, segments)


def of_stage(rank: int, grid: Grid) -> list[str]:
    """The parameters of a rank's stage."""
    return [name for i in grid.layers(rank, 4) for name, (_, _, layer) in MODEL.items() if layer == i]


FLAT = {f"w/{name}": shape for name, (shape, _, _) in MODEL.items()}


@case("ZeRO-1: the flat partition of a group, in place", FLAT, GRIDS)
def _zero1(rank: int, grid: Grid) -> Any:
    return partition(rank, grid, of_stage(rank, grid), unit=1, multiple=2)


@case("a bucket of the distributed optimizer, in model space", FLAT, GRIDS)
def _bucket(rank: int, grid: Grid) -> Any:
    return partition(rank, grid, of_stage(rank, grid)[::-1], unit=16, multiple=32)


@case("FSDP1: one flat parameter of a module", FLAT, (Grid(dp=2), Grid(dp=3), Grid(), Grid(dp=4)))
def _fsdp1(rank: int, grid: Grid) -> Any:
    return partition(rank, grid, list(MODEL), unit=1, multiple=1)


@case("a grid of boxes", {"w": (7, 6)}, (Grid(dp=2, tp=2), Grid(dp=4), Grid(dp=2, tp=3)))
def _boxes(rank: int, grid: Grid) -> Any:
    _, dp, tp = grid.at(rank)
    (a, b), (c, d) = cut(7, dp, grid.dp), cut(6, tp, grid.tp)
    return sw.sharding.LocalShard(whole("w", (7, 6))[a:b, c:d].copy(), (7, 6), (a, c))


@case(
    "sharded within groups, replicated between them",
    {"w": (9, 4)},
    (Grid(pp=2, dp=2), Grid(pp=3, dp=1), Grid(dp=4)),
)
def _hybrid(rank: int, grid: Grid) -> Any:
    group, dp, _ = grid.at(rank)
    a, b = cut(9, dp, grid.dp)
    return sw.sharding.LocalShard(whole("w", (9, 4))[a:b].copy(), (9, 4), (a, 0), replica=(group, grid.pp))


@case(
    "experts over some ranks, each with replicas",
    {"w": (4, 3, 5)},
    (Grid(dp=2, tp=2), Grid(tp=4), Grid(dp=3), Grid()),
)
def _expert_replicas(rank: int, grid: Grid) -> Any:
    _, dp, ep = grid.at(rank)
    a, b = cut(4, ep, grid.tp)
    return sw.sharding.LocalShard(
        whole("w", (4, 3, 5))[a:b].copy(), (4, 3, 5), (a, 0, 0), replica=(dp, grid.dp)
    )


def ends_of(rank: int, world: int) -> list[str]:
    """Returns a stage's leaves beside its layers."""
    return [name for name, stage in (("first", 0), ("last", world - 1)) if rank == stage]


@case("tied: the first and the last stage, under one name", {"w/embed": (6, 3), "w/norm": (3,)}, (1, 2, 3))
def _tied(rank: int, world: int) -> Any:
    ends, count = ends_of(rank, world), min(world, 2)
    found: dict[str, Any] = {"norm": whole("w/norm", (3,))}
    if ends:
        replica = (len(ends) - 1 if world == 1 else int(ends == ["last"]), count) if world > 1 else (0, 1)
        found["embed"] = sw.sharding.LocalShard(whole("w/embed", (6, 3)), (6, 3), (0, 0), replica=replica)
    return found


@case(
    "tied: two names, on one stage or on two",
    {"w/norm": (3,), "w/first": whole("tied", (6, 3)), "w/last": whole("tied", (6, 3))},
    (1, 2, 3),
)
def _tied_names(rank: int, world: int) -> Any:
    tied = whole("tied", (6, 3))
    return {"norm": whole("w/norm", (3,)), **dict.fromkeys(ends_of(rank, world), tied)}


@case("experts in one grouped array", {f"w/expert{i}": (3, 4) for i in range(4)}, (1, 2, 4))
def _experts(rank: int, world: int) -> Any:
    a, b = cut(4, rank, world)
    local = np.stack([whole(f"w/expert{i}", (3, 4)).T for i in range(a, b)]).copy()
    return sw.sharding.Segments(
        local,
        [
            sw.sharding.Segment(f"expert{i}", (0, 0), into=S[i - a], permute=(1, 0), shape=(3, 4))
            for i in range(a, b)
        ],
    )


@case(
    "sections of a fused projection, cut by different rules",
    {"w/z": (8, 3), "w/x": (8, 3), "w/dt": (2, 3)},
    (1, 2, 4),
)
def _mamba(rank: int, world: int) -> Any:
    a, b = cut(8, rank, world)
    z, x, dt = (whole(f"w/{name}", (rows, 3)) for name, rows in (("z", 8), ("x", 8), ("dt", 2)))
    n = b - a
    return sw.sharding.Segments(
        np.concatenate([z[a:b], x[a:b], dt]),
        [
            sw.sharding.Segment("z", (a, 0), into=S[:n], shape=(8, 3)),
            sw.sharding.Segment("x", (a, 0), into=S[n : 2 * n], shape=(8, 3)),
            sw.sharding.Segment("dt", (0, 0), into=S[2 * n :], shape=(2, 3), replica=(rank, world)),
        ],
    )


@case("disjoint runs of one dimension", {"w": (16, 2)}, (1, 2, 4))
def _strided(rank: int, world: int) -> Any:
    blocks = whole("w", (16, 2)).reshape(4, world, 4 // world, 2)
    local = blocks[:, rank].reshape(-1, 2).copy()
    length = 4 // world
    return sw.sharding.Segments(
        local,
        [
            sw.sharding.Segment(
                None,
                (4 * block + length * rank, 0),
                into=S[block * length : (block + 1) * length],
                shape=(16, 2),
            )
            for block in range(4)
        ],
    )


@case("replicated, and named as such", {"w": (9, 3)}, (1, 2, 3))
def _replicated(rank: int, world: int) -> Any:
    return sw.sharding.LocalShard(whole("w", (9, 3)), (9, 3), (0, 0), replica=(rank, world))


@case("simply there", {"w": (9, 3)}, (1, 2, 3))
def _plain(rank: int, world: int) -> Any:
    return whole("w", (9, 3))


@case("a scalar", {"w": ()}, (1, 3))
def _scalar(rank: int, world: int) -> Any:
    return sw.sharding.LocalShard(whole("w", ()), (), (), replica=(rank, world))


@case("many scalars", {f"w/{i}": () for i in range(40)}, (1, 2, 3))
def _scalars(rank: int, world: int) -> Any:
    # As the optimizers of many parameters have them: some on all ranks, some on one.
    mine = {i: (rank, world) for i in range(20)} | {20 + i: (0, 1) for i in range(*cut(20, rank, world))}
    return {str(i): sw.sharding.LocalShard(whole(f"w/{i}", ()), (), (), one) for i, one in mine.items()}


def quantised() -> tuple[Array, Array]:
    """A tensor of 8-bit floats, and a scale for each block of 4 x 4."""
    bits = (np.arange(16 * 8) % 0x7F).astype(np.uint8)
    return bits.view(ml_dtypes.float8_e4m3fn).reshape(16, 8), whole("w/scale", (4, 2))


@case(
    "quantised, with the scales of blocks", {"w/values": quantised()[0], "w/scale": quantised()[1]}, (1, 2, 4)
)
def _quantised(rank: int, world: int) -> Any:
    a, b = cut(4, rank, world)
    values, scale = quantised()
    return {
        "values": sw.sharding.LocalShard(values[4 * a : 4 * b].copy(), (16, 8), (4 * a, 0)),
        "scale": sw.sharding.LocalShard(scale[a:b].copy(), (4, 2), (a, 0)),
    }


def _of_saver(rank: int, world: int, saved: int) -> Any:
    """Returns a rank's own part if as many ranks restore as saved; else the savers' parts in
    turn."""
    return sw.PerRank(whole(f"w/{rank % saved}", (3,)))


@case(
    "a value of each rank", lambda world: {f"w/{rank}": (3,) for rank in range(world)}, (1, 2, 3), _of_saver
)
def _per_rank(rank: int, world: int) -> Any:
    return sw.PerRank(whole(f"w/{rank}", (3,)), resize=lambda values, rank, world: values[rank % len(values)])


@case("nothing at all in it", {"w": (0, 3)}, (1, 2))
def _empty(rank: int, world: int) -> Any:
    return sw.sharding.LocalShard(np.zeros((0, 3), np.float32), (0, 3), (0, 0), replica=(rank, world))


#: Of every kind of layout in the field: the rows above that are of that kind, and the tests of
#: other files that are (of frameworks, whose tensors say by themselves how they are cut).
KINDS = {
    "tensor parallelism by columns": ["column parallel", "test_torch_ranks.py: column parallel"],
    "tensor parallelism by rows": ["row parallel, and its bias", "test_torch_ranks.py: row parallel"],
    "fused QKV of Megatron": [
        "fused QKV, interleaved by group, as one tensor with a view",
        "fused QKV, interleaved by group, as three tensors",
        "fused QKV with more ranks than groups",
    ],
    "fused QKV, concatenated": ["fused QKV, concatenated, with replicated K and V"],
    "uneven sections": ["uneven sections, one of them empty", "uneven heads of grouped queries, by hand"],
    "SwiGLU": [
        "SwiGLU, gate and up concatenated, as one logical tensor",
        "SwiGLU, gate and up as two tensors",
        "test_megatron.py: apply_swiglu_sharded_factory",
    ],
    "SwiGLU, interleaved": ["SwiGLU, interleaved in blocks"],
    "padded vocabulary": [
        "vocabulary padded to a multiple of the ranks",
        "test_megatron.py: allow_shape_mismatch",
    ],
    "stages of a pipeline": [
        "stages that count their layers from zero",
        "virtual stages",
        "test_megatron.py: virtual=2",
    ],
    "stacked layers": [
        "stacked layers, cut by layers",
        "layers by name, in one stacked array of a stage",
        "one layer of a stacked tensor, without its axis",
        "test_megatron.py: prepend_axis_num",
    ],
    "ZeRO-1 and ZeRO-2": [
        "ZeRO-1: the flat partition of a group, in place",
        "test_megatron.py: flattened_range",
    ],
    "ZeRO-3": [
        "ZeRO-3: a flat part of each parameter, with padding",
        "ZeRO-3 over tensor parallelism: a flat part of a row-parallel parameter",
    ],
    "distributed optimizer of Megatron": ["a bucket of the distributed optimizer, in model space"],
    "FSDP1": ["FSDP1: one flat parameter of a module"],
    "FSDP2": [
        "uneven sections, one of them empty",
        "test_torch_ranks.py: fully sharded",
        "test_torch_ranks.py: uneven",
        "test_torch_ranks.py: empty on some",
    ],
    "two dimensions of a mesh": ["a grid of boxes", "test_torch_ranks.py: both on one"],
    "HSDP": ["sharded within groups, replicated between them"],
    "HSDP and tensor parallelism": [
        "disjoint runs of one dimension",
        "test_torch_ranks.py: strided",
        "test_torch_ranks.py: strided, uneven",
    ],
    "experts": ["experts over some ranks, each with replicas", "experts in one grouped array"],
    "grouped GEMM": ["experts in one grouped array"],
    "ties": [
        "tied: the first and the last stage, under one name",
        "tied: two names, on one stage or on two",
        "test_megatron.py: output",
    ],
    "replicated norms": [
        "replicated, and named as such",
        "simply there",
        "test_torch_ranks.py: replicated",
    ],
    "sections of Mamba": [
        "sections of a fused projection, cut by different rules",
        "test_megatron.py: _split_tensor_factory",
    ],
    "values of each rank": ["a value of each rank", "test_megatron.py: ShardedObject"],
    "random states": ["test_layouts.py: default_rng(rank)", "test_megatron.py: rng_state"],
    "quantised": ["quantised, with the scales of blocks"],
    "scalars": ["a scalar", "many scalars", "test_torch_ranks.py: scalar"],
    "boxes that a tensor says": ["test_torch_ranks.py: CheckpointableTensor"],
    "in memory otherwise": ["transposed in memory", "nothing at all in it"],
}


def test_every_kind_of_layout_has_its_rows() -> None:
    tests = {
        file.name: file.read_text()
        for folder in ("python", "frameworks")
        for file in (Path(__file__).parents[1] / folder).glob("test_*.py")
    }
    rows = [row for rows in KINDS.values() for row in rows]
    for row in rows:
        file, _, what = row.partition(".py: ")
        assert row in CASES or (what and what in tests[f"{file}.py"]), f"{row}: there is no such row"
    assert not CASES.keys() - set(rows), "rows of no kind"
    for name, kind in CASES.items():
        assert len(kind.worlds) > 1, f"{name}: restored only as it was saved"


def arrays_of(leaf: Any) -> list[Array]:
    """The arrays that a rank has."""
    if isinstance(leaf, dict):
        return [array for one in leaf.values() for array in arrays_of(one)]
    if isinstance(leaf, sw.PerRank):
        return [leaf.value]
    return [leaf if isinstance(leaf, np.ndarray) else leaf.local]


def over(leaf: Any, make: Callable[[Array], Any]) -> Any:
    """The same over other arrays."""
    if isinstance(leaf, dict):
        return {name: over(one, make) for name, one in leaf.items()}
    if isinstance(leaf, np.ndarray):
        return make(leaf)
    if isinstance(leaf, sw.PerRank):
        return sw.PerRank(make(leaf.value), leaf.key, leaf.resize)
    if isinstance(leaf, sw.sharding.LocalShard):
        return sw.sharding.LocalShard(make(leaf.local), leaf.global_shape, leaf.offset, leaf.replica)
    if isinstance(leaf, sw.sharding.FlatShard):
        return sw.sharding.FlatShard(make(leaf.local), leaf.of, leaf.start, leaf.replica)
    return sw.sharding.Segments(make(leaf.local), leaf.segments)


def assert_alike(found: Array, expected: Array, what: str) -> None:
    """To the bit."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape), what
    assert found.tobytes() == expected.tobytes(), f"{what}: {found} is not {expected}"


@pytest.mark.parametrize("name", CASES)
def test_whole_tensors_are_restored_on_any_number_of_ranks(root: Path, name: str) -> None:
    kind = CASES[name]
    for number, world in enumerate(kind.worlds):

        def saves(rank: int, manager: sw.CheckpointManager, step: int = number, ranks: Any = world) -> None:
            manager.save(step, {"m": {"w": kind.leaf(rank, ranks)}}).result()

        together(size(world), root, saves, chunk_bytes=64)
        with sw.CheckpointManager(root, read_only=True) as reader:
            found = reader.restore(number)
        for path, shape in kind.tensors(world).items():
            at: Any = found["m"]
            for key in path.split("/"):
                at = at[key]
            expected = shape if isinstance(shape, np.ndarray) else whole(path, shape)
            assert_alike(at, expected, f"{path} of {world}")

    for number, world in enumerate(kind.worlds):
        # The next rank's part.
        step = (number + 1) % len(kind.worlds)

        def restores(rank: int, manager: sw.CheckpointManager, ranks: Any = world, step: int = step) -> None:
            leaf, saved = kind.leaf(rank, ranks), kind.worlds[step]
            expected = arrays_of(leaf if kind.restored is None else kind.restored(rank, ranks, saved))
            # One array stays one array.
            zeros = {id(array): np.zeros_like(array) for array in arrays_of(leaf)}
            target = over(leaf, lambda array: zeros[id(array)])
            like = over(leaf, lambda array: sw.ArraySpec(array.shape, array.dtype))
            for how, wanted in (("into", target), ("like", like)):
                options: Any = {how: {"m": {"w": wanted}}, "unexpected": "ignore"}
                got = arrays_of(manager.restore(step, **options)["m"]["w"])
                for one, values in zip(got, expected, strict=True):
                    assert_alike(one, values, f"{how}: rank {rank} of {ranks}, saved by {saved}")
                if how == "into" and not isinstance(leaf, sw.PerRank):
                    assert all(one is mine for one, mine in zip(got, arrays_of(target), strict=True))

        together(size(world), root, restores)


def _part(
    first: int, rows: int, shape: tuple[int, int] = (4, 3), dtype: Any = np.float32, **options: Any
) -> Any:
    return sw.sharding.LocalShard(np.zeros((rows, 3), dtype), shape, (first, 0), **options)


#: Mismatches: the state of each rank, and the words of the error.
MISFITS: dict[str, tuple[Callable[[int], Any], str]] = {
    "a hole between them": (
        lambda rank: _part(3 * rank, 1 + rank, (5, 3)),
        r"no rank holds \[1:3, 0:3\] of its shape \[5, 3\]; ranks \[0, 1\] hold parts",
    ),
    "a hole behind the only one that has something": (
        lambda rank: _part(0, 2 - 2 * rank),
        r"no rank holds \[2:4, 0:3\] of its shape \[4, 3\]; ranks \[0\] hold parts",
    ),
    "a hole where one says that another has it": (
        lambda rank: _part(2 * rank, 2, replica=(rank, 1 + rank)),
        r"no rank holds \[2:4, 0:3\] of its shape \[4, 3\]; ranks \[0\] hold parts",
    ),
    "an overlap": (
        lambda rank: _part(rank, 3),
        r"ranks 0 and 1 both hold \[1:3, 0:3\] of its shape \[4, 3\].*replica=",
    ),
    "another shape": (
        lambda rank: _part(2 * rank, 2, (4 + 2 * rank, 3)),
        r"ranks 0 and 1 disagree: .*\[4, 3\].*\[6, 3\]",
    ),
    "another dtype": (
        lambda rank: _part(2 * rank, 2, dtype=(np.float32, np.float64)[rank]),
        r"ranks 0 and 1 disagree: .*float32.*float64",
    ),
    "an object": (lambda rank: (_part(0, 4), "text")[rank], "ranks 0 and 1 disagree"),
    "flat runs that leave something out": (
        lambda rank: sw.sharding.FlatShard(np.zeros(5, np.float32), (4, 3), 6 * rank),
        r"no rank holds \[1:2, 2:3\] of its shape \[4, 3\]; ranks \[0, 1\]",
    ),
}


def test_shards_that_do_not_fit_are_refused_on_all_ranks(root: Path) -> None:
    def work(rank: int, manager: sw.CheckpointManager) -> None:
        manager.save(0, {"m": {"w": _part(2 * rank, 2)}}).result()
        for step, (what, (leaf, why)) in enumerate(MISFITS.items(), 1):
            with pytest.raises(sw.MismatchError, match=f"leaf `m/w`: {why}"):
                pytest.fail(f"{what}: {manager.save(step, {'m': {'w': leaf(rank)}}).result()}")
        assert manager.latest_step() == 0

    together(2, root, work)


EMPTY_OR_NOT = {
    "nothing or None": ({"x": {}}, {"x": None}),
    "a leaf at the top": ({"x": 1}, {"x": {}}),
    "a dict and a leaf": ({"x": {"a": 1}, "y": 1}, {"x": 2, "y": 1}),
    "a dict and a list": ({"m": {"x": {}, "y": 1}}, {"m": {"x": [], "y": 1}}),
    "a leaf and a dict": ({"m": {"x": 1, "y": 1}}, {"m": {"x": {}, "y": 1}}),
}


@pytest.mark.parametrize("what", EMPTY_OR_NOT)
def test_a_container_on_one_rank_only_is_refused(root: Path, what: str) -> None:
    def work(rank: int, manager: sw.CheckpointManager) -> None:
        for order in (1, -1):
            with pytest.raises(sw.MismatchError, match=r"leaf `(m/)?x`: ranks 0 and 1 disagree: .* a leaf"):
                manager.save(0, EMPTY_OR_NOT[what][::order][rank]).result()

    together(2, root, work)


@pytest.mark.parametrize("whose", [0, 1])
def test_an_empty_container_is_kept_whoever_has_it(root: Path, whose: int) -> None:
    """Also of a rank that writes nothing else beside it: the other has the same number, and one of
    the two writes it."""

    def work(rank: int, manager: sw.CheckpointManager) -> dict[str, Any]:
        empty = {"e": {}, "f": [()]} if rank == whose else {}
        manager.save(0, {"m": {"y": 1, **empty}, "n": {"w": whole("w", (4,))}}).result()
        return cast(dict[str, Any], manager.restore(0)["m"])

    assert together(2, root, work) == [{"y": 1, "e": {}, "f": [()]}] * 2


def test_a_leaf_of_empty_parts_has_no_ranks_to_name(root: Path) -> None:
    def work(rank: int, manager: sw.CheckpointManager) -> None:
        with pytest.raises(sw.MismatchError, match=r"no rank writes any part of it, of shape \[4, 3\]"):
            manager.save(0, {"w": _part(0, 0)}).result()

    together(2, root, work)


@pytest.mark.parametrize(
    ("array", "why"),
    [
        (np.ma.masked_array(np.zeros(4), [0, 1, 0, 1]), "a masked array"),
        (np.array(["a"] * 4), "an array of strings"),
        (np.array([object()] * 4), "an array of Python objects"),
        (np.zeros(4, [("a", "f4")]), "a structured array"),
    ],
)
def test_an_unstorable_array_holds_no_parts(root: Path, array: Array, why: str) -> None:
    with sw.CheckpointManager(root) as manager:
        for part in (
            sw.sharding.LocalShard(array, (4,), (0,)),
            sw.sharding.FlatShard(array, (4,), 0),
            sw.sharding.Segments(array, [sw.sharding.Segment("q", (0,), shape=(4,))]),
        ):
            with pytest.raises(sw.UnsupportedLeaf, match=rf"leaf `w.*`: {why}"):
                manager.save(0, {"w": part}).result()


def test_padding_stays_as_it_is_where_an_array_is_filled(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(0, {"w": whole("w", (10, 3))}).result()
        local = np.full((12, 3), -1, np.float32)
        manager.restore(
            into={
                "w": sw.sharding.Segments(
                    local, [sw.sharding.Segment(None, (0, 0), into=S[:10], shape=(10, 3))]
                )
            }
        )
        np.testing.assert_array_equal(local[:10], whole("w", (10, 3)))
        assert (local[10:] == -1).all()


def test_a_part_that_lies_behind_what_is_stored_is_padding(root: Path) -> None:
    stored = whole("w", (8, 4))
    sw.save(root, {"w": stored})
    for first in (0, 4, 8):
        expected = np.concatenate([stored, np.zeros((8, 4), np.float32)])[first : first + 8]
        for how in ("like", "into"):
            target = sw.sharding.LocalShard(np.full((8, 4), -1, np.float32), (16, 4), (first, 0))
            found = sw.restore(root, **{how: {"w": target}}, resize="pad")["w"]  # type: ignore[arg-type]
            np.testing.assert_array_equal(found.local, expected)


@pytest.mark.parametrize("how", ["like", "into"])
def test_a_part_beyond_the_store_needs_the_whole_shape(root: Path, how: str) -> None:
    sw.save(root, {"w": whole("w", (4, 4))})
    for offset, shape in (((0, 0), (8, 4)), ((4, 0), (2, 4)), ((0,), (4,))):
        local = np.full(shape, -1, np.float32)
        target = {"w": sw.sharding.Segments(local, [sw.sharding.Segment(None, offset)])}
        with pytest.raises(sw.MismatchError, match=r"`w`: a part of shape .* pass shape="):
            sw.restore(root, **{how: target})  # type: ignore[arg-type]
        assert (local == -1).all()


@pytest.mark.parametrize("dtype", [">f4", ">i8", ">c8", ">M8[s]"])
@pytest.mark.parametrize(
    "made",
    [
        lambda array: sw.sharding.LocalShard(array, (8,), (0,)),
        lambda array: sw.sharding.Segments(array, [sw.sharding.Segment(None, (0,), shape=(8,))]),
        lambda array: sw.sharding.Segments(
            array, [sw.sharding.Segment(None, (4 * i,), into=S[i::2], shape=(8,)) for i in (0, 1)]
        ),
        lambda array: sw.sharding.Segments(array, [sw.sharding.Segment("q", (0,), shape=(8,))]),
        lambda array: sw.sharding.FlatShard(array, (2, 4), 0),
    ],
)
def test_parts_in_another_byte_order_are_stored_by_value(
    root: Path, dtype: str, made: Callable[[Array], Any]
) -> None:
    native = np.dtype(dtype).newbyteorder("=")
    values = (np.arange(8) * 1000 + 1).astype(dtype)
    with sw.CheckpointManager(root) as manager:
        manager.save(0, {"w": made(values.astype(native))}).result()
        manager.save(1, {"w": made(values)}).result()
        for step in (0, 1):
            found = np.zeros(8, dtype)
            manager.restore(step, into={"w": made(found)})
            np.testing.assert_array_equal(found, values)
            like = made(np.zeros(8, dtype))
            np.testing.assert_array_equal(manager.restore(step, like={"w": like})["w"].local, values)


def test_segments_say_what_is_wrong_with_them() -> None:
    local = np.zeros((4, 6), np.float32)
    for segments, why in [
        ([sw.sharding.Segment(None, (3, 0), shape=(6, 6))], "does not lie in the shape"),
        ([sw.sharding.Segment(None, (0, 0), (5, 6), shape=(6, 6))], "does not lie in a part"),
        ([sw.sharding.Segment(None, (0, 0), into=S[4], shape=(6, 6))], "passes the end"),
        ([sw.sharding.Segment(None, (0, 0), into_shape=(5, 5), shape=(6, 6))], "not as many elements"),
        ([sw.sharding.Segment(None, (0, 0), permute=(0, 0), shape=(6, 6))], "is no order"),
        (
            [
                sw.sharding.Segment(
                    None, (0, 0, 0), (2, 2, 6), into_shape=(2, 2, 6), shape=(6, 6), view=(4, 2, 6)
                )
            ],
            "factors",
        ),
        ([sw.sharding.Segment("a", (0, 0)), sw.sharding.Segment(None, (0, 0))], "either all segments"),
        (
            [sw.sharding.Segment("a", (0, 0), shape=(6, 6)), sw.sharding.Segment("a", (0, 0), shape=(8, 6))],
            "say that its shape",
        ),
        ([sw.sharding.Segment.of_flat(None, (5, 5), 0, 25)], "do not lie in an array"),
        ([sw.sharding.Segment.of_flat(None, (4, 4), 10, 7)], "are no part"),
    ]:
        with pytest.raises(sw.MisuseError, match=why):
            sw.sharding.Segments(local, segments)
    with pytest.raises(sw.MisuseError, match="in one piece"):
        sw.sharding.Segments(local.T, [])
    with pytest.raises(sw.MisuseError, match="1-d"):
        sw.sharding.FlatShard(local, (4, 6), 0)


def test_every_rank_gets_its_own_value_back(
    root: Path,
) -> None:
    def state(rank: int, resize: Any = None) -> dict[str, Any]:
        generator = np.random.default_rng(rank)
        return {
            "data": {"rng": sw.PerRank(generator, resize=resize), "seen": sw.PerRank(100 + rank), "epoch": 3},
            "w": np.arange(4),
        }

    def drawn(rank: int) -> list[float]:
        return list(np.random.default_rng(rank).random(3))

    together(3, root, lambda rank, manager: manager.save(0, state(rank)).result())

    def restores(rank: int, manager: sw.CheckpointManager) -> None:
        target = state(7)
        got = manager.restore(into=target)
        assert got["data"]["seen"].value == 100 + rank
        assert list(target["data"]["rng"].value.random(3)) == drawn(rank)

    together(3, root, restores)

    def elsewhere(rank: int, manager: sw.CheckpointManager) -> None:
        with pytest.raises((sw.MismatchError, sw.RankFailed), match="saved by 3 ranks"):
            manager.restore(into=state(0))
        target = {
            "data": {
                "rng": sw.PerRank(np.random.default_rng(9), resize=lambda values, rank, world: values[rank]),
                "seen": sw.PerRank(0, resize=lambda values, rank, world: (sum(values), world)),
                "epoch": 0,
            }
        }
        got = manager.restore(into=target, unexpected="ignore")
        assert got["data"]["seen"].value == (303, 2)
        assert list(target["data"]["rng"].value.random(3)) == drawn(rank)

    together(2, root, elsewhere)


def test_a_rank_plans_alone_what_it_would_restore(root: Path) -> None:
    def state(rank: int, start: float) -> dict[str, Any]:
        return {
            "rng": sw.PerRank(np.full(2, start)),
            "seen": sw.PerRank(start, key=f"dp={rank}"),
            "layers": {str(rank): np.full(3, start)},
            "x": 1,
        }

    def saves(rank: int, manager: sw.CheckpointManager) -> None:
        manager.save(0, state(rank, float(rank))).result()
        if rank == 1:  # the others are not there to answer
            for keywords in ({"into": state(1, 7.0)}, {"like": state(1, 7.0)}):
                plan = manager.plan(**keywords)  # type: ignore[arg-type]
                assert set(plan.report.restored) == {"rng/1", "seen/dp=1", "layers/1", "x"}
                assert set(plan.report.left_out) >= {"rng/0", "layers/0", "layers/2"}
            with pytest.raises(sw.MismatchError, match="missing"):
                manager.plan(like={"layers": {"4": sw.ArraySpec()}})
        got = manager.restore(into=state(rank, 7.0))
        assert (got["rng"].value == rank).all()

    together(3, root, saves)
    with sw.CheckpointManager(root) as alone, pytest.raises(sw.MismatchError, match="saved by 3 ranks"):
        alone.plan(like=state(0, 7.0))
    with sw.CheckpointManager(root) as alone, pytest.raises(sw.MismatchError, match="unexpected"):
        alone.plan(like={"layers": {"0": sw.ArraySpec()}})


def test_leaves_of_other_stages_are_not_unexpected(root: Path) -> None:
    def stage(rank: int, world: int) -> dict[str, Any]:
        a, b = cut(LAYERS, rank, world)
        return {"params": {f"layer{i}": whole(f"layer{i}", (3, 2)) for i in range(a, b)}}

    together(3, root, lambda rank, manager: manager.save(0, stage(rank, 3)).result())

    def restores(rank: int, manager: sw.CheckpointManager) -> None:
        target = stage(rank, 2)
        for array in target["params"].values():
            array[...] = 0
        manager.restore(into=target)
        for name, array in target["params"].items():
            np.testing.assert_array_equal(array, whole(name, (3, 2)))
        # Nobody wants the first layer.
        target["params"].pop("layer0", None)
        with pytest.raises((sw.MismatchError, sw.RankFailed)) as failure:
            manager.restore(into=target)
        if isinstance(failure.value, sw.MismatchError):
            assert [one.path for one in failure.value.report.unexpected] == ["params/layer0"]
        manager.restore(into=target, unexpected="ignore")

    together(2, root, restores)


@pytest.mark.parametrize("snapshot", ["auto", "eager"])
def test_unexpected_differences_between_ranks_are_refused(root: Path, snapshot: Any) -> None:
    def work(rank: int, manager: sw.CheckpointManager) -> None:
        big = np.zeros(500_000, np.float32)
        manager.save(0, {"m": {"big": big, "n": 1}}, snapshot=snapshot).result()
        big[-1] = rank
        with pytest.raises(
            sw.MismatchError, match=r"`m/big`.*its values differ between ranks 0 and 1.*Replicated"
        ):
            manager.save(1, {"m": {"big": big, "n": 1}}, snapshot=snapshot).result()
        with pytest.raises(sw.MismatchError, match="`m/n`"):
            manager.save(2, {"m": {"big": np.zeros(3), "n": rank}}).result()
        with pytest.raises(sw.MismatchError, match="`m/late`"):
            manager.save(4, {"m": {"big": np.zeros(3), "n": 1, "late": np.full(3, rank)}}).result()
        with pytest.raises(sw.MismatchError, match="`m/later`"):
            manager.save(5, {"m": {"big": np.zeros(3), "n": 1, "later": f"rank {rank}"}}).result()
        drifting = {
            "big": sw.Replicated(np.full(500_000, rank + 5.0)),
            "n": sw.Replicated({"a": rank, "b": [rank]}),
        }
        manager.save(6, {"m": drifting}).result()

    together(2, root, work)
    found = sw.restore(root)["m"]
    assert (found["big"] == 5.0).all()
    assert found["n"] == {"a": 0, "b": [0]}


def test_a_part_is_described_only_for_a_message(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = []
    words = sw.sharding.LocalShard.__repr__
    monkeypatch.setattr(sw.sharding.LocalShard, "__repr__", lambda self: said.append(self) or words(self))
    state = {f"w{i}": sw.sharding.LocalShard(whole("w", (3,)), (3,), (0,)) for i in range(10)}
    with sw.CheckpointManager(root) as manager:
        manager.save(0, {"m": state}).result()
        manager.restore(into={"m": state})
        manager.plan(like={"m": state})
        assert not said
        with pytest.raises(sw.UnsupportedLeaf, match=r"`w`: LocalShard\(\[0:3\] of \(3,\)\) without data"):
            manager.save(1, {"w": sw.sharding.LocalShard(sw.ArraySpec((3,), "float32"), (3,), (0,))})
        assert said


def test_the_collector_rests_while_many_parts_are_restored(root: Path) -> None:
    def state(value: float) -> dict[str, Any]:
        return {f"w{i}": sw.sharding.LocalShard(np.full(3, value), (3,), (0,)) for i in range(3000)}

    collections = []
    with sw.CheckpointManager(root) as manager:
        manager.save(0, {"m": state(1.0)}).result()
        target = {"m": state(2.0)}
        gc.callbacks.append(lambda phase, info: collections.append(phase))
        try:
            manager.restore(into=target)
            manager.plan(like=target)
        finally:
            gc.callbacks.pop()
        assert len(collections) < 20  # not one for each few hundred objects
        assert gc.isenabled()
    assert (target["m"]["w7"].local == 1).all()
