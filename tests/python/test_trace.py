"""Traces: a resumed run is the same run, or the first step, leaf and rank that differ are named."""

from __future__ import annotations

import logging
import os
import shutil
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import command_line
import numpy as np
import pytest
import stepwell as sw
from ranks import run
from stepwell._trace.causes import causes
from stepwell._trace.compare import compare, replicas
from stepwell._trace.record import Trace, TracedLeaf


class Training:
    """A few numbers that change at each step, by a random generator that is a part of the state."""

    def __init__(self, seed: int = 1) -> None:
        self.rng = np.random.default_rng(seed)
        self.w = np.zeros((40, 30))
        self.updates = 0

    def step(self) -> None:
        self.w += self.rng.standard_normal(self.w.shape)
        self.updates += 1

    def state(self) -> dict[str, Any]:
        return {"params": {"w": self.w, "t": self.w.T}, "updates": self.updates, "rng": self.rng}


def train(mgr: sw.CheckpointManager, training: Training, first: int, end: int, save_at: int = 2) -> None:
    for step in range(first, end):
        training.step()
        if step == save_at:
            mgr.save(step, training.state())
        else:
            mgr.trace(step, training.state())


def first_run(root: Path, k: int = 3) -> None:
    with sw.CheckpointManager(root, prove_resume=k) as mgr:
        train(mgr, Training(), 0, 8)


def resumed(
    root: Path, change: Any = None, **options: Any
) -> tuple[list[Any], list[sw.errors.ResumeDiffers]]:
    """Resumes step 2 and trains to step 6. ``change`` alters the restored training. Returns the
    events of traces, and the warnings."""
    events: list[Any] = []
    training = Training(seed=9)
    with (
        warnings.catch_warnings(record=True) as caught,
        sw.CheckpointManager(root, prove_resume=3, on_event=events.append, **options) as mgr,
    ):
        warnings.simplefilter("always")
        restored = mgr.restore(2)
        training.w, training.updates, training.rng = (
            restored["params"]["w"],
            restored["updates"],
            restored["rng"],
        )
        mgr.trace(2, training.state())
        if change is not None:
            change(training)
        train(mgr, training, 3, 7)
    found = [event for event in events if isinstance(event, sw.events.TraceEvent)]
    differing = [one for one in caught if isinstance(one.message, sw.errors.ResumeDiffers)]
    assert {one.filename for one in differing} <= {__file__}  # the line that announced the step
    return found, [one.message for one in differing if isinstance(one.message, sw.errors.ResumeDiffers)]


def traces(root: Path) -> list[Path]:
    return sorted((root / ".stepwell" / "traces").glob("*.json"))


def test_a_resumed_run_has_the_same_traces(root: Path) -> None:
    first_run(root)
    assert len(traces(root)) == 4, "the saved step and three after it"
    events, told = resumed(root)
    assert [(event.step, event.outcome, event.base) for event in events] == [
        (2, "same", 2), (3, "same", 2), (4, "same", 2), (5, "same", 2),
    ]  # fmt: skip
    assert not told
    assert command_line.document("trace", root)["same"] is True


def flip(training: Training) -> None:
    training.w.view(np.uint8)[17, 3] ^= 1


def test_one_flipped_bit_names_step_leaf_and_rank(root: Path) -> None:
    first_run(root)
    events, (told,) = resumed(root, flip)
    assert [(event.step, event.outcome) for event in events] == [(2, "same"), (3, "differs")]
    assert (told.step, told.rank, told.leaf) == (3, 0, "params/w")
    assert told.difference is not None
    assert told.difference.leaves == ("params/w", "params/t")
    assert events[1].error in str(told)
    found = command_line.document("trace", root, code=1)
    (parting,) = found["partings"]
    assert (parting["last_same"], parting["step"], parting["ranks"]) == (2, 3, [0])
    assert parting["leaves"][0] == {"path": "params/w", "what": "value"}


def test_a_difference_raises_on_request(root: Path) -> None:
    first_run(root)
    with pytest.raises(sw.errors.ResumeDiffers, match=r"step 3.*params/w"):
        resumed(root, flip, on_resume_difference="raise")


