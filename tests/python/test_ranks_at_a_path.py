"""Several processes save one checkpoint to a path together, without a manager: real processes over
a shared directory, killed for real."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
import stepwell as sw
from ranks import run, start
from test_ranks import MODEL, whole

#: Saves ``state(step)`` to ``ROOT``, the path of the checkpoint.
SAVE = (
    MODEL
    + """
OPTIONS = sw.Options(stall_timeout=20)

def ranks(job=sys.argv[4]):
    return sw.coordinators.SharedDirectory(RANK, WORLD, job, path=os.path.dirname(ROOT))

def save(step, **keywords):
    sw.save(ROOT, keywords.pop("state", None) or state(step), coordinator=ranks(), options=OPTIONS, **keywords)
"""
)


def names(folder: Path) -> list[str]:
    """The names beside and at the path."""
    return sorted(one.name for one in folder.iterdir() if not one.name.endswith(".py"))


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of a checkpoint, in a directory of its own."""
    (tmp_path / "models").mkdir()
    return tmp_path / "models" / "best"


def test_four_ranks_save_one_checkpoint_together(tmp_path: Path, path: Path) -> None:
    run(tmp_path, SAVE + "save(3, metrics={'loss': 0.5})\ncheck(sw.restore(ROOT, into=state(0)), 3)", 4, path)
    assert sw.metadata(path).metrics == {"loss": 0.5}
    check_whole(path, 3)
    assert names(path.parent) == ["best"]


def check_whole(path: Path, step: int) -> None:
    """One process restores the whole, and every checksum is right."""
    found = sw.restore(path)
    np.testing.assert_array_equal(found["params"]["rows"], whole(step, 1))
    np.testing.assert_array_equal(found["params"]["columns"], whole(step, 2))
    np.testing.assert_array_equal(found["params"]["norm"], np.full(36, step, np.float64))
    assert not sw.verify(path).damages


def test_a_path_that_exists_is_refused_or_replaced(tmp_path: Path, path: Path) -> None:
    script = """
save(1)
try:
    save(2)
except sw.StepExists as error:
    print(error)
save(3, exists="replace")
check(sw.restore(ROOT, into=state(0)), 3)
"""
    for out in run(tmp_path, SAVE + script, 2, path):
        assert "exists already" in out
    assert names(path.parent) == ["best"]


def test_each_rank_keeps_its_own_value(tmp_path: Path, path: Path) -> None:
    script = "save(0, state={'rng': sw.PerRank({'seed': RANK})})"
    run(tmp_path, SAVE + script, 3, path)
    assert sw.restore(path) == {"rng": {"0": {"seed": 0}, "1": {"seed": 1}, "2": {"seed": 2}}}


def test_ranks_save_to_a_path_in_the_background(tmp_path: Path, path: Path) -> None:
    script = """
future = sw.save_async(ROOT, state(5), coordinator=ranks(), options=OPTIONS)
future.result()
check(sw.restore(ROOT, into=state(0)), 5)
"""
    run(tmp_path, SAVE + script, 2, path)


@pytest.mark.parametrize("bad", [0, 1])
def test_a_bad_state_of_one_rank_fails_the_save_of_all(tmp_path: Path, path: Path, bad: int) -> None:
    script = f"""
try:
    save(1, state={{"w": object()}} if RANK == {bad} else None)
except sw.StepwellError as error:
    print(type(error).__name__, error)
save(2)
"""
    outs = run(tmp_path, SAVE + script, 2, path)
    assert "UnsupportedLeaf" in outs[bad]
    assert "RankFailed" in outs[1 - bad], outs
    assert "`w`" in outs[1 - bad], outs
    assert names(path.parent) == ["best"]


@pytest.mark.parametrize("killed", [0, 1])
def test_a_rank_killed_in_a_save_leaves_no_checkpoint(tmp_path: Path, path: Path, killed: int) -> None:
    script = f"""
class Dies:
    def __call__(self):
        os.kill(os.getpid(), signal.SIGKILL)

OPTIONS = sw.Options(stall_timeout=2)
try:
    save(1, state=Dies() if RANK == {killed} else None)
except sw.errors.CoordinationTimeout as error:
    print(error)
"""
    (code, _, _), (other, out, err) = sorted(start(tmp_path, SAVE + script, 2, path).finish())
    assert code < 0
    assert other == 0, err
    assert f"[{killed}]" in out
    assert not path.exists()
    run(tmp_path, SAVE + "save(2)", 2, path, job="next")
    check_whole(path, 2)
    assert "best" in names(path.parent)


def test_a_rank_that_saves_alone_is_told_what_to_pass(tmp_path: Path, path: Path) -> None:
    script = """
OPTIONS = sw.Options(stall_timeout=1)
if RANK == 0:
    try:
        save(1)
    except sw.errors.CoordinationTimeout as error:
        print(error, *error.__notes__)
"""
    out = run(tmp_path, SAVE + script, 2, path)[0]
    assert "[1]" in out
    assert "coordinator=None" in out


def test_a_shared_directory_without_a_path_is_refused(tmp_path: Path) -> None:
    ranks = sw.coordinators.SharedDirectory(0, 2, "job")
    with pytest.raises(sw.MisuseError, match="path="):
        sw.save(tmp_path / "best", {"x": 1}, coordinator=ranks)
    assert os.listdir(tmp_path) == []
