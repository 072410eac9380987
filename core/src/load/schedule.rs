//! Decides which parts of which files are read, in which order, and for which copies.
//!
//! The ranges of a plan are rounded to whole blocks and joined if they touch. Then they are cut
//! into *reads* (one transfer each), and reads into *cells*. Cells are the unit of checking and
//! copying. They are small, so that a cell is still in the core's cache when it is copied.

use std::ops::Range;
use std::path::PathBuf;

use super::geometry::Strided;
use crate::read_plan::ReadPlan;
use crate::sys::ScatterWindow;
use crate::{Error, Result};

/// Bytes of a cell, unless one block is larger: half of a typical second-level cache.
pub(super) const CELL_BYTES: u64 = 512 << 10;
/// Bytes of one transfer, unless one block is larger. From this size on, queue depth hardly
/// matters.
pub(super) const READ_BYTES: u64 = 4 << 20;

/// One transfer.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct ScheduledRead {
    /// Ordinal of the file.
    pub(super) file: u32,
    /// Bytes of the file.
    pub(super) bytes: Range<u64>,
    /// The cells, which cover `bytes`.
    pub(super) cells: Range<usize>,
}

/// The unit of checking and copying: whole blocks. The last block of a file may be short.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Cell {
    pub(super) file: u32,
    pub(super) bytes: Range<u64>,
}

/// The reads of a run, in file order.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Schedule {
    pub(super) reads: Vec<ScheduledRead>,
    pub(super) cells: Vec<Cell>,
}

/// The facts about a file that determine its reads.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct FileLayout {
    pub(super) path: PathBuf,
    pub(super) block_bytes: u64,
    /// Offset of the end of the blocks.
    pub(super) data_end: u64,
}

/// Joined ranges of a plan, with their copies.
struct JoinedRange {
    file: u32,
    bytes: Range<u64>,
    copies: Vec<u32>,
}

impl Schedule {
    /// Appends a range of whole blocks, cut into reads and cells.
    pub(super) fn push(&mut self, file: u32, bytes: Range<u64>, block_bytes: u64) {
        let cell = CELL_BYTES.next_multiple_of(block_bytes);
        let read = READ_BYTES.next_multiple_of(cell);
        let mut at = bytes.start;
        while at < bytes.end {
            let end = at.saturating_add(read).min(bytes.end);
            let first = self.cells.len();
            let mut start = at;
            while start < end {
                let next = start.saturating_add(cell).min(end);
                self.cells.push(Cell { file, bytes: start..next });
                start = next;
            }
            self.reads.push(ScheduledRead { file, bytes: at..end, cells: first..self.cells.len() });
            at = end;
        }
    }

    /// Returns the bytes to read.
    pub(super) fn bytes(&self) -> u64 {
        self.reads.iter().map(|read| read.bytes.end - read.bytes.start).sum()
    }

    /// Returns the schedule of a plan, with the windows and copy lists of a
    /// [`crate::sys::Scatter`]: window `i` is cell `i`. `numbers` maps a copy of the plan to its
    /// number among `copies`, unless it moves nothing.
    pub(super) fn of_plan(
        plan: &ReadPlan,
        copies: &[Strided],
        numbers: &[Option<u32>],
        layout: &mut dyn FnMut(u32) -> Result<FileLayout>,
    ) -> Result<(Self, Vec<ScatterWindow>, Vec<u32>)> {
        let mut schedule = Self::default();
        let (mut windows, mut lists) = (Vec::new(), Vec::new());
        for run in round(plan, copies, numbers, layout)? {
            let block_bytes = layout(run.file)?.block_bytes;
            let first = schedule.cells.len();
            schedule.push(run.file, run.bytes.clone(), block_bytes);
            let cell_bytes = CELL_BYTES.next_multiple_of(block_bytes);
            let cells = schedule.cells.get(first..).unwrap_or_default();
            let mut pairs: Vec<(usize, u32)> = Vec::with_capacity(run.copies.len());
            for &number in &run.copies {
                let Some(copy) = copies.get(number as usize) else { continue };
                let start = copy.src.start.max(run.bytes.start);
                let end = copy.src.end.min(run.bytes.end);
                if start < end {
                    // Cells cover the run. All except the last of a read have the same length,
                    // which divides the read.
                    let cell_of = |byte: u64| ((byte - run.bytes.start) / cell_bytes) as usize;
                    pairs.extend((cell_of(start)..=cell_of(end - 1)).map(|cell| (cell, number)));
                }
            }
            pairs.sort_unstable();
            pairs.dedup();
            let mut pairs = pairs.into_iter().peekable();
            for (i, cell) in cells.iter().enumerate() {
                let start = lists.len();
                while let Some((_, number)) = pairs.next_if(|&(of, _)| of == i) {
                    lists.push(number);
                }
                windows.push(ScatterWindow {
                    file: cell.file,
                    bytes: cell.bytes.clone(),
                    copies: start..lists.len(),
                });
            }
        }
        Ok((schedule, windows, lists))
    }
}

