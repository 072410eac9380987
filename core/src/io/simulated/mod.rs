//! A file system in memory, for tests: deterministic, made of inodes, with faults, kills and a log
//! of everything that was done.
//!
//! Used by the tests of the manager and by the crash-state enumerator (`stepwell-tests`); compiled
//! with the feature `test-support` only.
//!
//! * Directories are inodes with entries, files are inodes with bytes. A rename edits the entries
//!   of one directory and nothing else: handles, locks and leases follow their inode. (A model made
//!   of paths misses whole classes of bugs.)
//! * [`SimDisk`] is one *process*'s view of the file system. [`SimDisk::process`] gives another
//!   process the same file system; [`SimDisk::kill`] is `kill -9`: every later call of that process
//!   fails, its locks are gone, all completed effects stay.
//! * Every operation is counted, may be made to fail ([`Fault`]), and calls the hook before and
//!   after (interleavings).
//! * Effects are recorded in a [`Log`], from which the enumerator builds what a power cut could
//!   have left ([`Image`]).
//! * Transfers of a queue take effect when they complete, in submission order or in a seeded
//!   permutation of it.
//!
//! Not modelled: permissions, hard links, timestamps, directories that move to another parent
//! (EXDEV; files may).

mod context;
mod disk;
mod faults;
mod handles;
mod image;
mod inodes;
mod log;
mod queue;
#[cfg(test)]
mod tests;
mod world;

pub use context::{Hook, Moment, Operation};
pub use disk::SimDisk;
pub use faults::{Action, Fault, OperationKind};
pub use image::{Image, ImageNode, content_hash, mix};
pub use inodes::{Inode, Inodes};
pub use log::{Log, Op, Record};

/// Number of an inode.
pub type Ino = u64;

/// The inode of the file system's root directory.
pub const ROOT: Ino = 1;

/// The errno of all calls of a killed process (ESHUTDOWN). No file system returns it.
pub const KILLED: i32 = libc::ESHUTDOWN;
