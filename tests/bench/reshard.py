"""Measure what other ranks than those that saved pay for it: bytes, time, memory; and what several
processes pay to save to one disk.

    make bench-reshard                          # everything, about 20 minutes
    make bench-reshard ARGS="--quick"           # a quarter of the state, some cases: 1 to 2 minutes

One layer of a Llama is saved by ranks and restored by others, cut otherwise (``CASES``): by
stepwell, DCP, Orbax and slices of safetensors files, and as many bytes are read from the bare disk.
Every contestant restores everything in every round, in shuffled order, from the disk and then from
the page cache; ratios are taken within a round. Every restore of the first round is compared bit
for bit.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import numpy as np
import stepwell as sw
from crew import Crew, CrewFailed, Done, wall
from layout import Layout, llama_layer, small_layer
from measure import Spare, drop_caches, settle, warm_cache
from reshard_numpy import STEP, wanted
from tables import spread, table, verdict
from workloads import State, nbytes

#: By name: as what the state is saved and restored, and at most how much is read for what is
#: needed.
Cases = dict[str, tuple[Layout, Layout, float]]
#: Bytes read for those that are needed, at most: cut along the same axes as before, evenly and not,
#: and along others.
ALONG, UNEVEN, ACROSS = 1.05, 1.10, 1.25
SAME = "8 → 8, as saved"
CASES: Cases = {
    SAME: (Layout(8), Layout(8), ALONG),
    "8 → 2": (Layout(8), Layout(2), ALONG),
    "8 → 3, uneven": (Layout(8), Layout(3), UNEVEN),
    "8 → 2 × 4 stages": (Layout(8), Layout(2, pp=4), ALONG),
    "8 → 2, across": (Layout(8), Layout(2, cut="swapped"), ACROSS),
    "8 → 8, across": (Layout(8), Layout(8, cut="swapped"), ACROSS),
    "FSDP 4 → 2": (Layout(4, cut="fsdp"), Layout(2, cut="fsdp"), ALONG),
}
#: A sharding of JAX cuts into equal parts only.
NOT_OF_ORBAX = ("8 → 3, uneven",)
#: At most how long, in terms of the restore as it was saved, and of each peer's.
LONGER, OF_A_PEER = 1.2, 0.5
#: Memory beside the result: read buffers, and what new arrays take beyond their bytes; what
#: docs/guide/memory.md promises.
BUDGET = 64 << 20
#: Read buffers of all ranks.
BUFFERS = 512 << 20
#: Bytes that stay free on the disk.
LEFT_FREE = 10_000_000_000
WRITERS = Layout(4)
#: Limits for replicated state: written bytes / its size, and the largest writer / the mean. And for
#: seconds / the raw disk's.
ONCE, SHARE, OF_RAW = 1.01, 1.05, 1.3

OURS = {False: "stepwell, into", True: "stepwell, new"}
#: Each peer, and which of ours does the same work.
PEERS = {
    "DCP": OURS[False],
    "Orbax": OURS[True],
    "Orbax, no compression": OURS[True],
    "safetensors slices": OURS[True],
}
#: Devices of the JAX process: at most the number of ranks.
DEVICES = 8
RAW = "raw disk"
#: The owner of a data file, by contestant.
SAVING = {"stepwell": "rank", "stepwell, one file": "node"}
#: Those whose files do not depend on who saves.
WHOLE = (RAW, "safetensors slices")
CONTESTANTS = (RAW, *OURS.values(), *PEERS)
#: The cases of a quick look.
QUICK = (SAME, "8 → 3, uneven", "8 → 2, across", "FSDP 4 → 2")


@dataclass
class Restored:
    """One restore by all ranks, from the disk and then from the page cache."""

    seconds: float
    warm: float
    read: int
    cpu: float
    #: The largest memory of any rank beside its result.
    memory: int
    opened: float


class Bench:
    def __init__(self, base: Path, state: State, people: Sequence[str], cases: Cases) -> None:
        self.base, self.state, self.people, self.cases = base, state, people, cases
        self.crews = {"numpy": Crew("reshard_numpy", state)}
        if "DCP" in people:
            self.crews["torch"] = Crew("reshard_torch", state)
        if any(name.startswith("Orbax") for name in people):
            environment = {
                "XLA_FLAGS": f"--xla_force_host_platform_device_count={DEVICES}",
                "JAX_PLATFORMS": "cpu",
            }
            self.crews["jax"] = Crew("reshard_jax", state, environment)
        # Hold the memory that ranks will need whenever none are running, so that the host does not
        # take it.
        self.spare = Spare(BUFFERS + 2 * nbytes(state))
        self.spare.hold()
        self.jobs = 0
        self.restored: dict[str, dict[str, dict[int, Restored]]] = defaultdict(lambda: defaultdict(dict))
        #: By contestant and round: what each rank did in each save.
        self.saved: dict[str, list[list[list[Done]]]] = defaultdict(list)
        self.failures: list[str] = []

    def job(self) -> str:
        """A name that no job before has had."""
        self.jobs += 1
        return f"job-{self.jobs}"

    def end(self) -> None:
        self.spare.release()
        for crew in self.crews.values():
            crew.end()

    # ---- restores
    # ---------------------------------------------------------------------------------------

    def root(self, who: str, saved: Layout) -> Path:
        """Returns the directory of a contestant's checkpoint. Without ranks it has whole
        tensors."""
        name = "stepwell" if who in OURS.values() else who.replace(",", "").replace(" ", "-")
        return self.base / (name if who in WHOLE else f"{name}-{saved.cut}")

    def save(self, who: str, saved: Layout) -> None:
        """Once for all rounds."""
        root = self.root(who, saved)
        if root.exists():
            return
        if who in OURS.values():
            self.crews["numpy"].run("stepwell_save", saved.world, root, self.job(), saved)
        elif who == RAW:
            self.crews["numpy"].run("raw_save", 1, root)
        elif who == "safetensors slices":
            self.crews["numpy"].run("safetensors_save", 1, root)
        elif who == "DCP":
            self.crews["torch"].run("dcp_save", saved.world, root, self.base / self.job(), saved)
        else:
            self.crews["jax"].run("orbax_save", 1, who, root, saved)

    def restore(self, who: str, case: str, number: int) -> None:
        saved, layout, _ = self.cases[case]
        verify, root = number == 1, self.root(who, saved)
        if who in OURS.values():
            crew, function, world = "numpy", "stepwell_restore", layout.world
            arguments: tuple[Any, ...] = (root, self.job(), layout, who == OURS[True], verify)
        elif who == RAW:
            crew, function, world, arguments = "numpy", "raw_restore", layout.world, (root, layout)
        elif who == "safetensors slices":
            crew, function, world = "numpy", "safetensors_restore", layout.world
            arguments = (root, layout, verify)
        elif who == "DCP":
            crew, function, world = "torch", "dcp_restore", layout.world
            arguments = (root, self.base / self.job(), layout, verify)
        else:
            crew, function, world, arguments = "jax", "orbax_restore", 1, (who, root, layout, verify)
        # Buffers; new arrays; the page cache.
        needed = BUFFERS + nbytes(self.state) * ((who not in (RAW, OURS[False], "DCP")) + (who in PEERS))
        before = iter((lambda: self.cold(needed), lambda: self.warm(root, needed)))
        ranks = self.run(crew, function, world, *arguments, before_go=lambda: next(before)())
        if ranks is not None:
            cold, warm = ([rank[again] for rank in ranks] for again in (0, 1))
            self.restored[who][case][number] = Restored(
                wall(cold),
                wall(warm),
                sum(one.read for one in cold),
                sum(one.cpu for one in cold),
                max(one.extra_peak for one in cold + warm),
                max(one.more.get("open", 0.0) for one in cold),
            )

    def cold(self, size: int) -> None:
        """Nothing in the page cache, and so many bytes of free memory that the host has not
        taken."""
        if not drop_caches():
            print("caches cannot be dropped here: 'cold' is warm", file=sys.stderr)
        self.back(size)

    def warm(self, root: Path, size: int) -> None:
        """A checkpoint in the page cache, and free memory as above."""
        warm_cache(root)
        self.back(size)

    def back(self, size: int) -> None:
        """Has the host give so many bytes of free memory: what a rank then takes costs what memory
        costs."""
        memory = Spare(size)
        memory.hold()
        memory.release()

    def run(
        self, crew: str, function: str, world: int, *arguments: Any, before_go: Callable[[], Any]
    ) -> Any | None:
        """Returns the ranks' answers, or ``None`` after a failure, which is reported at the end."""
        self.spare.release()
        try:
            return self.crews[crew].run(function, world, *arguments, before_go=before_go)
        except CrewFailed as failure:
            print(failure, file=sys.stderr, flush=True)
            self.failures.append(str(failure).strip().splitlines()[-1])
            return None
        finally:
            self.spare.hold()

    def rounds_of_restores(self, rounds: int) -> None:
        begin = time.monotonic()
        for who in self.people:
            for saved, _, _ in self.cases.values():
                self.save(who, saved)
            print(f"  saved: {who} ({time.monotonic() - begin:.0f} s)", flush=True)
        settle()
        order = np.random.default_rng(5)
        pairs = [
            (who, case)
            for who in self.people
            for case in self.cases
            if not (who.startswith("Orbax") and case in NOT_OF_ORBAX)
        ]
        for number in range(1, rounds + 1):
            for index in order.permutation(len(pairs)):
                self.restore(*pairs[index], number)
            print(f"  restores, round {number} of {rounds} ({time.monotonic() - begin:.0f} s)", flush=True)
        for who in self.people:
            for saved, _, _ in self.cases.values():
                shutil.rmtree(self.root(who, saved), ignore_errors=True)

    # ---- saves
    # ---------------------------------------------------------------------------------------

    def rounds_of_saves(self, rounds: int, saves: int) -> None:
        """Four processes at once, ours, into files of their own and into one, and the bare
        disk's."""
        order = np.random.default_rng(6)
        for number in range(1, rounds + 1):
            found = {}
            for index in order.permutation(3):
                who = (*SAVING, RAW)[index]
                place = self.base / f"saves-{index}"
                place.mkdir()
                if who == RAW:
                    work: tuple[Any, ...] = ("raw_durable", WRITERS.world, place, WRITERS, saves)
                else:
                    work = (
                        "stepwell_durable",
                        WRITERS.world,
                        place / "root",
                        self.job(),
                        WRITERS,
                        saves,
                        SAVING[who],
                    )
                found[who] = self.run("numpy", *work, before_go=settle)
            if None not in found.values():
                for who, done in found.items():
                    self.saved[who].append(done)
            for index in range(3):
                shutil.rmtree(self.base / f"saves-{index}", ignore_errors=True)
            settle()
            print(f"  saves, round {number} of {rounds}", flush=True)

    def replicated(self) -> dict[str, list[Done]]:
        """Measures state that is equal on all eight ranks."""
        found = {}
        for shards, name in ((False, "arrays that are simply there"), (True, "shards with replica=")):
            root = self.base / "replicated"
            done = self.run("numpy", "stepwell_replicated", 8, root, self.job(), shards, before_go=settle)
            if done is not None:
                found[name] = done
            shutil.rmtree(root, ignore_errors=True)
        return found


