"""Exchange between ranks, ``restore(broadcast=…)``: shared regions are read once, and the reader
sends them to the others.

The ranks first announce the regions of stored leaves that each wants. Regions that two or more
ranks want are exchanged among them; each rank reads its other regions itself. From then on, every
rank derives the same plan. Regions are cut into pieces, pieces are grouped into batches, and a
*round* is at most one batch for each rank. In a round

1. who reads, reads its pieces into a buffer: the first of those who want the batch (``True``), or
   each of them a share (``"gather"``); and each takes the memory that it needs;
2. all ranks say whether they could, over the board of their manager, so that nobody waits in a
   collective for one that has failed;
3. the bytes go through the collective of a :class:`.transports.Transport`, and out of the buffer to
   where they belong.

No collective is entered otherwise: whatever may fail on one rank alone comes before the word of
all, or is said in place of the next one. So what a restore takes beside its result is one buffer
(of XLA, some more of that size).
"""

from __future__ import annotations

import hashlib
import json
import zlib
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from math import prod
from typing import TypeAlias

import numpy as np

from .. import _core
from ..errors import CoordinatorError, RankFailed, StepwellError
from .agreement import Together
from .transports import Bytes, Carry, Ranks, Transport

#: Bytes of one collective: as much as a restore's read buffers, and far above the few MiB below
#: which latency dominates.
BATCH = 64 << 20
#: Bytes that are read in one piece, as large as a stored chunk.
PIECE = 8 << 20
#: With more readers than fit, their pieces become smaller, down to this: a few blocks, of which
#: those at the ends are read twice. The buffer grows from there on.
LEAST = 1 << 20
#: Pieces begin at multiples of it in the buffer, which all dtypes are content with.
_ALIGNMENT = 64

#: When it is read (what a lower stage has is in place before the next one begins), the stored leaf,
#: bytes of an element, offset and extent.
Region: TypeAlias = tuple[int, int, int, tuple[int, ...], tuple[int, ...]]
#: Region, offset in the stored tensor, values → where they belong.
Deliver: TypeAlias = Callable[[Region, tuple[int, ...], "np.ndarray"], None]


@dataclass(frozen=True, slots=True)
class _Piece:
    """A box of a region, and where in its reader's share it lies."""

    region: Region
    offset: tuple[int, ...]
    extent: tuple[int, ...]
    at: int

    @property
    def nbytes(self) -> int:
        return prod(self.extent) * self.region[2]


@dataclass(frozen=True, slots=True)
class _Batch:
    """Regions that the same ranks want, with the share of each reader."""

    ranks: Ranks
    shares: list[list[_Piece]]

    @property
    def share_bytes(self) -> int:
        """Bytes of the longest share; all shares take that much of the buffer."""
        return max((share[-1].at + share[-1].nbytes for share in self.shares if share), default=0)


