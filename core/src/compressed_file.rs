//! A data file of a committed step, written once more with compressed chunks.
//!
//! The manager copies a step into a tier that takes compressed copies. It reads the data file of
//! the step through a file that checks each block, and writes the pieces of this one. The new file
//! has the leaves, the block size and the order of the old one. The footer is computed from what
//! was written. Chunks are cut smaller, so that a read decodes little that it does not need.
//!
//! Memory: one chunk of the old file, its encoding, and the pieces that nobody has taken yet.

use std::collections::HashMap;
use std::ops::Range;

use crate::dtype::Dtype;
use crate::format::header::{HEADER_BYTES, Header};
use crate::format::index::{
    ChunkRecord, ChunkRegion, Chunks, Codec, Extent, FileRecord, Index, LeafRecord, TensorRecord,
};
use crate::format::planes::{self, PlanesEncoder};
use crate::format::{block, footer};
use crate::io::File;
use crate::limits::{MAX_FILE_BYTES, MAX_PLANES_BYTES};
use crate::region::Region;
use crate::save::{PAGE_ALIGNED_FROM, SMALL_ALIGNMENT};
use crate::{Error, Result};

/// Bytes of a chunk before it is compressed. A reader decodes whole chunks, and one thread decodes
/// one of them.
const CHUNK_BYTES: u64 = 1 << 20;
/// Bytes of one read of what stays as it is.
const PIECE_BYTES: u64 = 4 << 20;
const PAGE: u64 = 4096;
/// The difference of the ids of the two files. A copy of the same file has the same id.
const ID_STEP: u128 = 0x9e37_79b9_7f4a_7c15_f39c_c060_5ced_c835;

/// The new places of the chunks and objects of a file, by their old offset.
pub type NewPlaces = HashMap<u64, NewPlace>;

/// The new place of a chunk or object.
#[derive(Clone, Debug, PartialEq)]
pub enum NewPlace {
    /// The chunks into which it was cut.
    Chunks(Chunks),
    /// An object.
    Object(Extent),
}

/// The records of a finished file.
#[derive(Debug)]
pub struct FinishedCopy {
    /// Its record, without a name.
    pub record: FileRecord,
    /// The new places of its content.
    pub places: NewPlaces,
}

impl FinishedCopy {
    /// Finds the new places by the indexes in the footers of the old file and of the finished one.
    /// The error says what does not fit.
    pub fn of_footers(record: FileRecord, old: &Index, new: &Index) -> Result<Self, String> {
        if old.leaves.len() != new.leaves.len() {
            return Err("it has other leaves than the file that it is a copy of".to_owned());
        }
        let mut places = NewPlaces::new();
        for (number, (old, new)) in old.leaves.iter().zip(&new.leaves).enumerate() {
            let lost = || format!("its leaf {number} is not that of the file that it is a copy of");
            match (old, new) {
                (LeafRecord::Tensor(old), LeafRecord::Tensor(new)) => {
                    let mut rest = new.chunks.iter();
                    for chunk in &old.chunks {
                        let mut left = volume(&chunk.region);
                        let mut cut = Chunks::new();
                        while left > 0 || cut.is_empty() {
                            let part = rest.next().ok_or_else(lost)?;
                            left = left.checked_sub(volume(&part.region)).ok_or_else(lost)?;
                            cut.push(part.clone());
                        }
                        if chunk.extent.length > 0 {
                            places.insert(chunk.extent.offset, NewPlace::Chunks(cut));
                        }
                    }
                    if rest.next().is_some() {
                        return Err(lost());
                    }
                }
                (LeafRecord::Object(old), LeafRecord::Object(new)) => {
                    if old.length > 0 {
                        places.insert(old.offset, NewPlace::Object(*new));
                    }
                }
                (LeafRecord::Alias { .. }, LeafRecord::Alias { .. }) => {}
                _ => return Err(lost()),
            }
        }
        Ok(Self { record, places })
    }
}

/// See the module documentation.
pub struct CompressedFile<'a> {
    from: &'a dyn File,
    /// The index of the old file.
    index: Index,
    header: Header,
    /// The rest of the content, in file order.
    waiting: std::vec::IntoIter<Waiting>,
    /// Old bytes that were read, of the content.
    read: u64,
    /// The rest of an old extent that is copied as it is.
    rest: Range<u64>,
    encoder: PlanesEncoder,
    out: NewBytes,
    places: NewPlaces,
    finished: Option<FileRecord>,
}

/// A chunk or object of the old file.
struct Waiting {
    extent: Extent,
    /// The chunk, its dtype, and true if it is to be compressed. `None` for an object.
    chunk: Option<(ChunkRecord, Dtype, bool)>,
}

