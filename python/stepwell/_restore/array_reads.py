"""Reading the arrays of a restore: what is read into which memory, and in which order.

Arrays in new memory come first, with casts. Then, when everything else is known to fit, come the
caller's own arrays: those that need casts or have gaps batch by batch, the others in place, all at
once. An error names what it may have overwritten. A dry run makes the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from math import prod
from typing import TYPE_CHECKING, Any, TypeAlias

import numpy as np

from .. import _adapters as adapters
from .. import _core
from .._adapters import Box, OnDevice
from .._distributed.exchange import Exchange, Region
from .._state.specs import native_name, to_dtype
from ..errors import StepwellError
from .allocate import Allocator
from .casts import cast_into, common_box
from .report import RestoreReport

if TYPE_CHECKING:
    from .template import Leaf

_Array: TypeAlias = np.ndarray

#: The stages of what is exchanged with other ranks: what gets memory of its own; the caller's
#: arrays that are cast or lie between others' elements; the rest of those.
_NEW, _APART, _IN_PLACE = range(3)

#: Arrays that are cast are read in batches of this many bytes, so that a cast costs no second copy
#: of the state.
CAST_BATCH = 256 << 20


class Conversion:
    """How stored arrays become wanted ones: dtypes and shapes. Many arrays share one."""

    __slots__ = (
        "box",
        "dtype",
        "exact",
        "keeps",
        "name",
        "nbytes",
        "origin",
        "shape",
        "stored_dtype",
        "stored_shape",
    )

    def __init__(
        self,
        stored_dtype: str,
        dtype: str,
        stored_shape: tuple[int, ...],
        shape: tuple[int, ...],
        keeps: bool = False,
    ) -> None:
        self.stored_dtype, self.dtype = to_dtype(stored_dtype), to_dtype(dtype)
        self.stored_shape, self.shape = stored_shape, shape
        #: The name of the wanted dtype.
        self.name = dtype
        #: True if what is not stored keeps the caller's values.
        self.keeps = keeps
        #: True if the bytes are what is stored.
        self.exact = stored_dtype == dtype
        self.origin = (0,) * len(shape)
        #: The extent of what is read of the whole array.
        self.box = common_box(stored_shape, shape)
        self.nbytes = prod(self.box) * self.stored_dtype.itemsize


class Job:
    """One array to read: from a stored leaf, for the leaves that share it."""

    __slots__ = (
        "apart",
        "box",
        "conversion",
        "empty",
        "offset",
        "path",
        "rest",
        "result",
        "shape",
        "stored",
        "target",
        "twin",
    )

    def __init__(
        self,
        stored: int,
        path: str,
        conversion: Conversion,
        target: _Array | OnDevice | None = None,
        box: Box | None = None,
    ) -> None:
        """``target`` is dropped where it cannot be filled. ``box``: the part that is wanted."""
        self.stored = stored
        self.path = path
        self.conversion = conversion
        #: ``offset`` of the wanted region in the stored array, its ``shape``, and the extent of
        #: what is read of it.
        if box is None:
            self.offset, self.shape, self.box = conversion.origin, conversion.shape, conversion.box
        else:
            self.offset, self.shape = box
            ends = zip(conversion.stored_shape, self.offset, strict=True)
            self.box = common_box(tuple(max(0, n - first) for n, first in ends), self.shape)
        #: The caller's memory, where it is to be filled: an array of numpy or on a device.
        self.target: Any = target if target is not None and self._fits(target) else None
        #: The returned array of any framework, made here or the caller's.
        self.result: Any = None
        #: The caller's array, if its values are kept and are not in ``target``.
        self.rest: object = None
        #: Makes the array on a device, for the engine to fill.
        self.empty: Callable[[tuple[int, ...], np.dtype], object] | None = None
        #: True if other targets lie between its elements, so that it is read apart and written
        #: alone.
        self.apart = False
        #: The job that fills the same memory with the same values.
        self.twin: Job | None = None

    def _fits(self, target: _Array | OnDevice) -> bool:
        """True if the caller's memory takes what is read."""
        same = target.dtype is self.conversion.dtype or native_name(target.dtype) == self.conversion.name
        if isinstance(target, np.ndarray):
            return same and target.flags.writeable
        # Values that are cast, padded or cropped go through host memory.
        return same and self.conversion.exact and self.box == self.shape

    @property
    def direct(self) -> bool:
        """True if the engine reads straight to where it belongs."""
        return self.conversion.exact and (
            self.target is None or (self.target.dtype.isnative and not self.apart)
        )

    @property
    def nbytes(self) -> int:
        """Bytes of the part that is read, as they are stored."""
        if self.box is self.conversion.box:
            return self.conversion.nbytes
        return prod(self.box) * self.conversion.stored_dtype.itemsize


