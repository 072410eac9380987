"""The contestants of PyTorch, each as its own documentation recommends it. Every page of a mapped
file is touched during the measurement."""

from __future__ import annotations

import ctypes
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import stepwell as sw
import torch
import torch.distributed.checkpoint as dcp
from peer import KEPT, Peer, nested, part_of
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from workloads import State, flat, nbytes

Tree = dict[str, Any]


def tensor_of(array: np.ndarray) -> torch.Tensor:
    """A tensor with the values of an array, in memory of its own."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16).clone()
    return torch.from_numpy(array).clone()


def touch(tree: Tree) -> Tree:
    """Reads a byte of every page: tensors over a mapped file are there only when that was done."""
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for _, t in flat(tree) if t.nbytes)
    merged: list[list[int]] = []
    for start, stop in ranges:
        if (
            merged and start - merged[-1][1] < 1 << 16
        ):  # what lies between in a file is in the mapping as well
            merged[-1][1] = max(stop, merged[-1][1])
        else:
            merged.append([start, stop])
    for start, stop in merged:
        np.frombuffer((ctypes.c_char * (stop - start)).from_address(start), np.uint8)[::4096].max()
    return tree


class TorchPeer(Peer):
    """Tensors in host memory."""

    def take(self, state: State) -> None:
        self.size = nbytes(state)

        def taken(tree: Tree) -> Tree:
            return {
                name: taken(value) if isinstance(value, dict) else tensor_of(value)
                for name, value in ((name, tree.pop(name)) for name in list(tree))
            }

        self.state = taken(state)

    def empty(self, part: str | None = None) -> Tree:
        return _mapped(part_of(self.state, part), torch.zeros_like)

    def as_numpy(self, tree: Tree) -> State:
        return _mapped(
            tree, lambda t: t.view(torch.int16).numpy() if t.dtype is torch.bfloat16 else t.numpy()
        )


def _mapped(tree: Tree, function: Any) -> Tree:
    return {
        name: _mapped(value, function) if isinstance(value, dict) else function(value)
        for name, value in tree.items()
    }


def _copied(source: Tree, target: Tree) -> Tree:
    there = dict(flat(source))
    for path, tensor in flat(target):
        tensor.copy_(there[path])
    return target


class StepwellTorch(TorchPeer):
    """A committed step of tensors, verified when it is read; ``prepare`` makes the staging
    memory."""

    name = "stepwell (torch)"
    has_retention = True

    def prepare(self) -> None:
        staging = self.size + (64 << 20)
        self.managers = {
            False: sw.CheckpointManager(self.base / "all", staging_bytes=staging),
            True: sw.CheckpointManager(
                self.base / "kept", staging_bytes=staging, retention=sw.keep_latest(KEPT)
            ),
        }
        self.managers[False].prepare(self.state)

    def start(self, directory: Path, step: int, kept: bool) -> None:
        self.pending = self.managers[kept].save(step, self.state)

    def finish(self) -> None:
        self.pending.result(600)

    def directory(self, step: int, kept: bool = False) -> Path:
        return self.base / ("kept" if kept else "all") / f"step_{step:08d}"

    def into(self, step: int, target: Tree) -> Tree:
        return sw.restore(self.directory(step), into=target)

    def fresh(self, step: int) -> Tree:
        return sw.restore(self.directory(step), to="torch")

    def weights(self, step: int) -> Tree:
        return sw.restore(self.directory(step), include=["params/**"], to="torch")

    def close(self) -> None:
        for manager in self.managers.values():
            manager.close()


class SafetensorsTorch(TorchPeer):
    """``safetensors.torch``: ``save_file`` and a sync; ``load_file`` maps the file, and every page
    is touched."""

    name = "safetensors (torch)"

    def start(self, directory: Path, step: int, kept: bool) -> None:
        from safetensors.torch import save_file

        directory.mkdir()
        save_file(dict(flat(self.state)), directory / "model.safetensors")

    def into(self, step: int, target: Tree) -> Tree:
        from safetensors.torch import load_file

        return _copied(nested(load_file(self.directory(step) / "model.safetensors")), target)

    def fresh(self, step: int) -> Tree:
        from safetensors.torch import load_file

        return touch(nested(load_file(self.directory(step) / "model.safetensors")))

    def weights(self, step: int) -> Tree:
        from safetensors import safe_open

        with safe_open(self.directory(step) / "model.safetensors", framework="pt") as file:
            wanted = {name: file.get_tensor(name) for name in file.keys() if name.startswith("params/")}  # noqa: SIM118
        return touch(nested(wanted))


class TorchSave(TorchPeer):
    """``torch.save`` and a sync; ``torch.load(mmap=True)``, and every page is touched."""

    name = "torch.save, load(mmap)"

    def _load(self, step: int) -> Tree:
        return torch.load(self.directory(step) / "state.pt", mmap=True, weights_only=True)

    def start(self, directory: Path, step: int, kept: bool) -> None:
        directory.mkdir()
        torch.save(self.state, directory / "state.pt")

    def into(self, step: int, target: Tree) -> Tree:
        return _copied(self._load(step), target)

    def fresh(self, step: int) -> Tree:
        return touch(self._load(step))

    def weights(self, step: int) -> Tree:
        return touch({"params": self._load(step)["params"]})


class Dcp(TorchPeer):
    """``torch.distributed.checkpoint.save`` and ``load``, without a process group, as it is by
    default."""

    name = "DCP"
    threads = 1

    def start(self, directory: Path, step: int, kept: bool) -> None:
        dcp.save(
            self.state,
            storage_writer=dcp.FileSystemWriter(directory, thread_count=self.threads),
            no_dist=True,
        )

    def into(self, step: int, target: Tree) -> Tree:
        dcp.load(target, checkpoint_id=self.directory(step), no_dist=True)
        return target

    def _new(self, step: int, part: str | None) -> Tree:
        return self.into(step, _mapped(part_of(self.state, part), torch.empty_like))

    def fresh(self, step: int) -> Tree:
        return self._new(step, None)

    def weights(self, step: int) -> Tree:
        return self._new(step, "params")


class DcpThreads(Dcp):
    """The same with a writing thread per core: a file each."""

    name = "DCP, a thread per core"
    threads = os.cpu_count() or 1


class DcpAsync(Dcp):
    """``async_save`` with one ``DefaultStager`` for all saves, whose memory is reused. Pinned and
    shared memory are switched off: they need CUDA."""

    name = "DCP async, cached stager"

    def prepare(self) -> None:
        self.stager = DefaultStager(
            StagingOptions(
                use_pinned_memory=False,
                use_shared_memory=False,
                use_async_staging=False,
                use_non_blocking_copy=False,
            )
        )

    def start(self, directory: Path, step: int, kept: bool) -> None:
        self.pending = dcp.async_save(
            self.state, checkpoint_id=directory, async_stager=self.stager, no_dist=True
        )

    def finish(self) -> None:
        # With a stager that copies before it returns, there is one future: that of the upload.
        getattr(self.pending, "upload_completion", self.pending).result(600)

    def close(self) -> None:
        self.stager.close()


class TorchSnapshot(TorchPeer):
    """``torchsnapshot.Snapshot.async_take``; ``restore`` fills tensors. (It does not copy tensors
    of the host before it returns: a step that changes them may tear the snapshot.)"""

    name = "torchsnapshot async"

    def prepare(self) -> None:
        warnings.simplefilter("ignore")
        import torchsnapshot

        self.library = torchsnapshot

    def _app_state(self, tree: Tree) -> Tree:
        return {name: self.library.StateDict(tree=value) for name, value in tree.items()}

    def start(self, directory: Path, step: int, kept: bool) -> None:
        self.pending = self.library.Snapshot.async_take(str(directory), self._app_state(self.state))

    def finish(self) -> None:
        self.pending.wait()

    def into(self, step: int, target: Tree) -> Tree:
        wanted = self._app_state(target)
        self.library.Snapshot(str(self.directory(step))).restore(wanted)
        return {name: value["tree"] for name, value in wanted.items()}

    def fresh(self, step: int) -> Tree:
        return self.into(step, _mapped(self.state, torch.empty_like))

    def weights(self, step: int) -> Tree:
        return self.into(step, _mapped(part_of(self.state, "params"), torch.empty_like))


PEERS: tuple[type[TorchPeer], ...] = (
    StepwellTorch,
    SafetensorsTorch,
    TorchSave,
    Dcp,
    DcpThreads,
    DcpAsync,
    TorchSnapshot,
)
