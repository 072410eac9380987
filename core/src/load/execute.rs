//! Executes read plans: checks every block, then copies the wanted bytes.

use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ops::Range;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use super::destination::{Destination, Staged, Started};
use super::file_set::{FileInfo, FileSet};
use super::geometry::Strided;
use super::options::{LoadFailure, LoadOptions, LoadStats};
use super::pipeline::{self, Sink};
use super::schedule::{Cell, Schedule};
use crate::format::index::Index;
use crate::io::Disk;
use crate::read_plan::ReadPlan;
use crate::sys::Scatter;
use crate::{Error, Result};

/// Restores the plan's bytes into the targets. Every byte comes from a block with a valid checksum.
/// Damage is [`Error::Corrupt`] with leaf, file and block. A failure lists the targets that were
/// already written to.
///
/// Uses at most `options.budget_bytes` of buffers besides the targets.
pub fn execute<'a>(
    disk: &dyn Disk,
    files: &FileSet,
    index: &Index,
    plan: &ReadPlan,
    targets: impl IntoIterator<Item = impl Into<Destination<'a>>>,
    options: &LoadOptions,
) -> Result<LoadStats, LoadFailure> {
    execute_while(disk, files, index, plan, targets, options, &mut |_| true)
}

/// Like [`execute`], with a callback. `go_on` gets the bytes done, between reads; `false` cancels
/// the restore.
pub fn execute_while<'a>(
    disk: &dyn Disk,
    files: &FileSet,
    index: &Index,
    plan: &ReadPlan,
    targets: impl IntoIterator<Item = impl Into<Destination<'a>>>,
    options: &LoadOptions,
    go_on: &mut dyn FnMut(u64) -> bool,
) -> Result<LoadStats, LoadFailure> {
    let mut copies: Vec<Strided> = Vec::with_capacity(plan.copies.len());
    let mut numbers = Vec::with_capacity(plan.copies.len());
    for copy in &plan.copies {
        let strided = Strided::new(copy).map_err(|what| unfit(index, copy.leaf, &what))?;
        numbers.push(strided.is_some().then_some(copies.len() as u32));
        copies.extend(strided);
    }
    let wanted = copies.iter().fold(0_u64, |bytes, copy| bytes.saturating_add(copy.bytes()));
    let (schedule, windows, lists) =
        Schedule::of_plan(plan, &copies, &numbers, &mut |file| files.layout(file))?;
    let mut infos = HashMap::new();
    for read in &schedule.reads {
        if let Entry::Vacant(place) = infos.entry(read.file) {
            place.insert(files.info(read.file)?);
        }
    }
    // Dropping the guard, on every return path, ends all writing to the targets, even by threads
    // that hang.
    let targets = targets.into_iter().map(Into::into).collect();
    let guard = Scatter::open(targets, copies, windows, lists)?;
    let sink = Arc::new(Scatterer {
        scatter: guard.share(),
        infos,
        cells: schedule.cells.clone(),
        culprits: Mutex::default(),
        copied: AtomicU64::new(0),
        verified: AtomicU64::new(0),
    });
    let result = pipeline::run(disk, files, schedule, &sink, options, go_on);
    drop(guard);
    let copied = sink.copied.load(Ordering::Acquire);
    let result = result.and_then(|stats| {
        if copied == wanted {
            return Ok(stats);
        }
        Err(Error::internal(
            format!("a read plan that fills {wanted} bytes"),
            format!("one that fills {copied}"),
        ))
    });
    match result {
        Ok(stats) => Ok(LoadStats {
            bytes_copied: copied,
            blocks_verified: sink.verified.load(Ordering::Acquire),
            ..stats
        }),
        Err(error) => {
            Err(LoadFailure { error: sink.name(error, index), overwritten: sink.scatter.overwritten() })
        }
    }
}

fn unfit(index: &Index, leaf: u32, what: &str) -> Error {
    Error::internal(format!("a valid read plan of leaf `{}`", index.tree.leaf_path(leaf)), what)
}

/// Checks cells and scatters them.
struct Scatterer {
    scatter: Arc<Scatter>,
    infos: HashMap<u32, Arc<FileInfo>>,
    cells: Vec<Cell>,
    /// The damaged blocks, each with the leaf that needs it.
    culprits: Mutex<Vec<Culprit>>,
    copied: AtomicU64,
    verified: AtomicU64,
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
        let bytes = block.as_ref().map(|(_, bytes)| bytes.clone());
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
        let Some((cell, info)) =
            self.cells.get(number).and_then(|cell| Some((cell, self.infos.get(&cell.file)?)))
        else {
            return Err(Error::internal("a cell of the schedule", format!("cell {number}")));
        };
        if copies.is_empty() {
            return Ok(());
        }
        // Unneeded blocks may be damaged: they are not checked.
        let first = info.block_of(cell.bytes.start);
        let count = cell.bytes.end.div_ceil(info.block_bytes) - first;
        let mut needed = vec![false; count as usize];
        for &copy in copies {
            let Some(copy) = self.scatter.copies().get(copy as usize) else { continue };
            let start = copy.src.start.max(cell.bytes.start);
            let end = copy.src.end.min(cell.bytes.end);
            if start < end {
                let range =
                    (info.block_of(start) - first) as usize..=(info.block_of(end - 1) - first) as usize;
                needed.get_mut(range).unwrap_or_default().fill(true);
            }
        }
        for (block, bytes) in (first..).zip(staged.chunks(info.block_bytes as usize)) {
            if needed.get((block - first) as usize) == Some(&true) {
                info.check(block, bytes).map_err(|bad| {
                    self.damage(number, info.path.clone(), Some((block, info.bytes_of(block))), bad.what())
                })?;
                self.verified.fetch_add(1, Ordering::Relaxed);
            }
        }
        let copied = self.scatter.put(number, staged, started)?;
        self.copied.fetch_add(copied, Ordering::AcqRel);
        Ok(())
    }

    fn failed(&self, cells: Range<usize>, error: Error) -> Result<()> {
        Err(match error {
            Error::Corrupt { file, leaf: None, block: None, what } => {
                let hit = cells.clone().find(|&cell| !self.scatter.copies_of(cell).is_empty());
                self.damage(hit.unwrap_or(cells.start), file, None, what)
            }
            other => other,
        })
    }
}
