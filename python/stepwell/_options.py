"""The options of a manager beside policies. Every option is typed; none switches another off."""

from __future__ import annotations

import dataclasses
import json
import operator
import unicodedata
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, final

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
#: Bytes of a prefix of a step's name, and digits of its number.
_LONGEST_PREFIX = 100
_WIDEST = 19
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
        prefix = text(self.prefix, "the prefix of a StepName")
        if prefix.startswith(".") or "/" in prefix or any(map(_is_control, prefix)):
            raise MisuseError(
                f"the prefix of a StepName is a part of a directory's name, without a dot at its start, / or control characters, not {shown(prefix)}"
            )
        if len(prefix.encode()) > _LONGEST_PREFIX:
            raise MisuseError(
                f"the prefix of a StepName has at most {_LONGEST_PREFIX} bytes: {prefix!r:.50}…"
            )
        whole(self.width, "the width of a StepName", 0, _WIDEST)
        if not isinstance(self.also_read, tuple) or not all(
            isinstance(one, StepName) for one in self.also_read
        ):
            raise MisuseError(f"also_read is a tuple of StepName, not {shown(self.also_read)}")
        if any(one.also_read for one in self.also_read):
            raise MisuseError("a StepName in also_read has none of its own; list all of them in one")


def _is_control(character: str) -> bool:
    return unicodedata.category(character) == "Cc"


@public
@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options that few need. Sizes are bytes, times are seconds.

    Args:
        create: create the root if it is missing.
        take_over: on a file system without locks, become the writer if the other writer has not
            renewed its heartbeat for ``silence``.
        silence: the age at which a heartbeat counts as stopped. Used only without locks, and in
            stores. A writer renews its heartbeat six times in this time. Other writers wait at
            least half of it.
        grace: how long retention waits for a reader's lease before it removes a step from the
            listing. Without locks, readers hold no leases: the files of a removed step then stay
            for this time.
        overwrite_from_bytes: the next save writes over files of the last retired step that have at
            least this size, which is faster than new files. Until then they use disk space.
            ``None`` deletes them at once: use it for roots that are exported to other machines, and
            for disks without space for one more step than is kept.
        verify_before_retiring: retention verifies the newest step before it deletes or thins older
            ones. It reads the whole step once more in the background (of several ranks, rank 0
            does). A damaged step does not count, so the older ones stay.
        chunk_bytes: the target size of a chunk, at least 4096. A resharded read transfers whole
            chunks. Each chunk has a record in the index.
        min_row_bytes: chunks are cut along inner axes only if rows keep this length.
        block_bytes: the unit of checksums and of reads.
        writers: the most writers of replicated leaves, per node or socket (``writers_per``).
            ``None``: all holders write. Fewer writers write longer files.
        writers_per: ``"node"``: ``writers`` counts per machine. ``"socket"``: per CPU socket, for
            processes that are bound to one. Unbound processes count as one socket.
        files_per: ``"rank"``: each process writes its own data file for each item. ``"node"``: the
            processes of a machine share one file, for file systems that create and open files
            slowly. Sharing needs locks between processes (else each has its own file). It never
            writes over the files of retired steps.
        compare_replicas: processes compare samples of the values that are declared equal
            (``replica=``, ``Rules``, replicated ``DTensor`` and JAX arrays), in jobs of up to 1024.
            Pass False if replicas may drift: each then stores a part of the value. Values that are
            merely present on several ranks are always compared.
        capture_threads: threads that copy the state. ``None``: a few.
        queue_depth: reads or writes in flight. ``None``: 16 writes, 8 reads.
        stall_timeout: a wait for a save or a read fails after this time without any progress.
        detect_torn: for debugging: everything that is captured after
            :meth:`~stepwell.CheckpointManager.save` returns is read once before, too. If it has
            changed, the save fails with :class:`~stepwell.errors.TornSnapshot`, which names the
            leaf.
        engine: the engine that reads and writes: ``"auto"``, ``"uring"``, ``"threads"`` or
            ``"buffered"``.
        root_metadata: JSON that belongs to the root. The first writer's value stays.
    """

    create: bool = True
    take_over: bool = False
    silence: float = 60.0
    grace: float = 1800.0
    overwrite_from_bytes: int | None = 8 << 20
    verify_before_retiring: bool = False
    chunk_bytes: int = 8 << 20
    min_row_bytes: int = 4096
    block_bytes: int = 16 << 10
    writers: int | None = None
    writers_per: Literal["node", "socket"] = "node"
    files_per: Literal["rank", "node"] = "rank"
    compare_replicas: bool = True
    capture_threads: int | None = None
    queue_depth: int | None = None
    stall_timeout: float = 600.0
    detect_torn: bool = False
    engine: Literal["auto", "uring", "threads", "buffered"] = "auto"
    root_metadata: Mapping[str, object] | None = None

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
    machine_copies: int = 0,
) -> str:
    """All options, as the engine reads them. ``machine_copies``: the number of machines that have
    each file, or 0 if all share one directory."""
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
        "per_machine": machine_copies > 0,
        "copies": max(1, machine_copies),
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
