"""``transformers.Trainer`` with checkpoints of stepwell.

    import stepwell.integrations.transformers

    trainer = Trainer(model, arguments, train_dataset=data)
    stepwell.integrations.transformers.use(trainer)
    trainer.train(resume_from_checkpoint=True)

Each ``checkpoint-N`` of the trainer gets a directory ``stepwell`` with the model, the optimizer,
the scheduler, the scaler and the states of random numbers, committed as one. It takes the place of
``optimizer.pt``, ``scheduler.pt``, ``scaler.pt`` and ``rng_state.pth``. The model's own files stay,
so that ``from_pretrained`` reads the directory. Training goes on while the step is written.
"""

from __future__ import annotations

import json
import os
import re
from functools import partial
from pathlib import Path
from typing import TypeVar

import torch
import transformers
from transformers.trainer_utils import sort_checkpoints

from .. import coordinators
from .._locations import GUEST
from .._opening import metadata, restore
from .._roots import open_root
from .._trace.tracer import OnDifference
from ..errors import CorruptCheckpoint, MisuseError, StepNotFound, StepwellError
from ..events import OnEvent
from ..formats.files import corrupt, read_whole
from ..torch import TrainState
from . import _guest, _placing
from ._log import INFO, log
from ._prover import Prover
from ._random_numbers import on_other_devices, random_numbers
from ._terms import in_terms

_Trainer = TypeVar("_Trainer", bound=transformers.Trainer)

_TESTED = "transformers 5.24"
_STATE_FILE = "trainer_state.json"
_MAX_STATE_BYTES = 256 << 20
_CHECKPOINT = re.compile(r"checkpoint-(\d{1,18})")


def use(
    trainer: _Trainer,
    *,
    prove_resume: int = 0,
    on_resume_difference: OnDifference = "warn",
    on_event: OnEvent | None = None,
) -> _Trainer:
    """Has a ``transformers.Trainer``, or one of a class derived from it, save and resume with
    stepwell. Call it before ``trainer.train()``, on all ranks. Returns the trainer.

    * ``train(resume_from_checkpoint=True)`` takes the newest checkpoint that is complete, and logs
      what it passes over. Checkpoints that the trainer has written by itself still resume.
    * ``save_total_limit`` deletes older checkpoints in the background, once the new one is
      committed.
    * The next save, or the end of the training, raises the failure of a save.
    * A value that cannot be stored is an error before the first step.

    Args:
        trainer: the trainer.
        prove_resume: how many steps to trace after each save, as of
            :class:`stepwell.CheckpointManager`. A resumed training compares its steps with them.
        on_resume_difference: ``"raise"`` ends a training that differs; default: a warning.
        on_event: gets a :class:`stepwell.events.TraceEvent` for each compared step, and the other
            events of each save.

    Raises:
        MisuseError: the trainer uses DeepSpeed or FSDP, which save in ways of their own. Or its
            version of transformers lacks a method.
    """
    if not isinstance(trainer, transformers.Trainer):
        raise MisuseError(f"use() takes a transformers.Trainer, not {type(trainer).__name__}")
    if trainer.args.save_on_each_node:
        raise MisuseError("save_on_each_node=True: a checkpoint of stepwell is one directory of all nodes")
    other = [
        name
        for name, flag in (
            ("DeepSpeed", "is_deepspeed_enabled"),
            ("FSDP", "is_fsdp_enabled"),
            ("FSDP on XLA", "is_fsdp_xla_enabled"),
        )
        if getattr(trainer, flag, False)
    ]
    if other:
        raise MisuseError(
            f"this trainer saves with {other[0]}. Use stepwell.integrations.dcp.use() for FSDP with SHARDED_STATE_DICT"
        )
    _guest.take_over(trainer, StepwellTrainer, transformers.__version__, _TESTED)
    if prove_resume:
        trainer._stepwell_prover = Prover(prove_resume, on_resume_difference, on_event)
    return trainer


