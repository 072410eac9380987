"""``stepwell diff``: the differences between two checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

import click

from .command import command
from .comparing import Change, Difference, compare
from .output import FINE, PROBLEMS, Output, count, cut, safe, size
from .progress import progress
from .targets import TARGET, Target

#: Characters of an object's value that are shown in a line.
_VALUE = 40


@command("diff")
@click.argument("a", type=TARGET)
@click.argument("b", type=TARGET)
@click.option("--values/--no-values", default=True, help="Read and compare values (default).")
def diff(out: Output, a: Target, b: Target, values: bool) -> int:
    """Compare the checkpoints A and B: structure, kinds, dtypes, shapes, values.

    Arrays of one dtype are compared bit for bit, arrays of two dtypes by their numbers. Memory
    stays bounded. Exits with 1 if they differ.
    """
    with a.open() as one, b.open() as other, progress("comparing") as tell:
        found = compare(one, other, values, tell)
        sides = {"a": one, "b": other}
        names = {side: {"path": one.path, "step": one.step} for side, one in sides.items()}
    out.document(
        {
            **names,
            "same": not found.found,
            "values_compared": values,
            "common_leaves": found.common,
            "compared_bytes": found.compared_bytes,
            "only_in_a": found.only_a,
            "only_in_b": found.only_b,
            "changed": found.changes,
        }
    )
    for side, name in names.items():
        out.line(f"{side}: step {name['step']}, {safe(name['path'])}")
    out.lines(_lines(out, found, values))
    return PROBLEMS if found.found else FINE


def _lines(out: Output, found: Difference, values: bool) -> Iterator[str]:
    for side, sign, tops in (("a", "-", found.top_a), ("b", "+", found.top_b)):
        for node in tops:
            leaves = count(node.leaves, "leaf", "leaves")
            yield out.bad(sign) + f" {safe(node.path) or '.'}: only in {side}, {leaves}"
    for change in found.changes:
        yield out.bad("~") + f" {safe(change.path) or '.'}: {'; '.join(_parts(change))}"
    what = (
        f"values compared, {size(found.compared_bytes)} of each side" if values else "no values were compared"
    )
    verdict = out.bad("they differ") if found.found else out.good("no difference")
    yield f"{verdict}; {count(found.common, 'leaf', 'leaves')} in both; {what}"


def _parts(change: Change) -> Iterator[str]:
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
