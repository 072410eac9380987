"""The steps that another library keeps in a directory, and what its module needs to list them."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from ... import _core
from ..._checks import shown
from ..._paths import printable
from ...errors import CorruptCheckpoint, MisuseError, StepNotFound
from .. import lookup
from ..files import corrupt, read

#: The longest file with the name of a step.
_MAX_POINTER_BYTES = 4096
#: Digits of the number of a step.
_MAX_DIGITS = 18
#: Names that an error lists.
_LISTED = 5


@dataclass(frozen=True, slots=True)
class ForeignStep:
    """A step of another library."""

    #: ``None``: it has none.
    number: int | None
    #: Its entry in the root, and the path of that.
    name: str
    path: str
    #: Why it is passed over; ``None``: its writer has finished it.
    incomplete: str | None = None
    #: The path of its checkpoint, if that is below its own.
    checkpoint: str | None = None
    #: The paths of its parts by name, if it is more than one checkpoint.
    parts: Mapping[str, str] = field(default_factory=dict)
    #: The path of the checkpoint that an integration of stepwell has put there. It is not read as a
    #: part of this step.
    ours: str | None = None


def _no_best() -> str | None:
    return None


@dataclass(frozen=True, slots=True)
class Listing:
    """The steps of a root."""

    #: The library, as users call it.
    family: str
    path: str
    #: In order. If several have one number, the last one is preferred.
    steps: Sequence[ForeignStep]
    #: The name of the newest step, if the library notes it and it has no number.
    newest: str | None = None
    #: Returns the name of the best step, if the library notes it.
    best: Callable[[], str | None] = _no_best
    #: The reading that its files belong to.
    reading: _core.Reading = field(default_factory=lookup.reading)

    def latest(self) -> ForeignStep | None:
        """The newest complete step."""
        whole = [step for step in self.steps if step.incomplete is None]
        named = [step for step in whole if step.name == self.newest]
        return named[0] if named else whole[-1] if whole else None

    def best_step(self) -> ForeignStep | None:
        """The best step, if the library notes it and it is there and complete."""
        with self.reading:
            name = self.best()
        found = [step for step in self.steps if step.name == name and step.incomplete is None]
        return found[0] if found else None

    def step(self, wanted: int | str | None) -> ForeignStep:
        """The step with a number or a name. ``None``: the newest complete one.

        Raises:
            StepNotFound: it is missing, or the newest one is a checkpoint of stepwell.
            CorruptCheckpoint: it is incomplete.
        """
        if wanted is None:
            return self._newest()
        found = self.named(wanted)
        whole = [step for step in found if step.incomplete is None]
        if not whole:
            error = CorruptCheckpoint(f"{found[-1].path}: {found[-1].incomplete}. Choose another step")
            error.file, error.step = found[-1].path, found[-1].number
            raise error
        return whole[-1]

    def _newest(self) -> ForeignStep:
        latest = self.latest()
        behind = self.steps if latest is None else self.steps[self.steps.index(latest) + 1 :]
        if newer := [step for step in behind if step.ours is not None]:
            raise StepNotFound(
                f"{self.path} ({self.family}): stepwell wrote its newest step, {printable(newer[-1].name)}. "
                f"Open it by the path {newer[-1].ours}"
            )
        return latest or self._nothing()

    def named(self, wanted: int | str) -> list[ForeignStep]:
        """The steps with a number or a name, also incomplete ones. At least one."""
        if isinstance(wanted, bool) or not isinstance(wanted, (int, str)):
            raise MisuseError(f"a step is its number or its name, not {shown(wanted)}")
        found = [step for step in self.steps if wanted in (step.number, step.name)]
        if not found:
            raise StepNotFound(
                f"{self.path} ({self.family}) has no step {printable(str(wanted))}. It has {self._names()}"
            )
        return found

    def _nothing(self) -> ForeignStep:
        reasons = [f"{printable(step.name)}: {step.incomplete}" for step in self.steps[-_LISTED:]]
        raise StepNotFound(f"{self.path} ({self.family}) has no complete step. {'; '.join(reasons)}")

    def _names(self) -> str:
        names = [printable(step.name) for step in self.steps]
        return ", ".join(names[-_LISTED:]) + (f" and {len(names) - _LISTED} more" if names[_LISTED:] else "")


#: Lists the steps in a directory with these entries; ``None``: another library.
Family: TypeAlias = Callable[[str, Sequence[str]], Listing | None]


def numbered(path: str, names: Iterable[str], pattern: re.Pattern[str]) -> list[tuple[int, str, str]]:
    """Returns number, name and path of the entries whose names match, in order. The first group is
    the number."""
    found = ((number_of(pattern.fullmatch(name)), name, os.path.join(path, name)) for name in names)
    return sorted((number, name, place) for number, name, place in found if number is not None)


def number_of(match: re.Match[str] | None) -> int | None:
    """Returns the number in the first group of a match; ``None`` without one, or if it has more
    digits than the number of a step."""
    return None if match is None or len(match[1]) > _MAX_DIGITS else int(match[1])


def entries(path: str) -> Collection[str]:
    """The entries of a directory. Empty if it cannot be listed."""
    try:
        return lookup.names(path)
    except OSError:
        return ()


def pointer(path: str, name: str, expected: str) -> str | None:
    """Returns the text of a file that names a step; ``None`` without that file."""
    file = os.path.join(path, name)
    if not lookup.is_file(file):
        return None
    content, length = read(file, 0, _MAX_POINTER_BYTES)
    text = content.decode("utf-8", "replace").strip()
    if length > _MAX_POINTER_BYTES or not text or not text.isprintable():
        raise corrupt(file, f"{expected} was expected, not {shown(text[:80])}. Write it again, or delete it")
    return text


def tracked(path: str, name: str) -> int | str | None:
    """Returns the iteration that a tracker file names, or ``"release"``."""
    text = pointer(path, name, "the number of an iteration, or `release`,")
    if text is None or text == "release":
        return text
    if not (text.isascii() and text.isdigit() and len(text) <= _MAX_DIGITS):
        file = os.path.join(path, name)
        raise corrupt(
            file,
            f"the number of an iteration was expected, not {shown(text[:80])}. Write it again, or delete it",
        )
    return int(text)


def missing(names: Collection[str], *wanted: str) -> str | None:
    """The reason if a file is missing that a writer writes last."""
    return next(
        (f"its {name} is missing: the save was not finished" for name in wanted if name not in names), None
    )


def written_by_stepwell(path: str) -> str:
    """The reason why a checkpoint of an integration is not read as one of the library."""
    return f"stepwell wrote it: open it by the path {path}"


def newer(number: int, noted: int | str | None, where: str) -> str | None:
    """The reason if a step is newer than the one that the library notes after each save."""
    if isinstance(noted, int) and number > noted:
        return f"{where} names step {noted}: the save was not finished"
    return None


def absent(path: str, noted: str, number: int | None, where: str) -> ForeignStep:
    """The step that a library has noted, and that is gone."""
    return ForeignStep(number, noted, os.path.join(path, noted), f"{where} names it, and it is missing")
