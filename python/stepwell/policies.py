"""Save policies: which calls of ``save`` write. They compose with ``|`` (one of them says yes) and ``&`` (all of them do), and are plain
data that the engine decides by; a callable is asked here, on the leader, and its answer handed over."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, final

#: A user's own policy: ``(step, latest step or None) -> bool``.
Predicate = Callable[[int, int | None], bool]


@final
@dataclass(frozen=True, slots=True)
class SavePolicy:
    """A save policy; make one with the functions of this module."""

    _rule: dict[str, Any]
    _predicates: dict[str, Predicate] = field(default_factory=dict)
    #: Signals that announce a preemption, where the policy listens to one.
    signals: tuple[int, ...] = ()

    def __or__(self, other: SavePolicy) -> SavePolicy:
        return _combine("any", self, other)

    def __and__(self, other: SavePolicy) -> SavePolicy:
        return _combine("all", self, other)

    def to_json(self) -> str:
        """What the engine reads."""
        return json.dumps(self._rule)

    def answers(self, step: int, latest: int | None) -> dict[str, bool]:
        """What the callables say about a step, by name."""
        return {name: bool(ask(step, latest)) for name, ask in self._predicates.items()}

    def __repr__(self) -> str:
        return f"SavePolicy({self.to_json()})"


def _combine(how: str, left: SavePolicy, right: object) -> SavePolicy:
    if not isinstance(right, SavePolicy):
        raise TypeError(f"a save policy combines with a save policy, not with {type(right).__name__}")
    parts: list[dict[str, Any]] = []
    for one in (left, right):
        parts.extend(one._rule["of"] if one._rule["policy"] == how else [one._rule])
    signals = tuple(dict.fromkeys(left.signals + right.signals))
    return SavePolicy({"policy": how, "of": parts}, left._predicates | right._predicates, signals)


def every_steps(n: int, *, initial: bool = True) -> SavePolicy:
    """Steps that are divisible by ``n``; with ``initial`` also the first step of an empty root."""
    return SavePolicy({"policy": "every_steps", "n": _count(n, "every_steps", 1), "initial": bool(initial)})


def at_steps(steps: Iterable[int]) -> SavePolicy:
    """These steps and no others."""
    return SavePolicy(
        {"policy": "at_steps", "steps": sorted({_count(step, "at_steps", 0) for step in steps})}
    )


def every_seconds(seconds: float) -> SavePolicy:
    """When so many seconds have passed since the last save began, or there was none."""
    return SavePolicy({"policy": "every_seconds", "seconds": float(seconds)})


def when_idle() -> SavePolicy:
    """While no other save is being written: ``every_steps(1) & when_idle()`` saves as often as the disk allows."""
    return SavePolicy({"policy": "when_idle"})


def on_preemption(signals: Iterable[int] | None = None) -> SavePolicy:
    """When the job is to be preempted. ``signals`` (default: SIGTERM) announce that; handlers that are there are chained."""
    if signals is None:
        import signal

        signals = (signal.SIGTERM,)
    return SavePolicy({"policy": "on_preemption"}, {}, tuple(int(one) for one in signals))


def when(predicate: Predicate) -> SavePolicy:
    """When ``predicate(step, latest)`` says so; ``latest`` is ``None`` in an empty root."""
    if not callable(predicate):
        raise TypeError("when() takes a callable of (step, latest)")
    name = f"{getattr(predicate, '__qualname__', type(predicate).__qualname__)}-{id(predicate):x}"
    return SavePolicy({"policy": "custom", "name": name}, {name: predicate})


def _count(n: Any, what: str, least: int) -> int:
    if isinstance(n, bool) or not hasattr(n, "__index__"):
        raise TypeError(f"{what} takes integers, not {type(n).__name__}")
    value = int(n.__index__())
    if value < least:
        raise ValueError(f"{what}({value}) names no step; pass at least {least}")
    return value
