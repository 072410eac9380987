"""Tests with real frameworks. JAX gets eight devices on the host, and Keras its backend, which must
be said before they start."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

os.environ["XLA_FLAGS"] = os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8"
os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ["KERAS_BACKEND"] = "torch"


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"
