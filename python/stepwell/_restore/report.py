"""The report of a restore, done or refused. Every restore can return it, and every mismatch carries
it."""

from __future__ import annotations

from dataclasses import dataclass, field

from .._public import public
from ..errors import MismatchError


@public
@dataclass(slots=True)
class RestoreReport:
    """The report of a restore, done or refused. Paths are rendered leaf paths: wanted ones, or
    stored ones where stated."""

    #: Leaves that were restored.
    restored: list[str] = field(default_factory=list)
    #: Wanted, not stored: path, why, and stored paths that it may be called.
    missing: list[tuple[str, str, list[str]]] = field(default_factory=list)
    #: Stored inside a wanted entry, not wanted: stored path, its wanted name where a rename gave
    #: one, missing leaves that it may be.
    unexpected: list[tuple[str, str | None, list[str]]] = field(default_factory=list)
    #: Path, stored and wanted shape.
    wrong_shape: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    #: Path, stored and wanted dtype, what is wrong with the cast.
    wrong_dtype: list[tuple[str, str, str, str]] = field(default_factory=list)
    #: Path, what is stored, what is wanted.
    wrong_kind: list[tuple[str, str, str]] = field(default_factory=list)
    #: Path, and the stored leaves that renames gave that one name.
    collisions: list[tuple[str, list[str]]] = field(default_factory=list)
    #: Not restored: the caller's own value stayed.
    kept: list[str] = field(default_factory=list)
    #: Restored in another dtype: path, stored and wanted dtype.
    cast: list[tuple[str, str, str]] = field(default_factory=list)
    #: Restored in another shape: path, stored and wanted shape.
    resized: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    #: Stored paths that were not read: unexpected and ignored.
    ignored: list[str] = field(default_factory=list)
    #: Stored paths that were not read: other top-level entries, ``...``, ``include`` and
    #: ``exclude``.
    left_out: list[str] = field(default_factory=list)
    #: Patterns that apply to nothing: the option, the pattern, what it may have meant, and whether
    #: that made the restore fail.
    unmatched: list[tuple[str, str, list[str], bool]] = field(default_factory=list)
    #: Renames to top-level entries that are not wanted.
    idle_renames: list[tuple[str, str]] = field(default_factory=list)
    #: Restored under another name: stored and wanted path (of a whole subtree: its own).
    renamed: list[tuple[str, str]] = field(default_factory=list)
    #: Newer steps that ``fallback=True`` passed over, newest first, each with the reason.
    passed_over: list[tuple[int, str]] = field(default_factory=list)
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
            or any(fails for *_, fails in self.unmatched)
        )

    def __str__(self) -> str:
        return self.text

    def mismatch(self, text: str | None = None) -> MismatchError:
        """The error that carries this report."""
        error = MismatchError(self.text if text is None else text)
        error.report = self
        return error
