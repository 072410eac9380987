"""The memory of conversions does not depend on the size of the checkpoint: 100 GB of Megatron's and
of DeepSpeed's. Their files have holes, which read as zeros."""

from __future__ import annotations

import argparse
import io
import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from stepwell._conversion import files

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

from longer import LONG
from memory import grown

torch = pytest.importorskip("torch")
from torch.distributed.checkpoint import FileSystemWriter  # noqa: E402
from torch.distributed.checkpoint import save as dcp_save  # noqa: E402
from torch.distributed.checkpoint.filesystem import FileSystem  # noqa: E402

pytestmark = pytest.mark.skipif(not LONG, reason="writes 17 GB: STEPWELL_LONG=1 runs it")

LAYERS, WIDTH, INNER, VOCAB, RANKS = 40, 4096, 11008, 32000, 4
NUMBERS = {"heads": 32, "kv_heads": 32, "head_dim": 128, "vocab": VOCAB}
SLOTS = ("exp_avg", "exp_avg_sq")


class WithHoles:
    """A file that leaves out the zeros that are written into it."""

    def __init__(self, path: str | Path) -> None:
        self.file = io.FileIO(path, "w")

    def write(self, data: Any) -> int:
        nbytes = memoryview(data).nbytes
        if nbytes >= 4096 and not np.frombuffer(data, np.uint8).any():
            self.file.seek(nbytes, os.SEEK_CUR)
        else:
            self.file.write(data)
        return nbytes

    def close(self) -> None:
        if not self.file.closed:
            self.file.truncate()
            self.file.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.file, name)


class FilesWithHoles(FileSystem):
    """The files of a DCP checkpoint."""

    @contextmanager
    def create_stream(self, path: Any, mode: str) -> Iterator[Any]:
        assert mode == "wb"
        file = WithHoles(path)
        try:
            yield file
        finally:
            file.close()


@pytest.fixture
def zeros(tmp_path: Path) -> Iterator[Any]:
    """Makes tensors of zeros, without memory."""
    path = tmp_path / "zeros"

    def made(dtype: Any, *shape: int) -> Any:
        nbytes = prod(shape) * dtype.itemsize
        if not path.exists() or path.stat().st_size < nbytes:
            path.touch()
            os.truncate(path, nbytes)
        return torch.from_file(str(path), shared=True, size=prod(shape), dtype=dtype).reshape(shape)

    torch.serialization.set_crc32_options(False)
    yield made
    torch.serialization.set_crc32_options(True)


def peak_of(source: Path, target: Path, options: Mapping[str, object], recipe: str = "") -> int:
    """The peak memory of a conversion, beyond the imports."""
    script = (
        "import json, sys, stepwell as sw\n"
        f"convert, map = sw.convert, sw.maps.recipe({recipe!r}, **{NUMBERS}) if {recipe!r} else None\n"
        "given = {'to': 'safetensors', 'map': map, **json.loads(sys.argv[3])}\n"
        "print(growth(lambda: convert(sys.argv[1], sys.argv[2], **given)))\n"
    )
    return grown(script, source, target, json.dumps(options), timeout=1500)


def size_of(path: Path) -> int:
    return sum(one.stat().st_size for one in path.rglob("*") if one.is_file())


def shapes() -> dict[str, tuple[int, ...]]:
    """The parameters of a Llama, 8.4 billion in all."""
    layer = {
        **{f"self_attn.{name}_proj.weight": (WIDTH, WIDTH) for name in "qkvo"},
        **{f"mlp.{name}_proj.weight": (INNER, WIDTH) for name in ("gate", "up")},
        "mlp.down_proj.weight": (WIDTH, INNER),
        "input_layernorm.weight": (WIDTH,),
        "post_attention_layernorm.weight": (WIDTH,),
    }
    return {
        "model.embed_tokens.weight": (VOCAB, WIDTH),
        **{f"model.layers.{n}.{name}": shape for n in range(LAYERS) for name, shape in layer.items()},
        "model.norm.weight": (WIDTH,),
        "lm_head.weight": (VOCAB, WIDTH),
    }


