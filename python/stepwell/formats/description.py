"""The description of a checkpoint by its format module, and how the engine opens it."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Literal, Protocol, TypeAlias

from .. import _core
from .._manifest import Manifest
from .._paths import Component, printable
from .._restore import collector as collecting
from .._state.specs import to_dtype
from ..errors import FormatError
from . import lookup
from .lookup import Stamp

if TYPE_CHECKING:
    from .adoption import Adoption

#: Sizes, offsets and numbers in paths are below this, so that the engine can count their bytes.
MAX_SIZE = 1 << 62


@dataclass(frozen=True, slots=True)
class Compressed:
    """A file that is a compressed stream in another file."""

    #: Path of that file. Empty: the memory of the description.
    file: str
    #: The first byte of the stream in it, and the bytes of the stream.
    offset: int
    nbytes: int
    #: Bytes of its content.
    length: int
    #: CRC-32 of its content, if one is known.
    crc: int | None
    compression: Literal["deflate", "zstd", "latin1", "stored"] = "deflate"


@dataclass(frozen=True, slots=True)
class Unlocated:
    """A part of a file whose first byte is found when it is needed. Only the parts that a restore
    reads are looked for. Offsets of chunks in it count from that byte."""

    #: Path of the file.
    file: str
    #: Its name for the locator.
    key: Hashable
    locator: Locator = field(repr=False)


class Locator(Protocol):
    """Finds parts of files."""

    def locate(self, chunks: Sequence[Chunk]) -> Sequence[Chunk]:
        """Returns these chunks of unlocated parts with their files and layouts."""


#: A range of a file: offset, bytes, and their CRC-32.
Guarded: TypeAlias = tuple[int, int, int]
#: A file, a compressed one, or a part of one, and an offset in it.
Place: TypeAlias = tuple[str | Compressed | Unlocated, int]


@dataclass(frozen=True, slots=True)
class Chunk:
    """A box of a tensor in a file. Unless stated otherwise, its elements are row-major and
    little-endian."""

    #: Path of the file, or a compressed or unlocated one.
    file: str | Compressed | Unlocated
    #: Its first byte, and the number of bytes from there to the end of its last element.
    offset: int
    nbytes: int
    #: First element and number of elements along each dimension. A run of the flattened tensor has
    #: one of each.
    start: tuple[int, ...]
    extent: tuple[int, ...]
    #: Bytes between neighbours along each dimension; ``None``: row-major. Zero repeats an element.
    strides: tuple[int, ...] | None = None
    #: True if the most significant byte of a number is the first one.
    big_endian: bool = False
    #: The numbers of which the negative is stored: all of them, or imaginary parts.
    negated: Literal["", "all", "imaginary"] = ""


@dataclass(frozen=True, slots=True)
class Tensor:
    """A logical tensor, and the chunks that make it up."""

    #: The name that numpy or ml_dtypes gives its dtype.
    dtype: str
    shape: tuple[int, ...]
    chunks: tuple[Chunk, ...]


@dataclass(frozen=True, slots=True)
class Opaque:
    """A value that is known by its name only. It is listed, and cannot be restored."""

    #: A class, or a dtype that no array has.
    what: str

    def __repr__(self) -> str:
        return f"<opaque {self.what}>"


@dataclass(frozen=True, slots=True)
class Value:
    """A list, tuple or dict that is one leaf: it has plain values only."""

    value: object


@dataclass(frozen=True, slots=True)
class Copy:
    """A tensor that is in the files twice."""

    #: Its leaf in the state.
    leaf: tuple[Component, ...]
    #: The tensor that the state has, and the other one.
    read: Tensor
    other: Tensor


@dataclass(slots=True)
class Description:
    """A checkpoint of another library."""

    #: The format, as users call it.
    family: str
    #: The path that was recognised.
    path: str
    #: Dicts, lists and tuples with :class:`Tensor`, :class:`Opaque`, :class:`Value` or plain values
    #: as leaves. A tensor that occurs twice is a tie.
    state: object
    #: Text that the files carry beside the tensors.
    metadata: Mapping[str, str] = field(default_factory=dict)
    #: Files of the checkpoint, and compressed parts of them, also those without a tensor.
    files: Sequence[str | Compressed] = ()
    #: Returns the ranges that have checksums, by file. Those of one file do not overlap.
    guarded: Callable[[], Mapping[str, Sequence[Guarded]]] = dict
    #: Tensors that the state leaves out, because another one has to have the same values.
    copies: Sequence[Copy] = ()
    #: Bytes of small tensors that are no file.
    memory: bytes = b""
    #: The number of the step that it is, if it has one.
    step: int | None = None
    #: True if it was found as a step of a root, whose number may be unknown.
    of_root: bool = False
    #: The path of the checkpoint of stepwell that has the rest of this step.
    ours: str | None = None
    #: The checksums of its files, if it was adopted.
    adoption: Adoption | None = None
    #: The reading that its files belong to.
    reading: _core.Reading = field(default_factory=lookup.reading)
    #: The stamps of its files when it was opened.
    stamps: Mapping[str, Stamp] = field(default_factory=dict)

    def own_files(self) -> list[str]:
        """The paths of its files."""
        rows = _Rows()
        rows.add(self.state, 0, None)
        found = {self.path, *map(_path_of, self.files), *map(_path_of, rows.files)}
        return sorted(file for file in found if lookup.is_file(file))

    @collecting.paused()
    def open(self, engine: str, given: str | None = None, step: Manifest | None = None) -> _core.Checkpoint:
        """Opens it. ``given``: the path that the caller has passed, if it is another one. ``step``:
        the manifest of the step that adopted it."""
        with self.reading:
            return self._opened(engine, given or self.path, step)

    def _opened(self, engine: str, given: str, step: Manifest | None) -> _core.Checkpoint:
        rows = _Rows()
        rows.add(self.state, 0, None)
        for own in self.files:
            rows.file(own)
        if not rows.files and lookup.is_file(self.path):
            rows.file(self.path)
        # Links are followed here: a hub's cache has its files behind links.
        real = {file: lookup.real(file) for file in map(_path_of, rows.files) if file}
        found = real.values() or [lookup.real(self.path)]
        directory = lookup.common(one if lookup.is_dir(one) else os.path.dirname(one) for one in found)
        self.stamps = {file: lookup.stamp(place) for file, place in real.items()}
        names = {file: os.path.relpath(place, directory) for file, place in real.items()} | {"": ""}
        newest = max((stamp[1] for stamp in self.stamps.values()), default=0)
        files: list[_core._ForeignFile] = []
        for file in rows.files:
            name = names[_path_of(file)]
            if isinstance(file, Compressed):
                stream = (file.compression, file.offset, file.nbytes, file.crc)
                files.append((name, file.length, stream))
            else:
                files.append((name, self.stamps[file][0], None))
        manifest: Manifest = {
            "format_version": 0,
            "required_features": [],
            "writer": self.family,
            "step": self.step or 0,
            "started_unix_ns": newest,
            "committed_unix_ns": newest,
            "world_size": 1,
            "plan_hash": "",
            "items": [
                {
                    "name": ".",
                    "dir": "",
                    "index": {"path": "", "length": 0, "crc32c": ""},
                    "top_level": [],
                    "leaves": len(rows.leaves),
                    "tensor_bytes": rows.nbytes,
                }
            ],
            "files": [
                {"path": name, "length": self.stamps[file][0], "trailer_crc32c": "", "file_id": ""}
                for file, name in names.items()
                if file
            ],
            "dropped": [],
            "metrics": {},
            "custom_metadata": dict(self.metadata) or None,
        }
        if step is not None:
            manifest["step"], manifest["adopted"] = step["step"], step["adopted"]
            manifest["started_unix_ns"] = step["started_unix_ns"]
            manifest["committed_unix_ns"] = step["committed_unix_ns"]
            manifest["metrics"] = step["metrics"]
            if step["custom_metadata"] is not None:
                manifest["custom_metadata"] = step["custom_metadata"]
        return _core.Checkpoint.foreign(
            given,
            directory,
            files,
            rows.nodes,
            rows.leaves,
            rows.objects,
            _Details(rows, self.guarded, self.reading),
            self.memory,
            json.dumps(manifest),
            engine,
        )


def of_parts(family: str, path: str, parts: Mapping[str, Description]) -> Description:
    """Returns the description of several checkpoints as a dict of them, by name."""
    for name, part in parts.items():
        if part.memory:  # its tensors have places in it
            raise FormatError(
                f"{path}: its part `{printable(name)}` is of {part.family}, which is read alone. Open {part.path}"
            )

    def guarded() -> Mapping[str, Sequence[Guarded]]:
        return {file: ranges for part in parts.values() for file, ranges in part.guarded().items()}

    return Description(
        family,
        path,
        {name: part.state for name, part in parts.items()},
        {key: text for part in parts.values() for key, text in part.metadata.items()},
        [file for part in parts.values() for file in part.files or [part.path]],
        guarded,
        [
            replace(copy, leaf=(("k", name), *copy.leaf))
            for name, part in parts.items()
            for copy in part.copies
        ],
    )


class _Rows:
    """The description in the engine's form."""

    def __init__(self) -> None:
        self.files: dict[str | Compressed, int] = {}
        self.nodes: list[_core._ForeignNode] = []
        self.leaves: list[_core._ForeignLeaf] = []
        self.objects: dict[int, object] = {}
        #: Tensors with unlocated chunks, by leaf.
        self.unlocated: dict[int, Tensor] = {}
        #: Bytes of all tensors.
        self.nbytes = 0
        #: Tensors by identity, with their leaf.
        self._seen: dict[int, int] = {}

    def add(self, state: object, parent: int, component: Component | None) -> None:
        """Adds a value and what is below it, parents first."""
        pending: list[tuple[object, int, Component | None]] = [(state, parent, component)]
        while pending:
            value, above, place = pending.pop()
            number = len(self.nodes)
            children: list[tuple[Component, object]] | None = None
            if isinstance(value, dict):
                children = [(("i" if isinstance(key, int) else "k", key), one) for key, one in value.items()]
            elif isinstance(value, (list, tuple)):
                children = [(("x", at), one) for at, one in enumerate(value)]
            if children is None:
                self.nodes.append((above, place, None))
                self._add_leaf(value)
                continue
            self.nodes.append((above, place, type(value).__name__))
            pending.extend((child, number, key) for key, child in reversed(children))

    def _add_leaf(self, value: object) -> None:
        leaf = len(self.leaves)
        if not isinstance(value, Tensor):
            self.objects[leaf] = value.value if isinstance(value, Value) else value
            self.leaves.append((None, None))
        elif id(value) in self._seen:
            self.leaves.append((None, self._seen[id(value)]))
        else:
            self._seen[id(value)] = leaf
            self.nbytes += sum(one.nbytes for one in value.chunks)
            chunks = None
            if any(isinstance(one.file, Unlocated) for one in value.chunks):
                self.unlocated[leaf] = value
                for one in value.chunks:
                    self.file(one.file.file if isinstance(one.file, Unlocated) else one.file)
            else:
                chunks = [self.chunk(value, one) for one in value.chunks]
            self.leaves.append(((value.dtype, value.shape, chunks), None))

    def file(self, file: str | Compressed) -> int:
        """The number of a file."""
        return self.files.setdefault(file, len(self.files))

    def chunk(self, tensor: Tensor, chunk: Chunk) -> _core._ForeignChunk:
        """A located chunk."""
        assert not isinstance(chunk.file, Unlocated)
        if isinstance(chunk.file, Compressed) and chunk.file.file:
            # The file around it is checked too, and read by a verification.
            self.file(chunk.file.file)
        file = self.file(chunk.file)
        layout = None
        if chunk.strides is not None or chunk.big_endian or chunk.negated:
            strides = chunk.strides
            if strides is None:
                strides = row_major(chunk.extent, to_dtype(tensor.dtype).itemsize)
            layout = (strides, chunk.big_endian, chunk.negated)
        return file, chunk.offset, chunk.nbytes, chunk.start, chunk.extent, layout


