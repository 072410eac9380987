//! Compressed chunks of our own files: which of them a read needs, and how they are decoded.
//!
//! A chunk is one cell. Its blocks are checked first, then it is decoded whole, and the copies take
//! what they need. Copies address its decoded bytes as a file of their own, whose number comes
//! behind those of the real files.

use std::collections::BTreeMap;
use std::ops::Range;

use super::buffers::ReadBuffers;
use super::file_set::FileInfos;
use super::schedule::{Cell, Schedule, ScheduledRead};
use crate::format::planes;
use crate::limits::MAX_PLANES_BYTES;
use crate::read_plan::EncodedChunk;
use crate::sys::{Buffer, ScatterWindow, Strided};
use crate::{Error, Result};

/// The compressed chunks of a read, in file order.
#[derive(Debug, Default)]
pub(super) struct EncodedChunks {
    /// The number of the first one.
    first: u32,
    /// The file of each.
    chunks: Vec<(u32, EncodedChunk)>,
}

impl EncodedChunks {
    /// Numbers chunks from `first` on, and gives the numbers to their copies.
    pub(super) fn number(first: u32, copies: &mut [(Strided, EncodedChunk)]) -> Result<Self> {
        let mut numbers: BTreeMap<(u32, EncodedChunk), u32> =
            copies.iter().map(|(copy, chunk)| ((copy.file, *chunk), 0)).collect();
        for (number, entry) in numbers.values_mut().enumerate() {
            let number = u32::try_from(number).ok().and_then(|number| first.checked_add(number));
            *entry = number
                .filter(|&number| number < u32::MAX)
                .ok_or_else(|| Error::internal("chunks with 32-bit numbers", "more"))?;
        }
        for (copy, chunk) in copies {
            copy.file = numbers.get(&(copy.file, *chunk)).copied().unwrap_or(u32::MAX);
        }
        Ok(Self { first, chunks: numbers.into_keys().collect() })
    }

    /// Returns the memory that decoding one of them takes, at most.
    pub(super) fn decoding_bytes(&self) -> usize {
        2 * self.chunks.iter().map(|(_, chunk)| chunk.decoded as usize).max().unwrap_or_default()
    }

    /// Adds the reads of the chunks to a schedule. `copies` are those of the chunks, and the first
    /// one has the number `first_copy`.
    pub(super) fn schedule(
        &self,
        copies: &[Strided],
        first_copy: usize,
        infos: &FileInfos,
        (schedule, windows, lists): &mut (Schedule, Vec<ScatterWindow>, Vec<u32>),
    ) -> Result<()> {
        let mut of_chunks: Vec<(u32, u32)> =
            copies.iter().enumerate().map(|(at, copy)| (copy.file, (first_copy + at) as u32)).collect();
        of_chunks.sort_unstable();
        let mut of_chunks = of_chunks.into_iter().peekable();
        let limits = schedule.limits;
        let mut joined: Option<ScheduledRead> = None;
        for (number, &(file, chunk)) in (self.first..).zip(&self.chunks) {
            let info = infos.get(&file).ok_or_else(|| {
                Error::internal("the facts about each file of a read", format!("none about file {file}"))
            })?;
            let EncodedChunk { offset, length, decoded, .. } = chunk;
            let end = offset.checked_add(length).filter(|&end| length > 0 && end <= info.data_end);
            let (Some(end), true) = (end, decoded <= MAX_PLANES_BYTES) else {
                let what = format!(
                    "the index names a compressed chunk of {length} bytes at {offset}, which cannot be there"
                );
                return Err(Error::corrupt(info.path.clone(), what));
            };
            let block = info.block_bytes;
            let bytes = offset / block * block..end.next_multiple_of(block).min(info.data_end);
            let listed = lists.len();
            while let Some((_, copy)) = of_chunks.next_if(|&(of, _)| of == number) {
                lists.push(copy);
            }
            let cell = schedule.cells.len();
            windows.push(ScatterWindow { file: number, bytes: 0..decoded, copies: listed..lists.len() });
            schedule.cells.push(Cell { file, bytes: bytes.clone(), encoded: Some(chunk) });
            match &mut joined {
                Some(read)
                    if read.file == file
                        && bytes.start <= read.bytes.end.saturating_add(limits.max_gap_bytes)
                        && bytes.end - read.bytes.start <= limits.read_bytes =>
                {
                    read.bytes.end = read.bytes.end.max(bytes.end);
                    read.cells.end = cell + 1;
                }
                other => {
                    let read = ScheduledRead { file, bytes, cells: cell..cell + 1, sparse: false };
                    schedule.reads.extend(other.replace(read));
                }
            }
        }
        schedule.reads.extend(joined);
        schedule.decoding_bytes = self.decoding_bytes();
        Ok(())
    }
}

/// Returns the bytes of a cell that its chunk has.
fn stored_range(cell: &Range<u64>, chunk: &EncodedChunk) -> Option<Range<usize>> {
    let start = chunk.offset.checked_sub(cell.start)?;
    Some(start as usize..start.checked_add(chunk.length)? as usize)
}

/// Decodes the chunk of a cell whose blocks were checked. The error describes the damage.
pub(super) fn decode(
    cell: &Range<u64>,
    chunk: &EncodedChunk,
    bytes: &[u8],
) -> Result<Result<Buffer, String>> {
    let stored = stored_range(cell, chunk).and_then(|range| bytes.get(range));
    let stored =
        stored.ok_or_else(|| Error::internal("a chunk inside its cell", "one that passes its end"))?;
    let mut buffer = ReadBuffers::shared().take(chunk.decoded as usize)?;
    let out = buffer.get_mut(..chunk.decoded as usize).unwrap_or_default();
    let decoded = planes::decode(stored, usize::from(chunk.planes), out);
    Ok(match decoded {
        Ok(()) => Ok(buffer),
        Err(what) => {
            ReadBuffers::shared().give(buffer);
            Err(format!("its compressed chunk at byte {} cannot be decoded: {what}", chunk.offset))
        }
    })
}
