//! Reads everything and reports all damage, instead of stopping at the first error.

use std::collections::{HashMap, HashSet};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::decode;
use super::destination::Started;
use super::file_set::{FileInfo, FileSet, check_page};
use super::guards::GuardCheck;
use super::options::LoadOptions;
use super::pipeline::Sink;
use super::schedule::{Cell, Schedule};
use crate::format::index::{Extent, Index};
use crate::io::Disk;
use crate::sys::Staged;
use crate::{Error, Result};

/// One damaged block or file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Damage {
    /// The file.
    pub file: PathBuf,
    /// The block; `None` if the whole file or its footer is damaged.
    pub block: Option<u64>,
    /// Numbers of the leaves that have bytes there, ties included. Empty if only padding or an
    /// unused part is damaged.
    pub leaves: Vec<u32>,
    /// The failed check.
    pub what: String,
}

/// The findings of a verification.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct VerifyReport {
    /// All damage, by file and block. Empty if the files are intact.
    pub damages: Vec<Damage>,
    /// Files read.
    pub files: u64,
    /// Blocks whose checksum was verified.
    pub blocks: u64,
    /// Bytes of blocks that were read.
    pub bytes: u64,
    /// Bytes among them for which no checksum is known.
    pub unguarded_bytes: u64,
}

/// The progress of a verification, in bytes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct VerifyProgress {
    /// Bytes verified so far.
    pub done: u64,
    /// Bytes to verify in total.
    pub total: u64,
}

/// Reads and checks every block and every footer page of every file. Damage is part of the report;
/// an error means that the verification itself failed. `progress` is called on this thread and
/// cancels by returning `false` ([`Error::Cancelled`]).
pub fn verify(
    disk: &dyn Disk,
    files: &FileSet,
    index: &Index,
    options: &LoadOptions,
    progress: &mut dyn FnMut(VerifyProgress) -> bool,
) -> Result<VerifyReport> {
    // Other copies do not make these files right.
    let alone = files.alone();
    let files = alone.as_ref().unwrap_or(files);
    let holders = Holders::of(index, files.len());
    let streams: HashSet<u32> =
        (0..files.len() as u32).filter(|&file| files.stream(file).is_some()).collect();
    let mut report = VerifyReport { files: (files.len() - streams.len()) as u64, ..VerifyReport::default() };
    let mut schedule = Schedule::new(options.limits);
    let mut infos = HashMap::new();
    let (mut decoded_bytes, mut guarded_bytes) = (0, 0);
    for file in 0..files.len() as u32 {
        let checked = files.info(file).and_then(|info| {
            let handle = files.ready(file, &(0..0))?;
            info.check_object(handle.as_ref())?;
            for page in &info.index_pages {
                check_page(handle.as_ref(), page)?;
            }
            Ok(info)
        });
        match checked {
            Ok(info) => {
                match files.stream(file) {
                    // Its bytes are also those of the file around it.
                    Some((stream, _)) => {
                        decoded_bytes += info.data_end;
                        guarded_bytes += if stream.crc.is_some() { stream.length } else { 0 };
                    }
                    None if !info.is_guarded() => {
                        report.unguarded_bytes +=
                            info.data_end.saturating_sub(files.guards().guarded_bytes(file));
                    }
                    None => {}
                }
                schedule.push(file, 0..info.data_end, info.block_bytes, false);
                report.damages.extend(holders.outside(file, &info));
                infos.insert(file, info);
            }
            Err(error) => {
                let what = damage(error)?;
                let leaves = holders.leaves(file, &(0..u64::MAX));
                report.damages.push(Damage { file: files.path(file), block: None, leaves, what });
            }
        }
    }
    let total = schedule.bytes();
    let checker = Arc::new(Checker {
        infos,
        streams,
        cells: schedule.cells.clone(),
        bad: Mutex::default(),
        unread: Mutex::default(),
        blocks: AtomicU64::new(0),
        guards: GuardCheck::new(files.guards()),
    });
    decode::run(disk, files, schedule, &checker, options, &mut |done| {
        progress(VerifyProgress { done, total })
    })?;
    checker.read_again(files)?;
    for (file, block, what) in std::mem::take(&mut *lock(&checker.bad)) {
        let info = checker.infos.get(&file).zip(block);
        let bytes = info.map_or(0..u64::MAX, |(info, block)| info.bytes_of(block));
        let leaves = holders.leaves(file, &bytes);
        report.damages.push(Damage { file: files.path(file), block, leaves, what });
    }
    for (range, crc32) in checker.guards.damaged() {
        let end = range.offset.saturating_add(range.length);
        let what = range.damage(crc32);
        let leaves = holders.leaves(range.file, &(range.offset..end));
        report.damages.push(Damage { file: files.path(range.file), block: None, leaves, what });
    }
    report.damages.sort_by(|a, b| (&a.file, a.block).cmp(&(&b.file, b.block)));
    report.blocks = checker.blocks.load(Ordering::Acquire);
    report.bytes = total - decoded_bytes;
    report.unguarded_bytes = report.unguarded_bytes.saturating_sub(guarded_bytes);
    Ok(report)
}

