"""``stepwell rm``: delete steps, or a branch."""

from __future__ import annotations

import click

from ..errors import LockedError, StepNotFound
from .command import agreed, changing, check_can_ask, command
from .leftovers import scan
from .output import FINE, PROBLEMS, Output, numbers, safe, size
from .targets import manager_of
from .writing import writer


@command("rm")
@click.argument("root")
@click.argument("steps", type=click.IntRange(min=0), nargs=-1, metavar="[STEP]...")
@click.option("--branch", metavar="NAME", help="Delete the steps of this branch.")
@changing
def rm(out: Output, root: str, steps: tuple[int, ...], branch: str | None, yes: bool, dry_run: bool) -> int:
    """Delete each STEP of ROOT, or the steps of a branch that a rewind made.

    Asks first. STEP may be the newest step, or a damaged one. Refused while a training run holds
    the root. A step that somebody reads or holds stays, and the command exits with 1.
    """
    if not steps and branch is None:
        raise click.UsageError("say what to delete: STEP numbers, or --branch NAME")
    check_can_ask(out, yes, dry_run)
    wanted = sorted(set(steps))
    deleted, held, moved = [], {}, []
    with manager_of(root) if dry_run else writer(root, None, "rm") as manager:
        path = manager.root
        found = {row.step: row.nbytes for row in manager.inspect()}
        if missing := [step for step in wanted if step not in found]:
            raise StepNotFound(f"{path} has no step {numbers(missing)}; `stepwell ls` lists the steps")
        branches = scan(path).branches
        if branch is not None and branch not in branches:
            raise StepNotFound(f"{path} has no branch {branch!r}; `stepwell ls` lists the branches")
        of_branch = [] if branch is None else branches[branch]
        nbytes = sum(found[step] for step in wanted) + sum(one.nbytes for one in of_branch)
        what = [f"step{'s' if len(wanted) > 1 else ''} {numbers(wanted)}"] if wanted else []
        what += [f"branch {branch} ({', '.join(one.label for one in of_branch)})"] if of_branch else []
        question = f"delete {' and '.join(map(safe, what))} of {safe(path)}, {size(nbytes)}"
        if not dry_run:
            if not agreed(out, yes, question):
                return PROBLEMS
            for step in wanted:
                try:
                    manager.delete(step)
                    deleted.append(step)
                except LockedError as error:
                    held[step] = str(error)
            moved = [] if branch is None else manager.delete_branch(branch)
    freed = nbytes - sum(found[step] for step in held)
    out.document(
        {
            "root": path,
            "dry_run": dry_run,
            "steps": wanted,
            "branch": branch,
            "deleted": deleted,
            "deleted_of_branch": moved,
            "held": [{"step": step, "reason": reason} for step, reason in held.items()],
            "bytes_freed": freed,
        }
    )
    if dry_run:
        out.line(f"would {question}")
    else:
        names = [f"step {step}" for step in deleted] + [f"{branch}: {name}" for name in moved]
        out.lines(f"deleted {safe(name)}" for name in names)
        out.line(f"{size(freed)} freed")
    for step, reason in held.items():
        out.note(f"step {step} stays: {safe(reason)}")
    return PROBLEMS if held else FINE
