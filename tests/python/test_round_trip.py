"""Saved values come back unchanged: dtypes, memory layouts, containers, objects."""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import math
import random
import uuid
import zoneinfo
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
import pytest
import stepwell as sw
from conftest import same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stepwell import _core

STANDARD = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64",
            "float16", "float32", "float64", "complex64", "complex128"]  # fmt: skip
ML = [
    name
    for name in dir(ml_dtypes)
    if isinstance(getattr(ml_dtypes, name), type) and name not in ("finfo", "iinfo")
]
TIMES = [
    f"{kind}[{unit}]"
    for kind in ("datetime64", "timedelta64")
    for unit in ("Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as")
]


def round_trip(path: Path, state: Any) -> Any:
    sw.save(path / "c", state, exists="replace")
    return sw.restore(path / "c")


def dtype_of(name: str) -> np.dtype[Any]:
    return np.dtype(getattr(ml_dtypes, name, name))


@pytest.mark.parametrize("name", STANDARD + ML + TIMES)
def test_every_dtype_comes_back_bit_for_bit(tmp_path: Path, name: str) -> None:
    dtype = dtype_of(name)
    data = np.random.default_rng(0).integers(0, 2, 24, dtype=np.uint8)
    if dtype.itemsize == 1 and name not in (
        "bool",
        *[n for n in ML if "int" in n or "float4" in n or "float6" in n],
    ):
        data = np.arange(24, dtype=np.uint8) * 10
    array = np.tile(data, dtype.itemsize).view(dtype).reshape(2, 3, -1)
    for one in (array, array[0, 0, :1].reshape(()), np.zeros((0, 3), dtype)):
        assert same(round_trip(tmp_path, {"a": one})["a"], one)


def test_the_format_knows_every_dtype_that_ml_dtypes_has() -> None:
    assert {dtype_of(name).name for name in ML} <= set(_core.dtype_names())


@pytest.mark.parametrize(
    "view",
    [
        lambda a: a.T,
        lambda a: a[::-1, ::2],
        lambda a: np.asfortranarray(a),
        lambda a: a[:, 1:2],
        lambda a: np.broadcast_to(a[0], (5, 7)),
        lambda a: a[1:1],
        lambda a: a.astype(a.dtype.newbyteorder(">")),
        lambda a: a.astype(">i2")[::-1, ::3],
    ],
)
def test_any_memory_layout_comes_back_as_its_values(tmp_path: Path, view: Any) -> None:
    array = view(np.arange(35, dtype=np.float64).reshape(5, 7))
    array.flags.writeable = False
    back = round_trip(tmp_path, {"a": array})["a"]
    assert back.dtype == array.dtype.newbyteorder("=")
    assert back.shape == array.shape
    assert back.dtype.isnative
    assert np.array_equal(back, array)


def test_a_memory_mapped_array_is_an_array(tmp_path: Path) -> None:
    mapped = np.memmap(tmp_path / "m", dtype=np.int32, mode="w+", shape=(4, 5))
    mapped[:] = np.arange(20).reshape(4, 5)
    assert same(round_trip(tmp_path, [mapped])[0], np.asarray(mapped))


class Point(NamedTuple):
    x: Any
    y: Any


Pair = namedtuple("Pair", "a b")


@dataclasses.dataclass
class Config:
    rate: float
    weights: Any = None


@dataclasses.dataclass(frozen=True)
class Frozen:
    n: int
    inner: Any


class Color(enum.Enum):
    RED = 1
    BLUE = 2


class Bits(enum.Flag):
    A = 1
    B = 2


