"""Measure saving and restoring against the raw disk and the peers, all in one run, paired and
interleaved.

    make bench-disk                             # everything, about 30 minutes
    make bench-disk ARGS="--quick"              # 1 GiB, three rounds
    make bench-disk ARGS="--workloads small20k --rounds 15"

Every contestant does every operation in every round, in shuffled order; ratios are taken within a
round, and the table shows their median (and, in parentheses, the quartiles). Restores are compared
bit for bit in the first round, which is not timed.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import pickle
import platform
import shutil
import statistics
import sys
import tempfile
import traceback
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

import contestants as c
import numpy as np
import stepwell as sw
from measure import Spare, drop_caches, footprint, measured, settle, warm_cache
from tables import spread, table, verdict
from workloads import GIB, MEASURED, WORKLOADS, State, differences, empty_like, flat, nbytes

RESTORES = ("into, cold", "fresh, cold", "weights, cold", "into, warm", "fresh, warm")
Samples = dict[str, dict[str, list[float]]]


class Forked:
    """A contestant in a child process that shares the state's memory: for what must not share this
    process's staging memory."""

    def __init__(self, make: Callable[[], Any], state: State) -> None:
        self.requests, to_child = os.pipe()
        from_child, self.answers = os.pipe()
        self.child = os.fork()
        if self.child == 0:
            code = 1
            os.close(to_child)  # so that the parent's death is the end of the requests
            os.close(from_child)
            try:
                self._serve(make(), state)
                code = 0
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                os._exit(code)
        os.close(self.requests)
        os.close(self.answers)
        self.to_child, self.from_child = os.fdopen(to_child, "wb"), os.fdopen(from_child, "rb")
        self.name = self.call("name")

    def _serve(self, contestant: Any, state: State) -> None:
        with os.fdopen(self.requests, "rb") as requests, os.fdopen(self.answers, "wb") as answers:
            while True:
                try:
                    what, directory = pickle.load(requests)
                except EOFError:
                    return
                if what == "name":
                    contestant.prepare(state)
                    answer: Any = contestant.name
                else:
                    answer = measured(lambda directory=directory: contestant.save(directory, state))
                pickle.dump(answer, answers)
                answers.flush()

    def call(self, what: str, directory: Path | None = None) -> Any:
        pickle.dump((what, directory), self.to_child)
        self.to_child.flush()
        return pickle.load(self.from_child)

    def end(self) -> None:
        self.to_child.close()
        os.waitpid(self.child, 0)


