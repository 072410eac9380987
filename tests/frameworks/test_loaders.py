"""Iterators of grain and loaders of torchdata as leaves: batches after a resume."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

from ranks import run, start

#: Two epochs of eight batches on each of two ranks. ``state`` is what is saved.
DATASET = """
import grain
rows = grain.MapDataset.range(64).seed(1).shuffle()[RANK::WORLD].batch(4).repeat(2)
def fresh():
    data = iter(rows.to_iter_dataset())
    return {"data": sw.PerRank(data)}, lambda first: data
"""
DATA_LOADER = """
import grain
shard = grain.sharding.ShardOptions(RANK, WORLD)
sampler = grain.samplers.IndexSampler(64, shard_options=shard, shuffle=True, seed=1, num_epochs=2)
rows = grain.DataLoader(data_source=range(64), sampler=sampler, operations=[grain.transforms.Batch(4)])
def fresh():
    data = iter(rows)
    return {"data": sw.PerRank(data)}, lambda first: data
"""
TORCHDATA = """
import torch, warnings
warnings.simplefilter("ignore")
from torchdata.stateful_dataloader import StatefulDataLoader
def fresh():
    generator = torch.Generator()
    loader = StatefulDataLoader(range(32), batch_size=4, shuffle=True, generator=generator, num_workers=WORKERS)
    def batches(first):
        for epoch in range(first // 8, 2):
            generator.manual_seed(1000 * RANK + epoch)
            yield from loader
    return {"data": sw.PerRank(loader)}, batches
"""
TRAIN = """
import json
if __name__ == "__main__":
    plain = lambda batches: [[int(row) for row in batch] for batch in batches]
    killed, found = int(sys.argv[5]), []
    state, batches = fresh()
    with open_manager() as manager:
        state, first = manager.resume(state)
        for step, batch in enumerate(batches(first), first):
            found.append(batch)
            manager.save(step, state)
            if step == killed:
                os.kill(os.getpid(), signal.SIGKILL)
    print(json.dumps([first, plain(found), plain(fresh()[1](0))]))
"""
LOADERS = {
    "dataset of grain": ("grain", DATASET),
    "DataLoader of grain": ("grain", DATA_LOADER),
    "torchdata": ("torchdata", "WORKERS = 0\n" + TORCHDATA),
    "torchdata with workers": ("torchdata", "WORKERS = 1\n" + TORCHDATA),
}


@pytest.mark.parametrize("loader", LOADERS)
def test_batches_after_a_kill_equal_the_undisturbed(tmp_path: Path, loader: str) -> None:
    library, script = LOADERS[loader]
    pytest.importorskip(library)
    root = tmp_path / "run"
    for code, _, err in start(tmp_path, script + TRAIN, 2, root, 5).finish():
        assert code == -9, err
    ranks = [json.loads(out) for out in run(tmp_path, script + TRAIN, 2, root, -1, job="again")]
    for first, found, whole in ranks:
        assert first in (4, 5, 6)
        assert found == whole[first:]
        assert len(whole) == 16
    assert ranks[0][2] != ranks[1][2]


ELASTIC = """
import grain, json
from grain.experimental import ElasticIterator
shard = grain.sharding.ShardOptions(RANK, WORLD)
data = iter(ElasticIterator(grain.MapDataset.range(64).seed(1).shuffle(), 8, shard))
with open_manager() as manager:
    state, first = manager.resume({"data": data})
    found = [next(data).tolist() for _ in range(4)]
    manager.save(first + 3, state)
print(json.dumps(found))
"""


def test_an_elastic_iterator_resumes_with_other_ranks(tmp_path: Path) -> None:
    pytest.importorskip("grain")
    two = [json.loads(out) for out in run(tmp_path, ELASTIC, 2, tmp_path / "run")]
    (one,) = (json.loads(out) for out in run(tmp_path, ELASTIC, 1, tmp_path / "run", job="again"))
    (whole,) = (json.loads(out) for out in run(tmp_path, ELASTIC, 1, tmp_path / "whole"))
    assert [sorted(mine + other) for mine, other in zip(*two, strict=True)] == [
        sorted(rows) for rows in whole
    ]
    assert not {row for rows in one for row in rows} & {row for rows in whole for row in rows}
