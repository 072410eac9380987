//! Promises of header, trailer, page table, pages of block checksums, and of the index in a footer.

use std::path::Path;

use proptest::prelude::*;
use smallvec::smallvec;

use super::footer::{Footer, Trailer, decode_block_crcs, decode_index, encode, pages_of};
use super::header::Header;
use super::index::{
    ChunkRecord, ChunkRegion, Codec, Extent, Index, Integrity, LeafRecord, Source, TensorRecord,
};
use super::page::PageKind;
use super::{block, index_v1, merge};
use crate::dtype::Dtype;
use crate::error::Result;
use crate::leaf_path::Component;
use crate::region::Region;
use crate::tree::{ContainerKind, NodeKind, Tree};

/// The index of an item from what its data files say of themselves.
fn rebuilt(parts: Vec<Index>) -> Result<Index> {
    Ok(merge::merge(parts, merge::Twice::First)?)
}

const ID: u128 = 0x1234_5678_9abc_def0_0fed_cba9_8765_4321;

fn path() -> &'static Path {
    Path::new("i0/00000.data")
}

/// The part of a tensor `w` that one rank of `world` holds, and a tensor of its own.
fn part(rank: u64, world: u64) -> Index {
    let own =
        |offset, length| Extent { source: Source::Own(0), offset, length, integrity: Integrity::BlockCrc };
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    let layers = tree.push_container(Some(root), Some(Component::Key("layers".into())), ContainerKind::Dict);
    tree.push_leaf(Some(layers), Some(Component::Key("w".into())));
    tree.push_leaf(Some(layers), Some(Component::Key(format!("only_{rank}").into())));
    tree.push_leaf(Some(root), Some(Component::Key("tied".into())));
    tree.push_leaf(Some(root), Some(Component::Key("step".into())));
    let tensor = |shape: &[u64], offset: &[u64], extent: &[u64], at| {
        LeafRecord::Tensor(TensorRecord {
            dtype: Dtype::Float32,
            shape: shape.into(),
            chunks: smallvec![ChunkRecord {
                region: ChunkRegion::Box(Region {
                    offset: offset.to_vec().into(),
                    extent: extent.to_vec().into(),
                }),
                extent: own(at, extent.iter().product::<u64>() * 4),
                codec: Codec::Raw,
            }],
        })
    };
    let leaves = vec![
        tensor(&[2 * world, 8], &[2 * rank, 0], &[2, 8], 4096),
        tensor(&[5], &[0], &[5], 4160),
        LeafRecord::Alias { of: 0 },
        LeafRecord::Object(own(4224, 9)),
    ];
    Index { tree, leaves, files: vec![] }
}

/// A whole data file: header, bytes that look like chunks, footer.
fn data_file(index: &Index, id: u128, block_bytes: u64, footer_offset: u64) -> (Vec<u8>, Footer) {
    let mut bytes = Header::new(id, block_bytes, 0).encode();
    bytes.extend((bytes.len() as u64..footer_offset).map(|at| (at * 7 % 251) as u8));
    let crcs: Vec<u32> = block::crcs(&bytes, block_bytes).collect();
    let footer = encode(id, block_bytes, footer_offset, index, &crcs).unwrap();
    bytes.extend_from_slice(&footer.bytes);
    (bytes, footer)
}

/// Everything that a reader that knows the file from an index checks, front to end.
fn check_all(bytes: &[u8], trailer_crc: u32) -> Result<Index> {
    let cut = |at: Option<&[u8]>| at.map(<[u8]>::to_vec).ok_or_else(|| crate::Error::corrupt(path(), "cut"));
    let header = Header::decode(&cut(bytes.get(..4096))?, path())?;
    let end = bytes.len();
    let trailer_bytes = cut(end.checked_sub(4096).and_then(|at| bytes.get(at..)))?;
    let trailer = Trailer::decode(&trailer_bytes, path(), Some(trailer_crc), Some(header.file_id))?;
    if trailer.file_length() != end as u64 {
        return Err(crate::Error::corrupt(path(), "length"));
    }
    let footer = cut(bytes.get(trailer.footer_offset as usize..))?;
    let mut crcs = Vec::new();
    for page in pages_of(&trailer, &footer, path())? {
        if page.kind == PageKind::BlockCrcs {
            crcs.extend(decode_block_crcs(
                &page,
                page.slice(&footer, trailer.footer_offset).unwrap(),
                path(),
            )?);
        }
    }
    let blocks = bytes[..trailer.footer_offset as usize].chunks(trailer.block_bytes as usize);
    assert_eq!(blocks.len(), crcs.len());
    for (number, (bytes, crc)) in blocks.zip(crcs).enumerate() {
        block::check(number as u64, bytes, crc, path())?;
    }
    decode_index(&trailer, &footer, "00000.data", path())
}

