"""Conversions into files of ``torch.save``, and safetensors files read by torch."""

from __future__ import annotations

import json
import zipfile
from collections import OrderedDict, namedtuple
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from stepwell._conversion import files

torch = pytest.importorskip("torch")

Moments = namedtuple("Moments", "mu nu")
DTYPES = (
    "bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128",
    "uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz",
)  # fmt: skip


@pytest.fixture(autouse=True)
def small_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_WINDOW_BYTES", 4096)
    monkeypatch.setattr(files, "_JOURNAL_BYTES", 64 << 10)


def tensor(dtype: str, *shape: int) -> Any:
    return (torch.rand(shape) * 100).to(getattr(torch, dtype))


def same(found: Any, wanted: Any) -> None:
    assert (found.dtype, found.shape) == (wanted.dtype, wanted.shape)
    found, wanted = (one.contiguous().flatten().view(torch.uint8) for one in (found, wanted))
    assert torch.equal(found, wanted)


def converted(folder: Path, state: object, **options: Any) -> Path:
    sw.save(folder / "saved", state)
    sw.convert(folder / "saved", folder / "out.pt", to="torch", **options)
    with zipfile.ZipFile(folder / "out.pt") as archive:
        assert archive.testzip() is None, "every checksum holds"
    return folder / "out.pt"


@pytest.mark.parametrize("mmap", [False, True])
def test_torch_load_reads_every_dtype_bit_for_bit(tmp_path: Path, mmap: bool) -> None:
    state = {dtype: tensor(dtype, 30, 50) for dtype in DTYPES}
    state |= {
        "empty": torch.zeros(0, 3),
        "scalar": torch.tensor(5.0),
        "one": torch.ones(1, dtype=torch.uint16),
    }
    found = torch.load(converted(tmp_path, state), weights_only=True, mmap=mmap)
    assert found.keys() == state.keys()
    for name, one in state.items():
        same(found[name], one)


def test_a_training_state_keeps_its_nesting_and_values(tmp_path: Path) -> None:
    w = tensor("float32", 40, 50)
    objects = {
        "step": 7, "lr": 1e-3, "big": -(2**70), "name": "ü\n", "none": None, "flag": True, "bytes": b"\x00\xff", "pair": (1, [2.5, "x"]),
    }  # fmt: skip
    state = {
        "model": OrderedDict(w=w, head=w),
        "optimizer": {"state": {0: {"m": w * 2, "step": torch.tensor(3.0)}}, "param_groups": [{"lr": 0.1, "params": [0]}]},
        "moments": Moments([w + 1], (w + 2,)),
        "numpy": np.float32(0.5),
        "nothing": {}, "no list": [], **objects,
    }  # fmt: skip
    found = torch.load(converted(tmp_path, state), weights_only=True)
    assert found.keys() == state.keys()
    assert {name: found[name] for name in objects} == objects
    assert (found["numpy"], found["nothing"], found["no list"]) == (0.5, {}, [])
    assert found["optimizer"]["param_groups"] == [{"lr": 0.1, "params": [0]}]
    same(found["optimizer"]["state"][0]["m"], w * 2)
    assert isinstance(found["moments"]["nu"], tuple)
    same(found["moments"]["mu"][0], w + 1)
    same(found["moments"]["nu"][0], w + 2)
    same(found["model"]["w"], w)
    assert found["model"]["w"].data_ptr() == found["model"]["head"].data_ptr(), "tied"


def test_a_value_that_is_not_plain_is_named_or_left_out(tmp_path: Path) -> None:
    state = {"w": torch.ones(3), "tags": {"a", "b"}, "more": [1, torch.zeros(2), 1 + 2j]}
    sw.save(tmp_path / "saved", state)
    with pytest.raises(sw.MisuseError, match=r"torch cannot hold leaf `tags`, leaf `more\[2\]`"):
        sw.convert(tmp_path / "saved", tmp_path / "out.pt", to="torch")
    made = sw.convert(tmp_path / "saved", tmp_path / "out.pt", to="torch", objects="skip")
    assert made.skipped == ("tags", "more[2]")
    found = torch.load(tmp_path / "out.pt", weights_only=True)
    assert found.keys() == {"w", "more"}
    assert found["more"][0] == 1


def test_text_with_lone_surrogates_reaches_torch(tmp_path: Path) -> None:
    state = {"text": "x\ud800", "names": {"\udc01": 1}}
    torch.save(state, tmp_path / "c.pt")
    sw.convert(tmp_path / "c.pt", tmp_path / "out.pt", to="torch", verify=True)
    assert torch.load(tmp_path / "out.pt", weights_only=True) == state


