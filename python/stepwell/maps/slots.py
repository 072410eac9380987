"""Slots of an optimizer, by the path of their parameter."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator
from itertools import islice

from .patterns import Match
from .values import refuse

#: Factors of a second moment, of Adafactor. Each lacks an axis of its parameter.
FACTORS = ("exp_avg_sq_row", "exp_avg_sq_col", "v_row", "v_col", "row_var", "col_var")

#: The power of ``s`` that a slot follows if its parameter is scaled by ``s``: first moments are
#: gradients, second moments their squares. Then copies of the parameter, and counts.
SLOTS = {
    **dict.fromkeys(("exp_avg", "mu", "m", "momentum_buffer", "trace", "grad_avg"), -1),
    **dict.fromkeys(("exp_avg_sq", "max_exp_avg_sq", "nu", "nu_max", "v", "square_avg", "sum"), -2),
    **dict.fromkeys(FACTORS, -2),
    **dict.fromkeys(("master_param", "fp32_param"), 1),
    **dict.fromkeys(("step", "count"), 0),
}


#: A name in a path. A slash in a key separates names, too.
_NAME = re.compile(r"[^/\[\]\\]+")
_SEPARATORS = "/[\\"
#: The most names of a path that are looked at, those of slots among them, and the most places of
#: parameters that are compared with a slot's.
_MAX_NAMES, _MAX_SLOTS, _MAX_PLACES = 128, 8, 256


def slot_name(match: Match) -> str | None:
    """The name of a slot, behind that of its parameter or before it, as far as names say so.
    ``None`` for a parameter."""
    if match.after:
        return _last(match.after)
    return next((name for name in reversed(_NAME.findall(match.before)) if SLOTS.get(name)), None)


def is_factor(match: Match) -> bool:
    """True for a factor of a parameter's second moment."""
    return not {*_NAME.findall(match.before), *_NAME.findall(match.after)}.isdisjoint(FACTORS)


def parameter_of(path: str, match: Match) -> str:
    """The name of a parameter, which is in the paths of its slots."""
    return path[len(match.before) : len(path) - len(match.after)]


class Slots:
    """Tells slots from parameters. A container that is called like a slot may hold that slot of all
    parameters (``mu/w``), or it is a module."""

    def __init__(self, paths: Collection[str]) -> None:
        self._paths = paths
        #: By container that is called like a slot: the rests of the paths below it.
        self._rests: dict[str, list[str]] = {}
        #: The entries beside these, by the path in front of their names; true for a container.
        self._beside: dict[str, dict[str, bool]] = {}
        #: The paths in front of such rests, without slots.
        self._places: dict[str, list[str]] = {}
        self._decided: dict[str, bool] = {}

    def of(self, path: str, match: Match) -> str | None:
        """The name of a slot. ``None`` for a parameter.

        Raises:
            MisuseError: it may be either.
        """
        if match.after:
            return _last(match.after)
        for found in _called_like_slots(match.before):
            container = path[: found.end()]
            if container not in self._decided:
                self._decided[container] = self._is_slot(path, path[: found.start()], found[0])
            if self._decided[container]:
                return found[0]
        return None

    def _is_slot(self, path: str, above: str, name: str) -> bool:
        """True for a slot: it is beside other slots, and its parameters are elsewhere."""
        if not self._rests:
            self._index()
        container = above + name
        beside = {one: is_container for one, is_container in self._beside[above].items() if one != name}
        is_beside_slots = any(one in SLOTS for one in beside)
        is_beside_modules = any(is_container for one, is_container in beside.items() if one not in SLOTS)
        places = self._places_like(container)
        own = above.rstrip(_SEPARATORS)
        are_elsewhere = any(place == own or not place.startswith(above) for place in places)
        # Attention has modules `q`, `k` and `v`.
        looks_like_slot = is_beside_slots or len(name) > 1
        is_slot = looks_like_slot and are_elsewhere and not is_beside_modules
        if looks_like_slot:
            is_module = is_beside_modules and not places
        else:
            is_module = is_beside_modules or not are_elsewhere
        if not is_slot and not is_module:
            refuse(
                path,
                f"`{container}` is a slot of an optimizer or a module of that name, which the rule changes in different "
                "ways. Give the rule whole paths as its pattern, or drop the leaf by a rule before it",
            )
        return is_slot

    def _places_like(self, container: str) -> list[str]:
        """The containers of parameters with leaves of the same names, and maybe more."""
        rests = self._rests[container]
        places = self._places[_longest(rests)]
        if len(places) > _MAX_PLACES:
            return places
        return [place for place in places if all(_joined(place, rest) in self._paths for rest in rests)]

    def _index(self) -> None:
        for path in self._paths:
            for found in _called_like_slots(path):
                if found.end() < len(path):
                    self._rests.setdefault(path[: found.end()], []).append(path[found.end() :])
                    self._beside.setdefault(path[: found.start()], {})
        self._places = {_longest(rests): [] for rests in self._rests.values()}
        for path in self._paths:
            at, is_slot = 0, False
            for found in islice(_NAME.finditer(path), _MAX_NAMES):
                rest = path[at:] if at or path[0] == "[" else f"/{path}"
                if not is_slot and rest in self._places:
                    self._places[rest].append(path[:at])
                at = found.end() + (path[found.end() :][:1] == "]")
                if (beside := self._beside.get(path[: found.start()])) is not None:
                    beside[found[0]] = at < len(path)
                is_slot = is_slot or bool(SLOTS.get(found[0]))


def _called_like_slots(path: str) -> Iterator[re.Match[str]]:
    names = islice(_NAME.finditer(path), _MAX_NAMES)
    return islice((found for found in names if SLOTS.get(found[0])), _MAX_SLOTS)


def _longest(rests: list[str]) -> str:
    return max(rests, key=len)


def _joined(container: str, rest: str) -> str:
    return container + rest if container else rest.removeprefix("/")


def _last(path: str) -> str:
    return next(reversed(_NAME.findall(path)), "")
