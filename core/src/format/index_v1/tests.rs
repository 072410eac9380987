use std::collections::HashSet;
use std::path::Path;
use std::sync::Arc;

use proptest::prelude::*;
use proptest::sample::Index as Pick;
use smallvec::smallvec;

use super::root::{component_hash, leaf_hashes};
use super::{
    Bounds, INDEX_HEADER_BYTES, IndexHeader, Outline, Paging, Root, decode, decode_pages, decode_part,
    encode, encode_as, write,
};
use crate::dtype::Dtype;
use crate::error::{Error, Result};
use crate::format::checksum::crc32c;
use crate::format::index::{
    ChunkRecord, ChunkRegion, Chunks, Codec, Extent, FileRecord, Index, Integrity, LeafRecord, Source,
    TensorRecord,
};
use crate::format::page::PageRef;
use crate::leaf_path::{Component, LeafPath};
use crate::region::Region;
use crate::tree::{ContainerKind, NodeKind, Tree};

fn read(bytes: &[u8]) -> Result<Index> {
    decode(bytes, Path::new("i0/index"))
}

/// The hash of a path, component by component.
fn path_hash(path: &LeafPath) -> u32 {
    path.0.iter().fold(0, |hash, component| component_hash(hash, component, &mut Vec::new()))
}

/// A state without numbers for its leaves.
#[derive(Clone, Debug)]
enum Shape {
    Leaf(Leaf),
    Container(ContainerKind, Vec<(Component, Shape)>),
}

#[derive(Clone, Debug)]
enum Leaf {
    Tensor { dtype: Dtype, shape: Vec<u64>, rows: Vec<u64>, runs: bool, file: Pick, at: u64 },
    Object { file: Pick, at: u64, length: u64 },
    Foreign { source: Source, integrity: Integrity },
    Alias(Pick),
}

const FILE_BYTES: u64 = 1 << 30;

fn files() -> Vec<FileRecord> {
    (0..3_u32)
        .map(|rank| FileRecord {
            name: format!("g{rank}/{rank:05}.data").into(),
            length: FILE_BYTES,
            file_id: u128::from(rank) << 100 | 5,
            trailer_crc: 77 * rank,
            within: None,
        })
        .collect()
}

fn own(file: u32, offset: u64, length: u64) -> Extent {
    Extent { source: Source::Own(file), offset, length, integrity: Integrity::BlockCrc }
}

fn any_kind() -> impl Strategy<Value = ContainerKind> {
    let flat = prop_oneof![
        Just(ContainerKind::Dict),
        Just(ContainerKind::OrderedDict),
        Just(ContainerKind::DefaultDict),
        Just(ContainerKind::List),
        Just(ContainerKind::Tuple),
        any::<Option<u64>>().prop_map(|maxlen| ContainerKind::Deque { maxlen }),
        ".{0,8}".prop_map(|name| ContainerKind::NamedTuple { type_name: name.into() }),
        "[a-c]".prop_map(|name| ContainerKind::Dataclass { type_name: name.into() }),
        ".{0,8}".prop_map(|name| ContainerKind::Custom { type_name: name.into() }),
    ];
    flat.prop_recursive(3, 4, 1, |inner| {
        ("[a-c]", ".{0,8}", inner).prop_map(|(name, protocol, inner)| ContainerKind::Stateful {
            type_name: name.into(),
            protocol: protocol.into(),
            inner: Box::new(inner),
        })
    })
}

fn any_leaf() -> impl Strategy<Value = Leaf> {
    let tensor = (
        prop::sample::select(Dtype::ALL),
        prop::collection::vec(0_u64..6, 0..4),
        prop::collection::vec(1_u64..4, 0..4),
        any::<bool>(),
        any::<Pick>(),
        4096_u64..1 << 20,
    );
    prop_oneof![
        6 => tensor.prop_map(|(dtype, shape, rows, runs, file, at)| {
            Leaf::Tensor { dtype, shape, rows, runs, file, at }
        }),
        2 => (any::<Pick>(), 4096_u64..1 << 20, 0_u64..1000)
            .prop_map(|(file, at, length)| Leaf::Object { file, at, length }),
        1 => (any::<u32>(), prop::sample::select(vec![Integrity::Zip(9), Integrity::None])).prop_map(|(n, integrity)| {
            let source = if n % 2 == 0 { Source::Range(n % 3) } else { Source::Pulled(n) };
            Leaf::Foreign { source, integrity }
        }),
        1 => any::<Pick>().prop_map(Leaf::Alias),
    ]
}

