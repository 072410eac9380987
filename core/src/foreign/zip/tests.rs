use proptest::prelude::*;

use super::*;

/// A member as it is written.
struct Made<'a> {
    name: &'a str,
    local_name: &'a str,
    bytes: &'a [u8],
}

fn made<'a>(name: &'a str, bytes: &'a [u8]) -> Made<'a> {
    Made { name, local_name: name, bytes }
}

fn local(member: &Made<'_>) -> Vec<u8> {
    let mut out = LOCAL.to_vec();
    out.extend([0; 22]); // sizes and checksum are in the central directory alone
    out.extend((member.local_name.len() as u16).to_le_bytes());
    out.extend(4_u16.to_le_bytes());
    out.extend(member.local_name.as_bytes());
    out.extend(b"FB\0\0");
    out
}

fn central(member: &Made<'_>, header: u64) -> Vec<u8> {
    let length = member.bytes.len() as u32;
    let mut out = CENTRAL.to_vec();
    out.extend([0; 12]);
    out.extend(7_u32.to_le_bytes());
    out.extend(length.to_le_bytes());
    out.extend(length.to_le_bytes());
    out.extend((member.name.len() as u16).to_le_bytes());
    out.extend([0; 12]);
    out.extend((header as u32).to_le_bytes());
    out.extend(member.name.as_bytes());
    out
}

fn end(count: u16, offset: usize, length: usize) -> Vec<u8> {
    let mut out = END.to_vec();
    out.extend([0; 4]);
    out.extend(count.to_le_bytes());
    out.extend(count.to_le_bytes());
    out.extend((length as u32).to_le_bytes());
    out.extend((offset as u32).to_le_bytes());
    out.extend([0; 2]);
    out
}

