"""Restoring: match what is wanted with what is stored, then read, then put together.

Order matters: the whole match is finished (one report, all differences) before the first byte of the caller's memory is written; objects and
arrays that are cast are read and checked first, arrays that are filled in place last; containers and stateful objects are updated when
everything has been read. What a failure in the last step may have overwritten is named by the error.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any, TypeAlias

import numpy as np

from . import _core, template
from .allocate import Allocator
from .convert import cast_into, common_box
from .errors import MismatchError, MisuseError, StepwellError
from .leaves import Reviver
from .paths import Component
from .rebuild import Structure
from .specs import AS_STORED, ArraySpec, ObjectSpec, native_name, to_dtype
from .template import Branch, Leaf, Part

Globs: TypeAlias = str | Iterable[str] | None
#: Arrays that are cast are read in batches of this many bytes, so that a cast costs no second copy of the state.
CAST_BATCH = 256 << 20


@dataclass(frozen=True, slots=True)
class Options:
    """What a caller may say about a restore."""

    include: Globs = None
    exclude: Globs = None
    rename: Any = None
    missing: Any = "error"
    unexpected: Any = "error"
    cast: Any = "lossless"
    resize: Any = None

    @property
    def is_exact(self) -> bool:
        """Whether nothing is said by path, so that a target that has exactly the stored structure matches leaf by leaf."""
        return (
            self.include is None
            and self.exclude is None
            and self.rename is None
            and not any(
                isinstance(one, Mapping) for one in (self.missing, self.unexpected, self.cast, self.resize)
            )
        )

    def plain(self) -> dict[str, Any]:
        """What the engine reads, as plain lists and strings."""
        return {
            "include": _globs(self.include, "include"),
            "exclude": _globs(self.exclude, "exclude"),
            "rename": _renames(self.rename),
            "missing": _choice(self.missing, "missing", ("error", "keep")),
            "unexpected": _choice(self.unexpected, "unexpected", ("error", "ignore")),
            "cast": _cast(self.cast),
            "resize": _choice(self.resize, "resize", ("pad", "truncate", "both", None)),
        }


@dataclass(slots=True)
class RestoreReport:
    """What a restore did, or why it did nothing. Paths are rendered leaf paths: wanted ones, or stored ones where that is said."""

    #: Leaves that were restored.
    restored: list[str] = field(default_factory=list)
    #: Wanted, not stored: path, why, and stored paths that it may be called.
    missing: list[tuple[str, str, list[str]]] = field(default_factory=list)
    #: Stored inside a wanted entry, not wanted: stored path, its wanted name where a rename gave one, missing leaves that it may be.
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
    #: Stored paths that were not read: other top-level entries, ``...``, ``include`` and ``exclude``.
    left_out: list[str] = field(default_factory=list)
    #: Renames that applied to nothing.
    unused_renames: list[str] = field(default_factory=list)
    #: Bytes of arrays that were read.
    nbytes: int = 0
    #: The report in words.
    text: str = ""

    @property
    def ok(self) -> bool:
        """Whether everything that was wanted was there."""
        return not (
            self.missing
            or self.unexpected
            or self.wrong_shape
            or self.wrong_dtype
            or self.wrong_kind
            or self.collisions
        )

    def __str__(self) -> str:
        return self.text


@dataclass(slots=True)
class _Job:
    """One array to read: from a stored leaf, for the leaves that share it."""

    stored: int
    stored_dtype: np.dtype[Any]
    stored_shape: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    path: str
    #: The caller's memory, where it is to be filled.
    target: np.ndarray[Any, Any] | None = None
    #: What is returned; made here or the caller's.
    result: Any = None
    #: Whether other targets lie between its elements, so that it is read apart and written alone.
    apart: bool = False
    #: The job that fills the same memory with the same values.
    twin: _Job | None = None

    @property
    def exact(self) -> bool:
        return self.stored_dtype == self.dtype

    def box(self) -> tuple[int, ...]:
        if self.stored_shape == self.shape:
            return self.shape
        return common_box(self.stored_shape, self.shape)


class Restore:
    """One restore from an open checkpoint of the engine."""

    def __init__(self, core: Any, options: Options, structure: Structure | None = None) -> None:
        self.core = core
        self.options = options.plain()
        self._structure = structure
        self.report = RestoreReport()
        self.allocator = Allocator()
        self.reviver = Reviver()

    @property
    def structure(self) -> Structure:
        """The stored tree."""
        if self._structure is None:
            self._structure = Structure(self.core.nodes())
        return self._structure

    def run(self, target: Any, fill: bool) -> Any:
        """The caller's structure with the stored values; in place where ``fill`` says so and it can be."""
        return self.run_part(template.parse(target), fill)

    def run_part(self, part: Part, fill: bool) -> Any:
        """The same for a structure that was taken apart already."""
        self.reviver = Reviver(template.enum_classes(part))
        wanted = _Wanted(self, part)
        if wanted.specs or wanted.top_level:
            self._match(wanted)
        self._read_wanted(wanted, fill)
        return template.finish(part, fill)

    def _match(self, wanted: _Wanted) -> None:
        answer = _core.match_state(self.core, wanted.specs, wanted.top_level, self.options)
        report, paths = self.report, self.structure.leaf_paths()
        for name in (
            "missing",
            "unexpected",
            "wrong_dtype",
            "wrong_kind",
            "collisions",
            "unused_renames",
            "text",
        ):
            setattr(report, name, answer[name])
        report.wrong_shape = [
            (path, tuple(stored), tuple(asked)) for path, stored, asked in answer["wrong_shape"]
        ]
        report.kept = [wanted.paths[number] for number in answer["kept"]]
        report.ignored = [paths[leaf] for leaf in answer["ignored"]]
        report.left_out = [paths[leaf] for leaf in answer["left_out"]]
        if not report.ok:
            error = MismatchError(report.text)
            error.report = report
            raise error
        wanted.kept = set(answer["kept"])
        for match in answer["matches"]:
            wanted.matches.setdefault(match[0], []).append(match[1:])

    def _read_wanted(self, wanted: _Wanted, fill: bool) -> None:
        objects: dict[int, Any] = {}
        jobs: dict[Any, _Job] = {}
        job_of: dict[tuple[int, int], _Job] = {}
        paths = self.structure.leaf_paths()
        for number, matches in wanted.matches.items():
            leaf = wanted.leaf_of[number]
            own = leaf.array if fill and leaf is not None and leaf.what == "array" else None
            for stored, source, tensor in matches:
                path = wanted.paths[number] if leaf is not None and leaf.what != "stored" else paths[stored]
                self.report.restored.append(path)
                if tensor is None:
                    objects[source] = None
                    continue
                job = self._job(source, path, own, *tensor)
                key: Any = (source, job.dtype, job.shape)
                if job.target is not None:
                    key = (*key, id(job.target))
                job_of[number, stored] = jobs.setdefault(key, job)
        read = dict(zip(objects, self.core.objects(list(objects), self.reviver), strict=True))
        wanted.check_types(read)
        self._settle_shared_targets(list(jobs.values()))
        self._run(list(jobs.values()))
        for job in jobs.values():
            self._note(job)
        wanted.fill_results({key: job.result for key, job in job_of.items()}, read, fill)

    def _note(self, job: _Job) -> None:
        self.report.nbytes += prod(job.box()) * job.stored_dtype.itemsize
        if not job.exact:
            self.report.cast.append((job.path, job.stored_dtype.name, job.dtype.name))
        if job.stored_shape != job.shape:
            self.report.resized.append((job.path, job.stored_shape, job.shape))

    def _settle_shared_targets(self, jobs: list[_Job]) -> None:
        """Targets that share memory. The same array twice is a tie: both stored values must then be equal. Others whose elements lie between
        each other's are written one after the other; those that overlap are refused."""
        own = [job for job in jobs if job.target is not None and job.target.size]
        places = _core.spans([job.target for job in own if job.target is not None])
        spans = sorted((low, high, number) for number, (_, low, high) in enumerate(places))
        end, group = -1, list[int]()
        for low, high, number in spans:
            job = own[number]
            if low >= end:
                group = []
            for at in group:
                other = own[at]
                assert job.target is not None
                assert other.target is not None
                if places[at][0] == places[number][0] and _same_view(job.target, other.target):
                    if job.stored != other.stored:
                        self._check_tie(other, job)
                    job.twin = other
                    break
                if np.shares_memory(job.target, other.target):
                    raise MismatchError(
                        f"`{other.path}` and `{job.path}` overlap in memory and are stored as different arrays; "
                        "restoring into them would let one overwrite a part of the other"
                    )
                job.apart = other.apart = True
            else:
                group.append(number)
            end = max(end, high)

    def _check_tie(self, one: _Job, other: _Job) -> None:
        values = []
        for job in (one, other):
            apart = _Job(job.stored, job.stored_dtype, job.stored_shape, job.shape, job.dtype, job.path)
            self._run([apart])
            values.append(apart.result)
        if values[0].tobytes() != values[1].tobytes():
            error = MismatchError(
                f"`{one.path}` and `{other.path}` are one array in memory, but their stored values differ; untie them, or restore only one"
            )
            error.report = self.report
            raise error

    # ---- reading ------------------------------------------------------------------------------------------------------

    def _job(
        self,
        source: int,
        path: str,
        target: np.ndarray[Any, Any] | None,
        stored_dtype: str,
        dtype: str,
        stored_shape: Sequence[int],
        shape: Sequence[int],
    ) -> _Job:
        wanted = to_dtype(dtype)
        if target is not None and (not target.flags.writeable or native_name(target.dtype) != dtype):
            target = None
        return _Job(source, to_dtype(stored_dtype), tuple(stored_shape), tuple(shape), wanted, path, target)

    def _run(self, jobs: list[_Job]) -> None:
        """Reads: new memory and casts first, the caller's memory last."""
        fresh: list[tuple[_Job, np.ndarray[Any, Any]]] = []
        in_place: list[tuple[_Job, np.ndarray[Any, Any]]] = []
        apart: list[_Job] = []
        for job in jobs:
            if job.twin is not None:
                job.result = job.target
            elif job.target is None:
                job.result = self.allocator.empty(job.shape, job.dtype)
                if job.box() != job.shape:
                    job.result[...] = np.zeros((), job.dtype)
                if job.exact:
                    fresh.append((job, job.result))
                else:
                    apart.append(job)
            else:
                job.result = job.target
                if job.exact and job.target.dtype.isnative and not job.apart and _fillable(job.target):
                    in_place.append((job, job.target))
                else:
                    apart.append(job)
        self._read(fresh)
        overwritten: list[str] = []
        with _telling(lambda: overwritten):
            for batch in _batches(apart):
                self._read_apart(batch, overwritten)
            overwritten.extend(job.path for job, _ in in_place)
            self._read(in_place)
        for job, target in in_place:
            _zero_outside(target, job.box())

    def _read(self, jobs: list[tuple[_Job, np.ndarray[Any, Any]]]) -> None:
        requests = [
            (
                job.stored,
                [0] * len(box),
                list(box),
                array[tuple(slice(0, n) for n in box)] if box != array.shape else array,
            )
            for job, array in jobs
            if 0 not in (box := job.box())
        ]
        if requests:
            self.core.read(requests)

    def _read_apart(self, jobs: list[_Job], overwritten: list[str]) -> None:
        """Reads arrays in their stored dtype, then casts them to where they belong."""
        scratch = Allocator()
        read = [(job, scratch.empty(job.box(), job.stored_dtype)) for job in jobs]
        self._read(read)
        for job, values in read:
            box = tuple(slice(0, n) for n in job.box())
            if job.target is not None:
                overwritten.append(job.path)
            if job.exact:
                job.result[box] = values
            elif values.ndim == 0:
                cast_into(values, job.result, job.path)
            else:
                cast_into(values, job.result[box], job.path)
            if job.target is not None:
                _zero_outside(job.target, job.box())


