"""The seam to frameworks: one module per framework, imported only where the caller has imported the
framework.

A framework module has those of these that it needs:

* ``describe(obj)``: what a value of its own types is (see ``leaves.describe``), or ``None``;
* ``target(obj)``: what an array or abstract array of its own wants back, a :class:`Target`, or
  ``None``;
* ``branch(obj)``: a container of its own types as the caller's structure, a :class:`Opened`, or
  ``None``;
* ``why_not_loaded(obj)``: why an object's ``load_state_dict`` cannot take stored values, or
  ``None``;
* ``owns(obj)``: whether an object with a state of its own is one of its own, so that it takes its
  arrays and no others;
* ``arrays(values, placement)``: numpy arrays that nobody else has, as arrays of its own;
* ``check_device(device)``: raises a ``ValueError`` where its arrays cannot be on that device;
* ``empty_on(placement)``: what makes new arrays there that the engine fills, or ``None``;
* ``TAKES_OVER``: whether those take over the memory of what they are made of, for good: nobody else
  may write to it then (not there: no);
* ``with_values(array)``: an array of its own whose memory holds its values: itself, or a new one
  (only where it has lazy views);
* ``streams(devices)``: on which streams it computes now, by CUDA device (only where what is put on
  a stream of one's own can be ordered with its work);
* ``arrange(state, saving)``: a state whose leaves are to be stored elsewhere than where they stand,
  an :class:`Arranged`, or ``None``;
* ``revive(name, parts)`` and ``remake(name, children)``: objects and containers that it has named
  ``<framework>.…`` (only where it names some);

and registers the classes of its arrays with the engine when it is imported. A framework that is not
imported costs one dictionary look-up.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .._paths import Component
from .._state.specs import ArraySpec
from .._types import Array, Read
from ..errors import MisuseError

if TYPE_CHECKING:
    from .._state.leaves import Description

#: Framework package → the adapter module that knows it.
_FRAMEWORKS = {
    "torch": "stepwell._adapters.torch",
    "jax": "stepwell._adapters.jax",
    "megatron.core.dist_checkpointing.mapping": "stepwell._adapters.megatron",
}

#: A part of an array: its first element, and its extent.
Box = tuple[tuple[int, ...], tuple[int, ...]]
#: Children of a container, by path component.
Children: TypeAlias = list[tuple[Component, object]]


class OnDevice:
    """An array on a device, which the engine fills where it is. To a restore it looks like an array
    of numpy whose values it cannot touch."""

    __slots__ = ("array", "dtype", "shape", "strides")

    def __init__(self, array: Array, dtype: np.dtype, strides: tuple[int, ...]) -> None:
        self.array = array
        self.dtype = dtype
        self.shape: tuple[int, ...] = tuple(array.shape)
        #: In bytes.
        self.strides = strides


#: Makes the arrays of several targets, from pairs of target and value (a numpy array; a list of
#: them, one for each box), and whether the caller's own are to be filled.
Finish: TypeAlias = "Callable[[list[tuple[Target, Read]], bool], list[object]]"


@dataclass(slots=True, eq=False)
class Target:
    """A wanted array of a framework."""

    spec: ArraySpec
    #: All targets that have the same function are finished in one call.
    finish: Finish
    #: The caller's own array, or what describes one.
    value: object = None
    #: Its memory, where that can be filled as it is.
    memory: np.ndarray | OnDevice | None = None
    #: Shape, dtype → a new array on a device, which the engine fills there; ``None``: what is new
    #: is made in host memory.
    empty: Callable[[tuple[int, ...], np.dtype], object] | None = None
    #: True if ``value`` is an array that can stay as it is.
    has_value: bool = False
    #: True if what is made takes over the memory of its value for good: nobody else may write to it
    #: then.
    takes_over: bool = False
    #: The parts of it that are wanted; ``None``: all of it.
    boxes: Sequence[Box] | None = None
    #: The memory of each of them, where that can be filled as it is; ``None``: they have none.
    memories: Sequence[np.ndarray | OnDevice | None] | None = None
    #: True if boxes may reach beyond what is stored, where the shape of the whole is left open;
    #: what is there of them is zeros.
    pads: bool = False
    #: Its place, in the framework's terms, and the function that returns a target at another place.
    placement: object = None
    replace: Callable[[Target, object], Target] | None = None
    #: Why its value cannot be filled, where it cannot.
    unfillable: str | None = None


#: Path components of an entry, below its container → the dtype that ``cast=`` names for it.
CastOf: TypeAlias = Callable[[tuple[Component, ...]], np.dtype | None]


@dataclass(slots=True, frozen=True)
class Follows:
    """Entries of a container that go by the names of others. A rename of one moves them too, and
    where one is not wanted, they are not wanted either."""

    #: The path components of the others, and the names of the wanted ones.
    leaders: tuple[Component, ...]
    names: list[str]
    #: The path components of the entries with the same names.
    followers: list[tuple[Component, ...]]


@dataclass(slots=True, eq=False)
class Opened:
    """A container of a framework, taken apart: its children by path component, and what puts it
    together again (children by key, and whether they were filled in place)."""

    children: Children
    close: Callable[[list[tuple[str | int, object]], bool], object]
    #: Why it cannot be filled, where it cannot; it still says what is wanted.
    unfillable: str | None = None
    #: The child that is looked at before anything else, and why a stored value of it does not fit
    #: (``None``: it does).
    first: tuple[Component, Callable[[object], str | None]] | None = None
    #: Returns the children for the outline of what is stored there (``Structure.outline``), for
    #: the new names of renamed entries (of ``follows``) by their stored names, and for a function
    #: from the path of an entry below to the dtype that ``cast=`` names for it. ``None``:
    #: ``children`` are wanted, whatever is stored.
    settle: Callable[[object, dict[str, str], CastOf], Children] | None = None
    follows: Follows | None = None
    #: A step of all ranks, such as a collective, after a restore has filled it on each of them.
    together: Callable[[], None] | None = None


@dataclass(slots=True, eq=False)
class Arranged:
    """A state, or a structure that is to be restored, whose leaves stand where they are stored; and
    what puts what was restored (and whether it was filled) to where they stood."""

    state: dict[str | int, object]
    put_back: Callable[[dict[str | int, object], bool], object]


class DoesNotFit(Exception):
    """The array of that number among those that were to become a framework's has values that its
    dtype there has not."""

    def __init__(self, number: int, why: str) -> None:
        super().__init__(why)
        self.number = number


@cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(name)


def load() -> list[ModuleType]:
    """The adapters of the frameworks that are in use."""
    return [_module(adapter) for package, adapter in _FRAMEWORKS.items() if package in sys.modules]


def _hooks(what: str) -> Iterator[Callable[..., Any]]:  # of the signatures above
    """The functions of that name, of the adapters that have one."""
    return (getattr(module, what) for module in load() if hasattr(module, what))


def _first(what: str, *arguments: object) -> Any:  # as the hook says
    answers = (hook(*arguments) for hook in _hooks(what))
    return next((found for found in answers if found is not None), None)


def describe(obj: object) -> Description | None:
    """Describes an object of an imported framework, or returns ``None``."""
    found: Description | None = _first("describe", obj)
    return found


def target(obj: object) -> Target | None:
    """Returns the target of a framework's array or abstract array, or ``None``."""
    found: Target | None = _first("target", obj)
    return found


