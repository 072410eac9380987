"""Hostile files of ``torch.save``: nothing is executed or imported, and little is used."""

from __future__ import annotations

import io
import pickle
import struct
import sys
import time
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import stepwell as sw
from stepwell.formats.description import Opaque

#: CPU seconds and bytes of memory that a small hostile file may take.
SECONDS, NBYTES = 1.0, 64 << 20


def archive(data: bytes, **members: bytes) -> bytes:
    """An archive of torch with that pickle. ``s0`` is storage ``0``."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("a/data.pkl", data)
        for name, content in members.items():
            file.writestr(f"a/data/{name.removeprefix('s')}", content)
    return out.getvalue()


def text(value: str) -> bytes:
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def name(module: str, qualified: str) -> bytes:
    return b"c" + f"{module}\n{qualified}\n".encode()


def number(value: int) -> bytes:
    return b"J" + struct.pack("<i", value) if -(2**31) <= value < 2**31 else pickle.dumps(value, 2)[2:-1]


def call(module: str, qualified: str, *args: bytes) -> bytes:
    return name(module, qualified) + b"(" + b"".join(args) + b"tR"


def tuple_(*parts: bytes) -> bytes:
    return b"(" + b"".join(parts) + b"t"


def storage(key: bytes = text("0"), count: bytes = number(4), kind: bytes = b"") -> bytes:
    return tuple_(text("storage"), kind or name("torch", "FloatStorage"), key, text("cpu"), count) + b"Q"


def tensor(begin: int, size: list[int], stride: list[int], source: bytes = b"") -> bytes:
    shapes = [tuple_(*map(number, one)) for one in (size, stride)]
    return call(
        "torch._utils", "_rebuild_tensor_v2", source or storage(), number(begin), *shapes, b"\x89", b"}"
    )


def empty_array(*shape: int) -> bytes:
    base = call(
        "numpy.core.multiarray", "_reconstruct", name("numpy", "ndarray"), tuple_(number(0)), text("b")
    )
    dtype = call("numpy", "dtype", text("f4"), b"\x89", b"\x88")
    return base + tuple_(number(1), tuple_(*map(number, shape)), dtype, b"\x89", b"C\0") + b"b"


def whole(body: bytes) -> bytes:
    return b"\x80\x02" + body + b"."


def status(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(field))


@pytest.fixture
def bounded() -> Iterator[None]:
    """Fails if the test takes much time or memory, or imports a module."""
    modules = set(sys.modules)
    Path("/proc/self/clear_refs").write_text("5")
    before, begun = status("VmRSS"), time.process_time()
    yield
    assert time.process_time() - begun < SECONDS
    assert status("VmHWM") - before < NBYTES
    assert {one for one in set(sys.modules) - modules if not one.startswith("stepwell")} == set()


@pytest.fixture(autouse=True)
def warm(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Imports what opening a file imports."""
    path = tmp_path_factory.mktemp("warm") / "x.pt"
    path.write_bytes(archive(whole(b"}")))
    sw.restore(path)


def opened(path: Path, data: bytes) -> Any:
    path.write_bytes(data)
    return sw.restore(path)


