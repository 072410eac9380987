//! Queues over a few threads that call `pread` and `pwrite`: the engines `threads` (O_DIRECT) and
//! `buffered` (page cache).

use std::num::NonZeroU64;
use std::os::fd::BorrowedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::io::Errno;

use super::transfer::TransferJob;
use super::workers::{Job, TransferWorkers};
use super::{Completion, File, Queue, Transfer};
use crate::sys::{Buffer, write_out};
use crate::{Error, Result};

/// The threads of one queue. Eight saturate all measured disks. More would only compete for memory
/// bandwidth.
const MAX_THREADS: usize = 8;

/// See the module documentation.
pub struct ThreadedQueue {
    workers: TransferWorkers<TransferJob>,
    alignment: usize,
}

impl ThreadedQueue {
    /// Returns a queue of `depth` transfers, at offsets that are multiples of `alignment`.
    pub fn new(depth: usize, alignment: usize) -> Result<Self> {
        Ok(Self { workers: TransferWorkers::new(depth, MAX_THREADS)?, alignment })
    }
}

impl Job for TransferJob {
    fn perform(self) -> Completion {
        let Self { mut buffer, descriptor, mut moving } = self;
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

    fn refuse(self, error: Error) -> Completion {
        self.moving.complete(self.buffer, Err(error))
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
        match TransferJob::new(self.alignment, transfer, file, offset, len, buffer, token) {
            // The bytes are in the page cache: passing the job to another thread and back would
            // take longer than the copy.
            Ok(job) if transfer == Transfer::ReadCached => self.workers.end(job.perform()),
            Ok(job) => self.workers.submit(job),
            Err(refusal) => self.workers.end(*refusal),
        }
    }

    fn complete(&mut self, timeout: Duration) -> Option<Completion> {
        self.workers.complete(timeout)
    }

    fn in_flight(&self) -> usize {
        self.workers.in_flight()
    }
}
