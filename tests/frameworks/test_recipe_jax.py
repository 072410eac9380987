"""The recipes for JAX: a model of transformers and a function of JAX that scans over the stacked
layers have the same outputs from the same weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")
jax = pytest.importorskip("jax")
jnp = jax.numpy

HEADS, GROUPS, SIZE, EPSILON = 4, 2, 16, 1e-6
SMALL = {
    "hidden_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": HEADS,
    "num_key_value_heads": GROUPS,
    "head_dim": SIZE,
    "intermediate_size": 96,
    "vocab_size": 120,
    "rms_norm_eps": EPSILON,
}
KINDS = ["llama", "llama-tied", "mistral", "qwen2", "qwen3"]


def norm(x: Any, weights: Any) -> Any:
    return x * jax.lax.rsqrt((x * x).mean(-1, keepdims=True) + EPSILON) * weights["scale"]


def dense(x: Any, weights: Any) -> Any:
    return x @ weights["kernel"] + weights.get("bias", 0.0)


def rotated(x: Any) -> Any:
    """Heads [batch, length, heads, size] at their positions."""
    angles = jnp.arange(x.shape[1])[:, None] / 10000.0 ** (jnp.arange(0, SIZE, 2) / SIZE)
    cos, sin = (jnp.tile(of(angles), 2)[:, None] for of in (jnp.cos, jnp.sin))
    first, second = jnp.split(x, 2, -1)
    return x * cos + jnp.concatenate([-second, first], -1) * sin


def attention(x: Any, weights: Any) -> Any:
    batch, length, _ = x.shape
    q, k, v = (dense(x, weights[name]).reshape(batch, length, -1, SIZE) for name in "qkv")
    if "q_norm" in weights:
        q, k = norm(q, weights["q_norm"]), norm(k, weights["k_norm"])
    q, k = rotated(q), rotated(k)
    k, v = (jnp.repeat(one, HEADS // GROUPS, 2) for one in (k, v))
    scores = jnp.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(SIZE)
    scores = jnp.where(jnp.tril(jnp.ones((length, length), bool)), scores, -jnp.inf)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores), v)
    return dense(mixed.reshape(batch, length, -1), weights["o"])


def logits(params: Any, ids: Any) -> Any:
    """The model, with one scan over its layers."""

    def layer(x: Any, weights: Any) -> tuple[Any, None]:
        x = x + attention(norm(x, weights["attention_norm"]), weights["attention"])
        mlp, y = weights["mlp"], norm(x, weights["mlp_norm"])
        return x + dense(jax.nn.silu(dense(y, mlp["gate"])) * dense(y, mlp["up"]), mlp["down"]), None

    x, _ = jax.lax.scan(layer, params["embed"]["embedding"][ids], params["layers"])
    x = norm(x, params["norm"])
    return x @ params["head"]["kernel"] if "head" in params else x @ params["embed"]["embedding"].T


@pytest.mark.parametrize("kind", KINDS)
def test_a_scan_gives_equal_outputs_and_the_bits_come_back(kind: str, tmp_path: Path) -> None:
    model_type, _, tied = kind.partition("-")
    config = transformers.AutoConfig.for_model(model_type, tie_word_embeddings=bool(tied), **SMALL)
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for one in model.parameters():
            if one.ndim == 1:
                one += torch.randn(one.shape) / 10
    model.save_pretrained(tmp_path / "hf")

    there = sw.maps.recipe(f"hf-{model_type}-to-jax")
    assert there.check(tmp_path / "hf")
    params = sw.restore(tmp_path / "hf", map=there, to="jax")
    assert params["layers"]["mlp"]["gate"]["kernel"].shape == (3, 48, 96)
    ids = np.random.default_rng(0).integers(0, 120, (2, 16))
    with torch.no_grad():
        expected = model(torch.from_numpy(ids)).logits.numpy()
    with jax.default_matmul_precision("highest"):
        found = np.asarray(logits(params, ids))
    assert abs(found - expected).max() <= 1e-5 * abs(expected).max()

    # Below a name of its own, as in a state of training.
    sw.save(tmp_path / "run", {"params": params, "step": 3})
    back = sw.maps.recipe(f"jax-to-hf-{model_type}")
    assert back.check(tmp_path / "run").others == ("step",)
    sw.export(tmp_path / "run", tmp_path / "back", map=back, subtree="params", files=tmp_path / "hf")
    with sw.open(tmp_path / "hf") as checkpoint:
        difference = checkpoint.diff(tmp_path / "back")
    assert not difference
    assert difference.common > 3 * 9


def test_slots_of_optax_follow_their_parameters(tmp_path: Path) -> None:
    optax = pytest.importorskip("optax")
    kernels = {name: jnp.arange(24.0).reshape(2, 3, 4) for name in "qkvo"}
    mlp = {name: {"kernel": jnp.ones((2, 3, 4))} for name in ("gate", "up", "down")}
    params = {
        "embed": {"embedding": jnp.ones((5, 3))},
        "norm": {"scale": jnp.ones(3)},
        "layers": {
            "attention_norm": {"scale": jnp.ones((2, 3))},
            "mlp_norm": {"scale": jnp.ones((2, 3))},
            "attention": {name: {"kernel": one} for name, one in kernels.items()},
            "mlp": mlp,
        },
    }
    optimizer = optax.adam(1e-3)
    _, slots = optimizer.update(jax.tree.map(jnp.cos, params), optimizer.init(params))
    sw.save(tmp_path / "run", {"params": params, "optimizer": slots})
    found = sw.restore(tmp_path / "run", map="jax-to-hf-llama")
    name = "model.layers.1.self_attn.k_proj.weight"
    np.testing.assert_array_equal(found["params"][name], np.asarray(kernels["k"][1]).T)
    moments = found["optimizer"][0]
    for slot in ("mu", "nu"):
        expected = getattr(slots[0], slot)["layers"]["attention"]["k"]["kernel"][1]
        got = moments[slot] if isinstance(moments, dict) else getattr(moments, slot)
        np.testing.assert_array_equal(got[name], np.asarray(expected).T)
