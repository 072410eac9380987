"""Roots of Hugging Face: ``checkpoint-N`` of the Trainer, and ``checkpoint_N`` of accelerate."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Sequence

from ..._locations import GUEST
from .. import lookup
from ..files import read, read_whole
from .listing import ForeignStep, Listing, entries, missing, numbered, written_by_stepwell

TRAINER = "Hugging Face Trainer"
ACCELERATE = "accelerate"
_OF_TRAINER = re.compile(r"checkpoint-(\d+)")
_OF_ACCELERATE = re.compile(r"checkpoint_(\d+)")
_STATE = "trainer_state.json"
#: A file that the Trainer deletes at the end of a save during a preemption.
_UNFINISHED = "checkpoint-is-incomplete.txt"
_MAX_STATE_BYTES = 256 << 20
#: Files and directories with the weights of the model.
_WEIGHTS = re.compile(
    r"(model|adapter_model)\.safetensors|(pytorch_model|adapter_model)\.bin|.*\.(safetensors|bin)\.index\.json"
    r"|pytorch_model_fsdp(_0|\.bin)"
)
#: The other parts of a step: files by the name of the part, and directories of DCP.
_OTHER = re.compile(
    r"((?:optimizer|scheduler|scaler|sampler|rng_state|random_states|custom_checkpoint)(?:_\d+)?)\.(?:pt|pth|bin|pkl)"
    r"|(?:trainer_state)\.json"
)
_OTHER_DIRECTORIES = {"optimizer_0": "optimizer"}
_OF_DEEPSPEED = re.compile(r"global_step(\d+)")


def trainer(path: str, names: Sequence[str]) -> Listing | None:
    """Lists the checkpoints of a Trainer, and of what is built on it (TRL, Axolotl)."""
    found = [one for one in numbered(path, names, _OF_TRAINER) if lookup.is_dir(one[2])]
    steps = []
    for number, name, place in found:
        inside = entries(place)
        reason = f"it has {_UNFINISHED}" if _UNFINISHED in inside else missing(inside, _STATE)
        if reason is None and not _is_whole(os.path.join(place, _STATE)):
            reason = f"its {_STATE} ends early: the save was not finished"
        if reason is None and GUEST in inside and not _has_ours(place):
            reason = f"its directory {GUEST} has no step: the save was not finished"
        ours = os.path.join(place, GUEST) if reason is None and GUEST in inside else None
        steps.append(_step(number, name, place, inside, reason, ours))
    whole = [step for step in steps if step.incomplete is None]

    def best() -> str | None:
        return _best(os.path.join(whole[-1].path, _STATE)) if whole else None

    return Listing(TRAINER, path, steps, best=best) if steps else None


def accelerate(path: str, names: Sequence[str]) -> Listing | None:
    """Lists what ``Accelerator.save_state`` has named by itself."""
    steps = []
    for number, name, place in numbered(path, names, _OF_ACCELERATE):
        inside = entries(place) if lookup.is_dir(place) else ()
        if GUEST in inside and _has_ours(place):
            ours = os.path.join(place, GUEST)
            steps.append(ForeignStep(number, name, place, written_by_stepwell(ours), ours=ours))
        elif any(_weights(inside)) or "random_states_0.pkl" in inside:
            reason = missing(inside, "random_states_0.pkl")
            steps.append(_step(number, name, place, inside, reason))
    return Listing(ACCELERATE, path, steps) if steps else None


def _has_ours(place: str) -> bool:
    """True if an integration of stepwell has committed its part of a checkpoint."""
    return any(name.startswith("step_") for name in entries(os.path.join(place, GUEST)))


def _step(
    number: int, name: str, path: str, inside: Collection[str], reason: str | None, ours: str | None = None
) -> ForeignStep:
    weights = sorted(_weights(inside))
    sharded = numbered(path, inside, _OF_DEEPSPEED)
    if reason is None and not weights and not sharded:
        reason = "it has no weights (model.safetensors, pytorch_model.bin, or those of an adapter)"
    parts: dict[str, str] = {}
    if weights:
        fsdp = weights[0].startswith("pytorch_model_fsdp")
        parts["model"] = os.path.join(path, weights[0]) if fsdp else path
    for one in sorted(inside):
        match = _OTHER.fullmatch(one)
        part = _OTHER_DIRECTORIES.get(one) if match is None else match[1] or one.removesuffix(".json")
        if part is not None:
            parts[part] = os.path.join(path, one)
        elif (match := re.fullmatch(r"model_(\d+)\.safetensors", one)) is not None:
            parts[f"model_{match[1]}"] = os.path.join(path, one)
    if sharded:
        parts["deepspeed"] = sharded[-1][2]
    return ForeignStep(number, name, path, reason, parts=parts, ours=ours)


def _weights(inside: Collection[str]) -> list[str]:
    return [name for name in inside if _WEIGHTS.fullmatch(name)]


def _is_whole(file: str) -> bool:
    """True if a file of JSON has its end. The Trainer indents it, so only the last brace is at the
    start of a line."""
    length = read(file, 0, 0)[1]
    return read(file, max(length - 64, 0), 64)[0].rstrip().endswith(b"\n}") or _json(file) is not None


def _json(file: str) -> object:
    try:
        found: object = json.loads(read_whole(file, _MAX_STATE_BYTES, lambda _: ValueError()))
    except (ValueError, RecursionError):
        return None
    return found


def _best(file: str) -> str | None:
    """The name of the best step. The path in the file is that of the machine that wrote it."""
    state = _json(file)
    best = state.get("best_model_checkpoint") if isinstance(state, dict) else None
    return os.path.basename(best.replace("\\", "/").rstrip("/")) if isinstance(best, str) else None
