"""Checkpoints of Megatron-Core: those of the real library on four ranks, damaged ones, and those of
Megatron-LM with a directory for each rank."""

from __future__ import annotations

import argparse
import io
import json
import pickle
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from stepwell.formats.description import Opaque

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

from test_megatron_files import FOREIGN, OLD, SEQUENCE, digests

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.core.dist_checkpointing.mapping")
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

MAKE = FOREIGN / "make_megatron.py"
#: Layouts of the installed version. Older ones wrote flattened states and Zarr.
LAYOUTS = [
    *("dense", "tied", "experts", "grouped", "single_experts", "half", "model_shapes"),
    *("not_distributed", "buckets", "gathered"),
]


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("megatron")
    subprocess.run([sys.executable, MAKE, folder, *LAYOUTS], check=True, timeout=300)
    return folder


def expected(path: Path) -> dict[str, list[object]]:
    """The tensors that the ranks had in memory."""
    found: dict[str, list[object]] = json.loads(path.with_suffix(".json").read_bytes())
    return found


@pytest.mark.parametrize("name", LAYOUTS)
def test_tensors_of_all_ranks_are_read_bit_for_bit(written: Path, name: str) -> None:
    path = written / name
    assert digests(path) == expected(path)
    assert sw.verify(path).ok


@pytest.mark.parametrize("name", LAYOUTS)
def test_common_values_are_at_the_top(written: Path, name: str) -> None:
    found = sw.restore(written / name)
    assert found["iteration"] == 100
    assert found["args"]["params_dtype"] == "torch.float32"
    assert found["args"]["attention_backend"] == Opaque("megatron.core.transformer.enums.AttnBackend")
    seeds = [one[0]["seed"] for one in found["rng_state"].values()]
    assert len(set(seeds)) == len(seeds) >= 1


def test_layers_and_experts_are_axes_of_one_tensor(written: Path) -> None:
    dense, experts = expected(written / "dense"), expected(written / "experts")
    assert dense[SEQUENCE][1] == [4, 24, 8]
    assert experts["decoder.layers.mlp.experts.experts.linear_fc1.weight"][1] == [4, 4, 32, 8]
    assert expected(written / "grouped").keys() == experts.keys()
    assert f"decoder.layers.3.{SEQUENCE.removeprefix('decoder.layers.')}" in expected(written / "tied")
    assert "output_layer.weight" not in expected(written / "tied")


@pytest.mark.parametrize(("name", "what"), [("buckets", "dp_reshardable"), ("gathered", "dp_zero_gather")])
def test_optimizers_without_parameters_are_listed_only(written: Path, name: str, what: str) -> None:
    found = sw.restore(written / name)
    prefix = "optimizer.distributed.dp_group_idx_1"
    assert found[f"{prefix}.optimizer"]["shard_0_1"]["param_groups"][0]["step"] == 7
    refused = [
        one
        for key, value in found.items()
        for one in (value.values() if isinstance(value, dict) else [value])
        if isinstance(one, Opaque) and "optimizer" in key
    ]
    assert len(refused) == 2
    assert all(what in one.what for one in refused)
    weights = sw.restore(written / name, include=SEQUENCE)
    assert list(weights) == [SEQUENCE]


def test_optimizers_in_the_shapes_of_the_model_are_read(written: Path) -> None:
    found = sw.restore(written / "model_shapes")
    np.testing.assert_array_equal(found[f"optimizer.state.param.{SEQUENCE}"], found[SEQUENCE] * 1.5)
    np.testing.assert_array_equal(found[f"optimizer.state.exp_avg.{SEQUENCE}"], found[SEQUENCE] * 2.5)
    assert found["optimizer"]["optimizer"]["param_groups"][0]["step"] == 7


def test_optimizers_that_are_not_distributed_are_read(written: Path) -> None:
    found = sw.restore(written / "not_distributed")
    assert found[f"optimizer.state.exp_avg.{SEQUENCE}"].shape == found[SEQUENCE].shape
    assert found["optimizer"]["state"]["common_step"] == 1
    assert found["optimizer"]["param_groups"][0]["lr"] == 0.5