class _Wanted:
    """What is asked of the store: the template's leaves, as the engine reads them."""

    def __init__(self, restore: Restore, part: Part) -> None:
        self.restore = restore
        #: Components, what is wanted there (kind, dtype, shape), and whether the caller has a value there.
        self.specs: list[tuple[tuple[Component, ...], str, str | None, tuple[int, ...] | None, bool]] = []
        self.paths: list[str] = []
        self.leaf_of: list[Leaf | None] = []
        #: Wanted number → (stored leaf, leaf that holds its bytes, tensor or ``None``).
        self.matches: dict[int, list[tuple[int, int, Any]]] = {}
        self.kept: set[int] = set()
        self._leaves = list(template.leaves(part))
        self._number: dict[int, int] = {}
        self._settled: list[tuple[Leaf, int]] = []
        self._empty: list[tuple[Branch, int]] = []
        for leaf in self._leaves:
            self._add_leaf(leaf)
        #: Top-level entries that are wanted, those without a leaf too.
        self.top_level: list[Component] = []
        for branch in template.branches(part):
            if len(branch.components) == 1:
                self.top_level.append(branch.components[0])
            if not branch.children and type(branch.value) in (list, tuple, deque):
                self._add_empty(branch)

    def _add(
        self,
        where: Leaf | Branch,
        kind: str,
        dtype: str | None = None,
        shape: tuple[int, ...] | None = None,
        value: bool = False,
    ) -> int:
        self.specs.append((where.components, kind, dtype, shape, value))
        self.paths.append(where.path)
        self.leaf_of.append(where if isinstance(where, Leaf) else None)
        return len(self.specs) - 1

    def _add_leaf(self, leaf: Leaf) -> None:
        structure = self.restore.structure
        if leaf.what == "skip":
            leaf.result = ...
            self._add(leaf, "skip")
            return
        if leaf.what == "array":
            spec = leaf.spec or ArraySpec()
            dtype = None if spec.dtype is None else native_name(spec.dtype)
            has_value = not isinstance(leaf.value, (ArraySpec, type))
            self._number[id(leaf)] = self._add(leaf, "tensor", dtype, spec.shape, has_value)
            return
        if leaf.what == "stored" or type(leaf.value) in (list, tuple, deque):
            # A subtree without leaves, or an empty sequence where the caller has a plain one: there is nothing to read.
            node = structure.find(leaf.components)
            if node is not None and structure.is_container(node) and not structure.leaves_below(node):
                self._settled.append((leaf, node))
                return
        kind = "any" if leaf.what == "stored" else "object"
        has_value = leaf.owner is not None or not (
            leaf.value is AS_STORED or isinstance(leaf.value, (ObjectSpec, type))
        )
        self._number[id(leaf)] = self._add(leaf, kind, value=has_value)

    def _add_empty(self, branch: Branch) -> None:
        """An empty sequence of the caller where a plain one is stored, which is one object: what is stored is wanted."""
        node = self.restore.structure.find(branch.components)
        if node is not None and not self.restore.structure.is_container(node):
            self._empty.append((branch, self._add(branch, "object", value=True)))

    def check_types(self, objects: Mapping[int, Any]) -> None:
        """A type in ``like`` is a demand on the stored object."""
        wrong: list[tuple[str, str, str]] = []
        for number, matches in self.matches.items():
            leaf = self.leaf_of[number]
            if leaf is None or leaf.what != "object" or not isinstance(leaf.value, type):
                continue
            value = objects[matches[0][1]]
            fits = isinstance(value, leaf.value) and (leaf.value is bool or not isinstance(value, bool))
            if not fits and not (leaf.value is float and type(value) is int):
                wrong.append(
                    (leaf.path, f"{type(value).__qualname__} {value!r:.60}", leaf.value.__qualname__)
                )
        if wrong:
            report = self.restore.report
            report.wrong_kind = wrong
            report.text = "\n".join(
                f"`{path}`: stored is {stored}, wanted is {asked}" for path, stored, asked in wrong
            )
            error = MismatchError(report.text)
            error.report = report
            raise error

    def fill_results(
        self, arrays: Mapping[tuple[int, int], Any], objects: Mapping[int, Any], fill: bool
    ) -> None:
        """Gives every leaf of the template its value."""
        for branch, number in self._empty:
            for stored, source, tensor in self.matches.get(number, ()):
                branch.finish = _finish_replaced(
                    objects[source] if tensor is None else arrays[number, stored]
                )
        for leaf, node in self._settled:
            state = self.restore.structure.build(node, _nothing)
            leaf.result = state if leaf.owner is None else _give(leaf, state, fill)
        for leaf in self._leaves:
            at = self._number.get(id(leaf))
            if at is None:
                continue  # left out, or settled without reading
            matches = self.matches.get(at, [])
            if not matches:
                leaf.result = leaf.value  # kept
                continue
            values = {
                stored: objects[source] if tensor is None else arrays[at, stored]
                for stored, source, tensor in matches
            }
            if leaf.what == "stored":
                state = self._subtree(leaf, values)
                leaf.result = state if leaf.owner is None else _give(leaf, state, fill)
            else:
                leaf.result = _as_type(leaf, values[matches[0][0]])

    def _subtree(self, leaf: Leaf, values: dict[int, Any]) -> Any:
        """The stored containers around the leaves of a subtree: those below its own path, or where a rename took it from."""
        structure = self.restore.structure
        node = structure.find(leaf.components)
        below = [] if node is None else structure.leaves_below(node)
        if node is None or not values.keys() <= set(below):
            chains = [_ancestors(structure, structure.leaf_nodes[stored]) for stored in values]
            node = next(one for one in chains[0] if all(one in chain for chain in chains))
            below = structure.leaves_below(node)
        return structure.build(node, values.__getitem__, None if len(below) == len(values) else set(values))


