"""The training state of a DeepSpeed engine with ZeRO.

    from stepwell.integrations.deepspeed import TrainState

    engine, *_ = deepspeed.initialize(...)
    state = {"train": TrainState(engine)}
    state, first = mgr.resume(state)

Each rank saves its own shards in place. Stored are whole tensors under the names of
:class:`stepwell.torch.TrainState`, so the state restores on any number of ranks, and into a model
and optimizer of plain torch.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from copy import copy
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Protocol, TypeAlias, final

import deepspeed
import torch
from deepspeed.runtime.bf16_optimizer import BF16_Optimizer
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
from torch import distributed

from .._adapters import CastOf, Children, Follows, Opened
from .._adapters import torch as adapter
from .._adapters.torch_groups import Group, Stored, equal, groups, take_groups, wrong_groups
from .._adapters.torch_model import plain_names
from .._adapters.torch_slots import only_stored, slots_by_name, take_slots, wrong_slots
from .._restore.template import Checked, Maybe
from .._state.shards import FlatShard
from .._state.specs import AS_STORED, ArraySpec, Replicated
from ..errors import MisuseError

__all__ = ["TrainState"]

_TESTED = "DeepSpeed 0.19.8"
_COUNTERS = ("global_steps", "global_samples", "skipped_steps")
#: The attributes of a dynamic loss scaler that steps change.
_SCALER = ("cur_scale", "cur_iter", "last_overflow_iter", "cur_hysteresis")
_OPTIMIZER, _STATE = ("k", "optimizer"), ("k", "state")

_Zero: TypeAlias = DeepSpeedZeroOptimizer | BF16_Optimizer | DeepSpeedZeroOptimizer_Stage3


class _PartitionedParameter(Protocol):
    """A parameter of ZeRO-3."""

    ds_numel: int
    ds_shape: torch.Size
    ds_process_group: distributed.ProcessGroup

    def partition_numel(self) -> int: ...  # elements of each rank, with padding


@dataclass(frozen=True, slots=True)
class _Fragment:
    """This rank's run of a parameter, which may be empty, and its place in a partition."""

    partition: torch.Tensor
    at: int
    length: int
    shape: tuple[int, ...]
    start: int

    def of(self, flat: torch.Tensor) -> FlatShard:
        """Returns the shard of the parameter in a tensor with the shape of the partition."""
        return FlatShard(flat.detach()[self.at : self.at + self.length], self.shape, self.start)


