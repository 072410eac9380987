"""Adopted steps of the real libraries: what a run that moved over does with them."""

from __future__ import annotations

import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import stepwell as sw
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

from ranks import free_port, run_forked

TORCH = "torch,torch.distributed.checkpoint,torch.distributed.tensor.parallel,stepwell.torch"

PREAMBLE = """
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[5]}", rank=RANK, world_size=WORLD)
mesh = init_device_mesh("cpu", (WORLD,))
values = torch.arange(70, dtype=torch.float32).reshape(7, 10)
"""


def train(model: torch.nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """Trains one step on data of that step."""
    rows = torch.randn(16, 4, generator=torch.Generator().manual_seed(step))
    loss: torch.Tensor = (model(rows) - rows.sum(1, keepdim=True)).square().mean()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def new(seed: int) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = torch.nn.Linear(4, 1)
    return model, torch.optim.AdamW(model.parameters(), 0.01)


def test_a_run_has_its_history_of_dcp_in_one_root(tmp_path: Path) -> None:
    """Later losses after any step of the history equal those of the undisturbed run."""
    model, optimizer = new(0)
    losses = []
    for step in range(1, 9):
        losses.append(train(model, optimizer, step))
        if step in (2, 4):
            weights, slots = get_state_dict(model, optimizer)
            saved = {"model": weights, "optimizer": slots}
            dcp.save(saved, checkpoint_id=tmp_path / f"old/step-{step}")

    def state_of(model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        weights, slots = get_state_dict(model, optimizer)
        return {"model": weights, "optimizer": slots}

    with sw.CheckpointManager(tmp_path / "run") as mgr:
        for step in (4, 2):
            mgr.adopt(tmp_path / "old", from_step=step, metrics={"loss": losses[step - 1]})
        model, optimizer = new(9)
        state, first = mgr.resume(state_of(model, optimizer))
        assert first == 5
        for step in range(first, 9):
            set_state_dict(
                model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
            )
            assert train(model, optimizer, step) == losses[step - 1]
            state = state_of(model, optimizer)
            mgr.save(step, state, metrics={"loss": losses[step - 1]}).result()
        assert mgr.all_steps() == [2, 4, 5, 6, 7, 8]
        mgr.rewind(2)
        model, optimizer = new(9)
        state, first = mgr.resume(state_of(model, optimizer))
        assert first == 3
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        assert [train(model, optimizer, step) for step in (3, 4)] == losses[2:4]
    dcp.load({"model": model.state_dict()}, checkpoint_id=tmp_path / "old/step-4")


def test_ranks_restore_an_adopted_step_of_dcp(tmp_path: Path, root: Path) -> None:
    """Files of three ranks are adopted, and two ranks restore them with other shards."""
    old = tmp_path / "old/step-7"
    save = f"""
    dcp.save({{"w": distribute_tensor(values, mesh, [Shard(0)])}}, checkpoint_id={str(old)!r})
    dist.destroy_process_group()
    """
    run_forked(tmp_path, TORCH, PREAMBLE + textwrap.dedent(save), 3, root, free_port())
    with sw.CheckpointManager(root) as mgr:
        assert mgr.adopt(old.parent, metrics={"loss": 1.0}) == 7
    restore = """
    with sw.CheckpointManager(ROOT) as mgr:
        wanted = {"w": distribute_tensor(torch.zeros(7, 10), mesh, [Shard(1)])}
        assert mgr.best_step("loss", "min") == 7
        for fallback in (False, True):
            found = mgr.restore(into=wanted, fallback=fallback)
            assert torch.equal(found["w"].full_tensor(), values)
            wanted["w"].zero_()
        found, first = mgr.resume(wanted)
        assert first == 8
        try:
            mgr.adopt(sys.argv[6], 9)
        except sw.MisuseError as error:
            print(error)
        mgr.save(8, found).result()
        print(mgr.all_steps())
    dist.destroy_process_group()
    """
    for out in run_forked(tmp_path, TORCH, PREAMBLE + textwrap.dedent(restore), 2, root, free_port(), old):
        assert "open a manager of one process" in out
        assert "[7, 8]" in out


def test_steps_of_the_trainer_are_adopted_whole(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=32, n_positions=16)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 32, (16, 8))]

    def trainer(steps: int) -> Any:
        arguments = transformers.TrainingArguments(
            str(tmp_path / "outputs"),
            max_steps=steps,
            save_steps=2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        return transformers.Trainer(transformers.GPT2LMHeadModel(config), arguments, train_dataset=rows)

    trainer(4).train()
    with sw.CheckpointManager(tmp_path / "outputs" / "steps", retention=1) as mgr:
        for step in (2, 4):
            assert mgr.adopt(tmp_path / f"outputs/checkpoint-{step}") == step
            assert mgr.restore(step).keys() >= {"model", "optimizer", "scheduler", "trainer_state"}
            assert sw.verify(tmp_path / "outputs/steps", step).unguarded_nbytes == 0
        for step in (2, 4):
            model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / f"outputs/checkpoint-{step}")
            stored = mgr.restore(step)["model"]["transformer.wpe.weight"]
            assert (model.transformer.wpe.weight.numpy(force=True) == stored).all()
        assert mgr.apply_retention() == [2]
    resumed = trainer(6)
    resumed.train(resume_from_checkpoint=True)  # its own checkpoints are as they were
    assert resumed.state.global_step == 6
    assert [step.number for step in sw.open_root(tmp_path / "outputs").steps] == [2, 4, 6]


def test_later_marks_of_the_old_library_do_no_harm(tmp_path: Path) -> None:
    """A tracker file that was set back, as by a run that began again from an older step."""
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "old/iter_0000020")  # as Megatron
    tracker = tmp_path / "old/latest_checkpointed_iteration.txt"
    tracker.write_text("20")
    with sw.CheckpointManager(tmp_path / "run") as mgr:
        assert mgr.adopt(tmp_path / "old") == 20
        tracker.write_text("10")
        assert (mgr.restore(20)["w"] == 1).all()
        with pytest.raises(sw.CorruptCheckpoint, match="names step 10"):
            mgr.adopt(tmp_path / "old/iter_0000020", 21)
