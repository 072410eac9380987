"""How a value of a state that is none of the exact built-in types is taken apart, and how stored
objects are put together again.

The walk over a state is in the engine (``_core.flatten``); it handles exact ``dict``, ``list``,
``tuple``, ``numpy.ndarray`` of a storable dtype and the plain built-in scalars itself, and asks
:func:`describe` about everything else. The walk over a ``like`` (:mod:`.template`) asks the same
function, so that both see the same leaf paths.
"""

from __future__ import annotations

import dataclasses
import datetime
import decimal
import enum
import fractions
import operator
import os
import uuid
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from functools import reduce
from typing import Any, Literal, TypeAlias

import numpy as np

from .. import _adapters as adapters
from . import layouts, stateful
from .providers import describe as describe_provider
from .providers import is_provider
from .registry import StoredEnum, is_namedtuple_class, of_class, of_name, stored_name, type_name
from .shards import FlatShard, LocalShard, Segments
from .specs import PER_RANK, ArraySpec, ObjectSpec, PerRank, Replicated, _AsStored, to_dtype

Pairs: TypeAlias = Sequence[tuple[object, object]]
#: The plain parts of a stored object, of the types that its name implies. A file may have others:
#: then what puts it together raises.
_PlainParts: TypeAlias = Any
Description: TypeAlias = (
    tuple[Literal["plain"], object]  # an equal value of the exact built-in types
    | tuple[Literal["extension"], str, object]  # an object: its name and plain parts
    | tuple[Literal["scalar"], str, bytes]  # a numpy scalar: dtype, little-endian bytes
    | tuple[Literal["array"], object]  # an exact ndarray of a storable dtype
    | tuple[Literal["same"], object]  # a wrapper: the value inside
    | tuple[Literal["first"], object]  # the same, which may differ between ranks
    | tuple[Literal["mapping"], str, Pairs]  # OrderedDict, defaultdict
    | tuple[Literal["deque"], int | None, list[object]]
    | tuple[Literal["fields"], str, str, Pairs]  # namedtuple, dataclass
    | tuple[Literal["stateful"], str, str, object]  # type, protocol, the state it gave
    | tuple[Literal["custom"], str, Pairs]
    # dtype, shape, parts, library
    | tuple[Literal["sharded"], str, list[int], list[object], str | None]
    # values, what identifies them where leaves may share them, library
    | tuple[Literal["copied"], np.ndarray, str | None, str]
    | tuple[Literal["refuse"], str]
)

_HINT = "convert it, give it state_dict()/load_state_dict(), or sw.register() its type"


def storable_name(dtype: object) -> str | None:
    """Returns the format's name of a dtype whose arrays are stored as they are in memory, or
    ``None``. Works for dtypes that numpy does not know, too."""
    if not isinstance(dtype, np.dtype):
        return None
    if not dtype.isnative or dtype.hasobject or dtype.fields is not None or dtype.subdtype is not None:
        return None
    if dtype.kind in "SUT" or (dtype.kind == "V" and dtype.names is None and dtype.type is np.void):
        return None
    return _FORMAT_NAMES.get(dtype.name)


def _format_names() -> dict[str, str]:
    from .. import _core

    return {name: name for name in _core.dtype_names()}


_FORMAT_NAMES: dict[str, str] = _format_names()


def describe(obj: object) -> Description:
    """Describes a value for the walk over a state. ``("refuse", why)`` if it cannot be stored."""
    cls = type(obj)
    maker = _EXACT.get(cls)
    if maker is not None:
        return maker(obj)
    registered = of_class(cls)
    if registered is not None and registered.flatten is not None:
        return ("custom", registered.name, list(dict(registered.flatten(obj)).items()))
    if isinstance(obj, np.ndarray):
        return _array(obj)
    if is_provider(obj):
        return describe_provider(obj)
    if isinstance(obj, (LocalShard, FlatShard)):
        return _parts(obj.parts())
    if isinstance(obj, Segments):
        if not obj.is_named:
            return _parts(obj.parts())
        # Its tensors stand below it.
        return ("mapping", "dict", list(obj.tensors().items()))
    if isinstance(obj, layouts.Parts):
        return _parts(obj)
    if isinstance(obj, np.generic):
        return _numpy_scalar(obj)
    if isinstance(obj, enum.Enum):
        return ("extension", "enum", [stored_name(cls), enum_names(obj)])
    if isinstance(obj, Replicated):
        return ("first", obj.value)
    if isinstance(obj, PerRank):
        return ("custom", PER_RANK, [(obj.stored_key(), obj.value)])
    if isinstance(obj, np.dtype):
        return _dtype_object(obj)
    if isinstance(obj, datetime.tzinfo):
        return _tzinfo(obj)
    adapted: Description | None = adapters.describe(obj)
    if adapted is not None:
        return adapted
    protocol = stateful.protocol_of(obj)
    if protocol is not None:
        return ("stateful", stateful.name_of(obj), protocol.name, protocol.get(obj))
    if isinstance(obj, tuple) and is_namedtuple_class(cls):
        return (
            "fields",
            "namedtuple",
            stored_name(cls),
            list(zip(cls._fields, obj, strict=True)),
        )
    if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
        if isinstance(obj, (ArraySpec, ObjectSpec)):
            return (
                "refuse",
                f"{obj!r} is a description without data; it belongs into like=, not into a state",
            )
        return (
            "fields",
            "dataclass",
            stored_name(cls),
            [(field.name, getattr(obj, field.name)) for field in dataclasses.fields(obj)],
        )
    return ("refuse", _why_not(obj))


