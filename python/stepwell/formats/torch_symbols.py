"""Symbols of torch in pickles: storages, and tensors as views of them.

Tensors that view the same elements in the same way are ties. Other tensors may overlap. Gradients'
flags, hooks, Python attributes and subclasses of tensors are left out.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from .._state.specs import to_dtype
from . import dtensor_symbols
from .description import MAX_SIZE, Chunk, Place, Tensor, Value, fits, row_major
from .numpy_symbols import MAX_DIMS
from .pickle_values import Found, Made, Malformed, Symbol, name_of, opaque, plain
from .pickled import Name
from .python_symbols import integer, text

#: Dtypes of torch, and their names here.
DTYPES: Mapping[str, str] = {
    **{
        name: name
        for name in (
            "bool",
            "uint8",
            "uint16",
            "uint32",
            "uint64",
            "int8",
            "int16",
            "int32",
            "int64",
            "float16",
            "bfloat16",
            "float32",
            "float64",
            "complex32",
            "complex64",
            "complex128",
            "float8_e4m3fn",
            "float8_e4m3fnuz",
            "float8_e5m2",
            "float8_e5m2fnuz",
            "float8_e8m0fnu",
        )
    },
    "half": "float16",
    "float": "float32",
    "double": "float64",
    "short": "int16",
    "int": "int32",
    "long": "int64",
}

#: Dtypes that are listed only.
_OTHER_DTYPES = [
    "bcomplex32",
    "bits16",
    "bits1x8",
    "bits2x4",
    "bits4x2",
    "bits8",
    "float4_e2m1fn_x2",
    "int1",
    "int2",
    "int3",
    "int4",
    "int5",
    "int6",
    "int7",
    "qint32",
    "qint8",
    "quint2x4",
    "quint4x2",
    "quint8",
    "uint1",
    "uint2",
    "uint3",
    "uint4",
    "uint5",
    "uint6",
    "uint7",
]
_LAYOUTS = [
    "strided",
    "sparse_coo",
    "sparse_csr",
    "sparse_csc",
    "sparse_bsr",
    "sparse_bsc",
    "jagged",
    "_mkldnn",
]
_OTHER_NAMES = [
    "per_tensor_affine",
    "per_channel_affine",
    "per_tensor_symmetric",
    "per_channel_symmetric",
    "per_channel_affine_float_qparams",
    "contiguous_format",
    "channels_last",
    "channels_last_3d",
    "preserve_format",
]

_STORAGES: Mapping[str, str] = {
    "FloatStorage": "float32",
    "DoubleStorage": "float64",
    "HalfStorage": "float16",
    "BFloat16Storage": "bfloat16",
    "LongStorage": "int64",
    "IntStorage": "int32",
    "ShortStorage": "int16",
    "CharStorage": "int8",
    "ByteStorage": "uint8",
    "BoolStorage": "bool",
    "ComplexFloatStorage": "complex64",
    "ComplexDoubleStorage": "complex128",
}
#: Bytes of an element of a storage that is listed only.
_OTHER_STORAGES: Mapping[str, int] = {
    "QInt8Storage": 1,
    "QUInt8Storage": 1,
    "QUInt4x2Storage": 1,
    "QUInt2x4Storage": 1,
    "QInt32Storage": 4,
}
#: A tensor that repeats its elements is listed only if it is longer than that, in bytes, and than
#: so many times its stored bytes.
_MAX_REPEATED_BYTES, _MAX_REPEATS = 1 << 30, 4096

Negated = Literal["", "all", "imaginary"]


@dataclass(frozen=True, slots=True)
class Storage:
    """A storage: bytes in a file, and the type of its elements."""

    #: Identifies it in the file.
    key: str
    #: Its first byte. ``None`` if the file has its bytes in another form.
    place: Place | None
    nbytes: int
    #: ``None`` for bytes of any type.
    dtype: str | None
    big_endian: bool = False


@dataclass(frozen=True, slots=True)
class StorageId:
    """A persistent id of a storage."""

    key: str
    #: ``None`` for bytes of any type.
    dtype: str | None
    #: Bytes of an element.
    itemsize: int
    #: Its elements.
    numel: int
    #: The key of a view, its first element, and its elements.
    view: tuple[str, int, int] | None = None

    @property
    def nbytes(self) -> int:
        """Its bytes."""
        return self.numel * self.itemsize


def storage_id(value: object) -> StorageId | str:
    """Reads the persistent id of a storage. Returns text for a storage that is listed only."""
    if type(value) is not tuple or len(value) not in (5, 6) or value[0] != "storage":
        raise Malformed("the persistent id of a storage was expected")
    _, class_, key, _, numel, *rest = value
    if type(key) is int:
        key = str(key)
    if not isinstance(class_, Name) or type(key) is not str or type(numel) is not int or numel < 0:
        raise Malformed("the persistent id of a storage has parts of other types")
    view = rest[0] if rest else None
    if view is not None:
        if type(view) is not tuple or len(view) != 3 or type(view[0]) is not str:
            raise Malformed(f"the view of storage {key[:100]} has parts of other types")
        _, begin, size = view
        if type(begin) is not int or type(size) is not int or not 0 <= begin <= begin + size <= numel:
            raise Malformed(f"the view of storage {key[:100]} is not in it")
    if (class_.module, class_.name) == ("torch.storage", "UntypedStorage"):
        return StorageId(key, None, 1, numel, view)
    if class_.module in ("torch", "torch.cuda"):
        if class_.name == "UntypedStorage":
            return StorageId(key, None, 1, numel, view)
        dtype = _STORAGES.get(class_.name)
        if dtype is not None:
            return StorageId(key, dtype, to_dtype(dtype).itemsize, numel, view)
        itemsize = _OTHER_STORAGES.get(class_.name)
        if itemsize is not None:
            return StorageId(key, "", itemsize, numel, view)
    return name_of(class_)


def found_storage(storage: Storage) -> Found:
    """A storage; as a leaf it is a tensor of one dimension."""
    dtype = storage.dtype or "uint8"
    if storage.dtype == "" or storage.place is None:
        return Found(storage, opaque("torch storage").placed)
    shape = (storage.nbytes // to_dtype(dtype).itemsize,)
    chunk = Chunk(*storage.place, storage.nbytes, (0,), shape, big_endian=storage.big_endian)
    return Found(storage, Tensor(dtype, shape, (chunk,) if storage.nbytes else ()))


class TensorSymbols:
    """The tensors of one file, so that those which view the same are ties."""

    def __init__(self) -> None:
        self._tensors: dict[str, Found] = {}
        #: How distributed tensors are distributed, by the identity of their local tensors.
        self.distributions: dict[int, dtensor_symbols.Distribution] = {}
        self.symbols: Mapping[tuple[str, str], Symbol] = {
            **dtensor_symbols.SYMBOLS,
            ("torch._utils", "_rebuild_tensor"): self._rebuild,
            ("torch._utils", "_rebuild_tensor_v2"): self._rebuild,
            ("torch._utils", "_rebuild_tensor_v3"): self._rebuild_typed,
            ("torch._utils", "_rebuild_parameter"): _first,
            ("torch._utils", "_rebuild_parameter_with_state"): _first,
            ("torch._utils", "_rebuild_device_tensor_from_cpu_tensor"): _first,
            ("torch._utils", "_rebuild_device_tensor_from_numpy"): _first,
            ("torch._tensor", "_rebuild_from_type_v2"): self._rebuild_of_class,
            ("torch._utils", "_rebuild_sparse_tensor"): _listed("torch sparse tensor"),
            ("torch._utils", "_rebuild_qtensor"): _listed("torch quantized tensor"),
            ("torch._utils", "_rebuild_nested_tensor"): _listed("torch nested tensor"),
            ("torch._utils", "_rebuild_meta_tensor_no_storage"): _listed("torch meta tensor"),
            ("torch", "Size"): _size,
            ("torch", "device"): _device,
            ("torch.serialization", "_get_layout"): _layout,
        }

    def _rebuild(self, made: Made) -> Found:
        return self._view([part.value for part in made.args])

    def _rebuild_typed(self, made: Made) -> Found:
        return self._typed_view([part.value for part in made.args])

    def _typed_view(self, args: Sequence[object]) -> Found:
        storage, begin, size, stride, _, _, dtype, *rest = _at_least(args, 7)
        name = dtype.removeprefix("torch.") if isinstance(dtype, str) else ""
        if name not in DTYPES:
            return opaque(f"torch tensor of {dtype if isinstance(dtype, str) else 'an unknown dtype'}")
        return self._tensor(storage, begin, size, stride, DTYPES[name], rest[0] if rest else None)

    def _view(self, args: Sequence[object]) -> Found:
        storage, begin, size, stride, *rest = _at_least(args, 4)
        dtype = storage.dtype if isinstance(storage, Storage) else None
        if isinstance(storage, Storage) and dtype is None:
            dtype = "uint8"
        return self._tensor(storage, begin, size, stride, dtype, rest[2] if len(rest) > 2 else None)

    def _rebuild_of_class(self, made: Made) -> Found:
        """A tensor with attributes or of a subclass. A subclass without a storage of its own is
        known by its name only."""
        function, class_, args, state = _at_least([part.value for part in made.args], 4)[:4]
        if not isinstance(function, Name) or not isinstance(class_, Name) or type(args) is not tuple:
            raise Malformed("a tensor with attributes has parts of other types")
        if (class_.module, class_.name) in dtensor_symbols.CLASSES:
            found = dtensor_symbols.distributed(state)
            if found is None:
                return opaque("torch distributed tensor of an unknown placement")
            self.distributions[id(found[0])] = found[1]
            return Found(found[0], found[0])
        if function.module == "torch._utils":
            if function.name in ("_rebuild_tensor", "_rebuild_tensor_v2"):
                return self._view(args)
            if function.name == "_rebuild_tensor_v3":
                return self._typed_view(args)
            if function.name.startswith("_rebuild_parameter") and args and isinstance(args[0], Tensor):
                return Found(args[0], args[0])  # a parameter with attributes
        return opaque(name_of(class_))

    def _tensor(
        self,
        storage: object,
        begin: object,
        size: object,
        stride: object,
        dtype: str | None,
        flags: object,
    ) -> Found:
        if not isinstance(storage, Storage):
            return opaque("torch tensor of an unknown storage")
        if not dtype:
            return opaque("torch quantized tensor")
        if type(size) is tuple and len(size) > MAX_DIMS:
            return opaque(f"torch tensor of {dtype} with {len(size)} dimensions, more than {MAX_DIMS}")
        shape, strides = _integers(size), _integers(stride)
        if len(shape) != len(strides) or type(begin) is not int or begin < 0:
            raise Malformed("a tensor's size and stride do not fit together")
        negated = _negated(flags)
        if negated is None:
            return opaque("torch tensor with an unknown flag")
        key = f"{storage.key}|{storage.place}|{begin}|{shape}|{strides}|{dtype}|{negated}"
        if key not in self._tensors:
            self._tensors[key] = _placed(storage, begin, shape, strides, dtype, negated)
        return self._tensors[key]


def _placed(
    storage: Storage,
    begin: int,
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: str,
    negated: Negated,
) -> Found:
    itemsize = to_dtype(dtype).itemsize
    if not fits(shape, itemsize):
        raise Malformed(f"a tensor of {itemsize} bytes times {list(shape)}")
    nbytes = math.prod(shape) * itemsize
    if 0 in shape:
        tensor = Tensor(dtype, shape, ())
        return Found(tensor, tensor)
    elements = storage.nbytes // itemsize
    last = begin + sum((size - 1) * step for size, step in zip(shape, strides, strict=True))
    if last >= elements:
        raise Malformed(f"a tensor reaches to element {last} of a storage of {elements}")
    span = (last - begin + 1) * itemsize
    if storage.place is None:
        return opaque(f"torch tensor of {dtype}{list(shape)} in a compressed or encoded stream")
    if nbytes > max(_MAX_REPEATED_BYTES, _MAX_REPEATS * span):
        return opaque(f"torch tensor of {dtype}{list(shape)}, which repeats {span} bytes")
    packed = row_major(shape, itemsize)
    # The stride of a dimension of one element says nothing.
    steps = tuple(
        own if size == 1 else step * itemsize for size, step, own in zip(shape, strides, packed, strict=True)
    )
    file, offset = storage.place
    chunk = Chunk(
        file,
        offset + begin * itemsize,
        span,
        (0,) * len(shape),
        shape,
        None if steps == packed else steps,
        storage.big_endian and itemsize > 1,
        negated,
    )
    tensor = Tensor(dtype, shape, (chunk,))
    return Found(tensor, tensor)


def _at_least(args: Sequence[object], count: int) -> Sequence[object]:
    if len(args) < count:
        raise Malformed(f"a tensor has {len(args)} parts of {count}")
    return args


def _integers(value: object) -> tuple[int, ...]:
    is_sound = type(value) is tuple and all(type(one) is int and 0 <= one < MAX_SIZE for one in value)
    if not is_sound or len(value) > MAX_DIMS:  # type: ignore[arg-type]
        raise Malformed("a tensor's size or stride is no tuple of counts")
    return value  # type: ignore[return-value]


def _negated(flags: object) -> Negated | None:
    if not flags:
        return ""
    if type(flags) is not dict or any(key not in ("conj", "neg") for key in flags):
        return None
    conjugate, negative = bool(flags.get("conj")), bool(flags.get("neg"))
    if conjugate and negative:
        return None
    return "imaginary" if conjugate else "all" if negative else ""


def _first(made: Made) -> Found:
    """A parameter is its tensor."""
    first = made.args[0]
    return first if isinstance(first.placed, Tensor) else Found(first.value, first.placed)


def _listed(what: str) -> Symbol:
    return lambda _: opaque(what)


def _size(made: Made) -> Found:
    sizes = made.arg(0, ())
    if type(sizes) not in (tuple, list):
        raise TypeError("sizes were expected")
    size = tuple(integer(one) for one in sizes)  # type: ignore[attr-defined]
    return Found(size, Value(size) if size else size, True)


def _device(made: Made) -> Found:
    kind = text(made.arg(0))
    index = made.arg(1)
    value = kind if index is None else f"{kind}:{integer(index)}"
    return plain(value, len(value))


def _layout(made: Made) -> Found:
    value = text(made.arg(0))
    return plain(value, len(value))


#: Names that are values: as text.
NAMES: Mapping[tuple[str, str], object] = {
    ("torch", name): f"torch.{name}" for name in (*DTYPES, *_OTHER_DTYPES, *_LAYOUTS, *_OTHER_NAMES)
}
