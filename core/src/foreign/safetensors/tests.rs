use proptest::prelude::*;

use super::*;

fn parsed(header: &str, data: u64) -> Parsed<SafetensorsHeader> {
    parse(header.as_bytes(), LENGTH_BYTES + header.len() as u64 + data)
}

fn refused(header: &str, data: u64) -> String {
    parsed(header, data).unwrap_err().to_string()
}

#[test]
fn tensors_come_in_the_order_of_their_bytes() {
    let header = r#"{"b":{"dtype":"BF16","shape":[2,3],"data_offsets":[4,16]},"__metadata__":{"format":"pt"},
        "a":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"none":{"dtype":"I64","shape":[0,9],"data_offsets":[16,16]}}  "#;
    let found = parsed(header, 16).unwrap();
    let begin = LENGTH_BYTES + header.len() as u64;
    assert_eq!(found.metadata, [("format".to_owned(), "pt".to_owned())]);
    let names: Vec<_> =
        found.tensors.iter().map(|tensor| (tensor.name.as_str(), tensor.offset - begin)).collect();
    assert_eq!(names, [("a", 0), ("b", 4), ("none", 16)]);
    assert_eq!(found.tensors[1].shape, [2, 3]);
}

#[test]
fn lengths_of_headers_are_checked() {
    assert_eq!(header_length(16_u64.to_le_bytes(), 24), Ok(16));
    assert!(header_length(17_u64.to_le_bytes(), 24).is_err());
    assert!(header_length(u64::MAX.to_le_bytes(), u64::MAX).is_err());
    assert!(header_length((MAX_HEADER_BYTES + 1).to_le_bytes(), u64::MAX).is_err());
}

#[test]
fn contradictions_are_refused_by_tensor() {
    let one = |rest: &str| format!(r#"{{"w":{{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}{rest}}}"#);
    for (header, data, expected) in [
        (one(""), 9, "the last tensor ends at byte"),
        (one(""), 7, "the last tensor ends at byte"),
        (one(r#","w":{"dtype":"F32","shape":[2],"data_offsets":[8,16]}"#), 16, "`w` occurs twice"),
        (one(r#","v":{"dtype":"F32","shape":[1],"data_offsets":[4,8]}"#), 8, "the one before it ends"),
        (one(r#","v":{"dtype":"F32","shape":[1],"data_offsets":[12,16]}"#), 16, "the one before it ends"),
        (
            one(r#","v":{"dtype":"F32","shape":[2],"data_offsets":[8,12]}"#),
            12,
            "4 bytes are not those of F32",
        ),
        (one(r#","v":{"dtype":"F32","shape":[1],"data_offsets":[12,8]}"#), 12, "before it begins"),
        (one(r#","v":{"dtype":"F33","shape":[1],"data_offsets":[8,12]}"#), 12, "dtype F33 is not known"),
        (one(r#","v":{"dtype":"F4","shape":[3],"data_offsets":[8,9]}"#), 9, "are not those of F4"),
        (
            one(r#","v":{"dtype":"U8","shape":[18446744073709551615,2],"data_offsets":[8,9]}"#),
            9,
            "are not those",
        ),
        (one(r#","v":{"dtype":"U8","shape":[-1],"data_offsets":[8,9]}"#), 9, "no valid JSON of tensors"),
        (one(r#","v":{"dtype":"U8","shape":[1],"data_offsets":[8,9],"more":1}"#), 9, "unknown field"),
        (one(r#","__metadata__":{"a":1}"#), 8, "no valid JSON of tensors"),
        (one(r#","__metadata__":{},"__metadata__":{}"#), 8, "duplicate field"),
        ("[]".to_owned(), 0, "an object of tensors"),
        (String::new(), 0, "no valid JSON"),
        ("{}x".to_owned(), 0, "trailing characters"),
        ("[".repeat(100_000), 0, "no valid JSON"),
    ] {
        let message = refused(&header, data);
        assert!(message.contains(expected), "{message}");
    }
    let deep = format!(r#"{{"w":{{"dtype":"U8","shape":[{}1],"data_offsets":[0,1]}}}}"#, "1,".repeat(64));
    assert!(refused(&deep, 1).contains("more than 64 dimensions"));
}

proptest! {
    #[test]
    fn any_header_ends_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..300), data in 0_u64..99) {
        let _ = parse(&bytes, LENGTH_BYTES + bytes.len() as u64 + data);
    }
}
