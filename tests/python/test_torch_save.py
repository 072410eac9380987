"""Files of ``torch.save``, written by torch: opened, restored bit for bit, in part and verified."""

from __future__ import annotations

import argparse
import datetime
import decimal
import fractions
import os
import pathlib
import pickle
import types
import uuid
import zipfile
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from command_line import run
from stepwell import _core

torch = pytest.importorskip("torch")

DTYPES = [
    "bool uint8 uint16 uint32 uint64 int8 int16 int32 int64 float16 bfloat16 float32 float64 complex64 complex128",
    "float8_e4m3fn float8_e4m3fnuz float8_e5m2 float8_e5m2fnuz float8_e8m0fnu",
]
PROTOCOLS = [2, 4, 5]


def tensor(*shape: int, dtype: str = "float32") -> Any:
    """A tensor of random bytes."""
    dtype_ = getattr(torch, dtype)
    count = int(np.prod(shape)) * dtype_.itemsize
    generator = torch.Generator().manual_seed(count)
    raw = torch.randint(0, 2 if dtype == "bool" else 256, (count,), dtype=torch.uint8, generator=generator)
    return raw.view(dtype_).reshape(shape)


def raw(value: Any) -> bytes:
    """The bytes of a tensor's elements, row-major."""
    plain = value.resolve_conj().resolve_neg() if isinstance(value, torch.Tensor) else value
    if isinstance(plain, torch.Tensor):
        plain = plain.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return bytes(np.ascontiguousarray(plain).tobytes())


def check(found: Any, expected: Any, where: str = "") -> None:
    """Compares restored values with those of torch, tensors bit for bit."""
    if isinstance(expected, torch.Tensor):
        assert isinstance(found, np.ndarray), where
        assert found.dtype.name == str(expected.dtype).removeprefix("torch."), where
        assert found.shape == tuple(expected.shape), where
        assert found.tobytes() == raw(expected), where
    elif isinstance(expected, np.ndarray):
        assert found.dtype == expected.dtype, where
        np.testing.assert_array_equal(found, expected)
    elif isinstance(expected, dict) and not isinstance(expected, Counter):
        assert list(found) == list(expected), where
        for key, value in expected.items():
            check(found[key], value, f"{where}/{key}")
    elif isinstance(expected, (list, tuple)):
        assert type(found) is (list if isinstance(expected, list) else tuple), where
        assert len(found) == len(expected), where
        for at, (one, other) in enumerate(zip(found, expected, strict=True)):
            check(one, other, f"{where}[{at}]")
    else:
        assert type(found) is type(expected), where
        assert found == expected or found != found, where


def saved(path: Path, value: object, **options: Any) -> Path:
    torch.save(value, path, **options)
    return path


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("is_zip", [True, False])
def test_every_dtype_is_restored_bit_for_bit(tmp_path: Path, is_zip: bool, protocol: int) -> None:
    state = {name: tensor(3, 5, dtype=name) for name in " ".join(DTYPES).split()}
    path = saved(
        tmp_path / "a file.v1.pt", state, _use_new_zipfile_serialization=is_zip, pickle_protocol=protocol
    )
    check(sw.restore(path), state)
    assert sw.open(path).metadata().writer == "torch.save"


def test_packed_dtypes_are_listed(tmp_path: Path) -> None:
    state = {"x": torch.zeros(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2), "y": torch.ones(2)}
    with sw.open(saved(tmp_path / "x.pt", state)) as checkpoint:
        assert repr(checkpoint["x"]) == "<opaque torch tensor of torch.float4_e2m1fn_x2>"
        assert checkpoint["y"].load().tolist() == [1, 1]


