"""A recipe converts saves of several real ranks of Megatron to Hugging Face. They have the bits of
the model of one process."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
from test_recipe_outputs import FAMILIES, PADDED, THEIRS, Family

torch = pytest.importorskip("torch")

SCRIPT = Path(__file__).with_name("megatron_ranks.py")
RANKS = 4
SIZES = {
    "tensor_model_parallel_size": 1,
    "pipeline_model_parallel_size": 1,
    "expert_model_parallel_size": 1,
}


def saved_by_ranks(family: Family, whole: Path, parts: Path, **sizes: int) -> None:
    """Has ranks load a checkpoint of the whole model, and save their parts."""
    base = {"num_query_groups": family.base["num_key_value_heads"], "num_layers": 4}
    job = parts.with_suffix(".json")
    job.write_text(
        json.dumps(
            {
                "ranks": RANKS,
                "sizes": {**SIZES, **sizes},
                "vocab": PADDED,
                "config": {**THEIRS, **base, **family.theirs},
                "layers": family.layers,
                "whole": str(whole),
                "parts": str(parts),
            }
        )
    )
    ranks = [subprocess.Popen([sys.executable, SCRIPT, job, str(rank)]) for rank in range(RANKS)]
    try:
        assert [rank.wait(300) for rank in ranks] == [0] * RANKS
    finally:
        for rank in ranks:
            rank.kill()


LAYOUTS = {
    "llama": {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2},
    "qwen3-moe": {"tensor_model_parallel_size": 2, "expert_model_parallel_size": 2},
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_parts_of_real_ranks_become_the_whole_model(name: str, tmp_path: Path) -> None:
    family = FAMILIES[name]
    family = dataclasses.replace(family, ours={**family.ours, "num_hidden_layers": 4})
    family.of_hugging_face().save_pretrained(tmp_path / "hf")
    there = sw.maps.recipe(family.recipe, config=tmp_path / "hf", padded_vocab=PADDED, **family.parameters)
    sw.convert(tmp_path / "hf", tmp_path / "whole", to="megatron", map=there)
    saved_by_ranks(family, tmp_path / "whole", tmp_path / "parts", **LAYOUTS[name])
    # Each rank has written a part.
    assert len({file.name.split("_")[2] for file in (tmp_path / "parts").glob("__*.distcp")}) > 1

    back = there.inverse()
    assert back.check(tmp_path / "parts")
    sw.export(tmp_path / "parts", tmp_path / "back", map=back)
    with sw.open(tmp_path / "hf") as checkpoint:
        assert not checkpoint.diff(tmp_path / "back")
        weights = checkpoint.restore()
    state: Any = sw.restore(tmp_path / "parts", map=back.with_parameters(training=1))
    slots = state["optimizer"]["state"]
    assert slots.pop("common_step") == 3
    assert slots.keys() == state["model"].keys() == weights.keys()
    for key, weight in weights.items():
        np.testing.assert_array_equal(state["model"][key], weight, err_msg=key)
        assert slots[key].keys() == {"exp_avg", "exp_avg_sq"}
        np.testing.assert_array_equal(slots[key]["exp_avg"], weight * 2, err_msg=key)
        np.testing.assert_array_equal(slots[key]["exp_avg_sq"], weight * weight, err_msg=key)
