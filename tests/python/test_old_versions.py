"""Checkpoints that old versions of torch and Orbax wrote are read bit for bit. The scripts in
``tests/foreign`` have made them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import stepwell as sw

FOLDER = Path(__file__).parents[1] / "foreign"
VERSIONS = ["torch_2.2.2", "torch_2.4.1"]
FILES = ["archive.pt", "stream.pt", "protocol_4.pt", "dcp", "dcp_of_ranks"]


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """The leaves of a state, as the scripts name and show them."""
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


def numbers(found: dict[str, object], expected: dict[str, object]) -> dict[str, object]:
    """The leaves found, with Python's numbers where they were saved. Orbax stores these as arrays
    without dimensions."""
    for path in (path for path, value in expected.items() if not isinstance(value, list)):
        match found[path]:
            case [str() as dtype, [], str() as data]:
                found[path] = np.frombuffer(bytes.fromhex(data), dtype)[0]
    return found


ORBAX = sorted(
    f"{folder.name}/{name}"
    for folder in FOLDER.glob("orbax_*")
    for name in json.loads((folder / "expected.json").read_bytes())
)


@pytest.mark.parametrize("name", ORBAX)
def test_old_versions_of_orbax_are_read_bit_for_bit(name: str, tmp_path: Path) -> None:
    path = FOLDER / name
    expected = json.loads((path.parent / "expected.json").read_bytes())[path.name]
    if path.name == "manager":
        path /= "3"
    assert numbers(dict(leaves(sw.restore(path))), expected) == expected
    assert sw.verify(path).ok
    made = sw.convert(path, tmp_path / "c", to="stepwell", verify=True)
    assert numbers(dict(leaves(sw.restore(made.path))), expected) == expected


@pytest.mark.parametrize("name", [name for name in ORBAX if "0.4.8" in name and "manager" not in name])
def test_an_old_item_may_have_the_name_of_a_step(name: str, tmp_path: Path) -> None:
    for called in ("100", "ckpt_5"):
        shutil.copytree(FOLDER / name, tmp_path / "root" / called)
        assert list(sw.restore(tmp_path / "root" / called)) == list(sw.restore(FOLDER / name))
    assert sw.open_root(tmp_path / "root").latest.name == "100"


def test_all_files_of_old_versions_are_there() -> None:
    assert len(ORBAX) == 22
