"""Symbols of Python's own library in pickles: containers, dates, numbers, paths, namespaces."""

from __future__ import annotations

import datetime
import decimal
import fractions
import re
import uuid
from collections import Counter, OrderedDict, deque
from collections.abc import Mapping

from .description import Value
from .pickle_values import Found, Made, Symbol, elements, mapping, opaque, plain, sequence

#: The longest text of a number.
_MAX_NUMBER = 1000
#: The most parts of a path.
_MAX_PARTS = 256
_FRACTION = re.compile(r"-?\d+(/\d+)?")


def integer(value: object) -> int:
    """The value if it is an integer, else a ``TypeError``."""
    if type(value) is not int:
        raise TypeError("an integer was expected")
    return value


def text(value: object, limit: int = _MAX_NUMBER) -> str:
    """The value if it is a short text, else an error."""
    if type(value) is not str or len(value) > limit:
        raise TypeError("a short text was expected")
    return value


def _integers(made: Made, count: int) -> list[int]:
    if len(made.args) != count:
        raise TypeError(f"{count} arguments were expected")
    return [integer(part.value) for part in made.args]


def ordered_dict(made: Made) -> Found:
    """Its attributes are left out: ``torch`` keeps versions of modules there."""
    if not made.args:
        return mapping(made.entries, OrderedDict)
    rows = made.arg(0)
    if type(rows) is not list or made.entries:
        raise TypeError("rows were expected")
    if not made.args[0].is_plain:
        return opaque("collections.OrderedDict of Python 2")
    flat = [plain(value) for key, value in rows for value in (key, value)]
    return mapping(flat, OrderedDict)


def _dict(made: Made) -> Found:
    if made.args and not isinstance(made.arg(0), dict):
        raise TypeError("a dict was expected")
    if made.args and made.entries:
        raise TypeError("a dict of two parts")
    return _renewed(made.args[0]) if made.args else mapping(made.entries)


def _renewed(found: Found) -> Found:
    """The same value for another call."""
    return Found(found.value, found.placed, found.is_plain)


def _default_dict(made: Made) -> Found:
    """The factory is a name, and is left out."""
    return mapping(made.entries)


def _counter(made: Made) -> Found:
    counts = made.arg(0, {})
    if type(counts) is not dict or made.entries or not (not made.args or made.args[0].is_plain):
        raise TypeError("counts were expected")
    value = Counter(counts)
    return Found(value, Value(value), True)


def _deque(made: Made) -> Found:
    length = None if made.arg(1) is None else integer(made.arg(1))
    first = made.arg(0, ())
    if not isinstance(first, (list, tuple)) or (first and made.items):
        raise TypeError("elements were expected")
    found = _renewed(made.args[0]) if first else sequence(made.items)
    if found.is_plain and isinstance(found.value, (list, tuple)):
        return plain(deque(found.value, length))
    return found


def _set(made: Made, is_frozen: bool = False) -> Found:
    values = made.arg(0, ())
    if not isinstance(values, (list, tuple)) or made.items:
        raise TypeError("elements were expected")
    if made.args and not made.args[0].is_plain:
        raise TypeError("plain elements were expected")
    return elements(values, is_frozen)


def _bytes(made: Made) -> Found:
    if made.args:
        raise TypeError("no arguments were expected")
    return plain(b"")


def _bytearray(made: Made) -> Found:
    value = made.arg(0, b"")
    if type(value) is str and made.arg(1) == "latin-1":
        value = value.encode("latin-1")
    if type(value) is not bytes:
        raise TypeError("bytes were expected")
    return plain(bytearray(value), len(value))


def _bytes_io(made: Made) -> Found:
    """``io.BytesIO``: its bytes."""
    state = None if made.state is None else made.state.value
    if made.args or type(state) is not tuple or not state or type(state[0]) is not bytes:
        raise TypeError("bytes and a position were expected")
    return plain(state[0], len(state[0]))


def _complex(made: Made) -> Found:
    real, imaginary = made.arg(0), made.arg(1)
    if type(real) is not float or type(imaginary) is not float:
        raise TypeError("two floats were expected")
    return plain(complex(real, imaginary))


def _slice(made: Made) -> Found:
    parts = [None if part.value is None else integer(part.value) for part in made.args]
    begin, end, step = parts
    value = slice(begin, end, step)
    return Found(value, value)


def _range(made: Made) -> Found:
    value = range(*_integers(made, 3))
    return Found(value, value)


def _state_of(made: Made, length: int) -> bytes:
    """The packed state of a date or time."""
    state = made.arg(0)
    if type(state) is not bytes or len(state) != length:
        raise TypeError(f"{length} bytes were expected")
    return state


def _zone(made: Made) -> datetime.tzinfo | None:
    zone = made.arg(1)
    if zone is not None and not isinstance(zone, datetime.tzinfo):
        raise TypeError("a time zone was expected")
    return zone


