"""``stepwell.integrations.lightning``: checkpoints of Lightning and Fabric."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import stepwell as sw
import torch

pytest.importorskip("lightning")

sys.path += [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "python")]

import lightning
import lightning_job
from accidents import files_no_longer_than
from lightning_job import Model, Sharded, model, sharded, trainer
from longer import longer
from moments import killed_in_a_save, there_from_the_first
from ranks import free_port, run_forked
from stepwell import _lifecycle
from stepwell.integrations import _placing
from stepwell.integrations.lightning import StepwellIO, load_from_checkpoint
from stepwell.integrations.lightning_parallel import StepwellModelParallelStrategy

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::FutureWarning")


def job(output: Path, devices: int, killed: int) -> subprocess.CompletedProcess[str]:
    """Runs the training in a process of its own, which resumes if it can."""
    return subprocess.run(
        [sys.executable, lightning_job.__file__, str(output), str(devices), str(killed)],
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def losses_of(done: subprocess.CompletedProcess[str]) -> dict[int, float]:
    assert done.returncode == 0, done.stderr
    line = next(line for line in reversed(done.stdout.splitlines()) if line.startswith("{"))
    return {int(step): loss for step, loss in json.loads(line).items()}


def test_a_killed_training_resumes_with_equal_losses(tmp_path: Path) -> None:
    plain, whole = model(), model()
    trainer(tmp_path / "plain", []).fit(plain)
    trainer(tmp_path / "whole", [StepwellIO()]).fit(whole)
    assert whole.losses == plain.losses
    assert sorted(os.listdir(tmp_path / "whole")) == sorted(os.listdir(tmp_path / "plain"))

    def kill(output: Path) -> None:
        killed = job(output, 1, killed=1)
        assert killed.returncode == -9, killed.stderr

    def is_second(output: Path) -> bool:
        found = sw.restore(output / "last.ckpt", include="global_step")
        return bool(found["global_step"] == 16)

    place = killed_in_a_save(tmp_path, kill, is_second)
    rest = losses_of(job(place, 1, killed=-1))
    assert rest == {step: plain.losses[step] for step in range(8, 24)}


@longer
def test_two_devices_resume(tmp_path: Path) -> None:
    whole = losses_of(job(tmp_path / "whole", 2, killed=-1))
    assert job(tmp_path / "halves", 2, killed=1).returncode != 0
    rest = losses_of(job(tmp_path / "halves", 2, killed=-1))
    first = min(rest)
    assert first in (4, 8)
    assert rest == {step: whole[step] for step in range(first, 12)}
    one = model()
    again = trainer(tmp_path / "halves", [StepwellIO()], max_epochs=4)
    again.fit(one, ckpt_path="last")
    assert sorted(one.losses) == list(range(12, 20))  # an epoch of one device has eight steps
    assert all(sw.verify(path).ok for path in (tmp_path / "halves").glob("*.ckpt"))


@pytest.fixture
def _one_device() -> Iterator[None]:
    """Ends the process group that Lightning starts, and takes its variables away."""
    with mock.patch.dict(os.environ):
        yield
    if torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


MODULES = "lightning,torch.distributed.fsdp,stepwell.integrations.lightning_parallel"
TRAINING = f"""
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
import lightning_job
print(lightning_job.ranks(Path(ROOT), RANK, *sys.argv[5:7]))
"""


def train(folder: Path, how: str) -> list[list[dict[int, float]]]:
    """Trains in two processes. Returns what each has printed."""
    found = run_forked(folder, MODULES, TRAINING, 2, folder, free_port(), how, timeout=300)
    return [eval(next(line for line in one.splitlines() if line.startswith("[{"))) for one in found]


class Loaded(lightning_job.Callback):
    """Keeps the state that a training begins with."""

    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.weights = {name: one.full_tensor().clone() for name, one in module.state_dict().items()}
        self.steps = {int(one["step"]) for one in trainer.optimizers[0].state.values()}


@pytest.mark.usefixtures("_one_device")
def test_shards_resume_on_as_many_and_on_fewer_devices(tmp_path: Path) -> None:
    def kill(place: Path) -> None:
        place.mkdir()
        with pytest.raises(AssertionError, match="-9"):
            train(place, "killed")

    def is_second(place: Path) -> bool:
        found = sw.restore(place / "two" / "last.ckpt" / "stepwell", include="global_step")
        return bool(found["global_step"] == 8)

    place = killed_in_a_save(tmp_path, kill, is_second)
    for rest, plain in train(place, "resume"):
        assert rest == {step: plain[step] for step in range(4, 12)}

    # The other folder has checkpoints that Lightning has written.
    for folder, path in ("two", "last.ckpt/stepwell"), ("plain", "last.ckpt"):
        stored = sw.restore(place / folder / path, to="torch")["state_dict"]
        loaded = Loaded()
        again = trainer(place / folder, [], loaded, max_epochs=4, **sharded(1))
        again.fit(model(Sharded), ckpt_path="last")
        assert loaded.steps == {12}
        assert stored.keys() == loaded.weights.keys()
        assert all(torch.equal(stored[name], one) for name, one in loaded.weights.items())
        assert sw.verify(place / folder / "last.ckpt" / "stepwell").ok
        assert not (place / folder / "epoch=2-step=12.ckpt").exists()


@pytest.mark.usefixtures("_one_device")
def test_a_damaged_checkpoint_of_shards_names_another(tmp_path: Path) -> None:
    trainer(tmp_path, [], save_top_k=-1, max_epochs=2, **sharded(1)).fit(model(Sharded))
    (step,) = (tmp_path / "last.ckpt" / "stepwell").glob("step_*")
    (step / "manifest.json").unlink()
    with pytest.raises(sw.StepwellError, match=r"last\.ckpt") as caught:
        trainer(tmp_path, [], **sharded(1)).fit(model(Sharded), ckpt_path="last")
    other = str(tmp_path / "epoch=1-step=16.ckpt")
    assert caught.value.__notes__ == [f"Another checkpoint is there: ckpt_path={other!r}."]
    loaded = Loaded()
    trainer(tmp_path, [], loaded, **sharded(1)).fit(model(Sharded), ckpt_path=other)
    assert loaded.steps == {16}


def test_a_failed_save_of_shards_ends_the_training(tmp_path: Path) -> None:
    script = """
