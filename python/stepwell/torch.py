"""PyTorch: :class:`TrainState`, a training run's model, optimizers and schedulers as one state that
no topology shows in.

Importing this imports torch. ``stepwell.torch`` is imported when it is first used
(``sw.torch.TrainState``).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, final

import numpy as np
import torch

from ._adapters import CastOf, Children, Follows, Opened
from ._adapters import torch as adapter
from ._checks import flag, shown
from ._paths import Component
from ._restore.template import Checked, Maybe
from ._state.specs import AS_STORED, ArraySpec, Replicated
from .errors import MismatchError, MisuseError

__all__ = ["TrainState"]

#: The name or number of an optimizer or scheduler; ``None`` where there is one.
_Name: TypeAlias = str | int | None
#: The hyperparameters of a group, which torch has no types for.
_Group: TypeAlias = dict[str, Any]
#: A value from a file, or a value of an optimizer: each function looks at its type.
_Stored: TypeAlias = Any


class _Scheduler(Protocol):
    def state_dict(self) -> dict[str, Any]: ...  # as torch declares it

    def load_state_dict(self, state: dict[str, Any], /) -> object: ...  # as torch declares it


#: The names that wrappers insert into parameter names. Stored names are those of the wrapped model.
_WRAPPERS = frozenset({"_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"})


@final
class TrainState:
    """A model, its optimizers and their schedulers, as one entry of a state::

        state = {"train": sw.torch.TrainState(model, optimizer, scheduler), "step": 0}

    ``optimizers`` and ``scheduler`` are one each, or several: by name in a dict, or in a list. The
    stored entries are:

    * ``model/<name>``: parameters and persistent buffers;
    * ``optimizer/state/<parameter's name>/<slot>``: by name, never by number;
    * ``optimizer/groups``: each group's hyperparameters, with the names of its parameters;
    * ``scheduler``: what its ``state_dict()`` gives.

    (With several, each has its name or number between: ``optimizer/<name>/state/…``.) Names are
    those of the model without DDP, FSDP, ``torch.compile`` and activation checkpointing around it.

    As ``into=``, parameters, buffers and slots that are there are filled in place. New slots are
    made without a fake ``step()``. They get the parameter's device, memory format and placements,
    and its dtype and changes of shape. Slots that were not there at the save are removed.
    Hyperparameters of the checkpoint win. Frozen parameters need no slots. A group takes the
    hyperparameters that its parameters had at the save, however they were grouped.

    Buffers of a model in ``DistributedDataParallel`` may differ between ranks (the statistics of
    BatchNorm). Rank 0's are stored, as DDP itself broadcasts them. ``replicated`` names further
    tensors of this kind by pattern: ``replicated="*.running_*"``.

    With ``trainable_only=True`` (LoRA, a frozen encoder) the model's part is what requires
    gradients: these parameters, their slots, and the buffers of modules that own one of them. The
    rest of the model comes from elsewhere, and a restore leaves it alone.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizers: torch.optim.Optimizer
        | Sequence[torch.optim.Optimizer]
        | Mapping[str, torch.optim.Optimizer]
        | None = None,
        scheduler: object = None,
        *,
        replicated: str | Sequence[str] = (),
        trainable_only: bool = False,
    ) -> None:
        if not isinstance(model, torch.nn.Module):
            raise MisuseError(f"TrainState takes a torch.nn.Module, not {shown(model)}")
        self.model = model
        self.trainable_only = flag(trainable_only, "trainable_only")
        #: The optimizers, by name or number; by ``None`` where there is one.
        self.optimizers: dict[_Name, torch.optim.Optimizer] = _by_name(optimizers)
        self.schedulers: dict[_Name, _Scheduler] = _by_name(scheduler)
        for candidate in self.schedulers.values():
            if isinstance(candidate, torch.optim.Optimizer):
                raise MisuseError(
                    f"scheduler= takes a learning rate scheduler, not {type(candidate).__qualname__}"
                )
        for name, optimizer in self.optimizers.items():
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise MisuseError(
                    f"TrainState takes optimizers of torch.optim, not {shown(optimizer)} ({name!r})"
                )
            _refuse_state_elsewhere(optimizer)
        _refuse_flat_shards(model)
        given = [replicated] if isinstance(replicated, str) else list(replicated)
        #: Patterns of the names of parameters and buffers that may differ between ranks.
        self._replicated = [
            re.compile(re.escape(one).replace(r"\*", ".*").replace(r"\?", ".")) for one in given
        ]
        for one, pattern in zip(given, self._replicated, strict=True):
            if not any(pattern.fullmatch(name) for name in self._tensors()):
                raise MisuseError(f"replicated={one!r} matches no parameter or buffer of the model")
        self._names()

    # ---- what it is made of
    # ---------------------------------------------------------------------------------------

    def _names(self) -> dict[torch.Tensor, str]:
        """Parameter → its name; of a tied one the first."""
        adapter.reshard(self.model)
        names: dict[torch.Tensor, str] = {}
        plain = plain_names(self.model)
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            names.setdefault(parameter, plain(name))
        for which, optimizer in self.optimizers.items():
            for number, group in enumerate(optimizer.param_groups):
                for parameter in group["params"]:
                    if parameter not in names:
                        where = "" if which is None else f" of optimizer {which!r}"
                        raise MisuseError(
                            f"group {number}{where} has a parameter of shape {tuple(parameter.shape)} that is none of the model's; "
                            "give TrainState the model that the optimizer was made for"
                        )
        return names

    def _tensors(self) -> dict[str, object]:
        plain, kept = plain_names(self.model), self._kept()
        return {
            plain(str(name)): value
            for name, value in adapter.tensors_of(self.model).items()
            if kept is None or plain(str(name)) in kept
        }

    def _kept(self) -> set[str] | None:
        """Names of the model's tensors that belong to the state; ``None``: all."""
        if not self.trainable_only:
            return None
        plain, kept = plain_names(self.model), set[str]()
        for prefix, module in self.model.named_modules(remove_duplicate=False):
            own = dict(module.named_parameters(prefix, recurse=False, remove_duplicate=False))
            trained = {name for name, parameter in own.items() if parameter.requires_grad}
            if trained:
                trained |= {name for name, _ in module.named_buffers(prefix, recurse=False)}
            kept |= {plain(name) for name in trained}
        if not kept:
            raise MisuseError("trainable_only=True, and no parameter of the model requires gradients")
        return kept

    def _is_kept(self, parameter: torch.Tensor) -> bool:
        return parameter.requires_grad or not self.trainable_only

    def _drifting(self) -> set[str]:
        """The names of tensors that may differ between ranks: rank 0's are stored."""
        plain = plain_names(self.model)
        found = {
            name for name in self._tensors() if any(pattern.fullmatch(name) for pattern in self._replicated)
        }
        if any(cls.__name__ == "DistributedDataParallel" for cls in type(_unwrapped(self.model)).__mro__):
            found |= {plain(name) for name, _ in self.model.named_buffers()}
        return found

    def state_dict(self) -> dict[str, object]:
        """The state, as it is stored. Tensors are those of the run, not copies. Those that may
        differ between ranks are ``sw.Replicated``."""
        names = self._names()
        optimizers = {
            which: {"state": _slots(optimizer, names, self._is_kept), "groups": _groups(optimizer, names)}
            for which, optimizer in self.optimizers.items()
        }
        drifting = self._drifting()
        model = {
            name: Replicated(value) if name in drifting else value for name, value in self._tensors().items()
        }
        state: dict[str, object] = {"model": model}
        if optimizers:
            state["optimizer"] = _joined(optimizers)
        if self.schedulers:
            state["scheduler"] = _joined(
                {which: scheduler.state_dict() for which, scheduler in self.schedulers.items()}
            )
        return state

    def load_state_dict(self, state: Mapping[str, _Stored]) -> None:
        """Takes a state that :meth:`state_dict` gave, of this run or another one."""
        names = self._names()
        for which, optimizer in self.optimizers.items():
            stored = _one(state["optimizer"], which)
            wrong = [_wrong_groups(optimizer, names, stored["groups"])]
            wrong += [_wrong_slots(optimizer, slots) for slots in stored["state"].values()]
            for why in filter(None, wrong):
                raise MisuseError(why)
        model = {
            name: value.value if isinstance(value, Replicated) else value
            for name, value in state["model"].items()
        }
        _Model(self.model, self._kept()).load_state_dict(model)
        self._take(state, model)
        for which, scheduler in self.schedulers.items():
            scheduler.load_state_dict(_one(state["scheduler"], which))

    def _take(self, state: Mapping[str, object], model: Mapping[str, object]) -> None:
        names = self._names()
        for which, optimizer in self.optimizers.items():
            stored = _one(state["optimizer"], which)
            if stored["groups"] is AS_STORED and not stored["state"]:
                continue  # nothing of it was read: it stays as it is
            if stored["groups"] is not AS_STORED:
                _take_groups(optimizer, names, stored["groups"])
            _take_slots(optimizer, names, stored["state"], model)
            # As torch does it: what a class holds to whatever is stored (AdamW, that its decay is
            # decoupled), and what older versions stored in another way.
            optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})

    # ---- a restore into it
    # ---------------------------------------------------------------------------------------

    def _stepwell_open(self) -> Opened:
        """Returns the parts for a restore. Tensors are filled where they are; slots that are not
        there yet are made once the stored ones are known."""
        names = self._names()
        model: object = (
            self._tensors() if adapter.only_copies(self.model) else _Model(self.model, self._kept())
        )
        #: The names of renamed parameters, by their stored names.
        renamed: dict[str, str] = {}

        def groups_of(stored: Sequence[_Group]) -> list[_Group]:
            return [
                {**group, "params": [renamed.get(name, name) for name in group["params"]]} for group in stored
            ]

        def wrong_groups(optimizer: torch.optim.Optimizer, stored: _Stored) -> str | None:
            return _wrong_groups(optimizer, names, groups_of(stored))

        def children(stored: object, moved: dict[str, str], cast_of: CastOf) -> Children:
            renamed.update(moved)
            was = {name: name for name in names.values() if name not in moved}
            was |= {new: old for old, new in moved.items()}
            parts: Children = [(("k", "model"), model)]
            optimizers: dict[_Name, object] = {}
            for which, optimizer in self.optimizers.items():
                above = ("optimizer",) if which is None else ("optimizer", which)
                place = _slots_of(which)
                slots: dict[str, object] = {}
                for parameter in filter(self._is_kept, _parameters(optimizer)):
                    name = names[parameter]
                    slots[name] = _wanted_slots(
                        optimizer,
                        parameter,
                        _at(stored, *above, "state", was.get(name)),
                        _at(stored, "model", was.get(name)),
                        name,
                        partial(_cast_below, cast_of, (*place, ("k", name))),
                    )
                optimizers[which] = {
                    "state": slots,
                    "groups": Checked(partial(wrong_groups, optimizer)),
                }
            if optimizers:
                parts.append((("k", "optimizer"), _joined(optimizers)))
            if self.schedulers:
                parts.append((("k", "scheduler"), _joined(self.schedulers)))
            return parts

        def close(pairs: list[tuple[_Stored, _Stored]], fill: bool) -> object:
            state = dict(pairs)
            for which in self.optimizers:
                stored = _one(state["optimizer"], which)
                stored["state"] = _only_stored(stored["state"])
                if renamed and stored["groups"] is not AS_STORED:
                    stored["groups"] = groups_of(stored["groups"])
                if not fill:
                    if stored["groups"] is AS_STORED:  # kept
                        stored["groups"] = _groups(self.optimizers[which], names)
                    stored.update(_tensors_in(stored))
            if not fill:
                return state
            self._take(state, {})
            return self

        slots = [_slots_of(which) for which in self.optimizers]
        follows = Follows((("k", "model"),), [*self._tensors()], slots)
        unfillable = adapter.unfillable(self._tensors())
        fresh = children(None, {}, lambda _: None)
        return Opened(fresh, close, unfillable, settle=children, follows=follows)


