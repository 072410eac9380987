"""A block device answers EIO, once or permanently, to the n-th write or flush, below a real file
system and through every engine. Each failure is a typed error, no committed step is lost, every
committed step exists after a remount, and the next save works once the disk does.

The page cache is what makes this hard: after a failed write-back it holds pages that it calls clean
and that no disk has, and a second fsync says that all is well.
"""

from __future__ import annotations

import errno
import random

import faulty
import images
import pytest
from conftest import need_nothing_of
from histories import Failure, live, summary
from lab import Lab, unmount
from longer import LONG
from verdicts import Tally, judge

OPERATIONS = 6
#: How far into a run a failure comes; later ones are not reached by every run.
WRITES, FLUSHES = 160, 50
CASES = 80 if LONG else 5

#: EIO itself, and what a file system says that has stopped because of it.
TOLD = [errno.EIO, errno.EROFS, errno.ESHUTDOWN, getattr(errno, "EUCLEAN", errno.EIO)]


@pytest.mark.parametrize("engine", ["uring", "buffered"])
@pytest.mark.parametrize("order", ["write", "writes", "flush", "flushes"])
def test_a_failing_disk_loses_no_committed_step(lab: Lab, engine: str, order: str) -> None:
    need_nothing_of(faulty.missing())
    tally, failures, reached, recovered = Tally(), list[Failure](), 0, 0
    template = images.make(lab.at / "template.img", "ext4", None, "-b", "4096")
    with images.mounted(lab, template, "ext4") as at:
        before = live(at / "run", 1, 3, name="before")
        assert not before.failures
    most = WRITES if order.startswith("write") else FLUSHES
    drawn = random.Random(f"{engine} {order}")
    for number in sorted(drawn.sample(range(1, most), min(CASES, most - 1))):
        disk = faulty.FaultyDisk(lab, images.copy(template, lab.at / "disk.img"))
        at = disk.mount()
        disk.order(f"{order} {number}")
        lived = live(at / "run", number, OPERATIONS, engine=engine)
        disk.order("well")
        unmount(at)
        where = f"{order} {number} through {engine}"
        for failure in lived.failures:
            assert failure.errno in map(str, TOLD), (where, failure)
        if disk.failed():
            reached += 1
            failures += lived.failures
            told = lived.journal.find("\nerror save")
            recovered += told >= 0 and "\ncommitted " in lived.journal[told:]
        at = disk.mount()
        tally.add(where, judge(at / "run", before.journal + lived.journal, engine))
        unmount(at)
        disk.close()
    print(
        f"\n{order}, {engine}: {tally}; {reached} reached; {recovered} went on saving in the same process; {summary(failures)}"
    )
    tally.assert_sound()
    assert reached >= tally.states // 2
