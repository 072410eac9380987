"""``stepwell.integrations.transformers`` under the trainers of TRL, with and without an adapter of
PEFT."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import stepwell as sw

pytest.importorskip("trl")
pytest.importorskip("peft")

sys.path += [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "python")]

import stepwell.integrations.transformers as ours
import trl_job
from longer import some
from moments import killed_in_a_save
from trainer_job import Losses, committed
from trl_job import trainer


@pytest.mark.parametrize("kind", some(["sft", "dpo"]))
def test_a_killed_training_resumes_with_equal_losses(tmp_path: Path, kind: str) -> None:
    plain, whole, rest = Losses(), Losses(), Losses()
    trainer(kind, tmp_path / "plain", plain).train()
    ours.use(trainer(kind, tmp_path / "whole", whole)).train()
    assert whole.found == plain.found

    def kill(output: Path) -> None:
        killed = subprocess.run(
            [sys.executable, trl_job.__file__, kind, str(output), "6"],
            capture_output=True,
            timeout=300,
            check=False,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert killed.returncode == -9, killed.stderr

    output = killed_in_a_save(tmp_path, kill, lambda at: 6 in committed(at))
    ours.use(trainer(kind, output, rest)).train(resume_from_checkpoint=True)
    assert rest.found == {step: whole.found[step] for step in range(4, 11)}
    with sw.open(output / "checkpoint-10" / "stepwell") as checkpoint:
        weights = [path for path in checkpoint.paths() if path.startswith("train/model/")]
    assert len(weights) > 0
    assert all("lora" in path for path in weights) == (kind == "sft")
