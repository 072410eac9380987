"""torchtitan with checkpoints of stepwell, by one word of its command line:

    torchrun ... -m torchtitan.train ... --override.imports stepwell.integrations.torchtitan.use

The directory ``stepwell`` in the checkpoint folder of the run is the root of our steps. Training
goes on while a step is written. Steps that torchtitan has written to the folder still load.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.stateful import Stateful
from torchtitan.components.checkpointer import DATALOADER, MODEL, OPTIMIZER, BaseCheckpointManager
from torchtitan.components.checkpointer import CheckpointManager as TitanManager
from torchtitan.config.override import derive, override
from torchtitan.tools import filesystem

from .. import coordinators
from .._locations import GUEST
from .._manager import CheckpointManager
from .._opening import is_own
from .._restore.options import ResumeKeywords
from .._save_result import Save
from .._state.specs import Replicated
from ..errors import MismatchError, MisuseError
from ..formats.roots.plain import resumable
from . import _guest
from ._log import WARNING, log
from ._terms import Terms, in_terms

#: The metadata of a step that ``last_save_model_only`` has made.
_MODEL_ONLY = "model only"
#: Each rank wants its own state of the loader.
_OPTIONS: ResumeKeywords = {"unexpected": {f"{DATALOADER}/**": "ignore"}}
_State = dict[str, object]
_REMEDY = "build the model and the optimizers as they were at the save, or leave a state out with checkpoint.exclude_from_loading"
_TERMS = Terms(
    missing=_REMEDY,
    mismatch=_REMEDY,
    damaged="Choose an earlier step by checkpoint.load_step",
    exists="Load it first, or choose another checkpoint.folder",
    locked="End that process, or choose another checkpoint.folder",
    lockless="Choose a checkpoint.folder on another file system",
)


class StepwellManager(TitanManager):  # type: ignore[misc]  # torchtitan declares no types
    """A checkpoint manager of torchtitan. ``StepwellManager.Config`` has the fields of
    torchtitan's own, with these differences:

    * ``async_mode="disabled"``: a save returns when the step is committed. ``"async"`` and
      ``"async_with_pinned_mem"`` mean the same here: a save returns when the state may change, or
      when the attached optimizers wait for the copy. The next save, or the end of the run, raises
      the failure of a save.
    * ``keep_latest_k`` counts steps of stepwell. A newer step is committed before one is deleted.
    * ``load_step`` moves newer steps into a branch.
    * ``initial_load_path`` may be a root or a step of stepwell too.

    Exports to Hugging Face files, and loads of them, are torchtitan's own.

    Raises:
        MisuseError: ``exclude_from_loading`` has a name that is none of the states.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(TitanManager.Config):  # type: ignore[misc]  # as above
        """The configuration of a :class:`StepwellManager`."""

        #: How many steps to trace after each save, as of :class:`stepwell.CheckpointManager`.
        prove_resume: int = 0

    #: The save that has begun last, until somebody has waited for it.
    save_future: Save | None

    def __init__(self, config: Config, **parts: object) -> None:
        own = copy.copy(config)
        # torchtitan makes a process group and a thread that deletes otherwise.
        own.async_mode, own.keep_latest_k = "disabled", 0
        super().__init__(own, **parts)
        if not self.enable:
            return
        for name in set(self.exclude_from_loading) - self.states.keys():
            raise MisuseError(f"exclude_from_loading: no state {name!r}. There are {sorted(self.states)}")
        self._waits = config.async_mode == "disabled"
        #: Steps to trace after each save or load, and those that are left.
        self._traced = self._traced_left = config.prove_resume
        self._root = filesystem.join(self.folder, GUEST)
        #: ``None`` if nothing is saved, and no step is there to load.
        self._manager: CheckpointManager | None = None
        if not self.load_only or is_own(self._root):
            with in_terms(_TERMS):
                self._manager = CheckpointManager(
                    self._root,
                    retention=config.keep_latest_k or None,
                    read_only=self.load_only,
                    prove_resume=config.prove_resume,
                )
        if self._manager is not None and not self.load_only:
            for optimizer in self.states[OPTIMIZER]:
                self._manager.attach(optimizer)

    def __del__(self) -> None:
        """The manager of stepwell ends by itself."""

    def _close(self) -> None:
        if self._manager is not None:
            self._manager.close()

    # ---- saves

    @torch.no_grad()
    def _save(self, curr_step: int, last_step: bool = False) -> bool:
        if not self._should_save(curr_step, last_step):
            if self._traced_left and self._manager is not None:
                self._traced_left -= 1
                self._manager.trace(curr_step, self._values())
            return False
        if last_step and self.last_save_in_hf:
            self._save_last_step(curr_step)
            return True
        assert self._manager is not None
        self._traced_left = self._traced
        is_model_only = last_step and self.last_save_model_only
        with in_terms(_TERMS):
            self.save_future = self._manager.save(
                curr_step,
                self._exported if is_model_only else self._values,
                custom_metadata=_MODEL_ONLY if is_model_only else None,
            )
        if last_step or self._waits:
            self._wait_for_saving()
        return True

    def _maybe_wait_for_staging(self) -> None:
        """The attached optimizers wait by themselves."""

    def _wait_for_saving(self) -> None:
        save, self.save_future = self.save_future, None
        assert save is not None
        with in_terms(_TERMS):
            save.result()

    def _exported(self) -> _State:
        weights = self.states[MODEL].state_dict()
        return {
            MODEL: {
                name: one.to(self.export_dtype) if torch.is_tensor(one) and one.is_floating_point() else one
                for name, one in weights.items()
            }
        }

    # ---- loads

    @torch.no_grad()
    def _load(self, step: int = -1) -> bool:
        manager = self._manager
        ours = [] if manager is None else manager.all_steps()
        theirs = resumable(self.folder)
        found = max([*ours, *theirs], default=-1) if step == -1 else step
        is_old = found in theirs and found not in ours
        if is_old and found < max(ours, default=-1) and not self.load_only:
            raise MisuseError(
                f"{self._root} has newer steps than step-{found}. Choose another checkpoint.folder, with step-{found} as initial_load_path"
            )
        if manager is not None and not self.load_only:
            self._check(manager)
        if manager is None or is_old or found == -1:
            return bool(super()._load(found))
        names = self._wanted(is_model_only=found == 0)
        options: ResumeKeywords = _OPTIONS if DATALOADER in names else {}
        try:
            with in_terms(_TERMS):
                if step == -1:
                    self._fill(names, lambda into: manager.resume(into, fallback=True, **options)[0])
                else:
                    self._fill(names, lambda into: manager.restore(found, into=into, **options))
        except MismatchError as error:
            if manager.metadata(error.step).custom_metadata == _MODEL_ONLY:
                raise MisuseError(
                    f"step {error.step} of {self._root} has the model only. Choose an earlier one by checkpoint.load_step, or begin another run with initial_load_path"
                ) from error
            raise
        if not self.load_only and found < max(ours) and step != -1:
            moved = manager.rewind(found)
            log(
                WARNING,
                f"moved the steps after {found} of {self._root} into the branch {moved.branch}",
            )
        return True

    def _check(self, manager: CheckpointManager) -> None:
        """Refuses what cannot be stored. The tensors of optimizers are left out: torchtitan makes
        them by an update, which would count as the first one."""
        state = self._values(name for name in self.states if name != OPTIMIZER)
        state[OPTIMIZER] = [
            {name: value for name, value in group.items() if name != "params"}
            for optimizer in self.states[OPTIMIZER]
            for group in optimizer.param_groups
        ]
        manager.check(state)

    def dcp_load(self, state_dict: _State, checkpoint_id: str, from_hf: bool, from_quantized: bool) -> None:
        """Loads ``initial_load_path``, or a step of torchtitan. Called by torchtitan."""
        if from_hf or not is_own(checkpoint_id):
            super().dcp_load(state_dict, checkpoint_id, from_hf, from_quantized)
            return
        board = coordinators.TorchStore() if torch.distributed.is_initialized() else None
        self._fill(
            self._wanted(self.initial_load_model_only),
            lambda into: _guest.restored(checkpoint_id, into, board, terms=_TERMS),
        )

    def _wanted(self, is_model_only: bool) -> list[str]:
        names = [name for name in self.states if name not in self.exclude_from_loading]
        return [MODEL] if is_model_only else names

    # ---- the state

    def _values(self, names: Iterable[str] | None = None) -> _State:
        """The values of the states of these names; default: all."""
        values = {
            name: _value(self.states[name])
            for name in (self.states if names is None else names)
            if self.states[name] is not None
        }
        # As DCP does it, the first rank's value counts: torchtitan counts tokens on each rank.
        return {name: one if name in (MODEL, OPTIMIZER) else Replicated(one) for name, one in values.items()}

    def _fill(self, names: Iterable[str], restore: Callable[[_State], _State]) -> None:
        """Restores the states of these names."""
        for name, value in restore(self._values(names)).items():
            found = value.value if isinstance(value, Replicated) else value
            if hasattr(self.states[name], "load_state_dict"):
                self.states[name].load_state_dict(found)
            else:
                self.states[name] = found


def _value(state: object) -> object:
    return state.state_dict() if isinstance(state, Stateful) else state


@override(target=BaseCheckpointManager.Config, description="checkpoints of stepwell")  # type: ignore[untyped-decorator]
def use(config: BaseCheckpointManager.Config, **fields: object) -> StepwellManager.Config:
    """Returns the configuration of a :class:`StepwellManager` in place of another one. Named by
    ``--override.imports``; JSON after the name changes fields of the configuration::

        --override.imports 'stepwell.integrations.torchtitan.use={"async_mode": "async"}'
    """
    derived: StepwellManager.Config = derive(config, StepwellManager.Config, **fields)
    return derived
