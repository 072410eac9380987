"""A map shows a checkpoint under the names and in the shapes of another model, and back."""

from __future__ import annotations

import json
import re
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest
import stepwell as sw
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from stepwell._conversion import spec
from stepwell.maps.arrangement import Arrangement, concat
from stepwell.maps.patterns import Pattern
from stepwell.maps.rules import Rename
from stepwell.maps.values import Stored


def arange(*shape: int, dtype: str = "float32") -> np.ndarray:
    return np.arange(int(np.prod(shape)), dtype=dtype).reshape(shape)


def restored(path: Path, *rules: dict[str, object], **options: object) -> dict:
    return sw.restore(path, map=rules, **options)


@pytest.fixture
def qkv(tmp_path: Path) -> Path:
    """Query, key and value projections of two layers, with slots of an optimizer."""
    state: dict = {"optimizer": {"state": {}}}
    for layer in range(2):
        for name, rows in (("q", 16), ("k", 8), ("v", 8)):
            weight = arange(rows, 6) + 1000 * layer + 100 * ord(name)
            state[f"layers.{layer}.{name}.weight"] = weight
            slots = {"exp_avg": weight * 2, "step": np.array(7)}
            state["optimizer"]["state"][f"layers.{layer}.{name}.weight"] = slots
    sw.save(tmp_path / "qkv", state)
    return tmp_path / "qkv"


FUSE: dict[str, object] = {
    "concat": ["layers.{i}.q.weight", "layers.{i}.k.weight", "layers.{i}.v.weight"],
    "to": "layers.{i}.qkv.weight",
    "groups": 4,
    "sizes": [2, 1, 1],
}


def fused(state: dict, layer: int, slot: str | None = None) -> np.ndarray:
    def of(name: str) -> np.ndarray:
        key = f"layers.{layer}.{name}.weight"
        return state[key] if slot is None else state["optimizer"]["state"][key][slot]

    groups = [
        (of("q")[4 * g : 4 * g + 4], of("k")[2 * g : 2 * g + 2], of("v")[2 * g : 2 * g + 2]) for g in range(4)
    ]
    return np.concatenate([part for group in groups for part in group])


def test_projections_are_fused_by_groups_with_their_slots(qkv: Path) -> None:
    plain, mapped = sw.restore(qkv), restored(qkv, FUSE)
    for layer in range(2):
        name = f"layers.{layer}.qkv.weight"
        np.testing.assert_array_equal(mapped[name], fused(plain, layer))
        slots = mapped["optimizer"]["state"][name]
        np.testing.assert_array_equal(slots["exp_avg"], fused(plain, layer, "exp_avg"))
        assert slots["step"] == 7
    assert set(mapped) == {"layers.0.qkv.weight", "layers.1.qkv.weight", "optimizer"}


def test_the_inverse_gives_the_same_back(qkv: Path, tmp_path: Path) -> None:
    plain = sw.restore(qkv)
    sw.save(tmp_path / "fused", restored(qkv, FUSE))
    back = sw.restore(tmp_path / "fused", map=sw.maps.Map([FUSE]).inverse())
    for name, value in plain.items():
        if name != "optimizer":
            np.testing.assert_array_equal(back[name], value)
            np.testing.assert_array_equal(
                back["optimizer"]["state"][name]["exp_avg"], plain["optimizer"]["state"][name]["exp_avg"]
            )


def test_a_mapped_restore_fills_a_model_in_place(qkv: Path) -> None:
    model = {f"layers.{layer}.qkv.weight": np.zeros((32, 6), np.float32) for layer in range(2)}
    kept = dict(model)
    sw.restore(qkv, into=model, map=[FUSE])
    for layer in range(2):
        name = f"layers.{layer}.qkv.weight"
        assert model[name] is kept[name]
        np.testing.assert_array_equal(model[name], fused(sw.restore(qkv), layer))


def test_two_leaves_at_one_place_of_a_stack_are_refused(tmp_path: Path) -> None:
    sw.save(tmp_path / "s", {f"a.{i}.{name}": arange(2, 2) for i in range(2) for name in "xy"})
    with pytest.raises(sw.MisuseError, match=r"`a.0.x` and `a.0.y` at the same place"):
        sw.restore(tmp_path / "s", map=[{"stack": "a.{i}.{name}", "to": "x", "over": "i"}])


def test_layers_are_stacked_and_unstacked(tmp_path: Path) -> None:
    state = {f"h.{i}.w": arange(3, 4) + i for i in range(12)}
    sw.save(tmp_path / "many", state)
    for axis in (0, 1, 2):
        rule = {"stack": "h.{i}.w", "to": "h.w", "over": "i", "axis": axis}
        stacked = restored(tmp_path / "many", rule)["h.w"]
        np.testing.assert_array_equal(stacked, np.stack([state[f"h.{i}.w"] for i in range(12)], axis))
        sw.save(tmp_path / f"one{axis}", {"h.w": stacked})
        back = sw.restore(tmp_path / f"one{axis}", map=sw.maps.Map([rule]).inverse())
        assert list(back) == list(state)
        assert all((back[name] == state[name]).all() for name in state)


