"""Conversions that several ranks share: each writes a part, and one publishes."""

from __future__ import annotations

import hashlib
import random
import shutil
import signal
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from conftest import partials, same
from longer import LONG
from ranks import start
from stepwell import _core
from stepwell._conversion import files, save


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A checkpoint whose tensors have different sizes, and a directory where ranks meet."""
    rng = np.random.default_rng(3)
    sw.save(tmp_path / "saved", {f"w{n}": rng.standard_normal((n + 1, 250, 100)) for n in range(10)})
    (tmp_path / "meet").mkdir()
    return tmp_path / "saved"


def shared(source: Path, world: int, job: str, **given: Any) -> list[Any]:
    """Converts by several ranks, each a thread. Returns their results or errors."""
    outcomes: list[Any] = [None] * world

    def rank(number: int) -> None:
        coordinator = sw.coordinators.SharedDirectory(number, world, job, path=source.parent / "meet")
        own = {name: value(number) if callable(value) else value for name, value in given.items()}
        try:
            outcomes[number] = sw.convert(source, coordinator=coordinator, **own)
        except BaseException as error:
            outcomes[number] = error

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(world)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(120)
        assert not one.is_alive()
    return outcomes


@pytest.mark.parametrize(
    ("to", "name"),
    [("safetensors", "out"), ("safetensors", "out.safetensors"), ("dcp", "out"), ("npz", "a.npz"), ("torch", "a.pt")],
)  # fmt: skip
def test_ranks_write_one_output_together(source: Path, to: Any, name: str, small_windows: None) -> None:
    out, whole = source.parent / name, {}

    def progress(rank: int) -> Any:
        return lambda done, total: whole.__setitem__(rank, total)

    options = {"shard_size": "3MB"} if name == "out" else {}
    made = shared(source, 3, "job", destination=out, to=to, verify=True, progress=progress, **options)
    assert all(one.verified for one in made), made
    assert sum(whole.values()) == made[0].nbytes
    alone = [one for one in whole.values() if one == made[0].nbytes]
    # A file with checksums is written by one rank.
    assert bool(alone) == (to in ("npz", "torch"))
    stored = sw.restore(source)
    for path, tensor in sw.restore(out).items():
        assert same(np.asarray(tensor), stored[path])
    assert partials(source.parent) == []


def test_shared_and_single_conversions_make_equal_files(source: Path, small_windows: None) -> None:
    one, other = source.parent / "one", source.parent / "other"
    sw.convert(source, one, to="safetensors", shard_size="3MB")
    shared(source, 4, "job", destination=other, to="safetensors", shard_size="3MB")
    assert digests(one) == digests(other)


def digests(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


class _Stop(Exception):
    """Raised by a progress callback."""


def _stopping(at: int) -> Any:
    def of_rank(rank: int) -> Any:
        def stop(done: int, total: int) -> None:
            if rank == at and total and done > total / 4:
                raise _Stop

        return stop

    return of_rank


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> None:
    """Conversions that take a while: small windows, and many records of the journal."""
    monkeypatch.setattr(files, "_WINDOW_BYTES", 4096)
    monkeypatch.setattr(files, "_JOURNAL_BYTES", 32 << 10)


@pytest.mark.parametrize("at", [0, 1])
def test_a_failed_rank_ends_the_others_and_is_resumed(tmp_path: Path, at: int, slow: None) -> None:
    source, out, seen = tmp_path / "saved", tmp_path / "out", [0, 0]
    (tmp_path / "meet").mkdir()
    sw.save(source, {f"w{n}": np.full(2_000_000, n) for n in range(4)})
    given: dict[str, Any] = {"destination": out, "to": "safetensors"}
    stopping = _stopping(at)

    def progress(rank: int) -> Any:
        def see(done: int, total: int) -> None:
            if rank == at:
                stopping(rank)(8 * done, total)
            else:
                seen[:] = done, total

        return see

    failed = shared(source, 2, "first", progress=progress, **given)
    assert isinstance(failed[at], _Stop)
    assert isinstance(failed[1 - at], sw.StepwellError), failed
    assert f"rank {at} failed" in str(failed[1 - at])
    assert seen[0] < seen[1]
    assert not out.exists()
    made = shared(source, 2, "second", verify=True, **given)
    assert sum(one.resumed_nbytes for one in made) > 0.01 * made[0].nbytes
    assert partials(source.parent) == []


def test_a_late_rank_does_not_recreate_the_output(
    source: Path, slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, begin = source.parent / "out", _core.Conversion

    def late(*given: Any) -> Any:
        begun = begin(*given)
        if given[-1].ranks()[0] == 1:
            shutil.rmtree(source.parent / "out.partial")
        return begun

    given: dict[str, Any] = {"destination": out, "to": "safetensors"}
    with monkeypatch.context() as patched:
        patched.setattr(_core, "Conversion", late)
        failed = shared(source, 2, "first", **given)
    assert all(isinstance(one, sw.StepwellError) for one in failed), failed
    assert "out.partial is gone" in str(failed[1])
    assert "out.partial" not in partials(source.parent)
    made = shared(source, 2, "second", verify=True, **given)
    assert all(one.verified for one in made), made


def test_another_number_of_ranks_starts_anew(source: Path, slow: None) -> None:
    out = source.parent / "out"
    given: dict[str, Any] = {"destination": out, "to": "safetensors"}
    shared(source, 3, "first", progress=_stopping(1), **given)
    assert "out.partial.journal.2" in partials(source.parent)
    made = shared(source, 2, "second", verify=True, **given)
    assert [one.resumed_nbytes for one in made] == [0, 0]
    assert partials(source.parent) == []


def test_files_that_a_rank_lost_are_written_again(source: Path, slow: None) -> None:
    out = source.parent / "out"
    given: dict[str, Any] = {"destination": out, "to": "safetensors", "shard_size": "3MB"}
    shared(source, 2, "first", progress=_stopping(1), **given)
    shards = sorted((source.parent / "out.partial").iterdir())
    shards[-2].unlink(missing_ok=True)
    shards[0].unlink()
    made = shared(source, 2, "second", verify=True, **given)
    assert all(one.verified for one in made), made


def test_a_late_rank_finds_that_its_files_are_gone(
    source: Path, slow: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The leader does not create them again before that rank has looked for them. It has written
    nothing, so that it has nothing to miss."""
    out, begin = source.parent / "out", _core.Conversion

    def progress(rank: int) -> Any:
        def stop(done: int, total: int) -> None:
            if rank == 1 and total and done > 0.7 * total:
                raise _Stop

        return stop

    def idle_leader(*given: Any) -> Any:
        conversion = begin(*given)
        if given[-1].ranks()[0] == 0:
            time.sleep(1.5)
            conversion.close()
            raise _Stop
        return conversion

    def late(*given: Any) -> Any:
        time.sleep(2 * given[-1].ranks()[0])
        return begin(*given)

    given: dict[str, Any] = {"destination": out, "to": "safetensors"}
    monkeypatch.setattr(_core, "Conversion", idle_leader)
    shared(source, 2, "first", progress=progress, **given)
    assert "out.partial.journal.1" in partials(source.parent)
    (source.parent / "out.partial" / "model.safetensors").unlink()
    monkeypatch.setattr(_core, "Conversion", late)
    made = shared(source, 2, "second", **given)
    assert [one.resumed_nbytes for one in made] == [0, 0], made
    sw.convert(source, source.parent / "wanted", to="safetensors")
    assert digests(out) == digests(source.parent / "wanted")


