"""Restoring: match what is wanted with what is stored, then read, then put together.

The order matters. The whole match finishes (one report, all differences) before the first byte of
the caller's memory is written. Objects and cast arrays are read and checked first, arrays that are
filled in place last. Containers and stateful objects are updated when everything has been read. An
error in the last step names what it may have overwritten.
"""

from __future__ import annotations

import datetime
import difflib
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import itemgetter

import numpy as np

from .. import _adapters as adapters
from .. import _core
from .. import _lifecycle as lifecycle
from .._adapters import Box, OnDevice, Target
from .._distributed.agreement import Together, Unasked
from .._distributed.exchange import Exchange
from .._paths import Component, glob_escape, render
from .._state.leaves import Reviver
from .._state.specs import AS_STORED, ArraySpec, to_dtype
from .._types import Array
from ..errors import MismatchError, at_leaf
from . import collector as collecting
from . import scalars, template
from .array_reads import ArrayReads, Conversion, Job, telling
from .options import CASTS, RestoreKeywords, RestoreOptions
from .report import CastLeaf, RenamedLeaf, ResizedLeaf, RestoreReport, add_match, add_ties
from .structure import Structure
from .template import Branch, Leaf, Part, naming
from .wanted import Moves, Wanted, source_of

_WARNING = 30
_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Restored:
    """A restored state, and the report of its restore."""

    state: object
    report: RestoreReport

    def answer(self, keywords: RestoreKeywords) -> object:
        """Returns what ``restore`` with these keywords returns."""
        return (self.state, self.report) if keywords.get("return_report") else self.state


