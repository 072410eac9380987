"""Measure what a manager for each directory costs, as integrations of trainers open one for each
checkpoint.

    python tests/bench/guests.py             # about a minute
    python tests/bench/guests.py --ranks 2

Each figure is the slowest rank of a round. Ranks are processes of this machine, with
``torch.distributed`` on gloo.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import stepwell as sw
from tables import table

ROUNDS, WARM_UP = 20, 2
COLUMNS = ["open", "close", "open, save, close", "save of an open manager"]


def rank_of(rank: int, world: int, folder: Path, results: Any) -> None:
    """One rank. Puts its seconds by column."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    if world > 1:
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)

    def manager(name: str) -> sw.CheckpointManager:
        board = sw.coordinators.TorchStore() if world > 1 else None
        return sw.CheckpointManager(folder / name, coordinator=board)

    def begin() -> float:
        if world > 1:
            dist.barrier()
        return time.perf_counter()

    state = {"w": np.zeros(1000, np.float32)}
    found: dict[str, list[float]] = {column: [] for column in COLUMNS}
    with manager("one") as one:
        for number in range(WARM_UP + ROUNDS):
            begun = begin()
            empty = manager(f"empty-{number}")
            opened = time.perf_counter()
            empty.close()
            found["open"].append(opened - begun)
            found["close"].append(time.perf_counter() - opened)
            begun = begin()
            with manager(f"saved-{number}") as guest:
                guest.save(0, state).result()
            found["open, save, close"].append(time.perf_counter() - begun)
            begun = begin()
            one.save(number, state).result()
            found["save of an open manager"].append(time.perf_counter() - begun)
            begin()
    results.put({column: seconds[WARM_UP:] for column, seconds in found.items()})
    begin()


def measured(world: int, folder: Path) -> list[str]:
    """Returns the row of a number of ranks: medians and extremes in ms."""
    context = multiprocessing.get_context("spawn")
    results = context.Queue()
    ranks = [context.Process(target=rank_of, args=(rank, world, folder, results)) for rank in range(world)]
    for one in ranks:
        one.start()
    found = [results.get(timeout=300) for _ in ranks]
    for one in ranks:
        one.join()
    cells = [str(world)]
    for column in COLUMNS:
        slowest = [1e3 * max(seconds) for seconds in zip(*(one[column] for one in found), strict=True)]
        cells.append(f"{statistics.median(slowest):.1f} ({min(slowest):.1f}–{max(slowest):.1f})")
    return cells


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 8])
    options.add_argument("--directory", type=Path)
    asked = options.parse_args()
    rows = [["ranks", *(f"{column}, ms" for column in COLUMNS)]]
    for world in asked.ranks:
        with tempfile.TemporaryDirectory(dir=asked.directory) as folder:
            rows.append(measured(world, Path(folder)))
    print(table(rows))
    print(f"median of {ROUNDS} (lowest–highest); load {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")


if __name__ == "__main__":
    main()
