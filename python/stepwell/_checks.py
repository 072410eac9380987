"""Checks of arguments before anything happens. Each function returns the argument in one form, or
raises :class:`~stepwell.MisuseError` that names the argument, its value, and valid
values."""

from __future__ import annotations

import contextlib
import difflib
import functools
import inspect
import json
import math
import operator
import sys
from collections.abc import Callable, Iterable, Mapping
from typing import ParamSpec, SupportsIndex, TypeVar

from ._core import MAX_METADATA_BYTES, MAX_METADATA_DEPTH, MAX_NAME_BYTES, MAX_STEP
from ._types import Json
from .errors import MisuseError

_P = ParamSpec("_P")
_T = TypeVar("_T")


def shown(value: object) -> str:
    """A value in a message."""
    try:
        text = repr(value)
    except ValueError:  # an integer of thousands of digits
        text = "of more digits than Python shows"
    return f"{type(value).__qualname__} {text if len(text) <= 60 else text[:57] + '...'}"


def _is_truth(value: object) -> bool:
    """True for a bool of Python or numpy. Avoids importing numpy, which costs more than a short
    command: a numpy bool exists only if numpy is imported."""
    numpy = sys.modules.get("numpy")
    return isinstance(value, bool) or (numpy is not None and isinstance(value, numpy.bool_))


def progress_callback(value: object) -> None:
    """Refuses what cannot be called with the bytes done and in all."""
    if value is not None and not callable(value):
        raise MisuseError(f"progress is called with the bytes done and in all; it is a {shown(value)}")


def flag(value: object, name: str) -> bool:
    """Checks a bool. Other truth values are refused: ``"no"`` is true, and its author means
    something else."""
    if _is_truth(value):
        return bool(value)
    raise MisuseError(f"{name} is True or False, not {shown(value)}")


def whole(value: object, name: str, least: int, most: int | None = None) -> int:
    """An integer, in bounds."""
    bounds = f"at least {least}" if most is None else f"from {least} to {most}"
    if _is_truth(value) or not hasattr(value, "__index__"):
        raise MisuseError(f"{name} is an integer, {bounds}, not {shown(value)}")
    try:
        number = operator.index(value)
    except TypeError as error:  # an array of several
        raise MisuseError(f"{name} is an integer, {bounds}, not {shown(value)}") from error
    if number < least or (most is not None and number > most):
        raise MisuseError(f"{name} is an integer, {bounds}, not {shown(number).removeprefix('int ')}")
    return number


#: Sizes of arrays, and places in them, are signed numbers of 64 bits everywhere.
MAX_SIZE = 2**63 - 1


def sizes(values: Iterable[SupportsIndex], name: str) -> tuple[int, ...]:
    """A number for each dimension: of a shape, or of a place in one."""
    try:
        found = tuple(map(operator.index, values))
    except TypeError as error:
        raise MisuseError(f"{name} is a tuple of integers, not {shown(values)}") from error
    if any(n < 0 for n in found):
        raise MisuseError(f"{name} has no negative numbers: {shown(found)}")
    if any(n > MAX_SIZE for n in found):
        raise MisuseError(f"{name} has no numbers beyond 64 bits: {shown(found)}")
    return found


def shape_of(array: object, what: str) -> tuple[int, ...]:
    """The shape of what a process has: an array, or a description of one."""
    shape = getattr(array, "shape", None)
    if shape is None:
        raise MisuseError(f"{what} holds an array, or an ArraySpec with a shape, not {shown(array)}")
    return sizes(shape, f"the shape of what {what} holds")


def listed(values: Iterable[_T], what: str) -> list[_T]:
    """Several values; text is one."""
    if not isinstance(values, (str, bytes)):
        with contextlib.suppress(TypeError):
            return list(values)
    raise MisuseError(f"{what}, not {shown(values)}")


def step_number(step: object) -> int:
    """The number of a step."""
    return whole(step, "a step", 0, MAX_STEP)


def given_step(step: object) -> int | None:
    """The step argument of a restore. A state in its place gets the advice to use ``into=``."""
    if isinstance(step, (Mapping, list, tuple)) or hasattr(step, "state_dict"):
        raise MisuseError(
            f"restore() takes the number of a step first, not {shown(step)}; "
            "pass a state to fill as into=, or a structure of specs as like="
        )
    return None if step is None else step_number(step)


