"""``stepwell show``: the tree of a checkpoint, or where its bytes lie."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import click

from .._paths import extend
from .command import command
from .output import FINE, Output, columns, count, local, metric, safe, size
from .targets import Target, is_root, report_of, target
from .tree import Chunk, Leaf, Tree, plain_value, seconds_to_commit

#: Characters of an object's value that are shown in its line.
_VALUE = 48


@command("show")
@click.argument("path", type=target)
@click.option(
    "--tree", "form", flag_value="tree", default="tree", help="Leaves and containers (the default)."
)
@click.option("--layout", "form", flag_value="layout", help="Items, data files, and the chunks in them.")
@click.option("--depth", type=click.IntRange(min=0), metavar="N", help="Containers down to level N only.")
def show(out: Output, path: Target, form: str, depth: int | None) -> int:
    """Show the content of the checkpoint PATH (or ROOT@STEP). Reads no array."""
    with path.open() as checkpoint:
        tree = Tree(checkpoint)
        head = tree.head()
        warnings = _newer_and_invalid(path, tree.step)
        head["warnings"] = warnings
        if out.as_json:
            out.document({**head, **_document(tree, form == "layout")})
            return FINE
        out.lines(_head_lines(out, tree, head))
        for warning in warnings:
            out.line(f"{out.bad('warning')}: {safe(warning)}")
        out.line()
        if form == "layout":
            out.lines(_layout(out, tree, head))
        else:
            out.lines(_drawn(out, tree, depth))
    return FINE


def _newer_and_invalid(path: Target, step: int) -> list[str]:
    """Returns warnings about newer steps of the root that cannot be restored."""
    if path.step is not None or not is_root(path.path):
        return []
    found = []
    for row in report_of(path.path):
        digits = re.search(r"[0-9]+$", row["name"])
        if row["damage"] is not None and digits is not None and int(digits.group()) > step:
            found.append(f"{row['name']} is newer and cannot be restored: {row['damage']}")
    return found


def _head_lines(out: Output, tree: Tree, head: dict[str, Any]) -> Iterator[str]:
    yield f"step {tree.step}: {safe(tree.path)}"
    took = seconds_to_commit(tree.manifest)
    yield (
        f"committed {local(int(tree.manifest['committed_unix_ns']))}, {took:.3g} s after its save began; "
        f"{size(head['bytes'])} in {count(len(tree.files), 'file')}, "
        f"{count(len(tree.leaves), 'leaf', 'leaves')}"
    )
    if head["metrics"]:
        yield "metrics: " + ", ".join(
            f"{safe(name)} {value if isinstance(value, str) else metric(value)}"
            for name, value in head["metrics"].items()
        )
    if head["custom_metadata"] is not None:
        yield f"metadata: {_cut(str(head['custom_metadata']))}"
    for one in head["dropped"]:
        yield out.dim(f"item {safe(one['item'])} was thinned away at {one['dropped']}")


def _drawn(out: Output, tree: Tree, depth: int | None) -> Iterator[str]:
    """The tree, one line for each node. Names have the same width."""
    structure = tree.structure
    values = tree.small_objects()
    rows: list[tuple[str, str, str, str]] = []
    pending: list[tuple[int, str, str, int]] = [(0, "", "", 0)] if structure.nodes else []
    while pending:
        node, lead, below, level = pending.pop()
        kind = structure.nodes[node][2]
        name = lead + (safe(_name(tree, node)) or ".")
        if isinstance(kind, int):
            leaf = tree.leaves[kind]
            rows.append((name, leaf.what(), size(leaf.stored_bytes), _remark(leaf, values.get(kind, ...))))
            continue
        children = structure.children[node]
        total = size(tree.bytes_below[node])
        leaves = count(tree.leaves_below[node], "leaf", "leaves")
        cut = depth is not None and level >= depth and children
        rows.append((name, tree.container(node), total, leaves + (" …" if cut else "")))
        if cut:
            continue
        for i, child in reversed(list(enumerate(children))):
            last = i == len(children) - 1
            pending.append(
                (child, below + ("└─ " if last else "├─ "), below + ("   " if last else "│  "), level + 1)
            )
    for line, row in zip(columns([(a, safe(b), c, d) for a, b, c, d in rows], "llrl"), rows, strict=True):
        yield out.dim(line) if row[3].startswith("=") else line


def _name(tree: Tree, node: int) -> str:
    component = tree.structure.nodes[node][1]
    return "" if component is None else extend("", component)


def _remark(leaf: Leaf, value: Any) -> str:
    """Returns a remark on a leaf: a tie, or the value of a small object."""
    if leaf.tied_to is not None:
        return f"= {safe(leaf.tied_to)}, tied"
    if leaf.kind == "object" and value is not ...:
        return _cut(repr(value))
    return count(len(leaf.chunks), "chunk") if len(leaf.chunks) > 1 else ""


def _cut(text: str) -> str:
    shown = safe(text)
    return shown if len(shown) <= _VALUE else shown[: _VALUE - 1] + "…"


def _layout(out: Output, tree: Tree, head: dict[str, Any]) -> Iterator[str]:
    """File by file, in the order of their bytes."""
    inside: list[list[tuple[Chunk, Leaf]]] = [[] for _ in tree.files]
    for leaf in tree.leaves:
        for chunk in leaf.chunks:
            if chunk.file is not None:
                inside[chunk.file].append((chunk, leaf))
    for item in head["items"]:
        yield (
            f"item {safe(item['name'])}: {item['dir']}/, {count(item['leaves'], 'leaf', 'leaves')}, "
            f"arrays {size(item['array_bytes'])}, index {size(item['index_bytes'])}"
        )
        for file, path in enumerate(tree.files):
            if path.split("/", 1)[0] != item["dir"]:
                continue
            chunks = sorted(inside[file], key=lambda one: one[0].offset)
            nbytes = head["files"][file]["bytes"]
            yield f"  {safe(path)}: {size(nbytes)}, {count(len(chunks), 'chunk')}"
            rows = [
                (str(chunk.offset), str(chunk.nbytes), safe(leaf.path) + _place(chunk, leaf))
                for chunk, leaf in chunks
            ]
            table = columns([("offset", "bytes", "leaf"), *rows], "rrl")
            yield "    " + out.dim(table[0])
            yield from ("    " + line for line in table[1:])


def _place(chunk: Chunk, leaf: Leaf) -> str:
    """Which part of its leaf a chunk is, where it is not all of it: as a slice."""
    if leaf.shape is None or chunk.nbytes == leaf.stored_bytes:
        return ""
    if len(chunk.start) != len(leaf.shape):
        return f" elements {chunk.start[0]}:{chunk.start[0] + chunk.extent[0]}"
    slices = (
        ":" if extent == whole else f"{start}:{start + extent}"
        for start, extent, whole in zip(chunk.start, chunk.extent, leaf.shape, strict=True)
    )
    return f" [{', '.join(slices)}]"


def _document(tree: Tree, layout: bool) -> dict[str, Any]:
    """Leaves and containers as JSON; with chunks where the layout was asked for."""
    values = tree.small_objects()
    structure = tree.structure
    leaves = []
    for i, leaf in enumerate(tree.leaves):
        row: dict[str, Any] = {
            "path": leaf.path,
            "kind": leaf.kind,
            "dtype": leaf.dtype,
            "shape": None if leaf.shape is None else list(leaf.shape),
            "bytes": leaf.nbytes,
            "stored_bytes": leaf.stored_bytes,
            "tied_to": leaf.tied_to,
            "item": tree.items[leaf.item] if tree.items else None,
            "chunks": len(leaf.chunks),
        }
        if i in values:
            row["value"] = plain_value(values[i])
        if layout:
            row["places"] = [
                {
                    "file": None if chunk.file is None else tree.files[chunk.file],
                    "offset": chunk.offset,
                    "bytes": chunk.nbytes,
                    "start": list(chunk.start),
                    "extent": list(chunk.extent),
                }
                for chunk in leaf.chunks
            ]
        leaves.append(row)
    containers = [
        {
            "path": structure.paths[node],
            "kind": tree.container(node),
            "leaves": tree.leaves_below[node],
            "stored_bytes": tree.bytes_below[node],
        }
        for node in range(len(structure.nodes))
        if structure.is_container(node)
    ]
    return {"leaves": leaves, "containers": containers}
