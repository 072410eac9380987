"""Each recipe, with the real code on both sides: a model of transformers and one of Megatron-Core
have the same outputs from the same weights, and the weights come back with the same bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megatron_models as megatron
import pytest
import stepwell as sw

torch = pytest.importorskip("torch")
transformers = pytest.importorskip("transformers")

VOCAB, PADDED = 120, 128
SMALL = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
#: The same for Megatron.
LARGE = {
    "num_layers": 3,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_query_groups": 2,
    "ffn_hidden_size": 96,
}


@dataclass(frozen=True)
class Family:
    """A model on both sides."""

    recipe: str
    model_type: str
    ours: dict[str, Any] = field(default_factory=dict)
    theirs: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    spec: dict[str, Any] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)

    def of_hugging_face(self) -> Any:
        """The model of transformers, with weights of its own."""
        config = transformers.AutoConfig.for_model(self.model_type, **{**SMALL, **self.ours})
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for name, one in model.named_parameters():
            # Ones and zeros would hide which norm or bias is which.
            if one.ndim == 1:
                torch.nn.init.normal_(one, float("norm" in name or ".ln_" in name), 0.1)
        return model

    def of_megatron(self) -> Any:
        """The model of Megatron-Core."""
        return megatron.gpt(PADDED, self.model, self.spec, **{**LARGE, **self.theirs})


FAMILIES = {
    "llama": Family("hf-llama-to-megatron", "llama"),
    "llama-tied": Family(
        "hf-llama-to-megatron",
        "llama",
        {"tie_word_embeddings": True},
        model={"share_embeddings_and_output_weights": True},
    ),
    "mistral": Family("hf-llama-to-megatron", "mistral", {"head_dim": 32}, {"kv_channels": 32}),
    "qwen2": Family("hf-qwen2-to-megatron", "qwen2", {}, {"add_qkv_bias": True}),
    "qwen3": Family(
        "hf-qwen3-to-megatron",
        "qwen3",
        {"head_dim": 32},
        {"kv_channels": 32, "qk_layernorm": True},
        spec={"qk_layernorm": True},
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> Iterator[None]:
    with megatron.one_process():
        yield


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_model_gives_equal_outputs_and_comes_back(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    ours, theirs = family.of_hugging_face(), family.of_megatron()
    ours.save_pretrained(tmp_path / "hf")
    megatron.save(theirs, tmp_path / "saved")

    there = sw.maps.recipe(family.recipe, padded_vocab=PADDED, **family.parameters)
    assert there.check(tmp_path / "hf")
    sw.convert(tmp_path / "hf", tmp_path / "dcp", to="dcp", map=there)
    megatron.load(theirs, tmp_path / "dcp", tmp_path / "saved")
    ids = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected, found = ours(ids).logits, megatron.logits(theirs, ids)[..., :VOCAB]
    assert (found - expected).abs().max() <= 1e-5 * expected.abs().max()

    # A checkpoint that Megatron has written.
    megatron.save(theirs, tmp_path / "again")
    back = there.inverse().with_parameters(tmp_path / "hf")
    assert back.check(tmp_path / "again")
    sw.export(tmp_path / "again", tmp_path / "back", map=back, files=tmp_path / "hf")
    with sw.open(tmp_path / "hf") as checkpoint:
        difference = checkpoint.diff(tmp_path / "back")
        names = list(checkpoint)
    assert not difference
    assert difference.common == len(names)
    with torch.no_grad():
        again = type(ours).from_pretrained(tmp_path / "back").eval()(ids).logits
    assert torch.equal(again, expected)