DOUBLED = b")" + b"2\x86" * 60
NESTED = 30_000
OPAQUE: dict[str, tuple[bytes, str]] = {
    "call": (call("os", "system", text("true")), "os.system"),
    "builtin": (call("builtins", "eval", text("1")), "builtins.eval"),
    "dotted": (call("torch.serialization", "os.system", text("true")), "torch.serialization.os.system"),
    "dotted allowed": (name("builtins", "set.__class__"), "builtins.set.__class__"),
    "prefix": (call("torch.hub", "load", text("x")), "torch.hub.load"),
    "getattr": (call("builtins", "getattr", name("os", "x"), text("system")), "builtins.getattr"),
    "result called": (call("builtins", "getattr", b"N") + b")R", "the result of a call"),
    "no name called": (text("os.system") + b")R", "the result of a call"),
    "self": (b"]q\x00h\x00a", ""),
    "doubled": (DOUBLED, ""),
    "doubled key": (b"}" + DOUBLED + b"Ns", "a dict with keys of type tuple"),
    "doubled element": (call("builtins", "set", b"](" + DOUBLED + b"e"), "builtins.set"),
    "deep lists": (b"]" * NESTED + b"a" * (NESTED - 1), ""),
    "deep dicts": (b"}K\x01" * NESTED + b"N" + b"s" * NESTED, ""),
    "deep tuples": (b")" + b"\x85" * NESTED, ""),
    "deep calls": ((name("collections", "OrderedDict") + b")R" + text("k")) * 5000 + b"N" + b"s" * 5000, ""),
    "deep unknown": (name("a", "b") + b")R" + b"\x85" * NESTED, ""),
    "deep persistent": (b"N" + b"Q" * 2, ""),
    "long number": (b"\x8b" + struct.pack("<I", 1 << 20) + b"\x7f" * (1 << 20), "integer of 8388607 bits"),
    "fraction": (call("fractions", "Fraction", text("1e999999999")), "fractions.Fraction"),
    "fraction of zero": (call("fractions", "Fraction", number(1), number(0)), "fractions.Fraction"),
    "decimal": (call("decimal", "Decimal", text("9" * 100_000)), "decimal.Decimal"),
    "bytearray": (call("builtins", "bytearray", number(2**40)), "builtins.bytearray"),
    "bytes": (call("builtins", "bytes", number(2**40)), "builtins.bytes"),
    "list": (
        call("builtins", "list", call("builtins", "range", number(0), number(2**40), number(1))),
        "builtins.list",
    ),
    "date": (call("datetime", "date", b"N"), "datetime.date"),
    "datetime": (call("datetime", "datetime", call("_codecs", "encode", text("x" * 10), text("latin1"))), ""),
    "codec": (call("_codecs", "encode", text("x"), text("zip")), "_codecs.encode"),
    "dtype": (call("numpy", "dtype", text("O8"), b"\x89", b"\x88"), "numpy.dtype O8"),
    "dtype expression": (call("numpy", "dtype", text("f4,(1000000,)f8"), b"\x89", b"\x88"), "numpy.dtype"),
    "long and empty": (empty_array(0, 2**100), "numpy.core.multiarray._reconstruct"),
    "scalar": (
        call("numpy.core.multiarray", "scalar", call("numpy", "dtype", text("f4")), text("x")),
        "numpy scalar",
    ),
    "namespace": (name("argparse", "Namespace") + b")R]b", "argparse.Namespace"),
    "of a class": (
        call(
            "torch._tensor",
            "_rebuild_from_type_v2",
            name("os", "system"),
            name("torch", "Tensor"),
            b")",
            b"}",
        ),
        "torch.Tensor",
    ),
    "many dimensions": (tensor(0, [1] * 65, [1] * 65), "with 65 dimensions"),
    "unknown storage": (
        tensor(0, [1], [1], storage(kind=name("torch", "XStorage"))),
        "torch tensor of an unknown storage",
    ),
    "no storage": (tensor(0, [1], [1], b"N"), "torch tensor of an unknown storage"),
    "repeated": (tensor(0, [2**40, 2**10], [0, 0]), "which repeats 4 bytes"),
    "bytes of a storage": (call("torch.storage", "_load_from_bytes", b"N"), ""),
    "keywords": (name("collections", "OrderedDict") + b")}" + text("a") + b"K\x01s\x92", "OrderedDict"),
    "bytes with a state": (call("_codecs", "encode", text("x"), text("latin1")) + b"Nb", "_codecs.encode"),
    "bytes with keywords": (
        name("_codecs", "encode") + tuple_(text("x"), text("latin1")) + b"}\x92",
        "_codecs.encode",
    ),
    "escape": (name("a\x1b[31m", "b"), "a\\x1b[31m.b"),
}


