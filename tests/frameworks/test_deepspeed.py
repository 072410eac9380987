"""Checkpoints of DeepSpeed, written by real training: read bit for bit, and without DeepSpeed."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from safetensors.numpy import load_file, save_file

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

from ranks import run_forked

torch = pytest.importorskip("torch")
if importlib.util.find_spec("deepspeed") is None:
    pytest.skip("deepspeed is not installed", allow_module_level=True)
from deepspeed_model import Model, groups_of  # noqa: E402
from deepspeed_ranks import JOB, run_job  # noqa: E402

TORCH = "torch,torch.distributed.tensor,torch.distributed.fsdp,stepwell.torch"
BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4}}
ROUND_ROBIN = {"round_robin_gradients": True}
#: The saves of each job, by the number of its ranks.
SETTINGS: dict[int, dict[str, dict[str, Any]]] = {
    1: {
        "one_none": {"stage": 0},
        "one_z2": {"stage": 2, "config": BF16, "universal": True},
        "one_z1": {"stage": 1, "goes_on": True, "config": {"gradient_clipping": 0.0}},
    },
    2: {
        "two_z1": {"stage": 1},
        "two_z2_fp16": {"stage": 2, "config": FP16, "zero": ROUND_ROBIN},
        "two_z3": {"stage": 3, "config": BF16, "zero": {"sub_group_size": 50}, "universal": True},
        "two_z3_fp32": {"stage": 3},
        "two_unstepped": {"stage": 2, "config": BF16, "steps": 0},
        "two_bare": {"stage": 3, "save": {"exclude_frozen_parameters": True}},
        "experts_none": {"kind": "experts", "stage": 0, "config": BF16},
        "tensor_z1": {"kind": "tensor", "stage": 1, "config": BF16, "universal": True},
        "pipeline_none": {"kind": "pipeline", "stage": 0},
        "pipeline_z1": {"kind": "pipeline", "stage": 1, "config": BF16},
    },
    4: {
        "four_z1": {"stage": 1, "config": BF16, "zero": ROUND_ROBIN},
        "four_z2": {"stage": 2, "config": BF16, "universal": True},
        "four_z3": {"stage": 3, "config": BF16},
        "experts_z1": {"kind": "experts", "stage": 1, "config": BF16},
        "experts_z2": {"kind": "experts", "stage": 2, "config": BF16, "max_group_size": 60},
        "tensor_z3": {"kind": "tensor", "stage": 3, "config": BF16, "universal": True},
        "pipeline_bf16": {"kind": "pipeline", "stage": 0, "config": BF16},
    },
}
ALL = {name: setting for some in SETTINGS.values() for name, setting in some.items()}
#: Those in which each rank has the whole model.
ZERO = [name for name, setting in ALL.items() if setting["stage"] and "kind" not in setting]
#: Those in which ranks have different parts of it.
DIVIDED = {name: setting for name, setting in ALL.items() if "kind" in setting}
STEPPED = [name for name in ZERO if name != "two_unstepped"]


@pytest.fixture(scope="module")
def saves(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """All saves, by name."""
    directory = tmp_path_factory.mktemp("deepspeed")
    for world, settings in SETTINGS.items():
        run_job(directory, world, settings)
    return directory


def raw(tensor: Any) -> bytes:
    return bytes(tensor.detach().contiguous().flatten().view(torch.uint8).numpy().tobytes())


def same(found: Any, saved: Any, name: str) -> None:
    assert found.dtype.name == str(saved.dtype).removeprefix("torch."), name
    assert found.shape == tuple(saved.shape), name
    assert found.tobytes() == raw(saved), name


@pytest.mark.parametrize("name", ZERO)
def test_weights_are_those_of_zero_to_fp32(saves: Path, name: str) -> None:
    wanted = torch.load(saves / f"{name}.fp32")
    found = sw.restore(saves / name)["model"]
    for key, tensor in wanted.items():
        same(found[key], tensor, key)
    # Of ZeRO-1, that script leaves out the frozen parameters, which the model's file has.
    assert {key for key in found if key not in wanted} <= {"frozen.weight", "frozen.bias"}


@pytest.mark.parametrize("name", STEPPED)
def test_slots_are_those_of_the_live_optimizer(saves: Path, name: str) -> None:
    wanted = torch.load(saves / f"{name}.live")
    found = sw.restore(saves / name)
    assert found["optimizer"]["state"].keys() == wanted.keys()
    for key, values in wanted.items():
        same(found["model"][key], values["fp32"], key)
        slots = found["optimizer"]["state"][key]
        same(slots["exp_avg"], values["exp_avg"], key)
        same(slots["exp_avg_sq"], values["exp_avg_sq"], key)
        assert slots["step"] == 3
    groups = found["optimizer"]["groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert sorted(groups[0]["params"]) == ["a.weight", "b.weight", "embed.weight"]
    assert sorted(groups[1]["params"]) == ["a.bias", "b.bias", "scale"]


@pytest.mark.parametrize("name", ["two_z2_fp16", "two_z3", "four_z1"])
def test_one_command_makes_what_zero_to_fp32_makes(saves: Path, tmp_path: Path, name: str) -> None:
    command = ["stepwell", "convert", str(saves / name), str(tmp_path / "m.safetensors")]
    options = ["--to", "safetensors", "--subtree", "model", "--cast", "float32"]
    subprocess.run([sys.executable, "-m", *command, *options], check=True, capture_output=True)
    found = load_file(tmp_path / "m.safetensors")
    wanted = torch.load(saves / f"{name}.fp32")
    # DeepSpeed's script writes frozen parameters in float32 too.
    for key, tensor in wanted.items():
        if key != "head.weight":
            same(found[key], tensor.float() if tensor.is_floating_point() else tensor, key)


def test_the_diff_of_the_guide_resumes(saves: Path, tmp_path: Path) -> None:
    (tmp_path / "old").symlink_to(saves / "two_z1")
    guide = (JOB.parents[2] / "docs" / "guide" / "resuming_from_others.md").read_text()
    section = guide[guide.index("## DeepSpeed") :]
    found = re.search(r"^```{code-block} diff\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    assert found is not None
    lines = [line[1:] for line in found[1].splitlines() if not line.startswith("-")]
    names = {"sw": sw, "torch": torch, "Model": Model, "groups_of": groups_of, "folder": tmp_path}
    exec("\n".join(lines), names)
    assert names["first"] == 4
    wanted = torch.load(saves / "two_z1.live")
    for key, one in names["model"].named_parameters():  # type: ignore[attr-defined]
        if one.requires_grad:
            assert raw(one) == raw(wanted[key]["fp32"]), key
    assert names["scheduler"].last_epoch == 3  # type: ignore[attr-defined]


def trained_model() -> tuple[Any, Any, Any]:
    """The job's model as plain torch has it, with other values."""
    model = Model()
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.5)
    return model, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 7)


