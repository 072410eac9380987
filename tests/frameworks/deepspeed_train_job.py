"""Trainings with DeepSpeed that stepwell saves, for the tests. Ranks are forks of one process: the
imports of DeepSpeed take longer than all that they do."""

from __future__ import annotations

import json
import os
import re
import signal
import traceback
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import deepspeed
import deepspeed_job
import stepwell as sw
import torch
import torch.distributed as dist
from accidents import files_no_longer_than
from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state
from deepspeed_model import Model, groups_of
from moments import killed_in_a_save
from ranks import free_port
from stepwell.integrations.deepspeed import TrainState

BF16 = {"bf16": {"enabled": True}}
FP16 = {"fp16": {"enabled": True, "initial_scale_power": 4, "loss_scale_window": 2}}
KINDS: dict[str, dict[str, Any]] = {
    "zero1": {"stage": 1},
    "zero2_bf16": {"stage": 2, "config": BF16, "zero": {"parameter_alignment": True}},
    "zero1_bf16": {"stage": 1, "config": BF16 | {"data_types": {"grad_accum_dtype": "fp32"}}},
    "zero3": {"stage": 3, "zero": {"stage3_param_persistence_threshold": 0}},
    "zero3_bf16": {
        "stage": 3,
        "config": BF16,
        "zero": {"sub_group_size": 50, "stage3_param_persistence_threshold": 8},
    },
    "zero2_fp16": {"stage": 2, "config": FP16, "zero": {"round_robin_gradients": True}},
}
#: Those that DeepSpeed's own call loads too.
LOADED = ["zero2_bf16", "zero3", "zero2_fp16"]
SAVED, END, BATCH = 3, 6, 4


def start(rank: int, world: int, port: int) -> None:
    names = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_PORT": port}
    os.environ |= {name: str(value) for name, value in names.items()} | {"MASTER_ADDR": "127.0.0.1"}
    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)


class Renamed(Model):
    """The model with another name for a layer."""

    def __init__(self) -> None:
        super().__init__()
        self._modules["first"] = self._modules.pop("a")

    def __getattr__(self, name: str) -> Any:
        return super().__getattr__("first" if name == "a" else name)


def engine_of(kind: str, seed: int = 7, lr: float = 0.01, cls: type[Model] = Model) -> Any:
    """An engine with a new model."""
    torch.manual_seed(seed)
    model = cls()
    optimizer = torch.optim.AdamW(groups_of(model), lr=lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
    config = deepspeed_job.settings_of(KINDS[kind]) | {"gradient_clipping": 1.0}
    config["train_micro_batch_size_per_gpu"] = BATCH // dist.get_world_size()
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, lr_scheduler=scheduler, config=config)
    return engine


def train(engine: Any, first: int = 0, end: int = END) -> Iterator[tuple[int, float]]:
    """Yields the number of steps done, and the loss of all ranks."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(first, end):
        batch = torch.randint(0, 13, (BATCH,), generator=torch.Generator().manual_seed(step))
        loss = engine(batch[rank::world])
        engine.backward(loss)
        engine.step()
        mean = loss.detach().float()
        dist.all_reduce(mean)
        yield step + 1, mean.item() / world


def values(engine: Any) -> dict[str, Any]:
    """Returns the state of an engine as whole tensors, from DeepSpeed's own calls."""
    base = engine.optimizer.optimizer
    with deepspeed.zero.GatheredParameters(list(engine.module.parameters())):
        module = {name: one.detach().clone() for name, one in engine.module.state_dict().items()}
    trained = {name: one for name, one in engine.module.named_parameters() if one.requires_grad}
    if type(engine.optimizer).__name__ == "BF16_Optimizer":
        whole = {
            name: {"fp32": safe_get_full_fp32_param(one)}
            | {slot: safe_get_full_optimizer_state(one, slot) for slot in deepspeed_job.SLOTS}
            for name, one in trained.items()
        }
    else:
        whole = deepspeed_job.live(engine)
    scaler = getattr(engine.optimizer, "loss_scaler", None)
    return {
        "module": module,
        "trained": whole,
        "steps": sorted({float(slots["step"]) for slots in base.state.values()}),
        "groups": [
            {key: one for key, one in group.items() if key != "params"} for group in base.param_groups
        ],
        "scheduler": engine.lr_scheduler.state_dict(),
        "counters": [engine.global_steps, engine.global_samples, engine.skipped_steps],
        "scaler": None if scaler is None else {**vars(scaler), "dtype": None},
    }


