"""The values of a pickle: its inert objects as a state of plain values, tensors and opaque parts.

A pickle is a graph. Its parts may be shared and may contain themselves. So the conversion keeps a
stack of its own and converts every object once. A part that would unfold to more than the pickle
could hold, or that is nested too deep, is opaque.

A call becomes a value only if a *symbol* is known for the exact pair of module and name. All other
names and calls are opaque: nothing is imported for them, and nothing is called.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TypeAlias

import numpy as np

from .. import _core
from .._paths import Component, extend, printable
from ..errors import CorruptCheckpoint
from .description import Compressed, Opaque, Place, Tensor, Value
from .pickled import Blob, Call, Elements, Name, Pairs, Persistent

#: Values that a small pickle may unfold to, and values for each byte of a longer one.
_MIN_VALUES, _VALUES_PER_BYTE = 1 << 17, 4
#: The same for bytes of text, those of keys counted for each leaf below them.
_MIN_TEXT_BYTES, _TEXT_PER_BYTE = 16 << 20, 64
#: The same for bytes that calls copy.
_MIN_COPIED_BYTES, _COPIED_PER_BYTE = 4 << 20, 16
#: The longest key of a dict that is a container.
_MAX_KEY_BYTES = 4096
#: The most characters of a key in a message.
_MAX_SHOWN_KEY = 40
#: The longest integer that is a value.
_MAX_INTEGER_BITS = 8192
_MAX_INT64 = 1 << 63
#: The most objects whose parts are being converted: the levels of a state, and the calls that make
#: a tensor.
_MAX_FRAMES = _core.MAX_DEPTH + 8
#: The longest tuple of numbers that is converted without a frame. A pickle may repeat it.
_MAX_AT_ONCE = 64


class Malformed(Exception):
    """A call of a known symbol is damaged."""


@dataclass(slots=True)
class Found:
    """A converted object."""

    #: The argument that symbols get.
    value: object
    #: The part of the state in its place.
    placed: object
    #: True if the value is made of built-in values only.
    is_plain: bool = False
    #: Values that it unfolds to.
    values: int = 1
    #: Bytes of text that it unfolds to.
    text: int = 0
    #: Leaves that it unfolds to.
    leaves: int = 1
    #: Nested containers.
    depth: int = 0


#: Those that many pickles have very often.
_SMALL = [Found(number, number, True) for number in range(256)]
_BOOLS = [Found(flag, flag, True, text=len(str(flag))) for flag in (False, True)]
_NONE = Found(None, None, True, text=len(str(None)))


@dataclass(frozen=True, slots=True)
class Stream:
    """The bytes of a pickle."""

    #: Path of the file.
    file: str
    data: bytes
    #: The place of the data. ``None`` if the file has them in another form.
    place: Place | None

    def bytes_of(self, blob: Blob) -> bytes:
        """The bytes of a blob."""
        data = self.data[blob.start : blob.start + blob.length]
        return data.decode().encode("latin-1") if blob.is_text else data

    def place_of(self, node: object) -> Place | None:
        """The place of a blob's bytes, if it is one."""
        if not isinstance(node, Blob) or self.place is None:
            return None
        file, offset = self.place[0], self.place[1] + node.start
        if not node.is_text:
            return file, offset
        if not isinstance(file, str):
            return None
        return Compressed(file, offset, node.length, len(self.bytes_of(node)), None, "latin1"), 0


@dataclass(slots=True)
class Made:
    """A call with converted parts."""

    call: Call
    name: Name
    stream: Stream
    args: list[Found]
    state: Found | None
    items: list[Found]
    #: Keys and values, one after the other.
    entries: list[Found]

    def arg(self, at: int, default: object = None) -> object:
        """The value of an argument."""
        return self.args[at].value if at < len(self.args) else default


#: Returns the value of a call. A ``ValueError`` or its like makes the call opaque.
Symbol: TypeAlias = Callable[[Made], Found]
#: Returns the object of a persistent id.
PersistentLoad: TypeAlias = Callable[[object], Found]

#: Types of values of which a call copies nothing.
_UNCOPIED = frozenset((int, bool, float, type(None), Name, Tensor, Opaque))
#: Types of keys and of elements of sets.
_KEY_TYPES = (str, int, float, bool, bytes, type(None))


def opaque(what: str) -> Found:
    """A value that is known by its name only."""
    value = Opaque(what)
    return Found(value, value)


