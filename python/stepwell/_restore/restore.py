"""Restoring: match what is wanted with what is stored, then read, then put together.

The order matters. The whole match finishes (one report, all differences) before the first byte of
the caller's memory is written. Objects and cast arrays are read and checked first, arrays that are
filled in place last. Containers and stateful objects are updated when everything has been read. An
error in the last step names what it may have overwritten.
"""

from __future__ import annotations

import datetime
import difflib
from typing import Any

from .. import _adapters as adapters
from .. import _core
from .. import _lifecycle as lifecycle
from .._adapters import Target
from .._distributed.agreement import Together, Unasked
from .._distributed.exchange import Exchange
from .._paths import named
from .._state.leaves import Reviver
from .._state.specs import AS_STORED, ArraySpec
from ..errors import MismatchError
from . import collector as collecting
from . import scalars, template
from .array_reads import ArrayReads, Job, telling
from .options import RestoreOptions
from .report import RestoreReport
from .structure import Structure
from .template import Part, naming
from .wanted import Wanted

_WARNING = 30
_SHOWN = 8


class Restore:
    """One restore from an open checkpoint of the engine."""

    def __init__(
        self,
        core: Any,
        options: RestoreOptions,
        structure: Structure | None = None,
        together: Together | Unasked | None = None,
        exchange: Exchange | None = None,
    ) -> None:
        self.core = core
        self._exchange = exchange
        self._together = together
        self.report = RestoreReport()
        self._options = options.plain()
        self._device = options.device
        self._structure = structure
        #: Leaves that hold the objects that are read.
        self.objects: list[int] = []
        self._job_of: dict[tuple[int, int], list[Job]] = {}
        self._place = options.placement()
        self._to = options.to
        self._empty_there = (
            None if self._to is None or self._device is None else adapters.empty(self._to, self._device)
        )

    @property
    def makes_no_tensors_on_devices(self) -> bool:
        """True if what is new, and is not described by the caller, is made in host memory."""
        return self._empty_there is None

    @property
    def structure(self) -> Structure:
        """The stored tree."""
        if self._structure is None:
            self._structure = Structure(self.core.nodes())
        return self._structure

    def run(self, part: Part, fill: bool) -> Any:
        """The caller's structure with the stored values; in place where ``fill`` says so and it can
        be."""
        wanted, reads = self.prepare(part, fill)
        reads.settle()
        if self._exchange is not None:
            reads.share(self._exchange)
        objects = dict(
            zip(
                self.objects,
                self.core.objects(self.objects, Reviver(template.enum_classes(part))),
                strict=True,
            )
        )
        wanted.check_types(objects)
        reads.read_new()
        wanted.try_states(self._arrays(), objects, fill)
        reads.fill()
        with telling(lambda: [*reads.filled(), *wanted.given]):
            wanted.fill_results(self._arrays(), objects, fill)
            return template.finish(part, fill)

    def prepare(self, part: Part, fill: bool) -> tuple[Wanted, ArrayReads]:
        """Matches, and says what is to be read. Reads nothing."""
        if fill:
            template.check_fillable(part)
        self._check_places(part)
        self._settle(part)
        self._settle_scalars(part)
        self._placed(part)
        self._check_first(part)
        self._check_ranks(part)
        wanted = Wanted(self.structure, self.report, part, self._to, self._place_all)
        if wanted.specs or wanted.top_level or wanted.whole:
            self._match(wanted)
        if self._together is not None:
            self._together.settle()
        return wanted, self._reads(wanted, fill)

    def _check_places(self, part: Part) -> None:
        """Raises where a tree of shardings names what is neither stored nor wanted."""
        asked: list[str] = getattr(self._place, "paths", [])
        if not asked:
            return
        structure, wanted = self.structure, list(template.leaves(part))
        known = {
            *structure.paths,
            *(one.path for one in template.branches(part)),
            *(one.path for one in wanted),
        }
        wrong = [path for path in asked if path not in known]
        if wrong:
            # A sequence of plain values is one leaf here, and several to jax.tree.map.
            rows = zip(structure.leaf_paths(), self.core.leaves(), strict=True)
            plain = {path for path, (_, dtype, *_) in rows if dtype is None}
            plain |= {leaf.path for leaf in wanted if leaf.what == "object"}
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

    def _settle(self, part: Part) -> None:
        """Gives containers the children that depend on what is stored there."""
        pending = [branch for branch in template.branches(part) if branch.settle is not None]
        rows = self.core.leaves() if pending else []

        def spec(leaf: int) -> Any:
            _, dtype, shape, _ = rows[leaf]
            return AS_STORED if dtype is None else ArraySpec(tuple(shape), dtype)

        for branch in pending:
            node = self.structure.find(branch.components)
            if node is not None and branch.settle is not None:
                with naming(branch.path, "what is stored does not fit it"):
                    branch.children = branch.settle(self.structure.outline(node, spec))

    def _settle_scalars(self, part: Part) -> None:
        """Marks scalars that are stored as arrays without dimensions, and the other way round."""
        rows: Any = None
        for leaf in template.leaves(part):
            wants_array = leaf.what == "array" and leaf.spec is not None and leaf.spec.shape == ()
            wants_scalar = leaf.what == "object" and scalars.kind_of_value(leaf.value) is not None
            if not wants_array and not wants_scalar:
                continue
            node = self.structure.find(leaf.components)
            if node is None or self.structure.is_container(node):
                continue
            rows = self.core.leaves() if rows is None else rows
            number = self.structure.nodes[node][2]
            _, dtype, shape, _ = rows[number]
            if wants_scalar and dtype is not None and tuple(shape) == ():
                if scalars.kind_of_dtype(dtype) == scalars.kind_of_value(leaf.value):
                    leaf.converts = "array"
            elif wants_array and dtype is None and leaf.spec is not None and leaf.spec.dtype is not None:
                stored = self.core.objects([number], Reviver())[0]
                if scalars.kind_of_value(stored) == scalars.kind_of_dtype(leaf.spec.dtype) is not None:
                    leaf.converts = "object"

    def _check_first(self, part: Part) -> None:
        """Raises if a stored value shows that its container is of another kind. The differences of
        the other leaves would only mislead."""
        for branch in template.branches(part):
            if branch.first is None:
                continue
            component, check = branch.first
            node = self.structure.find((*branch.components, component))
            if node is None or self.structure.is_container(node):
                continue
            leaf = self.structure.nodes[node][2]
            why = check(self.core.objects([leaf], Reviver())[0])
            if why is not None:
                error = MismatchError(f"{named(branch.path)}: {why}")
                error.leaf = branch.path
                raise error

    def _check_ranks(self, part: Part) -> None:
        """Settles what is wanted of values that differ on every rank."""
        for branch in template.branches(part):
            if not branch.per_rank:
                continue
            node = self.structure.find(branch.components)
            if node is not None and self.structure.is_container(node):
                stored = [str(self.structure.key(child)) for child in self.structure.children[node]]
                template.check_ranks(branch, stored)

    def _placed(self, part: Part) -> None:
        """Has arrays of JAX go where ``shardings=`` says."""
        if self._place is None:
            return
        for leaf in template.leaves(part):
            if leaf.target is not None and leaf.target.replace is not None and leaf.spec is not None:
                where = self._place(leaf.path, leaf.spec)
                if where is None:
                    continue
                with naming(leaf.path, "shardings= does not fit it"):
                    leaf.target = leaf.target.replace(leaf.target, where)

    def _place_all(self, paths: list[str], arrays: list[Any]) -> Any:
        if self._place is None:
            return self._device
        found = [
            self._place(path, ArraySpec(array.shape, array.dtype))
            for path, array in zip(paths, arrays, strict=True)
        ]
        for path, array, where in zip(paths, arrays, found, strict=True):
            with naming(path, "shardings= does not fit it"):
                adapters.check_fits("jax", where, array.shape)
        return found

    def _arrays(self) -> dict[tuple[int, int], Any]:
        """Returns the arrays that were read: one, or one for each wanted box."""
        return {
            key: jobs[0].result if len(jobs) == 1 else [job.result for job in jobs]
            for key, jobs in self._job_of.items()
        }

    def _match(self, wanted: Wanted) -> None:
        given = {
            **self._options,
            "whole": wanted.whole,
            "dropped": [(item, _when(ns)) for item, ns in self.core.dropped()],
        }
        answer = _core.match_state(self.core, wanted.specs, wanted.top_level, given)
        if self._together is not None and not _misfits(answer):
            # A leaf that another rank wants is not unexpected.
            mine = answer["unexpected_leaves"]
            of_none = set(self._together.unexpected(mine))
            given["elsewhere"] = set(mine) - of_none
            if given["elsewhere"]:
                answer = _core.match_state(self.core, wanted.specs, wanted.top_level, given)
        report, paths = self.report, self.structure.leaf_paths()
        for name in (
            "missing",
            "unexpected",
            "wrong_dtype",
            "wrong_kind",
            "collisions",
            "unmatched",
            "idle_renames",
            "text",
        ):
            setattr(report, name, answer[name])
        report.wrong_shape = [
            (path, tuple(stored), tuple(asked)) for path, stored, asked in answer["wrong_shape"]
        ]
        report.kept = [wanted.paths[number] for number in answer["kept"]]
        report.ignored = [paths[leaf] for leaf in answer["ignored"]]
        report.left_out = [paths[leaf] for leaf in answer["left_out"]]
        wanted.kept = answer["kept"]
        if not answer["ok"]:
            raise report.mismatch()
        if report.unmatched or report.idle_renames:
            lifecycle.log(_WARNING, "stepwell.restore", f"restore of {self.core.path()}: {report.text}")
        for match in answer["matches"]:
            wanted.matches.setdefault(match[0], []).append(match[1:])

    def _reads(self, wanted: Wanted, fill: bool) -> ArrayReads:
        objects: dict[int, None] = {}
        jobs: dict[Any, Job] = {}
        paths = self.structure.leaf_paths()
        for number, matches in wanted.matches.items():
            leaf = wanted.leaf_of[number]
            own = leaf.array if fill and leaf is not None and leaf.what == "array" else None
            for stored, source, tensor in matches:
                is_one = leaf is None or leaf.what != "stored"
                path = wanted.paths[number] if is_one else paths[stored]
                self.report.restored.append(path)
                if paths[stored] != path:
                    self.report.renamed.append((paths[stored], path))
                if tensor is None:
                    objects[source] = None
                    continue
                boxes = None if leaf is None or leaf.target is None else leaf.target.boxes
                memories = None if not fill or leaf is None or leaf.target is None else leaf.target.memories
                self._job_of.setdefault((number, stored), [])
                stored_dtype, dtype, stored_shape, shape = tensor
                if boxes is not None and leaf is not None and leaf.target is not None:
                    self._check_inside(path, leaf.target, tuple(stored_shape))
                for at, box in enumerate([None] if boxes is None else boxes):
                    mine = own if memories is None else memories[at]
                    job = Job.of(source, path, mine, stored_dtype, dtype, stored_shape, shape, box)
                    if job.target is None:
                        job.empty = self._empty(wanted, leaf, stored, fill)
                    key: Any = (source, job.dtype, job.shape, job.offset)
                    if job.target is not None:
                        key = (*key, id(job.target))
                    elif leaf is not None and wanted.takes_over(leaf, stored):
                        key = (*key, "taken over")
                    self._job_of[number, stored].append(jobs.setdefault(key, job))
        self.objects = list(objects)
        for job in jobs.values():
            self.report.nbytes += job.nbytes
            if not job.exact:
                self.report.cast.append((job.path, job.stored_dtype.name, job.dtype.name))
            if job.stored_shape != job.whole:
                self.report.resized.append((job.path, job.stored_shape, job.whole))
        kept = (
            [leaf for number in wanted.kept if (leaf := wanted.leaf_of[number]) is not None] if fill else []
        )
        arrays = [(leaf.path, leaf.array) for leaf in kept if leaf.array is not None]
        return ArrayReads(self.core, list(jobs.values()), self.report, arrays)

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
                    f"{named(path)}: a part of shape {tuple(extent)} at {tuple(offset)} does not lie in what is stored, which has shape {stored}; "
                    "pass shape=, the shape of the whole tensor, if what is beyond is padding"
                )

    def _empty(self, wanted: Wanted, leaf: Any, stored: int, fill: bool) -> Any:
        """Returns the function that makes a new array on its final device. An array that is only
        copied into an existing one is made on the host."""
        if leaf is not None and leaf.target is not None:
            return None if fill and leaf.target.has_value else leaf.target.empty
        if self._to is None or self._place is not None or leaf is None or leaf.owner is not None:
            return None
        return self._empty_there


