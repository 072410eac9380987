"""Checksums of files of other libraries, which ``sw.adopt`` keeps in a file beside them.

Below a directory that was adopted, the file is ``.stepwell-checksums``; beside a single file, it is
``.NAME.stepwell-checksums``. It has a line of JSON with the checksums of the blocks of each file,
and a line with its own. The name of each file is relative to the directory. Times and inodes are
not kept: the checksums alone decide.
"""

from __future__ import annotations

import base64
import binascii
import json
import logging
import os
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from .. import _core
from .._locations import MANIFEST
from ..errors import CorruptCheckpoint, MisuseError, StepwellError
from . import lookup, roots
from .description import MAX_SIZE, Description, Guarded
from .files import corrupt, is_file_name, is_path_below, read, read_whole
from .lookup import Stamp

_NAME = ".stepwell-checksums"
#: The temporary name of that file.
_NEW = ".new"
_VERSION = 1
#: The end of the line of JSON, behind its rows.
_END = b"]}"
#: Bytes of a block.
_BLOCK_BYTES = 64 << 10
#: The longest file of checksums: those of 12 TB.
_MAX_BYTES = 1 << 30
#: A time that is longer than a tick of the clocks of common file systems.
_TICK_NS = 50_000_000
#: Directories above a file in which its checksums are looked for, and below a checkpoint.
_ABOVE, _MAX_DEPTH = 3, 32

Progress: TypeAlias = Callable[[int, int], object]
#: File, block, leaves, description.
DamageRow: TypeAlias = tuple[str, int | None, list[str], str]


@dataclass(frozen=True, slots=True)
class AdoptedRow:
    """A file, with the checksums of its blocks."""

    length: int
    crcs: bytes


@dataclass(frozen=True, slots=True)
class Adoption:
    """The checksums of the files below a directory."""

    #: The directory, and the file with the checksums.
    directory: str
    file: str
    #: By name, relative to the directory.
    rows: Mapping[str, AdoptedRow]
    block_bytes: int
    #: The bytes of the file up to the end of its last row, and their CRC-32C. A file that gets more
    #: rows begins with the same bytes.
    length: int
    crc: str
    #: The reading that the files belong to.
    reading: _core.Reading = field(default_factory=lookup.reading, compare=False)

    def check_in(self, reading: _core.Reading) -> None:
        """Has the reads of these files checked in a reading."""
        try:
            for name, row in self.rows.items():
                reading.adopt(self.path(name), self.block_bytes, row.length, row.crcs)
        except (MisuseError, ValueError, OverflowError) as error:
            raise _damaged(self.file, str(error)) from error

    def nbytes_of(self, path: str) -> int:
        """Bytes of the files of a checkpoint."""
        name = os.path.relpath(path, self.directory)
        return sum(
            row.length
            for one, row in self.rows.items()
            if name in (os.curdir, one) or one.startswith(name + os.sep)
        )

    def path(self, name: str) -> str:
        """The path of a file, without links."""
        return lookup.real(os.path.join(self.directory, name))

    def verify(self, known: Iterable[str], progress: Progress | None) -> tuple[int, int, list[DamageRow]]:
        """Compares the files with their checksums, except those with the paths ``known``. Returns
        files, bytes, and the damage."""
        with self.reading:
            skipped, files = set(known), []
            damages: list[DamageRow] = []
            for name in self.rows:
                place = self.path(name)
                if not lookup.is_file(place):
                    damages.append(
                        (
                            os.path.join(self.directory, name),
                            None,
                            [],
                            f"it is missing. Its checksums are in {self.file}",
                        )
                    )
                elif place not in skipped:
                    files.append(place)
            if not files:
                return 0, 0, damages
            description = Description("files", self.directory, {}, files=files)
            self.check_in(description.reading)
            core = description.open("auto")
            try:
                count, nbytes, _, found = core.verify(progress)
            finally:
                core.close()
            return count, nbytes, damages + found


def place(path: str) -> str:
    """The file with the checksums of a checkpoint."""
    if lookup.is_dir(path):
        return os.path.join(path, _NAME)
    return os.path.join(os.path.dirname(path), f".{os.path.basename(path)}{_NAME}")


def of(path: str) -> Adoption | None:
    """Returns the checksums of a checkpoint; ``None`` without any of its own."""
    file = place(path)
    directory = path if lookup.is_dir(path) else os.path.dirname(path)
    return _read(directory, file) if lookup.is_named(file) else None


