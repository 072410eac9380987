"""The report of a restore, done or refused. Every restore can return it, and every mismatch carries
it."""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, final

from .._public import public
from ..errors import MismatchError, at_leaf

if TYPE_CHECKING:
    from .. import _core


#: Tied leaves that a report lists.
_LISTED = 5


@final
@dataclass(frozen=True, slots=True)
class MissingLeaf:
    """A wanted leaf that is not stored."""

    #: Its path.
    path: str
    #: Why it is missing.
    why: str
    #: Stored paths with similar names, the nearest first: it may have been renamed.
    near: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class UnexpectedLeaf:
    """A stored leaf, inside a wanted entry, that is not wanted."""

    #: Its stored path.
    path: str
    #: The path that a rename gave it, or ``None``.
    wanted: str | None
    #: Missing leaves that it may be, the nearest first.
    near: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class WrongShape:
    """A leaf that is stored in another shape than the wanted one."""

    #: Its path.
    path: str
    #: The stored shape.
    stored: tuple[int, ...]
    #: The wanted shape.
    wanted: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class WrongDtype:
    """A leaf that is stored in another dtype than the wanted one, where the cast is not allowed."""

    #: Its path.
    path: str
    #: The stored dtype.
    stored: str
    #: The wanted dtype.
    wanted: str
    #: Why the cast is not allowed.
    why: str


@final
@dataclass(frozen=True, slots=True)
class WrongKind:
    """A leaf that is stored as another kind of value than the wanted one."""

    #: Its path.
    path: str
    #: The stored kind.
    stored: str
    #: The wanted kind.
    wanted: str


@final
@dataclass(frozen=True, slots=True)
class Collision:
    """A wanted path that renames gave to several stored leaves."""

    #: The wanted path.
    path: str
    #: The paths of the stored leaves.
    stored: tuple[str, ...]


@final
@dataclass(frozen=True, slots=True)
class CastLeaf:
    """A leaf that is restored in another dtype."""

    #: Its path.
    path: str
    #: The stored dtype, or the type of a stored scalar.
    stored: str
    #: The wanted one.
    wanted: str


@final
@dataclass(frozen=True, slots=True)
class ResizedLeaf:
    """A leaf that is restored in another shape."""

    #: Its path.
    path: str
    #: The stored shape.
    stored: tuple[int, ...]
    #: The wanted shape.
    wanted: tuple[int, ...]


@final
@dataclass(frozen=True, slots=True)
class RenamedLeaf:
    """A leaf, or a whole subtree, that is restored under another name."""

    #: Its stored path.
    stored: str
    #: Its wanted path.
    wanted: str


@final
@dataclass(frozen=True, slots=True)
class UnmatchedPattern:
    """A pattern of an option that matches nothing, and may be misspelt."""

    #: The option.
    option: str
    #: The pattern.
    pattern: str
    #: Paths that it may mean.
    near: tuple[str, ...]
    #: True if the restore fails for it.
    fails: bool


@final
@dataclass(frozen=True, slots=True)
class IdleRename:
    """An entry of ``rename=`` that gives names in top-level entries that are not wanted."""

    #: The pattern of stored paths.
    stored: str
    #: The pattern of wanted paths.
    wanted: str


@final
@dataclass(frozen=True, slots=True)
class PassedOver:
    """A step that ``fallback=True`` passed over."""

    #: Its number.
    step: int
    #: Why it cannot be restored.
    why: str


