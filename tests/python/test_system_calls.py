"""Killed, or fed an errno, at system calls of saves with retention: through Python too nothing is
torn and no committed step is lost.

The subject is ``saver.py``, a real process on a real file system; ``strace`` injects. The same
sweeps over the engine alone, through every engine and at every system call, are
``tests/tests/system_calls.rs``; here a sample of them shows that the Python front loses nothing on
the way: no errno, no outcome, no step. ``STEPWELL_LONG=1`` tries every call.
"""

from __future__ import annotations

import errno
import os
import random
import re
import shutil
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import numpy as np
import pytest
import stepwell as sw
from longer import LONG

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
FIRST, STEPS = 10, 4
SAMPLE = 60
ERRNOS = ("ENOSPC", "EIO", "EDQUOT", "EINTR", "EAGAIN", "EMFILE", "ENOMEM", "EROFS")
#: Calls that change what is on the disk: a kill before any other is a kill before the next of
#: these.
CHANGING = (
    "openat2", "mkdirat", "fallocate", "pwrite64", "io_uring_enter", "fsync", "renameat", "renameat2", "unlinkat", "ftruncate",
)  # fmt: skip
#: Calls that get errors injected: also others that only the engine makes. The interpreter's own
#: calls are not tested.
FALLIBLE = (*CHANGING, "io_uring_setup", "io_uring_register", "fcntl")

Case = TypeVar("Case")


@dataclass
class Ran:
    lines: list[str]
    errors: str
    code: int
    trace: str

    @property
    def committed(self) -> list[int]:
        return [int(line.split()[1]) for line in self.lines if line.startswith("committed")]

    @property
    def injected(self) -> int:
        return self.trace.count("(INJECTED)")


def run(root: Path, strace: list[str]) -> Ran:
    """Runs the saver; the tracer attaches when it is ready, so that counts of calls begin there, in
    every thread at zero."""
    log, errors = root.with_suffix(".trace"), root.with_suffix(".errors")
    command = [sys.executable, str(HERE / "saver.py"), str(root), str(FIRST), str(STEPS), "wait"]
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"}
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stderr, text=True, env=environment
        )
    assert process.stdout is not None
    tracer = None
    try:
        assert process.stdout.readline() == "ready\n", errors.read_text()
        arguments = ["strace", "-f", "-qq", "-o", str(log), *strace, "-p", str(process.pid)]
        tracer = subprocess.Popen(arguments, stderr=subprocess.DEVNULL)
        while "TracerPid:\t0\n" in Path(f"/proc/{process.pid}/status").read_text():
            if tracer.poll() is not None:
                raise PermissionError("strace cannot attach to a process here")
            time.sleep(0.001)
        output, _ = process.communicate("\n", timeout=120)
        tracer.wait(30)
    finally:
        for one in (process, tracer):
            if one is not None and one.poll() is None:
                one.kill()
                one.wait()
    return Ran(output.splitlines(), errors.read_text(), process.returncode, log.read_text(errors="replace"))


@pytest.fixture(scope="module")
def base() -> Iterator[Path]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: no injection at system calls")
    # On the disk of the project, not on a tmpfs: that has no direct I/O.
    path = Path(os.environ.get("STEPWELL_TEST_DIR", PROJECT / "target")) / f"system-calls-{os.getpid()}"
    path.mkdir(parents=True)
    # One whole step before any accident: it must be there after it.
    with sw.CheckpointManager(path / "template", staging_bytes=1 << 20) as mgr:
        mgr.save(1, state_of(1)).result(60)
    try:
        run(path / "try", ["-e", "trace=fsync"])
    except PermissionError as refusal:
        pytest.skip(str(refusal))
    yield path
    shutil.rmtree(path, ignore_errors=True)


def state_of(step: int) -> dict[str, object]:
    return {"params": {"w": np.full((64, 1024), step, np.float32)}, "updates": step}


def points(base: Path, wanted: tuple[str, ...]) -> list[tuple[str, int]]:
    """Every (system call, n) of an undisturbed run, where n counts that call within a thread, as
    the injection does."""
    root = base / "counted"
    shutil.copytree(base / "template", root)
    ran = run(root, [])
    assert ran.lines[-1] == "closed", ran
    shutil.rmtree(root)
    seen: Counter[tuple[str, str]] = Counter(
        (match[1], match[2])
        for line in ran.trace.splitlines()
        if (match := re.match(r"(\d+)\s+([a-z0-9_]+)\(", line))
    )
    most: dict[str, int] = {}
    for (_, call), count in seen.items():
        most[call] = max(count, most.get(call, 0))
    assert {"fsync", "renameat2", "unlinkat"} <= most.keys(), most
    return [(call, n + 1) for call in wanted for n in range(most.get(call, 0))]


