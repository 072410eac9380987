"""Tiers: a fast place for the steps, and a safer one that gets copies in the background."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import stepwell as sw
from ranks import run

sys.path.append(str(Path(__file__).parent))
from fake_store import control


@pytest.fixture
def home(bucket: str) -> str:
    """A root in the store."""
    return bucket


def state(step: int) -> dict[str, object]:
    return {"w": np.full(3_000_000, step, np.float32), "step": step}


def is_state(found: dict[str, np.ndarray], step: int) -> bool:
    return found["step"] == step and bool((found["w"] == step).all())


def near_and_home(near: Path, home: str, **options: object) -> list[sw.Tier]:
    return [sw.Tier(near, retention=1), sw.Tier(home, **options)]  # type: ignore[arg-type]


def test_a_run_goes_on_after_its_node_is_lost(home: str, tmp_path: Path) -> None:
    near = tmp_path / "near"
    with sw.CheckpointManager(tiers=near_and_home(near, home, all_due=True)) as mgr:
        saves = [mgr.save(step, state(step)) for step in range(4)]
        assert [save.result(tier="home") for save in saves] == [0, 1, 2, 3]
        assert saves[-1].result(tier="near") == 3
        assert saves[-1].durability == "site"
        assert mgr.all_steps() == [0, 1, 2, 3]
        assert is_state(mgr.restore(1), 1)
        here, there = mgr.tiers()
        assert (here.name, here.survives, here.steps) == ("near", "process", (3,))
        assert (there.name, there.survives, there.steps, there.due) == ("home", "site", (0, 1, 2, 3), ())
    shutil.rmtree(near)
    with sw.CheckpointManager(tiers=near_and_home(tmp_path / "other", home)) as mgr:
        found, first = mgr.resume(state(-1))
        assert first == 4
        assert is_state(found, 3)
        assert [row.step for row in sw.inspect(home)] == [0, 1, 2, 3]
        mgr.save(4, state(4))
    assert is_state(sw.restore(home), 4)


def test_a_closed_manager_has_carried_its_last_step(home: str, tmp_path: Path) -> None:
    with sw.CheckpointManager(tiers=near_and_home(tmp_path / "near", home)) as mgr:
        for step in range(10):
            mgr.save(step, state(step))
        mgr.wait_until_carried()
        there = mgr.tiers()[1]
        assert there.steps[-1] == 9
        assert len(there.steps) + there.superseded == 10
    assert sw.verify(home).ok


def test_the_answers_of_a_save_outlive_the_manager(home: str, tmp_path: Path) -> None:
    with sw.CheckpointManager(tiers=near_and_home(tmp_path / "near", home)) as mgr:
        save = mgr.save(0, state(0))
    assert save.result(tier="home") == 0
    assert save.durability == "site"


def test_a_machine_that_was_replaced_gives_way(tmp_path: Path) -> None:
    def tiers() -> list[sw.Tier]:
        return [sw.Tier(tmp_path / "near"), sw.Tier(tmp_path / "home")]

    with sw.CheckpointManager(tiers=tiers()) as mgr:
        mgr.save(0, state(0)).result(tier="home")
    for root, value in (("home", 100), ("near", 200)):
        with sw.CheckpointManager(tmp_path / root) as mgr:
            for step in (1, 2):
                mgr.save(step, state(value + step)).result()
    with sw.CheckpointManager(tiers=tiers()) as mgr:
        assert mgr.all_steps() == [0, 1, 2]
        assert mgr.restore(2)["step"] == 102
        mgr.wait_until_carried()
    assert sw.restore(tmp_path / "home", 2)["step"] == 102
    assert len(list((tmp_path / "near").glob(".branch-stale-*"))) == 2


def test_a_tier_may_be_a_directory(tmp_path: Path) -> None:
    tiers = [
        sw.Tier(tmp_path / "ram", name="ram", retention=1),
        sw.Tier(tmp_path / "disk", name="disk", every=2, all_due=True, survives="node"),
        sw.Tier(tmp_path / "archive", every=4, all_due=True, bytes_per_second=10**9),
    ]
    with sw.CheckpointManager(tiers=tiers) as mgr:
        for step in range(6):
            save = mgr.save(step, state(step))
            save.result()
        mgr.wait_until_carried(60)
        assert [one.name for one in mgr.tiers()] == ["ram", "disk", "home"]
        assert [one.steps for one in mgr.tiers()] == [(5,), (0, 2, 4), (0, 4)]
        assert mgr.all_steps() == [0, 2, 4, 5]
        assert save.durability == "process"
        with pytest.raises(sw.errors.NotCarried, match="does not take"):
            save.result(tier="disk")
        with pytest.raises(sw.MisuseError, match="ram, disk, home"):
            save.result(tier="attic")
        assert mgr.rewind(2) == [5, 4]
        assert mgr.all_steps() == [0, 2]
        assert is_state(mgr.restore(), 2)
        mgr.delete(2)
        assert mgr.latest_step() == 0
    for name in ("disk", "archive"):
        assert sw.verify(tmp_path / name).ok


def test_durability_ends_with_the_last_copy(tmp_path: Path) -> None:
    tiers = [sw.Tier(tmp_path / "near", retention=1), sw.Tier(tmp_path / "home", retention=1)]
    with sw.CheckpointManager(tiers=tiers) as mgr:
        first, second = mgr.save(1, state(1)), mgr.save(2, state(2))
        second.result(60, tier="home")
        mgr.wait_until_carried(60)
        assert mgr.all_steps() == [2]
        assert first.durability is None
        assert second.durability == "process"


def test_a_reader_without_the_first_tier_is_told_to_open_home(tmp_path: Path) -> None:
    tiers = [sw.Tier(tmp_path / "near"), sw.Tier(tmp_path / "home")]
    with sw.CheckpointManager(tiers=tiers) as mgr:
        mgr.save(1, state(1))
    shutil.rmtree(tmp_path / "near")
    with pytest.raises(sw.StepNotFound, match=rf"'{tmp_path}/home', read_only=True"):
        sw.CheckpointManager(tiers=tiers, read_only=True)
    with sw.CheckpointManager(tmp_path / "home", read_only=True) as reader:
        assert reader.all_steps() == [1]


def test_globs_of_compress_that_match_nothing_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tiers = [sw.Tier(tmp_path / "near"), sw.Tier(tmp_path / "home", compress=["w", "optimiser"])]
    with caplog.at_level("WARNING", "stepwell"), sw.CheckpointManager(tiers=tiers) as mgr:
        for step in (1, 2):
            mgr.save(step, state(step)).result(60, tier="home")
    found = [line for line in caplog.messages if "no tensor of this step matches" in line]
    assert len(found) == 1, found
    assert "optimiser" in found[0]


def test_a_store_that_is_away_does_not_stop_the_run(store: dict[str, str], home: str, tmp_path: Path) -> None:
    with sw.CheckpointManager(tiers=near_and_home(tmp_path / "near", home, all_due=True)) as mgr:
        mgr.save(0, state(0)).result(tier="home")
        control(store, "faults", {"kinds": ["unavailable"]})
        last = mgr.save(1, state(1))
        assert last.result() == 1
        assert last.durability == "process"
        with pytest.raises(TimeoutError, match="home to get step 1"):
            last.result(0.5, tier="home")
        assert mgr.tiers()[1].due == (1,)
        assert is_state(mgr.restore(1), 1)
        control(store, "faults")
        assert last.result(120, tier="home") == 1
    assert is_state(sw.restore(home), 1)


KILLED = """
mgr = sw.CheckpointManager(tiers=[
    sw.Tier(sys.argv[1], retention=2), sw.Tier(sys.argv[2], all_due=True, bytes_per_second=30_000_000)])
