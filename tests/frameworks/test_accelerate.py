"""``stepwell.integrations.accelerate``: ``save_state`` and ``load_state``."""

from __future__ import annotations

import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import stepwell as sw
import torch

pytest.importorskip("accelerate")

sys.path += [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "python")]

import accelerate_job
import stepwell.integrations.accelerate as ours
from accelerate import Accelerator
from accelerate.state import AcceleratorState, PartialState
from accelerate.utils import DataLoaderConfiguration, ProjectConfiguration
from accelerate_job import Run
from longer import some
from moments import killed_in_a_save, there_from_the_first
from ranks import free_port, run_forked


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    """accelerate keeps one state for the process."""
    yield
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState._reset_state()


MODULES = "torch,torch.distributed.tensor,torch.distributed.fsdp,accelerate,stepwell.integrations.accelerate"
TRAINING = f"""
from pathlib import Path
sys.path.insert(0, {str(Path(__file__).parent)!r})
import accelerate_job
print(accelerate_job.ranks(Path(ROOT), RANK, WORLD, *sys.argv[5:8]))
"""


def train(folder: Path, project: Path, how: str, world: int = 1, kind: str = "ddp") -> list[dict[int, float]]:
    """Trains in processes of their own. Returns the losses of each."""
    found = run_forked(folder, MODULES, TRAINING, world, project, free_port(), how, kind, timeout=300)
    return [eval(next(line for line in one.splitlines() if line.startswith("{"))) for one in found]


def killed(folder: Path, project: Path, world: int = 1, kind: str = "ddp") -> None:
    with pytest.raises(AssertionError, match="-9"):
        train(folder, project, "fresh", world, kind)


def committed(project: Path) -> list[Path]:
    """The checkpoints that stepwell has committed."""
    found = []
    for checkpoint in project.glob("checkpoints/checkpoint_*"):
        with contextlib.suppress(FileNotFoundError):  # deleted just now
            if any(name.startswith("step_") for name in os.listdir(checkpoint / "stepwell")):
                found.append(checkpoint)
    return found


def names(project: Path) -> list[str]:
    return sorted(os.listdir(project / "checkpoints"))


def test_a_killed_training_resumes_with_equal_losses(tmp_path: Path) -> None:
    plain = Run(tmp_path / "plain", is_ours=False).train()
    assert Run(tmp_path / "whole").train() == plain
    assert names(tmp_path / "whole") == names(tmp_path / "plain") == ["checkpoint_2", "checkpoint_3"]
    assert os.listdir(tmp_path / "whole" / "checkpoints" / "checkpoint_3") == ["stepwell"]

    project = killed_in_a_save(
        tmp_path,
        lambda at: killed(tmp_path, at),
        lambda at: at / "checkpoints" / "checkpoint_2" in committed(at),
    )
    run = Run(project)
    run.resume()
    assert run.train() == {step: plain[step] for step in range(6, 12)}
    assert names(project) == names(tmp_path / "plain")


@pytest.mark.parametrize("kind", some(["fsdp2", "ddp"]))
def test_two_ranks_save_together_and_one_resumes(tmp_path: Path, kind: str) -> None:
    plain = train(tmp_path, tmp_path / "plain", "plain", 2, kind)
    project = tmp_path / "two"
    killed(tmp_path, project, 2, kind)
    rest = train(tmp_path, project, "resume", 2, kind)
    first = min(rest[0])
    assert first in (6, 9)
    for before, after in zip(plain, rest, strict=True):
        assert after == {step: before[step] for step in range(first, 12)}
    old = train(tmp_path, tmp_path / "plain", "old", 2, kind)
    assert old == [{step: one[step] for step in range(9, 12)} for one in plain]
    one = Run(project)
    one.resume(str(project / "checkpoints" / "checkpoint_3"))
    stored = sw.restore(project / "checkpoints" / "checkpoint_3" / "stepwell", to="torch", include="train/**")
    for name, value in one.model.state_dict().items():
        assert torch.equal(value, stored["train"]["model"][name])
    assert one.optimizer.state_dict()["state"][0]["step"] == 12
    one.step = 12
    assert sorted(one.train(steps=15)) == [12, 13, 14]


def test_files_of_accelerate_still_load(tmp_path: Path) -> None:
    plain = Run(tmp_path, is_ours=False).train()
    run = Run(tmp_path)
    run.resume(str(tmp_path / "checkpoints" / "checkpoint_2"))
    run.step = 9
    assert run.train() == {step: plain[step] for step in range(9, 12)}
    assert names(tmp_path) == ["checkpoint_3", "checkpoint_4"]


