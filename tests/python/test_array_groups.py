"""Groups: a plain subtree of arrays is restored without an object for each leaf. Nobody can tell
from the result, the report or the error."""

from __future__ import annotations

import copy
import os
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from conftest import same
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from stepwell._restore import allocate, restore, template
from stepwell._restore.options import RestoreOptions
from stepwell._state.specs import AS_STORED
from stepwell.errors import StepwellError

#: A tree of these is a recipe, from which equal states are made: a list of a name and its values.
Recipe = Any

_PLAIN = st.tuples(st.sampled_from(["f4", "i8", "c8"]), st.sampled_from([(3,), (2, 2), (5,), (0, 2), (1,)]))
#: Kinds of values that a target has in place of a saved array.
_KINDS = ["same", "shape", "wider", "big-endian", "0-d", "strided", "reversed", "read-only", "broadcast", "tie", "overlap", "between", "spec", "scalar", "stored", "skip", "missing", "more", "empty"]  # fmt: skip


def ungrouped(path: Path, **options: Any) -> tuple[Any, sw.RestoreReport]:
    """A restore that makes an object for each leaf."""
    checked = RestoreOptions.of(options)  # type: ignore[arg-type]
    target = AS_STORED if checked.target is None else checked.target
    with sw.open(path) as checkpoint:
        job = restore.Restore(checkpoint._open(), checked)
        return job.run(template.parse(target), checked.fill), job.report


def arrays_of(state: Any) -> Iterator[np.ndarray]:
    if isinstance(state, np.ndarray):
        yield state
    elif isinstance(state, (dict, list, tuple)):
        for value in state.values() if isinstance(state, dict) else state:
            yield from arrays_of(value)


def outcome(call: Callable[..., Any], path: Path, target: Any, word: str, **options: Any) -> Any:
    """All that a caller can see of a restore."""
    given = {} if target is None else {word: target}
    try:
        value, report = call(path, **given, **options)
    except StepwellError as error:
        return type(error), str(error), error.leaf, set(error.overwritten), error.report, target
    mine = [id(one) for one in arrays_of(target)]
    places = [id(one) for one in arrays_of(value)]
    shared = [places.index(one) for one in places]
    return value, target, [mine.index(one) if one in mine else None for one in places], shared, report


def like_each_other(one: Any, other: Any) -> bool:
    """:func:`conftest.same` for outcomes."""
    if isinstance(one, sw.RestoreReport) or one is None or isinstance(one, type):
        return bool(one == other)
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(like_each_other, one, other))
    return same(one, other)


def state_of(tree: Any, seed: list[int]) -> Any:
    if isinstance(tree, dict):
        return {key: state_of(value, seed) for key, value in tree.items()}
    if isinstance(tree, list):
        return [state_of(value, seed) for value in tree]
    seed[0] += 1
    dtype, shape = tree
    return (np.arange(np.prod(shape)) + seed[0]).astype(dtype).reshape(shape)


def target_of(tree: Any, kinds: Iterator[str], made: list[np.ndarray]) -> Any:
    """A target like a tree, with differences."""
    if isinstance(tree, dict):
        found: dict[Any, Any] = {}
        for key, value in tree.items():
            kind = next(kinds) if isinstance(value, tuple) else "same"
            if kind == "more":
                found["more"] = np.zeros(2)
            if kind == "empty":
                found["empty"] = {}
            if kind != "missing":
                found[key] = array_of(value, kind, made) if kind != "same" else target_of(value, kinds, made)
        return found
    if isinstance(tree, list):
        return [target_of(value, kinds, made) for value in tree]
    return array_of(tree, "same", made)


