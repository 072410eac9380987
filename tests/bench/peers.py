"""Measure saving and restoring tensors of PyTorch and arrays of JAX against their own
checkpointers, all in one run.

    make bench-peers                                # everything, about 50 minutes
    make bench-peers ARGS="--quick"                 # 1 GiB, one round
    make bench-peers ARGS="--workloads small20k --rounds 5"

In every round each contestant has a process of its own (:mod:`peer_process`), in shuffled order.
Ratios are taken within a round, against the peer whose median is the best; the tables show medians,
and quartiles where there are enough rounds. Every restore is compared bit for bit in the first
round.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
from measure import Spare, settle
from tables import spread, table, verdict
from workloads import GIB, WORKLOADS

#: Module and name of each contestant: modules are imported in the contestant's process only.
CONTESTANTS = {
    "raw disk": "raw_peer",
    "stepwell (torch)": "torch_peers",
    "safetensors (torch)": "torch_peers",
    "torch.save, load(mmap)": "torch_peers",
    "DCP": "torch_peers",
    "DCP, a thread per core": "torch_peers",
    "DCP async, cached stager": "torch_peers",
    "torchsnapshot async": "torch_peers",
    "stepwell (JAX)": "jax_peers",
    "Orbax": "jax_peers",
    "Orbax, zarr3": "jax_peers",
    "Orbax, no compression": "jax_peers",
}
OURS = ("stepwell (torch)", "stepwell (JAX)")
DCP = tuple(name for name in CONTESTANTS if name.startswith("DCP"))
ORBAX = tuple(name for name in CONTESTANTS if name.startswith("Orbax"))
SAFETENSORS = ("safetensors (torch)",)
OF_TORCH = (*DCP, *SAFETENSORS, "torch.save, load(mmap)", "torchsnapshot async")
ALL_PEERS = (*OF_TORCH, *ORBAX)

COLUMNS = (
    "blocked, first", "blocked", "blocked, retaining", "durable, first", "durable", "durable, retaining",
    "fresh, cold", "into, cold", "weights, cold", "fresh, warm",
)  # fmt: skip

#: A contestant that hangs is ended, and is said to have failed.
DEADLINE = 900.0


@dataclass(frozen=True)
class Plan:
    """How a workload is measured."""

    rounds: int
    #: Saves per process without retention, and whether those with retention and the warm restores
    #: are made.
    saves: int = 3
    retention: bool = True
    warm: bool = True
    #: Contestants that take part in so many rounds only. Slow operations have little noise.
    fewer: dict[str, int] = field(default_factory=dict)


PLANS = {
    "llama1g": Plan(
        2,
        fewer={
            "torchsnapshot async": 1,
            "torch.save, load(mmap)": 1,
            "DCP": 1,
            "Orbax": 1,
            "Orbax, zarr3": 1,
        },
    ),
    # torchsnapshot takes three times the state in memory beside it.
    "llama3g": Plan(
        2,
        saves=2,
        fewer={
            "torchsnapshot async": 0,
            "torch.save, load(mmap)": 1,
            "DCP": 1,
            "DCP async, cached stager": 1,
            "Orbax": 1,
            "Orbax, zarr3": 1,
            "Orbax, no compression": 1,
        },
    ),
    # Orbax's time goes by the leaf here, whatever its settings.
    "small20k": Plan(
        2,
        saves=2,
        retention=False,
        warm=False,
        fewer={"Orbax": 1, "Orbax, zarr3": 0, "Orbax, no compression": 0, "torchsnapshot async": 1},
    ),
    "large4": Plan(2, saves=2, retention=False),
    "llama60m": Plan(1),
}


@dataclass
class Result:
    """The results of one workload: ``seconds[who][column][round]``."""

    workload: str
    rounds: int
    size: int = 0
    seconds: dict[str, dict[str, dict[int, float]]] = field(
        default_factory=lambda: defaultdict(lambda: defaultdict(dict))
    )
    other: dict[str, dict[str, Any]] = field(default_factory=lambda: defaultdict(dict))
    failures: list[str] = field(default_factory=list)

    def median(self, who: str, column: str) -> float | None:
        values = self.seconds[who][column].values() if who in self.seconds else ()
        return statistics.median(values) if values else None

    def best(self, among: Iterable[str], column: str) -> str | None:
        """Returns the contestant with the smallest median."""
        found = {who: median for who in among if (median := self.median(who, column)) is not None}
        return min(found, key=found.__getitem__) if found else None

    def ratios(self, who: str, against: str, column: str) -> list[float]:
        """Within rounds; where the other has fewer of them, against its median."""
        theirs, fallback = self.seconds[against][column], self.median(against, column)
        return [
            mine / theirs.get(number, fallback) for number, mine in self.seconds[who][column].items() if mine
        ]


def run_one(
    who: str, workload: str, plan: Plan, directory: Path, spare: Spare, verify: bool
) -> dict[str, Any] | str:
    """Returns the measurements of a contestant's process, or the reason why it failed."""
    answer = directory / "answer.json"
    answer.unlink(missing_ok=True)
    command = [
        sys.executable, str(Path(__file__).parent / "peer_process.py"),
        "--module", CONTESTANTS[who], "--name", who, "--workload", workload, "--directory", str(directory),
        "--result", str(answer), "--saves", str(plan.saves),
        *(["--retention"] if plan.retention else []), *(["--warm"] if plan.warm else []), *(["--verify"] if verify else []),
    ]  # fmt: skip
    spare.release()
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=DEADLINE)
    except subprocess.TimeoutExpired:
        return f"{who}: not done within {DEADLINE:.0f} s"
    finally:
        spare.hold()
    if done.returncode != 0 or not answer.exists():
        print(done.stderr[-4000:], file=sys.stderr)
        lines = [line.strip() for line in done.stderr.splitlines() if "error" in line.lower()]
        return f"{who}: exit status {done.returncode}{': ' + lines[-1] if lines else ''}"
    found: dict[str, Any] = json.loads(answer.read_text())
    return found


