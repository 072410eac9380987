"""``stepwell diff``: every difference is found, nothing else is, and memory stays bounded."""

from __future__ import annotations

import math
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import stepwell as sw
from command_line import document, flip_a_bit, make_root, run
from safetensors.numpy import save_file
from stepwell import _comparison
from stepwell._value_difference import difference


def both(tmp_path: Path, a: Any, b: Any) -> tuple[Path, Path]:
    """Two single checkpoints."""
    sw.save(tmp_path / "a", a)
    sw.save(tmp_path / "b", b)
    return tmp_path / "a", tmp_path / "b"


def changes(found: dict[str, Any]) -> dict[str, dict[str, Any]]:
    """Returns the changes by path, without equal leaves."""
    return {
        one["path"]: {key: value for key, value in one.items() if key != "path" and value is not None}
        for one in found["changed"]
    }


def test_a_checkpoint_does_not_differ_from_its_copy(root: Path) -> None:
    make_root(root)
    found = document("diff", f"{root}@10", root / "step_00000010")
    assert found["same"]
    assert found["common_leaves"] == 6
    # Tied leaves are compared once.
    assert found["compared_bytes"] == 48 + 32 + 24
    assert "no difference" in run("diff", f"{root}@10", root / "step_00000010").stdout


def test_differing_values_are_counted(root: Path) -> None:
    make_root(root)
    found = document("diff", f"{root}@0", f"{root}@20", code=1)
    assert changes(found) == {
        "params/w": {"elements": 12, "differing_elements": 12, "max_abs_difference": 20.0},
        "optimizer/m": {"elements": 12, "differing_elements": 12, "max_abs_difference": 20.0},
        "optimizer/count": {"objects": [0, 20]},
    }
    assert not document("diff", f"{root}@0", f"{root}@20", "--no-values")["changed"]


def test_structure_kinds_dtypes_and_shapes_that_differ_are_told(tmp_path: Path) -> None:
    a = {
        "same": np.ones(3),
        "dtype": np.ones(3, np.float32),
        "shape": np.ones(3),
        "kind": [np.ones(1), 2],
        "types": [1, 2],
        "leaf": np.ones(2),
        "gone": {"x": np.ones(1), "y": {"z": 1}},
        "goner": np.ones(1),
    }
    b = {
        "same": np.ones(3),
        "dtype": np.array([1, 1, 1.5], np.float64),
        "shape": np.ones((3, 1)),
        "kind": (np.ones(1), 2),
        "types": (1, 2),
        "leaf": 5,
        "new": [np.ones(1)],
    }
    one, other = both(tmp_path, a, b)
    found = document("diff", one, other, code=1)
    assert changes(found) == {
        "dtype": {
            "dtype": ["float32", "float64"],
            "elements": 3,
            "differing_elements": 1,
            "max_abs_difference": 0.5,
        },
        "shape": {"shape": [[3], [3, 1]]},
        "kind": {"kind": ["list", "tuple"]},
        "types": {"kind": ["list", "tuple"], "objects": [[1, 2], [1, 2]]},
        "leaf": {"kind": ["array", "object"]},
    }
    assert found["only_in_a"] == ["gone/x", "gone/y/z", "goner"]
    assert found["only_in_b"] == ["new[0]"]
    text = run("diff", one, other).stdout
    assert "- gone: only in a, 2 leaves" in text
    assert "- goner: only in a, 1 leaf" in text
    assert "+ new: only in b, 1 leaf" in text
    assert "list → tuple" in text


def test_an_empty_container_that_only_one_has_is_a_difference(tmp_path: Path) -> None:
    one, other = both(tmp_path, {"a": 1, "b": {}}, {"a": 1})
    found = document("diff", one, other, code=1)
    assert not found["same"]
    assert found["only_in_a"] == []
    assert "- b: only in a, 0 leaves" in run("diff", one, other).stdout


@pytest.mark.parametrize(
    ("one", "other", "count", "most"),
    [
        ([0.0, 1.0], [-0.0, 1.0], 1, 0.0),
        ([np.nan, 1.0], [np.nan, 1.0], 0, 0.0),
        ([np.nan, 1.0], [0.0, 1.0], 1, math.nan),
        ([np.inf, 1.0], [-np.inf, 2.0], 2, math.inf),
        ([1.0, 5.0], [1.0, 2.5], 1, 2.5),
    ],
)
def test_floats_of_one_dtype_are_compared_bit_for_bit(
    one: list[float], other: list[float], count: int, most: float
) -> None:
    for dtype in (np.float64, np.float32, np.float16, ml_dtypes.bfloat16):
        found = difference(np.array(one, dtype), np.array(other, dtype))
        assert found[0] == count
        assert found[1] == most or (math.isnan(found[1]) and math.isnan(most))


