"""``sw.doctor``: real file systems, real processes, and nothing that is left behind."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import stepwell as sw
from command_line import run
from stepwell import _doctor, _doctor_probes

#: Looks for processes of a test, and for its files.
DEADLINE = 30.0
SMALL = 1 << 20


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def processes(word: str) -> list[int]:
    """Numbers of the processes whose command names a path."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            try:
                command = (entry / "cmdline").read_bytes()
            except OSError:
                continue
            if word.encode() in command:
                found.append(int(entry.name))
    return found


@pytest.fixture(params=["disk", "tmpfs"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Any:
    """A directory on a disk or in memory."""
    if request.param == "disk":
        yield tmp_path
        return
    if not os.access("/dev/shm", os.W_OK):
        pytest.skip("no tmpfs at /dev/shm that can be written")
    directory = Path("/dev/shm") / f"doctor-{os.getpid()}"
    directory.mkdir()
    try:
        yield directory
    finally:
        directory.rmdir()  # which fails if anything is left


def test_every_promise_holds_on_a_local_file_system(place: Path) -> None:
    report = sw.doctor(place, nbytes=SMALL)
    in_memory = place.parts[1] == "dev"
    missing = [one.name for one in report.findings if one.needed and one.answer != "holds"]
    # A power cut empties memory.
    assert missing == (["sync_dirs"] if in_memory else [])
    assert [one.name for one in report.findings] == [
        name for promises in _doctor._PROMISES.values() for name in promises
    ]
    if in_memory:
        assert report["file_system"].detail == "tmpfs"
    assert "released by a killed process" in report["locks"].detail
    assert "released by a killed process" in report["leases"].detail
    assert list(place.iterdir()) == []
    assert processes(str(place)) == []


def test_the_command_prints_a_table(tmp_path: Path) -> None:
    printed = run("doctor", tmp_path, "--mib", 1)
    assert printed.exit_code == 0
    assert f"every promise holds: {tmp_path}" in printed.output
    assert re.search("^yes  locks +a second writer is refused", printed.output, re.MULTILINE)


def test_a_probe_that_never_ends_is_killed_and_unknown(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # This one never ends, as a call to a dead server.
    real = _doctor_probes.command
    monkeypatch.setattr(
        _doctor,
        "command",
        lambda name, *words: real("hold_root" if name == "locks" else name, *words),
    )
    report = sw.doctor(tmp_path, timeout=8, nbytes=SMALL)
    assert report["locks"].answer == "unknown"
    assert "8 s" in report["locks"].detail
    assert not report.ok
    assert [one.name for one in report.findings if one.answer != "holds"] == ["locks"]
    assert list(tmp_path.iterdir()) == []
    until(lambda: processes(str(tmp_path)) == [])


def test_probes_without_an_answer_are_no_broken_promise(tmp_path: Path) -> None:
    printed = run("doctor", tmp_path, "--timeout", 0.01)
    assert printed.exit_code == 1
    assert f"not all promises could be tried: {tmp_path}" in printed.output


def start(path: Path) -> tuple[subprocess.Popen[bytes], Path]:
    """A doctor in the middle of its probes, and its directory."""
    script = f"import stepwell as sw; sw.doctor({str(path)!r}, nbytes=1 << 20)"
    doctor = subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE)
    # A helper of the probe of locks runs.
    until(lambda: any((one / "locked" / ".stepwell").exists() for one in path.glob(".stepwell-doctor-*")))
    (directory,) = path.glob(".stepwell-doctor-*")
    return doctor, directory


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT], ids=["killed", "interrupted"])
def test_nothing_is_left_by_a_doctor_that_ends_early(tmp_path: Path, number: signal.Signals) -> None:
    doctor, directory = start(tmp_path)
    doctor.send_signal(number)
    assert doctor.wait(DEADLINE) != 0
    until(lambda: not directory.exists())
    until(lambda: processes(str(tmp_path)) == [])
    assert list(tmp_path.iterdir()) == []
    doctor.stderr.close()  # type: ignore[union-attr]


def test_nothing_is_left_when_every_other_process_is_killed(tmp_path: Path) -> None:
    doctor, _ = start(tmp_path)
    for number in processes(str(tmp_path)):
        if number != doctor.pid:
            os.kill(number, signal.SIGKILL)
    assert doctor.wait(DEADLINE) == 0
    doctor.stderr.close()  # type: ignore[union-attr]
    assert list(tmp_path.iterdir()) == []
    until(lambda: processes(str(tmp_path)) == [])


def test_a_path_without_a_place_for_a_directory_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(sw.StorageError, match="No such file"):
        sw.doctor(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(sw.StorageError, match="no directory can be made"):
        sw.doctor(tmp_path / "file")
    for wrong in ({"timeout": 0}, {"nbytes": 0}):
        with pytest.raises(sw.MisuseError):
            sw.doctor(tmp_path, **wrong)  # type: ignore[arg-type]


def test_a_process_that_cannot_run_says_why(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_doctor, "command", lambda *_: [sys.executable, "-c", "import no_such_module"])
    with pytest.raises(sw.StorageError, match=r"could not run: .*no_such_module"):
        sw.doctor(tmp_path)