fn any_shape() -> impl Strategy<Value = Shape> {
    any_leaf().prop_map(Shape::Leaf).prop_recursive(6, 60, 8, |inner| {
        (any_kind(), prop::collection::vec((0_u8..4, ".{0,4}", inner), 0..8)).prop_map(|(kind, children)| {
            let mut seen = HashSet::new();
            let children = children.into_iter().enumerate().filter_map(|(place, (sort, name, child))| {
                let component = match sort {
                    0 => Component::Key(name.into()),
                    1 => Component::Field(name.into()),
                    2 => Component::Int(-i64::from(place as u32) - 1),
                    _ => Component::Index(place as u32),
                };
                let mut rendered = String::from("x");
                component.render(&mut rendered);
                seen.insert(rendered).then_some((component, child))
            });
            Shape::Container(kind, children.collect())
        })
    })
}

/// Any index that keeps what `check` asks for.
pub(crate) fn any_index() -> impl Strategy<Value = Index> {
    prop::option::weighted(0.97, any_shape()).prop_map(|shape| {
        let mut index = Index { files: files(), ..Index::default() };
        let mut later = Vec::new();
        if let Some(shape) = shape {
            push(&mut index, None, None, shape, &mut later);
        }
        let tensors: Vec<u32> = (0..index.leaves.len() as u32)
            .filter(|&leaf| matches!(index.leaves[leaf as usize], LeafRecord::Tensor(_)))
            .collect();
        for (leaf, pick) in later {
            index.leaves[leaf as usize] = if tensors.is_empty() {
                LeafRecord::Object(own(0, 4096, 3))
            } else {
                LeafRecord::Alias { of: *pick.get(&tensors) }
            };
        }
        index
    })
}

fn push(
    index: &mut Index,
    parent: Option<u32>,
    component: Option<Component>,
    shape: Shape,
    later: &mut Vec<(u32, Pick)>,
) {
    match shape {
        Shape::Container(kind, children) => {
            let node = index.tree.push_container(parent, component, kind);
            for (component, child) in children {
                push(index, Some(node), Some(component), child, later);
            }
        }
        Shape::Leaf(leaf) => {
            let number = index.tree.push_leaf(parent, component);
            index.leaves.push(match leaf {
                Leaf::Tensor { dtype, shape, rows, runs, file, at } => LeafRecord::Tensor(TensorRecord {
                    chunks: chunks(&shape, dtype, &rows, runs, file.index(3) as u32, at),
                    dtype,
                    shape: shape.into(),
                }),
                Leaf::Object { file, at, length } => {
                    LeafRecord::Object(own(file.index(3) as u32, at, length))
                }
                Leaf::Foreign { source, integrity } => {
                    LeafRecord::Object(Extent { source, offset: 1, length: 5, integrity })
                }
                Leaf::Alias(pick) => {
                    later.push((number, pick));
                    LeafRecord::Alias { of: u32::MAX }
                }
            });
        }
    }
}

/// Cuts along the first axis, or as runs.
fn chunks(shape: &[u64], dtype: Dtype, rows: &[u64], runs: bool, file: u32, at: u64) -> Chunks {
    let itemsize = dtype.size() as u64;
    let elements: u64 = shape.iter().product();
    let whole = if runs { elements } else { shape.first().copied().unwrap_or(1) };
    let row = if runs || shape.is_empty() { 1 } else { shape[1..].iter().product() };
    let (mut start, mut chunks) = (0, Chunks::new());
    for &len in rows.iter().chain([&u64::MAX]) {
        let len = len.min(whole - start);
        let region = if runs {
            ChunkRegion::Run { start, len }
        } else {
            let mut region = Region::whole(shape);
            if let (Some(offset), Some(extent)) = (region.offset.first_mut(), region.extent.first_mut()) {
                (*offset, *extent) = (start, len);
            }
            ChunkRegion::Box(region)
        };
        let extent = own(file, at + start * row * itemsize, len * row * itemsize);
        chunks.push(ChunkRecord { region, extent, codec: Codec::Raw });
        start += len;
        if start == whole {
            break;
        }
    }
    chunks
}

