"""``stepwell doctor`` on each kind of file system, and where system calls are refused."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import refusing
from conftest import need, need_nothing_of
from lab import Lab, run
from test_direct_io import places


def examined(place: Path, before: Callable[[], None] | None = None) -> tuple[set[str], dict[str, str]]:
    """The promises that do not hold, and the answer of each finding. Nothing is left behind."""
    command = [sys.executable, "-m", "stepwell", "doctor", place, "--mib", "1", "--json"]
    report = json.loads(run(*command, before=before).stdout)
    assert list(place.glob(".stepwell-doctor-*")) == []
    lost = {one["name"] for one in report["findings"] if one["needed"] and one["answer"] != "holds"}
    assert report["ok"] == (not lost)
    return lost, {one["name"]: one["answer"] for one in report["findings"]}


def test_the_doctor_knows_every_file_system(lab: Lab) -> None:
    need("mkfs.ext4", "losetup")
    found = {name: examined(place) for name, place in places(lab).items()}
    for name, (lost, findings) in found.items():
        print(f"{name}: {[finding for finding, answer in findings.items() if answer != 'holds']}")
        # A power cut empties memory.
        assert lost == ({"sync_dirs"} if name.startswith(("tmpfs", "ramfs")) else set()), (name, findings)
    assert found["ext4"][1]["direct_io"] == "holds"
    assert found["ramfs"][1]["direct_io"] == "missing"


def test_the_doctor_names_refused_calls(lab: Lab) -> None:
    need_nothing_of(refusing.missing())
    disk = lab.mount("tmpfs", "disk", "tmpfs", "size=256m")
    _, findings = examined(disk, refusing.refusing(["renameat2"], "ENOSYS"))
    lost = {name for name, answer in findings.items() if answer != "holds"}
    assert lost >= {"rename_exchange", "rename_noreplace", "replace"}
    lost, findings = examined(disk, refusing.refusing(["fallocate", "io_uring_setup"], "ENOSYS"))
    assert lost == {"sync_dirs"}, "the others cost only speed"
    assert findings["preallocate"] == findings["io_uring"] == "missing"
