"""``stepwell.integrations.dcp``: the calls of torch's distributed checkpoint, in real processes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import stepwell as sw
import torch
import torch.distributed.checkpoint as torch_dcp
from stepwell.integrations import dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner

sys.path += [str(Path(__file__).parent), str(Path(__file__).resolve().parents[1] / "python")]

from longer import some
from moments import killed_in_a_save, there_from_the_first
from ranks import free_port, run_forked

MODULES = (
    "torch,torch.distributed.tensor,torch.distributed.fsdp,torch.distributed.checkpoint.state_dict,"
    "stepwell.integrations.dcp"
)

PREAMBLE = """
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
import stepwell.integrations.dcp as dcp
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[5]}", rank=RANK, world_size=WORLD)

def build(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(6, 10), torch.nn.GELU(), torch.nn.Linear(10, 5))
    for layer in (model[0], model[2], model):
        fully_shard(layer)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)

def train(model, optimizer, first, steps):
    losses = []
    for step in range(first, steps):
        x = torch.randn(WORLD, 4, 6, generator=torch.Generator().manual_seed(step))[RANK]
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses

def state_of(model, optimizer, step):
    weights, slots = get_state_dict(model, optimizer)
    return {
        "model": weights, "optim": slots, "step": step, "lists": [step, "a", torch.tensor(2.0)],
        "ints": {0: torch.full((2,), step), 1: (torch.ones(1), step)}, "none": None,
    }

def take(model, optimizer, state):
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return state["step"]
"""

SAVE = (
    PREAMBLE
    + """
model, optimizer = build(0)
train(model, optimizer, 0, 3)
state = state_of(model, optimizer, 3)
described = dcp.save(state, checkpoint_id=ROOT)
assert described.state_dict_metadata["model.0.weight"].size == torch.Size([10, 6])
pending = dcp.async_save(state_of(model, optimizer, 4), checkpoint_id=ROOT + "-later")
expected = train(model, optimizer, 3, 6)
pending.result()
print(expected)
"""
)

LOAD = (
    PREAMBLE
    + """
for path, step in ((ROOT, 3), (ROOT + "-later", 4)):
    model, optimizer = build(1)
    state = state_of(model, optimizer, 0)
    mine = state["model"]["0.weight"]
    dcp.load(state, checkpoint_id=path)
    assert state["model"]["0.weight"] is mine
    assert state["lists"] == [step, "a", torch.tensor(2.0)] and state["none"] is None
    assert torch.equal(state["ints"][0], torch.full((2,), step)) and state["ints"][1] == (torch.ones(1), step)
    assert take(model, optimizer, state) == step
    print(train(model, optimizer, 3, 6))
"""
)


def test_a_saved_state_loads_into_fresh_objects(tmp_path: Path) -> None:
    root = tmp_path / "checkpoint"
    expected = run_forked(tmp_path, MODULES, SAVE, 2, root, free_port())
    found = run_forked(tmp_path, MODULES, LOAD, 2, root, free_port())
    assert found == [2 * one for one in expected]
    stored = sw.restore(root, to="torch")
    assert stored["ints"][1][1] == 3
    assert stored["model"]["0.weight"].shape == (10, 6)


@pytest.mark.parametrize("world", some([3, 1]))
def test_another_number_of_ranks_loads(tmp_path: Path, world: int) -> None:
    root = tmp_path / "checkpoint"
    run_forked(tmp_path, MODULES, SAVE, 2, root, free_port())
    run_forked(tmp_path, MODULES, LOAD, world, root, free_port())


UNSEEN = (
    PREAMBLE
    + """
from concurrent.futures import wait
from types import SimpleNamespace
import stepwell as sw

def fail(path, text):
    raise OSError(28, "No space left on device", path)

state = {"w": torch.arange(4.0)}
dcp.save(state, checkpoint_id=f"{ROOT}/zeroth")
if RANK == 0:  # after the commit, so the other rank does not hear of it
    dcp._core = SimpleNamespace(write_record=fail)
