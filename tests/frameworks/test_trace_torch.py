"""Traces of real torch trainings, in real processes: a run that is killed, and runs that resume it
and forget something."""

from __future__ import annotations

import json
import shutil
import signal
import sys
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

import command_line
from ranks import free_port, run_forked, start

TRAINING = """
import json, warnings
import torch

class Loader:
    '''Shuffled batches; its state is its order and its place.'''
    def __init__(self):
        self.order, self.at = torch.randperm(64, generator=torch.Generator().manual_seed(3)), 0
    def __next__(self):
        self.at += 8
        return self.order[torch.arange(self.at - 8, self.at) % 64].float().reshape(8, 1)
    def state_dict(self):
        return {"at": self.at}
    def load_state_dict(self, state):
        self.at = state["at"]

class Training:
    def __init__(self):
        torch.manual_seed(7)
        self.model = torch.nn.Sequential(torch.nn.Linear(1, 32), torch.nn.ReLU(), torch.nn.Dropout(0.3), torch.nn.Linear(32, 1))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.train = sw.torch.TrainState(self.model, self.optimizer)
        self.loader = Loader()
    def step(self):
        x = next(self.loader)
        self.optimizer.zero_grad()
        (self.model(x) - 3 * x).square().mean().backward()
        self.optimizer.step()
    def state(self, rng=True, loader=True):
        state = {"train": self.train}
        if rng:
            state["rng"] = torch.default_generator
        if loader:
            state["loader"] = self.loader
        return state
"""

FIRST = (
    TRAINING
    + """
training = Training()
kept = json.loads(sys.argv[5])
mgr = sw.CheckpointManager(ROOT, coordinator=None, prove_resume=4)
for step in range(8):
    training.step()
    if step == 3:
        mgr.save(step, training.state(**kept)).result()
    else:
        mgr.trace(step, training.state(**kept))
while len([name for name in os.listdir(f"{ROOT}/.stepwell/traces") if name.endswith(".json")]) < 5:
    time.sleep(0.01)
os.kill(os.getpid(), signal.SIGKILL)
"""
)

SECOND = (
    TRAINING
    + """
case, kept = json.loads(sys.argv[5])[RANK]
training = Training()
events = []
with warnings.catch_warnings(), sw.CheckpointManager(
    f"{ROOT}-{case}", coordinator=None, prove_resume=4, on_event=events.append
) as mgr:
    warnings.simplefilter("ignore", sw.errors.ResumeDiffers)
    state = training.state(**kept)
    if case == "optimizer":
        mgr.restore(3, into=state)
        training.optimizer.state.clear()
    elif case == "rng":
        torch.manual_seed(11)
        mgr.restore(3, into={name: one for name, one in state.items() if name != "rng"}, unexpected="ignore")
    elif case == "loader":
        mgr.restore(3, into={name: one for name, one in state.items() if name != "loader"}, unexpected="ignore")
    else:
        torch.manual_seed(12)  # what is not in the state is another in the new process
        mgr.restore(3, into=state)
    if case == "slot":
        for slots in training.optimizer.state.values():
            slots["exp_avg"].zero_()
    for step in range(4, 8):
        training.step()
        mgr.trace(step, training.state(**kept))
found = [event for event in events if isinstance(event, sw.events.TraceEvent)]
print(json.dumps([[event.step, event.outcome, event.leaf, event.causes] for event in found]))
"""
)

#: By the forgotten part: the entries of the state, the first leaf that differs, the first cause.
FAULTS = {
    "nothing": ({}, None, ""),
    "rng": ({}, "train/model/0.weight", "a random generator was not restored"),
    "loader": ({}, "train/model/0.weight", "the data come in another order"),
    "optimizer": ({}, "train/model/0.weight", "the optimizer counts other steps"),
    "slot": ({}, "train/model/0.weight", "a slot of the optimizer was lost"),
    "unsaved_rng": ({"rng": False}, "train/model/0.weight", "no leaf of the state is a random generator"),
    "unsaved_loader": (
        {"loader": False},
        "train/model/0.weight",
        "no leaf of the state is a place in the data",
    ),
}


