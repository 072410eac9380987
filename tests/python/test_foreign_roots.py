"""Runs and checkpoints of other libraries in one directory."""

from __future__ import annotations

import json
import logging
import os
import re
from pathlib import Path

import numpy as np
import pytest
import stepwell as sw
from command_line import run
from safetensors.numpy import save_file


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model's directory, as of other libraries."""
    (tmp_path / "model").mkdir()
    save_file({"w": np.ones(3)}, tmp_path / "model" / "model.safetensors")
    return tmp_path / "model"


def test_no_run_begins_in_a_foreign_checkpoint(model: Path) -> None:
    with pytest.raises(sw.MisuseError, match=r"checkpoint of another library \(safetensors\)"):
        sw.CheckpointManager(model)
    assert [one.name for one in model.iterdir()] == ["model.safetensors"]
    assert (sw.restore(model)["w"] == 1).all()


def test_a_run_goes_on_beside_a_foreign_file(model: Path) -> None:
    with sw.CheckpointManager(model.parent / "run") as mgr:
        mgr.save(1, {"w": np.zeros(3)})
    (model / "model.safetensors").rename(model.parent / "run" / "model.safetensors")
    with sw.CheckpointManager(model.parent / "run") as mgr:
        assert mgr.latest_step() == 1


def test_a_run_begins_beside_a_damaged_file(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"none")
    with sw.CheckpointManager(tmp_path) as mgr:
        mgr.save(1, {"w": np.zeros(3)})
    assert (sw.restore(tmp_path)["w"] == 0).all()


