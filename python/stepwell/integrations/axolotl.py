"""Axolotl with checkpoints of stepwell, by two lines of its YAML file:

    plugins:
      - stepwell.integrations.axolotl.StepwellPlugin

See :mod:`stepwell.integrations.transformers`, which it calls.
"""

from __future__ import annotations

import os
from typing import Protocol

import transformers
from axolotl.integrations.base import BasePlugin

from .transformers import newest_checkpoint, use


class _Configuration(Protocol):
    output_dir: str
    resume_from_checkpoint: str | None
    auto_resume_from_checkpoints: bool | None


class StepwellPlugin(BasePlugin):  # type: ignore[misc]  # Axolotl is not installed beside the rest
    """A plug-in that has the trainer of Axolotl save and resume with stepwell.
    ``auto_resume_from_checkpoints`` takes the newest checkpoint that is complete. Axolotl takes the
    newest name.

    Raises:
        MisuseError: before training, as of :func:`stepwell.integrations.transformers.use`.
    """

    def post_trainer_create(self, cfg: _Configuration, trainer: transformers.Trainer) -> None:
        """Takes the trainer over. Called by Axolotl."""
        use(trainer)
        if cfg.auto_resume_from_checkpoints and cfg.resume_from_checkpoint is None:
            cfg.auto_resume_from_checkpoints = False
            if os.path.isdir(cfg.output_dir):
                cfg.resume_from_checkpoint = newest_checkpoint(cfg.output_dir)
