"""A place for images, mounts and processes that leaves nothing behind, also when a test fails or is
killed.

The test process takes a mount namespace of its own, with a tmpfs for everything that a test makes.
Nobody else sees these mounts. They vanish, with their loop devices, with the last process of the
tests. Processes are killed with their parent.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from pathlib import Path

PROJECT = Path(__file__).parents[2]
TARGET = Path(os.environ.get("CARGO_TARGET_DIR", PROJECT / "target")).absolute()
CHRONICLER = TARGET / "debug" / "chronicler"
SAVER = TARGET / "debug" / "saver"

#: Longer than any single command takes on any machine.
PATIENCE = 120

PR_SET_PDEATHSIG = 1
CLONE_NEWNS = 0x20000

#: The system administrator's programs are not on everybody's path.
PATH = os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin", "/sbin", "/usr/bin", "/bin"])

_libc = ctypes.CDLL(None, use_errno=True)


def which(program: str) -> str | None:
    return shutil.which(program, path=PATH)


def die_with_parent() -> None:
    """For ``preexec_fn``."""
    _libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def output(*command: object, stdin: str | None = None, env: Mapping[str, str] | None = None) -> str:
    """Runs a command that must succeed; gives its standard output."""
    done = run(*command, stdin=stdin, env=env)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(map(str, command))}: {done.returncode}: {done.stderr or done.stdout}")
    return done.stdout


def run(
    *command: object,
    stdin: str | None = None,
    env: Mapping[str, str] | None = None,
    timeout: float = PATIENCE,
    before: Callable[[], None] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Runs a command to its end; one that has not ended by its deadline is killed, and raises.
    ``before`` is done in the process, before the command begins."""

    def prepare() -> None:
        die_with_parent()
        if before is not None:
            before()

    return subprocess.run(
        [str(word) for word in command],
        input=stdin,
        stdin=subprocess.DEVNULL if stdin is None else None,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=timeout,
        check=False,
        env={**os.environ, "PATH": PATH, **(env or {})},
        preexec_fn=prepare,
    )


def until(what: Callable[[], bool], why: str, seconds: float = PATIENCE) -> None:
    """Waits until a deadline."""
    deadline = time.monotonic() + seconds
    while not what():
        if time.monotonic() > deadline:
            raise TimeoutError(f"{why} did not happen within {seconds} s")
        time.sleep(0.01)


def enter_namespace() -> str | None:
    """Takes a mount namespace of its own, in which mounts are nobody else's; the reason, where that
    is not permitted."""
    if os.geteuid() != 0:
        return "not root: file systems cannot be mounted"
    if _libc.unshare(CLONE_NEWNS) != 0:
        return f"a mount namespace of its own is not permitted here ({os.strerror(ctypes.get_errno())})"
    private = run("mount", "--make-rprivate", "/")
    return None if private.returncode == 0 else f"mounting is not permitted here ({private.stderr.strip()})"


class Lab:
    """A tmpfs with what one test makes. Everything on its stack is undone when the test ends, in
    reverse order."""

    def __init__(self, at: Path, size: str = "6g") -> None:
        self.at = at
        self.stack = ExitStack()
        output("mount", "-t", "tmpfs", "-o", f"size={size},mode=755", "stepwell-lab", at)
        self.stack.callback(unmount, at)

    def dir(self, name: str) -> Path:
        path = self.at / name
        path.mkdir(exist_ok=True)
        return path

    def mount(self, source: object, name: str, kind: str, options: str = "loop") -> Path:
        """Mounts something at a directory of that name, until [`Lab.unmount`] or the end."""
        at = self.dir(name)
        if kind == "xfs":
            options += ",nouuid"
        output("mount", "-t", kind, "-o", options, source, at)
        self.stack.callback(unmount, at)
        return at

    def start(
        self, command: Iterable[object], stdout: Path, stderr: Path, env: Mapping[str, str] | None = None
    ) -> subprocess.Popen[bytes]:
        """Starts a process in a group of its own, which is killed at the end."""
        with stdout.open("ab") as out, stderr.open("ab") as err:
            process = subprocess.Popen(
                [str(word) for word in command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                env={**os.environ, "PATH": PATH, **(env or {})},
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
        self.stack.callback(kill, process)
        return process

    def close(self) -> None:
        self.stack.close()


def kill(process: subprocess.Popen[bytes]) -> None:
    """Kills a process and all of its group, and waits until they are gone: one that is still dying
    may still write."""

    def gone() -> bool:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            return True
        process.poll()
        return False

    until(gone, f"the end of process group {process.pid}")
    process.wait(PATIENCE)


def unmount(at: Path) -> None:
    """Unmounts a place, if something is mounted there. Retries a busy one, then detaches it."""
    if not os.path.ismount(at):
        return
    for _ in range(50):
        if run("umount", at).returncode == 0:
            return
        time.sleep(0.1)
    output("umount", "--lazy", at)