for step in range(5):
    mgr.save(step, {"w": np.full(3_000_000, step, np.float32), "step": step}).result()
    print(step, flush=True)
print("carrying", flush=True)
mgr.wait_until_carried()
"""


def test_the_next_process_carries_what_a_killed_one_has_left(home: str, tmp_path: Path) -> None:
    near = tmp_path / "near"
    script = tmp_path / "script.py"
    script.write_text("import sys, numpy as np, stepwell as sw\n" + KILLED)
    process = subprocess.Popen(
        [sys.executable, str(script), str(near), home], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    while process.stdout.readline().strip() != "carrying":
        pass
    time.sleep(0.3)
    os.kill(process.pid, signal.SIGKILL)
    process.wait(timeout=30)
    process.stdout.close()
    tiers = [sw.Tier(near, retention=2), sw.Tier(home, all_due=True)]
    with sw.CheckpointManager(tiers=tiers, options=sw.Options(silence=1.0)) as mgr:
        assert mgr.latest_step() == 4
        mgr.wait_until_carried()
        assert mgr.tiers()[1].steps[-1] == 4
        for step in mgr.all_steps():
            assert is_state(mgr.restore(step), step)
    shutil.rmtree(near)
    for row in sw.inspect(home):
        assert row.step is not None
        assert is_state(sw.restore(home, row.step), row.step)


SAVED_BY_RANKS = """
tiers = [sw.Tier(os.path.join(ROOT, "near"), retention=1), sw.Tier(sys.argv[5], all_due=True)]
mgr = sw.CheckpointManager(
    tiers=tiers, coordinator=sw.coordinators.SharedDirectory(RANK, WORLD, "job", path=ROOT))
