"""Exit, fork, signals, threads, import: what happens around the calls."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw

Run = Callable[..., "subprocess.CompletedProcess[str]"]

FAIL = """
import shutil, time
manager = sw.CheckpointManager(sys.argv[1])
shutil.rmtree(sys.argv[1])
save = manager.save(1, {"a": np.zeros(3)})
while not save.done():
    time.sleep(0.01)
"""


def test_a_pending_save_is_committed_at_exit(python: Run, root: Path) -> None:
    done = python("sw.CheckpointManager(sys.argv[1]).save(3, {'a': np.arange(1 << 20)})", root)
    assert (done.returncode, done.stderr) == (0, "")
    assert np.array_equal(sw.restore(root)["a"], np.arange(1 << 20))


def test_a_manager_that_lives_to_the_end_is_closed(python: Run, root: Path) -> None:
    done = python("m = sw.CheckpointManager(sys.argv[1])\nm.save(3, {'a': np.arange(1 << 20)})", root)
    assert (done.returncode, done.stderr) == (0, "")
    assert sw.metadata(root).step == 3


def test_a_singular_save_in_the_background_is_committed_at_exit(python: Run, root: Path) -> None:
    done = python("sw.save_async(sys.argv[1], {'a': np.arange(1 << 20)})", root)
    assert (done.returncode, done.stderr) == (0, "")
    assert sw.restore(root)["a"][-1] == (1 << 20) - 1


def test_an_unseen_failure_ends_the_process_with_an_error(python: Run, root: Path) -> None:
    done = python(FAIL + "print('the end')", root)
    assert done.returncode == 1
    assert "the end" in done.stdout
    assert "SaveFailed" in done.stderr
    assert "step" in done.stderr


def test_a_failure_that_was_seen_does_not(python: Run, root: Path) -> None:
    script = (
        FAIL
        + "for _ in range(2):\n    try:\n        manager.check_for_errors()\n    except sw.SaveFailed:\n        pass\n"
    )
    done = python(script, root)
    assert (done.returncode, done.stderr) == (0, "")


def test_an_exit_status_of_the_program_stays(python: Run, root: Path) -> None:
    assert python("sw.CheckpointManager(sys.argv[1]).save(0, {}); sys.exit(7)", root).returncode == 7
    assert (
        python("sw.CheckpointManager(sys.argv[1]).save(1, {}); raise ValueError('x')", root).returncode == 1
    )


def test_handles_know_that_they_are_in_a_forked_child(python: Run, root: Path) -> None:
    script = """
manager = sw.CheckpointManager(sys.argv[1])
save = manager.save(0, {"a": np.arange(5)})
save.result()
checkpoint = manager.checkpoint()
pid = os.fork()
if pid == 0:
    told = 0
    for call in (lambda: manager.save(1, {}), manager.latest_step, manager.close, save.result, save.done,
                 lambda: save.add_done_callback(print), lambda: checkpoint["a"], checkpoint.metadata):
        try:
            call()
        except sw.errors.ForkedProcess as error:
            told += error.kind == "forked_process"
    del manager, save, checkpoint
    again = sw.restore(sys.argv[1])["a"].tolist()
    print(told, again, flush=True)
    sys.exit(0)
print(os.waitpid(pid, 0)[1], flush=True)
manager.save(1, {"a": np.arange(6)}).result()
print(manager.all_steps(), checkpoint["a"][:].tolist())
checkpoint.close()
manager.close()
"""
    done = python(script, root)
    assert done.stderr == ""
    assert done.stdout.split("\n")[:3] == ["8 [0, 1, 2, 3, 4]", "0", "[0, 1] [0, 1, 2, 3, 4]"]


def test_a_child_may_save_for_itself(python: Run, root: Path, tmp_path: Path) -> None:
    script = """
sw.save(sys.argv[1], {"a": 1})
import multiprocessing
def work(path):
    with sw.CheckpointManager(path) as manager:
        called = []
        save = manager.save(0, {"a": np.arange(1 << 18)})
        save.add_done_callback(called.append)
        save.result()
    return sw.restore(path)["a"].sum()
with multiprocessing.get_context("fork").Pool(2) as pool:
    print(pool.map(work, [sys.argv[2] + "/x", sys.argv[2] + "/y"]))
"""
    done = python(script, root, tmp_path)
    assert done.stderr == ""
    assert done.returncode == 0


def test_a_forked_child_neither_flushes_nor_reports(python: Run, root: Path) -> None:
    script = """
manager = sw.CheckpointManager(sys.argv[1])
save = manager.save(0, {"a": np.zeros(64 << 20, np.uint8)})
if os.fork() == 0:
    sys.exit(5)
