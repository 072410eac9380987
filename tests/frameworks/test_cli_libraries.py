"""Commands on checkpoints that other libraries wrote: each command on each format."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import stepwell as sw

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

from command_line import document

EMBED = np.arange(32, dtype=np.float32).reshape(8, 4)
LAYERS = [np.full((4, 4), i + 0.5, np.float32) for i in range(2)]


def tensors(make: Any = np.array) -> dict[str, Any]:
    """The state with its nesting."""
    return {"embed": make(EMBED), "layers": [{"w": make(w)} for w in LAYERS]}


def flat() -> dict[str, np.ndarray]:
    """The state in a flat dict."""
    return {"embed": EMBED, **{f"layers.{i}.w": w for i, w in enumerate(LAYERS)}}


def safetensors(path: Path) -> Path:
    from safetensors.numpy import save_file

    save_file(flat(), path / "model.safetensors")
    return path / "model.safetensors"


def sharded(path: Path) -> Path:
    from safetensors.numpy import save_file

    files = {name: f"model-0000{i}-of-00003.safetensors" for i, name in enumerate(flat(), 1)}
    for name, file in files.items():
        save_file({name: flat()[name]}, path / file)
    index = {"metadata": {}, "weight_map": files}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def torch_save(path: Path) -> Path:
    import torch

    torch.save(tensors(torch.from_numpy), path / "model.pt")
    return path / "model.pt"


def dcp(path: Path) -> Path:
    import torch
    import torch.distributed.checkpoint

    torch.distributed.checkpoint.save(tensors(torch.from_numpy), checkpoint_id=path, no_dist=True)
    return path


def npz(path: Path) -> Path:
    np.savez_compressed(path / "model.npz", **flat())  # type: ignore[arg-type]
    return path / "model.npz"


def flax(path: Path) -> Path:
    import flax.serialization

    (path / "model.msgpack").write_bytes(flax.serialization.to_bytes(tensors()))
    return path / "model.msgpack"


#: By writer, the name of the format and of a leaf.
WRITERS = {
    safetensors: ("safetensors", "layers.1.w"),
    sharded: ("safetensors", "layers.1.w"),
    torch_save: ("torch.save", "layers[1]/w"),
    dcp: ("torch.distributed.checkpoint", "layers[1]/w"),
    npz: ("numpy", "layers.1.w"),
    flax: ("flax", "layers/1/w"),
}


@pytest.mark.parametrize("writer", list(WRITERS), ids=lambda writer: writer.__name__)
def test_every_command_takes_every_format(writer: Any, tmp_path: Path) -> None:
    (tmp_path / "theirs").mkdir()
    path = writer(tmp_path / "theirs")
    family, leaf = WRITERS[writer]
    ours = tmp_path / "ours"
    sw.save(ours, tensors())

    listed = document("ls", path)
    assert (listed["path"], listed["format"]) == (str(path), family)
    assert (listed["number_of_tensors"], listed["opaque"]) == (3, [])
    assert sum(file["tensors"] for file in listed["files"]) == 3
    assert len(listed["files"]) == (3 if writer is sharded else 1)
    shown = document("show", path)
    assert {one["path"]: one["shape"] for one in shown["leaves"]}[leaf] == [4, 4]
    assert document("cat", path, f"{leaf}[0, 1:]")["values"] == [1.5, 1.5, 1.5]
    assert document("verify", path)["ok"]
    planned = document("plan", path, "--include", leaf)
    assert planned["report"]["restored"] == [leaf]

    assert document("diff", path, ours)["same"]
    document("convert", path, tmp_path / "converted", "--to", "stepwell", "--verify")
    assert document("diff", tmp_path / "converted", path)["same"]
    document("export", path, tmp_path / "exported", "--map", renaming(tmp_path, leaf))
    stored = sw.restore(tmp_path / "exported")
    assert np.array_equal(stored["renamed"], LAYERS[1])
    assert np.array_equal(stored["embed"], EMBED)


def renaming(folder: Path, leaf: str) -> Path:
    """A map that renames a leaf."""
    file = folder / "map.toml"
    file.write_text(f'[[rule]]\nrename = "{leaf}"\nto = "renamed"\n')
    return file


@pytest.mark.parametrize("one", [torch_save, npz, flax], ids=lambda writer: writer.__name__)
@pytest.mark.parametrize("other", [sharded, dcp], ids=lambda writer: writer.__name__)
def test_two_foreign_formats_are_compared_by_value(one: Any, other: Any, tmp_path: Path) -> None:
    paths = []
    for writer in (one, other):
        (tmp_path / writer.__name__).mkdir()
        paths.append(writer(tmp_path / writer.__name__))
    assert document("diff", *paths)["common_leaves"] == 3
    LAYERS[0][2, 2] += 4
    try:
        (tmp_path / "changed").mkdir()
        changed = other(tmp_path / "changed")
    finally:
        LAYERS[0][2, 2] -= 4
    found = document("diff", paths[0], changed, code=1)
    (change,) = found["changed"]
    assert (change["differing_elements"], change["max_abs_difference"]) == (1, 4.0)
