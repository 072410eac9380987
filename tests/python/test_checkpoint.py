"""Open checkpoints: reading just what is asked for, verifying, watching; singular saves."""

from __future__ import annotations

import gc
import os
import shutil
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import ml_dtypes
import numpy as np
import pytest
import stepwell as sw
from conftest import same
from hypothesis import given, settings
from hypothesis import strategies as st
from stepwell import _watcher as watching

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


parts = st.one_of(
    st.integers(-5, 4),
    st.builds(
        slice,
        *[st.one_of(st.none(), st.integers(-8, 8))] * 2,
        st.one_of(st.none(), st.sampled_from([-3, -1, 1, 2])),
    ),
)


@settings(max_examples=100, deadline=None)
@given(parts, parts.filter(lambda p: isinstance(p, slice)))
def test_any_slice_is_what_numpy_says(path: Path, first: Any, second: Any) -> None:
    with sw.open(path) as checkpoint:
        assert same(np.asarray(checkpoint["params"]["w"][first, second]), np.asarray(ARRAY[first, second]))


def test_slices_of_several_leaves_are_read_in_one_go(path: Path) -> None:
    with sw.open(path) as checkpoint:
        wanted = [
            ("params/w", np.s_[1:3, -1]),
            ("list[1]/x", ...),
            ("params/b", ()),
            ("params/w", 0),
            ("n", ()),
        ]
        found = checkpoint.read(wanted)
        with pytest.raises(KeyError, match="no leaf has the path 'params/v'; did you mean 'params/w'"):
            checkpoint.read([("params/v", ...)])
    assert np.array_equal(found[0], ARRAY[1:3, -1])
    assert found[1] == "y"
    assert found[2] == 1
    assert np.array_equal(found[3], ARRAY[0])
    assert found[4] == 3


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        (["w"], "not str 'w'"),
        ("params/w", "not str 'params/w'"),
        ({"params/w": ...}, r"not a dict: pass its items\(\)"),
        ([("params/w",)], "not tuple"),
        ([(0, ...)], "not tuple"),
        (5, "not int 5"),
    ],
)
def test_a_read_of_no_pairs_says_what_to_pass(path: Path, wanted: Any, message: str) -> None:
    with sw.open(path) as checkpoint:
        with pytest.raises(sw.MisuseError, match=f"such as .* for a whole leaf, {message}"):
            checkpoint.read(wanted)
        assert same(checkpoint.read({"params/w": ...}.items())[0], ARRAY)


def test_contents_name_the_place_of_every_byte(tmp_path: Path) -> None:
    tied = np.arange(6, dtype=np.int32)
    sw.save(tmp_path / "c", {"params": {"w": ARRAY, "t": tied, "u": tied}, "n": 3})
    with sw.open(tmp_path / "c") as checkpoint:
        nodes = {node.path: node for node in checkpoint.contents()}
        assert list(nodes) == ["", "params", "params/w", "params/t", "params/u", "n"]
        assert [path for path, node in nodes.items() if node.leaf is not None] == checkpoint.paths()
        where = checkpoint.path
    assert (nodes["params"].kind, nodes["params"].leaves) == ("dict", 3)
    assert nodes["params"].stored_bytes == ARRAY.nbytes + tied.nbytes
    assert nodes["params/u"].tied_to == "params/t"
    assert (nodes["params/u"].stored_bytes, nodes["params/u"].nbytes) == (0, tied.nbytes)
    assert [nodes[path].item for path in ("params/w", "n")] == ["params", "."]
    w = nodes["params/w"]
    assert (w.kind, w.dtype, w.shape, w.name) == ("array", "int16", ARRAY.shape, "w")
    (chunk,) = w.chunks
    assert chunk.file is not None
    assert (Path(where) / chunk.file).read_bytes()[chunk.offset :][: chunk.nbytes] == ARRAY.tobytes()


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
        assert list(checkpoint.keys()) == ["params", "list", "n"]
        assert list(checkpoint["params"]) == ["w", "b"]
        assert checkpoint["list"][1]["x"] == "y"
        assert checkpoint["n"] == 3
        assert checkpoint["params"]["w"].shape == (5, 7, 3)
        assert checkpoint["params"]["b"].dtype == ml_dtypes.bfloat16
        assert same(checkpoint["params"].load(), {"w": ARRAY, "b": np.ones((), ml_dtypes.bfloat16)})
        assert same(np.asarray(checkpoint["params"]["w"]), ARRAY)
        assert checkpoint["list"][1].load() == {"x": "y"}  # it has a neighbour
        assert checkpoint.paths() == ["params/w", "params/b", "list[0]", "list[1]/x", "n"]
        assert "w" in checkpoint["params"]
        assert "zzz" not in checkpoint
        with pytest.raises(KeyError, match="params"):
            checkpoint["params"]["zzz"]
    with pytest.raises(sw.errors.ClosedError):
        checkpoint["n"]