def _why_not(obj: object) -> str:
    if isinstance(obj, _AsStored):
        return "stepwell.AS_STORED belongs into like=, not into a state"
    if isinstance(obj, type):
        return f"the class {type_name(obj)} is not data"
    name = type_name(type(obj))
    for base in (dict, OrderedDict, list, tuple, set, frozenset, str, int, float, bytes, deque):
        if isinstance(obj, base):
            return (
                f"{name} is a subclass of {base.__name__} and would not come back as what it is; "
                f"pass {base.__name__}(...) of it, or sw.register() its type"
            )
    if name == "argparse.Namespace":
        return "an argparse.Namespace cannot be stored; pass vars(args)"
    if isinstance(obj, os.PathLike):
        return f"{name} is a path, which cannot be stored; pass str() of it"
    if callable(obj):
        return (
            f"{name} is code, not data; leave it out, or store what it was made from (a name, its settings)"
        )
    return f"{name} cannot be stored; {_HINT}"


def enum_names(member: enum.Enum) -> list[str]:
    """The names that an enum member is made of (several for a combined flag)."""
    if (isinstance(member, enum.Flag) and member.name is None) or "|" in str(member.name):
        return [one.name for one in member if one.name is not None]  # type: ignore[attr-defined]
    return [str(member.name)]


def _array(array: np.ndarray) -> Description:
    why = _not_storable(array)
    if why is not None:
        return ("refuse", why)
    return ("array", np.asarray(array, dtype=_native(array.dtype)))


def _parts(parts: layouts.Parts) -> Description:
    """Describes a process's parts of a tensor."""
    if isinstance(parts.local, np.ndarray) and (why := _not_storable(parts.local)) is not None:
        return ("refuse", why)
    return layouts.describe(parts)


def _not_storable(array: np.ndarray) -> str | None:
    """Why an array cannot be stored, or ``None``."""
    cls = type(array)
    if isinstance(array, np.ma.MaskedArray):
        return "a masked array has no storable mask; store .data and .mask as two arrays"
    if cls is not np.ndarray and cls is not np.memmap:
        return (
            f"{type_name(cls)} is a subclass of ndarray and would not come back as what it is; "
            "pass np.asarray(...) of it"
        )
    dtype = array.dtype
    if dtype.hasobject:
        return "an array of Python objects cannot be stored; use a list, or a numeric dtype"
    if dtype.fields is not None:
        return f"a structured array ({dtype}) cannot be stored; store its fields as arrays of their own"
    if dtype.kind in "SUT":
        return f"an array of strings ({dtype}) cannot be stored; use a list of str or bytes"
    if storable_name(_native(dtype)) is None:
        return f"arrays of dtype {dtype} cannot be stored; convert with .astype() first"
    return None


def _native(dtype: np.dtype) -> np.dtype:
    """The same elements in the byte order of this machine."""
    return dtype if dtype.isnative else dtype.newbyteorder("=")


def _numpy_scalar(value: np.generic) -> Description:
    if isinstance(value, np.str_):
        return ("extension", "numpy.str_", str(value))
    if isinstance(value, np.bytes_):
        return ("extension", "numpy.bytes_", bytes(value))
    dtype = value.dtype
    native = _native(dtype)
    name = storable_name(native)
    if name is None:
        return (
            "refuse",
            f"a numpy scalar of dtype {dtype} cannot be stored; convert it to a Python value first",
        )
    return ("scalar", name, np.asarray(value, dtype=native).tobytes())


def _dtype_object(dtype: np.dtype) -> Description:
    if storable_name(dtype) is not None:
        return ("extension", "numpy.dtype", dtype.name)
    if dtype.fields is None and dtype.subdtype is None and dtype.type.__module__ == "numpy":
        return ("extension", "numpy.dtype", dtype.str)
    return ("refuse", f"the dtype {dtype} cannot be stored")


def _tzinfo(zone: datetime.tzinfo) -> Description:
    if type(zone) is datetime.timezone:
        offset = zone.utcoffset(None)
        name = zone.tzname(None)
        plain = datetime.timezone(offset) == zone and datetime.timezone(offset).tzname(None) == name
        return ("extension", "datetime.timezone", [offset, None if plain else name])
    key = getattr(zone, "key", None)
    if type_name(type(zone)) == "zoneinfo.ZoneInfo" and isinstance(key, str):
        return ("extension", "zoneinfo.ZoneInfo", key)
    return ("refuse", f"the time zone {zone!r} cannot be stored; use datetime.timezone or zoneinfo.ZoneInfo")


