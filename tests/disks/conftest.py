"""Fixtures of the tests on disks: a lab, or the reason why there is no lab."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

from lab import CHRONICLER, SAVER, Lab, enter_namespace, which


@pytest.fixture(scope="session")
def namespace() -> None:
    """Mounts that are nobody else's."""
    for binary in (CHRONICLER, SAVER):
        assert binary.exists(), f"{binary} is missing: cargo test --workspace --no-run"
    refusal = enter_namespace()
    if refusal is not None:
        pytest.skip(refusal)


@pytest.fixture
def lab(namespace: None, tmp_path: Path) -> Iterator[Lab]:
    lab = Lab(tmp_path)
    try:
        yield lab
    finally:
        lab.close()


def need(*programs: str) -> None:
    """Skips, and says why, where a program is missing."""
    absent = [program for program in programs if which(program) is None]
    if absent:
        pytest.skip(f"not installed: {', '.join(absent)}")


def need_nothing_of(reason: str | None) -> None:
    """Skips where there is a reason to."""
    if reason is not None:
        pytest.skip(reason)