found, first = mgr.resume({"w": np.zeros(8)})
assert first == int(sys.argv[6]), first
for step in range(first, first + 2):
    mgr.save(step, {"w": np.full(8, float(step))})
mgr.wait_until_finished()
if RANK == 0:
    mgr.wait_until_carried()
assert mgr.latest_step() == first + 1
mgr.close()
"""


def test_ranks_find_the_steps_of_every_tier(home: str, tmp_path: Path) -> None:
    for world, first in ((2, 0), (3, 2)):
        meeting = tmp_path / f"meeting of {world}"
        meeting.mkdir()
        run(tmp_path, SAVED_BY_RANKS, world, meeting, home, first)
    assert [row.step for row in sw.inspect(home)] == [0, 1, 2, 3]


def test_a_notice_brings_the_newest_step_to_every_tier(home: str, tmp_path: Path) -> None:
    slow = sw.Tier(home, every=100, bytes_per_second=1000)
    with sw.CheckpointManager(tiers=[sw.Tier(tmp_path / "near"), slow]) as mgr:
        for step in (100, 101, 102):
            mgr.save(step, state(step))
        _, far = mgr.carry_within(60)
        assert (far.steps[-1], far.due) == (102, ())
        assert mgr.carry_within(0)[1].steps == far.steps
    with sw.CheckpointManager(home, read_only=True) as mgr:
        assert is_state(mgr.restore(), 102)


def test_a_notice_ends_in_time(store: dict[str, str], home: str, tmp_path: Path) -> None:
    with sw.CheckpointManager(tiers=near_and_home(tmp_path / "near", home)) as mgr:
        mgr.save(0, state(0)).result(tier="home")
        control(store, "faults", {"kinds": ["unavailable"]})
        mgr.save(1, state(1))
        begun = time.monotonic()
        near, far = mgr.carry_within(2)
        assert time.monotonic() - begun < 30
        assert (near.steps, far.steps, far.due) == ((1,), (0,), (1,))
        with pytest.raises(sw.MisuseError, match="time_left"):
            mgr.carry_within(-1)
        control(store, "faults")


def test_a_link_to_a_tier_is_the_same_tier(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "near")
    with pytest.raises(sw.MisuseError, match="two tiers have the location"):
        sw.CheckpointManager(tiers=[sw.Tier(tmp_path / "near"), sw.Tier(tmp_path / "link")])
    assert [path.name for path in tmp_path.iterdir()] == ["link"]


def test_wrong_tiers_are_refused_before_anything_is_made(tmp_path: Path) -> None:
    near, home = sw.Tier(tmp_path / "near"), sw.Tier(tmp_path / "home")
    for arguments, message in [
        (dict(tiers=[near, near]), "two tiers have the location"),
        (dict(tiers=[sw.Tier(tmp_path / "near", name="home"), home]), "two tiers have the name"),
        (dict(tiers=[sw.Tier(tmp_path / "near", every=2), home]), "the first tier gets every step"),
        (dict(root=tmp_path, tiers=[near, home]), "leave root out"),
        (dict(retention=2, tiers=[near, home]), "leave retention= out"),
        (dict(tiers=near), "a list of sw.Tier"),
        (dict(tiers=[near, str(tmp_path / "home")]), "sw.Tier"),
        (dict(), "a manager needs a root"),
    ]:
        with pytest.raises(sw.MisuseError, match=message):
            sw.CheckpointManager(**arguments)  # type: ignore[arg-type]
    for wrong in (
        dict(every=0),
        dict(all_due=1),
        dict(survives="all"),
        dict(bytes_per_second=0),
        dict(name=""),
    ):
        with pytest.raises(sw.MisuseError):
            sw.Tier(tmp_path, **wrong)  # type: ignore[arg-type]
    assert not list(tmp_path.iterdir())
    with sw.CheckpointManager(tmp_path / "plain") as mgr:
        save = mgr.save(0, state(0))
        assert (mgr.tiers(), save.durability) == ([], None)
        with pytest.raises(sw.MisuseError, match="has no tiers"):
            save.result(tier="home")
