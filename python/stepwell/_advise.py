"""Advice about the saves of a run: :func:`advise`."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import final

from . import _core
from ._checks import flag, listed, whole
from ._failure_model import best_interval, daly_interval, lost_share, young_interval
from ._locations import Path, is_store, location
from ._opening import metadata
from ._public import public
from ._retention import Retention, as_retention
from ._run_measurements import EventMeasurements, Events, RunMeasurements, typical_interval
from ._steps import StepInfo, inspect
from ._timeouts import finite_seconds, positive_seconds
from .errors import MisuseError, StepNotFound, from_system


@final
@dataclass(frozen=True, slots=True)
class PerStepSaves:
    """The needs of saves at every step."""

    #: Bytes per second: of all processes together, of one, and of one disk.
    bytes_per_second: float
    bytes_per_second_of_a_rank: float
    bytes_per_second_of_a_disk: float
    #: Bytes per second of the run's saves.
    measured: float
    #: How many times longer steps (by gradient accumulation) suffice at the measured speed.
    accumulation: int
    #: How many processes suffice, if they are more replicas, and each brings as much disk.
    ranks: int


@final
@dataclass(frozen=True, slots=True)
class DiskForecast:
    """When saves at an interval fill the disk."""

    interval_seconds: float
    #: Free bytes now.
    free_bytes: int
    #: The saves, and the seconds from now on, until one has no space. ``None``: never.
    saves: int | None
    seconds: float | None


@final
@dataclass(frozen=True, slots=True)
class Projection:
    """The same training on another number of processes."""

    ranks: int
    mtbf: float
    cost_seconds: float
    save_seconds: float
    #: The best interval, and the share of the time that is lost with it.
    interval_seconds: float
    lost: float


@final
@dataclass(frozen=True, slots=True)
class Advice:
    """The answer of :func:`stepwell.advise`. Times are seconds; shares are from 0 to 1."""

    root: str
    mtbf: float
    #: From a failure to the first new step.
    restart: float
    measured: RunMeasurements
    #: The interval that loses least, from start to start of a save, and in steps.
    interval_seconds: float
    interval_steps: int | None
    #: The share of the time that is lost with it, and with the present interval.
    lost: float
    lost_now: float | None
    #: The intervals of Young's and Daly's formulas.
    young_seconds: float
    daly_seconds: float
    #: The needs of saves at every step. ``None`` if the time of a step is unknown.
    per_step: PerStepSaves | None
    #: The disk at the present interval and at the advised one.
    disk_now: DiskForecast | None
    disk: DiskForecast
    #: More processes.
    projections: tuple[Projection, ...]
    #: Facts that were unknown, with the values that were taken instead.
    notes: tuple[str, ...]

    def lost_at(self, interval_seconds: float) -> float:
        """Returns the share of the time that is lost with another interval."""
        run = self.measured
        return lost_share(interval_seconds, run.cost_seconds, self.mtbf, run.save_seconds, self.restart)


@public
def advise(
    root: Path,
    *,
    mtbf: float,
    events: Events | None = None,
    restart: float | None = None,
    cost: float | None = None,
    step_seconds: float | None = None,
    retention: Retention | int | None = None,
    ranks: Iterable[int] = (),
    disks: int = 1,
    local_disks: bool = False,
) -> Advice:
    """Returns advice about the saves of a run, from the steps of its root and its manager's events.

    The interval that loses least follows from the model of independent failures at a constant rate.
    A run makes ``I - C`` progress in ``M·exp((R + L - C)/M)·(exp(I/M) - 1)`` seconds, with interval
    ``I``, cost ``C`` and duration ``L`` of a save, restart ``R``, and ``M = mtbf``. The best
    interval is ``I = C + M·(1 + W(-exp(-1 - C/M)))``, with Lambert's W, and at least ``L``. The
    model is that of J. T. Daly, "A higher order estimate of the optimum checkpoint interval for
    restart dumps", FGCS 22 (2006), equation 13, extended by saves that training does not wait for.
    Young's interval (CACM 17, 1974) is ``C + sqrt(2CM)``. Daly's equation 37 is beside it.

    Saves at every step need a speed of ``bytes / step_seconds`` (G. Wang et al., "FastPersist",
    arXiv:2406.13768). There, a write must end before the next update, so it has the forward and
    backward pass. Here, a copy is written, so it has the whole step. Gradient accumulation makes
    steps longer. More replicas (data-parallel width) share the bytes of one state.

    On ``n`` times as many processes, failures are ``n`` times as frequent and each process copies
    the ``n``-th part.

    Args:
        root: the root of the run.
        mtbf: the mean time between failures of the whole job, in seconds.
        events: the file of :class:`stepwell.events.JsonLines`, or a list of events. They have the
            cost of a save, the time of a step, and the time of a restore. Without them, a save is
            taken to cost its whole duration.
        restart: the seconds from a failure to the first new step. Default: those of a restore.
        cost: the seconds that a save costs training, instead of the measured ones.
        step_seconds: the seconds of a step without a save beside it, likewise.
        retention: that of the manager: ``3``, or :func:`keep_latest` and the like.
        ranks: numbers of processes to project to.
        disks: how many disks the bytes of a step are spread over.
        local_disks: True if more processes bring more disks. Else the time of a save stays.

    Raises:
        StepNotFound: the root has no whole step.
        MisuseError: an argument is invalid, or ``events`` has none of this root.
    """
    mtbf = positive_seconds(mtbf, "mtbf")
    rule = as_retention(retention)
    wanted = [whole(one, "a number of ranks", 1) for one in listed(ranks, "ranks is a list of numbers")]
    disks, local = whole(disks, "disks", 1), flag(local_disks, "local_disks")
    path = location(root, "the root")
    if is_store(path):
        raise MisuseError(
            f"{path} is in an object store, and advise() forecasts the space of a disk. "
            "Pass the root of a tier on a disk, if the run has one"
        )
    steps = [
        row for row in inspect(path) if row.damage is None and row.adopted is None and row.step is not None
    ]
    if not steps:
        raise StepNotFound(f"{path} has no whole step of its own. Save at least one, and ask again")
    notes: list[str] = []
    run = _measured(path, steps, EventMeasurements.of(events, path), cost, step_seconds, notes)
    if restart is None:
        restart = run.restore_seconds
        if restart is None:
            notes.append("The time of a restart is unknown and counts as 0: pass restart=")
    restart = finite_seconds(restart or 0.0, "restart")
    best = best_interval(run.cost_seconds, mtbf, run.save_seconds)
    now = run.interval_seconds

    def lost(interval: float) -> float:
        return lost_share(interval, run.cost_seconds, mtbf, run.save_seconds, restart)

    try:
        disk = os.statvfs(path)
    except OSError as error:
        raise from_system(f"the free space of {path} is unknown", error, path) from error
    free = disk.f_bavail * disk.f_frsize
    present = _sizes(steps)

    def forecast(interval: float) -> DiskForecast:
        apart = run.interval_steps or 1
        if run.step_seconds is not None:
            apart = _in_steps(interval, run.cost_seconds, run.step_seconds)
        ns = max(int(interval * 1e9), 1)
        found = _core.saves_until_full(rule.to_json(), present, apart, ns, free)
        saves = None if found is None else int(found)
        return DiskForecast(interval, free, saves, None if saves is None else saves * interval)

    return Advice(
        path,
        mtbf,
        restart,
        run,
        best,
        None if run.step_seconds is None else _in_steps(best, run.cost_seconds, run.step_seconds),
        lost(best),
        None if now is None else lost(now),
        young_interval(run.cost_seconds, mtbf),
        daly_interval(run.cost_seconds, mtbf),
        None if run.step_seconds is None else _per_step(run, run.step_seconds, disks),
        None if now is None else forecast(now),
        forecast(best),
        tuple(_projected(run, mtbf, restart, number, local) for number in wanted),
        tuple(notes),
    )


def _measured(
    root: str,
    steps: Sequence[StepInfo],
    events: EventMeasurements,
    cost: float | None,
    step_seconds: float | None,
    notes: list[str],
) -> RunMeasurements:
    duration = events.save or median((step.committed - step.started).total_seconds() for step in steps)
    # Clocks of manifests may have been set.
    duration = max(duration, 1e-6)
    interval, interval_steps = typical_interval(steps)
    if cost is not None:
        cost = finite_seconds(cost, "cost")
    elif events.cost is None:
        notes.append("The cost of a save is unknown and counts as its duration: pass events= or cost=")
    blocked = duration if events.blocked is None else events.blocked
    spent = cost if cost is not None else max(duration if events.cost is None else events.cost, 1e-9)
    if step_seconds is not None:
        step_seconds = positive_seconds(step_seconds, "step_seconds")
    elif events.step:
        step_seconds = events.step
    elif interval is not None and interval_steps and interval > spent:
        step_seconds = (interval - spent) / interval_steps
        notes.append("The time of a step is that between two saves: pass events= or step_seconds=")
    return RunMeasurements(
        nbytes=steps[-1].nbytes,
        ranks=metadata(root, step=steps[-1].number).world_size,
        interval_seconds=interval,
        interval_steps=interval_steps,
        step_seconds=step_seconds,
        blocked_seconds=min(blocked, spent),
        cost_seconds=spent,
        save_seconds=max(duration, spent),
        restore_seconds=events.restore,
    )


def _in_steps(interval: float, cost: float, step: float) -> int:
    return max(round((interval - cost) / step), 1)


def _per_step(run: RunMeasurements, step: float, disks: int) -> PerStepSaves:
    needed = run.nbytes / step
    times = max(math.ceil(needed / run.bytes_per_second), 1)
    return PerStepSaves(
        needed, needed / run.ranks, needed / disks, run.bytes_per_second, times, times * run.ranks
    )


def _projected(run: RunMeasurements, mtbf: float, restart: float, ranks: int, local: bool) -> Projection:
    share = run.ranks / ranks
    beside = share if local else 1.0
    save = run.save_seconds * beside
    cost = run.blocked_seconds * share + (run.cost_seconds - run.blocked_seconds) * beside
    save = max(save, cost)
    best = best_interval(cost, mtbf * share, save)
    return Projection(
        ranks, mtbf * share, cost, save, best, lost_share(best, cost, mtbf * share, save, restart)
    )


def _sizes(steps: Sequence[StepInfo]) -> str:
    """Returns the steps as a forecast of the engine takes them."""
    rows = [
        {
            "step": step.step,
            "committed_unix_ns": int(step.committed.timestamp() * 1e9),
            "items": {item.name: item.nbytes for item in step.items},
            "metrics": {name: value for name, value in step.metrics.items() if math.isfinite(value)},
        }
        for step in steps
    ]
    return json.dumps(rows)
