"""Roots that the real libraries write: the same steps, the same newest one, the same bytes."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest
import stepwell as sw
import torch
import torch.distributed.checkpoint as dcp
from safetensors.numpy import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter


def same(found: Any, saved: Any) -> None:
    """Compares a restored state with a loaded one, bit for bit."""
    if isinstance(saved, dict):
        assert found.keys() == saved.keys()
        for key in saved:
            same(found[key], saved[key])
    elif isinstance(saved, (list, tuple)):
        assert len(found) == len(saved)
        for one, other in zip(found, saved, strict=True):
            same(one, other)
    elif isinstance(saved, (torch.Tensor, np.ndarray)):
        array = saved.numpy(force=True) if isinstance(saved, torch.Tensor) else saved
        assert found.dtype == array.dtype
        assert found.shape == array.shape
        assert found.tobytes() == array.tobytes()
    else:
        assert found == saved


def names(root: sw.results.Root) -> list[str]:
    """The names of the complete steps."""
    return [step.name for step in root.steps if step.incomplete is None]


def test_steps_of_the_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    torch.manual_seed(0)
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=32, n_positions=16)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 32, (16, 8))]
    arguments = transformers.TrainingArguments(
        str(tmp_path / "run"),
        max_steps=6,
        save_steps=2,
        eval_steps=2,
        eval_strategy="steps",
        load_best_model_at_end=True,
        metric_for_best_model="loss",
        greater_is_better=True,  # so that the best one is not the last one
        per_device_train_batch_size=2,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    model = transformers.GPT2LMHeadModel(config)
    trainer = transformers.Trainer(model, arguments, train_dataset=rows, eval_dataset=rows[:4])
    trainer.train()
    root = sw.open_root(tmp_path / "run")
    assert root.family == "Hugging Face Trainer"
    assert [step.number for step in root.steps] == [2, 4, 6]
    assert root.latest is not None
    assert root.latest.path == transformers.trainer_utils.get_last_checkpoint(tmp_path / "run")
    assert root.best is not None
    assert root.best.path == trainer.state.best_model_checkpoint != root.latest.path
    state = sw.restore(tmp_path / "run", 6)
    assert list(state) == ["model", "optimizer", "rng_state", "scheduler", "trainer_state"]
    same(state["model"], load_file(f"{root.latest.path}/model.safetensors"))
    for part, file in {
        "optimizer": "optimizer.pt",
        "scheduler": "scheduler.pt",
        "rng_state": "rng_state.pth",
    }.items():
        same(state[part], torch.load(f"{root.latest.path}/{file}", weights_only=False))
    assert state["trainer_state"]["global_step"] == 6
    assert sw.verify(tmp_path / "run", 6).ok
    # The directory of a step is also a model of Hugging Face.
    same(sw.restore(root.latest.path), state["model"])


def test_steps_of_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    project = accelerate.utils.ProjectConfiguration(str(tmp_path / "run"), automatic_checkpoint_naming=True)
    accelerator = accelerate.Accelerator(cpu=True, project_config=project)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.Adam(model.parameters())
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer)
    model, optimizer, scheduler = accelerator.prepare(model, optimizer, scheduler)
    for _ in range(2):
        accelerator.backward(model(torch.ones(1, 2)).sum())
        optimizer.step()
        scheduler.step()
        accelerator.save_state()
    for path in (tmp_path / "run", tmp_path / "run/checkpoints"):
        root = sw.open_root(path)
        assert root.family == "accelerate"
        assert names(root) == ["checkpoint_0", "checkpoint_1"]
        state = sw.restore(path)
        assert list(state) == ["model", "optimizer", "random_states_0", "scheduler"]
        same(state["model"], dict(model.state_dict()))
        same(state["optimizer"], optimizer.state_dict())
        same(state["scheduler"], scheduler.state_dict())


def test_steps_of_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")

    class Model(lightning.LightningModule):  # type: ignore[misc,name-defined]  # may be absent
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 1)

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            loss = self.layer(batch).pow(2).mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.Adam(self.parameters())

    callback = lightning.pytorch.callbacks.ModelCheckpoint(
        tmp_path / "run/checkpoints", monitor="loss", save_top_k=-1, save_last=True, mode="max"
    )
    trainer = lightning.Trainer(
        default_root_dir=tmp_path / "run",
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[callback],
    )
    model = Model()
    trainer.fit(model, torch.utils.data.DataLoader(torch.randn(8, 4), batch_size=4))
    root = sw.open_root(tmp_path / "run")
    assert root.family == "Lightning"
    assert [(step.number, step.name) for step in root.steps] == [
        (2, "epoch=0-step=2.ckpt"),
        (4, "last.ckpt"),
        (4, "epoch=1-step=4.ckpt"),
    ]
    assert root.best is not None
    assert root.best.path == callback.best_model_path
    for step in root.steps:
        with root.open(step) as checkpoint:
            found = checkpoint.restore(include="state_dict")
        loaded = torch.load(step.path, weights_only=False)
        same(found["state_dict"], dict(loaded["state_dict"]))
        assert step.number == loaded["global_step"]
    assert root.latest is root.steps[-1]


@pytest.mark.parametrize("is_padded", [False, True])
def test_steps_of_orbax(tmp_path: Path, is_padded: bool) -> None:
    import orbax.checkpoint as ocp

    naming = {"step_prefix": "ckpt", "step_format_fixed_length": 6} if is_padded else {}
    options = ocp.CheckpointManagerOptions(**naming)
    with ocp.CheckpointManager(tmp_path / "run", options=options) as manager:
        for step in (9, 10):
            manager.save(step, args=ocp.args.StandardSave({"w": jnp.full(3, step)}), metrics={"loss": 1.0})
        manager.wait_until_finished()
        steps, latest = manager.all_steps(), manager.latest_step()
    last = tmp_path / "run" / ("ckpt_000010" if is_padded else "10")
    shutil.copytree(last, f"{last}.orbax-checkpoint-tmp")
    root = sw.open_root(tmp_path / "run")
    assert root.family == "Orbax"
    assert [step.number for step in root.steps if step.incomplete is None] == list(steps)
    assert root.latest is not None
    assert root.latest.number == latest
    assert (sw.restore(tmp_path / "run")["w"] == 10).all()
    assert (sw.restore(tmp_path / "run", 9)["w"] == 9).all()
    # A power cut can leave a step like this. Orbax takes it for the newest one.
    (last / "commit_success.txt").unlink()
    assert (sw.restore(tmp_path / "run")["w"] == 9).all()


@pytest.mark.parametrize("by_orbax", [False, True])
def test_steps_of_flax(tmp_path: Path, by_orbax: bool) -> None:
    import flax
    from flax.training import checkpoints

    before = flax.config.flax_use_orbax_checkpointing
    flax.config.update("flax_use_orbax_checkpointing", by_orbax)
    try:
        for step in (9, 10):
            checkpoints.save_checkpoint(tmp_path / "run", {"w": np.full(3, step)}, step, keep=2)
        latest = checkpoints.latest_checkpoint(tmp_path / "run")
    finally:
        flax.config.update("flax_use_orbax_checkpointing", before)
    root = sw.open_root(tmp_path / "run")
    assert root.family == ("Orbax" if by_orbax else "Flax")
    assert names(root) == ["checkpoint_9", "checkpoint_10"]
    assert root.latest is not None
    assert root.latest.path == latest
    assert (sw.restore(tmp_path / "run")["w"] == 10).all()


def saved_by_dcp(path: Path, value: float) -> Path:
    dcp.save({"model": {"w": torch.full((3,), value)}, "train_state": {"step": value}}, checkpoint_id=path)
    return path


def test_steps_of_torchtitan(tmp_path: Path) -> None:
    """The checkpointer of torchtitan calls ``dcp.save`` with these names."""
    for step in (9, 10):
        saved_by_dcp(tmp_path / f"run/checkpoint/step-{step}", step)
    (tmp_path / "run/checkpoint/step-11").mkdir()
    root = sw.open_root(tmp_path / "run")
    assert root.family == "torchtitan"
    assert names(root) == ["step-9", "step-10"]
    with root.open() as checkpoint:
        assert checkpoint.step == 10
        assert (checkpoint["model/w"][:] == 10).all()


def test_steps_of_nemo(tmp_path: Path) -> None:
    """NeMo 2 has the directory of DCP in ``weights``."""
    saved_by_dcp(tmp_path / "run/model--loss=0.5-step=9-last/weights", 9)
    root = sw.open_root(tmp_path / "run")
    assert root.family == "NeMo"
    with root.open(9) as checkpoint:
        assert (checkpoint["model/w"][:] == 9).all()
    assert (sw.restore(root.steps[0].path)["model"]["w"] == 9).all()


@pytest.mark.parametrize("whole", [False, True])
def test_the_parts_of_a_step_of_automodel(tmp_path: Path, whole: bool) -> None:
    """Automodel writes the model through the storage writer of Hugging Face, or by DCP."""
    step = tmp_path / "checkpoints/epoch_0_step_9"
    weights = {"model.norm.weight": torch.full((3,), 9.0), "model.embed.weight": torch.ones(4, 3)}
    more = {"enable_consolidation": True} if whole else {}
    files = dict.fromkeys(weights, 1)
    writer = HuggingFaceStorageWriter(str(step / "model"), files, save_distributed=True, **more)
    dcp.save(weights, storage_writer=writer, no_dist=True)
    saved_by_dcp(step / "optim", 9)
    same(sw.restore(step / "model"), weights)
    with sw.open(step / "optim") as checkpoint:
        assert (checkpoint["model/w"][:] == 9).all()


def test_steps_of_verl(tmp_path: Path) -> None:
    place = tmp_path / "run/global_step_9"
    for model in ("actor", "critic"):
        (place / model).mkdir(parents=True)
        torch.save({"w": torch.full((3,), 9.0)}, place / model / "model_world_size_1_rank_0.pt")
    (tmp_path / "run/latest_checkpointed_iteration.txt").write_text("9")
    root = sw.open_root(tmp_path / "run")
    assert root.family == "verl"
    with root.open() as checkpoint:
        assert list(checkpoint) == ["actor", "critic"]
        assert (checkpoint["critic/w"][:] == 9).all()
    assert (sw.restore(place)["actor"]["w"] == 9).all()
    (place / "actor/model_world_size_1_rank_0.pt").unlink()
    with pytest.raises(sw.CorruptCheckpoint, match="its actor has no files of ranks"):
        sw.restore(place)
