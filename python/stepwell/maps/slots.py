"""Slots of an optimizer, by the path of their parameter."""

from __future__ import annotations

import re

from .patterns import Match

#: Factors of a second moment, of Adafactor. Each lacks an axis of its parameter.
FACTORS = ("exp_avg_sq_row", "exp_avg_sq_col", "v_row", "v_col", "row_var", "col_var")

#: The power of ``s`` that a slot follows if its parameter is scaled by ``s``: first moments are
#: gradients, second moments their squares. Then copies of the parameter, and counts.
SLOTS = {
    **dict.fromkeys(("exp_avg", "mu", "m", "momentum_buffer", "trace", "grad_avg"), -1),
    **dict.fromkeys(("exp_avg_sq", "max_exp_avg_sq", "nu", "nu_max", "v", "square_avg", "sum"), -2),
    **dict.fromkeys(FACTORS, -2),
    **dict.fromkeys(("master_param", "fp32_param"), 1),
    **dict.fromkeys(("step", "count"), 0),
}


def slot_name(match: Match, shortest: int = 2) -> str | None:
    """The name of a slot: behind that of its parameter, or before it. ``None`` for a parameter.
    A name before it that is shorter than ``shortest`` is one of a module."""
    if not match.before and not match.after:
        return None
    if match.after:
        return next(reversed(_names(match.after)), "")
    names = _names(match.before)
    return next((name for name in reversed(names) if len(name) >= shortest and SLOTS.get(name)), None)


def is_factor(match: Match) -> bool:
    """True for a factor of a parameter's second moment."""
    return not {*_names(match.before), *_names(match.after)}.isdisjoint(FACTORS)


def parameter_of(path: str, match: Match) -> str:
    """The name of a parameter, which is in the paths of its slots."""
    return path[len(match.before) : len(path) - len(match.after)]


def _names(path: str) -> list[str]:
    return [name for name in re.split(r"[/\[\]]", path) if name]