/// Rounds ranges to whole blocks, sorts them in file order, and joins those that touch or overlap.
fn round(
    plan: &ReadPlan,
    copies: &[Strided],
    numbers: &[Option<u32>],
    layout: &mut dyn FnMut(u32) -> Result<FileLayout>,
) -> Result<Vec<JoinedRange>> {
    let mut runs: Vec<JoinedRange> = Vec::with_capacity(plan.runs.len());
    let mut current: Option<(u32, FileLayout)> = None;
    for run in &plan.runs {
        let of_run: Vec<u32> =
            run.copies.iter().filter_map(|&c| numbers.get(c as usize).copied().flatten()).collect();
        if of_run.is_empty() || run.len == 0 {
            continue;
        }
        if current.as_ref().is_none_or(|(file, _)| *file != run.file) {
            current = Some((run.file, layout(run.file)?));
        }
        let Some((_, FileLayout { path, block_bytes, data_end })) = &current else { continue };
        for &number in &of_run {
            let Some(copy) = copies.get(number as usize) else { continue };
            if copy.file != run.file {
                return Err(Error::internal(
                    format!("copies out of file {} in its run", run.file),
                    format!("one out of file {}", copy.file),
                ));
            }
            if copy.src.end > *data_end {
                let what = format!(
                    "the index says that data reach to byte {}, but the file's blocks end at {data_end}",
                    copy.src.end
                );
                return Err(Error::corrupt(path.clone(), what));
            }
        }
        let start = run.offset / block_bytes * block_bytes;
        let end = run.offset.saturating_add(run.len).min(*data_end);
        if start >= end {
            continue;
        }
        let end = end.checked_next_multiple_of(*block_bytes).unwrap_or(end).min(*data_end);
        runs.push(JoinedRange { file: run.file, bytes: start..end, copies: of_run });
    }
    runs.sort_by_key(|run| (run.file, run.bytes.start));
    let mut joined: Vec<JoinedRange> = Vec::with_capacity(runs.len());
    for run in runs {
        match joined.last_mut() {
            Some(last) if last.file == run.file && run.bytes.start <= last.bytes.end => {
                last.bytes.end = last.bytes.end.max(run.bytes.end);
                last.copies.extend(run.copies);
            }
            _ => joined.push(run),
        }
    }
    Ok(joined)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::read_plan::{BoxCopy, ReadRun};

    const BLOCK: u64 = 4096;

    fn copy(offset: u64, len: u64) -> BoxCopy {
        BoxCopy {
            leaf: 0,
            file: 0,
            src_offset: offset,
            src_strides: vec![1].into(),
            extent: vec![len].into(),
            itemsize: 1,
            dst: 0,
            dst_offset: 0,
            dst_strides: vec![1].into(),
        }
    }

    fn schedule(plan: &ReadPlan, data_end: u64) -> Result<(Schedule, Vec<ScatterWindow>, Vec<u32>)> {
        let copies: Vec<Strided> = plan.copies.iter().map(|c| Strided::new(c).unwrap().unwrap()).collect();
        let numbers: Vec<_> = (0..copies.len() as u32).map(Some).collect();
        Schedule::of_plan(plan, &copies, &numbers, &mut |_| {
            Ok(FileLayout { path: "f".into(), block_bytes: BLOCK, data_end })
        })
    }

    #[test]
    fn runs_become_whole_blocks_and_touching_ones_are_joined() {
        let plan = ReadPlan {
            runs: vec![
                ReadRun { file: 0, offset: 5000, len: 10, copies: vec![0] },
                ReadRun { file: 0, offset: 9000, len: 5000, copies: vec![1] },
                ReadRun { file: 0, offset: 40_960, len: 100_000, copies: vec![2] },
            ],
            copies: vec![copy(5000, 10), copy(9000, 5000), copy(41_000, 100)],
        };
        let (schedule, windows, lists) = schedule(&plan, 45_056 - 4096 + 512).unwrap();
        let bytes: Vec<_> = schedule.reads.iter().map(|read| read.bytes.clone()).collect();
        assert_eq!(bytes, vec![4096..16_384, 40_960..41_472]);
        assert_eq!(lists, vec![0, 1, 2]);
        assert_eq!(windows[0].copies, 0..2);
        assert_eq!(schedule.bytes(), 12_288 + 512);
    }

    #[test]
    fn a_long_run_is_cut_into_reads_of_cells_and_a_copy_is_listed_where_it_has_bytes() {
        let plan = ReadPlan {
            runs: vec![ReadRun { file: 0, offset: 4096, len: 10 << 20, copies: vec![0, 1] }],
            copies: vec![copy(4096, 10 << 20), copy(4096 + CELL_BYTES - 1, 2)],
        };
        let (schedule, windows, lists) = schedule(&plan, 64 << 20).unwrap();
        assert_eq!(schedule.reads.len(), 3);
        assert_eq!(schedule.cells.len(), 20);
        let of = |cell: usize| lists[windows[cell].copies.clone()].to_vec();
        assert_eq!((of(0), of(1), of(2)), (vec![0, 1], vec![0, 1], vec![0]));
        for (cell, window) in schedule.cells.iter().zip(&windows) {
            assert_eq!((cell.file, &cell.bytes), (window.file, &window.bytes));
        }
        for read in &schedule.reads {
            assert_eq!(schedule.cells[read.cells.start].bytes.start, read.bytes.start);
            assert_eq!(schedule.cells[read.cells.end - 1].bytes.end, read.bytes.end);
        }
    }

    #[test]
    fn data_behind_the_blocks_are_damage() {
        let plan = ReadPlan {
            runs: vec![ReadRun { file: 0, offset: 4096, len: 4096, copies: vec![0] }],
            copies: vec![copy(4096, 4097)],
        };
        assert_eq!(schedule(&plan, 8192).unwrap_err().kind(), "corrupt_checkpoint");
    }
}
