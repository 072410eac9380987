"""Checkpoints of torch.distributed.checkpoint open, restore and verify without torch."""

from __future__ import annotations

import collections
import dataclasses
import datetime
import enum
import io
import pickle
import re
import shutil
import subprocess
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from stepwell.formats.dcp import _merged
from stepwell.formats.dcp_metadata import Part, Place, Saved, SavedTensor

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

from ranks import run_forked

torch = pytest.importorskip("torch")
zstandard = pytest.importorskip("zstandard")
dcp = pytest.importorskip("torch.distributed.checkpoint")
from torch.distributed.checkpoint._extension import ZStandard  # noqa: E402
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner  # noqa: E402
from torch.distributed.checkpoint.filesystem import SerializationFormat  # noqa: E402
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter  # noqa: E402

DTYPES = [
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
    *("complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64"),
]


def save(state: dict[str, Any], path: Path, **options: object) -> Path:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, **options), no_dist=True)
    return path


def raw(tensor: Any) -> bytes:
    return tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()


def status(field: str) -> int:
    """A number of bytes of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


def of_every_dtype() -> dict[str, Any]:
    return {
        name: torch.arange(-3, 57).to(getattr(torch, name)).reshape(3, 4, 5)
        for name in DTYPES
        if hasattr(torch, name)
    }


def test_every_dtype_is_read_bit_for_bit(tmp_path: Path) -> None:
    state = of_every_dtype()
    found = sw.restore(save(state, tmp_path / "c"))
    assert set(found) == set(state)
    for name, tensor in state.items():
        assert found[name].dtype.name == name
        assert found[name].shape == tensor.shape
        assert found[name].tobytes() == raw(tensor), name


def test_shapes_strides_and_views_are_read(tmp_path: Path) -> None:
    base = torch.arange(24.0).reshape(4, 6)
    state = {
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
        "transposed": base.t(),
        "channels_last": torch.arange(120.0).reshape(2, 3, 4, 5).to(memory_format=torch.channels_last),
        "part": base[1:3, 2:],
        "expanded": torch.arange(3.0).expand(2, 3),
        "conjugate": torch.tensor([1 + 2j, 3 - 4j]).conj(),
    }
    found = sw.restore(save(state, tmp_path / "c"))
    for name, tensor in state.items():
        np.testing.assert_array_equal(found[name], tensor.resolve_conj().numpy(), err_msg=name)


def test_nested_states_have_their_structure(tmp_path: Path) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    state = {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "names": ["a", "b"],
    }
    found = sw.restore(save(state, tmp_path / "c"))
    assert found["epoch"] == 3
    assert found["names"] == ["a", "b"]
    np.testing.assert_array_equal(found["model"]["0.weight"], model.state_dict()["0.weight"].numpy())
    assert found["optimizer"]["param_groups"][0]["lr"] == 0.5
    np.testing.assert_array_equal(
        found["optimizer"]["state"]["1"]["exp_avg"], optimizer.state_dict()["state"][1]["exp_avg"].numpy()
    )


@pytest.mark.parametrize(
    "options", [{"single_file_per_rank": False}, {"thread_count": 3}, {"sync_files": False}]
)
def test_other_layouts_of_files_are_read(tmp_path: Path, options: dict[str, object]) -> None:
    state = {f"w{i}": torch.full((5, i + 1), float(i)) for i in range(8)}
    found = sw.restore(save(state, tmp_path / "c", **options))
    for name, tensor in state.items():
        np.testing.assert_array_equal(found[name], tensor.numpy())


DCP = "torch,torch.distributed.checkpoint.hf_storage,torch.distributed.tensor"
RANKS = """
    import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.checkpoint.filesystem import SerializationFormat
    from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageWriter
    from torch.distributed.device_mesh import init_device_mesh
    path, rank, world = ROOT, RANK, WORLD
    dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=world)
    mesh, grid = init_device_mesh("cpu", (world,)), init_device_mesh("cpu", (2, world // 2))
    def whole(*shape):
        return torch.arange(float(torch.Size(shape).numel())).reshape(shape)
    state = {
        "rows": distribute_tensor(whole(7, 6), mesh, [Shard(0)]),
        "columns": distribute_tensor(whole(3, 9), mesh, [Shard(1)]),
        "both": distribute_tensor(whole(6, 5, 4), grid, [Shard(0), Shard(2)]),
        "replicated": distribute_tensor(whole(4, 4), grid, [Replicate(), Shard(0)]),
        "plain": whole(3, 3),
        "step": 12,
    }
    dcp.save(state, checkpoint_id=path)
    writer = dcp.FileSystemWriter(path + "/as_safetensors", serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save(state, storage_writer=writer)
    del state["step"]
    files = {name: 1 + at % 2 for at, name in enumerate(state)}
    for name, more in [("parts", {}), ("whole", {"enable_consolidation": True})]:
        writer = HuggingFaceStorageWriter(f"{path}/{name}", files, save_distributed=True, **more)
        dcp.save(state, storage_writer=writer)
"""


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "c"
    run_forked(path.parent, DCP, RANKS, 4, path)
    return path


LOCAL = """
    from torch.distributed.checkpoint.filesystem import SerializationFormat
    import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    path, rank, world = ROOT, RANK, WORLD
    dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=world)
    state = {"same": torch.ones(3), "other": torch.full((2,), float(rank)), f"own{rank}": torch.ones(rank + 1)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), use_collectives=False)
    writer = dcp.FileSystemWriter(path + "/as_safetensors", serialization_format=SerializationFormat.SAFETENSORS)
    dcp.save(state, storage_writer=writer, use_collectives=False)
"""


def test_ranks_that_saved_for_themselves_are_read(tmp_path: Path) -> None:
    path = tmp_path / "c"
    run_forked(tmp_path, DCP, LOCAL, 2, path)
    assert sorted(one.name for one in path.glob("*.metadata")) == ["__0.metadata", "__1.metadata"]
    with sw.open(path) as checkpoint:
        np.testing.assert_array_equal(checkpoint["same"][...], np.ones(3))
        assert checkpoint["own1"].shape == (2,)
        assert "differs between ranks" in repr(checkpoint["other"])
    with sw.open(path / "as_safetensors") as checkpoint:
        assert "of several ranks, without checksums to compare" in repr(checkpoint["same"])
        np.testing.assert_array_equal(checkpoint["own1"][...], np.ones(2))


def test_metadata_of_many_ranks_are_merged_in_linear_time() -> None:
    def of_rank(rank: int) -> Saved:
        places = [Place(f"__{rank}_0.distcp", 9 * at, 9, ()) for at in range(20)]
        parts = [[Part((rank,), (1,), place), Part((1000,), (1,), place)] for place in places]
        return Saved({f"w{at}": SavedTensor("bool", "bool", (1001,), one) for at, one in enumerate(parts)})

    ranks = [of_rank(rank) for rank in range(1000)]
    begun = time.process_time()
    merged = _merged(ranks, [f"__{rank}.metadata" for rank in range(1000)])
    assert time.process_time() - begun < 1
    assert {len(one.parts) for one in merged.tensors.values()} == {1001}
    assert len(merged.copies) == 20 * 999
    assert {(name, one.file) for name, one, _ in merged.copies} == {
        (f"w{at}", "__0_0.distcp") for at in range(20)
    }


def whole(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


@pytest.mark.parametrize("folder", [".", "as_safetensors", "parts", "whole"])
def test_shards_of_four_ranks_are_whole_tensors(sharded: Path, folder: str) -> None:
    found = sw.restore(sharded / folder)
    shapes = {"rows": (7, 6), "columns": (3, 9), "both": (6, 5, 4), "replicated": (4, 4), "plain": (3, 3)}
    for name, shape in shapes.items():
        np.testing.assert_array_equal(found[name], whole(*shape), err_msg=name)
    assert found.get("step", 12) == 12
    assert sw.verify(sharded / folder).ok
    with sw.open(sharded / folder) as checkpoint:
        np.testing.assert_array_equal(checkpoint["both"][2:4, :, 1:3], whole(6, 5, 4)[2:4, :, 1:3])


def test_a_missing_part_of_hugging_face_shards_is_noticed(sharded: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(sharded / "parts", tmp_path / "c")
    shards = sorted(copy.glob("shard-*"))
    assert shards[0].name == "shard-00001-model-00001-of-00002.safetensors"
    # A file alone has its parts.
    assert sw.restore(shards[0])["rows"].shape == (2, 6)
    shards[0].unlink()
    with pytest.raises(sw.CorruptCheckpoint, match=r"`\w+` have \d+ of \d+ elements; is a file missing"):
        sw.open(copy)


def compressed(path: Path) -> tuple[Path, dict[str, Any]]:
    """A checkpoint in streams of zstd."""
    state = {
        **of_every_dtype(),
        "zeros": torch.zeros(1 << 20),
        "random": torch.randn(300, 500),
        "transposed": torch.arange(6e4).reshape(200, 300).t(),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
    }
    others = {"losses": [0.25] * 10_000, "epoch": 3, "text": "x" * 70_000}
    return save({**state, **others}, path, _extensions=[ZStandard()]), state


def test_streams_of_zstd_are_read(tmp_path: Path) -> None:
    path, state = compressed(tmp_path / "c")
    found = sw.restore(path)
    assert (found.pop("losses"), found.pop("epoch"), found.pop("text")) == ([0.25] * 10_000, 3, "x" * 70_000)
    assert set(found) == set(state)
    for name, tensor in state.items():
        assert found[name].tobytes() == raw(tensor), name
    with sw.open(path) as checkpoint:
        np.testing.assert_array_equal(checkpoint["random"][7:9, 3], state["random"][7:9, 3].numpy())
    report = sw.verify(path)
    assert report.ok
    # No checksum of the elements is known before they are decoded.
    assert report.unguarded_nbytes == report.nbytes


def _metadata(path: Path) -> Any:
    with (path / ".metadata").open("rb") as file:
        return pickle.load(file)


def relocated(path: Path, name: str, **changes: object) -> None:
    """Says other things about the place of a part or object."""
    metadata = _metadata(path)
    info = next(info for index, info in metadata.storage_data.items() if index.fqn == name)
    for field, value in changes.items():
        setattr(info, field, value)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def test_streams_of_zstd_that_lie_are_refused(tmp_path: Path) -> None:
    path, _ = compressed(tmp_path / "c")
    (file,) = path.glob("*.distcp")
    sound, metadata = file.read_bytes(), _metadata(path)
    place = next(info for index, info in metadata.storage_data.items() if index.fqn == "random")
    garbage = sound[: place.offset] + b"\0" * 64 + sound[place.offset + 64 :]
    for content, length, says in [
        (sound, place.length - 5000, "`random`.* it has no end"),
        (garbage, place.length, "Unknown frame descriptor"),
        (sound, len(sound), "the file has"),
    ]:
        file.write_bytes(content)
        relocated(path, "random", length=length)
        with pytest.raises(sw.CorruptCheckpoint, match=says):
            sw.restore(path)


def test_bombs_of_zstd_are_bounded(tmp_path: Path) -> None:
    path = save({"w": torch.zeros(1 << 20), "n": [0] * 5}, tmp_path / "c", _extensions=[ZStandard()])
    sw.open(path).close()
    (file,) = path.glob("*.distcp")
    sound, metadata = file.read_bytes(), (path / ".metadata").read_bytes()
    long = io.BytesIO()
    torch.save([b"\0" * (100 << 20)], long)
    zeros = zstandard.ZstdCompressor(level=1).compress(b"\0" * (1 << 28))
    long_object = zstandard.ZstdCompressor(level=1).compress(long.getvalue())
    del long
    for name, stream in [("w", zeros), ("n", zeros), ("n", long_object)]:
        file.write_bytes(sound + stream)
        (path / ".metadata").write_bytes(metadata)
        relocated(path, name, offset=len(sound), length=len(stream))
        before, begun = status("VmRSS"), time.process_time()
        Path("/proc/self/clear_refs").write_text("5")
        if stream is long_object:
            assert repr(sw.open(path)[name]).startswith("<opaque object of more than 256 times")
        elif name == "n":
            assert "that torch.save did not write" in repr(sw.open(path)[name])
        else:
            with pytest.raises(sw.CorruptCheckpoint, match=r"0 members data\.pkl"):
                sw.open(path)
        assert time.process_time() - begun < 1
        assert status("VmHWM") - before < 64 << 20


def test_other_transforms_are_listed_by_name(tmp_path: Path) -> None:
    path, _ = compressed(tmp_path / "c")
    for name in ("random", "epoch"):
        relocated(path, name, transform_descriptors=["stream.zstd/2"])
    with sw.open(path) as checkpoint:
        assert "by stream.zstd/2" in repr(checkpoint["random"])
        assert "by stream.zstd/2" in repr(checkpoint["epoch"])
        assert checkpoint["scalar"].load() == np.float32(3.5)


def as_safetensors(path: Path) -> Path:
    """A checkpoint whose file has two objects, then tensors."""
    state = {**of_every_dtype(), "n": 5, "text": "x", "empty": torch.zeros(0, 3), "scalar": torch.tensor(2.5)}
    for name in ("complex128",):
        del state[name]  # has no name in the format
    return save(state, path, serialization_format=SerializationFormat.SAFETENSORS)


def test_tensors_in_safetensors_are_read_bit_for_bit(tmp_path: Path) -> None:
    found = sw.restore(as_safetensors(tmp_path / "c"))
    assert (found.pop("n"), found.pop("text"), found.pop("empty").shape) == (5, "x", (0, 3))
    assert found.pop("scalar") == np.float32(2.5)
    expected = of_every_dtype()
    assert set(found) == set(expected) - {"complex128"}
    for name, array in found.items():
        assert (array.dtype.name, array.shape) == (name, tuple(expected[name].shape))
        assert array.tobytes() == raw(expected[name]), name


def test_hostile_files_of_safetensors_are_refused(tmp_path: Path) -> None:
    path = as_safetensors(tmp_path / "c")
    (file,) = path.glob("*.distcp")
    sound = file.read_bytes()
    at = sound.index(b"DCP_SHARDING_INFO") - 30
    begin = sound.rindex(b'{"__metadata__"', 0, at + 40) - 8
    offsets = rb"\"bool\": {\"saved_offsets\": [0, 0, 0]"
    assert offsets in sound
    for content, says in [
        (sound[:-1], "the last tensor ends at"),
        (sound + b"\0", "the last tensor ends at"),
        (sound[:begin] + b"\xff" * 8 + sound[begin + 8 :], "a header of at most"),
        (sound[:begin] + b"\0" * 9 + sound[begin + 9 :], "or a file of safetensors were expected"),
        (
            sound.replace(offsets, offsets.replace(b"0, 0, 0", b"0, 1, 0")),
            r"its part at \[0, 0, 0\] is not in",
        ),
        (sound.replace(offsets, offsets.replace(b"0, 0, 0", b"0,    0")), "begins at no element"),
        (sound.replace(offsets, offsets.replace(b"0, 0, 0", b"0,-1, 0")), "begins at no element"),
        (sound.replace(offsets, offsets.replace(b"bool", b"bbbb")), "KeyError"),
        (sound.replace(b'"bool":{"dtype":"BOOL"', b'"bool":{"dtype":"U8"  '), "the metadata say bool"),
    ]:
        assert content != sound
        file.write_bytes(content)
        with pytest.raises((sw.CorruptCheckpoint, sw.errors.FormatError), match=says):
            sw.restore(path)


def test_tensors_of_the_hugging_face_writer_are_read(tmp_path: Path) -> None:
    state = {name: one for name, one in of_every_dtype().items() if name != "complex128"}
    files = {name: 1 + at % 3 for at, name in enumerate(state)}
    for number, mapping in enumerate([None, files]):
        path = tmp_path / str(number)
        dcp.save(state, storage_writer=HuggingFaceStorageWriter(str(path), mapping), no_dist=True)
        assert len(list(path.glob("model-0000?-of-0000?.safetensors"))) == (3 if mapping else 1)
        found = sw.restore(path)
        assert {name: array.tobytes() for name, array in found.items()} == {
            name: raw(one) for name, one in state.items()
        }
        with sw.open(path) as checkpoint:
            assert checkpoint.metadata().custom_metadata == {"DCP_VERSION": "1.0", "format": "pt"}


def test_a_part_of_a_sharded_tensor_reads_its_bytes_only(sharded: Path) -> None:
    with sw.open(sharded) as checkpoint:
        np.testing.assert_array_equal(checkpoint["both"][2:4, :, 1:3], whole(6, 5, 4)[2:4, :, 1:3])
        plan = checkpoint.plan(like={"rows": sw.AS_STORED})
        assert plan.nbytes == 7 * 6 * 4


def test_verify_knows_the_checksums_of_archives(sharded: Path) -> None:
    report = sw.verify(sharded)
    assert report.ok
    file = next(iter(sorted(sharded.glob("__*.distcp"))))
    data = bytearray(file.read_bytes())
    at = data.find(whole(7, 6).tobytes()[: 6 * 4 * 2])
    assert at > 0
    data[at + 5] ^= 0x10
    file.write_bytes(data)
    damaged = sw.verify(sharded)
    assert not damaged.ok
    assert any("rows" in leaf for one in damaged.damages for leaf in one.leaves)
    data[at + 5] ^= 0x10
    file.write_bytes(data)


def reads() -> int:
    """The system calls that have read, of this process."""
    lines = Path("/proc/self/io").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith("syscr"))


def test_opening_takes_little_time(tmp_path: Path) -> None:
    state = {f"layers.{number}.weight": torch.full((16, 8), float(number)) for number in range(1000)}
    path = save(state, tmp_path / "c")
    costs = []
    for _ in range(5):
        begun, before = time.process_time(), reads()
        sw.open(path).close()
        costs.append((time.process_time() - begun, reads() - before))
    # 0.03 s on 2 cores. The archives of tensors are not looked at.
    assert min(costs)[0] < 0.15, costs
    assert min(count for _, count in costs) < 10, costs
    with sw.open(path) as checkpoint:
        before = reads()
        assert checkpoint["layers.7.weight"][...].tobytes() == state["layers.7.weight"].numpy().tobytes()
        assert reads() - before < 10


@pytest.mark.parametrize("converted", [False, True])
def test_slots_under_numbers_reach_the_optimizer(tmp_path: Path, converted: bool) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.Adam(model.parameters())
    model(torch.ones(4, 3)).sum().backward()
    optimizer.step()
    path = save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "c")
    if converted:
        path = Path(sw.convert(path, tmp_path / "s", to="stepwell").path)
    fresh = torch.optim.Adam(model.parameters())
    sw.restore(path, into={"model": model, "optimizer": fresh})
    for parameter in model.parameters():
        slots, saved = fresh.state[parameter], optimizer.state[parameter]
        assert slots.keys() == saved.keys()
        assert all(torch.equal(slots[name], saved[name]) for name in saved)


def test_slots_that_no_parameter_has_are_refused(tmp_path: Path) -> None:
    model = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    stored = {"state": {"w": {"momentum_buffer": torch.ones(2, 3)}}, "param_groups": [{"params": [0, 1]}]}
    path = save({"optimizer": stored}, tmp_path / "c")
    with pytest.raises(sw.MismatchError, match="its groups name none of them"):
        sw.restore(path, into={"optimizer": optimizer})


def test_stale_files_are_passed_over(tmp_path: Path) -> None:
    save({"w": torch.ones(3)}, tmp_path / "c")
    (tmp_path / "c" / "__7_0.distcp").write_bytes(b"left by an earlier run")
    np.testing.assert_array_equal(sw.restore(tmp_path / "c")["w"], np.ones(3))


def test_it_is_read_without_torch(sharded: Path) -> None:
    code = f"""
        import sys
        import stepwell as sw
        assert sw.restore({str(sharded)!r})["step"] == 12
        assert sw.open({str(sharded)!r})["rows"].shape == (7, 6)
        assert not any(name.split(".")[0] == "torch" for name in sys.modules)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_names_that_are_no_utf_8_are_refused(tmp_path: Path) -> None:
    path = save({"a\ud800": torch.ones(2)}, tmp_path / "c")
    with pytest.raises(sw.CorruptCheckpoint, match=r"`a\\ud800` is no valid UTF-8"):
        sw.open(path)


def test_metadata_that_lie_are_refused(tmp_path: Path) -> None:
    path = save({"w": torch.ones(3, 4), "v": torch.ones(2)}, tmp_path / "c")
    sound = (path / ".metadata").read_bytes()

    def refused(says: str, change: Any) -> None:
        metadata = _metadata(path)
        change(metadata)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises((sw.CorruptCheckpoint, sw.errors.FormatError), match=says) as failure:
            sw.restore(path)
        assert str(path) in str(failure.value)
        (path / ".metadata").write_bytes(sound)

    def of(metadata: Any, name: str) -> Any:
        return next(info for index, info in metadata.storage_data.items() if index.fqn == name)

    refused("the file has", lambda m: setattr(of(m, "w"), "length", 1 << 40))
    for name in ("../other", "a\0b"):
        refused("no file name", lambda m, name=name: setattr(of(m, "w"), "relative_path", name))
    refused("no file is named", lambda m: m.storage_data.clear())
    refused("is not in", lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([2, 4])))
    refused(
        "its parts have 12 of 16", lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([4, 4]))
    )
    refused(
        "its parts have 9 of 12",
        lambda m: setattr(m.state_dict_metadata["w"].chunks[0], "sizes", torch.Size([3, 3])),
    )

    refused("has the path of another leaf", lambda m: m.planner_data.update(w=("v",)))
    refused("is below another leaf", lambda m: m.planner_data.update(v=("w", "v")))
    refused("small number", lambda m: m.planner_data.update(w=("w", 1 << 100)))
    refused("a number of bytes", lambda m: setattr(m.state_dict_metadata["w"], "size", (0, 1 << 62)))

    def empty(metadata: Any) -> None:
        tensor = metadata.state_dict_metadata["w"]
        tensor.size = tensor.chunks[0].offsets = (0, 1 << 61, 1 << 61)
        tensor.chunks[0].sizes = (0, 0, 0)
        metadata.storage_data = {
            dataclasses.replace(index, offset=tensor.size) if index.fqn == "w" else index: info
            for index, info in metadata.storage_data.items()
        }

    refused("its shape is too large", empty)

    def smaller(metadata: Any) -> None:
        tensor = metadata.state_dict_metadata["w"]
        tensor.size = tensor.chunks[0].sizes = torch.Size([3, 3])

    refused("the metadata say", smaller)
    (path / ".metadata").write_bytes(sound[:-20])
    with pytest.raises(sw.CorruptCheckpoint, match="ends in the middle"):
        sw.open(path)
    (path / ".metadata").write_bytes(b"\x80\x04cos\nsystem\n(S'touch /tmp/never'\ntR.")
    with pytest.raises(sw.CorruptCheckpoint):
        sw.open(path)


