"""numpy: one array (``.npy``), or an archive of arrays (``.npz``), compressed or not.

The state of an archive is a flat dict of tensors by name, as ``numpy.load`` shows it. A member that
is a pickle, or has a dtype that no tensor has, is listed, and cannot be restored.
"""

from __future__ import annotations

import math
import re

from .. import _core
from . import lookup
from .description import Chunk, Compressed, Description, Opaque, Tensor, fits
from .files import corrupt, guarded, read

FAMILY = "numpy"
_SUFFIX = ".npy"
_MAGIC = b"\x93NUMPY"
_ZIP_MAGICS = (b"PK\x03\x04", b"PK\x05\x06")
#: Bytes of an archive without a member: its end record.
_EMPTY_BYTES = 22
#: Bytes that tell the formats apart.
_START_BYTES = 6

#: Dtypes by numpy's kind and size. The dtypes of ``ml_dtypes`` lose their names: only those of one
#: kind and size are known again.
_DTYPES = {
    "b1": "bool",
    "i1": "int8",
    "i2": "int16",
    "i4": "int32",
    "i8": "int64",
    "u1": "uint8",
    "u2": "uint16",
    "u4": "uint32",
    "u8": "uint64",
    "f1": "float8_e5m2",
    "f2": "float16",
    "f4": "float32",
    "f8": "float64",
    "c8": "complex64",
    "c16": "complex128",
    "V2": "bfloat16",
}
_TIMES = {"M8": "datetime64", "m8": "timedelta64"}
_ENGINE_DTYPES = frozenset(_core.dtype_names())


def describe(path: str) -> Description | None:
    """Describes an array, or an archive with an array."""
    if not lookup.is_file(path):
        return None
    start, length = read(path, 0, _START_BYTES)
    if start == _MAGIC:
        (array,) = _arrays(path, [("", path, 0, length)])
        return Description(FAMILY, path, array)
    return _archive(path, length) if start[:4] in _ZIP_MAGICS else None


def _archive(path: str, file_length: int) -> Description | None:
    directory = _core.ZipDirectory(lookup.real(path))
    members = directory.members()
    if not any(member[0].endswith(_SUFFIX) for member in members) and (members or not path.endswith(".npz")):
        return None
    if not members and file_length > _EMPTY_BYTES:
        raise corrupt(path, f"its end record names no member, and the file has {file_length} bytes")
    state: dict[str, Tensor | Opaque] = {}
    #: Compressed members. A verification decodes all of them, also those without a tensor.
    streams: list[Compressed] = []
    arrays: list[tuple[str, str | Compressed, int, int]] = []
    offsets = directory.contents(range(len(members)))
    for (member, method, crc, stored, length), offset in zip(members, offsets, strict=True):
        name = member.removesuffix(_SUFFIX)
        if name in state:
            raise corrupt(path, f"array `{name}` occurs twice, as `{name}` and `{name}{_SUFFIX}`")
        state[name] = Opaque(f"file of {length} bytes")
        file: str | Compressed = path
        if method != "stored":
            file, offset = Compressed(path, offset, stored, length, crc), 0
            streams.append(file)
        if member.endswith(_SUFFIX):
            arrays.append((name, file, offset, length))
    state.update(zip((name for name, *_ in arrays), _arrays(path, arrays), strict=True))
    return Description(
        FAMILY, path, state, files=[path, *streams], guarded=lambda: {path: guarded(members, offsets)}
    )


def _arrays(path: str, places: list[tuple[str, str | Compressed, int, int]]) -> list[Tensor | Opaque]:
    """The arrays at those places: name, file, offset and length."""
    rows: list[_core._NpyPlace] = []
    for name, file, offset, length in places:
        if isinstance(file, Compressed):
            rows.append((name, file.offset, file.nbytes, file.compression))
        else:
            rows.append((name, offset, length, None))
    headers = _core.npy_headers(lookup.real(path), rows)
    found: list[Tensor | Opaque] = []
    for (name, file, offset, length), (descr, fortran, sizes, header) in zip(places, headers, strict=True):
        shape = tuple(sizes)
        order, itemsize, dtype = _dtype(descr)
        if dtype is None:
            found.append(Opaque(f"{_what(descr)} of shape {shape}"))
            continue
        nbytes = math.prod(shape) * itemsize
        if nbytes != length - header or not fits(shape, itemsize):
            where = f"array `{name}`: " if name else ""
            raise corrupt(
                path, f"{where}{length - header} bytes are not those of {descr} of shape {list(shape)}"
            )
        strides = None
        if fortran:
            strides = tuple(itemsize * math.prod(shape[:axis]) for axis in range(len(shape)))
        whole = Chunk(file, offset + header, nbytes, (0,) * len(shape), shape, strides, order == ">")
        found.append(Tensor(dtype, shape, (whole,) if nbytes else ()))
    return found


def _dtype(descr: str | None) -> tuple[str, int, str | None]:
    """The byte order, size and name of a dtype that the engine has."""
    parts = re.fullmatch(r"([<>|])([a-zA-Z])(\d+)(\[\w+\])?", descr or "")
    if parts is None:
        return "", 0, None
    order, kind, size, unit = parts.groups()
    name = _DTYPES.get(kind + size) if unit is None else _TIMES.get(kind + size, "") + unit
    itemsize = int(size[:4])
    return order if itemsize > 1 else "|", itemsize, name if name in _ENGINE_DTYPES else None


def _what(descr: str | None) -> str:
    """A description of an array that cannot be restored."""
    if descr is None:
        return "structured array"
    if re.fullmatch(r"\|O\d*", descr):
        return "array of objects, a pickle,"
    if re.fullmatch(r"[<>|][VW]\d+", descr):
        return f"array of {descr}, a dtype without its name,"
    return f"array of {descr}"
