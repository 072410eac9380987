"""Restoring with a target: what is wanted is matched first, all differences are told at once,
memory is only handed out filled."""

from __future__ import annotations

import dataclasses
import os
import textwrap
from collections import OrderedDict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import stepwell as sw
from conftest import same

STATE: dict[str, Any] = {
    "params": {"w": np.arange(12, dtype=np.float32).reshape(3, 4), "b": np.ones(4, np.float32), "layers": [np.full(2, i) for i in range(3)]},
    "optimizer": {"m": np.zeros((3, 4)), "count": 7, "history": [1.0, 2.0], "none": None, "empty": []},
    "step": 5,
}  # fmt: skip


@pytest.fixture
def path(tmp_path: Path) -> Path:
    sw.save(tmp_path / "c", STATE)
    return tmp_path / "c"


def zeros() -> dict[str, Any]:
    return {
        "params": {
            "w": np.zeros((3, 4), np.float32),
            "b": np.zeros(4, np.float32),
            "layers": [np.zeros(2, int) for _ in range(3)],
        },
        "optimizer": {"m": np.ones((3, 4)), "count": 0, "history": [], "none": None, "empty": []},
        "step": 0,
    }


def test_like_is_never_changed(path: Path) -> None:
    like, before = zeros(), zeros()
    back = sw.restore(path, like=like)
    assert same(like, before)
    assert same(back, STATE)
    assert not np.shares_memory(back["params"]["w"], like["params"]["w"])


def test_into_is_filled_in_place(path: Path) -> None:
    into = zeros()
    w, layers, params, history = (
        into["params"]["w"],
        into["params"]["layers"],
        into["params"],
        into["optimizer"]["history"],
    )
    back = sw.restore(path, into=into)
    assert same(back, STATE)
    assert back is into
    assert back["params"] is params
    assert back["params"]["layers"] is layers
    assert back["params"]["w"] is w
    assert back["optimizer"]["history"] is history


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.zeros((3, 4), np.float32, order="F"),
        lambda: np.zeros((4, 3), np.float32).T,
        lambda: np.zeros((6, 8), np.float32)[::-2, ::2],
        lambda: np.zeros((3, 4), ">f4"),
        lambda: np.frombuffer(bytearray(49), np.uint8)[1:].view(np.float32).reshape(3, 4),
    ],
)
def test_into_fills_arrays_of_any_layout(path: Path, make: Any) -> None:
    target = make()
    back = sw.restore(path, into={"params": {"w": target}}, unexpected="ignore")
    assert back["params"]["w"] is target
    assert np.array_equal(target, STATE["params"]["w"])


def test_an_array_that_cannot_be_written_is_replaced(path: Path) -> None:
    fixed = np.zeros((3, 4), np.float32)
    fixed.flags.writeable = False
    back = sw.restore(path, into={"params": {"w": fixed}}, unexpected="ignore")
    assert back["params"]["w"] is not fixed
    assert np.array_equal(back["params"]["w"], STATE["params"]["w"])
    assert not fixed.any()


def test_targets_between_each_others_elements_are_all_filled(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"a": {"x": np.arange(5), "y": np.arange(5) * 10}})
    memory = np.zeros(10, int)
    sw.restore(tmp_path / "c", into={"a": {"x": memory[::2], "y": memory[1::2]}})
    assert memory.tolist() == [0, 0, 1, 10, 2, 20, 3, 30, 4, 40]


def test_targets_that_overlap_are_refused_untouched(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"a": {"x": np.arange(5), "y": np.arange(5)}})
    memory = np.zeros(8, int)
    with pytest.raises(sw.MismatchError, match="overlap"):
        sw.restore(tmp_path / "c", into={"a": {"x": memory[:5], "y": memory[3:]}})
    assert not memory.any()


