"""The entries of a root beside its steps: saves in flight, leftovers of killed saves, retired
steps, branches. Nothing here changes anything. Locks are queried and never taken, because even a
brief lock would refuse a writer at that moment."""

from __future__ import annotations

import fcntl
import os
import re
import struct
from dataclasses import dataclass, field
from typing import final

from .locations import is_store_url, location, stored_names

#: Names as ``manager/src/directory_layout.rs`` makes them. Other names belong to somebody else.
_NAMES = re.compile(
    r"\.tmp-(?P<temporary>.+)-[0-9a-f]{32}-[0-9]+|\.trash-(?P<trash>.*)-[0-9a-f]{32}"
    r"|\.quarantine-(?P<aside>.*)-[0-9a-f]{32}|\.branch-(?P<branch>[^.]+)\.(?P<label>.+)",
    re.DOTALL,
)
_STEP_LABEL = re.compile(r"[0-9]{8,}")

#: ``struct flock`` of Linux on 64 bits: type, whence, start, length, process.
_FLOCK = struct.Struct("@hhqqi4x")


@final
@dataclass(frozen=True, slots=True)
class Leftover:
    """A directory beside the steps."""

    name: str
    #: The intended or former name of the step or checkpoint.
    label: str
    #: Bytes of its files.
    nbytes: int
    #: True if somebody writes or reads it now; ``None`` if that is unknown.
    live: bool | None


@final
@dataclass(slots=True)
class Leftovers:
    """The entries beside the steps, by kind."""

    #: True if a writer holds the root; ``None`` if that is unknown.
    writer: bool | None = None
    temporaries: list[Leftover] = field(default_factory=list)
    trash: list[Leftover] = field(default_factory=list)
    #: Directories that had a step's name, were no step, and were in the way of a commit.
    set_aside: list[Leftover] = field(default_factory=list)
    #: Steps that rewinds have moved, by branch.
    branches: dict[str, list[Leftover]] = field(default_factory=dict)

    @property
    def dead(self) -> list[Leftover]:
        """Entries that nobody needs."""
        return [one for one in self.temporaries if one.live is False] + self.trash

    @property
    def kept(self) -> list[Leftover]:
        """Entries that exist on purpose or are in use."""
        live = [one for one in self.temporaries if one.live is not False]
        return live + self.set_aside + [one for steps in self.branches.values() for one in steps]

    def document(self) -> dict[str, object]:
        """The entries for a JSON document."""
        return {
            "temporaries": self.temporaries,
            "trash": self.trash,
            "set_aside": self.set_aside,
            "branches": [{"branch": name, "steps": steps} for name, steps in self.branches.items()],
        }


def scan(root: str) -> Leftovers:
    """Returns the entries of a root, with their sizes. In a store it is unknown who uses them."""
    if is_store_url(root):
        found, sizes = Leftovers(writer=None), dict(stored_names(location(root)))
        dirs = sorted(sizes)
    else:
        found, sizes = Leftovers(writer=is_locked(os.path.join(root, ".stepwell", "lock"))), None
        with os.scandir(root) as entries:
            dirs = sorted(entry.name for entry in entries if entry.is_dir(follow_symlinks=False))
    for name in dirs:
        match = _NAMES.fullmatch(name)
        if match is None:
            continue
        path = os.path.join(root, name)
        kind = next(group for group, text in match.groupdict().items() if text is not None)
        label, live, where = match[kind], None, found.set_aside
        if kind == "branch":
            label, where = match["label"], found.branches.setdefault(match["branch"], [])
        elif kind == "temporary":
            # A step's belongs to the root's writer. A save to a path holds its own lease.
            is_step = sizes is not None or _STEP_LABEL.fullmatch(label)
            live = found.writer if is_step else is_locked(f"{path}/.lease")
            where = found.temporaries
        elif kind == "trash":
            live, where = None if sizes is not None else is_locked(f"{path}/.lease"), found.trash
        nbytes = _bytes_below(path) if sizes is None else sizes[name]
        where.append(Leftover(name, label, nbytes, live))
    return found


def is_locked(path: str) -> bool | None:
    """True if anybody holds a lock on a file. A missing file is not locked. ``None`` if the file
    system does not say."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except (FileNotFoundError, NotADirectoryError):
        return False
    except OSError:
        return None
    try:
        asked = _FLOCK.pack(fcntl.F_WRLCK, os.SEEK_SET, 0, 0, 0)
        answer = fcntl.fcntl(fd, fcntl.F_OFD_GETLK, asked)
        return bool(_FLOCK.unpack(answer)[0] != fcntl.F_UNLCK)
    except OSError:
        return None
    finally:
        os.close(fd)


def _bytes_below(path: str) -> int:
    """Returns the bytes of the files below a directory. Vanished files count nothing."""
    total = 0
    for above, _, names in os.walk(path):
        for name in names:
            try:
                total += os.lstat(os.path.join(above, name)).st_size
            except FileNotFoundError:
                continue
    return total
