"""``stepwell.integrations.orbax``: the calls of Orbax's manager."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import stepwell as sw

pytest.importorskip("jax")
pytest.importorskip("orbax.checkpoint")

sys.path += [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "python")]

import jax
import jax.numpy as jnp
import orbax.checkpoint as real
import orbax_job
from accidents import files_no_longer_than
from command_line import flip_a_bit
from moments import killed_in_a_save, there_from_the_first
from ranks import free_port, run, start
from stepwell.integrations import orbax as ours


def job(library: str, directory: Path, killed: int) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, orbax_job.__file__, library, str(directory), str(killed)],
        capture_output=True,
        text=True,
        timeout=200,
        check=False,
        env={**os.environ, "XLA_FLAGS": ""},
    )


@pytest.mark.parametrize("first", ["stepwell", "orbax"])
def test_a_killed_training_resumes_with_equal_losses(tmp_path: Path, first: str) -> None:
    whole = orbax_job.train(real, tmp_path / "whole")

    def kill(place: Path) -> None:
        assert job(first, place, killed=6).returncode == -9

    def is_committed(place: Path) -> bool:
        return (place / "6").exists() or (place / "stepwell" / "step_00000006").exists()

    place = killed_in_a_save(tmp_path, kill, is_committed)
    done = job("stepwell", place, killed=-1)
    assert done.returncode == 0, done.stderr
    rest = {int(step): loss for step, loss in json.loads(done.stdout.splitlines()[-1]).items()}
    assert min(rest) in (3, 5)
    assert rest == {step: whole[step] for step in range(min(rest), orbax_job.STEPS)}
    with ours.CheckpointManager(place) as manager:
        assert manager.all_steps()[-2:] == [6, 8]


def test_a_committed_step_exists_at_every_moment(tmp_path: Path) -> None:
    options = ours.CheckpointManagerOptions(max_to_keep=1)
    with (
        there_from_the_first(lambda: list(tmp_path.glob("stepwell/step_*"))),
        ours.CheckpointManager(tmp_path, options=options) as manager,
    ):
        for step in range(20):
            manager.save(step, args=ours.args.StandardSave({"w": jnp.full(3, step)}))
    assert [path.name for path in tmp_path.glob("stepwell/step_*")] == ["step_00000019"]


OPTIONS: dict[str, dict[str, Any]] = {
    "none": {},
    "interval": {"save_interval_steps": 3},
    "newest": {"max_to_keep": 2},
    "period": {"max_to_keep": 2, "keep_period": 4},
    "some": {"save_interval_steps": 4, "save_on_steps": [5, 7]},
    "own": {"should_save_fn": lambda step, latest: latest is None or step >= latest + 3},
    "best": {"max_to_keep": 2, "best_fn": lambda found: found["accuracy"]},
    "least": {"max_to_keep": 2, "best_fn": lambda found: -found["accuracy"], "best_mode": "min"},
    "waiting": {"enable_async_checkpointing": False, "max_to_keep": 1},
}


def answers(ocp: Any, directory: Path, options: dict[str, Any]) -> list[Any]:
    with ocp.CheckpointManager(directory, options=ocp.CheckpointManagerOptions(**options)) as manager:
        found: list[Any] = []
        for step in range(2, 11):
            found.append(manager.should_save(step))
            args = ocp.args.StandardSave({"w": jnp.full(3, step)})
            found.append(manager.save(step, args=args, metrics={"accuracy": step / 10}))
            manager.wait_until_finished()
        found.append(manager.save(4, args=args, metrics={"accuracy": 0.1}))
        found += [manager.all_steps(), manager.latest_step(), manager.best_step()]
        found.append(
            manager.restore(None, args=ocp.args.StandardRestore({"w": jnp.zeros(3, int)}))["w"].tolist()
        )
        return found


@pytest.mark.parametrize("options", OPTIONS)
def test_options_have_the_meaning_of_orbax(tmp_path: Path, options: str) -> None:
    expected = answers(real, tmp_path / "orbax", OPTIONS[options])
    assert answers(ours, tmp_path / "ours", OPTIONS[options]) == expected


def test_items_are_saved_and_restored_by_name(tmp_path: Path) -> None:
    state, notes = {"w": jnp.arange(6.0)}, {"epoch": 1, "names": ["a", {"b": None}]}
    for ocp, step in ((real, 1), (ours, 2)):
        args: Any = ocp.args.Composite(state=ocp.args.StandardSave(state), notes=ocp.args.JsonSave(notes))
        with ocp.CheckpointManager(tmp_path, item_names=("state", "notes")) as manager:
            assert manager.save(step, args=args, metrics={"loss": 0.5})
    with ours.CheckpointManager(tmp_path) as manager:
        for step in (1, 2):
            target = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), state)
            found: Any = manager.restore(
                step,
                args=ours.args.Composite(
                    state=ours.args.StandardRestore(target), notes=ours.args.JsonRestore()
                ),
            )
            assert isinstance(found.state["w"], jax.Array)
            assert found["state"]["w"].tolist() == state["w"].tolist()
            assert found.notes == notes
            assert set(manager.restore(step)) == {"state", "notes"}
            (one,) = manager.restore(step, args=ours.args.Composite(notes=None)).values()
            assert one == notes
        assert manager.metrics(2) == {"loss": 0.5}
        with pytest.raises(AttributeError, match="no item other"):
            _ = found.other
        with pytest.raises(sw.MisuseError, match="Orbax has written step 1"):
            manager.delete(1)
        manager.delete(2)
        assert manager.all_steps() == [1]


def test_what_only_orbax_has_is_refused_by_name(tmp_path: Path) -> None:
    refused: list[tuple[str, Any]] = [
        ("todelete_subdir", lambda: ours.CheckpointManagerOptions(todelete_subdir="old")),
        ("item_handlers", lambda: ours.CheckpointManager(tmp_path, item_handlers={})),
        ("strict", lambda: ours.args.StandardRestore({}, strict=False)),
    ]
    with ours.CheckpointManager(tmp_path / "run") as manager:
        refused += [
            ("items", lambda: manager.save(0, items={})),
            ("directory", lambda: manager.restore(0, directory="there")),
            ("args", lambda: manager.save(0, args={"w": 1})),
            ("args", lambda: manager.save(0, args=real.args.StandardSave({"w": 1}))),
        ]
        for name, call in refused:
            with pytest.raises(sw.MisuseError, match=name):
                call()
        with pytest.raises(sw.UnsupportedLeaf, match="odd"):
            manager.save(0, args=ours.args.StandardSave({"odd": object()}))
        with pytest.raises(sw.StepNotFound, match="no steps"):
            manager.restore()
    options = ours.CheckpointManagerOptions(best_fn=lambda found: found["loss"], create=False)
    best = ours.CheckpointManager(tmp_path / "run", options=options)
    with best, pytest.raises(sw.MisuseError, match="needs metrics="):
        best.save(0, args=ours.args.StandardSave({"w": 1}))
    with pytest.raises(sw.StepNotFound, match="create=False"):
        ours.CheckpointManager(tmp_path / "none", options=options)


#: Two processes with one device each.
PROCESSES = """
os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=1"
import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from stepwell.integrations import orbax as ocp
if WORLD > 1:
    jax.distributed.initialize(f"127.0.0.1:{sys.argv[5]}", num_processes=WORLD, process_id=RANK)
