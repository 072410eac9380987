"""The operations of a map. Each takes leaves by path and returns leaves by path."""

from __future__ import annotations

import difflib
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar, Literal, NoReturn

from ..errors import MisuseError
from .arrangement import Arrangement, concat
from .patterns import Match, Pattern
from .slots import SLOTS, is_factor, parameter_of, slot_name
from .values import Made, Tied, Value, Values, add, changed, consumed, refuse, renamed, untied

#: The most leaves and pieces that a rule makes by sizes in a file.
_MAX_LEAVES, _MAX_PIECES = 1 << 17, 1 << 20
#: The same if the matched tensors have no elements. Each element allows one more.
_FREE_LEAVES, _FREE_PIECES = 1 << 12, 1 << 15
#: The most digits of a number in a path, and the missing numbers that an error lists.
_MAX_DIGITS, _LISTED = 9, 8
#: The most paths that are compared with a pattern that matches none.
_MAX_COMPARED = 1 << 12


class NoMatch(MisuseError):
    """A pattern matches no leaf."""

    def __init__(self, message: str, pattern: str) -> None:
        super().__init__(message)
        self.pattern = pattern


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """One operation of a map."""

    #: True if it may match nothing.
    optional: bool = False
    #: The attributes with the patterns of the leaves that it takes.
    _takes: ClassVar[tuple[str, ...]] = ("pattern",)

    def apply(self, values: Values) -> Values:
        """The leaves after it."""
        raise NotImplementedError

    def joined(self, values: Values) -> tuple[Values, dict[str, list[str]]]:
        """The leaves after it. Then leaves of which it keeps one, so that they have to be equal:
        their paths, by the path of the one that is kept."""
        return self.apply(values), {}

    def inverse(self) -> Rule:
        """Returns the operation that undoes this one. Raises if nothing can undo it."""
        raise NotImplementedError

    def taken(self) -> tuple[Pattern, ...]:
        """The patterns of the leaves that it takes."""
        return tuple(getattr(self, name) for name in self._takes)

    def _found(self, pattern: Pattern, values: Values) -> Iterator[tuple[str, Match]]:
        """The paths that a pattern matches. Raises if it matches none and has to."""
        none = True
        for found in pattern.among(values):
            none = False
            yield found
        if none and not self.optional:
            compared = itertools.islice(values, _MAX_COMPARED)
            near = difflib.get_close_matches(pattern.text, compared, 3, 0.4)
            hint = f"; near it are {', '.join(near)}" if near else ""
            raise NoMatch(
                f"the map's pattern `{pattern.text}` matches no leaf{hint}; correct it, or set optional = true",
                pattern.text,
            )

    def _along(self, axis: int, pattern: Pattern, values: Values) -> list[tuple[str, Match]]:
        """The tensors that a pattern matches, without slots of one element. Raises for a tensor
        that cannot be changed along the axis."""
        found = list(self._found(pattern, values))
        single = _single_along(axis, found, values)
        return [(path, match) for path, match in found if path not in single]


@dataclass(frozen=True, slots=True)
class Rename(Rule):
    """Other paths for leaves."""

    pattern: Pattern
    to: Pattern
    #: Another leaf that has to be there with the same captures.
    beside: Pattern | None = None

    def apply(self, values: Values) -> Values:
        found = self._found(self.pattern, values)
        return renamed(
            values,
            {
                path: match.around(self.to.fill(match.captures))
                for path, match in found
                if self.beside is None or match.around(self.beside.fill(match.captures)) in values
            },
        )

    def inverse(self) -> Rule:
        _same_captures(self.pattern, self.to, "rename")
        return Rename(self.to, self.pattern, optional=self.optional)


