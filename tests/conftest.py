"""Turns the skip of a required subject into a failure.

``STEPWELL_REQUIRE`` is a comma list of subjects. A test that is skipped because such a subject is
absent fails. The Rust tests read the same variable (``stepwell_core::sys::testing::absent``).
"""

from __future__ import annotations

import os
import re
from collections.abc import Generator
from typing import Any

import pytest

#: Subject → the reasons of its skips.
SUBJECTS = {
    "long": r"STEPWELL_LONG=1 runs it",
    "user": r"this user may not make it",
    "gpu": r"CUDA device",
    "slow-disk": r"this disk is too fast",
    "strace": r"strace",
    "mpi": r"mpiexec",
    "wheel": r"no wheel|dependencies",
    "browser": r"no browser here",
    "frameworks": r"could not import|No module named|is not installed$|has no CheckpointableTensor",
    "disks": r"",
}


def subject_of(reason: str) -> str:
    """Returns the subject whose absence a skip reports: the first that matches."""
    return next(name for name, pattern in SUBJECTS.items() if re.search(pattern, reason))


def _fail_if_required(report: Any) -> None:
    if report.outcome != "skipped" or hasattr(report, "wasxfail"):
        return
    reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
    required = os.environ.get("STEPWELL_REQUIRE", "")
    subject = subject_of(reason)
    if subject in required.split(","):
        report.outcome = "failed"
        report.longrepr = f"{subject} is required (STEPWELL_REQUIRE={required}), and absent: {reason}"


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Generator[None, Any, Any]:
    """Looks at the report of each test."""
    report = yield
    _fail_if_required(report)
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report() -> Generator[None, Any, Any]:
    """Looks at the report of each module, which may be skipped as a whole."""
    report = yield
    _fail_if_required(report)
    return report
