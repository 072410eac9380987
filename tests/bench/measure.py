"""How things are timed on a machine that works against it.

Two traps make naive figures worthless on virtual machines, and both are dealt with here:

* Free guest memory is handed back to the host after a moment; touching it again costs seconds per
  GiB. :class:`Spare` holds touched memory all the time, and gives it back to the kernel only while
  something is timed, so that what that needs, its own memory or page cache, is backed.
* Blocks that have just been freed are still being discarded, and writes that follow run at two
  thirds of their speed. Nothing is deleted inside a round, and :func:`settle` waits after
  deletions.
"""

from __future__ import annotations

import mmap
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

HUGE_PAGE = 2 << 20


def huge_buffer(size: int) -> mmap.mmap:
    """Anonymous memory in huge pages where the system has them, every page touched."""
    buffer = mmap.mmap(
        -1, -(-size // HUGE_PAGE) * HUGE_PAGE + HUGE_PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    )
    if hasattr(mmap, "MADV_HUGEPAGE"):
        buffer.madvise(mmap.MADV_HUGEPAGE)
    np.frombuffer(buffer, np.uint8)[::4096] = 0
    return buffer


class Spare:
    """Memory held so that the host does not take it, but while something is timed."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.held: mmap.mmap | None = None

    def hold(self) -> None:
        """Takes it, or as much of it as leaves the system some to live on."""
        if self.held is None:
            self.held = huge_buffer(min(self.size, max(0, _available() - (1 << 30))))

    def release(self) -> None:
        if self.held is not None:
            self.held.close()
            self.held = None

    def measured(self, call: Callable[[], Any]) -> Timing:
        """:func:`measured`, with this memory given back for as long as it takes."""
        self.release()
        timing = measured(call)
        self.hold()
        return timing


def _available() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


@dataclass
class Timing:
    """One measured call; seconds and bytes."""

    seconds: float
    cpu: float
    extra_peak: int
    result: Any = None
    parts: dict[str, float] = field(default_factory=dict)


def _status(key: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(key + ":"):
            return int(line.split()[1]) * 1024
    return 0


def resident() -> int:
    """Bytes of this process that are in memory."""
    return _status("VmRSS")


def measured(call: Callable[[], Any]) -> Timing:
    """Wall time, CPU time of the whole process, and how far its memory rose above where it was."""
    Path("/proc/self/clear_refs").write_text("5")  # resets the peak
    before = _status("VmRSS")
    cpu = resource.getrusage(resource.RUSAGE_SELF)
    begin = time.perf_counter()
    result = call()
    seconds = time.perf_counter() - begin
    after = resource.getrusage(resource.RUSAGE_SELF)
    spent = after.ru_utime + after.ru_stime - cpu.ru_utime - cpu.ru_stime
    return Timing(seconds, spent, max(0, _status("VmHWM") - before), result)


def disk_bytes() -> tuple[int, int]:
    """Bytes that this process has read from disks and written to them."""
    found = dict(line.split(": ") for line in Path("/proc/self/io").read_text().splitlines())
    return int(found["read_bytes"]), int(found["write_bytes"])


def sync_file_system(directory: Path) -> None:
    """The same explicit sync for every contestant, whatever it has synced itself."""
    import ctypes

    descriptor = os.open(directory, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).syncfs(descriptor) != 0:
            raise OSError(ctypes.get_errno(), "syncfs")
    finally:
        os.close(descriptor)


def settle(seconds: float = 1.5) -> None:
    """Let write-back and discards end."""
    os.sync()
    time.sleep(seconds)


def drop_caches() -> bool:
    """Make the next read come from the disk. False where that is not allowed."""
    os.sync()
    try:
        Path("/proc/sys/vm/drop_caches").write_text("3")
    except OSError:
        return False
    return True


def warm_cache(directory: Path) -> None:
    """Put every file below into the page cache."""
    for path in directory.rglob("*"):
        if path.is_file():
            with path.open("rb", buffering=0) as file:
                while file.read(16 << 20):
                    pass


def footprint(directory: Path) -> tuple[int, int]:
    """Number of files below, and their bytes."""
    files = [path for path in directory.rglob("*") if path.is_file()]
    return len(files), sum(path.stat().st_size for path in files)
