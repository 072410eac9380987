"""Several processes save and restore together, over a shared directory: real processes, real files,
real signals."""

from __future__ import annotations

import signal
from pathlib import Path

import numpy as np
import pytest
import stepwell as sw
from ranks import run, start
from threads import together

#: A model of which each rank holds some rows of one tensor, some columns of another, and all of a
#: third.
MODEL = """
ROWS, COLUMNS = 24, 36

def whole(step, seed):
    return (np.arange(ROWS * COLUMNS, dtype=np.float32) * seed + step).reshape(ROWS, COLUMNS)

def cut(n, rank, world):
    return n * rank // world, n * (rank + 1) // world

def state(step, rank=RANK, world=WORLD, make=lambda array: array.copy()):
    first, end = cut(ROWS, rank, world)
    left, right = cut(COLUMNS, rank, world)
    return {
        "params": {
            "rows": sw.sharding.LocalShard(make(whole(step, 1)[first:end]), (ROWS, COLUMNS), (first, 0)),
            "columns": sw.sharding.LocalShard(make(whole(step, 2)[:, left:right]), (ROWS, COLUMNS), (0, left)),
            "norm": np.full(COLUMNS, step, np.float64),
        },
        "step": step,
    }

def check(restored, step):
    expected = state(step)
    for name in ("rows", "columns"):
        np.testing.assert_array_equal(restored["params"][name].local, expected["params"][name].local)
    np.testing.assert_array_equal(restored["params"]["norm"], expected["params"]["norm"])
    assert restored["step"] == step
"""


def whole(step: int, seed: int) -> np.ndarray:
    """The same here."""
    return (np.arange(24 * 36, dtype=np.float32) * seed + step).reshape(24, 36)


def check_whole(root: Path, step: int) -> None:
    """Checks one process's restore of the whole."""
    found = sw.restore(root, step=step) if step is not None else sw.restore(root)
    np.testing.assert_array_equal(found["params"]["rows"], whole(step, 1))
    np.testing.assert_array_equal(found["params"]["columns"], whole(step, 2))
    np.testing.assert_array_equal(found["params"]["norm"], np.full(36, step, np.float64))
    assert found["step"] == step
    assert not sw.verify(root / f"step_{step:08}").damages


def test_ranks_save_chosen_leaves_in_other_dtypes(tmp_path: Path, root: Path) -> None:
    script = (
        MODEL
        + """
half = {**state(3), "mine": sw.PerRank(RANK), "handle": object()}
with open_manager() as manager:
    manager.save(0, half, include=["params", "mine"], cast={"params/rows": "bfloat16"}).result()
    manager.save(1, half, exclude="handle").result()
    manager.save(2, half, exclude=["handle", "params/columns"]).result()
    back = manager.restore(0, like={"mine": sw.PerRank(0)})
    assert back["mine"].value == RANK, back
"""
    )
    run(tmp_path, script, 3, root)
    found = sw.restore(root, 0)
    assert found.keys() == {"params", "mine"}
    rows = found["params"]["rows"]
    assert rows.dtype.name == "bfloat16"
    np.testing.assert_array_equal(rows, whole(3, 1).astype(rows.dtype))
    np.testing.assert_array_equal(found["params"]["columns"], whole(3, 2))
    assert sw.restore(root, 1).keys() == {"params", "mine", "step"}
    assert sw.restore(root, 2)["params"].keys() == {"rows", "norm"}
    assert all(sw.verify(root, step).ok for step in range(3))


def test_ranks_restore_in_the_background(tmp_path: Path, root: Path) -> None:
    run(tmp_path, MODEL + "with open_manager() as manager: manager.save(5, state(5)).result()", 2, root)
    script = (
        MODEL
        + """
with open_manager() as manager:
    restoring = manager.restore_async(into=state(0))
    assert manager.next_step() == 6, "the next call waits"
    check(restoring.result(60), 5)
    manager.save(6, state(6)).result()
    failing = manager.restore_async(like={"nothing": 1} if RANK == 1 else state(0))
    error = failing.exception(60)
    assert isinstance(error, sw.MismatchError if RANK == 1 else sw.RankFailed), repr(error)
    check(manager.restore_async(6, into=state(0)).result(60), 6)
"""
    )
    run(tmp_path, script, 3, root)


