"""``stepwell rewind``: back to a step; those after it are set aside, and kept."""

from __future__ import annotations

import click

from .._checks import step_number
from ..errors import CorruptCheckpoint, StepNotFound
from .command import command
from .output import FINE, Output, count
from .targets import report_of, root_at
from .writing import writer


@command("rewind")
@click.argument("root")
@click.argument("step", type=click.IntRange(min=0))
@click.option(
    "--branch", metavar="NAME", help="What the steps are kept as: .branch-NAME.…; drawn if not given."
)
@click.option("--dry-run", is_flag=True, help="Say which steps would be set aside, and do nothing.")
def rewind(out: Output, root: str, step: int, branch: str | None, dry_run: bool) -> int:
    """Make STEP the newest step of ROOT: the steps after it are moved to a branch, where they are
    kept.

    Refused while a training run holds the root, and to a step that is damaged or not there.
    """
    path = root_at(root)
    step = step_number(step)
    if dry_run:
        rows = {row["step"]: row for row in report_of(path) if row["step"] is not None}
        found = rows.get(step)
        if found is None:
            raise StepNotFound(f"{path} has no step {step}; `stepwell ls` lists those that it has")
        if found["damage"] is not None:
            raise CorruptCheckpoint(f"step {step} is damaged, and nothing rewinds to it: {found['damage']}")
        moved = sorted((other for other in rows if other > step), reverse=True)
        made = branch
    else:
        with writer(path, None, "rewind") as manager:
            rewound = manager.rewind(step, branch)
        made, moved = rewound.branch, list(rewound)
    out.document({"root": path, "dry_run": dry_run, "step": step, "branch": made, "moved": sorted(moved)})
    if not moved:
        out.line(f"step {step} is the newest already; nothing was moved")
        return FINE
    numbers = ", ".join(str(one) for one in sorted(moved))
    if dry_run:
        out.line(f"would set aside {count(len(moved), 'step')}: {numbers}")
        return FINE
    out.line(f"step {step} is the newest now; {count(len(moved), 'step')} set aside: {numbers}")
    out.line(f"kept as .branch-{made}.…; nothing but you deletes them")
    return FINE
