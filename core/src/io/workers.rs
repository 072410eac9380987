//! Threads that perform the transfers of one queue.
//!
//! The threads belong to their queue. They start when they are first needed, and end with it. A
//! thread owns the memory that it transfers. So a queue can be dropped while a disk hangs: the
//! thread frees its memory when the answer comes.

use std::collections::VecDeque;
use std::thread::JoinHandle;
use std::time::Duration;

use crossbeam_channel::{Receiver, Sender, unbounded};

use super::{Completion, STALL_TIMEOUT, full};
use crate::sys::{Birth, spawn};
use crate::{Error, Result};

/// A transfer that a thread performs.
pub trait Job: Send + 'static {
    /// Moves all its bytes.
    fn perform(self) -> Completion;

    /// Ends it with an error.
    fn refuse(self, error: Error) -> Completion;
}

/// See the module documentation.
pub struct TransferWorkers<J: Job> {
    /// `None` only in a forked child, which leaks it: its threads do not exist there, and its locks
    /// may be held permanently.
    inner: Option<Inner<J>>,
    /// Transfers that no thread performs.
    ended: VecDeque<Completion>,
    birth: Birth,
}

struct Inner<J: Job> {
    jobs: Option<Sender<J>>,
    pending: Receiver<J>,
    finished: Receiver<Completion>,
    finish: Sender<Completion>,
    threads: Vec<JoinHandle<()>>,
    ready: VecDeque<Completion>,
    /// The number of transfers that the threads have.
    running: usize,
    depth: usize,
    max_threads: usize,
    stall_timeout: Duration,
}

impl<J: Job> TransferWorkers<J> {
    /// Returns threads for a queue of `depth` transfers.
    pub fn new(depth: usize, max_threads: usize) -> Result<Self> {
        Self::with_stall_timeout(depth, max_threads, STALL_TIMEOUT)
    }

    fn with_stall_timeout(depth: usize, max_threads: usize, stall_timeout: Duration) -> Result<Self> {
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
            max_threads,
            stall_timeout,
        };
        // Start the first thread now, so that a process without threads gets the error here.
        inner.start_thread().map_err(|source| Error::io("start a thread for", "<I/O queue>", source))?;
        Ok(Self { inner: Some(inner), ended: VecDeque::new(), birth: Birth::now() })
    }

    /// Hands a job to the threads. It ends with an error if the queue stays full.
    pub fn submit(&mut self, job: J) {
        let Some(inner) = self.inner.as_mut().filter(|_| self.birth.is_here()) else {
            return self.end(job.refuse(Error::Forked("I/O queue")));
        };
        if let Err(job) = inner.submit(job) {
            let error = full(inner.running, inner.stall_timeout);
            self.end(job.refuse(error));
        }
    }

    /// Adds a transfer that has ended already.
    pub fn end(&mut self, completion: Completion) {
        self.ended.push_back(completion);
    }

    /// As [`super::Queue::complete`].
    pub fn complete(&mut self, timeout: Duration) -> Option<Completion> {
        if let Some(ended) = self.ended.pop_front() {
            return Some(ended);
        }
        let inner = self.inner.as_mut().filter(|_| self.birth.is_here())?;
        if inner.ready.is_empty() {
            inner.receive(timeout);
        }
        inner.ready.pop_front()
    }

    /// As [`super::Queue::in_flight`].
    pub fn in_flight(&self) -> usize {
        let inner = self.inner.as_ref().filter(|_| self.birth.is_here());
        self.ended.len() + inner.map_or(0, |inner| inner.running + inner.ready.len())
    }
}

impl<J: Job> Inner<J> {
    fn start_thread(&mut self) -> std::io::Result<()> {
        let (jobs, finish) = (self.pending.clone(), self.finish.clone());
        self.threads.push(spawn("stepwell-io", move || {
            for job in jobs {
                if finish.send(job.perform()).is_err() {
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
    fn submit(&mut self, job: J) -> Result<(), J> {
        if self.running >= self.depth && !self.receive(self.stall_timeout) {
            return Err(job);
        }
        if self.running >= self.threads.len() && self.threads.len() < self.max_threads.min(self.depth) {
            // If the system refuses one more thread, the running ones do the work.
            let _ = self.start_thread();
        }
        let Some(jobs) = &self.jobs else { return Err(job) };
        jobs.send(job).map_err(|unsent| unsent.0)?;
        self.running += 1;
        Ok(())
    }
}

impl<J: Job> Drop for TransferWorkers<J> {
    fn drop(&mut self) {
        let inner = self.inner.take();
        if self.birth.is_here() {
            drop(inner);
        } else {
            std::mem::forget(inner);
        }
    }
}

impl<J: Job> Drop for Inner<J> {
    fn drop(&mut self) {
        self.jobs = None;
        // Cancel transfers that no thread has started.
        while self.pending.try_recv().is_ok() {
            self.running -= 1;
        }
        while self.receive(self.stall_timeout) {}
        if self.running > 0 {
            // Detach the threads. Each keeps its channels, its buffer and its file, and frees them
            // when the answer comes.
            tracing::error!(
                transfers = self.running,
                seconds = self.stall_timeout.as_secs_f64(),
                "transfers do not return; the threads of this queue and their memory are left to them"
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
    use crate::sys::Buffer;

    struct Never(Buffer);

    impl Job for Never {
        fn perform(self) -> Completion {
            unreachable!("no thread gets it")
        }

        fn refuse(self, error: Error) -> Completion {
            Completion { token: 7, buffer: self.0, result: Err(error) }
        }
    }

    #[test]
    fn a_stuck_full_queue_returns_the_buffer_with_a_timeout() {
        let mut workers = TransferWorkers::with_stall_timeout(1, 1, Duration::from_millis(50)).unwrap();
        // A transfer that no thread will answer.
        workers.inner.as_mut().unwrap().running = 1;
        let begun = std::time::Instant::now();
        workers.submit(Never(Buffer::alone(4096).unwrap()));
        assert!(begun.elapsed() < Duration::from_secs(20));
        let refused = workers.complete(Duration::ZERO).unwrap();
        assert_eq!((refused.token, refused.buffer.len() >= 4096), (7, true));
        let error = refused.result.unwrap_err();
        assert!(error.to_string().contains("1 transfers stuck in flight"), "{error}");
        assert_eq!(error.kind(), "timeout");
    }
}
