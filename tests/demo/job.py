"""The common part of the demos of several processes: a run whose processes change between its
phases, and the checks.

One process is killed in the middle of a save: what do the others say, and what is visible? Others
resume, and the tensors that all of them have restored, put together, are compared with what a plain
``sw.restore`` reads, their losses with those of a run that nobody disturbed.
"""

from __future__ import annotations

import contextlib
import glob
import json
import math
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import stepwell as sw

DEADLINE = 300.0
#: Seconds without a heartbeat after which a rank counts as dead, in demos that kill one.
STALL = 5.0
#: How far losses may be from those of the undisturbed run, in parts of them.
TOLERANCE = 1e-5

#: The axes of a mesh and their sizes.
Axes = dict[str, int]


# ---- in the processes of the job
# ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def noting(folder: Path, rank: int) -> Iterator[None]:
    """What a rank fails with is left in the folder."""
    try:
        yield
    except BaseException as error:
        note = {"type": type(error).__name__, "missing": getattr(error, "missing", None), "text": str(error)}
        (folder / f"error-{rank}.json").write_text(json.dumps(note))
        os._exit(1)  # at once, as a launcher ends the rest of a job


def keep(folder: Path, rank: int, parts: Mapping[str, tuple[Sequence[int], np.ndarray]]) -> None:
    """Leaves what a rank has restored in the folder: by tensor, at which place of it, and the
    array."""
    places = [[name, list(offset)] for name, (offset, _) in parts.items()]
    (folder / f"places-{rank}.json").write_text(json.dumps(places))
    np.savez(folder / f"parts-{rank}.npz", *(array for _, array in parts.values()))


def flat(state: Any, path: str = "") -> dict[str, Any]:
    """The leaves of nested dicts, by path."""
    if not isinstance(state, dict):
        return {path: state}
    found = {}
    for key, value in state.items():
        found |= flat(value, f"{path}/{key}" if path else str(key))
    return found


# ---- in the process that drives it
# --------------------------------------------------------------------------------------


class Run:
    """A run in phases, each a job of its own.

    ``start(axes, folder, **options)`` starts the processes of one: cut in that way, with ``folder``
    for :func:`noting` and :func:`keep`, and options for the example's ``train``. ``parts`` takes
    the tensors that are compared out of a whole state.
    """

    def __init__(
        self,
        where: Path,
        steps: int,
        start: Callable[..., list[BaseProcess]],
        parts: Callable[[Any], dict[str, np.ndarray]],
    ) -> None:
        self.root, self.undisturbed = where / "run", where / "undisturbed.jsonl"
        self._where, self._steps, self._start, self._parts = where, steps, start, parts
        self._phases = 0
        self._rows = [("processes", "cut", "what happened", "steps", "loss differs by", "tensors bit-equal")]
        self._rows.append(("1", "not", "trained undisturbed", f"0 to {steps - 1}", "", ""))

    def phase(self, axes: Axes, steps: int, **options: Any) -> tuple[Path, list[BaseProcess]]:
        """Starts a job."""
        self._phases += 1
        folder = self._where / f"phase-{self._phases}"
        folder.mkdir()
        options |= {"root": self.root, "steps": steps, "losses": folder / "losses.jsonl"}
        return folder, self._start(axes, folder, **options)

    def killed(self, axes: Axes, rank: int) -> None:
        """A job of which one process is killed in the middle of a save."""
        earlier: set[str] = set()
        while True:
            folder, processes = self.phase(axes, self._steps, stall_timeout=STALL)
            step = kill_in_a_save(self.root, processes, rank, earlier)
            if step not in steps_of(self.root):
                break
            print(f"  (rank {rank} had just written its part, and step {step} was committed; once more)")
            earlier = in_flight(self.root, rank)
        others = {one: (note["type"], note["missing"]) for one, note in errors(folder).items()}
        expected = {one: ("CoordinationTimeout", [rank]) for one in range(len(processes)) if one != rank}
        if others != expected:
            sys.exit(f"after the kill of rank {rank} the others ended with {errors(folder)}")
        for one in others:
            print(f"  rank {one} ended with {others[one][0]}: {errors(folder)[one]['text']}")
        verify(self.root)
        print(f"  steps {steps_of(self.root)} are there, and whole")
        self._note(axes, folder, f"rank {rank} killed in the save of step {step}", "")

    def resumed(self, axes: Axes, more: int | None = None) -> None:
        """A job that goes on with the newest step, for so many steps or to the end."""
        newest = steps_of(self.root)[-1]
        whole = self._parts(sw.restore(self.root, step=newest))
        folder, processes = self.phase(axes, self._steps if more is None else newest + 1 + more)
        succeed(processes, folder)
        compare_parts(folder, len(processes), whole)
        self._note(axes, folder, f"resumed from step {newest}", f"{len(whole)} of {len(whole)}")

    def _note(self, axes: Axes, folder: Path, what: str, tensors: str) -> None:
        trained, difference = compare_losses(folder / "losses.jsonl", self.undisturbed)
        cut = " × ".join(f"{axis} {n}" for axis, n in axes.items() if n > 1) or "not"
        self._rows.append((str(math.prod(axes.values())), cut, what, trained, f"{difference:.0e}", tensors))

    def conclude(self) -> None:
        """Looks at what is there in the end, and prints what was shown."""
        verify(self.root)
        left = [
            name for name in os.listdir(self.root) if name.startswith((".tmp-", ".trash-", ".quarantine-"))
        ]
        if left:
            sys.exit(f"left behind: {left}")
        widths = [max(map(len, column)) for column in zip(*self._rows, strict=True)]
        for row in (self._rows[0], ["-" * width for width in widths], *self._rows[1:]):
            line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            print(f"  {line}".rstrip())
        print(
            "\n  Tensors: parameters and both moments of Adam, put together from what all ranks have restored, and compared with what a\n"
            "  plain sw.restore reads. Losses: of each step, in parts of that of the undisturbed run. The step in whose save a rank was\n"
            "  killed was never visible; every step that is there now was verified, and nothing else is left."
        )


