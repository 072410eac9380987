"""Writes checkpoints with Megatron-Core, and what is in them.

    python tests/foreign/make_megatron.py FOLDER [NAME...]

``tests/frameworks/test_megatron_checkpoints.py`` runs it with the installed version. The files of
other versions are in ``megatron_<version>/``. Those of 0.8 to 0.12 were made with torch 2.2:

    python3.11 -m venv old
    old/bin/pip install torch==2.2.2 'numpy<2' 'zarr<3' 'numcodecs<0.16' 'tensorstore<=0.1.45'
    old/bin/pip install --no-deps --target megatron megatron-core==0.8.0
    PYTHONPATH=megatron old/bin/python tests/foreign/make_megatron.py FOLDER two_layers

They were made on a machine without a GPU: four processes with gloo, and what needs CUDA replaced.
Transformer Engine needs CUDA too, so the layers are local ones, whose keys are the same. The file
``NAME.json`` has the tensors of a checkpoint by key: dtype, shape, and the digest of the bytes. The
processes take them from memory, before they save.

The distributed optimizer needs CUDA. Its tensors are made here as its source makes them out of
those of the model: see ``DistributedOptimizer.sharded_state_dict``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

RANKS = 4
HIDDEN, VOCAB, EXPERTS = 8, 16, 4


@dataclass(frozen=True)
class Layout:
    """A checkpoint: how its model is cut, and what is in it."""

    tensor: int = 1
    pipeline: int = 1
    expert: int = 1
    layers: int = 4
    #: Metadata of ``sharded_state_dict``.
    metadata: tuple[str, ...] = ()
    is_moe: bool = False
    is_grouped: bool = False
    is_tied: bool = False
    dtype: str = "float32"
    #: The layout of the optimizer, and the ends of the names of the parameters that it has.
    optimizer: str = ""
    optimized: tuple[str, ...] = ("",)
    backend: str = "torch_dist"
    #: Saves with all ranks of a replica.
    is_parallel: bool = False


LAYOUTS = {
    "dense": Layout(tensor=2, pipeline=2),
    "two_layers": Layout(tensor=2, pipeline=2, layers=2),
    "tied": Layout(tensor=2, pipeline=2, metadata=("non_homogeneous_layers",), is_tied=True),
    "experts": Layout(tensor=2, expert=2, is_moe=True),
    "grouped": Layout(expert=2, pipeline=2, is_moe=True, is_grouped=True),
    "single_experts": Layout(expert=2, is_moe=True, metadata=("singleton_local_shards",)),
    "half": Layout(tensor=4, dtype="bfloat16", is_parallel=True),
    "not_distributed": Layout(tensor=2, pipeline=2, optimizer="FP32Optimizer"),
    "model_shapes": Layout(tensor=2, pipeline=2, optimizer="fully_reshardable"),
    "flattened": Layout(tensor=2, layers=2, optimizer="fully_sharded_model_space"),
    "flattened_part": Layout(
        tensor=2,
        layers=2,
        optimizer="fully_sharded_model_space",
        optimized=("self_attention.linear_qkv.weight", "final_layernorm.weight"),
    ),
    "flattened_stages": Layout(pipeline=2, layers=2, is_moe=True, optimizer="fully_sharded_model_space"),
    "buckets": Layout(tensor=2, optimizer="dp_reshardable"),
    "gathered": Layout(tensor=2, optimizer="dp_zero_gather_scatter"),
    "zarr": Layout(tensor=2, pipeline=2, layers=2, backend="zarr"),
    "zarr_half": Layout(tensor=4, layers=2, dtype="bfloat16", backend="zarr"),
}


def model(layout: Layout) -> Any:
    """This rank's part of a model."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.transformer_config import TransformerConfig

    if layout.is_grouped:
        from megatron.core.transformer.moe import grouped_gemm_util

        grouped_gemm_util.assert_grouped_gemm_is_available = lambda: None
    dtype = getattr(torch, layout.dtype)
    moe = {"num_moe_experts": EXPERTS, "moe_router_topk": 2, "moe_grouped_gemm": layout.is_grouped}
    config = TransformerConfig(
        num_layers=layout.layers,
        hidden_size=HIDDEN,
        num_attention_heads=4,
        ffn_hidden_size=2 * HIDDEN,
        use_cpu_initialization=True,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        pipeline_dtype=dtype,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        expert_model_parallel_size=layout.expert,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=layout.is_tied,
        **(moe if layout.is_moe else {}),
    )
    spec = get_gpt_layer_local_spec(EXPERTS if layout.is_moe else None, layout.is_grouped)
    made = GPTModel(
        config,
        spec,
        vocab_size=VOCAB,
        max_sequence_length=4,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=layout.is_tied,
        position_embedding_type="rope",
    )
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.normal_()
    return made


