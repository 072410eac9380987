"""Arrays of Zarr 2 and 3, as TensorStore writes them: a grid of chunks of one shape.

A chunk is a value under a key, in a file of its own or in a database. With Zarr 3 a value may be a
*shard*: several chunks, and behind them an index of their places.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from operator import add, ge, mul, sub
from typing import Literal, Protocol, TypeAlias

from .. import _core
from .._paths import printable
from .._state.specs import to_dtype
from ..errors import FormatError
from . import lookup
from .description import MAX_SIZE, Chunk, Compressed, Opaque, Tensor, fits, row_major
from .files import corrupt, is_path_below, read_ranges
from .numpy_symbols import MAX_DIMS

#: The longest metadata of an array.
_MAX_METADATA_BYTES = 1 << 20
#: The most chunks of a shard. Each has 16 bytes in its index.
_MAX_SHARD_CHUNKS = 1 << 20
#: Arrays, and boxes of each, whose metadata and indexes are read together.
_ARRAYS_AT_ONCE, _BOXES_AT_ONCE = 64, 64
#: The most bytes of these, if they are several: of all arrays, and of one.
_BYTES_AT_ONCE, _BYTES_OF_ARRAY = 16 << 20, 1 << 20
#: The most stored chunks of all arrays.
_MAX_CHUNKS = 1 << 22
#: A chunk of a shard that is not stored.
_ABSENT = (1 << 64) - 1
#: Values of chunks that are left out: zero in each form of JSON.
_ZEROS = ("0", "0.0", "False", "[0, 0]", "[0.0, 0.0]")
#: The most bytes of an array with such chunks: nothing of them is in a file.
_MAX_BYTES_WITH_ZEROS = 16 << 30
#: The longest element.
_MAX_ITEMSIZE = 16
_DTYPES = frozenset(_core.dtype_names())
#: Dtypes of Zarr 2 by the kind and size of numpy. Others are stored by their names.
_NUMPY = {
    "b1": "bool",
    **{
        f"{kind}{size}": f"{name}{8 * size}"
        for kind, name in (("i", "int"), ("u", "uint"))
        for size in (1, 2, 4, 8)
    },
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
    "c8": "complex64",
    "c16": "complex128",
}

#: The compression of chunks.
Codec = Literal["", "zstd"]


@dataclass(frozen=True, slots=True)
class Stored:
    """The place of a value: a file, or the memory of the description if the path is empty."""

    file: str
    offset: int
    nbytes: int


class Store(Protocol):
    """Values by key."""

    #: Its path, for messages.
    path: str

    def place(self, key: str) -> Stored | None:
        """The place of a value. ``None`` without one."""

    def contents(self, places: Sequence[Stored]) -> list[bytes]:
        """The bytes of values."""


class Files:
    """Values as files below a directory."""

    def __init__(self, path: str) -> None:
        self.path = path

    def place(self, key: str) -> Stored | None:
        """The file of a value."""
        if not is_path_below(key):
            return None
        file = os.path.join(self.path, key)
        length = lookup.length(file)
        return None if length is None else Stored(file, 0, length)

    def contents(self, places: Sequence[Stored]) -> list[bytes]:
        """The bytes of values."""
        return read_ranges((one.file, one.offset, one.nbytes) for one in places)


class Zeros:
    """Chunks of zeros that the writer of a checkpoint has left out."""

    def __init__(self, memory: bytearray) -> None:
        #: The place of an element in the memory of the description.
        self._offset = len(memory)
        memory += bytes(_MAX_ITEMSIZE)
        #: Chunks that may still be left out. No file bounds their number.
        self._left = 1 << 16

    def chunk(self, layout: _Layout, start: tuple[int, ...], shape: tuple[int, ...]) -> Chunk | None:
        """A chunk with that shape that begins there. ``None`` if there are too many."""
        self._left -= 1
        if self._left < 0:
            return None
        itemsize = layout.itemsize
        file = Compressed("", self._offset, itemsize, itemsize, None, "stored")
        return Chunk(file, 0, itemsize, start, _inside(layout, start, shape), (0,) * len(start))


class Unsupported(Exception):
    """An array whose values are stored in a way that is not read."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """How an array is stored."""

    dtype: str
    shape: tuple[int, ...]
    #: The shape of the stored boxes, and that of the chunks in them.
    box: tuple[int, ...]
    chunk: tuple[int, ...]
    big_endian: bool
    is_fortran: bool
    codec: Codec
    #: True if a box is a shard.
    is_sharded: bool
    #: True if chunks that are left out would be zeros.
    fills_zeros: bool

    @property
    def itemsize(self) -> int:
        return to_dtype(self.dtype).itemsize

    @property
    def index_bytes(self) -> int:
        """The length of the index of a shard: 16 bytes for each chunk, and a checksum."""
        return 16 * (math.prod(self.box) // math.prod(self.chunk)) + 4


class _ChunksLeft:
    """The number of chunks that the arrays may still have."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._left = _MAX_CHUNKS

    def take(self, count: int) -> None:
        """Counts chunks. Raises if they are too many."""
        self._left -= count
        if self._left < 0:
            raise FormatError(
                f"{self._path}: its arrays have more than {_MAX_CHUNKS} chunks. Restore it with the library that wrote "
                "it, then pass its state to sw.save"
            )


