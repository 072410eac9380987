"""The state of the optimizer in the partitions of DeepSpeed's ZeRO (``*_optim_states.pt``): master
weights and slots by parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np

from .._state.specs import to_dtype
from .description import Opaque, Tensor, Unlocated
from .expert_names import ExpertNames, is_expert
from .files import read
from .flat_partitions import FlatParameter, assembled, of_group, of_shares
from .one_save import check_one_save
from .parameter_shapes import STATE, is_reordered, mapped_shapes, paddings_of, shapes_of
from .pickle_values import Malformed
from .typed_fields import Fields, Size, is_count, unwrapped
from .zero_state import ZeroState, beside, named_groups

#: Slots of a parameter. Each is an entry for each name.
_MAX_SLOTS = 64


def partitioned_state(
    model: Fields, files: Sequence[Fields], module: Mapping[str, object], experts: ExpertNames
) -> ZeroState:
    """Returns the state that these files of all data-parallel ranks have. ``model`` is the file
    with the names of the parameters. ``module`` are the weights of the model itself."""
    ranks = [file.fields(STATE) for file in files]
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
        shapes = mapped_shapes(model, ranks, module)
    _check_counts(ranks, len(partitions[0]))
    parameters = _PartitionedParameters(model, ranks, partitions, experts)
    if len(shapes) != len(partitions[0]):
        first.wrong(f"`{key}` has {len(partitions[0])} groups, `param_shapes` {len(shapes)}")
    paddings, counts = paddings_of(first, shapes), first.get("partition_count")
    for group, own_shapes in enumerate(shapes):
        lengths = [own[group].shape[0] for own in partitions]
        if is_3:
            parameters.add(partial(of_shares, group, lengths, own_shapes))
        elif isinstance(counts, list) and counts[group] != len(ranks):
            parameters.add_experts(group, lengths, own_shapes, counts[group], paddings[group])
        else:
            parameters.add(partial(of_group, group, lengths, own_shapes, paddings[group]))
    if not is_3:
        parameters.state.is_reordered = any(
            is_reordered(ranks, group, own_shapes)
            for group, own_shapes in enumerate(shapes)
            if not isinstance(counts, list) or counts[group] == len(ranks)
        )
    parameters.add_slots("optimizer_state_dict" if is_3 else "base_optimizer_state")
    parameters.state.beside |= beside(first)
    return parameters.state


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
    return [rank.flat(f"group {group} of `{key}`", one) for group, one in enumerate(rank.list(key))]


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


def _of_ranks(
    ranks: Sequence[int],
    group: int,
    lengths: Sequence[int],
    shapes: Mapping[str, Size],
    paddings: Sequence[int],
) -> dict[str, FlatParameter]:
    """The parameters of a group that these ranks have."""
    found = of_group(group, [lengths[rank] for rank in ranks], shapes, paddings)
    return {
        name: one._replace(runs=tuple(run._replace(rank=ranks[run.rank]) for run in one.runs))
        for name, one in found.items()
    }


def _is_transposed(model: Fields) -> bool:
    """True if ranks with the same experts are neighbours. By default, those of one set are."""
    config = model.get("ds_config")
    return isinstance(config, dict) and bool(unwrapped(config.get("use_data_before_expert_parallelism")))


class _Partitions(NamedTuple):
    """The partitions of a slot."""

    of_ranks: Sequence[Tensor]


class _PartitionedParameters:
    """Collects the parameters of partitions."""

    def __init__(
        self,
        model: Fields,
        ranks: Sequence[Fields],
        partitions: Sequence[Sequence[Tensor]],
        experts: ExpertNames,
    ) -> None:
        self._model, self._ranks, self._partitions = model, ranks, partitions
        #: The partitions of all ranks by group.
        self._by_group = [list(of_ranks) for of_ranks in zip(*partitions, strict=True)]
        self._experts = experts
        self._parameters: dict[str, FlatParameter] = {}
        self.state = ZeroState()

    def add(self, found: Callable[[], Mapping[str, FlatParameter]]) -> None:
        """Adds parameters, and their master weights."""
        try:
            for name, parameter in found().items():
                if name in self._parameters:
                    raise Malformed(f"`{name[:200]}` is in two groups")
                self.state.masters[name] = assembled(parameter, self._by_group[parameter.group])
                self._parameters[name] = parameter
        except Malformed as error:
            self._ranks[0].wrong(f"{error}. Copy the files of all ranks, and keep those of one save")

    def add_experts(
        self,
        group: int,
        lengths: Sequence[int],
        shapes: Mapping[str, Size],
        count: int,
        paddings: Sequence[int],
    ) -> None:
        """Adds the parameters of a group of experts. ``shapes`` are those of the experts of rank 0;
        each of ``count`` partitions is that of as many ranks as there are expert-parallel ones."""
        if (
            not count
            or len(lengths) % count
            or not all(map(is_expert, shapes))
            or _is_transposed(self._model)
        ):
            self.state.beside["experts"] = Opaque("state of experts, by expert-parallel rank")
            return
        size = len(lengths) // count
        for expert_rank in range(size):
            ranks = range(expert_rank, len(lengths), size)
            own = {
                self._experts.in_model(self._model, name, shape, expert_rank, size): shape
                for name, shape in shapes.items()
            }
            self.add(partial(_of_ranks, ranks, group, lengths, own, paddings))

    def add_slots(self, key: str) -> None:
        """Adds the slots of the parameters, and the groups."""
        states, groups = self._base_states(key)
        names: dict[int, list[str]] = {}
        steps: list[object] = []
        for name, parameter in self._parameters.items():
            names.setdefault(parameter.group, []).append(name)
        for group, own in names.items():
            of_ranks = [state.get(group) for state in states]
            if all(one is None for one in of_ranks):
                continue  # before its first step
            slots = [
                Fields(rank.file, one, f"the state of group {group}").entries
                for rank, one in zip(self._ranks, of_ranks, strict=True)
            ]
            if len(slots[0]) > _MAX_SLOTS:
                what = (
                    f"group {group} has {len(slots[0])} slots, of at most {_MAX_SLOTS}. Copy the file again"
                )
                self._ranks[0].wrong(what)
            steps.append(self._step([one.get("step") for one in slots]))
            for slot in slots[0]:
                if isinstance(slot, str):
                    cut = self._slot(group, slot, [one.get(slot) for one in slots])
                    for name in own:
                        self.state.slots.setdefault(name, {})[slot] = self._of_parameter(name, slot, cut)
        file = self._ranks[0].file
        self.state.groups = named_groups(file, groups, names)
        self.state.doubt = check_one_save(self._model, self._ranks[0], steps, groups)

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

    def _slot(self, group: int, slot: str, values: Sequence[object]) -> object:
        """A slot of a group: the partitions of all ranks, or one value."""
        if not isinstance(values[0], Tensor) or values[0].shape == ():
            return values[0]
        what = f"`{slot}` of group {group}"
        found = [rank.flat(what, value) for rank, value in zip(self._ranks, values, strict=True)]
        for rank, value, own in zip(self._ranks, found, self._partitions, strict=True):
            length, size = own[group].shape[0], value.shape[0]
            if size < length or (length and size > length + self._padding(rank, group)):
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

    def _padding(self, rank: Fields, group: int) -> int:
        """Elements at the end of a rank's slots that its master weights do not have."""
        found = rank.get("group_paddings")
        if isinstance(found, list) and group < len(found) and is_count(found[group]):
            return int(found[group])
        return 0

    def _step(self, steps: Sequence[object]) -> object:
        """The step of all ranks."""
        found = [_number_of(step) for step in steps]
        for rank, step in zip(self._ranks, found, strict=True):
            if step != found[0]:
                rank.wrong("its step differs from that of rank 0. Keep the files of one save")
        return found[0]


def _comparable(group: object) -> object:
    """A group as far as its values are plain."""
    value = unwrapped(group)
    if not isinstance(value, dict):
        return None
    return {key: unwrapped(one) for key, one in value.items() if not isinstance(one, (Tensor, Opaque))}


def _number_of(step: object) -> object:
    """A scalar in a file, or a plain value."""
    if not isinstance(step, Tensor) or step.shape != () or len(step.chunks) != 1:
        return None if isinstance(step, (Tensor, Opaque)) else step
    (chunk,) = step.chunks
    if isinstance(chunk.file, Unlocated):
        (chunk,) = chunk.file.locator.locate([chunk])
    dtype = to_dtype(step.dtype).newbyteorder(">" if chunk.big_endian else "<")
    data = read(chunk.file, chunk.offset, chunk.nbytes)[0] if isinstance(chunk.file, str) else b""
    return np.frombuffer(data, dtype)[0].item() if len(data) == dtype.itemsize else None
