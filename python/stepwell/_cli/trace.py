"""``stepwell trace``: the traces of runs and ranks, and the first step where they part."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import click

import stepwell as sw

from .command import command
from .locations import location
from .output import FINE, PROBLEMS, Output, count, safe

#: Leaves and ranks that are shown of a list.
_SHOWN = 6


@command("trace")
@click.argument("root", type=click.Path(file_okay=False))
@click.argument("other", type=click.Path(file_okay=False), required=False)
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="Only the traces of the saved step N.")
def trace(out: Output, root: str, other: str | None, step: int | None) -> int:
    """Show the traces of ROOT, and compare them: the ranks of each run, and each run that resumed a
    step with the run before. With OTHER, compare the runs of two roots step by step. Names the last
    step that is the same, the first that differs, its leaves, and likely causes.

    Exits with 1 if something differs, or if there are no traces.
    """
    found = sw.compare_traces(root, other, step=step)
    out.document(
        {
            "root": location(root),
            "other": None if other is None else location(other),
            "same": bool(found),
            "traces": found.traces,
            "drifts": found.drifts,
            "partings": found.partings,
            "compared_steps": found.compared_steps,
            "ignored": found.ignored,
        }
    )
    out.lines(_lines(out, found, step))
    return FINE if found and found.traces else PROBLEMS


def _lines(out: Output, found: sw.results.TraceReport, step: int | None) -> Iterator[str]:
    if not found.traces and step is not None:
        yield f"no traces of the saved step {step}. Without --step, those of all steps are shown"
    elif not found.traces:
        yield "no traces. CheckpointManager(prove_resume=k) writes them"
    names = _names(found.traces)
    for run in found.traces:
        steps = run.traced_steps
        shown = (
            f"step {steps[0]}" if len(steps) == 1 else f"{len(steps)} steps from {steps[0]} to {steps[-1]}"
        )
        yield f"{names[run.step, run.run]}: {count(len(run.ranks), 'rank')}, {shown}"
    for drift in found.drifts:
        yield (
            out.bad("≠") + f" {names[drift.base, drift.run]}: "
            f"ranks part at step {drift.step}{_after(drift.last_same)}"
        )
        for replica in drift.leaves[:_SHOWN]:
            others, ranks = _listed("rank", replica.other_ranks), _listed("rank", replica.ranks)
            yield f"    {safe(replica.path)}: {others} not as {ranks}"
        yield from _more(drift.leaves)
    for parting in found.partings:
        yield (
            out.bad("≠") + f" {names[parting.later_base, parting.later_run]} parts from "
            f"{names[parting.base, parting.run]} at step {parting.step}"
            f"{_after(parting.last_same)}, on {_listed('rank', parting.ranks)}"
        )
        for leaf in parting.leaves[:_SHOWN]:
            yield f"    {safe(leaf.path)}: {_WHAT[leaf.what]}"
        yield from _more(parting.leaves)
        for number, cause in enumerate(parting.causes, 1):
            yield f"    cause {number}: {safe(cause)}"
    for file, why in found.ignored.items():
        yield f"? ignored {safe(file)}: {safe(why)}"
    if found.traces and found:
        compared = found.compared_steps
        verdict = out.good("no difference") if compared else "no difference was found"
        yield verdict + f"; {count(compared, 'step') if compared else 'no step was'} compared between runs"


def _names(runs: Sequence[sw.results.TracedRun]) -> dict[tuple[int, str], str]:
    """Names each run by its saved step, and its number there. They are in the order of time."""
    names: dict[tuple[int, str], str] = {}
    for run in runs:
        number = 1 + sum(step == run.step for step, _ in names)
        names.setdefault((run.step, run.run), f"step {run.step}, run {number}")
    return names


_WHAT = {
    "value": "another value",
    "kind": "another dtype, shape or type",
    "missing": "only in the earlier run",
    "added": "only in the later run",
}


def _after(last: int | None) -> str:
    return "" if last is None else f" (the same until step {last})"


def _listed(noun: str, numbers: Sequence[int]) -> str:
    more = f" and {len(numbers) - _SHOWN} more" if len(numbers) > _SHOWN else ""
    return f"{noun if len(numbers) == 1 else noun + 's'} {', '.join(map(str, numbers[:_SHOWN]))}{more}"


def _more(leaves: Sequence[object]) -> Iterator[str]:
    if len(leaves) > _SHOWN:
        yield f"    and {len(leaves) - _SHOWN} more leaves"
