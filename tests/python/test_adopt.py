"""``sw.adopt``: checksums for checkpoints of other libraries."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import stepwell as sw
from command_line import run
from conftest import same
from longer import LONG
from safetensors.numpy import load_file, save_file

BLOCK = 64 << 10


def tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((64, 1024), np.float32) for name in ("a", "b", "c")}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory as of ``save_pretrained``, with a link as of a hub's cache."""
    place = tmp_path / "model"
    place.mkdir()
    save_file({"a": tensors()["a"]}, place / "model-00001-of-00002.safetensors")
    (tmp_path / "blobs").mkdir()
    save_file({"b": tensors()["b"], "c": tensors()["c"]}, tmp_path / "blobs" / "0123")
    (place / "model-00002-of-00002.safetensors").symlink_to("../blobs/0123")
    shards = {"a": 1, "b": 2, "c": 2}
    weights = {name: f"model-0000{shard}-of-00002.safetensors" for name, shard in shards.items()}
    (place / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weights}))
    (place / "config.json").write_text('{"model_type": "llama"}')
    (place / "empty.txt").touch()
    return place


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


def everything(path: Path) -> dict[str, tuple[bytes, int]]:
    """Content and time of all files but the checksums."""
    files = [one for one in path.rglob("*") if one.is_file() and "stepwell" not in one.name]
    return {str(one): (one.read_bytes(), one.stat().st_mtime_ns) for one in files}


def test_a_link_to_an_adopted_file_is_checked(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.safetensors"
    save_file(tensors(), file)
    (tmp_path / "link.safetensors").symlink_to(file)
    (model / "own.safetensors").symlink_to(file)
    sw.adopt(file)
    assert sw.adopt(tmp_path / "link.safetensors", check=True)
    flip(file, file.stat().st_size - 5)
    shard = model / "model-00002-of-00002.safetensors"
    sw.adopt(model, replace=True)
    flip(tmp_path / "blobs" / "0123", shard.stat().st_size - 5)
    for path in (tmp_path / "link.safetensors", shard):
        with pytest.raises(sw.CorruptCheckpoint):
            sw.restore(path)


def test_an_adopted_checkpoint_is_as_before(model: Path) -> None:
    before = everything(model.parent)
    report = sw.adopt(model)
    assert report.ok
    assert (report.path, report.checksums) == (str(model), str(model / ".stepwell-checksums"))
    assert report.files == 5
    assert report.nbytes == sum(one.stat().st_size for one in model.iterdir()) - os.path.getsize(
        report.checksums
    )
    assert everything(model.parent) == before
    assert sw.verify(model).unguarded_nbytes == 0
    assert sw.verify(model).files == 5
    assert sw.adopt(model, check=True).ok
    state = sw.restore(model)
    for name, value in tensors().items():
        assert (state[name] == value).all()


@pytest.mark.parametrize("file", ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"])
def test_every_flipped_byte_is_found(model: Path, file: str) -> None:
    sw.adopt(model)
    path = (model / file).resolve()
    size = path.stat().st_size
    for at in (0, 9, 100, BLOCK - 1, BLOCK, size // 2, size - 1):
        flip(path, at)
        with pytest.raises(sw.CorruptCheckpoint) as failure:
            sw.restore(model)
        assert failure.value.file == str(path)
        assert failure.value.block == at // BLOCK
        for damage in (sw.adopt(model, check=True).damages, sw.verify(model).damages):
            assert [(one.file, one.block) for one in damage] == [(str(path), at // BLOCK)]
        assert not sw.adopt(model, check=True).ok
        flip(path, at)
    assert sw.restore(model).keys() == {"a", "b", "c"}


def test_a_part_is_restored_beside_damage(model: Path) -> None:
    sw.adopt(model)
    shard = model.parent / "blobs" / "0123"
    with sw.open(model) as checkpoint:
        place = next(node.chunks[0] for node in checkpoint.contents() if node.path == "b")
    flip(shard, place.offset + 40 * 4096)
    with sw.open(model) as checkpoint:
        assert (checkpoint["c"][:] == tensors()["c"]).all()
        assert (checkpoint["b"][:20] == tensors()["b"][:20]).all()
        with pytest.raises(sw.CorruptCheckpoint) as failure:
            checkpoint["b"][:]
        assert failure.value.leaf == "b"
    damage = sw.verify(model).damages
    assert [one.leaves for one in damage] == [("b",)]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        (lambda model: (model / "config.json").write_text("{}"), "config.json"),
        (lambda model: (model / "config.json").unlink(), "config.json"),
        (lambda model: (model / "config.json").write_text('{"model_type": "gpt-2"}'), "config.json"),
        (lambda model: os.truncate(model.parent / "blobs/0123", 1000), "0123"),
        (
            lambda model: (model / "model.safetensors.index.json").write_text('{"weight_map": {}}'),
            "index.json",
        ),
    ],
)
def test_a_check_names_what_has_changed(model: Path, change: Callable[[Path], object], expected: str) -> None:
    sw.adopt(model)
    change(model)
    report = sw.adopt(model, check=True)
    assert [Path(one.file).name for one in report.damages] == [
        name for name in ("config.json", "0123", "model.safetensors.index.json") if name.endswith(expected)
    ]
    assert not sw.verify(model).ok
    shown = run("adopt", model, "--check")
    assert shown.exit_code == 1
    assert expected in shown.stdout


def test_a_check_names_what_was_added(model: Path) -> None:
    sw.adopt(model)
    (model / "tokenizer.json").write_text("{}")
    report = sw.adopt(model, check=True)
    assert report.added == ("tokenizer.json",)
    assert not report
    assert run("adopt", model, "--check").exit_code == 1
    assert sw.adopt(model).files == 6  # what is new is added
    assert sw.adopt(model, check=True)


def test_adopting_again_does_not_hide_damage(model: Path) -> None:
    sw.adopt(model)
    flip(model / "config.json", 3)
    kept = (model / ".stepwell-checksums").read_bytes()
    with pytest.raises(sw.CorruptCheckpoint, match=r"config\.json: it has changed since it was adopted"):
        sw.adopt(model)
    assert (model / ".stepwell-checksums").read_bytes() == kept
    save_file({"a": np.zeros(3)}, model / "model-00001-of-00002.safetensors")
    with pytest.raises(sw.CorruptCheckpoint, match="adopt it again"):
        sw.restore(model)
    assert sw.adopt(model, replace=True).ok
    assert (sw.restore(model)["a"] == 0).all()


def test_a_deleted_file_is_called_missing(model: Path) -> None:
    sw.adopt(model)
    (model / "config.json").unlink()
    with pytest.raises(sw.CorruptCheckpoint, match=r"config\.json: it is missing, and had checksums"):
        sw.adopt(model)
    (model / "empty.txt").unlink()
    with pytest.raises(sw.CorruptCheckpoint, match="it is missing, as 1 other files"):
        sw.adopt(model)
    assert sw.adopt(model, replace=True).files == 3


def test_checksums_are_replaced_while_a_handle_is_open(model: Path) -> None:
    sw.adopt(model)
    with sw.open(model) as old:
        save_file({"a": np.zeros(3)}, model / "model-00001-of-00002.safetensors")
        assert sw.adopt(model, replace=True).ok
        assert (sw.restore(model)["a"] == 0).all()
        with pytest.raises(sw.CorruptCheckpoint):
            old["a"][:]


def test_linked_directories_are_adopted_with_their_files(tmp_path: Path) -> None:
    sw.save(tmp_path / "source", tensors())
    sw.convert(tmp_path / "source", tmp_path / "elsewhere", to="orbax")
    step = tmp_path / "step"
    step.mkdir()
    (step / "_CHECKPOINT_METADATA").write_text("{}")
    (step / "default").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "log.txt").write_text("not a part of the checkpoint")
    (step / "logs").symlink_to(tmp_path / "logs")
    report = sw.adopt(step)
    assert report.files == 1 + sum(one.is_file() for one in (tmp_path / "elsewhere").rglob("*"))
    assert sw.adopt(step, check=True).ok
    assert sw.verify(step).unguarded_nbytes == 0
    data = max((tmp_path / "elsewhere").rglob("*"), key=lambda one: one.stat().st_size)
    flip(data, 5)
    with pytest.raises(sw.CorruptCheckpoint) as failure:
        sw.restore(step)
    assert failure.value.file == str(data)
    assert [one.file for one in sw.adopt(step, check=True).damages] == [str(data)]


@pytest.mark.parametrize("text", [b"none", b'{"stepwell_checksums": 1}\n00000000\n'])
def test_damaged_checksums_of_others_are_passed_over(
    model: Path, caplog: pytest.LogCaptureFixture, text: bytes
) -> None:
    (model.parent / ".stepwell-checksums").write_bytes(text)
    with caplog.at_level("WARNING", "stepwell"):
        assert sw.restore(model).keys() == {"a", "b", "c"}
    assert "ignoring checksums above the checkpoint" in caplog.text
    assert str(model.parent / ".stepwell-checksums") in caplog.text


@pytest.mark.parametrize("path", [".", "model-00001-of-00002.safetensors"])
def test_damaged_checksums_of_a_part_are_an_error(model: Path, path: str) -> None:
    sw.adopt(model)
    flip(model / ".stepwell-checksums", 3)
    with pytest.raises(sw.CorruptCheckpoint, match="these checksums are damaged"):
        sw.restore(model / path)


def test_files_and_directories_above_a_path_check_it(model: Path) -> None:
    sw.adopt(model)
    shard = model / "model-00001-of-00002.safetensors"
    flip(shard, 300)
    with pytest.raises(sw.CorruptCheckpoint, match="block 0"):
        sw.restore(shard)


def test_a_single_file_has_its_checksums_beside_it(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    save_file(tensors(), file)
    report = sw.adopt(file)
    assert report.checksums == str(tmp_path / ".model.safetensors.stepwell-checksums")
    assert sw.verify(file).unguarded_nbytes == 0
    flip(file, 3 * BLOCK)
    with pytest.raises(sw.CorruptCheckpoint):
        sw.restore(file)
    assert sorted(load_file(file)) == ["a", "b", "c"]  # its own library does not notice


def test_compressed_members_are_checked(tmp_path: Path) -> None:
    file = tmp_path / "x.npz"
    np.savez_compressed(file, x=np.random.default_rng(0).integers(0, 1000, 200_000))
    sw.adopt(file)
    at = file.stat().st_size // 2
    flip(file, at)
    with pytest.raises(sw.CorruptCheckpoint, match=f"block {at // BLOCK}: the checksum of the block"):
        sw.restore(file)


def test_a_damaged_archive_is_not_adopted(tmp_path: Path) -> None:
    np.savez(tmp_path / "x.npz", x=np.arange(100_000))
    flip(tmp_path / "x.npz", 200_000)
    with pytest.raises(sw.CorruptCheckpoint, match="CRC-32"):
        sw.adopt(tmp_path / "x.npz")
    assert [one.name for one in tmp_path.iterdir()] == ["x.npz"]


def test_a_step_of_a_root_is_adopted_with_all_its_parts(tmp_path: Path) -> None:
    for step in (1, 2):
        place = tmp_path / f"checkpoint-{step}"
        place.mkdir()
        save_file({"w": np.full(3, step)}, place / "model.safetensors")
        (place / "trainer_state.json").write_text('{"global_step": 1}')
    save_file({"w": np.ones(3)}, tmp_path / "model.safetensors")
    assert sw.adopt(tmp_path, 1).path == str(tmp_path / "checkpoint-1")
    assert sw.adopt(tmp_path).files == 1  # the model alone
    flip(tmp_path / "checkpoint-1/trainer_state.json", 16)
    with pytest.raises(sw.CorruptCheckpoint, match="trainer_state"):
        sw.restore(tmp_path, 1)
    assert [one.file for one in sw.adopt(tmp_path, 1, check=True).damages]
    assert sw.restore(tmp_path, 2)["model"]["w"][0] == 2
    steps = sw.open_root(tmp_path).steps
    assert [(step.name, step.has_checksums) for step in steps] == [
        ("checkpoint-1", True),
        ("checkpoint-2", False),
    ]
    assert run("ls", tmp_path).stdout.count("adopted") == 1


def test_a_name_that_is_no_text_is_refused(model: Path) -> None:
    with open(os.fsencode(model) + b"/\xff", "wb"):
        pass
    with pytest.raises(sw.MisuseError, match="is not UTF-8"):
        sw.adopt(model)


def test_what_cannot_be_adopted_is_an_error(tmp_path: Path, model: Path) -> None:
    sw.save(tmp_path / "own", {"w": np.ones(3)})
    with pytest.raises(sw.MisuseError, match="is of stepwell, and has checksums"):
        sw.adopt(tmp_path / "own")
    (tmp_path / "empty").mkdir()
    with pytest.raises(sw.StepNotFound, match="is no checkpoint of another library"):
        sw.adopt(tmp_path / "empty")
    with pytest.raises(sw.StepNotFound, match="has no checksums: adopt it first"):
        sw.adopt(model, check=True)
    (tmp_path / "model.safetensors").write_bytes(b"torn")
    with pytest.raises(sw.CorruptCheckpoint):
        sw.adopt(tmp_path / "model.safetensors")


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{}",
        b'{"stepwell_checksums": 2}',
        b'{"stepwell_checksums": 1, "block_bytes": 65536}',
        b'{"stepwell_checksums": 1, "block_bytes": 7, "files": [{"path": "config.json", "bytes": 9, "crc32c": ""}]}',
        b'{"stepwell_checksums": 1, "block_bytes": 65536, "files": [{"path": "../x", "bytes": 0, "crc32c": ""}]}',
        b'{"stepwell_checksums": 1, "block_bytes": 65536, "files": [{"path": "/etc/x", "bytes": 0, "crc32c": ""}]}',
        b'{"stepwell_checksums": 1, "block_bytes": 65536, "files": [{"path": "x", "bytes": -1, "crc32c": ""}]}',
        b'{"stepwell_checksums": 1, "block_bytes": 65536, "files": [{"path": "x", "bytes": 9, "crc32c": "!"}]}',
        b'{"stepwell_checksums": 1, "block_bytes": 65536, "files": [{"path": "x", "bytes": 9, "crc32c": "AAAA"}]}',
        b'{"stepwell_checksums": 1, "block_bytes": 65536, "files": [{"path": "x", "bytes": 1e99, "crc32c": ""}]}',
        b'{"stepwell_checksums": 1, "block_bytes": "65536", "files": [{"path": "x", "bytes": 0, "crc32c": ""}]}',
        b'{"stepwell_checksums": 1, "block_bytes": [65536], "files": []}',
        b'{"stepwell_checksums": 1, "block_bytes": 1e99, "files": []}',
        b'{"stepwell_checksums": 1, "block_bytes": true, "files": []}',
        b"[" * 100_000,
    ],
)
def test_damaged_checksums_are_an_error(model: Path, text: bytes) -> None:
    from stepwell import _core

    sw.adopt(model)
    kept = model / ".stepwell-checksums"
    kept.write_bytes(text + b"\n%08x\n" % _core.crc32c(text))
    with pytest.raises(sw.CorruptCheckpoint, match="these checksums are damaged") as failure:
        sw.open(model)
    assert failure.value.file == str(kept)
    sw.adopt(model, replace=True)
    flip(kept, 200)
    with pytest.raises(sw.CorruptCheckpoint, match="they do not have their own checksum"):
        sw.open(model)
    kept.unlink()
    sw.open(model).close()


def test_files_that_change_meanwhile_are_not_adopted(model: Path) -> None:
    def change(done: int, whole: int) -> None:
        os.utime(model / "config.json", ns=(1, done + 1))

    with pytest.raises(sw.CorruptCheckpoint, match="changed"):
        sw.adopt(model, progress=change)
    assert not (model / ".stepwell-checksums").exists()


def test_an_adopted_model_is_exported_without_its_checksums(model: Path) -> None:
    sw.adopt(model)
    sw.export(model, model.parent / "out", files=model, cast="bfloat16")
    assert sorted(one.name for one in (model.parent / "out").iterdir()) == [
        "config.json",
        "model.safetensors",
    ]


def test_files_beside_an_adopted_model_are_checked(model: Path) -> None:
    sw.adopt(model)
    flip(model / "config.json", 3)
    with pytest.raises(sw.CorruptCheckpoint, match=r"config\.json"):
        sw.export(model, model.parent / "out", files=model)


KILLS = 100 if LONG else 10


def test_a_killed_adoption_leaves_nothing_half(model: Path) -> None:
    before = everything(model.parent)
    script = "import sys, stepwell as sw\nsw.open(sys.argv[1]).close()\nprint(flush=True)\nwhile True: sw.adopt(sys.argv[1], replace=True)"
    rng = random.Random(0)
    kept = 0
    for _ in range(KILLS):
        command = [sys.executable, "-c", script, str(model)]
        with subprocess.Popen(command, stdout=subprocess.PIPE) as child:
            assert child.stdout is not None
            child.stdout.readline()
            time.sleep(rng.random() * 0.4)
            child.send_signal(signal.SIGKILL)
        names = {one.name for one in model.iterdir() if "stepwell" in one.name}
        assert names <= {".stepwell-checksums", ".stepwell-checksums.new"}
        assert everything(model.parent) == before
        assert sw.restore(model).keys() == {"a", "b", "c"}
        if ".stepwell-checksums" in names:
            assert sw.adopt(model, check=True).ok
            kept += 1
            if rng.random() < 0.5:
                (model / ".stepwell-checksums").unlink()
        assert sw.adopt(model).ok
        assert {one.name for one in model.iterdir() if "stepwell" in one.name} == {".stepwell-checksums"}
        (model / ".stepwell-checksums").unlink()
    assert kept


def test_other_checkpoints_below_are_left_out(model: Path) -> None:
    other = model / "runs" / "other"
    other.mkdir(parents=True)
    save_file(tensors(), other / "model.safetensors")
    (model / "runs" / "notes.txt").write_text("x")
    report = sw.adopt(model)
    assert report.left_out == (str(other),)
    assert report.files == 6
    assert run("adopt", model).stdout.count(f"{other}: another checkpoint, left out") == 1
    assert sw.adopt(model, check=True)
    flip(other / "model.safetensors", 500)
    assert sw.verify(model)
    assert sw.adopt(other).ok  # it has checksums of its own


def test_a_step_of_a_root_has_checkpoints_below_it(tmp_path: Path) -> None:
    step = tmp_path / "checkpoint-1"
    (step / "ema").mkdir(parents=True)
    for place in (step, step / "ema"):
        save_file({"w": np.ones(3)}, place / "model.safetensors")
    (step / "trainer_state.json").write_text('{"global_step": 1}')
    assert sw.adopt(step).files == 3


@pytest.mark.parametrize("path", ["", "checkpoint-1"])
def test_verify_lists_all_damage_of_an_adopted_step(tmp_path: Path, path: str) -> None:
    step = tmp_path / "checkpoint-1"
    step.mkdir()
    save_file({"w": np.ones(3)}, step / "model.safetensors")
    (step / "trainer_state.json").write_text('{"global_step": 1}')
    (step / "notes.txt").write_text("text")
    sw.adopt(step)
    for name in ("model.safetensors", "trainer_state.json", "notes.txt"):
        flip(step / name, -2)
    found = sorted(Path(one.file).name for one in sw.verify(tmp_path / path).damages)
    assert found == ["model.safetensors", "notes.txt", "trainer_state.json"]


def test_a_file_that_was_just_changed_is_not_adopted(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def change(seconds: float) -> None:
        (model / "config.json").write_text("{}")  # the writer goes on, within one tick
        os.utime(model / "config.json", ns=(1, time.time_ns() + 1000))

    (model / "config.json").write_text("[]")
    # However slow the machine is, the file has changed within this tick.
    monkeypatch.setattr("stepwell.formats.adoption._TICK_NS", 60 * 10**9)
    monkeypatch.setattr("stepwell.formats.adoption.time.sleep", change)
    with pytest.raises(sw.CorruptCheckpoint, match="it has changed while it was read"):
        sw.adopt(model)
    assert not (model / ".stepwell-checksums").exists()


FOREIGN = Path(__file__).parents[1] / "foreign"


@pytest.mark.parametrize(
    "name",
    [
        "megatron_0.12.3/zarr",
        "megatron_0.19.2/dense",
        "deepspeed_0.10.3/zero_2_bf16",
        "deepspeed_0.16.9/zero_3_bf16",
        "orbax_0.4.8/aggregate",
        "orbax_0.5.23/zarr3",
        "orbax_0.11.40/zarr2_ocdbt",
    ],
)
def test_checkpoints_of_trainers_are_adopted_as_steps(tmp_path: Path, name: str) -> None:
    """Those that the libraries have written."""
    path = shutil.copytree(FOREIGN / name, tmp_path / "old")
    before, saved = everything(path), sw.restore(path)
    with sw.CheckpointManager(tmp_path / "run") as mgr:
        mgr.adopt(path, 7)
        assert same(mgr.restore(7), saved)
        assert everything(path) == before
        report = sw.verify(path)
        assert report.ok
        assert report.unguarded_nbytes == 0
        largest = max(map(Path, before), key=lambda one: one.stat().st_size)
        flip(largest, largest.stat().st_size // 2)
        assert not sw.adopt(path, check=True).ok
        with pytest.raises(sw.CorruptCheckpoint, match=re.escape(largest.name)):
            mgr.restore(7)
