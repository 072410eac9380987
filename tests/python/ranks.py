"""Runs a script in several processes at once, each a rank of one job over a shared directory."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

_PREAMBLE = """
import os, sys, time, signal
import numpy as np
import stepwell as sw
RANK, WORLD, ROOT = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]

def open_manager(**options):
    settings = {"stall_timeout": 60.0, **options.pop("settings", {})}
    return sw.CheckpointManager(
        ROOT, coordinator=sw.coordinators.SharedDirectory(RANK, WORLD, sys.argv[4]), options=sw.Options(**settings), **options
    )
"""


@dataclass
class Ranks:
    """The processes of a job."""

    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def finish(self, timeout: float = 120) -> list[tuple[int, str, str]]:
        """Returns exit status, output and errors of each, and kills those that miss the timeout."""
        deadline = time.monotonic() + timeout
        found = []
        for process in self.processes:
            try:
                out, err = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
            except subprocess.TimeoutExpired:
                for one in self.processes:
                    one.send_signal(signal.SIGCONT)
                    one.kill()
                out, err = process.communicate()
                err = f"{err}\nkilled: it had not ended after {timeout} s"
            found.append((process.returncode, out, err))
        return found

    def succeed(self, timeout: float = 120) -> list[str]:
        """The output of each; all must end well."""
        found = self.finish(timeout)
        for rank, (code, out, err) in enumerate(found):
            assert code == 0, f"rank {rank} ended with {code}\n{out}\n{err}"
        return [out for _, out, _ in found]


def free_port() -> int:
    """One that nobody listens on."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def start(
    folder: Path,
    script: str,
    world: int,
    root: Path,
    *arguments: Any,
    job: str = "job",
    env: dict[str, str] | None = None,
) -> Ranks:
    """Starts them. ``RANK``, ``WORLD`` and ``ROOT`` are set in the script, and ``open_manager()``
    opens the root together; arguments are ``sys.argv[5:]``."""
    file = folder / f"ranks-{abs(hash(script)) % 10**8}.py"
    file.write_text(_PREAMBLE + textwrap.dedent(script))
    ranks = Ranks()
    for rank in range(world):
        ranks.processes.append(
            subprocess.Popen(
                [sys.executable, str(file), str(rank), str(world), str(root), job, *map(str, arguments)],
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
                env={**os.environ, "OMP_NUM_THREADS": "1", **(env or {})},
            )
        )
    return ranks


def run(folder: Path, script: str, world: int, root: Path, *arguments: Any, **options: Any) -> list[str]:
    """Starts them and waits; the output of each."""
    return start(folder, script, world, root, *arguments, **options).succeed()


#: Imports once what all ranks import, which takes longer than most of what they do; then each is a
#: fork of it.
_FORKS = """
import contextlib, os, runpy, sys, traceback
folder, world, modules, script = sys.argv[1], int(sys.argv[2]), sys.argv[3], sys.argv[4]
for module in modules.split(","):
    __import__(module)
children = []
for rank in range(world):
    pid = os.fork()
    if pid == 0:
        code = 1
        for name, number in (("out", 1), ("err", 2)):
            os.dup2(os.open(f"{folder}/{name}-{rank}", os.O_WRONLY | os.O_CREAT | os.O_TRUNC), number)
        sys.argv = [script, str(rank), str(world), *sys.argv[5:]]
        try:
            runpy.run_path(script, run_name="__main__")
            code = 0
        except SystemExit as exit:
            code = exit.code or 0
        except BaseException:
            traceback.print_exc()
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    children.append(pid)
codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]
print(*codes)
"""


def run_forked(
    folder: Path,
    modules: str,
    script: str,
    world: int,
    root: Path,
    *arguments: Any,
    job: str = "job",
    timeout: float = 300,
) -> list[str]:
    """:func:`run` for scripts that import much and are neither killed nor stopped: ``modules`` are
    imported once, and every rank is a fork of that process."""
    file = folder / f"ranks-{abs(hash(script)) % 10**8}.py"
    file.write_text(_PREAMBLE + textwrap.dedent(script))
    told = subprocess.run(
        [
            sys.executable,
            "-c",
            _FORKS,
            str(folder),
            str(world),
            modules,
            str(file),
            str(root),
            job,
            *map(str, arguments),
        ],
        capture_output=True,
        text=True,
        timeout=timeout,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        check=False,
    )
    codes = told.stdout.split()
    out = [(folder / f"out-{rank}").read_text() for rank in range(world)]
    for rank in range(world):
        err = (folder / f"err-{rank}").read_text()
        assert codes[rank : rank + 1] == ["0"], f"rank {rank}: {codes}\n{out[rank]}\n{err}\n{told.stderr}"
    return out