class ArrayReads:
    """The reads of one restore."""

    def __init__(
        self,
        core: _core.Checkpoint,
        jobs: list[Job],
        report: RestoreReport,
        kept: Sequence[tuple[str, _Array | OnDevice]] = (),
        own_groups: Sequence[Leaf] = (),
        new_groups: Sequence[Leaf] = (),
    ) -> None:
        self._core = core
        #: Groups of the caller's arrays, and leaves whose group gets new ones.
        self._own_groups = [leaf.group for leaf in own_groups if leaf.group is not None]
        self._new_groups = new_groups
        report.nbytes += sum(group.nbytes() for group in self._own_groups)
        self._kept = kept
        self._report = report
        self._allocator = Allocator()
        self._exchange: Exchange | None = None
        #: Regions exchanged with other ranks, each with the jobs that want it here.
        self._exchanged: dict[Region, list[Job]] = {}
        self.jobs = jobs

    def settle(self, dry: bool = False) -> None:
        """Looks at targets that share memory, before anything is read into one. The same array
        twice is a tie: both stored values must then be equal (a ``dry`` run reads none). Others
        whose elements lie between each other's are written one after the other, arrays on devices
        from host memory, by their framework. Those that overlap are refused."""
        own = [job for job in self.jobs if job.target is not None and 0 not in job.shape]
        if not own and not self._own_groups:
            return
        kept = [(path, array) for path, array in self._kept if 0 not in array.shape]
        arrays = [*(job.target for job in own), *(array for _, array in kept)]
        memories = [_memory(array) for array in arrays]
        spread, close = _core.shared_memory(memories, len(own), self._own_groups)
        grouped = len(arrays)
        if grouped in spread or any(grouped in pair[:2] for pair in close):
            raise self._report.mismatch("an array of a group shares memory with another")
        for number in spread:
            self._settle_spread(own[number])
        for one, other, first, second in close:
            job, there = own[one], arrays[other]
            same = first == second and _same_view(job.target, there)
            overlap = not same and np.shares_memory(_elements(job.target, first), _elements(there, second))
            if other >= len(own):
                if overlap:
                    raise self._report.mismatch(
                        f"`{kept[other - len(own)][0]}` is to keep its value, and overlaps `{job.path}` in memory, "
                        "which is restored; pass a copy of one of them"
                    )
                continue
            second_job = own[other]
            if job.twin is not None or second_job.twin is not None:
                continue
            if same:
                if job.stored != second_job.stored and not dry:
                    self._check_tie(job, second_job)
                second_job.twin = job
                continue
            if overlap:
                raise self._report.mismatch(
                    f"`{job.path}` and `{second_job.path}` overlap in memory and are stored as different arrays; "
                    "restoring into them would let one overwrite a part of the other"
                )
            job.apart = second_job.apart = True
        through_host = [job for job in own if isinstance(job.target, OnDevice) and (job.twin or job).apart]
        for job in through_host:
            job.target = job.twin = None
        self._report.nbytes -= sum(job.nbytes for job in own if job.twin is not None)

    def _settle_spread(self, job: Job) -> None:
        """An array whose strides do not tell that no two of its elements share memory: those of a
        broadcast or a sliding window do."""
        job.apart = True
        if isinstance(job.target, np.ndarray) and overlaps_itself(job.target):
            raise self._report.mismatch(
                f"`{job.path}`: elements of that array of into= share memory (shape {job.target.shape}, strides {job.target.strides}), so that it "
                "cannot hold what is stored; pass a copy of it, or a spec"
            )

    def share(self, exchange: Exchange) -> None:
        """Has what other ranks want too be read once for all of them. All ranks make this call,
        once they know where everything goes."""
        wanted: dict[Region, list[Job]] = {}
        for job in self.jobs:
            if job.twin is None and 0 not in job.box:
                stage = _NEW if job.target is None else _IN_PLACE if job.direct else _APART
                itemsize = job.conversion.stored_dtype.itemsize
                region = (stage, job.stored, itemsize, job.offset, job.box)
                wanted.setdefault(region, []).append(job)
        alike = exchange.plan({region: jobs[0].conversion.stored_dtype for region, jobs in wanted.items()})
        self._exchange = exchange
        self._exchanged = {region: wanted[region] for region in alike}
        self._report.nbytes -= sum(job.nbytes for jobs in self._exchanged.values() for job in jobs)

    def _run_exchange(self, stage: int, overwritten: list[str]) -> None:
        """Runs the exchange of a stage. All ranks make this call."""
        if self._exchange is None:
            return
        here = [job for region, jobs in self._exchanged.items() if region[0] == stage for job in jobs]
        if stage == _NEW:
            for job in here:
                self._make(job)
        else:
            overwritten.extend(job.path for job in here)

        def deliver(region: Region, offset: tuple[int, ...], values: _Array) -> None:
            for job in self._exchanged[region]:
                _put(job, offset, values)

        read, received = self._exchange.run(stage, deliver)
        self._report.nbytes += read
        self._report.received_nbytes += received
        if stage != _NEW:
            for job in here:
                _zero_outside(job)

    def batches(self, own: bool) -> Iterator[list[Job]]:
        """Yields the jobs that are read together: into new memory, or into the caller's ``own``.
        All jobs of a batch are read in place, or none is."""
        exchanged = {job for jobs in self._exchanged.values() for job in jobs}
        jobs = [
            job
            for job in self.jobs
            if (job.target is not None) is own and job.twin is None and job not in exchanged
        ]
        direct: list[list[Job]] = [[]]
        others: list[Job] = []
        for job in jobs:
            (direct[0] if job.direct else others).append(job)
        apart = list(_batches(others))
        # The caller's memory is written last where that cannot fail any more by a value that does
        # not fit.
        yield from filter(None, apart + direct if own else direct + apart)

    def read_new(self) -> None:
        """Reads everything that gets memory of its own."""
        self._run_exchange(_NEW, [])
        groups = [self._make_group(leaf) for leaf in self._new_groups]
        for batch in self.batches(own=False):
            for job in batch:
                self._make(job)
            if batch[0].direct:
                self._read([(job, _read_part(job, job.result)) for job in batch], groups)
                groups = []
            else:
                self._read_apart(batch, [])
        self._read([], groups)

    def _make_group(self, leaf: Leaf) -> _core.ArrayGroup:
        """Makes the arrays of a group, and the containers around them."""
        group, arrays = leaf.group, list[_Array]()
        assert group is not None
        like = leaf.value if leaf.what == "group" else group.outline(self._core)
        leaf.result = self._make_like(like, arrays)
        group.hold(arrays)
        self._report.nbytes += group.nbytes()
        return group

    def _make_like(self, like: object, arrays: list[_Array]) -> object:
        """Makes the value for an array, for a shape and a dtype, or for a container of them."""
        if isinstance(like, dict):
            return {key: self._make_like(one, arrays) for key, one in like.items()}
        if isinstance(like, list):
            return [self._make_like(one, arrays) for one in like]
        if isinstance(like, tuple):
            arrays.append(self._allocator.empty(like[0], to_dtype(like[1])))
        elif isinstance(like, np.ndarray):
            arrays.append(self._allocator.empty(like.shape, like.dtype))
        return arrays[-1]

    def _make(self, job: Job) -> None:
        """Makes the memory that a job gets."""
        dtype, is_whole = job.conversion.dtype, job.box == job.shape
        job.result = job.empty(job.shape, dtype) if job.empty and job.direct and is_whole else None
        if job.result is None:
            job.result = self._allocator.empty(job.shape, dtype)
            if not is_whole:
                job.result[...] = np.zeros((), dtype) if job.rest is None else adapters.on_host(job.rest)

    def fill(self) -> None:
        """Reads into the caller's arrays."""
        overwritten: list[str] = []
        unread = self._own_groups
        with telling(lambda: overwritten if unread else [*overwritten, *self._group_paths()]):
            self._run_exchange(_APART, overwritten)
            for batch in self.batches(own=True):
                if not batch[0].direct:
                    self._read_apart(batch, overwritten)
                    continue
                overwritten.extend(job.path for job in batch)
                groups, unread = unread, []
                self._read([(job, _read_part(job, _memory(job.target))) for job in batch], groups)
                for job in batch:
                    _zero_outside(job)
            groups, unread = unread, []
            self._read([], groups)
            self._run_exchange(_IN_PLACE, overwritten)
        for job in self.jobs:
            if job.target is not None:
                job.result = job.target

    def filled(self) -> list[str]:
        """Paths of the caller's arrays that are read into."""
        return [*(job.path for job in self.jobs if job.target is not None), *self._group_paths()]

    def _group_paths(self) -> list[str]:
        paths = self._core.leaf_paths() if self._own_groups else []
        return [paths[leaf] for group in self._own_groups for leaf in group.stored()]

    def _read(self, parts: list[tuple[Job, _Array]], groups: Sequence[_core.ArrayGroup] = ()) -> int:
        """Returns the bytes that were read."""
        requests = [(job.stored, job.offset, array) for job, array in parts if 0 not in job.box]
        return self._core.read(requests, groups) if requests or groups else 0

    def _read_apart(self, jobs: list[Job], overwritten: list[str]) -> None:
        """Reads arrays in their stored dtype, then casts them to where they belong."""
        scratch = Allocator()
        read = [(job, scratch.empty(job.box, job.conversion.stored_dtype)) for job in jobs]
        self._read(read)
        for job, values in read:
            place = job.result if job.target is None else job.target
            if job.target is not None:
                overwritten.append(job.path)
            _write(job, place[(*(slice(0, n) for n in job.box), ...)], values)
            _zero_outside(job)

    def _check_tie(self, one: Job, other: Job) -> None:
        values = []
        for job in (one, other):
            apart = Job(job.stored, job.path, job.conversion, None, (job.offset, job.shape))
            ArrayReads(self._core, [apart], self._report).read_new()
            values.append(apart.result)
        if values[0].tobytes() != values[1].tobytes():
            raise self._report.mismatch(
                f"`{one.path}` and `{other.path}` are one array in memory, but their stored values differ; untie them, or restore only one"
            )


