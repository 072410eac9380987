"""Operations of a map that compute values give the bits of numpy, in every region and both ways."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import stepwell as sw
from command_line import flip_a_bit
from hypothesis import given, settings
from hypothesis import strategies as st
from memory import grown
from stepwell._conversion import spec
from stepwell._restore.array_reads import ArrayReads

BF16, FP8 = np.dtype(ml_dtypes.bfloat16), np.dtype(ml_dtypes.float8_e4m3fn)


def normal(*shape: int, dtype: object = "float32", seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


def saved(path: Path, **leaves: object) -> Path:
    sw.save(path, {name.replace("__", "."): value for name, value in leaves.items()})
    return path


def same(found: np.ndarray, expected: np.ndarray) -> None:
    """The same shape, dtype and bytes. All NaNs are the same."""
    assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
    wide = found.astype(np.float64), expected.astype(np.float64)
    np.testing.assert_array_equal(*wide)
    np.testing.assert_array_equal(
        np.signbit(wide[0]) | np.isnan(wide[0]), np.signbit(wide[1]) | np.isnan(wide[1])
    )


@pytest.mark.parametrize("dtype", ["float16", BF16, "float32", "float64"], ids=str)
@pytest.mark.parametrize("operation", ["scale", "add"])
def test_constants_give_what_numpy_gives(tmp_path: Path, dtype: object, operation: str) -> None:
    x = normal(70, 33, dtype=dtype) * np.dtype(dtype).type(3)
    path = saved(tmp_path / "c", x=x)
    key = {"scale": "by", "add": "value"}[operation]
    found = sw.restore(path, map=[{operation: "x", key: 0.3}])["x"]
    wide = np.float64 if x.dtype == np.float64 else np.float32
    constant = wide(0.3)
    computed = x.astype(wide) * constant if operation == "scale" else x.astype(wide) + constant
    same(found, computed.astype(dtype))


def rounded_to_odd(x: np.ndarray) -> np.ndarray:
    """As float32, with an odd last bit if it is not exact: a second rounding is then the only
    one."""
    narrow = x.astype(np.float32)
    wide = x.astype(np.float64)
    bits = narrow.view(np.uint32) - (np.abs(narrow.astype(np.float64)) > np.abs(wide))
    return np.where(narrow.astype(np.float64) == wide, narrow, (bits | 1).astype(np.uint32).view(np.float32))


@pytest.mark.parametrize(
    "source",
    ["float16", BF16, "float32", "float64", FP8, ml_dtypes.float8_e5m2, ml_dtypes.float8_e8m0fnu],
    ids=str,
)
@pytest.mark.parametrize("to", ["float16", "bfloat16", "float32", "float64"])
def test_casts_round_to_the_nearest_even(tmp_path: Path, source: object, to: str) -> None:
    close = [1 + 2.0**-11 + 2.0**-40, 1 + 2.0**-8 + 2.0**-40, 1 + 3 * 2.0**-8 - 2.0**-40]
    edges = [0.0, -0.0, np.nan, 1 + 2.0**-11, 1 + 2.0**-8, *close, *(-one for one in close)]
    x = np.concatenate([normal(3001, dtype="float64"), edges]).astype(source)
    target = BF16 if to == "bfloat16" else np.dtype(to)
    found = sw.restore(saved(tmp_path / "c", x=x), map=[{"cast": "x", "to": to}])["x"]
    same(found, (rounded_to_odd(x) if target == BF16 else x).astype(target))


def test_padding_is_added_and_cropped_again(tmp_path: Path) -> None:
    state = {
        "embed": normal(10, 4, dtype=BF16),
        "optimizer": {"embed": {"exp_avg": normal(10, 4), "step": np.array(3)}},
    }
    sw.save(tmp_path / "c", state)
    rules = [{"pad": "embed", "size": 16, "from": 10, "value": -2.5}]
    padded = sw.restore(tmp_path / "c", map=rules)
    same(padded["embed"], np.concatenate([state["embed"], np.full((6, 4), -2.5, BF16)]))
    slots = padded["optimizer"]["embed"]
    same(slots["exp_avg"], np.concatenate([state["optimizer"]["embed"]["exp_avg"], np.zeros((6, 4), "f4")]))
    assert slots["step"] == 3
    sw.save(tmp_path / "padded", padded)
    back = sw.restore(tmp_path / "padded", map=sw.maps.Map(rules).inverse())
    same(back["embed"], state["embed"])
    same(back["optimizer"]["embed"]["exp_avg"], state["optimizer"]["embed"]["exp_avg"])


def test_norms_plus_one_go_both_ways(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"norm.weight": normal(64) / 8, "other": normal(3)})
    rules = [{"add": "norm.weight", "value": 1}, {"scale": "other", "by": 0.25}]
    there = sw.restore(tmp_path / "c", map=rules)
    same(there["norm.weight"], normal(64) / 8 + np.float32(1))
    sw.save(tmp_path / "there", there)
    back = sw.restore(tmp_path / "there", map=sw.maps.Map(rules).inverse())
    same(back["norm.weight"], (normal(64) / 8 + np.float32(1)) - np.float32(1))
    same(back["other"], normal(3))


@pytest.mark.parametrize("layout", ["torch", "optax"])
def test_moments_follow_a_scaled_parameter(tmp_path: Path, layout: str) -> None:
    w, m, v = normal(8, 8), normal(8, 8, seed=1), normal(8, 8, seed=2) ** 2
    if layout == "torch":
        state: dict = {"w": w, "state": {"w": {"exp_avg": m, "exp_avg_sq": v, "step": np.array(1.0)}}}
    else:
        state = {"w": w, "state": {"mu": {"w": m}, "nu": {"w": v}, "count": np.array(1)}}
    sw.save(tmp_path / "c", state)
    found = sw.restore(tmp_path / "c", map=[{"scale": "w", "by": 4}, {"add": "w", "value": 1}])
    slots = found["state"]["w"] if layout == "torch" else {name: one for name, one in found["state"].items()}
    same(found["w"], w * 4 + 1)
    first, second = (
        (slots["exp_avg"], slots["exp_avg_sq"]) if layout == "torch" else (slots["mu"]["w"], slots["nu"]["w"])
    )
    same(first, m / 4)
    same(second, v / 16)


W = np.ones(2, np.float32)
T = {"w": W}
#: States in which `w` is a parameter, and the powers that its slots follow.
SLOTS: dict[str, tuple[Any, dict[str, int]]] = {
    "by hand": ({"params": T, "opt": {"m": T, "v": T}}, {"opt/m/w": -1, "opt/v/w": -2}),
    "beside": ({"w": W, "m": T, "v": T}, {"m/w": -1, "v/w": -2}),
    "alone": ({"params": T, "opt": [{"trace": T}]}, {"opt[0]/trace/w": -1}),
    "lists": ({"params": [T, T], "opt": [{"nu": [T, T]}]}, {f"opt[0]/nu[{i}]/w": -2 for i in range(2)}),
    "some": ({"params": {"a": T, "b": T}, "opt": {"mu": {"a": T}, "count": 1}}, {"opt/mu/a/w": -1}),
    "keys": ({"params/w": W, "opt/mu/w": W, "opt/nu/w": W}, {r"opt\/mu\/w": -1, r"opt\/nu\/w": -2}),
    "modules": (
        {"params": {"mu": T, "to": {"x": W}}, "opt": {"mu": {"mu": T, "to": {"x": W}}, "count": 1}},
        {"opt/mu/mu/w": -1},
    ),
    "attention": ({"params": {"q": T, "k": T, "v": T}}, {}),
    "module": ({"params": {"mu": T, "rest": {"x": W}}}, {}),
}


@pytest.mark.parametrize("name", SLOTS)
def test_slots_and_modules_are_told_apart(tmp_path: Path, name: str) -> None:
    state, powers = SLOTS[name]
    sw.save(tmp_path / "c", state)
    with sw.open(tmp_path / "c", map=[{"scale": "w", "by": 4}]) as found:
        parameters = [path for path in found.paths() if path.endswith("w")]
        assert powers.keys() < set(parameters)
        for path in parameters:
            same(found[path][:], W * np.float32(4.0) ** powers.get(path, 1))


@pytest.mark.parametrize(
    ("state", "name"),
    [
        ({"params": {"mu": T, "logvar": T}}, "params/mu"),
        ({"params": T, "mu": T, "nu": T}, "mu"),
        ({"params": T, "opt": {"m": T}}, "opt/m"),
        ({"opt": {"mu": T, "nu": T}}, "opt/mu"),
    ],
)
def test_a_module_that_may_be_a_slot_is_refused(tmp_path: Path, state: dict[str, Any], name: str) -> None:
    sw.save(tmp_path / "c", state)
    rules: list[dict[str, object]] = [
        {"scale": "w", "by": 4},
        {"add": "w", "value": 1},
        {"cast": "w", "to": "bfloat16"},
        {"pad": "w", "size": 4, "value": 1},
    ]
    for rule in rules:
        with pytest.raises(sw.MisuseError, match=f"`{name}` is a slot of an optimizer or a module"):
            sw.restore(tmp_path / "c", map=[rule])
    with sw.open(tmp_path / "c", map=[{"scale": f"{name}/w", "by": 4}]) as found:
        same(found[f"{name}/w"][:], W * 4)


def test_slots_keep_their_dtype_and_size(tmp_path: Path) -> None:
    slots = {"exp_avg": normal(10, 4), "master_param": normal(10, 4), "step": np.array(1.0)}
    sw.save(tmp_path / "c", {"params": {"v": {"w": normal(10, 4)}}, "state": {"w": slots}})
    rules = [{"cast": "w", "to": "bfloat16"}, {"pad": "w", "size": 12, "from": 10}]
    found = sw.restore(tmp_path / "c", map=rules)
    assert found["params"]["v"]["w"].dtype == BF16
    shapes = {name: (one.dtype.name, one.shape) for name, one in found["state"]["w"].items()}
    assert shapes == {
        "exp_avg": ("float32", (12, 4)),
        "master_param": ("float32", (12, 4)),
        "step": ("float64", ()),
    }
    below = sw.restore(tmp_path / "c", map=[{"cast": "params", "to": "bfloat16"}])
    assert below["params"]["v"]["w"].dtype == BF16


def quantised(rows: int, columns: int, block: int = 128) -> tuple[np.ndarray, np.ndarray]:
    scales = np.abs(normal(-(-rows // block), -(-columns // block), seed=5)) + np.float32(0.01)
    return normal(rows, columns, dtype=FP8, seed=4), scales


def dequantised(weight: np.ndarray, scales: np.ndarray, dtype: object, block: int = 128) -> np.ndarray:
    spread = np.repeat(np.repeat(scales, block, 0), block, 1)[: weight.shape[0], : weight.shape[1]]
    return (weight.astype(np.float32) * spread).astype(dtype)


DEQUANTISE = {"dequantise": "{name...}.weight", "scale": "{name...}.weight_scale_inv"}


@pytest.mark.parametrize("to", ["bfloat16", "float32"])
def test_quantised_weights_get_their_block_scales(tmp_path: Path, to: str) -> None:
    weight, scales = quantised(300, 515)
    scales[1, 2] = np.nan
    norm = normal(5, dtype=BF16)
    path = saved(tmp_path / "c", a__weight=weight, a__weight_scale_inv=scales, norm__weight=norm)
    rules = [{**DEQUANTISE, "to": to}]
    found = sw.restore(path, map=rules)
    assert set(found) == {"a.weight", "norm.weight"}
    expected = dequantised(weight, scales, BF16 if to == "bfloat16" else "float32")
    same(found["a.weight"], expected)
    same(found["norm.weight"], norm)
    with sw.open(path, map=rules) as checkpoint:
        same(checkpoint["a.weight"][100:260, 127:400], expected[100:260, 127:400])


@pytest.mark.parametrize(
    ("block", "shape"), [([1, 0], (6, 1)), ([0, 0], ()), ([0, 0], (1,)), ([0, 0], (1, 1)), ([1, 32], (6, 3))]
)
def test_scales_of_rows_and_tensors_and_powers_of_two(
    tmp_path: Path, block: list[int], shape: tuple[int, ...]
) -> None:
    weight = normal(6, 70, dtype=FP8)
    scales = np.exp2(np.arange(np.prod(shape, dtype=int)) - 5.0).astype("f4").reshape(shape)
    spread = np.repeat(np.broadcast_to(scales, (6, scales.shape[-1] if shape else 1)), 32, 1)[:, :70]
    if block[1] == 0:
        spread = np.broadcast_to(scales, (6, 1))
    for dtype in ("float32", ml_dtypes.float8_e8m0fnu):
        path = tmp_path / str(np.dtype(dtype))
        sw.save(path, {"w": weight, "s": scales.astype(dtype)})
        found = sw.restore(path, map=[{"dequantise": "w", "scale": "s", "block": block, "to": "float32"}])
        same(found["w"], weight.astype("f4") * spread)


def merged(w: np.ndarray, a: np.ndarray, b: np.ndarray, scale: float) -> np.ndarray:
    product = np.zeros(w.shape)
    for k in range(len(a)):
        product += b[:, k, None].astype("f8") * a[None, k].astype("f8")
    return (w.astype("f8") + scale * product).astype(w.dtype)


@pytest.mark.parametrize(
    ("factor", "scale"), [({"alpha": 12}, 3.0), ({"alpha": 12, "rslora": True}, 6.0), ({"scale": 0.5}, 0.5)]
)
def test_adapters_are_merged(tmp_path: Path, factor: dict[str, object], scale: float) -> None:
    w, a, b = normal(40, 30), normal(4, 30, seed=1), normal(40, 4, seed=2)
    path = saved(tmp_path / "c", m__weight=w, base__m__lora_A=a, base__m__lora_B=b, n__weight=w)
    rule = {"merge": "{m}.weight", "a": "base.{m}.lora_A", "b": "base.{m}.lora_B", **factor}
    found = sw.restore(path, map=[rule])
    assert set(found) == {"m.weight", "n.weight"}
    same(found["m.weight"], merged(w, a, b, scale))
    same(found["n.weight"], w)


def all_rules() -> list[dict[str, object]]:
    return [
        {"merge": "w", "a": "a", "b": "b", "scale": 0.5},
        {"scale": "w", "by": 3},
        {"permute": "w", "axes": [1, 0]},
        {"cast": "q.weight", "to": "float32", "optional": True},
        {**DEQUANTISE, "block": [8, 16], "to": "float32"},
        {"concat": ["w", "q.weight"], "to": "both"},
        {"pad": "both", "size": 80, "axis": 1, "value": 7},
        {"rotary": "both", "heads": 2, "to": "halves"},
        {"add": "both", "value": 1},
    ]


def many(path: Path) -> np.ndarray:
    """A checkpoint for :func:`all_rules`, and the tensor that they make."""
    w, a, b = normal(50, 20), normal(3, 20, seed=1), normal(50, 3, seed=2)
    q = normal(20, 50, dtype=FP8, seed=3)
    scales = np.abs(normal(3, 4, seed=4))
    sw.save(path, {"w": w, "a": a, "b": b, "q.weight": q, "q.weight_scale_inv": scales})
    left = (merged(w, a, b, 0.5) * np.float32(3)).T
    right = q.astype("f4") * np.repeat(np.repeat(scales, 8, 0), 16, 1)[:20, :50]
    both = np.pad(np.concatenate([left, right]), ((0, 0), (0, 30)), constant_values=7)
    return both.reshape(2, 10, 2, 80).transpose(0, 2, 1, 3).reshape(40, 80) + np.float32(1)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_every_region_has_the_bits_of_the_whole(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.getbasetemp() / "regions"
    if not path.exists():
        many(path)
    rules = [rule for rule in all_rules() if "cast" not in rule]
    with sw.open(path, map=rules) as checkpoint:
        whole = checkpoint["both"][()]
        rows, columns = (
            sorted(data.draw(st.tuples(st.integers(0, n), st.integers(0, n)))) for n in whole.shape
        )
        part = checkpoint["both"][rows[0] : rows[1], columns[0] : columns[1]]
        same(part, whole[rows[0] : rows[1], columns[0] : columns[1]])


def test_operations_follow_one_another(tmp_path: Path) -> None:
    expected = many(tmp_path / "c")
    rules = [rule for rule in all_rules() if "cast" not in rule]
    same(sw.restore(tmp_path / "c", map=rules)["both"], expected)
    into = {"both": np.zeros((40, 80), "f4")}
    kept = into["both"]
    sw.restore(tmp_path / "c", map=rules, into=into)
    assert into["both"] is kept
    same(kept, expected)
    turned = np.zeros((80, 40), "f8").T
    sw.restore(tmp_path / "c", map=rules, into={"both": turned}, cast="lossless")
    np.testing.assert_array_equal(turned, expected)


@pytest.mark.parametrize("to", ["safetensors", "npz", "torch", "dcp", "stepwell"])
def test_conversions_write_computed_tensors(tmp_path: Path, to: str) -> None:
    expected = many(tmp_path / "c")
    rules = [rule for rule in all_rules() if "cast" not in rule]
    planned = sw.convert(tmp_path / "c", tmp_path / "out", to=to, map=rules, dry_run=True)
    assert planned.nbytes >= expected.nbytes
    assert not (tmp_path / "out").exists()
    made = sw.export(tmp_path / "c", tmp_path / "out", to=to, map=rules)
    assert made.verified
    same(sw.restore(tmp_path / "out")["both"], expected)
    narrow = sw.export(tmp_path / "c", tmp_path / "narrow", to=to, map=rules, cast="float16")
    assert narrow.verified
    same(sw.restore(tmp_path / "narrow")["both"], expected.astype("f2"))


def test_a_large_tensor_is_computed_cell_by_cell(tmp_path: Path) -> None:
    weight, scales = quantised(1500, 2100)
    w, a, b = normal(1500, 2100), normal(8, 2100, seed=1), normal(1500, 8, seed=2)
    leaves = {"a__weight": weight, "a__weight_scale_inv": scales, "w": w, "la": a, "lb": b}
    path = saved(tmp_path / "c", **leaves)
    rules: list[dict[str, object]] = [
        {**DEQUANTISE, "to": "float32"},
        {"merge": "w", "a": "la", "b": "lb", "scale": 2},
    ]
    found = sw.restore(path, map=rules)
    same(found["a.weight"], dequantised(weight, scales, "float32"))
    same(found["w"], merged(w, a, b, 2.0))
    sw.export(path, tmp_path / "out", map=rules)
    same(sw.restore(tmp_path / "out")["w"], found["w"])


def test_plans_and_checks_know_computed_leaves(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", x=normal(100, 10), y=normal(3))
    with sw.open(path, map=[{"cast": "x", "to": "bfloat16"}]) as checkpoint:
        plan = checkpoint.plan(like={"x": sw.AS_STORED})
        assert plan.nbytes == 100 * 10 * 4
        assert checkpoint.verify().ok
        with pytest.raises(sw.MisuseError, match=r"leaf `x`: a map computes it.*in one map"):
            sw.convert(checkpoint, tmp_path / "out", to="npz", map=[{"rename": "y", "to": "z"}])


def test_damage_below_a_computed_leaf_is_found(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", x=normal(1000))
    flip_a_bit(path / "i0" / "00000.data")
    target = np.zeros(1000, "f4")
    with pytest.raises(sw.CorruptCheckpoint, match="x"):
        sw.restore(path, map=[{"scale": "x", "by": 2}], into={"x": target})
    np.testing.assert_array_equal(target, 0)


def test_ranks_read_their_parts_of_computed_leaves(tmp_path: Path) -> None:
    expected = many(tmp_path / "c")
    rules = [rule for rule in all_rules() if "cast" not in rule]
    for rows in (slice(0, 13), slice(13, 40)):
        local = np.zeros((rows.stop - rows.start, 33), "f4")
        shard = sw.sharding.LocalShard(local, global_shape=(40, 80), offset=(rows.start, 40))
        sw.restore(tmp_path / "c", map=rules, into={"both": shard})
        same(local, expected[rows, 40:73])


def test_restores_that_compute_need_at_most_64_mib_more(tmp_path: Path) -> None:
    weight, scales = quantised(8192, 8192)
    w, a, b = normal(4096, 8192), normal(256, 8192, dtype=BF16), normal(4096, 256, dtype=BF16)
    sw.save(tmp_path / "c", {"q": weight, "s": scales, "w": w, "a": a, "b": b})
    growth = grown(
        "import sys, numpy as np, stepwell as sw\n"
        "rules = [dict(dequantise='q', scale='s', to='float32'), dict(merge='w', a='a', b='b', alpha=1)]\n"
        "state = {'q': np.ones((8192, 8192), 'f4'), 'w': np.ones((4096, 8192), 'f4')}\n"
        "print(growth(lambda: sw.restore(sys.argv[1], map=rules, into=state)))\n",
        tmp_path / "c",
    )
    # The read buffers, what computing needs, and 16 MiB for the rest of the process.
    assert growth < (64 + 64 + 16) << 20


def test_conversions_that_compute_keep_to_their_memory(tmp_path: Path) -> None:
    weight, scales = quantised(8192, 8192)
    w, a, b = normal(2048, 8192), normal(256, 8192, dtype=BF16), normal(2048, 256, dtype=BF16)
    sw.save(tmp_path / "c", {"q": weight, "s": scales, "w": w, "a": a, "b": b})
    growth = grown(
        "import sys, stepwell as sw\n"
        "from stepwell._conversion import files\n"
        "files._BUDGET_BYTES = 160 << 20\n"
        "rules = [dict(dequantise='q', scale='s', to='float32'), dict(merge='w', a='a', b='b', alpha=1)]\n"
        "print(growth(lambda: sw.convert(sys.argv[1], sys.argv[2], to='safetensors', map=rules)))\n",
        tmp_path / "c",
        tmp_path / "out",
    )
    assert growth < (160 + 32) << 20
    same(
        sw.restore(tmp_path / "out")["w"][::512, ::512],
        merged(w[::512, ::512], a[:, ::512], b[::512], 1 / 256),
    )


def test_adapters_of_a_large_merge_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    w, a, b = normal(1024, 1024), normal(1024, 1024, seed=1), normal(1024, 1024, seed=2)
    path = saved(tmp_path / "c", w=w, a=a, b=b)
    read, nbytes = ArrayReads._read, []
    monkeypatch.setattr(ArrayReads, "_read", lambda *given: nbytes.append(read(*given)))
    found = sw.restore(path, map=[{"merge": "w", "a": "a", "b": "b", "scale": 0.5}])["w"]
    same(found[::64], merged(w[::64], a, b[::64], 0.5))
    # Cells of one block are not always read together.
    assert sum(nbytes) < 2 * (w.nbytes + a.nbytes + b.nbytes)


def test_a_value_that_overflows_is_refused(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", x=np.array([1.0, 1e30], "f4"))
    for rule in ({"cast": "x", "to": "float16"}, {"scale": "x", "by": 1e10}):
        with pytest.raises(sw.StepwellError, match=r"`x`.*too large for float.*wider dtype"):
            sw.restore(path, map=[rule])
        with pytest.raises(sw.StepwellError, match="too large"):
            sw.convert(path, tmp_path / "out", to="npz", map=[rule])
        assert sorted(entry.name for entry in tmp_path.iterdir()) == ["c"]
    finite = saved(tmp_path / "d", x=np.array([np.inf, -np.inf, np.nan], "f4"))
    same(sw.restore(finite, map=[{"scale": "x", "by": -2}])["x"], np.array([-np.inf, np.inf, np.nan], "f4"))


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        ({"cast": "x", "to": "int8"}, "`to` cannot be str 'int8': it is one of float16, bfloat16, float32"),
        (
            {"cast": "x", "to": "float16", "from": "bfloat16"},
            "`x`: the map casts it from bfloat16, and it is float32",
        ),
        ({"scale": "n", "by": 2}, "leaf `n`: it is int32; scale takes"),
        ({"scale": "object", "by": 2}, "leaf `object`: it is an object"),
        ({"scale": "x", "by": 0}, "`by` cannot be int 0: it is a number between 1e-18 and 1e18"),
        ({"dequantize": "q", "scale": "s"}, "`dequantize` is no operation; did you mean dequantise?"),
        ({"add": "x", "value": float("nan")}, "`value` cannot be float nan"),
        ({"pad": "x", "size": 3}, "it has 4 elements along axis 0, more than 3"),
        ({"pad": "x", "size": 9, "from": 5}, "it has 4 elements along axis 0, not 5"),
        ({"pad": "n", "size": 9, "value": 1}, "pads with zeros only"),
        ({"pad": "x", "size": 9, "from": 10}, "`from` is 10, more than `size`"),
        ({"pad": "y", "size": 9, "value": 1}, "pad does not know what the slot `odd`"),
        ({"scale": "y", "by": 2}, "does not know what the slot `odd` of its optimizer holds"),
        ({"dequantise": "q", "scale": "x"}, "`x`: its shape is [4, 6]; `q` has [1, 1] blocks"),
        ({"dequantise": "q", "scale": "object"}, "`object`: it is an object, and not the scales of `q`"),
        ({"dequantise": "q", "scale": "none"}, "`q`: its scales `none` are missing"),
        ({"dequantise": "x", "scale": "none"}, "finds no scales `none`"),
        ({"dequantise": "q", "scale": "s", "block": [8]}, "has no blocks of [8]"),
        ({"dequantise": "n", "scale": "s"}, "it is int32, which maps cannot dequantise"),
        ({"merge": "x", "a": "a", "b": "none", "scale": 1}, "of its adapter, `none` is missing"),
        ({"merge": "x", "a": "none", "b": "never", "scale": 1}, "finds no adapters `none`"),
        ({"merge": "x", "a": "b", "b": "a", "scale": 1}, "is not that of adapters of"),
        ({"merge": "x", "a": "n", "b": "b", "scale": 1}, "it is int32, which maps cannot merge"),
        ({"merge": "x", "a": "a", "b": "b"}, "has either `alpha`, perhaps with `rslora`, or `scale`"),
    ],
)
def test_a_rule_that_cannot_compute_is_named(tmp_path: Path, rule: dict[str, object], says: str) -> None:
    state = {
        "x": normal(4, 6),
        "n": np.arange(4, dtype="i4"),
        "q": normal(4, 6, dtype=FP8),
        "s": normal(1, 1),
        "a": normal(2, 6),
        "b": normal(4, 2),
        "slots": {"y": {"odd": normal(2)}},
        "y": normal(2),
        "object": 1.5,
    }
    sw.save(tmp_path / "c", state)
    with pytest.raises(sw.MisuseError, match=re.escape(says)):
        sw.convert(tmp_path / "c", tmp_path / "out", to="npz", map=[rule])
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "rule",
    [
        {"cast": "x", "to": "float16"},
        {"cast": "x", "to": "float16", "from": "bfloat16"},
        {"cast": "x", "to": "float16", "from": "float8_e4m3fn"},
        {"pad": "x", "size": 5},
        DEQUANTISE,
        {"merge": "x", "a": "a", "b": "b", "scale": 1},
    ],
)
def test_a_computation_without_a_way_back_says_so(rule: dict[str, object]) -> None:
    with pytest.raises(sw.MisuseError, match="has no way back: "):
        sw.maps.Map([rule]).inverse()


def test_a_lossless_cast_goes_both_ways(tmp_path: Path) -> None:
    x = normal(50, dtype=BF16)
    rules = sw.maps.Map([{"cast": "x", "to": "float32", "from": "bfloat16"}])
    there = sw.restore(saved(tmp_path / "c", x=x), map=rules)["x"]
    same(there, x.astype("f4"))
    same(sw.restore(saved(tmp_path / "d", x=there), map=rules.inverse())["x"], x)


def test_tensors_without_elements_and_dimensions_are_computed(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", empty=np.zeros((0, 3), "f4"), one=np.array(2.5, "f4"))
    rules: list[dict[str, object]] = [{"scale": name, "by": 2} for name in ("empty", "one")]
    found = sw.restore(path, map=[*rules, {"pad": "empty", "size": 2, "value": 1}])
    same(found["empty"], np.ones((2, 3), "f4"))
    same(found["one"], np.array(5, "f4"))
    same(sw.restore(path, map=rules)["empty"], np.zeros((0, 3), "f4"))


def test_an_error_names_the_rule_and_its_file(tmp_path: Path) -> None:
    path, file = saved(tmp_path / "c", x=normal(5)), tmp_path / "map.toml"
    file.write_text('[[rule]]\nscale = "x"\nby = 2\n[[rule]]\npad = "x"\nsize = 9\nfrom = 8\n')
    with pytest.raises(sw.MisuseError, match=rf"^leaf `x`: .*\(rule 2 of the map {file}\)$") as raised:
        sw.restore(path, map=file)
    assert raised.value.leaf == "x"
    with pytest.raises(sw.MisuseError, match=rf"\(rule 2 of the inverse of the map {file}\)$"):
        sw.restore(path, map=sw.maps.Map.of(file).inverse())
    file.write_text('[[rule]]\nscale = "x"\nby = 0\n')
    with pytest.raises(sw.MisuseError, match=rf"rule 1 of the map: `by` cannot be int 0: .* \({file}\)$"):
        sw.restore(path, map=file)


def test_other_constants_are_other_plans(tmp_path: Path) -> None:
    path = saved(tmp_path / "c", x=normal(5))

    def digest(by: float) -> bytes:
        with sw.open(path, map=[{"scale": "x", "by": by}]) as checkpoint:
            return spec.digest(checkpoint._open(), [], 1)

    assert digest(2) != digest(3)
    assert digest(2) == digest(2)
