"""The state of the optimizer in files of DeepSpeed's ZeRO: master weights and slots by parameter.

The names and their order are in the states of the model (``param_shapes``), the values in those of
the optimizer. ``param_slice_mappings`` are not used: with ``round_robin_gradients`` they have
another order than the values.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import NamedTuple

from .description import Opaque, Tensor, Unlocated
from .files import read
from .flat_partitions import Parameter, assembled, of_group, of_shares
from .pickle_values import Malformed
from .typed_fields import Fields, Size, is_count, plain

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
_STATE = "optimizer_state_dict"
#: The name of an expert's parameter. In `param_shapes`, the number is that among the experts of its
#: rank.
_EXPERT = re.compile(r"(.*\.deepspeed_experts\.)(\d{1,6})(\..*)", re.DOTALL)


@dataclass(slots=True)
class ZeroState:
    """The state of the optimizer of one model-parallel rank."""

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

    def add_stage(self, other: ZeroState) -> None:
        """Adds the state of another stage of a pipeline. Its own values stay."""
        self.masters = {**other.masters, **self.masters}
        self.slots = {**other.slots, **self.slots}
        self.beside = {**other.beside, **self.beside}
        self.is_reordered = self.is_reordered or other.is_reordered
        for number, group in enumerate(other.groups):
            own = self.groups[number] if number < len(self.groups) else None
            if isinstance(own, dict) and isinstance(group, dict) and _without(own) == _without(group):
                own["params"] = list(dict.fromkeys([*own["params"], *group["params"]]))
            else:
                self.groups.append(group)


def _without(group: Mapping[object, object]) -> dict[object, object]:
    """The hyperparameters of a group."""
    return {key: value for key, value in group.items() if key != "params"}


def zero_state(
    model: Fields, files: Sequence[Fields], module: Mapping[str, object], experts: Mapping[str, object]
) -> ZeroState:
    """Returns the state that these files of all data-parallel ranks have. ``model`` has the names
    of the parameters. ``module`` are the weights of the model itself, ``experts`` those of all
    experts, by their names in the whole model."""
    ranks = [file.fields(_STATE) for file in files]
    first = ranks[0]
    for file, rank in zip(files, ranks, strict=True):
        _refuse(file, rank)
    is_3 = first.has("fp32_flat_groups")
    key = "fp32_flat_groups" if is_3 else "single_partition_of_fp32_groups"
    partitions = [_tensors(rank, key) for rank in ranks]
    for rank, own in zip(ranks, partitions, strict=True):
        if len(own) != len(partitions[0]):
            rank.wrong(f"`{key}` has {len(own)} groups, that of rank 0 has {len(partitions[0])}")
    if model.has("param_shapes"):
        shapes = shapes_of(model)
    else:
        shapes = _mapped_shapes(model, ranks, module)
    _check_counts(ranks, len(partitions[0]))
    cut = _Cut(model, ranks, partitions, experts)
    if len(shapes) != len(partitions[0]):
        first.wrong(f"`{key}` has {len(partitions[0])} groups, `param_shapes` {len(shapes)}")
    paddings, counts = _paddings(first, shapes), first.get("partition_count")
    for row, group in enumerate(shapes):
        lengths = [own[row].shape[0] for own in partitions]
        if is_3:
            cut.add(partial(of_shares, row, lengths, group))
        elif isinstance(counts, list) and counts[row] != len(ranks):
            cut.add_experts(row, lengths, group, counts[row], paddings[row])
        else:
            cut.add(partial(of_group, row, lengths, group, paddings[row]))
    if not is_3:
        cut.state.is_reordered = any(
            _is_reordered(ranks, row, group)
            for row, group in enumerate(shapes)
            if not isinstance(counts, list) or counts[row] == len(ranks)
        )
    cut.add_slots("optimizer_state_dict" if is_3 else "base_optimizer_state")
    cut.state.beside |= beside(first)
    return cut.state


def _expert_counts(experts: Iterable[str]) -> dict[str, int]:
    """Returns the number of experts of each layer, by the part of their names before the number."""
    numbers: dict[str, set[int]] = {}
    for name in experts:
        match = _EXPERT.fullmatch(name)
        if match is not None:
            numbers.setdefault(match[1], set()).add(int(match[2]))
    return {start: len(found) for start, found in numbers.items()}


def shapes_of(model: Fields) -> list[dict[str, Size]]:
    """Returns the shapes of the parameters, by group."""
    shapes = [
        Fields(model.file, one, "a group of `param_shapes`").sizes() for one in model.list("param_shapes")
    ]
    names = list(itertools.chain.from_iterable(shapes))
    if len(set(names)) != len(names):
        model.wrong("`param_shapes` names a parameter twice")
    return shapes


def names_of(model: Fields, files: Sequence[Fields]) -> set[str]:
    """Returns the names of the parameters."""
    if model.has("param_shapes"):
        return {name for group in shapes_of(model) for name in group}
    ranks = [file.fields(_STATE) for file in files]
    return {str(name) for row in range(_mapped_groups(ranks)) for name in _mapped(ranks, row)}


def _mapped_groups(ranks: Sequence[Fields]) -> int:
    """The number of groups in ``param_slice_mappings``."""
    mappings = ranks[0].get("param_slice_mappings") if ranks else None
    return len(mappings) if isinstance(mappings, list) else 0


def _mapped(ranks: Sequence[Fields], row: int) -> list[object]:
    """The names of a group's parameters in the order of ``param_slice_mappings``."""
    order: list[object] = []
    for rank in ranks:
        mappings = rank.get("param_slice_mappings")
        own = plain(mappings[row]) if isinstance(mappings, list) and row < len(mappings) else None
        if not isinstance(own, dict):
            return []
        order.extend(name for name in own if not order or name != order[-1])
    return order


