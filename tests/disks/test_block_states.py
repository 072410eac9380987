"""Every state that a power cut may leave on a disk with a volatile cache: each write, flush and
durable write of a real file system under a real history is logged (``dm-log-writes``, in user-mode
Linux), the log is replayed up to each flush and to a sample of what lies between, and each such
disk is mounted, recovered and checked.

The check is itself checked: a writer that forgets some of its fsyncs must be noticed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import images
import pytest
import uml
from block_log import Log, Replay, State
from conftest import need, need_nothing_of
from lab import CHRONICLER, Lab
from longer import LONG
from verdicts import Tally, judge_image

OPERATIONS = 40 if LONG else 12
#: Prefixes, and choices of writes, that are looked at between two flushes.
BETWEEN, CHOSEN = (4, 6) if LONG else (1, 1)
#: How many states a mutant may take to be noticed.
MOST_FOR_MUTANTS = 400
#: And a sound writer: a sample where there are more.
MOST = 1500 if LONG else 200


def recorded(
    lab: Lab, kind: str, memory: str = "256M", patience: float = 300, **variables: object
) -> tuple[Log, Path, str]:
    """Runs a writer on a logged disk: the log, the disk as it was before, and the journal."""
    disk = images.make(lab.at / "disk.img", kind)
    before = images.copy(disk, lab.at / "before.img")
    log = lab.at / "log.img"
    log.unlink(missing_ok=True)
    log.touch()
    with log.open("r+b") as file:
        file.truncate(2 << 30)
    variables = {"WRITER": "chronicler", "CHRONICLER": CHRONICLER, "SEED": 7, **variables}
    journal = uml.Guest(lab, "log_writes.sh", [disk, log], memory=memory, KIND=kind, **variables).finish(
        patience
    )
    return Log(log), before, journal


def check_ready(lab: Lab, kind: str) -> None:
    need(f"mkfs.{kind}", "dmsetup", "insmod")
    need_nothing_of(uml.unusable(lab, "dm-mod", "dm-log-writes"))


def images_of(lab: Lab, log: Log, before: Path, states: list[State]) -> Iterator[tuple[State, Path]]:
    """Each state as an image of its own, in the order of the log."""
    replay = Replay(log, before)
    for state in states:
        replay.follow(state.before)
        image = images.copy(before, lab.at / "state.img")
        replay.add(image, state.extra)
        yield state, image


def judged(lab: Lab, kind: str, options: str = "", until_unsound: bool = False) -> Tally:
    log, before, journal = recorded(lab, kind, OPTIONS=f"operations={OPERATIONS},{options}".strip(","))
    lines = journal.splitlines(keepends=True)
    assert "error" not in journal.replace("error none", ""), journal
    everything = log.states(BETWEEN, CHOSEN, seed=11)
    if until_unsound:
        states = everything[:MOST_FOR_MUTANTS]
    else:
        drawn = sorted(random.Random(13).sample(range(len(everything)), min(MOST, len(everything))))
        states = [everything[number] for number in drawn]
    tally = Tally()
    for state, image in images_of(lab, log, before, states):
        said = "".join(lines[: state.lines])
        tally.add(f"{state.why} {state.before}", judge_image(lab, image, kind, said))
        if until_unsound and tally.unsound:
            break
    print(
        f"\n{kind} {options}: {journal.count('committed ')} acknowledged saves, a log of {log.last - log.first} entries; of {len(everything)} states {tally}"
    )
    return tally


@pytest.mark.parametrize(
    "kind",
    [
        "ext4",
        *(
            pytest.param(kind, marks=pytest.mark.skipif(not LONG, reason="STEPWELL_LONG=1 runs it"))
            for kind in ("xfs", "btrfs")
        ),
    ],
)
def test_every_power_cut_state_of_a_disk_keeps_every_promise(lab: Lab, kind: str) -> None:
    check_ready(lab, kind)
    tally = judged(lab, kind)
    tally.assert_sound()
    assert tally.states >= 10 * OPERATIONS


@pytest.mark.parametrize("forgotten", ["files", "directories", "root"])
def test_a_writer_that_forgets_an_fsync_is_noticed(lab: Lab, forgotten: str) -> None:
    check_ready(lab, "ext4")
    tally = judged(lab, "ext4", f"forget={forgotten}", until_unsound=True)
    assert tally.unsound, "nothing was noticed: these states prove nothing"
    print(tally.unsound[0])
