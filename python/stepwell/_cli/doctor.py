"""``stepwell doctor``: which promises hold on a file system."""

from __future__ import annotations

import click

import stepwell as sw

from .command import command
from .output import FINE, PROBLEMS, Output, columns, safe
from .retention import duration


@command("doctor")
@click.argument("path", default=".")
@click.option(
    "--timeout",
    callback=duration,
    default="30",
    show_default=True,
    metavar="TIME",
    help="The deadline of each probe.",
)
@click.option(
    "--mib",
    type=click.IntRange(min=1),
    default=32,
    show_default=True,
    metavar="N",
    help="The size of the trial checkpoint.",
)
def doctor(out: Output, path: str, timeout: float, mib: int) -> int:
    """Try the file system of PATH (default: the working directory), or the object store of a URL,
    and show which promises of stepwell hold there.

    It saves, restores, locks and deletes in a temporary directory below PATH, which it removes. The
    exit code is 1 if a promise does not hold, or if a probe has not ended in time.
    """
    report = sw.doctor(path, timeout=timeout, nbytes=mib << 20)
    out.document({"path": report.path, "ok": report.ok, "findings": report.findings})
    rows = [
        (_mark(one), one.name.replace("_", " "), one.promise, safe(one.detail)) for one in report.findings
    ]
    for line, one in zip(columns(rows, "llll"), report.findings, strict=True):
        out.line(out.bad(line) if one.needed and one.answer != "holds" else line)
    needed = {one.answer for one in report.findings if one.needed}
    if report.ok:
        verdict = "every promise holds"
    elif "missing" in needed:
        verdict = "a promise does not hold"
    else:
        verdict = "not all promises could be tried"
    out.line((out.good if report.ok else out.bad)(f"{verdict}: {safe(report.path)}"))
    return FINE if report.ok else PROBLEMS


def _mark(one: sw.results.Finding) -> str:
    if one.answer == "holds":
        return "yes"
    return ("NO" if one.needed else "no") if one.answer == "missing" else "?"