def write_zero(path: Path, stage: int, zeros: Any) -> None:
    """Writes the weights and slots of four ranks."""
    path.mkdir(parents=True)
    counts = [prod(shape) for shape in shapes().values()]
    size = sum(-(-count // RANKS) for count in counts) if stage == 3 else -(-sum(counts) // (2 * RANKS)) * 2
    model = {
        "module": {
            name: zeros(torch.bfloat16, *([0] if stage == 3 else shape)) for name, shape in shapes().items()
        }
        if stage < 3
        else {},
        "buffer_names": [],
        "param_shapes": [{name: torch.Size(shape) for name, shape in shapes().items()}],
        "shared_params": {},
        "ds_version": "0.19.8",
    }
    for rank in range(RANKS):
        slots = {slot: zeros(torch.float32, size) for slot in SLOTS} | {"step": torch.tensor(7.0)}
        base = {"state": {0: slots}, "param_groups": [{"lr": 0.1, "params": [0]}]}
        own = [zeros(torch.float32, size)]
        optimizer: dict[str, Any] = {"zero_stage": stage, "partition_count": RANKS if stage == 3 else [RANKS]}
        if stage == 3:
            optimizer |= {"fp32_flat_groups": own, "optimizer_state_dict": base}
        else:
            optimizer |= {"single_partition_of_fp32_groups": own, "base_optimizer_state": base}
        save({"optimizer_state_dict": optimizer}, path / f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
        if stage == 3:
            save(model, path / f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt")
    if stage < 3:
        save(model, path / "mp_rank_00_model_states.pt")


def save(state: object, path: Path) -> None:
    file = WithHoles(path)
    torch.save(state, file)
    file.close()


def write_megatron(path: Path, zeros: Any) -> None:
    """Writes the weights and slots of a distributed checkpoint."""
    layer = {
        "self_attention.linear_qkv.weight": (3 * WIDTH, WIDTH),
        "self_attention.linear_qkv.layer_norm_weight": (WIDTH,),
        "self_attention.linear_proj.weight": (WIDTH, WIDTH),
        "mlp.linear_fc1.weight": (2 * INNER, WIDTH),
        "mlp.linear_fc1.layer_norm_weight": (WIDTH,),
        "mlp.linear_fc2.weight": (WIDTH, INNER),
    }
    keys: dict[str, tuple[int, ...]] = {
        "embedding.word_embeddings.weight": (VOCAB, WIDTH),
        **{f"decoder.layers.{name}": (LAYERS, *shape) for name, shape in layer.items()},
        "decoder.final_layernorm.weight": (WIDTH,),
        "output_layer.weight": (VOCAB, WIDTH),
    }
    state = {key: zeros(torch.bfloat16, *shape) for key, shape in keys.items()}
    for slot in ("param", *SLOTS):
        state |= {
            f"optimizer.state.{slot}.{key}": zeros(torch.float32, *shape) for key, shape in keys.items()
        }
    writer = FileSystemWriter(path)
    writer.fs = FilesWithHoles()
    dcp_save(state, storage_writer=writer, no_dist=True)
    (path / "metadata.json").write_text('{"sharded_backend": "torch_dist", "sharded_backend_version": 1}')
    arguments = argparse.Namespace(num_attention_heads=32, kv_channels=128, padded_vocab_size=VOCAB)
    torch.save({"args": arguments, "iteration": 100}, path / "common.pt")


MOST = files._BUDGET_BYTES + (64 << 20)


@pytest.mark.parametrize("stage", [2, 3])
def test_weights_of_100_gb_of_zero_are_converted(tmp_path: Path, zeros: Any, stage: int) -> None:
    source = tmp_path / "run" / "global_step7"
    write_zero(source, stage, zeros)
    assert size_of(source) > 100e9
    peak = peak_of(source, tmp_path / "out", {"subtree": "model", "cast": "bfloat16"})
    print(f"peak {peak >> 20} MiB")
    assert size_of(tmp_path / "out") > 16e9
    assert peak <= MOST


def test_100_gb_of_megatron_become_a_model_of_hugging_face(tmp_path: Path, zeros: Any) -> None:
    source = tmp_path / "run" / "iter_0000100"
    write_megatron(source, zeros)
    assert size_of(source) > 100e9
    peak = peak_of(source, tmp_path / "out", {}, "megatron-to-hf-llama")
    print(f"peak {peak >> 20} MiB")
    assert size_of(tmp_path / "out") > 16e9
    assert peak <= MOST
