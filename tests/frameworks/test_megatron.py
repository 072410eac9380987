"""Megatron's sharded state dicts, with its real classes: saved on one grid of pipeline, tensor and
data parallelism, restored on others (threads are the ranks)."""

from __future__ import annotations

import sys
import warnings
from collections import OrderedDict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

from threads import together

torch = pytest.importorskip("torch")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")
    pytest.importorskip("megatron.core.dist_checkpointing.mapping")
    from megatron.core.dist_checkpointing.mapping import (
        LocalNonpersistentObject,
        ShardedObject,
        ShardedTensor,
        ShardedTensorFactory,
    )
    from megatron.core.ssm.mamba_mixer import _split_tensor_factory
    from megatron.core.transformer.mlp import apply_swiglu_sharded_factory

LAYERS, HIDDEN, FFN, VOCAB = 4, 6, 8, 10
SECTIONS = {"z": 8, "x": 8, "dt": 4}


def whole(name: str, *shape: int) -> np.ndarray[Any, Any]:
    """A tensor whose elements are told by name and place."""
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape) + 1000 * sum(map(ord, name))


def of_layers(name: str, *shape: int) -> np.ndarray[Any, Any]:
    """The same for a tensor of all layers."""
    return whole(name, LAYERS, *shape)


#: The stored tensors by key: Megatron's own names, and whole tensors.
STORED = {
    "embedding.word_embeddings.weight": whole("embed", VOCAB, HIDDEN),
    "decoder.layers.self_attention.linear_qkv.weight": of_layers("qkv", FFN, HIDDEN),
    "decoder.layers.mlp.linear_fc1.weight": of_layers("fc1", 2 * FFN, HIDDEN),
    **{
        f"decoder.layers.mixer.in_proj.weight.{name}": of_layers(name, rows, HIDDEN)
        for name, rows in SECTIONS.items()
    },
    **{f"decoder.layers.{i}.norm.weight": whole(f"norm{i}", HIDDEN) for i in range(LAYERS)},
}
MOMENTS = {f"optimizer.state.exp_avg.{key}": whole(key, *STORED[key].shape) for key in list(STORED)[1:2]}


