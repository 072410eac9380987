"""Conversions that end early, by an exception, an interrupt or a kill; their progress."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from command_line import flip_a_bit
from conftest import partials, same
from longer import LONG
from safetensors.numpy import load_file, save_file
from stepwell._conversion import files


class _Stop(Exception):
    """Raised by a progress callback."""


def interrupted(source: Path, out: Path, at: float, **given: Any) -> int:
    """A conversion that is stopped after a part of its bytes. Returns the bytes done."""
    seen = 0

    def stop(done: int, whole: int) -> None:
        nonlocal seen
        seen = done
        if whole and done >= at * whole:
            raise _Stop

    with pytest.raises(_Stop):
        sw.convert(source, out, **{"to": "safetensors", **given}, progress=stop)
    return seen


@pytest.fixture
def larger(tmp_path: Path) -> Path:
    """A state that takes a while with small windows."""
    rng = np.random.default_rng(1)
    sw.save(tmp_path / "larger", {f"w{n}": rng.standard_normal((n + 1, 250, 100)) for n in range(12)})
    return tmp_path / "larger"


def test_an_interrupted_conversion_goes_on_where_it_was(larger: Path, small_windows: None) -> None:
    out = larger.parent / "out"
    interrupted(larger, out, 0.3)
    assert partials(larger.parent) == ["out.partial", "out.partial.journal"]
    assert not out.exists()
    made = sw.convert(larger, out, to="safetensors", verify=True)
    assert made.resumed_nbytes >= 0.25 * made.nbytes
    assert partials(larger.parent) == []
    for name, tensor in sw.restore(larger).items():
        assert same(load_file(out / "model.safetensors")[name], tensor)


def test_finished_windows_are_not_written_again(larger: Path, small_windows: None) -> None:
    out = larger.parent / "out.safetensors"
    interrupted(larger, out, 0.5)
    partial = larger.parent / "out.partial.safetensors"
    flip_a_bit(partial, 50_000)
    with pytest.raises(sw.CorruptCheckpoint, match="differ from the source; the output was removed"):
        sw.convert(larger, out, to="safetensors", verify=True)
    assert [one.name for one in larger.parent.iterdir()] == ["larger"]


@pytest.mark.parametrize(("offset", "what"), [(3, "cannot be read back"), (5000, "differ from")])
def test_an_output_that_fails_its_verification_is_removed(
    larger: Path, offset: int, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    out, verify = larger.parent / "out", files._verify

    def damaged(*given: Any) -> None:
        flip_a_bit(larger.parent / "out.partial" / "model.safetensors", offset)
        verify(*given)

    monkeypatch.setattr(files, "_verify", damaged)
    with pytest.raises(sw.CorruptCheckpoint, match=f"{what}.*the output was removed"):
        sw.convert(larger, out, to="safetensors", verify=True)
    assert partials(larger.parent) == []


def test_an_error_that_proves_no_damage_keeps_the_output(
    larger: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = larger.parent / "out"

    def too_many(path: str) -> None:
        raise sw.StorageError(f"{path} cannot be read: too many open files")

    with monkeypatch.context() as patched:
        patched.setattr(files, "find", too_many)
        with pytest.raises(sw.StorageError, match="too many open files"):
            sw.convert(larger, out, to="safetensors", verify=True)
    assert partials(larger.parent) == ["out.partial", "out.partial.journal"]
    made = sw.convert(larger, out, to="safetensors", verify=True)
    assert made.resumed_nbytes == made.nbytes


def test_a_kept_traceback_does_not_lock_the_output(larger: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = larger.parent / "out"

    def interrupt(*given: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(files, "_verify", interrupt)
        with pytest.raises(KeyboardInterrupt) as kept:
            sw.convert(larger, out, to="safetensors", verify=True)
    made = sw.convert(larger, out, to="safetensors", verify=True)
    assert made.resumed_nbytes == made.nbytes
    assert kept.value.__traceback__ is not None


@pytest.mark.parametrize("change", ["plan", "source", "files"])
def test_another_plan_or_source_starts_anew(larger: Path, change: str, small_windows: None) -> None:
    out = larger.parent / "out"
    interrupted(larger, out, 0.5)
    given: dict[str, Any] = {}
    if change == "plan":
        given["exclude"] = "w0"
    if change == "source":
        state = sw.restore(larger)
        sw.save(larger, {name: tensor + 1 for name, tensor in state.items()}, exists="replace")
    if change == "files":
        (out.parent / "out.partial" / "model.safetensors").unlink()
    made = sw.convert(larger, out, to="safetensors", verify=True, **given)
    assert made.resumed_nbytes == 0
    assert partials(larger.parent) == []


def test_a_replaced_shard_starts_anew(tmp_path: Path, small_windows: None) -> None:
    """The new file has the length of the old one and is older, as a copy that keeps times."""
    source, out = tmp_path / "model.safetensors", tmp_path / "out"
    save_file({"w": np.zeros(50_000)}, source)
    interrupted(source, out, 0.5)
    save_file({"w": np.ones(50_000)}, tmp_path / "new")
    os.utime(tmp_path / "new", ns=(source.stat().st_mtime_ns,) * 2)
    os.replace(tmp_path / "new", source)
    made = sw.convert(source, out, to="safetensors", verify=True)
    assert made.resumed_nbytes == 0
    assert (load_file(out / "model.safetensors")["w"] == 1).all()


def test_two_conversions_to_one_path_exclude_each_other(larger: Path, small_windows: None) -> None:
    out = larger.parent / "out"
    refused: list[str] = []

    def again(done: int, whole: int) -> None:
        if not refused:
            with pytest.raises(sw.MisuseError) as error:
                sw.convert(larger, out, to="safetensors")
            refused.append(str(error.value))

    sw.convert(larger, out, to="safetensors", progress=again, verify=True)
    assert "another process writes" in refused[0]


def test_a_conversion_killed_at_random_moments_is_resumed(tmp_path: Path) -> None:
    rng = np.random.default_rng(2)
    state = {f"w{n}": rng.standard_normal((400, 500)).astype(np.float32) for n in range(24)}
    sw.save(tmp_path / "saved", state)
    kills = 300 if LONG else 30
    script = Path(__file__).with_name("converter.py")
    done = subprocess.run(
        [sys.executable, script, tmp_path / "saved", tmp_path / "out", str(kills), "7"],
        capture_output=True, text=True, timeout=60 + 10 * kills, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["kills"] == kills
    # A busy machine often kills it before its first record.
    assert found["resumed"] > kills / 10, found


def test_checksums_go_on_where_an_archive_was_interrupted(larger: Path, small_windows: None) -> None:
    out = larger.parent / "out.npz"
    for part in (0.2, 0.5, 0.8):
        interrupted(larger, out, part, to="npz")
    made = sw.convert(larger, out, to="npz")
    assert made.resumed_nbytes > 0.7 * made.nbytes
    with zipfile.ZipFile(out) as archive:
        assert archive.testzip() is None
    with np.load(out) as found:
        for name, tensor in sw.restore(larger).items():
            assert same(found[name], tensor)


def test_an_interrupted_save_from_a_checkpoint_is_whole_or_gone(larger: Path) -> None:
    interrupted(larger, larger.parent / "out", 0, to="stepwell")
    left = {one.name for one in larger.parent.iterdir()} - {"larger"}
    if left:  # the interrupt came too late
        assert left == {"out"}
        assert sw.verify(larger.parent / "out")
    sw.convert(larger, larger.parent / "other", to="stepwell", verify=True)


def test_an_interrupted_command_says_how_to_go_on(tmp_path: Path) -> None:
    save_file({"w": np.zeros(1000)}, tmp_path / "a.safetensors")
    script = (
        "import sys\nfrom stepwell._conversion import files\nfrom stepwell._cli.group import main\n"
        "def stop(*_): raise KeyboardInterrupt\n"
        "class Stopped:\n"
        "    def __init__(self, *_): pass\n"
        "    def resumed_bytes(self): return 0\n"
        "    def partial(self): return 'out.partial'\n"
        "    def close(self): pass\n"
        "    write = stop\n"
        "files._core.Conversion = Stopped\n"
        "main()\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "convert", tmp_path / "a.safetensors", tmp_path / "out", "--to", "safetensors"],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 130
    assert "out.partial has what is done so far; the same call goes on from there" in done.stderr


@pytest.mark.parametrize("to", ["safetensors", "npz", "stepwell"])
def test_progress_ends_at_all_bytes(larger: Path, to: Any) -> None:
    seen: list[tuple[int, int]] = []
    made = sw.convert(
        larger, larger.parent / "out", to=to, progress=lambda done, whole: seen.append((done, whole))
    )
    assert seen[-1] == (made.nbytes, made.nbytes)


def test_an_export_has_shards_and_shows_its_progress(larger: Path) -> None:
    out, seen = larger.parent / "out", []
    made = sw.export(larger, out, shard_size="3MB", progress=lambda done, whole: seen.append(done))
    assert "model.safetensors.index.json" in made.files
    assert made.verified
    assert seen[-1] == made.nbytes
