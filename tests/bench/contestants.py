"""The contestants. Each saves a state below a directory and restores it; its docstring states its
promises."""

from __future__ import annotations

import ctypes
import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import stepwell as sw
from measure import huge_buffer, sync_file_system
from workloads import State, flat, nbytes

THREADS = os.cpu_count() or 1
PIECE = 16 << 20


class Contestant(Protocol):
    name: str

    def prepare(self, state: State) -> None:
        """Before the first round: buffers, thread pools, staging memory."""

    def save(self, directory: Path, state: State) -> tuple[float, float]:
        """Seconds until training may go on, and until the state is durable."""

    def restore_into(self, directory: Path, target: State) -> State:
        """Fill memory that is there already."""

    def restore_fresh(self, directory: Path) -> State:
        """Restore into new memory."""

    def restore_weights(self, directory: Path, target: State) -> State:
        """Fill ``target["params"]`` only."""


def parallel_copy(pairs: list[tuple[int, int, int]], pool: ThreadPoolExecutor) -> None:
    """Plain copies (destination, source, bytes) on all cores; the yardstick of blocked time."""
    pieces: list[tuple[int, int, int]] = []
    for destination, source, size in pairs:
        pieces += [(destination + at, source + at, min(PIECE, size - at)) for at in range(0, size, PIECE)]
    total = sum(size for _, _, size in pieces)
    shares: list[list[tuple[int, int, int]]] = [[] for _ in range(THREADS)]
    filled = 0
    for piece in pieces:
        shares[min(THREADS - 1, filled * THREADS // max(1, total))].append(piece)
        filled += piece[2]

    def work(share: list[tuple[int, int, int]]) -> None:
        for destination, source, size in share:
            ctypes.memmove(destination, source, size)

    list(pool.map(work, shares))


class Staged:
    """A pre-faulted buffer in huge pages that holds a copy of the state, leaf after leaf."""

    def __init__(self, state: State) -> None:
        self.size = -(-nbytes(state) // 4096) * 4096
        self.buffer = huge_buffer(self.size)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        skip = -start % 4096
        self.address = start + skip
        self.view = memoryview(self.buffer)[skip : skip + self.size]
        self.pool = ThreadPoolExecutor(THREADS)

    def pairs(self, state: State, into_buffer: bool) -> list[tuple[int, int, int]]:
        """Returns the arguments of :func:`parallel_copy`."""
        at, pairs = self.address, []
        for _, array in flat(state):
            there = array.ctypes.data
            pairs.append((at, there, array.nbytes) if into_buffer else (there, at, array.nbytes))
            at += array.nbytes
        return pairs


class PlainCopy:
    """A plain parallel copy of the state into warm memory: what blocked time is held against."""

    name = "plain parallel copy"

    def __init__(self, staged: Staged, state: State) -> None:
        self.pairs, self.pool = staged.pairs(state, into_buffer=True), staged.pool

    def run(self) -> None:
        parallel_copy(self.pairs, self.pool)


class Raw:
    """The disk itself: one pre-faulted buffer in huge pages, O_DIRECT, preallocated, fsync. No
    copy, no checksum, no names."""

    name = "raw disk"
    copied = False

    def __init__(self, staged: Staged) -> None:
        self.staged, self.size, self.view, self.pool = staged, staged.size, staged.view, staged.pool
        self._pairs = staged.pairs

    def prepare(self, state: State) -> None:
        parallel_copy(self._pairs(state, into_buffer=True), self.pool)
        self.weights = -(-nbytes(state["params"]) // 4096) * 4096

    def _transfer(self, path: Path, flags: int, size: int) -> int:
        descriptor = os.open(path, flags | os.O_DIRECT, 0o644)
        write = bool(flags & os.O_WRONLY)
        if write:
            os.posix_fallocate(descriptor, 0, size)

        def move(at: int) -> None:
            end = min(at + PIECE, size)
            while at < end:
                piece = self.view[at:end]
                at += os.pwrite(descriptor, piece, at) if write else os.preadv(descriptor, [piece], at)

        list(self.pool.map(move, range(0, size, PIECE)))
        return descriptor

    def save(self, directory: Path, state: State) -> tuple[float, float]:
        begin = time.perf_counter()
        if self.copied:
            parallel_copy(self._pairs(state, into_buffer=True), self.pool)
        blocked = time.perf_counter() - begin
        directory.mkdir()
        descriptor = self._transfer(directory / "raw", os.O_WRONLY | os.O_CREAT | os.O_EXCL, self.size)
        os.fsync(descriptor)
        os.close(descriptor)
        sync_file_system(directory)
        return blocked if self.copied else 0.0, time.perf_counter() - begin

    def restore_into(self, directory: Path, target: State) -> State:
        os.close(self._transfer(directory / "raw", os.O_RDONLY, self.size))
        if self.copied:
            parallel_copy(self._pairs(target, into_buffer=False), self.pool)
        return target

    def restore_fresh(self, directory: Path) -> State:
        """A disk has no memory of its own: the same read into the same buffer, as the yardstick."""
        os.close(self._transfer(directory / "raw", os.O_RDONLY, self.size))
        return {}

    def restore_weights(self, directory: Path, target: State) -> State:
        os.close(self._transfer(directory / "raw", os.O_RDONLY, self.weights))
        if self.copied:
            parallel_copy(self._pairs({"params": target["params"]}, into_buffer=False), self.pool)
        return target


class RawCopied(Raw):
    """The same with a plain copy into the buffer before the write, and out of it after the read:
    what a snapshot costs at least."""

    name = "raw disk + copy"
    copied = True


class Stepwell:
    """This project: a committed step, verified when it is read."""

    def __init__(self, share: float = 1.0, name: str = "stepwell") -> None:
        self.share, self.name = share, name
        self.managers: dict[Path, sw.CheckpointManager] = {}

    def prepare(self, state: State) -> None:
        self.staging = int(nbytes(state) * self.share) + (64 << 20 if self.share >= 1 else 0)
        self.step = 0

    def _manager(self, directory: Path) -> sw.CheckpointManager:
        # One root for all rounds, as a training run has it; the step of this round is what is
        # measured.
        root = directory.parent / f"root-{self.share}"
        if root not in self.managers:
            self.managers[root] = sw.CheckpointManager(root, staging_bytes=self.staging)
        return self.managers[root]

    def save(self, directory: Path, state: State) -> tuple[float, float]:
        manager = self._manager(directory)
        self.step += 1
        begin = time.perf_counter()
        save = manager.save(self.step, state)
        blocked = time.perf_counter() - begin
        save.result()
        root = Path(manager.root)
        sync_file_system(root)
        durable = time.perf_counter() - begin
        directory.symlink_to(root / f"step_{self.step:08d}")
        return blocked, durable

    def restore_into(self, directory: Path, target: State) -> State:
        return sw.restore(directory.resolve(), into=target)

    def restore_fresh(self, directory: Path) -> State:
        return sw.restore(directory.resolve())

    def restore_weights(self, directory: Path, target: State) -> State:
        return sw.restore(directory.resolve(), into={"params": target["params"]})


class Safetensors:
    """``safetensors.numpy``: one file, no checksum, no fsync of its own; every array is copied out
    of the mapped file into memory of its own."""

    name = "safetensors"

    def prepare(self, state: State) -> None:
        """It has nothing to prepare."""

    def _path(self, directory: Path) -> Path:
        return directory / "model.safetensors"

    def save(self, directory: Path, state: State) -> tuple[float, float]:
        from safetensors.numpy import save_file

        begin = time.perf_counter()
        directory.mkdir()
        save_file(dict(flat(state)), self._path(directory))
        blocked = time.perf_counter() - begin
        sync_file_system(directory)
        return blocked, time.perf_counter() - begin

    def restore_into(self, directory: Path, target: State) -> State:
        from safetensors import safe_open

        with safe_open(self._path(directory), framework="np") as file:
            for path, array in flat(target):
                np.copyto(array, file.get_tensor(path))
        return target

    def restore_fresh(self, directory: Path) -> State:
        from safetensors.numpy import load_file

        result: dict[str, Any] = {}
        for path, array in load_file(self._path(directory)).items():
            *containers, name = path.split("/")
            at = result
            for container in containers:
                at = at.setdefault(container, {})
            at[name] = array
        return result

    def restore_weights(self, directory: Path, target: State) -> State:
        return self.restore_into(directory, {"params": target["params"]})