def _mapped_shapes(
    model: Fields, ranks: Sequence[Fields], module: Mapping[str, object]
) -> list[dict[str, Size]]:
    """The shapes of the parameters of the optimizer for bfloat16 without ZeRO, which does not
    reorder them. They are those of the weights of the model itself."""
    if ranks[0].has("zero_stage") or not _mapped_groups(ranks):
        model.wrong("it has no `param_shapes`, which name the parameters in *_optim_states.pt")
    found: list[dict[str, Size]] = []
    seen: set[str] = set()
    for row in range(_mapped_groups(ranks)):
        found.append({})
        for name in map(str, _mapped(ranks, row)):
            weight = module.get(name)
            if not isinstance(weight, Tensor) or name in seen:
                model.wrong(f"`{name[:200]}` of `param_slice_mappings` is twice, or has no weight")
            seen.add(name)
            found[-1][name] = weight.shape
    return found


def _refuse(file: Fields, rank: Fields) -> None:
    """Raises for partitions that depend on more than the rank's number."""
    if file.has("folding"):
        file.unread(
            "tensor-parallel experts (AutoEP with AutoTP) are not read. Convert it with DeepSpeed's ds_to_universal"
        )
    if rank.has("ds_zero_partition_groups"):
        file.unread(
            "experts that ZeRO-3 partitions (AutoEP) are not read. Convert it with DeepSpeed's ds_to_universal"
        )


def _tensors(rank: Fields, key: str) -> list[Tensor]:
    return [rank.flat(f"group {row} of `{key}`", one) for row, one in enumerate(rank.list(key))]


def _check_counts(ranks: Sequence[Fields], groups: int) -> None:
    """Compares the number of ranks in the files with the number of files."""
    for rank in ranks:
        counts = rank.get("partition_count")
        found = counts if isinstance(counts, list) else [counts]
        if not all(is_count(one) for one in found):
            rank.wrong("`partition_count` is no number of ranks")
        if isinstance(counts, list) and len(counts) != groups:
            rank.wrong(f"`partition_count` has {len(counts)} groups of {groups}")
        most = max(map(int, found), default=len(ranks))
        if most != len(ranks):
            rank.wrong(
                f"it is one of {most} partitions, and {len(ranks)} files are there. Copy the files of all ranks, "
                "and keep those of one save"
            )


def _paddings(first: Fields, shapes: Sequence[Mapping[str, object]]) -> list[list[int]]:
    """Elements behind each parameter, by group."""
    if not first.has("param_alignment_paddings"):
        return [[] for _ in shapes]
    found = first.list("param_alignment_paddings")
    is_sound = len(found) == len(shapes) and all(
        isinstance(one, list) and len(one) == len(group) and all(map(is_count, one))
        for one, group in zip(found, shapes, strict=False)
    )
    if not is_sound:
        first.wrong("`param_alignment_paddings` has no number for each parameter")
    return found  # type: ignore[return-value]