def bench(workload: str, rounds: int, base: Path, rng: np.random.Generator) -> dict[str, Any]:
    state = WORKLOADS[workload](rng)
    size = nbytes(state)
    print(
        f"\n{workload}: {size / GIB:.2f} GiB in {sum(1 for _ in flat(state))} leaves, {rounds} rounds",
        flush=True,
    )
    quarter = Forked(lambda: c.Stepwell(0.25, "stepwell, ring = state / 4"), state)
    staged = c.Staged(state)
    people: list[Any] = [c.Raw(staged), c.RawCopied(staged), c.Stepwell(), c.Safetensors()]
    target = empty_like(state)
    for contestant in people:
        contestant.prepare(state)
    copy = c.PlainCopy(staged, state)
    # What a restore into fresh memory takes, and the page cache of who reads through it.
    spare = Spare(2 * size + (512 << 20))

    seconds: Samples = defaultdict(lambda: defaultdict(list))
    other: dict[str, dict[str, Any]] = defaultdict(dict)
    order = np.random.default_rng(7)
    for number in range(rounds + 1):
        timed = number > 0
        spare.hold()
        settle()
        drop_caches()
        there: dict[str, Path] = {}
        participants = [*people, quarter, copy]
        for index in order.permutation(len(participants)):
            who = participants[index]
            if who is copy:
                timing = measured(copy.run)
                if timed:
                    seconds[copy.name]["blocked"].append(timing.seconds)
                continue
            directory = base / f"{workload}-{number}-{index}"
            if who is quarter:
                timing = quarter.call("save", directory)
            else:
                timing = spare.measured(lambda who=who, directory=directory: who.save(directory, state))
                there[who.name] = directory
            blocked, durable = timing.result
            if timed:
                seconds[who.name]["blocked"].append(blocked)
                seconds[who.name]["durable"].append(durable)
            files, stored = footprint(directory.resolve())
            other[who.name].update({"files": files, "bytes": stored})
            worst = max(other[who.name].get("save: extra memory", 0), timing.extra_peak if timed else 0)
            other[who.name]["save: extra memory"] = worst
            other[who.name].setdefault("save: cpu", []).append(timing.cpu)
        for operation in RESTORES:
            for index in order.permutation(len(people)):
                who = people[index]
                directory = there[who.name]
                if operation.endswith("warm"):
                    if isinstance(who, c.Raw):
                        continue  # O_DIRECT never is
                    spare.release()
                    drop_caches()
                    warm_cache(directory.resolve())
                elif not drop_caches():
                    print("caches cannot be dropped here: 'cold' is warm", file=sys.stderr)
                call = {
                    "into": lambda who=who, directory=directory: who.restore_into(directory, target),
                    "fresh": lambda who=who, directory=directory: who.restore_fresh(directory),
                    "weights": lambda who=who, directory=directory: who.restore_weights(directory, target),
                }[operation.split(",")[0]]
                timing = spare.measured(call)
                if timed:
                    seconds[who.name][operation].append(timing.seconds)
                    if operation in ("into, cold", "fresh, cold"):
                        other[who.name][f"{operation}: extra memory"] = max(
                            other[who.name].get(f"{operation}: extra memory", 0), timing.extra_peak
                        )
                        other[who.name].setdefault(f"{operation}: cpu", []).append(timing.cpu)
                elif type(who) is not c.Raw and not (
                    operation.startswith("fresh") and isinstance(who, c.Raw)
                ):
                    expected = {"params": state["params"]} if operation.startswith("weights") else state
                    wrong = differences(timing.result, expected)
                    if wrong:
                        raise SystemExit(f"{who.name} restored other bytes ({operation}): {wrong[:5]}")
                timing.result = None
        for directory in there.values():
            shutil.rmtree(directory.resolve())
            if directory.is_symlink():
                directory.unlink()
        for link in base.glob(f"{workload}-{number}-*"):
            shutil.rmtree(link.resolve(), ignore_errors=True)
            link.unlink(missing_ok=True)
        print(
            f"  round {number} of {rounds}" + ("" if timed else " (not timed; every restore compared)"),
            flush=True,
        )
    quarter.end()
    spare.release()
    for contestant in people:
        for manager in getattr(contestant, "managers", {}).values():
            manager.close()
    weights = nbytes(state["params"]) / size
    return {
        "workload": workload,
        "bytes": size,
        "weights": weights,
        "rounds": rounds,
        "seconds": seconds,
        "other": other,
    }


def ratio(samples: Samples, who: str, column: str, against: str, against_column: str | None = None) -> str:
    """Median and quartiles of the ratios within rounds."""
    mine, theirs = samples[who][column], samples[against][against_column or column]
    return spread([a / b for a, b in zip(mine, theirs, strict=True) if b > 0])


