//! The memory that restores read into: page-aligned buffers, kept for the next restore.
//!
//! Each process has one [`ReadBuffers`], made by the first restore. Keeping buffers saves time:
//! mapping and touching fresh memory costs as much as reading it from a fast disk. The idle bytes
//! are bounded. A forked child does not inherit the buffers (`MADV_DONTFORK`) and makes its own.

use std::sync::{Mutex, OnceLock, PoisonError};

use crate::sys::{Birth, Buffer, Mapping};
use crate::{Error, Result};

/// The smallest buffer size, in bytes.
const SMALLEST: usize = 64 << 10;
/// Bytes of a mapping that is cut into several buffers. Buffers of more than half of this get their
/// own mapping.
const MAPPING: usize = 2 << 20;
/// The limit on bytes of idle buffers.
const KEEP_BYTES: usize = 64 << 20;

/// The process's cache of read buffers.
#[derive(Debug)]
pub(super) struct ReadBuffers {
    idle: Mutex<Idle>,
}

#[derive(Debug)]
struct Idle {
    /// The process that mapped the buffers.
    birth: Birth,
    /// Ordered by last use, the most recent last.
    buffers: Vec<Buffer>,
}

impl Idle {
    fn here(&mut self) -> &mut Vec<Buffer> {
        if !self.birth.is_here() {
            self.birth = Birth::now();
            // The buffers belong to the parent: their memory is not mapped in this process.
            std::mem::forget(std::mem::take(&mut self.buffers));
        }
        &mut self.buffers
    }
}

impl Default for ReadBuffers {
    fn default() -> Self {
        Self { idle: Mutex::new(Idle { birth: Birth::now(), buffers: Vec::new() }) }
    }
}

static SHARED: OnceLock<ReadBuffers> = OnceLock::new();

impl ReadBuffers {
    /// Returns the process's buffers.
    pub(super) fn shared() -> &'static Self {
        SHARED.get_or_init(Self::default)
    }

    /// Returns a buffer of at least `len` bytes: the idle one that was used last, or a new one.
    pub(super) fn take(&self, len: usize) -> Result<Buffer> {
        let len = Self::size(len);
        let mut guard = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let idle = guard.here();
        if let Some(at) = idle.iter().rposition(|buffer| buffer.len() == len) {
            return Ok(idle.remove(at));
        }
        if len > MAPPING / 2 {
            // Mapped without the lock.
            drop(guard);
            return Buffer::alone(len);
        }
        let mut buffers = Mapping::new(MAPPING)?.into_buffers(len)?;
        let buffer =
            buffers.pop().ok_or_else(|| Error::internal("a mapping of at least one buffer", "none"))?;
        idle.append(&mut buffers);
        Ok(buffer)
    }

    /// Rounds `len` up to a buffer size. Few sizes exist, so that buffers are reused.
    pub(super) fn size(len: usize) -> usize {
        if len > 2 * MAPPING { len.next_multiple_of(MAPPING) } else { len.max(SMALLEST).next_power_of_two() }
    }

    /// Returns a buffer to the cache.
    pub(super) fn give(&self, buffer: Buffer) {
        let mut guard = self.idle.lock().unwrap_or_else(PoisonError::into_inner);
        let idle = guard.here();
        idle.push(buffer);
        let mut bytes: usize = idle.iter().map(|buffer| buffer.len()).sum();
        // Drop the buffers that were idle longest.
        let mut surplus = 0;
        for buffer in idle.iter() {
            if bytes <= KEEP_BYTES {
                break;
            }
            bytes -= buffer.len();
            surplus += 1;
        }
        let dropped: Vec<Buffer> = idle.drain(..surplus).collect();
        // Unmapped without the lock.
        drop(guard);
        drop(dropped);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl ReadBuffers {
        /// Returns the bytes of the idle buffers.
        pub(in crate::load) fn idle_bytes(&self) -> usize {
            self.idle.lock().unwrap().here().iter().map(|buffer| buffer.len()).sum()
        }
    }

    #[test]
    fn a_buffer_is_used_again_and_no_more_than_the_limit_is_kept() {
        let buffers = ReadBuffers::default();
        let first = buffers.take(1 << 20).unwrap();
        let address = first.as_ptr();
        buffers.give(first);
        assert_eq!(buffers.take(1 << 20).unwrap().as_ptr(), address);
        // The idle byte count is the other half of the buffer's mapping.
        assert_eq!(buffers.idle_bytes(), 1 << 20);
        let many: Vec<_> = (0..5).map(|_| buffers.take(16 << 20).unwrap()).collect();
        for buffer in many {
            buffers.give(buffer);
        }
        assert!((KEEP_BYTES - (16 << 20)..=KEEP_BYTES).contains(&buffers.idle_bytes()));
    }

    #[test]
    fn all_users_share_one_set_and_what_a_set_keeps_goes_with_it() {
        let mine = ReadBuffers::shared();
        assert!(std::ptr::eq(mine, ReadBuffers::shared()));
        let buffer = mine.take(3 << 20).unwrap();
        let mapping = std::sync::Arc::downgrade(buffer.mapping());
        let private = ReadBuffers::default();
        private.give(buffer);
        assert!(mapping.upgrade().is_some());
        drop(private);
        assert!(mapping.upgrade().is_none());
    }
}
