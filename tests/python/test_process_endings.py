"""How processes end while a manager is at work: by exceptions, exits, threads and forks, in
whatever order the interpreter takes its things down.

Each is a process of its own, and afterwards the root is looked at from outside: what was committed
is whole, what was asked for is there where the ending allows it, and the next writer is let in at
once. Signals are in ``test_signals.py``; interrupted waits, dropped managers and failures that
nobody saw in ``test_endings.py``; forked handles in ``test_lifecycle.py``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import stepwell as sw
from endings import DEADLINE, line_of, started, whole

Run = Callable[..., "subprocess.CompletedProcess[str]"]

#: A manager with a save in flight: large enough not to be over before the next line.
IN_FLIGHT = """
manager = sw.CheckpointManager(sys.argv[1])
manager.save(0, {"a": np.full(1 << 10, 7, np.uint8)}).result()
save = manager.save(1, {"a": np.full(96 << 20, 7, np.uint8)})
"""


# ---- exceptions, exits, threads
# ---------------------------------------------------------------------------------------


def test_an_uncaught_exception_takes_no_save_with_it(python: Run, root: Path) -> None:
    done = python(IN_FLIGHT + "raise ZeroDivisionError('of the program')", root)
    assert done.returncode == 1
    assert done.stderr.count("Traceback") == 1
    assert "ZeroDivisionError: of the program" in done.stderr
    assert whole(root, at_least=1) == 1


def test_an_exception_in_the_block_is_the_one_that_is_shown(python: Run, root: Path) -> None:
    script = """
import shutil
with sw.CheckpointManager(sys.argv[1]) as manager:
    shutil.rmtree(sys.argv[1])
    manager.save(1, {"a": np.ones(4)})
    raise ZeroDivisionError("of the program")
"""
    done = python(script, root)
    assert done.returncode == 1
    assert "ZeroDivisionError: of the program\nand closing the manager" in done.stderr
    assert "SaveFailed" in done.stderr, "what it hides is not lost"


def test_an_exit_in_a_thread_ends_the_thread_only(python: Run, root: Path) -> None:
    script = """
import threading
def work():
    global manager
    manager = sw.CheckpointManager(sys.argv[1])
    manager.save(1, {"a": np.full(96 << 20, 7, np.uint8)})
    sys.exit(3)
thread = threading.Thread(target=work)
thread.start()
thread.join()
manager.save(2, {"a": np.full(1 << 20, 7, np.uint8)})
"""
    done = python(script, root)
    assert (done.returncode, done.stderr) == (0, "")
    assert whole(root, at_least=2) == 2


def test_threads_beyond_the_main_one_may_save(python: Run, root: Path) -> None:
    script = """
import threading, time
from concurrent.futures import ThreadPoolExecutor
manager = sw.CheckpointManager(sys.argv[1])
def work():
    for step in range(5):
        manager.save(step, {"a": np.full(1 << 20, 7, np.uint8)})
        time.sleep(0.02)
threading.Thread(target=work).start()      # not joined: the interpreter does that
pool = ThreadPoolExecutor(1)
other = sw.CheckpointManager(sys.argv[1] + "-pool")
for step in range(5):
    pool.submit(other.save, step, {"a": np.full(1 << 20, 7, np.uint8)})
"""
    done = python(script, root)
    assert (done.returncode, done.stderr) == (0, "")
    assert whole(root, at_least=4) == 4
    assert whole(Path(f"{root}-pool"), at_least=4) == 4


def test_a_daemon_thread_in_a_save_delays_no_exit(python: Run, root: Path) -> None:
    script = """
import threading, time
manager = sw.CheckpointManager(sys.argv[1], retention=sw.keep_latest(2))
begun = threading.Event()
def work():
    for step in range(manager.next_step(), 1_000_000):
        try:
            manager.save(step, {"a": np.full(8 << 20, 7, np.uint8)})
        except sw.errors.ClosedError:
            return                  # the program ends
        finally:
            begun.set()
threading.Thread(target=work, daemon=True).start()
begun.wait()
time.sleep(float(sys.argv[2]))
"""
    for delay in (0, 0.03, 0.11):
        done = python(script, root, delay, timeout=DEADLINE)
        assert (done.returncode, done.stderr) == (0, "")
        whole(root, at_least=0)


def test_an_await_that_is_cancelled_leaves_the_save_to_go_on(python: Run, root: Path) -> None:
    script = """
import asyncio
async def wait(save):
    return await save
async def main():
    global manager
    manager = sw.CheckpointManager(sys.argv[1])
    save = manager.save(1, {"a": np.full(96 << 20, 7, np.uint8)})
    try:
        await asyncio.wait_for(wait(save), 0.001)
    except TimeoutError:
        print("cancelled", save.done())
    another = asyncio.create_task(wait(save))   # the loop is closed while it waits
    await asyncio.sleep(0)
