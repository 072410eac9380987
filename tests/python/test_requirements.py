"""``STEPWELL_REQUIRE``: a test whose required subject is absent fails instead of being skipped."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HOOKS = Path(__file__).resolve().parents[1] / "conftest.py"


@pytest.mark.parametrize(
    ("required", "passes"), [("", True), ("mpi,uring", True), ("mpi,strace", False), ("frameworks", False)]
)
def test_a_required_subject_must_not_be_absent(required: str, passes: bool, tmp_path: Path) -> None:
    shutil.copy(HOOKS, tmp_path / "conftest.py")
    (tmp_path / "test_one.py").write_text(
        "import pytest\ndef test_one():\n    pytest.skip('strace is not installed: no injection')\n"
    )
    (tmp_path / "test_module.py").write_text("import pytest\npytest.importorskip('no_such_framework')\n")
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(tmp_path)],
        env={**os.environ, "STEPWELL_REQUIRE": required},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode in (0, 5)) is passes, done.stdout
    if not passes:
        assert "is required (STEPWELL_REQUIRE=" in done.stdout