impl std::fmt::Debug for CompressedFile<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("CompressedFile").field("from", &self.from.path()).finish_non_exhaustive()
    }
}

impl<'a> CompressedFile<'a> {
    /// The copy of the data file `from`, whose reads are checked. `index` is that of its footer.
    /// `is_chosen` decides by the number of a leaf there whether it is compressed.
    pub fn new(from: &'a dyn File, index: Index, is_chosen: &dyn Fn(u32) -> bool) -> Result<Self> {
        let old = Header::decode(&from.read_at(0, HEADER_BYTES as usize)?, from.path())?;
        let header = Header::new(old.file_id.wrapping_add(ID_STEP), old.block_bytes, old.rank).compressed();
        let mut waiting = Vec::new();
        for (number, leaf) in (0_u32..).zip(&index.leaves) {
            match leaf {
                LeafRecord::Tensor(tensor) => {
                    let chosen = is_chosen(number);
                    waiting.extend(tensor.chunks.iter().map(|chunk| {
                        let (extent, chunk) = (chunk.extent, chunk.clone());
                        Waiting { extent, chunk: Some((chunk, tensor.dtype, chosen)) }
                    }));
                }
                LeafRecord::Object(extent) => waiting.push(Waiting { extent: *extent, chunk: None }),
                LeafRecord::Alias { .. } => {}
            }
        }
        // An object whose bytes another file has is listed as empty.
        waiting.retain(|waiting| waiting.extent.length > 0);
        waiting.sort_by_key(|waiting| waiting.extent.offset);
        let encoder = PlanesEncoder::new().map_err(|what| Error::internal("an encoder of zstd", what))?;
        let mut out = NewBytes::new(header.block_bytes);
        out.push(&header.encode());
        Ok(Self {
            from,
            index,
            header,
            waiting: waiting.into_iter(),
            read: HEADER_BYTES,
            rest: 0..0,
            encoder,
            out,
            places: NewPlaces::new(),
            finished: None,
        })
    }

    /// Returns the next bytes of the file: `most`, or fewer at its end, and none behind it.
    pub fn next_piece(&mut self, most: usize) -> Result<Vec<u8>> {
        while self.out.ready() < most && self.finished.is_none() {
            self.step()?;
        }
        Ok(self.out.take(most))
    }

    /// Returns the bytes of the old file that were read.
    pub fn bytes_read(&self) -> u64 {
        self.read
    }

    /// Returns the records of the file, whose pieces were all taken.
    pub fn finish(self) -> Result<FinishedCopy> {
        let left = self.out.bytes.len();
        match self.finished {
            Some(record) if left == 0 => Ok(FinishedCopy { record, places: self.places }),
            _ => Err(Error::internal("a finished copy", format!("{left} bytes that nobody has taken"))),
        }
    }

    /// Adds the next bytes to the output.
    fn step(&mut self) -> Result<()> {
        if !self.rest.is_empty() {
            let end = self.rest.end.min(self.rest.start + PIECE_BYTES);
            let bytes = self.read(self.rest.start, end - self.rest.start)?;
            self.rest.start = end;
            self.out.push(&bytes);
            return Ok(());
        }
        let Some(Waiting { extent, chunk }) = self.waiting.next() else { return self.end() };
        let place = match chunk {
            None => NewPlace::Object(self.keep(extent, SMALL_ALIGNMENT)?),
            Some((chunk, dtype, true)) if chunk.codec == Codec::Raw && extent.length <= MAX_PLANES_BYTES => {
                NewPlace::Chunks(self.compress(&chunk, dtype)?)
            }
            Some((chunk, ..)) => {
                let extent = self.keep(extent, alignment(&chunk))?;
                NewPlace::Chunks([ChunkRecord { extent, ..chunk }].into_iter().collect())
            }
        };
        if self.places.insert(extent.offset, place).is_some() {
            let what = format!("two leaves have bytes at its offset {}", extent.offset);
            return Err(Error::corrupt(self.from.path(), what));
        }
        Ok(())
    }

    /// Reads bytes of the old file.
    fn read(&mut self, offset: u64, length: u64) -> Result<Vec<u8>> {
        let bytes = self.from.read_at(offset, length as usize)?;
        if bytes.len() as u64 != length {
            let what = format!("it ends before its byte {}", offset.saturating_add(length));
            return Err(Error::corrupt(self.from.path(), what));
        }
        self.read += length;
        Ok(bytes)
    }