import resource, signal, sys
from pathlib import Path
from lightning_job import Callback, Sharded, model, sharded, trainer

class Limited(Callback):
    def on_train_start(self, trainer, module):
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, 1 << 10))

trainer(Path(sys.argv[1]), [], Limited(), **sharded(1)).fit(model(Sharded))
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
        check=False,
    )
    assert done.returncode == 1
    assert "SaveFailed" in done.stderr
    assert "File too large" in done.stderr
    assert "was not looked at" not in done.stderr


def test_what_the_strategy_does_not_serve_is_refused() -> None:
    with pytest.raises(sw.MisuseError, match="no single files"):
        StepwellModelParallelStrategy(save_distributed_checkpoint=False)
    with pytest.raises(sw.MisuseError, match="storage_options"):
        StepwellModelParallelStrategy().save_checkpoint({}, "x", storage_options={})


@pytest.mark.parametrize("save_last", [False, True])
def test_a_committed_checkpoint_exists_at_every_moment(tmp_path: Path, save_last: bool) -> None:
    with there_from_the_first(lambda: list(tmp_path.glob("*.ckpt/manifest.json"))):
        trainer(tmp_path, [StepwellIO()], save_last=save_last, max_epochs=10).fit(model())
    newest = ["epoch=9-step=80.ckpt", *(["last.ckpt"] if save_last else [])]
    assert sorted(os.listdir(tmp_path)) == newest


@pytest.mark.parametrize("epoch", [1, 2])
def test_a_failed_save_ends_the_training(tmp_path: Path, epoch: int) -> None:
    class Full(lightning_job.Callback):
        def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
            if trainer.current_epoch == epoch:
                for save in trainer.strategy.checkpoint_io._saves.values():
                    save.result()  # those of the epoch before
                limits.enter_context(files_no_longer_than(1 << 10))

    one = model()
    with ExitStack() as limits, pytest.raises(sw.SaveFailed, match="too large"):
        trainer(tmp_path, [StepwellIO()], Full()).fit(one)
    assert max(one.losses) < 24
    kept = f"epoch={epoch - 1}-step={8 * epoch}.ckpt"
    assert sorted(os.listdir(tmp_path)) == [kept, "last.ckpt"]
    assert all(sw.verify(tmp_path / name).ok for name in (kept, "last.ckpt"))


