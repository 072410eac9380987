"""The files of a checkpoint of DeepSpeed, by the ranks that their names say.

Model-parallel ranks (``mp_rank``) have parts of the model: stages of a pipeline, or slices of
tensors. Data-parallel ranks (``zero_pp_rank``) have partitions of the optimizer's state.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from ..errors import FormatError
from .files import check_ranks, corrupt

MODEL_STATES = re.compile(r"(?:zero_pp_rank_(\d{1,6})_)?mp_rank_(\d{1,6})_model_states\.pt")
_OPTIMIZER = re.compile(r"(?:bf16_|fp16_)?zero_pp_rank_(\d{1,6})_mp_rank_(\d{1,6})_?optim_states\.pt")
_LAYER = re.compile(r"layer_(\d{1,6})(?:-model_(\d{1,6}))?-model_states\.pt")
_EXPERT = re.compile(r"layer_(\d{1,6})_expert_(\d{1,6})_mp_rank_(\d{1,6})_model_states\.pt")
_OF_EXPERTS = re.compile(r"expp_rank_(\d{1,6})_mp_rank_(\d{1,6})_optim_states\.pt")
_OLD_EXPERT = re.compile(r"expert_(\d{1,6})_mp_rank_(\d{1,6})_model_states\.pt")
_KINDS = (MODEL_STATES, _OPTIMIZER, _LAYER, _EXPERT, _OF_EXPERTS, _OLD_EXPERT)
#: Missing ranks that an error lists.
_LISTED = 10

#: Files by the two numbers in their names.
Grid = dict[tuple[int, int], str]


@dataclass(slots=True)
class SaveFiles:
    """The files of one save."""

    #: ``*_model_states.pt``, by model-parallel and data-parallel rank. Without ZeRO-3, the latter
    #: is 0.
    models: Grid = field(default_factory=dict)
    #: True if each data-parallel rank has its own (ZeRO-3).
    is_partitioned: bool = False
    #: ``*_optim_states.pt``, by model-parallel and data-parallel rank.
    optimizers: Grid = field(default_factory=dict)
    #: The layers of a pipeline, by number and slice.
    layers: Grid = field(default_factory=dict)
    #: The experts, by layer and number.
    experts: Grid = field(default_factory=dict)
    #: The optimizers of expert-parallel ranks, by model-parallel and expert-parallel rank.
    of_experts: Grid = field(default_factory=dict)

    def ranks(self, of: Grid, mp_rank: int) -> list[str]:
        """Returns the files of a model-parallel rank, by the other rank."""
        found = {other: file for (first, other), file in of.items() if first == mp_rank}
        return [found[other] for other in sorted(found)]

    @property
    def mp_ranks(self) -> list[int]:
        """The model-parallel ranks."""
        return sorted({first for first, _ in self.models})

    def numbers_without_layer(self) -> list[int]:
        """Returns numbers between layers of a pipeline that have no file."""
        known = {number for number, _ in self.layers}
        return [number for number in range(max(known, default=0)) if number not in known]


def is_save(names: Iterable[str]) -> bool:
    """True if a directory with these names has a save of DeepSpeed."""
    return any(kind.fullmatch(name) for name in names for kind in (MODEL_STATES, _OPTIMIZER, _LAYER))


def files_of(path: str, names: Sequence[str]) -> SaveFiles:
    """Returns the files of a save."""
    found = SaveFiles()
    partitioned: set[bool] = set()
    for name in sorted(names):
        place = os.path.join(path, name)
        if (match := MODEL_STATES.fullmatch(name)) is not None:
            partitioned.add(match[1] is not None)
            _put(path, found.models, (int(match[2]), int(match[1] or 0)), place)
        elif (match := _OPTIMIZER.fullmatch(name)) is not None:
            _put(path, found.optimizers, (int(match[2]), int(match[1])), place)
        elif (match := _LAYER.fullmatch(name)) is not None:
            _put(path, found.layers, (int(match[1]), int(match[2] or 0)), place)
        elif (match := _EXPERT.fullmatch(name)) is not None:
            if int(match[3]):
                raise FormatError(f"{path}: experts of several tensor-parallel ranks are not read")
            _put(path, found.experts, (int(match[1]), int(match[2])), place)
        elif (match := _OF_EXPERTS.fullmatch(name)) is not None:
            _put(path, found.of_experts, (int(match[2]), int(match[1])), place)
        elif _OLD_EXPERT.fullmatch(name):
            raise FormatError(f"{path}: expert files without a layer ({name}) are not read")
    if len(partitioned) > 1:
        raise corrupt(path, "it has states of a model with and without ZeRO-3. Keep the files of one save")
    if not found.models:
        raise corrupt(path, "it has no file *_model_states.pt. Copy the files of all ranks")
    found.is_partitioned = partitioned == {True}
    _check_complete(path, found)
    return found


def _put(path: str, grid: Grid, ranks: tuple[int, int], file: str) -> None:
    if ranks in grid:
        names = f"{os.path.basename(grid[ranks])} and {os.path.basename(file)}"
        raise corrupt(path, f"{names} are of the same rank. Keep the files of one save")
    grid[ranks] = file


def _check_complete(path: str, found: SaveFiles) -> None:
    """Raises if the numbers of ranks have gaps, or are not those of another kind of files."""
    count = len(found.mp_ranks)
    check_ranks(path, "mp_rank_*_model_states.pt", found.mp_ranks, count)
    for kind, grid in (("model_states", found.models), ("optim_states", found.optimizers)):
        dp_ranks = sorted({other for _, other in grid})
        for mp_rank in range(count) if grid else ():
            mine = sorted(other for first, other in grid if first == mp_rank)
            what = f"zero_pp_rank_*_mp_rank_{mp_rank:02d}_{kind}.pt"
            check_ranks(path, what, mine, max(len(mine), len(dp_ranks), 1))
        strange = sorted({first for first, _ in grid} - set(range(count)))
        if strange:
            raise corrupt(
                path, f"no model states of mp_rank {strange[:_LISTED]}. Copy the files of all ranks"
            )
    for layer in sorted({first for first, _ in found.experts}):
        numbers = sorted(number for first, number in found.experts if first == layer)
        check_ranks(path, f"layer_{layer}_expert_*_model_states.pt", numbers, numbers[-1] + 1)
    of_experts = sorted(rank for _, rank in found.of_experts)
    check_ranks(path, "expp_rank_*_optim_states.pt", of_experts, max(of_experts, default=-1) + 1)
    if found.is_partitioned and found.models.keys() != found.optimizers.keys() and found.optimizers:
        raise corrupt(path, "the ranks of its model states are not those of its optim_states")
