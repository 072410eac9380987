"""``stepwell.integrations.torchtitan``: saves and loads with the parts of torchtitan."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stepwell as sw
import torch
import torch.distributed as dist

pytest.importorskip("torchtitan")

sys.path += [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "python")]

import stepwell.integrations.torchtitan as ours
from moments import killed_in_a_save, there_from_the_first
from ranks import free_port, run_forked
from safetensors.torch import load_file
from torchtitan.components.checkpointer import ModelWrapper
from torchtitan.protocols.state_dict_adapter import StateDictAdapter
from torchtitan_job import OURS, Run


@pytest.fixture(autouse=True, scope="module")
def _group() -> Iterator[None]:
    """torchtitan always has a process group."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


MODULES = "torch,torch.distributed.fsdp,torchtitan.components.dataloader,stepwell.integrations.torchtitan"
TRAINING = f"""
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
import torchtitan_job
print(torchtitan_job.ranks(Path(ROOT), RANK, WORLD, *sys.argv[5:7]))
"""


def train(folder: Path, project: Path, how: str, world: int) -> list[list[dict[int, float]]]:
    """Trains in processes of their own. Returns what each has printed."""
    found = run_forked(folder, MODULES, TRAINING, world, project, free_port(), how, timeout=300)
    return [eval(next(line for line in one.splitlines() if line.startswith("[{"))) for one in found]


def killed(folder: Path, project: Path, world: int) -> None:
    with pytest.raises(AssertionError, match="-9"):
        train(folder, project, "killed", world)


def root(project: Path) -> Path:
    return project / "checkpoint" / "stepwell"


def steps(project: Path) -> list[int | None]:
    return [one.number for one in sw.open_root(root(project)).steps]


def after(losses: dict[int, float], step: int) -> dict[int, float]:
    return {one: loss for one, loss in losses.items() if one > step}


def test_a_killed_training_resumes_with_equal_losses(tmp_path: Path) -> None:
    plain = Run(tmp_path / "plain", override="").train()
    assert Run(tmp_path / "whole").train() == plain
    assert steps(tmp_path / "whole") == [3, 6, 9, 12]

    place = killed_in_a_save(tmp_path, lambda at: killed(tmp_path, at, 1), lambda at: 9 in steps(at))
    assert Run(place).train() == after(plain, 6)
    assert steps(place) == [3, 6, 9, 12]


def test_two_ranks_resume_and_one_rank_loads(tmp_path: Path) -> None:
    killed(tmp_path, tmp_path / "two", 2)
    for rest, plain in train(tmp_path, tmp_path / "two", "resume", 2):
        first = min(rest)
        assert first in (7, 10)
        assert rest == after(plain, first - 1)

    with pytest.raises(AssertionError, match="dp_degree is inconsistent"):
        Run(tmp_path / "two").train()
    one = Run(tmp_path / "two", exclude_from_loading=["dataloader"], steps=13)
    one.checkpointer.load()
    stored = sw.restore(root(tmp_path / "two"), to="torch")
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, stored["model"][name])
    moments = one.optimizers.state_dict()
    assert torch.equal(moments["state.0.weight.exp_avg"], stored["optimizer"]["state.0.weight.exp_avg"])
    assert (one.step, one.lr_schedulers.schedulers[0].last_epoch) == (12, 12)
    assert list(one.train()) == [13]


def test_steps_of_torchtitan_still_load(tmp_path: Path) -> None:
    plain = Run(tmp_path / "plain", override="", steps=15).train()
    Run(tmp_path / "old", override="", steps=9).train()
    assert Run(tmp_path / "old").train() == after({step: plain[step] for step in range(1, 13)}, 9)
    assert steps(tmp_path / "old") == [12]
    assert Run(tmp_path / "old", steps=15).train() == after(plain, 12)
    with pytest.raises(sw.MisuseError, match="newer steps than step-6"):
        Run(tmp_path / "old", load_step=6).train()