def test_axes_rows_and_vocabularies_change(tmp_path: Path) -> None:
    state = {"w": arange(2, 3, 4), "rows": arange(8, 5), "embed": arange(10, 2), "bias": arange(3)}
    sw.save(tmp_path / "c", state)
    rules: list[dict[str, object]] = [
        {"permute": "w", "axes": [2, 0, 1]},
        {"rotary": "rows", "heads": 2, "to": "halves"},
        {"crop": "embed", "size": 7},
    ]
    mapped = restored(tmp_path / "c", *rules)
    np.testing.assert_array_equal(mapped["w"], state["w"].transpose(2, 0, 1))
    halves = state["rows"].reshape(2, 2, 2, 5).transpose(0, 2, 1, 3).reshape(8, 5)
    np.testing.assert_array_equal(mapped["rows"], halves)
    np.testing.assert_array_equal(mapped["embed"], state["embed"][:7])
    np.testing.assert_array_equal(mapped["bias"], state["bias"])
    both = [*rules[:2], *({**rule} for rule in ({"rotary": "rows", "heads": 2, "to": "pairs"},))]
    np.testing.assert_array_equal(restored(tmp_path / "c", *both)["rows"], state["rows"])


def test_names_lists_and_objects_are_kept(tmp_path: Path) -> None:
    state = {"a": {"list": [arange(2), 3, {"x": (1.5, arange(1))}], "empty": {}}, "b": "text"}
    sw.save(tmp_path / "c", state)
    mapped = restored(tmp_path / "c", {"rename": "a", "to": "moved/here"}, {"rename": "b", "to": "c"})
    assert mapped["moved"]["here"]["list"][1] == 3
    assert mapped["moved"]["here"]["list"][2]["x"][0] == 1.5
    assert mapped["c"] == "text"
    assert set(mapped) == {"moved", "c", "a"}
    assert mapped["a"] == {"empty": {}}
    alone = restored(tmp_path / "c", {"rename": "a/list", "to": "list"})
    assert isinstance(alone["list"], list)
    assert isinstance(alone["list"][2]["x"], tuple)


def test_entries_of_a_list_may_get_names(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", [arange(3), {"lr": 0.1}])
    mapped = restored(tmp_path / "c", {"rename": "[0]", "to": "w"}, {"rename": "[1]", "to": "args"})
    assert list(mapped) == ["w", "args"]
    np.testing.assert_array_equal(mapped["w"], arange(3))
    assert mapped["args"] == {"lr": 0.1}
    with pytest.raises(sw.MisuseError, match="gives names to a part of this list; map all of its entries"):
        restored(tmp_path / "c", {"rename": "[0]", "to": "w"})


def test_ties_stay_and_are_added(tmp_path: Path) -> None:
    shared = arange(4, 4)
    sw.save(tmp_path / "c", {"embed": shared, "head": shared, "other": arange(2)})
    mapped = restored(tmp_path / "c", {"rename": "embed", "to": "wte"}, {"tie": "other", "to": "copy"})
    assert mapped["wte"] is mapped["head"]
    assert mapped["other"] is mapped["copy"]


def test_a_tied_leaf_is_a_tensor_for_every_rule(tmp_path: Path) -> None:
    shared = arange(4, 4)
    sw.save(tmp_path / "c", {"a": shared, "b": shared, "c": shared})
    joined = restored(tmp_path / "c", {"concat": ["a", "b"], "to": "ab"})
    np.testing.assert_array_equal(joined["ab"], np.concatenate([shared, shared]))
    np.testing.assert_array_equal(joined["c"], shared)
    cut = restored(tmp_path / "c", {"split": "b", "to": ["x", "y"]})
    np.testing.assert_array_equal(cut["y"], shared[2:])
    for first, other in (("a", "b"), ("b", "a"), ("c", "a")):
        turned = restored(tmp_path / "c", {"permute": first, "axes": [1, 0]})
        np.testing.assert_array_equal(turned[first], shared.T)
        np.testing.assert_array_equal(turned[other], shared)
        gone = restored(tmp_path / "c", {"drop": first})
        np.testing.assert_array_equal(gone[other], shared)
        assert first not in gone
        parts = restored(tmp_path / "c", {"unstack": first, "to": "{i}", "over": "i"})
        np.testing.assert_array_equal(parts["3"], shared[3])
        np.testing.assert_array_equal(parts[other], shared)


def test_foreign_files_are_mapped_too(tmp_path: Path) -> None:
    numpy_file = pytest.importorskip("safetensors.numpy")
    state = {f"h.{i}.w": arange(3, 2) * i for i in range(3)}
    numpy_file.save_file(state, tmp_path / "model.safetensors")
    rule = {"stack": "h.{i}.w", "to": "h", "over": "i"}
    with sw.open(tmp_path / "model.safetensors", map=[rule]) as checkpoint:
        np.testing.assert_array_equal(checkpoint["h"][1:, 2], np.stack(list(state.values()))[1:, 2])


def test_a_map_is_read_from_toml(qkv: Path, tmp_path: Path) -> None:
    file = tmp_path / "map.toml"
    file.write_text(
        '[[rule]]\nconcat = ["layers.{i}.q.weight", "layers.{i}.k.weight"]\nto = "layers.{i}.qk"\n'
        '[[rule]]\ndrop = "optimizer{rest...}"\n'
    )
    state = sw.restore(qkv)
    mapped = sw.restore(qkv, map=file)
    both = np.concatenate([state["layers.1.q.weight"], state["layers.1.k.weight"]])
    np.testing.assert_array_equal(mapped["layers.1.qk"], both)
    assert "optimizer" not in mapped


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (None, "is no file"),
        ("[[rule", "no valid TOML"),
        ("[map]\n", "[[rule]] tables were expected, not map"),
    ],
)
def test_a_file_that_is_no_map_is_refused(qkv: Path, tmp_path: Path, text: str | None, says: str) -> None:
    file = tmp_path / "map.toml"
    if text is not None:
        file.write_text(text)
    with pytest.raises(sw.MisuseError, match=re.escape(says)):
        sw.restore(qkv, map=file)


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (
            {"rename": "layer.{i}.q.weight", "to": "x"},
            "matches no leaf; near it are layers.1.q.weight, layers.0.q.weight",
        ),
        ({"rename": "layers.{i}.q.weight", "to": "q"}, "and to `optimizer/state/layers.1.q.weight/exp_avg`"),
        ({"rename": "layers.0.q.weight", "to": "layers.0.k.weight"}, "another leaf has it"),
        (
            {"concat": ["layers.{i}.q.weight", "layers.0.k.weight"], "to": "x.{i}"},
            "which `layers.0.k.weight` lacks",
        ),
        ({**FUSE, "groups": 3}, "16 elements are not 3 groups"),
        (
            {"concat": ["layers.{i}.q.weight", "layers.{i}.v.weight"], "to": "{i}", "axis": 1},
            "differ beside axis 1",
        ),
        ({"split": "layers.{i}.q.weight", "to": ["a.{i}", "b.{i}"], "sizes": [2, 1]}, "shares [2, 1]"),
        ({"split": "layers.{i}.q.weight", "to": ["a.{i}"], "sizes": [2, 1]}, "2 sizes for 1 parts"),
        ({"stack": "layers.{i}.{n}.weight", "to": "{n}", "over": "n"}, "{n} is a capture of `stack`"),
        ({"stack": "layers.{i}.{n}.weight", "to": "{i}", "over": "n"}, "{n} is 'q', not a number"),
        ({"unstack": "layers.{i}.q.weight", "to": "{i}.{n}", "over": "n", "axis": 2}, "has no axis 2"),
        ({"crop": "layers.{i}.q.weight", "size": 17}, "16 elements along axis 0, not 17"),
        ({"rotary": "layers.{i}.q.weight", "heads": 3, "to": "pairs"}, "not 3 heads"),
        (
            {"rotary": "layers.{i}.q.weight", "heads": 2, "to": "x"},
            "cannot be str 'x': it is halves or pairs",
        ),
        (
            {"crop": "layers.{i}.q.weight", "size": 1, "axis": -1},
            "cannot be int -1: it is an integer, at least 0",
        ),
        ({"rename": "layers.{i.q.weight", "to": "x"}, "{i has no closing brace"),
        ({"permute": "layers.{i}.q.weight", "axes": [0, 2]}, "`axes` cannot be"),
        ({"renam": "a", "to": "b"}, "did you mean rename?"),
        ({"rename": "a", "drop": "b"}, "has 2 operations"),
        ({"rename": "layers.0.q.weight", "to": "a", "axis": 0}, "`axis` is not known here"),
        ({"drop": 3}, "`drop` cannot be"),
        ({"drop": "layers.{i²}.q.weight"}, "the name of the capture {i²} is not ASCII"),
        ({"scale": "layers.0.q.weight", "by": 10**400}, "`by` cannot be int 1000"),
        ({"crop": "layers.0.q.weight", "size": 10**5000}, "`size` cannot be int of more digits"),
        ({"pad": "layers.0.q.weight", "size": 10**400}, "`size` cannot be int 1000"),
    ],
)
def test_a_rule_that_does_not_fit_is_named(qkv: Path, rule: dict[str, object], says: str) -> None:
    with pytest.raises(sw.MisuseError, match=re.escape(says)):
        restored(qkv, rule)