def _read_part(job: Job, array: _Array) -> _Array:
    """The part of a job's array that is read. The rest is padding."""
    if job.box == job.shape:
        return array
    return array[tuple(slice(0, n) for n in job.box)]


def _write(job: Job, place: Any, values: _Array) -> None:  # numpy's, or a tensor
    """Writes values that were read in their stored dtype."""
    if not isinstance(place, np.ndarray):
        place.copy_(adapters.arrays("torch", [values])[0])
    elif job.conversion.exact:
        place[...] = values
    else:
        cast_into(values, place, job.path)


def _put(job: Job, offset: tuple[int, ...], values: _Array) -> None:
    """Puts a part of what a job reads, which begins there in the stored array, where it belongs."""
    place = _memory(job.result if job.target is None else job.target)
    box = tuple(
        slice(at - first, at - first + n)
        for at, first, n in zip(offset, job.offset, values.shape, strict=True)
    )
    _write(job, place[(*box, ...)], values)  # with the dots, one element is an array too


def _memory(target: _Array | OnDevice) -> Any:  # of any framework
    """What the engine fills."""
    return target.array if isinstance(target, OnDevice) else target


@contextmanager
def telling(overwritten: Callable[[], list[str]]) -> Iterator[None]:
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


def overlaps_itself(array: _Array) -> bool:
    """True if two elements share memory, looked at element by element."""
    if any(stride == 0 and n > 1 for stride, n in zip(array.strides, array.shape, strict=True)):
        return True
    places = np.zeros((), np.int64)
    for stride, n in zip(array.strides, array.shape, strict=True):
        places = np.add.outer(places, np.arange(n, dtype=np.int64) * stride)
    return bool((np.diff(np.sort(places, axis=None)) < array.dtype.itemsize).any())


