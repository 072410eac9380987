"""The options of a manager beside policies. Every option is typed; none switches another off."""

from __future__ import annotations

import dataclasses
import json
import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

from ._checks import flag, one_of, plain_json, shown, text, whole
from ._policies import SavePolicy, every_steps
from ._public import public
from ._retention import Retention, keep_all
from ._timeouts import finite_seconds, stall_seconds
from .errors import MisuseError

#: Names of the engines.
ENGINES = ("auto", "uring", "threads", "buffered")
#: Numbers of the engine's options are smaller.
_MOST = 2**62
#: No chunk is asked to be smaller: a tensor would get more records than bytes.
_LEAST_CHUNK = 4096


@public
@final
@dataclass(frozen=True, slots=True)
class StepName:
    """How a step's directory is named: a prefix and the number, padded with zeros to ``width``
    digits. ``also_read`` are other patterns that this root's older steps may have."""

    prefix: str = "step_"
    width: int = 8
    also_read: tuple[StepName, ...] = ()

    def __post_init__(self) -> None:
        text(self.prefix, "the prefix of a StepName")
        whole(self.width, "the width of a StepName", 0)
        if not isinstance(self.also_read, tuple) or not all(
            isinstance(one, StepName) for one in self.also_read
        ):
            raise MisuseError(f"also_read is a tuple of StepName, not {shown(self.also_read)}")