def test_a_manager_goes_on_with_steps_of_torchtitan(tmp_path: Path) -> None:
    """A loop of one's own takes the state by the names that torchtitan has stored."""
    plain = Run(tmp_path / "plain", override="").train()
    Run(tmp_path / "old", override="", steps=9).train()
    listed = sw.open_root(tmp_path / "old")
    assert listed.family == "torchtitan"
    assert [(one.number, one.incomplete) for one in listed.steps] == [(3, None), (6, None), (9, None)]
    run = Run(tmp_path / "new", enable=False)
    parts = {
        "optimizer": run.optimizers,
        "lr_scheduler": run.lr_schedulers,
        "dataloader": run.loader,
        "train_state": run,
    }
    state = {**run.model.state_dict(), **{name: part.state_dict() for name, part in parts.items()}}
    with sw.CheckpointManager(tmp_path / "new") as mgr:
        state, first = mgr.resume(state, start=tmp_path / "old")
    assert first == 10
    for name, part in parts.items():
        part.load_state_dict(state[name])
    assert run.train() == after(plain, 9)


def test_a_committed_step_exists_at_every_moment(tmp_path: Path) -> None:
    with there_from_the_first(lambda: list(root(tmp_path).glob("step_*"))):
        Run(tmp_path, interval=1, keep_latest_k=2, steps=30).train()
    assert steps(tmp_path) == [29, 30]


def test_a_resume_is_proven(tmp_path: Path) -> None:
    proven = OURS + '={"prove_resume": 2}'
    Run(tmp_path, override=proven, steps=8, interval=6).train()
    Run(tmp_path, override=proven, steps=8, interval=6, load_step=6).train()
    found = sw.compare_traces(root(tmp_path), step=6)
    assert [run.traced_steps for run in found.traces] == [(6, 7, 8), (7, 8)]
    assert (bool(found), found.compared_steps) == (True, 2)


def test_a_torn_step_is_passed_over(tmp_path: Path) -> None:
    plain = Run(tmp_path).train()
    (root(tmp_path) / "step_00000012" / "manifest.json").unlink()
    assert Run(tmp_path).train() == after(plain, 9)
    assert steps(tmp_path) == [3, 6, 9, 12]


