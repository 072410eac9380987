"""``stepwell verify``: every byte is read, every checksum compared."""

from __future__ import annotations

import time
from typing import Any

import click

from .._checkpoint import VerifyReport
from .._singular import verify as verify_checkpoint
from ..errors import MisuseError
from .command import command
from .output import FINE, PROBLEMS, Output, count, safe, size
from .progress import progress
from .targets import Target, report_of, root_at, target

#: Leaves of a damaged block that are shown in its line.
_SHOWN = 4


@command("verify")
@click.argument("path", type=target)
@click.option("--all", "every", is_flag=True, help="Every step of the root PATH, not the newest alone.")
def verify(out: Output, path: Target, every: bool) -> int:
    """Read every byte of the checkpoint PATH (or ROOT@STEP; of a root: its newest step, damaged or
    not) and compare every checksum. Exits with 1 where something does not hold."""
    if every and path.step is not None:
        raise MisuseError(f"--all is for a root, and {path} is one step of it; leave one of the two out")
    steps: list[int | None] = [path.step]
    unread: list[dict[str, Any]] = []
    if every:
        rows = report_of(root_at(path.path))
        steps = [row["step"] for row in rows if row["step"] is not None]
        unread = [row for row in rows if row["step"] is None]
    reports: list[dict[str, Any]] = []
    for number, step in enumerate(steps):
        label = "verifying" if len(steps) == 1 else f"verifying step {step} ({number + 1} of {len(steps)})"
        begun = time.monotonic()
        with progress(label) as tell:
            report = verify_checkpoint(path.path, step, progress=tell)
        reports.append(_document(report))
        _print(out, report, time.monotonic() - begun)
    for row in unread:
        out.line(f"{out.bad('no step')}: {safe(row['name'])}: {safe(row['damage'])}")
    ok = all(report["ok"] for report in reports) and not unread and bool(reports)
    if every and not reports:
        out.line("there is no step")
    out.document(
        {
            "ok": ok,
            "checkpoints": reports,
            "quarantined": [{"name": row["name"], "reason": row["damage"]} for row in unread],
        }
    )
    return FINE if ok else PROBLEMS


def _print(out: Output, report: VerifyReport, seconds: float) -> None:
    name = f"step {report.step}: {safe(report.path)}" if report.step is not None else safe(report.path)
    if report.ok:
        rate = f", {size(int(report.nbytes / seconds))}/s" if seconds > 0 else ""
        out.line(
            f"{out.good('whole')}: {name}: {count(report.files, 'file')}, {size(report.nbytes)} read{rate}"
        )
        return
    out.line(f"{out.bad('damaged')}: {name}: {count(len(report.damages), 'damage')}")
    for damage in report.damages:
        block = "" if damage.block is None else f", block {damage.block}"
        few = ", ".join(safe(leaf) for leaf in damage.leaves[:_SHOWN])
        more = f" and {len(damage.leaves) - _SHOWN} more" if len(damage.leaves) > _SHOWN else ""
        leaves = f" (leaves {few}{more})" if damage.leaves else ""
        out.line(f"  {safe(damage.file)}{block}: {safe(damage.what)}{leaves}")


def _document(report: VerifyReport) -> dict[str, Any]:
    return {
        "path": report.path,
        "step": report.step,
        "ok": report.ok,
        "files": report.files,
        "bytes": report.nbytes,
        "damages": [
            {
                "file": damage.file,
                "block": damage.block,
                "leaves": list(damage.leaves),
                "what": damage.what,
            }
            for damage in report.damages
        ],
    }
