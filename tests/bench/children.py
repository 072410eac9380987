"""Measurements in a process of their own: ``SCRIPT --child …``.

The child makes its imports and takes its memory before it reports that it is ready. The parent
then prepares the caches, and the child measures.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

READY = "ready"


def in_child(script: str, arguments: list[str], prepare: Callable[[], None]) -> Any:
    """Runs a script with ``--child`` and arguments. Returns what it answers."""
    command = [sys.executable, script, "--child", *arguments]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as child:
        assert child.stdout is not None
        if any(line.strip() == READY for line in child.stdout):
            prepare()
        said, errors = child.communicate("\n")
    if child.returncode != 0:
        raise SystemExit(f"{Path(script).name} {' '.join(arguments)}: {errors[-2000:]}")
    return json.loads(said.splitlines()[-1])


def answer(measure: Callable[[], Any]) -> None:
    """Measures in the child, when the parent is ready too, and answers."""
    print(READY, flush=True)
    sys.stdin.readline()
    print(json.dumps(measure()))