def test_a_committed_checkpoint_exists_at_every_moment(tmp_path: Path) -> None:
    with there_from_the_first(lambda: committed(tmp_path)):
        Run(tmp_path, total_limit=1).train(steps=30)
    assert names(tmp_path) == ["checkpoint_9"]


def test_a_torn_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    plain = Run(tmp_path).train()
    folder = tmp_path / "checkpoints"
    for path in (folder / "checkpoint_3").glob("stepwell/step_*/manifest.json"):
        path.unlink()
    (folder / "checkpoint_4").mkdir()
    run = Run(tmp_path)
    with caplog.at_level(logging.WARNING, "stepwell"):
        run.resume()
    assert run.step == 9
    assert "checkpoint_3 is passed over" in caplog.text
    assert "checkpoint_4 is passed over: it has no random_states_0.pkl" in caplog.text
    assert run.train() == {step: plain[step] for step in range(9, 12)}
    assert ours.newest_checkpoint(folder) == str(folder / "checkpoint_3")
    assert names(tmp_path) == ["checkpoint_2", "checkpoint_3", "checkpoint_4"]


def test_a_flipped_byte_is_an_error_with_its_leaf(tmp_path: Path) -> None:
    Run(tmp_path).train(steps=3)
    (data,) = (tmp_path / "checkpoints" / "checkpoint_0").glob("stepwell/step_*/i4/*.data")
    with data.open("r+b") as file:
        file.seek(4096)
        byte = file.read(1)
        file.seek(4096)
        file.write(bytes([byte[0] ^ 1]))
    with pytest.raises(sw.CorruptCheckpoint, match="leaf `random/"):
        Run(tmp_path).resume()


