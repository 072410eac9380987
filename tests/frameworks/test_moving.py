"""Runs that move over in the middle: another library has kept their steps, and they go on with
stepwell. Every later loss is that of the undisturbed run, bit for bit."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import stepwell as sw
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import state_dict as names

STEPS, MOVED = 8, 4


class Run:
    """A model in training. Each step has data of its own."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, STEPS)

    def step(self, number: int) -> float:
        """Trains step ``number``."""
        rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(number))
        loss = (self.model(rows) - rows.sum(1, keepdim=True)).square().mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        return float(loss.detach())


def moved(
    root: Path, state: Any, step: Callable[[Any, int], tuple[Any, float]], **keywords: Any
) -> list[float]:
    """Resumes a run from its start, and then from a step of its own. Returns the losses."""
    losses = []
    for end in (MOVED + 2, STEPS):
        with sw.CheckpointManager(root) as manager:
            state, first = manager.resume(state, **keywords)
            for number in range(first, end + 1):
                state, loss = step(state, number)
                losses.append(loss)
                manager.save(number, state)
    return losses


def test_a_run_moves_from_the_trainer(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    ids = torch.randint(0, 32, (32, 8), generator=torch.Generator().manual_seed(1))
    rows = [{"input_ids": one, "labels": one} for one in ids]

    class Trainer(transformers.Trainer):  # type: ignore[misc,name-defined]  # may be absent
        def _get_train_sampler(self, *_: object) -> torch.utils.data.Sampler[int]:
            return torch.utils.data.SequentialSampler(rows)

    def trainer(seed: int, path: Path) -> Any:
        torch.manual_seed(seed)
        config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=32, n_positions=16)
        arguments = transformers.TrainingArguments(
            str(path),
            max_steps=STEPS,
            save_steps=MOVED,
            logging_steps=1,
            per_device_train_batch_size=4,
            learning_rate=0.01,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        return Trainer(transformers.GPT2LMHeadModel(config), arguments, train_dataset=rows)

    whole = trainer(0, tmp_path / "old")
    whole.train()
    expected = [row["loss"] for row in whole.state.log_history if "loss" in row]
    shutil.rmtree(tmp_path / f"old/checkpoint-{STEPS}")

    class Generator:  # dropout draws from it
        def state_dict(self) -> dict[str, Any]:
            return {"cpu": torch.get_rng_state()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            torch.set_rng_state(torch.as_tensor(state["cpu"]))

    other = trainer(9, tmp_path / "unused")
    model = other.model.train()
    other.create_optimizer_and_scheduler(STEPS)
    loader = torch.utils.data.DataLoader(rows, batch_size=4, generator=torch.Generator())
    batches = list(loader)

    def step(state: Any, number: int) -> tuple[Any, float]:
        batch = batches[number - 1]
        loss = model(**batch, num_items_in_batch=batch["labels"].numel()).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        other.optimizer.step()
        other.lr_scheduler.step()
        other.optimizer.zero_grad()
        return state, float(loss.detach())

    state = {
        "model": model,
        "optimizer": other.optimizer,
        "scheduler": other.lr_scheduler,
        "rng_state": Generator(),
    }
    start = sw.Start(
        tmp_path / "old",
        missing={"model/lm_head.weight": "keep"},  # tied to the embedding, which is stored
        exclude=["rng_state/python", "rng_state/numpy"],
    )
    assert moved(tmp_path / "new", state, step, start=start) == expected[MOVED:]


def test_a_run_moves_from_accelerate(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    project = accelerate.utils.ProjectConfiguration(
        str(tmp_path / "old"), automatic_checkpoint_naming=True, iteration=MOVED
    )
    accelerator = accelerate.Accelerator(cpu=True, project_config=project)
    whole = Run(0)
    prepared = accelerator.prepare(whole.model, whole.optimizer, whole.scheduler)
    whole.model, whole.optimizer, whole.scheduler = prepared
    expected = []
    for number in range(1, STEPS + 1):
        expected.append(whole.step(number))
        if number == MOVED:
            accelerator.save_state()
    other = Run(9)
    state = {"model": other.model, "optimizer": other.optimizer, "scheduler": other.scheduler}
    losses = moved(
        tmp_path / "new", state, lambda state, number: (state, other.step(number)), start=tmp_path / "old"
    )
    assert losses == expected[MOVED:]


def test_a_run_moves_from_lightning(tmp_path: Path) -> None:
    lightning = pytest.importorskip("lightning")
    expected: list[float] = []

    class Module(lightning.LightningModule):  # type: ignore[misc,name-defined]  # may be absent
        def __init__(self) -> None:
            super().__init__()
            self.run = Run(0)
            self.net = self.run.model

        def training_step(self, batch: torch.Tensor, _: int) -> torch.Tensor:
            rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(int(batch)))
            loss: torch.Tensor = (self.net(rows) - rows.sum(1, keepdim=True)).square().mean()
            expected.append(float(loss.detach()))
            return loss

        def configure_optimizers(self) -> Any:
            schedule = {"scheduler": self.run.scheduler, "interval": "step"}
            return {"optimizer": self.run.optimizer, "lr_scheduler": schedule}

    checkpoints = lightning.pytorch.callbacks.ModelCheckpoint(
        tmp_path / "old", every_n_train_steps=MOVED, save_top_k=-1, save_on_train_epoch_end=False
    )
    trainer = lightning.Trainer(
        max_epochs=1,
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[checkpoints],
    )
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.arange(1, STEPS + 1), batch_size=1))
    other = Run(9)

    class Schedulers:  # plain values, which Lightning has stored as one list
        def state_dict(self) -> list[dict[str, Any]]:
            return [other.scheduler.state_dict()]

        def load_state_dict(self, states: list[dict[str, Any]]) -> None:
            other.scheduler.load_state_dict(states[0])

    state = {
        "state_dict": torch.nn.ModuleDict({"net": other.model}),
        "optimizer_states": [other.optimizer],
        "lr_schedulers": Schedulers(),
    }
    losses = moved(
        tmp_path / "new",
        state,
        lambda state, number: (state, other.step(number)),
        start=sw.Start(tmp_path / "old", MOVED),
    )
    assert losses == expected[MOVED:]