/// Returns the damage that an error describes, or the error itself if it is not about damage.
fn damage(error: Error) -> Result<String> {
    match error {
        Error::Corrupt { what, .. } | Error::Format { what, .. } => Ok(what),
        Error::Io { .. } | Error::Limit { .. } => Ok(error.to_string()),
        other => Err(other),
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Checks blocks and records the bad ones.
struct Checker {
    infos: HashMap<u32, Arc<FileInfo>>,
    cells: Vec<Cell>,
    /// The files that are compressed streams.
    streams: HashSet<u32>,
    /// File, block and failed check. A compressed stream is damaged as a whole.
    bad: Mutex<Vec<(u32, Option<u64>, String)>>,
    /// Cells whose read failed. Not every block in them is bad.
    unread: Mutex<Vec<Range<usize>>>,
    blocks: AtomicU64,
    guards: GuardCheck,
}

impl Checker {
    fn check(&self, file: u32, info: &FileInfo, block: u64, bytes: &[u8]) {
        self.blocks.fetch_add(1, Ordering::Relaxed);
        if let Err(bad) = info.check(block, bytes) {
            lock(&self.bad).push((file, Some(block), bad.what()));
        }
    }

    /// Reads failed cells again block by block, to separate the bad blocks from their neighbours.
    fn read_again(&self, files: &FileSet) -> Result<()> {
        for number in std::mem::take(&mut *lock(&self.unread)).into_iter().flatten() {
            let Some(cell) = self.cells.get(number) else { continue };
            let Some(info) = self.infos.get(&cell.file) else { continue };
            for block in info.block_of(cell.bytes.start)..cell.bytes.end.div_ceil(info.block_bytes) {
                let range = info.bytes_of(block);
                let len = range.end - range.start;
                let read = files
                    .ready(cell.file, &range)
                    .and_then(|handle| handle.read_at(range.start, len as usize))
                    .and_then(|bytes| {
                        let found = range.start + bytes.len() as u64;
                        if found < range.end {
                            Err(files.short(cell.file, found, range.end))
                        } else {
                            Ok(bytes)
                        }
                    });
                match read {
                    Ok(bytes) => {
                        self.guards.add(cell.file, range.start, &bytes);
                        self.check(cell.file, info, block, &bytes);
                    }
                    Err(error) => lock(&self.bad).push((cell.file, Some(block), damage(error)?)),
                }
            }
        }
        Ok(())
    }
}

impl Sink for Checker {
    fn cell(&self, number: usize, bytes: &Staged, _: &mut Started) -> Result<()> {
        let found = self.cells.get(number).and_then(|cell| Some((cell, self.infos.get(&cell.file)?)));
        let Some((cell, info)) = found else {
            return Err(Error::internal("a cell of the schedule", format!("cell {number}")));
        };
        self.guards.add(cell.file, cell.bytes.start, bytes);
        let first = info.block_of(cell.bytes.start);
        for (block, bytes) in (first..).zip(bytes.chunks(info.block_bytes as usize)) {
            self.check(cell.file, info, block, bytes);
        }
        Ok(())
    }

    fn failed(&self, cells: Range<usize>, error: Error) -> Result<()> {
        let what = damage(error)?;
        match self.cells.get(cells.start) {
            Some(cell) if self.streams.contains(&cell.file) => lock(&self.bad).push((cell.file, None, what)),
            _ => lock(&self.unread).push(cells),
        }
        Ok(())
    }
}

/// Finds the leaves that have bytes in a range of a file.
struct Holders {
    /// For each file: extents with their leaves, by offset, and the furthest end so far. Extents of
    /// a damaged index may overlap.
    files: Vec<Vec<(Extent, u32, u64)>>,
}

impl Holders {
    fn of(index: &Index, files: usize) -> Self {
        let mut holders: Vec<Vec<(Extent, u32, u64)>> = vec![Vec::new(); files];
        for leaf in 0..index.leaves.len() as u32 {
            let Some((_, record)) = index.resolve(leaf) else { continue };
            for extent in record.extents() {
                if let Some(file) = extent.source.file()
                    && let Some(list) = holders.get_mut(file as usize)
                {
                    list.push((*extent, leaf, 0));
                }
            }
        }
        for list in &mut holders {
            list.sort_by_key(|(extent, leaf, _)| (extent.offset, *leaf));
            let mut furthest = 0;
            for (extent, _, end) in list {
                furthest = extent.offset.saturating_add(extent.length).max(furthest);
                *end = furthest;
            }
        }
        Self { files: holders }
    }

    /// Returns the leaves with bytes in that range of a file, in ascending order.
    fn leaves(&self, file: u32, bytes: &Range<u64>) -> Vec<u32> {
        let list = self.files.get(file as usize).map(Vec::as_slice).unwrap_or_default();
        let before = list.partition_point(|(extent, _, _)| extent.offset < bytes.end);
        let mut leaves: Vec<u32> = list
            .iter()
            .take(before)
            .rev()
            .take_while(|(_, _, furthest)| *furthest > bytes.start)
            .filter(|(extent, _, _)| {
                extent.length > 0 && extent.offset.saturating_add(extent.length) > bytes.start
            })
            .map(|(_, leaf, _)| *leaf)
            .collect();
        leaves.sort_unstable();
        leaves.dedup();
        leaves
    }

    /// Returns the damage if extents of the index exceed the file's blocks.
    fn outside(&self, file: u32, info: &FileInfo) -> Option<Damage> {
        let list = self.files.get(file as usize)?;
        let mut leaves: Vec<u32> = list
            .iter()
            .filter(|(extent, _, _)| {
                extent.offset.checked_add(extent.length).is_none_or(|end| end > info.data_end)
            })
            .map(|(_, leaf, _)| *leaf)
            .collect();
        leaves.sort_unstable();
        leaves.dedup();
        if leaves.is_empty() {
            return None;
        }
        let what = format!("the index names bytes behind the end of its blocks at {}", info.data_end);
        Some(Damage { file: info.path.clone(), block: None, leaves, what })
    }
}
