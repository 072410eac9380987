"""The torch adapter: tensors in and out, modules filled in place. Imported only if torch is.

A tensor in host memory or on a CUDA device is taken hold of by DLPack, without a copy and without a
hand-over of streams (that is done once for each device, by the engine); one on another device is
copied to the host before a save returns. Ties (the same non-empty storage, offset, shape and
strides) are found by the engine. The public classes are in :mod:`stepwell.torch`.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Protocol, TypeAlias, TypeGuard

import numpy as np
import torch
from torch.utils import dlpack

from .. import _core
from .._state import layouts
from .._state.specs import ArraySpec, to_dtype
from .._types import Array, Read
from ..errors import UnsupportedLeaf
from . import Children, OnDevice, Opened, Target

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from .._state.leaves import Description

#: A device as callers give it; ``None``: the host.
Device: TypeAlias = torch.device | str | int | None


class _PartOfTensor(Protocol):
    """torch's protocol ``CheckpointableTensor``: the tensor is one or several parts of another."""

    @property
    def shape(self) -> torch.Size: ...

    global_shape: Sequence[int]
    global_offsets: Sequence[Sequence[int]]
    local_offsets: Sequence[Sequence[int]]
    local_sizes: Sequence[Sequence[int]]


#: Its attributes.
_BOXES = ("global_shape", "global_offsets", "local_offsets", "local_sizes")


def _is_part(tensor: object) -> TypeGuard[_PartOfTensor]:
    return isinstance(tensor, torch.Tensor) and all(hasattr(tensor, name) for name in _BOXES)


#: Integers of less than a byte: torch stores a byte for each, and defines no values for it.
_SUB_BYTE = frozenset(
    found
    for bits in range(1, 8)
    for sign in ("", "u")
    if (found := getattr(torch, f"{sign}int{bits}", None)) is not None
)


def _capsule(tensor: torch.Tensor) -> tuple[object, torch.UntypedStorage]:
    """The memory of a tensor, where that holds its values: a view that conjugates or negates, or
    stands for zeros, has others there; of one that says so, the values are parts of another. And
    the storage, which a capsule does not hold: the tensor lets go of it where it is given another
    (`tensor.data = …`, `module.to()`)."""
    if _is_lazy_view(tensor):
        raise BufferError("a lazy view")
    if hasattr(tensor, _BOXES[1]):
        raise BufferError("parts of a tensor")
    if tensor.dtype in _SUB_BYTE:
        raise BufferError("elements that torch describes as whole bytes")
    return dlpack.to_dlpack(tensor), tensor.untyped_storage()  # type: ignore[attr-defined]


def _is_lazy_view(tensor: torch.Tensor) -> bool:
    return tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor()


def with_values(array: Array) -> Array:
    """A tensor whose memory holds its values: a new one, of a lazy view."""
    if not isinstance(array, torch.Tensor) or not _is_lazy_view(array):
        return array
    return array.detach().resolve_conj().resolve_neg().clone()


#: Tensors that are nothing else: what a subclass is, and where its values are, is asked one by one.
_PLAIN = (torch.Tensor, torch.nn.Parameter)

for _class in _PLAIN:
    _core.array_type(_class, "torch", False, _capsule, False)


def streams(devices: Iterable[int]) -> dict[int, int]:
    """The current streams."""
    if not torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        return {}
    return {device: torch.cuda.current_stream(device).cuda_stream for device in devices}


def addresses(optimizer: torch.optim.Optimizer, host: bool) -> list[tuple[int, int]]:
    """Returns address and bytes of the tensors that only an optimizer's steps change: parameters
    and state, on devices, and with ``host`` also in host memory. Only contiguous ones: others may
    have foreign data between their elements."""
    tensors = [one for group in optimizer.param_groups for one in group["params"]]
    for slots in optimizer.state.values():
        tensors += [one for one in slots.values() if isinstance(one, torch.Tensor)]
    plain = [one if type(one) in _PLAIN else _plain(one) for one in tensors]
    return [
        (one.data_ptr(), one.nbytes)
        for one in plain
        if (one.is_cuda or (host and one.device.type == "cpu")) and (one.is_contiguous() or _is_dense(one))
    ]


