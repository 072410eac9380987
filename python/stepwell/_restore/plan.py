"""Dry runs: what a restore would read and do. It is made by the match and from the read plan that
the restore itself makes; no array is read."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from math import prod
from typing import final

from .. import _core
from .._distributed.agreement import Unasked
from .._manifest import ManifestItem
from .._paths import printable, render
from .._state.specs import AS_STORED
from . import collector as collecting
from . import template
from .options import RestoreOptions
from .report import RestoreReport
from .restore import Restore

_SHOWN = 8


@final
@dataclass(slots=True)
class ItemPlan:
    """The reads of one item."""

    #: Its name.
    name: str
    #: Leaves whose bytes are in it and are read.
    leaves: int = 0
    #: Bytes that are wanted: of arrays as they are stored, and of encoded objects.
    nbytes: int = 0
    #: Bytes that are read for them: whole blocks, and small gaps between them.
    read_bytes: int = 0
    #: Blocks that are read and checked.
    blocks: int = 0
    #: Reads.
    reads: int = 0
    #: Data files, relative to the step.
    files: list[str] = field(default_factory=list)


@final
@dataclass(slots=True)
class RestorePlan:
    """The plan of a restore. ``str()`` formats it for people."""

    #: The checkpoint's path.
    path: str
    #: Its step; ``None`` for files of another library.
    step: int | None
    #: By name, those that are read.
    items: dict[str, ItemPlan]
    #: The report that the restore would return: leaves restored, kept, cast, resized, renamed,
    #: ignored and left out.
    report: RestoreReport

    @property
    def nbytes(self) -> int:
        """Bytes that are wanted."""
        return sum(item.nbytes for item in self.items.values())

    @property
    def read_bytes(self) -> int:
        """Bytes that are read for them."""
        return sum(item.read_bytes for item in self.items.values())

    @property
    def blocks(self) -> int:
        """Blocks that are read and checked."""
        return sum(item.blocks for item in self.items.values())

    @property
    def reads(self) -> int:
        """Reads."""
        return sum(item.reads for item in self.items.values())

    @property
    def files(self) -> list[str]:
        """Data files that are read, relative to the step."""
        return [file for item in self.items.values() for file in item.files]

    @property
    def not_wanted(self) -> list[str]:
        """Stored paths that are not read."""
        return [*self.report.left_out, *self.report.ignored]

    @property
    def _title(self) -> str:
        return (
            f"restore of {self.path}"
            if self.step is None
            else f"restore of step {self.step} from {self.path}"
        )

    def __str__(self) -> str:
        report = self.report
        lines = [
            f"{self._title}: {_count(len(report.restored), 'leaf', 'leaves')}, {_size(self.nbytes)}",
            f"  reads {_size(self.read_bytes)}: {_reads(self.blocks, self.reads, len(self.files))}",
        ]
        for item in self.items.values():
            lines.append(
                f"  item {item.name}: {_count(item.leaves, 'leaf', 'leaves')}, {_size(item.nbytes)}; "
                f"{_reads(item.blocks, item.reads, len(item.files))}"
            )
        listed: Sequence[tuple[str, Sequence[str]]] = (
            ("cast", [f"{one.path} {one.stored} → {one.wanted}" for one in report.cast]),
            ("resized", [f"{one.path} {one.stored} → {one.wanted}" for one in report.resized]),
            ("renamed", [f"{one.stored} → {one.wanted}" for one in report.renamed]),
            ("kept as they are", report.kept),
            ("not wanted", self.not_wanted),
        )
        for what, leaves in listed:
            if leaves:
                rest = f", … and {len(leaves) - _SHOWN} more" if len(leaves) > _SHOWN else ""
                lines.append(f"  {what} ({len(leaves)}): {', '.join(leaves[:_SHOWN])}{rest}")
        return "\n".join(printable(line) for line in lines)


def _count(number: int, one: str, several: str) -> str:
    return f"{number} {one if number == 1 else several}"


def _reads(blocks: int, reads: int, files: int) -> str:
    return f"{_count(blocks, 'block', 'blocks')} in {_count(reads, 'read', 'reads')} of {_count(files, 'file', 'files')}"


@collecting.paused()
def plan(
    core: _core.Checkpoint,
    options: RestoreOptions,
    items: Sequence[ManifestItem],
    others: Unasked | None = None,
) -> RestorePlan:
    """Plans a restore. ``items`` are those of the manifest; ``others`` stands for the other ranks,
    where there are some."""
    job = Restore(core, options, together=others)
    name_of = {str(item["dir"]): str(item["name"]) for item in items}
    item_of_top = {str(top["name"]): str(item["name"]) for item in items for top in item["top_level"]}
    target = AS_STORED if options.target is None else options.target
    _, reads = job.prepare(template.parse(target), options.fill)
    reads.settle(dry=True)
    found = {name: ItemPlan(name) for name in name_of.values()}

    def count(arrays: list[tuple[int, list[int]]], objects: list[int]) -> None:
        for path, number, blocks, read_bytes, wanted in job.core.plan(arrays, objects):
            # A foreign checkpoint is one item, whatever its files are called.
            item = found[name_of.get(path.split("/", 1)[0], next(iter(found)))]
            item.reads += number
            item.blocks += blocks
            item.read_bytes += read_bytes
            item.nbytes += wanted
            if path not in item.files:
                item.files.append(path)

    for own in (False, True):
        for batch in reads.batches(own):
            count([(one.stored, list(one.box)) for one in batch if prod(one.box)], [])
    if job.objects:
        count([], job.objects)
    for leaf in {one.stored for one in reads.jobs} | set(job.objects):
        components = job.structure.components(job.structure.leaf_nodes[leaf])
        name = item_of_top.get(render(components[:1]), next(iter(found)))
        found[name].leaves += 1
    return RestorePlan(
        path=core.path(),
        step=int(core.step()),
        items={name: item for name, item in found.items() if item.files or item.leaves},
        report=job.report,
    )


def _size(nbytes: int) -> str:
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024 or unit == "GiB":
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return ""
