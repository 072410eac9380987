"""Exports while training to an object store."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from ranks import run
from stepwell import _core
from stepwell._locations import location

sys.path.append(str(Path(__file__).parent))

RECORD = "stepwell_export.json"


def state_of(step: int) -> dict[str, Any]:
    return {"model": {"w": np.full((300, 1000), step, np.float32)}, "step": step}


def names(url: str) -> list[str]:
    return sorted(name for name, *_ in _core.stored_objects(location(url)))


def put(url: str, text: str) -> None:
    _core.write_record(location(url), text)


def get(url: str) -> bytes | None:
    return _core.read_object(location(url))


def check(url: str, step: int) -> None:
    with sw.open(url) as found:
        assert (found["w"][...] == step).all()


def to(url: str, **given: Any) -> list[sw.Export]:
    return [sw.Export(f"{url}/hf/{{step}}", subtree="model", **given)]


@pytest.mark.parametrize("in_store", [False, True])
def test_exports_go_to_a_store(bucket: str, tmp_path: Path, in_store: bool) -> None:
    root = f"{bucket}/run" if in_store else tmp_path / "run"
    events: list[Any] = []
    exports = to(bucket, every=10, keep=2)
    with sw.CheckpointManager(root, exports=exports, on_event=events.append) as manager:
        for step in range(0, 40, 5):
            manager.save(step, state_of(step)).result()
            manager.wait_for_exports(60)
    found = names(f"{bucket}/hf")
    assert found == [f"{step}/{name}" for step in (20, 30) for name in ("model.safetensors", RECORD)]
    for step in (20, 30):
        check(f"{bucket}/hf/{step}", step)
    record = json.loads(get(f"{bucket}/hf/30/{RECORD}") or b"")
    assert (record["root"], record["step"], "state" in record) == (str(root), 30, False)
    outcomes = [event.outcome for event in events if isinstance(event, sw.events.ExportEvent)]
    assert outcomes == ["exported"] * 4
    with sw.CheckpointManager(root, exports=exports, on_event=events.append) as manager:
        manager.wait_for_exports(60)
    assert len([event for event in events if isinstance(event, sw.events.ExportEvent)]) == 4


KILLED = """
import os, sys, numpy as np, stepwell as sw
from stepwell._conversion import files
where = sys.argv[3]
if where == "written":
    files._verify = lambda *given: os._exit(9)
else:
    files._core.Conversion = lambda *given: os._exit(9)
exports = [sw.Export(sys.argv[2] + "/hf/{step}", subtree="model")]
with sw.CheckpointManager(sys.argv[1], exports=exports) as manager:
    manager.save(1, {"model": {"w": np.full((300, 1000), 1, np.float32)}, "step": 1})
