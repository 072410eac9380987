"""An encoder of pickles, protocol 2: plain values, and the tensors of ``torch.save``.

It writes the opcodes and the few symbols that ``torch.load(weights_only=True)`` accepts. No object
is ever asked how to pickle itself.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping

#: Writes a value that is not plain; ``False``: it cannot.
Other = Callable[["Pickle", object], bool]


class Unpicklable(Exception):
    """A value that has no plain form."""


class Pickle:
    """The bytes of a pickle."""

    def __init__(self, other: Other) -> None:
        self._bytes = bytearray(b"\x80\x02")
        self._other = other

    def finish(self) -> bytes:
        """Ends the pickle and returns it."""
        return bytes(self._bytes + b".")

    def symbol(self, module: str, name: str) -> None:
        """Writes a class or function by its name."""
        self._bytes += f"c{module}\n{name}\n".encode()

    def call(self) -> None:
        """Calls the function below a tuple on the stack."""
        self._bytes += b"R"

    def persistent(self) -> None:
        """Makes a persistent identity of the tuple on the stack."""
        self._bytes += b"Q"

    def mark(self) -> None:
        """Marks the beginning of a tuple."""
        self._bytes += b"("

    def tuple(self) -> None:
        """Makes a tuple of everything behind the mark."""
        self._bytes += b"t"

    def begin_dict(self) -> None:
        """Begins a dict. Keys and values follow."""
        self._bytes += b"}("

    def end_dict(self) -> None:
        """Ends a dict."""
        self._bytes += b"u"

    def begin_list(self) -> None:
        """Begins a list. Its elements follow."""
        self._bytes += b"]("

    def end_list(self) -> None:
        """Ends a list."""
        self._bytes += b"e"

    def call_with(self, module: str, name: str, argument: object) -> None:
        """Calls a function with one argument."""
        self.symbol(module, name)
        self.mark()
        self.add(argument)
        self.tuple()
        self.call()

    def new(self, module: str, name: str) -> None:
        """Makes an object of a class without calling its initialiser."""
        self.symbol(module, name)
        self._bytes += b")\x81"

    def build(self) -> None:
        """Sets the state of the object below."""
        self._bytes += b"b"

    def empty_ordered_dict(self) -> None:
        """Writes an empty ``OrderedDict``."""
        self.symbol("collections", "OrderedDict")
        self._bytes += b")R"

    def add(self, value: object) -> None:
        """Writes a value.

        Raises:
            Unpicklable: it, or a part of it, is no plain value.
        """
        if self._other(self, value):
            return
        kind = type(value)
        if value is None:
            self._bytes += b"N"
        elif isinstance(value, bool):
            self._bytes += b"\x88" if value else b"\x89"
        elif isinstance(value, int) and kind is int:
            self._add_int(value)
        elif isinstance(value, float) and kind is float:
            self._bytes += b"G" + struct.pack(">d", value)
        elif isinstance(value, str) and kind is str:
            self._add_text(value)
        elif isinstance(value, bytes) and kind is bytes:
            self.symbol("_codecs", "encode")
            self.mark()
            self._add_text(value.decode("latin1"))
            self._add_text("latin1")
            self.tuple()
            self.call()
        elif isinstance(value, tuple) and kind is tuple:
            self.mark()
            for one in value:
                self.add(one)
            self.tuple()
        elif isinstance(value, list) and kind is list:
            self._bytes += b"]("
            for one in value:
                self.add(one)
            self._bytes += b"e"
        elif isinstance(value, Mapping) and kind is dict:
            self._bytes += b"}("
            for key, one in value.items():
                self.add(key)
                self.add(one)
            self._bytes += b"u"
        else:
            raise Unpicklable(kind.__qualname__)

    def _add_int(self, value: int) -> None:
        if -(2**31) <= value < 2**31:
            self._bytes += b"J" + struct.pack("<l", value)
            return
        length = (value.bit_length() + 8) // 8
        if length > 255:
            raise Unpicklable(f"int of {length} bytes")
        self._bytes += b"\x8a" + bytes([length]) + value.to_bytes(length, "little", signed=True)

    def _add_text(self, value: str) -> None:
        text = value.encode(errors="surrogatepass")
        self._bytes += b"X" + struct.pack("<L", len(text)) + text
