"""The format document tells enough: with its tables alone, and without rkyv, the golden index can
be read."""

import re
import struct
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
DOCUMENT = (REPOSITORY / "docs/format.md").read_text()
GOLDEN = REPOSITORY / "core/tests/fixtures/golden_v1"
NUMBERS = {"u8": "B", "u32": "I", "u64": "Q", "i64": "q"}


def fields(heading, scalars=()):
    section = re.split(r"\n#+ ", DOCUMENT.split(f"#### {heading}\n")[1])[0]
    rows = re.findall(r"^\| `(\w+)` \| (u8|u32|u64|i64|text) \|", section, re.M)
    return [(name, kind, name in scalars) for name, kind in rows]


def read_text(archive, at):
    if archive[at] & 0xC0 != 0x80:
        return archive[at : at + 8].split(b"\xff")[0].decode()
    head, offset = struct.unpack_from("<Ii", archive, at)
    length = head & 0x3F | (head & ~0xFF) >> 2
    return archive[at + offset : at + offset + length].decode()


def read_archive(archive, size, wanted):
    at = len(archive) - size
    values = {}
    for name, kind, is_scalar in wanted:
        if is_scalar:
            (values[name],) = struct.unpack_from("<" + NUMBERS[kind], archive, at)
            at += struct.calcsize("<" + NUMBERS[kind])
            continue
        if kind == "text":
            values[name] = read_text(archive, at)
        else:
            offset, count = struct.unpack_from("<iI", archive, at)
            values[name] = (
                list(struct.unpack_from(f"<{count}{NUMBERS[kind]}", archive, at + offset)) if count else []
            )
        at += 8
    assert at == len(archive), "the document lists other fields than the structure has"
    return values


def test_the_golden_index_is_readable_with_the_document_alone():
    index = (GOLDEN / "i0/index").read_bytes()
    magic, _, version, _, _, file_length, root_length, _, _, leaves, nodes = struct.unpack_from(
        "<8sIIQQQQIIQQ", index
    )
    assert (magic, version, file_length) == (b"\x89SWI\r\n\x1a\n", 1, len(index))

    root = read_archive(index[128 : 128 + root_length], 72, fields("Root table"))
    assert len(root["leaf_hash"]) == leaves == sum(root["page_leaves"])
    assert root["file_names"] == "00000.datamodel.safetensors"
    assert root["file_length"][0] == (GOLDEN / "i0/00000.data").stat().st_size

    at = 128 + root_length
    (length,) = root["page_length"]
    page_fields = fields("Index page", scalars=("first_node", "repeated_nodes"))
    page = read_archive(index[at + 32 : at + length], 212, page_fields)
    assert at + length == len(index)
    assert len(page["node_parent"]) == nodes
    assert page["names"] == "modelfc.weighttiedemptylistscalarforeign"
    assert page["tensor_dims"] == [4, 6, 0, 3, 24]
    assert page["extent_zip"] == [0xDEADBEEF]
