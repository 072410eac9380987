"""safetensors: one file, or shards with an index, as ``save_pretrained`` of Hugging Face writes
them.

The state is a flat dict of tensors by name. The text metadata of the files is the checkpoint's
custom metadata. Packed dtypes of less than a byte are listed, and cannot be restored. The writers
of DCP cut a tensor over several files, and note in each file where its parts begin.
"""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from .. import _core
from .._state.specs import to_dtype
from . import lookup
from .description import MAX_SIZE, Chunk, Description, Opaque, Tensor, fits
from .files import corrupt, of_model, read, refuse_pointer, weight_map

FAMILY = "safetensors"
_SUFFIX = ".safetensors"
_INDEX = ".safetensors.index.json"
#: A file of several: stem, number and count. Ranks of DCP put their own number before the stem.
_NUMBERED = re.compile(r"(?:shard-\d+-)?(.+)-(\d{5})-of-(\d{5})\.safetensors")
#: The entry of the text metadata in which DCP notes where parts begin, and its longest text.
_SHARDING = "DCP_SHARDING_INFO"
_MAX_SHARDING_BYTES = 16 << 20

#: The dtypes of the format, by the names that numpy and ml_dtypes give them.
DTYPES = {
    "BOOL": "bool",
    "U8": "uint8",
    "I8": "int8",
    "F8_E5M2": "float8_e5m2",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz",
    "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "I16": "int16",
    "U16": "uint16",
    "F16": "float16",
    "BF16": "bfloat16",
    "I32": "int32",
    "U32": "uint32",
    "F32": "float32",
    "I64": "int64",
    "U64": "uint64",
    "F64": "float64",
    "C64": "complex64",
}


@dataclass(frozen=True, slots=True)
class Header:
    """The header of a file."""

    path: str
    tensors: Mapping[str, Tensor | Opaque]
    #: The text metadata.
    texts: Mapping[str, str]
    #: The first element of each tensor in the whole one, if the file has parts.
    starts: Mapping[str, tuple[int, ...]]


def describe(path: str) -> Description | None:
    """Describes a file, an index, or a directory with either. A directory with several files and no
    index is read whole, if no name occurs twice except for parts. A single file has its parts."""
    if lookup.is_file(path):
        if path.endswith(_INDEX):
            return _sharded(path)
        if not path.endswith(_SUFFIX):
            return None
        header = read_header(path)
        return Description(FAMILY, path, header.tensors, header.texts)
    if not lookup.is_dir(path):
        return None
    names = sorted(lookup.names(path))
    chosen = of_model(path, names, "model.safetensors", "adapter_model.safetensors", _INDEX)
    if chosen is not None:
        return _sharded(chosen) if chosen.endswith(_INDEX) else _whole(path, [chosen])
    files = [os.path.join(path, name) for name in names if name.endswith(_SUFFIX)]
    _check_numbered(path, files)
    return _whole(path, files) if files else None


def _check_numbered(path: str, files: Sequence[str]) -> None:
    """Refuses a directory that lacks some of its numbered files. Ranks of DCP may each write a part
    of one number."""
    found: dict[tuple[str, int], set[int]] = {}
    for file in files:
        match = _NUMBERED.fullmatch(os.path.basename(file))
        if match is not None:
            found.setdefault((match[1], int(match[3])), set()).add(int(match[2]))
    for (stem, count), numbers in found.items():
        present = len(numbers & set(range(1, count + 1)))
        if present < count:
            raise corrupt(
                path,
                f"{present} of {count} files {stem}-…-of-{count:05}{_SUFFIX} are there. Download or copy the others, or pass one file",
            )


def _whole(path: str, files: Sequence[str]) -> Description:
    headers: dict[str, list[Header]] = {}
    texts: dict[str, str] = {}
    for file in files:
        header = read_header(file)
        texts |= header.texts
        for name in header.tensors:
            headers.setdefault(name, []).append(header)
    state = {name: _assembled(path, name, mine) for name, mine in headers.items()}
    return Description(FAMILY, path, state, texts, files)


