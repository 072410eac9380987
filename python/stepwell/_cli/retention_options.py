"""Options that select the steps to keep, for ``prune``, ``plan`` and ``report``. A step that any of
them selects stays."""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import or_
from typing import Any, TypeVar

import click

from .._retention import Retention, keep_best, keep_every, keep_latest, keep_newer_than, keep_steps

_Function = TypeVar("_Function", bound=Callable[..., Any])

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def _age(_: click.Context, __: click.Parameter, given: str | None) -> float | None:
    """An age: seconds, or a number with a unit."""
    if given is None:
        return None
    unit = _UNITS.get(given[-1:])
    try:
        age = float(given if unit is None else given[:-1]) * (unit or 1)
    except ValueError:
        age = -1.0
    if not 0 <= age < float("inf"):
        raise click.BadParameter(f"{given!r} is no age; write 3600, 90m, 12h, 7d or 2w")
    return age


_OPTIONS = (
    click.option("--keep-latest", type=click.IntRange(min=0), metavar="N", help="The newest N stay."),
    click.option("--keep-every", type=click.IntRange(min=1), metavar="N", help="Steps divisible by N stay."),
    click.option(
        "--items",
        multiple=True,
        metavar="GLOB",
        help="Of the steps that --keep-every keeps, only these items: the rest of them is thinned away. Repeatable.",
    ),
    click.option("--keep-best", metavar="METRIC", help="The best by a metric stay; needs --mode."),
    click.option(
        "--mode", type=click.Choice(["min", "max"]), help="Whether the least or the greatest is best."
    ),
    click.option(
        "--best-count",
        type=click.IntRange(min=1),
        metavar="N",
        help="How many --keep-best keeps; 1 if not said.",
    ),
    click.option(
        "--keep-newer-than",
        callback=_age,
        metavar="AGE",
        help="Steps that were committed less than AGE ago stay: seconds, or 90m, 12h, 7d, 2w.",
    ),
    click.option(
        "--keep-step",
        multiple=True,
        type=click.IntRange(min=0),
        metavar="STEP",
        help="This step stays. Repeatable.",
    ),
)

#: Names of the parameters.
NAMES = (
    "keep_latest",
    "keep_every",
    "items",
    "keep_best",
    "mode",
    "best_count",
    "keep_newer_than",
    "keep_step",
)


def retention_options(function: _Function) -> _Function:
    """Gives a command all of them."""
    for option in reversed(_OPTIONS):
        function = option(function)
    return function


def retention_of(options: dict[str, Any]) -> Retention | None:
    """The rule that the options make; ``None`` where none was given."""
    if options["items"] and options["keep_every"] is None:
        raise click.UsageError("--items says what --keep-every keeps of its steps: pass that too")
    if options["keep_best"] is None and (options["mode"] or options["best_count"]):
        raise click.UsageError("--mode and --best-count belong to --keep-best METRIC: pass that too")
    if options["keep_best"] is not None and options["mode"] is None:
        raise click.UsageError("--keep-best needs --mode min (as for a loss) or --mode max")
    rules: list[Retention] = []
    if options["keep_latest"] is not None:
        rules.append(keep_latest(options["keep_latest"]))
    if options["keep_every"] is not None:
        rules.append(keep_every(options["keep_every"], list(options["items"]) or None))
    if options["keep_best"] is not None:
        rules.append(keep_best(options["best_count"] or 1, options["keep_best"], options["mode"]))
    if options["keep_newer_than"] is not None:
        rules.append(keep_newer_than(options["keep_newer_than"]))
    if options["keep_step"]:
        rules.append(keep_steps(options["keep_step"]))
    return reduce(or_, rules) if rules else None