wait([dcp.async_save(state, checkpoint_id=f"{ROOT}/first")], timeout=60)
try:
    if sys.argv[6] == "save":
        dcp.save(state, checkpoint_id=f"{ROOT}/second")
    else:
        dcp.load(state, checkpoint_id=f"{ROOT}/zeroth")
except (OSError, sw.StepwellError) as error:
    print(type(error).__name__)
"""
)


@pytest.mark.parametrize("call", ["save", "load"])
def test_an_unseen_failure_of_a_rank_fails_the_next_call(tmp_path: Path, call: str) -> None:
    found = run_forked(tmp_path, MODULES, UNSEEN, 2, tmp_path, free_port(), call)
    assert [one.split()[-1] for one in found] == ["OSError", "RankFailed"]


TRAINER = (
    PREAMBLE
    + """
# A trainer of others: it knows torch.distributed.checkpoint only.
group = dist.new_group()  # DCP saves from a thread

def run(root):
    found = [step for step in range(12) if os.path.exists(f"{root}/step-{step}/.metadata")]
    model, optimizer = build(5)
    first = 0
    if found:
        state = state_of(model, optimizer, 0)
        torch_dcp.load(state, storage_reader=torch_dcp.FileSystemReader(f"{root}/step-{found[-1]}"))
        first = take(model, optimizer, state) + 1
    losses = {}
    pending = None
    for step in range(first, 12):
        losses[step] = train(model, optimizer, step, step + 1)[0]
        if step % 4 == 3:
            if pending is not None:
                pending.result()
            os.makedirs(f"{root}/step-{step}", exist_ok=True)
            pending = torch_dcp.async_save(
                state_of(model, optimizer, step),
                storage_writer=torch_dcp.FileSystemWriter(f"{root}/step-{step}"),
                planner=torch_dcp.DefaultSavePlanner(),
                process_group=group,
            )
            if sys.argv[6] == "killed" and step == 7:
                os.kill(os.getpid(), signal.SIGKILL)
    pending.result()
    return losses

