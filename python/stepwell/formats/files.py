"""Bytes, errors and checksums of other libraries' files, and the index of a sharded checkpoint of
Hugging Face."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence

from .. import _core
from .._paths import printable
from ..errors import CorruptCheckpoint, FormatError, from_engine
from . import lookup
from .description import Guarded
from .lookup import Stamp

#: The longest index that is read.
_MAX_INDEX_BYTES = 256 << 20
#: The first bytes of a pointer of Git LFS.
_POINTER = b"version https://git-lfs"
#: The longest file of JSON that is read.
_MAX_JSON_BYTES = 256 << 20
#: Missing files, and ranks, that an error lists.
_LISTED, _LISTED_RANKS = 5, 10


def read(path: str, offset: int, length: int) -> tuple[bytes, int]:
    """Reads bytes of a file, and returns its length too. Links to files are followed."""
    return _core.read_foreign(lookup.real(path), offset, length)


def refuse_pointer(path: str) -> None:
    """Raises :class:`FormatError` for the pointer that Git LFS has in the place of a file."""
    if read(path, 0, len(_POINTER))[0] == _POINTER:
        raise FormatError(f"{path}: this is a Git LFS pointer, not the file. Run `git lfs pull`")


def read_ranges(ranges: Iterable[tuple[str, int, int]]) -> list[bytes]:
    """Reads many short ranges of files together: path, offset and length of each."""
    return _core.read_foreign_ranges([(lookup.real(path), offset, length) for path, offset, length in ranges])


def read_whole(path: str, limit: int, too_long: Callable[[int], Exception]) -> bytes:
    """Reads a file. Raises ``too_long`` of its length, and reads nothing, if it has more bytes than
    the limit."""
    length = read(path, 0, 0)[1]
    if length > limit:
        raise too_long(length)
    return read(path, 0, length)[0]


def json_value(path: str) -> object:
    """Reads a file of JSON."""

    def too_long(length: int) -> Exception:
        return corrupt(path, f"JSON of at most {_MAX_JSON_BYTES} bytes was expected, not of {length}")

    try:
        found: object = json.loads(read_whole(path, _MAX_JSON_BYTES, too_long))
    except (ValueError, RecursionError) as error:
        raise corrupt(path, f"it is no JSON: {error}") from error
    return found


def is_file_name(text: str) -> bool:
    """True if text of a file can be the name of a file in a directory."""
    return "/" not in text and is_path_below(text)


def is_path_below(text: str) -> bool:
    """True if text of a file can be the path of a file below a directory."""
    try:
        text.encode()
    except UnicodeEncodeError:  # JSON and pickles may have halves of characters
        return False
    return "\0" not in text and not {"", ".", ".."} & set(text.split("/"))


def corrupt(path: str, what: str) -> CorruptCheckpoint:
    """The error of a damaged file. Names from files may be in its text."""
    error = CorruptCheckpoint(printable(f"{path}: {what}"))
    error.file = path
    return error


def check_unwritten(stamps: Mapping[str, Stamp]) -> None:
    """Raises if a file was written to since its stamp. One that was replaced or removed was read as
    it was. An object is read in parts, so it must not be replaced."""
    if (changed := lookup.replaced_object(stamps)) is not None:
        raise corrupt(
            changed,
            "the object was replaced while it was read, so the restored values may be of two states. "
            "Restore again when its writer has ended",
        )
    for file, stamp in stamps.items():
        try:
            now = lookup.stamp(file)
        except FileNotFoundError:
            continue
        if now != stamp and now[2] == stamp[2]:
            raise corrupt(
                file,
                "it was written to while it was read, so the restored values may be of two states. "
                "Restore again when its writer has ended",
            )


def guarded(members: Iterable[_core._ZipMember], offsets: Iterable[int]) -> list[Guarded]:
    """The ranges of a zip archive that have checksums. ``offsets`` are those of the contents."""
    return [
        (offset, length, crc)
        for (_, method, crc, _, length), offset in zip(members, offsets, strict=True)
        if crc is not None and method == "stored"
    ]


def of_model(path: str, names: Sequence[str], model: str, adapter: str, index: str) -> str | None:
    """Returns the file of a directory that is read: the model, an index of its shards (a name that
    ends like ``index``), or an adapter if there is no model. ``None`` without any of them."""
    indexes = [name for name in names if name.endswith(index)]
    if model not in names and len(indexes) > 1:
        raise corrupt(path, f"{len(indexes)} indexes ({', '.join(indexes)}); pass one of them")
    chosen = next((name for name in (model, *indexes, adapter) if name in names), None)
    return None if chosen is None else os.path.join(path, chosen)


def weight_map(index: str) -> list[tuple[str, str]]:
    """Returns the names of the tensors of a sharded checkpoint, each with its shard's path."""
    text = read_whole(
        index,
        _MAX_INDEX_BYTES,
        lambda length: corrupt(
            index, f"an index of at most {_MAX_INDEX_BYTES} bytes was expected, not of {length}"
        ),
    )
    try:
        content = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise corrupt(index, f"an index in JSON was expected: {error}") from error
    places = content.get("weight_map") if isinstance(content, dict) else None
    if not isinstance(places, dict):
        raise corrupt(index, "its weight_map is missing, or is no table of tensors and their files")
    pairs = [(name, str(shard)) for name, shard in places.items()]
    if not pairs:
        raise corrupt(index, "its weight_map names no tensor. Write the checkpoint again, or pass its files")
    folder = os.path.dirname(index)
    for name, shard in pairs:
        if not is_file_name(shard):
            raise corrupt(index, f"tensor `{name}` is in `{printable(shard)}`, which is no file name")
    check_present(index, folder, {shard for _, shard in pairs})
    return [(name, os.path.join(folder, shard)) for name, shard in pairs]


def check_present(index: str, folder: str, names: Collection[str]) -> None:
    """Raises if files that an index names are missing."""
    missing = sorted(name for name in names if _is_missing(os.path.join(folder, name)))
    if missing:
        listed = ", ".join(map(printable, missing[:_LISTED])) + (", …" if len(missing) > _LISTED else "")
        raise from_engine(
            "io",
            f"{index}: {len(missing)} of {len(names)} files that it names are missing: {listed}. Copy or download them to {folder}",
            {"errno": errno.ENOENT, "file": os.path.join(folder, missing[0])},
        )


def check_ranks(path: str, what: str, ranks: Sequence[int], count: int) -> None:
    """Raises unless these are all of so many ranks. ``count`` may be anything that a file says."""
    if list(ranks) == list(range(len(ranks))) and len(ranks) == count:
        return
    if len(ranks) > count:
        raise corrupt(path, f"{len(ranks)} files {what}, of {count} ranks. Keep the files of one save")
    known = set(ranks)
    missing: list[int] = []
    for rank in range(count):
        if rank not in known:
            missing.append(rank)
        if len(missing) == _LISTED_RANKS:
            break
    raise corrupt(
        path, f"{len(ranks)} files {what} of {count} ranks: {missing} are missing. Copy all of them"
    )


def _is_missing(path: str) -> bool:
    try:
        lookup.stamp(path)
    except FileNotFoundError:
        return True
    return False