def plain(value: object, text: int = 0) -> Found:
    """A value that is one leaf."""
    return Found(value, value, True, text=text)


def name_of(name: Name) -> str:
    """A name in a message."""
    return printable(f"{name.module}.{name.name}"[:200])


def _is_count(value: object) -> bool:
    return type(value) is int and 0 <= value < _MAX_INT64


class _Frame:
    """An object whose parts are being converted."""

    __slots__ = ("children", "node", "rest", "results")

    def __init__(self, node: object, children: Sequence[object]) -> None:
        self.node = node
        self.children = children
        #: Those that are not converted yet.
        self.rest = iter(children)
        self.results: list[Found] = []


class Converter:
    """Converts the objects of one pickle."""

    def __init__(
        self,
        stream: Stream,
        symbols: Mapping[tuple[str, str], Symbol],
        names: Mapping[tuple[str, str], object],
        persistent: PersistentLoad,
    ) -> None:
        self._stream = stream
        self._symbols = symbols
        #: Names that are values by themselves.
        self._names = names
        self._persistent = persistent
        self._max_values = _MIN_VALUES + _VALUES_PER_BYTE * len(stream.data)
        self._max_text = _MIN_TEXT_BYTES + _TEXT_PER_BYTE * len(stream.data)
        #: Bytes that calls have made of their arguments. Calls may share a long one.
        self._copied = 0
        self._max_copied = _MIN_COPIED_BYTES + _COPIED_PER_BYTE * len(stream.data)
        #: Converted objects by identity; the pickle keeps them alive.
        self._known: dict[int, Found] = {}
        #: Objects whose parts are being converted.
        self._open: set[int] = set()

    def convert(self, root: object) -> Found:
        """Converts an object and what is below it."""
        found = self._at_once(root)
        if found is not None:
            return found
        frames = [self._enter(root)]
        while True:
            frame = frames[-1]
            for child in frame.rest:
                found = self._at_once(child)
                if found is None and len(frames) < _MAX_FRAMES:
                    frames.append(self._enter(child))
                    break
                if found is None:
                    found = opaque(f"a structure of more than {_core.MAX_DEPTH - 1} levels")
                frame.results.append(found)
            if frame is not frames[-1]:
                continue
            frames.pop()
            try:
                found = self._bounded(frame, self._finish(frame))
            except Malformed as error:
                where = _path(frames)
                place = f"leaf `{where}`: " if where else ""
                failure = CorruptCheckpoint(f"{self._stream.file}: {place}{error}")
                failure.file, failure.leaf = self._stream.file, where or None
                raise failure from None
            self._known[id(frame.node)] = found
            self._open.discard(id(frame.node))
            if not frames:
                return found
            frames[-1].results.append(found)

    def _enter(self, node: object) -> _Frame:
        self._open.add(id(node))
        return _Frame(node, _children(node))

    def _at_once(self, node: object) -> Found | None:
        """Converts an object that needs no frame."""
        kind = type(node)
        # Most objects are of these types, so they are made without further calls.
        if kind is str:
            return Found(node, node, True, 1, len(node))  # type: ignore[arg-type]
        if isinstance(node, int) and kind is int:
            if 0 <= node < len(_SMALL):
                return _SMALL[node]
            bits = node.bit_length()
            if bits > _MAX_INTEGER_BITS:
                return opaque(f"integer of {bits} bits")
            return Found(node, node, True)
        if kind is float:
            return Found(node, node, True)
        if node is None:
            return _NONE
        if isinstance(node, bool):
            return _BOOLS[node]
        if isinstance(node, Name):
            return self._named(node)
        if isinstance(node, tuple) and 0 < len(node) <= _MAX_AT_ONCE and all(map(_is_count, node)):
            # The size or the stride of a tensor.
            return Found(node, Value(node), True, values=1 + len(node), leaves=len(node), depth=1)
        known = self._known.get(id(node))
        if known is not None:
            return known
        if id(node) in self._open:
            return opaque("a container that is inside itself")
        if isinstance(node, Blob):
            data = self._stream.bytes_of(node)
            found = plain(bytearray(data) if node.is_mutable else data, len(data))
            self._known[id(node)] = found
            return found
        if isinstance(node, Call):
            callable_ = node.callable
            if not isinstance(callable_, Name):
                return opaque("the result of a call")
            is_known = (callable_.module, callable_.name) in self._symbols
            # No symbol takes keyword arguments.
            if not is_known or not isinstance(node.args, tuple) or node.keywords is not None:
                return opaque(name_of(callable_))
        return None

    def _named(self, name: Name) -> Found:
        value = self._names.get((name.module, name.name))
        if value is not None:
            return plain(value)
        return Found(name, Opaque(name_of(name)))

    def _finish(self, frame: _Frame) -> Found:
        node, results = frame.node, frame.results
        if isinstance(node, list):
            return sequence(results)
        if isinstance(node, tuple):
            return sequence(results, is_tuple=True)
        if isinstance(node, Pairs):
            return mapping(results)
        if isinstance(node, Elements):
            return elements([part.value for part in results], node.is_frozen)
        if isinstance(node, Persistent):
            values = tuple(part.value for part in results)
            return self._persistent(values if isinstance(node.id, tuple) else values[0])
        assert isinstance(node, Call)
        assert isinstance(node.args, tuple)
        assert isinstance(node.callable, Name)
        name = node.callable
        at = len(node.args)
        state = None
        if node.state is not None:
            state = results[at]
            at += 1
        items = results[at : at + len(node.items)]
        entries = results[at + len(node.items) :]
        made = Made(node, name, self._stream, results[: len(node.args)], state, items, entries)
        for part in results[:at]:
            if type(part.value) not in _UNCOPIED:
                self._copied += _copied_bytes(part.value)
        if self._copied > self._max_copied:
            return opaque(f"{name_of(name)}, of a pickle with too many copies")
        try:
            found = self._symbols[name.module, name.name](made)
        except (ValueError, TypeError, ArithmeticError, LookupError, AttributeError):
            return opaque(name_of(name))
        if type(found.value) not in _UNCOPIED:
            self._copied += _copied_bytes(found.value)
        return found

    def _bounded(self, frame: _Frame, found: Found) -> Found:
        """Counts what a value unfolds to. One that is too large is opaque."""
        parts = frame.results
        if isinstance(found.placed, (Tensor, Opaque)) or not parts:
            return found
        values = leaves = depth = text = 0
        for part in parts:
            values += part.values
            leaves += part.leaves
            depth = max(depth, part.depth)
            text += part.text
        for at, key in _keys_of(frame).items():
            text += key.text * parts[at].leaves
        # A call may return its argument, which other objects share.
        found = replace(found, values=1 + values, leaves=max(1, leaves), depth=1 + depth, text=text)
        if found.values > self._max_values:
            return opaque(f"a structure that unfolds to {found.values} values")
        if found.text > self._max_text:
            return opaque(f"a structure that unfolds to {found.text} bytes of text")
        if found.depth >= _core.MAX_DEPTH:
            return opaque(f"a structure of more than {_core.MAX_DEPTH - 1} levels")
        return found


