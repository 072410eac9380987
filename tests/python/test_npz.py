"""numpy's arrays and archives, written by numpy: restored bit for bit, in part and cast, verified;
and hostile ones."""

from __future__ import annotations

import io
import struct
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
import stepwell as sw
from command_line import run
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays_of
from memory import grown

DTYPES = [
    "?", "i1", "i2", "i4", "i8", "u1", "u2", "u4", "u8", "f2", "f4", "f8", "c8", "c16", "M8[ns]", "m8[s]",
]  # fmt: skip
Save = Callable[..., None]


def counted(shape: tuple[int, ...], dtype: npt.DTypeLike = np.float32) -> npt.NDArray[Any]:
    """An array whose elements differ."""
    return (np.arange(np.prod(shape, dtype=int)) % 251).reshape(shape).astype(dtype)


def arrays() -> dict[str, npt.NDArray[Any]]:
    """Arrays of all sorts."""
    found = {f"order{order}/{name}": counted((3, 5), order + name) for order in "<>" for name in DTYPES}
    return found | {
        "scalar": np.array(7, np.int64),
        "empty": np.zeros((0, 4), np.float32),
        "fortran": np.asfortranarray(counted((4, 5, 6), np.float64)),
        "fortran of big numbers": np.asfortranarray(counted((4, 5), ">c16")),
        "model/layers.0/ümlaut": counted((2, 3), np.int16),
        "large": counted((700, 1000), np.float64),
        "zeros": np.zeros((1000, 1000), np.float32),
        "half": counted((7, 3)).astype(ml_dtypes.bfloat16),
        "quarter": counted((7, 3)).astype(ml_dtypes.float8_e5m2),
    }


def check(found: dict[str, npt.NDArray[Any]], expected: dict[str, npt.NDArray[Any]]) -> None:
    assert found.keys() == expected.keys()
    for name, array in expected.items():
        native = array.astype(array.dtype.newbyteorder("="))
        assert found[name].dtype == native.dtype, name
        assert found[name].shape == array.shape, name
        assert found[name].tobytes() == native.tobytes(), name


@pytest.fixture(params=[np.savez, np.savez_compressed])
def archive(tmp_path: Path, request: pytest.FixtureRequest) -> Path:
    """An archive of all sorts of arrays."""
    save: Save = request.param
    save(tmp_path / "all.npz", **arrays())
    return tmp_path / "all.npz"


def test_an_archive_restores_bit_for_bit(archive: Path) -> None:
    check(sw.restore(archive), arrays())
    with sw.open(archive) as checkpoint:
        assert checkpoint.metadata().writer == "numpy"
        assert checkpoint["large"][600:602, 7].tolist() == arrays()["large"][600:602, 7].tolist()
        assert checkpoint["fortran"][1, 2:4].tolist() == arrays()["fortran"][1, 2:4].tolist()


def test_a_part_of_an_archive_restores_in_place_and_cast(archive: Path) -> None:
    target = {"order>/f4": np.zeros((3, 5), np.float64), "fortran": np.zeros((4, 5, 6))}
    memory = target["fortran"]
    restored, report = sw.restore(archive, into=target, return_report=True)
    assert restored["fortran"] is memory
    np.testing.assert_array_equal(memory, arrays()["fortran"])
    np.testing.assert_array_equal(restored["order>/f4"], counted((3, 5)))
    assert [row.path for row in report.cast] == [r"order>\/f4"]
    assert sw.restore(archive, include="model*").keys() == {"model/layers.0/ümlaut"}


def test_rows_of_an_archived_array_are_read_by_a_rank(archive: Path) -> None:
    part = sw.sharding.LocalShard(np.zeros((3, 1000)), (700, 1000), (600, 0))
    sw.restore(archive, into={"large": part})
    np.testing.assert_array_equal(part.local, arrays()["large"][600:603])


def test_the_command_line_reads_archives(archive: Path) -> None:
    for command in (["show"], ["show", "--layout"], ["plan"], ["verify"]):
        shown = run(*command, str(archive))
        assert shown.exit_code == 0, (command, shown.output)
    assert "7" in run("cat", str(archive), "scalar").output
    assert run("diff", str(archive), str(archive)).exit_code == 0


