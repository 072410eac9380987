"""Real power cuts: a kernel is killed while a process of it saves, replaces, rewinds, deletes and
retires, and its disk is mounted again.

Each process continues on the disk of the last cut. A cut loses what that kernel had not written. It
keeps what was written and not flushed, and comes at random moments. ``test_block_states.py`` covers
the loss of a disk's own cache, at every moment.
"""

from __future__ import annotations

import random
import time

import images
import pytest
import uml
from conftest import need, need_nothing_of
from lab import CHRONICLER, Lab
from longer import LONG
from verdicts import Tally, judge_image, promises

CUTS = 60 if LONG else 4
FORGETFUL_CUTS = 12 if LONG else 4


def cuts(lab: Lab, kind: str, number: int, options: str = "") -> tuple[Tally, int]:
    """Cuts the power so many times on one disk; what was found, and how many steps were
    acknowledged meanwhile."""
    drawn = random.Random(f"{kind} {options}")
    disk = images.make(lab.at / "disk.img", kind)
    tally, journal = Tally(), ""
    for cut in range(number):
        guest = uml.Guest(
            lab, "live.sh", [disk], KIND=kind, NAME=f"cut{cut}", SEED=drawn.randrange(1 << 32),
            CHRONICLER=CHRONICLER, OPTIONS=options,
        )  # fmt: skip
        # Most cuts come while it works, some while it still opens the root. A busy machine takes
        # its time until the first save.
        guest.wait_for("committed " if cut % 4 else "opened ")
        time.sleep(drawn.uniform(0, 1.5))
        guest.cut()
        journal += promises(guest.journal)
        assert "error " not in journal, guest.report()
        copy = images.copy(disk, lab.at / "copy.img")
        tally.add(f"cut {cut}", judge_image(lab, copy, kind, journal))
        if tally.unsound:
            break
    return tally, journal.count("\ncommitted ")


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_a_power_cut_loses_and_tears_no_committed_step(lab: Lab, kind: str) -> None:
    need(f"mkfs.{kind}")
    need_nothing_of(uml.unusable(lab))
    tally, acknowledged = cuts(lab, kind, CUTS)
    print(f"\n{kind}: {CUTS} power cuts, {acknowledged} acknowledged saves: {tally}")
    tally.assert_sound()
    assert acknowledged >= CUTS // 2


def test_power_cuts_reveal_a_writer_that_forgets_to_sync(lab: Lab) -> None:
    need("mkfs.ext4")
    need_nothing_of(uml.unusable(lab))
    tally, acknowledged = cuts(lab, "ext4", FORGETFUL_CUTS, "forget=files")
    print(f"\next4, no fsync of files: {acknowledged} acknowledged saves: {tally}")
    assert tally.unsound, "no cut noticed it: these cuts prove nothing"
