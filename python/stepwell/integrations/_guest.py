"""Checkpoints in directories that another library names and deletes. Each directory is a root with
one step, and may have files of that library beside it. A second save to a directory writes the next
step, and deletes the one before once it is committed."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager, suppress
from functools import partial
from typing import Protocol, TypeVar, cast

from .. import _adapters as adapters
from .. import _core
from .. import _lifecycle as lifecycle
from .._choice import saved_choice
from .._locations import CONTROL
from .._manager import CheckpointManager
from .._opening import is_own, metadata
from .._opening import open as open_checkpoint
from .._restore.options import Globs, ResumeKeywords
from .._save_result import Save
from .._state.specs import as_rank
from ..coordinators import Coordinator
from ..errors import (
    MismatchError,
    MisuseError,
    StepwellError,
)
from ._log import WARNING, log
from ._prover import ProveKeywords, Prover, end_provers
from ._terms import TRAINER, Terms, in_terms, reworded

_T = TypeVar("_T")
_U = TypeVar("_U")


def take_over(owner: object, ours: type, version: str, tested: str, used: Iterable[str] = ()) -> None:
    """Puts a class of ours in front of that of an object of another library.

    Raises:
        MisuseError: this version of the library lacks a method that ours replaces, or an attribute
            that it uses.
    """
    names = [name for name in (*vars(ours), *used) if "stepwell" not in name and not name.startswith("__")]
    lacking = next((name for name in names if not hasattr(owner, name)), None)
    kind = type(owner)
    if lacking is not None:
        raise MisuseError(f"{kind.__name__} has no {lacking} in version {version}. Tested with {tested}")
    if not issubclass(kind, ours):
        owner.__class__ = type(f"Stepwell{kind.__name__}", (ours, kind), {})


class GuestSave(Future[_T]):
    """A save in the background, as a ``concurrent.futures.Future``. Its result is that of
    ``committed``, which runs on the thread of this save after the commit, on each rank."""

    def __init__(
        self,
        manager: CheckpointManager,
        save: Save,
        path: str,
        committed: Callable[[], _T],
        terms: Terms = TRAINER,
        stays_open: bool = False,
    ) -> None:
        super().__init__()
        self.path, self._terms = path, terms
        #: True if somebody else closes the manager.
        self._stays_open = stays_open
        self.what = f"the save to {path}"
        self._manager, self._save, self._committed = manager, save, committed
        self._is_seen = False
        self.set_running_or_notify_cancel()
        lifecycle.watch(self)
        self._thread = threading.Thread(target=self._finish, name="stepwell-guest", daemon=True)
        self._thread.start()

    def result(self, timeout: float | None = None) -> _T:
        """See ``Future``."""
        return self._saw(super().result, timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """See ``Future``."""
        return self._saw(super().exception, timeout)

    def is_committed(self) -> bool:
        """Waits for the end of this save. True if it has committed; a failure stays unseen."""
        self._thread.join()
        return super().exception(0) is None

    def raise_unseen(self) -> None:
        """Raises a failure that nobody has seen."""
        if self.done() and not self._is_seen:
            self.result()

    def wait_captured(self) -> None:
        """See ``lifecycle.Ending``."""
        self._save.wait_captured()

    def at_exit(self) -> BaseException | None:
        """Waits as long as the save gets on; see ``lifecycle.Ending``."""
        self._thread.join()  # the save and the end of the manager have a deadline of their own
        return None if self._is_seen else super().exception(0)

    def _saw(self, ask: Callable[[float | None], _U], timeout: float | None) -> _U:
        try:
            return ask(timeout)
        finally:
            if self.done():
                self._is_seen = True
                lifecycle.forget(self)

    def _finish(self) -> None:
        try:
            try:
                self._save.result()
            finally:
                if not self._stays_open:
                    self._manager.close()
            found = self._committed()
        except BaseException as failure:
            reworded(failure, self._terms)
            failure.add_note(f"This was {self.what}.")
            self.set_exception(failure)
        else:
            self.set_result(found)
            lifecycle.forget(self)


class Guest(Protocol):
    """A trainer with saves in the background."""

    #: The save that has begun last, until somebody has waited for it.
    _stepwell_pending: GuestSave[None] | None


def settle_pending(guest: Guest) -> None:
    """Waits for the pending save."""
    pending, guest._stepwell_pending = guest._stepwell_pending, None
    if pending is not None:
        pending.result()


#: The saves that had not ended when somebody looked last.
_saves: list[GuestSave[object]] = []
#: The process whose staging memory is kept. Each checkpoint has a manager of its own, and memory
#: that was given back is slow to touch again.
_kept_in: int | None = None


def save(
    path: str,
    state: object,
    coordinator: Coordinator | None,
    metadata: object,
    committed: Callable[[], _T],
    exclude: Globs = None,
    terms: Terms = TRAINER,
    prover: Prover | None = None,
    step: int = 0,
) -> GuestSave[_T]:
    """Begins a save. Returns when the state may change. ``state`` may be a function that returns
    it. If that raises on one rank, the save fails on all of them. Errors name what can be done by
    these terms. ``prover`` traces the steps after it. ``step`` is the number of the step, unless
    the checkpoint has a later one."""
    global _kept_in
    if coordinator is None:
        raise_unseen()
        given = state
    else:
        given = partial(_when_seen, state)  # the other ranks hear of a failure
    if _kept_in != os.getpid():
        _core.keep_staging_memory()
        _kept_in = os.getpid()
    end_provers(path)
    with in_terms(terms):
        options: ProveKeywords = {} if prover is None else prover.options
        manager = CheckpointManager(path, retention=1, coordinator=coordinator, **options)
        try:
            number = max(step, manager.next_step())
            found = manager.save(number, given, custom_metadata=metadata, exclude=exclude)
        except BaseException:
            manager.close()
            raise
    if prover is not None:
        prover.follow(path, manager, number - step)
    guest = GuestSave(manager, found, path, committed, terms, stays_open=prover is not None)
    _saves.append(cast("GuestSave[object]", guest))
    return guest


def _when_seen(state: object) -> object:
    raise_unseen()
    return state() if callable(state) else state


def restored(
    path: str,
    into: dict[str, object],
    coordinator: Coordinator | None,
    is_partial: bool = False,
    terms: Terms = TRAINER,
) -> dict[str, object]:
    """Returns ``into`` with the values of a checkpoint, or of the newest step of a root. Errors
    name what can be done by these terms."""
    # As DCP does it: what is stored beside is ignored, and floating-point values are cast.
    options: ResumeKeywords = {
        "missing": "keep" if is_partial else "error",
        "unexpected": "ignore",
        "cast": "lossy",
    }
    with in_terms(terms):
        if os.path.lexists(os.path.join(path, CONTROL)):
            with CheckpointManager(path, read_only=True, coordinator=coordinator) as manager:
                return manager.restore(into=into, **options)
        with open_checkpoint(path) as checkpoint:
            return checkpoint.restore(into=into, **options)


def check(state: object, rank: int, world_size: int) -> None:
    """Raises if a value of the state cannot be stored. Copies nothing."""
    with as_rank((rank, world_size)):
        _core.flatten(adapters.as_saved(state), saved_choice(None, None, None, "refuse"), world_size == 1)


def newest(found: Iterable[tuple[int, str]], why_not: Callable[[str], str | None]) -> str | None:
    """Returns the path with the highest number that ``why_not`` has no reason against. Logs the
    reasons of those that it passes over."""
    for _, path in sorted(found, reverse=True):
        why = why_not(path)
        if why is None:
            return path
        log(WARNING, f"{path} is passed over: {why}")
    return None


def raise_unseen() -> None:
    """Raises the failure of an earlier save that nobody has seen."""
    ended = [one for one in _saves if one.done()]
    _saves[:] = [one for one in _saves if one not in ended]
    for one in ended:
        one.raise_unseen()


def wait_saves(folder: str) -> None:
    """Waits for the saves of this process below a folder. A failure stays unseen."""
    within = os.path.join(os.path.realpath(folder), "")
    for one in [one for one in _saves if os.path.realpath(one.path).startswith(within)]:
        one.is_committed()


def settle(saves: Iterable[Save | GuestSave[_T]]) -> None:
    """Waits for all of these saves, and raises the first failure. It has the others as notes."""
    failures = [failure for save in saves if (failure := save.exception()) is not None]
    for other in failures[1:]:
        failures[0].add_note(f"Another save failed, too: {type(other).__name__}: {other}")
    if failures:
        raise failures[0]


@contextmanager
def naming_another(path: str, text: str, inside: str = "") -> Iterator[None]:
    """Has the errors of a load name the newest other checkpoint of ours in the same directory.

    Args:
        path: the checkpoint.
        text: how to load another one, with ``{}`` for its path.
        inside: the place of our files in each checkpoint.
    """
    try:
        yield
    except MismatchError:
        raise  # the others do not match either
    except StepwellError as error:
        if (other := _newest_beside(path, inside)) is not None:
            error.add_note(f"Another checkpoint is there: {text.format(other)}.")
        raise


def _newest_beside(path: str, inside: str) -> str | None:
    found = []
    folder, own = os.path.split(path)
    for name in os.listdir(folder) if os.path.isdir(folder) else ():
        place = os.path.join(folder, name)
        ours = os.path.join(place, inside) if inside else place
        if name != own and not name.startswith(".") and is_own(ours):
            with suppress(StepwellError, OSError):
                found.append((metadata(ours).committed, place))
    return max(found)[1] if found else None
