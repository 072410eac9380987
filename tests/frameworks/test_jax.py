"""Arrays of JAX, sharded and not, and the states of its libraries."""

from __future__ import annotations

import contextlib
import gc
import itertools
import time
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import stepwell as sw

jax = pytest.importorskip("jax")
jnp = jax.numpy
from jax.sharding import Mesh, NamedSharding, PartitionSpec  # noqa: E402

SHAPE = (48, 36)


def mesh(*axes: int) -> Any:
    devices = np.array(jax.devices()[: int(np.prod(axes))]).reshape(axes)
    return Mesh(devices, ("x", "y")[: len(axes)])


def sharding(axes: tuple[int, ...], *spec: Any) -> Any:
    return NamedSharding(mesh(*axes), PartitionSpec(*spec))


def equal(one: Any, other: Any) -> bool:
    def same(a: Any, b: Any) -> bool:
        if hasattr(a, "dtype") and jnp.issubdtype(a.dtype, jax.dtypes.prng_key):
            return a.dtype == b.dtype and same(jax.random.key_data(a), jax.random.key_data(b))
        a, b = np.asarray(a), np.asarray(b)
        return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()

    if jax.tree.structure(one) != jax.tree.structure(other):
        return False
    return all(map(same, jax.tree.leaves(one), jax.tree.leaves(other)))


def test_there_are_eight_devices() -> None:
    assert len(jax.devices()) == 8


@pytest.mark.parametrize(
    "dtype",
    ["float32", "float16", "bfloat16", "int8", "int16", "int32", "uint8", "uint16", "uint32", "bool", "complex64",
     "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e4m3fnuz", "float8_e5m2fnuz", "int4", "uint4"],
)  # fmt: skip
def test_every_dtype_comes_back_bit_for_bit(root: Path, dtype: str) -> None:
    values = jnp.arange(12).reshape(3, 4).astype(dtype)
    sw.save(root, {"x": values, "scalar": values[0, 1]})
    back = sw.restore(root, to="jax")
    assert isinstance(back["x"], jax.Array)
    assert equal(back, {"x": values, "scalar": values[0, 1]})
    assert equal(sw.restore(root, like={"x": values, "scalar": jax.ShapeDtypeStruct((), dtype)}), back)
    assert sw.restore(root)["x"].dtype.name == dtype


LAYOUTS = {
    "one device": (sharding, (1,), ()),
    "rows over 8": (sharding, (8,), ("x",)),
    "columns over 2": (sharding, (2,), (None, "x")),
    "4 by 2": (sharding, (4, 2), ("x", "y")),
    "2 by 4, turned": (sharding, (2, 4), ("y", "x")),
    "rows over both": (sharding, (4, 2), (("x", "y"),)),
    "rows over one axis of two": (sharding, (4, 2), ("y",)),
    "replicated": (sharding, (8,), ()),
}


@pytest.mark.parametrize(("stored", "wanted"), itertools.product(LAYOUTS, LAYOUTS))
def test_any_sharding_is_restored_onto_any_other(root: Path, stored: str, wanted: str) -> None:
    values = jnp.arange(SHAPE[0] * SHAPE[1], dtype=jnp.float32).reshape(SHAPE)

    def layout(name: str) -> Any:
        make, axes, spec = LAYOUTS[name]
        return make(axes, *spec)

    sw.save(root, {"w": jax.device_put(values, layout(stored))})
    with sw.open(root) as checkpoint:
        assert checkpoint.metadata().nbytes == values.nbytes
    written = sum(file.stat().st_size for file in root.rglob("*.data"))
    assert written < values.nbytes + 64 * 1024, "a byte was written twice"
    like = {"w": jax.ShapeDtypeStruct(SHAPE, jnp.float32, sharding=layout(wanted))}
    back = sw.restore(root, like=like)["w"]
    assert back.sharding == layout(wanted)
    assert equal(back, values)
    live = jax.device_put(jnp.zeros(SHAPE), layout(wanted))
    assert equal(sw.restore(root, into={"w": live})["w"], values)
    assert not live.any(), "an array of JAX is never changed"