def test_a_damaged_step_is_moved_into_a_branch(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = Run(tmp_path).train()
    data = next((root(tmp_path) / "step_00000012").glob("i*/*.data"))
    content = bytearray(data.read_bytes())
    content[4096] ^= 1
    data.write_bytes(content)
    with caplog.at_level(logging.WARNING, "stepwell"):
        assert Run(tmp_path).train() == after(plain, 9)
    assert "not step 12" in caplog.text
    assert steps(tmp_path) == [3, 6, 9, 12]


def test_an_earlier_step_moves_later_ones_into_a_branch(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    plain = Run(tmp_path).train()
    evaluation = Run(tmp_path, load_only=True, load_step=6, steps=7)
    assert evaluation.train() == {7: plain[7]}
    assert steps(tmp_path) == [3, 6, 9, 12]
    with caplog.at_level(logging.WARNING, "stepwell"):
        assert Run(tmp_path, load_step=6, steps=9).train() == {step: plain[step] for step in (7, 8, 9)}
    assert "moved the steps after 6" in caplog.text
    assert steps(tmp_path) == [3, 6, 9]
    with pytest.raises(sw.StepNotFound, match="no step 4"):
        Run(tmp_path, load_step=4).train()


def test_the_last_save_has_the_model_only(tmp_path: Path) -> None:
    first = Run(tmp_path / "first", last_save_model_only=True, export_dtype="bfloat16", keep_latest_k=2)
    first.train()
    stored = sw.restore(root(tmp_path / "first"), to="torch")
    assert list(stored) == ["model"]
    for name, value in first.model.state_dict().items():
        assert torch.equal(stored["model"][name], value.bfloat16())
    with pytest.raises(sw.MisuseError, match=r"step 12 of .* has the model only"):
        Run(tmp_path / "first", steps=15).train()
    second = Run(tmp_path / "second", initial_load_path=str(root(tmp_path / "first")))
    assert second.checkpointer.load()
    assert second.step == 0
    for name, value in second.model.state_dict().items():
        assert torch.equal(value, stored["model"][name].double())


def test_a_run_begins_with_a_whole_step_of_another(tmp_path: Path) -> None:
    plain = Run(tmp_path / "first").train()
    path = root(tmp_path / "first") / "step_00000009"
    second = Run(tmp_path / "second", initial_load_path=str(path), initial_load_model_only=False)
    assert second.train() == after(plain, 9)


def test_another_model_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    Run(tmp_path).train()
    run = Run(tmp_path)
    before = run.model[0].weight.clone()
    run.checkpointer.states["model"] = ModelWrapper(run.model[:2])
    with pytest.raises(sw.MismatchError, match=r"model/2\.weight"):
        run.train()
    assert torch.equal(run.model[0].weight, before)


class Adapter(StateDictAdapter):  # type: ignore[misc]  # torchtitan declares no types
    """Names of Hugging Face for the model of the tests."""

    def to_hf(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        return {f"layers.{name}": one for name, one in state_dict.items()}

    def from_hf(self, hf_state_dict: dict[str, Any]) -> dict[str, Any]:
        return {name.removeprefix("layers."): one for name, one in hf_state_dict.items()}


def test_files_of_hugging_face_are_written_and_loaded(tmp_path: Path) -> None:
    adapter = Adapter(None, None)
    first = Run(tmp_path / "first", sd_adapter=adapter, last_save_model_only=True, last_save_in_hf=True)
    first.train()
    assert steps(tmp_path / "first") == [3, 6, 9]
    (file,) = (tmp_path / "first" / "checkpoint" / "step-12").glob("*.safetensors")
    weights = load_file(file)
    for name, value in first.model.state_dict().items():
        assert torch.equal(weights[f"layers.{name}"], value.float())
    second = Run(
        tmp_path / "second", sd_adapter=adapter, initial_load_in_hf=True, initial_load_path=str(file.parent)
    )
    assert second.checkpointer.load()
    assert torch.equal(second.model[0].weight, weights["layers.0.weight"].double())
    # A run cannot resume from the export.
    assert sorted(Run(tmp_path / "first", sd_adapter=adapter).train()) == [10, 11, 12]


def test_a_seed_checkpoint_begins_with_the_model(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    seed = Run(tmp_path, last_save_model_only=True)
    with torch.no_grad():
        seed.model[0].weight.fill_(0.5)
    seed.checkpointer.save(curr_step=0, last_step=True)
    seed.checkpointer.close()
    run = Run(tmp_path)
    with caplog.at_level(logging.WARNING, "stepwell"):
        assert run.checkpointer.load()
    assert not [record for record in caplog.records if record.name.startswith("stepwell")]
    assert (run.step, run.model[0].weight.unique().tolist()) == (0, [0.5])


def test_disabled_saves_return_when_they_are_committed(tmp_path: Path) -> None:
    run = Run(tmp_path, async_mode="disabled")
    assert run.checkpointer.save(3)
    assert steps(tmp_path) == [3]
    assert run.checkpointer.save_future is None
    own = Run(
        tmp_path / "own", override=f"{OURS}={json.dumps({'async_mode': 'async'})}", async_mode="disabled"
    )
    assert own.checkpointer.save(3)
    assert own.checkpointer.save_future is not None
    own.checkpointer.maybe_wait_for_saving()
    assert steps(tmp_path / "own") == [3]


FAILS = """
import resource, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import torch.distributed as dist
from torchtitan_job import Run
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
run = Run(Path(sys.argv[2]))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, 1 << 10))
run.train()
"""


def test_a_failed_save_ends_the_training(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAILS, str(Path(__file__).parent), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1
    assert "SaveFailed" in done.stderr
    assert str(root(tmp_path)) in done.stderr
    assert "File too large" in done.stderr
    assert not list(root(tmp_path).glob("step_*"))


def test_what_cannot_be_stored_is_refused_before_training(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.state_dict = lambda: {"odd": object()}  # type: ignore[method-assign]
    with pytest.raises(sw.UnsupportedLeaf, match=r"train_state.*odd"):
        run.train()
    odd = Run(tmp_path / "odd")
    odd.optimizers.optimizers[0].param_groups[0]["odd"] = object()
    with pytest.raises(sw.UnsupportedLeaf, match=r"optimizer.*odd"):
        odd.train()
    assert run.step == odd.step == 0


def test_a_disabled_manager_does_nothing(tmp_path: Path) -> None:
    assert sorted(Run(tmp_path, enable=False).train()) == list(range(1, 13))
    assert Run(tmp_path, load_only=True).train() == Run(tmp_path, enable=False).train()
    assert os.listdir(tmp_path) == []


def test_an_unknown_state_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sw.MisuseError, match="no state 'odd'"):
        Run(tmp_path, exclude_from_loading=["odd"])
    config = ours.StepwellManager.Config(enable=True)
    with pytest.raises(ValueError, match="derive"):
        ours.use(config, odd=1)
