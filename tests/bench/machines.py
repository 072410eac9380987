"""Measure a near tier on the local disks of two machines: its copies, and reads from the other one.

    python tests/bench/machines.py             # 512 MiB on each machine, 5 rounds: about 4 minutes

Two processes play the machines: each has a host name and a directory of its own. They share the
cores, the disk and the loopback device, so only ratios mean something. The last restores have a
link between the machines that is slower than the disk, so that they share less: a network
namespace whose loopback device has a limited rate. It needs root, `unshare`, `ip` and `tc`.

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


def linked(kept: Path, chosen: argparse.Namespace) -> list[float]:
    """Restores over a slow link. Returns the seconds, and none where there is no such link."""
    limit = f"ip link set lo up && tc qdisc add dev lo root tbf rate {chosen.link}gbit burst 1mb latency 50ms"
    restore = [sys.executable, __file__, "--mib", str(chosen.mib), "--rounds", str(chosen.rounds)]
    restore += ["--folder", str(kept), "--linked"]
    command = ["unshare", "--net", "sh", "-c", f'{limit} && exec "$@"', "sh", *restore]
    found = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=600, check=False)
    return [float(word) for word in found.stdout.split()] if found.returncode == 0 else []


def rows_of_restores(found: list[float], gb: float, link: str) -> tuple[list[list[str]], float]:
    """Returns the rows of a table, and the part that is reached of what the two rates allow."""
    near, far, whole = found[0::3], found[1::3], found[2::3]
    allowed = [max(one, other) / all_ for one, other, all_ in zip(near, far, whole, strict=True)]
    rows = [
        [f"restore, near{link}", spread(near), f"{gb / statistics.median(near):.2f}", ""],
        [f"restore, far{link}", spread(far), f"{gb / statistics.median(far):.2f}", ""],
        [f"restore, both{link}", spread(whole), f"{2 * gb / statistics.median(whole):.2f}", spread(allowed)],
    ]
    return rows, statistics.median(allowed)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--link", type=float, default=4.0, help="Gbit/s of the slow link")
    parser.add_argument("--linked", action="store_true", help=argparse.SUPPRESS)
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
    if chosen.linked:
        print(*run(chosen.folder, "linked", 1, chosen, chosen.rounds))
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
        alone = run(kept, "restore", 1, chosen, chosen.rounds)
        slow = linked(kept, chosen)
    gb = chosen.mib / 953.67
    ratios = [two / one for one, two in zip(saves[1], saves[2], strict=True)]
    print(f"\n{chosen.mib} MiB on each of two machines, {chosen.rounds} rounds\n")
    rows = [["", "s", "GB/s", "ratio"]]
    rows.append(["save", spread(saves[1]), f"{2 * gb / statistics.median(saves[1]):.2f}", ""])
    rows.append(
        ["save, copies=2", spread(saves[2]), f"{2 * gb / statistics.median(saves[2]):.2f}", spread(ratios)]
    )
    rows.append(["copy", spread(copying), f"{2 * gb / statistics.median(copying):.2f}", ""])
    measured = [("both on one disk", *rows_of_restores(alone, gb, ""))]
    if slow:
        link = f", link of {chosen.link:g} Gbit/s"
        measured.append((link.strip(", "), *rows_of_restores(slow, gb, link)))
    for _, restored, _ in measured:
        rows += restored
    print(table(rows))
    for what, _, reached in measured:
        told = verdict(reached, HALVES, at_least=True)
        print(f"half near, half far, {what}, at least {HALVES}: {told}")
    if not slow:
        print("a slow link was not tried: it needs root, unshare, ip and tc")


if __name__ == "__main__":
    main()
