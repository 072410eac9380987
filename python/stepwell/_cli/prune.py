"""``stepwell prune``: retention, applied once to a root that no run holds."""

from __future__ import annotations

import json
from typing import Any

import click

from . import leftovers
from .command import command
from .output import FINE, Output, safe, size
from .retention_options import retention_of, retention_options
from .retention_plan import decisions, plan_lines, planned, summary
from .targets import report_of, root_at
from .writing import writer


@command("prune")
@click.argument("root")
@retention_options
@click.option("--dry-run", is_flag=True, help="Say what would be done, and do nothing.")
def prune(out: Output, root: str, dry_run: bool, **options: Any) -> int:
    """Keep the steps of ROOT that any option selects, and delete the rest. The newest step always
    stays.

    Damaged steps are neither counted nor deleted. Refused while a training run holds the root;
    --dry-run works meanwhile.
    """
    retention = retention_of(options)
    if retention is None:
        raise click.UsageError("say what stays: --keep-latest N, --keep-every N, --keep-best METRIC, …")
    path = root_at(root)
    if dry_run:
        rows = planned(path, retention)
        deleted: list[int] = []
        thinned: list[int] = []
    else:
        with writer(path, retention, "prune") as manager:
            core = manager._open()
            before = json.loads(core.report())
            rows = decisions(manager.plan_retention(), before)
            deleted = core.apply_retention()
            thinned = _thinned(before, json.loads(core.report()))
    damaged = [
        row["step"] for row in report_of(path) if row["step"] is not None and row["damage"] is not None
    ]
    held = [] if dry_run else _held(rows, deleted, thinned)
    waiting = [] if dry_run else leftovers.scan(path).trash
    out.document(
        {
            "root": path,
            "dry_run": dry_run,
            "decisions": rows,
            "deleted": deleted,
            "thinned": thinned,
            "held": held,
            "damaged": damaged,
            "waiting_for_readers": [{"name": one.name, "bytes": one.nbytes} for one in waiting],
            "bytes_freed": sum(row["bytes_freed"] for row in rows if row["step"] not in held),
        }
    )
    out.lines(plan_lines(out, rows))
    out.line(("would be: " if dry_run else "") + summary([row for row in rows if row["step"] not in held]))
    if held:
        out.line(f"left as they are, since somebody reads them: steps {', '.join(map(str, held))}")
    if damaged:
        out.line(f"damaged, neither counted nor deleted: steps {', '.join(map(str, damaged))}")
    for one in waiting:
        out.line(
            f"{safe(one.name)} ({size(one.nbytes)}) is out of sight, and deleted by the next writer or gc once its readers are gone"
        )
    return FINE


def _thinned(before: list[dict[str, Any]], after: list[dict[str, Any]]) -> list[int]:
    """Steps that lost items."""
    dropped = {row["step"]: len(row["dropped"]) for row in before}
    return [row["step"] for row in after if len(row["dropped"]) > dropped.get(row["step"], 0)]


def _held(rows: list[dict[str, Any]], deleted: list[int], thinned: list[int]) -> list[int]:
    """Steps that were to lose something and did not."""
    done = {*deleted, *thinned}
    return [row["step"] for row in rows if row["decision"] != "keep" and row["step"] not in done]
