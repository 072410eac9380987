//! Decides which parts of which files are read, in which order, and for which copies. A dry run
//! shows the same reads ([`super::plan`]).
//!
//! The blocks that the copies need are joined if a small gap lies between them ([`ReadLimits`]).
//! Joined ranges are cut into *reads* (one transfer each), and reads into *cells*. Cells are the
//! unit of checking and copying. They are small, so that a cell is still in the core's cache when
//! it is copied.

use std::collections::HashMap;
use std::ops::Range;

use super::file_set::FileInfos;
use super::options::ReadLimits;
use crate::read_plan::EncodedChunk;
use crate::sys::{CopyDim, ScatterWindow, Strided, walk};
use crate::{Error, Result};

/// Bytes of a cell, unless one block is larger: half of a typical second-level cache.
pub(super) const CELL_BYTES: u64 = 512 << 10;

/// Minimum part of a joined range that copies need, for a read past the page cache.
const DENSE_NUMERATOR: u64 = 3;
const DENSE_DENOMINATOR: u64 = 4;

/// One transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ScheduledRead {
    /// Ordinal of the file.
    pub(super) file: u32,
    /// Bytes of the file.
    pub(super) bytes: Range<u64>,
    /// The cells, which cover `bytes`.
    pub(super) cells: Range<usize>,
    /// True if copies need only a part of the bytes, such as columns of a matrix. Other ranks of
    /// the machine often need the rest.
    pub(super) sparse: bool,
}

/// The unit of checking and copying: whole blocks. The last block of a file may be short.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cell {
    pub(super) file: u32,
    pub(super) bytes: Range<u64>,
    /// The compressed chunk that they are read for.
    pub(super) encoded: Option<EncodedChunk>,
}

/// The reads of a run, in file order. Those from several machines are mixed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Schedule {
    pub(super) limits: ReadLimits,
    pub(super) reads: Vec<ScheduledRead>,
    pub(super) cells: Vec<Cell>,
    /// Memory that decoding a cell takes, at most.
    pub(super) decoding_bytes: usize,
}

/// Whole blocks that a copy needs.
#[derive(Clone, Debug)]
struct Need {
    file: u32,
    bytes: Range<u64>,
    copy: u32,
    /// Bytes of them that it copies.
    copied: u64,
}

impl Schedule {
    pub(super) fn new(limits: ReadLimits) -> Self {
        Self { limits, reads: Vec::new(), cells: Vec::new(), decoding_bytes: 0 }
    }

    /// Appends a range of whole blocks, cut into reads and cells.
    pub(super) fn push(&mut self, file: u32, bytes: Range<u64>, block_bytes: u64, sparse: bool) {
        let cell = CELL_BYTES.next_multiple_of(block_bytes);
        let read = self.limits.read_bytes.next_multiple_of(cell);
        let mut at = bytes.start;
        while at < bytes.end {
            let end = at.saturating_add(read).min(bytes.end);
            let first = self.cells.len();
            let mut start = at;
            while start < end {
                let next = start.saturating_add(cell).min(end);
                self.cells.push(Cell { file, bytes: start..next, encoded: None });
                start = next;
            }
            self.reads.push(ScheduledRead { file, bytes: at..end, cells: first..self.cells.len(), sparse });
            at = end;
        }
    }

    /// Mixes the reads from several machines, so that all of them are read from at the same time.
    /// The reads of each keep their order, and its part of the bytes comes evenly.
    pub(super) fn mix(&mut self, source: impl Fn(u32) -> u64) {
        let files =
            self.reads.chunk_by(|one, other| one.file == other.file).filter_map(|reads| reads.first());
        let sources: HashMap<u32, u64> = files.map(|read| (read.file, source(read.file))).collect();
        let mut each = sources.values();
        let first = each.next();
        if each.all(|other| Some(other) == first) {
            return;
        }
        let of = |read: &ScheduledRead| sources.get(&read.file).copied().unwrap_or_default();
        let mut totals: HashMap<u64, u64> = HashMap::new();
        for read in &self.reads {
            *totals.entry(of(read)).or_default() += read.bytes.end - read.bytes.start;
        }
        let mut before: HashMap<u64, u64> = HashMap::new();
        let mut placed: Vec<(f64, ScheduledRead)> = Vec::with_capacity(self.reads.len());
        for read in std::mem::take(&mut self.reads) {
            let (source, bytes) = (of(&read), read.bytes.end - read.bytes.start);
            let total = totals.get(&source).copied().unwrap_or_default().max(1);
            let done = before.entry(source).or_default();
            placed.push((*done as f64 / total as f64, read));
            *done += bytes;
        }
        placed.sort_by(|(one, _), (other, _)| one.total_cmp(other));
        self.reads = placed.into_iter().map(|(_, read)| read).collect();
    }

    /// Returns the bytes to read.
    pub(super) fn bytes(&self) -> u64 {
        self.reads.iter().map(|read| read.bytes.end - read.bytes.start).sum()
    }