@final
class TrainState:
    """The state of a DeepSpeed engine with ZeRO-1, 2 or 3, as one entry of a state.

    The stored entries are:

    * ``model/<name>``: trained parameters in the precision of the optimizer (float32), frozen
      parameters and persistent buffers in that of the model. Buffers are those of rank 0.
    * ``optimizer/state/<parameter's name>/<slot>`` and ``optimizer/groups``: as in
      :class:`stepwell.torch.TrainState`;
    * ``optimizer/loss_scaler``: the state of dynamic loss scaling, with fp16;
    * ``scheduler``: the ``state_dict()`` of the engine's scheduler;
    * ``global_steps``, ``global_samples`` and ``skipped_steps`` of the engine.

    A restore fills the partitions of this rank in place. It makes slots that do not exist yet. Then
    the parameters of the model become the rounded ones of the optimizer, as after a step. All ranks
    take part in that.
    """

    def __init__(self, engine: deepspeed.DeepSpeedEngine) -> None:
        if not isinstance(engine, deepspeed.DeepSpeedEngine):
            raise MisuseError(f"TrainState takes a deepspeed.DeepSpeedEngine, not {type(engine).__name__}")
        self.engine = engine
        self._plain = plain_names(engine.module)
        try:
            why = next(_reasons(engine), None)
            if why is None:
                self._fragments()
        except AttributeError as lacking:
            why = f"DeepSpeed {deepspeed.__version__} is of another kind ({lacking})"
        if why is not None:
            raise MisuseError(f"TrainState cannot save this engine: {why}. Tested with {_TESTED}")

    @property
    def _base(self) -> torch.optim.Optimizer:
        """The optimizer of the partitions."""
        base: torch.optim.Optimizer = self.engine.optimizer.optimizer
        return base

    def _fragments(self) -> dict[torch.Tensor, _Fragment]:
        """Returns this rank's run of each trained parameter."""
        zero = self.engine.optimizer
        if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
            return dict(_own_runs(zero))
        return dict(_runs_of_groups(zero))

    def _names(self) -> dict[torch.Tensor, str]:
        """Returns the name of each parameter. A tied parameter has its first name."""
        names: dict[torch.Tensor, str] = {}
        for name, parameter in self.engine.module.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, self._plain(name))
        return names

    def _whole(self) -> torch.optim.Optimizer:
        """Returns a view of the optimizer with the parameters of the model in place of partitions,
        and shards as their slots."""
        base = self._base
        whole = _view(base, _parameters(self.engine.optimizer), defaultdict(dict))
        for parameter, fragment in self._fragments().items():
            for slot, value in base.state.get(fragment.partition, {}).items():
                whole.state[parameter][slot] = _part(slot, value, fragment)
        return whole

    def _model(self) -> dict[str, object]:
        """Returns the tensors of the model: of trained parameters, the shards of the optimizer."""
        module, fragments = self.engine.module, self._fragments()
        tensors = {self._plain(name): value for name, value in adapter.tensors_of(module).items()}
        for full_name, one in module.named_parameters(remove_duplicate=False):
            name = self._plain(full_name)
            if name in tensors and one in fragments:
                tensors[name] = fragments[one].of(fragments[one].partition)
            elif name in tensors and hasattr(one, "ds_tensor"):
                tensors[name] = _run_of(one, one.ds_tensor, 0).of(one.ds_tensor)
        return tensors

    def state_dict(self) -> dict[str, object]:
        """Returns the state as this rank stores it. Shards are views of the run's tensors."""
        engine = self.engine
        why = next(_reasons(engine), None)
        managed = engine.managed_gradient_accumulation()
        if why is None and managed and engine.micro_steps % engine.gradient_accumulation_steps():
            why = "it has accumulated gradients, which are not stored. Save after an optimizer step"
        if why is not None:
            raise MisuseError(f"TrainState cannot save this engine: {why}")
        names, whole = self._names(), self._whole()
        buffers = {self._plain(name) for name, _ in engine.module.named_buffers(remove_duplicate=False)}
        optimizer: dict[str, object] = {
            "state": slots_by_name(whole, names, lambda _: True),
            "groups": groups(whole, names),
        }
        if (scaler := self._scaler()) is not None:
            optimizer["loss_scaler"] = scaler
        state: dict[str, object] = {
            "model": {
                name: Replicated(one) if name in buffers else one for name, one in self._model().items()
            },
            "optimizer": optimizer,
        }
        if engine.lr_scheduler is not None:
            state["scheduler"] = engine.lr_scheduler.state_dict()
        return state | {name: getattr(engine, name) for name in _COUNTERS}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Refused: a restore fills the shards in place."""
        raise MisuseError("restore into a TrainState of DeepSpeed with mgr.resume() or restore(into=)")

    def _scaler(self) -> dict[str, object] | None:
        """Returns the state of dynamic loss scaling, or ``None`` if the scale is fixed."""
        scaler = getattr(self.engine.optimizer, "loss_scaler", None)
        if scaler is None or not scaler.dynamic:
            return None
        return {name: getattr(scaler, name) for name in _SCALER}

    # ---- a restore into it
    # ---------------------------------------------------------------------------------------

    def _stepwell_open(self) -> Opened:
        """Returns the parts for a restore. Partitions are filled in place."""
        engine, names, fragments, model = self.engine, self._names(), self._fragments(), self._model()
        #: New slots, by partition. Only a restore that fills gives them to the optimizer.
        new: defaultdict[torch.Tensor, dict[str, torch.Tensor]] = defaultdict(dict)
        #: The names of renamed parameters, by their stored names.
        renamed: dict[str, str] = {}

        def groups_of(stored: list[Group]) -> list[Group]:
            return [
                {**group, "params": [renamed.get(name, name) for name in group["params"]]} for group in stored
            ]

        def wrong(stored: Stored) -> str | None:
            return wrong_groups(self._whole(), names, groups_of(stored))

        def children(stored: object, moved: dict[str, str], cast_of: CastOf) -> Children:
            renamed.update(moved)
            new.clear()
            was = {name: name for name in names.values() if name not in moved}
            was |= {new_name: old for old, new_name in moved.items()}
            numbers: dict[torch.Tensor, dict[str, Checked]] = defaultdict(dict)
            slots = {
                names[one]: self._wanted_slots(
                    fragment,
                    _at(stored, "optimizer", "state", was.get(names[one])),
                    new[fragment.partition],
                    numbers[fragment.partition],
                )
                for one, fragment in fragments.items()
            }
            optimizer: dict[str, object] = {"state": slots, "groups": Checked(wrong)}
            if self._scaler() is not None:
                optimizer["loss_scaler"] = Maybe(AS_STORED)
            parts: Children = [(("k", "model"), model), (_OPTIMIZER, optimizer)]
            if engine.lr_scheduler is not None:
                parts.append((("k", "scheduler"), engine.lr_scheduler))
            return parts + [(("k", name), Maybe(getattr(engine, name))) for name in _COUNTERS]

        def close(pairs: list[tuple[Stored, Stored]], fill: bool) -> object:
            state = dict(pairs)
            optimizer = state["optimizer"]
            optimizer["state"] = only_stored(optimizer["state"])
            if optimizer["groups"] is not AS_STORED:
                optimizer["groups"] = groups_of(optimizer["groups"])
            if not fill:
                return state
            self._take(optimizer, new)
            for name in _COUNTERS:
                if state[name] is not ...:
                    setattr(engine, name, state[name])
            return self

        follows = Follows((("k", "model"),), [*model], [(_OPTIMIZER, _STATE)])
        fresh = children(None, {}, lambda _: None)
        return Opened(
            fresh,
            close,
            adapter.unfillable(adapter.tensors_of(engine.module)),
            settle=children,
            follows=follows,
            together=self._gather,
        )

    def _wanted_slots(
        self,
        fragment: _Fragment,
        stored: object,
        new: dict[str, torch.Tensor],
        numbers: dict[str, Checked],
    ) -> Maybe:
        """Returns the target of a restore for the slots of a parameter. Adds the slots that its
        partition lacks to ``new``, and those that are numbers to ``numbers``."""
        own = self._base.state.get(fragment.partition)
        if own:
            flat = {slot for slot, value in own.items() if _is_flat(value, fragment.partition)}
            others = own.keys() - flat
        elif type(stored) is dict and wrong_slots(self._base, stored) is None:
            flat = {
                slot
                for slot, one in stored.items()
                if slot != "step" and isinstance(one, ArraySpec) and one.shape == fragment.shape
            }
            others = stored.keys() - flat
            for slot in flat - new.keys():
                new[slot] = torch.zeros_like(fragment.partition.detach())
        else:
            return Maybe(Checked(partial(wrong_slots, self._base)))
        wanted: dict[str, object] = {slot: fragment.of(own[slot] if own else new[slot]) for slot in flat}
        for slot in others:
            wanted[slot] = numbers.setdefault(slot, Checked(_same_of_all(slot)))
        return Maybe(wanted, is_new=not own)

    def _take(self, optimizer: Stored, new: Mapping[torch.Tensor, Mapping[str, torch.Tensor]]) -> None:
        """Gives the optimizer, and the loss scaler, what was read."""
        base, names, stored = self._base, self._names(), optimizer["state"]
        if optimizer["groups"] is AS_STORED and not stored:
            return  # nothing was read, so the optimizer stays unchanged
        whole, fragments = self._whole(), self._fragments()
        if optimizer["groups"] is not AS_STORED:
            take_groups(whole, names, optimizer["groups"])
        by_number: dict[str, dict[str, object]] = {}
        partitions = dict.fromkeys(fragment.partition for fragment in fragments.values())
        numbers = {partition: str(number) for number, partition in enumerate(partitions)}
        for parameter, fragment in fragments.items():
            partition, slots = fragment.partition, stored.get(names[parameter], {})
            flat = {**base.state.get(partition, {}), **new.get(partition, {})}
            taken = by_number.setdefault(numbers[partition], {})
            for slot, value in slots.items():
                # Stored numbers may be tied, and each partition counts its own steps.
                taken[slot] = flat[slot] if isinstance(value, FlatShard) else copy(value)
            for slot, value in flat.items():
                if slot not in slots and _is_flat(value, partition):
                    # Torch keeps no slots of a parameter that had no gradient yet.
                    value.detach()[fragment.at : fragment.at + fragment.length].zero_()
        grouped = [
            list(dict.fromkeys(fragments[one].partition for one in group["params"]))
            for group in whole.param_groups
        ]
        view = _view(whole, grouped, base.state)
        take_slots(view, numbers, by_number, {})
        # As of sw.torch.TrainState: this restores fixed entries of a class.
        view.__setstate__({"state": view.state, "param_groups": view.param_groups})
        for own, taken_group in zip(base.param_groups, view.param_groups, strict=True):
            own.update((key, value) for key, value in taken_group.items() if key != "params")
        scaler = optimizer.get("loss_scaler", ...)
        for name in _SCALER if isinstance(scaler, dict) else ():
            setattr(self.engine.optimizer.loss_scaler, name, scaler[name])

    def _gather(self) -> None:
        """Rounds the partitions to the model's precision, and gathers those of all ranks."""
        zero = self.engine.optimizer
        if isinstance(zero, DeepSpeedZeroOptimizer_Stage3):
            zero._partition_all_parameters()
            for number in range(len(zero.fp16_groups)):
                zero._reassign_or_swap_out_partitioned_parameters(number)
            zero._post_step(set())
            return
        zero.update_lp_params()
        zero._hp_optimizer_states_linked = False
        if all(self._base.state.get(one.partition) for one in self._fragments().values()):
            zero._lazy_init_hp_params_optimizer_state()