@pytest.mark.parametrize(("layers", "parts"), [(4, 1), (2, 3), (1, 6)])
def test_sharded_state_dicts_of_other_grids_are_restored(written: Path, layers: int, parts: int) -> None:
    whole = sw.restore(written / "dense")
    rows = 24 // parts
    for part in range(parts):
        state = {
            f"layers.{at}.weight": ShardedTensor.from_rank_offsets(
                SEQUENCE, torch.zeros(rows, 8), (0, 4 - layers + at, 4), (1, part, parts), prepend_axis_num=1
            )
            for at in range(layers)
        }
        state["rng"] = ShardedObject("rng_state", None, (2, 2), (1, part % 2))
        got = sw.restore(written / "dense", like=state, unexpected="ignore")
        for at in range(layers):
            np.testing.assert_array_equal(
                got[f"layers.{at}.weight"].numpy(),
                whole[SEQUENCE][4 - layers + at, rows * part : rows * (part + 1)],
            )
        assert got["rng"][0]["seed"] == 10 + part % 2


def test_a_converted_checkpoint_has_the_same_tensors(written: Path, tmp_path: Path) -> None:
    sw.convert(written / "half", tmp_path / "ours", to="stepwell", objects="skip", verify=True)
    found = expected(written / "half")
    ours = digests(tmp_path / "ours")
    assert {key: ours[key] for key in found} == found


def test_megatron_loads_what_is_converted(written: Path, tmp_path: Path) -> None:
    original, converted = written / "dense", tmp_path / "iter_0000100"
    without = ["rng_state", "args/attention_backend"]
    made = sw.convert(original, converted, to="megatron", exclude=without, verify=True)
    assert made.files.keys() == {"__0_0.distcp", "__0_1.distcp", ".metadata", "common.pt", "metadata.json"}
    assert digests(converted) == expected(original)
    script = Path(__file__).with_name("megatron_loader.py")
    command = [sys.executable, script, original, converted, tmp_path / "store"]
    ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(2)]
    assert [rank.wait(120) for rank in ranks] == [0, 0]


def test_objects_of_a_grid_with_tensors_are_not_written(written: Path, tmp_path: Path) -> None:
    with pytest.raises(sw.MisuseError, match=r"`rng_state/.*exclude="):
        sw.convert(written / "dense", tmp_path / "out", to="megatron", exclude="args/*")
    assert not (tmp_path / "out").exists()


def test_values_are_common_ones_in_megatron_files(tmp_path: Path) -> None:
    state = {"w": np.ones(3), "args": {"lr": 0.5}, "parts": [np.ones(2), 7], "grid": {"shard_1_2": (1, "x")}}
    sw.save(tmp_path / "ours", state)
    sw.convert(tmp_path / "ours", tmp_path / "theirs", to="megatron")
    common = torch.load(tmp_path / "theirs" / "common.pt", weights_only=False)
    assert common == {"checkpoint_version": 3.0, "args": argparse.Namespace(lr=0.5), "parts": {1: 7}}
    found = sw.restore(tmp_path / "theirs")
    assert found["grid"] == {"shard_1_2": (1, "x")}
    assert found["parts.0"].tolist() == [1, 1]


# ---- damaged and hostile ones


def metadata_of(path: Path) -> Any:
    return pickle.loads((path / ".metadata").read_bytes())


def damaged(folder: Path, change: Callable[[Any], object]) -> Path:
    """A checkpoint with flattened states, whose metadata are changed."""
    path = shutil.copytree(OLD / "flattened", folder / "c")
    metadata = metadata_of(path)
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    return path


KEY = f"optimizer.state.exp_avg.{SEQUENCE}"


def shape(*sizes: object) -> Callable[[Any], object]:
    return lambda metadata: metadata.mcore_data[KEY].update(nd_reformulated_orig_global_shape=tuple(sizes))


def test_flattened_metadata_that_are_unchanged_are_read(tmp_path: Path) -> None:
    assert digests(damaged(tmp_path, lambda _: None)) == expected(OLD / "flattened")