def test_what_four_ranks_save_three_one_and_eight_restore(tmp_path: Path, root: Path) -> None:
    save = (
        MODEL
        + """
with open_manager(retention=sw.keep_latest(2)) as manager:
    assert manager.latest_step() is None
    for step in range(4):
        manager.save(step, state(step), metrics={"loss": 1.0 / (step + 1)})
    manager.wait_until_finished()
    assert manager.latest_step() == 3 and manager.next_step() == 4
    check(manager.restore(into=state(0)), 3)
"""
    )
    run(tmp_path, save, 4, root)
    assert sorted(one.name for one in root.glob("step_*")) == ["step_00000002", "step_00000003"]
    check_whole(root, 3)
    restore = (
        MODEL
        + """
with open_manager() as manager:
    zeros = lambda array: np.zeros_like(array)
    check(manager.restore(into=state(0, make=zeros)), 3)
    check(manager.restore(2, like=state(0, make=lambda array: sw.ArraySpec(array.shape, array.dtype))), 2)
    # Under a new number, and what it was.
    manager.save(manager.latest_step() + 1, state(3))
"""
    )
    for world in (3, 8):
        run(tmp_path, restore, world, root, job=f"job-{world}")
    assert sorted(one.name for one in root.glob("step_*"))[-1] == "step_00000005"


def test_ranks_read_their_parts_and_nothing_ahead_of_them(tmp_path: Path, root: Path) -> None:
    script = """
def data_read():
    return int(next(line for line in open("/proc/self/io") if line.startswith("rchar")).split()[1])

def state(array, rank):
    norm, w = np.ones(1024), sw.sharding.LocalShard(array, (3 * 4096, 1024), (rank * 4096, 0))
    # Of the first leaf alone ranks could not see that others are parts.
    return {"model": {"norm": norm, "w": w} if WORLD > 1 else {"w": w, "norm": norm}}

def check(manager, rank):
    mine = np.full((4096, 1024), rank + 1.0, np.float32)
    for how in ("into", "like"):
        array = np.zeros_like(mine) if how == "into" else sw.ArraySpec(mine.shape, mine.dtype)
        before = data_read()
        found = manager.restore(**{how: state(array, rank)})
        read = data_read() - before
        assert (found["model"]["w"].local == mine).all()
        assert mine.nbytes <= read <= 1.05 * mine.nbytes, (how, read)

with open_manager(settings={"engine": "threads"}) as manager:
    if WORLD == 3:
        manager.save(1, state(np.full((4096, 1024), RANK + 1.0, np.float32), RANK)).result()
        check(manager, RANK)
    else:
        check(manager, 2)
"""
    run(tmp_path, script, 3, root)
    # Nor does one that reads its part by itself.
    run(tmp_path, script, 1, root, job="alone")


def test_one_process_goes_on_where_several_were(tmp_path: Path, root: Path) -> None:
    run(tmp_path, MODEL + "with open_manager() as manager: manager.save(1, state(1))", 2, root)
    with sw.CheckpointManager(root) as manager:
        state = manager.restore()
        manager.save(2, state).result()
    found = sw.restore(root)
    np.testing.assert_array_equal(found["params"]["rows"], whole(1, 1))


