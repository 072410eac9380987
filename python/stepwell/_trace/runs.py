"""The traces of a root, by step and run, and the first step at which two runs part:
:func:`compare_traces`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, final

from .. import _core
from .._checks import step_number
from .._locations import Location, is_directory, location
from .._public import public
from ..errors import StepNotFound
from .causes import causes
from .compare import Compared, LeafDifference, ReplicaDifference, compare, differs_as_a_whole, replicas
from .record import Trace, decoded

#: The traces of all ranks, by step.
_Timeline: TypeAlias = Mapping[int, list[Trace]]


@dataclass(frozen=True, slots=True)
class _Run:
    """The traces of one run that belong to one saved step."""

    run: str
    #: The saved step, and the save that wrote it.
    base: int
    save: str
    #: The traces of all ranks, by step, in order.
    steps: dict[int, list[Trace]]

    @property
    def began(self) -> int:
        """When its first trace was made."""
        return min(trace.unix_ns for traces in self.steps.values() for trace in traces)

    def facts(self) -> TracedRun:
        """Returns what a report tells of it."""
        ranks = sorted({trace.rank for traces in self.steps.values() for trace in traces})
        return TracedRun(self.base, self.save, self.run, tuple(ranks), tuple(self.steps))


@final
@dataclass(frozen=True, slots=True)
class TracedRun:
    """A run that has traces of a saved step."""

    #: The saved step, and the save that wrote it.
    step: int
    save: str
    #: The session of the run that made the traces.
    run: str
    ranks: tuple[int, ...]
    traced_steps: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class Drift:
    """The first step of a run at which ranks differ that should be the same."""

    #: The session of the run.
    run: str
    #: The saved step of the traces.
    base: int
    #: The last step before at which they were the same, or ``None``.
    last_same: int | None
    step: int
    leaves: tuple[ReplicaDifference, ...]


@final
@dataclass(frozen=True, slots=True)
class Parting:
    """The first step at which a later run is not the earlier one."""

    #: The sessions of both.
    run: str
    later_run: str
    #: The saved steps of their traces.
    base: int
    later_base: int
    #: The last step before at which they were the same, or ``None``.
    last_same: int | None
    step: int
    leaves: tuple[LeafDifference, ...]
    #: The ranks of the later run that differ.
    ranks: tuple[int, ...]
    #: Likely causes, most likely first.
    causes: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class TraceReport:
    """The traces of a root or two, and their differences. It is true if nothing differs."""

    #: By saved step, and by time.
    traces: tuple[TracedRun, ...]
    drifts: tuple[Drift, ...]
    partings: tuple[Parting, ...]
    #: Steps that were compared between runs.
    compared_steps: int
    #: Files that are no traces, and why.
    ignored: dict[str, str]

    def __bool__(self) -> bool:
        return not (self.drifts or self.partings)


@public
def compare_traces(root: Location, other: Location | None = None, *, step: int | None = None) -> TraceReport:
    """Compares the traces of a root: the ranks of each run, and each run that resumed a step with
    the first run that has traces of it. Returns a :class:`stepwell.results.TraceReport`.

    Args:
        root: the root of the run.
        other: another root. The runs of both are compared at the steps that both have traced.
        step: a saved step; only its traces are compared. ``None``: all.

    Raises:
        StepNotFound: a root does not exist.
    """
    number = None if step is None else step_number(step)
    runs, ignored = _runs_of(root, number)
    others: list[_Run] = []
    if other is None:
        pairs = list(_pairs(runs))
    else:
        others, also_ignored = _runs_of(other, number)
        ignored |= also_ignored
        pairs = [(_timeline(runs), _timeline(others))]
    return TraceReport(
        traces=tuple(run.facts() for run in (*runs, *others)),
        drifts=tuple(found for run in (*runs, *others) if (found := _drift(run)) is not None),
        partings=tuple(parted for one, later in pairs if (parted := _parting(one, later)) is not None),
        compared_steps=sum(len(one.keys() & later.keys()) for one, later in pairs),
        ignored=ignored,
    )


def _pairs(runs: Sequence[_Run]) -> Iterator[tuple[_Timeline, _Timeline]]:
    """Each run, and the runs before it that have traces of the same save."""
    before: dict[str, list[_Run]] = {}
    for run in runs:
        earlier = before.setdefault(run.save, [])
        if earlier:
            yield _timeline(earlier), run.steps
        earlier.append(run)


def _runs_of(root: Location, number: int | None) -> tuple[list[_Run], dict[str, str]]:
    """Returns the runs of a root, by saved step and time, and why files are ignored."""
    where = location(root, "the root")
    if not is_directory(where):
        raise StepNotFound(f"{where} is no directory. Pass the root of a run")
    found: dict[tuple[int, str, str], dict[int, list[Trace]]] = {}
    ignored: dict[str, str] = {}
    for row in _core.read_traces(where):
        trace = decoded(row)
        if isinstance(trace, str):
            ignored[row[2]] = trace
        elif number is None or trace.base == number:
            steps = found.setdefault((trace.base, trace.save, trace.run), {})
            steps.setdefault(trace.step, []).append(trace)
    runs = [
        _Run(run, base, save, {step: sorted(steps[step], key=lambda one: one.rank) for step in sorted(steps)})
        for (base, save, run), steps in found.items()
    ]
    return sorted(runs, key=lambda one: (one.base, one.save, one.began)), ignored


def _drift(run: _Run) -> Drift | None:
    """Compares the ranks of a run, step by step."""
    last = None
    for step, traces in run.steps.items():
        leaves = replicas(traces)
        if leaves:
            return Drift(run.run, run.base, last, step, tuple(leaves))
        last = step
    return None


def _timeline(runs: Sequence[_Run]) -> _Timeline:
    """Returns the traces of each step, by the run that was there first."""
    steps: dict[int, list[Trace]] = {}
    for run in sorted(runs, key=lambda one: one.began):
        for step, traces in run.steps.items():
            steps.setdefault(step, traces)
    return {step: steps[step] for step in sorted(steps)}


def _parting(earlier: _Timeline, later: _Timeline) -> Parting | None:
    """Returns the first common step at which two runs differ."""
    last = None
    for step in sorted(earlier.keys() & later.keys()):
        before, after = earlier[step], later[step]
        found = [pair for pair in _compared(before, after) if pair[1].differing]
        if found:
            trace, compared = found[0]
            leaves = {one.path: one for _, one_rank in found for one in one_rank.differing}
            return Parting(
                before[0].run,
                after[0].run,
                before[0].base,
                after[0].base,
                last,
                step,
                tuple(leaves.values()),
                tuple(sorted({one.rank for one, _ in found})),
                tuple(causes(before, trace, compared)),
            )
        last = step
    return None


def _compared(before: list[Trace], after: list[Trace]) -> list[tuple[Trace, Compared]]:
    """Compares each rank. Leaves whose regions do not match are compared as a whole."""
    found = [(trace, compare(before, trace)) for trace in after]
    unknown = dict.fromkeys(path for _, compared in found for path in compared.unknown)
    differing = [path for path in unknown if differs_as_a_whole(before, after, path)]
    whole = tuple(LeafDifference(path, "value") for path in differing)
    if whole:
        same = tuple(path for _, compared in found for path in compared.same)
        found += [(trace, Compared(whole, same, ())) for trace in after]
    return found
