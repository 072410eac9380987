//! The locks, conditions, channels and threads of staging, of the save pipeline, and of a save's
//! handle: the code whose interleavings are tested.
//!
//! In the product they are the standard library's and crossbeam's, under other names. With the
//! feature `interleavings`, which only tests switch on, they are
//! [shuttle](https://docs.rs/shuttle)'s: every operation is then a point at which a scheduler may
//! let another thread go on. Nothing but a change of these names is between the product and what is
//! tested.
//!
//! What is only counted or looked at (progress, the flag of a caller who wants a save no more)
//! stays with `std`.

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
