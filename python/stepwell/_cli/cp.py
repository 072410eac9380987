"""``stepwell cp``: copy a checkpoint to another path or root."""

from __future__ import annotations

import os

import click

import stepwell as sw

from ..errors import MisuseError, StepExists
from .command import command
from .locations import is_root, is_store, location
from .output import FINE, Output, safe, size
from .progress import progress
from .show import metrics_of
from .targets import TARGET, Target, format_of
from .writing import writer


@command("cp")
@click.argument("source", type=TARGET)
@click.argument("destination")
@click.option("--include", multiple=True, metavar="GLOB", help="Copy only these items. Repeatable.")
@click.option("--exclude", multiple=True, metavar="GLOB", help="Leave these items out. Repeatable.")
@click.option(
    "--compress", multiple=True, metavar="GLOB", help="Compress these tensors ('**': all). Repeatable."
)
def cp(
    out: Output,
    source: Target,
    destination: str,
    include: tuple[str, ...],
    exclude: tuple[str, ...],
    compress: tuple[str, ...],
) -> int:
    """Copy the checkpoint SOURCE (a path, or ROOT@STEP) to DESTINATION: a free path, or a root.

    The copy has the same bytes, or the same values with --compress. Every checksum of it is
    compared, and it is durable, before it gets its name. It has the metrics that were added to the
    step later, too. In a root it becomes the step with the same number; the root must not have that
    step, and no training run may hold it.
    """
    chosen = include or None
    with source.open() as checkpoint:
        if (found := format_of(checkpoint)) != "stepwell" and checkpoint.adopted is None:
            raise MisuseError(
                f"{checkpoint.path} is no step of stepwell: another library wrote it ({found}). "
                "Write it as one with `stepwell convert SOURCE DESTINATION --to stepwell`"
            )
        step, metrics = checkpoint.step, metrics_of(checkpoint)
        with progress("copying") as tell:
            where = location(destination)
            if is_root(where):
                with writer(destination, None, "cp") as manager:
                    if step in manager.all_steps():
                        # The advice of the engine's message is for programs.
                        raise StepExists(
                            f"{manager.root} has a step {step} already: delete it with `stepwell rm`, or copy to another root or path"
                        )
                    manager.add(
                        checkpoint,
                        include=chosen,
                        exclude=exclude,
                        metrics=metrics,
                        compress=compress,
                        progress=tell,
                    )
                    with manager.checkpoint(step) as copied:
                        made = copied.path
            elif not is_store(where) and os.path.lexists(destination):
                raise MisuseError(f"{destination} exists and is no root; pass a free path, or a root")
            else:
                made = checkpoint.copy(
                    destination,
                    include=chosen,
                    exclude=exclude,
                    metrics=metrics,
                    compress=compress,
                    progress=tell,
                )
        path = checkpoint.path
    with sw.open(made) as copied:
        manifest = copied.manifest
    nbytes = sum(file["length"] for file in manifest["files"])
    items = [item["name"] for item in manifest["items"]]
    out.document({"source": path, "destination": made, "step": step, "items": items, "bytes": nbytes})
    out.line(f"copied {safe(path)} to {safe(made)}: {size(nbytes)}, verified")
    return FINE
