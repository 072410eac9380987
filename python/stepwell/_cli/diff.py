"""``stepwell diff``: what two checkpoints do not have in common."""

from __future__ import annotations

from collections.abc import Iterator

import click

from .command import command
from .comparing import Change, Difference, compare
from .output import FINE, PROBLEMS, Output, count, number, safe, size
from .progress import progress
from .targets import Target, target
from .tree import Tree, plain_value

#: Characters of an object's value that are shown in a line.
_VALUE = 40


@command("diff")
@click.argument("a", type=target)
@click.argument("b", type=target)
@click.option(
    "--values/--no-values", default=True, help="Whether values are read and compared (the default)."
)
def diff(out: Output, a: Target, b: Target, values: bool) -> int:
    """Compare the checkpoints A and B: structure, kinds, dtypes, shapes, values.

    Arrays of one dtype are compared bit for bit, arrays of two by their numbers. Memory stays
    bounded. Exits with 1 where they differ.
    """
    with a.open() as one, b.open() as other, progress("comparing") as tell:
        tree_a, tree_b = Tree(one), Tree(other)
        found = compare(tree_a, tree_b, values, tell)
    if out.as_json:
        out.document(
            {
                "a": {"path": tree_a.path, "step": tree_a.step},
                "b": {"path": tree_b.path, "step": tree_b.step},
                "same": not found.found,
                "values_compared": values,
                "common_leaves": found.common,
                "compared_bytes": found.compared_bytes,
                "only_in_a": found.only_a,
                "only_in_b": found.only_b,
                "changed": [_document(change) for change in found.changes],
            }
        )
    else:
        out.line(f"a: step {tree_a.step}, {safe(tree_a.path)}")
        out.line(f"b: step {tree_b.step}, {safe(tree_b.path)}")
        out.lines(_lines(out, found, values))
    return PROBLEMS if found.found else FINE


def _lines(out: Output, found: Difference, values: bool) -> Iterator[str]:
    for side, sign, tops in (("a", "-", found.top_a), ("b", "+", found.top_b)):
        for path, leaves in tops:
            yield out.bad(sign) + f" {safe(path) or '.'}: only in {side}, {count(leaves, 'leaf', 'leaves')}"
    for change in found.changes:
        yield out.bad("~") + f" {safe(change.path) or '.'}: {'; '.join(_told(change))}"
    what = (
        f"values compared, {size(found.compared_bytes)} of each side" if values else "no values were compared"
    )
    verdict = "they differ" if found.found else "no difference"
    yield f"{out.bad(verdict) if found.found else out.good(verdict)}; {count(found.common, 'leaf', 'leaves')} in both; {what}"


def _told(change: Change) -> Iterator[str]:
    if change.kind is not None:
        yield f"{safe(change.kind[0])} → {safe(change.kind[1])}"
    if change.dtype is not None:
        yield f"{change.dtype[0]} → {change.dtype[1]}"
    if change.shape is not None:
        yield f"{list(change.shape[0])} → {list(change.shape[1])}"
    if change.values is not None:
        values = change.values
        yield f"{values.differing} of {values.elements} elements differ, by at most {values.max_abs:g}"
    if change.objects is not None:
        yield f"{_cut(change.objects[0])} → {_cut(change.objects[1])}"


def _cut(value: object) -> str:
    shown = safe(repr(value))
    return shown if len(shown) <= _VALUE else shown[: _VALUE - 1] + "…"


def _document(change: Change) -> dict[str, object]:
    values = change.values
    return {
        "path": change.path,
        "kind": change.kind,
        "dtype": change.dtype,
        "shape": change.shape,
        "elements": None if values is None else values.elements,
        "differing_elements": None if values is None else values.differing,
        "max_abs_difference": None if values is None else number(values.max_abs),
        "objects": None if change.objects is None else [plain_value(one) for one in change.objects],
    }