@pytest.mark.parametrize("case", OPAQUE)
def test_what_is_not_understood_is_opaque(tmp_path: Path, bounded: None, case: str) -> None:
    body, expected = OPAQUE[case]
    state = b"}(" + text("x") + body + text("n") + b"K\x07u"
    try:
        found = opened(tmp_path / "x.pt", archive(whole(state), s0=b"\0" * 16))
    except sw.CorruptCheckpoint as error:
        assert not expected, error  # noqa: PT017
        return
    assert found["n"] == 7
    if expected:
        assert isinstance(found["x"], Opaque)
        assert expected in repr(found["x"])
        assert repr(found["x"]).isprintable()


CORRUPT: dict[str, tuple[bytes, str]] = {
    "beyond": (tensor(0, [5], [1]), "leaf `x`: a tensor reaches to element 4 of a storage of 4"),
    "offset": (tensor(4, [1], [1]), "reaches to element 4"),
    "stride": (tensor(0, [2, 2], [2**61, 1]), "reaches to element"),
    "product": (tensor(0, [2**40, 2**40], [0, 0]), "a tensor of 4 bytes times"),
    "negative": (tensor(0, [-1], [1]), "no tuple of counts"),
    "backwards": (tensor(3, [2], [-1]), "no tuple of counts"),
    "long and empty": (tensor(0, [0, 2**100], [1, 1]), "no tuple of counts"),
    "long and empty product": (tensor(0, [0, 2**61, 2**61], [1, 1, 1]), "times [0, "),
    "other dimensions": (tensor(0, [1], [1, 1]), "do not fit together"),
    "few parts": (call("torch._utils", "_rebuild_tensor_v2", storage()), "1 parts of 4"),
    "negative count": (tensor(0, [1], [1], storage(count=number(-4))), "parts of other types"),
    "long storage": (tensor(0, [1], [1], storage(count=number(2**40))), "has 16 bytes of"),
    "missing storage": (tensor(0, [1], [1], storage(text("../0"))), "no storage data/../0"),
    "persistent": (b"NQ", "the persistent id of a storage was expected"),
}


@pytest.mark.parametrize("case", CORRUPT)
def test_damaged_tensors_are_named(tmp_path: Path, bounded: None, case: str) -> None:
    body, expected = CORRUPT[case]
    path = tmp_path / "x.pt"
    with pytest.raises(sw.CorruptCheckpoint, match="leaf `x`") as failure:
        opened(path, archive(whole(b"}" + text("x") + body + b"s"), s0=b"\0" * 16))
    assert expected in str(failure.value)
    assert str(path) in str(failure.value)


def test_copies_of_shared_parts_are_bounded(tmp_path: Path, bounded: None) -> None:
    long = text("x" * 100_000) + b"q\x01" + text("latin1") + b"q\x02"
    encode = name("_codecs", "encode") + b"h\x01h\x02\x86R"
    bytes_ = b"(" + long + encode * 20_000 + b"t"
    opened(tmp_path / "x.pt", archive(whole(bytes_)))
    many = b"](" + b"K\x01" * 50_000 + b"eq\x01"
    sets = b"(" + many + (name("builtins", "frozenset") + b"h\x01\x85R") * 5000 + b"t"
    opened(tmp_path / "x.pt", archive(whole(sets)))


def test_bytes_that_are_text_are_bounded(tmp_path: Path, bounded: None) -> None:
    # Many calls share one long text. Each of them would be a copy of it.
    long = text("\u00ff" * (1 << 20)) + b"q\0" + text("latin1") + b"\x86q\1" + b"0"
    calls = (name("_codecs", "encode") + b"h\1R") * 5000
    found = opened(tmp_path / "x.pt", archive(whole(long + b"](" + calls + b"e")))
    assert "unfolds to 5242880000 bytes" in repr(found)
    # Other characters, and another encoding, are no bytes.
    for content, encoding in [("\u0100", "latin1"), ("a", "rot13"), ("\u00ff", "utf-8")]:
        body = call("_codecs", "encode", text(content), text(encoding))
        assert repr(opened(tmp_path / "x.pt", archive(whole(body)))) == "<opaque _codecs.encode>"
    array = call(
        "numpy.core.multiarray", "_reconstruct", name("numpy", "ndarray"), tuple_(number(0)), text("b")
    )
    dtype = call("numpy", "dtype", text("f4"), b"\x89", b"\x88")
    for size in (3, 2, 1 << 30):
        content = call("_codecs", "encode", text("\u00ff" * 12), text("latin1"))
        body = array + tuple_(number(1), tuple_(number(size)), dtype, b"\x89", content) + b"b"
        found = opened(tmp_path / "x.pt", archive(whole(body)))
        assert (repr(found) == "<opaque numpy.core.multiarray._reconstruct>") == (size != 3)