@final
class _Model:
    """A model whose loading does more than copy: its own ``load_state_dict`` is called, with the
    names that it has."""

    _takes_tensors = True

    def __init__(self, model: torch.nn.Module, kept: set[str] | None = None) -> None:
        self._model = model
        self._kept = kept

    def state_dict(self) -> dict[str, object]:
        """Tensors and extra state, by plain names."""
        plain = plain_names(self._model)
        state = {plain(str(name)): value for name, value in self._model.state_dict().items()}
        return state if self._kept is None else {name: state[name] for name in state if name in self._kept}

    def load_state_dict(self, state: Mapping[str, _Stored]) -> None:
        """Hands it to the model."""
        plain = plain_names(self._model)
        own = {plain(str(name)): name for name in self._model.state_dict()}
        self._model.load_state_dict(
            {own.get(name, name): value for name, value in state.items()}, strict=self._kept is None
        )


#: Classes (torch's, and of the same name elsewhere) that hold a model as ``module``.
_HOLDERS = frozenset({"DataParallel", "DistributedDataParallel"})


def _unwrapped(model: torch.nn.Module) -> torch.nn.Module:
    """The model inside ``torch.compile``."""
    while isinstance(wrapped := model._modules.get("_orig_mod"), torch.nn.Module):
        model = wrapped
    return model


