//! Arrays on a device are captured while the training goes on, and never torn: the whole path, from
//! the provider to the committed file and back, over the fake CUDA driver.
#![expect(clippy::unwrap_used, clippy::panic, clippy::indexing_slicing, reason = "tests end by them")]

mod failures;
mod guard;
mod random;
mod restore;
mod strided;
mod world;
