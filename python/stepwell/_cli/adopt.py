"""``stepwell adopt``: checksums for another library's checkpoint."""

from __future__ import annotations

import click

import stepwell as sw

from .command import command
from .output import FINE, PROBLEMS, Output, count, fields_of, safe, size
from .progress import progress
from .targets import TARGET, Target


@command("adopt")
@click.argument("path", type=TARGET)
@click.option("--check", is_flag=True, help="Compare the files with the checksums, and change nothing.")
@click.option("--replace", is_flag=True, help="Replace the checksums of files that were changed on purpose.")
def adopt(out: Output, path: Target, check: bool, replace: bool) -> int:
    """Read the checkpoint PATH (or ROOT@STEP) of another library once, and keep the checksums of
    its blocks in one small file beside it. From then on all commands check what they read.

    With --check, exits with 1 if a file was changed, removed or added.
    """
    with progress("checking" if check else "adopting") as tell:
        report = sw.adopt(path.path, path.step, check=check, replace=replace, progress=tell)
    out.document({**fields_of(report), "ok": report.ok})
    what = f"{safe(report.path)}: {count(report.files, 'file')}, {size(report.nbytes)}"
    if not check:
        out.line(f"adopted {what}; checksums in {safe(report.checksums)}")
        for place in report.left_out:
            out.line(f"  {safe(place)}: another checkpoint, left out. Adopt it by its path")
        return FINE
    out.line(f"{out.good('unchanged') if report.ok else out.bad('changed')}: {what}")
    for damage in report.damages:
        block = "" if damage.block is None else f", block {damage.block}"
        out.line(f"  {safe(damage.file + block)}: {safe(damage.what)}")
    for name in report.added:
        out.line(f"  {safe(name)}: added since")
    return FINE if report.ok else PROBLEMS
