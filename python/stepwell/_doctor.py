"""``sw.doctor``: the promises of stepwell that hold on a file system."""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import select
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeAlias, final

from . import _core
from ._checks import whole
from ._doctor_probes import command
from ._locations import Location, location
from ._public import public
from ._store import StoreUrl
from ._timeouts import positive_seconds
from .errors import StepwellError, StorageError

#: The probes in their order, each with its findings: name → (what depends on it, true if a promise
#: does and not only speed).
_PROMISES: dict[str, dict[str, tuple[str, bool]]] = {
    "calls": {
        "file_system": ("its type", False),
        "sync_dirs": ("committed steps survive a power cut", True),
        "rename_noreplace": ("a step never replaces another one by accident, without locks too", False),
        "rename_exchange": ('exists="replace" never loses both checkpoints', True),
        "preallocate": ("a full disk is reported before a save is written", False),
        "direct_io": ("saves do not fill the page cache", False),
        "io_uring": ("transfers cost little CPU time", False),
    },
    "space": {
        "free_space": ("saves have space", True),
        "free_inodes": ("saves have inodes", True),
    },
    "commit": {
        "commit": ("a save commits, and reads back bit for bit", True),
        "write_speed": ("a save of the probe, durable", False),
        "read_speed": ("its verification", False),
        "replace": ('a checkpoint is replaced (exists="replace")', True),
    },
    "locks": {"locks": ("a second writer is refused", True)},
    "leases": {"leases": ("retention never deletes a step under its reader", True)},
    "visibility": {"visibility": ("other processes see new steps", True)},
}
#: The probes that are told the size of the trial checkpoint.
_SIZED = ("space", "commit")
#: The findings of a store.
_OF_STORES: dict[str, tuple[str, bool]] = {
    "create_once": ("a step is committed once, and one writer has the root", True),
    "create_race": ("the same when several writers come at once", True),
    "parts": ("large files are uploaded in parts", True),
    "ranges": ("parts of a file are read", True),
    "listing": ("steps and files are found", True),
    "commit": ("a save commits, and reads back bit for bit", True),
    "write_speed": ("a save of the probe, durable", False),
    "read_speed": ("its verification", False),
    "replace": ('a checkpoint is replaced (exists="replace")', True),
}
#: A directory is made, and removed, in this time.
_KEEPER_SECONDS = 30.0


Answer: TypeAlias = Literal["holds", "missing", "unknown"]


@final
@dataclass(frozen=True, slots=True)
class Finding:
    """One fact about a file system."""

    name: str
    #: The promise, or the advantage, that depends on it.
    promise: str
    #: True if a promise of stepwell depends on it, and not only speed.
    needed: bool
    #: ``"unknown"``: the probe failed or did not end in time.
    answer: Answer
    #: The observation.
    detail: str


@final
@dataclass(frozen=True, slots=True)
class DoctorReport:
    """The answer of :func:`stepwell.doctor`."""

    path: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        """True if every promise holds."""
        return all(one.answer == "holds" for one in self.findings if one.needed)

    def __getitem__(self, name: str) -> Finding:
        return next(one for one in self.findings if one.name == name)


@public
def doctor(path: Location, *, timeout: float = 30.0, nbytes: int = 32 << 20) -> DoctorReport:
    """Tries a directory's file system, or an object store, and returns which promises of stepwell
    hold there.

    The probes are small saves, restores, locks and leases of stepwell itself, in a temporary
    directory below ``path``. They run in processes of their own on this machine. The directory is
    removed when this returns, and also when a probe or this process is killed.

    A store is tried by this process, below a name of its own that it removes at the end. A race
    that goes well proves nothing: it shows stores that ignore the condition of a create.

    Args:
        path: an existing directory, such as that of your runs, or the URL of a root.
        timeout: the deadline of each probe, in seconds. A probe that has not ended is killed, and
            its findings are ``"unknown"``. Requests to a store have deadlines of their own.
        nbytes: the size of the checkpoint that is written and read.

    Raises:
        StorageError: no directory can be made there, or no process can be started.
    """
    where = location(path)
    limit = positive_seconds(timeout, "timeout")
    size = whole(nbytes, "nbytes", 1, 2**40)
    if isinstance(where, StoreUrl):
        return DoctorReport(where, tuple(_findings({"found": _of_store(where, size)}, _OF_STORES)))
    with _directory(where) as (directory, lifeline):
        findings = [
            one
            for probe, promises in _PROMISES.items()
            for one in _findings(
                _answer(lifeline, limit, probe, directory, *([size] if probe in _SIZED else [])), promises
            )
        ]
    return DoctorReport(where, tuple(findings))


