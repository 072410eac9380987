use proptest::prelude::*;

use super::*;

/// An array's start with that text, padded as numpy pads it.
fn written(version: u8, text: &str) -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.extend([version, 0]);
    let width = if version == 1 { 2 } else { 4 };
    let mut text = text.as_bytes().to_vec();
    while !(out.len() + width + text.len() + 1).is_multiple_of(64) {
        text.push(b' ');
    }
    text.push(b'\n');
    out.extend(&(text.len() as u32).to_le_bytes()[..width]);
    out.extend(text);
    out
}

fn refused(text: &str) -> String {
    parse(&written(1, text)).unwrap_err().to_string()
}

#[test]
fn headers_of_all_versions_are_read() {
    let text = "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }";
    for version in 1..=3 {
        let mut bytes = written(version, text);
        let length = bytes.len() as u64;
        assert_eq!(header_length(&bytes[..12]), Ok(length));
        bytes.extend([1; 48]);
        let expected =
            NpyHeader { descr: Some("<f4".to_owned()), fortran_order: false, shape: vec![3, 4], length };
        assert_eq!(parse(&bytes), Ok(expected));
    }
}

#[test]
fn keys_come_in_any_order_and_python_2_wrote_long_numbers() {
    let bytes = written(1, "{\"shape\":(3L,),\"fortran_order\":True,\"descr\":\"|b1\"}");
    let header = parse(&bytes).unwrap();
    assert_eq!((header.descr.as_deref(), header.fortran_order), (Some("|b1"), true));
    assert_eq!(header.shape, [3]);
    let scalar = parse(&written(1, "{'descr': '<f8', 'fortran_order': False, 'shape': ()}")).unwrap();
    assert!(scalar.shape.is_empty());
}

#[test]
fn structured_dtypes_are_skipped() {
    for descr in [
        "[('a', '<f4'), ('b]', '<i8', (2, 3))]",
        "[('é', [('x', '|O')])]",
        r"[('it\'s', '<f4')]",
        "('<f4', (2,))",
    ] {
        let text = format!("{{'descr': {descr}, 'fortran_order': False, 'shape': (2,), }}");
        let header = parse(&written(3, &text)).unwrap();
        assert_eq!((header.descr, header.shape), (None, vec![2]));
    }
}

#[test]
fn broken_headers_are_refused_by_place() {
    let with = |rest: &str| format!("{{'descr': '<f4', 'fortran_order': False, {rest}}}");
    for (text, expected) in [
        (String::new(), "`{` was expected"),
        (with(""), "'shape' is missing"),
        (with("'shape': (3"), "`)` was expected, not '}'"),
        (with("'shape': (-3,)"), "a number of elements was expected"),
        (with("'shape': (18446744073709551616,)"), "a number of elements was expected"),
        (with("'shape': 3"), "`(` was expected"),
        (with("'shape': (3,), 'shape': (4,)"), "occurs twice"),
        (with("'shape': (3,), 'more': 4"), "unknown key"),
        (with("'shape': (3,)} x"), "end of the header was expected, not 'x'"),
        (with("'shape': (__import__('os'),)"), "a number of elements was expected"),
        (with(&format!("'shape': ({})", "1,".repeat(65))), "more than 64 dimensions"),
        ("{'descr': <f4}".to_owned(), "text in quotes was expected"),
        ("{'descr': '<f4".to_owned(), "short ASCII text"),
        (format!("{{'descr': '{}'", "x".repeat(80)), "short ASCII text"),
        (format!("{{'descr': {}", "(".repeat(50_000)), "without an end"),
        ("{'descr': '<f4', 'fortran_order': 1".to_owned(), "True or False was expected, not '1'"),
    ] {
        let message = refused(&text);
        assert!(message.contains(expected), "{message}");
    }
}

#[test]
fn lying_lengths_are_refused() {
    let sound = written(2, "{'descr': '<f4', 'fortran_order': False, 'shape': (3, 4), }");
    for cut in 0..sound.len() {
        assert!(parse(&sound[..cut]).is_err());
    }
    let mut long = sound.clone();
    long[8..12].copy_from_slice(&u32::MAX.to_le_bytes());
    assert!(parse(&long).unwrap_err().what.contains("at most 1048576 are supported"));
    let mut newer = sound;
    newer[6] = 4;
    assert!(parse(&newer).unwrap_err().what.contains("version 4.0"));
}

proptest! {
    #[test]
    fn any_header_ends_without_a_panic(text in "[\\[\\](){}'\":, \\\\a-fTF0-9]{0,80}", version in 1_u8..4) {
        let _ = parse(&written(version, &text));
        let _ = parse(&written(version, &format!("{{'descr': {text}")));
        let _ = parse(&written(version, &format!("{{'shape': ({text}")));
    }

    #[test]
    fn any_header_that_is_written_is_read(shape in proptest::collection::vec(any::<u64>(), 0..9), fortran_order: bool, descr in "[<>|][a-zA-Z?][0-9]{0,4}") {
        let dims = format!("{shape:?}").replace('[', "(").replace(']', if shape.len() == 1 { ",)" } else { ")" });
        let order = if fortran_order { "True" } else { "False" };
        let bytes = written(1, &format!("{{'descr': '{descr}', 'fortran_order': {order}, 'shape': {dims}, }}"));
        let length = bytes.len() as u64;
        prop_assert_eq!(parse(&bytes), Ok(NpyHeader { descr: Some(descr), fortran_order, shape, length }));
    }
}
