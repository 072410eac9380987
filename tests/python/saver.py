"""Saves four steps with retention and says on standard output, line by line, what became of each. Run by ``test_system_calls.py``, which
kills it or feeds it errors at every system call.

The lines: ``open failed KIND ERRNO``, ``committed STEP``, ``failed STEP KIND ERRNO``, ``uncertain STEP``, ``closed``, ``close failed KIND ERRNO``.
"""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path

import numpy as np
import stepwell as sw


def say(*words: object) -> None:
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


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
        except sw.DurabilityUncertain:
            say("uncertain", step)
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
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]))