@pytest.mark.parametrize("name", ["two_z1", "two_z3_fp32", "four_z3"])
def test_a_run_goes_on_without_deepspeed(saves: Path, name: str) -> None:
    model, optimizer, scheduler = trained_model()
    state = sw.torch.TrainState(model, optimizer, scheduler)
    sw.restore(saves / name, into=state, unexpected="ignore", cast="lossless")
    wanted = torch.load(saves / f"{name}.live")
    for key, one in model.named_parameters():
        if one.requires_grad:
            assert raw(one) == raw(wanted[key]["fp32"]), key
            assert raw(optimizer.state[one]["exp_avg_sq"]) == raw(wanted[key]["exp_avg_sq"]), key
            assert optimizer.state[one]["step"] == 3
    assert scheduler.last_epoch == 3
    assert [group["lr"] for group in optimizer.param_groups] == pytest.approx([0.001, 0.002])
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]
    model(torch.tensor([1, 2])).backward()
    optimizer.step()


def test_later_losses_are_those_of_the_undisturbed_run(saves: Path, tmp_path: Path) -> None:
    model, optimizer, scheduler = trained_model()
    state = sw.torch.TrainState(model, optimizer, scheduler)
    with sw.CheckpointManager(tmp_path / "new") as mgr:
        state, first = mgr.resume(state, start=sw.Start(saves / "one_z1", unexpected="ignore"))
        assert first == 4
        losses = []
        for step in range(3, 8):
            torch.manual_seed(100 * step)
            loss = model(torch.randint(0, 13, (2,)))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            losses.append(loss.item())
        mgr.save(first, state)
    assert losses == json.loads((saves / "one_z1.losses").read_text())


FSDP = """
import torch, torch.distributed as dist
from torch.distributed.fsdp import fully_shard
sys.path.append(sys.argv[5])
from deepspeed_model import Model, groups_of

dist.init_process_group("gloo", init_method=f"file://{sys.argv[6]}", rank=RANK, world_size=WORLD)
model = Model()
mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (WORLD,))
fully_shard(model, mesh=mesh)
optimizer = torch.optim.AdamW(groups_of(model), lr=0.5)
state = sw.torch.TrainState(model, optimizer)
sw.restore(ROOT, into=state, unexpected="ignore", cast="lossless")
wanted = torch.load(f"{ROOT}.live")
for key, one in model.named_parameters():
    if one.requires_grad:
        assert torch.equal(one.full_tensor(), wanted[key]["fp32"]), key
        assert torch.equal(optimizer.state[one]["exp_avg"].full_tensor(), wanted[key]["exp_avg"]), key
"""


