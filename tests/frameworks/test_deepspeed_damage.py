"""Damaged and hostile checkpoints of DeepSpeed: each is refused, and the message names a file."""

from __future__ import annotations

import contextlib
import copy
import math
import shutil
import time
from collections import OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from safetensors.numpy import save_file

torch = pytest.importorskip("torch")

RANKS = 3
#: Two groups of parameters.
SHAPES = [{"a": (4, 5), "b": (7,)}, {"c": (2, 2), "d": ()}]
VALUES = {
    name: torch.arange(float(math.prod(shape))).reshape(shape) + 100 * number
    for number, (name, shape) in enumerate((SHAPES[0] | SHAPES[1]).items())
}

#: Files by name.
Content = dict[str, dict[str, Any]]


def model_state(**more: Any) -> dict[str, Any]:
    return {
        "module": OrderedDict((name, value.bfloat16()) for name, value in VALUES.items()),
        "buffer_names": [],
        "optimizer": None,
        "param_shapes": [OrderedDict((k, torch.Size(v)) for k, v in group.items()) for group in SHAPES],
        "frozen_param_shapes": None,
        "frozen_param_fragments": None,
        "shared_params": {},
        "lr_scheduler": None,
        "global_steps": 5,
        "mp_world_size": 1,
        "ds_version": "0.19.8",
        **more,
    }


