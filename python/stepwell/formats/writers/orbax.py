"""Items of Orbax: arrays of Zarr 2 in an OCDBT database, and the tree in ``_METADATA``.

The database has a manifest, one node with all keys, and data files. Its chunks are runs of whole
rows, so they are written as they are read, without compression. Tied arrays share their chunks.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import TypeAlias

import numpy as np

from ... import _core
from ..._paths import named, printable, render
from ..._state.specs import to_dtype
from ...errors import MisuseError
from .content import Content, FileOptions, PlainValue
from .output import OutputFile, OutputTensor, check_dtypes, shards

_MANIFEST, _NODE = 0x0CDB3A2A, 0x0CDB20DE
#: The limit on bytes of a chunk, if the rows of its array can be divided.
_CHUNK_BYTES = 64 << 20
#: The longest node. Readers hold it in memory.
_MAX_NODE_BYTES = 64 << 20
_ALIGNMENT = 64
#: Types of keys in Orbax's tree.
_INDEX, _KEY = 1, 2
_MAX_INT64 = 1 << 63

#: A value of the database: its bytes, or file, offset and length.
_Value = bytes | tuple[int, int, int]
#: Dtypes that the driver of Orbax for Zarr does not know.
_NOT_IN_ZARR = frozenset({"uint2", "uint4", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3"})


def _is_in_zarr(dtype: str) -> bool:
    return dtype not in _NOT_IN_ZARR


def plan(content: Content, options: FileOptions) -> list[OutputFile]:
    """Plans the data files, the database and the metadata."""
    check_dtypes(content.tensors, _is_in_zarr, "Orbax cannot restore", "Pass cast=, or leave them out")
    assert options.shard_bytes is not None, "the output is a directory"
    files: list[OutputFile] = []
    starts: dict[str, tuple[int, int]] = {}
    parts = shards(content.tensors, options.shard_bytes) if content.tensors else []
    for number, shard in enumerate(parts):
        file = OutputFile(f"data-{number:05}")
        for tensor in shard:
            file.add_bytes(bytes(-file.length % _ALIGNMENT))
            starts[tensor.name] = number, file.length
            file.add_tensor(tensor)
        files.append(file)
    tree = _Tree(content, starts)
    if tree.values:  # a node without values is invalid
        node = OutputFile("tree")
        node.add_bytes(_node([file.name for file in files], tree.values))
        whole = OutputFile("manifest.ocdbt")
        stored = sum(value[2] for value in tree.values.values() if isinstance(value, tuple))
        whole.add_bytes(_manifest(node.name, node.length, len(tree.values), stored))
        files += [node, whole]
    files.append(_json("_METADATA", tree.metadata()))
    if tree.strings:
        files.append(_json("_strings.json", tree.strings))
    return files


def paths(content: Content) -> dict[str, str]:
    """The rendered paths of the tensors in the output, by name. Keys of dicts are text."""
    return {
        value.name: render(("k", key) if kind == _KEY else ("x", int(key)) for key, kind in path)
        for path, value in _leaves(content.state, ())
        if isinstance(value, OutputTensor)
    }


def is_held(value: object) -> bool:
    """True for numbers, text, ``None``, and containers of these."""
    if isinstance(value, dict):
        return all(isinstance(key, (str, int)) for key in value) and all(map(is_held, value.values()))
    if isinstance(value, (list, tuple)):
        return all(map(is_held, value))
    if type(value) is int:
        return -_MAX_INT64 <= value < _MAX_INT64
    return value is None or type(value) in (float, str)


def _json(name: str, value: object) -> OutputFile:
    file = OutputFile(name)
    file.add_bytes(json.dumps(value).encode())
    return file


#: Keys, each with its type.
_Path: TypeAlias = tuple[tuple[str, int], ...]


def _leaves(value: object, path: _Path) -> Iterator[tuple[_Path, object]]:
    """The leaves of a state by path. An empty container is a leaf."""
    if isinstance(value, PlainValue):
        value = value.value
    if isinstance(value, dict) and value:
        for key, one in value.items():
            yield from _leaves(one, (*path, (str(key), _KEY)))
    elif isinstance(value, (list, tuple)) and value:
        for at, one in enumerate(value):
            yield from _leaves(one, (*path, (str(at), _INDEX)))
    else:
        yield path, value


class _Tree:
    """The rows of the tree, and the values of the database."""

    def __init__(self, content: Content, starts: dict[str, tuple[int, int]]) -> None:
        self.values: dict[str, _Value] = {}
        self.strings: dict[str, str] = {}
        self._rows: dict[str, object] = {}
        self._names: set[str] = set()
        self._ties = content.ties
        self._starts = starts
        for path, value in _leaves(content.state, ()):
            self._add(value, path)

    def metadata(self) -> dict[str, object]:
        """The content of ``_METADATA``."""
        return {
            "tree_metadata": self._rows,
            "use_ocdbt": True,
            "use_zarr3": False,
            "store_array_data_equal_to_fill_value": True,
            "custom_metadata": None,
        }

    def _add(self, value: object, path: _Path) -> None:
        name = ".".join(key for key, _ in path)
        if not all(key for key, _ in path) or not path:
            raise MisuseError(
                f"{named(name)}: Orbax has no arrays without a name or with an empty key. Rename it with map="
            )
        if name in self._names:
            raise MisuseError(
                f"two leaves have the name `{printable(name)}` in Orbax, which joins keys by dots. Rename one with map=, or leave it out with exclude="
            )
        self._names.add(name)
        is_array = False
        if isinstance(value, OutputTensor):
            kind, is_array = "np.ndarray", True
            self._add_array(name, value)
        elif isinstance(value, str):
            kind = "string"
            self.strings[name] = value
        elif isinstance(value, (int, float)):
            kind, is_array = "scalar", True
            array = np.asarray(value, "<i8" if isinstance(value, int) else "<f8")
            self.values[f"{name}/.zarray"] = _description(array.dtype, (), ())
            self.values[f"{name}/0"] = array.tobytes()
        else:
            kind = "None" if value is None else type(value).__name__.capitalize()
        self._rows[str(tuple(key for key, _ in path))] = {
            "key_metadata": [{"key": key, "key_type": number} for key, number in path],
            "value_metadata": {"value_type": kind, "skip_deserialize": not is_array and kind != "string"},
        }

    def _add_array(self, name: str, tensor: OutputTensor) -> None:
        chunk = _chunk_of(tensor)
        self.values[f"{name}/.zarray"] = _description(to_dtype(tensor.dtype), tensor.shape, chunk)
        if 0 in tensor.shape:
            return
        file, start = self._starts[self._ties.get(tensor.name, tensor.name)]
        nbytes = math.prod(chunk) * tensor.itemsize
        for number in range(tensor.nbytes // nbytes):
            key = ".".join(map(str, (number, *(0 for _ in chunk[1:])))) if chunk else "0"
            self.values[f"{name}/{key}"] = (file, start + number * nbytes, nbytes)


def _chunk_of(tensor: OutputTensor) -> tuple[int, ...]:
    """The shape of the chunks: equal parts of the first axis, or the whole array."""
    shape = tensor.shape
    if not shape or 0 in shape:
        return tuple(max(size, 1) for size in shape)
    least = -(-tensor.nbytes // _CHUNK_BYTES)
    counts = range(least, min(4 * least, shape[0]) + 1)
    count = next((count for count in counts if shape[0] % count == 0), 1)
    return (shape[0] // count, *shape[1:])


def _description(dtype: np.dtype, shape: Sequence[int], chunk: Sequence[int]) -> bytes:
    """The metadata of an array. A dtype that numpy does not know has its name."""
    is_numpy = dtype.isbuiltin == 1
    description = {
        "zarr_format": 2,
        "shape": list(shape),
        "chunks": list(chunk),
        "dtype": dtype.newbyteorder("<").str if is_numpy else dtype.name,
        "fill_value": None,
        "order": "C",
        "compressor": None,
        "filters": None,
        "dimension_separator": ".",
    }
    return json.dumps(description, separators=(",", ":")).encode()


def _node(files: Sequence[str], values: dict[str, _Value]) -> bytes:
    """The node of the tree: columns of all keys in order, then the values that are inside."""
    rows = sorted((key.encode(), value) for key, value in values.items())
    stored = [value for _, value in rows if isinstance(value, tuple)]
    inside = [value for _, value in rows if isinstance(value, bytes)]
    body = b"\0" + _files(files) + _varint(len(rows))
    body += _prefixed([key for key, _ in rows])
    body += _varints(value[2] if isinstance(value, tuple) else len(value) for _, value in rows)
    body += _varints(int(isinstance(value, tuple)) for _, value in rows)
    body += _varints(file for file, _, _ in stored) + _varints(offset for _, offset, _ in stored)
    found = _framed(_NODE, body + b"".join(inside))
    if len(found) > _MAX_NODE_BYTES:
        raise MisuseError(
            f"the names and places of {len(rows)} chunks take {len(found)} bytes, more than {_MAX_NODE_BYTES}. Convert a part with include= or subtree="
        )
    return found


def _manifest(node: str, length: int, keys: int, stored: int) -> bytes:
    """The manifest, with one version of the database."""
    # No uuid; values up to 100 bytes are inside nodes; 16 versions in a node; no compression.
    config = bytes(16) + _varints([0, 100, _MAX_NODE_BYTES]) + b"\4" + _varint(0)
    # Generation and height, then the place of the node, and the sums of what is below it.
    version = _varints([1, 1]) + b"\0" + _varints([0, 0, length, keys, length, stored])
    # No time of the commit, and no older versions.
    return _framed(_MANIFEST, config + _files([node]) + version + bytes(8) + _varint(0))


def _framed(magic: int, body: bytes) -> bytes:
    head = struct.pack(">I", magic) + struct.pack("<Q", len(body) + 18) + bytes(2)
    return head + body + struct.pack("<I", _core.crc32c(head + body))


def _files(names: Sequence[str]) -> bytes:
    """A table of data files. Their names have no common base."""
    paths = [name.encode() for name in names]
    lengths = _varints([0] * (len(paths) - 1)) + _varints(map(len, paths))
    return _varint(len(paths)) + lengths + _varints([0] * len(paths)) + b"".join(paths)


def _prefixed(keys: Sequence[bytes]) -> bytes:
    """Keys in order, each without what it shares with the one before it."""
    shared = [_common(one, other) for one, other in pairwise(keys)]
    rests = [key[length:] for key, length in zip(keys, [0, *shared], strict=True)]
    return _varints(shared) + _varints(map(len, rests)) + b"".join(rests)


def _common(one: bytes, other: bytes) -> int:
    pairs = zip(one, other, strict=False)
    return next((at for at, (left, right) in enumerate(pairs) if left != right), min(len(one), len(other)))


def _varints(numbers: Iterable[int]) -> bytes:
    return b"".join(map(_varint, numbers))


def _varint(number: int) -> bytes:
    """A number in groups of seven bits, the lowest first."""
    out = bytearray()
    while number >= 0x80:
        out.append(number & 0x7F | 0x80)
        number >>= 7
    out.append(number)
    return bytes(out)
