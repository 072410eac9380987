"""The JAX adapter: arrays in and out, their shardings, and registered pytrees. Imported only if jax
is.

An array is never changed, so one in host memory is captured after a save has returned: it is held
by an export of its buffer, under which a donating call leaves it as it is. (A bare pointer would
see the values of the next step.) On a CUDA device a donating call of a held array fails instead, so
arrays on devices are copied before a save returns. An array over several devices of this process is
stored shard by shard, each byte once. A registered pytree node is taken apart as JAX does it; what
it does not hand out (static fields), and functions, come from the target.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import TYPE_CHECKING, Any, TypeAlias, TypeGuard, cast

import jax
import numpy as np

from .. import _core
from .._paths import extend, starts_with
from .._state.specs import AS_STORED, ArraySpec
from .._types import Array, Read
from ..errors import DonatedBuffer, MismatchError, MisuseError
from . import Box, Children, DoesNotFit, Opened, Target

if TYPE_CHECKING:
    from .._state.leaves import Description

#: The place of an array: a device, the devices of a sharding, or ``None`` for the default device.
Place: TypeAlias = "jax.sharding.Sharding | jax.Device | None"
#: An array, or an abstract one.
_Described: TypeAlias = jax.Array | jax.ShapeDtypeStruct

#: An array never changes, and on the CPU it is made without a copy.
TAKES_OVER = True

#: The stored name of a typed PRNG key.
KEY = "jax.random.key"


def _capsule() -> Callable[[jax.Array], object]:
    """Array → DLPack capsule. The method does the same, and takes ten times as long to find out
    how."""
    with contextlib.suppress(ImportError, AttributeError):
        from jax._src.lib import _jax  # type: ignore[attr-defined]

        found: Callable[[object], object] = _jax.buffer_to_dlpack_managed_tensor
        return found
    return lambda array: array.__dlpack__()


with contextlib.suppress(ImportError):
    # Asking an array for its class would make one, and with it start the backend.
    from jax._src.array import ArrayImpl

    # The buffer of an array over several devices would be that of its first shard.
    _core.array_type(
        ArrayImpl,
        "jax",
        True,
        _capsule(),
        True,
        ("sharding", jax.sharding.SingleDeviceSharding),
    )


def _is_key(array: _Described) -> bool:
    """True if an array, or an abstract one, is of typed PRNG keys."""
    return bool(jax.numpy.issubdtype(array.dtype, jax.dtypes.prng_key))


def describe(obj: object) -> Description | None:
    """Arrays that the engine cannot take as they are, and registered pytree nodes; ``None`` for the
    rest."""
    if isinstance(obj, jax.core.Tracer):
        return (
            "refuse",
            "a tracer is no array yet: save outside of jit, grad and the like, what they return",
        )
    if isinstance(obj, jax.Array):
        return _array(obj)
    if isinstance(obj, jax.ShapeDtypeStruct):
        return ("refuse", "a ShapeDtypeStruct has no data; it belongs into like=, not into a state")
    opened = _open(obj)
    if opened is None:
        return None
    keys, children, _ = opened
    return ("custom", _node_name(obj), list(zip(keys, children, strict=True)))


def _array(array: jax.Array) -> Description:
    if array.is_deleted():
        raise DonatedBuffer(
            "this array was donated to a computation (donate_argnums) or deleted before the save: its memory has other values by now. "
            "Save the arrays that the computation returned, or save before it is called"
        )
    if _is_key(array):
        return (
            "custom",
            KEY,
            [("impl", str(jax.random.key_impl(array))), ("data", jax.random.key_data(array))],
        )
    # The first replica of each shard: every byte once. Of an array over several processes: one of
    # each that this process has, with those who have it too.
    several = not array.is_fully_addressable
    shards = (
        _one_of_each(array) if several else [one for one in array.addressable_shards if one.replica_id == 0]
    )
    holders = _holders(array.sharding, array.shape, jax.process_count())
    name = array.dtype.name
    # Arrays that cannot be held are copied: arrays on a device, and packed elements (int4) without
    # shareable memory.
    held = bool(shards) and _can_be_held(shards[0].data)
    if held or several or len(shards) > 1:
        parts: list[object] = []
        for shard in shards:
            box = _box(shard.index, array.shape)
            parts.append((box[0], shard.data if held else np.asarray(shard.data), True, holders[box]))
        return ("sharded", name, list(array.shape), parts, "jax")
    return ("copied", np.asarray(array), None, "jax")


def _one_of_each(array: jax.Array) -> list[jax.Shard]:
    """The shards on devices of this process, those of one box once."""
    found: dict[Box, jax.Shard] = {}
    for shard in array.addressable_shards:
        box = _box(shard.index, array.shape)
        if 0 not in box[1]:
            found.setdefault(box, shard)
    return list(found.values())


@lru_cache(maxsize=4096)
def _holders(
    sharding: jax.sharding.Sharding, shape: tuple[int, ...], count: int
) -> dict[Box, list[int] | str]:
    """Which of so many processes have each box of an array. A sharding that is not over all of them
    does not know of those that have the same on devices of their own: they find out by
    themselves."""
    found: dict[Box, set[int]] = {}
    for device, index in sharding.devices_indices_map(shape).items():
        found.setdefault(_box(index, shape), set()).add(_process_of(device))
    over_all = len(set().union(*found.values())) == count
    return {box: sorted(processes) if over_all else "everyone" for box, processes in found.items()}


def _process_of(device: jax.Device) -> int:
    return int(device.process_index)


def _can_be_held(array: jax.Array) -> bool:
    if any(device.platform != "cpu" for device in array.devices()):
        return False
    try:
        memoryview(array)
    except (BufferError, TypeError):
        try:
            array.__dlpack__()
        except Exception:
            return False
    return True


def _box(index: Sequence[slice] | None, shape: tuple[int, ...]) -> Box:
    assert index is not None
    ranges = [one.indices(n) for one, n in zip(index, shape, strict=True)]
    return tuple(start for start, _, _ in ranges), tuple(max(0, stop - start) for start, stop, _ in ranges)


# ---- registered pytree nodes
# ---------------------------------------------------------------------------------------


def _open(obj: object) -> tuple[list[str | int], list[object], Callable[[list[object]], object]] | None:
    """Keys and children of a pytree node of somebody else's, without those that are functions, and
    what puts it together around other children; ``None`` where it is none. Named tuples are taken
    apart by their fields, as everywhere."""
    if isinstance(obj, (dict, list, tuple, type)) or obj is None:
        return None
    try:
        found, structure = jax.tree_util.tree_flatten_with_path(obj, is_leaf=lambda one: one is not obj)
    except Exception:
        return None
    if len(found) == 1 and found[0][1] is obj:
        return None
    entries = [(_key(path[0]) if path else "", child) for path, child in found]
    stored = [number for number, (_, child) in enumerate(entries) if not _is_function(child)]
    children = [child for _, child in entries]

    def close(values: list[object]) -> object:
        for number, value in zip(stored, values, strict=True):
            children[number] = value
        return jax.tree_util.tree_unflatten(structure, children)

    return [entries[n][0] for n in stored], [entries[n][1] for n in stored], close


def _is_function(obj: object) -> bool:
    return callable(obj) and not isinstance(obj, (jax.Array, type)) and jax.tree_util.all_leaves([obj])


def _key(entry: object) -> str | int:
    """Returns the name of a pytree key: a field's name, a dict's key, a sequence's index."""
    for name in ("name", "key", "idx"):
        found = getattr(entry, name, None)
        if isinstance(found, (str, int)):
            return found
    return str(entry)


