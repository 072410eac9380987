"""``stepwell.integrations.axolotl``. Axolotl cannot be installed beside the other frameworks. A
stub stands for the base class of its plug-ins. The trainer is that of transformers."""

from __future__ import annotations

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import stepwell as sw

pytest.importorskip("transformers")

sys.path.append(str(Path(__file__).parent))

from trainer_job import Losses, trainer


def run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[int, float], SimpleNamespace]:
    """Trains as Axolotl does. Returns the losses and the configuration."""
    for name in "axolotl", "axolotl.integrations", "axolotl.integrations.base":
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["axolotl.integrations.base"], "BasePlugin", object, raising=False)
    from stepwell.integrations.axolotl import StepwellPlugin

    configuration = SimpleNamespace(
        output_dir=str(folder), resume_from_checkpoint=None, auto_resume_from_checkpoints=True
    )
    losses = Losses()
    one = trainer(folder, losses)
    StepwellPlugin().post_trainer_create(configuration, one)  # type: ignore[arg-type]
    one.train(resume_from_checkpoint=configuration.resume_from_checkpoint)
    return losses.found, configuration


def test_a_torn_checkpoint_does_not_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole, configuration = run(tmp_path, monkeypatch)
    assert configuration.resume_from_checkpoint is None
    newest = tmp_path / "checkpoint-14"
    assert sw.verify(newest / "stepwell").ok
    (newest / "stepwell" / "step_00000014" / "manifest.json").unlink()
    rest, configuration = run(tmp_path, monkeypatch)
    assert configuration.resume_from_checkpoint == str(tmp_path / "checkpoint-12")
    assert rest == {step: whole[step] for step in (13, 14)}
