"""Saves that give the same bytes on every run, whatever the disk and the kernel allow: what they
gave, and through which engine."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from lab import CHRONICLER, run


@dataclass(frozen=True)
class Repeated:
    #: ``io_uring direct=true registered=true``.
    engine: str
    #: ``saved``, or ``error KIND ERRNO WORDS``.
    verdict: str
    #: Hash of every file of the root.
    files: dict[str, str]


def repeat(root: Path, engine: str = "auto", before: Callable[[], None] | None = None) -> Repeated:
    """Saves into a new root. ``before`` is done in the process, before the program begins."""
    done = run(CHRONICLER, "repeat", root, env={"STEPWELL_ENGINE": engine}, before=before)
    assert done.returncode == 0, (done.returncode, done.stdout, done.stderr)
    assert "panicked" not in done.stderr, done.stderr
    *first, verdict = done.stdout.splitlines()
    chosen = first[0].removeprefix("engine ") if first else "none"
    files = {}
    for path in sorted(root.rglob("*")):
        # The writer's own epoch names its process.
        if path.is_file() and path.relative_to(root) != Path(".stepwell/epoch"):
            files[str(path.relative_to(root))] = hashlib.sha256(path.read_bytes()).hexdigest()
    return Repeated(chosen, verdict, files)