@pytest.mark.parametrize("dtype", [*DTYPES, ">f4", ml_dtypes.bfloat16, ml_dtypes.float8_e5m2])
@pytest.mark.parametrize("shape", [(), (0, 3), (4,), (3, 4, 5)])
@pytest.mark.parametrize("order", ["C", "F"])
def test_an_array_restores_bit_for_bit(
    tmp_path: Path, dtype: npt.DTypeLike, shape: tuple[int, ...], order: Any
) -> None:
    array = np.array(counted(shape, dtype), order=order)
    np.save(tmp_path / "x.npy", array)
    check({"": sw.restore(tmp_path / "x.npy")}, {"": array})


@settings(max_examples=60, deadline=None)
@given(
    array=arrays_of.arrays(
        st.sampled_from([f"{order}{name}" for order in "<>" for name in DTYPES]),
        arrays_of.array_shapes(min_dims=0, min_side=0, max_side=5),
    ),
    version=st.sampled_from([(1, 0), (2, 0), (3, 0)]),
    fortran=st.booleans(),
)
def test_every_array_that_numpy_writes_is_read(
    array: npt.NDArray[Any], version: tuple[int, int], fortran: bool, tmp_path_factory: Any
) -> None:
    file = tmp_path_factory.mktemp("arrays") / "x"
    array = np.asfortranarray(array) if fortran else array
    with file.open("wb") as out:
        np.lib.format.write_array(out, array, version=version)
    check({"": sw.restore(file)}, {"": array})


def test_the_suffix_of_a_file_does_not_matter(tmp_path: Path) -> None:
    with (tmp_path / "weights").open("wb") as out:
        np.savez(out, w=counted((3, 4)))
    check(sw.restore(tmp_path / "weights"), {"w": counted((3, 4))})
    np.savez(tmp_path / "none.npz")
    assert sw.restore(tmp_path / "none.npz") == {}


def test_what_no_tensor_holds_is_listed(tmp_path: Path) -> None:
    np.savez(
        tmp_path / "x.npz",
        w=counted((2,)),
        objects=np.array([{}, None], object),
        text=np.array(["a", "bc"]),
        rows=np.zeros(3, [("a", "<f4"), ("b", "<i8")]),
        eighth=counted((4,)).astype(ml_dtypes.float8_e4m3fn),
        wide=np.zeros(2, np.longdouble),
    )
    with zipfile.ZipFile(tmp_path / "x.npz", "a") as out:
        out.writestr("notes.txt", "hello")
    with sw.open(tmp_path / "x.npz") as checkpoint:
        assert repr(checkpoint["objects"]) == "<opaque array of objects, a pickle, of shape (2,)>"
        assert repr(checkpoint["text"]) == "<opaque array of <U2 of shape (2,)>"
        assert repr(checkpoint["rows"]) == "<opaque structured array of shape (3,)>"
        assert repr(checkpoint["eighth"]) == "<opaque array of <V1, a dtype without its name, of shape (4,)>"
        assert repr(checkpoint["wide"]) == "<opaque array of <f16 of shape (2,)>"
        assert repr(checkpoint["notes.txt"]) == "<opaque file of 5 bytes>"
        assert checkpoint["w"].load().tolist() == [0, 1]


def test_archives_with_wide_sizes_are_read(tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "x.npz", "w", zipfile.ZIP_DEFLATED) as out:
        for name in "ab":
            with out.open(f"{name}.npy", "w", force_zip64=True) as member:
                np.lib.format.write_array(member, counted((3, 4)))
    check(sw.restore(tmp_path / "x.npz"), dict.fromkeys("ab", counted((3, 4))))


def test_an_archive_of_many_arrays_is_read(tmp_path: Path) -> None:
    many = {f"layer{number}": np.full(3, number) for number in range(500)}
    np.savez_compressed(tmp_path / "x.npz", **many)
    check(sw.restore(tmp_path / "x.npz"), many)


