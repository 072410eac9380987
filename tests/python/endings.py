"""Helpers of the tests of endings: processes that run beside a test, and checks of what they
left."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import stepwell as sw

#: No wait of a test is longer.
DEADLINE = 60.0


def whole(root: Path, *, at_least: int) -> int:
    """The newest step, looked at from outside: every committed one is whole, and the next writer is
    let in at once."""
    with sw.CheckpointManager(root) as manager:
        steps = manager.all_steps()
        assert manager.quarantined() == {}
        for step in steps:
            assert (manager.restore(step)["a"] == 7).all()
    assert [name for name in os.listdir(root) if name.startswith(".tmp-")] == []
    assert steps, "nothing was committed"
    assert steps[-1] >= at_least, f"step {at_least} is lost; there are {steps}"
    return steps[-1]


@contextlib.contextmanager
def started(root: Path, script: str, *arguments: object) -> Iterator[subprocess.Popen[str]]:
    """A process that runs a script beside the test, and does not outlive it."""
    file = root.with_suffix(".py")
    file.write_text("import sys, os, signal, time, numpy as np, stepwell as sw\n" + script)
    process = subprocess.Popen(
        [sys.executable, str(file), str(root), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        yield process
    finally:
        process.kill()
        process.communicate()


def line_of(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().strip()
    assert line or process.poll() is None, process.stderr and process.stderr.read()
    return line
