"""One model in the formats of several libraries."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SAFETENSORS, TORCH, DCP, DCP_OF_RANKS, ORBAX_2, ORBAX_3, STEPWELL = (
    "safetensors",
    "torch.save",
    "DCP",
    "DCP of 4 ranks",
    "Orbax, Zarr 2",
    "Orbax, Zarr 3",
    "stepwell",
)
PLACES = {
    SAFETENSORS: "safetensors",
    TORCH: "torch/model.pt",
    DCP: "dcp",
    DCP_OF_RANKS: "dcp-of-ranks",
    ORBAX_2: "orbax-zarr2",
    ORBAX_3: "orbax-zarr3",
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