def without_elements(path: Path, name: str, *shape: int) -> Path:
    """A file of safetensors with one tensor."""
    header = json.dumps({name: {"dtype": "U8", "shape": shape, "data_offsets": [0, 0]}}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    return path


def test_a_capture_may_have_any_ascii_name(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"a.b": np.ones(1), "model": {"a.c": np.zeros(1)}})
    rule = {"rename": "a.{before_}", "to": "{before_}.{before_}"}
    assert set(restored(tmp_path / "c", rule)) == {"b.b", "model"}
    rule = {"rename": "{after_}.{_}", "to": "{_}.{after_}"}
    assert set(restored(tmp_path / "c", rule)["model"]) == {"c.a"}


@pytest.mark.parametrize(
    ("name", "shape", "rule", "says"),
    [
        (
            "layers.50000000.q",
            (0,),
            {"stack": "layers.{i}.q", "to": "q", "over": "i"},
            "leaf `q`: of {i}, 0, 1, 2, 3, 4, 5, 6, 7 is missing (rule 1",
        ),
        (
            f"layers.{'9' * 5000}.q",
            (0,),
            {"stack": "layers.{i}.q", "to": "q", "over": "i"},
            "{i} has 5000 digits, more than 9 (rule 1",
        ),
        (
            "w",
            (3_000_000, 0),
            {"unstack": "w", "to": "w.{i}", "over": "i"},
            "leaf `w`: the rule makes 3000000 leaves",
        ),
        (
            "w",
            (1 << 40, 0),
            {"rotary": "w", "heads": 2, "to": "pairs"},
            "leaf `w`: the rule makes 549755813888 pieces",
        ),
    ],
    ids=["gap", "digits", "unstack", "rotary"],
)
def test_numbers_of_a_file_cost_neither_time_nor_memory(
    tmp_path: Path, name: str, shape: tuple[int, ...], rule: dict[str, object], says: str
) -> None:
    path = without_elements(tmp_path / "x.safetensors", name, *shape)
    begun = time.process_time()
    tracemalloc.start()
    with pytest.raises(sw.MisuseError, match=re.escape(says)):
        restored(path, rule)
    assert tracemalloc.get_traced_memory()[1] < 64 << 20
    tracemalloc.stop()
    assert time.process_time() - begun < 1