"""


@pytest.mark.parametrize("where", ["begun", "written"])
@pytest.mark.parametrize("is_there", [True, False])
def test_what_a_killed_process_has_left_is_replaced(
    bucket: str, tmp_path: Path, where: str, is_there: bool
) -> None:
    root = tmp_path / "run"
    command = [sys.executable, "-c", KILLED, str(root), bucket, where]
    assert subprocess.run(command, check=False).returncode == 9
    left = names(f"{bucket}/hf")
    assert left == (["1/model.safetensors"] if where == "written" else []) + [f"1/{RECORD}"]
    assert json.loads(get(f"{bucket}/hf/1/{RECORD}") or b"")["state"] == "begun"
    if not is_there:
        with sw.CheckpointManager(root) as manager:
            manager.delete(1)
    with sw.CheckpointManager(root, exports=to(bucket)):
        pass
    assert names(f"{bucket}/hf") == (["1/model.safetensors", f"1/{RECORD}"] if is_there else [])
    if is_there:
        check(f"{bucket}/hf/1", 1)
        assert "state" not in json.loads(get(f"{bucket}/hf/1/{RECORD}") or b"")


def test_an_interrupted_removal_is_ended(bucket: str, tmp_path: Path) -> None:
    root = tmp_path / "run"
    with sw.CheckpointManager(root, exports=to(bucket)) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step)).result()
            manager.wait_for_exports(60)
    record = json.loads(get(f"{bucket}/hf/1/{RECORD}") or b"")
    put(f"{bucket}/hf/1/{RECORD}", json.dumps({**record, "state": "removed"}))
    with sw.CheckpointManager(root, exports=to(bucket)):
        pass
    assert names(f"{bucket}/hf") == ["2/model.safetensors", f"2/{RECORD}"]


@pytest.mark.parametrize("name", ["3", "3/theirs", f"3/{RECORD}"])
def test_objects_of_others_stay(bucket: str, tmp_path: Path, name: str) -> None:
    put(f"{bucket}/hf/{name}", "{}")
    events: list[Any] = []
    with sw.CheckpointManager(tmp_path / "run", exports=to(bucket), on_event=events.append) as manager:
        manager.save(3, state_of(3))
    failed = [event for event in events if isinstance(event, sw.events.ExportEvent)]
    assert [event.outcome for event in failed] == ["failed"]
    assert "exists already" in failed[0].error
    assert names(f"{bucket}/hf") == [name]
    assert get(f"{bucket}/hf/{name}") == b"{}"


def test_a_long_file_of_others_is_not_read(bucket: str, tmp_path: Path) -> None:
    put(f"{bucket}/w/3.safetensors", " " * (65 << 20))
    events: list[Any] = []
    one = sw.Export(f"{bucket}/w/{{step}}.safetensors", subtree="model")
    with sw.CheckpointManager(tmp_path / "run", exports=[one], on_event=events.append) as manager:
        manager.save(3, state_of(3))
    failed = [event for event in events if isinstance(event, sw.events.ExportEvent)]
    assert [(event.outcome, "exists already" in event.error) for event in failed] == [("failed", True)]
    assert names(f"{bucket}/w") == ["3.safetensors"]


def test_a_failed_export_leaves_nothing(bucket: str, tmp_path: Path) -> None:
    one = sw.Export(f"{bucket}/npz/{{step}}.npz", to="npz")
    with sw.CheckpointManager(tmp_path / "run", exports=[*to(bucket, include="missing"), one]) as manager:
        manager.save(1, {"model": {"w": np.full(3, np.nan)}, "text": "an array is expected"})
    assert names(bucket) == []


def test_a_step_saved_again_is_exported_again(bucket: str, tmp_path: Path) -> None:
    one = sw.Export(f"{bucket}/w/{{step}}.safetensors", subtree="model")
    with sw.CheckpointManager(tmp_path / "run", exports=[*to(bucket), one]) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step)).result()
            manager.wait_for_exports(60)
        manager.rewind(1)
        manager.save(2, state_of(99)).result()
        manager.wait_for_exports(60)
    check(f"{bucket}/hf/2", 99)
    check(f"{bucket}/w/2.safetensors", 99)
    assert len(names(f"{bucket}/hf")) == 4
    assert names(f"{bucket}/w") == [
        *(f".{step}.safetensors.{RECORD}" for step in (1, 2)),
        *(f"{step}.safetensors" for step in (1, 2)),
    ]


def test_ranks_share_an_export(bucket: str, tmp_path: Path, root: Path) -> None:
    script = """
exports = [sw.Export(sys.argv[5] + "/hf/{step}", subtree="model", keep=1, shard_size="200KB")]
with open_manager(exports=exports) as manager:
    for step in (1, 2):
        state = {"model": {f"w{n}": np.full((100, 100), step * n + 0.5) for n in range(10)}}
        manager.save(step, state).result()
        manager.wait_for_exports()
"""
    run(tmp_path, script, 3, root, bucket)
    assert {name.partition("/")[0] for name in names(f"{bucket}/hf")} == {"2"}
    with sw.open(f"{bucket}/hf/2") as found:
        assert all((found[f"w{n}"][...] == 2 * n + 0.5).all() for n in range(10))


def test_an_export_beside_the_steps_is_refused(bucket: str) -> None:
    with pytest.raises(sw.MisuseError, match="beside the steps"):
        sw.CheckpointManager(f"{bucket}/run", exports=[sw.Export(f"{bucket}/run/{{step}}")])
    with pytest.raises(sw.MisuseError, match="once, in its last part"):
        sw.Export(sw.Store(f"{bucket}/hf/step"))