def _node_name(obj: object) -> str:
    return f"{type(obj).__module__}.{type(obj).__qualname__}"


def branch(obj: object) -> Opened | None:
    """A registered pytree node, or a typed PRNG key."""
    if isinstance(obj, jax.Array) and _is_key(obj):
        return _key_branch(str(jax.random.key_impl(obj)), jax.random.key_data(obj), obj)
    if isinstance(obj, jax.ShapeDtypeStruct) and _is_key(obj):
        return _key_branch(AS_STORED, AS_STORED, obj)
    if isinstance(obj, (jax.Array, jax.ShapeDtypeStruct)):
        return None
    opened = _open(obj)
    if opened is None:
        return None
    keys, children, close = opened
    parts: Children = [
        (("i", key) if type(key) is int else ("k", key), child)
        for key, child in zip(keys, children, strict=True)
    ]
    return Opened(
        parts, lambda pairs, _fill: close([value for _, value in pairs]), unfillable=_why_unfillable(obj)
    )


def _why_unfillable(obj: object) -> str | None:
    """Why an object cannot be filled, where somebody would go on with it: those of Flax NNX change
    in place, by functions of Flax alone."""
    nnx = sys.modules.get("flax.nnx")
    classes = tuple(filter(None, (getattr(nnx, name, None) for name in ("Module", "Pytree", "Optimizer"))))
    if not isinstance(obj, classes):
        return None
    name = type(obj).__name__
    return (
        f"{name} is an object of Flax NNX, and a new one would be returned while this one stays as it is; save nnx.state(…) of it, restore into "
        f"nnx.state(…), and hand what is returned to nnx.update(…). Where the {name} itself is stored, pass it as like=, which gives a new one"
    )


