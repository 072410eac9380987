"""Ignite with checkpoints of stepwell.

    from stepwell.integrations.ignite import StepwellSaver

    saver = StepwellSaver("runs/first")
    trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint(to_save, saver, n_saved=3))
    trainer.add_event_handler(Events.COMPLETED, saver.wait_until_finished)

Each file of Ignite (``….pt``) is a directory that exists whole or not at all, and training goes on
while it is written.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from functools import partial

import ignite.distributed as idist
import torch
from ignite.handlers.checkpoint import BaseSaveHandler

from .._checks import text
from .._locations import absolute
from .._opening import metadata as metadata_of
from .._opening import restore
from .._options import Options
from .._save_result import Save
from .._singular import save_async
from ..errors import StepwellError
from . import _placing
from ._log import WARNING, log
from ._terms import Terms, in_terms

#: The caller passes ``options=``.
_TERMS = Terms(memory=None)


class StepwellSaver(BaseSaveHandler):
    """A save handler for ``ignite.handlers.Checkpoint``. One rank saves, as with Ignite's own.

    Ignite asks to delete a checkpoint before it saves the next one. The deletion waits until that
    save has committed; if it fails, the checkpoint stays. The next save, ``wait_until_finished``
    and the end of the process raise the failure of a save.

    Args:
        dirname: the directory of the checkpoints. Created if it is missing.
        save_on_rank: the rank that saves. Pass the same to ``Checkpoint``.
        options: rarely needed options.
    """

    def __init__(
        self, dirname: str | os.PathLike[str], *, save_on_rank: int = 0, options: Options | None = None
    ) -> None:
        self._directory = absolute(dirname)
        self._saves_here = idist.get_rank() == save_on_rank
        self._options = options
        self._pending: Save | None = None
        #: Names that Ignite no longer wants, until the next save has begun.
        self._unwanted: set[str] = set()

    def __call__(
        self, checkpoint: Mapping[str, object], filename: str, metadata: Mapping[str, object] | None = None
    ) -> None:
        """Begins a save. Called by Ignite."""
        if not self._saves_here:
            return
        self.wait_until_finished()
        os.makedirs(self._directory, exist_ok=True)
        begin = partial(
            save_async, state=checkpoint, exists="replace", coordinator=None, options=self._options
        )
        with in_terms(_TERMS):
            save = _placing.save_at(self._path(filename), begin, self._options)
        unwanted, self._unwanted, self._pending = self._unwanted - {filename}, set(), save
        _placing.remove_after(
            partial(_placing.all_committed, [save], self._options), [self._path(name) for name in unwanted]
        )

    def remove(self, filename: str) -> None:
        """Deletes a checkpoint after the next save. Called by Ignite."""
        self._unwanted.add(filename)

    def wait_until_finished(self) -> None:
        """Waits for the last save and the deletions after it, and raises a failure."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
        _placing.wait_removed()

    def load(self, filename: str) -> dict[str, object]:
        """Returns what ``Checkpoint.load_objects`` takes, in host memory. Files of Ignite load
        too."""
        path = self._path(filename)
        if os.path.isfile(path):
            loaded: dict[str, object] = torch.load(path, map_location="cpu", weights_only=True)
            return loaded
        return dict(restore(path, to="torch"))

    def newest(self) -> str | None:
        """Returns the name of the checkpoint that was committed last; ``None`` without one. Logs
        why it passes over damaged ones. Files of Ignite do not take part."""
        found = []
        for name in os.listdir(self._directory) if os.path.isdir(self._directory) else ():
            path = self._path(name)
            if not os.path.isdir(path) or name.startswith("."):
                continue
            try:
                found.append((metadata_of(path).committed, name))
            except (StepwellError, OSError) as error:
                log(WARNING, f"{path} is passed over: {error}")
        return max(found)[1] if found else None

    def _path(self, filename: str) -> str:
        return os.path.join(self._directory, text(filename, "the name of a checkpoint"))
