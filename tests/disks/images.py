"""Images of file systems: made, copied, mounted."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab import Lab, output, unmount

#: How each file system is made, and the smallest size at which it can be.
KINDS = {
    "ext4": ("64M", ["mkfs.ext4", "-q", "-F", "-m", "0"]),
    "xfs": ("320M", ["mkfs.xfs", "-q", "-f"]),
    "btrfs": ("128M", ["mkfs.btrfs", "-q", "-f"]),
}


def make(image: Path, kind: str, size: str | None = None, *options: str) -> Path:
    """A new file system in a sparse file."""
    smallest, command = KINDS[kind]
    image.unlink(missing_ok=True)
    output("truncate", "-s", size or smallest, image)
    output(*command, *options, image)
    return image


def copy(image: Path, to: Path) -> Path:
    """A copy that is as sparse."""
    output("cp", "--sparse=always", image, to)
    return to


@contextmanager
def mounted(lab: Lab, image: Path, kind: str) -> Iterator[Path]:
    """The image, mounted: the kernel does what it does after a power cut."""
    at = lab.mount(image, "mounted", kind)
    try:
        yield at
    finally:
        unmount(at)