def test_a_rule_has_a_limit_for_all_of_its_leaves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.maps.rules._MAX_LEAVES", 8)
    monkeypatch.setattr("stepwell.maps.rules._MAX_PIECES", 8)
    sw.save(tmp_path / "c", {"a": arange(4, 2), "b": arange(4, 2)})
    rules: list[dict[str, object]] = [
        {"unstack": "{n}", "to": "{n}.{i}", "over": "i"},
        {"rotary": "{n}", "heads": 2, "to": "halves"},
    ]
    for rule in rules:
        restored(tmp_path / "c", rule)
    sw.save(tmp_path / "d", {"a": arange(4, 2), "b": arange(4, 2), "c": arange(2, 2)})
    with pytest.raises(sw.MisuseError, match=r"leaf `c`: the rule makes 10 leaves .*, more than 8"):
        restored(tmp_path / "d", rules[0])
    sw.save(tmp_path / "e", {"a": arange(4, 2), "b": arange(4, 2), "c": arange(4, 2)})
    with pytest.raises(sw.MisuseError, match=r"leaf `c`: the rule makes 12 pieces .*, more than 8"):
        restored(tmp_path / "e", rules[1])


def test_a_pattern_without_matches_is_refused_at_once() -> None:
    paths = [f"model.layers.{i}.mlp.experts.{i % 7}.weight" for i in range(100_000)]
    rename = Rename(Pattern("model.layer.{i}.mlp.experts.{n}.weight"), Pattern("x"))
    begun = time.process_time()
    with pytest.raises(sw.MisuseError, match=r"near it are model\.layers\."):
        rename.apply({path: Stored(leaf) for leaf, path in enumerate(paths)})
    assert time.process_time() - begun < 2


def test_rotary_keeps_a_tensor_without_rows(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"w": arange(0, 3)})
    assert restored(tmp_path / "c", {"rotary": "w", "heads": 2, "to": "pairs"})["w"].shape == (0, 3)


@pytest.mark.parametrize("to", ["safetensors", "npz"])
def test_an_exported_tie_has_a_way_back(tmp_path: Path, to: str) -> None:
    """An export holds tied tensors once, under the name that comes first in the state."""
    state = {"wte": arange(2, 3), "norm": arange(3)}
    ties = sw.maps.Map([{"tie": "wte", "to": "lm_head"}])
    sw.save(tmp_path / "c", state)
    file = tmp_path / f"c.{to}"
    sw.export(tmp_path / "c", file, to=to, map=ties)
    with sw.open(file) as checkpoint:
        assert set(checkpoint.paths()) == {"norm", "wte"}
    back = sw.restore(file, map=ties.inverse())
    assert set(back) == set(state)
    np.testing.assert_array_equal(back["wte"], state["wte"])


def test_the_inverse_of_a_tie_keeps_the_first_name(tmp_path: Path) -> None:
    ties = sw.maps.Map([{"tie": "{x}.w", "to": "{x}.z"}])
    sw.save(tmp_path / "c", {"a.w": arange(2), "b.w": arange(3), "slots": {"a.w": {"mu": arange(2)}}})
    both = sw.restore(tmp_path / "c", map=ties)
    sw.save(tmp_path / "both", both)
    del both["a.w"], both["slots"]["a.w"]
    sw.save(tmp_path / "second", both)
    for name in ("c", "both", "second"):
        back = sw.restore(tmp_path / name, map=ties.inverse())
        assert set(back) == {"a.w", "b.w", "slots"}
        assert set(back["slots"]) == {"a.w"}
        np.testing.assert_array_equal(back["a.w"], arange(2))
    again = sw.restore(tmp_path / "c", map=ties.inverse().inverse())
    assert again["a.w"] is again["a.z"]


def test_the_inverse_of_a_tie_loses_no_value(tmp_path: Path) -> None:
    untied = sw.maps.Map([{"tie": "embed", "to": "head"}]).inverse()
    tensors = {"embed": arange(40, 30), "head": arange(40, 30).copy(), "slots": {"embed": 1, "head": 1}}
    sw.save(tmp_path / "equal", tensors)
    assert sw.restore(tmp_path / "equal", map=untied)["slots"] == {"embed": 1}
    tensors["head"][39, 29] += 1
    others: list[dict[str, object]] = [
        tensors,
        {**tensors, "head": arange(40, 30).astype(np.float64)},
        {**tensors, "head": 3},
        {**tensors, "head": arange(40, 30), "slots": {"embed": 1, "head": 2}},
    ]
    for number, state in enumerate(others):
        sw.save(tmp_path / f"{number}", state)
        with pytest.raises(
            sw.MisuseError, match=r"the map keeps only `.*embed` of the two.*differ"
        ) as refused:
            sw.restore(tmp_path / f"{number}", map=untied)
        assert refused.value.leaf == ("slots/head" if number == 3 else "head")
        assert not untied.check(tmp_path / f"{number}")


