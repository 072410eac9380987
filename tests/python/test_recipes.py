"""Recipes: maps that come with the package, the numbers that they need, and what they refuse."""

from __future__ import annotations

import json
import math
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from command_line import DOCUMENT, documented, keys, run
from safetensors.numpy import save_file
from stepwell.maps.patterns import Pattern

LAYERS, HEADS, KV_HEADS, HEAD_DIM, HIDDEN, FFN, VOCAB = 2, 4, 2, 8, 16, 24, 10
NUMBERS = {"heads": HEADS, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM, "vocab": VOCAB}
CONFIG = {
    "model_type": "llama",
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
}
THERE, BACK = "hf-llama-to-megatron", "megatron-to-hf-llama"
#: The folder of the recipes.
FOLDER = Path(sw.maps.__file__).parent / "recipes"


def llama() -> dict[str, np.ndarray[Any, Any]]:
    """The tensors of a small Llama, each with values of its own."""
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB, HIDDEN),
        "lm_head.weight": (VOCAB, HIDDEN),
        "model.norm.weight": (HIDDEN,),
    }
    for i in range(LAYERS):
        shapes |= {
            f"model.layers.{i}.{name}.weight": shape
            for name, shape in {
                "input_layernorm": (HIDDEN,),
                "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
                "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
                "post_attention_layernorm": (HIDDEN,),
                "mlp.gate_proj": (FFN, HIDDEN),
                "mlp.up_proj": (FFN, HIDDEN),
                "mlp.down_proj": (HIDDEN, FFN),
            }.items()
        }
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A directory of Hugging Face without a configuration."""
    (tmp_path / "hf").mkdir()
    save_file(llama(), tmp_path / "hf" / "model.safetensors")
    return tmp_path / "hf"


def configured(model: Path, **changes: object) -> Path:
    """The same directory with a configuration. ``None`` takes a key away."""
    entries = {key: one for key, one in {**CONFIG, **changes}.items() if one is not None}
    (model / "config.json").write_text(json.dumps(entries))
    return model


@pytest.mark.parametrize("name", sw.maps.recipes())
def test_a_recipe_is_short_and_has_a_way_back(name: str) -> None:
    text = sw.maps.recipe_toml(name)
    assert len(text.splitlines()) <= 80
    assert sw.maps.recipe(name).about
    first, to, second = name.partition("-to-")
    assert to
    back = f"{second}-to-{first}"
    assert sw.maps.recipe_toml(back) == text
    assert repr(sw.maps.recipe(back).inverse()) == repr(sw.maps.recipe(name))
    assert sw.maps.recipe(name).parameters == sw.maps.recipe(back).parameters
    page = DOCUMENT.parent / "guide" / "recipes.md"
    assert f"| `{name}` |" in page.read_text()


@pytest.mark.parametrize("name", ["megatron", "megatron-ends", "megatron-experts"])
def test_a_part_is_included_by_maps_of_users(name: str) -> None:
    own = sw.maps.Map([{"include": name}])
    assert own.parameters
    assert "rule = [" in sw.maps.recipe_toml(name)
    with pytest.raises(sw.MisuseError, match="The parts are megatron, megatron-ends"):
        sw.maps.Map([{"include": name, "to": "x"}])
    with pytest.raises(sw.MisuseError, match="rule 2 of the map: `include` is the name of a part"):
        sw.maps.Map([{"include": name}, {"include": "../recipes/hf-llama-to-megatron"}])


def test_every_file_of_the_folder_is_a_recipe() -> None:
    assert sw.maps.recipes() == sorted(file.stem for file in FOLDER.iterdir())
    assert all(file.suffix == ".toml" for file in FOLDER.iterdir())


def test_a_name_is_a_map_and_its_swapped_name_the_way_back(model: Path, tmp_path: Path) -> None:
    configured(model)
    sw.save(tmp_path / "there", sw.restore(model, map=THERE))
    there = sw.restore(tmp_path / "there")
    assert there["decoder.layers.mlp.linear_fc1.weight"].shape == (LAYERS, 2 * FFN, HIDDEN)
    plain = llama()
    q, k, v = (plain[f"model.layers.1.self_attn.{one}_proj.weight"] for one in "qkv")
    groups = zip(np.split(q, KV_HEADS), np.split(k, KV_HEADS), np.split(v, KV_HEADS), strict=True)
    expected = np.concatenate([part for group in groups for part in group])
    np.testing.assert_array_equal(there["decoder.layers.self_attention.linear_qkv.weight"][1], expected)
    back = sw.restore(tmp_path / "there", map=sw.maps.recipe(BACK, config=model))
    assert sorted(back) == sorted(plain)
    for name, value in plain.items():
        np.testing.assert_array_equal(back[name], value, err_msg=name)


def test_the_numbers_may_come_from_the_caller(model: Path) -> None:
    by_numbers = sw.restore(model, map=sw.maps.recipe(THERE, **NUMBERS))
    by_config = sw.restore(configured(model), map=THERE)
    assert sorted(by_numbers) == sorted(by_config)
    for name, value in by_config.items():
        np.testing.assert_array_equal(by_numbers[name], value)


def test_the_configuration_is_beside_a_file_or_an_index(model: Path) -> None:
    configured(model)
    weights = {name: "model.safetensors" for name in llama()}
    index = model / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weights}))
    expected = sorted(sw.restore(model, map=THERE))
    for path in (model / "model.safetensors", index):
        assert sorted(sw.restore(path, map=THERE)) == expected


def test_a_saved_state_of_megatron_is_exported_from_its_item(model: Path, tmp_path: Path) -> None:
    weights = sw.restore(model, map=sw.maps.recipe(THERE, **NUMBERS))
    export = sw.Export(str(tmp_path / "hf-{step}"), map=sw.maps.recipe(BACK, **NUMBERS), subtree="model")
    with sw.CheckpointManager(tmp_path / "run", exports=[export]) as manager:
        manager.save(3, {"model": weights, "iteration": 3})
    back = sw.restore(tmp_path / "hf-3")
    assert sorted(back) == sorted(llama())
    for name, one in llama().items():
        np.testing.assert_array_equal(back[name], one)


@pytest.mark.parametrize("what", ["model.safetensors", "model.safetensors.index.json", ""])
def test_links_to_files_have_the_configuration_beside_them(model: Path, tmp_path: Path, what: str) -> None:
    """A hub's cache has a directory of links for each revision, and all files in another one."""
    expected = sw.restore(configured(model), map=THERE)
    index = {"weight_map": dict.fromkeys(llama(), "model.safetensors")}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    (tmp_path / "blobs").mkdir()
    snapshot = tmp_path / "snapshots" / "revision"
    snapshot.mkdir(parents=True)
    for number, file in enumerate(model.iterdir()):
        file.rename(tmp_path / "blobs" / f"{number}")
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    # The files of another model are there, too.
    (tmp_path / "blobs" / "config.json").write_text(json.dumps({**CONFIG, "num_attention_heads": 2}))
    path = snapshot / what
    with sw.open(path) as checkpoint:
        found = [checkpoint.restore(map=THERE), sw.restore(path, map=THERE)]
        assert sw.maps.Map.of(THERE).check(checkpoint)
        assert checkpoint.plan(map=THERE).path == checkpoint.path == str(path)
    sw.convert(path, tmp_path / "made", to="stepwell", map=THERE)
    for one in [*found, sw.restore(tmp_path / "made")]:
        for name, value in expected.items():
            np.testing.assert_array_equal(one[name], value, err_msg=name)


