"""Models of Megatron-Core on the CPU, in one process: built, saved, loaded and run with its real
code, or their parts on several ranks. Functions that need a GPU, another process or Transformer
Engine are replaced."""

from __future__ import annotations

import contextlib
import queue
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.core.dist_checkpointing.mapping")
    from megatron.core import dist_checkpointing, distributed, optimizer, parallel_state
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.models.bert.bert_layer_specs import bert_layer_local_spec
    from megatron.core.models.bert.bert_model import BertModel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import (
        get_gpt_decoder_block_spec,
        get_gpt_layer_local_spec,
        get_gpt_mtp_block_spec,
    )
    from megatron.core.tensor_parallel import random
    from megatron.core.tensor_parallel.layers import RowParallelLinear
    from megatron.core.transformer import multi_latent_attention
    from megatron.core.transformer.moe import moe_utils
    from megatron.core.transformer.transformer_config import MLATransformerConfig, TransformerConfig

#: Settings of Llama that others also have.
DEFAULTS: dict[str, Any] = {
    "use_cpu_initialization": True,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "params_dtype": torch.float32,
    "add_bias_linear": False,
    "normalization": "RMSNorm",
    "gated_linear_unit": True,
    "activation_func": torch.nn.functional.silu,
}


def one_process() -> contextlib.AbstractContextManager[None]:
    """Megatron's groups of one process."""
    return ranks(0, 1, torch.distributed.HashStore())


