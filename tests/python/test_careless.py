"""Careless calls get a typed error that says what, where and what to do, and leave nothing
behind."""

from __future__ import annotations

import dataclasses
import inspect
import json
import math
import random
import time
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import pytest
import stepwell as sw
from numpy.lib.stride_tricks import as_strided
from stepwell import _core
from stepwell._options import to_json
from stepwell._restore import options as restore_options
from stepwell._state import layouts

STATE: dict[str, Any] = {
    "params": {"w": np.arange(6.0).reshape(2, 3), "b": np.ones(3), "layers": [np.zeros(2)]},
    "optimizer": {"m": np.zeros(3)},
    "step": 3,
}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    sw.save(tmp_path / "c", STATE)
    return tmp_path / "c"


# ---- patterns
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("include", "parms/**", ["include: `parms/**`", "`params`"]),
        ("include", ["params/**", "optimiser/**"], ["include: `optimiser/**`", "`optimizer`"]),
        ("include", "params/layer/**", ["`params/layers`"]),
        ("exclude", "optimzer/**", ["exclude: `optimzer/**`", "`optimizer`"]),
        ("cast", {"parms/*": "float16"}, ["cast: `parms/*`", "`params`"]),
    ],
)
def test_a_pattern_that_matches_nothing_is_told_with_near_names(
    path: Path, option: str, value: Any, words: list[str]
) -> None:
    with pytest.raises(sw.MismatchError) as caught:
        sw.restore(path, **{option: value})  # type: ignore[misc]
    assert all(word in str(caught.value) for word in words), str(caught.value)
    assert "missing (" not in str(caught.value)
    assert caught.value.report.unmatched[0].option == option


def test_a_useless_rename_fails_or_is_reported(path: Path, caplog: pytest.LogCaptureFixture) -> None:
    like = {"optimizer": sw.AS_STORED}
    with pytest.raises(sw.MismatchError, match="rename: `parms`; near it is `params`"):
        sw.restore(path, like=like, rename={"parms": "model"})
    _, report = sw.restore(path, like=like, rename={"params/w": "model/w"}, return_report=True)
    assert report.idle_renames == [sw.results.IdleRename("params/w", "model/w")]
    assert "params/w → model/w" in caplog.text
    with pytest.raises(sw.MisuseError, match="without like= or into="):
        sw.restore(path, rename={"params": "model"})


def test_an_unused_permission_is_reported_where_it_helps(
    path: Path,
) -> None:
    like = {"optimizer": {"m": np.zeros(3), "v": np.zeros(3)}}
    with pytest.raises(sw.MismatchError, match="missing: `optimiser/\\*\\*`; near it is `optimizer`"):
        sw.restore(path, like=like, missing={"optimiser/**": "keep"})
    assert list(sw.restore(path, unexpected={"head/**": "ignore"})) == ["params", "optimizer", "step"]


