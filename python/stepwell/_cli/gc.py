"""``stepwell gc``: delete what killed writers and retired steps have left in a root."""

from __future__ import annotations

import click

from .command import command
from .leftovers import scan
from .locations import is_store_url
from .output import FINE, Output, count, safe, size
from .targets import manager_of
from .writing import writer


@command("gc")
@click.argument("root")
@click.option("--dry-run", is_flag=True, help="Show what would be deleted, and change nothing.")
@click.option("--unread", is_flag=True, help="Nobody reads ROOT: wait for no readers if it has no locks.")
def gc(out: Output, root: str, dry_run: bool, unread: bool) -> int:
    """Delete leftovers in ROOT: saves that were killed (.tmp-…) and retired steps (.trash-…).

    No step is touched, and no branch. The next writer of the root does the same; this is for a root
    without a next writer.

    An object store has no locks, so it is unknown who reads a retired step. A writer that stays for
    30 minutes deletes it. With --unread this command does.
    """
    with manager_of(root) as manager:
        path = manager.root
    before = scan(path)
    left = []
    if not dry_run:
        with writer(path, None, "gc", grace=0.0 if unread else None):
            pass
        left = scan(path).dead
    names = {one.name for one in left}
    deleted = [one for one in before.dead if one.name not in names]
    freed = max(0, sum(one.nbytes for one in before.dead) - sum(one.nbytes for one in left))
    out.document(
        {
            "root": path,
            "dry_run": dry_run,
            "deleted": deleted,
            "left": left,
            "kept": before.kept,
            "bytes_freed": freed,
        }
    )
    for one in deleted:
        out.line(f"{'would delete' if dry_run else 'deleted'}: {safe(one.name)} ({size(one.nbytes)})")
    why = "somebody reads it; try again later"
    if is_store_url(path):
        why = "somebody may read it; pass --unread if nobody reads this root"
    for one in left:
        out.line(f"left: {safe(one.name)} ({size(one.nbytes)}): {why}")
    for one in before.kept:
        out.line(out.dim(f"kept: {safe(one.name)} ({size(one.nbytes)})"))
    verb = "would be freed" if dry_run else "freed"
    out.line(f"{count(len(deleted), 'directory', 'directories')}, {size(freed)} {verb}")
    return FINE
