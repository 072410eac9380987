"""``stepwell.integrations.transformers``: the Trainer of Hugging Face."""

from __future__ import annotations

import json
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import stepwell as sw
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

sys.path += [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "python")]

import stepwell.integrations.transformers as ours
import trainer_job
from command_line import flip_a_bit
from longer import longer
from moments import killed_in_a_save, there_from_the_first
from ranks import free_port
from trainer_job import Losses, committed, trainer
from transformers import GPT2LMHeadModel, Trainer, TrainerCallback

JOB = trainer_job.__file__


def job(output: Path, *arguments: str, world: int = 1) -> list[subprocess.CompletedProcess[str]]:
    """Runs the training in processes of its own."""
    port = str(free_port())
    processes = []
    for rank in range(world):
        ranks = {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank),
            "WORLD_SIZE": str(world),
            "MASTER_ADDR": "127.0.0.1",
        }
        processes.append(
            subprocess.Popen(
                [sys.executable, JOB, str(output), *arguments],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={
                    **os.environ,
                    **({**ranks, "MASTER_PORT": port} if world > 1 else {}),
                    "OMP_NUM_THREADS": "1",
                },
            )
        )
    found = []
    for one in processes:
        out, err = one.communicate(timeout=300)
        found.append(subprocess.CompletedProcess(one.args, one.returncode, out, err))
    return found


def losses_of(done: subprocess.CompletedProcess[str]) -> dict[int, float]:
    assert done.returncode == 0, done.stderr
    return {int(step): loss for step, loss in json.loads(done.stdout.splitlines()[-1]).items()}


def test_a_killed_training_resumes_with_equal_losses(tmp_path: Path) -> None:
    whole, plain = Losses(), Losses()
    trainer(tmp_path / "plain", plain).train()
    ours.use(trainer(tmp_path / "whole", whole)).train()
    assert whole.found == plain.found
    assert sorted(os.listdir(tmp_path / "whole")) == sorted(os.listdir(tmp_path / "plain"))

    def kill(output: Path) -> None:
        (killed,) = job(output, "fresh", "8")
        assert killed.returncode == -9, killed.stderr

    output = killed_in_a_save(tmp_path, kill, lambda at: 8 in committed(at))
    rest = Losses()
    ours.use(trainer(output, rest, seed=3)).train(resume_from_checkpoint=True)
    assert rest.found == {step: whole.found[step] for step in range(5, 15)}
    assert not (output / "checkpoint-14" / "optimizer.pt").exists()
    model = GPT2LMHeadModel.from_pretrained(output / "checkpoint-14")
    stored = sw.restore(output / "checkpoint-14" / "stepwell", include="train/model/**", to="torch")
    for name, value in stored["train"]["model"].items():
        assert torch.equal(model.state_dict()[name], value)


@longer
def test_two_ranks_save_together_and_one_resumes(tmp_path: Path) -> None:
    output = tmp_path / "two"
    whole = [losses_of(one) for one in job(tmp_path / "whole", "fresh", world=2)]
    assert all(one.returncode == -9 for one in job(output, "fresh", "8", world=2))
    rest = [losses_of(one) for one in job(output, "resume", world=2)]
    first = min(rest[0])
    assert first in (5, 9)
    assert rest[0] == {step: whole[0][step] for step in range(first, 15)}
    one = Losses()
    ours.use(trainer(output, one, max_steps=16)).train(resume_from_checkpoint=str(output / "checkpoint-12"))
    assert min(one.found) == 13


def test_a_committed_checkpoint_exists_at_every_moment(tmp_path: Path) -> None:
    output = tmp_path / "run"
    with there_from_the_first(lambda: list(committed(output))):
        ours.use(trainer(output, Losses(), save_steps=2, save_total_limit=1)).train()
    assert sorted(os.listdir(output)) == ["checkpoint-14"]