def test_archives_that_are_cut_are_refused(tmp_path: Path) -> None:
    path = save({"w": torch.arange(10_000.0)}, tmp_path / "c")
    (file,) = path.glob("*.distcp")
    whole_file = file.read_bytes()
    file.write_bytes(whole_file[:-100])
    with pytest.raises(sw.CorruptCheckpoint, match="the file has"):
        sw.open(path)
    file.write_bytes(b"\0" * len(whole_file))
    # Tensors are looked at when they are read.
    with sw.open(path) as checkpoint:
        assert checkpoint["w"].shape == (10_000,)
        with pytest.raises(sw.errors.FormatError, match="or a file of safetensors"):
            checkpoint["w"][...]
    with pytest.raises(sw.errors.FormatError, match="or a file of safetensors"):
        sw.verify(path)
    for part in (file, path / ".metadata"):
        with pytest.raises(sw.errors.FormatError, match=f"Pass its directory, {path}"):
            sw.open(part)
    file.unlink()
    with pytest.raises(sw.StorageError, match=r"\.metadata: 1 of 1 files that it names are missing"):
        sw.open(path)


def test_unknown_classes_are_listed_by_name(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "other": collections.UserString("a")}
    path = save(state, tmp_path / "c")
    with sw.open(path) as checkpoint:
        assert "UserString" in repr(checkpoint["other"])
        np.testing.assert_array_equal(checkpoint["w"][...], np.ones(2))


