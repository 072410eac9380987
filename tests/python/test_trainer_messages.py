"""Errors inside trainers name what their users can do, and no keyword that they cannot pass."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import stepwell as sw
from command_line import flip_a_bit
from ranks import run_forked
from stepwell.integrations import _terms

ADVICE = Path(__file__).parents[2] / "python" / "src" / "errors.rs"
STATE = {"a": np.ones(3)}
#: Each remedy in words that no message has.
TERMS = _terms.Terms(**{reason: f"<{reason}>" for reason in _terms._PATTERNS})


def saved(root: Path) -> sw.CheckpointManager:
    mgr = sw.CheckpointManager(root)
    mgr.save(1, STATE).result()
    return mgr


def missing(root: Path) -> None:
    saved(root).restore(like={"a": np.ones(3), "b": np.ones(3)})


def other_shape(root: Path) -> None:
    saved(root).restore(like={"a": np.ones(4)})


def other_dtype(root: Path) -> None:
    saved(root).restore(like={"a": np.ones(3, np.int8)})


def unexpected(root: Path) -> None:
    with sw.CheckpointManager(root) as mgr:
        mgr.save(1, {"model": {"a": np.ones(3), "b": np.ones(3)}}).result()
        mgr.restore(like={"model": {"a": np.ones(3)}})


def of_other_ranks(root: Path) -> None:
    with sw.CheckpointManager(root) as mgr:
        mgr.save(1, {"a": sw.PerRank(1, key="of three")}).result()
        mgr.restore(like={"a": sw.PerRank(1, key="of one")})


def damaged(root: Path) -> None:
    with saved(root) as mgr:
        flip_a_bit(next(root.glob("step_*/i*/*.data")), 100)
        mgr.restore()


def again(root: Path) -> None:
    with saved(root) as mgr:
        mgr.save(1, STATE)


def again_later(root: Path) -> None:
    with saved(root) as mgr:
        mgr.save(2, STATE).result()
        mgr.save(1, STATE)


def existing(root: Path) -> None:
    sw.save(root, STATE)
    sw.save(root, STATE)


def locked(root: Path) -> None:
    with saved(root):
        sw.CheckpointManager(root)


def alone(root: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("WORLD_SIZE", "2")
        sw.CheckpointManager(root)


@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        (missing, "missing"),
        (other_shape, "mismatch"),
        (other_dtype, "mismatch"),
        (unexpected, "mismatch"),
        (of_other_ranks, "per_rank"),
        (damaged, "damaged"),
        (again, "exists"),
        (again_later, "exists"),
        (existing, "exists"),
        (locked, "locked"),
        (alone, "coordinator"),
    ],
    ids=lambda one: getattr(one, "__name__", one),
)
def test_an_error_names_the_remedy_of_a_trainer(
    tmp_path: Path, fail: Callable[[Path], None], reason: str
) -> None:
    with pytest.raises(sw.StepwellError) as own:
        fail(tmp_path / "own")
    with pytest.raises(sw.StepwellError) as told, _terms.in_terms(TERMS):
        fail(tmp_path / "theirs")
    assert "=" in str(own.value)
    assert f"<{reason}>" in str(told.value)
    assert "=" not in str(told.value).replace("WORLD_SIZE=2", "")
    with pytest.raises(type(own.value)) as kept, _terms.in_terms(_terms.Terms(**{reason: None})):
        fail(tmp_path / "kept")
    assert str(kept.value).replace("kept", "own") == str(own.value)


DIFFERS = """
from stepwell.integrations import _terms
with open_manager() as mgr:
    try:
        mgr.save(1, {"seed": RANK}).result()
    except sw.MismatchError as error:
        _terms.reworded(error, _terms.Terms(differs="<differs>"))
        print(error)
"""


def test_values_that_differ_name_the_remedy_of_a_trainer(tmp_path: Path) -> None:
    for told in run_forked(tmp_path, "numpy", DIFFERS, 2, tmp_path / "run"):
        assert "<differs>" in told
        assert "sw." not in told


@pytest.mark.parametrize("reason", ["lockless", "memory", "donated"])
def test_advice_that_is_hard_to_get_is_the_engines(reason: str) -> None:
    (pattern,) = _terms._ADVICE[reason]
    advice = pattern.replace("\\", "")
    assert advice.replace('"', '\\"') in ADVICE.read_text()