print(os.wait()[1] >> 8)
"""
    done = python(script, root)
    assert (done.returncode, done.stdout, done.stderr) == (0, "5\n", "")
    assert sw.metadata(root).step == 0


def test_other_python_threads_run_while_a_save_is_waited_for(root: Path) -> None:
    import threading
    import time

    turns, stop = [0], threading.Event()

    def spin() -> None:
        while not stop.is_set():
            turns[0] += 1
            time.sleep(0.0005)

    thread = threading.Thread(target=spin)
    thread.start()
    try:
        with sw.CheckpointManager(root, retention=sw.keep_latest(1)) as manager:
            for step in range(50):  # one may end before a busy machine runs the other thread
                save = manager.save(step, {"a": np.zeros(128 << 20, np.uint8)})
                before = turns[0]
                save.result()
                if turns[0] > before:
                    break
            else:
                pytest.fail("the other thread never had its turn")
    finally:
        stop.set()
        thread.join()


def test_buffers_are_given_back_after_the_save(root: Path) -> None:
    import gc
    import sys
    import time

    array = np.zeros(1000)
    count = sys.getrefcount(array)
    with sw.CheckpointManager(root) as manager:
        manager.save(0, {"a": array}).result()
        deadline = time.monotonic() + 60
        while sys.getrefcount(array) != count and time.monotonic() < deadline:
            time.sleep(0.01)
        gc.collect()
        assert sys.getrefcount(array) == count
        array.resize(2000, refcheck=False)


def test_importing_is_cheap_and_imports_no_framework(tmp_path: Path) -> None:
    script = """
import sys, time
first = time.process_time()
import numpy, ml_dtypes
before = time.process_time()
import stepwell
print(time.process_time() - before, before - first)
print([name for name in ("torch", "jax", "asyncio") if name in sys.modules])
"""
    # Compiled once, as an installed package is.
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "", "PYTHONPYCACHEPREFIX": str(tmp_path)}
    command = [sys.executable, "-c", script]
    runs = [
        subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
        for _ in range(8)
    ]
    assert {run.split("\n")[1] for run in runs} == {"[]"}
    # 30 ms of a processor on a machine where numpy takes 80 or more; a slower one slows both down
    # alike, and waiting counts nothing.
    times = [tuple(map(float, run.split("\n")[0].split())) for run in runs]
    assert any(ours < 0.030 * max(1.0, numpys / 0.080) for ours, numpys in times), times


def test_nothing_is_logged_when_all_is_well(root: Path, capfd: pytest.CaptureFixture[str]) -> None:
    with sw.CheckpointManager(root, retention=sw.keep_latest(1)) as manager:
        for step in range(3):
            manager.save(step, {"a": np.zeros(3)}).result()
        manager.restore()
    assert capfd.readouterr() == ("", "")


def test_nothing_is_left_after_the_last_close(python: Run, root: Path) -> None:
    script = """
import threading, time
def state():
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))
def cycle():
    with sw.CheckpointManager(sys.argv[1]) as manager:
        manager.save(manager.next_step(), {"a": np.zeros(1 << 20)}).result()
        manager.restore()
def settled(enough):
    # A thread may take a moment to end after all has been told.
    deadline = time.monotonic() + 30
    while not enough() and time.monotonic() < deadline:
        time.sleep(0.01)
    return state()
quiet = []
def is_quiet():
    time.sleep(0.05)
    quiet.append(state())
    return len(quiet) >= 10 and len(set(quiet[-10:])) == 1
cycle()
before = settled(is_quiet)
for _ in range(3):
    cycle()
after = settled(lambda: state() == before)
print(before == after, before, after)
"""
    done = python(script, root)
    assert done.stdout.startswith("True"), done.stdout
    assert done.stderr == ""


def test_a_callback_that_raises_is_printed_and_harms_nobody(
    root: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    callers: list[str] = []
    called = threading.Event()

    def bad(_: Any) -> None:
        callers.append(threading.current_thread().name)
        raise RuntimeError("from a callback")

    with sw.CheckpointManager(root) as manager:
        for step in range(50):
            save = manager.save(step, {"a": np.zeros(1 << 22)})
            # If the save is over, the callback runs here, and raises here.
            with contextlib.suppress(RuntimeError):
                save.add_done_callback(bad)
                break
        save.result()
        following = manager.save(step + 1, {"a": np.zeros(1 << 22)})
        following.add_done_callback(lambda _: called.set())
        following.result()
        assert called.wait(60)
    assert callers[-1] == "stepwell-notifier"
    printed = capsys.readouterr().err
    assert printed.count("exception in a callback") == 1
    assert "RuntimeError: from a callback" in printed


def test_threads_of_the_engine_leave_signals_to_the_program(tmp_path: Path) -> None:
    with sw.CheckpointManager(tmp_path / "run", retention=sw.keep_latest(1)) as manager:
        for step in range(3):
            manager.save(step, {"a": np.zeros(1 << 20)}).result()
        engine = {}
        pythons = {thread.native_id for thread in threading.enumerate()}
        for task in Path("/proc/self/task").iterdir():
            try:
                text = (task / "status").read_text()
            except OSError:
                continue  # it has ended meanwhile
            status = dict(line.split(":\t", 1) for line in text.splitlines() if ":\t" in line)
            if status["Name"].startswith("stepwell-") and int(task.name) not in pythons:
                engine[status["Name"]] = int(status["SigBlk"], 16)
        assert "stepwell-persist"[:15] in engine
        for name, blocked in engine.items():
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
                assert blocked & 1 << (number - 1), f"{name} takes {signal.Signals(number).name}"


def test_close_returns_the_staging_memory(python: Run, root: Path) -> None:
    script = """
def resident():
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmRSS")) << 10
state = {"a": np.ones(96 << 20, np.uint8)}
manager = sw.CheckpointManager(sys.argv[1])
before = resident()
manager.save(1, state).result()
ring = resident() - before
manager.close()
print(ring > 64 << 20, resident() - before < 32 << 20)
"""
    assert python(script, root).stdout == "True True\n"