def bench(workload: str, plan: Plan, people: list[str], base: Path) -> Result:
    """All rounds of a workload."""
    result = Result(workload, plan.rounds)
    # Hold memory for the next process meanwhile, so that the host does not take it.
    spare = Spare(14 * GIB if workload == "llama3g" else 8 * GIB)
    order = np.random.default_rng(11)
    for number in range(1, plan.rounds + 1):
        taking_part = [who for who in people if number <= plan.fewer.get(who, plan.rounds)]
        for index in order.permutation(len(taking_part)):
            who = taking_part[index]
            for left in base.iterdir():
                shutil.rmtree(left) if left.is_dir() else left.unlink()
            settle()
            begin = time.monotonic()
            found = run_one(who, workload, plan, base, spare, verify=number == 1)
            took = time.monotonic() - begin
            if isinstance(found, str):
                result.failures.append(f"round {number}: {found}")
                print(f"  {result.failures[-1]}", file=sys.stderr, flush=True)
                continue
            result.size = found["size"]
            for column, values in found["seconds"].items():
                result.seconds[who][column][number] = statistics.median(values)
            other = result.other[who]
            other.update({"files": found["files"], "bytes": found["bytes"]})
            for what, size in found["memory"].items():
                other[f"memory: {what}"] = max(size, other.get(f"memory: {what}", 0))
            for what, spent in found["cpu"].items():
                other.setdefault(f"cpu: {what}", []).append(spent)
            durable = ", ".join(f"{value:.2f}" for value in found["seconds"]["durable"])
            print(
                f"  round {number}: {who}: durable {durable}; fresh, cold {found['seconds']['fresh, cold'][0]:.2f} ({took:.0f} s in all)",
                flush=True,
            )
    spare.release()
    return result


#: The ratios: title, ours, the peers of which the best counts, column, and the limit by workload.
TRAIN = ("llama1g", "llama3g", "llama60m")
Target = tuple[str, str, tuple[str, ...], str, dict[str, float]]


def _same(limit: float) -> dict[str, float]:
    return dict.fromkeys(TRAIN, limit)