def test_ranks_that_begin_at_once_share_a_new_file(tmp_path: Path, small_windows: None) -> None:
    (tmp_path / "meet").mkdir()
    sw.save(tmp_path / "saved", {f"w{n}": np.full(20_000, n) for n in range(6)})
    for attempt in range(40):
        out = tmp_path / f"out-{attempt}"
        made = shared(tmp_path / "saved", 6, f"job-{attempt}", destination=out, to="safetensors")
        assert all(isinstance(one, sw.results.ConversionResult) for one in made), made


@pytest.mark.parametrize("at", [0, 1])
def test_a_failed_cast_of_any_rank_leaves_nothing(tmp_path: Path, at: int, small_windows: None) -> None:
    (tmp_path / "meet").mkdir()
    state = {f"w{n}": np.zeros(500_000, "float32") for n in range(6)}
    state[f"w{4 * at}"][:] = 1e30
    sw.save(tmp_path / "saved", state)
    given: dict[str, Any] = {"destination": tmp_path / "out", "to": "safetensors", "cast": "float16"}
    failed = shared(tmp_path / "saved", 2, "job", **given)
    assert [type(one) for one in failed] == [sw.UnsupportedLeaf] * 2, failed
    assert partials(tmp_path) == []


@pytest.mark.parametrize("to", ["safetensors", "stepwell"])
def test_ranks_verify_together_or_not_at_all(source: Path, to: Any) -> None:
    out = source.parent / "out"
    failed = shared(source, 2, "job", destination=out, to=to, verify=lambda rank: rank == 1)
    assert all("with other arguments" in str(one) for one in failed), failed
    assert not out.exists()


def test_ranks_save_one_checkpoint_together(tmp_path: Path) -> None:
    (tmp_path / "meet").mkdir()
    tied = np.arange(3e5).reshape(3, -1).astype("float32")
    state = {"a": tied, "b": {"tied": tied, "n": [1, "x"]}, "empty": np.zeros((0, 4)), "one": np.float32(2)}
    sw.save(tmp_path / "saved", state, metrics={"loss": 0.5})
    out = tmp_path / "out"
    made = shared(tmp_path / "saved", 3, "job", destination=out, to="stepwell", cast="bfloat16", verify=True)
    assert all(one.verified for one in made), made
    # Each rank wrote a file.
    assert {name.split("/")[-1] for name in made[0].files} == {f"{rank:05}.data" for rank in range(3)}
    found = sw.restore(out)
    assert same(found["a"], tied.astype("bfloat16"))
    assert same(found["b"]["tied"], found["a"])
    assert found["b"]["n"] == [1, "x"]
    assert found["empty"].shape == (0, 4)
    with sw.open(out) as checkpoint:
        assert checkpoint.manifest["metrics"] == {"loss": 0.5}