def find(path: str) -> Adoption | None:
    """Returns the checksums of a checkpoint, or of one that it is a part of; ``None`` if it was not
    adopted. Those of a link to a file may be at the file."""
    found = _find(path)
    if found is None and os.path.islink(path) and lookup.is_file(path):
        found = _find(lookup.real(path))
    return found


def _find(path: str) -> Adoption | None:
    if (found := of(path)) is not None:
        return found
    above = path
    for _ in range(_ABOVE):
        above = os.path.dirname(above)
        name = os.path.relpath(path, above)
        if lookup.is_file(file := os.path.join(above, _NAME)) and (found := _above(above, file, name)):
            is_part = any(one == name or one.startswith(name + os.sep) for one in found.rows)
            return found if is_part else None
    return None


def _above(directory: str, file: str, name: str) -> Adoption | None:
    """The checksums in a directory above. A damaged file is passed over, with a warning, if it does
    not have the checkpoint's name: anyone may have put it there."""
    try:
        return _read(directory, file)
    except StepwellError as error:
        if _mentions(file, name):
            raise
        logging.getLogger("stepwell").warning("ignoring checksums above the checkpoint: %s", error)
        return None


def _mentions(file: str, name: str) -> bool:
    """True if a damaged file of checksums has a name, or one below it."""
    try:
        text = read_whole(file, _MAX_BYTES, lambda length: _damaged(file, f"{length} bytes"))
    except StepwellError:
        return False
    quoted = json.dumps(name).encode()
    return quoted in text or quoted[:-1] + b"/" in text


def _damaged(file: str, what: str) -> CorruptCheckpoint:
    return corrupt(file, f"these checksums are damaged ({what}). Delete the file, and adopt again")


def _read(directory: str, file: str) -> Adoption:
    def too_long(length: int) -> Exception:
        return _damaged(file, f"{length} bytes")

    with lookup.reading():  # not one of the files that are adopted
        text, _, rest = read_whole(file, _MAX_BYTES, too_long).partition(b"\n")
    if rest.strip() != b"%08x" % _core.crc32c(text):
        raise _damaged(file, "they do not have their own checksum")
    try:
        content = json.loads(text)
        if content["stepwell_checksums"] != _VERSION:
            raise _damaged(file, f"version {content['stepwell_checksums']!r}, not {_VERSION}")
        block_bytes, rows = content["block_bytes"], {}
        if type(block_bytes) is not int or not 0 < block_bytes < MAX_SIZE:
            raise _damaged(file, f"blocks of {str(block_bytes)[:40]} bytes")
        for row in content["files"]:
            name, length = str(row["path"]), row["bytes"]
            if not is_path_below(name) or type(length) is not int or not 0 <= length < MAX_SIZE:
                raise _damaged(file, f"a row for {name[:100]!r}")
            rows[name] = AdoptedRow(length, base64.b64decode(row["crc32c"], validate=True))
    except (ValueError, KeyError, TypeError, RecursionError, binascii.Error) as error:
        raise _damaged(file, f"{type(error).__name__}: {error}") from error
    return Adoption(directory, file, rows, block_bytes, *_rows_of(text))


def _rows_of(text: bytes) -> tuple[int, str]:
    """The bytes of checksums up to the end of the last row, and their CRC-32C."""
    begin = text.removesuffix(_END)
    return len(begin), f"{_core.crc32c(begin):08x}"


def begins_with(known: Adoption, length: int, crc: str) -> bool:
    """True if the file of these checksums begins with bytes of that length and CRC-32C. Then it has
    the same rows as before, and maybe more."""
    return f"{_core.crc32c(read(known.file, 0, length)[0]):08x}" == crc


