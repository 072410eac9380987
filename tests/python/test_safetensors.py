"""safetensors files, written by their own library: opened, restored in part and cast, verified; and
hostile ones."""

from __future__ import annotations

import errno
import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import stepwell as sw
from command_line import run
from safetensors.numpy import save_file
from stepwell import formats

TENSORS: dict[str, np.ndarray] = {
    "model.embed.weight": np.arange(96, dtype=np.float32).reshape(8, 12),
    "model.layers.0.w": np.arange(60, dtype=np.float16).reshape(3, 4, 5),
    "odd": np.arange(3, dtype=np.uint8),
    "half": np.arange(7).astype(ml_dtypes.bfloat16),
    "scalar": np.array(5, np.int64),
    "empty": np.zeros((0, 4), np.float64),
    "ümlaut/with space": np.array([True, False]),
    "": np.array([1 + 2j], np.complex64),
}


def written(header: dict[str, Any] | bytes, data: bytes = b"") -> bytes:
    """A file with that header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory with one file."""
    folder = tmp_path / "model"
    folder.mkdir()
    save_file(TENSORS, folder / "model.safetensors", metadata={"format": "np"})
    (folder / "config.json").write_text("{}")
    return folder


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    """A directory with two shards and an index, behind links as in a hub's cache."""
    blobs, folder = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    folder.mkdir()
    names = list(TENSORS)
    places = {}
    for number in range(2):
        shard = f"model-0000{number + 1}-of-00002.safetensors"
        mine = {name: TENSORS[name] for name in names[number::2]}
        save_file(mine | {f"unlisted{number}": np.zeros(2)}, blobs / f"{number:064x}")
        (folder / shard).symlink_to(f"../blobs/{number:064x}")
        places |= dict.fromkeys(mine, shard)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder


def check(found: dict[str, np.ndarray]) -> None:
    assert found.keys() == TENSORS.keys()
    for name, tensor in TENSORS.items():
        assert found[name].dtype == tensor.dtype, name
        assert found[name].tobytes() == tensor.tobytes(), name
        assert found[name].shape == tensor.shape, name


@pytest.mark.parametrize("name", ["", "model.safetensors"])
def test_a_file_restores_bit_for_bit(model: Path, name: str) -> None:
    check(sw.restore(model / name))
    with sw.open(model / name) as checkpoint:
        assert checkpoint.metadata().writer == "safetensors"
        assert checkpoint.metadata().custom_metadata == {"format": "np"}
        assert repr(checkpoint).startswith("<Checkpoint (safetensors) at ")
        assert checkpoint["model.embed.weight"][2:4, 3].tolist() == [27.0, 39.0]


@pytest.mark.parametrize("name", ["", "model.safetensors.index.json"])
def test_shards_behind_links_restore_as_one(shards: Path, name: str) -> None:
    check(sw.restore(shards / name))


def test_an_adapter_is_read_only_without_a_model(model: Path, shards: Path) -> None:
    adapter = written({"lora": entry("U8", [1], 0, 1)}, b"\7")
    for directory in (model, shards):
        (directory / "adapter_model.safetensors").write_bytes(adapter)
        check(sw.restore(directory))
    (model / "model.safetensors").unlink()
    assert sw.restore(model)["lora"].tolist() == [7]


def test_a_part_restores_in_place_and_cast(model: Path) -> None:
    target = {"half": np.zeros(7, np.float32), "odd": np.zeros(3, np.uint8)}
    memory = target["half"]
    restored, report = sw.restore(model, into=target, return_report=True)
    assert restored["half"] is memory
    assert memory.tolist() == [0, 1, 2, 3, 4, 5, 6]
    assert report.cast == [sw.results.CastLeaf("half", "bfloat16", "float32")]
    plan = sw.open(model).plan(include="odd")
    assert plan.nbytes == 3