def _datetime(value: datetime.datetime) -> Description:
    parts = [value.year, value.month, value.day, value.hour, value.minute, value.second, value.microsecond]
    return ("extension", "datetime.datetime", [parts, value.tzinfo, value.fold])


def _time(value: datetime.time) -> Description:
    parts = [value.hour, value.minute, value.second, value.microsecond]
    return ("extension", "datetime.time", [parts, value.tzinfo, value.fold])


# Both functions take objects of one class, which ``_EXACT`` names.
def _extension(name: str, parts: Callable[[Any], object]) -> Callable[[Any], Description]:
    return lambda value: ("extension", name, parts(value))


#: Types that are described by their very class. Each function takes objects of its key.
_EXACT: dict[type, Callable[[Any], Description]] = {
    OrderedDict: lambda value: ("mapping", "OrderedDict", list(value.items())),
    defaultdict: lambda value: ("mapping", "defaultdict", list(value.items())),
    deque: lambda value: ("deque", value.maxlen, list(value)),
    Counter: _extension("collections.Counter", dict),
    range: _extension("range", lambda v: [v.start, v.stop, v.step]),
    slice: _extension("slice", lambda v: [v.start, v.stop, v.step]),
    datetime.datetime: _datetime,
    datetime.time: _time,
    datetime.date: _extension("datetime.date", lambda v: [v.year, v.month, v.day]),
    datetime.timedelta: _extension("datetime.timedelta", lambda v: [v.days, v.seconds, v.microseconds]),
    decimal.Decimal: _extension("decimal.Decimal", str),
    fractions.Fraction: _extension("fractions.Fraction", lambda v: [v.numerator, v.denominator]),
    uuid.UUID: _extension("uuid.UUID", lambda v: v.bytes),
    StoredEnum: _extension("enum", lambda v: [v.type_name, list(v.names)]),
}


class Reviver:
    """Puts stored objects together. ``classes`` are those that the caller's ``like`` holds, by
    stored name."""

    __slots__ = ("classes",)

    def __init__(self, classes: Mapping[str, type] | None = None) -> None:
        self.classes: Mapping[str, type] = classes or {}

    def scalar(self, name: str, data: bytes) -> object:
        """A numpy scalar from its dtype and little-endian bytes."""
        return np.frombuffer(data, dtype=to_dtype(name))[0]

    def extension(self, name: str, parts: _PlainParts) -> object:
        """The object of a stored extension. Called by the engine with plain parts, inner extensions
        revived."""
        if name == "enum":
            return self._enum(str(parts[0]), [str(one) for one in parts[1]])
        make = _REVIVE.get(name)
        if make is not None:
            return make(parts)
        return adapters.revive(name, parts)

    def _enum(self, name: str, names: list[str]) -> object:
        cls = self.classes.get(name)
        if cls is None:
            entry = of_name(name)
            cls = None if entry is None else entry.cls
        if cls is None or not issubclass(cls, enum.Enum):
            return StoredEnum(name, tuple(names))
        members = [cls.__members__[one] for one in names if one in cls.__members__]
        if len(members) != len(names):
            return StoredEnum(name, tuple(names))
        if len(members) == 1:
            return members[0]
        return reduce(operator.or_, members)


def _revive_datetime(parts: _PlainParts) -> datetime.datetime:
    return datetime.datetime(*parts[0]).replace(tzinfo=parts[1], fold=parts[2])


def _revive_time(parts: _PlainParts) -> datetime.time:
    return datetime.time(*parts[0]).replace(tzinfo=parts[1], fold=parts[2])


def _revive_timezone(parts: _PlainParts) -> datetime.timezone:
    offset, name = parts
    if name is not None:
        return datetime.timezone(offset, name)
    return datetime.UTC if not offset else datetime.timezone(offset)


def _revive_zoneinfo(parts: _PlainParts) -> datetime.tzinfo:
    import zoneinfo

    return zoneinfo.ZoneInfo(parts)


_REVIVE: dict[str, Callable[[_PlainParts], object]] = {
    "collections.Counter": Counter,
    "collections.deque": lambda parts: deque(parts[1], parts[0]),
    "range": lambda parts: range(*parts),
    "slice": lambda parts: slice(*parts),
    "datetime.datetime": _revive_datetime,
    "datetime.time": _revive_time,
    "datetime.date": lambda parts: datetime.date(*parts),
    "datetime.timedelta": lambda parts: datetime.timedelta(*parts),
    "datetime.timezone": _revive_timezone,
    "zoneinfo.ZoneInfo": _revive_zoneinfo,
    "decimal.Decimal": decimal.Decimal,
    "fractions.Fraction": lambda parts: fractions.Fraction(*parts),
    "uuid.UUID": lambda parts: uuid.UUID(bytes=parts),
    "numpy.str_": np.str_,
    "numpy.bytes_": np.bytes_,
    "numpy.dtype": to_dtype,
    "str": lambda parts: parts.decode("utf-8", "surrogatepass"),
}