def test_a_checkpoint_is_a_mapping_that_finds_paths(path: Path) -> None:
    with sw.open(path) as checkpoint:
        assert isinstance(checkpoint, Mapping)
        assert len(checkpoint) == 3
        assert same(checkpoint["params/w"][0], ARRAY[0])
        assert checkpoint["list/1/x"] == checkpoint["list[1]/x"] == "y"
        assert checkpoint["list"]["1/x"] == "y"
        assert "params/w" in checkpoint
        assert "params/z" not in checkpoint
        assert 0 not in checkpoint
        assert [key for key, _ in checkpoint.items()] == ["params", "list", "n"]
        assert checkpoint == checkpoint and len({checkpoint}) == 1  # noqa: PT018
        for wrong in ("params/z", "params/w/x", "list/2", "list[9]", "", "/"):
            with pytest.raises(KeyError):
                checkpoint[wrong]
        assert repr(checkpoint).splitlines() == [
            f"<Checkpoint of step 0 at {path}:",
            "  params: dict of 2",
            "    w: int16[5, 7, 3]",
            "    b: bfloat16[]",
            "  list: list of 2",
            "    0: object",
            "    1: dict of 1",
            "  n: object>",
        ]
        assert repr(checkpoint["list"]).splitlines()[0] == "<Subtree `list`:"
    assert repr(checkpoint) == "<Checkpoint, closed>"


def test_a_key_with_a_slash_is_found_before_a_path(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"a/b": 1, "a": {"b": 2, "": 3}})
    with sw.open(tmp_path / "c") as checkpoint:
        assert checkpoint["a/b"] == 1
        assert checkpoint["a"]["b"] == 2
        assert [checkpoint[path] for path in checkpoint.paths()] == [1, 1, 3]


def test_a_sound_checkpoint_verifies_and_tells_its_progress(path: Path) -> None:
    seen: list[tuple[int, int]] = []
    report = sw.verify(path, progress=lambda done, total: seen.append((done, total)))
    assert report
    assert report.files == 3
    assert seen[-1][0] == seen[-1][1] > 0


def sound(path: Path) -> bool:
    """True if a checkpoint opens and verifies; anything but the two errors that say "damaged" is a
    defect."""
    try:
        return bool(sw.verify(path))
    except (sw.CorruptCheckpoint, sw.errors.FormatError):
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


def test_a_root_opens_its_newest_step(tmp_path: Path) -> None:
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


@pytest.mark.parametrize("which", ["latest", "all"])
def test_what_is_saved_anew_after_a_rewind_is_watched_again(
    tmp_path: Path, which: Literal["latest", "all"]
) -> None:
    root = tmp_path / "run"
    with sw.CheckpointManager(root) as manager:

        def save(step: int, value: int, exists: Literal["error", "replace"] = "error") -> None:
            manager.save(step, {"a": np.array(value)}, exists=exists).result()

        for step in (1, 2, 3):
            save(step, step)
        seen = sw.watch(root, which=which, timeout=30, interval=0.02)

        def given() -> tuple[int, int]:
            checkpoint = next(seen)
            return checkpoint.step, int(checkpoint["a"][...])

        assert [given() for _ in range(1 if which == "latest" else 3)][-1] == (3, 3)
        manager.rewind(1)
        save(2, 20)
        assert given() == (2, 20)
        save(3, 30)
        assert given() == (3, 30)
        save(3, 31, "replace")
        assert given() == (3, 31)
        save(4, 4)
        assert given() == (4, 4)
        # All the way past what was given, before anybody looked.
        manager.rewind(2)
        for step in (3, 4, 5):
            save(step, 10 * step)
        assert given() == ((5, 50) if which == "latest" else (3, 30))


