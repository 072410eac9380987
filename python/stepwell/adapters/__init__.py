"""The seam to frameworks: one module per framework, imported only where the caller has imported the framework.

A framework module offers ``describe(obj) -> Description | None`` (what a value of its own types is),
``revive(name, parts) -> object`` for the extension names that it owns (``<framework>.…``), and
``spec(obj) -> ArraySpec | None`` (what an abstract or real array of its own wants). Everything that is not installed or not
imported costs one dictionary look-up.
"""

from __future__ import annotations

import importlib
import sys
from functools import cache
from types import ModuleType
from typing import Any

#: Framework package → the adapter module that knows it.
_FRAMEWORKS = {"torch": "stepwell.adapters.torch"}


@cache
def _module(name: str) -> ModuleType:
    return importlib.import_module(name)


def _loaded() -> list[ModuleType]:
    return [_module(adapter) for package, adapter in _FRAMEWORKS.items() if package in sys.modules]


def describe(obj: Any) -> Any:
    """What an object of a framework that is in use is, or ``None``."""
    for module in _loaded():
        found = module.describe(obj)
        if found is not None:
            return found
    return None


def revive(name: str, parts: Any) -> Any:
    """The object for an extension that a framework owns; a description of it where the framework is not in use."""
    package = name.partition(".")[0]
    adapter = _FRAMEWORKS.get(package)
    if adapter is not None and package in sys.modules:
        return _module(adapter).revive(name, parts)
    return StoredExtension(name, parts)


class StoredExtension:
    """A stored object whose type is not known here: the name and parts that were stored."""

    __slots__ = ("name", "parts")

    def __init__(self, name: str, parts: Any) -> None:
        self.name = name
        self.parts = parts

    def __eq__(self, other: object) -> bool:
        return isinstance(other, StoredExtension) and (self.name, self.parts) == (other.name, other.parts)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return f"StoredExtension({self.name!r}, {self.parts!r})"


def spec(obj: Any) -> Any:
    """What an array or abstract array of a framework that is in use wants, as an ``ArraySpec``, or ``None``."""
    for module in _loaded():
        found = module.spec(obj)
        if found is not None:
            return found
    return None
