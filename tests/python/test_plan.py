"""Dry runs: what a restore would read and do, from the plan that it makes itself, without an array
being read."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from stepwell._restore import array_reads

STATE: dict[str, Any] = {
    "params": {
        "w": np.arange(3 << 18, dtype=np.float64),
        "b": np.ones((4, 5), np.float32),
        "c": np.zeros(1 << 20, np.uint8),
        "none": np.zeros((0, 3)),
    },
    "optimizer": {"m": np.zeros((600, 300), np.float32), "name": "adam"},
    "rng": np.random.default_rng(0),
    "step": 3,
}
STATE["params"]["tied"] = STATE["params"]["w"]


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    where = tmp_path_factory.mktemp("plan") / "c"
    sw.save(where, STATE)
    return where


W = (3 << 18) * 8


@pytest.mark.parametrize(
    ("keywords", "nbytes"),
    [
        ({"include": "params/**"}, W + 80 + (1 << 20)),
        ({"include": "params/b"}, 80),
        ({"include": "params/c"}, 1 << 20),
        ({"include": ["params/w", "optimizer/m"]}, W + 600 * 300 * 4),
        ({"like": {"optimizer": {"m": sw.ArraySpec((100, 300), "float64")}}, "resize": "truncate", "exclude": "optimizer/name"}, 100 * 300 * 4),
        ({"into": {"params": {"b": np.zeros((4, 5), np.float32), "c": np.zeros(1 << 20, np.uint16)}}, "unexpected": "ignore"}, 80 + (1 << 20)),
    ],
)  # fmt: skip
def test_a_plan_says_what_the_restore_then_reads(
    path: Path, keywords: dict[str, Any], nbytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    read, counts = array_reads.ArrayReads._read, []
    counted = lambda *arguments: counts.append(read(*arguments))  # noqa: E731
    with sw.open(path) as checkpoint:
        plan = checkpoint.plan(**keywords)
        monkeypatch.setattr(array_reads.ArrayReads, "_read", counted)
        _, report = checkpoint.restore(**keywords, return_report=True)
    assert plan.nbytes == nbytes == report.nbytes
    assert plan.read_bytes == sum(counts)
    assert plan.report == report
    assert plan.blocks == sum(item.blocks for item in plan.items.values()) >= 1
    assert plan.read_bytes >= nbytes
    assert len(plan.files) == len(plan.items)


def test_a_plan_lists_leaves_by_what_happens_to_them(path: Path) -> None:
    like = {
        "model": {"w": np.ndarray, "b": sw.ArraySpec((6, 5), "float64"), "lora": np.zeros(3)},
        "optimizer": {"m": np.zeros((600, 300), np.float32), "name": "?"},
    }
    with sw.CheckpointManager(path.parent / "run") as manager:
        manager.save(20, STATE).result()
        plan = manager.plan(
            like=like, rename={"params": "model"}, missing="keep", unexpected="ignore", resize="pad"
        )
        assert manager.next_step() == 21
    report = plan.report
    assert (plan.step, list(plan.items)) == (20, ["params", "optimizer"])
    assert report.restored == ["model/w", "model/b", "optimizer/m", "optimizer/name"]
    assert report.cast == [sw.results.CastLeaf("model/b", "float32", "float64")]
    assert report.resized == [sw.results.ResizedLeaf("model/b", (4, 5), (6, 5))]
    assert [(one.stored, one.wanted) for one in report.renamed] == [
        ("params/w", "model/w"),
        ("params/b", "model/b"),
    ]
    assert report.kept == ["model/lora"]
    assert {"params/c", "params/tied", "step"} <= set(plan.not_wanted)
    assert plan.items["optimizer"].leaves == 2
    text = str(plan)
    for words in (
        "step 20",
        "item params: 2 leaves",
        "cast (1): model/b float32 → float64",
        "kept as they are (1): model/lora",
        "params/w → model/w",
    ):
        assert words in text, text


def test_a_plan_reads_no_array_and_changes_nothing(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"a": {"w": np.arange(1 << 18)}})
    data = tmp_path / "c" / "i0" / "00000.data"
    raw = bytearray(data.read_bytes())
    raw[4096 : 4096 + (1 << 21)] = bytes(1 << 21)
    data.chmod(0o644)
    data.write_bytes(raw)
    target = np.ones(1 << 18, int)
    with sw.open(tmp_path / "c") as checkpoint:
        plan = checkpoint.plan(into={"a": {"w": target}})
        assert plan.nbytes == 1 << 21
        assert plan.items["a"].blocks == 129  # 16 KiB each, and the first begins with the header
        assert (target == 1).all()
        with pytest.raises(sw.CorruptCheckpoint):
            checkpoint.restore()


def test_a_plan_raises_what_the_restore_would(path: Path) -> None:
    with sw.open(path) as checkpoint:
        for keywords in ({"like": {"params": {"w": sw.ArraySpec((3,))}}}, {"include": "parms/**"}):
            with pytest.raises(sw.MismatchError) as planned:
                checkpoint.plan(**keywords)
            with pytest.raises(sw.MismatchError) as restored:
                checkpoint.restore(**keywords)
            assert str(planned.value) == str(restored.value)


def test_everything_is_planned_without_a_target(path: Path) -> None:
    with sw.open(path) as checkpoint:
        plan = checkpoint.plan()
        assert set(plan.items) == {"params", "optimizer", "rng", "."}
        assert sum(item.leaves for item in plan.items.values()) == len(checkpoint.paths()) - 1, (
            "a tie is read once"
        )
        assert len(plan.files) == 4
        assert plan.not_wanted == []