def damaged(archive: Path, name: str, at: int) -> None:
    """Changes a byte of a member's stored content."""
    with zipfile.ZipFile(archive) as members:
        header = members.getinfo(f"{name}.npy").header_offset
    content = bytearray(archive.read_bytes())
    lengths = struct.unpack_from("<HH", content, header + 26)
    content[header + 30 + sum(lengths) + at] ^= 0x10
    archive.write_bytes(content)


def test_verify_checks_the_checksums_of_stored_arrays(tmp_path: Path) -> None:
    archive = tmp_path / "x.npz"
    np.savez(archive, sound=counted((300,)), w=np.arange(50_000.0), none=np.zeros((0, 3)))
    report = sw.verify(archive)
    assert report.ok
    assert report.unguarded_nbytes < 1000  # headers and the directory
    damaged(archive, "w", 70_000)
    report = sw.verify(archive)
    assert [(damage.leaves, damage.file) for damage in report.damages] == [(("w",), str(archive))]
    assert "CRC-32" in report.damages[0].what


def test_verify_checks_the_checksums_of_compressed_arrays(tmp_path: Path) -> None:
    archive = tmp_path / "x.npz"
    rng = np.random.default_rng(3)
    np.savez_compressed(archive, sound=counted((300,)), w=rng.standard_normal(9000))
    report = sw.verify(archive)
    assert report.ok
    assert report.files == 1
    assert report.nbytes == archive.stat().st_size
    # The headers around the arrays have no checksum.
    assert 0 < report.unguarded_nbytes < 1000
    damaged(archive, "w", 40_000)
    report = sw.verify(archive)
    assert [(damage.leaves, damage.file) for damage in report.damages] == [(("w",), str(archive))]
    with pytest.raises(sw.CorruptCheckpoint, match="its compressed part at byte") as failure:
        sw.restore(archive)
    assert failure.value.leaf == "w"
    check(sw.restore(archive, include="sound"), {"sound": counted((300,))})


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_verify_checks_members_without_a_tensor(tmp_path: Path, save: Save) -> None:
    archive = tmp_path / "x.npz"
    save(archive, w=np.arange(100.0), text=np.array(["a", "b"]), v=np.ones(3))
    assert sw.verify(archive).ok
    with zipfile.ZipFile(archive) as found:
        contents = {name: found.read(name) for name in found.namelist()}
        crcs = {row.filename: row.CRC for row in found.infolist()}
    contents["w.npy"] = contents["w.npy"].replace(b"<f8", b"<d8")
    method = zipfile.ZIP_STORED if save is np.savez else zipfile.ZIP_DEFLATED
    with zipfile.ZipFile(archive, "w", method) as written:
        for name, content in contents.items():
            written.writestr(name, content)
        written.getinfo("w.npy").CRC = crcs["w.npy"]  # that of the member before the damage
    assert "<d8" in str(sw.restore(archive)["w"])  # listed, and not restored
    (damage,) = sw.verify(archive).damages
    assert damage.file == str(archive)
    assert run("verify", archive).exit_code == 1


def test_an_end_record_without_entries_is_damage(tmp_path: Path) -> None:
    archive = tmp_path / "x.npz"
    np.savez(archive)
    assert sw.restore(archive) == {}
    np.savez(archive, w=np.ones(3))
    content = bytearray(archive.read_bytes())
    end = content.rindex(b"PK\x05\x06")
    content[end + 8 : end + 20] = bytes(12)  # entries, bytes and place of the directory
    archive.write_bytes(content)
    with pytest.raises(sw.CorruptCheckpoint, match=r"x\.npz.*member"):
        sw.restore(archive)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_archives_without_checksums_are_unguarded(tmp_path: Path, save: Save) -> None:
    archive = tmp_path / "x.npz"
    save(archive, w=counted((300,)), v=counted((40, 50)))
    content = bytearray(archive.read_bytes())
    entries = [at for at in range(len(content)) if content.startswith(b"PK\x01\x02", at)]
    for number in reversed(range(2)):
        content[entries[number] + 16 : entries[number] + 20] = bytes(4)
        archive.write_bytes(content)
        # One that is zero beside others that are not is damage.
        assert sw.verify(archive).ok == (number == 0)
    report = sw.verify(archive)
    assert report.unguarded_nbytes == report.nbytes == archive.stat().st_size
    check(sw.restore(archive), {"w": counted((300,)), "v": counted((40, 50))})


