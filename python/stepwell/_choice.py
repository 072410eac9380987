"""The part of a state that a save stores, and in which dtypes."""

from __future__ import annotations

from collections.abc import Mapping

from . import _core
from ._checks import real_numbers, shown
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


def _float(dtype: object) -> str:
    name = storable_dtype(dtype)
    if name not in FLOATS:
        raise MisuseError(f"cast= takes {', '.join(FLOATS)} or {{glob: one of them}}, not {shown(dtype)}")
    return name


def copied_part(include: Globs, exclude: Globs, metrics: Metrics | None) -> _core._Part:
    """Returns ``include=``, ``exclude=`` and ``metrics=`` of a copy for the engine."""
    return globs(include, "include"), globs(exclude, "exclude") or [], real_numbers(metrics)