def test_a_tie_needs_one_of_its_names(tmp_path: Path) -> None:
    ties = sw.maps.Map([{"tie": "{x}.w", "to": "{x}.z"}])
    sw.save(tmp_path / "neither", {"c": arange(2)})
    with pytest.raises(sw.MisuseError, match="matches no leaf"):
        sw.restore(tmp_path / "neither", map=ties.inverse())


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ({"concat": ["a", "b"], "to": "c", "axis": 2}, "`a`: its shape [2, 3] has no axis 2"),
        ({"concat": ["a", "b"], "to": "c", "axis": -3}, "`a`: its shape [2, 3] has no axis -3"),
        ({"concat": ["a", "row"], "to": "c", "axis": 1}, "`row`: its shape [3] has no axis 1"),
        ({"concat": ["text", "a"], "to": "c"}, "`text`: it is no tensor"),
        ({"split": "a", "to": ["x", "y"], "axis": 2}, "`a`: its shape [2, 3] has no axis 2"),
        ({"permute": "a", "axes": [0]}, "`a`: its shape [2, 3] does not fit axes [0]"),
        ({"permute": "a", "axes": [2, 1, 0]}, "`a`: its shape [2, 3] does not fit axes [2, 1, 0]"),
        ({"permute": "row", "axes": [1, 0]}, "`row`: its shape [3] does not fit axes [1, 0]"),
        ({"crop": "a", "size": 1, "axis": 2}, "`a`: its shape [2, 3] has no axis 2"),
        ({"pad": "a", "size": 9, "axis": 2}, "`a`: its shape [2, 3] has no axis 2"),
        ({"rotary": "a", "heads": 1, "to": "pairs", "axis": 2}, "`a`: its shape [2, 3] has no axis 2"),
        ({"permute": "layer", "axes": [1, 0]}, "`layer/bias`: its shape [3] does not fit axes [1, 0]"),
    ],
)
def test_a_tensor_without_the_axis_is_refused(tmp_path: Path, rule: dict[str, object], says: str) -> None:
    layer = {"weight": arange(2, 3), "bias": arange(3)}
    state = {"a": arange(2, 3), "b": arange(2, 3), "row": arange(3), "text": "x", "layer": layer}
    sw.save(tmp_path / "c", state)
    with pytest.raises(sw.MisuseError, match=re.escape(says)) as caught:
        restored(tmp_path / "c", rule)
    assert "Correct the rule" in str(caught.value)
    assert "rule 1 of the map" in str(caught.value)


def with_slots(path: Path, layout: str, name: str, a: object, b: object) -> Path:
    """Two parameters, each with a moment and one more slot."""
    moment = "exp_avg" if layout == "torch" else "mu"
    slots: dict = {moment: {"a": arange(2, 3), "b": arange(2, 3)}, name: {"a": a, "b": b}}
    if layout == "torch":
        slots = {key: {slot: one[key] for slot, one in slots.items()} for key in "ab"}
    sw.save(path, {"a": arange(2, 3), "b": arange(2, 3), "state": slots})
    return path


@pytest.mark.parametrize(
    ("layout", "name", "value"),
    [
        ("torch", "step", np.array(7.0)),
        ("torch", "step", 7),
        ("torch", "step", np.float32(3)),
        ("torch", "step", np.int64(-3)),
        ("optax", "v_row", np.zeros(1, np.float32)),
        ("optax", "v", np.zeros(1, np.float32)),
    ],
)
def test_equal_slots_without_the_axis_become_one(
    tmp_path: Path, layout: str, name: str, value: object
) -> None:
    path = with_slots(tmp_path / "c", layout, name, value, value)
    found = restored(path, {"concat": ["a", "b"], "to": "c", "axis": 1})["state"]
    assert (found["c"][name] if layout == "torch" else found[name]["c"]) == value
    parts = restored(path, {"split": "b", "to": ["x", "y"], "axis": 1, "sizes": [1, 2]})["state"]
    assert (parts["y"][name] if layout == "torch" else parts[name]["y"]) == value
    restored(path, {"permute": "a", "axes": [1, 0]}, {"pad": "b", "size": 9, "axis": 1})


@pytest.mark.parametrize(
    ("layout", "name", "a", "b"),
    [
        ("torch", "step", np.array(7.0), np.array(8.0)),
        ("torch", "step", 7, 8),
        ("torch", "step", 7, np.array(7)),
        ("torch", "step", np.float32(7), np.float32(8)),
        ("torch", "step", np.float32(7), np.float64(7)),
        ("torch", "step", np.float32(0.0), np.float32(-0.0)),
        ("optax", "v_row", np.zeros(1, np.float32), np.ones(1, np.float32)),
    ],
)
def test_slots_that_differ_are_not_lost(tmp_path: Path, layout: str, name: str, a: object, b: object) -> None:
    path = with_slots(tmp_path / "c", layout, name, a, b)
    with pytest.raises(sw.MisuseError, match=f"as `state/.*{name}.*, and they differ"):
        restored(path, {"concat": ["a", "b"], "to": "c", "axis": 1})


