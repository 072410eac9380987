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

from . import torch_save
from .deepspeed_files import Files, Grid, files_of, is_save
from .description import Copy, Description, Guarded, Opaque, Tensor
from .files import check_ranks, corrupt
from .flat_partitions import of_one_share
from .pickle_values import Malformed
from .pipeline_layers import named_layers
from .slicing_rules import KEY, SlicingRules
from .tensor_slices import Cut, whole
from .typed_fields import Fields
from .universal_parameters import DIRECTORY, universal_state
from .zero_partitions import ZeroState, names_of, zero_state

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
#: Layers without a file that the metadata list.
_LISTED = 10
#: Metadata of experts in files of AutoEP.
_EXPERTS = ("ds_autoep_layers", "autoep_layers")


def describe(path: str) -> Description | None:
    """Describes a save."""
    names = os.listdir(path) if os.path.isdir(path) else []
    return _Save(path, files_of(path, names)).description() if is_save(names) else None


@dataclass(slots=True)
class _Part:
    """The state of a model-parallel rank, or of several ones together."""

    #: The first file of its model.
    first: Fields
    #: Weights of the optimizer, and frozen parameters.
    masters: dict[str, object]
    #: Weights and buffers of the model itself.
    module: dict[str, object]
    #: Names of tied parameters, with the names of those that are stored.
    shared: dict[str, object]
    #: The state of the optimizer with ZeRO.
    zero: ZeroState | None
    #: That without ZeRO, by model-parallel rank.
    optimizers: dict[str, object] = field(default_factory=dict)