VALUES: list[Any] = [
    None, True, False, 0, -1, 2**62, -(2**63), 2**63, -(2**63) - 1, 10**100, -(10**100), 0.0, -0.0, math.inf, -math.inf,
    math.nan, 5e-324, 1 + 2j, complex(math.nan, -0.0), "", "snow ☃ \0 \n", "\udcff", b"", b"\x00\xff", bytearray(b"x"),
    {1, 2, 3}, frozenset({"a", (1, 2)}), set(), (1, "a", None), [1, [2.0, [b"3"]]], (1,), [None, None], range(1, 9, 2), slice(None, 3, -1),
    datetime.datetime(2026, 1, 2, 3, 4, 5, 6), datetime.datetime(2026, 1, 2, tzinfo=datetime.UTC),
    datetime.datetime(2026, 10, 25, 2, 30, fold=1, tzinfo=zoneinfo.ZoneInfo("Europe/Berlin")),
    datetime.timezone(datetime.timedelta(hours=2), "X"), datetime.date(2026, 1, 2), datetime.time(1, 2, 3),
    datetime.timedelta(days=-1, microseconds=5), decimal.Decimal("1.50"), fractions.Fraction(3, 7), uuid.UUID(int=5),
    np.float32(1.5), np.int8(-3), np.bool_(True), ml_dtypes.bfloat16(2), np.complex64(1j), np.datetime64("2026-01-02"),
    np.timedelta64(5, "s"), np.str_("x"), np.bytes_(b"y"), np.dtype("float32"), np.dtype(ml_dtypes.bfloat16), Counter("abca"),
    deque([1, 2], 5), deque(), OrderedDict(b=1, a=2), [], (), {}, ..., {1: "int key", "1": "str key", -5: None},
]  # fmt: skip


@pytest.mark.parametrize(
    "value",
    VALUES,
    ids=[f"{number}-{type(value).__name__}" for number, value in enumerate(VALUES)],
)
def test_every_object_comes_back_with_its_type(tmp_path: Path, value: Any) -> None:
    assert same(round_trip(tmp_path, {"v": value, "in a list": [value, np.zeros(1)]})["v"], value)
    back = sw.restore(tmp_path / "c")["in a list"][0]
    assert same(back, value)


@pytest.mark.parametrize(
    "value", [5, 2.5, "x", None, [1, 2], np.arange(3), {}, [], (), [np.zeros(2)]], ids=repr
)
def test_a_state_may_be_a_single_value(tmp_path: Path, value: Any) -> None:
    assert same(round_trip(tmp_path, value), value)


def test_containers_come_back_in_order_with_their_types(tmp_path: Path) -> None:
    state = {
        "z": [np.zeros(2), (np.ones(1), {})],
        "a": OrderedDict(y=np.zeros(1), x=[]),
        "d": deque([np.zeros(1)], 3),
        "int": {3: np.zeros(1), 1: (), -7: {"": 1}},
        "a.b": 1,
        "a/b": {"[0]": 2, "\\": 3, "": 4, "é" * 150: 5},
        "empty": [{}, [], (), OrderedDict()],
        "1": 0,
    }
    assert same(round_trip(tmp_path, state), state)


def test_a_defaultdict_keeps_the_targets_factory(tmp_path: Path) -> None:
    state = {"d": defaultdict(list, a=np.ones(2))}
    back = round_trip(tmp_path, state)["d"]
    assert type(back) is defaultdict
    assert back.default_factory is None
    assert sw.restore(tmp_path / "c", like=state)["d"].default_factory is list


def test_named_fields_come_back_without_and_with_their_classes(tmp_path: Path) -> None:
    state = {
        "p": Point(1, np.ones(2)),
        "c": Config(0.5, np.zeros(3)),
        "f": Frozen(1, Pair(np.ones(1), {"k": 2})),
    }
    back = round_trip(tmp_path, state)
    assert back["p"]._fields == ("x", "y")
    assert same(back["p"].y, np.ones(2))
    assert type(back["c"]).__name__ == "Config"
    assert back["c"].rate == 0.5
    assert back["f"].inner.b == {"k": 2}
    like = {
        "p": Point(0, np.zeros(2)),
        "c": Config(0.0, np.ones(3)),
        "f": Frozen(0, Pair(np.zeros(1), {"k": 0})),
    }
    typed = sw.restore(tmp_path / "c", like=like)
    assert type(typed["p"]) is Point
    assert type(typed["c"]) is Config
    assert type(typed["f"]) is Frozen
    assert typed["f"].n == 1
    assert like["f"].n == 0


