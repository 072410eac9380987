//! Reads that begin before it is known where their bytes go.
//!
//! Opening a checkpoint and planning a restore cost milliseconds of computing, in which the disk
//! would have nothing to do. Whoever opens one in order to restore most of it says so
//! ([`FileSet::begin`]), and the first reads of its files are under way meanwhile: exactly those
//! that a schedule of whole files begins with, into buffers of the budget. The first run whose
//! schedule has them all takes them over ([`HeadStart::numbers`]); a small run leaves them to the
//! next one, any other lets them go first. Nothing depends on them: where none can be begun, the
//! run begins them all. One that fails after it was begun fails the run that took it over, as its
//! own would have.
//!
//! A thread of its own looks at the files and starts the reads, and lives until they are done: what
//! an io_uring still has to say of a request whose thread has ended comes a clock tick late and
//! through a worker of the kernel.

use std::ops::Range;
use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::time::{Duration, Instant};

use super::buffers::ReadBuffers;
use super::file_set::FileSet;
use super::options::LoadOptions;
use super::schedule::Schedule;
use crate::Result;
use crate::deadline::deadline_after;
use crate::io::{Disk, File, Queue, Transfer};
use crate::sys::{Birth, each, spawn};

/// Files that are opened and checked ahead, so many at a time (it is waiting for the disk, mostly),
/// and bytes of each whose checksums are read.
const FILES_LOOKED_AT: usize = 16;
const LOOKS: usize = 4;
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
    /// Reads that there is room for.
    most: usize,
    buffers: Arc<ReadBuffers>,
    stall_timeout: Duration,
    birth: Birth,
    /// Their thread, where they have one of their own.
    thread: Option<KeptThread>,
}