def other_words(
    call: str, ours: Mapping[str, str], refusing: Callable[[object, Exception], None] | None = None
) -> Callable[[Callable[_P, _T]], Callable[_P, _T]]:
    """Decorates a function whose callers may know other libraries. A keyword of theirs raises a
    :class:`MisuseError` that names ours. Another unknown keyword raises ``TypeError`` with the one
    that may have been meant.

    Args:
        call: the name of the function, for the message.
        ours: their keyword → what to pass instead.
        refusing: called with the first argument and the error before it is raised.
    """

    def decorate(function: Callable[_P, _T]) -> Callable[_P, _T]:
        known = frozenset(inspect.signature(function).parameters)

        @functools.wraps(function)
        def checked(*args: _P.args, **keywords: _P.kwargs) -> _T:
            for name in keywords:
                if name in known:
                    continue
                error: Exception
                if name in ours:
                    error = MisuseError(f"{call}() has no keyword {name}=; pass {ours[name]}")
                else:
                    error = TypeError(f"{call}() has no keyword {name!r}{meant(name, known)}")
                if refusing is not None:
                    refusing(args[0], error)
                raise error
            return function(*args, **keywords)

        return checked

    return decorate


#: Keywords of other libraries' managers.
MANAGER_WORDS = {
    "max_to_keep": "retention=sw.keep_latest(n)",
    "keep_period": "retention=sw.keep_latest(n) | sw.keep_every(steps=n)",
    "keep_time_interval": "retention=sw.keep_latest(n) | sw.keep_every(seconds=n)",
    "best_fn": 'retention=sw.keep_best(n, "loss", mode="min"), and metrics= to save()',
    "best_mode": 'retention=sw.keep_best(n, "loss", mode="min")',
    "save_total_limit": "retention=sw.keep_latest(n)",
    "save_interval_steps": "save_policy=sw.every_steps(n)",
    "save_interval": "save_policy=sw.every_steps(n)",
    "save_steps": "save_policy=sw.every_steps(n)",
    "directory": "the root as the first argument",
    "create": "options=sw.Options(create=False) to refuse a missing root",
    "step_prefix": "step_name=sw.StepName(prefix=…)",
    "async_mode": "nothing: every save is asynchronous",
    "enable_async_checkpointing": "nothing: every save is asynchronous",
}

#: Keywords of other libraries' saves.
SAVE_WORDS = {
    "overwrite": 'exists="replace"',
    "force_overwrite": 'exists="replace"',
    "args": "the state as an argument",
    "items": "the state as an argument",
    "item": "the state as an argument",
    "state_dict": "the state as an argument",
    "pytree": "the state as an argument",
    "save_args": "options=sw.Options(…) to the manager",
    "metadata": "custom_metadata=",
    "process_group": "coordinator=sw.coordinators.TorchStore(group)",
    "checkpoint_id": "the path as the first argument",
}

#: Keywords of other libraries' restores.
RESTORE_WORDS = {
    "abstract_state": "like=, a structure of specs",
    "abstract_pytree": "like=, a structure of specs",
    "target": "into= (filled in place) or like= (never changed)",
    "item": "into= (filled in place) or like= (never changed)",
    "items": "include=, a glob over leaf paths",
    "args": "like= or into=",
    "state": "into=",
    "state_dict": "into=",
    "pytree": "into=",
    "restore_args": "like=, shardings= or cast=",
    "map_location": 'to="torch" and device=',
    "strict": 'missing="keep" and unexpected="ignore"',
    "weights_only": "nothing: no checkpoint runs code",
}


def one_of(value: _T, name: str, allowed: Iterable[str | None]) -> _T:
    """One of a few words."""
    words = tuple(allowed)
    if (value is None or isinstance(value, str)) and value in words:
        return value
    raise MisuseError(
        f"{name} is {' or '.join(map(repr, words))}, not {shown(value)}{meant(value, [word for word in words if word])}"
    )


def meant(value: object, words: Iterable[str]) -> str:
    """A question after the word that may have been meant, where one is near."""
    near = difflib.get_close_matches(value, list(words), 1) if isinstance(value, str) else []
    return f"; did you mean {near[0]!r}?" if near else ""


