//! Prefetch: reads that begin before their destinations are known.
//!
//! Opening a checkpoint and planning a restore take milliseconds of computing, while the disk would
//! be idle. A caller that will restore most of a checkpoint calls [`FileSet::prefetch`], which
//! submits the first reads of its files. They are exactly the reads that a schedule of whole files
//! begins with, and their buffers count towards the budget.
//!
//! The first run whose schedule has all these reads takes them over ([`Prefetch::numbers`]). A
//! small run leaves them to the next run. Any other run drops them. Correctness does not depend on
//! a prefetch: without one, the run submits all reads. A prefetched read that fails also fails the
//! run that took it over.
//!
//! A separate thread checks the files and submits the reads. It lives until the reads are done:
//! io_uring delivers completions of a request late, through a kernel worker, after the submitting
//! thread has ended.

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

/// Limit on files that are opened and checked early, number of threads that do it (they mostly wait
/// for the disk), and bytes of each file whose checksums are read.
const CHECKED_FILES: usize = 16;
const CHECK_THREADS: usize = 4;
const CHECKED_BYTES: u64 = 16 << 30;
/// Poll interval of the deadline.
const POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Prefetched reads in flight, and their queue.
pub(super) struct Prefetch {
    /// `None` after a run has taken over the reads.
    queue: Option<Box<dyn Queue>>,
    /// File and bytes of each read, indexed by its token.
    reads: Vec<(u32, Range<u64>)>,
    /// Capacity of the queue, in transfers.
    pub(super) queue_depth: usize,
    /// Length of each buffer.
    pub(super) buffer_len: usize,
    /// Limit on prefetched reads.
    most: usize,
    buffers: Arc<ReadBuffers>,
    stall_timeout: Duration,
    birth: Birth,
    /// The thread that submitted the reads, unless the caller did.
    thread: Option<PrefetchThread>,
}

