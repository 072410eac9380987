"""Starts the ranks of a job of DeepSpeed."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

JOB = Path(__file__).with_name("deepspeed_job.py")


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def run_job(directory: Path, world: int, settings: dict[str, dict[str, Any]]) -> None:
    """Trains and saves with that many ranks, for each of the settings by name."""
    port = str(free_port())
    ranks = []
    for rank in range(world):
        names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_SIZE": world}
        environment = os.environ | {name: str(value) for name, value in names.items()}
        environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": "1"}
        with (directory / f"{world}.{rank}.log").open("w") as log:
            command = [sys.executable, str(JOB), str(directory), json.dumps(settings)]
            ranks.append(subprocess.Popen(command, env=environment, stdout=log, stderr=log))
    for rank, process in enumerate(ranks):
        assert process.wait(300) == 0, (directory / f"{world}.{rank}.log").read_text()[-4000:]