def _view(
    base: torch.optim.Optimizer,
    parameters: list[list[torch.Tensor]],
    state: defaultdict[torch.Tensor, dict[str, object]],
) -> torch.optim.Optimizer:
    """Returns an optimizer of the same class and hyperparameters, with other parameters."""
    view: torch.optim.Optimizer = object.__new__(type(base))
    view.defaults, view.state = base.defaults, state
    groups_of = zip(base.param_groups, parameters, strict=True)
    view.param_groups = [{**group, "params": own} for group, own in groups_of]
    return view


def _parameters(zero: _Zero) -> list[list[torch.Tensor]]:
    """Returns the trained parameters of each group, in their order."""
    if isinstance(zero, BF16_Optimizer):
        return list(zero.bf16_groups)
    if isinstance(zero, DeepSpeedZeroOptimizer):
        return list(zero.bit16_groups)
    found: list[list[torch.Tensor]] = [[] for _ in zero.optimizer.param_groups]
    for number, parameters in enumerate(zero.fp16_groups):
        found[zero.sub_group_to_group_id[number]] += parameters
    return found


def _runs_of_groups(
    zero: DeepSpeedZeroOptimizer | BF16_Optimizer,
) -> Iterator[tuple[torch.Tensor, _Fragment]]:
    """Yields this rank's runs of ZeRO-1 and ZeRO-2, which cut the parameters of a group as one."""
    if isinstance(zero, BF16_Optimizer):
        partitions, placed = zero.fp32_groups_flat_partition, zero.bf16_groups
        offsets = [list(accumulate((one.numel() for one in group), initial=0))[:-1] for group in placed]
    else:
        partitions = zero.single_partition_of_fp32_groups
        placed, offsets = zero.round_robin_bit16_groups, zero.round_robin_bit16_offsets
    rows = zip(partitions, placed, offsets, zero.real_dp_process_group, strict=True)
    for partition, parameters, places, ranks in rows:
        first = distributed.get_rank(ranks) * partition.numel()
        for parameter, offset in zip(parameters, places, strict=True):
            begin = max(offset, first)
            length = max(0, min(offset + parameter.numel(), first + partition.numel()) - begin)
            at, start = (begin - first, begin - offset) if length else (0, 0)
            yield parameter, _Fragment(partition, at, length, tuple(parameter.shape), start)


