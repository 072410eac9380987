//! Carries out copies: checks every block, then copies the wanted bytes.

use std::collections::{BTreeSet, HashMap};
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::buffers::ReadBuffers;
use super::decode;
use super::destination::{Destination, Devices, Started, ToDevices};
use super::encoded::{self, EncodedChunks};
use super::file_set::{BadBlock, FileInfo, FileInfos, FileSet};
use super::mender::Mender;
use super::options::{LoadFailure, LoadOptions, LoadStats, ReadLimits};
use super::pipeline::{OnProgress, Sink};
use super::schedule::{Cell, Schedule, ScheduledRead};
use crate::format::index::Index;
use crate::io::Disk;
use crate::read_plan::{BoxCopy, EncodedChunk};
use crate::sys::{Scatter, ScatterTarget, ScatterWindow, Staged, Strided, each};
use crate::{Error, Result};

/// Restores the bytes of the copies into the targets. Every byte comes from a block with a valid
/// checksum. Damage is [`Error::Corrupt`] with leaf, file and block. A failure lists the targets
/// that were already written to.
///
/// Uses at most `options.budget_bytes` of buffers besides the targets.
pub fn execute<'a>(
    disk: &dyn Disk,
    files: &FileSet,
    index: &Index,
    copies: &[BoxCopy],
    targets: impl IntoIterator<Item = impl Into<Destination<'a>>>,
    options: &LoadOptions,
) -> Result<LoadStats, LoadFailure> {
    execute_while(disk, files, index, copies, targets, options, &mut |_| true)
}

/// Like [`execute`], with a callback. `go_on` gets the bytes done, between reads; `false` cancels
/// the restore.
pub fn execute_while<'a>(
    disk: &dyn Disk,
    files: &FileSet,
    index: &Index,
    copies: &[BoxCopy],
    targets: impl IntoIterator<Item = impl Into<Destination<'a>>>,
    options: &LoadOptions,
    go_on: &mut dyn FnMut(u64) -> bool,
) -> Result<LoadStats, LoadFailure> {
    execute_computing(disk, files, (index, copies), None, targets, options, go_on)
}

/// Cells of targets whose bytes the caller computes.
pub struct ComputedCells<'c> {
    /// The place of each. Its source is the cell's row-major bytes.
    pub copies: Vec<BoxCopy>,
    /// Returns the bytes of the next cells: at least one.
    pub compute: Compute<'c>,
}