def check(root: Path, acknowledged: list[int]) -> None:
    """Checks the invariants after any accident: every listed step verifies, no acknowledged step is
    lost unless it was retired, and the next save works and leaves nothing behind."""
    with sw.CheckpointManager(root, retention=sw.keep_latest(2), staging_bytes=1 << 20) as mgr:
        steps = mgr.all_steps()
        for step in steps:
            report = sw.verify(root / f"step_{step:08d}")
            assert report.ok, (step, report)
            state = mgr.restore(step)
            assert state["updates"] == step
            assert (state["params"]["w"] == step).all()
        for step in acknowledged:
            assert step in steps or len([other for other in steps if other > step]) >= 2, (
                steps,
                acknowledged,
            )
        step = max(steps, default=0) + 100
        mgr.save(step, state_of(step)).result(60)
        assert mgr.latest_step() == step
    left = [entry.name for entry in root.iterdir() if entry.name.startswith((".tmp-", ".trash-"))]
    assert not left, left


def each(base: Path, cases: list[Case], work: Callable[[Path, Case], None]) -> None:
    """Does each case on a root of its own, two at a time."""

    def one(numbered: tuple[int, Case]) -> None:
        root = base / f"case-{numbered[0]}"
        shutil.copytree(base / "template", root)
        work(root, numbered[1])
        shutil.rmtree(root)

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(one, enumerate(cases)))


def sampled(cases: list[Case]) -> list[Case]:
    return cases if LONG or len(cases) <= SAMPLE else random.Random(3).sample(cases, SAMPLE)


def test_kills_at_any_system_call_tear_nothing(base: Path) -> None:
    everything = points(base, CHANGING)
    swept = sampled(everything)
    killed = []

    def kill(root: Path, case: tuple[str, int]) -> None:
        call, n = case
        ran = run(root, ["-e", f"trace={call}", "-e", f"inject={call}:signal=SIGKILL:when={n}"])
        killed.append(ran.code != 0)
        check(root, [1, *ran.committed])

    each(base, swept, kill)
    print(
        f"\nkilled at {sum(killed)} of {len(swept)} system calls (of {len(everything)}): nothing torn, nothing lost"
    )
    assert sum(killed) >= 0.8 * len(swept)


def test_any_errno_is_a_typed_error(base: Path) -> None:
    everything = [(call, n, name) for call, n in points(base, FALLIBLE) for name in ERRNOS]
    swept = sampled(everything)
    outcomes: Counter[str] = Counter()

    def fail(root: Path, case: tuple[str, int, str]) -> None:
        call, n, name = case
        ran = run(root, ["-e", f"trace={call}", "-e", f"inject={call}:error={name}:when={n}"])
        where = f"{call} number {n} failing with {name}: {ran}"
        assert ran.code == 0, where
        assert "panicked" not in ran.errors, where
        accidents = 0
        for line in ran.lines:
            words = line.split()
            outcomes[" ".join(word for word in words if not word.isdigit())] += 1
            if words[0] in ("failed", "uncertain"):
                accidents += 1
            if words[0] != "committed" and words != ["closed"]:
                # A lock that answers EAGAIN is held by someone, as far as anyone can know.
                told = words[-1] == str(getattr(errno, name)) or ("locked" in words and name == "EAGAIN")
                assert told, (line, "the errno was lost", where)
        assert accidents <= ran.injected, where
        acknowledged = [1, *ran.committed]
        # The process lives: the newest two that it acknowledged are there, whatever else is.
        assert all((root / f"step_{step:08d}").is_dir() for step in acknowledged[-2:]), where
        if ran.injected <= 1 and not ran.lines[0].startswith("open failed"):
            assert not [entry.name for entry in root.iterdir() if entry.name.startswith(".tmp-")], where
        check(root, acknowledged)

    each(base, swept, fail)
    print(f"\n{len(swept)} of {len(everything)} injections; what the program said: {dict(outcomes)}")
    assert outcomes["failed save_failed"] > 0
