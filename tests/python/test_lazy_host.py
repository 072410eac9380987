"""States of the host that are captured behind the call (``snapshot="lazy"``): who changes them
waits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw

#: Far more than the staging memory: most of it is copied after ``save`` has returned.
SIZE = 192 << 20
STAGING = 8 << 20


def large(value: int) -> dict[str, Any]:
    return {"params": {f"w{n}": np.full(SIZE // 8, value, np.uint8) for n in range(8)}}


def fill(state: dict[str, Any], value: int) -> None:
    for array in state["params"].values():
        array.fill(value)


def values(state: dict[str, Any]) -> set[int]:
    return {int(value) for array in state["params"].values() for value in (array.min(), array.max())}


def manager_of(root: Path) -> sw.CheckpointManager:
    return sw.CheckpointManager(root, staging_bytes=STAGING)


def test_an_update_waits_for_what_is_captured_behind_the_call(root: Path) -> None:
    state = large(1)
    with manager_of(root) as manager:
        save = manager.save(0, state, snapshot="lazy")
        with manager.update_guard():
            assert save.captured()
            fill(state, 2)
        save.result()
        assert values(manager.restore(0)) == {1}


def test_an_update_waits_for_a_save_whose_call_was_interrupted(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Interrupted:
        """The engine has begun the save; what follows in Python is interrupted."""

        def __init__(self, *_: Any, **__: Any) -> None:
            raise KeyboardInterrupt

    state = large(1)
    with manager_of(root) as manager:
        with monkeypatch.context() as patch:
            patch.setattr("stepwell._manager.Save", Interrupted)
            with pytest.raises(KeyboardInterrupt):
                manager.save(0, state, snapshot="lazy")
        with manager.update_guard():
            fill(state, 2)
        manager.wait_until_finished()
        assert manager.all_steps() == [0]
        assert values(manager.restore(0)) == {1}


def test_a_restore_into_the_state_waits_for_its_capture(root: Path) -> None:
    state = large(1)
    with manager_of(root) as manager:
        manager.save(0, state).result()
        fill(state, 2)
        save = manager.save(1, state, snapshot="lazy")
        manager.restore(0, into=state)
        assert values(state) == {1}
        save.result()
        assert values(manager.restore(1)) == {2}
