"""The GPU benchmark is ready to run: it reports a skip without a device, and runs in a
rehearsal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

from longer import longer

BENCH = Path(__file__).resolve().parents[1] / "gpu" / "bench.py"


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_it_is_skipped_without_a_device() -> None:
    done = subprocess.run([sys.executable, BENCH], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout == "skipped: no CUDA device\n"


@longer
def test_a_rehearsal_goes_through_all_of_it(tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    command = [sys.executable, BENCH, "--rehearse", "--disk", tmp_path, "--json", figures]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=True)
    assert "no figure means anything" in done.stdout
    for what in (
        "save() of 300 leaves",
        "restore to the device, cold",
        "| stepwell ",
        "| DCP async_save ",
        "| torch.save ",
    ):
        assert what in done.stdout, done.stdout
    assert figures.exists()
    assert "failed" not in figures.read_text(), "a contestant failed"
    assert [one.name for one in tmp_path.iterdir()] == ["figures.json"], "something was left on the disk"