def _key_branch(impl: object, data: object, wanted: _Described) -> Opened:
    # An abstract key has its implementation in its dtype alone.
    own = impl if isinstance(impl, str) else getattr(getattr(wanted.dtype, "_impl", None), "name", None)

    def check(stored: object) -> str | None:
        if own is None or stored == own:
            return None
        return (
            f"stored is a PRNG key of the implementation {stored!r}, wanted is one of {own!r}, and no key of one is one of the other; "
            f"make the target with jax.random.key(seed, impl={stored!r})"
        )

    def close(pairs: list[tuple[str | int, object]], _fill: bool) -> object:
        parts = dict(pairs)
        why = check(str(parts["impl"]))
        # An array of keys. jax declares no type of their dtype.
        key: Any = None if why else remake(KEY, parts)
        if why or (key.dtype, key.shape) != (wanted.dtype, wanted.shape):
            raise MismatchError(
                why
                or f"stored is a PRNG key {key.dtype}{list(key.shape)}, wanted is {wanted.dtype}{list(wanted.shape)}"
            )
        place = _place_of(wanted)
        if place is None or key.sharding == place:
            return key
        if _is_elsewhere(place):
            # `device_put` would compare the values of all processes, and knows none of keys.
            return jax.make_array_from_callback(key.shape, place, lambda index: key[index])
        return jax.device_put(key, place)

    return Opened([(("k", "impl"), impl), (("k", "data"), data)], close, first=(("k", "impl"), check))

    # ---- restoring ----


def target(obj: object) -> Target | None:
    """Arrays and ``jax.ShapeDtypeStruct``; the class ``jax.Array`` itself."""
    if obj is jax.Array:
        return _wants(ArraySpec())
    if isinstance(obj, (jax.Array, jax.ShapeDtypeStruct)) and _is_key(obj):
        return None  # two leaves: see `branch`
    if isinstance(obj, jax.Array):
        # One that was donated still says where it was.
        there = not obj.is_deleted()
        one = _wants(ArraySpec(obj.shape, obj.dtype.name), obj if there else None, has_value=there)
        return placed(one, _place_of(obj))
    if isinstance(obj, jax.ShapeDtypeStruct):
        return placed(_wants(ArraySpec(obj.shape, obj.dtype.name), obj), obj.sharding)
    return None