def test_the_best_checkpoints_stay(tmp_path: Path) -> None:
    one = trainer(tmp_path, [StepwellIO()], monitor="loss", save_top_k=2, max_epochs=5)
    one.fit(model())
    best = one.checkpoint_callback.best_k_models
    assert len(best) == 2
    assert {str(path) for path in tmp_path.glob("epoch*")} == set(best)
    assert all(sw.verify(path).ok for path in best)


def test_a_checkpoint_that_is_a_file_still_loads(tmp_path: Path) -> None:
    trainer(tmp_path / "old", [], max_epochs=1).fit(model())
    one, plain = model(), model()
    trainer(tmp_path / "a", [StepwellIO()], max_epochs=2).fit(one, ckpt_path=tmp_path / "old" / "last.ckpt")
    trainer(tmp_path / "b", [], max_epochs=2).fit(plain, ckpt_path=tmp_path / "old" / "last.ckpt")
    assert one.losses == plain.losses
    # A save replaces the file of this name. If it fails, the file stays.
    with pytest.raises(sw.UnsupportedLeaf):
        StepwellIO().save_checkpoint({"f": lambda: 0}, tmp_path / "b" / "last.ckpt")
    assert (tmp_path / "b" / "last.ckpt").is_file()
    plugin = StepwellIO()
    with files_no_longer_than(1 << 20):  # the save fails in the background
        plugin.save_checkpoint({"w": torch.ones(1 << 19)}, tmp_path / "b" / "last.ckpt")
        with pytest.raises(sw.SaveFailed):
            plugin.teardown()
    _placing.wait_removed()
    assert (tmp_path / "b" / "last.ckpt").is_file()
    again = trainer(tmp_path / "b", [StepwellIO()], max_epochs=3)
    again.fit(model(), ckpt_path=tmp_path / "b" / "last.ckpt")
    assert sw.verify(tmp_path / "b" / "last.ckpt").ok
    assert not (tmp_path / "b" / "last.ckpt.replaced").exists()
    StepwellIO().remove_checkpoint(tmp_path / "old" / "last.ckpt")


@pytest.mark.parametrize("was_killed", [False, True])
def test_a_checkpoint_is_replaced_without_a_swap(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, was_killed: bool
) -> None:
    monkeypatch.setattr(_placing, "_can_swap", lambda _: False)  # as on NFS
    if was_killed:
        sw.save(tmp_path / "last.ckpt.new", {"w": 1})
    one = model()
    trainer(tmp_path, [StepwellIO()]).fit(one)
    assert sw.restore(tmp_path / "last.ckpt", include="global_step")["global_step"] == 24
    assert len(os.listdir(tmp_path)) == 2, "the last one and one of an epoch"
    again = model()
    trainer(tmp_path, [StepwellIO()], max_epochs=4).fit(again, ckpt_path="last")
    assert min(again.losses) == 24


def save_at(place: Path, value: int) -> None:
    plugin = StepwellIO()
    plugin.save_checkpoint({"w": value}, place)
    plugin.teardown()


def test_an_interrupted_replacement_is_finished_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_placing, "_can_swap", lambda _: False)
    place = tmp_path / "k.ckpt"
    sw.save(tmp_path / "k.ckpt.replaced", {"w": 1})
    sw.save(tmp_path / "k.ckpt.new", {"w": 2})  # the process was killed between the renames
    with files_no_longer_than(1 << 10):
        plugin = StepwellIO()
        plugin.save_checkpoint({"w": torch.ones(1 << 12)}, place)
        with pytest.raises(sw.SaveFailed):
            plugin.teardown()
    assert sw.restore(place) == {"w": 2}, "it has its name before the next one is saved"
    save_at(place, 3)
    assert sw.restore(place) == {"w": 3}
    assert os.listdir(tmp_path) == ["k.ckpt"]