#: Roots as their libraries name things: files, and by step the reason why it is passed over. A file
#: whose content does not matter is empty; a step in the last place is the latest.
ROOTS: dict[str, tuple[dict[str, str], list[tuple[int | None, str, str | None]], str | None]] = {
    "Hugging Face Trainer": (
        {
            "checkpoint-500/trainer_state.json": '{\n  "global_step": 500\n}\n',
            "checkpoint-500/model.safetensors": "",
            "checkpoint-1000/trainer_state.json": '{"best_model_checkpoint": "/elsewhere/checkpoint-500"}',
            "checkpoint-1000/adapter_model.safetensors": "",
            "checkpoint-1500/model.safetensors": "",
            "checkpoint-2000/trainer_state.json": '{\n  "log_history": [\n    {\n    }',
            "checkpoint-2000/model.safetensors": "",
            "checkpoint-2500/trainer_state.json": "{}",
            "checkpoint-3000/trainer_state.json": "{}",
            "checkpoint-3000/model.safetensors": "",
            "checkpoint-3000/checkpoint-is-incomplete.txt": "",
            "runs/events": "",
        },
        [
            (500, "checkpoint-500", None),
            (1000, "checkpoint-1000", None),
            (1500, "checkpoint-1500", "trainer_state.json is missing"),
            (2000, "checkpoint-2000", "trainer_state.json ends early"),
            (2500, "checkpoint-2500", "no weights"),
            (3000, "checkpoint-3000", "checkpoint-is-incomplete.txt"),
        ],
        "checkpoint-1000",
    ),
    "accelerate": (
        {
            "checkpoints/checkpoint_9/model.safetensors": "",
            "checkpoints/checkpoint_9/random_states_0.pkl": "",
            "checkpoints/checkpoint_10/model.safetensors": "",
        },
        [(9, "checkpoint_9", None), (10, "checkpoint_10", "random_states_0.pkl is missing")],
        "checkpoint_9",
    ),
    "Lightning": (
        {
            "epoch=0-step=8.ckpt": "x",
            "epoch=0-step=8-v1.ckpt": "x",
            "epoch=1-step=16.ckpt": "x",
            "loss=0.5-step=24.ckpt": "PK\x03\x04torn",
            "last.ckpt": "",
        },
        [
            (None, "last.ckpt", "empty"),
            (8, "epoch=0-step=8.ckpt", None),
            (8, "epoch=0-step=8-v1.ckpt", None),
            (16, "epoch=1-step=16.ckpt", None),
            (24, "loss=0.5-step=24.ckpt", "ends early"),
        ],
        "epoch=1-step=16.ckpt",
    ),
    "NeMo": (
        {
            "llama--loss=1.0-step=9/weights/.metadata": "",
            "llama--loss=0.5-step=19-last/weights/.metadata": "",
            "llama--loss=0.2-step=29/weights/.metadata": "",
            "llama--loss=0.2-step=29-unfinished": "",
            "llama--loss=0.1-step=39/context/io.json": "",
        },
        [
            (9, "llama--loss=1.0-step=9", None),
            (19, "llama--loss=0.5-step=19-last", None),
            (29, "llama--loss=0.2-step=29", "unfinished is beside it"),
            (39, "llama--loss=0.1-step=39", "weights is missing"),
        ],
        "llama--loss=0.5-step=19-last",
    ),
    "Megatron": (
        {
            "latest_checkpointed_iteration.txt": "200\n",
            "iter_0000100/metadata.json": "{}",
            "iter_0000100/.metadata": "",
            "iter_0000200/mp_rank_00_001/model_optim_rng.pt": "",
            "iter_0000250/metadata.json": "{}",
            "iter_0000250/.metadata": "",
            "iter_0000300/__0_0.distcp": "",
        },
        [
            (100, "iter_0000100", None),
            (200, "iter_0000200", None),
            (250, "iter_0000250", "latest_checkpointed_iteration.txt names step 200"),
            (300, "iter_0000300", "latest_checkpointed_iteration.txt names step 200"),
        ],
        "iter_0000200",
    ),
    "Megatron, converted": (
        {
            "latest_checkpointed_iteration.txt": "release",
            "iter_0000100/mp_rank_00/model_optim_rng.pt": "",
            "release/mp_rank_00/model_optim_rng.pt": "",
        },
        [(None, "release", None), (100, "iter_0000100", None)],
        "release",
    ),
    "DeepSpeed": (
        {
            "latest": "global_step20",
            "global_step9/mp_rank_00_model_states.pt": "",
            "global_step20/zero_pp_rank_0_mp_rank_00_model_states.pt": "",
            "global_step20/bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": "",
            "global_step30/mp_rank_00_model_states.pt": "",
            "best/mp_rank_00_model_states.pt": "",
            "logs/x": "",
        },
        [
            (None, "best", None),
            (9, "global_step9", None),
            (20, "global_step20", None),
            (30, "global_step30", "latest names step 20"),
        ],
        "global_step20",
    ),
    "DeepSpeed, own tags": (
        {"latest": "b", "a/mp_rank_00_model_states.pt": "", "b/mp_rank_00_model_states.pt": ""},
        [(None, "a", None), (None, "b", None)],
        "b",
    ),
    "verl": (
        {
            "latest_checkpointed_iteration.txt": "20",
            "global_step_10/actor/model_world_size_2_rank_0.pt": "",
            "global_step_10/actor/model_world_size_2_rank_1.pt": "",
            "global_step_20/actor/model_world_size_2_rank_1.pt": "",
            "global_step_30/data.pt": "",
        },
        [
            (10, "global_step_10", None),
            (20, "global_step_20", r"ranks: \[0\] are missing"),
            (30, "global_step_30", "names step 20"),
        ],
        "global_step_10",
    ),
    "torchtitan": (
        {
            "checkpoint/step-9/.metadata": "",
            "checkpoint/step-10/model.safetensors.index.json": "",
            "checkpoint/step-11/__0_0.distcp": "",
        },
        [(9, "step-9", None), (10, "step-10", None), (11, "step-11", ".metadata is missing")],
        "step-10",
    ),
    "Orbax": (
        {
            "0009/default/_METADATA": "{}",
            "0009/_CHECKPOINT_METADATA": '{"commit_timestamp_nsecs": 1}',
            "0009/commit_success.txt": "",
            "0010/default/_METADATA": "{}",
            "0010/default/commit_success.txt": "",
            "0010/_CHECKPOINT_METADATA": '{"commit_timestamp_nsecs": 1}',
            "0011/default/_METADATA": "{}",
            "0011/_CHECKPOINT_METADATA": '{"commit_timestamp_nsecs": null}',
            "0011/commit_success.txt": "",
            "0012/_CHECKPOINT_METADATA": "",
            "0012/commit_success.txt": "",
            "0013/x": "",
            "0014.orbax-checkpoint-tmp-17/default/_METADATA": "",
            "0008/default/_METADATA": "{}",
            "metadata/_ROOT_METADATA": "",
        },
        [
            (8, "0008", None),
            (9, "0009", None),
            (10, "0010", "commit_success.txt is missing"),
            (11, "0011", "no time of the commit"),
            (12, "0012", "no JSON"),
            (13, "0013", "no item with arrays"),
            (14, "0014.orbax-checkpoint-tmp-17", "not finished"),
        ],
        "0009",
    ),
    "Flax": (
        {"checkpoint_9": "x", "checkpoint_10": "x", "checkpoint_tmp": "x"},
        [(9, "checkpoint_9", None), (10, "checkpoint_10", None)],
        "checkpoint_10",
    ),
}