def test_a_run_moves_from_torchtitan(tmp_path: Path) -> None:
    """The checkpointer of torchtitan saves these entries with ``dcp.save``: the model flat, and the
    optimizer flattened by the names of parameters."""
    flat = names.StateDictOptions(flatten_optimizer_state_dict=True)

    def states(run: Run) -> dict[str, Any]:
        model, optimizer = names.get_state_dict(run.model, run.optimizer, options=flat)
        return {**model, "optimizer": optimizer, "lr_scheduler": run.scheduler}

    whole = Run(0)
    expected = []
    for number in range(1, STEPS + 1):
        expected.append(whole.step(number))
        if number == MOVED:
            saved = {**states(whole), "train_state": {"step": torch.tensor(number)}}
            dcp.save(saved, checkpoint_id=tmp_path / f"old/checkpoint/step-{number}")
    other = Run(9)

    def step(state: Any, number: int) -> tuple[Any, float]:
        model = {name: state[name] for name in other.model.state_dict()}
        names.set_state_dict(
            other.model,
            other.optimizer,
            model_state_dict=model,
            optim_state_dict=state["optimizer"],
            options=flat,
        )
        loss = other.step(number)
        return states(other), loss

    assert moved(tmp_path / "new", states(other), step, start=tmp_path / "old") == expected[MOVED:]


class JaxRun:
    """The same with optax."""

    def __init__(self, seed: int) -> None:
        self.optimizer = optax.adamw(optax.cosine_decay_schedule(0.1, STEPS))
        params = {"w": jax.random.normal(jax.random.key(seed), (4, 1)), "b": jnp.zeros(1)}
        self.state = {"params": params, "opt_state": self.optimizer.init(params)}

    def step(self, state: Any, number: int) -> tuple[Any, float]:
        """Trains step ``number``."""
        rows = jnp.asarray(np.random.default_rng(number).standard_normal((16, 4), np.float32))

        def loss_of(params: Any) -> Any:
            return jnp.square(rows @ params["w"] + params["b"] - rows.sum(1, keepdims=True)).mean()

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, slots = self.optimizer.update(grads, state["opt_state"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt_state": slots}, float(loss)


def whole_of_jax(save: Callable[[Any], object]) -> list[float]:
    run = JaxRun(0)
    losses, state = [], run.state
    for number in range(1, STEPS + 1):
        state, loss = run.step(state, number)
        losses.append(loss)
        if number == MOVED:
            save(state)
    return losses


def test_a_run_moves_from_orbax(tmp_path: Path) -> None:
    import orbax.checkpoint as ocp

    with ocp.CheckpointManager(tmp_path / "old") as manager:
        expected = whole_of_jax(lambda state: manager.save(MOVED, args=ocp.args.StandardSave(state)))
        manager.wait_until_finished()
    other = JaxRun(9)
    # Orbax has stored ``None`` for states without leaves.
    start = sw.Start(tmp_path / "old", unexpected={"opt_state[1]": "ignore"})
    sgd = {"params": other.state["params"], "opt_state": optax.sgd(0.1).init(other.state["params"])}
    with (
        sw.CheckpointManager(tmp_path / "sgd") as mgr,
        pytest.raises(sw.MismatchError, match=r"opt_state\[0\]/mu"),
    ):
        mgr.resume(sgd, start=start)
    assert moved(tmp_path / "new", other.state, other.step, start=start) == expected[MOVED:]


def test_a_run_moves_from_flax(tmp_path: Path) -> None:
    import flax
    from flax.training import checkpoints

    before = flax.config.flax_use_orbax_checkpointing
    flax.config.update("flax_use_orbax_checkpointing", False)
    try:
        expected = whole_of_jax(lambda state: checkpoints.save_checkpoint(tmp_path / "old", state, MOVED))
    finally:
        flax.config.update("flax_use_orbax_checkpointing", before)
    other = JaxRun(9)

    def step(state: Any, number: int) -> tuple[Any, float]:
        found, loss = other.step(flax.serialization.from_state_dict(other.state, state), number)
        return flax.serialization.to_state_dict(found), loss

    plain = flax.serialization.to_state_dict(other.state)
    assert moved(tmp_path / "new", plain, step, start=tmp_path / "old") == expected[MOVED:]