TARGETS = [
    # what, contestant, column, held against, its column, at most (None: shown only)
    ("blocked, ring ≥ state / plain copy", "stepwell", "blocked", "plain parallel copy", "blocked", lambda w: 1.3),
    ("blocked, ring = state / 4 / plain copy", "stepwell, ring = state / 4", "blocked", "plain parallel copy", "blocked", lambda w: None),
    ("durable / raw disk", "stepwell", "durable", "raw disk", "durable", lambda w: {"llama3g": 1.15, "llama1g": 1.25, "small20k": 2.0}.get(w)),
    ("restore into given memory, cold / raw disk", "stepwell", "into, cold", "raw disk", "into, cold", lambda w: 1.15),
    ("restore into fresh memory, cold / raw disk", "stepwell", "fresh, cold", "raw disk", "into, cold", lambda w: 1.3),
    ("weights only, cold / raw disk", "stepwell", "weights, cold", "raw disk", "weights, cold", lambda w: None),
    ("restore into given memory, warm / safetensors", "stepwell", "into, warm", "safetensors", "into, warm", lambda w: 1.1),
    ("restore into fresh memory, warm / safetensors", "stepwell", "fresh, warm", "safetensors", "fresh, warm", lambda w: 1.1),
]  # fmt: skip


def show(result: dict[str, Any]) -> str:
    samples, other = result["seconds"], result["other"]
    columns = ["blocked", "durable", *RESTORES]
    rows = [["seconds (median)", *columns]]
    for who, measured_columns in samples.items():
        cells = [
            f"{statistics.median(v):.3f}" if (v := measured_columns.get(column)) else "" for column in columns
        ]
        rows.append([who, *cells])
    memory = [
        [
            "",
            "save: extra memory",
            "into: extra memory",
            "fresh: extra memory",
            "save: CPU s",
            "into, cold: CPU s",
            "files",
            "GB",
        ]
    ]
    for who, found in other.items():
        memory.append(
            [
                who,
                *(f"{found.get(key, 0) / GIB:.2f} GiB" for key in ("save: extra memory", "into, cold: extra memory", "fresh, cold: extra memory")),
                *(f"{statistics.median(found[key]):.2f}" if key in found else "" for key in ("save: cpu", "into, cold: cpu")),
                str(found["files"]),
                f"{found['bytes'] / 1e9:.3f}",
            ]
        )  # fmt: skip
    ratios = [["ratio within a round: median (quartiles)", "measured", "at most", ""]]
    for what, who, column, against, against_column, bound in TARGETS:
        limit = bound(result["workload"])
        text = ratio(samples, who, column, against, against_column)
        figure = float(text.split()[0]) if text else None
        ratios.append([what, text, "" if limit is None else f"{limit}", verdict(figure, limit)])
    title = f"### {result['workload']}: {result['bytes'] / GIB:.2f} GiB, weights {100 * result['weights']:.0f} %, {result['rounds']} rounds"
    return "\n\n".join([title, table(rows), table(ratios), table(memory)])


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=MEASURED)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--quick", action="store_true", help="llama1g, three rounds")
    parser.add_argument(
        "--directory", type=Path, default=Path("bench-results"), help="on the disk that is measured"
    )
    options = parser.parse_args()
    if options.quick:
        options.workloads, options.rounds = ["llama1g"], 3

    options.directory.mkdir(exist_ok=True)
    base = Path(tempfile.mkdtemp(prefix="work-", dir=options.directory.resolve()))
    free = shutil.disk_usage(base).free
    if free < 30 * GIB:
        print(f"only {free / GIB:.0f} GiB are free here; the larger workloads need 30", file=sys.stderr)
    machine = f"{os.cpu_count()} cores, kernel {platform.release()}, Python {platform.python_version()}, numpy {np.__version__}"
    header = f"{datetime.date.today()}; {machine}\n\nengine: {sw.engine_info(base)}"
    print(header)
    results, report = [], [header]
    try:
        for workload in options.workloads:
            result = bench(workload, options.rounds, base, np.random.default_rng(1))
            results.append(result)
            report.append(show(result))
            print("\n" + report[-1], flush=True)
    finally:
        shutil.rmtree(base, ignore_errors=True)
        (options.directory / "results.md").write_text("\n\n".join(report) + "\n")
        (options.directory / "results.json").write_text(json.dumps(results, indent=1))
        print(f"\nwritten to {options.directory}/results.md and results.json")


if __name__ == "__main__":
    main()
