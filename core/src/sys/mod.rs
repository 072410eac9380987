//! The only unsafe code of this crate. Each file exports a safe type whose signature prevents
//! misuse.
#![expect(unsafe_code, reason = "mapped memory and raw system calls; every block says why it is sound")]

mod control_group;
mod copy;
mod cuda;
mod descriptor;
mod exclusive;
mod file;
mod fork;
mod gather;
mod host_source;
mod host_target;
mod lock;
mod machine;
mod memory;
mod piece;
mod scatter;
mod stream;
mod strided;
#[cfg(any(test, feature = "test-support"))]
pub mod testing;
mod thread;
mod uring;

pub use cuda::{Device, DeviceCopies, DeviceMemory, DeviceSource, Driver, UserStream, driver};
pub use descriptor::Descriptor;
pub use exclusive::{Exclusive, with_exclusive_file};
pub use file::{cached_bytes, write_out};
pub use fork::{Birth, generation};
pub use host_source::HostSource;
pub use host_target::HostTarget;
pub use lock::HeldLock;
pub use machine::{available_memory, host_name, random, socket, total_memory};
pub use memory::{Buffer, Mapping, can_map, try_reserve_huge};
pub use piece::{Piece, Staged};
pub use scatter::geometry::CopyDim;
pub(crate) use scatter::geometry::{Strided, walk};
pub(crate) use scatter::{Elsewhere, Scatter, ScatterTarget, ScatterWindow};
pub use thread::{both, cores, each, each_polling, lower_priority, spawn};
pub use uring::{Flight, Ring};
