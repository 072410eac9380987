"""The disk itself among the contestants of the frameworks: see :class:`contestants.Raw`."""

from __future__ import annotations

from pathlib import Path

from contestants import Raw, Staged
from peer import Peer
from workloads import State


class RawDisk(Peer):
    """One pre-faulted buffer, O_DIRECT, preallocated, fsync; read back into the same buffer. No
    copy, no checksum, no names."""

    name = "raw disk"
    fills = False

    def take(self, state: State) -> None:
        self.state = state
        self.raw = Raw(Staged(state))

    def prepare(self) -> None:
        self.raw.prepare(self.state)

    def start(self, directory: Path, step: int, kept: bool) -> None:
        self.pending = directory

    def finish(self) -> None:
        self.raw.save(self.pending, self.state)

    def fresh(self, step: int) -> None:
        self.raw.restore_into(self.directory(step), self.state)

    def weights(self, step: int) -> None:
        self.raw.restore_weights(self.directory(step), self.state)


PEERS: tuple[type[Peer], ...] = (RawDisk,)
