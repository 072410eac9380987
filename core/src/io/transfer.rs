//! The engine-neutral part of a transfer: checks, continuation after short answers, errors.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use super::posix::PosixFile;
use super::{Completion, File, Transfer};
use crate::sys::{Buffer, Descriptor};
use crate::{Error, Result};

/// Most bytes of one system call. The kernel's own limit, just below 2 GiB, is not aligned.
const MAX_PIECE: usize = 1 << 30;
/// Most consecutive EAGAIN answers, each followed by a wait of one millisecond.
const MAX_AGAIN: u32 = 5000;
/// Most consecutive direct transfers that move less than one block.
const MAX_STALLS: u32 = 16;

/// A transfer in progress, with everything that it keeps alive.
pub struct TransferJob {
    pub buffer: Buffer,
    pub descriptor: Arc<Descriptor>,
    pub moving: Moving,
}

/// The progress of a transfer.
pub struct Moving {
    transfer: Transfer,
    file: Arc<dyn File>,
    token: u64,
    offset: u64,
    len: usize,
    done: usize,
    /// Alignment of a direct descriptor, otherwise 1.
    alignment: usize,
    again: u32,
    stalls: u32,
}

/// The part of a job for one system call.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferPart {
    /// Offset in the file.
    pub offset: u64,
    /// Offset in the buffer.
    pub at: usize,
    /// Number of bytes.
    pub len: usize,
}

impl TransferJob {
    /// Returns a job, or the completion that refuses it.
    pub fn new(
        alignment: usize,
        transfer: Transfer,
        file: &Arc<dyn File>,
        offset: u64,
        len: usize,
        buffer: Buffer,
        token: u64,
    ) -> Result<Self, Box<Completion>> {
        let within = file.base().checked_add(offset);
        let problem = if len > buffer.len() {
            Some(format!("{len} bytes do not fit a buffer of {}", buffer.len()))
        } else if !offset.is_multiple_of(alignment as u64) || !len.is_multiple_of(alignment) {
            Some(format!("offset {offset} or length {len} is not a multiple of {alignment}"))
        } else if within
            .and_then(|at| at.checked_add(len as u64))
            .is_none_or(|end| i64::try_from(end).is_err())
        {
            Some(format!("no file reaches from {offset} for {len} bytes"))
        } else {
            None
        };
        let refuse = |buffer, error| Box::new(Completion { token, buffer, result: Err(error) });
        if let Some(problem) = problem {
            let expected = format!("a valid transfer on {}", file.path().display());
            return Err(refuse(buffer, Error::internal(expected, problem)));
        }
        let Some(ours) = file.as_any().downcast_ref::<PosixFile>() else {
            let found = format!("{} from another", file.path().display());
            return Err(refuse(buffer, Error::internal("a file of this disk", found)));
        };
        let (descriptor, alignment) = ours.descriptor(transfer);
        if let Err(error) = descriptor.get() {
            return Err(refuse(buffer, error));
        }
        let (file, offset) = (Arc::clone(file), within.unwrap_or(offset));
        let moving = Moving { transfer, file, token, offset, len, done: 0, alignment, again: 0, stalls: 0 };
        Ok(Self { buffer, descriptor, moving })
    }
}

impl Moving {
    /// True if bytes go to the file.
    pub fn writes(&self) -> bool {
        self.transfer == Transfer::Write
    }

    /// True if the descriptor bypasses the page cache.
    pub fn is_direct(&self) -> bool {
        self.alignment > 1
    }

    /// The next piece. Empty only for an empty job.
    pub fn piece(&self) -> TransferPart {
        let len = (self.len - self.done).min(MAX_PIECE);
        TransferPart { offset: self.offset + self.done as u64, at: self.done, len }
    }

    /// Takes the answer to the last piece: bytes moved, or an errno. `Some` ends the job.
    pub fn answered(&mut self, answer: Result<usize, i32>) -> Option<Result<usize>> {
        match answer {
            Ok(count) => self.moved(count),
            Err(libc::EINTR) => None,
            Err(libc::EAGAIN) if self.again < MAX_AGAIN => {
                self.again += 1;
                std::thread::sleep(Duration::from_millis(1));
                None
            }
            Err(errno) => Some(Err(self.error(io::Error::from_raw_os_error(errno)))),
        }
    }

    fn moved(&mut self, count: usize) -> Option<Result<usize>> {
        self.again = 0;
        if count == 0 && self.done < self.len {
            if self.writes() {
                return Some(Err(self.error(io::ErrorKind::WriteZero.into())));
            }
            return Some(Ok(self.done));
        }
        let before = self.done;
        self.done = (self.done + count).min(self.len);
        if self.done == self.len {
            return Some(Ok(self.len));
        }
        let beyond = self.done % self.alignment;
        if beyond == 0 {
            return None;
        }
        // A direct transfer cannot continue inside a block: either the file ends, or the block is
        // moved again.
        if !self.writes() {
            match self.file.len() {
                Ok(end) if self.offset + self.done as u64 >= self.file.base() + end => {
                    return Some(Ok(self.done));
                }
                Ok(_) => {}
                Err(error) => return Some(Err(error)),
            }
        }
        self.done -= beyond;
        self.stalls = if self.done == before { self.stalls + 1 } else { 0 };
        if self.stalls > MAX_STALLS {
            return Some(Err(self.error(io::Error::from_raw_os_error(libc::EIO))));
        }
        None
    }

