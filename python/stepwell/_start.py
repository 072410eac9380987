"""The start of a run, which ``CheckpointManager.resume`` restores if the run has no step."""

from __future__ import annotations

from typing import Unpack, cast, final

from ._checkpoint import Checkpoint
from ._locations import Path, readable
from ._opening import open_step
from ._public import public
from ._restore.options import RestoreKeywords, RestoreOptions, ResumeKeywords, spelled_out, with_meanings
from .errors import MisuseError


@public
@final
class Start:
    """A root or checkpoint of any library, from which a run goes on that has no step of its own.
    Its keywords are for this restore only; they go before those of ``resume``.

    Args:
        path: the root or checkpoint.
        step: the number or the name of a step of the root. ``None``: the newest complete one.
    """

    @spelled_out
    def __init__(self, path: Path, step: int | str | None = None, **options: Unpack[ResumeKeywords]) -> None:
        for name in options:
            if name not in ResumeKeywords.__annotations__:
                RestoreOptions.of({name: None}, "Start")  # type: ignore[misc]  # raises for most
                raise MisuseError(f"{name}= is for restore(); resume() fills the state that it is given")
        RestoreOptions.of(cast(RestoreKeywords, options), "Start")
        self._path, self._step = readable(path, "start="), step
        self._options = options

    @classmethod
    def of(cls, start: Path | Start) -> Start:
        """From the argument of ``resume``."""
        return start if isinstance(start, Start) else cls(start)

    @property
    def options(self) -> ResumeKeywords:
        """The keywords of its restore, without the map."""
        found = self._options.copy()
        found.pop("map", None)
        return found

    def open(self) -> Checkpoint:
        """Opens it, under the map."""
        return open_step(self._path, self._step, self._options.get("map"), "auto")

    def __repr__(self) -> str:
        return f"Start({self._path!r}, {self._step!r})"


# help() of a class shows this text, and not that of the constructor.
Start.__doc__ = with_meanings(Start.__doc__, ResumeKeywords)
