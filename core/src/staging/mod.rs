//! Staging: the fixed host memory that every saved byte passes through.
//!
//! A [`StagingPool`] owns the ring (mapped once, in huge pages, touched before use) and the few
//! threads that help to capture. It lends its memory as [`Slot`]s, whose type says what may be done
//! with them; dropping a slot in any state gives its memory back. Backpressure is the number of
//! slots: who needs one waits, with a deadline on lack of progress.

mod copy_queue;
mod helpers;
mod lease;
mod pool;
mod slot;

pub use copy_queue::CopyQueue;
pub use pool::{DEFAULT_SLOT_BYTES, StagingPool};
pub use slot::{Filled, Filling, Flushing, Free, Full, Pending, Slot, Written};

pub(crate) use helpers::{Door, Task};