@pytest.mark.parametrize(
    ("one", "other", "count", "most"),
    [
        (np.array([-(2**63), 0]), np.array([2**63 - 1, 0]), 1, float(2**64 - 1)),
        (np.array([2**64 - 1], np.uint64), np.array([0], np.uint64), 1, float(2**64 - 1)),
        (np.array([-128], np.int8), np.array([127], np.int8), 1, 255.0),
        (np.array([True, False]), np.array([False, False]), 1, 1.0),
        (np.array([3 + 4j, 1]), np.array([0, 1], complex), 1, 5.0),
        (np.array([1, -3], ml_dtypes.int4), np.array([1, 4], ml_dtypes.int4), 1, 7.0),
        (np.array(["2024-01-02"], "M8[D]"), np.array(["2024-01-05"], "M8[D]"), 1, 3.0),
        (np.zeros(0), np.zeros(0), 0, 0.0),
        (np.array(1.0), np.array(3.0), 1, 2.0),
        (np.array([1, 2], np.int32), np.array([1.0, 2.5], np.float32), 1, 0.5),
        (np.array([2**53 + 1]), np.array([1], np.uint32), 1, float(2**53)),
        (np.array([1.5], ml_dtypes.bfloat16), np.array([1.5]), 0, 0.0),
        (np.array([1 + 2j], ml_dtypes.complex32), np.array([1 + 5j], ml_dtypes.complex32), 1, 3.0),
        (np.array([1 + 2j], ml_dtypes.complex32), np.array([1 + 5j]), 1, 3.0),
    ],
)
def test_numbers_of_every_kind_are_told_apart(
    one: np.ndarray[Any, Any], other: np.ndarray[Any, Any], count: int, most: float
) -> None:
    assert difference(one, other) == (count, most)


def test_objects_differ_by_type_and_value(tmp_path: Path) -> None:
    a = {"nan": math.nan, "zero": 0.0, "one": 1, "list": [1, {"x": 2}], "np": np.float32(1), "set": {1, 2}}
    b = {
        "nan": math.nan,
        "zero": -0.0,
        "one": True,
        "list": [1, {"x": 3}],
        "np": np.float64(1),
        "set": {2, 1},
    }
    found = document("diff", *both(tmp_path, a, b), code=1)
    assert set(changes(found)) == {"zero", "one", "list[1]/x", "np"}


def test_pieces_tile_a_box_in_row_major_order() -> None:
    for shape in [(), (0, 3), (5,), (7, 3, 2), (1, 1000), (4, 1, 9)]:
        whole = np.arange(math.prod(shape)).reshape(shape)
        for limit in (1, 8, 24, 100, 10**6):
            found = []
            for box in sw.ArraySpec(shape, np.int64).pieces(limit):
                part = whole[box]
                assert part.nbytes <= max(limit, 8)
                found.append(part.reshape(-1))
            assert np.array_equal(np.concatenate([np.zeros(0, int), *found]), whole.reshape(-1))


def test_a_large_leaf_is_compared_piece_by_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_comparison, "_PIECE_BYTES", 10_000)
    held: list[int] = []
    read = sw.Checkpoint.read

    def counted(*arguments: Any) -> list[np.ndarray[Any, Any]]:
        arrays = read(*arguments)
        held.append(sum(array.nbytes for array in arrays))
        return arrays

    monkeypatch.setattr(sw.Checkpoint, "read", counted)
    w = np.arange(50_000, dtype=np.float32).reshape(50, 1000)
    v = w.copy()
    v[49, 999] += 8
    v[0, 0] = -1
    small = {f"s{i}": np.full(10, i) for i in range(30)}
    found = document("diff", *both(tmp_path, {"w": w, **small}, {"w": v, **small}), code=1)
    assert changes(found) == {"w": {"elements": 50_000, "differing_elements": 2, "max_abs_difference": 8.0}}
    assert max(held) <= 10_000
    # Small leaves are read many at a time.
    assert len(held) < 2 * (20 + 8)


def test_a_damaged_side_is_told_and_no_difference_is_made_up(root: Path) -> None:
    make_root(root)
    flip_a_bit(root / "step_00000010" / "i0" / "00000.data", 4100)
    found = document("diff", f"{root}@0", f"{root}@10", code=1)
    assert found["error"]["kind"] == "corrupt_checkpoint"
    assert "changed" not in found