def _give(leaf: Leaf, state: Any, fill: bool) -> Any:
    """A stored state → the stateful object that it belongs to."""
    assert leaf.owner is not None
    owner, protocol = leaf.owner
    if fill:
        protocol.set(owner, state)
        return owner
    return state if protocol.make is None else protocol.make(owner, state)


def _nothing(_: int) -> Any:
    raise AssertionError("a container without leaves has no leaf")


def _ancestors(structure: Structure, node: int) -> list[int]:
    chain = [node]
    while structure.nodes[node][1] is not None:
        node = structure.nodes[node][0]
        chain.append(node)
    return chain


def _finish_replaced(value: Any) -> Any:
    def finish(branch: Branch, _pairs: list[tuple[Any, Any]], fill: bool) -> Any:
        if fill and isinstance(branch.value, list) and isinstance(value, list):
            branch.value[:] = value
            return branch.value
        return value

    return finish


def _as_type(leaf: Leaf, value: Any) -> Any:
    if leaf.value is float and type(value) is int:
        return float(value)
    return value


def _same_view(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any]) -> bool:
    """Whether two arrays that start at the same address are the same elements."""
    return one.dtype == other.dtype and one.shape == other.shape and one.strides == other.strides


def _fillable(array: np.ndarray[Any, Any]) -> bool:
    """Whether no two elements of an array share memory (a broadcast or a sliding window would)."""
    reach = array.dtype.itemsize
    for stride, n in sorted(
        (abs(stride), n) for stride, n in zip(array.strides, array.shape, strict=True) if n > 1
    ):
        if stride < reach:
            return False
        reach = stride * (n - 1) + reach
    return True