def branch(obj: object) -> Opened | None:
    """A container of a framework that is in use, or ``None``."""
    found: Opened | None = _first("branch", obj)
    return found


def arrange(state: object, saving: bool = False) -> Arranged | None:
    """A state with leaves of a framework that is in use at the places where those are stored;
    ``None`` where all are stored where they stand."""
    found: Arranged | None = _first("arrange", state, saving)
    return found


def as_saved(state: object) -> object:
    """A state as it is stored: :func:`arrange`, for a save."""
    arranged = arrange(state, saving=True)
    return state if arranged is None else arranged.state


def why_not_loaded(obj: object) -> str | None:
    """The reason why an object's ``load_state_dict`` cannot take stored values, or ``None``."""
    found: str | None = _first("why_not_loaded", obj)
    return found


def library_of(obj: object) -> str | None:
    """The framework whose arrays an object with a state of its own takes; ``None`` where it may be
    any."""
    return next((owns.__module__.rpartition(".")[2] for owns in _hooks("owns") if owns(obj)), None)


def is_known(package: str) -> bool:
    """True if there is an adapter for a framework."""
    return package in _FRAMEWORKS


def named_by(option: str, package: str) -> ModuleType:
    """Returns the adapter of a framework that an option names.

    Raises:
        MisuseError: the framework is not installed.
    """
    try:
        return _module(_FRAMEWORKS[package])
    except ImportError as failure:
        raise MisuseError(
            f"{option} needs {package}, which cannot be imported ({failure}). Install {package}, or leave "
            "the option out for arrays of numpy"
        ) from failure


