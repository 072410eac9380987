"""``stepwell adopt``: checksums for another library's checkpoint, and steps of a root of its
files."""

from __future__ import annotations

import os
from collections.abc import Sequence

import click

import stepwell as sw

from ..errors import MisuseError, StepNotFound
from .command import command
from .output import FINE, PROBLEMS, Output, count, fields_of, safe, size
from .progress import progress
from .targets import TARGET, Target
from .writing import writer


@command("adopt")
@click.argument("path", type=TARGET)
@click.option("--check", is_flag=True, help="Compare the files with the checksums, and change nothing.")
@click.option("--replace", is_flag=True, help="Replace the checksums of files that were changed on purpose.")
@click.option("--root", metavar="ROOT", help="Make the checkpoint a step of this root of stepwell, too.")
@click.option("--step", type=click.IntRange(min=0), metavar="N", help="The number of that step in ROOT.")
@click.option("--all", "every", is_flag=True, help="With --root: all complete steps that ROOT does not have.")
def adopt(
    out: Output, path: Target, check: bool, replace: bool, root: str | None, step: int | None, every: bool
) -> int:
    """Read the checkpoint PATH (or ROOT@STEP) of another library once, and keep the checksums of
    its blocks in one small file beside it. From then on all commands check what they read.

    With --root, the checkpoint becomes a step of a root of stepwell. Its files stay where they are,
    and retention never deletes them.

    With --check, exits with 1 if a file was changed, removed or added.
    """
    if root is not None:
        if check or replace:
            raise click.UsageError("--check and --replace are for checksums; leave them or --root out")
        if every and (step is not None or path.step is not None):
            raise click.UsageError("--all takes the numbers of the steps; leave --step and @STEP out")
        return _into_root(out, path, root, step, every)
    if step is not None or every:
        raise click.UsageError("--step and --all go with --root")
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


def _into_root(out: Output, path: Target, root: str, step: int | None, every: bool) -> int:
    """Makes a checkpoint, or all steps of a root, steps of a root of ours."""
    if not os.path.lexists(root):
        path.open().close()  # a wrong path must not leave a root behind
        sw.CheckpointManager(root, coordinator=None).close()
    with writer(root, None, "adopt") as manager:
        wanted: Sequence[int | None] = [path.step]
        if every:
            found = sw.open_root(path.path)
            if found.family == "stepwell":
                raise MisuseError(f"{found.path} is of stepwell: copy its steps with `stepwell cp`")
            numbers = {one.number for one in found.steps if one.incomplete is None}
            wanted = sorted({one for one in numbers if one is not None}.difference(manager.all_steps()))
            if not numbers:
                raise StepNotFound(f"{found.path} has no complete step")
        steps = []
        for one in wanted:
            with progress("adopting") as tell:
                number = manager.adopt(path.path, step, from_step=one, progress=tell)
            with manager.checkpoint(number) as made:
                steps.append({"step": number, "path": made.path, "adopted": made.adopted})
                files = made.adopted
            if files is not None:
                out.line(
                    f"step {number}: adopted from {safe(files.path)} ({safe(files.family)}, {size(files.nbytes)})"
                )
        out.document({"root": manager.root, "steps": steps})
        if not steps:
            out.line(f"{safe(manager.root)} has all complete steps of {safe(os.path.abspath(path.path))}")
    return FINE
