"""A history lived on a disk of this machine, and what the process that lived it said of each
failure."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from lab import CHRONICLER, run


@dataclass(frozen=True)
class Failure:
    """A failure: the operation (``open``, ``save``, ``rewind``, …), the kind of error, the errno
    and the message."""

    what: str
    kind: str
    errno: str
    words: str

    def __str__(self) -> str:
        name = errno.errorcode.get(int(self.errno), self.errno) if self.errno.isdigit() else self.errno
        return f"{self.what} {self.kind} {name}"


@dataclass(frozen=True)
class Lived:
    journal: str
    failures: list[Failure]

    @property
    def committed(self) -> int:
        return self.journal.count("\ncommitted ")


def live(
    root: Path,
    seed: int,
    operations: int,
    *,
    name: str = "a",
    engine: str = "auto",
    launcher: Iterable[object] = (),
    env: Mapping[str, str] | None = None,
) -> Lived:
    """Lives so many things; a process that panics, hangs, or does not end by itself fails the
    test."""
    lived = run(
        *launcher, CHRONICLER, "live", root, name, seed, f"operations={operations}",
        env={"STEPWELL_ENGINE": engine, **(env or {})},
    )  # fmt: skip
    assert lived.returncode == 0, (lived.returncode, lived.stdout[-2000:], lived.stderr[-2000:])
    assert "panicked" not in lived.stderr, lived.stderr
    failures = []
    for line in lived.stdout.splitlines():
        if line.startswith("error ") and line != "error none closed":
            what, kind, number, words = line.removeprefix("error ").split(" ", 3)
            failures.append(Failure(what, kind, number, words))
    return Lived(lived.stdout, failures)


def summary(failures: Iterable[Failure]) -> str:
    counted = Counter(map(str, failures))
    return ", ".join(f"{count} × {what}" for what, count in counted.most_common()) or "no failures"


def assert_told(failures: Iterable[Failure], *expected: int) -> None:
    """Each failure says one of these errnos, and has words for what to do about it."""
    for failure in failures:
        assert failure.errno in map(str, expected), (failure, failure.words)
        assert os.strerror(int(failure.errno)) in failure.words, failure