class Exchange:
    """The exchange between the ranks of one restore."""

    def __init__(
        self, core: _core.Checkpoint, transport: Transport, together: Together, all_read: bool
    ) -> None:
        self._core = core
        self._transport = transport
        self._together = together
        self._all_read = all_read
        together.exchange_over(transport.name)
        self._dtypes: Mapping[Region, np.dtype] = {}
        #: By stage, the rounds, each with the batch of this rank, where it has one.
        self._rounds: dict[int, list[_Batch | None]] = {}

    def plan(self, wanted: Mapping[Region, np.dtype]) -> set[Region]:
        """Has the ranks tell each other what they want, and returns what of it is exchanged. All
        ranks make this call, also one that wants nothing."""
        self._dtypes = wanted
        holders = self._holders(sorted(wanted))
        regions: dict[tuple[int, Ranks], list[Region]] = defaultdict(list)
        for region, ranks in sorted(holders.items()):
            if len(ranks) > 1:
                regions[region[0], ranks].append(region)
        batches: dict[int, list[tuple[int, _Batch]]] = defaultdict(list)
        digest = hashlib.sha256()
        for (stage, ranks), some in sorted(regions.items()):
            for number, batch in enumerate(_batches(ranks, some, len(ranks) if self._all_read else 1)):
                digest.update(repr(batch).encode())
                batches[stage].append((number, batch))
        if not self._together.same(digest.hexdigest()):
            raise RankFailed(
                "the ranks do not come to the same plan for restore(broadcast=…); are all of one version?"
            )
        rank = self._transport.rank
        for stage, some_batches in batches.items():
            # Groups of ranks take turns.
            in_turn = [batch for _, batch in sorted(some_batches, key=lambda one: (one[0], one[1].ranks))]
            self._rounds[stage] = _rounds(in_turn, rank)
        return {region for region in wanted if len(holders[region]) > 1}

    def _holders(self, mine: list[Region]) -> dict[Region, Ranks]:
        """Which ranks want each region that one wants."""
        transport = self._transport
        everyone = tuple(range(transport.world_size))
        message = np.frombuffer(zlib.compress(json.dumps(mine).encode()), np.uint8)
        size = np.frombuffer(len(message).to_bytes(8, "little"), np.uint8).copy()
        carry = transport.gather(size, everyone)
        # If they differ, all ranks have reached this call, so the sizes are no longer needed.
        if self._together.same(hashlib.sha256(message.tobytes()).hexdigest()):
            return dict.fromkeys(mine, everyone)
        sizes = [int.from_bytes(row.tobytes(), "little") for row in self._carried(carry)]
        padded = np.zeros(max(sizes), np.uint8)
        padded[: len(message)] = message
        carry = transport.gather(padded, everyone)
        self._together.agree()
        rows = self._carried(carry)
        found: dict[Region, list[int]] = defaultdict(list)
        for rank, row in enumerate(rows):
            for stage, leaf, itemsize, offset, extent in json.loads(zlib.decompress(row[: sizes[rank]])):
                found[stage, leaf, itemsize, tuple(offset), tuple(extent)].append(rank)
        return {region: tuple(ranks) for region, ranks in found.items()}

    def run(self, stage: int, deliver: Deliver) -> tuple[int, int]:
        """Reads, exchanges and delivers what is exchanged in a stage: the bytes that this rank has
        read, and those that it has got from others. All ranks make this call, also one that gets
        nothing in it."""
        nbytes = [0, 0]
        for batch in self._rounds.get(stage, []):
            carry = None if batch is None else self._ready(batch)
            self._together.agree()
            if batch is None or carry is None:
                continue
            rows = self._carried(carry)
            if not self._all_read:
                rows = rows[None]
            for reader, row, pieces in zip(batch.ranks, rows, batch.shares, strict=False):
                for piece in pieces:
                    nbytes[reader != self._transport.rank] += piece.nbytes
                    deliver(piece.region, piece.offset, self._values(row, piece))
        return nbytes[0], nbytes[1]

    def _ready(self, batch: _Batch) -> Carry:
        """Returns the collective of a batch once all ranks have arrived: this rank has read its
        share and allocated memory for the others."""
        share = self._read(batch)
        if self._all_read:
            return self._transport.gather(share, batch.ranks)
        return self._transport.broadcast(share, batch.ranks)

    def _read(self, batch: _Batch) -> Bytes:
        """A buffer of a share's length, with this rank's share in it."""
        buffer = np.empty(batch.share_bytes, np.uint8)
        number = batch.ranks.index(self._transport.rank)
        if number < len(batch.shares):
            pieces = batch.shares[number]
            self._core.read(
                [(piece.region[1], piece.offset, self._values(buffer, piece)) for piece in pieces]
            )
        return buffer

    def _carried(self, carry: Carry) -> Bytes:
        """Runs a collective. A framework's exception in it concerns other ranks."""
        try:
            return carry()
        except StepwellError:
            raise
        except Exception as failure:
            raise CoordinatorError(
                f"{self._transport.name} could not carry what the ranks have read to each other: {failure}"
            ) from failure

    def _values(self, share: Bytes, piece: _Piece) -> np.ndarray:
        """Returns a piece of a share."""
        there = share[piece.at : piece.at + piece.nbytes]
        return there.view(self._dtypes[piece.region]).reshape(piece.extent)


def _batches(ranks: Ranks, regions: list[Region], readers: int) -> Iterator[_Batch]:
    """Yields the common regions of these ranks in batches, each with one share per reader."""
    limit = min(PIECE, max(LEAST, BATCH // readers))
    boxes = [
        (region, offset, extent)
        for region in regions
        for offset, extent in _cut(region[3], region[4], region[2], limit)
    ]
    lengths = [-(-prod(extent) * region[2] // _ALIGNMENT) * _ALIGNMENT for region, _, extent in boxes]
    total, begun = sum(lengths), 0
    count = -(-total // max(BATCH, readers * LEAST)) * readers
    shares: list[list[_Piece]] = [[] for _ in range(count)]
    ends = [0] * count
    for (region, offset, extent), length in zip(boxes, lengths, strict=True):
        number = begun * count // total
        shares[number].append(_Piece(region, offset, extent, ends[number]))
        ends[number] += length
        begun += length
    for number in range(0, count, readers):
        yield _Batch(ranks, shares[number : number + readers])


def _cut(
    offset: tuple[int, ...], extent: tuple[int, ...], itemsize: int, limit: int
) -> Iterator[tuple[tuple[int, ...], tuple[int, ...]]]:
    """A box in boxes of ``limit`` bytes at most, cut along its outermost dimensions."""
    nbytes = prod(extent) * itemsize
    if nbytes <= limit:
        yield offset, extent
        return
    axis = next(number for number, n in enumerate(extent) if n > 1)
    size = extent[axis]
    rows = max(1, limit // (nbytes // size))
    for at in range(0, size, rows):
        first = (*offset[:axis], offset[axis] + at, *offset[axis + 1 :])
        part = (*extent[:axis], min(rows, size - at), *extent[axis + 1 :])
        yield from _cut(first, part, itemsize, limit)


def _rounds(batches: list[_Batch], rank: int) -> list[_Batch | None]:
    """The rounds in which these batches go, in that order, each as early as all of its ranks are
    free: of each round, the batch of one rank."""
    rounds: list[_Batch | None] = []
    free: dict[int, int] = defaultdict(int)
    for batch in batches:
        number = max(free[one] for one in batch.ranks)
        for one in batch.ranks:
            free[one] = number + 1
        rounds.extend([None] * (number + 1 - len(rounds)))
        if rank in batch.ranks:
            rounds[number] = batch
    return rounds
