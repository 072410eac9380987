"""A signal to the whole process group of a job whose loader has workers."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import stepwell as sw

pytest.importorskip("torch")

PAGE = Path(__file__).parents[2] / "docs" / "guide" / "preemption.md"

TRAINER = """
import os, signal, sys, time
import stepwell as sw
import torch

{recipe}

class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 1_000_000
    def __getitem__(self, at):
        time.sleep(0.002)
        return torch.full((64,), float(at))

loader = torch.utils.data.DataLoader(Rows(), batch_size=4, num_workers=2, worker_init_fn=keep_running)
model = torch.nn.Linear(64, 1 << 16)
policy = sw.every_steps(1000) | sw.on_preemption()
with sw.CheckpointManager(sys.argv[1], save_policy=policy) as manager:
    for step, batch in enumerate(loader, 1):
        model(batch).sum().backward()
        manager.save(step, lambda: {{"model": model}})
        if step == 5:
            print("ready", flush=True)
        if manager.reached_preemption(step):
            print("left at", step, flush=True)
            break
"""


def recipe() -> str:
    """The function of the guide."""
    found = re.search(r"^def keep_running\(.*?(?=^\S)", PAGE.read_text(), re.MULTILINE | re.DOTALL)
    assert found is not None
    return found[0]


def test_a_termination_of_the_whole_group_costs_no_last_save(tmp_path: Path) -> None:
    for attempt in range(3):
        root = tmp_path / str(attempt)
        script = TRAINER.format(recipe=recipe())
        with subprocess.Popen(
            [sys.executable, "-c", script, root],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        ) as process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n"
            time.sleep(0.02 * attempt)
            os.killpg(process.pid, signal.SIGTERM)
            said, errors = process.communicate(timeout=120)
        assert process.returncode == 0, errors
        left = int(said.split()[2])
        assert sw.metadata(root).step == left
        assert sw.verify(root).ok
