"""Writes checkpoints with an old version of torch, and what is in them: ``torch_<version>/``.

    python3.11 -m venv old
    old/bin/pip install torch==2.2.2 'numpy<2'
    old/bin/python tests/foreign/make.py

``tests/python/test_old_versions.py`` reads the files. They were made on a machine without a GPU.
``expected.json`` has the leaves of each file by path: a tensor as dtype, shape and bytes, other
values as they are. The script takes them from memory, before it saves them.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import OrderedDict
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

FOLDER = Path(__file__).resolve().parent / f"torch_{torch.__version__.split('+')[0]}"
DTYPES = (
    *("bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"),
    *("complex64", "complex128", "float8_e4m3fn", "float8_e5m2"),
)


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """The leaves of a state, by path."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from leaves(one, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for at, one in enumerate(value):
            yield from leaves(one, f"{path}/{at}")
    elif isinstance(value, torch.Tensor):
        plain = value.detach().resolve_conj().contiguous()
        data = plain.reshape(-1).view(torch.uint8).numpy().tobytes()
        yield path, [str(plain.dtype).removeprefix("torch."), list(plain.shape), data.hex()]
    elif isinstance(value, np.ndarray):
        yield path, [value.dtype.name, list(value.shape), value.tobytes().hex()]
    else:
        yield path, value


def tensors() -> dict[str, torch.Tensor]:
    """Tensors of all dtypes, and views."""
    base = torch.arange(24.0).reshape(4, 6)
    return {
        **{name: torch.arange(-2, 4).to(getattr(torch, name)).reshape(2, 3) for name in DTYPES},
        "transposed": base.t(),
        "channels_last": torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last),
        "part": base[1:3, 2:],
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 3),
    }


def training() -> dict[str, object]:
    """The state of a training run."""
    torch.manual_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    return {
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": 3,
        "names": ["a", "b"],
        "ordered": OrderedDict(z=torch.ones(2), a=1.5),
    }


def of_ranks(rank: int, path: str) -> None:
    """Saves distributed tensors, as one of two ranks."""
    from torch.distributed._tensor import Replicate, Shard, distribute_tensor
    from torch.distributed.device_mesh import init_device_mesh

    dist.init_process_group(
        "gloo", init_method=f"file://{os.path.abspath(path)}.store", rank=rank, world_size=2
    )
    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(35.0).reshape(7, 5)
    state = {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole, mesh, [Shard(1)]),
        "replicated": distribute_tensor(whole, mesh, [Replicate()]),
        "step": 7,
    }
    dcp.save_state_dict(state, dcp.FileSystemWriter(path))
    dist.barrier()
    os._exit(0)  # torch 2.4 may wait for the other rank without an end, when it ends the group


def main() -> None:
    """Writes everything."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    arrays = {"f4": np.arange(300, dtype="f4").reshape(20, 15), "i2": np.arange(9, dtype="i2")}
    state = {"tensors": tensors(), "training": training(), "arrays": arrays}
    torch.save(state, FOLDER / "archive.pt")
    torch.save(state, FOLDER / "stream.pt", _use_new_zipfile_serialization=False)
    torch.save(state, FOLDER / "protocol_4.pt", pickle_protocol=4)
    whole = torch.arange(35.0).reshape(7, 5)
    distributed = {"rows": whole, "columns": whole, "replicated": whole, "step": 7}
    saved = {"tensors": tensors(), "training": training()}
    os.chdir(FOLDER)  # torch 2.4 stores the path as it is given
    dcp.save_state_dict(saved, dcp.FileSystemWriter("dcp"), no_dist=True)
    command = [sys.executable, os.path.abspath(__file__)]
    ranks = [subprocess.Popen([*command, str(rank), "dcp_of_ranks"]) for rank in range(2)]
    assert [rank.wait(60) for rank in ranks] == [0, 0]
    Path("dcp_of_ranks.store").unlink(missing_ok=True)
    files = dict.fromkeys(["archive.pt", "stream.pt", "protocol_4.pt"], state)
    files |= {"dcp": saved, "dcp_of_ranks": distributed}
    expected = {name: dict(leaves(one)) for name, one in files.items()}
    Path("expected.json").write_text(json.dumps(expected, indent=0) + "\n")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        of_ranks(int(sys.argv[1]), sys.argv[2])
    else:
        main()
