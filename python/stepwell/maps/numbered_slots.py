"""Slots of an optimizer of torch that has numbered its parameters. A map cannot change them: their
parameters are unknown."""

from __future__ import annotations

import re

from .._paths import named
from .arrangement import Arrangement, Computed
from .values import Value, Values

#: A slot, such as ``optimizer/state[0]/exp_avg``, and the path in front of ``state``.
_SLOT = re.compile(r"(|.*[/\]])state(?:\[\d+\]|/\d+)/[^/\[]+", re.DOTALL)
_GROUPS = "param_groups"


def warning(stored: Values, mapped: Values) -> str | None:
    """The warning for a map that changes a tensor beside numbered slots, which it leaves as they
    are. ``None``: it does not."""
    groups = {path[: path.rindex(_GROUPS)] for path in stored if _GROUPS in path}
    slot = next((path for path, value in mapped.items() if _is_slot(path, value, groups)), None)
    if slot is None:
        return None
    whole = [value for value in stored.values() if isinstance(value, Arrangement)]
    kept = {value.pieces[0].source: value for value in whole if value.pieces}
    if not any(_is_changed(value, kept) for value in mapped.values()):
        return None
    return (
        f"numbered slots of an optimizer do not follow the map: {named(slot)} stays as it is stored. Save slots by "
        "name (sw.torch.TrainState, or get_state_dict of torch), or leave the optimizer out"
    )


def _is_slot(path: str, value: Value, groups: set[str]) -> bool:
    """True for a tensor of more than one element in a numbered slot beside ``param_groups``."""
    if not isinstance(value, Arrangement) or all(size == 1 for size in value.shape):
        return False
    found = _SLOT.fullmatch(path)
    return found is not None and found[1] in groups


def _is_changed(value: Value, kept: dict[int | Computed, Arrangement]) -> bool:
    """True for a tensor that is no stored one. Another dtype is no change."""
    while isinstance(value, Arrangement) and value.pieces:
        source = value.pieces[0].source
        if not isinstance(source, Computed):
            return value != kept.get(source)
        if source.operation != "cast" or value != source.whole():
            return True
        value = source.operands[0]
    return False
