"""Writers of other libraries' formats.

A writer plans the files of a conversion: literal bytes, whole tensors, and checksums. The engine
writes them. A writer opens no file and imports no library.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ...errors import MisuseError
from . import dcp, megatron, npz, orbax, safetensors, torch
from .content import Content, FileOptions, PlainValue, named_paths, nested_paths
from .output import OutputFile, OutputTensor

__all__ = [
    "WRITERS",
    "Content",
    "FileOptions",
    "OutputFile",
    "OutputTensor",
    "PlainValue",
    "Writer",
    "check_name",
]


@dataclass(frozen=True, slots=True)
class Writer:
    """The writer of a format."""

    #: Plans the files that hold a content.
    plan: Callable[[Content, FileOptions], list[OutputFile]]
    #: True if the format holds a value that is not a tensor.
    holds: Callable[[object], bool]
    #: The values that can be held, for messages.
    held: str
    #: True if the output has the nesting of the source. Otherwise it has tensors by name.
    is_nested: bool
    #: The end of the name of an output that is one file. Any other name is that of a directory.
    #: Empty: the output is always one file. ``None``: always a directory.
    suffix: str | None
    #: The rendered paths of tensors in the output, by name.
    paths: Callable[[Content], Mapping[str, str]] = named_paths


def _nothing(_: object) -> bool:
    return False


#: The writers by the name of their format.
WRITERS: Mapping[str, Writer] = {
    "safetensors": Writer(
        safetensors.plan, _nothing, "dense tensors of ordinary dtypes", False, ".safetensors"
    ),
    "torch": Writer(
        torch.plan,
        torch.is_plain,
        "dense tensors of ordinary dtypes and plain Python values",
        True,
        "",
        nested_paths,
    ),
    "npz": Writer(npz.plan, _nothing, "arrays", False, ""),
    "dcp": Writer(
        dcp.plan,
        torch.is_plain,
        "dense tensors of ordinary dtypes and plain Python values",
        False,
        None,
        dcp.paths,
    ),
    "megatron": Writer(
        megatron.plan, torch.is_plain, "dense tensors of ordinary dtypes and plain Python values", False, None
    ),
    "orbax": Writer(orbax.plan, orbax.is_held, "arrays, numbers, text and `None`", True, None, orbax.paths),
}

#: The formats that the ends of names mean; ``None``: one that is not written.
_FORMATS_BY_SUFFIX: Mapping[str, str | None] = {
    ".safetensors": "safetensors",
    ".npz": "npz",
    ".npy": None,
    ".pt": "torch",
    ".pth": "torch",
    ".bin": "torch",
    ".msgpack": None,
}


def check_name(path: str, to: str) -> None:
    """Refuses a name for an output that means another format: readers would take it for that."""
    suffix = os.path.splitext(path)[1]
    meant = _FORMATS_BY_SUFFIX.get(suffix, to)
    if meant != to:
        other = "" if meant is None else f', or pass to="{meant}"'
        raise MisuseError(f'{path} ends with {suffix}, which is not for to="{to}". Change the name{other}')