def plain_names(model: torch.nn.Module) -> Callable[[str], str]:
    """Name of a parameter → its name in the model that wrappers were put around."""
    is_held = any(cls.__name__ in _HOLDERS for cls in type(_unwrapped(model)).__mro__)

    def plain(name: str) -> str:
        parts = [part for part in name.split(".") if part not in _WRAPPERS]
        return ".".join(parts[1:] if is_held and parts[0] == "module" else parts)

    return plain


def _refuse_state_elsewhere(optimizer: torch.optim.Optimizer) -> None:
    """Raises for an optimizer whose state is not (all) in what its ``state`` says of parameters: a
    wrapper around another one, mostly."""
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        raise MisuseError(
            f"{type(optimizer).__name__} has a state_dict() of its own, so that TrainState cannot know where its state is: give TrainState the optimizer that is inside, "
            "or none, and save what its state_dict() gives beside it"
        )


def _refuse_flat_shards(model: torch.nn.Module) -> None:
    """Raises for modules of FSDP1, whose parameters are flat shards that do not say of what."""
    for name, module in model.named_modules():
        group = getattr(module, "process_group", None)
        if type(module).__name__ == "FullyShardedDataParallel" and group is not None and group.size() > 1:
            raise MisuseError(
                f"{f'{name!r} of the model' if name else 'the model'} is sharded by FullyShardedDataParallel (FSDP1) over {group.size()} processes, whose parameters do not say what they "
                "are parts of; shard it with fully_shard (FSDP2), or save what get_state_dict() of torch.distributed.checkpoint.state_dict gives"
            )


