"""Checkpoints of other libraries in object stores: read, verified, converted and written there."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw

pytest.importorskip("moto")
sys.path.append(str(Path(__file__).parent))
from command_line import process
from ranks import run

#: The end of the URL by format.
FORMATS = {
    "safetensors": "",
    "torch": ".pt",
    "npz": ".npz",
    "dcp": "",
    "megatron": "",
    "orbax": "",
    "stepwell": "",
}


def client(server: dict[str, str]) -> Any:
    import boto3  # moto has it

    return boto3.client("s3", endpoint_url=server["AWS_ENDPOINT_URL"])


def upload(server: dict[str, str], directory: Path, url: str) -> None:
    """Copies the files of a directory as they are."""
    prefix = url.removeprefix("s3://bucket/")
    for file in directory.rglob("*"):
        if file.is_file():
            key = f"{prefix}/{file.relative_to(directory).as_posix()}"
            client(server).upload_file(str(file), "bucket", key)


def keys(server: dict[str, str], url: str) -> list[str]:
    found = client(server).list_objects_v2(Bucket="bucket", Prefix=url.removeprefix("s3://bucket/"))
    return [one["Key"] for one in found.get("Contents", ())]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a tensor of several parts of an upload, and a small one."""
    path = tmp_path_factory.mktemp("source") / "checkpoint"
    sw.save(path, {"w": np.arange(5 << 20, dtype=np.float32), "b": np.arange(7, dtype=np.int64)})
    return path


def assert_has_source(found: dict[str, Any]) -> None:
    np.testing.assert_array_equal(found["w"], np.arange(5 << 20, dtype=np.float32))
    np.testing.assert_array_equal(found["b"], np.arange(7))


@pytest.mark.parametrize("to", FORMATS)
def test_each_format_is_written_and_read(url: str, source: Path, to: Any, tmp_path: Path) -> None:
    place = url + FORMATS[to]
    made = sw.convert(source, place, to=to, verify=True)
    assert made.verified
    assert_has_source(sw.restore(place))
    assert sw.verify(place).ok
    with sw.open(place) as checkpoint:
        assert checkpoint.path == place
        assert {one.path for one in checkpoint.contents() if one.shape is not None} >= {"w", "b"}
    with pytest.raises(sw.StepwellError, match="exists already"):
        sw.convert(source, place, to=to)
    back = tmp_path / "back"
    sw.convert(place, back, to="stepwell")
    assert_has_source(sw.restore(back))


