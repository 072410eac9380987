"""Signals from outside: an interrupt wherever the program is, a termination that is listened to,
that is not, and that comes twice.

Interrupts of a single call, raised at chosen moments, are in ``test_endings.py``.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import pytest
from endings import DEADLINE, line_of, started, whole

#: Says when it is about to do something, and does it again and again.
BUSY = """
manager = sw.CheckpointManager(sys.argv[1], retention=sw.keep_latest(2))
state = {"a": np.full(24 << 20, 7, np.uint8)}
step = manager.next_step()
manager.save(step, state).result()
print("ready", flush=True)
while True:
    step += 1
    if sys.argv[2] == "save":
        manager.save(step, state)
    elif sys.argv[2] == "result":
        manager.save(step, state).result()
    elif sys.argv[2] == "restore":
        state = manager.restore()
    elif sys.argv[2] == "restore into":
        state = manager.restore(into=state)
    else:
        manager.save(step, state)
        manager.close()
        manager = sw.CheckpointManager(sys.argv[1], retention=sw.keep_latest(2))
"""


@pytest.mark.parametrize("what", ["save", "result", "restore", "restore into", "close"])
def test_ctrl_c_ends_the_program_and_tears_nothing(root: Path, what: str) -> None:
    for delay in (0.02, 0.09, 0.17, 0.26):
        with started(root, BUSY, what) as process:
            assert line_of(process) == "ready"
            time.sleep(delay)
            process.send_signal(signal.SIGINT)
            _, errors = process.communicate(timeout=DEADLINE)
        assert process.returncode == -signal.SIGINT, errors
        assert errors.strip().splitlines()[-1] == "KeyboardInterrupt"
        whole(root, at_least=0)


def test_two_ctrl_c_end_a_program_that_is_ending(root: Path) -> None:
    for delay in (0.0, 0.01, 0.05):
        with started(root, BUSY, "save") as process:
            assert line_of(process) == "ready"
            time.sleep(0.1)
            for _ in range(3):
                process.send_signal(signal.SIGINT)
                time.sleep(delay)
            process.communicate(timeout=DEADLINE)
        assert process.returncode != 0
        whole(root, at_least=0)


def test_an_unhandled_termination_ends_at_once(root: Path) -> None:
    with started(root, BUSY, "save") as process:
        assert line_of(process) == "ready"
        time.sleep(0.15)
        begun = time.monotonic()
        process.terminate()
        _, errors = process.communicate(timeout=DEADLINE)
    assert (process.returncode, errors) == (-signal.SIGTERM, "")
    assert time.monotonic() - begun < 10
    whole(root, at_least=0)


PREEMPTED = """
import threading
policy = sw.every_steps(1000) | sw.on_preemption()
def impatient(last):
    # A scheduler that does not wait for the answer: again while the last save is being written, and the manager closes.
    time.sleep(0.02)
    for _ in range(int(sys.argv[2])):
        if not last.done():
            os.kill(os.getpid(), signal.SIGTERM)
            os.write(1, b"again\\n")
            time.sleep(0.01)
with sw.CheckpointManager(sys.argv[1], save_policy=policy) as manager:
    for step in range(1_000_000):
        save = manager.save(step, lambda: {"a": np.full(96 << 20, 7, np.uint8)})
        if step == 0:
            print("in flight" if manager.pending() else "over", flush=True)
        if manager.reached_preemption(step):
            os.write(1, b"left at %d\\n" % step)
            threading.Thread(target=impatient, args=(save,)).start()
            break
        time.sleep(0.001)
"""


@pytest.mark.parametrize("again", [0, 1, 3])
def test_a_handled_termination_saves_once_more(root: Path, again: int) -> None:
    with started(root, PREEMPTED, again) as process:
        first = line_of(process)
        process.terminate()  # while the first save is being written
        said, errors = process.communicate(timeout=DEADLINE)
    assert (process.returncode, errors) == (0, ""), said
    if first != "in flight" or said.count("again") < again:
        pytest.skip("a save was over before the signal came: this disk is too fast")
    left = int(said.split()[2])
    assert left > 0
    assert whole(root, at_least=left) == left


def test_a_termination_during_a_wait_is_answered_next_step(root: Path) -> None:
    script = """