def test_a_rewind_to_a_thinned_step_warns(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    retention = sw.keep_latest(1) | sw.keep_every(1, items=["params"])
    with sw.CheckpointManager(root, retention=retention) as manager:
        for step in (1, 2):
            manager.save(step, STATE).result()
        manager.wait_until_finished()
        manager.rewind(1)
    # It is handed over by a thread of its own.
    deadline = time.monotonic() + 10
    told: list[str] = []
    while not told and time.monotonic() < deadline:
        told = [one.getMessage() for one in caplog.records if "to a thinned step" in one.getMessage()]
        time.sleep(0.01)
    assert len(told) == 1
    assert "optimizer" in told[0]


def test_what_was_thinned_away_is_said_to_have_been(root: Path) -> None:
    retention = sw.keep_latest(1) | sw.keep_every(2, items=["params"])
    with sw.CheckpointManager(root, retention=retention) as manager:
        for step in (2, 3):
            manager.save(step, STATE).result()
        manager.wait_until_finished()
        for like in ({"optimizer": {"m": np.zeros(3)}}, {"optimizer": sw.AS_STORED}):
            with pytest.raises(
                sw.MismatchError, match="item `optimizer` was dropped from this step by thinning, 20"
            ) as caught:
                manager.restore(2, like=like)
            assert caught.value.report.missing[0].why == "dropped by thinning"
        with pytest.raises(sw.MismatchError, match="the loose leaves were dropped"):
            manager.restore(2, like={"step": 0})
        with pytest.raises(sw.MismatchError, match=r"include: `optimizer.*was dropped from this step"):
            manager.restore(2, include="optimizer/**")
        assert list(manager.restore(2, exclude="optimizer/**")) == ["params"]
        with (
            manager.checkpoint(2) as checkpoint,
            pytest.raises(KeyError, match="dropped from this step by thinning"),
        ):
            checkpoint["optimizer"]


# ---- cycles
# ---------------------------------------------------------------------------------------


class Stateful:
    def state_dict(self) -> dict[str, Any]:
        return {"me": self}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(state)


def test_a_cyclic_state_is_refused_where_it_closes(tmp_path: Path, path: Path) -> None:
    loop: dict[str, Any] = {"x": 1}
    loop["self"] = loop
    rows: list[Any] = [np.zeros(1)]
    rows.append((rows,))
    for state, leaf, text in [
        (loop, "self", "the whole state (a dict) is inside itself here"),
        ({"a": {"b": loop}}, "a/b/self", "the dict at `a/b` is inside itself here"),
        ({"a": rows}, "a[1][0]", "the list at `a` is inside itself here"),
        ({"m": Stateful()}, "m/me", "the Stateful at `m` is inside itself here"),
    ]:
        with pytest.raises(sw.UnsupportedLeaf) as caught:
            sw.save(tmp_path / "new", state)
        assert caught.value.leaf == leaf
        assert text in str(caught.value)
    assert not (tmp_path / "new").exists()
    for target in ("like", "into"):
        with pytest.raises(
            sw.UnsupportedLeaf, match="a cycle: the dict at `params` is inside itself here"
        ) as caught:
            sw.restore(path, **{target: {"params": loop}})  # type: ignore[misc]
        assert caught.value.leaf == "params/self"
    same = np.zeros(2)
    sw.save(tmp_path / "tied", {"a": [same, {"b": same}], "c": [STATE["params"], STATE["params"]]})


def test_cyclic_or_deep_metadata_is_refused_by_path(tmp_path: Path) -> None:
    loop: dict[str, Any] = {}
    loop["x"] = [loop]
    deep: list[Any] = []
    for _ in range(2000):
        deep = [deep]
    for metadata, text in [
        (loop, r"custom_metadata\['x'\]\[0\] is a cycle"),
        (deep, "nested more than 64 deep"),
    ]:
        with pytest.raises(sw.MisuseError, match=text):
            sw.save(tmp_path / "c", {}, custom_metadata=metadata)
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("number", [2**53 + 1, -(2**63), 2**63, 2**64 - 1])
def test_integers_of_metadata_come_back_exactly(tmp_path: Path, number: int) -> None:
    sw.save(tmp_path / "c", {}, custom_metadata={"n": [number]})
    back = sw.metadata(tmp_path / "c").custom_metadata["n"][0]
    assert (type(back), back) == (int, number)


@pytest.mark.parametrize("number", [2**64, -(2**63) - 1, 10**400])
def test_metadata_integers_that_would_be_rounded_are_refused(tmp_path: Path, number: int) -> None:
    with pytest.raises(sw.MisuseError, match=r"custom_metadata\['n'\]\[0\] is an integer beyond 64 bits"):
        sw.save(tmp_path / "c", {}, custom_metadata={"n": [number]})
    with pytest.raises(sw.MisuseError, match="root_metadata"):
        sw.Options(root_metadata={"n": number})
    assert not (tmp_path / "c").exists()


@pytest.mark.parametrize("metadata", ["\udc80", {"\udc80": 1}, "x" * (5 << 20)])
def test_text_of_metadata_that_cannot_be_kept_is_refused(tmp_path: Path, metadata: Any) -> None:
    with pytest.raises(sw.MisuseError, match="custom_metadata"):
        sw.save(tmp_path / "c", {}, custom_metadata=metadata)


# ---- paths
# ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["", None, 3, "a\0b"])
def test_what_is_no_path_is_refused(path: Any) -> None:
    for call in (
        sw.CheckpointManager,
        lambda p: sw.save(p, {}),
        sw.restore,
        sw.open,
        sw.watch,
        sw.engine_info,
        lambda p: sw.add_metrics(p, 1, {}),
    ):
        if path is None and call is sw.engine_info:
            continue
        with pytest.raises(sw.MisuseError, match=r"path|root"):
            call(path)


def tree(path: Path) -> dict[Path, bytes | None]:
    return {p: p.read_bytes() if p.is_file() else None for p in sorted(path.rglob("*"))}


def test_mistyped_paths_say_what_they_are_and_what_to_pass(tmp_path: Path) -> None:
    run, single = tmp_path / "runs" / "llama", tmp_path / "single"
    with sw.CheckpointManager(run) as manager:
        manager.save(10, STATE).result()
    step = run / "step_00000010"
    sw.save(single, STATE)
    (tmp_path / "file").write_text("x")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "z").write_text("x")
    before = tree(tmp_path)
    for path, words in [
        (tmp_path / "file", "this file is in no format that is read"),
        (single / "manifest.json", f"inside the checkpoint {single}; pass that"),
        (step / "i0", f"inside the checkpoint {step}; pass that"),
        (run / ".stepwell", f"the control directory of the root {run}; pass that"),
        (run / ".stepwell" / "x", f"inside the control directory of the root {run}; pass that"),
        (tmp_path / "runs", "it holds the root llama: pass that path"),
        (tmp_path / "other", "it is a directory that holds no step: z"),
        (tmp_path / "runs" / "lama", f"{tmp_path / 'runs'} has no lama (near it is llama)"),
        (tmp_path / "rns" / "llama", f"{tmp_path} has no rns (near it is runs)"),
    ]:
        with pytest.raises((sw.StepNotFound, sw.errors.FormatError)) as caught:
            sw.restore(path)
        assert words in str(caught.value), str(caught.value)
    with pytest.raises(sw.StepNotFound, match="it is a single checkpoint: leave the step out"):
        sw.restore(single, step=7)
    with pytest.raises(sw.StepNotFound, match="has no step 7; the latest is 10"):
        sw.CheckpointManager(run, read_only=True).restore(7)
    for path in (tmp_path / "file", single, step, step / "i0", run / ".stepwell"):
        with pytest.raises(sw.MisuseError, match="root"):
            sw.CheckpointManager(path)
        with pytest.raises(sw.MisuseError, match="no root"):
            sw.watch(path)
    for exists in ("error", "replace"):
        for path in (
            run,
            step,
            run / "step_00000011",
            step / "i0",
            run / ".stepwell",
            tmp_path / "other",
            tmp_path / "file",
        ):
            with pytest.raises(sw.MisuseError):
                sw.save(path, {}, exists=exists)  # type: ignore[arg-type]
    assert tree(tmp_path) == before
    sw.save(run / "export", {"a": 1})
    with sw.CheckpointManager(run) as manager:
        assert manager.all_steps() == [10]


