//! Pure planning: who holds what, how it is cut, what a restore reads. No files, no threads.
//!
//! ```text
//! save:    layout ─subchunk─▶ chunks ─tiling─▶ "covers the tensor exactly once"
//! restore: wanted leaves × stored leaves ─matching─▶ report ─overlap─▶ copies
//! ```
//!
//! | module | what it holds |
//! |---|---|
//! | [`layout`] | what a process holds: regions of logical tensors ↔ strided places in a buffer |
//! | [`subchunk`] | how a shard is cut into chunks; a flat run as boxes |
//! | [`partition`] | who writes what of the regions that several ranks hold |
//! | [`tiling`] | whether chunks cover a tensor exactly once |
//! | [`glob`] [`selection`] | patterns over rendered leaf paths; include, exclude, rename |
//! | [`mapping`] | tensors made of parts of stored ones |
//! | [`computed`] | tensors that are computed from others |
//! | [`cast`] | which casts keep every value |
//! | [`matching`] | wanted × stored → one report |
//! | [`overlap`] [`read_plan`] | which chunks a region needs; which copies a restore makes |
#![forbid(unsafe_code)]

pub mod cast;
pub mod computed;
mod error;
pub mod glob;
pub mod layout;
pub mod mapping;
pub mod matching;
pub mod overlap;
pub mod partition;
pub mod read_plan;
pub mod selection;
pub mod subchunk;
#[cfg(test)]
mod testing;
pub mod tiling;

pub use error::{Error, Result};
