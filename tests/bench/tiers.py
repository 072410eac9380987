"""Measure what tiers cost a training: the waits of its saves, and the speed of a loop beside them.

    python tests/bench/tiers.py             # 512 MiB, 5 rounds: about 3 minutes

Each round runs all ways in shuffled order. A way is a manager that saves the same state several
times while a loop computes:

* ``near``: the near tier alone, a directory. The ratios are to this one.
* ``disk``: a second tier, another directory of the same disk.
* ``store``: a second tier in a fake store, which a process on the same cores serves. Its own work
  slows the loop, too.

``save`` is the median wait of a call of ``save()``. ``loop`` is the time of the loop, which has a
fixed number of products of small matrices, while the tier gets all its steps. ``restore`` is the
median time of a restore of the newest step into arrays that are there. It comes from the near tier.
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
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

import numpy as np
import stepwell as sw
from fake_store import fake_store
from tables import spread, table, verdict

#: Limits, as ratios to the near tier alone.
SAVE, LOOP, RESTORE = 1.05, 1.02, 1.02
#: Saves of a round, and restores.
SAVES = 3


def products(seconds: float) -> int:
    """Returns how many products of matrices take so long."""
    a = np.ones((256, 256), np.float32)
    begun, count = time.perf_counter(), 0
    while time.perf_counter() - begun < seconds:
        a = a @ a / 256
        count += 1
    return count


def loop(count: int) -> None:
    """Computes so many products."""
    a = np.ones((256, 256), np.float32)
    for _ in range(count):
        a = a @ a / 256


def one_round(tiers: list[sw.Tier], state: dict[str, np.ndarray], count: int) -> tuple[float, ...]:
    """Returns the median wait of a save, the seconds of the loops, and the median of a restore."""
    waits, loops, restores = [], 0.0, []
    with sw.CheckpointManager(tiers=tiers, options=sw.Options(grace=0.0)) as mgr:
        mgr.save(0, state).result()
        mgr.wait_until_carried()
        for step in range(1, SAVES + 1):
            begun = time.perf_counter()
            save = mgr.save(step, state)
            waits.append(time.perf_counter() - begun)
            # Only the carrier is beside the loop.
            save.result()
            begun = time.perf_counter()
            loop(count)
            loops += time.perf_counter() - begun
            mgr.wait_until_carried()
        into = {name: np.empty_like(array) for name, array in state.items()}
        for _ in range(SAVES):
            begun = time.perf_counter()
            mgr.restore(into=into)
            restores.append(time.perf_counter() - begun)
    return statistics.median(waits), loops, statistics.median(restores)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=2.0, help="of each loop")
    chosen = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"
    state = {f"w{n}": np.random.default_rng(n).random(chosen.mib << 14, np.float32) for n in range(16)}
    count = products(chosen.seconds)
    found: dict[str, list[tuple[float, ...]]] = {"near": [], "disk": [], "store": []}
    with fake_store("s3") as variables, tempfile.TemporaryDirectory(dir=".") as folder:
        os.environ.update(variables)
        for number in range(chosen.rounds + 1):
            for name in random.sample(list(found), len(found)):
                place = Path(folder) / f"{name}-{number}"
                near = sw.Tier(place / "near", retention=1)
                far = {
                    "near": [],
                    "disk": [sw.Tier(place / "home", retention=1)],
                    "store": [sw.Tier(f"s3://bucket/{name}-{number}", retention=1)],
                }[name]
                measured = one_round([near, *far], state, count)
                shutil.rmtree(place)
                if number:
                    found[name].append(measured)
    limits = {"save()": SAVE, "loop": LOOP, "restore": RESTORE}
    rows = [
        ["tiers", "save()", *(f"{what} to near" for what in limits), *(f"{w} {n}" for w, n in limits.items())]
    ]
    for name, rounds in found.items():
        ratios = [
            [mine[at] / base[at] for mine, base in zip(rounds, found["near"], strict=True)]
            for at in range(len(limits))
        ]
        wait = statistics.median(measured[0] for measured in rounds)
        verdicts = [
            verdict(statistics.median(ratio), limit)
            for ratio, limit in zip(ratios, limits.values(), strict=True)
        ]
        rows.append([name, f"{wait * 1000:.0f} ms", *map(spread, ratios), *verdicts])
    print(table(rows))


if __name__ == "__main__":
    main()