#: An array that asks for places, and gets their bytes.
_Reading: TypeAlias = Generator[list[Stored], list[bytes], "Tensor | Opaque"]


def arrays(
    store: Store, names: Sequence[str], is_3: bool, zeros: Zeros | None = None
) -> dict[str, Tensor | Opaque]:
    """Returns the arrays with these names. Reads the metadata of several arrays together. With
    ``zeros``, their writer left out chunks of zeros."""
    found: dict[str, Tensor | Opaque] = {}
    left = _ChunksLeft(store.path)
    for first in range(0, len(names), _ARRAYS_AT_ONCE):
        some = names[first : first + _ARRAYS_AT_ONCE]
        readings = {name: _array(store, name, is_3, zeros, left) for name in some}
        wanted = {name: next(reading) for name, reading in readings.items()}
        while wanted:
            last = _at_once(wanted)
            contents = iter(store.contents([place for places in last.values() for place in places]))
            for name, places in last.items():
                try:
                    wanted[name] = readings[name].send([next(contents) for _ in places])
                except StopIteration as end:
                    found[name] = end.value
    return found


def _at_once(wanted: dict[str, list[Stored]]) -> dict[str, list[Stored]]:
    """Takes out the places of as many arrays as are read together."""
    taken: dict[str, list[Stored]] = {}
    left = _BYTES_AT_ONCE
    for name in list(wanted):
        left -= sum(place.nbytes for place in wanted[name])
        if taken and left < 0:
            break
        taken[name] = wanted.pop(name)
    return taken


def _array(store: Store, name: str, is_3: bool, zeros: Zeros | None, left: _ChunksLeft) -> _Reading:
    key = f"{name}/zarr.json" if is_3 else f"{name}/.zarray"
    place = store.place(key)
    if place is None:
        raise corrupt(store.path, f"array {_quoted(name)} is missing")
    if place.nbytes > _MAX_METADATA_BYTES:
        raise corrupt(store.path, f"{_quoted(key)} has {place.nbytes} bytes, more than {_MAX_METADATA_BYTES}")
    try:
        (content,) = yield [place]
        metadata = json.loads(content)
        if not isinstance(metadata, dict):
            raise TypeError("a dict was expected")
        layout = _layout_3(metadata) if is_3 else _layout_2(metadata)
        separator = _separator(metadata, is_3)
    except Unsupported as error:
        return Opaque(f"zarr array {error}")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        what = f"{_quoted(key)} does not describe an array: {type(error).__name__}: {error}"
        raise corrupt(store.path, what) from error
    zeros = zeros if layout.fills_zeros else None
    return (yield from _tensor(store, name, layout, is_3, separator, zeros, left))


