"""Checkpoints of ``torch.distributed.checkpoint``: data files, and a pickle with all places.

Each tensor is one chunk, and each chunk is an archive as of ``torch.save``. Tied tensors share one.
Names are those of a flattened state dict. torch reads these files from version 2.4 on.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeAlias

from ..._paths import render
from .content import Content, FileOptions
from .output import OutputFile, OutputTensor, shards
from .pickling import Pickle
from .torch import add_archive, add_dtype, check_torch_dtypes

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
#: The alignment of an archive in a data file.
_ALIGNMENT = 64


#: A file, and offset and length in it.
_Place: TypeAlias = tuple[str, int, int]


def plan(content: Content, options: FileOptions) -> list[OutputFile]:
    """Plans the data files and the metadata."""
    return plan_items(content, options, {})


def paths(content: Content) -> dict[str, str]:
    """The rendered paths of the tensors in the output, by name."""
    return {
        one.name: render(("k", part) if isinstance(part, str) else ("x", part) for part in one.places)
        for one in content.every
    }


def plan_items(
    content: Content, options: FileOptions, objects: Mapping[str, object], has_paths: bool = True
) -> list[OutputFile]:
    """Plans the data files and the metadata. ``objects`` are plain values by name. Without paths,
    names are not those of a nested state."""
    check_torch_dtypes(content.tensors)
    files: list[OutputFile] = []
    places: dict[str, _Place] = {}
    assert options.shard_bytes is not None, "the output is a directory"
    parts = shards(content.tensors, options.shard_bytes) if content.tensors else []
    for shard in parts:
        file = OutputFile(f"__0_{len(files)}.distcp")
        for tensor in shard:
            places[tensor.name] = _add_item(file, tensor, [tensor])
        files.append(file)
    if objects:
        file = OutputFile(f"__0_{len(files)}.distcp")
        places |= {name: _add_item(file, value, []) for name, value in objects.items()}
        files.append(file)
    metadata = OutputFile(".metadata")
    named = [(tensor, places[tensor.name]) for tensor in content.tensors]
    named += [(tensor, places[content.ties[tensor.name]]) for tensor in content.tied]
    metadata.add_bytes(_metadata(named, {name: places[name] for name in objects}, has_paths))
    return [*files, metadata]


def _add_item(file: OutputFile, value: object, tensors: list[OutputTensor]) -> _Place:
    """Adds the archive of a tensor or an object."""
    file.add_bytes(bytes(-file.length % _ALIGNMENT))
    begin = file.length
    add_archive(file, value, tensors, {tensor.name: tensor.name for tensor in tensors})
    return file.name, begin, file.length - begin


def _metadata(
    tensors: list[tuple[OutputTensor, _Place]], objects: Mapping[str, _Place], has_paths: bool
) -> bytes:
    out = Pickle(lambda *_: False)
    out.new(_METADATA, "Metadata")
    out.begin_dict()
    out.add("state_dict_metadata")
    out.begin_dict()
    for tensor, _ in tensors:
        out.add(tensor.name)
        _add_tensor(out, tensor)
    for name in objects:
        out.add(name)
        out.new(_METADATA, "BytesStorageMetadata")
    out.end_dict()
    out.add("planner_data")
    out.add({tensor.name: tensor.places for tensor, _ in tensors} if has_paths else None)
    out.add("storage_data")
    out.begin_dict()
    for tensor, place in tensors:
        _add_place(out, tensor.name, (0,) * len(tensor.shape), place)
    for name, place in objects.items():
        _add_place(out, name, None, place)
    out.end_dict()
    out.end_dict()
    out.build()
    return out.finish()


def _add_place(out: Pickle, name: str, offset: tuple[int, ...] | None, place: _Place) -> None:
    """Writes the place of a tensor, or of an object, which has no offset."""
    out.new(_METADATA, "MetadataIndex")
    out.begin_dict()
    out.add("fqn")
    out.add(name)
    out.add("offset")
    if offset is None:
        out.add(None)
    else:
        _add_size(out, offset)
    out.end_dict()
    out.build()
    file, begin, length = place
    out.new(_FILESYSTEM, "_StorageInfo")
    out.add({"relative_path": file, "offset": begin, "length": length})
    out.build()


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
