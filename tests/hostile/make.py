"""Makes hostile checkpoints: steps with valid checksums whose content is meant to harm the reader.

``CASES`` maps a name to a change of a sound checkpoint (made by :func:`sound`) and to words that
the refusal must contain. The package writes none of them: checksums are computed here, so that
no check of a writer interferes. ``python tests/hostile/make.py DIRECTORY`` writes them all for
inspection. Damage with invalid checksums (flipped bits, truncations, swapped files) is in
``tests/tests/corruption.rs``, symlinks inside a step in ``tests/tests/strangers.rs``.
"""

from __future__ import annotations

import json
import os
import shutil
import socket
import struct
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

Change = Callable[[Path], None]

_TABLE = []
for _byte in range(256):
    for _ in range(8):
        _byte = _byte >> 1 ^ (0x82F63B78 if _byte & 1 else 0)
    _TABLE.append(_byte)


def crc32c(data: bytes) -> int:
    """CRC-32C."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc = crc >> 8 ^ _TABLE[(crc ^ byte) & 0xFF]
    return crc ^ 0xFFFFFFFF


def sound(path: Path) -> None:
    """The checkpoint that the cases change: two items, arrays, objects and a tie."""
    import numpy as np
    import stepwell as sw

    w = np.arange(600, dtype=np.float32).reshape(20, 30)
    sw.save(
        path,
        {"params": {"w": w, "tied": w, "b": np.zeros(3, np.int8)}, "names": {"run": "x", "sizes": [1, 2.5]}},
    )


# ---- sealing
# ---------------------------------------------------------------------------------------


def manifest(path: Path) -> dict[str, Any]:
    """The manifest's content."""
    return dict(json.loads((path / "manifest.json").read_bytes().rsplit(b"\n", 2)[0]))


def seal_manifest(path: Path, body: bytes) -> None:
    """Writes a manifest whose checksum holds."""
    body = body if body.endswith(b"\n") else body + b"\n"
    file = path / "manifest.json"
    file.unlink()
    file.write_bytes(body + b'{"crc32c": "%08x"}\n' % crc32c(body))


def seal_index(path: Path, item: int, index: bytearray) -> None:
    """Writes an index whose every checksum holds, those in the manifest included."""
    (root_length,) = struct.unpack_from("<Q", index, 40)
    root, pages = index[128 : 128 + root_length], 128 + root_length
    # The root table's first two columns: the pages' lengths and checksums.
    at = len(root) - 72
    offset, count = struct.unpack_from("<iI", root, at)
    lengths = struct.unpack_from(f"<{count}Q", root, at + offset)
    crcs = at + 8 + struct.unpack_from("<i", root, at + 8)[0]
    for number, length in enumerate(lengths):
        struct.pack_into("<I", root, crcs + 4 * number, crc32c(index[pages : pages + length]))
        pages += length
    index[128 : 128 + root_length] = root
    struct.pack_into("<I", index, 48, crc32c(root))
    struct.pack_into("<I", index, 8, crc32c(index[12:128]))
    content = manifest(path)
    entry = content["items"][item]["index"]
    file = path / entry["path"]
    file.unlink()
    file.write_bytes(index)
    entry["length"], entry["crc32c"] = len(index), f"{crc32c(index):08x}"
    seal_manifest(path, json.dumps(content, indent=2).encode())


def index_words(path: Path, item: int = 0) -> Iterator[tuple[str, bytearray]]:
    """Every word of an index's page and of the page's own header, set to what is too small, too
    large, or negative."""
    index = (path / manifest(path)["items"][item]["index"]["path"]).read_bytes()
    (root_length,) = struct.unpack_from("<Q", index, 40)
    for at in range(128 + root_length, len(index) - 3):
        for value in (0, 1, 0x7FFFFFFF, 0xFFFFFFFF):
            changed = bytearray(index)
            struct.pack_into("<I", changed, at, value)
            if changed != index:
                yield f"{value:#x} at {at}", changed


# ---- the cases
# ---------------------------------------------------------------------------------------


