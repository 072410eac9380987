use std::path::Path;

use smallvec::smallvec;
use stepwell_core::dtype::Dtype;
use stepwell_core::format::FORMAT_VERSION;
use stepwell_core::format::index::{ChunkRecord, ChunkRegion, Codec, Extent, Integrity, Source};
use stepwell_core::format::manifest::{Attempt, IndexEntry, Others, TopLevel};
use stepwell_core::io::Disk;
use stepwell_core::io::simulated::SimDisk;
use stepwell_core::leaf_path::Component;
use stepwell_core::region::Region;
use stepwell_core::tree::ContainerKind;

use super::*;

/// Chunks of a tensor: a page of the index, and a bit.
const CHUNKS: u64 = 48_000;
const CHUNK: u64 = 64;
/// Bytes of a compressed chunk.
const COMPRESSED: u64 = 24;

/// Top-level entries at these places in the state, in each of which there are three tensors, a tie
/// to the second of them, and an object. A third of the chunks may be compressed.
fn index(item: u32, entries: &[(&str, u64)], are_compressed: bool) -> Index {
    let file = |number: u128| FileRecord {
        name: format!("{number:05}.data").into(),
        length: 1 << 40,
        file_id: u128::from(item) << 64 | number,
        trailer_crc: item,
        within: None,
    };
    let mut index = Index { files: vec![file(0), file(1)], ..Index::default() };
    let root = index.tree.push_container(None, None, ContainerKind::Dict);
    for &(entry, place) in entries {
        let key = |name: String| Some(Component::Key(name.as_str().into()));
        let entry = index.tree.push_container(Some(root), key(entry.to_owned()), ContainerKind::Dict);
        let first = index.leaves.len() as u32;
        for tensor in 0..3 {
            index.tree.push_leaf(Some(entry), key(format!("w{tensor}")));
            let chunk = |number: u64| {
                let is_compressed = are_compressed && number.is_multiple_of(3);
                ChunkRecord {
                    region: ChunkRegion::Box(Region {
                        offset: smallvec![number * 16],
                        extent: smallvec![16],
                    }),
                    extent: Extent {
                        source: Source::Own((number % 2) as u32),
                        offset: (1 << 23) * (place * 3 + tensor + 1) + number * CHUNK,
                        length: if is_compressed { COMPRESSED } else { CHUNK },
                        integrity: Integrity::BlockCrc,
                    },
                    codec: if is_compressed { Codec::Planes } else { Codec::Raw },
                }
            };
            index.leaves.push(LeafRecord::Tensor(TensorRecord {
                dtype: Dtype::Float32,
                shape: smallvec![CHUNKS * 16],
                chunks: (0..CHUNKS).map(chunk).collect(),
            }));
        }
        index.tree.push_leaf(Some(entry), key("tied".to_owned()));
        index.leaves.push(LeafRecord::Alias { of: first + 1 });
        index.tree.push_leaf(Some(entry), key("object".to_owned()));
        let (source, integrity) = (Source::Own(1), Integrity::BlockCrc);
        index.leaves.push(LeafRecord::Object(Extent { source, offset: 8192, length: 16 + place, integrity }));
    }
    index
}

/// A step of two items, whose entries stand between each other.
struct Step {
    dir: Arc<dyn Dir>,
    disk: SimDisk,
    manifest: Manifest,
}

impl Step {
    fn new() -> Self {
        Self::with(false)
    }

    fn with(are_compressed: bool) -> Self {
        let disk = SimDisk::new();
        let dir = disk.create_dir_all(Path::new("/step")).unwrap();
        let mut manifest = Manifest {
            format_version: FORMAT_VERSION,
            required_features: Vec::new(),
            writer: String::new(),
            step: 1,
            attempt: Attempt { session: "0".repeat(32), counter: 1 },
            started_unix_ns: 0,
            committed_unix_ns: 0,
            world_size: 1,
            plan_hash: String::new(),
            items: Vec::new(),
            files: Vec::new(),
            adopted: None,
            unsupported: Vec::new(),
            dropped: Vec::new(),
            metrics: std::collections::BTreeMap::new(),
            custom_metadata: serde_json::Value::Null,
            others: Others::new(),
        };
        let items: [&[(&str, u64)]; 2] = [&[("a", 0), ("c", 2)], &[("b", 1), ("d", 3)]];
        for (number, entries) in items.into_iter().enumerate() {
            let (index, name) = (index(number as u32, entries, are_compressed), format!("i{number}"));
            let encoded = index_v1::encode(&index).unwrap();
            dir.create_dir(&name).unwrap();
            let path = format!("{name}/index");
            dir.write_file(&path, &encoded.bytes).unwrap();
            let length = encoded.bytes.len() as u64;
            assert!(length > MIN_OUTLINE_BYTES, "{length}");
            let top_level = entries.iter().map(|&(name, position)| TopLevel {
                name: name.to_owned(),
                position,
                others: Others::new(),
            });
            manifest.items.push(Item {
                name: name.clone(),
                dir: name.clone(),
                index: IndexEntry { path, length, crc32c: encoded.crc, others: Others::new() },
                top_level: top_level.collect(),
                leaves: index.leaves.len() as u64,
                tensor_bytes: 0,
                others: Others::new(),
            });
            manifest.files.extend(index.files.iter().map(|file| FileEntry {
                path: format!("{name}/{}", file.name),
                length: file.length,
                trailer_crc32c: file.trailer_crc,
                file_id: file.file_id,
                within: None,
                others: Others::new(),
            }));
        }
        Self { dir, disk, manifest }
    }