rows = NamedSharding(Mesh(np.array(jax.devices()), ("x",)), P("x"))
found = []

def whole(step):
    return np.full((4, 3), float(step))

def state(step):
    w = jax.make_array_from_callback((4, 3), rows, lambda index: whole(step)[index])
    return {"w": w, "step": jnp.array(step)}

options = ocp.CheckpointManagerOptions(max_to_keep=2, save_interval_steps=2)
with ocp.CheckpointManager(ROOT, options=options) as manager:
    newest = manager.latest_step()
    if newest is not None:
        restored = manager.restore(newest, args=ocp.args.StandardRestore(state(0)))
        assert int(restored["step"]) == newest
        for shard in restored["w"].addressable_shards:
            np.testing.assert_array_equal(shard.data, whole(newest)[shard.index])
    for step in range(0 if newest is None else newest + 1, int(sys.argv[6])):
        manager.save(step, args=ocp.args.StandardSave(state(step)))
        if step == 2:
            manager.wait_until_finished()
        if sys.argv[7:] == [str(step)]:
            os.kill(os.getpid(), signal.SIGKILL)
    manager.wait_until_finished()
    print(newest, manager.all_steps())
if WORLD > 1:
    jax.distributed.shutdown()
"""


def test_two_processes_save_together_and_one_resumes(tmp_path: Path) -> None:
    def kill(place: Path) -> None:
        for code, _, err in start(tmp_path, PROCESSES, 2, place, free_port(), 7, 4).finish():
            # JAX aborts a process that finds the other one dead.
            assert code in (-signal.SIGKILL, -signal.SIGABRT), err

    root = killed_in_a_save(tmp_path, kill, lambda at: (at / "stepwell" / "step_00000004").exists())
    assert run(tmp_path, PROCESSES, 2, root, free_port(), 7) == ["2 [4, 6]\n"] * 2
    assert sw.metadata(root / "stepwell").world_size == 2
    assert run(tmp_path, PROCESSES, 1, root, 0, 9) == ["6 [6, 8]\n"]


def test_a_torn_newest_step_is_passed_over(tmp_path: Path) -> None:
    whole = orbax_job.train(ours, tmp_path)
    (tmp_path / "stepwell" / "step_00000008" / "manifest.json").unlink()
    with ours.CheckpointManager(tmp_path) as manager:
        assert manager.latest_step() == 6
    assert orbax_job.train(ours, tmp_path) == {step: whole[step] for step in (7, 8, 9)}
    with ours.CheckpointManager(tmp_path) as manager:
        assert manager.all_steps() == [6, 8]


def test_damage_is_named_and_a_failed_save_is_raised(tmp_path: Path) -> None:
    args = ours.args.StandardSave({"w": jnp.ones(5000)})
    with ours.CheckpointManager(tmp_path) as manager:
        manager.save(0, args=args)
        manager.wait_until_finished()
        with pytest.raises(sw.StepExists, match=r"delete\(\)"):
            manager.save(0, args=args, force=True)
        flip_a_bit(next((tmp_path / "stepwell" / "step_00000000").rglob("*.data")))
        with pytest.raises(sw.CorruptCheckpoint, match="w"):
            manager.restore(0)
        with files_no_longer_than(1 << 12):
            assert manager.save(1, args=args)
            with pytest.raises(sw.SaveFailed):
                manager.wait_until_finished()
        assert manager.latest_step() == 0
        assert not manager.is_saving_in_progress()
        manager.check_for_errors()
