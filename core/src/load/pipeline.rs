//! The read pipeline: one reading thread, and workers that verify and copy.
//!
//! The calling thread keeps a [`Queue`] full of direct reads and hands filled buffers to the
//! workers. Ranges in the page cache are not queued: the workers read them cell by cell, so that
//! the bytes stay in the worker's own CPU cache. If other ranks read on this machine, they read
//! sparse ranges ([`ScheduledRead::sparse`]) the same way, so that the disk reads these once in
//! all. A [`Sink`] consumes the bytes.
//!
//! After `stall_timeout` without progress the run fails. It leaks everything that it could not get
//! back: a queue with its buffers, or a thread. So a worker may still call the sink after the run
//! has ended.

mod worker;

pub(super) use worker::read_cached;

use std::ops::Range;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender, unbounded};

use worker::Workers;

use super::buffers::ReadBuffers;
use super::destination::Started;
use super::file_set::FileSet;
use super::options::{LoadOptions, LoadStats};
use super::schedule::{Schedule, ScheduledRead};
use crate::deadline::StallTimer;
use crate::io::{Completion, Disk, File, Queue, Transfer};
use crate::sys::{Buffer, Staged};
use crate::{Error, Result};

/// The consumer of the bytes.
pub(super) trait Sink: Send + Sync + 'static {
    /// Consumes the bytes of a cell. Called once per cell, from any worker. An error ends the run.
    /// The worker waits for the copies in `started` before it reuses the buffer.
    fn cell(&self, cell: usize, bytes: &Staged, started: &mut Started) -> Result<()>;

    /// Handles a failed read of these cells. An error ends the run; `Ok` skips the cells.
    fn failed(&self, cells: Range<usize>, error: Error) -> Result<()>;
}

/// The progress callback. Called between reads on the calling thread with the bytes done; `false`
/// ends the run.
pub(super) type OnProgress<'a> = &'a mut dyn FnMut(u64) -> bool;

/// Poll interval of the deadline, of progress and of worker errors.
const POLL_INTERVAL: Duration = Duration::from_millis(50);
/// Poll interval of the disk while workers hold buffers that could start more reads.
const BUFFER_POLL_INTERVAL: Duration = Duration::from_micros(300);
/// Minimum part of a read that must be cached to read it through the page cache. Every hole costs a
/// small synchronous read.
const CACHED_NUMERATOR: u64 = 7;
const CACHED_DENOMINATOR: u64 = 8;
/// Limit on waiting cells per worker.
const BACKLOG: usize = 32;
/// Cells of one worker whose copies to devices may run at once. The worker reads and checks the
/// next cells meanwhile.
const OWN_BUFFERS: usize = 4;

/// A task of a worker.
enum WorkerJob {
    /// Check and use the bytes of read `read`, from byte `skip` of the buffer on.
    Filled { read: usize, skip: usize, buffer: Buffer },
    /// Read this cell through the page cache, then check and use it.
    Cached { file: Arc<dyn File>, cell: usize },
}

/// A report of a worker.
enum WorkerReport {
    /// A job is done.
    Done { bytes: u64, buffer: BufferOutcome },
    /// A job failed.
    Failed { error: Error, buffer: BufferOutcome },
}

/// The state of a job's buffer after the job.
enum BufferOutcome {
    /// The job had no buffer.
    None,
    /// The buffer is free.
    Buffer(Buffer),
    /// A device still holds the buffer and frees it later. This run has lost it.
    Kept,
}

/// The state that workers and the calling thread share.
struct RunState<S> {
    schedule: Schedule,
    sink: Arc<S>,
    alignment: u64,
    cell_buffer: usize,
    /// Limit on the buffers of one worker for reads through the page cache. It uses more than one
    /// only while copies to devices run.
    own_buffers: usize,
    /// Such buffers that all workers have taken.
    own_taken: AtomicUsize,
    stall_timeout: Duration,
    /// Queues for reads through the page cache. The calling thread makes them; each worker takes
    /// one on first use.
    queues: Mutex<Vec<Box<dyn Queue>>>,
    /// Set at the first error: workers skip all waiting jobs.
    over: AtomicBool,
}

