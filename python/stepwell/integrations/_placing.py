"""Names of checkpoints in other libraries: a new checkpoint takes the name of an old one, and
unwanted ones are deleted in the background, once the saves before are committed."""

from __future__ import annotations

import os
import stat
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from typing import TYPE_CHECKING, TypeVar

from .. import _core
from .._locations import GUEST
from .._opening import is_own
from .._options import Options
from .._save_result import Save
from .._timeouts import stall_seconds
from ..errors import StalledError, StepwellError, from_system
from ._log import INFO, WARNING, log

if TYPE_CHECKING:
    from ._guest import GuestSave

#: The longest wait for a deletion.
_REMOVE_SECONDS = 600.0
_T = TypeVar("_T")


#: Deletions that had not ended when somebody looked last, with their paths. Their threads are no
#: daemons, so the end of the process waits for them.
_removals: list[tuple[threading.Thread, Sequence[str]]] = []
#: Held by the thread that deletes. Two would take each other for readers.
_removing = threading.Lock()


def all_committed(saves: Sequence[Save], options: Options | None) -> bool:
    """Waits for saves, as long as they get on. False if one has failed; the failure stays
    unseen."""
    stall = stall_seconds((Options() if options is None else options).stall_timeout)
    return all([save._waited(stall) for save in saves])


def durable(save: GuestSave[_T], path: str) -> bool:
    """Waits for a save, as :meth:`GuestSave.is_committed` does, and syncs the files that the
    trainer has written beside it."""
    if not save.is_committed():
        return False
    for folder, folders, files in os.walk(path):
        folders[:] = [name for name in folders if name != GUEST]
        for place in (*(os.path.join(folder, name) for name in files), folder):
            with suppress(FileNotFoundError):  # its library has deleted it
                if stat.S_IFMT(os.lstat(place).st_mode) in (stat.S_IFREG, stat.S_IFDIR):
                    _sync(place)
    _sync(os.path.dirname(path))
    return True


def _sync(path: str) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


#: Committed checkpoints that could not be renamed, by the name that they should have.
_unplaced: dict[str, OSError] = {}


def save_at(where: str, begin: Callable[[str], Save], options: Options | None) -> Save:
    """Begins a save of a single checkpoint by ``begin(path)``, which replaces a checkpoint of ours
    in one step. Some things cannot be replaced so: files and links of another library, and any
    checkpoint on a file system without swaps (NFS). There the new checkpoint gets another name
    first, and the old one keeps its name until the commit."""
    new, aside = f"{where}.new", f"{where}.replaced"
    wait_placed(where)
    wait_removed(where)
    if is_own(new):  # a killed process could not rename it
        _place(new, where, aside)
    is_directory = os.path.isdir(where) and not os.path.islink(where)
    if not os.path.lexists(where) or (
        is_directory and (not is_own(where) or _can_swap(os.path.dirname(where)))
    ):
        save = begin(where)
        if os.path.lexists(aside):
            remove_after(partial(all_committed, [save], options), [aside])
        return save
    save = begin(new)
    remove_after(partial(_took_place, save, options, new, where, aside), [aside])
    return save


def _took_place(save: Save, options: Options | None, new: str, where: str, aside: str) -> bool:
    """Gives a checkpoint its name, once it is committed."""
    if not all_committed([save], options):
        return False
    try:
        _place(new, where, aside)
    except OSError as error:
        _unplaced[where] = error
        return False
    return True


def _place(new: str, where: str, aside: str) -> None:
    """Gives a committed checkpoint its name. A process that is killed between the two renames
    leaves both checkpoints under the other names, and the next save goes on."""
    is_replaced = os.path.lexists(where)
    if is_replaced:
        if os.path.lexists(aside):
            _remove(aside)
        os.rename(where, aside)
    try:
        os.rename(new, where)
    except OSError:
        if is_replaced:
            os.rename(aside, where)
        raise
    _sync(os.path.dirname(where))


def wait_placed(where: str) -> None:
    """Waits until a committed save has its name; see :func:`save_at`.

    Raises:
        StorageError: it could not be renamed.
    """
    wait_removed(f"{where}.replaced")
    _raise_unplaced(where)


def _raise_unplaced(where: str) -> None:
    if (failure := _unplaced.pop(where, None)) is not None:
        raise from_system(
            f"{where}: its save is committed as {where}.new, which cannot be renamed", failure, where
        )


@lru_cache(maxsize=64)
def _can_swap(directory: str) -> bool:
    """True if the file system swaps two names in one step."""
    with tempfile.TemporaryDirectory(prefix=".stepwell-", dir=directory) as tried:
        return dict(_core.supported_calls(tried))["rename_exchange"] is None


def remove_after(is_committed: Callable[[], bool], paths: Sequence[str]) -> None:
    """Deletes checkpoints in the background, once ``is_committed`` has waited for the saves before.
    If it returns false they stay."""

    def work() -> None:
        try:
            if not is_committed():
                return
        except OSError as error:
            log(WARNING, f"{', '.join(paths)}: not deleted, because of {error}")
            return
        for path in paths:
            _remove(path)

    _removals[:] = [one for one in _removals if one[0].is_alive()]
    if paths:
        thread = threading.Thread(target=work, name="stepwell-remover")
        _removals.append((thread, paths))
        thread.start()


def wait_removed(path: str | None = None) -> None:
    """Waits for the deletions that have begun, or for those of one path. A file system may hang,
    so the wait has a limit.

    Raises:
        StalledError: that path is still to be deleted, and so would be what is saved there now.
    """
    for thread, paths in list(_removals):
        if path is None or path in paths:
            thread.join(_REMOVE_SECONDS)
            if not thread.is_alive():
                continue
            what = f"deleting {path or ', '.join(paths)} has not ended in {_REMOVE_SECONDS:.0f} s"
            if path is not None:
                raise StalledError(f"{what}. Save to another path, or look at its file system")
            log(WARNING, f"{what}, and goes on")
    for where in list(_unplaced) if path is None else ():
        _raise_unplaced(where)


def _remove(path: str) -> None:
    """Deletes a checkpoint, which may be a file or a link to one. Its name is free at once."""
    try:
        with _removing:
            if os.path.islink(path) or os.path.isfile(path):
                os.unlink(path)
            elif os.path.isdir(path) and not _core.remove_guest(path):
                log(INFO, f"{path} is read: its files are deleted with the next checkpoint beside it")
    except (StepwellError, OSError) as error:
        log(WARNING, f"deleting {path} failed: {error}. Delete it by hand")