def losses_of(project: Path, is_ours: bool = True, directory: str | None = None) -> list[float]:
    """Trains for 20 steps on a shuffled loader of eight batches, and saves after 11, in the second
    epoch. Returns the losses."""
    torch.manual_seed(0)
    configuration = DataLoaderConfiguration(use_seedable_sampler=True, use_stateful_dataloader=True)
    accelerator = Accelerator(cpu=True, dataloader_config=configuration)
    if is_ours:
        ours.use(accelerator)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.GELU(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    rows = torch.randn(32, 4, generator=torch.Generator().manual_seed(1))
    loader: Any = torch.utils.data.DataLoader(list(rows), batch_size=4, shuffle=True)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    step, losses = 0, list[float]()
    if directory is not None:
        accelerator.load_state(directory)
        step = 11
    while step < 20:
        loader.set_epoch(step // 8)  # accelerate does not restore it
        for batch in loader:
            loss = model(batch).square().mean()
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
            step += 1
            if step == 11:
                accelerator.save_state(str(project / "eleven"))
            if step == 20:
                break
    accelerator.end_training()
    return losses


def test_a_stateful_loader_goes_on_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    pytest.importorskip("torchdata")
    whole = losses_of(tmp_path / "own", is_ours=False)
    assert losses_of(tmp_path / "ours") == whole
    for name in ("own", "ours"):
        place = str(tmp_path / name / "eleven")
        assert losses_of(tmp_path, name == "ours", directory=place) == whole[11:]


@pytest.mark.parametrize("is_saved", [True, False])
def test_a_machine_with_other_cuda_devices_loads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_saved: bool
) -> None:
    real = ours.random_numbers

    def with_cuda() -> sw.PerRank[dict[str, object]]:
        generators = real()
        generators.value["cuda"] = [torch.Generator()]
        return generators

    plain = Run(tmp_path / "plain").train()
    run = tmp_path / "run"
    with monkeypatch.context() as patch:
        patch.setattr(ours, "random_numbers", with_cuda if is_saved else real)
        Run(run).train(steps=6)
    monkeypatch.setattr(ours, "random_numbers", real if is_saved else with_cuda)
    other = Run(run)
    other.resume()
    assert other.train() == {step: plain[step] for step in range(6, 12)}


def test_a_load_logs_no_patterns_of_ours(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    Run(tmp_path).train(steps=6)
    with caplog.at_level(logging.WARNING, "stepwell"):
        Run(tmp_path).resume()
    assert not caplog.records


def test_without_a_complete_checkpoint_nothing_loads(tmp_path: Path) -> None:
    run = Run(tmp_path)
    with pytest.raises(ValueError, match="no complete checkpoint"):
        run.resume()
    (tmp_path / "checkpoints" / "checkpoint_0" / "stepwell").mkdir(parents=True)
    with pytest.raises(sw.StepwellError, match="is no step"):
        run.resume(str(tmp_path / "checkpoints" / "checkpoint_0"))
    assert ours.newest_checkpoint(tmp_path / "missing") is None


def test_a_name_of_a_complete_checkpoint_is_refused(tmp_path: Path) -> None:
    Run(tmp_path).train(steps=3)
    with pytest.raises(ValueError, match="checkpoint_0 exists"):
        Run(tmp_path).train(steps=3)
    # Retention would keep the higher numbers of the earlier run.
    Run(tmp_path / "limited").train()
    assert names(tmp_path / "limited") == ["checkpoint_2", "checkpoint_3"]
    with pytest.raises(ValueError, match=r"checkpoint_[23] exists"):
        Run(tmp_path / "limited").train(steps=3)


FAILS = """
import resource, signal, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from accelerate_job import Run
run = Run(Path(sys.argv[2]))
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 10, 1 << 10))
run.train(steps=int(sys.argv[3]))
"""


def test_a_failed_save_ends_the_training(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAILS, str(Path(__file__).parent), str(tmp_path), "12"],
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert done.returncode == 1
    assert "checkpoint_0" in done.stderr
    assert "File too large" in done.stderr
    assert names(tmp_path) == ["checkpoint_0"]
    assert ours.newest_checkpoint(tmp_path / "checkpoints") is None


def test_what_cannot_be_stored_is_refused_before_training(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.average.state_dict = lambda: {"odd": object()}  # type: ignore[method-assign]
    with pytest.raises(sw.UnsupportedLeaf, match=r"objects.*odd"):
        run.train()
    assert run.step == 0
    assert not (tmp_path / "checkpoints").exists()


def test_hooks_take_weights_away(tmp_path: Path) -> None:
    accelerator = ours.use(Accelerator(cpu=True))
    first, second = torch.nn.Linear(2, 2), torch.nn.Linear(3, 1)
    optimizer = torch.optim.AdamW([*first.parameters(), *second.parameters()])
    first, second, optimizer = accelerator.prepare(first, second, optimizer)

    def save_hook(models: list[Any], weights: list[Any], directory: str) -> None:
        torch.save(weights.pop(0), f"{directory}/adapter.pt")

    def load_hook(models: list[Any], directory: str) -> None:
        models.pop(0).load_state_dict(torch.load(f"{directory}/adapter.pt", weights_only=True))

    accelerator.register_save_state_pre_hook(save_hook)
    accelerator.register_load_state_pre_hook(load_hook)
    accelerator.backward(first(torch.ones(1, 2)).sum() + second(torch.ones(1, 3)).sum())
    optimizer.step()
    expected = [one.detach().clone() for one in (first.weight, second.weight)]
    where = accelerator.save_state(str(tmp_path / "one"))
    with torch.no_grad():
        first.weight.zero_()
        second.weight.zero_()
    optimizer.state.clear()
    accelerator.load_state(str(where))
    assert torch.equal(first.weight, expected[0])
    assert torch.equal(second.weight, expected[1])
    assert len(optimizer.state) == 4
    paths = sw.open(tmp_path / "one" / "stepwell").paths()
    assert "train/model/1.weight" in paths
    assert "train/model/0.weight" not in paths


def test_a_directory_is_saved_again(tmp_path: Path) -> None:
    accelerator = ours.use(ours.use(Accelerator(cpu=True, step_scheduler_with_optimizer=False)))
    model = accelerator.prepare(torch.nn.Linear(2, 1))
    for value in (1.0, 2.0):
        torch.nn.init.constant_(model.weight, value)
        accelerator.save_state(str(tmp_path / "last"))
    torch.nn.init.zeros_(model.weight)
    accelerator.load_state(str(tmp_path / "last"), map_location="cpu")
    assert model.weight.tolist() == [[2.0, 2.0]]


def _other(attribute: str, value: object) -> Callable[[], object]:
    def make() -> object:
        accelerator = Accelerator(cpu=True, project_config=ProjectConfiguration("x"))
        where = accelerator.state if attribute == "distributed_type" else accelerator.project_configuration
        setattr(where, attribute, value)
        return ours.use(accelerator)

    return make


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ours.use(torch), "takes an accelerate.Accelerator"),  # type: ignore[type-var]
        (_other("distributed_type", accelerate_job.DistributedType.DEEPSPEED), "saves with DEEPSPEED"),
        (_other("save_on_each_node", True), "all nodes share"),
        (lambda: ours.use(Accelerator(cpu=True)).save_state("x", odd=1), "odd= is not used"),
        (lambda: ours.use(Accelerator(cpu=True)).save_state(), "pass output_dir="),
    ],
)
def test_what_is_not_served_is_refused(call: Callable[[], object], message: str) -> None:
    with pytest.raises(sw.MisuseError, match=message):
        call()
