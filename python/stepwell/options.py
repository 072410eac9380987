"""What a manager may be told besides policies. Every option is typed; none switches another off."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, final

from .errors import MisuseError
from .policies import SavePolicy
from .retention import Retention
from .timeouts import stall_seconds


@final
@dataclass(frozen=True, slots=True)
class StepName:
    """How a step's directory is named: a prefix and the number, padded with zeros to ``width`` digits. ``also_read`` are other patterns that this
    root's older steps may have."""

    prefix: str = "step_"
    width: int = 8
    also_read: tuple[StepName, ...] = ()

    def plain(self) -> dict[str, Any]:
        """What the engine reads."""
        return {
            "prefix": self.prefix,
            "width": self.width,
            "also_read": [name.plain() for name in self.also_read],
        }


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Options that few need. Sizes are bytes, times are seconds."""

    #: Make the root where it is missing.
    create: bool = True
    #: On a file system without locks: become the writer, once no other has given a sign of life for a minute.
    take_over: bool = False
    #: About so much in one chunk: what a resharded read cannot avoid to read.
    chunk_bytes: int = 8 << 20
    #: Chunks are cut along inner axes only where rows stay at least so long.
    min_row_bytes: int = 4096
    #: The unit of checksums and of reading.
    block_bytes: int = 256 << 10
    #: Threads that copy the state; ``None``: a few.
    capture_threads: int | None = None
    #: Reads or writes in flight.
    queue_depth: int = 16
    #: A wait gives up when nothing at all has happened for so long.
    stall_timeout: float = 600.0
    #: Which engine reads and writes: ``"auto"``, ``"uring"``, ``"threads"`` or ``"buffered"``.
    engine: Literal["auto", "uring", "threads", "buffered"] = "auto"
    #: JSON that belongs to the root; that of the first writer stays.
    root_metadata: Mapping[str, Any] | None = None


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
    if on_save_error not in ("raise", "warn"):
        raise MisuseError(f'on_save_error is "raise" or "warn", not {on_save_error!r}')
    if staging_bytes != "auto" and (isinstance(staging_bytes, bool) or int(staging_bytes) <= 0):
        raise MisuseError(f'staging_bytes is "auto" or a number of bytes, not {staging_bytes!r}')
    if max_pending < 0:
        raise MisuseError(f"max_pending is the number of saves that may wait, at least 0, not {max_pending}")
    return json.dumps(
        {
            "save_policy": json.loads(save_policy.to_json()),
            "retention": json.loads(retention.to_json()),
            "step_name": None if step_name is None else step_name.plain(),
            "staging_bytes": None if staging_bytes == "auto" else int(staging_bytes),
            "max_pending": int(max_pending),
            "read_only": bool(read_only),
            "on_save_error": on_save_error,
            "create": options.create,
            "take_over": options.take_over,
            "chunk_bytes": options.chunk_bytes,
            "min_row_bytes": options.min_row_bytes,
            "block_bytes": options.block_bytes,
            "capture_threads": options.capture_threads,
            "queue_depth": options.queue_depth,
            "stall_timeout": stall_seconds(options.stall_timeout),
            "engine": options.engine,
            "root_metadata": None
            if options.root_metadata is None
            else plain_json(options.root_metadata, "root_metadata"),
        }
    )


def plain_json(value: Any, what: str) -> Any:
    """JSON that will come back as it is: no NaN, no keys that JSON would turn into strings, no tuples that it would turn into lists silently."""
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if type(value) is float:
        if value != value or value in (float("inf"), float("-inf")):
            raise MisuseError(
                f"{what} is JSON, which has no {value!r}; use a string, or put it into the state or the metrics"
            )
        return value
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise MisuseError(f"{what} is JSON: its keys are strings, not {key!r}")
        return {key: plain_json(one, f"{what}[{key!r}]") for key, one in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_json(one, f"{what}[{i}]") for i, one in enumerate(value)]
    raise MisuseError(
        f"{what} is JSON (None, bool, int, float, str, lists, dicts with string keys), not {type(value).__qualname__}; "
        "put it into the state"
    )
