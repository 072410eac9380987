//! Reads a step of format version 1 in `fixtures/golden_v1`, bit for bit, permanently. As long as
//! this code writes version 1, the same values also give the same bytes.
//!
//! The files were made by the ignored test at the end (`cargo test -p stepwell-core --test
//! golden_v1 -- --ignored`), which never replaces a file that is there: a golden file that no
//! longer fits is a broken promise, not an old file.

#![expect(clippy::unwrap_used, clippy::panic, reason = "a test; clippy knows only its functions as one")]

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use stepwell_core::dtype::Dtype;
use stepwell_core::format::footer::{self, Trailer};
use stepwell_core::format::header::Header;
use stepwell_core::format::index::{
    ChunkRecord, ChunkRegion, Codec, Extent, FileRecord, Index, Integrity, LeafRecord, Source, TensorRecord,
};
use stepwell_core::format::manifest::{
    Attempt, FileEntry, IndexEntry, Item, Manifest, Others, Tombstone, TopLevel,
};
use stepwell_core::format::page::PageKind;
use stepwell_core::format::{block, checksum, index_v1, object};
use stepwell_core::leaf_path::Component;
use stepwell_core::region::Region;
use stepwell_core::tree::{ContainerKind, Tree};
use stepwell_core::value::Value;

const FILE_ID: u128 = 0x0011_2233_4455_6677_8899_aabb_ccdd_eeff;
const BLOCK_BYTES: u64 = 4096;
const FOOTER_OFFSET: u64 = 12288;
const OBJECT_AT: u64 = 8192;

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/golden_v1").join(name)
}

fn read(name: &str) -> Vec<u8> {
    std::fs::read(golden(name)).unwrap_or_else(|error| panic!("{name}: {error}"))
}

/// One object with every kind of value.
fn value() -> Value {
    Value::Dict(vec![
        (
            Value::Str("none".into()),
            Value::List(vec![Value::None, Value::Ellipsis, Value::Bool(false), Value::Bool(true)]),
        ),
        (
            Value::Int(-5),
            Value::Tuple(vec![Value::Int(i64::MIN), Value::BigInt(vec![0, 0, 0, 0, 0, 0, 0, 0, 0x80, 0])]),
        ),
        (Value::Float(-0.0), Value::Complex(f64::INFINITY, f64::from_bits(0x7FF8_0000_0000_1234))),
        (Value::Bytes(vec![0, 255]), Value::ByteArray(b"stepwell".to_vec())),
        (
            Value::FrozenSet(vec![Value::Int(1), Value::Str("é".into())]),
            Value::Set(vec![Value::None, Value::NumpyScalar(Dtype::Bfloat16, vec![0x80, 0x3F])]),
        ),
        (Value::None, Value::Extension("datetime.date".into(), Box::new(Value::Str("2026-11-20".into())))),
    ])
}

fn weight_bytes() -> Vec<u8> {
    (0..24_u16).flat_map(|n| (f32::from(n) * 0.5).to_le_bytes()).collect()
}

/// Every sort of container, component, leaf and chunk that version 1 can say.
fn tree() -> Tree {
    let mut tree = Tree::new();
    let key = |name: &str| Some(Component::Key(name.into()));
    let root = tree.push_container(None, None, ContainerKind::Dict);
    let model = tree.push_container(
        Some(root),
        key("model"),
        ContainerKind::Stateful {
            type_name: "torch.nn.Linear".into(),
            protocol: "state_dict".into(),
            inner: Box::new(ContainerKind::OrderedDict),
        },
    );
    tree.push_leaf(Some(model), key("fc.weight"));
    tree.push_leaf(Some(model), key("tied"));
    tree.push_leaf(Some(model), key("empty"));
    let list = tree.push_container(Some(root), key("list"), ContainerKind::List);
    tree.push_leaf(Some(list), Some(Component::Index(0)));
    let kinds = [
        ContainerKind::OrderedDict,
        ContainerKind::DefaultDict,
        ContainerKind::Tuple,
        ContainerKind::Deque { maxlen: None },
        ContainerKind::Deque { maxlen: Some(8) },
        ContainerKind::NamedTuple { type_name: "run.Point".into() },
        ContainerKind::Dataclass { type_name: "run.Config".into() },
        ContainerKind::Custom { type_name: "flax.Frozen".into() },
    ];
    for (number, kind) in (1_i64..).zip(kinds) {
        tree.push_container(Some(root), Some(Component::Int(-number)), kind);
    }
    tree.push_leaf(Some(root), Some(Component::Field("scalar".into())));
    tree
}

fn own(offset: u64, length: u64) -> Extent {
    Extent { source: Source::Own(0), offset, length, integrity: Integrity::BlockCrc }
}

