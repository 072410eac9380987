"""The slots of a torch optimizer: its state of each parameter, such as momentum."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from math import prod

import torch

from .._restore.template import Checked, Maybe
from .._state.specs import AS_STORED, ArraySpec
from ..errors import MismatchError, MisuseError
from . import torch as adapter
from .torch_groups import OTHER_KIND, Stored, as_tensor

#: The slots of torch's own optimizers: those that every updated parameter has, and those that an
#: option adds.
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
_KNOWN_SLOTS = set[str]().union(*(always | optional for always, optional in _SLOTS.values()))


def parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    """The parameters of all groups."""
    for group in optimizer.param_groups:
        yield from group["params"]


def slots_by_name(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    is_kept: Callable[[torch.Tensor], bool],
) -> dict[str, dict[str, object]]:
    """Returns the slots of each parameter that ``is_kept`` selects, by its name."""
    strange = [key for key in optimizer.state if not isinstance(key, torch.Tensor)]
    if strange:
        raise MisuseError(
            f"{type(optimizer).__name__} has state of {strange[0]!r}, which is not a parameter. Save TrainState(model), and the optimizer's state_dict() as another entry"
        )
    return {
        names[parameter]: dict(optimizer.state[parameter])
        for parameter in parameters(optimizer)
        if optimizer.state.get(parameter) and is_kept(parameter)
    }


def fitting(optimizer: torch.optim.Optimizer, state: object) -> object:
    """Returns a stored state with its slots under the names that its groups have.

    Raises:
        ValueError: the state is that of other parameters.
    """
    found = _numbered(state)
    if type(optimizer).load_state_dict is torch.optim.Optimizer.load_state_dict:
        _check_groups(optimizer, found)
    _check_shapes(optimizer, found)
    return found


def _check_groups(optimizer: torch.optim.Optimizer, state: object) -> None:
    """Compares the numbers of parameters, as ``load_state_dict`` does."""
    groups = state.get("param_groups") if isinstance(state, Mapping) else None
    hooks = getattr(optimizer, "_optimizer_load_state_dict_pre_hooks", ())
    if hooks or not isinstance(groups, Sequence):
        return  # a hook may change the groups
    stored, own = ([len(group["params"]) for group in some] for some in (groups, optimizer.param_groups))
    if stored != own:
        raise ValueError(
            f"its parameter groups have {stored} parameters, and those here {own}. If the model has changed, save and restore "
            "sw.torch.TrainState(model, optimizer), whose slots go by the names of the parameters"
        )


def _numbered(state: object) -> object:
    """A state of an optimizer with its slots under the names that its groups have. DCP and other
    formats store numbers as text. ``load_state_dict`` would drop slots under other names.

    Raises:
        ValueError: no slot is under such a name.
    """
    if not isinstance(state, Mapping) or not isinstance(state.get("state"), Mapping):
        return state
    groups = state.get("param_groups")
    if not isinstance(groups, Sequence):
        return state
    lists = [group.get("params") for group in groups if isinstance(group, Mapping)]
    names = {name for names in lists if isinstance(names, Sequence) for name in names}
    slots = {
        int(key) if isinstance(key, str) and key.isdecimal() and key not in names else key: slot
        for key, slot in state["state"].items()
    }
    if slots and names.isdisjoint(slots):
        raise ValueError(
            f"its slots are those of {next(iter(slots))!r} and others, and its groups name none of them"
        )
    return {**state, "state": slots}


def _check_shapes(optimizer: torch.optim.Optimizer, state: object) -> None:
    """Compares slots by number with the parameters that they are for: ``load_state_dict`` takes
    those of any shape. An optimizer of torch has slots in the shape of the parameter, and scalars.

    Raises:
        ValueError: a slot has another shape.
    """
    if (
        not _is_of_torch(optimizer)
        or not isinstance(state, Mapping)
        or not isinstance(state.get("state"), Mapping)
    ):
        return
    stored = [number for group in state.get("param_groups", ()) for number in group["params"]]
    for number, parameter in zip(stored, parameters(optimizer), strict=False):
        slots = state["state"].get(number)
        for slot, value in slots.items() if isinstance(slots, Mapping) else ():
            shape = tuple(getattr(value, "shape", ()))
            if prod(shape) != 1 and shape != tuple(parameter.shape):
                raise ValueError(
                    f"slot {slot} of parameter {number} has the shape {list(shape)}, and the parameter "
                    f"{list(parameter.shape)}: give the optimizer the parameters in the order of the saved one"
                )


def _is_of_torch(optimizer: torch.optim.Optimizer) -> bool:
    """True for an optimizer of torch with known slots."""
    cls = type(optimizer)
    return cls.__name__ in _SLOTS and getattr(torch.optim, cls.__name__, None) is cls


def wrong_slots(optimizer: torch.optim.Optimizer, stored: object) -> str | None:
    """Returns why stored slots are not those of such an optimizer of torch, or ``None``."""
    if not _is_of_torch(optimizer) or not isinstance(stored, Mapping) or not stored:
        return None
    cls = type(optimizer)
    always, optional = _SLOTS[cls.__name__]
    strange = [slot for slot in stored if slot in _KNOWN_SLOTS and slot not in always | optional]
    lacking = sorted(slot for slot in always if slot not in stored)
    if not strange and not lacking:
        return None
    return (
        f"the stored slots are {', '.join(map(str, stored))}, but {cls.__name__} has {', '.join(sorted(always | optional))}; "
        f"{OTHER_KIND}"
    )


def _wanted(slots: Mapping[object, object]) -> dict[object, object]:
    """Returns the targets of existing slots. Tensors and numbers are filled in place. Containers
    (such as a growing history) are restored with their stored length."""
    return {
        slot: AS_STORED if value is None or isinstance(value, (Mapping, list, tuple)) else value
        for slot, value in slots.items()
    }


def wanted_slots(
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
    own = optimizer.state.get(parameter)
    if own:
        return Maybe(_wanted(own))
    if type(stored) is not dict or wrong_slots(optimizer, stored) is not None:
        return Maybe(Checked(partial(wrong_slots, optimizer)))
    slots = {
        slot: _new_slot(slot, one, parameter, source, name, cast_of(slot)) for slot, one in stored.items()
    }
    return Maybe(slots, is_new=True)


def _new_slot(
    slot: str | int,
    stored: Stored,
    parameter: torch.Tensor,
    source: object,
    name: str,
    cast: torch.dtype | None,
) -> object:
    """Returns memory for a stored slot. It gets the dtype of ``cast``, else that of its parameter,
    unless it was stored wider than the parameter. If the parameter's shape has changed since the
    save, the slot's shape changes in the same way."""
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
    """True if a slot of a stored dtype gets the dtype of its parameter, as in torch's own
    ``load_state_dict``. A slot that is wider than its stored parameter (``source``) keeps its
    dtype."""
    if slot == source:
        return True
    is_number = slot.is_floating_point or slot.is_complex
    if not is_number or slot.is_complex != parameter.is_complex():
        return False
    return source is None or slot.itemsize <= source.itemsize


