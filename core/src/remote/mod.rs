//! Object stores behind the traits of [`crate::io`]: a prefix is a directory, an object is a file.
//!
//! | module | what it holds |
//! |---|---|
//! | [`store`] | the requests to a store |
//! | [`disk`] | a store as a disk |
//! | `cloud` | stores of clouds (feature `remote`) |
//! | `dir` | a prefix as a directory |
//! | `file` | an object that is read, or uploaded in parts |
//! | [`probe`] | tries a store |
//! | `queue` | reads and uploads in flight |
//! | `simulated` | a store in memory, for tests |
//!
//! A store differs from a file system:
//!
//! * An object is durable and visible when the store has answered. Nothing is to be synced.
//! * It has no directories: they are there while an object is below them.
//! * It has no locks.
//! * It cannot rename, append, or overwrite a part of an object. Such calls fail with EOPNOTSUPP.
//!   A root in a store has a ledger in the place of renames, which the manager keeps.

#[cfg(feature = "remote")]
pub mod cloud;
mod dir;
pub mod disk;
mod file;
pub mod probe;
mod queue;
#[cfg(any(test, feature = "test-support"))]
pub mod simulated;
pub mod store;
#[cfg(test)]
mod tests;

pub use disk::{StoreDisk, StoreOptions};
pub use store::{CreateOutcome, Listed, ObjectFacts, PartTag, Store, UploadId};
