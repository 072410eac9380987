"""Checkpoints that old and new versions of Megatron-Core wrote are read bit for bit, without it.
``tests/foreign/make_megatron.py`` has made them."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import stepwell as sw
from stepwell.formats.description import Opaque

FOREIGN = Path(__file__).parents[1] / "foreign"
OLD, NEW = FOREIGN / "megatron_0.12.3", FOREIGN / "megatron_0.19.2"
CHECKPOINTS = [one.with_suffix("") for one in sorted(FOREIGN.glob("megatron_*/*.json"))]
#: The enums of Megatron in ``args``: before 0.11, there is no ``AttnBackend``.
ENUMS = {f"megatron.core.transformer.enums.{name}" for name in ("AttnBackend", "AttnMaskType")}
SEQUENCE = "decoder.layers.self_attention.linear_qkv.weight"


def digests(path: Path) -> dict[str, list[object]]:
    """The tensors of a checkpoint: dtype, shape, and the digest of the bytes."""
    with sw.open(path) as checkpoint:
        leaves = {key: checkpoint[key] for key in checkpoint}
        arrays = {key: leaf[...] for key, leaf in leaves.items() if hasattr(leaf, "dtype")}
    return {
        key: [one.dtype.name, list(one.shape), hashlib.sha256(one.tobytes()).hexdigest()]
        for key, one in arrays.items()
    }


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda one: f"{one.parent.name}_{one.name}")
def test_tensors_of_other_versions_are_read_bit_for_bit(path: Path) -> None:
    assert digests(path) == json.loads(path.with_suffix(".json").read_bytes())
    assert sw.verify(path).ok


@pytest.mark.parametrize("path", CHECKPOINTS, ids=lambda one: f"{one.parent.name}_{one.name}")
def test_common_values_and_objects_of_grids_are_read(path: Path) -> None:
    found = sw.restore(path)
    assert found["iteration"] == 100
    assert found["checkpoint_version"] == 3.0
    assert found["args"]["lr"] == 0.5
    enum = found["args"]["attention_backend"]
    assert isinstance(enum, Opaque)
    assert enum.what in ENUMS
    grid = sorted(found["rng_state"])
    assert grid[0].startswith("shard_0.0_")
    (one,) = found["rng_state"][grid[0]]
    assert one["seed"] == 0
    assert one["torch"].tolist() == [0, 1, 2, 3, 4]
    assert not any("/" in key for key in found)


def test_all_supported_versions_have_a_checkpoint() -> None:
    versions = {path.parent.name.removeprefix("megatron_") for path in CHECKPOINTS}
    assert versions == {"0.8.0", "0.9.0", "0.10.0", "0.11.0", "0.12.3", "0.19.2"}
    assert {path.name for path in CHECKPOINTS if "0.8.0" in str(path)} == {
        "flattened_part",
        "two_layers",
        "zarr",
    }


def test_flattened_optimizer_states_are_restored_in_part() -> None:
    whole = sw.restore(OLD / "flattened")
    with sw.open(OLD / "flattened") as checkpoint:
        for slot in ("fp32_param", "exp_avg"):
            leaf = checkpoint[f"optimizer.state.{slot}.{SEQUENCE}"]
            assert leaf.shape == whole[SEQUENCE].shape
            np.testing.assert_array_equal(
                leaf[1, 3:17, 2:5], whole[f"optimizer.state.{slot}.{SEQUENCE}"][1, 3:17, 2:5]
            )
    np.testing.assert_array_equal(whole[f"optimizer.state.fp32_param.{SEQUENCE}"], whole[SEQUENCE] * 1.5)
    assert whole["optimizer"]["optimizer"]["param_groups"][0]["step"] == 7


def test_locks_of_zarr_arrays_are_no_arrays(tmp_path: Path) -> None:
    path = shutil.copytree(OLD / "zarr", tmp_path / "c")
    lock = path / f"{SEQUENCE}.sync"
    lock.mkdir()
    (lock / ".zarray").touch()
    (lock / "0.0.0").touch()
    assert digests(path) == json.loads((OLD / "zarr.json").read_bytes())


def test_a_missing_chunk_of_zarr_is_damage(tmp_path: Path) -> None:
    path = shutil.copytree(OLD / "zarr", tmp_path / "c")
    (path / SEQUENCE / "0.0.0").unlink()
    with pytest.raises(sw.CorruptCheckpoint, match=r"linear_qkv\.weight"):
        sw.restore(path)


def test_a_root_opens_as_the_iteration_of_its_tracker(tmp_path: Path) -> None:
    shutil.copytree(NEW / "dense", tmp_path / "iter_0000100")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100\n")
    assert digests(tmp_path) == digests(NEW / "dense")
    (tmp_path / "iter_0000100").rename(tmp_path / "release")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release")
    assert digests(tmp_path) == digests(NEW / "dense")


def test_a_root_with_zarr_checkpoints_opens(tmp_path: Path) -> None:
    shutil.copytree(OLD / "zarr", tmp_path / "iter_0000100")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("100")
    assert digests(tmp_path) == digests(OLD / "zarr")


@pytest.mark.parametrize(
    "text", ["../elsewhere", "-1", "1e3", "9" * 100, "release/..", "\0", "½", "x" * 9000]
)
def test_a_tracker_without_a_number_is_refused(tmp_path: Path, text: str) -> None:
    shutil.copytree(NEW / "dense", tmp_path / "iter_0000100")
    (tmp_path / "latest_checkpointed_iteration.txt").write_text(text)
    with pytest.raises(sw.CorruptCheckpoint, match=r"latest_checkpointed_iteration"):
        sw.open(tmp_path)


#: Contents of ``metadata.json`` that name no backend. The last one has a flipped bit.
CONFIGS = ["", "[]", "{", '{"sharded_backend": 3}', "[" * 9000, "1" * 70000, '{"sharded_b`ckend": "zarr"}']


@pytest.mark.parametrize("text", CONFIGS)
def test_a_config_of_others_is_passed_over(tmp_path: Path, text: str) -> None:
    path = shutil.copytree(FOREIGN / "torch_2.4.1" / "dcp", tmp_path / "c")
    before = digests(path)
    (path / "metadata.json").write_text(text)
    assert digests(path) == before


@pytest.mark.parametrize("text", CONFIGS)
@pytest.mark.parametrize("source", [NEW / "dense", OLD / "flattened", OLD / "zarr"], ids=lambda one: one.name)
def test_a_damaged_config_is_damage(tmp_path: Path, source: Path, text: str) -> None:
    path = shutil.copytree(source, tmp_path / "c")
    (path / "metadata.json").write_text(text)
    check_no_config(path)


@pytest.mark.parametrize("source", [NEW / "dense", OLD / "flattened"], ids=lambda one: one.name)
def test_a_lost_config_is_damage(tmp_path: Path, source: Path) -> None:
    path = shutil.copytree(source, tmp_path / "c")
    (path / "metadata.json").unlink()
    check_no_config(path)


def check_no_config(path: Path) -> None:
    with pytest.raises(sw.CorruptCheckpoint, match=r"metadata\.json: it is missing or damaged"):
        sw.restore(path)
    (damage,) = sw.verify(path).damages
    assert damage.file == str(path / "metadata.json")


@pytest.mark.parametrize("source", [OLD / "flattened", OLD / "zarr"], ids=lambda one: one.name)
def test_lost_common_values_are_damage(tmp_path: Path, source: Path) -> None:
    path = shutil.copytree(source, tmp_path / "c")
    (path / "common.pt").unlink()
    with pytest.raises(sw.CorruptCheckpoint, match=r"common\.pt: it is missing"):
        sw.restore(path)
    (damage,) = sw.verify(path).damages
    assert damage.file == str(path / "common.pt")


def test_an_unknown_backend_is_refused_by_name(tmp_path: Path) -> None:
    path = shutil.copytree(NEW / "dense", tmp_path / "c")
    (path / "metadata.json").write_text('{"sharded_backend": "tape"}')
    with pytest.raises(sw.errors.FormatError, match=r"backend `tape`"):
        sw.open(path)


def test_a_missing_file_of_metadata_is_named(tmp_path: Path) -> None:
    path = shutil.copytree(NEW / "dense", tmp_path / "c")
    (path / ".metadata").unlink()
    with pytest.raises(sw.CorruptCheckpoint, match=r"its \.metadata is missing"):
        sw.open(path)
