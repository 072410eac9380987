//! The memory that restores read into: page-aligned buffers, kept for the next restore as long as the process has a user of them.
//!
//! One [`ReadBuffers`] per process, counted by its users (every [`super::FileSet`] is one, and a manager may hold one for as long as it lives) and freed by the last.
//! Mapping and touching fresh memory costs as much as reading it from a fast disk; that is why it is kept.

use std::sync::{Arc, Mutex, PoisonError, Weak};

use crate::Result;
use crate::sys::Buffer;

/// Most bytes that are kept while nobody reads.
const KEEP_BYTES: usize = 64 << 20;

/// See the module documentation.
#[derive(Debug, Default)]
pub struct ReadBuffers {
    idle: Mutex<Vec<Buffer>>,
}

static SHARED: Mutex<Weak<ReadBuffers>> = Mutex::new(Weak::new());

impl ReadBuffers {
    /// The process's buffers. They live as long as somebody holds this.
    pub fn shared() -> Arc<Self> {
        let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
        shared.upgrade().unwrap_or_else(|| {
            let buffers = Arc::new(Self::default());
            *shared = Arc::downgrade(&buffers);
            buffers
        })
    }

    /// Bytes that are kept at the moment.
    pub fn idle_bytes(&self) -> usize {
        self.idle.lock().unwrap_or_else(PoisonError::into_inner).iter().map(|buffer| buffer.len()).sum()
    }

    /// A buffer of `len` bytes (rounded up to whole pages), an idle one if there is one: the one that was used last.
    pub(super) fn take(&self, len: usize) -> Result<Buffer> {
        let len = len.max(1).next_multiple_of(4096);
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(at) = idle.iter().rposition(|buffer| buffer.len() == len) {
            return Ok(idle.remove(at));
        }
        drop(idle);
        Buffer::alone(len)
    }

    /// Takes a buffer back.
    pub(super) fn give(&self, buffer: Buffer) {
        let mut idle = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        idle.push(buffer);
        let mut bytes: usize = idle.iter().map(|buffer| buffer.len()).sum();
        // The longest idle go first.
        let mut surplus = 0;
        for buffer in idle.iter() {
            if bytes <= KEEP_BYTES {
                break;
            }
            bytes -= buffer.len();
            surplus += 1;
        }
        let dropped: Vec<Buffer> = idle.drain(..surplus).collect();
        drop(idle);
        drop(dropped);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_buffer_is_used_again_and_no_more_than_the_limit_is_kept() {
        let buffers = ReadBuffers::default();
        let first = buffers.take(1 << 20).unwrap();
        let address = first.as_ptr();
        buffers.give(first);
        assert_eq!(buffers.take(1 << 20).unwrap().as_ptr(), address);
        assert_eq!(buffers.idle_bytes(), 0);
        let many: Vec<_> = (0..5).map(|_| buffers.take(16 << 20).unwrap()).collect();
        many.into_iter().for_each(|buffer| buffers.give(buffer));
        assert_eq!(buffers.idle_bytes(), KEEP_BYTES);
    }

    #[test]
    fn the_last_user_frees_them() {
        // Other tests of this process use the shared buffers too: only the counting is looked at.
        let mine = ReadBuffers::shared();
        assert!(Arc::ptr_eq(&mine, &ReadBuffers::shared()));
        let weak = Arc::downgrade(&Arc::new(ReadBuffers::default()));
        assert!(weak.upgrade().is_none());
    }
}