def array_of(tree: Any, kind: str, made: list[np.ndarray]) -> Any:
    dtype, shape = tree
    if kind == "scalar":
        return 3
    if kind == "stored":
        return sw.AS_STORED
    if kind == "skip":
        return ...
    if kind == "spec":
        return sw.ArraySpec(shape, dtype)
    if kind == "0-d":
        return np.zeros((), dtype)
    if kind == "tie" and made:
        return made[-1]
    if kind == "overlap" and made:
        return made[-1][1:] if made[-1].ndim else made[-1]
    if kind == "between":
        wide = np.zeros((*shape[:-1], 2 * shape[-1]), dtype)
        made.append(wide[..., 1::2])
        return wide[..., ::2]
    wide = {"f4": "f8", "c8": "c16"}.get(dtype, dtype)
    array = np.full(shape, 9, wide if kind == "wider" else ">" + dtype if kind == "big-endian" else dtype)
    if kind == "shape":
        array = np.zeros((*shape, 1), dtype)
    if kind == "strided":
        array = np.asfortranarray(np.zeros((*shape, 2), dtype))[..., 1]
    if kind == "reversed":
        array = array[::-1]
    if kind == "broadcast":
        array = np.lib.stride_tricks.as_strided(np.zeros(64, dtype), shape, (0,) * len(shape))
    if kind == "read-only":
        array.flags.writeable = False
    made.append(array)
    return array


_TREES = st.dictionaries(
    st.sampled_from(["a", "b", "c/d", "", 3, -1]),
    st.recursive(
        _PLAIN,
        lambda inner: (
            st.dictionaries(st.sampled_from(["x", "y", "z", 0, 7]), inner, min_size=1, max_size=4)
            | st.lists(inner, min_size=1, max_size=3)
        ),
        max_leaves=8,
    ),
    min_size=1,
    max_size=4,
)


@settings(max_examples=120, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    tree=_TREES,
    few=st.lists(st.tuples(st.integers(0, 6), st.sampled_from(_KINDS)), max_size=2),
    ties=st.booleans(),
    loose=st.booleans(),
    word=st.sampled_from(["into", "into", "like", "no target"]),
    options=st.sampled_from([{}, {}, {}, {"missing": "keep"}, {"unexpected": "ignore"}, {"exclude": "**x"}, {"cast": "exact"}, {"resize": "both"}, {"include": ["a", "b"]}]),
)  # fmt: skip
def test_a_grouped_restore_equals_an_ungrouped_one(
    tmp_path: Path,
    tree: dict[Any, Any],
    few: list[tuple[int, str]],
    ties: bool,
    loose: bool,
    word: str,
    options: dict[str, Any],
) -> None:
    state = state_of(tree, [0])
    if ties:
        state["tied"] = next(iter(state.values()))
    if loose:
        state["step"] = 4
    sw.save(tmp_path / "c", state, exists="replace")
    outcomes = []
    for call in (lambda *a, **k: sw.restore(*a, **k, return_report=True), ungrouped):
        target = None
        if word != "no target":
            kinds = ["same"] * 50
            for place, kind in few:
                kinds[place] = kind
            target = target_of(tree, iter(kinds), [])
            if ties and loose and target:
                target["tied"] = copy.copy(next(iter(target.values())))
            if loose:
                target["step"] = 0
        outcomes.append(outcome(call, tmp_path / "c", target, word, **options))
    assert like_each_other(*outcomes), outcomes


