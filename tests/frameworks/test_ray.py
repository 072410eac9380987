"""``stepwell.integrations.ray``: checkpoints that are reported to Ray Train."""

from __future__ import annotations

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


@longer
def test_workers_resume_after_one_is_killed(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, ray_job.__file__, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
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