def planned(root: Path, state: State, layout: Layout) -> int:
    """Bytes that the restores of all ranks read, as dry runs say it."""
    with sw.CheckpointManager(root, read_only=True, coordinator=None) as manager:
        ranks = [wanted(state, layout, rank) for rank in range(layout.world)]
        return sum(manager.plan(STEP, like=one, unexpected="ignore").read_bytes for one in ranks)


# ---- tables
# ---------------------------------------------------------------------------------------


def needed(state: State, layout: Layout) -> int:
    return sum(layout.needed(state, rank) for rank in range(layout.world))


def _median(bench: Bench, who: str, case: str, what: str) -> float | None:
    found = [getattr(one, what) for one in bench.restored[who][case].values()]
    return statistics.median(found) if found else None


def shown_bytes(bench: Bench, plans: dict[str, int]) -> str:
    shown = [who for who in bench.people if who not in (RAW, OURS[True])]
    rows = [["read / needed, all ranks", "GB needed", "planned", *shown, "at most", ""]]
    for case, (_, layout, limit) in bench.cases.items():
        total = needed(bench.state, layout)
        cells = []
        for who in shown:
            read = _median(bench, who, case, "read")
            cells.append("" if read is None else f"{read / total:.3f}")
        read = _median(bench, OURS[False], case, "read")
        worst = max(plans[case], read or 0) / total
        rows.append(
            [case, f"{total / 1e9:.3f}", f"{plans[case] / total:.3f}", *cells, f"{limit:g}", verdict(worst, limit)]
        )  # fmt: skip
    return table(rows)


