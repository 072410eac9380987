"""Disks that are full at every size, and quotas: each failure is a typed error that says so, no
committed step is touched, and once there is room the next save works."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path

import images
import pytest
from conftest import need
from histories import assert_told, live, summary
from lab import Lab, output
from longer import LONG
from verdicts import Tally, judge

OPERATIONS = 8
#: From nothing at all to more than a history takes.
LARGEST = 3 << 20
SIZES = 400 if LONG else 110
LIMITS = 100 if LONG else 24


def sizes(count: int, step: int) -> list[int]:
    """Evenly, but for the smallest sizes, where each step is one in which something else fails."""
    dense = [number * step for number in range(count // 4)]
    return dense + [number * LARGEST // (count - len(dense)) for number in range(1, count - len(dense) + 1)]


def fill(at: Path, leave: int) -> Path:
    """Fills a file system up to that many free bytes, and returns the file. Counts the file
    system's own records too."""
    filler = at / "filler"
    with filler.open("wb") as file:
        length, piece = 0, shutil.disk_usage(at).free
        while (piece := min(piece, shutil.disk_usage(at).free - leave)) >= 1024:
            try:
                os.posix_fallocate(file.fileno(), length, piece)
                length += piece
            except OSError as full:
                if full.errno != errno.ENOSPC:
                    raise
                piece //= 2
    return filler


def test_a_tmpfs_of_any_size_loses_nothing(lab: Lab) -> None:
    tally, failures = Tally(), []
    at = lab.mount("tmpfs", "small", "tmpfs", "size=64m")
    for number, size in enumerate(sizes(SIZES, 4096)):
        # A tmpfs of no size at all has no bound.
        output("mount", "-o", f"remount,size={max(size, 4096)}", at)
        lived = live(at / "run", number, OPERATIONS)
        assert_told(lived.failures, errno.ENOSPC)
        failures += lived.failures
        output("mount", "-o", "remount,size=64m", at)
        tally.add(f"{size} bytes", judge(at / "run", lived.journal))
        shutil.rmtree(at / "run", ignore_errors=True)
    print(f"\ntmpfs: {tally}; {summary(failures)}")
    tally.assert_sound()
    assert len(failures) >= tally.states // 2


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"] if LONG else ["ext4"])
def test_a_full_disk_of_any_size_loses_nothing(lab: Lab, kind: str) -> None:
    need(f"mkfs.{kind}")
    tally, failures = Tally(), []
    at = lab.mount(images.make(lab.at / "full.img", kind), "full", kind)
    for number, size in enumerate(sizes(SIZES, 4096)):
        filler = fill(at, size)
        lived = live(at / "run", number, OPERATIONS)
        assert_told(lived.failures, errno.ENOSPC)
        failures += lived.failures
        filler.unlink()
        tally.add(f"{size} bytes", judge(at / "run", lived.journal))
        shutil.rmtree(at / "run", ignore_errors=True)
    print(f"\n{kind}: {tally}; {summary(failures)}")
    tally.assert_sound()
    assert len(failures) >= tally.states // 2


def test_a_quota_at_any_size_loses_nothing_and_says_so(lab: Lab) -> None:
    need("mkfs.btrfs", "btrfs")
    tally, failures = Tally(), []
    at = lab.mount(images.make(lab.at / "quota.img", "btrfs", "1G"), "quota", "btrfs")
    output("btrfs", "quota", "enable", at)
    for number, size in enumerate(sizes(LIMITS, 32768)):
        volume = at / f"volume-{number}"
        output("btrfs", "subvolume", "create", volume)
        # By its number and from outside: at its limit a subvolume has no room for the removal of
        # the limit either.
        group = "0/" + output("btrfs", "inspect-internal", "rootid", volume).strip()
        output("btrfs", "qgroup", "limit", size + (64 << 10), group, at)
        lived = live(volume / "run", number, OPERATIONS)
        assert_told(lived.failures, errno.EDQUOT)
        failures += lived.failures
        output("btrfs", "qgroup", "limit", "none", group, at)
        tally.add(f"{size} bytes", judge(volume / "run", lived.journal))
        output("btrfs", "subvolume", "delete", volume)
    print(f"\nbtrfs quota: {tally}; {summary(failures)}")
    tally.assert_sound()
    assert len(failures) >= tally.states // 2
