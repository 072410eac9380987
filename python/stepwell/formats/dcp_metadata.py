"""The ``.metadata`` pickle of DCP: which parts tensors have, and where their archives are.

A metadata file has several records for each part of each tensor, so its inert objects are read here
directly. Attributes that are not known are passed over.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from operator import add, le
from typing import NamedTuple, NoReturn

from .. import _core
from .._paths import printable
from ..errors import CorruptCheckpoint
from .description import MAX_SIZE
from .files import corrupt, read_whole
from .numpy_symbols import MAX_DIMS
from .pickled import Call, Name, Pairs
from .torch_symbols import DTYPES

#: The longest metadata file that is read.
_MAX_BYTES = 1 << 30
#: The name under which Megatron stores the shape of a flattened tensor.
_FLATTENED = "nd_reformulated_orig_global_shape"
#: The most parts of a path in a state.
_MAX_PATH = 64
_MODULES = frozenset(
    {
        "torch.distributed.checkpoint.metadata",
        "torch.distributed.checkpoint.filesystem",
        "torch.distributed._shard.checkpoint.metadata",
        "torch.distributed._shard.checkpoint.filesystem",
        "torch.distributed._shard.sharded_tensor.metadata",
        "megatron.core.dist_checkpointing.strategies.torch",
    }
)


class Place(NamedTuple):
    """An archive inside a file."""

    #: Name of the file.
    file: str
    offset: int
    length: int
    #: Names of what was done to its bytes.
    transforms: tuple[str, ...]


class Part(NamedTuple):
    """A box of a tensor."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    place: Place


@dataclass(slots=True)
class SavedTensor:
    """A tensor."""

    #: ``None``: a dtype that no array has, named in ``stored_dtype``.
    dtype: str | None
    stored_dtype: str
    shape: tuple[int, ...]
    parts: list[Part]
    #: The shape of a tensor that is stored as runs of flattened boxes. ``shape`` is the stored one
    #: then: boxes along each dimension, and the elements of a box.
    flattened: tuple[int, ...] | None = None


@dataclass(slots=True)
class Saved:
    """The content of a metadata file."""

    tensors: dict[str, SavedTensor] = field(default_factory=dict)
    objects: dict[str, Place] = field(default_factory=dict)
    #: The path of each name in the state, where that is known.
    paths: dict[str, tuple[str | int, ...]] = field(default_factory=dict)
    #: Further copies of parts and objects, by name: the place that counts, and the other one.
    copies: list[tuple[str, Place, Place]] = field(default_factory=list)


def read_metadata(file: str) -> Saved:
    """Reads a metadata file."""
    data = read_whole(
        file,
        _MAX_BYTES,
        lambda length: corrupt(
            file, f"metadata of at most {_MAX_BYTES} bytes were expected, not of {length}"
        ),
    )
    parsed = _core.pickle(file, data, 0, len(data))
    if parsed is None:
        raise corrupt(file, "it ends in the middle of its pickle")
    return _Reader(file).metadata(parsed[0])


