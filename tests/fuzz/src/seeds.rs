//! The seeds of the fuzzers: real checkpoints of the engine, cut into the input of each target.
//! `cargo run --bin seeds` writes them.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;

use stepwell_core::dtype::Dtype;
use stepwell_core::format::index::LeafRecord;
use stepwell_core::format::index_v1::{self, IndexHeader};
use stepwell_core::format::object;
use stepwell_core::io::simulated::SimDisk;
use stepwell_core::leaf_path::Component;
use stepwell_core::tree::{ContainerKind, Tree};
use stepwell_core::value::Value;

use crate::tree::{Expected, State, pattern};
use crate::{step, world};

/// A small state that has a little of everything: two items and loose leaves, several blocks, a
/// tie, objects.
pub fn state() -> State {
    let key = |name: &str| Some(Component::Key(name.into()));
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    let params = tree.push_container(Some(root), key("params"), ContainerKind::Dict);
    tree.push_leaf(Some(params), key("w"));
    tree.push_leaf(Some(params), key("tied"));
    tree.push_leaf(Some(params), key("b"));
    tree.push_leaf(Some(root), key("updates"));
    let kind = ContainerKind::Stateful {
        type_name: "optim.Adam".into(),
        protocol: "state_dict".into(),
        inner: Box::new(ContainerKind::OrderedDict),
    };
    let optimizer = tree.push_container(Some(root), key("optimizer"), kind);
    let layers = tree.push_container(Some(optimizer), key("layers"), ContainerKind::List);
    tree.push_leaf(Some(layers), Some(Component::Index(0)));
    tree.push_leaf(Some(layers), Some(Component::Index(1)));
    let point = ContainerKind::NamedTuple { type_name: "run.Point".into() };
    let point = tree.push_container(Some(optimizer), Some(Component::Int(-3)), point);
    tree.push_leaf(Some(point), Some(Component::Field("x".into())));
    let tensor = |dtype: Dtype, shape: &[u64], seed| {
        let bytes = shape.iter().product::<u64>() as usize * dtype.size();
        Expected::Tensor(dtype, shape.to_vec(), pattern(seed, bytes))
    };
    let leaves = vec![
        tensor(Dtype::Float32, &[20, 30], 1),
        Expected::Tie(0),
        tensor(Dtype::Int8, &[3], 2),
        Expected::Object(Value::Int(12)),
        tensor(Dtype::Bfloat16, &[7, 5, 64], 3),
        tensor(Dtype::Float64, &[], 4),
        Expected::Object(Value::List(vec![
            Value::Str("é".into()),
            Value::Set(vec![Value::Int(1), Value::None]),
            Value::Dict(vec![(Value::Float(0.5), Value::Bytes(vec![0, 255]))]),
            Value::NumpyScalar(Dtype::Uint16, vec![1, 2]),
            Value::BigInt(vec![0, 0, 0, 0, 0, 0, 0, 0, 1]),
            Value::Extension("datetime.date".into(), Box::new(Value::Tuple(vec![Value::Complex(1.0, -0.0)]))),
        ])),
    ];
    State { tree, leaves }
}

/// Writes the seeds of every target below `corpus`; gives how many.
pub fn write(corpus: &Path) -> std::io::Result<usize> {
    let mut written = 0;
    let mut put = |target: &str, bytes: &[u8]| {
        let dir = corpus.join(target);
        std::fs::create_dir_all(&dir)?;
        // Named by what it is, as libFuzzer names what it finds: twice the same is once there.
        let name = format!("seed-{:08x}-{}", crate::seal::crc32c(bytes), bytes.len());
        written += 1;
        std::fs::write(dir.join(name), bytes)
    };
    let flagged = |flag: u8, bytes: &[u8]| [&[flag], bytes].concat();
    for (block, chunk) in [(4096, 4096), (16384, 1 << 20)] {
        let disk = SimDisk::new();
        world::save(&disk, state().source(), &world::options(block, chunk)).expect("a sound state is saved");
        let files = world::files(&disk);
        for (name, bytes) in &files {
            let target = match name.as_str() {
                "manifest.json" => "manifest",
                ".lease" => continue,
                name if name.ends_with("/index") => "index",
                _ => "footer",
            };
            put(target, &flagged(1, bytes))?;
            if target == "index" {
                put("index", &flagged(1, &outlined(bytes)))?;
                put("message", &flagged(1, &vote(bytes)))?;
            }
        }
        put("step", &whole_step(&files))?;
    }
    let golden = golden();
    put("step", &whole_step(&golden))?;
    put("index", &flagged(1, &golden["i0/index"]))?;
    put("manifest", &flagged(1, &golden["manifest.json"]))?;
    for leaf in state().leaves {
        if let Expected::Object(value) = leaf {
            put("object", &flagged(0, &object::encode(&value).expect("a sound object")))?;
        }
    }
    put("object", &flagged(1, &pattern(5, 200)))?;
    for seed in 0..6 {
        put("state", &pattern(seed, 100 << seed))?;
        put("damage", &pattern(seed, 8 << seed))?;
        put("glob", &pattern(seed, 16 << seed))?;
    }
    put("glob", b"params/{w,b}**/layers[*]/x?*/\\*opt/layers[0]/w{1}")?;
    foreign(&mut put)?;
    for text in [r#"{"verdict":"committed"}"#, r#"{"Committed":{}}"#] {
        put("message", &flagged(0, text.as_bytes()))?;
    }
    Ok(written)
}

