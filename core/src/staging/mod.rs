//! Staging: the fixed host memory that every saved byte passes through.
//!
//! A [`StagingPool`] owns the ring (mapped once, in huge pages, touched before use) and a few
//! helper threads for captures. It lends its memory as [`Slot`]s. The type of a slot says what may
//! be done with it. Dropping a slot returns its memory. The number of slots is the backpressure: a
//! thread waits for a free slot, and fails after the stall timeout without progress.

mod helpers;
mod lease;
mod pool;
mod slot;

pub use pool::{DEFAULT_SLOT_BYTES, StagingPool};
pub use slot::{Filled, Filling, Flushing, Free, Full, Pending, Slot, Written};

pub(crate) use helpers::{Door, Task};
