"""The stream that ``torch.save`` wrote before torch 1.6, and writes inside plain pickles.

Five pickles follow each other: a magic number, a version, facts about the writer, the object, and
the keys of its storages. Then each storage has the number of its elements in eight bytes, and its
bytes. All numbers are little-endian.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from .. import _core
from ..errors import FormatError
from .description import Place
from .files import corrupt, read, read_ranges
from .pickle_values import Found, Made, Malformed, Stream, opaque
from .pickled import Blob, Call, Elements, Pairs, Persistent
from .torch_symbols import Storage, StorageId, found_storage, storage_id

_MAGIC = 0x1950A86A20F9469CFC6C
_VERSION = 1001
#: The first bytes of a file that are read, the factor of the next read, and the most.
_FIRST_BYTES, _GROWTH, MAX_PICKLE_BYTES = 64 << 10, 4, 1 << 30


class StreamBytes(Protocol):
    """The bytes of a stream."""

    path: str
    #: The place behind them.
    end: int

    def pickle(self, at: int) -> tuple[object, int]:
        """The pickle at a place, and the place behind it."""

    def numbers(self, places: Sequence[int]) -> Sequence[int]:
        """The numbers of eight bytes at these places, which are in the file."""

    def place(self, at: int) -> Place | None:
        """The place in the file."""


class FileBytes:
    """A file, of which as many bytes are read as its pickles need."""

    def __init__(self, path: str) -> None:
        self.path = path
        self.data, self.end = read(path, 0, _FIRST_BYTES)

    def pickle(self, at: int) -> tuple[object, int]:
        """The pickle at a place, and the place behind it."""
        while True:
            parsed = _core.pickle(self.path, self.data, at, len(self.data))
            if parsed is not None:
                return parsed
            if len(self.data) >= self.end:
                raise corrupt(self.path, "the file ends in the middle of a pickle")
            if len(self.data) >= MAX_PICKLE_BYTES:
                raise FormatError(f"{self.path}: a pickle of more than {MAX_PICKLE_BYTES} bytes is not read")
            length = min(_GROWTH * len(self.data), MAX_PICKLE_BYTES)
            self.data, self.end = read(self.path, 0, length)

    def numbers(self, places: Sequence[int]) -> list[int]:
        """The numbers of eight bytes at these places, which are in the file."""
        ranges = [(self.path, at, 8) for at in places]
        return [int.from_bytes(one, "little") for one in read_ranges(ranges)]

    def place(self, at: int) -> Place | None:
        """The place in the file."""
        return self.path, at


class _PartBytes:
    """A part of a pickle."""

    def __init__(self, stream: Stream, end: int) -> None:
        self.path = stream.file
        self.end = end
        self._stream = stream

    def pickle(self, at: int) -> tuple[object, int]:
        """The pickle at a place, and the place behind it."""
        parsed = _core.pickle(self.path, self._stream.data, at, self.end)
        if parsed is None:
            raise Malformed("the bytes of a storage end in the middle of a pickle")
        return parsed

    def numbers(self, places: Sequence[int]) -> list[int]:
        """The numbers of eight bytes at these places."""
        return [int.from_bytes(self._stream.data[at : at + 8], "little") for at in places]

    def place(self, at: int) -> Place | None:
        """The place in the file."""
        place = self._stream.place
        return None if place is None else (place[0], place[1] + at)


def is_magic(value: object) -> bool:
    """True for the first pickle of a stream."""
    return type(value) is int and value == _MAGIC


class OldStream:
    """The pickles of a stream, and the places of its storages."""

    def __init__(self, source: StreamBytes, begin: int) -> None:
        """``begin`` is the place behind the magic number."""
        self._source = source
        version, at = source.pickle(begin)
        if type(version) is not int or version != _VERSION:
            raise corrupt(source.path, f"a stream of version {_VERSION} of torch.save was expected")
        _, at = source.pickle(at)
        #: The object.
        self.root, at = source.pickle(at)
        keys, at = source.pickle(at)
        if not isinstance(keys, list):
            raise corrupt(source.path, "the keys of the storages were expected")
        self._places = self._placed(keys, at)
        self._found: dict[str, Found] = {}

    def _placed(self, keys: Sequence[object], at: int) -> dict[str, tuple[int, StorageId]]:
        """The storages by their key, with the places of their bytes."""
        source = self._source
        known: dict[str, StorageId] = {}
        for one in _persistent_ids(self.root):
            if type(one) is tuple and one and type(one[0]) is str and one[0] == "module":
                continue  # torch < 1.6 names the classes of modules
            try:
                found = storage_id(one)
            except Malformed as error:
                raise corrupt(source.path, str(error)) from None
            if isinstance(found, str):
                raise FormatError(f"{source.path}: a storage of type {found} is not read")
            known[found.key] = found
        places: dict[str, tuple[int, StorageId]] = {}
        for key in keys:
            key = str(key) if type(key) is int else key
            if type(key) is not str or key not in known or key in places:
                raise corrupt(source.path, "the stream lists a storage that its object does not name once")
            one = known[key]
            places[key] = (at + 8, one)
            at += 8 + one.nbytes
        # The length of each storage is before it. A wrong length shifts all later storages, so the
        # first one is reported.
        inside = {key: place for key, place in places.items() if place[0] <= source.end}
        lengths = source.numbers([begin - 8 for begin, _ in inside.values()])
        for (key, (begin, one)), length in zip(inside.items(), lengths, strict=True):
            if length != one.numel:
                raise corrupt(
                    source.path, f"storage {key[:100]} has {length} elements, its object says {one.numel}"
                )
            if begin + one.nbytes > source.end:
                raise corrupt(source.path, f"the file ends in the middle of storage {key[:100]}")
        if len(inside) < len(places):
            key = next(key for key in places if key not in inside)
            raise corrupt(source.path, f"the file ends in the middle of storage {key[:100]}")
        return places

    def storage(self, persistent: object) -> Found:
        """The storage of a persistent id."""
        if type(persistent) is tuple and persistent and persistent[0] == "module":
            return opaque("a class of a module")
        one = storage_id(persistent)
        if isinstance(one, str):
            return opaque(one)
        if one.key not in self._places:
            raise Malformed(f"the stream has no storage {one.key[:100]}")
        at, whole = self._places[one.key]
        if (one.dtype, one.numel) != (whole.dtype, whole.numel):
            raise Malformed(f"storage {one.key[:100]} has two types")
        key, begin, size = (one.key, 0, one.numel) if one.view is None else one.view
        identity = f"{key} {begin} {size}"
        if identity not in self._found:
            place = self._source.place(at + begin * one.itemsize)
            found = Storage(one.key, place, size * one.itemsize, one.dtype)
            self._found[identity] = found_storage(found)
        return self._found[identity]


class NestedStreams:
    """Streams in the bytes of a plain pickle: one for each storage."""

    def __init__(self) -> None:
        #: Storages by the identity of their bytes, which the pickle keeps alive.
        self._known: dict[int, Found] = {}

    def load(self, made: Made) -> Found:
        """``torch.storage._load_from_bytes(bytes)``"""
        if not isinstance(made.call.args, tuple):
            raise Malformed("the bytes of a storage were expected")
        node = made.call.args[0]
        if id(node) not in self._known:
            self._known[id(node)] = self._read(node, made)
        return self._known[id(node)]

    def _read(self, node: object, made: Made) -> Found:
        if isinstance(node, Blob) and not node.is_text:
            source, at = _PartBytes(made.stream, node.start + node.length), node.start
        else:
            data = made.args[0].value
            if type(data) is not bytes:
                raise Malformed("the bytes of a storage were expected")
            stream = Stream(made.stream.file, data, made.stream.place_of(node))
            source, at = _PartBytes(stream, len(data)), 0
        first, at = source.pickle(at)
        if not is_magic(first):
            return opaque("torch storage of an unknown form")
        old = OldStream(source, at)
        if not isinstance(old.root, Persistent):
            return opaque("torch storage of an unknown form")
        return old.storage(old.root.id)


def _persistent_ids(root: object) -> list[object]:
    """All persistent ids below an object, unread parts included."""
    found: list[object] = []
    seen: set[int] = set()
    pending = [root]
    while pending:
        node = pending.pop()
        parts: Sequence[object]
        if isinstance(node, (list, tuple)):
            parts = node
        elif isinstance(node, Pairs):
            parts = node.flat
        elif isinstance(node, Elements):
            parts = node.items
        elif isinstance(node, Persistent):
            parts = (node.id,)
        elif isinstance(node, Call):
            parts = (node.callable, node.args, node.keywords, node.state, *node.items, *node.entries)
        else:
            continue
        if id(node) in seen:
            continue
        seen.add(id(node))
        if isinstance(node, Persistent):
            found.append(node.id)
        pending.extend(parts)
    return found