policy = sw.at_steps([0]) | sw.on_preemption()
manager = sw.CheckpointManager(sys.argv[1], save_policy=policy)
manager.save(0, {"a": np.full(128 << 20, 7, np.uint8)})
print("waiting", flush=True)
manager.wait_until_finished()       # the signal comes here
assert manager.save(1, {"a": np.full(9, 7, np.uint8)}).result() == 1
assert manager.reached_preemption(1)
manager.close()
os.kill(os.getpid(), signal.SIGTERM)     # closed: the signal is the system's again
time.sleep(30)
"""
    with started(root, script) as process:
        assert line_of(process) == "waiting"
        process.terminate()
        _, errors = process.communicate(timeout=DEADLINE)
    assert (process.returncode, errors) == (-signal.SIGTERM, "")
    assert whole(root, at_least=1) == 1


def test_a_forked_worker_is_ended_by_a_termination(root: Path) -> None:
    # It inherits the handler; a loader that terminates its workers and joins them would wait for
    # ever.
    script = """
import multiprocessing
def work(queue):
    while True:
        queue.get()
policy = sw.every_steps(1) | sw.on_preemption()
with sw.CheckpointManager(sys.argv[1], save_policy=policy) as manager:
    manager.save(1, {"a": np.full(32 << 20, 7, np.uint8)})
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    workers = [context.Process(target=work, args=(queue,), daemon=True) for _ in range(2)]
    for worker in workers:
        worker.start()
    time.sleep(0.1)
    for worker in workers:
        worker.terminate()
        worker.join(20)
        print(worker.exitcode)
        worker.kill()
    print(manager.reached_preemption(1))
"""
    with started(root, script) as process:
        said, errors = process.communicate(timeout=DEADLINE)
    assert (process.returncode, errors) == (0, "")
    assert said.split() == ["-15", "-15", "False"], "the workers end, and the training is not preempted"
    assert whole(root, at_least=1) == 1


def test_a_forked_child_has_the_handlers_that_were_there_before(root: Path) -> None:
    # Those of the system too: one of Python's own would run only where the interpreter gets to it,
    # and not in a lock.
    script = """
def handlers():
    with open("/proc/self/status") as status:
        masks = dict(line.split(":\\t") for line in status if line.startswith("Sig"))
    bit = 1 << (signal.SIGTERM - 1)
    return signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, *(bool(int(masks[one], 16) & bit) for one in ("SigBlk", "SigCgt"))
policy = sw.every_steps(1) | sw.on_preemption()
print(handlers(), flush=True)
with sw.CheckpointManager(sys.argv[1], save_policy=policy), sw.CheckpointManager(sys.argv[1] + "2", save_policy=policy):
    if os.fork() == 0:
        print(handlers(), flush=True)
        os._exit(0)
    os.wait()
    print(handlers())
print(handlers())
"""
    with started(root, script) as process:
        said, errors = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, errors
    free, taken = str((True, False, False)), str((False, False, True))
    assert said.splitlines() == [free, free, taken, free]


def test_a_programs_own_handler_is_called_in_a_worker(root: Path) -> None:
    script = """
signal.signal(signal.SIGTERM, lambda *_: os._exit(5))
with sw.CheckpointManager(sys.argv[1], save_policy=sw.every_steps(1) | sw.on_preemption()) as manager:
    manager.save(1, {"a": np.full(9, 7, np.uint8)}).result()
    pid = os.fork()
    if pid == 0:
        time.sleep(20)
        os._exit(0)
    time.sleep(0.1)
    os.kill(pid, signal.SIGTERM)
    print(os.waitpid(pid, 0)[1] >> 8)
"""
    with started(root, script) as process:
        said, errors = process.communicate(timeout=DEADLINE)
    assert (process.returncode, said) == (0, "5\n"), errors


def test_ctrl_c_in_a_terminal_ends_trainer_and_workers(root: Path) -> None:
    script = """
import multiprocessing
def work(queue):
    while True:
        queue.get()
os.setpgid(0, 0)
manager = sw.CheckpointManager(sys.argv[1], save_policy=sw.every_steps(1) | sw.on_preemption())
manager.save(0, {"a": np.full(1 << 20, 7, np.uint8)}).result()
context = multiprocessing.get_context("fork")
queue = context.Queue()
for _ in range(2):
    context.Process(target=work, args=(queue,), daemon=True).start()
print("ready", flush=True)
for step in range(1, 1_000_000):
    manager.save(step, {"a": np.full(16 << 20, 7, np.uint8)})
"""
    with started(root, script) as process:
        assert line_of(process) == "ready"
        time.sleep(0.3)
        os.killpg(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=DEADLINE)
        with pytest.raises(ProcessLookupError):  # no worker is left, nor anything else of it
            os.killpg(process.pid, 0)
    assert process.returncode == -signal.SIGINT, errors
    whole(root, at_least=0)
