"""The decisions of retention for a root, as text and JSON, for ``prune``, ``plan`` and
``report``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from .._manager import CheckpointManager
from .._options import Options
from .._retention import Retention
from .output import Output, columns, count, safe, size
from .targets import report_of


def manager_of(root: str, retention: Retention | None, read_only: bool) -> CheckpointManager:
    """A manager of a root that is there: one that only looks, or its writer."""
    return CheckpointManager(
        root, retention=retention, read_only=read_only, coordinator=None, options=Options(create=False)
    )


def planned(root: str, retention: Retention) -> list[dict[str, Any]]:
    """The decision about every whole step, in their order; read-only. Damaged ones are neither
    counted nor deleted, and have none."""
    with manager_of(root, retention, read_only=True) as manager:
        return decisions(manager.plan_retention(), report_of(root))


def decisions(plan: dict[int, dict[str, Any]], rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """A plan of the engine, with what it would free."""
    found = []
    of_step = {row["step"]: row for row in rows if row["step"] is not None}
    for step, decision in sorted(plan.items()):
        row = of_step.get(step)
        items = [] if row is None else row["items"]
        kept = decision.get("items")
        if decision["decision"] == "delete":
            what, kept_items, reasons = "delete", [], [decision["reason"]]
        elif isinstance(kept, dict):
            what, kept_items, reasons = "thin", sorted(kept["only"]), decision["reasons"]
        else:
            what, kept_items, reasons = "keep", [item["name"] for item in items], decision["reasons"]
        freed = sum(item["bytes"] for item in items if item["name"] not in kept_items)
        found.append(
            {
                "step": step,
                "decision": what,
                "items": kept_items,
                "reasons": reasons,
                "bytes": 0 if row is None else row["bytes"],
                "bytes_freed": freed,
            }
        )
    return found


def plan_lines(out: Output, rows: list[dict[str, Any]]) -> Iterator[str]:
    """The decisions, one a line."""
    texts = []
    for row in rows:
        reasons = "; ".join(safe(reason) for reason in row["reasons"])
        only = f" to {', '.join(safe(item) for item in row['items'])}" if row["decision"] == "thin" else ""
        freed = size(row["bytes_freed"]) if row["bytes_freed"] else ""
        texts.append((str(row["step"]), row["decision"] + only, freed, reasons))
    lines = columns([("step", "decision", "frees", "why"), *texts], "rlrl")
    yield "  " + out.dim(lines[0])
    for line, row in zip(lines[1:], rows, strict=True):
        yield "  " + (out.bad(line) if row["decision"] == "delete" else line)


def summary(rows: list[dict[str, Any]]) -> str:
    """The decisions in one line."""
    counted = {what: sum(row["decision"] == what for row in rows) for what in ("keep", "thin", "delete")}
    freed = size(sum(row["bytes_freed"] for row in rows))
    return f"{count(counted['keep'], 'step')} kept, {counted['thin']} thinned, {counted['delete']} deleted; {freed} freed"