class StepwellTrainer(transformers.Trainer):  # type: ignore[misc]  # transformers declares no types
    """A trainer that saves and resumes with stepwell, as :func:`use` makes one. Put it in front of
    the class of another library: ``class Own(StepwellTrainer, SFTTrainer)``."""

    #: The save that has begun last, until somebody has waited for it.
    _stepwell_pending: _guest.GuestSave[None] | None = None
    _stepwell_prover: Prover | None = None
    #: The checkpoint that this training resumes.
    _stepwell_resumed: str | None = None

    # ---- saves

    def _save_checkpoint(self, model: torch.nn.Module, trial: object) -> None:
        _guest.settle_pending(self)
        arguments = self.args
        if arguments.save_only_model:
            super()._save_checkpoint(model, trial)
            return
        limit, arguments.save_total_limit = arguments.save_total_limit, None
        try:
            super()._save_checkpoint(model, trial)
        finally:
            arguments.save_total_limit = limit
        if arguments.should_save and self._stepwell_pending is not None:
            # The weights and the trainer's state are files beside ours.
            path = os.path.dirname(self._stepwell_pending.path)
            surplus = self._stepwell_surplus(trial, str(Path(path)))
            _placing.remove_after(partial(_placing.durable, self._stepwell_pending, path), surplus)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Everything is saved by :meth:`_save_rng_state`, which is the last one."""

    def _save_scaler(self, output_dir: str) -> None:
        """As above."""

    def _save_rng_state(self, output_dir: str) -> None:
        os.makedirs(output_dir, exist_ok=True)
        self._stepwell_pending = _guest.save(
            os.path.join(output_dir, GUEST),
            self._stepwell_state(),
            self._stepwell_board(),
            {"world_size": self.args.world_size},
            lambda: None,
            prover=self._stepwell_prover,
            step=self.state.global_step,
        )

    def _stepwell_board(self) -> coordinators.TorchStore | None:
        return coordinators.TorchStore() if self.args.world_size > 1 else None

    def _stepwell_state(self) -> dict[str, object]:
        return {
            "train": self._stepwell_train_state(),
            "scaler": self.accelerator.scaler,
            "random": random_numbers(),
        }

    def _stepwell_train_state(self) -> TrainState:
        model = self.model_wrapped
        if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
            model = self.model
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)
        scheduler = getattr(self.lr_scheduler, "scheduler", self.lr_scheduler)
        # The base of an adapter is not trained, and comes from elsewhere.
        return TrainState(model, optimizer, scheduler, trainable_only=hasattr(self.model, "peft_config"))

    def _stepwell_surplus(self, trial: object, newest: str) -> list[str]:
        """The checkpoints beyond ``save_total_limit``, as the Trainer chooses them. ``newest`` is
        being saved. Torn ones do not count. Those that are older than every kept one are deleted,
        too."""
        limit, best = self.args.save_total_limit, self.state.best_model_checkpoint
        if limit is None or limit <= 0:
            return []
        found = sort_checkpoints(self._get_output_dir(trial=trial), use_mtime=True)
        kept = {newest, *(() if best is None else (str(Path(best)),))}
        others = [one for one in found if one not in kept and (not _is_ours(one) or _why_not(one) is None)]
        gone = set(others[: max(len(others) + len(kept) - max(limit, len(kept)), 0)])
        kept |= set(others) - gone
        oldest = next((number for number, one in enumerate(found) if one in kept), len(found))
        return [
            one for number, one in enumerate(found) if one in gone or (number < oldest and one not in kept)
        ]

    def _finalize_training(self, trial: object, *args: object, **kwargs: object) -> object:
        if self._stepwell_prover is not None:
            self._stepwell_prover.close()
        _guest.settle_pending(self)
        _placing.wait_removed()
        return super()._finalize_training(trial, *args, **kwargs)

    # ---- loads

    def train(
        self, resume_from_checkpoint: str | bool | None = None, *args: object, **kwargs: object
    ) -> object:
        """See ``Trainer.train``."""
        if resume_from_checkpoint is True:
            resume_from_checkpoint = newest_checkpoint(self.args.output_dir)
            if resume_from_checkpoint is None:
                raise ValueError(f"no complete checkpoint in {self.args.output_dir}")
        if not any(isinstance(one, _Hooks) for one in self.callback_handler.callbacks):
            self.add_callback(_Hooks(self))
        self._stepwell_resumed = resume_from_checkpoint if isinstance(resume_from_checkpoint, str) else None
        return super().train(resume_from_checkpoint, *args, **kwargs)

    def _load_from_checkpoint(
        self, resume_from_checkpoint: str, model: torch.nn.Module | None = None
    ) -> None:
        if not _is_ours(resume_from_checkpoint) or hasattr(self.model, "peft_config"):
            super()._load_from_checkpoint(resume_from_checkpoint, model)
            return
        target = self.model if model is None else model
        _restore(resume_from_checkpoint, {"train": TrainState(target)}, "train/model/**")

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _is_ours(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        parts = ["train/optimizer/**", "train/scheduler/**"]
        if hasattr(self.model, "peft_config"):
            parts.append("train/model/**")
        _restore(checkpoint, {"train": self._stepwell_train_state()}, parts)

    def _load_scaler(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _is_ours(checkpoint):
            super()._load_scaler(checkpoint)
            return
        if self.accelerator.scaler is not None:
            _restore(checkpoint, {"scaler": self.accelerator.scaler}, "scaler/**")

    def _load_rng_state(self, checkpoint: str | None) -> None:
        if checkpoint is None or not _is_ours(checkpoint):
            super()._load_rng_state(checkpoint)
            return
        root = os.path.join(checkpoint, GUEST)
        if metadata(root).custom_metadata != {"world_size": self.args.world_size}:
            log(
                INFO,
                f"{checkpoint} was saved by another number of ranks: random numbers begin with the seed",
            )
            return
        numbers = random_numbers()
        missing, unexpected = on_other_devices(numbers, root)
        wanted = {"random": numbers}
        with in_terms():
            restore(root, into=wanted, include="random/**", missing=missing, unexpected=unexpected)


class _Hooks(transformers.TrainerCallback):  # type: ignore[misc]  # transformers declares no types
    """Checks the state when a training begins, and traces it after each step."""

    def __init__(self, trainer: StepwellTrainer) -> None:
        self._trainer = trainer

    def on_train_begin(self, arguments: transformers.TrainingArguments, *_: object, **__: object) -> None:
        """Called by the trainer."""
        trainer = self._trainer
        if arguments.save_only_model or arguments.save_strategy == "no":
            return
        _guest.check(trainer._stepwell_state(), arguments.process_index, arguments.world_size)
        prover, resumed = trainer._stepwell_prover, trainer._stepwell_resumed
        if prover is not None and resumed is not None and _is_ours(resumed):
            with in_terms():
                root = os.path.join(resumed, GUEST)
                prover.resumed(root, trainer._stepwell_board(), trainer.state.global_step)

    def on_step_end(
        self,
        arguments: transformers.TrainingArguments,
        state: transformers.TrainerState,
        *_: object,
        **__: object,
    ) -> None:
        """Called by the trainer."""
        if self._trainer._stepwell_prover is not None:
            self._trainer._stepwell_prover.step(state.global_step, self._trainer._stepwell_state)


def newest_checkpoint(output_dir: str, before: int | None = None) -> str | None:
    """Returns the newest checkpoint of a trainer that is complete; ``None`` without one. Logs why
    it passes over newer ones. Waits for saves of this process.

    Args:
        output_dir: ``TrainingArguments.output_dir``.
        before: only checkpoints of earlier steps.
    """
    _guest.wait_saves(output_dir)  # of a training that has failed in this process
    try:
        theirs = {os.path.basename(step.path): step.incomplete for step in open_root(output_dir).steps}
    except (StepwellError, OSError):
        theirs = {}
    found = [
        (int(match[1]), os.path.join(output_dir, name))
        for name in os.listdir(output_dir)
        if (match := _CHECKPOINT.fullmatch(name)) and (before is None or int(match[1]) < before)
    ]
    return _guest.newest(
        found,
        lambda path: (
            _why_not(path) if _is_ours(path) else theirs.get(os.path.basename(path), "no checkpoint")
        ),
    )


def _why_not(path: str) -> str | None:
    """Why a checkpoint of ours cannot resume."""
    state = os.path.join(path, _STATE_FILE)
    try:
        json.loads(read_whole(state, _MAX_STATE_BYTES, lambda size: corrupt(state, f"{size} bytes")))
        metadata(os.path.join(path, GUEST))
    except (StepwellError, OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return None


def _is_ours(checkpoint: str) -> bool:
    return os.path.lexists(os.path.join(checkpoint, GUEST))


def _restore(checkpoint: str, into: dict[str, object], include: str | list[str]) -> None:
    try:
        with in_terms():
            restore(os.path.join(checkpoint, GUEST), into=into, include=include)
    except (CorruptCheckpoint, StepNotFound) as error:
        if isinstance(error, StepNotFound):
            error.add_note(f"The save of {checkpoint} was not finished.")
        output_dir, name = os.path.split(os.path.normpath(checkpoint))
        match = _CHECKPOINT.fullmatch(name)
        older = newest_checkpoint(output_dir or ".", int(match[1])) if match else None
        if older is not None:
            error.add_note(f"An older checkpoint is there: resume_from_checkpoint={older!r}.")
        raise
