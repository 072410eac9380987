"""Roots whose steps are only numbered: torchtitan, Orbax, and the files of old Flax."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Sequence

from .. import lookup
from ..files import read_whole
from ..orbax import FAMILY as ORBAX
from ..orbax import OF_CHECKPOINT, STEP
from .listing import ForeignStep, Listing, entries, missing, numbered

TORCHTITAN = "torchtitan"
FLAX = "Flax"
_OF_TORCHTITAN = re.compile(r"step-(\d+)")
_INDEX = "model.safetensors.index.json"
_DCP = ".metadata"
_UNFINISHED = re.compile(r"(?:.+_)?(\d+)\.orbax-checkpoint-tmp.*")
_MAX_METADATA_BYTES = 64 << 20
_SUCCESS = "commit_success.txt"
_TREE = "_METADATA"
_OF_FLAX = re.compile(r"checkpoint_(\d+)")


def torchtitan(path: str, names: Sequence[str]) -> Listing | None:
    """Lists the steps of torchtitan: of DCP, or of Hugging Face."""
    found = [one for one in numbered(path, names, _OF_TORCHTITAN) if lookup.is_dir(one[2])]
    steps = []
    for number, name, place in found:
        inside = entries(place)
        reason = None if _INDEX in inside else missing(inside, _DCP)
        steps.append(ForeignStep(number, name, place, reason))
    return Listing(TORCHTITAN, path, steps) if steps else None


def resumable(path: str) -> list[int]:
    """Returns the steps of torchtitan in a directory from which it resumes: complete ones of DCP.
    Those of Hugging Face have the model only."""
    listing = torchtitan(path, sorted(entries(path)))
    return [
        step.number
        for step in (() if listing is None else listing.steps)
        if step.number is not None and step.incomplete is None and _DCP in entries(step.path)
    ]


def flax(path: str, names: Sequence[str]) -> Listing | None:
    """Lists the files of ``flax.training.checkpoints``. A complete one gets its name."""
    found = [one for one in numbered(path, names, _OF_FLAX) if lookup.is_file(one[2])]
    steps = [
        ForeignStep(number, name, place, None if lookup.length(place) else "it is empty")
        for number, name, place in found
    ]
    return Listing(FLAX, path, steps) if steps else None


def orbax(path: str, names: Sequence[str]) -> Listing | None:
    """Lists the steps of a ``CheckpointManager`` or ``Checkpointer`` of Orbax."""
    found = [one for one in numbered(path, names, STEP) if lookup.is_dir(one[2])]
    inside = {name: _inside(place) for _, name, place in found}
    unfinished = [one for one in numbered(path, names, _UNFINISHED) if lookup.is_dir(one[2])]
    if not unfinished and not any(map(_is_of_orbax, inside.values())):
        return None
    of_orbax = {_prefix(name) for name, some in inside.items() if _is_of_orbax(some)}
    steps = [
        ForeignStep(number, name, place, "Orbax has not finished its save")
        for number, name, place in unfinished
    ]
    for number, name, place in found:
        if _prefix(name) in of_orbax:
            reason = _uncommitted(place, inside[name])
            steps.append(ForeignStep(number, name, place, reason))
    steps.sort(key=lambda step: (step.number or 0, step.incomplete is None))
    return Listing(ORBAX, path, steps)


def _prefix(name: str) -> str:
    return name.rstrip("0123456789")


def _inside(path: str) -> Collection[str]:
    """The entries of a step, and those of its items that show how far its save was."""
    own = entries(path)
    marks = [f"{one}/{mark}" for one in own for mark in (_TREE, _SUCCESS)]
    return {*own, *(mark for mark in marks if lookup.is_file(os.path.join(path, mark)))}


def _is_of_orbax(inside: Collection[str]) -> bool:
    return OF_CHECKPOINT in inside or any(name.split("/")[-1] == _TREE for name in inside)


def _uncommitted(path: str, inside: Collection[str]) -> str | None:
    """The reason if a step with its final name lacks what Orbax writes last. Old versions write
    neither of the two files."""
    if not _is_of_orbax(inside):
        return "it has no item with arrays: the save was not finished"
    if any(name.endswith(f"/{_SUCCESS}") for name in inside) and _SUCCESS not in inside:
        return missing(inside, _SUCCESS)
    if OF_CHECKPOINT not in inside:
        return None
    try:
        content = read_whole(os.path.join(path, OF_CHECKPOINT), _MAX_METADATA_BYTES, lambda _: ValueError())
        metadata = json.loads(content)
    except (ValueError, RecursionError):
        return f"its {OF_CHECKPOINT} is no JSON: the save was not finished"
    if isinstance(metadata, dict) and metadata.get("commit_timestamp_nsecs", 0) is None:
        return f"its {OF_CHECKPOINT} has no time of the commit: the save was not finished"
    return None
