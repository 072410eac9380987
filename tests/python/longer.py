"""Marks tests that ``make test`` leaves out for time, because others try most of it.
``STEPWELL_LONG=1`` runs them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

import pytest

_T = TypeVar("_T")

LONG = "STEPWELL_LONG" in os.environ
#: Marks a test that is left out.
longer = pytest.mark.skipif(not LONG, reason="STEPWELL_LONG=1 runs it")


def some(values: Sequence[_T], count: int = 1) -> Sequence[_T]:
    """The first values; all of them in the long run."""
    return values if LONG else values[:count]
