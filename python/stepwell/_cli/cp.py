"""``stepwell cp``: copy a checkpoint to another path or root."""

from __future__ import annotations

import os

import click

from ..errors import MisuseError
from .command import command
from .output import FINE, Output, safe, size
from .progress import progress
from .targets import TARGET, Target
from .writing import writer


@command("cp")
@click.argument("source", type=TARGET)
@click.argument("destination")
def cp(out: Output, source: Target, destination: str) -> int:
    """Copy the checkpoint SOURCE (a path, or ROOT@STEP) to DESTINATION: a free path, or a root.

    The copy has the same bytes. Every checksum of it is compared, and it is durable, before it gets
    its name. In a root it becomes the step with the same number; the root must not have that step,
    and no training run may hold it.
    """
    with source.open() as checkpoint:
        nbytes = sum(file["length"] for file in checkpoint.manifest["files"])
        step = checkpoint.step
        with progress("copying") as tell:
            if os.path.isdir(os.path.join(destination, ".stepwell")):
                with writer(destination, None, "cp") as manager:
                    manager.add(checkpoint, progress=tell)
                    with manager.checkpoint(step) as copied:
                        made = copied.path
            elif os.path.lexists(destination):
                raise MisuseError(f"{destination} exists and is no root; pass a free path, or a root")
            else:
                made = checkpoint.copy(destination, progress=tell)
        path = checkpoint.path
    out.document({"source": path, "destination": made, "step": step, "bytes": nbytes})
    out.line(f"copied {safe(path)} to {safe(made)}: {size(nbytes)}, verified")
    return FINE
