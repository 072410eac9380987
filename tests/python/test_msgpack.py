"""Flax's MessagePack files, made by hand: old spellings, cut arrays, hostile values. Files that
Flax itself wrote are in ``tests/frameworks``."""

from __future__ import annotations

import struct
import time
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import stepwell as sw


def text(value: str) -> bytes:
    raw = value.encode()
    return (bytes([0xA0 | len(raw)]) if len(raw) < 32 else b"\xd9" + bytes([len(raw)])) + raw


def mapped(**values: bytes) -> bytes:
    """A map of encoded values."""
    return bytes([0x80 | len(values)]) + b"".join(text(key) + one for key, one in values.items())


def ext(code: int, content: bytes) -> bytes:
    return b"\xc9" + struct.pack(">I", len(content)) + bytes([code]) + content


def array(shape: bytes, dtype: str, data: bytes, code: int = 1) -> bytes:
    """An array as Flax packs it, with an encoded shape."""
    return ext(code, b"\x93" + shape + text(dtype) + b"\xc6" + struct.pack(">I", len(data)) + data)


def chunked(shape: bytes, *chunks: bytes) -> bytes:
    numbered = {str(number): one for number, one in enumerate(chunks)}
    return mapped(__msgpack_chunked_array__=b"\xc3", shape=shape, chunks=mapped(**numbered))


FLOATS = np.arange(6, dtype=np.float32)


def test_values_of_all_sorts_are_read(tmp_path: Path) -> None:
    content = mapped(
        w=array(b"\x92\x02\x03", "float32", FLOATS.tobytes()),
        scalar=array(b"\x90", "float32", FLOATS[3].tobytes(), 3),
        z=ext(2, b"\x92" + struct.pack(">BdBd", 0xCB, 1.5, 0xCB, -2.0)),
        step=b"\xcd\x01\x00",
        name=text("x"),
        list=b"\x93\x01\xc0\xc3",
        raw=b"\xc4\x02ab",
        other=ext(9, b"abc"),
        words=array(b"\x91\x01", "str32", b"a\0\0\0"),
    )
    (tmp_path / "x").write_bytes(content)
    state = sw.restore(tmp_path / "x")
    assert state["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert state["scalar"].shape == ()
    assert state["scalar"] == 3
    assert (state["z"], state["step"], state["name"], state["list"]) == (1.5 - 2j, 256, "x", [1, None, True])
    opaque = [repr(state[name]) for name in ("raw", "other", "words")]
    assert opaque == [
        "<opaque bytes[2]>",
        "<opaque MessagePack type 9, 3 bytes>",
        "<opaque array of str32 of shape (1,)>",
    ]


@pytest.mark.parametrize("name", ["bfloat16", "V2", "|V2", "void16"])
def test_all_names_of_bfloat16_are_known(tmp_path: Path, name: str) -> None:
    values = FLOATS.astype(ml_dtypes.bfloat16)
    (tmp_path / "x").write_bytes(mapped(w=array(b"\x91\x06", name, values.tobytes())))
    found = sw.restore(tmp_path / "x")["w"]
    assert found.dtype == ml_dtypes.bfloat16
    assert found.tobytes() == values.tobytes()


def test_arrays_in_chunks_are_one_array(tmp_path: Path) -> None:
    chunks = [array(bytes([0x91, len(part)]), "float32", part.tobytes()) for part in np.split(FLOATS, [1, 5])]
    (tmp_path / "x").write_bytes(mapped(a=mapped(w=chunked(mapped(**{"0": b"\x02", "1": b"\x03"}), *chunks))))
    assert sw.restore(tmp_path / "x")["a"]["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    part = sw.sharding.LocalShard(np.zeros((1, 2), np.float32), (2, 3), (1, 0))
    sw.restore(tmp_path / "x", into={"a": {"w": part}})
    assert part.local.tolist() == [[3, 4]]


def test_verify_says_that_nothing_vouches_for_the_bytes(tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(mapped(w=array(b"\x91\x06", "float32", FLOATS.tobytes())))
    report = sw.verify(tmp_path / "x")
    assert report.ok
    assert report.unguarded_nbytes == report.nbytes == (tmp_path / "x").stat().st_size


SIZES = mapped(**{"0": b"\x02"})


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (mapped(w=array(b"\x91\x06", "float32", b"abc")), "leaf `w`: 3 bytes are not those of float32"),
        (mapped(w=array(b"\x92" + (b"\xcf" + b"\x7f" * 8) * 2, "uint8", b"")), "0 bytes are not those of"),
        (mapped(w=array(b"\x92\0\xcf" + b"\xff" * 8, "uint8", b"")), "0 bytes are not those of"),
        (mapped(w=array(b"\x91\xff", "uint8", b"")), "none below zero"),
        (mapped(w=array(b"\xc0", "uint8", b"")), "an array has a shape, a dtype and bytes"),
        (mapped(w=ext(1, b"\xc0")), "an array has a shape, a dtype and bytes"),
        (mapped(w=ext(2, b"\xc0")), "a complex number was expected"),
        (mapped(w=ext(1, b"\xc0\xc0")), "more bytes follow"),
        (mapped(w=chunked(SIZES)), "have one dtype"),
        (mapped(w=chunked(SIZES, b"\xc0")), "a chunk of an array was expected"),
        (mapped(w=chunked(b"\xc0", array(b"\x91\x02", "uint8", b"ab"))), "has shape by number"),
        (mapped(w=chunked(SIZES, array(b"\x91\x03", "uint8", b"abc"))), "3 bytes are not those of uint8"),
        (b"\x82" + (text("a") + b"\x01") * 2, "the key a occurs twice"),
        (b"\x82" + text("a") + b"\x01\xc0\x01", "neither text nor an integer"),
        (b"\x82" + text("a") + b"\x01\xcf" + b"\xff" * 8 + b"\x01", "of a map has 64 bits"),
        (mapped(a=b"\xc6\xff\xff\xff\xff"), "4294967295 bytes, and 0 are left"),
        (mapped(a=b"\xdd\xff\xff\xff\xff"), "4294967295 values"),
        (mapped(a=b"\x91" * 100_000), "nested more than 128 deep"),
        (mapped(a=b"\xdd\x00\x20\x00\x00" + b"\xc0" * (1 << 21)), "values in so few bytes"),
        (mapped(a=b"\x01") + b"\xc0", "more bytes follow"),
    ],
)
def test_hostile_values_are_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "x").write_bytes(content)
    begun = time.process_time()
    with pytest.raises(sw.CorruptCheckpoint, match=expected) as failure:
        sw.open(tmp_path / "x")
    assert time.process_time() - begun < 1
    assert str(tmp_path / "x") in str(failure.value)


def test_other_files_are_no_messagepack(tmp_path: Path) -> None:
    for number, content in enumerate([b"", b"\x80", b"\x80\xc0", b"\x81\xc0\xc0", b"text", b"\xde"]):
        (tmp_path / f"{number}").write_bytes(content)
        with pytest.raises(sw.StepwellError) as failure:
            sw.open(tmp_path / f"{number}")
        assert not isinstance(failure.value, sw.CorruptCheckpoint)