def _wants(spec: ArraySpec, value: object = None, has_value: bool = False) -> Target:
    return Target(spec, _finish, value, has_value=has_value, takes_over=TAKES_OVER, replace=placed)


def _place_of(wanted: _Described) -> Place:
    """Returns the place of an array, concrete or abstract; ``None`` for the default place."""
    if isinstance(wanted, jax.ShapeDtypeStruct):
        return wanted.sharding
    committed = getattr(wanted, "committed", getattr(wanted, "_committed", True))
    return wanted.sharding if committed else None


def placed(one: Target, sharding: object) -> Target:
    """Wants the array there: on a device, or over the devices of a sharding. ``None``: on the
    default device."""
    one.placement, one.boxes = sharding, None
    shape = one.spec.shape
    check_fits(sharding, shape)
    if not isinstance(sharding, jax.sharding.Sharding) or shape is None:
        return one
    if len(sharding.device_set) == 1 and sharding.is_fully_addressable:
        return one
    boxes = {_box(index, shape): None for index in sharding.addressable_devices_indices_map(shape).values()}
    if len(boxes) > 1 or not sharding.is_fully_addressable:
        one.boxes = list(boxes)
    return one


_ABSTRACT: type | tuple[()] = getattr(jax.sharding, "AbstractMesh", ())


def check_device(device: object) -> None:
    """Raises a ``ValueError`` where no array can be on a device."""
    if device is not None and not isinstance(device, (jax.Device, jax.sharding.Sharding)):
        raise ValueError("it is no device of jax. Pass one of jax.devices()")


def check_fits(sharding: object, shape: tuple[int, ...] | None) -> None:
    """Raises a ``ValueError`` where no array of that shape can be there."""
    if not isinstance(sharding, jax.sharding.Sharding):
        return
    if isinstance(getattr(sharding, "mesh", None), _ABSTRACT):
        raise ValueError(
            "a sharding over an AbstractMesh has no devices where an array could be; pass one over a Mesh"
        )
    if shape is not None:
        sharding.shard_shape(shape)


def _finish(found: list[tuple[Target, Read]], _fill: bool) -> list[object]:
    results: list[object] = [None] * len(found)
    whole = [number for number, (one, _) in enumerate(found) if one.boxes is None]
    for number in whole:
        one, value = found[number]
        assert isinstance(value, np.ndarray)
        try:
            check_fits(one.placement, value.shape if one.spec.shape is None else None)
        except ValueError as failure:
            raise DoesNotFit(number, f"its sharding does not fit it: {failure}") from failure
    try:
        made = arrays(
            [cast(np.ndarray, found[number][1]) for number in whole],
            [cast(Place, found[number][0].placement) for number in whole],
        )
    except DoesNotFit as failure:
        raise DoesNotFit(whole[failure.number], str(failure)) from None
    for number, array in zip(whole, made, strict=True):
        results[number] = array
    for number, (one, values) in enumerate(found):
        if one.boxes is not None:
            results[number] = _assembled(one, values)
    return results


def _assembled(one: Target, values: Read) -> jax.Array:
    """The array whose shards these are."""
    shape, sharding, boxes = one.spec.shape, one.placement, one.boxes
    assert shape is not None
    assert boxes is not None
    assert isinstance(sharding, jax.sharding.Sharding)
    value_of = dict(zip(boxes, values if isinstance(values, list) else [values], strict=True))
    places = sharding.addressable_devices_indices_map(shape)
    kind = sharding.memory_kind
    at = [jax.sharding.SingleDeviceSharding(device, memory_kind=kind) for device in places]
    shards = jax.device_put([value_of[_box(index, shape)] for index in places.values()], at)
    if not shards and one.spec.dtype is not None:
        # None of its devices is of this process, and no shard says its dtype.
        dtype = jax.dtypes.canonicalize_dtype(one.spec.dtype)
        return jax.make_array_from_single_device_arrays(shape, sharding, shards, dtype=dtype)
    return jax.make_array_from_single_device_arrays(shape, sharding, shards)