def built(state: dict[str, Any]) -> Iterator[Any]:
    """The sharded tensors of a state, those of factories too."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    for value in state.values() if isinstance(state, dict) else state:
        if isinstance(value, ShardedTensorFactory):
            value = value.build()
        if isinstance(value, ShardedTensor):
            yield value
        elif isinstance(value, (dict, list)):
            yield from built(value)


def moments(tensors: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """The state of an optimizer, in the shapes of the model: of each tensor or factory."""
    from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory

    for name, sharded in tensors.items():
        if not isinstance(sharded, (ShardedTensor, ShardedTensorFactory)):
            continue
        for number, slot in enumerate(("param", "exp_avg")):
            data = sharded.data.detach().float() * (number + 1.5)
            kinds = {} if isinstance(sharded, ShardedTensorFactory) else {"dtype": data.dtype}
            yield f"{name}/{slot}", replace(sharded, key=f"{slot}.{sharded.key}", data=data, **kinds)


def flattened(sharded: Any) -> Any:
    """The run of a tensor that this data-parallel rank has. The runs are uneven. Before 0.12, one
    rank has all of a tensor with one dimension: Megatron-Core does not save its parts."""
    from megatron.core import package_info, parallel_state

    count = parallel_state.get_data_parallel_world_size()
    rank = parallel_state.get_data_parallel_rank()
    flat = sharded.data.reshape(-1)
    bounds = [0, *(flat.numel() * (2 * one + 1) // (2 * count) for one in range(1, count)), flat.numel()]
    if len(getattr(sharded, "global_shape", ())) == 1 and package_info.MINOR < 12:
        bounds = [0] + [flat.numel()] * count
    begin, end = bounds[rank], bounds[rank + 1]
    key = sharded.key.removeprefix("param.")
    key = f"fp32_param.{key}" if key != sharded.key else key
    return replace(
        sharded,
        key=key,
        data=flat[begin:end],
        flattened_range=slice(begin, end),
        replica_id=(*sharded.replica_id[:2], 0),
    )


def not_distributed(model: Any, tensors: dict[str, Any]) -> dict[str, Any]:
    """The sharded state of an optimizer that is not distributed, after a step. Its initialiser
    needs CUDA."""
    from megatron.core.optimizer.optimizer import FP32Optimizer

    made = FP32Optimizer.__new__(FP32Optimizer)
    made.optimizer, made.is_stub_optimizer = torch.optim.AdamW(model.parameters(), lr=0.5), False
    for parameter in model.parameters():
        parameter.grad = torch.randn_like(parameter)
    made.optimizer.step()
    state: dict[str, Any] = made.sharded_state_dict(tensors)
    return state


def optimizer(layout: Layout, tensors: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The sharded state of a distributed optimizer, and its tensors in the shapes of the model."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor

    tensor_rank = parallel_state.get_tensor_model_parallel_rank()
    replica = (0, 0, parallel_state.get_data_parallel_rank())
    kind = layout.optimizer
    groups = {"param_groups": [{"lr": 0.5, "betas": (0.9, 0.99), "step": 7}]}
    state: dict[str, Any] = {"optimizer": groups, "param_state_sharding_type": kind}
    if kind.startswith("fully"):
        whole = dict(moments({name: one for name, one in tensors.items() if name.endswith(layout.optimized)}))
        if kind == "fully_sharded_model_space":
            whole = {
                name: replace(one, key=one.key.replace("param.", "fp32_param.", 1))
                if one.key.startswith("param.")
                else one
                for name, one in whole.items()
            }
            runs = {name: flattened(one) for name, one in whole.items()}
            state["param_state"] = {name: one for name, one in runs.items() if one.data.numel()}
        else:
            state["param_state"] = whole
        prefixed = {
            name: replace(one, key=f"optimizer.state.{one.key}") for name, one in state["param_state"].items()
        }
        state["param_state"] = prefixed
        return state, {name: replace(one, key=f"optimizer.state.{one.key}") for name, one in whole.items()}
    prefix = f"optimizer.distributed.dp_group_idx_{tensor_rank}"
    state["optimizer"] = ShardedObject(f"{prefix}.optimizer", groups, (1,), (0,), replica)
    if kind == "dp_reshardable":
        half = torch.arange(10.0) + 10 * replica[2]
        key = f"{prefix}.gbuf_idx_0.dtype_(torch.float32, torch.float32).bucket_idx_0.exp_avg"
        bucket = ShardedTensor(
            key, half, half.dtype, (10,), (20,), (10 * replica[2],), (2,), replica_id=(0, 0, 0)
        )
        numel = ShardedObject(f"{prefix}.per_bucket_numel", [{torch.float32: [20]}], (1,), (0,), replica)
        state["param_state"] = {0: [bucket], "per_bucket_numel": numel}
    else:
        world = {0: {torch.float32: {"exp_avg": torch.arange(20.0)}}}
        state["param_state"] = ShardedObject(f"{prefix}.param_state", world, (1,), (0,), replica)
    return state, {}


def state_of(layout: Layout) -> tuple[dict[str, Any], dict[str, Any]]:
    """The state of a training run, and its tensors in the shapes of the model."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.mapping import ShardedObject
    from megatron.core.transformer import enums

    made = model(layout)
    tensors = made.sharded_state_dict(metadata=dict.fromkeys(layout.metadata, True))
    grid = (layout.pipeline, layout.tensor)
    rank = (
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_tensor_model_parallel_rank(),
    )
    state: dict[str, Any] = {
        "model": tensors,
        "args": argparse.Namespace(
            lr=0.5,
            params_dtype=torch.float32,
            attention_backend=next(iter(getattr(enums, "AttnBackend", enums.AttnMaskType))),
            num_layers=layout.layers,
        ),
        "checkpoint_version": 3.0,
        "iteration": 100,
        "rng_state": ShardedObject(
            "rng_state",
            [{"seed": 10 * rank[0] + rank[1], "torch": torch.arange(5)}],
            grid,
            rank,
            parallel_state.get_data_parallel_rank(with_context_parallel=True),
        ),
    }
    whole = {"model": tensors}
    if layout.optimizer == "FP32Optimizer":
        state["optimizer"] = whole["optimizer"] = not_distributed(made, tensors)
    elif layout.optimizer:
        state["optimizer"], whole["optimizer"] = optimizer(layout, tensors)
    return state, whole