@pytest.mark.parametrize("which", ["latest", "all"])
def test_a_look_between_changes_gives_only_new_facts(tmp_path: Path, which: Literal["latest", "all"]) -> None:
    root = tmp_path / "run"
    steps = watching._Steps(str(root), sw.open, None)

    def given() -> list[tuple[int, int]]:
        found = []
        for checkpoint in steps.newest() if which == "latest" else steps.all():
            with checkpoint:
                found.append((checkpoint.step, int(checkpoint["a"][...])))
        return found

    with sw.CheckpointManager(root) as manager:

        def save(step: int, value: int, exists: Literal["error", "replace"] = "error") -> None:
            manager.save(step, {"a": np.array(value)}, exists=exists).result()

        assert given() == []
        for step in range(5):
            save(step, step)
        everything = [(step, step) for step in range(5)]
        assert given() == (everything[-1:] if which == "latest" else everything)
        assert given() == []
        # Rewound twice, with a look in between, before anything is saved.
        for step in (3, 1):
            manager.rewind(step)
            assert given() == []
        save(2, 20)
        assert given() == [(2, 20)]
        save(3, 30)
        assert given() == [(3, 30)]
        # The newest step after a rewind is replaced.
        manager.rewind(2)
        assert given() == []
        save(2, 21, "replace")
        assert given() == [(2, 21)]
        save(3, 31)
        manager.delete(3)
        save(3, 32)
        assert given() == [(3, 32)]
        manager.delete(3)
        assert given() == []
    steps.close()


class Mirror:
    """A copy of a root that is filled file by file, the manifests first: as ``rsync`` may fill
    it."""

    def __init__(self, source: Path, mirror: Path) -> None:
        self.source, self.mirror = source, mirror
        shutil.copytree(source / ".stepwell", mirror / ".stepwell")

    def begin(self, step: int) -> None:
        name = f"step_{step:08}"
        for path in (self.source / name).rglob("*"):
            if path.is_dir():
                (self.mirror / name / path.relative_to(self.source / name)).mkdir(parents=True)
        self._copy(f"{name}/manifest.json")

    def index(self, step: int) -> None:
        """The index too, and a part of the data."""
        for path in (self.source / f"step_{step:08}").glob("i*/*"):
            self._copy(str(path.relative_to(self.source)))
            if path.suffix == ".data":
                os.truncate(self.mirror / path.relative_to(self.source), 4096)

    def finish(self, step: int) -> None:
        for path in (self.source / f"step_{step:08}").rglob("*"):
            if path.is_file():
                self._copy(str(path.relative_to(self.source)))

    def _copy(self, path: str) -> None:
        shutil.copyfile(self.source / path, self.mirror / path)


@pytest.fixture
def mirror(tmp_path: Path) -> Mirror:
    with sw.CheckpointManager(tmp_path / "trainer") as manager:
        for step in range(3):
            manager.save(step, {"a": np.full(100_000, step)}).result()
    return Mirror(tmp_path / "trainer", tmp_path / "mirror")


@pytest.mark.parametrize("part", ["manifest", "index"])
def test_watching_a_mirror_yields_the_newest_whole_step(
    mirror: Mirror, part: str, caplog: pytest.LogCaptureFixture
) -> None:
    mirror.begin(0)
    mirror.finish(0)
    for step in (1, 2):
        mirror.begin(step)
        if part == "index":
            mirror.index(step)
    seen = sw.watch(mirror.mirror, timeout=30, interval=0.02)
    assert next(seen).restore()["a"][0] == 0
    timer = threading.Timer(0.3, mirror.finish, [2])
    timer.start()
    with next(seen) as checkpoint:
        assert checkpoint.step == 2
        assert checkpoint.restore()["a"][0] == 2
    timer.join()
    warnings = [record.message for record in caplog.records if "passed over" in record.message]
    assert len(warnings) == 2  # one for each of the steps, however often it was looked at
    mirror.finish(1)
    assert list(sw.watch(mirror.mirror, after=2, timeout=0)) == []


