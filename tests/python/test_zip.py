"""The directory of zip archives, as ``zipfile`` and ``torch.save`` write them."""

from __future__ import annotations

import zipfile
import zlib
from pathlib import Path

import pytest
import stepwell as sw
from stepwell import _core

SIZES = [0, 1, 100, 5000, 70_000, 3_000_000]


def archive(path: Path, count: int, method: int = zipfile.ZIP_STORED) -> dict[str, bytes]:
    """Writes an archive of that many members, and returns their contents."""
    contents = {
        f"run.1/data/{n}": bytes([n % 251]) * SIZES[n % len(SIZES) if count < 50 else 2] for n in range(count)
    }
    with zipfile.ZipFile(path, "w", method) as file:
        for name, content in contents.items():
            file.writestr(name, content)
    return contents


@pytest.mark.parametrize("count", [0, 1, 13, 3000])
def test_members_lie_where_the_archive_says(tmp_path: Path, count: int) -> None:
    path = tmp_path / "a.zip"
    contents = archive(path, count)
    raw = path.read_bytes()
    directory = _core.ZipDirectory(path)
    members = directory.members()
    assert [one[0] for one in members] == list(contents)
    offsets = directory.contents(range(len(members)))
    for (name, method, crc, stored, length), at in zip(members, offsets, strict=True):
        assert raw[at : at + length] == contents[name]
        expected = zlib.crc32(contents[name]) if any(contents.values()) else None
        assert (method, crc, stored) == ("stored", expected, length)
    some = list(range(len(members)))[-2:]
    assert directory.contents(some) == offsets[-2:]


def test_a_deflated_member_has_two_lengths(tmp_path: Path) -> None:
    contents = archive(tmp_path / "a.zip", 6, zipfile.ZIP_DEFLATED)
    directory = _core.ZipDirectory(tmp_path / "a.zip")
    name, method, _, stored, length = directory.members()[-1]
    (at,) = directory.contents([5])
    raw = (tmp_path / "a.zip").read_bytes()
    assert (method, length) == ("deflated", len(contents[name]))
    assert zlib.decompress(raw[at : at + stored], -15) == contents[name]


def test_a_damaged_archive_is_named(tmp_path: Path) -> None:
    path = tmp_path / "a.zip"
    archive(path, 13)
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(sw.CorruptCheckpoint, match="end record") as failure:
        _core.ZipDirectory(path)
    assert str(path) in str(failure.value)
