"""Open checkpoints: reading just what is asked for, verifying, watching; singular saves."""

from __future__ import annotations

import shutil
import threading
import time
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import stepwell as sw
from conftest import same
from hypothesis import given, settings
from hypothesis import strategies as st

ARRAY = np.arange(5 * 7 * 3, dtype=np.int16).reshape(5, 7, 3)


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("c") / "one"
    sw.save(
        where, {"params": {"w": ARRAY, "b": np.ones((), ml_dtypes.bfloat16)}, "list": [1, {"x": "y"}], "n": 3}
    )
    return where


@pytest.mark.parametrize(
    "index",
    [0, -1, ..., slice(None), slice(1, 3), slice(None, None, -2), (slice(1, 4), 2), (..., 1), (1, ..., slice(0, 2)),
     (slice(4, 1, -1), slice(None), -1), (0, 0, 0), slice(3, 3), np.int64(2), ()],
)  # fmt: skip
def test_a_slice_is_what_numpy_says(path: Path, index: Any) -> None:
    with sw.open(path) as checkpoint:
        assert np.array_equal(checkpoint["params"]["w"][index], ARRAY[index])
        assert np.shape(checkpoint["params"]["w"][index]) == np.shape(ARRAY[index])


parts = st.one_of(st.integers(-5, 4), st.builds(slice, *[st.one_of(st.none(), st.integers(-8, 8))] * 2,
                                                 st.one_of(st.none(), st.sampled_from([-3, -1, 1, 2]))))  # fmt: skip


@settings(max_examples=100, deadline=None)
@given(parts, parts.filter(lambda p: isinstance(p, slice)))
def test_any_slice_is_what_numpy_says(path: Path, first: Any, second: Any) -> None:
    with sw.open(path) as checkpoint:
        assert same(np.asarray(checkpoint["params"]["w"][first, second]), np.asarray(ARRAY[first, second]))


@pytest.mark.parametrize("index", [5, -6, (0, 0, 0, 0), None, [1, 2], (..., ...), "x", True, 1.0])
def test_other_indices_are_refused(path: Path, index: Any) -> None:
    with sw.open(path) as checkpoint, pytest.raises(IndexError):
        checkpoint["params"]["w"][index]


def test_only_the_blocks_of_a_slice_are_read(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"w": np.zeros((1 << 24,), np.uint8)})
    data = next((tmp_path / "c").glob("i*/*.data"))
    data.chmod(0o644)
    raw = bytearray(data.read_bytes())
    raw[10 << 20] ^= 1
    data.write_bytes(raw)
    with sw.open(tmp_path / "c") as checkpoint:
        assert not checkpoint["w"][: 1 << 20].any()
        with pytest.raises(sw.CorruptCheckpoint):
            checkpoint["w"][:]


def test_a_checkpoint_is_walked_like_what_was_saved(path: Path) -> None:
    with sw.open(path) as checkpoint:
        assert checkpoint.keys() == ["params", "list", "n"]
        assert list(checkpoint["params"]) == ["w", "b"]
        assert checkpoint["list"][1]["x"] == "y"
        assert checkpoint["n"] == 3
        assert checkpoint["params"]["w"].shape == (5, 7, 3)
        assert checkpoint["params"]["b"].dtype == ml_dtypes.bfloat16
        assert same(checkpoint["params"].load(), {"w": ARRAY, "b": np.ones((), ml_dtypes.bfloat16)})
        assert same(np.asarray(checkpoint["params"]["w"]), ARRAY)
        assert checkpoint.paths() == ["params/w", "params/b", "list[0]", "list[1]/x", "n"]
        assert "w" in checkpoint["params"]
        assert "zzz" not in checkpoint
        with pytest.raises(KeyError, match="params"):
            checkpoint["params"]["zzz"]
    with pytest.raises(sw.ClosedError):
        checkpoint["n"]


def test_a_sound_checkpoint_verifies_and_tells_its_progress(path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = sw.verify(path, progress=lambda done, total: seen.append((done, total)))
    assert report
    assert report.files == 3
    assert seen[-1][0] == seen[-1][1] > 0


def sound(path: Path) -> bool:
    """Whether a checkpoint opens and verifies; anything but the two errors that say "damaged" is a defect."""
    try:
        return bool(sw.verify(path))
    except (sw.CorruptCheckpoint, sw.FormatError):
        return False


def test_every_flipped_byte_is_found_and_named(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"params": {"w": np.arange(3000)}, "n": 3})
    files = [p for p in (tmp_path / "c").rglob("*") if p.is_file() and p.stat().st_size]
    rng = np.random.default_rng(0)
    for file in files:
        original = file.read_bytes()
        file.chmod(0o644)
        for at in rng.integers(0, len(original), 25):
            raw = bytearray(original)
            raw[at] ^= 1 << int(rng.integers(8))
            file.write_bytes(raw)
            assert not sound(tmp_path / "c"), f"{file.name} at {at}"
        file.write_bytes(original)
    assert sw.verify(tmp_path / "c")