def _by_name(given: Any) -> dict[_Name, Any]:  # one object, or several of its kind
    if given is None:
        return {}
    if isinstance(given, Mapping):
        return dict(given)
    if isinstance(given, (list, tuple)):
        return dict(enumerate(given))
    return {None: given}


def _joined(by_name: Mapping[_Name, object]) -> object:
    return by_name[None] if None in by_name else dict(by_name)


def _one(stored: _Stored, which: _Name) -> _Stored:
    if which is None:
        return stored
    if which not in stored:
        raise MisuseError(f"{which!r} is not among the stored ones: {list(stored)}")
    return stored[which]


def _slots_of(which: _Name) -> tuple[Component, ...]:
    """The place of an optimizer's slots."""
    if which is None:
        return (("k", "optimizer"), ("k", "state"))
    return (("k", "optimizer"), ("i" if isinstance(which, int) else "k", which), ("k", "state"))


def _cast_below(cast_of: CastOf, above: tuple[Component, ...], slot: str | int) -> torch.dtype | None:
    """The dtype that ``cast=`` names for a slot."""
    found = cast_of((*above, ("i" if isinstance(slot, int) else "k", slot)))
    return None if found is None else adapter.torch_dtype(found)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    for group in optimizer.param_groups:
        yield from group["params"]


def _slots(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    is_kept: Callable[[torch.Tensor], bool],
) -> dict[str, dict[str, object]]:
    strange = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
    if strange:
        raise MisuseError(
            f"{type(optimizer).__name__} has state of {strange[0]!r}, which is no parameter; save its state_dict() beside a TrainState(model)"
        )
    return {
        names[parameter]: dict(optimizer.state[parameter])
        for parameter in _parameters(optimizer)
        if optimizer.state.get(parameter) and is_kept(parameter)
    }


def _groups(optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str]) -> list[_Group]:
    return [
        {**group, "params": [names[parameter] for parameter in group["params"]]}
        for group in optimizer.param_groups
    ]


def _stored_groups(
    optimizer: torch.optim.Optimizer, names: Mapping[torch.Tensor, str], stored: Sequence[_Group]
) -> list[_Group]:
    """For each group the hyperparameters that its parameters had; none where none of them was
    stored."""
    group_of = {name: number for number, group in enumerate(stored) for name in group["params"]}
    taken: list[_Group] = []
    for number, group in enumerate(optimizer.param_groups):
        found = sorted({group_of[names[one]] for one in group["params"] if names[one] in group_of})
        first = {key: value for key, value in stored[found[0]].items() if key != "params"} if found else {}
        for other in found[1:]:
            differing = [key for key, value in first.items() if not _equal(value, stored[other].get(key))]
            if differing:
                raise MisuseError(
                    f"group {number} has parameters that were saved in groups {found}, which differ in {', '.join(differing)}; "
                    "group them as they were, or make those hyperparameters equal"
                )
        taken.append(first)
    return taken