/// Reads everything in the schedule and passes it to the sink.
pub(super) fn run<S: Sink>(
    disk: &dyn Disk,
    files: &FileSet,
    mut schedule: Schedule,
    sink: &Arc<S>,
    options: &LoadOptions,
    progress: OnProgress<'_>,
) -> Result<LoadStats> {
    let started = Instant::now();
    schedule.mix(|file| files.source(file));
    if schedule.reads.is_empty() {
        return Ok(LoadStats { elapsed: started.elapsed(), ..LoadStats::default() });
    }
    let alignment = disk.choice().alignment.max(1) as u64;
    let longest = |lengths: &mut dyn Iterator<Item = &Range<u64>>| {
        lengths.map(|bytes| bytes.end.next_multiple_of(alignment) - bytes.start / alignment * alignment).max()
    };
    let size = |longest: Option<u64>| {
        let len = usize::try_from(longest.unwrap_or(0));
        len.map(ReadBuffers::size)
            .map_err(|_| Error::internal("a read that fits the address space", "a longer one"))
    };
    let read_buffer = size(longest(&mut schedule.reads.iter().map(|read| &read.bytes)))?;
    let cell_buffer = size(longest(&mut schedule.cells.iter().map(|cell| &cell.bytes)))?;

    // The workers' own buffers get at most a quarter of the budget, and half if they decode.
    let budget = usize::try_from(options.budget_bytes).unwrap_or(usize::MAX);
    let decoding = schedule.decoding_bytes;
    let share = if decoding > 0 { budget / 2 } else { budget / 4 };
    let threads = options.threads.min(share / (cell_buffer + decoding).max(1));
    let threads = threads.min(schedule.cells.len()).max(1);
    let own_buffers = ((share / threads).saturating_sub(decoding) / cell_buffer.max(1)).clamp(1, OWN_BUFFERS);
    let worker_bytes = own_buffers * cell_buffer + decoding;
    let most_buffers = (budget.saturating_sub(threads * worker_bytes) / read_buffer.max(1)).max(2);
    let shared = Arc::new(RunState {
        schedule,
        sink: Arc::clone(sink),
        alignment,
        cell_buffer,
        own_buffers,
        own_taken: AtomicUsize::new(0),
        stall_timeout: options.stall_timeout,
        queues: Mutex::new(Vec::new()),
        over: AtomicBool::new(false),
    });
    let (jobs, inbox) = unbounded();
    let (outbox, events) = unbounded();
    let workers = Workers::start(threads, &shared, &inbox, &outbox)?;
    drop((inbox, outbox));
    let mut reader = Reader {
        disk,
        files,
        shared: &shared,
        depth: options.queue_depth.max(1),
        shares: options.shares,
        read_buffer,
        most_buffers,
        threads,
        jobs: Some(jobs),
        events,
        queue: None,
        free: Vec::new(),
        held: 0,
        most_held: 0,
        working: 0,
        done: 0,
        timer: StallTimer::new(options.stall_timeout),
        stats: LoadStats::default(),
    };
    let result = reader.drive(progress);
    let ended = reader.finish(workers);
    let mut stats = std::mem::take(&mut reader.stats);
    let own = shared.own_taken.load(Ordering::Relaxed) * cell_buffer + threads * decoding;
    stats.peak_buffer_bytes = (reader.most_held * read_buffer + own) as u64;
    stats.elapsed = started.elapsed();
    result.and(ended).map(|()| stats)
}

/// The state of the calling thread.
struct Reader<'a, S> {
    disk: &'a dyn Disk,
    files: &'a FileSet,
    shared: &'a Arc<RunState<S>>,
    depth: usize,
    /// See [`LoadOptions::shares`].
    shares: bool,
    read_buffer: usize,
    most_buffers: usize,
    threads: usize,
    /// `None` after the last job was sent.
    jobs: Option<Sender<WorkerJob>>,
    events: Receiver<WorkerReport>,
    /// Created on first use.
    queue: Option<Box<dyn Queue>>,
    free: Vec<Buffer>,
    /// Buffers that this run holds, free or in use, and their peak.
    held: usize,
    most_held: usize,
    /// Jobs that workers have not finished.
    working: usize,
    /// Bytes that workers have finished.
    done: u64,
    /// Its progress: reads that have started, reads in flight, jobs that workers have, bytes that
    /// they have finished.
    timer: StallTimer<(u64, usize, usize, u64)>,
    stats: LoadStats,
}