# ---- arguments
# ---------------------------------------------------------------------------------------

NAN = math.nan
ROW = np.zeros(4, np.float32)
RULES = sw.sharding.Rules({"**": ()})


@pytest.mark.parametrize(
    "make",
    [
        lambda: sw.every_seconds(NAN), lambda: sw.every_seconds(-1), lambda: sw.every_seconds("x"), lambda: sw.every_seconds(None),
        lambda: sw.every_steps(0), lambda: sw.every_steps(1.5), lambda: sw.every_steps(NAN), lambda: sw.every_steps(True),
        lambda: sw.every_steps(3, initial="no"), lambda: sw.at_steps(5), lambda: sw.at_steps([-1]), lambda: sw.at_steps("12"),
        lambda: sw.on_preemption(15), lambda: sw.on_preemption([9]), lambda: sw.on_preemption([32]), lambda: sw.on_preemption(["x"]),
        lambda: sw.when(3), lambda: sw.every_steps(3) | 3, lambda: sw.every_steps(3) & sw.keep_all(), lambda: sw.keep_all() | 3,
        lambda: sw.keep_latest(-1), lambda: sw.keep_latest(NAN), lambda: sw.keep_every(0), lambda: sw.keep_every(3, items=3),
        lambda: sw.keep_every(3, items=[]), lambda: sw.keep_best(1, "", "min"), lambda: sw.keep_best(1, "a", "lo"), lambda: sw.keep_best(NAN, "a", "min"),
        lambda: sw.keep_steps(3), lambda: sw.keep_steps([NAN]), lambda: sw.keep_newer_than(NAN), lambda: sw.keep_newer_than(-3),
        lambda: sw.Options(chunk_bytes=-1), lambda: sw.Options(chunk_bytes=4095), lambda: sw.Options(queue_depth=0), lambda: sw.Options(capture_threads=0),
        lambda: sw.Options(block_bytes="4k"), lambda: sw.Options(engine="fast"), lambda: sw.Options(create="no"), lambda: sw.Options(stall_timeout=NAN),
        lambda: sw.Options(silence=-1), lambda: sw.Options(silence=None), lambda: sw.Options(grace=NAN), lambda: sw.Options(grace="long"),
        lambda: sw.StepName(3), lambda: sw.StepName("a/b"), lambda: sw.StepName("x", -1), lambda: sw.StepName("x", 8, ["y"]),
        lambda: sw.ArraySpec("abc"), lambda: sw.ArraySpec((-1,)), lambda: sw.ArraySpec((2.5,)), lambda: sw.ArraySpec((2,), "flot32"),
        lambda: sw.register(3), lambda: sw.register(dict), lambda: sw.register(dict, dict),
        lambda: sw.every_steps(10**5000), lambda: sw.every_seconds(-10**5000), lambda: sw.at_steps(np.array(3)), lambda: sw.keep_every(3, items=np.array(3)),
        lambda: sw.coordinators.SharedDirectory(0, 2, "job", []), lambda: sw.ArraySpec((2**70,)), lambda: sw.ArraySpec(2**63), lambda: sw.ArraySpec((10**5000,)),
        lambda: sw.sharding.LocalShard(ROW, (2**70,), (0,)), lambda: sw.sharding.LocalShard(ROW, (2**62,), (2**63,)), lambda: sw.sharding.LocalShard(ROW, (4,), (0,), (0, 2**70)),
        lambda: sw.sharding.LocalShard(3, (), ()), lambda: sw.sharding.LocalShard(sw.ArraySpec(), (), ()),
        lambda: sw.sharding.Segment(None, (2**64,)), lambda: sw.sharding.Segment(None, (0,), (2**64,)), lambda: sw.sharding.Segment(None, (0,), shape=(2**64,)),
        lambda: sw.sharding.Segment(None, (0,), view=(2**64,)), lambda: sw.sharding.Segment(None, (0,), into_shape=(2**64,)), lambda: sw.sharding.Segment(None, (0,), permute=(2**64,)),
        lambda: sw.sharding.Segment.of_flat(None, (4,), 2**64, 4), lambda: sw.sharding.Segment.of_flat(None, (4,), 0, 2**64), lambda: sw.sharding.Segment.of_flat(None, (4,), 0, 4, at=2**64),
        lambda: sw.sharding.Segments(ROW, 3), lambda: sw.sharding.Segments(sw.ArraySpec(), []), lambda: sw.sharding.Segments(ROW, [sw.sharding.Segment(None, (0,), into=1.5)]),
        lambda: sw.sharding.Segments(ROW, [sw.sharding.Segment(None, (0,), into=slice(0, "1"))]), lambda: sw.sharding.Segments(ROW, [sw.sharding.Segment(None, (0,), into=ROW)]),
        lambda: sw.sharding.FlatShard(ROW, (2**40, 2**40), 0), lambda: sw.sharding.FlatShard(ROW, (4,), 2**64), lambda: sw.sharding.FlatShard(sw.ArraySpec(), (4,), 0),
        lambda: sw.sharding.RankMesh(a=2**31, b=2**31), lambda: sw.sharding.RankMesh([[0], [1, 2]], a=2), lambda: sw.sharding.RankMesh([0.5, 1.0], a=2), lambda: sw.sharding.RankMesh([-1, 0], a=2),
        lambda: sw.sharding.RankMesh(a=2).ranks(a=2), lambda: sw.sharding.RankMesh(a=2).ranks(a=2**64), lambda: sw.sharding.RankMesh(a=2).coordinates(2**64),
        lambda: sw.sharding.Rules([]), lambda: sw.sharding.Rules({"**": 3}), lambda: sw.sharding.Rules({"**": "tp"}), lambda: sw.sharding.Rules({"**": ()}, stages=3), lambda: RULES.shard({}, 3, 0),
        lambda: RULES.shard({"a": ROW}, sw.sharding.RankMesh(pp=2), 0, lambda path: (2**70,)), lambda: RULES.shard({"a": ROW}, sw.sharding.RankMesh(pp=2), 0, lambda path: ()),
        lambda: sw.sharding.Rules({"**": ()}, stages={"**": "x"}).shard({"a": ROW}, sw.sharding.RankMesh(pp=2), 0),
    ],
)  # fmt: skip
def test_meaningless_numbers_and_names_are_refused_at_once(make: Any) -> None:
    with pytest.raises(sw.MisuseError, match=" "):
        make()