def _take_groups(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    stored: Sequence[_Group],
) -> None:
    """Gives each group the hyperparameters that its parameters had."""
    for group, taken in zip(optimizer.param_groups, _stored_groups(optimizer, names, stored), strict=True):
        for key, value in taken.items():
            group[key] = _like(group.get(key), value)


#: Entries that schedulers and torch itself add to groups beside the optimizer's hyperparameters.
_BESIDE = frozenset(
    {"initial_lr", "max_lr", "min_lr", "max_momentum", "base_momentum", "swa_lr", "param_names"}
)

#: The slots of torch's own optimizers: those that every parameter has that was stepped, and those
#: that an option adds.
_SLOTS: dict[str, tuple[set[str], set[str]]] = {
    "Adadelta": ({"step", "square_avg", "acc_delta"}, set()),
    "Adagrad": ({"step", "sum"}, set()),
    "Adam": ({"step", "exp_avg", "exp_avg_sq"}, {"max_exp_avg_sq"}),
    "AdamW": ({"step", "exp_avg", "exp_avg_sq"}, {"max_exp_avg_sq"}),
    "Adamax": ({"step", "exp_avg", "exp_inf"}, set()),
    "ASGD": ({"step", "eta", "mu", "ax"}, set()),
    "NAdam": ({"step", "mu_product", "exp_avg", "exp_avg_sq"}, set()),
    "RAdam": ({"step", "exp_avg", "exp_avg_sq"}, set()),
    "RMSprop": ({"step", "square_avg"}, {"momentum_buffer", "grad_avg"}),
    "Rprop": ({"step", "prev", "step_size"}, set()),
    "SGD": (set(), {"momentum_buffer"}),
    "SparseAdam": ({"step", "exp_avg", "exp_avg_sq"}, set()),
}
_KNOWN_SLOTS = set[str]().union(*(always | some for always, some in _SLOTS.values()))

_OTHER_KIND = (
    "restore into an optimizer of the kind that was saved; to take the model alone, "
    'restore into TrainState(model) with unexpected="ignore"'
)


def _wrong_groups(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    stored: Sequence[_Group],
) -> str | None:
    """Why stored groups are not those of such an optimizer. A hyperparameter that is not stored
    keeps its value, as one that a newer torch has added; one that is stored and not known here is
    nothing to torch as long as it is off."""
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
                f"group {number} was saved with {', '.join(strange)}{without}, which is not what the groups of this {type(optimizer).__name__} have; "
                f"{_OTHER_KIND}. What is none of the optimizer's own has to be in the group before"
            )
    return None


def _wrong_slots(optimizer: torch.optim.Optimizer, stored: object) -> str | None:
    """Why stored slots are not those of such an optimizer, where that is one of torch's own."""
    cls = type(optimizer)
    if cls.__name__ not in _SLOTS or getattr(torch.optim, cls.__name__, None) is not cls:
        return None
    if not isinstance(stored, Mapping) or not stored:
        return None
    always, some = _SLOTS[cls.__name__]
    strange = [slot for slot in stored if slot in _KNOWN_SLOTS and slot not in always | some]
    lacking = sorted(slot for slot in always if slot not in stored)
    if not strange and not lacking:
        return None
    return (
        f"stored are the slots {', '.join(map(str, stored))}, and {cls.__name__} has {', '.join(sorted(always | some))}; "
        f"{_OTHER_KIND}"
    )


def _equal(one: object, other: object) -> bool:
    return (
        bool((torch.as_tensor(one) == torch.as_tensor(other)).all())
        if hasattr(one, "shape")
        else one == other
    )


def _like(own: _Stored, value: _Stored) -> _Stored:
    """A stored hyperparameter as the group has it: one that is a tensor (for captured graphs) stays
    that very tensor."""
    if isinstance(own, torch.Tensor):
        with torch.no_grad():
            own.copy_(torch.as_tensor(_tensor(value)))
        return own
    if type(own) in (tuple, list) and isinstance(value, (tuple, list)) and len(own) == len(value):
        return type(own)(_like(one, other) for one, other in zip(own, value, strict=True))
    found = _tensor(value)
    return found.item() if isinstance(found, torch.Tensor) and isinstance(own, (int, float)) else found