def _of_store(url: StoreUrl, nbytes: int) -> dict[str, object]:
    """The findings of a store by their names: answer and detail."""
    from ._doctor_probes import commit_at

    place = url.below(f".probe-{secrets.token_hex(8)}")
    found: dict[str, object] = {}
    try:
        found |= commit_at(place.below("one"), nbytes)
    except StepwellError as error:
        found["commit"] = (None, str(error))
    finally:
        rows = _core.probe_store(place)
    return found | {name: (holds, detail) for name, holds, detail in rows}


def _findings(answer: dict[str, object], promises: dict[str, tuple[str, bool]]) -> list[Finding]:
    found = answer.get("found")
    rows = found if isinstance(found, dict) else {}
    findings = []
    for name, (promise, needed) in promises.items():
        holds, detail = rows.get(name, (None, answer.get("error")))
        state: Answer = "unknown" if holds is None else "holds" if holds else "missing"
        findings.append(Finding(name, promise, needed, state, str(detail)))
    return findings


@contextmanager
def _directory(path: str) -> Iterator[tuple[str, int]]:
    """Yields a new directory for probes, and their standard input. Another process makes the
    directory and removes it when that input ends, as this process may be killed."""
    lifeline, end = os.pipe()
    keeper = _started(lifeline, "keep", path)
    directory: object = None
    try:
        stdout = keeper.stdout
        if stdout is None or not select.select([stdout], [], [], _KEEPER_SECONDS)[0]:
            raise StorageError(f"{path} does not answer: no directory was made in {_KEEPER_SECONDS:g} s")
        line = stdout.readline()
        if not line:
            _, err = keeper.communicate(timeout=_KEEPER_SECONDS)
            raise StorageError(f"a process to probe {path} could not run: {_last_line(err)}")
        answer = json.loads(line)
        directory = answer.get("directory")
        if not isinstance(directory, str):
            raise StorageError(
                f"no directory can be made in {path}: {answer.get('error')}. Pass a directory that you may write to"
            )
        yield directory, lifeline
    finally:
        os.close(end)
        os.close(lifeline)
        with contextlib.suppress(subprocess.TimeoutExpired):
            keeper.wait(_KEEPER_SECONDS)
        _kill(keeper)
        if keeper.returncode != 0 and isinstance(directory, str):
            _answer(subprocess.DEVNULL, _KEEPER_SECONDS, "remove", directory)


def _started(lifeline: int, probe: str, *words: object) -> subprocess.Popen[bytes]:
    # A session of its own: Ctrl-C ends this process alone, which then ends the others.
    return subprocess.Popen(
        command(probe, *words),
        stdin=lifeline,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def _answer(lifeline: int, limit: float, probe: str, *words: object) -> dict[str, object]:
    """Returns the JSON of a probe, or an error. Kills it at the deadline."""
    process = _started(lifeline, probe, *words)
    try:
        out, err = process.communicate(timeout=limit)
    except subprocess.TimeoutExpired:
        return {"error": f"not ended after {limit:g} s"}
    finally:
        _kill(process)
    with contextlib.suppress(ValueError):
        found = json.loads(out)
        if isinstance(found, dict):
            return found
    return {"error": f"the probe ended with {process.returncode}: {_last_line(err)}"}


def _kill(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    # One that hangs in the kernel is left to it.
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(1.0)


def _last_line(text: bytes) -> str:
    return text.decode(errors="replace").strip().split("\n")[-1]