@dataclass(frozen=True, slots=True)
class Concat(Rule):
    """One tensor of several, along an axis. ``groups``: each of them is cut into so many, which are
    interleaved."""

    patterns: tuple[Pattern, ...]
    to: Pattern
    axis: int = 0
    groups: int = 1
    #: Shares of the parts, for the way back.
    sizes: tuple[int, ...] | None = None
    #: Elements of a share in a group, if they are known.
    unit: int | None = None

    def taken(self) -> tuple[Pattern, ...]:
        return self.patterns

    def apply(self, values: Values) -> Values:
        return self.joined(values)[0]

    def joined(self, values: Values) -> tuple[Values, dict[str, list[str]]]:
        made: Made = {}
        # Slots of one element.
        alike: dict[str, list[str]] = {}
        bound = _Bound("pieces", _MAX_PIECES, _FREE_PIECES)
        sets, single = self._sets(values)
        for whole, parts in sets.items():
            found = [untied(values, path) for path in parts]
            if parts[0] in single:
                alike[whole] = parts
                made[whole] = found[0], parts[0]
            else:
                tensors = [one for one in found if isinstance(one, Arrangement)]
                made[whole] = self._joined(whole, tensors, bound), parts[0]
        return consumed(values, made, {path for parts in sets.values() for path in parts}), alike

    def _sets(self, values: Values) -> tuple[dict[str, list[str]], set[str]]:
        """The paths of the parts, by that of the whole, and all paths of slots of one element."""
        sets: dict[str, dict[int, str]] = {}
        found: list[tuple[str, Match]] = []
        for position, pattern in enumerate(self.patterns):
            for path, match in self._found(pattern, values):
                found.append((path, match))
                whole = match.around(self.to.fill(match.captures))
                other = sets.setdefault(whole, {}).setdefault(position, path)
                if other != path:
                    refuse(
                        whole,
                        f"the map has `{other}` and `{path}` for the same part. Use all captures in `to`, or match "
                        "fewer leaves",
                    )
        single = _single_along(self.axis, found, values)
        for whole, parts in sets.items():
            if len(parts) < len(self.patterns):
                lost = ", ".join(one.text for at, one in enumerate(self.patterns) if at not in parts)
                there = ", ".join(parts.values())
                refuse(whole, f"of its {len(self.patterns)} parts, only {there} are there, and not {lost}")
            alone = [path for path in parts.values() if path in single] if single else ()
            if 0 < len(alone) < len(parts):
                _refuse_unfit(alone[0], untied(values, alone[0]), "is not like that of the other parts")
        return {whole: list(parts.values()) for whole, parts in sets.items()}, single

    def _joined(self, whole: str, tensors: Sequence[Arrangement], bound: _Bound) -> Arrangement:
        axis = _axis(self.axis, len(tensors[0].shape))
        others = {(one.dtype, *one.shape[:axis], *one.shape[axis + 1 :]) for one in tensors}
        if len(others) > 1:
            shapes = ", ".join(f"{one.dtype} {list(one.shape)}" for one in tensors)
            refuse(whole, f"its parts differ beside axis {axis}: {shapes}")
        for one in tensors:
            if one.shape[axis] % self.groups:
                refuse(whole, f"{one.shape[axis]} elements are not {self.groups} groups")
            bound.add(whole, one, self.groups * len(one.pieces))
        self._check_sizes(whole, [one.shape[axis] for one in tensors])
        counts = [one.shape[axis] // self.groups for one in tensors]
        pieces = [
            one.take(axis, group * count, count)
            for group in range(self.groups)
            for one, count in zip(tensors, counts, strict=True)
        ]
        return concat(pieces, axis)

    def _check_sizes(self, whole: str, counts: Sequence[int]) -> None:
        """Raises for parts that do not have their shares. The way back would cut elsewhere."""
        if self.sizes is None:
            return
        unit = self.unit or counts[0] // (self.sizes[0] * self.groups)
        expected = [size * unit * self.groups for size in self.sizes]
        if list(counts) != expected:
            of_unit = "" if self.unit is None else f" of {unit}"
            refuse(
                whole,
                f"its parts have {', '.join(map(str, counts))} elements, which are not {self.groups} groups of "
                f"shares {list(self.sizes)}{of_unit}",
            )

    def inverse(self) -> Rule:
        if self.sizes is None:
            raise MisuseError(
                f"the map's concat to `{self.to.text}` has no way back: give sizes, the parts' shares of its axis"
            )
        return Split(
            self.to, self.patterns, self.axis, self.groups, self.sizes, self.unit, optional=self.optional
        )


@dataclass(frozen=True, slots=True)
class Split(Rule):
    """Several tensors of one, along an axis: the inverse of :class:`Concat`."""

    pattern: Pattern
    to: tuple[Pattern, ...]
    axis: int = 0
    groups: int = 1
    #: Shares of the parts; default: equal ones.
    sizes: tuple[int, ...] | None = None
    #: Elements of a share in a group, if they are known.
    unit: int | None = None

    def apply(self, values: Values) -> Values:
        sizes = self.sizes or (1,) * len(self.to)
        made: Made = {}
        gone: set[str] = set()
        bound = _Bound("pieces", _MAX_PIECES, _FREE_PIECES)
        found = list(self._found(self.pattern, values))
        single = _single_along(self.axis, found, values)
        for path, match in found:
            names = [match.around(one.fill(match.captures)) for one in self.to]
            whole = untied(values, path)
            parts: Sequence[Value] = [whole] * len(names)
            if isinstance(whole, Arrangement) and path not in single:
                parts = self._cut(path, whole, sizes, bound)
            for name, part in zip(names, parts, strict=True):
                add(made, name, part, path)
            gone.add(path)
        return consumed(values, made, gone)

    def _cut(self, path: str, whole: Arrangement, sizes: Sequence[int], bound: _Bound) -> Sequence[Value]:
        axis = _axis(self.axis, len(whole.shape))
        n = whole.shape[axis]
        unit, rest = divmod(n, sum(sizes) * self.groups)
        if rest or self.unit not in (None, unit):
            of_unit = "" if self.unit is None else f" of {self.unit}"
            refuse(path, f"{n} elements are not {self.groups} groups of shares {list(sizes)}{of_unit}")
        bound.add(path, whole, self.groups * len(sizes) * len(whole.pieces))
        pieces: list[list[Arrangement]] = [[] for _ in sizes]
        at = 0
        for _ in range(self.groups):
            for part, size in zip(pieces, sizes, strict=True):
                part.append(whole.take(axis, at, size * unit))
                at += size * unit
        return [concat(part, axis) for part in pieces]

    def inverse(self) -> Rule:
        return Concat(
            self.to,
            self.pattern,
            self.axis,
            self.groups,
            self.sizes or (1,) * len(self.to),
            self.unit,
            optional=self.optional,
        )


@dataclass(frozen=True, slots=True)
class Stack(Rule):
    """One tensor of those that differ in one capture, its values 0, 1, 2, …: along a new axis."""

    pattern: Pattern
    to: Pattern
    over: str
    axis: int = 0

    def apply(self, values: Values) -> Values:
        sets: dict[str, dict[int, str]] = {}
        found = list(self._found(self.pattern, values))
        _check_slots(self.axis, self.axis, found, values)
        for path, match in found:
            whole = match.around(self.to.fill(match.captures))
            number = match.captures[self.over]
            if not number.isdecimal():
                refuse(path, f"{{{self.over}}} is {number!r}, not a number")
            if len(number) > _MAX_DIGITS:
                refuse(path, f"{{{self.over}}} has {len(number)} digits, more than {_MAX_DIGITS}")
            numbered = sets.setdefault(whole, {})
            other = numbered.setdefault(int(number), path)
            if other != path:
                refuse(
                    whole,
                    f"the map stacks `{other}` and `{path}` at the same place. Use all captures except "
                    f"{{{self.over}}} in `to`, or match fewer leaves",
                )
        made: Made = {}
        most = max(sets, key=lambda whole: len(sets[whole])) if sets else ""
        for whole, numbered in sets.items():
            if missing := _first_gaps(numbered):
                refuse(whole, f"of {{{self.over}}}, {', '.join(map(str, missing))} is missing")
            if len(numbered) < len(sets[most]):
                refuse(
                    whole,
                    f"it has {len(numbered)} of {{{self.over}}}, and `{most}` has {len(sets[most])}. Complete the "
                    "checkpoint, or stack the two by two rules",
                )
            parts = [untied(values, numbered[number]) for number in range(len(numbered))]
            if not all(isinstance(part, Arrangement) for part in parts):
                refuse(whole, "objects cannot be stacked")
            tensors = [part.insert(self.axis) for part in parts if isinstance(part, Arrangement)]
            if len({(one.dtype, one.shape) for one in tensors}) > 1:
                refuse(whole, "its parts differ in shape or dtype")
            made[whole] = (concat(tensors, self.axis), numbered[0])
        return consumed(values, made, {path for numbered in sets.values() for path in numbered.values()})

    def inverse(self) -> Rule:
        return Unstack(self.to, self.pattern, self.over, self.axis, optional=self.optional)


@dataclass(frozen=True, slots=True)
class Unstack(Rule):
    """Tensors along an axis of one, by number: the inverse of :class:`Stack`."""

    pattern: Pattern
    to: Pattern
    over: str
    axis: int = 0

    def apply(self, values: Values) -> Values:
        made: Made = {}
        gone: set[str] = set()
        leaves = _Bound("leaves", _MAX_LEAVES, _FREE_LEAVES)
        pieces = _Bound("pieces", _MAX_PIECES, _FREE_PIECES)
        found = list(self._found(self.pattern, values))
        _check_slots(self.axis, self.axis + 1, found, values)
        counts: dict[str, int] = {}
        for path, match in found:
            whole = untied(values, path)
            if not isinstance(whole, Arrangement) or self.axis >= len(whole.shape):
                refuse(path, f"it has no axis {self.axis} to be unstacked")
            count = counts.setdefault(parameter_of(path, match), whole.shape[self.axis])
            if count != whole.shape[self.axis]:
                _refuse_slot(
                    path, f"it has {whole.shape[self.axis]} elements along axis {self.axis}, not {count}"
                )
            leaves.add(path, whole, whole.shape[self.axis])
            pieces.add(path, whole, whole.shape[self.axis] * len(whole.pieces))
            names = [
                match.around(self.to.fill({**match.captures, self.over: str(number)}))
                for number in range(whole.shape[self.axis])
            ]
            for number, name in enumerate(names):
                add(made, name, whole.select(self.axis, number), path)
            gone.add(path)
        return consumed(values, made, gone)

    def inverse(self) -> Rule:
        return Stack(self.to, self.pattern, self.over, self.axis, optional=self.optional)


@dataclass(frozen=True, slots=True)
class Permute(Rule):
    """Another order of axes. Slots of one element stay as they are."""

    pattern: Pattern
    axes: tuple[int, ...]

    def apply(self, values: Values) -> Values:
        found = list(self._found(self.pattern, values))
        single = _single_slots(
            lambda shape: len(shape) == len(self.axes),
            f"does not fit axes {list(self.axes)}",
            found,
            values,
        )
        found = [(path, match) for path, match in found if path not in single]
        return changed(values, found, lambda path, tensor: tensor.permute(self.axes))

    def inverse(self) -> Rule:
        back = tuple(sorted(range(len(self.axes)), key=self.axes.__getitem__))
        return Permute(self.pattern, back, optional=self.optional)


@dataclass(frozen=True, slots=True)
class Crop(Rule):
    """The first elements along an axis: a vocabulary without its padding."""

    pattern: Pattern
    size: int
    axis: int = 0
    #: The number of elements before it, if it is known.
    source: int | None = None

    def apply(self, values: Values) -> Values:
        def cropped(path: str, tensor: Arrangement) -> Arrangement:
            count = tensor.shape[self.axis]
            if count < self.size or self.source not in (None, count):
                wanted = self.size if self.source is None else self.source
                refuse(path, f"it has {count} elements along axis {self.axis}, not {wanted}")
            return tensor.take(self.axis, 0, self.size)

        return changed(values, self._along(self.axis, self.pattern, values), cropped)

    def inverse(self) -> Rule:
        raise MisuseError(
            f"the map's crop of `{self.pattern.text}` has no way back: what it cuts off is lost"
        )


@dataclass(frozen=True, slots=True)
class Rotary(Rule):
    """Another order of the rows of a head: rotated pairs side by side, or in two halves."""

    pattern: Pattern
    heads: int
    to: Literal["halves", "pairs"]
    axis: int = 0

    def apply(self, values: Values) -> Values:
        pieces = _Bound("pieces", _MAX_PIECES, _FREE_PIECES)

        def moved(path: str, tensor: Arrangement) -> Arrangement:
            if not tensor.shape[self.axis]:
                return tensor
            rows, rest = divmod(tensor.shape[self.axis], self.heads)
            if rest or rows % 2:
                refuse(path, f"{tensor.shape[self.axis]} rows are not {self.heads} heads of an even size")
            half = rows // 2
            count = self.heads * (2 if self.to == "halves" else half)
            pieces.add(path, tensor, count * len(tensor.pieces))
            parts = []
            for head in range(0, self.heads * rows, rows):
                if self.to == "halves":
                    parts += [
                        tensor.take(self.axis, head, half, 2),
                        tensor.take(self.axis, head + 1, half, 2),
                    ]
                else:
                    parts += [tensor.take(self.axis, head + i, 2, half) for i in range(half)]
            return concat(parts, self.axis)

        return changed(values, self._along(self.axis, self.pattern, values), moved)

    def inverse(self) -> Rule:
        back: Literal["halves", "pairs"] = "pairs" if self.to == "halves" else "halves"
        return Rotary(self.pattern, self.heads, back, self.axis, optional=self.optional)


@dataclass(frozen=True, slots=True)
class Tie(Rule):
    """One more leaf with the value of another."""

    pattern: Pattern
    to: Pattern

    def apply(self, values: Values) -> Values:
        found = list(self._found(self.pattern, values))
        after = dict(values)
        for path, match in found:
            name = match.around(self.to.fill(match.captures))
            if name in after:
                refuse(name, f"the map ties it to `{path}`, and it is stored too")
            after[name] = Tied(path)
        return after

    def inverse(self) -> Rule:
        _same_captures(self.pattern, self.to, "tie")
        return Untie(self.to, self.pattern, optional=self.optional)


@dataclass(frozen=True, slots=True)
class Untie(Rule):
    """One leaf of two with the same value: the inverse of :class:`Tie`. A file of another library
    may hold only one of the two, under either name."""

    _takes: ClassVar[tuple[str, ...]] = ("pattern", "to")
    pattern: Pattern
    to: Pattern

    def apply(self, values: Values) -> Values:
        return self.joined(values)[0]

    def joined(self, values: Values) -> tuple[Values, dict[str, list[str]]]:
        own = {path: match.around(self.to.fill(match.captures)) for path, match in self.pattern.among(values)}
        if not own:
            # Raises if neither of the two is there.
            list(self._found(self.to, values))
        both: dict[str, list[str]] = {}
        for path, kept in own.items():
            if kept in values:
                both.setdefault(kept, [kept]).append(path)
        after = consumed(values, {}, {path for _, *paths in both.values() for path in paths})
        return renamed(after, {path: kept for path, kept in own.items() if kept not in values}), both

    def inverse(self) -> Rule:
        return Tie(self.to, self.pattern, optional=self.optional)


@dataclass(frozen=True, slots=True)
class Copy(Rule):
    """One more leaf with the value of another, which is written again, for each leaf that another
    pattern matches."""

    _takes: ClassVar[tuple[str, ...]] = ("pattern", "beside")
    pattern: Pattern
    to: Pattern
    #: The leaves beside which the new ones are. Its captures are those of ``to``.
    beside: Pattern

    def apply(self, values: Values) -> Values:
        after = dict(values)
        for _, match in self._found(self.beside, values):
            name = match.around(self.to.fill(match.captures))
            source = match.around(self.pattern.fill(match.captures))
            if source not in values:
                if self.optional:
                    continue
                refuse(name, f"the map copies it from `{source}`, which is not there")
            if name in after:
                refuse(name, f"the map copies it from `{source}`, and it is stored too")
            after[name] = untied(values, source)
        return after

    def inverse(self) -> Rule:
        raise MisuseError(
            f"the map's copy to `{self.to.text}` has no way back: drop the copy by another rule"
        )


@dataclass(frozen=True, slots=True)
class Drop(Rule):
    """Leaves that are left out."""

    pattern: Pattern

    def apply(self, values: Values) -> Values:
        return consumed(values, {}, {path for path, _ in self._found(self.pattern, values)})

    def inverse(self) -> Rule:
        raise MisuseError(f"the map's drop of `{self.pattern.text}` has no way back")


@dataclass(frozen=True, slots=True)
class Keep(Rule):
    """The only leaves that are not left out."""

    patterns: tuple[Pattern, ...]

    def taken(self) -> tuple[Pattern, ...]:
        return ()

    def apply(self, values: Values) -> Values:
        kept = {path for pattern in self.patterns for path, _ in self._found(pattern, values)}
        return consumed(values, {}, {path for path in values if path not in kept})

    def inverse(self) -> Rule:
        raise MisuseError(f"the map's keep of `{self.patterns[0].text}` has no way back")


class _Bound:
    """The count of what a rule makes, and its limit for the tensors so far."""

    def __init__(self, what: str, most: int, free: int) -> None:
        self._what = what
        self._most = most
        self._count, self._allowed = 0, free

    def add(self, path: str, tensor: Arrangement, count: int) -> None:
        """Counts what is made of a tensor. Raises if it is too much."""
        self._count += count
        self._allowed += prod(tensor.shape)
        most = min(self._most, self._allowed)
        if self._count > most:
            refuse(
                path,
                f"the rule makes {self._count} {self._what} up to this leaf, more than {most}. "
                "Match fewer leaves, or correct the axis",
            )


def _first_gaps(numbers: Iterable[int]) -> list[int]:
    """The first numbers that are missing below the largest one."""
    missing: list[int] = []
    expected = 0
    for number in sorted(numbers):
        missing += range(expected, min(number, expected + _LISTED - len(missing)))
        expected = number + 1
    return missing


def _axis(axis: int, ndim: int) -> int:
    return axis + ndim if axis < 0 else axis


def _single_along(axis: int, found: Sequence[tuple[str, Match]], values: Values) -> set[str]:
    """The slots of one element, for an operation along an axis; see :func:`_single_slots`."""
    return _single_slots(lambda shape: -len(shape) <= axis < len(shape), f"has no axis {axis}", found, values)


def _single_slots(
    fits: Callable[[tuple[int, ...]], bool],
    how: str,
    found: Sequence[tuple[str, Match]],
    values: Values,
) -> set[str]:
    """The slots of one element, such as step counts, which an operation leaves as they are. Any
    other slot has the shape of its parameter. Raises for a leaf that cannot be changed.

    Args:
        fits: true for a shape that the operation takes.
        how: what is wrong with another shape, for messages.
    """
    slots = {path: slot for path, match in found if (slot := slot_name(match)) is not None}
    parameters, others = _shapes(found, slots, values) if slots else ({}, {})
    single: set[str] = set()
    for path, match in found:
        value, slot = untied(values, path), slots.get(path)
        shape = value.shape if isinstance(value, Arrangement) else None
        fitting = shape is not None and fits(shape)
        if slot is not None:
            name = parameter_of(path, match)
            shapes = parameters.get(name)
            is_count = SLOTS.get(slot) == 0
            is_other = slot in SLOTS if shapes is None else shape not in shapes
            is_known = shapes is not None or name in others
            if _is_single(shape) and is_known and (is_count or is_other or not fitting):
                single.add(path)
                continue
            if is_factor(match):
                _refuse_slot(path, "it is a factor of a second moment")
            if shapes is not None and shape not in shapes:
                expected = " or ".join(sorted(str(list(one)) for one in shapes))
                _refuse_slot(path, f"its shape is not {expected}, that of its parameter")
        if not fitting:
            _refuse_unfit(path, value, how)
    return single


def _is_single(shape: tuple[int, ...] | None) -> bool:
    """True for an object, and for a shape of at most one element."""
    return shape is None or prod(shape) <= 1


def _check_slots(axis: int, least: int, found: Sequence[tuple[str, Match]], values: Values) -> None:
    """Raises for slots that cannot be stacked along an axis, or unstacked, as their parameter of at
    least ``least`` axes is. All slots can along axis 0."""
    if axis:
        for path in _single_slots(lambda shape: len(shape) >= least, f"has no axis {axis}", found, values):
            _refuse_slot(path, f"it has one element, and no axis {axis}")


def _shapes(
    found: Iterable[tuple[str, Match]], slots: Container[str], values: Values
) -> tuple[dict[str, set[tuple[int, ...]]], dict[str, set[tuple[int, ...]]]]:
    """The shapes of parameters by name, and those of slots with more than one element."""
    parameters: dict[str, set[tuple[int, ...]]] = {}
    others: dict[str, set[tuple[int, ...]]] = {}
    for path, match in found:
        value = untied(values, path)
        if isinstance(value, Arrangement):
            if path not in slots:
                parameters.setdefault(parameter_of(path, match), set()).add(value.shape)
            elif prod(value.shape) > 1:
                others.setdefault(parameter_of(path, match), set()).add(value.shape)
    return parameters, others


def _refuse_slot(path: str, why: str) -> NoReturn:
    refuse(
        path,
        f"{why}, so this slot of an optimizer cannot follow its parameter. Drop it by a rule before this one, "
        "or leave it out of the checkpoint",
    )


def _refuse_unfit(path: str, value: Value, how: str) -> NoReturn:
    what = f"its shape {list(value.shape)} {how}" if isinstance(value, Arrangement) else "it is no tensor"
    refuse(path, f"{what}. Correct the rule, narrow its pattern, or drop this leaf by a rule before it")


def _same_captures(one: Pattern, other: Pattern, what: str) -> None:
    if set(one.captures) != set(other.captures):
        raise MisuseError(
            f"the map's {what} of `{one.text}` to `{other.text}` has no way back: the captures of the two differ"
        )
