"""``stepwell show``: the tree of a checkpoint, or the places of its bytes."""

from __future__ import annotations

import datetime
import os
from collections.abc import Iterator
from typing import TypedDict

import click

import stepwell as sw

from ..errors import StepwellError
from .command import command
from .locations import is_root, location
from .output import FINE, Output, columns, count, cut, local, safe, size
from .targets import MAPPED, TARGET, Target, root_of

#: Characters of an object's value that are shown in its line.
_VALUE = 48
#: Objects are read for their values if all of them together are no larger.
_SMALL_OBJECTS = 1 << 20


@command("show")
@click.argument("path", type=TARGET)
@click.option(
    "--tree", "form", flag_value="tree", default="tree", help="Show leaves and containers (default)."
)
@click.option("--layout", "form", flag_value="layout", help="Show items, data files, and their chunks.")
@click.option(
    "--depth", type=click.IntRange(min=0), metavar="N", help="Show containers down to level N only."
)
@MAPPED
def show(out: Output, path: Target, form: str, depth: int | None, map: sw.maps.Map | None) -> int:
    """Show the content of the checkpoint PATH (or ROOT@STEP). Reads no array."""
    with path.open(map) as checkpoint:
        nodes = checkpoint.contents()
        values = small_objects(checkpoint, nodes)
        head = head_of(checkpoint, nodes)
        rows = root_of(path.path) if path.step is None else None
    head["warnings"] = [
        f"{row.name} is newer and cannot be restored: {row.damage}"
        for row in rows or []
        if row.damage is not None and head["step"] is not None and row.number > head["step"]
    ]
    if out.as_json:
        out.document({**head, **_document(nodes, values, form == "layout")})
        return FINE
    out.lines(_head_lines(out, head))
    out.lines(_layout(out, nodes, head) if form == "layout" else drawn(out, nodes, values, depth))
    return FINE


def _array_bytes(checkpoint: sw.Checkpoint, nodes: list[sw.results.StoredNode]) -> int:
    """Returns the bytes of all arrays, also if they are stored in fewer."""
    manifest = checkpoint.manifest
    if "compressed_chunks" in (manifest.get("required_features") or ()):
        return sum(item["tensor_bytes"] for item in manifest["items"])
    return sum(node.stored_bytes for node in nodes if node.kind == "array")


class File(TypedDict):
    """A data file."""

    path: str
    bytes: int


class Item(TypedDict):
    """An item, with the bytes of its arrays and of its index."""

    name: str
    dir: str
    leaves: int
    array_bytes: int
    index_bytes: int


class Dropped(TypedDict):
    """An item that was thinned away, and when."""

    item: str
    dropped: datetime.datetime


class Head(TypedDict):
    """Facts about a checkpoint."""

    path: str
    #: ``None``: a checkpoint of another library.
    step: int | None
    started: datetime.datetime
    committed: datetime.datetime
    writer: str
    format_version: int
    world_size: int
    adopted: sw.results.AdoptedFiles | None
    bytes: int
    array_bytes: int
    number_of_leaves: int
    opaque_leaves: int
    metrics: dict[str, float]
    custom_metadata: object
    items: list[Item]
    dropped: list[Dropped]
    files: list[File]
    warnings: list[str]


def head_of(checkpoint: sw.Checkpoint, nodes: list[sw.results.StoredNode]) -> Head:
    """Facts about an open checkpoint."""
    facts, manifest = checkpoint.metadata(), checkpoint.manifest
    files: list[File] = [{"path": file["path"], "bytes": file["length"]} for file in manifest["files"]]
    return {
        "path": checkpoint.path,
        "step": facts.step,
        "started": facts.started,
        "committed": facts.committed,
        "writer": facts.writer,
        "format_version": facts.format_version,
        "world_size": facts.world_size,
        "adopted": checkpoint.adopted,
        "bytes": sum(file["bytes"] for file in files),
        "array_bytes": _array_bytes(checkpoint, nodes),
        "number_of_leaves": nodes[0].leaves if nodes else 0,
        "opaque_leaves": sum(node.opaque is not None for node in nodes),
        "metrics": metrics_of(checkpoint),
        "custom_metadata": facts.custom_metadata,
        "items": [
            {
                "name": item["name"],
                "dir": item["dir"],
                "leaves": item["leaves"],
                "array_bytes": item["tensor_bytes"],
                "index_bytes": item["index"]["length"],
            }
            for item in manifest["items"]
        ],
        "dropped": [
            {
                "item": one["item"],
                "dropped": datetime.datetime.fromtimestamp(one["unix_ns"] / 1e9, datetime.UTC),
            }
            for one in manifest["dropped"]
        ],
        "files": files,
        "warnings": [],
    }