@pytest.mark.parametrize(
    ("rule", "is_warned"),
    [
        ({"rotary": "a", "heads": 1, "to": "pairs"}, True),
        ({"permute": "a", "axes": [1, 0]}, True),
        ({"pad": "a", "size": 9, "axis": 1}, True),
        ({"crop": "a", "size": 2, "axis": 1}, True),
        ({"split": "a", "to": ["x", "y"], "axis": 1, "sizes": [1, 3]}, True),
        ({"concat": ["a", "w.0"], "to": "c"}, True),
        ({"stack": "w.{i}", "to": "c", "over": "i"}, True),
        ({"scale": "a", "by": 2.0}, True),
        ({"cast": "a", "to": "bfloat16"}, False),
        ({"rename": "a", "to": "c"}, False),
        ({"tie": "a", "to": "c"}, False),
        ({"drop": "a"}, False),
    ],
)
@pytest.mark.parametrize("key", [0, "0"], ids=["torch.save", "DCP"])
def test_numbered_slots_beside_a_changed_tensor_warn(
    tmp_path: Path, recwarn: pytest.WarningsRecorder, key: object, rule: dict[str, object], is_warned: bool
) -> None:
    slots = {"state": {key: {"step": np.array(7.0), "exp_avg": arange(4, 4)}}, "param_groups": [{"lr": 0.1}]}
    weights = {name: arange(4, 4) for name in ("a", "w.0", "w.1")}
    sw.save(tmp_path / "c", {**weights, "optimizer": slots})
    restored(tmp_path / "c", rule)
    slot = "optimizer/state[0]/exp_avg" if key == 0 else "optimizer/state/0/exp_avg"
    if is_warned:
        (one,) = recwarn
        assert one.category is sw.maps.MapWarning
        assert f"do not follow the map: leaf `{slot}` stays as it is stored. Save slots by name" in str(
            one.message
        )
        assert one.filename == __file__
    recwarn.clear()
    sw.save(tmp_path / "weights", weights)
    restored(tmp_path / "weights", rule)
    assert not recwarn


#: Rules along each axis of parameters of the shape [2, 3].
ALONG_AXES: list[dict[str, object]] = [
    {"concat": ["a", "b"], "to": "c"},
    {"concat": ["a", "b"], "to": "c", "axis": 1},
    {"split": "a", "to": ["x", "y"]},
    {"split": "a", "to": ["x", "y", "z"], "axis": 1},
    {"permute": "a", "axes": [1, 0]},
    {"rotary": "a", "heads": 1, "to": "pairs"},
    {"crop": "a", "size": 1},
    {"pad": "a", "size": 8, "axis": 1},
    {"pad": "a", "size": 8, "from": 2},
    {"unstack": "a", "to": "a.{i}", "over": "i", "axis": 1},
]


@pytest.mark.parametrize("rule", ALONG_AXES)
@pytest.mark.parametrize(
    ("layout", "name", "shape"),
    [
        ("torch", "exp_avg_sq_row", (2,)),
        ("torch", "exp_avg_sq_col", (3,)),
        ("torch", "row_var", (2, 1)),
        ("torch", "col_var", (1, 3)),
        ("optax", "v_row", (3,)),
        ("torch", "absmax", (3, 2)),
    ],
)
def test_factors_are_never_cut_as_parameters(
    tmp_path: Path, layout: str, name: str, shape: tuple[int, ...], rule: dict[str, object]
) -> None:
    path = with_slots(tmp_path / "c", layout, name, arange(*shape), arange(*shape))
    with pytest.raises(sw.MisuseError, match=f"`state/.*{name}.*Drop it by a rule before this one") as caught:
        restored(path, rule)
    assert name in (caught.value.leaf or "")
    slots = {"drop": f"state/{{p}}/{name}" if layout == "torch" else f"state/{name}"}
    assert "state" in restored(path, slots, rule)


def test_factors_without_their_parameter_are_refused(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"nu": {"q": arange(4, 4)}, "v_row": {"q": arange(4)}})
    with pytest.raises(sw.MisuseError, match="`v_row/q`: it is a factor"):
        restored(tmp_path / "c", {"split": "q", "to": ["x", "y"]})


def test_placeholders_of_optax_stay_one_value(tmp_path: Path) -> None:
    path = with_slots(tmp_path / "c", "optax", "v", np.zeros(1, np.float32), np.zeros(1, np.float32))
    assert restored(path, {"concat": ["a", "b"], "to": "c"})["state"]["v"]["c"].shape == (1,)
    assert restored(path, {"pad": "a", "size": 8})["state"]["v"]["a"].shape == (1,)
    shapes = {"params": (2, 3), "v_row": (2,)}
    layers = {key: {f"layer.{i}": arange(*shape) for i in range(2)} for key, shape in shapes.items()}
    sw.save(tmp_path / "layers", layers)
    rule = {"stack": "layer.{i}", "to": "layers", "over": "i"}
    assert restored(tmp_path / "layers", rule)["v_row"]["layers"].shape == (2, 2)
    with pytest.raises(sw.MisuseError, match="is a factor"):
        restored(tmp_path / "layers", {**rule, "axis": 1})


def test_slots_of_other_layers_are_not_unstacked(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"params": {"q": arange(3, 2)}, "v_row": {"q": arange(2)}})
    with pytest.raises(sw.MisuseError, match="`v_row/q`: it has 2 elements along axis 0, not 3"):
        restored(tmp_path / "c", {"unstack": "q", "to": "q.{i}", "over": "i"})


def test_parts_that_are_missing_are_named(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"k": arange(2), "v": arange(2)})
    with pytest.raises(sw.MisuseError, match="of its 3 parts, only k, v are there, and not q"):
        restored(tmp_path / "c", {"concat": ["q", "k", "v"], "to": "qkv", "optional": True})
    sw.save(tmp_path / "two", {"0.q": arange(2), "1.q": arange(2)})
    with pytest.raises(sw.MisuseError, match=r"has `0\.q` and `1\.q` for the same part"):
        restored(tmp_path / "two", {"concat": ["{i}.q"], "to": "q"})


