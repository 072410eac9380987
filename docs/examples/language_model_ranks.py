"""The language model of ``language_model.py``, trained in numpy by several processes: tensor,
pipeline and data parallel.

    python docs/examples/language_model_ranks.py --root runs/lm --tp 2 --pp 2

Kill any of its processes at any moment, and start it again with any other sharding (``--dp 2``, or
``--tp 2 --pp 2 --dp 2``, or as one process). It resumes from the newest committed step. Checkpoints
store whole tensors under the names of ``language_model.py``, so each program also resumes from the
steps of the other.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import secrets
from collections.abc import Callable, Sequence
from functools import reduce
from itertools import combinations
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from language_model import Arrays, Batches, Sizes, adam, init, text  # first: sets BLAS's threads

import numpy as np  # isort: skip
import stepwell as sw  # isort: skip

#: How the tensors are cut, by their names; those of the optimizer end in the same names.
RULES = sw.sharding.Rules(
    {
        "**.embedding": ("tp", None),  # each rank has some rows of it,
        "**.hidden_*.weight": (None, "tp"),  # some columns of these,
        "**.hidden_*.bias": ("tp",),
        "**.output.weight": ("tp", None),
        "**.output.bias": (),  # and all of this one
    },
    stages={"**.embedding": 0, "**.hidden_1.*": 0, "**.hidden_2.*": 1, "**.output.*": 1},
)


class Peers:
    """Where this rank is among the others, and a pipe to each of them. A real job has NCCL, gloo or
    MPI instead."""

    def __init__(self, rank: int, mesh: sw.sharding.RankMesh, pipes: dict[int, Connection]) -> None:
        self.rank, self.mesh, self.pipes = rank, mesh, pipes
        self.at = at = mesh.coordinates(rank)
        self.tp = mesh.ranks(pp=at["pp"], dp=at["dp"])  # ranks that share tensors,
        self.dp = mesh.ranks(pp=at["pp"], tp=at["tp"])  # those with the same parts and other data,
        self.pp = mesh.ranks(dp=at["dp"], tp=at["tp"])  # and those with other layers

    def send(self, peer: int, value: Any) -> None:
        try:
            self.pipes[peer].send(value)
        except OSError as error:
            raise ConnectionError(f"rank {peer} is gone") from error

    def receive(self, peer: int) -> Any:
        try:
            return self.pipes[peer].recv()
        except (EOFError, OSError) as error:
            raise ConnectionError(f"rank {peer} is gone") from error

    def gather(self, value: Any, group: Sequence[int]) -> list[Any]:
        """What each rank of the group has, in their order."""
        found = {self.rank: value}
        for peer in group:
            # Of two, the lower rank sends first: so nobody waits in a circle.
            if self.rank < peer:
                self.send(peer, value)
            if self.rank != peer:
                found[peer] = self.receive(peer)
            if self.rank > peer:
                self.send(peer, value)
        return [found[peer] for peer in group]

    def sum(self, value: Any, group: Sequence[int]) -> Any:
        """Added up in the same order everywhere, so that what ranks hold alike stays the same bit
        for bit."""
        return reduce(np.add, self.gather(value, group))


def own_part(whole: Arrays, peers: Peers) -> Arrays:
    """Of whole tensors, what the rules give this rank."""
    specs = {name: sw.ArraySpec(array.shape, array.dtype) for name, array in whole.items()}
    part = {}
    for name, shard in RULES.abstract_state(specs, peers.mesh, peers.rank).items():
        if shard is not ...:  # else it is another stage's
            box = tuple(slice(a, a + n) for a, n in zip(shard.offset, shard.local.shape, strict=True))
            part[name] = whole[name][box].copy()
    return part


def loss_and_gradients(p: Arrays, x: np.ndarray, y: np.ndarray, peers: Peers) -> tuple[float, Arrays]:
    """As in ``language_model.py``, by all ranks together: activations go from stage to stage, and
    gradients back. Returns the mean loss, and the gradients of this rank's tensors."""
    share = len(x) // len(peers.dp)
    mine = slice(share * peers.at["dp"], share * (peers.at["dp"] + 1))
    x, y, rows = x[mine], y[mine], np.arange(share)
    stage = peers.at["pp"]
    g: Arrays = {}

    if stage == 0:
        embedding = p["embedding"]
        x = x.astype(np.int64) - len(embedding) * peers.at["tp"]
        known = (x >= 0) & (x < len(embedding))  # the bytes whose rows are here
        embedded = np.zeros((*x.shape, embedding.shape[1]), embedding.dtype)
        embedded[known] = embedding[x[known]]
        embedded = peers.sum(embedded, peers.tp).reshape(share, -1)
        h1 = np.maximum(embedded @ p["hidden_1/weight"] + p["hidden_1/bias"], 0)  # its columns
    if stage < len(peers.pp) - 1:
        peers.send(peers.pp[1], h1)
        d_h1, loss = peers.receive(peers.pp[1]), 0.0
    else:
        if stage > 0:
            h1 = peers.receive(peers.pp[0])
        all_h1 = np.concatenate(peers.gather(h1, peers.tp), axis=1)
        h2 = np.maximum(all_h1 @ p["hidden_2/weight"] + p["hidden_2/bias"], 0) + h1
        logits = peers.sum(h2 @ p["output/weight"], peers.tp) + p["output/bias"]
        logits -= logits.max(axis=1, keepdims=True)
        d = np.exp(logits)
        d /= d.sum(axis=1, keepdims=True)
        loss = float(-np.log(d[rows, y]).mean())

        d[rows, y] -= 1
        d /= share
        g |= {"output/weight": h2.T @ d, "output/bias": d.sum(0)}
        d_h2 = d @ p["output/weight"].T
        d_relu = d_h2 * (h2 > h1)
        g |= {"hidden_2/weight": all_h1.T @ d_relu, "hidden_2/bias": d_relu.sum(0)}
        d_all_h1 = peers.sum(d_relu @ p["hidden_2/weight"].T, peers.tp)
        d_h1 = d_h2 + np.split(d_all_h1, len(peers.tp), axis=1)[peers.at["tp"]]
        if stage > 0:
            peers.send(peers.pp[0], d_h1)
    if stage == 0:
        d_h1 = d_h1 * (h1 > 0)
        g |= {"hidden_1/weight": embedded.T @ d_h1, "hidden_1/bias": d_h1.sum(0)}
        d_embedded = peers.sum(d_h1 @ p["hidden_1/weight"].T, peers.tp).reshape(*x.shape, -1)
        g["embedding"] = np.zeros_like(embedding)
        np.add.at(g["embedding"], x[known], d_embedded[known])

    losses = peers.gather(loss, range(peers.mesh.size))  # of each last stage
    ends = [losses[rank] for rank in peers.mesh.ranks(pp=len(peers.pp) - 1, tp=0)]
    return sum(ends) / len(ends), {name: peers.sum(one, peers.dp) / len(peers.dp) for name, one in g.items()}


