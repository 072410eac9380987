//! Steps over time: save, commit, retention, recovery.
//!
//! ```text
//! save ─policy─▶ items, chunks ─capture (caller's thread)─▶ slots ─persister─▶ data files ─commit machine─▶ step_N ─▶ retention
//! ```
//!
//! | module | what it holds |
//! |---|---|
//! | [`manager`] | the manager of one root |
//! | [`singular`] | one state under one path |
//! | [`guest`] | the deletion of checkpoints that another library names |
//! | [`copy`] | verified copies of checkpoints |
//! | [`convert`] | files of other formats, made from checkpoints |
//! | [`ForeignReading`] | files of other libraries, and their checksums |
//! | [`Reader`], [`checkpoint`] | files opened for reading; one step, leased |
//! | [`save`] | one save: its preparation, its run, its handle |
//! | [`state`] [`options`] [`environment`] | the inputs |
//! | [`save_policy`] [`retention`] [`carry_queue`] [`step_name`] [`directory_layout`] | pure: the steps to save, to keep and to carry, all names |
//! | [`commit`] | the commit machine and every rename |
//! | [`writer_heartbeat`] [`discovery`] [`lease`] [`recovery`] [`repair`] [`retire`] [`spares`] [`metrics`] [`traces`] [`root`] | the consistency of a root |
//! | [`ledger`] | commits in an object store |
//! | `machines` | a root on the local disks of several machines |
//! | [`coordination`] | the agreement of ranks |
#![forbid(unsafe_code)]

mod adopted_step;
pub mod carry_queue;
pub mod checkpoint;
pub mod commit;
mod compressed_copy;
mod control;
pub mod convert;
pub mod coordination;
pub mod copy;
mod delete_tree;
pub mod directory_layout;
pub mod discovery;
pub mod environment;
pub mod error;
mod foreign;
mod foreign_reading;
mod guard;
pub mod guest;
pub mod lease;
pub mod ledger;
mod machines;
pub mod manager;
pub mod metrics;
mod ocdbt;
pub mod options;
mod periodic;
mod reader;
pub mod recovery;
mod removals;
pub mod repair;
pub mod retention;
pub mod retire;
pub mod root;
mod runs;
pub mod save;
pub mod save_policy;
#[cfg(test)]
mod scale_tests;
mod sidecars;
pub mod singular;
pub mod spares;
pub mod state;
pub mod step_name;
mod stored_index;
pub mod traces;
pub mod writer_heartbeat;

pub use adopted_step::AdoptedStep;
pub use carry_queue::TierRule;
pub use checkpoint::Checkpoint;
pub use environment::{Clock, Environment, Rng};
pub use error::{Advice, Error, Result};
pub use foreign::{
    Archive, StreamPlace, ZipDirectory, archives, compressed_archives, msgpack, npy_headers, read_foreign,
    read_foreign_ranges,
};
pub use foreign_reading::{ForeignFiles, ForeignReading};
pub use manager::{Decision, Exists, Hold, Manager, Ready, SaveRequest, Ticket, TierPlace, TierReport};
pub use ocdbt::ocdbt_entries;
pub use options::{FilesPer, OnSaveError, Options, WritersPer};
pub use reader::{ReadFailure, Reader};
pub use retention::{Mode, Retention};
pub use save::{Outcome, Refusal, Save, Stats, Streams};
pub use save_policy::SavePolicy;
pub use state::{LeafSource, StateSource};
pub use step_name::StepName;
