"""Checkpoints of ``torch.distributed.checkpoint``: data files, and a pickle with all places.

Each tensor is one chunk, and each chunk is an archive as of ``torch.save``. Tied tensors share one.
Each plain value is an archive, too. Names are those of a flattened state dict. torch reads these
files from version 2.4 on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from ..._paths import named, render
from ...errors import MisuseError
from .content import Content, FileOptions, PlainValue, tensors_in
from .output import OutputFile, OutputTensor, shards
from .pickling import Pickle
from .torch import add_archive, add_dtype, check_torch_dtypes, plain

_METADATA = "torch.distributed.checkpoint.metadata"
_FILESYSTEM = "torch.distributed.checkpoint.filesystem"
#: The alignment of an archive in a data file.
_ALIGNMENT = 64


#: A file, and offset and length in it.
_Place: TypeAlias = tuple[str, int, int]
#: Keys and indices in a state.
_Path: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True, slots=True)
class Item:
    """A tensor or an object, which has an archive of its own."""

    name: str
    value: object
    #: The name of an item with the same archive.
    tied_to: str | None = None

    @property
    def nbytes(self) -> int:
        """The bytes of its tensors."""
        return sum(tensor.nbytes for tensor in tensors_in(self.value))


def plan(content: Content, options: FileOptions) -> list[OutputFile]:
    """Plans the data files and the metadata."""
    flat = list(_flattened(content.state))
    names: dict[str, _Path] = {}
    for path, _ in flat:
        name = _name(path)
        if names.setdefault(name, path) is not path:
            both = " and ".join(named(_rendered(one)) for one in (names[name], path))
            raise MisuseError(
                f"{both} have the same name in the output, {name!r}. Leave one out with exclude="
            )
    tensors = [value for _, value in flat if isinstance(value, OutputTensor)]
    objects = [Item(_name(path), value) for path, value in flat if not isinstance(value, OutputTensor)]
    return plan_items([*tensor_items(tensors, content.ties), *objects], options, names)


def paths(content: Content) -> dict[str, str]:
    """The rendered paths of the tensors in the output, by name."""
    return {
        tensor.name: _rendered((*path, *below))
        for path, value in _flattened(content.state)
        for below, tensor in _places(value)
    }


def tensor_items(tensors: Iterable[OutputTensor], ties: Mapping[str, str]) -> list[Item]:
    """The items of tensors. Of tied ones, the first has the archive."""
    first: dict[str, str] = {}
    found = []
    for tensor in tensors:
        holder = first.setdefault(ties.get(tensor.name, tensor.name), tensor.name)
        found.append(Item(tensor.name, tensor, None if holder == tensor.name else holder))
    return found


def plan_items(
    items: Sequence[Item], options: FileOptions, paths: Mapping[str, _Path] | None
) -> list[OutputFile]:
    """Plans the data files and the metadata. ``paths`` are those in a nested state, by name."""
    files: list[OutputFile] = []
    places: dict[str, _Place] = {}
    assert options.shard_bytes is not None, "the output is a directory"
    stored = [item for item in items if item.tied_to is None]
    check_torch_dtypes([tensor for item in stored for tensor in tensors_in(item.value)])
    arrays = [item for item in stored if any(tensors_in(item.value))]
    values = [item for item in stored if not any(tensors_in(item.value))]
    parts = shards(arrays, options.shard_bytes) if arrays else []
    for shard in [*parts, values] if values else parts:
        file = OutputFile(f"__0_{len(files)}.distcp")
        for item in shard:
            places[item.name] = _add_item(file, item.value)
        files.append(file)
    metadata = OutputFile(".metadata")
    metadata.add_bytes(_metadata([(one, places[one.tied_to or one.name]) for one in items], paths))
    return [*files, metadata]


def _flattened(state: object) -> Iterator[tuple[_Path, object]]:
    """The items of a state by path, as ``flatten_state_dict`` of torch has them. Keys are text. A
    state that is a list or a tuple has its indices as text. One leaf has the empty key."""
    state = _unwrapped(state)
    if isinstance(state, (list, tuple)):
        state = dict(enumerate(state))
    yield from _below((), state if isinstance(state, dict) else {"": state})


def _below(path: _Path, value: object) -> Iterator[tuple[_Path, object]]:
    value = _unwrapped(value)
    if isinstance(value, dict):
        for key, one in value.items():
            yield from _below((*path, str(key)), one)
    elif isinstance(value, list) and _is_divided(value):
        for at, one in enumerate(value):
            yield from _below((*path, at), one)
    else:
        yield path, value


def _unwrapped(value: object) -> object:
    return plain(value.value) if isinstance(value, PlainValue) else value


def _is_divided(value: object) -> bool:
    """True if each element is an item of its own: one is a tensor or a dict, or has one. Tuples are
    never divided."""
    value = _unwrapped(value)
    return isinstance(value, (dict, OutputTensor)) or (
        isinstance(value, list) and any(map(_is_divided, value))
    )


def _places(value: object) -> Iterator[tuple[_Path, OutputTensor]]:
    """The tensors in an item by their places below it."""
    if isinstance(value, OutputTensor):
        yield (), value
    elif isinstance(value, (dict, list, tuple)):
        for key, one in value.items() if isinstance(value, dict) else enumerate(value):
            for below, tensor in _places(one):
                yield (key, *below), tensor


def _name(path: _Path) -> str:
    return ".".join(map(str, path))


def _rendered(path: _Path) -> str:
    return render(("k", part) if isinstance(part, str) else ("x", part) for part in path)


def _add_item(file: OutputFile, value: object) -> _Place:
    """Adds the archive of a tensor or an object."""
    file.add_bytes(bytes(-file.length % _ALIGNMENT))
    begin = file.length
    tensors = list(tensors_in(value))
    add_archive(file, value, tensors, {tensor.name: tensor.name for tensor in tensors})
    return file.name, begin, file.length - begin


def _metadata(items: Sequence[tuple[Item, _Place]], paths: Mapping[str, _Path] | None) -> bytes:
    out = Pickle(lambda *_: False)
    out.new(_METADATA, "Metadata")
    out.begin_dict()
    out.add("state_dict_metadata")
    out.begin_dict()
    for item, _ in items:
        out.add(item.name)
        if isinstance(item.value, OutputTensor):
            _add_tensor(out, item.value)
        else:
            out.new(_METADATA, "BytesStorageMetadata")
    out.end_dict()
    out.add("planner_data")
    out.add(None if paths is None else dict(paths))
    out.add("storage_data")
    out.begin_dict()
    for item, place in items:
        one = item.value
        _add_place(out, item.name, (0,) * len(one.shape) if isinstance(one, OutputTensor) else None, place)
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
