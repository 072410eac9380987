"""A block device that fails when it is told to, under a real file system: nbdkit serves an image,
nbdfuse makes a file of it, and the kernel a loop device of that."""

from __future__ import annotations

import os
from pathlib import Path

from lab import Lab, kill, output, unmount, until, which

SCRIPT = Path(__file__).with_name("failing_disk.py")


def missing() -> str | None:
    """Returns the reason why this machine cannot make one."""
    absent = [
        program for program in ("nbdkit", "nbdfuse", "fusermount3", "mkfs.ext4") if which(program) is None
    ]
    if absent:
        return f"not installed: {', '.join(absent)} (on Debian: apt install nbdkit nbdkit-plugin-python libnbd-bin fuse3)"
    if not Path("/dev/fuse").exists():
        return "there is no /dev/fuse here"
    try:
        output("nbdkit", "python", "--dump-plugin")
    except RuntimeError:
        return "nbdkit has no Python plugin here (on Debian: apt install nbdkit-plugin-python)"
    return None


class FaultyDisk:
    """An image behind such a device."""

    def __init__(self, lab: Lab, image: Path, name: str = "faulty") -> None:
        self.lab = lab
        self.orders = lab.at / f"{name}.orders"
        self.failures = lab.at / f"{name}.orders.failed"
        self.failures.unlink(missing_ok=True)
        self.order("well")
        self.dir = lab.dir(name)
        socket = lab.at / f"{name}.socket"
        socket.unlink(missing_ok=True)
        log = lab.at / f"{name}.log"
        server = ["nbdkit", "-f", "-U", socket, "python", SCRIPT, f"image={image}", f"orders={self.orders}"]
        self.server = lab.start(server, log, log, env={"PYTHONDONTWRITEBYTECODE": "1"})
        until(socket.exists, "the start of nbdkit", 20)
        self.device = self.dir / "disk"
        self.device.touch()
        self.fuse = lab.start(["nbdfuse", self.device, "--unix", socket], log, log)
        lab.stack.callback(unmount, self.device)
        try:
            until(lambda: os.path.ismount(self.device), "the mount of nbdfuse", 20)
        except TimeoutError as late:
            raise TimeoutError(f"{late}\n{log.read_text()}") from None

    def mount(self) -> Path:
        """Mounts its file system, which has blocks of 4096 bytes.

        A write of the kernel must be one write here. FUSE splits a long or unaligned one in two. If
        the second fails, the first makes it a short write, which the loop driver reports as a
        success. No file system would learn of that failure.
        """
        at = self.lab.mount(self.device, "failing", "ext4")
        number = os.stat(at).st_dev
        queue = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}/queue")
        (queue / "max_sectors_kb").write_text("64")
        return at

    def order(self, what: str) -> None:
        """From here on it does that; see ``failing_disk.py``."""
        new = self.orders.with_suffix(".new")
        new.write_text(f"{what}\n")
        new.replace(self.orders)

    def failed(self) -> list[str]:
        """Returns the failed requests so far."""
        return self.failures.read_text().splitlines() if self.failures.exists() else []

    def close(self) -> None:
        unmount(self.device)
        kill(self.fuse)
        kill(self.server)