def lists(value: float = 0.0) -> dict[str, Any]:
    """A state with a list, as training has it."""
    layers = [{"w": np.full((4, 4), i, np.float32)} for i in range(2)]
    layers[1]["w"][3, 3] += np.float32(value)
    return {"embed": np.arange(32, dtype=np.float32).reshape(8, 4), "layers": layers}


@pytest.fixture
def exported(tmp_path: Path) -> tuple[Path, Path]:
    """A step, and the safetensors file that was exported from it."""
    with sw.CheckpointManager(tmp_path / "run") as manager:
        manager.save(7, {"params": lists(), "step": 7})
    sw.export(tmp_path / "run", tmp_path / "weights.safetensors", subtree="params")
    return tmp_path / "run", tmp_path / "weights.safetensors"


@pytest.fixture
def below_params(tmp_path: Path) -> Path:
    """The map that gives exported names the places in the step."""
    file = tmp_path / "params.toml"
    file.write_text('[[rule]]\nrename = "{rest...}"\nto = "params/{rest...}"\n')
    return file


@pytest.mark.parametrize("to", ["safetensors", "torch", "npz", "dcp"])
def test_what_was_exported_equals_its_source(tmp_path: Path, to: Any) -> None:
    sw.save(tmp_path / "ours", lists())
    sw.export(tmp_path / "ours", tmp_path / "theirs", to=to)
    for pair in (("ours", "theirs"), ("theirs", "ours")):
        found = document("diff", *(tmp_path / side for side in pair))
        assert found["same"]
        assert found["common_leaves"] == 3
        assert found["compared_bytes"] == 32 * 4 + 2 * 16 * 4
    assert found["a"]["step"] is None
    assert found["a"]["format"] != "stepwell"
    sw.save(tmp_path / "other", lists(0.5))
    found = document("diff", tmp_path / "theirs", tmp_path / "other", code=1)
    ((_, change),) = changes(found).items()
    assert (change["differing_elements"], change["max_abs_difference"]) == (1, 0.5)


def test_a_map_pairs_the_leaves_of_two_formats(exported: tuple[Path, Path], below_params: Path) -> None:
    run_path, weights = exported
    assert document("diff", weights, run_path, code=1)["common_leaves"] == 0
    found = document("diff", weights, f"{run_path}@7", "--map", below_params, code=1)
    assert found["only_in_b"] == ["step"]
    assert found["common_leaves"] == 3
    assert not found["changed"]
    chosen = ("--map", below_params, "--exclude", "step")
    assert document("diff", weights, run_path, *chosen)["same"]
    with sw.CheckpointManager(run_path) as manager:
        manager.save(8, {"params": lists(2.0), "step": 8})
    found = document("diff", weights, run_path, *chosen, code=1)
    assert changes(found) == {
        "params/layers.1.w": {
            "path_b": "params/layers[1]/w",
            "elements": 16,
            "differing_elements": 1,
            "max_abs_difference": 2.0,
        }
    }
    text = run("diff", weights, run_path, *chosen).stdout
    assert "~ params/layers.1.w and params/layers[1]/w: 1 of 16 elements differ, by at most 2" in text
    assert f"a: safetensors, {weights}" in text


def test_a_map_compares_tensors_in_other_shapes(tmp_path: Path) -> None:
    """The map stacks the layers of one model into a tensor of the other."""
    sw.save(tmp_path / "a", {f"layers.{i}.w": np.full((2, 3), i) for i in range(3)})
    stacked = np.stack([np.full((2, 3), i) for i in range(3)])
    sw.save(tmp_path / "b", {"layers.w": stacked})
    rules = [{"stack": "layers.{i}.w", "to": "layers.w", "over": "i"}]
    with sw.open(tmp_path / "a") as one:
        assert not one.diff(tmp_path / "b", map=rules)
    stacked[2, 1, 0] = 9
    sw.save(tmp_path / "c", {"layers.w": stacked})
    with sw.open(tmp_path / "a") as one:
        (change,) = one.diff(tmp_path / "c", map=rules).changes
    assert (change.path, change.differing_elements, change.max_abs_difference) == ("layers.w", 1, 7.0)


def test_a_map_that_computes_is_compared_by_its_results(tmp_path: Path) -> None:
    one, other = both(tmp_path, {"w": np.arange(6.0)}, {"w": 2 * np.arange(6.0)})
    with sw.open(one) as a:
        assert not a.diff(other, map=[{"scale": "w", "by": 2.0}])
        (change,) = a.diff(other, map=[{"scale": "w", "by": 3.0}]).changes
    assert (change.differing_elements, change.max_abs_difference) == (5, 5.0)


