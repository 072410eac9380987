//! The queue in which a device copies to the host.

use std::fmt;

use crate::Result;
use crate::sys::{Device, UserStream};

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
