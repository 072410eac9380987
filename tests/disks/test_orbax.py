"""The same crash states for Orbax, to have its figure beside ours: a measurement, with nothing to
pass but that it measures."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import images
import pytest
from lab import Lab, die_with_parent, kill
from longer import LONG
from test_block_states import check_ready, images_of, recorded

STEPS = 3
BETWEEN, CHOSEN = 1, 1


class Checker:
    """One process for all states: it takes seconds to begin."""

    def __init__(self, lab: Lab) -> None:
        script = Path(__file__).with_name("orbax_writer.py")
        self.process = subprocess.Popen(
            [sys.executable, "-B", str(script), "check"],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={"JAX_PLATFORMS": "cpu", "HOME": str(lab.at), "PATH": "/usr/bin:/bin"},
            start_new_session=True, preexec_fn=die_with_parent,
        )  # fmt: skip
        lab.stack.callback(kill, self.process)

    def check(self, root: Path) -> str:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{root}\n")
        self.process.stdin.flush()
        return self.process.stdout.readline().strip()


@pytest.mark.parametrize("kind", ["ext4", "xfs", "btrfs"])
def test_how_many_states_lose_a_step_that_orbax_calls_finished(lab: Lab, kind: str) -> None:
    if not LONG:
        pytest.skip("STEPWELL_LONG=1 runs it")
    if importlib.util.find_spec("orbax") is None:
        pytest.skip("orbax-checkpoint is not installed")
    check_ready(lab, kind)
    log, before, journal = recorded(
        lab, kind, WRITER="orbax", PYTHON=sys.executable, STEPS=STEPS, memory="1500M", patience=500
    )
    assert f"committed {STEPS}\n" in journal, journal
    checker = Checker(lab)
    with images.mounted(lab, lab.at / "disk.img", kind) as at:
        # The control: unmounted in peace, the same disk has them all.
        assert checker.check(at / "run") == " ".join(["listed", *map(str, range(1, STEPS + 1))])
    states = log.states(BETWEEN, CHOSEN, seed=11)
    acknowledged = torn = lost = 0
    for state, image in images_of(lab, log, before, states):
        with images.mounted(lab, image, kind) as at:
            words = checker.check(at / "run").split()
        bad = {words[number + 1] for number, word in enumerate(words) if word == "bad"}
        listed = set(words[1 : words.index("bad")] if "bad" in words else words[1:])
        newest = str(state.lines)
        torn += bool(bad)
        if state.lines:
            acknowledged += 1
            lost += newest not in listed or newest in bad
    print(
        f"\nOrbax on {kind}: {len(states)} states; {torn} with a listed step that is not whole; the newest step that was"
        f" called finished is unusable in {lost} of the {acknowledged} states in which there is one"
    )
    assert acknowledged > 0