def test_another_dtype_is_a_difference_of_the_dtype(tmp_path: Path) -> None:
    sw.save(tmp_path / "ours", lists())
    sw.export(tmp_path / "ours", tmp_path / "half", cast="bfloat16")
    found = document("diff", tmp_path / "half", tmp_path / "ours", code=1)
    # All numbers are small integers, so their values are the same.
    for change in changes(found).values():
        assert set(change) <= {"dtype", "path_b"}
        assert change["dtype"] == ["bfloat16", "float32"]
    assert len(found["changed"]) == 3


def test_dotted_names_do_not_pair_leaves_of_one_format(tmp_path: Path) -> None:
    one, other = both(tmp_path, {"a": {"b": np.ones(2)}}, {"a.b": np.ones(2)})
    found = document("diff", one, other, code=1)
    assert (found["only_in_a"], found["only_in_b"]) == (["a/b"], ["a.b"])


def test_an_ambiguous_dotted_name_pairs_no_leaves(tmp_path: Path) -> None:
    save_file({"a.b": np.ones(2)}, tmp_path / "x.safetensors")
    sw.save(tmp_path / "ours", {"a": {"b": np.ones(2)}, "a.b": np.ones(2) * 2})
    found = document("diff", tmp_path / "x.safetensors", tmp_path / "ours", code=1)
    assert [one["path"] for one in found["changed"]] == ["a.b"]
    assert found["only_in_b"] == ["a/b"]


def test_chosen_leaves_alone_are_compared(tmp_path: Path) -> None:
    a = {"params": {"w": np.ones(2)}, "optimizer": {"m": np.ones(2), "gone": 1}, "empty": {}}
    b = {"params": {"w": np.ones(2)}, "optimizer": {"m": np.zeros(2)}}
    one, other = both(tmp_path, a, b)
    assert not document("diff", one, other, code=1)["same"]
    assert document("diff", one, other, "--include", "params")["common_leaves"] == 1
    assert document("diff", one, other, "--exclude", "optimizer")["same"]
    found = document("diff", one, other, "--exclude", "optimizer/m", code=1)
    assert (found["only_in_a"], found["changed"]) == (["optimizer/gone"], [])


class Unknown:
    """A class that the reader of pickles does not know."""


def test_opaque_values_are_named_as_not_compared(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).write_bytes(pickle.dumps({"odd": Unknown(), "n": 1}, protocol=2))
    found = document("diff", tmp_path / "a", tmp_path / "b")
    assert (found["opaque"], found["same"]) == (["odd"], True)
    assert "? opaque, not compared: odd" in run("diff", tmp_path / "a", tmp_path / "b").stdout


def test_equal_arrays_are_read_by_the_engine_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted: list[str] = []
    read = sw.Checkpoint.read

    def counted(self: sw.Checkpoint, pairs: Any) -> list[Any]:
        pairs = list(pairs)
        wanted.extend(path for path, _ in pairs)
        return read(self, pairs)

    monkeypatch.setattr(sw.Checkpoint, "read", counted)
    one, other = both(tmp_path, lists(), lists(1.0))
    with sw.open(one) as a:
        assert a.diff(other).changes[0].path == "layers[1]/w"
    assert set(wanted) == {"layers[1]/w"}


