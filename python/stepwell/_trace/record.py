"""One trace: the digests of one rank's leaves at one step, as it is stored."""

from __future__ import annotations

import json
import math
import platform
import sys
from dataclasses import dataclass
from typing import TypeAlias, cast

from .. import _core

#: Offset and extent of a region of a tensor. Empty for a tensor without dimensions, and an object.
Region: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]

#: Digests are sums modulo this number.
MODULUS = 1 << 64


@dataclass(frozen=True, slots=True)
class TracedLeaf:
    """One rank's part of a leaf."""

    #: The dtype and shape, or ``object``.
    kind: str
    #: True if its values may differ between ranks.
    drifts: bool
    #: The digest of each region that the rank holds.
    parts: dict[Region, int]


@dataclass(frozen=True, slots=True)
class Trace:
    """The digests of one rank's leaves at one step."""

    #: The step with the trace: its number, and the save that wrote it.
    base: int
    save: str
    #: The step of the digests: the base or a later one.
    step: int
    rank: int
    world_size: int
    #: The session of the run that made it.
    run: str
    #: When it was made.
    unix_ns: int
    #: Versions of libraries, by name.
    versions: dict[str, str]
    #: By rendered path, in the order of the state.
    leaves: dict[str, TracedLeaf]


def versions() -> dict[str, str]:
    """Returns the versions that may decide the bits of a result."""
    found = {"python": platform.python_version(), "machine": platform.machine()}
    for name in ("numpy", "torch", "jax"):
        version = getattr(sys.modules.get(name), "__version__", None)
        if isinstance(version, str):
            found[name] = version
    return found


def encoded(trace: Trace) -> str:
    """Returns a trace as JSON, without the save that its file's name has."""
    leaves = [
        [path, leaf.kind, leaf.drifts, [[*region, f"{digest:016x}"] for region, digest in leaf.parts.items()]]
        for path, leaf in trace.leaves.items()
    ]
    return json.dumps(
        {
            "step": trace.base,
            "traced_step": trace.step,
            "rank": trace.rank,
            "world_size": trace.world_size,
            "run": trace.run,
            "unix_ns": trace.unix_ns,
            "versions": trace.versions,
            "leaves": leaves,
        },
        separators=(",", ":"),
    )


def decoded(row: _core._TraceRow) -> Trace | str:
    """Returns the trace of a file, or why it is ignored."""
    session, counter, _, text, why = row
    if text is None:
        return why or "it is unreadable"
    try:
        found = json.loads(text)
        leaves = {
            _text(path): TracedLeaf(
                _text(kind),
                bool(drifts),
                {(_numbers(offset), _numbers(extent)): int(digest, 16) for offset, extent, digest in parts},
            )
            for path, kind, drifts, parts in found["leaves"]
        }
        return Trace(
            base=_whole(found["step"]),
            save=f"{session}-{counter}",
            step=_whole(found["traced_step"]),
            rank=_whole(found["rank"]),
            world_size=_whole(found["world_size"]),
            run=_text(found["run"]),
            unix_ns=_whole(found["unix_ns"]),
            versions={_text(name): _text(version) for name, version in found["versions"].items()},
            leaves=leaves,
        )
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        return f"it is no trace: {type(error).__name__}: {error}"


def _whole(value: object) -> int:
    if type(value) is not int or value < 0:
        raise ValueError("a number is expected")
    return value


def _text(value: object) -> str:
    if type(value) is not str:
        raise ValueError("a text is expected")
    return value


def _numbers(value: object) -> tuple[int, ...]:
    return tuple(_whole(one) for one in cast("list[object]", value))


def volume(region: Region) -> int:
    """Returns the number of elements of a region."""
    return math.prod(region[1])


def is_inside(inner: Region, outer: Region) -> bool:
    """True if ``outer`` contains ``inner``."""
    return len(inner[0]) == len(outer[0]) and all(
        at >= first and at + n <= first + most for at, n, first, most in zip(*inner, *outer, strict=True)
    )
