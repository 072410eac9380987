"""``stepwell ls``: the steps of a root and the entries beside them, or the files of one
checkpoint."""

from __future__ import annotations

import os
from collections.abc import Iterator

import click

import stepwell as sw

from ..errors import MisuseError
from .command import command
from .leftovers import Leftovers, scan
from .locations import is_directory, is_root, is_store, location
from .output import FINE, PROBLEMS, Output, columns, count, local, safe, size
from .targets import TARGET, Target, root_of_another

#: The most metrics and metadata keys in a step's line.
_SHOWN = 4
_HEADS = ("step", "committed", "size", "items", "metrics", "metadata")
_WRITER = {True: ", held by a writer", False: "", None: ", and it is unknown whether a writer holds it"}
_TEMPORARY = {True: "in flight", False: "dead; gc deletes it", None: "unknown whether its writer lives"}


@command("ls")
@click.argument("path", type=TARGET)
@click.option("-n", "--last", type=click.IntRange(min=1), metavar="N", help="Only the newest N steps.")
def ls(out: Output, path: Target, last: int | None) -> int:
    """List the steps of the root PATH: number, time, size, items, metrics; and what is damaged, in
    flight, or in a branch. PATH may be a root of another library: its steps are listed, and why
    some are passed over. PATH may also be a checkpoint (ROOT@STEP, or one of another library): its
    format and its files are listed then.

    Exits with 1 if a step is damaged or incomplete, if another directory has a step's name, or if
    the root has no steps.
    """
    if path.step is None and not os.path.isfile(path.path):
        root = location(path.path)
        if not is_store(root) or is_root(root):
            # Imports no numpy, which takes longer than a listing of steps.
            rows = sw.inspect(path.path)
            if rows or is_root(root):
                return _list_steps(out, root, rows, last)
        if is_directory(root) and (found := root_of_another(root)) is not None:
            from .foreign_root import list_foreign_root

            return list_foreign_root(out, found, last)
    from .files import list_checkpoint

    if last is not None:
        raise MisuseError(f"--last is for a root, and {path} is not one; leave it out")
    list_checkpoint(out, path)
    return FINE


def _list_steps(out: Output, path: str, rows: list[sw.results.StepInfo], last: int | None) -> int:
    beside = scan(path)
    steps = [row for row in rows if row.step is not None]
    others = [row for row in rows if row.step is None]
    whole = [row.step for row in steps if row.damage is None]
    shown = steps if last is None else steps[-last:]
    out.document(
        {
            "root": path,
            "latest_step": max((step for step in whole if step is not None), default=None),
            "number_of_steps": len(steps),
            "bytes": sum(row.nbytes for row in steps),
            "writer": beside.writer,
            "steps": shown,
            "quarantined": [{"name": row.name, "reason": row.damage} for row in others],
            **beside.document(),
        }
    )
    total = size(sum(row.nbytes for row in steps))
    out.line(f"{safe(path)}: {count(len(steps), 'step')}, {total}{_WRITER[beside.writer]}")
    if len(shown) < len(steps):
        out.line(out.dim(f"  the newest {len(shown)} of {len(steps)}:"))
    out.lines(_lines(out, path, shown, others, beside))
    return FINE if steps and len(whole) == len(steps) and not others else PROBLEMS


def _lines(
    out: Output,
    root: str,
    steps: list[sw.results.StepInfo],
    others: list[sw.results.StepInfo],
    beside: Leftovers,
) -> Iterator[str]:
    heads, *lines = columns([_HEADS, *(_cells(row, root) for row in steps)], "rlrlll")
    if steps:
        yield out.dim("  " + heads)
    for line, row in zip(lines, steps, strict=True):
        yield "  " + line
        if row.damage is not None:
            yield "    " + out.bad("damaged: ") + safe(row.damage)
    for row in others:
        yield f"  {out.bad('no step:')} {safe(row.name)}: {safe(row.damage)}"
    for one in beside.temporaries:
        yield f"  temporary: {safe(one.name)} ({size(one.nbytes)}, {_TEMPORARY[one.live]})"
    for one in beside.trash:
        read = "a reader has it; gc deletes it later" if one.live else "retired; gc deletes it"
        yield f"  trash: {safe(one.name)} ({size(one.nbytes)}, {read})"
    for one in beside.set_aside:
        yield f"  set aside: {safe(one.name)} ({size(one.nbytes)}, it was in the way of a save)"
    for branch, moved in beside.branches.items():
        names = ", ".join(safe(one.label) for one in moved)
        yield f"  branch {safe(branch)}: {names} ({size(sum(one.nbytes for one in moved))}, kept by a rewind)"


def _cells(row: sw.results.StepInfo, root: str) -> list[str]:
    files = row.adopted
    held = " ".join([item.name for item in row.items] + [f"-{item}" for item in row.dropped])
    cells = [
        str(row.step),
        local(row.committed),
        size(row.nbytes if files is None else files.nbytes),
        held if files is None else f"adopted from {_near(files.path, root)} ({files.family})",
        _few([f"{name}={value:.6g}" for name, value in row.metrics.items()]),
        _few(row.metadata_keys),
    ]
    return [safe(cell) for cell in cells]


def _near(path: str, root: str) -> str:
    """A path relative to a root, if that is shorter."""
    return min(os.path.relpath(path, os.path.realpath(root)), path, key=len)


def _few(texts: list[str] | tuple[str, ...]) -> str:
    rest = f" … {len(texts) - _SHOWN} more" if len(texts) > _SHOWN else ""
    return " ".join(texts[:_SHOWN]) + rest
