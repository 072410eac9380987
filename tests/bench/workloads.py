"""The states that are saved and restored: real shapes, incompressible values."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np

GIB = 1 << 30
State = dict[str, dict[str, Any]]


def _llama(hidden: int, inner: int, layers: int, vocabulary: int = 32_000) -> dict[str, tuple[int, ...]]:
    shapes: dict[str, tuple[int, ...]] = {"embed.weight": (vocabulary, hidden)}
    for n in range(layers):
        layer = f"layers.{n}."
        for name in ("q_proj", "k_proj", "v_proj", "o_proj"):
            shapes[f"{layer}self_attn.{name}.weight"] = (hidden, hidden)
        for name in ("gate_proj", "up_proj"):
            shapes[f"{layer}mlp.{name}.weight"] = (inner, hidden)
        shapes[layer + "mlp.down_proj.weight"] = (hidden, inner)
        for name in ("input_layernorm", "post_attention_layernorm"):
            shapes[f"{layer}{name}.weight"] = (hidden,)
        for name in ("q_norm", "k_norm"):
            shapes[f"{layer}self_attn.{name}.weight"] = (64,)
    shapes["norm.weight"] = (hidden,)
    shapes["lm_head.weight"] = (vocabulary, hidden)
    return shapes


def _train_state(shapes: dict[str, tuple[int, ...]], rng: np.random.Generator) -> State:
    """bf16 weights; fp32 master weights and Adam's two moments."""

    def values(shape: tuple[int, ...]) -> np.ndarray:
        return rng.standard_normal(shape, dtype=np.float32)

    return {
        "params": {name: values(shape).astype(ml_dtypes.bfloat16) for name, shape in shapes.items()},
        "optimizer": {slot: {name: values(s) for name, s in shapes.items()} for slot in ("master", "m", "v")},
    }


def llama1g(rng: np.random.Generator) -> State:
    return _train_state(_llama(hidden=512, inner=1408, layers=14), rng)


def llama3g(rng: np.random.Generator) -> State:
    return _train_state(_llama(hidden=1024, inner=2816, layers=13), rng)


def llama60m(rng: np.random.Generator) -> State:
    """The same on a small scale: for trying the bench itself, its figures say nothing."""
    return _train_state(_llama(hidden=128, inner=352, layers=2), rng)


def small20k(rng: np.random.Generator) -> State:
    """20 000 leaves of 1 to 64 KiB, log-uniform; half of them are the weights."""
    sizes = np.exp(rng.uniform(np.log(256), np.log(16_384), 20_000)).astype(int)
    leaves = [rng.standard_normal(size, dtype=np.float32) for size in sizes]
    return {
        "params": {f"block_{n // 100}.leaf_{n}": leaf for n, leaf in enumerate(leaves[:10_000])},
        "optimizer": {f"block_{n // 100}.leaf_{n}": leaf for n, leaf in enumerate(leaves[10_000:])},
    }


def large4(rng: np.random.Generator) -> State:
    """Four leaves of 512 MiB; two of them are the weights."""

    def leaf() -> np.ndarray:
        return rng.standard_normal(GIB // 8, dtype=np.float32).reshape(-1, 4096)

    return {"params": {"a": leaf(), "b": leaf()}, "optimizer": {"a": leaf(), "b": leaf()}}


WORKLOADS = {
    "llama1g": llama1g,
    "llama3g": llama3g,
    "small20k": small20k,
    "large4": large4,
    "llama60m": llama60m,
}
#: The default workloads.
MEASURED = ["llama1g", "llama3g", "small20k", "large4"]


def flat(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, np.ndarray]]:
    """Leaves by slashed path, in order."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from flat(value, f"{prefix}{name}/")
        else:
            yield prefix + name, value


def nbytes(tree: dict[str, Any]) -> int:
    return sum(array.nbytes for _, array in flat(tree))


def empty_like(tree: dict[str, Any]) -> dict[str, Any]:
    """The same structure in memory of its own, every page touched."""
    return {
        name: empty_like(value) if isinstance(value, dict) else np.full_like(value, 0)
        for name, value in tree.items()
    }


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Paths whose bytes differ."""
    there = dict(flat(found))
    return [
        path
        for path, array in flat(expected)
        if path not in there
        or there[path].shape != array.shape
        or not np.array_equal(_bytes(there[path]), _bytes(array))
    ]


def _bytes(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)
