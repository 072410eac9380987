"""What a restore is going to read, as far as that is known before the checkpoint is opened: the engine begins to read it meanwhile."""

from __future__ import annotations

from typing import Any

from .paths import escape


def expected(like: Any, into: Any, selected: bool) -> bool | list[str]:
    """``True``: everything; a list: all of these top-level entries; ``False``: not known. ``selected``: the caller chooses by path."""
    if selected:
        return False
    target = like if into is None else into
    if target is None:
        return True
    if type(target) is dict and all(type(key) is str for key in target):
        return [escape(key) for key, value in target.items() if value is not ...]
    return False
