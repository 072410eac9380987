"""PyTorch: :class:`TrainState`, the model, optimizers and schedulers of a training run as one state
that does not depend on the topology.

Importing this imports torch. ``stepwell.torch`` is imported when it is first used
(``sw.torch.TrainState``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Protocol, TypeAlias, final

import numpy as np
import torch

from ._adapters import CastOf, Children, Follows, Opened
from ._adapters import torch as adapter
from ._adapters.torch_groups import Group, Stored, groups, take_groups, wrong_groups
from ._adapters.torch_model import OwnLoading, plain_names, unwrapped
from ._adapters.torch_slots import (
    only_stored,
    parameters,
    slots_by_name,
    take_slots,
    wanted_slots,
    wrong_slots,
)
from ._checks import flag, shown
from ._paths import Component
from ._restore.template import Checked
from ._state.specs import AS_STORED, Replicated
from .errors import MisuseError

__all__ = ["TrainState"]

#: The name or number of an optimizer or scheduler. ``None`` if there is only one.
_Name: TypeAlias = str | int | None


class _Scheduler(Protocol):
    def state_dict(self) -> dict[str, Any]: ...  # as torch declares it

    def load_state_dict(self, state: dict[str, Any], /) -> object: ...  # as torch declares it


@final
class TrainState:
    """A model, its optimizers and their schedulers, as one entry of a state::

        state = {"train": sw.torch.TrainState(model, optimizer, scheduler), "step": 0}

    The stored entries are:

    * ``model/<name>``: parameters and persistent buffers;
    * ``optimizer/state/<parameter's name>/<slot>``: the slots, by the name of their parameter;
    * ``optimizer/groups``: each group's hyperparameters, with the names of its parameters;
    * ``scheduler``: the scheduler's ``state_dict()``.

    (Several have their name or number in the path: ``optimizer/<name>/state/…``.) The names of
    parameters are those in the model without DDP, FSDP, ``torch.compile`` or activation
    checkpointing.

    A restore into it fills parameters, buffers and existing slots in place. It makes new slots
    without a fake ``step()``. They get the parameter's device, memory format, placements and dtype,
    and follow changes of its shape. Slots that were not saved are removed. Frozen parameters need
    no slots. Each group gets the hyperparameters that its parameters had at the save, even if they
    were grouped in another way.

    Buffers of a model in ``DistributedDataParallel`` may differ between ranks (the statistics of
    BatchNorm). Rank 0's are stored, as DDP itself broadcasts them.

    Args:
        model: the model, also in a wrapper.
        optimizers: an optimizer, or several in a dict (by name) or a list.
        scheduler: a learning rate scheduler, or several in a dict (by name) or a list.
        replicated: patterns of the names of further tensors that may differ between ranks, such as
            ``"*.running_*"``. Rank 0's are stored.
        trainable_only: store only the parameters that require gradients, their slots, and the
            buffers of modules that own such a parameter (LoRA, a frozen encoder). A restore does
            not change the rest of the model.
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
        #: The optimizers, by name or number. A single one has the key ``None``.
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

    # ---- its parts
    # ---------------------------------------------------------------------------------------

    def _names(self) -> dict[torch.Tensor, str]:
        """Returns the name of each parameter. A tied parameter has its first name."""
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
                            f"group {number}{where} has a parameter of shape {tuple(parameter.shape)} that is not in the model. "
                            "Pass TrainState the model of that optimizer"
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
        """Returns the names of the model's tensors that are stored. ``None``: all of them."""
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
        """Returns the names of tensors that may differ between ranks. Rank 0's are stored."""
        plain = plain_names(self.model)
        found = {
            name for name in self._tensors() if any(pattern.fullmatch(name) for pattern in self._replicated)
        }
        if any(cls.__name__ == "DistributedDataParallel" for cls in type(unwrapped(self.model)).__mro__):
            found |= {plain(name) for name, _ in self.model.named_buffers()}
        return found

    def state_dict(self) -> dict[str, object]:
        """Returns the state as it is stored. Tensors are those of the run, not copies. Those that
        may differ between ranks are ``sw.Replicated``."""
        names = self._names()
        optimizers = {
            which: {
                "state": slots_by_name(optimizer, names, self._is_kept),
                "groups": groups(optimizer, names),
            }
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

    def load_state_dict(self, state: Mapping[str, Stored]) -> None:
        """Loads a state from :meth:`state_dict`, of this run or another one."""
        names = self._names()
        for which, optimizer in self.optimizers.items():
            stored = _one(state["optimizer"], which)
            wrong = [wrong_groups(optimizer, names, stored["groups"])]
            wrong += [wrong_slots(optimizer, slots) for slots in stored["state"].values()]
            for why in filter(None, wrong):
                raise MisuseError(why)
        model = {
            name: value.value if isinstance(value, Replicated) else value
            for name, value in state["model"].items()
        }
        OwnLoading(self.model, self._kept()).load_state_dict(model)
        self._take(state, model)
        for which, scheduler in self.schedulers.items():
            scheduler.load_state_dict(_one(state["scheduler"], which))

    def _take(self, state: Mapping[str, object], model: Mapping[str, object]) -> None:
        names = self._names()
        for which, optimizer in self.optimizers.items():
            stored = _one(state["optimizer"], which)
            if stored["groups"] is AS_STORED and not stored["state"]:
                continue  # nothing was read, so the optimizer stays unchanged
            if stored["groups"] is not AS_STORED:
                take_groups(optimizer, names, stored["groups"])
            take_slots(optimizer, names, stored["state"], model)
            # Torch's own loading calls this too. It restores fixed entries of a class (such as
            # AdamW's decoupled decay), and converts the state of older versions.
            optimizer.__setstate__({"state": optimizer.state, "param_groups": optimizer.param_groups})

    # ---- a restore into it
    # ---------------------------------------------------------------------------------------

    def _stepwell_open(self) -> Opened:
        """Returns the parts for a restore. Existing tensors are filled in place. New slots are made
        once the stored ones are known."""
        names = self._names()
        model: object = (
            self._tensors() if adapter.only_copies(self.model) else OwnLoading(self.model, self._kept())
        )
        #: The names of renamed parameters, by their stored names.
        renamed: dict[str, str] = {}

        def groups_of(stored: Sequence[Group]) -> list[Group]:
            return [
                {**group, "params": [renamed.get(name, name) for name in group["params"]]} for group in stored
            ]

        def wrong(optimizer: torch.optim.Optimizer, stored: Stored) -> str | None:
            return wrong_groups(optimizer, names, groups_of(stored))

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
                for parameter in filter(self._is_kept, parameters(optimizer)):
                    name = names[parameter]
                    slots[name] = wanted_slots(
                        optimizer,
                        parameter,
                        _at(stored, *above, "state", was.get(name)),
                        _at(stored, "model", was.get(name)),
                        name,
                        partial(_cast_below, cast_of, (*place, ("k", name))),
                    )
                optimizers[which] = {
                    "state": slots,
                    "groups": Checked(partial(wrong, optimizer)),
                }
            if optimizers:
                parts.append((("k", "optimizer"), _joined(optimizers)))
            if self.schedulers:
                parts.append((("k", "scheduler"), _joined(self.schedulers)))
            return parts

        def close(pairs: list[tuple[Stored, Stored]], fill: bool) -> object:
            state = dict(pairs)
            for which in self.optimizers:
                stored = _one(state["optimizer"], which)
                stored["state"] = only_stored(stored["state"])
                if renamed and stored["groups"] is not AS_STORED:
                    stored["groups"] = groups_of(stored["groups"])
                if not fill:
                    if stored["groups"] is AS_STORED:  # kept
                        stored["groups"] = groups(self.optimizers[which], names)
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


def _refuse_state_elsewhere(optimizer: torch.optim.Optimizer) -> None:
    """Raises for an optimizer with its own ``state_dict``, mostly a wrapper around another one: its
    ``state`` may not contain everything."""
    if type(optimizer).state_dict is not torch.optim.Optimizer.state_dict:
        raise MisuseError(
            f"{type(optimizer).__name__} has its own state_dict(), so TrainState cannot find its state. Pass TrainState the wrapped optimizer, "
            "or no optimizer, and save the state_dict() as another entry"
        )


def _refuse_flat_shards(model: torch.nn.Module) -> None:
    """Raises for modules of FSDP1: their parameters are flat shards without their place."""
    for name, module in model.named_modules():
        group = getattr(module, "process_group", None)
        if type(module).__name__ == "FullyShardedDataParallel" and group is not None and group.size() > 1:
            raise MisuseError(
                f"{f'{name!r} of the model' if name else 'the model'} is sharded by FullyShardedDataParallel (FSDP1) over {group.size()} processes, whose parameters do not "
                "have their place in the model. Shard it with fully_shard (FSDP2), or save the result of get_state_dict() of torch.distributed.checkpoint.state_dict"
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


def _one(stored: Stored, which: _Name) -> Stored:
    if which is None:
        return stored
    if which not in stored:
        raise MisuseError(f"{which!r} is not among the stored ones: {list(stored)}")
    return stored[which]


def _slots_of(which: _Name) -> tuple[Component, ...]:
    """Returns the path of an optimizer's slots."""
    if which is None:
        return (("k", "optimizer"), ("k", "state"))
    return (("k", "optimizer"), ("i" if isinstance(which, int) else "k", which), ("k", "state"))


def _cast_below(cast_of: CastOf, above: tuple[Component, ...], slot: str | int) -> torch.dtype | None:
    """Returns the dtype that ``cast=`` names for a slot, or ``None``."""
    found = cast_of((*above, ("i" if isinstance(slot, int) else "k", slot)))
    return None if found is None else adapter.torch_dtype(found)


def _tensors_in(value: Stored) -> Stored:
    """Returns a nested value with tensors instead of arrays."""
    if type(value) is dict:
        return {key: _tensors_in(one) for key, one in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_tensors_in(one) for one in value)
    return adapter.from_numpy(value) if isinstance(value, np.ndarray) else value


def _at(stored: object, *keys: _Name) -> object:
    """Returns the entry of nested mappings, or ``None``."""
    for key in keys:
        stored = stored.get(key) if isinstance(stored, Mapping) else None
    return stored


def optimizers_of(given: object) -> list[torch.optim.Optimizer]:
    """Returns the optimizers to guard: ``given``, or those of a :class:`TrainState`."""
    found: list[Stored] = list(given.optimizers.values()) if isinstance(given, TrainState) else [given]
    for one in found:
        if isinstance(one, type) or not callable(getattr(one, "register_step_pre_hook", None)):
            raise MisuseError(
                f"attach() takes an optimizer of torch.optim or a TrainState, not {shown(one)}: it has no register_step_pre_hook(). "
                "Change the state inside update_guard()"
            )
    _refuse_steps_in_backward(given, found)
    return found


def _refuse_steps_in_backward(given: object, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raises for parameters with hooks that run during ``backward()``. An optimizer that steps in
    such a hook would change the state before a guarded ``step()``."""
    names = given._names() if isinstance(given, TrainState) else {}
    watched = dict.fromkeys([*names, *(one for optimizer in optimizers for one in parameters(optimizer))])
    for parameter in watched:
        if getattr(parameter, "_post_accumulate_grad_hooks", None) or hasattr(
            parameter, "_in_backward_optimizers"
        ):
            which = names.get(parameter, f"a parameter of shape {tuple(parameter.shape)}")
            raise MisuseError(
                f"attach() cannot wait for an optimizer that steps inside backward(): {which} has a hook that runs there (register_post_accumulate_grad_hook); "
                "put `with mgr.update_guard():` around backward() instead, or remove the hook before attach() if it changes nothing"
            )
