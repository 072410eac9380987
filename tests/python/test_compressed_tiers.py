"""Tiers with compressed copies: the same values in fewer bytes, however they are read."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import stepwell as sw

sys.path.append(str(Path(__file__).parent))
from threads import together


@pytest.fixture(params=["disk", "store"])
def home(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    return request.getfixturevalue("bucket") if request.param == "store" else str(tmp_path / "home")


def state(seed: int = 0) -> dict[str, Any]:
    random = np.random.default_rng(seed)
    normal = random.standard_normal((1000, 1500)).astype(np.float32)
    return {
        "params": {"w": normal.astype(ml_dtypes.bfloat16), "b": normal[0]},
        "optimizer": {"m": normal * 1e-3, "v": np.zeros((600, 1000), np.float64)},
        "noise": random.integers(0, 256, 300_000, np.uint8),
        "complex": (normal[:100] + 1j * normal[100:200]).astype(np.complex64),
        "flags": normal[:, 0] > 0,
        "empty": np.empty((0, 3), np.int16),
        "step": seed,
    }


def same(found: object, wanted: object) -> bool:
    if isinstance(wanted, dict):
        return isinstance(found, dict) and all(same(found[key], value) for key, value in wanted.items())
    if isinstance(wanted, np.ndarray):
        return (
            isinstance(found, np.ndarray)
            and found.dtype == wanted.dtype
            and found.tobytes() == wanted.tobytes()
        )
    return found == wanted


def stored(path: object) -> int:
    with sw.open(path) as checkpoint:
        return sum(file["length"] for file in checkpoint.manifest["files"])


def carried(near: Path, home: str, **options: object) -> None:
    tiers = [sw.Tier(near), sw.Tier(home, all_due=True, **options)]  # type: ignore[arg-type]
    with sw.CheckpointManager(tiers=tiers) as mgr:
        for step in range(2):
            mgr.save(step, state(step))
        mgr.wait_until_carried()
        assert mgr.tiers()[1].steps == (0, 1)


def test_a_compressed_tier_gives_the_same_values(home: str, tmp_path: Path) -> None:
    near = tmp_path / "near"
    carried(near, home, compress=True)
    assert stored(home) < 0.75 * stored(near)
    assert same(sw.restore(home), state(1))
    assert sw.verify(home).ok
    shutil.rmtree(near)
    with sw.CheckpointManager(tiers=[sw.Tier(tmp_path / "new"), sw.Tier(home, compress=True)]) as mgr:
        found, first = mgr.resume(state(5))
        assert first == 2
        assert same(found, state(1))


def test_globs_choose_what_is_compressed(home: str, tmp_path: Path) -> None:
    near = tmp_path / "near"
    carried(near, home, compress=["optimizer"])
    assert 0.2 * stored(near) < stored(near) - stored(home)
    with sw.open(home) as checkpoint, sw.open(near) as source:
        files = {file["path"]: file for file in source.manifest["files"]}
        changed = [file for file in checkpoint.manifest["files"] if file != files[file["path"]]]
        assert len(changed) == 1
        assert checkpoint.manifest["required_features"] == ["compressed_chunks"]
    assert same(sw.restore(home), state(1))


def test_every_way_to_read_decodes(home: str, tmp_path: Path) -> None:
    carried(tmp_path / "near", home, compress=True)
    wanted = state(1)
    with sw.open(home) as checkpoint:
        lazy = checkpoint["params/w"]
        assert np.array_equal(np.asarray(lazy[7:9]), wanted["params"]["w"][7:9])
        with sw.open(tmp_path / "near") as source:
            assert not checkpoint.diff(source)
    into = {"params": {"w": np.zeros((1000, 1500), np.float32)}}
    doubled = sw.restore(home, into=into, cast="lossless", unexpected="ignore")
    assert np.array_equal(doubled["params"]["w"], wanted["params"]["w"].astype(np.float32))
    sw.export(home, tmp_path / "x.safetensors", include="params")
    found = sw.restore(tmp_path / "x.safetensors")
    assert same({key.removeprefix("params."): value for key, value in found.items()}, wanted["params"])
    sw.convert(home, tmp_path / "converted", to="stepwell")
    assert same(sw.restore(tmp_path / "converted"), wanted)


def test_the_command_line_copies_and_shows(tmp_path: Path) -> None:
    sw.save(tmp_path / "a", state())
    stepwell = [sys.executable, "-m", "stepwell"]
    subprocess.run([*stepwell, "cp", "--compress", "**", tmp_path / "a", tmp_path / "b"], check=True)
    assert stored(tmp_path / "b") < 0.75 * stored(tmp_path / "a")
    subprocess.run([*stepwell, "verify", tmp_path / "b"], check=True)
    subprocess.run([*stepwell, "diff", "--values", tmp_path / "a", tmp_path / "b"], check=True)
    shown = subprocess.run([*stepwell, "show", "--json", tmp_path / "b"], check=True, capture_output=True)
    facts = json.loads(shown.stdout)
    assert facts["bytes"] < 0.75 * facts["array_bytes"]
    with sw.open(tmp_path / "b") as checkpoint:
        checkpoint.copy(tmp_path / "c")
    assert stored(tmp_path / "c") == stored(tmp_path / "b")
    assert same(sw.restore(tmp_path / "c"), state())


def test_a_flipped_bit_of_a_compressed_chunk_is_found(tmp_path: Path) -> None:
    sw.save(tmp_path / "a", state())
    with sw.open(tmp_path / "a") as checkpoint:
        checkpoint.copy(tmp_path / "b", compress="params/w")
    with sw.open(tmp_path / "b") as checkpoint:
        (one,) = [item["dir"] for item in checkpoint.manifest["items"] if item["name"] == "params"]
    (file,) = (tmp_path / "b" / one).glob("*.data")
    good = file.read_bytes()
    for at in range(4096, len(good), len(good) // 23):
        file.write_bytes(good[:at] + bytes([good[at] ^ 16]) + good[at + 1 :])
        assert not sw.verify(tmp_path / "b").ok, at
        with contextlib.suppress(sw.errors.CorruptCheckpoint):
            assert same(sw.restore(tmp_path / "b"), state()), at
    file.write_bytes(good)
    assert same(sw.restore(tmp_path / "b"), state())


@pytest.mark.parametrize("compress", ["a[", ["params", 3], 7, b"params"])
def test_wrong_globs_are_refused_at_once(compress: object, tmp_path: Path) -> None:
    with pytest.raises(sw.errors.MisuseError):
        sw.Tier(tmp_path, compress=compress)  # type: ignore[arg-type]
    sw.save(tmp_path / "a", {"x": np.zeros(3)})
    with sw.open(tmp_path / "a") as checkpoint, pytest.raises(sw.errors.MisuseError):
        checkpoint.copy(tmp_path / "b", compress=compress)  # type: ignore[arg-type]


def test_the_first_tier_is_not_compressed(tmp_path: Path) -> None:
    with pytest.raises(sw.errors.MisuseError, match="saves go to the first tier"):
        sw.CheckpointManager(tiers=[sw.Tier(tmp_path / "a", compress=True), sw.Tier(tmp_path / "b")])


def test_every_box_is_that_of_the_source(tmp_path: Path) -> None:
    sw.save(tmp_path / "a", state())
    with sw.open(tmp_path / "a") as source:
        source.copy(tmp_path / "b", compress=True)
    random = np.random.default_rng(3)
    with sw.open(tmp_path / "a") as source, sw.open(tmp_path / "b") as copy:
        for path in ("params/w", "optimizer/m", "optimizer/v", "complex", "noise"):
            shape = source[path].shape
            for _ in range(12):
                begin = [int(random.integers(0, size)) for size in shape]
                box = tuple(
                    slice(at, int(random.integers(at, size)) + 1)
                    for at, size in zip(begin, shape, strict=True)
                )
                wanted = np.asarray(source[path][box])
                assert np.asarray(copy[path][box]).tobytes() == wanted.tobytes(), (path, box)


def test_maps_apply_to_compressed_steps(tmp_path: Path) -> None:
    sw.save(tmp_path / "a", state())
    with sw.open(tmp_path / "a") as source:
        source.copy(tmp_path / "b", compress=True)
    rules = [
        {"split": "optimizer/v", "to": ["first", "second"], "sizes": [1, 2]},
        {"permute": "optimizer/m", "axes": [1, 0]},
        {"crop": "params/w", "size": 700},
        {"rename": "params/{name}", "to": "weights/{name}"},
        {"cast": "weights/w", "to": "float32"},
    ]
    found, wanted = (sw.restore(tmp_path / name, map=rules) for name in ("b", "a"))
    assert np.asarray(wanted["second"]).shape == (400, 1000)
    assert same(found, wanted)


def test_a_compressed_step_is_thinned(home: str, tmp_path: Path) -> None:
    keep = sw.keep_latest(1) | sw.keep_every(steps=1, items="params")
    carried(tmp_path / "near", home, compress=True, retention=keep)
    with sw.open(home, 0) as checkpoint:
        assert list(checkpoint) == ["params"]
        assert same(checkpoint.restore(), {"params": state(0)["params"]})
        assert checkpoint.verify().ok
    assert same(sw.restore(home, 1), state(1))


@pytest.mark.parametrize("files_per", ["rank", "node"])
def test_other_ranks_restore_compressed_steps_of_ranks(tmp_path: Path, files_per: str) -> None:
    whole = np.random.default_rng(1).standard_normal((64, 4000)).astype(np.float32)

    def shard(rank: int, world: int, values: Any) -> dict[str, Any]:
        rows = 64 // world
        place = (rank * rows, 0)
        return {
            "w": sw.sharding.LocalShard(values(slice(rank * rows, (rank + 1) * rows)), whole.shape, place)
        }

    def save(rank: int, manager: sw.CheckpointManager) -> None:
        manager.save(1, shard(rank, 4, lambda rows: whole[rows])).result()

    together(4, tmp_path / "run", save, files_per=files_per)
    with sw.open(tmp_path / "run") as source:
        source.copy(tmp_path / "copy", compress=True)
    assert stored(tmp_path / "copy") < stored(tmp_path / "run")
    assert sw.verify(tmp_path / "copy").ok
    with sw.CheckpointManager(tmp_path / "other") as mgr, sw.open(tmp_path / "copy") as copy:
        mgr.add(copy)

    def restore(rank: int, manager: sw.CheckpointManager) -> Any:
        like = shard(rank, 2, lambda rows: sw.ArraySpec((rows.stop - rows.start, 4000), np.float32))
        return np.asarray(manager.restore(like=like)["w"].local)

    found = together(2, tmp_path / "other", restore)
    assert np.concatenate(found).tobytes() == whole.tobytes()
