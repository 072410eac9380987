"""Symbols of distributed tensors of torch (``DTensor``) in pickles, and their places.

A file of one rank has the rank's part of each tensor, the placements, and the rank's coordinate on
the mesh of devices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .description import Tensor
from .pickle_values import Found, Made, Symbol, opaque
from .python_symbols import integer


@dataclass(frozen=True, slots=True)
class DeviceMesh:
    """The mesh of devices, as a rank sees it."""

    #: Ranks along each dimension.
    shape: tuple[int, ...]
    #: The rank's coordinate.
    coordinate: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Placement:
    """The placement along a dimension of a mesh."""

    #: The dimension of the tensor that is cut; ``None`` if every rank has all of it.
    axis: int | None


@dataclass(frozen=True, slots=True)
class Distribution:
    """The part of a tensor that a rank has."""

    shape: tuple[int, ...]
    placements: tuple[Placement, ...]
    mesh: DeviceMesh

    def is_first_copy(self) -> bool:
        """True for one of the ranks that have the same part."""
        rows = zip(self.placements, self.mesh.coordinate, strict=True)
        return all(placement.axis is not None or at == 0 for placement, at in rows)

    def parts(self) -> int:
        """The number of parts of the tensor."""
        count = 1
        for placement, size in zip(self.placements, self.mesh.shape, strict=True):
            count *= 1 if placement.axis is None else size
        return count

    def box(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The rank's first element and elements along each dimension. Each dimension of the mesh
        cuts what the ones before it leave: into equal parts, the last ones smaller or empty."""
        start, extent = [0] * len(self.shape), list(self.shape)
        rows = zip(self.placements, self.mesh.shape, self.mesh.coordinate, strict=True)
        for placement, size, at in rows:
            axis = placement.axis
            if axis is None:
                continue
            length = extent[axis]
            step = -(-length // size)
            begin = min(at * step, length)
            start[axis] += begin
            extent[axis] = min(step, length - begin)
        return tuple(start), tuple(extent)


def _value(value: object) -> Found:
    """A value that only other symbols understand."""
    return Found(value, opaque(f"torch {type(value).__name__}").placed)


def _state(made: Made) -> dict[object, object]:
    state = {} if made.state is None else made.state.value
    if type(state) is not dict:
        raise TypeError("attributes were expected")
    return state


def _counts(value: object) -> tuple[int, ...]:
    if type(value) not in (tuple, list):
        value = (value,)
    counts = tuple(integer(one) for one in value)  # type: ignore[attr-defined]
    if any(count < 0 for count in counts):
        raise ValueError("counts were expected")
    return counts


def _axis_of_mesh(made: Made) -> Found:
    """``_FlatLayout``: one dimension of a mesh, which may be several flattened ones."""
    size = 1
    for one in _counts(_state(made)["shape"]):
        size *= one
    return Found(size, opaque("torch mesh").placed)


def _mesh_layout(made: Made) -> Found:
    return Found(_counts(_state(made)["axes"]), opaque("torch mesh").placed)


def _mesh(made: Made) -> Found:
    state = _state(made)
    ranks = state.get("mesh")
    shape = ranks.shape if isinstance(ranks, Tensor) else _counts(state["_layout"])
    coordinate = _counts(state["_coordinate_on_dim"])
    if len(shape) != len(coordinate) or any(at >= size for at, size in zip(coordinate, shape, strict=True)):
        raise ValueError("a coordinate on the mesh was expected")
    return _value(DeviceMesh(shape, coordinate))


def _shard(made: Made) -> Found:
    axis = integer(made.arg(0) if made.args else _state(made)["dim"])
    return _value(Placement(axis))


def _replicate(_: Made) -> Found:
    return _value(Placement(None))


def _tensor_meta(made: Made) -> Found:
    return Found(_counts(made.arg(0)), opaque("torch TensorMeta").placed)


def _spec(made: Made) -> Found:
    state = _state(made)
    mesh, placements, shape = state["mesh"], state["placements"], state["tensor_meta"]
    if not isinstance(mesh, DeviceMesh) or type(placements) is not tuple or type(shape) is not tuple:
        raise TypeError("a mesh and placements were expected")
    if len(placements) != len(mesh.shape):
        raise ValueError("a placement for each dimension of the mesh was expected")
    for one in placements:
        if not isinstance(one, Placement) or not -len(shape) <= (one.axis or 0) < max(1, len(shape)):
            raise TypeError("placements were expected")
    known = tuple(Placement(None if one.axis is None else one.axis % len(shape)) for one in placements)
    return _value(Distribution(_counts(shape), known, mesh))


def distributed(state: object) -> tuple[Tensor, Distribution] | None:
    """Returns the local tensor and the distribution in a ``DTensor``'s state."""
    if type(state) is tuple and len(state) == 2:
        state = {**(state[0] or {}), **(state[1] or {})}
    if type(state) is not dict:
        return None
    local, spec = state.get("_local_tensor"), state.get("_spec")
    if isinstance(local, Tensor) and isinstance(spec, Distribution):
        return local, spec
    return None


_PLACEMENTS = ("torch.distributed.tensor.placement_types", "torch.distributed._tensor.placement_types")
_SPECS = ("torch.distributed.tensor._dtensor_spec", "torch.distributed._tensor._dtensor_spec")
_OLD_SPECS = "torch.distributed._tensor.placement_types"

SYMBOLS: Mapping[tuple[str, str], Symbol] = {
    ("torch.distributed._mesh_layout", "_FlatLayout"): _axis_of_mesh,
    ("torch.distributed._mesh_layout", "_MeshLayout"): _mesh_layout,
    ("torch.distributed.device_mesh", "DeviceMesh"): _mesh,
    ("torch.distributed._tensor.device_mesh", "DeviceMesh"): _mesh,
    **{(module, "Shard"): _shard for module in _PLACEMENTS},
    **{(module, "Replicate"): _replicate for module in _PLACEMENTS},
    **{(module, "DTensorSpec"): _spec for module in (*_SPECS, _OLD_SPECS)},
    **{(module, "TensorMeta"): _tensor_meta for module in (*_SPECS, _OLD_SPECS)},
}

CLASSES = frozenset(
    {
        ("torch.distributed.tensor", "DTensor"),
        ("torch.distributed.tensor._api", "DTensor"),
        ("torch.distributed._tensor.api", "DTensor"),
        ("torch.distributed._tensor", "DTensor"),
    }
)