def _date(made: Made) -> Found:
    high, low, month, day = _state_of(made, 4)
    return plain(datetime.date(high << 8 | low, month, day))


def _microsecond(state: bytes) -> int:
    return int.from_bytes(state[-3:], "big")


def _time(made: Made) -> Found:
    state = _state_of(made, 6)
    hour, minute, second = state[0] & 0x7F, state[1], state[2]
    fold = state[0] >> 7
    return plain(datetime.time(hour, minute, second, _microsecond(state), _zone(made), fold=fold))


def _datetime(made: Made) -> Found:
    state = _state_of(made, 10)
    year, month, fold = state[0] << 8 | state[1], state[2] & 0x7F, state[2] >> 7
    day, hour, minute, second = state[3:7]
    zone = _zone(made)
    return plain(
        datetime.datetime(year, month, day, hour, minute, second, _microsecond(state), zone, fold=fold)
    )


def _timedelta(made: Made) -> Found:
    return plain(datetime.timedelta(*_integers(made, 3)))


def _timezone(made: Made) -> Found:
    offset = made.arg(0)
    if type(offset) is not datetime.timedelta:
        raise TypeError("a difference of times was expected")
    if len(made.args) > 1:
        return plain(datetime.timezone(offset, text(made.arg(1))))
    return plain(datetime.timezone(offset))


def _decimal(made: Made) -> Found:
    return plain(decimal.Decimal(text(made.arg(0))))


def _fraction(made: Made) -> Found:
    if len(made.args) == 2:
        return plain(fractions.Fraction(*_integers(made, 2)))
    value = text(made.arg(0))
    if _FRACTION.fullmatch(value) is None:
        raise ValueError("a fraction was expected")
    return plain(fractions.Fraction(value))


def _attributes(made: Made) -> dict[object, object]:
    attributes = None if made.state is None else made.state.value
    if type(attributes) is not dict:
        raise TypeError("attributes were expected")
    return attributes


def _uuid(made: Made) -> Found:
    return plain(uuid.UUID(int=integer(_attributes(made)["int"])))


def _path(made: Made, separator: str = "/") -> Found:
    """A path is text: an object of its class cannot be stored."""
    parts = [text(part.value, 4096) for part in made.args[:_MAX_PARTS]]
    if len(made.args) > _MAX_PARTS:
        raise ValueError("a path of too many parts")
    if len(parts) > 1 and parts[0].endswith(separator):
        value = parts[0] + separator.join(parts[1:])
    else:
        value = separator.join(parts) or "."
    return plain(value, len(value))


def namespace(made: Made) -> Found:
    """The attributes, as a dict."""
    if made.args:
        raise TypeError("no arguments were expected")
    if made.state is None:
        return mapping([])
    _attributes(made)
    return _renewed(made.state)


def _windows_path(made: Made) -> Found:
    return _path(made, "\\")


def _frozenset(made: Made) -> Found:
    return _set(made, is_frozen=True)


def _list(made: Made) -> Found:
    if made.args:
        raise TypeError("no arguments were expected")
    return sequence(made.items)


_BUILTINS: Mapping[str, Symbol] = {
    "set": _set,
    "frozenset": _frozenset,
    "bytes": _bytes,
    "bytearray": _bytearray,
    "complex": _complex,
    "slice": _slice,
    "range": _range,
    "xrange": _range,
    "list": _list,
    "dict": _dict,
}

SYMBOLS: Mapping[tuple[str, str], Symbol] = {
    ("collections", "OrderedDict"): ordered_dict,
    ("collections", "defaultdict"): _default_dict,
    ("collections", "Counter"): _counter,
    ("collections", "deque"): _deque,
    ("datetime", "date"): _date,
    ("datetime", "time"): _time,
    ("datetime", "datetime"): _datetime,
    ("datetime", "timedelta"): _timedelta,
    ("datetime", "timezone"): _timezone,
    ("decimal", "Decimal"): _decimal,
    ("fractions", "Fraction"): _fraction,
    ("uuid", "UUID"): _uuid,
    ("argparse", "Namespace"): namespace,
    ("types", "SimpleNamespace"): namespace,
    ("_io", "BytesIO"): _bytes_io,
    **{
        (module, name): symbol for module in ("builtins", "__builtin__") for name, symbol in _BUILTINS.items()
    },
    **{
        (module, name): _path
        for module in ("pathlib", "pathlib._local")
        for name in ("PosixPath", "PurePosixPath")
    },
    **{
        (module, name): _windows_path
        for module in ("pathlib", "pathlib._local")
        for name in ("WindowsPath", "PureWindowsPath")
    },
}

NAMES: Mapping[tuple[str, str], object] = {
    ("builtins", "Ellipsis"): ...,
    ("__builtin__", "Ellipsis"): ...,
}
