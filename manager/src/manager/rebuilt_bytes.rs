//! Bytes of a data file of one tier, made from a copy of the step in another tier whose chunks are
//! compressed, or not.
//!
//! The two copies have the same leaves, and a compressed copy has cut each chunk into parts that
//! follow each other. So the decoded bytes of a leaf's chunks, one after the other, are equal in
//! both. The caller compares the result with the checksums of its blocks.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use stepwell_core::Error as CoreError;
use stepwell_core::dtype::Dtype;
use stepwell_core::format::header::HEADER_BYTES;
use stepwell_core::format::index::{ChunkRecord, Codec, Extent, FileRecord, Index, LeafRecord};
use stepwell_core::format::manifest::Manifest;
use stepwell_core::format::planes::{self, PlanesEncoder};
use stepwell_core::io::Dir;
use stepwell_core::load::stored_header;

use crate::checkpoint::Checkpoint;
use crate::error::{Error, Result};
use crate::stored_index::StoredIndex;

/// A step with bytes that are damaged.
pub(super) struct DamagedStep {
    dir: Arc<dyn Dir>,
    manifest: Arc<Manifest>,
    /// Read when it is needed.
    index: OnceLock<Option<Arc<Index>>>,
}

impl DamagedStep {
    pub(super) fn new(dir: Arc<dyn Dir>, manifest: Arc<Manifest>) -> Self {
        Self { dir, manifest, index: OnceLock::new() }
    }

    /// True if a file on disk is the same in a copy of this step, byte for byte.
    pub(super) fn is_same(&self, copy: &Manifest, name: &str) -> bool {
        let parts = |manifest: &Manifest| {
            let is_in = |path: &str, within: Option<&str>| within.unwrap_or(path) == name;
            let parts = manifest
                .files
                .iter()
                .filter(|entry| is_in(&entry.path, entry.within.as_ref().map(|within| within.path.as_str())));
            let facts = parts.map(|entry| {
                let offset = entry.within.as_ref().map_or(0, |within| within.offset);
                (entry.file_id, entry.length, entry.trailer_crc32c, offset)
            });
            facts.collect::<Vec<_>>()
        };
        let ours = parts(&self.manifest);
        !ours.is_empty() && ours == parts(copy)
    }

    /// Makes bytes of a file on disk from a copy with other files. `None` if it has not all of
    /// them.
    pub(super) fn rebuild(
        &self,
        copy: &Checkpoint,
        name: &str,
        bytes: &Range<u64>,
    ) -> Result<Option<Vec<u8>>> {
        let index = self.index.get_or_init(|| {
            let read = StoredIndex::read(&*self.dir, &self.manifest).and_then(|index| index.whole());
            read.inspect_err(|error| tracing::warn!(%error, "an index cannot be read again")).ok()
        });
        let Some(index) = index else { return Ok(None) };
        let is_around = |record: &FileRecord| {
            let begin = record.stored_offset(0);
            record.stored_name() == name && begin <= bytes.start && bytes.end <= begin + record.length
        };
        let Some((file, record)) = (0_u32..).zip(&index.files).find(|(_, record)| is_around(record)) else {
            return Ok(None);
        };
        let begin = record.stored_offset(0);
        let mut out = FilePart { bytes: bytes.start - begin..bytes.end - begin, content: Vec::new() };
        out.content.resize((bytes.end - bytes.start) as usize, 0);
        // A damaged header is in no leaf.
        if out.bytes.start < HEADER_BYTES
            && let Ok(header) = stored_header(&*self.dir, record)
        {
            out.put(0, &header);
        }
        for (number, leaf) in (0_u32..).zip(&index.leaves) {
            let wanted = out.bytes.clone();
            let is_needed = |extent: &Extent| {
                extent.source.file() == Some(file) && overlap(&wanted, extent.offset, extent.length).is_some()
            };
            if !leaf.extents().any(is_needed) {
                continue;
            }
            let Some(theirs) = same_leaf(index, number, copy)? else { return Ok(None) };
            match (leaf, &theirs.1) {
                (LeafRecord::Object(extent), LeafRecord::Object(other)) if extent.length == other.length => {
                    out.put(extent.offset, &stored(copy, &theirs.0, other, 0..other.length)?);
                }
                (LeafRecord::Tensor(ours), LeafRecord::Tensor(tensor)) if ours.dtype == tensor.dtype => {
                    let other = LeafBytes {
                        copy,
                        index: &theirs.0,
                        chunks: &tensor.chunks,
                        itemsize: ours.dtype.size() as u64,
                        dtype: ours.dtype,
                    };
                    let mut at = 0;
                    for chunk in &ours.chunks {
                        let length = chunk.decoded_bytes(other.itemsize).unwrap_or(u64::MAX);
                        if is_needed(&chunk.extent) && !out.put_chunk(chunk, at, length, &other)? {
                            return Ok(None);
                        }
                        at = at.saturating_add(length);
                    }
                }
                _ => return Ok(None),
            }
        }
        Ok(Some(out.content))
    }
}