def shown_seconds(bench: Bench) -> str:
    tables = []
    for title, what in (("cold", "seconds"), ("warm", "warm")):
        rows = [[f"seconds (median), {title}", *bench.cases]]
        for who in bench.people:
            found = [_median(bench, who, case, what) for case in bench.cases]
            rows.append([who, *("" if one is None else f"{one:.3f}" for one in found)])
        tables.append(table(rows))
    opened = [
        one.opened
        for who in OURS.values()
        for case in bench.cases
        for one in bench.restored[who][case].values()
    ]
    if opened:
        tables.append(f"Opening a manager, before each: {statistics.median(opened):.3f} s (median).")
    return "\n\n".join(tables)


def _ratios(bench: Bench, mine: tuple[str, str], other: tuple[str, str]) -> list[float]:
    """Within rounds."""
    (who, case), (against, with_case) = mine, other
    theirs = bench.restored[against][with_case]
    return [
        one.seconds / theirs[number].seconds
        for number, one in bench.restored[who][case].items()
        if number in theirs
    ]


def shown_ratios(bench: Bench) -> str:
    rows = [["cold, ratio within a round: median (quartiles)", *bench.cases, "at most", ""]]

    def add(title: str, limit: float | None, ratios: list[list[float]]) -> None:
        limits = [limit is not None and verdict(statistics.median(one), limit) for one in ratios if one]
        missed = limits.count("MISSED")
        summary = f"MISSED, {missed} of {len(limits)}" if missed else "reached" if any(limits) else ""
        rows.append([title, *map(spread, ratios), "" if limit is None else f"{limit:g}", summary])

    for ours in OURS.values():
        others = {
            case: saved == bench.cases[SAME][0] and case != SAME
            for case, (saved, _, _) in bench.cases.items()
        }
        longer = [
            _ratios(bench, (ours, case), (ours, SAME)) if other else [] for case, other in others.items()
        ]
        add(f"{ours} / the same, as saved", LONGER, longer)
    for peer, ours in PEERS.items():
        if peer in bench.people:
            add(
                f"{ours} / {peer}",
                OF_A_PEER,
                [_ratios(bench, (ours, case), (peer, case)) for case in bench.cases],
            )
    if RAW in bench.people:
        for ours in OURS.values():
            add(f"{ours} / {RAW}", None, [_ratios(bench, (ours, case), (RAW, case)) for case in bench.cases])
    return table(rows)


