"""Checkpoints of DeepSpeed: the directory of one save.

The state has the names of :class:`stepwell.torch.TrainState`: ``model/<parameter>``,
``optimizer/state/<parameter>/<slot>``, ``optimizer/groups`` and ``scheduler``. Weights below
``model`` have the highest precision that the files have, which with ZeRO is that of the optimizer.
Those that the model itself used are below ``module``. Other values have their own names. No flat
partition is copied: a parameter is read from where its elements are.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace

from . import lookup, torch_save
from .deepspeed_files import Grid, SaveFiles, files_of, is_save
from .description import Description, Guarded, Tensor
from .expert_names import ExpertNames
from .files import check_ranks
from .flat_partitions import of_one_share
from .model_parallel import Joining, ModelState, RankState, of_stages
from .parameter_shapes import names_of
from .pickle_values import Malformed
from .pipeline_layers import named_layers
from .slicing_rules import KEY, SlicingRules
from .typed_fields import Fields
from .universal_parameters import DIRECTORY, universal_state
from .zero_partitions import partitioned_state

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
    names = lookup.names(path) if lookup.is_dir(path) else []
    return _Save(path, files_of(path, names)).description() if is_save(names) else None


class _Save:
    """The files of one save."""

    def __init__(self, path: str, files: SaveFiles) -> None:
        self._path, self._files = path, files
        self._read: dict[str, torch_save.TorchFile] = {}
        parameters = os.path.join(path, DIRECTORY)
        #: The directory of the parameters of a universal checkpoint.
        self._universal = parameters if lookup.is_dir(parameters) and not files.optimizers else None
        #: The version of DeepSpeed, and the first file that names one.
        self._version: tuple[object, str] | None = None
        #: The content of the files ``*_model_states.pt`` and ``*_optim_states.pt`` of each
        #: model-parallel rank.
        self._models = [self._of_rank(files.models, mp_rank) for mp_rank in files.mp_ranks]
        self._optimizers = [self._of_rank(files.optimizers, mp_rank) for mp_rank in files.mp_ranks]
        #: The weights of all experts.
        self._experts = self._expert_weights()
        self._expert_names = ExpertNames(self._experts)
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
        ranks = [self._rank(mp_rank, layers[mp_rank % pieces]) for mp_rank in self._files.mp_ranks]
        slices = [of_stages(self._path, ranks[piece::pieces], layers[piece]) for piece in range(pieces)]
        model, copies = slices[0], []
        model_file = ranks[0].model_file
        is_sliced = pieces > 1 and self._universal is None
        rules = SlicingRules(model_file) if is_sliced or model_file.has(KEY) else None
        if rules is not None:
            joining = Joining(model_file, rules, self._buffers)
            has_module = model.zero is not None and not self._files.is_partitioned
            model, copies = joining.model(slices, "module" if has_module else "model"), joining.copies
        elif pieces > 1:  # Only the directory of a universal checkpoint has whole tensors.
            module = {name: value for name, value in model.module.items() if name in self._buffers}
            model = replace(model, module=module)
        if self._universal is not None:
            zero = universal_state(self._universal, [one.model_file for one in ranks], rules, self._load)
            model = replace(model, zero=zero, masters={**model.masters, **zero.masters})
        model = replace(model, module={**model.module, **self._experts})
        return Description(
            FAMILY,
            self._path,
            self._state(model, model_file),
            self._metadata(model),
            files=torch_save.with_streams(self._read),
            guarded=self._guarded,
            copies=copies,
        )

    def _metadata(self, model: ModelState) -> dict[str, str]:
        """Text about what the files do not say."""
        found = {}
        if model.zero is not None and model.zero.is_reordered:
            found["param_slice_mappings"] = "not used: their order is not that of param_shapes"
        if model.zero is not None and model.zero.doubt is not None:
            found["optimizer"] = model.zero.doubt
            logging.getLogger("stepwell").warning("%s: %s", self._path, model.zero.doubt)
        without = self._files.numbers_without_layer() if model.zero is None else []
        if without:
            listed = ", ".join(map(str, without[:_LISTED])) + (", …" if len(without) > _LISTED else "")
            found["layers"] = f"{listed} have no file: they have no parameters, or their files are lost"
        return found

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

    def _rank(self, mp_rank: int, layers: Mapping[str, object]) -> RankState:
        """Returns the state of a model-parallel rank."""
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
            zero = partitioned_state(
                first, optimizers, {**layers, **first.named("module")}, self._expert_names
            )
        module = first.named("module")
        masters = {} if zero is None else dict(zero.masters)
        masters |= self._frozen(models, module)
        if self._files.is_partitioned:
            module = {name: value for name, value in module.items() if not _is_placeholder(value)}
        own = {f"mp_rank_{mp_rank:02d}": first.entries["optimizer"]} if first.has("optimizer") else {}
        for rank, file in enumerate(self._files.ranks(self._files.of_experts, mp_rank)):
            own[f"expp_rank_{rank}"] = self._fields(file).entries.get("optimizer")
        return RankState(first, ModelState(masters, module, first.named("shared_params"), zero, own))

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

    def _expert_weights(self) -> dict[str, object]:
        """The weights of experts, which have files of their own."""
        found: dict[str, object] = {}
        for file in self._files.experts.values():
            fields = Fields(file, self._load(file))
            if fields.has("folding"):
                fields.unread("tensor-parallel experts (AutoEP with AutoTP) are not read")
            found.update(fields.named_entries())
        return found

    def _weights(self, model: ModelState) -> dict[str, object]:
        """The weights in the highest precision, in the order of the model."""
        found: dict[str, object] = {}
        for name in dict.fromkeys([*model.module, *model.masters, *model.shared]):
            stored = model.shared.get(name)
            value = model.masters.get(name)
            if value is None and isinstance(stored, str):
                value = model.masters.get(stored)
            if value is None:
                value = model.module.get(name)
            if value is not None:
                found[name] = value
        return found

    def _state(self, model: ModelState, model_file: Fields) -> dict[str, object]:
        state: dict[str, object] = {"model": self._weights(model)}
        zero = model.zero
        if zero is not None:
            if not self._files.is_partitioned:
                state["module"] = model.module
            state["optimizer"] = {"state": zero.slots, "groups": zero.groups, **zero.beside}
        elif model.optimizers:
            several = len(model.optimizers) > 1
            state["optimizer"] = model.optimizers if several else next(iter(model.optimizers.values()))
        entries = dict(model_file.named_entries())
        if model_file.has("lr_scheduler"):
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
