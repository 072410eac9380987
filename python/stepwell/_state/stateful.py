"""Objects with a state of their own: expanded when they are saved, loaded in place when they are
restored into.

Random generators come through adapters, since their own state formats are tuples of a thousand ints
or hold big integers; everything else through ``state_dict``/``load_state_dict`` or
``get_state``/``set_state``.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from types import ModuleType
from typing import Any, TypeAlias, TypeGuard

import numpy as np

from ..errors import LoadFailed, MisuseError, StepwellError, at_leaf
from .registry import type_name

#: A state, of a file or of an object. Its parts have no types before the object takes it.
_State: TypeAlias = Any
#: An object of the protocol, which has its methods.
_Owner: TypeAlias = Any


@dataclass(frozen=True, slots=True)
class Protocol:
    """How a state is taken out of an object and put back. ``make`` builds a new object around a
    state, where that is possible; ``trial`` raises where a state does not fit, and changes
    nothing."""

    name: str
    get: Callable[[_Owner], object]
    set: Callable[[_Owner, _State], None]
    make: Callable[[_Owner | None, _State], object] | None = None
    trial: Callable[[_Owner | None, _State], object] | None = None


def _random_get(generator: random.Random) -> dict[str, object]:
    version, words, gauss = generator.getstate()
    return {"version": version, "words": np.array(words, dtype=np.uint32), "gauss_next": gauss}


def _random_set(generator: random.Random, state: _State) -> None:
    generator.setstate((state["version"], tuple(int(word) for word in state["words"]), state["gauss_next"]))


def _random_make(_like: object, state: _State) -> random.Random:
    made = random.Random()
    _random_set(made, state)
    return made


def _bits_get(bits: np.random.BitGenerator) -> object:
    return bits.state


def _bits_set(bits: np.random.BitGenerator, state: _State) -> None:
    bits.state = state


#: numpy's own bit generators, by the name that their states hold.
_BIT_GENERATORS: dict[str, Callable[[], np.random.BitGenerator]] = {
    name: getattr(np.random, name) for name in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")
}
#: Positions in a buffer, which numpy takes over unchecked and reads at: their places in a state, by
#: bit generator, and their limits.
_PLACES: dict[str, tuple[Callable[[_State], int], int]] = {
    "MT19937": (lambda state: state["state"]["pos"], 624),
    "Philox": (lambda state: state["buffer_pos"], 4),
}


def _bits_make(like: np.random.BitGenerator | None, state: _State) -> np.random.BitGenerator:
    """Returns a bit generator like ``like``, or else the numpy one that the state names."""
    made = _BIT_GENERATORS[state["bit_generator"]]() if like is None else type(like)()
    if state["bit_generator"] in _PLACES:
        place, most = _PLACES[state["bit_generator"]]
        if not 0 <= int(place(state)) <= most:
            raise ValueError(f"the state of a {state['bit_generator']} is at place {place(state)} of {most}")
    made.state = state
    return made


def _generator_set(generator: np.random.Generator, state: _State) -> None:
    generator.bit_generator.state = state


def _generator_make(like: np.random.Generator | None, state: _State) -> np.random.Generator:
    return np.random.Generator(_bits_make(None if like is None else like.bit_generator, state))


def _random_state_make(like: _Owner | None, state: _State) -> np.random.RandomState:
    made = np.random.RandomState(_bits_make(None if like is None else like._bit_generator, state))
    made.set_state(state)
    return made


_RANDOM = Protocol("random.Random", _random_get, _random_set, _random_make, _random_make)
_MODULE_RANDOM = Protocol("random", _random_get, _random_set, trial=_random_make)
_BITS = Protocol("numpy.random.BitGenerator", _bits_get, _bits_set, _bits_make, _bits_make)
_GENERATOR = Protocol(
    "numpy.random.Generator",
    lambda g: g.bit_generator.state,
    _generator_set,
    _generator_make,
    _generator_make,
)
_RANDOM_STATE = Protocol(
    "numpy.random.RandomState",
    lambda g: g.get_state(legacy=False),
    lambda g, state: g.set_state(state),
    _random_state_make,
    _random_state_make,
)


_MODULE_NUMPY = Protocol(
    "numpy.random",
    lambda module: module.get_state(legacy=False),
    lambda module, state: module.set_state(state),
    trial=lambda _module, state: _random_state_make(None, state),
)
#: Modules with a global generator.
_MODULES = {random: _MODULE_RANDOM, np.random: _MODULE_NUMPY}


def _state_dict_of(owner: _Owner) -> object:
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(owner, (torch.nn.Module, torch.optim.Optimizer)):
        from .._adapters import torch as adapter

        if isinstance(owner, torch.nn.Module):
            return adapter.tensors_of(owner)
        if (why := adapter.why_not_loaded(owner)) is not None:
            raise MisuseError(f"cannot be saved in this way: {why}")
    return owner.state_dict()


def _load_state_dict(owner: _Owner, state: _State) -> None:
    owner.load_state_dict(_fitting_state_dict(owner, state))


def _fitting_state_dict(owner: _Owner, state: _State) -> _State:
    """Returns the state as an object takes it. Raises where it does not fit an optimizer."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(owner, torch.optim.Optimizer):
        return state
    from .._adapters import torch_slots

    return torch_slots.fitting(owner, state)