def targets() -> list[Target]:
    rows: list[Target] = []
    for ours in OURS:
        own, family = (OF_TORCH, "torch") if ours == "stepwell (torch)" else (ORBAX, "Orbax")
        for column in ("blocked, first", "blocked", "blocked, retaining"):
            rows.append((f"{column}: {ours} / best of {family}", ours, own, column, _same(1.0)))
            rows.append((f"{column}: {ours} / best of all peers", ours, ALL_PEERS, column, _same(1.0)))
        for column in ("durable", "durable, retaining"):
            rows.append(
                (f"{column}: {ours} / best of Orbax and DCP", ours, (*ORBAX, *DCP), column, _same(0.55))
            )
            rows.append((f"{column}: {ours} / safetensors", ours, SAFETENSORS, column, _same(0.8)))
        columns = ("fresh, cold", "into, cold") if ours == "stepwell (torch)" else ("fresh, cold",)
        for column in columns:
            rows.append(
                (f"{column}: {ours} / best of Orbax and DCP", ours, (*ORBAX, *DCP), column, _same(0.5))
            )
            rows.append((f"{column}: {ours} / safetensors", ours, SAFETENSORS, column, _same(0.6)))
        for column in ("durable", "fresh, cold"):
            rows.append((f"{column}: {ours} / Orbax", ours, ORBAX, column, {"small20k": 0.05}))
            rows.append((f"{column}: {ours} / DCP", ours, DCP, column, {"small20k": 0.1}))
    return rows  # fmt: skip


def shown_targets(result: Result) -> str:
    rows = [["ratio within a round: median (quartiles)", "the best of them", "measured", "at most", ""]]
    for title, ours, peers, column, limits in targets():
        limit = limits.get(result.workload)
        against = result.best(peers, column)
        if limit is None or against is None or ours not in result.seconds:
            continue
        ratios = result.ratios(ours, against, column)
        if not ratios:
            continue
        # Limits below a tenth are compared with more places than are shown of the others.
        middle = statistics.median(ratios)
        text = spread(ratios) if limit >= 0.2 else f"{middle:.3f}"
        reached = verdict(middle, limit) if limit >= 0.2 else ("reached" if middle <= limit else "MISSED")
        rows.append([title, against, text, f"{limit:g}", reached])
    return table(rows)


def shown_seconds(result: Result) -> str:
    rows = [["seconds (median)", "n", *COLUMNS]]
    for who in CONTESTANTS:
        if who not in result.seconds:
            continue
        cells = []
        for column in COLUMNS:
            found = result.median(who, column)
            cells.append("" if found is None else f"{found:.3f}")
        rows.append([who, str(len(result.seconds[who]["durable"])), *cells])
    return table(rows)


def shown_costs(result: Result) -> str:
    """Returns memory and CPU time. Memory held between saves is staging memory."""
    memory = ("held", "save", "fresh, cold", "into, cold", "weights, cold")
    cpu = ("save", "fresh, cold")
    rows = [
        [
            "GiB of memory beside the state; CPU seconds",
            "held between saves",
            *(f"{what}: extra" for what in memory[1:]),
            *(f"{what}: CPU s" for what in cpu),
            "files",
            "GB",
        ]
    ]
    for who, other in ((who, result.other[who]) for who in CONTESTANTS if who in result.other):
        rows.append(
            [
                who,
                *(f"{other[key] / GIB:.2f}" if (key := f"memory: {what}") in other else "" for what in memory),
                *(f"{statistics.median(other[key]):.2f}" if (key := f"cpu: {what}") in other else "" for what in cpu),
                str(other["files"]),
                f"{other['bytes'] / 1e9:.3f}",
            ]
        )  # fmt: skip
    return table(rows)