def test_shards_that_cannot_be_held_are_copied(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from stepwell._adapters import jax as adapter

    values = jnp.arange(16, dtype=jnp.int4).reshape(8, 2)
    sw.save(root / "packed", {"w": jax.device_put(values, sharding((4,), "x"))})
    assert equal(sw.restore(root / "packed", to="jax")["w"], values)
    # As where the devices are no processors of this host.
    monkeypatch.setattr(adapter, "_can_be_held", lambda array: False)
    floats = jnp.arange(32.0).reshape(8, 4)
    with sw.CheckpointManager(root / "device") as mgr:
        save = mgr.save(0, {"w": jax.device_put(floats, sharding((4,), "x"))})
        save.result()
        assert equal(mgr.restore(to="jax")["w"], floats)


def test_uneven_dimensions_are_sharded_as_by_jax(root: Path) -> None:
    values = jnp.arange(40.0).reshape(8, 5)
    sw.save(root, {"w": jax.device_put(values, sharding((8,), "x"))})
    for axes in ((1,), (2,), (4,)):
        like = {"w": jax.ShapeDtypeStruct((8, 5), jnp.float32, sharding=sharding(axes, "x"))}
        assert equal(sw.restore(root, like=like)["w"], values)


def test_only_the_shards_that_are_wanted_are_read(root: Path) -> None:
    values = jnp.arange(1 << 22, dtype=jnp.float32).reshape(2048, 2048)
    sw.save(root, {"w": jax.device_put(values, sharding((8,), "x"))})
    like = {"w": jax.ShapeDtypeStruct((2048, 2048), jnp.float32, sharding=sharding((4, 2), "y", "x"))}
    with sw.open(root) as checkpoint:
        plan = checkpoint.plan(like=like)
    assert plan.nbytes == values.nbytes
    assert plan.read_bytes <= 1.05 * values.nbytes


def test_abstract_arrays_of_one_device_come_back_there(root: Path) -> None:
    third = jax.sharding.SingleDeviceSharding(jax.devices()[3])
    state = {
        "w": jnp.arange(12.0).reshape(3, 4),
        "b": jnp.ones(4, jnp.bfloat16),
        "none": jnp.zeros((0, 2)),
        "step": 7,
    }
    sw.save(root, state)
    abstract = {
        "w": jax.ShapeDtypeStruct((3, 4), jnp.float32, sharding=third),
        "b": jax.ShapeDtypeStruct((4,), jnp.bfloat16),
        "none": jax.ShapeDtypeStruct((0, 2), jnp.float32, sharding=third),
        "step": 0,
    }
    back = sw.restore(root, like=abstract)
    assert equal(back, state)
    assert back["w"].sharding == third
    assert back["w"].committed
    assert back["none"].sharding == third
    assert not back["b"].committed
    abstract["w"] = jax.ShapeDtypeStruct((3, 4), jnp.float16, sharding=third)
    with pytest.raises(sw.MismatchError, match="float16"):
        sw.restore(root, like=abstract)
    assert sw.restore(root, like=abstract, cast="lossy")["w"].dtype == jnp.float16


@pytest.mark.parametrize("abstract", [True, False])
def test_tied_arrays_that_are_wanted_on_two_devices_are_there(root: Path, abstract: bool) -> None:
    w = jnp.arange(6.0)
    sw.save(root, {"a": w, "b": w})
    first, second = (jax.sharding.SingleDeviceSharding(jax.devices()[n]) for n in (1, 2))

    def wanted(place: Any) -> Any:
        return (
            jax.ShapeDtypeStruct((6,), jnp.float32, sharding=place)
            if abstract
            else jax.device_put(jnp.zeros(6), place)
        )

    back = sw.restore(root, like={"a": wanted(first), "b": wanted(second)})
    assert (back["a"].sharding, back["b"].sharding) == (first, second)
    assert equal(back, {"a": w, "b": w})


TIED = {
    "abstract": lambda: jax.ShapeDtypeStruct((6,), jnp.float32),
    "jax": lambda: jnp.zeros(6),
    "numpy": lambda: np.zeros(6, np.float32),
    "spec": lambda: sw.ArraySpec((6,), "float32"),
    "as stored": lambda: sw.AS_STORED,
}


@pytest.mark.parametrize(("one", "other"), list(itertools.product(TIED, TIED)))
@pytest.mark.parametrize("leaf_by_leaf", [False, True], ids=["", "leaf by leaf"])
def test_tied_leaves_come_back_as_what_each_of_them_is_wanted(
    root: Path, one: str, other: str, leaf_by_leaf: bool
) -> None:
    w = np.arange(6, dtype=np.float32)
    sw.save(root, {"p": {"a": w, "b": w}})
    how: dict[str, Any] = {"include": ["**"]} if leaf_by_leaf else {}
    back = sw.restore(root, like={"p": {"a": TIED[one](), "b": TIED[other]()}}, **how)["p"]
    for name, wanted in (("a", one), ("b", other)):
        assert isinstance(back[name], jax.Array if wanted in ("abstract", "jax") else np.ndarray), name
    for array in back.values():
        if isinstance(array, np.ndarray):
            assert np.array_equal(array, w)
    for array in back.values():
        if isinstance(array, np.ndarray):
            array[:] = 7
    for name, array in back.items():
        # One of JAX never changes, and so it has no memory that somebody can write to.
        assert isinstance(array, np.ndarray) or np.array_equal(array, w), name
    both_of_numpy = all(isinstance(array, np.ndarray) for array in back.values())
    assert (back["a"] is back["b"]) == both_of_numpy, "tied, as far as numpy can say so"


def test_a_jax_array_shares_no_memory_with_a_filled_tie(root: Path) -> None:
    w = np.arange(6, dtype=np.float32)
    sw.save(root, {"p": {"a": w, "b": w, "c": w}})
    fixed = np.zeros(6, np.float32)
    fixed.flags.writeable = False
    own = np.zeros(6, np.float32)
    back = sw.restore(root, into={"p": {"a": jnp.zeros(6), "b": own, "c": fixed}})["p"]
    assert back["b"] is own
    assert equal(list(back.values()), [jnp.asarray(w), w, w])
    for name in ("b", "c"):
        back[name][:] = 7
    assert equal(back["a"], w)


class _Holder:
    def __init__(self, w: Any) -> None:
        self.w = w

    def state_dict(self) -> dict[str, Any]:
        return {"w": self.w}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.w = state["w"]


def test_a_jax_array_in_an_object_shares_no_memory(root: Path) -> None:
    w = jnp.arange(6.0)
    sw.save(root, {"p": {"holder": _Holder(w), "seen": np.asarray(w)}})
    assert sw.metadata(root).nbytes == w.nbytes, "tied"
    back = sw.restore(root, like={"p": {"holder": _Holder(w), "seen": sw.ArraySpec()}})["p"]
    assert isinstance(back["holder"]["w"], jax.Array)
    back["seen"][:] = 7
    assert equal(back["holder"]["w"], w)


def test_a_stored_subtree_is_numpy_beside_a_jax_tie(root: Path) -> None:
    w, v = np.arange(6, dtype=np.float32), np.ones((2, 2), np.int8)
    sw.save(root, {"p": {"first": {"w": w, "v": v}, "then": [{"w": w}, v]}})
    wanted = jax.ShapeDtypeStruct((6,), jnp.float32)
    for like in (
        {"first": {"w": wanted, "v": v}, "then": sw.AS_STORED},
        {"first": sw.AS_STORED, "then": [{"w": wanted}, v]},
    ):
        back = sw.restore(root, like={"p": like})["p"]
        abstract, stored = back["first"]["w"], back["then"][0]["w"]
        if like["first"] is sw.AS_STORED:
            abstract, stored = stored, abstract
        assert isinstance(abstract, jax.Array)
        assert isinstance(stored, np.ndarray)
        assert back["first"]["v"] is back["then"][1]
        assert equal(back["first"]["v"], v)


@pytest.mark.parametrize("abstract", [True, False])
def test_tied_arrays_of_jax_come_back_with_each_target_its_own(root: Path, abstract: bool) -> None:
    w, v = jnp.arange(6.0), jnp.ones((2, 3), jnp.bfloat16)
    sw.save(root, {"p": {"a": w, "b": w, "c": w, "d": v, "e": w}, "q": [v, v]})
    third = jax.sharding.SingleDeviceSharding(jax.devices()[3])

    def wanted(shape: tuple[int, ...], dtype: Any, place: Any = None) -> Any:
        if abstract:
            return jax.ShapeDtypeStruct(shape, dtype, sharding=place)
        return jax.device_put(jnp.zeros(shape, dtype), place)

    one = wanted((6,), jnp.float32)
    like = {
        "p": {
            "a": one,
            "b": wanted((6,), jnp.float32),
            "c": wanted((6,), jnp.float32, third),
            "d": wanted((2, 3), jnp.bfloat16),
            "e": one,
        },
        "q": [wanted((2, 3), jnp.bfloat16), wanted((2, 3), jnp.bfloat16, third)],
    }
    selected = sw.restore(root, like=like, include=["**"])
    back = sw.restore(root, like=like)
    assert equal(back, {"p": {"a": w, "b": w, "c": w, "d": v, "e": w}, "q": [v, v]})
    assert equal(back, selected)
    for array, other in zip(jax.tree.leaves(back), jax.tree.leaves(selected), strict=True):
        assert (array.sharding, array.committed) == (other.sharding, other.committed)
    assert back["p"]["a"] is back["p"]["e"], "tied in the target, too"
    assert back["p"]["a"] is not back["p"]["b"]
    # Two arrays can be donated separately.
    step = jax.jit(lambda a, b: (a + 1, b + 2), donate_argnums=(0, 1))
    assert equal(step(back["p"]["a"], back["p"]["b"]), (w + 1, w + 2))
    assert equal([back["p"]["c"], back["q"]], [w, [v, v]])


def test_a_prng_key_for_a_plain_array_is_a_mismatch(root: Path) -> None:
    sw.save(root, {"p": {"key": np.zeros(2, np.uint32)}})
    for target in (jax.eval_shape(lambda: jax.random.key(0)), jax.random.key(0)):
        with pytest.raises(sw.MismatchError, match="p/key/impl"):
            sw.restore(root, like={"p": {"key": target}})
    # One that is stored as what it is comes back so.
    key = jax.random.key(1)
    sw.save(root, {"p": {"key": key}}, exists="replace")
    assert equal(sw.restore(root, like={"p": {"key": jax.eval_shape(lambda: key)}})["p"]["key"], key)


def test_a_shape_with_a_symbol_in_it_is_refused_by_leaf(root: Path) -> None:
    from jax import export

    (n,) = export.symbolic_shape("n")
    sw.save(root, {"p": {"w": jnp.ones(3)}})
    with pytest.raises(sw.MisuseError, match="tuple of integers") as error:
        sw.restore(root, like={"p": {"w": jax.ShapeDtypeStruct((n,), jnp.float32)}})
    assert error.value.leaf == "p/w"


def test_shardings_may_be_one_for_all_a_tree_or_a_function(root: Path) -> None:
    state = {"params": {"w": jnp.ones((8, 4)), "b": jnp.zeros(8)}, "step": 3}
    sw.save(root, state)
    rows, one = sharding((4,), "x"), jax.sharding.SingleDeviceSharding(jax.devices()[3])
    for given in (
        rows,
        {"params": {"w": rows, "b": rows}},
        {"params": rows},
        lambda path, spec: rows if spec.shape else None,
    ):
        back = sw.restore(root, to="jax", shardings=given)
        assert back["params"]["w"].sharding == rows
        assert back["step"] == 3
        assert (
            sw.restore(root, like=jax.tree.map(lambda x: x, state), shardings=given)["params"]["b"].sharding
            == rows
        )
    assert sw.restore(root, to="jax", device=jax.devices()[3])["params"]["b"].sharding == one
    with pytest.raises(sw.MisuseError, match="device='gpu'"):
        sw.restore(root, to="jax", device="gpu")
    with pytest.raises(sw.MisuseError, match="shardings"):
        sw.restore(root, shardings=rows)
    with pytest.raises(sw.MismatchError, match="params/w") as caught:
        sw.restore(root, like={"params": {"w": jnp.ones((8, 4))}}, shardings=sharding((8,), None, "x"))
    assert caught.value.leaf == "params/w"


def test_saving_jax_arrays_does_not_wait_for_the_copy(root: Path) -> None:
    arrays = [jnp.full((1 << 20,), float(number)) for number in range(64)]
    jax.block_until_ready(arrays)
    step = jax.jit(lambda xs: [x + 1 for x in xs], donate_argnums=0)
    # Memory for a small part of them only, so that the copy cannot be over as soon as `save`
    # returns.
    with sw.CheckpointManager(root, staging_bytes=16 << 20) as mgr:
        for number in range(3):
            save = mgr.save(number, {"a": arrays})
            assert not save.captured(), "save waited for the copy"
            arrays = step(arrays)
            jax.block_until_ready(arrays)
            save.result()
            back = mgr.restore(number)["a"]
            assert all((one == index + number).all() for index, one in enumerate(back))


@pytest.mark.parametrize("devices", [1, 8])
@pytest.mark.parametrize("how", ["manager", "path"])
def test_an_eager_snapshot_copies_before_save_returns(root: Path, how: str, devices: int) -> None:
    array = jax.device_put(jnp.zeros(1 << 23), sharding((devices,), "x")).block_until_ready()
    add = jax.jit(lambda x: x + 1, donate_argnums=0)
    # It is compiled before, so that nothing but the call itself is between the save and the
    # donation.
    add(jax.device_put(jnp.ones(1 << 23), array.sharding)).block_until_ready()

    def places(array: Any) -> list[int]:
        return [shard.data.unsafe_buffer_pointer() for shard in array.addressable_shards]

    before = places(array)
    with contextlib.ExitStack() as stack:
        if how == "manager":
            mgr = stack.enter_context(sw.CheckpointManager(root))
            save = mgr.save(0, {"a": array}, snapshot="eager")
        else:
            save = sw.save_async(root, {"a": array}, snapshot="eager")
        after = add(array)
        assert save.captured()
        assert array.is_deleted()
        assert places(after.block_until_ready()) == before
        save.result()
    assert not sw.restore(root)["a"].any()


def test_an_array_that_was_donated_before_is_named(root: Path) -> None:
    array = jnp.zeros(4)
    jax.jit(lambda x: x + 1, donate_argnums=0)(array)
    with sw.CheckpointManager(root) as mgr:
        with pytest.raises(sw.errors.DonatedBuffer, match="params/w") as caught:
            mgr.save(0, {"params": {"w": array}})
        assert caught.value.leaf == "params/w"
        assert mgr.all_steps() == []


def test_a_tracer_is_refused_with_a_hint(root: Path) -> None:
    with sw.CheckpointManager(root) as mgr, pytest.raises(sw.UnsupportedLeaf, match="jit"):
        jax.jit(lambda x: mgr.check({"x": x}))(jnp.zeros(3))


def test_lazy_and_eager_leaves_may_be_mixed(root: Path) -> None:
    options = sw.Options()
    host = np.zeros(1 << 20, np.float32)
    with sw.CheckpointManager(root, max_pending=4, options=options) as mgr:
        saves = []
        for number in range(6):
            host[:] = number
            device = jnp.full((1 << 20,), float(number))
            state = {"device": device, "host": host} if number % 2 else {"device": device}
            saves.append(mgr.save(number, state))
        for save in saves:
            save.result()
        assert mgr.all_steps() == list(range(6))
        for number in range(6):
            back = mgr.restore(number)
            assert all((value == number).all() for value in back.values())


def test_a_state_larger_than_staging_is_captured_late(root: Path) -> None:
    arrays = [jnp.full((1 << 20,), float(number)) for number in range(32)]
    with sw.CheckpointManager(root, staging_bytes=16 << 20, max_pending=2) as mgr:
        for number in range(3):
            mgr.save(number, {"a": arrays, "host": np.full(1 << 20, number, np.float32)})
        mgr.wait_until_finished()
        assert (mgr.restore(2)["host"] == 2).all()
        assert all((one == index).all() for index, one in enumerate(mgr.restore(1)["a"]))


def test_what_is_held_is_let_go_after_the_capture(root: Path) -> None:
    array = jnp.zeros(1 << 20).block_until_ready()
    place = array.unsafe_buffer_pointer()
    with sw.CheckpointManager(root) as mgr:
        mgr.save(0, {"a": array}).result()
        time.sleep(0.5)
        gc.collect()
        after = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
        assert after.unsafe_buffer_pointer() == place


def test_typed_and_raw_prng_keys_go_on_where_they_were(root: Path) -> None:
    state = {
        "key": jax.random.key(7),
        "keys": jax.random.split(jax.random.key(1), 3),
        "rbg": jax.random.key(3, impl="rbg"),
        "raw": jax.random.PRNGKey(5),
    }
    sw.save(root, state)
    assert equal(sw.restore(root, into=state), state)
    assert equal(sw.restore(root, to="jax"), state)
    like = {**state, "key": jax.eval_shape(lambda: jax.random.key(0))}
    assert equal(sw.restore(root, like=like)["key"], state["key"])


class Pair(NamedTuple):
    a: Any
    b: Any


def test_optax_states_keep_their_classes(root: Path) -> None:
    optax = pytest.importorskip("optax")
    params = {"w": jnp.ones((4, 4)), "b": jnp.zeros(4)}
    transform = optax.chain(
        optax.clip_by_global_norm(1.0), optax.adamw(optax.cosine_decay_schedule(1e-3, 100))
    )
    opt_state = transform.init(params)
    _, opt_state = transform.update(jax.tree.map(jnp.ones_like, params), opt_state, params)
    sw.save(root, {"opt": opt_state, "pair": Pair(jnp.ones(2), 3)})
    target = {"opt": transform.init(jax.tree.map(jnp.zeros_like, params)), "pair": Pair(jnp.zeros(2), 0)}
    back = sw.restore(root, into=target)
    assert equal(back["opt"], opt_state)
    assert type(back["pair"]) is Pair
    abstract = jax.eval_shape(transform.init, params)
    assert equal(sw.restore(root, like={"opt": abstract})["opt"], opt_state)


def test_a_flax_train_state_takes_functions_from_the_target(root: Path) -> None:
    nn = pytest.importorskip("flax.linen")
    optax = pytest.importorskip("optax")
    from flax.training.train_state import TrainState

    def make(seed: int) -> Any:
        model = nn.Dense(3)
        params = model.init(jax.random.key(seed), jnp.ones((1, 2)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))

    run = make(0)
    run = run.apply_gradients(grads=jax.tree.map(jnp.ones_like, run.params))
    sw.save(root, {"train": run})
    other = make(9)
    back = sw.restore(root, into={"train": other})["train"]
    assert type(back) is TrainState
    assert back.apply_fn is other.apply_fn
    assert back.step == 1
    assert equal((back.params, back.opt_state), (run.params, run.opt_state))
    assert sw.restore(root)["train"]["params"]["kernel"].shape == (2, 3)


def test_a_jitted_flax_train_state_restores_into_a_fresh_one(root: Path) -> None:
    nn = pytest.importorskip("flax.linen")
    optax = pytest.importorskip("optax")
    from flax.training.train_state import TrainState

    def make(seed: int) -> Any:
        model = nn.Dense(3)
        params = model.init(jax.random.key(seed), jnp.ones((1, 2)))["params"]
        return TrainState.create(apply_fn=model.apply, params=params, tx=optax.adam(1e-2))

    @jax.jit
    def update(run: Any) -> Any:
        return run.apply_gradients(grads=jax.tree.map(jnp.ones_like, run.params))

    fresh, trained = make(0), update(update(make(0)))
    for stored, target in [(trained, make(9)), (fresh, trained)]:
        sw.save(root, {"train": stored}, exists="replace")
        back, report = sw.restore(root, into={"train": target}, return_report=True)
        assert type(back["train"].step) is type(target.step)
        assert back["train"].step == stored.step
        assert equal(back["train"].params, stored.params)
        assert "train/step" in [one.path for one in report.cast]
        assert update(back["train"]).step == stored.step + 1


def test_flax_nnx_states_and_modules(root: Path) -> None:
    nnx = pytest.importorskip("flax.nnx")

    class Net(nnx.Module):
        def __init__(self, rngs: Any) -> None:
            self.linear = nnx.Linear(2, 3, rngs=rngs)
            self.drop = nnx.Dropout(0.5, rngs=rngs)
            self.layers = nnx.List([nnx.Linear(3, 3, rngs=rngs) for _ in range(2)])

    run, other = Net(nnx.Rngs(0)), Net(nnx.Rngs(5))
    sw.save(root, {"state": nnx.state(run)})
    back = sw.restore(root, into={"state": nnx.state(other)})["state"]
    nnx.update(other, back)
    assert equal(nnx.state(other), nnx.state(run))


def test_an_nnx_module_is_refused_as_into_and_made_as_like(root: Path) -> None:
    nnx = pytest.importorskip("flax.nnx")
    optax = pytest.importorskip("optax")
    run, other = (nnx.Linear(2, 2, rngs=nnx.Rngs(seed)) for seed in (0, 1))
    sw.save(root, {"net": run})
    before = np.asarray(other.kernel[...])
    for target in (
        {"net": other},
        {"net": {"inner": [nnx.Optimizer(other, optax.adam(1e-3), wrt=nnx.Param)]}},
    ):
        with pytest.raises(sw.UnsupportedLeaf, match=r"nnx\.state.*nnx\.update") as caught:
            sw.restore(root, into=target)
        assert str(caught.value.leaf).startswith("net")
    assert (np.asarray(other.kernel[...]) == before).all()
    made = sw.restore(root, like={"net": other})["net"]
    assert type(made) is nnx.Linear
    assert equal(nnx.state(made), nnx.state(run))
    # A saved module goes into a live one through a new one.
    nnx.update(other, nnx.state(made))
    assert equal(nnx.state(other), nnx.state(run))


def test_equinox_modules_take_their_functions_from_the_target(root: Path) -> None:
    eqx = pytest.importorskip("equinox")
    run, other = (eqx.nn.MLP(2, 2, 4, 2, key=jax.random.key(seed)) for seed in (0, 1))
    sw.save(root, {"model": run})
    back = sw.restore(root, into={"model": other})["model"]
    assert type(back) is type(run)
    x = jnp.ones(2)
    assert (back(x) == run(x)).all()
    assert "layers" in sw.restore(root)["model"]


def test_a_registered_users_class_is_flattened_as_by_jax(root: Path) -> None:
    @jax.tree_util.register_pytree_node_class
    class Scaled:
        def __init__(self, values: Any, scale: str) -> None:
            self.values, self.scale = values, scale

        def tree_flatten(self) -> Any:
            return (self.values,), self.scale

        @classmethod
        def tree_unflatten(cls, aux: Any, children: Any) -> Any:
            return cls(children[0], aux)

    sw.save(root, {"x": Scaled(jnp.arange(3), "stored")})
    back = sw.restore(root, into={"x": Scaled(jnp.zeros(3, jnp.int32), "mine")})["x"]
    assert (back.values == jnp.arange(3)).all()
    assert back.scale == "mine"


def test_torch_numpy_and_jax_read_what_the_others_wrote(root: Path) -> None:
    torch = pytest.importorskip("torch")
    values = np.arange(12, dtype=np.float32).reshape(3, 4)
    writers = {"numpy": values, "torch": torch.from_numpy(values), "jax": jnp.asarray(values)}
    for name, array in writers.items():
        path = root / name
        sw.save(path, {"x": array})
        assert (sw.restore(path)["x"] == values).all()
        assert torch.equal(sw.restore(path, to="torch")["x"], writers["torch"])
        assert (sw.restore(path, to="jax")["x"] == values).all()
        assert isinstance(sw.restore(path, like={"x": jnp.zeros((3, 4))})["x"], jax.Array)


def test_a_restored_array_shares_its_memory_with_nobody(root: Path) -> None:
    sw.save(root, {"x": jnp.zeros(1 << 16), "y": jnp.ones(1 << 16)})
    back = sw.restore(root, to="jax")
    changed = jax.jit(lambda x: x + 5, donate_argnums=0)(back["x"])
    assert (changed == 5).all()
    assert (back["y"] == 1).all()
    assert not sw.restore(root)["x"].any()


@pytest.mark.parametrize(
    ("dtype", "fits", "beyond"),
    [
        ("int64", [-(2**31), 2**31 - 1], 2**31),
        ("int64", [0], -(2**40)),
        ("uint64", [2**32 - 1], 2**32),
        ("float64", [1e38, -1e38, np.nan, np.inf, 1e-300], 1e300),
        ("float64", [0.5], -1e39),
        ("complex128", [1e38 + 1j], 1e39j),
    ],
)
def test_wide_values_that_jax_cannot_hold_are_refused(
    root: Path, dtype: str, fits: list[Any], beyond: Any
) -> None:
    good, bad = np.array(fits, dtype), np.array([*fits, beyond], dtype)
    sw.save(root / "good", {"a": {"x": good, "one": good[0], "none": good[:0]}})
    back = sw.restore(root / "good", to="jax")["a"]
    assert isinstance(back["x"], jax.Array)
    assert back["x"].dtype == jax.dtypes.canonicalize_dtype(dtype)
    assert np.array_equal(np.asarray(back["x"]), good.astype(back["x"].dtype), equal_nan=True)
    sw.save(root / "bad", {"a": {"ok": good, "x": bad}, "b": np.ones(2)})
    rows = sharding((1,), "x")
    for asked in (
        {"to": "jax"},
        {"to": "jax", "include": "a/**"},
        {"to": "jax", "shardings": rows},
        {"like": {"a": {"x": jax.Array, "ok": jax.Array}}},
    ):
        with pytest.raises(sw.MismatchError, match=r"a/x.*jax_enable_x64.*numpy") as caught:
            sw.restore(root / "bad", **asked)
        assert caught.value.leaf == "a/x"
    assert np.array_equal(sw.restore(root / "bad", to="numpy")["a"]["x"], bad, equal_nan=True)
    jax.config.update("jax_enable_x64", True)
    try:
        back = sw.restore(root / "bad", to="jax")["a"]["x"]
        assert back.dtype == dtype
        assert np.array_equal(np.asarray(back), bad, equal_nan=True)
    finally:
        jax.config.update("jax_enable_x64", False)


def test_a_tree_of_shardings_names_what_is_stored_or_wanted(root: Path) -> None:
    state = {"params": {"w": jnp.ones((8, 8)), "b": jnp.ones(8)}, "opt": (jnp.ones(8), [1, 2]), "step": 3}
    sw.save(root, state)
    rows = sharding((8,), "x")
    for wrong, named, near in (
        ({"parms": rows}, "parms", "params"),
        ({"params": {"W": rows, "b": rows}}, "params/W", "params/w"),
        ({"params": {"w": {"deep": rows}}}, "params/w/deep", "params/w"),
        ([rows], "[0]", ""),
        ({"params": [rows]}, "params[0]", "params"),
        ({"opt": {"m": rows}}, "opt/m", "opt"),
    ):
        for asked in ({"to": "jax"}, {"like": state}, {"into": jax.tree.map(jnp.zeros_like, state)}):
            with pytest.raises(sw.MismatchError, match="shardings=") as caught:
                sw.restore(root, shardings=wrong, **asked)
            assert caught.value.leaf == named
            assert f"  {named}" in str(caught.value)
            assert near in str(caught.value).partition("near")[2]
    for right in (jax.tree.map(lambda _: rows, state), {"params": None}, {"params": {}, "opt": (rows, None)}):
        sw.restore(root, to="jax", shardings=right)
    like = {"weights": {"w": jnp.zeros((8, 8))}}
    renamed = sw.restore(
        root,
        like=like,
        rename={"params/*": "weights/*"},
        exclude="params/b",
        shardings={"weights": rows},
    )
    assert renamed["weights"]["w"].sharding == rows


@pytest.mark.parametrize("way", ["abstract", "like", "into", "shardings"])
def test_prng_keys_come_back_where_they_are_wanted(root: Path, way: str) -> None:
    state = {"k": jax.random.split(jax.random.key(7), 8), "w": jax.numpy.arange(8.0)}
    sw.save(root, state)
    place = sharding((8,), "x")
    wanted = jax.device_put(state, place)
    if way == "abstract":
        found = sw.restore(
            root,
            like=jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), wanted),
        )
    elif way == "shardings":
        found = sw.restore(root, to="jax", shardings=place)
    else:
        found = sw.restore(root, **{way: wanted})
    assert found["w"].sharding == place
    assert found["k"].sharding.is_equivalent_to(place, 1)
    assert (jax.random.key_data(found["k"]) == jax.random.key_data(state["k"])).all()