proptest! {
    #[test]
    fn what_was_written_is_read_again_however_it_is_paged(index in any_index(), leaves in 1_u64..6, bytes in 1_u64..2000) {
        let file = encode(&index).unwrap();
        prop_assert_eq!(file.crc, crc32c(&file.bytes));
        prop_assert_eq!(&read(&file.bytes).unwrap(), &index);
        prop_assert_eq!(&encode(&index).unwrap(), &file, "the encoding is not deterministic");
        let paged = encode_as(&index, Paging { bytes, leaves }, |_, _| false).unwrap();
        prop_assert_eq!(&read(&paged.bytes).unwrap(), &index);
    }

    #[test]
    fn a_page_alone_holds_whole_paths(index in any_index(), leaves in 1_u64..6) {
        let bytes = encode_as(&index, Paging { leaves, bytes: 1 << 20 }, |_, _| false).unwrap().bytes;
        let file = Path::new("i0/index");
        let header = IndexHeader::decode(&bytes[..INDEX_HEADER_BYTES as usize], file).unwrap();
        let root = Root::decode(&header, &bytes[..(INDEX_HEADER_BYTES + header.root_length) as usize], file).unwrap();
        for page in &root.pages {
            let part = decode_part(&root, page, page.slice(&bytes, 0).unwrap(), file).unwrap();
            prop_assert_eq!(part.first_leaf, page.first);
            for (local, record) in part.leaves.iter().enumerate() {
                let leaf = part.first_leaf as u32 + local as u32;
                prop_assert_eq!(part.tree.leaf_path(local as u32), index.tree.leaf_path(leaf));
                prop_assert_eq!(record, &index.leaves[leaf as usize]);
            }
        }
        for leaf in 0..index.leaves.len() as u32 {
            prop_assert_eq!(path_hash(&index.tree.leaf_path(leaf)), root.leaf_hashes[leaf as usize]);
        }
    }

    #[test]
    fn an_outline_is_the_index_without_its_chunks(
        index in any_index(), leaves in 1_u64..6,
    ) {
        let outlined = encode_as(&index, Paging { leaves, bytes: 1 << 20 }, |index, _| !index.tree.nodes().is_empty()).unwrap();
        prop_assert_eq!(outlined.crc, crc32c(&outlined.bytes));
        prop_assert_eq!(&read(&outlined.bytes).unwrap(), &index);
        if index.tree.nodes().is_empty() {
            return Ok(());
        }
        let (file, bytes) = (Path::new("i0/index"), &outlined.bytes);
        let header = IndexHeader::decode(bytes, file).unwrap();
        let front = &bytes[..header.pages_at() as usize];
        prop_assert!(Outline::decode(&header, front, outlined.crc ^ 1, file).is_err(), "another file");
        let outline = Outline::decode(&header, front, outlined.crc, file).unwrap();
        prop_assert_eq!(&outline.index().tree, &index.tree);
        prop_assert_eq!(&outline.index().files, &index.files);
        for (number, record) in index.leaves.iter().enumerate() {
            let page = outline.page_of(number as u32).expect("each leaf is in a page");
            let page = &outline.pages()[page];
            let of_page = outline.leaves(page, page.slice(bytes, 0).unwrap(), file).unwrap();
            prop_assert_eq!(&of_page[number - page.first as usize], record);
        }
        prop_assert_eq!(outline.page_of(index.leaves.len() as u32), None);
    }

    /// A page that a defect could write.
    #[test]
    fn an_outline_that_contradicts_its_pages_is_refused(
        index in any_index(), other in any_index(),
    ) {
        let encode = |index| encode_as(index, Paging { leaves: 2, bytes: 1 << 20 }, |_, _| true).unwrap();
        let (sound, stranger) = (encode(&index), encode(&other));
        let file = Path::new("i0/index");
        let (header, strange) = (IndexHeader::decode(&sound.bytes, file).unwrap(), IndexHeader::decode(&stranger.bytes, file).unwrap());
        let root_end = (INDEX_HEADER_BYTES + header.root_length) as usize;
        let strange_outline = &stranger.bytes[(INDEX_HEADER_BYTES + strange.root_length) as usize..strange.pages_at() as usize];
        let header = IndexHeader {
            outline_length: strange.outline_length,
            outline_crc: strange.outline_crc,
            file_length: header.file_length - header.outline_length + strange.outline_length,
            ..header
        };
        let bytes = [&header.encode()[..], &sound.bytes[INDEX_HEADER_BYTES as usize..root_end], strange_outline, &sound.bytes[IndexHeader::decode(&sound.bytes, file).unwrap().pages_at() as usize..]].concat();
        if let Ok(read) = read(&bytes) {
            prop_assert_eq!(&read, &index);
        }
        let Ok(outline) = Outline::decode(&header, &bytes[..header.pages_at() as usize], crc32c(&bytes), file) else { return Ok(()) };
        for page in outline.pages() {
            if let Ok(leaves) = outline.leaves(page, page.slice(&bytes, 0).unwrap(), file) {
                prop_assert_eq!(&leaves[..], &index.leaves[page.first as usize..][..leaves.len()]);
            }
        }
    }

    #[test]
    fn random_bytes_are_refused_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..400)) {
        prop_assert!(read(&bytes).is_err());
    }

    /// Any change that a defect could write, with valid checksums. It is refused, or it is a valid
    /// index.
    #[test]
    fn altered_pages_with_good_checksums_never_panic(
        index in any_index(), leaves in 1_u64..6, page in any::<Pick>(), at in any::<Pick>(), with in any::<u8>(),
    ) {
        let mut pages = write::pages(&index, Paging { leaves, bytes: 1 << 20 }).unwrap();
        if !pages.is_empty() {
            let number = page.index(pages.len());
            let (bytes, entry) = &pages[number];
            let mut payload = bytes[32..].to_vec();
            let at = at.index(payload.len());
            payload[at] = with;
            pages[number] = crate::format::page::encode(entry.kind, entry.first, entry.count, &payload).unwrap();
            if let Ok(other) = unpaged(&pages, index.files) {
                prop_assert_eq!(read(&encode(&other).unwrap().bytes).unwrap(), other);
            }
        }
    }

    #[test]
    fn altered_root_tables_never_panic_or_mislead(
        index in any_index(), at in any::<Pick>(), with in any::<u8>(),
    ) {
        let mut bytes = encode(&index).unwrap().bytes;
        let header = IndexHeader::decode(&bytes, Path::new("x")).unwrap();
        let (start, end) = (INDEX_HEADER_BYTES as usize, (INDEX_HEADER_BYTES + header.root_length) as usize);
        bytes[start + at.index(end - start)] = with;
        let header = IndexHeader { root_crc: crc32c(&bytes[start..end]), ..header };
        bytes[..start].copy_from_slice(&header.encode());
        if let Ok(other) = read(&bytes) {
            prop_assert_eq!((other.tree, other.leaves), (index.tree, index.leaves));
        }
    }
}

