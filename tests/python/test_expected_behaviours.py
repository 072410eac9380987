"""Behaviour that users of other checkpoint managers expect, as far as no other test shows it.

The whole list, with the test for each, is ``docs/behaviours.md``; the last test here holds the two
together.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from accidents import files_no_longer_than, half_written, names, training
from conftest import same

PROJECT = Path(__file__).resolve().parents[2]
LIST = PROJECT / "docs" / "behaviours.md"

Run = Callable[..., "subprocess.CompletedProcess[str]"]


def state(value: float) -> dict[str, Any]:
    return {"params": {"w": np.full((4, 4), float(value))}, "step": int(value)}


#: Takes longer to write than it takes to ask for it.
LARGE = {"a": np.zeros(64 << 20, np.uint8)}


def pending_save(manager: sw.CheckpointManager) -> sw.Save:
    """A save that is not over yet."""
    for _ in range(20):
        save = manager.save(manager.next_step(), LARGE)
        if not save.done():
            return save
    pytest.skip("every save was over at once: this disk is too fast")


def failing_save(manager: sw.CheckpointManager) -> sw.Save:
    """A save of an existing manager that cannot be written: its root is gone."""
    shutil.rmtree(manager.root)
    return manager.save(manager.next_step(), state(1))


# ---- the basic cycle
# ---------------------------------------------------------------------------------------


def test_an_empty_root_has_no_latest_and_no_best_step(root: Path) -> None:
    with sw.CheckpointManager(root, retention=sw.keep_best(2, "loss", mode="min")) as manager:
        assert manager.latest_step() is None
        assert manager.best_step() is None
        assert manager.best_step("accuracy", "max") is None
        assert manager.all_steps() == []
        assert manager.plan_retention() == []


def test_a_step_of_another_root_is_restored_beside_ones_own(root: Path, tmp_path: Path) -> None:
    with sw.CheckpointManager(tmp_path / "pretrained") as other:
        for step in range(2):
            other.save(step, state(10 + step))
    with sw.CheckpointManager(root) as manager:
        start = sw.restore(tmp_path / "pretrained", step=0, into=state(0))
        assert same(start, state(10))
        assert manager.next_step() == 0, "the numbers are those of this run"
        manager.save(0, start).result()
        assert same(manager.restore(), state(10))


# ---- which calls save
# ---------------------------------------------------------------------------------------


def saved(root: Path, policy: sw.SavePolicy, steps: range) -> list[int]:
    with sw.CheckpointManager(root, save_policy=policy) as manager:
        for step in steps:
            manager.save(step, state(step))
            manager.wait_until_finished()
        return manager.all_steps()


def test_the_first_step_is_saved_on_request(tmp_path: Path) -> None:
    assert saved(tmp_path / "a", sw.every_steps(2), range(1, 5)) == [1, 2, 4]
    assert saved(tmp_path / "b", sw.every_steps(2, initial=False), range(1, 5)) == [2, 4]
    assert saved(tmp_path / "c", sw.at_steps([1, 3, 5]), range(6)) == [1, 3, 5], "these and no others"


def test_a_custom_policy_is_asked_with_the_latest_step(root: Path) -> None:
    asked: list[tuple[int, int | None]] = []

    def own(step: int, latest: int | None) -> bool:
        asked.append((step, latest))
        return latest is None or step >= latest + 2

    assert saved(root, sw.when(own), range(4)) == [0, 2]
    assert asked == [(0, None), (1, 0), (2, 0), (3, 2)]


def test_a_continuous_policy_saves_whenever_no_save_is_running(root: Path) -> None:
    with sw.CheckpointManager(root, save_policy=sw.every_steps(1) & sw.when_idle()) as manager:
        running = pending_save(manager)
        for step in range(running.step + 1, running.step + 4):
            skipped = manager.save(step, LARGE)
            if running.done():
                pytest.skip("the save was over while it was asked about: this disk is too fast")
            assert not skipped
            assert "policy" in str(skipped.reason)
        manager.wait_until_finished()
        assert manager.save(running.step + 4, state(1)), "the next one that comes while nothing runs"
    # And where each is waited for, every one is saved.
    assert saved(root.with_name("waiting"), sw.every_steps(1) & sw.when_idle(), range(4)) == [0, 1, 2, 3]


def test_so_many_seconds_pass_between_two_saves(root: Path) -> None:
    times = []
    with sw.CheckpointManager(root, save_policy=sw.every_seconds(0.3)) as manager:
        begun = time.monotonic()
        step = 0
        while len(times) < 4:
            now = time.monotonic()
            assert now - begun < 60
            if manager.save(step, state(step)):
                times.append((now, time.monotonic()))
            step += 1
            time.sleep(0.01)
    # Each save began at some moment of its call.
    assert all(ended - begun > 0.28 for (begun, _), (_, ended) in itertools.pairwise(times)), times


def test_a_failed_save_does_not_block_the_next_step(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        with files_no_longer_than(1 << 20), pytest.raises(sw.SaveFailed):
            manager.save(1, LARGE).result()
        assert manager.should_save(1)
        assert manager.should_save(2)
        assert manager.save(2, state(2)).result() == 2
        assert manager.all_steps() == [2]


# ---- which steps stay
# ---------------------------------------------------------------------------------------

ACCURACY = [1.0, 9.0, 3.0, 2.0, 4.0, 8.0, 0.0]
KEPT: list[tuple[str, sw.Retention, int, list[float], list[int]]] = [
    ("the newest two of six", sw.keep_latest(2), 6, [], [4, 5]),
    ("none, and every third", sw.keep_latest(0) | sw.keep_every(steps=3), 7, [], [0, 3, 6]),
    (
        "what any of several rules keeps",
        sw.keep_steps([1, 3]) | sw.keep_every(steps=4) | sw.keep_latest(1),
        12,
        [],
        [0, 1, 3, 4, 8, 11],
    ),
    ("the best two, and the newest", sw.keep_best(2, "accuracy", "max"), 7, ACCURACY, [1, 5, 6]),
    ("the worst two, and they are the newest", sw.keep_best(2, "accuracy", "min"), 7, ACCURACY, [0, 6]),
    ("the later of equals", sw.keep_best(1, "accuracy", "max"), 4, [5.0, 5.0, 5.0, 1.0], [2, 3]),
    ("the best of a metric that nobody gives", sw.keep_best(2, "accuracy", "max"), 5, [], [3, 4]),
    ("all that is younger than a day", sw.keep_newer_than(86400.0), 5, [], [0, 1, 2, 3, 4]),
]


@pytest.mark.parametrize(
    ("rule", "count", "metrics", "kept"), [one[1:] for one in KEPT], ids=[one[0] for one in KEPT]
)
def test_these_steps_stay_also_across_a_restart(
    root: Path, rule: sw.Retention, count: int, metrics: list[float], kept: list[int]
) -> None:
    for steps in (range(count // 2), range(count // 2, count)):
        with sw.CheckpointManager(root, retention=rule) as manager:
            for step in steps:
                given = {"accuracy": metrics[step]} if metrics else None
                manager.save(step, state(step), metrics=given)
                manager.wait_until_finished()
                assert manager.latest_step() == step, "the newest is never the one that goes"
    assert sw.CheckpointManager(root, read_only=True).all_steps() == kept


def test_the_best_step_is_one_of_those_that_have_the_metric(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        for step, metrics in enumerate([None, {"loss": 3.0}, {"other": 1.0}, {"loss": 2.0}, None]):
            manager.save(step, state(step), metrics=metrics)
        manager.wait_until_finished()
        assert manager.best_step("loss", "min") == 3
        assert manager.best_step("loss", "max") == 1
        assert manager.best_step("other", "min") == 2
        with pytest.raises(sw.MisuseError, match=r"no committed step has the metric `los`.*`loss`"):
            manager.best_step("los", "min")


def test_nan_never_is_the_best(root: Path) -> None:
    nan = float("nan")
    with sw.CheckpointManager(root, retention=sw.keep_best(9, "loss", "min")) as manager:
        for step, metrics in enumerate([{"loss": nan}, {"loss": nan, "other": 1.0}, None]):
            manager.save(step, state(step), metrics=metrics)
        manager.wait_until_finished()
        assert manager.best_step() is None
        with pytest.raises(sw.MisuseError, match=r"metric `loss`: it is NaN .* another metric, or a step"):
            manager.best_step("loss", "max")
        with pytest.raises(sw.MisuseError, match=r"metric `loss`: it is NaN"):
            manager.restore(best=("loss", "min"))
        manager.add_metrics(0, {"loss": 7.0})
        assert manager.best_step() == 0
        assert manager.best_step("loss", "max") == 0


def test_two_branches_of_one_number_both_stay(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(0, state(0)).result()
        for attempt in (1, 2):
            manager.save(1, state(attempt)).result()
            assert manager.rewind(0, branch=f"attempt-{attempt}") == [1]
    aside = names(root, ".branch-")
    assert [same(sw.restore(root / name), state(n + 1)) for n, name in enumerate(aside)] == [True, True]


# ---- names
# ---------------------------------------------------------------------------------------


def test_numbers_longer_than_their_width_are_steps_too(root: Path) -> None:
    with sw.CheckpointManager(root, step_name=sw.StepName("ckpt_", width=3)) as manager:
        for step in (7, 999, 1000, 2**63 - 1):
            manager.save(step, state(1)).result()
    assert names(root, "ckpt_") == ["ckpt_007", "ckpt_1000", "ckpt_9223372036854775807", "ckpt_999"]
    with sw.CheckpointManager(root) as again:  # the root knows its names
        assert again.all_steps() == [7, 999, 1000, 2**63 - 1]


# ---- crashes and permissions
# ---------------------------------------------------------------------------------------


def test_an_interrupted_saves_directory_is_not_restorable(root: Path) -> None:
    with training(root, nbytes=64 << 20) as process:
        assert process.watch(lambda: process.committed() is not None and half_written(root))
        process.kill()
    left = names(root, ".tmp-")
    assert left
    for look, name in itertools.product((sw.restore, sw.open, sw.verify, sw.metadata), left):
        with pytest.raises(sw.errors.NotAStep, match="no step"):
            look(root / name)
    with sw.CheckpointManager(root, read_only=True):
        assert names(root, ".tmp-") == left, "a reader removes nothing"
    sw.CheckpointManager(root).close()
    assert names(root, ".tmp-") == []


def test_a_denied_write_names_its_path(python: Run, tmp_path: Path) -> None:
    # Root may write everywhere: it becomes nobody, after everything is imported.
    script = """