/// Computes cells. It gets the number of the first one, and the progress callback.
pub type Compute<'c> = &'c mut dyn FnMut(usize, OnProgress<'_>) -> Result<Vec<Vec<u8>>>;

/// Like [`execute_while`] for copies of that index, then for computed cells.
pub fn execute_computing<'a>(
    disk: &dyn Disk,
    files: &FileSet,
    (index, copies): (&Index, &[BoxCopy]),
    computed: Option<ComputedCells<'_>>,
    targets: impl IntoIterator<Item = impl Into<Destination<'a>>>,
    options: &LoadOptions,
    go_on: &mut dyn FnMut(u64) -> bool,
) -> Result<LoadStats, LoadFailure> {
    let Prepared { mut copies, infos, schedule, mut windows, mut lists } =
        prepare(files, index, copies, options.limits)?;
    let first_cell = windows.len();
    let mut begin = 0;
    for cell in computed.iter().flat_map(|computed| &computed.copies) {
        // The cells are one behind the other in a file that no index has.
        let copy = BoxCopy { file: u32::MAX, src_offset: begin, ..cell.clone() };
        let wrong = |what: String| Error::internal("a cell with bytes", what);
        let copy = Strided::new(&copy).map_err(wrong)?.ok_or_else(|| wrong("none".to_owned()))?;
        let (number, bytes) = (lists.len(), begin..begin + copy.bytes());
        begin = bytes.end;
        lists.push(copies.len() as u32);
        windows.push(ScatterWindow { file: copy.file, bytes, copies: number..number + 1 });
        copies.push(copy);
    }
    let wanted = bytes_of(&copies);
    // Dropping the guard, on every return path, ends all writing to the targets, even by threads
    // that hang.
    let (targets, devices): (Vec<_>, Devices) = targets
        .into_iter()
        .map(|target| match target.into() {
            Destination::Host(target) => (ScatterTarget::Host(target), None),
            Destination::Device(device) => (ScatterTarget::Elsewhere(device.bytes()), Some(device)),
        })
        .unzip();
    let guard = Scatter::open(targets, copies, windows, lists)?;
    let sink = Arc::new(Scatterer {
        scatter: guard.share(),
        devices,
        infos,
        cells: schedule.cells.clone(),
        culprits: Mutex::default(),
        copied: AtomicU64::new(0),
        verified: AtomicU64::new(0),
        mender: files.is_own().then(|| Mender::new(files)),
        mended: AtomicU64::new(0),
        stall_timeout: options.stall_timeout,
    });
    let result = decode::run(disk, files, schedule, &sink, options, &mut *go_on).and_then(|stats| {
        if let Some(computed) = computed {
            sink.compute(computed, first_cell, options, go_on)?;
        }
        Ok(stats)
    });
    drop(guard);
    let copied = sink.copied.load(Ordering::Acquire);
    let result = result.and_then(|stats| {
        if copied == wanted {
            return Ok(stats);
        }
        Err(Error::internal(format!("reads that fill {wanted} bytes"), format!("reads that fill {copied}")))
    });
    match result {
        Ok(stats) => Ok(LoadStats {
            bytes_copied: copied,
            blocks_verified: sink.verified.load(Ordering::Acquire),
            pieces_mended: sink.mended.load(Ordering::Acquire),
            ..stats
        }),
        Err(error) => {
            Err(LoadFailure { error: sink.name(error, index), overwritten: sink.scatter.overwritten() })
        }
    }
}

/// The reads that [`execute`] makes in one file if the page cache holds none of them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileReads {
    /// Ordinal of the file in the index.
    pub file: u32,
    /// The byte range of each read, in file order.
    pub reads: Vec<Range<u64>>,
    /// Blocks that are read.
    pub blocks: u64,
    /// Bytes that are copied.
    pub wanted_bytes: u64,
}

/// Returns the reads that [`execute`] makes of these copies, by file. Opens the files, and reads no
/// data.
pub fn plan(
    files: &FileSet,
    index: &Index,
    copies: &[BoxCopy],
    limits: ReadLimits,
) -> Result<Vec<FileReads>> {
    let mut wanted: HashMap<u32, u64> = HashMap::new();
    for copy in copies {
        if let Ok(Some(strided)) = Strided::new(copy) {
            let bytes = wanted.entry(copy.file).or_default();
            *bytes = bytes.saturating_add(strided.bytes());
        }
    }
    let Prepared { infos, mut schedule, .. } = prepare(files, index, copies, limits)?;
    schedule.reads.sort_by_key(|read| (read.file, read.bytes.start));
    let mut planned: Vec<FileReads> = Vec::new();
    for ScheduledRead { file, bytes, .. } in schedule.reads {
        if planned.last().is_none_or(|last| last.file != file) {
            let wanted_bytes = wanted.get(&file).copied().unwrap_or_default();
            // A compressed stream is read whole.
            let stream = files.stream(file).map(|(stream, begin)| begin..begin + stream.length);
            planned.push(FileReads { file, reads: stream.into_iter().collect(), blocks: 0, wanted_bytes });
        }
        if files.stream(file).is_some() {
            continue;
        }
        if let (Some(planned), Some(info)) = (planned.last_mut(), infos.get(&file)) {
            planned.blocks += (bytes.end - bytes.start).div_ceil(info.block_bytes);
            planned.reads.push(bytes);
        }
    }
    Ok(planned)
}

/// Copies, and the reads that they need.
struct Prepared {
    /// The normal form of the copies that move something: those of compressed chunks come last.
    copies: Vec<Strided>,
    /// The facts about their files.
    infos: FileInfos,
    schedule: Schedule,
    /// The windows of a [`Scatter`], and its lists of copies.
    windows: Vec<ScatterWindow>,
    lists: Vec<u32>,
}