def test_a_configuration_without_optional_keys_is_enough(tmp_path: Path) -> None:
    folder = tmp_path / "old"
    folder.mkdir()
    state = {name: value for name, value in llama().items() if "k_proj" not in name and "v_proj" not in name}
    for i in range(LAYERS):
        for one in "kv":
            name = f"model.layers.{i}.self_attn.{one}_proj.weight"
            state[name] = state[name.replace(f"{one}_proj", "q_proj")] + 1
        state[f"model.layers.{i}.self_attn.rotary_emb.inv_freq"] = np.ones(HEAD_DIM // 2, np.float32)
    save_file(state, folder / "model.safetensors")
    # Llama 2 has neither the number of key heads nor the size of a head, and it had a buffer.
    configured(folder, num_key_value_heads=None, head_dim=None, hidden_size=HEADS * HEAD_DIM)
    there = sw.restore(folder, map=THERE)
    assert there["decoder.layers.self_attention.linear_qkv.weight"].shape == (
        LAYERS,
        3 * HEADS * HEAD_DIM,
        HIDDEN,
    )
    assert not [name for name in there if "inv_freq" in name]


@pytest.mark.parametrize(
    ("numbers", "says"),
    [
        ({}, "needs heads, kv_heads, head_dim, vocab. Pass config="),
        ({**NUMBERS, "kv_heads": 4}, r"shares \[1, 1, 1\] of 8 .*kv_heads = 4"),
        ({**NUMBERS, "kv_heads": 1}, r"1 groups of shares \[4, 1, 1\] of 8"),
        ({**NUMBERS, "heads": 8}, r"2 groups of shares \[4, 1, 1\] of 8"),
        ({**NUMBERS, "heads": 5}, "`sizes` cannot be .*: 5 cannot be divided by 2"),
        ({**NUMBERS, "kv_heads": 0}, "cannot be"),
        ({**NUMBERS, "heads": 8, "head_dim": 4}, r"2 groups of shares \[4, 1, 1\] of 4"),
        ({**NUMBERS, "vocab": 12}, "has 10 elements along axis 0, not 12"),
        ({**NUMBERS, "padded_vocab": 8}, "`from` is 10, more than `size`, 8"),
        ({**NUMBERS, "head": 8}, "has no parameter 'head'; did you mean 'heads'"),
        ({**NUMBERS, "heads": -1}, "the parameter heads is an integer"),
        ({**NUMBERS, "heads": 4.0}, "the parameter heads is an integer"),
    ],
)
def test_a_wrong_number_is_refused_by_name(model: Path, numbers: Any, says: str) -> None:
    with pytest.raises(sw.MisuseError, match=says):
        sw.restore(model, map=sw.maps.recipe(THERE, **numbers))


@pytest.mark.parametrize("wrong", [{"kv_heads": 1}, {"heads": 2, "kv_heads": 1}, {"head_dim": 4}])
def test_the_way_back_refuses_a_wrong_number(model: Path, tmp_path: Path, wrong: dict[str, int]) -> None:
    sw.save(tmp_path / "there", sw.restore(configured(model), map=THERE))
    with pytest.raises(sw.MisuseError, match=r"groups of shares.*linear_qkv|linear_qkv.*groups of shares"):
        sw.restore(tmp_path / "there", map=sw.maps.recipe(BACK, **{**NUMBERS, **wrong}))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"model_type": "qwen2"},
            r"is for models of type llama, and .*config.json is of type qwen2. "
            "Use hf-qwen2-to-jax or hf-qwen2-to-megatron, or a copy of this one",
        ),
        ({"vocab_size": None}, "needs vocab. .*config.json does not have them"),
        ({"num_attention_heads": "four"}, "num_attention_heads in .*config.json is an integer"),
        ({"num_attention_heads": -4}, "num_attention_heads in .*config.json is an integer"),
        ({"head_dim": None, "hidden_size": 17}, "hidden_size / num_attention_heads in .* cannot be divided"),
        ({"head_dim": None, "num_attention_heads": 0}, "cannot be divided by 0"),
        ({"num_attention_heads": 0}, "`sizes` cannot be list .*the recipe hf-llama-to-megatron, heads = 0"),
        ({"vocab_size": 10**30}, "vocab_size in .*config.json"),
    ],
)
def test_a_wrong_configuration_is_refused_by_key(model: Path, changes: Any, says: str) -> None:
    configured(model, **changes)
    with pytest.raises(sw.MisuseError, match=says):
        sw.restore(model, map=THERE)


