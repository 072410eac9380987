"""Commands on checkpoints of other libraries, and under a map."""

from __future__ import annotations

import errno
import json
import os
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from command_line import document, run
from safetensors.numpy import save_file

WEIGHTS = {f"layers.{i}.w": np.arange(12, dtype=np.float32).reshape(3, 4) + i for i in range(2)}


class Unknown:
    """A class that the reader of pickles does not know."""


@pytest.fixture
def weights(tmp_path: Path) -> Path:
    """A file of safetensors."""
    save_file(WEIGHTS, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


@pytest.fixture
def stack(tmp_path: Path) -> Path:
    """A map that stacks the layers."""
    file = tmp_path / "stack.toml"
    file.write_text('[[rule]]\nstack = "layers.{i}.w"\nto = "layers.w"\nover = "i"\n')
    return file


@pytest.fixture
def opaque(tmp_path: Path) -> Path:
    """A pickle with a value that cannot be restored."""
    file = tmp_path / "odd.pkl"
    file.write_bytes(pickle.dumps({"odd": Unknown(), "lr": 0.5}, protocol=2))
    return file


def test_ls_of_a_file_says_its_format_and_tensors(weights: Path) -> None:
    found = document("ls", weights)
    assert found["path"] == str(weights)
    assert found["format"] == "safetensors"
    assert (found["number_of_tensors"], found["number_of_objects"]) == (2, 0)
    nbytes = weights.stat().st_size
    assert found["files"] == [{"path": weights.name, "bytes": nbytes, "tensors": 2}]
    assert found["bytes"] == nbytes
    assert run("ls", weights).stdout.splitlines()[0].startswith(f"{weights}: safetensors, 1 file, ")


def test_ls_of_shards_counts_the_tensors_of_each(tmp_path: Path, weights: Path) -> None:
    sw.export(weights, tmp_path / "sharded", shard_size=60)
    found = document("ls", tmp_path / "sharded")
    assert [file["tensors"] for file in found["files"]] == [1, 1]
    assert found["bytes"] == sum(file.stat().st_size for file in (tmp_path / "sharded").glob("*.safetensors"))


def test_ls_of_a_step_lists_its_files(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(3, {"params": {"w": np.ones(4)}, "step": 3})
    for path in (f"{root}@3", root / "step_00000003"):
        found = document("ls", path)
        assert found["format"] == "stepwell"
        assert [file["tensors"] for file in found["files"]] == [1, 0]
    assert document("ls", f"{root}@4", code=1)["error"]["kind"] == "step_not_found"


def test_ls_of_no_checkpoint_says_what_the_path_is(tmp_path: Path, weights: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello")
    (tmp_path / "photos").mkdir()
    for path, words in (
        (tmp_path / "notes.txt", "this file is in no format that is read"),
        (tmp_path / "photos", "is no root of a run"),
    ):
        done = run("ls", path)
        assert done.exit_code == 1
        assert words in done.stderr
    done = run("ls", weights, "-n", 1)
    assert done.exit_code == 2
    assert "--last is for a root" in done.stderr
    weights.write_bytes(weights.read_bytes()[:60])
    assert document("ls", weights, code=1)["error"]["kind"] == "corrupt_checkpoint"


@pytest.mark.parametrize("command", ["ls", "show", "verify", "cat"])
def test_a_step_of_a_file_is_refused_in_plain_words(weights: Path, command: str) -> None:
    sw.save(weights.parent / "own", {"w": np.ones(2)})
    for path in (weights, weights.parent / "own"):
        done = run(command, f"{path}@4", *(["w"] if command == "cat" else []))
        assert done.exit_code == 1
        assert "is a single checkpoint" in done.stderr
        assert done.stderr.endswith("leave the step out\n")


def test_opaque_values_are_named(opaque: Path) -> None:
    assert document("ls", opaque)["opaque"] == ["odd"]
    found = document("show", opaque)
    assert found["opaque_leaves"] == 1
    odd, rate = found["leaves"]
    assert odd["opaque"].endswith(".Unknown")
    assert "value" not in odd
    assert (rate["opaque"], rate["value"]) == (None, 0.5)
    text = run("show", opaque).stdout
    assert "1 opaque leaf" in text
    assert "Unknown" in text


def test_show_cat_and_plan_see_the_mapped_leaves(weights: Path, stack: Path) -> None:
    shown = document("show", weights, "--map", stack)
    assert [(leaf["path"], leaf["shape"]) for leaf in shown["leaves"]] == [("layers.w", [2, 3, 4])]
    assert document("cat", weights, "layers.w[:, 2, 3]", "--map", stack)["values"] == [11.0, 12.0]
    planned = document("plan", weights, "--map", stack)
    assert planned["report"]["restored"] == ["layers.w"]
    assert planned["restore"]["step"] is None
    assert planned["restore"]["path"] == str(weights)
    assert run("plan", weights).stdout.startswith(f"restore of {weights}: 2 leaves")


@pytest.mark.parametrize("command", ["show", "cat", "plan", "diff", "convert", "export"])
def test_a_map_that_does_not_fit_is_wrong_use(command: str, tmp_path: Path, weights: Path) -> None:
    more: dict[str, list[Any]] = {
        "cat": ["layers.0.w"],
        "diff": [weights],
        "convert": [tmp_path / "out", "--to", "npz"],
        "export": [tmp_path / "out"],
    }
    file = tmp_path / "wrong.toml"
    file.write_text('[[rule]]\nrename = "blocks.{i}.w"\nto = "layers.{i}.w"\n')
    found = document(command, weights, *more.get(command, []), "--map", file, code=2)
    assert "blocks.{i}.w" in found["error"]["message"]
    found = document(command, weights, *more.get(command, []), "--map", tmp_path / "none.toml", code=2)
    assert "none.toml" in found["error"]["message"]
    assert not (tmp_path / "out").exists()


def test_export_writes_and_verifies_the_chosen_leaves(root: Path, tmp_path: Path, stack: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        for step in (1, 2):
            params = {name: array * step for name, array in WEIGHTS.items()}
            manager.save(step, {"params": params, "step": step})
    made = document("export", f"{root}@1", tmp_path / "one", "--subtree", "params", "--cast", "bfloat16")
    assert (made["format"], made["verified"]) == ("safetensors", True)
    stored = sw.restore(tmp_path / "one")
    assert {name: str(array.dtype) for name, array in stored.items()} == dict.fromkeys(WEIGHTS, "bfloat16")
    assert np.array_equal(stored["layers.1.w"].astype(np.float32), WEIGHTS["layers.1.w"])
    options = ("--to", "npz", "--include", "params", "--exclude", "**/layers.0.w")
    document("export", root, tmp_path / "two.npz", *options)
    assert sorted(np.load(tmp_path / "two.npz")) == ["params.layers.1.w"]
    made = document("export", root, tmp_path / "x", code=2)
    assert "cannot hold leaf `step`" in made["error"]["message"]
    document("export", root, tmp_path / "x", "--objects", "skip", "--shard-size", "60")
    index = json.loads((tmp_path / "x" / "model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) == 2
    (tmp_path / "config.json").write_text("{}")
    document("export", tmp_path / "one", tmp_path / "model", "--files", tmp_path / "config.json")
    assert (tmp_path / "model" / "config.json").read_text() == "{}"
    document("export", tmp_path / "one", tmp_path / "stacked.safetensors", "--map", stack)
    assert sw.restore(tmp_path / "stacked.safetensors")["layers.w"].shape == (2, 3, 4)


def test_commands_for_steps_refuse_foreign_files(weights: Path, tmp_path: Path) -> None:
    for arguments, words in (
        (
            ["cp", weights, tmp_path / "copy"],
            f"{weights} is no step of stepwell: another library wrote it (safetensors). Write it as one with "
            "`stepwell convert SOURCE DESTINATION --to stepwell`",
        ),
        (["repair", weights, "--yes"], "is no checkpoint of stepwell; it is a file"),
        (["verify", weights, "--all"], "cannot be a root: it is a file"),
        (["prune", weights, "--keep-latest", 1, "--yes"], "cannot be a root: it is a file"),
    ):
        done = run(*arguments)
        assert done.exit_code in (1, 2)
        assert words in done.stderr
        assert done.stderr.count("a checkpoint of stepwell is a directory") <= 1
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize(
    "command",
    [
        ["verify", "--all"],
        ["gc"],
        ["gc", "--dry-run"],
        ["prune", "--keep-latest", 1, "--yes"],
        ["rm", 1, "--yes"],
        ["rewind", 3, "--yes"],
    ],
)
def test_commands_for_roots_refuse_foreign_directories(weights: Path, command: list[Any]) -> None:
    name, *rest = command
    error = document(name, weights.parent, *rest, code=2)["error"]
    assert error["kind"] == "invalid"
    assert "another library" in error["message"]
    assert "step" in error["message"]
    assert [file.name for file in weights.parent.iterdir()] == [weights.name]


def test_a_dot_is_the_whole_state(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3.0))
    assert document("cat", tmp_path / "a.npy", ".[1:]")["values"] == [1.0, 2.0]
    assert run("cat", tmp_path / "a.npy", ".").stdout.startswith(".: float64 [3]\n")
    assert run("cat", tmp_path / "a.npy", "[3]").stderr.startswith("stepwell cat: .: index 3")
    sw.save(tmp_path / "own", {"w": 1, ".": 2})
    assert document("cat", tmp_path / "own", ".")["value"] == 2


def test_a_full_disk_names_the_output_of_cat(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    np.save(tmp_path / "a.npy", np.arange(3.0))

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(np.lib.format, "write_array_header_2_0", full)
    error = document("cat", tmp_path / "a.npy", ".", "-o", tmp_path / "out.npy", code=1)["error"]
    assert error["file"] == str(tmp_path / "out.npy")
    assert str(tmp_path / "out.npy") in error["message"]
    assert error["message"].endswith("free space there")


def test_a_file_without_a_tensor_is_counted(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.array([{}], dtype=object), allow_pickle=True)
    nbytes = (tmp_path / "a.npy").stat().st_size
    assert document("ls", tmp_path / "a.npy")["files"] == [{"path": "a.npy", "bytes": nbytes, "tensors": 0}]
    assert document("verify", tmp_path / "a.npy")["checkpoints"][0]["bytes"] == nbytes
    assert document("show", tmp_path / "a.npy")["step"] is None


def test_an_index_of_no_tensor_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors.index.json").write_text('{"weight_map": {}}')
    error = document("ls", tmp_path, code=1)["error"]
    assert error["kind"] == "corrupt_checkpoint"
    assert "weight_map names no tensor" in error["message"]


@pytest.mark.parametrize("command", ["ls", "show"])
def test_places_near_a_checkpoint_are_explained(tmp_path: Path, command: str) -> None:
    (tmp_path / "hub" / "snapshots").mkdir(parents=True)
    (tmp_path / "files").mkdir()
    (tmp_path / "files" / "0.pt").touch()
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    assert f"pass a directory in {tmp_path}/hub/snapshots" in run(command, tmp_path / "hub").stderr
    assert "opened one by one: 0.pt" in run(command, tmp_path / "files").stderr
    assert f"there is no {tmp_path}/gone" in run(command, tmp_path / "link").stderr
    assert "*.safetensors" in run(command, tmp_path).stderr


def test_a_directory_that_may_not_be_read_is_an_error_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def denied(path: str) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(os, "listdir", denied)
    with pytest.raises(sw.StorageError, match=f"{tmp_path} cannot be read: Permission denied") as caught:
        sw.open(tmp_path)
    assert (caught.value.errno, caught.value.filename) == (errno.EACCES, str(tmp_path))


def test_verify_names_a_damaged_file_once(weights: Path) -> None:
    sw.convert(weights, weights.parent / "dcp", to="dcp")
    (weights.parent / "dcp" / ".metadata").write_bytes(b"\x80\x02?")
    found = document("verify", weights.parent / "dcp", code=1)["checkpoints"][0]
    assert found["path"] == str(weights.parent / "dcp")
    assert found["damages"][0]["file"] == str(weights.parent / "dcp" / ".metadata")
    assert str(weights.parent) not in found["damages"][0]["what"]


def test_an_empty_state_is_not_converted(tmp_path: Path) -> None:
    sw.save(tmp_path / "own", {"empty": {}})
    for options in ([], ["--subtree", "empty"]):
        error = document("export", tmp_path / "own", tmp_path / "x", *options, code=2)["error"]
        assert "nothing to convert" in error["message"]
        assert "--include" not in error["message"]