def _edit(*where: str | int, to: Any) -> Change:
    """Changes one value of the manifest."""

    def change(path: Path) -> None:
        content = manifest(path)
        inside: Any = content
        for key in where[:-1]:
            inside = inside[key]
        inside[where[-1]] = to
        seal_manifest(path, json.dumps(content, indent=2).encode())

    return change


def _raw(make: Callable[[bytes], bytes]) -> Change:
    """Changes the manifest's text."""

    def change(path: Path) -> None:
        seal_manifest(path, make((path / "manifest.json").read_bytes().rsplit(b"\n", 2)[0]))

    return change


def _instead(name: str, make: Callable[[Path], None]) -> Change:
    """Puts something else where a file was."""

    def change(path: Path) -> None:
        (path / name).unlink()
        make(path / name)

    return change


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # names of sockets are short
    try:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(path.name)
    finally:
        os.chdir(here)


def _device(path: Path) -> None:
    os.mknod(path, 0o20666, os.makedev(1, 5))  # zeros without end


def _outside(path: Path) -> None:
    """A link to a sound file of the same content outside the step."""
    step = next(above for above in path.parents if (above / "i0").is_dir())
    path.symlink_to(step.parent / "outside" / path.relative_to(step))


def _sparse(path: Path) -> None:
    with open(path, "wb") as file:
        file.truncate(1 << 42)


def _sparse_data(path: Path) -> None:
    """A data file of four terabytes of nothing, its length in manifest and index."""
    content = manifest(path)
    file, length = path / "i0/00000.data", 1 << 42
    index = bytearray((path / "i0/index").read_bytes())
    at = index.index(struct.pack("<Q", content["files"][0]["length"]))
    struct.pack_into("<Q", index, at, length)
    with open(file, "r+b") as opened:
        opened.truncate(length)
    content["files"][0]["length"] = length
    seal_manifest(path, json.dumps(content, indent=2).encode())
    seal_index(path, 0, index)


