"""Cells of a notebook: run twice, interrupted, failed, and the session ended. The same session in
an interpreter of Python's own, which is always there, and in a real kernel, where ``ipykernel`` and
``jupyter_client`` are installed."""

from __future__ import annotations

import code
import contextlib
import io
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw

#: Runs a cell and gives what it printed, traceback included. With ``interrupt_after`` seconds the
#: "stop" button is pressed.
Cell = Callable[..., str]
DEADLINE = 60.0


@contextlib.contextmanager
def plain_session() -> Iterator[Cell]:
    """``code.InteractiveInterpreter`` in this process: names live on from cell to cell, and errors
    end a cell and nothing else."""
    import signal

    interpreter = code.InteractiveInterpreter()
    sys.ps1 = ">>> "  # as at Python's prompt

    def run(source: str, interrupt_after: float | None = None) -> str:
        printed = io.StringIO()
        before = signal.signal(signal.SIGALRM, signal.default_int_handler)
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                if interrupt_after:
                    signal.setitimer(signal.ITIMER_REAL, interrupt_after)
                compiled = code.compile_command(source + "\n", symbol="exec")
                assert compiled is not None, source
                try:
                    interpreter.runcode(compiled)
                except KeyboardInterrupt:
                    printed.write("KeyboardInterrupt")
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        return printed.getvalue()

    try:
        yield run
    finally:
        del sys.ps1
        with contextlib.suppress(Exception):
            interpreter.locals["mgr"].close()  # type: ignore[union-attr, index]


@contextlib.contextmanager
def kernel_session() -> Iterator[Cell]:
    """A kernel, in a process of its own, as Jupyter starts it."""
    reason = "no real kernel without it; the plain session stands in"
    jupyter = pytest.importorskip("jupyter_client", reason=reason)
    pytest.importorskip("ipykernel", reason=reason)
    manager = jupyter.KernelManager(kernel_name="python3")
    manager.start_kernel()
    client = manager.client()
    client.start_channels()

    def run(source: str, interrupt_after: float | None = None) -> str:
        asked = client.execute(source)
        if interrupt_after:
            time.sleep(interrupt_after)
            manager.interrupt_kernel()
        printed: list[str] = []
        end = time.monotonic() + DEADLINE
        while time.monotonic() < end:
            message: dict[str, Any] = client.get_iopub_msg(timeout=DEADLINE)
            if message["parent_header"].get("msg_id") != asked:
                continue
            content = message["content"]
            if message["msg_type"] == "stream":
                printed.append(content["text"])
            elif message["msg_type"] == "error":
                printed.append(f"{content['ename']}: {content['evalue']}")
            elif message["msg_type"] == "status" and content["execution_state"] == "idle":
                return "".join(printed)
        raise AssertionError(f"the cell never ended: {source}")

    try:
        client.wait_for_ready(timeout=DEADLINE)
        yield run
    finally:
        client.stop_channels()
        manager.shutdown_kernel()  # in peace: exit hooks run
        manager.cleanup_resources()


SESSIONS = {"plain": plain_session, "kernel": kernel_session}


@pytest.fixture(params=SESSIONS)
def cell(request: pytest.FixtureRequest) -> Iterator[Cell]:
    with SESSIONS[request.param]() as run:
        yield run


def opening(root: Path) -> str:
    return f"import numpy as np, stepwell as sw\nmgr = sw.CheckpointManager({str(root)!r})"


def test_a_cell_that_opens_a_manager_may_be_rerun(cell: Cell, root: Path) -> None:
    assert cell(opening(root)) == ""
    assert cell("mgr.save(0, {'a': np.zeros(9)}).result()").strip() in ("", "0")
    # The first manager is closed. Its name is given away only after the second one is there.
    assert cell("first = mgr\nsave = mgr.save(1, {'a': np.zeros(9)})") == ""
    assert cell(opening(root)) == ""
    assert cell("print(save.done(), mgr.all_steps(), mgr.next_step())") == "True [0, 1] 2\n"
    assert "ClosedError" in cell("first.save(2, {'a': 1})")
    assert cell("mgr.save(2, {'a': np.zeros(9)}).result()").strip() in ("", "2")


