"""Checkpoints of Orbax, written by the real library: read bit for bit."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest
import stepwell as sw
import tensorstore as ts
from orbax.checkpoint.experimental import v1
from stepwell import _core
from stepwell.formats import zarr

DTYPES = [
    "bool",
    *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32)),
    "float16",
    "bfloat16",
    "float32",
    "complex64",
    "float8_e4m3fn",
    "float8_e5m2",
    "int4",
]


def of_every_dtype() -> dict[str, Any]:
    found = {}
    for name in DTYPES:
        numbers = np.arange(-6, 6).reshape(3, 4) % 2 if name == "bool" else np.arange(12).reshape(3, 4) % 7
        found[name] = jnp.asarray(numbers, dtype=name)
    return found


def state() -> dict[str, Any]:
    return {
        "dtypes": of_every_dtype(),
        "large": jnp.asarray(np.random.default_rng(1).standard_normal((300, 70)), dtype="float32"),
        "nested": {"a.b": {"scalar": jnp.float32(2.5)}, "list": [jnp.ones(3), {"x": jnp.zeros((2, 2))}]},
        "numpy": np.arange(5, dtype=np.int64),
        "step": 7,
        "rate": 0.5,
        "text": "hello",
        "none": None,
    }


def raw(value: Any) -> bytes:
    return np.asarray(value).tobytes()


def same(found: Any, saved: Any) -> None:
    """Compares a restored state with the saved one, bit for bit."""
    if isinstance(saved, dict):
        assert found.keys() == saved.keys()
        for key in saved:
            same(found[key], saved[key])
    elif isinstance(saved, list):
        assert len(found) == len(saved)
        for one, other in zip(found, saved, strict=True):
            same(one, other)
    elif saved is None or isinstance(saved, (str, int, float)):
        assert found == saved
    else:
        assert found.shape == saved.shape
        assert found.dtype == saved.dtype
        assert raw(found) == raw(saved)


def chunks(checkpoint: sw.Checkpoint, path: str) -> int:
    """The number of chunks that an array is stored in."""
    return next(len(node.chunks) for node in checkpoint.contents() if node.path == path)


def of_handler(**given: Any) -> Callable[[Path, Any], None]:
    def save(path: Path, value: Any) -> None:
        with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**given)) as checkpointer:
            checkpointer.save(path, args=ocp.args.PyTreeSave(value))

    return save


def of_v1(path: Path, value: Any) -> None:
    v1.save_pytree(path, value)


WRITERS = {
    "zarr2": of_handler(use_ocdbt=False),
    "zarr3": of_handler(use_ocdbt=False, use_zarr3=True),
    "zarr2 in OCDBT": of_handler(use_ocdbt=True),
    "zarr3 in OCDBT": of_handler(use_ocdbt=True, use_zarr3=True),
    "v1": of_v1,
}


@pytest.mark.parametrize("writer", WRITERS)
def test_a_state_is_read_bit_for_bit(tmp_path: Path, writer: str) -> None:
    saved = state()
    WRITERS[writer](tmp_path / "c", saved)
    same(sw.restore(tmp_path / "c"), saved)
    with sw.open(tmp_path / "c") as checkpoint:
        part = checkpoint["large"][17:231, 3:50:1]
        assert raw(part) == raw(saved["large"][17:231, 3:50])
    report = sw.verify(tmp_path / "c")
    assert report.ok
    assert report.unguarded_nbytes > 0


@pytest.mark.parametrize("is_3", [False, True])
def test_small_chunks_are_one_array(tmp_path: Path, is_3: bool) -> None:
    saved = {"w": jnp.asarray(np.arange(64 * 48).reshape(64, 48), dtype="float32")}
    arguments = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=1024), saved)
    handler = ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=is_3)
    with ocp.Checkpointer(handler) as checkpointer:
        checkpointer.save(tmp_path / "c", args=ocp.args.PyTreeSave(saved, save_args=arguments))
    with sw.open(tmp_path / "c") as checkpoint:
        assert chunks(checkpoint, "w") > 8
    same(sw.restore(tmp_path / "c"), saved)


def test_items_of_a_managers_step_are_read(tmp_path: Path) -> None:
    saved = {"w": jnp.arange(12.0).reshape(3, 4), "b": jnp.ones(4)}
    with ocp.CheckpointManager(tmp_path / "one") as manager:
        manager.save(3, args=ocp.args.StandardSave(saved), metrics={"loss": 0.5})
        manager.wait_until_finished()
    same(sw.restore(tmp_path / "one" / "3"), saved)
    with ocp.CheckpointManager(tmp_path / "two", item_names=("params", "data")) as manager:
        items = {"params": ocp.args.StandardSave(saved), "data": ocp.args.JsonSave({"position": [1, 2]})}
        manager.save(4, args=ocp.args.Composite(**items))
        manager.wait_until_finished()
    found = sw.restore(tmp_path / "two" / "4")
    same(found["params"], saved)
    assert found["data"] == {"position": [1, 2]}


def test_arrays_of_several_devices_are_whole(tmp_path: Path) -> None:
    code = f"""
        import jax, numpy as np, orbax.checkpoint as ocp
        from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
        mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
        whole = np.arange(63 * 40, dtype="float32").reshape(63, 40)[:60]
        state = {{
            "both": jax.device_put(whole, NamedSharding(mesh, P("x", "y"))),
            "rows": jax.device_put(whole, NamedSharding(mesh, P("x"))),
            "none": jax.device_put(whole, NamedSharding(mesh, P())),
        }}
        for number in range(2):
            with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=True, use_zarr3=bool(number))) as one:
                one.save({str(tmp_path)!r} + f"/{{number}}", args=ocp.args.PyTreeSave(state))
    """
    environment = {**os.environ, "XLA_FLAGS": "--xla_force_host_platform_device_count=8"}
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, env=environment)
    whole = np.arange(63 * 40, dtype="float32").reshape(63, 40)[:60]
    for number in range(2):
        with sw.open(tmp_path / str(number)) as checkpoint:
            assert chunks(checkpoint, "both") == 8
            np.testing.assert_array_equal(checkpoint["both"][11:47, 15:33], whole[11:47, 15:33])
        found = sw.restore(tmp_path / str(number))
        assert all(raw(found[name]) == raw(whole) for name in ("both", "rows", "none"))


def test_it_is_read_without_jax_and_tensorstore(tmp_path: Path) -> None:
    WRITERS["zarr3 in OCDBT"](tmp_path / "c", state())
    code = f"""
        import sys
        import stepwell as sw
        assert sw.restore({str(tmp_path / "c")!r})["step"] == 7
        assert not {{name.split(".")[0] for name in sys.modules}} & {{"jax", "tensorstore", "orbax"}}
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True)


