"""Kills conversions at random moments, each in a process of its own, and resumes them.

Arguments: the source, the destination, the number of kills, the seed. The last line of the output
is a JSON document. Run by ``test_conversion_interrupts.py``. Processes are forks of this one, which
has the package imported and has not used it.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import shutil
import signal
import sys
import time
from pathlib import Path

import stepwell as sw
from stepwell import _core  # noqa: F401  (imported before the forks)
from stepwell._conversion import files

WINDOW_BYTES = 64 << 10


def digests(folder: Path) -> dict[str, str]:
    """The content of every file."""
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def convert(source: str, destination: Path, report: int) -> None:
    """Converts with small windows, and writes the resumed bytes to a pipe."""
    files._WINDOW_BYTES = WINDOW_BYTES
    files._JOURNAL_BYTES = 4 * WINDOW_BYTES
    made = sw.convert(source, destination, to="safetensors", shard_size=5 << 20, objects="skip")
    os.write(report, b"%d\n" % made.resumed_nbytes)


def attempt(source: str, destination: Path, kill_after: float | None) -> tuple[bool, int]:
    """One process. Returns whether it ended by itself, and its resumed bytes."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        code = 1
        try:
            convert(source, destination, writing)
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    with os.fdopen(reading) as stream:
        said = stream.read()
    if os.WIFEXITED(status) and os.WEXITSTATUS(status) != 0:
        raise SystemExit("a conversion failed; its traceback is above")
    return os.WIFEXITED(status), int(said or 0)


def main(source: str, destination: Path, kills: int, seed: int) -> None:
    begun = time.monotonic()
    attempt(source, destination, None)
    whole = time.monotonic() - begun
    wanted = digests(destination)
    shutil.rmtree(destination)
    rng = random.Random(seed)
    done = finished = resumed = 0
    while done < kills:
        ended, before = attempt(source, destination, rng.random() * whole)
        done += not ended
        resumed += before > 0
        if destination.exists():
            assert digests(destination) == wanted, f"half a destination after {done} kills"
            finished += 1
            shutil.rmtree(destination)
        elif done % 5 == 0:
            _, before = attempt(source, destination, None)
            resumed += before > 0
            assert digests(destination) == wanted, f"another destination after {done} kills"
            shutil.rmtree(destination)
            leftovers = [one.name for one in destination.parent.iterdir() if ".partial" in one.name]
            assert leftovers == []
    print(json.dumps({"kills": done, "finished": finished, "resumed": resumed, "seconds": whole}))


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4]))
