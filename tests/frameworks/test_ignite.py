"""``stepwell.integrations.ignite``: a save handler."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import stepwell as sw
import torch

pytest.importorskip("ignite")

sys.path += [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "python")]

import ignite_job
from accidents import files_no_longer_than
from ignite.handlers import DiskSaver
from ignite_job import train
from moments import killed_in_a_save, there_from_the_first
from ranks import free_port, run_forked
from stepwell.integrations.ignite import StepwellSaver


def job(directory: Path, killed: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ignite_job.__file__, str(directory), str(killed)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


def test_a_killed_training_resumes_with_equal_losses(tmp_path: Path) -> None:
    plain = train(DiskSaver(str(tmp_path / "plain"), require_empty=False))
    assert train(StepwellSaver(tmp_path / "whole")) == plain
    assert os.listdir(tmp_path / "whole") == os.listdir(tmp_path / "plain")

    def kill(place: Path) -> None:
        assert job(place, killed=3).returncode == -9

    place = killed_in_a_save(tmp_path, kill, lambda at: (at / "checkpoint_24.pt").exists())
    done = job(place, killed=-1)
    assert done.returncode == 0, done.stderr
    rest = {int(step): loss for step, loss in json.loads(done.stdout.splitlines()[-1]).items()}
    assert rest == {step: plain[step] for step in range(17, 33)}


MODULES = "torch,ignite.handlers,ignite.distributed,stepwell.integrations.ignite"
RANKS = f"""
sys.path.insert(0, {str(Path(__file__).parent)!r})
import ignite.distributed as idist
from ignite.handlers import DiskSaver
from ignite_job import train
from stepwell.integrations.ignite import StepwellSaver
os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=sys.argv[5], LOCAL_RANK=str(RANK))
os.environ.update(RANK=str(RANK), WORLD_SIZE=str(WORLD))
idist.initialize("gloo")
train(StepwellSaver(ROOT + "-two"), epochs=2)
idist.barrier()  # the first rank has waited for its save
rest = train(StepwellSaver(ROOT + "-two"))
plain = train(DiskSaver(ROOT + "-plain", create_dir=True))
print(rest == {{step: plain[step] for step in range(17, 33)}}, min(train(StepwellSaver(ROOT))))
idist.finalize()
"""


def test_two_processes_go_on_after_one_and_one_after_two(tmp_path: Path) -> None:
    root = tmp_path / "run"
    train(StepwellSaver(root), epochs=2)
    found = run_forked(tmp_path, MODULES, RANKS, 2, root, free_port())
    assert [one.splitlines()[-1] for one in found] == ["True 17"] * 2
    own = torch.load(tmp_path / "run-plain" / "checkpoint_32.pt", weights_only=True)
    saver = StepwellSaver(tmp_path / "run-two")
    stored = saver.load("checkpoint_32.pt")
    assert stored["model"].keys() == own["model"].keys()
    assert all(torch.equal(stored["model"][name], one) for name, one in own["model"].items())
    assert sorted(train(saver, epochs=5)) == list(range(33, 41))


def test_a_complete_checkpoint_exists_at_every_moment(tmp_path: Path) -> None:
    with there_from_the_first(lambda: list(tmp_path.glob("*.pt"))):
        train(StepwellSaver(tmp_path), n_saved=1, epochs=10)
    assert os.listdir(tmp_path) == ["checkpoint_80.pt"]
    assert sw.verify(tmp_path / "checkpoint_80.pt").ok


def test_the_best_checkpoints_stay(tmp_path: Path) -> None:
    score = {
        "score_function": lambda engine: -abs(engine.state.epoch - 2),
        "score_name": "near",
        "n_saved": 2,
    }
    train(DiskSaver(str(tmp_path / "plain"), create_dir=True), **score)
    train(StepwellSaver(tmp_path / "ours"), **score)
    assert sorted(os.listdir(tmp_path / "ours")) == sorted(os.listdir(tmp_path / "plain"))


def test_a_failed_save_ends_the_training_and_deletes_nothing(tmp_path: Path) -> None:
    train(StepwellSaver(tmp_path), epochs=1)
    with files_no_longer_than(1 << 10), pytest.raises(sw.SaveFailed):
        train(StepwellSaver(tmp_path), epochs=5)
    assert os.listdir(tmp_path) == ["checkpoint_8.pt"]
    saver = StepwellSaver(tmp_path)
    saver.remove("checkpoint_8.pt")
    with files_no_longer_than(1 << 10):
        saver({"w": torch.ones(5000)}, "next.pt")
        with pytest.raises(sw.SaveFailed):
            saver.wait_until_finished()
    saver.wait_until_finished()
    assert os.listdir(tmp_path) == ["checkpoint_8.pt"]
    with pytest.raises(sw.UnsupportedLeaf, match="odd"):
        saver({"odd": object()}, "next.pt")


def test_a_torn_checkpoint_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saver = StepwellSaver(tmp_path / "run")
    assert saver.newest() is None
    train(saver, n_saved=2)
    (tmp_path / "run" / "checkpoint_32.pt" / "manifest.json").write_text("{")
    with caplog.at_level(logging.WARNING, "stepwell"):
        assert saver.newest() == "checkpoint_24.pt"
    assert "checkpoint_32.pt is passed over" in caplog.text


def test_a_file_of_ignite_still_loads(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "old.pt")
    saver = StepwellSaver(tmp_path)
    assert torch.equal(saver.load("old.pt")["w"], torch.ones(2))
    saver.remove("old.pt")
    saver({"w": torch.zeros(2)}, "new.pt")
    saver.wait_until_finished()
    assert os.listdir(tmp_path) == ["new.pt"]
    other = StepwellSaver(tmp_path, save_on_rank=1)
    other({"w": torch.ones(2)}, "other.pt")
    assert os.listdir(tmp_path) == ["new.pt"]
