//! Data files with compressed chunks: the golden one is read permanently, and hostile ones are
//! refused with the name of the leaf, whatever checksums they have.
#![expect(clippy::unwrap_used, clippy::panic, reason = "a test")]

use std::path::{Path, PathBuf};

use proptest::prelude::*;

use stepwell_core::compressed_file::CompressedFile;
use stepwell_core::dtype::Dtype;
use stepwell_core::format::header::Header;
use stepwell_core::format::index::{
    ChunkRecord, ChunkRegion, Codec, Extent, FileRecord, Index, Integrity, LeafRecord, Source, TensorRecord,
};
use stepwell_core::format::{block, footer, index_v1, planes};
use stepwell_core::io::{Engine, MemoryFile, open_disk};
use stepwell_core::leaf_path::Component;
use stepwell_core::load::{FileSet, LoadOptions, execute};
use stepwell_core::read_plan::{BoxCopy, EncodedChunk};
use stepwell_core::region::Region;
use stepwell_core::sys::HostTarget;
use stepwell_core::tree::{ContainerKind, Tree};

const FILE_ID: u128 = 0x0102_0304_0506_0708_090a_0b0c_0d0e_0f10;
const BLOCK_BYTES: u64 = 4096;
const SHAPE: [u64; 2] = [64, 100];

fn golden(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/golden_v1_compressed").join(name)
}

/// Powers of two of either sign: their lower bytes are zero.
fn weights() -> Vec<u8> {
    let number = |n: u16| (f32::from(n % 7) - 3.0) * 0.5_f32.powi(i32::from(n % 5));
    (0..6400).flat_map(|n| number(n).to_le_bytes()).collect()
}

fn tree() -> Tree {
    let mut tree = Tree::new();
    let root = tree.push_container(None, None, ContainerKind::Dict);
    tree.push_leaf(Some(root), Some(Component::Key("w".into())));
    tree
}

fn index_of(codec: Codec, length: u64) -> Index {
    let extent = Extent { source: Source::Own(0), offset: 4096, length, integrity: Integrity::BlockCrc };
    let region = ChunkRegion::Box(Region::whole(&SHAPE));
    let chunks = [ChunkRecord { region, extent, codec }].into_iter().collect();
    let (dtype, shape) = (Dtype::Float32, SHAPE.as_slice().into());
    let tensor = TensorRecord { dtype, shape, chunks };
    Index { tree: tree(), leaves: vec![LeafRecord::Tensor(tensor)], files: Vec::new() }
}

/// A data file with this chunk, and its record.
fn data_file(header: &Header, codec: Codec, chunk: &[u8]) -> (Vec<u8>, FileRecord) {
    let mut bytes = header.encode();
    bytes.extend_from_slice(chunk);
    bytes.resize(bytes.len().next_multiple_of(4096), 0);
    let footer_offset = bytes.len() as u64;
    let crcs: Vec<u32> = block::crcs(&bytes, BLOCK_BYTES).collect();
    let index = index_of(codec, chunk.len() as u64);
    let footer = footer::encode(FILE_ID, BLOCK_BYTES, footer_offset, &index, &crcs).unwrap();
    bytes.extend_from_slice(&footer.bytes);
    let (length, trailer_crc) = (bytes.len() as u64, footer.trailer_crc);
    (bytes, FileRecord { name: "00000.data".into(), length, file_id: FILE_ID, trailer_crc, within: None })
}

fn raw_file() -> Vec<u8> {
    data_file(&Header::new(FILE_ID, BLOCK_BYTES, 3), Codec::Raw, &weights()).0
}

/// The compressed data file of the golden state, and its item's index file.
fn compressed() -> (Vec<u8>, Vec<u8>) {
    let from = MemoryFile::new("00000.data".into(), raw_file());
    let mut file =
        CompressedFile::new(&from, index_of(Codec::Raw, weights().len() as u64), &|_| true).unwrap();
    let mut bytes = Vec::new();
    loop {
        match file.next_piece(5000).unwrap() {
            piece if piece.is_empty() => break,
            piece => bytes.extend(piece),
        }
    }
    let finished = file.finish().unwrap();
    let mut index = index_of(Codec::Raw, weights().len() as u64);
    index.files.push(FileRecord { name: "00000.data".into(), ..finished.record });
    stepwell_core::compressed_file::move_leaf(&mut index.leaves[0], &|_| Some(&finished.places)).unwrap();
    (bytes, index_v1::encode(&index).unwrap().bytes)
}

/// Reads the tensor of an index whose file is in a directory.
fn read(dir: &Path, index: &Index) -> stepwell_core::Result<Vec<u8>> {
    let disk = open_disk(dir, Engine::Auto).unwrap();
    let files = FileSet::new(disk.open_dir(dir).unwrap(), &index.files);
    let LeafRecord::Tensor(tensor) = &index.leaves[0] else { panic!("a tensor") };
    let mut out = vec![0; 25_600];
    let (mut copies, mut at) = (Vec::new(), 0);
    for chunk in &tensor.chunks {
        let decoded = chunk.decoded_bytes(4).unwrap();
        let Extent { offset, length, .. } = chunk.extent;
        let is_raw = chunk.codec == Codec::Raw;
        let encoded = EncodedChunk { offset, length, decoded, planes: planes::count(tensor.dtype) as u8 };
        copies.push(BoxCopy {
            leaf: 0,
            file: 0,
            encoded: (!is_raw).then_some(encoded),
            src_offset: if is_raw { offset } else { 0 },
            src_strides: vec![1].into(),
            extent: vec![decoded].into(),
            itemsize: 1,
            dst: 0,
            dst_offset: at,
            dst_strides: vec![1].into(),
            inverted: 0,
        });
        at += decoded;
    }
    let target = HostTarget::from(out.as_mut_slice());
    execute(&*disk, &files, index, &copies, [target], &LoadOptions::default())
        .map_err(|failure| failure.error)?;
    Ok(out)
}

