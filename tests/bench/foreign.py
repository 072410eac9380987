"""Measure conversions against a raw concurrent copy of the same bytes.

    python tests/bench/foreign.py                     # 2 GiB, five rounds: about 9 minutes
    python tests/bench/foreign.py --gib 0.5 --rounds 2

The model has the layers of an 8B Llama. A round does every operation once, in a process of its own,
in shuffled order, from a cold page cache. Each ends with a syncfs. The raw copy reads with one
thread and writes with another, past the page cache, through windows of 16 MiB. The ratio is the
time of the raw copy of a source over that of its conversion, in the same round. Memory is the peak
beyond the imports.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import mmap
import os
import queue
import random
import shutil
import statistics
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from children import answer, in_child
from foreign_files import llama, write_zero
from measure import Spare, drop_caches, huge_buffer, measured, settle, sync_file_system
from tables import progress, spread, table, verdict

WINDOW = 16 << 20
WINDOWS = 8

SOURCES = {
    "stepwell": "step",
    "safetensors": "model.safetensors",
    "DCP": "dcp",
    "torch.save": "model.pt",
    "Megatron": "megatron",
    "ZeRO-3": "zero-3/global_step1",
    "ZeRO-3 with slots": "zero-3-with-slots/global_step1",
}
LAYERS_PER_GIB = 2
#: The layers of an 8B Llama.
SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 32000,
}
#: The numbers of the model, for recipes.
NUMBERS = {"heads": 32, "kv_heads": 8, "head_dim": 128, "vocab": 32000}
#: Conversions of stepwell: source, target, and recipe.
OURS = {
    "safetensors → stepwell": ("safetensors", "stepwell", None),
    "stepwell → safetensors": ("stepwell", "safetensors", None),
    "DCP → safetensors": ("DCP", "safetensors", None),
    "torch.save → safetensors": ("torch.save", "safetensors", None),
    "Megatron → Hugging Face": ("Megatron", "safetensors", "megatron-to-hf-llama"),
    "ZeRO-3 → safetensors": ("ZeRO-3", "safetensors", None),
    "ZeRO-3 with slots → stepwell": ("ZeRO-3 with slots", "stepwell", None),
}
#: The least rates, as a share of the raw copy's, and the most memory: the budget and 64 MiB.
LEAST_RATE = dict.fromkeys(OURS, 0.8) | {name: 0.7 for name in OURS if name.startswith(("Megatron", "ZeRO"))}
MOST_MIB = 256 + 64

#: An operation: its imports are made before it converts a source to a target.
Operation = Callable[[], Callable[[Path, Path], object]]


def raw_copy(source: Path, destination: Path, ring: mmap.mmap) -> None:
    """Copies a file through a ring of windows: one thread reads, one writes."""
    length = source.stat().st_size
    free: queue.SimpleQueue[int] = queue.SimpleQueue()
    full: queue.SimpleQueue[tuple[int, int] | None] = queue.SimpleQueue()
    view = memoryview(ring)
    windows = [view[at * WINDOW : (at + 1) * WINDOW] for at in range(WINDOWS)]
    for number in range(WINDOWS):
        free.put(number)

    def write() -> None:
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_DIRECT
        file = os.open(destination, flags)
        try:
            os.posix_fallocate(file, 0, length)
            while (part := full.get()) is not None:
                number, offset = part
                os.pwrite(file, windows[number], offset)
                free.put(number)
            os.ftruncate(file, length)
            os.fsync(file)
        finally:
            os.close(file)

    writer = threading.Thread(target=write)
    writer.start()
    file = os.open(source, os.O_RDONLY | os.O_DIRECT)
    try:
        for offset in range(0, length, WINDOW):
            number = free.get()
            os.preadv(file, [windows[number]], offset)
            full.put((number, offset))
    finally:
        full.put(None)
        os.close(file)
        writer.join()


def raw() -> Callable[[Path, Path], object]:
    ring = huge_buffer(WINDOW * WINDOWS)

    def copy(source: Path, target: Path) -> None:
        files = [source] if source.is_file() else [one for one in source.rglob("*") if one.is_file()]
        largest = max(one.stat().st_size for one in files)
        target.mkdir()
        for one in files:
            if one.stat().st_size > largest / 2:
                raw_copy(one, target / one.name, ring)

    return copy


def conversion(to: Any, recipe: str | None) -> Operation:
    def prepared() -> Callable[[Path, Path], object]:
        import stepwell as sw

        convert = sw.convert  # imports what it needs
        map = None if recipe is None else sw.maps.recipe(recipe, **NUMBERS)
        # Of DeepSpeed, the weights; the files have nothing else of that size.
        return lambda source, target: convert(
            source, target, to=to, map=map, subtree="model" if source.parent.name == "zero-3" else ""
        )

    return prepared


def dcp_to_torch_save() -> Callable[[Path, Path], object]:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    return dcp_to_torch_save


def torch_to_safetensors() -> Callable[[Path, Path], object]:
    import torch
    from safetensors.torch import save_file

    return lambda source, target: save_file(torch.load(source, weights_only=True), target)


def universal() -> Callable[[Path, Path], object]:
    os.environ["DS_ACCELERATOR"] = "cpu"
    from deepspeed.checkpoint import ds_to_universal

    workers = {"num_extract_workers": 2, "num_merge_workers": 2}
    options = {"keep_temp_folder": False, "strict": True, "inject_missing_state": True, **workers}
    return lambda source, target: ds_to_universal.main(
        argparse.Namespace(input_folder=str(source), output_folder=str(target), **options)
    )


#: The source of each operation, and the operation.
OPERATIONS: dict[str, tuple[str, Operation]] = {
    **{f"raw copy: {source}": (source, raw) for source in SOURCES},
    **{name: (source, conversion(to, recipe)) for name, (source, to, recipe) in OURS.items()},
    "dcp_to_torch_save": ("DCP", dcp_to_torch_save),
    "torch.load, save_file": ("torch.save", torch_to_safetensors),
    "ds_to_universal": ("ZeRO-3 with slots", universal),
}


def child(name: str, folder: Path) -> None:
    """Does an operation once. Answers its seconds and peak memory."""
    kind, operation = OPERATIONS[name]
    convert, source, target = operation(), folder / SOURCES[kind], folder / "target"

    def call() -> None:
        convert(source, target)
        sync_file_system(folder)

    def measure() -> list[float]:
        timing = measured(call)
        return [timing.seconds, timing.extra_peak]

    answer(measure)


def size_of(path: Path) -> int:
    """The bytes of a file, or of the files below a directory."""
    files = [path] if path.is_file() else [one for one in path.rglob("*") if one.is_file()]
    return sum(one.stat().st_size for one in files)


def write_all(folder: Path, gib: float) -> None:
    """Writes a model in each format."""
    import stepwell as sw
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file

    _, state = llama("bfloat16", **SIZES, num_hidden_layers=max(1, round(gib * LAYERS_PER_GIB)))
    sw.save(folder / SOURCES["stepwell"], state)
    save_file(state, folder / SOURCES["safetensors"])
    torch.save(state, folder / SOURCES["torch.save"])
    with contextlib.redirect_stderr(io.StringIO()):
        dcp.save(state, checkpoint_id=folder / SOURCES["DCP"], no_dist=True)
    write_zero(folder / SOURCES["ZeRO-3"], state, 3)
    write_zero(folder / SOURCES["ZeRO-3 with slots"], state, 3, has_slots=True)
    recipe = sw.maps.recipe("hf-llama-to-megatron", **NUMBERS)
    sw.convert(folder / SOURCES["safetensors"], folder / SOURCES["Megatron"], to="dcp", map=recipe)


def main() -> None:
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], Path(sys.argv[3]))
        return
    arguments = argparse.ArgumentParser()
    arguments.add_argument("--gib", type=float, default=2)
    arguments.add_argument("--rounds", type=int, default=5)
    arguments.add_argument("--directory", type=Path)
    given = arguments.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="bench-foreign-", dir=given.directory))
    try:
        write_all(folder, given.gib)
        measure(folder, given.rounds)
    finally:
        shutil.rmtree(folder)


def measure(folder: Path, rounds: int) -> None:
    """Runs all rounds, and prints a table."""
    nbytes = {kind: size_of(folder / source) for kind, source in SOURCES.items()}
    target, spare = folder / "target", Spare(max(1 << 30, 2 * nbytes["safetensors"]))
    seconds: dict[str, list[float]] = {name: [] for name in OPERATIONS}
    memory: dict[str, list[float]] = {name: [] for name in OPERATIONS}

    def prepare() -> None:
        drop_caches()
        settle()
        spare.release()

    for number in range(rounds):
        for name in random.Random(number).sample(list(OPERATIONS), len(OPERATIONS)):
            spare.hold()
            took, peak = in_child(__file__, [name, str(folder)], prepare)
            progress(f"round {number + 1} of {rounds}: {name}", took)
            seconds[name].append(took)
            memory[name].append(peak / 2**20)
            shutil.rmtree(target) if target.is_dir() else target.unlink()
    rows = [["operation", "seconds", "GB/s", "of the raw copy", "at least", "",
             f"peak MiB, at most {MOST_MIB}", ""]]  # fmt: skip
    for name, times in seconds.items():
        kind = OPERATIONS[name][0]
        row = [name, spread(times), f"{nbytes[kind] / 1e9 / statistics.median(times):.2f}"]
        copies = seconds[f"raw copy: {kind}"]
        ratios = [one / other for one, other in zip(copies, times, strict=True)]
        peak, is_ours = max(memory[name]), name in OURS
        least, most = LEAST_RATE.get(name), MOST_MIB if is_ours else None
        rate = "" if copies is times else spread(ratios)
        row += [rate, f"{least or ''}", verdict(statistics.median(ratios), least, at_least=True)]
        rows.append([*row, f"{peak:.0f}", verdict(peak, most)])
    size = nbytes["safetensors"] / 2**30
    print(f"Conversions of a model of {size:.2f} GiB, {rounds} rounds; median (quartiles)\n\n{table(rows)}\n")


if __name__ == "__main__":
    main()
