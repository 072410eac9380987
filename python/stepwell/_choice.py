"""The part of a state that a save stores, and in which dtypes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Literal, TypeAlias

from . import _core
from . import _lifecycle as lifecycle
from ._checks import one_of, real_numbers, shown
from ._restore.options import Globs, glob_key, globs, storable_dtype
from ._types import Metrics
from .errors import MisuseError

#: The dtypes that the engine casts between.
FLOATS = ("float16", "bfloat16", "float32", "float64")


def choice_of(include: Globs, exclude: Globs, cast: object) -> _core._Choice:
    """Returns ``include=``, ``exclude=`` and ``cast=`` of a save for the engine."""
    table = cast if isinstance(cast, Mapping) else {} if cast is None else {"**": cast}
    rules = [(glob_key(glob, "cast"), _float(dtype)) for glob, dtype in table.items()]
    return globs(include, "include"), globs(exclude, "exclude") or [], rules


#: The treatment of a leaf that cannot be stored: a save refuses the state, leaves the leaf out, or
#: stores what a function of path and value returns.
Unsupported: TypeAlias = Literal["refuse", "drop"] | Callable[[str, object], object]


def saved_choice(include: Globs, exclude: Globs, cast: object, unsupported: Unsupported) -> _core._SaveChoice:
    """Returns ``include=``, ``exclude=``, ``cast=`` and ``unsupported=`` of a save for the
    engine."""
    if not callable(unsupported):
        one_of(unsupported, "unsupported, where it is no function,", ("refuse", "drop"))
    return *choice_of(include, exclude, cast), None if unsupported == "refuse" else unsupported


def log_dropped(where: str, dropped: Iterable[tuple[str, str]]) -> None:
    """Logs one warning about leaves that were left out."""
    if reasons := "; ".join(f"{path}: {reason}" for path, reason in dropped):
        lifecycle.log(30, "stepwell", f"saves to {where} leave out what cannot be stored: {reasons}")


def _float(dtype: object) -> str:
    name = storable_dtype(dtype)
    if name not in FLOATS:
        raise MisuseError(f"cast= takes {', '.join(FLOATS)} or {{glob: one of them}}, not {shown(dtype)}")
    return name


def copied_part(
    include: Globs, exclude: Globs, metrics: Metrics | None, compress: bool | Globs = False
) -> _core._Part:
    """Returns ``include=``, ``exclude=``, ``metrics=`` and ``compress=`` of a copy for the
    engine."""
    numbers = real_numbers(metrics)
    return globs(include, "include"), globs(exclude, "exclude") or [], numbers, compressed(compress)


def compressed(compress: bool | Globs) -> list[str]:
    """Returns the globs of ``compress=``, which must be valid: ``True`` is all tensors."""
    if isinstance(compress, bool):
        return ["**"] if compress else []
    found = globs(compress, "compress") or []
    _core.first_globs(found, [])
    return found
