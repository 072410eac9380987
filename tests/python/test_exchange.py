"""The exchange of ranks in a restore: every element once, in bounded buffers, in the same rounds on
all ranks. (Real processes: ``tests/frameworks/test_broadcast.py``.)"""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from stepwell._distributed import exchange

BATCH, PIECE, LEAST = 4096, 512, 256


@st.composite
def regions(draw: st.DrawFn) -> list[exchange.Region]:
    found = []
    for leaf in range(draw(st.integers(1, 6))):
        extent = draw(st.lists(st.integers(1, 40), max_size=3).map(tuple))
        offset = tuple(draw(st.integers(0, 5)) for _ in extent)
        found.append((0, leaf, draw(st.sampled_from([1, 2, 4, 8])), offset, extent))
    return found


@given(regions(), st.integers(2, 40), st.booleans())
def test_batches_hold_every_element_once_and_no_more_than_fits(
    some: list[exchange.Region], count: int, all_read: bool
) -> None:
    bounds = exchange.BATCH, exchange.PIECE, exchange.LEAST
    exchange.BATCH, exchange.PIECE, exchange.LEAST = BATCH, PIECE, LEAST
    try:
        readers = count if all_read else 1
        batches = list(exchange._batches(tuple(range(count)), some, readers))
    finally:
        exchange.BATCH, exchange.PIECE, exchange.LEAST = bounds
    seen = {region: np.zeros(region[4], int) for region in some}
    for batch in batches:
        assert len(batch.shares) == readers
        assert 0 < batch.share_bytes * readers <= max(BATCH, readers * LEAST) + readers * (PIECE + 64)
        for share in batch.shares:
            end = 0
            for piece in share:
                assert piece.at >= end
                assert piece.at % 64 == 0
                assert piece.nbytes <= max(PIECE, piece.region[2])
                end = piece.at + piece.nbytes
                first = piece.region[3]
                box = zip(piece.offset, first, piece.extent, strict=True)
                seen[piece.region][tuple(slice(at - base, at - base + n) for at, base, n in box)] += 1
    assert all((one == 1).all() for one in seen.values())


@given(st.lists(st.sets(st.integers(0, 7), min_size=2), max_size=20))
def test_a_round_has_one_batch_for_each_rank_at_most(groups: list[set[int]]) -> None:
    batches = [exchange._Batch(tuple(sorted(group)), [[]]) for group in groups]
    by_rank = [exchange._rounds(batches, rank) for rank in range(8)]
    assert len({len(rounds) for rounds in by_rank}) == 1
    taken = []
    for number in range(len(by_rank[0])):
        for rank, rounds in enumerate(by_rank):
            batch = rounds[number]
            if batch is not None:
                assert all(by_rank[other][number] is batch for other in batch.ranks)
                if rank == batch.ranks[0]:
                    taken.append(batch)
    assert sorted(map(id, taken)) == sorted(map(id, batches))
