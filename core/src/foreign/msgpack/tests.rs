use std::fmt::Write as _;

use proptest::prelude::*;

use super::*;

/// The codes of Flax.
const NESTED: [i8; 3] = [1, 2, 3];

/// Shows the nodes in a line.
fn shown(bytes: &[u8]) -> String {
    let mut out = String::new();
    for node in parse(bytes, &NESTED).unwrap() {
        match node {
            MsgpackNode::Nil => out.push_str("nil "),
            MsgpackNode::Bool(value) => write!(out, "{value} ").unwrap(),
            MsgpackNode::Int(value) => write!(out, "{value} ").unwrap(),
            MsgpackNode::Unsigned(value) => write!(out, "{value}u ").unwrap(),
            MsgpackNode::Float(value) => write!(out, "{value:?} ").unwrap(),
            MsgpackNode::Str(text) => write!(out, "'{text}' ").unwrap(),
            MsgpackNode::Bin(BinPlace { offset, length }) => write!(out, "bin {offset}+{length} ").unwrap(),
            MsgpackNode::Array(count) => write!(out, "[{count}] ").unwrap(),
            MsgpackNode::Map(count) => write!(out, "{{{count}}} ").unwrap(),
            MsgpackNode::Ext { code, place, nested } => {
                write!(out, "ext {code} {}+{} {nested} ", place.offset, place.length).unwrap();
            }
        }
    }
    out
}

fn refused(bytes: &[u8]) -> String {
    parse(bytes, &NESTED).unwrap_err().to_string()
}

/// `msgpack.packb([None, True, False, 1, -1, 200, -100, 70000, -70000, 2**40, -2**40, 2**63, 1.5,
/// "ü", b"xyz", {"a": [], "b": {}}])`.
const EVERYTHING: &[u8] = b"\xdc\x00\x10\xc0\xc3\xc2\x01\xff\xcc\xc8\xd0\x9c\xce\x00\x01\x11p\xd2\xff\xfe\xee\x90\xcf\x00\x00\x01\x00\x00\x00\x00\x00\xd3\xff\xff\xff\x00\x00\x00\x00\x00\xcf\x80\x00\x00\x00\x00\x00\x00\x00\xcb?\xf8\x00\x00\x00\x00\x00\x00\xa2\xc3\xbc\xc4\x03xyz\x82\xa1a\x90\xa1b\x80";
/// `flax.serialization.msgpack_serialize({"w": np.arange(3, dtype=np.int16), "c": 1 + 2j})`.
const FLAX: &[u8] = b"\x82\xa1c\xc7\x13\x02\x92\xcb?\xf0\x00\x00\x00\x00\x00\x00\xcb@\x00\x00\x00\x00\x00\x00\x00\xa1w\xc7\x11\x01\x93\x91\x03\xa5int16\xc4\x06\x00\x00\x01\x00\x02\x00";

#[test]
fn all_sorts_of_values_are_read() {
    assert_eq!(
        shown(EVERYTHING),
        "[16] nil true false 1 -1 200 -100 70000 -70000 1099511627776 -1099511627776 9223372036854775808u \
         1.5 'ü' bin 63+3 {2} 'a' [0] 'b' {0} "
    );
    for (bytes, expected) in [
        (b"\xca\x3f\xc0\x00\x00".as_slice(), "1.5 "),
        (b"\xcd\x01\x00", "256 "),
        (b"\xd1\xff\x00", "-256 "),
        (b"\xd9\x01x", "'x' "),
        (b"\xda\x00\x01x", "'x' "),
        (b"\xdb\x00\x00\x00\x01x", "'x' "),
        (b"\xc5\x00\x01x", "bin 3+1 "),
        (b"\xc6\x00\x00\x00\x01x", "bin 5+1 "),
        (b"\xdd\x00\x00\x00\x01\xc0", "[1] nil "),
        (b"\xde\x00\x01\x05\xc0", "{1} 5 nil "),
        (b"\xdf\x00\x00\x00\x01\x05\xc0", "{1} 5 nil "),
        (b"\xd4\x07x", "ext 7 2+1 false "),
        (b"\xd8\xff0123456789abcdef", "ext -1 2+16 false "),
        (b"\xc8\x00\x01\x07x", "ext 7 4+1 false "),
        (b"\xc9\x00\x00\x00\x01\x03\xc0", "ext 3 6+1 true nil "),
    ] {
        assert_eq!(shown(bytes), expected);
    }
}