fn leaves() -> Vec<LeafRecord> {
    let tensor = |dtype, shape: &[u64], chunks: Vec<ChunkRecord>| TensorRecord {
        dtype,
        shape: shape.into(),
        chunks: chunks.into(),
    };
    let region = Region { offset: vec![0, 0].into(), extent: vec![2, 6].into() };
    let weight = tensor(
        Dtype::Float32,
        &[4, 6],
        vec![
            ChunkRecord { region: ChunkRegion::Box(region), extent: own(4096, 48), codec: Codec::Raw },
            ChunkRecord {
                region: ChunkRegion::Run { start: 12, len: 12 },
                extent: own(4144, 48),
                codec: Codec::Raw,
            },
        ],
    );
    let empty = tensor(Dtype::Int64, &[0, 3], vec![]);
    let scalar = tensor(
        Dtype::Uint8,
        &[],
        vec![ChunkRecord {
            region: ChunkRegion::Box(Region::whole(&[])),
            extent: own(4224, 1),
            codec: Codec::Raw,
        }],
    );
    vec![
        LeafRecord::Tensor(weight),
        LeafRecord::Alias { of: 0 },
        LeafRecord::Tensor(empty),
        LeafRecord::Object(own(OBJECT_AT, object::encode(&value()).unwrap().len() as u64)),
        LeafRecord::Tensor(scalar),
    ]
}

fn data_file() -> (Vec<u8>, FileRecord) {
    let mut bytes = Header::new(FILE_ID, BLOCK_BYTES, 3).encode();
    bytes.extend_from_slice(&weight_bytes());
    bytes.resize(4224, 0);
    bytes.push(42);
    bytes.resize(OBJECT_AT as usize, 0);
    bytes.extend_from_slice(&object::encode(&value()).unwrap());
    bytes.resize(FOOTER_OFFSET as usize, 0);
    let crcs: Vec<u32> = block::crcs(&bytes, BLOCK_BYTES).collect();
    let index = Index { tree: tree(), leaves: leaves(), files: vec![] };
    let footer = footer::encode(FILE_ID, BLOCK_BYTES, FOOTER_OFFSET, &index, &crcs).unwrap();
    bytes.extend_from_slice(&footer.bytes);
    let record = FileRecord {
        name: "00000.data".into(),
        length: bytes.len() as u64,
        file_id: FILE_ID,
        trailer_crc: footer.trailer_crc,
        within: None,
    };
    (bytes, record)
}

/// The item's index, which also lists a foreign file.
fn index() -> Index {
    let mut index = Index { tree: tree(), leaves: leaves(), files: vec![data_file().1] };
    index.files.push(FileRecord {
        name: "model.safetensors".into(),
        length: 1000,
        file_id: 0,
        trailer_crc: 0,
        within: None,
    });
    let bias = index.tree.push_leaf(Some(0), Some(Component::Key("foreign".into())));
    assert_eq!(bias, 5);
    let extent = |source, integrity| Extent { source, offset: 8, length: 16, integrity };
    let chunk = |start, source, integrity| ChunkRecord {
        region: ChunkRegion::Run { start, len: 8 },
        extent: extent(source, integrity),
        codec: Codec::Raw,
    };
    index.leaves.push(LeafRecord::Tensor(TensorRecord {
        dtype: Dtype::Float16,
        shape: vec![24].into(),
        chunks: vec![
            chunk(0, Source::Range(1), Integrity::None),
            chunk(8, Source::Range(1), Integrity::Zip(0xDEAD_BEEF)),
            chunk(16, Source::Pulled(5), Integrity::None),
        ]
        .into(),
    }));
    index
}

fn manifest() -> Manifest {
    let index = index_v1::encode(&index()).unwrap();
    let (_, file) = data_file();
    let entry = |name: &str, position| TopLevel { name: name.into(), position, others: Others::new() };
    Manifest {
        format_version: 1,
        required_features: vec![],
        writer: "stepwell 0.1.0".into(),
        step: 1200,
        attempt: Attempt { session: "00112233445566778899aabbccddeeff".into(), counter: 3 },
        started_unix_ns: 1_790_000_000_000_000_000,
        committed_unix_ns: 1_790_000_001_500_000_000,
        world_size: 4,
        plan_hash: "5f1d7a84db00d2fc5f1d7a84db00d2fc".into(),
        items: vec![Item {
            name: ".".into(),
            dir: "i0".into(),
            index: IndexEntry {
                path: "i0/index".into(),
                length: index.bytes.len() as u64,
                crc32c: index.crc,
                others: Others::new(),
            },
            top_level: vec![entry("model", 0), entry("list", 1)],
            leaves: 6,
            tensor_bytes: 145,
            others: Others::new(),
        }],
        files: vec![FileEntry {
            path: "i0/00000.data".into(),
            length: file.length,
            trailer_crc32c: file.trailer_crc,
            file_id: file.file_id,
            within: None,
            others: Others::new(),
        }],
        adopted: None,
        unsupported: Vec::new(),
        dropped: vec![Tombstone {
            item: "optimizer".into(),
            dir: "i1".into(),
            paths: vec!["i1/index".into(), "i1/00000.data".into()],
            unix_ns: 1_790_000_002_000_000_000,
            others: Others::new(),
        }],
        metrics: BTreeMap::from([
            ("loss".into(), 0.1),
            ("best".into(), f64::NEG_INFINITY),
            ("speed".into(), 1e300),
        ]),
        custom_metadata: serde_json::json!({"note": "golden", "list": [1, 2.5, null, true]}),
        others: Others::new(),
    }
}

