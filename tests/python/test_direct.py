"""Restores of states with many kinds of leaves: what comes back, which memory it takes, and what
it holds on to."""

from __future__ import annotations

import sys
from collections import OrderedDict
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import stepwell as sw


def a_state() -> dict[str, Any]:
    rng = np.random.default_rng(0)
    tied = rng.standard_normal((5, 7))
    return {
        "params": {
            "w": rng.standard_normal((300, 200)).astype(ml_dtypes.bfloat16),
            "tied": tied,
            "again": tied,
            "empty": np.zeros((0, 3), np.int8),
            "scalar": np.array(3.5),
            "columns": np.asfortranarray(rng.standard_normal((40, 30))),
        },
        "layers": [
            rng.integers(0, 9, 1000),
            {"b": rng.integers(0, 9, 10)},
            (rng.standard_normal(3),),
        ],
        3: {"n": 7, "name": "run", "nothing": None, "sizes": [1, [2.5, (True, "x")]]},
        "containers": {"dict": {}, "list": [], "tuple": ()},
        "big": rng.integers(0, 255, 5 << 20, dtype=np.uint8),
        "medium": [rng.integers(0, 255, 1 << 20, dtype=np.uint8) for _ in range(9)],
    }


def same(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray):
        return (
            isinstance(other, np.ndarray)
            and one.dtype == other.dtype
            and one.shape == other.shape
            and one.tobytes() == other.tobytes()
        )
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    return bool(one == other)