    fn read(&self, is_whole: bool) -> Result<StoredIndex> {
        let outline_from = if is_whole { u64::MAX } else { MIN_OUTLINE_BYTES };
        StoredIndex::read_outlines(&*self.dir, &self.manifest, outline_from)
    }

    /// Changes a byte of an index file.
    fn corrupt(&self, item: usize, at: impl FnOnce(usize) -> usize) {
        let path = format!("/step/i{item}/index");
        assert!(self.disk.corrupt(&path, |bytes| {
            let at = at(bytes.len());
            bytes[at] ^= 1;
        }));
    }
}

fn leaf(index: &Index, path: &str) -> u32 {
    (0..index.leaves.len() as u32).find(|&leaf| index.tree.leaf_path(leaf).to_string() == path).unwrap()
}

#[test]
fn page_by_page_an_index_becomes_what_it_is_as_a_whole() {
    [false, true].map(Step::with).iter().for_each(pages_are_parts_of_the_whole);
}

fn pages_are_parts_of_the_whole(step: &Step) {
    let (whole, paged) = (step.read(true).unwrap(), step.read(false).unwrap());
    assert!(whole.paged.is_none());
    let expected = whole.outline();
    assert_eq!(paged.outline().tree, expected.tree);
    assert_eq!(paged.outline().files, expected.files);
    for path in ["d/w2", "a/tied", "b/object", "c/w0"] {
        let leaf = leaf(expected, path);
        let holder = match expected.leaves[leaf as usize] {
            LeafRecord::Alias { of } => of,
            _ => leaf,
        };
        let index = paged.with([leaf]).unwrap();
        for leaf in [leaf, holder] {
            assert_eq!(index.leaves[leaf as usize], expected.leaves[leaf as usize], "{path}");
        }
    }
    let (read, all) = paged.bytes_read();
    assert!(read < all * 2 / 3, "{read} of {all}");
    assert_eq!(paged.whole().unwrap(), *expected);
    assert_eq!(paged.bytes_read(), (all, all));
}

#[test]
fn unwanted_leaves_are_unread_and_damage_is_refused() {
    let step = Step::new();
    // Six tensors, a page for each: that of `c/w2`.
    step.corrupt(0, |length| length / 10 * 9);
    let paged = step.read(false).unwrap();
    let index = Arc::clone(paged.outline());
    paged.with([leaf(&index, "a/w0"), leaf(&index, "b/w1"), leaf(&index, "d/tied")]).unwrap();
    let error = paged.with([leaf(&index, "c/w2")]).map(drop).unwrap_err();
    assert!(error.to_string().contains("checksum"), "{error}");
    assert!(error.to_string().contains("i0/index"), "{error}");
    paged.with([leaf(&index, "a/w0")]).unwrap();
    assert!(paged.whole().is_err());
    assert!(step.read(true).is_err());
}

#[test]
fn a_foreign_index_is_refused_by_its_front_alone() {
    for at in [0, 20, 60, 72, 90, 130, 1000] {
        let step = Step::new();
        step.corrupt(1, |_| at);
        assert!(step.read(false).is_err(), "byte {at}");
    }
    // A whole one, of another save.
    let mut step = Step::new();
    step.manifest.items[1].index.crc32c ^= 1;
    let error = step.read(false).map(drop).unwrap_err();
    assert!(error.to_string().contains("not the index that its manifest names"), "{error}");
    let mut step = Step::new();
    step.manifest.items[1].index.length += 1;
    assert!(step.read(false).is_err());
}
