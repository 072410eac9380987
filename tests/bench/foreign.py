"""Measure conversions against a raw concurrent copy of the same bytes.

    python tests/bench/foreign.py                     # 2 GiB, five rounds: about 3 minutes
    python tests/bench/foreign.py --gib 1 --rounds 2

A round does every operation once, in shuffled order, from a cold page cache. The raw copy reads
with one thread and writes with another, past the page cache, through windows of 16 MiB. It ends
with an fsync. The ratio is the time of the raw copy over that of the conversion, in the same round.
"""

from __future__ import annotations

import argparse
import mmap
import os
import queue
import random
import shutil
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import stepwell as sw
from measure import Spare, drop_caches, huge_buffer, settle

WINDOW = 16 << 20
WINDOWS = 8


def raw_copy(source: Path, destination: Path, ring: mmap.mmap) -> None:
    """Copies a file through a ring of windows: one thread reads, one writes."""
    length = source.stat().st_size
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    full: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
    view = memoryview(ring)
    windows = [view[at * WINDOW : (at + 1) * WINDOW] for at in range(WINDOWS)]
    for number in range(WINDOWS):
        free.put(number)

    def write() -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT
        file = os.open(destination, flags)
        try:
            os.posix_fallocate(file, 0, length)
            while (part := full.get()) is not None:
                number, offset = part
                os.pwrite(file, windows[number], offset)
                free.put(number)
            os.ftruncate(file, length)
            os.fsync(file)
        finally:
            os.close(file)

    writer = threading.Thread(target=write)
    writer.start()
    file = os.open(source, os.O_RDONLY | os.O_DIRECT)
    try:
        for offset in range(0, length, WINDOW):
            number = free.get()
            os.preadv(file, [windows[number]], offset)
            full.put((number, offset))
    finally:
        full.put(None)
        os.close(file)
        writer.join()


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--gib", type=float, default=2)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--directory", type=Path)
    given = arguments.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-foreign-", dir=given.directory))
    try:
        measure(folder, given.gib, given.rounds)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, gib: float, rounds: int) -> None:
    rng = np.random.default_rng(0)
    layers = max(1, int(gib * 1024 / 64))
    state = {f"layers.{n}": rng.standard_normal((4096, 4096), dtype=np.float32) for n in range(layers)}
    ours, theirs = folder / "ours", folder / "theirs.safetensors"
    sw.save(ours, state)
    del state
    sw.convert(ours, theirs, to="safetensors", verify=True)
    (data,) = ours.rglob("*.data")
    ring, spare = huge_buffer(WINDOW * WINDOWS), Spare(1 << 30)
    operations: dict[str, Callable[[Path], object]] = {
        "raw copy of the step": lambda to: raw_copy(data, to, ring),
        "raw copy of the safetensors file": lambda to: raw_copy(theirs, to, ring),
        "stepwell → safetensors": lambda to: sw.convert(ours, to, to="safetensors"),
        "safetensors → stepwell": lambda to: sw.convert(theirs, to, to="stepwell"),
    }
    seconds: dict[str, list[float]] = {name: [] for name in operations}
    for number in range(rounds):
        for name in random.Random(number).sample(list(operations), len(operations)):
            target = folder / "target"
            drop_caches()
            settle()
            spare.hold()
            seconds[name].append(spare.measured(partial(operations[name], target)).seconds)
            shutil.rmtree(target) if target.is_dir() else target.unlink()
    nbytes = theirs.stat().st_size
    raw = {
        "stepwell → safetensors": "raw copy of the step",
        "safetensors → stepwell": "raw copy of the safetensors file",
    }
    print(f"{nbytes / 2**30:.2f} GiB, {rounds} rounds; median (least to most)")
    for name, times in seconds.items():
        rates = sorted(nbytes / 1e9 / one for one in times)
        line = f"{name:34} {statistics.median(rates):5.2f} GB/s ({rates[0]:.2f} to {rates[-1]:.2f})"
        if name in raw:
            ratios = [one / other for one, other in zip(seconds[raw[name]], times, strict=True)]
            line += f"   {statistics.median(ratios):.2f} of the raw copy"
        print(line)


if __name__ == "__main__":
    main()
