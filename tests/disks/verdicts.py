"""Recovery and the check of every promise on a root after an accident."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

import images
from lab import CHRONICLER, Lab, run


@dataclass
class Tally:
    """Verdicts over many states of one proof."""

    states: int = 0
    #: Steps that were listed, read and verified, in all states together.
    steps: int = 0
    unsound: list[str] = field(default_factory=list)

    def add(self, where: str, verdict: str) -> None:
        self.states += 1
        kind, _, rest = verdict.partition(" ")
        if kind == "sound":
            self.steps += int(rest.split()[0])
        else:
            self.unsound.append(f"{where}: {verdict}")

    def __str__(self) -> str:
        return (
            f"{self.states} states, {self.steps} steps read and verified, {len(self.unsound)} states unsound"
        )

    def assert_sound(self) -> None:
        assert not self.unsound, "\n".join([str(self), *self.unsound[:10]])


def judge(root: Path, journal: str, engine: str = "auto") -> str:
    """``sound STEPS SET_ASIDE`` or ``unsound WHY``. Opens the root as a writer: recovery does what
    it does."""
    judged = run(CHRONICLER, "judge", root, stdin=journal, env={"STEPWELL_ENGINE": engine})
    if judged.returncode not in (0, 1) or not judged.stdout:
        return f"unsound the judge did not end well: {judged.returncode} {judged.stdout} {judged.stderr}"
    return judged.stdout.strip()


def judge_image(lab: Lab, image: Path, kind: str, journal: str) -> str:
    """Judges what is left on an image. The image is changed by it: the file system recovers, and so
    does the root."""
    try:
        with images.mounted(lab, image, kind) as at:
            return judge(at / "run", journal)
    except RuntimeError as refusal:
        return f"unsound the file system does not mount: {refusal}"


def promises(journal: str) -> str:
    """The lines of a journal that count: what a kill left of the last line promises nothing."""
    return journal[: journal.rfind("\n") + 1]
