"""safetensors: one file, or shards with an index, as ``save_pretrained`` of Hugging Face writes
them.

The state is a flat dict of tensors by name. The text metadata of the files is the checkpoint's
custom metadata. Packed dtypes of less than a byte are listed, and cannot be restored.
"""

from __future__ import annotations

import os

from .. import _core
from .description import Chunk, Description, Opaque, Tensor
from .files import corrupt, read, weight_map

FAMILY = "safetensors"
_SUFFIX = ".safetensors"
_INDEX = ".safetensors.index.json"

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


def describe(path: str) -> Description | None:
    """Describes a file, an index, or a directory with either. A directory with several files and no
    index is read whole, if no name occurs twice."""
    if os.path.isfile(path):
        if path.endswith(_INDEX):
            return _sharded(path)
        return _whole(path, [path]) if path.endswith(_SUFFIX) else None
    if not os.path.isdir(path):
        return None
    names = sorted(os.listdir(path))
    files = [os.path.join(path, name) for name in names if name.endswith(_SUFFIX)]
    # Readers prefer a whole file to an index beside it.
    whole = [
        file for file in files if os.path.basename(file) in ("model.safetensors", "adapter_model.safetensors")
    ]
    if len(whole) == 1:
        return _whole(path, whole)
    indexes = [os.path.join(path, name) for name in names if name.endswith(_INDEX)]
    if len(indexes) == 1:
        return _sharded(indexes[0])
    if len(indexes) > 1:
        raise corrupt(
            path, f"{len(indexes)} indexes ({', '.join(map(os.path.basename, indexes))}); pass one of them"
        )
    return _whole(path, files) if files else None


def _whole(path: str, files: list[str]) -> Description:
    found: dict[str, Tensor | Opaque] = {}
    metadata: dict[str, str] = {}
    for file in files:
        tensors, texts = read_header(file)
        twice = next((name for name in tensors if name in found), None)
        if twice is not None:
            raise corrupt(file, f"tensor `{twice}` is in another file of {path} too; pass one of the files")
        found |= tensors
        metadata |= texts
    return Description(FAMILY, path, found, metadata)


def _sharded(index: str) -> Description:
    """The shards that an index names. Tensors that it does not name are left out, as by other
    readers."""
    headers: dict[str, dict[str, Tensor | Opaque]] = {}
    found: dict[str, Tensor | Opaque] = {}
    metadata: dict[str, str] = {}
    for name, shard in weight_map(index):
        if shard not in headers:
            headers[shard], texts = read_header(shard)
            metadata |= texts
        tensor = headers[shard].get(name)
        if tensor is None:
            where = os.path.basename(shard)
            raise corrupt(index, f"tensor `{name}` is not in {where}, where the index places it")
        found[name] = tensor
    return Description(FAMILY, index, found, metadata)


def read_header(path: str) -> tuple[dict[str, Tensor | Opaque], dict[str, str]]:
    """Returns the tensors of a file by name, and its text metadata."""
    start, length = read(path, 0, 8)
    header, _ = read(path, 8, _core.safetensors_header_length(path, start, length))
    metadata, tensors = _core.safetensors_header(path, header, length)
    found: dict[str, Tensor | Opaque] = {}
    for name, dtype, sizes, offset, nbytes in tensors:
        shape = tuple(sizes)
        known = DTYPES.get(dtype)
        if known is None:
            found[name] = Opaque(f"{dtype}{list(shape)}")
        else:
            chunk = Chunk(path, offset, nbytes, (0,) * len(shape), shape)
            found[name] = Tensor(known, shape, (chunk,) if nbytes else ())
    return found, dict(metadata)
