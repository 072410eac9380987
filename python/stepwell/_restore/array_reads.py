"""Reading the arrays of a restore: what is read into which memory, and in which order.

Arrays in new memory come first, with casts. Then, when everything else is known to fit, come the
caller's own arrays: those that need casts or have gaps batch by batch, the others in place, all at
once. An error names what it may have overwritten. A dry run makes the same batches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

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

_Array: TypeAlias = np.ndarray[Any, Any]

#: The stages of what is exchanged with other ranks: what gets memory of its own; the caller's
#: arrays that are cast or lie between others' elements; the rest of those.
_NEW, _APART, _IN_PLACE = range(3)

#: Arrays that are cast are read in batches of this many bytes, so that a cast costs no second copy
#: of the state.
CAST_BATCH = 256 << 20


@dataclass(slots=True, eq=False)
class Job:
    """One array to read: from a stored leaf, for the leaves that share it."""

    stored: int
    stored_dtype: np.dtype[Any]
    stored_shape: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    path: str
    #: The shape of all that is wanted, where this is a part of it.
    whole: tuple[int, ...]
    #: Offset of the wanted region in the stored array.
    offset: tuple[int, ...]
    #: The caller's memory, where it is to be filled.
    target: Any = None
    #: The returned array, made here or the caller's.
    result: Any = None
    #: Makes the array on a device, for the engine to fill.
    empty: Callable[[tuple[int, ...], np.dtype[Any]], Any] | None = None
    #: True if other targets lie between its elements, so that it is read apart and written alone.
    apart: bool = False
    #: The job that fills the same memory with the same values.
    twin: Job | None = None
    _box: tuple[int, ...] | None = None

    @classmethod
    def of(
        cls,
        stored: int,
        path: str,
        target: _Array | OnDevice | None,
        stored_dtype: str,
        dtype: str,
        stored_shape: Sequence[int],
        shape: Sequence[int],
        box: Box | None = None,
    ) -> Job:
        """From what the engine has matched; ``target`` is dropped where it cannot be filled.
        ``box``: the part that is wanted."""
        offset, extent = ((0,) * len(shape), tuple(shape)) if box is None else box
        wanted = to_dtype(dtype)
        if isinstance(target, OnDevice):
            # Values that are cast, padded or cropped go through host memory.
            same = stored_dtype == dtype == native_name(target.dtype)
            ends = zip(offset, extent, stored_shape, strict=False)
            if not same or any(first + n > size for first, n, size in ends) or not nested(target):
                target = None
        elif target is not None and (not target.flags.writeable or native_name(target.dtype) != dtype):
            target = None
        return cls(
            stored,
            to_dtype(stored_dtype),
            tuple(stored_shape),
            extent,
            wanted,
            path,
            tuple(shape),
            offset,
            target,
        )

    @property
    def exact(self) -> bool:
        """True if its bytes are what is stored."""
        return self.stored_dtype == self.dtype

    @property
    def direct(self) -> bool:
        """True if the engine reads straight to where it belongs."""
        target = self.target
        return self.exact and (
            target is None or (target.dtype.isnative and not self.apart and nested(target))
        )

    def box(self) -> tuple[int, ...]:
        """The extent of what is read, from ``offset`` on."""
        if self._box is None:
            there = tuple(max(0, n - first) for n, first in zip(self.stored_shape, self.offset, strict=True))
            self._box = common_box(there, self.shape)
        return self._box

    @property
    def nbytes(self) -> int:
        """Bytes of the part that is read, as they are stored."""
        return prod(self.box()) * self.stored_dtype.itemsize


class ArrayReads:
    """The reads of one restore."""

    def __init__(
        self,
        core: Any,
        jobs: list[Job],
        report: RestoreReport,
        kept: Sequence[tuple[str, _Array | OnDevice]] = (),
    ) -> None:
        self._core = core
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
        whose elements lie between each other's are written one after the other; those that overlap
        are refused."""
        self._settle_devices(dry)
        own = [job for job in self.jobs if isinstance(job.target, np.ndarray) and job.target.size]
        for job in own:
            assert job.target is not None
            if not nested(job.target) and overlaps_itself(job.target):
                raise self._report.mismatch(
                    f"`{job.path}`: elements of that array of into= share memory (shape {job.target.shape}, strides {job.target.strides}), so that it "
                    "cannot hold what is stored; pass a copy of it, or a spec"
                )
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
                    if job.stored != other.stored and not dry:
                        self._check_tie(other, job)
                    job.twin = other
                    break
                self._refuse_overlap(job, job.target, other, other.target)
                job.apart = other.apart = True
            else:
                group.append(number)
            end = max(end, high)
        self._check_kept(own, places)

    def _settle_devices(self, dry: bool) -> None:
        """The same for arrays on devices. Those whose elements lie between each other's go through
        host memory, and are put there one after the other by their framework."""
        own = [job for job in self.jobs if isinstance(job.target, OnDevice) and 0 not in job.target.shape]
        places = _core.spans([job.target.array for job in own])
        end, group = -1, list[int]()
        mixed = set[int]()
        for low, high, number in sorted((low, high, number) for number, (_, low, high) in enumerate(places)):
            job = own[number]
            if low >= end:
                group = []
            for at in group:
                other = own[at]
                if places[at][0] == places[number][0] and _same_view(job.target, other.target):
                    if job.stored != other.stored and not dry:
                        self._check_tie(other, job)
                    job.twin = other
                    break
                self._refuse_overlap(
                    job,
                    _elements(job.target, places[number][0]),
                    other,
                    _elements(other.target, places[at][0]),
                )
            else:
                group.append(number)
                if len(group) > 1:
                    mixed |= {id(own[at]) for at in group}
            end = max(end, high)
        self._check_kept(own, places)
        for job in own:
            if id(job if job.twin is None else job.twin) in mixed:
                job.target = job.twin = None

    def _refuse_overlap(self, job: Job, elements: _Array, other: Job, others: _Array) -> None:
        if np.shares_memory(elements, others):
            raise self._report.mismatch(
                f"`{other.path}` and `{job.path}` overlap in memory and are stored as different arrays; "
                "restoring into them would let one overwrite a part of the other"
            )

    def _check_kept(self, own: list[Job], places: Sequence[tuple[int, int, int]]) -> None:
        """Checks that an array which keeps its value is not a part of one that is filled. It may be
        the same array."""
        kept = [(path, array) for path, array in self._kept if 0 not in array.shape]
        if not kept or not own:
            return
        spans = np.array([place[1:] for place in places], dtype=np.uint64)
        arrays = [array.array if isinstance(array, OnDevice) else array for _, array in kept]
        for (path, array), (first, low, high) in zip(kept, _core.spans(arrays), strict=True):
            for at in map(int, np.flatnonzero((spans[:, 0] < high) & (spans[:, 1] > low))):
                job = own[at]
                assert job.target is not None
                same = places[at][0] == first and _same_view(job.target, array)
                if not same and np.shares_memory(
                    _elements(job.target, places[at][0]), _elements(array, first)
                ):
                    raise self._report.mismatch(
                        f"`{path}` is to keep its value, and overlaps `{job.path}` in memory, which is restored; pass a copy of one of them"
                    )

    def share(self, exchange: Exchange) -> None:
        """Has what other ranks want too be read once for all of them. All ranks make this call,
        once they know where everything goes."""
        wanted: dict[Region, list[Job]] = {}
        for job in self.jobs:
            if job.twin is None and 0 not in (box := job.box()):
                stage = _NEW if job.target is None else _IN_PLACE if job.direct else _APART
                region = (stage, job.stored, job.stored_dtype.itemsize, job.offset, box)
                wanted.setdefault(region, []).append(job)
        alike = exchange.plan({region: jobs[0].stored_dtype for region, jobs in wanted.items()})
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
                if isinstance(job.target, np.ndarray):
                    _zero_outside(job.target, job.box())

    def batches(self, own: bool) -> Iterator[list[Job]]:
        """Yields the jobs that are read together: into new memory, or into the caller's ``own``.
        All jobs of a batch are read in place, or none is."""
        exchanged = {job for jobs in self._exchanged.values() for job in jobs}
        jobs = [
            job
            for job in self.jobs
            if (job.target is not None) is own and job.twin is None and job not in exchanged
        ]
        direct = [[job for job in jobs if job.direct]]
        apart = list(_batches([job for job in jobs if not job.direct]))
        # The caller's memory is written last where that cannot fail any more by a value that does
        # not fit.
        yield from filter(None, apart + direct if own else direct + apart)

    def read_new(self) -> None:
        """Reads everything that gets memory of its own."""
        self._run_exchange(_NEW, [])
        for batch in self.batches(own=False):
            for job in batch:
                self._make(job)
            if batch[0].direct:
                self._read([(job, job.result) for job in batch])
            else:
                self._read_apart(batch, [])

    def _make(self, job: Job) -> None:
        """Makes the memory that a job gets."""
        job.result = (
            job.empty(job.shape, job.dtype) if job.empty and job.direct and job.box() == job.shape else None
        )
        if job.result is None:
            job.result = self._allocator.empty(job.shape, job.dtype)
            if job.box() != job.shape:
                job.result[...] = np.zeros((), job.dtype)

    def fill(self) -> None:
        """Reads into the caller's arrays."""
        overwritten: list[str] = []
        with telling(lambda: overwritten):
            self._run_exchange(_APART, overwritten)
            for batch in self.batches(own=True):
                if not batch[0].direct:
                    self._read_apart(batch, overwritten)
                    continue
                overwritten.extend(job.path for job in batch)
                self._read([(job, _memory(job.target)) for job in batch])
                for job in batch:
                    if isinstance(job.target, np.ndarray):
                        _zero_outside(job.target, job.box())
            self._run_exchange(_IN_PLACE, overwritten)
        for job in self.jobs:
            if job.target is not None:
                job.result = job.target

    def filled(self) -> list[str]:
        """Paths of the caller's arrays that are read into."""
        return [job.path for job in self.jobs if job.target is not None]

    def _read(self, jobs: list[tuple[Job, _Array]]) -> None:
        requests = [
            (
                job.stored,
                list(job.offset),
                list(box),
                array[tuple(slice(0, n) for n in box)] if box != array.shape else array,
            )
            for job, array in jobs
            if 0 not in (box := job.box())
        ]
        if requests:
            self._core.read(requests)

    def _read_apart(self, jobs: list[Job], overwritten: list[str]) -> None:
        """Reads arrays in their stored dtype, then casts them to where they belong."""
        scratch = Allocator()
        read = [(job, scratch.empty(job.box(), job.stored_dtype)) for job in jobs]
        self._read(read)
        for job, values in read:
            place = job.result if job.target is None else job.target
            box = tuple(slice(0, n) for n in job.box())
            if job.target is not None:
                overwritten.append(job.path)
            if job.exact:
                place[box] = values
            elif values.ndim == 0:
                cast_into(values, place, job.path)
            else:
                cast_into(values, place[box], job.path)
            _zero_outside(job.target, job.box())

    def _check_tie(self, one: Job, other: Job) -> None:
        values = []
        for job in (one, other):
            apart = Job(
                job.stored,
                job.stored_dtype,
                job.stored_shape,
                job.shape,
                job.dtype,
                job.path,
                job.whole,
                job.offset,
            )
            ArrayReads(self._core, [apart], self._report).read_new()
            values.append(apart.result)
        if values[0].tobytes() != values[1].tobytes():
            raise self._report.mismatch(
                f"`{one.path}` and `{other.path}` are one array in memory, but their stored values differ; untie them, or restore only one"
            )