/// Small files of other libraries.
fn foreign(put: &mut dyn FnMut(&str, &[u8]) -> std::io::Result<()>) -> std::io::Result<()> {
    put("pickle", b"\x80\x02}q\x00(X\x01\x00\x00\x00aK\x01X\x01\x00\x00\x00bctorch._utils\n_rebuild_tensor_v2\n(U\x01sQK\x00)\x89tRu.")?;
    put("pickle", b"\x80\x04\x95\x20\x00\x00\x00\x00\x00\x00\x00\x8c\x01m\x94\x8c\x01n\x93)\x81}\x94(\x8c\x01x\x8f\x94(K\x01\x90ubh\x00\x86.")?;
    let header = r#"{"__metadata__":{"format":"pt"},"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}"#;
    put("safetensors", &[&(header.len() as u64).to_le_bytes(), header.as_bytes(), &[0; 8]].concat())?;
    let dict = b"{'descr': [('a', '<f4', (2,))], 'shape': (3, 4), 'fortran_order': False, }\n";
    put("npy", &[b"\x93NUMPY\x02\x00".as_slice(), &(dict.len() as u32).to_le_bytes(), dict].concat())?;
    // A leaf with a value in a data file and one of its own, an interior node, a manifest.
    put("ocdbt", b"\0\x01\x03\0d/x\x02\x01\x01\x01ab\x03\x05\0\x01\0\x07one")?;
    put("ocdbt", b"\x01\x01\x03\0d/x\x01\x01\x01a\0\x05\x09\x01\x01\x01")?;
    put("ocdbt", b"0123456789abcdef\0\x64\x64\x04\0\x01\x03\0d/x\x01\x01\0\0\x05\x09\x01\x01\x0112345678\0")?;
    put("npy", b"\x93NUMPY\x01\x00\x35\x00{\"descr\":\"<f4\",\"fortran_order\":True,\"shape\":(3L,)}  \n")?;
    put(
        "msgpack",
        b"\x82\xa1w\xc7\x11\x01\x93\x91\x03\xa5int16\xc4\x06\x00\x00\x01\x00\x02\x00\xa1s\xc7\x03\x07abc",
    )?;
    put("msgpack", b"\xdc\x00\x05\xcb\x40\x00\x00\x00\x00\x00\x00\x00\xd9\x01x\xdf\x00\x00\x00\x01\x05\xc0\xd1\xff\x00\x90")?;
    let name = b"a/data.pkl";
    let local = [b"PK\x03\x04".as_slice(), &[0; 22], &[10, 0, 0, 0], name, b"N."].concat();
    let sizes = [0, 0, 0, 0, 2, 0, 0, 0, 2, 0, 0, 0, 10, 0];
    let central = [b"PK\x01\x02".as_slice(), &[0; 12], &sizes, &[0; 16], name].concat();
    let lengths = [1, 0, 1, 0, central.len() as u8, 0, 0, 0, local.len() as u8, 0, 0, 0, 0, 0];
    put("zip", &[local, central, [b"PK\x05\x06".as_slice(), &[0; 4], &lengths].concat()].concat())
}

/// The same index with an outline before its pages, as a large one has it. Written from
/// `docs/format.md`.
fn outlined(bytes: &[u8]) -> Vec<u8> {
    let file = Path::new("index");
    let mut index = index_v1::decode(bytes, file).expect("a sound index");
    for leaf in &mut index.leaves {
        if let LeafRecord::Tensor(tensor) = leaf {
            tensor.chunks.clear();
        }
    }
    // The page of an index without chunks is the outline of that with them.
    let outline = index_v1::encode(&index).expect("an index without chunks can be written").bytes;
    let end = |bytes: &[u8]| IndexHeader::decode(bytes, file).expect("a sound header").pages_at() as usize;
    let (front, pages) = bytes.split_at(end(bytes));
    let outline = &outline[end(&outline)..];
    let mut out = [front, outline, pages].concat();
    out[16] = 1;
    out[72..80].copy_from_slice(&(outline.len() as u64).to_le_bytes());
    crate::seal::index(&mut out, &[]);
    index_v1::decode(&out, file).expect("an outlined index is sound");
    out
}

/// The vote of a rank that wrote one item.
fn vote(index: &[u8]) -> Vec<u8> {
    let session = "0".repeat(32);
    let head = format!(
        r#"{{"step":1,"attempt":{{"session":"{session}","counter":1}},"stale":false,"claims":0,"failure":null,"parts":[{{"item":{{"dir":"i0","name":".","top_level":[]}},"index_bytes":{},"tensor_bytes":7}}]}}"#,
        index.len()
    );
    [&(head.len() as u64).to_le_bytes(), head.as_bytes(), index].concat()
}

/// The permanent step of version 1, with features that nothing writes yet.
fn golden() -> BTreeMap<String, Arc<Vec<u8>>> {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../core/tests/fixtures/golden_v1");
    ["manifest.json", "i0/index", "i0/00000.data"]
        .map(|name| (name.to_owned(), Arc::new(std::fs::read(dir.join(name)).expect("the golden files"))))
        .into()
}

fn whole_step(files: &BTreeMap<String, Arc<Vec<u8>>>) -> Vec<u8> {
    let with = |end: &str| {
        files
            .iter()
            .filter(|(name, _)| name.ends_with(end))
            .map(|(_, bytes)| bytes.as_slice())
            .collect::<Vec<&[u8]>>()
    };
    step::bundle(step::SEALED, &[with("manifest.json"), with("/index"), with(".data")].concat())
}