fn prepare(files: &FileSet, index: &Index, copies: &[BoxCopy], limits: ReadLimits) -> Result<Prepared> {
    if u32::try_from(copies.len()).is_err() {
        return Err(Error::internal("copies with 32-bit numbers", format!("{} copies", copies.len())));
    }
    let mut prepared = Vec::with_capacity(copies.len());
    let mut encoded = Vec::new();
    let mut needed = BTreeSet::new();
    for copy in copies {
        let strided = Strided::new(copy).map_err(|what| {
            let leaf = index.tree.leaf_path(copy.leaf);
            Error::internal(format!("a copy of leaf `{leaf}` that can be made"), what)
        })?;
        let Some(strided) = strided else { continue };
        needed.insert(strided.file);
        match copy.encoded {
            None => prepared.push(strided),
            Some(chunk) if strided.src.end <= chunk.decoded => encoded.push((strided, chunk)),
            Some(chunk) => {
                let leaf = index.tree.leaf_path(copy.leaf);
                let what = format!("a copy of leaf `{leaf}` inside the {} bytes of its chunk", chunk.decoded);
                return Err(Error::internal(what, format!("one that ends at byte {}", strided.src.end)));
            }
        }
    }
    let needed: Vec<u32> = needed.into_iter().collect();
    let found = each("stepwell-open", limits.files_at_once, &needed, |&file| files.info(file));
    let infos = needed.into_iter().zip(found).map(|(file, info)| Ok((file, info?)));
    let infos = infos.collect::<Result<FileInfos>>()?;
    let mut scheduled = Schedule::of_copies(&prepared, &infos, limits)?;
    let first = prepared.len();
    let chunks = EncodedChunks::number(files.len() as u32, &mut encoded)?;
    prepared.extend(encoded.into_iter().map(|(copy, _)| copy));
    chunks.schedule(prepared.get(first..).unwrap_or_default(), first, &infos, &mut scheduled)?;
    let (schedule, windows, lists) = scheduled;
    Ok(Prepared { copies: prepared, infos, schedule, windows, lists })
}

fn bytes_of(copies: &[Strided]) -> u64 {
    copies.iter().fold(0, |bytes, copy| bytes.saturating_add(copy.bytes()))
}

/// Checks cells and scatters them.
struct Scatterer {
    scatter: Arc<Scatter>,
    devices: Devices,
    infos: FileInfos,
    cells: Vec<Cell>,
    /// The damaged blocks, each with the leaf that needs it.
    culprits: Mutex<Vec<Culprit>>,
    copied: AtomicU64,
    verified: AtomicU64,
    /// Reads damaged cells of our own files again.
    mender: Option<Mender>,
    mended: AtomicU64,
    stall_timeout: Duration,
}

struct Culprit {
    file: PathBuf,
    block: Option<u64>,
    leaf: u32,
}

impl Scatterer {
    /// Records damage and the leaves that it affects. `block` is `None` if no single block is
    /// known.
    fn damage(&self, cell: usize, file: PathBuf, block: Option<(u64, Range<u64>)>, what: String) -> Error {
        let is_encoded = self.cells.get(cell).is_some_and(|cell| cell.encoded.is_some());
        // A compressed chunk is damaged as a whole.
        let bytes = block.as_ref().filter(|_| !is_encoded).map(|(_, bytes)| bytes.clone());
        let block = block.map(|(block, _)| block);
        let hit = self.scatter.copies_of(cell).iter().find_map(|&number| {
            let copy = self.scatter.copies().get(number as usize)?;
            bytes.as_ref().is_none_or(|bytes| overlap(&copy.src, bytes)).then_some(copy.leaf)
        });
        if let Some(leaf) = hit {
            let mut culprits = self.culprits.lock().unwrap_or_else(PoisonError::into_inner);
            culprits.push(Culprit { file: file.clone(), block, leaf });
        }
        Error::Corrupt { file, leaf: None, block, what }
    }

