"""Files of ``torch.save`` by rank, with distributed tensors: the whole tensors of all ranks.

``model_world_size_8_rank_3.pt`` has the parts of rank 3, as verl writes them. Other values are
those of rank 0.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

from ..errors import FormatError
from .description import Chunk, Tensor
from .dtensor_symbols import Distribution
from .files import check_ranks, corrupt

_NAME = re.compile(r"(\w+?)_world_size_([1-9]\d{0,5})_rank_(\d{1,6})\.pt")
#: Prefixes of the files that are one state; the one of the model comes first.
_PREFIXES = ("model", "optim")

#: The distributions of a file's tensors, by identity.
Distributions: TypeAlias = Mapping[int, Distribution]
#: Returns the leaf for those of all ranks, at a path.
_Leaf: TypeAlias = Callable[[Sequence[object], str], object]


def rank_files(path: str, names: Sequence[str]) -> Mapping[str, list[str]]:
    """Returns the files in a directory that ranks wrote: for each prefix, by rank."""
    found: dict[str, dict[int, str]] = {}
    worlds: dict[str, int] = {}
    for name in names:
        match = _NAME.fullmatch(name)
        if match is None or match[1] not in _PREFIXES:
            continue
        prefix, world, rank = match[1], int(match[2]), int(match[3])
        if worlds.setdefault(prefix, world) != world:
            raise FormatError(f"{path}: files of {worlds[prefix]} and of {world} ranks; keep those of one")
        found.setdefault(prefix, {})[rank] = os.path.join(path, name)
    for prefix, files in found.items():
        check_ranks(path, f"{prefix}_world_size_{worlds[prefix]}_rank_*.pt", sorted(files), worlds[prefix])
    return {
        prefix: [found[prefix][rank] for rank in range(worlds[prefix])]
        for prefix in _PREFIXES
        if prefix in found
    }


def whole_state(path: str, states: Sequence[object], distributions: Sequence[Distributions]) -> object:
    """Returns the state of rank 0 with whole tensors for distributed ones."""
    whole: dict[int, Tensor] = {}

    def leaf(values: Sequence[object], where: str) -> object:
        first = values[0]
        if id(first) not in distributions[0]:
            return first
        if id(first) not in whole:
            whole[id(first)] = _assembled(path, where, values, distributions)
        return whole[id(first)]

    return _walk(path, states, leaf, "")


def _walk(path: str, values: Sequence[object], leaf: _Leaf, where: str) -> object:
    """Rebuilds the containers of rank 0. They are at most as deep as a state may be."""
    first = values[0]
    if isinstance(first, dict):
        if any(not isinstance(one, dict) or one.keys() != first.keys() for one in values):
            raise corrupt(path, f"the ranks have different keys at `{where}`")
        return type(first)(
            (key, _walk(path, [one[key] for one in values], leaf, f"{where}/{key}"))  # type: ignore[index]
            for key in first
        )
    if isinstance(first, (list, tuple)):
        if any(not isinstance(one, (list, tuple)) or len(one) != len(first) for one in values):
            raise corrupt(path, f"the ranks have different lengths at `{where}`")
        return type(first)(
            _walk(path, [one[at] for one in values], leaf, f"{where}[{at}]")  # type: ignore[index]
            for at in range(len(first))
        )
    return leaf(values, where)


def _assembled(
    path: str, where: str, values: Sequence[object], distributions: Sequence[Distributions]
) -> Tensor:
    """The whole tensor of the ranks' parts."""
    chunks: list[Chunk] = []
    parts: set[tuple[int, ...]] = set()
    first: tuple[Tensor, Distribution] | None = None
    for rank, value in enumerate(values):
        spec = distributions[rank].get(id(value))
        if spec is None or not isinstance(value, Tensor):
            raise corrupt(path, f"tensor `{where}` of rank {rank} is not distributed as that of rank 0")
        first = first or (value, spec)
        same = (spec.shape, spec.placements, spec.mesh.shape, value.dtype)
        if same != (first[1].shape, first[1].placements, first[1].mesh.shape, first[0].dtype):
            raise corrupt(path, f"tensor `{where}` of rank {rank} has another shape or placement")
        start, extent = spec.box()
        if extent != value.shape:
            raise corrupt(
                path, f"tensor `{where}` of rank {rank} has shape {list(value.shape)}, not {list(extent)}"
            )
        if spec.is_first_copy():
            parts.add(spec.mesh.coordinate)
            chunks.extend(replace(chunk, start=start, extent=extent) for chunk in value.chunks)
    assert first is not None
    if len(parts) != first[1].parts():
        raise corrupt(path, f"tensor `{where}` has {len(parts)} parts of {first[1].parts()}")
    return Tensor(first[0].dtype, first[1].shape, tuple(chunks))