def test_files_of_other_libraries_are_read(url: str, server: dict[str, str], tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    shards = {"a": {"x": np.ones((3, 2), np.float32)}, "b": {"y": np.arange(4)}}
    model = tmp_path / "model"
    model.mkdir()
    for name, tensors in shards.items():
        safetensors.save_file(tensors, model / f"model-{name}.safetensors")
    weight_map = {"x": "model-a.safetensors", "y": "model-b.safetensors"}
    (model / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    upload(server, model, url)
    found = sw.restore(url, include="y")
    assert list(found) == ["y"]
    np.testing.assert_array_equal(found["y"], np.arange(4))
    target = {"x": np.zeros((3, 2), np.float64)}
    sw.restore(f"{url}/model-a.safetensors", into=target)
    assert (target["x"] == 1).all()
    listed = process("show", url)
    assert listed.returncode == 0, listed.stderr
    assert "safetensors" in listed.stdout
    with pytest.raises(sw.MisuseError, match="object store, where nothing is adopted"):
        sw.adopt(url)
    client(server).delete_object(
        Bucket="bucket", Key=f"{url.removeprefix('s3://bucket/')}/model-b.safetensors"
    )
    with pytest.raises(sw.StorageError, match=r"model-b\.safetensors"):
        sw.restore(url)


def test_a_root_of_a_trainer_is_listed(url: str, server: dict[str, str], tmp_path: Path) -> None:
    safetensors = pytest.importorskip("safetensors.numpy")
    for step in (5, 10):
        directory = tmp_path / "run" / f"checkpoint-{step}"
        directory.mkdir(parents=True)
        safetensors.save_file({"x": np.full(3, step)}, directory / "model.safetensors")
        (directory / "trainer_state.json").write_text(json.dumps({"global_step": step}))
    upload(server, tmp_path / "run", url)
    root = sw.open_root(url)
    assert [one.number for one in root.steps] == [5, 10]
    local = sw.open_root(tmp_path / "run")
    assert [one.incomplete for one in root.steps] == [one.incomplete for one in local.steps]
    for step in (5, 10):
        assert sw.restore(url, step)["model"]["x"][0] == step
    assert sw.restore(f"{url}/checkpoint-5")["x"][0] == 5


def test_an_object_that_is_replaced_while_it_is_open_is_found(
    url: str, server: dict[str, str], source: Path
) -> None:
    place = f"{url}.npz"
    sw.convert(source, place, to="npz")
    with sw.open(place) as checkpoint:
        key = place.removeprefix("s3://bucket/")
        body = bytearray(client(server).get_object(Bucket="bucket", Key=key)["Body"].read())
        body[9 << 20] ^= 1  # its length and perhaps its time stay
        client(server).put_object(Bucket="bucket", Key=key, Body=bytes(body))
        with pytest.raises(sw.CorruptCheckpoint, match=r"changed|replaced"):
            checkpoint.restore()


def test_checksums_of_adopted_files_count_in_a_store(
    url: str, server: dict[str, str], source: Path, tmp_path: Path
) -> None:
    sw.convert(source, tmp_path / "model", to="safetensors")
    sw.adopt(tmp_path / "model")
    upload(server, tmp_path / "model", url)
    report = sw.verify(url)
    assert report.ok
    assert report.unguarded_nbytes == 0
    file = tmp_path / "model" / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[9 << 20] ^= 1
    file.write_bytes(data)
    upload(server, tmp_path / "model", url)
    assert not sw.verify(url).ok
    with pytest.raises(sw.CorruptCheckpoint, match="w"):
        sw.restore(url)


def test_nothing_is_written_into_a_run(url: str, source: Path, server: dict[str, str]) -> None:
    with sw.CheckpointManager(url) as mgr:
        mgr.save(1, {"w": np.arange(3)}).result()
        before = keys(server, url)
        with pytest.raises(sw.MisuseError, match="beside the steps"):
            sw.convert(source, f"{url}/hf", to="safetensors")
        assert keys(server, url) == before
        made = sw.convert(source, f"{url}/hf/1.safetensors", to="safetensors", verify=True)
        assert made.verified
        assert mgr.all_steps() == [1]
    assert_has_source(sw.restore(f"{url}/hf/1.safetensors"))


def test_a_failed_conversion_leaves_nothing(
    url: str, source: Path, server: dict[str, str], tmp_path: Path
) -> None:
    damaged = tmp_path / "damaged"
    sw.open(source).copy(damaged)
    file = next(damaged.rglob("*.data"))
    data = bytearray(file.read_bytes())
    data[9 << 20] ^= 1
    file.write_bytes(data)
    for to, end in (("dcp", ""), ("torch", ".pt")):
        with pytest.raises(sw.CorruptCheckpoint):
            sw.convert(damaged, url + end, to=to)  # type: ignore[arg-type]
        assert keys(server, url) == []
    sw.convert(source, url, to="dcp", verify=True)


SHARED = """
sw.convert(sys.argv[5], sys.argv[6], to="dcp", verify=True,
    coordinator=sw.coordinators.SharedDirectory(RANK, WORLD, "job", path=ROOT))
sw.convert(sys.argv[5], sys.argv[6] + ".npz", to="npz", verify=True,
    coordinator=sw.coordinators.SharedDirectory(RANK, WORLD, "another", path=ROOT))
"""


def test_ranks_share_a_conversion(url: str, source: Path, tmp_path: Path) -> None:
    meeting = tmp_path / "meeting"
    meeting.mkdir()
    run(tmp_path, SHARED, 3, meeting, str(source), url)
    assert_has_source(sw.restore(url))
    assert_has_source(sw.restore(f"{url}.npz"))


def test_commands_convert_between_urls(url: str, source: Path) -> None:
    made = process("convert", str(source), url, "--to", "safetensors", "--verify")
    assert made.returncode == 0, made.stderr
    exported = process("export", url, f"{url}.pt", "--to", "torch")
    assert exported.returncode == 0, exported.stderr
    for command in ("show", "verify", "ls"):
        found = process(command, f"{url}.pt")
        assert found.returncode == 0, (command, found.stdout, found.stderr)
    assert os.path.basename(url) in exported.stdout