#[test]
fn the_golden_compressed_file_is_read_for_ever() {
    let index = std::fs::read(golden("index")).unwrap();
    let index = index_v1::decode(&index, Path::new("index")).unwrap();
    assert!(index.is_compressed());
    assert_eq!(read(&golden(""), &index).unwrap(), weights());
    let bytes = std::fs::read(golden("00000.data")).unwrap();
    let header = Header::decode(&bytes[..4096], Path::new("00000.data")).unwrap();
    assert_eq!((header.required_features, header.rank, header.block_bytes), (1, 3, BLOCK_BYTES));
}

#[test]
#[ignore = "makes the golden files, once"]
fn write_the_golden_files_that_are_not_there() {
    let (data, index) = compressed();
    std::fs::create_dir_all(golden("")).unwrap();
    for (name, bytes) in [("00000.data", data), ("index", index)] {
        if !golden(name).exists() {
            std::fs::write(golden(name), bytes).unwrap();
        }
    }
}

#[test]
fn a_compressed_file_does_not_depend_on_its_pieces() {
    let (bytes, index) = compressed();
    assert_eq!((bytes.clone(), index), compressed());
    let whole = {
        let from = MemoryFile::new("00000.data".into(), raw_file());
        let index = index_of(Codec::Raw, weights().len() as u64);
        CompressedFile::new(&from, index, &|_| true).unwrap().next_piece(usize::MAX).unwrap()
    };
    assert_eq!(whole, bytes);
    assert!(bytes.len() < raw_file().len() / 2);
}

#[test]
fn an_index_of_compressed_chunks_says_so() {
    let (_, file) = compressed();
    assert_eq!(u64::from_le_bytes(file[16..24].try_into().unwrap()), 0b10, "the required feature");
    let index = index_v1::decode(&file, Path::new("index")).unwrap();
    assert_eq!(index_v1::encode(&index).unwrap().bytes, file);
    let raw = Index { files: index.files.clone(), ..index_of(Codec::Raw, 25_600) };
    let raw = Index { files: vec![FileRecord { length: 1 << 20, ..raw.files[0].clone() }], ..raw };
    let file = index_v1::encode(&raw).unwrap().bytes;
    assert_eq!(u64::from_le_bytes(file[16..24].try_into().unwrap()), 0);
}

#[test]
fn sizes_that_no_chunk_can_have_are_refused() {
    for (length, shape) in [
        (25_600, SHAPE.to_vec()),
        (30_000, SHAPE.to_vec()),
        (0, SHAPE.to_vec()),
        (10, vec![64 << 20, 1]),
        (1 << 20, vec![(16 << 20) + 1, 1]),
        (8, vec![0, 1]),
        (8, vec![u64::MAX / 4, 1]),
    ] {
        let mut index = index_of(Codec::Planes, length);
        let LeafRecord::Tensor(tensor) = &mut index.leaves[0] else { panic!("a tensor") };
        tensor.shape = shape.clone().into();
        tensor.chunks[0].region = ChunkRegion::Box(Region::whole(&shape));
        index.files = vec![FileRecord {
            length: 1 << 30,
            ..data_file(&Header::new(1, 4096, 0), Codec::Raw, &weights()).1
        }];
        let error = index_v1::encode(&index).unwrap_err().to_string();
        assert!(error.contains("cannot become") && error.contains('w'), "{length} {shape:?}: {error}");
    }
}

/// Reads a file whose chunk has these bytes, and valid checksums.
fn read_hostile(chunk: &[u8]) -> stepwell_core::Result<Vec<u8>> {
    let dir = tempfile::tempdir().unwrap();
    let header = Header::new(FILE_ID, BLOCK_BYTES, 3).compressed();
    let (bytes, record) = data_file(&header, Codec::Planes, chunk);
    std::fs::write(dir.path().join("00000.data"), bytes).unwrap();
    let index = Index { files: vec![record], ..index_of(Codec::Planes, chunk.len() as u64) };
    read(dir.path(), &index)
}

fn encoded() -> Vec<u8> {
    planes::PlanesEncoder::new().unwrap().encode(&weights(), Dtype::Float32).unwrap().unwrap()
}

#[test]
fn a_hostile_chunk_is_damage_of_its_leaf() {
    assert_eq!(read_hostile(&encoded()).unwrap(), weights());
    let cut = encoded()[..encoded().len() - 1].to_vec();
    let longer = [encoded(), vec![0]].concat();
    for (chunk, what) in
        [(cut, "cut"), (longer, "longer"), (vec![0; 100], "zeros"), (vec![0xFF; 5000], "ones")]
    {
        let error = read_hostile(&chunk).unwrap_err();
        assert_eq!(error.kind(), "corrupt_checkpoint", "{what}");
        let text = error.to_string();
        assert!(text.contains("`w`") && text.contains("cannot be decoded"), "{what}: {text}");
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    #[test]
    fn no_change_of_a_chunk_gives_a_panic_or_other_lengths(at: prop::sample::Index, bits in 1_u8..) {
        let mut chunk = encoded();
        let at = at.index(chunk.len());
        chunk[at] ^= bits;
        match read_hostile(&chunk) {
            Ok(bytes) => prop_assert_eq!(bytes.len(), 25_600),
            Err(error) => prop_assert_eq!(error.kind(), "corrupt_checkpoint"),
        }
    }
}