@pytest.mark.parametrize("text", ["{", "[1]", '"text"', "[" * 100_000, '{"a": NaN'])
def test_a_damaged_configuration_is_refused_by_path(model: Path, text: str) -> None:
    (model / "config.json").write_text(text)
    with pytest.raises(sw.MisuseError, match=r"config.json is not"):
        sw.restore(model, map=THERE)


def test_an_adopted_configuration_is_checked(model: Path) -> None:
    sw.adopt(configured(model))
    assert sw.restore(model, map=THERE)
    configured(model, num_attention_heads=8)
    with pytest.raises(sw.CorruptCheckpoint, match=r"config\.json"):
        sw.restore(model, map=THERE)


@pytest.mark.parametrize("rows", [0, 1 << 40])
def test_a_wild_number_of_a_configuration_costs_no_time(tmp_path: Path, rows: int) -> None:
    (tmp_path / "map.toml").write_text(
        "parameters.n = { config = ['n'] }\n"
        "rule = [{ concat = ['a', 'b'], to = 'c', groups = 'n', sizes = [1, 1] }]"
    )
    (tmp_path / "there.toml").write_text(
        "parameters.n = { config = ['n'] }\nrule = [{ split = 'a', to = ['d', 'e'], groups = 'n / 2' }]"
    )
    for name in "ab":
        header = json.dumps({name: {"dtype": "F32", "shape": [rows, 0], "data_offsets": [0, 0]}}).encode()
        (tmp_path / f"{name}.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)
    (tmp_path / "config.json").write_text(json.dumps({"n": 1 << 40}))
    before = time.monotonic()
    for name in ("map", "there"):
        with pytest.raises(sw.MisuseError, match="pieces up to this leaf"):
            sw.restore(tmp_path, map=tmp_path / f"{name}.toml")
    assert time.monotonic() - before < 10


def test_a_number_that_the_configuration_denies_is_refused(model: Path) -> None:
    configured(model)
    with pytest.raises(sw.MisuseError, match=r"heads is 8, and num_attention_heads in .*config.json is 4"):
        sw.restore(model, map=sw.maps.recipe(THERE, heads=8))
    assert sw.restore(model, map=sw.maps.recipe(THERE, heads=4, padded_vocab=16))


def test_a_passed_configuration_counts_and_not_the_one_there(model: Path, tmp_path: Path) -> None:
    configured(model, num_key_value_heads=1)
    other = tmp_path / "other"
    other.mkdir()
    configured(other)
    for config in (other, other / "config.json"):
        assert sw.restore(model, map=sw.maps.recipe(THERE, config=config))
    with pytest.raises(sw.MisuseError, match=r"nothing.json does not exist"):
        sw.maps.recipe(THERE, config=tmp_path / "nothing.json")


def test_a_vocabulary_is_padded_and_cropped(model: Path, tmp_path: Path) -> None:
    padded = sw.maps.recipe(THERE, config=configured(model), padded_vocab=16)
    sw.save(tmp_path / "there", sw.restore(model, map=padded))
    there = sw.restore(tmp_path / "there")
    for name, source in (
        ("embedding.word_embeddings.weight", "model.embed_tokens.weight"),
        ("output_layer.weight", "lm_head.weight"),
    ):
        np.testing.assert_array_equal(there[name][:VOCAB], llama()[source])
        assert there[name].shape == (16, HIDDEN)
        assert not there[name][VOCAB:].any()
    back = sw.restore(tmp_path / "there", map=padded.inverse())
    np.testing.assert_array_equal(back["lm_head.weight"], llama()["lm_head.weight"])
    with pytest.raises(sw.MisuseError, match="has 16 elements along axis 0, not 10"):
        # It is not said how many rows are padding, so none are cut off.
        sw.restore(tmp_path / "there", map=sw.maps.recipe(BACK, config=model))


def test_numbers_are_stored_beside_the_weights_of_megatron(model: Path, tmp_path: Path) -> None:
    padded = sw.maps.recipe(THERE, config=configured(model), padded_vocab=16)
    weights = sw.restore(model, map=padded)
    arguments = {"num_attention_heads": HEADS, "kv_channels": HEAD_DIM, "padded_vocab_size": 16}
    back = sw.maps.recipe(BACK, config=model)
    sw.save(tmp_path / "there", {**weights, "args": {**arguments, "padded_vocab_size": 16}})
    assert sorted(sw.restore(tmp_path / "there", map=back)) == sorted(llama())
    for name, wrong in (("num_attention_heads", 8), ("kv_channels", 16), ("padded_vocab_size", 15)):
        sw.save(tmp_path / name, {**weights, "args": {**arguments, name: wrong}})
        says = rf"`args/{name}` of the checkpoint is {wrong}|has 16 elements along axis 0, not 15"
        with pytest.raises(sw.MisuseError, match=says):
            sw.restore(tmp_path / name, map=back)
    with pytest.raises(sw.MisuseError, match=r"padded_vocab is 32, and `args/padded_vocab_size` .* is 16"):
        sw.restore(tmp_path / "there", map=back.with_parameters(padded_vocab=32))
    # Values that are no whole numbers do not count.
    for number, other in enumerate([None, 16.0, "16", True, -16, np.arange(16)]):
        state = {**weights, "args": {**arguments, "padded_vocab_size": other}}
        sw.save(tmp_path / str(number), state)
        with pytest.raises(sw.MisuseError, match="has 16 elements along axis 0, not 10"):
            sw.restore(tmp_path / str(number), map=back)


def test_a_tied_model_has_no_head_on_either_side(model: Path, tmp_path: Path) -> None:
    state = {name: value for name, value in llama().items() if name != "lm_head.weight"}
    save_file(state, model / "model.safetensors")
    sw.save(tmp_path / "there", sw.restore(configured(model), map=THERE))
    assert "output_layer.weight" not in sw.restore(tmp_path / "there")
    back = sw.restore(tmp_path / "there", map=sw.maps.recipe(BACK, config=model))
    assert sorted(back) == sorted(state)


def test_layers_may_have_names_of_their_own(model: Path, tmp_path: Path) -> None:
    separate = sw.maps.recipe(THERE, config=configured(model), stacked=0)
    sw.save(tmp_path / "there", sw.restore(model, map=separate))
    there = sw.restore(tmp_path / "there")
    assert there["decoder.layers.1.mlp.linear_fc1.weight"].shape == (2 * FFN, HIDDEN)
    back = sw.restore(tmp_path / "there", map=separate.inverse())
    assert sorted(back) == sorted(llama())


def test_leaves_without_a_rule_are_refused(model: Path) -> None:
    bias = {f"model.layers.{i}.self_attn.q_proj.bias": np.ones(4, np.float32) for i in range(LAYERS)}
    save_file({**llama(), **bias}, model / "model.safetensors")
    with pytest.raises(sw.MisuseError, match=r"no rule for leaf `model.layers.0.self_attn.q_proj.bias`"):
        sw.restore(configured(model), map=THERE)
    found = sw.maps.Map.of(THERE).check(model)
    assert not found
    assert sorted(found.uncovered) == sorted(bias)
    assert found.covered == len(llama())
    assert found.missing == found.problems == found.others == ()


def test_other_items_of_a_state_keep_their_names(model: Path, tmp_path: Path) -> None:
    sw.save(tmp_path / "run", {"model": llama(), "step": 7})
    there = sw.maps.recipe(THERE, **NUMBERS)
    state = sw.restore(tmp_path / "run", map=there)
    assert state["step"] == 7
    assert state["model"]["decoder.final_layernorm.weight"].shape == (HIDDEN,)
    assert there.check(tmp_path / "run").others == ("step",)


def test_a_state_of_training_has_its_slots_by_name(model: Path, tmp_path: Path) -> None:
    weights = llama()
    slots = {
        name: {"exp_avg": one * 2, "exp_avg_sq": one * 3, "step": np.array(5.0)}
        for name, one in weights.items()
    }
    run_state = {"model": weights, "optimizer": {"state": slots, "lr": 0.1}, "iteration": 5}
    sw.save(tmp_path / "run", run_state)
    there = sw.maps.recipe(THERE, **NUMBERS, padded_vocab=16, training=1)
    assert there.check(tmp_path / "run").others == ("optimizer/lr", "iteration")
    sw.save(tmp_path / "there", sw.restore(tmp_path / "run", map=there))
    state = sw.restore(tmp_path / "there")
    plain = sw.restore(model, map=sw.maps.recipe(THERE, **NUMBERS, padded_vocab=16))
    for name, one in plain.items():
        np.testing.assert_array_equal(state[name], one)
        np.testing.assert_array_equal(state[f"optimizer.state.exp_avg.{name}"], one * 2)
        np.testing.assert_array_equal(state[f"optimizer.state.exp_avg_sq.{name}"], one * 3)
    back = sw.restore(tmp_path / "there", map=there.inverse())
    assert back["iteration"] == 5
    assert back["optimizer"]["lr"] == 0.1
    for name, one in weights.items():
        np.testing.assert_array_equal(back["model"][name], one)
        for slot, value in slots[name].items():
            np.testing.assert_array_equal(back["optimizer"]["state"][name][slot], value)
    # Without the parameter the way back has the weights only.
    back_to_weights = there.inverse().with_parameters(training=0)
    assert sorted(sw.restore(tmp_path / "there", map=back_to_weights)) == sorted(weights)
    found = back_to_weights.check(tmp_path / "there")
    assert found
    assert found.others == ()
    assert there.inverse().check(tmp_path / "there").others == ("optimizer/lr", "iteration")


def test_what_is_not_there_is_reported(model: Path) -> None:
    state = {name: value for name, value in llama().items() if "mlp.up_proj" not in name}
    del state["model.norm.weight"], state["model.layers.0.self_attn.k_proj.weight"]
    save_file(state, model / "model.safetensors")
    found = sw.maps.Map.of(THERE).check(configured(model))
    assert found.missing == ("model.norm.weight", "model.layers.{i}.mlp.up_proj.weight")
    (problem,) = found.problems
    assert "decoder.layers.0.self_attention.linear_qkv.weight" in problem
    assert found.uncovered == ()


def without(model: Path, *lost: str) -> Path:
    """The directory without tensors whose names have one of these texts."""
    kept = {name: one for name, one in llama().items() if not any(text in name for text in lost)}
    save_file(kept, model / "model.safetensors")
    return model


def says_that_it_lacks(path: Path, leaf: str, map: str, **numbers: int) -> None:
    """A restore and a check name the missing leaf."""
    found = sw.maps.recipe(map, **numbers)
    with pytest.raises(sw.MisuseError) as caught:
        sw.restore(path, map=found)
    coverage = found.check(path)
    assert not coverage
    assert leaf in coverage.missing or any(f"`{leaf}` is missing" in one for one in coverage.problems)
    assert leaf in str(caught.value) or "it has 1 of {i}, and" in str(caught.value)


@pytest.mark.parametrize("stacked", [0, 1])
@pytest.mark.parametrize(
    ("lost", "leaf"),
    [
        ("1.mlp.down_proj", "model.layers.1.mlp.down_proj.weight"),
        ("1.input_layernorm", "model.layers.1.input_layernorm.weight"),
        ("layers.1.", "model.layers.1.input_layernorm.weight"),
        ("lm_head", "lm_head.weight"),
    ],
)
def test_a_model_without_a_tensor_is_refused(model: Path, lost: str, leaf: str, stacked: int) -> None:
    without(configured(model, num_hidden_layers=LAYERS, tie_word_embeddings=False), lost)
    says_that_it_lacks(model, leaf, THERE, stacked=stacked)
    if stacked:
        says_that_it_lacks(model, leaf, "hf-llama-to-jax")
    if lost.startswith("1."):
        configured(model)
        says_that_it_lacks(model, leaf, THERE, stacked=stacked)


@pytest.mark.parametrize(
    ("layers", "says"),
    [(3, "`model.layers.2.[a-z_.]*` is missing"), (1, "`model.layers.1.[a-z_.]*` is one too many")],
)
def test_the_layers_are_those_of_the_configuration(
    model: Path, tmp_path: Path, layers: int, says: str
) -> None:
    sw.save(tmp_path / "there", sw.restore(configured(model), map=THERE))
    configured(model, num_hidden_layers=layers)
    for map in (THERE, "hf-llama-to-jax"):
        with pytest.raises(sw.MisuseError, match=says):
            sw.restore(model, map=map)
    with pytest.raises(sw.MisuseError, match=says):
        sw.restore(tmp_path / "there", map=sw.maps.recipe(BACK, config=model))
    with pytest.raises(sw.MisuseError, match=says):
        sw.restore(tmp_path / "there", map=sw.maps.recipe(BACK, **NUMBERS, layers=layers))


def test_the_way_back_gives_no_incomplete_model(model: Path, tmp_path: Path) -> None:
    there = sw.restore(configured(model), map=THERE)
    name = "decoder.layers.mlp.linear_fc2.weight"
    sw.save(tmp_path / "there", {**there, name: there[name][:1]})
    with pytest.raises(sw.MisuseError, match=r"`model\.layers\.1\.mlp\.down_proj\.weight` is missing"):
        sw.restore(tmp_path / "there", map=sw.maps.recipe(BACK, config=model))
    del there["output_layer.weight"]
    sw.save(tmp_path / "tied", there)
    configured(model, tie_word_embeddings=False)
    with pytest.raises(sw.MisuseError, match=r"`output_layer.weight` matches no leaf"):
        sw.restore(tmp_path / "tied", map=sw.maps.recipe(BACK, config=model))
    configured(model, tie_word_embeddings=True)
    assert "lm_head.weight" not in sw.restore(tmp_path / "tied", map=sw.maps.recipe(BACK, config=model))


@pytest.mark.parametrize("stacked", [0, 1])
@pytest.mark.parametrize(
    ("lost", "says"),
    [
        (
            {"experts.2."},
            r"`model.layers.0.block_sparse_moe.experts.2.w1.weight` is missing: \{e\} has the numbers",
        ),
        ({"1.block_sparse_moe.experts.2."}, "experts.2.w1.weight` is missing|it has 2 of {e}"),
        (
            {"1.block_sparse_moe.gate"},
            "`model.layers.1.block_sparse_moe.gate.weight` is missing|it has 1 of {i}",
        ),
    ],
)
def test_a_model_without_an_expert_is_refused(
    tmp_path: Path, lost: set[str], says: str, stacked: int
) -> None:
    tensors = {name: one for name, one in llama().items() if ".mlp." not in name}
    for i in range(LAYERS):
        moe = f"model.layers.{i}.block_sparse_moe"
        tensors[f"{moe}.gate.weight"] = np.ones((3, HIDDEN), np.float32)
        for e in range(3):
            for part, shape in {"w1": (FFN, HIDDEN), "w2": (HIDDEN, FFN), "w3": (FFN, HIDDEN)}.items():
                tensors[f"{moe}.experts.{e}.{part}.weight"] = np.ones(shape, np.float32)
    configured(tmp_path, model_type="mixtral", num_local_experts=3)
    found = sw.maps.recipe("hf-mixtral-to-megatron", stacked=stacked, stacked_experts=stacked)
    save_file(tensors, tmp_path / "model.safetensors")
    assert found.check(tmp_path)
    kept = {name: one for name, one in tensors.items() if not any(text in name for text in lost)}
    save_file(kept, tmp_path / "model.safetensors")
    with pytest.raises(sw.MisuseError, match=says):
        sw.restore(tmp_path, map=found)


def test_slots_of_frozen_layers_may_be_missing(model: Path, tmp_path: Path) -> None:
    weights = llama()
    slots = {
        name: {"exp_avg": one, "step": np.array(1.0)}
        for name, one in weights.items()
        if "layers.0" not in name
    }
    sw.save(tmp_path / "run", {"model": weights, "optimizer": {"state": slots}})
    numbers = {**NUMBERS, "training": 1, "layers": LAYERS}
    found = sw.restore(tmp_path / "run", map=sw.maps.recipe(THERE, **numbers, stacked=0))
    assert f"optimizer.state.exp_avg.decoder.layers.{LAYERS - 1}.mlp.linear_fc2.weight" in found
    slots = {name: one for name, one in slots.items() if "layers.1.mlp.down" not in name}
    slots |= {
        name: {"exp_avg": one, "step": np.array(1.0)} for name, one in weights.items() if "layers.0" in name
    }
    sw.save(tmp_path / "other", {"model": weights, "optimizer": {"state": slots}})
    with pytest.raises(sw.MisuseError, match=r"exp_avg.*it has 1 of \{i\}, and .* has 2"):
        sw.restore(tmp_path / "other", map=sw.maps.recipe(THERE, **numbers))


def test_a_map_of_ones_own_has_parameters_too(model: Path, tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(sw.maps.recipe_toml(THERE).replace("mlp.linear_fc2", "mlp.mine"))
    state = sw.restore(model, map=sw.maps.recipe(file, **NUMBERS))
    assert "decoder.layers.mlp.mine.weight" in state
    with pytest.raises(sw.MisuseError, match=f"the map {file} needs heads"):
        sw.restore(model, map=file)


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("parameters = 3", r"\[parameters\] is a table"),
        ("parameters.a = 3", "parameter a is a table of `config`, `stored` and `default`"),
        ("parameters.a = { config = 'x' }", "`config` of the map's parameter a is a list"),
        ("parameters.a = { config = ['x +'] }", "`config` of the map's parameter a is a list"),
        ("parameters.a = { default = 'b' }", "uses b, which is not declared before it"),
        ("parameters.a = { default = '*' }", "`default` of the map's parameter a cannot be"),
        ("parameters.config = {}", "parameter 'config' needs another name"),
        ("parameters.'a b' = {}", "parameter 'a b' needs another name"),
        ("about = 3", "`about` of the map is text"),
        ("warning = 3", "`warning` of the map is text"),
        ("from = 'x'", "`from` of the map is a list of texts"),
        ("to = ['{x']", "has no closing brace"),
        ("parameters.a = {}\nrule = [{ crop = 'w', size = 'b' }]", "has no parameter b"),
        ("parameters.a = {}\nrule = [{ crop = 'w', size = '2 + a' }]", "names and integers with"),
        ("rule = [{ crop = 'w', size = '2' }]", "`size` cannot be str '2'"),
        ("rule = [{ crop = 'w', size = 2, when = 3 }]", "`when` is an expression"),
        (
            "parameters.a = {}\nrule = [{ crop = 'w', size = 2, when = 'b' }]",
            "`when` cannot be .* no parameter b",
        ),
        (
            "parameters.a = {}\nrule = [{ crop = 'w', size = 2, when = 'not' }]",
            "`when` cannot be .* no parameter not",
        ),
        ("complete = 3", "`complete` of the map is a list of tables"),
        ("complete = [3]", "`complete` 1 of the map is a table"),
        ("complete = [{}]", "`complete` 1 of the map: `each` is missing"),
        ("complete = [{ each = ['w.{i}'], count = 3 }]", "`count` is not known here"),
        ("complete = [{ each = ['w.{i}', 'w.{j}'] }]", "has the capture {[ij]}, which"),
        ("complete = [{ each = ['w.{i}'], counts = { j = 3 } }]", "`counts` has j, which is no capture"),
        (
            "complete = [{ each = ['w.{i}'], counts = { i = -3 } }]",
            "`counts` cannot be .* a table of captures",
        ),
        ("rule = [{ drop = 'w', optional = 'x' }]", "`optional` cannot be .* true or false"),
        ("rule = [{ keep = 'w' }]", "`keep` cannot be .* a list of leaf paths"),
        ("rule = [{ drop = 'w', direction = 'back' }]", "`direction` is forward or inverse"),
        ("rule = [{ concat = ['w', 'v'], to = 'x', unit = 3 }]", "`unit` needs `sizes`"),
    ],
)
def test_a_wrong_declaration_is_named(tmp_path: Path, text: str, says: str) -> None:
    (tmp_path / "map.toml").write_text(text)
    with pytest.raises(sw.MisuseError, match=says):
        sw.maps.Map.of(tmp_path / "map.toml")