def _quoted(name: str) -> str:
    return f"`{printable(name[:200])}`"


def _separator(metadata: Mapping[str, object], is_3: bool) -> str:
    found = metadata.get("dimension_separator", ".")
    if is_3:
        encoding = metadata.get("chunk_key_encoding")
        given = encoding.get("configuration", {}) if isinstance(encoding, dict) else {}
        found = given.get("separator", "/") if isinstance(given, dict) else "/"
    if found not in (".", "/"):
        raise ValueError("numbers of chunks are separated by a dot or a slash")
    return str(found)


def _sizes(value: object, least: int) -> tuple[int, ...]:
    if not isinstance(value, list) or len(value) > MAX_DIMS:
        raise ValueError("a shape is a list of sizes")
    if any(type(one) is not int or not least <= one < MAX_SIZE for one in value):
        raise ValueError("a shape has a size that is not possible")
    if not fits(value, _MAX_ITEMSIZE):
        raise ValueError("a shape of too many elements")
    return tuple(value)


def _layout_2(metadata: Mapping[str, object]) -> _Layout:
    if metadata["zarr_format"] != 2:
        raise ValueError("it is of another version")
    shape, chunk = _sizes(metadata["shape"], 0), _sizes(metadata["chunks"], 1)
    if len(shape) != len(chunk):
        raise ValueError("shape and chunks have different dimensions")
    text = metadata["dtype"]
    if not isinstance(text, str):
        raise Unsupported("of a structured dtype")
    dtype, big_endian = text, False
    if text[:1] in ("<", ">", "|"):
        dtype, big_endian = _NUMPY.get(text[1:], text), text[0] == ">"
    if dtype not in _DTYPES:
        raise Unsupported(f"of {text[:40]}")
    compressor = metadata.get("compressor")
    codec: Codec = ""
    if isinstance(compressor, dict):
        if compressor.get("id") != "zstd":
            raise Unsupported(f"with the compressor {str(compressor.get('id'))[:40]}")
        codec = "zstd"
    if metadata.get("filters"):
        raise Unsupported("with filters")
    order = metadata.get("order", "C")
    if order not in ("C", "F"):
        raise ValueError("an order of elements is C or F")
    return _Layout(dtype, shape, chunk, chunk, big_endian, order == "F", codec, False, False)


def _layout_3(metadata: Mapping[str, object]) -> _Layout:
    if metadata["zarr_format"] != 3 or metadata["node_type"] != "array":
        raise ValueError("it is of another version, or a group")
    shape = _sizes(metadata["shape"], 0)
    grid = metadata["chunk_grid"]
    if not isinstance(grid, dict) or grid["name"] != "regular":
        raise Unsupported("with an irregular grid")
    box = _sizes(grid["configuration"]["chunk_shape"], 1)
    dtype = metadata["data_type"]
    if not isinstance(dtype, str) or dtype not in _DTYPES:
        raise Unsupported(f"of {str(dtype)[:40]}")
    codecs = metadata["codecs"]
    if not isinstance(codecs, list):
        raise TypeError("codecs are a list")
    chunk, is_sharded = box, bool(codecs) and codecs[0]["name"] == "sharding_indexed"
    if is_sharded:
        (sharding,) = codecs
        given = sharding["configuration"]
        chunk, codecs = _sizes(given["chunk_shape"], 1), given["codecs"]
        if given.get("index_location", "end") != "end":
            raise Unsupported("of shards with their index in front")
        if [one["name"] for one in given["index_codecs"]] != ["bytes", "crc32c"]:
            raise Unsupported("of shards with another index")
    if len(box) != len(shape) or len(chunk) != len(shape):
        raise ValueError("shape and chunks have different dimensions")
    if any(whole % part for whole, part in zip(box, chunk, strict=True)):
        raise ValueError("shards are not whole chunks")
    names = [one["name"] for one in codecs]
    if names not in (["bytes"], ["bytes", "zstd"]):
        raise Unsupported(f"with the codecs {', '.join(map(str, names))[:100]}")
    endian = (codecs[0].get("configuration") or {}).get("endian", "little")
    if endian not in ("little", "big"):
        raise ValueError("an order of bytes is little or big")
    codec: Codec = "zstd" if len(names) == 2 else ""
    fills_zeros = str(metadata["fill_value"]) in _ZEROS
    return _Layout(dtype, shape, box, chunk, endian == "big", False, codec, is_sharded, fills_zeros)


