"""Symbols of numpy in pickles: dtypes, arrays and scalars.

An array is a tensor in the file. Protocol 2 encodes its bytes as text, which is decoded when it is
read. An array of a compressed pickle of protocol 2 is in memory.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence

import numpy as np

from .._state.leaves import storable_name
from .._state.specs import to_dtype
from .description import Chunk, Opaque, Tensor, fits, row_major
from .pickle_values import Found, Made, Symbol, opaque, plain
from .pickled import Name
from .python_symbols import integer, text

#: The most dimensions of an array.
MAX_DIMS = 64
_CODE = re.compile(r"[biufc]\d{1,2}")
_UNITS = frozenset({"Y", "M", "W", "D", "h", "m", "s", "ms", "us", "ns", "ps", "fs", "as"})
#: Dtypes of ml_dtypes by name.
_EXTENSION = re.compile(r"(bfloat16|float[468]_\w+|u?int[124])")


def _dtype(made: Made) -> Found:
    code = made.args[0].value
    if isinstance(code, Name):
        if code.module != "ml_dtypes" or _EXTENSION.fullmatch(code.name) is None:
            return opaque("numpy.dtype")
        return plain(to_dtype(code.name))
    code = text(code)
    state = () if made.state is None else made.state.value
    if type(state) is not tuple:
        raise TypeError("the state of a dtype was expected")
    order = text(state[1]) if state else "="
    if order not in ("<", ">", "=", "|"):
        raise ValueError("a byte order was expected")
    if code in ("M8", "m8"):
        unit, count, *_ = state[8][1]
        unit = unit.decode() if type(unit) is bytes else unit
        if type(unit) is not str or unit not in _UNITS or count != 1:
            return opaque(f"numpy.dtype {code}")
        code += f"[{unit}]"
    elif _CODE.fullmatch(code) is None:
        return opaque(f"numpy.dtype {code}")
    return plain(np.dtype(order + code))


def _shape(value: object) -> tuple[int, ...]:
    if type(value) is not tuple or len(value) > MAX_DIMS:
        raise TypeError("a shape was expected")
    if any(integer(size) < 0 for size in value):
        raise ValueError("a negative size")
    return value


def _array_of(made: Made, data: object, node: object, dtype: np.dtype, shape: tuple[int, ...]) -> Found:
    """A row-major array."""
    return _laid_out(made, data, node, dtype, shape, row_major(shape, dtype.itemsize))


def _laid_out(
    made: Made, data: object, node: object, dtype: np.dtype, shape: tuple[int, ...], strides: Sequence[int]
) -> Found:
    if not isinstance(data, (bytes, bytearray)):
        raise TypeError("the bytes of an array were expected")
    if not fits(shape, dtype.itemsize):
        raise ValueError("an array that is too large")
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes != len(data):
        raise ValueError(f"an array of {nbytes} bytes has {len(data)}")
    name = storable_name(dtype.newbyteorder("="))
    if name is None:
        return opaque(f"numpy.ndarray of {dtype}")
    if not nbytes:
        tensor = Tensor(name, shape, ())
        return Found(tensor, tensor)
    place = made.stream.place_of(node)
    if place is None:
        array = np.ndarray(shape, dtype, bytes(data), 0, strides).astype(dtype.newbyteorder("="))
        return Found(array, array)
    chunk = Chunk(*place, nbytes, (0,) * len(shape), shape, tuple(strides), dtype.byteorder == ">")
    tensor = Tensor(name, shape, (chunk,))
    return Found(tensor, tensor)


def _column_major(shape: tuple[int, ...], itemsize: int) -> tuple[int, ...]:
    return row_major(shape[::-1], itemsize)[::-1]


def _reconstruct(made: Made) -> Found:
    """``numpy.ndarray``, with its content as a state."""
    class_ = made.arg(0)
    if not isinstance(class_, Name) or (class_.module, class_.name) != ("numpy", "ndarray"):
        return opaque("a subclass of numpy.ndarray")
    state = None if made.state is None else made.state.value
    node = made.call.state
    if type(state) is not tuple or not isinstance(node, tuple):
        raise TypeError("the state of an array was expected")
    _, shape, dtype, is_fortran, data = state
    if isinstance(dtype, Opaque):
        return opaque(f"numpy.ndarray of {dtype.what}")
    if not isinstance(dtype, np.dtype):
        raise TypeError("a dtype was expected")
    if type(data) is str:  # bytes of Python 2 that can be text
        data = data.encode()
    shape = _shape(shape)
    if is_fortran is True:
        return _laid_out(made, data, node[4], dtype, shape, _column_major(shape, dtype.itemsize))
    return _array_of(made, data, node[4], dtype, shape)


def _from_buffer(made: Made) -> Found:
    data, dtype, order = made.arg(0), made.arg(1), made.arg(3)
    if isinstance(dtype, Opaque):
        return opaque(f"numpy.ndarray of {dtype.what}")
    if not isinstance(dtype, np.dtype) or not isinstance(made.call.args, tuple):
        raise TypeError("a dtype was expected")
    node, shape, axes = made.call.args[0], _shape(made.arg(2)), made.arg(4)
    if order == "F":
        return _laid_out(made, data, node, dtype, shape, _column_major(shape, dtype.itemsize))
    if order == "C":
        return _array_of(made, data, node, dtype, shape)
    if type(axes) is not tuple or sorted(map(integer, axes)) != list(range(len(shape))):
        raise TypeError("an order of axes was expected")
    strides = row_major(shape, dtype.itemsize)
    view = tuple(shape[axis] for axis in axes)
    return _laid_out(made, data, node, dtype, view, [strides[axis] for axis in axes])


def _scalar(made: Made) -> Found:
    dtype, data = made.arg(0), made.arg(1)
    if not isinstance(dtype, np.dtype) or type(data) is not bytes or len(data) != dtype.itemsize:
        return opaque("numpy scalar")
    return plain(np.frombuffer(data, dtype)[0])


_MULTIARRAY: Mapping[str, Symbol] = {"_reconstruct": _reconstruct, "scalar": _scalar}

SYMBOLS: Mapping[tuple[str, str], Symbol] = {
    ("numpy", "dtype"): _dtype,
    ("numpy._core.numeric", "_frombuffer"): _from_buffer,
    ("numpy.core.numeric", "_frombuffer"): _from_buffer,
    **{
        (module, name): symbol
        for module in ("numpy._core.multiarray", "numpy.core.multiarray")
        for name, symbol in _MULTIARRAY.items()
    },
}
