"""``stepwell cat``: the value of a leaf, or a slice of it: in short, in full, as JSON, or in a
``.npy`` file; and the list of a subtree."""

from __future__ import annotations

import difflib
import os
import re
from itertools import product
from math import prod
from types import EllipsisType
from typing import TypeAlias

import click
import numpy as np

import stepwell as sw

from ..errors import MismatchError, MisuseError, StepwellError, from_system
from .command import command
from .output import FINE, Output, safe, size
from .progress import progress
from .show import drawn, facts, small_objects
from .targets import MAPPED, TARGET, Target

#: Values that were read, of any dtype.
Values: TypeAlias = np.ndarray
#: Elements at both ends of a dimension that a short print shows.
_EDGE = 3
#: Larger arrays are printed in short, unless all elements are asked for.
_SHORT = 1000
#: The most bytes of an array that become text.
_MOST = 64 << 20

_SLICED = re.compile(r"(?P<leaf>.*)\[(?P<index>[0-9:,.\s-]*)\]", re.DOTALL)
_PLACE = re.compile(r"(-?[0-9]+)?(?P<slice>:(-?[0-9]+)?(:(-?[0-9]+)?)?)?")

#: Of each dimension of a leaf, the places that a slice selects, or its only one.
Places = list[int | range]
#: An index of numpy.
Index = tuple[int | slice | EllipsisType, ...]


@command("cat")
@click.argument("path", type=TARGET)
@click.argument("leaf")
@MAPPED
@click.option("--all", "everything", is_flag=True, help="Print every element.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), metavar="FILE.npy", help="Write the array to a file."
)
def cat(
    out: Output, path: Target, leaf: str, map: sw.maps.Map | None, everything: bool, output: str | None
) -> int:
    """Print the value of LEAF in the checkpoint PATH (or ROOT@STEP). A container is listed.

    LEAF is a path as `show` prints it, or `.` for the whole state. It may end in a slice with
    numpy's syntax: 'params/blocks[3]/w[0:2, :, -1]'. Only the blocks that it needs are read.
    """
    with path.open(map) as checkpoint:
        nodes = checkpoint.contents()
        number, index = _find([node.path for node in nodes], leaf)
        node = nodes[number]
        if node.kind != "array" and (index is not None or output is not None):
            raise MisuseError(
                f"{node.path or '.'} is no array but {node.kind}: it has no slices, and no .npy file is written"
            )
        if node.leaf is None:
            below = [one for one in nodes[1:] if one.parent == number]
            names = ("path", "kind", "dtype", "shape", "leaves", "stored_bytes")
            children = [facts(one, *names) for one in below]
            out.document({"path": node.path, "kind": node.kind, "children": children})
            out.lines(drawn(out, nodes, small_objects(checkpoint, below), depth=1, top=number))
        elif node.kind == "object":
            value = checkpoint.read([(node.path, ...)])[0]
            out.document({"path": node.path, "kind": "object", "value": value})
            out.line(safe(repr(value)))
        else:
            array = _Sliced(checkpoint, node, () if index is None else index)
            if output is not None:
                _write(out, array, output)
            else:
                _print(out, array, everything)
    return FINE


class _Sliced:
    """A slice of a stored array."""

    def __init__(self, checkpoint: sw.Checkpoint, node: sw.results.StoredNode, index: Index) -> None:
        shape = node.shape or ()
        dtype = sw.ArraySpec(shape, node.dtype).dtype
        self._checkpoint = checkpoint
        self.path = node.path
        self.dtype = np.dtype(dtype)
        try:
            # Without memory of its own.
            self.shape = np.broadcast_to(np.zeros((), bool), shape)[index].shape
        except IndexError as error:
            raise MisuseError(f"{node.path or '.'}: {error}") from error
        at = index.index(...) if ... in index else len(index)
        left, right = index[:at], index[at + 1 :]
        parts = [*left, *[slice(None)] * (len(shape) - len(left) - len(right)), *right]
        self._places = [range(n)[part] for n, part in zip(shape, parts, strict=True) if part is not ...]
        whole = "" if self.shape == shape else f" of {list(shape)}"
        self.title = f"{safe(self.path) or '.'}: {self.dtype.name} {list(self.shape)}"
        self.whole = whole
        self.document = {
            "path": self.path,
            "kind": "array",
            "dtype": self.dtype.name,
            "shape": shape,
            "slice_shape": self.shape,
        }
        self.nbytes = prod(self.shape) * self.dtype.itemsize

    def read(self, boxes: list[tuple[slice, ...]]) -> list[Values]:
        """Reads boxes of the slice in one go."""
        return self._checkpoint.read((self.path, self._index(box)) for box in boxes)

    def _index(self, box: tuple[slice, ...]) -> tuple[int | slice, ...]:
        """The index into the stored array that selects a box of this slice."""
        given = iter(box)
        return tuple(one if isinstance(one, int) else _slice(one[next(given)]) for one in self._places)


def _slice(places: range) -> slice:
    if not places:
        return slice(0, 0)
    return slice(places.start, places.stop if places.stop >= 0 else None, places.step)