def _is_elsewhere(place: object) -> TypeGuard[jax.sharding.Sharding]:
    """True if a place has devices of other processes."""
    return isinstance(place, jax.sharding.Sharding) and not place.is_fully_addressable


def arrays(values: Sequence[np.ndarray], placement: Place | list[Place] = None) -> list[Array]:
    """Converts to JAX arrays in one transfer: on the default device, or at ``placement`` (one for
    all, or a list). On the CPU they take over the memory, which must be theirs alone. Dtypes that
    JAX lacks (dates) stay as they are. 64-bit values become 32-bit ones if JAX is limited to these
    and they fit."""
    at = placement if isinstance(placement, list) else [placement] * len(values)
    results: list[Array] = list(values)
    # Dtype → that of JAX, where it has one. Asked once for each dtype, since there may be many
    # thousand arrays.
    dtypes = {value.dtype for value in values}
    becomes: dict[np.dtype, np.dtype] = {
        dtype: jax.dtypes.canonicalize_dtype(dtype) for dtype in dtypes if dtype.kind not in "mMO"
    }
    fits = [number for number, value in enumerate(values) if value.dtype in becomes]
    for number in fits:
        dtype = becomes[values[number].dtype]
        if dtype != values[number].dtype:
            _check_narrowed(number, values[number], dtype)
    fits = _put_quickly(values, at, results, fits, becomes)
    for number in fits:
        place = at[number]
        if not _is_elsewhere(place):
            continue
        # Each process takes its part of what it has. `device_put` would be a call of all of them,
        # which compares their values: one that has failed before is waited for, and no NaN is
        # equal.
        value = values[number].astype(becomes[values[number].dtype], copy=False)
        results[number] = jax.make_array_from_callback(
            value.shape, place, value.__getitem__, dtype=value.dtype
        )
    fits = [number for number in fits if not _is_elsewhere(at[number])]
    default = [number for number in fits if at[number] is None]
    elsewhere = [number for number in fits if at[number] is not None]
    for numbers, made in (
        (default, jax.device_put([values[number] for number in default])),
        (
            elsewhere,
            jax.device_put([values[number] for number in elsewhere], [at[number] for number in elsewhere]),
        ),
    ):
        for number, array in zip(numbers, made, strict=True):
            results[number] = array
    return results


def _check_narrowed(number: int, value: np.ndarray, dtype: np.dtype) -> None:
    """Raises where JAX, with 64 bits switched off, would make other numbers of these. No copy is
    made of an array that fits."""
    if value.dtype.itemsize < 8 or value.size == 0 or value.dtype.kind not in "iufc":
        return
    for part in (value.real, value.imag) if value.dtype.kind == "c" else (value,):
        if part.dtype.kind in "iu":
            least, greatest = int(np.iinfo(dtype).min), int(np.iinfo(dtype).max)
            ends = [int(part.min()), int(part.max())]
            wrong = [one for one in ends if not least <= one <= greatest]
        else:
            with np.errstate(over="ignore", invalid="ignore"):
                found = [np.fmin.reduce(part, axis=None), np.fmax.reduce(part, axis=None)]
                narrow = np.float32
                if not all(map(np.isfinite, found)) or any(np.isinf(narrow(one)) for one in found):
                    found = list(part[np.isfinite(part) & np.isinf(part.astype(narrow))])
                wrong = [one for one in found if np.isfinite(one) and np.isinf(narrow(one))]
        if wrong:
            raise DoesNotFit(
                number,
                f"{wrong[0]} does not fit {dtype}, which is what JAX makes of {value.dtype}; "
                'switch jax_enable_x64 on, or restore it as an array of numpy (to="numpy")',
            )