def test_rows_of_a_tensor_are_read_by_a_rank(model: Path) -> None:
    part = sw.sharding.LocalShard(np.zeros((2, 12), np.float32), (8, 12), (4, 0))
    sw.restore(model, into={"model.embed.weight": part})
    np.testing.assert_array_equal(part.local, TENSORS["model.embed.weight"][4:6])


def test_verify_says_that_nothing_vouches_for_the_bytes(model: Path) -> None:
    report = sw.verify(model)
    assert report.ok
    assert report.unguarded_nbytes == report.nbytes == (model / "model.safetensors").stat().st_size
    shown = run("verify", str(model))
    assert shown.exit_code == 0
    assert "no checksum is known" in shown.output


def test_the_command_line_reads_them(model: Path) -> None:
    for command in (["show"], ["show", "--layout"], ["plan"]):
        shown = run(*command, str(model))
        assert shown.exit_code == 0, (command, shown.output)
    assert "bfloat16" in run("show", str(model)).output
    assert "[0, 1, 2]" in run("cat", str(model), "odd").output
    assert run("diff", str(model), str(model / "model.safetensors")).exit_code == 0


def test_packed_dtypes_are_listed_and_not_restored(tmp_path: Path) -> None:
    header = {"w": entry("F4", [4], 0, 2), "b": entry("U8", [1], 2, 3)}
    (tmp_path / "x.safetensors").write_bytes(written(header, b"\x12\x34\x05"))
    with sw.open(tmp_path / "x.safetensors") as checkpoint:
        assert repr(checkpoint["w"]) == "<opaque F4[4]>"
        assert checkpoint["b"].load().tolist() == [5]


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"", "eight bytes or more"),
        (struct.pack("<Q", 2**63), "a header of at most"),
        (struct.pack("<Q", 1000) + b"{}", "does not fit into a file"),
        (written(b"{"), "no valid JSON"),
        (written({"w": entry("F32", [2], 0, 8)}, b"\0" * 9), "the last tensor ends at byte"),
        (written({"w": entry("F32", [2], 0, 8)}, b"\0" * 7), "the last tensor ends at byte"),
        (written({"w": entry("F32", [3], 0, 8)}, b"\0" * 8), "are not those of F32"),
        (written({"w": entry("U8", [2**62, 8], 0, 8)}, b"\0" * 8), "are not those of U8"),
        (written({"w": entry("U8", [0, 2**63], 0, 0)}), "a shape that is too large"),
        (written(b'{"w":' + b"[" * 50_000), "no valid JSON"),
    ],
)
def test_damaged_files_are_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(content)
    begun = time.process_time()
    with pytest.raises(sw.CorruptCheckpoint, match=expected) as failure:
        sw.open(file)
    assert time.process_time() - begun < 1
    assert str(file) in str(failure.value)


@pytest.mark.parametrize(
    ("index", "expected"),
    [
        ("[]", "its weight_map is missing, or is no table"),
        ('{"weight_map": 3}', "its weight_map is missing, or is no table"),
        ('{"weight_map": {"odd": "../../etc/passwd"}}', "is in `../../etc/passwd`, which is no file name"),
        ('{"weight_map": {"odd": ".."}}', "no file name"),
        (r'{"weight_map": {"odd": "a\u0000.safetensors"}}', "no file name"),
        (r'{"weight_map": {"odd": "\ud800.safetensors"}}', "no file name"),
        ('{"weight_map": {"none": "a.safetensors"}}', "is not in a.safetensors"),
        ("[" * 100_000, "an index in JSON was expected"),
    ],
)
def test_hostile_indexes_are_refused(tmp_path: Path, index: str, expected: str) -> None:
    save_file({"odd": TENSORS["odd"]}, tmp_path / "a.safetensors")
    (tmp_path / "x.safetensors.index.json").write_text(index)
    with pytest.raises(sw.CorruptCheckpoint, match=expected):
        sw.open(tmp_path)


