"""``torch.save``: zip archives, streams of torch < 1.6, plain pickles with tensors, and shards with
an index.

An archive has the pickle of the object in ``data.pkl``, and its storages as members by key. An old
stream has five pickles, then the storages in the order of the last one. torch is not imported.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from . import deepspeed_symbols, lookup, numpy_symbols, python_symbols
from .description import Compressed, Description, Guarded
from .files import corrupt, of_model, read, refuse_pointer, weight_map
from .old_torch_stream import FileBytes, NestedStreams, OldStream, is_magic
from .pickle_values import Converter, Found, Malformed, PersistentLoad, Stream, Symbol
from .rank_files import Distributions, rank_files, whole_state
from .refused import refuse_members
from .torch_archive import Archive
from .torch_symbols import NAMES, TensorSymbols

FAMILY = "torch.save"
_INDEX = ".bin.index.json"

_SYMBOLS: Mapping[tuple[str, str], Symbol] = {
    **python_symbols.SYMBOLS,
    **numpy_symbols.SYMBOLS,
    **deepspeed_symbols.SYMBOLS,
}
_NAMES: Mapping[tuple[str, str], object] = {**python_symbols.NAMES, **NAMES}


@dataclass(frozen=True, slots=True)
class TorchFile:
    """The content of a file."""

    state: object
    distributions: Distributions
    #: Returns its ranges that have checksums.
    guarded: Callable[[], Sequence[Guarded]] = tuple
    #: Its compressed parts. A verification decodes all of them, also those without a tensor.
    streams: Sequence[Compressed] = ()


def describe(path: str) -> Description | None:
    """Describes a file, an index of shards, or a directory of ``save_pretrained`` or of verl."""
    if lookup.is_dir(path):
        return _directory(path)
    if not lookup.is_file(path):
        return None
    if path.endswith(_INDEX):
        return _sharded(path)
    found = _content(path)
    return None if found is None else _description(path, found.state, {path: found})


def _description(path: str, state: object, files: Mapping[str, TorchFile]) -> Description:
    def guarded() -> Mapping[str, Sequence[Guarded]]:
        return {name: file.guarded() for name, file in files.items()}

    return Description(FAMILY, path, state, files=with_streams(files), guarded=guarded)


def with_streams(files: Mapping[str, TorchFile]) -> list[str | Compressed]:
    """Returns the paths of files, and their compressed parts."""
    return [*files, *(stream for file in files.values() for stream in file.streams)]


def _directory(path: str) -> Description | None:
    names = sorted(lookup.names(path))
    chosen = of_model(path, names, "pytorch_model.bin", "adapter_model.bin", _INDEX)
    if chosen is not None:
        return describe(chosen)
    by_prefix = rank_files(path, names)
    return _of_ranks(path, by_prefix) if by_prefix else None


def _sharded(index: str) -> Description:
    """The shards that an index names. Tensors that it does not name are left out, as by other
    readers."""
    shards: dict[str, TorchFile] = {}
    found: dict[str, object] = {}
    for name, shard in weight_map(index):
        if shard not in shards:
            shards[shard] = required(shard)
        state = shards[shard].state
        if not isinstance(state, dict):
            raise corrupt(shard, "a dict of tensors was expected")
        if name not in state:
            where = os.path.basename(shard)
            raise corrupt(index, f"tensor `{name}` is not in {where}, where the index places it")
        found[name] = state[name]
    return _description(index, found, shards)


def _of_ranks(path: str, by_prefix: Mapping[str, Sequence[str]]) -> Description:
    """The files of all ranks. With those of an optimizer the state has two parts."""
    files: dict[str, TorchFile] = {}
    states: dict[str, object] = {}
    for prefix, names in by_prefix.items():
        mine = {name: required(name) for name in names}
        files |= mine
        of_ranks = list(mine.values())
        states[prefix] = whole_state(
            path, [one.state for one in of_ranks], [one.distributions for one in of_ranks]
        )
    return _description(path, states if len(states) > 1 else next(iter(states.values())), files)


def required(path: str) -> TorchFile:
    """Returns the content of a file of ``torch.save``."""
    found = _content(path)
    if found is None:
        raise corrupt(path, "a file of torch.save was expected")
    return found


def _content(path: str) -> TorchFile | None:
    """The content of a file; ``None`` if torch.save did not write it."""
    refuse_pointer(path)
    start, _ = read(path, 0, 4)
    if start == b"PK\x03\x04":
        return _zip_content(path)
    if len(start) > 1 and start[0] == 0x80 and 2 <= start[1] <= 5:
        return _stream_content(path)
    return None


def _stream_content(path: str) -> TorchFile:
    """The content of an old stream, or of a plain pickle."""
    source = FileBytes(path)
    root, end = source.pickle(0)
    if not is_magic(root):
        return converted(Stream(path, source.data, (path, 0)), root, _no_storage)
    old = OldStream(source, end)
    return converted(Stream(path, source.data, (path, 0)), old.root, old.storage)


def _no_storage(_: object) -> Found:
    raise Malformed("a persistent id, and the file has no storages")


def _zip_content(path: str) -> TorchFile | None:
    archive = Archive.of_file(path)
    if archive is None:
        return None
    refuse_members(path, archive.names)
    return archived(archive)


def archived(archive: Archive) -> TorchFile:
    """The object of an archive."""
    stream, root = archive.pickle()
    found = converted(stream, root, archive.storage)
    return replace(found, guarded=archive.guarded, streams=archive.streams())


def converted(stream: Stream, root: object, persistent: PersistentLoad) -> TorchFile:
    """The object of a pickle."""
    tensors = TensorSymbols()
    symbols = {
        **_SYMBOLS,
        **tensors.symbols,
        ("torch.storage", "_load_from_bytes"): NestedStreams().load,
    }
    found = Converter(stream, symbols, _NAMES, persistent).convert(root)
    return TorchFile(found.placed, tensors.distributions)