def _tensor(value: _Stored) -> _Stored:
    """An array as it was read, as a tensor."""
    if isinstance(value, torch.Tensor) or not hasattr(value, "__array_interface__"):
        return value
    return adapter.from_numpy(value)


def _wanted(slots: Mapping[object, object]) -> dict[object, object]:
    """Returns the targets of existing slots: tensors and numbers are filled in place. Containers (a
    growing history) come back with their stored length."""
    return {
        slot: AS_STORED if value is None or isinstance(value, (Mapping, list, tuple)) else value
        for slot, value in slots.items()
    }


def _tensors_in(value: _Stored) -> _Stored:
    """A nested value with tensors in place of arrays."""
    if type(value) is dict:
        return {key: _tensors_in(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_tensors_in(one) for one in value)
    return adapter.from_numpy(value) if isinstance(value, np.ndarray) else value


def _at(stored: object, *keys: _Name) -> object:
    """The entry of nested mappings, or ``None``."""
    for key in keys:
        stored = stored.get(key) if isinstance(stored, Mapping) else None
    return stored


def _wanted_slots(
    optimizer: torch.optim.Optimizer,
    parameter: torch.Tensor,
    stored: object,
    source: object,
    name: str,
    cast_of: Callable[[str | int], torch.dtype | None],
) -> Maybe:
    """The target of a restore for the slots of a parameter. ``stored`` and ``source`` are the
    outlines of the stored slots and of the stored parameter. ``cast_of`` gives the dtype that the
    caller asks for."""
    there = optimizer.state.get(parameter)
    if there:
        return Maybe(_wanted(there))
    if type(stored) is not dict or _wrong_slots(optimizer, stored) is not None:
        return Maybe(Checked(partial(_wrong_slots, optimizer)))
    slots = {
        slot: _new_slot(slot, one, parameter, source, name, cast_of(slot)) for slot, one in stored.items()
    }
    return Maybe(slots, is_new=True)


def _new_slot(
    slot: str | int,
    stored: _Stored,
    parameter: torch.Tensor,
    source: object,
    name: str,
    cast: torch.dtype | None,
) -> object:
    """Memory for a stored slot. It gets the dtype that the caller asks for, else that of its
    parameter, unless it was stored wider than the parameter. Its shape differs from what is stored
    in the same way as the parameter's."""
    if type(stored) is dict:
        return {key: _new_slot(slot, one, parameter, source, name, cast) for key, one in stored.items()}
    if type(stored) in (list, tuple):
        return type(stored)(_new_slot(slot, one, parameter, source, name, cast) for one in stored)
    if not isinstance(stored, ArraySpec) or stored.shape is None or stored.dtype is None:
        return AS_STORED
    dtype = adapter.torch_dtype(stored.dtype)
    is_counter = slot == "step" or (not stored.shape and parameter.ndim > 0)
    if dtype is None or is_counter or hasattr(parameter, "global_shape"):
        return AS_STORED
    shape, own = stored.shape, tuple(parameter.shape)
    if isinstance(source, ArraySpec) and source.dtype is not None and source.shape is not None:
        follows = _follows(dtype, adapter.torch_dtype(source.dtype), parameter)
        if source.shape != own:
            if not len(shape) == len(source.shape) == len(own):
                raise MismatchError(
                    f"a slot cannot follow its parameter from shape {source.shape} to {own}: {slot} of {name} "
                    f'has the shape {shape}. Restore TrainState(model) alone, with unexpected="ignore"'
                )
            sizes = zip(shape, source.shape, own, strict=True)
            shape = tuple(new if size == old else size for size, old, new in sizes)
    else:
        follows = _follows(dtype, None, parameter)
    if cast is None:
        cast = parameter.dtype if follows else dtype
    return adapter.new_slot(parameter, shape, cast, shape != stored.shape)


def _follows(slot: torch.dtype, source: torch.dtype | None, parameter: torch.Tensor) -> bool:
    """True if a slot of a stored dtype takes the dtype of its parameter, as torch's own
    ``load_state_dict`` has it. A slot that is wider than its stored parameter (``source``) keeps
    its own."""
    if slot == source:
        return True
    is_number = slot.is_floating_point or slot.is_complex
    if not is_number or slot.is_complex != parameter.is_complex():
        return False
    return source is None or slot.itemsize <= source.itemsize


def _only_stored(slots_of: Mapping[str, object]) -> dict[str, dict[object, object]]:
    """Parameter's name → its slots, without what was not stored."""
    stored = {
        name: {slot: value for slot, value in slots.items() if value is not ...}
        for name, slots in slots_of.items()
        if isinstance(slots, Mapping)
    }
    return {name: slots for name, slots in stored.items() if slots}


def _take_slots(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    stored: Mapping[str, Mapping[str, object]],
    model: Mapping[str, object],
) -> None:
    """Gives each parameter the slots that are stored, and no others. A slot that was filled stays
    the same tensor. ``model`` has the stored parameters whose dtype slots still have."""
    for group in optimizer.param_groups:
        counts_on_device = bool(group.get("capturable") or group.get("fused"))
        for parameter in group["params"]:
            slots = stored.get(names[parameter])
            if not slots:
                optimizer.state.pop(parameter, None)
                continue
            own = optimizer.state[parameter]
            for slot in [slot for slot in own if slot not in slots]:
                del own[slot]
            dtype = getattr(_tensor(model.get(names[parameter])), "dtype", None)
            for slot, value in slots.items():
                if own.get(slot, ...) is not value:
                    own[slot] = _placed(slot, _tensor(value), parameter, counts_on_device, dtype)
            step = own.get("step")
            if counts_on_device and isinstance(step, torch.Tensor):
                # A slot that was filled on the host: the optimizer reads it on the device.
                own["step"] = step.to(parameter.device, torch.float32)


def _placed(
    slot: str, value: _Stored, parameter: torch.Tensor, counts_on_device: bool, stored: torch.dtype | None
) -> object:
    """A slot where its parameter is. It takes the parameter's dtype, unless it is wider than the
    ``stored`` one; ``None``: its dtype is decided."""
    if isinstance(value, dict):
        return {
            key: _placed(slot, _tensor(one), parameter, counts_on_device, stored)
            for key, one in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(_placed(slot, _tensor(one), parameter, counts_on_device, stored) for one in value)
    if not isinstance(value, torch.Tensor) or adapter.is_distributed(value):
        return value
    if slot == "step":
        # Counters stay on the host, unless the optimizer reads them on the device.
        return value.to(parameter.device, torch.float32) if counts_on_device else value
    if parameter.ndim and not value.ndim:
        return value.to(parameter.device)
    follows = stored is not None and _follows(value.dtype, stored, parameter)
    dtype = parameter.dtype if follows else value.dtype
    made = adapter.new_slot(parameter, tuple(value.shape), dtype, zeros=False)
    if adapter.is_distributed(made):
        return adapter.part_like(made, value, dtype)
    if (made.device, made.dtype, made.stride()) == (value.device, value.dtype, value.stride()):
        return value
    with torch.no_grad():
        made.copy_(value)
    return made


def optimizers_of(given: object) -> list[torch.optim.Optimizer]:
    """The optimizers that are to be guarded: one, or those of a :class:`TrainState`."""
    found: list[_Stored] = list(given.optimizers.values()) if isinstance(given, TrainState) else [given]
    for one in found:
        if isinstance(one, type) or not callable(getattr(one, "register_step_pre_hook", None)):
            raise MisuseError(
                f"attach() takes an optimizer of torch.optim or a TrainState, not {shown(one)}: it has no register_step_pre_hook(); "
                "put update_guard() around what changes the state"
            )
    _refuse_steps_in_backward(given, found)
    return found


def _refuse_steps_in_backward(given: object, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raises where a hook of a parameter runs as soon as its gradient is there: an optimizer that
    steps in it changes the state before any ``step()`` that waits."""
    names = given._names() if isinstance(given, TrainState) else {}
    parameters = dict.fromkeys([*names, *(one for optimizer in optimizers for one in _parameters(optimizer))])
    for parameter in parameters:
        if getattr(parameter, "_post_accumulate_grad_hooks", None) or hasattr(
            parameter, "_in_backward_optimizers"
        ):
            which = names.get(parameter, f"a parameter of shape {tuple(parameter.shape)}")
            raise MisuseError(
                f"attach() cannot wait for an optimizer that steps inside backward(): {which} has a hook that runs there (register_post_accumulate_grad_hook); "
                "put `with mgr.update_guard():` around backward() instead, or remove the hook before attach() if it changes nothing"
            )