def text_of(descr: str, shape: str, fortran: bool = False) -> bytes:
    return f"{{'descr': {descr}, 'fortran_order': {fortran}, 'shape': {shape}, }}".encode()


def array_of(text: bytes, data: bytes = b"") -> bytes:
    """An array with that header."""
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(text)) + text + data


def zipped(members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return out.getvalue()


SOUND = array_of(text_of("'<f4'", "(2,)"), b"\0" * 8)


def claiming(content: bytes, length: int) -> bytes:
    """An archive of one compressed array that claims another length."""
    archive = bytearray(zipped({"x.npy": content}))
    for start in (archive.index(b"PK\x01\x02") + 24, 22):
        struct.pack_into("<I", archive, start, length)
    return bytes(archive)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (SOUND[:20], "ends in its header"),
        (SOUND[:-1], "7 bytes are not those of <f4"),
        (SOUND + b"\0", "9 bytes are not those of <f4"),
        (SOUND + SOUND, "are not those of <f4"),
        (array_of(text_of("'<f4'", "(4611686018427387904, 4611686018427387904)")), "are not those of"),
        (array_of(text_of("'<f4'", "(0, 4611686018427387904)")), "are not those of"),
        (array_of(b"(" * 60_000), "was expected"),
        (array_of(text_of("(" * 50_000, "()")), "without an end"),
        (array_of(text_of("__import__('os').system('ls')", "()")), "text in quotes"),
        (zipped({"x.npy": b""}), "array `x`: "),
        (zipped({"x.npy": SOUND[:-1]}), "array `x`: 7 bytes"),
        (zipped({"x.npy": SOUND, "x": b""}), "`x` occurs twice"),
        (zipped({"x.npy": SOUND})[:-5], "end record"),
        (claiming(SOUND, 2**31), "are not those of <f4"),
        (claiming(array_of(text_of("'<f4'", "(1000000,)")), 4_000_065), "array `x`: "),
    ],
)
def test_damaged_arrays_are_refused(tmp_path: Path, content: bytes, expected: str) -> None:
    file = tmp_path / "x"
    file.write_bytes(content)
    begun = time.monotonic()
    with pytest.raises(sw.CorruptCheckpoint, match=expected) as failure:
        sw.open(file)
    assert time.monotonic() - begun < 1
    assert str(file) in str(failure.value)


def test_streams_of_another_length_are_refused(tmp_path: Path) -> None:
    head = array_of(text_of("'<f8'", "(1000,)"))
    for made, expected in [(999, "it ends after"), (1001, "it goes on behind its")]:
        (tmp_path / "x").write_bytes(claiming(head + b"\1" * 8 * made, len(head) + 8000))
        with sw.open(tmp_path / "x") as checkpoint:
            with pytest.raises(sw.CorruptCheckpoint, match=expected):
                checkpoint.restore()
            assert not checkpoint.verify().ok


def test_a_claim_that_no_stream_can_keep_is_refused(tmp_path: Path) -> None:
    head = array_of(text_of("'<f4'", "(1000000,)"))
    (tmp_path / "x").write_bytes(claiming(head + b"\0" * 64, len(head) + 4_000_000))
    with pytest.raises(sw.CorruptCheckpoint, match="cannot become"):
        sw.restore(tmp_path / "x")


def test_memory_of_a_compressed_read_is_bounded(tmp_path: Path) -> None:
    size = 256 << 20
    np.savez_compressed(tmp_path / "x.npz", w=np.zeros(size, np.uint8))
    script = (
        "import sys, stepwell as sw\n"
        "with sw.open(sys.argv[1]) as checkpoint:\n"
        "    found = []\n"
        "    print(growth(lambda: found.extend(checkpoint['w'][-3:])))\n"
        "    assert found == [0, 0, 0]\n"
    )
    growth = grown(script, tmp_path / "x.npz")
    assert growth < 16 << 20, f"{growth} bytes for {size}"