def assembled(shards: list[tuple[str, str, tuple[int, ...], tuple[int, ...], Any]]) -> dict[str, list[Any]]:
    """The whole tensors of the shards of all ranks, by key."""
    wholes: dict[str, Any] = {}
    for key, _, shape, offset, data in shards:
        if key not in wholes:
            wholes[key] = torch.zeros(shape, dtype=data.dtype)
        box = tuple(slice(at, at + size) for at, size in zip(offset, data.shape, strict=True))
        wholes[key][box] = data
    found = {}
    for key, whole in wholes.items():
        data = whole.reshape(-1).view(torch.uint8).numpy().tobytes()
        digest = hashlib.sha256(data).hexdigest()
        found[key] = [str(whole.dtype).removeprefix("torch."), list(whole.shape), digest]
    return found


def strategy(layout: Layout) -> Any:
    """How the checkpoint is saved. ``None``: the default."""
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import FullyParallelSaveStrategyWrapper

    if layout.is_parallel:
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        return FullyParallelSaveStrategyWrapper(get_default_save_sharded_strategy(), group)
    return None if layout.backend == "torch_dist" else (layout.backend, 1)


def save(name: str, rank: int) -> None:
    """Saves a checkpoint into this directory, as one of the ranks."""
    from megatron.core import dist_checkpointing, parallel_state
    from megatron.core.dist_checkpointing.mapping import is_main_replica

    layout = LAYOUTS[name]
    parallel_state.initialize_model_parallel(
        layout.tensor, layout.pipeline, expert_model_parallel_size=layout.expert
    )
    # Ranks with the same part of the model have the same values.
    parts = (
        parallel_state.get_tensor_model_parallel_rank(),
        parallel_state.get_pipeline_model_parallel_rank(),
        parallel_state.get_expert_model_parallel_rank(),
    )
    torch.manual_seed(sum(part << 8 * at for at, part in enumerate(parts)))
    state, whole = state_of(layout)
    shards: list[Any] = [None] * RANKS
    dist.all_gather_object(
        shards,
        [
            (
                one.key,
                str(one.dtype),
                tuple(one.global_shape),
                tuple(one.global_offset),
                one.data.detach().reshape((1,) * one.prepend_axis_num + tuple(one.local_shape)).clone(),
            )
            for one in built(whole)
            if is_main_replica(one.replica_id)
        ],
    )
    path = Path(name)  # some versions store the path as it is given
    if rank == 0:
        path.mkdir()
        expected = assembled([one for of_rank in shards for one in of_rank])
        path.with_suffix(".json").write_text(json.dumps(expected, indent=0, sort_keys=True) + "\n")
    dist.barrier()
    dist_checkpointing.save(state, str(path) if layout.backend == "torch_dist" else path, strategy(layout))
    dist.barrier()
    parallel_state.destroy_model_parallel()


