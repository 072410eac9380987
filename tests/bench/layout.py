"""Which rank has which box of which tensor: the layouts between which the resharding bench
restores, the same for every contestant."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import prod
from typing import Any, Literal

import numpy as np
from workloads import State, _llama, _train_state

#: One layer of a larger model: its matrices have the sizes that count here.
LAYERS = 1
#: Tensors that tensor parallelism cuts along their rows, and along their columns. Other tensors are
#: on all ranks.
BY_ROWS = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "embed", "lm_head")
BY_COLUMNS = ("o_proj", "down_proj")

#: The axis along which a tensor is cut: tensor parallelism; the same with every matrix cut along
#: its other axis; FSDP, along the first.
Cut = Literal["tensor", "swapped", "fsdp"]

Box = tuple[slice, ...]


def llama_layer(rng: np.random.Generator) -> State:
    """1.2 GB: bf16 weights, fp32 master weights and Adam's two moments."""
    return _train_state(_llama(hidden=2048, inner=5632, layers=LAYERS, vocabulary=8000), rng)


def small_layer(rng: np.random.Generator) -> State:
    """A quarter of it, for a look: small boxes have more of what is read beside them."""
    return _train_state(_llama(hidden=1024, inner=2816, layers=LAYERS, vocabulary=4000), rng)


@dataclass(frozen=True)
class Layout:
    """Tensors cut over ``ranks``, in a pipeline of ``pp`` stages with as many ranks each."""

    ranks: int
    pp: int = 1
    cut: Cut = "tensor"

    @property
    def world(self) -> int:
        return self.ranks * self.pp

    def axis(self, name: str) -> int | None:
        """Along which a tensor is cut."""
        if self.cut == "fsdp":
            return 0
        part = name.removesuffix(".weight").rpartition(".")[2]
        if part not in BY_ROWS + BY_COLUMNS:
            return None
        return int((part in BY_COLUMNS) != (self.cut == "swapped"))

    def stage(self, name: str) -> int:
        """The pipeline's stage that has a tensor: embedding, attention, MLP and head follow each
        other."""
        if name.startswith("embed"):
            place = 0
        elif name.startswith("layers."):
            _, layer, part, *_ = name.split(".")
            place = 1 + 2 * int(layer) + (part in ("mlp", "post_attention_layernorm"))
        else:
            place = 1 + 2 * LAYERS
        return place * self.pp // (2 + 2 * LAYERS)

    def box(self, name: str, shape: tuple[int, ...], rank: int) -> Box | None:
        """Returns a rank's part of a tensor, as ``torch.chunk`` cuts it; ``None`` if another stage
        has it."""
        stage, at = divmod(rank, self.ranks)
        if self.stage(name) != stage:
            return None
        box = [slice(0, n) for n in shape]
        axis = self.axis(name)
        if axis is not None:
            length = -(-shape[axis] // self.ranks)
            box[axis] = slice(min(shape[axis], at * length), min(shape[axis], (at + 1) * length))
        return tuple(box)

    def of(self, state: State, rank: int, make: Callable[[np.ndarray, Box], Any]) -> dict[str, Any]:
        """The part of the state that a rank has, each tensor as ``make`` has it of the whole one
        and the box."""

        def made(tree: dict[str, Any]) -> dict[str, Any]:
            found: dict[str, Any] = {}
            for name, value in tree.items():
                if isinstance(value, dict):
                    found[name] = made(value)
                elif (box := self.box(name, value.shape, rank)) is not None:
                    found[name] = make(value, box)
            return found

        return made(state)

    def needed(self, state: State, rank: int) -> int:
        """Bytes that a rank has."""
        sizes: list[int] = []
        self.of(state, rank, lambda array, box: sizes.append(extent_bytes(array, box)))
        return sum(sizes)


def extent(box: Box) -> tuple[int, ...]:
    """The shape of a box."""
    return tuple(one.stop - one.start for one in box)


def offset(box: Box) -> tuple[int, ...]:
    """The place of its first element."""
    return tuple(one.start for one in box)


def extent_bytes(array: np.ndarray, box: Box) -> int:
    return prod(extent(box)) * array.itemsize


def held(array: np.ndarray, box: Box) -> np.ndarray:
    """A box in memory of its own."""
    return np.array(array[box], order="C")


def empty(array: np.ndarray, box: Box) -> np.ndarray:
    """Memory for a box, every page touched."""
    return np.full(extent(box), 0, array.dtype)