def test_watching_all_yields_a_late_step_when_it_is_whole(mirror: Mirror) -> None:
    for step in range(3):
        mirror.begin(step)
    mirror.finish(0)
    mirror.index(1)
    mirror.finish(2)
    seen = sw.watch(mirror.mirror, which="all", timeout=4, interval=0.02)
    assert [next(seen).step, next(seen).step] == [0, 2]
    timer = threading.Timer(0.3, mirror.finish, [1])
    timer.start()
    assert [int(one.restore()["a"][0]) for one in seen] == [1]
    timer.join()


def test_watching_ends_when_nothing_becomes_whole(mirror: Mirror) -> None:
    mirror.begin(0)
    for which in ("latest", "all"):
        assert list(sw.watch(mirror.mirror, which=which, timeout=0.1, interval=0.02)) == []  # type: ignore[arg-type]


def test_a_step_that_is_read_is_not_removed_under_its_reader(tmp_path: Path) -> None:
    with sw.CheckpointManager(tmp_path / "run", retention=sw.keep_latest(1)) as manager:
        manager.save(0, {"a": np.arange(1000)}).result()
        reader = sw.open(tmp_path / "run")
        manager.save(1, {"a": np.arange(5)}).result()
        manager.wait_until_finished()
        assert manager.all_steps() == [0, 1], "a leased step stays listed"
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


@pytest.mark.parametrize("how", ["flip", "cut", "lose"])
@pytest.mark.parametrize("file", ["manifest.json", "i0/index", "i1/index", "i0/00000.data"])
def test_verifying_a_root_reads_its_newest_step(tmp_path: Path, file: str, how: str) -> None:
    root = tmp_path / "run"
    with sw.CheckpointManager(root) as mgr:
        for step in range(2):
            mgr.save(step, {"p": {"w": np.arange(100_000)}, "q": {"w": np.ones(10)}})
    whole = sw.verify(root)
    assert whole.ok
    assert (whole.step, whole.path) == (1, str(root / "step_00000001"))
    damaged = root / "step_00000001" / file
    if how == "lose":
        damaged.unlink()
    else:
        raw = bytearray(damaged.read_bytes())
        raw[len(raw) // 2] ^= 1
        damaged.write_bytes(raw[: len(raw) // 2] if how == "cut" else raw)
    reports = [sw.verify(root), sw.verify(root, 1)]
    if (file, how) != ("manifest.json", "lose"):
        reports.append(sw.verify(root / "step_00000001"))
    for report in reports:
        assert not report.ok
        assert report.path == str(root / "step_00000001")
        assert [damage.file for damage in report.damages] == [str(damaged)]
    assert [report.step for report in reports[:2]] == [1, 1]
    assert sw.verify(root, 0).step == 0
    assert sw.verify(root, 0).ok


def test_an_empty_newest_step_does_not_verify(tmp_path: Path) -> None:
    with sw.CheckpointManager(tmp_path / "run") as mgr:
        mgr.save(1, {"w": np.arange(3)})
    (tmp_path / "run" / "step_00000007").mkdir()
    for report in (sw.verify(tmp_path / "run"), sw.verify(tmp_path / "run", 7)):
        assert not report.ok
        assert report.step == 7
        assert "no manifest.json" in report.damages[0].what
    assert sw.verify(tmp_path / "run", 1).ok


@pytest.mark.parametrize("is_on", [True, False])
def test_reading_leaves_the_garbage_collector_as_it_was(tmp_path: Path, is_on: bool) -> None:
    sw.save(tmp_path / "one", {"params": {"w": np.zeros(3, np.float32), "v": np.zeros(3, np.float32)}})
    was_on = gc.isenabled()
    try:
        (gc.enable if is_on else gc.disable)()
        tree = sw.metadata(tmp_path / "one").tree
        assert gc.isenabled() is is_on
        assert tree["params"]["w"] == sw.ArraySpec((3,), np.float32)
    finally:
        (gc.enable if was_on else gc.disable)()