def prepare() -> None:
    """Replaces what needs CUDA."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    torch.cuda.current_device = lambda: torch.device("cpu")
    torch.cuda.synchronize = lambda *_: None
    torch.Tensor.cuda = lambda self, *_: self


def of_rank(folder: Path, rank: int, names: list[str], store: str) -> None:
    """Saves all checkpoints, as one of the ranks."""
    prepare()
    os.chdir(folder)
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    manager = multiprocessing.get_context("fork").Manager()
    results = manager.Queue()
    filesystem_async._get_write_results_queue = lambda: results
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=RANKS)
    for name in names:
        save(name, rank)
    manager.shutdown()
    os._exit(0)  # gloo may wait for other ranks without an end


def main(folder: Path, names: list[str]) -> None:
    """Starts the ranks."""
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as place:
        command = [sys.executable, __file__, str(folder), *names, "--store", f"{place}/store", "--rank"]
        ranks = [subprocess.Popen([*command, str(rank)]) for rank in range(RANKS)]
        try:
            assert [rank.wait(180) for rank in ranks] == [0] * RANKS
        finally:
            for rank in ranks:
                rank.kill()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("names", nargs="*")
    parser.add_argument("--rank", type=int)
    parser.add_argument("--store", default="")
    given = parser.parse_args()
    chosen = given.names or [name for name, one in LAYOUTS.items() if one.backend == "torch_dist"]
    if given.rank is None:
        main(given.folder, chosen)
    else:
        of_rank(given.folder, given.rank, chosen, given.store)
