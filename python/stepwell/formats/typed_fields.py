"""Typed access to the values of another library's pickle, which may have any type."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NoReturn, TypeGuard

from .._paths import printable
from ..errors import FormatError
from .description import MAX_SIZE, Tensor, Value
from .files import corrupt
from .numpy_symbols import MAX_DIMS

Size = tuple[int, ...]


def unwrapped(value: object) -> object:
    """Returns a leaf of plain values as these values."""
    return value.value if isinstance(value, Value) else value


class Fields:
    """The entries of a dict in a file."""

    def __init__(self, file: str, value: object, name: str = "its state") -> None:
        self.file, self.name = file, name
        value = unwrapped(value)
        if not isinstance(value, dict):
            self.wrong(f"{name} is no dict")
        self.entries: dict[object, object] = value

    def wrong(self, what: str) -> NoReturn:
        """Raises the error of a damaged file."""
        failure: Exception = corrupt(self.file, what)
        raise failure

    def unread(self, what: str) -> NoReturn:
        """Raises the error of a form that is not read."""
        raise FormatError(printable(f"{self.file}: {what}"))

    def get(self, key: str) -> object:
        """Returns an entry as plain values, or ``None``."""
        return unwrapped(self.entries.get(key))

    def has(self, key: str) -> bool:
        """True if an entry is there, and is not ``None``."""
        return self.get(key) is not None

    def count(self, key: str) -> int | None:
        """Returns an entry that is a number of things, or ``None`` if it is none."""
        value = self.get(key)
        return value if is_count(value) else None

    def fields(self, key: str) -> Fields:
        """Returns an entry that is a dict."""
        return Fields(self.file, self.entries.get(key), f"`{key}`")

    def named(self, key: str) -> dict[str, object]:
        """Returns an entry that is a dict by name. An absent one is empty."""
        value = self.get(key)
        if value is None:
            return {}
        if not isinstance(value, dict) or not all(isinstance(name, str) for name in value):
            self.wrong(f"`{key}` is no dict by name")
        return value

    def named_entries(self) -> Iterator[tuple[str, object]]:
        """Returns the entries that have a name."""
        return ((key, value) for key, value in self.entries.items() if isinstance(key, str))

    def list(self, key: str) -> list[object]:
        """Returns an entry that is a list or a tuple."""
        value = self.get(key)
        if not isinstance(value, (list, tuple)):
            self.wrong(f"`{key}` is no list")
        return list(value)

    def sizes(self) -> dict[str, Size]:
        """Returns all entries as the shapes of tensors by name."""
        found: dict[str, Size] = {}
        for name, size in self.entries.items():
            if not isinstance(name, str):
                self.wrong(f"{self.name} has a key that is no text")
            found[name] = self.size(name, size)
        return found

    def size(self, name: str, value: object) -> Size:
        """Returns the shape of a tensor."""
        found = unwrapped(value)
        is_sound = isinstance(found, (list, tuple)) and len(found) <= MAX_DIMS
        if not is_sound or not all(is_count(one) for one in found):  # type: ignore[attr-defined]
            self.wrong(f"the shape of `{name[:200]}` is no tuple of sizes")
        return tuple(found)  # type: ignore[arg-type]

    def flat(self, name: str, value: object) -> Tensor:
        """Returns a tensor of one dimension without gaps."""
        if not isinstance(value, Tensor) or len(value.shape) != 1:
            self.wrong(f"{name} is no tensor of one dimension")
        if len(value.chunks) > 1 or any(
            one.strides is not None or one.big_endian or one.negated for one in value.chunks
        ):
            self.wrong(f"{name} is not stored as little-endian elements side by side")
        return value


def is_count(value: object) -> TypeGuard[int]:
    """True for a number of elements."""
    return type(value) is int and 0 <= value < MAX_SIZE
