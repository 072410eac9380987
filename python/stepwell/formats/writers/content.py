"""The content of a conversion: what a writer puts into files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ..._paths import extend
from .output import OutputTensor


@dataclass(frozen=True, slots=True)
class PlainValue:
    """An object of plain Python values."""

    value: object


@dataclass(frozen=True, slots=True)
class Namespace:
    """Attributes of an ``argparse.Namespace``."""

    attributes: Mapping[object, object]


@dataclass(frozen=True, slots=True)
class Content:
    """Tensors with their names, in the order of the source."""

    tensors: tuple[OutputTensor, ...]
    #: Tied tensors, whose bytes are those of another one.
    tied: tuple[OutputTensor, ...]
    #: Names of tied tensors, and the names that hold their bytes.
    ties: Mapping[str, str]
    #: Text that belongs to the source.
    metadata: Mapping[str, str]
    #: Dicts, lists and tuples as in the source, with all tensors (tied ones too) and objects.
    state: object

    @property
    def every(self) -> tuple[OutputTensor, ...]:
        """All tensors, tied ones too."""
        return (*self.tensors, *self.tied)


def tensors_in(value: object) -> Iterator[OutputTensor]:
    """The tensors in a part of a state."""
    if isinstance(value, OutputTensor):
        yield value
    elif isinstance(value, (dict, list, tuple)):
        for one in value.values() if isinstance(value, dict) else value:
            yield from tensors_in(one)


def named_paths(content: Content) -> dict[str, str]:
    """The rendered paths of the tensors in an output that has them by name."""
    return {one.name: extend("", ("k", one.name)) for one in content.every}


def nested_paths(content: Content) -> dict[str, str]:
    """Those in an output with the nesting of the source, where names are paths."""
    return {one.name: one.name for one in content.every}


@dataclass(frozen=True, slots=True)
class FileOptions:
    """How files are made."""

    #: The name of the output.
    name: str
    #: The most bytes of a file. ``None``: the output is one file, and no directory.
    shard_bytes: int | None