def _copied_bytes(value: object) -> int:
    """About the bytes of a value that a call made."""
    if isinstance(value, np.ndarray):
        return value.nbytes
    if isinstance(value, (str, bytes, bytearray)):
        return len(value)
    return 8 * len(value) if isinstance(value, (list, tuple, dict, set, frozenset, deque)) else 0


def _children(node: object) -> Sequence[object]:
    if isinstance(node, (list, tuple)):
        return node
    if isinstance(node, Pairs):
        return node.flat
    if isinstance(node, Elements):
        return node.items
    if isinstance(node, Persistent):
        return node.id if isinstance(node.id, tuple) else (node.id,)
    if isinstance(node, Call) and isinstance(node.args, tuple):
        state = () if node.state is None else (node.state,)
        return (*node.args, *state, *node.items, *node.entries)
    raise TypeError(f"a pickle has no {type(node).__name__}")


def _entries_at(frame: _Frame) -> int:
    """The number of the first key among a frame's children."""
    if isinstance(frame.node, Pairs):
        return 0
    count = len(frame.node.entries) if isinstance(frame.node, Call) else 0
    return len(frame.children) - count


def _keys_of(frame: _Frame) -> dict[int, Found]:
    """The keys of a frame, by the numbers of their values."""
    begin = _entries_at(frame)
    return {at + 1: frame.results[at] for at in range(begin, len(frame.results) - 1, 2)}


