"""Trainers on a CUDA device: the tests of the integrations, trained there."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

import pytest

FRAMEWORKS = Path(__file__).resolve().parents[1] / "frameworks"
#: Several processes need a device each. The tests of other devices use made-up ones.
SELECTED = "not ranks and not shards and not strategy and not other_cuda"


@pytest.mark.parametrize("trainer", ["transformers", "accelerate", "lightning"])
def test_a_trainer_resumes_on_the_device(trainer: str) -> None:
    if importlib.util.find_spec(trainer) is None:
        pytest.skip(f"{trainer} is not installed")
    file = FRAMEWORKS / f"test_{'trainer' if trainer == 'transformers' else trainer}.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-k", SELECTED, str(file)],
        env={**os.environ, "STEPWELL_TRAIN_ON": "cuda", "CUDA_VISIBLE_DEVICES": "0"},
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
