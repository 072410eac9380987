"""The content of a checkpoint as rows: leaves with kinds and places, containers with totals. Drawn
by ``show``, ``diff`` and ``report``."""

from __future__ import annotations

import datetime
from dataclasses import dataclass
from math import prod
from typing import Any, final

from .._checkpoint import Checkpoint
from .._restore.structure import Structure
from .._state.leaves import Reviver
from .._state.specs import to_dtype
from ..errors import StepwellError
from .output import iso, number
from .targets import metrics_of

#: Objects whose encoded bytes are no more, all together, are read for their values to be shown.
_SMALL_OBJECTS = 1 << 20


@final
@dataclass(frozen=True, slots=True)
class Chunk:
    """A contiguous part of a leaf."""

    #: Ordinal of the data file; ``None``: it is supplied by a reader outside the engine.
    file: int | None
    offset: int
    nbytes: int
    #: The offsets of a box, or the first element of a run of the flattened array; empty for
    #: objects.
    start: tuple[int, ...]
    #: Elements along the same.
    extent: tuple[int, ...]


@final
@dataclass(slots=True)
class Leaf:
    """A leaf."""

    path: str
    #: ``"array"`` or ``"object"``.
    kind: str
    dtype: str | None
    shape: tuple[int, ...] | None
    #: Bytes that are stored for it: none where it is tied to another.
    stored_bytes: int
    #: Path of the leaf that it is tied to.
    tied_to: str | None
    chunks: list[Chunk]
    #: Ordinal of its item.
    item: int

    @property
    def nbytes(self) -> int:
        """Bytes of its value."""
        if self.dtype is None or self.shape is None:
            return self.stored_bytes
        return prod(self.shape) * to_dtype(self.dtype).itemsize

    def what(self) -> str:
        """Dtype and shape, or that it is an object."""
        return "object" if self.shape is None else f"{self.dtype} {list(self.shape)}"


@final
class Tree:
    """An open checkpoint, looked through: no array is read."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        core = checkpoint._open()
        self.checkpoint = checkpoint
        self.structure = structure = checkpoint._tree()
        self.manifest = checkpoint.manifest
        self.path = checkpoint.path
        self.step = int(self.manifest["step"])
        #: Data files, relative to the step.
        self.files: list[str]
        self.files, places = core.places()
        #: Names of the items, and of the item of each top-level entry.
        self.items = [str(item["name"]) for item in self.manifest["items"]]
        item_of = {
            str(top["name"]): i for i, one in enumerate(self.manifest["items"]) for top in one["top_level"]
        }
        paths = structure.leaf_paths()
        tops = _tops(structure)
        self.leaves: list[Leaf] = []
        for i, ((kind, dtype, shape, tied), (of, chunks)) in enumerate(
            zip(core.leaves(), places, strict=True)
        ):
            rows = [Chunk(f, offset, n, tuple(a), tuple(b)) for f, offset, n, a, b in chunks]
            leaf = Leaf(
                path=paths[i],
                kind="object" if kind == "object" else "array",
                dtype=dtype,
                shape=None if shape is None else tuple(shape),
                stored_bytes=sum(chunk.nbytes for chunk in rows),
                tied_to=paths[of] if tied and of is not None else None,
                chunks=rows,
                item=item_of.get(tops[structure.leaf_nodes[i]], 0),
            )
            self.leaves.append(leaf)
        self._totals()

    def _totals(self) -> None:
        """Leaves and stored bytes at or below each node; children come after their parents."""
        nodes = self.structure.nodes
        self.leaves_below = [0] * len(nodes)
        self.bytes_below = [0] * len(nodes)
        for at in range(len(nodes) - 1, -1, -1):
            parent, component, kind = nodes[at]
            if isinstance(kind, int):
                self.leaves_below[at] = 1
                self.bytes_below[at] = self.leaves[kind].stored_bytes
            if component is not None:
                self.leaves_below[parent] += self.leaves_below[at]
                self.bytes_below[parent] += self.bytes_below[at]

    def container(self, node: int) -> str:
        """The kind of a container: ``dict``, ``namedtuple Point``, ``stateful Loader``; empty for a
        leaf."""
        kind = self.structure.nodes[node][2]
        if isinstance(kind, int):
            return ""
        named = kind[0] in ("namedtuple", "dataclass", "stateful", "custom")
        return f"{kind[0]} {kind[1]}" if named else str(kind[0])

    def small_objects(self) -> dict[int, Any]:
        """Values of the objects, by leaf, where all of them are small; nothing where they cannot be
        read: that is what ``verify`` tells."""
        numbers = [i for i, leaf in enumerate(self.leaves) if leaf.kind == "object"]
        if sum(self.leaves[i].stored_bytes for i in numbers) > _SMALL_OBJECTS:
            return {}
        try:
            values = self.checkpoint._open().objects(numbers, Reviver())
        except (StepwellError, ImportError):
            return {}
        return dict(zip(numbers, values, strict=True))

    def head(self) -> dict[str, Any]:
        """Facts about the checkpoint, as JSON."""
        manifest = self.manifest
        lengths = {str(file["path"]): int(file["length"]) for file in manifest["files"]}
        return {
            "path": self.path,
            "step": self.step,
            "started": iso(int(manifest["started_unix_ns"])),
            "committed": iso(int(manifest["committed_unix_ns"])),
            "writer": str(manifest["writer"]),
            "format_version": int(manifest["format_version"]),
            "world_size": int(manifest["world_size"]),
            "bytes": sum(lengths.values()),
            "array_bytes": sum(leaf.stored_bytes for leaf in self.leaves if leaf.kind == "array"),
            "number_of_leaves": len(self.leaves),
            "metrics": {name: number(value) for name, value in metrics_of(self.checkpoint).items()},
            "custom_metadata": manifest.get("custom_metadata"),
            "items": [
                {
                    "name": str(item["name"]),
                    "dir": str(item["dir"]),
                    "leaves": int(item["leaves"]),
                    "array_bytes": int(item["tensor_bytes"]),
                    "index_bytes": int(item["index"]["length"]),
                }
                for item in manifest["items"]
            ],
            "dropped": [
                {"item": str(one["item"]), "dropped": iso(int(one["unix_ns"]))} for one in manifest["dropped"]
            ],
            "files": [{"path": path, "bytes": lengths.get(path, 0)} for path in self.files],
        }


def seconds_to_commit(manifest: dict[str, Any]) -> float:
    """How long a save took, from its begin to its commit."""
    return float((int(manifest["committed_unix_ns"]) - int(manifest["started_unix_ns"])) / 1e9)


def plain_value(value: Any) -> Any:
    """An object's value as JSON: numbers, texts and containers as themselves, all else by its
    ``repr``."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if type(value) is int:
        return value
    if type(value) is float:
        return number(value)
    if isinstance(value, (list, tuple)):
        return [plain_value(one) for one in value]
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {key: plain_value(one) for key, one in value.items()}
    if isinstance(value, (datetime.datetime, datetime.date)):
        return value.isoformat()
    return repr(value)


def _tops(structure: Structure) -> list[str]:
    """Of each node, the rendered top-level component that it is below; of the root, nothing."""
    tops: list[str] = []
    for number_, (parent, component, _) in enumerate(structure.nodes):
        tops.append("" if component is None else (structure.paths[number_] if parent == 0 else tops[parent]))
    return tops