fn archive(members: &[Made<'_>]) -> Vec<u8> {
    let mut out = Vec::new();
    let mut entries = Vec::new();
    for member in members {
        entries.extend(central(member, out.len() as u64));
        out.extend(local(member));
        out.extend(member.bytes);
    }
    let offset = out.len();
    out.extend(&entries);
    out.extend(end(members.len() as u16, offset, entries.len()));
    out
}

/// All contents, by name.
fn read(bytes: &[u8]) -> Parsed<Vec<(String, Vec<u8>)>> {
    let directory = directory(bytes, bytes.len() as u64)?;
    let listed = &bytes[directory.offset as usize..][..directory.length as usize];
    let mut found = Vec::new();
    let members = members(listed, &directory)?;
    let header = |member: &ZipMember| &bytes[member.header as usize..];
    let headers: Vec<(usize, &[u8])> = members.iter().map(header).enumerate().collect();
    for (member, at) in members.iter().zip(contents(&headers, &members, &directory)?) {
        let at = at as usize;
        found.push((member.name.clone(), bytes[at..at + member.length as usize].to_vec()));
    }
    Ok(found)
}

fn refused(bytes: &[u8]) -> String {
    read(bytes).unwrap_err().to_string()
}

#[test]
fn members_are_found_by_the_central_directory() {
    let bytes = archive(&[made("a/data.pkl", b"one"), made("a/data/0", b""), made("ü", b"three")]);
    let found = read(&bytes).unwrap();
    let expected = [("a/data.pkl", b"one".as_slice()), ("a/data/0", b""), ("ü", b"three")];
    assert_eq!(found, expected.map(|(name, bytes)| (name.to_owned(), bytes.to_vec())));
    // One content needs one local header.
    let place = directory(&bytes, bytes.len() as u64).unwrap();
    let members = members(&bytes[place.offset as usize..][..place.length as usize], &place).unwrap();
    let third = contents(&[(2, &bytes[members[2].header as usize..])], &members, &place).unwrap();
    assert_eq!(&bytes[third[0] as usize..][..5], b"three");
    // The tail alone is enough to find the directory.
    let tail = &bytes[bytes.len() - 22..];
    assert_eq!(directory(tail, bytes.len() as u64).unwrap(), directory(&bytes, bytes.len() as u64).unwrap());
}

#[test]
fn a_comment_may_stand_behind_the_end() {
    let mut bytes = archive(&[made("a", b"one")]);
    let at = bytes.len() - 2;
    bytes[at..].copy_from_slice(&5_u16.to_le_bytes());
    bytes.extend(b"hello");
    assert_eq!(read(&bytes).unwrap().len(), 1);
}

#[test]
fn the_long_end_record_is_read() {
    let mut bytes = archive(&[made("a", b"one")]);
    let end_at = bytes.len() - 22;
    let directory = directory(&bytes, bytes.len() as u64).unwrap();
    let short = bytes.split_off(end_at);
    bytes.extend(END_64);
    bytes.extend(44_u64.to_le_bytes());
    bytes.extend([0; 12]);
    for word in [1, 1, directory.length, directory.offset] {
        bytes.extend(word.to_le_bytes());
    }
    bytes.extend(LOCATOR_64);
    bytes.extend([0; 4]);
    bytes.extend((end_at as u64).to_le_bytes());
    bytes.extend(1_u32.to_le_bytes());
    let at = bytes.len();
    bytes.extend(&short);
    assert_eq!(read(&bytes).unwrap().len(), 1);
    bytes[at + 16..at + 20].copy_from_slice(&u32::MAX.to_le_bytes());
    assert_eq!(read(&bytes).unwrap().len(), 1);
    bytes[at + 16..at + 20].copy_from_slice(&3_u32.to_le_bytes());
    assert!(refused(&bytes).contains("contradict"));
}

#[test]
fn ambiguous_archives_are_refused() {
    let two = archive(&[made("a", b"one"), made("a", b"two")]);
    assert!(refused(&two).contains("`a` occurs twice"));
    let other = archive(&[Made { name: "a", local_name: "b", bytes: b"one" }]);
    assert!(refused(&other).contains("another name"));
    let mut overlapping = archive(&[made("a", b"one"), made("b", b"two")]);
    let entry = overlapping.windows(4).rposition(|four| four == CENTRAL).unwrap();
    overlapping[entry + 42..entry + 46].copy_from_slice(&1_u32.to_le_bytes());
    assert!(refused(&overlapping).contains("overlap"));
    let nested = archive(&[made("a", &archive(&[made("b", b"")]))]);
    assert_eq!(read(&nested).unwrap().len(), 1);
    let inner = archive(&[made("x", b"1")]);
    let mut outer = archive(&[made("a", b"one")]);
    let at = outer.len() - 2;
    outer[at..].copy_from_slice(&(inner.len() as u16).to_le_bytes());
    outer.extend(&inner);
    assert!(refused(&outer).contains("two end records"));
}

#[test]
fn broken_archives_are_refused() {
    let sound = archive(&[made("a", b"one")]);
    assert!(refused(b"").contains("none"));
    assert!(refused(&sound[..sound.len() - 1]).contains("none"));
    let entry = sound.windows(4).rposition(|four| four == CENTRAL).unwrap();
    let end_at = sound.len() - 22;
    for (at, bytes, expected) in [
        (end_at + 4, [1, 0].as_slice(), "several disks"),
        (end_at + 8, &[2, 0], "several disks"),
        (end_at + 16, &[0xf0, 0xff, 0xff, 0x7f], "beyond its end record"),
        (entry, b"XX", "an entry of the central directory"),
        (entry + 8, &[1], "encrypted"),
        (entry + 8, &[0x20], "patch"),
        (entry + 10, &[99], "by a method"),
        (entry + 20, &[9], "two lengths"),
        (entry + 28, &[0xff], "in the middle of an entry"),
        (entry + 42, &[0xff, 0xff], "into the central directory"),
        (entry + 46, &[0xff], "no UTF-8"),
        (0, b"XX", "local header was expected"),
        (6, &[1], "contradicts the central directory"),
        (8, &[8], "contradicts the central directory"),
        (28, &[5], "reaches into what is behind it"),
        (28, &[0xff, 0xff], "reaches into what is behind it"),
    ] {
        let mut broken = sound.clone();
        broken[at..at + bytes.len()].copy_from_slice(bytes);
        let message = refused(&broken);
        assert!(message.contains(expected), "{message}");
    }
}

proptest! {
    #[test]
    fn any_archive_ends_without_a_panic(changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..6), cut: prop::sample::Index) {
        let mut bytes = archive(&[made("a", b"one"), made("data/1", b"two")]);
        for (at, value) in changes {
            let at = at.index(bytes.len());
            bytes[at] = value;
        }
        let length = bytes.len() as u64;
        for bytes in [&bytes[..], &bytes[..cut.index(bytes.len())]] {
            if let Ok(directory) = directory(bytes, bytes.len() as u64)
                && let Some(listed) = bytes.get(directory.offset as usize..)
                && let Ok(members) = members(listed.get(..directory.length as usize).unwrap_or_default(), &directory)
            {
                let header = |member: &ZipMember| bytes.get(member.header as usize..).unwrap_or_default();
                let headers: Vec<(usize, &[u8])> = members.iter().map(header).enumerate().collect();
                let _ = contents(&headers, &members, &directory);
            }
        }
        let _ = directory(&bytes, length + 1000);
    }
}

