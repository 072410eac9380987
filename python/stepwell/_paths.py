"""Leaf paths, as the engine renders them: keys and fields joined by ``/``, indices and integer keys
in brackets, ``\\``, ``/``, ``[`` and ``]`` inside a key escaped by ``\\``, the empty key as
``\\e``. A component is ``(tag, value)``: ``k`` a string key, ``i`` an integer key, ``x`` an index,
``f`` a field."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import TypeAlias

Component: TypeAlias = tuple[str, str | int]

_PART = re.compile(r"\[(-?\d+)\]|((?:[^\\/\[\]]|\\.)+)")
#: Leaves that a message lists.
_LISTED = 5
_SPECIAL = re.compile(r"[\\/\[\]]")


def escape(name: str) -> str:
    """Escapes a key or field for a rendered path."""
    if not name:
        return "\\e"
    return _SPECIAL.sub(lambda match: "\\" + match.group(), name)


def printable(text: str) -> str:
    """Text from a file, fit for a terminal: control and formatting characters are escaped."""
    if text.isprintable():
        return text
    return "".join(
        c if c.isprintable() else c.encode("unicode_escape", "backslashreplace").decode() for c in text
    )


def named(path: str) -> str:
    """A leaf in a message, by its rendered path; that of a state which is one leaf is empty."""
    return f"leaf `{path}`" if path else "the whole state"


def listed(paths: Sequence[str], kinds: Mapping[str, str] | None = None) -> str:
    """Several leaves in a message, with what they are."""
    found = [
        f"{named(path)} ({kinds[path]})" if kinds and path in kinds else named(path)
        for path in paths[:_LISTED]
    ]
    more = f" and {len(paths) - _LISTED} more" if len(paths) > _LISTED else ""
    return ", ".join(found) + more


def extend(path: str, component: Component) -> str:
    """The path of a child."""
    tag, value = component
    if tag in "kf":
        return f"{path}/{escape(str(value))}" if path else escape(str(value))
    return f"{path}[{value}]"


def render(components: Iterable[Component]) -> str:
    """A whole path."""
    path = ""
    for component in components:
        path = extend(path, component)
    return path


def split(path: str) -> list[str | int]:
    """The keys and indices of a rendered path."""
    parts: list[str | int] = []
    for index, name in _PART.findall(path):
        parts.append(int(index) if index else re.sub(r"\\(.)", lambda one: one[1].replace("e", ""), name))
    return parts


def starts_with(path: str, prefix: str) -> bool:
    """True if a path is another one or below it."""
    return not prefix or path == prefix or (path.startswith(prefix) and path[len(prefix)] in "/[")


def glob_escape(path: str) -> str:
    """A rendered path as a glob that matches it alone."""
    return re.sub(r"[*?{}]", lambda match: "\\" + match.group(), path)