    /// The error of this transfer.
    pub fn error(&self, source: io::Error) -> Error {
        Error::io(if self.writes() { "write" } else { "read" }, self.file.path(), source)
    }

    /// Completes the transfer and returns the buffer.
    pub fn complete(self, buffer: Buffer, result: Result<usize>) -> Completion {
        Completion { token: self.token, buffer, result }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::io::{Engine, open_disk};

    const BLOCK: usize = 512;

    /// A direct transfer of `blocks` blocks on a file of `file_len` bytes.
    fn job(transfer: Transfer, blocks: usize, file_len: u64) -> TransferJob {
        let dir = tempfile::tempdir().unwrap();
        let disk = open_disk(dir.path(), Engine::Buffered).unwrap();
        let file = disk.open_dir(dir.path()).unwrap().create_file("f", 0).unwrap();
        file.set_len(file_len).unwrap();
        let buffer = Buffer::alone(blocks * BLOCK).unwrap();
        let mut job = TransferJob::new(BLOCK, transfer, &file, 0, blocks * BLOCK, buffer, 7)
            .unwrap_or_else(|refused| panic!("{:?}", refused.result));
        job.moving.alignment = BLOCK;
        job
    }

    proptest! {
        /// For any kernel answers, pieces start at block boundaries, none is skipped, and jobs end.
        #[test]
        fn short_answers_are_continued_without_a_hole(
            answers in prop::collection::vec((0_usize..5000, 0..6), 1..200),
            blocks in 1_usize..20,
            writes: bool,
        ) {
            let len = blocks * BLOCK;
            let transfer = if writes { Transfer::Write } else { Transfer::Read };
            let mut moving = job(transfer, blocks, len as u64).moving;
            let mut moved = 0;
            for (count, kind) in answers {
                let piece = moving.piece();
                prop_assert_eq!(piece.offset % BLOCK as u64, 0);
                prop_assert_eq!(piece.offset, piece.at as u64);
                prop_assert!(piece.at <= moved, "bytes {} to {} were never moved", moved, piece.at);
                prop_assert_eq!(piece.at + piece.len, len);
                let answer = if kind == 0 { Err(libc::EINTR) } else { Ok(1 + count % piece.len) };
                if let Ok(count) = answer {
                    moved = moved.max(piece.at + count);
                }
                match moving.answered(answer) {
                    None => {}
                    Some(Ok(total)) => {
                        prop_assert_eq!((total, moved), (len, len));
                        return Ok(());
                    }
                    // Too many consecutive answers of less than a block.
                    Some(Err(error)) => {
                        prop_assert_eq!(error.errno(), Some(libc::EIO));
                        return Ok(());
                    }
                }
            }
        }
    }

    #[test]
    fn a_read_ends_only_at_the_end_of_the_file() {
        let mut moving = job(Transfer::Read, 8, 1300).moving;
        assert!(moving.answered(Ok(600)).is_none(), "inside the file, the block is read again");
        assert_eq!(moving.piece().at, 512);
        assert_eq!(moving.answered(Ok(1300 - 512)).unwrap().unwrap(), 1300);
        let mut moving = job(Transfer::Read, 8, 1024).moving;
        assert!(moving.answered(Ok(1024)).is_none());
        assert_eq!(moving.answered(Ok(0)).unwrap().unwrap(), 1024);
    }

    #[test]
    fn a_write_without_progress_is_an_error() {
        let mut moving = job(Transfer::Write, 8, 0).moving;
        assert!(moving.answered(Ok(512)).is_none());
        let error = moving.answered(Ok(0)).unwrap().unwrap_err();
        assert!(
            matches!(&error, Error::Io { op: "write", source, .. } if source.kind() == io::ErrorKind::WriteZero)
        );
        let mut moving = job(Transfer::Write, 8, 0).moving;
        let ended = (0..100).find_map(|_| moving.answered(Ok(100)));
        assert_eq!(ended.unwrap().unwrap_err().errno(), Some(libc::EIO));
    }

    #[test]
    fn a_busy_kernel_is_asked_again_and_a_failing_one_is_not() {
        let mut moving = job(Transfer::Write, 1, 0).moving;
        for passing in [libc::EAGAIN, libc::EINTR, libc::EAGAIN] {
            assert!(moving.answered(Err(passing)).is_none());
        }
        for lasting in [libc::EIO, libc::ENOSPC, libc::EDQUOT, libc::ECANCELED] {
            let error = moving.answered(Err(lasting)).unwrap().unwrap_err();
            assert_eq!(error.errno(), Some(lasting));
            assert!(error.file().unwrap().ends_with("f"));
        }
    }
}