@public
@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options that few need. Sizes are bytes, times are seconds."""

    #: Make the root where it is missing.
    create: bool = True
    #: On a file system without locks: become the writer, once no other has given a sign of life for
    #: ``silence``.
    take_over: bool = False
    #: How long a writer that did not end by itself must have been silent before its root is taken
    #: over; only where there are no locks. A writer gives six signs of life in its own ``silence``,
    #: and half of that is the least that others wait.
    silence: float = 60.0
    #: How long the files of a retired step stay where there are no locks: nobody knows there who
    #: still reads them.
    grace: float = 1800.0
    #: Files of so many bytes of the last retired step are written over by the next save, which
    #: costs the disk less than new ones; until then they take room on the disk. ``None``: all are
    #: deleted at once; for roots that are exported to other machines, and where a disk has no room
    #: for one step more than is kept.
    overwrite_from_bytes: int | None = 8 << 20
    #: Retention verifies the newest step before it deletes or thins older ones: it reads the whole
    #: step once more after its commit, in the background (of several ranks, rank 0 does). A damaged
    #: step does not count, so the older ones stay.
    verify_before_retiring: bool = False
    #: About so much in one chunk: what a resharded read cannot avoid to read. At least 4096; each
    #: chunk costs its record in the index.
    chunk_bytes: int = 8 << 20
    #: Chunks are cut along inner axes only where rows stay at least so long.
    min_row_bytes: int = 4096
    #: The unit of checksums and of reading.
    block_bytes: int = 16 << 10
    #: The most writers of replicated leaves, per node or socket (``writers_per``); ``None``: all
    #: holders write. Fewer writers write longer files.
    writers: int | None = None
    #: ``"node"``: so many on each machine. ``"socket"``: on each of its sockets, for processes that
    #: are bound to one; those that are not count together.
    writers_per: Literal["node", "socket"] = "node"
    #: ``"rank"``: each process writes a data file of its own for each item. ``"node"``: those of a
    #: machine write side by side into one, for file systems that are slow to make and to open
    #: files; needs locks between processes of a machine (without them, each has its own file
    #: again), and does not write over the files of retired steps.
    files_per: Literal["rank", "node"] = "rank"
    #: True if processes compare what is declared to be the same on several of them (``replica=``,
    #: ``Rules``, a ``DTensor`` or an array of JAX that is replicated), by samples, in jobs of up to
    #: 1024; what is simply there on several is compared in any case. False, where replicas may
    #: drift: parts of them are stored from each.
    compare_replicas: bool = True
    #: Threads that copy the state; ``None``: a few.
    capture_threads: int | None = None
    #: Reads or writes in flight; ``None``: 16 writes, 8 reads.
    queue_depth: int | None = None
    #: A wait (for a save, for a read) gives up when nothing at all has happened for so long.
    stall_timeout: float = 600.0
    #: For debugging: everything that is captured behind :meth:`~stepwell.CheckpointManager.save` is
    #: read twice, first before that returns, and a save of which something was changed in between
    #: fails with :class:`~stepwell.errors.TornSnapshot`, which names the leaf.
    detect_torn: bool = False
    #: Which engine reads and writes: ``"auto"``, ``"uring"``, ``"threads"`` or ``"buffered"``.
    engine: Literal["auto", "uring", "threads", "buffered"] = "auto"
    #: JSON that belongs to the root; that of the first writer stays.
    root_metadata: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        flag(self.create, "create")
        flag(self.take_over, "take_over")
        finite_seconds(self.silence, "silence")
        finite_seconds(self.grace, "grace")
        if self.overwrite_from_bytes is not None:
            whole(self.overwrite_from_bytes, "overwrite_from_bytes", 1, _MOST)
        flag(self.verify_before_retiring, "verify_before_retiring")
        whole(self.chunk_bytes, "chunk_bytes", _LEAST_CHUNK, _MOST)
        whole(self.min_row_bytes, "min_row_bytes", 0, _MOST)
        whole(self.block_bytes, "block_bytes", 1, _MOST)
        if self.writers is not None:
            whole(self.writers, "writers", 1, 2**31)
        one_of(self.writers_per, "writers_per", ("node", "socket"))
        one_of(self.files_per, "files_per", ("rank", "node"))
        flag(self.compare_replicas, "compare_replicas")
        if self.capture_threads is not None:
            whole(self.capture_threads, "capture_threads", 1, 4096)
        if self.queue_depth is not None:
            whole(self.queue_depth, "queue_depth", 1, 4096)
        stall_seconds(self.stall_timeout)
        flag(self.detect_torn, "detect_torn")
        one_of(self.engine, "engine", ENGINES)
        plain_json(self.root_metadata, "root_metadata")


def to_json(
    options: Options,
    save_policy: SavePolicy,
    retention: Retention,
    step_name: StepName | None,
    staging_bytes: int | Literal["auto"],
    max_pending: int,
    read_only: bool,
    on_save_error: str,
) -> str:
    """All options, as the engine reads them."""
    one_of(on_save_error, "on_save_error", ("raise", "warn"))
    if isinstance(staging_bytes, str):
        one_of(staging_bytes, "staging_bytes (where it is no number of bytes)", ("auto",))
    else:
        staging_bytes = whole(staging_bytes, "staging_bytes", 1, _MOST)
    max_pending = whole(max_pending, "max_pending, the number of saves that may wait,", 0, _MOST)
    written = {field.name: getattr(options, field.name) for field in dataclasses.fields(options)}
    engine = written.pop("engine")
    written |= {
        "save_policy": json.loads(save_policy.to_json()),
        "retention": json.loads(retention.to_json()),
        "step_name": None if step_name is None else dataclasses.asdict(step_name),
        "staging_bytes": None if isinstance(staging_bytes, str) else staging_bytes,
        "max_pending": max_pending,
        "read_only": bool(read_only),
        "on_save_error": on_save_error,
        "silence": finite_seconds(options.silence, "silence"),
        "grace": finite_seconds(options.grace, "grace"),
        "stall_timeout": stall_seconds(options.stall_timeout),
        "root_metadata": plain_json(options.root_metadata, "root_metadata"),
    }
    # integers of numpy
    return json.dumps({"engine": engine, "options": written}, default=operator.index)


def reader_json() -> str:
    """The options of one who only looks at a root that is there."""
    return to_json(Options(create=False), every_steps(1), keep_all(), None, "auto", 1, True, "raise")
