"""Adopted checkpoints of the real libraries: each byte is checked, and the libraries load them as
before."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest
import stepwell as sw
import torch
import torch.distributed.checkpoint as dcp

ROWS = 300


def values() -> np.ndarray:
    return np.random.default_rng(0).standard_normal((ROWS, 100)).astype(np.float32)


def save_dcp(path: Path) -> Path:
    dcp.save({"model": {"w": torch.from_numpy(values())}, "step": torch.tensor(7)}, checkpoint_id=path / "c")
    return path / "c"


def load_dcp(path: Path) -> Any:
    state = {"model": {"w": torch.zeros(ROWS, 100)}}
    dcp.load(state, checkpoint_id=path)
    return state["model"]["w"].numpy()


def save_torch(path: Path) -> Path:
    torch.save({"model": {"w": torch.from_numpy(values())}}, path / "c.pt")
    return path / "c.pt"


def load_torch(path: Path) -> Any:
    return torch.load(path, weights_only=True)["model"]["w"].numpy()


def save_orbax(path: Path) -> Path:
    with ocp.CheckpointManager(path / "run") as manager:
        manager.save(7, args=ocp.args.StandardSave({"model": {"w": jnp.asarray(values())}}))
        manager.wait_until_finished()
    return path / "run" / "7"


def load_orbax(path: Path) -> Any:
    with ocp.CheckpointManager(path.parent) as manager:
        assert manager.all_steps() == [7]
        return np.asarray(manager.restore(7, args=ocp.args.StandardRestore())["model"]["w"])


def save_flax(path: Path) -> Path:
    import flax

    # As flax.training.checkpoints wrote it.
    (path / "checkpoint_7").write_bytes(flax.serialization.to_bytes({"model": {"w": values()}}))
    return path / "checkpoint_7"


def load_flax(path: Path) -> Any:
    import flax
    from flax.training import checkpoints

    assert checkpoints.latest_checkpoint(path.parent) == str(path)
    return flax.serialization.msgpack_restore(path.read_bytes())["model"]["w"]


LIBRARIES: dict[str, tuple[Callable[[Path], Path], Callable[[Path], Any]]] = {
    "dcp": (save_dcp, load_dcp),
    "torch.save": (save_torch, load_torch),
    "Orbax": (save_orbax, load_orbax),
    "Flax": (save_flax, load_flax),
}


@pytest.mark.parametrize("library", LIBRARIES)
def test_its_own_library_loads_an_adopted_checkpoint(tmp_path: Path, library: str) -> None:
    save, load = LIBRARIES[library]
    path = save(tmp_path)
    sw.adopt(path)
    assert (load(path) == values()).all()
    assert (sw.restore(path)["model"]["w"] == values()).all()
    with sw.open(path) as checkpoint:
        assert (checkpoint["model/w"][17:40, 5] == values()[17:40, 5]).all()
    report = sw.verify(path)
    assert report.ok
    assert report.unguarded_nbytes == 0
    if path.name == "7" or library == "Flax":
        assert sw.open_root(path.parent).latest.number == 7  # type: ignore[union-attr]


@pytest.mark.parametrize("library", LIBRARIES)
def test_no_flipped_bit_is_restored(tmp_path: Path, library: str) -> None:
    """Each part of each file, of the tensors and of what describes them."""
    path = LIBRARIES[library][0](tmp_path)
    sw.adopt(path)
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    files = [one for one in files if "stepwell" not in one.name]
    rng = np.random.default_rng(1)
    found = 0
    for file in files:
        content = file.read_bytes()
        for at in {0, len(content) - 1, *rng.integers(0, len(content), 4).tolist()} if content else ():
            damaged = bytearray(content)
            damaged[at] ^= 1 << int(rng.integers(8))
            file.write_bytes(damaged)
            try:
                # A file that no restore needs may be damaged.
                assert (sw.restore(path)["model"]["w"] == values()).all()
            except sw.CorruptCheckpoint:
                found += 1
            assert not sw.adopt(path, check=True).ok, (file, at)
            file.write_bytes(content)
    assert found >= 4
    assert sw.adopt(path, check=True).ok


def test_a_checkpoint_stays_checked_when_another_is_closed(tmp_path: Path) -> None:
    """The layout of a tensor of DCP is read with the tensor."""
    path = save_dcp(tmp_path)
    sw.adopt(path)
    file = next(path.glob("*.distcp"))
    content, times = file.read_bytes(), os.stat(file)
    at = content.index(b"data.pkl") + 100
    with sw.open(path) as checkpoint:
        sw.open(path).close()
        file.write_bytes(content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
        os.utime(file, ns=(times.st_atime_ns, times.st_mtime_ns))
        with pytest.raises(sw.CorruptCheckpoint, match="block 0: the checksum of the block"):
            checkpoint["model/w"][ROWS - 10 :]  # these rows are in another block


def test_the_trainer_resumes_from_an_adopted_checkpoint(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    config = transformers.GPT2Config(n_layer=1, n_head=2, n_embd=8, vocab_size=32, n_positions=16)
    rows = [{"input_ids": ids, "labels": ids} for ids in torch.randint(0, 32, (16, 8))]

    def trainer(steps: int) -> Any:
        arguments = transformers.TrainingArguments(
            str(tmp_path / "run"),
            max_steps=steps,
            save_steps=2,
            use_cpu=True,
            report_to=[],
            disable_tqdm=True,
        )
        return transformers.Trainer(transformers.GPT2LMHeadModel(config), arguments, train_dataset=rows)

    trainer(2).train()
    assert sw.adopt(tmp_path / "run").path == str(tmp_path / "run/checkpoint-2")
    resumed = trainer(4)
    resumed.train(resume_from_checkpoint=True)
    assert resumed.state.global_step == 4
    assert [step.number for step in sw.open_root(tmp_path / "run").steps] == [2, 4]
    model = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "run/checkpoint-2")
    stored = sw.restore(tmp_path / "run/checkpoint-2")["transformer.wpe.weight"]
    assert (model.transformer.wpe.weight.numpy(force=True) == stored).all()
    assert sw.adopt(tmp_path / "run", 2, check=True).ok


def test_accelerate_loads_an_adopted_checkpoint(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    project = accelerate.utils.ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    accelerator = accelerate.Accelerator(cpu=True, project_config=project)
    model = accelerator.prepare(torch.nn.Linear(2, 2))
    accelerator.save_state()
    saved = model.weight.detach().clone()
    sw.adopt(tmp_path)
    torch.nn.init.zeros_(model.weight)
    accelerator.load_state()
    assert torch.equal(model.weight, saved)


def test_a_step_without_a_number_is_adopted_as_the_newest(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.ones(3)}}, tmp_path / "last.ckpt")  # as Lightning
    report = sw.adopt(tmp_path)
    assert (report.path, report.files) == (str(tmp_path / "last.ckpt"), 1)
    assert sw.adopt(tmp_path, check=True).path == report.path
    with sw.CheckpointManager(tmp_path / "run") as mgr:
        with pytest.raises(sw.MisuseError, match="has no number of a step"):
            mgr.adopt(tmp_path)
        assert mgr.adopt(tmp_path, 5) == 5
        assert (mgr.restore()["state_dict"]["w"] == 1).all()