/// Returns the index of a copy, and its record of a leaf.
fn same_leaf(index: &Index, leaf: u32, copy: &Checkpoint) -> Result<Option<(Arc<Index>, LeafRecord)>> {
    // Thinning may have removed items of one of them.
    let (tree, path) = (copy.tree(), index.tree.leaf_path(leaf));
    let is_same = |number: &u32| tree.leaf_path(*number) == path;
    let count = copy.outline().leaves.len() as u32;
    let found = Some(leaf).filter(|leaf| *leaf < count && is_same(leaf)).or_else(|| (0..count).find(is_same));
    let Some(number) = found else { return Ok(None) };
    let theirs = copy.index_of([number])?;
    let record = theirs.leaves.get(number as usize).cloned();
    Ok(record.map(|record| (theirs, record)))
}

/// Reads stored bytes of an extent of a copy, checked.
fn stored(copy: &Checkpoint, index: &Index, extent: &Extent, part: Range<u64>) -> Result<Vec<u8>> {
    let record = extent.source.file().and_then(|file| index.files.get(file as usize));
    let record = record.ok_or_else(|| CoreError::internal("a file of the index", "none"))?;
    let offset = record.stored_offset(extent.offset.saturating_add(part.start));
    let length = (part.end - part.start) as usize;
    let bytes = copy.stored_file(record.stored_name())?.read_at(offset, length)?;
    if bytes.len() == length {
        return Ok(bytes);
    }
    Err(CoreError::corrupt(copy.path().join(record.stored_name()), "it ends before a chunk").into())
}

fn overlap(bytes: &Range<u64>, offset: u64, length: u64) -> Option<Range<u64>> {
    let (start, end) = (offset.max(bytes.start), offset.saturating_add(length).min(bytes.end));
    (start < end).then_some(start..end)
}

/// A part of a data file that is made.
struct FilePart {
    /// The range of the data file.
    bytes: Range<u64>,
    content: Vec<u8>,
}

impl FilePart {
    fn overlap(&self, offset: u64, length: u64) -> Option<Range<u64>> {
        overlap(&self.bytes, offset, length)
    }

    /// Puts what it has of bytes at an offset of the file.
    fn put(&mut self, offset: u64, bytes: &[u8]) {
        let Some(part) = self.overlap(offset, bytes.len() as u64) else { return };
        let to = (part.start - self.bytes.start) as usize..(part.end - self.bytes.start) as usize;
        let from = (part.start - offset) as usize..(part.end - offset) as usize;
        if let (Some(to), Some(from)) = (self.content.get_mut(to), bytes.get(from)) {
            to.copy_from_slice(from);
        }
    }

    /// Puts what it has of a chunk, whose decoded bytes begin at `at` in those of its leaf. False
    /// if the other copy does not have them.
    fn put_chunk(
        &mut self,
        chunk: &ChunkRecord,
        at: u64,
        length: u64,
        other: &LeafBytes<'_>,
    ) -> Result<bool> {
        let extent = &chunk.extent;
        if chunk.codec == Codec::Raw {
            let Some(part) = self.overlap(extent.offset, extent.length) else { return Ok(true) };
            let first = at + (part.start - extent.offset);
            let bytes = other.read(first..first + (part.end - part.start))?;
            if let Some(bytes) = &bytes {
                self.put(part.start, bytes);
            }
            return Ok(bytes.is_some());
        }
        let Some(bytes) = other.read(at..at.saturating_add(length))? else { return Ok(false) };
        let encoded = PlanesEncoder::new().and_then(|mut encoder| encoder.encode(&bytes, other.dtype));
        let encoded = encoded.map_err(|what| CoreError::internal("an encoder of zstd", what))?;
        let encoded = encoded.filter(|encoded| encoded.len() as u64 == extent.length);
        if let Some(encoded) = &encoded {
            self.put(extent.offset, encoded);
        }
        Ok(encoded.is_some())
    }
}

/// The decoded bytes of a tensor's chunks in a copy, one after the other.
struct LeafBytes<'a> {
    copy: &'a Checkpoint,
    index: &'a Index,
    chunks: &'a [ChunkRecord],
    itemsize: u64,
    dtype: Dtype,
}

impl LeafBytes<'_> {
    /// Reads some of them. `None` if it has fewer.
    fn read(&self, wanted: Range<u64>) -> Result<Option<Vec<u8>>> {
        let mut out = FilePart { bytes: wanted.clone(), content: Vec::new() };
        let mut at = 0;
        for chunk in self.chunks {
            let Some(length) = chunk.decoded_bytes(self.itemsize) else { return Ok(None) };
            if let Some(part) = out.overlap(at, length) {
                if out.content.is_empty() {
                    out.content.resize((wanted.end - wanted.start) as usize, 0);
                }
                let bytes = match chunk.codec {
                    Codec::Raw => {
                        let part = part.start - at..part.end - at;
                        (part.start, stored(self.copy, self.index, &chunk.extent, part)?)
                    }
                    _ => (0, self.decode(chunk, length)?),
                };
                out.put(at + bytes.0, &bytes.1);
            }
            at = at.saturating_add(length);
        }
        Ok((at >= wanted.end).then_some(out.content))
    }

    fn decode(&self, chunk: &ChunkRecord, length: u64) -> Result<Vec<u8>> {
        let encoded = stored(self.copy, self.index, &chunk.extent, 0..chunk.extent.length)?;
        let mut bytes = vec![0; length as usize];
        planes::decode(&encoded, planes::count(self.dtype), &mut bytes)
            .map_err(|what| Error::from(CoreError::corrupt(self.copy.path(), what)))?;
        Ok(bytes)
    }
}
