"""Conversions between Python scalars, numpy scalars and arrays without dimensions.

A training step may store a counter as an int and restore it as an array, or the other way round: a
jitted JAX step returns arrays. Within one kind (bool, integer, float, complex) such a value
converts if nothing is lost. Other values are refused by leaf path.
"""

from __future__ import annotations

import enum
from collections import deque
from collections.abc import Callable

import numpy as np

from .._state.specs import to_dtype
from ..errors import MismatchError, at_leaf

_PYTHON = (bool, int, float, complex)
_KINDS = {"b": "bool", "i": "integer", "u": "integer", "f": "float", "c": "complex"}


def kind_of_dtype(dtype: object) -> str | None:
    """Returns the kind of an array's values; ``None`` for dates."""
    found = to_dtype(dtype)
    if found.kind == "V" or found.type.__module__ != "numpy":
        return "integer" if "int" in found.name else "float"
    return _KINDS.get(found.kind)


def kind_of_value(value: object) -> str | None:
    """Returns the kind of a scalar, or of one of their types; ``None`` for other values."""
    cls = value if isinstance(value, type) else type(value)
    if issubclass(cls, np.generic):
        return kind_of_dtype(cls) if issubclass(cls, (np.bool_, np.number)) else None
    for place, one in enumerate(_PYTHON):
        if cls is one:
            return ("bool", "integer", "float", "complex")[place]
    return None


def are_alike(own: object, stored: object) -> bool:
    """True if a stored value can take the place of the caller's own: both are truth values, real
    numbers, complex numbers, strings, bytes, sequences, sets, or both are of other types. ``None``
    goes with any value."""
    if own is None or stored is None:
        return True
    one, other = _family(own), _family(stored)
    return one == other or (one, other) == ("complex", "number")


def _family(value: object) -> str | None:
    """The family of a plain value; ``None`` for enums, dates and other types."""
    kind = None if isinstance(value, enum.Enum) else kind_of_value(value)
    if kind is not None:
        return "number" if kind in ("integer", "float") else kind
    cls = type(value)
    return next((family for family, types in _FAMILIES.items() if cls in types), None)


_FAMILIES: dict[str, tuple[type, ...]] = {
    "string": (str, np.str_),
    "bytes": (bytes, bytearray, np.bytes_),
    "sequence": (list, tuple, deque),
    "set": (set, frozenset),
}


def as_array(path: str, value: object, dtype: object) -> np.ndarray:
    """Converts a stored scalar to an array without dimensions. Raises a :class:`MismatchError` if
    the dtype cannot hold the value."""
    wanted = to_dtype(dtype)
    try:
        with np.errstate(all="ignore"):
            made = np.asarray(value).astype(wanted)
            fits = bool(made.item() == value) or value != value
    except (OverflowError, TypeError, ValueError):
        fits = False
    if not fits:
        raise at_leaf(
            MismatchError,
            path,
            f"the stored value {value!r:.60} does not fit {wanted.name}; ask for a wider type, or for the stored one",
        )
    return made


def as_scalar(path: str, array: np.ndarray, cls: Callable[[object], object]) -> object:
    """Converts a stored array without dimensions to a scalar of a type."""
    value: object = array.item()
    is_numpy = isinstance(cls, type) and issubclass(cls, np.generic)
    return as_array(path, value, cls)[()] if is_numpy else cls(value)