def test_a_rank_killed_in_a_save_is_named_by_the_others(tmp_path: Path, root: Path) -> None:
    script = (
        MODEL
        + """
manager = open_manager(settings={"stall_timeout": 3.0})
manager.save(1, state(1)).result()
if RANK == 2:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    manager.save(2, state(2)).result()
    print("saved")
except sw.errors.CoordinationTimeout as error:
    print("missing", error.missing)
manager.save(3, state(3))
try:
    manager.wait_until_finished()
except sw.StepwellError as error:
    print("later", type(error).__name__, getattr(error, "missing", None))
try:
    manager.close()
except sw.StepwellError as error:
    print("closed", type(error).__name__, getattr(error, "missing", None))
os._exit(0)
"""
    )
    found = start(tmp_path, script, 4, root).finish()
    assert found[2][0] == -signal.SIGKILL
    for rank in (0, 1, 3):
        code, out, err = found[rank]
        told = ["missing [2]", "later CoordinationTimeout [2]"]
        if rank == 0:
            told.append("closed CoordinationTimeout [2]")
        assert (code, out.splitlines()) == (0, told), f"{rank}: {out} {err}"
    check_whole(root, 1)
    run(
        tmp_path,
        MODEL
        + "with open_manager() as manager: check(manager.restore(into=state(0)), 1); manager.save(2, state(2))",
        3,
        root,
    )
    check_whole(root, 2)
    assert not [one for one in root.iterdir() if one.name.startswith(".tmp")], "nothing is left"


def test_a_rank_stopped_past_the_deadline_hears_the_verdict(tmp_path: Path, root: Path) -> None:
    script = (
        MODEL
        + """
import pathlib
has_heard = pathlib.Path(sys.argv[5])
manager = open_manager(settings={"stall_timeout": 5.0})
manager.save(1, state(1)).result()
if RANK == 1:
    print("stops", flush=True)
    os.kill(os.getpid(), signal.SIGSTOP)
try:
    manager.save(2, state(2)).result()
    print("saved")
except sw.errors.CoordinationTimeout as error:
    print("missing", error.missing, flush=True)
if RANK == 1:
    has_heard.touch()
deadline = time.monotonic() + 60
while not has_heard.exists():
    assert time.monotonic() < deadline
    time.sleep(0.01)
manager.save(3, state(3)).result()
manager.close()
"""
    )
    ranks = start(tmp_path, script, 2, root, tmp_path / "heard")
    leader, stopped = ranks.processes
    assert leader.stdout is not None
    assert stopped.stdout is not None
    assert stopped.stdout.readline() == "stops\n"
    assert leader.stdout.readline() == "missing [1]\n"
    stopped.send_signal(signal.SIGCONT)
    assert ranks.succeed() == ["", "missing [1]\n"]
    assert sorted(one.name for one in root.glob("step_*")) == ["step_00000001", "step_00000003"]
    check_whole(root, 3)


def test_a_killed_leader_leaves_no_step_and_no_waiter(tmp_path: Path, root: Path) -> None:
    script = (
        MODEL
        + """
manager = open_manager(settings={"stall_timeout": 2.0})
manager.save(1, state(1)).result()
if RANK == 0:
    os.kill(os.getpid(), signal.SIGKILL)
try:
    manager.save(2, state(2)).result()
    print("saved")
except sw.StepwellError as error:
    print(type(error).__name__, getattr(error, "missing", None))
os._exit(0)
"""
    )
    found = start(tmp_path, script, 3, root).finish()
    assert {out for _, out, _ in found[1:]} == {"CoordinationTimeout [0]\n"}
    with sw.CheckpointManager(root) as manager:
        assert manager.all_steps() == [1]
    check_whole(root, 1)


def test_a_call_without_an_answer_ends_the_session(tmp_path: Path, root: Path) -> None:
    script = (
        MODEL
        + """
import pathlib
manager = open_manager(settings={"stall_timeout": 2.0})
manager.save(1, state(1)).result()
heard = pathlib.Path(sys.argv[5])
if RANK == 0:
    while not heard.exists():
        time.sleep(0.01)
    os._exit(0)
for call in (manager.latest_step, manager.latest_step, lambda: manager.save(2, state(2))):
    try:
        call()
    except sw.errors.CoordinationTimeout as error:
        print(type(error).__name__, error.missing, "open the root again on all ranks" in str(error))
print(manager.all_steps())
heard.touch()
os._exit(0)
"""
    )
    _, told = run(tmp_path, script, 2, root, tmp_path / "heard")
    assert told.splitlines() == [
        "CoordinationTimeout [0] False",
        "SessionLost [0] True",
        "SessionLost [0] True",
        "[1]",
    ]