def rows(rank: int, add: float, padded: bool) -> list[Any]:
    """The partitions of a rank of ZeRO-2."""
    found = []
    for group in SHAPES:
        flat = torch.cat([VALUES[name].flatten() + add for name in group])
        size = -(-len(flat) // (2 * RANKS)) * 2
        own = flat[rank * size : (rank + 1) * size]
        found.append(torch.cat([own, torch.zeros(size - len(own))]) if padded else own.clone())
    return found


def shares(rank: int, add: float) -> list[Any]:
    """The partitions of a rank of ZeRO-3."""
    found = []
    for group in SHAPES:
        parts = []
        for name in group:
            flat = VALUES[name].flatten() + add
            share = -(-len(flat) // RANKS)
            parts.append(torch.cat([flat, torch.zeros(share * RANKS - len(flat))])[rank * share :][:share])
        found.append(torch.cat(parts))
    return found


def base_state(slots: list[list[Any]]) -> dict[str, Any]:
    state = {
        number: {"step": torch.tensor(5.0), "exp_avg": one, "exp_avg_sq": other}
        for number, (one, other) in enumerate(zip(*slots, strict=True))
    }
    return {"state": state, "param_groups": [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}]}


def of_zero_2() -> Content:
    files: Content = {"mp_rank_00_model_states.pt": model_state()}
    for rank in range(RANKS):
        state = {
            "base_optimizer_state": base_state([rows(rank, 1000, True), rows(rank, 2000, True)]),
            "single_partition_of_fp32_groups": rows(rank, 0, False),
            "zero_stage": 2,
            "group_paddings": [
                len(one) - len(other)
                for one, other in zip(rows(rank, 0, True), rows(rank, 0, False), strict=True)
            ],
            "partition_count": [RANKS, RANKS],
            "ds_version": "0.19.8",
        }
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        files[name] = {"optimizer_state_dict": state, "ds_version": "0.19.8"}
    return files


def of_zero_3() -> Content:
    files: Content = {}
    for rank in range(RANKS):
        state = {
            "optimizer_state_dict": base_state([shares(rank, 1000), shares(rank, 2000)]),
            "fp32_flat_groups": shares(rank, 0),
            "zero_stage": 3,
            "partition_count": RANKS,
        }
        empty = {name: torch.zeros(0) for name in VALUES}
        files[f"zero_pp_rank_{rank}_mp_rank_00_model_states.pt"] = model_state(module=empty)
        files[f"zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"] = {"optimizer_state_dict": state}
    return files


MAKERS: dict[int, Callable[[], Content]] = {2: of_zero_2, 3: of_zero_3}


def write(directory: Path, files: Content) -> Path:
    directory.mkdir()
    for name, content in files.items():
        (directory / name).parent.mkdir(parents=True, exist_ok=True)
        torch.save(content, directory / name)
    return directory


def optimizer(files: Content, rank: int) -> dict[str, Any]:
    """The optimizer's part of a rank's file."""
    name = next(name for name in files if f"rank_{rank}_" in name and "optim" in name)
    return files[name]["optimizer_state_dict"]


def model(files: Content, rank: int = 0) -> dict[str, Any]:
    names = [name for name in files if "model" in name]
    return files[names[rank]]


@pytest.mark.parametrize("stage", MAKERS)
def test_sound_files_are_read(tmp_path: Path, stage: int) -> None:
    found = sw.restore(write(tmp_path / "c", MAKERS[stage]()))
    for name, value in VALUES.items():
        np.testing.assert_array_equal(found["model"][name], value)
        slots = found["optimizer"]["state"][name]
        np.testing.assert_array_equal(slots["exp_avg"], value + 1000)
        np.testing.assert_array_equal(slots["exp_avg_sq"], value + 2000)
        assert slots["step"] == 5
    assert found["optimizer"]["groups"] == [
        {"lr": 0.1, "params": ["a", "b"]},
        {"lr": 0.2, "params": ["c", "d"]},
    ]


def test_elastic_states_of_old_versions_are_read(tmp_path: Path) -> None:
    files = of_zero_2()
    for rank in range(RANKS):
        state = optimizer(files, rank)
        slots = [rows(rank, add, False) for add in (1000, 2000)]
        state["base_optimizer_state"] = list(base_state(slots)["state"].values())
    found = sw.restore(write(tmp_path / "c", files))
    for name, value in VALUES.items():
        np.testing.assert_array_equal(found["optimizer"]["state"][name]["exp_avg"], value + 1000)


def test_paddings_between_parameters_are_passed_over(tmp_path: Path) -> None:
    """As DeepSpeed aligns parameters from 0.19.8 on, if it is asked to."""
    files = of_zero_2()
    gap = torch.full((3,), -1.0)
    for rank in range(RANKS):
        state = optimizer(files, rank)
        state["param_alignment_paddings"] = [[3, 0], [0, 0]]
        for add, of in ((0, None), (1000, "exp_avg"), (2000, "exp_avg_sq")):
            row = torch.cat([VALUES["a"].flatten() + add, gap, VALUES["b"] + add])[rank * 10 :][:10].clone()
            if of is None:
                state["single_partition_of_fp32_groups"][0] = row
            else:
                state["base_optimizer_state"]["state"][0][of] = row
    found = sw.restore(write(tmp_path / "c", files))
    for name, value in VALUES.items():
        np.testing.assert_array_equal(found["model"][name], value)
        np.testing.assert_array_equal(found["optimizer"]["state"][name]["exp_avg_sq"], value + 2000)


def changed(state: dict[str, Any], key: str, value: Any) -> None:
    state[key] = value


#: Changes of the files, by the stages that they are for and a part of the message.
DAMAGE: dict[str, tuple[Callable[[Content], Any], tuple[int, ...], str]] = {
    "a missing rank": (
        lambda files: files.pop(next(name for name in files if "rank_1_" in name and "optim" in name)),
        (2, 3),
        r"\[1\] are missing|ranks of its model states",
    ),
    "the last rank missing": (
        lambda files: files.pop(next(name for name in files if "rank_2_" in name and "optim" in name)),
        (2, 3),
        r"one of 3 partitions, and 2 files|ranks of its model states",
    ),
    "no optimizer": (
        lambda files: [files.pop(name) for name in list(files) if "optim" in name],
        (2, 3),
        r"optim_states.pt are missing",
    ),
    "no model": (
        lambda files: [files.pop(name) for name in list(files) if "model" in name],
        (2, 3),
        r"no file \*_model_states.pt",
    ),
    "two saves in one directory": (
        lambda files: files.update({"zero_pp_rank_0_mp_rank_00_optim_states.pt": optimizer_file(files)}),
        (2,),
        r"are of the same rank",
    ),
    "a state with and without ZeRO-3": (
        lambda files: files.update({"mp_rank_01_model_states.pt": model(files)}),
        (3,),
        r"with and without ZeRO-3",
    ),
    "another version": (
        lambda files: changed(next(iter(files.values())), "ds_version", "0.10.0"),
        (2, 3),
        r"is of DeepSpeed",
    ),
    "another step": (
        lambda files: changed(states(files, 1)[0], "step", torch.tensor(6.0)),
        (2, 3),
        r"its step differs",
    ),
    "other groups": (
        lambda files: changed(base(files, 1)["param_groups"][0], "lr", 0.7),
        (2, 3),
        r"its groups differ",
    ),
    "another global step": (
        lambda files: changed(model(files, 1), "global_steps", 6),
        (3,),
        r"`global_steps`",
    ),
    "other shapes": (
        lambda files: changed(model(files, 1), "param_shapes", [{"a": (3,)}]),
        (3,),
        r"`param_shapes` differs",
    ),
    "a missing model-parallel rank": (
        lambda files: [changed(one, "mp_world_size", 2) for name, one in files.items() if "model" in name],
        (2, 3),
        r"\[1\] are missing",
    ),
    "a missing expert": (
        lambda files: files.update({"layer_3_expert_1_mp_rank_00_model_states.pt": {"x": torch.ones(1)}}),
        (2, 3),
        r"layer_3_expert_.* of 2 ranks: \[0\] are missing",
    ),
    "a missing optimizer of experts": (
        lambda files: files.update({"expp_rank_1_mp_rank_00_optim_states.pt": {"optimizer": None}}),
        (2, 3),
        r"expp_rank_.* of 2 ranks: \[0\] are missing",
    ),
    "a huge number of ranks": (
        lambda files: changed(model(files), "mp_world_size", 1 << 60),
        (2, 3),
        r"of 1152921504606846976 ranks",
    ),
    "a huge number of partitions": (
        lambda files: changed(optimizer(files, 0), "partition_count", 1 << 60),
        (2, 3),
        r"one of 1152921504606846976 partitions",
    ),
    "a partition that is too short": (
        lambda files: shortened(files, 0),
        (2, 3),
        r"have the lengths",
    ),
    "all partitions too short": (
        lambda files: [shortened(files, rank) for rank in range(RANKS)],
        (2, 3),
        r"the partitions of (sub-)?group 0",
    ),
    "a partition that is too long": (
        lambda files: changed(masters(files, 1), 0, torch.zeros(400)),
        (2, 3),
        r"have the lengths",
    ),
    "a huge shape": (
        lambda files: [changed(one["param_shapes"][0], "a", (1 << 40, 1 << 20)) for one in models(files)],
        (2, 3),
        r"too large|partitions of",
    ),
    "a shape with more elements": (
        lambda files: [changed(one["param_shapes"][0], "a", (1 << 40,)) for one in models(files)],
        (2, 3),
        r"partitions of",
    ),
    "a negative shape": (
        lambda files: [changed(one["param_shapes"][0], "a", (-4, -5)) for one in models(files)],
        (2, 3),
        r"shape of `a`",
    ),
    "a parameter twice": (
        lambda files: [changed(one["param_shapes"][1], "a", (4,)) for one in models(files)],
        (2, 3),
        r"names a parameter twice",
    ),
    "a number as a name": (
        lambda files: [changed(one["param_shapes"][1], 7, (4,)) for one in models(files)],
        (2, 3),
        r"`param_shapes`",
    ),
    "a group too many": (
        lambda files: [one["param_shapes"].append({"e": (2,)}) for one in models(files)],
        (2, 3),
        r"2 groups, `param_shapes` 3",
    ),
    "another dtype in one rank": (
        lambda files: changed(masters(files, 1), 0, masters(files, 1)[0].double()),
        (2, 3),
        r"dtypes float32 and float64",
    ),
    "a partition that repeats an element": (
        lambda files: changed(masters(files, 0), 0, torch.zeros(1).expand(1 << 40)),
        (2, 3),
        r"group 0 of `",
    ),
    "a partition with gaps": (
        lambda files: changed(masters(files, 0), 0, torch.zeros(20)[::2]),
        (2, 3),
        r"group 0 of `",
    ),
    "experts that ZeRO-3 partitions": (
        lambda files: changed(optimizer(files, 0), "ds_zero_partition_groups", [{"partition_count": 2}]),
        (3,),
        r"AutoEP",
    ),
    "experts with tensor parallelism": (
        lambda files: changed(files[list(files)[-1]], "folding", {"tp_size": 2}),
        (2, 3),
        r"AutoTP",
    ),
    "a tensor instead of the state": (
        lambda files: changed(files, next(iter(files)), torch.zeros(3)),
        (2, 3),
        r"its state is no dict",
    ),
}
#: A value of another type, in each place.
for _key in ("module", "param_shapes", "shared_params"):
    DAMAGE[f"text in `{_key}`"] = (
        lambda files, key=_key: [changed(one, key, "x") for one in models(files)],
        (2, 3),
        f"`{_key}` is no ",
    )
for _key in ("optimizer_state_dict", "base_optimizer_state", "single_partition_of_fp32_groups"):
    for _value in ("x", [7], None):
        DAMAGE[f"{_value} in `{_key}`"] = (
            lambda files, key=_key, value=_value: changed(
                files[list(files)[1]] if key == "optimizer_state_dict" else optimizer(files, 0), key, value
            ),
            (2,),
            r"`|groups differ",
        )
#: Frozen parameters: shapes, and what is in the file.
for _what, _shapes, _values in (
    ("too short", {"f": (5,)}, {"f": torch.zeros(1)}),
    ("absent", {"f": (5,)}, {}),
    ("text", {"f": (5,)}, {"f": "x"}),
    ("of a text as shape", {"f": "x"}, {"f": torch.zeros(5)}),
    ("no dict", "x", {"f": torch.zeros(5)}),
):
    DAMAGE[f"frozen parameters {_what}"] = (
        lambda files, shapes=_shapes, values=_values: [
            one.update({"frozen_param_shapes": shapes, "frozen_param_fragments": values})
            for one in models(files)
        ],
        (2, 3),
        r"frozen|`f`",
    )


def optimizer_file(files: Content) -> dict[str, Any]:
    return next(one for name, one in files.items() if "optim" in name)


def models(files: Content) -> list[dict[str, Any]]:
    return [one for name, one in files.items() if "model" in name]


def base(files: Content, rank: int) -> dict[str, Any]:
    state = optimizer(files, rank)
    return state.get("base_optimizer_state") or state["optimizer_state_dict"]


def states(files: Content, rank: int) -> dict[int, Any]:
    return base(files, rank)["state"]


def masters(files: Content, rank: int) -> list[Any]:
    state = optimizer(files, rank)
    return state.get("single_partition_of_fp32_groups") or state["fp32_flat_groups"]


def shortened(files: Content, rank: int) -> None:
    own = masters(files, rank)
    own[0] = own[0][: len(own[0]) - 2].clone()


@pytest.mark.parametrize(
    ("name", "stage"), [(name, stage) for name, (_, stages, _) in DAMAGE.items() for stage in stages]
)
def test_damage_is_refused_by_name(tmp_path: Path, name: str, stage: int) -> None:
    damage, _, message = DAMAGE[name]
    files = MAKERS[stage]()
    damage(files)
    path = write(tmp_path / "c", files)
    begin = time.process_time()
    with pytest.raises((sw.CorruptCheckpoint, sw.errors.FormatError), match=message) as caught:
        sw.open(path)
    assert str(path) in str(caught.value)
    assert time.process_time() - begin < 5


@pytest.mark.parametrize("stage", MAKERS)
def test_slots_of_another_size_are_opaque(tmp_path: Path, stage: int) -> None:
    files = MAKERS[stage]()
    for rank in range(RANKS):
        states(files, rank)[0]["worker_error"] = torch.zeros(3)
    states(files, 1)[1]["exp_avg"] = torch.zeros(500)
    with sw.open(write(tmp_path / "c", files)) as checkpoint:
        kinds = {node.path: node.kind for node in checkpoint.contents()}
    assert kinds["optimizer/state/a/worker_error"] == kinds["optimizer/state/c/exp_avg"] == "object"
    assert kinds["optimizer/state/a/exp_avg"] == kinds["optimizer/state/c/exp_avg_sq"] == "array"


def test_names_of_this_state_in_the_users_are_kept_apart(tmp_path: Path) -> None:
    files = of_zero_2()
    model(files)["scheduler"] = "mine"
    model(files)["lr_scheduler"] = {"last": 3}
    found = sw.restore(write(tmp_path / "c", files))
    assert found["scheduler"] == {"last": 3}
    assert found["client_state"] == {"scheduler": "mine"}


def test_files_of_no_rank_are_passed_over(tmp_path: Path) -> None:
    path = write(tmp_path / "c", of_zero_2())
    (path / "zero_to_fp32.py").write_text("raise SystemExit")
    shutil.copy(path / "mp_rank_00_model_states.pt", path / "backup.pt")
    assert sw.restore(path)["global_steps"] == 5


def of_universal() -> Content:
    """The files of a universal checkpoint of ZeRO-3, by path."""
    files: Content = {"mp_rank_00_model_states.pt": model_state()}
    for name, value in VALUES.items():
        for slot, add in (("fp32", 0), ("exp_avg", 1000), ("exp_avg_sq", 2000)):
            files[f"zero/{name}/{slot}.pt"] = value.flatten() + add  # type: ignore[assignment]
    groups = [{"lr": 0.1, "params": [0]}, {"lr": 0.2, "params": [1]}]
    base = {"state": {0: {"step": torch.tensor(5.0)}, 1: {"step": 5}}}
    files["zero/optimizer_state.pt"] = {"param_groups": groups, "optimizer_state_dict": base}
    return files


def test_universal_files_of_zero_3_are_read(tmp_path: Path) -> None:
    found = sw.restore(write(tmp_path / "c", of_universal()))
    for name, value in VALUES.items():
        np.testing.assert_array_equal(found["model"][name], value)
        slots = found["optimizer"]["state"][name]
        np.testing.assert_array_equal(slots["exp_avg_sq"], value + 2000)
        assert slots["step"] == 5
    assert found["optimizer"]["groups"][1] == {"lr": 0.2, "params": ["c", "d"]}


#: The last row of ``a`` is padding.
VOCABULARY = {"vocabulary_parameter_patterns": ["^a$"], "original_vocab_size": 3}


@pytest.mark.parametrize("maker", [of_zero_2, of_zero_3])
def test_padding_of_the_vocabulary_is_left_out(tmp_path: Path, maker: Callable[[], Content]) -> None:
    """The shape does not depend on the number of tensor-parallel ranks that saved it."""
    files = maker()
    for one in models(files):
        # Other patterns are not asked for.
        one["universal_checkpoint_info"] = VOCABULARY | {"tp_replicated_parameter_patterns": ["(a+)+$"]}
    found = sw.restore(write(tmp_path / "c", files))
    for name, value in (VALUES | {"a": VALUES["a"][:3]}).items():
        np.testing.assert_array_equal(found["model"][name], value)
        np.testing.assert_array_equal(found["optimizer"]["state"][name]["exp_avg"], value + 1000)
        if maker is of_zero_2:
            assert found["module"][name].shape == tuple(value.shape)


@pytest.mark.parametrize("is_cut", [True, False])
def test_universal_files_without_padding_are_read(tmp_path: Path, is_cut: bool) -> None:
    """DeepSpeed cuts the vocabulary of ZeRO-1 and ZeRO-2, and leaves that of ZeRO-3."""
    files = of_universal()
    model(files)["universal_checkpoint_info"] = VOCABULARY
    for slot, add in (("fp32", 0), ("exp_avg", 1000), ("exp_avg_sq", 2000)) if is_cut else ():
        content = {"param": (VALUES["a"][:3] + add).clone(), "vocab_tensor": True}
        files[f"zero/a/{slot}.pt"] = content
    found = sw.restore(write(tmp_path / "c", files))
    np.testing.assert_array_equal(found["model"]["a"], VALUES["a"][:3])
    np.testing.assert_array_equal(found["model"]["b"], VALUES["b"])
    np.testing.assert_array_equal(found["optimizer"]["state"]["a"]["exp_avg_sq"], VALUES["a"][:3] + 2000)


def test_tied_parameters_without_padding_stay_tied(tmp_path: Path) -> None:
    files = of_slices()
    for content in files.values():
        content["module"]["head"] = content["module"]["embed"] = torch.ones(4, 3)
        content["universal_checkpoint_info"]["vocabulary_parameter_patterns"] = ["^head$", "^embed$"]
    with sw.open(write(tmp_path / "c", files)) as checkpoint:
        assert checkpoint["model/head"].shape == (7, 3)
        ties = {node.path: node.tied_to for node in checkpoint.contents() if node.tied_to}
    assert ties == {"model/embed": "model/head"}


UNIVERSAL_DAMAGE: dict[str, tuple[str, Any, str]] = {
    "no weights": ("zero/a/fp32.pt", None, r"`a` has no fp32.pt"),
    "no groups": ("zero/optimizer_state.pt", None, r"optimizer_state.pt"),
    "too short a row": ("zero/a/exp_avg.pt", torch.zeros(19), r"shape \[4, 5\] was expected, not of \[19\]"),
    "another shape": ("zero/a/fp32.pt", {"param": torch.zeros(5, 4)}, r"shape \[4, 5\] was expected"),
    "a row with gaps": ("zero/a/fp32.pt", torch.zeros(40)[::2], r"shape \[4, 5\] was expected"),
    "text as weights": ("zero/a/fp32.pt", "x", r"a tensor was expected"),
    "a dict without the weights": ("zero/a/fp32.pt", {"cat_dim": 0}, r"a tensor was expected"),
    "text as groups": ("zero/optimizer_state.pt", {"param_groups": "x"}, r"`param_groups` is no list"),
    "a group without parameters": (
        "zero/optimizer_state.pt",
        {"param_groups": [{}]},
        r"no list of parameters",
    ),
    "a path as a name": (
        "mp_rank_00_model_states.pt",
        model_state(param_shapes=[{"../c": (1,)}]),
        r"be the name of a directory",
    ),
    "half a character as a name": (
        "mp_rank_00_model_states.pt",
        model_state(param_shapes=[{"\ud800": (1,)}]),
        r"be the name of a directory",
    ),
}


@pytest.mark.parametrize("name", UNIVERSAL_DAMAGE)
def test_damage_of_universal_files_is_refused_by_name(tmp_path: Path, name: str) -> None:
    file, content, message = UNIVERSAL_DAMAGE[name]
    path = write(tmp_path / "c", of_universal())
    (path / file).unlink()
    if content is not None:
        torch.save(content, path / file)
    with pytest.raises((sw.CorruptCheckpoint, sw.StorageError), match=message) as caught:
        sw.open(path)
    assert str(path) in str(caught.value)


def test_names_in_errors_are_fit_for_a_terminal(tmp_path: Path) -> None:
    files = of_universal()
    model(files)["param_shapes"] = [{"a\x1b[31m\ud800": (4, 5)}]
    with pytest.raises(sw.CorruptCheckpoint, match=r"parameter `a\\x1b\[31m\\ud800` cannot be") as caught:
        sw.open(write(tmp_path / "c", files))
    assert str(caught.value).isprintable()
    files["mp_rank_00_model_states.pt"]["universal_checkpoint_info"] = {
        "vocabulary_parameter_patterns": ["\x1b(a+)+$"]
    }
    with pytest.raises(sw.errors.FormatError, match=r"the pattern .* is not understood") as refused:
        sw.open(write(tmp_path / "d", files))
    assert str(refused.value).isprintable()


def of_slices(**info: Any) -> Content:
    """Two tensor-parallel ranks without ZeRO."""
    rules = {
        "tp_replicated_parameter_patterns": ["^norm$"],
        "parameter_with_row_parallelism_patterns": [r"\d+\.down"],
        "vocabulary_parameter_patterns": ["^head$"],
        "original_vocab_size": 7,
    }
    modules = [
        {
            "norm": torch.ones(3),
            "1.up": torch.ones(2, 4),
            "1.down": torch.ones(4, 2),
            "head": torch.ones(4, 3),
        }
        for _ in range(2)
    ]
    return {
        f"mp_rank_{rank:02d}_model_states.pt": model_state(
            module={name: value if name == "norm" else value * (rank + 1) for name, value in module.items()},
            param_shapes=None,
            mp_world_size=2,
            universal_checkpoint_info=rules | info,
        )
        for rank, module in enumerate(modules)
    }


def test_slices_without_zero_are_whole(tmp_path: Path) -> None:
    found = sw.restore(write(tmp_path / "c", of_slices()))["model"]
    shapes = {name: value.shape for name, value in found.items()}
    assert shapes == {"norm": (3,), "1.up": (4, 4), "1.down": (4, 4), "head": (7, 3)}
    assert found["1.down"].tolist() == [[1, 1, 2, 2]] * 4
    assert found["1.up"][:, 0].tolist() == [1, 1, 2, 2]
    assert found["head"][:, 0].tolist() == [1, 1, 1, 1, 2, 2, 2]


def test_parameters_that_are_no_slices_are_opaque(tmp_path: Path) -> None:
    files = of_slices(parameter_to_average_patterns=["norm"])
    with sw.open(write(tmp_path / "c", files)) as checkpoint:
        kinds = {node.path: node.kind for node in checkpoint.contents()}
    assert kinds["model/norm"] == "object"
    assert kinds["model/head"] == "array"


SLICE_DAMAGE: dict[str, tuple[dict[str, Any], str]] = {
    "no rules": ({"universal_checkpoint_info": None}, r"says how they cut each parameter"),
    "text as rules": ({"universal_checkpoint_info": "x"}, r"`universal_checkpoint_info` is no dict"),
    "text as patterns": (
        {"universal_checkpoint_info": {"tp_replicated_parameter_patterns": "x"}},
        r"is no list of patterns",
    ),
    "a pattern that takes for ever": (
        {"universal_checkpoint_info": {"tp_replicated_parameter_patterns": ["(a+)+$"]}},
        r"not understood",
    ),
    "no size of the vocabulary": (
        {"universal_checkpoint_info": {"vocabulary_parameter_patterns": ["head"]}},
        r"`original_vocab_size` is no number",
    ),
    "a huge number of slices": ({"checkpoint_parallel_dimensions": {"tp_degree": 1 << 60}}, r"no stages of"),
    "no slices": ({"checkpoint_parallel_dimensions": {"tp_degree": 0}}, r"no stages of"),
    "an axis that is not there": (
        {"universal_checkpoint_info": {"parameter_with_row_parallelism_patterns": ["norm"]}},
        r"`norm`: a slice of shape \[3\] is not cut along axis 1",
    ),
}


@pytest.mark.parametrize("name", SLICE_DAMAGE)
def test_damage_of_slices_is_refused_by_name(tmp_path: Path, name: str) -> None:
    change, message = SLICE_DAMAGE[name]
    files = of_slices()
    for content in files.values():
        content.update(change)
    path = write(tmp_path / "c", files)
    with pytest.raises((sw.CorruptCheckpoint, sw.errors.FormatError), match=message) as caught:
        sw.open(path)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_missing_slice_is_refused(tmp_path: Path, rank: int) -> None:
    files = of_slices()
    files[f"mp_rank_{rank:02d}_model_states.pt"]["module"].pop("1.up")
    with pytest.raises(sw.CorruptCheckpoint, match=r"`1.up` is a tensor in some tensor-parallel ranks only"):
        sw.open(write(tmp_path / "c", files))


def test_copies_with_other_values_are_damage(tmp_path: Path) -> None:
    files = of_slices()
    assert sw.verify(write(tmp_path / "c", files)).ok
    files["mp_rank_01_model_states.pt"]["module"]["norm"] = torch.tensor([1.0, 1.0, 2.0])
    path = write(tmp_path / "d", files)
    (damage,) = sw.verify(path).damages
    assert damage.file == str(path / "mp_rank_01_model_states.pt")
    assert damage.leaves == ("model/norm",)
    assert "mp_rank_00_model_states.pt, which a restore reads" in damage.what
    assert sw.restore(path)["model"]["norm"].tolist() == [1, 1, 1]
    step = tmp_path / "run" / "checkpoint-5"
    step.mkdir(parents=True)
    path.rename(step / "global_step5")
    (step / "latest").write_text("global_step5")
    (step / "trainer_state.json").write_text('{"global_step": 5}')
    save_file({"w": np.ones(3, np.float32)}, step / "model.safetensors")
    (damage,) = sw.verify(tmp_path / "run", 5).damages
    assert damage.leaves == ("deepspeed/model/norm",)


@pytest.mark.parametrize("stage", MAKERS)
def test_copies_of_the_optimizer_are_compared(tmp_path: Path, stage: int) -> None:
    files: Content = {}
    for mp_rank in range(2):
        for name, content in MAKERS[stage]().items():
            if "model" in name:
                content["mp_world_size"] = 2
                content["universal_checkpoint_info"] = {"tp_replicated_parameter_patterns": ["."]}
            files[name.replace("mp_rank_00", f"mp_rank_{mp_rank:02d}")] = content
    assert sw.verify(write(tmp_path / "c", files)).ok
    name = next(name for name in files if "rank_0_mp_rank_01_optim" in name)
    state = files[name]["optimizer_state_dict"]
    own = state.get("base_optimizer_state") or state["optimizer_state_dict"]
    own["state"][1]["exp_avg"] += 1
    found = sw.verify(write(tmp_path / "d", files)).damages
    # The first partition of ZeRO-2 has a part of `c`, that of ZeRO-3 a part of each.
    assert {one.leaves[0][-9:] for one in found} == (
        {"c/exp_avg"} if stage == 2 else {"c/exp_avg", "d/exp_avg"}
    )
    assert all("mp_rank_01" in one.file for one in found)


def test_copies_of_other_shapes_are_refused(tmp_path: Path) -> None:
    files = of_slices()
    files["mp_rank_01_model_states.pt"]["module"]["norm"] = torch.ones(4)
    with pytest.raises(sw.CorruptCheckpoint, match=r"`norm`: its copies are float32\[3\] and float32\[4\]"):
        sw.open(write(tmp_path / "c", files))
    for content in files.values():
        content["buffer_names"] = ["norm"]
    with sw.open(write(tmp_path / "d", files)) as checkpoint:
        kinds = {node.path: node.opaque for node in checkpoint.contents()}
    assert "float32[4]" in str(kinds["model/norm"])


def test_slices_of_another_step_are_refused(tmp_path: Path) -> None:
    files = of_slices()
    files["mp_rank_01_model_states.pt"]["global_steps"] = 6
    with pytest.raises(sw.CorruptCheckpoint, match=r"mp_rank_01.*`global_steps` differs"):
        sw.open(write(tmp_path / "c", files))


def test_slices_of_other_shapes_are_refused(tmp_path: Path) -> None:
    files = of_slices()
    files["mp_rank_01_model_states.pt"]["module"]["1.up"] = torch.ones(2, 5)
    with pytest.raises(sw.CorruptCheckpoint, match=r"`1.up`: its slices have the shapes"):
        sw.open(write(tmp_path / "c", files))


def test_layers_without_a_file_are_listed(tmp_path: Path) -> None:
    files: Content = {"mp_rank_00_model_states.pt": model_state(module=None, param_shapes=None)}
    for number in (0, 1, 3):
        files[f"layer_{number:02d}-model_states.pt"] = {"weight": torch.full((2,), float(number))}
    with sw.open(write(tmp_path / "c", files)) as checkpoint:
        assert list(checkpoint["model"]) == ["0.weight", "1.weight", "3.weight"]
        assert (checkpoint.metadata().custom_metadata or {})["layers"].startswith("2 have no file")
    files["layer_02-model_states.pt"] = {"weight": torch.zeros(2)}
    files["layer_999999-model_states.pt"] = {"weight": torch.zeros(2)}
    with sw.open(write(tmp_path / "d", files)) as checkpoint:
        listed = (checkpoint.metadata().custom_metadata or {})["layers"]
    assert listed.startswith("4, 5, 6, 7, 8, 9, 10, 11, 12, 13, … have no file")


EXPERTS = "{}.deepspeed_moe.experts.deepspeed_experts.{}.w"
#: The experts of two layers. Two expert-parallel ranks have half of those of each layer.
OF_LAYERS = {"first": 4, "last": 2}


def expert(layer: str, number: int) -> Any:
    return torch.arange(3.0) + 10 * number + 100 * OF_LAYERS[layer]


def of_experts() -> Content:
    """ZeRO-2 on two ranks. The experts of a rank are in three groups."""
    local = [("first", 0), ("first", 1), ("last", 0)]
    shapes = [{"d": (4,)}, *({EXPERTS.format(*one): (3,)} for one in local)]
    files: Content = {"mp_rank_00_model_states.pt": model_state(module={}, param_shapes=shapes)}
    for number, (layer, count) in enumerate(OF_LAYERS.items()):
        for at in range(count):
            content = {EXPERTS.format(layer, at): expert(layer, at).bfloat16()}
            files[f"layer_{number}_expert_{at}_mp_rank_00_model_states.pt"] = content
    for rank in range(2):
        own = [expert(layer, at + rank * OF_LAYERS[layer] // 2) for layer, at in local]
        parts = [torch.arange(4.0)[rank * 2 :][:2].clone(), *own]
        states = {number: {"exp_avg": one + 1000} for number, one in enumerate(parts)}
        groups = [{"params": [number]} for number in range(4)]
        state = {
            "base_optimizer_state": {"state": states, "param_groups": groups},
            "single_partition_of_fp32_groups": parts,
            "zero_stage": 2,
            "partition_count": [2, 1, 1, 1],
        }
        name = f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        files[name] = {"optimizer_state_dict": state}
    return files


def test_experts_of_several_groups_have_their_own_values(tmp_path: Path) -> None:
    found = sw.restore(write(tmp_path / "c", of_experts()))
    names = {EXPERTS.format(layer, at) for layer, count in OF_LAYERS.items() for at in range(count)}
    assert found["model"].keys() == found["optimizer"]["state"].keys() == names | {"d"}
    for layer, count in OF_LAYERS.items():
        for at in range(count):
            name = EXPERTS.format(layer, at)
            np.testing.assert_array_equal(found["model"][name], expert(layer, at))
            np.testing.assert_array_equal(
                found["optimizer"]["state"][name]["exp_avg"], expert(layer, at) + 1000
            )


EXPERT_DAMAGE: dict[str, tuple[Callable[[Content], Any], str]] = {
    "a lost expert": (
        lambda files: files.pop("layer_0_expert_3_mp_rank_00_model_states.pt"),
        r"not in the files layer_\*_expert_\*_model_states.pt",
    ),
    "half of the experts lost": (
        lambda files: [files.pop(f"layer_0_expert_{at}_mp_rank_00_model_states.pt") for at in (2, 3)],
        r"expert 1 of expert-parallel rank 0 is not in the files",
    ),
    "all experts of a layer lost": (
        lambda files: [files.pop(f"layer_1_expert_{at}_mp_rank_00_model_states.pt") for at in (0, 1)],
        r"`last.*` of shape \[3\]",
    ),
    "an expert of another shape": (
        lambda files: files["layer_0_expert_2_mp_rank_00_model_states.pt"].update(
            {EXPERTS.format("first", 2): torch.zeros(4)}
        ),
        r"`first.*\.2\.w` of shape \[3\]",
    ),
    "an expert in a group of all ranks": (
        lambda files: changed(model(files)["param_shapes"], 0, {EXPERTS.format("first", 2): (4,)}),
        r"`first.*\.2\.w` is in two groups",
    ),
}


@pytest.mark.parametrize("name", EXPERT_DAMAGE)
def test_damage_of_experts_is_refused_by_name(tmp_path: Path, name: str) -> None:
    damage, message = EXPERT_DAMAGE[name]
    files = of_experts()
    damage(files)
    path = write(tmp_path / "c", files)
    with pytest.raises(sw.CorruptCheckpoint, match=message) as caught:
        sw.open(path)
    assert str(path) in str(caught.value)


def of_many_names_in_a_group() -> Content:
    """A group that names a partition of many parameters often."""
    files = of_zero_2()
    model(files)["param_shapes"][0].update({f"e{number}": torch.Size([0]) for number in range(3000)})
    for rank in range(RANKS):
        base(files, rank)["param_groups"][0]["params"] = [0] * 200_000
    return files


def of_many_slots() -> Content:
    """A group of many parameters that has many slots."""
    files = of_many_names_in_a_group()
    for rank in range(RANKS):
        base(files, rank)["param_groups"][0]["params"] = [0]
        states(files, rank)[0].update({f"s{number}": 0 for number in range(100_000)})
    return files


def of_many_tied_layers() -> Content:
    tied = [f"tied_modules.k{number}.z" for number in range(12_000)]
    module = model_state(module={}, param_shapes=None, buffer_names=tied)
    layer = {f"w{number}": 0 for number in range(12_000)}
    return {"mp_rank_00_model_states.pt": module, "layer_00-model_states.pt": layer}


def of_many_mapped_groups() -> Content:
    """Names in as many groups, without ``param_shapes``."""
    one, names = torch.zeros(1), [f"p{number}" for number in range(20_000)]
    state = {
        "single_partition_of_fp32_groups": [one],
        "param_slice_mappings": [{name: 0} for name in names],
        "partition_count": [1],
    }
    module = model_state(module=dict.fromkeys(names, one), param_shapes=None)
    return {
        "mp_rank_00_model_states.pt": module,
        "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt": {"optimizer_state_dict": state},
    }


@pytest.mark.parametrize(
    ("maker", "message"),
    [
        (of_many_names_in_a_group, r"name a partition twice"),
        (of_many_slots, r"100003 slots, of at most"),
        (of_many_mapped_groups, r"1 groups, .*20000"),
        (of_many_tied_layers, None),
    ],
)
def test_many_names_take_no_long_time(tmp_path: Path, maker: Callable[[], Content], message: str) -> None:
    path = write(tmp_path / "c", maker())
    begin = time.process_time()
    with pytest.raises(sw.CorruptCheckpoint, match=message) if message else contextlib.nullcontext():
        sw.open(path).close()
    assert time.process_time() - begin < 5


#: Values that are in no sound file.
JUNK = [
    *(None, "x", b"x", [], {}, (1, 2), 7, -1, 1 << 61, 1 << 80, 2.5, float("nan"), True),
    *([7], ["x"], [[["x"]]], {"x": 1}, {3: 4}, {1.5: "x"}, {("a", 1): 2}),
    *(torch.zeros(3), torch.zeros(()), torch.zeros(2, 2), [torch.zeros(2)]),
]


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The path of each value in nested dicts and lists."""
    yield path
    if isinstance(value, (dict, list)):
        keys = value if isinstance(value, dict) else range(len(value))
        for key in keys:
            yield from places(value[key], (*path, key))


@pytest.mark.parametrize("maker", [of_zero_2, of_zero_3, of_universal, of_slices, of_experts])
def test_no_value_in_any_place_is_a_crash(tmp_path: Path, maker: Callable[[], Content]) -> None:
    random = Random(maker.__name__)
    for number in range(60):
        files = maker()
        for _ in range(random.choice([1, 1, 3])):
            name = random.choice(list(files))
            *above, last = (name, *random.choice(list(places(files[name]))))
            at: Any = files
            for key in above:
                at = at[key]
            at[last] = copy.deepcopy(random.choice(JUNK))
        path = write(tmp_path / str(number), files)
        begin = time.process_time()
        with contextlib.suppress(sw.StepwellError):
            sw.restore(path)
        assert time.process_time() - begin < 5


def mixed(steps: int, rate: float) -> Content:
    """States of a model at step 5 with those of an optimizer at another one."""
    files = of_zero_2()
    model(files)["lr_scheduler"] = {"_last_lr": [0.1, 0.2], "last_epoch": 5}
    for rank in range(RANKS):
        base = optimizer(files, rank)["base_optimizer_state"]
        for number, group in enumerate(base["param_groups"]):
            base["state"][number]["step"] = torch.tensor(float(steps))
            group["lr"] = rate * (number + 1)
    return files


@pytest.mark.parametrize("steps", [4, 7])
def test_an_optimizer_of_another_save_is_refused(tmp_path: Path, steps: int) -> None:
    path = write(tmp_path / "c", mixed(steps, 0.5))
    with pytest.raises(sw.CorruptCheckpoint, match=rf"made {steps}.0 steps, not 5, its learning rate is 0.5"):
        sw.open(path)
    (damage,) = sw.verify(path).damages
    assert damage.file.endswith("optim_states.pt")


@pytest.mark.parametrize(("steps", "rate", "what"), [(2, 0.1, "made 2.0 steps"), (5, 0.5, "learning rate")])
def test_an_optimizer_that_began_later_opens_with_a_note(
    tmp_path: Path, steps: int, rate: float, what: str, caplog: pytest.LogCaptureFixture
) -> None:
    with sw.open(write(tmp_path / "c", mixed(steps, rate))) as checkpoint:
        assert what in (checkpoint.metadata().custom_metadata or {})["optimizer"]
    assert what in caplog.text


@pytest.mark.parametrize("steps", [5, 6])  # old versions count one more
def test_an_optimizer_of_the_same_save_has_no_note(tmp_path: Path, steps: int) -> None:
    with sw.open(write(tmp_path / "c", mixed(steps, 0.1))) as checkpoint:
        assert not checkpoint.metadata().custom_metadata


def test_steps_without_overflows_are_compared(tmp_path: Path) -> None:
    files = mixed(3, 0.1)
    model(files)["skipped_steps"] = 2
    with sw.open(write(tmp_path / "c", files)) as checkpoint:
        assert not checkpoint.metadata().custom_metadata


def plain_run() -> tuple[Any, Any, Any]:
    """A model with the parameters, its optimizer, and a scheduler."""
    plain = torch.nn.Module()
    for name, value in VALUES.items():
        plain.register_parameter(name, torch.nn.Parameter(torch.zeros_like(value)))
    groups = [{"params": [getattr(plain, name) for name in group]} for group in SHAPES]
    optimizer = torch.optim.AdamW(groups, lr=1.0)
    return plain, optimizer, torch.optim.lr_scheduler.StepLR(optimizer, 7)


def test_a_run_of_the_trainer_with_deepspeed_goes_on(tmp_path: Path) -> None:
    step = tmp_path / "old" / "checkpoint-5"
    step.mkdir(parents=True)
    write(step / "global_step5", of_zero_2())
    (step / "latest").write_text("global_step5")
    (step / "trainer_state.json").write_text('{"global_step": 5}')
    save_file({"w": np.ones(3, np.float32)}, step / "model.safetensors")
    plain, optimizer, scheduler = plain_run()
    torch.save({**scheduler.state_dict(), "last_epoch": 5}, step / "scheduler.pt")
    state = {"deepspeed": sw.torch.TrainState(plain, optimizer), "scheduler": scheduler}
    with sw.CheckpointManager(tmp_path / "new") as mgr:
        state, first = mgr.resume(state, start=sw.Start(tmp_path / "old", unexpected="ignore"))
    assert (first, scheduler.last_epoch) == (6, 5)
    for name, value in VALUES.items():
        parameter = getattr(plain, name)
        assert torch.equal(parameter.detach(), value)
        assert torch.equal(optimizer.state[parameter]["exp_avg"], value + 1000)


def test_a_run_of_deepspeed_without_zero_goes_on(tmp_path: Path) -> None:
    saved, optimizer, _ = plain_run()
    sum(one.sum() for one in saved.parameters()).backward()
    optimizer.step()
    file = model_state(module=dict(VALUES), param_shapes=None, optimizer=optimizer.state_dict())
    write(tmp_path / "old", {})
    write(tmp_path / "old" / "global_step5", {"mp_rank_00_model_states.pt": file})
    (tmp_path / "old" / "latest").write_text("global_step5")
    plain, other, _ = plain_run()
    state = {"model": plain, "optimizer": other}
    with sw.CheckpointManager(tmp_path / "new") as mgr:
        state, first = mgr.resume(state, start=sw.Start(tmp_path / "old", unexpected="ignore"))
    assert first == 6
    for name, value in VALUES.items():
        assert torch.equal(getattr(plain, name).detach(), value)
        slots = optimizer.state[getattr(saved, name)]
        assert torch.equal(other.state[getattr(plain, name)]["exp_avg"], slots["exp_avg"])
