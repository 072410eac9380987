"""The torch ranks of the resharding bench: DTensors, saved and loaded with
``torch.distributed.checkpoint`` over gloo."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from crew import Done, Rank, twice
from layout import Box, Layout, held
from peer import nested
from reshard_numpy import compare
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch_peers import tensor_of
from workloads import flat

Tensors = dict[str, DTensor]


@contextmanager
def _tensors(
    rank: Rank, store: Path, layout: Layout, make: Callable[[np.ndarray, Box], torch.Tensor]
) -> Iterator[Tensors]:
    """This rank's tensors by path, in a job of its own."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank.number, world_size=rank.world)
    mesh = init_device_mesh("cpu", (layout.pp, layout.ranks), mesh_dim_names=("pp", "ranks"))["ranks"]
    whole = dict(flat(rank.state))
    found = {}
    for path, local in flat(layout.of(rank.state, rank.number, make)):
        array, axis = whole[path], layout.axis(path.rpartition("/")[2])
        placement = Replicate() if axis is None else Shard(axis)
        strides = tuple(step // array.itemsize for step in array.strides)
        found[path] = DTensor.from_local(
            local, mesh, [placement], run_check=False, shape=torch.Size(array.shape), stride=strides
        )
    yield found
    dist.barrier()
    dist.destroy_process_group()


def dcp_save(rank: Rank, directory: Path, store: Path, layout: Layout) -> None:
    with _tensors(rank, store, layout, lambda array, box: tensor_of(held(array, box))) as tensors:
        dcp.save(tensors, checkpoint_id=directory)


def _first_round_trip() -> None:
    """A few bytes saved and loaded, so that nothing of the code has still to be read."""
    with tempfile.TemporaryDirectory() as folder:
        tensors = {"w": torch.ones(4)}
        dcp.save(tensors, checkpoint_id=folder, no_dist=True)
        dcp.load(tensors, checkpoint_id=folder, no_dist=True)


def dcp_restore(rank: Rank, directory: Path, store: Path, layout: Layout, verify: bool) -> list[Done]:
    """Into tensors that are there; twice, as :func:`crew.twice` says."""

    def zeros(array: np.ndarray, box: Box) -> torch.Tensor:
        return torch.zeros_like(tensor_of(array[box]))

    with _tensors(rank, store, layout, zeros) as tensors:
        _first_round_trip()

        def check(_: Any) -> None:
            compare(rank, layout, nested({path: _as_numpy(one) for path, one in tensors.items()}))

        return twice(rank, lambda: dcp.load(tensors, checkpoint_id=directory), check if verify else None)


def _as_numpy(tensor: DTensor) -> Any:
    local = tensor.to_local()
    return local.view(torch.int16).numpy() if local.dtype is torch.bfloat16 else local.numpy()
