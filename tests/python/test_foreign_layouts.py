"""Elements that another library laid out in its own way are read as what they mean."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from stepwell.formats import Description
from stepwell.formats.description import Chunk, Tensor


def read(tensor: Tensor) -> np.ndarray:
    core = Description("raw", "/", {"x": tensor}).open("auto")
    array = np.empty(tensor.shape, tensor.dtype)
    core.read([(0, [0] * array.ndim, array)])
    return array


@pytest.mark.parametrize("dtype", ["int8", "uint16", "float32", "float64", "complex64", "complex128"])
@pytest.mark.parametrize("order", ["C", "F", "step", "repeat"])
@pytest.mark.parametrize("big_endian", [False, True])
def test_strides_and_byte_order_are_understood(
    tmp_path: Path, dtype: str, order: str, big_endian: bool
) -> None:
    base = (np.arange(7 * 6 * 5) * 3.5).astype(dtype).reshape(7, 6, 5)
    stored = base.astype(base.dtype.newbyteorder(">")) if big_endian else base
    whole = np.asfortranarray(stored) if order == "F" else stored
    view = {"step": whole[1::2, :, ::2], "repeat": np.broadcast_to(whole[:, :1], (7, 4, 5))}.get(order, whole)
    file = tmp_path / "file"
    file.write_bytes(b"head" + whole.tobytes("A"))
    first = view.ctypes.data - whole.ctypes.data
    nbytes = sum((n - 1) * step for n, step in zip(view.shape, view.strides, strict=True)) + view.itemsize
    chunk = Chunk(
        str(file), 4 + first, nbytes, (0,) * view.ndim, view.shape, view.strides, big_endian=big_endian
    )
    np.testing.assert_array_equal(read(Tensor(dtype, view.shape, (chunk,))), view.astype(dtype))


@pytest.mark.parametrize("big_endian", [False, True])
def test_stored_negatives_are_restored_as_values(tmp_path: Path, big_endian: bool) -> None:
    values = (np.arange(6) + 1j * np.arange(1, 7)).astype(np.complex64)
    stored = values.astype(">c8") if big_endian else values
    file = tmp_path / "file"
    file.write_bytes(stored.tobytes())

    def tensor(negated: str) -> Tensor:
        chunk = Chunk(str(file), 0, 48, (0,), (6,), None, big_endian, negated)  # type: ignore[arg-type]
        return Tensor("complex64", (6,), (chunk,))

    np.testing.assert_array_equal(read(tensor("imaginary")), values.conj())
    np.testing.assert_array_equal(read(tensor("all")), -values)