def test_an_unstorable_state_of_a_rank_fails_the_save_of_all(tmp_path: Path, root: Path) -> None:
    script = (
        MODEL
        + """
with open_manager() as manager:
    manager.save(1, state(1)).result()
    wrong = state(2)
    if RANK == 1:
        wrong["step"] = object()
    try:
        manager.save(2, wrong).result()
    except sw.UnsupportedLeaf as error:
        print("mine", error.leaf)
    except sw.RankFailed as error:
        print("theirs", error.rank, "step" in str(error))
    manager.save(3, state(3)).result()
"""
    )
    out = run(tmp_path, script, 3, root)
    assert out == ["theirs 1 True\n", "mine step\n", "theirs 1 True\n"]
    check_whole(root, 3)


def test_a_save_after_an_interrupted_one_does_not_overtake_it(tmp_path: Path, root: Path) -> None:
    script = (
        MODEL
        + """
import pathlib, threading
# What is left to do of the interrupted save takes long: the plan of so many leaves.
many = {str(number): number for number in range(300_000)}
with open_manager() as manager:
    interrupted = pathlib.Path(sys.argv[5])
    if RANK == 1:
        threading.Timer(4.0, os.kill, (os.getpid(), signal.SIGINT)).start()
    while RANK == 0 and not interrupted.exists():
        time.sleep(0.001)
    try:
        manager.save(1, {"many": many}).result()
    except KeyboardInterrupt:
        interrupted.touch()
        print("interrupted")
    except sw.RankFailed as error:
        print("failed", "KeyboardInterrupt" in str(error))
    manager.save(2, {"one": 1}).result()
"""
    )
    out = run(tmp_path, script, 2, root, tmp_path / "interrupted")
    assert out == ["failed True\n", "interrupted\n"]
    assert sw.restore(root) == {"one": 1}


def test_a_rank_interrupted_in_a_save_ends_it_for_all(tmp_path: Path, root: Path) -> None:
    script = (
        MODEL
        + """
import pathlib, threading
def told(step):
    try:
        manager.save(step, state(step)).result()
    except KeyboardInterrupt:
        print("interrupted")
    except sw.RankFailed as error:
        print("failed", error.rank, "KeyboardInterrupt" in str(error))

def interrupt(*_):
    raise KeyboardInterrupt

with open_manager() as manager:
    interrupted = pathlib.Path(sys.argv[5])
    if RANK == 1:
        # In the first save it waits for the others.
        threading.Timer(1.5, os.kill, (os.getpid(), signal.SIGINT)).start()
        told(1)
        interrupted.touch()
    else:
        while not interrupted.exists():
            time.sleep(0.01)
        told(1)
    manager.save(2, state(2)).result()
    as_saved = sw._adapters.as_saved
    if RANK == 1:
        sw._adapters.as_saved = interrupt
    told(3)
    sw._adapters.as_saved = as_saved
    manager.save(4, state(4)).result()
"""
    )
    out = run(tmp_path, script, 2, root, tmp_path / "interrupted")
    assert out == ["failed 1 True\n" * 2, "interrupted\n" * 2]
    assert sorted(one.name for one in root.glob("step_*")) == ["step_00000002", "step_00000004"]
    check_whole(root, 4)


def test_shards_with_a_hole_are_refused_with_the_region(tmp_path: Path, root: Path) -> None:
    script = """
with open_manager() as manager:
    shard = sw.sharding.LocalShard(np.zeros((4, 6)), (12, 6), (4 * RANK, 0))
    try:
        manager.save(1, {"params": {"w": shard}}).result()
    except sw.MismatchError as error:
        print(error)
    assert manager.latest_step() is None
"""
    for out in run(tmp_path, script, 2, root):
        assert "`params/w`" in out
        assert "no rank holds [8:12, 0:6]" in out
        assert "ranks [0, 1]" in out