def test_expressions_multiply_and_divide_in_order(tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text(
        "parameters.a = {}\nparameters.b = { default = 'a * 6 / 4' }\n"
        "rule = [{ crop = 'w', size = '2 * b/3' }, { drop = 'v', when = 'a / 4' }]"
    )
    sw.save(tmp_path / "c", {"w": np.arange(20.0), "v": np.zeros(1)})
    state = sw.restore(tmp_path / "c", map=sw.maps.recipe(tmp_path / "map.toml", a=4))
    assert state["w"].shape == (4,)
    assert list(state) == ["w"]
    for wrong, says in ((5, "30 cannot be divided by 4"), (2**61, "below 2\\^62")):
        with pytest.raises(sw.MisuseError, match=says):
            sw.restore(tmp_path / "c", map=sw.maps.recipe(tmp_path / "map.toml", a=wrong))
    state = sw.restore(tmp_path / "c", map=sw.maps.recipe(tmp_path / "map.toml", a=0, b=3))
    assert list(state) == ["w", "v"]


def test_a_rule_may_apply_where_a_number_is_zero(tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text("parameters.a = {}\nrule = [{ drop = 'v', when = 'not a' }]")
    sw.save(tmp_path / "c", {"w": np.ones(1), "v": np.ones(1)})
    for number, left in ((0, ["w"]), (1, ["w", "v"]), (2, ["w", "v"])):
        assert list(sw.restore(tmp_path / "c", map=sw.maps.recipe(tmp_path / "map.toml", a=number))) == left


def test_keep_leaves_all_others_out(tmp_path: Path) -> None:
    w = np.ones(2)
    state = {"a": {"x.w": w, "y.w": np.zeros(1)}, "b": {"tied": w, "n": 3}, "x.w": np.zeros(3)}
    sw.save(tmp_path / "c", state)
    found = sw.restore(tmp_path / "c", map=[{"keep": ["x.{rest...}", "b/tied"]}])
    assert list(found) == ["a", "b", "x.w"]
    assert list(found["a"]) == ["x.w"]
    assert list(found["b"]) == ["tied"]
    np.testing.assert_array_equal(found["b"]["tied"], w)
    found = sw.restore(tmp_path / "c", map=[{"keep": ["b/tied"]}])
    np.testing.assert_array_equal(found["b"]["tied"], w)
    with pytest.raises(sw.MisuseError, match="`nothing` matches no leaf"):
        sw.restore(tmp_path / "c", map=[{"keep": ["x.{rest...}", "nothing"]}])
    with pytest.raises(sw.MisuseError, match="keep of `b/tied` has no way back"):
        sw.maps.Map([{"keep": ["b/tied"]}]).inverse()


def test_rules_of_one_direction_apply_in_that_one_only(tmp_path: Path) -> None:
    rules: list[dict[str, object]] = [
        {"drop": "a", "direction": "forward"},
        {"drop": "b", "direction": "inverse"},
        {"rename": "c", "to": "d"},
    ]
    there = sw.maps.Map(rules)
    sw.save(tmp_path / "c", {"a": np.ones(1), "b": np.ones(1), "c": np.ones(1)})
    assert list(sw.restore(tmp_path / "c", map=there)) == ["b", "d"]
    sw.save(tmp_path / "d", {"a": np.ones(1), "b": np.ones(1), "d": np.ones(1)})
    assert list(sw.restore(tmp_path / "d", map=there.inverse())) == ["a", "c"]
    assert list(sw.restore(tmp_path / "c", map=there.inverse().inverse())) == ["b", "d"]
    rules[2]["to"] = "e"
    assert list(sw.restore(tmp_path / "c", map=there)) == ["b", "d"]


def test_the_parts_of_a_concat_have_their_shares(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"a": np.ones(4), "b": np.ones(2)})
    for sizes in ([1, 1], [4, 1]):
        with pytest.raises(sw.MisuseError, match=r"its parts have 4, 2 elements, which are not 1 groups"):
            sw.restore(tmp_path / "c", map=[{"concat": ["a", "b"], "to": "x", "sizes": sizes}])


def test_the_way_back_of_a_pad_takes_its_own_size_only(tmp_path: Path) -> None:
    pad = sw.maps.Map([{"pad": "w", "size": 8, "from": 6}])
    sw.save(tmp_path / "c", {"w": np.ones(8), "state": {"w": {"exp_avg": np.ones(8), "step": 7}}})
    back = sw.restore(tmp_path / "c", map=pad.inverse())
    assert back["w"].shape == (6,)
    # As on the way there, known slots of another size stay as they are.
    assert back["state"]["w"]["exp_avg"].shape == (6,)
    assert back["state"]["w"]["step"] == 7
    sw.save(tmp_path / "d", {"w": np.ones(7)})
    with pytest.raises(sw.MisuseError, match="`w`: it has 7 elements along axis 0, not 8"):
        sw.restore(tmp_path / "d", map=pad.inverse())


def test_exports_of_a_run_take_a_recipe(model: Path, tmp_path: Path) -> None:
    export = sw.Export(str(tmp_path / "hf-{step}"), map=sw.maps.recipe(THERE, **NUMBERS), include="model")
    with sw.CheckpointManager(tmp_path / "run", exports=[export]) as manager:
        manager.save(0, {"model": llama(), "step": 0})
    with sw.open(tmp_path / "hf-0") as checkpoint:
        assert "model.decoder.layers.mlp.linear_fc1.weight" in checkpoint


def test_the_command_line_lists_shows_and_checks(model: Path, tmp_path: Path) -> None:
    listed = run("recipe", "list").stdout.splitlines()
    names = sw.maps.recipes()
    assert [line.split()[0] for line in listed[: len(names)]] == names
    assert listed[len(names) :] == [
        f"warning: hf-bert-to-megatron: {sw.maps.recipe('hf-bert-to-megatron').warning}"
    ]
    assert run("recipe", "show", BACK).stdout == sw.maps.recipe_toml(THERE)
    assert run("recipe", "check", THERE, configured(model)).stdout == "it fits; 21 leaves covered\n"
    for wrong in (["recipe", "show", "hf-lama-to-megatron"], ["show", model, "--map", "hf-lama-to-megatron"]):
        found = run(*wrong)
        assert found.exit_code == 2
        assert "did you mean 'hf-llama-to-megatron'" in found.stderr
    state = {name: value for name, value in llama().items() if name != "model.norm.weight"}
    save_file({**state, "model.more": np.ones(1), "x": np.ones(1)}, model / "model.safetensors")
    found = run("recipe", "check", THERE, model)
    assert found.exit_code == 1
    assert found.stdout.splitlines() == [
        "not covered: model.more",
        "not there: model.norm.weight",
        "other leaves, which keep their names: x",
        "it does not fit; 20 leaves covered",
        "use the recipe of this model, or change a copy of this one: `stepwell recipe show`",
    ]


def test_commands_with_a_map_take_its_numbers(model: Path, tmp_path: Path) -> None:
    params = [text for name, number in NUMBERS.items() for text in ("--param", f"{name}={number}")]
    there = tmp_path / "there.safetensors"
    assert run("convert", model, there, "--to", "safetensors", "--map", THERE, *params).exit_code == 0
    configured(model)
    assert run("diff", model, there, "--map", THERE).exit_code == 0
    for back in (["--map", BACK], ["--map", THERE, "--inverse"]):
        assert run("diff", there, model, *back, "--config", model).exit_code == 0
        assert run("plan", there, *back, *params).exit_code == 0
    name = "decoder.final_layernorm.weight"
    assert run("cat", model, name, "--map", THERE).exit_code == 0
    for wrong, says in (
        (["--map", THERE, "--param", "heads"], "--param takes NAME=N"),
        (["--map", THERE, "--param", "heads=x"], "--param takes NAME=N"),
        (["--map", THERE, "--param", "config=3"], "has no parameter 'config'"),
        (["--map", THERE, "--param", "heads=4", "--param", "heads=5"], "two values, 4 and 5"),
        (["--inverse"], "pass --map too"),
    ):
        found = run("show", model, *wrong)
        assert found.exit_code == 2
        assert says in found.stderr


def deepseek_v3() -> dict[str, tuple[str, tuple[int, ...]]]:
    """The names of all tensors of DeepSeek-V3 in FP8, with small shapes."""
    experts = 256
    found: dict[str, tuple[str, tuple[int, ...]]] = {
        "model.embed_tokens.weight": ("BF16", (8, 4)),
        "lm_head.weight": ("BF16", (8, 4)),
        "model.norm.weight": ("BF16", (4,)),
    }
    norms = (
        "input_layernorm",
        "post_attention_layernorm",
        "self_attn.q_a_layernorm",
        "self_attn.kv_a_layernorm",
    )
    attention = [
        f"self_attn.{name}" for name in ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj")
    ]
    for i in range(62):
        parts = ["mlp"] if i < 3 else ["mlp.shared_experts", *(f"mlp.experts.{e}" for e in range(experts))]
        plain: dict[str, tuple[int, ...]] = {f"{name}.weight": (4,) for name in norms}
        if i >= 3:
            plain["mlp.gate.weight"] = (experts, 4)
            found[f"model.layers.{i}.mlp.gate.e_score_correction_bias"] = ("F32", (experts,))
        if i == 61:
            plain |= {f"{name}.weight": (4,) for name in ("enorm", "hnorm", "shared_head.norm")}
            plain |= {f"{name}.weight": (8, 4) for name in ("embed_tokens", "shared_head.head")}
            plain["eh_proj.weight"] = (4, 8)
        for name, shape in plain.items():
            found[f"model.layers.{i}.{name}"] = ("BF16", shape)
        for name in [*attention, *(f"{part}.{one}_proj" for part in parts for one in ("gate", "up", "down"))]:
            found[f"model.layers.{i}.{name}.weight"] = ("F8_E4M3", (4, 4))
            found[f"model.layers.{i}.{name}.weight_scale_inv"] = ("F32", (1, 1))
    return found


def write_zeros(file: Path, tensors: dict[str, tuple[str, tuple[int, ...]]]) -> None:
    """Writes tensors of zeros, of which only the header takes space."""
    header, offset = {}, 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * {"F8_E4M3": 1, "BF16": 2, "F32": 4}[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header).encode()
    with file.open("wb") as out:
        out.write(len(text).to_bytes(8, "little") + text)
        out.truncate(8 + len(text) + offset)


def test_all_names_of_deepseek_v3_come_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = deepseek_v3()
    assert len(stored) == 91_991
    write_zeros(tmp_path / "hf.safetensors", stored)
    config = {"model_type": "deepseek_v3", "vocab_size": 8, "num_hidden_layers": 61}
    config |= {"first_k_dense_replace": 3, "num_nextn_predict_layers": 1}
    (tmp_path / "config.json").write_text(json.dumps(config))

    compared = 0
    match = Pattern.match

    def counted(pattern: Pattern, path: str) -> Any:
        nonlocal compared
        compared += 1
        return match(pattern, path)

    monkeypatch.setattr(Pattern, "match", counted)
    with sw.open(tmp_path / "hf.safetensors", map="hf-deepseek-to-megatron") as checkpoint:
        there = {name: checkpoint[name] for name in checkpoint}
    # Most of its 50 rules do not look at most names.
    assert compared < 3 * len(stored)
    mtp = {name.removeprefix("mtp.layers.0.") for name in there if name.startswith("mtp")}
    layer = {name.removeprefix("decoder.layers.60.") for name in there if ".60." in name}
    own = {f"{name}.weight" for name in ("enorm", "hnorm", "eh_proj", "final_layernorm")}
    assert mtp == own | {f"transformer_layer.{name}" for name in layer}
    dtypes = {"bfloat16": "BF16", "float32": "F32"}
    rows = {name: (dtypes[str(one.dtype)], one.shape) for name, one in there.items()}
    write_zeros(tmp_path / "there.safetensors", rows)
    with sw.open(tmp_path / "there.safetensors", map="megatron-to-hf-deepseek") as checkpoint:
        back = {name: checkpoint[name].shape for name in checkpoint}
    assert back == {name: shape for name, (_, shape) in stored.items() if "scale_inv" not in name}


def test_a_check_says_what_to_pass_instead(model: Path, tmp_path: Path) -> None:
    configured(model)
    part = model / "model-00001-of-00002.safetensors"
    save_file({name: one for name, one in llama().items() if "layers.1" in name}, part)
    found = run("recipe", "check", THERE, part)
    assert found.exit_code == 1
    assert (
        found.stdout.splitlines()[-1]
        == "this file has a part of a checkpoint: pass the directory of all parts"
    )
    part.unlink()
    sw.save(tmp_path / "there", sw.restore(model, map=THERE))
    for arguments, says in (
        ([BACK, model], f"Use its way back, the recipe {THERE}"),
        ([THERE, tmp_path / "there", "--config", model], f"Use its way back, the recipe {BACK}"),
        (["hf-mixtral-to-megatron", model], "Use hf-llama-to-jax or hf-llama-to-megatron, or a copy"),
        (["megatron-to-hf-mixtral", model], "Use jax-to-hf-llama or megatron-to-hf-llama, or a copy"),
        (["llama", model], "did you mean 'hf-llama-to-jax' or 'hf-llama-to-megatron'? Pass"),
        (["nothing-like-it", model], "is no file and no recipe. Pass a TOML file, the name of a recipe"),
    ):
        found = run("recipe", "check", *arguments)
        assert (found.exit_code, found.stdout) == (2, "")
        assert says in found.stderr
    with pytest.raises(sw.MisuseError, match="has only leaves that it makes, such as embedding"):
        sw.convert(
            tmp_path / "there", tmp_path / "out", to="megatron", map=sw.maps.recipe(THERE, config=model)
        )


def test_missing_numbers_are_named_as_options(model: Path) -> None:
    found = run("show", model, "--map", THERE)
    assert found.exit_code == 2
    options = ", ".join(f"--param {name}=N" for name in ("heads", "kv_heads", "head_dim", "vocab"))
    assert (
        f"Pass --config, which is the path of the model's config.json, or the numbers as parameters ({options})"
        in (found.stderr)
    )


def test_a_map_may_have_a_warning(tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text("warning = 'not the same'\nrule = [{ rename = 'a', to = 'b' }]")
    sw.save(tmp_path / "c", {"a": np.ones(1)})
    there = sw.maps.Map.of(tmp_path / "map.toml")
    assert there.warning == there.inverse().warning == "not the same"
    for use in (
        lambda: sw.restore(tmp_path / "c", map=there),
        lambda: sw.open(tmp_path / "c", map=there),
        lambda: sw.export(tmp_path / "c", tmp_path / "d", map=there),
    ):
        with pytest.warns(sw.maps.MapWarning, match="the map .*map.toml: not the same") as found:
            use()
        assert [one.filename for one in found] == [__file__]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert there.check(tmp_path / "c")
        assert sw.restore(tmp_path / "c", map=[{"rename": "a", "to": "b"}])
    for command in (
        ["convert", tmp_path / "c", tmp_path / "e", "--to", "npz"],
        ["show", tmp_path / "c"],
        ["export", tmp_path / "c", tmp_path / "f"],
    ):
        found = run(*command, "--map", tmp_path / "map.toml")
        assert found.exit_code == 0
        assert found.stderr.count(f"warning: the map {tmp_path / 'map.toml'}: not the same\n") == 1
    found = run("recipe", "check", tmp_path / "map.toml", tmp_path / "c")
    assert found.stdout.splitlines()[-1] == "warning: not the same"


def test_the_documents_have_the_documented_keys(model: Path) -> None:
    configured(model)
    documents = [
        json.loads(run("recipe", *arguments, "--json").stdout)
        for arguments in (["list"], ["show", THERE], ["check", THERE, model])
    ]
    assert [one["command"] for one in documents] == ["recipe list", "recipe show", "recipe check"]
    assert set().union(*map(keys, documents)) == documented("recipe")
