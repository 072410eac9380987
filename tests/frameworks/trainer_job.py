"""A training of a tiny GPT-2 with ``transformers.Trainer``, as a program and for the tests."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainerCallback, TrainingArguments

#: Random numbers of the model count too.
DROPOUT = 0.1
DEVICE = os.environ.get("STEPWELL_TRAIN_ON", "cpu")


class Losses(TrainerCallback):
    """The loss of each step, and a kill at one of them, right after a save has begun."""

    def __init__(self, killed_at: int | None = None) -> None:
        self.found: dict[int, float] = {}
        self.killed_at = killed_at

    def on_log(self, arguments: Any, state: Any, control: Any, logs: Any = None, **_: Any) -> None:
        if "loss" in logs:
            self.found[state.global_step] = logs["loss"]

    def on_save(self, arguments: Any, state: Any, control: Any, **_: Any) -> None:
        if state.global_step == self.killed_at:
            os.kill(os.getpid(), signal.SIGKILL)


def trainer(output: Path, losses: Losses, seed: int = 3, **options: Any) -> Trainer:
    """A trainer of 14 steps that saves every fourth."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    rows = [torch.randint(0, 64, (12,), generator=torch.Generator().manual_seed(one)) for one in range(64)]
    sizes = {"vocab_size": 64, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
    model = GPT2LMHeadModel(GPT2Config(**sizes, resid_pdrop=DROPOUT, loss_type="ForCausalLM"))
    arguments = TrainingArguments(
        str(output),
        **{
            "use_cpu": DEVICE == "cpu",
            "max_steps": 14,
            "save_steps": 4,
            "logging_steps": 1,
            "per_device_train_batch_size": 4,
            "report_to": [],
            "save_total_limit": 2,
            "seed": seed,
            "disable_tqdm": True,
            **options,
        },
    )
    data = [{"input_ids": row, "labels": row} for row in rows]
    return Trainer(model, arguments, train_dataset=data, eval_dataset=data[:8], callbacks=[losses])


def committed(output: Path) -> Iterator[int]:
    """The steps of the trainer's directories that stepwell has committed."""
    for path in output.glob("checkpoint-*"):
        with contextlib.suppress(FileNotFoundError):  # deleted just now
            if any(name.startswith("step_") for name in os.listdir(path / "stepwell")):
                yield int(path.name.removeprefix("checkpoint-"))


def main() -> None:
    """``trainer_job.py OUTPUT resume|fresh [KILLED_AT]``."""
    import stepwell.integrations.transformers as ours

    output, how = Path(sys.argv[1]), sys.argv[2]
    losses = Losses(int(sys.argv[3]) if sys.argv[3:] else None)
    one = ours.use(trainer(output, losses))
    one.train(resume_from_checkpoint=how == "resume")
    print(json.dumps(losses.found))


if __name__ == "__main__":
    main()