@pytest.mark.parametrize("world", [1, 2])
def test_an_impossible_shared_directory_is_refused(tmp_path: Path, world: int) -> None:
    for job in ("", "a/b", "a b", "ä", "x\n", "x" * 129, "\ud800"):
        with pytest.raises(sw.MisuseError, match="job_id is 1 to 128 letters"):
            sw.coordinators.SharedDirectory(0, world, job)
    (tmp_path / "file").touch()
    for path in ("file", "gone"):
        with pytest.raises(sw.MisuseError, match=f"{path}' is no directory"):
            sw.coordinators.SharedDirectory(0, world, "job", tmp_path / path)
    for fine in ("x" * 128, "Az_09-.", 4711):
        assert sw.coordinators.SharedDirectory(0, world, fine, tmp_path).job_id == str(fine)


@pytest.mark.parametrize(
    "parts",
    [
        layouts.Parts(ROW, (2**70,), [layouts.Piece((0,), (4,), (slice(0, 4),))], None),
        layouts.Parts(ROW, (8,), [layouts.Piece((2**70,), (4,), (slice(0, 4),))], None),
    ],
)
def test_wrong_parts_of_another_package_are_refused_by_leaf(root: Path, parts: layouts.Parts) -> None:
    sw.save(root, {"a": [ROW]})
    for refused in (
        lambda: sw.save(root.with_name("other"), {"a": [parts]}),
        lambda: sw.restore(root, like={"a": [parts]}),
        lambda: sw.restore(root, into={"a": [parts]}),
    ):
        with pytest.raises(sw.UnsupportedLeaf, match=r"leaf `a\[0\]`: .* 64 bits") as caught:
            refused()
        assert caught.value.leaf == "a[0]"