def _is_dense(tensor: torch.Tensor) -> bool:
    """True if its elements lie one behind the other, in whatever order."""
    reach = sum((n - 1) * stride for n, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return reach + 1 == tensor.numel()


def describe(obj: object) -> Description | None:
    """Tensors that the engine cannot take as they are; ``torch.Size`` and ``torch.dtype``, by name;
    ``None`` for the rest."""
    if isinstance(obj, torch.Tensor):
        return _tensor(obj)
    if isinstance(obj, torch.Size):
        return ("extension", "torch.Size", list(obj))
    if isinstance(obj, torch.dtype):
        return ("extension", "torch.dtype", str(obj).removeprefix("torch."))
    if isinstance(obj, torch.device):
        return ("extension", "torch.device", str(obj))
    return None


def _tensor(tensor: torch.Tensor) -> Description:
    if torch.nn.parameter.is_lazy(tensor):
        return (
            "refuse",
            "a parameter of a lazy module that has not seen any input yet; run one batch through the module first",
        )
    local = _local(tensor)
    if local is not None:
        return ("same", local)
    why = _why_no_parts(tensor)
    if why is not None:
        return ("refuse", why)
    parts = _parts(tensor)
    if parts is not None:
        return layouts.describe(parts)
    why = _why_not(tensor)
    if why is not None:
        return ("refuse", why)
    plain = tensor.detach()
    if plain.device.type == "cpu":
        plain = plain.resolve_conj().resolve_neg().clone()
        key = None
    else:
        # The key identifies tensors that leaves may share, so that they are stored once.
        key = f"{plain.device} {plain.data_ptr()} {plain.dtype} {tuple(plain.shape)} {plain.stride()}"
        plain = plain.cpu()
    return ("copied", as_numpy(plain), key if plain.numel() else None, "torch")


def _local(tensor: torch.Tensor) -> torch.Tensor | None:
    """The tensor of this process, of one that is distributed over this process alone."""
    mesh = getattr(tensor, "device_mesh", None)
    to_local = getattr(tensor, "to_local", None)
    if mesh is None or to_local is None or mesh.size() != 1:
        return None
    local: torch.Tensor = to_local()
    return local


def _why_no_parts(tensor: torch.Tensor) -> str | None:
    """Why nobody can say which part of a distributed tensor this process has."""
    placements = getattr(tensor, "placements", ())
    if any(one.is_partial() for one in placements if hasattr(one, "is_partial")):
        return f"a DTensor with the placements {placements} has no values before it is reduced; call redistribute() or full_tensor() first"
    return None


def _parts(tensor: torch.Tensor) -> layouts.Parts | None:
    """Returns this process's part of a distributed tensor: a ``DTensor``, or one that follows the
    protocol of ``CheckpointableTensor``."""
    mesh = getattr(tensor, "device_mesh", None)
    if mesh is not None and hasattr(tensor, "to_local"):
        shape, placements = tuple(tensor.shape), tuple(getattr(tensor, "placements", ()))
        with torch.no_grad():
            local = tensor.to_local()
        local = local.wait() if hasattr(local, "wait") else local
        pieces = _pieces(mesh, placements, shape, _is_over_all(mesh), True)
        if not _are_of(pieces, local):
            there = layouts.extent_of(pieces) if pieces else "empty"
            pieces = _pieces(mesh, placements, shape, _is_over_all(mesh), False)
            if not _are_of(pieces, local):
                raise UnsupportedLeaf(
                    f"a DTensor of shape {shape} with the placements {placements}: its local shape {tuple(local.shape)} is not {there}, as they say; "
                    "pass what this process has as sw.sharding.LocalShard"
                )

        def rebuild(made: Array) -> object:
            if made is local:
                return tensor
            from torch.distributed.tensor import DTensor

            assert isinstance(made, torch.Tensor)
            new = DTensor.from_local(
                made, mesh, placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
            )
            return (
                torch.nn.Parameter(new, tensor.requires_grad)
                if isinstance(tensor, torch.nn.Parameter)
                else new
            )

        return layouts.Parts(local, shape, pieces, rebuild)
    part: object = tensor
    if not _is_part(part):
        return None
    plain = tensor.detach()

    def remade(made: Array) -> object:
        if made is plain:
            return tensor
        if isinstance(tensor, torch.nn.Parameter):
            assert isinstance(made, torch.Tensor)
            made = torch.nn.Parameter(made, tensor.requires_grad)
        for name in _BOXES:
            setattr(made, name, getattr(tensor, name))
        return made

    return layouts.Parts(plain, tuple(part.global_shape), _boxes(part), remade)


def _boxes(tensor: _PartOfTensor) -> list[layouts.Piece]:
    """The parts of a whole tensor that one says it has."""
    found = []
    shape, local = tuple(tensor.global_shape), tuple(tensor.shape)
    rows = tensor.global_offsets, tensor.local_offsets, tensor.local_sizes
    if len({len(one) for one in rows}) > 1:
        raise UnsupportedLeaf(f"its global_offsets, local_offsets and local_sizes differ in length: {rows}")
    for first, place, sizes in zip(*map(list, rows), strict=True):
        at = tuple(place) or (0,) * len(sizes)
        for start, bounds in ((first, shape), (at, local)):
            if not len(start) == len(sizes) == len(bounds) or any(
                a < 0 or n < 0 or a + n > size for a, n, size in zip(start, sizes, bounds, strict=True)
            ):
                raise UnsupportedLeaf(
                    f"its part of shape {tuple(sizes)} at {tuple(start)} does not lie in the shape {bounds} "
                    f"({'of the whole tensor' if bounds is shape else 'of the tensor that holds it'})"
                )
        if 0 not in sizes:
            places = tuple(slice(a, a + n) for a, n in zip(at, sizes, strict=True))
            found.append(layouts.Piece(tuple(first), tuple(sizes), places))
    return found


def is_distributed(tensor: object) -> bool:
    """True for a ``DTensor``, on a mesh of one process too."""
    return getattr(tensor, "device_mesh", None) is not None and hasattr(tensor, "to_local")


def new_slot(
    parameter: torch.Tensor, shape: tuple[int, ...], dtype: torch.dtype, zeros: bool
) -> torch.Tensor:
    """New memory for a slot: with the parameter's device, mesh, placements and memory format.
    ``zeros``: all zeros, for a slot that is larger than the stored one."""
    with torch.no_grad():
        own = parameter.detach()
        if shape == tuple(own.shape):
            return torch.zeros_like(own, dtype=dtype) if zeros else torch.empty_like(own, dtype=dtype)
        # torch places a factored slot of a DTensor in the same way.
        return own.new_zeros(shape, dtype=dtype)


def why_not_loaded(obj: object) -> str | None:
    """The reason why an optimizer cannot take slots by itself: its parameters are distributed."""
    if not isinstance(obj, torch.optim.Optimizer):
        return None
    if not any(is_distributed(one) for group in obj.param_groups for one in group["params"]):
        return None
    return (
        f"the parameters of this {type(obj).__name__} are DTensors, and its load_state_dict() would make "
        "their slots whole plain tensors. Pass sw.torch.TrainState(model, optimizer), when you save too"
    )


def part_like(tensor: torch.Tensor, value: torch.Tensor, dtype: torch.dtype) -> object:
    """A ``DTensor`` that has of a whole tensor what another one has of its own."""
    parts = _parts(tensor.detach())
    assert parts is not None
    own = parts.local
    assert isinstance(own, torch.Tensor)
    local = torch.zeros(tuple(own.shape), dtype=dtype, device=own.device)
    for piece in parts.pieces:
        box = tuple(slice(first, first + n) for first, n in zip(piece.offset, piece.extent, strict=True))
        there = layouts.view(local, piece)
        assert isinstance(there, torch.Tensor)
        there.copy_(value[box])
    assert parts.rebuild is not None
    return parts.rebuild(local)


def _are_of(pieces: list[layouts.Piece], local: torch.Tensor) -> bool:
    """True if a local tensor has the shape that pieces give it."""
    return layouts.extent_of(pieces) == tuple(local.shape) if pieces else local.numel() == 0


def _is_over_all(mesh: DeviceMesh) -> bool:
    """True if a mesh is of all ranks of the job."""
    distributed = torch.distributed
    return bool(not distributed.is_initialized() or mesh.size() == distributed.get_world_size())


@lru_cache(maxsize=4096)
def _pieces(
    mesh: DeviceMesh, placements: tuple[object, ...], shape: tuple[int, ...], over_all: bool, in_order: bool
) -> list[layouts.Piece]:
    """The boxes that the placements give to this process, and which ranks have the same. A mesh
    that is not ``over_all`` ranks does not know of those that have the same on another such mesh (a
    norm under FSDP that tensor parallelism leaves alone, a TP weight under DDP): the ranks find out
    by themselves."""
    coordinate = mesh.get_coordinate()
    if coordinate is None:
        return []
    cuts: list[list[tuple[int, int, int]]] = [
        [] for _ in shape
    ]  # by dimension: ways, which of them, split factor
    same: list[int | slice] = []
    for number, (placement, at) in enumerate(zip(placements, coordinate, strict=True)):
        dim = getattr(placement, "dim", None)
        if dim is None:
            same.append(slice(None))
            continue
        cuts[dim].append((mesh.size(number), at, int(getattr(placement, "split_factor", 1))))
        same.append(at)
    ranks = sorted(mesh.mesh[tuple(same)].flatten().tolist())
    runs = [
        layouts.runs_of_chunks(n, _in_order(cut) if in_order else cut)
        for n, cut in zip(shape, cuts, strict=True)
    ]
    alike = ranks if len(ranks) > 1 else None
    return layouts.pieces_of_runs(runs, alike if over_all else "everyone")


def _in_order(cuts: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Sorts the cuts of a dimension by the order in which they were made, as torch derives it from
    strided shards. A cut with a split factor comes after the cuts to its right whose ways multiply
    to that factor: FSDP2 cuts what tensor parallelism has left. For even sizes, the strided cut is
    the same. For uneven sizes, this order is FSDP2's, and the strided cut is
    ``distribute_tensor``'s. Other cuts are returned unchanged."""
    order: list[tuple[int, int, int]] = []
    for ways, at, factor in reversed(cuts):
        before, product = 0, 1
        while product < factor and before < len(order):
            product *= order[before][0]
            before += 1
        if product != factor:
            return cuts
        order.insert(before, (ways, at, 1))
    return order


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    local = _local(tensor)
    return tensor if local is None else local


def _why_not(tensor: torch.Tensor) -> str | None:
    """Why a tensor cannot be stored; ``None`` where it can."""
    cls = type(tensor)
    if cls.__name__ == "ShardedTensor":  # which answers no question about itself
        return (
            "a ShardedTensor of FSDP1 cannot be stored; shard with fully_shard (FSDP2), or pass device_mesh= to "
            "FullyShardedDataParallel, so that its state has DTensors"
        )
    if tensor.is_meta:
        return "a meta tensor has no data; it belongs into like=, not into a state"
    if tensor.layout is not torch.strided:
        return (
            f"a tensor of layout {tensor.layout} cannot be stored; pass to_dense(), or its indices and values"
        )
    if tensor.is_quantized:
        return "a quantized tensor cannot be stored; pass int_repr(), q_scale() and q_zero_point()"
    if getattr(tensor, "is_nested", False):
        return "a nested tensor cannot be stored; pass a list of its tensors"
    if not _is_plain(cls):
        return (
            f"{cls.__module__}.{cls.__qualname__} is a subclass of torch.Tensor with a behaviour of its own and would not come back as what it is; "
            "pass the plain tensors that it is made of"
        )
    if dtype_name(tensor.dtype) is None:
        return (
            f"tensors of {tensor.dtype} cannot be stored; convert with .to() first, or store the bytes: "
            ".view(torch.uint8)"
        )
    return None


def _is_plain(cls: type) -> bool:
    """True if a subclass of Tensor is one in name only."""
    dispatch: object = getattr(cls, "__torch_dispatch__", None)
    usual: object = torch.Tensor.__torch_dispatch__
    return getattr(dispatch, "__func__", dispatch) is getattr(usual, "__func__", usual)


_KNOWN = frozenset(_core.dtype_names())


def dtype_name(dtype: torch.dtype) -> str | None:
    """Returns the format's name of a torch dtype; ``None`` if it has no name."""
    name = str(dtype).removeprefix("torch.")
    return name if name in _KNOWN and dtype not in _SUB_BYTE else None


def torch_dtype(dtype: np.dtype) -> torch.dtype | None:
    """Returns torch's dtype; ``None`` if torch has no such dtype."""
    found = getattr(torch, dtype.name, None)
    return found if isinstance(found, torch.dtype) else None


#: Dtypes that numpy does not know by itself: they pass as integers of their size.
_CARRIER = {1: (torch.uint8, np.uint8), 2: (torch.int16, np.int16), 4: (torch.int32, np.int32)}


def as_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The memory of a tensor on the host, as an array; raises where it cannot be one."""
    plain = tensor.detach()
    dtype = to_dtype(str(plain.dtype).removeprefix("torch."))
    if dtype.kind == "V" or dtype.type.__module__ != "numpy":
        plain = plain.view(_CARRIER[dtype.itemsize][0])
        return plain.numpy().view(dtype)
    return plain.numpy()


def on_host(tensor: object) -> np.ndarray | None:
    """The values of a tensor, in host memory; ``None`` if it is none."""
    return as_numpy(tensor.detach().cpu()) if isinstance(tensor, torch.Tensor) else None


def from_numpy(array: np.ndarray) -> Array:
    """A tensor over the memory of an array; the array itself where torch has no such dtype."""
    dtype = torch_dtype(array.dtype)
    if dtype is None:
        return array
    if array.size == 0:
        # The strides of an empty numpy array are 0, which `view(dtype)` refuses.
        return torch.empty(array.shape, dtype=dtype)
    if array.dtype.kind == "V" or array.dtype.type.__module__ != "numpy":
        carrier = _CARRIER[array.dtype.itemsize][1]
        return torch.from_numpy(array.view(carrier)).view(dtype)
    return torch.from_numpy(array)


def _made(value: Read) -> Array:
    """Converts a value that was read: a tensor that was filled on its device, or an array."""
    if isinstance(value, torch.Tensor):
        return value
    assert isinstance(value, np.ndarray)
    return from_numpy(value)


def check_device(device: Device) -> None:
    """Raises a ``ValueError`` where no tensor with values can be on a device."""
    try:
        is_meta = torch.empty(0, device=device).is_meta
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as failure:
        why = str(failure).partition("\n")[0]
        raise ValueError(f'{why}. Pass "cpu", or a torch.device of this machine') from failure
    if is_meta:
        raise ValueError('a meta tensor has no memory. Pass "cpu", or a torch.device of this machine')


def empty_on(placement: Device) -> Callable[[tuple[int, ...], np.dtype], torch.Tensor | None] | None:
    """Returns a function that makes tensors on a CUDA device for the engine to fill."""
    if placement is None or torch.device(placement).type != "cuda" or _core.cuda()[1] is not None:
        return None

    def empty(shape: tuple[int, ...], dtype: np.dtype) -> torch.Tensor | None:
        known = torch_dtype(dtype)
        return None if known is None else torch.empty(shape, dtype=known, device=placement)

    return empty


def arrays(values: Sequence[Array], placement: Device = None) -> list[Array]:
    """Arrays as tensors, on the device ``placement`` (default: the host)."""
    made: list[Array] = [_made(value) for value in values]
    if placement is None:
        return made
    return [one.to(placement) if isinstance(one, torch.Tensor) else one for one in made]


def target(obj: object) -> Target | None:
    """Returns the target of a tensor: filled in place, or made on its device. Meta tensors and the
    class ``torch.Tensor`` are abstract targets."""
    if obj is torch.Tensor:
        return Target(ArraySpec(), _finish)
    if not isinstance(obj, torch.Tensor):
        return None
    why = _why_no_parts(obj)
    parts = None if why is not None or _local(obj) is not None else _parts(obj)
    if parts is not None:
        return layouts.target(parts)
    tensor = _plain(obj)
    name = dtype_name(tensor.dtype)
    if why is not None or name is None or (why := None if tensor.is_meta else _why_not(tensor)) is not None:
        raise UnsupportedLeaf(
            f"cannot be restored into: {why if name else f'tensors of {tensor.dtype} are not stored'}"
        )
    spec = ArraySpec(tuple(tensor.shape), name)
    if tensor.is_meta:
        return Target(spec, _finish, obj, placement=None)
    memory: np.ndarray | OnDevice | None = None
    if not tensor.is_conj() and not tensor.is_neg():
        if tensor.device.type == "cpu":
            memory = as_numpy(tensor)
        elif tensor.is_cuda:
            plain, dtype = tensor.detach(), to_dtype(name)
            memory = OnDevice(plain, dtype, tuple(one * dtype.itemsize for one in plain.stride()))
    empty = empty_on(tensor.device) if tensor.is_cuda else None
    return Target(spec, _finish, obj, memory, empty, has_value=True, placement=tensor.device)


def _finish(found: list[tuple[Target, Read]], fill: bool) -> list[object]:
    results: list[object] = []
    for one, value in found:
        own = one.value
        if fill and one.has_value and isinstance(own, torch.Tensor):
            if value is not one.memory:
                with torch.no_grad():
                    made = _made(value)
                    assert isinstance(made, torch.Tensor)
                    _plain(own).copy_(made)
            results.append(own)
            continue
        made = _made(value)
        if isinstance(one.placement, torch.device) and isinstance(made, torch.Tensor):
            made = made.to(one.placement)
        if isinstance(own, torch.nn.Parameter) and isinstance(made, torch.Tensor):
            made = torch.nn.Parameter(made, requires_grad=own.requires_grad)
        results.append(made)
    return results


_OWN = (
    torch.nn.Module,
    torch.optim.Optimizer,
    torch.optim.lr_scheduler.LRScheduler,
    torch.optim.lr_scheduler.ReduceLROnPlateau,
    torch.amp.GradScaler,
    torch.Generator,
)


def owns(obj: object) -> bool:
    """True if an object takes tensors when it is loaded."""
    return isinstance(obj, _OWN) or getattr(type(obj), "_takes_tensors", False)


def branch(obj: object) -> Opened | None:
    """A module whose tensors can be filled where they are: one whose ``load_state_dict`` would do
    nothing but copy. A :class:`stepwell.torch.TrainState`."""
    open_state = getattr(type(obj), "_stepwell_open", None)
    if open_state is not None:
        opened: Opened = open_state(obj)
        return opened
    if not isinstance(obj, torch.nn.Module) or not only_copies(obj):
        return None
    state = tensors_of(obj)
    children: Children = [(("k", str(name)), value) for name, value in state.items()]

    def close(pairs: list[tuple[str | int, object]], fill: bool) -> object:
        if fill:
            return obj
        return type(state)((str(name), value) for name, value in pairs)

    return Opened(children, close, unfillable(state))


def tensors_of(module: torch.nn.Module) -> dict[str, object]:
    """The state of a module. A parameter that says which part of a tensor it is
    (``CheckpointableTensor``) is there itself: detached, it would not say it."""
    if not any(hasattr(one, _BOXES[0]) for one in module.parameters()):
        return module.state_dict()
    state = module.state_dict(keep_vars=True)
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and not hasattr(value, _BOXES[0]):
            state[name] = value.detach()
    return state


def reshard(module: torch.nn.Module) -> None:
    """Has FSDP2 put away what it has gathered for a forward pass that no backward pass followed:
    the parameters are those of the optimizer then."""
    fsdp = sys.modules.get("torch.distributed.fsdp")
    sharded = getattr(fsdp, "FSDPModule", ())
    for one in module.modules():
        if isinstance(one, sharded):
            one.reshard()


def unfillable(tensors: Mapping[str, object]) -> str | None:
    """Why these tensors of a module cannot be filled. Another tensor in their place would be none
    of the module's, and the optimizer would not know it."""
    meta = [name for name, tensor in tensors.items() if isinstance(tensor, torch.Tensor) and tensor.is_meta]
    if not meta:
        return None
    return (
        f"`{meta[0]}` is a meta tensor (as {len(meta)} of {len(tensors)} are) and has no memory that could be filled; "
        'call to_empty(device="cpu") on the module before, or pass it as like=, which gives new tensors'
    )


def _only_shards(hook: object) -> bool:
    """True if a hook of a module is one of FSDP2's, which see to it that parameters are sharded,
    and follow one that was replaced: both are so where they are filled in place."""
    own = getattr(hook, "hook", hook)
    return str(getattr(own, "__module__", "")).startswith("torch.distributed.fsdp._fully_shard")


def only_copies(module: torch.nn.Module) -> bool:
    """True if loading a state into a module only copies its tensors: no hooks, only
    tensors, no custom loader."""
    for one in module.modules():
        cls = type(one)
        hooks = (
            one._state_dict_hooks,
            one._state_dict_pre_hooks,
            one._load_state_dict_pre_hooks,
            one._load_state_dict_post_hooks,
        )
        if not all(_only_shards(hook) for some in hooks for hook in some.values()):
            return False
        own = (cls.state_dict, cls.load_state_dict, cls._save_to_state_dict, cls._load_from_state_dict)
        if not all(str(method.__module__).startswith("torch.nn.modules") for method in own):
            return False
        if cls.get_extra_state is not torch.nn.Module.get_extra_state:
            return False
    return True


def revive(name: str, parts: object) -> object:
    """The other way of the plain values."""
    if name == "torch.Size" and isinstance(parts, list):
        return torch.Size(parts)
    if name == "torch.device" and isinstance(parts, str):
        return torch.device(parts)
    if name == "torch.dtype" and isinstance(parts, str):
        found = getattr(torch, parts, None)
        if isinstance(found, torch.dtype):
            return found
    from . import StoredExtension

    return StoredExtension(name, parts)