def metrics_of(checkpoint: sw.Checkpoint) -> dict[str, float]:
    """The metrics of a checkpoint, with those that were added later, which belong to its root."""
    above, name = os.path.split(checkpoint.path)
    # A bucket itself cannot be a root.
    is_bucket = "://" in above and above.count("/") == 2
    rows = root_of(above) if not is_bucket and is_root(location(above)) else None
    later = [row.metrics for row in rows or [] if row.name == name and row.step is not None]
    return later[0] if later else checkpoint.metadata().metrics


def small_objects(checkpoint: sw.Checkpoint, nodes: list[sw.results.StoredNode]) -> dict[str, object]:
    """Returns the values of the objects by path. It is empty if they are large, or cannot be read:
    ``verify`` reports damage."""
    objects = [node for node in nodes if node.kind == "object" and node.leaf is not None]
    if sum(node.stored_bytes for node in objects) > _SMALL_OBJECTS:
        return {}
    try:
        values = checkpoint.read((node.path, ...) for node in objects)
    except (StepwellError, ImportError):
        return {}
    return {node.path: value for node, value in zip(objects, values, strict=True)}


def _head_lines(out: Output, head: Head) -> Iterator[str]:
    if head["adopted"] is not None:
        files = head["adopted"]
        yield f"step {head['step']}: {safe(head['path'])}, adopted from {safe(files.path)} ({safe(files.family)})"
        when = f"modified {local(head['committed'])}"
    elif head["format_version"]:
        yield f"step {head['step']}: {safe(head['path'])}"
        took = (head["committed"] - head["started"]).total_seconds()
        when = f"committed {local(head['committed'])}, {took:.3g} s after its save began"
    else:
        yield f"{head['writer']}: {safe(head['path'])}"
        when = f"modified {local(head['committed'])}"
    yield (
        f"{when}; {size(head['bytes'])} in {count(len(head['files']), 'file')}, "
        f"{count(head['number_of_leaves'], 'leaf', 'leaves')}"
    )
    if head["metrics"]:
        yield "metrics: " + ", ".join(f"{safe(name)} {value:.6g}" for name, value in head["metrics"].items())
    if head["custom_metadata"] is not None:
        yield f"metadata: {cut(head['custom_metadata'], _VALUE)}"
    if head["opaque_leaves"]:
        yield f"{count(head['opaque_leaves'], 'opaque leaf', 'opaque leaves')}: known by name only, not restored"
    for one in head["dropped"]:
        yield out.dim(f"item {safe(one['item'])} was thinned away")
    for warning in head["warnings"]:
        yield f"{out.bad('warning')}: {safe(warning)}"
    yield ""


def drawn(
    out: Output,
    nodes: list[sw.results.StoredNode],
    values: dict[str, object],
    depth: int | None = None,
    top: int = 0,
) -> Iterator[str]:
    """The tree below a node, one line for each node."""
    children: list[list[int]] = [[] for _ in nodes]
    for number, node in enumerate(nodes[1:], 1):
        children[node.parent].append(number)
    rows: list[tuple[str, str, str, str]] = []
    pending = [(top, "", "", 0)] if nodes else []
    while pending:
        number, lead, below, level = pending.pop()
        node = nodes[number]
        name = safe(lead + ((node.name if level else node.path) or "."))
        if node.leaf is not None:
            kind = "object" if node.opaque is None else "opaque"
            what = kind if node.shape is None else f"{node.dtype} {list(node.shape)}"
            rows.append((name, what, size(node.stored_bytes), _remark(node, values)))
            continue
        is_cut = depth is not None and level >= depth and bool(children[number])
        leaves = count(node.leaves, "leaf", "leaves") + (" …" if is_cut else "")
        rows.append((name, safe(node.kind), size(node.stored_bytes), leaves))
        for i, child in enumerate([] if is_cut else reversed(children[number])):
            branch, under = ("├─ ", "│  ") if i else ("└─ ", "   ")
            pending.append((child, below + branch, below + under, level + 1))
    for line, row in zip(columns(rows, "llrl"), rows, strict=True):
        yield out.dim(line) if row[3].startswith("=") else line