#[test]
fn a_data_file_explains_itself() {
    let index = part(0, 1);
    let (bytes, footer) = data_file(&index, ID, 4096, 12288);
    assert_eq!(bytes.len() % 4096, 0);
    let again = check_all(&bytes, footer.trailer_crc).unwrap();
    assert_eq!((&again.tree, &again.leaves), (&index.tree, &index.leaves));
    let file = &again.files[0];
    assert_eq!((&*file.name, file.length), ("00000.data", bytes.len() as u64));
    assert_eq!((file.file_id, file.trailer_crc), (ID, footer.trailer_crc));
    assert_eq!(data_file(&index, ID, 4096, 12288).0, bytes, "the encoding is not deterministic");
}

#[test]
fn every_flipped_bit_of_a_data_file_names_a_block() {
    let (bytes, footer) = data_file(&part(0, 1), ID, 4096, 12288);
    for at in 0..bytes.len() * 8 {
        let mut flipped = bytes.clone();
        flipped[at / 8] ^= 1 << (at % 8);
        let error = check_all(&flipped, footer.trailer_crc).expect_err("a flipped bit was accepted");
        let crate::Error::Corrupt { file, block, .. } = error else { panic!("bit {at}: {error}") };
        assert_eq!(file, path());
        if (4096..12288).contains(&(at / 8)) {
            assert_eq!(block, Some(at as u64 / 8 / 4096));
        }
    }
}

#[test]
fn every_truncation_of_a_data_file_is_refused() {
    let (bytes, footer) = data_file(&part(0, 1), ID, 4096, 8192);
    for end in 0..bytes.len() {
        assert!(check_all(&bytes[..end], footer.trailer_crc).is_err(), "{end}");
    }
    assert!(check_all(&[&bytes[..], &[0; 4096]].concat(), footer.trailer_crc).is_err());
}

#[test]
fn a_file_that_took_anothers_place_is_refused() {
    let (mine, footer) = data_file(&part(0, 1), ID, 4096, 8192);
    let (other, other_footer) = data_file(&part(0, 1), ID + 1, 4096, 8192);
    assert_ne!(footer.trailer_crc, other_footer.trailer_crc, "the recorded digest does not tell files apart");
    assert!(check_all(&other, footer.trailer_crc).is_err());
    let tail = |bytes: &[u8]| bytes[bytes.len() - 4096..].to_vec();
    assert!(Trailer::decode(&tail(&other), path(), None, Some(ID)).is_err());
    assert!(Trailer::decode(&tail(&mine), path(), None, Some(ID)).is_ok());
    // The front of one and the end of the other.
    let mixed = [&mine[..4096], &other[4096..]].concat();
    assert!(check_all(&mixed, other_footer.trailer_crc).is_err());
}

#[test]
fn an_index_is_rebuilt_from_the_footers_of_many_ranks() {
    let parts: Vec<Index> = (0..3)
        .map(|rank| {
            let (bytes, footer) = data_file(&part(rank, 3), ID + u128::from(rank), 4096, 8192);
            let mut index = check_all(&bytes, footer.trailer_crc).unwrap();
            index.files[0].name = format!("{rank:05}.data").into();
            index
        })
        .collect();
    let index = rebuilt(parts.clone()).unwrap();
    let paths: Vec<String> =
        (0..index.leaves.len() as u32).map(|leaf| index.tree.leaf_path(leaf).to_string()).collect();
    assert_eq!(paths, ["layers/w", "layers/only_0", "layers/only_1", "layers/only_2", "tied", "step"]);
    let LeafRecord::Tensor(w) = &index.leaves[0] else { panic!("w is no tensor") };
    let sources: Vec<Source> = w.chunks.iter().map(|chunk| chunk.extent.source).collect();
    assert_eq!(sources, [Source::Own(0), Source::Own(1), Source::Own(2)]);
    assert_eq!(index.leaves[4], LeafRecord::Alias { of: 0 });
    assert_eq!(index.files.len(), 3);
    assert_eq!(index_v1::decode(&index_v1::encode(&index).unwrap().bytes, path()).unwrap(), index);

    let one = rebuilt(vec![parts[1].clone()]).unwrap();
    assert_eq!(one, parts[1], "one part does not merge to itself");
    assert_eq!(rebuilt(vec![]).unwrap(), Index::default());
}

