"""The groups of a torch optimizer: their hyperparameters, stored and restored by parameter."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

import torch

from ..errors import MisuseError
from . import torch as adapter

#: The hyperparameters of a group, which torch has no types for.
Group: TypeAlias = dict[str, Any]
#: A value from a file, or a value of an optimizer. Each function checks its type.
Stored: TypeAlias = Any

OTHER_KIND = (
    "restore into an optimizer of the saved kind. To restore only the model, "
    'restore into TrainState(model) with unexpected="ignore"'
)


def groups(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> list[Group]:
    return [
        {**group, "params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]


def _stored_groups(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], stored: Sequence[Group]
) -> list[Group]:
    """Returns the stored hyperparameters of each group's parameters. Empty for a group without a
    stored parameter."""
    group_of = {name: number for number, group in enumerate(stored) for name in group["params"]}
    taken: list[Group] = []
    for number, group in enumerate(optimizer.param_groups):
        found = sorted({group_of[names[one]] for one in group["params"] if names[one] in group_of})
        first = {key: value for key, value in stored[found[0]].items() if key != "params"} if found else {}
        for other in found[1:]:
            differing = [key for key, value in first.items() if not equal(value, stored[other].get(key))]
            if differing:
                raise MisuseError(
                    f"group {number} has parameters that were saved in groups {found}, which differ in {', '.join(differing)}; "
                    "group them as at the save, or make those hyperparameters equal"
                )
        taken.append(first)
    return taken


def take_groups(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    stored: Sequence[Group],
) -> None:
    """Sets the hyperparameters of each group to those that its parameters had at the save."""
    for group, taken in zip(optimizer.param_groups, _stored_groups(optimizer, names, stored), strict=True):
        for key, value in taken.items():
            group[key] = _like(group.get(key), value)


#: Entries that schedulers and torch itself add to groups.
_BESIDE = frozenset(
    {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr", "param_names"}
)


def wrong_groups(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    stored: Sequence[Group],
) -> str | None:
    """Returns why stored groups are not those of such an optimizer, or ``None``. A hyperparameter
    that is not stored keeps its value: a newer torch may have added it. An unknown stored one is
    ignored if it is off (false or ``None``)."""
    for number, (group, taken) in enumerate(
        zip(optimizer.param_groups, _stored_groups(optimizer, names, stored), strict=True)
    ):
        own = {*group, *optimizer.defaults}
        strange = [
            key
            for key, value in taken.items()
            if key not in own and key not in _BESIDE and value is not None and value is not False
        ]
        if strange:
            lacking = [key for key in optimizer.defaults if key not in taken]
            without = f" and without {', '.join(lacking)}" if lacking else ""
            return (
                f"group {number} was saved with {', '.join(strange)}{without}, which the groups of this {type(optimizer).__name__} do not have; "
                f"{OTHER_KIND}. Add entries that are not the optimizer's own to the group before the restore"
            )
    return None


def equal(one: object, other: object) -> bool:
    return (
        bool((torch.as_tensor(one) == torch.as_tensor(other)).all())
        if hasattr(one, "shape")
        else one == other
    )


def _like(own: Stored, value: Stored) -> Stored:
    """Returns a stored hyperparameter with the type of the group's own. If that is a tensor (for
    captured graphs), fills it in place."""
    if isinstance(own, torch.Tensor):
        with torch.no_grad():
            own.copy_(torch.as_tensor(as_tensor(value)))
        return own
    if type(own) in (tuple, list) and isinstance(value, (tuple, list)) and len(own) == len(value):
        return type(own)(_like(one, other) for one, other in zip(own, value, strict=True))
    found = as_tensor(value)
    return found.item() if isinstance(found, torch.Tensor) and isinstance(own, (int, float)) else found


def as_tensor(value: Stored) -> Stored:
    """Returns an array from a file as a tensor. Returns other values unchanged."""
    if isinstance(value, torch.Tensor) or not hasattr(value, "__array_interface__"):
        return value
    return adapter.from_numpy(value)
