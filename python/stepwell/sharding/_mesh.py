"""Which rank has which part, said once for a whole model: :class:`RankMesh` (ranks as points of a
grid) and :class:`Rules` (names of tensors → axes of that grid)."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, cast, final

import numpy as np
import numpy.typing as npt

from .._checks import instance, listed, one_of, shown, sizes, text, whole
from .._paths import named
from .._restore import template
from .._state.shards import LocalShard
from .._state.specs import AS_STORED, ArraySpec, ObjectSpec
from .._types import Array
from ..errors import MismatchError, MisuseError

if TYPE_CHECKING:
    import jax
    from torch.distributed.device_mesh import DeviceMesh

#: The axes that cut a dimension of a tensor: none, one, or several (the first one outermost).
Axes: TypeAlias = "str | tuple[str, ...] | None"


#: Ranks are numbers of 32 bits.
_MOST_RANKS = 2**32 - 1


@final
class RankMesh:
    """The ranks of a job as points of a grid: ``RankMesh(pp=2, dp=2, tp=4)``. The last axis varies
    fastest.

    Args:
        ranks: the grid of ranks, where they are not numbered in that order.
        axes: names and sizes.
    """

    __slots__ = ("_places", "_table", "axes")

    def __init__(self, ranks: npt.ArrayLike | None = None, /, **axes: int) -> None:
        if not axes:
            raise MisuseError("a RankMesh has axes, such as RankMesh(dp=2, tp=4)")
        self.axes = {
            text(name, "the name of an axis"): whole(n, f"axis {name}", 1, 2**31) for name, n in axes.items()
        }
        shape = tuple(self.axes.values())
        if self.size > _MOST_RANKS:
            raise MisuseError(f"{self!r} has {self.size} ranks, and a job has at most {_MOST_RANKS}")
        #: For ranks in another order: the rank at each point of the grid, and the point of each
        #: rank.
        self._table: list[int] | None = None
        self._places: dict[int, int] = {}
        if ranks is None:
            return
        try:
            grid = np.asarray(ranks)
        except ValueError as error:
            raise MisuseError(f"the grid of ranks is an array of integers: {error}") from error
        if grid.shape != shape:
            raise MisuseError(f"the grid of ranks has shape {grid.shape}, the axes {self.axes} have {shape}")
        if grid.dtype.kind not in "iu" or grid.min() < 0:
            raise MisuseError(f"the grid of ranks is an array of integers from 0 on, not {shown(ranks)}")
        self._table = grid.ravel().tolist()
        self._places = {rank: place for place, rank in enumerate(self._table)}
        if len(self._places) != len(self._table):
            raise MisuseError("the grid of ranks names a rank twice")

    @classmethod
    def of(cls, mesh: DeviceMesh | jax.sharding.Mesh) -> RankMesh:
        """From a ``DeviceMesh`` of torch with names, or a ``jax.sharding.Mesh`` whose devices are
        each another process's."""
        names = getattr(mesh, "mesh_dim_names", None) or getattr(mesh, "axis_names", None)
        if not names:
            raise MisuseError(
                f"a mesh without names of its axes: {shown(mesh)}; pass RankMesh(table, dp=…, tp=…)"
            )
        grid = getattr(mesh, "mesh", None)
        if grid is None:
            devices = cast("jax.sharding.Mesh", mesh).devices
            grid = np.vectorize(lambda device: device.process_index, otypes=[int])(devices)
        grid = np.asarray(grid)
        return cls(grid, **dict(zip(map(str, names), grid.shape, strict=True)))

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return prod(self.axes.values())

    def coordinates(self, rank: int) -> dict[str, int]:
        """Returns the coordinates of a rank."""
        rank = whole(rank, "a rank", 0)
        place = self._places.get(rank) if self._table is not None else rank if rank < self.size else None
        if place is None:
            raise MisuseError(f"rank {rank} is not in {self!r}")
        found = {}
        for name, n in reversed(self.axes.items()):
            place, found[name] = divmod(place, n)
        return {name: found[name] for name in self.axes}

    def ranks(self, **fixed: int) -> list[int]:
        """The ranks at these coordinates, whatever the others are, in order."""
        unknown = fixed.keys() - self.axes.keys()
        if unknown:
            raise MisuseError(f"{self!r} has no axis {sorted(unknown)[0]!r}")
        places = [0]
        for name, n in self.axes.items():
            at = [whole(fixed[name], f"the place along {name}", 0, n - 1)] if name in fixed else range(n)
            places = [place * n + one for place in places for one in at]
        return places if self._table is None else sorted(self._table[place] for place in places)

    def __repr__(self) -> str:
        return f"RankMesh({', '.join(f'{name}={n}' for name, n in self.axes.items())})"


