"""One rank of a job of DeepSpeed on the CPU: trains a small model, and saves it, for each of the
given settings. Beside each save are the values of the live optimizer (``NAME.live``), and what
DeepSpeed's own script makes of the files (``NAME.fp32``).

    python deepspeed_job.py DIRECTORY SETTINGS   # with RANK, WORLD_SIZE, MASTER_ADDR, MASTER_PORT
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

os.environ["DS_ACCELERATOR"] = "cpu"
import deepspeed
from deepspeed.accelerator import get_accelerator
from deepspeed.checkpoint import ds_to_universal
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer
from deepspeed.pipe import LayerSpec, PipelineModule, TiedLayerSpec
from deepspeed.utils import groups, safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint
from deepspeed_model import Large, Model, groups_of

# It is compiled when it is first used, which needs more than Python packages.
sys.modules["deepspeed.comm.torch"].build_shm_op = lambda: None
# Few CPUs have fp16, and torch computes with it on all of them.
get_accelerator().is_fp16_supported = lambda: True

SLOTS = ("exp_avg", "exp_avg_sq")


def settings_of(setting: dict[str, Any]) -> dict[str, Any]:
    return {
        "train_micro_batch_size_per_gpu": 2,
        "steps_per_print": 1000,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": setting["stage"], **setting.get("zero", {})},
        **setting.get("config", {}),
    }


def trained(setting: dict[str, Any]) -> Any:
    torch.manual_seed(7)
    model = Large() if setting.get("kind") == "large" else Model()
    optimizer = torch.optim.AdamW(groups_of(model), lr=0.01)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    engine, *_ = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=scheduler, config=settings_of(setting)
    )
    for step in range(setting.get("steps", 3)):
        train(engine, step)
    return engine


def train(engine: Any, step: int) -> float:
    torch.manual_seed(100 * step + dist.get_rank())
    loss = engine(torch.randint(0, 13, (2,)))
    engine.backward(loss)
    engine.step()
    return float(loss.item())


class Embedding(torch.nn.Module):
    """The first and the last layer of a pipeline."""

    def __init__(self) -> None:
        super().__init__()
        self.word = torch.nn.Embedding(13, 7)
        self.register_buffer("mean", torch.arange(7.0))

    @property
    def weight(self) -> torch.Tensor:
        return self.word.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.word(x)


def pipeline(setting: dict[str, Any]) -> Any:
    """Two stages with a tied layer."""

    def head(layer: Embedding, x: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.linear(x, layer.weight)

    torch.manual_seed(7)
    layers = [
        TiedLayerSpec("embed", Embedding, tied_weight_attr="weight"),
        LayerSpec(torch.nn.Linear, 7, 5),
        torch.relu,
        LayerSpec(torch.nn.Linear, 5, 7),
        TiedLayerSpec("embed", Embedding, forward_fn=head, tied_weight_attr="weight"),
    ]
    model = PipelineModule(
        layers,
        num_stages=2,
        partition_method="uniform",
        loss_fn=lambda x, y: torch.nn.functional.cross_entropy(x.float(), y),
    )
    config = settings_of(setting) | {"optimizer": {"type": "Adam", "params": {"torch_adam": True}}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    batches = ((torch.randint(0, 13, (2,)), torch.randint(0, 13, (2,))) for _ in range(9))
    for _ in range(2):
        engine.train_batch(batches)
    return engine


class Sparse(torch.nn.Module):
    """Two layers: four experts, two on each rank, and two experts, one on each rank."""

    def __init__(self) -> None:
        super().__init__()
        self.a = torch.nn.Linear(7, 7)
        self.moe = MoE(7, torch.nn.Linear(7, 7), num_experts=4, ep_size=2)
        self.last = MoE(7, torch.nn.Linear(7, 7), num_experts=2, ep_size=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.moe(self.a(x))[0])[0].float().square().mean()


def experts(setting: dict[str, Any]) -> Any:
    torch.manual_seed(7)
    model = Sparse()
    split = split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "parameters"}, setting.get("max_group_size", 1000)
    )
    optimizer = torch.optim.AdamW(split, lr=0.01)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=settings_of(setting))
    for _ in range(2):
        engine.backward(engine(torch.randn(2, 4, 7).bfloat16()))
        engine.step()
    return engine


def tensor_parallel(setting: dict[str, Any]) -> Any:
    """A Llama on two tensor-parallel ranks."""
    from transformers import LlamaConfig, LlamaForCausalLM  # a long import

    torch.manual_seed(7)
    sizes = {"hidden_size": 16, "intermediate_size": 24, "vocab_size": 32, "max_position_embeddings": 16}
    model = LlamaForCausalLM(
        LlamaConfig(num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2, **sizes)
    )
    config = settings_of(setting) | {"tensor_parallel": {"autotp_size": 2}}
    config["optimizer"] = {"type": "AdamW", "params": {"torch_adam": True}}
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=config)
    for step in range(2):
        torch.manual_seed(step + 10 * (dist.get_rank() // 2))
        tokens = torch.randint(0, 32, (2, 6))
        engine.backward(engine(input_ids=tokens, labels=tokens).loss)
        engine.step()
    return engine


KINDS = {
    "data": trained,
    "large": trained,
    "pipeline": pipeline,
    "experts": experts,
    "tensor": tensor_parallel,
}


def live(engine: Any) -> dict[str, dict[str, torch.Tensor]]:
    """The values of the live optimizer, by parameter."""
    optimizer = engine.optimizer
    if engine.zero_optimization_stage() == 3:
        return {
            name: {"fp32": safe_get_full_fp32_param(one)}
            | {slot: safe_get_full_optimizer_state(one, slot) for slot in SLOTS}
            for name, one in engine.module.named_parameters()
            if one.requires_grad
        }
    found: dict[str, dict[str, torch.Tensor]] = {}
    for number, parameters in enumerate(optimizer.round_robin_bit16_groups):
        own = optimizer.single_partition_of_fp32_groups[number]
        flat = {"fp32": own.detach()} | {slot: optimizer.optimizer.state[own][slot] for slot in SLOTS}
        ranks = optimizer.real_dp_process_group[number]
        for slot, partition in flat.items():
            parts = [torch.empty_like(partition) for _ in range(dist.get_world_size(ranks))]
            dist.all_gather(parts, partition.contiguous(), ranks)
            whole = torch.cat(parts)
            for one, begin in zip(parameters, optimizer.round_robin_bit16_offsets[number], strict=True):
                value = whole[begin : begin + one.numel()].reshape(one.shape)
                found.setdefault(in_model(engine, one), {})[slot] = value.clone()
    everywhere: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everywhere, found)
    return {name: slots for one in everywhere for name, slots in one.items()}


def in_model(engine: Any, parameter: torch.Tensor) -> str:
    """The name of a parameter in the whole model. Ranks number their experts from 0."""
    name = engine.param_names[parameter]
    layer, found, rest = name.partition(".deepspeed_moe.experts.deepspeed_experts.")
    if not found:
        return name
    number, end = rest.split(".", 1)
    layer_of_experts = engine.module.get_submodule(layer)
    rank = dist.get_rank(groups._get_expert_parallel_group(layer_of_experts.expert_group_name))
    return f"{layer}{found}{rank * layer_of_experts.num_local_experts + int(number)}.{end}"


def main() -> None:
    directory, settings = Path(sys.argv[1]), json.loads(sys.argv[2])
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    for name, setting in settings.items():
        kind = setting.get("kind", "data")
        engine = KINDS[kind](setting)
        engine.save_checkpoint(
            directory / name, client_state={"epoch": 3, "notes": {"a": [1, 2]}}, **setting.get("save", {})
        )
        dist.barrier()
        is_live = kind in ("data", "experts") and setting["stage"] and setting.get("steps", 3)
        values = live(engine) if is_live else {}
        if dist.get_rank() == 0:
            torch.save(values, directory / f"{name}.live")
            if setting.get("goes_on"):
                later = [train(engine, step) for step in range(3, 8)]
                (directory / f"{name}.losses").write_text(json.dumps(later))
            if setting["stage"] and kind == "data":
                fp32 = get_fp32_state_dict_from_zero_checkpoint(directory / name)
                torch.save(fp32, directory / f"{name}.fp32")
            if setting.get("universal"):
                tag = (directory / name / "latest").read_text()
                (directory / f"{name}_universal").mkdir()
                ds_to_universal.main(
                    argparse.Namespace(
                        input_folder=str(directory / name / tag),
                        output_folder=str(directory / f"{name}_universal" / f"{tag}_universal"),
                        num_extract_workers=1,
                        num_merge_workers=1,
                        keep_temp_folder=False,
                        strict=True,
                        inject_missing_state=True,
                    )
                )
        dist.barrier()
    os._exit(0)  # some threads of gloo do not end by themselves


if __name__ == "__main__":
    main()
