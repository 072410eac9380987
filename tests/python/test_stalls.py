"""A disk that does not answer: every wait of the Python side ends, says what it waited for, and
leaves the process able to go on.

The subject is a real process; ``strace`` holds up its system calls for longer than any test lasts.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
import stepwell as sw

PROJECT = Path(__file__).parents[2]
STALL = 1.0
#: The beginning of every script; it continues when the tracer is attached.
PRELUDE = f"""
import os, sys, time
import numpy as np
import stepwell as sw

where = sys.argv[1]
options = sw.Options(stall_timeout={STALL}, engine="threads")
state = {{"params": {{"w": np.ones(1 << 20, np.float32)}}}}

def attached():
    print("ready", flush=True)
    sys.stdin.readline()

def stalled(call):
    begun = time.monotonic()
    try:
        print("returned", call())
    except sw.errors.StalledError as error:
        print(type(error).__name__, f"{{time.monotonic() - begun:.1f}}", error)
    sys.stdout.flush()

"""


def outlast(path: Path, script: str, calls: str) -> list[str]:
    """Returns the output of a script while these system calls hang, from ``attached()`` on. Then it
    is killed: a hanging thread would delay its end."""
    file = path / "script.py"
    file.write_text(PRELUDE + script + "\nprint('end', flush=True)\nsys.stdin.readline()\n")
    errors = path / "errors"
    with errors.open("w") as stderr:
        process = subprocess.Popen(
            [sys.executable, str(file), str(path / "run")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=stderr,
            text=True,
        )
    assert process.stdout is not None
    assert process.stdin is not None
    watchdog = threading.Timer(30, process.kill)
    watchdog.start()
    tracer = None
    try:
        assert process.stdout.readline() == "ready\n", errors.read_text()
        delay = ["-e", f"trace={calls}", "-e", f"inject={calls}:delay_enter=60s"]
        tracer = subprocess.Popen(
            ["strace", "-f", "-qq", "-o", os.devnull, *delay, "-p", str(process.pid)],
            stderr=subprocess.DEVNULL,
        )
        while "TracerPid:\t0\n" in Path(f"/proc/{process.pid}/status").read_text():
            if tracer.poll() is not None:
                pytest.skip("strace cannot attach to a process here")
            time.sleep(0.001)
        process.stdin.write("\n")
        process.stdin.flush()
        lines: list[str] = []
        while (line := process.stdout.readline()) != "end\n":
            assert line, f"it ended, or was killed after 30 s; it said {lines}, {errors.read_text()}"
            lines.append(line.rstrip())
        return lines
    finally:
        watchdog.cancel()
        for one in (tracer, process):
            if one is not None and one.poll() is None:
                one.kill()
                one.wait()


@pytest.fixture
def disk() -> Iterator[Path]:
    if shutil.which("strace") is None:
        pytest.skip("strace is not installed: nothing holds up a system call")
    path = Path(os.environ.get("STEPWELL_TEST_DIR", PROJECT / "target")) / f"stalls-{os.getpid()}"
    path.mkdir(parents=True)
    yield path
    shutil.rmtree(path, ignore_errors=True)


def check(line: str, waited_for: str) -> None:
    """It gave up after the stall timeout, not much later, and says for what it waited."""
    name, seconds, text = line.split(" ", 2)
    assert name == "StalledError", line
    assert STALL * 0.9 <= float(seconds) < STALL + 8, line
    assert waited_for in text, line


def test_a_result_without_a_timeout_ends_on_a_silent_disk(disk: Path) -> None:
    script = """
manager = sw.CheckpointManager(where, options=options)
attached()
save = manager.save(7, state)
stalled(save.result)
stalled(save.exception)
print(save.done())
"""
    first, second, done = outlast(disk, script, "fsync")
    check(first, "the commit of the save of step 7")
    check(second, "the commit of the save of step 7")
    assert done == "False"


def test_a_singular_save_ends_when_the_disk_does_not_answer(disk: Path) -> None:
    # The engine has been chosen, and the directory around it is there: the first thing to be synced
    # is the data.
    script = """
options = sw.Options(stall_timeout=options.stall_timeout, engine=options.engine, create=False)
sw.save(where + "-before", state, options=options)
attached()
stalled(lambda: sw.save(where, state, options=options))
"""
    (line,) = outlast(disk, script, "fsync")
    check(line, "the commit of the save")


def test_a_restore_from_a_silent_disk_ends_by_the_timeout(disk: Path) -> None:
    script = """
manager = sw.CheckpointManager(where, options=options)
manager.save(7, state).result()
checkpoint = manager.checkpoint(7)
assert checkpoint.verify().ok  # its files are open
for file in os.scandir(checkpoint.path + "/i0"):
    opened = os.open(file.path, os.O_RDONLY)
    os.posix_fadvise(opened, 0, 0, os.POSIX_FADV_DONTNEED)  # what is in memory need not be waited for
    os.close(opened)
attached()
stalled(checkpoint.restore)
"""
    (line,) = outlast(disk, script, "pread64,preadv,preadv2")
    check(line, "read")


#: The system calls of a look into a root.
LOOKS = "getdents64,statx,fstat,newfstatat"


def test_a_question_ends_when_the_disk_does_not_answer(disk: Path) -> None:
    script = """
manager = sw.CheckpointManager(where, options=options)
manager.save(7, state).result()
attached()
stalled(manager.all_steps)
"""
    (line,) = outlast(disk, script, LOOKS)
    check(line, "to be read")


def test_ctrl_c_ends_a_question_that_the_disk_does_not_answer(disk: Path) -> None:
    script = """
import signal, threading
manager = sw.CheckpointManager(where, options=sw.Options(stall_timeout=20, engine="threads"))
manager.save(7, state).result()
interrupt = threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT))
signal.signal(signal.SIGINT, signal.default_int_handler)
attached()
interrupt.start()
begun = time.monotonic()
try:
    print("returned", manager.all_steps())
except KeyboardInterrupt:
    print("interrupted", f"{time.monotonic() - begun:.1f}")
"""
    (line,) = outlast(disk, script, LOOKS)
    what, seconds = line.split()
    assert what == "interrupted", line
    assert 0.4 <= float(seconds) < 10


def test_a_lost_io_uring_is_announced_once(root: Path) -> None:
    code = f"""
import errno, logging, sys
sys.path.insert(0, {str(Path(__file__).resolve().parents[1] / "newcomer")!r})
import forbid, numpy as np, stepwell as sw
logging.basicConfig(stream=sys.stdout)
with sw.CheckpointManager({str(root)!r}) as manager:
    manager.save(0, {{"w": np.zeros(1 << 20)}}).result()
    forbid.system_calls(forbid.IO_URING[:1], errno.ENOMEM)  # as if `ulimit -l` were used up
    for _ in range(4):
        assert not manager.restore(0)["w"].any()
"""
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True
    )
    if sw.engine_info(root)["engine"] != "io_uring":
        pytest.skip("no io_uring here")
    assert done.stdout.count("transfers use threads") == 1, done.stdout
