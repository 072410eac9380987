"""The probes of :func:`stepwell.doctor`. Each runs in a process of its own, because a file system
may never answer: ``python -m stepwell._doctor_probes PROBE DIRECTORY [NUMBER]``.

A probe prints one line of JSON. Every process ends when its standard input ends, so none outlives
the one that started it.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import IO

from . import _core
from ._checkpoint import Checkpoint
from ._manager import CheckpointManager
from ._opening import open as open_checkpoint
from ._opening import restore, verify
from ._options import Options
from ._singular import save
from .errors import LockedError, StepwellError

#: The answer of a probe: name → (true if it holds, the observation).
Found = dict[str, tuple[bool, str]]

_PREFIX = ".stepwell-doctor-"
_STATE = {"step": 0}
#: File systems that a power cut empties.
_IN_MEMORY = frozenset({"tmpfs", "ramfs"})
#: The longest wait for another process, and between two looks at a directory.
_HELPER_SECONDS = 20.0
_LOOK_INTERVAL = 0.005
#: How long the keeper tries to remove files that dying probes may still write.
_REMOVE_SECONDS = 5.0


def calls(directory: str) -> Found:
    """The type of the file system, its calls, and the engine."""
    made = _made(directory, "calls")
    kind, answers = _core.file_system(made), _core.supported_calls(made)
    engine, direct, alignment, _, reasons = _core.engine_choice(directory)
    found = {name: (answer is None, answer or "works") for name, answer in answers}
    if kind in _IN_MEMORY:
        found["sync_dirs"] = (False, f"{kind} is memory")
    aligned = f"works, alignment {alignment}" if direct else " ".join(reasons)
    ring = engine == "io_uring"
    return {
        "file_system": (True, kind or "unknown"),
        **found,
        "direct_io": (direct, aligned),
        "io_uring": (ring, "works" if ring else " ".join(reasons)),
    }


def space(directory: str, wanted: int) -> Found:
    """Free bytes and inodes. A replacement needs twice the bytes of a checkpoint."""
    free = os.statvfs(directory)
    # A file system without a limit reports none in all.
    nbytes = free.f_bavail * free.f_frsize if free.f_blocks else None
    inodes = free.f_favail if free.f_files else None
    return {
        "free_space": (
            nbytes is None or nbytes >= 2 * wanted,
            "no limit" if nbytes is None else f"{nbytes} bytes",
        ),
        "free_inodes": (inodes != 0, "no limit" if inodes is None else f"{inodes}"),
    }


def commit(directory: str, nbytes: int) -> Found:
    """A checkpoint, its speed, and its replacement."""
    return commit_at(os.path.join(directory, "checkpoint"), nbytes)


def commit_at(path: str, nbytes: int) -> Found:
    """The same at a path, or at a URL."""
    import numpy as np

    state = {"probe": np.frombuffer(os.urandom(nbytes), np.uint8)}
    begun = time.perf_counter()
    save(path, state, coordinator=None)
    written = time.perf_counter()
    report = verify(path)
    read = time.perf_counter()
    same = bool(np.array_equal(restore(path)["probe"], state["probe"]))
    whole = report.ok and same
    found: Found = {
        "commit": (whole, "committed, verified and restored" if whole else "other bytes were read"),
        "write_speed": (True, f"{nbytes / (written - begun):.0f} bytes/s"),
        "read_speed": (True, f"{nbytes / (read - written):.0f} bytes/s"),
    }
    try:
        save(path, _STATE, exists="replace", coordinator=None)
    except StepwellError as error:
        return {**found, "replace": (False, str(error))}
    return {**found, "replace": (restore(path) == _STATE, "a checkpoint was replaced")}


def locks(directory: str) -> Found:
    """A root that another process writes to."""
    root = os.path.join(directory, "locked")
    with _helper("hold_root", root) as holder:
        try:
            CheckpointManager(root, coordinator=None).close()
        except LockedError as error:
            if error.kind != "locked":
                return {"locks": (False, str(error))}
        else:
            return {"locks": (False, "two processes could write to one root")}
        holder.kill()
    return _after_kill("locks", lambda: CheckpointManager(root, coordinator=None).close())


def leases(directory: str) -> Found:
    """A step that another process reads."""
    root = os.path.join(directory, "leased")
    # Without locks, this root would be refused. Its leases would be, too.
    with CheckpointManager(root, coordinator=None, options=Options(take_over=True)) as manager:
        manager.save(0, _STATE).result()
        manager.save(1, _STATE).result()
        with _helper("hold_step", root) as holder:
            try:
                manager.delete(0)
            except LockedError:
                pass
            else:
                return {"leases": (False, "a step was deleted under its reader")}
            holder.kill()
        return _after_kill("leases", lambda: manager.delete(0))


def visibility(directory: str) -> Found:
    """A file that another process makes."""
    folder = _made(directory, "seen")
    os.listdir(folder)  # the kernel may cache that the directory is empty
    with _helper("make_file", folder) as maker:
        made = time.perf_counter()
        while "file" not in os.listdir(folder) or _content(folder) != b"content":
            if time.perf_counter() - made > _HELPER_SECONDS:
                return {"visibility": (False, f"not seen for {_HELPER_SECONDS:.0f} s")}
            time.sleep(_LOOK_INTERVAL)
        seen = time.perf_counter() - made
        maker.kill()
    return {"visibility": (True, f"seen after {1000 * seen:.0f} ms")}


def _content(folder: str) -> bytes:
    with contextlib.suppress(FileNotFoundError), open(os.path.join(folder, "file"), "rb") as file:
        return file.read()
    return b""


def _after_kill(name: str, again: Callable[[], object]) -> Found:
    """Waits until the kernel has ended what a killed process held."""
    killed = time.perf_counter()
    while True:
        try:
            again()
        except LockedError as error:
            if time.perf_counter() - killed > _HELPER_SECONDS:
                return {name: (False, f"not released by a killed process: {error}")}
            time.sleep(_LOOK_INTERVAL)
        else:
            return {name: (True, "held, and released by a killed process")}


def _made(directory: str, name: str) -> str:
    path = os.path.join(directory, name)
    os.mkdir(path)
    return path


# ---- other processes ----


def command(name: str, *arguments: object) -> list[str]:
    """The command of a probe."""
    return [sys.executable, "-P", "-m", "stepwell._doctor_probes", name, *map(str, arguments)]


@contextmanager
def _helper(name: str, path: str) -> Iterator[subprocess.Popen[bytes]]:
    """Starts a process, and waits until it holds what it is for."""
    with subprocess.Popen(command(name, path), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        try:
            if _line(process.stdout) != b"ready\n":
                raise StepwellError(f"a process could not {name.replace('_', ' ')} {path}")
            yield process
        finally:
            process.kill()


def _line(stream: IO[bytes] | None) -> bytes:
    return b"" if stream is None else stream.readline()


def _ready() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    signal.pause()


def hold_root(root: str) -> None:
    """Writes to a root until it is killed."""
    with CheckpointManager(root, coordinator=None):
        _ready()


def hold_step(root: str) -> None:
    """Reads a step until it is killed."""
    reader: Checkpoint = open_checkpoint(root, 0)
    with reader:
        _ready()


def make_file(folder: str) -> None:
    """Makes a file."""
    with open(os.path.join(folder, "file"), "xb") as file:
        file.write(b"content")
    _ready()


def keep(path: str) -> None:
    """Makes a directory below a path, and removes it when standard input ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        directory = tempfile.mkdtemp(prefix=_PREFIX, dir=path)
    except OSError as error:
        print(json.dumps({"error": str(error)}), flush=True)
        return
    print(json.dumps({"directory": directory}), flush=True)
    sys.stdin.buffer.read()
    remove(directory)


def remove(directory: str) -> None:
    """Removes a directory of probes."""
    end = time.monotonic() + _REMOVE_SECONDS
    while os.path.lexists(directory):
        shutil.rmtree(directory, ignore_errors=time.monotonic() < end)


def _end_with_parent() -> None:
    # Not through sys.stdin, whose lock would end this process with an error.
    while os.read(0, 1):
        pass
    os._exit(1)


_PROBES: dict[str, Callable[..., Found]] = {
    probe.__name__: probe for probe in (calls, space, commit, locks, leases, visibility)
}
_HELPERS: dict[str, Callable[[str], None]] = {
    helper.__name__: helper for helper in (hold_root, hold_step, make_file, keep, remove)
}


def main(name: str, directory: str, *numbers: str) -> None:
    """Runs a probe or a helper."""
    if name not in ("keep", "remove"):
        threading.Thread(target=_end_with_parent, daemon=True).start()
    if name in _HELPERS:
        _HELPERS[name](directory)
        return
    try:
        answer: object = {"found": _PROBES[name](directory, *map(int, numbers))}
    except (StepwellError, OSError) as error:
        answer = {"error": str(error)}
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
