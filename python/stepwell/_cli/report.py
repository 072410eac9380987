"""``stepwell report``: one HTML file about a root or a checkpoint, which needs no server, no
network and nothing beside it."""

from __future__ import annotations

import datetime
import os
import tempfile
from typing import Any

import click

from .. import _core
from ..errors import StepwellError
from .command import command
from .output import FINE, PROBLEMS, Output, safe, size
from .report_data import of_checkpoint, of_root
from .report_page import page
from .retention_options import retention_of, retention_options
from .targets import Target, is_root, target
from .tree import Tree


@command("report")
@click.argument("path", type=target)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False),
    metavar="FILE.html",
    help="What to write.",
)
@retention_options
def report(out: Output, path: Target, output: str, **options: Any) -> int:
    """Write a report about PATH (a checkpoint, a root, or ROOT@STEP) into one HTML file.

    It shows the bytes by leaf path, every leaf, and the place of each chunk. For a root it also
    shows the steps over time and the decisions of retention. It covers the newest step of a root,
    or that of ROOT@STEP.
    """
    retention = retention_of(options)
    root = path.path if is_root(path.path) else None
    if retention is not None and root is None:
        raise click.UsageError("what stays is asked of a root, and PATH is none: leave --keep-… out")
    about_root = None if root is None else of_root(root, retention, _told(options))
    unread = None
    about_checkpoint = None
    try:
        with path.open() as checkpoint:
            about_checkpoint = of_checkpoint(Tree(checkpoint))
    except StepwellError as error:
        # A root whose steps cannot be opened is one that a report is asked for.
        if about_root is None or path.step is not None:
            raise
        unread = str(error)
    shown = safe(path)
    text = page(
        f"{os.path.basename(shown)}: stepwell",
        {
            "path": shown,
            "version": _core.VERSION,
            "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "root": about_root,
            "checkpoint": about_checkpoint,
            "unread": None if unread is None else safe(unread),
        },
    )
    _write(output, text)
    nbytes = len(text.encode())
    out.document(
        {
            "output": os.path.abspath(output),
            "bytes": nbytes,
            "root": root,
            "step": None if about_checkpoint is None else about_checkpoint["step"],
            "unread": unread,
        }
    )
    out.line(f"wrote {safe(output)} ({size(nbytes)}); open it in a browser")
    if unread is not None:
        out.note(f"no step could be opened: {safe(unread)}")
    return FINE if unread is None else PROBLEMS


def _told(options: dict[str, Any]) -> str:
    """The rule in words, as it was given."""
    told = []
    for name, value in options.items():
        for one in value if isinstance(value, tuple) else [value]:
            if one is not None:
                told.append(
                    f"--{name.replace('_', '-')} {one:g}"
                    if isinstance(one, float)
                    else f"--{name.replace('_', '-')} {one}"
                )
    return " ".join(told)


def _write(output: str, text: str) -> None:
    """Writes the whole file or none: an older report stays until the new one is there."""
    above = os.path.dirname(os.path.abspath(output))
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=above, prefix=".report-", suffix=".html", delete=False
    ) as file:
        try:
            file.write(text)
            file.flush()
            os.chmod(file.name, 0o666 & ~_umask())
            os.replace(file.name, output)
        except BaseException:
            os.unlink(file.name)
            raise


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask
