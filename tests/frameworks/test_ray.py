"""``stepwell.integrations.ray``: checkpoints that are reported to Ray Train."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import stepwell as sw

pytest.importorskip("ray")

sys.path += [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "python")]

import ray_job
from longer import longer
from moments import there_from_the_first

#: Ray looks at its workers more often, and starts none before they are needed.
FASTER = {
    "RAY_TRAIN_HEALTH_CHECK_INTERVAL_S": "0.1",
    "RAY_TRAIN_ENABLE_PREEMPTION_WATCHER": "0",
    "RAY_prestart_worker_first_driver": "0",
}


def committed(folder: Path) -> list[Path]:
    """The checkpoints that stepwell has committed."""
    found = []
    for checkpoint in folder.glob("run/checkpoint_[0-9]*"):
        with contextlib.suppress(FileNotFoundError):  # deleted just now
            if any(name.startswith("step_") for name in os.listdir(checkpoint)):
                found.append(checkpoint)
    return found


def train(folder: Path, how: str) -> None:
    """Trains in a process of its own. Looks all the time if a committed checkpoint is there."""
    with there_from_the_first(lambda: committed(folder), pause=0.002):
        done = subprocess.run(
            [sys.executable, ray_job.__file__, str(folder), how],
            capture_output=True,
            text=True,
            timeout=500,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1", **FASTER},
        )
    assert done.returncode == 0, done.stderr


@longer
def test_failed_saves_and_torn_checkpoints_end_a_run(tmp_path: Path) -> None:
    train(tmp_path, "accidents")
    full, torn = json.loads((tmp_path / "errors").read_text())
    assert "File too large" in full
    plain = ray_job.train({"steps": 5})
    assert json.loads((tmp_path / "3-0").read_text()) == {str(step): plain[step] for step in (3, 4)}
    assert "checkpoint_00000004" in torn
    assert f"Another checkpoint is there: {tmp_path / 'run' / 'checkpoint_00000003'}." in torn
    assert not (tmp_path / "5-0").exists()


@longer
def test_a_committed_checkpoint_exists_at_every_moment(tmp_path: Path) -> None:
    train(tmp_path, "1")
    assert [one.name for one in sorted(committed(tmp_path))] == [
        f"checkpoint_{step:08}" for step in range(ray_job.STEPS - 2, ray_job.STEPS)
    ]


@longer
def test_workers_resume_after_one_is_killed(tmp_path: Path) -> None:
    train(tmp_path, "2")
    plain = ray_job.train({})
    starts = {int(file.name.split("-")[0]) for file in tmp_path.glob("*-[01]")}
    first = max(starts)
    assert len(starts) == 2
    assert 3 <= first <= ray_job.KILLED + 1
    for rank in (0, 1):
        losses = json.loads((tmp_path / f"{first}-{rank}").read_text())
        assert losses == {str(step): plain[step] for step in range(first, ray_job.STEPS)}
    metrics, newest = json.loads((tmp_path / "result").read_text())
    assert metrics == {"loss": plain[ray_job.STEPS - 1]}
    assert sw.verify(newest).ok
    assert sw.metadata(newest).world_size == 2
