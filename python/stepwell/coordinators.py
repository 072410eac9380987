"""How the processes of a job agree, for :class:`stepwell.CheckpointManager` and
:func:`stepwell.save`: which of them there are, and what carries their messages.

Each is a board on which processes leave small messages for each other; what is true is decided on
the file system. No collective operation is ever run in the background: a thread of its own asks the
store of torch, the service of JAX, or MPI.
"""

from __future__ import annotations

import contextlib
import os
import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol, TypeAlias, TypeVar, final, runtime_checkable

from . import _core
from ._checks import shown, whole
from ._locations import absolute
from .errors import CoordinationTimeout, MisuseError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_T = TypeVar("_T")
#: Objects of mpi4py, which not every machine has: communicators, requests, their messages.
_Mpi: TypeAlias = Any

__all__ = ["MPI", "JaxService", "SharedDirectory", "TorchStore"]

#: Environment variables with the number of processes of a launcher.
_SIZES: Final = ("WORLD_SIZE", "SLURM_NTASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")
_JOB_ID: Final = re.compile(r"[A-Za-z0-9_.-]{1,128}")
#: How many managers this process has opened over a store, by its name: all processes open them in
#: the same order.
_opened: Counter[str] = Counter()
#: Numbers of the objects of MPI that this process has made.
_made = count()


@runtime_checkable
class Board(Protocol):
    """Carries messages. One thread calls at a time. Each call returns soon, whatever the other
    processes do."""

    #: This process, from 0 on, and how many there are.
    rank: int
    world_size: int

    def put(self, key: str, message: bytes) -> None:
        """Leaves a message, whole at once; one that is there is replaced."""

    def get(self, key: str) -> bytes | None:
        """Returns the current message of a key, or ``None``."""

    def remove(self, key: str) -> None:
        """Takes a message off, if it is there."""


@final
class SharedDirectory:
    """Processes that share a directory and nothing else. They may open several managers under one
    ``job_id``, one after the other: all of them in the same order.

    Args:
        rank: this process, from 0 on.
        world_size: the number of processes.
        job_id: identifies this job among others that use the same directory at the same time, for
            example the scheduler's job number. 1 to 128 letters, digits, ``_``, ``-`` or ``.``.
        path: an existing directory that all processes see; default: one inside the manager's root.
    """

    def __init__(
        self, rank: int, world_size: int, job_id: str | int, path: str | os.PathLike[str] | None = None
    ) -> None:
        self.world_size = whole(world_size, "world_size", 1, 2**32 - 1)
        self.rank = whole(rank, "rank", 0, self.world_size - 1)
        self.job_id = str(job_id)
        # The name of a directory; what the engine refuses only where there are others to meet is
        # refused for one process, too.
        if not _JOB_ID.fullmatch(self.job_id):
            raise MisuseError(
                f"job_id is 1 to 128 letters, digits, `_`, `-` or `.`, such as the scheduler's job number, not {shown(job_id)}"
            )
        self.path = None if path is None else absolute(path, "the directory that processes share")
        if self.path is not None and not os.path.isdir(self.path):
            raise MisuseError(
                f"path={self.path!r} is no directory; make it where all processes see it, or leave it out for one inside the root"
            )

    def __repr__(self) -> str:
        return f"SharedDirectory({self.rank}, {self.world_size}, {self.job_id!r})"


@final
class TorchStore:
    """The processes of a torch process group, over the group's store (``TCPStore`` mostly). No
    collective is run, and no tensor moves.

    Args:
        group: the process group; default: the default one.
    """

    def __init__(self, group: ProcessGroup | None = None) -> None:
        import torch.distributed as dist
        from torch.distributed import distributed_c10d

        if not dist.is_initialized():
            raise MisuseError("TorchStore() needs torch.distributed.init_process_group() to have run")
        #: The group for the exchange of ``restore(broadcast=…)``.
        self.group = group = distributed_c10d._get_default_group() if group is None else group
        self.rank: int = dist.get_rank(group)
        self.world_size: int = dist.get_world_size(group)
        self.name = f"torch {distributed_c10d._get_process_group_name(group)}"
        store = (
            distributed_c10d._get_default_store()
            if group is dist.group.WORLD
            else distributed_c10d._get_process_group_store(group)
        )
        # A connection of our own: on that of torch, a thread that waits would hold up all others.
        with contextlib.suppress(Exception):
            store = store.clone()
        self._store = distributed_c10d.PrefixStore("stepwell", store)

    def put(self, key: str, message: bytes) -> None:
        """See :class:`Board`."""
        store: Any = self._store  # it takes bytes, and declares text
        store.set(key, b"." + message)

    def get(self, key: str) -> bytes | None:
        """See :class:`Board`."""
        return self._store.get(key)[1:] if self._store.check([key]) else None

    def remove(self, key: str) -> None:
        """See :class:`Board`."""
        with contextlib.suppress(RuntimeError):  # a FileStore cannot
            self._store.delete_key(key)


