"""Advice about saves: the advised interval against simulated failures, and measured costs."""

from __future__ import annotations

import datetime
import json
import math
import os
import time
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from command_line import document, run
from stepwell._failure_model import best_interval, daly_interval, lost_share, young_interval
from stepwell._policies import SavePolicy
from stepwell._save_costs import SaveCosts

STATE = {"params": {"w": np.arange(100_000, dtype=np.float32)}, "optimizer": np.zeros(50_000)}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A root of three steps, ten apart."""
    root = tmp_path_factory.mktemp("advice") / "run"
    with sw.CheckpointManager(root) as mgr:
        for step in (10, 20, 30):
            mgr.save(step, STATE).result()
    return root


def events_of(root: Path, path: Path, *, cost: float, duration: float, step: float = 0.5) -> Path:
    """A file of events of a run whose saves took that long."""
    save = {
        "event": "save", "root": str(root), "outcome": "committed", "blocked_seconds": cost / 2,
        "cost_seconds": cost, "step_seconds": step, "total_seconds": duration + 3, "queued_seconds": 3,
    }  # fmt: skip
    lines = [json.dumps({**save, "step": number}) for number in (10, 20, 30)]
    path.write_text("\n".join(lines) + '\n{"event": "sa')  # killed while it wrote
    return path


@dataclass
class Failures:
    """Failures of a run: how long it ran before each, and how long each restart took. All intervals
    meet the same ones."""

    up: np.ndarray[Any, np.dtype[np.float64]]
    down: np.ndarray[Any, np.dtype[np.float64]]

    @classmethod
    def drawn(cls, count: int, mtbf: float, restart: float) -> Failures:
        drawn = np.random.default_rng(7)
        down = np.zeros(count)
        restarting = np.ones(count, bool)
        while restarting.any():
            # A restart fails too, and begins again.
            until = drawn.exponential(mtbf, count)
            down += np.where(restarting, np.minimum(until, restart), 0)
            restarting &= until < restart
        return cls(drawn.exponential(mtbf, count), down)

    def lost(self, interval: float, cost: float, latency: float) -> float:
        """The share of the time that is no progress, of a run that saves at an interval."""
        work = interval - cost
        # A failure undoes what is not committed by then.
        commits = np.arange(work + latency, self.up.max(), interval)
        committed = len(self.up) - np.searchsorted(np.sort(self.up), commits)
        return 1 - float(work * committed.sum() / (self.up.sum() + self.down.sum()))


GRID = list(product((1.0, 10.0, 60.0), (0.0, 120.0, 900.0), (1_800.0, 21_600.0, 259_200.0), (1.0, 4.0)))


@pytest.mark.parametrize(("cost", "restart", "mtbf", "slower"), GRID)
def test_no_searched_interval_loses_two_percent_less(
    saved: Path, tmp_path: Path, cost: float, restart: float, mtbf: float, slower: float
) -> None:
    latency = cost * slower
    events = events_of(saved, tmp_path / "events.jsonl", cost=cost, duration=latency)
    advice = sw.advise(saved, mtbf=mtbf, restart=restart, events=events)
    failures = Failures.drawn(4000, mtbf, restart)
    searched = [advice.interval_seconds * 1.15**power for power in range(-16, 17)]
    allowed = [interval for interval in searched if interval > max(cost, latency)]
    best = min(failures.lost(interval, cost, latency) for interval in allowed)
    found = failures.lost(advice.interval_seconds, cost, latency)
    assert found <= 1.02 * best
    # The model says what the simulation loses.
    assert advice.lost == pytest.approx(found, rel=0.1)
    assert advice.interval_steps == max(1, round((advice.interval_seconds - cost) / 0.5))


def test_the_exact_interval_is_a_minimum_of_the_model() -> None:
    for cost, mtbf in product((1e-6, 0.5, 40.0, 5_000.0), (600.0, 86_400.0)):
        best = best_interval(cost, mtbf)
        lost = lost_share(best, cost, mtbf, cost)
        for factor in (0.99, 1.01):
            work = (best - cost) * factor
            assert lost_share(work + cost, cost, mtbf, cost) >= lost
    # Young's and Daly's formulas are for costs far below the mean time between failures.
    for formula in (young_interval, daly_interval):
        assert formula(1.0, 1e6) == pytest.approx(best_interval(1.0, 1e6), rel=1e-3)
    assert daly_interval(60.0, 600.0) == pytest.approx(best_interval(60.0, 600.0), rel=1e-3)
    assert best_interval(0.0, 100.0, latency=7.0) == 7.0
    assert lost_share(1e9, 1.0, 1.0) == 1.0


@dataclass
class Disk:
    """A simulated training: seconds of a step, of a call of save, of a write, and the slower steps
    beside it."""

    step: float
    blocked: float
    write: float
    slower: float = 1.0
    now: float = 0.0
    ends: float = -1.0
    starts: list[float] = field(default_factory=list)

    def done(self) -> bool:
        """As of the save that is the only one."""
        return self.now >= self.ends

    def train(self, policy: SavePolicy, costs: SaveCosts, first: int, steps: int) -> list[int]:
        """Calls save at each of these steps. Returns the saved ones."""
        saved = []
        for step in range(first, first + steps):
            self.now += self.step if self.done() else self.step * self.slower
            with costs.call(step):
                begun = self.now
                if any(policy.answers(step, None, costs).values()):
                    saved.append(step)
                    self.now += self.blocked
                    self.ends = self.now + self.write
                    costs.saved(begun)
        return saved


def test_every_optimal_follows_the_costs_of_a_run() -> None:
    disk = Disk(step=1.0, blocked=0.5, write=4.0, slower=1.5)
    costs = SaveCosts([disk], clock=lambda: disk.now)  # type: ignore[list-item]
    policy = sw.every_optimal(mtbf=3_600.0)
    saves = disk.train(policy, costs, 0, 2000)
    # Three steps run beside each write, half a second slower each.
    assert costs.step_seconds == 1.0
    assert costs.cost == pytest.approx(0.5 + 3 * 0.5)
    expected = best_interval(2.0, 3_600.0) - 2.0
    assert np.diff(saves[-10:]) == pytest.approx(expected, abs=1)
    # Saves cost more from here on, and their number falls.
    disk.blocked = 20.0
    saves = disk.train(policy, costs, 2000, 8000)
    assert costs.cost == pytest.approx(21.5)
    assert np.diff(saves[-10:]) == pytest.approx(best_interval(21.5, 3_600.0) - 21.5, abs=1)


def test_every_optimal_never_saves_beside_a_save() -> None:
    disk = Disk(step=1.0, blocked=0.0, write=10.5)
    costs = SaveCosts([disk], clock=lambda: disk.now)  # type: ignore[list-item]
    saves = disk.train(sw.every_optimal(mtbf=60.0), costs, 0, 100)
    assert set(np.diff(saves)) == {11}


def test_a_manager_saves_at_the_optimum_and_reports_costs(tmp_path: Path) -> None:
    events: list[Any] = []
    root = tmp_path / "run"
    policy = sw.every_optimal(mtbf=1.0) & sw.every_steps(1)
    with sw.CheckpointManager(root, save_policy=policy, on_event=events.append) as mgr:
        for step in range(300):
            time.sleep(0.002)
            mgr.save(step, STATE)
        mgr.wait_until_finished()
        steps = mgr.all_steps()
        mgr.restore()
        end = time.monotonic() + 30
        while len(events) <= len(steps):
            assert time.monotonic() < end
            time.sleep(0.01)
    assert steps[0] == 0
    assert 2 <= len(steps) < 150
    saves = [event for event in events if isinstance(event, sw.events.SaveEvent)]
    assert saves[0].step_seconds is None
    assert saves[-1].step_seconds >= 0.002
    assert 0 < saves[-1].cost_seconds < 1
    advice = sw.advise(root, mtbf=1.0, events=events)
    assert advice.measured.step_seconds >= 0.002
    assert advice.measured.restore_seconds == advice.restart > 0
    assert advice.notes == ()
    assert advice.measured.nbytes > 800_000
    assert advice.measured.ranks == 1


def test_without_events_a_save_costs_its_duration(saved: Path) -> None:
    advice = sw.advise(saved, mtbf=3600)
    assert advice.measured.cost_seconds == advice.measured.save_seconds > 0
    assert advice.measured.interval_steps == 10
    assert any("cost of a save is unknown" in note for note in advice.notes)
    assert any("restart" in note for note in advice.notes)
    assert advice.lost_now == advice.lost_at(advice.measured.interval_seconds)
    told = sw.advise(saved, mtbf=3600, cost=2.0, step_seconds=0.25, restart=60)
    assert told.notes == ()
    assert (told.measured.cost_seconds, told.measured.step_seconds) == (2.0, 0.25)
    assert told.interval_seconds == best_interval(2.0, 3600)


def test_per_step_saves_need_the_bytes_of_a_step_in_its_time(saved: Path, tmp_path: Path) -> None:
    events = events_of(saved, tmp_path / "events.jsonl", cost=1.0, duration=2.0, step=0.5)
    advice = sw.advise(saved, mtbf=3600, events=events, disks=4)
    need = advice.per_step
    assert need is not None
    assert need.bytes_per_second == advice.measured.nbytes / 0.5
    assert need.bytes_per_second_of_a_disk == need.bytes_per_second / 4
    assert need.measured == advice.measured.nbytes / 2.0
    assert (need.accumulation, need.ranks) == (4, 4)


def test_a_projection_has_more_failures_and_smaller_copies(saved: Path, tmp_path: Path) -> None:
    events = events_of(saved, tmp_path / "events.jsonl", cost=4.0, duration=8.0)
    shared = sw.advise(saved, mtbf=80_000, restart=60, events=events, ranks=[1, 8]).projections
    local = sw.advise(saved, mtbf=80_000, restart=60, events=events, ranks=[8], local_disks=True).projections
    assert (shared[0].mtbf, shared[0].cost_seconds, shared[0].save_seconds) == (80_000, 4.0, 8.0)
    # Half of the cost is the copy, of which each process makes an eighth.
    assert (shared[1].mtbf, shared[1].cost_seconds, shared[1].save_seconds) == (10_000, 2.25, 8.0)
    assert (local[0].cost_seconds, local[0].save_seconds) == (0.5, 1.0)
    assert shared[1].lost > shared[0].lost
    assert shared[1].lost > local[0].lost


def test_the_disk_fills_as_retention_lets_it(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    size = sw.inspect(saved)[-1].nbytes
    free = type("Free", (), {"f_bavail": 10 * size + 5, "f_frsize": 1})
    monkeypatch.setattr(os, "statvfs", lambda path: free)

    def disk(**keywords: Any) -> sw.results.DiskForecast:
        advice = sw.advise(saved, mtbf=3600, cost=1.0, step_seconds=0.1, **keywords)
        assert advice.disk.free_bytes == 10 * size + 5
        return advice.disk

    kept = disk()
    assert kept.saves == 10
    assert kept.seconds == 10 * kept.interval_seconds
    assert disk(retention=3).saves is None
    # The params alone stay of each: the newest is whole.
    thinned = disk(retention=sw.keep_latest(1) | sw.keep_every(steps=1, items="params"))
    assert thinned.saves is not None
    assert 10 < thinned.saves < 30
    # 3 are there and 10 fit: 12 to keep, and one that is written.
    assert disk(retention=12).saves is None
    assert disk(retention=13).saves == 10


def test_events_that_are_none_are_refused(saved: Path, tmp_path: Path) -> None:
    file = tmp_path / "events.jsonl"
    for text, message in [
        ("nothing\n", "line 1 of"),
        ("[1]\n", "line 1 of"),
        ('{"event": "save", "root": "/elsewhere"}\n', "no event about"),
        (json.dumps({"event": "save", "root": str(saved), "outcome": "committed", "step": 3, "blocked_seconds": "1"}) + "\n", "no time"),
    ]:  # fmt: skip
        file.write_text(text)
        with pytest.raises(sw.MisuseError, match=message):
            sw.advise(saved, mtbf=60, events=file)
    file.write_bytes(b"\xff\n")
    with pytest.raises(sw.MisuseError, match="no file of events"):
        sw.advise(saved, mtbf=60, events=file)
    with pytest.raises(sw.StorageError, match="cannot be read"):
        sw.advise(saved, mtbf=60, events=tmp_path / "none")
    with pytest.raises(sw.MisuseError, match="no event of a manager"):
        sw.advise(saved, mtbf=60, events=[3])  # type: ignore[list-item]


def test_arguments_without_sense_are_refused(saved: Path, tmp_path: Path) -> None:
    for wrong in (
        {"mtbf": 0},
        {"mtbf": -1},
        {"mtbf": math.nan},
        {"mtbf": 9, "ranks": [0]},
        {"mtbf": 9, "disks": 0},
    ):
        with pytest.raises(sw.MisuseError):
            sw.advise(saved, **wrong)  # type: ignore[arg-type]
    with pytest.raises(sw.MisuseError, match="more than 0"):
        sw.every_optimal(mtbf=0)
    (tmp_path / "empty").mkdir()
    with pytest.raises(sw.StepNotFound):
        sw.advise(tmp_path / "empty", mtbf=60)


def test_the_command_says_what_the_function_returns(saved: Path, tmp_path: Path) -> None:
    events = events_of(saved, tmp_path / "events.jsonl", cost=2.0, duration=4.0)
    options = ["--mtbf", "12h", "--events", events, "--restart", "5m", "--keep-latest", 2, "--ranks", 8]
    found = document("advise", saved, *options)
    advice = sw.advise(saved, mtbf=43_200, events=events, restart=300, retention=2, ranks=[8])
    assert found["interval_seconds"] == advice.interval_seconds
    assert found["projections"][0]["ranks"] == 8
    printed = run("advise", saved, *options).output
    assert f"= {advice.interval_steps} steps" in printed
    assert f"loses {advice.lost:.2%}" in printed
    assert "never full" in printed


def test_a_report_shows_what_each_interval_loses(saved: Path, tmp_path: Path) -> None:
    page = tmp_path / "report.html"
    assert (
        run("report", saved, "-o", page, "--mtbf", "1h", "--cost", "2", "--step-seconds", "0.5").exit_code
        == 0
    )
    text = page.read_text()
    start = text.index(">", text.index('id="data"')) + 1
    advice = json.loads(text[start : text.index("</script", start)])["root"]["advice"]
    curve = dict(advice["curve"])
    assert min(curve.values()) == pytest.approx(advice["lost"], rel=0.01)
    assert min(curve) < advice["interval_seconds"] < max(curve)
    assert "Interval of saves" in text
    refused = run("report", saved, "-o", page, "--cost", "2")
    assert refused.exit_code == 2
    assert "--mtbf" in refused.output


def test_save_events_of_a_list_are_those_of_the_file(saved: Path, tmp_path: Path) -> None:
    log = tmp_path / "events.jsonl"
    events: list[Any] = []
    lines = sw.events.JsonLines(log)

    def both(event: Any) -> None:
        lines(event)
        events.append(event)

    root = tmp_path / "run"
    with sw.CheckpointManager(root, on_event=both) as mgr:
        for step in range(3):
            mgr.save(step, STATE).result()
    end = time.monotonic() + 30
    while len(events) < 3:
        assert time.monotonic() < end
        time.sleep(0.01)
    assert events[0].time.tzinfo == datetime.UTC
    assert sw.advise(root, mtbf=60, events=log).measured == sw.advise(root, mtbf=60, events=events).measured
