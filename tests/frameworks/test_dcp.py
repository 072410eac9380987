"""Checkpoints of torch.distributed.checkpoint open, restore and verify without torch."""

from __future__ import annotations

import collections
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw

torch = pytest.importorskip("torch")
dcp = pytest.importorskip("torch.distributed.checkpoint")

DTYPES = [
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
    *("complex64", "complex128", "float8_e4m3fn", "float8_e5m2", "uint16", "uint32", "uint64"),
]


def save(state: dict[str, Any], path: Path, **options: object) -> Path:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path, **options), no_dist=True)
    return path


def raw(tensor: Any) -> bytes:
    return tensor.detach().contiguous().cpu().flatten().view(torch.uint8).numpy().tobytes()


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


RANKS = """
    import sys
    import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
    from torch.distributed.device_mesh import init_device_mesh
    path, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
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
    dist.destroy_process_group()
"""


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("ranks") / "c"
    script = path.with_suffix(".py")
    script.write_text(textwrap.dedent(RANKS))
    ranks = [subprocess.Popen([sys.executable, script, path, str(rank), "4"]) for rank in range(4)]
    assert [rank.wait(180) for rank in ranks] == [0] * 4
    return path


LOCAL = """
    import sys
    import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp
    path, rank, world = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
    dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=world)
    state = {"same": torch.ones(3), "other": torch.full((2,), float(rank)), f"own{rank}": torch.ones(rank + 1)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(path), use_collectives=False)
    dist.destroy_process_group()
"""


def test_ranks_that_saved_for_themselves_are_read(tmp_path: Path) -> None:
    script = tmp_path / "save.py"
    script.write_text(textwrap.dedent(LOCAL))
    path = tmp_path / "c"
    ranks = [subprocess.Popen([sys.executable, script, path, str(rank), "2"]) for rank in range(2)]
    assert [rank.wait(180) for rank in ranks] == [0, 0]
    assert sorted(one.name for one in path.glob("*.metadata")) == ["__0.metadata", "__1.metadata"]
    with sw.open(path) as checkpoint:
        np.testing.assert_array_equal(checkpoint["same"][...], np.ones(3))
        assert checkpoint["own1"].shape == (2,)
        assert "differs between ranks" in repr(checkpoint["other"])


def whole(*shape: int) -> np.ndarray:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape)


def test_shards_of_four_ranks_are_whole_tensors(sharded: Path) -> None:
    found = sw.restore(sharded)
    shapes = {"rows": (7, 6), "columns": (3, 9), "both": (6, 5, 4), "replicated": (4, 4), "plain": (3, 3)}
    for name, shape in shapes.items():
        np.testing.assert_array_equal(found[name], whole(*shape), err_msg=name)
    assert found["step"] == 12


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


def _metadata(path: Path) -> Any:
    with (path / ".metadata").open("rb") as file:
        return pickle.load(file)


def test_metadata_that_lie_are_refused(tmp_path: Path) -> None:
    path = save({"w": torch.ones(3, 4), "v": torch.ones(2)}, tmp_path / "c")
    sound = (path / ".metadata").read_bytes()

    def refused(says: str, change: Any) -> None:
        metadata = _metadata(path)
        change(metadata)
        (path / ".metadata").write_bytes(pickle.dumps(metadata))
        with pytest.raises((sw.CorruptCheckpoint, sw.errors.FormatError), match=says):
            sw.restore(path)
        (path / ".metadata").write_bytes(sound)

    def of(metadata: Any, name: str) -> Any:
        return next(info for index, info in metadata.storage_data.items() if index.fqn == name)

    refused("the file has", lambda m: setattr(of(m, "w"), "length", 1 << 40))
    refused("no file name", lambda m: setattr(of(m, "w"), "relative_path", "../other"))
    refused("no file is named", lambda m: m.storage_data.clear())
    refused("is not in", lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([2, 4])))
    refused(
        "its parts have 12 of 16", lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([4, 4]))
    )
    refused(
        "the metadata say",
        lambda m: setattr(m.state_dict_metadata["w"].chunks[0], "sizes", torch.Size([3, 3])),
    )
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
    with pytest.raises(sw.errors.FormatError, match="archives of torch"):
        sw.open(path)
    file.unlink()
    with pytest.raises(sw.StepwellError):
        sw.open(path)


def test_unknown_classes_are_listed_by_name(tmp_path: Path) -> None:
    state = {"w": torch.ones(2), "other": collections.UserString("a")}
    path = save(state, tmp_path / "c")
    with sw.open(path) as checkpoint:
        assert "UserString" in repr(checkpoint["other"])
        np.testing.assert_array_equal(checkpoint["w"][...], np.ones(2))


def test_what_stepwell_wrote_as_dcp_is_verified(tmp_path: Path) -> None:
    layers = [np.ones(2, np.float32), {"a.b": np.zeros(3, np.float16)}]
    state = {"model": {"w": np.arange(600, dtype=np.float32).reshape(20, 30), "layers": layers}}
    sw.save(tmp_path / "ours", state)
    made = sw.export(tmp_path / "ours", tmp_path / "theirs", to="dcp")
    assert made.verified
    found = sw.restore(tmp_path / "theirs")
    np.testing.assert_array_equal(found["model"]["w"], state["model"]["w"])
    np.testing.assert_array_equal(found["model"]["layers"][1]["a.b"], np.zeros(3, np.float16))