impl<S: Sink> Reader<'_, S> {
    fn drive(&mut self, progress: OnProgress<'_>) -> Result<()> {
        let shared = Arc::clone(self.shared);
        let mut reads = shared.schedule.reads.iter().enumerate();
        let mut next = None;
        loop {
            while let Ok(event) = self.events.try_recv() {
                self.handle_report(event)?;
            }
            if !progress(self.done) {
                return Err(Error::Cancelled("by the caller".into()));
            }
            loop {
                if next.is_none() {
                    next = match reads.next() {
                        Some((number, read)) => self.plan(number, read)?,
                        None => break,
                    };
                }
                // Without a file, the sink has read the bytes elsewhere, which takes long.
                let Some(planned) = next.take() else { break };
                if let Some(blocked) = self.start(planned)? {
                    next = Some(blocked);
                    break;
                }
            }
            let in_flight = self.in_flight();
            if in_flight > 0 {
                // A buffer that a worker frees can start another read. Poll for it if the queue has
                // space.
                let wait = if in_flight < self.depth && self.working > 0 {
                    BUFFER_POLL_INTERVAL
                } else {
                    POLL_INTERVAL
                };
                if let Some(completion) = self.queue.as_mut().and_then(|queue| queue.complete(wait)) {
                    self.completed(completion)?;
                }
            } else if self.working > 0 {
                if let Ok(event) = self.events.recv_timeout(POLL_INTERVAL) {
                    self.handle_report(event)?;
                }
            } else if next.is_none() && reads.len() == 0 {
                return if progress(self.done) {
                    Ok(())
                } else {
                    Err(Error::Cancelled("by the caller".into()))
                };
            }
            self.check_stall()?;
        }
    }

    /// Decides how to do a read. `None` skips it: its file cannot be opened, and the sink accepts
    /// that.
    fn plan(&mut self, number: usize, read: &ScheduledRead) -> Result<Option<Planned>> {
        let file = match self.files.ready(read.file, &read.bytes) {
            Ok(file) => file,
            Err(error) => {
                self.shared.sink.failed(read.cells.clone(), error)?;
                self.done += read.bytes.end - read.bytes.start;
                return Ok(None);
            }
        };
        let len = read.bytes.end - read.bytes.start;
        let cached = file.cached(read.bytes.start, len).is_some_and(|cached| {
            (self.shares && read.sparse) || cached.min(len) * CACHED_DENOMINATOR >= len * CACHED_NUMERATOR
        });
        Ok(Some(Planned { number, file, cached }))
    }

    /// Starts a read. Returns it if a buffer or a queue slot is missing now.
    fn start(&mut self, planned: Planned) -> Result<Option<Planned>> {
        let Some(read) = self.shared.schedule.reads.get(planned.number) else { return Ok(None) };
        let Some(jobs) = &self.jobs else { return Ok(None) };
        if planned.cached {
            if self.working + read.cells.len() > self.threads * BACKLOG && self.working > 0 {
                return Ok(Some(planned));
            }
            if self.stats.bytes_cached == 0 {
                let queues: Result<Vec<_>> =
                    (0..self.threads).map(|_| self.disk.queue_for_reads(1)).collect();
                *self.shared.queues.lock().unwrap_or_else(PoisonError::into_inner) = queues?;
            }
            self.stats.bytes_cached += read.bytes.end - read.bytes.start;
            self.stats.reads += read.cells.len() as u64;
            for cell in read.cells.clone() {
                self.working += 1;
                let job = WorkerJob::Cached { file: Arc::clone(&planned.file), cell };
                jobs.send(job).map_err(|_| no_workers())?;
            }
            return Ok(None);
        }
        if self.in_flight() >= self.depth {
            return Ok(Some(planned));
        }
        let Some(buffer) = self.buffer()? else { return Ok(Some(planned)) };
        let (offset, len) = aligned(&read.bytes, self.shared.alignment);
        let room = buffer.len();
        if len > room {
            self.free.push(buffer);
            return Err(Error::internal(format!("a read of at most {room} bytes"), format!("one of {len}")));
        }
        if self.queue.is_none() {
            self.queue = Some(self.disk.queue_for_reads(self.depth)?);
        }
        if let Some(queue) = &mut self.queue {
            queue.submit(Transfer::Read, &planned.file, offset, len, buffer, planned.number as u64);
            self.stats.reads += 1;
        }
        Ok(None)
    }

    fn in_flight(&self) -> usize {
        self.queue.as_ref().map_or(0, |queue| queue.in_flight())
    }

    /// Returns a free buffer, or a new one within the budget.
    fn buffer(&mut self) -> Result<Option<Buffer>> {
        if let Some(buffer) = self.free.pop() {
            return Ok(Some(buffer));
        }
        if self.held >= self.most_buffers {
            return Ok(None);
        }
        let buffer = ReadBuffers::shared().take(self.read_buffer)?;
        self.held += 1;
        self.most_held = self.most_held.max(self.held);
        Ok(Some(buffer))
    }

    fn completed(&mut self, completion: Completion) -> Result<()> {
        let Completion { token, buffer, result } = completion;
        let number = token as usize;
        let Some(read) = self.shared.schedule.reads.get(number) else {
            return Err(Error::internal("a read that was submitted", format!("read {token}")));
        };
        let (offset, _) = aligned(&read.bytes, self.shared.alignment);
        let skip = (read.bytes.start - offset) as usize;
        let wanted = (read.bytes.end - offset) as usize;
        let problem = match result {
            Ok(count) if count >= wanted => None,
            Ok(count) => Some(self.files.short(read.file, offset + count as u64, read.bytes.end)),
            Err(error) => Some(error),
        };
        if let Some(error) = problem {
            self.free.push(buffer);
            return self.shared.sink.failed(read.cells.clone(), error);
        }
        self.stats.bytes_read += read.bytes.end - read.bytes.start;
        self.working += 1;
        let jobs = self.jobs.as_ref().ok_or_else(no_workers)?;
        jobs.send(WorkerJob::Filled { read: number, skip, buffer }).map_err(|_| no_workers())
    }

    fn handle_report(&mut self, event: WorkerReport) -> Result<()> {
        self.working = self.working.saturating_sub(1);
        match event {
            WorkerReport::Done { bytes, buffer } => {
                self.done += bytes;
                self.take_back(buffer);
                Ok(())
            }
            WorkerReport::Failed { error, buffer } => {
                self.take_back(buffer);
                Err(error)
            }
        }
    }

    fn take_back(&mut self, buffer: BufferOutcome) {
        match buffer {
            BufferOutcome::None => {}
            BufferOutcome::Buffer(buffer) => self.free.push(buffer),
            // Allow a replacement: otherwise a run with slow devices would use up its buffers.
            BufferOutcome::Kept => self.held = self.held.saturating_sub(1),
        }
    }

    fn check_stall(&mut self) -> Result<()> {
        let progress = (self.stats.reads, self.in_flight(), self.working, self.done);
        if !self.timer.left(progress).is_zero() {
            return Ok(());
        }
        let waited_for = match self.in_flight() {
            0 => format!("{} pieces that are being checked and copied", self.working),
            reads => format!("the disk to answer {reads} reads below {}", self.files.dir().display()),
        };
        Err(Error::Timeout { waited_for, seconds: self.shared.stall_timeout.as_secs_f64() })
    }

    /// Collects reads, workers and buffers, also after an error. After the stall timeout it leaks
    /// them.
    fn finish(&mut self, workers: Workers) -> Result<()> {
        self.shared.over.store(true, Ordering::Release);
        self.jobs = None;
        let mut ended = Ok(());
        while self.in_flight() > 0 && self.check_stall().is_ok() {
            if let Some(completion) = self.queue.as_mut().and_then(|queue| queue.complete(POLL_INTERVAL)) {
                self.free.push(completion.buffer);
            }
        }
        if self.in_flight() > 0 {
            // Dropping the queue would wait for the disk. This leaks the queue and its memory,
            // which the disk may still write to.
            std::mem::forget(self.queue.take());
        }
        while self.working > 0 {
            match self.events.recv_timeout(POLL_INTERVAL) {
                Ok(WorkerReport::Done { buffer, .. } | WorkerReport::Failed { buffer, .. }) => {
                    self.working -= 1;
                    self.take_back(buffer);
                }
                Err(_) => {
                    if let Err(stalled) = self.check_stall() {
                        ended = Err(stalled);
                        break;
                    }
                }
            }
        }
        workers.join(ended.is_ok());
        for buffer in self.free.drain(..) {
            ReadBuffers::shared().give(buffer);
        }
        ended
    }
}

/// A read, and the way to do it.
struct Planned {
    number: usize,
    file: Arc<dyn File>,
    cached: bool,
}

fn no_workers() -> Error {
    Error::Cancelled("all threads that check and copy have ended".into())
}

/// Expands a range to the engine's alignment; returns offset and length.
pub(super) fn aligned(bytes: &Range<u64>, alignment: u64) -> (u64, usize) {
    let offset = bytes.start / alignment * alignment;
    ((offset), (bytes.end.next_multiple_of(alignment) - offset) as usize)
}

#[cfg(test)]
mod tests;
