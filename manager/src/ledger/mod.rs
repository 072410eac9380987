//! The ledger of a root in an object store. It says what the names of the root stand for. A store
//! cannot rename, so a step is committed by one small object: an entry of the ledger.
//!
//! Entries have numbers. Each is created only if it is absent, and never written again. **The
//! highest entry is the truth**: it has all names of the root. Each change of the root (commit,
//! retire, rewind, take-over) is one entry, so nobody sees half of it.
//!
//! | module | what it holds |
//! |---|---|
//! | [`entry`] | an entry, and the changes that lead from one to the next |
//! | [`append`] | adds an entry, whatever the store answers |
//! | `client` | reads and appends entries in a store |
//! | `root_dir`, `step_dir` | a root and its steps as directories, for the rest of the manager |
//! | [`disk`] | a store as the disk of a manager |
//!
//! The outcome of a write is never taken from a store's answer alone. An answer may be lost, and a
//! write may land minutes after its client gave up. A retry may then meet its own object: "it
//! exists" does not say whose it is. So each entry has a random number, and is read back.
//!
//! Decision 026 has the protocol, and `model_tests.rs` tries every
//! order of events.

pub mod append;
mod client;
pub mod disk;
pub mod entry;
#[cfg(test)]
mod model_tests;
mod root_dir;
mod step_dir;

pub use client::LedgerPatience;
pub use disk::LedgerDisk;

pub use append::{Append, AppendVerdict, Next, PutOutcome, Request, StoreAnswer};
pub use entry::{Change, Entry, Named};
