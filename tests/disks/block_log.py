"""The log that a ``log-writes`` device keeps, and the states of the disk that a power cut may have
left.

The device logs a write when a flush makes it durable, or at once for a durable write (FUA). The log
before a flush or a mark is what the disk owes at that moment. A prefix of the log is a state that a
disk with a volatile cache may leave. So is, between two flushes, any choice among the writes that
no flush has reached yet. Format: Linux, ``drivers/md/dm-log-writes.c``.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

MAGIC = 0x6A736677736872
SUPER = struct.Struct("<QQQI")
ENTRY = struct.Struct("<QQQQ")
SECTOR = 512
FLUSH, FUA, DISCARD, MARK = 1, 2, 4, 8


@dataclass(frozen=True)
class Entry:
    sector: int
    flags: int
    #: The text of a mark.
    text: str
    #: The place of the data in the log, and its length in bytes.
    offset: int
    length: int


@dataclass(frozen=True)
class State:
    """A possible state of the disk: all writes of the log before ``before``, and the later ones in
    ``extra``."""

    before: int
    extra: tuple[int, ...]
    #: The last line of the journal that had been written.
    lines: int
    why: str


class Log:
    """The log, from its mark ``start`` to its mark ``end``."""

    def __init__(self, path: Path) -> None:
        self.file: BinaryIO = path.open("rb")
        magic, version, count, size = SUPER.unpack(self.file.read(SUPER.size))
        if magic != MAGIC or version != 1:
            raise ValueError(f"{path} is no log of a log-writes device of version 1: {magic:#x}, {version}")
        self.entries = list(self._read(count, size))
        marks = {entry.text: at for at, entry in enumerate(self.entries) if entry.flags & MARK}
        self.first, self.last = marks["start"], marks["end"]

    def _read(self, count: int, size: int) -> Iterator[Entry]:
        at = size
        for _ in range(count):
            self.file.seek(at)
            header = self.file.read(size)
            sector, sectors, flags, length = ENTRY.unpack(header[: ENTRY.size])
            text = header[ENTRY.size : ENTRY.size + length].decode() if flags & MARK else ""
            at += size
            data = 0 if flags & (DISCARD | MARK) else sectors * size
            yield Entry(sector, flags, text, at, data)
            at += data

    def write(self, disk: BinaryIO, at: int) -> None:
        """Carries out one entry. A discard says nothing of what can be read there afterwards: the
        old bytes are an answer."""
        entry = self.entries[at]
        if entry.length:
            self.file.seek(entry.offset)
            disk.seek(entry.sector * SECTOR)
            disk.write(self.file.read(entry.length))

    def is_write(self, at: int) -> bool:
        return self.entries[at].length > 0

    def states(self, between: int, chosen: int, seed: int) -> list[State]:
        """States to look at: before and after each flush and each durable write, and before each
        line of the journal was written; of the prefixes between those, `between` in each gap; and,
        in each gap, `chosen` random choices of its writes."""
        drawn = random.Random(seed)
        states: list[State] = []
        lines, gap = 0, self.first
        for at in range(self.first, self.last + 1):
            entry = self.entries[at]
            if entry.flags & (FLUSH | FUA | MARK):
                writes = [other for other in range(gap, at) if self.is_write(other)]
                if writes:
                    states.append(State(at, (), lines, "prefix"))
                    inside = [other for other in writes if other != gap]
                    for other in sorted(drawn.sample(inside, min(between, len(inside)))):
                        states.append(State(other, (), lines, "inside"))
                    for _ in range(min(chosen, 2 ** min(len(writes), 8) - 2)):
                        extra = tuple(other for other in writes if drawn.random() < 0.5)
                        states.append(State(gap, extra, lines, "choice"))
                if entry.length:
                    states.append(State(at + 1, (), lines, "durable write"))
                gap = at + 1
            if entry.flags & MARK and entry.text.isdigit():
                # The same disk as before, of which more has been promised: only the last line
                # before the next write matters.
                lines = int(entry.text)
                while states and states[-1].before == at and not states[-1].extra:
                    states.pop()
                states.append(State(at + 1, (), lines, "promise"))
        return [state for number, state in enumerate(states) if not self._same(states, number)]

    def _same(self, states: list[State], number: int) -> bool:
        """True if the next state is this one, with as much or more promised."""
        if number + 1 == len(states):
            return False
        state, following = states[number], states[number + 1]
        if state.extra or following.extra:
            return False
        low, high = sorted((state.before, following.before))
        return not any(self.is_write(at) for at in range(low, high))


class Replay:
    """A disk image that follows the log."""

    def __init__(self, log: Log, image: Path) -> None:
        self.log = log
        self.image = image
        self.done = 0

    def follow(self, before: int) -> None:
        with self.image.open("r+b") as disk:
            for at in range(self.done, before):
                self.log.write(disk, at)
        self.done = max(self.done, before)

    def add(self, image: Path, extra: tuple[int, ...]) -> None:
        """Carries out these entries too, on a copy."""
        with image.open("r+b") as disk:
            for at in extra:
                self.log.write(disk, at)
