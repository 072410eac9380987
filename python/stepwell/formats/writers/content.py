"""The content of a conversion: what a writer puts into files."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from .output import OutputTensor


@dataclass(frozen=True, slots=True)
class Content:
    """Tensors with their names, in the order of the source."""

    tensors: tuple[OutputTensor, ...]
    #: Names of tied tensors, and the names that hold their bytes.
    ties: Mapping[str, str]
    #: Text that belongs to the source.
    metadata: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class FileOptions:
    """How files are made."""

    #: The name of the only file; ``None``: the output is a directory.
    file: str | None
    #: The most bytes of a shard, in a directory.
    shard_bytes: int