@pytest.mark.parametrize("dtype", ["O", "V4", "S3", "longdouble", [("x", "f4")]])
def test_a_dtype_that_is_never_stored_is_refused_by_path(root: Path, dtype: Any) -> None:
    sw.save(root, {"a": ROW})
    for wanted in (sw.ArraySpec((4,), dtype), np.zeros(4, dtype)):
        with pytest.raises(sw.UnsupportedLeaf, match="leaf `a`: arrays of dtype"):
            sw.restore(root, like={"a": wanted})


def test_a_part_without_a_dtype_takes_the_stored_one(root: Path) -> None:
    sw.save(root, {"a": np.arange(4, dtype=np.int16)})
    part = sw.sharding.LocalShard(sw.ArraySpec((2,)), (4,), (2,))
    found = sw.restore(root, like={"a": part})["a"].local
    np.testing.assert_array_equal(found, np.array([2, 3], np.int16), strict=True)
    padded = sw.sharding.Segments(sw.ArraySpec((3,)), [sw.sharding.Segment(None, (2,), into=np.s_[1:])])
    found = sw.restore(root, like={"a": padded})["a"].local
    np.testing.assert_array_equal(found, np.array([0, 2, 3], np.int16), strict=True)


def test_integers_of_numpy_are_integers(root: Path) -> None:
    options = sw.Options(block_bytes=np.int64(4096), queue_depth=np.uint8(4))  # type: ignore[arg-type]
    name = sw.StepName(width=np.int32(4))  # type: ignore[arg-type]
    with sw.CheckpointManager(root, options=options, step_name=name) as manager:
        manager.save(np.int64(3), {"a": ROW}).result()  # type: ignore[arg-type]
        with pytest.raises(sw.MisuseError, match=r"leaf `a`: .* larger than any memory"):
            manager.prepare({"a": sw.ArraySpec((2**62,), "f8")})
        with pytest.raises(sw.MisuseError, match="branch"):
            manager.rewind(3, branch=3)  # type: ignore[arg-type]
    assert (root / "step_0003").is_dir()


