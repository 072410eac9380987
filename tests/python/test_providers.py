"""Leaves of the user's that say where their bytes are."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw


class Pages:
    """A table whose rows lie in pages, none of them next to another."""

    def __init__(self, rows: int, page: int, columns: int = 6, capture: Any = "now") -> None:
        self.dtype, self.shape = np.dtype(np.float32), (rows, columns)
        self.capture = capture
        self.pages = [
            np.zeros((min(page, rows - first), columns), np.float32) for first in range(0, rows, page)
        ]

    def stepwell_chunks(self) -> Iterable[sw.Chunk]:
        first = 0
        for page in self.pages:
            yield sw.Chunk(page, (first, 0), self.capture)
            first += len(page)

    def fill(self, value: float) -> None:
        for number, page in enumerate(self.pages):
            page[...] = value + number

    def whole(self) -> np.ndarray[Any, Any]:
        return np.concatenate(self.pages)


@pytest.mark.parametrize("capture", ["now", "lazy"])
def test_what_lies_in_pieces_is_stored_as_one_array_and_fills_the_pieces_again(
    root: Path, capture: str
) -> None:
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


def test_pieces_that_do_not_make_up_the_whole_are_refused_by_path(root: Path) -> None:
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


def test_what_a_provider_gives_must_be_chunks(root: Path) -> None:
    class Wrong:
        dtype, shape = "float32", (2,)

        def stepwell_chunks(self) -> Any:
            return [np.zeros(2, np.float32)]

    with sw.CheckpointManager(root) as mgr, pytest.raises(sw.MisuseError, match=r"sw\.Chunk"):
        mgr.save(0, {"w": Wrong()})
