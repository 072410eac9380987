"""Measure loads of other libraries' checkpoints against their own loaders.

    python tests/bench/foreign_loads.py                     # 4 GiB, five rounds: about 25 minutes
    python tests/bench/foreign_loads.py --gib 1 --rounds 2

The model is written as sharded safetensors, as one file of torch.save and as DCP. Each contestant
loads it into host memory, in a process of its own in every round, in shuffled order, from a cold
and from a warm page cache. Loaders that map the file are measured twice: as they are, with every
page touched, and with a copy into memory of the process, as the others give it. The ratio is the
time of stepwell over that of the contestant, in the same round.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import random
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from measure import Spare, drop_caches, settle, warm_cache

LAYERS_PER_GIB = 5
PLACES = {"safetensors": "safetensors", "torch": "torch/model.pt", "dcp": "dcp"}
SIZES = {"hidden_size": 2048, "intermediate_size": 5632, "vocab_size": 32000}


def model_config(layers: int) -> Any:
    import transformers

    return transformers.LlamaConfig(
        **SIZES, num_hidden_layers=layers, num_attention_heads=16, tie_word_embeddings=False, dtype="float32"
    )


def write_all(folder: Path, layers: int) -> int:
    """Writes the model in each format. Returns its bytes."""
    import torch
    import torch.distributed.checkpoint as dcp
    import transformers
    from safetensors.torch import save_file

    config = model_config(layers)
    with torch.device("meta"):
        shapes = transformers.LlamaForCausalLM(config).state_dict()
    noise = torch.randn(max(one.numel() for one in shapes.values()))
    state = {name: noise[: one.numel()].reshape(one.shape).clone() for name, one in shapes.items()}
    hugging = folder / "safetensors"
    hugging.mkdir()
    (hugging / "config.json").write_text(json.dumps({**config.to_dict(), "dtype": "float32"}, default=str))
    names = list(state)
    shards = [names[at::4] for at in range(4)]
    places = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-00004.safetensors"
        save_file({name: state[name] for name in shard}, hugging / file, metadata={"format": "pt"})
        places |= dict.fromkeys(shard, file)
    index = {"metadata": {}, "weight_map": places}
    (hugging / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "torch").mkdir()
    torch.save(state, folder / PLACES["torch"])
    with contextlib.redirect_stderr(io.StringIO()):
        dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)
    return sum(one.nbytes for one in state.values())


def ours(path: Path) -> Any:
    import stepwell as sw

    return lambda: sw.restore(path)


def safetensors(path: Path) -> Callable[[], Any]:
    from safetensors.torch import load_file

    return lambda: {
        name: one for file in sorted(path.glob("*.safetensors")) for name, one in load_file(file).items()
    }


def transformers(path: Path) -> Callable[[], Any]:
    import torch
    from transformers import LlamaForCausalLM

    return lambda: LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()


def torch_load(path: Path) -> Callable[[], Any]:
    import torch

    return lambda: torch.load(path, weights_only=True)


def torch_mmap(path: Path) -> Callable[[], Any]:
    import torch

    return lambda: torch.load(path, weights_only=True, mmap=True)


def dcp_load(path: Path) -> Callable[[], Any]:
    import torch
    import torch.distributed.checkpoint as dcp

    sizes = dcp.FileSystemReader(path).read_metadata().state_dict_metadata

    def load() -> Any:
        state = {name: torch.empty(one.size, dtype=torch.float32) for name, one in sizes.items()}
        dcp.load(state, checkpoint_id=path, no_dist=True)
        return state

    return load


def copied(load: Callable[[Path], Callable[[], Any]]) -> Callable[[Path], Callable[[], Any]]:
    """A loader that maps the file, with a copy of each tensor."""

    def of(path: Path) -> Callable[[], Any]:
        mapped = load(path)
        return lambda: {name: one.clone() for name, one in mapped().items()}

    return of


CONTESTANTS: dict[str, dict[str, Callable[[Path], Callable[[], Any]]]] = {
    "safetensors": {
        "stepwell": ours,
        "safetensors, mapped": safetensors,
        "safetensors": copied(safetensors),
        "transformers, mapped": transformers,
        "transformers": copied(transformers),
    },
    "torch": {
        "stepwell": ours,
        "torch.load": torch_load,
        "torch.load, mapped": torch_mmap,
        "torch.load of a map": copied(torch_mmap),
    },
    "dcp": {"stepwell": ours, "dcp.load": dcp_load},
}


def touched(result: Any) -> int:
    """Reads a byte of every page, and returns the bytes in all."""
    import numpy as np

    nbytes = 0
    for one in result.values():
        array = np.asarray(one.detach() if hasattr(one, "detach") else one).reshape(-1).view(np.uint8)
        int(array[::4096].sum())
        nbytes += array.nbytes
    return nbytes


def child(kind: str, name: str, path: Path) -> None:
    """Loads once, and prints seconds and bytes."""
    import torch  # noqa: F401  (imports are not measured)

    load = CONTESTANTS[kind][name](path)
    begun = time.perf_counter()
    nbytes = touched(load())
    print(json.dumps([time.perf_counter() - begun, nbytes]))


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
        return
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--gib", type=float, default=4)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--directory", type=Path)
    given = arguments.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-loads-", dir=given.directory))
    try:
        nbytes = write_all(folder, max(1, round(given.gib * LAYERS_PER_GIB)))
        measure(folder, nbytes, given.rounds)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, nbytes: int, rounds: int) -> None:
    """Runs all rounds, and prints a table."""
    jobs = [
        (kind, name, heat) for kind, all in CONTESTANTS.items() for name in all for heat in ("cold", "warm")
    ]
    seconds: dict[tuple[str, str, str], list[float]] = {job: [] for job in jobs}
    spare = Spare(2 * nbytes)
    for number in range(rounds):
        for kind, name, heat in random.Random(number).sample(jobs, len(jobs)):
            drop_caches()
            if heat == "warm":
                warm_cache(folder / kind)
            settle(0.2)
            spare.hold()
            spare.release()
            command = [sys.executable, __file__, "--child", kind, name, str(folder / PLACES[kind])]
            said = subprocess.run(command, capture_output=True, text=True, check=False)
            if said.returncode != 0:
                raise SystemExit(f"{kind}, {name}: {said.stderr[-2000:]}")
            taken, loaded = json.loads(said.stdout.splitlines()[-1])
            assert loaded == nbytes, (kind, name, loaded, nbytes)
            seconds[kind, name, heat].append(taken)
    print(f"{nbytes / 2**30:.2f} GiB, {rounds} rounds; median (least to most)")
    for (kind, name, heat), times in seconds.items():
        line = f"{kind:12} {heat} {name:22} {statistics.median(times):6.3f} s ({min(times):.3f} to {max(times):.3f})"
        if name != "stepwell":
            mine = seconds[kind, "stepwell", heat]
            ratio = statistics.median(one / other for one, other in zip(mine, times, strict=True))
            line += f"   stepwell takes {ratio:.2f} of it"
        print(line)


if __name__ == "__main__":
    main()