def views() -> dict[str, Any]:
    """Tensors over shared storages."""
    base = tensor(7, 6, 5)
    complex_ = tensor(4, 3, dtype="complex64")
    return {
        "base": base,
        "tie": base,
        "same": base.view(7, 6, 5),
        "rows": base[2:5],
        "columns": base[:, 1::2],
        "transposed": base.permute(2, 0, 1),
        "expanded": base[:1].expand(9, 6, 5),
        "scalar": base[3, 2, 1],
        "diagonal": base[:, 0, :5].diagonal(),
        "none": base[:0],
        "zero": torch.zeros(0, 3),
        "number": torch.tensor(5),
        "channels": tensor(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "conj": complex_.conj(),
        "complex": complex_,
        "negated": tensor(4, dtype="complex64").conj().imag,
        "double": tensor(3, dtype="float64"),
        "strided": torch.arange(20).as_strided((3, 4), (2, 5)),
        "one": torch.arange(20).as_strided((1, 2), (1000, 3)),
    }


@pytest.mark.parametrize("is_zip", [True, False])
def test_views_of_storages_are_read_in_place(tmp_path: Path, is_zip: bool) -> None:
    state = views()
    path = saved(tmp_path / "x.pt", state, _use_new_zipfile_serialization=is_zip)
    restored = sw.restore(path)
    check(restored, state)
    assert restored["tie"] is restored["base"] is restored["same"]
    with sw.open(path) as checkpoint:
        np.testing.assert_array_equal(checkpoint["transposed"][1:4, 2], state["transposed"][1:4, 2].numpy())
    target = {"diagonal": np.zeros(5, np.float64)}
    memory = target["diagonal"]
    sw.restore(path, into=target, include="diagonal")
    np.testing.assert_array_equal(memory, state["diagonal"].double().numpy())


def test_big_endian_files_are_swapped(tmp_path: Path) -> None:
    state = {name: tensor(3, 5, dtype=name) for name in " ".join(DTYPES).split()}
    state["view"] = state["int32"].t()
    torch.serialization.set_default_load_endianness(torch.serialization.LoadEndianness.LITTLE)
    path = saved(tmp_path / "x.pt", state)
    import zipfile

    other = tmp_path / "big.pt"
    storages = {one.untyped_storage().data_ptr(): one for one in state.values()}
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(other, "w") as new:
        for name in old.namelist():
            content = old.read(name)
            if name.endswith("/byteorder"):
                content = b"big"
            elif "/data/" in name:
                stored = list(storages.values())[int(name.rpartition("/")[2])]
                size = stored.dtype.itemsize // (2 if stored.is_complex() else 1)
                content = np.frombuffer(content, np.uint8).reshape(-1, size)[:, ::-1].tobytes()
            new.writestr(name, content)
    check(sw.restore(other), state)


def test_training_state_is_restored(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 2))
    model.tied = model[0].weight
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model(torch.randn(5, 4)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "rng": torch.get_rng_state(),
        "parameters": list(model.parameters()),
    }
    path = saved(tmp_path / "x.pt", state)
    found = sw.restore(path)
    check(found, state)
    assert type(found["model"]) is OrderedDict
    assert found["model"]["tied"] is found["model"]["0.weight"]
    target = {"model": {name: torch.zeros_like(one) for name, one in model.state_dict().items()}}
    sw.restore(path, into=target, include="model/**")
    assert all(torch.equal(target["model"][name], one) for name, one in model.state_dict().items())


def values() -> dict[str, Any]:
    """Values beside tensors, with what they are restored as."""
    zone = datetime.timezone(datetime.timedelta(hours=2), "there")
    return {
        "none": None,
        "numbers": [1, -5, 2**40, -(2**70), 2.5, float("inf"), True],
        "text": "ümläut\n",
        "bytes": b"\0\xff",
        "bytearray": bytearray(b"ab"),
        "complex": 1 + 2j,
        "set": {1, 2, 3},
        "frozen": frozenset({"a"}),
        "date": datetime.date(2024, 2, 29),
        "datetime": datetime.datetime(2024, 2, 29, 23, 59, 58, 123456, tzinfo=zone),
        "time": datetime.time(1, 2, 3, 4),
        "delta": datetime.timedelta(-1, 2, 3),
        "decimal": decimal.Decimal("-1.25"),
        "fraction": fractions.Fraction(-1, 3),
        "uuid": uuid.UUID(int=7),
        "counter": Counter("abca"),
        "deque": deque([1, 2], 3),
        "scalar": np.float32(1.5),
        "when": np.datetime64("2024-01-01", "ns"),
        "dtype": np.dtype("<i4"),
        "empty": [{}, [], ()],
        "nested": [{"lr": 0.1, "betas": (0.9, 0.99), "params": [0, 1]}],
        "dots": [..., None],
        3: {"integer": "key"},
    }


