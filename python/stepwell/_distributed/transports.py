"""Transports for the bytes that the ranks of a restore exchange: collectives of torch or JAX, or
messages of MPI. They run on the thread that calls ``restore``, like the training's collectives. Two
threads could order their collectives differently on each rank.

The framework ends a wait: by the timeout of the process group (torch), or when the coordination
service misses a process (JAX). With MPI, a wait ends after ``Options.stall_timeout``.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import lru_cache
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from ..coordinators import MPI, Coordinator, JaxService, TorchStore, initialised_framework
from ..errors import CoordinationTimeout, MisuseError

if TYPE_CHECKING:
    import jax
    import torch
    from jax.sharding import NamedSharding
    from torch.distributed import ProcessGroup

#: Arrays of bytes, of numpy or torch, one for each rank.
_Rows: TypeAlias = Any
Bytes: TypeAlias = npt.NDArray[np.uint8]
Ranks: TypeAlias = tuple[int, ...]
#: Enters a collective, and returns the received bytes.
Carry: TypeAlias = Callable[[], Bytes]
#: Sends an array to a rank, and fills another array from a rank. Either may be ``None``.
_Swap: TypeAlias = Callable[[tuple[object, int] | None, tuple[object, int] | None], None]


class Transport(Protocol):
    """Transfers bytes between some of the ranks, in ascending order. Only these ranks make a call.

    A call allocates this rank's memory without a wait, and returns the function that enters the
    collective. So a failure of one rank happens before any rank enters it."""

    #: For messages.
    name: str
    #: The rank of this process, and the number of ranks.
    rank: int
    world_size: int

    def broadcast(self, buffer: Bytes, ranks: Ranks) -> Carry:
        """Sends the bytes of the first rank to the others. ``buffer`` has the same length on all
        ranks, and may be overwritten."""

    def gather(self, share: Bytes, ranks: Ranks) -> Carry:
        """Collects the ``share`` of each rank, one per row. All shares have the same length."""


def find(coordinator: Coordinator | None, stall_timeout: float) -> Transport:
    """Returns the transport for the ranks of a manager with that coordinator.

    Raises:
        MisuseError: the coordinator's messages are too slow for arrays, and no other library is
            initialised over the same ranks.
    """
    if isinstance(coordinator, TorchStore):
        return _Torch(coordinator.group)
    if isinstance(coordinator, JaxService):
        return _Jax()
    if isinstance(coordinator, MPI):
        return _Mpi(coordinator, stall_timeout)
    assert coordinator is not None  # several processes have one
    framework = initialised_framework(coordinator.rank, coordinator.world_size)
    if framework == "torch":
        return _Torch(None)
    if framework == "jax":
        return _Jax()
    raise MisuseError(
        f"broadcast= needs something that carries arrays between the ranks, and {type(coordinator).__qualname__} carries small messages only: call "
        "torch.distributed.init_process_group() or jax.distributed.initialize() over the same ranks first, pass coordinator=sw.coordinators.MPI(comm) to the manager, or leave "
        "broadcast= out, and each rank reads for itself"
    )


def _tree(buffer: object, ranks: Ranks, rank: int, swap: _Swap) -> None:
    """Broadcasts from the first rank along a binomial tree: each receiver forwards the bytes."""
    me, reach = ranks.index(rank), 1
    while reach < len(ranks) and not me & reach:
        reach *= 2
    if me:
        swap(None, (buffer, ranks[me - reach]))
    while reach := reach // 2:
        if me + reach < len(ranks):
            swap((buffer, ranks[me + reach]), None)


def _ring(rows: _Rows, ranks: Ranks, rank: int, swap: _Swap) -> None:
    """Gathers around a ring: each rank sends the row that it received last to the next rank."""
    me, count = ranks.index(rank), len(ranks)
    for step in range(count - 1):
        out, into = (me - step) % count, (me - step - 1) % count
        swap((rows[out], ranks[(me + 1) % count]), (rows[into], ranks[(me - 1) % count]))


class _Torch:
    """The collectives of a process group. A part of its ranks uses messages from rank to rank,
    because all ranks would have to create a new group for each shard of a mesh."""

    name = "torch.distributed"

    def __init__(self, group: ProcessGroup | None) -> None:
        import torch
        import torch.distributed as dist

        self._torch, self._dist = torch, dist
        world = dist.group.WORLD
        assert world is not None
        self._group: ProcessGroup = world if group is None else group
        self.rank: int = dist.get_rank(self._group)
        self.world_size: int = dist.get_world_size(self._group)
        # For example "cpu:gloo,cuda:nccl".
        backends: list[str] = dist.get_backend_config(self._group).split(",")
        devices = [one.partition(":")[0] for one in backends]
        self._device = "cpu" if "cpu" in devices else devices[0]

    def _tensor(self, array: Bytes) -> torch.Tensor:
        return self._torch.from_numpy(array).to(self._device)

    def broadcast(self, buffer: Bytes, ranks: Ranks) -> Carry:
        tensor = self._tensor(buffer)

        def carry() -> Bytes:
            if len(ranks) == self.world_size:
                self._dist.broadcast(tensor, self._global(ranks[0]), group=self._group)
            else:
                _tree(tensor, ranks, self.rank, self._swap)
            found: Bytes = tensor.cpu().numpy()
            return found

        return carry

    def gather(self, share: Bytes, ranks: Ranks) -> Carry:
        mine = self._tensor(share)
        rows = mine.new_empty((len(ranks), share.size))

        def carry() -> Bytes:
            if len(ranks) == self.world_size:
                self._dist.all_gather_into_tensor(rows.view(-1), mine, group=self._group)
            else:
                rows[ranks.index(self.rank)] = mine
                _ring(rows, ranks, self.rank, self._swap)
            found: Bytes = rows.cpu().numpy()
            return found

        return carry

    def _swap(self, out: tuple[object, int] | None, into: tuple[object, int] | None) -> None:
        dist = self._dist
        both = ((dist.isend, out), (dist.irecv, into))
        operations = [
            dist.P2POp(operation, one[0], self._global(one[1]), self._group) for operation, one in both if one
        ]
        for work in dist.batch_isend_irecv(operations):
            work.wait()

    def _global(self, rank: int) -> int:
        found: int = self._dist.get_global_rank(self._group, rank)
        return found


class _Jax:
    """One device of each process, over which XLA moves the bytes: a gather makes replicated what is
    sharded over the processes, a broadcast adds up what all but the first have as zeros."""

    name = "jax.distributed"

    def __init__(self) -> None:
        import jax

        self._jax = jax
        self.rank: int = jax.process_index()
        self.world_size: int = jax.process_count()

    def broadcast(self, buffer: Bytes, ranks: Ranks) -> Carry:
        if self.rank != ranks[0]:
            buffer[...] = 0
        run = self._ready("sum", buffer, ranks)
        return lambda: run()[: buffer.size]

    def gather(self, share: Bytes, ranks: Ranks) -> Carry:
        run = self._ready("rows", share, ranks)
        return lambda: run()[:, : share.size]

    def _ready(self, what: str, row: Bytes, ranks: Ranks) -> Carry:
        jax, length = self._jax, _rounded(row.size)
        if length != row.size:
            row = np.concatenate([row, np.zeros(length - row.size, np.uint8)])
        sharding, mine, program = _program(what, ranks)

        def set_mesh() -> AbstractContextManager[object]:
            # The caller may have set a mesh of all devices, on which nothing runs over some of
            # them.
            return jax.set_mesh(sharding.mesh) if hasattr(jax, "set_mesh") else nullcontext()

        with set_mesh():
            part = jax.block_until_ready(jax.device_put(row[None], mine))
            shards = jax.make_array_from_single_device_arrays((len(ranks), length), sharding, [part])

        def carry() -> Bytes:
            with set_mesh():
                found: Bytes = jax.device_get(program(shards).addressable_data(0))
            return found

        return carry


def _rounded(length: int) -> int:
    """A few lengths, a quarter apart at most: a program is compiled for each."""
    unit = max(1 << 12, 1 << max(0, length.bit_length() - 3))
    return -(-length // unit) * unit


@lru_cache(maxsize=64)
def _program(what: str, ranks: Ranks) -> tuple[NamedSharding, jax.Device, Callable[[jax.Array], jax.Array]]:
    """How the rows lie, the device of this process, and what is done with them."""
    import jax
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    first: dict[int, jax.Device] = {}
    for device in jax.devices():
        first.setdefault(device.process_index, device)
    mesh = Mesh(np.array([first[rank] for rank in ranks]), ("ranks",))

    def rows(array: jax.Array) -> jax.Array:
        return array

    def sum_(array: jax.Array) -> jax.Array:
        return array.sum(axis=0, dtype=array.dtype)

    spec: Callable[..., PartitionSpec] = PartitionSpec
    program = jax.jit(rows if what == "rows" else sum_, out_shardings=NamedSharding(mesh, spec()))
    return NamedSharding(mesh, spec("ranks")), first[jax.process_index()], program


class _Mpi:
    """Messages of MPI from rank to rank, each with a deadline, which its collectives have not."""

    name = "MPI"
    _TAG = 3

    def __init__(self, coordinator: MPI, stall_timeout: float) -> None:
        self._comm, self._mpi = coordinator._comm, coordinator._mpi
        self._timeout = stall_timeout
        self.rank = coordinator.rank
        self.world_size = coordinator.world_size

    def broadcast(self, buffer: Bytes, ranks: Ranks) -> Carry:
        def carry() -> Bytes:
            _tree(buffer, ranks, self.rank, self._swap)
            return buffer

        return carry

    def gather(self, share: Bytes, ranks: Ranks) -> Carry:
        rows = np.empty((len(ranks), share.size), np.uint8)
        rows[ranks.index(self.rank)] = share

        def carry() -> Bytes:
            _ring(rows, ranks, self.rank, self._swap)
            return rows

        return carry

    def _swap(self, out: tuple[object, int] | None, into: tuple[object, int] | None) -> None:
        requests = [] if out is None else [self._comm.Isend(out[0], dest=out[1], tag=self._TAG)]
        if into is not None:
            requests.append(self._comm.Irecv(into[0], source=into[1], tag=self._TAG))
        begun, pause = time.monotonic(), 0.0
        while not self._mpi.Request.Testall(requests):
            if time.monotonic() - begun > self._timeout:
                missing = [one[1] for one in (out, into) if one is not None]
                error = CoordinationTimeout(
                    f"waited {self._timeout:.1f} s for rank(s) {missing} to exchange their bytes"
                )
                error.missing = missing
                raise error
            time.sleep(pause)
            pause = min(pause + 0.0001, 0.002)
