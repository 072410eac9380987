//! The worker threads, which check and copy.

use std::collections::VecDeque;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::Ordering;
use std::sync::{Arc, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use crossbeam_channel::{Receiver, Sender};

use super::{BufferOutcome, POLL_INTERVAL, RunState, Sink, WorkerJob, WorkerReport, aligned};
use crate::deadline::deadline_after;
use crate::io::{Completion, File, Queue, Transfer};
use crate::load::buffers::ReadBuffers;
use crate::load::destination::Started;
use crate::load::file_set::short;
use crate::sys::{Buffer, Staged, spawn};
use crate::{Error, Result};

/// The threads of one run.
pub(super) struct Workers(Vec<JoinHandle<()>>);

impl Workers {
    pub(super) fn start<S: Sink>(
        count: usize,
        shared: &Arc<RunState<S>>,
        inbox: &Receiver<WorkerJob>,
        outbox: &Sender<WorkerReport>,
    ) -> Result<Self> {
        let mut handles = Vec::with_capacity(count);
        for _ in 0..count {
            let mut worker = LoadWorker {
                shared: Arc::clone(shared),
                outbox: outbox.clone(),
                queue: None,
                own: Vec::new(),
                finishing: VecDeque::new(),
            };
            let inbox = inbox.clone();
            let spawned = spawn("stepwell-load", move || worker.run(&inbox));
            match spawned {
                Ok(handle) => handles.push(handle),
                // Fewer threads suffice.
                Err(_) if !handles.is_empty() => break,
                Err(error) => return Err(Error::io("spawn", "<thread>", error)),
            }
        }
        Ok(Self(handles))
    }

    /// Waits for the threads if `idle`. Otherwise detaches them, since one may hang.
    pub(super) fn join(self, idle: bool) {
        if idle {
            for handle in self.0 {
                // A panic outside the guarded part has closed the worker's channels; the reader has
                // seen that.
                let _ = handle.join();
            }
        }
    }
}

/// One thread that checks and copies.
struct LoadWorker<S> {
    shared: Arc<RunState<S>>,
    outbox: Sender<WorkerReport>,
    /// The worker's queue for reads through the page cache.
    queue: Option<Box<dyn Queue>>,
    /// The worker's free buffers for those reads, the last used one last.
    own: Vec<Buffer>,
    /// Jobs whose copies to devices may still run, in the order of their start.
    finishing: VecDeque<Finishing>,
}

/// A job that has done everything except wait for its devices.
struct Finishing {
    worked: Result<u64>,
    started: Started,
    buffer: Option<Arc<Buffer>>,
    /// True if the worker keeps the buffer for its next read through the page cache.
    own: bool,
}

impl<S: Sink> LoadWorker<S> {
    fn run(&mut self, inbox: &Receiver<WorkerJob>) {
        while let Some(job) = self.next(inbox) {
            let finishing = self.start(job);
            if finishing.started.is_empty() {
                // The buffer is still in the core's cache. The next read uses it again.
                self.finish(finishing);
                continue;
            }
            self.finishing.push_back(finishing);
            if self.finishing.len() >= self.shared.own_buffers {
                self.finish_first();
            }
        }
        self.own.drain(..).for_each(|buffer| ReadBuffers::shared().give(buffer));
    }

    /// Returns the next job. Waits for copies to devices while no job is there. `None` at the end
    /// of the run: the reader has closed the channel.
    fn next(&mut self, inbox: &Receiver<WorkerJob>) -> Option<WorkerJob> {
        while !self.finishing.is_empty() {
            match inbox.try_recv() {
                Ok(job) => return Some(job),
                Err(_) => self.finish_first(),
            }
        }
        inbox.recv().ok()
    }

    /// Does a job, up to the start of its copies to devices.
    fn start(&mut self, job: WorkerJob) -> Finishing {
        let mut started = Started::new(self.shared.stall_timeout);
        match job {
            WorkerJob::Filled { read, skip, buffer } => {
                let buffer = Arc::new(buffer);
                let worked = guarded(|| self.filled(read, skip, &buffer, &mut started));
                Finishing { worked, started, buffer: Some(buffer), own: false }
            }
            WorkerJob::Cached { file, cell } => {
                let mut buffer = None;
                let worked = guarded(|| self.cached(&file, cell, &mut buffer, &mut started));
                Finishing { worked, started, buffer, own: true }
            }
        }
    }

    fn finish_first(&mut self) {
        if let Some(finishing) = self.finishing.pop_front() {
            self.finish(finishing);
        }
    }

    /// Waits for the copies of a job and reports it.
    fn finish(&mut self, Finishing { worked, mut started, buffer, own }: Finishing) {
        // Wait also after an error: started copies must end before the run does.
        let ended = started.wait();
        let result = worked.and_then(|bytes| ended.map(|()| bytes));
        let outcome = match (buffer.map(Arc::into_inner), own) {
            (None, _) => BufferOutcome::None,
            (Some(buffer), true) => {
                // A device may still hold the buffer and frees it later.
                self.own.extend(buffer);
                BufferOutcome::None
            }
            (Some(buffer), false) => buffer.map_or(BufferOutcome::Kept, BufferOutcome::Buffer),
        };
        // The reader hears nothing after its end.
        let _ = self.outbox.send(match result {
            Ok(bytes) => WorkerReport::Done { bytes, buffer: outcome },
            Err(error) => WorkerReport::Failed { error, buffer: outcome },
        });
    }

    fn is_over(&self) -> bool {
        self.shared.over.load(Ordering::Acquire)
    }

    fn filled(&self, read: usize, skip: usize, buffer: &Arc<Buffer>, started: &mut Started) -> Result<u64> {
        let Some(read) = self.shared.schedule.reads.get(read) else { return Ok(0) };
        for number in read.cells.clone() {
            if self.is_over() {
                break;
            }
            let Some(cell) = self.shared.schedule.cells.get(number) else { continue };
            let start = skip + (cell.bytes.start - read.bytes.start) as usize;
            let end = skip + (cell.bytes.end - read.bytes.start) as usize;
            let bytes = Staged::new(buffer, start..end)
                .ok_or_else(|| Error::internal("a cell inside its buffer", "one that passes its end"))?;
            self.shared.sink.cell(number, &bytes, started)?;
        }
        Ok(read.bytes.end - read.bytes.start)
    }

    /// Reads a cell into a buffer of the worker and uses it. `used` gets the buffer, unless the
    /// disk has kept it.
    fn cached(
        &mut self,
        file: &Arc<dyn File>,
        number: usize,
        used: &mut Option<Arc<Buffer>>,
        started: &mut Started,
    ) -> Result<u64> {
        let Some(cell) = self.shared.schedule.cells.get(number).cloned() else { return Ok(0) };
        if self.is_over() {
            return Ok(0);
        }
        let next_queue = || self.shared.queues.lock().unwrap_or_else(PoisonError::into_inner).pop();
        let Some(mut queue) = self.queue.take().or_else(next_queue) else {
            return Err(Error::internal("a queue for each worker", "a worker without one"));
        };
        let buffer = if let Some(buffer) = self.own.pop() {
            buffer
        } else {
            self.shared.own_taken.fetch_add(1, Ordering::Relaxed);
            ReadBuffers::shared().take(self.shared.cell_buffer)?
        };
        let (offset, len) = aligned(&cell.bytes, self.shared.alignment);
        let timeout = self.shared.stall_timeout;
        let read = read_cached(&mut queue, file, offset, len, buffer, timeout);
        if matches!(read, Err(Error::Timeout { .. })) {
            // The disk hangs. This leaks the queue and its buffer: dropping them would hang too.
            std::mem::forget(queue);
            return read.map(|_| 0);
        }
        self.queue = Some(queue);
        let Completion { buffer, result, .. } = read?;
        let buffer = used.insert(Arc::new(buffer));
        let skip = (cell.bytes.start - offset) as usize;
        let wanted = (cell.bytes.end - offset) as usize;
        let count = match result {
            Ok(count) => count,
            Err(error) => {
                self.shared.sink.failed(number..number + 1, error)?;
                return Ok(0);
            }
        };
        match Staged::new(buffer, skip..wanted) {
            Some(bytes) if count >= wanted => self.shared.sink.cell(number, &bytes, started)?,
            _ => {
                let error = short(file.path(), offset + count as u64, cell.bytes.end);
                self.shared.sink.failed(number..number + 1, error)?;
            }
        }
        Ok(cell.bytes.end - cell.bytes.start)
    }
}

/// Does one read through the page cache. The queue has no other transfer. After a
/// [`Error::Timeout`] the disk still owns the buffer, and the queue must be leaked.
pub(in crate::load) fn read_cached(
    queue: &mut Box<dyn Queue>,
    file: &Arc<dyn File>,
    offset: u64,
    len: usize,
    buffer: Buffer,
    stall_timeout: Duration,
) -> Result<Completion> {
    queue.submit(Transfer::ReadCached, file, offset, len, buffer, 0);
    let deadline = deadline_after(stall_timeout);
    loop {
        if let Some(completion) = queue.complete(POLL_INTERVAL) {
            return Ok(completion);
        }
        if queue.in_flight() == 0 {
            return Err(Error::internal("a read in the queue", "an empty queue"));
        }
        if Instant::now() >= deadline {
            let waited_for = format!("{} to be read through the page cache", file.path().display());
            return Err(Error::Timeout { waited_for, seconds: stall_timeout.as_secs_f64() });
        }
    }
}

/// Converts a panic of a worker into an error of the run.
fn guarded(work: impl FnOnce() -> Result<u64>) -> Result<u64> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic
            .downcast_ref::<&str>()
            .map(ToString::to_string)
            .or_else(|| panic.downcast_ref::<String>().cloned())
            .unwrap_or_else(|| "no message".into());
        Err(Error::internal("a result", format!("a reading thread panicked: {text}")))
    })
}
