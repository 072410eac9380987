"""Interrupted saves, closes and waits; managers that are dropped; what the engine has to say;
timeouts of every size."""

from __future__ import annotations

import logging
import math
import re
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw

Run = Callable[..., "subprocess.CompletedProcess[str]"]

#: A save that fails in the background: the root is gone before it is written.
LOST = """
import gc, shutil, time
def lost(**options):
    manager = sw.CheckpointManager(sys.argv[1], **options)
    shutil.rmtree(sys.argv[1])
    return manager, manager.save(1, {"w": np.ones(4)})
"""

INTERRUPTED = """
import signal, time
w = np.ones(64 << 20, np.float32)
def stop(*_):
    signal.setitimer(signal.ITIMER_REAL, 0)
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, stop)
for delay in (0.02, 0.05, 0.1):
    w[:] = 1
    try:
        signal.setitimer(signal.ITIMER_REAL, delay)
        save()
        time.sleep(1)
    except KeyboardInterrupt:
        w[:] = 2
        check()
signal.setitimer(signal.ITIMER_REAL, 0)
end()
"""


def test_an_interrupted_save_is_over_on_the_interrupt(python: Run, root: Path) -> None:
    script = """
manager = sw.CheckpointManager(sys.argv[1], staging_bytes=16 << 20)
told = 0
def save():
    manager.save(manager.next_step(), {"p": {"w": w}})
def check():
    global told
    told += 1
    manager.wait_until_finished()
    for step in manager.all_steps():
        assert (manager.restore(step)["p"]["w"] == 1).all(), "torn"
def end():
    again = manager.save(1000, {"p": {"w": w}})
    again.result()
    manager.close()
    print(told, again.done(), [name for name in os.listdir(sys.argv[1]) if name.startswith(".tmp")])
"""
    done = python(script + INTERRUPTED, root)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "3 True []\n"


def test_an_interrupted_path_save_is_over_on_the_interrupt(python: Run, root: Path) -> None:
    script = """
names, told = iter("abcdef"), 0
sw.save  # imported before: an interrupt in numpy's own imports may be lost there
os.mkdir(sys.argv[1])
def save():
    sw.save(os.path.join(sys.argv[1], next(names)), {"w": w})
def check():
    global told
    told += 1
    time.sleep(0.3)
    for name in os.listdir(sys.argv[1]):
        if not name.startswith("."):
            assert (sw.restore(os.path.join(sys.argv[1], name))["w"] == 1).all(), "torn"
def end():
    print(told)
"""
    done = python(script + INTERRUPTED, root)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "3\n"


def test_a_dropped_managers_failure_ends_the_process(python: Run, root: Path) -> None:
    done = python(LOST + "lost()\ngc.collect()\nprint('the end')", root)
    assert (done.returncode, done.stdout) == (1, "the end\n")
    assert str(root) in done.stderr
    assert "SaveFailed" in done.stderr
    assert "dropped without close()" in done.stderr


def test_a_manager_that_was_dropped_is_closed(python: Run, root: Path) -> None:
    script = """
import gc, signal
def work(step):
    manager = sw.CheckpointManager(sys.argv[1], save_policy=sw.every_steps(1) | sw.on_preemption())
    manager.save(step, {"a": np.ones(1 << 20)})
for step in range(3):
    work(step)
    gc.collect()
print(sw.metadata(sys.argv[1]).step, signal.getsignal(signal.SIGTERM) == signal.SIG_DFL)
"""
    done = python(script, root)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "2 True\n")


def test_preemption_handlers_chain_in_any_order(python: Run, root: Path) -> None:
    script = """
import signal
heard = []
signal.signal(signal.SIGTERM, lambda *_: heard.append("own"))
a, b = (sw.CheckpointManager(sys.argv[1] + name, save_policy=sw.on_preemption()) for name in "ab")
a.close()
signal.raise_signal(signal.SIGTERM)
print(heard, b.reached_preemption(1))
b.close()
signal.raise_signal(signal.SIGTERM)
print(heard)
"""
    done = python(script, root)
    assert (done.stderr, done.stdout) == ("", "['own'] True\n['own', 'own']\n")


