"""``stepwell advise``: the interval of saves that loses least, and what saves need."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import TYPE_CHECKING, TypedDict, TypeVar, Unpack, final

import click

import stepwell as sw

from .command import command
from .output import FINE, Output, columns, count, fields_of, safe, size
from .retention import RetentionOptions, duration, retention_of, retention_options

if TYPE_CHECKING:
    from ..results import DiskForecast

_Function = TypeVar("_Function", bound=Callable[..., int])

_MTBF = "The mean time between failures of the whole job: seconds, or 90m, 12h, 7d."
_OPTIONS = (
    click.option("--events", metavar="FILE", help="The file of the manager's sw.events.JsonLines."),
    click.option(
        "--restart", callback=duration, metavar="TIME", help="From a failure to the first new step."
    ),
    click.option("--cost", callback=duration, metavar="TIME", help="What a save costs training."),
    click.option(
        "--step-seconds", callback=duration, metavar="TIME", help="A step without a save beside it."
    ),
)


def mtbf_option(required: bool) -> Callable[[_Function], _Function]:
    """Gives a command ``--mtbf``."""
    return click.option("--mtbf", callback=duration, required=required, metavar="TIME", help=_MTBF)


def run_options(function: _Function) -> _Function:
    """Gives a command the options that describe a run."""
    return reduce(lambda made, option: option(made), reversed(_OPTIONS), function)


@final
class RunOptions(TypedDict):
    """The values of these options."""

    events: str | None
    restart: float | None
    cost: float | None
    step_seconds: float | None


@command("advise")
@click.argument("root")
@mtbf_option(required=True)
@run_options
@click.option(
    "--ranks",
    type=click.IntRange(min=1),
    multiple=True,
    metavar="N",
    help="Project to N processes. Repeatable.",
)
@click.option(
    "--disks",
    type=click.IntRange(min=1),
    default=1,
    metavar="N",
    help="How many disks share the bytes (default: 1).",
)
@click.option("--local-disks", is_flag=True, help="More processes bring more disks.")
@retention_options
def advise(
    out: Output,
    root: str,
    mtbf: float,
    events: str | None,
    restart: float | None,
    cost: float | None,
    step_seconds: float | None,
    ranks: tuple[int, ...],
    disks: int,
    local_disks: bool,
    **options: Unpack[RetentionOptions],
) -> int:
    """Advise on the saves of ROOT: the interval that loses least time to saves and failures, the
    speed that saves at every step need, when the disk is full, and more processes.

    --events gives what the saves cost training. The options of retention are those of the manager.
    """
    found = sw.advise(
        root,
        mtbf=mtbf,
        events=events,
        restart=restart,
        cost=cost,
        step_seconds=step_seconds,
        retention=retention_of(options),
        ranks=ranks,
        disks=disks,
        local_disks=local_disks,
    )
    out.document(fields_of(found))
    out.lines(columns(_rows(found), "ll"))
    if found.projections:
        out.line()
        out.lines(columns(_projections(found), "rrrrr"))
    for note in found.notes:
        out.note(note)
    return FINE


def _rows(found: sw.results.Advice) -> list[tuple[str, str]]:
    run = found.measured
    now = "unknown (one step)"
    if run.interval_seconds is not None and found.lost_now is not None:
        steps = f" = {count(run.interval_steps or 0, 'step')}"
        now = f"{_time(run.interval_seconds)}{steps}: loses {found.lost_now:.2%}"
    best = "" if found.interval_steps is None else f" = {count(found.interval_steps, 'step')}"
    rows = [
        ("root", safe(found.root)),
        (
            "a save",
            f"{size(run.nbytes)} in {_time(run.save_seconds)}, costs training {_time(run.cost_seconds)}",
        ),
        ("interval now", now),
        ("best interval", f"{_time(found.interval_seconds)}{best}: loses {found.lost:.2%}"),
        ("disk now", "unknown" if found.disk_now is None else _disk(found.disk_now)),
        ("disk at the best", _disk(found.disk)),
    ]
    if found.per_step is not None:
        needed, measured = (
            size(round(speed)) for speed in (found.per_step.bytes_per_second, found.per_step.measured)
        )
        rows.append(("every step needs", f"{needed}/s; the saves have {measured}/s"))
    return rows


def _projections(found: sw.results.Advice) -> list[tuple[str, str, str, str, str]]:
    rows = [
        (
            str(one.ranks),
            _time(one.mtbf),
            _time(one.cost_seconds),
            _time(one.interval_seconds),
            f"{one.lost:.2%}",
        )
        for one in found.projections
    ]
    return [("ranks", "mtbf", "cost", "best interval", "loses"), *rows]


def _disk(one: DiskForecast) -> str:
    free = f"{size(one.free_bytes)} free, "
    if one.saves is None or one.seconds is None:
        return free + "never full"
    return free + f"full after {count(one.saves, 'save')}, in {_time(one.seconds)}"


def _time(seconds: float) -> str:
    """Returns a length of time for people."""
    for unit, length in (("d", 86400), ("h", 3600), ("min", 60), ("s", 1)):
        if seconds >= 2 * length or unit == "s":
            return f"{seconds / length:.3g} {unit}"
    return ""