def _is_reordered(ranks: Sequence[Fields], row: int, group: Mapping[str, object]) -> bool:
    """True if ``param_slice_mappings`` contradict the order of a group's parameters."""
    order = _mapped(ranks, row)
    return bool(order) and order != list(group)


def _of_ranks(
    ranks: Sequence[int],
    row: int,
    lengths: Sequence[int],
    shapes: Mapping[str, Size],
    paddings: Sequence[int],
) -> dict[str, Parameter]:
    """The parameters of a group that these ranks have."""
    found = of_group(row, [lengths[rank] for rank in ranks], shapes, paddings)
    return {
        name: one._replace(runs=tuple(run._replace(rank=ranks[run.rank]) for run in one.runs))
        for name, one in found.items()
    }


def _is_transposed(model: Fields) -> bool:
    """True if ranks with the same experts are neighbours. By default, those of one set are."""
    config = model.get("ds_config")
    return isinstance(config, dict) and bool(plain(config.get("use_data_before_expert_parallelism")))


class _Partitions(NamedTuple):
    """The partitions of a slot."""

    of_ranks: Sequence[Tensor]


class _Cut:
    """Collects the parameters of partitions."""

    def __init__(
        self,
        model: Fields,
        ranks: Sequence[Fields],
        partitions: Sequence[Sequence[Tensor]],
        experts: Mapping[str, object],
    ) -> None:
        self._model, self._ranks, self._partitions = model, ranks, partitions
        #: The weights of all experts, and how many there are in each layer.
        self._experts, self._counts = experts, _expert_counts(experts)
        self._parameters: dict[str, Parameter] = {}
        self.state = ZeroState()

    def add(self, found: Callable[[], Mapping[str, Parameter]]) -> None:
        """Adds parameters, and their master weights."""
        try:
            for name, parameter in found().items():
                if name in self._parameters:
                    raise Malformed(f"`{name[:200]}` is in two groups")
                rows = [own[parameter.row] for own in self._partitions]
                self.state.masters[name] = assembled(parameter, rows)
                self._parameters[name] = parameter
        except Malformed as error:
            self._ranks[0].wrong(f"{error}. Copy the files of all ranks, and keep those of one save")

    def add_experts(
        self,
        row: int,
        lengths: Sequence[int],
        shapes: Mapping[str, Size],
        count: int,
        paddings: Sequence[int],
    ) -> None:
        """Adds the parameters of a group of experts. ``shapes`` are those of the experts of rank 0;
        each of ``count`` partitions is that of as many ranks as there are expert-parallel ones."""
        names = [_EXPERT.fullmatch(name) for name in shapes]
        if not count or len(lengths) % count or not all(names) or _is_transposed(self._model):
            self.state.beside["experts"] = Opaque("state of experts, by expert-parallel rank")
            return
        size = len(lengths) // count
        for expert_rank in range(size):
            ranks = range(expert_rank, len(lengths), size)
            own = {
                self._expert(one, expert_rank, size, shapes[one[0]]): shapes[one[0]]
                for one in names
                if one is not None
            }
            self.add(partial(_of_ranks, ranks, row, lengths, own, paddings))

    def _expert(self, local: re.Match[str], expert_rank: int, size: int, shape: Size) -> str:
        """The name in the whole model of a parameter of an expert-parallel rank, one of ``size``. A
        group may have some of the rank's experts only. Their files have all experts."""
        own, rest = divmod(self._counts.get(local[1], 0), size)
        number = int(local[2])
        name = f"{local[1]}{expert_rank * own + number}{local[3]}"
        weight = self._experts.get(name)
        if rest or number >= own or not isinstance(weight, Tensor) or weight.shape != shape:
            self._model.wrong(
                f"expert {number} of expert-parallel rank {expert_rank} is not in the files "
                f"layer_*_expert_*_model_states.pt as `{name[:200]}` of shape {list(shape)}. "
                "Copy the files of all experts, and keep those of one save"
            )
        return name

    def add_slots(self, key: str) -> None:
        """Adds the slots of the parameters, and the groups."""
        states, groups = self._base_states(key)
        names: dict[int, list[str]] = {}
        for name, parameter in self._parameters.items():
            names.setdefault(parameter.row, []).append(name)
        for row, own in names.items():
            of_ranks = [state.get(row) for state in states]
            if all(one is None for one in of_ranks):
                continue  # before its first step
            slots = [
                Fields(rank.file, one, f"the state of group {row}").entries
                for rank, one in zip(self._ranks, of_ranks, strict=True)
            ]
            self._check_steps([one.get("step") for one in slots])
            for slot in slots[0]:
                if isinstance(slot, str):
                    cut = self._slot(row, slot, [one.get(slot) for one in slots])
                    for name in own:
                        self.state.slots.setdefault(name, {})[slot] = self._of_parameter(name, slot, cut)
        file = self._ranks[0].file
        self.state.groups = named_groups(file, groups, names)

    def _base_states(self, key: str) -> tuple[list[Mapping[object, object]], Sequence[object]]:
        """The state of each rank by partition, and the groups."""
        found: list[Mapping[object, object]] = []
        groups: Sequence[object] = ()
        for number, rank in enumerate(self._ranks):
            base = rank.get(key)
            if isinstance(base, list):  # an elastic checkpoint
                found.append(dict(enumerate(base)))
                continue
            fields = rank.fields(key)
            found.append(fields.fields("state").entries)
            own = fields.list("param_groups")
            if number == 0:
                groups = own
            elif [_comparable(one) for one in own] != [_comparable(one) for one in groups]:
                rank.wrong("its groups differ from those of rank 0. Keep the files of one save")
        return found, groups

    def _slot(self, row: int, slot: str, values: Sequence[object]) -> object:
        """A slot of a group: the partitions of all ranks, or one value."""
        if not isinstance(values[0], Tensor) or values[0].shape == ():
            return values[0]
        what = f"`{slot}` of group {row}"
        found = [rank.flat(what, value) for rank, value in zip(self._ranks, values, strict=True)]
        for rank, value, own in zip(self._ranks, found, self._partitions, strict=True):
            length, size = own[row].shape[0], value.shape[0]
            if size < length or (length and size > length + self._padding(rank, row)):
                return Opaque(f"slot of {size} elements, for a partition of {length}")
        return _Partitions(found)

    def _of_parameter(self, name: str, slot: str, cut: object) -> object:
        """The value of a slot of a parameter."""
        if isinstance(cut, Tensor):
            return replace(cut)  # each parameter has its own step, which is no tie
        if not isinstance(cut, _Partitions):
            return cut
        try:
            return assembled(self._parameters[name], cut.of_ranks)
        except Malformed as error:
            self._ranks[0].wrong(f"`{slot}` of `{name[:200]}`: {error}")

    def _padding(self, rank: Fields, row: int) -> int:
        """Elements at the end of a rank's slots that its master weights do not have."""
        found = rank.get("group_paddings")
        if isinstance(found, list) and row < len(found) and is_count(found[row]):
            return int(found[row])
        return 0

    def _check_steps(self, steps: Sequence[object]) -> None:
        """Compares the steps of the ranks."""
        found = [_number_of(step) for step in steps]
        for rank, step in zip(self._ranks, found, strict=True):
            if step != found[0]:
                rank.wrong("its step differs from that of rank 0. Keep the files of one save")


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


def _comparable(group: object) -> object:
    """A group as far as its values are plain."""
    value = plain(group)
    if not isinstance(value, dict):
        return None
    return {key: plain(one) for key, one in value.items() if not isinstance(one, (Tensor, Opaque))}


def _number_of(step: object) -> object:
    """The bytes of a scalar in a file, or a plain value."""
    if not isinstance(step, Tensor) or step.shape != () or len(step.chunks) != 1:
        return None if isinstance(step, (Tensor, Opaque)) else step
    (chunk,) = step.chunks
    if isinstance(chunk.file, Unlocated):
        (chunk,) = chunk.file.locator.locate([chunk])
    return read(chunk.file, chunk.offset, chunk.nbytes)[0] if isinstance(chunk.file, str) else None
