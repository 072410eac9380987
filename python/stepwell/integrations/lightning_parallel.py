"""Lightning's ``ModelParallelStrategy`` (FSDP2, tensor parallelism) with checkpoints of stepwell.

    from stepwell.integrations.lightning_parallel import StepwellModelParallelStrategy

    trainer = Trainer(strategy=StepwellModelParallelStrategy(data_parallel_size=8), ...)

The directory ``stepwell`` in each checkpoint has one committed step. Training goes on while it is
written. Checkpoints that Lightning has written are still loaded.
"""

from __future__ import annotations

import importlib
import os
from typing import TYPE_CHECKING, cast

from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor

from .. import coordinators
from .._locations import GUEST, absolute
from .._opening import is_own, restore
from .._restore.options import Globs
from .._state.specs import Replicated
from ..errors import MisuseError
from . import _guest, _placing
from ._terms import Terms
from .lightning import ANOTHER, TRAINERS, fabrics, link_after_commit

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import OptimizerStateType
    from torch.optim import Optimizer

_Path = str | os.PathLike[str]
_TERMS = Terms(
    missing="set strict_loading to False, or build the model and the optimizers as they were at the save"
)
_MODEL, _OPTIMIZERS = "state_dict", "optimizer_states"
_base = importlib.import_module(f"{TRAINERS[fabrics()[0]]}.strategies").ModelParallelStrategy


class StepwellModelParallelStrategy(_base):  # type: ignore[misc,valid-type]  # known when it is imported
    """A ``ModelParallelStrategy`` that saves and loads with stepwell. All ranks write their shards.
    Another number of ranks loads them.

    A checkpoint that Lightning deletes is deleted when the saves before have committed; if one of
    them failed, it stays. The next save at a later training step waits for those before, and raises
    their failure. So does the end of the training.

    Args:
        exclude: what to leave out, by glob over paths. Hyperparameters of types that cannot be
            stored are refused otherwise: ``exclude="hyper_parameters/model"``.
        options: arguments of ``ModelParallelStrategy``.

    Raises:
        MisuseError: ``save_distributed_checkpoint=False``, which asks for a single file.
    """

    def __init__(self, *, exclude: Globs = None, **options: object) -> None:
        if options.get("save_distributed_checkpoint", True) is not True:
            raise MisuseError("save_distributed_checkpoint=False: stepwell writes no single files")
        super().__init__(**options)
        self._exclude = exclude
        #: The saves that began last, and their training step.
        self._saves: list[_guest.GuestSave[None]] = []
        self._saved_at = -1

    # ---- saves

    def lightning_module_state_dict(self) -> dict[str, object]:
        """Returns the live weights, which Lightning would copy. Called by Lightning."""
        return dict(get_model_state_dict(self.model))

    def optimizer_state(self, optimizer: Optimizer) -> dict[str, object]:
        """Returns the live state of an optimizer. Called by Lightning."""
        return dict(get_optimizer_state_dict(self.model, getattr(optimizer, "_optimizer", optimizer)))

    def save_checkpoint(
        self, checkpoint: dict[str, object], filepath: _Path, storage_options: object = None
    ) -> None:
        """Saves a checkpoint in the background. Called by Lightning on all ranks."""
        if storage_options is not None:
            raise MisuseError("storage_options= is not used by this strategy: leave it out")
        link_after_commit()
        path = self._root(filepath)
        step = self.lightning_module.trainer.global_step
        if step != self._saved_at or any(save.path == path for save in self._saves):
            self._settle()
        self._saved_at = step
        _placing.wait_removed(os.path.dirname(path))
        # Rank 0's values count, as with Lightning. Statistics of BatchNorm differ between ranks.
        state: dict[str, object] = {
            key: one if key in (_MODEL, _OPTIMIZERS) else Replicated(one) for key, one in checkpoint.items()
        }
        state[_MODEL] = {
            name: one if isinstance(one, DTensor) else Replicated(one)
            for name, one in cast("dict[str, object]", checkpoint[_MODEL]).items()
        }
        save = _guest.save(path, state, self._board(), None, lambda: None, exclude=self._exclude)
        self._saves.append(save)

    def remove_checkpoint(self, filepath: _Path) -> None:
        """Deletes a checkpoint once the pending saves have committed. Called by Lightning."""
        if self.is_global_zero:
            saves = list(self._saves)
            _placing.remove_after(lambda: all([save.is_committed() for save in saves]), [absolute(filepath)])

    def teardown(self) -> None:
        """Waits for all saves and deletions, and raises a failure. Called by Lightning."""
        try:
            self._settle()
            _placing.wait_removed()
        finally:
            super().teardown()

    def wait_committed(self, filepath: _Path) -> None:
        """Waits for the saves that are being written."""
        self._settle()

    def _settle(self) -> None:
        saves, self._saves = self._saves, []
        _guest.settle(saves)

    def _root(self, path: _Path) -> str:
        """The root of a checkpoint: the ranks take rank 0's path, as with Lightning."""
        return os.path.join(absolute(self.broadcast(path)), GUEST)

    def _board(self) -> coordinators.TorchStore | None:
        return coordinators.TorchStore() if self.world_size > 1 else None

    # ---- loads

    def load_checkpoint(self, checkpoint_path: _Path, weights_only: bool | None = None) -> dict[str, object]:
        """Loads the model and the optimizers, and returns the rest. Called by Lightning on all
        ranks."""
        self._settle()
        path = self._root(checkpoint_path)
        if not is_own(path):
            found: dict[str, object] = super().load_checkpoint(checkpoint_path, weights_only=weights_only)
            return found
        strict = self.lightning_module.strict_loading
        into: dict[str, object] = {
            _MODEL: get_model_state_dict(self.model),
            _OPTIMIZERS: [get_optimizer_state_dict(self.model, one) for one in self.optimizers],
        }
        with _guest.naming_another(os.path.dirname(path), ANOTHER, GUEST):
            values = _guest.restored(path, into, self._board(), not strict, _TERMS)
        self.model.load_state_dict(values[_MODEL], strict=strict)
        states = cast("list[OptimizerStateType]", values[_OPTIMIZERS])
        for optimizer, state in zip(self.optimizers, states, strict=True):
            set_optimizer_state_dict(self.model, optimizer, optim_state_dict=state)
        return dict(restore(path, exclude=[f"{_MODEL}/**", f"{_OPTIMIZERS}/**"], to="torch"))