def test_a_slow_disk_ends_traces_and_not_memory(
    root: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("stepwell._trace.tracer._MAX_UNWRITTEN", 0)
    with caplog.at_level(logging.WARNING, "stepwell"):
        first_run(root)
        deadline = time.monotonic() + 30
        while caplog.text.count("is not traced") < 4 and time.monotonic() < deadline:
            time.sleep(0.01)
    assert "step 2 is not traced: RuntimeError: 0 traces wait" in caplog.text
    assert not traces(root)


def test_another_state_of_the_generator_is_the_cause(root: Path) -> None:
    first_run(root)

    def forget(training: Training) -> None:
        training.rng = np.random.default_rng(1)

    _, (told,) = resumed(root, forget)
    assert told.difference is not None
    assert told.difference.causes[0].startswith("a random generator was not restored")


def test_a_leaf_that_is_gone_is_a_difference(root: Path) -> None:
    first_run(root)
    with sw.CheckpointManager(root, prove_resume=3) as mgr:
        mgr.restore(2)
        with pytest.warns(sw.errors.ResumeDiffers) as caught:
            mgr.trace(2, {"params": {"w": np.zeros(3)}})
    told = caught[0].message
    assert isinstance(told, sw.errors.ResumeDiffers)
    assert told.difference is not None
    assert set(told.difference.leaves) >= {"params/w", "params/t", "updates"}


def test_refused_saves_are_traced_until_enough_are(root: Path) -> None:
    training = Training()
    with sw.CheckpointManager(root, save_policy=4, prove_resume=2) as mgr:
        for step in range(8):
            training.step()
            mgr.save(step, training.state())
    found = command_line.document("trace", root)["traces"]
    assert [(one["step"], one["traced_steps"]) for one in found] == [(0, [0, 1, 2]), (4, [4, 5, 6])]


def test_nothing_is_traced_without_the_option(root: Path) -> None:
    with sw.CheckpointManager(root) as mgr:
        train(mgr, Training(), 0, 5)
    assert not (root / ".stepwell" / "traces").exists()


def test_a_damaged_trace_is_ignored_with_a_reason(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    first_run(root)
    for file in traces(root):
        content = bytearray(file.read_bytes())
        content[content.index(b'"leaves"') + 40] ^= 1
        file.write_bytes(content)
    cut = traces(root)[0]
    cut.write_bytes(cut.read_bytes()[:-30])
    with caplog.at_level("INFO", "stepwell"):
        events, told = resumed(root)
    assert not events
    assert not told
    assert sum("ignoring the trace" in line for line in caplog.messages) == 4
    assert any("checksum" in line for line in caplog.messages)
    found = command_line.document("trace", root)
    assert len(found["ignored"]) == 4


def test_retention_deletes_traces_with_their_step(root: Path) -> None:
    with sw.CheckpointManager(root, retention=1, prove_resume=2) as mgr:
        for step in (0, 10):
            mgr.save(step, Training().state()).result()
            mgr.trace(step + 1, Training().state())
    # The trace of step 1 may come after its base is gone.
    with sw.CheckpointManager(root) as mgr:
        assert mgr.all_steps() == [10]
    assert {one["step"] for one in command_line.document("trace", root)["traces"]} == {10}


def test_a_branch_keeps_its_traces(root: Path) -> None:
    first_run(root)
    with sw.CheckpointManager(root, prove_resume=1) as mgr:
        mgr.save(20, Training().state()).result()
        mgr.trace(21, Training().state())
        mgr.wait_until_finished()
        mgr.rewind(2, "aside")
        mgr.trace(3, Training().state())  # belongs to no base any more
    with sw.CheckpointManager(root) as mgr:
        assert [one["step"] for one in command_line.document("trace", root)["traces"]] == [2, 20]
        mgr.delete_branch("aside")
    with sw.CheckpointManager(root):
        assert [one["step"] for one in command_line.document("trace", root)["traces"]] == [2]


def test_a_trace_that_fails_does_not_fail_a_save(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    with sw.CheckpointManager(root, prove_resume=2) as mgr:
        (root / ".stepwell" / "traces").write_text("in the way")
        assert mgr.save(0, Training().state()).result() == 0
        mgr.trace(1, {"a": object()})
    assert any("is not traced: UnsupportedLeaf" in line for line in caplog.messages)
    assert sw.restore(root)["updates"] == 0


def test_two_roots_are_compared_to_the_first_difference(tmp_path: Path) -> None:
    one, other = tmp_path / "one", tmp_path / "other"
    first_run(one, 5)
    shutil.copytree(one, tmp_path / "copy")
    with sw.CheckpointManager(other, prove_resume=5) as mgr:
        training = Training()
        train(mgr, training, 0, 5)
        flip(training)
        train(mgr, training, 5, 8)
    assert command_line.run("trace", one, tmp_path / "copy").exit_code == 0
    found = command_line.run("trace", one, other)
    assert found.exit_code == 1
    assert "at step 5 (the same until step 4)" in found.output
    assert "params/w: another value" in found.output


def test_no_compared_step_is_told(root: Path) -> None:
    first_run(root)
    told = command_line.run("trace", root)
    assert "no difference was found; no step was compared between runs" in told.output


def test_a_root_without_traces_is_a_finding(root: Path) -> None:
    with sw.CheckpointManager(root):
        pass
    assert command_line.document("trace", root, code=1)["traces"] == []
    assert command_line.run("trace", root / "nowhere").exit_code == 1


def test_a_step_without_traces_is_told(root: Path, caplog: pytest.LogCaptureFixture) -> None:
    first_run(root)
    told = command_line.run("trace", root, "--step", 99)
    assert told.exit_code == 1
    assert "no traces of the saved step 99" in told.output
    for file in traces(root):
        file.unlink()
    with caplog.at_level(logging.WARNING, "stepwell"):
        resumed(root)
    assert "has no traces, so nothing is compared" in caplog.text


KILLED = """
import os, signal, sys
sys.path.insert(0, sys.argv[2])
import stepwell as sw
from test_trace import Training, train
mgr = sw.CheckpointManager(sys.argv[1], prove_resume=1000)
training = Training()
train(mgr, training, 0, 3)
mgr.wait_until_finished()
print("saved", flush=True)
train(mgr, training, 3, 1_000_000)
"""


def test_traces_survive_the_death_of_their_writer(root: Path) -> None:
    process = subprocess.Popen(
        [sys.executable, "-c", KILLED, str(root), os.path.dirname(__file__)],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "saved\n"
    while len(traces(root)) < 6:
        assert process.poll() is None
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    assert not command_line.document("trace", root)["ignored"], "a trace has its name when it is whole"
    events, told = resumed(root)
    assert {event.outcome for event in events} == {"same"}
    assert len(events) >= 4
    assert not told


MODEL = """
def band(step, first, end, axis):
    whole = (np.arange(24 * 36, dtype=np.float32) * 3 + step).reshape(24, 36)
    part = whole[first:end] if axis == 0 else whole[:, first:end]
    return sw.sharding.LocalShard(part.copy(), (24, 36), (first, 0) if axis == 0 else (0, first))

def state(step):
    rows = [24 * rank // WORLD for rank in range(WORLD + 1)]
    columns = [36 * rank // WORLD for rank in range(WORLD + 1)]
    return {
        "rows": band(step, rows[RANK], rows[RANK + 1], 0),
        "columns": band(step, columns[RANK], columns[RANK + 1], 1),
        "same": np.full(1 << 19, step, np.float32),
        "mine": sw.PerRank(RANK * 100 + step),
        "step": step,
    }
"""

SAVING = (
    MODEL
    + """
with open_manager(prove_resume=3) as manager:
    manager.save(5, state(5)).result()
    for step in (6, 7, 8):
        now = state(step)
        if RANK == 1 and step >= int(sys.argv[5]):
            now["same"].view(np.uint8)[1000] ^= 4
        manager.trace(step, now)
"""
)

RESUMING = (
    MODEL
    + """
import warnings
events = []
with open_manager(prove_resume=3, on_event=events.append) as manager:
    like = {name: one for name, one in state(0).items() if name != "mine"}
    manager.restore(5, like=like, unexpected="ignore")
    for step in (6, 7):
        now = state(step)
        if step == 7 and RANK == WORLD - 1 and sys.argv[5] == "wrong":
            now["columns"].local[3, 0] += 1
        manager.trace(step, now)
for event in events:
    if isinstance(event, sw.events.TraceEvent):
        print(event.step, event.outcome, event.leaf)
"""
)


@pytest.fixture(scope="module")
def of_three_ranks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The root of a run of three ranks."""
    folder = tmp_path_factory.mktemp("three")
    run(folder, SAVING, 3, folder / "run", 100)
    return folder / "run"


def test_a_flipped_bit_in_one_replica_is_found(tmp_path: Path, root: Path) -> None:
    run(tmp_path, SAVING, 3, root, 7)
    found = command_line.document("trace", root, code=1)
    (drift,) = found["drifts"]
    assert (drift["last_same"], drift["step"]) == (6, 7)
    assert drift["leaves"] == [{"path": "same", "ranks": [0, 2], "other_ranks": [1]}]
    assert found["traces"][0]["ranks"] == [0, 1, 2]
    text = command_line.run("trace", root).output
    assert "ranks part at step 7 (the same until step 6)" in text
    assert "same: rank 1 not as ranks 0, 2" in text


@pytest.mark.parametrize(("world", "fault"), [(1, "wrong"), (2, "right"), (4, "wrong"), (3, "right")])
def test_other_ranks_compare_with_the_same_traces(
    tmp_path: Path, root: Path, of_three_ranks: Path, world: int, fault: str
) -> None:
    shutil.copytree(of_three_ranks, root)
    told = run(tmp_path, RESUMING, world, root, fault)
    found = command_line.document("trace", root, code=None)
    if fault == "right":
        assert found["same"] is True
    else:
        (parting,) = found["partings"]
        assert (parting["last_same"], parting["step"]) == (6, 7)
        assert [one["path"] for one in parting["leaves"]] == ["columns"]
    if world in (1, 3):
        # This layout is known, or made of known regions: the run itself reports.
        same = ["7 same None"] if fault == "right" else ["7 differs columns"]
        assert told[-1].splitlines() == ["6 same None", *same]
    else:
        assert "6 unknown None" in told[-1]


def trace(
    leaves: dict[str, Any], rank: int = 0, world_size: int = 1, drifts: bool = False, **facts: Any
) -> Trace:
    """A trace of numbers, or of regions of one dimension with their digests."""

    def leaf(value: Any) -> TracedLeaf:
        parts = value if isinstance(value, dict) else {(0, 1): value}
        return TracedLeaf("float32[8]", drifts, {((at,), (n,)): digest for (at, n), digest in parts.items()})

    made = {path: leaf(value) for path, value in leaves.items()}
    return Trace(5, "save", 7, rank, world_size, "run", 1, facts.get("versions", {}), made)


def test_regions_that_tile_others_are_compared() -> None:
    earlier = [trace({"w": {(0, 4): 5}}, 0, 2), trace({"w": {(4, 4): 1 << 63}}, 1, 2)]
    assert compare(earlier, trace({"w": {(0, 8): (1 << 63) + 5}})).same == ("w",)
    assert compare(earlier, trace({"w": {(0, 8): 5}})).differing[0].path == "w"
    assert compare(earlier, trace({"w": {(0, 2): 5}})).unknown == ("w",)
    assert compare(earlier, trace({"w": {(2, 4): 5}})).unknown == ("w",)
    overlapping = [trace({"w": {(0, 4): 5, (2, 4): 6}})]
    assert compare(overlapping, trace({"w": {(0, 8): 11}})).unknown == ("w",)


def test_leaves_that_may_differ_are_compared_by_rank_only() -> None:
    ranks = [trace({"w": 1}, 0, 2, drifts=True), trace({"w": 2}, 1, 2, drifts=True)]
    assert not replicas(ranks)
    assert compare(ranks, trace({"w": 2}, 1, 2, drifts=True)).same == ("w",)
    assert [one.other_ranks for one in replicas([trace({"w": 1}, 0, 2), trace({"w": 2}, 1, 2)])] == [(1,)]


ADAM = {
    "train/model/a": 1, "train/optimizer/state/a/exp_avg": 2, "train/optimizer/state/a/exp_avg_sq": 3,
    "train/optimizer/state/a/step": 4,
}  # fmt: skip
CASES = [
    # Saved leaves, leaves of the resumed run, the first cause.
    ({**ADAM, "rng": 5, "loader": 6}, {"rng": 9, "train/model/a": 9}, "a random generator was not restored"),
    ({**ADAM, "rng": 5, "loader": 6}, {"loader": 9, "train/model/a": 9}, "the data come in another order"),
    (ADAM | {"rng": 5}, dict.fromkeys(list(ADAM)[:3], 9), "no leaf of the state is a place in the data"),
    (ADAM | {"loader": 5}, dict.fromkeys(list(ADAM)[:3], 9), "no leaf of the state is a random generator"),
    ({**ADAM, "rng": 5, "loader": 6}, dict.fromkeys(list(ADAM)[:3], 9), "kernels are not deterministic"),
    ({**ADAM, "rng": 5, "loader": 6}, dict.fromkeys(ADAM, 9), "the optimizer counts other steps"),
    ({**ADAM, "rng": 5, "loader": 6}, dict.fromkeys(list(ADAM)[:2], 9), "a slot of the optimizer was lost"),
    ({**ADAM, "train/optimizer/groups[0]/lr": 5}, {"train/optimizer/groups[0]/lr": 9}, "hyperparameters are not those"),
    ({"w": 1, "lr": 2}, {"w": 9, "lr": 9}, "hyperparameters are not those"),
    ({**ADAM, "rng": 5, "loader": 6}, {"train/optimizer/state/a/exp_avg": None}, "slots of the optimizer are missing"),
]  # fmt: skip


@pytest.mark.parametrize(("saved", "changed", "first"), CASES)
def test_the_likeliest_cause_comes_first(saved: dict[str, int], changed: dict[str, Any], first: str) -> None:
    now = {path: value for path, value in {**saved, **changed}.items() if value is not None}
    earlier = [trace(saved)]
    found = causes(earlier, trace(now), compare(earlier, trace(now)))
    assert found[0].startswith(first), found


def test_other_versions_and_ranks_are_causes() -> None:
    earlier = [trace({"w": 1}, versions={"torch": "2.1"})]
    later = trace({"w": 2}, world_size=2, versions={"torch": "2.2"})
    text = " ".join(causes(earlier, later, compare(earlier, later)))
    assert "2 ranks in place of 1" in text
    assert "torch 2.2 in place of 2.1" in text
