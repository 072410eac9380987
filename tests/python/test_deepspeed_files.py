"""Checkpoints that old versions of DeepSpeed wrote are read bit for bit, without it.
``tests/foreign/make_deepspeed.py`` has made them."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import numpy as np
import pytest
import stepwell as sw

FOREIGN = Path(__file__).parents[1] / "foreign"
SAVES = [one.with_suffix("") for one in sorted(FOREIGN.glob("deepspeed_*/*.json"))]
#: This version cannot save ZeRO-1 of bfloat16 with gradients of float32.
SAVED_BY_ALL = {"zero_1", "zero_2_bf16", "zero_3_bf16"}

each_save = pytest.mark.parametrize("path", SAVES, ids=lambda one: f"{one.parent.name}_{one.name}")


def test_each_old_version_has_all_stages() -> None:
    names: dict[str, set[str]] = {}
    for path in SAVES:
        names.setdefault(path.parent.name.removeprefix("deepspeed_"), set()).add(path.name)
    assert names == {
        "0.10.3": SAVED_BY_ALL,
        **{version: SAVED_BY_ALL | {"zero_1_bf16"} for version in ("0.12.6", "0.14.5", "0.16.9")},
    }


@each_save
def test_the_live_optimizer_of_old_versions_is_read(path: Path) -> None:
    expected = json.loads(path.with_suffix(".json").read_bytes())
    assert len(expected) == 24
    with sw.open(path) as checkpoint:
        found = {leaf: checkpoint[leaf][...] for leaf in expected}
    for leaf, one in found.items():
        digest = hashlib.sha256(one.tobytes()).hexdigest()
        assert [one.dtype.name, list(one.shape), digest] == expected[leaf], leaf
    assert sw.verify(path).ok


@each_save
def test_other_values_of_old_versions_are_read(path: Path) -> None:
    found = sw.restore(path)
    assert (found["epoch"], found["global_steps"]) == (3, 3)
    assert found["scheduler"]["step_size"] == 2
    assert found["ds_version"].startswith(path.parent.name.removeprefix("deepspeed_"))
    groups = found["optimizer"]["groups"]
    assert [group["weight_decay"] for group in groups] == [0.1, 0.0]
    assert [sorted(group["params"]) for group in groups] == [
        ["a.weight", "b.weight", "embed.weight"],
        ["a.bias", "b.bias", "scale"],
    ]
    model = found["model"]
    np.testing.assert_array_equal(model["head.weight"], model["embed.weight"])
    assert model["frozen.weight"].shape == (3, 7)
    assert ("module" in found) == (path.name != "zero_3_bf16")
    for name, weight in found.get("module", {}).items():
        assert weight.tobytes() == model[name].astype(weight.dtype).tobytes(), name
