"""The memory by which another process grows."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

#: Measures a call. ``ru_maxrss`` of a new process begins with the memory of its parent, so the peak
#: is that of the address space, which is set back first.
GROWTH = """
def status(field):
    lines = open("/proc/self/status").read().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))
def growth(run):
    open("/proc/self/clear_refs", "w").write("5")
    before = status("VmRSS")
    run()
    return status("VmHWM") - before
"""


def grown(script: str, *arguments: str | Path, timeout: float = 120) -> int:
    """Runs a script that prints ``growth(call)``. Returns the bytes by which the call makes a new
    process grow at most."""
    command = [sys.executable, "-c", GROWTH + script, *arguments]
    told = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=True)
    return int(told.stdout)