@pytest.mark.parametrize("failing", [0, 1])
def test_a_restore_that_fails_on_one_rank_fails_on_all(tmp_path: Path, root: Path, failing: int) -> None:
    script = (
        MODEL
        + """
with open_manager() as manager:
    manager.save(1, state(1)).result()
    wanted = state(0)
    if RANK == int(sys.argv[5]):
        wanted["params"]["other"] = np.zeros(3)
    try:
        manager.restore(into=wanted)
        print("restored")
    except sw.MismatchError as error:
        print("mine")
    except sw.RankFailed as error:
        print("theirs", error.rank, "other" in str(error))
    check(manager.restore(into=state(0)), 1)
"""
    )
    expected = [f"theirs {failing} True\n"] * 3
    expected[failing] = "mine\n"
    assert run(tmp_path, script, 3, root, failing) == expected


def test_a_wrong_call_of_one_rank_fails_on_all(tmp_path: Path, root: Path) -> None:
    script = (
        MODEL
        + """
def fails(call):
    try:
        call()
    except sw.StepwellError as error:
        return type(error).__name__

with open_manager(on_save_error="warn", save_policy=sw.every_seconds(0) | sw.on_preemption(signals=())) as manager:
    manager.save(0, state(0)).result()
    told = []
    # Refused before it is asked whether the step is saved.
    told.append(fails(lambda: manager.save(1, state(1), metrics={"loss": "high" if RANK == 1 else 0.5}).result()))
    told.append(fails(lambda: manager.save(2, state(2), custom_metadata={"x": object() if RANK == 0 else 1}).result()))
    told.append(fails(lambda: manager.save(2, state(2), exists="replaced" if RANK == 1 else "error").result()))
    told.append(fails(lambda: manager.save(2, state(2), snapshot="later" if RANK == 0 else "lazy").result()))
    # And before it is known which step is restored.
    told.append(fails(lambda: manager.restore(0, into=state(0), broadcast="no such way" if RANK == 1 else False)))
    told.append(fails(lambda: manager.restore(0, into=state(0), resize="no function" if RANK == 0 else None)))
    print(told)
    assert manager.latest_step() == 0
    check(manager.restore(into=state(5)), 0)
    for step in range(3, 6):
        manager.save(step, state(step)).result()
    check(manager.restore(into=state(0)), 5)
"""
    )
    out = run(tmp_path, script, 2, root)
    check_whole(root, 5)
    own = [eval(line) for line in out]  # what the test itself printed
    for call, rank in enumerate([1, 0, 1, 0, 1, 0]):
        assert own[rank][call] not in (None, "RankFailed"), own
        assert own[1 - rank][call] == "RankFailed", own


@pytest.mark.parametrize("wrong", ["manager.save(-1, state(1))", "manager.save(1, state(1), metric={})"])
@pytest.mark.parametrize("failing", [0, 2])
def test_a_call_that_is_no_save_ends_the_session(
    tmp_path: Path, root: Path, wrong: str, failing: int
) -> None:
    script = (
        MODEL
        + f"""
manager = open_manager()
manager.save(0, state(0)).result()
for step in range(1, 8):
    try:
        if RANK == {failing} and step == 1:
            {wrong}
        manager.save(step, state(step)).result()
    except Exception as error:
        print(type(error).__name__, error)
print(manager.all_steps())
manager.close()
"""
    )
    for rank, told in enumerate(run(tmp_path, script, 3, root)):
        first, *rest, steps = told.splitlines()
        assert steps == "[0]"
        if rank == failing:
            assert first.startswith(("MisuseError", "TypeError")), told
        else:
            assert first.startswith(f"RankFailed rank {failing} failed"), told
            assert "Error: " in first
        assert rest[-1].startswith("SessionLost"), told
        assert "has no keyword 'metric'; did you mean 'metrics'?" in told or "a step is an integer" in told


