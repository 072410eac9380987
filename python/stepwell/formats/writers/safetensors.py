"""safetensors: one file, or shards with an index, as ``transformers`` loads them.

The data begins at a multiple of 4096 bytes. Tensors with larger elements come first, so that all
elements are aligned.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from ...errors import MisuseError
from ..safetensors import DTYPES
from .content import Content, FileOptions
from .output import OutputFile, OutputTensor, check_dtypes, shards

#: The alignment of the data in a file.
_DATA_ALIGNMENT = 4096
#: The longest header that the library reads.
_MAX_HEADER_BYTES = 100_000_000
_NAMES = {dtype: name for name, dtype in DTYPES.items()}
_METADATA = "__metadata__"


def plan(content: Content, options: FileOptions) -> list[OutputFile]:
    """Plans one file, or shards and their index."""
    check_dtypes(content.tensors, _NAMES.__contains__, "safetensors cannot hold", "Leave them out")
    for tensor in content.tensors:
        if tensor.name == _METADATA:
            raise MisuseError(
                f"a tensor cannot be named {_METADATA!r} in safetensors. Leave it out with exclude="
            )
    if options.shard_bytes is None:
        return [_file(options.name, content.tensors, content.metadata)]
    parts = shards(content.tensors, options.shard_bytes)
    if len(parts) == 1:
        return [_file("model.safetensors", parts[0], content.metadata)]
    names = [f"model-{n + 1:05}-of-{len(parts):05}.safetensors" for n in range(len(parts))]
    files = [_file(name, shard, content.metadata) for name, shard in zip(names, parts, strict=True)]
    index = OutputFile("model.safetensors.index.json")
    places = {tensor.name: name for name, shard in zip(names, parts, strict=True) for tensor in shard}
    total = {"total_size": sum(tensor.nbytes for tensor in content.tensors)}
    index.add_bytes(json.dumps({"metadata": total, "weight_map": places}, indent=2).encode() + b"\n")
    return [*files, index]


def _file(name: str, tensors: Sequence[OutputTensor], metadata: Mapping[str, str]) -> OutputFile:
    ordered = sorted(tensors, key=lambda tensor: -tensor.itemsize)
    header: dict[str, object] = {_METADATA: {**metadata, "format": "pt"}}
    end = 0
    for tensor in ordered:
        header[tensor.name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [end, end + tensor.nbytes],
        }
        end += tensor.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    length = (8 + len(text) + _DATA_ALIGNMENT - 1) // _DATA_ALIGNMENT * _DATA_ALIGNMENT - 8
    if length > _MAX_HEADER_BYTES:
        raise MisuseError(
            f"the names of {len(tensors)} tensors need a header of {length} bytes, and safetensors reads at most {_MAX_HEADER_BYTES}. Pass a smaller shard_size="
        )
    file = OutputFile(name)
    file.add_bytes(length.to_bytes(8, "little") + text.ljust(length))
    for tensor in ordered:
        file.add_tensor(tensor)
    return file