def test_a_missing_shard_is_named(shards: Path) -> None:
    missing = shards / "model-00002-of-00002.safetensors"
    missing.unlink()
    with pytest.raises(
        sw.StorageError, match=r"index.json: 1 of 2 files .* missing: model-00002-of-00002"
    ) as failure:
        sw.open(shards)
    assert failure.value.errno == errno.ENOENT


def test_a_directory_that_lacks_numbered_files_is_refused(tmp_path: Path) -> None:
    for number in (1, 3):
        save_file(
            {f"w{number}": np.ones(2, np.float32)}, tmp_path / f"model-0000{number}-of-00003.safetensors"
        )
    with pytest.raises(sw.CorruptCheckpoint, match="2 of 3 files model-…-of-00003"):
        sw.open(tmp_path)
    save_file({"w2": np.ones(2, np.float32)}, tmp_path / "model-00002-of-00003.safetensors")
    assert sw.restore(tmp_path).keys() == {"w1", "w2", "w3"}


def test_a_file_that_is_replaced_is_not_mixed_in(model: Path) -> None:
    file = model / "model.safetensors"
    with sw.open(model) as checkpoint:
        (model / "new").write_bytes(file.read_bytes())
        (model / "new").rename(file)
        with pytest.raises(
            sw.CorruptCheckpoint, match="has changed since the checkpoint was opened"
        ) as failure:
            checkpoint["odd"].load()
    assert str(file) in str(failure.value)


def swap(file: Path, content: bytes) -> None:
    """Replaces a file as writers do."""
    (file.parent / "new").write_bytes(content)
    os.replace(file.parent / "new", file)


@pytest.mark.parametrize("name", ["model-00001-of-00002.safetensors", "model.safetensors.index.json"])
@pytest.mark.parametrize("how", ["replaced", "removed"])
def test_files_that_change_between_parse_and_open_are_refused(tmp_path: Path, name: str, how: str) -> None:
    first, second = (np.full(4, number, np.float32) for number in (1, 2))
    layout = {"a": entry("F32", [4], 0, 16), "b": entry("F32", [4], 16, 32)}
    other = {"b": entry("F32", [4], 0, 16), "a": entry("F32", [4], 16, 32)}
    shards = [f"model-0000{number}-of-00002.safetensors" for number in (1, 2)]
    (tmp_path / shards[0]).write_bytes(written(layout, first.tobytes() + second.tobytes()))
    save_file({"c": first}, tmp_path / shards[1])
    index = json.dumps({"weight_map": {"a": shards[0], "b": shards[0], "c": shards[1]}})
    (tmp_path / "model.safetensors.index.json").write_text(index)
    description = formats.find(str(tmp_path))
    assert description is not None
    if how == "removed":
        (tmp_path / name).unlink()
    elif name == shards[0]:
        swap(tmp_path / name, written(other, second.tobytes() + first.tobytes()))
    else:
        swap(tmp_path / name, index.encode())
    with pytest.raises((sw.CorruptCheckpoint, FileNotFoundError)) as failure:
        description.open("auto")
    assert name in str(failure.value)
    if how == "replaced":
        assert "it has changed while the checkpoint was opened" in str(failure.value)
        assert sw.restore(tmp_path)["a"].tolist() == [1] * 4


def test_a_file_that_changes_length_is_damage(model: Path) -> None:
    with sw.open(model) as checkpoint:
        os.truncate(model / "model.safetensors", 300)
        with pytest.raises(sw.CorruptCheckpoint, match="300 bytes"):
            checkpoint.restore()


def test_foreign_files_are_not_copied_or_saved_over(model: Path, tmp_path: Path) -> None:
    path = model / "model.safetensors"
    with sw.open(path) as checkpoint:
        assert checkpoint.metadata().step is None
        for copy in (lambda: checkpoint.copy(tmp_path / "copy"), lambda: manager.add(checkpoint)):
            with (
                sw.CheckpointManager(tmp_path / "run") as manager,
                pytest.raises(
                    sw.MisuseError, match=f"{path} is no step of stepwell: another library wrote it"
                ),
            ):
                copy()
    with pytest.raises(sw.MisuseError):
        sw.save(model, {"x": 1})
    check(sw.restore(model))