def cut(n: int, index: int, count: int) -> slice:
    """A part of equal ones."""
    return slice(n * index // count, n * (index + 1) // count)


class Grid:
    """A grid of ranks, and the sharded state dicts that Megatron makes there."""

    def __init__(self, pp: int, tp: int, dp: int, virtual: int = 1) -> None:
        self.pp, self.tp, self.dp, self.virtual = pp, tp, dp, virtual
        self.size = pp * tp * dp

    def __repr__(self) -> str:
        return f"pp{self.pp}tp{self.tp}dp{self.dp}vp{self.virtual}"

    def at(self, rank: int) -> tuple[int, int, int]:
        """Pipeline, data and tensor coordinates."""
        return rank // (self.tp * self.dp), rank // self.tp % self.dp, rank % self.tp

    def tensors(self, rank: int) -> dict[str, Any]:
        """Returns a rank's tensors by the names in its own modules. Each virtual stage has its own
        ``model<n>``."""
        pp, _, tp = self.at(rank)
        found: dict[str, Any] = {}
        per = LAYERS // (self.pp * self.virtual)
        for part in range(self.virtual):
            name = "model" if self.virtual == 1 else f"model{part}"
            first = (part * self.pp + pp) * per
            for i in range(per):
                layer = first + i
                own = f"{name}/decoder.layers.{i}"
                found[f"{own}.qkv"] = of_layers("qkv", FFN, HIDDEN)[layer][cut(FFN, tp, self.tp)]
                both = of_layers("fc1", 2, FFN, HIDDEN)[layer][:, cut(FFN, tp, self.tp)]
                found[f"{own}.fc1"] = both.reshape(-1, HIDDEN)
                found[f"{own}.mixer"] = np.concatenate(
                    [
                        of_layers(one, rows, HIDDEN)[layer][cut(rows, tp, self.tp)]
                        for one, rows in SECTIONS.items()
                    ]
                )
                found[f"{own}.norm"] = whole(f"norm{layer}", HIDDEN)
        rows = self.padded() // self.tp
        embedding = np.zeros((self.padded(), HIDDEN), np.float32)
        embedding[:VOCAB] = STORED["embedding.word_embeddings.weight"]
        if pp == 0:
            found["model/embed" if self.virtual == 1 else "model0/embed"] = embedding[tp * rows :][:rows]
        if pp == self.pp - 1 and self.pp > 1:
            last = "model" if self.virtual == 1 else f"model{self.virtual - 1}"
            found[f"{last}/output"] = embedding[tp * rows :][:rows]
        return found

    def padded(self) -> int:
        """The vocabulary, as Megatron pads it to a multiple."""
        return -(-VOCAB // (4 * self.tp)) * 4 * self.tp

    def state(self, rank: int, arrays: dict[str, Any]) -> dict[str, Any]:
        """Megatron's sharded state dict over these tensors."""
        pp, dp, tp = self.at(rank)
        state: dict[str, Any] = {"iteration": 7}
        moments: dict[int, Any] = {}
        per = LAYERS // (self.pp * self.virtual)
        for name, tensor in arrays.items():
            part, own = name.split("/")
            there = state.setdefault(part, {})
            if own in ("embed", "output"):
                # Tied: the last stage has it again, under the key of the first one's.
                there[own] = ShardedTensor.from_rank_offsets(
                    "embedding.word_embeddings.weight",
                    tensor,
                    (0, tp, self.tp),
                    replica_id=(int(own == "output"), 0, dp),
                    allow_shape_mismatch=True,
                )
                continue
            *_, i, kind = own.split(".")
            number = int(part.removeprefix("model") or 0)
            layer = (number * self.pp + pp) * per + int(i)
            if kind == "norm":
                there[own] = ShardedTensor.from_rank_offsets(
                    f"decoder.layers.{layer}.norm.weight", tensor, replica_id=(0, tp, dp)
                )
                continue
            key = {
                "qkv": "self_attention.linear_qkv",
                "fc1": "mlp.linear_fc1",
                "mixer": "mixer.in_proj",
            }[kind]
            stacked = ((0, layer, LAYERS),)
            leaf = ShardedTensor.from_rank_offsets(
                f"decoder.layers.{key}.weight",
                tensor,
                *stacked,
                (1, tp, self.tp),
                replica_id=(0, 0, dp),
                prepend_axis_num=1,
            )
            if kind == "fc1":
                leaf = apply_swiglu_sharded_factory(leaf, stacked)
            elif kind == "mixer":
                sizes = [rows // self.tp for rows in SECTIONS.values()]
                leaf = _split_tensor_factory(leaf, sizes, list(SECTIONS), 0)
            else:
                moments[len(moments)] = {"exp_avg": self.flat(leaf, dp)}
            there[own] = leaf
        state["optimizer"] = {
            "state": moments,
            "param_groups": [{"lr": 0.5, "params": LocalNonpersistentObject([rank])}],
        }
        return state

    def flat(self, of: Any, dp: int) -> Any:
        """The moment of a parameter, of which each rank of the data parallel group has a run of the
        flattened one: as older versions have it, in place."""
        key = f"optimizer.state.exp_avg.{of.key}"
        total = int(np.prod(of.local_shape))
        run = cut(total, dp, self.dp)
        box = tuple(slice(a, a + n) for a, n in zip(of.global_offset, (1, *of.local_shape), strict=True))
        mine = MOMENTS[key][box].reshape(-1)[run]
        leaf = ShardedTensor.from_rank_offsets(
            key,
            of.data,
            (0, of.global_offset[0], LAYERS),
            (1, of.global_offset[1] // of.local_shape[0], self.tp),
            prepend_axis_num=1,
        )
        # The constructor of this version takes none.
        leaf.data, leaf.flattened_range = torch.from_numpy(mine.copy()), run
        return leaf


def tensors_of(arrays: dict[str, Any]) -> dict[str, Any]:
    """As parameters of their own memory."""
    return {name: torch.from_numpy(np.array(one)) for name, one in arrays.items()}


GRIDS = [Grid(2, 2, 2), Grid(1, 4, 1), Grid(2, 1, 3, virtual=2), Grid(4, 1, 1), Grid(1, 1, 1)]


@pytest.mark.parametrize("saved", GRIDS, ids=repr)
def test_a_sharded_state_dict_goes_from_any_grid_to_any_other(root: Path, saved: Grid) -> None:
    def saves(rank: int, manager: sw.CheckpointManager) -> None:
        manager.save(0, saved.state(rank, tensors_of(saved.tensors(rank)))).result()

    together(saved.size, root, saves)
    found = sw.restore(root)
    assert found["iteration"] == 7
    assert found["optimizer"].pop("param_groups") == [{"lr": 0.5}]
    assert set(found["model"]) == set(STORED)
    padding = found["model"]["embedding.word_embeddings.weight"][VOCAB:]
    assert not padding.any()
    assert len(padding) == saved.padded() - VOCAB
    for key, expected in STORED.items():
        np.testing.assert_array_equal(found["model"][key][: len(expected)], expected, err_msg=key)
    assert set(found["optimizer"]) == set(MOMENTS)
    for key, expected in MOMENTS.items():
        np.testing.assert_array_equal(found["optimizer"][key], expected, err_msg=key)

    at = GRIDS.index(saved)
    for grid in (GRIDS * 2)[at + 1 : at + 3]:

        def restores(rank: int, manager: sw.CheckpointManager, grid: Grid = grid) -> None:
            expected = grid.tensors(rank)
            zeros = {name: torch.full(one.shape, -1.0) for name, one in expected.items()}
            state = grid.state(rank, zeros)
            flat = [one["exp_avg"] for one in state["optimizer"]["state"].values()]
            moments = [one.data.clone() for one in flat]
            for one in flat:
                one.data.zero_()
            leaves = dict(state["optimizer"]["state"][0])
            assert manager.restore(into=state) is state
            for name, one in expected.items():
                np.testing.assert_array_equal(zeros[name], one, err_msg=f"{name} on rank {rank} of {grid}")
            for leaf, moment in zip(flat, moments, strict=True):
                assert torch.equal(leaf.data, moment)
            assert state["optimizer"]["state"][0] == leaves, "the leaves are still there"
            assert state["optimizer"]["param_groups"][0]["lr"] == 0.5

            like = grid.state(rank, {name: torch.zeros(one.shape) for name, one in expected.items()})
            got = manager.restore(like=like)
            for name, one in expected.items():
                part, own = name.split("/")
                assert type(got[part][own]) is torch.Tensor
                np.testing.assert_array_equal(got[part][own], one, err_msg=f"{name} on rank {rank} of {grid}")
            for number, moment in enumerate(moments):
                assert torch.equal(got["optimizer"]["state"][number]["exp_avg"], moment)
            assert got["optimizer"]["param_groups"] == [{"lr": 0.5, "params": [rank]}]
            assert got["iteration"] == 7

        together(grid.size, root, restores)


def objects(rank: int, grid: Grid, value: Any) -> dict[str, Any]:
    """Random states for each place of pipeline and tensor parallelism, and what each layer has
    beside its tensors."""
    pp, dp, tp = grid.at(rank)
    return {
        "rng_state": ShardedObject("rng_state", value, (grid.pp, grid.tp), (pp, tp), replica_id=dp),
        "model": {
            f"layers.{i}._extra_state": ShardedObject(
                "layers._extra_state", torch.tensor([layer]), (LAYERS,), (layer,), replica_id=(0, tp, dp)
            )
            for i, layer in enumerate(range(LAYERS)[cut(LAYERS, pp, grid.pp)])
        },
    }


def rng(seed: int) -> list[Any]:
    """Returns Megatron's record of random generators."""
    state = np.random.RandomState(seed).get_state()
    return [
        {"numpy": state, "torch": torch.arange(seed, seed + 5, dtype=torch.uint8), "n": (3, (seed, 4), None)}
    ]


def test_objects_are_stored_for_each_place_in_their_grid(root: Path) -> None:
    saved, more = Grid(2, 2, 2), Grid(2, 2, 1)

    def own(rank: int, grid: Grid) -> list[Any]:
        # Other replicas have drifted: the main one's counts.
        pp, dp, tp = grid.at(rank)
        return rng(100 * dp + 10 * pp + tp)

    together(
        saved.size,
        root,
        lambda rank, manager: manager.save(0, objects(rank, saved, own(rank, saved))).result(),
    )
    found = sw.restore(root)
    assert set(found["rng_state"]) == {f"shard_{pp}.{tp}_2.2" for pp in (0, 1) for tp in (0, 1)}
    assert set(found["model"]["layers._extra_state"]) == {f"shard_{i}_{LAYERS}" for i in range(LAYERS)}

    def restores(rank: int, manager: sw.CheckpointManager) -> None:
        for how in ("into", "like"):
            state = objects(rank, more, rng(99))
            for leaf in state["model"].values():
                leaf.data = torch.tensor([-1])
            got = manager.restore(**{how: state})
            one = got["rng_state"] if how == "like" else got["rng_state"].data
            expected = own(rank, more)
            assert [list(one[0]), one[0]["n"]] == [list(expected[0]), expected[0]["n"]]
            assert torch.equal(one[0]["torch"], expected[0]["torch"])
            # It can be given back as it is.
            generator = np.random.RandomState(0)
            generator.set_state(one[0]["numpy"])
            assert generator.randint(1 << 30) == np.random.RandomState(
                10 * more.at(rank)[0] + more.at(rank)[2]
            ).randint(1 << 30)
            extra = [leaf if how == "like" else leaf.data for leaf in got["model"].values()]
            pp = more.at(rank)[0]
            assert torch.equal(torch.cat(extra), torch.arange(LAYERS)[cut(LAYERS, pp, more.pp)])

    together(more.size, root, restores)

    def elsewhere(rank: int, manager: sw.CheckpointManager) -> None:
        # Those of layers go with their layers, those of a grid of ranks do not go to another.
        grid = Grid(1, 2, 1)
        state = objects(rank, grid, rng(99))
        with pytest.raises((sw.MismatchError, sw.RankFailed), match=r"rng_state/shard_0.[01]_1.2"):
            manager.restore(like=state)
        del state["rng_state"]
        got = manager.restore(like=state)["model"]
        assert torch.equal(torch.cat(list(got.values())), torch.arange(LAYERS))

    together(2, root, elsewhere)


def test_what_megatron_would_pickle_is_refused_by_its_key(root: Path) -> None:
    class Anything:
        pass

    with sw.CheckpointManager(root) as manager:
        leaf = ShardedObject("state", {"a": [Anything()]}, (1,), (0,))
        with pytest.raises(sw.UnsupportedLeaf, match=r"`model/state/shard_0_1/a\[0\]`.*Anything"):
            manager.save(0, {"model": {"x": leaf}})
        assert manager.latest_step() is None


def plain(rank: int, key: str = "w", **changes: Any) -> Any:
    """A half of a tensor."""
    settings = {"replica_id": 0, **changes}
    data = settings.pop("data", torch.full((2, 3), float(rank)))
    return ShardedTensor.from_rank_offsets(key, data, settings.pop("cut", (0, rank, 2)), **settings)


def test_exactly_one_main_replica_writes(
    root: Path,
) -> None:
    def work(rank: int, manager: sw.CheckpointManager) -> None:
        def save(step: int, **changes: Any) -> None:
            manager.save(step, {"m": {"own name": plain(rank, **changes)}}).result()

        save(0)
        hole = r"`m/w`: no rank holds \[2:4, 0:3\] of its shape \[4, 3\]; ranks \[0\]"
        double = torch.zeros((2, 3), dtype=(torch.float32, torch.float64)[rank])
        refused: list[tuple[dict[str, Any], str]] = [
            ({"replica_id": rank}, hole),
            ({"replica_id": (0, rank)}, hole),
            ({"replica_id": 1}, r"`m/w`: no rank writes any part of it, of shape \[4, 3\]"),
            ({"cut": (0, 0, 2)}, r"`m/w`: ranks 0 and 1 both hold \[0:2, 0:3\]"),
            ({"cut": (0, 0, 1)}, r"`m/w`: ranks 0 and 1 both hold \[0:2, 0:3\]"),
            ({"cut": (0, rank, 2 + rank)}, r"`m/w`: ranks 0 and 1 disagree: .*\[4, 3\].*\[6, 3\]"),
            ({"data": double}, r"`m/w`: ranks 0 and 1 disagree: .*float32.*float64"),
        ]
        for step, (changes, why) in enumerate(refused, 1):
            with pytest.raises(sw.MismatchError, match=why):
                save(step, **changes)
        assert manager.latest_step() == 0

    together(2, root, work)
    np.testing.assert_array_equal(sw.restore(root)["m"]["w"], np.repeat([[0.0], [1.0]], 2, 0) * np.ones(3))


@dataclass
class Holder:
    """A container that Megatron does not walk."""

    leaf: Any


def test_what_cannot_stand_at_its_key_is_refused_by_it(tmp_path: Path) -> None:
    def flat(data: Any) -> Any:
        leaf = plain(0)
        leaf.data, leaf.flattened_range = data, slice(1, 4)
        return leaf

    whole_one = {"cut": (0, 0, 1)}
    for number, (state, why) in enumerate(
        [
            ({"m": Holder(plain(0))}, "`m/leaf`: a ShardedTensor of Megatron stands in a dict or a list"),
            ({"m": {"x": plain(0).without_data()}}, "`m/w`: a ShardedTensor without data belongs into like="),
            ({"m": {"x": plain(0, **whole_one), "w": 3}}, "`m/w`: an entry of this name stands beside"),
            (
                {"model": np.zeros(3), "model0": {"x": plain(0, **whole_one)}},
                "`model`: keys of Megatron's go here",
            ),
            (
                {"m": [plain(0), ShardedObject("w", 1, (1,), (0,))]},
                "`m/w`: a ShardedTensor and a ShardedObject",
            ),
            (
                {"m": [plain(0), plain(1, cut=(0, 2, 3))]},
                r"`m/w`: .*of shape \(4, 3\), and .*of shape \(6, 3\)",
            ),
            ({"m": [flat(torch.zeros(2))]}, "`m/w`: its flattened_range .* has not the 2 elements"),
        ]
    ):
        with pytest.raises(sw.UnsupportedLeaf, match=why):
            sw.save(tmp_path / str(number), state)


def test_factories_and_leaves_without_data_are_restored(
    tmp_path: Path,
) -> None:
    def turned(data: Any) -> Any:
        return ShardedTensorFactory(
            "t",
            data,
            lambda key, t, replica, run: {"turned": [ShardedTensor.from_rank_offsets(key, t.T.contiguous())]},
            lambda found: found["turned"][0].T,
        )

    def state(value: float) -> dict[str, Any]:
        return {
            "m": OrderedDict(
                a=plain(0, cut=(0, 0, 1), data=torch.full((2, 3), value)), b=turned(torch.full((2, 3), value))
            ),
            "here": [LocalNonpersistentObject(value), {"n": value}],
            "top": ShardedObject("elsewhere", {"seed": value}, (1,), (0,)),
        }

    path = tmp_path / "step"
    saved = state(2.0)
    saved["m"]["b"].data[0, 1] = 5.0
    sw.save(path, saved)
    stored = sw.restore(path)
    assert stored["m"]["t"].shape == (3, 2)
    assert stored["m"]["t"][1, 0] == 5.0
    assert stored["here"] == {1: {"n": 2.0}}
    assert stored["elsewhere"] == {"shard_0_1": {"seed": 2.0}}

    into = state(0.0)
    leaves, memory = dict(into["m"]), {name: leaf.data for name, leaf in into["m"].items()}
    sw.restore(path, into=into)
    assert into["m"] == leaves
    assert type(into["m"]) is OrderedDict
    for name, leaf in into["m"].items():
        assert leaf.data is memory[name]
        assert torch.equal(leaf.data, saved["m"][name].data)
    assert into["here"][0].unwrap() == 0.0
    assert into["here"][1] == {"n": 2.0}
    assert into["top"].data == {"seed": 2.0}
    # A filled state can be saved again.
    sw.save(tmp_path / "again", into)
    assert sw.restore(tmp_path / "again")["m"]["t"][1, 0] == 5.0

    got = sw.restore(path, like=state(0.0))
    assert torch.equal(got["m"]["b"], saved["m"]["b"].data)
    assert torch.equal(got["m"]["a"], saved["m"]["a"].data)
    assert got["here"] == [0.0, {"n": 2.0}]
    assert got["top"] == {"seed": 2.0}

    empty = state(0.0)
    empty["m"]["a"] = empty["m"]["a"].without_data()
    got = sw.restore(path, like=empty)
    assert torch.equal(got["m"]["a"], saved["m"]["a"].data)
    sw.restore(path, into=empty)
    assert torch.equal(empty["m"]["a"].data, saved["m"]["a"].data)

    # A tensor that is not there keeps what it has, where that is asked for.
    more = state(0.0)
    more["m"]["new"] = plain(0, key="new", cut=(0, 0, 1), data=torch.full((2, 3), 9.0))
    with pytest.raises(sw.MismatchError, match="m/new"):
        sw.restore(path, into=more)
    got = sw.restore(path, like=more, missing="keep")
    assert (got["m"]["new"] == 9.0).all()
    assert (got["m"]["a"] == 2.0).all()
    with sw.CheckpointManager(tmp_path / "run") as manager:
        manager.check(saved)
        assert manager.prepare(saved) == 2 * 2 * 3 * 4
        manager.save(0, saved).result()
        assert manager.plan(like=state(0.0)).report.restored