@pytest.mark.parametrize("call", ["should_save", "rewind", "delete"])
@pytest.mark.parametrize("wrong", ["-1", "True", "1.5", "'1'"])
def test_a_wrong_step_of_the_first_rank_ends_the_session(
    tmp_path: Path, root: Path, call: str, wrong: str
) -> None:
    script = (
        MODEL
        + f"""
manager = open_manager(save_policy=sw.every_seconds(0))
manager.save(np.int64(0), state(0)).result()
try:
    manager.{call}({wrong} if RANK == 0 else np.int64(0))
except sw.StepwellError as error:
    print(type(error).__name__, error)
manager.close()
"""
    )
    leader, other = run(tmp_path, script, 2, root)
    assert leader.startswith("MisuseError a step is an integer"), leader
    assert other.startswith("SessionLost the session of the ranks is over: rank 0 has left it"), other
    check_whole(root, 0)


def test_a_rank_that_closes_fails_the_calls_of_the_first(tmp_path: Path, root: Path) -> None:
    script = """
manager = open_manager()
if RANK == 0:
    try:
        manager.save(0, {"x": np.ones(3)})
    except sw.errors.SessionLost as error:
        print(error.missing, "closed its manager" in str(error))
manager.close()
"""
    first, *others = run(tmp_path, script, 3, root)
    assert first == "[1] True\n"
    assert others == ["", ""]


def test_all_ranks_that_miss_the_first_save_are_named(tmp_path: Path, root: Path) -> None:
    script = """
import pathlib
manager = open_manager(settings={"stall_timeout": 5.0})
over = pathlib.Path(sys.argv[5])
if RANK == 0:
    try:
        manager.save(0, {"x": np.ones(3)})
    except sw.errors.CoordinationTimeout as error:
        print(error.missing)
    over.touch()
while not over.exists():
    time.sleep(0.01)
os._exit(0)
"""
    assert run(tmp_path, script, 4, root, tmp_path / "over")[0] == "[1, 2, 3]\n"


def test_ranks_of_a_killed_job_do_not_confuse_the_next(tmp_path: Path, root: Path) -> None:
    killed = (
        MODEL
        + """
manager = open_manager()
manager.save(1, state(1)).result()
os.kill(os.getpid(), signal.SIGKILL)
"""
    )
    start(tmp_path, killed, 3, root).finish()
    run(
        tmp_path,
        MODEL
        + "with open_manager() as manager: check(manager.restore(into=state(0)), 1); manager.save(2, state(2))",
        3,
        root,
    )
    check_whole(root, 2)
    assert not list((root / ".stepwell").glob("ranks-*"))


def test_a_failed_open_of_rank_0_is_reported_by_all(tmp_path: Path, root: Path) -> None:
    script = """
try:
    open_manager()
except sw.LockedError:
    print("locked", flush=True)
if RANK == 0:
    os._exit(0)
"""
    with sw.CheckpointManager(root, coordinator=None):
        assert run(tmp_path, script, 2, root) == ["locked\n"] * 2
    run(tmp_path, "with open_manager() as manager: assert manager.latest_step() is None", 2, root)
    assert not list((root / ".stepwell").glob("ranks-*"))


def test_a_process_that_does_not_come_is_named(tmp_path: Path, root: Path) -> None:
    script = """
if RANK == 2:
    sys.exit(0)
try:
    open_manager(settings={"stall_timeout": 1.0})
except sw.errors.CoordinationTimeout as error:
    print(error.missing)
"""
    out = run(tmp_path, script, 3, root)
    assert out[0] == "[2]\n"


