"""The moments of a real optimizer go through a recipe with their parameters: from torch's AdamW to
Megatron's optimizer and back, with equal training on both sides."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import megatron_models as megatron
import pytest
import stepwell as sw

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

from longer import some
from test_recipe_outputs import FAMILIES, PADDED, VOCAB

torch = pytest.importorskip("torch")

RATE = 1e-3
SLOTS = ("exp_avg", "exp_avg_sq")
#: The recipes, and their parameters for a state of training of transformers.
RECIPES: dict[str, dict[str, int]] = {
    "llama": {},
    "gpt2": {},
    "gemma2": {},
    "qwen3-moe": {"fused_experts": 1},
    "deepseek": {"fused_experts": 1},
    "mistral": {},
    "qwen2": {},
    "qwen2-moe": {"fused_experts": 1},
    "qwen3": {},
    "mixtral": {"fused_experts": 1},
    "gemma": {},
    "gemma3": {},
}


@pytest.fixture(scope="module", autouse=True)
def _megatron() -> Iterator[None]:
    with megatron.one_process():
        yield


def batch(step: int) -> Any:
    # The first ids may be padding, which gets no gradient in transformers.
    return torch.randint(4, VOCAB, (2, 16), generator=torch.Generator().manual_seed(step))


def loss(logits: Any) -> Any:
    """A loss of all logits. Megatron has more of them."""
    return logits[..., :VOCAB].square().mean()


class Ours:
    """The model of transformers with AdamW."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.family = FAMILIES[name]
        self.model = self.family.of_hugging_face()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=RATE, weight_decay=0.0)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        loss(self.model(batch(number)).logits).backward()
        self.optimizer.step()

    def save(self, path: Path) -> None:
        sw.save(path, sw.torch.TrainState(self.model, self.optimizer))
        self.model.config.save_pretrained(path.parent / "config")

    def stored(self) -> set[str]:
        """The names of the weights, each tensor once."""
        names = set(self.model.state_dict())
        is_tied = self.model.get_output_embeddings().weight is self.model.get_input_embeddings().weight
        return names - {"lm_head.weight"} if is_tied else names

    def there(self, folder: Path) -> sw.maps.Map:
        """The recipe for a state of training."""
        parameters = {**self.family.parameters, **RECIPES[self.name], "padded_vocab": PADDED}
        return sw.maps.recipe(self.family.recipe, config=folder / "config", training=1, **parameters)


def close(found: Any, expected: Any, name: str) -> None:
    """Both sides sum in other orders. Lost moments would change 1e-2 of the weights."""
    difference = (torch.as_tensor(found) - torch.as_tensor(expected)).abs().max()
    assert difference <= 5e-4 * torch.as_tensor(expected).abs().max(), name


@pytest.fixture(params=some(list(RECIPES), 5))
def trained(request: pytest.FixtureRequest, tmp_path: Path) -> tuple[Ours, Any]:
    """Both sides after two equal steps, from the same weights."""
    ours = Ours(request.param)
    theirs = megatron.Training(ours.family.of_megatron(ours.model), RATE)
    ours.save(tmp_path / "start")
    weights = ours.there(tmp_path).with_parameters(training=0)
    sw.convert(tmp_path / "start", tmp_path / "weights", to="megatron", subtree="model", map=weights)
    megatron.load(theirs.model.module, tmp_path / "weights")
    for number in range(2):
        ours.step(number)
        theirs.step(loss, batch(number))
    return ours, theirs


def test_both_sides_have_the_moments_that_the_recipe_maps(trained: tuple[Ours, Any], tmp_path: Path) -> None:
    ours, theirs = trained
    ours.save(tmp_path / "ours")
    theirs.save(tmp_path / "theirs")
    mapped = sw.restore(tmp_path / "ours", map=ours.there(tmp_path), include=["optimizer.state.exp_avg*.*"])
    stored = sw.restore(tmp_path / "theirs")
    moments = [name for name in stored if name.startswith("optimizer.state.exp_avg")]
    assert sorted(moments) == sorted(mapped)
    trained = [key for key in megatron.keys(theirs.model.module) if "expert_bias" not in key]
    assert {f"optimizer.state.{slot}.{key}" for key in trained for slot in SLOTS} == set(moments)
    for name in moments:
        assert stored[name].any()
        close(mapped[name], stored[name], name)


def test_training_goes_on_in_megatron(trained: tuple[Ours, Any], tmp_path: Path) -> None:
    ours, theirs = trained
    theirs.save(tmp_path / "theirs")
    ours.save(tmp_path / "ours")
    sw.convert(tmp_path / "ours", tmp_path / "dcp", to="dcp", map=ours.there(tmp_path), objects="skip")
    fresh = megatron.Training(ours.family.of_megatron(ours.model), RATE)
    fresh.load(tmp_path / "dcp", tmp_path / "theirs")
    for number in (2, 3):
        ours.step(number)
        theirs.step(loss, batch(number))
        fresh.step(loss, batch(number))
    expected = theirs.model.module.state_dict()
    for name, one in fresh.model.module.state_dict().items():
        if "_extra_state" not in name:
            close(one, expected[name], name)
    # The converted state comes back with the same bits, step counts too.
    with sw.open(tmp_path / "ours") as checkpoint:
        before = checkpoint.restore(exclude="optimizer/groups")
    back = sw.restore(tmp_path / "dcp", map=ours.there(tmp_path).inverse())
    # The directory has the common values of Megatron, too.
    assert back["optimizer"]["state"].pop("common_step") == 2
    assert same({name: before["model"][name] for name in ours.stored()}, back["model"])
    assert same(before["optimizer"]["state"], back["optimizer"]["state"])


def test_an_export_of_weights_leaves_the_optimizer_out(trained: tuple[Ours, Any], tmp_path: Path) -> None:
    ours, theirs = trained
    theirs.save(tmp_path / "theirs")
    back = ours.there(tmp_path).with_parameters(training=0).inverse()
    made = sw.export(tmp_path / "theirs", tmp_path / "hf", map=back, files=tmp_path / "config")
    assert not made.skipped
    weights = type(ours.model).from_pretrained(tmp_path / "hf").state_dict()
    assert sorted(weights) == sorted(ours.model.state_dict())
    with sw.open(tmp_path / "hf") as checkpoint:
        assert set(checkpoint) == ours.stored()


def same(one: Any, other: Any) -> bool:
    """True for equal trees of arrays, bit for bit."""
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(value, other[key]) for key, value in one.items())
    return bytes(one) == bytes(other)


def test_training_goes_on_in_torch(trained: tuple[Ours, Any], tmp_path: Path) -> None:
    ours, theirs = trained
    theirs.save(tmp_path / "theirs")
    state = sw.restore(tmp_path / "theirs", map=ours.there(tmp_path).inverse())
    # Megatron has one count for all parameters.
    steps = state["optimizer"]["state"]["common_step"]
    assert steps == 2
    fresh = Ours(ours.name)
    assert state["model"].keys() == ours.stored()
    weights = {name: torch.tensor(one) for name, one in state["model"].items()}
    fresh.model.load_state_dict(weights, strict=False)
    for name, one in fresh.model.named_parameters():
        slots = state["optimizer"]["state"][name]
        assert set(slots) == {"exp_avg", "exp_avg_sq"}
        fresh.optimizer.state[one] = {"step": torch.tensor(steps)} | {
            slot: torch.tensor(value) for slot, value in slots.items()
        }
    for number in (2, 3):
        ours.step(number)
        fresh.step(number)
    expected = dict(ours.model.named_parameters())
    for name, one in fresh.model.named_parameters():
        close(one.detach(), expected[name].detach(), name)