def _remark(node: sw.results.StoredNode, values: dict[str, object]) -> str:
    if node.tied_to is not None:
        return f"= {safe(node.tied_to)}, tied"
    if node.opaque is not None:
        return safe(node.opaque)
    if node.path in values:
        return cut(repr(values[node.path]), _VALUE)
    return count(len(node.chunks), "chunk") if len(node.chunks) > 1 else ""


def _layout(out: Output, nodes: list[sw.results.StoredNode], head: Head) -> Iterator[str]:
    """File by file, in the order of their bytes."""
    inside: dict[str | None, list[tuple[sw.results.StoredChunk, sw.results.StoredNode]]] = {}
    for node in nodes:
        for chunk in node.chunks:
            inside.setdefault(chunk.file, []).append((chunk, node))
    for item in head["items"]:
        yield (
            f"item {safe(item['name'])}: {item['dir']}/, {count(item['leaves'], 'leaf', 'leaves')}, "
            f"arrays {size(item['array_bytes'])}, index {size(item['index_bytes'])}"
        )
        for file in head["files"]:
            if item["dir"] and file["path"].split("/", 1)[0] != item["dir"]:
                continue
            chunks = sorted(inside.get(file["path"], []), key=lambda one: one[0].offset)
            yield f"  {safe(file['path'])}: {size(file['bytes'])}, {count(len(chunks), 'chunk')}"
            rows = [
                (str(chunk.offset), str(chunk.nbytes), safe(node.path) + _place(chunk, node))
                for chunk, node in chunks
            ]
            heads, *lines = columns([("offset", "bytes", "leaf"), *rows], "rrl")
            yield "    " + out.dim(heads)
            yield from ("    " + line for line in lines)


def _place(chunk: sw.results.StoredChunk, node: sw.results.StoredNode) -> str:
    """The part of its leaf that a chunk is, as a slice; empty for all of it."""
    if node.shape is None or chunk.nbytes == node.stored_bytes:
        return ""
    if len(chunk.start) != len(node.shape):
        return f" elements {chunk.start[0]}:{chunk.start[0] + chunk.extent[0]}"
    slices = (
        ":" if extent == whole else f"{start}:{start + extent}"
        for start, extent, whole in zip(chunk.start, chunk.extent, node.shape, strict=True)
    )
    return f" [{', '.join(slices)}]"


def _document(
    nodes: list[sw.results.StoredNode], values: dict[str, object], layout: bool
) -> dict[str, object]:
    """Leaves and containers; with the places of chunks if the layout was asked for."""
    leaves = sorted((node for node in nodes if node.leaf is not None), key=lambda node: node.leaf or 0)
    containers = [node for node in nodes if node.leaf is None]
    return {
        "leaves": [
            {
                **facts(node, "path", "kind", "dtype", "shape", "stored_bytes", "tied_to", "item", "opaque"),
                "bytes": node.nbytes,
                "chunks": len(node.chunks),
                **({"value": values[node.path]} if node.path in values and node.opaque is None else {}),
                **({"places": node.chunks} if layout else {}),
            }
            for node in leaves
        ],
        "containers": [facts(node, "path", "kind", "leaves", "stored_bytes") for node in containers],
    }


def facts(node: sw.results.StoredNode, *names: str) -> dict[str, object]:
    """Returns attributes of a node by name."""
    return {name: getattr(node, name) for name in names}