#[test]
fn a_replica_written_twice_counts_once() {
    let with_file = |mut index: Index, name: &str| {
        index.files = vec![super::index::FileRecord {
            name: name.into(),
            length: 1 << 20,
            file_id: 1,
            trailer_crc: 2,
            within: None,
        }];
        index
    };
    let index = rebuilt(vec![with_file(part(0, 1), "a"), with_file(part(0, 1), "b")]).unwrap();
    assert_eq!(index.leaves, part(0, 1).leaves);
    let error = rebuilt(vec![with_file(part(0, 1), "a"), with_file(part(0, 2), "b")]).unwrap_err();
    assert!(error.to_string().contains("`layers/w`") && error.to_string().contains("of shape"), "{error}");
    let mut other = part(0, 1);
    other.leaves[0] = LeafRecord::Object(Extent { length: 1, ..extent_of(&other.leaves[3]) });
    other.leaves[2] = LeafRecord::Alias { of: 1 };
    let error = rebuilt(vec![with_file(part(0, 1), "a"), with_file(other, "b")]).unwrap_err();
    assert!(error.to_string().contains("`layers/w`"), "{error}");
    let mut kinds = with_file(part(0, 1), "b");
    kinds.tree = {
        let mut tree = Tree::new();
        for node in part(0, 1).tree.nodes() {
            let parent = node.component.is_some().then_some(node.parent);
            match &node.kind {
                NodeKind::Container(_) => {
                    tree.push_container(parent, node.component.clone(), ContainerKind::OrderedDict);
                }
                NodeKind::Leaf(_) => {
                    tree.push_leaf(parent, node.component.clone());
                }
            }
        }
        tree
    };
    assert!(rebuilt(vec![with_file(part(0, 1), "a"), kinds]).is_err());
}

fn extent_of(leaf: &LeafRecord) -> Extent {
    let LeafRecord::Object(extent) = leaf else { panic!("it is no object") };
    *extent
}

#[test]
fn a_footer_holds_its_own_files_extents_before_its_footer() {
    let spoilt = |spoil: fn(&mut Extent)| {
        let mut index = part(0, 1);
        let mut extent = extent_of(&index.leaves[3]);
        spoil(&mut extent);
        index.leaves[3] = LeafRecord::Object(extent);
        encode(ID, 4096, 8192, &index, &[1, 2])
    };
    assert!(spoilt(|extent| extent.offset = 8192 - 9).is_ok());
    for outcome in [
        spoilt(|extent| extent.offset = 8192 - 8),
        spoilt(|extent| extent.offset = 4095),
        spoilt(|extent| extent.source = Source::Own(1)),
        spoilt(|extent| extent.source = Source::Pulled(0)),
    ] {
        let error = outcome.expect_err("it was written");
        assert!(error.to_string().contains("`step`"), "{error}");
    }
    assert!(encode(ID, 4096, 8192, &part(0, 1), &[1]).is_err(), "a block without a checksum");
    assert!(encode(ID, 4000, 8192, &part(0, 1), &[1, 2, 3]).is_err(), "a strange block size");
    assert!(encode(ID, 4096, 8000, &part(0, 1), &[1, 2]).is_err(), "a footer at a strange offset");
}

#[test]
fn many_blocks_take_several_pages() {
    let count = 20_000_u32;
    let crcs: Vec<u32> = (0..count).map(|block| block.wrapping_mul(2_654_435_761)).collect();
    let footer_offset = u64::from(count) * 4096;
    let footer = encode(ID, 4096, footer_offset, &part(0, 1), &crcs).unwrap();
    let tail = &footer.bytes[footer.bytes.len() - 4096..];
    let trailer = Trailer::decode(tail, path(), Some(footer.trailer_crc), Some(ID)).unwrap();
    let pages = pages_of(&trailer, &footer.bytes, path()).unwrap();
    let pages: Vec<_> = pages.iter().filter(|page| page.kind == PageKind::BlockCrcs).collect();
    assert_eq!(pages.len(), 3);
    let read: Vec<u32> = pages
        .iter()
        .flat_map(|page| {
            decode_block_crcs(page, page.slice(&footer.bytes, footer_offset).unwrap(), path()).unwrap()
        })
        .collect();
    assert_eq!(read, crcs);
}