def test_a_tied_target_takes_equal_values_only(tmp_path: Path) -> None:
    tied = np.zeros(5, int)
    sw.save(tmp_path / "c", {"a": {"x": np.arange(5), "y": np.arange(5)}})
    back = sw.restore(tmp_path / "c", into={"a": {"x": tied, "y": tied}})
    assert back["a"]["x"] is back["a"]["y"] is tied
    assert tied.tolist() == [0, 1, 2, 3, 4]
    sw.save(tmp_path / "d", {"a": {"x": np.arange(5), "y": np.arange(5) + 1}})
    with pytest.raises(sw.MismatchError, match="`a/x` and `a/y` are one array"):
        sw.restore(tmp_path / "d", into={"a": {"x": tied, "y": tied}})
    assert tied.tolist() == [0, 1, 2, 3, 4]


def test_specs_types_and_markers_say_what_is_wanted(path: Path) -> None:
    like = {
        "params": {"w": sw.ArraySpec((3, 4), "float32"), "b": np.ndarray, "layers": sw.AS_STORED},
        "optimizer": ...,
        "step": int,
    }
    back = sw.restore(path, like=like)
    assert same(back["params"], STATE["params"])
    assert back["optimizer"] is ...
    assert back["step"] == 5


def test_a_type_is_a_demand(path: Path) -> None:
    with pytest.raises(sw.MismatchError) as caught:
        sw.restore(path, like={"step": str})
    assert caught.value.report.wrong_kind[0].path == "step"
    assert sw.restore(path, like={"step": float})["step"] == 5.0


def test_top_level_entries_that_are_absent_are_not_wanted(path: Path) -> None:
    value, report = sw.restore(path, like={"step": 0}, return_report=True)
    assert value == {"step": 5}
    assert "params/w" in report.left_out
    assert report.nbytes == 0


def test_one_report_lists_everything(path: Path) -> None:
    like = {
        "params": {
            "w": sw.ArraySpec((3, 5), "float32"),
            "bias": np.zeros(4),
            "layers": [np.zeros(2, np.int8), 5, np.zeros(2, int)],
        },
        "optimizer": sw.AS_STORED,
        "new": np.zeros(3),
    }
    with pytest.raises(sw.MismatchError) as caught:
        sw.restore(path, like=like)
    report = caught.value.report
    assert [one.path for one in report.missing] == ["params/bias", "new"]
    assert report.missing[0].near[0] == "params/b"
    assert [one.path for one in report.unexpected] == ["params/b"]
    assert report.wrong_shape == [sw.results.WrongShape("params/w", (3, 4), (3, 5))]
    dtype = report.wrong_dtype[0]
    assert (dtype.path, dtype.stored, dtype.wanted) == ("params/layers[0]", "int64", "int8")
    assert report.wrong_kind[0].path == "params/layers[1]"
    for name in ("params/bias", "params/b", "params/w", "params/layers[0]", "params/layers[1]"):
        assert name in str(caught.value)


def test_a_mismatch_is_found_before_the_first_byte_is_written(path: Path) -> None:
    into = zeros()
    into["params"]["w"] = np.zeros((5, 5), np.float32)
    before = zeros()
    before["params"]["w"] = np.zeros((5, 5), np.float32)
    with pytest.raises(sw.MismatchError):
        sw.restore(path, into=into)
    assert same(into, before)


def test_missing_keep_needs_something_to_keep(path: Path) -> None:
    extra = np.full(3, 9.0)
    like = zeros()
    like["params"]["lora"] = extra
    back, report = sw.restore(path, like=like, missing="keep", return_report=True)
    assert np.array_equal(back["params"]["lora"], extra)
    assert report.kept == ["params/lora"]
    like["params"]["lora"] = sw.ArraySpec((3,), "float64")
    with pytest.raises(sw.MismatchError, match="nothing to keep"):
        sw.restore(path, like=like, missing="keep")
    like["params"]["lora"] = extra
    with pytest.raises(sw.MismatchError):
        sw.restore(path, like=like, missing={"optimizer/**": "keep"})


def test_unexpected_may_be_ignored_per_glob(path: Path) -> None:
    like = {"params": {"w": np.zeros((3, 4), np.float32)}}
    with pytest.raises(sw.MismatchError):
        sw.restore(path, like=like, unexpected={"params/b": "ignore"})
    _, report = sw.restore(
        path, like=like, unexpected={"params/b": "ignore", "params/layers*": "ignore"}, return_report=True
    )
    assert report.ignored == ["params/b", "params/layers[0]", "params/layers[1]", "params/layers[2]"]


