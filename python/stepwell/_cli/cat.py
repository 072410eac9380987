"""``stepwell cat``: the value of a leaf, or a slice of it: in short, in full, as JSON, or into a
``.npy`` file."""

from __future__ import annotations

import difflib
import os
import re
from itertools import product
from math import prod
from typing import Any

import click
import numpy as np

from .._checkpoint import Array, _box
from .._state.leaves import Reviver
from ..errors import MismatchError, MisuseError
from .command import command
from .output import FINE, Output, count, number, safe, size
from .progress import progress
from .reading import pieces, read_parts
from .targets import Target, target
from .tree import plain_value

#: Elements at both ends of a dimension that a short print shows.
_EDGE = 3
#: Elements that are printed without being asked for all.
_SHORT = 1000
#: Bytes that are printed or made JSON of: a text is many times as large.
_MOST = 64 << 20

_SLICED = re.compile(r"(?P<leaf>.*)\[(?P<index>[0-9:,.\s-]*)\]", re.DOTALL)
_PLACE = re.compile(r"(-?[0-9]+)?(?P<slice>:(-?[0-9]+)?(:(-?[0-9]+)?)?)?")


@command("cat")
@click.argument("path", type=target)
@click.argument("leaf")
@click.option("--all", "everything", is_flag=True, help="Print every element, however many there are.")
@click.option(
    "-o", "--output", type=click.Path(dir_okay=False), metavar="FILE.npy", help="Write the array to a file."
)
def cat(out: Output, path: Target, leaf: str, everything: bool, output: str | None) -> int:
    """The value of LEAF in the checkpoint PATH (or ROOT@STEP).

    LEAF is a path as `show` draws it, and may end in a slice, as numpy has them:
    'params/blocks[3]/w[0:2, :, -1]'. Only the blocks that it needs are read.
    """
    with path.open() as checkpoint:
        structure = checkpoint._tree()
        node, index = _find(structure.paths, leaf)
        name = structure.paths[node]
        kind = structure.nodes[node][2]
        if not isinstance(kind, int):
            below = [structure.paths[child] for child in structure.children[node]][:5]
            raise MisuseError(
                f"{name or 'the whole state'} is a {kind[0]} of {count(len(structure.leaves_below(node)), 'leaf', 'leaves')}"
                f"; name one below it ({', '.join(below)}, …): `stepwell show` draws them"
            )
        value = checkpoint._at(node)
        if not isinstance(value, Array):
            if index is not None or output is not None:
                raise MisuseError(f"{name} is no array but an object, which is not sliced or written as .npy")
            value = checkpoint._open().objects([kind], Reviver())[0]
            out.document({"path": name, "kind": "object", "value": plain_value(value)})
            out.line(safe(repr(value)))
            return FINE
        try:
            box, rest = _box(() if index is None else index, value.shape, name)
        except IndexError as error:
            raise MisuseError(str(error)) from error
        if output is not None:
            return _write(out, value, box, rest, output)
        return _print(out, value, box, rest, everything)


def _find(paths: list[str], given: str) -> tuple[int, tuple[Any, ...] | None]:
    """Returns the node and the index. An existing path wins over a slice: ``blocks[0]`` is a block
    if there are blocks."""
    nodes = {path: node for node, path in enumerate(paths)}
    match = _SLICED.fullmatch(given)
    if given not in nodes and not (match and match["leaf"] in nodes):
        # As `show` draws it: control characters are escaped there.
        nodes = {safe(path): node for path, node in nodes.items()}
    if given in nodes:
        return nodes[given], None
    if match and match["leaf"] in nodes:
        return nodes[match["leaf"]], _index(match["index"])
    near = difflib.get_close_matches(match["leaf"] if match else given, list(nodes), 3)
    hint = f"; near it is {', '.join(near)}" if near else "; `stepwell show` draws what there is"
    raise MismatchError(f"there is no leaf {given}{hint}")


def _index(text: str) -> tuple[Any, ...]:
    """Parses the content of a slice's brackets."""
    parts: list[Any] = []
    for one in text.split(","):
        part = one.strip()
        match = _PLACE.fullmatch(part)
        if part == "...":
            parts.append(...)
        elif not part or match is None:
            raise MisuseError(
                f"[{text}] is no slice; integers, start:stop:step and ... are, separated by commas"
            )
        elif match["slice"] is None:
            parts.append(int(part))
        else:
            parts.append(slice(*(int(edge) if edge else None for edge in part.split(":"))))
    if any(isinstance(part, slice) and part.step == 0 for part in parts):
        raise MisuseError(f"[{text}] is no slice: its step is 0")
    return tuple(parts)


def _head(value: Array, shape: tuple[int, ...]) -> dict[str, Any]:
    return {
        "path": value.path,
        "kind": "array",
        "dtype": value.dtype.name,
        "shape": list(value.shape),
        "slice_shape": list(shape),
    }


def _shape(box: list[tuple[int, int]], rest: tuple[Any, ...]) -> tuple[int, ...]:
    """Returns the shape of the result, without the dimensions that a number has indexed."""
    return tuple(len(range(*part.indices(n))) for (_, n), part in zip(box, rest, strict=True) if part != 0)


