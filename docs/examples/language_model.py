"""A small language model in numpy that saves as it trains and resumes where it was.

    python docs/examples/language_model.py --root runs/lm --steps 60

Kill it at any moment and start it again: it goes on from the newest committed step, and its losses
are bit for bit those of a run that nobody disturbed. The text is the reference that comes with
every Python (``pydoc_data.topics``).
"""

from __future__ import annotations

import argparse
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# One BLAS thread: sums are then added in the same order in every run, so that losses can be
# compared bit for bit.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
os.environ.setdefault("MKL_NUM_THREADS", "1")

import numpy as np
import stepwell as sw

Arrays = dict[str, np.ndarray]


def text() -> np.ndarray:
    """About half a megabyte of English, as bytes."""
    from pydoc_data.topics import topics

    return np.frombuffer("\n\n".join(topics[name] for name in sorted(topics)).encode(), np.uint8)


class Batches:
    """Shuffled windows of the text. It is stateful: its place in the shuffle is saved and restored
    with the model."""

    def __init__(self, data: np.ndarray, context: int, size: int, seed: int) -> None:
        self.data, self.context, self.size = data, context, size
        self.rng = np.random.default_rng(seed)
        self.order = self.rng.permutation(len(data) - context)
        self.at = 0

    def next(self) -> tuple[np.ndarray, np.ndarray]:
        if self.at + self.size > len(self.order):
            self.order, self.at = self.rng.permutation(len(self.order)), 0
        starts = self.order[self.at : self.at + self.size]
        self.at += self.size
        windows = self.data[starts[:, None] + np.arange(self.context + 1)]
        return windows[:, :-1], windows[:, -1]

    def state_dict(self) -> dict[str, Any]:
        return {"order": self.order, "at": self.at, "rng": self.rng}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.order, self.at, self.rng = state["order"], state["at"], state["rng"]


@dataclass
class Sizes:
    vocabulary: int = 256
    context: int = 16
    embedding: int = 48
    hidden: int = 1536
    dtype: str = "float32"


def init(sizes: Sizes, rng: np.random.Generator) -> Arrays:
    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(sizes.dtype)

    width = sizes.context * sizes.embedding
    return {
        "embedding": rng.standard_normal((sizes.vocabulary, sizes.embedding)).astype(sizes.dtype),
        "hidden_1/weight": normal(width, sizes.hidden),
        "hidden_1/bias": np.zeros(sizes.hidden, sizes.dtype),
        "hidden_2/weight": normal(sizes.hidden, sizes.hidden),
        "hidden_2/bias": np.zeros(sizes.hidden, sizes.dtype),
        "output/weight": normal(sizes.hidden, sizes.vocabulary),
        "output/bias": np.zeros(sizes.vocabulary, sizes.dtype),
    }


def loss_and_gradients(p: Arrays, x: np.ndarray, y: np.ndarray) -> tuple[float, Arrays]:
    """Predict the next byte from the ones before it; cross entropy in nats, and its gradients."""
    rows = np.arange(len(y))
    embedded = p["embedding"][x].reshape(len(y), -1)
    h1 = np.maximum(embedded @ p["hidden_1/weight"] + p["hidden_1/bias"], 0)
    h2 = np.maximum(h1 @ p["hidden_2/weight"] + p["hidden_2/bias"], 0) + h1
    logits = h2 @ p["output/weight"] + p["output/bias"]
    logits -= logits.max(axis=1, keepdims=True)
    probability = np.exp(logits)
    probability /= probability.sum(axis=1, keepdims=True)
    loss = float(-np.log(probability[rows, y]).mean())

    d = probability
    d[rows, y] -= 1
    d /= len(y)
    g = {"output/weight": h2.T @ d, "output/bias": d.sum(0)}
    d_h2 = d @ p["output/weight"].T
    d_relu = d_h2 * (h2 > h1)
    g["hidden_2/weight"], g["hidden_2/bias"] = h1.T @ d_relu, d_relu.sum(0)
    d_h1 = (d_h2 + d_relu @ p["hidden_2/weight"].T) * (h1 > 0)
    g["hidden_1/weight"], g["hidden_1/bias"] = embedded.T @ d_h1, d_h1.sum(0)
    g["embedding"] = np.zeros_like(p["embedding"])
    np.add.at(
        g["embedding"], x.reshape(-1), (d_h1 @ p["hidden_1/weight"].T).reshape(-1, p["embedding"].shape[1])
    )
    return loss, g


def adam(state: dict[str, Any], gradients: Arrays, rate: float = 3e-4) -> None:
    """One step of Adam, in place."""
    optimizer = state["optimizer"]
    optimizer["updates"] += 1
    t = optimizer["updates"]
    for name, gradient in gradients.items():
        m, v = optimizer["m"][name], optimizer["v"][name]
        m += 0.1 * (gradient - m)
        v += 0.001 * (gradient * gradient - v)
        state["params"][name] -= rate * (m / (1 - 0.9**t)) / (np.sqrt(v / (1 - 0.999**t)) + 1e-8)


def train(root: Path, steps: int, every: int, losses: Path | None = None, dtype: str = "float32") -> None:
    rng = np.random.default_rng(0)
    sizes = Sizes(dtype=dtype)
    params = init(sizes, rng)
    state: dict[str, Any] = {
        "params": params,
        "optimizer": {
            "m": {name: np.zeros_like(p) for name, p in params.items()},
            "v": {name: np.zeros_like(p) for name, p in params.items()},
            "updates": 0,
        },
        "batches": Batches(text(), sizes.context, 64, seed=1),
    }

    with sw.CheckpointManager(
        root,
        save_policy=sw.every_steps(every),
        retention=sw.keep_latest(3)
        | sw.keep_every(steps=10 * every, items=["params"])
        | sw.keep_best(1, "loss", mode="min"),
    ) as mgr:
        state, first = mgr.resume(state)
        if first > 0:
            print(f"resumed from step {first - 1}", flush=True)
        for step in range(first, steps):
            loss, gradients = loss_and_gradients(state["params"], *state["batches"].next())
            with mgr.update_guard():
                adam(state, gradients)
            begin = time.perf_counter()
            save = mgr.save(step, state, metrics={"loss": loss})
            blocked = time.perf_counter() - begin
            if losses:
                with losses.open("a") as out:
                    record = {"step": step, "loss": loss.hex(), "blocked": blocked if save else None}
                    out.write(json.dumps(record) + "\n")
            if step % 10 == 0:
                note = f"  save() returned after {1e3 * blocked:.1f} ms" if save else ""
                print(f"step {step:4d}  loss {loss:.4f}{note}", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True, help="where the steps go")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument("--losses", type=Path, help="append a JSON line per step to this file")
    parser.add_argument("--dtype", default="float32", help="of the parameters: float32 or float64")
    options = parser.parse_args()
    train(options.root, options.steps, options.save_every, options.losses, options.dtype)
