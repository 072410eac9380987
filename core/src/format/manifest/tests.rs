use std::collections::BTreeMap;
use std::path::Path;

use proptest::prelude::*;
use serde_json::json;

use super::{
    ADOPTED_FILES, AdoptedFiles, Attempt, ChecksumsEntry, FileEntry, IndexEntry, Item, Manifest, NODE_FILES,
    Others, Tombstone, TopLevel, UnsupportedLeaf, WithinEntry, stored_files,
};
use crate::error::{Error, Result};
use crate::format::checksum::crc32c;
use crate::limits::MAX_FILE_BYTES;

fn decode(bytes: &[u8]) -> Result<Manifest> {
    Manifest::decode(bytes, Path::new("manifest.json"))
}

pub(crate) fn sample() -> Manifest {
    let item = |name: &str, dir: &str, position| Item {
        name: name.into(),
        dir: dir.into(),
        index: IndexEntry {
            path: format!("{dir}/index"),
            length: 4096,
            crc32c: 0x00C0_FFEE,
            others: Others::new(),
        },
        top_level: vec![TopLevel { name: name.into(), position, others: Others::new() }],
        leaves: 3,
        tensor_bytes: 1 << 40,
        others: Others::new(),
    };
    Manifest {
        format_version: 1,
        required_features: vec![],
        writer: "stepwell 0.1.0".into(),
        step: i64::MAX as u64,
        attempt: Attempt { session: "0123456789abcdef0123456789abcdef".into(), counter: 7 },
        started_unix_ns: 1_700_000_000_000_000_000,
        committed_unix_ns: -1,
        world_size: 2,
        plan_hash: "00ff".into(),
        items: vec![item("params", "i0", 0), item("optimizer", "i1", 2)],
        files: vec![
            FileEntry {
                path: "i0/00000.data".into(),
                length: 12288,
                trailer_crc32c: 1,
                file_id: u128::MAX,
                within: None,
                others: Others::new(),
            },
            FileEntry {
                path: "i1/g000/00001.data".into(),
                length: 8192,
                trailer_crc32c: 2,
                file_id: 3,
                within: None,
                others: Others::new(),
            },
        ],
        adopted: None,
        dropped: vec![Tombstone {
            item: "data".into(),
            dir: "i2".into(),
            paths: vec!["i2/index".into(), "i2/00000.data".into()],
            unix_ns: 5,
            others: Others::new(),
        }],
        unsupported: vec![UnsupportedLeaf {
            path: "params/hook".into(),
            reason: "a function".into(),
            others: Others::new(),
        }],
        metrics: BTreeMap::from([
            ("loss".into(), 0.1 + 0.2),
            ("worst".into(), f64::INFINITY),
            ("least".into(), f64::NEG_INFINITY),
            ("zero".into(), -0.0),
        ]),
        custom_metadata: json!({"z": [1, {"a": null}], "a": "ü"}),
        others: Others::new(),
    }
}

/// A manifest with another text in it, and a checksum that holds.
fn edited(edit: impl Fn(&str) -> String) -> Result<Manifest> {
    let text = String::from_utf8(sample().encode().unwrap()).unwrap();
    let (body, _) = text[..text.len() - 1].rsplit_once('\n').unwrap();
    let edited = edit(&format!("{body}\n"));
    assert_ne!(edited, format!("{body}\n"), "the edit changed nothing");
    decode(format!("{edited}{{\"crc32c\": \"{:08x}\"}}\n", crc32c(edited.as_bytes())).as_bytes())
}

fn replaced(from: &str, to: &str) -> Result<Manifest> {
    edited(|text| text.replacen(from, to, 1))
}

fn refused_with(outcome: Result<Manifest>, kind: &str, text: &str) {
    let error = outcome.expect_err("it was accepted");
    assert_eq!(error.kind(), kind, "{error}");
    assert!(error.to_string().contains(text), "{error}");
}

#[test]
fn what_was_written_is_read_again_and_written_the_same() {
    let bytes = sample().encode().unwrap();
    let again = decode(&bytes).unwrap();
    assert_eq!(again, sample());
    assert_eq!(again.encode().unwrap(), bytes);
    assert!(again.metrics["zero"].is_sign_negative());
}

#[test]
fn it_is_readable_json_to_its_last_line() {
    let text = String::from_utf8(sample().encode().unwrap()).unwrap();
    assert!(text.starts_with("{\n  \"format\": \"stepwell\",\n  \"format_version\": 1,\n"), "{text}");
    assert!(text.contains("\"trailer_crc32c\": \"00000001\""), "{text}");
    let lines: Vec<&str> = text.lines().collect();
    let last: serde_json::Value = serde_json::from_str(lines.last().unwrap()).unwrap();
    let body = format!("{}\n", lines[..lines.len() - 1].join("\n"));
    assert_eq!(last["crc32c"], format!("{:08x}", crc32c(body.as_bytes())));
    serde_json::from_str::<serde_json::Value>(&body).unwrap();
}