def test_a_checkpoint_that_gets_no_name_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_placing, "_can_swap", lambda _: False)
    place = tmp_path / "k.ckpt"
    save_at(place, 1)
    rename = os.rename

    def refuse(source: str, target: str) -> None:
        if target == str(place) and str(source).endswith(".new"):
            raise PermissionError(13, "Permission denied", source, None, target)
        rename(source, target)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", refuse)
        with pytest.raises(sw.StorageError, match=r"committed as .*k\.ckpt\.new, which cannot be renamed"):
            save_at(place, 2)
    assert sw.restore(place) == {"w": 1}
    assert sw.restore(tmp_path / "k.ckpt.new") == {"w": 2}
    save_at(place, 3)
    assert sw.restore(place) == {"w": 3}


@pytest.mark.parametrize("can_swap", [True, False])
def test_directories_of_others_are_not_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, can_swap: bool
) -> None:
    monkeypatch.setattr(_placing, "_can_swap", lambda _: can_swap)
    for name in ("other.ckpt", "mine.ckpt.new"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    with pytest.raises(sw.MisuseError, match="not replaced"):
        save_at(tmp_path / "other.ckpt", 1)
    save_at(tmp_path / "mine.ckpt", 1)
    if can_swap:
        save_at(tmp_path / "mine.ckpt", 2)
    else:
        with pytest.raises(sw.MisuseError, match="not replaced"):
            save_at(tmp_path / "mine.ckpt", 2)
    assert all((tmp_path / name / "file").exists() for name in ("other.ckpt", "mine.ckpt.new"))


def test_a_link_to_the_last_one_waits_for_the_commit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    symlink, linked = os.symlink, []

    def link(target: Any, place: Any) -> None:
        assert sw.verify(Path(place).parent / target).ok
        linked.append(target)
        symlink(target, place)

    monkeypatch.setattr(os, "symlink", link)
    trainer(tmp_path, [StepwellIO()], save_last="link").fit(model())
    assert len(linked) == 3
    rest = model()
    trainer(tmp_path, [StepwellIO()], max_epochs=4, save_last="link").fit(rest, ckpt_path="last")
    assert min(rest.losses) == 24


def test_a_damaged_last_checkpoint_names_another_one(tmp_path: Path) -> None:
    trainer(tmp_path, [StepwellIO()], save_top_k=-1).fit(model())
    (tmp_path / "last.ckpt" / "manifest.json").unlink()
    with pytest.raises(sw.CorruptCheckpoint, match=r"its manifest\.json is missing") as caught:
        trainer(tmp_path, [StepwellIO()]).fit(model(), ckpt_path="last")
    other = str(tmp_path / "epoch=2-step=24.ckpt")
    assert caught.value.__notes__ == [f"Another checkpoint is there: ckpt_path={other!r}."]


def test_a_file_is_loaded_into_host_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "one.ckpt")
    seen: list[Any] = []
    load = torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: seen.append(k["map_location"]) or load(*a, **k))
    StepwellIO().load_checkpoint(tmp_path / "one.ckpt")
    assert seen[0] is not None  # None would ask for the device that wrote it


def test_a_module_loads_with_its_hyperparameters(tmp_path: Path) -> None:
    one = Model(width=6)
    trainer(tmp_path, [StepwellIO()], max_epochs=1).fit(one)
    found = load_from_checkpoint(Model, tmp_path / "last.ckpt")
    assert found.hparams.width == 6
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), found.parameters(), strict=True))


def test_hyperparameters_that_cannot_be_stored_are_named(tmp_path: Path) -> None:
    state: dict[str, Any] = {"hyper_parameters": {"odd": object(), "width": 3}, "state_dict": {}}
    with pytest.raises(sw.UnsupportedLeaf, match="hyper_parameters/odd"):
        StepwellIO().save_checkpoint(state, tmp_path / "one.ckpt")
    io = StepwellIO(exclude="hyper_parameters/odd")
    io.save_checkpoint(state, tmp_path / "one.ckpt")
    assert io.load_checkpoint(tmp_path / "one.ckpt")["hyper_parameters"] == {"width": 3}
    io.teardown()
    with pytest.raises(sw.MisuseError, match="storage_options"):
        io.save_checkpoint(state, tmp_path / "two.ckpt", storage_options={})


