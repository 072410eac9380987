//! Restoring: what a [`crate::read_plan::ReadPlan`] names is read, checked block by block, and only
//! then copied to where the caller wants it.
//!
//! ```text
//! plan ─schedule─▶ reads of 4 MiB ─Queue─▶ buffers ─workers: check─▶ cells of 512 KiB ─scatter─▶ targets
//!                        └──────── what the page cache holds ────────────▲
//! ```
//!
//! | module | what it is |
//! |---|---|
//! | [`FileSet`] | the files of one item: opened lazily, checked against the index once |
//! | [`execute`] | a read plan carried out into [`Destination`]s |
//! | [`Destination`] | host memory, or a [`DeviceTarget`] |
//! | [`read_objects`] | object leaves, decoded |
//! | [`verify`] | every block of every file, all damage reported |
//! | `schedule` `pipeline` `geometry` `disjoint` | how: what is read when, by whom, and which bytes go where |
//! | `head_start` | the first reads, begun before the plan is there |
//!
//! Memory: the targets, and a budget of read buffers ([`LoadOptions::budget_bytes`]) that the
//! process keeps for the next restore ([`ReadBuffers`]). Invariants: no byte reaches a target
//! before the checksum of its block has held; nothing is written to a target after the call has
//! returned (a device is waited for; one that never answers keeps what it was given, and nobody
//! else uses that); every wait ends.

mod buffers;
pub(crate) mod destination;
pub(crate) mod disjoint;
mod execute;
mod file_set;
pub(crate) mod geometry;
mod head_start;
mod objects;
mod options;
mod pipeline;
mod schedule;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod verify;

pub use buffers::ReadBuffers;
pub use destination::{Destination, DeviceTarget, Piece, Staged, Steps};
pub use execute::{execute, execute_while};
pub use file_set::FileSet;
pub use objects::read_objects;
pub use options::{LoadFailure, LoadOptions, LoadStats};
pub use verify::{Damage, VerifyProgress, VerifyReport, verify};