def test_a_part_and_a_cast_reach_torch(tmp_path: Path) -> None:
    w = tensor("float32", 40, 50)
    state = {"params": {"layers": [{"w": w}, {"w": w + 1}, {"w": w + 2}]}, "step": 3}
    file = converted(tmp_path, state, subtree="params", exclude="params/layers[1]", cast="bfloat16")
    found = torch.load(file, weights_only=True)
    assert found["layers"].keys() == {0, 2}, "a list with a gap is a dict"
    same(found["layers"][2]["w"], (w + 2).bfloat16())


def test_a_state_that_is_one_tensor_is_one_in_torch(tmp_path: Path) -> None:
    w = tensor("float32", 40, 50)
    same(torch.load(converted(tmp_path, w), weights_only=True), w)


def test_dcp_loads_an_export_with_its_ties(tmp_path: Path) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    w = tensor("float32", 40, 50)
    layers = [{dtype: tensor(dtype, 30)} for dtype in DTYPES]
    state = {
        "model": {"w": w, "head": w, "layers": layers},
        "scalar": torch.tensor(3.0),
        "empty": torch.zeros(0, 3),
    }
    sw.save(tmp_path / "saved", state)
    made = sw.convert(tmp_path / "saved", tmp_path / "out", to="dcp", shard_size="9KB")
    assert len(made.files) == 3
    assert made.tied == {"model.head": "model.w"}
    zeros = {name: torch.zeros_like(w) for name in ("w", "head")}
    empty = [{name: torch.zeros_like(one) for name, one in layer.items()} for layer in layers]
    found = {"model": {**zeros, "layers": empty}, "scalar": torch.tensor(0.0), "empty": torch.ones(0, 3)}
    with pytest.warns(UserWarning, match="single process"):
        dcp.load(found, checkpoint_id=tmp_path / "out")
    same(found["model"]["w"], w)
    same(found["model"]["head"], w)
    same(found["scalar"], state["scalar"])
    for layer, wanted in zip(found["model"]["layers"], layers, strict=True):
        for name, one in wanted.items():
            same(layer[name], one)
    convert = pytest.importorskip("torch.distributed.checkpoint.format_utils").dcp_to_torch_save
    convert(tmp_path / "out", tmp_path / "whole.pt")
    whole = torch.load(tmp_path / "whole.pt", weights_only=True)
    same(whole["model"]["layers"][0]["bool"], layers[0]["bool"])


def training_state() -> dict[str, object]:
    """A state of ``get_state_dict``, with values of all plain types."""
    states = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    model = torch.nn.Linear(3, 3)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    weights, slots = states.get_state_dict(model, optimizer)
    w = tensor("float32", 40)
    values = {"step": 7, "rate": 0.1, "name": "ü", "none": None, "bytes": b"\0\xff", "flag": True}
    return {
        "model": weights, "optim": slots, **values, "pair": (w, 3, {"a": w + 1}), "w": w, "numbers": [1, [2]],
        "dicts": [{"a": 1}, 2], "mixed": [w + 2, 5], "empty": {"dict": {}, "list": []}, "pairs": [(w + 3, 1)],
    }  # fmt: skip


@pytest.mark.parametrize("source", ["stepwell", "dcp", "torch"])
def test_dcp_loads_a_training_state_bit_for_bit(tmp_path: Path, source: str) -> None:
    dcp = pytest.importorskip("torch.distributed.checkpoint")
    state = training_state()
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.save(state, tmp_path / "torch")
    sw.save(tmp_path / "stepwell", state)
    sw.export(tmp_path / source, tmp_path / "out", to="dcp")
    theirs, ours = (dcp.FileSystemReader(tmp_path / name).read_metadata() for name in ("dcp", "out"))
    assert ours.planner_data == theirs.planner_data
    assert ours.state_dict_metadata.keys() == theirs.state_dict_metadata.keys()
    found = {
        **dict.fromkeys(state, "to be replaced"),
        "model": {name: torch.zeros_like(one) for name, one in state["model"].items()},
        "optim": json.loads(json.dumps(state["optim"], default=lambda one: [])),
        "w": torch.zeros(40), "dicts": [{"a": 0}, 0], "mixed": [torch.zeros(40), 0], "empty": {"dict": {}, "list": 0},
    }  # fmt: skip
    slots = state["optim"]["state"]
    found["optim"]["state"] = {
        name: {slot: torch.zeros_like(one) for slot, one in one.items()} for name, one in slots.items()
    }
    dcp.load(found, checkpoint_id=tmp_path / "out", no_dist=True)
    found["model"] = OrderedDict(found["model"])
    assert_equal(found, state)
    with sw.open(tmp_path / "dcp") as one:
        assert not one.diff(tmp_path / "out")


