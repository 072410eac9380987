"""``CheckpointManager(exports=[…])``: committed steps, written for other libraries."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import stepwell as sw
from conftest import partials, same
from longer import LONG
from ranks import run
from safetensors.numpy import load_file

RECORD = "stepwell_export.json"


def state_of(step: int, rows: int = 40) -> dict[str, Any]:
    rng = np.random.default_rng(step)
    return {"model": {"w": rng.standard_normal((rows, 50), np.float32), "b": np.full(3, step)}, "step": step}


def export(tmp_path: Path, **given: Any) -> sw.Export:
    return sw.Export(**{"destination": tmp_path / "hf" / "{step}", "subtree": "model", **given})


def exported(tmp_path: Path) -> list[str]:
    return sorted(one.name for one in (tmp_path / "hf").iterdir())


def check(folder: Path, step: int, **given: Any) -> None:
    found = load_file(folder / "model.safetensors")
    wanted = state_of(step, **given)["model"]
    assert found.keys() == wanted.keys()
    assert all(same(found[name], wanted[name]) for name in wanted)


def test_due_steps_are_exported_after_their_commit(tmp_path: Path, root: Path) -> None:
    events: list[Any] = []
    exports = [export(tmp_path, every=20)]
    with sw.CheckpointManager(root, exports=exports, on_event=events.append) as manager:
        for step in (10, 20, 30, 40):
            manager.save(step, state_of(step)).result()
            manager.wait_for_exports(60)
        assert exported(tmp_path) == ["20", "40"]
    for step in (20, 40):
        check(tmp_path / "hf" / str(step), step)
    record = json.loads((tmp_path / "hf" / "40" / RECORD).read_text())
    assert (record["root"], record["step"]) == (str(root), 40)
    found = [event for event in events if isinstance(event, sw.events.ExportEvent)]
    assert [(event.step, event.outcome) for event in found] == [(20, "exported"), (40, "exported")]
    assert found[0].destination == str(tmp_path / "hf" / "20")
    assert found[0].nbytes > 8000


def test_close_waits_for_exports(tmp_path: Path, root: Path) -> None:
    with sw.CheckpointManager(root, exports=[export(tmp_path)]) as manager:
        manager.save(1, state_of(1, 50_000))
    assert exported(tmp_path) == ["1"]
    check(tmp_path / "hf" / "1", 1, rows=50_000)
    assert partials(tmp_path / "hf") == []


@pytest.fixture
def held_up(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Exports that begin to write when the event is set."""
    from stepwell import _exporter

    event, write = threading.Event(), _exporter.write
    monkeypatch.setattr(_exporter, "write", lambda *args, **given: (event.wait(60), write(*args, **given))[1])
    yield event
    event.set()


def test_retention_keeps_the_step_that_waits(tmp_path: Path, root: Path, held_up: threading.Event) -> None:
    exports = [export(tmp_path, every=3), export(tmp_path, destination=tmp_path / "w" / "{step}", every=3)]
    with sw.CheckpointManager(root, retention=2, exports=exports) as manager:
        for step in range(12):
            manager.save(step, state_of(step)).result()
        # The step that is exported, the newest that waits, and those of the rule.
        assert set(manager.all_steps()) >= {9, 10, 11}
        held_up.set()
        manager.wait_for_exports(60)
        manager.apply_retention()
        assert list(manager.all_steps()) == [10, 11]
    assert exported(tmp_path) == ["0", "9"]
    assert [one.name for one in (tmp_path / "w").iterdir()] == ["9"]
    check(tmp_path / "hf" / "9", 9)


def test_a_step_that_waits_can_be_changed(tmp_path: Path, root: Path, held_up: threading.Event) -> None:
    with sw.CheckpointManager(root, exports=[export(tmp_path)]) as manager:
        for step in range(5):
            manager.save(step, state_of(step)).result()
        manager.save(4, state_of(40), exists="replace").result()
        manager.delete(4)
        assert manager.rewind(1) == [3, 2]
        held_up.set()
    assert exported(tmp_path) == ["0", "1"]


