"""``stepwell.integrations.deepspeed.TrainState``: engines of ZeRO-1, 2 and 3, with real ranks."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import stepwell as sw

sys.path += [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "python")]

from ranks import run_forked

torch = pytest.importorskip("torch")
if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("deepspeed is not installed", allow_module_level=True)
from deepspeed_model import Model, groups_of  # noqa: E402

KINDS = ["zero1", "zero2_bf16", "zero1_bf16", "zero3", "zero3_bf16", "zero2_fp16"]
#: Those that DeepSpeed's own call loads too.
LOADED = ["zero2_bf16", "zero3", "zero2_fp16"]
SAVED = 3
#: DeepSpeed imports the last one, which takes longest, for each engine that it makes first.
MODULES = "stepwell.integrations.deepspeed,deepspeed.runtime.zero.muon.original_muon"
SCRIPT = f"""
from pathlib import Path
sys.path += {sys.path[-2:]!r}
import deepspeed_train_job
deepspeed_train_job.run(Path(ROOT))
"""


def plain_run() -> tuple[Any, Any, Any]:
    torch.manual_seed(7)
    model = Model()
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 2)


def train(model: Any, optimizer: Any, scheduler: Any, first: int, end: int) -> dict[int, float]:
    losses = {}
    for step in range(first, end):
        loss = model(torch.randint(0, 13, (4,), generator=torch.Generator().manual_seed(step)))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        losses[step + 1] = loss.item()
    return losses


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[int, float]]:
    """The folder of all jobs, with saves of plain torch, and the losses of that run."""
    folder = tmp_path_factory.mktemp("jobs")
    run = plain_run()
    losses = train(*run, 0, SAVED)
    sw.save(folder / "plain", sw.torch.TrainState(*run))
    losses |= train(*run, SAVED, 6)
    run[1].state[run[0].a.weight]["step"] += 1
    sw.save(folder / "uneven", sw.torch.TrainState(*run))
    return folder, losses


@pytest.fixture(scope="module")
def jobs(plain: tuple[Path, dict[int, float]]) -> Path:
    """The folder of all jobs, after these have ended."""
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("DS_ACCELERATOR", "cpu")
        run_forked(plain[0], MODULES, SCRIPT, 1, plain[0])
    return plain[0]


def result(jobs: Path, name: str, rank: int = 0) -> Any:
    return json.loads((jobs / f"{name}.{rank}.json").read_text())


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("kind", KINDS)
def test_a_restored_engine_goes_on_bit_for_bit(jobs: Path, kind: str, rank: int) -> None:
    found = result(jobs, "whole", rank)[kind]
    wrapper = "BF16_Optimizer" if kind == "zero1_bf16" else "DeepSpeedZeroOptimizer"
    assert found["wrapper"] == (f"{wrapper}_Stage3" if kind.startswith("zero3") else wrapper)
    assert not found["differing"]
    assert found["rounded"]
    assert found["losses"] == {step: found["whole"][step] for step in ("4", "5", "6")}


def test_a_killed_run_resumes_with_equal_losses(jobs: Path) -> None:
    rest, losses = result(jobs, "two")["resumed"], result(jobs, "whole")["zero2_bf16"]["whole"]
    assert rest == {step: losses[step] for step in ("3", "4", "5", "6")}


@pytest.mark.parametrize("kind", LOADED)
def test_losses_equal_those_of_deepspeeds_own_files(jobs: Path, kind: str) -> None:
    assert result(jobs, "two")[f"{kind}-own"] == result(jobs, "whole")[kind]["losses"]


@pytest.mark.parametrize("kind", LOADED)
def test_a_run_that_deepspeed_has_loaded_is_saved(jobs: Path, kind: str) -> None:
    found = result(jobs, "two")[f"{kind}-moved"]
    assert not found["differing"]
    assert found["losses"] == result(jobs, "whole")[kind]["losses"]


@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_become_one_and_one_becomes_two(jobs: Path, kind: str) -> None:
    whole = result(jobs, "whole")[kind]["whole"]
    for found in (result(jobs, "one")[kind], result(jobs, "two")[f"{kind}-one"]):
        assert not found["differing"]
        assert found["rounded"]
        for step, loss in found["losses"].items():
            assert loss == pytest.approx(whole[step], rel=1e-6 if kind in ("zero1", "zero3") else 5e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_checkpoints_of_deepspeed_restore_into_it(jobs: Path, kind: str) -> None:
    found = result(jobs, "two")[f"{kind}-deepspeed"]
    assert not found["differing"]
    assert found["rounded"]
    whole = result(jobs, "whole")[kind]["whole"]
    assert found["losses"] == {step: whole[step] for step in ("4", "5", "6")}


def test_a_plain_run_goes_on_with_deepspeed(jobs: Path, plain: tuple[Path, dict[int, float]]) -> None:
    for step, loss in result(jobs, "two")["plain"].items():
        assert loss == pytest.approx(plain[1][int(step)], rel=1e-6)


def test_a_run_of_deepspeed_goes_on_with_plain_torch(jobs: Path) -> None:
    model, optimizer, scheduler = plain_run()
    into = {"train": sw.torch.TrainState(model, optimizer, scheduler)}
    sw.restore(jobs / "zero1", into=into, unexpected="ignore")
    saved = torch.load(jobs / "zero1.values", weights_only=False)["trained"]
    for name, one in model.named_parameters():
        if one.requires_grad:
            assert torch.equal(one, saved[name]["fp32"])
            assert torch.equal(optimizer.state[one]["exp_avg"], saved[name]["exp_avg"])
    whole = result(jobs, "whole")["zero1"]["whole"]
    for step, loss in train(model, optimizer, scheduler, SAVED, 6).items():
        assert loss == pytest.approx(whole[str(step)], rel=1e-6)


@pytest.mark.parametrize("kind", ["zero1", "zero3_bf16"])
def test_slots_go_and_follow_renamed_parameters(jobs: Path, kind: str) -> None:
    assert result(jobs, "moved")[kind] == {"again": True, "renamed": True}


def test_a_rank_that_fails_fails_the_others(jobs: Path) -> None:
    assert result(jobs, "failing", 1) == "RuntimeError: no memory left"
    assert result(jobs, "failing", 0).startswith("RankFailed")


def test_a_save_that_fails_on_one_rank_raises_on_all(jobs: Path) -> None:
    for rank, kind in enumerate(("RankFailed: rank 1 failed: ", "SaveFailed: saving step 1 failed")):
        failure, newest = result(jobs, "full", rank)
        assert failure.startswith(kind)
        assert "File too large" in failure
        assert newest == 2


def test_what_cannot_be_stored_is_refused_by_name(jobs: Path) -> None:
    wanted = {
        "model": "takes a deepspeed.DeepSpeedEngine, not Model",
        "offloaded parameters": "it offloads",
        "no zero": "it has no ZeRO",
        "offload": "it offloads",
        "pipeline": "pipeline parallelism",
        "experts": "experts",
        "own state_dict": "hooks or methods of its own",
        "joined groups": "DeepSpeed has joined the groups of its Adagrad",
        "accumulation": "it has accumulated gradients",
        "odd slot": "the slot 'odd' has the shape",
        "uneven steps": "parameters of one group were saved with step",
    }
    found = result(jobs, "refused")
    assert found.keys() == wanted.keys()
    for name, text in wanted.items():
        assert text in found[name], name


def test_the_example_of_the_guide_resumes(jobs: Path) -> None:
    assert result(jobs, "guide") == [[0, 5], [5, 10]]
