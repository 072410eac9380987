"""Each recipe, with the real code on both sides: a model of transformers and one of Megatron-Core
have the same outputs from the same weights, and the weights come back with the same bits."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import megatron_models as megatron
import pytest
import stepwell as sw

torch = pytest.importorskip("torch")
safetensors = pytest.importorskip("safetensors.torch")
transformers = pytest.importorskip("transformers")

VOCAB, PADDED = 120, 128
#: The sizes of all models, as transformers and Megatron-Core name them.
OURS = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": VOCAB,
    "max_position_embeddings": 64,
}
GROUPS = {**OURS, "num_key_value_heads": 2, "intermediate_size": 96}
THEIRS = {"num_layers": 3, "hidden_size": 64, "num_attention_heads": 4, "ffn_hidden_size": 96}


@dataclass(frozen=True, kw_only=True)
class Family:
    """A model on both sides: settings of transformers, of Megatron-Core, of its GPTModel and of its
    layers, and the parameters of the recipe."""

    recipe: str
    model_type: str
    ours: dict[str, Any] = field(default_factory=dict)
    base: dict[str, Any] = field(default_factory=lambda: GROUPS)
    theirs: dict[str, Any] = field(default_factory=dict)
    model: dict[str, Any] = field(default_factory=dict)
    layers: dict[str, Any] | Callable[[Any], Any] = field(default_factory=dict)
    parameters: dict[str, int] = field(default_factory=dict)
    #: Called with the model of Megatron-Core.
    changed: Callable[[Any], None] = lambda _: None

    def of_hugging_face(self) -> Any:
        """The model of transformers. Norms and biases have values of their own."""
        config = transformers.AutoConfig.for_model(self.model_type, **{**self.base, **self.ours})
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        router_biases = [one for name, one in model.named_buffers() if "correction_bias" in name]
        with torch.no_grad():
            for one in [*model.parameters(), *router_biases]:
                if one.ndim == 1:
                    one += torch.randn(one.shape) / 10
        return model

    def of_megatron(self, ours: Any) -> Any:
        """The model of Megatron-Core, with weights of its own."""
        config = ours.config
        rotary = getattr(config, "rope_parameters", None) or {}
        epsilon = getattr(config, "rms_norm_eps", None) or config.layer_norm_epsilon
        groups = self.base.get("num_key_value_heads")
        model = megatron.gpt(
            PADDED,
            {"rotary_base": rotary.get("rope_theta", 10000), **self.model},
            self.layers,
            **{**THEIRS, "num_query_groups": groups, "layernorm_epsilon": epsilon, **self.theirs},
        )
        self.changed(model)
        return model


TIED = {"share_embeddings_and_output_weights": True}
GELU = functools.partial(torch.nn.functional.gelu, approximate="tanh")
EXPERTS = {"num_moe_experts": 4, "moe_router_topk": 2, "moe_ffn_hidden_size": 32}
OF_EXPERTS = {"num_experts": 4, "moe_grouped_gemm": False}
CHOSEN = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
LOCAL = {"local_layers": 1}


def as_gemma(model: Any) -> None:
    """Gemma multiplies the embedding and stores norms minus 1. Megatron-Core leaves the first to
    its users, and the second to Transformer Engine."""
    model.embedding.register_forward_hook(lambda _module, _given, found: found * 8.0)
    for norm in model.modules():
        if isinstance(norm, torch.nn.RMSNorm):
            norm.forward = functools.partial(zero_centered, norm)


def zero_centered(norm: Any, given: Any) -> Any:
    """A norm whose weights are stored minus 1."""
    return torch.nn.functional.rms_norm(given, norm.normalized_shape, 1 + norm.weight, norm.eps)


DEEPSEEK = Family(
    recipe="hf-deepseek-to-megatron",
    model_type="deepseek_v3",
    ours={
        "num_key_value_heads": 4,
        "first_k_dense_replace": 1,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 16,
        "qk_rope_head_dim": 8,
        "v_head_dim": 16,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 2,
        "routed_scaling_factor": 2.5,
    },
    theirs={
        **EXPERTS,
        "num_query_groups": 4,
        "multi_latent_attention": True,
        "qk_layernorm": True,
        "q_lora_rank": 24,
        "kv_lora_rank": 16,
        "qk_head_dim": 16,
        "qk_pos_emb_head_dim": 8,
        "v_head_dim": 16,
        "rope_type": "rope",
        "rotary_scaling_factor": 1.0,
        "num_moe_experts": 8,
        "moe_layer_freq": [0, 1, 1],
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
        "moe_router_num_groups": 2,
        "moe_router_group_topk": 1,
        "moe_router_topk_scaling_factor": 2.5,
        "moe_shared_expert_intermediate_size": 64,
    },
    layers=megatron.latent_layers,
    parameters=LOCAL,
)

GEMMA = Family(
    recipe="hf-gemma-to-megatron",
    model_type="gemma",
    ours={"head_dim": 32},
    theirs={"kv_channels": 32, "activation_func": GELU},
    model=TIED,
    changed=as_gemma,
)
#: Settings of Gemma 2 and 3 without weights. Megatron-Core does not have them.
PLAIN_SCORES = {
    "query_pre_attn_scalar": 32,
    "attn_logit_softcapping": None,
    "final_logit_softcapping": None,
}

QWEN2_MOE = Family(
    recipe="hf-qwen2-moe-to-megatron",
    model_type="qwen2_moe",
    ours={**CHOSEN, "shared_expert_intermediate_size": 48},
    theirs={
        **EXPERTS,
        "add_qkv_bias": True,
        "moe_shared_expert_intermediate_size": 48,
        "moe_shared_expert_gate": True,
        "moe_router_pre_softmax": True,
    },
    layers=OF_EXPERTS,
    parameters=LOCAL,
)
QWEN3_MOE = Family(
    recipe="hf-qwen3-moe-to-megatron",
    model_type="qwen3_moe",
    ours={**CHOSEN, "head_dim": 32, "norm_topk_prob": True},
    theirs={**EXPERTS, "kv_channels": 32, "qk_layernorm": True},
    layers={**OF_EXPERTS, "qk_layernorm": True},
    parameters=LOCAL,
)


def with_dense_layers(family: Family, layers: list[int], **ours: object) -> Family:
    """A model with experts in these layers only, of which each has tensors of its own."""
    return dataclasses.replace(
        family,
        ours={**family.ours, **ours},
        theirs={**family.theirs, "moe_layer_freq": layers, "moe_grouped_gemm": False},
        layers=megatron.mixed_layers,
        parameters={**family.parameters, "stacked": 0},
    )


#: Models on both sides.
FAMILIES = {
    "llama": Family(recipe="hf-llama-to-megatron", model_type="llama"),
    "llama-tied": Family(
        recipe="hf-llama-to-megatron", model_type="llama", ours={"tie_word_embeddings": True}, model=TIED
    ),
    "llama-layers": Family(
        recipe="hf-llama-to-megatron",
        model_type="llama",
        theirs={"hetereogenous_dist_checkpoint": True},
        parameters={"stacked": 0},
    ),
    "mistral": Family(
        recipe="hf-mistral-to-megatron",
        model_type="mistral",
        ours={"head_dim": 32},
        theirs={"kv_channels": 32},
    ),
    "qwen2": Family(recipe="hf-qwen2-to-megatron", model_type="qwen2", theirs={"add_qkv_bias": True}),
    "qwen3": Family(
        recipe="hf-qwen3-to-megatron",
        model_type="qwen3",
        ours={"head_dim": 32},
        theirs={"kv_channels": 32, "qk_layernorm": True},
        layers={"qk_layernorm": True},
    ),
    "mixtral": Family(
        recipe="hf-mixtral-to-megatron",
        model_type="mixtral",
        ours={"intermediate_size": 32, "num_local_experts": 4, "num_experts_per_tok": 2},
        theirs=EXPERTS,
        layers=OF_EXPERTS,
        parameters=LOCAL,
    ),
    "qwen2-moe": QWEN2_MOE,
    "qwen2-moe-dense-layers": with_dense_layers(QWEN2_MOE, [1, 0, 1], mlp_only_layers=[1]),
    "qwen3-moe": QWEN3_MOE,
    "qwen3-moe-dense-layers": with_dense_layers(QWEN3_MOE, [0, 1, 0], decoder_sparse_step=2),
    "deepseek": DEEPSEEK,
    "deepseek-dense-queries": dataclasses.replace(
        DEEPSEEK,
        ours={**DEEPSEEK.ours, "q_lora_rank": None},
        theirs={**DEEPSEEK.theirs, "q_lora_rank": None},
    ),
    "gpt2": Family(
        recipe="hf-gpt2-to-megatron",
        model_type="gpt2",
        base={**OURS, "n_inner": 96},
        theirs={
            "add_bias_linear": True,
            "normalization": "LayerNorm",
            "gated_linear_unit": False,
            "activation_func": GELU,
        },
        model={**TIED, "position_embedding_type": "learned_absolute"},
    ),
    "gemma": GEMMA,
    "gemma2": dataclasses.replace(
        GEMMA,
        recipe="hf-gemma2-to-megatron",
        model_type="gemma2",
        ours={**GEMMA.ours, **PLAIN_SCORES},
        layers=megatron.layers_with_norms,
    ),
    "gemma3": dataclasses.replace(
        GEMMA,
        recipe="hf-gemma3-to-megatron",
        model_type="gemma3_text",
        ours={**GEMMA.ours, **PLAIN_SCORES},
        theirs={**GEMMA.theirs, "qk_layernorm": True},
        layers=megatron.layers_with_norms,
    ),
}


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> Iterator[None]:
    with megatron.one_process():
        yield


Outputs = Callable[[Any, Any], "tuple[Any, ...]"]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_a_model_gives_equal_outputs_and_comes_back(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    ours = family.of_hugging_face()
    theirs = family.of_megatron(ours)
    there_and_back(
        family.recipe,
        (ours, lambda model, ids: (model(ids).logits,)),
        (theirs, lambda model, ids: (megatron.logits(model, ids)[..., :VOCAB],)),
        tmp_path,
        **family.parameters,
    )


def test_bert_with_norms_in_front_gives_equal_outputs(tmp_path: Path) -> None:
    config = transformers.MegatronBertConfig(**{**OURS, "intermediate_size": 96})
    theirs = megatron_bert(config)
    compare_bert(
        "hf-megatron-bert-to-megatron", transformers.MegatronBertForPreTraining, config, theirs, tmp_path
    )


@pytest.mark.filterwarnings("ignore::stepwell.maps.MapWarning")
def test_bert_with_norms_behind_gives_equal_outputs(tmp_path: Path) -> None:
    config = transformers.BertConfig(**{**OURS, "intermediate_size": 96})
    theirs = megatron.with_norms_behind(megatron_bert(config))
    compare_bert("hf-bert-to-megatron", transformers.BertForPreTraining, config, theirs, tmp_path)


@pytest.mark.parametrize("cls", ["BertForPreTraining", "BertForMaskedLM", "BertForNextSentencePrediction"])
def test_the_names_of_bert_come_back_with_a_warning(cls: str, tmp_path: Path) -> None:
    config = transformers.BertConfig(**{**OURS, "intermediate_size": 96})
    getattr(transformers, cls)(config).save_pretrained(tmp_path / "hf")
    with pytest.warns(sw.maps.MapWarning, match="hf-bert-to-megatron: only names and shapes") as found:
        sw.convert(tmp_path / "hf", tmp_path / "there", to="megatron", map="hf-bert-to-megatron")
    assert [one.filename for one in found] == [__file__]
    back = sw.maps.recipe("megatron-to-hf-bert", config=tmp_path / "hf")
    with pytest.warns(sw.maps.MapWarning, match="megatron-to-hf-bert: only names") as found:
        sw.export(tmp_path / "there", tmp_path / "back", map=back, files=tmp_path / "hf")
    assert len(found) == 1
    with sw.open(tmp_path / "hf") as checkpoint:
        assert not checkpoint.diff(tmp_path / "back")
    older = safetensors.load_file(tmp_path / "hf" / "model.safetensors")
    for name in list(older):
        kind = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
        for new, old in kind.items():
            if name.endswith(new):
                older[name.replace(new, old)] = older.pop(name)
    older["bert.embeddings.position_ids"] = torch.arange(64)[None]
    with pytest.warns(sw.maps.MapWarning):
        compare_older(older, "hf-bert-to-megatron", tmp_path)


def megatron_bert(config: Any) -> Any:
    """A BertModel of the same sizes."""
    return megatron.bert(
        PADDED,
        **THEIRS,
        add_bias_linear=True,
        normalization="LayerNorm",
        gated_linear_unit=False,
        activation_func=torch.nn.functional.gelu,
        layernorm_epsilon=config.layer_norm_eps,
    )


def compare_bert(recipe: str, cls: Any, config: Any, theirs: Any, folder: Path) -> None:
    """Both heads have the same outputs on both sides."""
    torch.manual_seed(0)
    ours = cls(config).eval()
    with torch.no_grad():
        for one in ours.parameters():
            if one.ndim == 1:
                one += torch.randn(one.shape) / 10

    def of_ours(model: Any, ids: Any) -> tuple[Any, ...]:
        found = model(ids, token_type_ids=ids % 2)
        return found.prediction_logits, found.seq_relationship_logits

    def of_theirs(model: Any, ids: Any) -> tuple[Any, ...]:
        words, binary = model(ids, torch.ones_like(ids), tokentype_ids=ids % 2)
        return words[..., :VOCAB], binary

    there_and_back(recipe, (ours, of_ours), (theirs, of_theirs), folder)


def there_and_back(
    recipe: str, ours: tuple[Any, Outputs], theirs: tuple[Any, Outputs], folder: Path, **parameters: int
) -> None:
    """Converts a model of transformers to Megatron-Core and back, and compares outputs and bits."""
    (model, outputs), (other, of_other) = ours, theirs
    model.save_pretrained(folder / "hf")
    there = sw.maps.recipe(recipe, padded_vocab=PADDED, **parameters)
    assert there.check(folder / "hf")
    sw.convert(folder / "hf", folder / "written", to="megatron", map=there)
    megatron.load(other, folder / "written")
    ids = torch.randint(0, VOCAB, (2, 16), generator=torch.Generator().manual_seed(2))
    with torch.no_grad():
        expected = outputs(model, ids)
        for found, one in zip(of_other(other, ids), expected, strict=True):
            assert (found - one).abs().max() <= 1e-5 * one.abs().max()

    # A checkpoint that Megatron has written.
    megatron.save(other, folder / "again")
    back = there.inverse().with_parameters(folder / "hf")
    assert back.check(folder / "again")
    sw.export(folder / "again", folder / "back", map=back, files=folder / "hf")
    with sw.open(folder / "hf") as checkpoint:
        difference = checkpoint.diff(folder / "back")
        names = list(checkpoint)
    assert not difference
    assert difference.common == len(names)
    with torch.no_grad():
        again = outputs(type(model).from_pretrained(folder / "back").eval(), ids)
    assert all(map(torch.equal, again, expected))


#: Models of transformers only, and other names on the side of Megatron.
NAMES = {
    **{
        f"{name}-tied": dataclasses.replace(
            FAMILIES[name], ours={**FAMILIES[name].ours, "tie_word_embeddings": True}, parameters={}
        )
        for name in ("qwen2", "qwen3", "mixtral", "qwen2-moe", "qwen3-moe", "deepseek")
    },
    "deepseek2": dataclasses.replace(DEEPSEEK, model_type="deepseek_v2", parameters={}),
    **{
        f"{name}-transformer-engine": dataclasses.replace(FAMILIES[name], parameters={"stacked": 0})
        for name in ("qwen2-moe-dense-layers", "qwen3-moe-dense-layers")
    },
    **{
        f"{name}-{names}": dataclasses.replace(FAMILIES[name], parameters=parameters)
        for name in ("mixtral", "qwen2-moe", "qwen3-moe", "deepseek")
        for names, parameters in {
            "transformer-engine": {},
            "layers": {"stacked": 0},
            "sequential": {"stacked": 0, "stacked_experts": 0},
            "grouped": {"stacked": 0, "stacked_experts": 0, "grouped_experts": 1},
        }.items()
    },
}


@pytest.mark.parametrize("name", NAMES)
def test_the_bits_come_back_from_other_names(name: str, tmp_path: Path) -> None:
    family = NAMES[name]
    family.of_hugging_face().save_pretrained(tmp_path / "hf")
    there = sw.maps.recipe(family.recipe, config=tmp_path / "hf", **family.parameters)
    sw.convert(tmp_path / "hf", tmp_path / "there", to="stepwell", map=there)
    assert there.inverse().check(tmp_path / "there")
    sw.export(tmp_path / "there", tmp_path / "back", map=there.inverse())
    with sw.open(tmp_path / "hf") as checkpoint:
        difference = checkpoint.diff(tmp_path / "back")
        assert ("lm_head.weight" in checkpoint) is not name.endswith("-tied")
    assert not difference
    assert difference.common > 10


def test_norms_of_dense_layers_have_their_names(tmp_path: Path) -> None:
    family = FAMILIES["qwen2-moe-dense-layers"]
    family.of_hugging_face().save_pretrained(tmp_path / "hf")
    names = [
        {
            name
            for name in sw.restore(tmp_path / "hf", map=sw.maps.recipe(family.recipe, **parameters))
            if re.fullmatch(r"decoder\.layers\.\d\.(pre_)?mlp.*norm.*", name)
        }
        for parameters in ({"stacked": 0}, family.parameters)
    ]
    fused = {f"decoder.layers.{i}.mlp.linear_fc1.layer_norm_weight" for i in range(3)}
    apart = {f"decoder.layers.{i}.pre_mlp_layernorm.weight" for i in (0, 2)}
    assert names == [apart | {"decoder.layers.1.mlp.linear_fc1.layer_norm_weight"}, fused]
    with pytest.raises(sw.MisuseError, match=r"of \{i\}, 1 is missing.*which stacked=0 leaves out"):
        sw.restore(tmp_path / "hf", map=family.recipe)


def test_older_files_of_gpt2_have_masks_and_no_prefix(tmp_path: Path) -> None:
    FAMILIES["gpt2"].of_hugging_face().save_pretrained(tmp_path / "hf")
    whole = tmp_path / "hf" / "model.safetensors"
    older = {name.removeprefix("transformer."): one for name, one in safetensors.load_file(whole).items()}
    for i in range(3):
        older[f"h.{i}.attn.bias"] = torch.ones(1, 1, 64, 64)
        older[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    compare_older(older, "hf-gpt2-to-megatron", tmp_path)


def test_older_files_of_bert_have_positions(tmp_path: Path) -> None:
    config = transformers.MegatronBertConfig(**{**OURS, "intermediate_size": 96})
    transformers.MegatronBertForPreTraining(config).save_pretrained(tmp_path / "hf")
    older = safetensors.load_file(tmp_path / "hf" / "model.safetensors")
    older["bert.embeddings.position_ids"] = torch.arange(64)[None]
    compare_older(older, "hf-megatron-bert-to-megatron", tmp_path)


def compare_older(older: dict[str, Any], recipe: str, folder: Path) -> None:
    """An older file of a model is converted as the newer one is."""
    (folder / "older").mkdir()
    (folder / "older" / "config.json").write_bytes((folder / "hf" / "config.json").read_bytes())
    safetensors.save_file(older, folder / "older" / "model.safetensors")
    for name in ("hf", "older"):
        sw.convert(folder / name, folder / f"{name}-there", to="safetensors", map=recipe)
    with sw.open(folder / "hf-there") as checkpoint:
        assert not checkpoint.diff(folder / "older-there")


@pytest.mark.parametrize("name", ["mixtral", "qwen2-moe-dense-layers", "qwen3-moe", "deepseek"])
def test_experts_in_memory_are_those_of_files(name: str, tmp_path: Path) -> None:
    ours = FAMILIES[name].of_hugging_face()
    ours.save_pretrained(tmp_path / "hf")
    sw.save(tmp_path / "memory", dict(ours.state_dict()))
    there = sw.maps.recipe(FAMILIES[name].recipe, config=tmp_path / "hf", **FAMILIES[name].parameters)
    fused = there.with_parameters(fused_experts=1)
    with pytest.raises(sw.MisuseError, match="which fused_experts=1 leaves out"):
        sw.restore(tmp_path / "memory", map=there)
    sw.convert(tmp_path / "memory", tmp_path / "there", to="stepwell", map=fused)
    with sw.open(tmp_path / "hf", map=there) as checkpoint:
        assert not checkpoint.diff(tmp_path / "there")
    with sw.open(tmp_path / "there", map=fused.inverse()) as checkpoint:
        assert not checkpoint.diff(tmp_path / "memory")


@pytest.mark.parametrize("grouped", [0, 1])
def test_experts_have_the_names_of_modules(grouped: int, tmp_path: Path) -> None:
    family = FAMILIES["mixtral"]
    ours = family.of_hugging_face()
    ours.save_pretrained(tmp_path / "hf")
    apart = {"stacked": 0, "stacked_experts": 0, "grouped_experts": grouped}
    state = sw.restore(tmp_path / "hf", map=sw.maps.recipe(family.recipe, **apart))
    theirs = {name for name in family.of_megatron(ours).state_dict() if "_extra_state" not in name}
    for i in range(3):
        # These are the names without Transformer Engine.
        theirs.remove(f"decoder.layers.{i}.input_layernorm.weight")
        theirs.add(f"decoder.layers.{i}.self_attention.linear_qkv.layer_norm_weight")
    if grouped:
        sequential = re.compile(r"local_experts\.(\d+)\.(linear_fc\d)\.weight")
        theirs = {sequential.sub(r"\2.weight\1", name) for name in theirs}
    assert set(state) == theirs


@pytest.mark.parametrize("stored", [0, 1, 2])
def test_layers_of_mtp_are_the_ones_of_megatron(stored: int, tmp_path: Path) -> None:
    ours = DEEPSEEK.of_hugging_face()
    ours.config.num_nextn_predict_layers = 2
    write_with_mtp(ours, tmp_path / "hf")
    family = dataclasses.replace(DEEPSEEK, theirs={**DEEPSEEK.theirs, "mtp_num_layers": stored or None})
    theirs = family.of_megatron(ours)
    there = sw.maps.recipe(family.recipe, config=tmp_path / "hf", padded_vocab=PADDED, **family.parameters)
    if stored < 2:
        # Another number than that of the configuration.
        with pytest.raises(sw.MisuseError, match=r"mtp_layers is 5, and num_nextn_predict_layers in .* is 2"):
            sw.restore(tmp_path / "hf", map=there.with_parameters(mtp_layers=5))
        configure(tmp_path / "hf", num_nextn_predict_layers=stored)
    there = there.with_parameters(tmp_path / "hf")
    assert there.check(tmp_path / "hf")
    sw.convert(tmp_path / "hf", tmp_path / "there", to="megatron", map=there)
    # Megatron takes every tensor, and has no other ones.
    before = {name: one.clone() for name, one in theirs.state_dict().items() if isinstance(one, torch.Tensor)}
    megatron.load(theirs, tmp_path / "there")
    after = theirs.state_dict()
    assert not [name for name, one in before.items() if torch.equal(one, after[name]) and one.ndim > 1]
    with sw.open(tmp_path / "there") as checkpoint:
        assert set(checkpoint) - {"checkpoint_version"} == megatron.keys(theirs)

    megatron.save(theirs, tmp_path / "again")
    sw.export(tmp_path / "again", tmp_path / "back", map=there.inverse())
    with sw.open(tmp_path / "hf") as checkpoint:
        difference = checkpoint.diff(tmp_path / "back")
    assert {name.rpartition("layers.")[2][0] for name in difference.only_a} == set("34"[stored:])
    assert not difference.only_b
    assert not difference.changes


def write_with_mtp(model: Any, folder: Path) -> None:
    """Writes a model of three layers with two layers of MTP behind them, by the names of DeepSeek's
    own files. transformers does not have such layers."""
    model.save_pretrained(folder)
    state = safetensors.load_file(folder / "model.safetensors")
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Any:
        return torch.randn(shape, generator=generator)

    for layer in (3, 4):
        prefix = f"model.layers.{layer}."
        for name, one in list(state.items()):
            if name.startswith("model.layers.2."):
                state[name.replace("model.layers.2.", prefix)] = random(*one.shape)
        state |= {f"{prefix}{name}.weight": random(64) for name in ("enorm", "hnorm", "shared_head.norm")}
        state[f"{prefix}eh_proj.weight"] = random(64, 128)
        state[f"{prefix}embed_tokens.weight"] = state["model.embed_tokens.weight"].clone()
        state[f"{prefix}shared_head.head.weight"] = state["lm_head.weight"].clone()
    safetensors.save_file(state, folder / "model.safetensors")


def configure(folder: Path, **changes: object) -> None:
    """Changes the configuration of a model."""
    file = folder / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_blocks_of_fp8_become_bfloat16(tmp_path: Path) -> None:
    ours = DEEPSEEK.of_hugging_face()
    ours.save_pretrained(tmp_path / "hf")
    quantised, plain = {}, {}
    for name, one in safetensors.load_file(tmp_path / "hf" / "model.safetensors").items():
        if "proj" not in name or "layers" not in name:
            quantised[name] = plain[name] = one.bfloat16()
            continue
        # All weights of this size are one block.
        scale = (one.abs().max() / 448).reshape(1, 1)
        quantised[name] = (one / scale).to(torch.float8_e4m3fn)
        quantised[f"{name}_scale_inv"] = scale
        plain[name] = (quantised[name].float() * scale).bfloat16()
        # The layer behind the last one predicts more tokens.
        if "layers.2." in name:
            behind = name.replace("layers.2.", "layers.3.")
            quantised[behind], quantised[f"{behind}_scale_inv"] = quantised[name].clone(), scale.clone()
            plain[behind] = plain[name].clone()
    for folder, state in (("fp8", quantised), ("bf16", plain)):
        ours.config.save_pretrained(tmp_path / folder)
        safetensors.save_file(state, tmp_path / folder / "model.safetensors")
        sw.convert(tmp_path / folder, tmp_path / f"{folder}-dcp", to="dcp", map=DEEPSEEK.recipe)
    with sw.open(tmp_path / "fp8-dcp") as checkpoint:
        assert not checkpoint.diff(tmp_path / "bf16-dcp")
        assert "decoder.layers.2.mlp.experts.experts.linear_fc1.weight" in checkpoint
        assert "mtp.layers.0.transformer_layer.mlp.experts.experts.linear_fc1.weight" in checkpoint
