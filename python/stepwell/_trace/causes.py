"""Likely causes of a difference between a run and the run that resumes it, most likely first.

The causes follow from the leaves that differ and from those that do not. Names decide what a leaf
is: a random generator, a place in the data, a slot of an optimizer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from .compare import Compared
from .record import Trace

_RANDOM = re.compile(r"rng|random|generator|seed|prng", re.IGNORECASE)
_DATA = re.compile(
    r"loader|sampler|shuffle|dataset|batches|cursor|(?:^|/)(?:data|epoch|position)(?:/|$)", re.IGNORECASE
)
_OPTIMIZER = re.compile(
    r"optim|exp_avg|momentum|(?:^|[/.])(?:opt|opt_state|mu|nu|trace)(?:[/.]|$)", re.IGNORECASE
)
_HYPERPARAMETER = re.compile(
    r"/groups\[\d+\]/|(?:^|[/.])(?:lr|learning_rate|weight_decay|betas)$", re.IGNORECASE
)
_COUNTER = re.compile(r"(?:^|[/.])(?:step|count)$")
#: Names that are shown of a list.
_SHOWN = 3


def causes(earlier: list[Trace], trace: Trace, compared: Compared) -> list[str]:
    """Returns sentences. ``earlier`` are the traces of the other run at the same step."""
    differing = [one.path for one in compared.differing]
    return list(dict.fromkeys(_causes(earlier, trace, compared, differing)))


def _causes(earlier: list[Trace], trace: Trace, compared: Compared, differing: list[str]) -> Iterator[str]:
    known = {*differing, *compared.same}
    gone = [one.path for one in compared.differing if one.what == "missing"]
    if slots := _those(_OPTIMIZER, gone):
        yield f"slots of the optimizer are missing ({_named(slots)}): restore the optimizer too"
    elif gone:
        yield f"the state lacks {_named(gone)}: announce the same state in both runs"
    random, data = _those(_RANDOM, differing), _those(_DATA, differing)
    if random:
        yield f"a random generator was not restored, or drew other numbers ({_named(random)})"
    if data:
        yield f"the data come in another order: the place in them was not restored ({_named(data)})"
    if changed := _those(_HYPERPARAMETER, differing):
        yield f"hyperparameters are not those of the earlier run ({_named(changed)})"
    yield from _of_slots(compared, differing)
    if not _those(_RANDOM, known):
        yield "no leaf of the state is a random generator by its name: save the generators that the run draws from"
    if not _those(_DATA, known):
        yield "no leaf of the state is a place in the data by its name: save the state of the data loader"
    sizes = {one.world_size for one in earlier}
    if trace.world_size not in sizes:
        sizes_text = ", ".join(map(str, sorted(sizes)))
        yield f"{trace.world_size} ranks in place of {sizes_text} add numbers in another order"
    for name, version in trace.versions.items():
        before = {one.versions.get(name, version) for one in earlier} - {version}
        if before:
            yield f"another version: {name} {version} in place of {', '.join(sorted(before))}"
    yield "kernels are not deterministic (torch.use_deterministic_algorithms(True) shows it)"


def _of_slots(compared: Compared, differing: list[str]) -> Iterator[str]:
    """Slots of an optimizer that differ while the gradients were the same. Other gradients would
    have changed all slots of a parameter, and not its count of steps."""
    counters = [path for path in _those(_OPTIMIZER, differing) if _COUNTER.search(path)]
    if counters:
        yield f"the optimizer counts other steps ({_named(counters)}): its state was not restored"
        return
    same = [path for path in _those(_OPTIMIZER, compared.same) if not _COUNTER.search(path)]
    slots = _those(_OPTIMIZER, differing)
    groups = {_parent(path) for path in same}
    lost = [path for path in slots if _parent(path) in groups and "/groups" not in path]
    if lost:
        yield f"a slot of the optimizer was lost ({_named(lost)}): other slots of the same parameters are the same"


def _those(pattern: re.Pattern[str], paths: Iterable[str]) -> list[str]:
    return [path for path in paths if pattern.search(path)]


def _parent(path: str) -> str:
    return path.rpartition("/")[0]


def _named(paths: list[str]) -> str:
    more = f" and {len(paths) - _SHOWN} more" if len(paths) > _SHOWN else ""
    return ", ".join(paths[:_SHOWN]) + more
