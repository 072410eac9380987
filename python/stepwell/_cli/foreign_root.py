"""``stepwell ls`` of a root of another library: its steps, and why some are passed over."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator

import stepwell as sw

from .output import FINE, PROBLEMS, Output, columns, count, local, safe

_SHOWN = ("name", "path", "incomplete", "has_checksums")
_HEADS = ("step", "modified", "name", "")


def list_foreign_root(out: Output, root: sw.results.Root, last: int | None) -> int:
    """Prints the steps of a root."""
    shown = root.steps if last is None else root.steps[-last:]
    out.document(
        {
            "root": root.path,
            "family": root.family,
            "latest": _document(root.latest),
            "best": _document(root.best),
            "number_of_steps": len(root.steps),
            "steps": [_document(step) for step in shown],
        }
    )
    out.line(f"{safe(root.path)}: {safe(root.family)}, {count(len(root.steps), 'step')}")
    if len(shown) < len(root.steps):
        out.line(out.dim(f"  the newest {len(shown)} of {len(root.steps)}:"))
    out.lines(_lines(out, root, shown))
    return FINE if all(step.incomplete is None for step in root.steps) else PROBLEMS


def _document(step: sw.results.RootStep | None) -> dict[str, object] | None:
    if step is None:
        return None
    return {"step": step.number, **{name: getattr(step, name) for name in _SHOWN}}


def _lines(out: Output, root: sw.results.Root, steps: tuple[sw.results.RootStep, ...]) -> Iterator[str]:
    heads, *lines = columns([_HEADS, *(_cells(root, step) for step in steps)], "rlll")
    yield out.dim("  " + heads.rstrip())
    for line, step in zip(lines, steps, strict=True):
        yield "  " + line.rstrip()
        if step.incomplete is not None:
            yield "    " + out.bad("passed over: ") + safe(step.incomplete)


def _cells(root: sw.results.Root, step: sw.results.RootStep) -> tuple[str, str, str, str]:
    try:
        modified = local(datetime.datetime.fromtimestamp(os.stat(step.path).st_mtime, datetime.UTC))
    except (OSError, ValueError, OverflowError):
        modified = "-"
    marks = [name for name, one in (("latest", root.latest), ("best", root.best)) if one is step]
    marks += ["adopted"] if step.has_checksums else []
    number = "-" if step.number is None else str(step.number)
    return number, modified, safe(step.name), ", ".join(marks)
