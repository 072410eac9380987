//! What makes somebody wait until copies that were only started are complete.

use std::time::Instant;

use crate::Result;

/// A point in a queue of copies.
pub trait Fence: Send {
    /// Waits on this thread. [`crate::Error::Timeout`] at the deadline; it may be asked again. Any other error says that the copies failed, and that nothing is
    /// on its way any more.
    fn host_wait(&self, deadline: Instant) -> Result<()>;

    /// Makes what is later put on a device stream (its raw handle) wait, without stopping this thread.
    fn enqueue_on(&self, stream: u64) -> Result<()>;
}
