"""Hugging Face ``accelerate`` with checkpoints of stepwell.

    import stepwell.integrations.accelerate

    accelerator = stepwell.integrations.accelerate.use(Accelerator())
    ...
    accelerator.save_state("runs/step_100")
    accelerator.load_state("runs/step_100")

Each directory of ``save_state`` gets a directory ``stepwell`` with the models, the optimizers, the
schedulers, the scaler, the loaders, the registered objects and the states of random numbers,
committed as one. It takes the place of all files of accelerate. Training goes on while it is
written.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TypeVar

import accelerate
import torch
from accelerate.utils import DistributedType, broadcast

from .. import coordinators
from .._adapters.torch_model import plain_names
from .._locations import GUEST
from .._manager import CheckpointManager
from .._opening import metadata
from .._state.specs import PerRank, Replicated
from ..errors import MisuseError, StepwellError
from ..torch import TrainState
from . import _guest, _placing
from ._log import INFO, log
from ._random_numbers import on_other_devices, random_numbers
from ._terms import Terms, in_terms

_Accelerator = TypeVar("_Accelerator", bound=accelerate.Accelerator)
_Value = TypeVar("_Value")

_TESTED = "accelerate 1.15"
_TERMS = Terms(per_rank="Resume with as many processes as have saved, or without use_stateful_dataloader")
#: The names of a step in its folder: those that accelerate gives, and others with a number.
_STEP = re.compile(r".*?(\d{1,18})")
_AUTOMATIC = re.compile(r"checkpoint_(\d{1,18})")
_AUTOMATIC_FOLDER = "checkpoints"
#: Saves of other kinds do not go through state dicts of whole tensors.
_REFUSED = (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM, DistributedType.XLA)


def use(accelerator: _Accelerator) -> _Accelerator:
    """Has an ``Accelerator`` save and load with stepwell. Call it on all ranks, before or after
    ``prepare``. Returns the accelerator.

    * ``save_state`` returns when the state may change. The next save, ``load_state``,
      ``end_training`` or the end of the process raises the failure of a save.
    * ``load_state()`` with automatic names takes the newest checkpoint that is complete, and logs
      what it passes over. Checkpoints that accelerate has written still load.
    * ``total_limit`` deletes older checkpoints in the background, once the new one is committed.

    Raises:
        MisuseError: the accelerator uses DeepSpeed, Megatron-LM, XLA or FSDP1, which save in ways
            of their own. Or its version of accelerate lacks a method.
    """
    if not isinstance(accelerator, accelerate.Accelerator):
        raise MisuseError(f"use() takes an accelerate.Accelerator, not {type(accelerator).__name__}")
    kind = accelerator.distributed_type
    if kind in _REFUSED or (kind == DistributedType.FSDP and not accelerator.is_fsdp2):
        what = "FSDP1. Use FullyShardedDataParallelPlugin(fsdp_version=2)"
        raise MisuseError(
            f"this accelerator saves with {what if kind == DistributedType.FSDP else kind.value}"
        )
    if accelerator.project_configuration.save_on_each_node:
        raise MisuseError("save_on_each_node=True: stepwell saves into one directory that all nodes share")
    used = ("_models", "_optimizers", "_schedulers", "_custom_objects")
    _guest.take_over(accelerator, StepwellAccelerator, accelerate.__version__, _TESTED, used)
    return accelerator


class StepwellAccelerator(accelerate.Accelerator):  # type: ignore[misc]  # accelerate declares no types
    """An accelerator that saves and loads with stepwell, as :func:`use` makes one."""

    #: The save that has begun last, until somebody has waited for it.
    _stepwell_pending: _guest.GuestSave[None] | None = None
    _stepwell_is_checked = False

    # ---- saves

    def save_state(
        self, output_dir: str | None = None, safe_serialization: bool = True, **others: object
    ) -> Path:
        """See ``Accelerator.save_state``. ``safe_serialization`` has no meaning: nothing is
        pickled."""
        _refuse(others)
        _guest.settle_pending(self)
        configuration = self.project_configuration
        is_automatic = configuration.automatic_checkpoint_naming
        if is_automatic:
            output_dir = os.path.join(
                self.project_dir, _AUTOMATIC_FOLDER, f"checkpoint_{self.save_iteration}"
            )
            there = _steps(os.path.dirname(output_dir), _AUTOMATIC)
            later = [
                path for number, path in there if number >= self.save_iteration and _why_not(path) is None
            ]
            if later:
                raise ValueError(
                    f"{later[0]} exists, of an earlier run. Load it first, or set project_configuration.iteration to a higher number"
                )
        elif output_dir is None:
            raise MisuseError("pass output_dir=, or use automatic_checkpoint_naming")
        path = os.path.abspath(os.path.expanduser(output_dir))
        os.makedirs(path, exist_ok=True)
        kept = self._stepwell_call_hooks(output_dir)
        self._stepwell_pending = save = _guest.save(
            os.path.join(path, GUEST),
            self._stepwell_state,
            self._stepwell_board(),
            {"world_size": self.num_processes, "step": self.step, "models": kept},
            lambda: None,
            exclude=self._stepwell_globs(set(range(len(self._models))) - set(kept)),
        )
        if is_automatic and self.is_main_process:
            # Hooks may have written files beside ours.
            _placing.remove_after(
                partial(_placing.durable, save, path), _surplus(path, configuration.total_limit)
            )
        configuration.iteration += 1
        return Path(output_dir)

    def backward(self, loss: torch.Tensor, **others: object) -> None:
        """See ``Accelerator.backward``. The first call refuses what cannot be stored."""
        if not self._stepwell_is_checked:
            _guest.check(self._stepwell_state(), self.process_index, self.num_processes)
            self._stepwell_is_checked = True
        super().backward(loss, **others)

    def end_training(self) -> None:
        """See ``Accelerator.end_training``."""
        _guest.settle_pending(self)
        _placing.wait_removed()
        super().end_training()

    # ---- loads

    def load_state(self, input_dir: str | None = None, load_kwargs: object = None, **others: object) -> None:
        """See ``Accelerator.load_state``. ``load_kwargs`` and ``map_location`` serve checkpoints
        that accelerate has written."""
        _guest.settle_pending(self)
        is_automatic = self.project_configuration.automatic_checkpoint_naming
        folder = os.path.join(self.project_dir, _AUTOMATIC_FOLDER) if is_automatic else None
        if input_dir is None and folder is not None:
            input_dir = newest_checkpoint(folder) if os.path.isdir(folder) else None
            if input_dir is None:
                raise ValueError(f"no complete checkpoint in {folder}")
        if input_dir is None or not _is_ours(path := os.path.abspath(os.path.expanduser(input_dir))):
            super().load_state(input_dir, load_kwargs, **others)
        else:
            _refuse({name: value for name, value in others.items() if name != "map_location"})
            self._stepwell_load(input_dir, os.path.join(path, GUEST))
        if folder is not None:
            numbers = [number for number, path in _steps(folder, _AUTOMATIC) if _why_not(path) is None]
            self.project_configuration.iteration = max(numbers, default=-1) + 1

    def _stepwell_load(self, input_dir: str, root: str) -> None:
        stored = metadata(root).custom_metadata
        models = list(self._models) if self._stepwell_has_weights() else []
        for hook in self._load_model_state_pre_hook.values():
            hook(models, input_dir)
        taken = {
            number
            for number, one in enumerate(self._models)
            if self._stepwell_has_weights() and not any(one is left for left in models)
        }
        exclude = self._stepwell_globs(taken & set(stored["models"]))
        state = self._stepwell_state()
        state["random"] = numbers = random_numbers()
        missing, unexpected = on_other_devices(numbers, root)
        if stored["world_size"] != self.num_processes:
            log(
                INFO,
                f"{input_dir} was saved by another number of ranks: random numbers begin with the seed",
            )
            exclude.append("random/**")
            del state["random"]
            missing, unexpected = {}, {}
        for glob in self._stepwell_globs(taken - set(stored["models"])):
            missing[glob] = "keep"
        with (
            in_terms(_TERMS),
            CheckpointManager(root, read_only=True, coordinator=self._stepwell_board()) as manager,
        ):
            manager.restore(into=state, exclude=exclude, missing=missing, unexpected=unexpected)
        self.step = stored["step"]

    # ---- the state

    def _stepwell_state(self) -> dict[str, object]:
        models = [
            one.module if isinstance(one, torch.nn.parallel.DistributedDataParallel) else one
            for one in self._models
        ]
        model = models[0] if len(models) == 1 else torch.nn.ModuleList(models)
        plain = plain_names(model)
        buffers = {plain(name) for name, _ in model.named_buffers()}
        return {
            "train": TrainState(
                model,
                _one_or_all([one.optimizer for one in self._optimizers]),
                _one_or_all([one.scheduler for one in self._schedulers]),
                # Statistics of BatchNorm differ between ranks. As accelerate does it: rank 0's.
                replicated=sorted(buffers & {plain(name) for name in model.state_dict()}),
            ),
            "scaler": self.scaler,
            "loaders": {
                str(number): PerRank(one)
                for number, one in enumerate(self._dataloaders)
                if getattr(one, "use_stateful_dataloader", False)
            },
            "objects": [Replicated(one) for one in self._custom_objects],
            "random": random_numbers(),
        }

    def _stepwell_has_weights(self) -> bool:
        """True if hooks get the models and their weights, which they may take away."""
        return not self.is_fsdp2

    def _stepwell_call_hooks(self, output_dir: str) -> list[int]:
        """Calls the hooks of a save. Returns the numbers of the models that they leave to us. Rank
        0's hooks decide, because many take weights away on that rank only."""
        weights = (
            [self.get_state_dict(one, unwrap=False) for one in self._models]
            if self._save_model_state_pre_hook and self._stepwell_has_weights()
            else []
        )
        given = list(weights)
        for hook in self._save_model_state_pre_hook.values():
            hook(self._models, weights, output_dir)
        is_kept = [any(one is left for left in weights) for one in given] or [True] * len(self._models)
        if given and self.num_processes > 1:
            is_kept = broadcast(torch.tensor(is_kept, device=self.device)).tolist()
        return [number for number, kept in enumerate(is_kept) if kept]

    def _stepwell_globs(self, models: Iterable[int]) -> list[str]:
        """Globs over the stored weights of some models."""
        if len(self._models) == 1:
            return ["train/model/**" for _ in models]
        return [f"train/model/{number}.*" for number in models]

    def _stepwell_board(self) -> coordinators.TorchStore | None:
        return coordinators.TorchStore() if self.num_processes > 1 else None