@pytest.mark.parametrize("protocol", PROTOCOLS)
@pytest.mark.parametrize("is_zip", [True, False])
def test_values_beside_tensors_are_restored(tmp_path: Path, is_zip: bool, protocol: int) -> None:
    state = values()
    path = saved(tmp_path / "x.pt", state, _use_new_zipfile_serialization=is_zip, pickle_protocol=protocol)
    check(sw.restore(path), state)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_some_values_have_a_simpler_form(tmp_path: Path, protocol: int) -> None:
    state = {
        "namespace": argparse.Namespace(lr=0.1, layers=[1, 2], x=torch.ones(2)),
        "simple": types.SimpleNamespace(a=1),
        "default": defaultdict(list, a=[torch.ones(1)]),
        "path": pathlib.PosixPath("/a/b.txt"),
        "relative": pathlib.PurePosixPath("a/b"),
        "size": torch.Size([2, 3]),
        "dtype": torch.bfloat16,
        "device": torch.device("cuda", 1),
        "deque": deque([torch.ones(1)], 4),
    }
    expected = {
        "namespace": {"lr": 0.1, "layers": [1, 2], "x": torch.ones(2)},
        "simple": {"a": 1},
        "default": {"a": [torch.ones(1)]},
        "path": "/a/b.txt",
        "relative": "a/b",
        "size": (2, 3),
        "dtype": "torch.bfloat16",
        "device": "cuda:1",
        "deque": [torch.ones(1)],
    }
    check(sw.restore(saved(tmp_path / "x.pt", state, pickle_protocol=protocol)), expected)


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_numpy_arrays_are_restored(tmp_path: Path, protocol: int) -> None:
    base = np.arange(24, dtype=np.float64).reshape(4, 6)
    state = {
        "plain": base,
        "fortran": np.asfortranarray(base),
        "transposed": base.reshape(2, 3, 4).transpose(1, 0, 2),
        "slice": base[1:3, ::2],
        "big": base.astype(">f4").astype("<f4"),
        "empty": np.zeros((0, 3), np.int16),
        "zero": np.array(5, np.uint8),
        "dates": np.array(["2024-01-01"], "M8[s]"),
        "random": np.random.RandomState(1).get_state(),
    }
    check(sw.restore(saved(tmp_path / "x.pt", state, pickle_protocol=protocol)), state)
    big = {"big": base.astype(">f4")}
    found = sw.restore(saved(tmp_path / "b.pt", big, pickle_protocol=protocol))
    np.testing.assert_array_equal(found["big"], big["big"])
    assert found["big"].dtype == np.dtype("f4")


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_arrays_of_a_pickle_are_read_from_the_file(tmp_path: Path, protocol: int) -> None:
    # The bytes of "ascii" are text as they are, those of the others become longer text.
    state = {
        "x": np.arange(1000, dtype=np.float32),
        "y": np.arange(9, dtype=">i8"),
        "ascii": np.arange(9, dtype=np.int16),
        "f": np.asfortranarray(np.arange(300, dtype=np.int16).reshape(20, 15)),
        "empty": np.zeros((0, 3), np.float32),
    }
    path = saved(tmp_path / "x.pt", state, pickle_protocol=protocol)
    with sw.open(path) as checkpoint:
        assert checkpoint["ascii"].dtype == np.int16
        assert type(checkpoint["empty"]) is type(checkpoint["ascii"]), "an array, not an object"
        assert checkpoint["f"][3:5, 7].tolist() == [52, 67]
        assert checkpoint.verify().ok
        assert checkpoint["x"][500:502].tolist() == [500, 501]
    target = {"x": np.zeros(1000, np.float32)}
    memory = target["x"]
    sw.restore(path, into=target, include="x")
    assert memory[999] == 999


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_plain_pickles_with_tensors_are_read(tmp_path: Path, protocol: int) -> None:
    state = {"w": tensor(5, 4), "t": tensor(5, 4).t(), "h": tensor(3, dtype="bfloat16"), "n": 3}
    path = tmp_path / "x.pkl"
    path.write_bytes(pickle.dumps(state, protocol))
    found = sw.restore(path)
    check(found, state)


class Marked(torch.Tensor):
    """A subclass of a tensor."""


class Unknown:
    """A class that the reader must not import."""

    def __init__(self) -> None:
        self.x = torch.ones(3)


def test_tensors_with_attributes_are_tensors(tmp_path: Path) -> None:
    tagged = torch.ones(3)
    tagged.tag = "x"
    parameter = torch.nn.Parameter(torch.ones(2))
    parameter.tag = "y"
    state = {"tagged": tagged, "marked": torch.zeros(2).as_subclass(Marked), "parameter": parameter}
    found = sw.restore(saved(tmp_path / "x.pt", state))
    assert {name: one.tolist() for name, one in found.items()} == {
        "tagged": [1, 1, 1],
        "marked": [0, 0],
        "parameter": [1, 1],
    }


