"""``stepwell repair``: rebuild lost or damaged indexes from the data files."""

from __future__ import annotations

import click

import stepwell as sw

from ..errors import MisuseError
from .command import agreed, changing, check_can_ask, command
from .output import FINE, PROBLEMS, Output, count, safe
from .progress import progress
from .targets import TARGET, Target


@command("repair")
@click.argument("path", type=TARGET)
@click.option("--step", type=click.IntRange(min=0), help="The step, if PATH is a root.")
@changing
def repair(out: Output, path: Target, step: int | None, yes: bool, dry_run: bool) -> int:
    """Rebuild lost or damaged indexes of the checkpoint PATH (or ROOT@STEP) from the footers of its
    data files, then verify every byte.

    For a root, repairs the newest step with a manifest. Asks if an index is damaged. Nothing is
    written unless every index can be rebuilt. Exits with 1 if one cannot, if other damage is left,
    or if a newer step has no valid manifest.
    """
    if path.step is not None and step is not None:
        raise MisuseError(f"{path} names its step already; leave out --step")
    step = path.step if step is None else step
    report = sw.repair(path.path, step, dry_run=True)
    rebuilt, passed_over = report.rebuilt, report.passed_over
    for index in rebuilt:
        leaves = count(index.leaves, "leaf", "leaves")
        out.line(f"can be rebuilt: {safe(index.path)} ({leaves}): {safe(index.damage)}")
    if rebuilt:
        check_can_ask(out, yes, dry_run)
    if not dry_run:
        question = f"write {count(len(rebuilt), 'index', 'indexes')} to {safe(report.path)}"
        if rebuilt and not agreed(out, yes, question):
            return PROBLEMS
        with progress("verifying") as tell:
            report = sw.repair(report.path, progress=tell)
    damages = () if report.verification is None else report.verification.damages
    out.document(
        {
            "path": report.path,
            "dry_run": dry_run,
            "ok": report.ok,
            "passed_over": [{"name": name, "reason": reason} for name, reason in passed_over],
            "indexes": report.indexes,
            "damages": damages,
        }
    )
    if not rebuilt:
        out.line(f"every index is intact: {safe(report.path)}")
    elif not dry_run:
        out.line(f"rebuilt {count(len(report.rebuilt), 'index', 'indexes')}: {safe(report.path)}")
    for damage in damages:
        out.line(f"{out.bad('damaged')}: {safe(damage.file)}: {safe(damage.what)}")
    if report.ok and not dry_run:
        out.line(f"{out.good('whole')}: {safe(report.path)}")
    return FINE if report.ok and not passed_over else PROBLEMS