def write(root: Path, files: dict[str, str]) -> Path:
    """Writes text files below a directory."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


@pytest.mark.parametrize("name", ROOTS)
def test_complete_steps_are_told_from_others(tmp_path: Path, name: str) -> None:
    files, steps, latest = ROOTS[name]
    root = sw.open_root(write(tmp_path / "run", files))
    assert root.family == name.split(",")[0]
    assert [(step.number, step.name) for step in root.steps] == [step[:2] for step in steps]
    for step, (_, _, reason) in zip(root.steps, steps, strict=True):
        assert Path(step.path).exists()
        assert (step.incomplete is None) is (reason is None), step
        if reason is not None:
            assert re.search(reason, step.incomplete or "")
            with pytest.raises(sw.CorruptCheckpoint, match=re.escape(step.name)) as failure:
                root.open(step)
            assert failure.value.step == step.number
    assert root.latest is not None
    assert root.latest.name == latest
    shown = run("ls", tmp_path / "run")
    assert all(step.name in shown.stdout for step in root.steps)
    assert shown.stdout.count("passed over") == sum(reason is not None for _, _, reason in steps)
    assert shown.exit_code == (1 if "passed over" in shown.stdout else 0)


def test_a_part_that_is_read_alone_is_refused_by_name(trainer: Path) -> None:
    sw.save(trainer.parent / "c", {"x": 1, "w": np.ones(3)})
    made = sw.convert(trainer.parent / "c", trainer / "checkpoint-2" / "optimizer_0", to="orbax")
    with pytest.raises(sw.errors.FormatError, match=r"`optimizer` is of Orbax, which is read alone. Open /"):
        sw.restore(trainer, 2)
    assert sw.restore(made.path)["x"] == 1


def test_the_best_step_is_found_in_a_moved_root(tmp_path: Path) -> None:
    root = sw.open_root(write(tmp_path / "run", ROOTS["Hugging Face Trainer"][0]))
    assert root.best is root.steps[0]
    (tmp_path / "run/checkpoint-500/model.safetensors").unlink()
    assert sw.open_root(tmp_path / "run").best is None


@pytest.mark.parametrize("name", ["Megatron", "DeepSpeed", "verl"])
def test_a_step_that_only_a_tracker_names_is_listed(tmp_path: Path, name: str) -> None:
    files, steps, _ = ROOTS[name]
    write(tmp_path, files)
    tracker = next(file for file in files if file.startswith("latest"))
    gone = {"Megatron": "iter_0000400", "DeepSpeed": "global_step400", "verl": "global_step_400"}[name]
    (tmp_path / tracker).write_text(gone if name == "DeepSpeed" else "400")
    found = sw.open_root(tmp_path)
    assert (found.steps[-1].number, found.steps[-1].name) == (400, gone)
    assert "names it, and it is missing" in (found.steps[-1].incomplete or "")
    assert len(found.steps) == len(steps) + 1


@pytest.mark.parametrize("name", ["Megatron", "DeepSpeed", "verl"])
@pytest.mark.parametrize("text", ["", "\x00\x01", "x" * 5000])
def test_a_damaged_tracker_is_an_error(tmp_path: Path, name: str, text: str) -> None:
    files = ROOTS[name][0]
    write(tmp_path, files)
    tracker = next(file for file in files if file.startswith("latest"))
    (tmp_path / tracker).write_text(text)
    with pytest.raises(sw.CorruptCheckpoint, match=f"{tracker}: .* was expected") as failure:
        sw.open_root(tmp_path)
    assert failure.value.file == str(tmp_path / tracker)


@pytest.mark.parametrize(
    ("files", "name"),
    [
        ({"checkpoint-1/trainer_state.json": "{}"}, "checkpoint-{}/trainer_state.json"),
        ({"epoch=0-step=1.ckpt": "x"}, "epoch=0-step={}.ckpt"),
        ({"m-step=1/weights/.metadata": ""}, "m-step={}/weights/.metadata"),
        ({"global_step1/mp_rank_00_model_states.pt": ""}, "global_step{}/mp_rank_00_model_states.pt"),
    ],
)
def test_a_number_of_many_digits_is_no_step(tmp_path: Path, files: dict[str, str], name: str) -> None:
    write(tmp_path, {**files, name.format("9" * 18): "{}", name.format("9" * 19): "{}"})
    numbers = {step.number for step in sw.open_root(tmp_path).steps}
    assert {1, 10**18 - 1} <= numbers <= {1, 10**18 - 1, None}


@pytest.mark.parametrize(
    ("file", "is_complete"),
    [
        ("iter_0000001/mp_rank_100/model_optim_rng.pt", True),
        ("iter_0000001/mp_rank_1/model_optim_rng.pt", False),
        ("global_step1/zero_pp_rank_0_mp_rank_00_model_states.pt", True),
        ("global_step1/layer_0_expert_0_mp_rank_00_model_states.pt", False),
    ],
)
def test_a_step_is_complete_by_the_files_that_are_read(tmp_path: Path, file: str, is_complete: bool) -> None:
    other = {"i": "iter_0000002/mp_rank_00/x", "g": "global_step2/mp_rank_00_model_states.pt"}[file[0]]
    root = sw.open_root(write(tmp_path, {file: "", other: ""}))
    assert [step.incomplete is None for step in root.steps] == [is_complete, True]


def test_a_directory_is_opened_without_reading_its_neighbours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(100):
        (tmp_path / f"checkpoint-{number}").mkdir()
    listed: list[str] = []
    real = os.listdir

    def listdir(path: str) -> list[str]:
        listed.append(str(path))
        return real(path)

    monkeypatch.setattr(os, "listdir", listdir)
    with pytest.raises(sw.CorruptCheckpoint, match="was not finished"):
        sw.open(tmp_path / "checkpoint-7")
    with sw.CheckpointManager(tmp_path / "checkpoint-8") as mgr:
        mgr.save(1, {"w": np.zeros(3)})
    assert {Path(one).name for one in listed} <= {"checkpoint-7", "checkpoint-8", tmp_path.name}
    assert len([one for one in listed if one == str(tmp_path)]) <= 2  # for messages


def test_steps_of_two_libraries_are_an_error(tmp_path: Path) -> None:
    write(tmp_path, {**ROOTS["Flax"][0], "step-5/.metadata": ""})
    with pytest.raises(sw.errors.FormatError, match=r"steps of torchtitan \(step-5\) and of Flax"):
        sw.open_root(tmp_path)


def test_what_is_no_root_is_an_error(tmp_path: Path, model: Path) -> None:
    with pytest.raises(sw.MisuseError, match="a single checkpoint"):
        sw.open_root(model)
    with pytest.raises(sw.StepNotFound, match="Expected in a root: step_N of stepwell, checkpoint-N"):
        sw.open_root(tmp_path)
    with pytest.raises(sw.StepNotFound, match="has no nowhere"):
        sw.open_root(tmp_path / "nowhere")


def test_a_root_of_stepwell_is_read_alike(tmp_path: Path) -> None:
    with sw.CheckpointManager(tmp_path / "run") as mgr:
        assert sw.open_root(tmp_path / "run").steps == ()
        mgr.save(1, {"w": np.zeros(3)})
        mgr.save(2, {"w": np.ones(3)}).result()
    (tmp_path / "run/step_00000003").mkdir()
    root = sw.open_root(tmp_path / "run")
    assert root.family == "stepwell"
    assert [step.number for step in root.steps if step.incomplete is None] == [1, 2]
    assert root.latest is not None
    for step, value in [(1, 0), (root.steps[0], 0), ("step_00000002", 1), (None, 1)]:
        with root.open(step) as checkpoint:
            assert (checkpoint["w"][:] == value).all()


@pytest.fixture
def trainer(tmp_path: Path) -> Path:
    """A root of a Trainer with three steps, the last one damaged."""
    for step in (1, 2, 3):
        place = tmp_path / "run" / f"checkpoint-{step}"
        write(place, {"trainer_state.json": '{\n  "global_step": 1\n}\n'})
        save_file({"w": np.full(3, step)}, place / "model.safetensors")
    (tmp_path / "run/checkpoint-3/model.safetensors").write_bytes(b"torn")
    return tmp_path / "run"


def test_a_step_of_a_root_is_opened_by_its_number(trainer: Path) -> None:
    with sw.open(trainer, 2) as checkpoint:
        assert checkpoint.step == 2
        assert checkpoint.path == str(trainer / "checkpoint-2")
        assert checkpoint.metadata().step == 2
        assert (checkpoint["model/w"][:] == 2).all()
        assert checkpoint["trainer_state"]["global_step"] == 1
    assert (sw.restore(trainer, 1, include="model")["model"]["w"] == 1).all()
    with pytest.raises(sw.StepNotFound, match=r"has no step 7\. It has checkpoint-1"):
        sw.open(trainer, 7)
    with pytest.raises(sw.StepNotFound, match="without steps"):
        sw.open(trainer / "checkpoint-1", 1)
    (trainer / "checkpoint-3").rename(trainer.parent / "checkpoint-3")
    with sw.open(trainer) as checkpoint:
        assert checkpoint.step == 2
    assert sw.verify(trainer).step == 2
    assert run("show", f"{trainer}@1").exit_code == 0


def test_a_damaged_step_of_a_root_is_passed_over(trainer: Path) -> None:
    with pytest.raises(sw.CorruptCheckpoint, match="checkpoint-3"):
        sw.restore(trainer)
    state, report = sw.restore(trainer, fallback=True, return_report=True)
    assert (state["model"]["w"] == 2).all()
    assert [one.step for one in report.passed_over] == [3]
    shown = run("verify", "--all", trainer)
    assert shown.exit_code == 1
    assert shown.stdout.count("readable: step") == 2


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    """A root of a Trainer with two steps. The last one lacks a file of its weights."""
    for step in (1, 2):
        place = tmp_path / "run" / f"checkpoint-{step}"
        files = {name: f"model-0000{at}-of-00002.safetensors" for at, name in enumerate("ab", 1)}
        write(
            place,
            {
                "trainer_state.json": '{\n  "global_step": 1\n}\n',
                "model.safetensors.index.json": json.dumps({"weight_map": files}),
            },
        )
        for name, file in files.items():
            save_file({name: np.full(3, step)}, place / file)
    (tmp_path / "run/checkpoint-2/model-00002-of-00002.safetensors").unlink()
    return tmp_path / "run"


def test_a_step_with_a_missing_file_is_passed_over(sharded: Path, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(sw.StorageError, match="1 of 2 files") as failure:
        sw.restore(sharded)
    assert failure.value.step == 2
    state, report = sw.restore(sharded, fallback=True, return_report=True)
    assert (state["model"]["b"] == 1).all()
    assert [one.step for one in report.passed_over] == [2]
    assert "not step 2" in caplog.text
    assert "rewind" not in caplog.text  # a root of another library has none


@pytest.mark.parametrize("path", ["", "checkpoint-2"])
def test_a_missing_file_is_in_the_report_of_verify(sharded: Path, path: str) -> None:
    report = sw.verify(sharded / path)
    assert not report.ok
    assert report.step == (None if path else 2)
    (damage,) = report.damages
    assert damage.file == str(sharded / "checkpoint-2/model-00002-of-00002.safetensors")
    assert run("verify", sharded / path).exit_code == 1
    assert run("verify", "--all", sharded).exit_code == 1


def stepwell_beside(place: Path, value: int) -> None:
    """The part of stepwell in a checkpoint of a trainer."""
    with sw.CheckpointManager(place / "stepwell") as manager:
        manager.save(0, {"value": value})


@pytest.mark.parametrize("library", ["lightning", "accelerate"])
def test_a_newest_step_of_stepwell_is_named(tmp_path: Path, library: str) -> None:
    torch = pytest.importorskip("torch")
    root = tmp_path / "run"
    root.mkdir()
    if library == "lightning":
        torch.save({"global_step": 4, "value": 4}, root / "epoch=0-step=4.ckpt")
        ours = root / "epoch=0-step=8.ckpt"
        sw.save(ours, {"value": 8})
    else:
        (root / "checkpoint_4").mkdir()
        save_file({"value": np.full(1, 4)}, root / "checkpoint_4" / "model.safetensors")
        torch.save({}, root / "checkpoint_4" / "random_states_0.pkl")
        stepwell_beside(root / "checkpoint_8", 8)
        ours = root / "checkpoint_8" / "stepwell"
    with pytest.raises(sw.StepNotFound, match=f"Open it by the path {re.escape(str(ours))}"):
        sw.restore(root)
    assert sw.restore(ours) == {"value": 8}
    sw.restore(root, 4)
    told = run("ls", str(root)).output
    assert f"stepwell wrote it: open it by the path {ours}" in told
    assert "not finished" not in told


def test_a_checkpoint_of_a_trainer_is_whole_with_our_part(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (4, 8):
        place = tmp_path / "run" / f"checkpoint-{step}"
        place.mkdir(parents=True)
        save_file({"w": np.full(1, step)}, place / "model.safetensors")
        (place / "trainer_state.json").write_text(json.dumps({"global_step": step}, indent=2) + "\n")
    stepwell_beside(tmp_path / "run" / "checkpoint-4", 4)
    # The process was killed in the save.
    (tmp_path / "run" / "checkpoint-8" / "stepwell").mkdir()
    with caplog.at_level(logging.WARNING, "stepwell"):
        assert sw.restore(tmp_path / "run")["model"]["w"] == 4
    ours = tmp_path / "run" / "checkpoint-4" / "stepwell"
    assert f"Open it by the path {ours}" in caplog.text
    assert "its directory stepwell has no step" in run("ls", str(tmp_path / "run")).output


def test_our_part_of_a_trainers_checkpoint_is_verified(tmp_path: Path) -> None:
    place = tmp_path / "run" / "checkpoint-4"
    place.mkdir(parents=True)
    save_file({"w": np.full(1, 4)}, place / "model.safetensors")
    (place / "trainer_state.json").write_text(json.dumps({"global_step": 4}, indent=2) + "\n")
    with sw.CheckpointManager(place / "stepwell") as manager:
        manager.save(0, {"value": np.arange(1000)})
    alone = sw.verify(place / "model.safetensors").nbytes
    assert sw.verify(tmp_path / "run").nbytes > alone + 8000
    (file,) = place.glob("stepwell/**/*.data")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    report = sw.verify(tmp_path / "run")
    assert [one.file for one in report.damages] == [str(file)]
    assert run("verify", str(tmp_path / "run")).exit_code == 1
