"""``stepwell report``: one HTML file about a root or a checkpoint. It needs no server and no
network."""

from __future__ import annotations

import contextlib
import datetime
import os
import tempfile
from typing import Unpack

import click

import stepwell as sw

from ..errors import MisuseError, StepNotFound, StepwellError, from_system
from .advise import RunOptions, mtbf_option, run_options
from .command import command
from .locations import location
from .output import FINE, PROBLEMS, Output, safe, size
from .report_data import of_advice, of_checkpoint, of_root
from .report_page import MAX_HEAD_BYTES, is_page, page
from .retention import RetentionOptions, retention_of, retention_options
from .targets import TARGET, Target, root_of


@command("report")
@click.argument("path", type=TARGET)
@click.option(
    "-o",
    "--output",
    required=True,
    type=click.Path(dir_okay=False),
    metavar="FILE.html",
    help="The file to write.",
)
@mtbf_option(required=False)
@run_options
@retention_options
def report(
    out: Output,
    path: Target,
    output: str,
    mtbf: float | None,
    events: str | None,
    restart: float | None,
    cost: float | None,
    step_seconds: float | None,
    **options: Unpack[RetentionOptions],
) -> int:
    """Write a report about PATH (a checkpoint, a root, or ROOT@STEP) into one HTML file.

    It shows the bytes by leaf path, every leaf, and the place of each chunk. For a root it also
    shows the steps over time and the decisions of retention. It covers the newest step of a root,
    or that of ROOT@STEP. With --mtbf it also shows the time that each interval of saves loses.
    """
    _check_output(output)
    retention = retention_of(options)
    root = None if root_of(path.path) is None else location(path.path)
    if retention is not None and root is None:
        raise click.UsageError("--keep-… options need a root, and PATH is none")
    run: RunOptions = {"events": events, "restart": restart, "cost": cost, "step_seconds": step_seconds}
    if mtbf is None and any(value is not None for value in run.values()):
        raise click.UsageError("--events, --restart, --cost and --step-seconds need --mtbf")
    if mtbf is not None and root is None:
        raise click.UsageError("--mtbf needs a root, and PATH is none")
    about_root = None if root is None else of_root(root, retention, _rule(options))
    if root is not None and about_root is not None and mtbf is not None:
        with contextlib.suppress(StepNotFound):
            about_root["advice"] = of_advice(sw.advise(root, mtbf=mtbf, retention=retention, **run))
    unread = about_checkpoint = None
    try:
        with path.open() as checkpoint:
            about_checkpoint = of_checkpoint(checkpoint)
    except StepwellError as error:
        # A root whose steps cannot be opened still has a report.
        if about_root is None or path.step is not None:
            raise
        unread = str(error)
    shown = safe(path)
    data: dict[str, object] = {
        "path": shown,
        "version": sw.__version__,
        "written": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "root": about_root,
        "checkpoint": about_checkpoint,
        "unread": None if unread is None else safe(unread),
    }
    text = page(os.path.basename(shown), data)
    _write(output, text)
    nbytes = len(text.encode())
    step = None if about_checkpoint is None else about_checkpoint["step"]
    document = {"bytes": nbytes, "root": root, "step": step, "unread": unread}
    out.document({"output": os.path.abspath(output), **document})
    out.line(f"wrote {safe(output)} ({size(nbytes)}); open it in a browser")
    if unread is not None:
        out.note(f"no step could be opened: {safe(unread)}")
    return FINE if unread is None else PROBLEMS


def _rule(options: RetentionOptions) -> str:
    """Returns the options of retention as they were given."""
    given = [
        (name.replace("_", "-"), one)
        for name, value in options.items()
        for one in (value if isinstance(value, tuple) else [value])
        if one is not None
    ]
    return " ".join(
        f"--{name} {one:g}" if isinstance(one, float) else f"--{name} {one}" for name, one in given
    )


def _check_output(output: str) -> None:
    """Refuses to replace anything but an older report."""
    if not output.endswith(".html"):
        raise click.UsageError(f"the name of a report ends with .html, and {safe(output)} does not")
    if not os.path.lexists(output):
        return
    try:
        with open(output, "rb") as file:
            is_report = is_page(file.read(MAX_HEAD_BYTES))
    except OSError as error:
        raise from_system(f"{output} cannot be read", error, output) from error
    if not is_report:
        raise MisuseError(f"{output} exists and is no report of stepwell. Pass a free name")


def _write(output: str, text: str) -> None:
    """Writes the whole file or none: an older report stays until the new one is complete."""
    above = os.path.dirname(os.path.abspath(output))
    try:
        with tempfile.TemporaryDirectory(dir=above, prefix=".report-") as directory:
            new = os.path.join(directory, "report.html")
            with open(new, "w", encoding="utf-8") as file:
                file.write(text)
            os.replace(new, output)
    except OSError as error:
        raise from_system(f"{output} cannot be written", error, output) from error
