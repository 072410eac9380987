"""The exceptions of the package. Each class has a stable ``kind``. The engine's table of kinds
(``_core.error_kinds()``) names all of them, and :func:`from_engine` turns a kind into its class.

Messages say what happened, where (leaf, file, rank), and what to do; the same facts are attributes.
"""

from __future__ import annotations

import errno as _errno
from typing import TYPE_CHECKING, ClassVar, TypeVar

from ._paths import named
from ._public import public

if TYPE_CHECKING:
    from ._restore.report import RestoreReport
    from ._trace.tracer import TraceDifference


__all__ = [
    "Cancelled",
    "ClosedError",
    "CoordinationTimeout",
    "CoordinatorError",
    "CorruptCheckpoint",
    "DeviceError",
    "DonatedBuffer",
    "DurabilityUncertain",
    "ForkedProcess",
    "FormatError",
    "InternalError",
    "LoadFailed",
    "LockedError",
    "MismatchError",
    "MisuseError",
    "NoLocks",
    "NotAStep",
    "NotCarried",
    "RankFailed",
    "ReadOnlyError",
    "ResumeDiffers",
    "SaveFailed",
    "SessionLost",
    "StalledError",
    "StepExists",
    "StepGone",
    "StepNotFound",
    "StepOrder",
    "StepwellError",
    "StorageError",
    "TornSnapshot",
    "UnsupportedLeaf",
]


@public
class StepwellError(Exception):
    """Every error of this package."""

    kind: ClassVar[str] = "error"

    #: Rendered path of the leaf that it is about.
    leaf: str | None = None
    #: The file that it is about.
    file: str | None = None
    #: The step that it is about.
    step: int | None = None
    #: Paths of leaves of the caller's own memory that had been overwritten when a restore failed.
    overwritten: tuple[str, ...] = ()

    def __str__(self) -> str:
        # The message alone: OSError would show errno and file in its own way, and drop it.
        return str(self.args[0]) if self.args else type(self).__name__


@public
class StepExists(StepwellError, FileExistsError):
    """The step is there already, or a checkpoint at that path: pass ``exists="replace"``, or
    ``exists="skip"`` for a final save that may repeat."""

    kind = "step_exists"


@public
class StepNotFound(StepwellError, FileNotFoundError):
    """There is no such committed step, or no checkpoint at that path. The message says what is
    there, and what to pass instead."""

    kind = "step_not_found"


class StepGone(StepwellError):
    """The step was there and was removed while it was read, which can be where there are no leases:
    restore a newer one, or give readers longer (``Options.grace``)."""

    kind = "step_gone"


class StepOrder(StepwellError, ValueError):
    """The step is below the newest one: save a higher one, or go back with
    :meth:`stepwell.CheckpointManager.rewind`, which keeps what it sets aside."""

    kind = "step_order"


@public
class CorruptCheckpoint(StepwellError):
    """Stored bytes are not the bytes that were written. ``leaf``, ``file`` and ``block`` say where.
    ``sw.verify`` lists all damage; restore another step, or set this one aside with
    :meth:`CheckpointManager.rewind`."""

    kind = "corrupt_checkpoint"
    block: int | None = None


@public
class MismatchError(StepwellError, ValueError):
    """The wanted and the stored leaves do not match. ``report`` lists every difference, and nothing
    was written. Change what you want, or allow the difference with ``missing``, ``unexpected``,
    ``rename``, ``cast`` or ``resize``."""

    kind = "mismatch"
    report: RestoreReport | None = None


@public
class UnsupportedLeaf(StepwellError, TypeError):
    """A value in the state cannot be stored, or what is wanted cannot be restored into. ``leaf``
    says which; the message says what to pass in its place. ``check`` says it at the start of a
    run."""

    kind = "unsupported_leaf"


@public
class SaveFailed(StepwellError, OSError):
    """A save was not committed. ``errno`` is the system's own where there was one. Older steps are
    untouched, and nothing of it is left; the next save starts afresh."""

    kind = "save_failed"