def shown_memory(bench: Bench) -> str:
    rows = [["MiB beside the result, the worst rank of all rounds", *bench.cases, "at most", ""]]
    for who in bench.people:
        if who == RAW:
            continue
        worst = [
            max((one.memory for one in bench.restored[who][case].values()), default=None)
            for case in bench.cases
        ]
        cells = ["" if one is None else f"{max(0, one) / (1 << 20):.0f}" for one in worst]
        limit = ["", ""]
        if who in OURS.values():
            limit = [f"{BUDGET >> 20}", "reached" if max(one or 0 for one in worst) <= BUDGET else "MISSED"]
        rows.append([who, *cells, *limit])
    cpu = [["CPU seconds of all ranks (median), cold", *bench.cases]]
    for who in bench.people:
        values = [_median(bench, who, case, "cpu") for case in bench.cases]
        cpu.append([who, *("" if one is None else f"{one:.2f}" for one in values)])
    return table(rows) + "\n\n" + table(cpu)


def shown_replicated(found: dict[str, list[Done]], size: int) -> str:
    rows = [
        [
            "the same on 8 ranks, saved",
            "written in all / its size",
            "at most",
            "",
            "largest writer / mean",
            "at most",
            "",
        ]
    ]
    for name, done in found.items():
        written = [one.written for one in done]
        once, share = sum(written) / size, max(written) / statistics.mean(written)
        rows.append(
            [name, f"{once:.3f}", f"{ONCE:g}", verdict(once, ONCE), f"{share:.3f}", f"{SHARE:g}", verdict(share, SHARE)]
        )  # fmt: skip
    return table(rows)