fn unpaged(pages: &[(Vec<u8>, PageRef)], files: Vec<FileRecord>) -> Result<Index> {
    let pages = pages.iter().map(|(bytes, page)| (*page, &bytes[..])).collect::<Vec<_>>();
    decode_pages(pages, files, Bounds::Item, Path::new("i0/index"))
}

/// A small index with one of everything.
pub(crate) fn sample() -> Index {
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    let params = tree.push_container(Some(root), Some(Component::Key("params".into())), ContainerKind::List);
    tree.push_leaf(Some(params), Some(Component::Index(0)));
    tree.push_leaf(Some(params), Some(Component::Index(1)));
    tree.push_container(Some(root), Some(Component::Int(-7)), ContainerKind::Deque { maxlen: Some(3) });
    tree.push_leaf(Some(root), Some(Component::Field("lr".into())));
    let box_ = Region { offset: vec![0, 0].into(), extent: vec![2, 3].into() };
    let tensor = TensorRecord {
        dtype: Dtype::Float32,
        shape: smallvec![4, 3],
        chunks: smallvec![
            ChunkRecord { region: ChunkRegion::Box(box_), extent: own(0, 4096, 24), codec: Codec::Raw },
            ChunkRecord {
                region: ChunkRegion::Run { start: 6, len: 6 },
                extent: own(1, 8192, 24),
                codec: Codec::Raw,
            },
        ],
    };
    Index {
        tree,
        leaves: vec![
            LeafRecord::Tensor(tensor),
            LeafRecord::Alias { of: 0 },
            LeafRecord::Object(own(0, 8192, 9)),
        ],
        files: files().into_iter().take(2).collect(),
    }
}