def newest_checkpoint(folder: str | os.PathLike[str]) -> str | None:
    """Returns the newest complete checkpoint of a folder, by the number at the end of its name;
    ``None`` without one. Logs why it passes over newer ones."""
    return _guest.newest(_steps(os.fspath(folder), _STEP), _why_not)


def _steps(folder: str, pattern: re.Pattern[str]) -> list[tuple[int, str]]:
    """The numbers and paths of the checkpoints of a folder, complete or not."""
    names = os.listdir(folder) if os.path.isdir(folder) else []
    return [
        (int(match[1]), os.path.join(folder, name))
        for name in names
        if (match := pattern.fullmatch(name)) and not name.startswith(".")
    ]


def _why_not(path: str) -> str | None:
    """Why a checkpoint cannot be loaded; ``None`` if it can."""
    if not _is_ours(path):
        written_last = os.path.join(path, "random_states_0.pkl")
        return None if os.path.exists(written_last) else f"it has no {os.path.basename(written_last)}"
    try:
        metadata(os.path.join(path, GUEST))
    except (StepwellError, OSError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _surplus(newest: str, limit: int | None) -> list[str]:
    """The checkpoints to delete once ``newest`` has committed. Torn ones do not count."""
    if limit is None:
        return []
    others = sorted(
        (one for one in _steps(os.path.dirname(newest), _AUTOMATIC) if one[1] != newest), reverse=True
    )
    whole = [number for number, path in others if _why_not(path) is None]
    kept = whole[: max(limit, 1) - 1]
    return [path for number, path in others if number not in kept and (not kept or number < kept[-1])]


def _is_ours(path: str) -> bool:
    return os.path.lexists(os.path.join(path, GUEST))


def _one_or_all(values: list[_Value]) -> _Value | list[_Value] | None:
    """One optimizer or scheduler has no number in its path."""
    return values[0] if len(values) == 1 else values or None


def _refuse(others: Mapping[str, object]) -> None:
    if others:
        raise MisuseError(f"{next(iter(others))}= is not used by stepwell: leave it out")
