"""Measure what compressed copies save, and what they cost, on one core.

    python tests/bench/compression.py       # a few minutes: it trains a model first

The data are the weights and moments of a transformer that was trained with AdamW on the source
text of Python's own library. Rows:

* ``bf16 weights``, ``fp32 weights``, ``fp32 exp_avg``, ``fp32 exp_avg_sq``: of that model.
* ``frozen``: fp32 weights that came from bf16. ``zeros``: moments of parameters without a gradient.
* ``random``: normal numbers in bf16. They are no weights, and only compared with them.

All files are in memory, and the process has one core. ``copy`` is ``Checkpoint.copy``, which also
verifies the copy. ``plain zstd`` compresses the same bytes without planes, in pieces of 1 MiB.
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parent))

import ml_dtypes
import numpy as np
import stepwell as sw
import zstandard
from tables import table

PIECE = 1 << 20


def train(steps: int, cache: Path) -> dict[str, np.ndarray]:
    """Returns the weights and moments of a trained model."""
    if cache.exists():
        return dict(np.load(cache))
    import torch
    from torch import nn
    from torch.nn import functional

    torch.manual_seed(0)
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:120]
    text = torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)
    width, length = 256, 64
    layer = nn.TransformerEncoderLayer(width, 4, 4 * width, 0.0, batch_first=True, norm_first=True)
    body = nn.TransformerEncoder(layer, 4, enable_nested_tensor=False)
    model = nn.Sequential(nn.Embedding(256, width), body, nn.Linear(width, 256))
    mask = nn.Transformer.generate_square_subsequent_mask(length)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(steps):
        starts = torch.randint(len(text) - length - 1, (8,))
        batch = torch.stack([text[start : start + length + 1] for start in starts]).long()
        hidden = model[1](model[0](batch[:, :-1]), mask=mask, is_causal=True)
        loss = functional.cross_entropy(model[2](hidden).flatten(0, 1), batch[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % 50 == 0 or step == steps - 1:
            print(f"step {step}: loss {loss.item():.2f}", file=sys.stderr)

    def flat(of: Callable[[nn.Parameter], torch.Tensor]) -> np.ndarray:
        return torch.cat([of(one).detach().flatten() for one in model.parameters()]).numpy()

    moment = {
        name: flat(lambda one, name=name: optimizer.state[one][name]) for name in ("exp_avg", "exp_avg_sq")
    }
    found = {"weights": flat(lambda one: one), **moment}
    cache.parent.mkdir(parents=True, exist_ok=True)
    np.savez(cache, **found)
    return found


def arrays(model: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the rows of the table."""
    weights = model["weights"]
    half = weights.astype(ml_dtypes.bfloat16)
    normal = np.random.default_rng(0).standard_normal(weights.size).astype(np.float32) * 0.02
    return {
        "bf16 weights": half,
        "fp32 weights": weights,
        "fp32 exp_avg": model["exp_avg"],
        "fp32 exp_avg_sq": model["exp_avg_sq"],
        "fp32 frozen, from bf16": half.astype(np.float32),
        "fp32 zeros": np.zeros(weights.size, np.float32),
        "random bf16, no weights": normal.astype(ml_dtypes.bfloat16),
    }


def best(rounds: int, measured: Callable[[], object]) -> float:
    """Returns the seconds of the fastest round."""
    found = []
    for _ in range(rounds):
        begun = time.perf_counter()
        measured()
        found.append(time.perf_counter() - begun)
    return min(found)


def plain(data: bytes, level: int) -> list[bytes]:
    """Compresses bytes without planes."""
    zstd = zstandard.ZstdCompressor(level=level)
    return [zstd.compress(data[at : at + PIECE]) for at in range(0, len(data), PIECE)]


def row(name: str, array: np.ndarray, folder: Path, rounds: int) -> list[str]:
    """Measures one array."""
    raw, small, other = folder / "raw", folder / "small", folder / "other"
    sw.save(raw, {"x": array})

    def copy(compress: bool) -> None:
        shutil.rmtree(other, ignore_errors=True)
        with sw.open(raw) as checkpoint:
            checkpoint.copy(other, compress=compress)

    copies = [best(rounds, lambda: copy(False)), best(rounds, lambda: copy(True))]
    other.rename(small)
    stored = sum(file["length"] for file in sw.open(small).manifest["files"])
    target = {"x": np.empty_like(array)}
    restores = [best(rounds, lambda path=path: sw.restore(path, into=target)) for path in (raw, small)]
    assert target["x"].tobytes() == array.tobytes()
    data, rate = array.tobytes(), array.nbytes / 1e6
    peers = []
    for level in (1, 3):
        seconds = best(rounds, lambda level=level: plain(data, level))
        length = sum(map(len, plain(data, level)))
        peers.append(f"{length / array.nbytes:.2f}, {rate / seconds:.0f} MB/s")
    shutil.rmtree(raw)
    shutil.rmtree(small)
    return [
        name, f"{array.nbytes / 1e6:.0f} MB", f"{stored / array.nbytes:.2f}",
        f"{rate / copies[1]:.0f} MB/s", f"{rate / copies[0]:.0f} MB/s",
        f"{rate / restores[1]:.0f} MB/s", f"{rate / restores[0]:.0f} MB/s", *peers,
    ]  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=300, help="of the training")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--cache", type=Path, default=Path("target/bench-compression.npz"))
    chosen = parser.parse_args()
    model = train(chosen.steps, chosen.cache)
    os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])
    rows = [
        ["data", "size", "stored", "compressed copy", "plain copy", "restore", "restore of raw", "plain zstd 1", "plain zstd 3"]
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(dir="/dev/shm") as folder:
        rows += [row(name, array, Path(folder), chosen.rounds) for name, array in arrays(model).items()]
    print(table(rows))


if __name__ == "__main__":
    main()
