"""The operations of a map that compute values. The engine evaluates them, region by region."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache
from math import prod, sqrt
from typing import ClassVar, Literal, NoReturn

from ..errors import MisuseError
from .arrangement import Arrangement, Computed, concat
from .patterns import Match, Pattern
from .rules import Crop, Rule
from .slots import SLOTS, Slots
from .values import Made, Values, changed, consumed, refuse, untied

#: The dtypes that operations compute, and those that they also read, with the bits of exponent and
#: fraction.
FLOATS = {"float16": (5, 10), "bfloat16": (8, 7), "float32": (8, 23), "float64": (11, 52)}
READ = {**FLOATS, "float8_e4m3fn": (4, 3), "float8_e5m2": (5, 2), "float8_e8m0fnu": (8, 0)}


@dataclass(frozen=True, slots=True)
class _Elementwise(Rule):
    """An operation on each element of each matched tensor."""

    pattern: Pattern
    _takes_tensors_only: ClassVar[bool] = False

    def apply(self, values: Values) -> Values:
        found = self._leaves(values)
        known = Slots(values)
        slots = {path: known.of(path, match) for path, match in found}
        for path, slot in slots.items():
            if (
                self._takes_tensors_only
                and slot is None
                and not isinstance(untied(values, path), Arrangement)
            ):
                refuse(path, "it is an object, which a map does not compute")
        return changed(values, found, lambda path, tensor: self._change(path, tensor, slots[path]))

    def _leaves(self, values: Values) -> list[tuple[str, Match]]:
        """The leaves that it changes."""
        return list(self._found(self.pattern, values))

    def _change(self, path: str, tensor: Arrangement, slot: str | None) -> Arrangement:
        """The tensor after it. Slots without elements of a parameter's gradient, such as step
        counts, stay as they are."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class Cast(_Elementwise):
    """Parameters in another floating-point dtype. Slots keep theirs."""

    to: str
    #: Their dtype, for the way back.
    source: str | None = None

    def _change(self, path: str, tensor: Arrangement, slot: str | None) -> Arrangement:
        if slot in SLOTS or not re.match("b?float", tensor.dtype):
            return tensor
        if self.source is not None and tensor.dtype != self.source:
            refuse(path, f"the map casts it from {self.source}, and it is {tensor.dtype}")
        return cast(path, tensor, self.to)

    def inverse(self) -> Rule:
        if self.source is None:
            _no_way_back("cast", self.pattern, "give `from`, the dtype before it")
        if any(a > b for a, b in zip(READ[self.source], FLOATS[self.to], strict=True)):
            _no_way_back("cast", self.pattern, f"{self.to} does not hold all values of {self.source}")
        if self.source not in FLOATS:
            _no_way_back("cast", self.pattern, f"maps do not compute {self.source}")
        return Cast(self.pattern, self.source, self.to, optional=self.optional)


@dataclass(frozen=True, slots=True)
class Scale(_Elementwise):
    """Parameters times a constant, or divided by it. The moments of an optimizer follow: a gradient
    by ``s * x`` is the one by ``x``, divided by ``s``."""

    _takes_tensors_only: ClassVar[bool] = True
    by: float
    power: Literal[1, -1] = 1

    def _change(self, path: str, tensor: Arrangement, slot: str | None) -> Arrangement:
        power = 1 if slot is None else _known_slot("scale", path, slot, tensor)
        if not power:
            return tensor
        _check_float("scale", path, tensor)
        power *= self.power
        return _computed(tensor, "scale" if power > 0 else "divide", self.by ** abs(power))

    def inverse(self) -> Rule:
        return Scale(self.pattern, self.by, -1 if self.power == 1 else 1, optional=self.optional)


@dataclass(frozen=True, slots=True)
class Add(_Elementwise):
    """Parameters plus a constant. Gradients are the same, so moments of an optimizer are too."""

    _takes_tensors_only: ClassVar[bool] = True
    value: float

    def _change(self, path: str, tensor: Arrangement, slot: str | None) -> Arrangement:
        power = 1 if slot is None else _known_slot("add", path, slot, tensor)
        if power <= 0:
            return tensor
        _check_float("add", path, tensor)
        return _computed(tensor, "add", self.value)

    def inverse(self) -> Rule:
        return Add(self.pattern, -self.value, optional=self.optional)