def test_a_singular_checkpoint_is_not_overwritten_by_accident(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"a": 1})
    with pytest.raises(sw.StepExists):
        sw.save(tmp_path / "c", {"a": 2})
    assert sw.restore(tmp_path / "c") == {"a": 1}
    sw.save(tmp_path / "c", {"a": 2}, exists="replace")
    assert sw.restore(tmp_path / "c") == {"a": 2}
    assert [p.name for p in tmp_path.iterdir()] == ["c"]
    (tmp_path / "other").mkdir()
    with pytest.raises(sw.StepwellError):
        sw.save(tmp_path / "other", {"a": 2}, exists="replace")


def test_a_root_opens_its_newest_step_and_a_copy_of_a_step_is_one(tmp_path: Path) -> None:
    with sw.CheckpointManager(tmp_path / "run") as manager:
        for step in range(3):
            manager.save(step, {"n": step})
    assert sw.restore(tmp_path / "run") == {"n": 2}
    assert sw.restore(tmp_path / "run", step=1) == {"n": 1}
    assert sw.restore(tmp_path / "run" / "step_00000000") == {"n": 0}
    shutil.copytree(tmp_path / "run" / "step_00000001", tmp_path / "copy")
    assert sw.restore(tmp_path / "copy") == {"n": 1}
    with pytest.raises(sw.StepNotFound):
        sw.open(tmp_path / "run", 9)
    with pytest.raises(sw.StepNotFound):
        sw.open(tmp_path / "nothing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(sw.StepwellError):
        sw.open(tmp_path / "empty")


def test_a_save_in_the_background_is_a_future(tmp_path: Path) -> None:
    array = np.zeros(1 << 20)
    save = sw.save_async(tmp_path / "c", {"a": array}, metrics={"loss": 1}, custom_metadata={"x": 1})
    array += 1
    save.result()
    assert not sw.restore(tmp_path / "c")["a"].any()
    found = sw.metadata(tmp_path / "c")
    assert found.metrics == {"loss": 1.0}
    assert found.custom_metadata == {"x": 1}


def test_watching_yields_each_step_as_it_comes_and_ends(tmp_path: Path) -> None:
    root = tmp_path / "run"

    def train() -> None:
        with sw.CheckpointManager(root) as manager:
            for step in range(4):
                manager.save(step, {"n": step}).result()
                time.sleep(0.05)

    thread = threading.Thread(target=train)
    thread.start()
    steps = []
    for checkpoint in sw.watch(root, which="all", timeout=60, interval=0.02):
        steps.append(checkpoint.restore()["n"])
        if len(steps) == 4:
            break
    thread.join()
    assert steps == [0, 1, 2, 3]
    assert [c.step for c in sw.watch(root, timeout=0)] == [3]
    assert [c.step for c in sw.watch(root, after=1, which="all", timeout=0)] == [2, 3]


def test_a_step_that_is_read_is_not_removed_under_its_reader(tmp_path: Path) -> None:
    with sw.CheckpointManager(tmp_path / "run", retention=sw.keep_latest(1)) as manager:
        manager.save(0, {"a": np.arange(1000)}).result()
        reader = sw.open(tmp_path / "run")
        manager.save(1, {"a": np.arange(5)}).result()
        manager.wait_until_finished()
        assert manager.all_steps() == [1]
        assert np.array_equal(reader["a"][:], np.arange(1000))
        reader.close()


def test_the_engine_says_why(tmp_path: Path) -> None:
    info = sw.engine_info(tmp_path)
    assert info["engine"] in ("io_uring", "threads", "buffered")
    assert info["reasons"]
    assert info["stepwell"] == sw.__version__


@pytest.mark.parametrize("engine", ["uring", "threads", "buffered"])
def test_every_engine_writes_what_every_engine_reads(tmp_path: Path, engine: Any) -> None:
    sw.save(tmp_path / "c", {"a": ARRAY}, options=sw.Options(engine=engine))
    for reader in ("auto", "buffered", "threads"):
        with sw.open(tmp_path / "c", engine=reader) as checkpoint:
            assert np.array_equal(checkpoint["a"][:], ARRAY)
