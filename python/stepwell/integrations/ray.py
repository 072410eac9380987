"""Ray Train with checkpoints of stepwell.

    from stepwell.integrations.ray import report, resume

    state, first = resume(state)                    # in the training function, on all workers
    for step in range(first, steps):
        ...
        report(step, {"loss": loss}, state)

The workers save one checkpoint together, in the directory of the run. Nothing is copied to it
afterwards, and training goes on while it is written.
"""

from __future__ import annotations

import os
from typing import TypeVar

import ray.train
from ray.train import Checkpoint, CheckpointUploadMode

from .. import coordinators
from .._checks import step_number
from .._opening import metadata, restore
from ..errors import MisuseError
from . import _guest
from ._terms import Terms, in_terms

_State = TypeVar("_State")

_REMEDY = "restore it with sw.restore(ray.train.get_checkpoint().path, into=state, …), which takes missing=, cast= and map="
#: The caller makes the state, and may wrap its values.
_TERMS = Terms(missing=_REMEDY, mismatch=_REMEDY, differs=None, per_rank=None)

#: How to load another checkpoint. Ray deletes directories by their names, so this run cannot go on
#: from it.
_ANOTHER = "{}. In a run with another name, restore it with sw.restore(path, into=state)"


def report(step: int, metrics: dict[str, object], state: object) -> None:
    """Begins a save, and reports it to Ray once it is committed. Returns when the state may change.
    All workers make this call, instead of ``ray.train.report``.

    Ray deletes older checkpoints by ``num_to_keep``, after the commit. A failed save fails the
    worker.

    Args:
        step: its number. It names the directory.
        metrics: what ``ray.train.report`` takes.
        state: the state of this worker.

    Raises:
        MisuseError: the storage of the run is not a file system of this machine. Or there are
            several workers, and ``torch.distributed`` is not initialised.
    """
    context = ray.train.get_context()
    storage = context.get_storage()
    if storage.storage_filesystem.type_name != "local":
        raise MisuseError(
            f"{storage.experiment_fs_path} is not on a file system of this machine. Pass a storage_path= that all workers mount"
        )
    name = f"checkpoint_{step_number(step):08}"
    path = os.path.join(storage.experiment_fs_path, name)
    with in_terms(_TERMS):
        board = coordinators.find("auto")
    if board is None and context.get_world_size() > 1:
        raise MisuseError(
            "several workers save together through torch.distributed: use ray.train.torch.TorchTrainer"
        )
    os.makedirs(path, exist_ok=True)
    save = _guest.save(path, state, board, {"step": step}, lambda: Checkpoint(path), terms=_TERMS)
    ray.train.report(
        metrics,
        checkpoint=Checkpoint(path),
        checkpoint_dir_name=name,
        checkpoint_upload_mode=CheckpointUploadMode.ASYNC,
        checkpoint_upload_fn=lambda *_: save.result(),
        delete_local_checkpoint_after_upload=False,
    )


def resume(state: _State) -> tuple[_State, int]:
    """Restores the checkpoint that Ray gives this worker, and returns the state and the number of
    the next step. Without a checkpoint it returns ``state`` as it is, and 0."""
    found = ray.train.get_checkpoint()
    if found is None:
        return state, 0
    with found.as_directory() as path, _guest.naming_another(path, _ANOTHER):
        step: int = metadata(path).custom_metadata["step"]
        with in_terms(_TERMS):
            return restore(path, into=state), step + 1
