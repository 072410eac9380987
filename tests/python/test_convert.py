"""Casts: a value arrives as it is, or the leaf is named; nothing wraps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import stepwell as sw
from stepwell._restore.casts import bounds, cast_into

INTEGERS = [
    np.dtype(one)
    for one in (
        bool,
        *(f"{sign}int{bits}" for sign in ("", "u") for bits in (8, 16, 32, 64)),
        *(getattr(ml_dtypes, name) for name in ("int2", "int4", "uint2", "uint4")),
    )
]
FLOATS = [np.dtype(one) for one in (np.float16, np.float32, np.float64, np.longdouble, ml_dtypes.bfloat16)]


def limits(dtype: np.dtype[Any]) -> tuple[int, int]:
    found = bounds(dtype)
    assert found is not None
    return found


def made(value: float, dtype: np.dtype[Any]) -> np.ndarray[Any, Any]:
    """One value of a dtype. Via a wide one: not every dtype is made from a Python number."""
    wide = (
        np.uint64
        if isinstance(value, int) and value > 2**63 - 1
        else np.int64
        if isinstance(value, int)
        else np.float64
    )
    return np.array([0, value], wide).astype(dtype)


@pytest.mark.parametrize("target", INTEGERS, ids=str)
@pytest.mark.parametrize("source", INTEGERS, ids=str)
def test_an_integer_arrives_as_it_is_or_raises(source: np.dtype[Any], target: np.dtype[Any]) -> None:
    least, greatest = limits(target)
    interesting = {
        0,
        1,
        -1,
        least,
        greatest,
        least - 1,
        greatest + 1,
        300,
        70000,
        2**32,
        2**40 + 5,
        *limits(source),
    }
    for value in sorted(interesting):
        if not limits(source)[0] <= value <= limits(source)[1]:
            continue
        array, out = made(value, source), np.zeros(2, target)
        if least <= value <= greatest:
            cast_into(array, out, "w")
            assert int(out[1]) == value
        else:
            with pytest.raises(sw.MismatchError, match=r"leaf `w`: 1 value\(s\) do not fit .* at \(1,\)"):
                cast_into(array, out, "w")
            assert not out.any()


@pytest.mark.parametrize("target", INTEGERS, ids=str)
@pytest.mark.parametrize("source", FLOATS, ids=str)
def test_a_float_becomes_the_integer_towards_zero_or_raises(
    source: np.dtype[Any], target: np.dtype[Any]
) -> None:
    least, greatest = limits(target)
    for value in (
        0.0,
        0.5,
        1.0,
        -1.0,
        1.5,
        100.0,
        60000.0,
        float("inf"),
        float("-inf"),
        float("nan"),
        float(greatest),
        float(greatest) + 1,
        float(least) - 1,
        2.0**63,
        2.0**64,
    ):
        with np.errstate(all="ignore"):
            array, out = made(value, source), np.zeros(2, target)
        stored = float(array[1])
        if stored == stored and abs(stored) != float("inf") and least <= int(stored) <= greatest:
            cast_into(array, out, "w")
            assert int(out[1]) == int(stored)
        else:
            with pytest.raises(sw.MismatchError, match="do not fit"):
                cast_into(array, out, "w")


def test_no_imaginary_part_is_dropped() -> None:
    out = np.zeros(2)
    cast_into(np.array([1 + 0j, 2 + 0j]), out, "w")
    assert out.tolist() == [1, 2]
    with pytest.raises(sw.MismatchError, match="do not fit float64"):
        cast_into(np.array([1 + 0j, 2 + 1j]), out, "w")


@pytest.mark.filterwarnings("error")
def test_half_complex_numbers_are_complex() -> None:
    halves = np.array([1 + 0j, 2 + 1j], ml_dtypes.complex32)
    with pytest.raises(sw.MismatchError, match="do not fit float32"):
        cast_into(halves, np.zeros(2, np.float32), "w")
    with pytest.raises(sw.MismatchError, match="do not fit int32"):
        cast_into(halves, np.zeros(2, np.int32), "w")
    real = np.zeros(1, np.float32)
    cast_into(halves[:1], real, "w")
    assert real.tolist() == [1]
    back = np.zeros(2, ml_dtypes.complex32)
    cast_into(np.array([1 + 0j, 2 + 1j]), back, "w")
    assert back.tolist() == halves.tolist()
    with pytest.raises(sw.MismatchError, match="do not fit complex32"):
        cast_into(np.array([1, 1 + 1e6j]), back, "w")


def test_a_restore_does_not_wrap_large_unsigned_integers(tmp_path: Path) -> None:
    sw.save(tmp_path / "c", {"a": np.array([300, 70000, 5], np.uint64)})
    for dtype in ("int8", "uint8", "int16"):
        with pytest.raises(sw.MismatchError, match=f"do not fit {dtype}"):
            sw.restore(tmp_path / "c", like={"a": sw.ArraySpec(None, dtype)}, cast="lossy")
    back = sw.restore(tmp_path / "c", like={"a": sw.ArraySpec(None, "int32")}, cast="lossy")
    assert back["a"].tolist() == [300, 70000, 5]


def test_files_of_a_model_are_passed_along(tmp_path: Path) -> None:
    model = tmp_path / "model"
    (model / "nested").mkdir(parents=True)
    for name in ("config.json", "tokenizer.model", "chat.jinja", "w.safetensors", "m.index.json", ".hidden"):
        (model / name).write_bytes(name.encode())
    (model / "empty.txt").touch()
    (tmp_path / "own.txt").write_text("own")
    sw.save(tmp_path / "saved", {"w": np.zeros(3)})
    made = sw.export(tmp_path / "saved", tmp_path / "out", files=[model, tmp_path / "own.txt"])
    written = {"config.json", "tokenizer.model", "chat.jinja", "own.txt", "model.safetensors"}
    assert made.files.keys() == written == {one.name for one in (tmp_path / "out").iterdir()}
    assert (tmp_path / "out" / "chat.jinja").read_bytes() == b"chat.jinja"


def test_files_in_a_step_are_passed_along(tmp_path: Path) -> None:
    files = {"config.json": b"{}", "tokenizer.model": b"\0\1"}
    left_out = {"model.safetensors.index.json": b"{}", "__init__.py": b"", "stepwell_export.json": b"x"}
    state = {"model": {"w": np.zeros(3)}, "files": {**files, **left_out}}
    exports = [sw.Export(tmp_path / "hf" / "{step}", subtree="model", stored_files="files")]
    with sw.CheckpointManager(tmp_path / "root", exports=exports) as manager:
        manager.save(1, state)
    sw.export(tmp_path / "root", tmp_path / "out", stored_files="files")
    for written in (tmp_path / "hf" / "1", tmp_path / "out"):
        assert {name: (written / name).read_bytes() for name in files} == files
    assert {one.name for one in (tmp_path / "out").iterdir()} == {*files, "model.safetensors"}
    assert sw.restore(tmp_path / "root", include="files") == {"files": {**files, **left_out}}


@pytest.mark.parametrize(
    ("stored", "said"),
    [
        ({"a/b": b"x"}, "has no name of a file"),
        ({"..": b"x"}, "has no name of a file"),
        ({"a": {"b": b"x"}}, "has no name of a file"),
        ({"a": "text"}, "is str"),
        ({"a": np.zeros(3)}, "has arrays"),
        ({"a": bytes(33 << 20), "b": bytes(33 << 20)}, "more than 64 MiB"),
        (b"x", "no container at 'files'"),
    ],
)
def test_wrong_stored_files_are_refused(tmp_path: Path, stored: object, said: str) -> None:
    sw.save(tmp_path / "saved", {"w": np.zeros(3), "files": stored})
    with pytest.raises(sw.MisuseError, match=said):
        sw.export(tmp_path / "saved", tmp_path / "out", stored_files="files")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["saved"]


@pytest.mark.parametrize(
    ("files", "destination", "said"),
    [
        ("none.json", "out", "does not exist"),
        (["a.json", "b/a.json"], "out", "have the same name"),
        ("empty.json", "out", "is empty. Leave it out"),
        ("model.safetensors", "out", "has the name of another file that is written"),
        ("a.json", "out.safetensors", "out.safetensors is one file"),
        (7, "out", "is a path or a list of paths"),
    ],
)
def test_wrong_files_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: Any, destination: str, said: str
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "b").mkdir()
    for name in ("a.json", "b/a.json", "model.safetensors"):
        (tmp_path / name).write_text("{}")
    (tmp_path / "empty.json").touch()
    sw.save("saved", {"w": np.zeros(3)})
    before = sorted(tmp_path.iterdir())
    with pytest.raises(sw.MisuseError, match=said):
        sw.convert("saved", destination, to="safetensors", files=files)
    assert sorted(tmp_path.iterdir()) == before