def instance(value: object, cls: type[_T], name: str, make: str) -> _T:
    """An object of one of this package's own classes."""
    if isinstance(value, cls):
        return value
    raise MisuseError(f"{name} is made by {make}, not a {shown(value)}")


def text(value: object, name: str) -> str:
    """Text that has a UTF-8 form."""
    if not isinstance(value, str):
        raise MisuseError(f"{name} is a str, not {shown(value)}")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise MisuseError(f"{name} holds lone surrogates and has no UTF-8: {value!r:.60}") from error
    return str(value)


def real_numbers(metrics: object) -> dict[str, float]:
    """Metrics as floats: real numbers and 0-d arrays."""
    if metrics is None:
        return {}
    if not isinstance(metrics, Mapping):
        raise MisuseError(
            f'metrics is a dict of names and numbers, such as {{"loss": 0.5}}, not {shown(metrics)}'
        )
    numbers: dict[str, float] = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not name:
            raise MisuseError(f"names of metrics are non-empty strings, not {shown(name)}")
        if len(text(name, "the name of a metric").encode()) > MAX_NAME_BYTES:
            raise MisuseError(
                f"the name of a metric has at most {MAX_NAME_BYTES} bytes, not {len(name)}: {name!r:.50}…"
            )
        wrong = f"metric {name!r} is a real number or a 0-d array, not {shown(value)}"
        kind = getattr(getattr(value, "dtype", None), "kind", "f")
        if (
            isinstance(value, (bool, str, bytes, complex))
            or getattr(value, "shape", ()) != ()
            or kind in "bcmMOSU"
        ):
            raise MisuseError(wrong)
        # A tensor that requires gradients warns of the conversion.
        detach = getattr(value, "detach", None)
        try:
            numbers[name] = float(detach() if callable(detach) else value)
        except (TypeError, ValueError, OverflowError) as error:
            raise MisuseError(wrong) from error
        if math.isnan(numbers[name]):
            numbers[name] = math.nan
    return numbers


def metadata_json(value: object) -> str:
    """A user's metadata of a step, as text."""
    found = json.dumps(plain_json(value, "custom_metadata"), ensure_ascii=False, separators=(",", ":"))
    if len(found.encode()) > MAX_METADATA_BYTES:
        raise MisuseError(
            f"custom_metadata has {len(found.encode())} bytes as JSON, and at most {MAX_METADATA_BYTES} are kept; put it into the state"
        )
    return found


def plain_json(value: object, what: str) -> Json:
    """JSON that will come back as it is (tuples as lists): no NaN, no integers that JSON's readers
    would round, no keys that it would turn into strings."""
    return _plain_json(value, what, [])


def _plain_json(value: object, what: str, above: list[object]) -> Json:
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return text(value, what)
    if type(value) is int:
        if not -(2**63) <= value < 2**64:
            raise MisuseError(
                f"{what} is an integer beyond 64 bits, which JSON would keep as a rounded float; use a string, or put it into the state"
            )
        return value
    if type(value) is float:
        if not math.isfinite(value):
            raise MisuseError(
                f"{what} is JSON, which has no {value!r}; use a string, or put it into the state or the metrics"
            )
        return value
    if not isinstance(value, (Mapping, list, tuple)):
        raise MisuseError(
            f"{what} is JSON (None, bool, int, float, str, lists, dicts with string keys), not {type(value).__qualname__}; "
            "put it into the state"
        )
    if any(one is value for one in above):
        raise MisuseError(
            f"{what} is a cycle: that {type(value).__qualname__} is inside itself; leave this reference out"
        )
    if len(above) >= MAX_METADATA_DEPTH:
        raise MisuseError(f"{what} is nested more than {MAX_METADATA_DEPTH} deep; put it into the state")
    above.append(value)
    made: object
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise MisuseError(f"{what} is JSON: its keys are strings, not {shown(key)}")
        made = {
            text(key, f"a key of {what}"): _plain_json(one, f"{what}[{key!r}]", above)
            for key, one in value.items()
        }
    else:
        made = [_plain_json(one, f"{what}[{i}]", above) for i, one in enumerate(value)]
    above.pop()
    return made