/// A member of a stream: checksum and length are behind the content.
fn streamed(name: &str, bytes: &[u8], width: usize) -> Vec<u8> {
    let mut out = local(&made(name, bytes));
    out[6] = 8;
    out.extend(bytes);
    out.extend(DESCRIPTOR);
    out.extend(7_u32.to_le_bytes());
    for _ in 0..2 {
        out.extend(&(bytes.len() as u64).to_le_bytes()[..width]);
    }
    out
}

#[test]
fn members_at_the_start_of_a_stream_are_found() {
    // A descriptor of another length inside the content does not end it.
    let pickle = [DESCRIPTOR, &[9; 30]].concat();
    let whole = [streamed("a/data.pkl", &pickle, 4), streamed("a/byteorder", b"little", 8)].concat();
    let open = [whole.clone(), streamed("a/data/0", &[1; 100], 4)[..60].to_vec()].concat();
    let found = first_members(&open);
    let names: Vec<_> =
        found.iter().map(|(member, _)| (member.name.as_str(), member.crc, member.length)).collect();
    let expected =
        [("a/data.pkl", Some(7), 34), ("a/byteorder", Some(7), 6), ("a/data/0", None, OPEN_LENGTH)];
    assert_eq!(names, expected);
    for ((member, content), bytes) in found.iter().zip([&pickle, b"little".as_slice(), &[1; 10]]) {
        assert!(open[*content as usize..].starts_with(bytes), "{}", member.name);
    }
    // A name occurs once.
    assert_eq!(first_members(&[whole.clone(), whole.clone()].concat()).len(), 2);
    let many: Vec<u8> = (0..1000).flat_map(|number| streamed(&format!("{number}"), b"", 4)).collect();
    assert_eq!(first_members(&many).len(), MAX_FIRST_MEMBERS);
    let mut deflated = whole;
    deflated[8] = 8;
    assert_eq!(first_members(&deflated), []);
}

#[test]
fn an_archive_whose_checksums_are_all_zero_has_none() {
    let sound = archive(&[made("a", b"1"), made("b", b"22")]);
    let mut zeros = sound.clone();
    for at in 0..zeros.len() - 4 {
        if zeros[at..].starts_with(CENTRAL) {
            zeros[at + 16..at + 20].fill(0);
        }
    }
    for (bytes, crc) in [(sound, Some(7)), (zeros, None)] {
        let directory = directory(&bytes, bytes.len() as u64).unwrap();
        let listed = &bytes[directory.offset as usize..][..directory.length as usize];
        assert!(members(listed, &directory).unwrap().iter().all(|member| member.crc == crc));
    }
}