import logging
root = sys.argv[1] + "/run"
everything = [getattr(sw, name) for name in sw.__all__], sw.restore, sw.save(root + "-before", {"a": 1})
if os.geteuid() == 0:
    os.chown(sys.argv[1], 65534, 65534)
    os.setegid(65534)
    os.seteuid(65534)
manager = sw.CheckpointManager(root)
manager.save(0, {"a": 1}).result()
os.chmod(root, 0o500)
for call in (lambda: manager.save(1, {"a": 2}).result(), lambda: sw.save(root + "/beside", {"a": 2}),
             lambda: sw.CheckpointManager(root + "/deeper/run")):
    try:
        call()
    except OSError as error:
        print(type(error).__name__, error.errno, root in str(error), "change the permissions" in str(error))
print(manager.all_steps(), manager.restore())
os.chmod(root, 0o700)
manager.save(1, {"a": 2}).result()
manager.close()
"""
    with tempfile.TemporaryDirectory() as open_to_all:
        os.chmod(open_to_all, 0o755)
        done = python(script, open_to_all)
    assert done.stdout.splitlines() == [
        "SaveFailed 13 True True",
        "SaveFailed 13 True True",
        "StorageError 13 True True",
        "[0] {'a': 1}",
    ], done
    assert done.returncode == 0


def test_files_and_directories_are_open_to_whom_the_umask_says(python: Run, root: Path) -> None:
    for mask, forbidden in ((0o027, 0o027), (0o077, 0o077), (0o002, 0o002)):
        script = (
            f"os.umask({mask})\nwith sw.CheckpointManager(sys.argv[1]) as m: m.save(0, {{'a': np.ones(9)}})"
        )
        assert python(script, root).returncode == 0
        modes = {path: path.stat().st_mode & 0o777 for path in (root, *root.rglob("*"))}
        assert len(modes) > 6
        assert not [path for path, mode in modes.items() if mode & forbidden]
        assert not [path for path, mode in modes.items() if not mode & 0o400]
        shutil.rmtree(root)


# ---- saves in the background
# ---------------------------------------------------------------------------------------


def test_during_a_save_the_latest_step_is_the_committed_one(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(0, state(0)).result()
        for _ in range(20):
            newest = manager.latest_step()
            running = manager.save(manager.next_step(), LARGE)
            found = (manager.latest_step(), manager.all_steps()[-1], sw.metadata(root).step)
            if not running.done():
                assert found == (newest,) * 3
                break
        else:
            pytest.skip("every save was over at once: this disk is too fast")
        running.result()
        assert manager.latest_step() == running.step


def test_all_who_wait_for_a_save_hear_of_its_failure(root: Path) -> None:
    heard: list[type[BaseException] | None] = []
    with sw.CheckpointManager(root) as manager:
        save = failing_save(manager)
        threads = [threading.Thread(target=lambda: heard.append(type(save.exception()))) for _ in range(5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
    assert heard == [sw.SaveFailed] * 5


def test_a_wait_that_times_out_leaves_the_save_to_go_on(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        save = pending_save(manager)
        told = ""
        try:
            save.result(timeout=0)
        except TimeoutError as error:
            told = str(error)
        if not told:
            pytest.skip("the save was over while it was asked about: this disk is too fast")
        assert f"step {save.step}" in told
        assert save.result() == save.step


# ---- parts, structures, sizes
# ---------------------------------------------------------------------------------------


def test_a_placeholder_leaves_a_subtree_unread(tmp_path: Path) -> None:
    path = tmp_path / "c"
    sw.save(path, {"params": {"w": np.ones(3), "deep": {"v": np.ones(3)}}, "optimizer": {"m": np.ones(3)}})
    for file in path.glob("i1/*.data"):  # there is nothing to read any more
        file.chmod(0o644)
        file.write_bytes(b"\0" * file.stat().st_size)
    back, report = sw.restore(
        path,
        like={"params": {"w": sw.AS_STORED, "deep": ...}, "optimizer": {"m": ...}},
        return_report=True,
    )
    assert same(back, {"params": {"w": np.ones(3), "deep": ...}, "optimizer": {"m": ...}})
    assert report.nbytes == 24
    assert {"params/deep/v", "optimizer/m"} <= set(report.left_out)
    with pytest.raises(sw.CorruptCheckpoint):
        sw.restore(path, like={"optimizer": {"m": sw.AS_STORED}})


def test_names_that_would_collide_in_a_file_name_are_apart(tmp_path: Path) -> None:
    found: dict[str, Any] = {
        "a.b": np.zeros(1), "a": {"b": np.ones(1)}, "a/b": np.full(1, 2.0), "a%2Fb": np.full(1, 3.0), "%": np.full(1, 4.0),
        "": np.full(1, 5.0), "n" * 300: np.full(1, 6.0), "..": np.full(1, 7.0), "CON": np.full(1, 8.0), "con": np.full(1, 9.0),
    }  # fmt: skip
    sw.save(tmp_path / "c", found)
    assert same(sw.restore(tmp_path / "c"), found)


def test_an_item_that_comes_later_is_in_the_steps_that_have_it(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(0, state(0)).result()
        manager.save(1, {**state(1), "ema": {"w": np.ones(2)}}).result()
        assert manager.metadata(0).items == ("params", ".")
        assert manager.metadata(1).items == ("params", ".", "ema"), "in the order of the state"
        assert same(manager.restore(1, like={"ema": sw.AS_STORED}), {"ema": {"w": np.ones(2)}})
        with pytest.raises(sw.MismatchError, match="ema"):
            manager.restore(0, like={"ema": sw.AS_STORED})


def test_a_step_that_lacks_an_item_is_passed_over(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        for step in range(2):
            manager.save(step, {"params": {"w": np.ones(3)}, "data": {"p": step}}).result()
        shutil.rmtree(root / "step_00000001" / "i1")
        assert manager.latest_step() == 0
        with pytest.raises(sw.CorruptCheckpoint, match=r"step_00000001/i1/.*missing"):
            manager.restore(1)
        assert manager.restore()["data"] == {"p": 0}


def test_a_reader_sets_no_metadata_of_the_root(root: Path) -> None:
    sw.CheckpointManager(root).close()
    with sw.CheckpointManager(
        root, read_only=True, options=sw.Options(root_metadata={"run": "reader"})
    ) as reader:
        assert reader.root_metadata is None
    with sw.CheckpointManager(root) as manager:
        assert manager.root_metadata is None


def test_a_watcher_ends_after_its_silence(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        for step in range(3):
            manager.save(step, state(step))
        manager.wait_until_finished()
        begun = time.monotonic()
        steps = [found.step for found in sw.watch(root, which="all", timeout=0.3, interval=0.05)]
        assert steps == [0, 1, 2]
        assert 0.3 <= time.monotonic() - begun < 30
        for found in sw.watch(root, which="all"):  # without a timeout: the caller leaves the loop
            with pytest.raises(sw.LockedError):
                manager.delete(found.step)
            if found.step == 1:
                break
        del found
        manager.delete(1)
        assert manager.all_steps() == [0, 2]
        assert list(sw.watch(root, after=2, timeout=0)) == []


def test_a_state_larger_than_the_budget_round_trips(python: Run, root: Path) -> None:
    script = """
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) << 10
state = {"a": np.ones(512 << 20, np.uint8)}
with sw.CheckpointManager(sys.argv[1], staging_bytes=64 << 20) as manager:
    before = peak()
    manager.save(0, state).result()
    saving = peak() - before
    state["a"][:] = 0
    before = peak()
    manager.restore(into=state)
    print(bool(state["a"].all()), saving >> 20, peak() - before >> 20)
