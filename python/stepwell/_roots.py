"""``sw.open_root``: the steps of a root of any library."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from ._checkpoint import Checkpoint
from ._checks import step_number
from ._locations import Path, explain, is_directory, readable
from ._opening import is_own, open_step
from ._public import public
from ._steps import inspect
from .errors import MisuseError, StepNotFound, StepwellError

if TYPE_CHECKING:
    from .formats.roots import Listing
    from .maps import MapLike


@final
@dataclass(frozen=True, slots=True)
class RootStep:
    """A step of a root."""

    #: Its number; ``None``: it has only a name, such as a tag of DeepSpeed.
    number: int | None
    #: The name of its file or directory in the root.
    name: str
    #: The path of that.
    path: str
    #: Why it is passed over; ``None``: its writer has finished it.
    incomplete: str | None
    #: True if it has checksums: those of stepwell, or of :func:`stepwell.adopt`.
    has_checksums: bool


@final
@dataclass(frozen=True, slots=True)
class Root:
    """The steps of a root when it was opened."""

    #: The library that wrote it: ``"stepwell"``, ``"Orbax"``, ``"torchtitan"`` and so on.
    family: str
    #: The directory with the steps.
    path: str
    #: All steps, also incomplete ones, in order.
    steps: tuple[RootStep, ...]
    #: The newest complete step; ``None`` without any.
    latest: RootStep | None
    #: The best step, if the library notes it: the Hugging Face Trainer and Lightning do.
    best: RootStep | None = field(default=None)

    def open(
        self, step: int | str | RootStep | None = None, *, map: MapLike | None = None, engine: str = "auto"
    ) -> Checkpoint:
        """Opens a step for reading, as :func:`stepwell.open` does.

        Args:
            step: its number, its name, or the step itself. ``None``: the newest complete one.
            map: as of :func:`stepwell.open`.
            engine: as of :func:`stepwell.open`.

        Raises:
            StepNotFound: there is no such step.
            CorruptCheckpoint: the step is incomplete.
        """
        if step is None:
            step = self.latest
        wanted = step.name if isinstance(step, RootStep) else step
        if self.family == _OWN and wanted is not None:
            wanted = self._number(wanted)
        return open_step(self.path, wanted, map, engine)

    def _number(self, step: int | str) -> int:
        """The number of a step of stepwell."""
        if not isinstance(step, str):
            return step_number(step)
        found = [one.number for one in self.steps if one.name == step and one.number is not None]
        if not found:
            raise StepNotFound(f"{self.path} has no step {step}")
        return found[0]


_OWN = "stepwell"


@public
def open_root(path: Path) -> Root:
    """Lists the steps of a root of stepwell or of another library (:class:`stepwell.results.Root`).
    Reads no array.

    A step of another library is complete if the files are there that its writer writes last.
    :func:`stepwell.verify` reads the bytes.

    Args:
        path: the directory with the steps, or one whose directory ``checkpoints`` has them.

    Raises:
        StepNotFound: the path does not exist, or has no steps. The message says what was expected.
        FormatError: the steps of several libraries lie there.
        CorruptCheckpoint: the file that names the newest step is damaged.
    """
    where = readable(path, "the root")
    if is_own(where):
        return _own(where)
    from . import formats  # imported late: most roots are stepwell's own

    if (found := formats.list_steps(where)) is not None:
        return _foreign(found)
    rows = _own(where) if is_directory(where) else None
    if rows is not None and rows.steps:
        return rows
    try:
        single = formats.find(where)
    except StepwellError:
        single = None
    if single is not None:
        raise MisuseError(
            f"{where} is a single checkpoint ({single.family}), and no root: pass it to sw.open"
        )
    raise StepNotFound(f"{where} is no root: {explain(where)}. Expected in a root: {formats.roots.EXPECTED}")


def _own(path: str) -> Root:
    steps = tuple(
        RootStep(row.step, row.name, os.path.join(path, row.name), row.damage, True) for row in inspect(path)
    )
    whole = [step for step in steps if step.incomplete is None]
    return Root(_OWN, path, steps, whole[-1] if whole else None)


def _foreign(found: Listing) -> Root:
    from .formats import adoption

    steps = {
        id(step): RootStep(
            step.number, step.name, step.path, step.incomplete, os.path.lexists(adoption.place(step.path))
        )
        for step in found.steps
    }
    latest, best = found.latest(), found.best_step()
    return Root(
        found.family,
        found.path,
        tuple(steps.values()),
        None if latest is None else steps[id(latest)],
        None if best is None else steps[id(best)],
    )