_STATE_DICT = Protocol("state_dict", _state_dict_of, _load_state_dict, trial=_fitting_state_dict)
_GET_STATE = Protocol("get_state", lambda o: o.get_state(), lambda o, state: o.set_state(state))


#: Protocols whose objects are made of nothing but a state, by stored name, with the modules that
#: their types are from.
_BUILT_IN = {one.name: one for one in (_RANDOM, _BITS, _GENERATOR, _RANDOM_STATE)}


def rebuilt(type_name: str, protocol: str, state: object) -> object:
    """Rebuilds a stored generator of Python or numpy. Imports nothing: other types, and invalid
    states, come back as the stored state."""
    known = _BUILT_IN.get(protocol)
    if known is None or known.make is None or not type_name.startswith(("random.", "numpy.random.")):
        return state
    try:
        return known.make(None, state)
    except Exception:
        return state


def give(path: str, owner: object, protocol: Protocol, state: object) -> None:
    """Gives an object of the caller's its state."""
    try:
        protocol.set(owner, state)
    except StepwellError as error:
        error.leaf = error.leaf or path
        raise
    except Exception as failure:
        raise at_leaf(
            LoadFailed,
            path,
            f"this {type(owner).__qualname__} did not take what is stored ({type(failure).__name__}: {failure}); "
            "restore into one like the one that was saved, or leave it out",
        ) from failure


def protocol_of(obj: object) -> Protocol | None:
    """How to take the state out of an object, or ``None`` where it has none."""
    if isinstance(obj, type):
        return None
    if isinstance(obj, ModuleType):
        return _MODULES.get(obj)
    if isinstance(obj, np.random.Generator):
        return _GENERATOR
    if isinstance(obj, np.random.BitGenerator):
        return _BITS
    if isinstance(obj, np.random.RandomState):
        return _RANDOM_STATE
    if isinstance(obj, random.Random) and not isinstance(obj, random.SystemRandom):
        return _RANDOM
    if callable(getattr(obj, "state_dict", None)) and callable(getattr(obj, "load_state_dict", None)):
        return _STATE_DICT
    if callable(getattr(obj, "get_state", None)) and callable(getattr(obj, "set_state", None)):
        return _GET_STATE
    return None


def is_callable_state(state: object) -> TypeGuard[Callable[[], object]]:
    """True if a ``save`` was given a function that makes the state."""
    return callable(state) and not isinstance(state, type) and protocol_of(state) is None


def name_of(obj: object) -> str:
    """The stored type name of a stateful object."""
    return obj.__name__ if isinstance(obj, ModuleType) else type_name(type(obj))
