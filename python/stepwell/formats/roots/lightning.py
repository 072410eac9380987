"""Roots of Lightning: files or directories ``epoch=E-step=S.ckpt``, and ``last.ckpt``; and those of
NeMo 2, which are directories with the same names and ``weights`` in them."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

from ... import _core
from ..._locations import MANIFEST
from ...errors import CorruptCheckpoint, StepwellError
from .. import lookup, torch_save
from ..description import Value
from ..files import read
from .listing import ForeignStep, Listing, entries, missing, number_of, written_by_stepwell

LIGHTNING = "Lightning"
NEMO = "NeMo"
_END = ".ckpt"
_NAMED = re.compile(r"(?:.*[-_])?(?:epoch|step)=\d+.*\.ckpt")
_LAST = re.compile(r"last(?:-v\d+)?\.ckpt")
_NUMBER = re.compile(r"(?:^|[-_])step=(\d+)(?![\d.])")
_VERSION = re.compile(r"-v(\d{1,9})\.ckpt$")
#: The end of the name of a file that NeMo keeps beside a step until its save is finished.
UNFINISHED = "-unfinished"
#: A file of a checkpoint of stepwell.
_LEASE = ".lease"
#: The file that Lightning writes last into a directory of DCP.
_META = "meta.pt"
#: The directory of a save of DeepSpeed in that of a step, and the file that it writes last.
_OF_DEEPSPEED = "checkpoint"
_LATEST = "latest"


def lightning(path: str, names: Sequence[str]) -> Listing | None:
    """Lists the checkpoints of a ``ModelCheckpoint``."""
    ours = [name for name in names if name.endswith(_END)]
    if not any(_NAMED.fullmatch(name) or _LAST.fullmatch(name) for name in ours):
        return None
    steps = [_lightning_step(path, name) for name in ours]
    steps.sort(key=_order)
    whole = [step for step in steps if step.incomplete is None]

    def best() -> str | None:
        return _best(whole[-1].path) if whole else None

    return Listing(LIGHTNING, path, steps, best=best)


def _order(step: ForeignStep) -> tuple[int, bool, int, str]:
    """By number. Of those with one number, a copy of the last one comes first, and a newer version
    after an older one."""
    version = _VERSION.search(step.name)
    is_copy = _LAST.fullmatch(step.name) is not None
    return (
        -1 if step.number is None else step.number,
        not is_copy,
        int(version[1]) if version else 0,
        step.name,
    )


def _lightning_step(path: str, name: str) -> ForeignStep:
    place, number = os.path.join(path, name), number_of(_NUMBER.search(name.removesuffix(_END)))
    if lookup.is_named(os.path.join(place, MANIFEST)):
        return ForeignStep(number, name, place, written_by_stepwell(place), ours=place)
    save = os.path.join(place, _OF_DEEPSPEED)
    if lookup.is_dir(save):
        return ForeignStep(number, name, place, missing(entries(place), _LATEST), save)
    if lookup.is_dir(place):
        inside = entries(place)
        reason = missing(inside, MANIFEST) if _LEASE in inside else missing(inside, ".metadata", _META)
    elif not lookup.exists(place):
        reason = "it is a link that leads nowhere"
    else:
        reason = _torn(place)
    if number is None and reason is None:
        found = _read_state(os.path.join(place, _META) if lookup.is_dir(place) else place).get("global_step")
        number = found if type(found) is int and found >= 0 else None
    return ForeignStep(number, name, place, reason)


def _torn(file: str) -> str | None:
    """The reason if a file of torch.save ends early."""
    if not read(file, 0, 0)[1]:
        return "it is empty: the save was not finished"
    if read(file, 0, 4)[0] == b"PK\x03\x04":
        try:
            _core.ZipDirectory(lookup.real(file)).members()
        except CorruptCheckpoint:
            return "it ends early: the save was not finished"
    return None


def _read_state(file: str) -> dict[object, object]:
    """The state of a file; empty if it cannot be read."""
    try:
        found = torch_save.describe(file)
    except (StepwellError, OSError):
        return {}
    return found.state if found is not None and isinstance(found.state, dict) else {}


def _best(place: str) -> str | None:
    """The name of the best checkpoint, as its callback has noted it."""
    state = _read_state(os.path.join(place, _META) if lookup.is_dir(place) else place)
    callbacks = state.get("callbacks")
    for key, values in (callbacks if isinstance(callbacks, dict) else {}).items():
        values = values.value if isinstance(values, Value) else values
        if str(key).startswith("ModelCheckpoint") and isinstance(values, dict):
            best = values.get("best_model_path")
            if isinstance(best, str) and best:
                return os.path.basename(best.rstrip("/"))
    return None


_OF_NEMO = re.compile(r"(?:.*[-_])?step=(\d+)(?:[.-].*)?")


def nemo(path: str, names: Sequence[str]) -> Listing | None:
    """Lists the checkpoints of NeMo 2. The weights are those of Megatron."""
    steps = []
    for name in names:
        number, place = number_of(_OF_NEMO.fullmatch(name)), os.path.join(path, name)
        if number is None or name.endswith((_END, UNFINISHED)) or not lookup.is_dir(place):
            continue
        weights = os.path.join(place, "weights")
        if f"{name}{UNFINISHED}" in names:
            reason: str | None = f"{name}{UNFINISHED} is beside it: the save was not finished"
        elif not lookup.is_dir(weights):
            reason = "its directory weights is missing: the save was not finished"
        else:
            reason = missing(entries(weights), ".metadata")
        steps.append(ForeignStep(number, name, place, reason, weights))
    if not any(step.checkpoint and lookup.is_dir(step.checkpoint) for step in steps):
        return None
    steps.sort(key=lambda step: (step.number or 0, not step.name.endswith("-last"), step.name))
    return Listing(NEMO, path, steps)