    /// Copies an extent as it is, by the next steps.
    fn keep(&mut self, extent: Extent, alignment: u64) -> Result<Extent> {
        let offset = self.out.align(alignment)?;
        self.rest = extent.offset..extent.offset.saturating_add(extent.length);
        Ok(Extent { offset, ..extent })
    }

    /// Cuts and compresses a chunk. It stays as it is if that saves nothing.
    fn compress(&mut self, chunk: &ChunkRecord, dtype: Dtype) -> Result<Chunks> {
        let bytes = self.read(chunk.extent.offset, chunk.extent.length)?;
        let (mut cut, mut at) = (Vec::new(), 0_usize);
        for region in regions(&chunk.region, dtype.size() as u64) {
            let length = volume(&region).saturating_mul(dtype.size() as u64) as usize;
            let raw = at.checked_add(length).and_then(|end| bytes.get(at..end));
            let raw =
                raw.ok_or_else(|| Error::internal("a part inside its chunk", "one that passes its end"))?;
            at += length;
            cut.push((region, raw, self.encode(raw, dtype)?));
        }
        if cut.iter().all(|(_, _, encoded)| encoded.is_none()) {
            let offset = self.out.align(alignment(chunk))?;
            self.out.push(&bytes);
            let extent = Extent { offset, ..chunk.extent };
            return Ok([ChunkRecord { extent, ..chunk.clone() }].into_iter().collect());
        }
        let mut chunks = Chunks::new();
        for (region, raw, encoded) in cut {
            let (codec, stored) = match &encoded {
                Some(encoded) => (Codec::Planes, encoded.as_slice()),
                None => (Codec::Raw, raw),
            };
            let offset = self.out.align(SMALL_ALIGNMENT)?;
            self.out.push(stored);
            let extent = Extent { offset, length: stored.len() as u64, ..chunk.extent };
            chunks.push(ChunkRecord { region, extent, codec });
        }
        Ok(chunks)
    }

    /// Encodes a chunk, and decodes it again: a copy must not depend on a fault of this machine.
    fn encode(&mut self, raw: &[u8], dtype: Dtype) -> Result<Option<Vec<u8>>> {
        let wrong = |what: String| Error::internal("a chunk that decodes to its bytes", what);
        let encoded = self.encoder.encode(raw, dtype).map_err(|what| wrong(what.to_owned()))?;
        if let Some(encoded) = &encoded {
            let mut decoded = vec![0; raw.len()];
            planes::decode(encoded, planes::count(dtype), &mut decoded).map_err(wrong)?;
            if decoded != raw {
                return Err(wrong("other bytes".to_owned()));
            }
        }
        Ok(encoded)
    }

    /// Adds the footer.
    fn end(&mut self) -> Result<()> {
        let footer_offset = self.out.align(PAGE)?;
        self.out.end_blocks();
        let mut index = std::mem::take(&mut self.index);
        for leaf in &mut index.leaves {
            move_leaf(leaf, &|_| Some(&self.places))
                .map_err(|what| Error::internal("a place for each chunk", what))?;
        }
        let Header { file_id, block_bytes, .. } = self.header;
        let footer = footer::encode(file_id, block_bytes, footer_offset, &index, &self.out.crcs)?;
        self.out.bytes.extend_from_slice(&footer.bytes);
        self.out.summed = self.out.bytes.len();
        let length = footer_offset + footer.bytes.len() as u64;
        let (name, trailer_crc) = ("".into(), footer.trailer_crc);
        self.finished = Some(FileRecord { name, length, file_id, trailer_crc, within: None });
        Ok(())
    }
}

/// Replaces the places of a leaf's bytes. `of` returns the new places of a file, and none if the
/// file stays as it is.
pub fn move_leaf<'p>(leaf: &mut LeafRecord, of: &dyn Fn(u32) -> Option<&'p NewPlaces>) -> Result<(), String> {
    let lost = |extent: &Extent| format!("none for the bytes at {} of {:?}", extent.offset, extent.source);
    let places = |extent: &Extent| extent.source.file().and_then(of).filter(|_| extent.length > 0);
    match leaf {
        LeafRecord::Object(extent) => match places(extent).map(|places| places.get(&extent.offset)) {
            None => {}
            Some(Some(NewPlace::Object(new))) => *extent = Extent { source: extent.source, ..*new },
            Some(_) => return Err(lost(extent)),
        },
        LeafRecord::Tensor(TensorRecord { chunks, .. }) => {
            if chunks.iter().all(|chunk| places(&chunk.extent).is_none()) {
                return Ok(());
            }
            let mut moved = Chunks::new();
            for chunk in std::mem::take(chunks) {
                match places(&chunk.extent).map(|places| places.get(&chunk.extent.offset)) {
                    None => moved.push(chunk),
                    Some(Some(NewPlace::Chunks(new))) => moved.extend(new.iter().cloned().map(|mut new| {
                        new.extent.source = chunk.extent.source;
                        new
                    })),
                    Some(_) => return Err(lost(&chunk.extent)),
                }
            }
            *chunks = moved;
        }
        LeafRecord::Alias { .. } => {}
    }
    Ok(())
}