class _Colour(enum.Enum):
    RED = 1


class _Custom:
    """A class that a reader does not have."""


_Pair = collections.namedtuple("_Pair", "x y")


def test_odd_objects_leave_the_rest_readable(tmp_path: Path) -> None:
    odd: dict[str, object] = {
        "bytes_io": io.BytesIO(b"x"),
        "string_io": io.StringIO("x"),
        "namedtuple": _Pair(1, 2),
        "set": {1, 2},
        "scalar": np.float32(1.5),
        "enum": _Colour.RED,
        "datetime": datetime.datetime(2026, 1, 2),
        "size": torch.Size([1, 2]),
        "device": torch.device("cpu"),
        "ordered": collections.OrderedDict(a=1),
        "custom": _Custom(),
        "function": print,
        "generator": np.random.default_rng(1),
        "quantised": torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8),
    }
    found = sw.restore(save({"w": torch.arange(4.0), "odd": odd}, tmp_path / "c"))
    np.testing.assert_array_equal(found["w"], np.arange(4.0))
    assert found["odd"].keys() == odd.keys()
    assert (found["odd"]["set"], found["odd"]["size"]) == ({1, 2}, (1, 2))
    assert found["odd"]["bytes_io"] == b"x"
    assert repr(found["odd"]["string_io"]) == "<opaque _io.StringIO>"


