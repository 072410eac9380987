"""Reads of one tensor of a checkpoint, and the opening of a checkpoint of 1 000 tensors.

:mod:`foreign_loads` starts it. Each measurement has a process of its own, and checkpoints that
are not in the page cache. The process has read a tiny model before. Bytes are those that it reads
from the disk, with the opening.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from children import answer, in_child
from foreign_files import (
    DCP,
    DCP_OF_RANKS,
    ORBAX_2,
    ORBAX_3,
    PLACES,
    SAFETENSORS,
    STEPWELL,
    TINY,
    TORCH,
    write_all,
    write_orbax,
)
from measure import disk_bytes, settle
from tables import spread, table, verdict

#: Tensors of the model: a large and a small one.
TENSORS = ("model.layers.0.mlp.down_proj.weight", "model.layers.0.input_layernorm.weight")
#: The checkpoint that is opened, and its tensors.
MANY = "many"
COUNT = 1000
#: Processes of each measurement: bytes hardly differ.
ROUNDS = 3
#: The most KiB that are read beside a tensor, and milliseconds of an opening.
MOST_KIB = 1024
MOST_MS = 50
HEAD = [
    "format",
    "reader",
    "KiB beside a large tensor",
    "beside a small one",
    f"at most {MOST_KIB}",
    f"opening of {COUNT} tensors, ms",
    f"at most {MOST_MS}",
]

#: A reader opens a path, and reads the named tensor or nothing.
Reader = Callable[[Path, str | None], Any]


def ours(path: Path, name: str | None) -> Any:
    import stepwell as sw

    with sw.open(path) as checkpoint:
        return None if name is None else checkpoint[name][...]


def safetensors(path: Path, name: str | None) -> Any:
    from safetensors import safe_open

    index = json.loads((path / "model.safetensors.index.json").read_text())["weight_map"]
    for file in {index[name]} if name else set(index.values()):
        with safe_open(path / file, "pt") as opened:
            if name is not None:
                return opened.get_tensor(name).clone()
            opened.keys()
    return None


def torch_mmap(path: Path, name: str | None) -> Any:
    import torch

    opened = torch.load(path, weights_only=True, mmap=True)
    return None if name is None else opened[name].clone()


def dcp_load(path: Path, name: str | None) -> Any:
    import torch
    import torch.distributed.checkpoint as dcp

    sizes = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
    if name is None:
        return None
    state = {name: torch.empty(sizes[name].size)}
    dcp.load(state, checkpoint_id=path, no_dist=True)
    return state[name]


OURS = "stepwell"
READERS: dict[str, dict[str, Reader]] = {
    SAFETENSORS: {OURS: ours, "safetensors": safetensors},
    TORCH: {OURS: ours, "torch.load, mapped": torch_mmap},
    DCP: {OURS: ours, "dcp.load": dcp_load},
    DCP_OF_RANKS: {OURS: ours, "dcp.load": dcp_load},
    ORBAX_2: {OURS: ours},
    ORBAX_3: {OURS: ours},
    STEPWELL: {OURS: ours},
}


def child(kind: str, reader: str, folder: Path, name: str | None) -> None:
    """Reads once. Answers seconds, and bytes that were read beside the tensor's own."""
    read, place = READERS[kind][reader], PLACES[kind]
    read(folder / TINY / place, TENSORS[0])
    path = (folder if name else folder / MANY) / place

    def measure() -> list[float]:
        before, begun = disk_bytes()[0], time.perf_counter()
        found = read(path, name)
        seconds, after = time.perf_counter() - begun, disk_bytes()[0]
        return [seconds, after - before - (0 if found is None else found.nbytes)]

    answer(measure)


def measure(folder: Path, rounds: int) -> None:
    """Measures all readers, and prints a table."""
    import torch

    rounds = min(rounds, ROUNDS)
    state = {f"layers.{number}.weight": torch.full((16, 8), float(number)) for number in range(COUNT)}
    write_all(folder / MANY, state)
    write_orbax(folder / MANY, state)
    rows = [HEAD]
    for kind, readers in READERS.items():
        for reader in readers:

            def read(name: str = "", kind: str = kind, reader: str = reader) -> list[list[float]]:
                arguments = [kind, reader, str(folder), name]
                return [in_child(__file__, arguments, lambda: evict(folder)) for _ in range(rounds)]

            beside = [statistics.median(extra / 1024 for _, extra in read(name)) for name in TENSORS]
            opening = [] if kind == DCP_OF_RANKS else [seconds * 1000 for seconds, _ in read()]
            is_ours = reader == OURS
            row = [kind, reader, *(f"{one:.0f}" for one in beside)]
            row += [verdict(max(beside), MOST_KIB if is_ours else None), spread(opening)]
            middle = statistics.median(opening) if opening else None
            rows.append([*row, verdict(middle, MOST_MS if is_ours else None)])
    print(f"Parts of checkpoints, from a cold cache, {rounds} rounds\n\n{table(rows)}\n")


def evict(folder: Path) -> None:
    """Drops the checkpoints from the page cache. Programs stay: the pages of a reader's code that a
    process touches first are no bytes of a checkpoint."""
    for file in folder.rglob("*"):
        if file.is_file():
            descriptor = os.open(file, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)
    settle(0.2)


if __name__ == "__main__":
    kind, reader, folder, name = sys.argv[2:]
    child(kind, reader, Path(folder), name or None)
