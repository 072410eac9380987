"""Restoring: match what is wanted with what is stored, then read, then put together.

Order matters: the whole match is finished (one report, all differences) before the first byte of the caller's memory is written; objects and
arrays that are cast are read and checked first, arrays that are filled in place last; containers and stateful objects are updated when
everything has been read. What a failure in the last step may have overwritten is named by the error.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from typing import Any, Literal, TypeAlias

import numpy as np

from . import template
from .allocate import Allocator
from .convert import cast_into, common_box
from .errors import MismatchError, MisuseError, StepwellError
from .leaves import Reviver
from .paths import Component, glob_escape, starts_with
from .rebuild import Structure
from .specs import ArraySpec, to_dtype
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
    """What a restore did, or why it did nothing. Paths are rendered leaf paths of what was wanted."""

    #: Leaves that were restored.
    restored: list[str] = field(default_factory=list)
    #: Wanted, not stored.
    missing: list[str] = field(default_factory=list)
    #: Stored inside a wanted entry, not wanted.
    unexpected: list[str] = field(default_factory=list)
    #: Wanted and stored, but not alike: path and why.
    mismatched: list[tuple[str, str]] = field(default_factory=list)
    #: Missing, so that the caller's own array stayed.
    kept: list[str] = field(default_factory=list)
    #: Restored in another dtype: path, stored and wanted dtype.
    cast: list[tuple[str, str, str]] = field(default_factory=list)
    #: Restored in another shape: path, stored and wanted shape.
    resized: list[tuple[str, tuple[int, ...], tuple[int, ...]]] = field(default_factory=list)
    #: Stored, and not asked for (other top-level entries, ``...``, ``exclude``).
    left_out: list[str] = field(default_factory=list)
    #: Bytes of arrays that were read.
    nbytes: int = 0
    #: The whole report in words.
    text: str = ""

    def __str__(self) -> str:
        return self.text or (
            f"{len(self.restored)} leaves restored ({self.nbytes} bytes), {len(self.kept)} kept, {len(self.cast)} cast, "
            f"{len(self.resized)} resized, {len(self.left_out)} left out"
        )


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

    @property
    def exact(self) -> bool:
        return self.stored_dtype == self.dtype

    def box(self) -> tuple[int, ...]:
        return common_box(self.stored_shape, self.shape)


class Restore:
    """One restore from an open checkpoint of the engine."""

    def __init__(self, core: Any, options: Options) -> None:
        self.core = core
        self.options = options.plain()
        self.raw_options = options
        self.structure = Structure(core.nodes())
        #: ``(kind, dtype name, shape, leaf that it is tied to)`` per stored leaf.
        self.records: list[tuple[str, str | None, tuple[int, ...] | None, int | None]] = core.leaves()
        self.report = RestoreReport()
        self.allocator = Allocator()
        self.reviver = Reviver()

    # ---- what is stored, without a target -------------------------------------------------------------------------------

    def as_stored(self) -> Any:
        """The stored structure, as numpy arrays and Python values."""
        if self.options["rename"]:
            raise MisuseError("rename= says where stored leaves go in a like= or into=; without one there is nothing to rename to")
        chosen = [leaf for leaf, _ in self.core.select(self.options)]
        values = self._read_stored(chosen)
        everything = len(chosen) == len(self.records)
        if not self.structure.nodes:
            return {}
        result = self.structure.build(0, values.__getitem__, None if everything else set(chosen))
        if result is ... and not everything:
            self._nothing_selected()
        return result

    def _nothing_selected(self) -> None:
        raise MisuseError(
            f"include={self.raw_options.include!r} exclude={self.raw_options.exclude!r} select no stored leaf; paths look like "
            f"{[self.structure.paths[node] for node in self.structure.leaf_nodes[:3]]}"
        )

    def _read_stored(self, chosen: list[int]) -> dict[int, Any]:
        values: dict[int, Any] = {}
        jobs: dict[int, _Job] = {}
        objects: list[int] = []
        per_glob = self._cast_of()
        for leaf in chosen:
            kind, _, _, of = self.records[leaf]
            path = self.structure.paths[self.structure.leaf_nodes[leaf]]
            self.report.restored.append(path)
            if kind == "object":
                objects.append(leaf)
                continue
            source = leaf if of is None else of
            if source not in jobs:
                jobs[source] = self._job(source, path, None, None, per_glob.get(leaf))
        for leaf, value in zip(objects, self.core.objects(objects, self.reviver), strict=True):
            values[leaf] = value
        self._run(list(jobs.values()))
        for leaf in chosen:
            kind, _, _, of = self.records[leaf]
            if kind != "object":
                values[leaf] = jobs[leaf if of is None else of].result
        self._count_left_out(set(chosen))
        return values

    def _cast_of(self) -> dict[int, str]:
        """Dtypes that ``cast={glob: dtype}`` gives stored leaves, where no ``like`` says what is wanted."""
        if not isinstance(self.options["cast"], dict):
            return {}
        found: dict[int, str] = self.core.casts(self.options)
        return found

    # ---- with a target ------------------------------------------------------------------------------------------------

    def into(self, target: Any, fill: bool) -> Any:
        """The caller's structure with the stored values; in place where ``fill`` says so and it can be."""
        part = template.parse(target)
        self.reviver = Reviver(template.enum_classes(part))
        selected: list[tuple[int, list[Component]]] = self.core.select(self.options)
        wanted = _Wanted(self, part, selected)
        answer = self.core.match(wanted.specs, self.options, wanted.scope)
        self._take(answer, wanted)
        self._check_kept(wanted)
        if answer["error"] is not None:
            error = MismatchError(answer["error"])
            self.report.text = answer["error"]
            error.report = self.report
            raise error
        self._read_wanted(wanted, fill)
        return template.finish(part, fill)

    def _take(self, answer: dict[str, Any], wanted: _Wanted) -> None:
        report = self.report
        report.missing = answer["missing"]
        report.unexpected = answer["unexpected"]
        report.mismatched = answer["mismatched"]
        report.kept = [wanted.paths[number] for number in answer["kept"]]
        wanted.matched = {number: (stored, dtype) for number, stored, dtype in answer["matched"]}
        wanted.kept = set(answer["kept"])
        wanted.left_out = set(answer["left_out"])
        report.restored = [wanted.paths[number] for number in wanted.matched]
        self._count_left_out({stored for stored, _ in wanted.matched.values()}, set(answer["unexpected"]))

    def _count_left_out(self, used: set[int], besides: set[str] | None = None) -> None:
        for leaf, node in enumerate(self.structure.leaf_nodes):
            path = self.structure.paths[node]
            if leaf not in used and path not in (besides or ()):
                self.report.left_out.append(path)

    def _check_kept(self, wanted: _Wanted) -> None:
        """``missing="keep"`` needs something to keep: a spec or a type has no value."""
        empty = [
            leaf.path
            for number in sorted(wanted.kept)
            if (leaf := wanted.leaf_of[number]) is not None
            and (leaf.what == "stored" or isinstance(leaf.value, (ArraySpec, type)) or _is_object_spec(leaf.value))
        ]
        if empty:
            error = MismatchError(
                f'missing="keep" keeps what stands in like=, but these hold no value: {", ".join(f"`{path}`" for path in empty)}'
            )
            self.report.missing = empty
            error.report = self.report
            raise error

    def _read_wanted(self, wanted: _Wanted, fill: bool) -> None:
        objects: list[int] = []
        jobs: dict[Any, _Job] = {}
        job_of: dict[int, _Job] = {}
        for number, (stored, dtype) in wanted.matched.items():
            kind, _, _, of = self.records[stored]
            if kind == "object":
                objects.append(stored)
                continue
            leaf = wanted.leaf_of[number]
            source = stored if of is None else of
            own = leaf.array if leaf is not None else None
            spec = leaf.spec if leaf is not None else None
            job = self._job(source, wanted.paths[number], spec, own if fill else None, dtype)
            key: Any = (source, job.dtype, job.shape)
            if job.target is not None:
                key = (*key, _place(job.target))
            job_of[number] = jobs.setdefault(key, job)
        unique = list(dict.fromkeys(objects))
        read = dict(zip(unique, self.core.objects(unique, self.reviver), strict=True))
        wanted.check_types(read)
        self._settle_shared_targets(list(jobs.values()))
        self._run(list(jobs.values()))
        wanted.fill_results({**{n: j.result for n, j in job_of.items()}}, read, fill)

    def _settle_shared_targets(self, jobs: list[_Job]) -> None:
        """Targets that share memory. The same array twice is a tie: both stored values must then be equal. Others that overlap are read
        apart and written one after the other."""
        own = [job for job in jobs if job.target is not None and job.target.nbytes]
        spans = sorted(((*_bounds(job.target), job) for job in own if job.target is not None), key=lambda span: span[:2])
        end, holder = -1, None
        for low, high, job in spans:
            if low < end and holder is not None and job.target is not None and holder.target is not None:
                if _place(job.target) == _place(holder.target):
                    self._check_tie(holder, job)
                elif np.shares_memory(job.target, holder.target):
                    raise MismatchError(
                        f"`{holder.path}` and `{job.path}` overlap in memory and are stored as different arrays; "
                        "restoring into them would let one overwrite a part of the other"
                    )
            if high > end:
                end, holder = high, job

    def _check_tie(self, one: _Job, other: _Job) -> None:
        values = []
        for job in (one, other):
            apart = _Job(job.stored, job.stored_dtype, job.stored_shape, job.shape, job.dtype, job.path)
            self._run([apart], counted=False)
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
        stored: int,
        path: str,
        spec: ArraySpec | None,
        target: np.ndarray[Any, Any] | None,
        cast: str | None,
    ) -> _Job:
        _, name, shape, _ = self.records[stored]
        assert name is not None
        assert shape is not None
        stored_dtype = to_dtype(name)
        dtype = stored_dtype
        if spec is not None and spec.dtype is not None:
            dtype = spec.dtype if spec.dtype.isnative else spec.dtype.newbyteorder("=")
        if cast is not None:
            dtype = to_dtype(cast)
        wanted_shape = shape if spec is None or spec.shape is None else spec.shape
        if target is not None and (not target.flags.writeable or target.dtype.newbyteorder("=") != dtype):
            target = None
        job = _Job(stored, stored_dtype, tuple(shape), tuple(wanted_shape), dtype, path, target)
        if job.stored_dtype != job.dtype:
            self.report.cast.append((path, stored_dtype.name, dtype.name))
        if job.stored_shape != job.shape:
            self.report.resized.append((path, job.stored_shape, job.shape))
        return job

    def _run(self, jobs: list[_Job], counted: bool = True) -> None:
        """Reads: new memory and casts first, the caller's memory last."""
        fresh: list[tuple[_Job, np.ndarray[Any, Any]]] = []
        in_place: list[tuple[_Job, np.ndarray[Any, Any]]] = []
        apart: list[_Job] = []
        for job in jobs:
            if counted:
                self.report.nbytes += prod(job.box()) * job.stored_dtype.itemsize
            if job.target is None:
                job.result = self.allocator.empty(job.shape, job.dtype)
                if job.box() != job.shape:
                    job.result[...] = np.zeros((), job.dtype)
                if job.exact:
                    fresh.append((job, job.result))
                else:
                    apart.append(job)
            else:
                job.result = job.target
                if job.exact and job.target.dtype.isnative and _fillable(job.target):
                    in_place.append((job, job.target))
                else:
                    apart.append(job)
        self._read(fresh)
        overwritten: list[str] = []
        try:
            for batch in _batches(apart):
                self._read_apart(batch, overwritten)
            overwritten.extend(job.path for job, _ in in_place)
            self._read(in_place)
        except (StepwellError, OSError) as error:
            if isinstance(error, StepwellError):
                error.overwritten = tuple(overwritten)
            if overwritten:
                error.add_note(f"these leaves of the caller may hold a mixture of old and new values: {overwritten}")
            raise
        for job, target in in_place:
            _zero_outside(target, job.box())

    def _read(self, jobs: list[tuple[_Job, np.ndarray[Any, Any]]]) -> None:
        requests = [
            (job.stored, [0] * len(box), list(box), array[tuple(slice(0, n) for n in box)] if box != array.shape else array)
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
    """What is asked of the store: the template's leaves, with subtrees that are wanted as stored taken apart into stored leaves."""

    def __init__(self, restore: Restore, part: Part, selected: list[tuple[int, list[Component]]]) -> None:
        self.restore = restore
        #: Components, and what is wanted there, for the engine.
        self.specs: list[tuple[list[Component], tuple[str, str | None, tuple[int, ...] | None]]] = []
        self.paths: list[str] = []
        self.leaf_of: list[Leaf | None] = []
        self.subtree_of: dict[int, Leaf] = {}
        self.matched: dict[int, tuple[int, str | None]] = {}
        self.kept: set[int] = set()
        self.left_out: set[int] = set()
        self._leaves = list(template.leaves(part))
        self._by_leaf: dict[int, list[int]] = {}
        self._placed = [(tuple(path), leaf) for leaf, path in selected]
        self._exact = {_plain(path): leaf for path, leaf in self._placed}
        self._settled: set[int] = set()
        self._empty: list[tuple[Branch, int]] = []
        skipped: list[str] = []
        for leaf in self._leaves:
            if leaf.what == "skip":
                leaf.result = ...
                skipped.append(leaf.path)
            else:
                self._add_leaf(leaf)
        for branch in template.branches(part):
            if not branch.children and isinstance(branch.value, (list, tuple)) or _is_empty_deque(branch):
                self._add_empty(branch)
        #: Which stored paths count as wanted at all: the top-level entries that the caller has, less what ``...`` leaves out.
        self.scope: dict[str, Any] = {
            "top": None if isinstance(part, Leaf) else [component for component in _top(part)],
            "skip": [glob for path in skipped for glob in _subtree_globs(path)],
        }

    def _add(self, components: Iterable[Component], path: str, spec: tuple[str, str | None, Any], leaf: Leaf | None) -> int:
        self.specs.append((list(components), spec))
        self.paths.append(path)
        self.leaf_of.append(leaf)
        return len(self.specs) - 1

    def _add_leaf(self, leaf: Leaf) -> None:
        if leaf.what == "stored":
            self._add_subtree(leaf)
            return
        if leaf.what == "array":
            spec = leaf.spec or ArraySpec()
            dtype = None if spec.dtype is None else spec.dtype.newbyteorder("=").name
            shape = spec.shape
            self._by_leaf[id(leaf)] = [self._add(leaf.components, leaf.path, ("tensor", dtype, shape), leaf)]
            return
        structure = self.restore.structure
        if isinstance(leaf.value, (list, tuple)) or type(leaf.value).__name__ == "deque":
            node = structure.find(leaf.components)
            if node is not None and structure.is_container(node) and not structure.children[node]:
                leaf.result = structure.build(node, lambda _: None)
                self._settled.add(id(leaf))
                return
        self._by_leaf[id(leaf)] = [self._add(leaf.components, leaf.path, ("object", None, None), leaf)]

    def _add_subtree(self, leaf: Leaf) -> None:
        below = [
            (path, stored) for path, stored in self._placed if _plain(path[: len(leaf.components)]) == _plain(leaf.components)
        ]
        if not below:
            node = self.restore.structure.find(leaf.components)
            if node is not None and not self.restore.structure.leaves_below(node):
                leaf.result = self._give(leaf, self.restore.structure.build(node, lambda _: None), False)
                self._settled.add(id(leaf))
                return
            self._by_leaf[id(leaf)] = [self._add(leaf.components, leaf.path, ("any", None, None), leaf)]
            return
        numbers = []
        for path, _ in below:
            number = self._add(path, _rendered(path), ("any", None, None), None)
            self.subtree_of[number] = leaf
            numbers.append(number)
        self._by_leaf[id(leaf)] = numbers

    def _add_empty(self, branch: Branch) -> None:
        """An empty sequence of the caller where a plain one is stored, which is one object: what is stored is wanted."""
        stored = self._exact.get(_plain(branch.components))
        if stored is not None and self.restore.records[stored][0] == "object":
            self._empty.append((branch, self._add(branch.components, branch.path, ("object", None, None), None)))

    def check_types(self, objects: Mapping[int, Any]) -> None:
        """A type in ``like`` is a demand on the stored object."""
        wrong: list[tuple[str, str]] = []
        for number, (stored, _) in self.matched.items():
            leaf = self.leaf_of[number]
            if leaf is None or leaf.what != "object" or not isinstance(leaf.value, type):
                continue
            value = objects[stored]
            fits = isinstance(value, leaf.value) and (leaf.value is bool or not isinstance(value, bool))
            if not fits and not (leaf.value is float and type(value) is int):
                wrong.append((leaf.path, f"wanted {leaf.value.__qualname__}, stored {type(value).__qualname__} {value!r:.60}"))
        if wrong:
            self.restore.report.mismatched = wrong
            error = MismatchError("\n".join(f"`{path}`: {why}" for path, why in wrong))
            error.report = self.restore.report
            raise error

    def fill_results(self, arrays: Mapping[int, Any], objects: Mapping[int, Any], fill: bool) -> None:
        """Gives every leaf of the template its value."""

        def value(number: int) -> Any:
            stored = self.matched[number][0]
            return arrays[number] if number in arrays else objects[stored]

        for branch, number in self._empty:
            if number in self.matched:
                branch.finish = _finish_replaced(value(number))
        for leaf in self._leaves:
            if leaf.what == "skip" or id(leaf) in self._settled:
                continue
            numbers = self._by_leaf[id(leaf)]
            if leaf.what != "stored" or (len(numbers) == 1 and self.leaf_of[numbers[0]] is leaf):
                number = numbers[0]
                if number in self.matched:
                    leaf.result = _as_type(leaf, value(number))
                else:  # kept, or not selected: what stands there stays
                    leaf.result = leaf.value if number in self.kept or fill else ...
                continue
            by_stored = {self.matched[n][0]: n for n in numbers if n in self.matched}
            node = self._common_node(leaf, list(by_stored))
            state = self.restore.structure.build(node, lambda stored: value(by_stored[stored]), set(by_stored))  # noqa: B023
            leaf.result = self._give(leaf, state, fill)

    def _common_node(self, leaf: Leaf, stored: list[int]) -> int:
        """The stored node that a subtree comes from: under its own path, or where a rename took it from."""
        structure = self.restore.structure
        node = structure.find(leaf.components)
        if node is not None and set(stored) <= set(structure.leaves_below(node)):
            return node
        chains = [_ancestors(structure, structure.leaf_nodes[one]) for one in stored]
        shared = [node for node in chains[0] if all(node in chain for chain in chains)]
        return shared[0]

    def _give(self, leaf: Leaf, state: Any, fill: bool) -> Any:
        """A stored state → the stateful object that it belongs to."""
        if leaf.owner is None:
            return state
        owner, protocol = leaf.owner
        if fill:
            protocol.set(owner, state)
            return owner
        return state if protocol.make is None else protocol.make(owner, state)


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


def _is_object_spec(value: Any) -> bool:
    from .specs import ObjectSpec

    return isinstance(value, ObjectSpec) or (isinstance(value, type) and not issubclass(value, enum.Enum))


def _is_empty_deque(branch: Branch) -> bool:
    return not branch.children and type(branch.value).__name__ == "deque"


def _plain(path: Iterable[Component]) -> tuple[tuple[bool, str | int], ...]:
    """Components without the difference between keys and fields, indices and integer keys: what a rendered path says."""
    return tuple((tag in "kf", value) for tag, value in path)


def _rendered(path: Iterable[Component]) -> str:
    from .paths import render

    return render(path)


def _top(part: Branch) -> list[str]:
    from .paths import extend

    while len(part.children) == 1 and part.children[0][0] is None and isinstance(part.children[0][1], Branch):
        part = part.children[0][1]
    found: list[str] = []
    for _, child in part.children:
        components = child.components
        if components:
            found.append(extend("", components[0]))
    return found


def _subtree_globs(path: str) -> list[str]:
    escaped = glob_escape(path)
    return [escaped, f"{escaped}/**", f"{escaped}\\[*"]


def _place(array: np.ndarray[Any, Any]) -> tuple[int, tuple[int, ...], str]:
    return (int(array.__array_interface__["data"][0]), array.strides, array.dtype.name)


def _bounds(array: np.ndarray[Any, Any] | None) -> tuple[int, int]:
    assert array is not None
    low = high = int(array.__array_interface__["data"][0])
    for n, stride in zip(array.shape, array.strides, strict=True):
        if stride < 0:
            low += (n - 1) * stride
        else:
            high += (n - 1) * stride
    return low, high + array.dtype.itemsize


def _fillable(array: np.ndarray[Any, Any]) -> bool:
    """Whether no two elements of an array share memory (a broadcast or a sliding window would)."""
    reach = array.dtype.itemsize
    for stride, n in sorted((abs(stride), n) for stride, n in zip(array.strides, array.shape, strict=True) if n > 1):
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
        raise MisuseError(f"{name} takes a glob or a list of globs over rendered leaf paths, such as 'params/**'")
    return found


def _renames(value: Any) -> list[tuple[str, str]]:
    if value is None:
        return []
    if isinstance(value, Mapping):
        value = value.items()
    found = [(str(old), str(new)) for old, new in value]
    return found


def _choice(value: Any, name: str, allowed: tuple[str | None, ...]) -> Any:
    if isinstance(value, Mapping):
        table = {str(glob): one for glob, one in value.items()}
        for one in table.values():
            if one not in allowed:
                raise MisuseError(f"{name}={{glob: …}} takes {', '.join(map(repr, allowed))}, not {one!r}")
        return table
    if value not in allowed:
        raise MisuseError(f"{name} is one of {', '.join(map(repr, allowed))}, or {{glob: …}} of them; not {value!r}")
    return value


def _cast(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(glob): str(one) if one in ("lossless", "lossy") else to_dtype(one).name for glob, one in value.items()}
    return _choice(value, "cast", ("lossless", "lossy"))


def run(
    core: Any, *, like: Any, into: Any, options: Options, like_given: bool, into_given: bool
) -> tuple[Any, RestoreReport]:
    """A whole restore."""
    if like_given and into_given:
        raise MisuseError("pass like= or into=, not both: into= is a like= that is filled in place")
    job = Restore(core, options)
    if into_given:
        return job.into(into, True), job.report
    if like_given:
        return job.into(like, False), job.report
    return job.as_stored(), job.report


Mode: TypeAlias = Literal["error", "keep", "ignore"]
__all__ = ["Options", "Restore", "RestoreReport", "run", "starts_with"]