def _own_runs(zero: DeepSpeedZeroOptimizer_Stage3) -> Iterator[tuple[torch.Tensor, _Fragment]]:
    """Yields this rank's runs of ZeRO-3, which cuts each parameter by itself."""
    for partition, parameters in zip(zero.fp32_partitioned_groups_flat, zero.fp16_groups, strict=True):
        at = 0
        for parameter in parameters:
            yield parameter, _run_of(parameter, partition, at)
            at += parameter.partition_numel()


def _run_of(parameter: _PartitionedParameter, partition: torch.Tensor, at: int) -> _Fragment:
    """Returns this rank's run of a parameter of ZeRO-3. The last ranks have padding."""
    size = parameter.partition_numel()
    start = min(distributed.get_rank(parameter.ds_process_group) * size, parameter.ds_numel)
    length = min(size, parameter.ds_numel - start)
    return _Fragment(partition, at, length, tuple(parameter.ds_shape), start)


def _reasons(engine: deepspeed.DeepSpeedEngine) -> Iterator[str]:
    """Yields the reasons why an engine cannot be saved."""
    if isinstance(engine, PipelineEngine):
        yield "it has pipeline parallelism, whose ranks have other layers"
    if engine.has_moe_layers:
        yield "it has experts (MoE), which ranks number from 0"
    stage = engine.zero_optimization_stage()
    if stage == 0:
        yield (
            "it has no ZeRO. Without bf16 and fp16, save sw.torch.TrainState(engine.module, engine.optimizer, "
            "engine.lr_scheduler). With them, set zero_optimization.stage to 1"
        )
    zero = engine.optimizer
    offloads = ("cpu_offload", "offload_optimizer", "offload_param", "offloaded_states")
    if any(getattr(zero, name, False) for name in offloads):
        yield "it offloads (offload_optimizer, offload_param or offload_states())"
    if engine.zero_hpz_partition_size() > 1:
        yield "it has secondary partitions (zero_hpz_partition_size)"
    if engine.random_ltd_enabled() or engine.curriculum_learning_enabled():
        yield "it has random-LTD or curriculum learning, whose state is not stored"
    if type(zero) not in (DeepSpeedZeroOptimizer, BF16_Optimizer, DeepSpeedZeroOptimizer_Stage3):
        yield f"its optimizer is a {type(zero).__name__}"
        return
    if getattr(zero, "torch_autocast_gradscaler", None) is not None:
        yield "it has torch_autocast with float16, whose GradScaler is not stored"
    base = zero.optimizer
    if any(group.get("use_muon") for group in base.param_groups):
        yield "it has Muon, which changes its momentum before the optimizer's step"
    is_sharded = isinstance(zero, DeepSpeedZeroOptimizer_Stage3)
    joined = max(zero.sub_group_to_group_id.values()) + 1 if is_sharded else len(zero.real_dp_process_group)
    if len(base.param_groups) != joined:
        yield f"DeepSpeed has joined the groups of its {type(base).__name__}. Give it one group of parameters"
    if any(
        distributed.get_world_size(ranks) != distributed.get_world_size()
        for ranks in (zero.sub_group_process_groups if is_sharded else zero.real_dp_process_group)
    ):
        yield "ranks have parts of the model (tensor parallelism)"
    if not adapter.only_copies(engine.module):
        yield "a module of its model has hooks or methods of its own for state_dict()"