@contextlib.contextmanager
def ranks(rank: int, count: int, store: Any, **sizes: int) -> Iterator[None]:
    """Megatron's groups, with such sizes, for one of several ranks."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.cuda, "current_device", lambda: "cpu")
        patch.setattr(torch.cuda, "synchronize", lambda *_: None)
        patch.setattr(random.CudaRNGStatesTracker, "fork", lambda *_: contextlib.nullcontext())
        patch.setattr(multi_latent_attention, "TELinear", LatentAttention)
        patch.setattr(moe_utils, "te_general_gemm", None, raising=False)
        patch.setattr("megatron.core.optimizer.optimizer.torch", _TensorsOnTheHost())
        patch.setattr(filesystem_async, "_results_queue", queue.Queue())
        torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=count)
        try:
            parallel_state.initialize_model_parallel(**sizes)
            yield
        finally:
            parallel_state.destroy_model_parallel()
            torch.distributed.destroy_process_group()


class LatentAttention(torch.nn.Module):
    """The core of latent attention, which Megatron-Core leaves to Transformer Engine."""

    def __init__(self, config: Any, softmax_scale: float, **_: Any) -> None:
        super().__init__()
        self.scale = softmax_scale

    def forward(self, query: Any, key: Any, value: Any, hidden: Any, **_: Any) -> Any:
        query, key, value = (one.permute(1, 2, 0, 3) for one in (query, key, value))
        scores = (query @ key.transpose(2, 3) * self.scale).masked_fill(hidden, -torch.inf)
        return (scores.softmax(-1) @ value).permute(2, 0, 1, 3).flatten(2)


def latent_layers(config: Any) -> Any:
    """The layers of a model with latent attention."""
    layers = get_gpt_decoder_block_spec(config, use_transformer_engine=False)
    for one in layers.layer_specs:
        one.submodules.self_attention.submodules.core_attention = LatentAttention
    return layers


def mixed_layers(config: Any) -> Any:
    """The layers of a model with dense layers between those with experts."""
    return get_gpt_decoder_block_spec(config, use_transformer_engine=False)


class LinearWithNorm(RowParallelLinear):
    """A linear layer with a norm behind it, as Megatron Bridge has it for Gemma."""

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        super().__init__(input_size, output_size, config=config, **options)
        self.post_layernorm = torch.nn.RMSNorm(output_size, config.layernorm_epsilon)

    def forward(self, given: Any) -> Any:
        found, bias = super().forward(given)
        return self.post_layernorm(found), bias


def layers_with_norms(config: Any) -> Any:
    """The layers of a model with norms behind attention and MLP."""
    spec = get_gpt_layer_local_spec(normalization=config.normalization, qk_layernorm=config.qk_layernorm)
    spec.submodules.self_attention.submodules.linear_proj = LinearWithNorm
    spec.submodules.mlp.submodules.linear_fc2 = LinearWithNorm
    return spec


def gpt(
    vocab: int,
    model: dict[str, Any] | None = None,
    layers: dict[str, Any] | Callable[[Any], Any] | None = None,
    **config: Any,
) -> Any:
    """A GPTModel with parameters of its own."""
    cls = MLATransformerConfig if config.get("multi_latent_attention") else TransformerConfig
    settings = cls(**{**DEFAULTS, **config})
    if callable(layers):
        spec = layers(settings)
    else:
        spec = get_gpt_layer_local_spec(normalization=settings.normalization, **(layers or {}))
    options = {
        "position_embedding_type": "rope",
        "share_embeddings_and_output_weights": False,
        **(model or {}),
    }
    if settings.mtp_num_layers:
        options["mtp_block_spec"] = get_gpt_mtp_block_spec(settings, spec, use_transformer_engine=False)
    torch.manual_seed(1)
    return GPTModel(settings, spec, vocab_size=vocab, max_sequence_length=64, **options).eval()


def bert(vocab: int, **config: Any) -> Any:
    """A BertModel with parameters of its own, whose head is tied to the embedding."""
    settings = TransformerConfig(**{**DEFAULTS, **config})
    torch.manual_seed(1)
    options = {"share_embeddings_and_output_weights": True, "parallel_output": False}
    return BertModel(settings, 2, bert_layer_local_spec, vocab, max_sequence_length=64, **options).eval()


def with_norms_behind(model: Any) -> Any:
    """A BertModel whose residuals are the outputs of its norms, as in the original BERT. The layers
    of Megatron-Core ignore the setting for it."""
    for layer in model.encoder.layers:
        _norm_first(layer, "_forward_attention", "input_layernorm")
        _norm_first(layer, "_forward_mlp", "pre_mlp_layernorm")
    return model


def _norm_first(layer: Any, method: str, name: str) -> None:
    norm, plain = getattr(layer, name), getattr(layer, method)
    # The parameters stay where they are.
    norm.forward, forward = lambda given: given, norm.forward

    def changed(hidden_states: Any, *more: Any, **options: Any) -> Any:
        return plain(forward(hidden_states), *more, **options)

    setattr(layer, method, changed)


def logits(model: Any, ids: Any) -> Any:
    """The output for tokens, each of which sees those before it."""
    length = ids.shape[1]
    hidden = torch.triu(torch.ones(length, length, dtype=torch.bool), 1)[None, None]
    return model(ids, torch.arange(length)[None], hidden)


class Training:
    """A model with Megatron's optimizer, Adam on its own parameters."""

    def __init__(self, model: Any, rate: float) -> None:
        self.model = distributed.DistributedDataParallel(
            model.config, distributed.DistributedDataParallelConfig(), model
        )
        settings = optimizer.OptimizerConfig(optimizer="adam", lr=rate, weight_decay=0.0, clip_grad=0.0)
        self.optimizer = optimizer.get_megatron_optimizer(settings, [self.model])

    def step(self, loss: Callable[[Any], Any], ids: Any) -> None:
        """Trains one step with a loss of the logits."""
        self.model.zero_grad_buffer()
        self.optimizer.zero_grad()
        loss(logits(self.model, ids)).backward()
        self.model.finish_grad_sync()
        # The norm of all gradients needs a GPU.
        (only,) = self.optimizer.chained_optimizers
        only.prepare_grads()
        assert only.step_with_ready_grads()

    def _state(self, loading: bool) -> dict[str, Any]:
        # It takes the keys of the parameters from the state of the model.
        model = tensors(self.model.module)
        return {**model, "optimizer": self.optimizer.sharded_state_dict(model, is_loading=loading)}

    def save(self, path: Path) -> None:
        """Saves the model and the optimizer."""
        path.mkdir()
        dist_checkpointing.save(self._state(False), str(path))

    def load(self, path: Path, saved: Path) -> None:
        """Fills both from a DCP directory. The two files beside the tensors, one of which has the
        hyperparameters, come from a checkpoint that Megatron has saved."""
        for name in ("metadata.json", "common.pt"):
            shutil.copy(saved / name, path)
        state = _loaded(self._state(True), path)
        self.optimizer.load_state_dict(state.pop("optimizer"))
        self.model.module.load_state_dict(state, strict=False)


class _TensorsOnTheHost:
    """The module torch, whose ``tensor`` ignores the device."""

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def tensor(self, *given: Any, **options: Any) -> Any:
        return torch.tensor(*given, **{**options, "device": "cpu"})


def tensors(model: Any) -> dict[str, Any]:
    """Its sharded state dict without the states of FP8, which these models do not have."""
    return {name: one for name, one in model.sharded_state_dict().items() if "_extra_state" not in name}


def keys(model: Any) -> set[str]:
    """The keys under which Megatron stores its tensors."""
    return {one.key for one in tensors(model).values()}


def save(model: Any, path: Path) -> None:
    """Saves all of its sharded state dict."""
    path.mkdir()
    dist_checkpointing.save(model.sharded_state_dict(), str(path))


def load(model: Any, path: Path) -> None:
    """Fills a model from a checkpoint of Megatron."""
    model.load_state_dict(_loaded(tensors(model), path), strict=False)


def _loaded(state: dict[str, Any], path: Path) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return dist_checkpointing.load(state, str(path))
