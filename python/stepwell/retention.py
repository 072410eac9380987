"""Retention: which steps stay, and what of them. Rules compose with ``|``: what any of them keeps, stays. The newest committed step
always stays, whatever the rules say."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, final

from .policies import _count


@final
@dataclass(frozen=True, slots=True)
class Retention:
    """A retention rule; make one with the functions of this module."""

    _rule: dict[str, Any]

    def __or__(self, other: Retention) -> Retention:
        if not isinstance(other, Retention):
            raise TypeError(
                f"a retention rule combines with a retention rule, not with {type(other).__name__}"
            )
        parts: list[dict[str, Any]] = []
        for one in (self, other):
            parts.extend(one._rule["of"] if one._rule["policy"] == "any" else [one._rule])
        return Retention({"policy": "any", "of": parts})

    def to_json(self) -> str:
        """What the engine reads."""
        return json.dumps(self._rule)

    def __repr__(self) -> str:
        return f"Retention({self.to_json()})"


def keep_all() -> Retention:
    """Every step stays."""
    return Retention({"policy": "keep_all"})


def keep_latest(n: int) -> Retention:
    """The newest ``n`` stay."""
    return Retention({"policy": "keep_latest", "n": _count(n, "keep_latest", 0)})


def keep_every(steps: int, items: Iterable[str] | None = None) -> Retention:
    """Steps that are divisible by ``steps`` stay; with ``items`` (globs over item names) only those items of them: the rest is thinned away."""
    rule: dict[str, Any] = {"policy": "keep_every", "steps": _count(steps, "keep_every", 1)}
    if items is not None:
        if isinstance(items, str):
            raise TypeError('items takes a list of globs, such as items=["params"], not one string')
        rule["items"] = [str(item) for item in items]
    return Retention(rule)


def keep_best(n: int, metric: str, mode: Literal["min", "max"]) -> Retention:
    """The best ``n`` by a metric stay. NaN is worst; of equals the later is better."""
    if mode not in ("min", "max"):
        raise ValueError(f'mode is "min" or "max", not {mode!r}')
    return Retention(
        {"policy": "keep_best", "n": _count(n, "keep_best", 0), "metric": str(metric), "mode": mode}
    )


def keep_steps(steps: Iterable[int]) -> Retention:
    """These steps stay."""
    return Retention(
        {"policy": "keep_steps", "steps": sorted({_count(step, "keep_steps", 0) for step in steps})}
    )


def keep_newer_than(seconds: float) -> Retention:
    """Steps that were committed less than ``seconds`` ago stay."""
    return Retention({"policy": "keep_newer_than", "seconds": float(seconds)})
