use proptest::prelude::*;

use super::*;

fn varint(mut value: u64) -> Vec<u8> {
    let mut out = Vec::new();
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
    out
}

/// A node with ample memory.
fn parse(bytes: &[u8], base: &str, height: u8) -> Parsed<OcdbtNode> {
    node(bytes, base, height, &mut (64 << 20))
}

fn column(values: &[u64]) -> Vec<u8> {
    values.iter().flat_map(|&value| varint(value)).collect()
}

/// A manifest or a node with that body.
fn framed(magic: u32, body: &[u8], is_zstd: bool) -> Vec<u8> {
    let body = if is_zstd {
        let mut frame = vec![0; zstd_safe::compress_bound(body.len())];
        let length = zstd_safe::compress(frame.as_mut_slice(), body, 1).unwrap();
        frame[..length].to_vec()
    } else {
        body.to_vec()
    };
    let length = (4 + 8 + 2 + body.len() + 4) as u64;
    let head = [&magic.to_be_bytes()[..], &length.to_le_bytes(), &[0, u8::from(is_zstd)]].concat();
    let framed = [head, body].concat();
    [framed.as_slice(), &crc32c(&framed).to_le_bytes()].concat()
}

/// Names as their lengths and their bytes, each with what it shares with the one before it.
fn names(names: &[&str]) -> (Vec<u8>, Vec<u8>, Vec<u8>) {
    let shared =
        |(one, two): (&&str, &&str)| one.bytes().zip(two.bytes()).take_while(|(a, b)| a == b).count() as u64;
    let prefixes: Vec<u64> = names.iter().zip(names.iter().skip(1)).map(shared).collect();
    let rests = [0].iter().chain(&prefixes).zip(names).map(|(&prefix, name)| &name[prefix as usize..]);
    let suffixes: Vec<u64> = rests.clone().map(|rest| rest.len() as u64).collect();
    (column(&prefixes), column(&suffixes), rests.collect::<String>().into_bytes())
}

/// A table of data files, with the lengths of their bases.
fn files(files: &[(&str, u64)]) -> Vec<u8> {
    let (prefixes, suffixes, bytes) = names(&files.iter().map(|(path, _)| *path).collect::<Vec<_>>());
    let bases: Vec<u64> = files.iter().map(|(_, base)| *base).collect();
    [varint(files.len() as u64), prefixes, suffixes, column(&bases), bytes].concat()
}

fn made_manifest(kind: u64, offset: u64, length: u64) -> Vec<u8> {
    let config =
        [&[7; 16][..], &varint(kind), &varint(100), &varint(1 << 20), &[4, 1], &[1, 0, 0, 0]].concat();
    // Two versions: the newest one counts.
    let versions = [
        varint(2),
        column(&[1, 2]),
        vec![0, 1],
        column(&[0, 1, 17, offset, 5, length]),
        column(&[3; 6]),
        vec![0; 16],
        varint(0),
    ];
    let files = files(&[("d/first", 0), ("d/second", 0)]);
    framed(MANIFEST, &[config, files, versions.concat()].concat(), true)
}

fn leaf(is_zstd: bool) -> Vec<u8> {
    let (prefixes, suffixes, bytes) = names(&["a/0", "a/1", "b"]);
    let body = [
        vec![0],
        files(&[("process_0/d/x", 10)]),
        varint(3),
        prefixes,
        suffixes,
        bytes,
        column(&[3, 900, 2]),
        column(&[0, 1, 0]),
        column(&[0]),
        column(&[77]),
        b"onetw".to_vec(),
    ];
    framed(NODE, &body.concat(), is_zstd)
}

fn interior() -> Vec<u8> {
    let (prefixes, suffixes, bytes) = names(&["ab/1", "ac"]);
    let body = [
        vec![1],
        files(&[("d/x", 0)]),
        varint(2),
        prefixes,
        suffixes,
        column(&[3, 0]),
        bytes,
        column(&[0, 0, 5, 6, 70, 80]),
        column(&[1; 6]),
    ];
    framed(NODE, &body.concat(), true)
}

