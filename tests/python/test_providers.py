"""Leaves of the user's that say where their bytes are."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw


class Pages:
    """A table whose rows are in separate pages."""

    def __init__(self, rows: int, page: int, columns: int = 6, capture: Any = "now") -> None:
        self.dtype, self.shape = np.dtype(np.float32), (rows, columns)
        self.capture = capture
        self.pages = [
            np.zeros((min(page, rows - first), columns), np.float32) for first in range(0, rows, page)
        ]

    def stepwell_chunks(self) -> Iterable[sw.providers.Chunk]:
        first = 0
        for page in self.pages:
            yield sw.providers.Chunk(page, (first, 0), self.capture)
            first += len(page)

    def fill(self, value: float) -> None:
        for number, page in enumerate(self.pages):
            page[...] = value + number

    def whole(self) -> np.ndarray[Any, Any]:
        return np.concatenate(self.pages)


@pytest.mark.parametrize("capture", ["now", "lazy"])
def test_an_array_in_pieces_is_stored_as_one(root: Path, capture: str) -> None:
    table = Pages(1000, 64, capture=capture)
    table.fill(3)
    expected = table.whole()
    with sw.CheckpointManager(root) as mgr:
        save = mgr.save(0, {"table": table, "x": 1})
        assert capture == "lazy" or save.captured()
        with mgr.update_guard():
            table.fill(50)
        save.result()
        found = mgr.restore(0)
        assert (found["table"] == expected).all()
        # Pages of another size.
        other = Pages(1000, 300)
        back = mgr.restore(0, into={"table": other, "x": 0})
        assert back["table"] is other
        assert (other.whole() == expected).all()
        assert (mgr.restore(0, like={"table": other, "x": 0})["table"] == expected).all()


def test_incomplete_pieces_are_refused_by_path(root: Path) -> None:
    table = Pages(100, 30)
    table.pages.pop()
    with sw.CheckpointManager(root) as mgr:
        with pytest.raises(sw.UnsupportedLeaf, match="`table`"):
            mgr.save(0, {"table": table})
        table.pages.append(np.zeros((10, 6)))
        with pytest.raises(sw.UnsupportedLeaf, match="float64 in a provider of float32"):
            mgr.save(0, {"table": table})
        assert mgr.all_steps() == []


def test_a_table_of_another_shape_is_a_mismatch(root: Path) -> None:
    with sw.CheckpointManager(root) as mgr:
        mgr.save(0, {"table": Pages(100, 30)}).result()
        with pytest.raises(sw.MismatchError, match="table"):
            mgr.restore(0, into={"table": Pages(101, 30)})


class Given:
    """A provider of these chunks."""

    def __init__(self, chunks: Any, dtype: Any = "float32") -> None:
        self.dtype, self.shape, self.chunks = dtype, (10, 4), chunks

    def stepwell_chunks(self) -> Any:
        return self.chunks


def rows(first: int, count: int) -> sw.providers.Chunk:
    return sw.providers.Chunk(np.zeros((count, 4), np.float32), (first, 0))


BUFFER = np.zeros((5, 4), np.float32)


@pytest.mark.parametrize(
    ("chunks", "why"),
    [
        ([np.zeros((10, 4), np.float32)], r"gives sw\.providers\.Chunk"),
        ([sw.providers.Chunk([[0.0] * 4] * 10)], "a Chunk holds an array, not list"),
        ([rows(-1, 10)], "the offset of a Chunk has no negative numbers"),
        ([sw.providers.Chunk(np.zeros((10, 4), np.float32), (0,))], "one number for each dimension"),
        ([rows(0, 3), rows(5, 5)], r"no chunk holds \[3:5, 0:4\]"),
        ([rows(0, 6), rows(5, 5)], r"chunks 0 and 1 both hold \[5:6, 0:4\]"),
        ([rows(5, 10)], "chunk 0 does not lie in the tensor"),
        (
            [sw.providers.Chunk(BUFFER, (0, 0)), sw.providers.Chunk(BUFFER, (5, 0))],
            "chunks 0 and 1 are the same memory",
        ),
    ],
)
def test_incomplete_chunks_are_refused_by_path_unwritten(root: Path, chunks: Any, why: str) -> None:
    kept = np.full(3, 7.0)
    with sw.CheckpointManager(root) as mgr:
        with pytest.raises(sw.UnsupportedLeaf, match=f"`table`.*{why}"):
            mgr.save(0, {"table": Given(chunks)})
        mgr.save(0, {"a": np.zeros(3), "table": np.ones((10, 4), np.float32)}).result()
        with pytest.raises(sw.UnsupportedLeaf, match=f"`table`.*{why}"):
            mgr.restore(0, into={"a": kept, "table": Given(chunks)})
        assert (kept == 7).all()
        assert not BUFFER.any()


def test_an_unfillable_provider_is_reported_unwritten(root: Path) -> None:
    fixed = np.zeros((10, 4), np.float32)
    fixed.flags.writeable = False
    kept = np.full(3, 7.0)
    with sw.CheckpointManager(root) as mgr:
        mgr.save(0, {"a": np.zeros(3), "table": Given([sw.providers.Chunk(fixed)])}).result()
        with pytest.raises(sw.UnsupportedLeaf, match=r"`table`.*read-only"):
            mgr.restore(0, into={"a": kept, "table": Given([sw.providers.Chunk(fixed)])})
        assert (kept == 7).all()
        assert not mgr.restore(0, like={"a": kept, "table": Given([sw.providers.Chunk(fixed)])})[
            "table"
        ].any()


def test_a_dtype_that_is_none_of_numpys_is_refused_by_path(root: Path) -> None:
    with (
        sw.CheckpointManager(root) as mgr,
        pytest.raises(sw.UnsupportedLeaf, match=r"`table`.*dtype of a provider"),
    ):
        mgr.save(0, {"table": Given([rows(0, 10)], dtype=object())})


class Rows:
    """Two halves in another byte order than this machine's."""

    def __init__(self, values: np.ndarray[Any, Any]) -> None:
        self.dtype, self.shape = values.dtype, values.shape
        middle = len(values) // 2
        self.halves = (values[:middle].copy(), values[middle:].copy())

    def stepwell_chunks(self) -> Iterable[sw.providers.Chunk]:
        yield sw.providers.Chunk(self.halves[0], (0,))
        yield sw.providers.Chunk(self.halves[1], (len(self.halves[0]),), "lazy")


def test_chunks_in_another_byte_order_are_stored_by_value(root: Path) -> None:
    values = (np.arange(10) * 1000 + 1).astype(">f8")
    sw.save(root, {"table": Rows(values)})
    np.testing.assert_array_equal(sw.restore(root)["table"], values)
    table = Rows(np.zeros(10, ">f8"))
    sw.restore(root, into={"table": table})
    np.testing.assert_array_equal(np.concatenate(table.halves), values)
