"""Killed, or fed an errno, at every system call of saves with retention: nothing is torn, no committed step is lost.

The subject is a real process on a real file system, once the Python front (``saver.py``) and once Rust alone (``tests/src/bin/saver.rs``);
``strace`` injects. Set ``STEPWELL_LONG=1`` for every errno at every call through Python too, which takes a while.
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
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import stepwell as sw

HERE = Path(__file__).parent
PROJECT = HERE.parents[1]
LONG = bool(os.environ.get("STEPWELL_LONG"))
STEPS = 4
ERRNOS = ("ENOSPC", "EIO", "EDQUOT", "EINTR", "EAGAIN", "EMFILE", "ENOMEM", "EROFS")
# Calls that touch files, or that a save cannot do without. Memory and thread calls of the runtime itself are not ours to survive.
CALLS = (
    "openat", "openat2", "mkdirat", "mkdir", "fallocate", "pwrite64", "pwritev", "write", "io_uring_setup", "io_uring_enter", "io_uring_register",
    "fsync", "fdatasync", "rename", "renameat", "renameat2", "unlink", "unlinkat", "rmdir", "ftruncate", "getdents64", "statx", "newfstatat",
    "fstat", "fcntl", "pread64", "read", "fstatfs", "close",
)  # fmt: skip

pytestmark = pytest.mark.skipif(
    shutil.which("strace") is None, reason="strace is not installed: no injection at system calls"
)


@dataclass
class Subject:
    name: str
    command: list[str]

    def run(
        self, root: Path, steps: int = STEPS, first: int = 10, strace: list[str] | None = None
    ) -> subprocess.CompletedProcess[str]:
        command = [*self.command, str(root), str(first), str(steps)]
        if strace is not None:
            command = ["strace", "-f", "-qq", "--signal=none", *strace, *command]
        return subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=60,
            env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        )


@pytest.fixture(scope="module", params=["rust", "python"])
def subject(request: pytest.FixtureRequest) -> Subject:
    if request.param == "python":
        return Subject("python", [sys.executable, str(HERE / "saver.py")])
    subprocess.run(
        ["cargo", "build", "--quiet", "-p", "stepwell-tests", "--bin", "saver"], cwd=PROJECT, check=True
    )
    target = Path(os.environ.get("CARGO_TARGET_DIR", PROJECT / "target"))
    return Subject("rust", [str(target / "debug" / "saver")])


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    # On the disk of the project, not on a tmpfs: that has no direct I/O.
    path = Path(os.environ.get("STEPWELL_TEST_DIR", PROJECT / "target")) / f"system-calls-{os.getpid()}"
    path.mkdir(parents=True)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def points(subject: Subject, base: Path) -> list[tuple[str, int]]:
    """Every (system call, n) after the sweep's beginning, where n counts that call within a thread, as strace's injection does."""
    log = base / f"{subject.name}.trace"
    done = subject.run(
        base / f"{subject.name}-counted",
        strace=["-o", str(log), "-e", "trace=" + ",".join(f"?{call}" for call in CALLS)],
    )
    assert done.stdout.splitlines()[-1] == "closed", done
    begun = False
    seen: dict[str, Counter[str]] = defaultdict(Counter)
    wanted: set[tuple[str, int]] = set()
    for line in log.read_text().splitlines():
        if "resumed>" in line:
            continue
        match = re.match(r"(\d+)\s+(\w+)\(", line)
        if not match:
            continue
        thread, call = match.groups()
        seen[thread][call] += 1
        if "stepwell-sweep-begins-here" in line:
            begun = True
        elif begun:
            wanted.add((call, seen[thread][call]))
    assert begun, "the trace does not show where the sweep begins"
    assert any(call == "fsync" for call, _ in wanted)
    assert any(call.startswith("rename") for call, _ in wanted)
    return sorted(wanted)


def check(root: Path, output: str, first: int = 10) -> None:
    """What must hold after any accident: every listed step verifies, none that was acknowledged and not retired is lost, and
    the next save works and leaves nothing behind."""
    lines = output.splitlines()
    committed = [int(line.split()[1]) for line in lines if line.startswith("committed")]
    if not root.exists():
        assert not committed
        return
    with sw.CheckpointManager(root, retention=sw.keep_latest(2), staging_bytes=1 << 20) as mgr:
        steps = mgr.all_steps()
        for step in steps:
            report = sw.verify(root / f"step_{step:08d}")
            assert report.ok, (step, report)
            state = mgr.restore(step)
            assert state["updates"] == step
            assert (state["params"]["w"] == step).all()
        if committed:
            assert steps, f"steps {committed} were committed and none is there"
            assert steps[-1] >= committed[-1], (steps, committed)
            # keep_latest(2): the one before the newest acknowledged step is there too, unless a newer one has been committed since.
            if len(committed) > 1:
                assert committed[-2] in steps or len([s for s in steps if s >= committed[-1]]) >= 2, (
                    steps,
                    committed,
                )
        step = max([*steps, first + STEPS]) + 1
        mgr.save(step, {"params": {"w": np.full((64, 1024), step, np.float32)}, "updates": step}).result(30)
        assert mgr.latest_step() == step
    left = [entry.name for entry in root.iterdir() if entry.name.startswith((".tmp-", ".trash-"))]
    assert not left, left


def test_a_process_killed_at_any_system_call_tears_nothing_and_loses_no_committed_step(
    subject: Subject, base: Path
) -> None:
    swept = points(subject, base)
    killed = 0
    for number, (call, n) in enumerate(swept):
        root = base / f"{subject.name}-kill-{number}"
        done = subject.run(
            root,
            strace=["-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={call}:signal=SIGKILL:when={n}"],
        )
        killed += done.returncode != 0
        check(root, done.stdout)
        shutil.rmtree(root, ignore_errors=True)
    print(f"\n{subject.name}: killed at {killed} of {len(swept)} system calls: nothing torn, nothing lost")
    assert killed >= 0.8 * len(swept)


def test_an_errno_at_any_system_call_is_a_typed_error_and_nothing_else(subject: Subject, base: Path) -> None:
    swept = [(call, n, name) for call, n in points(subject, base) for name in ERRNOS if call != "close"]
    everything = len(swept)
    if subject.name == "python" and not LONG:
        swept = random.Random(3).sample(swept, min(200, everything))
    outcomes: Counter[str] = Counter()
    for number, (call, n, name) in enumerate(swept):
        root = base / f"{subject.name}-errno-{number}"
        # One whole step before the accident: it must be there after it.
        subject.run(root, steps=1, first=1)
        done = subject.run(
            root,
            strace=["-o", "/dev/null", "-e", f"trace={call}", "-e", f"inject={call}:error={name}:when={n}"],
        )
        where = f"{call} number {n} failing with {name}"
        assert done.returncode == 0, (where, done)
        assert "panicked" not in done.stderr, (where, done.stderr)
        lines = done.stdout.splitlines()
        for line in lines:
            outcomes[line.split()[0]] += 1
            if line.startswith("failed"):
                _, _step, _kind, code = line.split()
                assert code == str(getattr(errno, name)), (where, line, "the errno was lost")
            if line.startswith("open failed"):
                assert line.split()[3] == str(getattr(errno, name)), (where, line)
        if not lines[0].startswith("open failed"):
            assert len([line for line in lines if line.startswith("committed")]) >= STEPS - 1, (where, lines)
            left = [entry.name for entry in root.iterdir() if entry.name.startswith(".tmp-")]
            assert not left, (where, left)
        check(root, done.stdout)
        shutil.rmtree(root, ignore_errors=True)
    print(f"\n{subject.name}: {len(swept)} of {everything} injections; outcomes: {dict(outcomes)}")
    assert outcomes["failed"] > 0


def test_a_process_killed_at_random_moments_resumes_each_time(base: Path) -> None:
    """One root, killed over and over while it saves; each new process goes on from what the last one committed."""
    subprocess.run(
        ["cargo", "build", "--quiet", "-p", "stepwell-tests", "--bin", "saver"], cwd=PROJECT, check=True
    )
    target = Path(os.environ.get("CARGO_TARGET_DIR", PROJECT / "target"))
    root, first, newest = base / "random-kills", 1, 0
    kills = 10_000 if LONG else 1_000
    rng = random.Random(11)
    committed = 0
    for _ in range(kills):
        process = subprocess.Popen(
            [str(target / "debug" / "saver"), str(root), str(first), "1000"],
            stdout=subprocess.PIPE,
            text=True,
        )
        time.sleep(rng.uniform(0.002, 0.03))
        process.kill()
        output, _ = process.communicate()
        acknowledged = [
            int(line.split()[1])
            for line in output.splitlines()
            if line.startswith("committed") and line.split()[1].isdigit()
        ]
        assert not any(
            line.startswith(("failed", "open failed", "uncertain")) for line in output.splitlines()
        ), output
        committed += len(acknowledged)
        newest = max([newest, *acknowledged])
        found = sw.latest_step(root) if root.exists() else None
        assert (found or 0) >= newest, (found, newest)
        if found is not None:
            assert sw.verify(root / f"step_{found:08d}").ok
        first = (found or 0) + 1
    print(f"\n{kills} kills, {committed} acknowledged steps: nothing torn, nothing lost")
    assert committed > 0
