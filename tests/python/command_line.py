"""Helpers of the command line's tests: the command as a process, the command in this process, and
example roots."""

from __future__ import annotations

import json
import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import stepwell as sw
from click.testing import CliRunner, Result
from stepwell._cli.group import stepwell

DOCUMENT = Path(__file__).resolve().parents[2] / "docs" / "cli.md"


def process(*arguments: Any, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    """The real command, in a process of its own."""
    return subprocess.run(
        [sys.executable, "-m", "stepwell", *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, **environment},
    )


def run(*arguments: Any) -> Result:
    """The same command, in this process: for breadth."""
    logger = logging.getLogger("stepwell")
    propagate = logger.propagate
    try:
        result = CliRunner().invoke(stepwell, [str(one) for one in arguments])
    finally:
        # Later tests of this process read the log.
        logger.propagate = propagate
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result


def document(*arguments: Any, code: int | None = 0) -> dict[str, Any]:
    """The JSON document of a command, which is all that it prints on standard output and has the
    keys that the documentation names."""
    result = run(*arguments, "--json")
    found: dict[str, Any] = json.loads(result.stdout)
    if code is not None:
        assert result.exit_code == code, result.output
    assert found["stepwell"] == 1
    assert found["command"] == arguments[0]
    return found


def documented(command: str) -> set[str]:
    """The top-level keys that docs/cli.md names for a command."""
    section = re.search(rf"^## {command}\n(.*?)(?=^## |\Z)", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL)
    assert section is not None, f"docs/cli.md says nothing of {command}"
    table = section.group(1).split("| key | |", 1)[1]
    rows = re.findall(r"^\| ((?:`\w+`(?:, )?)+) \|", table, re.MULTILINE)
    return {key for row in rows for key in re.findall(r"`(\w+)`", row)}


def keys(found: dict[str, Any]) -> set[str]:
    """The keys of a document beside those that all have."""
    return set(found) - {"stepwell", "command"}


def state(value: float = 0.0) -> dict[str, Any]:
    """A small state of several dtypes, with a tie and an object."""
    w = np.arange(12, dtype=np.float32).reshape(3, 4) + np.float32(value)
    return {
        "params": {"w": w, "b": np.zeros(4), "head": w},
        "optimizer": {"m": np.full((3, 4), value, np.float16), "count": int(value)},
        "lr": 0.5,
    }


def make_root(root: Path, steps: int = 3) -> Path:
    """A root of steps 0, 10, 20, … whose values are their numbers."""
    with sw.CheckpointManager(root) as manager:
        for step in range(0, 10 * steps, 10):
            manager.save(
                step, state(step), metrics={"loss": 1.0 / (step + 1)}, custom_metadata={"git": "abc"}
            )
    return root


def flip_a_bit(file: Path, offset: int = 5000) -> None:
    """Damage that only reading finds."""
    with file.open("r+b") as stream:
        stream.seek(offset)
        byte = stream.read(1)
        stream.seek(offset)
        stream.write(bytes([byte[0] ^ 1]))
