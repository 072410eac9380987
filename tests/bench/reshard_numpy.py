"""The numpy ranks of the resharding bench: stepwell, slices of safetensors files, and the raw
disk."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np
import stepwell as sw
from contestants import PIECE, Raw, Staged
from crew import Done, Rank, timed, twice
from layout import Box, Layout, empty, extent, held, offset
from measure import huge_buffer, sync_file_system
from workloads import State, differences, nbytes

#: The number of the step that is saved and restored.
STEP = 1


# ---- stepwell
# ---------------------------------------------------------------------------------------


def _shards(
    state: State, layout: Layout, rank: int, make: Callable[[np.ndarray, Box], Any]
) -> dict[str, Any]:
    """A rank's arrays, or what describes them, as parts of whole tensors."""

    def shard(array: np.ndarray, box: Box) -> sw.sharding.LocalShard:
        # An uncut tensor is on all ranks of its stage, and they share its writing.
        replica = (rank % layout.ranks, layout.ranks) if extent(box) == array.shape else (0, 1)
        return sw.sharding.LocalShard(make(array, box), array.shape, offset(box), replica)

    return layout.of(state, rank, shard)


def wanted(state: State, layout: Layout, rank: int) -> dict[str, Any]:
    """Returns a rank's ``like=``."""
    return _shards(state, layout, rank, lambda array, box: sw.ArraySpec(extent(box), array.dtype))


def _arrays(tree: dict[str, Any]) -> dict[str, Any]:
    return {name: _arrays(value) if isinstance(value, dict) else value.local for name, value in tree.items()}


def _first_round_trip() -> None:
    """A few bytes saved and restored, so that nothing of the code has still to be read."""
    with tempfile.TemporaryDirectory() as folder:
        state = {"w": sw.sharding.LocalShard(np.ones((4, 4), np.float32), (4, 4), (0, 0))}
        sw.save(f"{folder}/first", state)
        sw.restore(f"{folder}/first", into=state)
        sw.restore(
            f"{folder}/first",
            like={"w": sw.sharding.LocalShard(sw.ArraySpec((2, 4), np.float32), (4, 4), (1, 0))},
        )


@contextmanager
def _manager(rank: Rank, root: Path, job: str, **options: Any) -> Iterator[sw.CheckpointManager]:
    coordinator = sw.coordinators.SharedDirectory(rank.number, rank.world, job_id=job)
    with sw.CheckpointManager(root, coordinator=coordinator, **options) as manager:
        yield manager


def stepwell_save(rank: Rank, root: Path, job: str, layout: Layout) -> None:
    state = _shards(rank.state, layout, rank.number, held)
    with _manager(rank, root, job) as manager:
        manager.save(STEP, state).result()


def stepwell_restore(
    rank: Rank, root: Path, job: str, layout: Layout, fresh: bool, verify: bool
) -> list[Done]:
    """Into memory that is there, or into new memory; twice, as :func:`crew.twice` says."""
    result = layout.needed(rank.state, rank.number) if fresh else 0
    if fresh:
        how = {"like": wanted(rank.state, layout, rank.number)}
    else:
        how = {"into": _shards(rank.state, layout, rank.number, empty)}
    _first_round_trip()
    begin = time.perf_counter()
    with _manager(rank, root, job) as manager:
        opened = time.perf_counter() - begin

        def check(found: dict[str, Any]) -> None:
            compare(rank, layout, _arrays(found))

        done = twice(rank, lambda: manager.restore(STEP, **how), check if verify else None, result)
    done[0].more["open"] = opened
    return done


def compare(rank: Rank, layout: Layout, found: dict[str, Any]) -> None:
    """Raises where a rank has other bytes than it should."""
    wrong = differences(found, layout.of(rank.state, rank.number, lambda array, box: array[box]))
    if wrong:
        raise AssertionError(f"restored other bytes: {wrong[:5]}")


def stepwell_durable(
    rank: Rank, root: Path, job: str, layout: Layout, saves: int, files_per: Literal["rank", "node"]
) -> list[Done]:
    """Saves in a row; the first one, of a process that was prepared, is not counted."""
    state = _shards(rank.state, layout, rank.number, held)
    staging = layout.needed(rank.state, rank.number) + (64 << 20)
    found = []
    options = sw.Options(files_per=files_per)
    with _manager(rank, root, job, staging_bytes=staging, options=options) as manager:
        manager.prepare(state)
        for step in range(saves + 1):

            def save(step: int = step) -> float:
                begin = time.perf_counter()
                pending = manager.save(step, state)
                blocked = time.perf_counter() - begin
                pending.result()
                sync_file_system(root)
                return blocked

            rank.together()
            done, done.more["blocked"] = timed(save)
            found.append(done)
    return found[1:]


