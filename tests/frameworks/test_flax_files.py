"""MessagePack files that Flax wrote, against what Flax itself reads from them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import stepwell as sw
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of

serialization = pytest.importorskip("flax.serialization")
jax = pytest.importorskip("jax")
optax = pytest.importorskip("optax")

DTYPES = ["?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16"]
ML_DTYPES = [ml_dtypes.bfloat16, ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2, ml_dtypes.int4]


def same(found: Any, expected: Any) -> None:
    """The same values, in the same structure. A scalar of numpy is an array here."""
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for key, one in expected.items():
            same(found[key], one)
    elif isinstance(expected, (np.ndarray, np.generic)):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert found.tobytes() == expected.tobytes()
    else:
        assert type(found) is type(expected)
        assert found == expected


def test_a_training_state_restores_as_flax_reads_it(tmp_path: Path) -> None:
    params = {"dense": {"kernel": jax.numpy.ones((4, 3), jax.numpy.bfloat16), "bias": jax.numpy.zeros(3)}}
    state = {"params": params, "opt_state": optax.adam(1e-3).init(params), "step": 7, "layers": [np.ones(2)]}
    (tmp_path / "checkpoint_7").write_bytes(serialization.to_bytes(state))
    expected = serialization.msgpack_restore((tmp_path / "checkpoint_7").read_bytes())
    assert expected["layers"].keys() == {"0"}
    same(sw.restore(tmp_path / "checkpoint_7"), expected)
    with sw.open(tmp_path / "checkpoint_7") as checkpoint:
        assert checkpoint.metadata().writer == "flax"
        assert checkpoint["params/dense/kernel"][1:3, 0].tolist() == [1, 1]


@pytest.mark.parametrize("dtype", [*DTYPES, *ML_DTYPES])
@pytest.mark.parametrize("shape", [(), (0, 3), (4,), (3, 4, 5)])
def test_every_dtype_restores_bit_for_bit(tmp_path: Path, dtype: Any, shape: tuple[int, ...]) -> None:
    values = (np.arange(np.prod(shape, dtype=int)) % 7).reshape(shape).astype(dtype)
    state = {"x": values, "fortran": np.asfortranarray(values)}
    (tmp_path / "x").write_bytes(serialization.msgpack_serialize(state))
    same(sw.restore(tmp_path / "x"), state)


def test_large_arrays_are_cut_and_joined(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serialization, "MAX_CHUNK_SIZE", 100)
    state = {"x": np.arange(210, dtype=np.int32).reshape(7, 5, 6), "y": np.arange(30.0), "z": np.ones(3)}
    content = serialization.msgpack_serialize(dict(state))
    assert content.count(b"__msgpack_chunked_array__") == 2
    (tmp_path / "x").write_bytes(content)
    same(sw.restore(tmp_path / "x"), state)
    with sw.open(tmp_path / "x") as checkpoint:
        np.testing.assert_array_equal(checkpoint["x"][2:4, 1:, 3], state["x"][2:4, 1:, 3])


def test_a_model_of_hugging_face_is_found(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{}")
    state = {"w": np.ones(3, np.float32)}
    (tmp_path / "flax_model.msgpack").write_bytes(serialization.to_bytes(state))
    same(sw.restore(tmp_path), state)


leaves = (
    st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=40)
    | st.booleans()
    | st.none()
    | st.complex_numbers(allow_nan=False)
    | arrays_of.arrays(st.sampled_from(DTYPES), arrays_of.array_shapes(min_dims=0, min_side=0, max_side=4))
)
names = st.text(max_size=40).filter(lambda name: not name.startswith("__"))
states = st.dictionaries(
    names.filter(lambda name: name[:1].isprintable() and name != ""),
    st.recursive(leaves, lambda below: st.dictionaries(names, below, max_size=20), max_leaves=30),
    min_size=1,
    max_size=20,
)


@settings(max_examples=100, deadline=None)
@given(state=states)
def test_every_state_that_flax_writes_is_read(state: dict[str, Any], tmp_path_factory: Any) -> None:
    file = tmp_path_factory.mktemp("states") / "x"
    file.write_bytes(serialization.msgpack_serialize(state))
    same(sw.restore(file), serialization.msgpack_restore(file.read_bytes()))