def same(one: Any, other: Any) -> bool:
    """True if nested values are equal, tensors in every bit."""
    if isinstance(one, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    return bool(one == other)


def compared(engine: Any, saved: dict[str, Any]) -> dict[str, Any]:
    """Compares the state of an engine with a saved one. Then trains to the end."""
    found = values(engine)
    module = found["module"]
    rounded = (
        torch.equal(module[name], one["fp32"].to(module[name].dtype))
        for name, one in found["trained"].items()
    )
    differing = [key for key in saved if not same(found[key], saved[key])]
    return {"differing": differing, "rounded": all(rounded), "losses": dict(train(engine, SAVED))}


def whole(folder: Path) -> dict[str, Any]:
    """Trains each kind without a break, and goes on from its save with another engine."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        engine, losses = engine_of(kind), {}
        with sw.CheckpointManager(folder / kind) as mgr:
            mgr.attach(engine.optimizer.optimizer, host="lazy")
            for step, losses[step] in train(engine):
                if step == SAVED:
                    mgr.save(step, {"train": TrainState(engine)})
                    engine.save_checkpoint(folder / f"{kind}-deepspeed")
                    saved = values(engine)
            other = engine_of(kind, seed=8, lr=0.5)
            mgr.wait_until_finished()
            mgr.restore(SAVED, into={"train": TrainState(other)})
        if dist.get_rank() == 0:
            torch.save(saved, folder / f"{kind}.values")
        found[kind] = {"whole": losses, "wrapper": type(engine.optimizer).__name__, **compared(other, saved)}
    return found


def killed(folder: Path) -> None:
    """Is killed when its last save has returned."""
    engine = engine_of("zero2_bf16")
    with sw.CheckpointManager(folder) as mgr:
        for step, _ in train(engine):
            save = mgr.save(step, {"train": TrainState(engine)})
            if step == SAVED:
                os.kill(os.getpid(), signal.SIGKILL)
            save.result()


def one(folder: Path) -> dict[str, Any]:
    """Goes on from the saves of two ranks, and saves for two."""
    found = {}
    for kind in KINDS:
        engine = engine_of(kind, seed=8, lr=0.5)
        sw.restore(folder / kind, into={"train": TrainState(engine)})
        with sw.CheckpointManager(folder / f"{kind}-one") as mgr:
            mgr.save(SAVED, {"train": TrainState(engine)})
        found[kind] = compared(engine, torch.load(folder / f"{kind}.values", weights_only=False))
    return found


def two(folder: Path) -> dict[str, Any]:
    """Goes on from the saves of one rank, from those of DeepSpeed itself, and from a plain one."""
    found: dict[str, Any] = {}
    for kind in KINDS:
        saved = torch.load(folder / f"{kind}.values", weights_only=False)
        for name, start in {"one": folder / f"{kind}-one", "deepspeed": folder / f"{kind}-deepspeed"}.items():
            engine = engine_of(kind, seed=8, lr=0.5)
            state = TrainState(engine)
            into = {"train": state} if name == "one" else state
            sw.restore(start, into=into, unexpected="error" if name == "one" else "ignore")
            found[f"{kind}-{name}"] = compared(engine, saved)
        if kind not in LOADED:
            continue
        engine = engine_of(kind, seed=8, lr=0.5)
        engine.load_checkpoint(folder / f"{kind}-deepspeed")
        with sw.CheckpointManager(folder / f"{kind}-moved") as mgr:
            mgr.save(SAVED, {"train": TrainState(engine)})
            found[f"{kind}-own"] = dict(train(engine, SAVED))
            engine = engine_of(kind, seed=8, lr=0.5)
            mgr.wait_until_finished()
            mgr.restore(into={"train": TrainState(engine)})
        found[f"{kind}-moved"] = compared(engine, saved)
    engine = engine_of("zero2_bf16", seed=8, lr=0.5)
    with sw.CheckpointManager(folder / "killed") as mgr:
        _, first = mgr.resume({"train": TrainState(engine)})
    found["resumed"] = dict(train(engine, first - 1))
    engine = engine_of("zero1", seed=8, lr=0.5)
    sw.restore(folder / "plain", into=TrainState(engine))
    found["plain"] = dict(train(engine, SAVED))
    return found


def moved(folder: Path) -> dict[str, Any]:
    """Restores a state of before the first step into a trained engine, and one to other names."""
    found = {}
    for kind in ("zero1", "zero3_bf16"):
        engine = engine_of(kind)
        sw.save(folder / f"{kind}-start", TrainState(engine))
        losses = dict(train(engine))
        sw.restore(folder / f"{kind}-start", into=TrainState(engine))
        other = engine_of(kind, seed=8, cls=Renamed)
        into = {"train": TrainState(other)}
        sw.restore(folder / kind, into=into, rename={"train/model/a.*": "train/model/first.*"})
        saved = torch.load(folder / f"{kind}.values", weights_only=False)["trained"]
        here = {name.replace("first", "a"): one for name, one in values(other)["trained"].items()}
        found[kind] = {"again": dict(train(engine)) == losses, "renamed": same(here, saved)}
    return found


def failing(folder: Path) -> str:
    """One of two ranks fails in the last part of a restore."""
    state = TrainState(engine_of("zero1"))

    def fail(*_: object) -> None:
        raise RuntimeError("no memory left")

    if dist.get_rank() == 1:
        TrainState._take = fail  # type: ignore[method-assign]
    with sw.CheckpointManager(folder / "zero1") as mgr:
        try:
            mgr.restore(into={"train": state})
        except (RuntimeError, sw.RankFailed) as error:
            return f"{type(error).__name__}: {error}"
    return "restored"


def full(folder: Path) -> list[str]:
    """The disk of one of two ranks is full in a save. Returns the errors of three calls."""
    engine = engine_of("zero1")
    state, found = {"train": TrainState(engine)}, []
    with sw.CheckpointManager(folder / "full") as mgr:
        mgr.save(0, state).result()
        with files_no_longer_than(1 << 10) if dist.get_rank() == 1 else nullcontext():
            save = mgr.save(1, state)
            save.exception()
        for call in (save.result, lambda: mgr.save(2, state).result()):
            try:
                call()
            except sw.StepwellError as error:
                found.append(f"{type(error).__name__}: {error}")
        return [*found, mgr.latest_step()]


def refusals(folder: Path) -> dict[str, Callable[[], object]]:
    """Returns saves and restores that must fail, by name."""
    from deepspeed.moe.layer import MoE
    from deepspeed.pipe import PipelineModule

    def of(config: dict[str, Any], model: Any = None, optimizer: Any = torch.optim.AdamW) -> TrainState:
        model = model or Model()
        groups = groups_of(model) if isinstance(model, Model) else list(model.parameters())
        whole = deepspeed_job.settings_of({"stage": 1}) | config
        return TrainState(
            deepspeed.initialize(model=model, optimizer=optimizer(groups, lr=0.1), config=whole)[0]
        )

    class Custom(Model):
        def state_dict(self, *arguments: Any, **keywords: Any) -> Any:
            return super().state_dict(*arguments, **keywords)

    def accumulating() -> object:
        state = of({"gradient_accumulation_steps": 2})
        list(train(state.engine, end=1))
        return state.state_dict()

    def odd_slot() -> object:
        state = of({})
        list(train(state.engine, end=1))
        base = state.engine.optimizer.optimizer
        base.state[base.param_groups[0]["params"][0]]["odd"] = torch.zeros(3)
        return state.state_dict()

    offload = {"stage": 2, "offload_optimizer": {"device": "cpu"}}
    pipe = {"layers": [torch.nn.Linear(2, 2)], "num_stages": 1, "loss_fn": torch.nn.functional.mse_loss}
    experts = {"params": MoE(4, torch.nn.Linear(4, 4), num_experts=2)}
    return {
        "model": lambda: TrainState(Model()),
        "offloaded parameters": lambda: of(
            {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}}
        ),
        "no zero": lambda: of({"zero_optimization": {"stage": 0}}),
        "offload": lambda: of({"zero_optimization": offload, "zero_force_ds_cpu_optimizer": False}),
        "pipeline": lambda: of({}, PipelineModule(**pipe)),
        "experts": lambda: of({}, torch.nn.ModuleDict(experts), _expert_optimizer),
        "own state_dict": lambda: of({}, Custom()),
        "joined groups": lambda: of({}, optimizer=torch.optim.Adagrad),
        "accumulation": accumulating,
        "odd slot": odd_slot,
        "uneven steps": lambda: sw.restore(folder / "uneven", into=TrainState(engine_of("zero1"))),
    }


def _expert_optimizer(parameters: list[Any], lr: float) -> Any:
    groups = deepspeed_job.split_params_into_different_moe_groups_for_optimizer(
        {"params": parameters, "name": "parameters"}
    )
    return torch.optim.AdamW(groups, lr=lr)


def refused(folder: Path) -> dict[str, str]:
    """Returns the message of each of them."""
    found = {}
    for name, act in refusals(folder).items():
        try:
            found[name] = f"not refused: {act()}"
        except (sw.MisuseError, sw.MismatchError) as error:
            found[name] = str(error)
    return found


def guide(folder: Path) -> list[tuple[int, int]]:
    """Runs the example of the guide twice. Returns the first step, and the number of all steps."""
    page = (Path(__file__).parents[2] / "docs" / "guide" / "deepspeed.md").read_text()
    (example,) = re.findall(r"^```diff\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    names: dict[str, Any] = {}
    exec("\n".join(line[1:] for line in example.splitlines() if line[:1] != "-"), names)
    os.chdir(folder)
    found = []
    for steps in (5, 10):
        model = Model()
        optimizer = torch.optim.AdamW(groups_of(model))
        found.append(
            names["train"](
                steps,
                lambda step: torch.tensor([step]),
                model=model,
                optimizer=optimizer,
                lr_scheduler=torch.optim.lr_scheduler.StepLR(optimizer, 2),
                config=deepspeed_job.settings_of(KINDS["zero2_bf16"]),
            )
        )
    return found


def in_ranks(act: Callable[[Path], object], world: int, folder: Path) -> list[int]:
    """Runs a function in so many ranks, and returns how each has ended. Their results are in
    files."""
    port, children = free_port(), []
    for rank in range(world):
        pid = os.fork()
        if pid == 0:
            try:
                start(rank, world, port)
                text = json.dumps(act(folder))
                (folder / f"{act.__name__}.{rank}.json").write_text(text)
                os._exit(0)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
        children.append(pid)
    return [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in children]


def run(folder: Path) -> None:
    def kill(place: Path) -> None:
        place.mkdir()
        assert in_ranks(killed, 2, place) == [-signal.SIGKILL] * 2

    place = killed_in_a_save(folder, kill, lambda at: (at / f"step_{SAVED:08}").exists())
    place.rename(folder / "killed")
    for act, world in (
        (whole, 2),
        (one, 1),
        (two, 2),
        (moved, 1),
        (failing, 2),
        (full, 2),
        (refused, 1),
        (guide, 1),
    ):
        codes = in_ranks(act, world, folder)
        assert codes == [0] * world, f"{act.__name__}: {codes}"