#[test]
fn not_a_number_survives_as_a_string() {
    let mut manifest = sample();
    manifest.metrics = BTreeMap::from([("loss".into(), f64::NAN)]);
    let bytes = manifest.encode().unwrap();
    assert!(std::str::from_utf8(&bytes).unwrap().contains("\"loss\": \"NaN\""));
    assert!(decode(&bytes).unwrap().metrics["loss"].is_nan());
}

#[test]
fn every_flipped_bit_is_refused() {
    let bytes = sample().encode().unwrap();
    for at in 0..bytes.len() * 8 {
        let mut flipped = bytes.clone();
        flipped[at / 8] ^= 1 << (at % 8);
        assert_eq!(
            decode(&flipped).expect_err("a flipped bit was accepted").kind(),
            "corrupt_checkpoint",
            "bit {at}"
        );
    }
}

#[test]
fn every_truncation_and_every_addition_is_refused() {
    let bytes = sample().encode().unwrap();
    for end in 0..bytes.len() {
        assert_eq!(
            decode(&bytes[..end]).expect_err("a cut file was accepted").kind(),
            "corrupt_checkpoint",
            "{end}"
        );
    }
    for more in [&b"\n"[..], b" ", b"\0", b"x", &bytes] {
        let longer = [&bytes, more].concat();
        if more.len() < 10 {
            assert_eq!(decode(&longer).expect_err("a longer file was accepted").kind(), "corrupt_checkpoint");
        } else {
            assert!(decode(&longer).is_err());
        }
    }
}

#[test]
fn unknown_keys_are_ignored_and_kept_wherever_they_stand() {
    let future = json!({"x": [1, -2, 0.5, null, "ü"]});
    let with_more = edited(|text| {
        let more = format!("\"from_the_future\": {future}, ");
        let before =
            ["\"world_size\"", "\"leaves\"", "\"crc32c\"", "\"position\"", "\"file_id\"", "\"unix_ns\""];
        before.iter().fold(text.to_owned(), |text, key| text.replace(key, &format!("{more}{key}")))
    });
    let with_more = with_more.unwrap();
    let others =
        |others: &Others| *others == Others::from_iter([("from_the_future".to_owned(), future.clone())]);
    assert!(others(&with_more.others));
    assert!(with_more.items.iter().all(|item| {
        others(&item.others)
            && others(&item.index.others)
            && item.top_level.iter().all(|top| others(&top.others))
    }));
    assert!(with_more.files.iter().all(|file| others(&file.others)));
    assert!(with_more.dropped.iter().all(|tombstone| others(&tombstone.others)));
    let written = with_more.encode().unwrap();
    assert_eq!(decode(&written).unwrap(), with_more);
    assert_eq!(String::from_utf8(written).unwrap().matches("\"format\":").count(), 1);
    let mut without = with_more;
    let nested = without.items.iter_mut().flat_map(|item| {
        let tops = item.top_level.iter_mut().map(|top| &mut top.others);
        tops.chain([&mut item.others, &mut item.index.others])
    });
    let nested = nested
        .chain(without.files.iter_mut().map(|file| &mut file.others))
        .chain(without.dropped.iter_mut().map(|tombstone| &mut tombstone.others));
    nested.chain([&mut without.others]).for_each(Others::clear);
    assert_eq!(without, sample());
}

/// A thinning rewrites the manifest. Unknown keys keep their places.
#[test]
fn unknown_keys_keep_their_order_in_a_new_manifest() {
    let more = "\"first\": 1, \"second\": 2, \"third\": 3, \"world_size\"";
    let read = edited(|text| text.replace("\"world_size\"", more)).unwrap();
    let names: Vec<&String> = read.others.keys().collect();
    assert_eq!(names, ["first", "second", "third"]);
    let written = read.encode().unwrap();
    assert_eq!(decode(&written).unwrap().encode().unwrap(), written);
}

#[test]
fn unknown_features_and_versions_are_refused_by_name() {
    refused_with(
        replaced("\"required_features\": []", "\"required_features\": [\"zstd\"]"),
        "format",
        "`zstd`",
    );
    refused_with(replaced("\"format_version\": 1", "\"format_version\": 2"), "format", "version 2");
    refused_with(replaced("\"format\": \"stepwell\"", "\"format\": \"other\""), "format", "`other`");
    let mut manifest = sample();
    manifest.required_features.push("zstd".into());
    assert_eq!(manifest.encode().unwrap_err().kind(), "internal");
}