def _put_quickly(
    values: Sequence[np.ndarray],
    at: list[Place],
    results: list[Array],
    numbers: list[int],
    becomes: dict[np.dtype, np.dtype],
) -> list[int]:
    """Does what ``jax.device_put`` does, by the call that it ends in, for arrays that go to one
    device as they are: that takes 5 µs for each, and ``device_put`` 35. Gives the numbers of those
    that are left: all of them where this version of JAX has no such call."""
    try:
        from jax._src.lib import xla_client  # type: ignore[attr-defined]

        put = xla_client.batched_device_put
    except (ImportError, AttributeError):
        return numbers
    default = jax.config.jax_default_device  # type: ignore[attr-defined]
    if default is not None and not isinstance(default, jax.Device):
        return numbers
    # By identity: a sharding takes longer to compare than to look at.
    place_of: dict[int, tuple[object, object]] = {}
    known: dict[object, object] = {}
    as_they_are = {dtype for dtype, there in becomes.items() if there == dtype and dtype.isnative}
    left: list[int] = []
    for number in numbers:
        value, where = values[number], at[number]
        place = place_of.get(id(where))
        if place is None:
            place = place_of[id(where)] = _one_device(where, default)
        sharding, device = place
        dtype, shape = value.dtype, value.shape
        if device is None or dtype not in as_they_are or not value.flags.c_contiguous:
            left.append(number)
            continue
        kind = known.get((dtype, shape))
        if kind is None:
            kind = known[dtype, shape] = jax.core.ShapedArray(shape, dtype)
        results[number] = put(kind, sharding, [value], [device], where is not None)
    return left


def _one_device(where: object, default: object) -> tuple[object, object]:
    """The sharding and the device of a place that is one device; no device where it is more."""
    if where is None:
        where = default or jax.local_devices()[0]
    if isinstance(where, jax.Device):
        return jax.sharding.SingleDeviceSharding(where), where
    if isinstance(where, jax.sharding.SingleDeviceSharding) and where.is_fully_addressable:
        return where, next(iter(where.device_set))
    return None, None


class _Tree:
    """A tree of shardings, by rendered path: one stands for all that is below it."""

    def __init__(self, places: dict[str, object]) -> None:
        self._places = places
        #: The paths that it names.
        self.paths = list(places)

    def __call__(self, path: str, spec: ArraySpec) -> Place:
        matching = [one for one in self._places if starts_with(path, one)]
        return self._places[max(matching, key=len)] if matching else None


def placements(shardings: object) -> Callable[[str, ArraySpec], object]:
    """Returns the function that ``shardings=`` defines: from a leaf path and spec to a sharding or
    device. It may be one for all, a function, or a tree in which one entry covers everything below
    it."""
    if shardings is None:
        return lambda path, spec: None
    if isinstance(shardings, (jax.sharding.Sharding, jax.Device)):
        return lambda path, spec: shardings
    if callable(shardings):
        asked: Callable[[str, ArraySpec], object] = shardings
        return asked
    there: dict[str, object] = {}

    def is_place(one: object) -> bool:
        return isinstance(one, (jax.sharding.Sharding, jax.Device))

    for keys, one in jax.tree_util.tree_flatten_with_path(shardings, is_leaf=is_place)[0]:
        if not is_place(one):
            raise MisuseError(f"shardings= holds shardings and devices of jax, not {type(one).__qualname__}")
        path = ""
        for entry in keys:
            key = _key(entry)
            path = extend(path, ("i", key) if type(key) is int else ("k", key))
        there[path] = one
    return _Tree(there)


def remake(name: str, children: dict[str | int, object]) -> object:
    """A typed PRNG key; other nodes come back as dicts, since a file names no class that would be
    imported."""
    if name == KEY and set(children) == {"impl", "data"}:
        data = children["data"]
        if not isinstance(data, jax.Array):
            data = jax.numpy.asarray(np.asarray(data))
        # Keys are where their data is.
        return jax.random.wrap_key_data(data, impl=str(children["impl"]))
    return children
