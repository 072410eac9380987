//! Fences: waits for copies that were started and are not complete yet.

use std::fmt;
use std::time::Instant;

use crate::Result;
use crate::sys::{Device, UserStream};

/// A point in a queue of copies.
pub trait Fence: Send {
    /// Waits on this thread. [`crate::Error::Timeout`] at the deadline; it may be asked again. Any
    /// other error says that the copies failed, and that nothing is on its way any more.
    fn host_wait(&self, deadline: Instant) -> Result<()>;
}

/// A device's queue of copies to the host, and its order relative to other work on that device.
/// Neither call blocks its thread.
///
/// (Lazy capture in the immutability window of a training step, and its fence: DataStates-LLM, §4.)
pub trait CopyQueue: Send + Sync + fmt::Debug {
    /// The device's number.
    fn ordinal(&self) -> u32;

    /// Makes copies that are started from now on wait for what is on the caller's stream now: they
    /// see what it has written.
    fn follow(&self, stream: UserStream) -> Result<()>;

    /// Makes what is put on the caller's stream from now on wait for the copies that were started
    /// so far: it may write to what they read.
    fn precede(&self, stream: UserStream) -> Result<()>;
}

impl CopyQueue for Device {
    fn ordinal(&self) -> u32 {
        self.ordinal()
    }

    fn follow(&self, stream: UserStream) -> Result<()> {
        self.send_after(stream)
    }

    fn precede(&self, stream: UserStream) -> Result<()> {
        self.sent_before(stream)
    }
}
