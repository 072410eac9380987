"""The inert objects of a pickle: what the engine makes of its nodes.

``_core.pickle`` makes them, and the format modules read them. No class is imported and nothing is
called. An object may contain itself, so nothing here compares, hashes or prints what is inside.
Text, numbers, ``None``, truth values, lists and tuples are those of Python.
"""

from __future__ import annotations

from collections.abc import Sequence


class Name:
    """A name: module and qualified name. A dot in it makes it another name, not an attribute."""

    __slots__ = ("module", "name")

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name


class Call:
    """A call that was not made, and what would be done with its result."""

    __slots__ = ("args", "callable", "entries", "items", "keywords", "state")

    def __init__(self, callable_: object, args: object) -> None:
        #: The callable or class, in a sound pickle a :class:`Name`.
        self.callable = callable_
        #: The arguments, in a sound pickle a tuple.
        self.args = args
        #: Keyword arguments of a class.
        self.keywords: object = None
        #: The state that the object gets.
        self.state: object = None
        #: Elements that are appended to it.
        self.items: Sequence[object] = ()
        #: Keys and values that are set in it, one after the other.
        self.entries: Sequence[object] = ()


class Pairs:
    """A dict: its keys and values, one after the other."""

    __slots__ = ("flat",)

    def __init__(self) -> None:
        self.flat: Sequence[object] = ()


class Elements:
    """A set: its elements."""

    __slots__ = ("is_frozen", "items")

    def __init__(self, is_frozen: bool) -> None:
        self.is_frozen = is_frozen
        self.items: Sequence[object] = ()


class Persistent:
    """The object of a persistent id."""

    __slots__ = ("id",)

    def __init__(self, id_: object) -> None:
        self.id = id_


class Blob:
    """Bytes, by their place in the stream."""

    __slots__ = ("is_mutable", "is_text", "length", "start")

    def __init__(self, start: int, length: int, is_mutable: bool, is_text: bool) -> None:
        self.start = start
        self.length = length
        #: True for a ``bytearray``.
        self.is_mutable = is_mutable
        #: True if UTF-8 text is there whose characters are the bytes, as protocol 2 has them.
        self.is_text = is_text
