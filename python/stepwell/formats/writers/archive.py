"""Zip archives without compression, planned member by member.

The content of every member is aligned to 64 bytes. The checksums of tensors are known when they are
written: they follow the content, and are repeated in the central directory at the end.
"""

from __future__ import annotations

import struct
import zlib

from .output import OutputFile, OutputTensor

_ALIGNMENT = 64
#: Sizes and offsets, and numbers of members, from here on need the fields of zip64.
_LONG, _MANY = 0xFFFFFFFF, 0xFFFF
#: The other fields have these values then.
_NONE_32, _NONE_16 = 0xFFFFFFFF, 0xFFFF
#: The extra field that pads a local header: its number, as torch has it.
_PADDING = 0x4246
#: Names are UTF-8; the checksum follows the content.
_UTF8, _DESCRIPTOR = 0x800, 0x8
#: 1 January 1980: equal checkpoints give equal files.
_DATE = 0x21


class Archive:
    """An archive at the end of a file."""

    def __init__(self, file: OutputFile) -> None:
        self._file = file
        #: Its first byte in the file, a multiple of 64. Offsets in it count from there.
        self._begin = file.length
        #: Literal bytes that belong to no piece yet.
        self._literal = bytearray()
        #: Entries of the central directory: what stands before the checksum, the checksum or the
        #: pieces that it covers, and what stands after it.
        self._entries: list[tuple[bytes, bytes | tuple[int, int], bytes]] = []

    @property
    def _at(self) -> int:
        return self._file.length + len(self._literal) - self._begin

    def _flush(self) -> int:
        """Makes a piece of the literal bytes. Returns the number of the next piece."""
        if self._literal:
            self._file.add_bytes(bytes(self._literal))
            self._literal.clear()
        return len(self._file.pieces)

    def add(self, name: str, start: bytes, tensor: OutputTensor | None = None) -> None:
        """Adds a member: literal bytes, and perhaps a tensor behind them."""
        nbytes = len(start) + (0 if tensor is None else tensor.nbytes)
        header, text = self._at, name.encode()
        flags = _UTF8 if tensor is None else _UTF8 | _DESCRIPTOR
        crc = zlib.crc32(start) if tensor is None else 0
        is_long = nbytes >= _LONG
        size = _NONE_32 if is_long else nbytes
        version = 45 if is_long else 20
        sizes = struct.pack("<HHQQ", 1, 16, nbytes, nbytes) if is_long else b""
        # The padding has a head of four bytes.
        end = header + 30 + len(text) + len(sizes) + 4
        extra = sizes + struct.pack("<HH", _PADDING, -end % _ALIGNMENT) + bytes(-end % _ALIGNMENT)
        self._literal += struct.pack(
            "<4s5H3L2H", b"PK\x03\x04", version, flags, 0, 0, _DATE, crc, size, size, len(text), len(extra)
        )
        self._literal += text + extra
        covered: bytes | tuple[int, int] = struct.pack("<L", crc)
        if tensor is None:
            self._literal += start
        else:
            first = self._flush()
            if start:
                self._file.add_bytes(start)
            covered = (first, self._file.add_tensor(tensor))
            self._literal += b"PK\x07\x08"
            self._add_checksum(covered)
            self._literal += struct.pack("<QQ" if is_long else "<LL", nbytes, nbytes)
        long = [nbytes, nbytes] if is_long else []
        if header >= _LONG:
            long.append(header)
        wide = struct.pack(f"<HH{len(long)}Q", 1, 8 * len(long), *long) if long else b""
        self._entries.append(
            (
                struct.pack("<4s6H", b"PK\x01\x02", 45, 45 if long else 20, flags, 0, 0, _DATE),
                covered,
                struct.pack(
                    "<2L5H2L",
                    size,
                    size,
                    len(text),
                    len(wide),
                    0,
                    0,
                    0,
                    0,
                    _NONE_32 if header >= _LONG else header,
                )
                + text
                + wide,
            )
        )

    def _add_checksum(self, covered: bytes | tuple[int, int]) -> None:
        if isinstance(covered, bytes):
            self._literal += covered
        else:
            self._flush()
            self._file.add_crc32(*covered)

    def finish(self) -> None:
        """Adds the central directory."""
        begin, count = self._at, len(self._entries)
        for before, covered, after in self._entries:
            self._literal += before
            self._add_checksum(covered)
            self._literal += after
        length = self._at - begin
        is_long = count >= _MANY or begin + length >= _LONG
        if is_long:
            end = self._at
            self._literal += struct.pack(
                "<4sQ2H2L4Q", b"PK\x06\x06", 44, 45, 45, 0, 0, count, count, length, begin
            )
            self._literal += struct.pack("<4sLQL", b"PK\x06\x07", 0, end, 1)
        short = _NONE_16 if is_long else count
        self._literal += struct.pack(
            "<4s4H2LH",
            b"PK\x05\x06",
            0,
            0,
            short,
            short,
            _NONE_32 if is_long else length,
            _NONE_32 if is_long else begin,
            0,
        )
        self._flush()
