"""Tests on a real CUDA device. They need the installed package, torch and a device (those of JAX
also JAX with CUDA), and skip elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in (one for one in items if one.path.parent == Path(__file__).parent):
            item.add_marker(pytest.mark.skip(reason="skipped: no CUDA device"))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"


@pytest.fixture(autouse=True)
def _settled() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
