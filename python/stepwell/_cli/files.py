"""``stepwell ls`` of one checkpoint: its format, and its files with their tensors."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from typing import TypedDict

from ..errors import NotAStep, StepNotFound
from .output import Output, columns, count, safe, size
from .targets import Target, format_of, manager_of


class DataFile(TypedDict):
    """A file of a checkpoint."""

    path: str
    bytes: int
    #: Tensors of which it has at least a part.
    tensors: int


def list_checkpoint(out: Output, target: Target) -> None:
    """Prints the format and the files of a checkpoint, of any library."""
    try:
        checkpoint = target.open()
    except (NotAStep, StepNotFound):
        if target.step is None and os.path.isdir(target.path):
            manager_of(target.path).close()  # raises, and says what the path is instead
        raise
    with checkpoint:
        nodes, manifest = checkpoint.contents(), checkpoint.manifest
        path, found, adopted = checkpoint.path, format_of(checkpoint), checkpoint.adopted
    inside: Counter[str] = Counter()
    for node in nodes:
        if node.kind == "array":
            inside.update({chunk.file for chunk in node.chunks if chunk.file is not None})
    files: list[DataFile] = [
        {"path": file["path"], "bytes": file["length"], "tensors": inside[file["path"]]}
        for file in manifest["files"]
    ]
    arrays = [node for node in nodes if node.kind == "array"]
    leaves = nodes[0].leaves if nodes else 0
    opaque = [node.path for node in nodes if node.opaque is not None]
    nbytes = sum(file["bytes"] for file in files)
    out.document(
        {
            "path": path,
            "format": found,
            "adopted": adopted,
            "bytes": nbytes,
            "number_of_tensors": len(arrays),
            "number_of_objects": leaves - len(arrays),
            "opaque": opaque,
            "files": files,
        }
    )
    objects = f", {count(leaves - len(arrays), 'object')}" if leaves > len(arrays) else ""
    place = path if adopted is None else f"{path}, adopted from {adopted.path}"
    out.line(
        f"{safe(place)}: {safe(found)}, {count(len(files), 'file')}, {size(nbytes)}, "
        f"{count(len(arrays), 'tensor')}{objects}"
    )
    out.lines(_lines(out, files))
    if opaque:
        out.line(f"  {count(len(opaque), 'opaque leaf', 'opaque leaves')}; `stepwell show` names them")


def _lines(out: Output, files: list[DataFile]) -> Iterator[str]:
    rows = [(safe(file["path"]), size(file["bytes"]), str(file["tensors"])) for file in files]
    heads, *lines = columns([("file", "size", "tensors"), *rows], "lrr")
    yield out.dim("  " + heads)
    yield from ("  " + line for line in lines)
