"""Measure a near tier on the local disks of two machines: its copies, and reads from the other one.

    python tests/bench/machines.py             # 512 MiB on each machine, 5 rounds: about 3 minutes

Two processes play the machines: each has a host name and a directory of its own. They share the
cores, the disk and the loopback device, so only ratios mean something.

* ``save``: until a step is committed on both, with ``copies=2`` and without.
* ``copy``: from then on, until each machine has a copy of the other one's files.
* ``restore``: by one process, cold, into arrays that are there: what is on its machine (near), what
  is on the other one (far), and both. The two rates allow ``max(near, far)`` for both.
"""

from __future__ import annotations

import argparse
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import stepwell as sw
from measure import drop_caches, settle
from tables import spread, table, verdict

#: A restore of both halves, against what the two rates allow.
HALVES = 0.9
MACHINES = ("a", "b")
SIDES = ("near", "far")
#: Saves of a job. The first one is not counted.
SAVES = 3


class Board:
    """A coordinator: messages are files in a directory."""

    def __init__(self, folder: Path, rank: int, name: str) -> None:
        self.folder, self.rank, self.world_size, self.name = folder / f"board-{name}", rank, 2, name
        self.folder.mkdir(exist_ok=True)

    def put(self, key: str, message: bytes) -> None:
        new = self.folder / f".new-{self.rank}-{time.monotonic_ns()}"
        new.write_bytes(message)
        new.rename(self._at(key))

    def get(self, key: str) -> bytes | None:
        try:
            return self._at(key).read_bytes()
        except FileNotFoundError:
            return None

    def remove(self, key: str) -> None:
        self._at(key).unlink(missing_ok=True)

    def _at(self, key: str) -> Path:
        return self.folder / key.replace("/", "+")


def arrays(mib: int, number: int) -> dict[str, np.ndarray]:
    """Returns the arrays of a machine."""
    random_bytes = np.random.default_rng(number)
    return {f"w{n}": random_bytes.random(mib << 14, np.float32) for n in range(16)}


def job(folder: Path, rank: int, name: str, copies: int, mib: int, rounds: int) -> list[float]:
    """Runs one process of a job. The first one returns its seconds."""
    socket.gethostname = lambda: MACHINES[rank]
    near = sw.Tier(folder / MACHINES[rank] / "run", retention=1, per_machine=True, copies=copies)
    ranks = Board(folder, rank, name)
    state = {SIDES[rank]: arrays(mib, rank)}
    seconds = []
    with sw.CheckpointManager(tiers=[near], coordinator=ranks, options=sw.Options(grace=0.0)) as mgr:
        if rounds:
            for _ in range(rounds):
                seconds += restores(mgr, mib) if rank == 0 else []
                mgr.latest_step()
        else:
            for step in range(SAVES + 1):
                mgr.latest_step()
                begun = time.perf_counter()
                mgr.save(step, state).result()
                committed = time.perf_counter()
                if rank == 0:
                    mgr.wait_until_carried()
                    copied = time.perf_counter()
                    seconds += [committed - begun, copied - committed] if step else []
    return seconds


def restores(mgr: sw.CheckpointManager, mib: int) -> list[float]:
    """Returns the seconds of restores of what is near, far, and both."""
    into = {side: {name: np.empty_like(value) for name, value in arrays(mib, 0).items()} for side in SIDES}
    for side in into.values():
        for value in side.values():
            value.fill(0)
    seconds = {}
    for what in random.sample([*SIDES, "both"], 3):
        drop_caches()
        with mgr.checkpoint() as checkpoint:
            begun = time.perf_counter()
            if what == "both":
                checkpoint.restore(into=into)
            else:
                checkpoint.restore(into={what: into[what]}, include=[what])
            seconds[what] = time.perf_counter() - begun
    return [seconds[what] for what in (*SIDES, "both")]


def run(folder: Path, name: str, copies: int, chosen: argparse.Namespace, rounds: int) -> list[float]:
    """Runs a job of two processes. Returns the seconds of the first one."""
    settle()
    arguments = [sys.executable, __file__, "--mib", str(chosen.mib), "--rounds", str(rounds)]
    arguments += ["--folder", str(folder), "--job", name, "--copies", str(copies), "--rank"]
    processes = [
        subprocess.Popen([*arguments, str(rank)], stdout=subprocess.PIPE, text=True) for rank in range(2)
    ]
    written = [process.communicate(timeout=600)[0] for process in processes]
    if failed := [process.returncode for process in processes if process.returncode]:
        raise SystemExit(f"a process of the job {name} ended with {failed[0]}")
    return [float(word) for word in written[0].split()]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--mib", type=int, default=512)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--job", help=argparse.SUPPRESS)
    parser.add_argument("--copies", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--rank", type=int, help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.rank is not None:
        found = job(chosen.folder, chosen.rank, chosen.job, chosen.copies, chosen.mib, chosen.rounds)
        print(*found)
        return
    saves: dict[int, list[float]] = {1: [], 2: []}
    copying: list[float] = []
    with tempfile.TemporaryDirectory(dir=".") as name:
        folder = Path(name)
        for number in range(chosen.rounds):
            for copies in random.sample([1, 2], 2):
                place = folder / f"{number}-{copies}"
                place.mkdir()
                found = run(place, f"save-{number}-{copies}", copies, chosen, 0)
                saves[copies].append(statistics.median(found[0::2]))
                copying += found[1::2] if copies == 2 else []
                if number or copies == 2:
                    shutil.rmtree(place)
        kept = folder / "0-1"
        both = run(kept, "restore", 1, chosen, chosen.rounds)
    gb = chosen.mib / 953.67
    ratios = [two / one for one, two in zip(saves[1], saves[2], strict=True)]
    print(f"\n{chosen.mib} MiB on each of two machines, {chosen.rounds} rounds\n")
    rows = [["", "s", "GB/s", "ratio"]]
    rows.append(["save", spread(saves[1]), f"{2 * gb / statistics.median(saves[1]):.2f}", ""])
    rows.append(
        ["save, copies=2", spread(saves[2]), f"{2 * gb / statistics.median(saves[2]):.2f}", spread(ratios)]
    )
    rows.append(["copy", spread(copying), f"{2 * gb / statistics.median(copying):.2f}", ""])
    near, far, whole = both[0::3], both[1::3], both[2::3]
    allowed = [max(one, other) / all_ for one, other, all_ in zip(near, far, whole, strict=True)]
    rows.append(["restore, near", spread(near), f"{gb / statistics.median(near):.2f}", ""])
    rows.append(["restore, far", spread(far), f"{gb / statistics.median(far):.2f}", ""])
    rows.append(["restore, both", spread(whole), f"{2 * gb / statistics.median(whole):.2f}", spread(allowed)])
    print(table(rows))
    print(
        f"half near, half far, at least {HALVES}: {verdict(statistics.median(allowed), HALVES, at_least=True)}"
    )


if __name__ == "__main__":
    main()
