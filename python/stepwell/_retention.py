"""Retention: which steps stay, and what of them. Rules compose with ``|``: what any of them keeps,
stays. The newest committed step always stays, whatever the rules say."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypedDict, final, overload

from ._checks import listed, one_of, shown, text, whole
from ._core import MAX_STEP
from ._policies import Rule, combined, numbers
from ._public import public
from ._timeouts import finite_seconds
from .errors import MisuseError


@public
@final
@dataclass(frozen=True, slots=True)
class Retention:
    """A retention rule; make one with the functions of this module."""

    _rule: Rule

    def __or__(self, other: Retention) -> Retention:
        if not isinstance(other, Retention):
            raise MisuseError(f"a retention rule combines with a retention rule, not with {shown(other)}")
        return Retention(combined("any", self._rule, other._rule))

    def __bool__(self) -> bool:
        raise TypeError("a retention rule is neither true nor false; combine rules with |, not with or")

    def to_json(self) -> str:
        """Returns JSON for the engine."""
        return json.dumps(self._rule)

    def __repr__(self) -> str:
        return f"Retention({self.to_json()})"


@final
@dataclass(frozen=True, slots=True)
class RetentionDecision:
    """The decision of retention about a step."""

    #: Its number.
    step: int
    #: ``"keep"``, ``"thin"`` (some items go) or ``"delete"``.
    decision: Literal["keep", "thin", "delete"]
    #: The items that stay, if it is thinned.
    items: tuple[str, ...]
    #: The rules that keep it, or why it goes.
    reasons: tuple[str, ...]


def decisions(plan: str) -> list[RetentionDecision]:
    """The engine's plan, in the order of the steps."""
    found: dict[str, _Decided] = json.loads(plan)["steps"]
    return sorted((_decision(int(step), row) for step, row in found.items()), key=lambda one: one.step)


class _Decided(TypedDict, total=False):
    decision: Literal["keep", "delete"]
    #: ``"all"``, or the names of some.
    items: Literal["all"] | dict[Literal["only"], list[str]]
    reasons: list[str]
    reason: str


def _decision(step: int, row: _Decided) -> RetentionDecision:
    if row["decision"] == "delete":
        return RetentionDecision(step, "delete", (), (row["reason"],))
    items = row["items"]
    reasons = tuple(row["reasons"])
    if items == "all":
        return RetentionDecision(step, "keep", (), reasons)
    return RetentionDecision(step, "thin", tuple(sorted(items["only"])), reasons)


@public
def keep_all() -> Retention:
    """Every step stays."""
    return Retention({"policy": "keep_all"})


@public
def keep_latest(n: int) -> Retention:
    """The newest ``n`` stay."""
    return Retention({"policy": "keep_latest", "n": whole(n, "the n of keep_latest", 0, MAX_STEP)})


def as_retention(given: Retention | int | None) -> Retention:
    """Returns the retention that a manager was given: a number ``n`` keeps the latest ``n``,
    ``None`` all."""
    if isinstance(given, Retention):
        if given._rule.get("n") == 0:
            raise MisuseError(
                f"retention={given._rule['policy']}(0) keeps nothing; pass at least 1, or combine it with another rule"
            )
        return given
    if given is None:
        return keep_all()
    if hasattr(given, "__index__"):
        return keep_latest(whole(given, "retention", 1, MAX_STEP))
    raise MisuseError(
        f"retention is a number of steps, or made by sw.keep_latest() and the like, not a {shown(given)}"
    )


@overload
def keep_every(steps: int, items: str | Iterable[str] | None = None) -> Retention: ...
@overload
def keep_every(*, items: str | Iterable[str] | None = None, seconds: float) -> Retention: ...
@public
def keep_every(
    steps: int | None = None, items: str | Iterable[str] | None = None, *, seconds: float | None = None
) -> Retention:
    """Steps at an interval stay. Pass ``steps`` or ``seconds``, one of them.

    Args:
        steps: keep the steps that are divisible by this number.
        items: keep only these items of the steps; the rest is thinned away. It selects as
            ``include`` of a restore does, one glob or several: ``"params"`` and ``"params/**"`` are
            the item ``params``. ``None``: keep the steps whole.
        seconds: keep the oldest step, and each that was committed at least so long after the one
            that was kept before it.
    """
    if (steps is None) is (seconds is None):
        raise MisuseError("keep_every takes steps= or seconds=, one of them")
    rule: Rule
    if seconds is None:
        rule = {"policy": "keep_every", "steps": whole(steps, "the steps of keep_every", 1, MAX_STEP)}
    else:
        apart = finite_seconds(seconds, "the interval of keep_every")
        rule = {"policy": "keep_every_seconds", "seconds": apart}
        if apart <= 0:
            raise MisuseError(f"keep_every(seconds={seconds}) is no interval; pass more than 0")
    if items is not None:
        if isinstance(items, str):
            items = [items]
        items = listed(items, 'items takes a glob or a list of globs, such as items=["params"]')
        if not items:
            raise MisuseError("items=[] would keep nothing of these steps; name items, or leave items= out")
        rule["items"] = [text(item, "a glob of items") for item in items]
    return Retention(rule)


@public
def keep_best(n: int, metric: str, mode: Literal["min", "max"]) -> Retention:
    """The best ``n`` by a metric stay. NaN is worst; of equals the later is better."""
    one_of(mode, "mode", ("min", "max"))
    if not text(metric, "the metric of keep_best"):
        raise MisuseError("the metric of keep_best is the name of one, not an empty string")
    return Retention(
        {
            "policy": "keep_best",
            "n": whole(n, "the n of keep_best", 0, MAX_STEP),
            "metric": metric,
            "mode": mode,
        }
    )


@public
def keep_steps(steps: Iterable[int]) -> Retention:
    """These steps stay."""
    return Retention({"policy": "keep_steps", "steps": numbers(steps, "keep_steps")})


@public
def keep_newer_than(seconds: float) -> Retention:
    """Steps that were committed less than ``seconds`` ago stay."""
    return Retention(
        {"policy": "keep_newer_than", "seconds": finite_seconds(seconds, "the age of keep_newer_than")}
    )
