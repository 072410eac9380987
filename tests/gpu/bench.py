"""Lazy capture from a GPU, measured: one run, one table, with the copy rate of the device and the
raw disk beside it.

    python tests/gpu/bench.py [--gb 10] [--disk DIR] [--json FILE]

Needs the installed package, torch and a CUDA device; elsewhere it says "skipped: no CUDA device"
and ends well. `--rehearse` goes through all of it with a tiny state in host memory, to see that the
program itself works; its figures mean nothing.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import mmap
import os
import platform
import shutil
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

import stepwell as sw
import torch
from tables import table
from torch.utils._pytree import tree_map_only

GB = 1_000_000_000
ROUNDS = 5


class Machine:
    """The device, or the host where it is only rehearsed."""

    def __init__(self, rehearse: bool) -> None:
        self.is_cuda = not rehearse
        self.device = "cuda" if self.is_cuda else "cpu"

    def sync(self) -> None:
        """Waits for the training's stream, and for no other: a capture goes on."""
        if self.is_cuda:
            torch.cuda.current_stream().synchronize()

    def busy(self, seconds: float) -> None:
        if self.is_cuda:
            torch.cuda._sleep(int(seconds * 1.5e9))

    def is_busy(self) -> bool:
        return not torch.cuda.current_stream().query() if self.is_cuda else True

    def free(self) -> int:
        return int(torch.cuda.mem_get_info()[0]) if self.is_cuda else 0

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.is_cuda)

    def named(self) -> str:
        if not self.is_cuda:
            return "a rehearsal in host memory: no figure means anything"
        return f"{torch.cuda.get_device_name()}, driver for CUDA {sw.engine_info(cuda=True)['cuda']['driver'] / 1000:g}, torch {torch.__version__}"


def timed(call: Callable[[], Any]) -> float:
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun


def median(call: Callable[[], float], rounds: int = ROUNDS) -> float:
    return statistics.median(call() for _ in range(rounds))


# ---- what the machine can do
# ---------------------------------------------------------------------------------------


def copy_rates(machine: Machine, nbytes: int) -> tuple[float, float]:
    """Bytes per second from the device into pinned memory, and back."""
    there, here = torch.empty(nbytes, dtype=torch.uint8, device=machine.device), machine.pinned(nbytes)

    def once(to: torch.Tensor, source: torch.Tensor) -> float:
        machine.sync()

        def copy() -> None:
            to.copy_(source, non_blocking=True)
            machine.sync()

        return nbytes / timed(copy)

    once(here, there)
    return median(lambda: once(here, there)), median(lambda: once(there, here))


def small_copies(machine: Machine, tensors: list[torch.Tensor]) -> dict[str, float]:
    """Milliseconds for tensors to be in pinned memory: copied one by one, and gathered on the
    device and copied once."""
    total = sum(one.numel() for one in tensors)
    here = machine.pinned(4 * total).view(torch.float32)
    parts = list(here.split([one.numel() for one in tensors]))
    flat = [one.detach().flatten() for one in tensors]

    def one_by_one() -> None:
        for to, source in zip(parts, flat, strict=True):
            to.copy_(source, non_blocking=True)
        machine.sync()

    def gathered() -> None:
        here.copy_(torch.cat(flat), non_blocking=True)
        machine.sync()

    for call in (one_by_one, gathered):
        call()
    return {
        "one_by_one_ms": 1e3 * median(lambda: timed(one_by_one)),
        "gathered_ms": 1e3 * median(lambda: timed(gathered)),
    }


