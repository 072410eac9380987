"""Save policies: which calls of ``save`` write. They compose with ``|`` (one of them says yes) and
``&`` (all of them do), and are plain data that the engine decides by; a callable is asked here, on
the leader, and its answer handed over by the callable's name: its place among those of the policy,
and what it is called, which are the same in every process of a job."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias, final

from ._checks import flag, listed, shown, whole
from ._core import MAX_STEP
from ._failure_model import best_interval
from ._public import public
from ._timeouts import finite_seconds, positive_seconds
from .errors import MisuseError

if TYPE_CHECKING:
    from ._save_costs import SaveCosts

#: A user's own policy: ``(step, latest step or None) -> bool``.
Predicate = Callable[[int, int | None], bool]
#: A rule as the engine reads it: JSON, with ``policy`` and what belongs to that.
Rule: TypeAlias = dict[str, object]


@final
@dataclass(frozen=True, slots=True)
class _Optimal:
    """A question about the costs of the manager's saves."""

    mtbf: float

    def is_due(self, costs: SaveCosts) -> bool:
        """True at the step nearest to the end of the interval."""
        since = costs.since_save
        if since is None or costs.is_writing:
            return since is None
        return since + (costs.step_seconds or 0.0) / 2 >= best_interval(costs.cost or 0.0, self.mtbf)


@final
@dataclass(frozen=True, slots=True)
class _Asked:
    """A question to Python, where the rule has its name."""

    ask: Predicate | _Optimal


@public
@final
@dataclass(frozen=True, slots=True)
class SavePolicy:
    """A save policy; make one with the functions of this module."""

    _rule: Rule
    _predicates: tuple[Predicate | _Optimal, ...] = ()
    #: Signals that announce a preemption, where the policy listens to one.
    signals: tuple[int, ...] = ()

    def __or__(self, other: SavePolicy) -> SavePolicy:
        return _combine("any", self, other)

    def __and__(self, other: SavePolicy) -> SavePolicy:
        return _combine("all", self, other)

    def __bool__(self) -> bool:
        raise TypeError(
            "a save policy is neither true nor false; combine policies with | and &, not with or and and"
        )

    def to_json(self) -> str:
        """Returns JSON for the engine."""
        names = {id(ask): _name(number, ask) for number, ask in enumerate(self._predicates)}
        return json.dumps(self._rule, default=lambda asked: names[id(asked.ask)])

    def answers(self, step: int, latest: int | None, costs: SaveCosts) -> dict[str, bool]:
        """Returns the callables' answers about a step, by name."""
        return {
            _name(number, ask): ask.is_due(costs) if isinstance(ask, _Optimal) else bool(ask(step, latest))
            for number, ask in enumerate(self._predicates)
        }

    def __repr__(self) -> str:
        return f"SavePolicy({self.to_json()})"


def _combine(how: str, left: SavePolicy, right: object) -> SavePolicy:
    if not isinstance(right, SavePolicy):
        raise MisuseError(f"a save policy combines with a save policy, not with {shown(right)}")
    parts = combined(how, left._rule, right._rule)
    signals = tuple(dict.fromkeys(left.signals + right.signals))
    # One that is there twice is asked once.
    others = tuple(one for one in right._predicates if all(one is not other for other in left._predicates))
    return SavePolicy(parts, left._predicates + others, signals)


def _name(number: int, ask: Predicate | _Optimal) -> str:
    return f"{number} {getattr(ask, '__qualname__', type(ask).__qualname__)}"


@public
def every_steps(n: int, *, initial: bool = True) -> SavePolicy:
    """Steps that are divisible by ``n``; with ``initial`` also the first step of an empty root."""
    number = whole(n, "the n of every_steps", 1, MAX_STEP)
    return SavePolicy({"policy": "every_steps", "n": number, "initial": flag(initial, "initial")})


def as_policy(given: SavePolicy | int | None) -> SavePolicy:
    """Returns the policy that a manager was given: a number ``n`` means every ``n`` steps, ``None``
    every call."""
    if isinstance(given, SavePolicy):
        return given
    if given is None or hasattr(given, "__index__"):
        return every_steps(1 if given is None else whole(given, "save_policy", 1, MAX_STEP))
    raise MisuseError(
        f"save_policy is a number of steps, or made by sw.every_steps() and the like, not a {shown(given)}"
    )


@public
def at_steps(steps: Iterable[int]) -> SavePolicy:
    """These steps and no others."""
    return SavePolicy({"policy": "at_steps", "steps": numbers(steps, "at_steps")})


@public
def every_seconds(seconds: float) -> SavePolicy:
    """When so many seconds have passed since the last save began, or there was none."""
    return SavePolicy(
        {"policy": "every_seconds", "seconds": finite_seconds(seconds, "the length of every_seconds")}
    )


@public
def every_optimal(mtbf: float) -> SavePolicy:
    """As often as loses least time to saves and failures, with one failure of the job in ``mtbf``
    seconds on average.

    The first call saves. Later intervals follow from the measured cost of the last saves: their
    calls, and the slower steps while they were written. The formula is that of
    :func:`stepwell.advise`. A save begins only when the one before it has ended. Of several
    processes the first one measures and decides. It needs a call of ``save`` at every step.
    """
    ask = _Optimal(positive_seconds(mtbf, "the mtbf of every_optimal"))
    return SavePolicy({"policy": "custom", "name": _Asked(ask)}, (ask,))


@public
def when_idle() -> SavePolicy:
    """While no other save is being written: ``every_steps(1) & when_idle()`` saves as often as the
    disk allows."""
    return SavePolicy({"policy": "when_idle"})


@public
def on_preemption(signals: Iterable[int] | None = None) -> SavePolicy:
    """When the job is to be preempted. ``signals`` (default: SIGTERM) announce that; handlers that
    are there are chained."""
    import signal

    if signals is None:
        signals = (signal.SIGTERM,)
    given = listed(signals, "signals is a list of signals, such as [signal.SIGTERM]")
    numbers = tuple(whole(one, "a signal", 1) for one in given)
    if unknown := [number for number in numbers if number not in signal.valid_signals()]:
        raise MisuseError(f"this system has no signal {unknown[0]}")
    if any(number in (9, 19) for number in numbers):
        raise MisuseError(
            "SIGKILL and SIGSTOP cannot be listened to; a scheduler sends another signal before them"
        )
    return SavePolicy({"policy": "on_preemption"}, (), numbers)


@public
def when(predicate: Predicate) -> SavePolicy:
    """When ``predicate(step, latest)`` says so; ``latest`` is ``None`` in an empty root. Of several
    processes only the first one's is asked."""
    if not callable(predicate):
        raise MisuseError(f"when() takes a callable of (step, latest), not {shown(predicate)}")
    return SavePolicy({"policy": "custom", "name": _Asked(predicate)}, (predicate,))


def combined(how: str, left: Rule, right: Rule) -> Rule:
    """Two rules as one, flat where they were combined the same way: for save policies and for
    retention."""
    parts: list[object] = []
    for one in (left, right):
        inner = one.get("of") if one["policy"] == how else None
        parts.extend(inner if isinstance(inner, list) else [one])
    return {"policy": how, "of": parts}


def numbers(steps: Iterable[int], name: str) -> list[int]:
    """Steps that a rule names, in order."""
    given = listed(steps, f"{name} takes a list of steps, such as [10, 20]")
    return sorted({whole(step, f"a step of {name}", 0, MAX_STEP) for step in given})