#[test]
fn the_golden_manifest_is_read_for_ever() {
    let golden = Manifest::decode(&read("manifest.json"), Path::new("manifest.json")).unwrap();
    assert_eq!(golden, manifest());
    let index = read(&golden.items[0].index.path);
    assert_eq!(golden.items[0].index.length, index.len() as u64);
    assert_eq!(golden.items[0].index.crc32c, checksum::crc32c(&index));
}

#[test]
fn the_golden_index_is_read_for_ever() {
    assert_eq!(index_v1::decode(&read("i0/index"), Path::new("i0/index")).unwrap(), index());
}

#[test]
fn the_golden_data_file_is_read_for_ever() {
    let file = Path::new("i0/00000.data");
    let bytes = read("i0/00000.data");
    let manifest = Manifest::decode(&read("manifest.json"), Path::new("manifest.json")).unwrap();
    let entry = &manifest.files[0];
    assert_eq!(entry.length, bytes.len() as u64);

    let header = Header::decode(&bytes[..4096], file).unwrap();
    assert_eq!((header.file_id, header.block_bytes, header.rank), (FILE_ID, BLOCK_BYTES, 3));
    let tail = &bytes[bytes.len() - 4096..];
    let trailer = Trailer::decode(tail, file, Some(entry.trailer_crc32c), Some(entry.file_id)).unwrap();
    assert_eq!((trailer.footer_offset, trailer.block_count()), (FOOTER_OFFSET, 3));

    let footer_bytes = &bytes[FOOTER_OFFSET as usize..];
    let mut crcs = Vec::new();
    for page in footer::pages_of(&trailer, footer_bytes, file).unwrap() {
        if page.kind == PageKind::BlockCrcs {
            let page_bytes = page.slice(footer_bytes, FOOTER_OFFSET).unwrap();
            crcs.extend(footer::decode_block_crcs(&page, page_bytes, file).unwrap());
        }
    }
    let blocks = bytes[..FOOTER_OFFSET as usize].chunks(BLOCK_BYTES as usize);
    assert_eq!(blocks.len(), crcs.len());
    for (number, (block, crc)) in blocks.zip(crcs).enumerate() {
        block::check(number as u64, block, crc, file).unwrap();
    }

    let own = footer::decode_index(&trailer, footer_bytes, "00000.data", file).unwrap();
    assert_eq!((own.tree, own.leaves), (tree(), leaves()));
    assert_eq!(own.files, index().files[..1]);
    assert_eq!(&bytes[4096..4192], weight_bytes());
    assert_eq!(bytes[4224], 42);
}

#[test]
fn the_golden_object_is_read_for_ever() {
    let bytes = read("i0/00000.data");
    let LeafRecord::Object(extent) = &leaves()[3] else { panic!("leaf 3 is no object") };
    let encoding = &bytes[extent.offset as usize..][..extent.length as usize];
    // Compared as bytes and as text: a NaN does not equal itself.
    let object = object::decode(encoding).unwrap();
    assert_eq!(format!("{object:?}"), format!("{:?}", value()));
    assert_eq!(object::encode(&object).unwrap(), encoding);
}

fn all_files() -> [(&'static str, Vec<u8>); 3] {
    [
        ("manifest.json", manifest().encode().unwrap()),
        ("i0/index", index_v1::encode(&index()).unwrap().bytes),
        ("i0/00000.data", data_file().0),
    ]
}

#[test]
fn the_same_values_still_give_the_golden_bytes() {
    for (name, bytes) in all_files() {
        assert!(read(name) == bytes, "{name} would be written differently now");
    }
}

#[test]
#[ignore = "makes the golden files, once"]
fn write_the_golden_files_that_are_not_there() {
    for (name, bytes) in all_files() {
        let path = golden(name);
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        if !path.exists() {
            std::fs::write(path, bytes).unwrap();
        }
    }
}
