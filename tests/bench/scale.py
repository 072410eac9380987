"""Measure what must stay small however much there is: leaves, steps, bytes of JAX arrays, and the
import.

    make bench-scale                          # about 10 minutes, mostly a root of 10 000 steps
    make bench-scale ARGS="--quick"           # up to 1 000 steps, 1 GiB

Figures are medians (and quartiles) of wall time; every one has its target beside it.
"""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import resource
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import json

import numpy as np
import stepwell as sw
from measure import settle
from stepwell import _core
from tables import table

#: Sizes at which a growing root is inspected and `stepwell ls` is run.
SIZES = (100, 1_000, 10_000)
LISTED = 2_000
#: The limit of a cost that must not depend on the number of steps, relative to the smallest root.
FLAT = 2.0

DEADLINE = 1200.0

#: For new processes: as they are where modules have been compiled, which the first of them does.
ENVIRONMENT = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}


class Report:
    """Rows of one table."""

    def __init__(self) -> None:
        self.rows = [["milliseconds, median (quartiles)", "n", "measured", "at most", ""]]
        self.figures: dict[str, list[float]] = {}

    def add(self, what: str, seconds: list[float], limit_ms: float | None = None) -> None:
        """A row; without a limit it is shown only."""
        middle = 1000 * statistics.median(seconds)
        text = f"{middle:.3g}" if middle < 100 else f"{middle:.0f}"
        if len(seconds) >= 3:
            low, _, high = (1000 * one for one in statistics.quantiles(seconds, n=4))
            text += f" ({low:.3g}–{high:.3g})"
        reached = "" if limit_ms is None else "reached" if middle <= limit_ms else "MISSED"
        self.rows.append(
            [what, str(len(seconds)), text, "" if limit_ms is None else f"{limit_ms:g}", reached]
        )
        self.figures[what] = seconds
        print("  " + " | ".join(self.rows[-1]), flush=True)

    def say(self, what: str, measured: str, limit: str, reached: bool) -> None:
        """A row that is no time."""
        self.rows.append([what, "", measured, limit, "reached" if reached else "MISSED"])
        print("  " + " | ".join(self.rows[-1]), flush=True)


def seconds_of(call: Callable[[], Any], times: int) -> list[float]:
    found = []
    for _ in range(times):
        begin = time.perf_counter()
        call()
        found.append(time.perf_counter() - begin)
    return found


def importing(report: Report) -> None:
    """In new processes, after numpy and ml_dtypes; the files are in the page cache."""

    def child(code: str) -> float:
        program = (
            f"import numpy, ml_dtypes, time; t = time.perf_counter(); {code}; print(time.perf_counter() - t)"
        )
        return float(
            subprocess.run(
                [sys.executable, "-c", program],
                capture_output=True,
                text=True,
                check=True,
                timeout=60,
                env=ENVIRONMENT,
            ).stdout
        )

    child("from stepwell import CheckpointManager")
    report.add(
        "import stepwell, beyond numpy and ml_dtypes", [child("import stepwell") for _ in range(11)], 30
    )
    report.add(
        "the same, and all that a manager needs",
        [child("from stepwell import CheckpointManager") for _ in range(11)],
    )


def leaves(report: Report, base: Path) -> None:
    """100 000 leaves in 1000 containers."""
    state = {f"block_{n}": {f"leaf_{m}": np.full(4, m, np.float32) for m in range(100)} for n in range(1_000)}
    path = str(base / "leaves")
    sw.save(path, {"params": state})

    def whole() -> None:
        with sw.open(path) as checkpoint:
            checkpoint.metadata()

    def opened() -> None:
        with sw.open(path):
            pass

    def engine() -> None:
        _core.open_path(path, None, "auto").manifest()

    whole()
    report.add("open and manifest of 100 000 leaves, the engine", seconds_of(engine, 21), 10)
    report.add("sw.open of 100 000 leaves", seconds_of(opened, 21))
    report.add("sw.open and metadata() of 100 000 leaves, the tree in Python", seconds_of(whole, 7), 250)
    shutil.rmtree(path)
    target = {f"block_{n}": {f"leaf_{m}": np.zeros(256) for m in range(100)} for n in range(200)}
    sw.save(path, target)
    report.add(
        "restore of 20 000 leaves of 2 KiB in place", seconds_of(lambda: sw.restore(path, into=target), 9)
    )
    report.add("the same into new memory", seconds_of(lambda: sw.restore(path), 9))
    shutil.rmtree(path)


