"""``stepwell.integrations.keras``: a callback that saves and resumes."""

from __future__ import annotations

import json
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import stepwell as sw

pytest.importorskip("torch")
pytest.importorskip("keras")

sys.path += [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "python")]

import keras
import keras_job
from accidents import files_no_longer_than
from command_line import flip_a_bit
from keras_job import Losses, fit, model
from longer import some
from moments import killed_in_a_save, there_from_the_first
from stepwell.integrations.keras import StepwellCheckpoint


def begin(backend: str, *arguments: str) -> subprocess.Popen[str]:
    """Begins the training in a process of its own."""
    return subprocess.Popen(
        [sys.executable, keras_job.__file__, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "KERAS_BACKEND": backend, "OMP_NUM_THREADS": "1", "XLA_FLAGS": ""},
    )


def losses_of(process: subprocess.Popen[str]) -> list[dict[str, list[float]]]:
    out, err = process.communicate(timeout=200)
    assert process.returncode == 0, err
    return json.loads(out.splitlines()[-1])


@pytest.mark.parametrize("backend", some(["jax", "torch"]))
def test_a_killed_training_resumes_with_equal_losses(tmp_path: Path, backend: str) -> None:
    pytest.importorskip(backend)
    whole = begin(backend, str(tmp_path / "own"), "-1", "BackupAndRestore", "StepwellCheckpoint")

    def kill(place: Path) -> None:
        killed = begin(backend, str(place), "2", "StepwellCheckpoint")
        _, err = killed.communicate(timeout=200)
        assert killed.returncode == -9, err

    place = killed_in_a_save(tmp_path, kill, lambda at: list(at.glob("**/step_00000002")))
    (rest,) = losses_of(begin(backend, str(place), "-1", "StepwellCheckpoint"))
    theirs, ours = losses_of(whole)
    assert ours == theirs
    first = min(rest)
    assert first in ("1", "2")
    assert rest == {epoch: losses for epoch, losses in theirs.items() if epoch >= first}


def test_a_run_goes_on_with_more_and_fewer_devices(tmp_path: Path) -> None:
    pytest.importorskip("jax")
    script = "import json, sys, keras_job; print(json.dumps(keras_job.on_devices(sys.argv[1])))"
    flags = "--xla_force_host_platform_device_count=2"
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "run")],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={
            **os.environ,
            "KERAS_BACKEND": "jax",
            "XLA_FLAGS": flags,
            "PYTHONPATH": os.pathsep.join(sys.path),
        },
    )
    assert done.returncode == 0, done.stderr
    whole, *parts = json.loads(done.stdout.splitlines()[-1])
    assert [list(part) for part in parts] == [["0", "1"], ["2"], ["3"]]
    for part in parts:
        for epoch, losses in part.items():
            assert losses == pytest.approx(whole[epoch], rel=1e-5)


def test_a_committed_step_exists_at_every_moment(tmp_path: Path) -> None:
    root = tmp_path / "run"
    with there_from_the_first(lambda: list(root.glob("step_*"))):
        fit(model(), StepwellCheckpoint(root, retention=1), epochs=8)
    assert [step.step for step in sw.inspect(root)] == [7]


def test_epochs_go_on_where_the_last_run_ended(tmp_path: Path) -> None:
    whole = fit(model())
    one, callback = model(), StepwellCheckpoint(tmp_path / "run")
    assert fit(one, callback, epochs=2) == {epoch: whole[epoch] for epoch in (0, 1)}
    assert fit(one, callback, epochs=2) == {}
    assert fit(one, callback) == {epoch: whole[epoch] for epoch in (2, 3)}
    assert 3 in fit(model(), StepwellCheckpoint(tmp_path / "other"), epochs=4)
    with sw.CheckpointManager(tmp_path / "run", read_only=True) as manager:
        assert list(manager.metrics(3)) == ["loss"]


def test_a_damaged_newest_step_is_passed_over(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    whole = fit(model(), StepwellCheckpoint(tmp_path / "run"))
    flip_a_bit(tmp_path / "run" / "step_00000003" / "i0" / "00000.data", 100)
    with caplog.at_level(logging.WARNING, "stepwell"):
        assert fit(model(), StepwellCheckpoint(tmp_path / "run")) == {3: whole[3]}
    assert "moved 3 of" in caplog.text


def test_a_resume_is_proven(tmp_path: Path) -> None:
    fit(model(), StepwellCheckpoint(tmp_path / "run", prove_resume=2))
    with sw.CheckpointManager(tmp_path / "run") as manager:
        manager.rewind(1)
    events: list[object] = []
    fit(model(), StepwellCheckpoint(tmp_path / "run", prove_resume=2, on_event=events.append))
    traced = [one for one in events if isinstance(one, sw.events.TraceEvent)]
    assert [(one.base, one.step, one.outcome) for one in traced] == [(1, 2, "same"), (1, 3, "same")]


def test_a_failed_save_ends_the_training(tmp_path: Path) -> None:
    with files_no_longer_than(1 << 10), pytest.raises(sw.SaveFailed):
        fit(model(), StepwellCheckpoint(tmp_path / "run"), epochs=9)
    assert not list((tmp_path / "run").glob("step_*"))


def test_a_fit_after_an_interrupted_one_is_a_run_of_its_own(tmp_path: Path) -> None:
    class Interrupted(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
            raise KeyboardInterrupt

    one = model()
    fit(one, StepwellCheckpoint(tmp_path), epochs=2)
    with pytest.raises(KeyboardInterrupt):
        fit(one, StepwellCheckpoint(tmp_path), Interrupted(), epochs=4)
    assert list(fit(one, epochs=2)) == [0, 1]


def test_what_cannot_be_stored_is_refused_before_training(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Twins(keras.layers.Layer):
        def __init__(self) -> None:
            super().__init__()
            self.pair = [keras.layers.Dense(4, name="twin") for _ in range(2)]

        def call(self, rows: Any) -> Any:
            return self.pair[1](self.pair[0](rows))

    one, losses = keras.Sequential([keras.Input((4,)), Twins()]), Losses()
    one.compile(loss="mse")
    with pytest.raises(ValueError, match="found twice"):
        fit(one, StepwellCheckpoint(tmp_path / "run"), losses)
    monkeypatch.setattr(keras.backend, "backend", lambda: "tensorflow")
    with pytest.raises(sw.MisuseError, match="not on tensorflow"):
        fit(one, StepwellCheckpoint(tmp_path / "run"), losses)
    assert losses.found == {}
