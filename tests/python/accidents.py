"""Trains in a process of its own, until it is killed: what the accidents of ``test_accidents.py``
happen to.

``python accidents.py ROOT KEEP LAST BYTES`` opens the root with ``keep_latest(KEEP)``, goes on from
the newest step, and saves each step up to ``LAST`` with ``BYTES`` of parameters, all of which are
the step's number. On standard output, a line each: ``resumed STEP`` (``None`` for a new run),
``committed STEP``, told by the save itself once it is durable, and ``done``. Its values are as easy
to check as to make: a step that is whole and its own holds its own number everywhere.
"""

from __future__ import annotations

import contextlib
import os
import resource
import select
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import stepwell as sw

#: No wait of a test is longer.
DEADLINE = 120.0


def state(step: int, nbytes: int) -> dict[str, Any]:
    half = np.full(nbytes // 2, step % 251, np.uint8)
    return {"params": {"w": half}, "optimizer": {"m": half.copy()}, "updates": step}


def check(found: dict[str, Any], step: int) -> None:
    """A step holds its own values, all of them, and nothing of another step."""
    assert found["updates"] == step
    for leaf in (found["params"]["w"], found["optimizer"]["m"]):
        assert (leaf == step % 251).all(), f"step {step} holds bytes that are not its own"


def train(root: Path, keep: int, last: int, nbytes: int) -> None:
    with sw.CheckpointManager(root, retention=sw.keep_latest(keep)) as mgr:
        resumed = mgr.latest_step()
        if resumed is not None:
            check(mgr.restore(), resumed)
        say(f"resumed {resumed}")
        for step in range(mgr.next_step(), last + 1):
            save = mgr.save(step, state(step, nbytes))
            save.add_done_callback(
                lambda one: say(f"committed {one.step}" if one.exception() is None else f"failed {one.step}")
            )
    say("done")


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


class Training:
    """A training process, and what it has said until now."""

    def __init__(self, root: Path, *, keep: int, last: int, nbytes: int) -> None:
        self.root = root
        self.said: list[str] = []
        self._rest = b""
        command = [sys.executable, __file__, *map(str, (root, keep, last, nbytes))]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE)

    def listen(self) -> None:
        """Takes in what was said, without waiting."""
        assert self.process.stdout is not None
        while select.select([self.process.stdout], [], [], 0)[0]:
            came = os.read(self.process.stdout.fileno(), 1 << 16)
            if not came:
                return
            *lines, self._rest = (self._rest + came).split(b"\n")
            self.said.extend(line.decode() for line in lines)

    def committed(self) -> int | None:
        """The newest step that was said to be durable."""
        steps = [int(line.split()[1]) for line in self.said if line.startswith("committed")]
        return max(steps, default=None)

    def watch(self, enough: Callable[[], bool]) -> bool:
        """Looks again and again, until that is enough (true) or the process has ended (false)."""
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            self.listen()
            if enough():
                return True
            if self.process.poll() is not None:
                self.listen()
                return False
            time.sleep(0.0005)  # the process needs the processor too
        raise AssertionError(f"nothing of it in {DEADLINE:g} s; it said {self.said}")

    def kill(self) -> None:
        """SIGKILL: as the scheduler, the kernel, or a colleague does it."""
        self.process.kill()
        self.process.wait(DEADLINE)
        self.listen()

    def end(self) -> list[str]:
        """Waits for its own end, and gives what it said."""
        self.process.wait(DEADLINE)
        self.listen()
        assert self.process.returncode == 0, self.said
        return self.said


@contextlib.contextmanager
def training(root: Path, *, keep: int = 1, last: int = 1 << 30, nbytes: int = 16 << 20) -> Iterator[Training]:
    """A training process that does not outlive the block."""
    one = Training(root, keep=keep, last=last, nbytes=nbytes)
    try:
        yield one
    finally:
        one.process.kill()
        one.process.wait(DEADLINE)
        assert one.process.stdout is not None
        one.process.stdout.close()


def names(root: Path, prefix: str) -> list[str]:
    """Entries of the root that begin like this."""
    with contextlib.suppress(FileNotFoundError):
        return sorted(name for name in os.listdir(root) if name.startswith(prefix))
    return []


def half_written(root: Path) -> bool:
    """True if a save has begun to write its data and is not committed."""
    return any(
        name.endswith(".data")
        for temporary in names(root, ".tmp-")
        for _, _, files in os.walk(root / temporary)
        for name in files
    )


@contextlib.contextmanager
def files_no_longer_than(nbytes: int) -> Iterator[None]:
    """The disk says no in the middle of a file, as a full one does; this needs no file system of
    its own."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


if __name__ == "__main__":
    train(Path(sys.argv[1]), *map(int, sys.argv[2:]))