@final
class JaxService:
    """The processes of ``jax.distributed.initialize()``, over its coordination service."""

    #: The service carries messages of a few megabytes: longer ones go in pieces.
    _PIECE = 1 << 20

    def __init__(self) -> None:
        client = _jax_client()
        if client is None:
            raise MisuseError("JaxService() needs jax.distributed.initialize() to have run")
        import jax

        self.rank: int = jax.process_index()
        self.world_size: int = jax.process_count()
        self.name = "jax"
        self._client = client

    def put(self, key: str, message: bytes) -> None:
        """See :class:`Board`."""
        pieces = [message[at : at + self._PIECE] for at in range(0, len(message), self._PIECE)] or [b""]
        for number, piece in enumerate(pieces[1:], 1):
            self._client.key_value_set_bytes(f"stepwell/{key}/{number}", piece, allow_overwrite=True)
        head = len(pieces).to_bytes(4, "little")
        self._client.key_value_set_bytes(f"stepwell/{key}", head + pieces[0], allow_overwrite=True)

    def get(self, key: str) -> bytes | None:
        """See :class:`Board`."""
        first = self._try(f"stepwell/{key}")
        if first is None:
            return None
        pieces = [first[4:]]
        for number in range(1, int.from_bytes(first[:4], "little")):
            piece = self._try(f"stepwell/{key}/{number}")
            if piece is None:
                return None
            pieces.append(piece)
        return b"".join(pieces)

    def _try(self, key: str) -> bytes | None:
        try:
            found: bytes = self._client.key_value_try_get_bytes(key)
        except Exception as error:
            if "NOT_FOUND" in str(error):
                return None
            raise
        return found

    def remove(self, key: str) -> None:
        """See :class:`Board`."""
        # With all that is below it.
        self._client.key_value_delete(f"stepwell/{key}")