plain = run(ROOT + "-plain") if sys.argv[6] == "whole" else {}
dcp.use()
print([run(ROOT), plain])
"""
)


def test_a_killed_run_of_a_trainer_resumes(tmp_path: Path) -> None:
    def train(root: Path, how: str) -> list[list[dict[int, float]]]:
        return [eval(one) for one in run_forked(tmp_path, MODULES, TRAINER, 2, root, free_port(), how)]

    def kill(root: Path) -> None:
        with pytest.raises(AssertionError, match="-9"):
            train(root, "killed")

    whole = train(tmp_path / "whole", "whole")
    assert sorted(tmp_path.glob("whole-plain/*/.metadata"))  # by DCP itself
    root = killed_in_a_save(tmp_path, kill, lambda at: list(at.glob("step-7/step_*")))
    for (before, plain), (after, _) in zip(whole, train(root, ""), strict=True):
        assert before == plain
        assert after == {step: before[step] for step in range(4, 12)}


def test_a_committed_checkpoint_exists_at_every_moment(tmp_path: Path) -> None:
    root = tmp_path / "one"
    with there_from_the_first(lambda: list(root.glob("step_*"))):
        for value in range(10):
            dcp.async_save({"w": torch.full((3,), value)}, checkpoint_id=root).result()
    assert sw.restore(root)["w"].tolist() == [9] * 3


def test_a_checkpoint_of_dcp_still_loads(tmp_path: Path) -> None:
    saved = {"w": torch.arange(6.0), "n": 3}
    torch_dcp.save(saved, checkpoint_id=tmp_path / "old")
    with dcp.using():
        state: dict[str, Any] = {"w": torch.zeros(6), "n": 0}
        torch_dcp.load(state, checkpoint_id=tmp_path / "old")
        assert torch.equal(state["w"], saved["w"])
        assert state["n"] == 3
        torch_dcp.save(saved, checkpoint_id=tmp_path / "new")
        assert "w" in sw.open(tmp_path / "new")
    assert torch_dcp.save is not dcp.save


def test_a_second_save_replaces_the_first(tmp_path: Path) -> None:
    for value in (1.0, 2.0):
        dcp.save({"w": torch.full((3,), value)}, checkpoint_id=tmp_path / "one")
        (tmp_path / "one" / "of the trainer").touch()
        assert sw.restore(tmp_path / "one", to="torch")["w"].tolist() == [value] * 3
    assert len(sw.open_root(tmp_path / "one").steps) == 1


class Renaming(DefaultSavePlanner):
    """Adds a prefix, as planners of trainers do."""

    def set_up_planner(self, state_dict: Any, *args: Any, **kwargs: Any) -> None:
        super().set_up_planner({f"module.{key}": value for key, value in state_dict.items()}, *args, **kwargs)


def test_planners_of_others_save_and_load(tmp_path: Path) -> None:
    state = {"a": {"w": torch.arange(4.0), "n": torch.tensor(7)}, "list": [1, torch.ones(2)], "text": "x"}
    torch_dcp.save(state, storage_writer=dcp.StepwellWriter(tmp_path / "one"), planner=Renaming())
    assert sorted(sw.restore(tmp_path / "one")) == [
        "module.a.n",
        "module.a.w",
        "module.list.0",
        "module.list.1",
        "module.text",
    ]
    found: dict[str, Any] = {"module.a": {"w": torch.zeros(4)}, "module.list": [0, torch.zeros(2)]}
    dcp.load(found, checkpoint_id=tmp_path / "one")
    assert found["module.a"]["w"].tolist() == [0.0, 1.0, 2.0, 3.0]
    assert found["module.list"][0] == 1


def test_a_writer_saves_in_the_background_of_torch(tmp_path: Path) -> None:
    pending = torch_dcp.async_save({"w": torch.ones(3)}, storage_writer=dcp.StepwellWriter(tmp_path / "one"))
    pending.result()
    assert sw.restore(tmp_path / "one")["w"].tolist() == [1.0] * 3


def test_two_values_with_one_name_are_refused(tmp_path: Path) -> None:
    state = {"a.b": torch.ones(2), "a": {"b": torch.zeros(2)}}
    dcp.save(state, checkpoint_id=tmp_path / "one")
    with pytest.raises(sw.MisuseError, match="one name with dots"):
        dcp.StepwellReader(tmp_path / "one").read_metadata()


def test_tools_of_torch_read_through_the_reader(tmp_path: Path) -> None:
    state = {
        "a": {
            "w": torch.arange(4.0).bfloat16(),
            "step": torch.tensor(3.0),
            "half": torch.tensor(2.5).bfloat16(),
        },
        "list": [1, torch.ones(2)],
        "text": "x",
    }
    dcp.save(state, checkpoint_id=tmp_path / "one")
    from torch.distributed.checkpoint.default_planner import _EmptyStateDictLoadPlanner

    found: dict[str, Any] = {}
    torch_dcp.state_dict_loader._load_state_dict(
        found,
        storage_reader=dcp.StepwellReader(tmp_path / "one"),
        planner=_EmptyStateDictLoadPlanner(),
        no_dist=True,
    )
    for name, one in state["a"].items():
        assert torch.equal(found["a"][name], one)
    assert found["list"][0] == 1
    assert found["text"] == "x"


BUFFERS = (
    PREAMBLE
    + """
import stepwell as sw
from torch.distributed.fsdp import fully_shard
model = torch.nn.Sequential(torch.nn.Linear(6, 12), torch.nn.BatchNorm1d(12))
fully_shard(model)
model(torch.randn(8, 6, generator=torch.Generator().manual_seed(RANK)))
state = {"model": model.state_dict(), "list": [torch.tensor(RANK)]}
with dcp.using():
    try:
        torch_dcp.save(state, checkpoint_id=ROOT + "/refused")
    except sw.MismatchError as error:
        assert "dcp.use(replicated=[glob])" in str(error), error
    else:
        raise AssertionError("the ranks differ")