def like_of(state: Any, leaf: Any) -> Any:
    if isinstance(state, np.ndarray):
        return leaf(state)
    if isinstance(state, dict):
        return {key: like_of(value, leaf) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return type(state)(like_of(value, leaf) for value in state)
    return state


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    sw.save(tmp_path / "a", a_state())
    return tmp_path / "a"


def filled_with(value: int) -> Any:
    state = like_of(a_state(), lambda array: np.full_like(array, value))
    state["params"]["again"] = state["params"]["tied"]
    del state["containers"]
    return state


def expected() -> Any:
    state = a_state()
    del state["containers"]
    return state


def test_a_restore_without_a_target_gives_what_was_saved(saved: Path) -> None:
    found, report = sw.restore(saved, return_report=True)
    assert same(found, a_state())
    assert report.nbytes == sum(array.nbytes for array in arrays_of(a_state()))
    assert found["params"]["tied"] is found["params"]["again"]
    assert all(array.ctypes.data % 64 == 0 for array in found["medium"])


def arrays_of(state: Any) -> list[Any]:
    found: dict[int, Any] = {}
    like_of(state, lambda array: found.setdefault(id(array), array))
    return list(found.values())


@pytest.mark.parametrize(
    "leaf",
    [np.zeros_like, lambda a: sw.ArraySpec(a.shape, a.dtype), lambda _: sw.ArraySpec()],
)
def test_a_like_gets_new_containers_and_stays_as_it_is(saved: Path, leaf: Any) -> None:
    like = like_of(expected(), leaf)
    found = sw.restore(saved, like=like)
    assert same(found, expected())
    assert found is not like
    assert found["params"] is not like["params"]
    assert isinstance(like["params"]["w"], sw.ArraySpec) or not like["params"]["w"].any()


def test_a_target_is_filled_in_place(saved: Path) -> None:
    into = filled_with(1)
    w, layers, first = into["params"]["w"], into["layers"], into["layers"][0]
    found = sw.restore(saved, into=into)
    assert found is into
    assert same(into, expected())
    assert into["params"]["w"] is w
    assert into["layers"] is layers
    assert layers[0] is first


def test_some_entries_in_another_order_are_restored(saved: Path) -> None:
    into = filled_with(1)
    part = {"medium": into["medium"], "params": dict(reversed(into["params"].items()))}
    sw.restore(saved, into=part)
    assert list(part) == ["medium", "params"]
    assert same(part["params"]["w"], a_state()["params"]["w"])


@pytest.mark.parametrize(
    "change",
    [
        lambda s: s["params"].pop("w"),
        lambda s: s["params"].update(extra=np.zeros(3)),
        lambda s: s["params"].update(w=np.zeros((300, 200), np.int8)),
        lambda s: s["params"].update(tied=np.zeros((5, 8)), again=np.zeros((5, 8))),
        lambda s: s["params"].update(w=s[3]["n"]),
        lambda s: s["params"].update(columns=s["big"][:9600].view(np.float64).reshape(40, 30)),
        lambda s: s.update(layers=OrderedDict(a=1)),
        lambda s: s.update(missing=1),
        lambda s: s["layers"].append(1),
        lambda s: s["layers"].reverse(),
        lambda s: s[3].update(n=str),
    ],
)
def test_a_target_that_does_not_fit_is_refused_as_it_is(saved: Path, change: Any) -> None:
    into = filled_with(1)
    change(into)
    before = [array.tobytes() for array in arrays_of(into)]
    with pytest.raises(sw.MismatchError):
        sw.restore(saved, into=into)
    assert [array.tobytes() for array in arrays_of(into)] == before


def test_a_tie_by_two_views_is_filled_once(saved: Path) -> None:
    into = filled_with(1)
    into["params"]["again"] = into["params"]["tied"][:]
    _, report = sw.restore(saved, into=into, return_report=True)
    assert same(into["params"]["again"], a_state()["params"]["tied"])
    assert report.nbytes == sum(array.nbytes for array in arrays_of(a_state()))


def test_columns_between_each_other_are_filled_one_by_one(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {f"c{i}": np.full(50, i) for i in range(20)})
    whole = np.full((50, 20), -1)
    sw.restore(tmp_path / "c", into={f"c{i}": whole[:, i] for i in range(20)})
    assert (whole == np.arange(20)).all()


def test_damage_names_the_overwritten_leaves(saved: Path) -> None:
    data = max(saved.rglob("*.data"), key=lambda file: file.stat().st_size)
    raw = bytearray(data.read_bytes())
    raw[4096 + 10] ^= 1
    data.write_bytes(raw)
    with pytest.raises(sw.CorruptCheckpoint) as caught:
        sw.restore(saved, into=filled_with(1))
    assert caught.value.leaf in caught.value.overwritten


def test_a_reader_changes_nothing_beside_a_checkpoint(saved: Path) -> None:
    def picture() -> list[tuple[str, int]]:
        everything = [saved.parent, *sorted(saved.parent.rglob("*"))]
        return [(str(path), path.stat().st_mtime_ns) for path in everything]

    before = picture()
    sw.restore(saved)
    sw.verify(saved)
    sw.metadata(saved)
    assert picture() == before


def test_new_memory_is_private_to_the_process(saved: Path) -> None:
    import os

    array = sw.restore(saved)["medium"][0]
    first = int(array[0])
    child = os.fork()
    if child == 0:
        array[0] = first ^ 1
        os._exit(0)
    os.waitpid(child, 0)
    assert array[0] == first


def _resident() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmRSS:"):
            return int(line.split()[1]) * 1024
    raise AssertionError("no VmRSS")


def test_new_memory_is_that_of_the_arrays_and_64_mib(tmp_path: Path) -> None:
    # Arrays whose last huge page is used by a little more than half: huge pages alone would take
    # nearly 90 MiB more.
    size = (5 << 20) + 4096
    state = {f"layer{n}": np.full(size, n, np.uint8) for n in range(90)}
    sw.save(tmp_path / "x", state)
    del state
    before = _resident()
    found = sw.restore(tmp_path / "x")
    beyond = _resident() - before - sum(array.nbytes for array in found.values())
    assert beyond < 64 << 20, f"{beyond >> 20} MiB beyond the arrays"
    assert (found["layer89"] == 89).all()


def test_a_restore_lets_go_of_its_targets_however_it_ends(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"a": np.arange(4), "b": np.arange(3)})

    def into(length: int = 3) -> dict[str, Any]:
        return {"a": np.zeros(4, np.int64), "b": np.zeros(length, np.int64)}

    def held(state: dict[str, Any]) -> list[int]:
        return [sys.getrefcount(state[name]) for name in ("a", "b")]

    free = held(into())
    state = into()
    sw.restore(tmp_path / "c", into=state)
    assert state["a"].tolist() == [0, 1, 2, 3]
    assert held(state) == free
    sw.restore(tmp_path / "c", into=state, return_report=True)
    assert held(state) == free
    with pytest.raises(sw.StepNotFound):
        sw.restore(tmp_path / "none", into=state)
    assert held(state) == free
    state = into(5)
    with pytest.raises(sw.MismatchError):
        sw.restore(tmp_path / "c", into=state)
    assert held(state) == free


def test_a_target_that_contains_itself_is_refused_in_no_time(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"a": np.arange(4)})
    state: dict[str, Any] = {"a": np.zeros(4, np.int64)}
    # A walk that took each path would have 2 to the power of the greatest depth.
    state["again"] = [state, state]
    with pytest.raises(sw.UnsupportedLeaf):
        sw.restore(tmp_path / "c", into=state)


@pytest.mark.parametrize("fill", [False, True])
def test_a_failed_restore_holds_nothing(tmp_path: Path, fill: bool) -> None:
    state = {"a": np.arange(100_000)}
    with sw.CheckpointManager(tmp_path / "run") as manager:
        for step in (1, 2):
            manager.save(step, state).result()
        data = max((tmp_path / "run" / "step_00000001").rglob("*.data"), key=lambda file: file.stat().st_size)
        with data.open("r+b") as file:
            file.seek(100_000)
            file.write(b"\xff\xff\xff")
        with pytest.raises(sw.CorruptCheckpoint) as caught:
            manager.restore(1, into=state) if fill else manager.restore(1)
        manager.delete(1)  # which is refused while a reader holds the step
        assert manager.all_steps() == [2]
        del caught
