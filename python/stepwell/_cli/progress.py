"""Progress of long work, with its rate and the time that is left: on standard error, and only where
that is a terminal."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .output import is_terminal

#: Takes the finished bytes and the total bytes.
Tell = Callable[[int, int], None]


@contextmanager
def progress(label: str) -> Iterator[Tell]:
    """Shows a bar while the block runs. Yields a function that takes the finished bytes and the
    total bytes."""
    if not is_terminal(sys.stderr):
        yield lambda done, whole: None
        return
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}", markup=False),
        bars.BarColumn(),
        bars.TaskProgressColumn(),
        bars.DownloadColumn(binary_units=True),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(label, total=None)
        yield lambda done, whole: bar.update(task, completed=done, total=whole)
