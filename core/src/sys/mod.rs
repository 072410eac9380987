//! The only unsafe code of this crate. Each file exports a safe type that makes misuse untypeable.
#![expect(unsafe_code, reason = "mapped memory and raw system calls; every block says why it is sound")]

mod host_target;
mod memory;
mod scatter;
mod stream;

pub use host_target::HostTarget;
pub use memory::{Buffer, Mapping};
pub(crate) use scatter::{Scatter, ScatterGuard, Window};