def _misfits(answer: dict[str, Any]) -> bool:
    """True if something does not match, beside what is stored and not wanted."""
    names = ("missing", "wrong_dtype", "wrong_kind", "wrong_shape", "collisions")
    return any(answer[name] for name in names) or any(one[3] for one in answer["unmatched"])


def _when(unix_ns: int) -> str:
    """A moment, for people."""
    moment = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC) + datetime.timedelta(
        microseconds=unix_ns // 1000
    )
    return f"{moment:%Y-%m-%d %H:%M:%S} UTC"


def _direct(core: Any, target: Any, options: RestoreOptions, together: Together | None) -> tuple[Any] | None:
    """The restored value where the target has exactly the stored structure, dtypes and shapes, in
    plain containers: the usual case, in the engine. ``None``: not so."""
    to, device = options.to, options.device
    plan = _core.plan_direct(core, target, options.fill, to is not None)
    if plan is None:
        return None
    if together is not None:
        together.settle()
    objects = core.objects(plan.objects(), Reviver())
    plan.read_fresh()
    with telling(plan.in_place_paths):
        plan.read_in_place()

    def convert(arrays: list[Any]) -> list[Any]:
        return arrays if to is None else adapters.arrays(to, arrays, device)

    try:
        return (plan.build(objects, convert, adapters.like),)
    except adapters.DoesNotFit:
        if together is not None:
            raise
        return None  # what goes leaf by leaf says which


# A dozen objects for each leaf are made, which are all there until it returns.
@collecting.paused()
def run(
    core: Any,
    options: RestoreOptions,
    together: Together | None = None,
    exchange: Exchange | None = None,
) -> Any:
    """A whole restore, with its report where that is asked for. Without ``like`` and ``into``:
    everything, as it is stored. ``together``: where other ranks restore too; ``exchange``: and get
    from each other what several want."""
    job = Restore(core, options, together=together, exchange=exchange)
    target = AS_STORED if options.target is None else options.target
    # Restores to a device go leaf by leaf.
    on_host = job.makes_no_tensors_on_devices
    plain = options.shardings is None and not options.return_report and exchange is None
    if options.is_exact and on_host and plain:
        found = _direct(core, target, options, together)
        if found is not None:
            return found[0]
    value = job.run(template.parse(target), options.fill)
    return (value, job.report) if options.return_report else value
