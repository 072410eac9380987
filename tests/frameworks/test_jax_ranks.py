"""Arrays of JAX over several processes: any sharding, saved by some number of processes and
restored by another, in real processes."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import stepwell as sw

sys.path.append(str(Path(__file__).resolve().parents[1] / "python"))

from ranks import free_port, run

PREAMBLE = """
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={sys.argv[6]}"
import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
jax.distributed.initialize(f"127.0.0.1:{sys.argv[5]}", num_processes=WORLD, process_id=RANK)
devices = np.array(jax.devices())
MESH = tuple(map(int, sys.argv[7].split("x")))
mesh = Mesh(devices.reshape(MESH), ("x", "y"))

SPECS = {
    "rows": ((16, 6), P("x", None)),
    "columns": ((6, 16), P(None, "y")),
    "both": ((16, 16), P("x", "y")),
    "swapped": ((16, 16), P("y", "x")),
    "one": ((16, 3), P(("x", "y"), None)),
    "replicated": ((5, 7), P()),
    "scalar": ((), P()),
}

def whole(name):
    shape = SPECS[name][0]
    return (np.arange(int(np.prod(shape))) * 3 + sum(map(ord, name))).astype(np.float32).reshape(shape)

def arrays(value):
    return {
        name: jax.make_array_from_callback(shape, NamedSharding(mesh, spec), lambda index, name=name: value(name)[index])
        for name, (shape, spec) in SPECS.items()
    }

def check(got):
    for name, one in got.items():
        assert one.sharding == NamedSharding(mesh, SPECS[name][1]), name
        for shard in one.addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), whole(name)[shard.index], err_msg=name)
"""

SAVE = (
    PREAMBLE
    + """
with sw.CheckpointManager(ROOT, options=sw.Options(stall_timeout=60.0)) as manager:
    manager.save(1, {"params": arrays(whole), "rng": jax.random.key(7), "step": 1}).result()
jax.distributed.shutdown()
"""
)

RESTORE = (
    PREAMBLE
    + """
zeros = lambda name: np.zeros(SPECS[name][0], np.float32)
with sw.CheckpointManager(ROOT, options=sw.Options(stall_timeout=60.0)) as manager:
    got = manager.restore(into={"params": arrays(zeros), "step": 0})
    check(got["params"])
    like = {name: jax.ShapeDtypeStruct(shape, np.float32, sharding=NamedSharding(mesh, spec)) for name, (shape, spec) in SPECS.items()}
    check(manager.restore(like={"params": like})["params"])
jax.distributed.shutdown()
"""
)


def test_what_some_processes_save_others_restore_in_any_sharding(tmp_path: Path) -> None:
    root = tmp_path / "run"
    run(tmp_path, SAVE, 2, root, free_port(), 4, "4x2")
    found = sw.restore(root)
    for name, array in found["params"].items():
        expected = (np.arange(array.size) * 3 + sum(map(ord, name))).astype(np.float32).reshape(array.shape)
        np.testing.assert_array_equal(array, expected, err_msg=name)
    # Every byte once: not once for each process.
    stored = sum(file.stat().st_size for file in root.rglob("*.data"))
    assert stored < sum(array.nbytes for array in found["params"].values()) + 6 * 5 * 4096
    run(tmp_path, RESTORE, 2, root, free_port(), 2, "1x4")
    run(tmp_path, RESTORE, 4, root, free_port(), 1, "2x2")


SOME = (
    PREAMBLE
    + """
halves = devices.reshape(2, -1)[RANK // 2]  # of this process and another
values = np.arange(48, dtype=np.float32).reshape(16, 3)
on = {"half": Mesh(halves, ("x",)), "local": Mesh(np.array(jax.local_devices()), ("x",))}
state = {
    f"{name} {spec}": jax.make_array_from_callback(values.shape, NamedSharding(some, spec), lambda index: values[index])
    for name, some in on.items()
    for spec in (P("x"), P())
}
with sw.CheckpointManager(ROOT, options=sw.Options(stall_timeout=60.0)) as manager:
    manager.save(1, state).result()
jax.distributed.shutdown()
"""
)


def test_arrays_on_some_devices_are_saved_once(tmp_path: Path) -> None:
    root = tmp_path / "run"
    run(tmp_path, SOME, 4, root, free_port(), 2, "8x1")
    found = sw.restore(root)
    assert len(found) == 4
    for name, array in found.items():
        np.testing.assert_array_equal(array, np.arange(48, dtype=np.float32).reshape(16, 3), err_msg=name)


ELSEWHERE = (
    PREAMBLE
    + """
values = {"w": np.arange(48, dtype=np.float32).reshape(16, 3), "n": np.array([np.nan, 1.0, np.inf, 2.0], np.float32)}
key = jax.random.key(7)
with sw.CheckpointManager(ROOT, options=sw.Options(stall_timeout=60.0)) as manager:
    manager.save(1, {**values, "key": key}).result()
    rows, everywhere = NamedSharding(mesh, P("x")), NamedSharding(mesh, P())
    last = NamedSharding(Mesh(np.array(jax.local_devices(process_index=1)), ("x",)), P("x"))

    # No call that all processes make: one of them may have failed before.
    got = manager.restore(to="jax", shardings=lambda path, spec: {"w": rows, "n": everywhere}.get(path))
    for name, value in values.items():
        for shard in got[name].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), value[shard.index])
    assert got["w"].sharding == rows and got["n"].sharding == everywhere

    # Of devices of one process, and of one device of it.
    like = {
        "w": jax.ShapeDtypeStruct((16, 3), np.float32, sharding=last),
        "n": jax.ShapeDtypeStruct((4,), np.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[-1])),
        "key": jax.ShapeDtypeStruct(key.shape, key.dtype, sharding=everywhere),
    }
    got = manager.restore(like=like)
    assert len(got["w"].addressable_shards) == (len(jax.local_devices()) if RANK == 1 else 0)
    for name in ("w", "n"):
        assert got[name].dtype == np.float32 and got[name].sharding == like[name].sharding
        for shard in got[name].addressable_shards:
            np.testing.assert_array_equal(np.asarray(shard.data), values[name][shard.index])
    assert got["key"].sharding.is_equivalent_to(everywhere, 0)
    own = got["key"].addressable_shards[0].data
    np.testing.assert_array_equal(np.asarray(jax.random.key_data(own)), np.asarray(jax.random.key_data(key)))

    # One that was donated says where it was.
    array = jax.make_array_from_callback((16, 3), rows, lambda index: np.zeros((16, 3), np.float32)[index])
    array.delete()
    got = manager.restore(into={"w": array}, unexpected="ignore")["w"]
    assert got.sharding == rows
jax.distributed.shutdown()
"""
)


def test_arrays_and_keys_go_to_devices_of_any_process(tmp_path: Path) -> None:
    run(tmp_path, ELSEWHERE, 2, tmp_path / "run", free_port(), 2, "4x1")