with dcp.using(replicated=["**.running_*", "list"]):
    torch_dcp.save(state, checkpoint_id=ROOT + "/one")
mean = model[1].running_mean.clone()
dist.broadcast(mean, 0)
model[1].running_mean.zero_()
state = {"model": model.state_dict(), "list": [torch.tensor(5)]}
dcp.load(state, checkpoint_id=ROOT + "/one")
print(torch.equal(state["model"]["1.running_mean"], mean), int(state["list"][0]))
"""
)


def test_values_that_differ_between_ranks_can_be_named(tmp_path: Path) -> None:
    found = run_forked(tmp_path, MODULES, BUFFERS, 2, tmp_path, free_port())
    assert [one.split("\n")[-2] for one in found] == ["True 0"] * 2


def test_a_partial_load_keeps_what_is_not_stored(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(3), "other": 1}, checkpoint_id=tmp_path / "one")
    state = {"w": torch.zeros(3), "fresh": torch.full((2,), 5.0)}
    with pytest.raises(sw.MismatchError, match=r"fresh\n.*planner=.*allow_partial_load=True"):
        dcp.load(state, checkpoint_id=tmp_path / "one")
    assert state["w"].tolist() == [0.0] * 3
    dcp.load(state, checkpoint_id=tmp_path / "one", planner=DefaultLoadPlanner(allow_partial_load=True))
    assert state["w"].tolist() == [1.0] * 3
    assert state["fresh"].tolist() == [5.0] * 2


def test_values_are_cast_as_dcp_casts_them(tmp_path: Path) -> None:
    dcp.save({"w": torch.full((3,), 1.001)}, checkpoint_id=tmp_path / "one")
    state = {"w": torch.zeros(3, dtype=torch.bfloat16)}
    dcp.load(state, checkpoint_id=tmp_path / "one")
    assert torch.equal(state["w"], torch.full((3,), 1.001).bfloat16())


def test_stateful_objects_are_loaded_by_their_method(tmp_path: Path) -> None:
    class Counter:
        n = 0

        def state_dict(self) -> dict[str, Any]:
            return {"n": self.n}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            self.n = state["n"]

    counter = Counter()
    counter.n = 7
    dcp.save({"counter": counter}, checkpoint_id=tmp_path / "one")
    fresh = Counter()
    dcp.load({"counter": fresh}, checkpoint_id=tmp_path / "one")
    assert fresh.n == 7


def test_what_cannot_be_stored_is_refused_by_name(tmp_path: Path) -> None:
    with pytest.raises(sw.UnsupportedLeaf, match="a/odd"):
        dcp.save({"a": {"odd": object()}}, checkpoint_id=tmp_path / "one")
    with pytest.raises(sw.StepNotFound):
        dcp.load({"a": 1}, checkpoint_id=tmp_path / "one")


def test_a_save_refuses_a_checkpoint_of_dcp(tmp_path: Path) -> None:
    torch_dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "old")
    with pytest.raises(sw.MisuseError, match="another library"):
        dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "old")


def test_a_writer_of_another_class_goes_to_torch(tmp_path: Path) -> None:
    class Own(torch_dcp.FileSystemWriter):
        pass

    dcp.save({"w": torch.ones(3)}, storage_writer=Own(tmp_path / "old"))
    assert (tmp_path / "old" / "__0_0.distcp").exists()


def test_a_url_goes_to_torch() -> None:
    pytest.importorskip("fsspec")
    dcp.save({"w": torch.ones(3)}, checkpoint_id="memory://one")
    state = {"w": torch.zeros(3)}
    dcp.load(state, checkpoint_id="memory://one")
    assert state["w"].tolist() == [1.0] * 3


def test_ranks_that_differ_are_refused_on_all(tmp_path: Path) -> None:
    script = (
        PREAMBLE
        + """
