//! Queues over io_uring: the kernel does the transfers, and only the caller waits.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::transfer::{Moving, TransferJob};
use super::{Completion, File, Queue, STALL_TIMEOUT, Transfer, full};
use crate::deadline::deadline_after;
use crate::sys::{Buffer, Flight, Mapping, Ring};
use crate::{Error, Result};

/// See the module documentation.
pub struct UringQueue {
    ring: Ring<Moving>,
    ready: VecDeque<Completion>,
    depth: usize,
    alignment: usize,
    stall_timeout: Duration,
}

impl UringQueue {
    /// Returns a queue of `depth` transfers, at offsets that are multiples of `alignment`.
    /// Registers `memory` if the system allows it.
    pub fn new(depth: usize, alignment: usize, memory: Vec<Arc<Mapping>>) -> Result<Self> {
        Self::with_stall_timeout(depth, alignment, memory, STALL_TIMEOUT)
    }

    fn with_stall_timeout(
        depth: usize,
        alignment: usize,
        memory: Vec<Arc<Mapping>>,
        stall_timeout: Duration,
    ) -> Result<Self> {
        let depth = depth.clamp(1, 1024);
        let mut ring = Ring::new(depth, stall_timeout).map_err(|source| failed("io_uring_setup", source))?;
        if !memory.is_empty()
            && let Err(error) = ring.register(memory)
        {
            tracing::debug!(%error, "memory could not be registered; transfers pin it one by one");
        }
        Ok(Self { ring, ready: VecDeque::new(), depth, alignment, stall_timeout })
    }

    fn start(&mut self, buffer: Buffer, descriptor: Arc<crate::sys::Descriptor>, moving: Moving) {
        let piece = moving.piece();
        let flight = Flight { buffer, descriptor, note: moving };
        let range = piece.at..piece.at + piece.len;
        if let Err((flight, source)) = self.ring.push(flight.note.writes(), piece.offset, range, flight) {
            let error = flight.note.error(source);
            self.ready.push_back(flight.note.complete(flight.buffer, Err(error)));
        }
    }

    /// Takes completions, and submits the rest of unfinished transfers.
    fn reap(&mut self) {
        let mut restarted = false;
        while let Some((flight, answer)) = self.ring.take_finished() {
            let Flight { buffer, descriptor, note: mut moving } = flight;
            let answer = usize::try_from(answer).map_err(|_| answer.saturating_neg());
            if let Some(result) = moving.answered(answer) {
                self.ready.push_back(moving.complete(buffer, result));
            } else {
                self.start(buffer, descriptor, moving);
                restarted = true;
            }
        }
        if restarted {
            self.enter(None);
        }
    }

    fn enter(&mut self, wait: Option<Duration>) {
        if let Err(error) = self.ring.enter(wait) {
            // Transfers in flight may still complete. If they do not, the caller's deadline ends
            // the wait.
            tracing::error!(%error, "io_uring_enter failed");
            std::thread::sleep(Duration::from_millis(10).min(wait.unwrap_or_default()));
        }
    }
}

impl Queue for UringQueue {
    fn submit(
        &mut self,
        transfer: Transfer,
        file: &Arc<dyn File>,
        offset: u64,
        len: usize,
        buffer: Buffer,
        token: u64,
    ) {
        if !self.ring.is_here() {
            let result = Err(Error::Forked("I/O queue"));
            self.ready.push_back(Completion { token, buffer, result });
            return;
        }
        let deadline = deadline_after(self.stall_timeout);
        loop {
            self.reap();
            if self.ring.in_flight() < self.depth {
                break;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let result = Err(full(self.ring.in_flight(), self.stall_timeout));
                self.ready.push_back(Completion { token, buffer, result });
                return;
            }
            self.enter(Some(left));
        }
        match TransferJob::new(self.alignment, transfer, file, offset, len, buffer, token) {
            Err(refusal) => self.ready.push_back(*refusal),
            Ok(job) if len == 0 => self.ready.push_back(job.moving.complete(job.buffer, Ok(0))),
            Ok(TransferJob { buffer, descriptor, moving }) => {
                self.start(buffer, descriptor, moving);
                self.enter(None);
            }
        }
    }

    fn complete(&mut self, timeout: Duration) -> Option<Completion> {
        let deadline = deadline_after(timeout);
        let mut expired = false;
        loop {
            if self.ready.is_empty() {
                self.reap();
            }
            if let Some(done) = self.ready.pop_front() {
                return Some(done);
            }
            if expired || !self.ring.is_here() || self.ring.in_flight() == 0 {
                return None;
            }
            let left = deadline.saturating_duration_since(Instant::now());
            expired = left.is_zero();
            self.enter(Some(left));
        }
    }

    fn in_flight(&self) -> usize {
        let ours = if self.ring.is_here() { self.ring.in_flight() } else { 0 };
        ours + self.ready.len()
    }
}

/// Checks that all this memory can be registered.
pub fn try_register(memory: Vec<Arc<Mapping>>) -> Result<()> {
    let mut ring = Ring::<()>::new(1, STALL_TIMEOUT).map_err(|source| failed("io_uring_setup", source))?;
    ring.register(memory).map_err(|source| failed("io_uring_register", source))
}

fn failed(op: &'static str, source: io::Error) -> Error {
    Error::io(op, "<I/O queue>", source)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::io::{Engine, open_disk};
    use crate::sys::Descriptor;
    use crate::sys::testing::absent;

    #[test]
    fn a_stuck_full_ring_returns_the_buffer_with_a_timeout() {
        let timeout = Duration::from_millis(50);
        let mut queue = match UringQueue::with_stall_timeout(1, 1, Vec::new(), timeout) {
            Ok(queue) => queue,
            Err(error) => return absent("uring", &error),
        };
        let dir = tempfile::tempdir().unwrap();
        let disk = open_disk(dir.path(), Engine::Buffered).unwrap();
        let file = disk.open_dir(dir.path()).unwrap().create_file("f", 0).unwrap();
        // A read of a pipe that nobody writes to.
        let (from, to) = io::pipe().unwrap();
        let job = TransferJob::new(1, Transfer::Read, &file, 0, 16, Buffer::alone(4096).unwrap(), 1);
        let Ok(TransferJob { buffer, moving, .. }) = job else { panic!("it is a job") };
        queue.start(buffer, Arc::new(Descriptor::new(from.into(), "pipe")), moving);
        queue.enter(None);
        let begun = Instant::now();
        queue.submit(Transfer::Write, &file, 0, 4096, Buffer::alone(4096).unwrap(), 7);
        assert!(begun.elapsed() >= timeout && begun.elapsed() < Duration::from_secs(20));
        let refused = queue.complete(Duration::ZERO).unwrap();
        assert_eq!(refused.token, 7);
        assert_eq!(refused.result.unwrap_err().kind(), "timeout");
        drop(to);
    }
}