def _zero_outside(array: np.ndarray[Any, Any], box: tuple[int, ...]) -> None:
    """Zeros what a padded array has beyond the stored part."""
    zero = np.zeros((), array.dtype)
    for axis, n in enumerate(box):
        if n < array.shape[axis]:
            array[(*(slice(0, m) for m in box[:axis]), slice(n, None))] = zero


def _batches(jobs: list[_Job]) -> Iterable[list[_Job]]:
    batch: list[_Job] = []
    size = 0
    for job in jobs:
        batch.append(job)
        size += prod(job.box()) * job.stored_dtype.itemsize
        if size >= CAST_BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def _globs(value: Globs, name: str) -> list[str] | None:
    if value is None:
        return None
    found = [value] if isinstance(value, str) else list(value)
    if not all(isinstance(one, str) for one in found):
        raise MisuseError(
            f"{name} takes a glob or a list of globs over rendered leaf paths, such as 'params/**'"
        )
    return found


def _renames(value: Any) -> list[tuple[str, str]]:
    if value is None:
        return []
    if isinstance(value, Mapping):
        value = value.items()
    return [(str(old), str(new)) for old, new in value]


def _choice(value: Any, name: str, allowed: tuple[str | None, ...]) -> Any:
    if isinstance(value, Mapping):
        table = {str(glob): one for glob, one in value.items()}
        for one in table.values():
            if one not in allowed:
                raise MisuseError(f"{name}={{glob: …}} takes {', '.join(map(repr, allowed))}, not {one!r}")
        return table
    if value not in allowed:
        raise MisuseError(
            f"{name} is one of {', '.join(map(repr, allowed))}, or {{glob: …}} of them; not {value!r}"
        )
    return value