class _RawPlanner(DefaultSavePlanner):
    """Writes the content of a ``BytesIO`` as it is, as planners of libraries do."""

    def transform_object(self, write_item: Any, object: Any) -> Any:
        return object if isinstance(object, io.BytesIO) else super().transform_object(write_item, object)


@pytest.mark.parametrize("options", [{}, {"_extensions": [ZStandard()]}], ids=["plain", "zstd"])
def test_objects_that_are_no_archives_are_opaque(tmp_path: Path, options: dict[str, Any]) -> None:
    archive = io.BytesIO()
    np.savez(archive, x=np.ones(3))
    raw = {"a": b"", "b": b"x", "c": b'{"json": 1}', "d": pickle.dumps(1), "e": archive.getvalue()}
    state = {"w": torch.arange(4.0), "n": [3], **{name: io.BytesIO(one) for name, one in raw.items()}}
    writer = dcp.FileSystemWriter(tmp_path / "c", **options)
    dcp.save(state, storage_writer=writer, planner=_RawPlanner(), no_dist=True)
    found = sw.restore(tmp_path / "c")
    np.testing.assert_array_equal(found["w"], np.arange(4.0))
    assert found["n"] == [3]
    for name in raw:
        assert re.match(r"<opaque object of \d+ bytes that torch.save did not write", repr(found[name]))
    assert sw.verify(tmp_path / "c").ok


def test_what_stepwell_wrote_as_dcp_is_verified(tmp_path: Path) -> None:
    layers = [np.ones(2, np.float32), {"a.b": np.zeros(3, np.float16)}]
    state = {"model": {"w": np.arange(600, dtype=np.float32).reshape(20, 30), "layers": layers}}
    sw.save(tmp_path / "ours", state)
    made = sw.export(tmp_path / "ours", tmp_path / "theirs", to="dcp")
    assert made.verified
    found = sw.restore(tmp_path / "theirs")
    np.testing.assert_array_equal(found["model"]["w"], state["model"]["w"])
    np.testing.assert_array_equal(found["model"]["layers"][1]["a.b"], np.zeros(3, np.float16))