asyncio.run(main())
"""
    done = python(script, root)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout in ("cancelled False\n", "")
    assert whole(root, at_least=1) == 1


def test_a_hard_exit_costs_only_what_was_in_flight(python: Run, root: Path) -> None:
    done = python(IN_FLIGHT + "os._exit(9)", root)
    assert (done.returncode, done.stderr) == (9, "")
    whole(root, at_least=0)


def test_an_unseen_failure_sets_the_exit_status(
    root: Path,
) -> None:
    script = """
import shutil
manager = sw.CheckpointManager(sys.argv[1])
shutil.rmtree(sys.argv[1])
manager.save(1, {"a": np.ones(4)})
print("x" * 100000)
"""
    read, write = os.pipe()
    os.close(read)  # head -1 and the like have gone
    file = root.with_suffix(".py")
    file.write_text("import sys, stepwell as sw, numpy as np\n" + script)
    done = subprocess.run(
        [sys.executable, str(file), str(root)], stdout=write, stderr=write, timeout=DEADLINE, check=False
    )
    os.close(write)
    assert done.returncode != 0


# ---- the order in which an interpreter ends
# ---------------------------------------------------------------------------------

ORDERS = {
    "in a reference cycle": """
class Trainer:
    def __init__(self):
        self.me, self.manager = self, sw.CheckpointManager(sys.argv[1])
Trainer().manager.save(1, state)
""",
    "in a cycle that is never collected": """
import gc
gc.disable()
class Trainer:
    def __init__(self):
        self.me, self.manager = self, sw.CheckpointManager(sys.argv[1])
Trainer().manager.save(1, state)
""",
    "in a global of another module": """
import types
sys.modules["theirs"] = types.ModuleType("theirs")
sys.modules["theirs"].manager = sw.CheckpointManager(sys.argv[1])
sys.modules["theirs"].manager.save(1, state)
""",
    "in an attribute of a class and of a function": """
class Holder:
    manager = sw.CheckpointManager(sys.argv[1])
def function(): pass
function.manager = Holder.manager
function.manager.save(1, state)
""",
    "frozen by the collector": """
import gc
manager = sw.CheckpointManager(sys.argv[1])
manager.save(1, state)
gc.freeze()
""",
    "in its own callback": """
manager = sw.CheckpointManager(sys.argv[1])
save = manager.save(1, state)
save.add_done_callback(lambda one, manager=manager: (one.result(), manager.root))
""",
    "in an exception that is still held": """
def fail():
    manager = sw.CheckpointManager(sys.argv[1])
    manager.save(1, state)
    raise ValueError
try:
    fail()
except ValueError as error:
    held = error
""",
    "in a thread's own variables": """
import threading
local = threading.local()
local.manager = sw.CheckpointManager(sys.argv[1])
local.manager.save(1, state)
""",
    "collected in the middle of its save": """
import gc
sw.CheckpointManager(sys.argv[1]).save(1, state)
gc.collect()
""",
}


@pytest.mark.parametrize("where", ORDERS)
def test_a_save_is_committed_at_exit_wherever_kept(python: Run, root: Path, where: str) -> None:
    done = python("state = {'a': np.full(64 << 20, 7, np.uint8)}\n" + ORDERS[where], root)
    assert (done.returncode, done.stderr) == (0, "")
    assert whole(root, at_least=1) == 1


def test_exit_hooks_may_save_unless_they_come_too_late(python: Run, root: Path) -> None:
    # Hooks run in the opposite order of their registration; this package registers its own when it
    # is imported.
    script = """
import subprocess
code = '''
import atexit, sys
def late():
    try:
        manager.save(2, {"a": np.full(9, 7, np.uint8)})
    except sw.errors.ClosedError as error:
        print("too late:", error)
atexit.register(late)               # before the import: runs after ours
import numpy as np, stepwell as sw
manager = sw.CheckpointManager(sys.argv[1])
@atexit.register
def last():
    manager.save(1, {"a": np.full(64 << 20, 7, np.uint8)})
'''
done = subprocess.run([sys.executable, "-c", code, sys.argv[1]], capture_output=True, text=True, timeout=50)
print(done.returncode, done.stdout, done.stderr)
"""
    done = python(script, root)
    assert done.stdout.startswith("0 too late: this manager of"), done.stdout
    assert "Traceback" not in done.stdout
    assert whole(root, at_least=1) == 1


def test_finalizers_at_interpreter_exit_get_an_error(python: Run, root: Path) -> None:
    script = """