@public
@dataclass(slots=True)
class RestoreReport:
    """The report of a restore, done or refused. Paths are rendered leaf paths: wanted ones, or
    stored ones where stated."""

    #: Leaves that were restored.
    restored: list[str] = field(default_factory=list)
    #: Wanted, not stored.
    missing: list[MissingLeaf] = field(default_factory=list)
    #: Stored inside a wanted entry, not wanted.
    unexpected: list[UnexpectedLeaf] = field(default_factory=list)
    #: Stored in another shape, which ``resize=`` does not allow.
    wrong_shape: list[WrongShape] = field(default_factory=list)
    #: Stored in another dtype, which ``cast=`` does not allow.
    wrong_dtype: list[WrongDtype] = field(default_factory=list)
    #: Stored as another kind of value.
    wrong_kind: list[WrongKind] = field(default_factory=list)
    #: Wanted paths that renames gave to several stored leaves.
    collisions: list[Collision] = field(default_factory=list)
    #: Not restored: the caller's own value stayed.
    kept: list[str] = field(default_factory=list)
    #: Restored in another dtype.
    cast: list[CastLeaf] = field(default_factory=list)
    #: Restored in another shape.
    resized: list[ResizedLeaf] = field(default_factory=list)
    #: Stored paths that were not read: unexpected and ignored.
    ignored: list[str] = field(default_factory=list)
    #: Stored paths that were not read: other top-level entries, ``...``, ``include`` and
    #: ``exclude``.
    left_out: list[str] = field(default_factory=list)
    #: Patterns that match nothing.
    unmatched: list[UnmatchedPattern] = field(default_factory=list)
    #: Renames to top-level entries that are not wanted.
    idle_renames: list[IdleRename] = field(default_factory=list)
    #: Restored under another name.
    renamed: list[RenamedLeaf] = field(default_factory=list)
    #: Newer steps that ``fallback=True`` passed over, newest first.
    passed_over: list[PassedOver] = field(default_factory=list)
    #: Bytes of arrays that were read, on this rank.
    nbytes: int = 0
    #: Bytes of arrays that other ranks have read for this one (``broadcast=``).
    received_nbytes: int = 0
    #: The report in words.
    text: str = ""

    @property
    def ok(self) -> bool:
        """True if everything that was wanted was there."""
        return not (
            self.missing
            or self.unexpected
            or self.wrong_shape
            or self.wrong_dtype
            or self.wrong_kind
            or self.collisions
            or any(one.fails for one in self.unmatched)
        )

    def __str__(self) -> str:
        return self.text

    def mismatch(self, why: str | None = None, leaf: str | None = None) -> MismatchError:
        """The error that carries this report: of all of it, for another reason, or about a leaf."""
        why = self.text if why is None else why
        error = MismatchError(why) if leaf is None else at_leaf(MismatchError, leaf, why)
        error.report = self
        return error


def add_ties(report: RestoreReport, memory: Mapping[str, Hashable]) -> None:
    """Has the text of a refused restore name the missing leaves that are tied to others. ``memory``
    identifies the memory of the wanted leaves, by path."""
    missing = {one.path for one in report.missing}
    there = {place: path for path, place in reversed(list(memory.items())) if path not in missing}
    tied = [(path, there[memory[path]]) for path in missing & memory.keys() if memory[path] in there]
    for path, other in sorted(tied)[:_LISTED]:
        report.text += f'\n  → `{path}` is tied to `{other}`, which is stored: pass missing={{"{path}": "keep"}}, and it gets that value'


def add_match(report: RestoreReport, answer: _core._Matched) -> None:
    """Adds what the engine found out about the wanted leaves."""
    report.text = answer["text"]
    report.missing = [MissingLeaf(path, why, tuple(near)) for path, why, near in answer["missing"]]
    report.unexpected = [
        UnexpectedLeaf(path, wanted, tuple(near)) for path, wanted, near in answer["unexpected"]
    ]
    report.wrong_shape = [
        WrongShape(path, tuple(stored), tuple(wanted)) for path, stored, wanted in answer["wrong_shape"]
    ]
    report.wrong_dtype = [WrongDtype(*row) for row in answer["wrong_dtype"]]
    report.wrong_kind = [WrongKind(*row) for row in answer["wrong_kind"]]
    report.collisions = [Collision(path, tuple(stored)) for path, stored in answer["collisions"]]
    report.unmatched = [
        UnmatchedPattern(option, pattern, tuple(near), fails)
        for option, pattern, near, fails in answer["unmatched"]
    ]
    report.idle_renames = [IdleRename(*row) for row in answer["idle_renames"]]