def assert_equal(found: object, wanted: object) -> None:
    assert type(found) is type(wanted)
    if isinstance(wanted, torch.Tensor):
        same(found, wanted)
    elif isinstance(wanted, dict):
        assert list(found) == list(wanted)
        for key, one in wanted.items():
            assert_equal(found[key], one)
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted)
        for pair in zip(found, wanted, strict=True):
            assert_equal(*pair)
    else:
        assert found == wanted


def test_dcp_refuses_values_that_are_not_plain_by_name(tmp_path: Path) -> None:
    sw.save(tmp_path / "saved", {"w": torch.ones(3), "tags": {"a"}, "step": 7})
    with pytest.raises(sw.MisuseError, match=r"dcp cannot hold leaf `tags`: .* plain Python values only"):
        sw.convert(tmp_path / "saved", tmp_path / "out", to="dcp")
    assert sw.convert(tmp_path / "saved", tmp_path / "out", to="dcp", objects="skip").skipped == ("tags",)
    assert sw.restore(tmp_path / "out", include="step")["step"] == 7


def test_values_with_one_name_in_dcp_are_refused(tmp_path: Path) -> None:
    sw.save(tmp_path / "saved", {"a": {"b": 1}, "a.b": torch.ones(2)})
    with pytest.raises(sw.MisuseError, match=r"`a/b` and leaf `a.b` have the same name .*'a.b'"):
        sw.convert(tmp_path / "saved", tmp_path / "out", to="dcp")


def test_an_object_of_dcp_may_have_long_tensors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stepwell.formats.dcp._MAX_OBJECT_BYTES", 2048)
    sw.save(tmp_path / "saved", {"pair": (torch.arange(5000), 1), "long": "x" * 3000})
    assert sw.export(tmp_path / "saved", tmp_path / "out", to="dcp").verified
    found = sw.restore(tmp_path / "out")
    assert found["pair"][0].tolist() == list(range(5000))
    assert "opaque object of" in repr(found["long"])


def test_dcp_reads_lists_that_lack_elements(tmp_path: Path) -> None:
    formats = pytest.importorskip("torch.distributed.checkpoint.format_utils")
    one = torch.ones(3)
    torch.save({"first": [{1}, one], "last": [one, {1}], "in": [[{1}, one], [one]]}, tmp_path / "c.pt")
    made = sw.export(tmp_path / "c.pt", tmp_path / "dcp", to="dcp", objects="skip")
    assert made.skipped == ("first[0]", "last[1]", "in[0][0]")
    formats.dcp_to_torch_save(tmp_path / "dcp", tmp_path / "back.pt")
    found = torch.load(tmp_path / "back.pt", weights_only=True)
    assert str(found) == str({"first": {"1": one}, "last": [one], "in": [{"1": one}, [one]]})


def test_safetensors_of_torch_reads_an_export(tmp_path: Path) -> None:
    load_file = pytest.importorskip("safetensors.torch").load_file
    state = {dtype: tensor(dtype, 30, 50) for dtype in DTYPES if dtype not in ("complex32", "complex128")}
    sw.save(tmp_path / "saved", state)
    sw.export(tmp_path / "saved", tmp_path / "out")
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == state.keys()
    for name, one in state.items():
        same(found[name], one)


def test_transformers_loads_an_export_with_its_ties(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True
    )
    model = transformers.LlamaForCausalLM(config)
    sw.save(tmp_path / "saved", {"model": model.state_dict()})
    made = sw.export(tmp_path / "saved", tmp_path / "out", subtree="model", cast="float32")
    assert made.tied == {"lm_head.weight": "model.embed_tokens.weight"}
    (tmp_path / "out" / "config.json").write_text(json.dumps(config.to_dict(), default=str))
    loaded = transformers.LlamaForCausalLM.from_pretrained(tmp_path / "out")
    for name, one in model.state_dict().items():
        same(loaded.state_dict()[name], one)


def test_from_pretrained_reads_an_export_of_a_training(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=2, tie_word_embeddings=True
    )
    model = transformers.LlamaForCausalLM(config)
    model.save_pretrained(tmp_path / "start")
    (tmp_path / "start" / "tokenizer.json").write_text("{}")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    tokens = torch.randint(0, 64, (2, 16))
    export = sw.Export(tmp_path / "hf" / "{step}", every=2, subtree="model", files=tmp_path / "start")
    with sw.CheckpointManager(tmp_path / "run", exports=[export]) as manager:
        for step in (1, 2):
            model(tokens, labels=tokens).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            manager.save(step, {"model": model.state_dict(), "optimizer": optimizer.state_dict()})
    written = {one.name for one in (tmp_path / "hf" / "2").iterdir()}
    assert written >= {"config.json", "tokenizer.json", "model.safetensors", "stepwell_export.json"}
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "hf" / "2")
    assert loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    with torch.no_grad():
        same(loaded(tokens).logits, model(tokens).logits)
