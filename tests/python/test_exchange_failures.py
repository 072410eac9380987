"""A rank that raises anywhere in ``restore(broadcast=…)`` leaves no other in a collective. Ranks
are threads, and their collectives a barrier. (Over torch, JAX and MPI:
``tests/frameworks/test_broadcast.py``.)"""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from stepwell._distributed import exchange, transports
from stepwell._restore import array_reads, template, wanted
from stepwell._restore import restore as restoring
from stepwell._state.specs import current_rank
from threads import together

WORLD = 3
#: A timeout for ranks that are left alone in a collective.
PATIENCE = 30.0


class Meeting:
    """The exchange of a test's ranks: each collective waits for all of them."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(WORLD, timeout=PATIENCE)
        self.rows: list[Any] = [None] * WORLD


class Transport:
    """Collectives of threads."""

    name = "threads"
    world_size = WORLD

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank = rank
        self._meeting = meeting

    def broadcast(self, buffer: transports.Bytes, ranks: transports.Ranks) -> transports.Carry:
        rows = self.gather(buffer, ranks)
        return lambda: rows()[0]

    def gather(self, share: transports.Bytes, ranks: transports.Ranks) -> transports.Carry:
        assert len(ranks) == WORLD
        made = np.empty((WORLD, share.size), np.uint8)

        def carry() -> transports.Bytes:
            meeting = self._meeting
            meeting.rows[self.rank] = share
            meeting.barrier.wait()
            for number, row in enumerate(meeting.rows):
                made[number] = row
            meeting.barrier.wait()
            return made

        return carry


class Injected(Exception):
    """The injected error."""


#: The places where a rank raises: owner and name of the function, and the number of the call.
PLACES: dict[str, tuple[Any, str, int]] = {
    "the transport is found": (transports, "find", 0),
    "the target is looked at": (template, "parse", 0),
    "the match": (restoring, "_misfits", 0),
    "jobs are made": (restoring.Restore, "_reads", 0),
    "memory that is shared": (array_reads.ArrayReads, "settle", 0),
    "a tie is read": (array_reads.ArrayReads, "_check_tie", 0),
    "what it wants": (exchange.json, "dumps", 0),
    "memory for the sizes": (Transport, "gather", 0),
    "memory for what others want": (Transport, "gather", 1),
    "what others want": (exchange.zlib, "decompress", 0),
    "the plan": (exchange, "_batches", 0),
    "the rounds": (exchange, "_rounds", 0),
    "objects": (restoring, "Reviver", 0),
    "new memory": (array_reads.ArrayReads, "_make", 0),
    "the first read": (exchange.Exchange, "_read", 0),
    "a later read": (exchange.Exchange, "_read", 3),
    "memory of the first round": (exchange.Exchange, "_ready", 0),
    "a delivery": (array_reads, "_put", 0),
    "states are tried": (wanted.Wanted, "try_states", 0),
    "reads of its own": (array_reads.ArrayReads, "batches", 0),
    "results": (wanted.Wanted, "fill_results", 0),
}


def state(rank: int, value: int) -> Any:
    """Returns a rank's state: shared leaves, own leaves, and objects."""
    arrays = {"w": np.full(3000, value), "one": np.full(5, value), "other": np.full(5, value)}
    return {"model": {**arrays, f"own{rank}": np.full(300, value + rank)}, "step": value}


def restored(rank: int, manager: sw.CheckpointManager, how: Any) -> str:
    """How a restore ends, in a word."""
    into = state(rank, 0)
    into["model"]["other"] = into["model"]["one"]  # a tie, whose values have to be read
    like = {"model": {"w": sw.ArraySpec()}}
    try:
        manager.restore(into=into, broadcast=how)
        manager.restore(like=like, broadcast=how, unexpected="ignore")
    except Exception as failure:
        return type(failure).__name__
    assert (into["model"]["w"] == 7).all()
    assert (into["model"][f"own{rank}"] == 7 + rank).all()
    return "restored"


def raising(original: Callable[..., Any], failing: int, number: int) -> tuple[Callable[..., Any], list[int]]:
    """A function that raises on one rank, in one of its calls; and the calls that it has seen
    there."""
    calls: list[int] = []

    def replaced(*arguments: Any, **keywords: Any) -> Any:
        if current_rank.get() == (failing, WORLD):
            calls.append(1)
            if len(calls) == number + 1:
                raise Injected
        return original(*arguments, **keywords)

    return replaced, calls


def test_a_rank_that_raises_leaves_nobody_in_a_collective(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("BATCH", "PIECE", "LEAST"):
        monkeypatch.setattr(exchange, name, 4096)
    meeting = Meeting()
    monkeypatch.setattr(transports, "find", lambda found, _: Transport(meeting, found.rank))
    patching = threading.Barrier(WORLD, timeout=60)
    told, come_to = dict[Any, list[Any]](), dict[Any, bool]()

    def work(rank: int, manager: sw.CheckpointManager) -> None:
        manager.save(1, state(rank, 7)).result()
        for number, (what, (owner, name, call)) in enumerate(PLACES.items()):
            for how in (True, "gather"):
                failing = number % WORLD
                patching.wait()
                if rank == 0:
                    original = getattr(owner, name)
                    replaced, calls = raising(original, failing, call)
                    monkeypatch.setattr(owner, name, replaced)
                patching.wait()
                found = restored(rank, manager, how)
                told.setdefault((what, how), [None] * WORLD)[rank] = found
                patching.wait()
                if rank == 0:
                    monkeypatch.setattr(owner, name, original)
                    come_to[what, how] = len(calls) > call
        patching.wait()
        assert restored(rank, manager, True) == "restored"

    together(WORLD, root, work)
    assert [where for where, is_so in come_to.items() if not is_so] == []
    for number, what in enumerate(PLACES):
        expected = ["RankFailed"] * WORLD
        expected[number % WORLD] = "Injected"
        assert [told[what, how] for how in (True, "gather")] == [expected] * 2, what