/// Keeps the submitting thread alive until it is dropped.
pub(super) struct PrefetchThread(#[expect(dead_code, reason = "dropping it is what it is for")] Sender<()>);

/// A prefetch whose thread has not reported yet.
pub(super) struct RunningPrefetch {
    answer: Receiver<Prefetch>,
    stall_timeout: Duration,
    birth: Birth,
}

impl RunningPrefetch {
    /// Starts the prefetch thread.
    pub(super) fn start(
        disk: Arc<dyn Disk>,
        files: Arc<FileSet>,
        wanted: Vec<u32>,
        options: LoadOptions,
    ) -> std::io::Result<Self> {
        let (report, answer) = channel();
        let (keep, kept) = channel();
        let stall_timeout = options.stall_timeout;
        spawn("stepwell-fetch", move || {
            let begun = Prefetch::begin(&*disk, &files, &wanted, &options);
            // Otherwise this thread would keep them alive longer than the caller.
            drop((files, disk));
            match begun {
                Ok(Some(mut begun)) => {
                    begun.thread = Some(PrefetchThread(keep));
                    // If no receiver is left, the prefetch is dropped here.
                    drop(report.send(begun));
                }
                Ok(None) => return,
                Err(error) => return tracing::debug!(%error, "cannot prefetch"),
            }
            drop(report);
            // Wait until the other end is dropped; nothing is ever sent.
            let _ = kept.recv();
        })?;
        Ok(Self { answer, stall_timeout, birth: Birth::now() })
    }

    /// Waits until the files are checked and returns the prefetch. `None` if there is nothing to
    /// take over, or after `stall_timeout`.
    pub(super) fn wait(self) -> Option<Prefetch> {
        if self.birth.is_here() {
            self.answer.recv_timeout(self.stall_timeout).ok()
        } else {
            // A forked child does not have this thread.
            std::mem::forget(self);
            None
        }
    }
}

impl Prefetch {
    /// Submits the first reads of these files, as many as the queue holds.
    pub(super) fn begin(
        disk: &dyn Disk,
        files: &FileSet,
        wanted: &[u32],
        options: &LoadOptions,
    ) -> Result<Option<Self>> {
        // Read the metadata first: planning needs it, and it would queue behind the prefetched
        // reads.
        let early = wanted.get(..CHECKED_FILES).unwrap_or(wanted);
        let checks = each("stepwell-check", CHECK_THREADS, early, |&file| {
            let end = files.layout(file)?.data_end.min(CHECKED_BYTES);
            files.ready(file, &(0..end)).map(drop)
        });
        checks.into_iter().collect::<Result<()>>()?;
        let alignment = disk.choice().alignment.max(1) as u64;
        let mut started: Option<Self> = None;
        for &file in wanted {
            let layout = files.layout(file)?;
            let mut schedule = Schedule::default();
            schedule.push(file, 0..layout.data_end, layout.block_bytes);
            // The last read of a plan may end before the file's blocks do.
            schedule.reads.pop();
            let cell = schedule.cells.iter().map(|cell| cell.bytes.end - cell.bytes.start).max();
            let cell_buffer = cell.and_then(|len| usize::try_from(len).ok()).map_or(0, ReadBuffers::size);
            for read in schedule.reads {
                let handle = files.ready(file, &read.bytes)?;
                let len = read.bytes.end - read.bytes.start;
                let aligned = read.bytes.start.is_multiple_of(alignment) && len.is_multiple_of(alignment);
                // The run reads cached pages through the page cache.
                let cached = handle.cached(read.bytes.start, len).is_some_and(|cached| cached > 0);
                let Ok(len) = usize::try_from(len) else { return Ok(started) };
                if !aligned || cached || started.as_ref().is_some_and(|started| started.buffer_len != len) {
                    return Ok(started);
                }
                let prefetch = match &mut started {
                    Some(prefetch) => prefetch,
                    none => none.insert(Self::new(disk, files, len, cell_buffer, options)?),
                };
                if !prefetch.submit(&handle, file, read.bytes)? {
                    return Ok(started);
                }
            }
        }
        Ok(started)
    }

    /// Creates a prefetch without reads, for reads of `buffer_len` bytes.
    fn new(
        disk: &dyn Disk,
        files: &FileSet,
        buffer_len: usize,
        cell_buffer: usize,
        options: &LoadOptions,
    ) -> Result<Self> {
        // Planning takes longer than the reads of a normal queue depth. So use all buffers of a run
        // over whole files, except a sixteenth of the budget: the run itself needs that.
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

    /// Submits one more read; `false` if the prefetch is now full.
    fn submit(&mut self, handle: &Arc<dyn File>, file: u32, bytes: Range<u64>) -> Result<bool> {
        let Some(queue) = &mut self.queue else { return Ok(false) };
        let buffer = self.buffers.take(self.buffer_len)?;
        let token = self.reads.len() as u64;
        queue.submit(Transfer::Read, handle, bytes.start, self.buffer_len, buffer, token);
        self.reads.push((file, bytes));
        Ok(self.reads.len() < self.most)
    }

    /// Returns the schedule's numbers of these reads, in token order. `None` if the schedule lacks
    /// one.
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

    /// Returns the bytes of the buffers.
    pub(super) fn bytes(&self) -> usize {
        self.reads.len() * self.buffer_len
    }

    /// Returns the queue with its reads, and the thread that must live until they are done.
    pub(super) fn into_queue(mut self) -> (Option<Box<dyn Queue>>, Option<PrefetchThread>) {
        (self.queue.take(), self.thread.take())
    }
}

impl Drop for Prefetch {
    fn drop(&mut self) {
        let Some(mut queue) = self.queue.take() else { return };
        if !self.birth.is_here() {
            // A forked child has neither the reads nor their memory.
            std::mem::forget(queue);
            return;
        }
        let mut deadline = deadline_after(self.stall_timeout);
        while queue.in_flight() > 0 && Instant::now() < deadline {
            if let Some(completion) = queue.complete(POLL_INTERVAL) {
                deadline = deadline_after(self.stall_timeout);
                self.buffers.give(completion.buffer);
            }
        }
        if queue.in_flight() > 0 {
            // The disk hangs. This leaks the queue and its memory, which the disk may still write
            // to.
            std::mem::forget(queue);
        }
    }
}