def test_a_deletion_waits_and_a_failed_save_prevents_it(tmp_path: Path) -> None:
    io = StepwellIO()
    io.save_checkpoint({"w": torch.ones(3)}, tmp_path / "a.ckpt")
    io.save_checkpoint({"w": torch.ones(1 << 20)}, tmp_path / "b.ckpt")
    io.remove_checkpoint(tmp_path / "a.ckpt")
    io.teardown()
    assert os.listdir(tmp_path) == ["b.ckpt"]

    with files_no_longer_than(1 << 10):
        io.save_checkpoint({"w": torch.ones(5000)}, tmp_path / "c.ckpt")
        io.remove_checkpoint(tmp_path / "b.ckpt")
        with pytest.raises(sw.SaveFailed, match="too large"):
            io.teardown()
        _placing.wait_removed()
        assert os.listdir(tmp_path) == ["b.ckpt"]
        io.save_checkpoint({"w": torch.ones(5000)}, tmp_path / "c.ckpt")
        io._saves[str(tmp_path / "c.ckpt")].exception()
    with pytest.raises(sw.SaveFailed, match="too large"):
        io.save_checkpoint({"w": torch.ones(3)}, tmp_path / "d.ckpt")


def test_two_failed_saves_are_both_seen_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    io = StepwellIO()
    monkeypatch.setattr(io, "_look", lambda _: None)  # the second save is to begin
    with files_no_longer_than(1 << 10):
        for name in ("a.ckpt", "b.ckpt"):
            io.save_checkpoint({"w": torch.ones(5000)}, tmp_path / name)
        with pytest.raises(sw.SaveFailed, match="too large"):
            io.teardown()
        pending = [save for save in _lifecycle.endings() if str(tmp_path) in save.what]
        unseen = [save.at_exit() for save in pending]
    # A save that was seen leaves the list by itself, sooner or later.
    assert not any(unseen)


def test_a_link_to_a_checkpoint_is_deleted_alone(tmp_path: Path) -> None:
    io = StepwellIO()
    io.save_checkpoint({"w": torch.ones(3)}, tmp_path / "a.ckpt")
    (tmp_path / "last.ckpt").symlink_to(tmp_path / "a.ckpt")
    io.remove_checkpoint(tmp_path / "last.ckpt")
    io.teardown()
    assert os.listdir(tmp_path) == ["a.ckpt"]
    assert sw.verify(tmp_path / "a.ckpt").ok


def test_fabric_saves_and_loads(tmp_path: Path) -> None:
    fabric = lightning.Fabric(accelerator="cpu", plugins=[StepwellIO()])
    module = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(module.parameters())
    module, optimizer = fabric.setup(module, optimizer)
    fabric.save(tmp_path / "one.ckpt", {"module": module, "optimizer": optimizer, "step": 4})
    expected = module.weight.detach().clone()
    with torch.no_grad():
        module.weight.zero_()
    state: dict[str, Any] = {"module": module, "optimizer": optimizer, "step": 0}
    fabric.load(tmp_path / "one.ckpt", state)
    assert torch.equal(module.weight, expected)
    assert state["step"] == 4


@longer
def test_the_other_package_of_lightning_takes_it(tmp_path: Path) -> None:
    script = """
import sys
import pytorch_lightning as pl
import torch
from stepwell import _lifecycle
from stepwell.integrations import _placing
from stepwell.integrations.lightning import StepwellIO
class Model(pl.LightningModule):
    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Linear(2, 1)
    def training_step(self, batch, number):
        return self.layer(batch).square().mean()
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), 0.1)
    def train_dataloader(self):
        return torch.utils.data.DataLoader(torch.ones(4, 2))
assert "lightning" not in sys.modules
trainer = pl.Trainer(accelerator="cpu", max_epochs=1, logger=False, default_root_dir=sys.argv[1], plugins=[StepwellIO()])
trainer.fit(Model())
trainer.save_checkpoint(sys.argv[1] + "/one.ckpt")
trainer.strategy.checkpoint_io.teardown()
import stepwell as sw
print(sw.restore(sys.argv[1] + "/one.ckpt")["global_step"])
"""
    pytest.importorskip("pytorch_lightning")
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
    )
    assert done.stdout.splitlines()[-1:] == ["4"], done.stderr