def _same_view(one: _Array | OnDevice, other: _Array | OnDevice) -> bool:
    """True if two arrays that start at the same address are the same elements."""
    return one.dtype == other.dtype and one.shape == other.shape and one.strides == other.strides


class _Phantom:
    """The memory layout of an array without access to its values."""

    def __init__(self, array: OnDevice, first: int) -> None:
        self.__array_interface__ = {
            "version": 3,
            "data": (first, True),
            "shape": array.shape,
            "strides": array.strides,
            "typestr": f"|V{array.dtype.itemsize}",
        }


def _elements(array: _Array | OnDevice, first: int) -> _Array:
    """An array that has its elements where this one has them, which begins at that address."""
    return np.asarray(_Phantom(array, first)) if isinstance(array, OnDevice) else array


def _zero_outside(job: Job) -> None:
    """Zeros what a padded array of the caller has beyond the stored part."""
    array, box = job.target, job.box
    if array is None or box == job.shape or job.conversion.keeps:
        return
    zero = np.zeros((), array.dtype)
    for axis, n in enumerate(box):
        if n < job.shape[axis]:
            array[(*(slice(0, m) for m in box[:axis]), slice(n, None))] = zero


def _batches(jobs: list[Job]) -> Iterator[list[Job]]:
    batch: list[Job] = []
    size = 0
    for job in jobs:
        batch.append(job)
        size += job.nbytes
        if size >= CAST_BATCH:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch
