"""A newcomer's first hour, from the wheel alone: ``tests/newcomer/try.py``.

The wheel is the one that ``STEPWELL_WHEEL`` names; without it one is built, where maturin is
installed and the engine has been compiled here before (from nothing it would take many minutes: say
``make wheel``).
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

PROJECT = Path(__file__).resolve().parents[2]
TRY = PROJECT / "tests" / "newcomer" / "try.py"
#: The exit status of ``try.py`` if the dependencies cannot be installed.
NOTHING_TO_TRY = 3


def target() -> Path:
    return Path(os.environ.get("CARGO_TARGET_DIR", PROJECT / "target"))


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    if given := os.environ.get("STEPWELL_WHEEL"):
        return Path(given)
    if importlib.util.find_spec("maturin") is None:
        pytest.skip("no wheel: STEPWELL_WHEEL names none, and maturin is not installed to build one")
    if not list((target() / "release").glob("lib_core.*")):
        pytest.skip(
            "no wheel: STEPWELL_WHEEL names none, and to compile the engine from nothing takes too long here"
        )
    command = [sys.executable, "-m", "maturin", "build", "--release", "--quiet", "--out", str(tmp_path)]
    subprocess.run([*command, "--manifest-path", str(PROJECT / "python" / "Cargo.toml")], check=True)
    (built,) = tmp_path.glob("*.whl")
    return built


def test_a_newcomer_is_helped_through_the_first_hour(wheel: Path, tmp_path: Path) -> None:
    folder = tmp_path / "newcomer"
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, str(TRY), str(wheel), str(folder)],
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    if done.returncode == NOTHING_TO_TRY:
        pytest.skip(done.stdout.strip())
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all of it is so" in done.stdout
