"""The cost of lazy capture for the host, over the fake driver: no device, so no rates; the duration
of a call, and the engine's work for each chunk.

python tests/fake_cuda/bench.py
"""

from __future__ import annotations

import statistics
import sys
import tempfile
import time
from pathlib import Path

import fake_cuda
import numpy as np
import stepwell as sw
import torch

ROUNDS = 9


class Owner(torch.optim.Optimizer):
    """Owns everything, and changes nothing."""

    def __init__(self, parameters: list[torch.nn.Parameter]) -> None:
        super().__init__(parameters, {})

    def step(self, closure: object = None) -> None:
        pass


def measured(cuda: fake_cuda.FakeCuda, leaves: int, nbytes: int, scratch: Path) -> tuple[float, float, int]:
    """Milliseconds of a call, microseconds of the engine for each chunk until all copies are
    started, and chunks."""
    each = nbytes // leaves // 4
    params = [torch.nn.Parameter(cuda.tensor(np.zeros(each, np.float32))) for _ in range(leaves)]
    state = {"params": {f"p{n}": one for n, one in enumerate(params)}}
    calls, starts = [], []
    root = scratch / f"{leaves}-{nbytes}"
    chunks = leaves * max(1, -(-each * 4 // (8 << 20)))
    with sw.CheckpointManager(root, retention=sw.keep_latest(1)) as mgr:
        owner = Owner(params)
        mgr.attach(owner)
        mgr.prepare(state)
        mgr.save(0, state).result()
        for step in range(1, ROUNDS + 1):
            # A training computes between two saves, and the last save finishes.
            time.sleep(0.1)
            # The device is stalled, so that its copies, which the host makes here, disturb nobody.
            cuda.stall(True)
            begun = time.perf_counter()
            save = mgr.save(step, state)
            called = time.perf_counter()
            with mgr.update_guard():
                started = time.perf_counter()
            calls.append(called - begun)
            starts.append(started - called)
            cuda.stall(False)
            save.result()
    return 1e3 * statistics.median(calls), 1e6 * statistics.median(starts) / chunks, chunks


def main() -> int:
    with tempfile.TemporaryDirectory() as scratch:
        cuda = fake_cuda.load(Path(scratch) / "driver")
        torch.cuda._lazy_init = lambda: None
        torch.cuda.is_initialized = lambda: True
        torch.cuda.current_stream = cuda.current_stream
        cuda.random(1, 0)
        print("| leaves | state | save() | target | until all copies are started, for each chunk |")
        print("|---|---|---|---|---|")
        for leaves, nbytes in ((300, 600 << 20), (300, 30 << 20), (20_000, 80 << 20)):
            call, start, chunks = measured(cuda, leaves, nbytes, Path(scratch))
            target = ("2 ms: reached" if call <= 2 else "2 ms: MISSED") if leaves == 300 else ""
            print(
                f"| {leaves} | {nbytes >> 20} MiB | {call:.2f} ms | {target} | {start:.1f} µs ({chunks} chunks) |"
            )
        found = cuda.violations()
        assert not found, found
    return 0


if __name__ == "__main__":
    sys.exit(main())
