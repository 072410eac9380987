"""Checkpoints of ``torch.distributed.checkpoint``: data files, and a pickle with all places.

Each tensor is one chunk, and each chunk is an archive as of ``torch.save``. Tied tensors share one.
Names are those of a flattened state dict. torch reads these files from version 2.4 on.
"""

from __future__ import annotations

from .content import Content, FileOptions
from .output import OutputFile, OutputTensor
from .pickling import Pickle
from .safetensors import shards
from .torch import add_archive, add_dtype, check_torch_dtypes

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
#: The alignment of an archive in a data file.
_ALIGNMENT = 64


def plan(content: Content, options: FileOptions) -> list[OutputFile]:
    """Plans the data files and the metadata."""
    check_torch_dtypes(content.tensors)
    files: list[OutputFile] = []
    places: dict[str, tuple[str, int, int]] = {}
    assert options.shard_bytes is not None, "the output is a directory"
    parts = shards(content.tensors, options.shard_bytes) if content.tensors else []
    for number, shard in enumerate(parts):
        file = OutputFile(f"__0_{number}.distcp")
        for tensor in shard:
            file.add_bytes(bytes(-file.length % _ALIGNMENT))
            begin = file.length
            add_archive(file, tensor, [tensor], {tensor.name: tensor.name})
            places[tensor.name] = (file.name, begin, file.length - begin)
        files.append(file)
    metadata = OutputFile(".metadata")
    named = [(tensor, places[tensor.name]) for tensor in content.tensors]
    named += [(tensor, places[content.ties[tensor.name]]) for tensor in content.tied]
    metadata.add_bytes(_metadata(named))
    return [*files, metadata]


def _metadata(tensors: list[tuple[OutputTensor, tuple[str, int, int]]]) -> bytes:
    out = Pickle(lambda *_: False)
    out.new(_METADATA, "Metadata")
    out.begin_dict()
    out.add("state_dict_metadata")
    out.begin_dict()
    for tensor, _ in tensors:
        out.add(tensor.name)
        _add_tensor(out, tensor)
    out.end_dict()
    out.add("planner_data")
    out.add({tensor.name: tensor.places for tensor, _ in tensors})
    out.add("storage_data")
    out.begin_dict()
    for tensor, (file, offset, length) in tensors:
        out.new(_METADATA, "MetadataIndex")
        out.begin_dict()
        out.add("fqn")
        out.add(tensor.name)
        out.add("offset")
        _add_size(out, (0,) * len(tensor.shape))
        out.end_dict()
        out.build()
        out.new(_FILESYSTEM, "_StorageInfo")
        out.add({"relative_path": file, "offset": offset, "length": length})
        out.build()
    out.end_dict()
    out.end_dict()
    out.build()
    return out.finish()


def _add_tensor(out: Pickle, tensor: OutputTensor) -> None:
    out.new(_METADATA, "TensorStorageMetadata")
    out.begin_dict()
    out.add("properties")
    out.new(_METADATA, "TensorProperties")
    out.mark()
    add_dtype(out, tensor.dtype)
    out.call_with("torch.serialization", "_get_layout", "torch.strided")
    out.add(False)
    out.call_with(_METADATA, "_MEM_FORMAT_ENCODING", 0)  # contiguous
    out.add(False)
    out.tuple()
    out.build()
    out.add("size")
    _add_size(out, tensor.shape)
    out.add("chunks")
    out.begin_list()
    out.new(_METADATA, "ChunkStorageMetadata")
    out.begin_dict()
    out.add("offsets")
    _add_size(out, (0,) * len(tensor.shape))
    out.add("sizes")
    _add_size(out, tensor.shape)
    out.end_dict()
    out.build()
    out.end_list()
    out.end_dict()
    out.build()


def _add_size(out: Pickle, sizes: tuple[int, ...]) -> None:
    out.call_with("torch", "Size", sizes)