/// Keeps the thread that started reads alive until it is dropped.
pub(super) struct KeptThread(#[expect(dead_code, reason = "dropping it is what it is for")] Sender<()>);

/// A head start that has not said yet what it could do.
pub(super) struct Coming {
    answer: Receiver<HeadStart>,
    stall_timeout: Duration,
    birth: Birth,
}

impl Coming {
    /// Starts the thread.
    pub(super) fn start(
        disk: Arc<dyn Disk>,
        files: Arc<FileSet>,
        wanted: Vec<u32>,
        options: LoadOptions,
    ) -> std::io::Result<Self> {
        let (tell, answer) = channel();
        let (keep, kept) = channel();
        let stall_timeout = options.stall_timeout;
        spawn("stepwell-ahead", move || {
            let begun = HeadStart::begin(&*disk, &files, &wanted, &options);
            // What is held here would outlive the caller's.
            drop((files, disk));
            match begun {
                Ok(Some(mut begun)) => {
                    begun.thread = Some(KeptThread(keep));
                    // Where nobody waits any more, it is dropped here.
                    drop(tell.send(begun));
                }
                Ok(None) => return,
                Err(error) => return tracing::debug!(%error, "no head start"),
            }
            drop(tell);
            // Until the other end is dropped; nobody sends anything.
            let _ = kept.recv();
        })?;
        Ok(Self { answer, stall_timeout, birth: Birth::now() })
    }

    /// What has been begun; waits for the look at the files, which a disk that hangs never ends.
    pub(super) fn wait(self) -> Option<HeadStart> {
        if self.birth.is_here() {
            self.answer.recv_timeout(self.stall_timeout).ok()
        } else {
            // A forked child has no such thread.
            std::mem::forget(self);
            None
        }
    }
}

impl HeadStart {
    /// Starts the first reads of these files; as many as the queue holds.
    pub(super) fn begin(
        disk: &dyn Disk,
        files: &FileSet,
        wanted: &[u32],
        options: &LoadOptions,
    ) -> Result<Option<Self>> {
        // What planning asks of the files comes first: it would stand behind all that follows.
        let looked_at = wanted.get(..FILES_LOOKED_AT).unwrap_or(wanted);
        let looks = each("stepwell-look", LOOKS, looked_at, |&file| {
            let end = files.shape(file)?.data_end.min(BYTES_LOOKED_AT);
            files.ready(file, &(0..end)).map(drop)
        });
        looks.into_iter().collect::<Result<()>>()?;
        let alignment = disk.choice().alignment.max(1) as u64;
        let mut started: Option<Self> = None;
        for &file in wanted {
            let shape = files.shape(file)?;
            let mut schedule = Schedule::default();
            schedule.push(file, 0..shape.data_end, shape.block_bytes);
            // The last read of a plan may end before the file's blocks do.
            schedule.reads.pop();
            let cell = schedule.cells.iter().map(|cell| cell.bytes.end - cell.bytes.start).max();
            let cell_buffer = cell.and_then(|len| usize::try_from(len).ok()).map_or(0, ReadBuffers::size);
            for read in schedule.reads {
                let handle = files.ready(file, &read.bytes)?;
                let len = read.bytes.end - read.bytes.start;
                let aligned = read.bytes.start.is_multiple_of(alignment) && len.is_multiple_of(alignment);
                // Cached pages are read through the page cache.
                let cached = handle.cached(read.bytes.start, len).is_some_and(|cached| cached > 0);
                let Ok(len) = usize::try_from(len) else { return Ok(started) };
                if !aligned || cached || started.as_ref().is_some_and(|started| started.buffer_len != len) {
                    return Ok(started);
                }
                let head_start = match &mut started {
                    Some(head_start) => head_start,
                    none => none.insert(Self::new(disk, files, len, cell_buffer, options)?),
                };
                if !head_start.submit(&handle, file, read.bytes)? {
                    return Ok(started);
                }
            }
        }
        Ok(started)
    }

    /// An empty one, for reads of that length.
    fn new(
        disk: &dyn Disk,
        files: &FileSet,
        buffer_len: usize,
        cell_buffer: usize,
        options: &LoadOptions,
    ) -> Result<Self> {
        // More than a run keeps in flight, since what is computed meanwhile takes longer: all that
        // a run of whole files has, but for a sixteenth of the budget, which is left for what it
        // does itself.
        let run = options.shares(usize::MAX, cell_buffer, buffer_len);
        let begun = (options.budget() / 16 * 15 / buffer_len).min(run.read_buffers).max(1);
        let queue_depth = begun.max(options.queue_depth);
        Ok(Self {
            queue: Some(disk.queue_for_reads(queue_depth)?),
            reads: Vec::with_capacity(begun),
            most: begun,
            queue_depth,
            buffer_len,
            buffers: Arc::clone(files.buffers()),
            stall_timeout: options.stall_timeout,
            birth: Birth::now(),
            thread: None,
        })
    }

    /// Starts one more read; `false`: it was the last that there is room for.
    fn submit(&mut self, handle: &Arc<dyn File>, file: u32, bytes: Range<u64>) -> Result<bool> {
        let Some(queue) = &mut self.queue else { return Ok(false) };
        let buffer = self.buffers.take(self.buffer_len)?;
        let token = self.reads.len() as u64;
        queue.submit(Transfer::Read, handle, bytes.start, self.buffer_len, buffer, token);
        self.reads.push((file, bytes));
        Ok(self.reads.len() < self.most)
    }

    /// The numbers that a schedule gives these reads, in the order of their tokens; `None` where it
    /// has not all of them.
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

    /// Bytes of its buffers.
    pub(super) fn bytes(&self) -> usize {
        self.reads.len() * self.buffer_len
    }

    /// The queue with the reads in it, and what must be kept until they are done.
    pub(super) fn into_queue(mut self) -> (Option<Box<dyn Queue>>, Option<KeptThread>) {
        (self.queue.take(), self.thread.take())
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
            // The disk hangs. This leaks the queue and the memory that it may still write to.
            std::mem::forget(queue);
        }
    }
}