def _tensor(
    store: Store,
    name: str,
    layout: _Layout,
    is_3: bool,
    separator: str,
    zeros: Zeros | None,
    left: _ChunksLeft,
) -> _Reading:
    if 0 in layout.shape:
        return Tensor(layout.dtype, layout.shape, ())
    counts = [-(-size // box) for size, box in zip(layout.shape, layout.box, strict=True)]
    prefix = f"{name}/c" if is_3 else f"{name}/"
    chunks: list[Chunk] = []
    is_empty = True
    # The grid may claim any size. A chunk that is missing, or the limit of zeros, ends the walk.
    grid = _grid(counts)
    at_once = min(_BOXES_AT_ONCE, max(_BYTES_OF_ARRAY // layout.index_bytes, 1))
    while some := list(islice(grid, at_once)):
        left.take(len(some))
        boxes: list[_Box] = []
        for at in some:
            numbers = separator.join(map(str, at))
            key = prefix + (f"{separator}{numbers}" if at else "") if is_3 else prefix + (numbers or "0")
            start = tuple(number * size for number, size in zip(at, layout.box, strict=True))
            place = store.place(key)
            if place is None and zeros is None:
                raise corrupt(store.path, f"array {_quoted(name)}: chunk {_quoted(key)} is missing")
            boxes.append((key, start, place))
        parts = yield from _parts(store, layout, boxes)
        left.take(len(parts) - len(some))
        for key, inner, shape, part in parts:
            if part is not None:
                is_empty = False
                chunks.append(_chunk(store, key, layout, inner, part))
                continue
            if zeros is None:
                raise corrupt(
                    store.path, f"array {_quoted(name)}: a chunk of shard {_quoted(key)} is missing"
                )
            left_out = zeros.chunk(layout, inner, shape)
            nbytes = math.prod(layout.shape) * layout.itemsize
            if left_out is None or nbytes > _MAX_BYTES_WITH_ZEROS:
                return Opaque(
                    f"zarr array of {layout.dtype}{list(layout.shape)} with chunks that are not stored"
                )
            chunks.append(left_out)
    if is_empty and zeros is not None:
        whole = zeros.chunk(layout, (0,) * len(layout.shape), layout.shape)
        chunks = [whole] if whole is not None else chunks
    return Tensor(layout.dtype, layout.shape, tuple(chunks))


def _grid(counts: Sequence[int]) -> Iterator[tuple[int, ...]]:
    """The places of a grid, the last dimension first."""
    at = [0] * len(counts)
    while True:
        yield tuple(at)
        axis = len(counts) - 1
        while axis >= 0 and at[axis] == counts[axis] - 1:
            at[axis] = 0
            axis -= 1
        if axis < 0:
            return
        at[axis] += 1


#: Key, first element and place of a box. No place: it is not stored.
_Box: TypeAlias = tuple[str, tuple[int, ...], Stored | None]
#: The key of its box, first element, shape and place of a chunk. No place: it is not stored.
_Part: TypeAlias = tuple[str, tuple[int, ...], tuple[int, ...], Stored | None]


def _parts(
    store: Store, layout: _Layout, boxes: Sequence[_Box]
) -> Generator[list[Stored], list[bytes], list[_Part]]:
    """The chunks of boxes."""
    if not layout.is_sharded:
        return [(key, start, layout.box, place) for key, start, place in boxes]
    counts = [whole // part for whole, part in zip(layout.box, layout.chunk, strict=True)]
    number = math.prod(counts)
    length = layout.index_bytes
    places: list[Stored] = []
    for key, _, place in boxes:
        if place is None:
            continue
        if length > place.nbytes:
            raise corrupt(
                store.path, f"shard {_quoted(key)} of {place.nbytes} bytes has no index of {number} chunks"
            )
        if number > _MAX_SHARD_CHUNKS:
            raise FormatError(
                f"{store.path}: shard {_quoted(key)} has {number} chunks, and at most {_MAX_SHARD_CHUNKS} are read. "
                "Write the array with larger chunks"
            )
        places.append(Stored(place.file, place.offset + place.nbytes - length, length))
    indexes = iter((yield places))
    found: list[_Part] = []
    for key, start, place in boxes:
        if place is None:
            found.append((key, start, layout.box, None))
            continue
        index = next(indexes)
        if len(index) < length:
            raise corrupt(store.path, f"shard {_quoted(key)} passes the end of its file")
        (checksum,) = struct.unpack("<I", index[-4:])
        if _core.crc32c(index[:-4]) != checksum:
            raise corrupt(
                store.path, f"the index of shard {_quoted(key)} does not have its recorded checksum"
            )
        rows = struct.iter_unpack("<QQ", index[:-4])
        for at, (offset, nbytes) in zip(_grid(counts), rows, strict=True):
            inner = tuple(map(add, start, map(mul, at, layout.chunk)))
            if any(map(ge, inner, layout.shape)):
                continue
            if offset == nbytes == _ABSENT:
                found.append((key, inner, layout.chunk, None))
                continue
            if offset + nbytes > place.nbytes - length:
                raise corrupt(store.path, f"shard {_quoted(key)} names bytes behind its chunks")
            found.append((key, inner, layout.chunk, Stored(place.file, place.offset + offset, nbytes)))
    return found


def _inside(layout: _Layout, start: tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    """The part of a chunk that is in its array."""
    return tuple(map(min, shape, map(sub, layout.shape, start)))


@lru_cache(maxsize=256)
def _stored_as(
    chunk: tuple[int, ...], extent: tuple[int, ...], itemsize: int, is_fortran: bool
) -> tuple[int, int, tuple[int, ...] | None]:
    """The length of a chunk, that of the part with the first elements, and the strides of the part.
    ``None``: it is row-major."""
    # Chunks at the edge are stored whole.
    strides = row_major(chunk[::-1], itemsize)[::-1] if is_fortran else row_major(chunk, itemsize)
    span = sum((size - 1) * step for size, step in zip(extent, strides, strict=True)) + itemsize
    is_packed = strides == row_major(extent, itemsize)
    return math.prod(chunk) * itemsize, span, None if is_packed else strides


def _chunk(store: Store, key: str, layout: _Layout, start: tuple[int, ...], place: Stored) -> Chunk:
    itemsize = layout.itemsize
    extent = _inside(layout, start, layout.chunk)
    length, span, strides = _stored_as(layout.chunk, extent, itemsize, layout.is_fortran)
    file: str | Compressed = place.file
    offset = place.offset
    if layout.codec:
        file, offset = Compressed(place.file, place.offset, place.nbytes, length, None, layout.codec), 0
    elif place.nbytes != length:
        raise corrupt(store.path, f"chunk {_quoted(key)} has {place.nbytes} bytes, not {length}")
    elif not place.file:
        file, offset = Compressed("", place.offset, length, length, None, "stored"), 0
    is_big = layout.big_endian and itemsize > 1
    return Chunk(file, offset, span, start, extent, strides, is_big)