def _is_grid_of(stored: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """True if flattened boxes of a tensor of that shape may be stored so."""
    if len(stored) != len(shape) + 1 or 0 in stored[:-1]:
        return False
    boxes = list(zip(shape, stored[:-1], strict=True))
    return all(size % count == 0 for size, count in boxes) and stored[-1] == math.prod(
        size // count for size, count in boxes
    )


def _has_all_runs(tensor: SavedTensor) -> bool:
    """True if the parts are runs of flattened boxes that have each element once."""
    ends: dict[tuple[int, ...], int] = {}
    for part in sorted(tensor.parts, key=lambda one: one.offsets):
        *box, begin = part.offsets
        if part.sizes[:-1] != (1,) * len(box) or ends.get(tuple(box), 0) != begin:
            return False
        ends[tuple(box)] = begin + part.sizes[-1]
    *grid, length = tensor.shape
    return len(ends) == math.prod(grid) and all(end == length for end in ends.values())


class _Reader:
    """Reads the objects of a metadata pickle."""

    def __init__(self, file: str) -> None:
        self._file = file

    def metadata(self, root: object) -> Saved:
        """All of it."""
        fields = self._fields(root, "Metadata", "MCoreMetadata")
        places = self._places(fields.get("storage_data"))
        saved = Saved()
        for key, value in self._pairs(fields.get("state_dict_metadata")):
            name = self._text(key)
            kind = self._class_of(value)
            if kind == "BytesStorageMetadata":
                saved.objects[name] = self._place(places, name, None)
            elif kind == "TensorStorageMetadata":
                saved.tensors[name] = self._tensor(name, value, places)
            else:
                self._wrong(f"`{name}` is a {kind}, neither a tensor nor an object")
        self._add_flattened(saved, fields.get("mcore_data"))
        planner = fields.get("planner_data")
        if planner is not None:
            for key, path in self._pairs(planner):
                saved.paths[self._text(key)] = self._path(path)
        return saved

    def _add_flattened(self, saved: Saved, rows: object) -> None:
        """Adds the shapes of tensors that Megatron has stored as flattened boxes."""
        for key, value in () if rows is None else self._pairs(rows):
            shape = self._named(value).get(_FLATTENED) if isinstance(value, Pairs) else None
            if shape is None:
                continue
            name, whole = self._text(key), self._sizes(shape)
            tensor = saved.tensors.get(name)
            if tensor is None or not _is_grid_of(tensor.shape, whole):
                stored = "" if tensor is None else f" of {list(tensor.shape)}"
                self._wrong(f"`{name}`: flattened boxes{stored} do not form {list(whole)}")
            if not _has_all_runs(tensor):
                self._wrong(f"`{name}`: its runs leave elements out, or have some of them twice")
            tensor.flattened = whole

    def _places(self, storage: object) -> dict[tuple[str, tuple[int, ...] | None], Place]:
        found: dict[tuple[str, tuple[int, ...] | None], Place] = {}
        for key, value in self._pairs(storage):
            index = self._fields(key, "MetadataIndex")
            offset = index.get("offset")
            at = None if offset is None else self._sizes(offset)
            info = self._fields(value, "_StorageInfo")
            found[self._text(index.get("fqn")), at] = Place(
                self._text(info.get("relative_path")),
                self._count(info.get("offset")),
                self._count(info.get("length")),
                self._texts(info.get("transform_descriptors")),
            )
        return found

    def _place(
        self,
        places: Mapping[tuple[str, tuple[int, ...] | None], Place],
        name: str,
        offsets: tuple[int, ...] | None,
    ) -> Place:
        place = places.get((name, offsets))
        if place is None:
            at = "" if offsets is None else f" at {list(offsets)}"
            self._wrong(f"no file is named for `{name}`{at}")
        return place

    def _tensor(
        self, name: str, value: object, places: Mapping[tuple[str, tuple[int, ...] | None], Place]
    ) -> SavedTensor:
        fields = self._fields(value, "TensorStorageMetadata")
        dtype = self._dtype(fields.get("properties"))
        shape = self._sizes(fields.get("size"))
        parts: dict[tuple[int, ...], Part] = {}
        for chunk in self._list(fields.get("chunks")):
            box = self._fields(chunk, "ChunkStorageMetadata")
            offsets, sizes = self._sizes(box.get("offsets")), self._sizes(box.get("sizes"))
            ends = map(add, offsets, sizes)
            if not (len(offsets) == len(sizes) == len(shape) and all(map(le, ends, shape))):
                self._wrong(f"`{name}`: a part at {offsets} of {sizes} is not in {shape}")
            parts[offsets] = Part(offsets, sizes, self._place(places, name, offsets))
        return SavedTensor(DTYPES.get(dtype), dtype, shape, list(parts.values()))

    def _dtype(self, properties: object) -> str:
        """The name of the dtype of a tensor's properties."""
        if not isinstance(properties, Call):
            self._wrong("the properties of a tensor were expected")
        state = properties.state
        first: object = None
        if isinstance(state, tuple) and state:
            first = state[0]
        elif isinstance(state, Pairs):
            first = self._named(state).get("dtype")
        if not isinstance(first, Name) or first.module != "torch":
            self._wrong("a dtype of torch was expected")
        return first.name

    def _class_of(self, value: object) -> str:
        name = value.callable if isinstance(value, Call) else None
        if not isinstance(name, Name):
            return "value of another type"
        if name.module not in _MODULES:
            return printable(f"{name.module}.{name.name}"[:200])
        return name.name

    def _fields(self, value: object, *classes: str) -> dict[str, object]:
        """The attributes of an object of one of these classes."""
        if self._class_of(value) not in classes:
            self._wrong(f"a {classes[0]} was expected, not a {self._class_of(value)}")
        state = value.state if isinstance(value, Call) else None
        if isinstance(state, tuple) and len(state) == 2 and isinstance(state[0], Pairs):
            state = state[0]
        if not isinstance(state, Pairs):
            self._wrong(f"a {classes[0]} has no attributes")
        return self._named(state)

    def _named(self, pairs: Pairs) -> dict[str, object]:
        names = pairs.flat[::2]
        for name in names:
            self._text(name)
        return dict(zip(names, pairs.flat[1::2], strict=True))  # type: ignore[arg-type]

    def _pairs(self, value: object) -> zip[tuple[object, object]]:
        if not isinstance(value, Pairs):
            self._wrong("a dict was expected")
        return zip(value.flat[::2], value.flat[1::2], strict=True)

    def _list(self, value: object) -> list[object]:
        if not isinstance(value, list):
            self._wrong("a list was expected")
        return value

    def _text(self, value: object) -> str:
        if type(value) is not str:
            self._wrong("text was expected")
        try:
            value.encode()
        except UnicodeEncodeError:
            self._wrong(f"`{value[:200]}` is no valid UTF-8")
        return value

    def _texts(self, value: object) -> tuple[str, ...]:
        if value is None:
            return ()
        return tuple(self._text(one)[:100] for one in self._list(value))

    def _count(self, value: object) -> int:
        if type(value) is not int or not 0 <= value < MAX_SIZE:
            self._wrong("a number of bytes or elements was expected")
        return value

    def _sizes(self, value: object) -> tuple[int, ...]:
        """A ``torch.Size``."""
        if isinstance(value, Call) and isinstance(value.args, tuple) and value.args:
            value = value.args[0]
        if not isinstance(value, (tuple, list)) or len(value) > MAX_DIMS:
            self._wrong("a size was expected")
        for one in value:
            self._count(one)
        return tuple(value)

    def _path(self, value: object) -> tuple[str | int, ...]:
        if not isinstance(value, tuple) or not 0 < len(value) <= _MAX_PATH:
            self._wrong("a path in a state was expected")
        for part in value:
            if type(part) is str:
                self._text(part)
            elif type(part) is not int or not 0 <= part < MAX_SIZE:
                self._wrong("a path in a state has a part that is neither text nor a small number")
        return value

    def _wrong(self, what: str) -> NoReturn:
        failure: CorruptCheckpoint = corrupt(self._file, what)
        raise failure