def test_a_resumed_training_tells_what_was_forgotten(tmp_path: Path, root: Path) -> None:
    kinds: list[dict[str, bool]] = [{}, {"rng": False}, {"loader": False}]
    roots = [Path(f"{root}-first-{number}") for number in range(len(kinds))]
    running = [
        start(tmp_path, FIRST, 1, first, json.dumps(kept)) for first, kept in zip(roots, kinds, strict=True)
    ]
    for first, kept, ranks in zip(roots, kinds, running, strict=True):
        ((code, _, err),) = ranks.finish()
        assert code == -signal.SIGKILL, err
        for case, (held, _, _) in FAULTS.items():
            if held == kept:
                shutil.copytree(first, f"{root}-{case}")
    cases = [[case, held] for case, (held, _, _) in FAULTS.items()]
    told = run_forked(tmp_path, "torch,stepwell.torch", SECOND, len(cases), root, json.dumps(cases))
    for text, (case, (_, leaf, cause)) in zip(told, FAULTS.items(), strict=True):
        events = json.loads(text.splitlines()[-1])
        if leaf is None:
            assert [event[:2] for event in events] == [[step, "same"] for step in range(4, 8)], case
            assert command_line.run("trace", f"{root}-{case}").exit_code == 0
            continue
        (step, outcome, found, causes) = events[0]
        assert (step, outcome, found) == (4, "differs", leaf), case
        assert causes[0].startswith(cause), (case, causes)
        assert len(events) == 1, "the first difference is the last one that is told"


DRIFTING = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[5]}", rank=RANK, world_size=WORLD)
torch.manual_seed(7)
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(300, 200))
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
train = sw.torch.TrainState(model, optimizer)
with sw.CheckpointManager(ROOT, prove_resume=4, options=sw.Options(stall_timeout=60.0)) as mgr:
    for step in range(5):
        torch.manual_seed(100 * step + RANK)
        optimizer.zero_grad()
        model(torch.randn(4, 300)).square().mean().backward()
        optimizer.step()
        if RANK == 1 and step == 2:
            model.module.weight.data.view(torch.int32)[150, 7] ^= 1
        if step == 0:
            mgr.save(step, {"train": train}).result()
        else:
            mgr.trace(step, {"train": train})
dist.destroy_process_group()
"""


def test_one_flipped_bit_of_one_rank_is_found(tmp_path: Path, root: Path) -> None:
    run_forked(tmp_path, "torch,stepwell.torch", DRIFTING, 2, root, free_port())
    found = command_line.document("trace", root, code=1)
    (drift,) = found["drifts"]
    assert (drift["last_same"], drift["step"]) == (1, 2)
    assert drift["leaves"] == [{"path": "train/model/weight", "ranks": [0], "other_ranks": [1]}]


def test_a_sharded_training_resumes_on_other_ranks(tmp_path: Path, root: Path) -> None:
    # The values are given: sums of gradients over other ranks round in another way.
    script = """
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{sys.argv[5]}", rank=RANK, world_size=WORLD)
mesh = init_device_mesh("cpu", (WORLD,))
def state(step):
    torch.manual_seed(step)
    return {name: distribute_tensor(torch.randn(31, 17), mesh, [Shard(axis)]) for axis, name in enumerate(("rows", "columns"))}
with sw.CheckpointManager(ROOT, prove_resume=2, options=sw.Options(stall_timeout=60.0)) as mgr:
    if mgr.latest_step() is None:
        mgr.save(0, state(0)).result()
    else:
        mgr.restore(into=state(9))
    mgr.trace(1, state(1))
    mgr.trace(2, state(2 if sys.argv[6] == "right" else 3))
dist.destroy_process_group()
"""
    for world, fault in ((3, "right"), (2, "wrong")):
        run_forked(tmp_path, "torch,stepwell.torch", script, world, root, free_port(), fault)
    found = command_line.document("trace", root, code=1)
    assert sorted(len(one["ranks"]) for one in found["traces"]) == [2, 3]
    (parting,) = found["partings"]
    assert (parting["last_same"], parting["step"]) == (1, 2)
    assert {one["path"] for one in parting["leaves"]} == {"rows", "columns"}
