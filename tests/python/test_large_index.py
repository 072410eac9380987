"""A rank reads the outline of a large index, and only the pages that it needs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from threads import together

#: Tensors of so many elements in chunks of a few: each fills pages of its own.
ELEMENTS = 800_000
CHUNK = 64
SPEC = sw.ArraySpec((ELEMENTS,), np.float32)


def values(name: str) -> np.ndarray[Any, Any]:
    return np.arange(ELEMENTS, dtype=np.float32) + "abcd".index(name)


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("large")
    half = ELEMENTS // 2

    def save(rank: int, manager: sw.CheckpointManager) -> None:
        mine = slice(rank * half, (rank + 1) * half)
        shards = {
            name: sw.sharding.LocalShard(values(name)[mine], (ELEMENTS,), (rank * half,)) for name in "abcd"
        }
        manager.save(0, {"model": shards}).result()

    together(2, root, save, chunk_bytes=CHUNK)
    return root


def index_of(root: Path) -> Path:
    (index,) = root.glob("step_*/*/index")
    assert index.stat().st_size > 8 << 20
    return index


def wanting(*of_ranks: str) -> Any:
    def restore(rank: int, manager: sw.CheckpointManager) -> Any:
        return manager.restore(0, like={"model": dict.fromkeys(of_ranks[rank], SPEC)})["model"]

    return restore


def test_the_ranks_restore_what_each_wants(root: Path) -> None:
    found = together(2, root, wanting("ab", "bcd"))
    assert [list(one) for one in found] == [list("ab"), list("bcd")]
    for one in found:
        assert all(np.array_equal(one[name], values(name)) for name in one)


def test_what_no_rank_wants_is_named_and_nothing_else(root: Path) -> None:
    said: list[sw.MismatchError] = []

    def restore(rank: int, manager: sw.CheckpointManager) -> None:
        with pytest.raises(sw.MismatchError) as caught:
            wanting("ab", "bd")(rank, manager)
        said.append(caught.value)

    together(2, root, restore)
    for error in said:
        assert [one.path for one in error.report.unexpected] == ["model/c"]
        assert "model/c" in str(error)
        assert not any(f"model/{name}" in str(error) for name in "abd"), error


def test_a_damaged_page_affects_its_own_leaves_only(root: Path) -> None:
    index = index_of(root)
    whole = index.read_bytes()
    damaged = bytearray(whole)
    damaged[len(damaged) * 9 // 10] ^= 1  # among the chunks of "d"
    index.write_bytes(damaged)
    try:
        like = {"model": {**dict.fromkeys("abc", SPEC), "d": ...}}
        for found in together(2, root, lambda rank, manager: manager.restore(0, like=like)):
            assert np.array_equal(found["model"]["c"], values("c"))
        with pytest.raises((sw.CorruptCheckpoint, sw.RankFailed), match="index"):
            together(2, root, wanting("abcd", "abcd"))
        with sw.open(root / "step_00000000") as checkpoint:
            assert np.array_equal(checkpoint["model"]["b"][...], values("b"))
            with pytest.raises(sw.CorruptCheckpoint, match="checksum"):
                checkpoint.verify()
    finally:
        index.write_bytes(whole)