def test_a_run_goes_on_with_fsdp_on_two_ranks(saves: Path, tmp_path: Path) -> None:
    run_forked(tmp_path, TORCH, FSDP, 2, saves / "four_z3", JOB.parent, tmp_path / "store")


@pytest.mark.parametrize("name", ["one_none", "two_z2_fp16", "two_z3"])
def test_other_values_have_their_names(saves: Path, name: str) -> None:
    found = sw.restore(saves / name)
    assert found["epoch"] == 3
    assert found["notes"] == {"a": [1, 2]}
    assert found["global_steps"] == 3
    assert found["scheduler"]["step_size"] == 2
    assert found["model"]["seen"] == 3
    np.testing.assert_array_equal(found["model"]["mean"], np.arange(7, dtype=np.float32) / np.float32(3))
    assert ("module" in found) == (name == "two_z2_fp16")
    with sw.open(saves / name) as checkpoint:
        ties = {node.path: node.tied_to for node in checkpoint.contents() if node.tied_to}
    assert ties["model/head.weight"] == "model/embed.weight"


def test_weights_of_the_model_itself_are_there(saves: Path) -> None:
    found = sw.restore(saves / "four_z2", include="module")["module"]
    file = saves / "four_z2" / "global_step3" / "mp_rank_00_model_states.pt"
    for key, tensor in torch.load(file, weights_only=False)["module"].items():
        same(found[key], tensor, key)


def test_a_part_reads_only_its_partitions(saves: Path) -> None:
    wanted = torch.load(saves / "four_z3.fp32")["embed.weight"]
    with sw.open(saves / "four_z3") as checkpoint:
        part = checkpoint["model/embed.weight"][3:11, 2:5]
        np.testing.assert_array_equal(part, wanted.detach()[3:11, 2:5].numpy())
    found = sw.restore(saves / "four_z3", include="optimizer/state/*/exp_avg")
    assert found.keys() == {"optimizer"}


@pytest.mark.parametrize("name", ["one_z2", "four_z2", "two_z3"])
def test_universal_checkpoints_have_the_same_state(saves: Path, name: str) -> None:
    with sw.open(saves / f"{name}_universal") as universal, sw.open(saves / name) as original:
        difference = universal.diff(original)
    assert not difference.changes
    assert not difference.only_a
    assert not difference.only_b
    assert sw.verify(saves / f"{name}_universal")


@pytest.mark.parametrize("name", DIVIDED)
def test_parts_of_all_ranks_are_one_model(saves: Path, name: str) -> None:
    setting, found = DIVIDED[name], sw.restore(saves / name)
    assert sw.verify(saves / name)
    if name == "experts_none":
        assert found["optimizer"].keys() == {"mp_rank_00", "expp_rank_0", "expp_rank_1"}
    elif name == "pipeline_none":
        assert found["optimizer"].keys() == {"mp_rank_00", "mp_rank_01"}
        with sw.open(saves / name) as checkpoint:
            assert (checkpoint.metadata().custom_metadata or {})["layers"].startswith("2 have no file")
    else:
        # The optimizer has rounded its weights to those of the model, which are in other files.
        for key, weight in found.get("module", {}).items():
            assert weight.tobytes() == found["model"][key].astype(weight.dtype).tobytes(), key
        trained = {key for group in found["optimizer"]["groups"] for key in group["params"]}
        assert trained == found["optimizer"]["state"].keys()
        for key in trained:
            assert found["model"][key].dtype == np.float32
            assert found["optimizer"]["state"][key]["exp_avg"].shape == found["model"][key].shape
    if setting["kind"] == "pipeline":
        names = {"tied_modules.embed.word.weight", "1.weight", "1.bias", "3.weight", "3.bias"}
        assert found["model"].keys() == names | {"tied_modules.embed.mean"}
    if setting["kind"] == "experts":
        assert sum("deepspeed_experts" in key for key in found["model"]) == 12
    if setting["kind"] == "tensor":
        with sw.open(saves / f"{name}_universal") as universal, sw.open(saves / name) as original:
            difference = universal.diff(original)
        assert not difference.changes
        assert not difference.only_a
        assert not difference.only_b


@pytest.mark.parametrize("name", ["experts_z1", "experts_z2"])
def test_experts_of_all_groups_have_their_own_values(saves: Path, name: str) -> None:
    wanted = torch.load(saves / f"{name}.live")
    found = sw.restore(saves / name)
    assert found["optimizer"]["state"].keys() == wanted.keys()
    assert sum("deepspeed_experts" in key for key in wanted) == 12
    for key, values in wanted.items():
        same(found["model"][key], values["fp32"], key)
        for slot in ("exp_avg", "exp_avg_sq"):
            same(found["optimizer"]["state"][key][slot], values[slot], key)
    groups = [group["params"] for group in found["optimizer"]["groups"]]
    assert len(groups) == (2 if name == "experts_z1" else 4)
    assert sorted(name for group in groups for name in group) == sorted(wanted)