def _cast(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {
            str(glob): str(one) if one in ("exact", "lossless", "lossy") else to_dtype(one).name
            for glob, one in value.items()
        }
    return _choice(value, "cast", ("exact", "lossless", "lossy"))


@contextmanager
def _telling(overwritten: Callable[[], list[str]]) -> Iterator[None]:
    """Has a failure say which leaves of the caller may have been written to."""
    try:
        yield
    except (StepwellError, OSError) as error:
        paths = overwritten()
        if isinstance(error, StepwellError):
            error.overwritten = tuple(paths)
        if paths:
            error.add_note(f"these leaves of the caller may hold a mixture of old and new values: {paths}")
        raise


def _direct(core: Any, target: Any, fill: bool) -> tuple[Any] | None:
    """The restored value where the target has exactly the stored structure, dtypes and shapes, in plain containers: the usual case, in the
    engine. ``None``: not so, and nothing was read."""
    plan = _core.plan_direct(core, target, fill)
    if plan is None:
        return None
    objects = core.objects(plan.objects(), Reviver())
    plan.read_fresh()
    with _telling(plan.in_place_paths):
        plan.read_in_place()
    return (plan.build(objects),)


def run(
    core: Any, *, like: Any, into: Any, options: Options, report: bool = True
) -> tuple[Any, RestoreReport]:
    """A whole restore. ``like=None``: everything, as it is stored. Without ``report`` that of a success may stay empty."""
    if like is not None and into is not None:
        raise MisuseError("pass like= or into=, not both: into= is a like= that is filled in place")
    job = Restore(core, options)
    fill = into is not None
    target = into if fill else AS_STORED if like is None else like
    if options.is_exact and not report:
        found = _direct(core, target, fill)
        if found is not None:
            return found[0], job.report
    return job.run(target, fill), job.report
