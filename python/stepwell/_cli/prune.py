"""``stepwell prune``: retention, applied once to a root that no run holds."""

from __future__ import annotations

from typing import Unpack

import click

from .command import agreed, changing, check_can_ask, command
from .leftovers import scan
from .output import FINE, PROBLEMS, Output, numbers, safe, size
from .retention import (
    RetentionOptions,
    check_names,
    decision_lines,
    decisions,
    retention_of,
    retention_options,
    summary,
)
from .targets import manager_of
from .writing import writer


@command("prune")
@click.argument("root")
@retention_options
@changing
def prune(out: Output, root: str, yes: bool, dry_run: bool, **options: Unpack[RetentionOptions]) -> int:
    """Keep the steps of ROOT that any option selects, and delete the rest. The newest step always
    stays. A metric that no step has and a step that does not exist are refused.

    Asks before it deletes. Damaged steps are neither counted nor deleted. Refused while a training
    run holds the root; --dry-run works meanwhile.
    """
    retention = retention_of(options)
    if retention is None:
        raise click.UsageError("say what stays: --keep-latest N, --keep-every N, --keep-best METRIC, …")
    check_can_ask(out, yes, dry_run)
    deleted: list[int] = []
    thinned: list[int] = []
    opened = manager_of(root, retention) if dry_run else writer(root, retention, "prune")
    with opened as manager:
        check_names(manager, options)
        path, rows = manager.root, decisions(manager)
        out.lines(decision_lines(out, rows))
        before = {row.step: len(row.dropped) for row in manager.inspect()}
        if not dry_run:
            nothing = all(row.decision == "keep" for row in rows)
            if not nothing and not agreed(out, yes, "this would be: " + summary(rows)):
                return PROBLEMS
            deleted = manager.apply_retention()
        after = [row for row in manager.inspect() if row.step is not None]
        thinned = [row.step for row in after if row.step is not None and len(row.dropped) > before[row.step]]
        damaged = [row.step for row in after if row.step is not None and row.damage is not None]
    done = {*deleted, *thinned}
    held = [row.step for row in rows if row.decision != "keep" and not dry_run and row.step not in done]
    waiting = [] if dry_run else scan(path).trash
    effective = [row for row in rows if row.step not in held]
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
            "bytes_freed": sum(row.bytes_freed for row in effective),
        }
    )
    out.line(("would be: " if dry_run else "") + summary(effective))
    if held:
        out.line(f"unchanged, because somebody reads them: steps {numbers(held)}")
    if damaged:
        out.line(f"damaged, neither counted nor deleted: steps {numbers(damaged)}")
    for one in waiting:
        out.line(
            f"{safe(one.name)} ({size(one.nbytes)}) is retired; the next writer or gc deletes it once its readers are gone"
        )
    return FINE
