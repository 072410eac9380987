"""Archives of ``torch.save``: a whole file, or a part of a file of DCP.

An archive has the pickle of the object in ``data.pkl``, and its storages as members by key.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

from .. import _core
from ..errors import FormatError
from . import lookup
from .description import Chunk, Compressed, Guarded, Place, Unlocated
from .files import corrupt, guarded, read
from .old_torch_stream import MAX_PICKLE_BYTES
from .pickle_values import Found, Malformed, Stream, opaque
from .torch_symbols import Storage, StorageId, found_storage, storage_id

#: The longest pickle that is inflated.
_MAX_INFLATED_BYTES = 64 << 20
#: A longer one has at most so many times its compressed bytes.
_INFLATED_BYTES, _INFLATED_RATIO = 1 << 20, 256


def roots_of(names: Iterable[str]) -> list[str]:
    """The directories with the record ``data.pkl``."""
    return [
        name.removesuffix("/data.pkl")
        for name in names
        if name.endswith("/data.pkl") and name.count("/") == 1
    ]


class _Member(NamedTuple):
    """A member of an archive."""

    name: str
    method: str
    #: `None`: the archive has no checksums.
    crc: int | None
    stored_length: int
    length: int

    @property
    def is_stored(self) -> bool:
        """True if its bytes are in the file as they are."""
        return self.method == "stored"


class Archive:
    """An archive of ``torch.save``: a file, or a part of one."""

    def __init__(
        self,
        path: str,
        members: Sequence[_core._ZipMember],
        offsets: Sequence[int] | _core.ZipDirectory,
        contents: Mapping[str, bytes] | None = None,
        stream: Compressed | None = None,
    ) -> None:
        """``offsets`` are those of the members' contents, or the directory that finds them."""
        self.path = path
        #: The stream that it is in the file, if it is compressed as a whole.
        self._stream = stream
        self._members = {one[0]: _Member(*one) for one in members}
        roots = roots_of(self._members)
        if len(roots) != 1:
            raise corrupt(
                path, f"an archive with one data.pkl was expected; this one has {len(roots)} members data.pkl"
            )
        #: The directory of its records.
        self.root = roots[0]
        #: Finds members without an offset.
        self._directory: _core.ZipDirectory | None = None
        self._offsets: dict[str, int] = {}
        if isinstance(offsets, _core.ZipDirectory):
            self._directory = offsets
            self._numbers = {name: number for number, name in enumerate(self._members)}
            # A compressed member is a file of its own, which the engine must know from the start.
            is_stored = all(one.is_stored for one in self._members.values())
            first = [f"{self.root}/{record}" for record in ("data.pkl", "byteorder")]
            self._find([name for name in first if name in self._members] if is_stored else self._members)
        else:
            self._offsets = dict(zip(self._members, offsets, strict=True))
        #: Contents of members that were read with its directory.
        self._contents = contents or {}
        order = self._text("byteorder")
        if order not in ("", "little", "big"):
            raise corrupt(path, f"member byteorder names an order {order!r} of bytes")
        #: True if the most significant byte of a number is the first one.
        self.big_endian = order == "big"
        self._storages: dict[tuple[str, str | None], Found] = {}

    @classmethod
    def of_file(cls, path: str) -> Archive | None:
        """The archive that is a whole file. ``None`` if ``torch.save`` did not write it."""
        directory = _core.ZipDirectory(lookup.real(path))
        members = directory.members()
        return cls(path, members, directory) if roots_of(one[0] for one in members) else None

    @property
    def names(self) -> Collection[str]:
        """The names of its members."""
        return self._members

    def _find(self, names: Iterable[str]) -> None:
        """Reads the offsets of the contents of members, unless they are known."""
        missing = [name for name in dict.fromkeys(names) if name not in self._offsets]
        if missing and self._directory is not None:
            numbers = [self._numbers[name] for name in missing]
            self._offsets.update(zip(missing, self._directory.contents(numbers), strict=True))

    def locate(self, chunks: Sequence[Chunk]) -> list[Chunk]:
        """Returns chunks of storages with their places in the file."""
        names = [one.file.key for one in chunks if isinstance(one.file, Unlocated)]
        self._find(str(name) for name in names)
        return [
            replace(chunk, file=self.path, offset=self._offsets[str(name)] + chunk.offset)
            for chunk, name in zip(chunks, names, strict=True)
        ]

    @property
    def is_cut(self) -> bool:
        """True if the read part of a compressed archive does not have the whole pickle."""
        return self._stream is not None and f"{self.root}/data.pkl" not in self._contents

    @property
    def pickle_nbytes(self) -> int:
        """The bytes of the pickle."""
        return self._members[f"{self.root}/data.pkl"].length

    def guarded(self) -> list[Guarded]:
        """The ranges that have checksums."""
        if self._stream is not None:
            return []
        self._find(self._members)
        return guarded(self._members.values(), [self._offsets[name] for name in self._members])

    def streams(self) -> list[Compressed]:
        """Its compressed members, also those without a tensor."""
        if self._stream is not None:
            return []
        places = [self._file_of(member)[0] for member in self._members.values() if not member.is_stored]
        return [one for one in places if isinstance(one, Compressed)]

    def is_copy_of(self, other: Archive) -> bool | None:
        """True if its checksums say that it has the same content. ``None`` if one is missing."""
        mine, theirs = (
            {name.removeprefix(one.root): row.crc for name, row in one._members.items() if "/data" in name}
            for one in (self, other)
        )
        if None in mine.values() or None in theirs.values():
            return None
        return mine == theirs

    def data(self) -> bytes:
        """The bytes of the pickle of the object."""
        member = self._member("data.pkl")
        assert member is not None
        limit = MAX_PICKLE_BYTES
        if not member.is_stored:
            limit = min(_MAX_INFLATED_BYTES, max(_INFLATED_BYTES, _INFLATED_RATIO * member.stored_length))
        if member.length > limit:
            raise FormatError(
                f"{self.path}: data.pkl has {member.length} bytes, more than the {limit} that are read here"
            )
        data = self._content("data.pkl", member)
        if not member.is_stored:
            data = self._inflated(data, member)
        if member.crc is not None and zlib.crc32(data) != member.crc:
            raise corrupt(
                self.path,
                f"data.pkl at byte {self._offsets[member.name]} does not have its recorded checksum",
            )
        return data

    def pickle(self) -> tuple[Stream, object]:
        """The pickle of the object, and its inert root."""
        member, data = self._member("data.pkl"), self.data()
        assert member is not None
        parsed = _core.pickle(self.path, data, 0, len(data))
        if parsed is None:
            raise corrupt(
                self.path, f"data.pkl at byte {self._offsets[member.name]} ends in the middle of its pickle"
            )
        return Stream(self.path, data, self._file_of(member)), parsed[0]

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
        place = self.place(one.key, one.nbytes)
        return found_storage(Storage(one.key, place, one.nbytes, one.dtype, self.big_endian))

    def place(self, key: str, nbytes: int) -> Place:
        """The place of a storage of so many bytes."""
        member = self._member(f"data/{key}")
        if member is None:
            raise Malformed(f"the archive has no storage data/{key[:100]}")
        if member.length < nbytes:
            raise Malformed(f"storage data/{key[:100]} has {member.length} bytes of {nbytes}")
        return self._file_of(member._replace(length=nbytes) if self._stream else member)

    def _file_of(self, member: _Member) -> Place:
        """The place of a member's content."""
        offset = self._offsets.get(member.name)
        if offset is None:
            return Unlocated(self.path, member.name, self), 0
        if self._stream is not None:
            return replace(self._stream, length=offset + member.length), offset
        if member.is_stored:
            return self.path, offset
        return Compressed(self.path, offset, member.stored_length, member.length, member.crc), 0

    def _member(self, record: str) -> _Member | None:
        return self._members.get(f"{self.root}/{record}")

    def _content(self, record: str, member: _Member) -> bytes:
        """The stored bytes of a member with an offset."""
        known = self._contents.get(f"{self.root}/{record}")
        offset = self._offsets[member.name]
        return read(self.path, offset, member.stored_length)[0] if known is None else known

    def _text(self, record: str) -> str:
        """A short record of text; empty if there is none."""
        member = self._member(record)
        if member is None or member.length > 100 or not member.is_stored:
            return ""
        return self._content(record, member).decode("ascii", "replace")