@pytest.mark.parametrize(
    "wrong",
    [
        {"options": {}}, {"options": {"engine": "auto"}}, {"step_name": "step_"}, {"save_policy": 0}, {"save_policy": True}, {"retention": 0}, {"retention": "3"}, {"save_policy": lambda s, n: True},
        {"retention": sw.keep_latest}, {"staging_bytes": "lots"}, {"staging_bytes": -1}, {"staging_bytes": 1.5}, {"max_pending": "x"},
        {"max_pending": -1}, {"read_only": "no"}, {"on_save_error": "ignore"}, {"coordinator": 3}, {"coordinator": np.zeros(2)},
        {"options": sw.Options(silence=0.01)}, {"options": sw.Options(block_bytes=3)}, {"options": sw.Options(block_bytes=12288)},
        {"options": sw.Options(block_bytes=16 << 20)}, {"retention": sw.keep_latest(0)},
    ],
)  # fmt: skip
def test_a_manager_refuses_what_it_cannot_use_and_makes_nothing(root: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(sw.MisuseError):
        sw.CheckpointManager(root, **wrong)
    assert not root.exists()


def test_the_engine_takes_or_refuses_every_option(root: Path) -> None:
    given = json.loads(
        to_json(sw.Options(), sw.every_steps(1), sw.keep_all(), None, "auto", 1, False, "raise")
    )
    known = r"options: .*"
    for wrong in (
        {"queue_dept": 3},
        {"block_bytes": "4096"},
        {"read_only": "yes"},
        {"on_save_error": "ignore"},
    ):
        with pytest.raises(sw.MisuseError, match=known):
            _core.Manager(root, json.dumps(given | wrong))
    for name in given.keys() - {"root_metadata"}:  # which is whatever JSON the user likes
        with pytest.raises(sw.MisuseError, match=known):
            _core.Manager(root, json.dumps(given | {name: [{}]}))
    assert not root.exists()


def test_bounds_are_those_of_the_engine(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(_core.MAX_STEP, {}, metrics={"x" * _core.MAX_NAME_BYTES: 1}).result()
        with pytest.raises(sw.MisuseError, match=str(_core.MAX_STEP)):
            manager.save(_core.MAX_STEP + 1, {})


@pytest.mark.parametrize(
    "metrics",
    [3, "x", [1], {"": 1}, {"\udc80": 1}, {"x" * 70_000: 1}, {"a": np.array(1j)}, {"a": np.True_}, {"a": np.datetime64("2020")}, {"a": np.array("1")}],
)  # fmt: skip
def test_metrics_that_are_none_are_refused(root: Path, metrics: Any) -> None:
    with sw.CheckpointManager(root) as manager:
        with pytest.raises(sw.MisuseError, match="metric"):
            manager.save(0, {}, metrics=metrics)
        assert manager.all_steps() == []


@pytest.mark.parametrize(
    "wrong",
    [
        {"cast": "lossles"}, {"cast": 3}, {"cast": {"params/*": "flot16"}}, {"cast": {"params/*": "U3"}}, {"cast": {"params/*": None}}, {"cast": {3: "lossy"}},
        {"missing": 1}, {"missing": {"a": 1}}, {"missing": np.zeros(2)}, {"missing": ["keep"]}, {"unexpected": {"a": "ignor"}}, {"resize": 5},
        {"include": 3}, {"include": b"a"}, {"include": np.zeros(2)}, {"exclude": [None]}, {"like": {}, "rename": "x"},
        {"like": {}, "rename": [("a",)]}, {"like": {}, "rename": {"a": 3}}, {"to": "tensorflow"}, {"broadcast": "yes"}, {"return_report": "no"}, {"shardings": 3},
    ],
)  # fmt: skip
def test_keywords_of_a_restore_are_checked(path: Path, wrong: dict[str, Any]) -> None:
    with pytest.raises(sw.MisuseError, match=next(reversed(wrong))):
        sw.restore(path, **wrong)
    with sw.open(path) as checkpoint:
        for call in (checkpoint.restore, checkpoint.plan):
            with pytest.raises(sw.MisuseError):
                call(**wrong)


def test_restore_keywords_are_the_same_everywhere(path: Path) -> None:
    expected = list(get_type_hints(restore_options.RestoreKeywords))
    for function, own in [
        (sw.restore, ["path", "step", "fallback"]),
        (sw.restore_async, ["path", "step", "fallback"]),
        (sw.CheckpointManager.restore_async, ["self", "step", "best", "fallback"]),
        (sw.CheckpointManager.restore, ["self", "step", "best", "fallback"]),
        (sw.CheckpointManager.plan, ["self", "step"]),
        (sw.Checkpoint.restore, ["self"]),
        (sw.Checkpoint.plan, ["self"]),
    ]:
        parameters = inspect.signature(function).parameters
        assert list(parameters)[: len(own)] == own
        assert set(parameters) == {*own, *expected}
        assert all(f"    {name}: " in (function.__doc__ or "") for name in expected)
        assert parameters["cast"].default == "lossless"
    with pytest.raises(TypeError, match="'inclde'; did you mean 'include'"):
        sw.restore(path, inclde="x")  # type: ignore[call-arg]


def test_words_of_a_save_are_checked(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        for wrong in ({"exists": "yes"}, {"exists": ["error"]}, {"force": "no"}, {"snapshot": "now"}):
            with pytest.raises(sw.MisuseError, match=next(iter(wrong))):
                manager.save(0, {}, **wrong)  # type: ignore[arg-type]
        for ask in (("loss",), ("loss", "lo"), (None, "min"), (3, "min")):
            with pytest.raises(sw.MisuseError):
                manager.best_step(*ask)  # type: ignore[arg-type]
        assert manager.all_steps() == []


# ---- generators and memory
# ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "generator",
    [
        np.random.Generator(np.random.MT19937(0)),
        np.random.RandomState(0),
        random.Random(0),
        random,
        np.random.Philox(0),
    ],
    ids=["Generator", "RandomState", "Random", "random", "Philox"],
)
def test_a_wrong_generator_state_is_refused_unwritten(tmp_path: Path, generator: Any) -> None:
    sw.save(tmp_path / "c", {"a": np.ones(5), "rng": np.random.default_rng(0)})
    target = np.zeros(5)
    other = {"a": target, "rng": generator}
    with pytest.raises(sw.MismatchError, match="leaf `rng`: the stored state does not fit") as caught:
        sw.restore(tmp_path / "c", into=other)
    assert caught.value.leaf == "rng"
    assert not target.any()
    with pytest.raises(sw.MismatchError):
        sw.restore(tmp_path / "c", like=other)


def test_overlapping_memory_is_refused_unwritten(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"a": {"x": np.arange(1.0, 7), "y": np.arange(6.0)}})
    memory = np.zeros(20)
    for wrong, leaf in [
        ({"x": as_strided(memory, (6,), (4,)), "y": np.zeros(6)}, "a/x"),
        ({"x": np.zeros(6), "y": as_strided(memory, (6,), (0,))}, "a/y"),
        ({"x": memory[:6], "y": memory[3:9]}, "a/x"),
        ({"x": memory[:6], "y": memory[5::-1]}, "a/y"),
    ]:
        with pytest.raises(sw.MismatchError, match=f"`{leaf}`"):
            sw.restore(tmp_path / "c", into={"a": wrong})
        assert not memory.any()
    with pytest.raises(sw.MismatchError, match="`a/lora` is to keep its value, and overlaps `a/x`"):
        sw.restore(
            tmp_path / "c",
            into={"a": {"x": memory[:6], "y": sw.AS_STORED, "lora": memory[3:9]}},
            missing="keep",
        )
    assert not memory.any()
    tied = memory[:6]
    sw.restore(tmp_path / "c", into={"a": {"x": tied, "y": sw.AS_STORED, "head": tied}}, missing="keep")
    assert tied.tolist() == [1, 2, 3, 4, 5, 6]


def test_unusual_strides_that_share_no_memory_are_filled(tmp_path: Path) -> None:
    stored = np.arange(6.0).reshape(3, 2)
    sw.save(tmp_path / "c", {"x": stored})
    target = as_strided(np.zeros(8), (3, 2), (16, 24))
    assert sw.restore(tmp_path / "c", into={"x": target})["x"] is target
    assert np.array_equal(target, stored)


def test_nothing_is_left_by_what_is_refused(tmp_path: Path) -> None:
    for wrong in ({"metrics": 3}, {"custom_metadata": {1: 2}}, {"exists": "yes"}, {"options": {}}):
        with pytest.raises(sw.MisuseError):
            sw.save(tmp_path / "x", {}, **wrong)  # type: ignore[arg-type]
    assert list(tmp_path.iterdir()) == []


class Failing:
    def state_dict(self) -> dict[str, Any]:
        raise RuntimeError("not ready")

    def load_state_dict(self, state: dict[str, Any]) -> None:
        raise AssertionError(state)


def test_an_error_of_the_callers_code_names_the_place(tmp_path: Path) -> None:
    @dataclasses.dataclass
    class Lacking:
        x: int

    lacking = Lacking(1)
    del lacking.x
    for state, place in (
        ({"a": [1, {"l": Failing()}]}, "the Failing at leaf `a[1]/l`"),
        ({"d": lacking}, "the Lacking at leaf `d`"),
        (Failing(), "the Failing at the whole state"),
    ):
        with pytest.raises((RuntimeError, AttributeError)) as caught:
            sw.save(tmp_path / "c", state)
        assert any(place in note for note in caught.value.__notes__)
    sw.save(tmp_path / "c", {"d": {"x": 1}})
    with pytest.raises(AttributeError) as wanted:
        sw.restore(tmp_path / "c", like={"d": lacking})
    assert any("the Lacking at leaf `d`" in note for note in wanted.value.__notes__)


def test_errors_at_the_root_of_a_state_name_it(tmp_path: Path) -> None:
    with pytest.raises(sw.UnsupportedLeaf, match=r"^the whole state: "):
        sw.save(tmp_path / "c", lambda: object())
    sw.save(tmp_path / "c", np.zeros(3))
    for like, match in (
        (np.zeros(4), "the whole state: stored"),
        (np.zeros(3, int), "the whole state: stored"),
        (5, "the whole state: stored"),
        (object(), "^the whole state: "),
    ):
        with pytest.raises((sw.MismatchError, sw.UnsupportedLeaf), match=match):
            sw.restore(tmp_path / "c", like=like)


def test_saving_to_a_path_that_is_taken_speaks_of_the_path(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"w": 1})
    with pytest.raises(sw.StepExists, match='exists="replace"') as caught:
        sw.save(tmp_path / "c", {"w": 2})
    assert "step 0" not in str(caught.value)
    assert "skip" not in str(caught.value)
    assert str(tmp_path / "c") in str(caught.value)


