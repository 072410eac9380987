"""Common fixtures."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_store import control, fake_store
from s3_server import s3_server
from stepwell import _lifecycle
from stepwell._conversion import files

# A shell starts what it puts into the background with Ctrl-C ignored, and children inherit that:
# what tests interrupt must not.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A root that does not exist yet."""
    return tmp_path / "run"


def bring_log() -> None:
    """Waits for the engine's log lines so far. A thread of the package brings them."""
    brought = threading.Event()
    _lifecycle.notifier.start().post(_lifecycle.notifier.register(brought.set))
    assert brought.wait(60), "the notifier hangs"


class EngineLog:
    """``caplog`` that waits for the engine's lines."""

    def __init__(self, log: pytest.LogCaptureFixture) -> None:
        self._log = log

    def __getattr__(self, name: str) -> Any:
        bring_log()
        return getattr(self._log, name)

    @contextmanager
    def at_level(self, level: int | str, logger: str | None = None) -> Iterator[None]:
        """As of ``caplog``. The lines of the block are there at its end."""
        with self._log.at_level(level, logger):
            try:
                yield
            finally:
                bring_log()


@pytest.fixture
def caplog(caplog: pytest.LogCaptureFixture) -> EngineLog:
    """pytest's fixture, which waits for the engine's lines."""
    return EngineLog(caplog)


def partials(folder: Path) -> list[str]:
    """Names of incomplete conversions in a directory, and of their journals."""
    return sorted(one.name for one in folder.iterdir() if ".partial" in one.name)


@pytest.fixture(scope="module")
def server() -> Iterator[dict[str, str]]:
    """A server with an empty bucket, for the tests of a module: the variables that lead to it."""
    with s3_server("bucket") as variables:
        yield variables


@pytest.fixture
def url(server: dict[str, str], monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> str:
    """A URL in the bucket at which there is nothing, and the variables that lead to the server."""
    for name, value in server.items():
        monkeypatch.setenv(name, value)
    return f"s3://bucket/{request.node.name.replace('[', '-').rstrip(']')}"


@pytest.fixture(scope="module")
def fake_s3() -> Iterator[dict[str, str]]:
    """A fast server of S3 with faults, for the tests of a module: the variables that lead to it."""
    with fake_store("s3") as variables:
        yield variables


@pytest.fixture
def store(fake_s3: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """That server without faults, to which the variables of the environment lead."""
    for name, value in fake_s3.items():
        monkeypatch.setenv(name, value)
    control(fake_s3, "faults")
    return fake_s3


@pytest.fixture
def bucket(store: dict[str, str], tmp_path: Path) -> str:
    """A URL in that server that nothing else uses."""
    return f"s3://bucket/{tmp_path.name}"


@pytest.fixture
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Windows that cut the tensors of these tests."""
    monkeypatch.setattr(files, "_WINDOW_BYTES", 16 << 10)
    monkeypatch.setattr(files, "_JOURNAL_BYTES", 256 << 10)


def same(one: Any, other: Any) -> bool:
    """True if two states are alike to the bit: types, structure, order, dtypes, shapes, NaN."""
    if type(one) is not type(other):
        return False
    if isinstance(one, np.ndarray):
        return (
            one.dtype == other.dtype
            and one.shape == other.shape
            and np.ascontiguousarray(one).tobytes() == np.ascontiguousarray(other).tobytes()
        )
    if isinstance(one, np.generic):
        return one.dtype == other.dtype and one.tobytes() == other.tobytes()
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)) or type(one).__name__ == "deque":
        return len(one) == len(other) and all(same(a, b) for a, b in zip(one, other, strict=True))
    if isinstance(one, float):
        return np.float64(one).tobytes() == np.float64(other).tobytes()
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    return bool(one == other)


@pytest.fixture
def python(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs a script in a process of its own."""

    def run(script: str, *arguments: Any, timeout: float = 60) -> subprocess.CompletedProcess[str]:
        file = tmp_path / "script.py"
        file.write_text("import sys, os, numpy as np, stepwell as sw\n" + script)
        return subprocess.run(
            [sys.executable, str(file), *map(str, arguments)],
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )

    return run
