"""The differences between traces of one step: of two runs, and of the ranks of one run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, final

from .. import _core
from .record import MODULUS, Region, Trace, TracedLeaf, is_inside, volume


@final
@dataclass(frozen=True, slots=True)
class LeafDifference:
    """A leaf that is not the same in two traces."""

    path: str
    #: ``"missing"`` and ``"added"``: only the earlier trace has it, or only the later one.
    #: ``"kind"``: it has another dtype or shape, or is an object on one side.
    what: Literal["value", "kind", "missing", "added"]


@dataclass(frozen=True, slots=True)
class Compared:
    """The result of a comparison."""

    #: In the order of the state.
    differing: tuple[LeafDifference, ...]
    #: Paths of leaves that are the same.
    same: tuple[str, ...]
    #: Paths of leaves that both have in regions that cannot be compared.
    unknown: tuple[str, ...]


def compare(earlier: Sequence[Trace], trace: Trace) -> Compared:
    """Compares the trace of one rank with those of all ranks of an earlier run, at one step."""
    differing: list[LeafDifference] = []
    same: list[str] = []
    unknown: list[str] = []
    for path, leaf in trace.leaves.items():
        found = _earlier_leaf(earlier, trace, path, leaf)
        if found is None:
            if _is_one_layout(earlier, trace):
                differing.append(LeafDifference(path, "added"))
        elif found.kind != leaf.kind:
            differing.append(LeafDifference(path, "kind"))
        else:
            pairs = [(digest, _digest_of(found.parts, region)) for region, digest in leaf.parts.items()]
            if any(other is not None and other != digest for digest, other in pairs):
                differing.append(LeafDifference(path, "value"))
            elif any(other is None for _, other in pairs):
                unknown.append(path)
            else:
                same.append(path)
    if _is_one_layout(earlier, trace):
        known = {
            path: None
            for one in earlier
            if one.rank == trace.rank or trace.world_size == 1
            for path in one.leaves
        }
        differing += [LeafDifference(path, "missing") for path in known if path not in trace.leaves]
    return Compared(tuple(differing), tuple(same), tuple(unknown))


def _is_one_layout(earlier: Sequence[Trace], trace: Trace) -> bool:
    """True if a leaf that only one side has is a difference. On other ranks the layout decides."""
    return any(one.world_size == trace.world_size and one.rank == trace.rank for one in earlier)


def _earlier_leaf(earlier: Sequence[Trace], trace: Trace, path: str, leaf: TracedLeaf) -> TracedLeaf | None:
    """Returns the earlier leaf with the regions of all ranks. This rank's digest of a region comes
    first. A leaf that may differ between ranks is compared with this rank's alone."""
    found: TracedLeaf | None = None
    for one in sorted(earlier, key=lambda one: (one.rank != trace.rank, one.rank)):
        other = one.leaves.get(path)
        if other is None or ((leaf.drifts or other.drifts) and one.rank != trace.rank):
            continue
        if found is None:
            found = other
        elif found.kind == other.kind:
            found = TracedLeaf(found.kind, found.drifts, {**other.parts, **found.parts})
    return found


def _digest_of(parts: dict[Region, int], region: Region) -> int | None:
    """Returns the digest of a region, if the parts have it, or regions that tile it."""
    if region in parts or not volume(region):
        return parts.get(region, 0)
    inside = [one for one in parts if is_inside(one, region) and volume(one)]
    if sum(map(volume, inside)) != volume(region):
        return None
    first, extent = region
    boxes = [([at - start for at, start in zip(one[0], first, strict=True)], list(one[1])) for one in inside]
    if _core.covers(list(extent), boxes) is not None:
        return None
    return sum(parts[one] for one in inside) % MODULUS


def differs_as_a_whole(earlier: Sequence[Trace], later: Sequence[Trace], path: str) -> bool | None:
    """Compares the regions of all ranks together. ``None`` if they do not make up the same box."""
    digests = []
    for traces in (earlier, later):
        parts = {
            region: digest
            for one in traces
            if path in one.leaves
            for region, digest in one.leaves[path].parts.items()
            if volume(region)
        }
        if not parts:
            return None
        first = [min(axis) for axis in zip(*(at for at, _ in parts), strict=True)]
        ends = ([start + n for start, n in zip(*region, strict=True)] for region in parts)
        end = [max(axis) for axis in zip(*ends, strict=True)]
        box = tuple(first), tuple(last - at for at, last in zip(first, end, strict=True))
        digests.append((box, _digest_of(parts, box)))
    (box, digest), (other_box, other_digest) = digests
    if box != other_box or digest is None or other_digest is None:
        return None
    return digest != other_digest


@final
@dataclass(frozen=True, slots=True)
class ReplicaDifference:
    """A leaf, or a region of it, with different values on ranks that should have the same."""

    path: str
    #: The ranks that have the values of most ranks, and those that do not.
    ranks: tuple[int, ...]
    other_ranks: tuple[int, ...]


def replicas(traces: Iterable[Trace]) -> list[ReplicaDifference]:
    """Compares the ranks of one run at one step: each region that several of them hold."""
    holders: dict[tuple[str, Region], dict[int, list[int]]] = {}
    for trace in sorted(traces, key=lambda trace: trace.rank):
        for path, leaf in trace.leaves.items():
            if not leaf.drifts:
                for region, digest in leaf.parts.items():
                    holders.setdefault((path, region), {}).setdefault(digest, []).append(trace.rank)
    found: dict[str, ReplicaDifference] = {}
    for (path, _), ranks in holders.items():
        if len(ranks) > 1:
            most, *others = sorted(ranks.values(), key=lambda ranks: (-len(ranks), ranks))
            odd = sorted(rank for ranks in others for rank in ranks)
            found.setdefault(path, ReplicaDifference(path, tuple(most), tuple(odd)))
    return list(found.values())