    /// Computes cells and scatters them.
    fn compute(
        &self,
        ComputedCells { copies, compute }: ComputedCells<'_>,
        first_cell: usize,
        options: &LoadOptions,
        go_on: OnProgress<'_>,
    ) -> Result<()> {
        let mut number = 0;
        while number < copies.len() {
            let cells = compute(number, &mut *go_on)?;
            if cells.is_empty() {
                return Err(Error::internal("a computed cell", "none"));
            }
            for bytes in cells {
                self.put_bytes(first_cell + number, &bytes, options.stall_timeout)?;
                number += 1;
            }
        }
        Ok(())
    }

    /// Scatters the bytes of a cell from memory of its own.
    fn put_bytes(&self, cell: usize, bytes: &[u8], stall_timeout: Duration) -> Result<()> {
        let mut buffer = ReadBuffers::shared().take(bytes.len())?;
        buffer.get_mut(..bytes.len()).unwrap_or_default().copy_from_slice(bytes);
        let buffer = Arc::new(buffer);
        let staged = Staged::new(&buffer, 0..bytes.len())
            .ok_or_else(|| Error::internal("a cell inside its buffer", "one that passes its end"))?;
        let mut started = Started::new(stall_timeout);
        let mut elsewhere = ToDevices { devices: &self.devices, started: &mut started };
        let put = self.scatter.put(cell, &staged, &mut elsewhere);
        // Wait also after an error: started copies must end before the restore does.
        let ended = started.wait();
        drop((staged, started));
        if let Some(buffer) = Arc::into_inner(buffer) {
            ReadBuffers::shared().give(buffer);
        }
        self.copied.fetch_add(put?, Ordering::AcqRel);
        ended
    }

    /// Returns the first damaged block of a cell's bytes. Blocks that nobody needs are not checked:
    /// they may be damaged.
    fn bad_block(&self, number: usize, cell: &Cell, info: &FileInfo, bytes: &[u8]) -> Option<BadBlock> {
        let first = info.block_of(cell.bytes.start);
        let count = cell.bytes.end.div_ceil(info.block_bytes) - first;
        let mut needed = vec![false; count as usize];
        let sources = self.scatter.copies_of(number).iter().filter_map(|&copy| {
            // A compressed chunk needs all of its blocks.
            let copy = self.scatter.copies().get(copy as usize).filter(|_| cell.encoded.is_none())?;
            Some(copy.src.clone())
        });
        let encoded = cell.encoded.map(|chunk| chunk.offset..chunk.offset + chunk.length);
        for src in sources.chain(encoded) {
            let start = src.start.max(cell.bytes.start);
            let end = src.end.min(cell.bytes.end);
            if start < end {
                let range =
                    (info.block_of(start) - first) as usize..=(info.block_of(end - 1) - first) as usize;
                needed.get_mut(range).unwrap_or_default().fill(true);
            }
        }
        let blocks = (first..).zip(bytes.chunks(info.block_bytes as usize)).zip(needed);
        for ((block, bytes), _) in blocks.filter(|(_, is_needed)| *is_needed) {
            if let Err(bad) = info.check(block, bytes) {
                return Some(bad);
            }
            self.verified.fetch_add(1, Ordering::Relaxed);
        }
        None
    }

    /// Reads a cell again (perhaps from the same file, too) and scatters it. Returns false if no
    /// copy of it is right.
    fn mend(&self, number: usize, from_here: bool) -> Result<bool> {
        let Some((cell, info)) = self.cell_of(number) else { return Ok(false) };
        // Other copies have checked their bytes. This file may have lost the checksums of its own.
        let is_right = |bytes: &[u8], is_here: bool| match self.bad_block(number, cell, info, bytes) {
            Some(bad) => !is_here && !info.knows_checksum_of(bad.block),
            None => true,
        };
        let read = |mender: &Mender| mender.read(cell.file, &cell.bytes, from_here, is_right);
        let mended = self.mender.as_ref().and_then(read);
        let Some(bytes) = mended else { return Ok(false) };
        if let Some(chunk) = &cell.encoded {
            let mut started = Started::new(self.stall_timeout);
            let put = self.put_encoded(number, (cell, chunk), &bytes, &mut started);
            // Wait also after an error: started copies must end before the restore does.
            let ended = started.wait();
            put.and(ended)?;
        } else {
            self.put_bytes(number, &bytes, self.stall_timeout)?;
        }
        self.mended.fetch_add(1, Ordering::AcqRel);
        Ok(true)
    }