#[test]
fn duplicate_keys_are_refused_wherever_they_stand() {
    refused_with(replaced("\"step\": ", "\"step\": 1, \"step\": "), "format", "\"step\" occurs twice");
    refused_with(replaced("\"loss\": ", "\"loss\": 1, \"loss\": "), "format", "\"loss\" occurs twice");
    refused_with(replaced("\"a\": null", "\"a\": 1, \"a\": 2"), "format", "\"a\" occurs twice");
    refused_with(
        replaced("\"step\": ", "\"new\": 1, \"n\\u0065w\": 2, \"step\": "),
        "format",
        "occurs twice",
    );
}

#[test]
fn paths_that_leave_the_step_are_refused() {
    for bad in ["/etc/passwd", "../x", "i0/../../x", "i0//x", "i0/", "i0", "i3/x", "i0/.hidden", "i0/a\\\\b"]
    {
        let what = replaced("i0/00000.data", bad).expect_err(bad);
        assert_eq!(what.kind(), "format", "{bad}");
    }
    for bad in ["..", ".", "", "a/b", ".lease", "manifest.json"] {
        assert!(replaced("\"dir\": \"i0\"", &format!("\"dir\": \"{bad}\"")).is_err(), "{bad}");
    }
    refused_with(replaced("i0/index", "i1/index"), "format", "not below");
}

#[test]
fn a_tombstone_names_nothing_that_lives() {
    refused_with(edited(|text| text.replace("i2", "i1")), "format", "occurs twice");
    refused_with(replaced("i2/00000.data", "i0/00000.data"), "format", "not below");
}

/// Two data files in the file of their node.
fn shared() -> Manifest {
    let within = |offset| WithinEntry { path: "i0/n00000.data".into(), offset, others: Others::new() };
    let mut manifest = sample();
    manifest.required_features = vec![NODE_FILES.into()];
    let own = manifest.files[0].clone();
    manifest.files[0].within = Some(within(1 << 20));
    manifest.files.push(FileEntry { path: "i0/00001.data".into(), within: Some(within(0)), ..own });
    manifest
}

#[test]
fn data_files_that_are_parts_are_one_file_on_disk() {
    let manifest = shared();
    assert_eq!(Manifest::decode(&manifest.encode().unwrap(), Path::new("m")).unwrap(), manifest);
    let stored = stored_files(&manifest.files);
    assert_eq!(stored, [("i0/n00000.data", (1 << 20) + 12288), ("i1/g000/00001.data", 8192)]);
}