def test_a_state_is_converted(tmp_path: Path) -> None:
    from safetensors.numpy import load_file

    saved = {"w": jnp.arange(12.0).reshape(3, 4), "b": jnp.ones(4, dtype=jnp.bfloat16)}
    of_v1(tmp_path / "c", saved)
    sw.convert(tmp_path / "c", tmp_path / "c.safetensors", to="safetensors", verify=True)
    same(load_file(tmp_path / "c.safetensors"), saved)
    made = sw.convert(tmp_path / "c", tmp_path / "s", to="stepwell")
    same(sw.restore(made.path), saved)


def test_damage_is_named(tmp_path: Path) -> None:
    saved = {"w": jnp.arange(60_000.0).reshape(300, 200)}
    WRITERS["zarr2"](tmp_path / "files", saved)
    (tmp_path / "files" / "w" / "0.0").unlink()
    with pytest.raises(sw.CorruptCheckpoint, match=r"chunk `w/0.0` is missing"):
        sw.open(tmp_path / "files")
    WRITERS["zarr2 in OCDBT"](tmp_path / "c", saved)
    for file in (tmp_path / "c" / "manifest.ocdbt", *(tmp_path / "c" / "d").iterdir()):
        sound = file.read_bytes()
        file.write_bytes(sound[:-10] + bytes([sound[-10] ^ 1]) + sound[-9:])
        with pytest.raises(sw.CorruptCheckpoint, match="recorded checksum"):
            sw.open(tmp_path / "c")
        file.write_bytes(sound)
    data = max((tmp_path / "c").glob("ocdbt.process_0/d/*"), key=lambda file: file.stat().st_size)
    sound = data.read_bytes()
    data.write_bytes(sound[: len(sound) // 2])
    with pytest.raises(sw.CorruptCheckpoint):
        sw.restore(tmp_path / "c")
    data.write_bytes(sound)
    same(sw.restore(tmp_path / "c"), saved)
    (tmp_path / "c" / "manifest.ocdbt").unlink()
    with pytest.raises(sw.CorruptCheckpoint, match=r"its manifest.ocdbt is missing"):
        sw.open(tmp_path / "c")


def framed(magic: int, body: bytes, method: int = 0) -> bytes:
    """A manifest or a node of OCDBT, compressed by that method or by none."""
    head = struct.pack(">I", magic) + struct.pack("<Q", len(body) + 18) + bytes([0, method])
    return head + body + struct.pack("<I", _core.crc32c(head + body))


def varint(number: int) -> bytes:
    out = b""
    while number >= 0x80:
        out += bytes([number & 0x7F | 0x80])
        number >>= 7
    return out + bytes([number])


def with_root(path: Path, height: int, node: bytes) -> None:
    """Gives the database of an item another tree: this node, in the file ``d/node``."""
    framed_node = framed(0x0CDB20DE, node)
    (path / "d" / "node").write_bytes(framed_node)
    place = varint(0) + varint(0) + varint(len(framed_node))
    root = bytes([1, 6, 0]) + b"d/node" + bytes([1, 1, height]) + place + bytes([1, 1, 1]) + bytes(9)
    manifest = bytes(16) + bytes([0, 100, 100, 4, 0]) + root
    (path / "manifest.ocdbt").write_bytes(framed(0x0CDB3A2A, manifest))


@pytest.mark.parametrize("name", ["../secret", "/etc/passwd", "d/../../secret", "d//x", "d/\0"])
def test_databases_do_not_reach_other_files(tmp_path: Path, name: str) -> None:
    WRITERS["zarr2 in OCDBT"](tmp_path / "c", {"w": jnp.arange(4.0)})
    (tmp_path / "secret").write_bytes(bytes(16))
    file = bytes([1, len(name), 0]) + name.encode()
    array = b'{"zarr_format":2,"shape":[4],"chunks":[4],"dtype":"<f4","compressor":null}'
    keys = bytes([2, 9, 1]) + b"w/.zarray" + b"0"
    node = bytes([0]) + file + bytes([2]) + keys + bytes([len(array), 16, 0, 1, 0, 0]) + array
    with_root(tmp_path / "c", 0, node)
    with pytest.raises(sw.CorruptCheckpoint, match="no path below it"):
        sw.open(tmp_path / "c")


def test_keys_of_a_database_are_bounded(tmp_path: Path) -> None:
    WRITERS["zarr2 in OCDBT"](tmp_path / "c", {"w": jnp.arange(4.0)})
    # 2 000 keys behind a prefix of 60 000 bytes: a file of 70 KB, and 120 MB of keys.
    keys = varint(2000) + bytes(1999) + bytes([1]) * 2000 + b"k" * 2000
    leaf = framed(0x0CDB20DE, bytes([0, 0]) + keys + bytes(2000) + bytes(2000))
    (tmp_path / "c" / "d" / "leaf").write_bytes(leaf)
    prefix = varint(60_000)
    child = bytes([1, 1, 6, 0]) + b"d/leaf" + bytes([1]) + prefix + prefix + b"a" * 60_000
    with_root(tmp_path / "c", 1, child + bytes([0, 0]) + varint(len(leaf)) + bytes([1, 1, 1]))
    with pytest.raises(sw.CorruptCheckpoint, match="its entries take too much memory"):
        sw.open(tmp_path / "c")


def test_values_in_a_database_are_bounded(tmp_path: Path) -> None:
    import zstandard

    WRITERS["zarr2 in OCDBT"](tmp_path / "c", {"w": jnp.arange(4.0)})
    # 100 nodes, each with a value of 1 MB of zeros: a file of 8 KB.
    size, count = 1_000_000, 100
    leaf = bytes([0, 0, 1, 1]) + b"k" + varint(size) + bytes(1) + bytes(size)
    packed = zstandard.ZstdCompressor(level=19).compress(leaf)
    leaf = framed(0x0CDB20DE, packed, method=1)
    (tmp_path / "c" / "d" / "leaf").write_bytes(leaf * count)
    names = [b"%02d" % number for number in range(count)]
    child = bytes([1, 1, 6, 0]) + b"d/leaf" + varint(count) + bytes(count - 1) + bytes([2]) * 2 * count
    places = b"".join(varint(number * len(leaf)) for number in range(count)) + varint(len(leaf)) * count
    with_root(tmp_path / "c", 1, child + b"".join(names) + bytes(count) + places + bytes([1, 1, 1]) * count)
    with pytest.raises(sw.CorruptCheckpoint, match="its entries take too much memory"):
        sw.open(tmp_path / "c")


def test_an_unfinished_save_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "3.orbax-checkpoint-tmp"
    WRITERS["zarr2"](tmp_path / "3", {"w": jnp.ones(3)})
    (tmp_path / "3").rename(path)
    with pytest.raises(sw.errors.FormatError, match="never finished"):
        sw.open(path)


def test_metadata_that_lie_are_refused(tmp_path: Path) -> None:
    WRITERS["zarr2"](tmp_path / "c", {"w": jnp.arange(12.0).reshape(3, 4)})
    metadata, array = tmp_path / "c" / "_METADATA", tmp_path / "c" / "w" / ".zarray"
    sound, sound_array = metadata.read_text(), json.loads(array.read_text())
    row = json.loads(sound)["tree_metadata"]["('w',)"]

    def tree(*rows: Any) -> str:
        return json.dumps({**json.loads(sound), "tree_metadata": {str(n): one for n, one in enumerate(rows)}})

    def of(*keys: Any) -> Any:
        return {**row, "key_metadata": [{"key": key, "key_type": kind} for key, kind in keys]}

    for text, says in [
        ("[", "is no JSON"),
        ("[]", "metadata with a tree"),
        ("[" * 100_000, "is no JSON"),
        (tree(3), "a row of its tree"),
        (tree(of(("..", 2), ("x", 2))), "is missing"),
        (tree(of(("/etc/passwd", 2))), "is missing"),
        (tree(of(("a\0b", 2))), r"`a\\x00b` is missing"),
        (tree(of(("a\ud800", 2))), r"`a\\ud800` is missing"),
        (tree(of(("w", 2)), of(("w", 2))), "is twice"),
        (
            tree(of(("w", 2)), {**of(("w", 2), ("x", 2)), "value_metadata": {"value_type": "None"}}),
            "below another",
        ),
        (tree(of(*[("w", 2)] * 5000)), "levels"),
        (tree(of(("-1", 1))), "a list has the index"),
    ]:
        metadata.write_text(text)
        with pytest.raises(sw.CorruptCheckpoint, match=says):
            sw.open(tmp_path / "c")
    metadata.write_text(sound)
    for change, says in [
        ({"shape": [1 << 50, 4]}, "is missing"),
        ({"shape": [1 << 40, 1 << 40]}, "too many elements"),
        ({"dimension_separator": "\0"}, "a dot or a slash"),
        ({"dimension_separator": "\ud800"}, "a dot or a slash"),
        ({"dimension_separator": 3}, "a dot or a slash"),
        ({"shape": [3]}, "different dimensions"),
        ({"chunks": [0, 4]}, "not possible"),
        ({"chunks": [3, 2]}, "bytes, not 24|is missing"),
        ({"dtype": 3}, None),
        ({"filters": [1]}, None),
        ({"compressor": {"id": "blosc"}}, None),
        ({"compressor": None}, "bytes, not 48"),
        ({"order": "X"}, "C or F"),
        ({"zarr_format": 3}, "another version"),
    ]:
        array.write_text(json.dumps({**sound_array, **change}))
        if says is None:
            with sw.open(tmp_path / "c") as checkpoint:
                assert "zarr array" in repr(checkpoint["w"])
            continue
        with pytest.raises(sw.CorruptCheckpoint, match=says):
            sw.restore(tmp_path / "c")


def test_indexes_of_shards_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks, shards = 1 << 13, 12
    arrays = {name: np.arange(chunks * shards, dtype=np.uint8) for name in "ab"}
    place = tmp_path / "c"
    WRITERS["zarr3"](place, {name: array[:4] for name, array in arrays.items()})
    inner = {"chunk_shape": [1], "codecs": [{"name": "bytes"}]}
    inner["index_codecs"] = [{"name": "bytes", "configuration": {"endian": "little"}}, {"name": "crc32c"}]
    for name, array in arrays.items():
        file = place / name / "zarr.json"
        described = json.loads(file.read_text()) | {"shape": [chunks * shards]}
        described["chunk_grid"] = {"name": "regular", "configuration": {"chunk_shape": [chunks]}}
        described["codecs"] = [{"name": "sharding_indexed", "configuration": inner}]
        file.write_text(json.dumps(described))
        index = b"".join(struct.pack("<QQ", at, 1) for at in range(chunks))
        index += struct.pack("<I", _core.crc32c(index))
        for at, shard in enumerate(np.split(array, shards)):
            (place / name / "c" / f"{at}").write_bytes(shard.tobytes() + index)
    read = zarr.read_ranges
    rounds: list[int] = []

    def counted(ranges: Any) -> list[bytes]:
        found = read(ranges)
        rounds.append(sum(map(len, found)))
        return found

    monkeypatch.setattr(zarr, "read_ranges", counted)
    with sw.open(place) as checkpoint:
        assert len(checkpoint.contents()[1].chunks) == chunks * shards
        for name, array in arrays.items():
            np.testing.assert_array_equal(checkpoint[name][-500:], array[-500:])
    assert max(rounds) <= zarr._BYTES_OF_ARRAY * 2 + 16
    assert sum(rounds) >= 2 * shards * chunks * 16
    monkeypatch.setattr(zarr, "_BYTES_AT_ONCE", 1 << 20)
    rounds.clear()
    sw.open(place).close()
    assert max(rounds) <= zarr._BYTES_AT_ONCE + 16
    monkeypatch.setattr(zarr, "_MAX_CHUNKS", 2 * chunks * shards - 1)
    with pytest.raises(sw.errors.FormatError, match=r"its arrays have more than \d+ chunks"):
        sw.open(place)


def test_zeros_that_old_versions_left_out_are_read(tmp_path: Path) -> None:
    WRITERS["zarr3"](tmp_path / "c", {"w": jnp.ones((3, 4)), "zeros": jnp.zeros((5, 4))})
    metadata = tmp_path / "c" / "_METADATA"
    content = json.loads(metadata.read_text())
    array = tmp_path / "c" / "zeros" / "zarr.json"
    chunk = tmp_path / "c" / "zeros" / "c" / "0" / "0"
    chunk.unlink()
    with pytest.raises(sw.CorruptCheckpoint, match="chunk `zeros/c/0/0` is missing"):
        sw.open(tmp_path / "c")
    del content["store_array_data_equal_to_fill_value"]
    metadata.write_text(json.dumps(content))
    found = sw.restore(tmp_path / "c")
    same(found, {"w": jnp.ones((3, 4)), "zeros": jnp.zeros((5, 4))})
    sound = json.loads(array.read_text())
    # Other values, more chunks and more bytes than a file of this size should stand for.
    for change in (
        {"fill_value": 1.0},
        {"shape": [1 << 20, 4], "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1, 4]}}},
        {
            "shape": [1 << 40, 4],
            "chunk_grid": {"name": "regular", "configuration": {"chunk_shape": [1 << 40, 4]}},
        },
    ):
        array.write_text(json.dumps({**sound, "codecs": [{"name": "bytes"}], **change}))
        if "fill_value" in change:
            with pytest.raises(sw.CorruptCheckpoint, match="is missing"):
                sw.open(tmp_path / "c")
            continue
        with sw.open(tmp_path / "c") as checkpoint:
            assert "not stored" in repr(checkpoint["zeros"])
            assert raw(checkpoint["w"][...]) == raw(np.ones((3, 4), np.float32))


def test_a_half_of_zeros_is_read(tmp_path: Path) -> None:
    saved = {"w": jnp.concatenate([jnp.zeros((32, 48)), jnp.ones((32, 48))])}
    arguments = jax.tree.map(lambda _: ocp.SaveArgs(chunk_byte_size=1024), saved)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler(use_ocdbt=False, use_zarr3=True)) as checkpointer:
        checkpointer.save(tmp_path / "c", args=ocp.args.PyTreeSave(saved, save_args=arguments))
    metadata = tmp_path / "c" / "_METADATA"
    content = json.loads(metadata.read_text())
    del content["store_array_data_equal_to_fill_value"]
    metadata.write_text(json.dumps(content))
    removed = [file for file in (tmp_path / "c" / "w" / "c").rglob("*") if file.is_file()]
    with sw.open(tmp_path / "c") as checkpoint:
        before = chunks(checkpoint, "w")
    rows = json.loads((tmp_path / "c" / "w" / "zarr.json").read_text())["chunk_grid"]["configuration"]
    for file in removed:
        if (int(file.parent.name) + 1) * rows["chunk_shape"][0] <= 32:
            file.unlink()
    with sw.open(tmp_path / "c") as checkpoint:
        assert chunks(checkpoint, "w") == before
        assert raw(checkpoint["w"][30:40, 3:7]) == raw(saved["w"][30:40, 3:7])
    same(sw.restore(tmp_path / "c"), saved)


def test_shards_of_many_chunks_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = {"w": jnp.arange(270_000) % 255 + 1}  # TensorStore leaves out chunks of zeros
    WRITERS["zarr3"](tmp_path / "c", saved)
    shutil.rmtree(tmp_path / "c" / "w")
    codec = {"name": "sharding_indexed", "configuration": {"chunk_shape": [1]}}
    grid = {"name": "regular", "configuration": {"chunk_shape": [270_000]}}
    spec = {
        "driver": "zarr3",
        "kvstore": {"driver": "file", "path": f"{tmp_path}/c/w/"},
        "metadata": {"shape": [270_000], "data_type": "int32", "chunk_grid": grid, "codecs": [codec]},
    }
    ts.open(spec, create=True).result().write(np.asarray(saved["w"])).result()
    shard = tmp_path / "c" / "w" / "c" / "0"
    assert shard.stat().st_size > 4 << 20
    with sw.open(tmp_path / "c") as checkpoint:
        assert raw(checkpoint["w"][100_000:100_010]) == raw(saved["w"][100_000:100_010])
    monkeypatch.setattr("stepwell.formats.zarr._MAX_SHARD_CHUNKS", 269_999)
    with pytest.raises(sw.errors.FormatError, match="has 270000 chunks, and at most 269999 are read"):
        sw.open(tmp_path / "c")
    shard.write_bytes(shard.read_bytes()[: 16 * 270_000])
    with pytest.raises(sw.CorruptCheckpoint, match="has no index of 270000 chunks"):
        sw.open(tmp_path / "c")


def test_numbered_manifests_are_refused_by_name(tmp_path: Path) -> None:
    saved = {"w": jnp.arange(8.0)}
    WRITERS["zarr2 in OCDBT"](tmp_path / "c", saved)
    item = tmp_path / "c"

    def database(path: Path, **config: object) -> Any:
        base = {"driver": "file", "path": f"{path}/"}
        return ts.KvStore.open({"driver": "ocdbt", "base": base, **config}).result()

    theirs = database(tmp_path / "numbered", config={"manifest_kind": "numbered"})
    for key in database(item).list().result():
        theirs.write(key, database(item).read(key).result().value).result()
    for name in ("manifest.ocdbt", "d"):
        shutil.move(item / name, tmp_path / f"single-{name}")
    for one in (tmp_path / "numbered").iterdir():
        shutil.move(one, item / one.name)
    assert any(one.name.startswith("manifest.0") for one in item.iterdir())
    with pytest.raises(sw.errors.FormatError, match=r"manifest\.ocdbt.*numbered manifests"):
        sw.open(item)


def test_big_endian_and_fortran_order_are_read(tmp_path: Path) -> None:
    values = np.arange(24, dtype=">f4").reshape(4, 6)
    WRITERS["zarr2"](tmp_path / "c", {"w": jnp.zeros((4, 6))})
    array = tmp_path / "c" / "w" / ".zarray"
    description = {**json.loads(array.read_text()), "dtype": ">f4", "order": "F", "compressor": None}
    array.write_text(json.dumps({**description, "chunks": [3, 4]}))
    for row in range(2):
        for column in range(2):
            chunk = np.zeros((3, 4), ">f4")
            part = values[3 * row : 3 * row + 3, 4 * column : 4 * column + 4]
            chunk[: part.shape[0], : part.shape[1]] = part
            (tmp_path / "c" / "w" / f"{row}.{column}").write_bytes(chunk.tobytes(order="F"))
    found = sw.restore(tmp_path / "c")["w"]
    np.testing.assert_array_equal(found, values.astype(np.float32))


def test_what_is_written_is_restored_by_orbax(tmp_path: Path) -> None:
    saved = {
        **state(),
        "empty": np.zeros((0, 3), np.float32),
        "containers": {"a": {}, "b": [], "c": [1, 2.5]},
    }
    sw.save(tmp_path / "c", saved)
    made = sw.convert(tmp_path / "c", tmp_path / "run" / "3" / "default", to="orbax", verify=True)
    assert made.verified
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        same(checkpointer.restore(made.path), saved)
    same(sw.restore(made.path), saved)
    same(v1.load(made.path), saved)
    mesh = jax.sharding.Mesh(np.array(jax.devices()[:4]), ("x",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    sw.save(tmp_path / "d", {"large": saved["large"], "step": 7})
    sw.convert(tmp_path / "d", tmp_path / "run" / "4" / "default", to="orbax")
    large = jax.ShapeDtypeStruct((300, 70), jnp.float32, sharding=sharding)
    with ocp.CheckpointManager(tmp_path / "run") as manager:
        assert manager.all_steps() == [3, 4]
        found = manager.restore(4, args=ocp.args.StandardRestore({"large": large, "step": 0}))
    assert found["step"] == 7
    assert found["large"].sharding == sharding
    assert raw(found["large"]) == raw(saved["large"])


def test_large_and_tied_arrays_are_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stepwell.formats.writers import orbax

    monkeypatch.setattr(orbax, "_CHUNK_BYTES", 1024)
    rng = np.random.default_rng(1)
    shapes = {"even": (64, 48), "prime": (67, 50), "wide": (2, 3000), "deep": (3, 30, 40), "long": (5000,)}
    saved: dict[str, Any] = {name: rng.standard_normal(shape, np.float32) for name, shape in shapes.items()}
    saved["tied"] = saved["even"]
    sw.save(tmp_path / "c", saved)
    made = sw.convert(tmp_path / "c", tmp_path / "o", to="orbax", shard_size=8192)
    assert sum(name.startswith("data-") for name in made.files) > 3
    assert sum(made.files.values()) < 2 * sum(saved[name].nbytes for name in shapes)
    with sw.open(made.path) as checkpoint:
        assert chunks(checkpoint, "even") == 16
        assert chunks(checkpoint, "prime") == 1
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        same(checkpointer.restore(made.path), saved)


def test_many_arrays_are_written(tmp_path: Path) -> None:
    saved = {f"layers.{number}": {"w": np.full(3, number, np.float32)} for number in range(2000)}
    sw.save(tmp_path / "c", saved)
    made = sw.convert(tmp_path / "c", tmp_path / "o", to="orbax")
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        same(checkpointer.restore(made.path), saved)


@pytest.mark.parametrize(
    ("saved", "says"),
    [
        ({"a.b": np.ones(3), "a": {"b": np.zeros(3)}}, "two leaves have the name `a.b`"),
        ({"a": {"": np.ones(3)}}, "an empty key"),
        ({"a": np.ones(3), "b": True}, "arrays, numbers, text and `None`"),
        ({"a": np.ones(3), "b": 1 << 64}, "arrays, numbers, text and `None`"),
    ],
)
def test_what_orbax_has_no_name_for_is_refused(tmp_path: Path, saved: Any, says: str) -> None:
    sw.save(tmp_path / "c", saved)
    with pytest.raises(sw.MisuseError, match=says):
        sw.convert(tmp_path / "c", tmp_path / "o", to="orbax")
    assert not (tmp_path / "o").exists()


@pytest.mark.parametrize("name", ["uint2", "uint4", "float6_e2m3fn", "float6_e3m2fn", "float8_e4m3"])
def test_dtypes_that_orbax_cannot_restore_are_refused(tmp_path: Path, name: str) -> None:
    sw.save(tmp_path / "ours", {"w": np.zeros(4, np.float32), "odd": np.zeros(4, getattr(ml_dtypes, name))})
    with pytest.raises(sw.MisuseError, match=f"Orbax cannot restore the dtypes of .*odd.*{name}"):
        sw.convert(tmp_path / "ours", tmp_path / "theirs", to="orbax")
    assert [one.name for one in tmp_path.iterdir()] == ["ours"]


def test_steps_are_exported_to_orbax(tmp_path: Path) -> None:
    exports = [sw.Export(tmp_path / "exported" / "{step}", to="orbax", cast="bfloat16")]
    with sw.CheckpointManager(tmp_path / "run", exports=exports) as manager:
        manager.save(3, {"w": np.arange(8, dtype=np.float32)})
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        found = checkpointer.restore(tmp_path / "exported" / "3")
    saved = {"w": np.arange(8, dtype=np.float32).astype(jnp.bfloat16)}
    same(found, saved)
    same(sw.restore(tmp_path / "exported" / "3"), saved)
    same(sw.restore(tmp_path / "exported"), saved)


def test_keys_of_dicts_become_text_in_orbax(tmp_path: Path) -> None:
    ones, twos = np.ones(2, np.float32), np.full(2, 2, np.float32)
    saved = {"state": {0: {"exp_avg": ones}, 1: {"exp_avg": twos}}, "list": [{}, ones, twos], "k": {7: "x"}}
    sw.save(tmp_path / "c", saved)
    made = sw.export(tmp_path / "c", tmp_path / "o", to="orbax")
    assert made.verified
    text = {"state": {"0": {"exp_avg": ones}, "1": {"exp_avg": twos}}, "list": [{}, ones, twos]}
    same(sw.restore(made.path), {**text, "k": {"7": "x"}})
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        same(checkpointer.restore(made.path), {**text, "k": {"7": "x"}})
    part = sw.export(tmp_path / "c", tmp_path / "part", to="orbax", include="list", exclude="list[1]")
    same(sw.restore(part.path), {"list": {"0": {}, "2": twos}})
    sw.save(tmp_path / "top", [ones, twos])
    assert sw.export(tmp_path / "top", tmp_path / "list", to="orbax").verified


def test_a_state_without_arrays_has_no_database(tmp_path: Path) -> None:
    saved = {"text": "hello", "none": None, "empty": {}}
    of_handler(use_ocdbt=True)(tmp_path / "theirs", saved)
    same(sw.restore(tmp_path / "theirs"), saved)
    sw.save(tmp_path / "c", saved)
    made = sw.export(tmp_path / "c", tmp_path / "ours", to="orbax")
    assert made.files.keys() == {"_METADATA", "_strings.json"}
    same(sw.restore(made.path), saved)
    with ocp.Checkpointer(ocp.PyTreeCheckpointHandler()) as checkpointer:
        same(checkpointer.restore(made.path), saved)
