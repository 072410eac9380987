"""Configuration and tokenizer of a model, which a conversion passes along. They come from a disk or
from the checkpoint."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TypeAlias

from .. import _core
from .._checkpoint import Checkpoint
from .._checks import shown
from .._locations import Path, absolute
from .._state.leaves import Reviver
from ..errors import MisuseError
from ..formats.files import read_whole
from ..formats.writers import OutputFile
from .leaves import container

#: A file, a directory of a model, or several of them.
Files: TypeAlias = "Path | Sequence[Path]"

#: The ends of names of files with weights, and of their indexes.
_WEIGHTS = (
    ".safetensors",
    ".index.json",
    ".bin",
    ".pt",
    ".pth",
    ".ckpt",
    ".gguf",
    ".onnx",
    ".h5",
    ".msgpack",
    ".npz",
    ".npy",
    ".pkl",
    ".tflite",
    ".distcp",
)
#: Limit on the bytes of all files that are passed along. A conversion holds them in memory, twice.
MAX_BYTES = 64 << 20


def passed_along(files: Files | None) -> dict[str, str]:
    """Returns the paths of the files by their names. A directory stands for its files, except for
    weights, records of exports, hidden files and empty files.

    Raises:
        MisuseError: one does not exist, or two have the same name.
    """
    if files is None:
        return {}
    if not isinstance(files, (str, os.PathLike, Sequence)):
        raise MisuseError(f"files= is a path or a list of paths, not {shown(files)}")
    found: dict[str, str] = {}
    for given in [files] if isinstance(files, (str, os.PathLike)) else files:
        path = absolute(given, "a path of files=")
        if not os.path.exists(path):
            raise MisuseError(f"{path} of files= does not exist. Pass a file, or the directory of a model")
        for one in _of_directory(path) if os.path.isdir(path) else [path]:
            name = os.path.basename(one)
            if found.setdefault(name, one) != one:
                raise MisuseError(f"{found[name]} and {one} of files= have the same name. Leave one out")
    return found


def _of_directory(path: str) -> list[str]:
    files = [os.path.join(path, name) for name in sorted(os.listdir(path))]
    return [
        file
        for file in files
        if not _is_left_out(os.path.basename(file)) and os.path.isfile(file) and os.path.getsize(file) > 0
    ]


def _is_left_out(name: str) -> bool:
    # Another directory that has a record would claim to be that export.
    return name.startswith(".") or name.endswith(_WEIGHTS) or name == _core.EXPORT_RECORD


def _too_long(path: str, length: int) -> MisuseError:
    return MisuseError(
        f"with {path} ({length} bytes), files= has more than {MAX_BYTES >> 20} MiB. Copy it yourself after the conversion"
    )


def as_output(paths: Mapping[str, str]) -> list[OutputFile]:
    """Reads the files, to be written beside those of the format."""
    made = []
    left = MAX_BYTES
    for name, path in paths.items():
        content = read_whole(path, left, partial(_too_long, path))
        if not content:
            raise MisuseError(f"{path} of files= is empty. Leave it out")
        left -= len(content)
        made.append(_file(name, content))
    return made


def stored(
    checkpoint: Checkpoint, core: _core.Checkpoint, path: str | None
) -> tuple[list[OutputFile], set[int]]:
    """Returns files of the ``bytes`` in a container of the checkpoint, and the numbers of these
    leaves. Weights, records of exports, hidden files and empty files are left out."""
    if path is None:
        return [], set()
    structure = checkpoint._tree()
    node = container(checkpoint, structure, path, "stored_files")
    above, numbers = len(structure.components(node)), structure.leaves_below(node)
    rows, paths, chunks = core.leaves(), core.leaf_paths(), core.places()[1]
    if any(rows[number][1] is not None for number in numbers):
        raise MisuseError(f"{path!r} of stored_files= has arrays. Pass a container of bytes")
    names: dict[int, str] = {}
    for number in numbers:
        key = structure.components(structure.leaf_nodes[number])[above:]
        name, where = str(key[0][1]), f"{paths[number]} of stored_files="
        if len(key) > 1 or name != os.path.basename(name) or name in ("", ".", "..") or "\0" in name:
            raise MisuseError(f"{where} has no name of a file. Store bytes by file name, without directories")
        if not _is_left_out(name):
            names[number] = name
    if sum(chunk[2] for number in names for chunk in chunks[number]) > MAX_BYTES:
        raise MisuseError(f"{path!r} of stored_files= has more than {MAX_BYTES >> 20} MiB. Store less there")
    made = []
    for number, content in zip(names, core.objects(list(names), Reviver()), strict=True):
        if not isinstance(content, bytes):
            where = f"{paths[number]} of stored_files="
            raise MisuseError(f"{where} is {type(content).__name__}. Store the bytes of a file")
        if content:
            made.append(_file(names[number], content))
    return made, set(numbers)


def _file(name: str, content: bytes) -> OutputFile:
    file = OutputFile(name)
    file.add_bytes(content)
    return file