def only_stored(slots_of: Mapping[str, object]) -> dict[str, dict[object, object]]:
    """Returns the slots of each parameter, by its name, without slots that were not stored."""
    stored = {
        name: {slot: value for slot, value in slots.items() if value is not ...}
        for name, slots in slots_of.items()
        if isinstance(slots, Mapping)
    }
    return {name: slots for name, slots in stored.items() if slots}


def take_slots(
    optimizer: torch.optim.Optimizer,
    names: Mapping[torch.Tensor, str],
    stored: Mapping[str, Mapping[str, object]],
    model: Mapping[str, object],
) -> None:
    """Sets the slots of each parameter to the stored ones, and removes all others. A slot that was
    filled stays the same tensor. ``model`` has the stored parameters of slots that still have the
    stored dtype."""
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
            dtype = getattr(as_tensor(model.get(names[parameter])), "dtype", None)
            for slot, value in slots.items():
                if own.get(slot, ...) is not value:
                    own[slot] = _placed(slot, as_tensor(value), parameter, counts_on_device, dtype)
            step = own.get("step")
            if counts_on_device and isinstance(step, torch.Tensor):
                # The restore filled it on the host, but the optimizer reads it on the device.
                own["step"] = step.to(parameter.device, torch.float32)


def _placed(
    slot: str, value: Stored, parameter: torch.Tensor, counts_on_device: bool, stored: torch.dtype | None
) -> object:
    """Returns a slot on its parameter's device. It gets the parameter's dtype, unless it is wider
    than the ``stored`` one. If ``stored`` is ``None``, it keeps its dtype."""
    if isinstance(value, dict):
        return {
            key: _placed(slot, as_tensor(one), parameter, counts_on_device, stored)
            for key, one in value.items()
        }
    if type(value) in (list, tuple):
        return type(value)(
            _placed(slot, as_tensor(one), parameter, counts_on_device, stored) for one in value
        )
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
