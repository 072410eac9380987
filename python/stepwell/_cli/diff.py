"""``stepwell diff``: the differences between two checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import click

import stepwell as sw

from .command import command
from .output import FINE, PROBLEMS, Output, count, cut, safe, size
from .progress import progress
from .targets import TARGET, Target, format_of, mapped

#: Characters of an object's value that are shown in a line.
_VALUE = 40
#: Names that are shown of a list.
_SHOWN = 4


@command("diff")
@click.argument("a", type=TARGET)
@click.argument("b", type=TARGET)
@mapped("Give the leaves of A the names and shapes of this map.")
@click.option("--include", multiple=True, metavar="GLOB", help="Compare only these leaves. Repeatable.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Leave these leaves out. Repeatable.")
@click.option("--values/--no-values", default=True, help="Read and compare values (default).")
def diff(
    out: Output,
    a: Target,
    b: Target,
    map: sw.maps.Map | None,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    values: bool,
) -> int:
    """Compare the checkpoints A and B: structure, kinds, dtypes, shapes, values.

    A and B may have two formats. Arrays of one dtype are compared bit for bit, arrays of two dtypes
    by their numbers. Memory stays bounded. Exits with 1 if they differ.
    """
    with a.open() as one, b.open() as other, progress("comparing") as tell:
        found = one.diff(
            other,
            map=map,
            include=include or None,
            exclude=exclude,
            values=values,
            progress=tell,
        )
        sides = {"a": _facts(a, one), "b": _facts(b, other)}
    out.document(
        {
            **sides,
            "same": not found,
            "values_compared": values,
            "common_leaves": found.common,
            "compared_bytes": found.compared_nbytes,
            "only_in_a": found.only_a,
            "only_in_b": found.only_b,
            "changed": found.changes,
            "opaque": found.opaque,
        }
    )
    for side, facts in sides.items():
        what = facts["format"] if facts["step"] is None else f"step {facts['step']}"
        out.line(f"{side}: {what}, {safe(facts['path'])}")
    out.lines(_lines(out, found, values))
    return PROBLEMS if found else FINE


def _facts(target: Target, checkpoint: sw.Checkpoint) -> dict[str, object]:
    """The path, format and step of a side. Files of other libraries have no step."""
    found = format_of(checkpoint)
    step = checkpoint.step if found == "stepwell" else None
    return {"path": checkpoint.path, "format": found, "step": step}


def _lines(out: Output, found: sw.results.Difference, values: bool) -> Iterator[str]:
    for side, sign, tops in (("a", "-", found.top_a), ("b", "+", found.top_b)):
        for node in tops:
            leaves = count(node.leaves, "leaf", "leaves")
            tied = "" if node.tied_to is None else f", tied to {safe(node.tied_to)}"
            yield out.bad(sign) + f" {safe(node.path) or '.'}: only in {side}, {leaves}{tied}"
    for change in found.changes:
        other = "" if change.path_b is None else f" and {safe(change.path_b)}"
        yield out.bad("~") + f" {safe(change.path) or '.'}{other}: {'; '.join(_parts(change))}"
    if found.opaque:
        more = f" and {len(found.opaque) - _SHOWN} more" if len(found.opaque) > _SHOWN else ""
        yield f"? opaque, not compared: {', '.join(map(safe, found.opaque[:_SHOWN]))}{more}"
    what = (
        f"values compared, {size(found.compared_nbytes)} of each side"
        if values
        else "no values were compared"
    )
    verdict = out.bad("they differ") if found else out.good("no difference")
    yield f"{verdict}; {count(found.common, 'leaf', 'leaves')} in both; {what}"


def _parts(change: sw.results.Change) -> Iterator[str]:
    for pair in (change.kind, change.dtype, change.shape):
        if pair is not None:
            yield " → ".join(safe(list(side) if isinstance(side, tuple) else side) for side in pair)
    if change.max_abs_difference is not None:
        yield (
            f"{change.differing_elements} of {change.elements} elements differ, "
            f"by at most {change.max_abs_difference:g}"
        )
    if change.objects is not None:
        yield " → ".join(cut(repr(value), _VALUE) for value in change.objects)
