"""Measure saves to and restores from an object store beside other clients of the same server.

    python tests/bench/stores.py             # 1 GiB, 5 rounds: about 3 minutes

The server is ``tests/src/bin/fake_store``: it keeps objects in memory, on this machine. So the
rates are those of the clients and the loopback, and only their ratios mean something. Each round
runs all ways in shuffled order. All use parts of 8 MiB and 32 requests at once. The figures are
medians, with the least and the most.

* ``raw``: obstore sends and reads the bytes of the same arrays as one object, without checksums.
* ``stepwell, CRC64NVME`` is ``sw.Store(checksum=True)``. It has no limit: its CPU time decides if
  that is the default.
* ``s5cmd``: the command copies a file of that size in tmpfs.

``save()`` is also timed while the server is stopped: it gets no CPU time until the state is copied.

Other clients (s3torchconnector, tensorstore) send requests that this server does not know.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import resource
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import zlib
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))
sys.path.insert(0, str(Path(__file__).parents[1] / "python"))

import numpy as np
import stepwell as sw
from fake_store import PROCESS, control, fake_store
from tables import spread, table, verdict

PART = 8 << 20
AT_ONCE = 32
#: Limits, as ratios to the raw client.
SAVE, RESTORE, CPU, BLOCKED = 0.90, 0.90, 1.15, 1.05

State = dict[str, np.ndarray]


def cpu_seconds() -> float:
    """CPU time of this process and of its children that have ended."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


class Raw:
    """obstore, on the bytes of all arrays behind each other."""

    def __init__(self, flat: np.ndarray, endpoint: str) -> None:
        import obstore
        from obstore.store import S3Store

        self._obstore, self._flat = obstore, flat
        self._store = S3Store(
            "bucket", endpoint=endpoint, region="us-east-1", client_options={"allow_http": True},
            config={"aws_unsigned_payload": "true"},
        )  # fmt: skip

    def save(self, step: int) -> None:
        self._obstore.put(
            self._store, "raw/object", memoryview(self._flat), use_multipart=True, chunk_size=PART,
            max_concurrency=AT_ONCE,
        )  # fmt: skip

    def restore(self) -> None:
        """Reads parts into the place of the arrays, as a restore in place does."""
        from concurrent.futures import ThreadPoolExecutor

        def part(start: int) -> None:
            end = min(start + PART, self._flat.nbytes)
            got = self._obstore.get_range(self._store, "raw/object", start=start, end=end)
            self._flat[start:end] = np.frombuffer(got, np.uint8)

        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(part, range(0, self._flat.nbytes, PART)))


class Stepwell:
    """A manager whose root is in the store, or on a disk."""

    def __init__(self, root: str | sw.Store, state: State) -> None:
        self._manager = sw.CheckpointManager(root, retention=1, options=sw.Options(grace=0.0))
        self._state = state
        self.blocked: list[float] = []

    def save(self, step: int) -> None:
        begun = time.perf_counter()
        save = self._manager.save(step, self._state)
        self.blocked.append(time.perf_counter() - begun)
        save.result()

    def save_beside_stopped(self, process: int, step: int) -> float:
        """Saves to a server that gets no CPU time until ``save()`` returns. Returns its seconds."""
        os.kill(process, signal.SIGSTOP)
        try:
            begun = time.perf_counter()
            save = self._manager.save(step, self._state)
            seconds = time.perf_counter() - begun
        finally:
            os.kill(process, signal.SIGCONT)
        save.result()
        return seconds

    def restore(self) -> None:
        self._manager.restore(into=self._state)

    def close(self) -> None:
        self._manager.close()


class S5cmd:
    """The command, on a file in memory."""

    def __init__(self, nbytes: int, folder: Path, endpoint: str) -> None:
        self._file = folder / "object"
        with self._file.open("wb") as file:
            file.write(os.urandom(1 << 20) * (nbytes >> 20))
        options = ["--concurrency", str(AT_ONCE), "--part-size", str(PART >> 20)]
        program = str(Path(sys.executable).parent / "s5cmd")
        command = [program, "--endpoint-url", endpoint, "cp", *options]
        self._up = [*command, str(self._file), "s3://bucket/s5/object"]
        self._down = [*command, "s3://bucket/s5/object", str(folder / "back")]

    def save(self, step: int) -> None:
        subprocess.run(self._up, check=True, capture_output=True)

    def restore(self) -> None:
        subprocess.run(self._down, check=True, capture_output=True)


def measured(
    ways: dict[str, Callable[[int], None]], rounds: int
) -> dict[str, tuple[list[float], list[float]]]:
    """Seconds and CPU seconds of each way. The first round warms up."""
    found: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ways}
    for number in range(rounds + 1):
        for name in random.sample(list(ways), len(ways)):
            cpu, begun = cpu_seconds(), time.perf_counter()
            ways[name](number)
            if number:
                found[name][0].append(time.perf_counter() - begun)
                found[name][1].append(cpu_seconds() - cpu)
    return found