def _put(job: Job, offset: tuple[int, ...], values: _Array) -> None:
    """Puts a part of what a job reads, which begins there in the stored array, where it belongs."""
    place = _memory(job.result if job.target is None else job.target)
    box = tuple(
        slice(at - first, at - first + n)
        for at, first, n in zip(offset, job.offset, values.shape, strict=True)
    )
    there = place[(*box, ...)]  # with the dots, one element is an array too
    if not isinstance(there, np.ndarray):
        there.copy_(adapters.arrays("torch", [values])[0])
    elif job.exact:
        there[...] = values
    else:
        cast_into(values, there, job.path)


def _memory(target: _Array | OnDevice) -> Any:
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


def nested(array: _Array | OnDevice) -> bool:
    """True if its strides grow so that no two elements can share memory (those of a broadcast or a
    sliding window do not)."""
    if isinstance(array, np.ndarray) and array.flags.c_contiguous:
        return True
    reach = array.dtype.itemsize
    for stride, n in sorted(
        (abs(stride), n) for stride, n in zip(array.strides, array.shape, strict=True) if n > 1
    ):
        if stride < reach:
            return False
        reach = stride * (n - 1) + reach
    return True


def overlaps_itself(array: _Array) -> bool:
    """True if two elements share memory: what :func:`nested` leaves open, looked at element by
    element."""
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


def _zero_outside(array: _Array | None, box: tuple[int, ...]) -> None:
    """Zeros what a padded array of the caller has beyond the stored part."""
    if array is None:
        return
    zero = np.zeros((), array.dtype)
    for axis, n in enumerate(box):
        if n < array.shape[axis]:
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
