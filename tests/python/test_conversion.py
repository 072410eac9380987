"""Conversions into files of other libraries: read by these libraries, bit for bit, or refused
before anything is written."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import stepwell as sw
from command_line import document, documented, flip_a_bit, keys, run
from conftest import partials
from longer import LONG
from memory import grown
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from stepwell._conversion import files

RNG = np.random.default_rng(0)
W = RNG.standard_normal((300, 400)).astype(np.float32)
PARAMS: dict[str, Any] = {
    "w": W,
    "layers": [{"b": RNG.standard_normal(33)}, {"b": np.arange(9, dtype=np.int8)}],
    "half": RNG.standard_normal((3, 5, 7)).astype(ml_dtypes.bfloat16),
    "mask": np.array([True, False]),
    "complex": np.array([1 + 2j], np.complex64),
    "empty": np.zeros((0, 3)),
    "scalar": np.array(5, np.uint64),
}
STATE = {"params": PARAMS, "optimizer": {"m": W * 2}, "step": 3}
NAMES = {"w", "layers.0.b", "layers.1.b", "half", "mask", "complex", "empty", "scalar"}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    sw.save(tmp_path / "saved", STATE, custom_metadata={"base": "tiny", "tokens": 5})
    return tmp_path / "saved"


def same(found: Any, wanted: Any) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    assert found.tobytes() == wanted.tobytes()


def check(found: dict[str, np.ndarray]) -> None:
    assert found.keys() == NAMES
    for name in NAMES - {"layers.0.b", "layers.1.b"}:
        same(found[name], PARAMS[name])
    for number in range(2):
        same(found[f"layers.{number}.b"], PARAMS["layers"][number]["b"])


@pytest.mark.parametrize("name", ["out", "out.safetensors"])
def test_safetensors_reads_the_output_bit_for_bit(saved: Path, name: str, small_windows: None) -> None:
    made = sw.convert(saved, saved.parent / name, to="safetensors", subtree="params", verify=True)
    file = saved.parent / name
    file = file / "model.safetensors" if file.is_dir() else file
    check(load_file(file))
    with safe_open(file, "numpy") as opened:
        assert opened.metadata() == {"format": "pt", "base": "tiny"}
    header = int.from_bytes(file.read_bytes()[:8], "little")
    assert (8 + header) % 4096 == 0, "data begins at a whole page"
    assert made.files == {file.name: file.stat().st_size}
    assert made.verified
    assert partials(saved.parent) == []


def test_what_stepwell_wrote_is_read_back_by_stepwell(saved: Path) -> None:
    sw.export(saved, saved.parent / "out", subtree="params")
    check(sw.restore(saved.parent / "out"))
    again = sw.convert(saved.parent / "out", saved.parent / "again", to="safetensors")
    check(load_file(saved.parent / "again" / "model.safetensors"))
    assert again.tied == {}
    eight = RNG.standard_normal(11).astype(ml_dtypes.float8_e4m3fn)  # numpy cannot name it
    sw.save(saved.parent / "eight", {"eight": eight})
    sw.export(saved.parent / "eight", saved.parent / "eight.safetensors")
    same(sw.restore(saved.parent / "eight.safetensors")["eight"], eight)


def test_shards_have_an_index_that_names_every_tensor(saved: Path, small_windows: None) -> None:
    made = sw.convert(saved, saved.parent / "out", to="safetensors", objects="skip", shard_size="500KB")
    index = json.loads((saved.parent / "out" / "model.safetensors.index.json").read_text())
    shards = sorted(set(index["weight_map"].values()))
    assert shards == [f"model-0000{n}-of-0000{len(shards)}.safetensors" for n in range(1, len(shards) + 1)]
    assert len(shards) == 2
    found: dict[str, np.ndarray] = {}
    for name in shards:
        tensors = load_file(saved.parent / "out" / name)
        assert all(index["weight_map"][one] == name for one in tensors)
        found |= tensors
    assert index["metadata"]["total_size"] == sum(one.nbytes for one in found.values())
    same(found["optimizer.m"], W * 2)
    assert made.skipped == ("step",)
    assert sw.verify(saved.parent / "out")
    for name, tensor in sw.restore(saved.parent / "out").items():
        same(tensor, found[name])


def test_a_step_of_a_root_and_an_open_checkpoint_convert(tmp_path: Path) -> None:
    with sw.CheckpointManager(tmp_path / "run") as manager:
        for step in range(3):
            manager.save(step, {"w": np.full(4, step, np.float32)})
    for step in (None, 1):
        out = tmp_path / f"{step}.safetensors"
        sw.export(tmp_path / "run", out, step=step)
        assert load_file(out)["w"][0] == (2 if step is None else step)
    with sw.open(tmp_path / "run", 0) as checkpoint:
        sw.export(checkpoint, tmp_path / "open.safetensors")
        assert checkpoint["w"][0] == 0, "it stays open"
    assert load_file(tmp_path / "open.safetensors")["w"][0] == 0


def test_tied_tensors_are_written_once_under_the_first_path(tmp_path: Path) -> None:
    sw.save(tmp_path / "tied", {"z": W, "head": W, "other": W + 1})
    made = sw.convert(tmp_path / "tied", tmp_path / "out.safetensors", to="safetensors", verify=True)
    assert made.tied == {"head": "z"}
    found = load_file(tmp_path / "out.safetensors")
    assert found.keys() == {"z", "other"}
    same(found["z"], W)


def test_floats_are_cast_and_nothing_else(saved: Path, small_windows: None) -> None:
    out = saved.parent / "out.safetensors"
    sw.convert(saved, out, to="safetensors", subtree="params", cast="float16", verify=True)
    found = load_file(out)
    same(found["w"], W.astype(np.float16))
    same(found["layers.0.b"], PARAMS["layers"][0]["b"].astype(np.float16))
    same(found["half"], PARAMS["half"].astype(np.float32).astype(np.float16))
    for name in ("scalar", "complex", "mask"):
        same(found[name], PARAMS[name])
    sw.convert(
        saved,
        saved.parent / "one.safetensors",
        to="safetensors",
        include="params/w",
        cast={"**/w": "float64"},
    )
    same(load_file(saved.parent / "one.safetensors")["params.w"], W.astype(np.float64))


def test_the_command_casts_by_glob_or_all(saved: Path) -> None:
    def dtypes(number: int, *casts: str) -> tuple[str, str]:
        out = saved.parent / f"{number}.safetensors"
        options = [text for one in casts for text in ("--cast", one)]
        document("convert", saved, out, "--to", "safetensors", "--subtree", "params", *options)
        found = load_file(out)
        return str(found["w"].dtype), str(found["layers.0.b"].dtype)

    before = str(W.dtype), str(PARAMS["layers"][0]["b"].dtype)
    assert dtypes(0, "float64") == ("float64", "float64")
    assert dtypes(1, "**/w=float16") == ("float16", before[1])
    assert dtypes(2, "**/w=float16", "**=float64") == ("float16", "float64"), "the first glob counts"
    out = saved.parent / "out.safetensors"
    for options, hint in [
        (("float16", "**=float64"), "pass --cast DTYPE once for all leaves, or --cast GLOB=DTYPE for each"),
        (("**/w=int8",), "--cast takes float16, bfloat16, float32, float64 or GLOB="),
        (("=float16",), "--cast takes GLOB=DTYPE, not '=float16'"),
    ]:
        given = [text for one in options for text in ("--cast", one)]
        done = run("convert", saved, out, "--to", "safetensors", "--subtree", "params", *given)
        assert done.exit_code == 2
        assert hint in done.stderr
    assert not out.exists()


def test_a_value_that_a_cast_cannot_hold_leaves_nothing(tmp_path: Path) -> None:
    sw.save(tmp_path / "saved", {"w": np.array([1.0, 1e30], np.float32)})
    with pytest.raises(sw.StepwellError, match=r"`w`: a value of it is too large for float16"):
        sw.convert(tmp_path / "saved", tmp_path / "out", to="safetensors", cast="float16")
    assert [one.name for one in tmp_path.iterdir()] == ["saved"]


def test_a_damaged_source_leaves_nothing(saved: Path) -> None:
    (data,) = (saved / "i0").glob("*.data") if (saved / "i0").exists() else saved.rglob("*.data")
    flip_a_bit(data)
    with pytest.raises(sw.CorruptCheckpoint):
        sw.convert(saved, saved.parent / "out", to="safetensors", objects="skip")
    assert [one.name for one in saved.parent.iterdir()] == ["saved"]


REFUSALS: list[tuple[dict[str, Any], str]] = [
    (
        {},
        'safetensors cannot hold leaf `step`: it holds dense tensors of ordinary dtypes only. Pass objects="skip"',
    ),
    ({"exclude": "**"}, "no leaf of"),
    ({"include": ["**", "nothing/**"]}, "include='nothing/**' matches no leaf"),
    ({"exclude": "nothing"}, "exclude='nothing' matches no leaf"),
    ({"cast": {"w": "float16"}}, "cast='w' matches no leaf"),
    ({"subtree": "params/w"}, "no container at 'params/w'"),
    ({"subtree": "parms"}, "no container at 'parms'"),
    ({"include": "params", "shard_size": "5 GG"}, "shard_size is a number of bytes"),
    ({"include": "params", "shard_size": 0}, "shard_size is a number of bytes"),
    ({"include": "params", "shard_size": 1 << 62}, "shard_size is a number of bytes"),
    ({"include": "params", "shard_size": "9" * 400 + "GB"}, "not str '999"),
    ({"include": "params", "cast": "int8"}, "cast= takes"),
    ({"include": "params", "objects": "drop"}, "objects is 'error' or 'skip'"),
    ({"include": "params", "to": "onnx"}, "to is 'safetensors' or"),
    ({"include": "params", "step": 4}, "leave the step out"),
]


@pytest.mark.parametrize(("given", "message"), REFUSALS, ids=lambda one: str(one)[:40])
def test_a_refused_conversion_writes_nothing(saved: Path, given: dict[str, Any], message: str) -> None:
    with pytest.raises(sw.StepwellError) as refused:
        sw.convert(saved, saved.parent / "out", **{"to": "safetensors", **given})
    assert message in str(refused.value)
    assert [one.name for one in saved.parent.iterdir()] == ["saved"]


def test_two_leaves_of_one_name_are_both_named(tmp_path: Path) -> None:
    sw.save(tmp_path / "saved", {"a.b": np.zeros(2), "a": {"b": np.ones(2)}})
    with pytest.raises(sw.MisuseError, match=r"leaf `a\.b` and leaf `a/b` have the same name"):
        sw.export(tmp_path / "saved", tmp_path / "out")
    sw.export(tmp_path / "saved", tmp_path / "out", exclude="a/b")


def test_a_dtype_that_the_format_lacks_names_its_leaf(tmp_path: Path) -> None:
    sw.save(tmp_path / "saved", {"a": np.zeros(2, np.complex128), "b": np.zeros(2)})
    with pytest.raises(
        sw.MisuseError, match=r"safetensors cannot hold the dtypes of leaf `a` \(complex128\)\."
    ):
        sw.export(tmp_path / "saved", tmp_path / "out")
    sw.export(tmp_path / "saved", tmp_path / "out", exclude="a")
    assert sw.restore(tmp_path / "out").keys() == {"b"}


@pytest.mark.parametrize("kind", ["file", "directory", "link"])
def test_an_existing_destination_is_refused(saved: Path, kind: str) -> None:
    out = saved.parent / "out"
    {"file": out.touch, "directory": out.mkdir, "link": lambda: out.symlink_to("nowhere")}[kind]()
    with pytest.raises(sw.MisuseError, match=r"exists already\. Pass a free path"):
        sw.export(saved, out, subtree="params")
    assert sorted(one.name for one in saved.parent.iterdir()) == ["out", "saved"]


@pytest.mark.parametrize("kind", ["file", "directory"])
def test_a_strangers_file_with_a_temporary_name_stays(saved: Path, kind: str) -> None:
    stranger = saved.parent / "out.partial"
    stranger.mkdir() if kind == "directory" else stranger.write_text("mine")
    with pytest.raises(sw.MisuseError, match="is in the way"):
        sw.export(saved, saved.parent / "out", subtree="params")
    assert stranger.exists()
    assert partials(saved.parent) == ["out.partial"]
    journal = saved.parent / "own.partial.journal"
    journal.write_text("my own text")
    with pytest.raises(sw.MisuseError, match="is in the way"):
        sw.export(saved, saved.parent / "own", subtree="params")
    assert journal.read_text() == "my own text"


def test_a_dry_run_lists_files_and_writes_nothing(saved: Path) -> None:
    planned = sw.convert(saved, saved.parent / "out", to="safetensors", objects="skip", dry_run=True)
    assert [one.name for one in saved.parent.iterdir()] == ["saved"]
    made = sw.convert(saved, saved.parent / "out", to="safetensors", objects="skip")
    assert planned.files == made.files
    assert (
        planned.nbytes == made.nbytes == sum(one.stat().st_size for one in (saved.parent / "out").iterdir())
    )


def test_verify_finds_a_bit_that_the_disk_has_flipped(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    verify = files._verify

    def damaged(*arguments: Any) -> None:
        flip_a_bit(saved.parent / "out.partial" / "model.safetensors")
        verify(*arguments)

    monkeypatch.setattr(files, "_verify", damaged)
    with pytest.raises(sw.CorruptCheckpoint, match=r"of .*partial differ from the source"):
        sw.convert(saved, saved.parent / "out", to="safetensors", objects="skip", verify=True)
    assert [one.name for one in saved.parent.iterdir()] == ["saved"]


def test_memory_is_the_budget_and_no_more(tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    sw.save(tmp_path / "saved", {f"w{n}": rng.random((16 << 20) // 8) for n in range(24)})
    script = (
        "import sys, stepwell as sw\n"
        "from stepwell._conversion import files\n"
        "files._BUDGET_BYTES = 128 << 20\n"
        "given = {'to': sys.argv[3], 'cast': sys.argv[4] or None}\n"
        "print(growth(lambda: sw.convert(sys.argv[1], sys.argv[2], **given)))\n"
    )
    for number, (to, cast) in enumerate([("npz", ""), ("safetensors", "float32"), ("stepwell", "")]):
        growth = grown(script, tmp_path / "saved", tmp_path / str(number), to, cast)
        assert growth < (128 + 64) << 20


def test_files_that_are_passed_along_are_in_the_budget(tmp_path: Path) -> None:
    sw.save(tmp_path / "saved", {f"w{n}": np.zeros(16 << 20, np.uint8) for n in range(20)})
    (tmp_path / "vocab.txt").write_bytes(RNG.bytes(60 << 20))
    script = (
        "import sys, stepwell as sw\n"
        "given = {'to': 'safetensors', 'files': sys.argv[3]}\n"
        "print(growth(lambda: sw.convert(sys.argv[1], sys.argv[2], **given)))\n"
    )
    growth = grown(script, tmp_path / "saved", tmp_path / "out", tmp_path / "vocab.txt")
    assert growth < files._BUDGET_BYTES + (64 << 20)
    with (tmp_path / "more.txt").open("wb") as more:
        more.truncate(5 << 20)
    both = [tmp_path / "vocab.txt", tmp_path / "more.txt"]
    with pytest.raises(sw.MisuseError, match="files= has more than 64 MiB"):
        sw.convert(tmp_path / "saved", tmp_path / "other", to="safetensors", files=both)


@pytest.mark.skipif(not LONG, reason="writes 25 GB: STEPWELL_LONG=1 runs it")
def test_memory_is_the_same_for_100_gb(tmp_path: Path) -> None:
    """The source is a file with holes, which reads as zeros."""
    nbytes = 1 << 30
    tensors = {
        f"layers.{n}": {
            "dtype": "F64",
            "shape": [nbytes // 8],
            "data_offsets": [n * nbytes, (n + 1) * nbytes],
        }
        for n in range(94)
    }
    header = json.dumps(tensors).encode()
    with open(tmp_path / "model.safetensors", "wb") as file:
        file.write(len(header).to_bytes(8, "little") + header)
        file.truncate(8 + len(header) + len(tensors) * nbytes)
    script = (
        "import sys, stepwell as sw\n"
        "given = {'to': 'safetensors', 'cast': 'bfloat16'}\n"
        "print(growth(lambda: sw.convert(sys.argv[1], sys.argv[2], **given)))\n"
    )
    growth = grown(script, tmp_path / "model.safetensors", tmp_path / "out", timeout=900)
    assert growth < files._BUDGET_BYTES + (64 << 20)


@pytest.mark.parametrize("long", [False, True])
def test_numpy_reads_the_output_bit_for_bit(
    saved: Path, small_windows: None, monkeypatch: pytest.MonkeyPatch, long: bool
) -> None:
    if long:  # as in an archive of many gigabytes
        monkeypatch.setattr("stepwell.formats.writers.archive._LONG", 100)
        monkeypatch.setattr("stepwell.formats.writers.archive._MANY", 2)
    out = saved.parent / "out.npz"
    sw.convert(saved, out, to="npz", subtree="params", exclude="params/half")
    with np.load(out) as found:
        assert set(found) == NAMES - {"half"}
        for name in NAMES - {"half", "layers.0.b", "layers.1.b"}:
            same(found[name], PARAMS[name])
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None, "every checksum holds"
    with pytest.raises(sw.MisuseError, match=r"leaf `params/half` \(bfloat16\)"):
        sw.convert(saved, saved.parent / "other.npz", to="npz", subtree="params")
    cast = {"params/half": "float32"}
    sw.convert(saved, saved.parent / "other.npz", to="npz", subtree="params", cast=cast)
    with np.load(saved.parent / "other.npz") as found:
        same(found["half"], PARAMS["half"].astype(np.float32))


def test_a_name_that_no_archive_holds_is_refused(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"n" * 40_000: {"m" * 40_000: np.ones(2)}})
    with pytest.raises(sw.MisuseError, match=r"leaf `n+\.\.\.`: its name in the archive has 80005 bytes"):
        sw.convert(tmp_path / "c", tmp_path / "out.npz", to="npz")
    assert not list(tmp_path.glob("out*"))


def test_safetensors_files_become_a_checkpoint_of_ours(saved: Path) -> None:
    sw.export(saved, saved.parent / "out.safetensors", subtree="params")
    back = saved.parent / "back"
    made = sw.convert(saved.parent / "out.safetensors", back, to="stepwell", verify=True)
    check(sw.restore(back))
    report = sw.verify(back)
    assert report
    assert report.unguarded_nbytes == 0
    assert sw.metadata(back).custom_metadata == {"format": "pt", "base": "tiny"}
    assert made.verified
    assert made.files == {str(one.relative_to(back)): one.stat().st_size for one in back.rglob("*.data")}


def test_a_part_of_a_checkpoint_becomes_another(tmp_path: Path) -> None:
    layers: list[dict[str, Any]] = [{"w": W + n, "n": np.int32(n)} for n in range(3)]
    layers[0]["tied"] = layers[0]["w"]
    state = {"a": {"layers": layers, "lr": 0.5, "tags": {"x"}}, "b": np.zeros(3)}
    sw.save(tmp_path / "saved", state, metrics={"loss": 0.25})
    source, out = tmp_path / "saved", tmp_path / "out"
    given: dict[str, Any] = {"subtree": "a", "exclude": "a/layers[1]", "cast": {"**/layers[2]/w": "float16"}}
    planned = sw.convert(source, out, to="stepwell", dry_run=True, **given)
    assert planned.nbytes == W.nbytes + W.nbytes // 2
    made = sw.convert(source, out, to="stepwell", verify=True, **given)
    found = sw.restore(out)
    assert found.keys() == {"layers", "lr", "tags"}
    assert found["layers"].keys() == {0, 2}, "a list with a gap is a dict"
    same(found["layers"][0]["w"], W)
    same(found["layers"][2]["w"], (W + 2).astype(np.float16))
    assert (found["lr"], found["tags"], found["layers"][2]["n"]) == (0.5, {"x"}, 2)
    assert made.tied == {"layers[0]/tied": "layers[0]/w"}
    assert sw.metadata(out).metrics == {"loss": 0.25}


def test_a_save_from_a_damaged_checkpoint_leaves_nothing(saved: Path) -> None:
    for data in saved.rglob("*.data"):
        flip_a_bit(data)
    with pytest.raises(sw.StepwellError, match="is corrupt"):
        sw.convert(saved, saved.parent / "out", to="stepwell")
    assert [one.name for one in saved.parent.iterdir()] == ["saved"]


def test_the_command_writes_and_reports_as_documented(saved: Path) -> None:
    out = saved.parent / "out"
    common = ("convert", saved, out, "--to", "safetensors", "--objects", "skip")
    planned = document(*common, "--dry-run")
    assert planned["dry_run"]
    assert not out.exists()
    made = document(*common, "--verify")
    assert keys(made) == documented("convert")
    assert made["files"] == planned["files"]
    assert made["verified"]
    refused = run(*common)
    assert refused.exit_code == 2
    assert "exists already" in refused.stderr
    one = run(
        "convert", saved, saved.parent / "w.safetensors", "--to", "safetensors", "--include", "params/w"
    )
    assert one.exit_code == 0
    same(load_file(saved.parent / "w.safetensors")["params.w"], W)


@pytest.mark.parametrize("to", ["stepwell", "torch"])
def test_none_and_empty_values_are_converted(tmp_path: Path, to: Any) -> None:
    state = {"w": np.ones(3), "none": None, "list": [None, np.ones(2), 3], "empty": (), "zero": 0}
    sw.save(tmp_path / "c", state)
    made = sw.convert(tmp_path / "c", tmp_path / "made", to=to, verify=True)
    assert made.skipped == ()
    found = sw.restore(made.path)
    assert list(found) == list(state)
    assert found["list"][0] is None
    assert found["list"][2] == 3
    assert (found["none"], found["empty"], found["zero"]) == (None, (), 0)


def test_a_state_without_names_is_not_written_for_megatron(tmp_path: Path) -> None:
    sw.save(tmp_path / "list", [np.ones(3), {"lr": 0.1}])
    sw.save(tmp_path / "leaf", np.ones(3))
    for name, what in (("list", "a list"), ("leaf", "a single leaf")):
        with pytest.raises(sw.MisuseError, match=f"this state is {what}. Name its leaves with map="):
            sw.convert(tmp_path / name, tmp_path / "made", to="megatron")
    named = [{"rename": "[0]", "to": "w"}, {"rename": "[1]", "to": "args"}]
    made = sw.export(tmp_path / "list", tmp_path / "made", to="megatron", map=named)
    assert sw.restore(made.path, exclude="w")["args"] == {"lr": 0.1}


@pytest.mark.parametrize("cast", ["None", "'bfloat16'"])
def test_each_byte_of_a_source_is_read_once(tmp_path: Path, cast: str) -> None:
    # The chunks of "wide" have a part of each of its rows, and some are in two windows of the file.
    arrays = {"wide": np.ones((1280, 27648), np.float32), "small": np.ones((1000, 999), np.float32)}
    save_file(arrays, tmp_path / "m.safetensors")
    script = (
        "import os, sys, stepwell as sw\n"
        "read = lambda: int(open('/proc/self/io').read().split('read_bytes: ')[1].split()[0])\n"
        "convert, file = sw.convert, os.open(sys.argv[1], os.O_RDONLY)\n"
        "os.fsync(file)\n"
        "os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)\n"
        "before = read()\n"
        f"convert(sys.argv[1], sys.argv[2], to='stepwell', cast={cast})\n"
        "print(read() - before)\n"
    )
    command = [sys.executable, "-c", script, tmp_path / "m.safetensors", tmp_path / "out"]
    told = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    nbytes = sum(array.nbytes for array in arrays.values())
    assert nbytes <= int(told.stdout) <= 1.05 * nbytes + (4 << 20)


def test_chunks_of_a_large_matrix_are_read_in_pieces(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    shapes = {"matrix": (2100, 2048), "stack": (5, 700, 1501), "vector": (3_000_001,)}
    sw.save(tmp_path / "c", {name: rng.standard_normal(shape) for name, shape in shapes.items()})
    sw.convert(tmp_path / "c", tmp_path / "m.safetensors", to="safetensors")
    for number, cast in enumerate([None, "float32"]):
        made = tmp_path / f"made-{number}"
        assert sw.convert(tmp_path / "m.safetensors", made, to="stepwell", cast=cast, verify=True).verified
        assert sw.verify(made).ok


@pytest.mark.parametrize("to", ["safetensors", "npz", "dcp"])
def test_a_state_that_is_one_array_has_the_empty_name(tmp_path: Path, to: Any) -> None:
    np.save(tmp_path / "w.npy", W)
    for verify in (False, True):
        made = sw.convert(tmp_path / "w.npy", tmp_path / f"made-{verify}", to=to, verify=verify)
        found = sw.restore(made.path)
        assert list(found) == [""]
        same(found[""], W)
    assert partials(tmp_path) == []


@pytest.mark.parametrize(
    ("name", "to", "hint"),
    [
        ("w.safetensors", "torch", 'pass to="safetensors"'),
        ("w.safetensors", "stepwell", 'pass to="safetensors"'),
        ("w.pt", "safetensors", 'pass to="torch"'),
        ("w.bin", "dcp", 'pass to="torch"'),
        ("w.pth", "npz", 'pass to="torch"'),
        ("w.npz", "torch", 'pass to="npz"'),
        ("w.npy", "npz", "Change the name"),
        ("w.msgpack", "torch", "Change the name"),
    ],
)
def test_a_name_of_another_format_is_refused(saved: Path, name: str, to: Any, hint: str) -> None:
    before = sorted(saved.parent.iterdir())
    with pytest.raises(sw.MisuseError, match=hint):
        sw.convert(saved, saved.parent / name, to=to, objects="skip")
    if to != "stepwell":
        with pytest.raises(sw.MisuseError, match=hint):
            sw.Export(f"{{step}}-{name}", to=to)
    assert "Change the name" in run("convert", saved, saved.parent / name, "--to", to).stderr
    assert sorted(saved.parent.iterdir()) == before


@pytest.mark.parametrize("to", ["safetensors", "torch", "npz", "dcp"])
def test_dtypes_that_a_format_lacks_are_listed_together(tmp_path: Path, to: Any) -> None:
    sw.save(tmp_path / "c", {name: np.ones(2, ml_dtypes.float8_e4m3b11fnuz) for name in "ab"})
    listed = r"leaf `a` \(float8_e4m3b11fnuz\), leaf `b` \(float8_e4m3b11fnuz\)"
    with pytest.raises(sw.MisuseError, match=listed):
        sw.convert(tmp_path / "c", tmp_path / "out", to=to)


def test_tensors_that_are_not_read_are_named_by_kind(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"s": torch.eye(3).to_sparse(), "w": torch.ones(2)}, tmp_path / "c.pt")
    with pytest.raises(sw.MisuseError, match=r"cannot hold leaf `s` \(torch sparse tensor\)"):
        sw.convert(tmp_path / "c.pt", tmp_path / "out", to="safetensors")


@pytest.mark.parametrize("to", ["safetensors", "torch", "npz", "dcp", "stepwell"])
def test_a_conversion_that_skips_everything_is_refused(tmp_path: Path, to: Any) -> None:
    torch = pytest.importorskip("torch")
    torch.save({1j: torch.ones(2)}, tmp_path / "c.pt")
    with pytest.raises(sw.MisuseError, match="nothing to convert"):
        sw.convert(tmp_path / "c.pt", tmp_path / "out", to=to, objects="skip")
    assert [path.name for path in tmp_path.iterdir()] == ["c.pt"]


def test_skip_is_for_objects_and_not_for_dtypes(tmp_path: Path) -> None:
    sw.save(tmp_path / "saved", {"a": [np.zeros(2, np.complex128)], "b": np.zeros(2)})
    error = document("convert", tmp_path / "saved", tmp_path / "x", "--to", "safetensors", code=2)["error"]
    assert error["message"].endswith("Leave them out with --exclude")
    with pytest.raises(sw.MisuseError, match=r"`a\[0\]` \(complex128\)"):
        sw.convert(tmp_path / "saved", tmp_path / "x", to="safetensors", objects="skip")


def test_a_damaged_source_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    torch.save({"a": torch.arange(5000.0), "b": torch.ones(5)}, tmp_path / "a.pt")
    content = bytearray((tmp_path / "a.pt").read_bytes())
    content[content.index(np.arange(5000, dtype=np.float32).tobytes()) + 5000] ^= 1
    (tmp_path / "a.pt").write_bytes(content)
    rules = [{"rename": "a", "to": "c"}]
    for options in ({}, {"map": rules}):
        with pytest.raises(sw.CorruptCheckpoint, match="is damaged") as caught:
            sw.export(tmp_path / "a.pt", tmp_path / "out", **options)
        assert caught.value.file == str(tmp_path / "a.pt")
        assert [one.name for one in tmp_path.iterdir()] == ["a.pt"]
    with pytest.raises(sw.CorruptCheckpoint):
        sw.convert(tmp_path / "a.pt", tmp_path / "out", to="stepwell", verify=True)
    assert not sw.convert(tmp_path / "a.pt", tmp_path / "out", to="safetensors").verified
    assert sw.export(tmp_path / "a.pt", tmp_path / "part", exclude="a").verified