NOTES = """Not like for like, read before quoting:

* *durable* is the contestant's own end and then a `syncfs` for everybody, so nobody's missing fsyncs count in its favour. What each has synced itself by then: stepwell every file and
  directory, before the rename that publishes the step; Orbax its data and index files, not its metadata, the commit file and the rename; DCP its data file and `.metadata`, no directory;
  torch.save, safetensors and torchsnapshot nothing.
* stepwell reads back verified bytes (a CRC-32C over every block); nobody else has a checksum over arrays.
* *fresh*: safetensors and `torch.load(mmap=True)` give tensors over the mapped file. Every page is touched within the timing, but no private copy is made, as it is for all others; *into* is the same work for all who have it.
* DCP and torchsnapshot only fill tensors: *fresh* has new ones made first, within the timing.
* *blocked*: Orbax and stepwell hold JAX's immutable arrays and copy behind the call. torchsnapshot does not copy tensors of the host at all before it returns: they must not change.
  DCP (sync), torch.save and safetensors block until everything is written.
* Orbax as it is by default compresses (zstd), which gains a tenth on these values; without compression and with zarr3 it is asked by `PyTreeSave`, by default by `StandardSave`.
* *retaining*: two steps are kept, saves follow each other without a pause. stepwell and Orbax delete themselves; for the others the oldest step is deleted by hand once the new one is durable, and the time of that is
  not counted, what it does to the next save is.
* Each restore is made three times in a process, twice where three would take more than 4 s; the median counts.
* *first* is the first save of a process after `prepare`, where the contestant has something like it, and after a round trip of a few KiB.
* *raw disk*: one pre-faulted buffer in huge pages, O_DIRECT, preallocated, fsync: what the disk can do with new files. stepwell writes over those of the step that was retired last where one was, which takes the disk less, and has a
  third step on the disk for that."""


def show(result: Result) -> str:
    title = f"### {result.workload}: {result.size / GIB:.2f} GiB, {result.rounds} rounds"
    parts = [title, shown_seconds(result), shown_targets(result), shown_costs(result)]
    absent = [who for who in CONTESTANTS if PLANS[result.workload].fewer.get(who) == 0]
    if absent:
        parts.append(
            f"Not measured with this workload, for the time or memory that it takes: {'; '.join(absent)}."
        )
    if result.failures:
        parts.append("Failed:\n\n" + "\n".join(f"* {failure}" for failure in result.failures))
    return "\n\n".join(parts)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=PLANS, default=["llama1g", "llama3g", "small20k"])
    parser.add_argument("--rounds", type=int, help="instead of those that are planned")
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parser.add_argument("--quick", action="store_true", help="llama1g, one round")
    parser.add_argument(
        "--directory", type=Path, default=Path("bench-results"), help="on the disk that is measured"
    )
    options = parser.parse_args()
    if options.quick:
        options.workloads, options.rounds = ["llama1g"], 1
    assert set(PLANS) <= set(WORKLOADS)

    options.directory.mkdir(exist_ok=True)
    base = Path(tempfile.mkdtemp(prefix="peers-", dir=options.directory.resolve()))
    free = shutil.disk_usage(base).free
    if free < 25 * GIB:
        print(f"only {free / GIB:.0f} GiB are free here; the largest workload needs 25", file=sys.stderr)
    packages = ("torch", "jax", "orbax-checkpoint", "tensorstore", "torchsnapshot", "safetensors", "numpy")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    header = f"{datetime.date.today()}; {os.cpu_count()} cores, kernel {platform.release()}, Python {platform.python_version()}, {versions}"
    print(header)
    results: list[Result] = []
    report = [header]
    try:
        for workload in options.workloads:
            plan = PLANS[workload]
            if options.rounds is not None:
                plan = Plan(options.rounds, plan.saves, plan.retention, plan.warm, plan.fewer)
            print(f"\n{workload}: {plan.rounds} rounds", flush=True)
            results.append(bench(workload, plan, options.contestants, base))
            report.append(show(results[-1]))
            print("\n" + report[-1], flush=True)
    finally:
        report.append(NOTES)
        print("\n" + NOTES)
        shutil.rmtree(base, ignore_errors=True)
        (options.directory / "peers.md").write_text("\n\n".join(report) + "\n")
        (options.directory / "peers.json").write_text(json.dumps([vars(one) for one in results], indent=1))
        print(f"\nwritten to {options.directory}/peers.md and peers.json")
    if any(one.failures for one in results):
        raise SystemExit("some contestants failed: see above")


if __name__ == "__main__":
    main()
