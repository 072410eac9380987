"""Measure what a save costs a compute-bound loop beside it, for stepwell and its peers.

    make bench-interference                          # about 15 minutes
    make bench-interference ARGS="--rounds 1 --workload llama60m"

The loop multiplies matrices, on one core and then on all. It saves a state, and goes on until the
save is durable. The time that this took beyond the same steps without a save is lost. It has two
parts: the call itself, and the slower steps while others write in the background.

In each round every contestant has a process of its own, in shuffled order. A step without a save is
the median of those before and after the save.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

from children import answer, in_child
from measure import Spare, settle, sync_file_system
from peers import CONTESTANTS
from tables import progress, spread, table

PEOPLE = (
    "stepwell (torch)",
    "DCP async, cached stager",
    "DCP",
    "safetensors (torch)",
    "torch.save, load(mmap)",
    "stepwell (JAX)",
    "Orbax",
)
#: Edge of the matrices, saves in a process, and steps that are timed before and after each.
EDGE, SAVES, AROUND = 1024, 4, 30


def step_of(edge: int) -> Callable[[], None]:
    """A step of the loop."""
    import numpy as np

    one, other, result = (np.random.default_rng(n).standard_normal((edge, edge)) for n in range(3))

    def step() -> None:
        np.matmul(one, other, out=result)

    return step


def measure(name: str, workload: str, base: Path) -> dict[str, list[float]]:
    """Saves beside the loop. Returns seconds of a step, and of each save."""
    import numpy as np
    from peer_process import chosen, first_round_trip
    from workloads import WORKLOADS, nbytes

    kind = chosen(CONTESTANTS[name], name)
    first_round_trip(kind, base / "first")
    peer, step = kind(base), step_of(EDGE)
    state = WORKLOADS[workload](np.random.default_rng(1))
    spare = Spare(2 * nbytes(state) + (512 << 20))
    peer.take(state)
    peer.prepare()
    found: dict[str, list[float]] = {"step": [], "blocked": [], "lost": [], "durable": []}
    with ThreadPoolExecutor(1) as waiting:
        for number in range(SAVES):
            peer.step()
            spare.hold()
            settle()
            spare.release()
            around = [timed(step) for _ in range(AROUND)]
            begun = time.perf_counter()
            peer.start(peer.directory(number), number, False)
            blocked = time.perf_counter() - begun
            ended, steps = threading.Event(), 0

            def durable(begun: float = begun, ended: threading.Event = ended) -> float:
                try:
                    peer.finish()
                    sync_file_system(base)
                    return time.perf_counter() - begun
                finally:
                    ended.set()

            saving = waiting.submit(durable)
            while not ended.is_set():
                step()
                steps += 1
            total, seconds = time.perf_counter() - begun, saving.result()
            alone = statistics.median([*around, *(timed(step) for _ in range(AROUND))])
            lost = total - steps * alone
            if number > 0:  # the first save of a process takes its memory
                for key, value in zip(found, (alone, blocked, lost, seconds), strict=True):
                    found[key].append(value)
    peer.close()
    return found


def timed(step: Callable[[], None]) -> float:
    begun = time.perf_counter()
    step()
    return time.perf_counter() - begun


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--rounds", type=int, default=3)
    arguments.add_argument("--workload", default="llama1g")
    arguments.add_argument("--only", default="", help="part of a contestant's name")
    arguments.add_argument("--threads", type=int, help="of the loop; without: one, then one per core")
    arguments.add_argument("--directory", type=Path)
    arguments.add_argument("--child", nargs=2, metavar=("NAME", "BASE"), help=argparse.SUPPRESS)
    given = arguments.parse_args()
    if given.child is not None:
        name, base = given.child
        answer(lambda: measure(name, given.workload, Path(base)))
        return
    people = [name for name in PEOPLE if given.only in name]
    for threads in [given.threads] if given.threads else sorted({1, os.cpu_count() or 1}):
        os.environ |= dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS"), str(threads))
        show(threads, given.rounds, run(people, given.rounds, given.workload, given.directory))


def run(
    people: list[str], rounds: int, workload: str, directory: Path | None
) -> dict[str, list[dict[str, float]]]:
    """Medians of each contestant's process, in each round."""
    found: dict[str, list[dict[str, float]]] = {name: [] for name in people}
    spare = Spare(6 << 30)
    for number in range(rounds):
        for name in random.Random(number).sample(people, len(people)):
            base = Path(tempfile.mkdtemp(prefix="bench-interference-", dir=directory))
            spare.hold()
            settle()
            try:
                arguments = [name, str(base), "--workload", workload]
                values = in_child(__file__, arguments, spare.release)
            finally:
                spare.release()
                shutil.rmtree(base)
            medians = {key: statistics.median(value) for key, value in values.items()}
            found[name].append(medians)
            progress(f"{name}: lost by a save", medians["lost"])
    return found


def show(threads: int, rounds: int, found: dict[str, list[dict[str, float]]]) -> None:
    """Prints a table of medians and quartiles of the rounds."""
    rows = [["a save of", "waits, s", "lost, s", "steps lost", "durable, s"]]
    for name, results in found.items():
        row = [spread([one[key] for one in results]) for key in ("blocked", "lost", "durable")]
        row.insert(2, spread([one["lost"] / one["step"] for one in results]))
        rows.append([name, *row])
    steps = [one["step"] * 1000 for results in found.values() for one in results]
    print(
        f"\n{threads} thread(s) of the loop, {rounds} rounds; a step takes {statistics.median(steps):.1f} ms\n"
    )
    print(table(rows), flush=True)


if __name__ == "__main__":
    main()