#[test]
fn every_flipped_bit_and_every_truncation_is_refused() {
    let bytes = encode_as(&sample(), Paging { leaves: 2, bytes: 1 << 20 }, |_, _| false).unwrap().bytes;
    assert_eq!(read(&bytes).unwrap(), sample());
    for at in 0..bytes.len() * 8 {
        let mut flipped = bytes.clone();
        flipped[at / 8] ^= 1 << (at % 8);
        let error = read(&flipped).expect_err("a flipped bit was accepted");
        assert_eq!(error.kind(), "corrupt_checkpoint", "bit {at}: {error}");
        assert_eq!(error.file(), Some(Path::new("i0/index")));
    }
    for end in 0..bytes.len() {
        assert_eq!(
            read(&bytes[..end]).expect_err("a cut file was accepted").kind(),
            "corrupt_checkpoint",
            "{end}"
        );
    }
    assert!(read(&[&bytes[..], b"\0"].concat()).is_err());
}

#[test]
fn unknown_required_features_are_refused_by_name() {
    let with = |at: usize, byte: u8| {
        let mut bytes = encode(&sample()).unwrap().bytes;
        bytes[at] = byte;
        crate::format::bytes::seal_front(&mut bytes[..INDEX_HEADER_BYTES as usize]);
        read(&bytes)
    };
    let refused = |outcome: Result<Index>, text: &str| {
        let error = outcome.expect_err("it was accepted");
        assert_eq!(error.kind(), "format");
        assert!(error.to_string().contains(text), "{error}");
    };
    refused(with(12, 2), "version 2");
    refused(with(17, 0b10), "required feature bit 9");
    assert_eq!(with(24, 0xFF).unwrap(), sample());
    assert_eq!(read(&[7; 4096]).expect_err("it was accepted").kind(), "corrupt_checkpoint", "other bytes");
}

/// The sample, spoilt; refused on write with the leaf's name, and on read (written without the
/// check).
fn refused(spoil: impl Fn(&mut Index), text: &str) {
    let mut index = sample();
    spoil(&mut index);
    let error = encode(&index).expect_err(text);
    assert!(error.to_string().contains(text), "{error}");
    let unchecked = write::pages(&index, Paging::DEFAULT).unwrap();
    let error = unpaged(&unchecked, index.files).expect_err(text);
    assert!(
        matches!(error.kind(), "corrupt_checkpoint" | "format") && error.to_string().contains(text),
        "{error}"
    );
}

fn tensor(index: &mut Index) -> &mut TensorRecord {
    let LeafRecord::Tensor(tensor) = &mut index.leaves[0] else { unreachable!() };
    tensor
}

fn retree(index: &mut Index, edit: impl Fn(usize, &mut u32, &mut Option<Component>)) {
    let mut tree = Tree::new();
    for (number, node) in index.tree.nodes().iter().enumerate() {
        let (mut parent, mut component) = (node.parent, node.component.clone());
        edit(number, &mut parent, &mut component);
        let parent = (number > 0).then_some(parent);
        match &node.kind {
            NodeKind::Container(kind) => {
                tree.push_container(parent, component, kind.clone());
            }
            NodeKind::Leaf(_) => {
                tree.push_leaf(parent, component);
            }
        }
    }
    index.tree = tree;
}

#[test]
fn extents_stay_inside_their_files() {
    let extent = |edit: fn(&mut Extent)| move |index: &mut Index| edit(&mut tensor(index).chunks[0].extent);
    refused(extent(|e| e.offset = 4095), "outside");
    refused(extent(|e| e.offset = FILE_BYTES - 4096 - 23), "outside");
    refused(extent(|e| e.offset = u64::MAX), "overflows");
    refused(extent(|e| e.source = Source::Own(2)), "file 2, which does not exist");
    refused(extent(|e| e.source = Source::Range(0)), "integrity");
    refused(extent(|e| e.integrity = Integrity::None), "integrity");
    refused(extent(|e| e.length = 23), "has 23 bytes");
    let mut last = sample();
    tensor(&mut last).chunks[0].extent.offset = FILE_BYTES - 4096 - 24;
    encode(&last).unwrap();
}