@final
class Rules:
    """How the tensors of a model are cut: patterns of their names, and for each dimension the axes
    of a mesh.

    The first pattern that matches a tensor counts. A pattern is matched against the leaf path with
    ``.`` and ``/`` alike as separators: ``*`` stands for anything between two of them, ``**`` for
    any number of parts (``**norm`` is ``**/*norm``). ``()`` means that all ranks (of the stage)
    have all of it. A tensor that no pattern matches is an error: end with ``"**": ()`` if the rest
    is replicated.

    Args:
        patterns: pattern → one entry for each dimension from the first on (further ones are not
            cut): the name of an axis, several (the first one outermost), or ``None``.
        stages: for pipelines: pattern → number of the stage, or a function of the leaf path and the
            number of stages that returns it. Leaves without one (``None``) are on all stages. With
            one stage, everything is on it.
        stage_axis: the axis of the stages.
        uneven: for a dimension that is not a multiple: ``"chunk"``, as ``torch.chunk`` (the last
            parts are shorter, or empty), or ``"balanced"`` (the first ones have one more).
    """

    __slots__ = ("_patterns", "_stage_axis", "_stages", "_uneven")

    def __init__(
        self,
        patterns: Mapping[str, Sequence[Axes]],
        *,
        stages: Mapping[str, int] | Callable[[str, int], int | None] | None = None,
        stage_axis: str = "pp",
        uneven: Literal["chunk", "balanced"] = "chunk",
    ) -> None:
        if not isinstance(patterns, Mapping):
            raise MisuseError(f"patterns is a dict of patterns and axes, not {shown(patterns)}")
        self._patterns = [
            (
                text(glob, "a pattern"),
                tuple(map(_axes, listed(axes, f"the axes of {glob!r} are a tuple, one for each dimension"))),
            )
            for glob, axes in patterns.items()
        ]
        if stages is not None and not isinstance(stages, Mapping) and not callable(stages):
            raise MisuseError(f"stages is a dict of patterns and numbers, or a function, not {shown(stages)}")
        self._stages = stages
        self._stage_axis = text(stage_axis, "stage_axis")
        self._uneven = one_of(uneven, "uneven", ("chunk", "balanced"))

    def shard(
        self,
        state: object,
        mesh: RankMesh,
        rank: int,
        shapes: Mapping[str, Sequence[int]] | Callable[[str], Sequence[int]] | None = None,
    ) -> Any:  # of the nesting of ``state``
        """A state of this rank's own tensors → the same with each as a :class:`LocalShard`, to be
        saved. ``shapes``, where parts differ in size: leaf path → shape of the whole tensor, or a
        function of the leaf path that gives it; of what it does not name, each cut dimension is as
        many times as long as the part."""
        instance(mesh, RankMesh, "mesh", "sw.sharding.RankMesh(…)")
        if shapes is not None and not isinstance(shapes, Mapping) and not callable(shapes):
            raise MisuseError(
                f"shapes is {{leaf path: shape of the whole tensor}}, or a function of the leaf path that gives it, not {shown(shapes)}"
            )
        part = template.parse(state)
        for leaf in template.leaves(part):
            leaf.result = leaf.value
            if leaf.what != "array" or not hasattr(leaf.value, "shape") or isinstance(leaf.value, ArraySpec):
                continue
            array = cast(Array, leaf.value)
            axes = self._axes_of(leaf.path, len(array.shape))
            given = shapes(leaf.path) if callable(shapes) else (shapes or {}).get(leaf.path)
            if given is not None:
                shape = sizes(given, f"the shape of {named(leaf.path)}")
                if len(shape) != len(axes):
                    raise MisuseError(
                        f"{named(leaf.path)} has {len(axes)} dimensions, and shapes= says {shape}"
                    )
            else:
                shape = tuple(n * _ways(mesh, one) for n, one in zip(array.shape, axes, strict=True))
            stage = self._stage_of(leaf.path, mesh)
            offset, extent = self._box(shape, axes, mesh, rank)
            if extent != tuple(array.shape):
                raise MismatchError(
                    f"{named(leaf.path)}: rank {rank} has shape {tuple(array.shape)}, and {axes} of {shape} over {mesh!r} gives it {extent}"
                )
            leaf.result = LocalShard(array, shape, offset, self._replica(leaf.path, axes, mesh, rank, stage))
        return template.finish(part, False)

    # The answer has the stored nesting.
    def abstract_state(self, metadata: object, mesh: RankMesh, rank: int) -> Any:
        """Returns this rank's part of a stored state (``manager.metadata(step)``, or a tree of
        :class:`~stepwell.ArraySpec`), for ``like=``. Each tensor is a :class:`LocalShard` over a
        spec. Leaves of other stages are left out (``...``)."""
        instance(mesh, RankMesh, "mesh", "sw.sharding.RankMesh(…)")
        part = template.parse(getattr(metadata, "tree", metadata))
        for leaf in template.leaves(part):
            leaf.result = AS_STORED if isinstance(leaf.value, ObjectSpec) else leaf.value
            spec = leaf.value
            if not isinstance(spec, ArraySpec) or spec.shape is None:
                continue
            stage = self._stage_of(leaf.path, mesh)
            if stage is not None and mesh.coordinates(rank)[self._stage_axis] != stage:
                leaf.result = ...
                continue
            axes = self._axes_of(leaf.path, len(spec.shape))
            offset, extent = self._box(spec.shape, axes, mesh, rank)
            replica = self._replica(leaf.path, axes, mesh, rank, stage)
            leaf.result = LocalShard(ArraySpec(extent, spec.dtype), spec.shape, offset, replica)
        return template.finish(part, False)

    def _axes_of(self, path: str, ndim: int) -> tuple[tuple[str, ...], ...]:
        for glob, axes in self._patterns:
            if _matches(glob, path):
                if len(axes) > ndim:
                    raise MisuseError(
                        f"{named(path)} has {ndim} dimensions, and the rule {glob!r} speaks of {len(axes)}"
                    )
                return (*axes, *((),) * (ndim - len(axes)))
        raise MisuseError(
            f'{named(path)} matches no rule; add one, or "**": () as the last if the rest is the same on all ranks'
        )

    def _stage_of(self, path: str, mesh: RankMesh) -> int | None:
        count = mesh.axes.get(self._stage_axis, 1)
        if self._stages is None or count == 1:
            return None
        if callable(self._stages):
            stage = self._stages(path, count)
        else:
            stage = next((stage for glob, stage in self._stages.items() if _matches(glob, path)), None)
        if stage is not None and whole(stage, f"the stage of {named(path)}", 0) >= count:
            raise MisuseError(
                f"{named(path)} is of stage {stage}, and {mesh!r} has {count}; pass stages= as a function of path and count"
            )
        return stage

    def _box(
        self, shape: Sequence[int], axes: tuple[tuple[str, ...], ...], mesh: RankMesh, rank: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        at = mesh.coordinates(rank)
        offset, extent = [], []
        for size, names in zip(shape, axes, strict=True):
            part = 0
            for name in names:
                if name not in mesh.axes:
                    raise MisuseError(f"a rule names the axis {name!r}, which {mesh!r} has not")
                part = part * mesh.axes[name] + at[name]
            first, end = self._cut(size, _ways(mesh, names), part)
            offset.append(first)
            extent.append(end - first)
        return tuple(offset), tuple(extent)

    def _cut(self, size: int, ways: int, part: int) -> tuple[int, int]:
        if self._uneven == "balanced":
            longer, length = size % ways, size // ways
            first = part * length + min(part, longer)
            return first, first + length + (part < longer)
        length = -(-size // ways)
        return min(size, part * length), min(size, (part + 1) * length)

    def _replica(
        self, path: str, axes: tuple[tuple[str, ...], ...], mesh: RankMesh, rank: int, stage: int | None
    ) -> tuple[int, int]:
        """Which of the ranks that have the same this one is, and how many they are."""
        at = mesh.coordinates(rank)
        fixed = {name: at[name] for names in axes for name in names}
        if stage is not None:
            fixed[self._stage_axis] = stage
        same = mesh.ranks(**fixed)
        if rank not in same:
            raise MisuseError(
                f"{named(path)} is of stage {stage}, and rank {rank} of {mesh!r} is of another; leave it out of that rank's state, or give it no stage (None) if all stages have it"
            )
        return same.index(rank), len(same)


def _axes(axes: object) -> tuple[str, ...]:
    if axes is None:
        return ()
    if isinstance(axes, str):
        return (axes,)
    if isinstance(axes, (tuple, list)) and all(isinstance(one, str) for one in axes):
        return tuple(axes)
    raise MisuseError(f"a dimension is cut along an axis, a tuple of axes, or None, not {shown(axes)}")


def _ways(mesh: RankMesh, names: Sequence[str]) -> int:
    return prod(mesh.axes.get(name, 1) for name in names)


@lru_cache(maxsize=65536)
def _matches(glob: str, path: str) -> bool:
    return _pattern(glob).fullmatch(_parts(path)) is not None


def _parts(path: str) -> str:
    """A path with one separator: dots and slashes in names, those between them, and indices
    alike."""
    return re.sub(r"\\(.)", r"\1", re.sub(r"\[(-?\d+)\]", r"/\1", path)).replace(".", "/").strip("/")


@lru_cache(maxsize=4096)
def _pattern(glob: str) -> re.Pattern[str]:
    parts = _parts(glob).split("/")
    found = ""
    for number, part in enumerate(parts):
        last = number == len(parts) - 1
        if part == "**":
            found += ".*" if last else "(?:.*/)?"
            continue
        if part.startswith("**"):
            # `**norm` is `**/*norm`.
            found, part = f"{found}(?:.*/)?", part[1:]
        found += "".join("[^/]*" if one == "*" else "[^/]" if one == "?" else re.escape(one) for one in part)
        found += "" if last else "/"
    return re.compile(found)