def test_an_export_has_all_options_of_a_conversion(tmp_path: Path, root: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    one = export(
        tmp_path,
        cast="bfloat16",
        exclude="**/b",
        map=[{"rename": "model/w", "to": "model/weight"}],
        files=[tmp_path / "config.json"],
    )
    whole = sw.Export(tmp_path / "archives" / "state-{step:06}.pt", to="torch")
    with sw.CheckpointManager(root, exports=[one, whole]) as manager:
        manager.save(7, state_of(7))
    found = load_file(tmp_path / "hf" / "7" / "model.safetensors")
    assert found.keys() == {"weight"}
    assert found["weight"].dtype == ml_dtypes.bfloat16
    assert (tmp_path / "hf" / "7" / "config.json").read_text() == "{}"
    back = sw.restore(tmp_path / "archives" / "state-000007.pt")
    assert same(np.asarray(back["model"]["w"]), state_of(7)["model"]["w"])


@pytest.mark.parametrize("ending", ["", ".safetensors"])
def test_the_journal_of_a_complete_export_is_removed(tmp_path: Path, root: Path, ending: str) -> None:
    exports = [export(tmp_path, destination=tmp_path / "hf" / f"{{step}}{ending}")]
    with sw.CheckpointManager(root, exports=exports) as manager:
        manager.save(1, state_of(1))
    complete = exported(tmp_path)
    # A kill between the rename of the output and the removal of its journal.
    for step in (1, 2):
        (tmp_path / "hf" / f"{step}.partial{ending}.journal").write_bytes(b"")
    with sw.CheckpointManager(root, exports=exports):
        pass
    assert exported(tmp_path) == complete


class _Stop(Exception):
    """Raised by a progress callback."""


def stop(done: int, total: int) -> None:
    raise _Stop


@pytest.mark.parametrize("ending", ["", ".safetensors"])
def test_interrupted_conversions_of_users_stay(
    tmp_path: Path, root: Path, ending: str, small_windows: None
) -> None:
    exports = [export(tmp_path, destination=tmp_path / "hf" / f"{{step}}{ending}")]
    with sw.CheckpointManager(root) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step))
    given: dict[str, Any] = {"to": "safetensors", "subtree": "model"}
    # 1 is a step of the root, and 7 is none.
    for step in (1, 7):
        with pytest.raises(_Stop):
            sw.convert(root, tmp_path / "hf" / f"{step}{ending}", step=1, progress=stop, **given)
    users = exported(tmp_path)
    # Of 8, the output was removed by hand.
    journal = tmp_path / "hf" / f"8.partial{ending}.journal"
    journal.write_bytes((tmp_path / "hf" / f"7.partial{ending}.journal").read_bytes())
    events: list[Any] = []
    with sw.CheckpointManager(root, exports=exports, on_event=events.append) as manager:
        manager.wait_for_exports()
        assert [(event.step, event.outcome) for event in events] == [(2, "exported")]
        assert {*users, journal.name} <= {*exported(tmp_path)}
        events.clear()
        manager.save(7, state_of(7))
    failed = [event for event in events if isinstance(event, sw.events.ExportEvent)]
    assert [(event.step, event.outcome) for event in failed] == [(7, "failed")]
    assert "not one of this export" in failed[0].error
    assert {*users, journal.name} <= {*exported(tmp_path)}
    for step in (1, 7):
        sw.convert(root, tmp_path / "hf" / f"{step}{ending}", step=1, **given)


@pytest.fixture
def killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[Path, int], None]:
    """Saves a step whose export stops at its end, as if the process were killed."""
    from stepwell._conversion import files

    def interrupted(*given: Any) -> None:
        raise KeyboardInterrupt

    def killed(root: Path, step: int) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(files, "_verify", interrupted)
            patched.setattr("stepwell._export_places.Places.discard", lambda *given: None)
            with sw.CheckpointManager(root, exports=[export(tmp_path)]) as manager:
                manager.save(step, state_of(step))

    return killed