def test_include_and_exclude_choose_stored_leaves(path: Path) -> None:
    back = sw.restore(path, include="params/**", exclude=["params/layers*"])
    assert same(back, {"params": {"w": STATE["params"]["w"], "b": STATE["params"]["b"]}})
    back = sw.restore(path, include="params/layers[1]")
    assert back["params"]["layers"][0] is ...
    assert same(back["params"]["layers"][1], STATE["params"]["layers"][1])
    with pytest.raises(sw.MismatchError):
        sw.restore(path, include="nothing/**")


def test_a_glob_that_matches_a_subtree_selects_all_of_it(path: Path) -> None:
    assert same(sw.restore(path, include="params"), {"params": STATE["params"]})
    without = sw.restore(path, include="params", exclude="*/layers")
    assert same(without, {"params": {"w": STATE["params"]["w"], "b": STATE["params"]["b"]}})
    half = sw.restore(path, include="params", cast={"params": "float64"})
    assert half["params"]["w"].dtype == half["params"]["layers"][0].dtype == np.float64
    with pytest.raises(sw.MismatchError, match="`param`"):
        sw.restore(path, include="param")


def test_renames_map_stored_to_wanted(path: Path) -> None:
    like = {
        "model": {
            "weight": np.zeros((3, 4), np.float32),
            "b": np.zeros(4, np.float32),
            "layers": sw.AS_STORED,
        }
    }
    back = sw.restore(
        path, like=like, rename={"params/w": "model/weight", "params": "model"}, unexpected="error"
    )
    assert np.array_equal(back["model"]["weight"], STATE["params"]["w"])
    assert same(back["model"]["layers"], STATE["params"]["layers"])


def test_lossless_casts_happen_and_are_told(path: Path) -> None:
    like = {"params": {"w": sw.ArraySpec((3, 4), "float64")}}
    back, report = sw.restore(path, like=like, unexpected="ignore", return_report=True)
    assert same(back["params"]["w"], STATE["params"]["w"].astype(np.float64))
    assert report.cast == [sw.results.CastLeaf("params/w", "float32", "float64")]


def test_lossy_casts_need_to_be_asked_for(path: Path) -> None:
    like = {"params": {"w": sw.ArraySpec((3, 4), "bfloat16")}}
    with pytest.raises(sw.MismatchError):
        sw.restore(path, like=like, unexpected="ignore")
    for cast in ("lossy", {"params/w": "bfloat16"}):
        back = sw.restore(path, like=like, unexpected="ignore", cast=cast)
        assert back["params"]["w"].dtype == ml_dtypes.bfloat16
    as_stored = sw.restore(path, cast={"params/*": np.float16})
    assert as_stored["params"]["w"].dtype == np.float16
    assert as_stored["optimizer"]["m"].dtype == np.float64


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (1e6, "float8_e4m3fn"),
        (1e6, "float8_e5m2"),
        (1e6, "float16"),
        (300, "int8"),
        (-1.0, "uint8"),
        (1e30, "int64"),
    ],
)
def test_a_value_that_does_not_fit_raises(tmp_path: Path, value: float, dtype: str) -> None:
    sw.save(tmp_path / "c", {"a": np.array([1.0, value])})
    target = np.zeros(2, sw.ArraySpec((), dtype).dtype)
    with pytest.raises(sw.MismatchError, match="do not fit"):
        sw.restore(tmp_path / "c", into={"a": target}, cast="lossy")
    assert not target.astype(np.float32).any()


def test_shapes_may_be_padded_and_cut(path: Path) -> None:
    like = {"params": {"w": sw.ArraySpec((5, 2), "float32")}}
    for resize in (None, "pad", "truncate"):
        with pytest.raises(sw.MismatchError):
            sw.restore(path, like=like, unexpected="ignore", resize=resize)
    expected = np.zeros((5, 2), np.float32)
    expected[:3] = STATE["params"]["w"][:, :2]
    back = sw.restore(path, like=like, unexpected="ignore", resize="both")
    assert same(back["params"]["w"], expected)
    target = np.full((5, 2), 9, np.float32)
    sw.restore(path, into={"params": {"w": target}}, unexpected="ignore", resize={"params/*": "both"})
    assert same(target, expected)
    wide = np.full((5, 2), 9, np.float64)
    sw.restore(path, into={"params": {"w": wide}}, unexpected="ignore", resize="both")
    assert same(wide, expected.astype(np.float64))