def test_a_program_that_opens_a_root_twice_is_refused(root: Path) -> None:
    with sw.CheckpointManager(root), pytest.raises(sw.LockedError, match=r"this very process.*Close it"):
        sw.CheckpointManager(root)


def test_a_cell_with_the_whole_loop_may_be_run_again_and_again(cell: Cell, root: Path) -> None:
    loop = f"""
import numpy as np, stepwell as sw
with sw.CheckpointManager({str(root)!r}) as m:
    for step in range(m.next_step(), m.next_step() + 3):
        m.save(step, {{"a": np.full(9, step)}})
    m.wait_until_finished()
    print(m.all_steps()[-3:])
"""
    assert [cell(loop) for _ in range(3)] == ["[0, 1, 2]\n", "[3, 4, 5]\n", "[6, 7, 8]\n"]


@pytest.mark.parametrize("delay", [0.2, 0.45])
def test_an_interrupted_cell_leaves_a_working_manager(cell: Cell, root: Path, delay: float) -> None:
    assert cell(opening(root)) == ""
    loop = """
state = {"a": np.full(32 << 20, 7, np.uint8)}
while True:
    mgr.save(mgr.next_step(), state)
"""
    assert "KeyboardInterrupt" in cell(loop, interrupt_after=delay)
    # Some bytes of the state are changed by the next cell: nothing of what was saved before may
    # show that.
    assert cell("state['a'][:] = 8\nmgr.wait_until_finished()") == ""
    check = "print(all((mgr.restore(one)['a'] == 7).all() for one in mgr.all_steps()))"
    assert cell(check) == "True\n"
    assert cell("print(mgr.save(mgr.next_step(), state).result() == mgr.latest_step())") == "True\n"
    assert cell("mgr.close()") == ""


def test_a_cell_interrupted_in_its_block_frees_the_root(cell: Cell, root: Path) -> None:
    # An interrupted import leaves half a numpy, which cannot be imported again.
    assert cell("import numpy as np, stepwell as sw") == ""
    loop = f"""
with sw.CheckpointManager({str(root)!r}, retention=sw.keep_latest(2)) as m:
    while True:
        m.save(m.next_step(), {{"a": np.full(16 << 20, 7, np.uint8)}})
"""
    attempt = 0
    deadline = time.monotonic() + DEADLINE
    while attempt < 2 or not list(root.glob("step_*")):
        assert time.monotonic() < deadline, f"no step after {attempt} attempts"
        # A slow machine needs longer for one step.
        told = cell(loop, interrupt_after=0.4 + 0.2 * attempt)
        assert "KeyboardInterrupt" in told
        assert "LockedError" not in told
        attempt += 1
    # An interrupt may come while the block's end waits for what is in flight; asking again waits
    # on.
    assert "LockedError" not in cell(f"m.close()\n{opening(root)}\nmgr.close()")
    assert (sw.restore(root)["a"] == 7).all()


def test_a_failed_save_of_one_cell_is_told_in_the_next(cell: Cell, root: Path) -> None:
    assert cell(opening(root)) == ""
    assert cell(f"import shutil\nshutil.rmtree({str(root)!r})\nsave = mgr.save(1, {{'a': np.ones(4)}})") == ""
    assert "SaveFailed" in cell("mgr.wait_until_finished()")
    assert cell("mgr.close()") == ""


def test_ending_the_session_commits_what_the_last_cell_saved(root: Path) -> None:
    with kernel_session() as cell:
        assert cell(opening(root)) == ""
        assert cell("save = mgr.save(0, {'a': np.full(64 << 20, 7, np.uint8)})") == ""
    assert np.array_equal(np.unique(sw.restore(root)["a"]), [7])
