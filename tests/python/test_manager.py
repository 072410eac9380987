"""A root over time: saving, listing, existing steps, metadata, metrics, items, retention,
rewinding."""

from __future__ import annotations

import asyncio
import gc
import glob
import json
import math
import os
import re
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from conftest import same


def state(value: float) -> dict[str, Any]:
    return {"params": {"w": np.full((4, 4), float(value))}, "step": int(value)}


def test_a_saved_step_restores(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        assert manager.latest_step() is None
        assert manager.all_steps() == []
        assert manager.next_step() == 0
        with pytest.raises(sw.StepNotFound):
            manager.restore()
        for step in range(3):
            assert manager.save(step, state(step)).result() == step
        assert manager.all_steps() == [0, 1, 2]
        assert same(manager.restore(1), state(1))
        assert same(manager.restore(), state(2))
        assert manager.next_step() == 3
    with sw.CheckpointManager(root) as again:
        assert again.all_steps() == [0, 1, 2]
        again.restore(0)
        assert again.next_step() == 1


def test_resume_gives_the_state_and_the_next_step(root: Path) -> None:
    for first in (0, 3, 6):
        with sw.CheckpointManager(root) as manager:
            mine = state(-1)
            resumed, step = manager.resume(mine, missing="keep")
            assert step == first
            assert resumed["params"]["w"] is mine["params"]["w"]
            assert resumed["params"]["w"][0, 0] == first - 1
            for number in range(step, step + 3):
                manager.save(number, state(number))
    with sw.CheckpointManager(root) as manager:
        with pytest.raises(sw.MisuseError, match=r"into= goes with restore"):
            manager.resume(state(0), into=state(0))  # type: ignore[call-arg]
        with pytest.raises(TypeError, match="'mising'; did you mean 'missing'"):
            manager.resume(state(0), mising="keep")  # type: ignore[call-arg]


def test_a_run_whose_steps_are_all_deleted_begins_with_step_0(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        for step in range(2):
            manager.save(step, state(step)).result()
        for step in range(2):
            manager.delete(step)
        mine = state(-1)
        resumed, first = manager.resume(mine)
        assert first == 0
        assert resumed is mine
        manager.save(first, state(first)).result()
        assert manager.resume(state(-1))[1] == 1


def test_what_replaces_nothing_does_not_advise_to_replace(root: Path, tmp_path: Path) -> None:
    sw.save(tmp_path / "one", state(0))
    with sw.CheckpointManager(root) as manager, sw.open(tmp_path / "one") as one:
        manager.add(one)
        with pytest.raises(sw.StepExists, match=r"exists already\. .* delete\(\) this one first") as added:
            manager.add(one)
        with pytest.raises(sw.StepExists, match=r"exists already\. Pass another path") as copied:
            one.copy(tmp_path / "one")
    assert "exists=" not in f"{added.value} {copied.value}"


def test_advice_is_given_once(root: Path, tmp_path: Path) -> None:
    sw.save(tmp_path / "one", state(0))
    with pytest.raises(sw.StepExists) as path:
        sw.save(tmp_path / "one", state(0))
    assert str(path.value).endswith(
        'one exists already. Pass exists="replace" to write it again, or another path'
    )
    with sw.CheckpointManager(root) as manager:
        manager.save(1, state(1)).result()
        with pytest.raises(sw.StepExists) as step:
            manager.save(1, state(1))
        with manager.hold(1), pytest.raises(sw.LockedError) as held:
            manager.delete(1)
        with manager.checkpoint(1), pytest.raises(sw.LockedError) as leased:
            manager.delete(1)
    assert re.search(r"exists already in \S+\. Pass exists=\"replace\"", str(step.value))
    assert re.search(r"holds it, or is removing it already\. End its hold\(\) first$", str(held.value))
    assert re.search(r"open\)\. Close the open checkpoint, the hold\(\) or .* first$", str(leased.value))


def test_numbers_are_a_policy_and_a_retention(root: Path) -> None:
    with sw.CheckpointManager(root, save_policy=10, retention=3) as manager:
        for step in range(51):
            manager.save(step, state(step))
        manager.wait_until_finished()
        assert manager.all_steps() == [30, 40, 50]


@pytest.mark.parametrize("name", ["stall_timeout", "silence", "grace"])
@pytest.mark.parametrize("value", ["10", b"10", True, [1]])
def test_seconds_of_options_are_numbers(name: str, value: Any) -> None:
    with pytest.raises(sw.MisuseError, match="number of seconds"):
        sw.Options(**{name: value})


@pytest.mark.parametrize("prefix", ["a/b", ".step", "a\n", "x" * 101])
def test_a_prefix_that_is_no_part_of_a_name_is_refused(prefix: str) -> None:
    with pytest.raises(sw.MisuseError, match="the prefix of a StepName"):
        sw.StepName(prefix)


@pytest.mark.parametrize("rule", [sw.keep_latest(0), sw.keep_best(0, "loss", mode="min")])
def test_a_retention_that_keeps_nothing_is_refused(root: Path, rule: sw.Retention) -> None:
    with pytest.raises(sw.MisuseError, match="keeps nothing"):
        sw.CheckpointManager(root, retention=rule)
    sw.CheckpointManager(root, retention=rule | sw.keep_every(2)).close()


def test_a_metric_that_no_step_has_is_warned_of_once(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    retention = sw.keep_latest(1) | sw.keep_best(1, "los", mode="min")
    with sw.CheckpointManager(root, retention=retention) as manager:
        for step in range(4):
            manager.save(step, state(step), metrics={"loss": 1.0})
        manager.wait_until_finished()
    told = [one.getMessage() for one in caplog.records if "`los`" in one.getMessage()]
    assert len(told) == 1
    assert "the steps have `loss`" in told[0]


@pytest.mark.parametrize("items", ["params", ["params/**"], "par*"])
def test_items_are_selected_as_leaves_of_a_restore(root: Path, items: Any) -> None:
    retention = sw.keep_latest(1) | sw.keep_every(1, items)
    with sw.CheckpointManager(root, retention=retention) as manager:
        for step in range(2):
            manager.save(step, {**state(step), "optimizer": {"m": np.zeros(3)}})
        manager.wait_until_finished()
        assert manager.metadata(0).items == ("params",)


def test_an_unknown_step_is_a_file_that_is_not_found(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(0, state(0)).result()
        for call in (manager.restore, manager.delete, manager.metadata, manager.metrics, manager.checkpoint):
            with pytest.raises(FileNotFoundError) as caught:
                call(7)
            assert isinstance(caught.value, sw.StepNotFound)
            assert caught.value.kind == "step_not_found"


def test_a_missing_root_is_made_or_refused(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="nothing"):
        sw.CheckpointManager(tmp_path / "nothing", options=sw.Options(create=False))
    assert not (tmp_path / "nothing").exists()
    with pytest.raises(OSError, match="nothing"):
        sw.CheckpointManager(tmp_path / "nothing", read_only=True)
    assert not (tmp_path / "nothing").exists()


def test_a_root_may_be_given_in_any_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for root in ("run", "run/", Path("run"), str(tmp_path / "run"), "./x/../run"):
        with sw.CheckpointManager(root) as manager:
            manager.save(0, state(0), exists="skip")
            assert manager.root == str(tmp_path / "run")


def test_leaving_the_block_commits(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(3, state(3))
    assert sw.metadata(root).step == 3
    manager.close()
    for call in (lambda: manager.save(4, {}), manager.all_steps, manager.restore, manager.__enter__):
        with pytest.raises(sw.errors.ClosedError, match="closed"):
            call()


def test_the_exception_of_the_block_goes_on(root: Path) -> None:
    def fail() -> None:
        with sw.CheckpointManager(root) as manager:
            manager.save(0, state(0))
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert sw.metadata(root).step == 0


def test_the_policy_decides(root: Path) -> None:
    asked = []

    def expensive() -> dict[str, Any]:
        asked.append(1)
        return state(0)

    with sw.CheckpointManager(root, save_policy=sw.every_steps(2)) as manager:
        for step in range(6):
            save = manager.save(step, expensive)
            assert bool(save) == (step % 2 == 0)
            assert save.result() == (step if step % 2 == 0 else None)
            if not save:
                assert save.done()
                assert save.captured()
                assert "policy" in str(save.reason)
                assert save.stats is None
        assert manager.all_steps() == [0, 2, 4]
        assert len(asked) == 3
        assert not manager.should_save(7)
        assert manager.save(7, expensive, force=True).result() == 7


def test_policies_compose(root: Path) -> None:
    policy = (sw.every_steps(3, initial=False) | sw.at_steps([4, 5, 10])) & sw.when(
        lambda step, latest: step != 9
    )
    with sw.CheckpointManager(root, save_policy=policy) as manager:
        for step in range(3, 11):
            manager.save(step, state(step))
            manager.wait_until_finished()
        assert manager.all_steps() == [3, 4, 5, 6, 10]


def test_a_signal_after_a_decision_counts_for_the_next_step(root: Path) -> None:
    policy = sw.every_steps(100, initial=False) | sw.on_preemption([signal.SIGUSR1])
    before = signal.signal(signal.SIGUSR1, lambda *_: None)
    try:
        with sw.CheckpointManager(root, save_policy=policy) as manager:
            assert not manager.save(1, state(1))
            os.kill(os.getpid(), signal.SIGUSR1)
            assert not manager.reached_preemption(1), "step 1 was not saved: whoever ended here would lose it"
            assert manager.save(2, state(2)).result() == 2
            assert manager.reached_preemption(2)
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_a_step_that_is_held_is_not_rewound(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step)).result()
        with manager.hold(2):
            with pytest.raises(sw.LockedError, match="hold"):
                manager.rewind(1)
            assert manager.all_steps() == [1, 2, 3]
            manager.rewind(2)
        manager.rewind(1)
        assert manager.all_steps() == [1]


def test_a_hold_lasts_from_the_call_to_its_close(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        for step in (1, 2, 3):
            manager.save(step, state(step)).result()
        with pytest.raises(sw.StepNotFound):
            manager.hold(7)
        held = manager.hold(3)
        assert held.step == 3
        with pytest.raises(sw.LockedError):
            manager.delete(3)
        held.close()
        held.close()
        manager.delete(3)
        with pytest.raises(sw.errors.ClosedError, match="hold"), held:
            pass
        assert manager.all_steps() == [1, 2]


def test_a_forgotten_hold_lasts_until_the_close(root: Path) -> None:
    manager = sw.CheckpointManager(root)
    for step in (1, 2):
        manager.save(step, state(step)).result()
    manager.hold(1)
    gc.collect()
    with pytest.raises(sw.LockedError):
        manager.delete(1)
    manager.close()
    with sw.CheckpointManager(root) as other:
        other.delete(1)
        assert other.all_steps() == [2]


def test_a_hold_is_let_go_when_its_block_raises(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(1, state(1)).result()
        manager.save(2, state(2)).result()
        held = manager.hold(1)
        assert repr(held) == "<Hold of step 1>"
        with pytest.raises(ZeroDivisionError), held:
            raise ZeroDivisionError
        manager.delete(1)


def test_a_signal_announces_a_preemption(root: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, _: heard.append(number))
    try:
        policy = sw.every_steps(100, initial=False) | sw.on_preemption([signal.SIGUSR1])
        with sw.CheckpointManager(root, save_policy=policy) as manager:
            assert not manager.save(1, state(1))
            assert not manager.reached_preemption(1)
            os.kill(os.getpid(), signal.SIGUSR1)
            assert manager.save(2, state(2)).result() == 2
            assert manager.reached_preemption(2)
        assert heard == [signal.SIGUSR1]
        os.kill(os.getpid(), signal.SIGUSR1)
        assert heard == [signal.SIGUSR1] * 2
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_an_existing_step_stays_as_it_is(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(5, state(5)).result()
        with pytest.raises(FileExistsError) as caught:
            manager.save(5, state(6))
        assert isinstance(caught.value, sw.StepExists)
        assert same(manager.restore(5), state(5))
        skipped = manager.save(5, state(6), exists="skip")
        assert not skipped
        assert "exists" in str(skipped.reason)
        assert sorted(p.name for p in root.iterdir()) == [".stepwell", "step_00000005"]
        manager.save(6, state(6)).result()


def test_skipping_a_pending_step_gives_its_save(root: Path) -> None:
    large = {"a": np.zeros(1 << 25, np.uint8)}
    with sw.CheckpointManager(root) as manager:
        for step in range(20):
            first = manager.save(step, large)
            last = manager.save(step, {"a": "another state"}, exists="skip")
            if last:
                break
            assert last.reason == "the step exists already"  # the disk was faster
        else:
            pytest.fail("no save was still pending when it was asked for again")
        assert manager.pending() in ([first], [])
        assert last.result() == step
        assert first.done()
        with sw.open(root) as checkpoint:  # by now everybody sees it
            assert checkpoint.step == step
            assert checkpoint.metadata().nbytes == 1 << 25


def test_replacing_swaps_the_new_one_in(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(5, state(5)).result()
        manager.save(5, state(6), exists="replace").result()
        assert same(manager.restore(5), state(6))
        assert manager.all_steps() == [5]


def test_a_step_below_the_latest_is_refused_force_or_not(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(5, state(5)).result()
        for force in (False, True):
            with pytest.raises(sw.errors.StepOrder):
                manager.save(4, state(4), force=force)
        assert manager.all_steps() == [5]


def test_rewinding_moves_newer_steps_aside(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        for step in range(4):
            manager.save(step, state(step))
        manager.wait_until_finished()
        assert sorted(manager.rewind(1, branch="old")) == [2, 3]
        assert manager.all_steps() == [0, 1]
        assert manager.next_step() == 2
        manager.save(2, state(20)).result()
        assert same(manager.restore(2), state(20))


def test_a_rewind_names_the_steps_that_it_moved(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        for step in range(3):
            manager.save(step, state(step)).result()
        moved = manager.rewind(1)
        assert moved == [2]
        assert (root / f".branch-{moved.branch}.step_00000002" / "manifest.json").is_file()
        assert manager.rewind(0, branch="old").branch == "old"
        nothing = manager.rewind(0)
        assert nothing == []
        assert nothing.branch is None


def test_the_state_may_change_as_soon_as_save_returns(root: Path) -> None:
    array = np.zeros(1 << 20)
    with sw.CheckpointManager(root) as manager:
        save = manager.save(0, {"a": array})
        assert save.captured()
        assert save.wait_captured(0)
        array += 1
        save.result()
        assert not manager.restore(0)["a"].any()


def test_futures_behave_like_futures(root: Path) -> None:
    called = threading.Event()
    threads: list[str] = []
    with sw.CheckpointManager(root) as manager:
        save = manager.save(0, {"a": np.zeros(1 << 20)})
        save.add_done_callback(lambda one: (threads.append(threading.current_thread().name), called.set()))
        assert save.result(30) == 0
        assert called.wait(5)
        assert save.done()
        assert save.exception() is None
        assert save.stats is not None
        assert save.stats.nbytes >= 8 << 20
        at_once: list[sw.Save] = []
        save.add_done_callback(at_once.append)
        assert at_once == [save]


def test_a_save_can_be_awaited(root: Path) -> None:
    async def main(manager: sw.CheckpointManager) -> list[int | None]:
        saves = [manager.save(step, {"a": np.zeros(1 << 18)}) for step in range(3)]
        return [await save for save in saves]

    with sw.CheckpointManager(root) as manager:
        assert asyncio.run(main(manager)) == [0, 1, 2]


def test_saves_commit_in_order_and_pending_ones_are_not_listed(root: Path) -> None:
    with sw.CheckpointManager(root, max_pending=3) as manager:
        saves = [manager.save(step, {"a": np.zeros(1 << 19)}) for step in range(4)]
        assert {save.step for save in manager.pending()} <= {0, 1, 2, 3}
        manager.wait_until_finished()
        assert all(save.done() for save in saves)
        assert manager.pending() == []
        assert manager.all_steps() == [0, 1, 2, 3]


def test_a_restore_of_a_pending_step_says_to_wait(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(0, {"a": np.zeros(1 << 23)})
        for step in (None, 0):
            with pytest.raises(sw.StepNotFound, match=r"still being saved: 0: wait_until_finished\(\) first"):
                manager.restore(step)
        with pytest.raises(sw.StepNotFound, match="still being saved: 0"):
            manager.metadata(0)
        manager.wait_until_finished()
        assert not manager.restore()["a"].any()
        with pytest.raises(sw.StepNotFound) as caught:
            manager.restore(1)
        assert "still being saved" not in str(caught.value)


def fail_in_the_background(manager: sw.CheckpointManager) -> sw.Save:
    """A save that cannot be written: its root is gone. Nobody has seen its failure yet."""
    shutil.rmtree(manager.root)
    failing = manager.save(1, state(1))
    while not failing.done():
        time.sleep(0.005)
    return failing


def test_a_failed_save_is_reported_to_all_who_ask(root: Path) -> None:
    manager = sw.CheckpointManager(root)
    failed = fail_in_the_background(manager)
    for _ in range(2):
        with pytest.raises(sw.SaveFailed) as caught:
            failed.result()
        assert isinstance(caught.value, OSError)
        assert caught.value.errno == 2
        assert "step 1" in str(caught.value)
    assert isinstance(failed.exception(), sw.SaveFailed)
    manager.check_for_errors()
    manager.close()


def test_an_unseen_failure_raises_once_and_starts_nothing(root: Path) -> None:
    manager = sw.CheckpointManager(root)
    fail_in_the_background(manager)
    with pytest.raises(sw.SaveFailed, match="step 1"):
        manager.save(7, state(7))
    manager.check_for_errors()
    assert manager.pending() == []
    manager.close()


def test_failures_may_be_warnings(root: Path) -> None:
    manager = sw.CheckpointManager(root, on_save_error="warn")
    fail_in_the_background(manager)
    manager.check_for_errors()
    manager.close()


def test_metrics_survive_and_choose_the_best(root: Path) -> None:
    with sw.CheckpointManager(root, retention=sw.keep_best(2, "loss", mode="min")) as manager:
        for step, loss in enumerate([3.0, 1.0, math.nan, np.float32(2.0), np.array(5)]):
            manager.save(step, state(step), metrics={"loss": loss, "n": step})
            manager.wait_until_finished()
        assert manager.best_step() == 1
        assert manager.best_step("n", "max") == 4
        assert manager.all_steps() == [1, 3, 4]
        assert manager.metrics(3) == {"loss": 2.0, "n": 3.0}
        manager.add_metrics(4, {"loss": 0.5, "accuracy": -math.inf})
        assert manager.best_step() == 4
    sw.add_metrics(root, 1, {"late": 1.5})
    with sw.CheckpointManager(root, read_only=True) as reader:
        assert reader.metrics(1)["late"] == 1.5
        assert reader.metadata(1).metrics["late"] == 1.5
        assert reader.metrics(4)["accuracy"] == -math.inf


def test_retention_keeps_and_explains(root: Path) -> None:
    keep = sw.keep_latest(2) | sw.keep_every(steps=4)
    with sw.CheckpointManager(root, retention=keep) as manager:
        for step in range(0, 12, 2):
            manager.save(step, state(step)).result()
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 4, 8, 10]
        plan = manager.plan_retention()
        assert [one.step for one in plan] == [0, 4, 8, 10]
        assert all(one.decision == "keep" and one.reasons for one in plan)


def test_large_retired_files_wait_for_the_next_save(root: Path) -> None:
    def large(step: int) -> dict[str, Any]:
        return {"w": np.full(9 << 20, step, np.uint8)}

    def kept(overwrite: int | None) -> bool:
        """True if large files of a retired step wait for the next save."""
        path = root / str(overwrite)
        options = sw.Options(overwrite_from_bytes=overwrite)
        with sw.CheckpointManager(path, retention=sw.keep_latest(1), options=options) as manager:
            for step in range(5):
                manager.save(step, large(step)).result()
                assert same(manager.restore(step), large(step))
            deadline = time.monotonic() + (0.5 if overwrite == 8 << 20 else 5)
            # Not by `Path.glob`, which fails where a directory is deleted under it.
            while (
                waits := bool(glob.glob(f"{path}/.trash-*/.spare-*", include_hidden=True))
            ) and time.monotonic() < deadline:
                time.sleep(0.1)
        assert [one.name for one in path.iterdir() if one.name != ".stepwell"] == ["step_00000004"]
        return waits

    assert kept(8 << 20)
    assert not kept(16 << 20)
    assert not kept(None)
    for wrong in (0, -1, 1.5, "8"):
        with pytest.raises(sw.errors.MisuseError, match="overwrite_from_bytes"):
            sw.Options(overwrite_from_bytes=wrong)  # type: ignore[arg-type]


def test_old_steps_may_be_thinned(root: Path) -> None:
    keep = sw.keep_latest(1) | sw.keep_every(steps=1, items=["params"])
    with sw.CheckpointManager(root, retention=keep) as manager:
        for step in range(2):
            manager.save(step, {"params": {"w": np.full(3, step)}, "optimizer": {"m": np.zeros(3)}}).result()
        manager.wait_until_finished()
        assert manager.metadata(0).items == ("params",)
        assert same(manager.restore(0), {"params": {"w": np.zeros(3, int)}})
        assert set(manager.restore(1)) == {"params", "optimizer"}


def test_a_held_step_outlives_retention(root: Path) -> None:
    with sw.CheckpointManager(root, retention=sw.keep_latest(1)) as manager:
        manager.save(0, state(0)).result()
        with manager.hold(0):
            manager.save(1, state(1)).result()
            manager.wait_until_finished()
            assert manager.all_steps() == [0, 1]
        manager.save(2, state(2)).result()
        manager.wait_until_finished()
        assert manager.all_steps() == [2]


def test_metadata_reads_no_array(root: Path) -> None:
    with sw.CheckpointManager(root, options=sw.Options(root_metadata={"run": "x"})) as manager:
        manager.save(3, state(3), custom_metadata={"git": ["abc", 1, None]}).result()
        found = manager.metadata(3)
        assert found.tree == {"params": {"w": sw.ArraySpec((4, 4), "float64")}, "step": sw.ObjectSpec()}
        assert found.items == ("params", ".")
        assert found.custom_metadata == {"git": ["abc", 1, None]}
        assert found.started <= found.committed
        assert found.nbytes == 128
        assert found.step == 3
        assert json.dumps(found.manifest)
    with sw.CheckpointManager(root, options=sw.Options(root_metadata={"run": "y"})) as manager:
        assert manager.root_metadata == {"run": "x"}


def test_a_metadata_tree_is_a_like(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(0, state(7)).result()
        assert same(manager.restore(like=manager.metadata(0).tree), state(7))


def test_items_restore_alone(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(0, {"params": {"w": np.ones(3)}, "data": {"position": 5}, "config": "x"}).result()
        (data,) = (
            p
            for p in (root / "step_00000000").glob("i*/00000.data")
            if p.stat().st_size and p.parent.name == "i1"
        )
        assert manager.restore(0, like={"data": {"position": 0}}) == {"data": {"position": 5}}
        data.chmod(0o644)
        data.write_bytes(b"\0" * data.stat().st_size)
        assert same(manager.restore(0, like={"params": sw.AS_STORED}), {"params": {"w": np.ones(3)}})
        with pytest.raises(sw.CorruptCheckpoint):
            manager.restore(0, like={"data": sw.AS_STORED})


def test_a_reader_changes_nothing(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(0, state(0)).result()
        before = sorted((p.relative_to(root), p.stat().st_mtime_ns) for p in root.rglob("*"))
        with sw.CheckpointManager(root, read_only=True) as reader:
            assert not reader.save(1, state(1))
            assert same(reader.restore(), state(0))
            with pytest.raises(sw.errors.ReadOnlyError):
                reader.delete(0)
        assert sorted((p.relative_to(root), p.stat().st_mtime_ns) for p in root.rglob("*")) == before


def test_a_second_writer_is_refused(root: Path) -> None:
    with sw.CheckpointManager(root), pytest.raises(sw.LockedError):
        sw.CheckpointManager(root)
    sw.CheckpointManager(root).close()


def test_what_others_removed_is_gone_after_a_reload(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        for step in range(2):
            manager.save(step, state(step)).result()
        shutil.rmtree(root / "step_00000001")
        manager.reload()
        assert manager.all_steps() == [0]


def test_a_directory_that_is_no_step_is_quarantined_not_chosen(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(0, state(0)).result()
        (root / "step_00000007").mkdir()
        (root / "unrelated").mkdir()
        assert manager.latest_step() == 0
        assert list(manager.quarantined()) == ["step_00000007"]


def test_steps_may_be_named_otherwise(root: Path) -> None:
    with sw.CheckpointManager(root, step_name=sw.StepName("ckpt-", 0)) as manager:
        manager.save(7, state(7)).result()
    assert (root / "ckpt-7").is_dir()
    assert sw.open(root).step == 7


def test_a_pattern_that_misses_existing_steps_is_refused(root: Path) -> None:
    with sw.CheckpointManager(root, step_name=sw.StepName("ckpt-", 0)) as manager:
        manager.save(7, state(7)).result()
    said = r'also_read=\(StepName\("ckpt-", 0\),\)'
    with pytest.raises(sw.MisuseError, match=said):
        sw.CheckpointManager(root, step_name=sw.StepName("step_", 8))
    both = sw.StepName("step_", 8, also_read=(sw.StepName("ckpt-", 0),))
    with sw.CheckpointManager(root, step_name=both) as manager:
        assert manager.latest_step() == 7


def test_several_processes_without_a_coordinator_are_an_error(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "4")
    with pytest.raises(sw.MisuseError, match="coordinator=None"):
        sw.CheckpointManager(root)
    sw.CheckpointManager(root, coordinator=None).close()


def test_memory_is_prepared_for_a_state_that_is_not_there_yet(root: Path) -> None:
    specs = {
        "params": {"w": sw.ArraySpec((300, 2), "bfloat16"), "b": np.zeros(3, np.float32)},
        "step": int,
        "rng": np.random.default_rng(0),
        "list": [1, (sw.ArraySpec((), np.float64), "x")],
        "huge": sw.ArraySpec((1 << 30, 0), np.uint8),
    }
    with sw.CheckpointManager(root) as manager:
        assert manager.prepare(specs) == 300 * 2 * 2 + 3 * 4 + 8
        assert manager.prepare(sw.ArraySpec((1 << 26,), np.uint8)) == 1 << 26
        for unknown in (sw.ArraySpec(None, np.float32), sw.ArraySpec((3,)), np.ndarray):
            with pytest.raises(sw.MisuseError, match="`params/w`"):
                manager.prepare({"params": {"w": unknown}})
        with pytest.raises(sw.UnsupportedLeaf, match="`a`"):
            manager.prepare({"a": sw.AS_STORED})


def test_a_root_is_taken_over_after_the_chosen_silence(root: Path) -> None:
    sw.CheckpointManager(root).close()
    # The sign of life of a writer that was killed on a machine whose locks do not reach here.
    beat = {"count": 3, "every_ms": 10, "owner": "another host"}
    (root / ".stepwell" / f"beat-{'0' * 32}").write_text(json.dumps(beat))
    begun = time.monotonic()
    sw.CheckpointManager(root, options=sw.Options(silence=0.5, grace=math.inf)).close()
    assert 0.5 <= time.monotonic() - begun < 30  # a minute, where nothing is said


def test_staging_memory_may_be_small(root: Path) -> None:
    array = np.arange(12 << 20, dtype=np.uint8)
    with sw.CheckpointManager(root, staging_bytes=16 << 20) as manager:
        manager.prepare({"a": array})
        manager.save(0, {"a": array}).result()
        assert np.array_equal(manager.restore()["a"], array)


@pytest.mark.parametrize("step", [5, 6])
def test_a_relinked_manifest_stays_the_same_step(tmp_path: Path, step: int) -> None:
    root = tmp_path / "run"
    with sw.CheckpointManager(root, retention=sw.keep_latest(2)) as manager:
        for number in range(7):
            manager.save(number, {"w": np.full(9, number)}).result(60)
        assert manager.all_steps() == [5, 6]
        reader = sw.CheckpointManager(root, read_only=True)
        assert reader.all_steps() == [5, 6]
        manifest = root / f"step_{step:08}" / "manifest.json"
        os.link(manifest, tmp_path / "backup")
        os.chmod(manifest, 0o640)
        assert manager.all_steps() == reader.all_steps() == [5, 6]
        np.testing.assert_array_equal(reader.restore(step)["w"], np.full(9, step))
        for number in range(7, 10):
            manager.save(number, {"w": np.full(9, number)}).result(60)
            assert manager.all_steps() == [number - 1, number]
        manager.delete(8)
        assert reader.all_steps() == manager.all_steps() == [9]
    reader.close()


def test_a_reader_cannot_hold_a_step_and_hears_what_can(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(0, {"w": np.zeros(3)}).result()
        with sw.CheckpointManager(root, read_only=True) as reader:
            with pytest.raises(sw.errors.StepwellError, match="read_only=True") as refused:
                reader.hold(0)
            assert "an open checkpoint keeps its files" in str(refused.value)


def test_inspect_reports_every_step_directory(root: Path) -> None:
    with sw.CheckpointManager(root, retention=sw.keep_latest(2)) as manager:
        manager.save(
            0, {"a": np.zeros(3), "n": 1}, metrics={"loss": 1.0}, custom_metadata={"git": "x"}
        ).result()
        manager.add_metrics(0, {"score": 2.0})
        (root / "step_00000007").mkdir()
        manager.reload()
        whole, other = manager.inspect()
    assert (whole.step, whole.name, whole.damage) == (0, "step_00000000", None)
    assert whole.metrics == {"loss": 1.0, "score": 2.0}
    assert whole.metadata_keys == ("git",)
    assert whole.started <= whole.committed
    assert whole.nbytes == sum(item.nbytes for item in whole.items)
    assert (other.step, other.name) == (None, "step_00000007")
    assert other.damage is not None


def test_retention_is_applied_when_it_is_asked_for(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        for step in range(3):
            manager.save(step, {"a": np.zeros(3)})
    with sw.CheckpointManager(root, retention=sw.keep_latest(1)) as manager:
        assert manager.apply_retention() == [0, 1]
        assert manager.all_steps() == [2]


def test_a_step_that_is_being_scored_keeps_its_score(root: Path) -> None:
    state = {"w": np.zeros(3)}
    with sw.CheckpointManager(root, retention=sw.keep_latest(1) | sw.keep_best(1, "score", "max")) as manager:
        manager.save(1, state).result()
        steps = sw.watch(root, timeout=0.1)
        for newest, score in [(3, 5.0), (5, 1.0)]:
            checkpoint = next(steps)
            manager.save(newest - 1, state).result()
            manager.save(newest, state).result()
            manager.apply_retention()
            assert checkpoint.step in manager.all_steps()
            sw.add_metrics(root, checkpoint.step, {"score": score})
        steps.close()  # type: ignore[attr-defined]
        manager.save(6, state).result()
        assert manager.all_steps() == [1, 6]
        assert manager.metrics(1) == {"score": 5.0}


def test_a_lease_keeps_a_step_listed_for_the_grace_period(root: Path) -> None:
    options = sw.Options(grace=0.0)
    with sw.CheckpointManager(root, retention=sw.keep_latest(1), options=options) as manager:
        manager.save(1, {"w": np.zeros(3)}).result()
        with sw.open(root) as checkpoint:
            manager.save(2, {"w": np.zeros(3)}).result()
            manager.apply_retention()
            assert manager.all_steps() == [2]
            assert not checkpoint["w"].load().any()