def test_unknown_parts_do_not_cost_the_file(tmp_path: Path) -> None:
    state = {
        "object": Unknown(),
        "list": [1, Unknown(), torch.ones(2)],
        "function": pytest.importorskip,
        "sparse": torch.eye(3).to_sparse(),
        "meta": torch.zeros(3, device="meta"),
        "quantized": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8),
        "objects": np.array([{}, 1], object),
        "texts": np.array(["a"]),
        "keys": {1j: torch.ones(1)},
        "dimensions": torch.ones([1] * 65),
        "long key": {"x" * 5000: torch.ones(1)},
        "w": torch.ones(2),
    }
    with sw.open(saved(tmp_path / "x.pt", state)) as checkpoint:
        assert checkpoint["w"].load().tolist() == [1, 1]
        assert checkpoint["list"][2].load().tolist() == [1, 1]
        shown = {name: repr(checkpoint[name]) for name in state if name not in ("w", "list")}
    assert shown == {
        "object": f"<opaque {__name__}.Unknown>",
        "function": "<opaque _pytest.outcomes.importorskip>",
        "sparse": "<opaque torch sparse tensor>",
        "meta": "<opaque torch meta tensor>",
        "quantized": "<opaque torch quantized tensor>",
        "objects": "<opaque numpy.ndarray of numpy.dtype O8>",
        "texts": "<opaque numpy.ndarray of numpy.dtype U1>",
        "keys": "<opaque a dict with keys of type complex>",
        "dimensions": "<opaque torch tensor of float32 with 65 dimensions, more than 64>",
        "long key": f"<opaque a dict of tensors with the key '{'x' * 40}'…, which has 5000 characters and is no name of at most 4096 bytes>",
    }


@pytest.mark.parametrize("key", [("a", ("b", 1)), (), 0.5, None, True, b"k", float("nan")])
@pytest.mark.parametrize("cls", [dict, OrderedDict])
def test_odd_keys_beside_tensors_are_their_text(
    tmp_path: Path, key: object, cls: Callable[..., dict[object, object]]
) -> None:
    state = {"in": cls({key: torch.ones(2), "x": torch.zeros(3), 7: {key: [torch.ones(1), 2]}})}
    found = sw.restore(saved(tmp_path / "x.pt", state))["in"]
    assert list(found) == [repr(key), "x", 7]
    check(found[repr(key)], torch.ones(2))
    check(found["x"], torch.zeros(3))
    check(found[7][repr(key)][0], torch.ones(1))
    taken = saved(tmp_path / "y.pt", {"in": {key: torch.ones(2), repr(key): torch.zeros(3)}})
    assert "opaque a dict" in repr(sw.restore(taken)["in"])


def test_odd_keys_of_plain_values_stay_if_they_can(tmp_path: Path) -> None:
    state = {"plain": {None: 1, 0.5: 2, b"k": 3}, "tuples": {(1, "a"): 1}}
    found = sw.restore(saved(tmp_path / "x.pt", state))
    assert found == {"plain": state["plain"], "tuples": {"(1, 'a')": 1}}


@pytest.mark.parametrize("key", [("x" * 5000,), tuple(range(100)), frozenset({1}), 1 << 70])
def test_keys_without_a_short_text_leave_a_dict_opaque(tmp_path: Path, key: object) -> None:
    found = sw.restore(saved(tmp_path / "x.pt", {"in": {key: torch.ones(2)}, "w": torch.ones(1)}))
    assert repr(found["in"]) == f"<opaque a dict with keys of type {type(key).__name__}>"


def test_a_bare_tensor_is_a_checkpoint(tmp_path: Path) -> None:
    check(sw.restore(saved(tmp_path / "x.pt", torch.arange(5))), torch.arange(5))


def test_a_deflated_pickle_is_read(tmp_path: Path) -> None:
    state = {"x": torch.ones(3), "n": [1] * 1000}
    path = saved(tmp_path / "x.pt", state)
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(tmp_path / "y.pt", "w") as new:
        for name in old.namelist():
            how = zipfile.ZIP_DEFLATED if name.endswith("data.pkl") else zipfile.ZIP_STORED
            new.writestr(name, old.read(name), how)
    check(sw.restore(tmp_path / "y.pt"), state)


