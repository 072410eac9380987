"""Rules of a map out of plain tables, as TOML gives them."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Mapping
from math import isfinite
from typing import Literal, NoReturn, TypeAlias, TypeGuard, TypeVar

from .._checks import meant, shown
from ..errors import MisuseError
from ..formats.description import MAX_SIZE
from .completeness import Complete
from .computing import FLOATS, READ, Add, Cast, Dequantise, Merge, Pad, Scale
from .parameters import evaluated, names
from .patterns import Pattern
from .rules import Concat, Copy, Crop, Drop, Keep, Permute, Rename, Rotary, Rule, Split, Stack, Tie, Unstack

_T = TypeVar("_T")
#: The parameters of a map. ``None``: not known yet.
Numbers: TypeAlias = Mapping[str, int | None]

#: A capture without its closing brace.
_UNCLOSED = re.compile(r"\{[A-Za-z_]\w*(?:\.\.\.)?(?!\w|\.\.\.|\})")
#: Negates the condition of a rule.
NOT = "not "
#: A capture with a bound or a shift: all before that number, and the number.
_BOUND = re.compile(r"(\{[A-Za-z_]\w*(?:<|>=|\+))([^{}]*)\}")
#: How much a name resembles an operation that is meant.
_LIKENESS = 0.8


class _Table:
    """The entries of a rule, each of which is used once."""

    def __init__(self, called: str, entries: Mapping[str, object], numbers: Numbers) -> None:
        self._called = called
        self._entries = dict(entries)
        self._numbers = numbers

    def wrong(self, what: str) -> NoReturn:
        raise MisuseError(f"{self._called} of the map: {what}")

    def take(self, name: str, kind: Callable[[object], _T], default: object = ...) -> _T:
        """An entry, as ``kind`` understands it."""
        value = self._entries.pop(name, default)
        if value is ...:
            self.wrong(f"`{name}` is missing")
        if value is default:
            return value  # type: ignore[return-value]  # a default is of the kind
        try:
            if self._numbers and kind in _OF_NUMBERS:
                value = self._filled(value)
            elif self._numbers and kind in _OF_PATTERNS:
                value = self._bounded(value)
            return kind(value)
        except (TypeError, ValueError, OverflowError) as error:
            self.wrong(f"`{name}` cannot be {shown(value)}: {error}")

    def _filled(self, value: object) -> object:
        """A number, or numbers in a list or table, with the values of its expressions."""
        if isinstance(value, list):
            return [self._filled(one) for one in value]
        if isinstance(value, Mapping):
            return {key: self._filled(one) for key, one in value.items()}
        return self.value(value) if isinstance(value, str) else value

    def _bounded(self, value: object) -> object:
        """A pattern, or a list of patterns, with the values of the numbers in its captures."""
        if isinstance(value, list):
            return [self._bounded(one) for one in value]
        if not isinstance(value, str):
            return value
        return _BOUND.sub(lambda found: f"{found[1]}{self.value(found[2])}}}", value)

    def value(self, expression: str) -> int:
        """The value of an expression over the parameters of the map. It is 1 if one of them is not
        known. Raises ``ValueError``."""
        known: dict[str, int] = {}
        for name in names(expression):
            if name not in self._numbers:
                raise ValueError(f"the map has no parameter {name}{meant(name, self._numbers)}")
            number = self._numbers[name]
            if number is None:
                return 1
            known[name] = number
        return evaluated(expression, known)

    def end(self) -> None:
        """Raises if an entry is left."""
        if self._entries:
            self.wrong(f"`{next(iter(self._entries))}` is not known here")


def rule(number: str, entries: Mapping[str, object], numbers: Numbers) -> Rule:
    """A rule. ``number`` is for messages, ``numbers`` are the parameters of the map."""
    operations = [name for name in entries if name in _OPERATIONS]
    if len(operations) > 1 and "scale" in operations:
        # It is also a key of others.
        operations.remove("scale")
    if operations == ["scale"]:
        others = [one for one in _OPERATIONS if one != "scale"]
        for name in entries:
            if near := difflib.get_close_matches(str(name), others, 1, _LIKENESS):
                raise MisuseError(
                    f"rule {number} of the map: `{name}` is no operation; did you mean {near[0]}?"
                )
    if len(operations) != 1:
        near = [found for name in entries for found in difflib.get_close_matches(str(name), _OPERATIONS, 1)]
        hint = f"; did you mean {near[0]}?" if near and not operations else ""
        raise MisuseError(
            f"rule {number} of the map has {len(operations)} operations ({', '.join(_OPERATIONS)}); one is expected{hint}"
        )
    table = _Table(f"rule {number}", entries, numbers)
    made = _OPERATIONS[operations[0]](table)
    table.end()
    return made


def complete(number: str, entries: Mapping[str, object], numbers: Numbers) -> Complete:
    """Returns the leaves of a complete model, from an entry of ``complete``."""
    table = _Table(f"`complete` {number}", entries, numbers)
    patterns, counts = table.take("each", _patterns), table.take("counts", _counts, {})
    table.end()
    _check_captures(table, patterns[:1], patterns)
    _check_captures(table, patterns, patterns[:1])
    if unknown := set(counts) - set(patterns[0].captures):
        table.wrong(f"`counts` has {min(unknown)}, which is no capture of `each`")
    return Complete(patterns, tuple(counts.items()))


def condition(called: str, expression: str, numbers: Numbers) -> bool:
    """True if the condition of a rule holds: its expression is not zero, or with ``not`` before it,
    is zero."""
    table = _Table(called, {}, numbers)
    plain = expression.removeprefix(NOT)
    try:
        return (table.value(plain) != 0) == (plain == expression)
    except ValueError as error:
        table.wrong(f"`when` cannot be {shown(expression)}: {error}")


def pattern_of(value: object) -> Pattern:
    """A pattern. Raises ``TypeError`` or ``ValueError``."""
    if not isinstance(value, str):
        raise TypeError("it is a leaf path with captures such as {i}")
    if wrong := next((one for one in _BOUND.finditer(value) if not one[2].isdecimal()), None):
        raise ValueError(f"{wrong[0]} takes a number, or an expression over parameters")
    if found := _UNCLOSED.search(_BOUND.sub("", value)):
        raise ValueError(f"{found[0]} has no closing brace")
    return Pattern(value)


def _patterns(value: object) -> tuple[Pattern, ...]:
    if not isinstance(value, (list, tuple)) or not value:
        raise TypeError("it is a list of leaf paths")
    return tuple(pattern_of(one) for one in value)


def _is_integer(value: object, least: int | None = None) -> TypeGuard[int]:
    if not isinstance(value, int) or isinstance(value, bool):
        return False
    if not -MAX_SIZE < value < MAX_SIZE:
        raise ValueError("it is an integer below 2^62")
    return least is None or value >= least


def _integer(value: object) -> int:
    if not _is_integer(value):
        raise TypeError("it is an integer")
    return value


def _positive(value: object) -> int:
    if not _is_integer(value, 1):
        raise ValueError("it is an integer, at least 1")
    return value


def _not_negative(value: object) -> int:
    if not _is_integer(value, 0):
        raise ValueError("it is an integer, at least 0")
    return value


def _integers(value: object, least: int) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)) or not value or not all(_is_integer(one, least) for one in value):
        raise ValueError(f"it is a list of integers, each at least {least}")
    return tuple(value)


def _sizes(value: object) -> tuple[int, ...]:
    return _integers(value, 1)


def _blocks(value: object) -> tuple[int, ...]:
    return _integers(value, 0)


def _counts(value: object) -> dict[str, int]:
    if not isinstance(value, Mapping) or not all(_is_integer(one, 0) for one in value.values()):
        raise TypeError("it is a table of captures with their numbers")
    return dict(value)


def _order(value: object) -> tuple[int, ...]:
    order = value if isinstance(value, (list, tuple)) and all(map(_is_integer, value)) else [-1]
    if sorted(order) != list(range(len(order))):
        raise ValueError("it is a list of all axes, such as [1, 0]")
    return tuple(order)


def _truth(value: object) -> bool:
    if not isinstance(value, int):
        raise TypeError("it is true or false, or an expression")
    return bool(value)


def _flag(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("it is true or false")
    return value


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("it is text")
    return value


def _rotated(value: object) -> Literal["halves", "pairs"]:
    if value == "halves":
        return "halves"
    if value == "pairs":
        return "pairs"
    raise ValueError("it is halves or pairs")


def _number(value: object) -> float:
    if not isinstance(value, (int, float)) or isinstance(value, bool):
        raise TypeError("it is a number")
    return float(value)


def _factor(value: object) -> float:
    """A number whose square is a float32 and is not zero."""
    factor = _number(value)
    if not 1e-18 < abs(factor) < 1e18:
        raise ValueError("it is a number between 1e-18 and 1e18, or the negative of one")
    return factor


def _finite(value: object) -> float:
    number = _number(value)
    if not isfinite(number):
        raise ValueError("it is a finite number")
    return number


def _read_dtype(value: object) -> str:
    if not isinstance(value, str) or value not in READ:
        raise ValueError(f"it is one of {', '.join(READ)}")
    return value


def _dtype(value: object) -> str:
    if not isinstance(value, str) or value not in FLOATS:
        raise ValueError(f"it is one of {', '.join(FLOATS)}")
    return value


def _optional(table: _Table) -> bool:
    return table.take("optional", _truth, False)


def _rename(table: _Table) -> Rule:
    found = Rename(
        table.take("rename", pattern_of),
        table.take("to", pattern_of),
        table.take("beside", pattern_of, None),
        optional=_optional(table),
    )
    _check_captures(table, (found.pattern,), (found.to, *filter(None, [found.beside])))
    return found


def _concat(table: _Table) -> Rule:
    found = Concat(
        table.take("concat", _patterns),
        table.take("to", pattern_of),
        table.take("axis", _integer, 0),
        table.take("groups", _positive, 1),
        table.take("sizes", _sizes, None),
        table.take("unit", _positive, None),
        optional=_optional(table),
    )
    _check_captures(table, found.patterns, (found.to,))
    _check_sizes(table, found, found.patterns)
    return found


def _split(table: _Table) -> Rule:
    found = Split(
        table.take("split", pattern_of),
        table.take("to", _patterns),
        table.take("axis", _integer, 0),
        table.take("groups", _positive, 1),
        table.take("sizes", _sizes, None),
        table.take("unit", _positive, None),
        optional=_optional(table),
    )
    _check_captures(table, (found.pattern,), found.to)
    _check_sizes(table, found, found.to)
    return found


def _stack(table: _Table) -> Rule:
    found = Stack(
        table.take("stack", pattern_of),
        table.take("to", pattern_of),
        table.take("over", _text),
        table.take("axis", _not_negative, 0),
        optional=_optional(table),
    )
    if found.over not in found.pattern.captures or found.over in found.to.captures:
        table.wrong(f"{{{found.over}}} is a capture of `stack`, and none of `to`")
    _check_captures(table, (found.pattern,), (found.to,))
    return found


def _unstack(table: _Table) -> Rule:
    found = Unstack(
        table.take("unstack", pattern_of),
        table.take("to", pattern_of),
        table.take("over", _text),
        table.take("axis", _not_negative, 0),
        optional=_optional(table),
    )
    if found.over not in found.to.captures or found.over in found.pattern.captures:
        table.wrong(f"{{{found.over}}} is a capture of `to`, and none of `unstack`")
    unknown = set(found.to.captures) - {*found.pattern.captures, found.over}
    if unknown:
        table.wrong(f"`to` has the capture {{{min(unknown)}}}, which `unstack` does not have")
    return found


def _permute(table: _Table) -> Rule:
    return Permute(table.take("permute", pattern_of), table.take("axes", _order), optional=_optional(table))


def _crop(table: _Table) -> Rule:
    return Crop(
        table.take("crop", pattern_of),
        table.take("size", _positive),
        table.take("axis", _not_negative, 0),
        optional=_optional(table),
    )


def _rotary(table: _Table) -> Rule:
    pattern, heads = table.take("rotary", pattern_of), table.take("heads", _positive)
    to, axis = table.take("to", _rotated), table.take("axis", _not_negative, 0)
    return Rotary(pattern, heads, to, axis, optional=_optional(table))


def _tie(table: _Table) -> Rule:
    found = Tie(table.take("tie", pattern_of), table.take("to", pattern_of), optional=_optional(table))
    _check_captures(table, (found.pattern,), (found.to,))
    return found


def _copy(table: _Table) -> Rule:
    pattern, to, beside = (table.take(name, pattern_of) for name in ("copy", "to", "beside"))
    _check_captures(table, (beside,), (pattern, to))
    return Copy(pattern, to, beside, optional=_optional(table))


def _drop(table: _Table) -> Rule:
    return Drop(table.take("drop", pattern_of), optional=_optional(table))


def _keep(table: _Table) -> Rule:
    return Keep(table.take("keep", _patterns), optional=_optional(table))


def _cast(table: _Table) -> Rule:
    pattern, to = table.take("cast", pattern_of), table.take("to", _dtype)
    return Cast(pattern, to, table.take("from", _read_dtype, None), optional=_optional(table))


def _scale(table: _Table) -> Rule:
    return Scale(table.take("scale", pattern_of), table.take("by", _factor), optional=_optional(table))


def _add(table: _Table) -> Rule:
    return Add(table.take("add", pattern_of), table.take("value", _finite), optional=_optional(table))


def _pad(table: _Table) -> Rule:
    found = Pad(
        table.take("pad", pattern_of),
        table.take("size", _positive),
        table.take("axis", _not_negative, 0),
        table.take("value", _number, 0.0),
        table.take("from", _positive, None),
        optional=_optional(table),
    )
    if found.source is not None and found.source > found.size:
        table.wrong(f"`from` is {found.source}, more than `size`, {found.size}")
    return found


def _dequantise(table: _Table) -> Rule:
    found = Dequantise(
        table.take("dequantise", pattern_of),
        table.take("scale", pattern_of),
        table.take("block", _blocks, (128, 128)),
        table.take("to", _dtype, "bfloat16"),
        optional=_optional(table),
    )
    _check_captures(table, (found.pattern,), (found.scale,))
    return found


def _merge(table: _Table) -> Rule:
    pattern, a, b = (table.take(name, pattern_of) for name in ("merge", "a", "b"))
    alpha, scale = table.take("alpha", _finite, None), table.take("scale", _finite, None)
    is_root = table.take("rslora", _flag, False)
    if (alpha is None) == (scale is None) or (is_root and alpha is None):
        table.wrong("a merge has either `alpha`, perhaps with `rslora`, or `scale`")
    _check_captures(table, (pattern,), (a, b))
    optional = _optional(table)
    if alpha is None:
        return Merge(pattern, a, b, scale or 0.0, optional=optional)
    return Merge(pattern, a, b, alpha, "root" if is_root else "rank", optional=optional)


#: The kinds of entries that may be expressions, or patterns with expressions.
_OF_NUMBERS = (_integer, _positive, _not_negative, _sizes, _blocks, _counts, _truth)
_OF_PATTERNS = (pattern_of, _patterns)


def _check_captures(table: _Table, sources: tuple[Pattern, ...], targets: tuple[Pattern, ...]) -> None:
    """Raises where a capture of a new path has no value."""
    for source in sources:
        for target in targets:
            unknown = set(target.captures) - set(source.captures)
            if unknown:
                table.wrong(
                    f"`{target.text}` has the capture {{{min(unknown)}}}, which `{source.text}` lacks"
                )


def _check_sizes(table: _Table, found: Concat | Split, parts: tuple[Pattern, ...]) -> None:
    if found.sizes is not None and len(found.sizes) != len(parts):
        table.wrong(f"{len(found.sizes)} sizes for {len(parts)} parts")
    if found.sizes is None and found.unit is not None:
        table.wrong("`unit` needs `sizes`, the shares that have so many elements")


_OPERATIONS: Mapping[str, Callable[[_Table], Rule]] = {
    "rename": _rename,
    "concat": _concat,
    "split": _split,
    "stack": _stack,
    "unstack": _unstack,
    "permute": _permute,
    "crop": _crop,
    "pad": _pad,
    "rotary": _rotary,
    "tie": _tie,
    "copy": _copy,
    "drop": _drop,
    "keep": _keep,
    "cast": _cast,
    "scale": _scale,
    "add": _add,
    "dequantise": _dequantise,
    "merge": _merge,
}