class Restore:
    """One restore from an open checkpoint of the engine."""

    def __init__(
        self,
        core: _core.Checkpoint,
        options: RestoreOptions,
        structure: Structure | None = None,
        together: Together | Unasked | None = None,
        exchange: Exchange | None = None,
        grouped: bool = False,
    ) -> None:
        self.core = core = options.mapped(core)
        self._grouped = grouped
        #: Paths are rendered one by one where somebody looks at them.
        self._lists_restored = options.return_report or not grouped
        self._exchange = exchange
        self._together = together
        self.report = RestoreReport()
        self._options = options.plain()
        self._device = options.device
        self.structure = Structure(core.nodes) if structure is None else structure
        #: Leaves that hold the objects that are read.
        self.objects: list[int] = []
        self._moves: Moves = {}
        #: Scalars that are stored where an array of another kind is wanted, for the report: what is
        #: stored and what is wanted, by path.
        self._scalars: dict[str, tuple[str, str]] = {}
        self._place = options.placement()
        self._to = options.to
        self._empty_there = (
            None if self._to is None or self._device is None else adapters.empty(self._to, self._device)
        )

    @cached_property
    def _paths(self) -> list[str]:
        """Rendered paths of the stored leaves."""
        return self.core.leaf_paths()

    def run(self, part: Part, fill: bool) -> object:
        """The caller's structure with the stored values; in place where ``fill`` says so and it can
        be."""
        wanted, reads = self.prepare(part, fill)
        reads.settle()
        if self._exchange is not None:
            reads.share(self._exchange)
        reviver = Reviver(template.enum_classes(wanted.leaves))
        objects = dict(zip(self.objects, self.core.objects(self.objects, reviver), strict=True))
        wanted.check_types(objects)
        reads.read_new()
        wanted.try_states(objects, fill)
        reads.fill()
        with telling(lambda: [*reads.filled(), *wanted.given]):
            wanted.fill_results(objects, fill)
            found = template.finish(part, fill)
            if fill:
                self._finish_together(wanted.branches)
            return found

    def _finish_together(self, branches: list[Branch]) -> None:
        """Takes the steps of all ranks. None begins if another rank has failed until here."""
        steps = [branch.together for branch in branches if branch.together is not None]
        if steps and isinstance(self._together, Together):
            self._together.agree()
        for step in steps:
            step()

    def prepare(self, part: Part, fill: bool) -> tuple[Wanted, ArrayReads]:
        """Matches, and says what is to be read. Reads nothing."""
        leaves, branches = self._settle(part)
        if fill:
            template.check_fillable(leaves, branches)
        self._check_places(leaves, branches)
        self._settle_scalars(leaves)
        self._placed(leaves)
        self._check_first(branches)
        place, moves = self._place_all, self._moves
        wanted = Wanted(self.structure, self.report, leaves, branches, self._to, place, moves, self._grouped)
        answer = self._match(wanted, self._of_other_ranks(branches))
        if self._together is not None:
            self._together.settle()
        return wanted, self._reads(wanted, answer, fill)

    def _settle(self, part: Part) -> tuple[list[Leaf], list[Branch]]:
        """Gives containers the children that depend on what is stored there."""
        leaves, branches = template.walk(part)
        if any(branch.settle is not None for branch in branches):
            self._settle_children(branches)
            leaves, branches = template.walk(part)
        ranked = [branch for branch in branches if branch.per_rank]
        for branch in ranked:
            node = self.structure.find(branch.components)
            if node is not None and self.structure.is_container(node):
                stored = [str(self.structure.key(child)) for child in self.structure.children[node]]
                template.check_ranks(branch, stored)
        return template.walk(part) if ranked else (leaves, branches)

    def _check_places(self, leaves: list[Leaf], branches: list[Branch]) -> None:
        """Raises where a tree of shardings names what is neither stored nor wanted."""
        asked: list[str] = getattr(self._place, "paths", [])
        if not asked:
            return
        structure = self.structure
        known = {
            *structure.paths,
            *(one.path for one in branches),
            *(one.path for one in leaves),
        }
        wrong = [path for path in asked if path not in known]
        if wrong:
            # A sequence of plain values is one leaf here, and several to jax.tree.map.
            rows = zip(self._paths, self.core.leaves(), strict=True)
            plain = {path for path, (_, dtype, *_) in rows if dtype is None}
            plain |= {leaf.path for leaf in leaves if leaf.what == "object"}
            wrong = [path for path in wrong if not any(path.startswith(f"{one}[") for one in plain)]
        if wrong:
            lines = [f"shardings= names {len(wrong)} path(s) that are neither stored nor wanted:"]
            for path in wrong[:_SHOWN]:
                near = difflib.get_close_matches(path, known, 3)
                lines.append(f"  {path}" + (f" (near it are {', '.join(near)})" if near else ""))
            if len(wrong) > _SHOWN:
                lines.append(f"  … and {len(wrong) - _SHOWN} more")
            error = MismatchError("\n".join(lines))
            error.leaf = wrong[0]
            raise error

    def _settle_children(self, branches: list[Branch]) -> None:
        rows = self.core.leaves()

        def spec(leaf: int) -> object:
            _, dtype, shape, _ = rows[leaf]
            return AS_STORED if dtype is None or shape is None else ArraySpec(tuple(shape), dtype)

        for branch in branches:
            if branch.settle is None:
                continue
            node = self.structure.find(branch.components)
            if node is not None:
                moved = self._moved(branch)
                self._ignore_followers(branch)
                outline = self.structure.outline(node, spec)
                with naming(branch.components, "what is stored does not fit it"):
                    branch.children = branch.settle(outline, moved, partial(self._cast_of, branch))

    def _cast_of(self, branch: Branch, below: tuple[Component, ...]) -> np.dtype | None:
        """Returns the dtype that ``cast=`` names for an entry of a container; ``None`` if it names
        none."""
        rules = self._options["cast"]
        if not isinstance(rules, dict):
            return None
        (found,) = _core.first_globs([*rules], [render((*branch.components, *below))])
        name = None if found is None else [*rules.values()][found]
        return None if name is None or name in CASTS else to_dtype(name)

    def _ignore_followers(self, branch: Branch) -> None:
        """Adds to ``unexpected=`` the entries that go by the names of entries to be ignored. A
        pattern of the caller's that matches such an entry itself decides first."""
        rules, follows = self._options["unexpected"], branch.follows
        if not isinstance(rules, dict) or follows is None:
            return
        leaders = (*branch.components, *follows.leaders)
        node = self.structure.find(leaders)
        if node is None:
            return
        names = [str(self.structure.key(child)) for child in self.structure.children[node]]
        found = _core.first_globs([*rules], [render((*leaders, ("k", name))) for name in names])
        choices = [*rules.values()]
        wanted = set(follows.names)
        for name, which in zip(names, found, strict=True):
            if which is None or choices[which] != "ignore" or name in wanted:
                continue
            for above in follows.followers:
                place = (*branch.components, *above, ("k", name))
                if self.structure.find(place) is not None:
                    rules.setdefault(glob_escape(render(place)), "ignore")

    def _moved(self, branch: Branch) -> dict[str, str]:
        """Returns the new names of renamed entries by their stored names. Adds the renames of the
        entries that go by those names."""
        rules, follows = self._options["rename"], branch.follows
        if not rules or follows is None:
            return {}
        leaders = (*branch.components, *follows.leaders)
        node = self.structure.find(leaders)
        if node is None:
            return {}
        stored = [str(self.structure.key(child)) for child in self.structure.children[node]]
        wanted = {render((*leaders, ("k", name))): name for name in follows.names}
        found = _core.renamed(rules, [render((*leaders, ("k", name))) for name in stored])
        moved = {
            old: wanted[new]
            for old, new in zip(stored, found, strict=True)
            if new is not None and new in wanted
        }
        for above in follows.followers:
            places = {
                name: (*branch.components, *above, ("k", name)) for one in moved.items() for name in one
            }
            self._moves |= {places[old]: None for old in moved}
            self._moves |= {places[new]: places[old] for old, new in moved.items()}
            for old, new in moved.items():
                if self.structure.find(places[old]) is not None:
                    rules.append((glob_escape(render(places[old])), glob_escape(render(places[new]))))
        return moved

    def _settle_scalars(self, leaves: list[Leaf]) -> None:
        """Marks scalars that are stored as arrays without dimensions, and the other way round."""
        rows: list[_core._LeafRow] | None = None
        for leaf in leaves:
            # Numpy makes a tuple for each shape that is asked for.
            if isinstance(leaf.spec, np.ndarray) and leaf.spec.ndim:
                continue
            wants_array = leaf.what == "array" and leaf.spec is not None and leaf.spec.shape == ()
            wants_scalar = leaf.what == "object" and scalars.kind_of_value(leaf.value) is not None
            if not wants_array and not wants_scalar:
                continue
            source = source_of(self._moves, leaf.components)
            number = None if source is None else self.structure.leaf_at(source)
            if number is None:
                continue
            rows = self.core.leaves() if rows is None else rows
            _, dtype, shape, _ = rows[number]
            if wants_scalar and dtype is not None and not shape:
                if scalars.kind_of_dtype(dtype) == scalars.kind_of_value(leaf.value):
                    leaf.converts = "array"
            elif wants_array and dtype is None and leaf.spec is not None and leaf.spec.dtype is not None:
                stored = self.core.objects([number], Reviver())[0]
                if scalars.kind_of_value(stored) == scalars.kind_of_dtype(leaf.spec.dtype) is not None:
                    leaf.converts = "object"
                else:
                    value = f"the {type(stored).__name__} {stored!r:.60}"
                    self._scalars[leaf.path] = value, f"an array of {leaf.spec.dtype.name}"

    def _check_first(self, branches: list[Branch]) -> None:
        """Raises if a stored value shows that its container is of another kind. The differences of
        the other leaves would only mislead."""
        for branch in branches:
            if branch.first is None:
                continue
            component, check = branch.first
            leaf = self.structure.leaf_at((*branch.components, component))
            if leaf is None:
                continue
            why = check(self.core.objects([leaf], Reviver())[0])
            if why is not None:
                raise at_leaf(MismatchError, branch.path, why)

    def _placed(self, leaves: list[Leaf]) -> None:
        """Has arrays of JAX go where ``shardings=`` says."""
        if self._place is None:
            return
        for leaf in leaves:
            if leaf.target is not None and leaf.target.replace is not None:
                where = self._place(leaf.path, leaf.target.spec)
                if where is None:
                    continue
                with naming(leaf.components, "shardings= does not fit it"):
                    leaf.target = leaf.target.replace(leaf.target, where)

    def _place_all(self, paths: list[str], arrays: list[Array]) -> object:
        if self._place is None:
            return self._device
        found = [
            self._place(path, ArraySpec(array.shape, to_dtype(array.dtype)))
            for path, array in zip(paths, arrays, strict=True)
        ]
        for path, array, where in zip(paths, arrays, found, strict=True):
            with naming(path, "shardings= does not fit it"):
                adapters.check_fits("jax", where, array.shape)
        return found

    def _of_other_ranks(self, branches: list[Branch]) -> set[int]:
        """Returns the leaves of :class:`PerRank` values, of which this rank wants its own only."""
        structure, found = self.structure, set[int]()
        for branch in branches:
            node = structure.find(branch.components) if branch.per_rank else None
            if branch.per_rank and node is not None and structure.is_container(node):
                own = branch.per_rank.stored_key()
                others = [child for child in structure.children[node] if str(structure.key(child)) != own]
                found.update(leaf for child in others for leaf in structure.leaves_below(child))
        return found

    def _match(self, wanted: Wanted, elsewhere: set[int]) -> _core._Matched:
        """Returns the engine's answer. Raises where something does not match. ``elsewhere``: leaves
        that are other ranks'."""
        given = {
            **self._options,
            "elsewhere": elsewhere,
            "whole": wanted.whole,
            "groupable": wanted.groupable or [],
            "dropped": [(item, _when(ns)) for item, ns in self.core.dropped()],
        }
        answer = _core.match_state(self.core, wanted.rows, wanted.top_level, given)
        if self._together is not None and not _misfits(answer):
            # A leaf that another rank wants is not unexpected.
            mine = answer["unexpected_leaves"]
            of_none = set(self._together.unexpected(mine))
            given["elsewhere"] = elsewhere | (set(mine) - of_none)
            if len(of_none) < len(mine):
                answer = _core.match_state(self.core, wanted.rows, wanted.top_level, given)
        report = self.report
        add_match(report, answer)
        report.kept = [wanted.places[number].path for number in answer["kept"]]
        report.ignored = [self._paths[leaf] for leaf in answer["ignored"]]
        report.left_out = [self._paths[leaf] for leaf in answer["left_out"]]
        wanted.kept = answer["kept"]
        if not answer["ok"]:
            self._show_scalars()
            add_ties(
                report, {leaf.path: where for leaf in wanted.leaves if (where := leaf.memory) is not None}
            )
            raise report.mismatch()
        if report.unmatched or report.idle_renames:
            lifecycle.log(_WARNING, "stepwell.restore", f"restore of {self.core.path()}: {report.text}")
        return answer

    def _show_scalars(self) -> None:
        """Has the report show the values of stored scalars."""
        rows, lines = self.report.wrong_kind, self.report.text.split("\n")
        for number, row in enumerate(rows):
            if row.path in self._scalars:
                stored, wanted = self._scalars[row.path]
                rows[number] = replace(row, stored=stored, wanted=wanted)
                line = f"  {row.path}: stored is {row.stored}, wanted is {row.wanted}"
                shown = f"  {row.path}: stored is {stored}, wanted is {wanted}"
                lines = [shown if one == line else one for one in lines]
        self.report.text = "\n".join(lines)

    def _reads(self, wanted: Wanted, answer: _core._Matched, fill: bool) -> ArrayReads:
        """Makes the reads of what has matched: one for each array in memory."""
        objects: dict[int, None] = {}
        jobs: list[Job] = []
        #: The jobs of leaves that may share an array.
        shared: dict[object, Job] = {}
        uses = Counter(map(itemgetter(2), answer["matches"]))
        report, renames = self.report, bool(self._options["rename"])
        own_groups: list[Leaf] = []
        new_groups: list[Leaf] = []
        conversions = [Conversion(*row) for row in answer["conversions"]]
        for number, stored, source, which in answer["matches"]:
            place = wanted.places[number]
            leaf = place if type(place) is Leaf else None
            if type(which) is _core.ArrayGroup:
                assert leaf is not None
                leaf.group, leaf.number = which, None
                (own_groups if fill and leaf.what == "group" else new_groups).append(leaf)
                if self._lists_restored:
                    report.restored.extend(self._paths[one] for one in which.stored())
                continue
            path = self._paths[stored]
            if renames and (leaf is None or leaf.what != "stored"):
                path = place.path
                if path != self._paths[stored]:
                    report.renamed.append(RenamedLeaf(self._paths[stored], path))
            report.restored.append(path)
            if which is None:
                objects[source] = None
                wanted.matches[number].append((stored, source, None))
                continue
            mine: list[Job] = []
            wanted.matches[number].append((stored, source, mine))
            conversion = conversions[which]
            for box, own in self._memories(leaf, path, conversion, fill):
                job = Job(source, path, conversion, own, box)
                taken_over = False
                if job.target is None and conversion.keeps and leaf is not None:
                    job.rest = self._rest(path, leaf, box)
                elif job.target is None:
                    job.empty = self._empty(leaf, fill)
                    taken_over = leaf is not None and wanted.takes_over(leaf, stored)
                if box is None and uses[source] == 1:
                    jobs.append(job)
                else:
                    memory = id(job.rest if job.target is None else job.target)
                    key = (source, which, job.offset, job.shape, memory, taken_over)
                    first = shared.setdefault(key, job)
                    if first is job:
                        jobs.append(job)
                    job = first
                mine.append(job)
        self.objects = list(objects)
        for job in jobs:
            report.nbytes += job.nbytes
            conversion = job.conversion
            if not conversion.exact:
                report.cast.append(CastLeaf(job.path, conversion.stored_dtype.name, conversion.dtype.name))
            if conversion.stored_shape != conversion.shape:
                report.resized.append(ResizedLeaf(job.path, conversion.stored_shape, conversion.shape))
        kept = [wanted.places[number] for number in wanted.kept] if fill else []
        arrays = [(one.path, one.array) for one in kept if isinstance(one, Leaf) and one.array is not None]
        return ArrayReads(self.core, jobs, report, arrays, own_groups, new_groups)

    def _memories(
        self, leaf: Leaf | None, path: str, conversion: Conversion, fill: bool
    ) -> Iterable[tuple[Box | None, np.ndarray | OnDevice | None]]:
        """The boxes of an array that are wanted (``None``: all of it), each with the caller's
        memory that it goes to, if any."""
        target = None if leaf is None else leaf.target
        if target is None or target.boxes is None:
            return ((None, leaf.array if fill and leaf is not None and leaf.what == "array" else None),)
        self._check_inside(path, target, conversion.stored_shape)
        memories = target.memories if fill and target.memories is not None else [None] * len(target.boxes)
        return zip(target.boxes, memories, strict=True)

    def _check_inside(self, path: str, target: Target, stored: tuple[int, ...]) -> None:
        """Raises for a part that lies nowhere in what is stored, where nobody has said how large
        the whole is to be: its padding could not be told from a mistake."""
        if target.spec.shape is not None or target.pads:
            return
        for offset, extent in target.boxes or ():
            if len(offset) != len(stored) or any(
                first + n > size for first, n, size in zip(offset, extent, stored, strict=True)
            ):
                raise self.report.mismatch(
                    f"a part of shape {tuple(extent)} at {tuple(offset)} does not lie in what is stored, which has shape {stored}; "
                    "pass shape=, the shape of the whole tensor, if what is beyond is padding",
                    path,
                )

    def _rest(self, path: str, leaf: Leaf, box: Box | None) -> object:
        """Returns the caller's array, whose values stay where nothing is stored."""
        if box is None:
            return leaf.value
        raise self.report.mismatch(
            'resize="keep" takes whole arrays, or shards in host memory; pass resize="pad"', path
        )

    def _empty(self, leaf: Leaf | None, fill: bool) -> Callable[[tuple[int, ...], np.dtype], object] | None:
        """Returns the function that makes a new array on its final device. An array that is only
        copied into an existing one is made on the host."""
        if leaf is not None and leaf.target is not None:
            return None if fill and leaf.target.has_value else leaf.target.empty
        if self._to is None or self._place is not None or leaf is None or leaf.owner is not None:
            return None
        return self._empty_there