def deflated(path: Path, to: Path) -> Path:
    """The archive again, with all members compressed."""
    with zipfile.ZipFile(path) as old, zipfile.ZipFile(to, "w", zipfile.ZIP_DEFLATED) as new:
        for name in old.namelist():
            new.writestr(name, old.read(name))
    return to


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_compressed_storages_are_read(tmp_path: Path, protocol: int) -> None:
    state = {
        **views(),
        "all": {name: tensor(3, 5, dtype=name) for name in DTYPES[0].split()},
        "array": np.arange(300.0).reshape(20, 15),
        "big": np.arange(9, dtype=">i8").astype("<i8"),
    }
    path = deflated(saved(tmp_path / "x.pt", state, pickle_protocol=protocol), tmp_path / "y.pt")
    check(sw.restore(path), state)
    with sw.open(path) as checkpoint:
        assert checkpoint["all"]["float32"][1:2].tobytes() == raw(state["all"]["float32"][1:2])
    report = sw.verify(path)
    assert report.ok
    assert report.unguarded_nbytes < report.nbytes


def test_compressed_storages_that_lie_are_refused(tmp_path: Path) -> None:
    numbers = torch.arange(100_000, dtype=torch.int32)
    path = deflated(saved(tmp_path / "x.pt", {"x": numbers, "s": torch.ones(3)}), tmp_path / "y.pt")
    with zipfile.ZipFile(path) as members:
        member = next(one for one in members.infolist() if one.filename.endswith("data/0"))
    sound = path.read_bytes()
    entry = sound.rindex(member.filename.encode()) - 46

    def refused(at: int, value: bytes, says: str) -> None:
        path.write_bytes(sound[:at] + value + sound[at + len(value) :])
        with pytest.raises(sw.CorruptCheckpoint, match=says) as failure:
            sw.restore(path)
        assert str(path) in str(failure.value)

    refused(member.header_offset + 2000, b"\xff" * 8, "its compressed part at byte|checksum")
    refused(entry + 16, b"\1\2\3\4", "its checksum is")
    refused(entry + 24, (399_999).to_bytes(4, "little"), "has 399999 bytes of 400000")
    refused(entry + 24, (400_001).to_bytes(4, "little"), "it ends after 400000 of 400001")
    refused(entry + 24, (1 << 31).to_bytes(4, "little"), "cannot become 2147483648")


def test_shards_with_an_index_are_one_state(tmp_path: Path) -> None:
    import json

    state = {name: tensor(3, 4) + at for at, name in enumerate("abcd")}
    saved(tmp_path / "pytorch_model-00001-of-00002.bin", {"a": state["a"], "b": state["b"], "x": 1})
    saved(tmp_path / "pytorch_model-00002-of-00002.bin", {"c": state["c"], "d": state["d"]})
    places = {name: f"pytorch_model-0000{1 + (name in 'cd')}-of-00002.bin" for name in state}
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": places}))
    check(sw.restore(tmp_path), state)
    check(sw.restore(index), state)
    index.write_text(json.dumps({"weight_map": places | {"e": places["a"]}}))
    with pytest.raises(sw.CorruptCheckpoint, match="tensor `e` is not in pytorch_model-00001"):
        sw.open(tmp_path)


def test_files_of_no_ranks_are_no_checkpoint(tmp_path: Path) -> None:
    saved(tmp_path / "model_world_size_0_rank_0.pt", {"w": tensor(2)})
    with pytest.raises(sw.StepwellError):
        sw.open(tmp_path)


def test_an_adapter_is_read_only_without_a_model(tmp_path: Path) -> None:
    saved(tmp_path / "adapter_model.bin", {"lora": tensor(2)})
    assert set(sw.restore(tmp_path)) == {"lora"}
    saved(tmp_path / "pytorch_model.bin", {"w": tensor(3)})
    assert set(sw.restore(tmp_path)) == {"w"}


