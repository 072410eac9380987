"""Measure what exports cost a training beside them.

    python tests/bench/export_cost.py                        # all three cases: about 12 minutes
    python tests/bench/export_cost.py --threads 1 --keep 1   # one case

The cases: a training on one core, one that keeps every core busy, and one whose older exports are
deleted (`keep=1`).

A round runs the same training twice in shuffled order: with an export of each saved step, and
without. The training multiplies matrices and saves its state every 25 steps. An export of each save
is the worst case: a usual run exports one of many.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import stepwell as sw
import torch
from measure import settle
from tables import spread, table, verdict

SAVES, STEPS = 6, 25


@dataclass
class Run:
    """One training."""

    #: Seconds of the steps; of each call of save; of each save until it was durable.
    steps: float = 0.0
    blocked: list[float] = field(default_factory=list)
    durable: list[float] = field(default_factory=list)
    exported: int = 0


def train(folder: Path, mib: int, keep: int | None, is_exporting: bool) -> Run:
    """Trains, and saves every few steps."""
    found = Run()
    weights = {f"layers.{n}": torch.randn(1024, 4096) for n in range(mib // 16)}
    one, other, result = torch.randn(1536, 1536), torch.randn(1536, 1536), torch.empty(1536, 1536)

    def seen(event: object) -> None:
        found.exported += isinstance(event, sw.events.ExportEvent) and event.outcome == "exported"

    exports = [sw.Export(folder / "hf" / "{step}", keep=keep)] if is_exporting else []
    with sw.CheckpointManager(folder / "run", retention=2, exports=exports, on_event=seen) as manager:
        manager.prepare(weights)
        manager.save(0, weights).result()
        manager.wait_for_exports()
        for number in range(SAVES):
            begun = time.perf_counter()
            for _ in range(STEPS):
                torch.mm(one, other, out=result)
                torch.mm(result, other, out=one)
                one.div_(one.abs().max())
            found.steps += time.perf_counter() - begun
            begun = time.perf_counter()
            save = manager.save(number + 1, weights)
            found.blocked.append(time.perf_counter() - begun)
            save.add_done_callback(lambda save: found.durable.append(save.stats.total_seconds))
    return found


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--gib", type=float, default=0.5)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--threads", type=int)
    arguments.add_argument("--keep", type=int)
    arguments.add_argument("--directory", type=Path)
    given = arguments.parse_args()
    cases = [(given.threads or 1, given.keep)]
    if given.threads is None and given.keep is None:
        cases = [(1, None), (os.cpu_count() or 1, None), (1, 1)]
    for threads, keep in cases:
        measure(given.directory, max(16, int(given.gib * 1024)), given.rounds, threads, keep)


def measure(directory: Path | None, mib: int, rounds: int, threads: int, keep: int | None) -> None:
    """Runs all rounds of a case, and prints medians of ratios."""
    torch.set_num_threads(threads)
    runs: dict[bool, list[Run]] = {False: [], True: []}
    for number in range(rounds + 1):
        for is_exporting in random.Random(number).sample([False, True], 2):
            folder = Path(tempfile.mkdtemp(prefix="bench-exports-", dir=directory))
            try:
                settle()
                found = train(folder, mib, keep, is_exporting)
            finally:
                shutil.rmtree(folder)
            if number > 0:  # the first round touches new memory
                runs[is_exporting].append(found)
    exported = statistics.median(run.exported for run in runs[True])
    print(
        f"{mib} MiB, {rounds} rounds, {threads} thread(s) of the training, keep={keep},"
        f" {exported:.0f} exports in {SAVES} saves",
        flush=True,
    )
    rows = [["seconds", "without", "with exports", "ratio", "at most", ""]]
    for name, most, value in (
        ("steps", 1.02, lambda run: run.steps),
        ("call of save, median", 1.05, lambda run: statistics.median(run.blocked)),
        ("save until durable, median", 1.05, lambda run: statistics.median(run.durable)),
    ):
        without, beside = ([value(run) for run in runs[kind]] for kind in (False, True))
        ratios = [one / other for one, other in zip(beside, without, strict=True)]
        middles = (f"{statistics.median(one):.3f}" for one in (without, beside))
        rows.append([name, *middles, spread(ratios), f"{most}", verdict(statistics.median(ratios), most)])
    print(f"\n{table(rows)}")


if __name__ == "__main__":
    main()
