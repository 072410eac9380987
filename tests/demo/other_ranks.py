"""A model in numpy, cut over processes: one is killed in the middle of a save, and the run goes on
with other numbers of them, cut in other ways.

Run by ``make demo``. Exits with 0 only if everything that it says is so. The model is that of
``docs/examples/language_model.py``, in float64: in what order ranks add up does not show in its
losses then.
"""

from __future__ import annotations

import subprocess
import sys
from functools import partial
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import stepwell as sw

sys.path.append(str(Path(__file__).resolve().parents[2] / "docs" / "examples"))

import job
import language_model
import language_model_ranks as example

STEPS = 42
DTYPE = "float64"


def parts(state: Any) -> dict[str, Any]:
    """Returns the sharded part of a state."""
    optimizer = state["optimizer"]
    return job.flat({"params": state["params"], "m": optimizer["m"], "v": optimizer["v"]})


def keep(folder: Path, peers: example.Peers, _step: int, state: Any) -> None:
    """Leaves the shards that this rank has restored."""
    shards = parts(state).items()
    job.keep(folder, peers.rank, {name: (shard.offset, shard.local) for name, shard in shards})


def rank(peers: example.Peers, name: str, folder: Path, **options: Any) -> None:
    """One process of a job."""
    with job.noting(folder, peers.rank):
        peers.gather(None, range(peers.mesh.size))  # all are there: from here on none is late
        restored = partial(keep, folder, peers)
        example.train(peers, name, dtype=DTYPE, restored=restored, **options)


def start(axes: job.Axes, folder: Path, **options: Any) -> list[BaseProcess]:
    """The processes of a job."""
    return example.start(sw.sharding.RankMesh(**axes), run=rank, folder=folder, **options)


def main() -> None:
    with job.folder_of_its_own() as where:
        run = job.Run(where, STEPS, start, parts)
        print("1. one process, undisturbed: docs/examples/language_model.py")
        command = [sys.executable, language_model.__file__, "--dtype", DTYPE]
        command += ["--steps", str(STEPS), "--root", str(where / "undisturbed")]
        subprocess.run([*command, "--losses", str(run.undisturbed)], check=True)

        print("\n2. four processes, of which one is killed with SIGKILL in the middle of a save")
        run.killed({"pp": 2, "dp": 1, "tp": 2}, rank=2)

        print("\n3. two processes, each with the whole model and half of each batch")
        run.resumed({"pp": 1, "dp": 2, "tp": 1}, more=9)

        print("\n4. one process")
        run.resumed({"pp": 1, "dp": 1, "tp": 1}, more=6)

        print("\n5. eight processes, to the end")
        run.resumed({"pp": 2, "dp": 2, "tp": 2})

        print("\n6. what was shown\n")
        run.conclude()


if __name__ == "__main__":
    main()
