"""Types that the user has registered. A file never chooses what is imported: a class comes from the
caller's ``like`` or from here; what is neither is synthesised (namedtuples, dataclasses) or stays a
plain description (enum members)."""

from __future__ import annotations

import dataclasses
import enum
from collections import namedtuple
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol, TypeGuard, TypeVar, final

from .._checks import shown
from .._public import public
from ..errors import MisuseError

_T = TypeVar("_T")


class _NamedTuple(Protocol):
    _fields: tuple[str, ...]

    @classmethod
    def _make(cls, values: Iterable[object], /) -> object: ...


#: The user's own functions: only they know the types of the children.
Flatten = Callable[[_T], Mapping[Any, object]]
Unflatten = Callable[[dict[Any, Any]], _T]  # the same


@dataclass(frozen=True, slots=True)
class Registered:
    """A class, the name it is stored under, and how it is taken apart and put together."""

    cls: type
    name: str
    flatten: Flatten[Any] | None  # of ``cls``
    unflatten: Unflatten[Any] | None  # of ``cls``


_by_class: dict[type, Registered] = {}
_by_name: dict[str, Registered] = {}


def type_name(cls: type) -> str:
    """The name that a class is stored under: ``module.QualName``."""
    return f"{cls.__module__}.{cls.__qualname__}"


@public
def register(
    cls: type[_T],
    flatten: Flatten[_T] | None = None,
    unflatten: Unflatten[_T] | None = None,
    name: str | None = None,
) -> type[_T]:
    """Makes ``cls`` known.

    With ``flatten`` (object → mapping of children by ``str`` or ``int`` key) and ``unflatten``
    (that mapping, as a ``dict`` → object) its instances become containers in a state. Without them
    ``cls`` is a namedtuple, a dataclass or an enum, which then is restored without a ``like`` too.
    ``name`` is what is stored (default: ``module.QualName``). Returns ``cls``, so that it serves as
    a decorator. Registering the same class again replaces the entry; a name that another class has
    is refused.
    """
    if (flatten is None) != (unflatten is None):
        raise MisuseError("flatten and unflatten come together: one takes apart what the other puts together")
    if not isinstance(cls, type):
        raise MisuseError(f"register() takes a class, not {shown(cls)}")
    if flatten is None and not (
        dataclasses.is_dataclass(cls) or is_namedtuple_class(cls) or issubclass(cls, enum.Enum)
    ):
        raise MisuseError(
            f"{type_name(cls)} is no namedtuple, dataclass or enum: give flatten= and unflatten= to register it"
        )
    entry = Registered(cls, name or type_name(cls), flatten, unflatten)
    other = _by_name.get(entry.name)
    if other is not None and other.cls is not cls and type_name(other.cls) != type_name(cls):
        raise MisuseError(f"the name {entry.name!r} is registered for {type_name(other.cls)} already")
    _by_class[cls] = entry
    _by_name[entry.name] = entry
    return cls


def of_class(cls: type) -> Registered | None:
    """Returns the registration of exactly that class."""
    return _by_class.get(cls)


def of_name(name: str) -> Registered | None:
    """Returns the registration of that name."""
    return _by_name.get(name)


def stored_name(cls: type) -> str:
    """The name to store for a class: the registered one, or ``module.QualName``."""
    entry = _by_class.get(cls)
    return type_name(cls) if entry is None else entry.name


def is_namedtuple_class(cls: type) -> TypeGuard[type[_NamedTuple]]:
    """True if it is a class made by ``collections.namedtuple`` or ``typing.NamedTuple``."""
    fields = getattr(cls, "_fields", None)
    return (
        issubclass(cls, tuple)
        and isinstance(fields, tuple)
        and all(isinstance(field, str) for field in fields)
        and hasattr(cls, "_make")
    )


@final
@dataclass(frozen=True, slots=True)
class StoredEnum:
    """An enum member whose class is not known here: the names that were stored."""

    type_name: str
    names: tuple[str, ...]


def _identifier(name: str, fallback: str) -> str:
    last = name.rpartition(".")[2]
    return last if last.isidentifier() else fallback


@lru_cache(maxsize=1024)
def synthetic_namedtuple(name: str, fields: tuple[str, ...]) -> type:
    """A namedtuple class for a stored one whose class is not known here."""
    return namedtuple(_identifier(name, "NamedTuple"), fields, rename=True)


@lru_cache(maxsize=1024)
def synthetic_dataclass(name: str, fields: tuple[str, ...]) -> type:
    """A dataclass for a stored one whose class is not known here."""
    made = type(_identifier(name, "Dataclass"), (), {"__annotations__": dict.fromkeys(fields, object)})
    if not all(field.isidentifier() for field in fields):
        raise ValueError(f"stored dataclass {name!r} has fields that are no identifiers: {fields}")
    return dataclasses.dataclass(made)