def shown_saves(bench: Bench) -> str:
    """A row for each contestant; a round's figure is the median of its saves."""

    def durable(done: list[list[Done]]) -> float:
        return statistics.median(wall(list(save)) for save in zip(*done, strict=True))

    rows = [["4 processes save to one disk (seconds)", "blocked", "durable", "GB written", "CPU s"]]
    for who, rounds in bench.saved.items():
        every = [list(save) for done in rounds for save in zip(*done, strict=True)]
        blocked = statistics.median(max(one.more.get("blocked", 0.0) for one in save) for save in every)
        written = statistics.median(sum(one.written for one in save) for save in every)
        cpu = statistics.median(sum(one.cpu for one in save) for save in every)
        seconds = [wall(save) for save in every]
        rows.append([who, f"{blocked:.3f}", spread(seconds), f"{written / 1e9:.3f}", f"{cpu:.2f}"])
    limits = [["ratio within a round: median (quartiles)", "measured", "at most", ""]]
    for who in SAVING:
        pairs = zip(bench.saved[who], bench.saved[RAW], strict=True)
        ratios = [durable(ours) / durable(raw) for ours, raw in pairs]
        if ratios:
            middle = statistics.median(ratios)
            limits.append([f"durable: {who} / {RAW}", spread(ratios), f"{OF_RAW:g}", verdict(middle, OF_RAW)])
    return table(rows) + "\n\n" + table(limits)