fn alignment(chunk: &ChunkRecord) -> u64 {
    if chunk.codec == Codec::Raw && chunk.extent.length >= PAGE_ALIGNED_FROM { PAGE } else { SMALL_ALIGNMENT }
}

fn volume(region: &ChunkRegion) -> u64 {
    match region {
        ChunkRegion::Box(region) => region.volume().unwrap_or(u64::MAX),
        ChunkRegion::Run { len, .. } => *len,
    }
}

/// Cuts a chunk into parts of at most [`CHUNK_BYTES`]. Their bytes follow each other in those of
/// the chunk.
fn regions(region: &ChunkRegion, itemsize: u64) -> Vec<ChunkRegion> {
    let mut cut = Vec::new();
    match region {
        ChunkRegion::Run { start, len } => {
            let parts = len.saturating_mul(itemsize).div_ceil(CHUNK_BYTES).max(1);
            let step = len.div_ceil(parts).max(1);
            let mut at = 0;
            while at < *len {
                cut.push(ChunkRegion::Run { start: start + at, len: step.min(len - at) });
                at += step;
            }
        }
        ChunkRegion::Box(region) => cut_box(region, itemsize, &mut cut),
    }
    cut
}

fn cut_box(region: &Region, itemsize: u64, cut: &mut Vec<ChunkRegion>) {
    let bytes = region.volume().unwrap_or(u64::MAX).saturating_mul(itemsize);
    let axis = region.extent.iter().position(|&n| n > 1).filter(|_| bytes > CHUNK_BYTES);
    let Some((axis, &n)) = axis.and_then(|axis| Some((axis, region.extent.get(axis)?))) else {
        cut.push(ChunkRegion::Box(region.clone()));
        return;
    };
    let step = n.div_ceil(bytes.div_ceil(CHUNK_BYTES)).max(1);
    let mut at = 0;
    while at < n {
        let mut part = region.clone();
        if let (Some(offset), Some(extent)) = (part.offset.get_mut(axis), part.extent.get_mut(axis)) {
            *offset += at;
            *extent = step.min(n - at);
        }
        cut_box(&part, itemsize, cut);
        at += step;
    }
}

/// The new bytes that nobody has taken, and the checksums of all blocks.
struct NewBytes {
    block_bytes: usize,
    bytes: Vec<u8>,
    /// Leading bytes of `bytes` whose blocks have a checksum.
    summed: usize,
    /// Bytes that were taken.
    taken: u64,
    crcs: Vec<u32>,
}

impl NewBytes {
    fn new(block_bytes: u64) -> Self {
        Self { block_bytes: block_bytes as usize, bytes: Vec::new(), summed: 0, taken: 0, crcs: Vec::new() }
    }

    fn push(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
        let whole = (self.bytes.len() - self.summed) / self.block_bytes * self.block_bytes;
        self.sum(self.summed + whole);
    }

    fn sum(&mut self, end: usize) {
        let blocks = self.bytes.get(self.summed..end).unwrap_or_default();
        self.crcs.extend(block::crcs(blocks, self.block_bytes as u64));
        self.summed = end;
    }

    /// Adds zeros up to a multiple of `alignment`. Returns the offset in the file.
    fn align(&mut self, alignment: u64) -> Result<u64> {
        let end = self.taken + self.bytes.len() as u64;
        let aligned = end.next_multiple_of(alignment);
        if aligned > MAX_FILE_BYTES {
            let what = "bytes of a data file".to_owned();
            return Err(Error::Limit { what, found: aligned, limit: MAX_FILE_BYTES });
        }
        self.push([0; PAGE as usize].get(..(aligned - end) as usize).unwrap_or_default());
        Ok(aligned)
    }

    /// The last block may be short.
    fn end_blocks(&mut self) {
        self.sum(self.bytes.len());
    }

    /// Returns the number of bytes that can be taken.
    fn ready(&self) -> usize {
        self.summed
    }

    fn take(&mut self, most: usize) -> Vec<u8> {
        let rest = self.bytes.split_off(most.min(self.summed));
        let taken = std::mem::replace(&mut self.bytes, rest);
        self.summed -= taken.len();
        self.taken += taken.len() as u64;
        taken
    }
}

#[cfg(test)]
mod tests;
