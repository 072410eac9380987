"""Checkpoints of Orbax: a directory for each item, with a tree of arrays in Zarr.

``_METADATA`` has the tree. Arrays are directories of files, or values of an OCDBT database. Before
0.5 they may be in a file in MessagePack, the *aggregate*. Neither jax nor tensorstore is imported.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence

from .. import _core
from ..errors import FormatError
from . import flax, lookup, zarr
from .description import Description, Value
from .files import corrupt, is_path_below, json_value, read_ranges

FAMILY = "Orbax"
#: The file with a checkpoint's own metadata, and the name of a step.
OF_CHECKPOINT = "_CHECKPOINT_METADATA"
STEP = re.compile(r"(?:.+_)?(\d+)")
_METADATA = "_METADATA"
_STRINGS = "_strings.json"
_MANIFEST = "manifest.ocdbt"
_AGGREGATE = "checkpoint"
#: The aggregate's text in the place of an array that is elsewhere.
_ELSEWHERE = "PLACEHOLDER://"
_UNFINISHED = ".orbax-checkpoint-tmp"
#: Files with an item that is JSON.
_JSON_FILES = ("metadata", "data.json")
#: Items that are not the state of a step.
_BESIDE = ("metrics",)
#: Containers without leaves, and ``None``.
_EMPTY: Mapping[str, object] = {"None": None, "Dict": {}, "List": [], "Tuple": (), "NamedTuple": ()}


def describe(path: str) -> Description | None:
    """Describes an item, or a step with items."""
    if not lookup.is_dir(path):
        return None
    names = lookup.names(path)
    items = [path]
    if _METADATA not in names:
        items = [os.path.join(path, name) for name in sorted(names) if _is_item(os.path.join(path, name))]
        if OF_CHECKPOINT not in names and items and all(map(_is_step, items)):
            return None  # a root
    if not any(lookup.exists(os.path.join(item, _METADATA)) for item in items):
        return None
    if _UNFINISHED in os.path.basename(lookup.real(path)):
        raise FormatError(f"{path}: this save of Orbax was never finished. Pass another step")
    memory = bytearray()
    states: dict[str, object] = {}
    files: list[str] = []
    for item in items:
        states[os.path.basename(item)] = _item(item, memory)
        files.append(os.path.join(item, _METADATA))
    main = [name for name in states if name not in _BESIDE]
    state = states[main[0]] if len(main) == 1 else states
    present = [file for file in files if lookup.exists(file)]
    return Description(FAMILY, path, state, files=present, memory=bytes(memory))


def _is_step(path: str) -> bool:
    """True if a directory with a tree is a step of a root. Versions before 0.5 show it only by its
    name."""
    names = lookup.names(path)
    return OF_CHECKPOINT in names or STEP.fullmatch(os.path.basename(path)) is not None


def _is_item(path: str) -> bool:
    return lookup.is_dir(path) and any(
        lookup.is_file(os.path.join(path, name)) for name in (_METADATA, *_JSON_FILES, "metrics")
    )


def _item(path: str, memory: bytearray) -> object:
    if lookup.is_file(os.path.join(path, _METADATA)):
        return _Item(path, memory).state()
    name = next(name for name in (*_JSON_FILES, "metrics") if lookup.is_file(os.path.join(path, name)))
    return Value(json_value(os.path.join(path, name)))


class _Database:
    """Values in an OCDBT database."""

    def __init__(self, path: str, memory: bytearray) -> None:
        self.path = path
        self._memory = memory
        self._places: dict[str, zarr.Stored] = {}
        names, entries = _core.ocdbt_entries(lookup.real(path))
        for name in names:
            if not is_path_below(name):
                raise corrupt(path, f"its database names the file {name[:100]!r}, which is no path below it")
        files = [os.path.join(path, name) for name in names]
        for key, value, place in entries:
            if value is not None:
                self._places[key] = zarr.Stored("", len(memory), len(value))
                memory += value
            elif place is not None:
                number, offset, nbytes = place
                self._places[key] = zarr.Stored(files[number], offset, nbytes)

    def place(self, key: str) -> zarr.Stored | None:
        return self._places.get(key)

    def contents(self, places: Sequence[zarr.Stored]) -> list[bytes]:
        stored = iter(read_ranges((one.file, one.offset, one.nbytes) for one in places if one.file))
        return [
            next(stored) if one.file else bytes(self._memory[one.offset : one.offset + one.nbytes])
            for one in places
        ]


class _Item:
    """A tree of arrays."""

    def __init__(self, path: str, memory: bytearray) -> None:
        self._path = path
        self._file = os.path.join(path, _METADATA)
        metadata = json_value(self._file)
        if not isinstance(metadata, dict) or not isinstance(metadata.get("tree_metadata"), dict):
            raise corrupt(self._file, "metadata with a tree were expected")
        self._tree: Mapping[str, object] = metadata["tree_metadata"]
        self._is_3 = metadata.get("use_zarr3") is True
        #: Versions before this key left out chunks of zeros in Zarr 3.
        keeps_zeros = not self._is_3 or metadata.get("store_array_data_equal_to_fill_value") is True
        self._zeros = None if keeps_zeros else zarr.Zeros(memory)
        is_database = lookup.is_file(os.path.join(path, _MANIFEST))
        #: Orbax writes no database for a tree without arrays.
        self._lacks_database = metadata.get("use_ocdbt") is True and not is_database
        self._store: zarr.Store = _Database(path, memory) if is_database else zarr.Files(path)
        aggregate = os.path.join(path, _AGGREGATE)
        self._aggregate = flax.tree(aggregate) if lookup.is_file(aggregate) else None
        strings = os.path.join(path, _STRINGS)
        self._strings = json_value(strings) if lookup.is_file(strings) else {}

    def state(self) -> object:
        """The tree, with arrays as tensors."""
        rows = list(self._rows())
        wanted = [name for _, name, kind, value in rows if value is None and kind not in (*_EMPTY, "string")]
        if wanted and self._lacks_database:
            raise corrupt(self._path, f"its {_MANIFEST} is missing")
        arrays = zarr.arrays(self._store, wanted, self._is_3, self._zeros)
        root: dict[str | int, object] = {}
        for path, name, kind, value in rows:
            if value is None:
                value = arrays[name] if name in arrays else self._value(name, kind)
            if not path:
                return value
            self._put(root, path, value)
        return _with_lists(root)

    def _rows(self) -> Iterator[tuple[Sequence[str | int], str, str, object]]:
        """The leaves: path, name, kind, and the value if the aggregate has it."""
        for row in self._tree.values():
            try:
                rows = row["key_metadata"]  # type: ignore[index]
                keys = [(one["key"], one["key_type"] == 1) for one in rows]
                kind = row["value_metadata"]["value_type"]  # type: ignore[index]
            except (KeyError, TypeError, IndexError) as error:
                raise corrupt(self._file, f"a row of its tree has no {error}") from error
            if len(keys) >= _core.MAX_DEPTH:
                raise corrupt(self._file, f"a row of its tree has {len(keys)} levels")
            path = [_key(self._file, key, is_index) for key, is_index in keys]
            yield path, ".".join(str(key) for key, _ in keys), str(kind), self._aggregated(path)

    def _put(self, root: dict[str | int, object], path: Sequence[str | int], value: object) -> None:
        at = root
        for key in path[:-1]:
            child = at.setdefault(key, {})
            if type(child) is not dict:
                raise corrupt(self._file, f"`{str(path[-1])[:200]}` is below another leaf of its tree")
            at = child
        if path[-1] in at:
            raise corrupt(self._file, f"`{str(path[-1])[:200]}` is twice in its tree")
        at[path[-1]] = value

    def _aggregated(self, path: Sequence[str | int]) -> object:
        """A value of the aggregate. ``None``: it is elsewhere."""
        value = self._aggregate
        for key in path:
            if isinstance(value, dict):
                value = value.get(key, value.get(str(key)))
            elif isinstance(value, list) and isinstance(key, int) and key < len(value):
                value = value[key]
            else:
                return None
        if isinstance(value, (dict, list)) or (isinstance(value, str) and value.startswith(_ELSEWHERE)):
            return None
        return value

    def _value(self, name: str, kind: str) -> object:
        if kind in _EMPTY:
            empty = _EMPTY[kind]
            return type(empty)() if isinstance(empty, (dict, list, tuple)) else Value(None)
        strings = self._strings
        if not isinstance(strings, dict) or not isinstance(strings.get(name), str):
            raise corrupt(self._path, f"the text `{name[:200]}` is missing in {_STRINGS}")
        return Value(strings[name])


def _key(file: str, key: object, is_index: bool) -> str | int:
    if not is_index:
        return str(key)
    text = str(key)
    if not text.isdecimal() or len(text) > 9:
        raise corrupt(file, f"a list has the index {text[:40]!r}")
    return int(text)


def _with_lists(root: object) -> object:
    """Dicts with the keys 0, 1, 2, … as lists: these were lists or tuples before."""
    if type(root) is not dict:
        return root
    found = {key: _with_lists(value) for key, value in root.items()}
    numbers = [key for key in found if isinstance(key, int)]
    if numbers and len(numbers) == len(found) and sorted(numbers) == list(range(len(found))):
        return [found[number] for number in range(len(found))]
    return found
