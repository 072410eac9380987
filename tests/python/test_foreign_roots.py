"""Runs and checkpoints of other libraries in one directory."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import stepwell as sw
from safetensors.numpy import save_file


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's directory, as of other libraries."""
    (tmp_path / "model").mkdir()
    save_file({"w": np.ones(3)}, tmp_path / "model" / "model.safetensors")
    return tmp_path / "model"


def test_no_run_begins_in_a_foreign_checkpoint(model: Path) -> None:
    with pytest.raises(sw.MisuseError, match=r"checkpoint of another library \(safetensors\)"):
        sw.CheckpointManager(model)
    assert [one.name for one in model.iterdir()] == ["model.safetensors"]
    assert (sw.restore(model)["w"] == 1).all()


def test_a_run_goes_on_beside_a_foreign_file(model: Path) -> None:
    with sw.CheckpointManager(model.parent / "run") as mgr:
        mgr.save(1, {"w": np.zeros(3)})
    (model / "model.safetensors").rename(model.parent / "run" / "model.safetensors")
    with sw.CheckpointManager(model.parent / "run") as mgr:
        assert mgr.latest_step() == 1


def test_a_run_begins_beside_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"none")
    with sw.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, {"w": np.zeros(3)})
    assert (sw.restore(tmp_path)["w"] == 0).all()