def _find(paths: list[str], given: str) -> tuple[int, Index | None]:
    """Returns the node and the index. An existing path wins over a slice: ``blocks[0]`` is a block
    if there are blocks."""
    # `show` prints the root as a dot.
    nodes = {".": 0} | {path: node for node, path in enumerate(paths)}
    match = _SLICED.fullmatch(given)
    if given not in nodes and not (match and match["leaf"] in nodes):
        # `show` escapes control characters.
        nodes = {safe(path): node for path, node in nodes.items()}
    if given in nodes:
        return nodes[given], None
    if match and match["leaf"] in nodes:
        return nodes[match["leaf"]], _index(match["index"])
    near = difflib.get_close_matches(match["leaf"] if match else given, list(nodes), 3)
    hint = f"; near it is {', '.join(near)}" if near else "; `stepwell show` lists the leaves"
    raise MismatchError(f"there is no leaf {given}{hint}")


def _index(text: str) -> Index:
    """Parses the content of a slice's brackets."""
    parts: list[int | slice | EllipsisType] = []
    for one in text.split(","):
        part = one.strip()
        match = _PLACE.fullmatch(part)
        if part == "...":
            parts.append(...)
        elif not part or match is None:
            raise MisuseError(f"[{text}] is no slice: separate integers, start:stop:step and ... by commas")
        elif match["slice"] is None:
            parts.append(int(part))
        else:
            parts.append(slice(*(int(edge) if edge else None for edge in part.split(":"))))
    if any(isinstance(part, slice) and part.step == 0 for part in parts):
        raise MisuseError(f"[{text}] is no slice: its step is 0")
    return tuple(parts)


def _print(out: Output, array: _Sliced, everything: bool) -> None:
    full = everything or out.as_json
    if full and array.nbytes > _MOST:
        raise MisuseError(
            f"{array.path or '.'} has {size(array.nbytes)}, and many times that as text: name a slice of it, or write it with -o FILE.npy"
        )
    if full or prod(array.shape) <= _SHORT:
        values = array.read([tuple(slice(0, n) for n in array.shape)])[0]
        out.document({**array.document, "values": _listed(values)})
        threshold = max(values.size, 1)
    else:
        values, threshold = _edges(array), 0
    out.line(out.dim(array.title + array.whole))
    # numpy prints the dtypes of ml_dtypes by their `repr`, which is longer than the number.
    out.line(
        np.array2string(
            values,
            threshold=threshold,
            edgeitems=_EDGE,
            separator=", ",
            formatter={"all": str} if _is_of_ml_dtypes(array.dtype) else None,
        )
    )


def _edges(array: _Sliced) -> Values:
    """Returns an array whose short print is that of the slice: both ends of each dimension, and one
    more element between them. Nothing else is read."""
    runs = [
        [slice(0, n)] if n <= 2 * _EDGE + 1 else [slice(0, _EDGE + 1), slice(n - _EDGE, n)]
        for n in array.shape
    ]
    places = [
        [slice(0, _EDGE + 1), slice(_EDGE + 1, None)] if len(two) > 1 else [slice(None)] for two in runs
    ]
    values = np.empty([sum(run.stop - run.start for run in two) for two in runs], array.dtype)
    for place, part in zip(product(*places), array.read(list(product(*runs))), strict=True):
        values[place] = part
    return values


def _write(out: Output, array: _Sliced, output: str) -> None:
    if not output.endswith(".npy"):
        raise MisuseError(f"{output} is written as .npy: name it so")
    header = {
        "descr": f"|V{array.dtype.itemsize}"
        if _is_of_ml_dtypes(array.dtype)
        else np.lib.format.dtype_to_descr(array.dtype),
        "fortran_order": False,
        "shape": array.shape,
    }
    try:
        with open(output, "wb") as file, progress(f"writing {array.path or '.'}") as tell:
            np.lib.format.write_array_header_2_0(file, header)
            done = 0
            for box in sw.ArraySpec(array.shape, array.dtype).pieces():
                part = np.ascontiguousarray(array.read([box])[0])
                file.write(part.reshape(-1).view(np.uint8).data)
                done += part.nbytes
                tell(done, array.nbytes)
    except BaseException as error:
        # Half a file would look like a whole one.
        if os.path.isfile(output):
            os.unlink(output)
        if isinstance(error, OSError) and not isinstance(error, StepwellError):
            raise from_system(f"{output} cannot be written", error, output) from error
        raise
    out.document({**array.document, "output": os.path.abspath(output), "bytes": array.nbytes})
    out.line(f"{array.title}, {size(array.nbytes)}, written to {safe(output)}")
    if _is_of_ml_dtypes(array.dtype):
        out.note(
            f"note: numpy reads {array.dtype.name} back as raw bytes; np.load(…).view(ml_dtypes.{array.dtype.name}) has the numbers"
        )


def _is_of_ml_dtypes(dtype: np.dtype) -> bool:
    return dtype.type.__module__ != "numpy"


def _listed(array: Values) -> object:
    """Returns nested lists: complex numbers as pairs, dates as ISO texts."""
    kind = array.dtype.kind
    if kind in "mM":
        return array.astype(str).tolist()
    if "complex" in array.dtype.name:  # also those of ml_dtypes
        wide = array.astype(np.complex128)
        return np.stack([wide.real, wide.imag], axis=-1).tolist()
    if kind in "biu":
        return array.tolist()
    is_integer = array.dtype.name.startswith(("int", "uint"))
    return array.astype(np.int64 if is_integer else np.float64).tolist()
