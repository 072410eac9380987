"""``stepwell convert``: write a checkpoint in another format."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, TypedDict, Unpack

import click

import stepwell as sw

from .command import command
from .output import FINE, Output, count, fields_of, safe, size
from .pairs import casts
from .progress import progress
from .targets import MAPPED, TARGET, Target

#: The dtypes that tensors are cast to.
_DTYPES = ("float16", "bfloat16", "float32", "float64")
#: Names that are shown of a list.
_SHOWN = 4


def chosen(function: Callable[..., int]) -> Callable[..., int]:
    """Gives a command the options of :class:`Chosen`."""
    for option in (
        click.option(
            "--files",
            multiple=True,
            metavar="PATH",
            help="Copy this file into DESTINATION, or the files of this directory that are not weights. Repeatable.",
        ),
        click.option(
            "--stored-files",
            metavar="LEAF",
            help="Write the bytes in this container of the checkpoint as files, by their names.",
        ),
        click.option(
            "--shard-size", metavar="SIZE", help="The most bytes of a file in a directory (default 5GB)."
        ),
        click.option(
            "--objects",
            type=click.Choice(["error", "skip"]),
            default="error",
            help="For objects that the format cannot hold: an error (the default), or leave them out.",
        ),
        click.option(
            "--cast",
            multiple=True,
            metavar="[GLOB=]DTYPE",
            help="The dtype of floating-point tensors in the output, of all or of those that match GLOB. Repeatable.",
        ),
        click.option(
            "--subtree",
            default="",
            metavar="PATH",
            help="Write what is below PATH, with names relative to it.",
        ),
        click.option("--exclude", multiple=True, metavar="GLOB", help="Leave these leaves out. Repeatable."),
        click.option("--include", multiple=True, metavar="GLOB", help="Write only these leaves. Repeatable."),
        MAPPED,
    ):
        function = option(function)
    return function


class Chosen(TypedDict):
    """The part of a checkpoint that is written, and its form."""

    map: sw.maps.Map | None
    include: tuple[str, ...]
    exclude: tuple[str, ...]
    subtree: str
    cast: tuple[str, ...]
    objects: Literal["error", "skip"]
    shard_size: str | None
    files: tuple[str, ...]
    stored_files: str | None


@command("convert")
@click.argument("source", type=TARGET)
@click.argument("destination")
@click.option(
    "--to",
    required=True,
    metavar="FORMAT",
    help="The format: safetensors, torch, npz, dcp, megatron, orbax or stepwell.",
)
@chosen
@click.option("--verify", is_flag=True, help="Read the output back and compare it with the source.")
@click.option("--dry-run", is_flag=True, help="Show the files that would be written.")
def convert(
    out: Output,
    source: Target,
    destination: str,
    to: str,
    verify: bool,
    dry_run: bool,
    **choice: Unpack[Chosen],
) -> int:
    """Write the checkpoint SOURCE (a path, or ROOT@STEP) to DESTINATION in another format.

    SOURCE may also be a checkpoint of another library. DESTINATION is a free path. It appears whole
    and durable, or not at all. After an interrupt, the same command goes on where it was. Both may
    be URLs. In a store, the files of DESTINATION appear one by one, and an interrupt deletes them.
    """
    return write(out, source, destination, to, choice, verify=verify, dry_run=dry_run)


def write(
    out: Output, source: Target, destination: str, to: str, choice: Chosen, *, verify: bool, dry_run: bool
) -> int:
    """Converts a checkpoint, and prints the result."""
    cast = casts(choice["cast"], "DTYPE")
    for dtype in [cast] if isinstance(cast, str) else (cast or {}).values():
        if dtype not in _DTYPES:
            raise click.UsageError(
                f"--cast takes {', '.join(_DTYPES)} or GLOB= and one of these, not {dtype!r}"
            )
    try:
        with progress("converting") as tell:
            made = sw.convert(
                source.path,
                destination,
                to=to,  # type: ignore[arg-type]  # checked there
                step=source.step,
                map=choice["map"],
                include=choice["include"] or None,
                exclude=choice["exclude"],
                subtree=choice["subtree"],
                cast=cast,
                objects=choice["objects"],
                shard_size=choice["shard_size"],
                files=choice["files"] or None,
                stored_files=choice["stored_files"],
                verify=verify,
                dry_run=dry_run,
                progress=tell,
            )
    except KeyboardInterrupt as interrupt:
        for note in getattr(interrupt, "__notes__", ()):
            out.note(safe(note))
        raise
    out.document({"source": str(source), **fields_of(made)})
    _print(out, made)
    return FINE


def _print(out: Output, made: sw.results.ConversionResult) -> None:
    files = f"{count(len(made.files), 'file')}, {size(made.nbytes)}"
    if made.dry_run:
        out.line(f"would write {safe(made.path)}: {files}")
        out.lines(f"  {safe(name)}  {size(nbytes)}" for name, nbytes in made.files.items())
    else:
        rate = (
            f", {size(int(made.nbytes / made.seconds))}/s"
            if made.seconds > 0 and not made.resumed_nbytes
            else ""
        )
        resumed = f", {size(made.resumed_nbytes)} of it before" if made.resumed_nbytes else ""
        verified = ", verified" if made.verified else ""
        out.line(f"wrote {safe(made.path)}: {files}{resumed}{verified}{rate}")
    if made.tied:
        out.line(f"tied: {_few([f'{name} to {holder}' for name, holder in made.tied.items()])}")
    if made.skipped:
        out.line(f"left out: {_few(made.skipped)}")


def _few(names: list[str] | tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
    return ", ".join(safe(name) for name in names[:_SHOWN]) + more