def test_enum_members_come_back_by_name(tmp_path: Path) -> None:
    state = {"c": Color.BLUE, "b": Bits.A | Bits.B, "many": [Color.RED, Color.BLUE]}
    back = round_trip(tmp_path, state)
    assert back["c"] == sw.results.StoredEnum(f"{Color.__module__}.Color", ("BLUE",))
    assert sw.restore(tmp_path / "c", like={"c": Color.RED, "b": Bits.A, "many": [Color.RED]}) == state
    assert same(round_trip(tmp_path, back), back)


def test_a_registered_class_is_taken_apart_and_put_together(tmp_path: Path) -> None:
    class Box:
        def __init__(self, items: dict[str, Any]) -> None:
            self.items = items

    sw.register(Box, lambda box: box.items, Box, name="test.Box")
    back = round_trip(tmp_path, {"box": Box({"w": np.arange(3), "n": 1})})["box"]
    assert type(back) is Box
    assert same(back.items, {"w": np.arange(3), "n": 1})
    like = {"box": Box({"w": np.zeros(3, np.int64), "n": 0})}
    assert same(sw.restore(tmp_path / "c", like=like)["box"].items, back.items)


def test_tied_arrays_are_stored_once_and_restored_as_one(tmp_path: Path) -> None:
    w = np.random.default_rng(0).normal(size=(64, 64))
    big_endian = w.astype(">f8")
    state = {"m": {"a": w, "b": w, "view": w[:], "other": w.T, "be": big_endian, "be2": big_endian}}
    sw.save(tmp_path / "c", state)
    back = sw.restore(tmp_path / "c")["m"]
    assert back["a"] is back["b"] is back["view"]
    assert back["other"] is not back["a"]
    assert back["be"] is back["be2"]
    assert sw.metadata(tmp_path / "c").nbytes == 3 * w.nbytes


def test_empty_arrays_are_not_tied(tmp_path: Path) -> None:
    empty = np.zeros((0, 3))
    back = round_trip(tmp_path, {"m": {"a": empty, "b": empty}})["m"]
    assert back["a"] is not back["b"]


def test_generators_go_on_where_they_were(tmp_path: Path) -> None:
    makers: dict[str, Any] = {
        "python": lambda: random.Random(1),
        "pcg": lambda: np.random.default_rng(1),
        "mt": lambda: np.random.Generator(np.random.MT19937(2)),
        "philox": lambda: np.random.Philox(3),
        "legacy": lambda: np.random.RandomState(4),
    }
    state = {name: make() for name, make in makers.items()}
    draw = {
        "python": lambda g: g.gauss(0, 1), "pcg": lambda g: g.normal(), "mt": lambda g: g.normal(),
        "philox": lambda g: int(g.random_raw()), "legacy": lambda g: g.normal(),
    }  # fmt: skip
    for name in state:
        draw[name](state[name])
    sw.save(tmp_path / "c", state)
    expected = {name: draw[name](state[name]) for name in state}
    fresh = {name: make() for name, make in makers.items()}
    back = sw.restore(tmp_path / "c", into=fresh)
    assert back["pcg"] is fresh["pcg"]
    assert {name: draw[name](back[name]) for name in back} == expected
    made = sw.restore(tmp_path / "c", like=makers_of(makers))
    assert {name: draw[name](made[name]) for name in made} == expected


def makers_of(makers: dict[str, Any]) -> dict[str, Any]:
    return {name: make() for name, make in makers.items()}


def test_the_random_module_is_stateful(tmp_path: Path) -> None:
    random.seed(5)
    sw.save(tmp_path / "c", {"random": random})
    expected = [random.random() for _ in range(3)]
    sw.restore(tmp_path / "c", into={"random": random})
    assert [random.random() for _ in range(3)] == expected


