"""``stepwell gc``: what killed writers and retired steps have left in a root."""

from __future__ import annotations

from typing import Any

import click

from .command import command
from .leftovers import Leftover, Leftovers, scan
from .output import FINE, Output, count, safe, size
from .targets import root_at
from .writing import writer


@command("gc")
@click.argument("root")
@click.option("--dry-run", is_flag=True, help="Say what would be deleted, and delete nothing.")
def gc(out: Output, root: str, dry_run: bool) -> int:
    """Delete what nobody needs any more in ROOT: saves that were killed (.tmp-…) and retired steps
    (.trash-…).

    No step is touched; neither is what was kept on purpose: branches of rewinds, directories that
    were set aside. A manager that opens the root as its writer does the same; this is for a root
    that nobody is going to open.
    """
    path = root_at(root)
    before = scan(path)
    after = before
    if not dry_run:
        with writer(path, None, "gc"):
            pass
        after = scan(path)
    left = {one.name for one in after.dead}
    gone = [one for one in before.dead if dry_run or one.name not in left]
    freed = sum(one.nbytes for one in before.dead) - (0 if dry_run else sum(one.nbytes for one in after.dead))
    kept = [] if dry_run else after.dead
    out.document(
        {
            "root": path,
            "dry_run": dry_run,
            "deleted": [_document(one) for one in gone],
            "left": [_document(one) for one in kept],
            "kept": [_document(one) for one in _kept(before)],
            "bytes_freed": max(freed, 0),
        }
    )
    for one in gone:
        out.line(f"{'would delete' if dry_run else 'deleted'}: {safe(one.name)} ({size(one.nbytes)})")
    for one in kept:
        out.line(f"left: {safe(one.name)} ({size(one.nbytes)}): somebody reads it; try again later")
    for one in _kept(before):
        out.line(out.dim(f"kept: {safe(one.name)} ({size(one.nbytes)})"))
    verb = "would be freed" if dry_run else "freed"
    out.line(f"{count(len(gone), 'directory', 'directories')}, {size(max(freed, 0))} {verb}")
    return FINE


def _kept(found: Leftovers) -> list[Leftover]:
    """Returns entries that exist on purpose or are in use."""
    branches = [one for steps in found.branches.values() for one in steps]
    return [one for one in found.temporaries if one.live is not False] + found.aside + branches


def _document(one: Leftover) -> dict[str, Any]:
    return {"name": one.name, "bytes": one.nbytes}
