"""Ranks that are threads of one process, each with a manager of its own over a shared directory:
real files, and no process to start."""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count
from pathlib import Path
from typing import Any

import stepwell as sw

_jobs = count()


def together(
    world: int,
    root: Path,
    work: Callable[[int, sw.CheckpointManager], Any],
    retention: sw.Retention | None = None,
    save_policy: Callable[[int], sw.SavePolicy] | None = None,
    chunk_bytes: int | None = None,
    **options: Any,
) -> list[Any]:
    """Runs ``work(rank, manager)`` for every rank at once, and returns the results. An error of a
    rank is raised here. ``save_policy`` gives the policy of a rank. ``chunk_bytes`` may be smaller
    than users can request."""
    job = f"job-{next(_jobs)}"
    results: list[Any] = [None] * world
    failures: list[BaseException] = []

    settings = sw.Options(stall_timeout=60.0, **options)
    if chunk_bytes is not None:
        object.__setattr__(settings, "chunk_bytes", chunk_bytes)

    def rank_work(rank: int) -> None:
        try:
            with sw.CheckpointManager(
                root,
                coordinator=sw.coordinators.SharedDirectory(rank, world, job) if world > 1 else None,
                options=settings,
                retention=retention,
                save_policy=None if save_policy is None else save_policy(rank),
            ) as manager:
                results[rank] = work(rank, manager)
        except BaseException as failure:
            failure.add_note(f"on rank {rank} of {world}")
            failures.append(failure)

    threads = [threading.Thread(target=rank_work, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
        assert not thread.is_alive(), "a rank hangs"
    if failures:
        raise failures[0]
    return results
