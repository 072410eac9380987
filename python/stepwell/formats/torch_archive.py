"""Archives of ``torch.save`` inside a file: those of DCP, with one tensor or one object each."""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .. import _core
from .description import Chunk, Guarded, Tensor
from .files import corrupt
from .pickle_values import Found, Malformed, Stream, opaque
from .torch_save import converted
from .torch_symbols import Storage, found_storage, storage_id


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """How the one tensor of an archive is laid out."""

    dtype: str
    shape: tuple[int, ...]
    chunk: Chunk


class ArchivedObject:
    """An archive inside a file: its members, and the contents of some by their numbers."""

    def __init__(self, file: str, members: Sequence[_core._ZipMember], records: Mapping[int, bytes]) -> None:
        self.file = file
        self._members = {member[0]: member for member in members}
        self._has_checksums = any(member[2] for member in members)
        pickles = [at for at in records if members[at][0].endswith("/data.pkl")]
        if len(pickles) != 1:
            raise corrupt(file, f"an archive with one data.pkl was expected, not with {len(pickles)}")
        (at,) = pickles
        self.root = members[at][0].removesuffix("/data.pkl")
        self._offset = members[at][3]
        #: The pickle of the object.
        self.data = records[at]
        if self._has_checksums and zlib.crc32(self.data) != members[at][2]:
            raise corrupt(file, f"data.pkl of the archive at byte {self._offset} has another checksum")
        orders = [data for at, data in records.items() if members[at][0] == f"{self.root}/byteorder"]
        self.big_endian = orders == [b"big"]

    def guarded(self) -> list[Guarded]:
        """The ranges that have checksums."""
        if not self._has_checksums:
            return []
        return [
            Guarded(self.file, offset, nbytes, crc)
            for _, method, crc, offset, nbytes, _ in self._members.values()
            if method == "stored"
        ]

    def is_copy_of(self, other: ArchivedObject) -> bool:
        """True if its checksums say that it has the same content."""
        mine, theirs = (
            {name.removeprefix(one.root): row[2] for name, row in one._members.items() if "/data" in name}
            for one in (self, other)
        )
        return self._has_checksums and mine == theirs

    def place(self, key: str, nbytes: int) -> int:
        """The offset of a storage of so many bytes."""
        member = self._members.get(f"{self.root}/data/{key}")
        if member is None:
            raise Malformed(f"the archive has no storage data/{key[:100]}")
        _, method, _, offset, _, length = member
        if method != "stored":
            raise Malformed(f"storage data/{key[:100]} is compressed")
        if length < nbytes:
            raise Malformed(f"storage data/{key[:100]} has {length} bytes of {nbytes}")
        return offset

    def value(self) -> object:
        """The object, for a state. Tensors in it are read from the file."""

        def storage(persistent: object) -> Found:
            one = storage_id(persistent)
            if isinstance(one, str):
                return opaque(one)
            offset = self.place(one.key, one.nbytes)
            key = f"{offset}"
            return found_storage(Storage(key, self.file, offset, one.nbytes, one.dtype, self.big_endian))

        parsed = _core.pickle(self.file, self.data, 0, len(self.data))
        if parsed is None:
            raise corrupt(self.file, f"data.pkl at byte {self._offset} ends in the middle of its pickle")
        stream = Stream(self.file, self.data, self._offset)
        return converted(stream, parsed[0], storage, self.guarded()).state


class Layouts:
    """The layouts of archived tensors. Archives of tensors that are alike have the same pickle, so
    each pickle is read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[bytes, bool], tuple[TensorLayout, str, int] | None] = {}

    def of(self, archive: ArchivedObject) -> TensorLayout | None:
        """The layout of an archive's tensor; ``None`` if it has another form."""
        key = (archive.data, archive.big_endian)
        if key not in self._known:
            self._known[key] = self._read(archive)
        known = self._known[key]
        if known is None:
            return None
        layout, storage, nbytes = known
        try:
            offset = archive.place(storage, nbytes)
        except Malformed as error:
            raise corrupt(archive.file, str(error)) from None
        chunk = replace(layout.chunk, file=archive.file, offset=layout.chunk.offset + offset)
        return TensorLayout(layout.dtype, layout.shape, chunk)

    def _read(self, archive: ArchivedObject) -> tuple[TensorLayout, str, int] | None:
        """The layout as if the storage began the file, the key of the storage, and its bytes."""
        keys: list[tuple[str, int]] = []

        def storage(persistent: object) -> Found:
            one = storage_id(persistent)
            if isinstance(one, str):
                return opaque(one)
            keys.append((one.key, one.nbytes))
            return found_storage(Storage(one.key, archive.file, 0, one.nbytes, one.dtype, archive.big_endian))

        parsed = _core.pickle(archive.file, archive.data, 0, len(archive.data))
        if parsed is None:
            raise corrupt(archive.file, "the pickle of a tensor ends in its middle")
        stream = Stream(archive.file, archive.data, None)
        value = converted(stream, parsed[0], storage, ()).state
        if not isinstance(value, Tensor) or len(value.chunks) != 1 or len(keys) != 1:
            return None
        ((key, nbytes),) = keys
        return TensorLayout(value.dtype, value.shape, value.chunks[0]), key, nbytes
