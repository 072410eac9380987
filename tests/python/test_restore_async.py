"""Restores in the background."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from conftest import same


def state(value: float = 0.0) -> dict[str, Any]:
    return {"params": {"w": np.full(1 << 20, float(value))}, "updates": int(value)}


def test_a_background_restore_gives_what_a_restore_gives(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        for step in range(3):
            manager.save(step, state(step), metrics={"loss": float(step)})
        manager.wait_until_finished()
        mine = state()
        restoring = manager.restore_async(into=mine)
        back = restoring.result(timeout=60)
        assert restoring.exception() is None
        assert back["params"]["w"] is mine["params"]["w"]
        assert mine["params"]["w"][-1] == 2
        assert manager.restore_async(best=("loss", "min")).result()["updates"] == 0
        assert manager.restore_async(1, include="updates").result() == {"updates": 1}
        back, report = manager.restore_async(into=mine, return_report=True, fallback=True).result()
        assert report.ok
    restoring = sw.restore_async(root, 1)
    assert restoring.result()["updates"] == 1


def test_other_calls_wait_for_a_background_restore(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(4, state(4)).result()
        mine = state()
        restoring = manager.restore_async(into=mine)
        assert manager.next_step() == 5
        assert restoring.done()
        manager.restore_async(into=mine)
        mine["params"]["w"] += manager.save(5, mine).result() - 5
    assert sw.restore(root, 5)["params"]["w"][0] == 4


def test_an_error_of_a_background_restore_reaches_the_caller(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(0, state()).result()
        with pytest.raises(sw.StepNotFound):
            manager.restore_async(7).result()
        seen = manager.restore_async(like={"nothing": 1})
        assert isinstance(seen.exception(), sw.MismatchError)
        assert manager.latest_step() == 0, "a failure that was seen is not raised again"
        unseen = manager.restore_async(7)
        with pytest.raises(sw.StepNotFound):
            manager.latest_step()
        assert unseen.done()
        with pytest.raises(sw.MisuseError, match="broadcast="):
            manager.restore_async(broadcast=True)
        with pytest.raises(TypeError, match="inclde"):
            manager.restore_async(inclde="x")  # type: ignore[call-overload]


def test_callbacks_of_a_background_restore_run(root: Path) -> None:
    called: list[Any] = []
    sw.save(root, state())
    restoring = sw.restore_async(root)
    restoring.add_done_callback(called.append)
    restoring.result()
    end = time.monotonic() + 30
    while not called:
        assert time.monotonic() < end
        time.sleep(0.001)
    assert called == [restoring]
    assert not restoring.cancel()


def test_a_forked_child_does_not_wait_for_the_parents_restore(root: Path) -> None:
    sw.save(root, state())
    restoring = sw.restore_async(root)
    pid = os.fork()
    if pid == 0:
        try:
            restoring.result(5)
        except sw.errors.ForkedProcess:
            os._exit(0)
        except BaseException:
            os._exit(1)
        os._exit(2)
    assert os.waitpid(pid, 0)[1] == 0
    restoring.result()


@pytest.mark.parametrize("end", ["", "raise SystemExit(0)", "sw.restore_async(sys.argv[1])"])
def test_a_process_may_end_during_a_background_restore(root: Path, end: str) -> None:
    sw.save(root, {"w": np.zeros(1 << 24)})
    code = f"import sys, stepwell as sw\nsw.restore_async(sys.argv[1])\n{end}"
    ended = subprocess.run(
        [sys.executable, "-c", code, str(root)],
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_an_interrupt_ends_the_wait_and_not_the_restore(root: Path) -> None:
    import signal

    sw.save(root, {"w": np.zeros(1 << 25)})
    restoring = sw.restore_async(root)
    try:
        threading.Timer(0.001, signal.raise_signal, (signal.SIGINT,)).start()
        restoring.result()
        while True:
            time.sleep(0.001)
    except KeyboardInterrupt:
        pass
    assert restoring.result()["w"].shape == (1 << 25,)


def test_a_background_restore_is_awaited(root: Path) -> None:
    async def awaited(restoring: Any) -> Any:
        return await restoring

    with sw.CheckpointManager(root) as manager:
        manager.save(0, state()).result()
        assert same(asyncio.run(awaited(manager.restore_async(0))), state())
        restoring = manager.restore_async(0)
        assert not restoring.cancel()
        restoring.result()
        assert same(asyncio.run(awaited(restoring)), state())
        with pytest.raises(sw.StepNotFound):
            asyncio.run(awaited(manager.restore_async(7)))
        assert manager.latest_step() == 0, "a failure that was awaited is not raised again"
