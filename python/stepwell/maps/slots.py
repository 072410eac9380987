"""Slots of an optimizer, by the path of their parameter."""

from __future__ import annotations

import re

from .patterns import Match

#: The power of ``s`` that a slot follows if its parameter is scaled by ``s``: first moments are
#: gradients, second moments their squares. Then copies of the parameter, and counts.
SLOTS = {
    **dict.fromkeys(("exp_avg", "mu", "m", "momentum_buffer", "trace", "grad_avg"), -1),
    **dict.fromkeys(("exp_avg_sq", "max_exp_avg_sq", "nu", "nu_max", "v", "square_avg", "sum"), -2),
    **dict.fromkeys(("exp_avg_sq_row", "exp_avg_sq_col", "v_row", "v_col"), -2),
    **dict.fromkeys(("master_param", "fp32_param"), 1),
    **dict.fromkeys(("step", "count"), 0),
}


def slot_name(match: Match, shortest: int = 2) -> str | None:
    """The name of a slot: behind that of its parameter, or before it. ``None`` for a parameter.
    A name before it that is shorter than ``shortest`` is one of a module."""
    if match.after:
        return next(reversed(_names(match.after)), "")
    if not match.before:
        return None
    names = _names(match.before)
    return next((name for name in reversed(names) if len(name) >= shortest and SLOTS.get(name)), None)


def _names(path: str) -> list[str]:
    return [name for name in re.split(r"[/\[\]]", path) if name]