@final
class MPI:
    """The processes of an MPI communicator (``mpi4py``), which must have been initialised with
    ``MPI_THREAD_MULTIPLE``, as mpi4py does by itself.

    Args:
        comm: the communicator; it is duplicated. All of its processes must make this object.
    """

    _ASK, _ANSWER = 1, 2
    #: How long a process waits for the first one to answer: less than the engine waits for a board,
    #: so that the error says who is missing.
    _PATIENCE = 100.0
    #: How long the first one, when nobody asks any more, stays for answers that were not taken yet.
    _LAST_ANSWERS = 2.0

    def __init__(self, comm: _Mpi) -> None:
        from mpi4py import MPI as mpi  # type: ignore[import-not-found, unused-ignore]

        if mpi.Query_thread() < mpi.THREAD_MULTIPLE:
            raise MisuseError(
                "MPI(comm) needs MPI to be initialised with MPI_THREAD_MULTIPLE (mpi4py.rc.thread_level, before mpi4py.MPI is imported)"
            )
        self._mpi = mpi
        self._comm = comm.Dup()
        self.rank: int = self._comm.Get_rank()
        self.world_size: int = self._comm.Get_size()
        self.name = f"mpi {next(_made)}"
        self._messages: dict[str, bytes] = {}
        self._lock = threading.Lock()
        #: The managers that are open over it, and what answers on the first process as long as
        #: there is one.
        self._users = 0
        self._serving = threading.Lock()
        self._stop = threading.Event()
        self._server: threading.Thread | None = None
        #: One question at a time, each with a number, by which an answer that came too late is
        #: known.
        self._asking = threading.Lock()
        self._asked = 0
        #: Messages on their way to and from a process that may be gone: their memory is MPI's until
        #: they have arrived.
        self._under_way: list[_Mpi] = []

    def start(self) -> None:
        """One more manager asks. The first process keeps what all leave."""
        with self._serving:
            self._users += 1
            if self.rank == 0 and self._server is None:
                self._stop.clear()
                self._server = threading.Thread(target=self._serve, name="stepwell-mpi", daemon=True)
                self._server.start()

    def stop(self) -> None:
        """A manager asks no more; with the last one, nobody does."""
        with self._serving:
            self._users -= 1
            if self._users == 0 and self._server is not None:
                self._stop.set()
                self._server.join(5)
                self._server = None

    def _serve(self) -> None:
        """Answers, and waits for no process: one that is gone must not keep the others from being
        answered."""
        pause = 0.0
        status = self._mpi.Status()
        coming: list[tuple[int, _Mpi]] = []
        end = None
        while end is None or (self._under_way and time.monotonic() < end):
            if end is None and self._stop.is_set():
                end = time.monotonic() + self._LAST_ANSWERS
            found = self._comm.improbe(source=self._mpi.ANY_SOURCE, tag=self._ASK, status=status)
            if found is not None:
                coming.append((status.Get_source(), found.irecv()))
            waiting = []
            for source, request in coming:
                question = _arrived(request)
                if question is None:
                    waiting.append((source, request))
                    continue
                number, operation, key, message = question
                answer = number, self._do(operation, key, message)
                self._under_way.append(self._comm.isend(answer, dest=source, tag=self._ANSWER))
            coming = waiting
            self._forget_arrived()
            pause = 0.0 if found is not None else min(pause * 1.5 + 0.0001, 0.005)
            time.sleep(pause)
        self._under_way += [request for _, request in coming]

    def _forget_arrived(self) -> None:
        self._under_way = [one for one in self._under_way if not one.test()[0]]

    def _do(self, operation: str, key: str, message: bytes | None) -> bytes | None:
        with self._lock:
            if operation == "put":
                self._messages[key] = message or b""
                return None
            return self._messages.get(key) if operation == "get" else self._messages.pop(key, None)

    def _ask(self, operation: str, key: str, message: bytes | None = None) -> bytes | None:
        if self.rank == 0:
            return self._do(operation, key, message)
        deadline = time.monotonic() + self._PATIENCE
        if not self._asking.acquire(timeout=self._PATIENCE):
            raise self._unanswered()
        try:
            self._asked += 1
            question = (self._asked, operation, key, message)
            self._under_way.append(self._comm.isend(question, dest=0, tag=self._ASK))
            number: int | None = None
            answer: bytes | None = None
            while number != self._asked:
                found = self._awaited(deadline, lambda: self._comm.improbe(source=0, tag=self._ANSWER))
                coming = found.irecv()
                self._under_way.append(coming)
                number, answer = self._awaited(deadline, partial(_arrived, coming))
                self._under_way.remove(coming)
            self._forget_arrived()
            return answer
        finally:
            self._asking.release()

    def _awaited(self, deadline: float, look: Callable[[], _T | None]) -> _T:
        """Looks until something is found."""
        pause = 0.0
        while (found := look()) is None:
            if time.monotonic() > deadline:
                raise self._unanswered()
            time.sleep(pause)
            pause = min(pause * 1.5 + 0.0001, 0.005)
        return found

    def _unanswered(self) -> CoordinationTimeout:
        error = CoordinationTimeout(
            f"waited {self._PATIENCE:.0f} s for rank 0 to answer, which keeps the messages of sw.coordinators.MPI while it has a manager open"
        )
        error.missing = [0]
        return error

    def put(self, key: str, message: bytes) -> None:
        """See :class:`Board`."""
        self._ask("put", key, message)

    def get(self, key: str) -> bytes | None:
        """See :class:`Board`."""
        return self._ask("get", key)

    def remove(self, key: str) -> None:
        """See :class:`Board`."""
        self._ask("remove", key)


def _arrived(request: _Mpi) -> _Mpi:
    """The message of a request, if it is there."""
    is_there, message = request.test()
    return message if is_there else None


Coordinator = SharedDirectory | TorchStore | JaxService | MPI | Board