#[test]
fn chunks_stay_inside_their_tensor_and_sizes_do_not_overflow() {
    refused(|index| tensor(index).shape = smallvec![1, 3], "not inside the shape");
    let mut other = sample();
    tensor(&mut other).shape = smallvec![4, 3, 1];
    assert!(encode(&other).unwrap_err().to_string().contains("not inside the shape"));
    refused(|index| tensor(index).shape = smallvec![u64::MAX, 3], "does not fit 64 bits");
    refused(|index| tensor(index).shape = smallvec![u64::MAX / 2, 1], "does not fit 64 bits");
    refused(
        |index| tensor(index).chunks[1].region = ChunkRegion::Run { start: u64::MAX, len: 6 },
        "not inside the shape",
    );
    refused(
        |index| {
            *tensor(index) =
                TensorRecord { shape: smallvec![1; 65], chunks: Chunks::new(), ..tensor(index).clone() };
        },
        "65 dimensions",
    );
    refused(|index| tensor(index).dtype = Dtype::Float64, "its region has");
}

#[test]
fn ties_name_leaves_that_hold_bytes() {
    refused(|index| index.leaves[1] = LeafRecord::Alias { of: 1 }, "itself a tie");
    refused(|index| index.leaves[1] = LeafRecord::Alias { of: 3 }, "which does not exist");
}

#[test]
fn trees_are_trees_in_pre_order_with_distinct_names() {
    refused(
        |index| {
            retree(index, |node, _, component| {
                if node == 3 {
                    *component = Some(Component::Index(0));
                }
            });
        },
        "occurs twice",
    );
    // A key and an integer key that render alike differ, a key and a field do not.
    refused(
        |index| {
            retree(index, |node, _, component| {
                if node == 5 {
                    *component = Some(Component::Field("params".into()));
                }
            });
        },
        "occurs twice",
    );
    refused(
        |index| {
            retree(index, |node, parent, _| {
                if node == 5 {
                    *parent = 1;
                }
            });
        },
        "no container that is open",
    );
    refused(
        |index| {
            retree(index, |node, parent, _| {
                if node == 3 {
                    *parent = 2;
                }
            });
        },
        "no container that is open",
    );
    refused(
        |index| {
            retree(index, |node, _, component| {
                if node == 3 {
                    *component = None;
                }
            });
        },
        "no name",
    );
    let mut index = sample();
    index.leaves.truncate(2);
    assert!(encode(&index).unwrap_err().to_string().contains("records of 2"));
}

#[test]
fn depth_names_and_files_are_limited() {
    let deep = |levels: u32| {
        let mut index = Index::default();
        let mut parent = None;
        for level in 0..levels {
            let component = (level > 0).then(|| Component::Key("k".into()));
            parent = Some(index.tree.push_container(parent, component, ContainerKind::Dict));
        }
        encode(&index)
    };
    let file = deep(128).unwrap();
    assert_eq!(read(&file.bytes).unwrap().tree.nodes().len(), 128);
    assert_eq!(deep(129).unwrap_err().kind(), "format");
    let long: Arc<str> = "x".repeat(65537).into();
    refused(
        |index| {
            retree(index, |node, _, component| {
                if node == 5 {
                    *component = Some(Component::Key(long.clone()));
                }
            });
        },
        "more than the limit",
    );
    refused(|index| index.files[1].name = "../00001.data".into(), "`..`");
    refused(|index| index.files[1].name = index.files[0].name.clone(), "listed twice");
    refused(|index| index.files[1].length = u64::MAX, "more than the limit");
}

#[test]
fn kinds_that_swell_in_memory_are_refused() {
    // One kind in the page, a copy of it for every container in memory.
    let mut index = Index::default();
    let kind = ContainerKind::Custom { type_name: "n".repeat(60_000).into() };
    let root = index.tree.push_container(None, None, kind.clone());
    for place in 0..5000 {
        index.tree.push_container(Some(root), Some(Component::Index(place)), kind.clone());
    }
    assert_eq!(encode(&index).unwrap_err().kind(), "format");
    let pages = write::pages(&index, Paging::DEFAULT).unwrap();
    assert!(pages.iter().map(|(bytes, _)| bytes.len()).sum::<usize>() < 300_000);
    let error = unpaged(&pages, vec![]).unwrap_err();
    assert!(error.to_string().contains("too large"), "{error}");
}

