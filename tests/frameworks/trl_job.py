"""Trainings of a tiny GPT-2 with the trainers of TRL, as a program and for the tests."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from peft import LoraConfig
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from trainer_job import Losses
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, Trainer
from trl import DPOConfig, DPOTrainer, SFTConfig, SFTTrainer

_WORDS = [f"w{number}" for number in range(60)]
_SPECIAL = ("[PAD]", "[EOS]", "[UNK]")


def _tokenizer() -> PreTrainedTokenizerFast:
    words = {word: number for number, word in enumerate([*_WORDS, *_SPECIAL])}
    core = Tokenizer(WordLevel(words, unk_token="[UNK]"))
    core.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=core, pad_token="[PAD]", eos_token="[EOS]", unk_token="[UNK]"
    )


def _model() -> GPT2LMHeadModel:
    torch.manual_seed(3)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=64, n_embd=16, n_layer=2, n_head=2))


def trainer(kind: str, output: Path, losses: Losses) -> Trainer:
    """A trainer of 10 steps that saves every third: ``"sft"`` with an adapter of PEFT, or
    ``"dpo"``."""
    torch.set_num_threads(1)
    choose = random.Random(1).choice

    def text(words: int) -> str:
        return " ".join(choose(_WORDS) for _ in range(words))

    options: dict[str, Any] = {
        "output_dir": str(output),
        "use_cpu": True,
        "bf16": False,
        "max_steps": 10,
        "save_steps": 3,
        "logging_steps": 1,
        "per_device_train_batch_size": 4,
        "report_to": [],
        "save_total_limit": 2,
        "seed": 3,
        "disable_tqdm": True,
        "max_length": 32,
    }
    parts: dict[str, Any] = {"processing_class": _tokenizer(), "callbacks": [losses]}
    if kind == "sft":
        adapter = LoraConfig(
            r=4, lora_dropout=0.1, target_modules=["c_attn"], fan_in_fan_out=True, task_type="CAUSAL_LM"
        )
        data = Dataset.from_list([{"text": text(10)} for _ in range(64)])
        return SFTTrainer(_model(), SFTConfig(**options), train_dataset=data, peft_config=adapter, **parts)
    rows = [{"prompt": text(4), "chosen": text(5), "rejected": text(5)} for _ in range(64)]
    data = Dataset.from_list(rows)
    return DPOTrainer(_model(), _model(), DPOConfig(**options), train_dataset=data, **parts)


def main() -> None:
    """``trl_job.py KIND OUTPUT KILLED_AT``."""
    import stepwell.integrations.transformers as ours

    kind, output, killed_at = sys.argv[1:]
    ours.use(trainer(kind, Path(output), Losses(int(killed_at)))).train()


if __name__ == "__main__":
    main()
