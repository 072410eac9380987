"""Measure loads of other libraries' checkpoints against their own loaders.

    python tests/bench/foreign_loads.py                       # 4 GiB, four rounds: about 45 minutes
    python tests/bench/foreign_loads.py --gib 1 --only Orbax  # loads of these formats

The model is written as sharded safetensors, as one file of torch.save, as DCP of one rank and of
four, by Orbax in Zarr 2 and 3, and as DeepSpeed's ZeRO-2 and ZeRO-3 of four ranks. Each contestant
loads it into host memory, in a process of its own in every round, in shuffled order, from a cold
and from a warm page cache. Loaders that map the file are measured twice: as they are, with every
page touched, and with a copy into memory of the process, as the others give it. The ratio is the
time of stepwell over that of the contestant, in the same round. An adoption reads the DCP
checkpoint once. Then come reads of one tensor, and the opening: see :mod:`foreign_parts`.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import io
import os
import random
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

os.environ["DS_ACCELERATOR"] = "cpu"
import foreign_parts
from children import answer, in_child
from foreign_files import (
    DCP,
    DCP_OF_RANKS,
    ORBAX_2,
    ORBAX_3,
    PLACES,
    SAFETENSORS,
    TINY,
    TORCH,
    ZERO_2,
    ZERO_3,
    write_models,
)
from measure import Spare, disk_bytes, drop_caches, huge_buffer, settle, warm_cache
from tables import progress, spread, table, verdict

#: A contestant returns the load of a path.
Contestant = Callable[[Path], Callable[[], Any]]

#: The newest safetensors, release or not: see the target `bench-tools` of the Makefile.
NEWEST_SAFETENSORS = Path(sys.prefix) / "newest-safetensors"
#: The most time of stepwell over that of a loader, by format, and the most bytes over those needed.
MOST_TIME = {SAFETENSORS: 0.9, TORCH: 0.5, DCP: 0.5, DCP_OF_RANKS: 0.5, ORBAX_2: 0.5, ORBAX_3: 0.5}
MOST_TIME |= {ZERO_2: 0.5, ZERO_3: 0.5}
MOST_BYTES = 1.05
WINDOW = 16 << 20
READS = 8
HEATS = ("cold", "warm")
HEAD = [
    "format",
    "loader",
    "cold, s",
    "warm, s",
    "stepwell / it, cold",
    "warm",
    "at most",
    "",
    f"bytes read / needed, at most {MOST_BYTES}",
    "",
]


def ours(path: Path) -> Callable[[], Any]:
    import stepwell as sw

    return lambda: sw.restore(path)


def ours_of_zero(path: Path) -> Callable[[], Any]:
    import stepwell as sw

    return lambda: sw.restore(path, include="model")["model"]


def zero_to_fp32(path: Path) -> Callable[[], Any]:
    from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint

    def load() -> Any:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            return get_fp32_state_dict_from_zero_checkpoint(path)

    return load


def raw_disk(path: Path) -> Callable[[], Any]:
    """Direct reads of all files into memory that was touched before."""
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    windows = [
        (os.open(file, os.O_RDONLY | os.O_DIRECT), at)
        for file in files
        for at in range(0, file.stat().st_size, WINDOW)
    ]
    buffer = memoryview(huge_buffer(len(windows) * WINDOW))

    def read(number: int) -> None:
        file, at = windows[number]
        os.preadv(file, [buffer[number * WINDOW :][:WINDOW]], at)

    def load() -> None:
        with ThreadPoolExecutor(READS) as pool:
            list(pool.map(read, range(len(windows))))

    return load


def adopt(path: Path) -> Callable[[], Any]:
    import stepwell as sw
    from stepwell.formats import adoption

    def load() -> None:
        sw.adopt(path)
        os.unlink(adoption.place(str(path)))  # other loads are without checksums

    return load


def shards(path: Path) -> list[str]:
    return [str(file) for file in sorted(path.glob("*.safetensors"))]


def safetensors(path: Path) -> Callable[[], Any]:
    from safetensors.torch import load_file

    return lambda: {name: one for file in shards(path) for name, one in load_file(file).items()}


def safetensors_pread(path: Path) -> Callable[[], Any]:
    sys.path.insert(0, str(NEWEST_SAFETENSORS))
    from safetensors.torch import load_file

    return lambda: {
        name: one for file in shards(path) for name, one in load_file(file, backend="pread").items()
    }


def fastsafetensors(path: Path) -> Callable[[], Any]:
    from fastsafetensors import SafeTensorsFileLoader, SingleGroup

    loader = SafeTensorsFileLoader(SingleGroup(), "cpu", nogds=True)
    held = []

    def load() -> Any:
        loader.add_filenames({0: shards(path)})
        buffers = loader.copy_files_to_device()
        held.append(buffers)  # the memory of the tensors
        return {name: buffers.get_tensor(name) for name in buffers.key_to_rank_lidx}

    return load


def transformers(path: Path) -> Callable[[], Any]:
    import torch
    from transformers import LlamaForCausalLM

    return lambda: LlamaForCausalLM.from_pretrained(path, dtype=torch.float32).state_dict()


def torch_load(path: Path) -> Callable[[], Any]:
    import torch

    return lambda: torch.load(path, weights_only=True)


def torch_mmap(path: Path) -> Callable[[], Any]:
    import torch

    return lambda: torch.load(path, weights_only=True, mmap=True)


def dcp_load(path: Path) -> Callable[[], Any]:
    import torch
    import torch.distributed.checkpoint as dcp

    sizes = dcp.FileSystemReader(path).read_metadata().state_dict_metadata

    def load() -> Any:
        state = {name: torch.empty(one.size, dtype=torch.float32) for name, one in sizes.items()}
        dcp.load(state, checkpoint_id=path, no_dist=True)
        return state

    return load


def orbax(path: Path) -> Callable[[], Any]:
    import orbax.checkpoint as ocp

    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler())
    return lambda: checkpointer.restore(path.absolute())


def copied(load: Contestant) -> Contestant:
    """A loader that maps the file, with a copy of each tensor."""

    def of(path: Path) -> Callable[[], Any]:
        mapped = load(path)
        return lambda: {name: one.clone() for name, one in mapped().items()}

    return of


OURS, RAW, ADOPT = "stepwell", "raw disk", "stepwell adopt"
#: They give no tensors, and run from a cold cache only.
WITHOUT_RESULT = (RAW, ADOPT)
#: Loaders that give tensors over the mapped file, and copy nothing.
MAPPED = ("safetensors, mapped", "transformers, mapped", "torch.load, mapped")
CONTESTANTS: dict[str, dict[str, Contestant]] = {
    SAFETENSORS: {
        OURS: ours,
        "safetensors": copied(safetensors),
        "safetensors, mapped": safetensors,
        "transformers": copied(transformers),
        "transformers, mapped": transformers,
    },
    TORCH: {
        OURS: ours,
        "torch.load": torch_load,
        "torch.load of a map": copied(torch_mmap),
        "torch.load, mapped": torch_mmap,
    },
    DCP: {OURS: ours, "dcp.load": dcp_load},
    DCP_OF_RANKS: {OURS: ours, "dcp.load": dcp_load},
    ORBAX_2: {OURS: ours, "Orbax": orbax},
    ORBAX_3: {OURS: ours, "Orbax": orbax},
    ZERO_2: {OURS: ours_of_zero, "zero_to_fp32": zero_to_fp32},
    ZERO_3: {OURS: ours_of_zero, "zero_to_fp32": zero_to_fp32},
}
if NEWEST_SAFETENSORS.is_dir():
    CONTESTANTS[SAFETENSORS]["safetensors, pread"] = safetensors_pread
if importlib.util.find_spec("fastsafetensors"):
    CONTESTANTS[SAFETENSORS]["fastsafetensors"] = fastsafetensors
for contestants in CONTESTANTS.values():
    contestants[RAW] = raw_disk
CONTESTANTS[DCP][ADOPT] = adopt


def touched(result: Any) -> int:
    """Reads a byte of every page, and returns the bytes in all."""
    import numpy as np

    nbytes = 0
    for one in result.values():
        array = np.asarray(one.detach() if hasattr(one, "detach") else one).reshape(-1).view(np.uint8)
        int(array[::4096].sum())
        nbytes += array.nbytes
    return nbytes


def child(kind: str, name: str, folder: Path) -> None:
    """Loads once. Answers seconds, bytes, and bytes read from the disk."""
    contestant = CONTESTANTS[kind][name]
    contestant(folder / TINY / PLACES[kind])()
    load = contestant(folder / PLACES[kind])

    def measure() -> list[float]:
        read, begun = disk_bytes()[0], time.perf_counter()
        result = load()
        nbytes = touched(result) if result is not None else 0
        return [time.perf_counter() - begun, nbytes, disk_bytes()[0] - read]

    answer(measure)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3], Path(sys.argv[4]))
        return
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--gib", type=float, default=4)
    arguments.add_argument("--rounds", type=int, default=4)
    arguments.add_argument("--only", default="", help="formats with this text in their names")
    arguments.add_argument("--directory", type=Path)
    given = arguments.parse_args()
    of_zero = [kind for kind in (ZERO_2, ZERO_3) if given.only in kind]
    if of_zero and importlib.util.find_spec("deepspeed") is None:
        arguments.error(f"deepspeed is missing, and {of_zero} need it. Run `make build`, or pass --only")
    folder = Path(tempfile.mkdtemp(prefix="bench-loads-", dir=given.directory))
    try:
        nbytes = write_models(folder, given.gib)
        measure(folder, nbytes, given.rounds, given.only)
        if not given.only:
            foreign_parts.measure(folder, given.rounds)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, nbytes: int, rounds: int, only: str) -> None:
    """Runs all rounds, and prints a table."""
    jobs = [
        (kind, name, heat)
        for kind, all in CONTESTANTS.items()
        if only in kind
        for name in all
        for heat in HEATS
        if name not in WITHOUT_RESULT or heat == "cold"
    ]
    seconds: dict[tuple[str, str, str], list[float]] = {job: [] for job in jobs}
    read: dict[tuple[str, str], list[float]] = {job[:2]: [] for job in jobs}
    spare = Spare(2 * nbytes)
    for number in range(rounds):
        for kind, name, heat in random.Random(number).sample(jobs, len(jobs)):
            path = folder / PLACES[kind]

            def prepare(path: Path = path, heat: str = heat) -> None:
                if heat == "cold":
                    drop_caches()
                else:
                    warm_cache(path.parent if path.is_file() else path)
                settle(0.2)
                spare.release()

            spare.hold()
            taken, loaded, from_disk = in_child(__file__, [kind, name, str(folder)], prepare)
            assert name in WITHOUT_RESULT or loaded == nbytes, (kind, name, loaded, nbytes)
            progress(f"round {number + 1} of {rounds}: {kind}, {name}, {heat}", taken)
            seconds[kind, name, heat].append(taken)
            if heat == "cold":
                read[kind, name].append(from_disk / nbytes)
    rows = [HEAD]
    for kind, name in read:
        if name == ADOPT:
            continue
        times = {heat: seconds.get((kind, name, heat), []) for heat in HEATS}
        ratios = {
            heat: [one / other for one, other in zip(seconds[kind, OURS, heat], times[heat], strict=True)]
            for heat in HEATS
            if times[heat] and name != OURS
        }
        limit = None if name in (OURS, RAW, *MAPPED) else MOST_TIME[kind]
        worst = max((statistics.median(one) for one in ratios.values()), default=None)
        most = MOST_BYTES if name == OURS else None
        rows.append(
            [
                kind,
                name,
                *(spread(times[heat]) for heat in HEATS),
                *(spread(ratios.get(heat, [])) for heat in HEATS),
                f"{limit or ''}",
                verdict(worst, limit),
                spread(read[kind, name]),
                verdict(statistics.median(read[kind, name]), most),
            ]
        )
    print(f"Loads of {nbytes / 2**30:.2f} GiB, {rounds} rounds; median (quartiles)\n\n{table(rows)}\n")
    if (DCP, ADOPT) in read:
        taken, raw = seconds[DCP, ADOPT, "cold"], seconds[DCP, RAW, "cold"]
        ratios = [one / other for one, other in zip(raw, taken, strict=True)]
        rate = nbytes / 1e9 / statistics.median(taken)
        print(
            f"{ADOPT}, of DCP: {spread(taken)} s, {rate:.2f} GB/s, {spread(ratios)} of the raw disk's rate\n"
        )


if __name__ == "__main__":
    main()
