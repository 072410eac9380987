"""Checkpoints of DeepSpeed: the directory of one save.

The state has the names of :class:`stepwell.torch.TrainState`: ``model/<parameter>``,
``optimizer/state/<parameter>/<slot>``, ``optimizer/groups`` and ``scheduler``. Weights below
``model`` have the highest precision that the files have, which with ZeRO is that of the optimizer.
Those that the model itself used are below ``module``. Other values have their own names. No flat
partition is copied: a parameter is read from where its elements are.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import FormatError
from . import torch_save
from .deepspeed_files import Files, check_ranks, files_of, is_save
from .description import Description, Guarded, Tensor
from .flat_partitions import of_one_share
from .pickle_values import Malformed
from .typed_fields import Fields, is_count
from .universal_parameters import DIRECTORY, universal_state
from .zero_partitions import ZeroState, zero_state

FAMILY = "DeepSpeed"
#: Values of a model's file that describe how it was cut, or that have another place in the state.
_CONSUMED = frozenset(
    {
        "module",
        "optimizer",
        "lr_scheduler",
        "buffer_names",
        "param_shapes",
        "frozen_param_shapes",
        "frozen_param_fragments",
        "shared_params",
    }
)
#: Metadata of experts in files of AutoEP.
_EXPERTS = ("ds_autoep_layers", "autoep_layers")


def describe(path: str) -> Description | None:
    """Describes a save."""
    names = os.listdir(path) if os.path.isdir(path) else []
    return _Save(path, files_of(path, names)).description() if is_save(names) else None


@dataclass(slots=True)
class _Stage:
    """The state of one model-parallel rank."""

    model: dict[str, object]
    module: dict[str, object]
    zero: ZeroState | None
    #: The optimizer without ZeRO.
    optimizer: object
    scheduler: object
    rest: dict[str, object] = field(default_factory=dict)


class _Save:
    """The files of one save."""

    def __init__(self, path: str, files: Files) -> None:
        self._path, self._files = path, files
        self._read: dict[str, torch_save.TorchFile] = {}
        parameters = os.path.join(path, DIRECTORY)
        #: The directory of the parameters of a universal checkpoint.
        self._universal = parameters if os.path.isdir(parameters) and not files.optimizers else None
        #: The version of DeepSpeed, and the first file that names one.
        self._version: tuple[object, str] | None = None

    def description(self) -> Description:
        stages = [self._stage(mp_rank) for mp_rank in self._files.mp_ranks]
        state = self._state(stages)
        metadata = {}
        if any(stage.zero is not None and stage.zero.is_reordered for stage in stages):
            metadata["param_slice_mappings"] = "not used: their order is not that of param_shapes"
        return Description(FAMILY, self._path, state, metadata, files=list(self._read), guarded=self._guarded)

    def _guarded(self) -> Mapping[str, Sequence[Guarded]]:
        return {name: file.guarded() for name, file in self._read.items()}

    def _fields(self, file: str) -> Fields:
        """The content of a file."""
        fields = Fields(file, self._load(file))
        version = fields.get("ds_version")
        if version is not None:
            self._version = self._version or (version, file)
            if version != self._version[0]:
                other = os.path.basename(self._version[1])
                fields.wrong(
                    f"it is of DeepSpeed {version!s:.40}, {other} of {self._version[0]!s:.40}. Keep the files of one save"
                )
        return fields

    def _load(self, file: str) -> object:
        self._read[file] = torch_save.required(file)
        return self._read[file].state

    def _stage(self, mp_rank: int) -> _Stage:
        models = [self._fields(file) for file in self._files.ranks(self._files.models, mp_rank)]
        optimizers = [self._fields(file) for file in self._files.ranks(self._files.optimizers, mp_rank)]
        first = models[0]
        self._check_models(models)
        zero = None
        if self._universal is not None:
            zero = universal_state(self._universal, [first], self._load)
        elif first.has("param_shapes"):
            if not optimizers:
                first.wrong(
                    "the files *_optim_states.pt are missing, which have its weights. Copy the files of all ranks, "
                    "or pass this file to read what is in it"
                )
            zero = zero_state(first, optimizers)
        elif optimizers:
            first.wrong("it has no `param_shapes`, which name the parameters in *_optim_states.pt")
        module = first.named("module")
        return _Stage(
            self._weights(models, module, zero),
            module,
            zero,
            first.entries.get("optimizer"),
            first.entries.get("lr_scheduler"),
            {name: value for name, value in first.named_entries() if name not in _CONSUMED},
        )

    def _check_models(self, models: Sequence[Fields]) -> None:
        """Compares the files of the data-parallel ranks of ZeRO-3."""
        first = models[0]
        for key in _EXPERTS:
            if first.has(key) and (self._files.is_partitioned or first.has("folding")):
                first.unread(
                    "experts that ZeRO-3 partitions (AutoEP) are not read. Convert it with DeepSpeed's ds_to_universal"
                )
        worlds = first.get("mp_world_size")
        if is_count(worlds):
            check_ranks(self._path, "of mp_rank_*_model_states.pt", self._files.mp_ranks, max(1, int(worlds)))  # type: ignore[call-overload]
        for model in models[1:]:
            for key in ("global_steps", "param_shapes", "frozen_param_shapes"):
                if model.get(key) != first.get(key):
                    model.wrong(f"`{key}` differs from that of rank 0. Keep the files of one save")

    def _weights(
        self, models: Sequence[Fields], module: Mapping[str, object], zero: ZeroState | None
    ) -> dict[str, object]:
        """The weights in the highest precision, in the order of the model."""
        first = models[0]
        masters: dict[str, object] = {} if zero is None else dict(zero.masters)
        masters |= self._frozen(models, module)
        found: dict[str, object] = {}
        shared = first.named("shared_params")
        for name in dict.fromkeys([*module, *masters, *shared]):
            source = shared.get(name, name)
            value = masters.get(name, masters.get(source)) if isinstance(source, str) else None
            if value is None:
                value = module.get(name)
                if zero is not None and self._files.is_partitioned and _is_placeholder(value):
                    continue
            if value is not None:
                found[name] = value
        return found

    def _frozen(self, models: Sequence[Fields], module: Mapping[str, object]) -> dict[str, object]:
        """The parameters that the optimizer does not have. Those of ZeRO-3 are in shares."""
        first = models[0]
        if not first.has("frozen_param_fragments"):
            return {}
        found: dict[str, object] = {}
        for name, shape in first.fields("frozen_param_shapes").sizes().items():
            parts = [model.named("frozen_param_fragments").get(name) for model in models]
            what = f"the frozen parameter `{name[:200]}`"
            if not self._files.is_partitioned:
                value = module.get(name, parts[0])
                if not isinstance(value, Tensor) or value.shape != shape:
                    first.wrong(f"{what} is no tensor of shape {list(shape)}")
                found[name] = value
                continue
            flat = [model.flat(what, part) for model, part in zip(models, parts, strict=True)]
            try:
                found[name] = of_one_share(name, shape, flat)
            except Malformed as error:
                first.wrong(f"{what}: {error}")
        return found

    def _state(self, stages: Sequence[_Stage]) -> dict[str, object]:
        if len(stages) > 1:
            raise FormatError(f"{self._path}: several model-parallel ranks are not read")
        (stage,) = stages
        state: dict[str, object] = {"model": stage.model}
        if stage.zero is not None:
            if not self._files.is_partitioned:
                state["module"] = stage.module
            state["optimizer"] = {
                "state": stage.zero.slots,
                "groups": stage.zero.groups,
                **stage.zero.beside,
            }
        elif stage.optimizer is not None:
            state["optimizer"] = stage.optimizer
        if stage.scheduler is not None:
            state["scheduler"] = stage.scheduler
        own = {name: value for name, value in stage.rest.items() if name in state}
        state |= {name: value for name, value in stage.rest.items() if name not in state}
        if own:
            # The user saved values under names of this state.
            state["client_state"] = own
        return state


def _is_placeholder(value: object) -> bool:
    """True for the empty tensor that ZeRO-3 has in place of a parameter."""
    return isinstance(value, Tensor) and value.shape == (0,)