def test_a_failure_is_a_warning_where_that_was_asked_for(python: Run, root: Path) -> None:
    done = python(LOST + "m, s = lost(on_save_error='warn')\nm.close()\nprint('the end')", root)
    assert (done.returncode, done.stdout) == (0, "the end\n")
    assert "training goes on" in done.stderr
    assert "step" in done.stderr


def test_what_the_engine_says_goes_to_the_logger_of_the_package(python: Run, root: Path) -> None:
    script = """
import logging
class Keep(logging.Handler):
    def emit(self, record):
        print(record.name, record.levelname, record.getMessage().split(":")[0])
logging.getLogger("stepwell").addHandler(Keep())
m, s = lost(on_save_error="warn")
m.close()
"""
    done = python(LOST + script, root)
    assert (done.returncode, done.stderr) == (0, "")
    assert "stepwell WARNING a save failed; training goes on" in done.stdout


def test_a_handler_that_raises_ends_nothing(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from stepwell import _lifecycle as lifecycle

    class Bad(logging.Filter):
        def filter(self, record: logging.LogRecord) -> bool:
            raise RuntimeError("from a filter")

    bad = Bad()
    logging.getLogger("stepwell").addFilter(bad)
    try:
        lifecycle.log(30, "stepwell", "something")
    finally:
        logging.getLogger("stepwell").removeFilter(bad)
    assert "from a filter" in capsys.readouterr().err


def skip_if_never(done: subprocess.CompletedProcess[str]) -> None:
    """On a disk that is faster than the interrupts."""
    if done.stdout == "never\n":
        pytest.skip("no interrupt came while it waited: this disk is too fast")


#: Interrupts that may come at any moment, the wait's among them: with many delays, some come while
#: it waits.
ALARMED = """
import shutil, signal
def stop(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, stop)
def interrupted(call, delay):
    try:
        try:
            signal.setitimer(signal.ITIMER_REAL, delay)
            call()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except KeyboardInterrupt as interrupt:
        if interrupt.__context__ is not None:   # it came just after the answer
            raise interrupt.__context__
        return True
    return False
"""


def test_an_interrupted_close_goes_on_and_may_be_called_again(python: Run, root: Path) -> None:
    script = """
last = sys.argv[2] == "leave"
for number in range(50):
    path = f"{sys.argv[1]}-{number}"
    manager = sw.CheckpointManager(path, staging_bytes=128 << 20)
    manager.save(0, {"a": np.zeros(64 << 20, np.uint8)})
    if interrupted(manager.close, 0.0002 * (1 + number % 10)):
        try:
            manager.save(1, {})
            manager.wait_until_finished()
        except sw.errors.ClosedError:      # it was closing
            break
    manager.close()
else:
    print("never")
    sys.exit()
if sys.argv[2] == "again":
    manager.close()
    manager.close(0)
print(path)
"""
    for ending in ("again", "leave"):
        done = python(ALARMED + script, root / ending, ending)
        skip_if_never(done)
        path = done.stdout.strip()
        assert (done.returncode, done.stderr) == (0, ""), done
        assert sw.metadata(path).step == 0


def test_an_interrupt_ends_a_wait_and_leaves_the_save(python: Run, root: Path) -> None:
    script = """
manager = sw.CheckpointManager(sys.argv[1], staging_bytes=600 << 20, retention=sw.keep_latest(1))
for number in range(40):
    # Signals are looked at every 50 ms: the save must last longer than that.
    save = manager.save(number, {"a": np.zeros((128 << 20) << min(number // 5, 2), np.uint8)})
    wait = save.result if number % 2 else manager.wait_until_finished
    # What was waited for is not over: it was the wait that ended.
    if interrupted(wait, 0.0005 * (1 + number % 20)) and not save.done():
        break
else:
    print("never")
    sys.exit()
manager.wait_until_finished()
print(save.result() == manager.latest_step(), manager.restore()["a"].any())
manager.close()
"""
    done = python(ALARMED + script, root)
    skip_if_never(done)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "True False\n")