@pytest.fixture
def without_jobs(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_job(*_: object) -> None:
        raise AssertionError("an object was made for a leaf")

    monkeypatch.setattr(restore, "Job", no_job)


STATE = {
    "params": {"w": np.arange(6.0).reshape(2, 3), "layers": [np.ones(4), {"b": np.arange(3)}]},
    5: np.ones(2),
}


def zeros() -> dict[Any, Any]:
    return {
        "params": {"w": np.zeros((2, 3)), "layers": [np.zeros(4), {"b": np.zeros(3, int)}]},
        5: np.zeros(2),
    }


@pytest.mark.usefixtures("without_jobs")
def test_plain_arrays_are_restored_as_a_group(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", STATE)
    into, like = zeros(), zeros()
    arrays = list(arrays_of(into))
    assert sw.restore(tmp_path / "c", into=into) is into
    assert same(into, STATE)
    assert all(map(np.shares_memory, arrays_of(into), arrays))
    assert same(sw.restore(tmp_path / "c", like=like), STATE)
    assert same(like, zeros())
    assert same(sw.restore(tmp_path / "c"), STATE)
    assert same(sw.restore(tmp_path / "c", like={"params": sw.AS_STORED})["params"], STATE["params"])
    back, report = sw.restore(tmp_path / "c", into=zeros(), return_report=True)
    assert report.restored == ["params/w", "params/layers[0]", "params/layers[1]/b", "[5]"]
    assert report.nbytes == sum(array.nbytes for array in arrays_of(back))


@pytest.mark.usefixtures("without_jobs")
def test_a_group_is_part_of_a_larger_state(tmp_path: Path) -> None:
    state = {"step": 3, "state": (STATE, OrderedDict(deep=copy.deepcopy(STATE)))}
    sw.save(tmp_path / "c", state)
    into = {"step": 0, "state": (zeros(), OrderedDict(deep=zeros()))}
    assert same(sw.restore(tmp_path / "c", into=into), state)


@pytest.mark.parametrize("state", [np.arange(4), {}, [], [np.ones(2)], (np.ones(2),), {"a": {}, "b": np.ones(1)}, {"a": OrderedDict(x=np.ones(3))}])  # fmt: skip
def test_any_stored_top_comes_back(tmp_path: Path, state: Any) -> None:
    sw.save(tmp_path / "c", state)
    assert same(sw.restore(tmp_path / "c"), state)
    assert same(sw.restore(tmp_path / "c"), ungrouped(tmp_path / "c")[0])


def test_a_cycle_and_deep_nesting_are_named_as_ever(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", STATE)
    into: Any = zeros()
    into["params"]["layers"].append(into)
    with pytest.raises(sw.UnsupportedLeaf, match="a cycle"):
        sw.restore(tmp_path / "c", into=into)
    deep: Any = np.zeros(1)
    for _ in range(2000):
        deep = [deep]
    with pytest.raises(sw.UnsupportedLeaf, match="deep"):
        sw.restore(tmp_path / "c", into={"a": deep})


def test_a_failed_read_names_the_leaves_of_a_group(tmp_path: Path) -> None:
    state = {"a": {"x": np.arange(200_000), "y": np.arange(200_000)}, "n": 1}
    sw.save(tmp_path / "c", state)
    data = max(tmp_path.rglob("*.data"), key=lambda file: file.stat().st_size)
    raw = bytearray(data.read_bytes())
    raw[2_500_000] ^= 1
    os.chmod(data, 0o644)
    data.write_bytes(raw)
    failures = []
    for call in (sw.restore, ungrouped):
        into = {"a": {"x": np.zeros(200_000, int), "y": np.zeros(200_000, int)}, "n": 0}
        with pytest.raises(sw.CorruptCheckpoint) as caught:
            call(tmp_path / "c", into=into)
        assert into["n"] == 0
        failures.append((caught.value.leaf, caught.value.overwritten, str(caught.value)))
    assert failures[0] == failures[1]
    assert failures[0][:2] == ("a/y", ("a/x", "a/y"))
    for options in ({}, {"like": state}):
        with pytest.raises(sw.CorruptCheckpoint) as caught:
            sw.restore(tmp_path / "c", **options)
        assert caught.value.overwritten == ()


def test_new_arrays_of_a_group_are_aligned_and_dense(tmp_path: Path) -> None:
    many = {f"{n}": np.arange(n * 3) for n in range(1, 300)} | {"large": np.ones(1 << 20)}
    sw.save(tmp_path / "c", many)
    back = sw.restore(tmp_path / "c")
    assert same(back, many)
    addresses = sorted(array.ctypes.data for name, array in back.items() if name != "large")
    assert all(address % allocate.ALIGNMENT == 0 for address in addresses)
    assert addresses[-1] - addresses[0] < allocate.SLAB
