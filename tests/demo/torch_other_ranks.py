"""A model of PyTorch under FSDP2 and tensor parallelism: one process is killed in the middle of a
save, and the run goes on with fewer of them, cut in other ways.

Run by ``make demo-torch``. Exits with 0 only if everything that it says is so.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import sys
import warnings
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # before torch is imported: all processes share one machine

import stepwell as sw

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs" / "examples"))

import job
import torch_language_model as example

STEPS = 30


def parts(state: Any) -> dict[str, Any]:
    """Of a state the tensors of the model and of the optimizer."""
    train = state["train"]
    if isinstance(train, sw.torch.TrainState):
        train = train.state_dict()
    return job.flat({"model": train["model"], "optimizer": train["optimizer"]["state"]})


def keep(folder: Path, rank: int, _step: int, state: Any) -> None:
    """Leaves the tensors as torch puts them together on this rank, from what it and the others have
    restored."""
    found = {}
    for name, tensor in parts(state).items():
        whole = tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor
        found[name] = ((0,) * whole.ndim, whole.detach().numpy())
    job.keep(folder, rank, found)


def rank(number: int, world: int, port: int, folder: Path, **options: Any) -> None:
    """One process of a job, as torchrun starts it."""
    os.environ |= {"RANK": str(number), "WORLD_SIZE": str(world)}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    warnings.simplefilter("ignore")  # of torch about itself
    with job.noting(folder, number):
        example.train(restored=partial(keep, folder, number), **options)


def start(axes: job.Axes, folder: Path, **options: Any) -> list[BaseProcess]:
    """The processes of a job: forks of this one, which has imported torch and done nothing with
    it."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    world = axes["dp"] * axes["tp"]
    fork = multiprocessing.get_context("fork")
    options |= {"tp": axes["tp"]}
    processes: list[BaseProcess] = []
    for number in range(world):
        arguments = (number, world, port, folder)
        processes.append(fork.Process(target=rank, args=arguments, kwargs=options, name=f"rank {number}"))
        processes[-1].start()
    return processes


def main() -> None:
    with job.folder_of_its_own() as where:
        run = job.Run(where, STEPS, start, parts)
        print("1. one process, undisturbed")
        folder = where / "undisturbed"
        folder.mkdir()
        alone = start({"dp": 1, "tp": 1}, folder, root=folder / "run", steps=STEPS, losses=run.undisturbed)
        job.succeed(alone, folder)

        print("\n2. four processes, of which one is killed with SIGKILL in the middle of a save")
        run.killed({"dp": 2, "tp": 2}, rank=2)

        print("\n3. two processes, with FSDP2 alone")
        run.resumed({"dp": 2, "tp": 1}, more=9)

        print("\n4. one process, to the end")
        run.resumed({"dp": 1, "tp": 1})

        print("\n5. what was shown\n")
        run.conclude()


if __name__ == "__main__":
    main()
