"""Writes checkpoints with an old version of Orbax, and what is in them: ``orbax_<version>/``.

    python3.11 -m venv old
    old/bin/pip install orbax-checkpoint==0.5.23 jax==0.4.30 jaxlib==0.4.30 'numpy<2'
    old/bin/python tests/foreign/make_orbax.py

``tests/python/test_old_versions.py`` reads the files. They were made on a machine without a GPU.
``expected.json`` has the leaves of each by path: an array as dtype, shape and bytes, other values
as they are. The script takes them from memory, before it saves them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

VERSION = version("orbax-checkpoint")
#: Zarr 3 came with 0.5, which also ended the file with aggregated arrays.
IS_0_4 = VERSION.startswith("0.4.")
FOLDER = Path(__file__).resolve().parent / f"orbax_{VERSION}"
DTYPES = ("bool", "uint8", "int8", "int16", "int32", "float16", "bfloat16", "float32", "complex64")


def leaves(value: object, path: str = "") -> Iterator[tuple[str, object]]:
    """The leaves of a state, by path."""
    if isinstance(value, dict):
        for key, one in value.items():
            yield from leaves(one, f"{path}/{key}")
    elif isinstance(value, (list, tuple)):
        for at, one in enumerate(value):
            yield from leaves(one, f"{path}/{at}")
    elif isinstance(value, (jax.Array, np.ndarray)):
        array = np.asarray(value)
        yield path, [array.dtype.name, list(array.shape), array.tobytes().hex()]
    else:
        yield path, value


def state() -> dict[str, Any]:
    """Arrays of all dtypes, zeros, nested containers and plain values."""
    arrays = {name: jnp.asarray(np.arange(12).reshape(3, 4) % 7, dtype=name) for name in DTYPES}
    return {
        "arrays": arrays,
        "nested": {"list": [jnp.ones(3), {"x": jnp.full((2, 2), 3.5)}], "scalar": jnp.float32(2.5)},
        "zeros": jnp.zeros((5, 3)),
        "half": jnp.concatenate([jnp.zeros((4, 6)), jnp.ones((4, 6))]),
        "numpy": np.arange(5, dtype=np.int64),
        "step": 7,
        "rate": 0.5,
    }


def distributed() -> dict[str, Any]:
    """Arrays on eight devices."""
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("x", "y"))
    whole = np.arange(12 * 10, dtype="float32").reshape(12, 10)
    specs = {"both": PartitionSpec("x", "y"), "rows": PartitionSpec("x"), "none": PartitionSpec()}
    arrays = {name: jax.device_put(whole, NamedSharding(mesh, spec)) for name, spec in specs.items()}
    half = np.concatenate([np.zeros((6, 4), "float32"), np.ones((6, 4), "float32")])
    return {**arrays, "half": jax.device_put(half, NamedSharding(mesh, PartitionSpec("x")))}


def save(name: str, value: Any, aggregates: bool = False, **options: Any) -> None:
    """Saves a tree."""
    checkpointer = ocp.Checkpointer(ocp.PyTreeCheckpointHandler(**options))
    arguments = jax.tree_util.tree_map(lambda _: ocp.SaveArgs(aggregate=aggregates), value)
    checkpointer.save(FOLDER / name, args=ocp.args.PyTreeSave(value, save_args=arguments))


def main() -> None:
    """Writes everything."""
    shutil.rmtree(FOLDER, ignore_errors=True)
    FOLDER.mkdir()
    one, other = state(), distributed()
    save("zarr2", one, use_ocdbt=False)
    save("zarr2_ocdbt", one, use_ocdbt=True)
    save("devices", other, use_ocdbt=False)
    save("devices_ocdbt", other, use_ocdbt=True)
    if IS_0_4:
        save("aggregate", one, aggregates=True, use_ocdbt=False)
    else:
        save("zarr3", one, use_ocdbt=False, use_zarr3=True)
        save("zarr3_ocdbt", one, use_ocdbt=True, use_zarr3=True)
        save("devices_zarr3", other, use_ocdbt=False, use_zarr3=True)
    if IS_0_4:
        manager = ocp.CheckpointManager(FOLDER / "manager", ocp.Checkpointer(ocp.StandardCheckpointHandler()))
        manager.save(3, other)
    else:
        with ocp.CheckpointManager(FOLDER / "manager") as manager:
            manager.save(3, args=ocp.args.StandardSave(other))
            manager.wait_until_finished()
    saved = {path.name: one for path in FOLDER.iterdir()}
    saved |= {name: other for name in saved if name.startswith(("devices", "manager"))}
    expected = {name: dict(leaves(value)) for name, value in sorted(saved.items())}
    (FOLDER / "expected.json").write_text(json.dumps(expected, indent=0) + "\n")


if __name__ == "__main__":
    main()