CASES: dict[str, tuple[Change, str]] = {
    "numbers/world": (_edit("world_size", to=2**64), "world_size|invalid|number"),
    "numbers/step": (_edit("step", to=2**63), "step"),
    "numbers/negative": (_edit("step", to=-1), "invalid value"),
    "numbers/float": (_edit("step", to=1e300), "invalid"),
    "numbers/beyond": (_raw(lambda body: body.replace(b'"world_size": 1', b'"world_size": 1e999')), "number"),
    "numbers/index": (_edit("items", 0, "index", "length", to=2**63 - 1), "length of an index"),
    "numbers/index_in_bounds": (_edit("items", 0, "index", "length", to=4 << 30), "not the index"),
    "numbers/leaves": (_edit("items", 0, "leaves", to=2**64 - 1), "leaves"),
    "numbers/file": (_edit("files", 0, "length", to=2**64 - 1), "length of a data file"),
    "numbers/file_in_bounds": (_edit("files", 0, "length", to=1 << 49), "agree"),
    "numbers/times": (_edit("committed_unix_ns", to=2**200), "number|integer|invalid"),
    "twice/key": (_raw(lambda body: body.replace(b'"step":', b'"step": 0, "step":', 1)), "twice"),
    "twice/items": (_raw(lambda body: body.replace(b'"name": "names"', b'"name": "params"')), "twice"),
    "twice/files": (_raw(lambda body: body.replace(b"i1/00000.data", b"i0/00000.data")), "twice"),
    "paths/above": (_edit("files", 0, "path", to="../outside/i0/00000.data"), r"\.\."),
    "paths/above_inside": (_edit("files", 0, "path", to="i0/../../outside/i0/00000.data"), r"\.\."),
    "paths/absolute": (_edit("items", 0, "index", "path", to="/etc/hostname"), "empty component"),
    "paths/index_above": (_edit("items", 0, "index", "path", to="i0/../../outside/i0/index"), r"\.\."),
    "paths/directory_above": (_edit("items", 0, "dir", to=".."), r"\.\."),
    "paths/null": (_edit("files", 0, "path", to="i0/\0"), "control character"),
    "paths/hidden": (_edit("files", 0, "path", to="i0/.lease"), "dot"),
    "paths/long": (_edit("files", 0, "path", to="i0/" + "x/" * 5000), "longer"),
    "paths/dropped": (_edit("dropped", to=[{"item": "x", "dir": "i9", "paths": ["../outside/i0/index"], "unix_ns": 0}]), r"\.\."),
    "nesting/lists": (_raw(lambda body: body.replace(b'"custom_metadata": null', b'"custom_metadata": ' + b"[" * 100_000 + b"]" * 100_000)), "recursion"),
    "nesting/objects": (_raw(lambda body: body.replace(b'"writer":', b'"new": ' + b'{"a":' * 100_000 + b"1" + b"}" * 100_000 + b', "writer":')), "recursion"),
    "absurd/null": (_raw(lambda _: b"null"), "manifest"),
    "absurd/list": (_raw(lambda _: b"[1, 2]"), "manifest|twice|format"),
    "absurd/empty": (_raw(lambda _: b"{}"), "manifest"),
    "absurd/text": (_raw(lambda _: b"\xff\xfe"), "manifest|value"),
    "absurd/no_items": (_edit("items", to=[]), "not below|item"),
    "absurd/many_files": (_raw(lambda body: body.replace(b'"files": [', b'"files": [' + b'{"path": "i0/x", "length": 9000, "trailer_crc32c": "00000000", "file_id": "0"},' * 50_000)), "hexadecimal|twice"),
    "absurd/swapped": (_raw(lambda body: body.replace(b'"i0', b'"i2').replace(b'"i1', b'"i0').replace(b'"i2', b'"i1')), "not the index|agree|entries"),
    "absurd/dropped_alive": (_edit("dropped", to=[{"item": "params", "dir": "i0", "paths": ["i0/index"], "unix_ns": 0}]), "twice"),
    "index/header": (lambda path: seal_index(path, 0, _words((path / "i0/index").read_bytes(), 56, 2**63)), "leaves|index|nodes"),
    "index/sparse": (_instead("i0/index", _sparse), "longer|not the index"),
    "data/sparse_with_right_length": (_sparse_data, "index and manifest|zeros|trailer|header|magic|footer"),
}  # fmt: skip

for _name in ("manifest.json", "i0/index", "i0/00000.data"):
    CASES |= {
        f"{_name}/fifo": (_instead(_name, lambda path: os.mkfifo(path)), "regular file"),
        f"{_name}/directory": (_instead(_name, lambda path: path.mkdir()), "regular file|directory"),
        f"{_name}/socket": (_instead(_name, _socket), "regular file|No such device"),
        f"{_name}/device": (_instead(_name, _device), "regular file"),
        f"{_name}/link": (_instead(_name, _outside), "symbolic|link|ELOOP"),
        f"{_name}/link_to_device": (
            _instead(_name, lambda path: path.symlink_to("/dev/zero")),
            "symbolic|link|ELOOP",
        ),
    }
CASES["manifest.json/sparse"] = (_instead("manifest.json", _sparse), "limit|longer")
CASES[".lease/fifo"] = (_instead(".lease", lambda path: os.mkfifo(path)), "")
CASES[".lease/device"] = (_instead(".lease", _device), "")


def _words(index: bytes, at: int, value: int) -> bytearray:
    changed = bytearray(index)
    struct.pack_into("<Q", changed, at, value)
    return changed


def make(name: str, directory: Path) -> Path:
    """The hostile checkpoint of that name in an empty directory, beside a sound one (``outside``)
    that nothing may read."""
    sound(directory / "outside")
    shutil.copytree(directory / "outside", directory / "step")
    CASES[name][0](directory / "step")
    return directory / "step"


if __name__ == "__main__":
    for _case in CASES:
        _directory = Path(sys.argv[1]) / _case.replace("/", "-")
        _directory.mkdir(parents=True)
        print(make(_case, _directory))