try:
    dcp.save({"seed": RANK}, checkpoint_id=ROOT)
except sw.StepwellError as error:
    print(type(error).__name__)
dcp.save({"seed": sw.PerRank(RANK)}, checkpoint_id=ROOT)
state = {"seed": sw.PerRank(9)}
dcp.load(state, checkpoint_id=ROOT)
print(state)
"""
    )
    found = run_forked(tmp_path, MODULES, script, 2, tmp_path / "one", free_port())
    assert [one.splitlines()[0] for one in found] == ["MismatchError", "MismatchError"]


@pytest.mark.parametrize("how", ["writer", "stateful"])
def test_a_rank_that_fails_ends_the_save_of_all(tmp_path: Path, how: str) -> None:
    script = (
        PREAMBLE
        + """
import time

class Planner(torch_dcp.DefaultSavePlanner):
    def resolve_data(self, item):
        if RANK == 1:
            raise ValueError("odd values of rank 1")
        return super().resolve_data(item)

class Counter:
    def state_dict(self):
        if RANK == 1:
            raise ValueError("odd values of rank 1")
        return {"n": 1}

    def load_state_dict(self, state):
        pass

model, optimizer = build(0)
begun = time.monotonic()
try:
    if sys.argv[6] == "writer":
        torch_dcp.save(model.state_dict(), storage_writer=dcp.StepwellWriter(ROOT), planner=Planner())
    else:
        dcp.save({"counter": Counter()}, checkpoint_id=ROOT)
except BaseException as error:
    print(f"{time.monotonic() - begun:.0f}", error)
"""
    )
    found = run_forked(tmp_path, MODULES, script, 2, tmp_path / "one", free_port(), how)
    for one in found:
        assert "odd values of rank 1" in one
        assert int(one.split()[0]) < 60
    assert not any((tmp_path / "one").glob("step_*"))


FAILS = """
import torch, os, sys
import stepwell.integrations.dcp as dcp
path = sys.argv[1]
os.makedirs(path)
dcp.save({"w": torch.ones(3)}, checkpoint_id=path)
import resource
resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))
import signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
pending = dcp.async_save({"w": torch.ones(1 << 18)}, checkpoint_id=path)
if sys.argv[2] == "next":
    pending._thread.join()
    try:
        dcp.save({"w": torch.ones(3)}, checkpoint_id=path)
    except Exception as error:
        print("heard", type(error).__name__)
"""


@pytest.mark.parametrize("when", ["next", "exit"])
def test_a_failed_save_in_the_background_is_heard(tmp_path: Path, when: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FAILS, str(tmp_path / "one"), when],
        capture_output=True,
        text=True,
        timeout=120,
    )
    if when == "next":
        assert "heard" in done.stdout, done.stderr
    else:
        assert done.returncode == 1
        assert "the save to" in done.stderr
    assert sw.restore(tmp_path / "one")["w"].shape == (3,)


def test_staging_memory_is_kept_between_saves(tmp_path: Path) -> None:
    script = """
import sys, torch
import stepwell.integrations.dcp as dcp
state = {"w": torch.ones(64 << 18)}
def resident():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmRSS")).split()[1]) >> 10
before = resident()
dcp.save(state, checkpoint_id=sys.argv[1])
print(resident() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path / "one")],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    assert int(done.stdout) > 48


def test_a_sharded_tensor_of_fsdp1_is_refused(tmp_path: Path) -> None:
    script = (
        PREAMBLE
        + """
from torch.distributed._shard import sharded_tensor
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
found = sharded_tensor.ones(ChunkShardingSpec(0, ["rank:0/cpu"]), 4, 4)
try:
    dcp.save({"a": found}, checkpoint_id=ROOT)
except sw.UnsupportedLeaf as error:
    print(error)
"""
    )
    assert "fully_shard" in run_forked(tmp_path, MODULES, script, 1, tmp_path / "one", free_port())[0]