def stepwell_replicated(rank: Rank, root: Path, job: str, shards: bool) -> Done:
    """All ranks have all of the state: arrays that are simply there, or shards with
    ``replica=``."""
    state: dict[str, Any] = rank.state
    if shards:
        # A stage of one tensor-parallel rank has all of everything.
        replica = (rank.number, rank.world)
        state = Layout(1).of(
            rank.state,
            0,
            lambda array, _: sw.sharding.LocalShard(array, array.shape, (0,) * array.ndim, replica),
        )
    # Each writes an equal part.
    staging = nbytes(rank.state) // rank.world + (64 << 20)
    with _manager(rank, root, job, staging_bytes=staging) as manager:
        rank.together()
        done, _ = timed(lambda: manager.save(STEP, state).result())
    return done


# ---- safetensors
# ---------------------------------------------------------------------------------------


def _groups(state: State) -> dict[str, dict[str, np.ndarray]]:
    """Tensors by file: the weights, and each slot of the optimizer."""
    groups = {"params": state["params"]}
    groups.update({f"optimizer-{slot}": tensors for slot, tensors in state["optimizer"].items()})
    return groups


def safetensors_save(rank: Rank, directory: Path) -> None:
    """Whole tensors, a file for each group of them."""
    from safetensors.numpy import save_file

    directory.mkdir()
    for name, tensors in _groups(rank.state).items():
        save_file(tensors, directory / f"{name}.safetensors")


def _first_slice() -> None:
    """As :func:`_first_round_trip`."""
    from safetensors import safe_open
    from safetensors.numpy import save_file

    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "first"
        save_file({"w": np.ones((4, 4), np.float32)}, file)
        with safe_open(file, framework="np") as opened:
            opened.get_slice("w")[1:3, 0:2]


def safetensors_restore(rank: Rank, directory: Path, layout: Layout, verify: bool) -> list[Done]:
    """``get_slice`` of every tensor, which copies out of the mapped file into new memory; twice, as
    :func:`crew.twice` says."""
    from safetensors import safe_open

    boxes = _groups(layout.of(rank.state, rank.number, lambda array, box: box))

    def restore() -> dict[str, dict[str, np.ndarray]]:
        found: dict[str, dict[str, np.ndarray]] = {}
        for group, tensors in boxes.items():
            with safe_open(directory / f"{group}.safetensors", framework="np") as file:
                found[group] = {name: file.get_slice(name)[box] for name, box in tensors.items()}
        return found

    def check(found: dict[str, dict[str, np.ndarray]]) -> None:
        slots = {name.partition("-")[2]: one for name, one in found.items() if name != "params"}
        compare(rank, layout, {"params": found["params"], "optimizer": slots})

    _first_slice()
    return twice(rank, restore, check if verify else None, layout.needed(rank.state, rank.number))


# ---- the bare disk
# ---------------------------------------------------------------------------------------


def raw_save(rank: Rank, directory: Path) -> None:
    raw = Raw(Staged(rank.state))
    raw.prepare(rank.state)
    raw.save(directory, rank.state)


def raw_restore(rank: Rank, directory: Path, layout: Layout) -> list[Done]:
    """As many bytes as each rank needs, in one piece of a file, into memory in huge pages: from the
    disk with O_DIRECT, and from the page cache."""
    sizes = [-(-layout.needed(rank.state, number) // 4096) * 4096 for number in range(rank.world)]
    start, size = sum(sizes[: rank.number]), sizes[rank.number]
    path = directory / "raw"
    # Replicated data is in the file once: the last rank reads from its beginning.
    start = min(start, path.stat().st_size - size)
    view = memoryview(huge_buffer(size))

    found = []
    for flags in (os.O_DIRECT, 0):
        descriptor = os.open(path, os.O_RDONLY | flags)

        def restore(descriptor: int = descriptor) -> None:
            at = 0
            while at < size:
                at += os.preadv(descriptor, [view[at : min(at + PIECE, size)]], start + at)

        rank.together()
        found.append(timed(restore)[0])
        os.close(descriptor)
    return found


def raw_durable(rank: Rank, base: Path, layout: Layout, saves: int) -> list[Done]:
    """The same bytes as :func:`stepwell_durable` in as many processes at once, each into new files
    of its own, preallocated."""
    local = layout.of(rank.state, rank.number, held)
    raw = Raw(Staged(local))
    raw.prepare(local)
    found = []
    for number in range(saves + 1):
        rank.together()
        done, _ = timed(lambda number=number: raw.save(base / f"raw-{rank.number}-{number}", local))
        found.append(done)
    return found[1:]