def test_a_step_of_a_file_is_refused_and_explained(model: Path) -> None:
    for call in (sw.open, sw.restore, sw.metadata, sw.verify):
        with pytest.raises(
            sw.StepNotFound, match=r"single checkpoint \(safetensors\) without steps: leave the step out"
        ):
            call(model, 3)


def part(name: str, shape: list[int], start: object, dtype: str = "F32") -> bytes:
    """A file with one part of a tensor, as DCP writes it."""
    nbytes = int(np.prod(shape)) * 4
    noted = start if isinstance(start, str) else json.dumps({name: {"saved_offsets": start}})
    entries = {"__metadata__": {"DCP_SHARDING_INFO": noted}, name: entry(dtype, shape, 0, nbytes)}
    return written(entries, bytes(range(nbytes)))


def test_parts_of_a_tensor_in_several_files_are_whole(tmp_path: Path) -> None:
    for number, (shape, start) in enumerate([([2, 3], [1, 0]), ([1, 2], [0, 1]), ([1, 1], [0, 0])]):
        (tmp_path / f"{number}.safetensors").write_bytes(part("w", shape, start))
    count = np.arange(24, dtype=np.uint8).view(np.float32)
    expected = np.array([[count[0], *count[:2]], count[:3], count[3:]])
    assert sw.restore(tmp_path)["w"].tobytes() == expected.tobytes()
    assert sw.restore(tmp_path / "1.safetensors")["w"].shape == (1, 2)


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        (part("w", [1, 3], [3, 0]), "`w` have 6 of 12 elements; is a file missing"),
        (part("w", [1, 3], [2**61, 0]), "elements; is a file missing"),
        (part("w", [1, 3], [0, 0]), "`w` have 6 of 3 elements"),
        (part("w", [1, 3], [2**62, 0]), "begins at no element"),
        (part("w", [1, 3], [True, 0]), "begins at no element"),
        (part("w", [1, 3], [0]), "begins at no element"),
        (part("w", [3], [1]), "differ in their dtypes or dimensions"),
        (part("w", [1, 3], [1, 0], "I32"), "differ in their dtypes or dimensions"),
        (part("w", [1, 3], "[" * 100_000), "RecursionError"),
        (part("w", [1, 3], "{}"), "KeyError"),
        (part("w", [1, 3], '{"w": {"saved_offsets": 3}}'), "TypeError"),
        (part("w", [1, 3], " " * (17 << 20)), "more than 16777216"),
        (written({"w": entry("F32", [1, 3], 0, 12)}, b"\0" * 12), "in another file"),
    ],
)
def test_parts_that_lie_are_refused(tmp_path: Path, other: bytes, expected: str) -> None:
    (tmp_path / "0.safetensors").write_bytes(part("w", [1, 3], [0, 0]))
    (tmp_path / "1.safetensors").write_bytes(other)
    with pytest.raises(sw.CorruptCheckpoint, match=expected):
        sw.open(tmp_path)


def test_parts_that_overlap_are_not_restored(tmp_path: Path) -> None:
    for number, start in enumerate([[0], [1], [4]]):
        (tmp_path / f"{number}.safetensors").write_bytes(part("w", [2], start))
    with sw.open(tmp_path) as checkpoint, pytest.raises(sw.StepwellError, match="w"):
        checkpoint.restore()


def test_verify_reports_a_damaged_file_as_it_does_a_directory(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"x" * 4)
    for path in (file, tmp_path):
        (damage,) = sw.verify(path).damages
        assert damage.file == str(file)
    with pytest.raises(sw.StepwellError):
        sw.verify(tmp_path / "none.safetensors")


def test_a_pipe_is_called_by_its_kind(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(sw.StepwellError, match="it is a pipe, a socket or a device"):
        sw.open(tmp_path / "pipe")
