//! The locks, conditions, channels and threads of staging, of the save pipeline, and of a save's
//! handle: the code whose interleavings are tested.
//!
//! In the product they are aliases of the standard library's and crossbeam's. With the feature
//! `interleavings`, used only by tests, they are [shuttle](https://docs.rs/shuttle)'s: a scheduler
//! may switch threads at every operation. These names are the only difference between the product
//! and the tested code.
//!
//! Plain counters and flags (progress, cancellation) stay with `std`.

#[cfg(not(feature = "interleavings"))]
mod real {
    pub use std::sync::atomic::{AtomicBool, AtomicUsize};
    pub use std::sync::{Condvar, Mutex, MutexGuard};
    pub use std::thread::JoinHandle;

    pub use crossbeam_channel::{Receiver, RecvTimeoutError, Sender, TryRecvError, unbounded};

    pub use crate::sys::spawn;
}

#[cfg(not(feature = "interleavings"))]
pub use real::*;

#[cfg(feature = "interleavings")]
pub mod testing;
#[cfg(feature = "interleavings")]
pub use testing::*;
