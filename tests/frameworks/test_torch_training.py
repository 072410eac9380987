"""Modules, optimizers and what else a training run with torch has: restored in place, and going on
as if nothing had happened."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw

torch = pytest.importorskip("torch")
nn = torch.nn


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.conv = nn.Conv1d(8, 8, 3, padding=1)
        self.norm = nn.BatchNorm1d(8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("counts", torch.zeros(3, dtype=torch.int64))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, tokens: Any) -> Any:
        hidden = self.norm(self.conv(self.embed(tokens).transpose(1, 2)))
        return self.head(hidden.transpose(1, 2))


def build(seed: int, **options: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(seed)
    model = Net()
    decay = [p for p in model.parameters() if p.ndim > 1]
    rest = [p for p in model.parameters() if p.ndim <= 1]
    optimizer = torch.optim.AdamW(
        [{"params": decay, "weight_decay": 0.1}, {"params": rest}], lr=1e-2, **options
    )
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)
    return model, optimizer, scheduler


def train(parts: tuple[Any, Any, Any], steps: int, seed: int = 0) -> list[float]:
    model, optimizer, scheduler = parts
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(steps):
        tokens = torch.randint(0, 16, (4, 6), generator=generator)
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        scheduler.step()
        losses.append(float(loss))
    return losses


def same(one: Any, other: Any) -> bool:
    return all(
        torch.equal(a, b) for a, b in zip(one.state_dict().values(), other.state_dict().values(), strict=True)
    )


@pytest.mark.parametrize("form", ["objects", "train state"])
def test_training_continues_unchanged_after_a_restore(root: Path, form: str) -> None:
    def state(parts: tuple[Any, Any, Any]) -> dict[str, Any]:
        model, optimizer, scheduler = parts
        if form == "train state":
            return {"train": sw.torch.TrainState(model, optimizer, scheduler)}
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    run = build(0)
    train(run, 5)
    sw.save(root, state(run))
    expected = train(run, 5, seed=1)
    resumed = build(99)
    weight = resumed[0].embed.weight
    place = weight.data_ptr()
    sw.restore(root, into=state(resumed))
    assert resumed[0].embed.weight is weight
    assert weight.data_ptr() == place
    assert resumed[0].head.weight is weight
    assert train(resumed, 5, seed=1) == expected
    assert same(run[0], resumed[0])


def test_a_module_is_filled_where_its_tensors_are(root: Path) -> None:
    source, target = Net(), Net()
    sw.save(root, {"model": source})
    view = target.conv.weight.detach()[0]
    sw.restore(root, into={"model": target})
    assert same(source, target)
    assert torch.equal(view, source.conv.weight[0])


def test_a_module_with_hooks_is_loaded_by_its_own_loader(root: Path) -> None:
    class Extra(nn.Linear):
        version = 1

        def get_extra_state(self) -> Any:
            return {"version": self.version}

        def set_extra_state(self, state: Any) -> None:
            self.version = state["version"]

    source, target = nn.Sequential(Extra(2, 2)), nn.Sequential(Extra(2, 2))
    source[0].version = 7
    sw.save(root, {"model": source, "train": sw.torch.TrainState(source)})
    sw.restore(root, into={"model": target})
    assert target[0].version == 7
    assert torch.equal(target[0].weight, source[0].weight)
    target[0].version = 1
    sw.restore(root, into={"train": sw.torch.TrainState(target)})
    assert target[0].version == 7
    hooked, calls = nn.Linear(2, 2), []
    hooked.register_load_state_dict_post_hook(lambda module, keys: calls.append(1))
    sw.save(root, {"model": nn.Linear(2, 2)}, exists="replace")
    sw.restore(root, into={"model": hooked})
    assert calls


def test_slots_are_stored_by_parameter_name(root: Path) -> None:
    run = build(0)
    train(run, 1)
    sw.save(root, {"train": sw.torch.TrainState(*run)})
    with sw.open(root) as checkpoint:
        paths = checkpoint.paths()
    slots = {path.split("/")[3] for path in paths if path.startswith("train/optimizer/state/")}
    assert slots == {name for name, _ in run[0].named_parameters()}
    assert "train/model/head.weight" in paths
    assert not any("scratch" in path for path in paths)
    groups = sw.restore(root)["train"]["optimizer"]["groups"]
    assert groups[0]["params"] == [name for name, p in run[0].named_parameters() if p.ndim > 1]
    assert groups[0]["weight_decay"] == 0.1


def test_regrouped_parameters_keep_slots_and_hyperparameters(root: Path) -> None:
    run = build(0)
    train(run, 2)
    run[1].param_groups[0]["lr"] = run[1].param_groups[1]["lr"] = 0.5
    sw.save(root, {"train": sw.torch.TrainState(run[0], run[1])})
    torch.manual_seed(1)
    model = Net()
    named = list(model.named_parameters())
    optimizer = torch.optim.AdamW([{"params": [p]} for _, p in reversed(named)], lr=1e-9)
    sw.restore(root, into={"train": sw.torch.TrainState(model, optimizer)})
    assert [group["lr"] for group in optimizer.param_groups] == [0.5] * len(named)
    own = dict(run[0].named_parameters())
    for name, parameter in named:
        assert torch.equal(optimizer.state[parameter]["exp_avg"], run[1].state[own[name]]["exp_avg"])
    decay = {
        name: group["weight_decay"]
        for (name, _), group in zip(reversed(named), optimizer.param_groups, strict=True)
    }
    assert decay["conv.weight"] == 0.1
    assert decay["conv.bias"] == 0.01
    merged = torch.optim.AdamW(model.parameters())
    with pytest.raises(sw.MisuseError, match="weight_decay"):
        sw.restore(root, into={"train": sw.torch.TrainState(model, merged)})


def test_frozen_parameters_need_no_slots(root: Path) -> None:
    run = build(0)
    run[0].conv.weight.requires_grad_(False)
    train(run, 2)
    assert run[0].conv.weight not in run[1].state
    sw.save(root, {"train": sw.torch.TrainState(*run)})
    fresh = build(1)
    fresh[0].conv.weight.requires_grad_(False)
    calls: list[int] = []
    fresh[1].register_step_pre_hook(lambda *_: calls.append(1))
    sw.restore(root, into={"train": sw.torch.TrainState(*fresh)})
    assert not calls
    assert fresh[0].conv.weight not in fresh[1].state
    assert fresh[1].state[fresh[0].conv.bias]["step"] == 2


def test_slots_take_the_memory_format_of_their_parameter(root: Path) -> None:
    def net() -> tuple[Any, Any]:
        model = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        return model, torch.optim.Adam(model.parameters())

    model, optimizer = net()
    model(torch.randn(1, 3, 8, 8)).sum().backward()
    optimizer.step()
    sw.save(root, {"train": sw.torch.TrainState(model, optimizer)})
    other, fresh = net()
    sw.restore(root, into={"train": sw.torch.TrainState(other, fresh)})
    slot = fresh.state[other.weight]["exp_avg"]
    assert slot.stride() == other.weight.stride()
    assert torch.equal(slot, optimizer.state[model.weight]["exp_avg"])


def test_slots_that_are_there_are_filled_where_they_are(root: Path) -> None:
    run = build(0)
    train(run, 2)
    sw.save(root, {"train": sw.torch.TrainState(*run)})
    saved = {name: run[1].state[p]["exp_avg"].clone() for name, p in run[0].named_parameters()}
    places = {name: run[1].state[p]["exp_avg"].data_ptr() for name, p in run[0].named_parameters()}
    train(run, 2)
    sw.restore(root, into={"train": sw.torch.TrainState(*run)})
    for name, parameter in run[0].named_parameters():
        slot = run[1].state[parameter]["exp_avg"]
        assert slot.data_ptr() == places[name]
        assert torch.equal(slot, saved[name])


OPTIMIZERS = {
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-2),
    "Adam with amsgrad": lambda params: torch.optim.Adam(params, lr=1e-2, amsgrad=True),
    "SGD with momentum": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9),
    "Adafactor": lambda params: torch.optim.Adafactor(params),
}


def with_optimizer(make: Any) -> tuple[Any, Any, Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = make(model.parameters())
    return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)


def slots_of(parts: tuple[Any, Any, Any]) -> dict[str, dict[str, Any]]:
    return {
        name: {slot: value.clone() for slot, value in parts[1].state[parameter].items()}
        for name, parameter in parts[0].named_parameters()
        if parts[1].state.get(parameter)
    }


def same_slots(one: dict[str, dict[str, Any]], other: dict[str, dict[str, Any]]) -> bool:
    return one.keys() == other.keys() and all(
        one[name].keys() == other[name].keys()
        and all(torch.equal(value, other[name][slot]) for slot, value in one[name].items())
        for name in one
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_live_optimizer_goes_back_before_its_first_step(root: Path, name: str) -> None:
    straight = with_optimizer(OPTIMIZERS[name])
    expected = train(straight, 5)
    run = with_optimizer(OPTIMIZERS[name])
    state = {"train": sw.torch.TrainState(*run)}
    with sw.CheckpointManager(root) as mgr:
        mgr.save(0, state).result()
        train(run, 3, seed=7)
        assert slots_of(run)
        mgr.restore(0, into=state)
    assert slots_of(run) == {}
    assert train(run, 5) == expected
    assert same(run[0], straight[0])
    assert same_slots(slots_of(run), slots_of(straight))


def test_slots_of_a_later_option_are_gone_after_a_restore(root: Path) -> None:
    straight = with_optimizer(OPTIMIZERS["Adam"])
    train(straight, 2)
    expected = train(straight, 3, seed=1)
    run = with_optimizer(OPTIMIZERS["Adam"])
    train(run, 2)
    state = {"train": sw.torch.TrainState(*run)}
    sw.save(root, state)
    saved = slots_of(run)
    for parameter, slots in run[1].state.items():
        slots["max_exp_avg_sq"] = torch.zeros_like(parameter)
    run[1].param_groups[0]["amsgrad"] = True
    train(run, 2, seed=7)
    sw.restore(root, into=state)
    assert same_slots(slots_of(run), saved)
    assert run[1].param_groups[0]["amsgrad"] is False
    assert train(run, 3, seed=1) == expected


def test_a_frozen_parameter_has_no_slots_after_a_restore(root: Path) -> None:
    run = with_optimizer(OPTIMIZERS["Adam"])
    frozen = run[0].conv.weight
    frozen.requires_grad_(False)
    train(run, 2)
    state = {"train": sw.torch.TrainState(*run)}
    sw.save(root, state)
    saved = slots_of(run)
    expected = train(run, 2, seed=1)
    frozen.requires_grad_(True)
    train(run, 2, seed=7)
    assert run[1].state[frozen]
    sw.restore(root, into=state)
    assert frozen not in run[1].state
    assert same_slots(slots_of(run), saved)
    frozen.requires_grad_(False)
    frozen.grad = None
    assert train(run, 2, seed=1) == expected


@pytest.mark.parametrize("target", ["the live optimizer", "a fresh optimizer"])
def test_histories_of_tensors_in_slots_are_as_long_as_they_were(root: Path, target: str) -> None:
    def build() -> tuple[Any, Any]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        return model, torch.optim.LBFGS(model.parameters(), max_iter=1, history_size=4)

    def steps(model: Any, optimizer: Any, count: int) -> list[float]:
        def loss() -> Any:
            optimizer.zero_grad()
            found = model(torch.ones(4, 3)).pow(2).sum()
            found.backward()
            return found

        return [float(optimizer.step(loss)) for _ in range(count)]

    run = build()
    steps(*run, 3)
    sw.save(root, {"train": sw.torch.TrainState(*run)})
    history = [one.clone() for one in run[1].state[run[0].weight]["old_dirs"]]
    expected = steps(*run, 2)
    if target == "a fresh optimizer":
        run = build()
    sw.restore(root, into={"train": sw.torch.TrainState(*run)})
    restored = run[1].state[run[0].weight]["old_dirs"]
    assert len(restored) == len(history)
    assert all(map(torch.equal, restored, history))
    assert steps(*run, 2) == expected


def test_a_train_state_as_like_gives_the_stored_slots(root: Path) -> None:
    run = with_optimizer(OPTIMIZERS["Adam"])
    state = {"train": sw.torch.TrainState(*run)}
    sw.save(root, state)
    train(run, 1)
    assert sw.restore(root, like=state)["train"]["optimizer"]["state"] == {}
    assert slots_of(run)


def test_names_are_those_of_the_model_inside_its_wrappers(root: Path) -> None:
    run = build(0)
    train(run, 1)
    for step, wrapped in enumerate((nn.DataParallel(run[0]), nn.DataParallel(torch.compile(run[0])))):
        sw.save(root / str(step), {"train": sw.torch.TrainState(wrapped, run[1])})
        plain = build(3)
        sw.restore(root / str(step), into={"train": sw.torch.TrainState(plain[0], plain[1])})
        assert same(plain[0], run[0])


def test_what_the_model_itself_calls_its_module_keeps_that_name(root: Path) -> None:
    model = nn.Module()
    model.module, model.weight = nn.Linear(2, 3), nn.Parameter(torch.ones(4))
    for step, one in enumerate((model, nn.DataParallel(model))):
        sw.save(root / str(step), {"train": sw.torch.TrainState(one)})
        found = sw.restore(root / str(step))["train"]["model"]
        assert {name: array.shape for name, array in found.items()} == {
            "module.weight": (3, 2),
            "module.bias": (3,),
            "weight": (4,),
        }


class Around(torch.optim.SGD):
    """An optimizer whose state is somewhere else."""

    def state_dict(self) -> dict[str, Any]:
        return {"inner": super().state_dict()}


def test_an_optimizer_whose_state_is_elsewhere_is_refused() -> None:
    model = Net()
    with pytest.raises(sw.MisuseError, match=r"Around has its own state_dict\(\)"):
        sw.torch.TrainState(model, Around(model.parameters(), lr=0.1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.state["rounds"] = 3
    with pytest.raises(sw.MisuseError, match="state of 'rounds', which is not a parameter"):
        sw.torch.TrainState(model, optimizer).state_dict()


def test_tensor_hyperparameters_in_a_tuple_stay_the_same(root: Path) -> None:
    def run(value: float) -> tuple[Any, Any]:
        model = Net()
        betas = (torch.tensor(value), torch.tensor(0.99))
        return model, torch.optim.Adam(model.parameters(), betas=betas, foreach=False, capturable=True)

    sw.save(root, {"train": sw.torch.TrainState(*run(0.5))})
    other = run(0.9)
    first = other[1].param_groups[0]["betas"][0]
    sw.restore(root, into={"train": sw.torch.TrainState(*other)})
    assert other[1].param_groups[0]["betas"][0] is first
    assert float(first) == 0.5


def test_several_optimizers_and_schedulers_go_by_their_names(root: Path) -> None:
    def parts() -> tuple[Any, dict[str, Any], dict[str, Any]]:
        model = Net()
        optimizers = {
            "embed": torch.optim.SGD([model.embed.weight], lr=0.1, momentum=0.9),
            "body": torch.optim.Adam([p for p in model.parameters() if p is not model.embed.weight]),
        }
        return model, optimizers, {n: torch.optim.lr_scheduler.StepLR(o, 1) for n, o in optimizers.items()}

    model, optimizers, schedulers = parts()
    tokens = torch.arange(12).reshape(2, 6)
    model(tokens).sum().backward()
    for name in optimizers:
        optimizers[name].step()
        schedulers[name].step()
    sw.save(root, {"train": sw.torch.TrainState(model, optimizers, schedulers)})
    other = parts()
    sw.restore(root, into={"train": sw.torch.TrainState(*other)})
    assert same(model, other[0])
    own, new = optimizers["embed"], other[1]["embed"]
    assert torch.equal(
        new.state[other[0].embed.weight]["momentum_buffer"], own.state[model.embed.weight]["momentum_buffer"]
    )
    assert other[2]["body"].last_epoch == 1


def test_an_optimizer_of_another_model_is_refused_at_once() -> None:
    with pytest.raises(sw.MisuseError, match="that is not in the model"):
        sw.torch.TrainState(Net(), torch.optim.SGD(Net().parameters(), lr=0.1))
    with pytest.raises(sw.MisuseError, match="takes a torch"):
        sw.torch.TrainState({"w": torch.zeros(2)})


def test_generators_scaler_and_averages_continue(root: Path) -> None:
    def parts() -> dict[str, Any]:
        model = nn.Linear(2, 2)
        return {
            "torch": torch.Generator(),
            "numpy": np.random.default_rng(1),
            "python": random.Random(1),
            "scaler": torch.amp.GradScaler("cpu", init_scale=2.0**7),
            "ema": torch.optim.swa_utils.AveragedModel(model),
        }

    run = parts()
    torch.rand(5, generator=run["torch"])
    run["scaler"]._init_scale = 2.0**9
    run["ema"].update_parameters(nn.Linear(2, 2))
    sw.save(root, run)
    expected = (torch.rand(3, generator=run["torch"]), run["numpy"].random(3), run["python"].random())
    back = parts()
    sw.restore(root, into=back)
    assert torch.equal(torch.rand(3, generator=back["torch"]), expected[0])
    assert (back["numpy"].random(3) == expected[1]).all()
    assert back["python"].random() == expected[2]
    assert back["ema"].n_averaged == 1
    assert same(back["ema"], run["ema"])


def test_a_users_object_gets_tensors_where_it_gave_them(root: Path) -> None:
    class Average:
        def __init__(self) -> None:
            self.shadow: dict[str, Any] = {}

        def state_dict(self) -> dict[str, Any]:
            return {"shadow": self.shadow}

        def load_state_dict(self, state: Any) -> None:
            self.shadow = state["shadow"]

    average = Average()
    average.shadow = {"w": torch.arange(3.0), "b": torch.ones(2, dtype=torch.bfloat16)}
    sw.save(root, {"ema": average})
    empty = Average()
    sw.restore(root, into={"ema": empty})
    assert torch.equal(empty.shadow["w"], torch.arange(3.0))
    assert empty.shadow["b"].dtype is torch.bfloat16


def test_a_mismatch_lists_every_leaf_of_a_module(root: Path) -> None:
    sw.save(root, {"model": nn.Sequential(nn.Linear(2, 3), nn.Linear(3, 2))})
    target = nn.Sequential(nn.Linear(2, 4), nn.Linear(4, 2), nn.Linear(2, 2))
    before = {name: value.clone() for name, value in target.state_dict().items()}
    with pytest.raises(sw.MismatchError) as caught:
        sw.restore(root, into={"model": target})
    text = str(caught.value)
    assert "model/0.weight" in text
    assert "model/2.weight" in text
    assert all(torch.equal(value, before[name]) for name, value in target.state_dict().items())


def test_lora_on_top_of_a_base_keeps_what_the_checkpoint_has_not(root: Path) -> None:
    sw.save(root, {"model": nn.Linear(4, 4)})

    class Lora(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.lora_a = nn.Parameter(torch.full((2, 4), 3.0))

    model = Lora()
    sw.restore(root, into={"model": model}, missing={"**lora*": "keep"})
    assert torch.equal(model.lora_a, torch.full((2, 4), 3.0))


@pytest.mark.parametrize("form", ["module", "train state"])
def test_a_module_without_memory_is_refused_as_into(root: Path, form: str) -> None:
    source = nn.Linear(2, 3)
    wrap = sw.torch.TrainState if form == "train state" else lambda module: module
    sw.save(root, {"model": wrap(source)})
    with torch.device("meta"):
        target = nn.Linear(2, 3)
    with pytest.raises(sw.UnsupportedLeaf, match=r"`model`.*meta tensor.*to_empty"):
        sw.restore(root, into={"model": wrap(target)})
    found = sw.restore(root, like={"model": wrap(target)})["model"]
    found = found["model"] if form == "train state" else found
    assert torch.equal(found["weight"], source.weight)
    target.to_empty(device="cpu")
    sw.restore(root, into={"model": wrap(target)})
    assert same(source, target)


def stepped(make: Any, seed: int = 0) -> Any:
    """A small model with an optimizer that has made a step, as a state."""
    torch.manual_seed(seed)
    model = nn.Linear(4, 4)
    optimizer = make(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return sw.torch.TrainState(model, optimizer)


def fresh(make: Any, seed: int = 1) -> Any:
    torch.manual_seed(seed)
    model = nn.Linear(4, 4)
    return sw.torch.TrainState(model, make(model.parameters()))


def adam(parameters: Any) -> Any:
    return torch.optim.Adam(parameters, lr=1e-3, weight_decay=0.1)


def test_an_optimizer_class_keeps_its_invariants(root: Path) -> None:
    stored = stepped(adam)
    sw.save(root, {"train": stored})
    taken = fresh(torch.optim.AdamW)
    sw.restore(root, into={"train": taken})
    other = fresh(torch.optim.AdamW)
    other.optimizers[None].load_state_dict(stored.optimizers[None].state_dict())
    group, by_torch = (one.optimizers[None].param_groups[0] for one in (taken, other))
    assert {k: v for k, v in group.items() if k != "params"} == {
        k: v for k, v in by_torch.items() if k != "params"
    }
    assert group["decoupled_weight_decay"] is True
    assert group["weight_decay"] == 0.1
    again = fresh(adam)
    sw.restore(root, into={"train": again})
    assert (
        again.optimizers[None].state_dict()["param_groups"]
        == (stored.optimizers[None].state_dict()["param_groups"])
    )


def test_steps_stored_as_numbers_become_tensors(root: Path) -> None:
    state = stepped(adam).state_dict()
    for slots in state["optimizer"]["state"].values():
        slots["step"] = 1.0
    for group in state["optimizer"]["groups"]:
        for key in ("fused", "decoupled_weight_decay", "differentiable", "capturable", "foreach", "maximize"):
            del group[key]
    sw.save(root, {"train": state})
    taken = fresh(adam)
    sw.restore(root, into={"train": taken})
    model, optimizer = taken.model, taken.optimizers[None]
    assert all(
        float(slots["step"]) == 1 and torch.is_tensor(slots["step"]) for slots in optimizer.state.values()
    )
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()


OTHER_KINDS: dict[str, tuple[Any, Any, str]] = {
    "Adam into SGD": (adam, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), "momentum_buffer|betas"),
    "Adam into RMSprop": (adam, lambda p: torch.optim.RMSprop(p, lr=0.1), "square_avg|betas"),
    "Adamax into Adam": (torch.optim.Adamax, adam, "exp_inf"),
    "SGD into Adam": (lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9), adam, "momentum"),
    "SGD without slots into Adam": (lambda p: torch.optim.SGD(p, lr=0.1), adam, "momentum"),
    "SGD into LBFGS": (
        lambda p: torch.optim.SGD(p, lr=0.1),
        lambda p: torch.optim.LBFGS(list(p)),
        "max_iter",
    ),
}


@pytest.mark.parametrize("kinds", OTHER_KINDS)
@pytest.mark.parametrize("through", ["restore", "load_state_dict"])
def test_an_optimizer_of_another_kind_is_refused_unwritten(root: Path, kinds: str, through: str) -> None:
    stored, wanted, named = OTHER_KINDS[kinds]
    state = stepped(stored)
    sw.save(root, {"train": state})
    taken = fresh(wanted)
    model, optimizer = taken.model, taken.optimizers[None]
    before = model.weight.detach().clone()
    groups = [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    if through == "restore":
        with pytest.raises(sw.MismatchError, match=named) as caught:
            sw.restore(root, into={"train": taken})
        assert str(caught.value.leaf).startswith("train/optimizer/")
    else:
        with pytest.raises(sw.MisuseError, match=named) as caught:
            taken.load_state_dict(state.state_dict())
    assert "TrainState(model)" in str(caught.value)
    assert torch.equal(model.weight, before)
    assert not optimizer.state
    assert groups == [{k: v for k, v in group.items() if k != "params"} for group in optimizer.param_groups]
    alone = sw.torch.TrainState(model)
    sw.restore(root, into={"train": alone}, unexpected="ignore")
    assert torch.equal(model.weight, state.model.weight)


def test_scheduler_entries_need_no_scheduler_in_the_target(root: Path) -> None:
    state = stepped(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    torch.optim.lr_scheduler.OneCycleLR(state.optimizers[None], 1.0, total_steps=10)
    sw.save(root, {"train": state})
    taken = fresh(lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9))
    sw.restore(root, into={"train": taken})
    assert taken.optimizers[None].param_groups[0]["max_lr"] == 1.0


@pytest.mark.parametrize(
    "name",
    [
        "Adadelta",
        "Adagrad",
        "Adam",
        "AdamW",
        "Adamax",
        "ASGD",
        "NAdam",
        "RAdam",
        "RMSprop",
        "Rprop",
        "SGD",
        "Adafactor",
    ],
)
def test_every_torch_optimizer_takes_its_own_state(root: Path, name: str) -> None:
    def make(parameters: Any) -> Any:
        return getattr(torch.optim, name)(parameters, lr=0.01)

    stored = stepped(make)
    sw.save(root, {"train": stored})
    for taken in (fresh(make), stepped(make, 1)):
        sw.restore(root, into={"train": taken})
        assert same(taken.model, stored.model)
        one, other = (state.optimizers[None] for state in (taken, stored))
        for mine, theirs in zip(one.state.values(), other.state.values(), strict=True):
            assert mine.keys() == theirs.keys()
            assert all(torch.equal(mine[slot], theirs[slot]) for slot in mine)


@pytest.mark.parametrize("make", [torch.optim.AdamW, lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9)])
def test_torch_objects_get_tensors_from_plain_dicts(root: Path, make: Any) -> None:
    stored = stepped(make)
    model, optimizer = stored.model, stored.optimizers[None]
    hooked = nn.Linear(4, 4)
    hooked.register_load_state_dict_post_hook(lambda *_: None)
    state = {"model": model.state_dict(), "optim": optimizer.state_dict(), "hooked": hooked.state_dict()}
    sw.save(root, state)
    taken = fresh(make)
    other, by_torch = nn.Linear(4, 4), fresh(make).optimizers[None]
    other.register_load_state_dict_post_hook(lambda *_: None)
    sw.restore(root, into={"model": taken.model, "optim": taken.optimizers[None], "hooked": other})
    by_torch.load_state_dict(optimizer.state_dict())
    assert same(taken.model, model)
    assert same(other, hooked)
    for mine, theirs in zip(taken.optimizers[None].state.values(), by_torch.state.values(), strict=True):
        assert all(torch.equal(mine[slot], theirs[slot]) for slot in theirs)
    found = sw.restore(root, like={"optim": taken.optimizers[None]})["optim"]
    assert all(torch.is_tensor(one) for slots in found["state"].values() for one in slots.values())


def test_a_raising_loader_is_named_with_what_was_filled(root: Path) -> None:
    class Counter:
        def state_dict(self) -> dict[str, int]:
            return {"n": 1}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise ValueError("never")

    sw.save(root, {"counter": Counter(), "model": stepped(torch.optim.AdamW).model})
    with pytest.raises(sw.LoadFailed, match=r"`counter`.*Counter.*never") as caught:
        sw.restore(root, into={"counter": Counter(), "model": nn.Linear(4, 4)})
    assert caught.value.leaf == "counter"
    assert caught.value.overwritten == ("model/weight", "model/bias", "counter")
    assert isinstance(caught.value.__cause__, ValueError)


def test_other_parameter_groups_are_refused_before_any_change(root: Path) -> None:
    stored = stepped(torch.optim.AdamW)
    sw.save(root, {"model": stored.model, "optim": stored.optimizers[None]})
    model = nn.Linear(4, 4)
    before = model.weight.detach().clone()
    one, two = model.parameters()
    for groups in ([{"params": [one]}, {"params": [two]}], [{"params": [one]}]):
        wanted = {"model": model, "optim": torch.optim.AdamW(groups)}
        with pytest.raises(sw.MismatchError, match=r"`optim`.*parameter groups have \[2\].*TrainState"):
            sw.restore(root, into=wanted)
        assert torch.equal(model.weight, before)


@pytest.mark.parametrize("live", [False, True])
def test_slots_of_another_parameter_are_refused(root: Path, live: bool) -> None:
    def net() -> torch.nn.Sequential:
        return torch.nn.Sequential(torch.nn.Linear(8, 6), torch.nn.Linear(6, 4))

    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), amsgrad=True)
    model(torch.ones(2, 8)).sum().backward()
    optimizer.step()
    sw.save(root, {"optimizer": optimizer})
    torch.save({"optimizer": optimizer.state_dict()}, root.with_suffix(".pt"))
    other = net()
    wanted = torch.optim.AdamW(list(other.parameters())[::-1], amsgrad=True)
    if live:
        other(torch.ones(2, 8)).sum().backward()
        wanted.step()
    for path in (root, root.with_suffix(".pt")):
        with pytest.raises((sw.LoadFailed, sw.MismatchError), match=r"exp_avg"):
            sw.restore(path, into={"optimizer": wanted})
        assert all(slots["exp_avg"].shape == one.shape for one, slots in wanted.state.items())
    same = torch.optim.AdamW(other.parameters(), amsgrad=True)
    sw.restore(root, into={"optimizer": same})
    assert [slots["exp_avg"].shape for slots in same.state.values()] == [
        one.shape for one in other.parameters()
    ]


def test_memory_is_prepared_before_the_first_step(root: Path) -> None:
    model = torch.nn.Linear(64, 64)
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"train": sw.torch.TrainState(model, optimizer)}
    with sw.CheckpointManager(root) as mgr:
        assert mgr.prepare(state) == sum(one.nbytes for one in model.parameters())
        model(torch.ones(1, 64)).sum().backward()
        optimizer.step()
        assert mgr.prepare(state) >= 3 * sum(one.nbytes for one in model.parameters())


FOLLOWING: dict[str, Any] = {
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2),
    "fused AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "Adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "LBFGS": lambda p: torch.optim.LBFGS(p, max_iter=1, history_size=2),
}


def wide(width: int, dtype: Any, make: Any) -> tuple[Any, Any]:
    torch.manual_seed(width)
    model = nn.Sequential(nn.Linear(6, width), nn.Linear(width, 6)).to(dtype)
    return model, make(model.parameters())


def steps(model: Any, optimizer: Any, count: int) -> None:
    def closure() -> Any:
        optimizer.zero_grad()
        x = torch.arange(24.0).reshape(4, 6).to(model[0].weight.dtype) / 24
        loss = model(x).square().mean()
        loss.backward()
        return loss

    for _ in range(count):
        optimizer.step(closure)


@pytest.mark.parametrize("name", [name for name in FOLLOWING if name != "LBFGS"])
@pytest.mark.parametrize(("old", "new"), [(5, 8), (8, 5)])
def test_new_slots_are_resized_with_their_parameter(root: Path, name: str, old: int, new: int) -> None:
    source, target = (wide(width, torch.float32, FOLLOWING[name]) for width in (old, new))
    steps(*source, 2)
    sw.save(root, {"train": sw.torch.TrainState(*source)})
    with pytest.raises(sw.MismatchError):
        sw.restore(root, into={"train": sw.torch.TrainState(*target)})
    assert not target[1].state
    sw.restore(root, into={"train": sw.torch.TrainState(*target)}, resize="both")
    natural = wide(new, torch.float32, FOLLOWING[name])
    steps(*natural, 1)
    pairs = zip(source[0].parameters(), target[0].parameters(), natural[0].parameters(), strict=True)
    compared = 0
    for stored, own, other in pairs:
        assert source[1].state[stored].keys() == target[1].state[own].keys()
        for slot, value in target[1].state[own].items():
            assert value.shape == natural[1].state[other][slot].shape
            if slot == "step":
                assert value == 2
                continue
            was = source[1].state[stored][slot]
            common = tuple(slice(min(a, b)) for a, b in zip(was.shape, value.shape, strict=True))
            assert torch.equal(value[common], was[common])
            rest = value.clone()
            rest[common] = 0
            assert not rest.any()
            compared += 1
    assert compared
    steps(*target, 2)


@pytest.mark.parametrize("name", FOLLOWING)
@pytest.mark.parametrize(
    ("old", "new"), [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)], ids=str
)
@pytest.mark.parametrize("through", ["restore", "load_state_dict"])
def test_new_slots_are_cast_with_their_parameter(
    root: Path, name: str, old: Any, new: Any, through: str
) -> None:
    source, target = (wide(5, dtype, FOLLOWING[name]) for dtype in (old, new))
    steps(*source, 3)
    state = sw.torch.TrainState(*source)
    if through == "restore":
        sw.save(root, {"train": state})
        sw.restore(root, into={"train": sw.torch.TrainState(*target)}, cast="lossy")
    else:
        sw.torch.TrainState(*target).load_state_dict(state.state_dict())
    natural = wide(5, new, FOLLOWING[name])
    steps(*natural, 3)
    stored = list(source[1].state.values())
    compared = 0
    for was, mine, other in zip(stored, target[1].state.values(), natural[1].state.values(), strict=True):
        assert was.keys() == mine.keys() == other.keys()
        for slot, value in mine.items():
            for one, theirs, whence in zip(*map(flat, (value, other[slot], was[slot])), strict=True):
                # Numbers of no dimension compute with tensors of any dtype.
                assert not one.ndim or one.dtype == theirs.dtype, slot
                assert torch.equal(one, whence.to(one.dtype)), slot
                compared += 1
    assert compared
    steps(*target, 2)


def flat(slot: Any) -> list[Any]:
    values = slot if isinstance(slot, list) else [slot]
    return [one for one in values if isinstance(one, torch.Tensor)]


def test_slots_of_a_dtype_of_their_own_keep_it(root: Path) -> None:
    class Precise(torch.optim.SGD):
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for parameter in group["params"]:
                    self.state[parameter].setdefault("mean", torch.ones(parameter.shape) / 3)

    source, target = (wide(5, torch.bfloat16, lambda p: Precise(p, lr=0.1)) for _ in range(2))
    source[1].step()
    sw.save(root, {"train": sw.torch.TrainState(*source)})
    sw.restore(root, into={"train": sw.torch.TrainState(*target)})
    for slots in target[1].state.values():
        assert slots["mean"].dtype == torch.float32
        assert (slots["mean"] == torch.ones(()) / 3).all()
    assert len(target[1].state) == 4


def dtypes(optimizer: Any) -> set[Any]:
    """Those of the slots that are no counters."""
    return {one.dtype for slots in optimizer.state.values() for one in slots.values() if one.ndim}


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
@pytest.mark.parametrize("form", ["train state", "load_state_dict", "optimizer"])
def test_slots_that_were_cast_on_save_follow_their_parameter(root: Path, name: str, form: str) -> None:
    source, target = (wide(5, torch.float32, FOLLOWING[name]) for _ in range(2))
    steps(*source, 2)
    if form == "optimizer":
        sw.save(root, {"model": source[0], "optimizer": source[1]}, cast={"optimizer": "bfloat16"})
        sw.restore(root, into={"model": target[0], "optimizer": target[1]})
    else:
        sw.save(root, {"train": sw.torch.TrainState(*source)}, cast={"train/optimizer": "bfloat16"})
        taken = sw.torch.TrainState(*target)
        if form == "load_state_dict":
            taken.load_state_dict(sw.restore(root, to="torch")["train"])
        else:
            sw.restore(root, into={"train": taken})
    assert dtypes(target[1]) == {torch.float32}
    pairs = zip(source[1].state.values(), target[1].state.values(), strict=True)
    for was, now in pairs:
        for slot, value in was.items():
            assert torch.equal(now[slot], value.to(torch.bfloat16).float() if value.ndim else value)
    steps(*target, 2)


def test_an_explicit_cast_decides_for_new_slots(root: Path) -> None:
    source, target = (wide(5, torch.float32, FOLLOWING["AdamW"]) for _ in range(2))
    steps(*source, 2)
    sw.save(root, {"train": sw.torch.TrainState(*source)}, cast={"train/optimizer": "bfloat16"})
    cast = {"train/optimizer/**/exp_avg_sq": "float64", "train/optimizer/{state,x}/**/exp_avg": "lossy"}
    _, report = sw.restore(root, into={"train": sw.torch.TrainState(*target)}, cast=cast, return_report=True)
    slots = target[1].state[target[0][0].weight]
    assert slots["exp_avg_sq"].dtype == torch.float64
    assert slots["exp_avg"].dtype == torch.float32
    assert slots["step"].dtype == torch.float32
    assert (
        sw.results.CastLeaf("train/optimizer/state/0.weight/exp_avg_sq", "bfloat16", "float64") in report.cast
    )


KEEPING: dict[str, Any] = {"all": "keep", "a pattern": {"train/optimizer/**": "keep"}}


@pytest.mark.parametrize("missing", KEEPING)
@pytest.mark.parametrize("through", ["restore", "resume", "like"])
@pytest.mark.parametrize("several", [False, True])
def test_a_run_starts_from_weights_alone(
    root: Path, missing: str, through: str, several: bool, caplog: pytest.LogCaptureFixture
) -> None:
    source, target = (wide(5, torch.float32, FOLLOWING["AdamW"]) for _ in range(2))
    steps(*source, 2)
    own = torch.optim.AdamW(target[0].parameters(), lr=7.0)
    state = {"train": sw.torch.TrainState(target[0], {"main": own} if several else own)}
    with sw.CheckpointManager(root) as manager:
        manager.save(3, {"train": sw.torch.TrainState(*source)}, include="train/model/**").result()
        with pytest.raises(sw.MismatchError, match="train/optimizer"):
            manager.restore(into=state)
        if through == "resume":
            _, first = manager.resume(state, missing=KEEPING[missing])
            assert first == 4
        elif through == "restore":
            _, report = manager.restore(into=state, missing=KEEPING[missing], return_report=True)
            assert [path for path in report.kept if path.endswith("groups")] == report.kept
            assert not report.unmatched
        else:
            found = manager.restore(like=state, missing=KEEPING[missing])["train"]
            optimizer = found["optimizer"]["main"] if several else found["optimizer"]
            assert optimizer["groups"][0]["lr"] == 7.0
            assert optimizer["state"] == {}
            return
    assert not [one for one in caplog.records if "match nothing" in one.getMessage()]
    assert same(source[0], target[0])
    assert not own.state
    assert own.param_groups[0]["lr"] == 7.0
    steps(target[0], own, 2)


def test_a_live_optimizer_stays_where_only_weights_are_read(root: Path) -> None:
    source, target = (wide(5, torch.float32, FOLLOWING["AdamW"]) for _ in range(2))
    steps(*source, 2)
    steps(*target, 1)
    sw.save(root, {"train": sw.torch.TrainState(*source)})
    sw.restore(root, into={"train": sw.torch.TrainState(*target)}, include="train/model")
    assert same(source[0], target[0])
    assert {float(slots["step"]) for slots in target[1].state.values()} == {1.0}


def test_a_train_state_as_like_gives_tensors_alone(root: Path) -> None:
    source, target = (wide(5, torch.float32, FOLLOWING["AdamW"]) for _ in range(2))
    steps(*source, 2)
    sw.save(root, {"train": sw.torch.TrainState(*source)})
    found = sw.restore(root, like={"train": sw.torch.TrainState(*target)})["train"]
    for slots in found["optimizer"]["state"].values():
        assert all(isinstance(one, torch.Tensor) for one in slots.values()), slots
    assert not target[1].state
    sw.torch.TrainState(*target).load_state_dict(found)
    steps(*target, 2)


def test_slots_of_an_ignored_parameter_are_ignored(root: Path) -> None:
    old, new = Named("body", "head"), Named("body")
    before, after = after_one_step(old), torch.optim.AdamW(new.parameters())
    sw.save(root, {"train": sw.torch.TrainState(old, before)})
    state = {"train": sw.torch.TrainState(new, after)}
    with pytest.raises(sw.MismatchError, match="head"):
        sw.restore(root, into=state)
    ignoring = {"train/model/head.*": "ignore"}
    _, report = sw.restore(root, into=state, unexpected=ignoring, return_report=True)
    assert torch.equal(new.body.weight, old.body.weight)
    assert set(after.state) == set(new.body.parameters())
    assert not report.unmatched
    assert "train/optimizer/state/head.bias/exp_avg" in report.ignored
    with pytest.raises(sw.MismatchError, match="exp_avg"):
        sw.restore(root, into=state, unexpected={"**/exp_avg": "error", **ignoring})


def test_a_slot_that_cannot_follow_a_resize_is_named(root: Path) -> None:
    source, target = (wide(width, torch.float32, FOLLOWING["LBFGS"]) for width in (5, 8))
    steps(*source, 2)
    sw.save(root, {"train": sw.torch.TrainState(*source)})
    before = target[0][0].weight.detach().clone()
    with pytest.raises(sw.MismatchError, match="a slot cannot follow its parameter") as caught:
        sw.restore(root, into={"train": sw.torch.TrainState(*target)}, resize="both")
    assert caught.value.leaf == "train"
    assert torch.equal(target[0][0].weight, before)


def test_new_slots_that_are_not_read_are_not_made(root: Path) -> None:
    source, target = (wide(5, torch.float32, FOLLOWING["SGD"]) for _ in range(2))
    steps(*source, 2)
    sw.save(root, {"train": sw.torch.TrainState(*source)})
    sw.restore(root, into={"train": sw.torch.TrainState(*target)}, exclude="train/optimizer/state/0.*/**")
    assert set(target[1].state) == set(target[0][1].parameters())


def test_excluded_hyperparameters_keep_the_new_run_s_values(root: Path) -> None:
    source = wide(5, torch.float32, lambda p: torch.optim.SGD(p, lr=1, momentum=0.9))
    target = wide(5, torch.float32, lambda p: torch.optim.SGD(p, lr=2, momentum=0.9))
    steps(*source, 1)
    sw.save(root, {"train": sw.torch.TrainState(*source)})
    state = {"train": sw.torch.TrainState(*target)}
    sw.restore(root, into=state, exclude="train/optimizer/groups[*]/lr")
    assert target[1].param_groups[0]["lr"] == 2
    assert len(target[1].state) == 4
    sw.restore(root, into=state)
    assert target[1].param_groups[0]["lr"] == 1


class Named(nn.Module):
    """A model of two layers with these names."""

    def __init__(self, *names: str) -> None:
        super().__init__()
        for name in names:
            self.add_module(name, nn.Linear(4, 4))

    def forward(self, x: Any) -> Any:
        for layer in self.children():
            x = layer(x)
        return x


def after_one_step(model: Any, **options: Any) -> Any:
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize("several", [None, "list", "dict"])
@pytest.mark.parametrize("live", [False, True])
def test_a_renamed_parameter_takes_its_slots_along(root: Path, several: str | None, live: bool) -> None:
    def train(model: Any, optimizer: Any) -> Any:
        several_of = {None: optimizer, "list": [optimizer], "dict": {"a*": optimizer}}
        return sw.torch.TrainState(model, several_of[several])

    old, new = Named("body", "head"), Named("trunk", "body")
    before = after_one_step(old, lr=1e-2)
    after = after_one_step(new, lr=5) if live else torch.optim.AdamW(new.parameters(), lr=5)
    sw.save(root, {"train": train(old, before)})
    # The old body is the new trunk, and the old head is the new body.
    rename = {"train/model/body.*": "train/model/trunk.*", "train/model/head.*": "train/model/body.*"}
    _, report = sw.restore(
        root, into={"train": train(new, after)}, rename=rename, return_report=True, cast="exact"
    )
    for was, now in zip(old.parameters(), new.parameters(), strict=True):
        assert torch.equal(was, now)
        assert before.state[was].keys() == after.state[now].keys()
        for slot, value in before.state[was].items():
            assert torch.equal(value, after.state[now][slot])
    assert after.param_groups[0]["lr"] == 1e-2
    assert sw.results.RenamedLeaf("train/model/body.bias", "train/model/trunk.bias") in report.renamed


def test_a_new_layer_keeps_its_values_and_gets_fresh_slots(root: Path) -> None:
    old, new = Named("body"), Named("body", "head")
    before, after = after_one_step(old), torch.optim.AdamW(new.parameters())
    sw.save(root, {"train": sw.torch.TrainState(old, before)})
    head = new.head.weight.detach().clone()
    state = {"train": sw.torch.TrainState(new, after)}
    with pytest.raises(sw.MismatchError, match='missing="keep"'):
        sw.restore(root, into=state)
    sw.restore(root, into=state, missing="keep")
    assert torch.equal(new.body.weight, old.body.weight)
    assert torch.equal(new.head.weight, head)
    assert set(after.state) == set(new.body.parameters())
    new(torch.ones(2, 4)).sum().backward()
    after.step()
    assert after.state[new.head.weight]["step"] == 1
    assert after.state[new.body.weight]["step"] == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_a_grown_parameter_keeps_its_fresh_rows(root: Path, dtype: Any) -> None:
    small, large = nn.Linear(4, 2), nn.Linear(4, 5, dtype=dtype)
    before, after = after_one_step(small), torch.optim.AdamW(large.parameters())
    sw.save(root, {"train": sw.torch.TrainState(small, before)})
    fresh = large.weight.detach().clone()
    sw.restore(root, into={"train": sw.torch.TrainState(large, after)}, resize="keep")
    assert torch.equal(large.weight[:2], small.weight.to(dtype))
    assert torch.equal(large.weight[2:], fresh[2:])
    slot = after.state[large.weight]["exp_avg"]
    assert torch.equal(slot[:2], before.state[small.weight]["exp_avg"].to(dtype))
    assert not slot[2:].any()


def test_trainable_only_saves_the_trained_leaves(root: Path) -> None:
    def frozen(seed: int) -> tuple[Any, Any, Any]:
        model, _, _ = build(seed)
        model.embed.weight.requires_grad_(False)
        model.conv.weight.requires_grad_(False)
        trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        return model, optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 20)

    def state(parts: tuple[Any, Any, Any]) -> dict[str, Any]:
        return {"train": sw.torch.TrainState(*parts, trainable_only=True)}

    run = frozen(0)
    train(run, 5)
    sw.save(root, state(run))
    with sw.open(root) as checkpoint:
        stored = set(checkpoint["train/model"])
    buffers = {"norm.running_mean", "norm.running_var", "norm.num_batches_tracked"}
    assert stored == {"conv.bias", "norm.weight", "norm.bias", *buffers}
    resumed = frozen(7)
    before = {name: value.clone() for name, value in resumed[0].state_dict().items()}
    sw.restore(root, into=state(resumed))
    for name, value in resumed[0].state_dict().items():
        assert torch.equal(value, run[0].state_dict()[name] if name in stored else before[name]), name
    assert resumed[1].state_dict()["state"].keys() == run[1].state_dict()["state"].keys()
    # With the same frozen part, training goes on as if nothing had happened.
    resumed[0].load_state_dict(run[0].state_dict())
    assert train(resumed, 3, seed=1) == train(run, 3, seed=1)
    frozen = nn.Linear(2, 2).requires_grad_(False)
    with pytest.raises(sw.MisuseError, match="no parameter of the model requires gradients"):
        sw.save(root, {"train": sw.torch.TrainState(frozen, trainable_only=True)}, exists="replace")


def test_trainable_only_works_with_a_model_that_loads_itself(root: Path) -> None:
    class Loads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = nn.Linear(3, 3).requires_grad_(False)
            self.lora = nn.Linear(3, 3)

        def load_state_dict(self, *args: Any, **keywords: Any) -> Any:
            self.loaded = True
            return super().load_state_dict(*args, **keywords)

    one, other = Loads(), Loads()
    base = other.base.weight.clone()
    sw.save(root, {"m": sw.torch.TrainState(one, trainable_only=True)})
    sw.restore(root, into={"m": sw.torch.TrainState(other, trainable_only=True)})
    assert other.loaded
    assert torch.equal(other.lora.weight, one.lora.weight)
    assert torch.equal(other.base.weight, base)


def test_an_optimizer_is_no_scheduler() -> None:
    model = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    with pytest.raises(sw.MisuseError, match="takes a learning rate scheduler, not SGD"):
        sw.torch.TrainState(model, optimizer, optimizer)


@pytest.mark.filterwarnings("error")
def test_a_metric_may_require_gradients(root: Path) -> None:
    with sw.CheckpointManager(root) as manager:
        manager.save(0, {"x": 1}, metrics={"loss": torch.ones((), requires_grad=True)}).result()
        assert manager.metrics(0) == {"loss": 1.0}


def test_a_missing_leaf_names_the_stored_one_it_is_tied_to(tmp_path: Path) -> None:
    model = torch.nn.ModuleDict({name: torch.nn.Linear(2, 2, bias=False) for name in "ab"})
    model["b"].weight = model["a"].weight
    sw.save(tmp_path / "c", {"a.weight": torch.ones(2, 2)})
    with pytest.raises(
        sw.MismatchError, match=r"`b.weight` is tied to `a.weight`, which is stored"
    ) as caught:
        sw.restore(tmp_path / "c", into=model)
    assert 'pass missing={"b.weight": "keep"}' in str(caught.value)
    sw.restore(tmp_path / "c", into=model, missing={"b.weight": "keep"})
    assert (model["b"].weight == 1).all()