@pytest.mark.parametrize("added", [0.0, 1.0])
def test_a_comparison_takes_constant_memory(tmp_path: Path, added: float) -> None:
    whole = np.random.default_rng(3).random((48 << 20,), np.float32)
    save_file({"w": whole}, tmp_path / "a.safetensors")
    sw.save(tmp_path / "b", {"w": whole + np.float32(added)})
    nbytes = whole.nbytes
    script = (
        "import sys, stepwell as sw\n"
        "def peak():\n"
        "    status = open('/proc/self/status').read()\n"
        "    return int(status.split('VmHWM:')[1].split()[0]) << 10\n"
        "with sw.open(sys.argv[1]) as a:\n"
        "    a.contents()\n"
        "    before = peak()\n"
        "    found = a.diff(sys.argv[2])\n"
        "    print(bool(found), peak() - before)\n"
    )
    told = subprocess.run(
        [sys.executable, "-c", script, tmp_path / "a.safetensors", tmp_path / "b"],
        capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    differs, more = told.stdout.split()
    assert differs == str(bool(added))
    assert nbytes == 192 << 20
    assert int(more) < 160 << 20


def test_progress_of_a_comparison_ends_at_all_bytes(tmp_path: Path) -> None:
    one, other = both(tmp_path, lists(), lists(1.0))
    told: list[tuple[int, int]] = []
    with sw.open(one) as a:
        assert a.diff(other, progress=lambda done, whole: told.append((done, whole)))
        assert a["embed"][0, 0] == 0, "the caller's checkpoint stays open"
        with pytest.raises(sw.MisuseError, match="progress is called"):
            a.diff(other, progress=5)  # type: ignore[arg-type]
    assert told == sorted(told)
    assert told[-1] == (256 + 64, 256 + 64)


def test_a_tied_leaf_that_an_export_left_out_is_named(tmp_path: Path) -> None:
    w = np.ones((4, 2), np.float32)
    sw.save(tmp_path / "ours", {"embed": w, "head": w})
    sw.export(tmp_path / "ours", tmp_path / "theirs")
    text = run("diff", tmp_path / "ours", tmp_path / "theirs").stdout
    assert "- head: only in a, 1 leaf, tied to embed" in text


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--include", "nope*"], "'nope*' of --include matches no leaf"),
        (["--include", "a", "--include", "nope*"], "'nope*' of --include matches no leaf"),
        (["--exclude", "nope*"], "'nope*' of --exclude matches no leaf"),
        (["--exclude", "**"], "is selected. Change --include or --exclude"),
    ],
)
def test_a_pattern_that_matches_no_leaf_is_refused(tmp_path: Path, options: list[str], words: str) -> None:
    one, other = both(tmp_path, {"a": np.ones(2)}, {"a": np.ones(2), "b": 1})
    for sides in ((one, other), (other, one)):
        error = document("diff", *sides, *options, code=1)["error"]
        assert error["kind"] == "mismatch"
        assert words in error["message"]
        assert document("diff", *sides, "--include", "b", code=1)["common_leaves"] == 0


def test_a_pattern_of_a_partner_alone_is_refused(tmp_path: Path) -> None:
    sw.save(tmp_path / "own", {"layers": [{"w": np.ones(2)}]})
    save_file({"layers.0.w": np.ones(2)}, tmp_path / "flat.safetensors")
    sides = tmp_path / "own", tmp_path / "flat.safetensors"
    assert document("diff", *sides, "--include", "layers[0]/w")["common_leaves"] == 1
    assert document("diff", *sides, "--include", "layers.0.w", code=1)["error"]["kind"] == "mismatch"


def test_a_state_that_is_one_array_equals_its_exports(tmp_path: Path) -> None:
    np.save(tmp_path / "a.npy", np.arange(3.0))
    sw.save(tmp_path / "own", np.arange(3.0))
    for to in ("safetensors", "dcp", "torch"):
        sw.export(tmp_path / "a.npy", tmp_path / to, to=to)
        for one in ("a.npy", "own"):
            assert document("diff", tmp_path / one, tmp_path / to)["common_leaves"] == 1
            assert document("diff", tmp_path / to, tmp_path / one)["common_leaves"] == 1
    sw.save(tmp_path / "dict", {"w": np.arange(3.0)})
    found = document("diff", tmp_path / "a.npy", tmp_path / "dict", code=1)
    assert (found["only_in_a"], found["only_in_b"]) == ([""], ["w"])


def test_a_container_of_plain_values_equals_one_value(tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    groups = [{"lr": 0.1, "betas": (0.9, 0.999), "params": [0, 1]}]
    state = {"opt": {"param_groups": groups, "state": {0: torch.ones(2)}}, "none": [], "empty": {}}
    torch.save(state, tmp_path / "a.pt")
    groups[0]["lr"] = 0.2
    torch.save(state, tmp_path / "other.pt")
    sw.convert(tmp_path / "a.pt", tmp_path / "a", to="stepwell")
    for one, other in (("a.pt", "a"), ("a", "a.pt")):
        with sw.open(tmp_path / one) as ckpt:
            found = ckpt.diff(tmp_path / other)
            assert not found
            assert not found.only_b
    with sw.open(tmp_path / "other.pt") as ckpt:
        found = ckpt.diff(tmp_path / "a")
        assert not found.only_b
        (change,) = found.changes
        assert change.path == "opt/param_groups"
        assert change.objects is not None
        assert [side[0]["lr"] for side in change.objects] == [0.2, 0.1]
        assert not ckpt.diff(tmp_path / "a", values=False)
    with sw.open(tmp_path / "a") as ckpt:
        found = ckpt.diff(tmp_path / "other.pt", exclude="opt/param_groups[0]/lr")
        assert not found
        assert found.opaque == ("opt/param_groups",)
