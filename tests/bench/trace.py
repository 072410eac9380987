"""Measure the rate of digests beside that of memcpy.

    python tests/bench/trace.py              # 1 GiB, 7 rounds: a few seconds

Each round times, in shuffled order, a copy of the state by numpy (one thread) and
``CheckpointManager.trace`` of a state with the same bytes, in three layouts. The figures are
medians, with the least and the most.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import stepwell as sw


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--gib", type=float, default=1.0)
    options.add_argument("--rounds", type=int, default=7)
    chosen = options.parse_args()
    count = max(1, int(chosen.gib * 64))
    arrays = [np.full((1024, 4096), number, np.float32) for number in range(count)]
    copies = [np.zeros_like(array) for array in arrays]
    nbytes = sum(array.nbytes for array in arrays)
    states = {
        "trace, contiguous": arrays,
        "trace, columns of a shard": [
            sw.sharding.LocalShard(array[:, :2048], (1024, 4096), (0, 0)) for array in arrays
        ],
        "trace, transposed": [array.T for array in arrays],
    }

    def copy() -> None:
        for to, array in zip(copies, arrays, strict=True):
            np.copyto(to, array)

    seconds: dict[str, list[float]] = {}
    with tempfile.TemporaryDirectory() as folder, sw.CheckpointManager(folder, prove_resume=1000) as mgr:
        mgr.save(0, {"w": arrays[:1]}).result()
        step = 0
        for _ in range(chosen.rounds + 1):  # the first one warms up
            ways: list[tuple[str, Callable[[], None] | None]] = [("memcpy (1 thread)", copy)]
            ways += [(name, None) for name in states]
            for name, call in random.sample(ways, len(ways)):
                step += 1
                begun = time.perf_counter()
                if call is None:
                    mgr.trace(step, {"w": states[name]})
                else:
                    call()
                seconds.setdefault(name, []).append(time.perf_counter() - begun)
    for name in ("memcpy (1 thread)", *states):
        scale = nbytes / 2 if "shard" in name else nbytes
        rates = sorted(scale / one / 1e9 for one in seconds[name][1:])
        print(f"{name:28} {statistics.median(rates):6.2f} GB/s  ({rates[0]:.2f} to {rates[-1]:.2f})")


if __name__ == "__main__":
    main()
