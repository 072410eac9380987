"""Retention on the command line: the options that select steps, and the decisions about a root, for
``prune`` and ``report``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import reduce
from operator import or_
from typing import Literal, TypedDict, TypeVar, final

import click

import stepwell as sw

from ..errors import StepNotFound
from .output import Output, columns, count, numbers, safe, size

_Function = TypeVar("_Function", bound=Callable[..., int])

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}


def duration(_: click.Context, __: click.Parameter, given: str | None) -> float | None:
    """Parses seconds, or a number with a unit."""
    if given is None:
        return None
    unit = _UNITS.get(given[-1:])
    try:
        length = float(given if unit is None else given[:-1]) * (unit or 1)
    except ValueError:
        length = -1.0
    if not 0 <= length < float("inf"):
        raise click.BadParameter(f"{given!r} is no length of time; write 3600, 90m, 12h, 7d or 2w")
    return length


_POSITIVE = click.IntRange(min=1)
_ANY = click.IntRange(min=0)
_OPTIONS = (
    click.option("--keep-latest", type=_POSITIVE, metavar="N", help="Keep the newest N steps."),
    click.option("--keep-every", type=_POSITIVE, metavar="N", help="Keep steps divisible by N."),
    click.option(
        "--items",
        multiple=True,
        metavar="GLOB",
        help="Keep only these items of the steps of --keep-every. Repeatable.",
    ),
    click.option("--keep-best", metavar="METRIC", help="Keep the best steps by a metric; needs --mode."),
    click.option("--mode", type=click.Choice(["min", "max"]), help="Which value of the metric is best."),
    click.option(
        "--best-count", type=_POSITIVE, metavar="N", help="How many --keep-best keeps (default: 1)."
    ),
    click.option(
        "--keep-newer-than",
        callback=duration,
        metavar="AGE",
        help="Keep newer steps: seconds, or 90m, 12h, 7d, 2w.",
    ),
    click.option("--keep-step", multiple=True, type=_ANY, metavar="STEP", help="Keep this step. Repeatable."),
)


def retention_options(function: _Function) -> _Function:
    """Gives a command all options of retention."""
    return reduce(lambda made, option: option(made), reversed(_OPTIONS), function)


@final
class RetentionOptions(TypedDict):
    """The values of these options."""

    keep_latest: int | None
    keep_every: int | None
    items: tuple[str, ...]
    keep_best: str | None
    mode: Literal["min", "max"] | None
    best_count: int | None
    keep_newer_than: float | None
    keep_step: tuple[int, ...]


def retention_of(options: RetentionOptions) -> sw.Retention | None:
    """Returns the rule that the options make; ``None`` without any."""
    if options["items"] and options["keep_every"] is None:
        raise click.UsageError("--items needs --keep-every: it says what stays of those steps")
    if options["keep_best"] is None and (options["mode"] or options["best_count"]):
        raise click.UsageError("--mode and --best-count need --keep-best METRIC")
    rules: list[sw.Retention] = []
    if options["keep_latest"] is not None:
        rules.append(sw.keep_latest(options["keep_latest"]))
    if options["keep_every"] is not None:
        rules.append(sw.keep_every(options["keep_every"], list(options["items"]) or None))
    if options["keep_best"] is not None:
        if options["mode"] is None:
            raise click.UsageError("--keep-best needs --mode min (as for a loss) or --mode max")
        rules.append(sw.keep_best(options["best_count"] or 1, options["keep_best"], options["mode"]))
    if options["keep_newer_than"] is not None:
        rules.append(sw.keep_newer_than(options["keep_newer_than"]))
    if options["keep_step"]:
        rules.append(sw.keep_steps(options["keep_step"]))
    return reduce(or_, rules) if rules else None


def check_names(manager: sw.CheckpointManager, options: RetentionOptions) -> None:
    """Refuses a metric that no step has, and a step that does not exist: it is misspelt, and the
    steps that it should keep would go."""
    if options["keep_best"] is not None:
        manager.best_step(options["keep_best"], options["mode"])
    found = {row.step for row in manager.inspect()}
    if missing := [step for step in options["keep_step"] if step not in found]:
        raise StepNotFound(f"{manager.root} has no step {numbers(missing)}; `stepwell ls` lists the steps")


@final
@dataclass(frozen=True, slots=True)
class Decided:
    """The decision about a step, with its bytes."""

    step: int
    decision: str
    #: The items that stay.
    items: tuple[str, ...]
    reasons: tuple[str, ...]
    nbytes: int
    bytes_freed: int


def decisions(manager: sw.CheckpointManager) -> list[Decided]:
    """Returns the decision about every whole step, in order. Damaged steps are neither counted nor
    deleted, and have none."""
    found = []
    rows = {row.step: row for row in manager.inspect()}
    for one in manager.plan_retention():
        row = rows[one.step]
        items = one.items if one.decision != "keep" else tuple(item.name for item in row.items)
        freed = sum(item.nbytes for item in row.items if item.name not in items)
        found.append(Decided(one.step, one.decision, items, one.reasons, row.nbytes, freed))
    return found


def decision_lines(out: Output, rows: list[Decided]) -> Iterator[str]:
    """The decisions, one a line."""
    texts = []
    for row in rows:
        only = f" to {', '.join(row.items)}" if row.decision == "thin" else ""
        freed = size(row.bytes_freed) if row.bytes_freed else ""
        texts.append((str(row.step), safe(row.decision + only), freed, safe("; ".join(row.reasons))))
    heads, *lines = columns([("step", "decision", "frees", "why"), *texts], "rlrl")
    yield "  " + out.dim(heads)
    for line, row in zip(lines, rows, strict=True):
        yield "  " + (out.bad(line) if row.decision == "delete" else line)


def summary(rows: list[Decided]) -> str:
    """Returns the decisions in one line."""
    keep, thin, delete = (sum(row.decision == what for row in rows) for what in ("keep", "thin", "delete"))
    freed = size(sum(row.bytes_freed for row in rows))
    return f"{count(keep, 'step')} kept, {thin} thinned, {delete} deleted; {freed} freed"