def test_a_torn_checkpoint_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.chdir(tmp_path)
    output = Path("run")
    trainer(output, Losses(), save_total_limit=None).train()  # by the Trainer itself
    (output / "checkpoint-12" / "trainer_state.json").write_text('{"epoch": 1.')
    (output / "checkpoint-12" / "stepwell").mkdir()
    (output / "checkpoint-14" / "trainer_state.json").unlink()
    found = Losses()
    with caplog.at_level(logging.WARNING, "stepwell"):
        ours.use(trainer(output, found)).train(resume_from_checkpoint=True)
    assert min(found.found) == 9
    assert "checkpoint-12 is passed over" in caplog.text
    assert "checkpoint-14 is passed over" in caplog.text


def test_a_damaged_checkpoint_names_an_older_one(tmp_path: Path) -> None:
    output = tmp_path / "run"
    ours.use(trainer(output, Losses())).train()
    data = max(
        (output / "checkpoint-14").glob("stepwell/step_*/*/*.data"), key=lambda file: file.stat().st_size
    )
    flip_a_bit(data, data.stat().st_size // 2)
    with pytest.raises(sw.CorruptCheckpoint) as caught:
        ours.use(trainer(output, Losses(), max_steps=16)).train(resume_from_checkpoint=True)
    assert caught.value.__notes__ == [
        f"An older checkpoint is there: resume_from_checkpoint={str(output / 'checkpoint-12')!r}."
    ]


def test_a_save_that_was_killed_names_an_older_one(tmp_path: Path) -> None:
    output = tmp_path / "run"
    ours.use(trainer(output, Losses())).train()
    (step,) = (output / "checkpoint-14" / "stepwell").glob("step_*")
    shutil.rmtree(step)  # its directory was made, and its save had not committed
    with pytest.raises(sw.StepNotFound) as caught:
        ours.use(trainer(output, Losses())).train(resume_from_checkpoint=str(output / "checkpoint-14"))
    assert caught.value.__notes__ == [
        f"The save of {output / 'checkpoint-14'} was not finished.",
        f"An older checkpoint is there: resume_from_checkpoint={str(output / 'checkpoint-12')!r}.",
    ]


def test_torn_checkpoints_do_not_count_for_the_limit(tmp_path: Path) -> None:
    output = tmp_path / "run"
    ours.use(trainer(output, Losses(), max_steps=8, save_total_limit=None)).train()
    torn = [f"checkpoint-{step}" for step in (9, 10, 11)]
    for name in torn:
        (output / name / "stepwell").mkdir(parents=True)
    ours.use(trainer(output, Losses(), save_total_limit=3)).train(resume_from_checkpoint=True)
    assert set(committed(output)) == {8, 12, 14}
    assert all((output / name).exists() for name in torn)
    ours.use(trainer(output, Losses(), max_steps=16, save_total_limit=2)).train(resume_from_checkpoint=True)
    assert sorted(os.listdir(output)) == ["checkpoint-14", "checkpoint-16"]


def test_nothing_is_deleted_before_the_files_are_synced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    seen: list[set[str]] = []
    sync, remove = ours._placing._sync, ours._placing._remove

    def removed(path: str) -> None:
        seen.append(set(synced))
        remove(path)

    monkeypatch.setattr(ours._placing, "_sync", lambda path: (synced.append(path), sync(path)))
    monkeypatch.setattr(ours._placing, "_remove", removed)
    ours.use(trainer(tmp_path / "run", Losses(), max_steps=8, save_total_limit=1)).train()
    newest = tmp_path / "run" / "checkpoint-8"
    (found,) = seen
    assert {str(tmp_path / "run"), str(newest)} <= found
    assert {str(newest / name) for name in ("model.safetensors", "trainer_state.json")} <= found
    assert os.listdir(tmp_path / "run") == ["checkpoint-8"]


def test_what_cannot_be_stored_is_refused_before_training(tmp_path: Path) -> None:
    losses = Losses()
    one = trainer(tmp_path / "run", losses)
    one.optimizer = torch.optim.AdamW(one.model.parameters())
    one.optimizer.param_groups[0]["odd"] = object()
    with pytest.raises(sw.UnsupportedLeaf, match="odd"):
        ours.use(one).train()
    assert not losses.found
    with pytest.raises(sw.MisuseError, match="save_on_each_node"):
        ours.use(trainer(tmp_path / "run", losses, save_on_each_node=True))


def test_a_resume_is_proven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    options = {"max_steps": 10, "save_total_limit": None}
    output, first = tmp_path / "run", str(tmp_path / "run" / "checkpoint-4")
    ours.use(trainer(output, Losses(), **options), prove_resume=3).train()
    events: list[object] = []
    again = ours.use(trainer(output, Losses(), **options), prove_resume=3, on_event=events.append)
    again.train(resume_from_checkpoint=first)
    traced = [one for one in events if isinstance(one, sw.events.TraceEvent)]
    assert [(one.base, one.step, one.outcome) for one in traced] == [(4, step, "same") for step in (5, 6, 7)]

    restore = ours.restore

    def forgotten(root: str, into: dict[str, Any], **options: Any) -> Any:
        return into if "random" in into else restore(root, into=into, **options)

    monkeypatch.setattr(ours, "restore", forgotten)
    differing = trainer(output, Losses(), **options)
    ours.use(differing, prove_resume=3, on_resume_difference="raise")
    with pytest.raises(sw.errors.ResumeDiffers, match="step 5, 1 after the restored step 4") as caught:
        differing.train(resume_from_checkpoint=first)
    assert caught.value.difference.causes[0].startswith("a random generator was not restored")


def test_a_checkpoint_that_is_saved_again_is_proven(tmp_path: Path) -> None:
    options = {"max_steps": 8, "save_total_limit": None}
    output = tmp_path / "run"
    ours.use(trainer(output, Losses(), **options), prove_resume=2).train()
    ours.use(trainer(output, Losses(), **options), prove_resume=2).train()  # from the start
    events: list[object] = []
    again = ours.use(trainer(output, Losses(), **options), prove_resume=2, on_event=events.append)
    with sw.CheckpointManager(output / "checkpoint-4" / "stepwell"):  # another run resumes it, too
        again.train(resume_from_checkpoint=str(output / "checkpoint-4"))
    traced = [one for one in events if isinstance(one, sw.events.TraceEvent)]
    assert [one.outcome for one in traced] == ["same", "same"]


def test_the_checkpoint_that_was_saved_last_stays(tmp_path: Path) -> None:
    output = tmp_path / "run"
    ours.use(trainer(output, Losses(), save_total_limit=None)).train()
    one = trainer(output, Losses(), max_steps=8, save_total_limit=2)
    # It writes step 8 again, in a directory that is older than those of later steps.
    ours.use(one).train(resume_from_checkpoint=str(output / "checkpoint-4"))
    assert 8 in set(committed(output))


def test_a_training_that_fails_while_it_is_traced_ends(tmp_path: Path) -> None:
    class Failing(TrainerCallback):
        def on_step_end(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            if state.global_step == 6:
                raise ArithmeticError

    one = ours.use(trainer(tmp_path / "run", Losses()), prove_resume=100)
    one.add_callback(Failing())
    with pytest.raises(ArithmeticError):
        one.train()
    assert ours.newest_checkpoint(str(tmp_path / "run")) == str(tmp_path / "run" / "checkpoint-4")
    ours.use(trainer(tmp_path / "run", Losses()), prove_resume=2).train(resume_from_checkpoint=True)
    assert set(committed(tmp_path / "run")) == {12, 14}


def test_without_a_complete_checkpoint_nothing_resumes(tmp_path: Path) -> None:
    (tmp_path / "run" / "checkpoint-3" / "stepwell").mkdir(parents=True)
    one = ours.use(trainer(tmp_path / "run", Losses()))
    with pytest.raises(ValueError, match="no complete checkpoint"):
        one.train(resume_from_checkpoint=True)
    with pytest.raises(sw.StepwellError, match="no step"):
        one.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-3"))


def test_a_failed_save_ends_the_training(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(28, "No space left on device")

    begin = ours._guest.save
    monkeypatch.setattr(ours._guest, "save", lambda *given, **options: begin(*given[:-1], fail, **options))
    with pytest.raises(OSError, match="No space left"):
        ours.use(trainer(tmp_path / "run", Losses())).train()
    assert sorted(os.listdir(tmp_path / "run")) == ["checkpoint-4"]


def test_classes_of_others_stay_in_front(tmp_path: Path) -> None:
    calls = []

    class Own(Trainer):
        def _save_checkpoint(self, model: torch.nn.Module, trial: object) -> None:
            calls.append(self.state.global_step)
            super()._save_checkpoint(model, trial)

    one = trainer(tmp_path / "run", Losses(), max_steps=4)
    one.__class__ = Own
    ours.use(ours.use(one)).train()
    assert calls == [4]
    assert isinstance(one, Own)
    assert set(committed(tmp_path / "run")) == {4}
    one.is_fsdp_enabled = True
    with pytest.raises(sw.MisuseError, match="FSDP"):
        ours.use(one)
    with pytest.raises(sw.MisuseError, match="takes a transformers"):
        ours.use(object())  # type: ignore[type-var]


def test_the_best_model_is_loaded_at_the_end(tmp_path: Path) -> None:
    one = trainer(
        tmp_path / "run",
        Losses(),
        load_best_model_at_end=True,
        eval_strategy="steps",
        eval_steps=4,
        save_total_limit=1,
        metric_for_best_model="loss",
    )
    ours.use(one).train()
    best = one.state.best_model_checkpoint
    assert best is not None
    stored = sw.restore(os.path.join(best, "stepwell"), include="train/model/**", to="torch")
    for name, value in stored["train"]["model"].items():
        assert torch.equal(one.model.state_dict()[name].cpu(), value)


def test_a_just_in_time_save_resumes(tmp_path: Path) -> None:
    one = ours.use(trainer(tmp_path / "run", Losses(), enable_jit_checkpoint=True))
    callbacks = one.callback_handler.callbacks
    jit = next(found.jit_manager for found in callbacks if hasattr(found, "jit_manager"))

    class Requested(TrainerCallback):
        def on_step_begin(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
            jit.is_checkpoint_requested = state.global_step == 6

    callbacks.insert(0, Requested())
    one.train()
    assert set(committed(tmp_path / "run")) == {4, 6}
    rest, whole = Losses(), Losses()
    ours.use(trainer(tmp_path / "run", rest)).train(resume_from_checkpoint=True)
    ours.use(trainer(tmp_path / "whole", whole)).train()
    assert rest.found == {step: whole.found[step] for step in range(7, 15)}


@pytest.mark.parametrize(("saved", "now"), [(0, 1), (1, 0), (1, 2)])
def test_a_machine_with_other_cuda_devices_resumes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, saved: int, now: int
) -> None:
    real = ours.random_numbers

    def devices(number: int) -> list[torch.Generator]:
        """Has generators of so many devices."""
        cuda = [torch.Generator() for _ in range(number)]

        def found() -> sw.PerRank[dict[str, object]]:
            generators = real()
            if cuda:
                generators.value["cuda"] = cuda
            return generators

        monkeypatch.setattr(ours, "random_numbers", found)
        return cuda

    before, rest, whole = devices(saved), Losses(), Losses()
    ours.use(trainer(tmp_path / "run", whole, save_total_limit=None)).train()
    after = devices(now)
    for one in after:
        one.manual_seed(7)
    ours.use(trainer(tmp_path / "run", rest)).train(str(tmp_path / "run" / "checkpoint-8"))
    assert rest.found == {step: whole.found[step] for step in range(9, 15)}
    assert [one.initial_seed() for one in after] == [one.initial_seed() for one in before[:now]] + [7] * (
        now - min(saved, now)
    )


def test_a_resume_logs_no_patterns_of_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    ours.use(trainer(tmp_path / "run", Losses(), max_steps=4)).train()
    with caplog.at_level(logging.WARNING, "stepwell"):
        ours.use(trainer(tmp_path / "run", Losses(), max_steps=6)).train(resume_from_checkpoint=True)
    assert not caplog.records


def test_save_only_model_writes_no_step(tmp_path: Path) -> None:
    ours.use(trainer(tmp_path / "run", Losses(), max_steps=4, save_only_model=True)).train()
    assert not set(committed(tmp_path / "run"))
    GPT2LMHeadModel.from_pretrained(tmp_path / "run" / "checkpoint-4")
