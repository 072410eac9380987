"""Roots of other libraries: directories in which a trainer keeps one checkpoint for each step.

A root is recognised by the names in it and by what lies below them. A step is complete if what its
writer writes last is there; ``verify`` reads the bytes. Steps are listed also in formats that are
not read.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

from ...errors import FormatError
from .. import lookup
from . import hugging_face, lightning, plain, trackers
from .listing import Family, ForeignStep, Listing

__all__ = ["ForeignStep", "Listing", "containing", "find"]

_FAMILIES: Sequence[Family] = (
    hugging_face.trainer,
    hugging_face.accelerate,
    lightning.lightning,
    lightning.nemo,
    trackers.megatron,
    trackers.deepspeed,
    trackers.verl,
    plain.torchtitan,
    plain.orbax,
    plain.flax,
)
#: Directories in that of a run in which trainers keep their steps.
_INNER = ("checkpoints", "checkpoint")
#: The steps of all families, for messages.
EXPECTED = (
    "step_N of stepwell, checkpoint-N of the Hugging Face Trainer, checkpoint_N of accelerate or Flax, "
    "epoch=E-step=S.ckpt of Lightning, iter_N of Megatron, global_stepN of DeepSpeed, global_step_N of verl, "
    "step-N of torchtitan, N or prefix_N of Orbax"
)


def find(path: str) -> Listing | None:
    """Lists the steps of another library in a directory, or in its directory ``checkpoints``;
    ``None`` without any."""
    for where in (path, *(os.path.join(path, name) for name in _INNER)):
        if lookup.is_dir(where):
            names = sorted(lookup.names(where))
            found = [listing for family in _FAMILIES if (listing := family(where, names)) is not None]
            if len(found) > 1:
                several = " and of ".join(f"{one.family} ({one.steps[-1].name})" for one in found)
                raise FormatError(
                    f"{where}: steps of {several}. The steps of one library were expected: "
                    "move the others, or open a step by its path"
                )
            if found:
                return found[0]
    return None


def containing(path: str) -> Listing | None:
    """Lists a step of the root above it; ``None`` if the path is none. Other entries of the root
    are not looked at: there may be very many."""
    root, name = os.path.split(path)
    beside = (name, f"{name}{lightning.UNFINISHED}", *trackers.POINTERS)
    names = sorted({one for one in beside if lookup.is_named(os.path.join(root, one))})
    listings = (family(root, names) for family in _FAMILIES)
    found = [one for one in listings if one is not None and any(step.path == path for step in one.steps)]
    return found[0] if len(found) == 1 else None
