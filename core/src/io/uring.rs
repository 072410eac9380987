//! Queues over io_uring: the kernel moves what is in flight, and nobody waits but the caller.

use std::collections::VecDeque;
use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::transfer::{Job, Moving};
use super::{Completion, DROP_DEADLINE, File, Queue, Transfer};
use crate::sys::{Buffer, Flight, Mapping, Ring};
use crate::{Error, Result};

/// See the module documentation.
pub struct UringQueue {
    ring: Ring<Moving>,
    ready: VecDeque<Completion>,
    depth: usize,
    alignment: usize,
}

impl UringQueue {
    /// A queue of `depth` transfers, at offsets that are multiples of `alignment`. `memory` is registered where the system allows it.
    pub fn new(depth: usize, alignment: usize, memory: Vec<Arc<Mapping>>) -> Result<Self> {
        let depth = depth.clamp(1, 1024);
        let mut ring = Ring::new(depth, DROP_DEADLINE).map_err(|source| failed("io_uring_setup", source))?;
        if !memory.is_empty()
            && let Err(error) = ring.register(memory)
        {
            tracing::debug!(%error, "memory could not be registered; transfers pin it one by one");
        }
        Ok(Self { ring, ready: VecDeque::new(), depth, alignment })
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

    /// Takes in what has come back, and sends on what is not done yet.
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
            // What is in flight may still come back by itself; that it does not is for the caller's deadline to find.
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
        while self.ring.in_flight() >= self.depth {
            self.reap();
            if self.ring.in_flight() >= self.depth {
                self.enter(Some(Duration::from_secs(1)));
            }
        }
        match Job::new(self.alignment, transfer, file, offset, len, buffer, token) {
            Err(refusal) => self.ready.push_back(refusal),
            Ok(job) if len == 0 => self.ready.push_back(job.moving.complete(job.buffer, Ok(0))),
            Ok(Job { buffer, descriptor, moving }) => {
                self.start(buffer, descriptor, moving);
                self.enter(None);
            }
        }
    }

    fn complete(&mut self, timeout: Duration) -> Option<Completion> {
        let deadline = Instant::now().checked_add(timeout);
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
            let left = deadline.map_or(Duration::MAX, |end| end.saturating_duration_since(Instant::now()));
            expired = left.is_zero();
            self.enter(Some(left));
        }
    }

    fn in_flight(&self) -> usize {
        let ours = if self.ring.is_here() { self.ring.in_flight() } else { 0 };
        ours + self.ready.len()
    }
}

/// Whether this memory can be registered, all at once.
pub fn try_register(memory: Vec<Arc<Mapping>>) -> Result<()> {
    let mut ring = Ring::<()>::new(1, DROP_DEADLINE).map_err(|source| failed("io_uring_setup", source))?;
    ring.register(memory).map_err(|source| failed("io_uring_register", source))
}

fn failed(op: &'static str, source: io::Error) -> Error {
    Error::io(op, "<I/O queue>", source)
}