#[test]
fn pages_of_another_index_do_not_fit_together() {
    let small = Paging { leaves: 1, bytes: 1 << 20 };
    let mut other = sample();
    retree(&mut other, |node, _, component| {
        if node == 1 {
            *component = Some(Component::Key("others".into()));
        }
    });
    let (mine, others) = (write::pages(&sample(), small).unwrap(), write::pages(&other, small).unwrap());
    assert_eq!(mine.len(), 3);
    let join = |pages: &[&(Vec<u8>, PageRef)]| {
        unpaged(&pages.iter().map(|&page| page.clone()).collect::<Vec<_>>(), files())
    };
    assert_eq!(join(&[&mine[0], &mine[1], &mine[2]]).unwrap().tree, sample().tree);
    assert!(join(&[&mine[0], &others[1], &mine[2]]).is_err());
    assert!(join(&[&mine[1], &mine[2]]).is_err());
    assert!(join(&[&mine[0], &mine[2]]).is_err());
    assert!(join(&[&mine[0], &mine[1], &mine[1], &mine[2]]).is_err());
}

#[test]
fn an_error_on_read_names_file_and_leaf() {
    let mut index = sample();
    tensor(&mut index).chunks[1].extent.length = 1;
    let outcome = unpaged(&write::pages(&index, Paging::DEFAULT).unwrap(), index.files);
    let Err(Error::Corrupt { file, leaf, .. }) = outcome else { panic!("it was accepted") };
    assert_eq!((file.as_path(), leaf.as_deref()), (Path::new("i0/index"), Some("params[0]")));
}

#[test]
fn an_empty_item_and_an_item_that_is_one_leaf_are_items() {
    let empty = Index::default();
    assert_eq!(read(&encode(&empty).unwrap().bytes).unwrap(), empty);
    let mut leaf =
        Index { leaves: vec![LeafRecord::Object(own(0, 4096, 1))], files: files(), ..Index::default() };
    leaf.tree.push_leaf(None, None);
    assert_eq!(read(&encode(&leaf).unwrap().bytes).unwrap(), leaf);
    assert_eq!(leaf_hashes(&leaf.tree), [path_hash(&LeafPath::default())]);
}

/// 100 000 leaves below 1000 containers.
pub(crate) fn large(leaves: u32) -> Index {
    let mut index = Index { files: files(), ..Index::default() };
    let root = index.tree.push_container(None, None, ContainerKind::Dict);
    let mut container = root;
    for leaf in 0..leaves {
        if leaf % 100 == 0 {
            let name = Component::Key(format!("layer_{}", leaf / 100).into());
            container = index.tree.push_container(Some(root), Some(name), ContainerKind::OrderedDict);
        }
        let name = Component::Key(format!("self_attn.q_proj.weight_{}", leaf % 100).into());
        index.tree.push_leaf(Some(container), Some(name));
        index.leaves.push(LeafRecord::Tensor(TensorRecord {
            dtype: Dtype::Bfloat16,
            shape: smallvec![8, 16],
            chunks: chunks(&[8, 16], Dtype::Bfloat16, &[4], false, leaf % 3, 4096 + 256 * u64::from(leaf)),
        }));
    }
    index
}

#[test]
fn many_leaves_make_pages_of_about_a_mebibyte() {
    let index = large(30_000);
    let bytes = encode(&index).unwrap().bytes;
    let file = Path::new("x");
    let root = Root::decode(&IndexHeader::decode(&bytes, file).unwrap(), &bytes, file).unwrap();
    assert!(root.pages.len() > 3, "{}", root.pages.len());
    for page in &root.pages {
        assert!(page.length < (1 << 20) + 2048 && page.count < 65536, "{page:?}");
    }
    assert_eq!(read(&bytes).unwrap(), index);
}

/// Prints; run it with `cargo test --release -p stepwell-core encode_and_decode_speed -- --ignored
/// --nocapture`.
#[test]
#[ignore = "a measurement"]
fn encode_and_decode_speed() {
    for leaves in [20_000, 100_000] {
        let index = large(leaves);
        let (mut encoded, mut decoded, mut bytes) = (std::time::Duration::MAX, std::time::Duration::MAX, 0);
        for _ in 0..15 {
            let start = std::time::Instant::now();
            let file = encode(&index).unwrap();
            encoded = encoded.min(start.elapsed());
            let start = std::time::Instant::now();
            let again = read(&file.bytes).unwrap();
            decoded = decoded.min(start.elapsed());
            assert_eq!(again.leaves.len(), index.leaves.len());
            bytes = file.bytes.len();
        }
        println!("{leaves} leaves, {bytes} bytes: encode {encoded:?}, decode {decoded:?} (best of 15)");
    }
}