def _is_flat(value: object, partition: torch.Tensor) -> bool:
    """True for a slot that has an element for each one of a partition."""
    return isinstance(value, torch.Tensor) and value.ndim == 1 and value.shape == partition.shape


def _part(slot: str, value: object, fragment: _Fragment) -> object:
    """Returns what a parameter has of a slot of its partition."""
    if _is_flat(value, fragment.partition):
        assert isinstance(value, torch.Tensor)
        return fragment.of(value)
    if isinstance(value, torch.Tensor):
        if value.ndim:
            raise MisuseError(
                f"the slot {slot!r} has the shape {tuple(value.shape)}, and its partition {tuple(fragment.partition.shape)}: "
                "it does not have an element for each parameter. Use another optimizer"
            )
        return value.clone()  # tied numbers would count the steps of all parameters together
    return value


def _same_of_all(slot: str) -> Callable[[object], str | None]:
    """Returns the check of a slot that a partition has once for all of its parameters."""
    first: list[object] = []

    def check(stored: object) -> str | None:
        if first and not equal(first[0], stored):
            return (
                f"parameters of one group were saved with {slot} {first[0]} and {stored}, but DeepSpeed has one {slot} for all of them. "
                "Put them into groups of their own"
            )
        first[:] = [stored]
        return None

    return check


def _at(stored: object, *keys: str | None) -> object:
    """Returns the entry of nested mappings, or ``None``."""
    for key in keys:
        stored = stored.get(key) if isinstance(stored, Mapping) else None
    return stored