def test_the_command_line_reads_them(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", {"w": torch.ones(3), "o": Unknown(), "args": argparse.Namespace(lr=0.5)})
    for command in (["show"], ["show", "--layout"], ["plan"], ["verify"]):
        shown = run(*command, str(path))
        assert shown.exit_code == 0, (command, shown.output)
    assert "0.5" in run("cat", str(path), "args/lr").output
    assert "Unknown" in run("show", str(path)).output


def flip(path: Path, at: int) -> None:
    """Inverts a bit of a file."""
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def test_verify_checks_the_checksums_of_members(tmp_path: Path) -> None:
    base = torch.arange(3_000_000.0)
    state = {"a": base[:10], "b": base[5:], "c": torch.ones(4), "n": 3}
    path = saved(tmp_path / "x.pt", state)
    report = sw.verify(path)
    assert report.ok
    assert 0 < report.unguarded_nbytes < 4000  # headers and the directory
    directory = _core.ZipDirectory(path)
    (offset,) = directory.contents([[one[0] for one in directory.members()].index("x/data/0")])
    for at, leaves in ((offset + 6 * 4, ("a", "b")), (offset + 11_999_999, ("b",))):
        flip(path, at)
        damage = sw.verify(path).damages
        assert len(damage) == 1
        assert Path(damage[0].file).name == "x.pt"
        assert set(leaves) <= set(damage[0].leaves) == {"a", "b"}
        assert "CRC-32" in damage[0].what
        assert run("verify", str(path)).exit_code == 1
        flip(path, at)
    assert sw.verify(path).ok


def reads() -> int:
    """The system calls that have read, of this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("syscr"))


def test_only_the_needed_storages_are_looked_for(tmp_path: Path) -> None:
    state = {f"layers.{number}.weight": torch.full((64, 64), float(number)) for number in range(300)}
    path = saved(tmp_path / "x.pt", state)
    before = reads()
    with sw.open(path) as checkpoint:
        assert reads() - before < 60
        before = reads()
        assert checkpoint["layers.7.weight"][...].tobytes() == raw(state["layers.7.weight"])
        assert reads() - before < 10
    found = sw.restore(path)
    assert all(found[name].tobytes() == raw(one) for name, one in state.items())


def test_leaves_far_apart_have_their_own_values(tmp_path: Path) -> None:
    path = saved(
        tmp_path / "x.pt", {f"l.{number}": torch.full((4,), float(number)) for number in range(1100)}
    )
    for numbers in ([3, 1000, 17, 512], [1000, 3], [1024, 1, 8, 64]):
        found = sw.restore(path, include=[f"l.{number}" for number in numbers])
        assert {name: array[0] for name, array in found.items()} == {f"l.{one}": one for one in numbers}


def test_damage_of_the_pickle_shows_when_it_is_opened(tmp_path: Path) -> None:
    path = saved(tmp_path / "x.pt", {"number": 12345, "x": torch.ones(2)})
    flip(path, path.read_bytes().index(b"number") + 8)
    with pytest.raises(sw.CorruptCheckpoint, match="checksum"):
        sw.open(path)


def test_files_without_checksums_are_unguarded(tmp_path: Path) -> None:
    torch.serialization.set_crc32_options(False)
    try:
        path = saved(tmp_path / "x.pt", {"x": torch.arange(5)})
    finally:
        torch.serialization.set_crc32_options(True)
    check(sw.restore(path), {"x": torch.arange(5)})
    report = sw.verify(path)
    assert report.ok
    assert report.unguarded_nbytes == report.nbytes == path.stat().st_size
    old = saved(tmp_path / "y.pt", {"x": torch.arange(5)}, _use_new_zipfile_serialization=False)
    assert sw.verify(old).unguarded_nbytes == old.stat().st_size


def write_rank(path: Path, whole: dict[str, Any], mesh_shape: tuple[int, ...], rank: int) -> None:
    """Writes the file of one rank of a job that has such a mesh."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=int(np.prod(mesh_shape)), store=FakeStore())
    mesh = init_device_mesh("cpu", mesh_shape)
    rest = [Replicate()] * (mesh.ndim - 1)
    placements = {
        "w": [*rest, Shard(0)],
        "small": [Shard(0), *rest],
        "copied": [Replicate(), *rest],
        "columns": [Shard(1)] * mesh.ndim,
    }
    state: dict[str, Any] = {
        name: distribute_tensor(one, mesh, placements[name], src_data_rank=None)
        for name, one in whole.items()
    }
    state["w"] = torch.nn.Parameter(state["w"])
    saved(path, state | {"plain": torch.ones(3), "step": 7})


def of_ranks(folder: Path, mesh_shape: tuple[int, ...], prefix: str = "model") -> dict[str, Any]:
    """Writes a file for each rank. Returns the whole state."""
    whole = {"w": tensor(10, 7), "small": tensor(2), "copied": tensor(2, 3), "columns": tensor(4, 6)}
    world = int(np.prod(mesh_shape))
    for rank in range(world):
        # Each rank is a process: torch keeps meshes of a process.
        child = os.fork()
        if child == 0:
            try:
                write_rank(folder / f"{prefix}_world_size_{world}_rank_{rank}.pt", whole, mesh_shape, rank)
            finally:
                os._exit(0)
        os.waitpid(child, 0)
    return whole | {"plain": torch.ones(3), "step": 7}


@pytest.mark.parametrize("mesh_shape", [(1,), (4,), (2, 2), (2, 3)])
def test_files_of_all_ranks_are_whole_tensors(tmp_path: Path, mesh_shape: tuple[int, ...]) -> None:
    expected = of_ranks(tmp_path, mesh_shape)
    check(sw.restore(tmp_path), expected)
    with sw.open(tmp_path) as checkpoint:
        np.testing.assert_array_equal(checkpoint["w"][2:7, 3], expected["w"][2:7, 3].numpy())


def test_a_file_of_one_rank_has_its_parts(tmp_path: Path) -> None:
    expected = of_ranks(tmp_path, (4,))
    found = sw.restore(tmp_path / "model_world_size_4_rank_3.pt")
    np.testing.assert_array_equal(found["w"], expected["w"][9:].numpy())
    assert found["small"].shape == (0,)
    (tmp_path / "model_world_size_4_rank_2.pt").unlink()
    with pytest.raises(sw.CorruptCheckpoint, match=r"of 4 ranks: \[2\] are missing"):
        sw.open(tmp_path)


def test_model_and_optimizer_of_ranks_are_two_parts(tmp_path: Path) -> None:
    model, optimizer = of_ranks(tmp_path, (2,)), of_ranks(tmp_path, (2,), "optim")
    check(sw.restore(tmp_path), {"model": model, "optim": optimizer})


class Writer:
    """Changes a file while a state with it is restored."""

    def __init__(self, change: Callable[[], object]) -> None:
        self.change = change

    def state_dict(self) -> dict[str, int]:
        return {"x": 0}

    def load_state_dict(self, state: object) -> None:
        self.change()


def test_a_file_that_is_written_over_meanwhile_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "state.pt"
    file.write_bytes(pickle.dumps({"w": np.arange(4.0), "s": {"x": 1}}, protocol=4))
    content = file.read_bytes()
    state = {"w": np.zeros(4), "s": Writer(lambda: file.write_bytes(content))}
    with pytest.raises(sw.CorruptCheckpoint, match=r"written to while it was read.*two states") as failure:
        sw.restore(file, into=state)
    assert failure.value.file == str(file)
    with sw.CheckpointManager(tmp_path / "run") as mgr, pytest.raises(sw.CorruptCheckpoint):
        mgr.resume(state, start=file)
    with sw.open(file) as checkpoint, pytest.raises(sw.CorruptCheckpoint):
        checkpoint.restore(into=state)


def test_a_file_that_is_replaced_meanwhile_is_restored(tmp_path: Path) -> None:
    file = tmp_path / "state.pt"
    file.write_bytes(pickle.dumps({"w": np.arange(4.0), "s": {"x": 1}}, protocol=4))
    (tmp_path / "new").write_bytes(b"another one")
    for change in (lambda: (tmp_path / "new").replace(file), file.unlink):
        copy = file.read_bytes()
        state = {"w": np.zeros(4), "s": Writer(change)}
        assert (sw.restore(file, into=state)["w"] == np.arange(4.0)).all()
        file.write_bytes(copy)


def test_verify_checks_compressed_members_without_a_tensor(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(9), "s": torch.sparse_coo_tensor([[0, 1]], [1.0, 2.0], (4,))}, tmp_path / "a")
    with zipfile.ZipFile(tmp_path / "a") as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
        crcs = {row.filename: row.CRC for row in archive.infolist()}
    for name in contents:
        damaged = {**contents, name: contents[name][:-1] + b"\xff"}
        path = tmp_path / "c.pt"
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for member, content in damaged.items():
                archive.writestr(member, content)
            archive.getinfo(name).CRC = crcs[name]  # that of the member before the damage
        assert not sw.verify(path).ok, name