def rows(found: dict[str, tuple[list[float], list[float]]], nbytes: int) -> list[list[str]]:
    """A table of rates and CPU time, with ratios to the raw client."""
    raw_seconds, raw_cpu = (statistics.median(one) for one in found["raw"])
    lines = [["", "GB/s", "to raw", "CPU s", "to raw"]]
    for name, (seconds, cpu) in found.items():
        rates = [nbytes / one / 1e9 for one in seconds]
        ratio = raw_seconds / statistics.median(seconds)
        lines.append(
            [name, spread(rates), f"{ratio:.2f}", spread(cpu), f"{statistics.median(cpu) / raw_cpu:.2f}"]
        )
    return lines


def median_ratio(found: dict[str, tuple[list[float], list[float]]], which: int) -> float:
    """Raw's median by stepwell's: seconds (0) or CPU seconds (1)."""
    return statistics.median(found["raw"][which]) / statistics.median(found["stepwell"][which])


def main() -> None:
    options = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    options.add_argument("--gib", type=float, default=1.0)
    options.add_argument("--rounds", type=int, default=5)
    chosen = options.parse_args()
    count = max(1, int(chosen.gib * 16))
    flat = np.random.default_rng(0).integers(0, 256, count * (64 << 20), np.uint8)
    state = {
        f"layer{i}": flat[i << 26 : (i + 1) << 26].view(np.float32).reshape(4096, 4096) for i in range(count)
    }
    written = zlib.crc32(flat)
    versions = {name: metadata.version(name) for name in ("obstore", "s5cmd")}
    print(f"{flat.nbytes / 2**30:g} GiB in {count} arrays; {json.dumps(versions)}")
    with (
        fake_store("s3") as variables,
        tempfile.TemporaryDirectory() as disk,
        tempfile.TemporaryDirectory(dir="/dev/shm") as memory,
    ):
        os.environ.update(variables)
        endpoint = variables["AWS_ENDPOINT_URL"]
        ours, on_disk = Stepwell("s3://bucket/run", state), Stepwell(disk, state)
        raw, command = Raw(flat, endpoint), S5cmd(flat.nbytes, Path(memory), endpoint)
        checked = Stepwell(sw.Store("s3://bucket/checked", checksum=True), state)
        everyone: dict[str, Any] = {"raw": raw, "stepwell": ours, "s5cmd": command}
        saves = measured(
            {
                **{name: one.save for name, one in everyone.items()},
                "stepwell, CRC64NVME": checked.save,
                "on disk": on_disk.save,
            },
            chosen.rounds,
        )
        saves.pop("on disk")
        stopped = statistics.median(
            ours.save_beside_stopped(int(variables[PROCESS]), 500 + number) for number in range(chosen.rounds)
        )
        control(variables, "reset")
        ours.save(1000)
        of_save = control(variables, "requests")
        restores = measured(
            {name: lambda _, one=one: one.restore() for name, one in everyone.items()}, chosen.rounds
        )
        for one in (raw, ours):
            flat.fill(0)
            one.restore()
            assert zlib.crc32(flat) == written, "other bytes came back"
        blocked, blocked_on_disk = (statistics.median(one.blocked[1:]) for one in (ours, on_disk))
        for manager in (ours, checked, on_disk):
            manager.close()
    print("\nSave until it is committed")
    print(table(rows(saves, flat.nbytes)))
    print("\nRestore in place")
    print(table(rows(restores, flat.nbytes)))
    parts = of_save["part"]
    print("\nAgainst the limits")
    print(
        table(
            [
                ["", "measured", "limit", ""],
                ["save, to raw", f"{median_ratio(saves, 0):.2f}", f">= {SAVE}", verdict(median_ratio(saves, 0), SAVE, at_least=True)],
                ["restore, to raw", f"{median_ratio(restores, 0):.2f}", f">= {RESTORE}", verdict(median_ratio(restores, 0), RESTORE, at_least=True)],
                ["CPU of a save, to raw", f"{1 / median_ratio(saves, 1):.2f}", f"<= {CPU}", verdict(1 / median_ratio(saves, 1), CPU)],
                ["CPU of a restore, to raw", f"{1 / median_ratio(restores, 1):.2f}", f"<= {CPU}", verdict(1 / median_ratio(restores, 1), CPU)],
                ["save() blocks, to a disk", f"{blocked / blocked_on_disk:.2f}", f"<= {BLOCKED}", verdict(blocked / blocked_on_disk, BLOCKED)],
                ["the same, server stopped", f"{stopped / blocked_on_disk:.2f}", "", ""],
                ["requests of a save beside its parts", f"{sum(v for k, v in of_save.items() if k not in ('part', 'bytes_in', 'bytes_out', 'faults'))}", "", ""],
                ["parts of a save", f"{parts}", "", ""],
            ]
        )
    )  # fmt: skip


if __name__ == "__main__":
    main()
