"""The cyclic collector of Python, while many objects are made that are all going to stay."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused() -> Iterator[None]:
    """Pauses the garbage collector. A tree of a hundred thousand leaves is several objects per
    leaf, none of them garbage: scanning them again and again takes as long as making them. A thread
    that finds the collector enabled enables it again, so threads may overlap."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()