def test_a_long_key_above_many_leaves_is_opaque(tmp_path: Path, bounded: None) -> None:
    keys = (b"}" + text("k" * 4000)) * 100
    body = keys + b"}(" + b"".join(text(f"{n}") + b"N" for n in range(3000)) + b"u" + b"s" * 100
    opened(tmp_path / "x.pt", archive(whole(body)))


@pytest.mark.parametrize("size", [b"\xff\xff\xff\x7f", b"\0\0\0\x08"])
def test_a_large_memo_number_takes_no_memory(tmp_path: Path, bounded: None, size: bytes) -> None:
    assert opened(tmp_path / "x.pt", archive(whole(b"}r" + size))) == {}


def test_many_small_values_are_read(tmp_path: Path) -> None:
    count = 1_500_000
    for one in (number(7), b"\x88", b"N", b"]q\x00"):
        found = opened(tmp_path / "x.pt", archive(whole(b"]" + (b"(" + one * 1000 + b"e") * (count // 1000))))
        assert len(found) == count


@pytest.fixture(scope="module")
def small_values() -> bytes:
    """Ten million numbers, deflated to a thousandth."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("a/data.pkl", whole(b"](" + b"K\x01" * 10_000_000 + b"e"))
    return out.getvalue()


def test_a_deflated_pickle_of_small_values_is_bounded(
    tmp_path: Path, small_values: bytes, bounded: None
) -> None:
    with pytest.raises(sw.StepwellError, match="more than"):
        opened(tmp_path / "x.pt", small_values)


def test_values_that_nest_without_end_are_refused(tmp_path: Path, bounded: None) -> None:
    with pytest.raises(sw.CorruptCheckpoint, match="nest more than 10000 levels"):
        opened(tmp_path / "x.pt", archive(whole(b"]" * 500_000 + b"a" * 499_999)))


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (b"\x80\x02(cos\nsystem\n" + text("true") + b"o.", "opcode OBJ"),
        (b"\x80\x02}", "ends in the middle"),
        (b"\x80\x02\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "ends in the middle"),
        (b"\x80\x02" + b"]" * (6 << 20) + b".", "in so few bytes"),
    ],
)
def test_broken_pickles_are_refused(tmp_path: Path, data: bytes, expected: str) -> None:
    for content in (archive(data), data):
        with pytest.raises(sw.CorruptCheckpoint, match=expected):
            opened(tmp_path / "x.pt", content)


def rewritten(data: bytes, **fields: tuple[int, bytes]) -> bytes:
    """The archive with other bytes in the first entry of its directory."""
    out = bytearray(data)
    at = data.index(b"PK\x01\x02")
    for offset, value in fields.values():
        out[at + offset : at + offset + len(value)] = value
    return bytes(out)


def test_ambiguous_archives_are_refused(tmp_path: Path, bounded: None) -> None:
    sound = archive(whole(b"}"))
    two = io.BytesIO()
    with zipfile.ZipFile(two, "w") as file:
        file.writestr("a/data.pkl", whole(b"}"))
        file.writestr("b/data.pkl", whole(b"]"))
    for content, expected in [
        (two.getvalue(), "2 members data.pkl"),
        (sound.replace(b"a/data.pkl", b"b/data.pkl", 1), "another name"),
        (rewritten(sound, flags=(8, b"\x01")), "encrypted"),
        (rewritten(sound, flags=(8, b"\x20")), "patch"),
        (rewritten(sound, crc=(16, b"\1\2\3\4")), "checksum"),
        (sound[:-1], "end record"),
    ]:
        with pytest.raises(sw.CorruptCheckpoint, match=expected):
            opened(tmp_path / "x.pt", content)


@pytest.fixture(scope="module")
def bomb() -> bytes:
    """256 MiB of zeros, deflated; it takes a second to make."""
    body = zlib.compressobj(9, zlib.DEFLATED, -15)
    return b"".join(body.compress(b"\0" * (1 << 20)) for _ in range(256)) + body.flush()


def test_a_bomb_of_deflated_bytes_is_bounded(tmp_path: Path, bomb: bytes, bounded: None) -> None:
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as file:
        file.writestr("a/data.pkl", bomb)
    for length in (256 << 20, 1000):
        entry = {"method": (10, b"\x08\0"), "length": (24, struct.pack("<I", length))}
        content = rewritten(out.getvalue(), **entry)
        content = content[:8] + b"\x08\0" + content[10:]
        with pytest.raises(sw.StepwellError, match=r"more than|checksum|its entry says"):
            opened(tmp_path / "x.pt", content)


def old_stream(root: bytes, keys: bytes, storages: bytes, version: int = 1001) -> bytes:
    magic = pickle.dumps(0x1950A86A20F9469CFC6C, 2)
    return magic + pickle.dumps(version, 2) + pickle.dumps({}, 2) + whole(root) + whole(keys) + storages


def test_old_streams_that_lie_are_refused(tmp_path: Path, bounded: None) -> None:
    own = (
        tuple_(text("storage"), name("torch", "FloatStorage"), text("0"), text("cpu"), number(2), b"N") + b"Q"
    )
    view = tuple_(text("v"), number(1), number(2))
    viewed = (
        tuple_(text("storage"), name("torch", "FloatStorage"), text("0"), text("cpu"), number(2), view) + b"Q"
    )
    root, count = tensor(0, [2], [1], own), struct.pack("<q", 2)
    key = b"]" + text("0") + b"a"
    assert opened(tmp_path / "x.pt", old_stream(root, key, count + b"\0" * 8)).tolist() == [0, 0]
    for content, expected in [
        (old_stream(root, key, struct.pack("<q", 3) + b"\0" * 12), "3 elements, its object says 2"),
        (old_stream(root, key, count + b"\0" * 7), "in the middle of storage 0"),
        (old_stream(root, b"]", b""), "no storage 0"),
        (old_stream(root, b"](" + text("0") + text("0") + b"e", count * 9), "does not name once"),
        (old_stream(root, b"]" + text("1") + b"a", count), "does not name once"),
        (old_stream(root, b"N", b""), "keys of the storages"),
        (old_stream(root, key, count, version=7), "version 1001"),
        (old_stream(tensor(0, [2], [1], viewed), key, count + b"\0" * 8), "is not in it"),
        (old_stream(root, key, b"")[:-20], "in the middle"),
    ]:
        with pytest.raises(sw.CorruptCheckpoint, match=expected):
            opened(tmp_path / "x.pt", content)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (b"7z\xbc\xaf\x27\x1c" + b"\0" * 20, "7z"),
        (b"\x1f\x8b" + b"\0" * 20, "gzip"),
        (b"a" * 257 + b"ustar\0", "tar"),
        (b"GGUF\3\0\0\0", "GGUF"),
        (b"\x89HDF\r\n\x1a\n", "Keras"),
        (b"", "this file is empty"),
        (b"hello", "in no format that is read"),
    ],
)
def test_other_formats_are_refused_by_name(tmp_path: Path, content: bytes, expected: str) -> None:
    (tmp_path / "x.pt").write_bytes(content)
    with pytest.raises(sw.errors.FormatError, match=expected):
        sw.open(tmp_path / "x.pt")


TENSORFLOW = "this is a checkpoint of TensorFlow. Load it with TensorFlow"
PADDLE = "this is a file of Paddle. Load it with Paddle"
PADDLE_DISTRIBUTED = "this is a distributed checkpoint of Paddle. Load it with Paddle"
#: Files, the path that is opened, and the message.
OTHERS = [
    (("ckpt-1.index", "ckpt-1.data-00000-of-00001"), "", TENSORFLOW),
    (("ckpt-1.index", "ckpt-1.data-00000-of-00001"), "ckpt-1", TENSORFLOW),
    (("ckpt-1.index", "ckpt-1.data-00000-of-00001"), "ckpt-1.index", TENSORFLOW),
    (("ckpt-1.data-00000-of-00001",), "ckpt-1.data-00000-of-00001", TENSORFLOW),
    (("saved_model.pb",), "saved_model.pb", "this is a SavedModel of TensorFlow"),
    (("saved_model.pb",), "", r"saved_model.pb in this directory is a SavedModel of TensorFlow"),
    *[((f"model.{end}",), f"model.{end}", PADDLE) for end in ("pdparams", "pdopt", "pdiparams", "pdmodel")],
    (("model.pdparams",), "", "model.pdparams in this directory is a file of Paddle"),
    (("0.metadata", "0_0.distcp"), "", PADDLE_DISTRIBUTED),
    (("0.metadata", "0_0.distcp"), "0_0.distcp", PADDLE_DISTRIBUTED),
    (("0.metadata", "0_0.distcp"), "0.metadata", PADDLE_DISTRIBUTED),
    (("m.gguf", "README.md"), "", "m.gguf in this directory is a GGUF file.*converted from"),
    (("m.nemo",), "", "m.nemo in this directory is an archive of NeMo. Unpack it"),
    (("m.keras",), "", "m.keras in this directory is a Keras archive. Load it with Keras"),
    (("tf_model.h5", "config.json"), "", "tf_model.h5 in this directory is an HDF5 file.*Load it with Keras"),
]


@pytest.mark.parametrize(("names", "opened", "expected"), OTHERS)
def test_files_of_other_libraries_are_refused_by_name(
    tmp_path: Path, names: tuple[str, ...], opened: str, expected: str
) -> None:
    for name in names:
        is_paddle = name.endswith(("pdparams", "pdopt", "distcp", "metadata"))
        (tmp_path / name).write_bytes(pickle.dumps({"w": 1}) if is_paddle else bytes(64))
    with pytest.raises(sw.errors.FormatError, match=expected):
        sw.open(tmp_path / opened)


def test_a_pointer_of_git_lfs_is_refused_by_name(tmp_path: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a\nsize 12345\n"
    names = ["w.safetensors", "w.bin", "w.pt", "w.npz", "a/model.safetensors", "b/pytorch_model.bin"]
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(pointer)
    for path in [*names, "a", "b"]:
        with pytest.raises(
            sw.errors.FormatError, match=r"Git LFS pointer, not the file\. Run `git lfs pull`"
        ):
            sw.open(tmp_path / path)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("_CHECKPOINT_METADATA", "has no tree of arrays that is read"),
        ("100/_CHECKPOINT_METADATA", "100: this checkpoint of Orbax has no tree of arrays"),
    ],
)
def test_a_directory_of_orbax_is_refused_by_name(tmp_path: Path, name: str, expected: str) -> None:
    (tmp_path / name).parent.mkdir(exist_ok=True)
    (tmp_path / name).write_text("{}")
    with pytest.raises(sw.errors.FormatError, match=expected):
        sw.open(tmp_path)


def test_programs_in_archives_are_refused_by_name(tmp_path: Path) -> None:
    for member, expected in [
        ("a/constants.pkl", "TorchScript"),
        ("a/.data/extern_modules", "torch.package"),
        ("a/archive_format", "torch.export"),
        ("model.weights.h5", "Keras"),
    ]:
        with zipfile.ZipFile(tmp_path / "x.pt", "w") as file:
            file.writestr(member, b"")
            file.writestr("a/data.pkl", whole(b"}"))
        with pytest.raises(sw.errors.FormatError, match=expected):
            sw.open(tmp_path / "x.pt")
