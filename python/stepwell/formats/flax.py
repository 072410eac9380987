"""Flax: the MessagePack file that ``flax.serialization.to_bytes`` makes, and older checkpoints.

The state is that of ``flax.serialization.msgpack_restore``: Flax has turned lists and tuples into
dicts with the keys "0", "1" and so on. A numpy scalar is a tensor without dimensions.
"""

from __future__ import annotations

import math
import os
import re

from .. import _core
from .._paths import extend, named
from .._state.specs import to_dtype
from ..errors import CorruptCheckpoint
from . import lookup
from .description import Chunk, Description, Opaque, Tensor, fits
from .files import corrupt, read
from .numpy_symbols import MAX_DIMS

FAMILY = "flax"
#: The file's name in directories of Hugging Face.
_MODEL = "flax_model.msgpack"
_CHUNKED = "__msgpack_chunked_array__"
#: Flax's types in MessagePack.
_ARRAY, _COMPLEX, _SCALAR = 1, 2, 3
#: A map whose first key is text.
_START = re.compile(
    rb"(?:[\x81-\x8f]|\xde..|\xdf....)(?:[\xa1-\xbf]|\xd9.|\xda..)[^\x00-\x1f\x7f]", re.DOTALL
)
_START_BYTES = 16
#: Names that old versions gave to bfloat16.
_OLD_NAMES = {"V2": "bfloat16", "|V2": "bfloat16", "<V2": "bfloat16", "void16": "bfloat16"}
_DTYPES = frozenset(_core.dtype_names())


def describe(path: str) -> Description | None:
    """Describes a file, or a directory with ``flax_model.msgpack``."""
    if lookup.is_dir(path):
        path = os.path.join(path, _MODEL)
    if not lookup.is_file(path):
        return None
    start, _ = read(path, 0, _START_BYTES)
    if not _START.match(start):
        return None
    return Description(FAMILY, path, tree(path))


def tree(path: str) -> object:
    """The state in a file."""
    value = _core.msgpack(lookup.real(path), (_ARRAY, _COMPLEX, _SCALAR))
    return _Reader(path).value(value, "")


class _Reader:
    """Understands the values of one file. Its parser bounds their depth."""

    def __init__(self, path: str) -> None:
        self.path = path

    def value(self, value: object, place: str) -> object:
        """A value, with tensors in the place of arrays."""
        if isinstance(value, dict):
            if _CHUNKED in value:
                return self.chunked(value, place)
            return {key: self.value(one, _below(place, key)) for key, one in value.items()}
        if isinstance(value, list):
            return [self.value(one, extend(place, ("x", at))) for at, one in enumerate(value)]
        if not isinstance(value, tuple):
            return value
        if len(value) == 2:
            return Opaque(f"bytes[{value[1]}]")
        code, _, length, content = value
        if code == _COMPLEX:
            match content:
                case [float() | int() as real, float() | int() as imaginary]:
                    return complex(real, imaginary)
            raise self.corrupt(place, "a complex number was expected")
        if code in (_ARRAY, _SCALAR):
            dtype, shape, offset, nbytes = self.array(content, place)
            whole = Chunk(self.path, offset, nbytes, (0,) * len(shape), shape)
            return self.tensor(dtype, shape, [whole], place)
        return Opaque(f"MessagePack type {code}, {length} bytes")

    def array(self, content: object, place: str) -> tuple[str, tuple[int, ...], int, int]:
        """Dtype, shape, offset and bytes of an array."""
        match content:
            case [list() as sizes, str() as name, (int() as offset, int() as nbytes)]:
                return _OLD_NAMES.get(name, name), self.shape(sizes, place), offset, nbytes
        raise self.corrupt(place, "an array has a shape, a dtype and bytes")

    def shape(self, sizes: list[object], place: str) -> tuple[int, ...]:
        shape = tuple(one for one in sizes if type(one) is int and one >= 0)
        if len(shape) != len(sizes) or len(shape) > MAX_DIMS:
            raise self.corrupt(place, f"a shape has at most {MAX_DIMS} sizes, none below zero")
        return shape

    def chunked(self, value: dict[object, object], place: str) -> Tensor | Opaque:
        """A large array, which Flax cuts into runs of its elements."""
        parts, start, dtypes = [], 0, set()
        for part in self.parts(value, "chunks", place):
            if not isinstance(part, tuple) or len(part) != 4 or part[0] != _ARRAY:
                raise self.corrupt(place, "a chunk of an array was expected")
            dtype, shape, offset, nbytes = self.array(part[3], place)
            count = math.prod(shape)
            parts.append(Chunk(self.path, offset, nbytes, (start,), (count,)))
            start += count
            dtypes.add(dtype)
        if len(dtypes) != 1:
            raise self.corrupt(place, f"the chunks of an array have one dtype, not {sorted(dtypes)}")
        shape = self.shape(self.parts(value, "shape", place), place)
        return self.tensor(dtypes.pop(), shape, parts, place)

    def parts(self, value: dict[object, object], name: str, place: str) -> list[object]:
        """A tuple that Flax has made a dict."""
        parts = value.get(name)
        if not isinstance(parts, dict) or any(str(at) not in parts for at in range(len(parts))):
            raise self.corrupt(place, f"a chunked array has {name} by number")
        return [parts[str(at)] for at in range(len(parts))]

    def tensor(self, dtype: str, shape: tuple[int, ...], chunks: list[Chunk], place: str) -> Tensor | Opaque:
        if dtype not in _DTYPES:
            return Opaque(f"array of {dtype} of shape {shape}")
        itemsize = to_dtype(dtype).itemsize
        wrong = any(math.prod(one.extent) * itemsize != one.nbytes for one in chunks)
        whole = math.prod(shape) * itemsize
        if wrong or sum(one.nbytes for one in chunks) != whole or not fits(shape, itemsize):
            nbytes = sum(one.nbytes for one in chunks)
            raise self.corrupt(place, f"{nbytes} bytes are not those of {dtype} of shape {list(shape)}")
        return Tensor(dtype, shape, tuple(one for one in chunks if one.nbytes))

    def corrupt(self, place: str, what: str) -> CorruptCheckpoint:
        return corrupt(self.path, f"{named(place)}: {what}")


def _below(place: str, key: object) -> str:
    return extend(place, ("i", key) if isinstance(key, int) else ("k", str(key)))