def test_policy_callables_are_asked_on_the_first_rank(
    root: Path,
) -> None:
    asked: list[tuple[int, int, int | None]] = []

    def policy(rank: int) -> sw.SavePolicy:
        # Each rank makes its own, of which the first one's say something else. Two have one name.
        def odd(step: int, latest: int | None) -> bool:
            asked.append((rank, step, latest))
            return step % 2 == 1

        low, high = (2, 4) if rank == 0 else (8, 0)
        small, large = sw.when(lambda step, _: step < low), sw.when(lambda step, _: step > high)
        return (sw.when(odd) & small) | (sw.when(odd) & large)

    def work(_: int, manager: sw.CheckpointManager) -> tuple[list[bool], list[bool]]:
        told, saved = [], []
        for step in range(8):
            told.append(manager.should_save(step))
            saved.append(bool(manager.save(step, {"w": np.arange(3)})))
            manager.wait_until_finished()
        return told, saved

    saved = [step in (1, 5, 7) for step in range(8)]
    assert together(2, root, work, save_policy=policy) == [(saved, saved)] * 2
    assert [step for step in range(8) if (root / f"step_{step:08}").exists()] == [1, 5, 7]
    latest = [None, None, 1, 1, 1, 1, 5, 5]
    assert asked == [(0, step, latest[step]) for step in range(8) for _ in range(2)]


def test_a_raising_policy_does_not_separate_the_ranks(root: Path) -> None:
    def policy(rank: int) -> sw.SavePolicy:
        def odd(step: int, latest: int | None) -> bool:
            if step == 3:
                raise ZeroDivisionError("in the policy")
            return step % 2 == 1

        return sw.when(odd) | sw.at_steps({3})

    def work(rank: int, manager: sw.CheckpointManager) -> list[str]:
        told = []
        for step in range(6):
            for call in (manager.should_save, lambda step: manager.save(step, {"w": np.arange(3)})):
                try:
                    said = bool(call(step))
                    manager.wait_until_finished()
                    told.append(str(said))
                except (ZeroDivisionError, sw.StepwellError) as error:
                    told.append(type(error).__name__)
        assert manager.latest_step() == 5
        return told

    first, other = together(2, root, work, save_policy=policy)
    assert first[6:8] == ["ZeroDivisionError"] * 2
    assert other[6:8] == ["True", "RankFailed"]
    assert first[:6] == other[:6] == ["False", "False", "True", "True", "False", "False"]
    assert first[8:] == other[8:] == ["False", "False", "True", "True"]


def test_writers_are_limited_per_socket(tmp_path: Path, root: Path) -> None:
    run(
        tmp_path,
        """
        alike = {"w": np.arange(1 << 20, dtype=np.float32)}
        with open_manager(settings={"writers": 1, "writers_per": "socket"}) as manager:
            manager.save(1, alike).result()
        """,
        3,
        root,
    )
    files = sorted(path.name for path in root.glob("step_00000001/i-*/*.data"))
    np.testing.assert_array_equal(sw.restore(root, step=1)["w"], np.arange(1 << 20, dtype=np.float32))
    assert files == ["00000.data"]
    with pytest.raises(sw.MisuseError, match="writers_per"):
        sw.Options(writers_per="rack")  # type: ignore[arg-type]


def test_a_local_shard_says_what_is_wrong_with_it() -> None:
    with pytest.raises(sw.MisuseError, match="passes the end"):
        sw.sharding.LocalShard(np.zeros((4, 4)), (6, 4), (3, 0))
    with pytest.raises(sw.MisuseError, match="as many dimensions"):
        sw.sharding.LocalShard(np.zeros((4, 4)), (6,), (3,))
    with pytest.raises(sw.MisuseError, match="replica"):
        sw.sharding.LocalShard(np.zeros(4), (6,), (0,), replica=(2, 2))
    assert (
        repr(sw.sharding.LocalShard(np.zeros((2, 4)), (6, 4), (3, 0))) == "LocalShard([3:5, 0:4] of (6, 4))"
    )


def test_one_process_may_save_what_it_holds_in_one_shard(root: Path) -> None:
    shard = sw.sharding.LocalShard(np.arange(6.0).reshape(2, 3), (2, 3), (0, 0))
    with sw.CheckpointManager(root) as manager:
        manager.save(0, {"w": shard}).result()
        np.testing.assert_array_equal(manager.restore()["w"], shard.local)
        with pytest.raises(sw.UnsupportedLeaf, match=r"no chunk holds \[2:4, 0:3\]"):
            manager.save(1, {"w": sw.sharding.LocalShard(shard.local, (4, 3), (0, 0))})