class Service:
    """The thread that carries what the engine has to say to a board, from the opening of a manager
    to its close."""

    def __init__(self, board: Board) -> None:
        self._board = board
        name = getattr(board, "name", type(board).__qualname__)
        number = _opened[name]
        _opened[name] += 1
        #: The engine's end.
        self.engine = _core.Board(board.rank, board.world_size, socket.gethostname(), str(number))
        start = getattr(board, "start", None)
        if start is not None:
            start()
        self._stop = getattr(board, "stop", None)
        self._thread = threading.Thread(target=self._run, name="stepwell-coordinator", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while (request := self.engine.next()) is not None:
            operation, key, message = request
            try:
                if operation == "put":
                    self._board.put(key, message or b"")
                    self.engine.answer()
                elif operation == "get":
                    self.engine.answer(self._board.get(key))
                else:
                    self._board.remove(key)
                    self.engine.answer()
            except BaseException as error:
                self.engine.fail(f"{type(self._board).__qualname__}: {type(error).__name__}: {error}")

    def close(self) -> None:
        """The manager is closed: nothing is said any more. Closing twice is fine."""
        self.engine.close()
        if self._thread is not threading.current_thread():
            self._thread.join(5)
        stop, self._stop = self._stop, None
        if stop is not None:
            stop()


def check_meets_at_a_path(board: Coordinator | None, what: str) -> None:
    """Refuses ranks that have no directory to meet in: the call has no root."""
    if isinstance(board, SharedDirectory) and board.path is None:
        raise MisuseError(
            f"{what} has no root where ranks could meet. Pass a directory that all ranks share: SharedDirectory(rank, world_size, job_id, path=…)"
        )


#: How the ranks meet, for the engine: a board that Python keeps, or a shared directory by rank,
#: world size, job and path.
Meeting: TypeAlias = "_core.Board | tuple[int, int, str, str | None]"


def connected(board: Coordinator | None) -> tuple[Meeting | None, Service | None]:
    """Returns how the ranks meet, for the engine, and the thread that carries their messages, if
    one is needed."""
    if isinstance(board, SharedDirectory):
        return (board.rank, board.world_size, board.job_id, board.path), None
    service = None if board is None else Service(board)
    return None if service is None else service.engine, service


def find(coordinator: object, read_only: bool = False, what: str = "uses the manager") -> Coordinator | None:
    """Resolves ``coordinator=``: the given object; for ``"auto"``, the initialised one; ``None``
    for one process. Processes that only read need no coordinator. ``what`` one process would do
    alone, for the message.

    Raises:
        MisuseError: several processes run, and nothing is known that could carry their messages.
    """
    if coordinator is None:
        return None
    if isinstance(coordinator, str):
        if coordinator != "auto":
            raise MisuseError(
                f'coordinator is "auto", None, or one of sw.coordinators.SharedDirectory, TorchStore, JaxService and MPI, not {coordinator!r}'
            )
        return _automatic(read_only, what)
    if not isinstance(coordinator, (SharedDirectory, Board)):
        raise MisuseError(
            f'coordinator is "auto", None, or one of sw.coordinators.SharedDirectory, TorchStore, JaxService and MPI, not {shown(coordinator)}'
        )
    return coordinator if coordinator.world_size > 1 else None


def _automatic(read_only: bool, what: str) -> Coordinator | None:
    for framework, _, world_size in _initialised():
        if world_size > 1:
            return TorchStore() if framework == "torch" else JaxService()
    for name in () if read_only else _SIZES:
        size = os.environ.get(name, "")
        if size.isdigit() and int(size) > 1:
            raise MisuseError(
                f"{name}={size} says that this is one of {size} processes, and nothing is initialised that could carry their messages: call "
                "torch.distributed.init_process_group() or jax.distributed.initialize() first, pass coordinator=sw.coordinators.SharedDirectory(rank, world_size, job_id) or sw.coordinators.MPI(comm); "
                f"pass coordinator=None if only this one {what}"
            )
    return None


def initialised_rank() -> tuple[int, int]:
    """The rank and the number of ranks of ``torch.distributed`` or JAX, if one of them is
    initialised; else those of one process."""
    return next(((rank, world_size) for _, rank, world_size in _initialised()), (0, 1))


def initialised_framework(rank: int, world_size: int) -> str | None:
    """``"torch"`` or ``"jax"``, where it is initialised over these ranks, numbered alike; ``None``:
    neither is."""
    return next((name for name, *here in _initialised() if here == [rank, world_size]), None)


def _initialised() -> Iterator[tuple[Literal["torch", "jax"], int, int]]:
    """Yields the initialised frameworks, each with this process's rank and the number of ranks."""
    dist = sys.modules.get("torch.distributed")
    if dist is not None and dist.is_available() and dist.is_initialized():
        yield "torch", dist.get_rank(), dist.get_world_size()
    if _jax_client() is not None:
        import jax

        yield "jax", jax.process_index(), jax.process_count()


def _jax_client() -> Any:  # an object of jaxlib, which declares no type
    """Returns the client of ``jax.distributed.initialize()``, without importing or starting
    anything."""
    module = sys.modules.get("jax._src.distributed")
    return None if module is None else getattr(module.global_state, "client", None)
