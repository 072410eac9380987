"""The steps of a root, without numpy: a listing must not pay for its import."""

from __future__ import annotations

import datetime
import json
import os
from dataclasses import dataclass
from typing import TypedDict, final

from . import _core
from ._locations import Location, explaining, location
from ._manifest import ManifestAdopted
from ._options import reader_json
from ._public import public


@final
@dataclass(frozen=True, slots=True)
class ItemInfo:
    """An item of a step."""

    #: Its name, the bytes of its data files, and the number of its leaves.
    name: str
    nbytes: int
    leaves: int


@final
@dataclass(frozen=True, slots=True)
class AdoptedFiles:
    """The files of another library that have the bytes of a step."""

    #: The checkpoint.
    path: str
    #: The library that wrote it.
    family: str
    #: Bytes of its files.
    nbytes: int

    @classmethod
    def of(cls, adopted: ManifestAdopted, root: str) -> AdoptedFiles:
        """The files that a manifest in a root names."""
        path = os.path.normpath(os.path.join(os.path.realpath(root), adopted["path"]))
        return cls(path, adopted["family"], adopted["bytes"])


@final
@dataclass(frozen=True, slots=True)
class StepInfo:
    """A directory with a step's name."""

    #: Its number; ``None`` if it is not a step.
    step: int | None
    #: Name of the directory.
    name: str
    #: Bytes of the data files in the root.
    nbytes: int
    items: tuple[ItemInfo, ...]
    #: Names of the items that were thinned away.
    dropped: tuple[str, ...]
    #: Its metrics, with those that were added later.
    metrics: dict[str, float]
    #: The first keys of its metadata.
    metadata_keys: tuple[str, ...]
    #: When its save began, and when it was committed, in UTC.
    started: datetime.datetime
    committed: datetime.datetime
    #: Why it cannot be restored, or ``None``. Only :func:`stepwell.verify` reads every byte.
    damage: str | None
    #: The files that have its bytes, if it was adopted. Retention never deletes or changes them.
    adopted: AdoptedFiles | None = None

    @property
    def number(self) -> int:
        """The number that its name ends with, also if it is not a step. -1 without one."""
        if self.step is not None:
            return self.step
        digits = self.name[len(self.name.rstrip("0123456789")) :]
        return int(digits) if digits else -1


def utc(unix_ns: int) -> datetime.datetime:
    """Returns a time of a manifest."""
    seconds, ns = divmod(int(unix_ns), 1_000_000_000)
    return datetime.datetime.fromtimestamp(seconds, datetime.UTC).replace(microsecond=ns // 1000)


class _Item(TypedDict):
    name: str
    bytes: int
    leaves: int


class _Row(TypedDict):
    step: int | None
    name: str
    bytes: int
    items: list[_Item]
    dropped: list[str]
    adopted: ManifestAdopted | None
    metrics: dict[str, float | str]
    metadata_keys: list[str]
    started_unix_ns: int
    committed_unix_ns: int
    damage: str | None


def steps(report: str, root: str) -> list[StepInfo]:
    """The engine's report on a root."""
    rows: list[_Row] = json.loads(report)
    return [
        StepInfo(
            row["step"],
            row["name"],
            row["bytes"],
            tuple(ItemInfo(item["name"], item["bytes"], item["leaves"]) for item in row["items"]),
            tuple(row["dropped"]),
            {name: float(value) for name, value in row["metrics"].items()},
            tuple(row["metadata_keys"]),
            utc(row["started_unix_ns"]),
            utc(row["committed_unix_ns"]),
            row["damage"],
            None if row["adopted"] is None else AdoptedFiles.of(row["adopted"], root),
        )
        for row in rows
    ]


def damaged(report: str, root: str) -> list[tuple[int, str]]:
    """Number and damage of the steps in the engine's report that cannot be restored."""
    return [(row.number, row.damage) for row in steps(report, root) if row.damage is not None]


@public
def inspect(root: Location) -> list[StepInfo]:
    """Returns facts about every directory of a root with a step's name, whole, damaged, or not a
    step, in order. Imports no framework and no numpy."""
    path = location(root, "the root")
    with explaining(path):
        core = _core.Manager(path, reader_json())
    try:
        return steps(core.report(), path)
    finally:
        core.close(None)
