"""Roots with a text file that names the newest step: Megatron, verl and DeepSpeed. They write it
after everything else."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from ...errors import CorruptCheckpoint, FormatError
from .. import lookup
from ..deepspeed import FAMILY as DEEPSPEED
from ..deepspeed_files import MODEL_STATES
from ..megatron import FAMILY as MEGATRON
from ..megatron import RANK
from ..rank_files import rank_files
from .listing import (
    ForeignStep,
    Listing,
    absent,
    entries,
    missing,
    newer,
    number_of,
    numbered,
    pointer,
    tracked,
)

VERL = "verl"
_TRACKER = "latest_checkpointed_iteration.txt"
_LATEST = "latest"
#: Names the newest universal checkpoint, which was converted from a tag.
_LATEST_UNIVERSAL = "latest_universal"
#: The files that name a step.
POINTERS = (_TRACKER, _LATEST, _LATEST_UNIVERSAL)
_OF_MEGATRON = re.compile(r"iter_(\d{7,})")
_RELEASE = "release"
_OF_VERL = re.compile(r"global_step_(\d+)")
_OF_DEEPSPEED = re.compile(r"global_step(\d+)")


def megatron(path: str, names: Sequence[str]) -> Listing | None:
    """Lists the iterations of Megatron-LM."""
    found = numbered(path, names, _OF_MEGATRON)
    is_release = _RELEASE in names and _TRACKER in names
    if not found and not is_release:
        return None
    noted = tracked(path, _TRACKER)
    steps = [
        ForeignStep(number, name, place, newer(number, noted, _TRACKER) or _megatron_reason(place))
        for number, name, place in found
    ]
    if is_release:
        place = os.path.join(path, _RELEASE)
        steps.insert(0, ForeignStep(None, _RELEASE, place, _megatron_reason(place)))
    if isinstance(noted, int) and noted not in {step.number for step in steps}:
        steps = _with_absent(path, steps, f"iter_{noted:07d}", noted)
    return Listing(MEGATRON, path, steps, newest=_RELEASE if noted == _RELEASE else None)


def _with_absent(path: str, steps: Sequence[ForeignStep], name: str, number: int) -> list[ForeignStep]:
    """The steps with one that the tracker names."""
    gone = absent(path, name, number, _TRACKER)
    return sorted([*steps, gone], key=lambda step: -1 if step.number is None else step.number)


def _megatron_reason(place: str) -> str | None:
    inside = entries(place)
    if any(RANK.fullmatch(name) for name in inside):
        return None
    # Plain checkpoints of DCP have neither of the other files.
    if ".metadata" in inside and "common.pt" not in inside:
        return None
    return missing(inside, "metadata.json")


def verl(path: str, names: Sequence[str]) -> Listing | None:
    """Lists the steps of verl. Each has a directory for each model, with files by rank."""
    found = [one for one in numbered(path, names, _OF_VERL) if lookup.is_dir(one[2])]
    if not found:
        return None
    noted = tracked(path, _TRACKER)
    steps = []
    for number, name, place in found:
        parts, lacking = {}, None
        for model in sorted(entries(place)):
            inside = os.path.join(place, model)
            if lookup.is_dir(inside):
                parts[model] = inside
                lacking = lacking or _missing_ranks(inside, model)
        reason = newer(number, noted, _TRACKER) or lacking
        if not parts:
            reason = reason or "it has no directory of a model, such as actor: the save was not finished"
        steps.append(ForeignStep(number, name, place, reason, parts=parts))
    if isinstance(noted, int) and noted not in {step.number for step in steps}:
        steps = _with_absent(path, steps, f"global_step_{noted}", noted)
    return Listing(VERL, path, steps)


def _missing_ranks(path: str, model: str) -> str | None:
    """The reason if files of ranks are missing."""
    try:
        found = rank_files(path, sorted(entries(path)))
    except (CorruptCheckpoint, FormatError) as error:  # it names the ranks
        return str(error).removeprefix(f"{path}: ")
    return None if found else f"its {model} has no files of ranks: the save was not finished"


def deepspeed(path: str, names: Sequence[str]) -> Listing | None:
    """Lists the tags of DeepSpeed. Tags with other names than its own have no number."""
    is_named = _LATEST in names or _LATEST_UNIVERSAL in names
    candidates = [name for name in names if is_named or _OF_DEEPSPEED.fullmatch(name)]
    states = {name: _model_states(os.path.join(path, name)) for name in candidates}
    tags = [name for name in candidates if states[name] or _OF_DEEPSPEED.fullmatch(name)]
    if not any(states.values()):
        return None
    noted = pointer(path, _LATEST, "the tag of a checkpoint")
    latest = None if noted is None else number_of(_OF_DEEPSPEED.fullmatch(noted))
    steps = []
    for name in tags:
        number = number_of(_OF_DEEPSPEED.fullmatch(name))
        reason = None if number is None else newer(number, latest, _LATEST)
        if not states[name]:
            reason = reason or "it has no file of model states: the save was not finished"
        steps.append(ForeignStep(number, name, os.path.join(path, name), reason))
    if noted is not None and noted not in tags:
        steps.append(absent(path, os.path.basename(noted), latest, _LATEST))
    if noted is None:
        noted = pointer(path, _LATEST_UNIVERSAL, "the tag of a universal checkpoint")
    steps.sort(key=lambda step: (-1 if step.number is None else step.number, step.name))
    return Listing(DEEPSPEED, path, steps, newest=None if noted is None else os.path.basename(noted))


def _model_states(path: str) -> bool:
    return lookup.is_dir(path) and any(MODEL_STATES.fullmatch(name) for name in entries(path))
