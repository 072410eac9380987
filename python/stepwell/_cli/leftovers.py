"""The entries of a root beside its steps: saves in flight, leftovers of killed saves, retired
steps, branches. Nothing here changes anything. Locks are queried and never taken, because even a
brief lock would refuse a writer at that moment."""

from __future__ import annotations

import fcntl
import os
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import final

#: Names as ``manager/src/directory_layout.rs`` makes them; what only looks like one is somebody
#: else's.
_TEMPORARY = re.compile(r"\.tmp-(?P<label>.+)-[0-9a-f]{32}-[0-9]+", re.DOTALL)
_TRASH = re.compile(r"\.trash-(?P<label>.*)-[0-9a-f]{32}", re.DOTALL)
_ASIDE = re.compile(r"\.quarantine-(?P<label>.*)-[0-9a-f]{32}", re.DOTALL)
_BRANCH = re.compile(r"\.branch-(?P<branch>[^.]+)\.(?P<label>.+)", re.DOTALL)
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
    #: True if somebody uses it at this moment: writes a temporary, reads a retired step. ``None``:
    #: nobody can tell.
    live: bool | None


@final
@dataclass(slots=True)
class Leftovers:
    """The entries beside the steps, by kind."""

    #: True if a writer holds the root; ``None``: nobody can tell.
    writer: bool | None = None
    temporaries: list[Leftover] = field(default_factory=list)
    trash: list[Leftover] = field(default_factory=list)
    #: Directories that had a step's name, were none, and were in the way of a commit.
    aside: list[Leftover] = field(default_factory=list)
    #: Steps that were set aside by rewinds, by branch.
    branches: dict[str, list[Leftover]] = field(default_factory=dict)

    @property
    def dead(self) -> list[Leftover]:
        """Entries that nobody needs."""
        return [one for one in self.temporaries if one.live is False] + self.trash


def scan(root: str, sizes: bool = True) -> Leftovers:
    """Looks at a root. ``sizes``: also into what it finds."""
    found = Leftovers(writer=is_locked(os.path.join(root, ".stepwell", "lock")))
    measure: Callable[[str], int] = nbytes_below if sizes else lambda path: 0
    with os.scandir(root) as entries:
        dirs = sorted(
            entry.name
            for entry in entries
            if entry.name.startswith(".") and entry.is_dir(follow_symlinks=False)
        )
    for name in dirs:
        path = os.path.join(root, name)
        if match := _TEMPORARY.fullmatch(name):
            label = match["label"]
            # A step's is its root's writer's; any other is a save to a path, which says by its
            # lease that it lives.
            lock = found.writer if _STEP_LABEL.fullmatch(label) else is_locked(os.path.join(path, ".lease"))
            found.temporaries.append(Leftover(name, label, measure(path), lock))
        elif match := _TRASH.fullmatch(name):
            read = is_locked(os.path.join(path, ".lease"))
            found.trash.append(Leftover(name, match["label"], measure(path), read))
        elif match := _ASIDE.fullmatch(name):
            found.aside.append(Leftover(name, match["label"], measure(path), False))
        elif match := _BRANCH.fullmatch(name):
            of_branch = found.branches.setdefault(match["branch"], [])
            of_branch.append(Leftover(name, match["label"], measure(path), False))
    return found


def is_locked(path: str) -> bool | None:
    """True if anybody holds a lock on a file, asked without taking one; a file that is not there is
    not locked. ``None``: the file system does not say."""
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


def nbytes_below(path: str) -> int:
    """Bytes of the files below a directory; what vanishes meanwhile counts nothing."""
    total = 0
    pending = [path]
    while pending:
        try:
            with os.scandir(pending.pop()) as entries:
                for entry in entries:
                    try:
                        if entry.is_dir(follow_symlinks=False):
                            pending.append(entry.path)
                        else:
                            total += entry.stat(follow_symlinks=False).st_size
                    except FileNotFoundError:
                        continue
        except (FileNotFoundError, NotADirectoryError):
            continue
    return total