fn place(path: &str, base: &str, offset: u64, length: u64) -> OcdbtPlace {
    OcdbtPlace { path: path.into(), base: base.into(), offset, length }
}

#[test]
fn the_newest_version_of_a_manifest_is_found() {
    let found = manifest(&made_manifest(0, 5, 9)).unwrap();
    assert_eq!(found, OcdbtManifest { is_numbered: false, root: Some((place("d/second", "", 5, 9), 1)) });
    assert_eq!(manifest(&made_manifest(0, u64::MAX, u64::MAX)).unwrap().root, None);
    assert!(manifest(&made_manifest(1, 5, 9)).unwrap().is_numbered);
    assert!(manifest(&made_manifest(2, 5, 9)).unwrap_err().what.contains("kind 2"));
}

#[test]
fn values_lie_in_a_leaf_or_in_a_data_file() {
    for is_zstd in [false, true] {
        let found = parse(&leaf(is_zstd), "base/", 0).unwrap();
        let value = |bytes: &[u8]| OcdbtValue::Inline(bytes.to_vec());
        let at = place("base/process_0/d/x", "base/process_0/", 77, 900);
        let expected = [("a/0", value(b"one")), ("a/1", OcdbtValue::At(at)), ("b", value(b"tw"))];
        assert_eq!(found, OcdbtNode::Leaf(expected.map(|(key, value)| (key.into(), value)).into()));
    }
    assert!(parse(&leaf(false), "", 1).unwrap_err().what.contains("height 1"));
}

#[test]
fn children_have_the_prefix_of_their_keys() {
    let found = parse(&interior(), "", 1).unwrap();
    let expected = [("ab/", place("d/x", "", 5, 70)), ("", place("d/x", "", 6, 80))];
    assert_eq!(found, OcdbtNode::Interior(expected.map(|(key, place)| (key.into(), place)).into()));
}

#[test]
fn a_changed_byte_is_found() {
    for sound in [leaf(true), interior(), made_manifest(0, 5, 9)] {
        for at in 0..sound.len() {
            let mut bytes = sound.clone();
            bytes[at] ^= 1;
            assert!(parse(&bytes, "", 0).is_err() && manifest(&bytes).is_err(), "byte {at}");
        }
        assert!(parse(&sound[..sound.len() - 1], "", 0).is_err());
    }
}

#[test]
fn memory_is_counted_before_it_is_taken() {
    // Three entries and a file of 64 bytes each, keys of 7 bytes, a path of 13, values of 5.
    let mut memory = 4 * 64 + 7 + 13 + 5;
    node(&leaf(false), "", 0, &mut memory).unwrap();
    assert_eq!(memory, 0);
    for memory in 0..281 {
        assert!(node(&leaf(false), "", 0, &mut { memory }).unwrap_err().what.contains("too much memory"));
    }
}

#[test]
fn lying_counts_take_no_memory() {
    let many = framed(NODE, &[vec![0], varint(0), varint(1 << 60)].concat(), false);
    assert!(parse(&many, "", 0).unwrap_err().what.contains("entries in"));
    let long = framed(NODE, &[vec![0], varint(1), varint(1 << 60), varint(0)].concat(), false);
    assert!(parse(&long, "", 0).is_err());
    let bomb = framed(NODE, &vec![0; MIN_DECODED_BYTES + 1], true);
    assert!(parse(&bomb, "", 0).unwrap_err().what.contains("too long"));
}

proptest! {
    #[test]
    fn any_body_ends_without_a_panic(changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..5), which in 0..3) {
        let sound = match which {
            0 => leaf(false),
            1 => framed(NODE, &body(&interior(), NODE, "").unwrap(), false),
            _ => framed(MANIFEST, &body(&made_manifest(0, 5, 9), MANIFEST, "").unwrap(), false),
        };
        let magic = if which == 2 { MANIFEST } else { NODE };
        let mut content = sound[14..sound.len() - 4].to_vec();
        for (at, value) in changes {
            let at = at.index(content.len());
            content[at] = value;
        }
        let bytes = framed(magic, &content, false);
        let _ = (parse(&bytes, "base", 0), parse(&bytes, "", 1), manifest(&bytes));
    }
}