class _Details:
    """Answers questions of the engine about an open checkpoint."""

    def __init__(
        self,
        rows: _Rows,
        guarded: Callable[[], Mapping[str, Sequence[Guarded]]],
        reading: _core.Reading,
    ) -> None:
        self._rows = rows
        self._guarded = guarded
        self._reading = reading

    def chunks(self, leaves: Sequence[int]) -> list[list[_core._ForeignChunk]]:
        """The chunks of tensors that had unlocated ones."""
        tensors = [self._rows.unlocated[leaf] for leaf in leaves]
        by_locator: dict[int, tuple[Locator, list[Chunk]]] = {}
        for chunk in (chunk for tensor in tensors for chunk in tensor.chunks):
            if isinstance(chunk.file, Unlocated):
                locator = chunk.file.locator
                by_locator.setdefault(id(locator), (locator, []))[1].append(chunk)
        located: dict[int, Chunk] = {}
        for locator, some in by_locator.values():
            with self._reading:
                located.update(zip(map(id, some), locator.locate(some), strict=True))
        return [
            [self._rows.chunk(tensor, located.get(id(chunk), chunk)) for chunk in tensor.chunks]
            for tensor in tensors
        ]

    def guarded(self) -> list[tuple[int, Sequence[Guarded]]]:
        """The ranges of each file that have checksums."""
        with self._reading:
            return [(self._rows.file(file), ranges) for file, ranges in self._guarded().items()]


def file_of(tensor: Tensor) -> str:
    """Returns the path of the first file that a tensor is in; the empty one without an element."""
    for chunk in tensor.chunks:
        return _path_of(chunk.file.file if isinstance(chunk.file, Unlocated) else chunk.file)
    return ""


def _path_of(file: str | Compressed) -> str:
    return file.file if isinstance(file, Compressed) else file


def fits(shape: Sequence[int], itemsize: int) -> bool:
    """True if every size of an array and its row-major strides are below :data:`MAX_SIZE`. A size
    of zero makes an array empty, and bounds no other size."""
    return math.prod(size for size in shape if size) * itemsize < MAX_SIZE


def row_major(extent: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    """Distances between neighbours along each dimension of a row-major array: bytes, or elements
    with an ``itemsize`` of 1."""
    strides = [itemsize] * len(extent)
    for axis in range(len(extent) - 1, 0, -1):
        strides[axis - 1] = strides[axis] * max(extent[axis], 1)
    return tuple(strides)
