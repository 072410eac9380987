"""The state of the optimizer in files of DeepSpeed's ZeRO, by parameter: master weights, slots, and
groups of parameters with their names.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from .typed_fields import Fields, is_count

#: Values of an optimizer's file that describe how it was cut. The state does not have them.
_CONSUMED = frozenset(
    {
        "base_optimizer_state",
        "param_groups",
        "optimizer_state_dict",
        "single_partition_of_fp32_groups",
        "fp32_flat_groups",
        "zero_stage",
        "group_paddings",
        "param_alignment_paddings",
        "partition_count",
        "param_slice_mappings",
        "ds_version",
        "universal_checkpoint_info",
    }
)


@dataclass(slots=True)
class ZeroState:
    """The state of the optimizer, of one model-parallel rank or of all."""

    #: Weights in the precision of the optimizer, by parameter.
    masters: dict[str, object] = field(default_factory=dict)
    #: Slots by parameter.
    slots: dict[str, dict[str, object]] = field(default_factory=dict)
    #: The groups of parameters, with the names of these.
    groups: list[object] = field(default_factory=list)
    #: Other values.
    beside: dict[str, object] = field(default_factory=dict)
    #: True if ``param_slice_mappings`` have another order of parameters.
    is_reordered: bool = False
    #: Says why its files may be of another save than those of the model.
    doubt: str | None = None

    def with_stage(self, other: ZeroState) -> ZeroState:
        """Returns this state and that of another stage of a pipeline. Of values that both have,
        those of this state count."""
        groups = list(self.groups)
        for number, group in enumerate(other.groups):
            own = groups[number] if number < len(groups) else None
            if isinstance(own, dict) and isinstance(group, dict) and _without(own) == _without(group):
                groups[number] = {**own, "params": list(dict.fromkeys([*own["params"], *group["params"]]))}
            else:
                groups.append(group)
        return ZeroState(
            {**other.masters, **self.masters},
            {**other.slots, **self.slots},
            groups,
            {**other.beside, **self.beside},
            self.is_reordered or other.is_reordered,
            self.doubt or other.doubt,
        )


def _without(group: Mapping[object, object]) -> dict[object, object]:
    """The hyperparameters of a group."""
    return {key: value for key, value in group.items() if key != "params"}


def named_groups(file: str, groups: Sequence[object], names: Mapping[int, Sequence[str]]) -> list[object]:
    """Returns groups of parameters with the names of these, which are numbered by partition."""
    found: list[object] = []
    seen: set[int] = set()
    for group in groups:
        fields = Fields(file, group, "a group of parameters")
        numbers = fields.get("params")
        if not isinstance(numbers, (list, tuple)) or not all(map(is_count, numbers)):
            fields.wrong("a group has no list of parameters")
        before = len(seen)
        seen.update(numbers)
        if len(seen) != before + len(numbers):
            fields.wrong("its groups name a partition twice. Copy the file again")
        params = [name for number in numbers for name in names.get(number, ())]
        found.append({**fields.entries, "params": params})
    return found


def beside(fields: Fields) -> dict[str, object]:
    """Returns the values of an optimizer's file that are not cut."""
    return {name: value for name, value in fields.named_entries() if name not in _CONSUMED}
