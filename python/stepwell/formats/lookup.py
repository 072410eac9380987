"""The places of a checkpoint's files: on a disk, or in an object store.

The objects below a URL are listed once, and belong to a reading. Formats look for files here, and
make no requests of their own.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TypeAlias

from .. import _core
from .._store import StoreUrl

#: Length, time of change and inode of a file; for an object, a number of its content.
Stamp: TypeAlias = tuple[int, int, int]


class StoredObjects:
    """The objects below a URL, or the one at it."""

    def __init__(self, url: StoreUrl) -> None:
        #: The location.
        self.url = url
        #: The stamps by URL.
        self.stamps: dict[str, Stamp] = {}
        #: The names in each prefix, which is a directory here.
        self.names: dict[str, dict[str, None]] = {}
        for name, nbytes, modified, content in _core.stored_objects(url):
            place = str(url)
            for part in name.split("/") if name else ():
                self.names.setdefault(place, {})[part] = None
                place = f"{place}/{part}"
            self.stamps[place] = (nbytes, modified, content)


@contextmanager
def located(path: str) -> Iterator[None]:
    """Lists the objects below a URL for the block. Does nothing for a path of a disk."""
    if not isinstance(path, StoreUrl):
        yield
        return
    with _core.Reading(StoredObjects(path)):
        yield


def reading() -> _core.Reading:
    """Returns a new reading of files on a disk, or of the objects that were listed."""
    return _core.Reading(_core.entered_objects())


def is_dir(path: str) -> bool:
    """True for a directory. Links are followed, here and below."""
    objects = _objects()
    return os.path.isdir(path) if objects is None else path in objects.names


def is_file(path: str) -> bool:
    """True for a regular file."""
    objects = _objects()
    return os.path.isfile(path) if objects is None else path in objects.stamps


def exists(path: str) -> bool:
    """True for a file or a directory."""
    objects = _objects()
    return os.path.exists(path) if objects is None else path in objects.stamps or path in objects.names


def is_named(path: str) -> bool:
    """True if something has this name, also a link that leads nowhere."""
    objects = _objects()
    return os.path.lexists(path) if objects is None else exists(path)


def names(path: str) -> list[str]:
    """Returns the names in a directory."""
    objects = _objects()
    return os.listdir(path) if objects is None else list(objects.names.get(path, ()))


def length(path: str) -> int | None:
    """Returns the length of a regular file; ``None``: it is none."""
    objects = _objects()
    if objects is not None:
        found = objects.stamps.get(path)
        return None if found is None else found[0]
    try:
        state = os.stat(path)
    except OSError:
        return None
    return state.st_size if stat.S_ISREG(state.st_mode) else None


def stamp(path: str) -> Stamp:
    """Returns the stamp of a file. If it changes, so did the file.

    Raises:
        FileNotFoundError: it is missing.
    """
    objects = _objects()
    if objects is None:
        return stamp_of(os.stat(path))
    if path not in objects.stamps:
        raise FileNotFoundError(2, "No such object", path)
    return objects.stamps[path]


def stamp_of(state: os.stat_result) -> Stamp:
    """Returns the stamp of a file on a disk."""
    return state.st_size, state.st_mtime_ns, state.st_ino


def replaced_object(stamps: Mapping[str, Stamp]) -> str | None:
    """Returns an object of these that now has another content, if there is any."""
    objects = _objects()
    if objects is None:
        return None
    now = StoredObjects(objects.url).stamps
    return next((file for file, stamp in stamps.items() if now.get(file, stamp) != stamp), None)


def real(path: str) -> str:
    """Returns a path without links."""
    return path if _objects() is not None else os.path.realpath(path)


def common(directories: Iterable[str]) -> str:
    """Returns the directory that contains all of these."""
    found = os.path.commonpath(tuple(directories))
    # The two slashes of a URL have become one.
    return found if _objects() is None else found.replace(":/", "://", 1)


def _objects() -> StoredObjects | None:
    """The objects that were listed; ``None``: the files are on a disk."""
    found = _core.entered_objects()
    return found if isinstance(found, StoredObjects) else None