def test_a_missing_layer_of_a_pipeline_is_refused(saves: Path, tmp_path: Path) -> None:
    shutil.copytree(saves / "pipeline_z1", tmp_path / "c")
    next((tmp_path / "c").rglob("layer_03-*")).unlink()
    with pytest.raises(sw.CorruptCheckpoint, match=r"no file layer_.* has `3.weight`"):
        sw.open(tmp_path / "c")


def test_before_the_first_step_there_are_no_slots(saves: Path) -> None:
    found = sw.restore(saves / "two_unstepped")
    assert found["optimizer"].get("state", {}) == {}
    assert found["optimizer"]["groups"][1]["lr"] == 0.02


def test_another_order_in_slice_mappings_is_said(saves: Path) -> None:
    with sw.open(saves / "two_z2_fp16") as checkpoint:
        assert "param_shapes" in (checkpoint.metadata().custom_metadata or {})["param_slice_mappings"]
    with sw.open(saves / "four_z2") as checkpoint:
        assert not checkpoint.metadata().custom_metadata


def test_all_bytes_of_all_ranks_are_verified(saves: Path, tmp_path: Path) -> None:
    report = sw.verify(saves / "four_z3")
    assert report.ok
    shutil.copytree(saves / "two_z3", tmp_path / "c")
    file = next((tmp_path / "c").rglob("*rank_1*optim_states.pt"))
    state = torch.load(file, weights_only=False)["optimizer_state_dict"]["fp32_flat_groups"][0]
    data = bytearray(file.read_bytes())
    data[data.index(raw(state))] ^= 1
    file.write_bytes(data)
    assert file.name in str(sw.verify(tmp_path / "c").damages)


def test_a_save_opens_by_its_root_and_by_its_directory(saves: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    shutil.copytree(saves / "two_z1", root)
    assert sw.restore(root)["epoch"] == sw.restore(root / "global_step3")["epoch"] == 3
    assert sw.open_root(root).latest.number == 3
    with pytest.raises(sw.MisuseError, match=r"another library"):
        sw.CheckpointManager(root / "global_step3")


def test_saves_in_roots_of_trainers_are_read(saves: Path, tmp_path: Path) -> None:
    step = tmp_path / "trainer" / "checkpoint-3"
    shutil.copytree(saves / "two_z1", step)
    (step / "trainer_state.json").write_text('{"global_step": 3}')
    save_file({"w": np.ones(3, np.float32)}, step / "model.safetensors")
    found = sw.restore(tmp_path / "trainer", 3)
    assert found["deepspeed"]["epoch"] == 3
    assert found["model"].keys() == {"w"}
    (step / "model.safetensors").unlink()
    assert sw.restore(step)["epoch"] == 3
    step = tmp_path / "lightning" / "epoch=0-step=3.ckpt"
    shutil.copytree(saves / "two_z3" / "global_step3", step / "checkpoint")
    assert (
        sw.open_root(tmp_path / "lightning").steps[0].incomplete
        == "its latest is missing: the save was not finished"
    )
    (step / "latest").write_text("checkpoint")
    assert sw.restore(tmp_path / "lightning", 3)["epoch"] == sw.restore(step)["epoch"] == 3


def test_the_package_imports_neither_deepspeed_nor_torch(saves: Path) -> None:
    code = f"""
        import sys, stepwell as sw
        sw.restore({str(saves / "two_z3")!r})
        assert not {{"deepspeed", "torch"}} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_the_example_of_the_guide_runs(saves: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "deepspeed-run").symlink_to(saves / "two_z3")
    monkeypatch.chdir(tmp_path)
    guide = (JOB.parents[2] / "docs" / "guide" / "foreign.md").read_text()
    section = guide[guide.index("## DeepSpeed") :]
    (example,) = re.findall(r"^```py\n(.*?)^```", section, re.MULTILINE | re.DOTALL)
    model, optimizer, scheduler = trained_model()
    names = {"sw": sw, "model": model, "optimizer": optimizer, "scheduler": scheduler}
    exec(example, names)
    assert scheduler.last_epoch == 3
    command = re.search(r"^stepwell (.*)$", section, re.MULTILINE)
    assert command is not None
    subprocess.run([sys.executable, "-m", "stepwell", *command[1].split()], check=True, capture_output=True)
    assert load_file("model.safetensors")["embed.weight"].tobytes() == raw(model.embed.weight)
