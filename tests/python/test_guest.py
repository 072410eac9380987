"""The deletion of checkpoints whose directories another library names."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import stepwell as sw
from stepwell import _core
from stepwell.integrations import _guest, _placing


def checkpoint(folder: Path, name: str, is_root: bool = True) -> Path:
    """A checkpoint of a trainer, with a file of its own."""
    path = folder / name
    state = {"w": np.arange(1 << 16, dtype=np.float32)}
    if is_root:
        _guest.save(str(path / "stepwell"), state, None, {}, lambda: None).result()
    else:
        sw.save(path, state)
    (path / "of the trainer").touch()
    return path


@pytest.mark.parametrize("is_root", [True, False])
def test_a_reader_keeps_the_files_of_a_deleted_checkpoint(tmp_path: Path, is_root: bool) -> None:
    one, two = checkpoint(tmp_path, "one", is_root), checkpoint(tmp_path, "two", is_root)
    with sw.open(one / "stepwell" if is_root else one) as reader:
        assert not _core.remove_guest(one)
        assert not one.exists()
        assert np.array_equal(reader["w"][:], np.arange(1 << 16, dtype=np.float32))
        (trash,) = (entry for entry in os.listdir(tmp_path) if entry.startswith(".trash-one-"))
    assert _core.remove_guest(two)
    assert os.listdir(tmp_path) == [], trash


def test_a_deletion_waits_for_the_save_before(tmp_path: Path) -> None:
    for is_committed in (True, False):
        old = checkpoint(tmp_path, "old")
        began, ended = threading.Event(), threading.Event()

        def wait(
            began: threading.Event = began, ended: threading.Event = ended, answer: bool = is_committed
        ) -> bool:
            began.set()
            assert ended.wait(30)
            return answer

        _placing.remove_after(wait, [str(old)])
        assert began.wait(30)
        assert old.exists()
        ended.set()
        _placing.wait_removed(str(old))
        assert old.exists() != is_committed


def test_a_path_that_is_still_to_be_deleted_is_not_saved_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(_placing, "_REMOVE_SECONDS", 0.1)
    ended = threading.Event()
    _placing.remove_after(lambda: ended.wait(30), [str(tmp_path / "old")])
    try:
        with pytest.raises(sw.errors.StalledError, match="old has not ended"):
            _placing.wait_removed(str(tmp_path / "old"))
        _placing.wait_removed(str(tmp_path / "other"))
        with caplog.at_level(logging.WARNING, "stepwell"):
            _placing.wait_removed()
        assert "old has not ended" in caplog.text
    finally:
        ended.set()
    monkeypatch.undo()
    _placing.wait_removed(str(tmp_path / "old"))


def test_a_failed_save_is_still_unseen_after_a_deletion(tmp_path: Path) -> None:
    def fail() -> None:
        raise OSError(28, "No space left on device")

    old = checkpoint(tmp_path, "old")
    save = _guest.save(str(tmp_path / "new"), {"n": 1}, None, {}, fail)
    _placing.remove_after(save.is_committed, [str(old)])
    _placing.wait_removed()
    assert old.exists()
    with pytest.raises(OSError, match="No space"):
        _guest.raise_unseen()


def test_a_failure_that_only_a_deletion_saw_ends_the_process(tmp_path: Path) -> None:
    sw.save(tmp_path / "old", {"n": 1})
    script = f"""
from functools import partial
import numpy as np, stepwell as sw
from accidents import files_no_longer_than
from stepwell.integrations import _guest, _placing
with files_no_longer_than(1 << 10):
    save = sw.save_async({str(tmp_path / "new")!r}, {{"w": np.ones(5000)}})
    _placing.remove_after(partial(_placing.all_committed, [save], None), [{str(tmp_path / "old")!r}])
    _placing.wait_removed()
"""
    done = subprocess.run(
        [sys.executable, "-c", script],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent)},
    )
    assert done.returncode == 1, done.stderr
    assert "SaveFailed" in done.stderr
    assert os.listdir(tmp_path) == ["old"]


def test_a_link_is_deleted_and_its_target_stays(tmp_path: Path) -> None:
    target = checkpoint(tmp_path, "target")
    (tmp_path / "link").symlink_to(target)
    (tmp_path / "file").touch()
    _placing.remove_after(lambda: True, [str(tmp_path / name) for name in ("link", "file", "missing")])
    _placing.wait_removed()
    assert os.listdir(tmp_path) == ["target"]
    assert sw.verify(target / "stepwell").ok


def test_a_deletion_that_fails_is_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / ".hidden").mkdir()
    with caplog.at_level(logging.WARNING, "stepwell"):
        _placing.remove_after(lambda: True, [str(tmp_path / ".hidden")])
        _placing.wait_removed()
    assert "hidden failed" in caplog.text


def test_an_interrupted_deletion_is_ended_by_the_next(tmp_path: Path) -> None:
    for name in ("one", "two"):
        checkpoint(tmp_path, name)
    os.rename(tmp_path / "one", tmp_path / f".trash-one-{1:032x}")
    assert _core.remove_guest(tmp_path / "two")
    assert os.listdir(tmp_path) == []


def test_trash_that_cannot_be_deleted_is_passed_over(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deep = tmp_path / f".trash-foreign-{1:032x}"
    (deep / "/".join("d" * 80)).mkdir(parents=True)  # deeper than any checkpoint
    checkpoint(tmp_path, "one")
    with caplog.at_level(logging.WARNING, "stepwell"):
        assert _core.remove_guest(tmp_path / "one")
        assert os.listdir(tmp_path) == [deep.name]
        deadline = time.monotonic() + 30
        while str(deep) not in caplog.text:  # another thread logs
            assert time.monotonic() < deadline, caplog.text
            time.sleep(0.01)