"""
    done = python(script, root)
    whole, saving, restoring = done.stdout.split()
    assert whole == "True"
    assert int(saving) <= 64 + 48, "MiB beside the state, of which 64 were allowed"
    assert int(restoring) <= 64 + 48


def test_twenty_thousand_leaves_take_few_files(root: Path) -> None:
    many = {"params": {f"layers.{n}.weight": np.full(8, n, np.float32) for n in range(20_000)}}
    with sw.CheckpointManager(root) as manager:
        manager.save(0, many).result()
        files = [file for file in (root / "step_00000000").rglob("*") if file.is_file()]
        assert len(files) <= 6
        plan = manager.plan(include=["params/layers.777.weight"])
        assert plan.nbytes == 32
        assert plan.read_bytes <= 1 << 20
        assert manager.restore(include=["params/layers.777.weight"])["params"]["layers.777.weight"][0] == 777
        assert len(manager.metadata(0).tree["params"]) == 20_000
        assert same(manager.restore(), many)


# ---- the list
# ---------------------------------------------------------------------------------------


def test_every_test_that_the_list_names_is_there() -> None:
    rows = [line for line in LIST.read_text().splitlines() if line.startswith("| ") and "`" in line]
    assert len(rows) > 80
    missing = []
    for row in rows:
        shown = re.findall(r"`([\w/]+\.(?:py|rs))::(\w+)`", row)
        assert shown, f"no test in: {row}"
        for file, name in shown:
            path = PROJECT / ("tests/python/" + file if file.endswith(".py") else file)
            text = path.read_text() if path.is_file() else ""
            if not re.search(rf"\b(?:def|fn) {name}\(", text):
                missing.append(f"{file}::{name}")
    assert missing == []
