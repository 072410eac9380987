"""A check that DeepSpeed's states of a model and of its optimizer are of one save.

No file says which save it is of. The states of the model count steps, and may have the learning
rates of a scheduler; those of the optimizer have steps and learning rates of their own. An
optimizer may have begun later, and a user may set its rates. So only both together are an error.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence

from .typed_fields import Fields, unwrapped


def check_one_save(
    model: Fields, optimizer: Fields, steps: Iterable[object], groups: Sequence[object]
) -> str | None:
    """Raises if the steps and the learning rates of an optimizer both contradict the states of the
    model. Returns what does, if it is one of the two.

    Args:
        model: the states of the model.
        optimizer: those of the optimizer.
        steps: the steps that the optimizer has made, as its slots say.
        groups: its groups of parameters.
    """
    found = [one for one in (_steps(model, steps), _rates(model, groups)) if one is not None]
    if len(found) > 1:
        optimizer.wrong(f"{', '.join(found)} in {os.path.basename(model.file)}. Keep the files of one save")
    return f"{found[0]}: its files may be of another save than those of the model" if found else None


def _steps(model: Fields, steps: Iterable[object]) -> str | None:
    """The contradiction between the steps. Before 0.14, optimizers count one step more."""
    made = [one for one in steps if type(one) in (int, float)]
    counted, skipped = model.count("global_steps"), model.count("skipped_steps") or 0
    if not made or counted is None:
        return None
    known = max(made)  # type: ignore[type-var]
    if known in (counted - skipped, counted - skipped + 1):
        return None
    return f"the optimizer has made {known} steps, not {counted - skipped}"


def _rates(model: Fields, groups: Sequence[object]) -> str | None:
    """The contradiction between the learning rates. Schedulers of DeepSpeed do not store them."""
    scheduler = model.get("lr_scheduler")
    known = unwrapped(scheduler.get("_last_lr")) if isinstance(scheduler, dict) else None
    rates = [unwrapped(group.get("lr")) for group in map(unwrapped, groups) if isinstance(group, dict)]
    if not isinstance(known, list) or not known or not rates:
        return None
    if not all(type(one) is float for one in [*known, *rates]) or set(known) & set(rates):
        return None
    return f"its learning rate is {rates[0]}, not {known[0]}"
