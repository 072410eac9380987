"""The nodes of a checkpoint, with the places of their bytes. Nothing here reads an array."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import final

from . import _core
from ._manifest import Manifest
from ._paths import extend
from ._restore.structure import ContainerKind, Structure
from ._state.leaves import Reviver
from ._state.specs import to_dtype


@final
@dataclass(frozen=True, slots=True)
class StoredChunk:
    """A contiguous part of a leaf in a data file."""

    #: Path of the data file, relative to the step; ``None`` if another library has the bytes.
    file: str | None
    #: Its first byte there, and its length in bytes.
    offset: int
    nbytes: int
    #: First element and number of elements: of a box per dimension, of a run of the flattened array
    #: one number each; empty for objects.
    start: tuple[int, ...]
    extent: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class StoredNode:
    """A container or a leaf of a checkpoint."""

    #: Rendered path, its last component, and the number of the parent (0 for the root).
    path: str
    name: str
    parent: int
    #: ``"array"``, ``"object"``, or the kind of a container, such as ``"dict"``.
    kind: str
    #: Leaves at or below it, and the bytes that are stored for them.
    leaves: int
    stored_bytes: int
    #: Number of the leaf, in the order of :meth:`stepwell.Checkpoint.paths`; ``None`` for a
    #: container. The attributes below it belong to leaves.
    leaf: int | None = None
    dtype: str | None = None
    shape: tuple[int, ...] | None = None
    #: Path of the leaf that it is tied to, and whose bytes it shares.
    tied_to: str | None = None
    #: Name of its item.
    item: str | None = None
    chunks: tuple[StoredChunk, ...] = ()
    #: The class or dtype of a value of another library that is known by name only. Such a leaf is
    #: listed, and its value cannot be restored.
    opaque: str | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of its value."""
        if self.dtype is None or self.shape is None:
            return self.stored_bytes
        return prod(self.shape) * to_dtype(self.dtype).itemsize


def nodes(core: _core.Checkpoint, structure: Structure, manifest: Manifest) -> list[StoredNode]:
    """The nodes of an open checkpoint. Parents come before their children."""
    items = manifest["items"]
    files, places = core.places()
    rows = core.leaves()
    # Checkpoints of ours have none.
    opaque = {} if manifest["format_version"] else _opaque(core, rows)
    item_of = {str(top["name"]): str(item["name"]) for item in items for top in item["top_level"]}
    default = str(items[0]["name"]) if items else None
    leaf_paths: list[str] = core.leaf_paths()
    found: list[StoredNode] = []
    tops: list[str] = []
    for number, (parent, component, kind) in enumerate(structure.nodes):
        path = structure.paths[number]
        tops.append("" if component is None else path if parent == 0 else tops[parent])
        name = "" if component is None else extend("", component)
        if not isinstance(kind, int):
            found.append(StoredNode(path, name, parent, _container(kind), 0, 0))
            continue
        (what, dtype, shape, tied), chunks = rows[kind], places[kind]
        found.append(
            StoredNode(
                path,
                name,
                parent,
                "object" if what == "object" else "array",
                1,
                sum(chunk[2] for chunk in chunks),
                kind,
                dtype,
                None if shape is None else tuple(shape),
                None if tied is None else leaf_paths[tied],
                item_of.get(tops[number], default),
                tuple(
                    StoredChunk(None if file is None else files[file], at, n, tuple(start), tuple(extent))
                    for file, at, n, start, extent in chunks
                ),
                opaque.get(kind),
            )
        )
    totals = [[node.leaves, node.stored_bytes] for node in found]
    for number in range(len(found) - 1, 0, -1):
        above = totals[found[number].parent]
        above[0] += totals[number][0]
        above[1] += totals[number][1]
    return [
        node if node.leaf is not None else replace(node, leaves=leaves, stored_bytes=stored)
        for node, (leaves, stored) in zip(found, totals, strict=True)
    ]


def _opaque(core: _core.Checkpoint, rows: Sequence[_core._LeafRow]) -> dict[int, str]:
    """The opaque leaves of a foreign checkpoint. Their names are in memory."""
    from .formats.description import Opaque

    objects = [leaf for leaf, row in enumerate(rows) if row[1] is None]
    values = core.objects(objects, Reviver())
    return {
        leaf: value.what for leaf, value in zip(objects, values, strict=True) if isinstance(value, Opaque)
    }


def _container(kind: ContainerKind) -> str:
    """The kind of a container, with the name of its class: ``namedtuple Point``."""
    return kind[0] if len(kind) == 1 or kind[0] == "deque" else f"{kind[0]} {kind[1]}"
