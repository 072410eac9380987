//! Queues over a few threads that call `pread` and `pwrite`: the engines `threads` (O_DIRECT) and
//! `buffered` (page cache).
//!
//! The threads belong to their queue. They start when they are first needed, and end with it. A
//! thread owns the memory that it transfers. So a queue can be dropped while a disk hangs: the
//! thread frees its memory when the kernel answers.

use std::collections::VecDeque;
use std::num::NonZeroU64;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, unbounded};

use rustix::io::Errno;

use super::transfer::TransferJob;
use super::{Completion, File, Queue, STALL_TIMEOUT, Transfer, full};
use crate::sys::{Birth, Buffer, spawn, write_out};
use crate::{Error, Result};

/// The threads of one queue. Eight saturate all measured disks. More would only compete for memory
/// bandwidth.
const MAX_THREADS: usize = 8;

/// See the module documentation.
pub struct ThreadedQueue {
    /// `None` only in a forked child, which leaks it: its threads do not exist there, and its locks
    /// may be held permanently.
    inner: Option<Inner>,
    refused: VecDeque<Completion>,
    birth: Birth,
}

struct Inner {
    jobs: Option<Sender<TransferJob>>,
    pending: Receiver<TransferJob>,
    finished: Receiver<Completion>,
    finish: Sender<Completion>,
    threads: Vec<JoinHandle<()>>,
    ready: VecDeque<Completion>,
    /// The number of transfers that the threads have.
    running: usize,
    depth: usize,
    alignment: usize,
    stall_timeout: Duration,
}

impl ThreadedQueue {
    /// Returns a queue of `depth` transfers, at offsets that are multiples of `alignment`.
    pub fn new(depth: usize, alignment: usize) -> Result<Self> {
        Self::with_stall_timeout(depth, alignment, STALL_TIMEOUT)
    }

    fn with_stall_timeout(depth: usize, alignment: usize, stall_timeout: Duration) -> Result<Self> {
        let (jobs, pending) = unbounded();
        let (finish, finished) = unbounded();
        let mut inner = Inner {
            jobs: Some(jobs),
            pending,
            finished,
            finish,
            threads: Vec::new(),
            ready: VecDeque::new(),
            running: 0,
            depth: depth.max(1),
            alignment,
            stall_timeout,
        };
        // Start the first thread now, so that a process without threads gets the error here.
        inner.start_thread().map_err(|source| Error::io("start a thread for", "<I/O queue>", source))?;
        Ok(Self { inner: Some(inner), refused: VecDeque::new(), birth: Birth::now() })
    }

    fn inner(&mut self) -> Option<&mut Inner> {
        self.inner.as_mut().filter(|_| self.birth.is_here())
    }
}

impl Inner {
    fn start_thread(&mut self) -> std::io::Result<()> {
        let (jobs, finish) = (self.pending.clone(), self.finish.clone());
        self.threads.push(spawn("stepwell-io", move || {
            for job in jobs {
                if finish.send(perform(job)).is_err() {
                    break; // the queue is gone, and with this send the buffer
                }
            }
        })?);
        Ok(())
    }

    fn receive(&mut self, timeout: Duration) -> bool {
        if self.running == 0 {
            return false;
        }
        let Ok(completion) = self.finished.recv_timeout(timeout) else { return false };
        self.running -= 1;
        self.ready.push_back(completion);
        true
    }

    /// Sends a job to the threads. Returns it if the queue stays full.
    fn submit(&mut self, job: TransferJob) -> Result<(), TransferJob> {
        if self.running >= self.depth && !self.receive(self.stall_timeout) {
            return Err(job);
        }
        if self.running >= self.threads.len() && self.threads.len() < MAX_THREADS.min(self.depth) {
            // If the system refuses one more thread, the running ones do the work.
            let _ = self.start_thread();
        }
        let Some(jobs) = &self.jobs else { return Err(job) };
        jobs.send(job).map_err(|unsent| unsent.0)?;
        self.running += 1;
        Ok(())
    }
}

/// Moves all bytes of a job.
fn perform(job: TransferJob) -> Completion {
    let TransferJob { mut buffer, descriptor, mut moving } = job;
    loop {
        let piece = moving.piece();
        let range = piece.at..piece.at + piece.len;
        let answer = match descriptor.get() {
            Err(error) => return moving.complete(buffer, Err(error)),
            Ok(_) if piece.len == 0 => Ok(0),
            Ok(fd) if moving.writes() => {
                let bytes = buffer.get(range).unwrap_or_default();
                rustix::io::pwrite(fd, bytes, piece.offset).and_then(|count| {
                    if !moving.is_direct() {
                        pass_through_cache(fd, piece.offset, count)?;
                    }
                    Ok(count)
                })
            }
            Ok(fd) => rustix::io::pread(fd, buffer.get_mut(range).unwrap_or_default(), piece.offset),
        };
        if let Some(result) = moving.answered(answer.map_err(Errno::raw_os_error)) {
            return moving.complete(buffer, result);
        }
    }
}

