"""A kernel as a process: user-mode Linux, which is killed as a power cut kills a machine.

The guest's root file system is this machine's own, read-only; its disks are images. Its serial line
arrives here at once, without a cache. A guest never halts: it prints ``error none finished`` and is
killed.
"""

from __future__ import annotations

import subprocess
from pathlib import Path

from lab import PATIENCE, Lab, kill, until, which

GUESTS = Path(__file__).parent / "guests"
FINISHED = "error none finished"
KERNEL = "linux.uml"
#: The kernel modules of Debian's package.
MODULES = Path("/usr/lib/uml/modules")


#: The findings of the first guest, for all tests.
_tried: list[str | None] = []


def unusable(lab: Lab, *modules: str) -> str | None:
    """Why there can be no guest here: something is not installed, or a guest that does nothing does
    not come to its end."""
    reason = missing(*modules)
    if reason is not None:
        return reason
    if not _tried:
        guest = Guest(lab, "hello.sh", [], name="hello")
        try:
            guest.finish(60)
            _tried.append(None)
        except (RuntimeError, TimeoutError) as failure:
            guest.cut()
            _tried.append(f"user-mode Linux does not run here: {' '.join(str(failure).split())}")
    return _tried[0]


def missing(*modules: str) -> str | None:
    """Returns the name of a missing package or module."""
    if which(KERNEL) is None:
        return f"{KERNEL} is not installed (on Debian: apt install user-mode-linux)"
    for module in modules:
        if not list(MODULES.glob(f"*/kernel/**/{module}.ko")):
            return f"user-mode Linux has no module {module} here"
    return None


class Guest:
    """A running kernel. ``script`` is its init, of ``guests/``; ``variables`` are in its
    environment."""

    def __init__(
        self,
        lab: Lab,
        script: str,
        disks: list[Path],
        name: str = "guest",
        memory: str = "256M",
        **variables: object,
    ):
        self.name = name
        self.serial = lab.at / f"{name}.serial"
        self.console = lab.at / f"{name}.console"
        for file in (self.serial, self.console):
            file.write_bytes(b"")
        ubd = [f"ubd{chr(ord('a') + number)}={disk}" for number, disk in enumerate(disks)]
        environment = [f"{key}={value}" for key, value in variables.items()]
        # In a namespace of process ids of its own: whatever ends the first of them ends all, the
        # guest's processes too.
        command = [
            "unshare", "--pid", "--fork", "--kill-child=KILL", KERNEL, f"mem={memory}", "rootfstype=hostfs", "rootflags=/", "ro", "quiet", "con=null", "ssl=null",
            "con0=null,fd:2", "ssl0=null,fd:1", f"init={GUESTS / script}", *ubd, *environment,
        ]  # fmt: skip
        # The kernel keeps its memory in a file there.
        self.process: subprocess.Popen[bytes] = lab.start(
            command, self.serial, self.console, env={"TMPDIR": str(lab.at), "GUESTS": str(GUESTS)}
        )

    @property
    def journal(self) -> str:
        return self.serial.read_text(errors="replace").replace("\r", "")

    def wait_for(self, text: str, seconds: float = PATIENCE) -> None:
        """Waits until it has said that."""

        def said() -> bool:
            if text in self.journal:
                return True
            if self.process.poll() is not None:
                raise RuntimeError(f"the guest ended by itself\n{self.report()}")
            return False

        try:
            until(said, f"{text!r} from the guest", seconds)
        except TimeoutError as late:
            raise TimeoutError(f"{late}\n{self.report()}") from None

    def finish(self, seconds: float = PATIENCE) -> str:
        """Waits until its script has ended, and gives everything that it has said."""
        self.wait_for(FINISHED, seconds)
        self.cut()
        journal = self.journal
        if "error guest" in journal:
            raise RuntimeError(self.report())
        return journal

    def cut(self) -> None:
        """The power goes."""
        kill(self.process)

    def report(self) -> str:
        console = self.console.read_text(errors="replace")
        return f"it said:\n{self.journal[-3000:]}\nits console:\n{console[-3000:]}"