def test_a_capture_may_be_bounded_to_numbers(tmp_path: Path) -> None:
    names = [f"layers.{i}.w" for i in (0, 1, 2, 10, "x", "1" * 30)]
    sw.save(tmp_path / "c", {name: np.ones(1) for name in names})
    there = sw.maps.Map(
        [
            {"rename": "layers.{i<2}.w", "to": "first.{i<2}.w"},
            {"rename": "layers.{i>=3}.w", "to": "last.{i}.w"},
        ]
    )
    found = sw.restore(tmp_path / "c", map=there)
    assert sorted(found) == sorted(
        ["first.0.w", "first.1.w", "layers.2.w", "last.10.w", "layers.x.w", f"layers.{'1' * 30}.w"]
    )
    sw.save(tmp_path / "d", found)
    assert sorted(sw.restore(tmp_path / "d", map=there.inverse())) == sorted(names)
    (tmp_path / "map.toml").write_text(
        "parameters.n = {}\nrule = [{ keep = ['layers.{i<2 * n}.w', 'layers.{i>=n * 10}.{rest...}'] }]"
    )
    found = sw.restore(tmp_path / "c", map=sw.maps.recipe(tmp_path / "map.toml", n=1))
    assert sorted(found) == ["layers.0.w", "layers.1.w", "layers.10.w"]
    for wrong in ("{i<x}", "{i<}", "{i>=1.5}", "{i<-1}"):
        with pytest.raises(sw.MisuseError, match="takes a number, or"):
            sw.maps.Map([{"drop": f"layers.{wrong}.w"}])
    with pytest.raises(sw.MisuseError, match="no closing brace"):
        sw.maps.Map([{"drop": "layers.{i<2.w"}])


def test_a_capture_may_be_shifted(tmp_path: Path) -> None:
    state = {f"layers.{i}.w": np.array(at) for at, i in enumerate((*range(12), "x", "1" * 30))}
    sw.save(tmp_path / "c", state)
    there = sw.maps.Map([{"rename": "layers.{i+10}.w", "to": "mtp.{i}.w"}])
    found = sw.restore(tmp_path / "c", map=there)
    assert (found["mtp.0.w"], found["mtp.1.w"]) == (10, 11)
    assert len(found) == len(state)
    assert sum(name.startswith("layers.") for name in found) == 12
    sw.save(tmp_path / "d", {"mtp.0.w": np.array(7), "mtp.12.w": np.array(8)})
    assert sw.restore(tmp_path / "d", map=there.inverse()) == {"layers.10.w": 7, "layers.22.w": 8}
    (tmp_path / "map.toml").write_text(
        "parameters.n = {}\nrule = [{ rename = 'layers.{i}.w', to = 'all.{i+2 * n}.w' }]"
    )
    sw.save(tmp_path / "e", {"layers.3.w": np.array(1)})
    assert list(sw.restore(tmp_path / "e", map=sw.maps.recipe(tmp_path / "map.toml", n=4))) == ["all.11.w"]
    with pytest.raises(sw.MisuseError, match=r"shift by 8 takes numbers of at most 18 digits, not .*'x'"):
        sw.restore(tmp_path / "c", map=sw.maps.recipe(tmp_path / "map.toml", n=4))
    for wrong, says in (
        ("{i+}", "takes a number, or"),
        ("{i+1}.{i}", "is in .* twice"),
        ("{i}.{i+1}", "twice"),
    ):
        with pytest.raises(sw.MisuseError, match=says):
            sw.maps.Map([{"drop": f"layers.{wrong}.w"}])


def test_a_rename_may_need_another_leaf(tmp_path: Path) -> None:
    state = {
        "a.0.x": np.ones(1),
        "a.0.y": np.zeros(1),
        "a.1.x": np.ones(2),
        "s": {"a.0.y": {"m": np.ones(1)}},
    }
    sw.save(tmp_path / "c", state)
    rules = [{"rename": "a.{i}.x", "to": "b.{i}.x", "beside": "a.{i}.y"}]
    found = sw.restore(tmp_path / "c", map=rules)
    assert sorted(found) == ["a.0.y", "a.1.x", "b.0.x", "s"]
    sw.save(tmp_path / "d", found)
    back = sw.restore(tmp_path / "d", map=sw.maps.Map(rules).inverse())
    assert sorted(back) == sorted(state)
    # A slot belongs to the slot of the other parameter.
    sw.save(tmp_path / "e", {"s": {"a.0.x": {"m": np.ones(1)}, "a.0.y": {"n": np.ones(1)}}})
    assert "a.0.x" in sw.restore(tmp_path / "e", map=rules)["s"]
    with pytest.raises(sw.MisuseError, match=r"has the capture \{j\}"):
        sw.maps.Map([{"rename": "a.{i}.x", "to": "b.{i}.x", "beside": "a.{j}.y"}])