/// Drops just written pages from the page cache. Otherwise a checkpoint would displace the pages of
/// the training, take new memory for every byte, and leave all disk writes to the fsync.
fn pass_through_cache(fd: BorrowedFd<'_>, offset: u64, len: usize) -> rustix::io::Result<()> {
    write_out(fd, offset, len).map_err(|error| Errno::from_io_error(&error).unwrap_or(Errno::IO))?;
    // Advice only. The kernel may keep the pages.
    let _ = rustix::fs::fadvise(fd, offset, NonZeroU64::new(len as u64), rustix::fs::Advice::DontNeed);
    Ok(())
}

impl Queue for ThreadedQueue {
    fn submit(
        &mut self,
        transfer: Transfer,
        file: &Arc<dyn File>,
        offset: u64,
        len: usize,
        buffer: Buffer,
        token: u64,
    ) {
        let Some(inner) = self.inner() else {
            let result = Err(Error::Forked("I/O queue"));
            self.refused.push_back(Completion { token, buffer, result });
            return;
        };
        match TransferJob::new(inner.alignment, transfer, file, offset, len, buffer, token) {
            // The bytes are in the page cache: passing the job to another thread and back would
            // take longer than the copy.
            Ok(job) if transfer == Transfer::ReadCached => inner.ready.push_back(perform(job)),
            Ok(job) => {
                if let Err(TransferJob { buffer, moving, .. }) = inner.submit(job) {
                    let error = full(inner.running, inner.stall_timeout);
                    self.refused.push_back(moving.complete(buffer, Err(error)));
                }
            }
            Err(refusal) => self.refused.push_back(*refusal),
        }
    }

    fn complete(&mut self, timeout: Duration) -> Option<Completion> {
        if let Some(refusal) = self.refused.pop_front() {
            return Some(refusal);
        }
        let inner = self.inner()?;
        if inner.ready.is_empty() {
            inner.receive(timeout);
        }
        inner.ready.pop_front()
    }

    fn in_flight(&self) -> usize {
        let inner = self.inner.as_ref().filter(|_| self.birth.is_here());
        self.refused.len() + inner.map_or(0, |inner| inner.running + inner.ready.len())
    }
}

impl Drop for ThreadedQueue {
    fn drop(&mut self) {
        let inner = self.inner.take();
        if self.birth.is_here() {
            drop(inner);
        } else {
            std::mem::forget(inner);
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.jobs = None;
        // Cancel transfers that no thread has started.
        while self.pending.try_recv().is_ok() {
            self.running -= 1;
        }
        while self.receive(self.stall_timeout) {}
        if self.running > 0 {
            // Detach the threads. Each keeps its channels, its buffer and its file, and frees them
            // when the kernel answers.
            tracing::error!(
                transfers = self.running,
                seconds = self.stall_timeout.as_secs_f64(),
                "the kernel does not return; the threads of this queue and their memory are left to it"
            );
            return;
        }
        // All jobs are done, and the channel is closed.
        for thread in self.threads.drain(..) {
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::{Engine, open_disk};

    #[test]
    fn a_stuck_full_queue_returns_the_buffer_with_a_timeout() {
        let dir = tempfile::tempdir().unwrap();
        let disk = open_disk(dir.path(), Engine::Buffered).unwrap();
        let file = disk.open_dir(dir.path()).unwrap().create_file("f", 0).unwrap();
        let mut queue = ThreadedQueue::with_stall_timeout(1, 1, Duration::from_millis(50)).unwrap();
        // A transfer that no thread will answer.
        queue.inner.as_mut().unwrap().running = 1;
        let begun = std::time::Instant::now();
        queue.submit(Transfer::Write, &file, 0, 4096, Buffer::alone(4096).unwrap(), 7);
        assert!(begun.elapsed() < Duration::from_secs(20));
        let refused = queue.complete(Duration::ZERO).unwrap();
        assert_eq!((refused.token, refused.buffer.len() >= 4096), (7, true));
        let error = refused.result.unwrap_err();
        assert!(error.to_string().contains("1 transfers stuck in flight"), "{error}");
        assert_eq!(error.kind(), "timeout");
    }
}