def check_device(package: str, device: object) -> None:
    """Raises a :class:`MisuseError` if ``to=`` names a framework that is not installed, or
    ``device=`` one that is not a device of it here."""
    adapter = named_by(f'to="{package}"', package)
    try:
        adapter.check_device(device)
    except ValueError as failure:
        raise MisuseError(f"device={device!r} cannot hold arrays of {package}: {failure}") from failure


def check_fits(package: str, placement: object, shape: tuple[int, ...]) -> None:
    """Raises a ``ValueError`` where no array of that shape can be at that place of a framework."""
    _module(_FRAMEWORKS[package]).check_fits(placement, shape)


def empty(package: str, placement: object) -> Callable[[tuple[int, ...], np.dtype], object] | None:
    """Returns a function that allocates arrays of a framework in memory that the engine can fill
    and the host cannot. ``None`` for host memory."""
    make = getattr(_module(_FRAMEWORKS[package]), "empty_on", None)
    found: Callable[[tuple[int, ...], np.dtype], object] | None = None if make is None else make(placement)
    return found


def arrays(package: str, values: Sequence[Array], placement: object = None) -> list[Array]:
    """Numpy arrays as those of a framework, which is imported for it."""
    found: list[Array] = _module(_FRAMEWORKS[package]).arrays(values, placement)
    return found


def arrays_where_used(package: str, values: list[Array]) -> list[Array]:
    """The same, where the framework is in use; else as they are."""
    return values if _owner_of(package) is None else arrays(package, values)


def takes_over(package: str) -> bool:
    """True if arrays of a framework, where it is in use, take over the memory of what they are made
    of."""
    return bool(getattr(_owner_of(package), "TAKES_OVER", False))


def with_values(array: Array) -> Array:
    """An array whose memory holds its values as they are stored: itself, or a new one where they
    lie there in another byte order, or a view is to conjugate or negate them."""
    if isinstance(array, np.ndarray):
        return array if array.dtype.isnative else array.astype(array.dtype.newbyteorder("="))
    for hook in _hooks("with_values"):
        array = hook(array)
    return array


def on_host(array: object) -> np.ndarray:
    """The values of an array of any framework, in host memory."""
    found = _first("on_host", array)
    return np.asarray(array if found is None else found)


def streams(devices: Iterable[int]) -> dict[int, int]:
    """The handles of the streams on which frameworks that are in use compute now, by the number of
    their CUDA device; a device on which none does that can be known is left out."""
    found: dict[int, int] = {}
    for hook in _hooks("streams"):
        found.update(hook(devices))
    return found


def _owner_of(name: str) -> ModuleType | None:
    """The adapter of the framework in whose name something is stored, where that is in use."""
    package = name.partition(".")[0]
    return _module(_FRAMEWORKS[package]) if package in _FRAMEWORKS and package in sys.modules else None


def revive(name: str, parts: object) -> object:
    """The object for an extension that a framework owns; a description of it where the framework is
    not in use."""
    found = getattr(_owner_of(name), "revive", None)
    return StoredExtension(name, parts) if found is None else found(name, parts)


def remake(name: str, children: dict[str | int, object]) -> object:
    """The container that a framework has named; its children as a dict where the framework is not
    in use."""
    found = getattr(_owner_of(name), "remake", None)
    return children if found is None else found(name, children)


class StoredExtension:
    """A stored object whose type is not known here: the name and parts that were stored."""

    __slots__ = ("name", "parts")

    def __init__(self, name: str, parts: object) -> None:
        self.name = name
        self.parts = parts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoredExtension) and (self.name, self.parts) == (other.name, other.parts)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"StoredExtension({self.name!r}, {self.parts!r})"