def listing(report: Report, root: Path) -> None:
    """The command in a new process, as a shell runs it."""

    def run(*arguments: str) -> Callable[[], Any]:
        return lambda: subprocess.run(
            [sys.executable, *arguments], check=True, stdout=subprocess.DEVNULL, timeout=60, env=ENVIRONMENT
        )

    script = str(Path(sys.executable).with_name("stepwell"))
    run(script, "ls", str(root))()
    report.add("an interpreter that does nothing", seconds_of(run("-c", "pass"), 7))
    report.add(f"stepwell ls of {LISTED} steps", seconds_of(run(script, "ls", str(root)), 11), 200)


def grow(root: Path, steps: int) -> None:
    """Adds tiny steps until there are so many. They are saved into small roots beside it and moved:
    what a save costs with many steps there is what is measured."""
    with sw.CheckpointManager(root):
        pass  # makes the root's own record
    there = [int(path.name.removeprefix("step_")) for path in root.glob("step_*")]
    first = max(there, default=-1) + 1
    last = first + steps - len(there)
    for begin in range(first, last, 50):
        beside = root.with_name("beside")
        with sw.CheckpointManager(beside) as manager:
            for step in range(begin, min(begin + 50, last)):
                manager.save(step, tiny(step), metrics={"loss": 1.0 / (step + 1)})
        for path in sorted(beside.glob("step_*")):
            path.rename(root / path.name)
        shutil.rmtree(beside)


def tiny(step: int) -> dict[str, Any]:
    return {"params": {"w": np.full(16, step, np.float32)}, "updates": step}


def bookkeeping(report: Report, root: Path, steps: int) -> dict[str, float]:
    """With so many steps kept, what a save costs, its retention included: each one removes the
    oldest step. Medians in seconds."""
    retention = sw.keep_latest(steps) | sw.keep_best(1, "loss", mode="min")
    begin = time.perf_counter()
    manager = sw.CheckpointManager(root, retention=retention)
    opened = time.perf_counter() - begin
    blocked, committed, cpu = [], [], []
    with manager:
        latest = [one / 1_000 for one in seconds_of(lambda: [manager.latest_step() for _ in range(1_000)], 5)]
        next_step = [
            one / 1_000 for one in seconds_of(lambda: [manager.next_step() for _ in range(1_000)], 5)
        ]
        for _ in range(25):
            step = manager.next_step()
            before = resource.getrusage(resource.RUSAGE_SELF)
            begin = time.perf_counter()
            save = manager.save(step, tiny(step), metrics={"loss": 1.0 / (step + 1)})
            blocked.append(time.perf_counter() - begin)
            save.result(60)
            committed.append(time.perf_counter() - begin)
            manager.wait_until_finished()
            after = resource.getrusage(resource.RUSAGE_SELF)
            cpu.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        planned = seconds_of(manager.plan_retention, 3)
        kept = len(manager.all_steps())
        settle(0.5)
    measured = {
        "latest_step": latest,
        "next_step": next_step,
        "save, blocked": blocked[5:],
        "save, committed": committed[5:],
        "save with retention, CPU time": cpu[5:],
    }
    for what, found in measured.items():
        report.add(f"{kept} steps: {what}", found)
    report.add(f"{kept} steps: opening the manager (reads every manifest)", [opened])
    report.add(f"{kept} steps: plan_retention(), the whole list", planned)
    return {what: statistics.median(found) for what, found in measured.items()}