def _misfits(answer: _core._Matched) -> bool:
    """True if something does not match, beside what is stored and not wanted."""
    return bool(
        answer["missing"]
        or answer["wrong_dtype"]
        or answer["wrong_kind"]
        or answer["wrong_shape"]
        or answer["collisions"]
        or any(fails for *_, fails in answer["unmatched"])
    )


def _when(unix_ns: int) -> str:
    """A moment, for people."""
    moment = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(
        microseconds=unix_ns // 1000
    )
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


# A dozen objects for each leaf are made, which are all there until it returns.
@collecting.paused()
def run(
    core: _core.Checkpoint,
    options: RestoreOptions,
    together: Together | None = None,
    exchange: Exchange | None = None,
) -> Restored:
    """A whole restore. Without ``like`` and ``into``: everything, as it is stored. ``together``:
    where other ranks restore too; ``exchange``: and get from each other what several want."""
    target = AS_STORED if options.target is None else options.target
    alone = together is None and exchange is None
    if alone and not options.rename and options.shardings is None and options.map is None:
        part = template.parse(target, "fill" if options.fill else "make")
        job = Restore(core, options, grouped=True)
        try:
            return Restored(job.run(part, options.fill), job.report)
        except MismatchError as error:
            # Rare cases and messages are left to a restore without groups.
            if error.overwritten:
                raise
    job = Restore(core, options, together=together, exchange=exchange)
    return Restored(job.run(template.parse(target), options.fill), job.report)
