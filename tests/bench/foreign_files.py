"""One model in the formats of several libraries."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SAFETENSORS, TORCH, DCP, DCP_OF_RANKS, ORBAX_2, ORBAX_3, ZERO_2, ZERO_3, STEPWELL = (
    "safetensors",
    "torch.save",
    "DCP",
    "DCP of 4 ranks",
    "Orbax, Zarr 2",
    "Orbax, Zarr 3",
    "ZeRO-2 of 4 ranks",
    "ZeRO-3 of 4 ranks",
    "stepwell",
)
PLACES = {
    SAFETENSORS: "safetensors",
    TORCH: "torch/model.pt",
    DCP: "dcp",
    DCP_OF_RANKS: "dcp-of-ranks",
    ORBAX_2: "orbax-zarr2",
    ORBAX_3: "orbax-zarr3",
    ZERO_2: "zero-2",
    ZERO_3: "zero-3",
    STEPWELL: "stepwell",
}
LAYERS_PER_GIB = 5
SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "vocab_size": 32000}
#: A model of a few hundred KiB, which each contestant reads first: then its imports are made.
TINY = "tiny"
TINY_SIZES = {"hidden_size": 64, "intermediate_size": 176, "vocab_size": 64}
RANKS = 4
SHARDS = 4


def write_models(folder: Path, gib: float) -> int:
    """Writes a model of about that size, and a tiny one. Returns the bytes of the first."""
    _write(folder / TINY, TINY_SIZES, 1)
    return _write(folder, SIZES, max(1, round(gib * LAYERS_PER_GIB)))


def _write(folder: Path, sizes: dict[str, int], layers: int) -> int:
    """Writes a Llama in each format. Returns the bytes of its tensors."""
    config, state = llama("float32", **sizes, num_hidden_layers=layers, num_attention_heads=16)
    write_all(folder, state)
    write_orbax(folder, state)
    for kind, stage in ((ZERO_2, 2), (ZERO_3, 3)):
        write_zero(folder / PLACES[kind] / "global_step1", state, stage)
    text = json.dumps({**config.to_dict(), "dtype": "float32"}, default=str)
    (folder / PLACES[SAFETENSORS] / "config.json").write_text(text)
    nbytes = sum(one.nbytes for one in state.values())
    del state
    ranks = [
        subprocess.Popen([sys.executable, __file__, str(folder), str(rank)], stderr=subprocess.DEVNULL)
        for rank in range(RANKS)
    ]
    assert [rank.wait() for rank in ranks] == [0] * RANKS
    return nbytes


def llama(dtype: str, **sizes: int) -> tuple[Any, dict[str, Any]]:
    """The configuration and the tensors of a Llama of these sizes, all noise."""
    import torch
    import transformers

    config = transformers.LlamaConfig(**sizes, tie_word_embeddings=False, dtype=dtype)
    with torch.device("meta"):
        shapes = transformers.LlamaForCausalLM(config).state_dict()
    noise = torch.randn(max(one.numel() for one in shapes.values())).to(getattr(torch, dtype))
    return config, {name: noise[: one.numel()].reshape(one.shape).clone() for name, one in shapes.items()}


def write_all(folder: Path, state: dict[str, Any]) -> None:
    """Writes tensors in each format that one process writes."""
    import stepwell as sw
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    path = folder / PLACES[SAFETENSORS]
    path.mkdir(parents=True)
    names, places = list(state), {}
    for number in range(SHARDS):
        shard = names[number::SHARDS]
        file = f"model-{number + 1:05}-of-{SHARDS:05}.safetensors"
        save_file({name: state[name] for name in shard}, path / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": places}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / PLACES[TORCH]).parent.mkdir()
    torch.save(state, folder / PLACES[TORCH])
    with contextlib.redirect_stderr(io.StringIO()):
        dcp.save(state, checkpoint_id=folder / PLACES[DCP], no_dist=True)
    sw.save(folder / PLACES[STEPWELL], state)


def write_orbax(folder: Path, state: dict[str, Any]) -> None:
    """Writes tensors with Orbax, in its database."""
    import orbax.checkpoint as ocp

    arrays = {name: one.numpy() for name, one in state.items()}
    for kind in (ORBAX_2, ORBAX_3):
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_zarr3=kind == ORBAX_3)) as checkpointer:
            checkpointer.save((folder / PLACES[kind]).absolute(), args=ocp.args.PyTreeSave(arrays))


def write_zero(path: Path, state: dict[str, Any], stage: int, has_slots: bool = False) -> None:
    """Writes tensors as the weights of DeepSpeed's optimizer on four ranks. Its slots have the same
    values, or are left out. The weights of the model itself are in bfloat16."""
    import torch

    path.mkdir(parents=True)
    (path.parent / "latest").write_text(path.name)
    whole = {name: one.flatten() for name, one in state.items()}
    total = sum(one.numel() for one in whole.values())
    size = -(-total // (2 * RANKS)) * 2
    empty = torch.empty(0, dtype=torch.bfloat16)
    model = {
        "module": {name: empty if stage == 3 else one.bfloat16() for name, one in state.items()},
        "buffer_names": [],
        "param_shapes": [{name: one.shape for name, one in state.items()}],
        "shared_params": {},
        "ds_version": "0.19.8",
    }
    for rank in range(RANKS):
        base: dict[str, Any] = {"state": {}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        optimizer: dict[str, Any] = {"zero_stage": stage, "partition_count": RANKS if stage == 3 else [RANKS]}
        if stage == 3:
            own = torch.cat([_share(one, rank) for one in whole.values()])
            optimizer |= {"fp32_flat_groups": [own], "optimizer_state_dict": base}
        else:
            own = _part(list(whole.values()), rank * size, (rank + 1) * size)
            optimizer |= {"single_partition_of_fp32_groups": [own], "base_optimizer_state": base}
        if has_slots:
            slots = {slot: own.clone() for slot in ("exp_avg", "exp_avg_sq")}
            base["state"] = {0: {**slots, "step": torch.tensor(1.0)}}
        name = f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": optimizer, "ds_version": "0.19.8"}, path / name)
        if stage == 3:
            torch.save(model, path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    if stage == 2:
        torch.save(model, path / "mp_rank_00_model_states.pt")


def _share(flat: Any, rank: int) -> Any:
    """The elements of a parameter that a rank of ZeRO-3 has, with padding."""
    import torch

    size = -(-flat.numel() // RANKS)
    own = flat[rank * size : (rank + 1) * size]
    return torch.cat([own, own.new_zeros(size - own.numel())])


def _part(parts: list[Any], begin: int, end: int) -> Any:
    """Elements of flat tensors one behind the other."""
    import torch

    found, at = [], 0
    for one in parts:
        found.append(one[max(0, begin - at) : max(0, end - at)])
        at += one.numel()
    return torch.cat(found)


def write_shards(folder: Path, rank: int) -> None:
    """Saves the shards of a rank: the rows of each tensor are split among all."""
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    dist.init_process_group("gloo", init_method=f"file://{folder}/ranks", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    whole = torch.load(folder / PLACES[TORCH], weights_only=True, mmap=True)
    state = {
        name: DTensor.from_local(one.chunk(RANKS)[rank].clone(), mesh, [Shard(0)])
        for name, one in whole.items()
    }
    dcp.save(state, checkpoint_id=folder / PLACES[DCP_OF_RANKS])
    dist.destroy_process_group()


if __name__ == "__main__":
    write_shards(Path(sys.argv[1]), int(sys.argv[2]))