class Loader:
    def __init__(self) -> None:
        self.position, self.buffer = 0, np.zeros(2)

    def state_dict(self) -> dict[str, Any]:
        return {"position": self.position, "buffer": self.buffer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.position, self.buffer = state["position"], state["buffer"]


class Counting:
    value = 0

    def get_state(self) -> int:
        return self.value

    def set_state(self, state: int) -> None:
        self.value = state


def test_stateful_objects_are_expanded_and_loaded_in_place(tmp_path: Path) -> None:
    loader, counting = Loader(), Counting()
    loader.position, loader.buffer, counting.value = 7, np.arange(5), 3
    sw.save(tmp_path / "c", {"data": loader, "n": counting})
    assert sw.restore(tmp_path / "c")["data"]["position"] == 7
    assert sw.restore(tmp_path / "c")["n"] == 3
    target = {"data": Loader(), "n": Counting()}
    back = sw.restore(tmp_path / "c", into=target)
    assert back["data"] is target["data"]
    assert target["data"].position == 7
    assert same(target["data"].buffer, np.arange(5))
    assert target["n"].value == 3


def test_a_replicated_value_is_itself_where_there_is_one_process(tmp_path: Path) -> None:
    state = {"a": sw.Replicated(np.arange(3)), "b": sw.Replicated({"x": 1})}
    assert same(round_trip(tmp_path, state), {"a": np.arange(3), "b": {"x": 1}})
    back = sw.restore(tmp_path / "c", like={"a": np.zeros(3, int), "b": sw.Replicated({"x": 0})})
    assert same(back["a"], np.arange(3))
    assert back["b"] == sw.Replicated({"x": 1})


def test_a_value_per_rank_is_stored_as_rank_0_of_1(tmp_path: Path) -> None:
    state = {"rng": [0, sw.PerRank(np.arange(3))]}
    sw.save(tmp_path / "c", state)
    assert same(sw.restore(tmp_path / "c"), {"rng": [0, {"0": np.arange(3)}]})
    back = sw.restore(tmp_path / "c", like={"rng": [0, sw.PerRank(np.zeros(3, int))]})
    assert same(back["rng"][1].value, np.arange(3))
    target = {"rng": [0, sw.PerRank(np.zeros(3, int))]}
    sw.restore(tmp_path / "c", into=target)
    assert same(target["rng"][1].value, np.arange(3))


leaves = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(), st.complex_numbers(), st.text(max_size=5), st.binary(max_size=5),
    st.sampled_from([np.arange(3), np.zeros((2, 0)), np.float32(2), np.array(5), np.ones((2, 3), ml_dtypes.bfloat16)]),
)  # fmt: skip
states = st.recursive(
    leaves,
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.lists(inner, max_size=4).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=4), st.integers(-(2**63), 2**63 - 1)), inner, max_size=4),
        st.lists(inner, max_size=3).map(lambda items: deque(items, 9)),
        st.dictionaries(st.text(max_size=3), inner, max_size=3).map(OrderedDict),
        st.tuples(inner, inner).map(lambda pair: Point(*pair)),
    ),
    max_leaves=20,
)


def untyped(value: Any) -> Any:
    """A state with namedtuples as plain tuples: their classes are synthesised where no ``like`` has
    them."""
    if isinstance(value, tuple):
        return tuple(untyped(one) for one in value)
    if isinstance(value, list):
        return [untyped(one) for one in value]
    if isinstance(value, deque):
        return deque((untyped(one) for one in value), value.maxlen)
    if isinstance(value, dict):
        return type(value)((key, untyped(one)) for key, one in value.items())
    return value


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(states)
def test_any_state_comes_back(tmp_path: Path, state: Any) -> None:
    back = round_trip(tmp_path, {"s": state})["s"]
    assert same(untyped(back), untyped(state))


@settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(states)
def test_any_state_restores_into_itself_and_like_itself(tmp_path: Path, state: Any) -> None:
    sw.save(tmp_path / "c", {"s": state}, exists="replace")
    assert same(sw.restore(tmp_path / "c", like={"s": state})["s"], state)


@settings(max_examples=100, deadline=None)
@given(states)
def test_walks_over_target_and_state_agree_on_paths(state: Any) -> None:
    from stepwell._restore import template

    saved = _core.flatten(state).paths()
    wanted = [leaf.path for leaf in template.leaves(template.parse(state)) if leaf.what != "skip"]
    assert wanted == [path for path in saved if path in set(wanted)]
    assert len(saved) == len(wanted)