#[test]
fn headers_of_other_versions_are_refused_by_name() {
    let with = |at: usize, byte: u8| {
        let mut bytes = Header::new(ID, 4096, 3).encode();
        bytes[at] = byte;
        super::bytes::seal_front(&mut bytes);
        Header::decode(&bytes, path())
    };
    assert_eq!(with(24, 1).unwrap().optional_features, 1);
    for (at, text) in [(12, "version 9"), (16, "feature bit 3"), (33, "block size")] {
        let error = with(at, 9).expect_err(text);
        assert_eq!(error.kind(), "format");
        assert!(error.to_string().contains(text), "{error}");
    }
    assert_eq!(
        Header::decode(&[b'x'; 4096], path()).unwrap_err().kind(),
        "corrupt_checkpoint",
        "other bytes"
    );
    assert_eq!(
        Header::decode(&[0; 4096], path()).unwrap_err().kind(),
        "corrupt_checkpoint",
        "a file that was never written"
    );
    let header = Header::new(ID, 1 << 20, 77);
    assert_eq!(Header::decode(&header.encode(), path()).unwrap(), header);
}

proptest! {
    #[test]
    fn random_bytes_are_refused_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 4096), cut in 0..4096_usize) {
        prop_assert!(Header::decode(&bytes, path()).is_err());
        prop_assert!(Header::decode(&bytes[..cut], path()).is_err());
        prop_assert!(Trailer::decode(&bytes, path(), None, None).is_err());
        prop_assert!(Trailer::decode(&bytes[..cut], path(), None, None).is_err());
    }

    /// Any trailer whose own checksum holds, and any page table whose checksum holds.
    #[test]
    fn trailers_and_page_tables_with_good_checksums_never_panic(
        at in 8_usize..92, with in any::<[u8; 8]>(), table in prop::collection::vec(any::<u8>(), 4096), entry in 0_usize..80,
    ) {
        let (bytes, footer) = data_file(&part(0, 1), ID, 4096, 8192);
        let mut tail = bytes[bytes.len() - 4096..].to_vec();
        tail[at..at + 8].copy_from_slice(&with);
        let crc = super::checksum::crc32c(&tail[..4092]);
        tail[4092..].copy_from_slice(&crc.to_le_bytes());
        if let Ok(trailer) = Trailer::decode(&tail, path(), None, None) {
            let _ = trailer.block_count();
            let _ = decode_index(&trailer, &footer.bytes, "a", path());
        }

        let trailer = Trailer::decode(&bytes[bytes.len() - 4096..], path(), None, None).unwrap();
        let start = (trailer.page_table.offset - trailer.footer_offset) as usize;
        let mut altered = footer.bytes[start..][..trailer.page_table.length as usize].to_vec();
        altered[entry] = table[entry];
        let crc = super::checksum::crc32c(&altered);
        let trailer = Trailer { page_table: super::trailer::PageTableRef { crc, ..trailer.page_table }, ..trailer };
        if let Ok(pages) = super::footer::decode_page_table(&trailer, &altered, path()) {
            for page in pages {
                let _ = page.slice(&footer.bytes, trailer.footer_offset).map(|bytes| decode_block_crcs(&page, bytes, path()));
            }
        }
    }

    #[test]
    fn a_footers_index_is_read_again(index in index_v1::tests::any_index()) {
        // Everything moved into this file.
        let mut index = index;
        for leaf in &mut index.leaves {
            match leaf {
                LeafRecord::Object(extent) => *extent = Extent { offset: 4096, ..extent_in_this(*extent) },
                LeafRecord::Tensor(tensor) => {
                    tensor.chunks.iter_mut().for_each(|chunk| chunk.extent = extent_in_this(chunk.extent));
                }
                LeafRecord::Alias { .. } => {}
            }
        }
        let footer_offset = 1 << 24;
        let crcs = vec![0; (footer_offset / block::DEFAULT_BLOCK_BYTES) as usize];
        let footer = encode(ID, block::DEFAULT_BLOCK_BYTES, footer_offset, &index, &crcs).unwrap();
        let trailer = Trailer::decode(&footer.bytes[footer.bytes.len() - 4096..], path(), None, None).unwrap();
        let again = decode_index(&trailer, &footer.bytes, "a", path()).unwrap();
        prop_assert_eq!(&again.tree, &index.tree);
        prop_assert_eq!(&again.leaves, &index.leaves);
        prop_assert_eq!(&rebuilt(vec![again.clone()]).unwrap(), &again);
    }
}

fn extent_in_this(extent: Extent) -> Extent {
    Extent { source: Source::Own(0), integrity: Integrity::BlockCrc, ..extent }
}
