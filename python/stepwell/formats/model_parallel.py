"""The parts of a model that model-parallel ranks of DeepSpeed have, as one model: the stages of a
pipeline, and slices of tensors.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace

from .description import Copy, Opaque, Tensor
from .files import corrupt
from .pickle_values import Malformed
from .slicing_rules import SlicingRules
from .tensor_slices import SliceRule, whole
from .typed_fields import Fields
from .zero_state import ZeroState


@dataclass(frozen=True, slots=True)
class ModelState:
    """A model with its optimizer."""

    #: Weights of the optimizer, and frozen parameters.
    masters: Mapping[str, object]
    #: Weights and buffers of the model itself.
    module: Mapping[str, object]
    #: Names of tied parameters, with the names of those that are stored.
    shared: Mapping[str, object]
    #: The state of the optimizer with ZeRO.
    zero: ZeroState | None
    #: That without ZeRO, by model-parallel rank.
    optimizers: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RankState:
    """The part of a model that one model-parallel rank has."""

    #: The first of its files ``*_model_states.pt``.
    model_file: Fields
    part: ModelState


def of_stages(path: str, stages: Sequence[RankState], layers: Mapping[str, object]) -> ModelState:
    """Returns the model of these stages of a pipeline. A tied parameter is that of the first stage.
    ``layers`` are the weights that have files of their own."""
    first = stages[0].part
    masters, module = dict(first.masters), {**first.module, **layers}
    shared, zero, optimizers = dict(first.shared), first.zero, dict(first.optimizers)
    for stage in stages[1:]:
        for own, more in ((masters, stage.part.masters), (module, stage.part.module)):
            for name, value in more.items():
                known = own.setdefault(name, value)
                if isinstance(known, Tensor) and isinstance(value, Tensor) and known.shape != value.shape:
                    other = os.path.basename(stages[0].model_file.file)
                    stage.model_file.wrong(f"`{name[:200]}` has another shape in {other}")
        shared = {**stage.part.shared, **shared}
        optimizers.update(stage.part.optimizers)
        if zero is not None and stage.part.zero is not None:
            zero = zero.with_stage(stage.part.zero)
    lost = [name for name in masters if layers and name not in module]
    if lost:
        what = f"no file layer_*-model_states.pt has `{lost[0][:200]}`. Copy the files of all layers"
        raise corrupt(path, what)
    return ModelState(masters, module, shared, zero, optimizers)


class Joining:
    """Joins what tensor-parallel ranks have of a model."""

    def __init__(self, model_file: Fields, rules: SlicingRules, buffers: Collection[str]) -> None:
        self._model_file, self._rules, self._buffers = model_file, rules, buffers
        #: Tensors that all ranks have. They are read from the first one's files.
        self.copies: list[Copy] = []
        #: Whole tensors by their rule and slices. So tied parameters stay one tensor.
        self._made: dict[tuple[object, ...], Tensor] = {}

    def model(self, slices: Sequence[ModelState], place_of_module: str) -> ModelState:
        """Returns the model without padding. ``slices`` are those of each rank. The state has
        ``module`` at that place."""
        first = slices[0]
        masters = self._all("model", [one.masters for one in slices])
        module = self._all(place_of_module, [one.module for one in slices])
        zero = first.zero
        if zero is not None:
            of_ranks = [{} if one.zero is None else one.zero.slots for one in slices]
            names = dict.fromkeys(name for one in of_ranks for name in one)
            slots = {name: self._slots(name, [one.get(name, {}) for one in of_ranks]) for name in names}
            zero = replace(zero, slots=slots)
        optimizers = {rank: state for one in slices for rank, state in one.optimizers.items()}
        return ModelState(masters, module, first.shared, zero, optimizers)

    def _all(self, place: str, of_ranks: Sequence[Mapping[str, object]]) -> dict[str, object]:
        names = dict.fromkeys(name for one in of_ranks for name in one)
        return {name: self._one((place, name), name, [one.get(name) for one in of_ranks]) for name in names}

    def _slots(self, name: str, of_ranks: Sequence[Mapping[str, object]]) -> dict[str, object]:
        slots = dict.fromkeys(slot for one in of_ranks for slot in one)
        return {
            slot: self._one(("optimizer", "state", name, slot), name, [one.get(slot) for one in of_ranks])
            for slot in slots
        }

    def _one(self, leaf: Sequence[str], name: str, values: Sequence[object]) -> object:
        """A value of a parameter of that name. Values that are no tensors are those of rank 0."""
        tensors = [value for value in values if isinstance(value, Tensor)]
        if 0 < len(tensors) < len(values):
            self._model_file.wrong(f"`{name[:200]}` is a tensor in some tensor-parallel ranks only")
        if not tensors:
            return values[0]
        rule = SliceRule(None) if name in self._buffers else self._rules.rule(name, len(values))
        if isinstance(rule, str):
            return Opaque(rule)
        key = (rule, *map(id, tensors))
        if key not in self._made:
            try:
                self._made[key] = found = whole(tensors, rule)
            except Malformed as error:
                if name in self._buffers:
                    return Opaque(f"buffer of tensor-parallel ranks: {error}")
                self._model_file.wrong(f"`{name[:200]}`: {error}")
            if rule.axis is None or found is tensors[0]:
                path = tuple(("k", component) for component in leaf)
                self.copies += [Copy(path, tensors[0], other) for other in tensors[1:]]
        return self._made[key]