def test_interrupted_exports_of_other_roots_stay(
    tmp_path: Path, root: Path, killed: Callable[[Path, int], None]
) -> None:
    """Exports of this root to steps that it does not have any more are deleted."""
    other = tmp_path / "other"
    killed(root, 5)
    killed(other, 6)
    for folder, step in ((root, 5), (other, 6)):
        with sw.CheckpointManager(folder) as manager:
            manager.delete(step)
    assert exported(tmp_path) == ["5.partial", "5.partial.journal", "6.partial", "6.partial.journal"]
    with sw.CheckpointManager(root, exports=[export(tmp_path)]):
        pass
    assert exported(tmp_path) == ["6.partial", "6.partial.journal"]


def test_an_interrupted_export_of_a_deleted_step_goes(
    tmp_path: Path, root: Path, killed: Callable[[Path, int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepwell._exporter import Exporter

    killed(root, 1)
    assert exported(tmp_path) == ["1.partial", "1.partial.journal"]
    event, decide = threading.Event(), Exporter._decide
    monkeypatch.setattr(Exporter, "_decide", lambda *given: (event.wait(60), decide(*given))[1])
    with sw.CheckpointManager(root, exports=[export(tmp_path)]) as manager:
        manager.save(2, state_of(2)).result()
        manager.delete(1)
        event.set()
    assert exported(tmp_path) == ["2"]


def test_only_the_newest_exports_are_kept(tmp_path: Path, root: Path) -> None:
    # Neither a stranger's directory nor one of another root is deleted.
    (tmp_path / "hf" / "2").mkdir(parents=True)
    (tmp_path / "hf" / "2" / "model.safetensors").write_bytes(b"mine")
    (tmp_path / "hf" / "1").mkdir()
    (tmp_path / "hf" / "1" / RECORD).write_text('{"root": "/elsewhere", "step": 1}')
    with sw.CheckpointManager(root, exports=[export(tmp_path, keep=2)]) as manager:
        for step in (3, 4, 5, 6):
            manager.save(step, state_of(step)).result()
            manager.wait_for_exports()
    assert exported(tmp_path) == ["1", "2", "5", "6"]


def test_the_exports_of_a_rewound_line_go_first(tmp_path: Path, root: Path) -> None:
    with sw.CheckpointManager(root, exports=[export(tmp_path, keep=2)]) as manager:
        for step in (1, 2, 30):
            manager.save(step, state_of(step)).result()
            manager.wait_for_exports()
        manager.rewind(1)
        manager.save(3, state_of(3))
    assert exported(tmp_path) == ["3", "30"]
    with sw.CheckpointManager(root, exports=[export(tmp_path, keep=2)]) as manager:
        manager.save(4, state_of(4))
    assert exported(tmp_path) == ["3", "4"]


def test_a_renamed_export_is_not_deleted(tmp_path: Path, root: Path) -> None:
    with sw.CheckpointManager(root, exports=[export(tmp_path, keep=1)]) as manager:
        manager.save(100, state_of(100)).result()
        manager.wait_for_exports()
        (tmp_path / "hf" / "100").rename(tmp_path / "hf" / "1")
        manager.save(200, state_of(200))
    assert exported(tmp_path) == ["1", "200"]


def test_a_record_is_not_passed_along(tmp_path: Path, root: Path) -> None:
    """A copy with a record would claim to be an export, and ``keep`` would delete it."""
    (tmp_path / "config.json").write_text("{}")
    with sw.CheckpointManager(root, exports=[export(tmp_path, files=tmp_path / "config.json")]) as manager:
        manager.save(1, state_of(1))
    made = sw.export(root, tmp_path / "hf" / "0", subtree="model", files=tmp_path / "hf" / "1")
    assert sorted(made.files) == ["config.json", "model.safetensors"]
    again = export(tmp_path, files=tmp_path / "hf" / "1", keep=1)
    with sw.CheckpointManager(root, exports=[again]) as manager:
        manager.save(2, state_of(2))
    assert exported(tmp_path) == ["0", "2"]
    assert (tmp_path / "hf" / "2" / "config.json").exists()


def test_only_the_rest_of_an_export_is_deleted(
    tmp_path: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "hf"
    with sw.CheckpointManager(root, exports=[export(tmp_path)]) as manager:
        for step in (3, 4):
            manager.save(step, state_of(step)).result()
            manager.wait_for_exports()
    (folder / "3").rename(folder / "3.removed")
    (folder / "2.removed").mkdir()
    (folder / "5.removed").mkdir()
    (folder / "5.removed" / "mine.txt").write_text("mine")
    # The record is of another step.
    (folder / "6.removed").mkdir()
    (folder / "6.removed" / RECORD).write_bytes((folder / "4" / RECORD).read_bytes())
    events: list[Any] = []
    with sw.CheckpointManager(root, exports=[export(tmp_path, keep=1)], on_event=events.append) as manager:
        manager.wait_for_exports()
        assert exported(tmp_path) == ["4", "5.removed", "6.removed"]
        assert f"leaving {folder}/5.removed" in caplog.text
        for step in (5, 7):
            manager.save(step, state_of(step)).result()
            manager.wait_for_exports()
    assert f"{folder}/5.removed is in the way" in caplog.text
    assert exported(tmp_path) == ["5", "5.removed", "6.removed", "7"]


def test_a_failed_export_is_reported_and_hurts_nothing(
    tmp_path: Path, root: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "hf" / "1").mkdir(parents=True)
    events: list[Any] = []
    with sw.CheckpointManager(root, exports=[export(tmp_path)], on_event=events.append) as manager:
        manager.save(1, state_of(1)).result()
        manager.wait_for_exports()
        manager.save(2, state_of(2))
    found = [event for event in events if isinstance(event, sw.events.ExportEvent)]
    assert [(event.step, event.outcome) for event in found] == [(1, "failed"), (2, "exported")]
    assert "exists already" in found[0].error
    assert found[0].error_kind == "invalid"
    assert "exporting step 1" in caplog.text
    assert exported(tmp_path) == ["1", "2"]


def test_a_leaf_that_cannot_be_held_fails_the_export_only(tmp_path: Path, root: Path) -> None:
    events: list[Any] = []
    with sw.CheckpointManager(root, exports=[export(tmp_path, subtree="")], on_event=events.append) as mgr:
        mgr.save(1, state_of(1)).result()
    assert "cannot hold leaf `step`" in events[-1].error
    assert not (tmp_path / "hf").exists() or exported(tmp_path) == []


def test_a_waiting_export_gives_way_to_a_newer_step(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepwell import _exporter

    write, held = _exporter.write, []

    def slow(*arguments: Any, **given: Any) -> Any:
        if not held:
            held.append(True)
            while len(manager.all_steps()) < 4:
                time.sleep(0.01)
        return write(*arguments, **given)

    monkeypatch.setattr(_exporter, "write", slow)
    events: list[Any] = []
    with sw.CheckpointManager(root, exports=[export(tmp_path)], on_event=events.append) as manager:
        for step in (1, 2, 3, 4):
            manager.save(step, state_of(step)).result()
    found = [event for event in events if isinstance(event, sw.events.ExportEvent)]
    assert [(event.step, event.outcome) for event in found] == [
        (1, "exported"), (2, "skipped"), (3, "skipped"), (4, "exported"),
    ]  # fmt: skip


def test_a_step_saved_again_is_exported_again(tmp_path: Path, root: Path) -> None:
    with sw.CheckpointManager(root, exports=[export(tmp_path)]) as manager:
        manager.save(1, state_of(1)).result()
        manager.save(2, state_of(2)).result()
        manager.wait_for_exports()
        manager.rewind(1)
        manager.save(2, state_of(99)).result()
    check(tmp_path / "hf" / "2", 99)


def test_exports_of_one_file_have_records(tmp_path: Path, root: Path) -> None:
    folder, events = tmp_path / "w", list[Any]()
    one = sw.Export(folder / "{step}.safetensors", subtree="model")

    def opened() -> sw.CheckpointManager:
        return sw.CheckpointManager(root, exports=[one], on_event=events.append)

    def outcomes() -> list[tuple[int, str]]:
        found = [event for event in events if isinstance(event, sw.events.ExportEvent)]
        events.clear()
        return [(event.step, event.outcome) for event in found]

    def weights(step: int) -> Any:
        return load_file(folder / f"{step}.safetensors")["w"]

    with opened() as manager:
        for step in (1, 2):
            manager.save(step, state_of(step)).result()
            manager.wait_for_exports()
    assert outcomes() == [(1, "exported"), (2, "exported")]
    with opened() as manager:
        manager.wait_for_exports()
        assert outcomes() == [], "it is not exported again"
        manager.rewind(1)
        manager.save(2, state_of(99))
    assert outcomes() == [(2, "exported")]
    assert same(weights(2), state_of(99)["model"]["w"])
    # The process died before the file had its name.
    (folder / "2.safetensors").unlink()
    with opened():
        pass
    assert outcomes() == [(2, "exported")]
    # A file without a record is somebody else's.
    (folder / "3.safetensors").write_bytes(b"mine")
    with opened() as manager:
        manager.save(3, state_of(3))
    assert outcomes() == [(3, "failed")]
    assert (folder / "3.safetensors").read_bytes() == b"mine"
    records = [f".{step}.safetensors.{RECORD}" for step in (1, 2)]
    assert sorted(file.name for file in folder.iterdir() if file.suffix == ".json") == records


def test_a_failed_export_of_one_file_leaves_no_record(tmp_path: Path, root: Path) -> None:
    with sw.CheckpointManager(root, exports=[sw.Export(tmp_path / "w" / "{step}.npz", to="npz")]) as manager:
        manager.save(1, {"text": "an array is expected"})
    assert list((tmp_path / "w").iterdir()) == []


def test_the_newest_due_step_is_exported_at_the_start(tmp_path: Path, root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        for step in (10, 20, 25):
            manager.save(step, state_of(step))
    events: list[Any] = []
    with sw.CheckpointManager(root, exports=[export(tmp_path, every=10)], on_event=events.append):
        pass
    assert exported(tmp_path) == ["20"]
    with sw.CheckpointManager(root, exports=[export(tmp_path, every=10)], on_event=events.append):
        pass
    assert [event.step for event in events] == [20], "it is not exported again"


def test_a_save_does_not_wait_for_a_search_of_exports(
    tmp_path: Path, root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from stepwell import _exporter

    found, goes_on = _exporter.Exporter._left, threading.Event()

    def slow(exporter: Any) -> Any:
        assert goes_on.wait(60)
        return found(exporter)

    monkeypatch.setattr(_exporter.Exporter, "_left", slow)
    events: list[Any] = []
    with sw.CheckpointManager(root, exports=[export(tmp_path)], on_event=events.append) as manager:
        for step in (1, 2):
            manager.save(step, state_of(step)).result(30)
        goes_on.set()
    found = [event for event in events if isinstance(event, sw.events.ExportEvent)]
    assert [(event.step, event.outcome) for event in found] == [(1, "skipped"), (2, "exported")]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"destination": "hf"}, r"has \{step\} once"),
        ({"destination": "{step}/model"}, r"has \{step\} once"),
        ({"destination": "hf/{step}-{step}"}, r"has \{step\} once"),
        ({"destination": "hf/{step!r}"}, r"has \{step\} once"),
        ({"destination": "hf/{step:x}"}, r"has \{step\} once"),
        ({"destination": "hf/{name}"}, r"has \{step\} once"),
        ({"destination": "http://bucket/{step}"}, "http"),
        ({"every": 0}, "every"),
        ({"keep": 0}, "keep"),
        ({"destination": "hf/{step}.safetensors", "keep": 1}, "keep= is for directories"),
        ({"to": "stepwell"}, "Use a second manager"),
        ({"to": "gguf"}, "to"),
        ({"cast": "int3000"}, "int3000"),
        ({"files": "missing.json"}, "does not exist"),
        ({"map": [{"twist": "a"}]}, "rule 1 of the map"),
        ({"shard_size": "many"}, "shard_size"),
    ],
)
def test_wrong_exports_are_refused(given: dict[str, Any], said: str) -> None:
    with pytest.raises(sw.MisuseError, match=said):
        sw.Export(**{"destination": "hf/{step}", **given})


def test_a_manager_refuses_exports_that_collide(tmp_path: Path, root: Path) -> None:
    with pytest.raises(sw.MisuseError, match="two exports write"):
        sw.CheckpointManager(root, exports=[export(tmp_path), export(tmp_path)])
    with pytest.raises(sw.MisuseError, match="beside the steps"):
        sw.CheckpointManager(root, exports=[sw.Export(root / "{step}")])
    with pytest.raises(sw.MisuseError, match="read_only"):
        sw.CheckpointManager(root, exports=[export(tmp_path)], read_only=True)
    with pytest.raises(sw.MisuseError, match=r"sw\.Export"):
        sw.CheckpointManager(root, exports=["hf/{step}"])  # type: ignore[list-item]
    assert not root.exists()


def test_ranks_share_an_export(tmp_path: Path, root: Path) -> None:
    script = """
folder = sys.argv[5]
events = []
exports = [sw.Export(folder + "/{step}", subtree="model", keep=1, shard_size="200KB")]
with open_manager(exports=exports, on_event=events.append) as manager:
    for step in (1, 2):
        state = {"model": {f"w{n}": np.full((100, 100), step * n + 0.5) for n in range(10)}}
        manager.save(step, state).result()
        manager.wait_for_exports()
print([event.outcome for event in events if isinstance(event, sw.events.ExportEvent)])
"""
    told = run(tmp_path, script, 3, root, tmp_path / "hf")
    assert [line.strip() for line in told] == [str(["exported", "exported"])] * 3
    assert exported(tmp_path) == ["2"]
    found = sw.restore(tmp_path / "hf" / "2")
    assert all((np.asarray(found[f"w{n}"]) == 2 * n + 0.5).all() for n in range(10))


@pytest.mark.parametrize("rank", [0, 1])
def test_ranks_export_what_is_committed(tmp_path: Path, root: Path, rank: int) -> None:
    script = """
from types import SimpleNamespace
from stepwell import _exporter
folder, doubter, is_over = sys.argv[5], int(sys.argv[6]), _exporter.Exporter._is_over
def doubting(exporter, save):
    if RANK == doubter and save.step == 1:
        handle = SimpleNamespace(outcome=lambda: ("failed", "no answer", "session_lost"))
        save = SimpleNamespace(step=1, _handle=handle)
    is_over(exporter, save)
_exporter.Exporter._is_over = doubting
events = []
with open_manager(exports=[sw.Export(folder + "/{step}")], on_event=events.append) as manager:
    for step in (1, 2, 3):
        try:
            manager.save(step, {"w": object() if step == 2 and RANK == doubter else np.full(9, step)}).result()
        except sw.StepwellError:
            assert step == 2
        manager.wait_for_exports()
print([(event.step, event.outcome) for event in events if isinstance(event, sw.events.ExportEvent)])
"""
    told = run(tmp_path, script, 2, root, tmp_path / "hf", rank)
    assert [line.strip() for line in told] == [str([(1, "exported"), (3, "exported")])] * 2
    assert exported(tmp_path) == ["1", "3"]


def test_ranks_that_hear_late_of_a_commit_stay_in_step(tmp_path: Path, root: Path) -> None:
    """The leader hears of it during its search, and another rank during its first export."""
    script = """
import threading
from stepwell import _exporter
Exporter, folder = _exporter.Exporter, sys.argv[5]
left, is_over, write, begun = Exporter._left, Exporter._is_over, _exporter.write, threading.Event()
def searching(exporter):
    while not exporter._queue:
        time.sleep(0.01)
    return left(exporter)
def late(exporter, save):
    if RANK == 1 and save.step == 0:
        assert begun.wait(30)
    is_over(exporter, save)
def noting(*given, **options):
    begun.set()
    return write(*given, **options)
Exporter._left, Exporter._is_over, _exporter.write = searching, late, noting
events = []
exports = [sw.Export(folder + "/a{step}"), sw.Export(folder + "/b{step}")]
with open_manager(exports=exports, on_event=events.append) as manager:
    for step in range(4):
        manager.save(step, {"w": np.full(9, step)}).result()
        manager.wait_for_exports()
found = [event for event in events if isinstance(event, sw.events.ExportEvent)]
print([(event.step, event.outcome) for event in found])
"""
    told = run(tmp_path, script, 2, root, tmp_path / "hf")
    both = [(step, "exported") for step in range(4) for _ in "ab"]
    assert [line.strip() for line in told] == [str(both)] * 2


def test_a_rank_that_misses_a_round_is_in_the_next(tmp_path: Path, root: Path) -> None:
    script = """
from stepwell import _exporter
folder, round_of, rounds = sys.argv[5], _exporter.Exporter._round, []
def until(name):
    while not os.path.exists(folder + name):
        time.sleep(0.02)
def late(exporter):
    rounds.append(1)
    if RANK == 1 and len(rounds) == 2:
        until(".failed")
    round_of(exporter)
_exporter.Exporter._round = late
events = []
options = {"exports": [sw.Export(folder + "/{step}")], "settings": {"stall_timeout": 3.0}}
with open_manager(on_event=events.append, **options) as manager:
    for step in (1, 2, 3):
        manager.save(step, {"w": np.full(9, step)}).result()
        if step == 1 and RANK == 0:
            manager.wait_for_exports(60)
            open(folder + ".failed", "w").close()
        manager.wait_for_exports(60)
        if step == 1 and RANK == 1:
            open(folder + ".back", "w").close()
        until(".back")
found = [event for event in events if isinstance(event, sw.events.ExportEvent)]
print([(event.step, event.outcome) for event in found])
"""
    told = run(tmp_path, script, 2, root, tmp_path / "hf")
    after = [(2, "exported"), (3, "exported")]
    assert [line.strip() for line in told] == [str([(1, "failed"), *after]), str(after)]


def test_only_exports_have_a_low_priority(tmp_path: Path, root: Path) -> None:
    """A conversion of the user has the priority of its caller."""

    def lowered() -> set[str]:
        found = set()
        for task in Path("/proc/self/task").iterdir():
            with contextlib.suppress(OSError):
                name, _, rest = (task / "stat").read_text().partition("(")[2].rpartition(")")
                found.update({name} if int(rest.split()[16]) == 19 else ())
        return found

    seen: list[set[str]] = []
    with sw.CheckpointManager(root, exports=[export(tmp_path)]) as manager:
        manager.save(1, state_of(1, 400_000)).result()
        while not manager._ending.exporter.wait(0):  # type: ignore[union-attr]
            seen.append(lowered())
        assert set().union(*seen) >= {"stepwell-read"}
        assert lowered() == set()
        seen.clear()
        manager.restore(1)
        sw.convert(
            *(root, tmp_path / "out"),
            to="safetensors",
            subtree="model",
            progress=lambda done, total: seen.append(lowered()),
        )
        assert set().union(*seen) == set()


def test_an_export_that_fails_on_one_rank_fails_on_all(tmp_path: Path, root: Path) -> None:
    script = """
from stepwell import _exporter
folder, write = sys.argv[5], _exporter.write
def failing(checkpoint, *given, **options):
    if RANK == 1 and checkpoint.step == 1:
        raise OSError("no such luck")
    return write(checkpoint, *given, **options)
_exporter.write = failing
events = []
exports = [sw.Export(folder + "/{step}")]
with open_manager(exports=exports, on_event=events.append) as manager:
    for step in (1, 2):
        manager.save(step, {"w": np.full(1000, step)}).result()
        manager.wait_for_exports()
print([event.outcome for event in events if isinstance(event, sw.events.ExportEvent)])
"""
    told = run(tmp_path, script, 2, root, tmp_path / "hf")
    assert [line.strip() for line in told] == [str(["failed", "exported"])] * 2
    assert exported(tmp_path) == ["2"]


_TRAINER = """
import os, sys, time
import numpy as np
import stepwell as sw
from stepwell import _exporter
from stepwell._conversion import files
files._WINDOW_BYTES, files._JOURNAL_BYTES = 4096, 64 << 10
root, folder, steps = sys.argv[1], sys.argv[2], int(sys.argv[3])
write = _exporter.write
def noting(*arguments, **given):
    made = write(*arguments, **given)
    with open(folder + ".resumed", "a") as file:
        print(made.resumed_nbytes, file=file)
    return made
_exporter.write = noting
exports = [sw.Export(folder + "/{step}", every=4, keep=2, shard_size="3MB")]
print("ready", flush=True)
with sw.CheckpointManager(root, retention=6, exports=exports) as manager:
    first = manager.next_step()
    for step in range(first, first + steps):
        manager.save(step, {f"w{n}": np.full((500, 1000), step + n, np.float32) for n in range(6)}).result()
        time.sleep(0.02)
"""


def test_exports_killed_at_random_moments_are_resumed(tmp_path: Path, root: Path) -> None:
    rng, script = np.random.default_rng(3), tmp_path / "trainer.py"
    script.write_text(_TRAINER)
    folder, killed = tmp_path / "hf", 0

    def trainer(steps: int) -> subprocess.Popen[str]:
        command = [sys.executable, str(script), str(root), str(folder), str(steps)]
        made = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert made.stdout is not None
        assert made.stdout.readline() == "ready\n"
        return made

    def check_whole() -> None:
        for one in folder.iterdir() if folder.exists() else ():
            if one.name.isdigit():
                found, step = sw.restore(one), int(one.name)
                assert all((np.asarray(found[f"w{n}"]) == step + n).all() for n in range(6)), one

    def is_resumed() -> bool:
        notes = tmp_path / "hf.resumed"
        return notes.exists() and any(int(line) > 0 for line in notes.read_text().splitlines())

    least, attempts = 220 if LONG else 16, 0
    while killed < least or not is_resumed():
        attempts += 1
        assert attempts < 10 * least
        if attempts % 5 == 4:
            assert trainer(4).wait(180) == 0
            assert len([one for one in exported(tmp_path) if one.isdigit()]) <= 2
            assert all(one.isdigit() for one in exported(tmp_path)), exported(tmp_path)
            newest = max(int(one) for one in exported(tmp_path))
            assert newest == max(one.step for one in sw.inspect(root)) // 4 * 4
        else:
            process = trainer(1000)
            if attempts % 2:
                # A busy machine takes a while to begin an export.
                deadline = time.monotonic() + 5
                while not list(folder.glob("*.partial*")) and time.monotonic() < deadline:
                    time.sleep(0.005)
            time.sleep(0.02 + rng.random() * 0.4)
            process.kill()
            killed += process.wait(60) == -9
        check_whole()


def test_an_export_outside_a_list_is_refused(root: Path) -> None:
    with pytest.raises(sw.MisuseError, match=r"pass exports=\[sw\.Export\(…\)\]"):
        sw.CheckpointManager(root, exports=sw.Export("{step}"))  # type: ignore[arg-type]
