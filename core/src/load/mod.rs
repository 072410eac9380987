//! Carries out copies ([`crate::read_plan::BoxCopy`]). Every block is read and checked before its
//! bytes are copied to the caller's memory.
//!
//! ```text
//! copies ─schedule─▶ reads of 4 MiB ─Queue─▶ buffers ─workers: check─▶ cells of 512 KiB ─scatter─▶ targets
//!                        └──────── what the page cache holds ────────────▲
//! ```
//!
//! | module | what it is |
//! |---|---|
//! | [`FileSet`] | the files of one item: opened lazily, checked against the index once |
//! | [`execute()`] [`plan`] | copies into [`Destination`]s, and the reads that they need |
//! | [`Destination`] | host memory, or a [`DeviceTarget`] |
//! | [`read_objects`] | object leaves, decoded |
//! | [`index_in_footer`] [`stored_header`] | the index that a data file holds of itself, and its first bytes |
//! | [`verify()`] | every block of every file, all damage reported |
//! | [`KnownFile`] | facts about a foreign file, from before it is opened |
//! | [`BlockChecksums`] [`checksums()`] | checksums of whole foreign files, computed once |
//! | [`CheckedFile`] | a foreign file with such checksums, for parsers |
//! | [`StoredFile`] | a file of a step, checked while it is copied |
//! | [`OtherCopies`] | where bytes are read from that arrived damaged |
//! | [`GuardedRange`] | a range of a foreign file that has a checksum, for [`verify()`] |
//! | `schedule` `pipeline` | what is read when, and by whom |
//! | `encoded` | the same for compressed chunks of our files |
//! | `decode` | the same for compressed streams, from their start on |
//!
//! Memory: the targets, and a budget of read buffers ([`LoadOptions::budget_bytes`]). The process
//! keeps the buffers for the next restore (`buffers`). A [`FileSet`] keeps at most 32 MiB of
//! readers of compressed streams (`decode`).
//!
//! Invariants:
//! * A byte reaches a target only after its block's checksum was verified.
//! * Targets are not written to after the call has returned. The call waits for devices. A device
//!   that never answers keeps its buffers, which are never reused.
//! * Every wait has a deadline.

mod block_checksums;
mod buffers;
mod decode;
mod destination;
mod encoded;
mod execute;
mod file_set;
mod footer_index;
mod guards;
mod mender;
mod objects;
mod options;
mod pipeline;
mod schedule;
mod stored_file;
#[cfg(test)]
mod testing;
#[cfg(test)]
mod tests;
mod verify;

pub use block_checksums::{BlockChecksums, CheckedFile, checksums};
pub use destination::{Destination, DeviceTarget, Fence};
pub use execute::{Compute, ComputedCells, FileReads, execute, execute_computing, execute_while, plan};
pub use file_set::{FileSet, KnownFile};
pub use footer_index::{index_in_footer, stored_header};
pub use guards::GuardedRange;
pub use mender::OtherCopies;
pub use objects::{copies_of_objects, read_objects};
pub use options::{LoadFailure, LoadOptions, LoadStats, ReadLimits};
pub use stored_file::StoredFile;
pub use verify::{Damage, VerifyProgress, VerifyReport, verify};
