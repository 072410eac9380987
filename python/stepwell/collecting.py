"""The cyclic collector of Python, while many objects are made that are all going to stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """No collection inside. A tree of a hundred thousand leaves is several objects per leaf, none
    of which is garbage: looking through them again and again while they are made takes as long as
    making them. Whoever finds the collector on switches it on again, so that threads may
    overlap."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