def _print(
    out: Output, value: Array, box: list[tuple[int, int]], rest: tuple[Any, ...], everything: bool
) -> int:
    shape = _shape(box, rest)
    nbytes = prod(n for _, n in box) * value.dtype.itemsize
    full = everything or out.as_json
    if full and nbytes > _MOST:
        raise MisuseError(
            f"{value.path} would be {size(nbytes)} as numbers, and many times that as text: name a slice of it, or write it with -o FILE.npy"
        )
    if full or prod(shape) <= _SHORT:
        array = _load(value, box)[rest]
        out.document({**_head(value, shape), "values": _plain(array)})
        threshold = max(array.size, 1)
    else:
        array = _edges(value, box, rest)
        threshold = 0
    whole = "" if shape == value.shape else f" of {list(value.shape)}"
    out.line(out.dim(f"{safe(value.path)}: {value.dtype.name} {list(shape)}{whole}"))
    text = np.array2string(
        array, threshold=threshold, edgeitems=_EDGE, separator=", ", formatter=_formatter(value.dtype)
    )
    out.line(text)
    return FINE


def _formatter(dtype: np.dtype[Any]) -> Any:
    """numpy prints the dtypes of ml_dtypes by their ``repr``, which is longer than the number."""
    return {"void": str, "numpystr": str, "all": str} if dtype.kind == "V" else None


def _load(value: Array, box: list[tuple[int, int]]) -> np.ndarray[Any, Any]:
    found = read_parts(value._checkpoint, [(value._leaf, tuple(box), value.dtype)])
    return found[0]


def _edges(value: Array, box: list[tuple[int, int]], rest: tuple[Any, ...]) -> np.ndarray[Any, Any]:
    """An array that prints, in short, as what the slice gives would: both ends of each dimension,
    and one more element between them where something is left out. Nothing else is read."""
    choices: list[list[tuple[int, int]]] = []
    shape: list[int] = []
    for (start, n), part in zip(box, rest, strict=True):
        if part == 0:
            choices.append([(start, 1)])
            continue
        places = range(start, start + n)[part]
        if len(places) <= 2 * _EDGE + 1:
            shown: list[int] = list(places)
        else:
            shown = [*places[: _EDGE + 1], *places[-_EDGE:]]
        choices.append([(place, 1) for place in shown])
        shape.append(len(shown))
    if rest and isinstance(rest[-1], slice) and rest[-1].step in (None, 1) and len(choices[-1]) > 1:
        # Neighbours are read in one go.
        row = choices[-1]
        if row[-1][0] - row[0][0] == len(row) - 1:
            choices[-1] = [(row[0][0], len(row))]
        else:
            choices[-1] = [(row[0][0], _EDGE + 1), (row[-_EDGE][0], _EDGE)]
    parts = [(value._leaf, box_, value.dtype) for box_ in product(*choices)]
    read = read_parts(value._checkpoint, parts)
    return np.concatenate([one.reshape(-1) for one in read]).reshape(shape)


def _write(out: Output, value: Array, box: list[tuple[int, int]], rest: tuple[Any, ...], output: str) -> int:
    shape = _shape(box, rest)
    nbytes = prod(shape) * value.dtype.itemsize
    strided = any(isinstance(part, slice) and part.step not in (None, 1) for part in rest)
    if not output.endswith(".npy"):
        raise MisuseError(f"{output} is written as .npy: name it so")
    try:
        _stream(value, box, rest, shape, output, strided)
    except BaseException:
        # Half a file would look like a whole one.
        if os.path.isfile(output):
            os.unlink(output)
        raise
    out.document({**_head(value, shape), "output": os.path.abspath(output), "bytes": nbytes})
    out.line(
        f"{safe(value.path)}: {value.dtype.name} {list(shape)}, {size(nbytes)}, written to {safe(output)}"
    )
    if value.dtype.kind == "V":
        out.note(
            f"note: numpy reads {value.dtype.name} back as raw bytes; np.load(…).view(ml_dtypes.{value.dtype.name}) has the numbers"
        )
    return FINE


def _stream(
    value: Array,
    box: list[tuple[int, int]],
    rest: tuple[Any, ...],
    shape: tuple[int, ...],
    output: str,
    strided: bool,
) -> None:
    with open(output, "wb") as file, progress(f"writing {value.path}") as tell:
        header = {
            "descr": np.lib.format.dtype_to_descr(value.dtype),
            "fortran_order": False,
            "shape": shape,
        }
        np.lib.format.write_array_header_2_0(file, header)
        if strided:
            file.write(np.ascontiguousarray(_load(value, box)[rest]).data.cast("B"))
            return
        done, whole = 0, prod(shape) * value.dtype.itemsize
        for piece in pieces(box, value.dtype.itemsize):
            array = read_parts(value._checkpoint, [(value._leaf, piece, value.dtype)])[0]
            file.write(array.reshape(-1).view(np.uint8).data)
            done += array.nbytes
            tell(done, whole)


def _plain(array: np.ndarray[Any, Any]) -> Any:
    """Nested lists for JSON: NaN and infinities as strings, complex numbers as pairs, dates as ISO
    texts."""
    kind = array.dtype.kind
    if kind in "mM":
        return array.astype(str).tolist()
    if kind == "c":
        return _floats(np.stack([array.real, array.imag], axis=-1).astype(np.float64))
    if kind in "biu":
        return array.tolist()
    if array.dtype.name.startswith(("int", "uint")):
        return array.astype(np.int64).tolist()
    return _floats(array.astype(np.float64))


def _floats(array: np.ndarray[Any, Any]) -> Any:
    if np.isfinite(array).all():
        return array.tolist()
    marked = array.astype(object)
    for place in np.argwhere(~np.isfinite(array)):
        marked[tuple(place)] = number(float(array[tuple(place)]))
    return marked.tolist()
