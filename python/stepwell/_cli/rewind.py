"""``stepwell rewind``: back to a step. Newer steps are moved to a branch."""

from __future__ import annotations

import click

from .command import agreed, changing, check_can_ask, command
from .output import FINE, PROBLEMS, Output, count, numbers, size
from .targets import info_of, manager_of
from .writing import writer


@command("rewind")
@click.argument("root")
@click.argument("step", type=click.IntRange(min=0))
@click.option("--branch", metavar="NAME", help="The branch's name (default: the step and a random part).")
@changing
def rewind(out: Output, root: str, step: int, branch: str | None, yes: bool, dry_run: bool) -> int:
    """Make STEP the newest step of ROOT. The steps after it are moved to a branch, which is kept.

    Asks first. Refused while a training run holds the root, and to a step that is damaged or does
    not exist.
    """
    check_can_ask(out, yes, dry_run)
    made = branch
    with manager_of(root) if dry_run else writer(root, None, "rewind") as manager:
        rows = manager.inspect()
        info_of(rows, step)
        newer = [row for row in rows if row.step is not None and row.step > step]
        moved = [row.step for row in newer if row.step is not None]
        nbytes = sum(row.nbytes for row in newer)
        if not dry_run:
            question = f"steps {numbers(moved)} ({size(nbytes)}) are moved to a branch of {manager.root}"
            if moved and not agreed(out, yes, question):
                return PROBLEMS
            rewound = manager.rewind(step, branch)
            made, moved = rewound.branch, sorted(rewound)
        path = manager.root
    out.document(
        {
            "root": path,
            "dry_run": dry_run,
            "step": step,
            "branch": made,
            "moved": moved,
            "bytes": nbytes,
        }
    )
    if not moved:
        out.line(f"step {step} is the newest already; nothing was moved")
    elif dry_run:
        out.line(f"would move {count(len(moved), 'step')} to a branch: {numbers(moved)}; {size(nbytes)}")
    else:
        out.line(f"step {step} is the newest now; {count(len(moved), 'step')} moved: {numbers(moved)}")
        out.line(f"kept as .branch-{made}.…; only `stepwell rm --branch {made}` deletes them")
    return FINE