class _Save:
    """The files of one save."""

    def __init__(self, path: str, files: Files) -> None:
        self._path, self._files = path, files
        self._read: dict[str, torch_save.TorchFile] = {}
        #: Tensors of tensor-parallel ranks that are not in the state.
        self._copies: list[Copy] = []
        parameters = os.path.join(path, DIRECTORY)
        #: The directory of the parameters of a universal checkpoint.
        self._universal = parameters if os.path.isdir(parameters) and not files.optimizers else None
        #: The version of DeepSpeed, and the first file that names one.
        self._version: tuple[object, str] | None = None
        #: The states of the model and of the optimizer of each model-parallel rank.
        self._models = [self._of_rank(files.models, mp_rank) for mp_rank in files.mp_ranks]
        self._optimizers = [self._of_rank(files.optimizers, mp_rank) for mp_rank in files.mp_ranks]
        #: The weights of all experts.
        self._experts = self._expert_weights()
        firsts = [models[0] for models in self._models]
        #: The names of the buffers.
        self._buffers = {
            name
            for one in firsts
            if one.has("buffer_names")
            for name in one.list("buffer_names")
            if isinstance(name, str)
        }

    def description(self) -> Description:
        pieces = self._tensor_ranks()
        layers = [self._layers(piece) for piece in range(pieces)]
        parts = [self._part(mp_rank, layers[mp_rank % pieces]) for mp_rank in self._files.mp_ranks]
        slices = [self._pipeline(parts[piece::pieces], layers[piece]) for piece in range(pieces)]
        first = slices[0].first
        is_cut = pieces > 1 and self._universal is None
        rules = SlicingRules(first) if is_cut or first.has(KEY) else None
        part = self._whole(slices, rules)
        if self._universal is not None:
            models = [one.first for one in parts]
            part.zero = universal_state(self._universal, models, rules, self._load)
            part.masters |= part.zero.masters
        part.module |= self._experts
        metadata = {}
        if part.zero is not None and part.zero.is_reordered:
            metadata["param_slice_mappings"] = "not used: their order is not that of param_shapes"
        without = self._files.numbers_without_layer() if part.zero is None else []
        if without:
            listed = ", ".join(map(str, without[:_LISTED])) + (", …" if len(without) > _LISTED else "")
            metadata["layers"] = f"{listed} have no file: they have no parameters, or their files are lost"
        return Description(
            FAMILY,
            self._path,
            self._state(part),
            metadata,
            files=list(self._read),
            guarded=self._guarded,
            copies=self._copies,
        )

    def _guarded(self) -> Mapping[str, Sequence[Guarded]]:
        return {name: file.guarded() for name, file in self._read.items()}

    def _load(self, file: str) -> object:
        self._read[file] = torch_save.required(file)
        return self._read[file].state

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

    def _of_rank(self, grid: Grid, mp_rank: int) -> list[Fields]:
        """The content of the files of a model-parallel rank."""
        return [self._fields(file) for file in self._files.ranks(grid, mp_rank)]

    def _part(self, mp_rank: int, layers: Mapping[str, object]) -> _Part:
        models, optimizers = self._models[mp_rank], self._optimizers[mp_rank]
        first = models[0]
        self._check_models(models)
        zero = None
        if first.has("param_shapes") and self._universal is None and not optimizers:
            first.wrong(
                "the files *_optim_states.pt are missing, which have its weights. Copy the files of all ranks, "
                "or pass this file to read what is in it"
            )
        if optimizers:
            zero = zero_state(first, optimizers, {**layers, **first.named("module")}, self._experts)
        module = first.named("module")
        masters = {} if zero is None else dict(zero.masters)
        masters |= self._frozen(models, module)
        if self._files.is_partitioned:
            module = {name: value for name, value in module.items() if not _is_placeholder(value)}
        part = _Part(first, masters, module, first.named("shared_params"), zero)
        if first.has("optimizer"):
            part.optimizers[f"mp_rank_{mp_rank:02d}"] = first.entries["optimizer"]
        for rank, file in enumerate(self._files.ranks(self._files.of_experts, mp_rank)):
            part.optimizers[f"expp_rank_{rank}"] = self._fields(file).entries.get("optimizer")
        return part

    def _check_models(self, models: Sequence[Fields]) -> None:
        """Compares the files of a model-parallel rank, which ZeRO-3 has several of, and their step
        with that of the others."""
        first = models[0]
        if first.get("global_steps") != self._models[0][0].get("global_steps"):
            first.wrong("`global_steps` differs from that of rank 0. Keep the files of one save")
        for key in _EXPERTS:
            if first.has(key) and (self._files.is_partitioned or first.has("folding")):
                first.unread(
                    "experts that ZeRO-3 partitions (AutoEP) are not read. Convert it with DeepSpeed's ds_to_universal"
                )
        world = first.count("mp_world_size")
        if world is not None:
            check_ranks(self._path, "mp_rank_*_model_states.pt", self._files.mp_ranks, max(1, world))
        for model in models[1:]:
            for key in ("global_steps", "param_shapes", "frozen_param_shapes"):
                if model.get(key) != first.get(key):
                    model.wrong(f"`{key}` differs from that of rank 0. Keep the files of one save")

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

    def _tensor_ranks(self) -> int:
        """The number of tensor-parallel ranks. Each has all stages of the pipeline."""
        first, count = self._models[0][0], len(self._models)
        found = len({piece for _, piece in self._files.layers}) if self._files.layers else count
        if first.has("checkpoint_parallel_dimensions"):
            known = first.fields("checkpoint_parallel_dimensions").count("tp_degree")
            found = found if known is None else known
        if not 0 < found <= count or count % found:
            first.wrong(f"{count} model-parallel ranks are no stages of {found} tensor-parallel ranks")
        return found

    def _layers(self, piece: int) -> dict[str, object]:
        """The layers of a pipeline that a tensor-parallel rank has, by name."""
        known = set(self._buffers)
        for models, optimizers in zip(self._models, self._optimizers, strict=True):
            known |= names_of(models[0], optimizers)
        layers = {number: file for (number, own), file in self._files.layers.items() if own == piece}
        return named_layers({number: self._fields(layers[number]) for number in sorted(layers)}, known)

    def _pipeline(self, stages: Sequence[_Part], layers: Mapping[str, object]) -> _Part:
        """The stages of a pipeline as one part. A tied parameter is that of the first stage."""
        whole = stages[0]
        whole.module |= layers
        for stage in stages[1:]:
            for own, more in ((whole.masters, stage.masters), (whole.module, stage.module)):
                for name, value in more.items():
                    known = own.setdefault(name, value)
                    if isinstance(known, Tensor) and isinstance(value, Tensor) and known.shape != value.shape:
                        stage.first.wrong(
                            f"`{name[:200]}` has another shape in {os.path.basename(whole.first.file)}"
                        )
            whole.shared = {**stage.shared, **whole.shared}
            whole.optimizers |= stage.optimizers
            if whole.zero is not None and stage.zero is not None:
                whole.zero.add_stage(stage.zero)
        lost = [name for name in whole.masters if layers and name not in whole.module]
        if lost:
            raise corrupt(
                self._path,
                f"no file layer_*-model_states.pt has `{lost[0][:200]}`. Copy the files of all layers",
            )
        return whole

    def _whole(self, slices: Sequence[_Part], rules: SlicingRules | None) -> _Part:
        """The slices of all tensor-parallel ranks as whole tensors, without padding."""
        first = slices[0]
        if rules is None:
            if len(slices) > 1:  # Only the directory of a universal checkpoint has whole tensors.
                first.module = {name: value for name, value in first.module.items() if name in self._buffers}
            return first
        #: Tied parameters stay one tensor.
        made: dict[tuple[object, ...], Tensor] = {}

        def joined(above: Sequence[str], name: str, end: Sequence[str], values: Sequence[object]) -> object:
            tensors = [value for value in values if isinstance(value, Tensor)]
            if 0 < len(tensors) < len(values):
                first.first.wrong(f"`{name[:200]}` is a tensor in some tensor-parallel ranks only")
            if not tensors:
                return values[0]
            cut = Cut(None) if name in self._buffers else rules.cut(name, len(slices))
            if isinstance(cut, str):
                return Opaque(cut)
            key = (cut, *map(id, tensors))
            try:
                if key not in made:
                    found = made[key] = whole(tensors, cut)
                    if cut.axis is None or found is tensors[0]:
                        leaf = tuple(("k", part) for part in (*above, name, *end))
                        self._copies += [Copy(leaf, tensors[0], one) for one in tensors[1:]]
            except Malformed as error:
                if name in self._buffers:
                    return Opaque(f"buffer of tensor-parallel ranks: {error}")
                first.first.wrong(f"`{name[:200]}`: {error}")
            return made[key]

        of_module = "model" if first.zero is None or self._files.is_partitioned else "module"
        for key, above in (("masters", "model"), ("module", of_module)):
            own = getattr(first, key)
            names = dict.fromkeys(name for one in slices for name in getattr(one, key))
            for name in names:
                own[name] = joined([above], name, [], [getattr(one, key).get(name) for one in slices])
        for name, slots in first.zero.slots.items() if first.zero is not None else ():
            others = [one.zero.slots.get(name, {}) if one.zero is not None else {} for one in slices]
            for slot in slots:
                values = [one.get(slot) for one in others]
                slots[slot] = joined(["optimizer", "state"], name, [slot], values)
        for one in slices[1:]:
            first.optimizers |= one.optimizers
        return first

    def _expert_weights(self) -> dict[str, object]:
        """The weights of experts, which have files of their own."""
        found: dict[str, object] = {}
        for file in self._files.experts.values():
            fields = Fields(file, self._load(file))
            if fields.has("folding"):
                fields.unread("tensor-parallel experts (AutoEP with AutoTP) are not read")
            found.update(fields.named_entries())
        return found

    def _weights(self, part: _Part) -> dict[str, object]:
        """The weights in the highest precision, in the order of the model."""
        found: dict[str, object] = {}
        for name in dict.fromkeys([*part.module, *part.masters, *part.shared]):
            stored = part.shared.get(name)
            value = part.masters.get(name)
            if value is None and isinstance(stored, str):
                value = part.masters.get(stored)
            if value is None:
                value = part.module.get(name)
            if value is not None:
                found[name] = value
        return found

    def _state(self, part: _Part) -> dict[str, object]:
        state: dict[str, object] = {"model": self._weights(part)}
        if part.zero is not None:
            if not self._files.is_partitioned:
                state["module"] = part.module
            state["optimizer"] = {
                "state": part.zero.slots,
                "groups": part.zero.groups,
                **part.zero.beside,
            }
        elif part.optimizers:
            several = len(part.optimizers) > 1
            state["optimizer"] = part.optimizers if several else next(iter(part.optimizers.values()))
        entries = dict(part.first.named_entries())
        if part.first.has("lr_scheduler"):
            state["scheduler"] = entries["lr_scheduler"]
        rest = {name: value for name, value in entries.items() if name not in _CONSUMED}
        own = {name: value for name, value in rest.items() if name in state}
        state |= {name: value for name, value in rest.items() if name not in state}
        if own:
            # The user saved values under names of this state.
            state["client_state"] = own
        return state


def _is_placeholder(value: object) -> bool:
    """True for the empty tensor that ZeRO-3 has in place of a parameter."""
    return isinstance(value, Tensor) and value.shape == (0,)