@pytest.mark.parametrize(
    "change",
    [
        shape(2, 24, 9),
        shape(4, 24, 8),
        shape(2, 8, 24, 1),
        shape(384),
        shape(),
        shape(0, 24, 8),
        shape(-2, 24, 8),
        shape(2**70, 24, 8),
        shape("2", 24, 8),
        shape(*[1] * 100),
        lambda metadata: metadata.mcore_data.update({3: metadata.mcore_data[KEY]}),
        lambda metadata: metadata.mcore_data.update(none=dict(metadata.mcore_data[KEY])),
        lambda metadata: setattr(metadata, "mcore_data", [1]),
    ],
)
def test_a_lie_about_a_flattened_shape_is_damage(tmp_path: Path, change: Callable[[Any], object]) -> None:
    with pytest.raises(sw.CorruptCheckpoint, match=r"\.metadata"):
        sw.open(damaged(tmp_path, change))


def moved(by: int, key: str = KEY, axis: int = -1) -> Callable[[Any], object]:
    """Moves a part that is not the first one along an axis."""

    def change(metadata: Any) -> None:
        part = next(one for one in metadata.state_dict_metadata[key].chunks if one.offsets[axis] > 0)
        old, new = part.offsets, list(part.offsets)
        new[axis] += by
        part.offsets = torch.Size(new)
        (index,) = [one for one in metadata.storage_data if (one.fqn, one.offset) == (key, old)]
        metadata.storage_data[type(index)(key, part.offsets)] = metadata.storage_data.pop(index)

    return change


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(moved(-3), id="overlap"),
        pytest.param(lambda metadata: metadata.state_dict_metadata[KEY].chunks.pop(), id="hole"),
        pytest.param(lambda metadata: metadata.state_dict_metadata[KEY].chunks.clear(), id="none"),
    ],
)
def test_runs_must_have_each_element_once(tmp_path: Path, change: Callable[[Any], object]) -> None:
    with pytest.raises(sw.CorruptCheckpoint, match=r"leave elements out, or have some of them twice"):
        sw.open(damaged(tmp_path, change))


def test_parts_must_have_each_element_once(tmp_path: Path) -> None:
    path = damaged(tmp_path, moved(-1, SEQUENCE, 1))
    with pytest.raises(sw.CorruptCheckpoint, match=r"linear_qkv\.weight.*both hold \[0:1, 11:12, 0:8\]"):
        sw.restore(path, include=SEQUENCE)
    assert sw.restore(path, include=KEY)[KEY].shape == (2, 24, 8)
    with pytest.raises(sw.CorruptCheckpoint, match=r"linear_qkv\.weight"):
        sw.convert(path, tmp_path / "out", to="safetensors", include=SEQUENCE)


@pytest.mark.parametrize("shard", ["shard_9" + "9" * 3000 + "_1", "shard_1_0", "shard_0.0.0.0_-1", "shard_"])
def test_wild_numbers_in_keys_of_objects_are_names(tmp_path: Path, shard: str) -> None:
    def change(metadata: Any) -> None:
        old = "rng_state/shard_0.0_1.2"
        metadata.state_dict_metadata[f"rng_state/{shard}"] = metadata.state_dict_metadata.pop(old)
        (index,) = [one for one in metadata.storage_data if one.fqn == old]
        metadata.storage_data[type(index)(f"rng_state/{shard}")] = metadata.storage_data.pop(index)

    with sw.open(damaged(tmp_path, change)) as checkpoint:
        assert any(shard[:40] in repr(path) for path in checkpoint.paths())


def test_two_values_of_one_key_are_damage(tmp_path: Path) -> None:
    path = shutil.copytree(OLD / "flattened", tmp_path / "c")
    torch.save({SEQUENCE: 1}, path / "common.pt")
    with pytest.raises(sw.CorruptCheckpoint, match=r"is in it twice"):
        sw.open(path)
    torch.save([1], path / "common.pt")
    with pytest.raises(sw.CorruptCheckpoint, match=r"a dict was expected in common\.pt"):
        sw.open(path)


def test_states_of_fp8_are_their_bytes(tmp_path: Path) -> None:
    state = io.BytesIO()
    torch.save({"scale_fwd": torch.ones(3)}, state)
    torch.save({"_extra_state": state, "none": io.BytesIO()}, tmp_path / "c.pt")
    found = sw.restore(tmp_path / "c.pt")
    assert found == {"_extra_state": state.getvalue(), "none": b""}