class NotCarried(StepwellError):
    """A tier will not get this step: a newer one took its place, the tier does not take it, it is
    damaged in the first tier, or it was removed."""

    kind = "not_carried"


class TornSnapshot(SaveFailed):
    """With ``Options(detect_torn=True)``: a leaf was changed after
    :meth:`~stepwell.CheckpointManager.save` was called and before it was captured. ``leaf`` says
    which; the message says where it may be changed."""

    kind = "torn_snapshot"


class DurabilityUncertain(StepwellError, OSError):
    """The step was renamed into place, but the last fsync failed: it may not survive a power cut.
    Look at the disk, and save the same number again: that settles it."""

    kind = "durability_uncertain"


@public
class RankFailed(StepwellError):
    """Another rank failed, so that all do; ``rank`` says which, and the message why. Nothing is
    visible of the step; the next save starts afresh."""

    kind = "rank_failed"
    rank: int | None = None


class CoordinationTimeout(StepwellError, TimeoutError):
    """Ranks were missing at the deadline; ``missing`` lists them (none, where this is the one that
    the others have missed). The step was not committed on any rank, and the next save starts
    afresh."""

    kind = "coordination_timeout"
    missing: list[int] | None = None


class SessionLost(CoordinationTimeout):
    """An earlier call of the manager had no answer, on this rank or on one that it waited for, so
    that the ranks no longer agree. The message has the first failure; ``missing`` lists the ranks
    that did not answer. Committed steps are untouched. Start the job again, or open the manager
    again on all ranks."""

    kind = "session_lost"


class CoordinatorError(StepwellError, ConnectionError):
    """The messages of the ranks do not get through, usually because the process with the store is
    gone. The error has its answer. Committed steps are untouched; start the job again."""

    kind = "unreachable"


class StalledError(StepwellError, TimeoutError):
    """Nothing happened for too long (``Options.stall_timeout``); the message says what was waited
    for. Nothing was given up: call again to wait on."""

    kind = "timeout"


@public
class LockedError(StepwellError):
    """Another live process writes to this root: stop it, or open with ``read_only=True``. Or a step
    that is to go is held or read: end that first."""

    kind = "locked"


@public
class LoadFailed(StepwellError):
    """An object's own ``load_state_dict`` or ``set_state`` raised when it was given what is stored;
    what it raised is the cause. ``leaf`` says which object, ``overwritten`` what of the caller's
    had been filled by then: go on with none of it."""

    kind = "load_failed"


class DonatedBuffer(StepwellError):
    """An array of JAX was donated to a computation before it was captured: save what the
    computation returned."""

    kind = "donated_buffer"


class ForkedProcess(StepwellError):
    """A handle was used in a forked child; it belongs to the parent process: open it in the process
    that uses it."""

    kind = "forked_process"


class FormatError(StepwellError):
    """A file is not of a form that this version reads: damaged, somebody else's, or written by a
    newer version."""

    kind = "format"


class NotAStep(FormatError):
    """A directory that has a step's name and is none, or is one under a wrong name. The message
    says what it lacks."""

    kind = "not_a_step"


class NoLocks(LockedError):
    """The file system has no locks, so that a second writer cannot be noticed in time: pass
    ``Options(take_over=True)`` if there is no other."""

    kind = "no_locks"


class ClosedError(StepwellError, ValueError):
    """The manager or checkpoint was closed: make a new one."""

    kind = "closed"


class ReadOnlyError(StepwellError, PermissionError):
    """A manager that was opened with ``read_only=True`` was asked to write: open one without it."""

    kind = "read_only"


@public
class StorageError(StepwellError, OSError):
    """A file operation failed. ``errno`` and ``filename`` are the system's; the message says what
    to do where that is known."""

    kind = "io"


class DeviceError(StepwellError, RuntimeError):
    """A device answered a call with an error: before a save had begun, in a guard, or in a restore
    (a save that fails by one is a :class:`~stepwell.SaveFailed`). An error of a kernel stays:
    everything on that device fails from then on, and the process has to be started again; committed
    steps are whole."""

    kind = "device"