def test_a_read_only_manager_says_once_that_it_saves_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with sw.CheckpointManager(tmp_path / "run") as mgr:
        mgr.save(0, {"w": 1})
    with sw.CheckpointManager(tmp_path / "run", read_only=True) as mgr:
        assert not mgr.save(1, {"w": 1})
        assert not mgr.save(2, {"w": 1})
        with pytest.raises(sw.errors.ReadOnlyError, match="read_only=True"):
            mgr.save(3, {"w": 1}, force=True)
        assert mgr.all_steps() == [0]
    assert [one.levelname for one in caplog.records if "read_only" in one.getMessage()] == ["WARNING"]


def test_a_directory_that_is_no_step_is_explained(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "d").mkdir()
    (tmp_path / "d" / "notes.txt").write_text("x")
    with pytest.raises(sw.errors.NotAStep):
        sw.open(tmp_path / "d")
    time.sleep(0.3)  # warnings come through a thread
    assert not caplog.records


def test_an_index_that_is_no_basic_one_is_refused_as_such(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"w": np.arange(4), "s": 1})
    with sw.open(tmp_path / "c") as checkpoint:
        w = checkpoint["w"]
        for index in (w[:] > 1, [True] * 4, np.array([0, 1]), [0, 1], None, 1.0, True, np.array(True), "a"):
            with pytest.raises(IndexError, match="integers, slices"):
                w[index]
        assert w[np.array(2)] == 2
        assert w[np.int64(-1)] == 3
        assert w[...].tolist() == [0, 1, 2, 3]