    /// Returns the schedule of copies, with the windows and copy lists of a
    /// [`crate::sys::Scatter`]: window `i` is cell `i`. `infos` has the copies' files.
    pub(super) fn of_copies(
        copies: &[Strided],
        infos: &FileInfos,
        limits: ReadLimits,
    ) -> Result<(Self, Vec<ScatterWindow>, Vec<u32>)> {
        let needs = needs(copies, infos, limits.max_gap_bytes)?;
        Ok(Self::of_needs(&needs, infos, limits))
    }

    /// Joins needs that are in file order.
    fn of_needs(
        mut needs: &[Need],
        infos: &FileInfos,
        limits: ReadLimits,
    ) -> (Self, Vec<ScatterWindow>, Vec<u32>) {
        let mut schedule = Self::new(limits);
        let (mut windows, mut lists) = (Vec::new(), Vec::new());
        while let Some(Need { file, bytes: Range { start, mut end }, .. }) = needs.first().cloned() {
            let joins = |need: &&Need| {
                let joins = need.file == file && need.bytes.start <= end.saturating_add(limits.max_gap_bytes);
                end = if joins { end.max(need.bytes.end) } else { end };
                joins
            };
            let count = needs.iter().take_while(joins).count();
            let (joined, rest) = needs.split_at(count);
            needs = rest;
            let block_bytes = infos.get(&file).map_or(1, |info| info.block_bytes);
            let first = schedule.cells.len();
            let copied = joined.iter().fold(0_u64, |sum, need| sum.saturating_add(need.copied));
            let sparse = end - start > CELL_BYTES
                && copied.saturating_mul(DENSE_DENOMINATOR) < (end - start).saturating_mul(DENSE_NUMERATOR);
            schedule.push(file, start..end, block_bytes, sparse);
            // Cells cover the range. All except the last have the same length, which divides a
            // read.
            let cell_bytes = CELL_BYTES.next_multiple_of(block_bytes);
            let cell_of = |byte: u64| ((byte - start) / cell_bytes) as usize;
            let mut pairs: Vec<(usize, u32)> = joined
                .iter()
                .flat_map(|need| {
                    let cells = cell_of(need.bytes.start)..=cell_of(need.bytes.end - 1);
                    cells.map(|cell| (cell, need.copy))
                })
                .collect();
            pairs.sort_unstable();
            pairs.dedup();
            let mut pairs = pairs.into_iter().peekable();
            for (i, cell) in schedule.cells.get(first..).unwrap_or_default().iter().enumerate() {
                let listed = lists.len();
                while let Some((_, number)) = pairs.next_if(|&(of, _)| of == i) {
                    lists.push(number);
                }
                let copies = listed..lists.len();
                windows.push(ScatterWindow { file, bytes: cell.bytes.clone(), copies });
            }
        }
        (schedule, windows, lists)
    }
}

/// Returns the blocks that the copies need, in file order. Rows of one copy that are at most
/// `max_gap` apart are one need.
fn needs(copies: &[Strided], infos: &FileInfos, max_gap: u64) -> Result<Vec<Need>> {
    let mut needs: Vec<Need> = Vec::with_capacity(copies.len());
    for (number, copy) in (0_u32..).zip(copies) {
        let info = infos.get(&copy.file).ok_or_else(|| {
            Error::internal("the facts about each file of a read", format!("none about file {}", copy.file))
        })?;
        let (block, data_end) = (info.block_bytes, info.data_end);
        if copy.src.end > data_end {
            let what = format!(
                "the index says that data reach to byte {}, but the file's blocks end at {data_end}",
                copy.src.end
            );
            return Err(Error::corrupt(info.path.clone(), what));
        }
        spans(copy, max_gap.saturating_add(1).max(block), &mut |span, copied| {
            let end = span.end.checked_next_multiple_of(block).unwrap_or(data_end).min(data_end);
            let bytes = span.start / block * block..end;
            match needs.last_mut() {
                Some(last)
                    if last.copy == number && (last.bytes.start..=last.bytes.end).contains(&bytes.start) =>
                {
                    last.bytes.end = last.bytes.end.max(bytes.end);
                    last.copied += copied;
                }
                _ => needs.push(Need { file: copy.file, bytes, copy: number, copied }),
            }
        });
    }
    needs.sort_by_key(|need| (need.file, need.bytes.start, need.bytes.end));
    Ok(needs)
}

/// Calls `add` with the byte ranges that a copy reads, and with how many of the bytes it copies.
/// Rows with less than `apart` bytes between them are one range.
fn spans(copy: &Strided, apart: u64, add: &mut dyn FnMut(Range<u64>, u64)) {
    let width = |dims: &[CopyDim]| copy.unit + dims.iter().map(|dim| (dim.extent - 1) * dim.src).sum::<u64>();
    // The outer dimensions, down to the last with rows that far apart, are walked.
    let mut walked = (copy.dims.as_slice(), [].as_slice());
    while let Some((last, outer)) = walked.0.split_last() {
        if last.src.saturating_sub(width(walked.1)) >= apart {
            break;
        }
        walked = (outer, copy.dims.get(outer.len()..).unwrap_or_default());
    }
    let width = width(walked.1);
    let copied = walked.1.iter().fold(copy.unit, |bytes, dim| bytes.saturating_mul(dim.extent));
    walk(walked.0, copy.src.start, 0, &mut |src, _| add(src..src + width, copied));
}

#[cfg(test)]
mod tests;
