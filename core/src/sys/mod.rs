//! The only unsafe code of this crate. Each file exports a safe type that makes misuse untypeable.
#![expect(unsafe_code, reason = "mapped memory and raw system calls; every block says why it is sound")]

mod copy;
mod host_source;
mod memory;
mod stream;

pub use host_source::HostSource;
pub use memory::{Buffer, Mapping};