def flatness(report: Report, base: Path, sizes: list[int]) -> None:
    root = base / "steps"
    at: dict[int, dict[str, float]] = {}
    listed = max(sizes) < LISTED
    for steps in sorted({*sizes, *([] if listed else [LISTED])}):
        begin = time.perf_counter()
        grow(root, steps)
        print(f"  (a root of {steps} steps: {time.perf_counter() - begin:.0f} s)", flush=True)
        if steps == LISTED:
            listing(report, root)
        else:
            at[steps] = bookkeeping(report, root, steps)
    smallest, largest = min(at), max(at)
    for what, first in at[smallest].items():
        times = at[largest][what] / first
        report.say(f"{what}: {largest} steps / {smallest} steps", f"{times:.2f}", f"{FLAT:g}", times <= FLAT)


def arrays_of_jax(report: Report, base: Path, quick: bool) -> None:
    """In a process of its own: see :mod:`scale_jax`."""
    answer = base / "jax.json"
    done = subprocess.run(
        [sys.executable, str(Path(__file__).parent / "scale_jax.py"), str(base), str(answer), "quick" if quick else "all"],
        capture_output=True, text=True, timeout=DEADLINE,
    )  # fmt: skip
    if done.returncode != 0:
        raise SystemExit(f"scale_jax.py: exit status {done.returncode}\n{done.stderr[-2000:]}")
    for name, found in json.loads(answer.read_text()).items():
        report.add(f"save of JAX arrays: {name}", found["blocked"], 120 if "20 000" in name else 10)
        report.add(f"save of JAX arrays: {name}, the first after prepare", [found["first"]])
        report.add(f"{name}: a DLPack capsule of each, and nothing else", found["dlpack"])
        donated = found.get("donated")
        if donated is None:
            continue
        alone = statistics.median(donated["alone"])
        report.say(
            f"{name}: saved as it was, though a step donated it meanwhile",
            "yes" if donated["intact"] else "no", "yes", donated["intact"],
        )  # fmt: skip
        report.add(f"{name}: a donating step alone", donated["alone"])
        report.add(f"{name}: the same step into new memory, without a save", [donated["new_memory"]])
        report.add(f"{name}: the first donating step after save", [donated["beside"][0]])
        extra = sum(one - alone for one in donated["beside"])
        report.add(f"{name}: extra time of the {len(donated['beside'])} steps after save", [max(0.0, extra)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parts = ("import", "leaves", "jax", "steps")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument("--quick", action="store_true", help="up to 1 000 steps, 1 GiB")
    parser.add_argument(
        "--directory", type=Path, default=Path("bench-results"), help="on the disk that is measured"
    )
    options = parser.parse_args()
    options.directory.mkdir(exist_ok=True)
    base = Path(tempfile.mkdtemp(prefix="scale-", dir=options.directory.resolve()))
    header = f"{datetime.date.today()}; {os.cpu_count()} cores, kernel {platform.release()}, Python {platform.python_version()}, numpy {np.__version__}"
    print(header, flush=True)
    report = Report()
    try:
        if "import" in options.parts:
            importing(report)
        if "leaves" in options.parts:
            leaves(report, base)
        if "jax" in options.parts:
            arrays_of_jax(report, base, options.quick)
        if "steps" in options.parts:
            flatness(report, base, [one for one in SIZES if one <= 1_000 or not options.quick])
    finally:
        shutil.rmtree(base, ignore_errors=True)
        text = f"### scale\n\n{header}\n\n{table(report.rows)}\n"
        (options.directory / "scale.md").write_text(text)
        (options.directory / "scale.json").write_text(json.dumps(report.figures, indent=1))
        print(f"\n{text}\nwritten to {options.directory}/scale.md and scale.json")


if __name__ == "__main__":
    main()