    /// Decodes the chunk of a cell whose blocks were checked, and scatters it.
    fn put_encoded(
        &self,
        number: usize,
        (cell, chunk): (&Cell, &EncodedChunk),
        bytes: &[u8],
        started: &mut Started,
    ) -> Result<()> {
        let buffer = match encoded::decode(&cell.bytes, chunk, bytes)? {
            Ok(buffer) => Arc::new(buffer),
            Err(what) => {
                let path = self.infos.get(&cell.file).map(|info| info.path.clone());
                return Err(self.damage(number, path.unwrap_or_default(), None, what));
            }
        };
        let staged = Staged::new(&buffer, 0..chunk.decoded as usize)
            .ok_or_else(|| Error::internal("a chunk inside its buffer", "one that passes its end"))?;
        let put = self.scatter.put(number, &staged, &mut ToDevices { devices: &self.devices, started });
        drop(staged);
        // A device that still copies keeps the buffer, and frees it later.
        if let Some(buffer) = Arc::into_inner(buffer) {
            ReadBuffers::shared().give(buffer);
        }
        self.copied.fetch_add(put?, Ordering::AcqRel);
        Ok(())
    }

    fn cell_of(&self, number: usize) -> Option<(&Cell, &Arc<FileInfo>)> {
        self.cells.get(number).and_then(|cell| Some((cell, self.infos.get(&cell.file)?)))
    }

    /// Adds the leaf's name to an error. The threads do not know it.
    fn name(&self, error: Error, index: &Index) -> Error {
        match error {
            Error::Corrupt { file, leaf: None, block, what } => {
                let culprits = self.culprits.lock().unwrap_or_else(PoisonError::into_inner);
                let culprit = culprits.iter().find(|culprit| culprit.file == file && culprit.block == block);
                let leaf = culprit.map(|culprit| index.tree.leaf_path(culprit.leaf).to_string());
                Error::Corrupt { file, leaf, block, what }
            }
            other => other,
        }
    }
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

impl Sink for Scatterer {
    fn cell(&self, number: usize, staged: &Staged, started: &mut Started) -> Result<()> {
        let copies = self.scatter.copies_of(number);
        let Some((cell, info)) = self.cell_of(number) else {
            return Err(Error::internal("a cell of the schedule", format!("cell {number}")));
        };
        if copies.is_empty() {
            return Ok(());
        }
        if let Some(bad) = self.bad_block(number, cell, info, staged) {
            if self.mend(number, true)? {
                return Ok(());
            }
            let block = Some((bad.block, info.bytes_of(bad.block)));
            return Err(self.damage(number, info.path.clone(), block, bad.what()));
        }
        if let Some(chunk) = &cell.encoded {
            return self.put_encoded(number, (cell, chunk), staged, started);
        }
        let copied = self.scatter.put(number, staged, &mut ToDevices { devices: &self.devices, started })?;
        self.copied.fetch_add(copied, Ordering::AcqRel);
        Ok(())
    }

    fn failed(&self, cells: Range<usize>, error: Error) -> Result<()> {
        let mut wanted = cells.clone().filter(|&cell| !self.scatter.copies_of(cell).is_empty());
        // Not from this file again: its disk may hang.
        if wanted.try_fold(true, |all, cell| Ok::<_, Error>(all && self.mend(cell, false)?))? {
            return Ok(());
        }
        Err(match error {
            Error::Corrupt { file, leaf: None, block: None, what } => {
                let hit = cells.clone().find(|&cell| !self.scatter.copies_of(cell).is_empty());
                self.damage(hit.unwrap_or(cells.start), file, None, what)
            }
            other => other,
        })
    }
}