@dataclass(frozen=True, slots=True)
class Pad(_Elementwise):
    """More elements along an axis, all with one value: a vocabulary with padding. Moments of an
    optimizer are padded with zeros."""

    size: int
    axis: int = 0
    value: float = 0.0
    #: The number of elements before it, for the way back.
    source: int | None = None

    def _leaves(self, values: Values) -> list[tuple[str, Match]]:
        return self._along(self.axis, self.pattern, values)

    def _change(self, path: str, tensor: Arrangement, slot: str | None) -> Arrangement:
        count = tensor.shape[self.axis]
        if self.source is not None and count != self.source:
            refuse(path, f"it has {count} elements along axis {self.axis}, not {self.source}")
        if count > self.size:
            refuse(path, f"it has {count} elements along axis {self.axis}, more than {self.size}")
        value = self.value
        if value and slot is not None and _known_slot("pad", path, slot, tensor) < 0:
            value = 0.0
        if value and tensor.dtype not in FLOATS:
            refuse(path, f"it is {tensor.dtype}, which a map pads with zeros only")
        if count == self.size:
            return tensor
        shape = (*tensor.shape[: self.axis], self.size - count, *tensor.shape[self.axis + 1 :])
        return concat([tensor, Computed(tensor.dtype, shape, "fill", (), value).whole()], self.axis)

    def inverse(self) -> Rule:
        if self.source is None:
            _no_way_back("pad", self.pattern, "give `from`, the number of elements before it")
        return Crop(self.pattern, self.source, self.axis, self.size, optional=self.optional)


