"""``torch.save``: zip archives, streams of torch < 1.6, plain pickles with tensors, and shards with
an index.

An archive has the pickle of the object in ``data.pkl``, and its storages as members by key. An old
stream has five pickles, then the storages in the order of the last one. torch is not imported.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from .. import _core
from ..errors import FormatError
from . import numpy_symbols, python_symbols
from .description import Description, Guarded
from .files import corrupt, read, weight_map
from .old_torch_stream import MAX_PICKLE_BYTES, FileBytes, NestedStreams, OldStream, is_magic
from .pickle_values import Converter, Found, Malformed, PersistentLoad, Stream, Symbol, opaque
from .rank_files import Distributions, rank_files, whole_state
from .torch_symbols import NAMES, Storage, StorageId, TensorSymbols, found_storage, storage_id

FAMILY = "torch.save"
_INDEX = ".bin.index.json"
#: The longest pickle that is inflated.
_MAX_INFLATED_BYTES = 64 << 20

_SYMBOLS: Mapping[tuple[str, str], Symbol] = {**python_symbols.SYMBOLS, **numpy_symbols.SYMBOLS}
_NAMES: Mapping[tuple[str, str], object] = {**python_symbols.NAMES, **NAMES}


@dataclass(frozen=True, slots=True)
class TorchFile:
    """The content of a file."""

    state: object
    guarded: Sequence[Guarded]
    distributions: Distributions


def describe(path: str) -> Description | None:
    """Describes a file, an index of shards, or a directory of ``save_pretrained`` or of verl."""
    if os.path.isdir(path):
        return _directory(path)
    if not os.path.isfile(path):
        return None
    if path.endswith(_INDEX):
        return _sharded(path)
    found = _content(path)
    return None if found is None else _description(path, found.state, {path: found})


def _description(path: str, state: object, files: Mapping[str, TorchFile]) -> Description:
    guarded = [one for file in files.values() for one in file.guarded]
    return Description(FAMILY, path, state, files=list(files), guarded=guarded)


def _directory(path: str) -> Description | None:
    names = sorted(os.listdir(path))
    whole = [name for name in names if name in ("pytorch_model.bin", "adapter_model.bin")]
    if len(whole) == 1:
        return describe(os.path.join(path, whole[0]))
    indexes = [name for name in names if name.endswith(_INDEX)]
    if len(indexes) > 1:
        raise corrupt(path, f"{len(indexes)} indexes ({', '.join(indexes)}); pass one of them")
    if indexes:
        return _sharded(os.path.join(path, indexes[0]))
    by_prefix = rank_files(path, names)
    return _of_ranks(path, by_prefix) if by_prefix else None


def _sharded(index: str) -> Description:
    """The shards that an index names. Tensors that it does not name are left out, as by other
    readers."""
    shards: dict[str, TorchFile] = {}
    found: dict[str, object] = {}
    for name, shard in weight_map(index):
        if shard not in shards:
            shards[shard] = _required(shard)
        state = shards[shard].state
        if not isinstance(state, dict):
            raise corrupt(shard, "a dict of tensors was expected")
        if name not in state:
            where = os.path.basename(shard)
            raise corrupt(index, f"tensor `{name}` is not in {where}, where the index places it")
        found[name] = state[name]
    return _description(index, found, shards)


def _of_ranks(path: str, by_prefix: Mapping[str, Sequence[str]]) -> Description:
    """The files of all ranks. With those of an optimizer the state has two parts."""
    files: dict[str, TorchFile] = {}
    states: dict[str, object] = {}
    for prefix, names in by_prefix.items():
        mine = {name: _required(name) for name in names}
        files |= mine
        of_ranks = list(mine.values())
        states[prefix] = whole_state(
            path, [one.state for one in of_ranks], [one.distributions for one in of_ranks]
        )
    return _description(path, states if len(states) > 1 else next(iter(states.values())), files)


def _required(path: str) -> TorchFile:
    found = _content(path)
    if found is None:
        raise corrupt(path, "a file of torch.save was expected")
    return found


def _content(path: str) -> TorchFile | None:
    """The content of a file; ``None`` if torch.save did not write it."""
    start, _ = read(path, 0, 4)
    if start == b"PK\x03\x04":
        return _zip_content(path)
    if len(start) > 1 and start[0] == 0x80 and 2 <= start[1] <= 5:
        return _stream_content(path)
    return None


def _stream_content(path: str) -> TorchFile:
    """The content of an old stream, or of a plain pickle."""
    source = FileBytes(path)
    root, end = source.pickle(0)
    if not is_magic(root):
        return converted(Stream(path, source.data, 0), root, _no_storage, ())
    old = OldStream(source, end)
    return converted(Stream(path, source.data, 0), old.root, old.storage, ())


def _no_storage(_: object) -> Found:
    raise Malformed("a persistent id, and the file has no storages")


@dataclass(frozen=True, slots=True)
class _Member:
    """A member of an archive."""

    is_stored: bool
    crc: int
    offset: int
    stored_length: int
    length: int


class _Archive:
    """The members of a file of ``torch.save``."""

    def __init__(self, path: str, root: str, members: Mapping[str, _Member]) -> None:
        self.path = path
        self._root = root
        self._members = members
        #: Some writers leave the checksums out: all are zero.
        self.has_checksums = any(one.crc for one in members.values())
        order = self._text("byteorder")
        if order not in ("", "little", "big"):
            raise corrupt(path, f"member byteorder names an order {order!r} of bytes")
        self._big_endian = order == "big"
        self._storages: dict[tuple[str, str | None], Found] = {}

    def pickle(self) -> Stream:
        """The pickle of the object."""
        member = self._member("data.pkl")
        assert member is not None
        limit = MAX_PICKLE_BYTES if member.is_stored else _MAX_INFLATED_BYTES
        if member.length > limit:
            raise FormatError(
                f"{self.path}: data.pkl has {member.length} bytes, more than the {limit} that are read here"
            )
        data, _ = read(self.path, member.offset, member.stored_length)
        if not member.is_stored:
            data = self._inflated(data, member)
        if self.has_checksums and zlib.crc32(data) != member.crc:
            raise corrupt(self.path, "data.pkl does not have the checksum that was recorded")
        return Stream(self.path, data, member.offset if member.is_stored else None)

    def _inflated(self, data: bytes, member: _Member) -> bytes:
        try:
            inflated = zlib.decompressobj(-zlib.MAX_WBITS).decompress(data, member.length)
        except zlib.error as error:
            raise corrupt(self.path, f"data.pkl cannot be inflated: {error}") from None
        if len(inflated) != member.length:
            raise corrupt(self.path, f"data.pkl has {len(inflated)} bytes, its entry says {member.length}")
        return inflated

    def storage(self, persistent: object) -> Found:
        """The storage of a persistent id."""
        one = storage_id(persistent)
        if isinstance(one, str):
            return opaque(one)
        if (one.key, one.dtype) not in self._storages:
            self._storages[one.key, one.dtype] = self._place(one)
        return self._storages[one.key, one.dtype]

    def _place(self, one: StorageId) -> Found:
        member = self._member(f"data/{one.key}")
        if member is None:
            raise Malformed(f"the archive has no storage data/{one.key[:100]}")
        if not member.is_stored:
            raise FormatError(
                f"{self.path}: storage data/{one.key} is compressed. Write the archive again without compression"
            )
        if member.length < one.nbytes:
            raise Malformed(f"storage data/{one.key} has {member.length} bytes of {one.nbytes}")
        return found_storage(
            Storage(one.key, self.path, member.offset, one.nbytes, one.dtype, self._big_endian)
        )

    def _member(self, record: str) -> _Member | None:
        return self._members.get(f"{self._root}/{record}")

    def _text(self, record: str) -> str:
        """A short record of text. Returns an empty text if the archive has none."""
        member = self._member(record)
        if member is None or member.length > 100 or not member.is_stored:
            return ""
        return read(self.path, member.offset, member.length)[0].decode("ascii", "replace")


def _zip_content(path: str) -> TorchFile | None:
    members = {
        name: _Member(method == "stored", crc, offset, stored_length, length)
        for name, method, crc, offset, stored_length, length in _core.zip_members(os.path.realpath(path))
    }
    roots = [
        name.removesuffix("/data.pkl")
        for name in members
        if name.endswith("/data.pkl") and name.count("/") == 1
    ]
    if not roots:
        return None
    if len(roots) > 1:
        raise corrupt(path, f"the archive has {len(roots)} members data.pkl")
    root = roots[0]
    for record, what in _OTHERS:
        if any(name.startswith(f"{root}/{record}") for name in members):
            raise FormatError(f"{path}: {what}")
    archive = _Archive(path, root, members)
    stream = archive.pickle()
    parsed = _core.pickle(path, stream.data, 0, len(stream.data))
    if parsed is None:
        raise corrupt(path, "data.pkl ends in the middle of its pickle")
    guarded = [
        Guarded(path, one.offset, one.length, one.crc)
        for one in members.values()
        if archive.has_checksums and one.is_stored
    ]
    return converted(stream, parsed[0], archive.storage, guarded)


#: Members of archives of torch that are no checkpoints.
_OTHERS = (
    (
        "constants.pkl",
        "this is a program of TorchScript. Save module.state_dict() with torch.save instead",
    ),
    (".data/extern_modules", "this is a package of torch.package. Save a state_dict instead"),
)


def converted(
    stream: Stream, root: object, persistent: PersistentLoad, guarded: Sequence[Guarded]
) -> TorchFile:
    tensors = TensorSymbols()
    symbols = {
        **_SYMBOLS,
        **tensors.symbols,
        ("torch.storage", "_load_from_bytes"): NestedStreams().load,
    }
    found = Converter(stream, symbols, _NAMES, persistent).convert(root)
    return TorchFile(found.placed, guarded, tensors.distributions)
