"""numpy archives, as ``numpy.savez`` writes them: one file with an array for each name."""

from __future__ import annotations

import struct

import numpy as np

from ..._paths import named
from ..._state.specs import to_dtype
from ...errors import MisuseError
from .archive import Archive
from .content import Content, FileOptions
from .output import OutputFile, check_dtypes

_MAGIC = b"\x93NUMPY"
_ALIGNMENT = 64
#: The longest name of a member of a zip archive.
_MAX_NAME_BYTES = 0xFFFF


def plan(content: Content, options: FileOptions) -> list[OutputFile]:
    """Plans one file. Tied arrays are written under one of their names."""
    file = OutputFile(options.name)
    archive = Archive(file)
    check_dtypes(content.tensors, _is_read, "files of numpy cannot hold", "Pass cast=, or leave them out")
    for tensor in content.tensors:
        name = f"{tensor.name}.npy"
        if len(name.encode()) > _MAX_NAME_BYTES:
            raise MisuseError(
                f"{named(tensor.source[:100] + '...')}: its name in the archive has {len(name.encode())} bytes, more than {_MAX_NAME_BYTES}. Rename it with map=, or leave it out with exclude="
            )
        archive.add(name, _header(to_dtype(tensor.dtype), tensor.shape), tensor)
    archive.finish()
    return [file]


def _is_read(name: str) -> bool:
    """True if numpy reads a dtype from its files."""
    dtype = to_dtype(name)
    return dtype.isbuiltin == 1 or dtype.kind in "mM"


def _header(dtype: np.dtype, shape: tuple[int, ...]) -> bytes:
    """The head of an array, padded so that its elements are aligned."""
    text = f"{{'descr': {dtype.newbyteorder('<').str!r}, 'fortran_order': False, 'shape': {shape!r}, }}"
    text += " " * (-(len(_MAGIC) + 4 + len(text) + 1) % _ALIGNMENT) + "\n"
    return _MAGIC + struct.pack("<BBH", 1, 0, len(text)) + text.encode("latin1")
