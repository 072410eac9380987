"""Seconds of a restore, of a JAX compilation, and of both at once with ``restore_async``.

    python tests/bench/overlap.py [GiB] [folder]

Medians of five rounds; in each round the three are measured in turn. The page cache keeps the
checkpoint in every round, so the restore is as fast as it can be.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import stepwell as sw

ROUNDS = 5
LAYERS = 48


def seconds(action: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    action()
    return time.perf_counter() - begun


def compiled() -> Any:
    """Compiles a step of a model, never the same one twice."""
    salt = time.perf_counter()

    def loss(weights: Any, x: Any) -> Any:
        for w in weights:
            x = jax.nn.gelu(x @ w + salt) / (1 + jnp.abs(x)).sum()
        return x.sum()

    weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * LAYERS
    x = jax.ShapeDtypeStruct((8, 64), jnp.float32)
    return jax.jit(jax.value_and_grad(loss)).lower(weights, x).compile()


def main() -> None:
    gib = float(sys.argv[1]) if len(sys.argv) > 1 else 1.0
    folder = Path(tempfile.mkdtemp(dir=sys.argv[2] if len(sys.argv) > 2 else None))
    try:
        path = folder / "checkpoint"
        number = max(1, round(gib * 64))
        state = {f"w{i}": np.full(4 << 20, float(i), np.float32) for i in range(number)}
        sw.save(path, state)
        compiled()

        def both() -> None:
            restoring = sw.restore_async(path, into=state)
            compiled()
            restoring.result()

        actions: dict[str, Callable[[], Any]] = {
            "restore": lambda: sw.restore(path, into=state),
            "compile": compiled,
            "both": both,
        }
        found: dict[str, list[float]] = {name: [] for name in actions}
        for _ in range(ROUNDS):
            for name, action in actions.items():
                found[name].append(seconds(action))
    finally:
        shutil.rmtree(folder)
    print(f"{number * 16} MiB, medians of {ROUNDS}, seconds (least, most):")
    medians = {name: statistics.median(times) for name, times in found.items()}
    for name, times in found.items():
        print(f"  {name:8} {medians[name]:6.2f} ({min(times):.2f}, {max(times):.2f})")
    print(f"  hidden   {medians['restore'] + medians['compile'] - medians['both']:6.2f}")


if __name__ == "__main__":
    main()