def _path(frames: Sequence[_Frame]) -> str:
    """The rendered path of what is being converted."""
    path = ""
    for frame in frames:
        at = len(frame.results)
        component: Component | None = None
        if isinstance(frame.node, (list, tuple)):
            component = ("x", at)
        elif at > _entries_at(frame):
            key = frame.results[at - 1].value
            if isinstance(key, (str, int)):
                component = ("i" if isinstance(key, int) else "k", key)
        if component is not None:
            path = extend(path, component)
    return path[:1000]


def sequence(parts: Sequence[Found], is_tuple: bool = False) -> Found:
    """A list or tuple. One of plain values only is one leaf."""
    make = tuple if is_tuple else list
    value: Sequence[object] = make([part.value for part in parts])
    if all(part.is_plain for part in parts):
        return Found(value, Value(value) if value else value, True)
    return Found(value, make([part.placed for part in parts]))


def mapping(flat: Sequence[Found], cls: Callable[..., dict[object, object]] = dict) -> Found:
    """A dict. It is a container if its keys can be parts of a path, by their text if need be. One
    of plain values is a leaf otherwise."""
    keys: list[object] = [part.value for part in flat[::2]]
    values = flat[1::2]
    odd = next((key for key in keys if not _is_key(key)), None)
    is_plain = all(part.is_plain for part in values)
    if not all(_is_component(key) for key in keys):
        if odd is None and is_plain:
            value = cls(zip(keys, [part.value for part in values], strict=True))
            return Found(value, Value(value), True)
        texts = _texts(flat[::2])
        if texts is None:
            return _opaque_dict(keys, odd)
        keys = texts
    value = cls(zip(keys, [part.value for part in values], strict=True))
    placed = cls(zip(keys, [part.placed for part in values], strict=True))
    return Found(value, placed, is_plain)


def _opaque_dict(keys: Sequence[object], odd: object) -> Found:
    if odd is not None:
        return opaque(f"a dict with keys of type {type(odd).__name__}")
    return opaque(
        f"a dict of tensors with {_no_component(next(key for key in keys if not _is_component(key)))}"
    )


def _texts(parts: Sequence[Found]) -> list[object] | None:
    """Keys that can be parts of a path: numbers of other types, bytes, ``None`` and tuples of these
    by their text. ``None``: one has no text, or that of another key."""
    found: list[object] = []
    for part in parts:
        key = part.value
        if not _is_component(key):
            is_short = part.values <= _MAX_AT_ONCE and part.text <= _MAX_KEY_BYTES
            key = repr(key) if is_short and type(key) is not str and _has_text(key) else None
            if not _is_component(key):
                return None
            part.text = max(part.text, len(str(key)))
        found.append(key)
    return found if len(set(found)) == len(found) else None


def _has_text(key: object) -> bool:
    return all(map(_has_text, key)) if isinstance(key, tuple) else _is_key(key)


def placed(value: object) -> object:
    """The part of a state for a value that is made of built-in values."""
    if isinstance(value, dict) and all(_is_component(key) for key in value):
        return {key: placed(one) for key, one in value.items()}
    return Value(value) if isinstance(value, (dict, list, tuple)) and value else value


def elements(values: Sequence[object], is_frozen: bool) -> Found:
    """A set."""
    odd = next((value for value in values if not _is_key(value)), None)
    if odd is not None:
        return opaque(f"a set with elements of type {type(odd).__name__}")
    return plain(frozenset(values) if is_frozen else set(values))


def _is_key(value: object) -> bool:
    """True for what is hashed here: its hash is fast, and hard to make collide."""
    if type(value) is int:
        return -_MAX_INT64 <= value < _MAX_INT64
    return type(value) in _KEY_TYPES


def _is_component(key: object) -> bool:
    """True for a key that can be part of a path."""
    if type(key) is not str:
        return type(key) is int and _is_key(key)
    return len(key) <= _MAX_KEY_BYTES and (key.isascii() or _is_utf8(key))


def _no_component(key: object) -> str:
    """Describes a key that cannot be part of a path."""
    if type(key) is not str:
        return f"the key {repr(key)[:_MAX_SHOWN_KEY]}, which is no name or integer"
    shown = f"the key {printable(key[:_MAX_SHOWN_KEY])!r}"
    if len(key) <= _MAX_SHOWN_KEY:
        return f"{shown}, which is no valid Unicode"
    return f"{shown}…, which has {len(key)} characters and is no name of at most {_MAX_KEY_BYTES} bytes"


def _is_utf8(text: str) -> bool:
    try:
        return len(text.encode()) <= _MAX_KEY_BYTES
    except UnicodeEncodeError:
        return False