class Late:
    def __init__(self):
        self.manager = sw.CheckpointManager(sys.argv[1])
        self.checkpoint = None
    def __del__(self):
        try:
            self.manager.save(9, {"a": 1})
        except sw.errors.ClosedError:
            os.write(1, b"closed\\n")
        self.manager.close()
late = Late()
late.manager.save(1, {"a": np.full(64 << 20, 7, np.uint8)}).result()
late.checkpoint = late.manager.checkpoint()
"""
    done = python(script, root)
    assert (done.returncode, done.stdout, done.stderr) == (0, "closed\n", "")
    assert whole(root, at_least=1) == 1


# ---- other processes
# ---------------------------------------------------------------------------------------

LOADER = """
import multiprocessing, signal
def load(index):
    return np.full(1 << 16, 7, np.uint8) + 0 * index
def main():
    context = multiprocessing.get_context(sys.argv[2])
    policy = sw.every_steps(1) | sw.on_preemption()
    manager = sw.CheckpointManager(sys.argv[1], save_policy=policy, retention=sw.keep_latest(2))
    state = {"a": np.full(8 << 20, 7, np.uint8)}
    manager.save(manager.next_step(), state)
    with context.Pool(2) as pool:          # made while a save is in flight, as a loader's workers are at each epoch
        for step, batch in enumerate(pool.imap(load, range(12)), manager.next_step()):
            state["a"][: 1 << 16] = batch
            manager.save(step, state)
        again = context.Pool(1)             # and once more, beside it
        assert again.apply(load, (1,))[0] == 7
        again.close()
        again.join()
    manager.close()
    print("trained")
if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_workers_beside_a_manager_load_while_it_saves(python: Run, root: Path, method: str) -> None:
    done = python(LOADER, root, method)
    assert (done.returncode, done.stdout) == (0, "trained\n"), done.stderr
    assert "Traceback" not in done.stderr
    whole(root, at_least=12)


def test_a_worker_that_outlives_its_trainer_frees_the_root(root: Path) -> None:
    script = """
manager = sw.CheckpointManager(sys.argv[1])
manager.save(0, {"a": np.full(1 << 20, 7, np.uint8)}).result()
with manager.hold(0):
    checkpoint = manager.checkpoint()
    save = manager.save(1, {"a": np.full(256 << 20, 7, np.uint8)})
    pid = os.fork()
    if pid == 0:
        time.sleep(100)             # a worker that waits for work, with all that it has inherited
        os._exit(0)
    print(pid, flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
"""
    with started(root, script) as process:
        worker = int(line_of(process))
        try:
            assert process.wait(DEADLINE) == -signal.SIGKILL
            os.kill(worker, 0)  # it is still there
            begun = time.monotonic()
            with sw.CheckpointManager(root, retention=sw.keep_latest(1)) as manager:
                assert time.monotonic() - begun < 10
                assert manager.latest_step() in (0, 1)
                manager.save(2, {"a": np.full(9, 7, np.uint8)}).result()
                manager.wait_until_finished()
                assert manager.all_steps() == [2]
            assert not [name for name in os.listdir(root) if name.startswith((".tmp-", ".trash-"))]
        finally:
            os.kill(worker, signal.SIGKILL)


def test_a_reader_that_is_killed_holds_no_step(root: Path) -> None:
    script = """
with sw.open(sys.argv[1]) as checkpoint:
    print(checkpoint.step, flush=True)
    time.sleep(100)
"""
    with sw.CheckpointManager(root, retention=sw.keep_latest(1)) as manager:
        manager.save(0, {"a": np.full(1 << 20, 7, np.uint8)}).result()
        with started(root, script) as process:
            assert line_of(process) == "0"
            with pytest.raises(sw.LockedError):
                manager.delete(0)
            manager.save(1, {"a": np.full(9, 7, np.uint8)}).result()
            process.kill()
            process.wait(DEADLINE)
        manager.save(2, {"a": np.full(9, 7, np.uint8)}).result()
        manager.wait_until_finished()
    assert not [name for name in os.listdir(root) if name.startswith(".trash-")], "its files went with it"
    assert whole(root, at_least=2) == 2


def test_started_programs_inherit_nothing_of_the_root(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(0, {"a": np.full(1 << 20, 7, np.uint8)}).result()
        with manager.checkpoint():
            save = manager.save(1, {"a": np.full(32 << 20, 7, np.uint8)})
            listed = subprocess.run(
                [
                    sys.executable,
                    "-c",
                    "import os; print([os.readlink(f'/proc/self/fd/{n}') for n in range(3, 256) if os.path.exists(f'/proc/self/fd/{n}')])",
                ],
                capture_output=True,
                text=True,
                close_fds=False,
                check=True,
            ).stdout
            save.result()
    assert str(root) not in listed
