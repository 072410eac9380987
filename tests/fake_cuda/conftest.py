"""Tests over the fake CUDA driver. It must be there before anything looks for a driver, and
everything that looks for one finds it: these tests have a process of their own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import fake_cuda
import pytest
import torch

_driver: list[fake_cuda.FakeCuda] = []


@pytest.fixture(scope="session")
def driver(tmp_path_factory: pytest.TempPathFactory) -> fake_cuda.FakeCuda:
    if not _driver:
        _driver.append(fake_cuda.load(tmp_path_factory.mktemp("driver")))
    return _driver[0]


@pytest.fixture
def cuda(driver: fake_cuda.FakeCuda, monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_cuda.FakeCuda]:
    """The driver, with torch believing that it is in use; nothing may be found when the test is
    over."""
    monkeypatch.setattr(torch.cuda, "_lazy_init", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_stream", driver.current_stream)
    driver.heal()
    driver.random(1, 100)
    driver.violations()
    yield driver
    driver.heal()
    found = driver.violations()
    assert not found, "\n".join(found)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    return tmp_path / "run"