def test_combined_policies_say_how_they_combine() -> None:
    for words in (
        lambda: sw.every_steps(2) and sw.at_steps([3]),
        lambda: sw.every_steps(2) or sw.at_steps([3]),
        lambda: not sw.every_steps(2),
    ):
        with pytest.raises(TypeError, match=r"with \| and &"):
            words()
    with pytest.raises(TypeError, match=r"with \|"):
        _ = sw.keep_latest(1) or sw.keep_all()


def test_a_damaged_step_is_warned_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with sw.CheckpointManager(tmp_path / "run") as mgr:
        for step in range(2):
            mgr.save(step, {"w": np.arange(3)})
    next((tmp_path / "run" / "step_00000001").rglob("*.data")).unlink()
    with sw.CheckpointManager(tmp_path / "run", read_only=True) as mgr:
        assert [mgr.latest_step() for _ in range(3)] == [0, 0, 0]
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline and not caplog.records:
        time.sleep(0.01)
    time.sleep(0.2)
    assert sum("damaged step is skipped" in one.getMessage() for one in caplog.records) == 1


def test_an_include_without_a_match_is_refused_with_advice(path: Path) -> None:
    with pytest.raises(sw.errors.MisuseError, match=r"include=\[\] selects nothing; leave it out"):
        sw.restore(path, include=[])
    assert sw.restore(path, include=["step"], exclude=[])["step"] == 3


def test_a_checkpoint_that_was_closed_is_entered_by_nobody(path: Path) -> None:
    checkpoint = sw.open(path)
    checkpoint.close()
    with pytest.raises(sw.errors.ClosedError), checkpoint:
        pass
