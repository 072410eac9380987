"""``Options(files_per="node")``: the processes of a machine write side by side into one file for
each item."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from threads import together

ROWS, COLUMNS = 64, 40_000


def weights(step: int) -> np.ndarray[Any, Any]:
    return np.arange(ROWS * COLUMNS, dtype=np.float32).reshape(ROWS, COLUMNS) + step


def state(rank: int, world: int, step: int) -> dict[str, Any]:
    rows = ROWS // world
    mine = weights(step)[rank * rows : (rank + 1) * rows]
    return {
        "model": {
            "w": sw.sharding.LocalShard(mine, (ROWS, COLUMNS), (rank * rows, 0)),
            "bias": np.full(7, step),
        },
        "step": step,
    }


def save(root: Path, world: int, steps: range, **options: Any) -> None:
    def work(rank: int, manager: sw.CheckpointManager) -> None:
        for step in steps:
            manager.save(step, state(rank, world, step)).result()

    together(world, root, work, **options)


def data_files(root: Path, step: int) -> list[str]:
    return sorted(str(path.relative_to(root)) for path in root.glob(f"step_{step:08}/*/*.data"))


def check(root: Path, step: int) -> None:
    with sw.open(root / f"step_{step:08}") as checkpoint:
        assert checkpoint.verify().ok
        found = checkpoint.restore()
        assert np.array_equal(found["model"]["w"], weights(step))
        assert np.array_equal(found["model"]["bias"], np.full(7, step))
        assert found["step"] == step
        part = checkpoint["model"]["w"][5:30, 100:]
        assert np.array_equal(part, weights(step)[5:30, 100:])


def test_four_processes_share_one_file_for_each_item(tmp_path: Path) -> None:
    save(tmp_path, 4, range(2), files_per="node")
    assert len(data_files(tmp_path, 0)) == 2, "one for the model, one for the rest"
    for step in range(2):
        check(tmp_path, step)

    def restore(rank: int, manager: sw.CheckpointManager) -> Any:
        like = {
            "model": {
                "w": sw.sharding.LocalShard(
                    sw.ArraySpec((ROWS // 2, COLUMNS), np.float32), (ROWS, COLUMNS), (rank * ROWS // 2, 0)
                ),
                "bias": sw.ArraySpec((7,), np.int64),
            },
            "step": int,
        }
        return manager.restore(1, like=like)["model"]["w"]

    halves = together(2, tmp_path, restore)
    assert np.array_equal(np.concatenate([half.local for half in halves]), weights(1))


def test_what_each_wrote_is_the_same_as_in_files_of_their_own(tmp_path: Path) -> None:
    save(tmp_path / "one", 2, range(1), files_per="node")
    save(tmp_path / "own", 2, range(1))
    assert len(data_files(tmp_path / "own", 0)) > len(data_files(tmp_path / "one", 0))
    with (
        sw.open(tmp_path / "one" / "step_00000000") as one,
        sw.open(tmp_path / "own" / "step_00000000") as own,
    ):
        assert one.metadata().nbytes == own.metadata().nbytes
        assert np.array_equal(one["model"]["w"][...], own["model"]["w"][...])


def test_a_single_process_has_its_own_file_as_ever(tmp_path: Path) -> None:
    save(tmp_path, 1, range(1), files_per="node")
    assert all(name.endswith("00000.data") and "/n" not in name for name in data_files(tmp_path, 0))


def test_old_steps_of_another_form_are_not_reused(tmp_path: Path) -> None:
    def work(steps: range, **options: Any) -> None:
        save(tmp_path, 2, steps, retention=sw.keep_latest(2), overwrite_from_bytes=1, **options)

    for start, files_per in ((0, "rank"), (4, "node"), (8, "rank"), (12, "node")):
        work(range(start, start + 4), files_per=files_per)
        steps = sorted(path.name for path in tmp_path.glob("step_*"))
        assert steps == [f"step_{start + 2:08}", f"step_{start + 3:08}"]
        for step in (start + 2, start + 3):
            check(tmp_path, step)
            assert len(data_files(tmp_path, step)) == (2 if files_per == "node" else 3)


@pytest.mark.parametrize("where", [0.0, 0.3, 0.6, 0.999])
def test_damage_anywhere_in_the_file_is_found_and_named(tmp_path: Path, where: float) -> None:
    save(tmp_path, 2, range(1), files_per="node")
    file = max((tmp_path / "step_00000000").glob("*/n*.data"), key=lambda path: path.stat().st_size)
    content = bytearray(file.read_bytes())
    content[int(where * (len(content) - 1))] ^= 4
    file.write_bytes(content)
    with sw.open(tmp_path / "step_00000000") as checkpoint:
        found = checkpoint.verify()
    assert found.damages, "nobody has found it"
    assert {damage.file for damage in found.damages} == {str(file)}


def test_a_cut_or_missing_file_is_damage_before_a_read(tmp_path: Path) -> None:
    save(tmp_path, 2, range(2), files_per="node")
    first, second = (
        max((tmp_path / f"step_0000000{n}").glob("*/n*.data"), key=lambda path: path.stat().st_size)
        for n in (0, 1)
    )
    os.truncate(first, first.stat().st_size - 1)
    second.unlink()
    with sw.CheckpointManager(tmp_path, read_only=True) as manager:
        assert manager.latest_step() is None


WRITER = """
import os, sys
import numpy as np
import stepwell as sw
sys.path.insert(0, {here!r})
from test_node_files import state
rank = int(sys.argv[1])
with sw.CheckpointManager({root!r}, coordinator=sw.coordinators.SharedDirectory(rank, 2, "job"), options=sw.Options(files_per="node", stall_timeout=8.0)) as manager:
    manager.save(0, state(rank, 2, 0)).result()
    print("first", flush=True)
    if rank == 1:
        sys.stdin.readline()
    try:
        manager.save(1, state(rank, 2, 1)).result()
    except sw.StepwellError as error:
        print(type(error).__name__, flush=True)
    os._exit(0)
"""


def test_a_process_that_is_killed_takes_nothing_with_it(tmp_path: Path) -> None:
    root = tmp_path / "root"
    script = WRITER.format(here=str(Path(__file__).parent), root=str(root))
    ranks = [
        subprocess.Popen([sys.executable, "-c", script, str(rank)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for rank in range(2)
    ]  # fmt: skip
    for rank in ranks:
        assert rank.stdout is not None
        assert rank.stdout.readline() == "first\n"
    ranks[1].send_signal(signal.SIGKILL)
    said, _ = ranks[0].communicate(timeout=60)
    assert said.strip() != "", "the other one hears of it"
    ranks[1].communicate(timeout=60)
    check(root, 0)
    save(root, 2, range(2, 3), files_per="node")
    check(root, 2)
    assert not (root / "step_00000001").exists()