@pytest.mark.parametrize("at", [0, 1])
def test_a_failed_rank_ends_a_shared_save(source: Path, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(save, "_PROGRESS_SECONDS", 0.001)

    def progress(rank: int) -> Any:
        def stop(done: int, total: int) -> None:
            if rank == at:
                raise _Stop

        return stop

    out = source.parent / "out"
    failed = shared(source, 2, "job", destination=out, to="stepwell", progress=progress)
    assert isinstance(failed[at], _Stop)
    assert isinstance(failed[1 - at], sw.StepwellError) or out.exists(), failed
    assert partials(source.parent) == []


@pytest.mark.parametrize("to", ["safetensors", "stepwell"])
def test_ranks_with_other_sources_are_refused(source: Path, to: Any) -> None:
    """Each rank takes the newest step of a root, and a step is committed meanwhile."""
    root, out = source.parent / "root", source.parent / "out"
    with sw.CheckpointManager(root) as mgr:
        for step in range(2):
            mgr.save(step, {"w": np.full(1000, step)})
    failed = shared(root, 2, "job", destination=out, to=to, step=lambda rank: rank)
    assert any("another source than rank 0" in str(one) for one in failed), failed
    assert all(isinstance(one, sw.StepwellError) for one in failed), failed
    assert not out.exists()


def test_ranks_need_a_directory_to_meet_in(source: Path) -> None:
    alone = sw.coordinators.SharedDirectory(0, 2, "job")
    with pytest.raises(sw.MisuseError, match="Pass a directory that all ranks share"):
        sw.convert(source, source.parent / "out", to="safetensors", coordinator=alone)
    assert not (source.parent / "out").exists()


_RANK = """
from stepwell import _core
from stepwell._conversion import files
files._WINDOW_BYTES, files._JOURNAL_BYTES = 4096, 16 << 10
source, meet = sys.argv[5:7]
print("ready", flush=True)
made = sw.convert(source, ROOT, to="safetensors", shard_size="3MB",
                  coordinator=sw.coordinators.SharedDirectory(RANK, WORLD, sys.argv[4], path=meet))
print(made.resumed_nbytes)
"""


_MORTAL_RANK = """
import importlib
from stepwell._conversion import files
files._WINDOW_BYTES, files._JOURNAL_BYTES = 4096, 16 << 10
importlib.import_module("stepwell._conversion.convert").STALL_SECONDS = 3
source, meet = sys.argv[5:7]
def progress(done, total):
    if RANK == 1 and done > total / 4:
        os.kill(os.getpid(), signal.SIGKILL)
try:
    sw.convert(source, ROOT, to="safetensors", progress=progress,
               coordinator=sw.coordinators.SharedDirectory(RANK, WORLD, sys.argv[4], path=meet))
except sw.StepwellError as error:
    print(f"{type(error).__name__}: {error}")
"""


def test_ranks_fail_without_the_progress_of_another(source: Path) -> None:
    out, begun = source.parent / "out", time.monotonic()
    codes, told, errors = zip(
        *start(source.parent, _MORTAL_RANK, 3, out, source, source.parent / "meet").finish(), strict=True
    )
    assert codes == (0, -signal.SIGKILL, 0), errors
    assert 3 <= time.monotonic() - begun < 60
    for rank in (0, 2):
        assert "without progress for rank(s) [1]" in told[rank], told
    assert not out.exists()
    made = shared(source, 3, "second", destination=out, to="safetensors", verify=True)
    assert all(one.verified for one in made), made


def test_ranks_killed_at_random_moments_are_resumed(source: Path) -> None:
    out, meet, rng = source.parent / "out", source.parent / "meet", random.Random(5)
    sw.convert(source, source.parent / "wanted", to="safetensors", shard_size="3MB")
    wanted = digests(source.parent / "wanted")
    resumed = killed = 0
    least, attempt = 60 if LONG else 6, 0
    while killed < least or resumed == 0:
        attempt += 1
        job = start(source.parent, _RANK, 3, out, source, meet, job=f"job-{attempt}")
        for process in job.processes:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
        if attempt % 4:
            time.sleep(0.05 + rng.random() * 0.4)
            for process in job.processes:
                process.send_signal(signal.SIGKILL)
            killed += sum(code < 0 for code, _, _ in job.finish())
        else:
            resumed += sum(int(text.split()[-1]) > 0 for text in job.succeed())
        if out.exists():
            assert digests(out) == wanted
            for file in out.iterdir():
                file.unlink()
            out.rmdir()
        assert attempt < 10 * least, (killed, resumed)
