//! Reads that begin before it is known where their bytes go.
//!
//! Opening a checkpoint and planning a restore cost milliseconds of computing, in which the disk would have nothing to do. Whoever opens one in
//! order to restore most of it says so ([`FileSet::begin`]), and the first reads of its files are under way meanwhile: exactly those
//! that a schedule of whole files begins with, into buffers of the budget. The first run whose schedule has them all takes them over
//! ([`HeadStart::numbers`]); a small run leaves them to the next one, any other lets them go first. Nothing depends on them: what fails here is tried again by the run.

use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::buffers::ReadBuffers;
use super::file_set::FileSet;
use super::options::LoadOptions;
use super::schedule::Schedule;
use crate::Result;
use crate::deadline::deadline_after;
use crate::io::{Disk, Queue, Transfer};
use crate::sys::Birth;

/// Files that are opened and checked ahead, and bytes of each whose checksums are read.
const FILES_LOOKED_AT: usize = 16;
const BYTES_LOOKED_AT: u64 = 16 << 30;
/// Longest wait before the deadline is looked at.
const SLICE: Duration = Duration::from_millis(50);

/// Reads in flight, and the queue that they are in.
pub(super) struct HeadStart {
    /// `None` once they are taken over.
    queue: Option<Box<dyn Queue>>,
    /// File and bytes of each, by its token.
    reads: Vec<(u32, Range<u64>)>,
    /// Transfers that the queue takes at a time.
    pub(super) queue_depth: usize,
    /// Length of each buffer.
    pub(super) buffer_len: usize,
    buffers: Arc<ReadBuffers>,
    stall_timeout: Duration,
    birth: Birth,
}

impl HeadStart {
    /// Starts the first reads of these files; as many as the queue holds.
    pub(super) fn begin(
        disk: &dyn Disk,
        files: &FileSet,
        wanted: &[u32],
        options: &LoadOptions,
    ) -> Result<Option<Self>> {
        let alignment = disk.choice().alignment.max(1) as u64;
        // What planning asks of the files comes first: it would stand behind all that follows.
        for &file in wanted.iter().take(FILES_LOOKED_AT) {
            let end = files.shape(file)?.data_end.min(BYTES_LOOKED_AT);
            files.ready(file, &(0..end))?;
        }
        let mut started: Option<Self> = None;
        for &file in wanted {
            let shape = files.shape(file)?;
            let mut schedule = Schedule::default();
            schedule.push(file, 0..shape.data_end, shape.block_bytes);
            // The last read of a plan may end before the file's blocks do.
            schedule.reads.pop();
            for read in schedule.reads {
                let len = read.bytes.end - read.bytes.start;
                let handle = files.ready(file, &read.bytes)?;
                let fits = started.as_ref().is_none_or(|started| started.buffer_len as u64 == len);
                if !fits || !read.bytes.start.is_multiple_of(alignment) || !len.is_multiple_of(alignment) {
                    return Ok(started);
                }
                // What the page cache holds is read through it.
                if handle.cached(read.bytes.start, len).is_some_and(|cached| cached > 0) {
                    return Ok(started);
                }
                let Ok(len) = usize::try_from(len) else { return Ok(started) };
                let buffer = files.buffers().take(len)?;
                // More than a run keeps in flight, since what is computed meanwhile takes longer; and not all of the budget, so that the run has buffers to go on with.
                let depth =
                    usize::try_from(options.budget_bytes / 16 * 10).map_or(1, |bytes| bytes / len).max(1);
                if started.is_none() {
                    let queue_depth = depth.max(options.queue_depth);
                    started = Some(Self {
                        queue: Some(disk.queue_for_reads(queue_depth)?),
                        queue_depth,
                        reads: Vec::with_capacity(depth),
                        buffer_len: len,
                        buffers: Arc::clone(files.buffers()),
                        stall_timeout: options.stall_timeout,
                        birth: Birth::now(),
                    });
                }
                let Some(HeadStart { queue: Some(queue), reads, .. }) = &mut started else {
                    return Ok(started);
                };
                queue.submit(Transfer::Read, &handle, read.bytes.start, len, buffer, reads.len() as u64);
                reads.push((file, read.bytes));
                if reads.len() >= depth {
                    return Ok(started);
                }
            }
        }
        Ok(started)
    }

    /// The numbers that a schedule gives these reads, in the order of their tokens; `None` where it has not all of them.
    pub(super) fn numbers(&self, schedule: &Schedule) -> Option<Vec<usize>> {
        self.reads
            .iter()
            .map(|(file, bytes)| {
                let at = schedule
                    .reads
                    .binary_search_by_key(&(*file, bytes.start), |read| (read.file, read.bytes.start))
                    .ok()?;
                schedule.reads.get(at).filter(|read| read.bytes == *bytes).map(|_| at)
            })
            .collect()
    }

    /// Number of its reads.
    pub(super) fn len(&self) -> usize {
        self.reads.len()
    }

    /// The queue, with the reads in it.
    pub(super) fn into_queue(mut self) -> Option<Box<dyn Queue>> {
        self.queue.take()
    }
}

impl Drop for HeadStart {
    fn drop(&mut self) {
        let Some(mut queue) = self.queue.take() else { return };
        if !self.birth.is_here() {
            // A forked child has neither the reads nor the memory that they go to.
            std::mem::forget(queue);
            return;
        }
        let mut deadline = deadline_after(self.stall_timeout);
        while queue.in_flight() > 0 && Instant::now() < deadline {
            if let Some(completion) = queue.complete(SLICE) {
                deadline = deadline_after(self.stall_timeout);
                self.buffers.give(completion.buffer);
            }
        }
        if queue.in_flight() > 0 {
            // The disk hangs: the queue, and the memory that it may still write to, stay for ever.
            std::mem::forget(queue);
        }
    }
}