def test_arrays_come_back_into_the_kind_of_memory_that_is_wanted(root: Path) -> None:
    sw.save(root, {"w": np.arange(8.0, dtype=np.float32)})
    for kind in [memory.kind for memory in jax.devices()[0].addressable_memories()]:
        place = sharding((8,), "x").with_memory_kind(kind)
        like = {"w": jax.ShapeDtypeStruct((8,), np.float32, sharding=place)}
        found = sw.restore(root, like=like)["w"]
        assert found.sharding == place
        assert (np.asarray(found) == np.arange(8.0)).all()


def test_a_key_of_another_implementation_is_named_first(root: Path) -> None:
    for stored, wanted in (("rbg", "unsafe_rbg"), ("threefry2x32", "rbg"), ("rbg", "threefry2x32")):
        sw.save(root, {"k": jax.random.key(1, impl=stored), "w": np.ones(2)}, exists="replace")
        target = jax.random.key(2, impl=wanted)
        abstract = jax.eval_shape(lambda wanted=wanted: jax.random.key(2, impl=wanted))
        weights = np.zeros(2)
        for asked in (
            {"into": target},
            {"into": target, "resize": "pad"},
            {"like": target},
            {"like": abstract},
        ):
            way, key = next(iter(asked.items()))
            with pytest.raises(sw.MismatchError, match=f"'{stored}'.*'{wanted}'") as caught:
                sw.restore(root, **{**asked, way: {"k": key, "w": weights}})
            assert caught.value.leaf == "k"
            assert "pad" not in str(caught.value)
        assert not weights.any()
        with pytest.raises(sw.MismatchError, match=f"'{stored}'.*'{wanted}'"):
            sw.restore(root, like={"key": target}, rename={"k/*": "key/*"}, exclude="w", resize="both")
        same = jax.random.key(9, impl=stored)
        assert equal(sw.restore(root, into={"k": same})["k"], jax.random.key(1, impl=stored))


def test_a_sharding_that_does_not_fit_is_refused_by_leaf(root: Path) -> None:
    sw.save(root, {"a": {"x": jnp.ones((8, 8))}})
    abstract = NamedSharding(jax.sharding.AbstractMesh((8,), ("z",)), PartitionSpec("z"))
    for wrong, said in ((abstract, "AbstractMesh"), (sharding((3,), "x"), "3 times")):
        for asked in (
            {"like": {"a": {"x": jax.ShapeDtypeStruct((8, 8), jnp.float32, sharding=wrong)}}},
            {"like": {"a": {"x": jnp.ones((8, 8))}}, "shardings": wrong},
            {"like": {"a": {"x": jax.Array}}, "shardings": wrong},
            {"to": "jax", "shardings": wrong},
            {"to": "jax", "shardings": {"a": wrong}},
        ):
            with pytest.raises(sw.MismatchError, match=said) as caught:
                sw.restore(root, **asked)
            assert caught.value.leaf == "a/x"
            assert "a/x" in str(caught.value)
