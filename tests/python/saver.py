"""Saves four steps with retention and says on standard output, line by line, what became of each.
Run by ``test_system_calls.py``, which kills it or feeds it errors at every system call. With a
fourth argument it first says ``ready`` and waits for a line on standard input, so that a tracer may
attach.

The lines: ``open failed KIND ERRNO``, ``committed STEP``, ``failed STEP KIND ERRNO``, ``uncertain
STEP KIND ERRNO``, ``closed``, ``close failed KIND ERRNO``.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import sys
from pathlib import Path

import numpy as np
import stepwell as sw


def say(*words: object) -> None:
    # Errors are injected here too, and it is not the talking that is tried.
    for _ in range(5):
        try:
            os.write(1, (" ".join(map(str, words)) + "\n").encode())
        except OSError:
            continue
        return


def wait_for_tracer() -> None:
    # Leave to be traced by a process that is no ancestor (PR_SET_PTRACER, PR_SET_PTRACER_ANY),
    # where that needs leave.
    ctypes.CDLL(None).prctl(0x59616D61, ctypes.c_ulong(-1), 0, 0, 0)
    say("ready")
    sys.stdin.readline()


def errno_of(error: BaseException) -> object:
    return getattr(error, "errno", None)


def main(root: Path, first: int, steps: int) -> None:
    # A call that is found in a trace: what comes after it is what is swept.
    with contextlib.suppress(FileNotFoundError):
        os.open("/stepwell-sweep-begins-here", os.O_RDONLY)
    try:
        mgr = sw.CheckpointManager(root, retention=sw.keep_latest(2), staging_bytes=1 << 20)
    except (sw.StepwellError, OSError) as error:
        say("open failed", getattr(error, "kind", type(error).__name__), errno_of(error))
        return
    for step in range(first, first + steps):
        state = {"params": {"w": np.full((64, 1024), step, np.float32)}, "updates": step}
        try:
            mgr.save(step, state).result(30)
        except sw.errors.DurabilityUncertain as error:
            say("uncertain", step, error.kind, errno_of(error))
        except (sw.StepwellError, OSError) as error:
            say("failed", step, getattr(error, "kind", type(error).__name__), errno_of(error))
        else:
            say("committed", step)
    try:
        mgr.close()
    except (sw.StepwellError, OSError) as error:
        say("close failed", getattr(error, "kind", type(error).__name__), errno_of(error))
    else:
        say("closed")


if __name__ == "__main__":
    if len(sys.argv) > 4:
        wait_for_tracer()
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