#[test]
fn parts_that_overlap_or_nest_are_refused() {
    type Change = fn(&mut WithinEntry);
    let cases: [(Change, &str); 6] = [
        (|within| within.offset = 12287, "overlap"),
        (|within| within.path = "i1/n00000.data".into(), "cannot be a part"),
        (|within| within.path = "i0/00001.data".into(), "cannot be a part"),
        (|within| within.path = "i0/index".into(), "cannot be a part"),
        (|within| within.path = "i0/../x".into(), "i0/../x"),
        (|within| within.offset = MAX_FILE_BYTES, "too far"),
    ];
    for (change, text) in cases {
        let mut manifest = shared();
        change(manifest.files[0].within.as_mut().unwrap());
        let error = manifest.encode().unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
    let mut manifest = shared();
    manifest.required_features.clear();
    assert!(manifest.encode().unwrap_err().to_string().contains(NODE_FILES));
}

#[test]
fn what_makes_no_sense_is_refused_on_read_and_on_write() {
    refused_with(replaced("\"position\": 2", "\"position\": 0"), "format", "position");
    refused_with(replaced("\"name\": \"optimizer\"", "\"name\": \"params\""), "format", "occurs twice");
    refused_with(replaced("\"length\": 12288", "\"length\": 100"), "format", "impossible length");
    refused_with(replaced("\"length\": 12288", "\"length\": 18446744073709551615"), "format", "data file");
    refused_with(replaced("\"world_size\": 2", "\"world_size\": 0"), "format", "world size");
    refused_with(
        replaced("\"step\": 9223372036854775807", "\"step\": 9223372036854775808"),
        "format",
        "step",
    );
    refused_with(replaced("\"step\": 9223372036854775807", "\"step\": -1"), "format", "invalid value");
    refused_with(replaced("0123456789abcdef", "0123456789ABCDEF"), "format", "session");
    refused_with(replaced("\"00000001\"", "\"1\""), "format", "hexadecimal");
    refused_with(replaced("\"Infinity\"", "\"infinite\""), "format", "NaN");

    let mut manifest = sample();
    manifest.step = u64::MAX;
    assert_eq!(manifest.encode().unwrap_err().kind(), "format");
    let mut manifest = sample();
    manifest.items[1].dir = "i0".into();
    assert_eq!(manifest.encode().unwrap_err().kind(), "internal");
}

#[test]
fn an_index_is_limited_in_size_before_anybody_makes_room_for_it() {
    let mut manifest = sample();
    manifest.items[0].index.length = crate::limits::MAX_INDEX_BYTES + 1;
    assert_eq!(manifest.encode().unwrap_err().kind(), "format");
}

#[test]
fn metadata_is_limited_in_depth_and_size() {
    let mut manifest = sample();
    manifest.custom_metadata = (0..64).fold(json!(1), |inner, _| json!([inner]));
    assert_eq!(decode(&manifest.encode().unwrap()).unwrap(), manifest);
    for deep in [65, 1000] {
        manifest.custom_metadata = (0..deep).fold(json!(1), |inner, _| json!({ "k": inner }));
        assert_eq!(manifest.encode().unwrap_err().kind(), "format");
    }
    manifest.custom_metadata = json!("x".repeat(4 << 20));
    assert_eq!(manifest.encode().unwrap_err().kind(), "format");
}

#[test]
fn json_that_nests_without_end_is_refused_and_not_followed() {
    refused_with(
        replaced("\"world_size\": 2", &format!("\"x\": {}", "[".repeat(1 << 20))),
        "format",
        "recursion",
    );
}

#[test]
fn an_error_names_the_file() {
    let Err(Error::Corrupt { file, .. }) = decode(b"") else { panic!("it was accepted") };
    assert_eq!(file, Path::new("manifest.json"));
}

proptest! {
    #[test]
    fn random_bytes_are_refused_without_a_panic(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
        prop_assert!(decode(&bytes).is_err());
        let _ = decode(&[&bytes[..], format!("\n{{\"crc32c\": \"{:08x}\"}}\n", crc32c(&bytes)).as_bytes()].concat());
    }

    #[test]
    fn every_metric_and_name_survives(
        metrics in proptest::collection::btree_map(".*", proptest::num::f64::ANY, 0..6),
        name in ".*",
        step in 0..=i64::MAX as u64,
        times in any::<(i64, i64)>(),
    ) {
        let mut manifest = sample();
        manifest.items[0].name = name;
        (manifest.step, manifest.metrics) = (step, metrics);
        (manifest.started_unix_ns, manifest.committed_unix_ns) = times;
        let again = decode(&manifest.encode().unwrap()).unwrap();
        let bits = |value: f64| if value.is_nan() { f64::NAN.to_bits() } else { value.to_bits() };
        for (name, &value) in &manifest.metrics {
            prop_assert_eq!(bits(again.metrics[name]), bits(value));
        }
        manifest.metrics.clear();
        let again = Manifest { metrics: BTreeMap::new(), ..again };
        prop_assert_eq!(again, manifest);
    }

    #[test]
    fn an_edited_text_with_a_good_checksum_never_panics(
        at in any::<prop::sample::Index>(), with in proptest::collection::vec(any::<u8>(), 0..4), cut in 0_usize..8,
    ) {
        let bytes = sample().encode().unwrap();
        let mut body = bytes[..bytes.len() - 23].to_vec();
        let at = at.index(body.len() - cut);
        body.splice(at..at + cut, with);
        body.extend_from_slice(b"\n");
        let line = format!("{{\"crc32c\": \"{:08x}\"}}\n", crc32c(&body));
        body.extend_from_slice(line.as_bytes());
        let _ = decode(&body);
    }
}

/// A step whose bytes are files of another library.
fn adopted() -> Manifest {
    let checksums = ChecksumsEntry {
        path: "../outputs/checkpoint-100/.stepwell-checksums".into(),
        length: 900,
        crc32c: 0x00C0_FFEE,
        others: Others::new(),
    };
    let adopted = AdoptedFiles {
        path: "../outputs/checkpoint-100".into(),
        of_root: true,
        family: "Hugging Face Trainer".into(),
        bytes: 1 << 40,
        checksums,
        others: Others::new(),
    };
    Manifest {
        required_features: vec![ADOPTED_FILES.into()],
        items: Vec::new(),
        files: Vec::new(),
        dropped: Vec::new(),
        adopted: Some(adopted),
        ..sample()
    }
}

#[test]
fn a_step_of_adopted_files_has_no_items() {
    type Change = fn(&mut Manifest);
    let manifest = adopted();
    assert_eq!(Manifest::decode(&manifest.encode().unwrap(), Path::new("m")).unwrap(), manifest);
    let cases: [(Change, &str); 5] = [
        (|one| one.items = sample().items, "items of its own"),
        (|one| one.required_features.clear(), ADOPTED_FILES),
        (|one| one.adopted = None, "not named"),
        (|one| one.adopted.as_mut().unwrap().path.clear(), "cannot be the path"),
        (|one| one.adopted.as_mut().unwrap().checksums.path = "x\0".into(), "cannot be the path"),
    ];
    for (change, text) in cases {
        let mut manifest = adopted();
        change(&mut manifest);
        let error = manifest.encode().unwrap_err().to_string();
        assert!(error.contains(text), "{error}");
    }
}