def train(
    peers: Peers,
    job: str,
    root: Path,
    steps: int,
    every: int = 3,
    losses: Path | None = None,
    dtype: str = "float32",
    stall_timeout: float = 20.0,  # seconds without a heartbeat until a rank counts as dead
    restored: Callable[[int, Any], None] | None = None,
) -> None:
    """What each rank runs. ``restored`` is called with the step and the state that were restored,
    if one was."""
    rng = np.random.default_rng(0)
    sizes = Sizes(dtype=dtype)
    params = own_part(init(sizes, rng), peers)
    state: dict[str, Any] = {
        "params": params,
        "optimizer": {
            "m": {name: np.zeros_like(p) for name, p in params.items()},
            "v": {name: np.zeros_like(p) for name, p in params.items()},
            "updates": 0,
        },
        "batches": Batches(text(), sizes.context, 64, seed=1),  # the same on all ranks
    }

    def shards() -> Any:
        """The state, with what the rules say of each array: of which tensor it is, and which
        part."""
        return RULES.shard(state, peers.mesh, peers.rank)

    with sw.CheckpointManager(
        root,
        save_policy=sw.every_steps(every),
        retention=sw.keep_latest(3),
        coordinator=sw.coordinators.SharedDirectory(peers.rank, peers.mesh.size, job),
        options=sw.Options(stall_timeout=stall_timeout),
    ) as mgr:
        found, first = mgr.resume(shards())  # fills the arrays, returns the number
        if first > 0:
            state["optimizer"]["updates"] = found["optimizer"]["updates"]
            if peers.rank == 0:
                print(f"resumed from step {first - 1} with {peers.mesh}", flush=True)
            if restored:
                restored(first - 1, found)
        last = None  # save
        try:
            for step in range(first, steps):
                loss, gradients = loss_and_gradients(state["params"], *state["batches"].next(), peers)
                with mgr.update_guard():
                    adam(state, gradients)
                last = mgr.save(step, shards(), metrics={"loss": loss}) or last
                if peers.rank == 0 and losses:
                    with losses.open("a") as out:
                        out.write(json.dumps({"step": step, "loss": loss.hex()}) + "\n")
                if peers.rank == 0 and step % 10 == 0:
                    print(f"step {step:4d}  loss {loss:.4f}", flush=True)
        except ConnectionError:
            if last is not None:
                last.result(2 * stall_timeout)  # an error names the silent rank
            raise


def start(mesh: sw.sharding.RankMesh, run: Callable[..., None] = train, **options: Any) -> list[BaseProcess]:
    """Starts a process for each rank, with a pipe between any two; a real job has a launcher for
    it."""
    spawn = multiprocessing.get_context("spawn")
    pipes: list[dict[int, Any]] = [{} for _ in range(mesh.size)]
    for a, b in combinations(range(mesh.size), 2):
        pipes[a][b], pipes[b][a] = spawn.Pipe()
    job = secrets.token_hex(4)
    processes: list[BaseProcess] = []
    for rank in range(mesh.size):
        args = (Peers(rank, mesh, pipes[rank]), job)
        processes.append(spawn.Process(target=run, args=args, kwargs=options, name=f"rank {rank}"))
        processes[-1].start()
    for ends in pipes:
        for end in ends.values():
            end.close()  # now only the ranks hold them, and notice each other's end
    return processes


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--root", type=Path, required=True, help="where the steps go")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--save-every", type=int, default=3)
    parser.add_argument("--dtype", default="float32", help="of the parameters: float32 or float64")
    parser.add_argument("--pp", type=int, choices=(1, 2), default=1, help="stages of the pipeline")
    parser.add_argument("--dp", type=int, default=1, help="parts of each batch")
    parser.add_argument("--tp", type=int, default=1, help="parts of each matrix")
    given = parser.parse_args()
    ranks = start(
        sw.sharding.RankMesh(pp=given.pp, dp=given.dp, tp=given.tp),
        root=given.root,
        steps=given.steps,
        every=given.save_every,
        dtype=given.dtype,
    )
    for process in ranks:
        process.join()
    if failed := [process.name for process in ranks if process.exitcode]:
        raise SystemExit(f"ended with an error: {', '.join(failed)}")