@dataclass(frozen=True, slots=True)
class Dequantise(Rule):
    """Weights of 8-bit floats times the scales of their blocks, which are a tensor of their own."""

    _takes: ClassVar[tuple[str, ...]] = ("pattern", "scale")
    pattern: Pattern
    scale: Pattern
    #: Elements of a block along each axis; 0: the whole axis.
    block: tuple[int, ...] = (128, 128)
    to: str = "bfloat16"

    def apply(self, values: Values) -> Values:
        made: Made = {}
        gone: set[str] = set()
        blocks_of = cache(self._blocks)
        slots = Slots(values)
        for path, match in self._found(self.pattern, values):
            if slots.of(path, match) in SLOTS:
                continue
            weight, other = untied(values, path), match.around(self.scale.fill(match.captures))
            if other not in values:
                if isinstance(weight, Arrangement) and weight.dtype.startswith("float8"):
                    refuse(path, f"its scales `{other}` are missing; give their path as `scale`")
                continue
            scales = untied(values, other)
            if not isinstance(weight, Arrangement):
                refuse(path, "it is an object, which maps cannot dequantise")
            if not isinstance(scales, Arrangement):
                refuse(other, f"it is an object, and not the scales of `{path}`")
            if weight.dtype not in READ or scales.dtype not in READ:
                name, tensor = (path, weight) if weight.dtype not in READ else (other, scales)
                refuse(name, f"it is {tensor.dtype}, which maps cannot dequantise")
            if not weight.shape or len(weight.shape) != len(self.block):
                refuse(path, f"its shape {list(weight.shape)} has no blocks of {list(self.block)}")
            block, blocks = blocks_of(weight.shape)
            while prod(blocks) == prod(scales.shape) == 1 and len(scales.shape) < len(blocks):
                # One scale for the whole tensor.
                scales = scales.insert(0)
            if scales.shape != blocks:
                refuse(
                    other,
                    f"its shape is {list(scales.shape)}; `{path}` has {list(blocks)} blocks of {list(block)}",
                )
            computed = Computed(self.to, weight.shape, "dequantise", (weight, scales), block=block)
            made[path] = (computed.whole(), path)
            gone |= {path, other}
        if not made and not self.optional:
            _found_none("dequantise", self.pattern, f"scales `{self.scale.text}`")
        return consumed(values, made, gone)

    def _blocks(self, shape: tuple[int, ...]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """The block of a tensor, and its number of blocks along each axis."""
        block = tuple(size or max(n, 1) for n, size in zip(shape, self.block, strict=True))
        return block, tuple(-(-n // size) for n, size in zip(shape, block, strict=True))

    def inverse(self) -> Rule:
        _no_way_back("dequantise", self.pattern, "maps do not quantise")


@dataclass(frozen=True, slots=True)
class Merge(Rule):
    """Weights with their low-rank adapters: ``W + scale * B @ A``."""

    _takes: ClassVar[tuple[str, ...]] = ("pattern", "a", "b")
    pattern: Pattern
    a: Pattern
    b: Pattern
    #: The factor, or with ``alpha``, that over the rank, or over its square root.
    scale: float
    by_rank: Literal["no", "rank", "root"] = "no"

    def apply(self, values: Values) -> Values:
        made: Made = {}
        gone: set[str] = set()
        slots = Slots(values)
        for path, match in self._found(self.pattern, values):
            if slots.of(path, match) in SLOTS:
                continue
            names = [match.around(one.fill(match.captures)) for one in (self.b, self.a)]
            missing = [name for name in names if name not in values]
            if len(missing) == 2:
                continue
            if missing:
                refuse(path, f"of its adapter, `{missing[0]}` is missing")
            parts: list[Arrangement] = []
            for name in (path, *names):
                part = untied(values, name)
                if not isinstance(part, Arrangement) or part.dtype not in FLOATS:
                    kind = part.dtype if isinstance(part, Arrangement) else "an object"
                    refuse(name, f"it is {kind}, which maps cannot merge")
                parts.append(part)
            weight, b, a = parts
            rank = a.shape[0] if a.shape else 0
            if (
                not rank
                or len(a.shape) != 2
                or b.shape != (*weight.shape[:1], rank)
                or weight.shape[1:] != a.shape[1:]
            ):
                shapes = f"{list(b.shape)} and {list(a.shape)}"
                refuse(path, f"its shape {list(weight.shape)} is not that of adapters of {shapes}")
            over = {"no": 1.0, "rank": float(rank), "root": sqrt(rank)}[self.by_rank]
            merged = Computed(weight.dtype, weight.shape, "merge", (weight, b, a), self.scale / over)
            made[path] = (merged.whole(), path)
            gone |= {path, *names}
        if not made and not self.optional:
            _found_none("merge", self.pattern, f"adapters `{self.a.text}`")
        return consumed(values, made, gone)

    def inverse(self) -> Rule:
        _no_way_back("merge", self.pattern, "a merged weight does not say what its adapter was")


def cast(path: str, tensor: Arrangement, to: str) -> Arrangement:
    """A tensor in another dtype."""
    if tensor.dtype not in READ:
        refuse(path, f"it is {tensor.dtype}, which maps cannot cast")
    return tensor if tensor.dtype == to else _computed(tensor, "cast", 0.0, to)


def _computed(tensor: Arrangement, operation: str, constant: float, dtype: str | None = None) -> Arrangement:
    return Computed(dtype or tensor.dtype, tensor.shape, operation, (tensor,), constant).whole()


def _known_slot(operation: str, path: str, slot: str, tensor: Arrangement) -> int:
    """The power that a slot follows; zero for a count. Raises for an unknown one."""
    power = SLOTS.get(slot, 0)
    if not power and tensor.shape:
        refuse(
            path,
            f"the map's {operation} does not know what the slot `{slot}` of its optimizer holds. "
            "Drop it by a rule before this one, or match the parameter's whole path",
        )
    return power


def _check_float(operation: str, path: str, tensor: Arrangement) -> None:
    if tensor.dtype not in FLOATS:
        refuse(path, f"it is {tensor.dtype}; {operation} takes {', '.join(FLOATS)}. Cast it first")


def _found_none(operation: str, pattern: Pattern, what: str) -> NoReturn:
    raise MisuseError(
        f"the map's {operation} of `{pattern.text}` finds no {what}; correct it, or set optional = true"
    )


def _no_way_back(operation: str, pattern: Pattern, why: str) -> NoReturn:
    raise MisuseError(f"the map's {operation} of `{pattern.text}` has no way back: {why}")