@pytest.mark.parametrize("state", [(), (1, 2), ("text", 0, None), b"raw", [b"a", 0]])
def test_damaged_states_of_fp8_are_opaque(tmp_path: Path, state: object) -> None:
    class Lie:
        def __reduce__(self) -> Any:
            return io.BytesIO, (), state

    torch.save({"s": Lie()}, tmp_path / "c.pt")
    assert sw.restore(tmp_path / "c.pt")["s"] == Opaque("_io.BytesIO")


# ---- directories of ranks


def rank_files(root: Path, tensor: int, pipeline: int, **more: object) -> Iterator[Path]:
    """The files of Megatron-LM's old format."""
    for at in range(tensor):
        for stage in range(pipeline):
            name = f"mp_rank_{at:02d}" + (f"_{stage:03d}" if pipeline > 1 else "")
            (root / name).mkdir(parents=True)
            args = argparse.Namespace(
                tensor_model_parallel_size=tensor, pipeline_model_parallel_size=pipeline, **more
            )
            weights = {"layers.0.weight": torch.full((2, 3), float(10 * at + stage))}
            state = {"args": args, "iteration": 5, "checkpoint_version": 3.0, "model": weights}
            torch.save(state, root / name / "model_optim_rng.pt")
            yield root / name


def test_the_directory_of_one_rank_opens_as_its_state(tmp_path: Path) -> None:
    (rank,) = rank_files(tmp_path / "iter_0000005", 1, 1)
    torch.save({0: {"exp_avg": torch.ones(6)}}, rank / "distrib_optim.pt")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    found = sw.restore(tmp_path)
    assert found["iteration"] == 5
    assert found["model"]["layers.0.weight"].shape == (2, 3)
    assert "distrib_optim.pt" in found["distrib_optim.pt"].what
    assert sw.verify(tmp_path).ok


def test_directories_of_ranks_are_joined_by_a_map(tmp_path: Path) -> None:
    assert len(list(rank_files(tmp_path, 2, 2))) == 4
    with sw.open(tmp_path) as checkpoint:
        assert list(checkpoint) == ["mp_rank_00_000", "mp_rank_00_001", "mp_rank_01_000", "mp_rank_01_001"]
    rules = [
        {
            "concat": [f"mp_rank_{rank:02d}_{{stage}}/model/layers.{{i}}.weight" for rank in range(2)],
            "to": "stages.{stage}.layers.{i}.weight",
        }
    ]
    found = sw.restore(tmp_path, map=rules)
    assert found["stages.001.layers.0.weight"][:, 0].tolist() == [1, 1, 11, 11]


def test_halves_of_a_gated_layer_are_joined_in_groups(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / f"mp_rank_{rank:02d}").mkdir()
        gate, up = torch.full((2, 3), float(rank)), torch.full((2, 3), 10.0 + rank)
        state = {"model": {"fc1": torch.cat([gate, up])}, "args": argparse.Namespace(lr=1)}
        torch.save(state, tmp_path / f"mp_rank_{rank:02d}" / "model_optim_rng.pt")
    rules = [{"concat": [f"mp_rank_{rank:02d}/model/fc1" for rank in range(2)], "to": "fc1", "groups": 2}]
    found = sw.restore(tmp_path, map=rules, include="fc1")
    assert found["fc1"][:, 0].tolist() == [0, 0, 1, 1, 10, 10, 11, 11]


def test_a_missing_rank_is_named(tmp_path: Path) -> None:
    first, second = rank_files(tmp_path, 2, 1)
    shutil.rmtree(second)
    with pytest.raises(sw.errors.FormatError, match=r"1 directories mp_rank_… of 2"):
        sw.open(tmp_path)
    with sw.open(first / "model_optim_rng.pt") as checkpoint:
        assert checkpoint["iteration"] == 5


def test_a_root_with_a_plain_checkpoint_of_dcp_opens(tmp_path: Path) -> None:
    writer = dcp.FileSystemWriter(tmp_path / "iter_0000005")
    dcp.save({"model": {"w": torch.ones(3)}, "iteration": 5}, storage_writer=writer, no_dist=True)
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("5")
    assert sw.restore(tmp_path)["model"]["w"].tolist() == [1, 1, 1]