#[test]
fn nested_values_of_an_application_are_parsed() {
    let expected = "{2} 'c' ext 2 6+19 true [2] 1.0 2.0 'w' ext 1 30+17 true [3] [1] 3 'int16' bin 41+6 ";
    assert_eq!(shown(FLAX), expected);
}

#[test]
fn payloads_are_skipped_unread() {
    // {"a": 1 GiB, "b": nil}
    let head = b"\x82\xa1a\xc6\x40\x00\x00\x00";
    let behind = head.len() as u64 + (1 << 30);
    let mut parser = MsgpackParser::new(behind + 3, &NESTED);
    assert_eq!(parser.wants(), Some(0..WINDOW_BYTES));
    let mut window = head.to_vec();
    window.resize(WINDOW_BYTES as usize, 0xc1);
    parser.feed(&window).unwrap();
    assert_eq!(parser.wants(), Some(behind..behind + 3));
    parser.feed(b"\xa1b\xc0").unwrap();
    assert_eq!(parser.wants(), None);
    assert_eq!(parser.finish().unwrap().len(), 5);
}

#[test]
fn a_long_text_is_asked_for_whole() {
    let text = "x".repeat(300_000);
    let bytes = [b"\xdb".as_slice(), &300_000_u32.to_be_bytes(), text.as_bytes()].concat();
    assert_eq!(parse(&bytes, &[]).unwrap(), [MsgpackNode::Str(text.into())]);
}

#[test]
fn bombs_are_refused_before_they_take_memory() {
    for (bytes, expected) in [
        (b"\xdd\xff\xff\xff\xff\xc0".as_slice(), "4294967295 values, and 1 bytes"),
        (b"\xdf\xff\xff\xff\xff\xc0", "8589934590 values"),
        (b"\xc6\xff\xff\xff\xff\xc0", "4294967295 bytes, and 1 are left"),
        (b"\xdb\xff\xff\xff\xff\xc0", "a text of 4294967295 bytes"),
        (b"\xdb\x00\xff\xff\xff\xc0", "16777215 bytes, and 1 are left"),
        (b"\xc9\xff\xff\xff\xff\x01\xc0", "4294967295 bytes, and 1 are left"),
    ] {
        let message = refused(bytes);
        assert!(message.contains(expected), "{message}");
    }
    assert!(refused(&vec![0x91; 100_000]).contains("nested more than 128 deep"));
    let many = 1_u32 << 20;
    let wide = [b"\xdd".as_slice(), &many.to_be_bytes(), &vec![0xc0; many as usize]].concat();
    assert!(refused(&wide).contains("values in so few bytes"));
}

#[test]
fn broken_values_are_refused_by_place() {
    for (bytes, expected) in [
        (b"".as_slice(), "ends in the middle of a value (at byte 0)"),
        (b"\xc0\xc0", "more bytes follow (at byte 1)"),
        (b"\xc1", "0xc1 begins no value"),
        (b"\xa1\xff", "no UTF-8"),
        (b"\xc7\x01\x01\xc0\xc0", "more bytes follow"),
        (b"\xc7\x02\x01\xc0\xc0", "more bytes follow (at byte 4)"),
        // An application's value of one byte, whose content goes on behind it.
        (b"\x92\xc7\x01\x01\xcb\x00\x00\x00\x00\x00\x00\x00\x00\xc0", "ends in the middle of a value"),
    ] {
        let message = refused(bytes);
        assert!(message.contains(expected), "{bytes:x?}: {message}");
    }
    for bytes in [EVERYTHING, FLAX] {
        for cut in 0..bytes.len() {
            assert!(parse(&bytes[..cut], &NESTED).is_err(), "{cut}");
        }
    }
    let mut parser = MsgpackParser::new(4, &[]);
    assert!(parser.feed(b"\x93").unwrap_err().to_string().contains("became shorter"));
    assert!(parser.finish().unwrap_err().to_string().contains("has no end"));
}

proptest! {
    #[test]
    fn any_value_ends_without_a_panic(mut bytes in proptest::collection::vec(any::<u8>(), 0..200), tag in 0x80_u8..=0xdf) {
        let _ = parse(&bytes, &NESTED);
        bytes.insert(0, tag);
        let _ = parse(&bytes, &NESTED);
    }
}