NOTES = """Not like for like, read before quoting:

* *8 → 2* and so on: ranks of tensor parallelism that saved and that restore; *across*: every matrix cut along its other axis; *stages*: ranks for each of four stages of a pipeline; *FSDP*: everything cut along its first axis.
* stepwell, DCP and the safetensors slices have a process for each rank; Orbax has one process with 8 devices of the host, which is what works without accelerators, and saves it messages and memory. It
  cannot cut into three.
* *cold*: nothing is in the page cache. *warm*: the same ranks restore again, and everything is; the raw disk's row is then a copy out of the page cache by one thread for each rank.
* *into*: into memory that is there and has been touched, as DCP does it. *new*: into new memory, as Orbax and `get_slice` do it.
* stepwell verifies every block that it reads; nobody else has a checksum over arrays.
* stepwell and the raw disk read past the page cache where it does not have the bytes, each rank for itself; the ranks of the others share the cache, so a block that two of them want is read once, and what is read may be less than what is needed.
* safetensors: whole tensors in four files, saved by one process. Orbax as it is by default compresses, which gains a tenth on these values.
* *read* is what the kernel counts as read from the disk for the ranks' processes; it includes the manifest, the index, and what an import needs.
* Opening (a manager whose ranks find each other; a process group) is not counted as restoring.
* Memory beside the result is of the worst rank; Orbax's one process stands for all of them, and what its new arrays take is counted as the result. The page cache is counted for nobody but as far as a process has mapped it
  (safetensors)."""


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--contestants", nargs="+", choices=CONTESTANTS, default=list(CONTESTANTS))
    parts = ("restores", "replicated", "saves")
    parser.add_argument("--parts", nargs="+", choices=parts, default=list(parts))
    parser.add_argument(
        "--quick",
        action="store_true",
        help="a look: a quarter of the state, one round of some restores; small boxes have more of what is read beside them",
    )
    parser.add_argument(
        "--directory", type=Path, default=Path("bench-results"), help="on the disk that is measured"
    )
    options = parser.parse_args()
    if options.quick:
        options.rounds = 1
    if not set(OURS.values()) & set(options.contestants):
        parser.error("all is held against stepwell's: name one of its contestants")
    options.directory.mkdir(exist_ok=True)
    base = Path(tempfile.mkdtemp(prefix="reshard-", dir=options.directory.resolve()))
    packages = ("torch", "jax", "orbax-checkpoint", "safetensors", "numpy")
    versions = ", ".join(f"{name} {version(name)}" for name in packages)
    header = f"{datetime.date.today()}; {os.cpu_count()} cores, kernel {platform.release()}, Python {platform.python_version()}, {versions}"
    print(header, flush=True)
    begin = time.monotonic()
    state = (small_layer if options.quick else llama_layer)(np.random.default_rng(1))
    size = nbytes(state)
    # The files of all contestants, as saved by two kinds of ranks.
    free, wanted_free = shutil.disk_usage(base).free, 12 * size + LEFT_FREE
    if free < wanted_free:
        base.rmdir()
        parser.error(
            f"{options.directory} has {free / 1e9:.0f} GB free, {wanted_free / 1e9:.0f} GB are needed"
        )
    print(f"{size / 1e9:.2f} GB, {options.rounds} rounds ({time.monotonic() - begin:.0f} s)", flush=True)
    cases = {case: CASES[case] for case in QUICK} if options.quick else CASES
    bench = Bench(base, state, options.contestants, cases)
    report = [header, f"### One layer of a Llama, {size / 1e9:.2f} GB, {options.rounds} rounds"]
    try:
        if "restores" in options.parts:
            for saved, _, _ in cases.values():
                bench.save(OURS[False], saved)
            plans = {
                case: planned(bench.root(OURS[False], saved), state, layout)
                for case, (saved, layout, _) in cases.items()
            }
            bench.rounds_of_restores(options.rounds)
            report += [
                shown_bytes(bench, plans),
                shown_seconds(bench),
                shown_ratios(bench),
                shown_memory(bench),
            ]
        if "replicated" in options.parts:
            report.append(shown_replicated(bench.replicated(), size))
        if "saves" in options.parts:
            bench.rounds_of_saves(options.rounds, 2 if options.quick else 3)
            report.append(shown_saves(bench))
    finally:
        bench.end()
        shutil.rmtree(base, ignore_errors=True)
        if bench.failures:
            report.append("Failed:\n\n" + "\n".join(f"* {failure}" for failure in bench.failures))
        report.append(NOTES)
        text = "\n\n".join(report) + "\n"
        (options.directory / "reshard.md").write_text(text)
        figures = {"restores": bench.restored, "saves": bench.saved}
        (options.directory / "reshard.json").write_text(json.dumps(figures, indent=1, default=vars))
        print(
            f"\n{text}\n({time.monotonic() - begin:.0f} s) written to {options.directory}/reshard.md and reshard.json"
        )
    if bench.failures:
        raise SystemExit("some contestants failed: see above")


if __name__ == "__main__":
    main()
