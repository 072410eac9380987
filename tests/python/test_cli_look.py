"""Looking at roots and checkpoints from the command line: ls, show, cat, verify."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import stepwell as sw
from command_line import DOCUMENT, document, flip_a_bit, make_root, process, run, state

HOSTILE = "\x1b[31m</script>\u202e\n"


def test_ls_says_of_each_step_what_it_is(root: Path) -> None:
    make_root(root)
    sw.add_metrics(root, 10, {"score": math.nan})
    found = document("ls", root)
    assert found["latest_step"] == 20
    assert [step["step"] for step in found["steps"]] == [0, 10, 20]
    second = found["steps"][1]
    assert second["metrics"] == {"loss": 1 / 11, "score": "NaN"}
    assert second["metadata_keys"] == ["git"]
    assert [item["name"] for item in second["items"]] == ["params", "optimizer", "."]
    assert second["bytes"] == sum(item["bytes"] for item in second["items"])
    files = sum(file.stat().st_size for file in (root / "step_00000010").rglob("*.data"))
    assert second["bytes"] == files
    text = run("ls", root).stdout
    assert "3 steps" in text
    assert "score=nan" in text


def test_ls_of_the_newest_few_still_counts_all(root: Path) -> None:
    make_root(root)
    found = document("ls", root, "-n", 1)
    assert [step["step"] for step in found["steps"]] == [20]
    assert found["number_of_steps"] == 3
    assert "the newest 1 of 3" in run("ls", root, "-n", 1).stdout


def test_ls_reports_damage_strangers_leftovers_and_branches(root: Path) -> None:
    make_root(root, steps=4)
    with sw.CheckpointManager(root) as manager:
        manager.rewind(20, "old")
    (root / "step_00000010" / "i0" / "00000.data").unlink()
    (root / "step_00000099").mkdir()
    unique = "0123456789abcdef" * 2
    (root / f".tmp-00000030-{unique}-1").mkdir()
    (root / f".trash-00000000-{unique}").mkdir()
    (root / f".trash-00000000-{unique}" / "file").write_bytes(b"12345")
    (root / ".trash-of-somebody-else").mkdir()
    found = document("ls", root, code=1)
    assert "is missing" in found["steps"][1]["damage"]
    assert found["latest_step"] == 20
    assert [one["name"] for one in found["quarantined"]] == ["step_00000099"]
    assert [one["live"] for one in found["temporaries"]] == [False]
    assert [one["bytes"] for one in found["trash"]] == [5]
    assert found["branches"][0]["branch"] == "old"
    assert [one["label"] for one in found["branches"][0]["steps"]] == ["step_00000030"]
    text = run("ls", root).stdout
    for word in ("damaged:", "no step:", "dead; gc deletes it", "retired", "branch old: step_00000030"):
        assert word in text


def test_ls_of_a_root_without_steps_finds_nothing_there(root: Path) -> None:
    sw.CheckpointManager(root).close()
    assert document("ls", root, code=1)["steps"] == []


def test_a_temporary_of_a_running_save_is_in_flight(root: Path) -> None:
    unique = "0123456789abcdef" * 2
    with sw.CheckpointManager(root):
        (root / f".tmp-00000030-{unique}-1").mkdir()
        assert [one["live"] for one in document("ls", root, code=1)["temporaries"]] == [True]


def test_show_draws_the_tree(root: Path) -> None:
    make_root(root, steps=2)
    lines = run("show", root).stdout.splitlines()
    assert lines[0] == f"step 10: {root / 'step_00000010'}"
    assert lines[2] == "metrics: loss 0.0909091"
    assert lines[5:] == [
        ".             dict            115 B  6 leaves",
        "├─ params     dict             80 B  3 leaves",
        "│  ├─ w       float32 [3, 4]   48 B",
        "│  ├─ b       float64 [4]      32 B",
        "│  └─ head    float32 [3, 4]    0 B  = params/w, tied",
        "├─ optimizer  dict             26 B  2 leaves",
        "│  ├─ m       float16 [3, 4]   24 B",
        "│  └─ count   object            2 B  10",
        "└─ lr         object            9 B  0.5",
    ]


def test_a_step_is_named_by_its_root_its_number_or_its_directory(root: Path) -> None:
    make_root(root)
    assert document("show", root)["step"] == 20
    assert document("show", f"{root}@10")["step"] == 10
    assert document("show", root / "step_00000000")["step"] == 0
    odd = root.parent / "run@7"
    make_root(odd, steps=1)
    assert document("show", odd)["step"] == 0
    assert document("show", f"{odd}@0")["step"] == 0


def test_show_says_of_each_leaf_what_it_is_and_where_it_lies(root: Path) -> None:
    make_root(root, steps=1)
    found = document("show", root, "--layout")
    leaves = {leaf["path"]: leaf for leaf in found["leaves"]}
    assert list(leaves) == ["params/w", "params/b", "params/head", "optimizer/m", "optimizer/count", "lr"]
    assert leaves["params/w"]["shape"] == [3, 4]
    assert leaves["params/w"]["stored_bytes"] == 48
    assert leaves["params/head"]["tied_to"] == "params/w"
    assert leaves["params/head"]["stored_bytes"] == 0
    assert leaves["params/head"]["bytes"] == 48
    assert leaves["optimizer/count"]["value"] == 0
    (place,) = leaves["params/w"]["places"]
    stored = (root / "step_00000000" / place["file"]).read_bytes()[place["offset"] :][: place["bytes"]]
    assert stored == np.arange(12, dtype=np.float32).tobytes()
    assert "places" not in document("show", root)["leaves"][0]
    containers = {one["path"]: one for one in found["containers"]}
    assert containers["params"] == {"path": "params", "kind": "dict", "leaves": 3, "stored_bytes": 80}


def test_the_layout_names_the_part_of_a_leaf_that_a_chunk_is(root: Path) -> None:
    options = sw.Options(chunk_bytes=4096, min_row_bytes=64)
    with sw.CheckpointManager(root, options=options) as manager:
        manager.save(0, {"big": {"w": np.arange(4096, dtype=np.float32).reshape(64, 64)}})
    lines = run("show", root, "--layout").stdout
    assert "big/w [0:" in lines
    places = document("show", root, "--layout")["leaves"][0]["places"]
    assert len(places) > 1
    assert sum(math.prod(place["extent"]) for place in places) == 4096


def test_show_stops_at_a_depth(root: Path) -> None:
    make_root(root, steps=1)
    text = run("show", root, "--depth", 1).stdout
    assert "params" in text
    assert "├─ w" not in text


def test_metrics_that_came_later_are_shown_of_a_step(root: Path) -> None:
    make_root(root, steps=1)
    sw.add_metrics(root, 0, {"score": 0.75})
    for path in (root, root / "step_00000000"):
        assert document("show", path)["metrics"] == {"loss": 1.0, "score": 0.75}


def test_a_hostile_name_is_escaped_on_a_terminal_only(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(0, {HOSTILE: {"w": np.zeros(3)}}, metrics={HOSTILE: 1.0}, custom_metadata={HOSTILE: 1})
    for arguments in (["ls", root], ["show", root], ["show", root, "--layout"]):
        text = run(*arguments).stdout
        assert "\x1b" not in text
        assert "\u202e" not in text
        assert "\\x1b" in text
    assert HOSTILE in document("show", root)["custom_metadata"]
    assert HOSTILE in document("ls", root)["steps"][0]["metrics"]


@pytest.mark.parametrize(
    ("leaf", "wanted"),
    [
        ("params/w[0]", [0.0, 1.0, 2.0, 3.0]),
        ("params/w[-1, ::2]", [8.0, 10.0]),
        ("params/w[..., 1]", [1.0, 5.0, 9.0]),
        ("params/w[5:2]", []),
        ("params/w[2, 3]", 11.0),
    ],
)
def test_cat_reads_a_slice_as_numpy_does(root: Path, leaf: str, wanted: Any) -> None:
    make_root(root, steps=1)
    assert document("cat", root, leaf)["values"] == wanted


def test_cat_knows_an_index_of_a_list_from_a_slice_of_an_array(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(0, {"blocks": [np.array([1.0, 2.0]), np.array([3.0, 4.0])]})
    assert document("cat", root, "blocks[1]")["values"] == [3.0, 4.0]
    assert document("cat", root, "blocks[1][0]")["values"] == 3.0


def test_cat_gives_every_dtype_and_what_json_has_not(root: Path) -> None:
    leaves = {
        "nan": np.array([np.nan, np.inf, -np.inf, 1.5]),
        "complex": np.array([1 + 2j], np.complex64),
        "bf16": np.array([0.5], ml_dtypes.bfloat16),
        "int4": np.array([-3, 7], ml_dtypes.int4),
        "fp8": np.array([0.25], ml_dtypes.float8_e4m3fn),
        "when": np.array(["2024-01-02"], "datetime64[D]"),
        "bool": np.array([True, False]),
        "scalar": np.array(7, np.uint64),
        "empty": np.zeros((0, 3)),
        "text": "x",
    }
    with sw.CheckpointManager(root) as manager:
        manager.save(0, leaves)
    values = {name: document("cat", root, name).get("values") for name in leaves}
    assert values == {
        "nan": ["NaN", "Infinity", "-Infinity", 1.5],
        "complex": [[1.0, 2.0]],
        "bf16": [0.5],
        "int4": [-3, 7],
        "fp8": [0.25],
        "when": ["2024-01-02"],
        "bool": [True, False],
        "scalar": 7,
        "empty": [],
        "text": None,
    }
    assert document("cat", root, "text")["value"] == "x"
    for name in leaves:
        assert run("cat", root, name).exit_code == 0


def test_cat_shows_both_ends_of_a_large_array_and_reads_no_more(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(0, {"w": np.arange(100_000).reshape(100, 1000)})
    # A block in the middle: its reader meets the damage.
    flip_a_bit(root / "step_00000000" / "i0" / "00000.data", 300_000)
    lines = [line.replace(" ", "") for line in run("cat", root, "w").stdout.splitlines()]
    assert lines[0] == "w:int64[100,1000]"
    assert lines[1] == "[[0,1,2,...,997,998,999],"
    assert lines[-1] == "[99000,99001,99002,...,99997,99998,99999]]"
    strided = run("cat", root, "w[::2, ::-1]").stdout.splitlines()[1]
    assert strided.replace(" ", "") == "[[999,998,997,...,2,1,0],"
    assert run("cat", root, "w", "--all").exit_code == 1
    assert run("cat", root, "w[0]", "--all").stdout.split("\n", 1)[1].count(",") == 999


def test_cat_writes_a_file_that_numpy_reads(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sw.ArraySpec.pieces, "__defaults__", (1000,))
    whole = np.arange(6 * 50 * 7, dtype=np.int32).reshape(6, 50, 7)
    with sw.CheckpointManager(root) as manager:
        manager.save(0, {"w": whole})
    file = tmp_path / "w.npy"
    for index, wanted in (("", whole), ("[1:, 3:40]", whole[1:, 3:40]), ("[2, ::3]", whole[2, ::3])):
        found = document("cat", root, "w" + index, "-o", file)
        assert found["bytes"] == wanted.nbytes
        assert np.array_equal(np.load(file), wanted)
        assert np.load(file).shape == wanted.shape


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, ml_dtypes.float8_e5m2, ml_dtypes.complex32])
def test_cat_writes_numbers_of_ml_dtypes_as_raw_bytes(root: Path, tmp_path: Path, dtype: Any) -> None:
    wanted = np.array([1, -2, 0.5]).astype(dtype)
    with sw.CheckpointManager(root) as manager:
        manager.save(0, {"w": wanted})
    file = tmp_path / "w.npy"
    document("cat", root, "w", "-o", file)
    assert np.load(file).view(dtype).tolist() == wanted.tolist()
    shown = document("cat", root, "w")["values"]
    assert shown == ([[1, 0], [-2, 0], [0.5, 0]] if dtype is ml_dtypes.complex32 else [1, -2, 0.5])


@pytest.mark.parametrize(
    ("leaf", "code", "word"),
    [
        ("params/ww", 1, "near it is params/w"),
        ("params[0]", 2, "no array but dict"),
        ("params/w[9]", 2, "out of bounds"),
        ("params/w[0, 0, 0]", 2, "2-dimensional"),
        ("params/w[::0]", 2, "its step is 0"),
        ("params/w[]", 2, "is no slice"),
        ("lr[0]", 2, "no array"),
    ],
)
def test_cat_says_what_is_wrong_with_a_leaf_or_a_slice(root: Path, leaf: str, code: int, word: str) -> None:
    make_root(root, steps=1)
    result = run("cat", root, leaf)
    assert result.exit_code == code
    assert word in result.stderr


def test_verify_of_a_root_names_file_block_and_leaves(root: Path) -> None:
    make_root(root)
    assert document("verify", root)["ok"]
    flip_a_bit(root / "step_00000010" / "i0" / "00000.data", 4100)
    assert document("verify", root)["ok"]
    found = document("verify", root, "--all", code=1)
    row = next(line for line in DOCUMENT.read_text().splitlines() if line.startswith("| `checkpoints` |"))
    assert all(f"`{key}`" in row for key in found["checkpoints"][0])
    assert [one["ok"] for one in found["checkpoints"]] == [True, False, True]
    (damage,) = found["checkpoints"][1]["damages"]
    assert damage["file"].endswith("step_00000010/i0/00000.data")
    assert damage["block"] == 0
    assert "params/w" in damage["leaves"]
    done = process("verify", f"{root}@10")
    assert done.returncode == 1
    assert ": 1 damaged part found" in done.stdout
    assert "params/w" in done.stdout


def test_a_damaged_leaf_is_told_by_name_when_it_is_read(root: Path) -> None:
    make_root(root, steps=1)
    flip_a_bit(root / "step_00000000" / "i0" / "00000.data", 4100)
    found = document("cat", root, "params/w", code=1)
    assert found["error"]["kind"] == "corrupt_checkpoint"
    assert found["error"]["leaf"] is not None
    assert found["error"]["block"] == 0


def test_verify_of_all_steps_is_for_a_root_alone(root: Path) -> None:
    make_root(root, steps=1)
    assert run("verify", f"{root}@0", "--all").exit_code == 2


def test_ls_of_a_root_says_when_a_step_lost_an_item(root: Path) -> None:
    with sw.CheckpointManager(root, retention=sw.keep_every(10, items=["params"])) as manager:
        for step in (0, 10):
            manager.save(step, state(step))
    found = document("ls", root)
    assert sorted(found["steps"][0]["dropped"]) == [".", "optimizer"]
    assert "-optimizer" in run("ls", root).stdout


def test_a_leaf_is_found_as_show_draws_it(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"a\x00b": np.arange(3), "plain": 1})
    drawn = run("show", tmp_path / "c").stdout
    assert "a\\x00b" in drawn
    assert "[0, 1, 2]" in run("cat", tmp_path / "c", "a\\x00b").stdout


def test_cat_of_a_container_lists_it(root: Path) -> None:
    make_root(root, steps=1)
    found = document("cat", root, "params")
    assert [child["path"] for child in found["children"]] == ["params/w", "params/b", "params/head"]
    assert (found["kind"], found["children"][0]["shape"]) == ("dict", [3, 4])
    text = run("cat", root, "optimizer").stdout
    assert "float16 [3, 4]" in text
    assert "count" in text


def test_info_names_versions_and_the_reasons_for_the_engine(tmp_path: Path) -> None:
    found = document("info", tmp_path)
    assert found["versions"]["stepwell"] == sw.__version__
    assert found["versions"]["numpy"] == np.__version__
    assert found["engine"]["engine"] == sw.engine_info(tmp_path)["engine"]
    assert found["machine"]["cpus"] > 0
    text = run("info", tmp_path).stdout
    assert "numpy" in text
    assert found["engine"]["engine"] in text


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_that_completes_commands(shell: str) -> None:
    script = run("completion", shell).stdout
    assert f"_STEPWELL_COMPLETE={shell}_complete" in script
    answer = process(
        _STEPWELL_COMPLETE=f"{shell}_complete",
        COMP_WORDS="stepwell ver",
        COMP_CWORD="ver" if shell == "fish" else "1",
    )
    assert "verify" in answer.stdout