@contextlib.contextmanager
def folder_of_its_own() -> Iterator[Path]:
    """For the files of a demo, which go when it ends."""
    where = Path(tempfile.mkdtemp(prefix="stepwell-demo-", dir=os.environ.get("STEPWELL_DEMO_DIR", ".")))
    try:
        yield where.resolve()
    finally:
        shutil.rmtree(where, ignore_errors=True)


def wait(processes: Sequence[BaseProcess]) -> None:
    """Until all have ended."""
    end = time.monotonic() + DEADLINE
    for process in processes:
        process.join(max(0.0, end - time.monotonic()))
    late = [process for process in processes if process.is_alive()]
    for process in late:
        process.kill()
    if late:
        sys.exit(f"{', '.join(process.name for process in late)} had not ended after {DEADLINE:.0f} s")


def succeed(processes: Sequence[BaseProcess], folder: Path) -> None:
    """All must end well."""
    wait(processes)
    if any(process.exitcode for process in processes):
        sys.exit(f"exit codes {[process.exitcode for process in processes]}, and {errors(folder)}")


def errors(folder: Path) -> dict[int, dict[str, Any]]:
    """Returns the errors of the ranks."""
    found = sorted(folder.glob("error-*.json"))
    return {int(path.stem.split("-")[1]): json.loads(path.read_text()) for path in found}


def in_flight(root: Path, rank: int) -> set[str]:
    """The saves to which the rank has a data file by now, and which do not have a step's name
    yet."""
    return {Path(path).parts[-3] for path in glob.glob(f"{root}/.tmp-*/*/{rank:05}.data")}


def kill_in_a_save(root: Path, processes: Sequence[BaseProcess], rank: int, earlier: set[str]) -> int:
    """Kills one, with SIGKILL, while it writes its part of a step, not of the first two; waits
    until the others have ended. Returns the step."""
    end = time.monotonic() + DEADLINE
    try:
        while all(process.is_alive() for process in processes) and time.monotonic() < end:
            written = in_flight(root, rank) - earlier
            if written and len(list(root.glob("step_*"))) >= 2:
                processes[rank].kill()
                wait(processes)
                return int(min(written).split("-")[1])
            time.sleep(0.0002)
    finally:
        for process in processes:
            process.kill()
    sys.exit("training ended before one of its processes could be killed in the middle of a save")


def steps_of(root: Path) -> list[int]:
    """The steps that are there."""
    with sw.CheckpointManager(root, read_only=True, coordinator=None) as mgr:
        return mgr.all_steps()


def verify(root: Path) -> None:
    """Every checksum of every step."""
    for step in steps_of(root):
        report = sw.verify(root / f"step_{step:08}")
        if not report.ok:
            sys.exit(f"step {step} is damaged: {report.damages}")


def compare_parts(folder: Path, world: int, whole: Mapping[str, np.ndarray]) -> None:
    """Checks that the restored parts of all ranks make up the whole tensors, bit for bit."""
    covered = {name: np.zeros(np.shape(array), bool) for name, array in whole.items()}
    for rank in range(world):
        places = json.loads((folder / f"places-{rank}.json").read_text())
        with np.load(folder / f"parts-{rank}.npz") as arrays:
            for (name, offset), array in zip(places, arrays.values(), strict=True):
                box = tuple(slice(a, a + n) for a, n in zip(offset, array.shape, strict=True))
                expected = np.asarray(whole[name])[box]
                if array.dtype != expected.dtype or array.tobytes() != expected.tobytes():
                    sys.exit(f"{name}: what rank {rank} has restored of it is not what is stored")
                covered[name][box] = True
    if lacking := [name for name, there in covered.items() if not there.all()]:
        sys.exit(f"no rank has restored all of {lacking}")


def compare_losses(found: Path, expected: Path) -> tuple[str, float]:
    """The steps that were trained, and how far their losses are from the expected ones at most, in
    parts of them."""
    wanted, got = read_losses(expected), read_losses(found)
    difference, step = max((abs(loss - wanted[step]) / wanted[step], step) for step, loss in got.items())
    if not difference <= TOLERANCE:
        sys.exit(f"step {step}: the loss differs from the undisturbed run by {difference:.1e} of it")
    return f"{min(got)} to {max(got)}", difference


def read_losses(path: Path) -> dict[int, float]:
    """Loss by step."""
    records = map(json.loads, path.read_text().splitlines())
    return {record["step"]: float.fromhex(record["loss"]) for record in records}