def disk_rates(directory: Path, nbytes: int) -> tuple[float, float]:
    """Bytes per second past the page cache: into a preallocated file with its fsync, and out of
    it."""
    block = 8 << 20
    buffer = mmap.mmap(-1, block)
    buffer.write(os.urandom(1 << 20) * (block >> 20))
    path = directory / "raw"
    count = max(nbytes // block, 1)

    def run(flags: int, move: Callable[[int, int], int], preallocate: bool) -> float:
        descriptor = os.open(path, flags | getattr(os, "O_DIRECT", 0), 0o644)
        try:
            if preallocate:
                os.posix_fallocate(descriptor, 0, count * block)
            begun = time.perf_counter()
            threads = [
                threading.Thread(
                    target=lambda first=first: [move(descriptor, n * block) for n in range(first, count, 4)]
                )
                for first in range(4)
            ]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            if preallocate:
                os.fsync(descriptor)
            return count * block / (time.perf_counter() - begun)
        finally:
            os.close(descriptor)

    try:
        write = run(os.O_RDWR | os.O_CREAT, lambda fd, at: os.pwritev(fd, [buffer], at), True)
        scratch = [mmap.mmap(-1, block)]
        read = run(os.O_RDONLY, lambda fd, at: os.preadv(fd, scratch, at), False)
    finally:
        path.unlink(missing_ok=True)
    return write, read


# ---- what is saved
# ---------------------------------------------------------------------------------------


class Weights:
    """A state of so many bytes in so many leaves, half of it parameters, half momentum, owned by an
    optimizer."""

    def __init__(self, machine: Machine, nbytes: int, leaves: int = 300) -> None:
        each = max(nbytes // leaves // 4, 1)
        half = leaves // 2
        self.params = [torch.nn.Parameter(torch.randn(each, device=machine.device)) for _ in range(half)]
        self.optimizer = torch.optim.SGD(self.params, lr=1e-3, momentum=0.9)
        for one in self.params:
            # Adam counts its steps on the host.
            self.optimizer.state[one] = {"momentum_buffer": torch.randn_like(one), "step": torch.tensor(0.0)}
        self.nbytes = 2 * half * each * 4

    def state(self) -> dict[str, Any]:
        slots = {f"s{n}": self.optimizer.state[one] for n, one in enumerate(self.params)}
        return {"params": {f"p{n}": one for n, one in enumerate(self.params)}, "optimizer": slots}


def saving(machine: Machine, weights: Weights, root: Path) -> dict[str, Any]:
    """Measures the duration of save(), the copy rate of the device, and its memory."""
    calls, captures, durables, waited, taken = [], [], [], False, 0
    with sw.CheckpointManager(root, retention=sw.keep_latest(1)) as mgr:
        mgr.attach(weights.optimizer)
        mgr.prepare(weights.state())
        mgr.save(0, weights.state()).result()
        for step in range(1, ROUNDS + 1):
            state = weights.state()
            machine.sync()
            free = machine.free()
            machine.busy(0.05)
            begun = time.perf_counter()
            save = mgr.save(step, state)
            calls.append(time.perf_counter() - begun)
            waited = waited or not machine.is_busy()
            taken = max(taken, free - machine.free())
            machine.sync()
            begun = time.perf_counter()
            save.wait_captured()
            captures.append(time.perf_counter() - begun)
            save.result()
            assert save.stats is not None
            durables.append(save.stats.total_seconds)
    return {
        "save_ms": 1e3 * statistics.median(calls),
        "waited": waited,
        "capture_rate": weights.nbytes / statistics.median(captures),
        "durable_s": statistics.median(durables),
        "device_memory": taken,
    }


def restoring(machine: Machine, weights: Weights, root: Path) -> dict[str, float]:
    """Bytes per second into the tensors of the device, from the page cache and past it."""
    with sw.CheckpointManager(root) as mgr:

        def once(cold: bool) -> float:
            if cold:
                for file in root.rglob("*.data"):
                    descriptor = os.open(file, os.O_RDONLY)
                    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                    os.close(descriptor)
            else:
                for file in root.rglob("*.data"):
                    file.read_bytes()
            machine.sync()

            def restore() -> None:
                mgr.restore(into=weights.state())
                machine.sync()

            return weights.nbytes / timed(restore)

        found = {"warm": median(lambda: once(False), 3), "cold": median(lambda: once(True), 3)}
        # The limit of the page cache: the same bytes, into memory that was touched before.
        twins = tree_map_only(torch.Tensor, lambda one: torch.zeros_like(one, device="cpu"), weights.state())
        for file in root.rglob("*.data"):
            file.read_bytes()
        found["host"] = weights.nbytes / median(lambda: timed(lambda: mgr.restore(into=twins)), 3)
        return found


def tracing(machine: Machine, weights: Weights, root: Path) -> float:
    """Bytes per second of the digests of tensors on the device."""
    with sw.CheckpointManager(root, prove_resume=1000) as mgr:
        steps = itertools.count(ROUNDS + 1)
        mgr.save(next(steps), weights.state(), force=True).result()
        mgr.trace(next(steps), weights.state())
        machine.sync()
        return weights.nbytes / median(lambda: timed(lambda: mgr.trace(next(steps), weights.state())), 3)


# ---- a training that saves every iteration
# -----------------------------------------------------------------------------


class Training:
    """A small GPT-like stack whose steps take about so long, with AdamW."""

    def __init__(self, machine: Machine, width: int, layers: int) -> None:
        torch.manual_seed(0)
        self.machine = machine
        layer = torch.nn.TransformerEncoderLayer(
            width, max(width // 64, 1), 4 * width, dropout=0.0, batch_first=True
        )
        self.net = torch.nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).to(machine.device)
        self.optimizer = torch.optim.AdamW(self.net.parameters(), lr=1e-4)
        self.batch = torch.randn(4, 128, width, device=machine.device)
        self.passes = 1
        self.step()
        self.nbytes = sum(one.numel() * one.element_size() for one in self.tensors())

    def tensors(self) -> list[torch.Tensor]:
        slots = [
            one
            for state in self.optimizer.state.values()
            for one in state.values()
            if isinstance(one, torch.Tensor)
        ]
        return [*self.net.parameters(), *slots]

    def state(self) -> dict[str, Any]:
        return {"model": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}

    def step(self) -> None:
        self.optimizer.zero_grad(set_to_none=True)
        for _ in range(self.passes):
            self.net(self.batch).square().mean().backward()
        self.optimizer.step()

    def step_seconds(self, steps: int = 5) -> float:
        self.machine.sync()

        def run() -> None:
            for _ in range(steps):
                self.step()
            self.machine.sync()

        return timed(run) / steps


class Contestant:
    """Somebody who saves every iteration: how long the training was held up by it, and until the
    last one was durable."""

    name = ""

    def __init__(self, training: Training, directory: Path) -> None:
        self.training, self.directory = training, directory

    def save(self, step: int) -> None:
        raise NotImplementedError

    def finish(self) -> None:
        pass

    def close(self) -> None:
        pass


class Nobody(Contestant):
    name = "no saving"

    def save(self, step: int) -> None:
        pass


class Stepwell(Contestant):
    name = "stepwell"

    def __init__(self, training: Training, directory: Path) -> None:
        super().__init__(training, directory)
        self.mgr = sw.CheckpointManager(directory, retention=sw.keep_latest(1))
        self.attached = self.mgr.attach(training.optimizer)
        self.mgr.prepare(training.state())

    def save(self, step: int) -> None:
        self.mgr.save(step, self.training.state())

    def finish(self) -> None:
        self.mgr.wait_until_finished()

    def close(self) -> None:
        self.attached.remove()
        self.mgr.close()


class TorchSave(Contestant):
    name = "torch.save"

    def save(self, step: int) -> None:
        path = self.directory / f"{step % 2}.pt"
        with open(path, "wb") as file:
            torch.save(self.training.state(), file)
            file.flush()
            os.fsync(file.fileno())


class Staged(Contestant):
    """The best case of TorchSnapshot and DataStates before they continue in the background: one
    copy into pinned memory that is kept, then a thread."""

    name = "copy to pinned memory, then a thread"

    def __init__(self, training: Training, directory: Path) -> None:
        super().__init__(training, directory)
        self.twins = [
            torch.empty_like(one, device="cpu", pin_memory=training.machine.is_cuda)
            for one in training.tensors()
        ]
        self.thread: threading.Thread | None = None

    def save(self, step: int) -> None:
        self.finish()
        for twin, one in zip(self.twins, self.training.tensors(), strict=True):
            twin.copy_(one.detach(), non_blocking=True)
        self.training.machine.sync()

        def write() -> None:
            with open(self.directory / f"{step % 2}.pt", "wb") as file:
                torch.save(self.twins, file)
                file.flush()
                os.fsync(file.fileno())

        self.thread = threading.Thread(target=write)
        self.thread.start()

    def finish(self) -> None:
        if self.thread is not None:
            self.thread.join()
            self.thread = None


class DcpAsync(Contestant):
    name = "DCP async_save"

    def __init__(self, training: Training, directory: Path) -> None:
        super().__init__(training, directory)
        import torch.distributed as dist

        if not dist.is_initialized():
            store = dist.FileStore(str(directory / "store"), 1)
            dist.init_process_group(
                "cpu:gloo,cuda:nccl" if training.machine.is_cuda else "gloo",
                store=store,
                rank=0,
                world_size=1,
            )
        self.pending: Any = None

    def save(self, step: int) -> None:
        import torch.distributed.checkpoint as dcp

        self.finish()
        self.pending = dcp.async_save(self.training.state(), checkpoint_id=self.directory / f"{step % 2}")

    def finish(self) -> None:
        if self.pending is not None:
            self.pending.result()
            self.pending = None

    def close(self) -> None:
        import torch.distributed as dist

        dist.destroy_process_group()  # its threads would keep the process from ending


def looping(training: Training, contestant: type[Contestant], directory: Path, steps: int) -> dict[str, Any]:
    directory.mkdir(parents=True, exist_ok=True)
    try:
        one = contestant(training, directory)
        # The first save makes what is kept.
        training.step()
        one.save(0)
        one.finish()
    except Exception as error:
        return {"name": contestant.name, "failed": f"{type(error).__name__}: {error}"[:100]}
    training.machine.sync()
    blocked = 0.0
    begun = time.perf_counter()
    for step in range(1, steps + 1):
        training.step()
        blocked += timed(lambda step=step: one.save(step))
    training.machine.sync()
    looped = time.perf_counter() - begun
    one.finish()
    durable = time.perf_counter() - begun
    one.close()
    return {
        "name": contestant.name,
        "step_s": looped / steps,
        "blocked_s": blocked / steps,
        "durable_s": durable - looped,
    }


# ---- the table
# ---------------------------------------------------------------------------------------


def verdict(reached: bool) -> str:
    return "reached" if reached else "MISSED"


class Found(dict[str, Any]):
    """The figures. Each is also printed when it is there: a long run that is ended early still
    tells something."""

    def __setitem__(self, name: str, value: Any) -> None:
        super().__setitem__(name, value)
        print(f"{time.strftime('%T')} {name}: {json.dumps(value)}", file=sys.stderr, flush=True)


def run(machine: Machine, gigabytes: float, disk: Path) -> dict[str, Any]:
    nbytes = int(gigabytes * GB)
    found = Found()
    found["device"] = machine.named()
    found["python"] = platform.python_version()
    found["date"] = time.strftime("%Y-%m-%d")
    found["d2h"], found["h2d"] = copy_rates(machine, min(nbytes, GB))
    found["disk_write"], found["disk_read"] = disk_rates(disk, min(nbytes, 4 * GB))
    found["engine"] = sw.engine_info(disk)["engine"]
    weights = Weights(machine, nbytes)
    found["bytes"] = weights.nbytes
    found["save"] = saving(machine, weights, disk / "saves")
    found["restore"] = restoring(machine, weights, disk / "saves")
    found["trace"] = tracing(machine, weights, disk / "saves")
    shutil.rmtree(disk / "saves")
    small = Weights(machine, min(nbytes, 80_000_000), leaves=20_000 if machine.is_cuda else 200)
    tensors = [*small.params, *(small.optimizer.state[one]["momentum_buffer"] for one in small.params)]
    found["small"] = {
        "leaves": len(tensors),
        "bytes": small.nbytes,
        **saving(machine, small, disk / "small"),
        **small_copies(machine, tensors),
    }
    shutil.rmtree(disk / "small")
    del weights, small, tensors
    training = Training(machine, *((1024, 8) if machine.is_cuda else (64, 1)))
    # So many passes that the disk, at 0.8 of its rate, takes what a step makes.
    wanted = training.nbytes / (0.8 * found["disk_write"])
    first = training.step_seconds()
    training.passes = 11
    each = max((training.step_seconds() - first) / 10, 1e-6)
    training.passes = min(200, 1 + max(0, math.ceil((wanted - first) / each)))
    steps = 10 if machine.is_cuda else 2
    contestants: list[type[Contestant]] = [Nobody, Stepwell, Staged, TorchSave, DcpAsync]
    found["loop_bytes"] = training.nbytes
    loop = []
    # Without saves at the end too: a device that has just begun is slower.
    for contestant in [*contestants, Nobody]:
        loop.append(looping(training, contestant, disk / contestant.__name__, steps))
        print(f"{time.strftime('%T')} {loop[-1]}", file=sys.stderr, flush=True)
        shutil.rmtree(disk / contestant.__name__, ignore_errors=True)
    found["loop"] = loop
    return found


def report(found: dict[str, Any]) -> str:
    save, restore, small = found["save"], found["restore"], found["small"]
    rate = min(found["disk_read"], found["h2d"])
    per_gb = lambda value: f"{value / GB:.1f} GB/s"  # noqa: E731
    lines = [
        f"# {found['device']}, {found['date']}",
        "",
        f"{found['bytes'] / GB:.1f} GB in 300 leaves; device to pinned memory {per_gb(found['d2h'])}, back {per_gb(found['h2d'])}; raw disk {per_gb(found['disk_write'])} in, "
        f"{per_gb(found['disk_read'])} out; engine {found['engine']}",
        "",
    ]
    rows = [["what", "measured", "target", ""]]
    rows.append(
        ["save() of 300 leaves, attached", f"{save['save_ms']:.2f} ms", "2 ms", verdict(save["save_ms"] <= 2)]
    )
    rows.append(
        [
            "the training's stream waits in save()",
            "yes" if save["waited"] else "no",
            "no",
            verdict(not save["waited"]),
        ]
    )
    ratio = save["capture_rate"] / found["d2h"]
    rows.append(
        [
            "device to ring, of the pinned copy rate",
            f"{ratio:.2f} ({per_gb(save['capture_rate'])})",
            "0.9",
            verdict(round(ratio, 2) >= 0.9),
        ]
    )
    for how in ("warm", "cold"):
        limit = found["h2d"] if how == "warm" else rate
        ratio = restore[how] / limit
        rows.append(
            [
                f"restore to the device, {how}, of min(disk, H2D)",
                f"{ratio:.2f} ({per_gb(restore[how])})",
                "0.9",
                verdict(round(ratio, 2) >= 0.9),
            ]
        )
    rows.append(["restore to host memory, warm", per_gb(restore["host"]), "", ""])
    rows.append(["digests of a trace", per_gb(found["trace"]), "", ""])
    rows.append(
        [
            "memory of the device beyond the tensors",
            f"{save['device_memory'] / 1e6:.0f} MB",
            "64 MB",
            verdict(save["device_memory"] <= 64e6),
        ]
    )
    rows.append(
        [
            f"save() of {small['leaves']} small leaves",
            f"{small['save_ms']:.1f} ms, captured in {small['bytes'] / small['capture_rate'] * 1e3:.0f} ms",
            "",
            "",
        ]
    )
    rows.append(
        [
            "the same by torch, into one pinned tensor",
            f"one by one {small['one_by_one_ms']:.0f} ms, torch.cat and one copy {small['gathered_ms']:.0f} ms",
            "",
            "",
        ]
    )
    lines += [
        table(rows),
        "",
        f"A training that saves every iteration ({found['loop_bytes'] / GB:.2f} GB each, at most 0.8 of the disk's rate):",
        "",
    ]
    base = min(one["step_s"] for one in found["loop"] if one["name"] == Nobody.name)
    rows = [["who", "step", "of no saving", "blocked", "until durable", ""]]
    for one in found["loop"]:
        if "failed" in one:
            rows.append([one["name"], one["failed"], "", "", "", ""])
            continue
        ratio = one["step_s"] / base
        told = verdict(round(ratio, 2) <= 1.05) if one["name"] == "stepwell" else ""
        rows.append(
            [
                one["name"],
                f"{one['step_s'] * 1e3:.1f} ms",
                f"{ratio:.2f}",
                f"{one['blocked_s'] * 1e3:.1f} ms",
                f"{one['durable_s']:.2f} s",
                told,
            ]
        )
    return "\n".join([*lines, table(rows)])


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--gb", type=float, default=10.0, help="size of the state, in GB")
    parser.add_argument("--disk", type=Path, default=Path.cwd(), help="where to write (default: here)")
    parser.add_argument("--json", type=Path, help="also writes the figures there")
    parser.add_argument("--rehearse", action="store_true", help="tiny, in host memory, for no figures")
    arguments = parser.parse_args()
    if not arguments.rehearse and not torch.cuda.is_available():
        print("skipped: no CUDA device")
        return 0
    machine = Machine(arguments.rehearse)
    with tempfile.TemporaryDirectory(dir=arguments.disk, prefix="stepwell-gpu-bench-") as scratch:
        found = run(machine, 0.01 if arguments.rehearse else arguments.gb, Path(scratch))
    print(report(found))
    if arguments.json:
        arguments.json.write_text(json.dumps(found, indent=1))
    return 0


if __name__ == "__main__":
    sys.exit(main())