def test_an_empty_sequence_and_a_plain_one_are_the_same_kind(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"full": [1, 2], "none": [], "t": (1,)})
    assert sw.restore(tmp_path / "c", like={"full": [], "none": [5], "t": ()}) == {
        "full": [1, 2],
        "none": [],
        "t": (1,),
    }
    assert sw.restore(tmp_path / "c", into={"full": [], "none": [5, 6], "t": ()}) == {
        "full": [1, 2],
        "none": [],
        "t": (1,),
    }


def test_a_dict_and_a_dataclass_of_the_same_names_fit(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Params:
        w: Any
        n: int

    sw.save(tmp_path / "c", {"p": {"w": np.arange(3), "n": 4}})
    back = sw.restore(tmp_path / "c", into={"p": Params(np.zeros(3, int), 0)})
    assert isinstance(back["p"], Params)
    assert (back["p"].w.tolist(), back["p"].n) == ([0, 1, 2], 4)


def test_a_shared_leaf_of_the_store_is_one_array_in_the_result(tmp_path: Path) -> None:
    w = np.arange(5)
    sw.save(tmp_path / "c", {"m": {"a": w, "b": w}})
    back = sw.restore(tmp_path / "c", like={"m": {"a": np.zeros(5, int), "b": np.zeros(5, int)}})
    assert back["m"]["a"] is back["m"]["b"]


def test_what_was_overwritten_before_a_failure_is_named(tmp_path: Path) -> None:
    state = {"a": {"x": np.arange(200_000), "y": np.arange(200_000)}}
    sw.save(tmp_path / "c", state)
    data = tmp_path / "c" / "i0" / "00000.data"
    raw = bytearray(data.read_bytes())
    raw[2_500_000] ^= 1
    os.chmod(data, 0o644)
    data.write_bytes(raw)
    into = {"a": {"x": np.zeros(200_000, int), "y": np.zeros(200_000, int)}}
    with pytest.raises(sw.CorruptCheckpoint) as caught:
        sw.restore(tmp_path / "c", into=into)
    assert caught.value.leaf == "a/y"
    assert caught.value.file is not None
    assert caught.value.block is not None
    touched = {f"a/{key}" for key, value in into["a"].items() if value.any()}
    assert touched <= set(caught.value.overwritten)
    with pytest.raises(sw.CorruptCheckpoint):
        sw.restore(tmp_path / "c")
    report = sw.verify(tmp_path / "c")
    assert not report.ok
    assert report.damages[0].leaves == ("a/y",)


def test_restored_memory_is_aligned_and_dense(tmp_path: Path) -> None:
    state = {
        "p": {f"w{i}": np.full(i + 1, i, np.float32) for i in range(2000)},
        "big": {"x": np.ones(3 << 20, np.uint8), "y": np.ones(9 << 20, np.uint8)},
    }
    sw.save(tmp_path / "c", state)
    back = sw.restore(tmp_path / "c")
    assert same(back, state)
    addresses = [a.__array_interface__["data"][0] for a in (*back["p"].values(), *back["big"].values())]
    assert all(address % 64 == 0 for address in addresses)
    pages = {address >> 21 for address in addresses[:2000]}
    assert len(pages) <= 6, "2000 small arrays of 8 MB lie in a few huge pages"
    assert all(a.flags.writeable for a in back["p"].values())


def test_memory_for_arrays_is_little_more_than_their_size(python: Callable[..., Any]) -> None:
    script = """
    import re
    import numpy as np
    from stepwell._restore.allocate import Allocator

    def resident():
        return int(re.search(r"RssAnon:\\s+(\\d+)", open("/proc/self/status").read())[1]) << 10

    for mebibytes in (0.3, 0.7, 2.05, 2.7, 4.1):
        size = int(mebibytes * 2**20)
        allocator = Allocator()
        before = resident()
        arrays = [allocator.empty((size,), np.dtype(np.uint8)) for _ in range(60)]
        for array in arrays:
            array[:] = 1
        more = resident() - before - 60 * size
        assert more < 8 << 20, f"60 arrays of {mebibytes} MiB: {more >> 20} MiB more"
        del arrays, array
    """
    done = python(textwrap.dedent(script))
    assert done.returncode == 0, done.stderr


def test_options_that_make_no_sense_say_so(path: Path) -> None:
    for wrong in (
        {"missing": "ignore"},
        {"unexpected": "keep"},
        {"cast": "maybe"},
        {"resize": "yes"},
        {"include": [3]},
        {"include": "a[b"},
    ):
        with pytest.raises(sw.MisuseError):
            sw.restore(path, like=zeros(), **wrong)
    with pytest.raises(sw.MisuseError):
        sw.restore(path, like=zeros(), into=zeros())


def test_keys_keep_their_order_of_the_target(path: Path) -> None:
    like = OrderedDict(step=0, params=sw.AS_STORED)
    assert list(sw.restore(path, like=like)) == ["step", "params"]


def test_names_at_the_top_may_be_left_out_and_places_may_not(tmp_path: Path) -> None:
    z = np.zeros(2)
    two = [np.ones(2), np.ones(2)]
    sw.save(tmp_path / "list", two)
    sw.save(tmp_path / "dict", {"a": np.ones(2), "b": 1})
    sw.save(tmp_path / "leaf", np.ones(2))
    wrong: list[tuple[str, Any]] = [
        *(("list", target) for target in ([], (), {}, [z], (z,), {0: z}, deque([z]), [z, z, z], {"a": z})),
        *(("dict", target) for target in ([], (), [z], [z, 1], deque())),
        *(("leaf", target) for target in ([], (), {}, [z], {"a": z})),
    ]
    for name, target in wrong:
        for how in ("like", "into"):
            with pytest.raises(sw.MismatchError):
                sw.restore(tmp_path / name, **{how: target})
    assert not z.any()
    assert sw.restore(tmp_path / "dict", like={}) == {}
    assert sw.restore(tmp_path / "dict", like={"b": 0}) == {"b": 1}
    assert sw.restore(tmp_path / "list", like=[], unexpected="ignore") == []
    assert same(sw.restore(tmp_path / "list", like=(z, z)), tuple(two))
    assert same(sw.restore(tmp_path / "list", like={1: z, 0: z}), {1: two[1], 0: two[0]})


def test_an_empty_sequence_at_the_top_takes_a_plain_one(tmp_path: Path) -> None:
    for stored in ([1, 2], []):
        sw.save(tmp_path / "c", stored, exists="replace")
        assert sw.restore(tmp_path / "c", like=[]) == stored


def test_kept_rows_stay_and_need_a_value(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"w": np.ones((2, 3), np.float32)})
    frozen = np.full((4, 3), 7.0, np.float32)
    frozen.flags.writeable = False
    for own in (np.full((4, 3), 7.0, np.float32), np.full((4, 3), 7.0), np.full((4, 3), 7.0, ">f4"), frozen):
        back = sw.restore(tmp_path / "c", into={"w": own}, resize="keep")["w"]
        assert (back[:2] == 1).all()
        assert (back[2:] == 7).all()
        assert (back is own) == own.flags.writeable
    assert (frozen == 7).all()
    like = sw.restore(tmp_path / "c", like={"w": frozen}, resize={"w": "keep"})["w"]
    assert (like[2:] == 7).all()
    assert (like[:2] == 1).all()
    with pytest.raises(sw.MismatchError, match="shape"):
        sw.restore(tmp_path / "c", like={"w": sw.ArraySpec((4, 3), "float32")}, resize="keep")
    with pytest.raises(sw.MismatchError):
        sw.restore(tmp_path / "c", into={"w": np.zeros((1, 3), np.float32)}, resize="keep")
