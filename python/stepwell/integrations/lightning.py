"""Lightning and Fabric with checkpoints of stepwell.

    from stepwell.integrations.lightning import StepwellIO

    trainer = Trainer(plugins=[StepwellIO()], ...)

Each checkpoint of Lightning (``….ckpt``) is a directory that exists whole or not at all, and
training goes on while it is written. Files that Lightning has written are still loaded.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable
from functools import partial
from typing import TypeVar

import torch

from .._locations import absolute
from .._opening import restore
from .._options import Options
from .._restore.options import Globs
from .._save_result import Save
from .._singular import save_async
from ..errors import MisuseError
from . import _guest, _placing
from ._terms import Terms, in_terms

_Module = TypeVar("_Module")
_Path = str | os.PathLike[str]

#: The caller passes ``options=``.
_TERMS = Terms(memory=None)
#: How to load another checkpoint of a run; see ``naming_another``.
ANOTHER = "ckpt_path={!r}"
#: Lightning has two packages with classes of their own. Each checks its own base. By the Fabric of
#: each, the package with the ``Trainer``.
TRAINERS = {"lightning.fabric": "lightning.pytorch", "lightning_fabric": "pytorch_lightning"}


def fabrics() -> list[str]:
    """Returns the Fabric of each Lightning that is imported; if none is, of one that is
    installed."""
    found = [fabric for fabric in TRAINERS if fabric in sys.modules]
    for fabric in () if found else TRAINERS:
        try:
            importlib.import_module(fabric)
        except ImportError:
            continue
        return [fabric]
    return found


def _bases(name: str) -> list[type]:
    found = [getattr(importlib.import_module(f"{fabric}.plugins.io"), name) for fabric in fabrics()]
    if not found:
        raise ImportError("neither lightning nor pytorch-lightning is installed")
    return found


class StepwellIO(*_bases("TorchCheckpointIO")):  # type: ignore[misc]  # known when it is imported
    """Saves and loads checkpoints of a ``Trainer`` or of Fabric. Rank 0 saves, as Lightning asks
    it to, so it serves one device, DDP and other strategies that replicate the model.

    A checkpoint that Lightning deletes is deleted when the saves before have committed; if one of
    them failed, it stays. The next save, and the end of the training, raise the failure of a save.

    Args:
        exclude: what to leave out, by glob over paths. Hyperparameters of types that cannot be
            stored are refused otherwise: ``exclude="hyper_parameters/model"``.
        options: rarely needed options.
    """

    def __init__(self, *, exclude: Globs = None, options: Options | None = None) -> None:
        super().__init__()
        self._exclude, self._options = exclude, options
        #: By path, until somebody has looked at their outcome.
        self._saves: dict[str, Save] = {}

    def save_checkpoint(
        self, checkpoint: dict[str, object], path: _Path, storage_options: object = None
    ) -> None:
        """Saves a checkpoint in the background. Called by Lightning."""
        if storage_options is not None:
            raise MisuseError("storage_options= is not used by StepwellIO: leave it out")
        where = absolute(path)
        link_after_commit()
        self._look(where)
        os.makedirs(os.path.dirname(where), exist_ok=True)
        begin = partial(
            save_async,
            state=checkpoint,
            exclude=self._exclude,
            exists="replace",
            coordinator=None,
            options=self._options,
        )
        with in_terms(_TERMS):
            self._saves[where] = _placing.save_at(where, begin, self._options)

    def load_checkpoint(
        self, path: _Path, map_location: object = None, weights_only: bool | None = None
    ) -> dict[str, object]:
        """Loads a checkpoint. Called by Lightning on all ranks."""
        where = absolute(path)
        try:
            self.wait_committed(where)
        finally:
            if torch.distributed.is_available() and torch.distributed.is_initialized():
                torch.distributed.barrier()  # rank 0 has waited for its save
        if os.path.isfile(where):
            # Without a place, Lightning's own default: host memory.
            given = {} if map_location is None else {"map_location": map_location}
            found: dict[str, object] = super().load_checkpoint(path, weights_only=weights_only, **given)
            return found
        device = map_location if isinstance(map_location, (str, torch.device)) else None
        with _guest.naming_another(where, ANOTHER):
            return dict(restore(where, to="torch", device=device))

    def wait_committed(self, path: _Path) -> None:
        """Waits until a checkpoint that is being saved has its name."""
        where = absolute(path)
        if (pending := self._saves.get(where)) is not None:
            pending.result()
            _placing.wait_placed(where)

    def remove_checkpoint(self, path: _Path) -> None:
        """Deletes a checkpoint once the pending saves have committed. Called by Lightning."""
        saves = list(self._saves.values())
        _placing.remove_after(partial(_placing.all_committed, saves, self._options), [absolute(path)])

    def teardown(self) -> None:
        """Waits for all saves and deletions, and raises a failure. Called by Lightning."""
        saves, self._saves = list(self._saves.values()), {}
        try:
            _guest.settle(saves)
        finally:
            _placing.wait_removed()

    def _look(self, path: str) -> None:
        """Waits for a save to this path, and raises failures of saves that have ended."""
        for place, save in list(self._saves.items()):
            if place == path or save.done():
                del self._saves[place]
                save.result()


def link_after_commit() -> None:
    """Has ``ModelCheckpoint(save_last="link")`` wait for the commit. The link replaces the one to
    the checkpoint before, and after a kill it would lead nowhere."""
    for name in TRAINERS.values():
        kind = getattr(sys.modules.get(f"{name}.callbacks"), "ModelCheckpoint", None)
        link = getattr(kind, "_link_checkpoint", None)
        if kind is not None and link is not None and not isinstance(link, _LinkAfterCommit):
            kind._link_checkpoint = staticmethod(_LinkAfterCommit(link))


class _LinkAfterCommit:
    """``ModelCheckpoint._link_checkpoint`` for checkpoints that are saved in the background."""

    def __init__(self, link: Callable[..., None]) -> None:
        self._link = link

    def __call__(self, trainer: object, path: _Path, *others: object) -> None:
        strategy = getattr(trainer, "strategy", None)
        saver = strategy
        while saver is not None:
            if (wait := getattr(saver, "wait_committed", None)) is not None:
                try:
                    wait(path)
                except BaseException:
                    strategy.barrier()  # type: ignore[union-attr]  # the other ranks wait in it
                    raise
            saver = getattr(saver, "checkpoint_io", None)
        self._link(trainer, path, *others)


def load_from_checkpoint(
    kind: type[_Module], path: _Path, *, strict: bool | None = None, **keywords: object
) -> _Module:
    """Makes a ``LightningModule`` from a checkpoint, as ``kind.load_from_checkpoint(path)`` does
    with files that Lightning has written.

    Args:
        kind: the class of the module.
        path: the checkpoint.
        strict: whether the names of parameters must be equal.
        keywords: arguments of the class, which go before the stored hyperparameters.
    """
    package = next(
        module.__module__.split(".")[0] for module in kind.__mro__ if module.__name__ == "LightningModule"
    )
    name = "lightning.pytorch" if package == "lightning" else package
    saving = importlib.import_module(f"{name}.core.saving")
    module: _Module = saving._load_state(kind, restore(absolute(path), to="torch"), strict=strict, **keywords)
    return module
