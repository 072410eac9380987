"""``stepwell export``: write a checkpoint for another library, and verify it."""

from __future__ import annotations

from typing import Unpack

import click

from .command import command
from .convert import Chosen, chosen, write
from .output import Output
from .targets import TARGET, Target


@command("export")
@click.argument("source", type=TARGET)
@click.argument("destination")
@click.option(
    "--to",
    default="safetensors",
    metavar="FORMAT",
    help="The format: safetensors (the default), torch, npz, dcp, megatron, orbax or stepwell.",
)
@chosen
def export(out: Output, source: Target, destination: str, to: str, **choice: Unpack[Chosen]) -> int:
    """Write the checkpoint SOURCE (a path, or ROOT@STEP) to DESTINATION for another library.

    It is `convert` to safetensors with `--verify`: every tensor is read back and compared with the
    source before DESTINATION appears.
    """
    return write(out, source, destination, to, choice, verify=True, dry_run=False)