@public
class MisuseError(StepwellError, ValueError):
    """A call that cannot work, whatever is on disk: a mistyped word, number or path. The message
    says what it may be; nothing was written."""

    kind = "invalid"


class InternalError(StepwellError):
    """A bug in stepwell, never a mistake of the caller. ``expected`` and ``found`` say which
    invariant does not hold. Please report it with its message. A bug that ends a save raises
    :class:`~stepwell.SaveFailed` with the same words: older steps are untouched."""

    kind = "internal"
    expected: str | None = None
    found: str | None = None


class Cancelled(StepwellError):
    """The other half of the operation ended first; its own error says why."""

    kind = "cancelled"


_Error = TypeVar("_Error", bound=StepwellError)


class ResumeDiffers(StepwellError, UserWarning):
    """A resumed run is not the run that it continues: a leaf has another value than the same step
    had before. The message names the first leaf, the rank and likely causes. A warning, unless
    ``on_resume_difference="raise"``."""

    kind = "resume_differs"
    rank: int | None = None
    #: The step, all leaves that differ, and the likely causes.
    difference: TraceDifference | None = None


def at_leaf(kind: type[_Error], path: str, why: str) -> _Error:
    """Returns an error about the leaf at a rendered path, which its message names."""
    error = kind(f"{named(path)}: {why}")
    error.leaf = path
    return error


def _classes() -> list[type[StepwellError]]:
    found: list[type[StepwellError]] = []
    pending: list[type[StepwellError]] = [StepwellError]
    while pending:
        one = pending.pop()
        found.append(one)
        pending.extend(one.__subclasses__())
    return found


#: Every class by its kind.
BY_KIND: dict[str, type[StepwellError]] = {one.kind: one for one in _classes()}

#: Advice for an errno that the system's own words lack.
REMEDIES: dict[int, str] = {
    _errno.ENOSPC: "the disk is full: free space there",
    _errno.EDQUOT: "your quota there is used up: delete something of yours",
    _errno.EFBIG: "a file must not be that long there: look at `ulimit -f`, and at what the file system allows",
    _errno.EACCES: "this user may not do that there: change the permissions, or pass another directory",
    _errno.EROFS: "the file system is mounted read-only: pass another directory, or only read from this one",
}
#: The same for saves, which make the directories that they need: one that is not there was there
#: before.
SAVE_REMEDIES: dict[int, str] = {
    **REMEDIES,
    _errno.ENOSPC: "the disk is full: free space there, or keep fewer steps of a run (retention=). Steps that a further tier still has to get stay: see mgr.tiers()",
    _errno.EDQUOT: "your quota there is used up: delete something of yours, or keep fewer steps of a run (retention=)",
    _errno.ENOENT: "its directory was removed or moved while it was in use: make a new manager",
}


def _remedy(cls: type[StepwellError], code: int | None) -> str | None:
    """Returns the advice for an error of that class with that errno, or ``None``."""
    if issubclass(cls, SaveFailed):
        return SAVE_REMEDIES.get(code or 0)
    return REMEDIES.get(code or 0) if issubclass(cls, StorageError) else None


def from_system(what: str, error: OSError, path: str) -> StepwellError:
    """The exception for an error of the system at a path."""
    return from_engine("io", f"{what}: {error.strerror}", {"errno": error.errno, "file": path})


def from_engine(kind: str, message: str, attributes: dict[str, object]) -> StepwellError:
    """The exception for an error of the engine. Called by the bindings."""
    cls = BY_KIND.get(kind, InternalError)
    given = attributes.pop("errno", None)
    code = given if isinstance(given, int) else None
    if issubclass(cls, FileNotFoundError):
        code = code or _errno.ENOENT
    elif issubclass(cls, FileExistsError):
        code = code or _errno.EEXIST
    error: StepwellError
    if issubclass(cls, OSError):
        remedy = _remedy(cls, code)
        error = cls(message if remedy is None else f"{message}; {remedy}")
        error.errno = code
        error.filename = attributes.get("file")
    else:
        error = cls(message)
    for name, value in attributes.items():
        if value is not None:
            setattr(error, name, value)
    return error