def test_copies_are_exported_and_ties_are_not(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"w": np.arange(3.0), "layers.4.n": np.ones(1), "layers.5.n": np.ones(1)})
    rules = [{"copy": "w", "to": "layers.{i}.w", "beside": "layers.{i}.n"}]
    sw.export(tmp_path / "c", tmp_path / "out.safetensors", map=rules)
    found = load_file(tmp_path / "out.safetensors")
    assert sorted(found) == ["layers.4.n", "layers.4.w", "layers.5.n", "layers.5.w", "w"]
    for name in ("layers.4.w", "layers.5.w", "w"):
        np.testing.assert_array_equal(found[name], np.arange(3.0))
    for wrong, says in (
        (
            {"copy": "v", "to": "layers.{i}.w", "beside": "layers.{i}.n"},
            "copies it from `v`, which is not there",
        ),
        ({"copy": "w", "to": "w", "beside": "layers.4.n"}, "copies it from `w`, and it is stored too"),
        ({"copy": "w", "to": "v", "beside": "layers.4.m"}, "matches no leaf"),
        ({"copy": "w", "to": "layers.{i}.w", "beside": "layers.4.n"}, r"has the capture \{i\}"),
    ):
        with pytest.raises(sw.MisuseError, match=says):
            sw.restore(tmp_path / "c", map=[wrong])
    with pytest.raises(sw.MisuseError, match=r"copy to `layers\.\{i\}\.w` has no way back"):
        sw.maps.Map(rules).inverse()


def test_rules_without_a_way_back_say_so() -> None:
    for rule in (
        {"concat": ["a", "b"], "to": "c"},
        {"crop": "a", "size": 3},
        {"drop": "a"},
        {"rename": "a.{i}.{j}", "to": "b.{i}"},
        {"tie": "a.{i}", "to": "b"},
    ):
        with pytest.raises(sw.MisuseError, match="no way back"):
            sw.maps.Map([rule]).inverse()


def test_a_plan_and_verify_know_mapped_checkpoints(qkv: Path) -> None:
    with sw.open(qkv, map=[FUSE]) as checkpoint:
        assert checkpoint.verify().ok
        plan = checkpoint.plan(like={"layers.0.qkv.weight": sw.AS_STORED})
        assert plan.nbytes == 32 * 6 * 4


def test_a_conversion_writes_the_mapped_tensors(qkv: Path, tmp_path: Path) -> None:
    numpy_file = pytest.importorskip("safetensors.numpy")
    plain = sw.restore(qkv)
    rules = [FUSE, {"drop": "optimizer{rest...}"}]
    made = sw.export(qkv, tmp_path / "fused", map=rules)
    assert made.verified
    found = numpy_file.load_file(tmp_path / "fused" / "model.safetensors")
    assert set(found) == {"layers.0.qkv.weight", "layers.1.qkv.weight"}
    np.testing.assert_array_equal(found["layers.1.qkv.weight"], fused(plain, 1))
    back = sw.restore(tmp_path / "fused", map=sw.maps.Map([FUSE]).inverse())
    np.testing.assert_array_equal(back["layers.1.k.weight"], plain["layers.1.k.weight"])


def test_plans_of_two_maps_are_two_plans(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"w": arange(4, 4)})

    def digest(rules: list[dict[str, object]]) -> bytes:
        with sw.open(tmp_path / "c", map=rules) as checkpoint:
            return spec.digest(checkpoint._open(), [], 1)

    turned: list[dict[str, object]] = [{"permute": "w", "axes": [1, 0]}]
    same: list[dict[str, object]] = [{"permute": "w", "axes": [0, 1]}]
    assert digest(turned) != digest(same)
    assert digest(turned) == digest(turned)


sizes = st.integers(1, 5)


@settings(max_examples=100, deadline=None)
@given(st.data())
def test_arrangements_are_what_numpy_makes(data: st.DataObject) -> None:
    """Random slices, permutations, new axes and concatenations of stored tensors."""
    stored = [data.draw(st.tuples(sizes, sizes, sizes)) for _ in range(2)]
    values = [arange(*shape, dtype="int64") + 1000 * leaf for leaf, shape in enumerate(stored)]
    pairs = [(Arrangement.whole(leaf, "int64", shape), values[leaf]) for leaf, shape in enumerate(stored)]
    for _ in range(data.draw(st.integers(0, 6))):
        arrangement, value = data.draw(st.sampled_from(pairs))
        axis = data.draw(st.integers(0, value.ndim - 1)) if value.ndim else None
        operation = data.draw(st.sampled_from(["take", "permute", "insert", "select", "concat"]))
        if axis is None or operation == "insert":
            pairs.append((arrangement.insert(0), value[np.newaxis]))
        elif operation == "take":
            step, start = data.draw(st.integers(1, 3)), data.draw(st.integers(0, value.shape[axis] - 1))
            count = data.draw(st.integers(1, -(-(value.shape[axis] - start) // step)))
            numbers = range(start, start + count * step, step)
            pairs.append((arrangement.take(axis, start, count, step), value.take(numbers, axis)))
        elif operation == "permute":
            order = data.draw(st.permutations(range(value.ndim)))
            pairs.append((arrangement.permute(order), value.transpose(order)))
        elif operation == "select":
            at = data.draw(st.integers(0, value.shape[axis] - 1))
            pairs.append((arrangement.select(axis, at), value.take(at, axis)))
        else:
            pairs.append((concat([arrangement, arrangement], axis), np.concatenate([value, value], axis)))
    for arrangement, value in pairs:
        assert arrangement.shape == value.shape
        found = np.full(value.shape, -1)
        for piece in arrangement.pieces:
            for place in np.ndindex(*piece.extent):
                at = list(piece.first)
                for (axis_of, step), number in zip(piece.axes, place, strict=True):
                    if axis_of is not None:
                        at[axis_of] += step * number
                target = tuple(first + number for first, number in zip(piece.start, place, strict=True))
                assert found[target] == -1
                found[target] = values[piece.source][tuple(at)]
        np.testing.assert_array_equal(found, value)
