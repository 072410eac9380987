"""Checkpoints that old versions of torch wrote are read bit for bit. ``tests/foreign/make.py`` has
made them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import stepwell as sw

FOLDER = Path(__file__).parents[1] / "foreign"
VERSIONS = ["torch_2.2.2", "torch_2.4.1"]
FILES = ["archive.pt", "stream.pt", "protocol_4.pt", "dcp", "dcp_of_ranks"]


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """The leaves of a state, as ``make.py`` names and shows them."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from leaves(one, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for at, one in enumerate(value):
            yield from leaves(one, f"{path}/{at}")
    elif isinstance(value, np.ndarray):
        yield path, [value.dtype.name, list(value.shape), value.tobytes().hex()]
    else:
        yield path, value


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("file", FILES)
def test_files_of_old_versions_are_read_bit_for_bit(version: str, file: str) -> None:
    expected = json.loads((FOLDER / version / "expected.json").read_bytes())[file]
    assert dict(leaves(sw.restore(FOLDER / version / file))) == expected
    assert sw.verify(FOLDER / version / file).ok