def _assembled(path: str, name: str, headers: Sequence[Header]) -> Tensor | Opaque:
    """The tensor of the parts in these files. The length of a dimension is where its last part
    ends: the files do not say more."""
    parts = [header.tensors[name] for header in headers]
    starts = [header.starts.get(name) for header in headers]
    if None in starts:
        if len(parts) > 1:
            raise corrupt(
                headers[1].path, f"tensor `{name}` is in another file of {path} too; pass one of the files"
            )
        return parts[0]
    tensors = [one for one in parts if isinstance(one, Tensor)]
    if len(tensors) < len(parts):
        return next(one for one in parts if isinstance(one, Opaque))
    if len({(one.dtype, len(one.shape)) for one in tensors}) > 1:
        raise corrupt(path, f"the parts of tensor `{name}` differ in their dtypes or dimensions")
    placed = [(start, one) for start, one in zip(starts, tensors, strict=True) if start is not None]
    ends = [[at + size for at, size in zip(start, one.shape, strict=True)] for start, one in placed]
    shape = tuple(map(max, zip(*ends, strict=True)))
    covered = sum(math.prod(one.shape) for one in tensors)
    if covered != math.prod(shape):
        raise corrupt(
            path,
            f"the parts of tensor `{name}` have {covered} of {math.prod(shape)} elements; is a file missing?",
        )
    chunks = [replace(chunk, start=start) for start, one in placed for chunk in one.chunks]
    return Tensor(tensors[0].dtype, shape, tuple(chunks))


def _sharded(index: str) -> Description:
    """The shards that an index names. Tensors that it does not name are left out, as by other
    readers."""
    headers: dict[str, Header] = {}
    found: dict[str, Tensor | Opaque] = {}
    for name, shard in weight_map(index):
        if shard not in headers:
            headers[shard] = read_header(shard)
        if name not in headers[shard].tensors:
            where = os.path.basename(shard)
            raise corrupt(index, f"tensor `{name}` is not in {where}, where the index places it")
        found[name] = _assembled(index, name, [headers[shard]])
    texts = {key: text for header in headers.values() for key, text in header.texts.items()}
    return Description(FAMILY, index, found, texts)


def read_header(path: str, begin: int = 0) -> Header:
    """Reads the header of a file, or of one that is the rest of another file from a byte on."""
    if not begin:
        refuse_pointer(path)
    start, length = read(path, begin, 8)
    length -= begin
    header, _ = read(path, begin + 8, _core.safetensors_header_length(path, start, length))
    metadata, tensors = _core.safetensors_header(path, header, length)
    found: dict[str, Tensor | Opaque] = {}
    for name, dtype, sizes, offset, nbytes in tensors:
        shape = tuple(sizes)
        known = DTYPES.get(dtype)
        if known is None:
            found[name] = Opaque(f"{dtype}{list(shape)}")
        elif not fits(shape, to_dtype(known).itemsize):
            raise corrupt(path, f"tensor `{name}` has a shape that is too large: {list(shape)}")
        else:
            chunk = Chunk(path, begin + offset, nbytes, (0,) * len(shape), shape)
            found[name] = Tensor(known, shape, (chunk,) if nbytes else ())
    texts = dict(metadata)
    return Header(path, found, texts, _starts(path, found, texts.pop(_SHARDING, None)))


def _starts(
    path: str, tensors: Mapping[str, Tensor | Opaque], text: str | None
) -> dict[str, tuple[int, ...]]:
    """The first elements that DCP has noted."""
    if text is None:
        return {}
    if len(text) > _MAX_SHARDING_BYTES:
        raise corrupt(path, f"{_SHARDING} has {len(text)} bytes, more than {_MAX_SHARDING_BYTES}")
    try:
        noted = json.loads(text)
        starts = {name: tuple(noted[name]["saved_offsets"]) for name in tensors}
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise corrupt(path, f"{_SHARDING}: {type(error).__name__}: {error}") from error
    for name, start in starts.items():
        tensor = tensors[name]
        is_sound = all(type(at) is int and 0 <= at < MAX_SIZE for at in start)
        if not is_sound or (isinstance(tensor, Tensor) and len(start) != len(tensor.shape)):
            raise corrupt(path, f"tensor `{name}` begins at no element of a tensor of its dimensions")
    return starts
