"""File systems with and without direct I/O, with sectors of 512 and of 4096 bytes, layered and
plain: every engine writes the same bytes on each."""

from __future__ import annotations

import shutil
from pathlib import Path

import images
from conftest import need
from lab import Lab, output, which
from repeated import repeat

ENGINES = ("auto", "uring", "threads", "buffered")


def places(lab: Lab) -> dict[str, Path]:
    """A directory on each kind of file system that can be had here."""
    found = {
        "tmpfs": lab.mount("tmpfs", "tmpfs", "tmpfs", "size=64m"),
        "tmpfs, huge pages": lab.mount("tmpfs", "huge", "tmpfs", "size=64m,huge=within_size"),
        "ramfs": lab.mount("ramfs", "ramfs", "ramfs", "mode=755"),
    }
    for kind in images.KINDS:
        if which(f"mkfs.{kind}"):
            found[kind] = lab.mount(images.make(lab.at / f"{kind}.img", kind), kind, kind)
    found["ext4, sectors of 4096 bytes"] = coarse(lab)
    layers = {layer: lab.dir(layer) for layer in ("lower", "upper", "work")}
    options = f"lowerdir={layers['lower']},upperdir={layers['upper']},workdir={layers['work']}"
    found["overlay on tmpfs"] = lab.mount("overlay", "overlay", "overlay", options)
    return found


def coarse(lab: Lab) -> Path:
    """A disk with sectors of 4096 bytes."""
    image = lab.at / "coarse.img"
    output("truncate", "-s", "64M", image)
    device = output("losetup", "--find", "--show", "--sector-size", "4096", image).strip()
    try:
        output("mkfs.ext4", "-q", "-F", "-b", "4096", device)
        return lab.mount(device, "coarse", "ext4", "rw")
    finally:
        # It vanishes when it is unmounted.
        output("losetup", "--detach", device)


def test_every_engine_writes_the_same_bytes_on_every_file_system(lab: Lab) -> None:
    need("mkfs.ext4", "losetup")
    expected = repeat(lab.at / "expected", "buffered")
    assert expected.verdict == "saved"
    table = {}
    for name, place in places(lab).items():
        for engine in ENGINES:
            found = repeat(place / "run", engine)
            assert found.verdict == "saved", (name, engine, found)
            assert found.files == expected.files, (name, engine)
            table.setdefault(name, []).append(found.engine)
            shutil.rmtree(place / "run")
    print()
    for name, engines in table.items():
        print(f"{name}: {'; '.join(f'{asked}: {got}' for asked, got in zip(ENGINES, engines, strict=True))}")
    # The matrix is one: somewhere direct I/O is refused, and somewhere it is not.
    assert "direct=false" in table["ramfs"][0]
    assert "direct=true" in table["ext4"][0]
    assert "direct=true" in table["ext4, sectors of 4096 bytes"][0]