def test_an_interrupt_ends_a_read_without_later_writes(python: Run, root: Path) -> None:
    script = """
import time
size = 256 << 20
sw.save(sys.argv[1], {"a": np.ones(size, np.uint8)})
target = np.zeros(size, np.uint8)
sw.restore(sys.argv[1], into={"a": target})    # imports everything
for number in range(200):
    target[:] = 0
    if not interrupted(lambda: sw.restore(sys.argv[1], into={"a": target}), 0.002 * (1 + number % 40)):
        continue
    before = int(target.sum())
    time.sleep(0.3)
    assert int(target.sum()) == before
    if 0 < before < size:    # it ended in the middle
        break
else:
    print("never")
"""
    done = python(ALARMED + script, root)
    skip_if_never(done)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "")


def test_a_failure_outlives_an_interrupted_wait_for_it(python: Run, root: Path) -> None:
    script = """
told = 0
for number in range(100):
    path = f"{sys.argv[1]}-{number}"
    manager = sw.CheckpointManager(path, staging_bytes=1)
    shutil.rmtree(path)
    try:
        manager.save(0, {"a": np.zeros(1 << 20, np.uint8)})
        interrupted(manager.wait_until_finished, 0.00002 * (1 + number % 50))
        manager.wait_until_finished()
    except sw.SaveFailed:
        told += 1
print(told)
"""
    done = python(ALARMED + script, root)
    assert (done.returncode, done.stderr, done.stdout) == (0, "", "100\n")


def test_the_wait_at_exit_has_a_bound() -> None:
    from stepwell import _lifecycle as lifecycle

    moved = iter((0, 1, 1, 1, 1, 1, 1, 1, 1, 1))
    waits: list[float] = []

    def wait(seconds: float) -> bool:
        waits.append(seconds)
        time.sleep(seconds / 2)
        return False

    what = "the manager of /x to close at exit"
    with pytest.raises(sw.errors.StalledError, match=rf"{what}.*nothing has happened for 0\.02 s"):
        lifecycle.wait_patiently(wait, lambda: next(moved), 0.02, what)
    assert 2 <= len(waits) <= 6


@pytest.mark.parametrize("forever", [None, math.inf, 1e19, 1e300, 10**400], ids=str)
def test_a_timeout_that_never_comes_is_none(root: Path, forever: Any) -> None:
    with sw.CheckpointManager(root) as manager:
        save = manager.save(0, {"w": np.ones(16 << 20, np.float32)})
        manager.wait_until_finished(forever)
        assert save.done()
        assert (save.result(forever), save.wait_captured(forever), save.exception(forever)) == (0, True, None)
        manager.close(forever)
    assert sw.metadata(root).step == 0


@pytest.mark.parametrize("wrong", [math.nan, -1, -math.inf, -(10**400), "soon"], ids=str)
def test_a_timeout_that_is_no_length_of_time_raises(root: Path, wrong: Any) -> None:
    with sw.CheckpointManager(root) as manager:
        save = manager.save(0, {"w": np.ones(4)})
        for call in (
            manager.wait_until_finished,
            manager.close,
            save.result,
            save.exception,
            save.wait_captured,
            lambda timeout: next(sw.watch(root, after=0, timeout=timeout)),
            lambda timeout: sw.CheckpointManager(root, options=sw.Options(stall_timeout=timeout)),
        ):
            with pytest.raises(ValueError, match="seconds"):
                call(wrong)
        assert manager.wait_until_finished() is None  # it is open as before
        assert save.result() == 0


def test_a_wait_that_is_over_says_what_it_waited_for(root: Path) -> None:
    def told(call: str) -> str:
        for _ in range(50):  # a save may be over before a busy machine comes to ask
            with sw.CheckpointManager(root, staging_bytes=256 << 20) as manager:
                manager.save(7, {"w": np.ones(128 << 20, np.uint8)}, exists="replace")
                try:
                    getattr(manager, call)(0)
                except TimeoutError as error:
                    return str(error)
        return "each save was over"

    for call in ("wait_until_finished", "close"):
        assert re.search(r"1 save.s., the oldest of step 7", told(call)), call
    assert sw.metadata(root).step == 7


def test_a_stall_timeout_may_be_endless(root: Path) -> None:
    for forever in (math.inf, 1e19):
        with sw.CheckpointManager(root, options=sw.Options(stall_timeout=forever)) as manager:
            manager.save(manager.next_step(), {"a": np.ones(3)}).result()
    with pytest.raises(ValueError, match="stall_timeout=0"):
        sw.CheckpointManager(root, options=sw.Options(stall_timeout=0))