def write(
    path: str,
    files: Sequence[str],
    guarded: Callable[[], Mapping[str, Sequence[Guarded]]],
    before: Adoption | None,
    progress: Progress | None,
) -> Adoption:
    """Computes the checksums of files and keeps them for a checkpoint. A range with a checksum of
    its own is compared with it, and a file with its checksums ``before``."""
    directory = path if lookup.is_dir(path) else os.path.dirname(path)
    stamps = _settled(files)
    core = Description("files", path, {}, files=files, guarded=guarded).open("auto")
    try:
        sums = core.checksums(_BLOCK_BYTES, progress)
    finally:
        core.close()
    for file, stamp in zip(files, stamps, strict=True):
        if lookup.stamp(file) != stamp:
            raise _changing(file)
    rows = {
        os.path.relpath(file, directory): AdoptedRow(stamp[0], crcs)
        for file, stamp, crcs in zip(files, stamps, sums, strict=True)
    }
    if before is not None:
        _check_same(before, rows)
        # New rows come last: steps of roots name the first ones.
        rows = {name: rows[name] for name in (*before.rows, *rows)}
    content = {
        "stepwell_checksums": _VERSION,
        "block_bytes": _BLOCK_BYTES,
        "files": [
            {"path": name, "bytes": row.length, "crc32c": base64.b64encode(row.crcs).decode()}
            for name, row in rows.items()
        ],
    }
    text = json.dumps(content)
    _core.write_record(place(path), f"{text}\n{_core.crc32c(text.encode()):08x}\n")
    return Adoption(directory, place(path), rows, _BLOCK_BYTES, *_rows_of(text.encode()))


def _settled(files: Sequence[str]) -> list[Stamp]:
    """Returns the stamps of files, once the next change of any of them would show. Within one tick
    of the file system's clock, a file may change twice and have one time."""
    newest = max((os.stat(file).st_mtime_ns for file in files), default=0)
    if abs(time.time_ns() - newest) < _TICK_NS:
        time.sleep(_TICK_NS / 1e9)
    stamps = [lookup.stamp(file) for file in files]
    for file, stamp in zip(files, stamps, strict=True):
        if stamp[1] > newest:
            raise _changing(file)
    return stamps


def _changing(file: str) -> CorruptCheckpoint:
    what = "it has changed while it was read. Adopt the checkpoint when its writer has ended"
    return corrupt(file, what)


def _check_same(before: Adoption, rows: Mapping[str, AdoptedRow]) -> None:
    """Raises if a file has changed since it was adopted: its new checksums would hide that."""
    changed = [name for name, row in before.rows.items() if rows.get(name) != row]
    gone = [name for name in changed if name not in rows and not lookup.is_named(before.path(name))]
    if gone:
        raise _not_same(before, gone, "is missing", ", and had checksums", "removed")
    if changed:
        raise _not_same(before, changed, "has changed since it was adopted", "", "changed")


def _not_same(before: Adoption, names: Sequence[str], what: str, more: str, done: str) -> CorruptCheckpoint:
    others = f", as {len(names) - 1} other files" if names[1:] else ""
    they = "they were" if names[1:] else "it was"
    return corrupt(
        os.path.join(before.directory, names[0]),
        f"it {what}{others}{more}. Pass replace=True if {they} {done} on purpose",
    )


def files_below(
    path: str, read: Collection[str], is_checkpoint: Callable[[str], bool]
) -> tuple[list[str], list[str]]:
    """The files of a checkpoint that is a directory, and directories that are left out because they
    are checkpoints of their own. A step of a root has all files below it.

    Steps of a root in it are not listed, and neither are checkpoints and checksums of stepwell. A
    link to a directory is followed if it has files that are ``read``."""
    listing = roots.find(path)
    steps = {step.path for step in listing.steps} if listing is not None else set()
    is_step = roots.containing(path) is not None
    found: list[str] = []
    others: list[str] = []
    pending = [(path, 0)]
    while pending:
        directory, depth = pending.pop()
        if depth > _MAX_DEPTH:
            raise MisuseError(f"{path} has more than {_MAX_DEPTH} directories in each other")
        for name in sorted(lookup.names(directory)):
            one = os.path.join(directory, name)
            if not is_file_name(name):
                raise MisuseError(f"{directory}: the name {name!a} is not UTF-8. Rename it")
            if one in steps or name.removesuffix(_NEW).endswith(_NAME):
                continue
            if lookup.is_dir(one):
                is_own = lookup.is_named(os.path.join(one, MANIFEST)) or name == ".stepwell"
                is_read = any(file.startswith(one + os.sep) for file in read)
                if is_own or (os.path.islink(one) and not is_read):
                    continue
                if is_read or is_step or not is_checkpoint(one):
                    pending.append((one, depth + 1))
                else:
                    others.append(one)
            elif lookup.is_file(one):
                found.append(one)
    return sorted(found), sorted(others)
